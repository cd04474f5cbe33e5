//! `beeline doctor --probe` over simulated devices: what passes, lies, hangs, and how long that takes.

use serde_json::Value;

use crate::support::{Run, beeline_with};

/// Paths of two devices: three of each with host and file, two for each ordered pair, one dma-buf each.
const PATHS: usize = 2 * 3 + 2 * 2 + 2;

fn probe(more: &[&str]) -> Run {
    let env = [("BEELINE_SIM_DEVICES", "2"), ("BEELINE_SIM_MEMORY", "256M")];
    let mut args = vec!["doctor", "--json", "--probe", "--probe-bytes", "1M"];
    args.extend(more);
    beeline_with(&env, &args)
}

fn transfers(answer: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let list = answer["transfers"].as_array().unwrap();
    list.iter()
        .map(|t| {
            let ends = [&t["from"]["name"], &t["to"]["name"], &t["by"]["name"]].map(text);
            (ends.join(" "), text(&t["outcome"]))
        })
        .collect()
}

/// Faults are injected into simulated devices, which a machine with a GPU does not probe.
fn has_gpu() -> bool {
    let found = std::path::Path::new("/dev/nvidiactl").exists();
    if found {
        println!("SKIP simulated-devices-only");
    }
    found
}

/// Without a fault: a simulated device of profile plain has no window to export.
fn wanted(name: &str) -> &'static str {
    if name.contains("dma-buf") { "absent" } else { "verified" }
}

#[test]
fn every_path_of_two_devices_is_moved_and_compared() {
    if has_gpu() {
        return;
    }
    let answer = probe(&[]).json();
    let all = transfers(&answer);
    assert_eq!(all.len(), PATHS, "{all:?}");
    assert!(all.iter().all(|(name, outcome)| outcome == wanted(name)), "{all:?}");
    for path in [
        "sim:0 sim:1 sim:0",
        "sim:0 sim:1 sim:1",
        "sim:1 sim:0 sim:0",
        "sim:1 sim:0 sim:1",
        "host sim:1 sim:1",
        "sim:1 host sim:1",
        "file sim:0 sim:0",
        "sim:1 dma-buf sim:1",
    ] {
        assert!(all.iter().any(|(name, _)| name == path), "{path}: {all:?}");
    }
    let list = answer["transfers"].as_array().unwrap();
    let moves = |t: &&Value| t["to"]["name"] != "dma-buf";
    assert!(list.iter().filter(moves).all(|t| t["mb_per_s"].as_u64().is_some()));
    assert!(list.iter().all(|t| t["simulated"] == true));
    assert_eq!(answer["simulated"], true);
    let finding = of(&answer, "probe-transfer");
    assert_eq!(finding["status"], "pass");
}

#[test]
fn a_path_that_lies_hangs_or_fails_is_a_finding_and_the_rest_still_runs() {
    if has_gpu() {
        return;
    }
    // The seventh is the first between two devices.
    for (fault, outcome, severity) in [
        ("6:corrupt", "differs", "critical"),
        ("7:stall", "hung", "error"),
        ("0:stall", "hung", "error"),
        ("2:corrupt", "differs", "critical"),
        ("9:fail", "failed", "error"),
    ] {
        let run = probe(&["--probe-timeout", "4", "--probe-fault", fault]);
        assert_eq!(run.code, Some(1), "{fault}: {run:?}");
        let answer = run.json();
        let at: usize = fault.split(':').next().unwrap().parse().unwrap();
        let all = transfers(&answer);
        assert_eq!(all.len(), PATHS);
        for (index, (name, found)) in all.iter().enumerate() {
            let expected = if index == at { outcome } else { wanted(name) };
            assert_eq!(found, expected, "{fault}: {name}");
        }
        let finding = of(&answer, "probe-transfer");
        assert_eq!(finding["status"], "fail", "{fault}");
        assert_eq!(finding["severity"], severity, "{fault}");
        assert_eq!(finding["reason"], "probe-transfer");
    }
}

#[test]
fn a_probe_is_of_the_running_machine_only() {
    for more in [&["--load", "x.json"][..], &["--root", "/"], &["file.txt"]] {
        assert_eq!(probe(more).code, Some(2), "{more:?}");
    }
    for more in [["--probe-dir", "/does/not/exist"], ["--probe-timeout", "0"]] {
        assert_eq!(probe(&more).code, Some(2), "{more:?}");
    }
    for bytes in ["0", "2G"] {
        let run = beeline_with(&[], &["doctor", "--probe", "--probe-bytes", bytes]);
        assert_eq!(run.code, Some(2), "{bytes}: {run:?}");
    }
}

fn of(answer: &Value, check: &str) -> Value {
    let list = answer["findings"].as_array().unwrap();
    list.iter().find(|finding| finding["check"] == check).unwrap().clone()
}
