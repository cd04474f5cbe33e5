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

/// `cargo xtask gpu-bundle [FOLDER]`.
pub(crate) fn run(args: &[String]) -> Outcome {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = args.first().map_or_else(|| root.join("gpu-bundle"), PathBuf::from);
    let fail = |error: std::io::Error| format!("{}: {error}", folder.display());
    if folder.exists() {
        // Only what a run of this task made is removed, whatever folder was named by mistake.
        if !folder.join("COMMIT").is_file() {
            return Err(format!("{} is not a bundle: name another folder", folder.display()));
        }
        fs::remove_dir_all(&folder).map_err(fail)?;
    }
    fs::create_dir_all(&folder).map_err(fail)?;
    for (name, binary) in binaries()? {
        let target = folder.join(&name);
        fs::copy(&binary, &target).map_err(fail)?;
        // Without strip the bundle is only larger; the check below tells.
        let _ = Command::new("strip").arg(&target).status();
    }
    for extra in ["benches/peers/storage.py", "benches/bundle/run.sh"] {
        let name = Path::new(extra).file_name().ok_or("a bundle file without a name")?;
        fs::copy(root.join(extra), folder.join(name)).map_err(fail)?;
    }
    let commit = output(Command::new("git").args(["rev-parse", "HEAD"]).current_dir(&root))?;
    fs::write(folder.join("COMMIT"), commit).map_err(fail)?;
    check_size(&folder)
}

/// Builds everything and answers name and path of what belongs into the bundle.
fn binaries() -> Result<Vec<(String, PathBuf)>, String> {
    let mut found = Vec::new();
    for command in [
        &["build", "--package", "beeline-cli"][..],
        &["bench", "--no-run", "--package", "beeline", "--bench", "storage"],
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
                _ => name == "beeline" || name == "storage",
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
