//! `beeline copy`.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::support::{
    Run, SIGNALS_AS_USUAL, beeline, beeline_with, command_by, folder, keys, names, pattern, same,
    sparse,
};

/// Large enough that a copy by one thread through two slots is still under way when it is disturbed.
const LONG: u64 = 2 << 30;

#[test]
fn copies_of_any_size_are_byte_identical() {
    let folder = folder();
    for size in [0, 1, 4097, (8 << 20) + 3] {
        let source = folder.path().join("source");
        let target = folder.path().join("the target");
        fs::write(&source, pattern(size, usize::try_from(size).unwrap())).unwrap();
        let (source, target) = (source.to_str().unwrap(), target.to_str().unwrap());
        let json = beeline(&["copy", source, target, "--via", "sim:0", "--json"]).ok().json();
        assert_eq!((&json["bytes"], &json["simulated"]), (&size.into(), &true.into()));
        assert!(same(Path::new(source), Path::new(target)), "{size} bytes");
    }
}

#[test]
fn a_file_larger_than_two_windows_goes_through_bounded_device_memory() {
    let folder = folder();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    // More than one window of the default size; and, on a device of 64 MiB, many.
    sparse(&source, (300 << 20) + 12_345);
    for (memory, window) in [("16G", 256 << 20), ("64M", 32 << 20)] {
        let env = [("BEELINE_SIM_MEMORY", memory)];
        let args = ["copy", source.to_str().unwrap(), target.to_str().unwrap(), "--via", "sim:0"];
        let args = [&args[..], &["--json", "--no-sync"]].concat();
        let json = beeline_with(&env, &args).ok().json();
        assert_eq!(json["window_bytes"], window);
        assert!(same(&source, &target), "{memory}");
        fs::remove_file(&target).unwrap();
    }
}

#[test]
fn the_answer_of_a_copy_has_the_documented_keys_and_says_simulated() {
    let folder = folder();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    fs::write(&source, pattern(5, 50_000)).unwrap();
    let (source, target) = (source.to_str().unwrap(), target.to_str().unwrap());
    let run = beeline(&["copy", source, target, "--via", "sim:0"]).ok();
    for text in ["50000 bytes", "through sim:0 (simulated)", "read", "written", "CPU-s/GB"] {
        assert!(run.stdout.contains(text), "{text:?}: {run:?}");
    }
    let json = beeline(&["copy", source, target, "--via", "sim:0", "--json"]).ok().json();
    let expected = [
        "bytes",
        "command",
        "cpu_seconds",
        "cpu_seconds_per_gb",
        "device",
        "gb_per_s",
        "read_routes",
        "seconds",
        "simulated",
        "source",
        "target",
        "window_bytes",
        "write_routes",
    ];
    assert_eq!(keys(&json), expected);
    assert_eq!(json["source"]["path"], source);
    assert_eq!(json["target"]["path"], target);
}

#[test]
fn a_folder_as_target_gets_a_file_of_the_same_name() {
    let folder = folder();
    let source = folder.path().join("source");
    let inside = folder.path().join("in side");
    fs::create_dir(&inside).unwrap();
    fs::write(&source, b"bytes").unwrap();
    beeline(&["copy", source.to_str().unwrap(), inside.to_str().unwrap(), "--via", "sim:0"]).ok();
    assert_eq!(names(&inside), ["source"]);
    assert!(same(&source, &inside.join("source")));
}

#[test]
fn a_copy_has_the_permission_bits_of_its_source() {
    let folder = folder();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    for mode in [0o640, 0o751, 0o444] {
        fs::write(&source, b"bytes").unwrap();
        fs::set_permissions(&source, fs::Permissions::from_mode(mode)).unwrap();
        beeline(&["copy", source.to_str().unwrap(), target.to_str().unwrap(), "--via", "sim:0"])
            .ok();
        assert_eq!(fs::metadata(&target).unwrap().mode() & 0o7777, mode);
        fs::remove_file(&source).unwrap();
    }
}

