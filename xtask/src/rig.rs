//! The test machine: boots a stock kernel in QEMU and runs one of the rig's tests in it.
//!
//! `cargo xtask rig [TEST] [--full]`: without a test, `interop` (the software NIC against the kernel's
//! `rdma_rxe`) and `ibv` (the suite of verbs over NICs of the kernel's). What the rig needs is made once in `rig/build`; `rig/README.md` tells how and why.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Outcome, cargo, output, run};

/// A test that reaches all of its matrix takes longer than the guest's usual limit.
const FULL_SECONDS: &str = "3600";
const USUAL_SECONDS: &str = "600";

pub(crate) fn run_rig(args: &[String]) -> Outcome {
    let full = args.iter().any(|arg| arg == "--full");
    let named: Vec<&str> =
        args.iter().map(String::as_str).filter(|arg| !arg.starts_with("--")).collect();
    let tests = match named.as_slice() {
        [] => ["interop", "ibv"].as_slice(),
        [_] => &named,
        _ => return Err("one test at a time".into()),
    };
    if let Some(option) = args.iter().find(|arg| arg.starts_with("--") && *arg != "--full") {
        return Err(format!("no option {option}"));
    }
    let rig = root().join("rig");
    for test in tests {
        if !rig.join("guest/tests").join(format!("{test}.sh")).is_file() {
            return Err(format!("no test {test}: there are {}", tests_of(&rig)?));
        }
    }
    if let Err(error) = set_up(&rig) {
        // A machine without apt, root or the network cannot have the rig; CI must not accept it.
        println!("SKIP qemu");
        eprintln!("the rig could not be set up: {error}");
        return Ok(());
    }
    tests.iter().try_for_each(|test| boot(&rig, test, full))
}

/// Builds what a test needs, boots the guest and runs it.
fn boot(rig: &Path, test: &str, full: bool) -> Outcome {
    let programs = match test {
        "speed" => vec![build_named(rig, &["bench", "--no-run", "--bench"], "verbs_bench")?],
        "ibv" => {
            let suite = ["test", "--no-run", "--release", "--test"];
            // As the tests have built it: what it does here does not depend on its speed.
            let command = build(&["build", "-p", "beeline-cli"], "beeline")?;
            vec![build_named(rig, &suite, "verbs_suite")?, command]
        }
        _ => {
            let example = ["build", "--release", "-p", "beeline", "--example", "verbs_agent"];
            vec![build(&example, "verbs_agent")?]
        }
    };
    let seconds = if full { FULL_SECONDS } else { USUAL_SECONDS };
    let mut guest = Command::new("bash");
    guest.arg(rig.join("run.sh")).arg(test).args(programs);
    guest.env("RIG_ARGS", if full { "full" } else { "pairwise" }).env("RIG_TIMEOUT", seconds);
    run(&mut guest)
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn set_up(rig: &Path) -> Outcome {
    let ready = rig.join("build/kernel/.done").is_file()
        && output(Command::new("qemu-system-x86_64").arg("--version")).is_ok();
    if ready { Ok(()) } else { run(Command::new("bash").arg(rig.join("setup.sh"))) }
}

fn tests_of(rig: &Path) -> Result<String, String> {
    let folder = rig.join("guest/tests");
    let entries = std::fs::read_dir(&folder).map_err(|error| format!("{folder:?}: {error}"))?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.path().file_stem()?.to_str().map(str::to_owned))
        .collect();
    names.sort();
    Ok(names.join(", "))
}

/// Builds the library's program `verbs` with `args`; answers where it is, under a name of its own.
fn build_named(rig: &Path, args: &[&str], name: &str) -> Result<PathBuf, String> {
    let built = build(&[args, &["verbs", "-p", "beeline"]].concat(), "verbs")?;
    let folder = rig.join("build/bin");
    let named = folder.join(name);
    let copied = std::fs::create_dir_all(&folder).and_then(|()| std::fs::copy(&built, &named));
    copied.map_err(|error| format!("{} to {}: {error}", built.display(), named.display()))?;
    Ok(named)
}

/// Runs cargo with `args`; answers where the program `name` is.
fn build(args: &[&str], name: &str) -> Result<PathBuf, String> {
    let more = ["--locked", "--message-format=json"];
    let messages = output(cargo().args(args).args(more))?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| format!("cargo built no {name}"))
}
