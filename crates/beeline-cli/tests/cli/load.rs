//! `beeline load`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use super::support::{
    beeline, beeline_with, command, folder, has_gpu, keys, model, names, sharded,
};

#[test]
fn a_load_says_what_it_did_and_that_it_is_simulated() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let run = beeline(&[OsStr::new("load"), path.as_os_str(), OsStr::new("--to=sim:0")]).ok();
    for text in [
        "3 tensors, 1240 bytes",
        "1 file into sim:0 (simulated)",
        "GB/s",
        "CPU-s/GB",
        "because the bytes",
    ] {
        assert!(run.stdout.contains(text), "{text:?}: {run:?}");
    }
    assert_eq!(run.stderr, "");
}

#[test]
fn without_a_gpu_the_default_device_is_simulated_and_said_to_be() {
    if has_gpu() {
        return println!("SKIP machine without GPU");
    }
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let run = beeline(&[OsStr::new("load"), path.as_os_str()]).ok();
    assert!(run.stdout.contains("sim:0 (simulated)"), "{run:?}");
    assert!(run.stderr.contains("no GPU on this machine, using sim:0 (simulated)"), "{run:?}");
}

#[test]
fn the_json_of_a_load_has_the_documented_keys() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    let json = beeline(&["load", path, "--to", "sim:0", "--verify", "--json"]).ok().json();
    let expected = [
        "bytes",
        "command",
        "cpu_seconds",
        "cpu_seconds_per_gb",
        "device_bytes",
        "devices",
        "files",
        "gb_per_s",
        "remarks",
        "routes",
        "seconds",
        "simulated",
        "tensors",
        "verify",
    ];
    assert_eq!(keys(&json), expected);
    assert_eq!(json["simulated"], true);
    assert_eq!(json["tensors"], 3);
    assert_eq!(json["bytes"], 1240);
    assert_eq!(json["files"][0]["path"], path);
    assert_eq!(json["devices"][0]["id"], "sim:0");
    let routes = json["routes"].as_array().unwrap();
    assert_eq!(routes.iter().map(|r| r["bytes"].as_u64().unwrap()).sum::<u64>(), 1240);
    assert_eq!(json["verify"]["equal"], true);
    assert_eq!(json["verify"]["tensors"], 3);
    assert_eq!(json["verify"]["bytes"], 1240);
}

#[test]
fn globs_ranks_and_rows_select_what_they_say() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    let cases: &[(&[&str], u64, u64)] = &[
        (&["--tensors", "embed"], 1, 800),
        (&["--tensors", "e*", "--tensors", "h*"], 2, 840),
        (&["--exclude", "embed"], 2, 440),
        (&["--tensors", "*", "--exclude", "*e*"], 1, 400),
        (&["--rank", "0", "--of", "3"], 3, 4 * 124),
        (&["--rank", "2", "--of", "3"], 3, 3 * 124),
        (&["--rank", "0", "--of", "1"], 3, 1240),
        (&["--rows", "2..4"], 3, 2 * 124),
        (&["--rows", "4..4"], 3, 0),
    ];
    for (flags, tensors, bytes) in cases {
        let mut args = vec!["load", path, "--to", "sim:0", "--verify", "--json"];
        args.extend_from_slice(flags);
        let json = beeline(&args).ok().json();
        assert_eq!((&json["tensors"], &json["bytes"]), (&(*tensors).into(), &(*bytes).into()));
        assert_eq!(json["verify"]["equal"], true, "{flags:?}");
    }
}

#[test]
fn every_engine_flag_is_taken() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    let cases: &[&[&str]] = &[
        &["--threads", "1"],
        &["--pool", "8M"],
        &["--pool", "0"],
        &["--timeout", "60"],
        &["--mode", "auto"],
        &["--mode", "software"],
        &["--mode", "require", "--route", "page-cache"],
    ];
    for flags in cases {
        let mut args = vec!["load", path, "--to", "sim:0", "--verify"];
        args.extend_from_slice(flags);
        beeline(&args).ok();
    }
}

#[test]
fn a_route_asked_for_by_name_is_the_one_that_is_used() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    for route in ["page-cache", "mapped-page-cache", "thread-pool", "direct"] {
        let args = ["load", path, "--to", "sim:0", "--route", route, "--verify", "--json"];
        let run = beeline(&args);
        let json = run.json();
        if json["error"]["code"] == "no-route" {
            println!("SKIP route {route}");
            continue;
        }
        assert_eq!(run.code, Some(0), "{run:?}");
        for used in json["routes"].as_array().unwrap() {
            assert_eq!(used["route"], route, "{run:?}");
        }
    }
}

