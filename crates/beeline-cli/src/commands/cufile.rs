//! `beeline cufile stats`: what processes with the drop-in libcufile did.

use std::path::{Path, PathBuf};

use comfy_table::{Table, presets};
use serde_json::Value;

use super::Context;
use crate::failure::Failure;
use crate::flags::{CufileCommand, CufileFlags, CufileStatsFlags};
use crate::output::{self, Answer};

/// Most processes shown.
const FILES_MAX: usize = 4096;

/// # Errors
/// No folder was named, or it cannot be read.
pub(crate) fn run(flags: &CufileFlags, _context: &Context) -> Result<Answer, Failure> {
    match &flags.command {
        CufileCommand::Stats(flags) => stats(flags),
    }
}

fn stats(flags: &CufileStatsFlags) -> Result<Answer, Failure> {
    let from_env = beeline::config::CufileConfig::from_env().stats_folder;
    let Some(folder) = flags.folder.clone().or(from_env) else {
        return Err(Failure::refused("usage", "no folder of statistics was named")
            .hint("start the program with BEELINE_CUFILE_STATS=FOLDER and name that folder here"));
    };
    let (mut found, broken) = read(&folder)?;
    found.sort_by_key(|one| number(one, "pid"));
    let mut answer = Answer::of("cufile-stats");
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "PID",
        "PROGRAM",
        "READS",
        "WRITES",
        "ERRORS",
        "PAGE CACHE",
        "DIRECT",
        "HOST",
        "WRITTEN",
        "CPU-S/GiB",
    ]);
    for one in &found {
        table.add_row(row(one));
    }
    answer.text = if found.is_empty() {
        format!("no statistics in {}\n", output::one_line(&folder.display().to_string()))
    } else {
        format!("{}\n", table.trim_fmt())
    };
    for path in broken {
        output::warn(&format!("{} holds no statistics", path.display()));
    }
    answer.set("processes", found);
    Ok(answer)
}

fn read(folder: &Path) -> Result<(Vec<Value>, Vec<PathBuf>), Failure> {
    let failed = |error: std::io::Error| {
        Failure::failed("io-failed", format!("read {}: {error}", folder.display()))
    };
    let (mut found, mut broken) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(folder).map_err(failed)?.take(FILES_MAX) {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.starts_with("beeline-cufile-") || !name.ends_with(".json") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        match serde_json::from_str::<Value>(&text) {
            Ok(value) if value.is_object() => found.push(value),
            _ => broken.push(path),
        }
    }
    Ok((found, broken))
}

fn row(one: &Value) -> Vec<String> {
    let route = |name: &str| {
        let bytes = one.get("routes").map_or(0, |routes| number(routes, name));
        format!("{:.3} GiB", gib(bytes))
    };
    let routes = one.get("routes").and_then(Value::as_object);
    let moved: u64 = routes.map_or(0, |all| all.values().filter_map(Value::as_u64).sum());
    let cpu = one.get("cpu_seconds").and_then(Value::as_f64).unwrap_or(0.0);
    vec![
        number(one, "pid").to_string(),
        output::one_line(one.get("program").and_then(Value::as_str).unwrap_or("?")),
        number(one, "reads").to_string(),
        number(one, "writes").to_string(),
        (number(one, "read_errors") + number(one, "write_errors")).to_string(),
        route("read-page-cache"),
        route("read-direct"),
        route("read-to-host"),
        route("written"),
        if moved == 0 { "-".to_owned() } else { format!("{:.3}", cpu / gib(moved)) },
    ]
}

fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or(0)
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
