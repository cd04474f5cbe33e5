//! Bad input: a clear error and the documented exit code, as text and as JSON.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::support::{
    Run, beeline, beeline_with, command, folder, keys, model, model_bytes, sharded,
};

/// Runs a bad command line in both forms; both fail alike and say `text`.
#[track_caller]
fn refused(env: &[(&str, &str)], args: &[&str], exit: i32, code: &str, text: &str) {
    let run = beeline_with(env, args);
    assert_eq!(run.code, Some(exit), "{run:?}");
    assert_eq!(run.stdout, "", "{run:?}");
    assert!(run.stderr.contains(text), "{text:?}: {run:?}");
    let run = beeline_with(env, &[args, &["--json"]].concat());
    assert_eq!(run.code, Some(exit), "{run:?}");
    let json = run.json();
    assert_eq!(keys(&json["error"]), ["code", "hint", "message", "reasons"]);
    assert_eq!(json["error"]["code"], code, "{run:?}");
    let said = format!("{} {}", json["error"]["message"], json["error"]["hint"]);
    assert!(said.contains(text), "{text:?}: {run:?}");
}

#[test]
fn a_path_without_a_model_is_an_error_that_names_it() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(at("empty")).unwrap();
    fs::create_dir(at("many")).unwrap();
    model(folder.path(), "many/a.safetensors");
    model(folder.path(), "many/b.safetensors");
    assert!(Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    let cases = [
        (at("missing"), 1, "not-found", "missing"),
        (at("empty"), 2, "refused", "holds no safetensors file and no index"),
        (at("many"), 2, "refused", "holds 2 safetensors files and no index"),
        (at("fifo"), 2, "refused", "is a FIFO"),
        (at("socket"), 2, "refused", "is a socket"),
        ("/dev/zero".to_owned(), 2, "refused", "is a character device"),
        ("/proc/self/maps".to_owned(), 2, "refused", "made up by the kernel"),
    ];
    for (path, exit, code, text) in cases {
        refused(&[], &["load", &path, "--to", "sim:0"], exit, code, text);
    }
}

#[test]
fn a_broken_model_is_refused_with_the_code_of_its_fault() {
    let folder = folder();
    let good = model_bytes(&[("a", &[4])]);
    let mut long = good.clone();
    long.push(0);
    let cases: [(&str, &[u8], &str); 5] = [
        ("short", b"1234", "file-too-short"),
        ("text", b"\x05\0\0\0\0\0\0\0hello", "bad-header-start"),
        ("json", b"\x05\0\0\0\0\0\0\0{ello", "bad-json"),
        ("cut", &good[..good.len() - 1], "missing-bytes"),
        ("long", &long, "trailing-bytes"),
    ];
    for (name, bytes, code) in cases {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let run = beeline(&["load", path.to_str().unwrap(), "--to", "sim:0", "--json"]);
        assert_eq!(run.code, Some(2), "{run:?}");
        let json = run.json();
        assert_eq!(json["error"]["code"], code, "{run:?}");
        assert!(json["error"]["message"].as_str().unwrap().contains(name), "{run:?}");
    }
}

#[test]
fn an_index_that_names_a_missing_shard_is_refused_by_its_name() {
    let folder = folder();
    let index = sharded(folder.path());
    let shard = "model-00002-of-00002.safetensors";
    fs::remove_file(folder.path().join(shard)).unwrap();
    let run = beeline(&["load", index.to_str().unwrap(), "--to", "sim:0", "--json"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.json()["error"]["message"].as_str().unwrap().contains(shard), "{run:?}");
}

#[test]
fn unknown_names_are_refused_with_those_that_are_known() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    let load = ["load", path];
    let cases: [(&[&str], i32, &str, &str); 8] = [
        (&["--to", "gpu7"], 2, "refused", "write sim:N or cuda:N"),
        (&["--to", "sim:99"], 1, "not-found", "there is no device sim:99"),
        (&["--to", ""], 2, "refused", "is not the name of a device"),
        (&["--route", "tunnel"], 2, "usage", "mapped-page-cache"),
        (&["--mode", "fast"], 2, "usage", "require, auto, software"),
        (&["--nosuch"], 2, "usage", "--nosuch"),
        (&["--to", "sim:0", "--mode", "require"], 1, "no-route", "mode require"),
        (&["--to", "sim:0", "--route", "nvme"], 1, "no-route", "route nvme"),
    ];
    for (flags, exit, code, text) in cases {
        refused(&[], &[&load[..], flags].concat(), exit, code, text);
    }
}

#[test]
fn values_that_make_no_sense_are_refused() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    let load = ["load", path, "--to", "sim:0"];
    let cases: [(&[&str], &str, &str); 13] = [
        (&["--timeout", "0"], "usage", "seconds above 0"),
        (&["--threads", "0"], "usage", "1..=256"),
        (&["--pool", "lots"], "usage", "64M"),
        (&["--rows", "3"], "usage", "0..128"),
        (&["--rank", "1"], "usage", "--of"),
        (&["--of", "2"], "usage", "--rank"),
        (&["--rank", "0", "--of", "2", "--rows", "0..1"], "usage", "cannot be used with"),
        (&["--rank", "2", "--of", "2"], "bad-rank", "rank 2 of 2"),
        (&["--rows", "5..4"], "bad-rows", "end before they begin"),
        (&["--rows", "0..11"], "rows-out-of-range", "has 10 rows"),
        (&["--tensors", "[a"], "bad-pattern", "[a"),
        (&["--tensors", "embedd"], "no-match", "did you mean 'embed'?"),
        (&["--tensors", "*", "--exclude", "*"], "nothing-selected", "excluded as well"),
    ];
    for (flags, code, text) in cases {
        refused(&[], &[&load[..], flags].concat(), 2, code, text);
    }
}

