//! Help, completions, the man page, and where the output goes.

use std::fs;
use std::process::Stdio;

use super::support::{Run, beeline, command, folder, model};

const COMMANDS: [&str; 11] = [
    "load",
    "copy",
    "explain",
    "devices",
    "doctor",
    "topo",
    "rdma",
    "cufile",
    "gdsio",
    "completions",
    "man",
];

#[test]
fn the_help_says_what_this_is_and_what_simulated_means() {
    let run = beeline(&["--help"]).ok();
    for text in ["straightest line", "SIMULATED", "Exit codes:", "130", "BEELINE_SIM_MEMORY"] {
        assert!(run.stdout.contains(text), "{text:?}: {run:?}");
    }
    for name in COMMANDS {
        assert!(run.stdout.contains(name), "{name}");
        let help = beeline(&[name, "--help"]).ok();
        assert!(help.stdout.contains("--json"), "{name}: {help:?}");
    }
    assert!(beeline(&["--version"]).ok().stdout.starts_with("beeline "));
}

#[test]
fn every_setting_of_the_environment_stands_in_the_help() {
    let help = beeline(&["--help"]).ok().stdout;
    let code = include_str!("../../../beeline/src/config.rs");
    let mut count = 0;
    let is_name = |text: &&str| text.starts_with("BEELINE_") && !text.contains('=');
    for name in code.split('"').filter(is_name) {
        // For tests only.
        if name != "BEELINE_CUDA_LIBRARY" {
            assert!(help.contains(name), "{name}");
            count += 1;
        }
    }
    assert!(count > 8, "{count}");
}

#[test]
fn no_command_is_a_usage_error_that_shows_the_help() {
    let run = beeline::<&str>(&[]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("Usage:"), "{run:?}");
}

#[test]
fn completions_come_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = beeline(&["completions", shell]).ok();
        assert!(run.stdout.contains("explain"), "{shell}");
        let json = beeline(&["completions", shell, "--json"]).ok().json();
        assert_eq!(json["text"].as_str().unwrap(), run.stdout);
    }
    assert_eq!(beeline(&["completions", "cmd"]).code, Some(2));
}

#[test]
fn the_man_page_holds_every_command_and_the_exit_codes() {
    let page = beeline(&["man"]).ok().stdout;
    for name in COMMANDS {
        assert!(page.contains(&format!(".SH \"BEELINE {}\"", name.to_uppercase())), "{name}");
    }
    for text in [".TH beeline 1", "\\-\\-verify", ".SH \"EXIT CODES\"", ".SH \"ENVIRONMENT"] {
        assert!(page.contains(text), "{text:?}");
    }
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let folder = folder();
    let path = model(folder.path(), "m.safetensors");
    let path = path.to_str().unwrap();
    let cases: [&[&str]; 5] = [
        &["man"],
        &["--help"],
        &["devices", "--json"],
        &["explain", path, "sim:0"],
        &["load", path, "--to", "sim:0", "--verify"],
    ];
    for args in cases {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let run: Run = command().args(args).stdout(writer).output().unwrap().into();
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    for arg in ["man", "--help", "--version", "devices"] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let run: Run = command().arg(arg).stdout(Stdio::from(full)).output().unwrap().into();
        assert_eq!(run.code, Some(1), "{run:?}");
        assert!(run.stderr.contains("cannot write to stdout"), "{run:?}");
    }
}
