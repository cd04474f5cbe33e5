//! Users who may read a file and nothing more.

use std::path::Path;

use beeline::storage::{Prober, StorageRoute};

use crate::harness::{
    file_in, folder_for_all, is_root, open_routes, parents_file, read, run_as_nobody,
};
use crate::support::{engine, open, sim};

#[test]
fn a_reader_who_owns_nothing_is_told_the_truth_about_residency() {
    if !is_root() {
        return println!("SKIP root (a file of another user)");
    }
    let folder = folder_for_all();
    let path = file_in(folder.path());
    run_as_nobody("reader", Some(&path));
}

pub(crate) fn reader() {
    let path = parents_file();
    assert!(std::fs::OpenOptions::new().write(true).open(&path).is_err(), "not its own file");
    let file = open(&path);
    if file.facts().memory_backed {
        return println!("SKIP drive (/var/tmp lies in memory)");
    }
    // cachestat is for owners (since Linux 6.14), mincore calls every page resident.
    let asked = file.prober();
    if asked == Prober::CacheStat {
        println!("SKIP cachestat-for-owners (this kernel lets every reader ask)");
    } else {
        assert_eq!(asked, Prober::NoWait, "{file:?}");
    }
    let gpu = sim(1 << 28);
    let engine = engine(&gpu);
    let cold = read(&gpu, &engine, &path, None).unwrap();
    let direct = |route| matches!(route, StorageRoute::Direct | StorageRoute::ThreadPool);
    assert!(cold.routes.iter().all(|part| direct(part.route)), "{cold:?}");
    assert!(cold.routes.iter().all(|part| part.why.as_str() == "not-resident"), "{cold:?}");
    std::fs::read(&path).unwrap();
    let warm = read(&gpu, &engine, &path, None).unwrap();
    assert!(warm.routes.iter().all(|part| part.route == StorageRoute::PageCache), "{warm:?}");
    assert_eq!(open_routes(&path).len(), 4);
}

#[test]
fn the_setting_that_turns_io_uring_off_leaves_threads() {
    const SETTING: &str = "/proc/sys/kernel/io_uring_disabled";
    let Ok(now) = std::fs::read_to_string(SETTING) else {
        return println!("SKIP io_uring_disabled");
    };
    let folder = folder_for_all();
    let path = file_in(folder.path());
    if now.trim() != "0" {
        return run_as_nobody("io-uring-disabled", Some(&path));
    }
    // It rules the whole machine, so it is changed only where the machine's owner says so.
    if std::env::var_os("BEELINE_TEST_SYSCTL").is_none() || !is_root() {
        return println!(
            "SKIP io_uring_disabled (BEELINE_TEST_SYSCTL=1 as root changes it for a moment)"
        );
    }
    let _restore = Restore { setting: Path::new(SETTING), value: now };
    std::fs::write(SETTING, "1").unwrap();
    run_as_nobody("io-uring-disabled", Some(&path));
}

struct Restore<'a> {
    setting: &'a Path,
    value: String,
}

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        let _ = std::fs::write(self.setting, &self.value);
    }
}

pub(crate) fn io_uring_disabled() {
    denied(&parents_file());
}

/// What must hold where the kernel refuses io_uring: a reason, no direct route, the same bytes.
pub(crate) fn denied(path: &Path) {
    let gpu = sim(1 << 28);
    let engine = engine(&gpu);
    let error = read(&gpu, &engine, path, Some(StorageRoute::Direct)).unwrap_err();
    assert!(error.is_no_route(), "{error:?}");
    let code = error.reasons()[0].code.as_str();
    assert!(matches!(code, "io-uring-denied" | "io-uring-absent"), "{error:?}");
    let cold = read(&gpu, &engine, path, None).unwrap();
    assert!(cold.routes.iter().all(|part| part.route == StorageRoute::ThreadPool), "{cold:?}");
    let open = open_routes(path);
    assert!(!open.contains(&StorageRoute::Direct) && open.len() == 3, "{open:?}");
}
