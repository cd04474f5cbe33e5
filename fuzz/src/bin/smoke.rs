//! Runs every fuzz target on stable Rust for a short time: `smoke [--seconds N] [--seed S] [TARGET..]`.
//!
//! First each committed input in `seeds/TARGET/`, then mutations of them for N seconds a target
//! (default 5). The mutations follow from the seed alone (default 1). A panic ends the run: the
//! input that caused it is kept in `artifacts/TARGET/`, and the exit status is 1. Bad usage exits 2.

use std::fs;
use std::io;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use beeline_fuzz::mutate::{Rng, mutate};
use beeline_fuzz::{TARGETS, Target};

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            eprintln!("smoke: {message}");
            eprintln!(
                "usage: smoke [--seconds N] [--seed S] [TARGET..]; targets: {}",
                names.join(", ")
            );
            return ExitCode::from(2);
        }
    };
    for target in &options.targets {
        match smoke(target, &options) {
            Ok(executions) => println!("{}: {executions} executions", target.name),
            Err(message) => {
                eprintln!("{}: {message}", target.name);
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

struct Options {
    time: Duration,
    seed: u64,
    targets: Vec<Target>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { time: Duration::from_secs(5), seed: 1, targets: Vec::new() };
        while let Some(arg) = args.next() {
            let mut number = || {
                let value = args.next().ok_or(format!("{arg} wants a number"))?;
                value.parse::<u64>().map_err(|_| format!("{arg} wants a number, not '{value}'"))
            };
            match arg.as_str() {
                "--seconds" => options.time = Duration::from_secs(number()?),
                "--seed" => options.seed = number()?,
                name => {
                    let target = TARGETS.iter().find(|target| target.name == name);
                    options.targets.push(*target.ok_or(format!("no target '{name}'"))?);
                }
            }
        }
        if options.targets.is_empty() {
            options.targets = TARGETS.to_vec();
        }
        Ok(options)
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Number of executions, or what went wrong.
fn smoke(target: &Target, options: &Options) -> Result<u64, String> {
    let folder = root().join("seeds").join(target.name);
    let seeds = read_seeds(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    if seeds.is_empty() {
        return Err(format!("{} holds no input", folder.display()));
    }
    let mut executions = 0;
    for seed in &seeds {
        run(target, seed)?;
        executions += 1;
    }
    let mut rng = Rng::new(options.seed);
    let start = Instant::now();
    while start.elapsed() < options.time {
        let (Some(seed), Some(other)) = (rng.pick(&seeds), rng.pick(&seeds)) else { break };
        run(target, &mutate(&mut rng, target.frame, target.dictionary, seed, other))?;
        executions += 1;
    }
    Ok(executions)
}

/// In the order of their names, so that a seed number means the same everywhere.
fn read_seeds(folder: &Path) -> io::Result<Vec<Vec<u8>>> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut paths = entries.collect::<io::Result<Vec<PathBuf>>>()?;
    paths.sort();
    paths.iter().map(fs::read).collect()
}

fn run(target: &Target, input: &[u8]) -> Result<(), String> {
    if panic::catch_unwind(|| (target.run)(input)).is_ok() {
        return Ok(());
    }
    let kept = keep(target, input);
    let place =
        kept.map_or_else(|error| format!("not kept: {error}"), |path| path.display().to_string());
    Err(format!("panicked on an input of {} bytes ({place})", input.len()))
}

fn keep(target: &Target, input: &[u8]) -> io::Result<PathBuf> {
    let folder = root().join("artifacts").join(target.name);
    fs::create_dir_all(&folder)?;
    // FNV-1a: one name for one input.
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let path = folder.join(format!("crash-{hash:016x}"));
    fs::write(&path, input)?;
    Ok(path)
}