#[test]
fn a_file_is_never_copied_onto_itself() {
    let folder = folder();
    let source = folder.path().join("source");
    fs::write(&source, b"bytes").unwrap();
    let (soft, hard) = (folder.path().join("soft"), folder.path().join("hard"));
    symlink(&source, &soft).unwrap();
    fs::hard_link(&source, &hard).unwrap();
    for target in [&source, &soft, &hard, &folder.path().to_path_buf()] {
        let args = ["copy", source.to_str().unwrap(), target.to_str().unwrap(), "--via", "sim:0"];
        let run = beeline(&[&args[..], &["--json"]].concat());
        assert_eq!(run.code, Some(2), "{run:?}");
        assert_eq!(run.json()["error"]["code"], "same-file");
        assert_eq!(fs::read(&source).unwrap(), b"bytes");
    }
}

#[test]
fn a_target_that_is_no_file_is_refused() {
    let folder = folder();
    let source = folder.path().join("source");
    fs::write(&source, b"bytes").unwrap();
    let run = beeline(&["copy", source.to_str().unwrap(), "/dev/null", "--via", "sim:0"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    let nowhere = folder.path().join("none/target");
    let run = beeline(&["copy", source.to_str().unwrap(), nowhere.to_str().unwrap()]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert_eq!(names(folder.path()), ["source"]);
}

#[test]
fn a_limit_of_file_sizes_is_an_error_and_the_old_file_stays() {
    let folder = folder();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    sparse(&source, 3 << 20);
    fs::write(&target, b"old").unwrap();
    // The device comes first, and is a file of its own; then the target.
    for (memory, what) in [("4M", "simulated device memory"), ("1M", "reserve")] {
        let run: Run = std::process::Command::new("bash")
            .args(["-c", "ulimit -f 2048 && exec \"$0\" \"$@\""])
            .args([env!("CARGO_BIN_EXE_beeline"), "copy", "--via=sim:0", "--json"])
            .args([&source, &target])
            .env("BEELINE_SIM_MEMORY", memory)
            .output()
            .unwrap()
            .into();
        assert_eq!(run.code, Some(1), "{run:?}");
        let error = &run.json()["error"];
        assert_eq!(error["code"], "io-failed");
        assert!(error["message"].as_str().unwrap().contains(what), "{run:?}");
        assert!(error["hint"].as_str().unwrap().contains("ulimit -f"), "{run:?}");
        assert_eq!(names(folder.path()), ["source", "target"]);
        assert_eq!(fs::read(&target).unwrap(), b"old");
    }
}

#[test]
fn a_path_that_can_name_no_file_is_refused_before_a_byte_moves() {
    let folder = folder();
    let source = folder.path().join("source");
    fs::write(&source, b"bytes").unwrap();
    symlink("gone", folder.path().join("link")).unwrap();
    for name in ["new/", "link"] {
        let target = format!("{}/{name}", folder.path().display());
        let args = ["copy", source.to_str().unwrap(), &target, "--via", "sim:0", "--json"];
        let run = beeline(&args);
        assert_eq!(run.code, Some(2), "{run:?}");
        assert_eq!(run.json()["error"]["code"], "refused");
        assert_eq!(names(folder.path()), ["link", "source"]);
    }
}

#[test]
fn a_route_that_cannot_write_leaves_the_old_file() {
    let folder = folder();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    fs::write(&source, b"new").unwrap();
    fs::write(&target, b"old").unwrap();
    let (from, to) = (source.to_str().unwrap(), target.to_str().unwrap());
    let args = ["copy", from, to, "--via=sim:0", "--route=mapped-page-cache", "--json"];
    let run = beeline(&args);
    assert_eq!(run.code, Some(1), "{run:?}");
    let json = run.json();
    assert_eq!(json["error"]["code"], "no-route");
    assert_eq!(json["error"]["reasons"][0]["code"], "mapped-read-only");
    assert_eq!(json["simulated"], true);
    assert_eq!(fs::read(&target).unwrap(), b"old");
}

#[test]
fn a_signal_during_a_copy_leaves_the_old_file_and_nothing_else() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let long = LongCopy::start();
        kill_process(Pid::from_child(&long.child), signal).unwrap();
        let (run, folder) = long.finish();
        assert_eq!(run.code, Some(code), "{run:?}");
        assert_eq!(run.json()["error"]["code"], "cancelled");
        assert_eq!(names(folder.path()), ["source", "target"]);
        assert_eq!(fs::read(folder.path().join("target")).unwrap(), b"old");
    }
}

#[test]
fn a_terminal_that_closes_may_say_so_twice() {
    let long = LongCopy::start();
    for _ in 0..2 {
        kill_process(Pid::from_child(&long.child), Signal::HUP).unwrap();
        // Sent at once, two may become one.
        std::thread::sleep(Duration::from_millis(1));
    }
    let (run, folder) = long.finish();
    assert_eq!(run.code, Some(129), "{run:?}");
    assert_eq!(run.json()["error"]["code"], "cancelled");
    assert_eq!(names(folder.path()), ["source", "target"]);
}

#[test]
fn a_signal_that_was_ignored_from_the_start_stays_ignored() {
    for signal in [Signal::HUP, Signal::INT] {
        let name = if signal == Signal::HUP { "HUP" } else { "INT" };
        let long = LongCopy::start_with(&format!("--ignore-signal={name}"));
        kill_process(Pid::from_child(&long.child), signal).unwrap();
        kill_process(Pid::from_child(&long.child), Signal::TERM).unwrap();
        let run = long.finish().0;
        assert_eq!(run.code, Some(143), "{run:?}");
        // Had the first cancelled, the second would have ended it without a word.
        assert_eq!(run.json()["error"]["code"], "cancelled");
    }
}

#[test]
fn a_source_that_changes_during_a_copy_is_an_error_and_the_old_file_stays() {
    let long = LongCopy::start();
    let source = fs::OpenOptions::new().append(true).open(&long.source).unwrap();
    std::io::Write::write_all(&mut &source, b"more").unwrap();
    let (run, folder) = long.finish();
    assert_eq!(run.code, Some(1), "{run:?}");
    assert_eq!(run.json()["error"]["code"], "file-changed");
    assert_eq!(names(folder.path()), ["source", "target"]);
    assert_eq!(fs::read(folder.path().join("target")).unwrap(), b"old");
}

#[test]
fn a_copy_that_misses_its_deadline_leaves_the_old_file() {
    let folder = folder();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    sparse(&source, LONG);
    fs::write(&target, b"old").unwrap();
    let (from, to) = (source.to_str().unwrap(), target.to_str().unwrap());
    let args = ["copy", from, to, "--via=sim:0", "--timeout=0.05", "--pool=8M", "--json"];
    let run = beeline(&args);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert_eq!(run.json()["error"]["code"], "timeout");
    assert_eq!(names(folder.path()), ["source", "target"]);
    assert_eq!(fs::read(&target).unwrap(), b"old");
}

/// A copy that has begun to write and takes a while.
struct LongCopy {
    folder: tempfile::TempDir,
    source: PathBuf,
    child: Child,
}

impl LongCopy {
    fn start() -> Self {
        Self::start_with(SIGNALS_AS_USUAL)
    }

    /// With signals as this option of `env` sets them.
    fn start_with(signals: &str) -> Self {
        let folder = folder();
        let (source, target) = (folder.path().join("source"), folder.path().join("target"));
        sparse(&source, LONG);
        fs::write(&target, b"old").unwrap();
        let child = command_by("env", &[signals])
            .args(["copy", "--via=sim:0", "--pool=8M", "--threads=1", "--json"])
            .args([&source, &target])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let copy = Self { folder, source, child };
        let until = Instant::now() + Duration::from_secs(60);
        while !copy.has_begun() {
            assert!(Instant::now() < until, "the copy does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        copy
    }

    /// Whether the copy has a file open in the folder that is neither its source nor its old target.
    fn has_begun(&self) -> bool {
        let Ok(open) = fs::read_dir(format!("/proc/{}/fd", self.child.id())) else { return false };
        let place = fs::canonicalize(self.folder.path()).unwrap();
        open.flatten().filter_map(|fd| fs::read_link(fd.path()).ok()).any(|file| {
            file.starts_with(&place) && !file.ends_with("source") && !file.ends_with("target")
        })
    }

    fn finish(self) -> (Run, tempfile::TempDir) {
        (self.child.wait_with_output().unwrap().into(), self.folder)
    }
}