#[test]
fn several_devices_get_the_same_model() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    let env = [("BEELINE_SIM_DEVICES", "2")];
    let args = ["load", path, "--to", "sim:0,sim:1", "--verify", "--json"];
    let json = beeline_with(&env, &args).ok().json();
    assert_eq!(json["devices"].as_array().unwrap().len(), 2);
    assert_eq!(json["bytes"], 1240);
    assert_eq!(json["verify"]["tensors"], 6);
    let twice = beeline_with(&env, &["load", path, "--to", "sim:1,sim:1"]);
    assert_eq!(twice.code, Some(2), "{twice:?}");
}

#[test]
fn a_sharded_model_loads_by_index_and_by_folder() {
    let folder = folder();
    let index = sharded(folder.path());
    for path in [index.as_path(), folder.path()] {
        let args = ["load", path.to_str().unwrap(), "--to", "sim:0", "--verify", "--json"];
        let json = beeline(&args).ok().json();
        assert_eq!((&json["tensors"], &json["bytes"]), (&3.into(), &3068.into()));
        assert_eq!(json["files"].as_array().unwrap().len(), 2);
        assert_eq!(json["verify"]["equal"], true);
    }
}

#[test]
fn a_warning_about_the_model_is_said_and_stands_in_the_json() {
    let folder = folder();
    let index = sharded(folder.path());
    let wrong = std::fs::read_to_string(&index).unwrap().replace("3068", "3069");
    std::fs::write(&index, wrong).unwrap();
    let run = beeline(&["load", index.to_str().unwrap(), "--to", "sim:0", "--json"]).ok();
    let remarks = run.json()["remarks"].clone();
    assert_eq!((&remarks[0]["code"], &remarks[0]["warning"]), (&"total-size".into(), &true.into()));
    assert!(run.stderr.contains("beeline: warning: "), "{run:?}");
    assert!(run.stderr.contains("[total-size]"), "{run:?}");
}

#[test]
fn paths_may_hold_spaces_and_bytes_that_are_no_text() {
    let folder = folder();
    let spaced = model(folder.path(), "my model.safetensors");
    beeline(&[OsStr::new("load"), spaced.as_os_str(), OsStr::new("--to=sim:0")]).ok();
    let odd = model(folder.path(), OsStr::from_bytes(b"m\xff\x1b[2J.safetensors"));
    let run = beeline(&[OsStr::new("load"), odd.as_os_str(), OsStr::new("--to=sim:0")]).ok();
    assert!(!run.stdout.contains('\u{1b}'), "{run:?}");
    let args =
        [OsStr::new("load"), odd.as_os_str(), OsStr::new("--to=sim:0"), OsStr::new("--json")];
    let json = beeline(&args).ok().json();
    assert!(json["files"][0]["path"].as_str().unwrap().contains('\u{fffd}'));
    assert!(json["files"][0]["path_hex"].as_str().unwrap().contains("6dff1b5b324a2e"));
}

#[test]
fn the_published_files_load_and_verify() {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/cases");
    let cases = std::env::var("BEELINE_CASES").unwrap_or_else(|_| beside.to_owned());
    let files = std::path::Path::new(&cases).join("files/safetensors");
    if !files.is_dir() {
        return println!("SKIP cases");
    }
    for name in names(&files).iter().filter(|name| name.ends_with(".safetensors")) {
        let path = files.join(name);
        let run = beeline(&["load", path.to_str().unwrap(), "--to", "sim:0", "--verify", "--json"]);
        let json = run.json();
        match run.code {
            Some(0) => assert_eq!(json["verify"]["equal"], true, "{name}: {run:?}"),
            Some(2) => assert!(json["error"]["message"].as_str().unwrap().contains(name.as_str())),
            _ => panic!("{name}: {run:?}"),
        }
    }
}

#[test]
fn on_a_terminal_progress_is_shown_and_says_simulated() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let line = format!(
        "'{}' load '{}' --to sim:0 > /dev/null",
        env!("CARGO_BIN_EXE_beeline"),
        path.display()
    );
    // A run without a terminal of its own (CI) may have no TERM, and then no terminal can show a bar.
    let mut script = std::process::Command::new("script");
    let Ok(output) = script.args(["-qec", &line, "/dev/null"]).env("TERM", "xterm").output() else {
        return println!("SKIP script");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("loading into sim:0 (simulated)"), "{text:?}");
    let piped = command().args(["load", "--to=sim:0"]).arg(&path).output().unwrap();
    assert_eq!(piped.stderr, b"", "no bar without a terminal");
}
