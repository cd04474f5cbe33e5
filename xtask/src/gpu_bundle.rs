//! One folder that runs on a machine with an NVIDIA driver and no Rust: tests, command, benchmarks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::{Outcome, cargo, output};

/// What one carries to a machine by hand should stay small.
const BUNDLE_BYTES_MAX: u64 = 35 << 20;
/// nccl-tests carry kernels of their own.
const NCCL_BYTES_MAX: u64 = 64 << 20;

/// Test binaries that mean something on another machine.
const TESTS: &[&str] = &["collective", "conformance", "model", "cuda_over_test_libcuda"];

/// Scripts and sources that go along as they are.
const FOLDERS: &[&str] = &["benches/peers", "benches/bundle"];
/// And single files.
const EXTRA: &[&str] = &["dropin/cufile/include/cufile.h", "dropin/cufile/tests/conformance.c"];

/// What a bundle is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    All,
    Cufile,
    Nccl,
}

/// `cargo xtask gpu-bundle [FOLDER]`; `--cufile` for the drop-in libcufile alone, `--nccl` for libnccl and what it is
/// compared with.
pub(crate) fn run(args: &[String]) -> Outcome {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut contents = Contents::All;
    let mut folder = None;
    for arg in args {
        match arg.as_str() {
            "--cufile" => contents = Contents::Cufile,
            "--nccl" => contents = Contents::Nccl,
            other if folder.is_none() => folder = Some(PathBuf::from(other)),
            other => return Err(format!("one folder, please, not '{other}' too")),
        }
    }
    let folder = folder.unwrap_or_else(|| root.join("gpu-bundle"));
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
    if contents == Contents::Nccl {
        return nccl(&root, &folder);
    }
    let binaries = if contents == Contents::Cufile { Vec::new() } else { binaries()? };
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
    check_size(&folder, BUNDLE_BYTES_MAX)
}

