//! Shared by the tests over handed cases: where the files are, and how they are read.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::fs;
use std::path::{Path, PathBuf};

use beeline_core::facts::{Kind, Machine, ReadError, read, read_tree};

/// The folder of handed cases, or `None` with a SKIP line where it is absent.
pub fn cases() -> Option<PathBuf> {
    let given = std::env::var_os("BEELINE_CASES").map(PathBuf::from);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = given.or_else(|| {
        root.ancestors().map(|dir| dir.join("shared/cases")).find(|dir| dir.is_dir())
    });
    if found.as_ref().is_none_or(|dir| !dir.is_dir()) {
        println!("SKIP cases");
        return None;
    }
    found
}

/// The project's own inputs.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
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
