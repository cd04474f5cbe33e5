//! Developer tasks of Beeline: `cargo xtask TASK`.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr)] // A task speaks to the person who ran it.

mod demo;
mod gpu_bundle;
mod kernels;
mod licences;
mod mutate;
mod rig;
mod sanitize;
mod skips;

use std::process::{Command, ExitCode};

/// What a task answers: nothing, or what went wrong.
type Outcome = Result<(), String>;

/// Name, usage, flags, function. A flag that is not among them is refused before the task runs.
type Task = (&'static str, &'static str, &'static [&'static str], fn(&[String]) -> Outcome);

const TASKS: &[Task] = &[
    ("demo", "[MIB]: make a sharded model and load it with verification", &[], demo::run),
    (
        "gpu-bundle",
        "[--cufile|--nccl] [FOLDER]: one folder for a machine with a GPU and no Rust",
        &["--cufile", "--nccl"],
        gpu_bundle::run,
    ),
    (
        "kernels",
        "[--check]: compile the kernels to PTX, or compare it and run them on CPU threads",
        &["--check"],
        kernels::run,
    ),
    (
        "licences",
        ": check the licence of every dependency against the allowed ones",
        &[],
        licences::run,
    ),
    (
        "mutate",
        "[NAME..]: take one check out at a time; a test must fail. --ptx FOLDER: write such kernels",
        &["--ptx"],
        mutate::run,
    ),
    (
        "rig",
        "[TEST] [--full]: boot the test machine and run one of its tests",
        &["--full"],
        rig::run_rig,
    ),
    (
        "sanitize",
        "[address|thread]: tests of beeline-sys and verbs under a sanitizer",
        &[],
        sanitize::run,
    ),
    (
        "skips",
        "LOG LIST..: compare the SKIP lines of a test log with the committed lists",
        &[],
        skips::run,
    ),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let task = args.first().and_then(|name| TASKS.iter().find(|(known, ..)| known == name));
    let Some((name, what, flags, task)) = task else {
        eprintln!("usage: cargo xtask TASK");
        for (name, what, ..) in TASKS {
            eprintln!("  {name} {what}");
        }
        return ExitCode::from(2);
    };
    let args = args.get(1..).unwrap_or_default();
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        println!("usage: cargo xtask {name} {what}");
        return ExitCode::SUCCESS;
    }
    if let Some(flag) =
        args.iter().find(|arg| arg.starts_with('-') && !flags.contains(&arg.as_str()))
    {
        eprintln!("error: '{flag}' is no flag of {name}\nusage: cargo xtask {name} {what}");
        return ExitCode::from(2);
    }
    match task(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The cargo that runs this task.
fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs `command` and answers its output, or its failure.
fn output(command: &mut Command) -> Result<String, String> {
    let out = command.output().map_err(|error| format!("cannot run {command:?}: {error}"))?;
    if !out.status.success() {
        return Err(format!(
            "{command:?}: {}\n{}",
            out.status,
            String::from_utf8_lossy(&out.stderr)
        ));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Runs `command` with its output on the terminal.
fn run(command: &mut Command) -> Outcome {
    let status = command.status().map_err(|error| format!("cannot run {command:?}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}")) }
}
