//! File systems that only look like a drive, and mounts that take something away.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use beeline::core::plan::DirectIo;
use beeline::storage::{File, Prober, StorageRoute, WholeFile};

use crate::harness::{
    SIZE, bytes, cold_and_warm, facts, file_in, is_root, mount, open_routes, run_child,
    run_with_own_mounts,
};
use crate::support::{open, write};

/// Runs `child` with mounts of its own, as root.
fn check(child: &str) {
    if !is_root() {
        return println!("SKIP root ({child})");
    }
    run_with_own_mounts(child);
}

/// Mounts a file system without a drive on a new folder.
fn mounted(kind: &str) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["-t", kind, "beeline-test"].map(OsStr::new);
    let done = mount(&[&arguments[..], &[folder.path().as_os_str()]].concat());
    if !done {
        println!("SKIP {kind}");
    }
    done.then_some(folder)
}

#[test]
fn tmpfs_is_memory() {
    check("tmpfs");
}

pub(crate) fn tmpfs() {
    memory("tmpfs");
}

#[test]
fn ramfs_is_memory() {
    check("ramfs");
}

pub(crate) fn ramfs() {
    memory("ramfs");
}

fn memory(kind: &str) {
    let Some(folder) = mounted(kind) else { return };
    let path = file_in(folder.path());
    let file = open(&path);
    assert!(file.facts().memory_backed && file.facts().file_system == kind, "{file:?}");
    assert!(matches!(file.facts().direct, DirectIo::No(..)), "{file:?}");
    assert_eq!(file.prober(), Prober::Memory);
    assert_eq!(open_routes(&path), [StorageRoute::MappedPageCache, StorageRoute::PageCache]);
    let (cold, warm) = cold_and_warm(&path);
    assert_eq!(cold, ["page-cache memory-backed"]);
    assert_eq!(warm, cold);
    whole_file(folder.path());
}

/// Writes a whole file over an old one.
fn whole_file(folder: &Path) {
    let path = write(folder, "whole", b"old");
    let whole = WholeFile::create(&path, 1 << 20, 0o644).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    whole.commit(true).unwrap();
    assert_eq!(fs::read(&path).unwrap().len(), 1 << 20);
    let left = fs::read_dir(folder)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().contains("beeline"));
    assert_eq!(left.count(), 0);
}

#[test]
fn an_overlay_is_read_honestly_below_and_above() {
    check("overlay");
}

pub(crate) fn overlay() {
    let base = tempfile::tempdir_in("/var/tmp").unwrap();
    let folder = |name: &str| {
        let path = base.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    };
    let (lower, upper, work, merged) =
        (folder("lower"), folder("upper"), folder("work"), folder("merged"));
    write(&lower, "below", &bytes());
    write(&lower, "copied-up", &bytes());
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.display(),
        upper.display(),
        work.display()
    );
    let options = ["-t", "overlay", "overlay", "-o", &options].map(OsStr::new);
    if !mount(&[&options[..], &[merged.as_os_str()]].concat()) {
        return println!("SKIP overlayfs");
    }
    drop(fs::OpenOptions::new().append(true).open(merged.join("copied-up")).unwrap());
    assert!(upper.join("copied-up").exists() && !upper.join("below").exists());
    for name in ["below", "copied-up"] {
        let path = merged.join(name);
        let file = open(&path);
        assert_eq!(file.facts().file_system, "overlayfs");
        assert!(!file.facts().memory_backed);
        // The overlay's own page cache is always empty, so cachestat would call all files cold.
        assert_ne!(file.prober(), Prober::CacheStat, "{name}");
        // Where this user may ask below, the answer must come through.
        let below = open(&lower.join(name)).prober() == Prober::CacheStat;
        assert!(!below || file.prober() != Prober::Unknown, "{file:?}");
        let routes = open_routes(&path);
        let direct = matches!(file.facts().direct, DirectIo::Aligned { .. });
        assert_eq!(routes.contains(&StorageRoute::Direct), direct, "{}", facts(&path));
        assert!(routes.len() >= 2, "{routes:?}");
        let (cold, warm) = cold_and_warm(&path);
        match file.prober() {
            Prober::NoWait | Prober::Mincore if direct => {
                assert!(cold.iter().all(|part| part.ends_with(" not-resident")), "{cold:?}");
                assert_eq!(warm, ["page-cache resident"]);
            }
            _ => assert!(cold.iter().chain(&warm).all(|part| part.starts_with("page-cache "))),
        }
    }
    whole_file(&merged);
}

#[test]
fn a_read_only_mount_is_read_and_not_written() {
    check("read-only");
}

pub(crate) fn read_only() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = file_in(folder.path());
    let place = folder.path().as_os_str();
    let bind = mount(&[OsStr::new("--bind"), place, place]);
    if !bind || !mount(&[OsStr::new("-o"), OsStr::new("remount,ro,bind"), place]) {
        return println!("SKIP read-only mount");
    }
    let file = open(&path);
    let expected = if file.facts().memory_backed { 2 } else { 4 };
    assert_eq!(open_routes(&path).len(), expected, "{file:?}");
    cold_and_warm(&path);
    let error = WholeFile::create(&path, 10, 0o644).unwrap_err();
    assert_eq!(error.errno(), Some(30), "{error:?}");
    assert!(error.hint().is_some_and(|hint| hint.contains("read-write")), "{error:?}");
    assert_eq!(fs::read(&path).unwrap().len(), SIZE);
}

#[test]
fn without_proc_files_are_read_and_written() {
    if !is_root() {
        return println!("SKIP root (no-proc)");
    }
    // Sees to it that /proc is gone before the child starts.
    let script = "umount -l /proc && exec \"$0\" \"$@\"";
    run_child(&["unshare", "--mount", "sh", "-c", script], "no-proc", None);
}

pub(crate) fn no_proc() {
    assert!(!Path::new("/proc/self").exists());
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = file_in(folder.path());
    let file = File::open(&path).unwrap();
    let DirectIo::No(_, why) = &file.facts().direct else { panic!("{file:?}") };
    assert!(why.contains("No such file") || file.facts().memory_backed, "{why}");
    assert_eq!(open_routes(&path), [StorageRoute::MappedPageCache, StorageRoute::PageCache]);
    cold_and_warm(&path);
    whole_file(folder.path());
}
