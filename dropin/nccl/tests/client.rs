//! The library under a C program, on simulated devices behind the test driver; and what it exports.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Builds a package's library into the folder this program came from.
fn built(package: &str, file: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--package", package, "--manifest-path"]);
    run(command.arg(&manifest).arg("--target-dir").arg(target));
    target.join("debug").join(file)
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{command:?}: {text}");
    output
}

fn has(tool: &str) -> bool {
    let there = Command::new(tool).arg("--version").output().is_ok();
    if !there {
        println!("SKIP {tool}");
    }
    there
}

fn library() -> PathBuf {
    built("beeline-nccl", "libbeeline_nccl.so")
}

/// A folder with the library, and the driver of simulated devices; `None` with a SKIP line where nothing compiles C.
fn folder() -> Option<tempfile::TempDir> {
    if !has("cc") {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let link = |name: &str, to: PathBuf| {
        std::os::unix::fs::symlink(to, folder.path().join(name)).unwrap();
    };
    link("libnccl.so.2", library());
    link("libcuda.so.1", built("beeline-test-libcuda", "libbeeline_test_libcuda.so"));
    Some(folder)
}

#[test]
fn a_c_program_runs_unchanged() {
    let Some(folder) = folder() else { return };
    for devices in [2, 4] {
        client(folder.path(), devices, "staged");
    }
    // On the kernels, which the devices run on the CPU where there was a C++ compiler to build them.
    if has("c++") {
        for devices in [2, 3, 8] {
            client(folder.path(), devices, "auto");
        }
    }
}

/// What programs do wrong, on both paths.
#[test]
fn a_hostile_program_is_refused() {
    let Some(folder) = folder() else { return };
    let program = compiled(folder.path(), "hostile.c", &[]);
    // The same library once more, which nothing has loaded.
    let second = folder.path().join("second.so");
    std::fs::copy(library(), &second).unwrap();
    for path in ["staged", "auto"] {
        if path == "auto" && !has("c++") {
            continue;
        }
        let mut command = on_devices(&program, folder.path(), 2, path);
        let output = run(command.arg(&second).env("BEELINE_COMM_TIMEOUT", "10"));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.ends_with("passed\n"), "{path}: {text}");
    }
}

/// The program for a number of devices, compiled and run.
fn client(folder: &Path, devices: u32, path: &str) {
    let program = compiled(folder, "program.c", &[&format!("-DN={devices}")]);
    let output = run(on_devices(&program, folder, devices, path)
        .env("BEELINE_LOG", "info")
        .env("BEELINE_TEST_CALLS", if path == "staged" { "1000" } else { "5" }));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(path == "staged" || !told.contains("go through host memory"), "{told}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.ends_with("passed\n"), "{devices} devices, {path}: {text}");
}

fn compiled(folder: &Path, source: &str, flags: &[&str]) -> PathBuf {
    let program = folder.join(source).with_extension("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    run(Command::new("cc")
        .args(["-O1", "-pthread", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .args(flags)
        .arg(source)
        .arg("-L")
        .arg(folder)
        .args(["-l:libnccl.so.2", "-l:libcuda.so.1", "-ldl"]));
    program
}

fn on_devices(program: &Path, folder: &Path, devices: u32, path: &str) -> Command {
    let mut command = Command::new(program);
    command
        .env("LD_LIBRARY_PATH", folder)
        .env_remove("BEELINE_CUDA_LIBRARY")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("BEELINE_TEST_CUDA_DEVICES", devices.to_string())
        .env("BEELINE_COMM_PATH", path);
    command
}

/// Exactly the committed list, each with its twin, under the right name.
#[test]
fn the_library_exports_the_list() {
    if !has("nm") || !has("readelf") {
        return;
    }
    let path = library();
    let output = run(Command::new("nm").args(["-D", "--defined-only"]).arg(&path));
    let found: BTreeSet<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .map(str::to_owned)
        .collect();
    let list = include_str!("../symbols.txt").lines().filter(|line| line.starts_with("nccl"));
    let expected: BTreeSet<String> =
        list.flat_map(|name| [name.to_owned(), format!("p{name}")]).collect();
    assert_eq!(expected.len(), 2 * 51);
    assert_eq!(found, expected);
    let dynamic = run(Command::new("readelf").arg("-d").arg(&path));
    assert!(String::from_utf8_lossy(&dynamic.stdout).contains("[libnccl.so.2]"));
}
