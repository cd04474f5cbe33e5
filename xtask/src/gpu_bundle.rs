//! One folder that runs on a machine with an NVIDIA driver and no Rust: tests, command, benchmarks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::{Outcome, cargo, output};

/// What one carries to a machine by hand should stay small.
const BUNDLE_BYTES_MAX: u64 = 35 << 20;

/// Test binaries that mean something on another machine.
const TESTS: &[&str] = &["collective", "conformance", "model", "cuda_over_test_libcuda"];

/// Scripts and sources that go along as they are.
const FOLDERS: &[&str] = &["benches/peers", "benches/bundle"];
/// And single files.
const EXTRA: &[&str] = &["dropin/cufile/include/cufile.h", "dropin/cufile/tests/conformance.c"];

/// `cargo xtask gpu-bundle [FOLDER]`, or `cargo xtask gpu-bundle --cufile [FOLDER]` for the drop-in
/// libcufile alone.
pub(crate) fn run(args: &[String]) -> Outcome {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let only_cufile = args.first().is_some_and(|arg| arg == "--cufile");
    let folder = args.get(usize::from(only_cufile));
    let folder = folder.map_or_else(|| root.join("gpu-bundle"), PathBuf::from);
    let fail = |error: std::io::Error| format!("{}: {error}", folder.display());
    if folder.exists() {
        // Only what a run of this task made is removed, whatever folder was named by mistake.
        if !folder.join("COMMIT").is_file() {
            return Err(format!("{} is not a bundle: name another folder", folder.display()));
        }
        fs::remove_dir_all(&folder).map_err(fail)?;
    }
    fs::create_dir_all(&folder).map_err(fail)?;
    // First, so that a run that ends early leaves what the next one knows to be a bundle.
    let commit = output(Command::new("git").args(["rev-parse", "HEAD"]).current_dir(&root))?;
    fs::write(folder.join("COMMIT"), commit).map_err(fail)?;
    let binaries = if only_cufile { Vec::new() } else { binaries()? };
    for (name, binary) in binaries {
        let target = folder.join(&name);
        fs::copy(&binary, &target).map_err(fail)?;
        // Without strip the bundle is only larger; the check below tells.
        let _ = Command::new("strip").arg(&target).status();
    }
    cufile(&root, &folder)?;
    for extra in FOLDERS {
        for entry in fs::read_dir(root.join(extra)).map_err(fail)? {
            let path = entry.map_err(fail)?.path();
            let Some(name) = path.file_name().filter(|_| path.is_file()) else { continue };
            fs::copy(&path, folder.join(name)).map_err(fail)?;
        }
    }
    for extra in EXTRA {
        let name = Path::new(extra).file_name().ok_or("a bundle file without a name")?;
        fs::copy(root.join(extra), folder.join(name)).map_err(fail)?;
    }
    check_size(&folder)
}

/// The drop-in library under both names that programs load it by, and the C programs that run over it.
fn cufile(root: &Path, folder: &Path) -> Outcome {
    let mut build = cargo();
    build.args(["build", "--release", "--locked", "--package", "beeline-cufile"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    let text = output(&mut build)?;
    let is_library = |line: &str| {
        let message: Value = serde_json::from_str(line).unwrap_or_default();
        let ours = message["target"]["name"].as_str() == Some("beeline_cufile");
        let file = message["filenames"][0].as_str().filter(|file| ours && file.ends_with(".so"));
        file.map(PathBuf::from)
    };
    let library = text.lines().find_map(is_library).ok_or("cargo names no libcufile")?;
    let fail = |error: std::io::Error| format!("{}: {error}", folder.display());
    let target = folder.join("libcufile.so.0");
    fs::copy(&library, &target).map_err(fail)?;
    let _ = Command::new("strip").arg("--strip-unneeded").arg(&target).status();
    // One inode under both names.
    fs::hard_link(&target, folder.join("libcufile.so")).map_err(fail)?;
    for (source, name) in [
        ("dropin/cufile/tests/conformance.c", "conformance"),
        ("benches/bundle/cufile_bench.c", "cufile_bench"),
        ("benches/peers/write_ceiling.c", "write_ceiling"),
        ("benches/peers/fork_exit.c", "fork_exit"),
    ] {
        let mut compile = Command::new("cc");
        compile.args(["-std=gnu11", "-O2", "-w"]).arg("-I").arg(root.join("dropin/cufile/include"));
        compile.arg(root.join(source)).arg("-o").arg(folder.join(name)).args(["-ldl", "-lpthread"]);
        output(&mut compile)?;
    }
    Ok(())
}

/// Builds everything and answers name and path of what belongs into the bundle.
fn binaries() -> Result<Vec<(String, PathBuf)>, String> {
    let mut found = Vec::new();
    for command in [
        &["build", "--package", "beeline-cli"][..],
        &["build", "--package", "beeline", "--example", "rdma_gpu"],
        &["bench", "--no-run", "--package", "beeline", "--bench", "storage", "--bench", "verbs"],
        &["test", "--no-run", "--package", "beeline", "--tests"],
    ] {
        let mut build = cargo();
        build.args(command).args(["--locked", "--message-format", "json-render-diagnostics"]);
        if command.first() != Some(&"bench") {
            build.arg("--release");
        }
        let text = output(&mut build)?;
        for line in text.lines() {
            let message: Value = serde_json::from_str(line).unwrap_or_default();
            let Some(path) = message["executable"].as_str() else { continue };
            let name = message["target"]["name"].as_str().unwrap_or_default().to_owned();
            // A benchmark is built like a test; only what `cargo test` built is one here.
            let is_test = command.first() == Some(&"test")
                && message["profile"]["test"].as_bool() == Some(true);
            let wanted = match command.first() {
                Some(&"test") => is_test && TESTS.contains(&name.as_str()),
                _ => ["beeline", "storage", "verbs", "rdma_gpu"].contains(&name.as_str()),
            };
            if wanted {
                let name = if is_test { format!("test-{name}") } else { name };
                found.push((name, PathBuf::from(path)));
            }
        }
    }
    Ok(found)
}

fn check_size(folder: &Path) -> Outcome {
    let mut total = 0;
    for entry in fs::read_dir(folder).map_err(|error| error.to_string())? {
        let entry = entry.map_err(|error| error.to_string())?;
        let len = entry.metadata().map_err(|error| error.to_string())?.len();
        println!("{len:>10}  {}", entry.file_name().to_string_lossy());
        total += len;
    }
    println!("{total:>10}  in all, {BUNDLE_BYTES_MAX} at most");
    if total > BUNDLE_BYTES_MAX {
        return Err(format!("the bundle of {total} bytes is larger than {BUNDLE_BYTES_MAX}"));
    }
    Ok(())
}
