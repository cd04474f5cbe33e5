//! `beeline explain` and `beeline devices`.

use super::support::{beeline, beeline_with, folder, keys, pattern};

const ROUTES: [&str; 6] =
    ["p2p-dma", "nvme", "mapped-page-cache", "page-cache", "direct", "thread-pool"];

#[test]
fn every_route_is_allowed_or_rejected_with_its_reason() {
    let folder = folder();
    let path = folder.path().join("a file");
    std::fs::write(&path, pattern(1, 100_000)).unwrap();
    let path = path.to_str().unwrap();
    let run = beeline(&["explain", path, "sim:0"]).ok();
    for route in ROUTES {
        assert!(run.stdout.contains(route), "{route}: {run:?}");
    }
    assert!(run.stdout.contains("sim:0 (simulated)"), "{run:?}");
    assert!(run.stdout.contains("the device is simulated and has no bus address"), "{run:?}");

    let json = beeline(&["explain", path, "sim:0", "--json"]).ok().json();
    let expected = [
        "allowed",
        "command",
        "device",
        "file",
        "mode",
        "operation",
        "rejected",
        "residency",
        "route",
        "simulated",
    ];
    assert_eq!(keys(&json), expected);
    let (allowed, rejected) = (&json["allowed"], &json["rejected"]);
    assert_eq!(
        allowed.as_array().unwrap().len() + rejected.as_array().unwrap().len(),
        ROUTES.len()
    );
    assert_eq!(keys(&allowed[0]), ["level", "reason", "route", "what"]);
    assert_eq!(keys(&rejected[0]), ["reason", "route", "what"]);
    assert_eq!(keys(&rejected[0]["reason"]), ["code", "detail", "remedy", "text"]);
    let by_route = json["residency"]["by_route"].as_array().unwrap();
    assert_eq!(by_route.iter().map(|r| r["bytes"].as_u64().unwrap()).sum::<u64>(), 100_000);
    assert_eq!(json["simulated"], true);
}

#[test]
fn a_plan_without_a_route_is_an_answer_and_no_failure() {
    let folder = folder();
    let path = folder.path().join("file");
    std::fs::write(&path, b"x").unwrap();
    let path = path.to_str().unwrap();
    let run = beeline(&["explain", path, "sim:0", "--mode", "require"]).ok();
    assert!(run.stdout.contains("no route: a transfer would fail"), "{run:?}");
    assert!(run.stdout.contains("try: use --mode auto"), "{run:?}");
}

#[test]
fn a_plan_for_writing_speaks_of_writing() {
    let folder = folder();
    let path = folder.path().join("file");
    std::fs::write(&path, b"x").unwrap();
    let plan = beeline(&["explain", path.to_str().unwrap(), "sim:0", "--write", "--json"]).ok();
    let json = plan.json();
    let routes = |key: &str| json[key].as_array().unwrap().clone();
    for route in routes("allowed").iter().chain(&routes("rejected")) {
        let what = route["what"].as_str().unwrap();
        assert!(!what.contains("drive writes") && !what.contains("device copies on"), "{what}");
    }
    assert_eq!(routes("allowed").last().unwrap()["route"], "page-cache");
}

#[test]
fn a_plan_for_writing_refuses_mapped_pages() {
    let folder = folder();
    let path = folder.path().join("file");
    std::fs::write(&path, b"x").unwrap();
    let path = path.to_str().unwrap();
    let args = ["explain", path, "sim:0", "--write", "--route", "mapped-page-cache", "--json"];
    let json = beeline(&args).ok().json();
    assert_eq!(json["operation"], "write");
    assert_eq!(json["route"], "mapped-page-cache");
    assert_eq!(json["allowed"].as_array().unwrap().len(), 0);
    assert_eq!(json["residency"], serde_json::Value::Null);
    let rejected = json["rejected"].as_array().unwrap();
    let mapped = rejected.iter().find(|one| one["route"] == "mapped-page-cache").unwrap();
    assert_eq!(mapped["reason"]["code"], "mapped-read-only");
}

#[test]
fn devices_are_listed_with_their_memory_and_as_simulated() {
    let env = [("BEELINE_SIM_DEVICES", "3"), ("BEELINE_SIM_MEMORY", "1G")];
    let run = beeline_with(&env, &["devices"]).ok();
    assert!(run.stdout.contains("sim:2") && run.stdout.contains("simulated"), "{run:?}");
    assert!(run.stdout.contains("1.00 GiB"), "{run:?}");
    let json = beeline_with(&env, &["devices", "--json"]).ok().json();
    let simulated = |device: &&serde_json::Value| device["simulated"] == true;
    let devices = json["devices"].as_array().unwrap();
    assert_eq!(devices.iter().filter(simulated).count(), 3);
    let sim = devices.iter().find(|device| device["id"] == "sim:1").unwrap();
    let expected = ["default", "free_bytes", "id", "memory_bytes", "name", "profile", "simulated"];
    assert_eq!(keys(sim), expected);
    assert_eq!(sim["memory_bytes"], 1 << 30);
    assert_eq!(json["simulated"], true);
}

/// What a communicator of the same environment does.
#[test]
fn a_collective_is_planned_as_the_environment_has_it() {
    let args = ["explain", "allreduce", "--ranks", "2", "--bytes", "1M", "--json"];
    let staged = beeline_with(&[("BEELINE_COMM_PATH", "staged")], &args).ok().json();
    assert_eq!(staged["staged_by"], "BEELINE_COMM_PATH=staged");
    assert_eq!(staged["allowed"].as_array().unwrap().len(), 1);
    let auto = beeline_with(&[("BEELINE_COMM_PATH", "auto")], &args).ok().json();
    assert!(auto["staged_by"].is_null());
    assert_ne!(auto["allowed"][0]["algorithm"], "staged");
}

/// A record that never ends is not read to its end.
#[test]
fn a_record_without_an_end_is_refused() {
    let run = beeline(&["explain", "allreduce", "--ranks", "2", "--load", "/dev/zero"]);
    assert_eq!(run.code, Some(2), "{run:?}");
}
