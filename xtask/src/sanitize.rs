//! Address and thread sanitizers over the unsafe crate and over verbs.
//!
//! They need a nightly toolchain. The thread sanitizer needs the source of the standard library too
//! (component `rust-src`): a lock that was built without it is no lock to it. For the same reason rustix is
//! built over libc: of its own system calls a sanitizer hears nothing, and takes memory that one thread
//! unmapped and another mapped again at the same address for memory that both use.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Outcome, output};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What is tested: package and filter.
const TESTS: &[(&str, &str)] = &[("beeline-sys", ""), ("beeline", "verbs::")];

struct Sanitizer {
    name: &'static str,
    with_std: bool,
    /// Variable with the run-time options, and those.
    options: (&'static str, &'static str),
}

const SANITIZERS: &[Sanitizer] = &[
    // Leaks are none of its business here: buffers the kernel may still write are leaked on purpose.
    Sanitizer { name: "address", with_std: false, options: ("ASAN_OPTIONS", "detect_leaks=0") },
    Sanitizer {
        name: "thread",
        with_std: true,
        options: ("TSAN_OPTIONS", "second_deadlock_stack=1"),
    },
];

pub(crate) fn run(names: &[String]) -> Outcome {
    if let Some(name) = names.iter().find(|name| SANITIZERS.iter().all(|one| one.name != **name)) {
        return Err(format!("no sanitizer {name}: there are address and thread"));
    }
    let Ok(sysroot) = output(nightly("rustc").args(["--print", "sysroot"])) else {
        println!("SKIP nightly");
        return Ok(());
    };
    let source = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    for one in SANITIZERS {
        if !names.is_empty() && names.iter().all(|name| name != one.name) {
            continue;
        }
        if one.with_std && !source.is_dir() {
            println!("SKIP nightly rust-src");
            continue;
        }
        for (package, filter) in TESTS {
            println!("{} sanitizer: {package} {filter}", one.name);
            one.test(package, filter)?;
        }
    }
    Ok(())
}

impl Sanitizer {
    fn test(&self, package: &str, filter: &str) -> Outcome {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
        let (variable, value) = self.options;
        let suppressions = root.join(format!(".ci/{}-sanitizer.txt", self.name));
        let mut value = value.to_owned();
        if suppressions.is_file() {
            // In quotes: a space would end the option.
            value = format!("{value}:suppressions='{}'", suppressions.display());
        }
        let mut command = nightly("cargo");
        command.current_dir(&root).arg("test").arg("--locked");
        if self.with_std {
            command.arg("-Zbuild-std");
        }
        command.args(["--target", TARGET, "-p", package, "--lib", "--"]);
        command
            .args(["--test-threads", "2"])
            .args(Some(filter).filter(|filter| !filter.is_empty()));
        let flags = format!("-Zsanitizer={} --cfg=rustix_use_libc", self.name);
        command.env("RUSTFLAGS", flags);
        command.env("CARGO_TARGET_DIR", target.join(format!("sanitize-{}", self.name)));
        // Everything is several times as slow.
        command.env(variable, value).env("BEELINE_SOAK", "40");
        crate::run(&mut command)
    }
}

/// A program of the nightly toolchain, with nothing of the one that runs this task.
fn nightly(program: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", program]);
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"] {
        command.env_remove(name);
    }
    command
}