/// Our libnccl.so.2, the kernels alone, and programs that run with ours and with another (`benches/bundle/p2p.sh`).
///
/// `BEELINE_NCCL_TESTS` is a folder of nccl-tests' binaries, `BEELINE_CUDA_INCLUDE` one with `cuda.h` and
/// `BEELINE_NCCL_INCLUDE` one with `nccl.h`. What there is none for is left out, and said.
fn nccl(root: &Path, folder: &Path) -> Outcome {
    let fail = |error: std::io::Error| format!("{}: {error}", folder.display());
    let given = |name: &str| std::env::var_os(name).map(PathBuf::from);
    for part in ["lib", "nccl-tests", "ptx"] {
        fs::create_dir(folder.join(part)).map_err(fail)?;
    }
    place(&library("beeline-nccl")?, &folder.join("lib/libnccl.so.2"), &["--strip-unneeded"])?;
    let mut build = cargo();
    build.args(["build", "--release", "--locked", "--package", "beeline-cli"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    let text = output(&mut build)?;
    let command = text.lines().find_map(|line| {
        let message: Value = serde_json::from_str(line).unwrap_or_default();
        message["executable"].as_str().map(PathBuf::from)
    });
    place(&command.ok_or("cargo names no command")?, &folder.join("beeline"), &[])?;
    let all = |from: &Path, into: &str| -> Outcome {
        let failed = |error: std::io::Error| format!("{}: {error}", from.display());
        for entry in fs::read_dir(from).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if let Some(name) = path.file_name().filter(|_| path.is_file()) {
                place(&path, &folder.join(into).join(name), &[])?;
            }
        }
        Ok(())
    };
    all(&root.join("kernels/ptx"), "ptx")?;
    match given("BEELINE_NCCL_TESTS") {
        Some(tests) => all(&tests, "nccl-tests")?,
        None => println!("without nccl-tests: BEELINE_NCCL_TESTS is not set"),
    }
    fs::copy(root.join("benches/bundle/p2p.sh"), folder.join("p2p.sh")).map_err(fail)?;
    let (cuda, nccl) = (given("BEELINE_CUDA_INCLUDE"), given("BEELINE_NCCL_INCLUDE"));
    for (source, program, includes) in [
        ("kernels/bench/main.cpp", "kernels-bench", [&cuda, &cuda]),
        ("kernels/bench/processes.cpp", "nccl-tests/processes", [&cuda, &nccl]),
        ("kernels/bench/order.cpp", "nccl-tests/order", [&cuda, &nccl]),
    ] {
        match includes {
            [Some(first), Some(second)] => {
                program_over_stubs(&root.join(source), [first, second], &folder.join(program))?;
            }
            _ => println!(
                "without {program}: BEELINE_CUDA_INCLUDE or BEELINE_NCCL_INCLUDE is not set"
            ),
        }
    }
    check_size(folder, NCCL_BYTES_MAX)
}

/// Compiles a program of one source that finds the driver, and a libnccl.so.2, where it runs: here it is linked with
/// libraries of these names that define what it asks of them, and do nothing.
fn program_over_stubs(source: &Path, includes: [&PathBuf; 2], program: &Path) -> Outcome {
    let work = program.with_extension("work");
    let fail = |error: std::io::Error| format!("{}: {error}", work.display());
    fs::create_dir_all(&work).map_err(fail)?;
    let object = work.join("program.o");
    let mut compile = Command::new("c++");
    compile.args(["-O2", "-std=c++17", "-w", "-c"]);
    compile.args(includes.iter().flat_map(|folder| [Path::new("-I"), folder]));
    output(compile.arg(source).arg("-o").arg(&object))?;
    let asked = output(Command::new("nm").args(["-u", "-P"]).arg(&object))?;
    let asked: Vec<&str> = asked.lines().filter_map(|line| line.split(' ').next()).collect();
    let mut link = Command::new("c++");
    link.arg(&object).arg("-o").arg(program).args(["-pthread", "-Wl,--no-as-needed"]);
    for (prefix, library) in [("cu", "libcuda.so.1"), ("nccl", "libnccl.so.2")] {
        let own: Vec<&&str> = asked.iter().filter(|name| name.starts_with(prefix)).collect();
        if own.is_empty() {
            continue;
        }
        let text: String = own.iter().map(|name| format!("void {name}(void) {{}}\n")).collect();
        let (code, stub) = (work.join(format!("{prefix}.c")), work.join(library));
        fs::write(&code, text).map_err(fail)?;
        let mut build = Command::new("cc");
        build.args(["-shared", "-fPIC", "-w"]).arg(format!("-Wl,-soname,{library}"));
        output(build.arg(&code).arg("-o").arg(&stub))?;
        link.arg(stub);
    }
    output(link.args(["-Wl,--as-needed", "-latomic", "-ldl"]))?;
    let _ = Command::new("strip").arg(program).status();
    fs::remove_dir_all(&work).map_err(fail)
}

/// Copies a file that programs run or load, without what only a debugger reads.
fn place(from: &Path, to: &Path, strip: &[&str]) -> Outcome {
    fs::copy(from, to).map_err(|error| format!("{}: {error}", from.display()))?;
    if to.extension().is_none_or(|extension| extension != "ptx") {
        // Without strip the bundle is only larger.
        let _ = Command::new("strip").args(strip).arg(to).status();
    }
    Ok(())
}

/// Builds `package` and answers the shared library that it is.
fn library(package: &str) -> Result<PathBuf, String> {
    let mut build = cargo();
    build.args(["build", "--release", "--locked", "--package", package]);
    build.args(["--message-format", "json-render-diagnostics"]);
    let text = output(&mut build)?;
    let target = package.replace('-', "_");
    let is_library = |line: &str| {
        let message: Value = serde_json::from_str(line).unwrap_or_default();
        let ours = message["target"]["name"].as_str() == Some(target.as_str());
        let file = message["filenames"][0].as_str().filter(|file| ours && file.ends_with(".so"));
        file.map(PathBuf::from)
    };
    text.lines().find_map(is_library).ok_or_else(|| format!("cargo names no library of {package}"))
}

/// The drop-in library under both names that programs load it by, and the C programs that run over it.
fn cufile(root: &Path, folder: &Path) -> Outcome {
    let library = library("beeline-cufile")?;
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
        ("benches/peers/read_ceiling.c", "read_ceiling"),
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

fn check_size(folder: &Path, most: u64) -> Outcome {
    let mut total = 0;
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).map_err(|error| error.to_string())? {
            let path = entry.map_err(|error| error.to_string())?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let len = path.metadata().map_err(|error| error.to_string())?.len();
            let name = path.strip_prefix(folder).unwrap_or(&path);
            if name.extension().is_none_or(|extension| extension != "ptx") {
                println!("{len:>10}  {}", name.display());
            }
            total += len;
        }
    }
    println!("{total:>10}  in all, {most} at most");
    if total > most {
        return Err(format!("the bundle of {total} bytes is larger than {most}"));
    }
    Ok(())
}
