//! Proof that tests can fail: removes one check at a time, and a test must notice.
//!
//! `cargo xtask mutate [NAME..]` reads `.ci/mutations.txt`. Each entry names a file, a piece of its text, what
//! stands there instead, and the tests that must fail then. The work is done on a copy below the target
//! folder; the tree is never touched. `cargo xtask mutate --ptx FOLDER` writes the mutated kernels as PTX instead,
//! for a machine with GPUs (`mutants.sh` of the bundle).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Outcome, cargo, output};

const LIST: &str = ".ci/mutations.txt";

/// What of the tree a build of the library crates needs.
const COPIED: &[&str] = &[
    "Cargo.toml",
    "Cargo.lock",
    "crates",
    "xtask",
    "dropin",
    "kernels",
    "rig/logs",
    "clippy.toml",
];

/// What stands as package where it is the kernels that are changed, which are no crate.
const KERNELS: &str = "kernels";

/// How many seconds the tests of one mutation may take; those of the tree take a small part of it.
const TESTS_MAX: &str = "300";

struct Mutation {
    name: String,
    file: String,
    from: String,
    to: String,
    package: String,
    /// The integration test that must fail; the library's own tests where there is none.
    target: Option<String>,
    tests: String,
}

pub(crate) fn run(names: &[String]) -> Outcome {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(root.join(LIST)).map_err(|e| format!("{LIST}: {e}"))?;
    let mut list = parse(&text)?;
    if let [flag, folder] = names
        && flag == "--ptx"
    {
        list.retain(|mutation| mutation.package == KERNELS);
        return write_ptx(&root, &list, Path::new(folder));
    }
    if let Some(unknown) = names.iter().find(|name| !list.iter().any(|m| m.name == **name)) {
        return Err(format!("{LIST} has no entry `{unknown}`"));
    }
    list.retain(|mutation| names.is_empty() || names.contains(&mutation.name));
    let copy = copy_tree(&root)?;
    let mut survived = Vec::new();
    for mutation in &list {
        // One that cannot be judged does not keep the others from it.
        let end = end_of_tests(&copy, mutation).unwrap_or_else(|error| {
            println!("{error}");
            End::Survived
        });
        match end {
            End::Killed => println!("killed   {}", mutation.name),
            End::Hung => println!("killed   {} (no end within {TESTS_MAX} s)", mutation.name),
            End::Survived => {
                println!("SURVIVED {}", mutation.name);
                survived.push(mutation.name.as_str());
            }
        }
    }
    println!("{} of {} mutations were noticed", list.len() - survived.len(), list.len());
    if survived.is_empty() {
        return Ok(());
    }
    Err(format!("no test fails without: {}", survived.join(", ")))
}

/// Blocks of `key: value` lines, separated by empty lines; `#` begins a comment line.
fn parse(text: &str) -> Result<Vec<Mutation>, String> {
    let mut list = Vec::new();
    for block in text.split("\n\n") {
        let field = |key: &str| {
            let line = block.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            // Nothing behind it: what stands there is taken out.
            line.map(|value| value.strip_prefix(' ').unwrap_or(value).to_owned())
        };
        if block.lines().all(|line| line.is_empty() || line.starts_with('#')) {
            continue;
        }
        let need = |key: &str| field(key).ok_or_else(|| format!("{LIST}: no `{key}` in\n{block}"));
        list.push(Mutation {
            name: need("name")?,
            file: need("file")?,
            from: need("from")?,
            to: need("to")?,
            package: need("package")?,
            target: field("target"),
            tests: need("tests")?,
        });
    }
    Ok(list)
}

fn copy_tree(root: &Path) -> Result<PathBuf, String> {
    let copy = target(root).join("mutate");
    fs::create_dir_all(&copy).map_err(|error| format!("{}: {error}", copy.display()))?;
    for part in COPIED {
        let from = root.join(part);
        if from.exists() {
            // What was there before may have files that the tree no longer has.
            let old = copy.join(part);
            let removed =
                if old.is_dir() { fs::remove_dir_all(&old) } else { fs::remove_file(&old) };
            if let Err(error) = removed
                && error.kind() != std::io::ErrorKind::NotFound
            {
                return Err(format!("{}: {error}", old.display()));
            }
            // New times, so that nothing built from an earlier mutation passes for fresh.
            let into = old.parent().unwrap_or(&copy);
            fs::create_dir_all(into).map_err(|error| format!("{}: {error}", into.display()))?;
            output(Command::new("cp").arg("-r").arg(from).arg(into))?;
        }
    }
    Ok(copy)
}

fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// Does `work` while the copy has the mutation.
fn mutated<T>(copy: &Path, mutation: &Mutation, work: impl FnOnce() -> T) -> Result<T, String> {
    let Mutation { name, file, from, to, .. } = mutation;
    let path = copy.join(file);
    let original =
        fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let write =
        |text: &str| fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()));
    match original.matches(from.as_str()).count() {
        1 => {}
        count => return Err(format!("{name}: `{from}` stands {count} times in {file}")),
    }
    write(&original.replace(from.as_str(), to))?;
    let answer = work();
    write(&original)?;
    Ok(answer)
}

/// How the tests of a mutation ended.
enum End {
    Killed,
    /// Not at all. On a machine with much else to do that may be slowness and no proof.
    Hung,
    Survived,
}

fn end_of_tests(copy: &Path, mutation: &Mutation) -> Result<End, String> {
    let Mutation { name, package, tests, .. } = mutation;
    let target = mutation.target.as_deref();
    let (built, tested) = mutated(copy, mutation, || {
        if package == KERNELS {
            // The kernels on CPU threads.
            let (mut build, mut run) = crate::kernels::emulation(&copy.join("kernels"), copy);
            (build.output(), bounded(&mut run).output())
        } else {
            let built = tests_of(copy, package, target).arg("--no-run").output();
            (built, bounded(tests_of(copy, package, target).arg(tests)).output())
        }
    })?;
    let (built, tested) = match (built, tested) {
        (Ok(built), Ok(tested)) => (built, tested),
        _ => return Err("cargo does not run".into()),
    };
    if !built.status.success() {
        let log = String::from_utf8_lossy(&built.stderr);
        return Err(format!("{name} does not compile, so it proves nothing:\n{log}"));
    }
    Ok(match tested.status.code() {
        Some(0) => End::Survived,
        // Of timeout(1): it ended them, or had to kill them.
        Some(124 | 137) => End::Hung,
        _ => End::Killed,
    })
}

/// The same with a time limit: tests that do not end without a check have noticed that it is missing.
fn bounded(command: &mut Command) -> Command {
    let mut limited = Command::new("timeout");
    limited.args(["--kill-after=5", TESTS_MAX]).arg(command.get_program()).args(command.get_args());
    limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if let Some(folder) = command.get_current_dir() {
        limited.current_dir(folder);
    }
    limited
}

/// A folder of PTX for each mutation that these kernels have, and one named `none` without any.
fn write_ptx(root: &Path, list: &[Mutation], into: &Path) -> Outcome {
    let none = into.join("none");
    crate::kernels::write_few(&root.join("kernels"), &none)?;
    let copy = copy_tree(root)?;
    for mutation in list {
        let folder = into.join(&mutation.name);
        mutated(&copy, mutation, || crate::kernels::write_few(&copy.join("kernels"), &folder))??;
        let fail = |error: std::io::Error| format!("{}: {error}", folder.display());
        // Others would survive whatever is run: theirs are kernels of cuFile's.
        let same = same_files(&none, &folder).map_err(fail)?;
        if same {
            fs::remove_dir_all(&folder).map_err(fail)?;
            println!("{}: not in these kernels", mutation.name);
        } else {
            println!("{}", folder.display());
        }
    }
    Ok(())
}

/// Whether each file of `one` stands in `other` with the same bytes.
fn same_files(one: &Path, other: &Path) -> std::io::Result<bool> {
    for entry in fs::read_dir(one)? {
        let entry = entry?;
        if fs::read(entry.path())? != fs::read(other.join(entry.file_name()))? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn tests_of(copy: &Path, package: &str, target: Option<&str>) -> Command {
    let mut command = cargo();
    command.current_dir(copy).env("CARGO_TARGET_DIR", copy.join("target"));
    command.args(["test", "--offline", "-p", package]);
    match target {
        Some(target) => command.args(["--test", target]),
        None => command.arg("--lib"),
    };
    command
}