#[test]
fn a_tensor_in_two_files_is_refused_with_both_paths() {
    let folder = folder();
    let (one, two) = (model(folder.path(), "one"), model(folder.path(), "two"));
    let (one, two) = (one.to_str().unwrap(), two.to_str().unwrap());
    for (first, second) in [(one, two), (two, two)] {
        let args = ["load", first, second, "--to", "sim:0"];
        let text = format!("{first} (file 0) and {second} (file 1): tensor");
        refused(&[], &args, 2, "duplicate-tensor", &text);
    }
}

#[test]
fn a_full_device_says_how_much_is_missing() {
    let folder = folder();
    let path = folder.path().join("m.safetensors");
    fs::write(&path, model_bytes(&[("a", &[100_000])])).unwrap();
    let args = ["load", path.to_str().unwrap(), "--to", "sim:0"];
    let env = [("BEELINE_SIM_MEMORY", "65536")];
    refused(&env, &args, 1, "out-of-memory", "short of the");
    for most in ["18446744073709551615", "16777215T"] {
        let env = [("BEELINE_SIM_MEMORY", most)];
        refused(&env, &args, 1, "io-failed", "bytes of simulated device memory");
    }
}

#[test]
fn a_file_that_may_not_be_read_is_an_error() {
    use std::os::unix::fs::PermissionsExt as _;

    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(&path).is_ok() {
        return println!("SKIP ordinary user");
    }
    let args = ["load", path.to_str().unwrap(), "--to", "sim:0"];
    refused(&[], &args, 1, "permission-denied", "check the permissions");
}

#[test]
fn copy_and_explain_refuse_what_load_refuses() {
    let folder = folder();
    let target = folder.path().join("target");
    let target = target.to_str().unwrap();
    let missing = folder.path().join("missing");
    let missing = missing.to_str().unwrap();
    refused(&[], &["copy", missing, target, "--via=sim:0"], 1, "not-found", "missing");
    refused(&[], &["copy", "/proc/self/maps", target], 2, "refused", "made up by the kernel");
    refused(&[], &["copy", "/dev", target], 2, "refused", "is a folder");
    refused(&[], &["explain", missing, "sim:0"], 1, "not-found", "missing");
    refused(&[], &["explain", "/dev/zero", "sim:0"], 2, "refused", "is a character device");
    refused(&[], &["explain", "/dev/zero"], 2, "refused", "is a character device");
    assert!(!Path::new(target).exists());
}

#[test]
fn a_flag_that_would_be_ignored_by_a_plan_is_refused() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&[path, "sim:0", "--load", path], "--load"),
        (&["gpu:0"], "two ends"),
        (&["host", "sim:0"], "'sim:0' is not the other end"),
        (&["host", "gpu:0", "--write"], "--write"),
        (&["host", "gpu:0", "--route", "direct"], "--route"),
    ];
    for (args, text) in cases {
        refused(&[], &[&["explain"], args].concat(), 2, "usage", text);
    }
}

#[test]
fn a_setting_in_the_environment_that_is_none_is_warned_about() {
    let env = [
        ("BEELINE_POOL_BYTES", "lots"),
        ("BEELINE_SIM_PROFILE", "odd"),
        ("BEELINE_STAGE_SLOTS", "few"),
        ("BEELINE_STAGE_SLOT_BYTES", "1 page"),
        ("BEELINE_COMM_PATH", "stagd"),
        ("BEELINE_CUFILE_WAIT", "spin"),
        ("BEELINE_CUFILE_VERSION", "1.2"),
    ];
    let run = beeline_with(&env, &["devices"]).ok();
    for (name, value) in env {
        assert!(run.stderr.contains(&format!("{name}={value}")), "{name}: {run:?}");
    }
    let env = [
        ("BEELINE_THREADS", "9999", "from 1 to 256; 256 is used"),
        ("BEELINE_STAGE_SLOTS", "1", "from 2 to 64; 2 is used"),
        ("BEELINE_COMM_TIMEOUT", "0", "from 1 to 86400; 1 is used"),
        ("BEELINE_CHUNK_BYTES", "1G", "a power of two; 4194304 is used"),
    ];
    for (name, value, used) in env {
        let run = beeline_with(&[(name, value)], &["devices"]).ok();
        let said = format!("{name}={value} has to be ");
        assert!(run.stderr.matches(&said).count() == 1 && run.stderr.contains(used), "{run:?}");
    }
    let env = [("BEELINE_COMM_PATH", "auto"), ("BEELINE_CUFILE_WAIT", "word")];
    assert!(!beeline_with(&env, &["devices"]).ok().stderr.contains("BEELINE_"));
    let odd: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"8\xff");
    let run: Run = command().arg("devices").env("BEELINE_THREADS", odd).output().unwrap().into();
    assert!(run.ok().stderr.contains("BEELINE_THREADS=8"));
}
