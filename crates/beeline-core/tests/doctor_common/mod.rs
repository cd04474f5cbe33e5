//! Shared by the tests over handed cases: where the files are, and how they are read.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

use beeline_core::checks::Status;
use beeline_core::facts::{Fact, Kind, Known, Machine, ReadError, read, read_tree};

/// The folder of handed cases, or `None` with a SKIP line where it is absent.
pub fn cases() -> Option<PathBuf> {
    let given = std::env::var_os("BEELINE_CASES").map(PathBuf::from);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = given
        .or_else(|| root.ancestors().map(|dir| dir.join("shared/cases")).find(|dir| dir.is_dir()));
    if found.as_ref().is_none_or(|dir| !dir.is_dir()) {
        println!("SKIP cases");
        return None;
    }
    found
}

/// The project's own inputs.
pub fn fixtures() -> PathBuf {
    // Of the core, whichever crate's test this is.
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../beeline-core/tests/fixtures")
}

/// Reads one file or captured tree into a machine.
pub fn add(machine: &mut Machine, path: &Path) -> Result<Kind, ReadError> {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    if path.is_dir() {
        let mut files = Vec::new();
        collect(path, path, &mut files);
        files.sort();
        return read_tree(machine, &name, &files);
    }
    read(machine, &name, &fs::read(path).unwrap())
}

/// A machine from several inputs.
pub fn machine(paths: &[PathBuf]) -> Machine {
    let mut machine = Machine::new();
    for path in paths {
        if let Err(error) = add(&mut machine, path) {
            panic!("{error}");
        }
    }
    machine.unify();
    machine
}

fn collect(root: &Path, dir: &Path, files: &mut Vec<(String, Vec<u8>)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(root, &path, files);
        } else {
            let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            files.push((name, fs::read(&path).unwrap()));
        }
    }
}

pub mod cases;
pub mod more;
pub mod run_time;
pub mod silent;

/// A machine from the inputs of a case; `None` where a handed file is needed and absent.
pub fn from_inputs(inputs: &[&str]) -> Option<Machine> {
    let mut machine = Machine::new();
    for input in inputs {
        if let Some(list) = input.strip_prefix("dev:") {
            let origin = beeline_core::facts::Origin::default();
            machine.platform.dev_nodes_listed.learn(true, origin);
            for node in list.split(',') {
                machine.platform.dev_nodes.insert(node.into(), Fact { value: true, origin });
            }
            continue;
        }
        if let Some((name, value)) = input.strip_prefix("set:").and_then(|set| set.split_once('='))
        {
            set(&mut machine, name, value);
            continue;
        }
        let path = match input.strip_prefix("handed:") {
            Some(file) => cases()?.join("files").join(file),
            None => fixtures().join(input),
        };
        if let Err(error) = add(&mut machine, &path) {
            panic!("{error}");
        }
    }
    machine.unify();
    Some(machine)
}

/// Facts that only a running machine has.
fn set(machine: &mut Machine, name: &str, value: &str) {
    let origin = beeline_core::facts::Origin::default();
    let text = || Fact { value: value.to_owned(), origin };
    if let Some(option) = name.strip_prefix("config.") {
        machine.platform.config.insert(option.into(), text());
    } else if let Some(attribute) = name.strip_prefix("gpu.") {
        let fact = Fact { value: value.parse().unwrap(), origin };
        machine.gpus[0].attributes.insert(attribute.into(), fact);
    } else {
        match name {
            "note" => machine.notes.push(text()),
            "live" => machine.sources.push(beeline_core::facts::Source {
                kind: Kind::Live,
                name: value.to_owned(),
                lines: 0,
                truncated: false,
            }),
            "memory-peers" => {
                machine.platform.memory_peers_listed.learn(true, origin);
                if !value.is_empty() {
                    let listed = Fact { value: true, origin };
                    machine.platform.memory_peers.insert(value.into(), listed);
                }
            }
            _ => panic!("no fact {name}"),
        }
    }
}

/// Everything a finding says, as one text.
pub fn words(finding: &beeline_core::checks::Finding) -> String {
    let lists = [
        &finding.subjects,
        &finding.candidates,
        &finding.missing,
        &finding.remedies,
        &finding.cautions,
    ];
    let mut text = finding.message.clone();
    for line in lists.into_iter().flatten() {
        text.push('\n');
        text.push_str(line);
    }
    text
}

/// Why a case is not answered right, or nothing.
pub fn judge(case: &cases::Case) -> Option<Vec<String>> {
    let machine = from_inputs(case.inputs)?;
    let report = beeline_core::checks::run(&machine);
    let mut wrong = Vec::new();
    for want in case.want {
        let found = report.findings.iter().any(|finding| {
            let text = words(finding);
            finding.check == want.check
                && finding.status == want.status
                && finding.severity == want.severity
                && want.texts.iter().all(|part| text.contains(part))
        });
        if !found {
            let near: Vec<String> = report
                .of(want.check)
                .iter()
                .map(|f| format!("{:?} {:?} {}", f.status, f.severity, words(f)))
                .collect();
            wrong.push(format!("{} is not as wanted, but {near:?}", want.check));
        }
    }
    for failure in report.failures() {
        if !case.want.iter().any(|want| want.check == failure.check && want.status == Status::Fail)
        {
            wrong.push(format!("wrong failure {}: {}", failure.check, words(failure)));
        }
    }
    Some(wrong)
}
