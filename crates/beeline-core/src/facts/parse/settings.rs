//! `NAME=value` lines: /etc/nccl.conf, `env`, /proc/PID/environ turned into lines, an env file.

use alloc::string::ToString;

use super::super::machine::{Fact, Machine};
use super::super::platform::{Setting, SettingFrom};
use super::nccl_log::is_variable;
use super::{Input, Outcome, ReadError};

/// Settings kept.
const SETTINGS_MAX: usize = 4096;

/// Names that tell a configuration of this field from any other list of assignments.
const KNOWN: [&str; 14] = [
    "NCCL_",
    "CUFILE_",
    "CUDA_",
    "UCX_",
    "MLX5_",
    "NVSHMEM_",
    "FI_",
    "KVIKIO_",
    "RCCL_",
    "RDMAV_",
    "ENABLE_NFSRDMA",
    "LD_LIBRARY_PATH",
    "PATH",
    "NVIDIA_",
];

pub(super) fn recognise(head: &str) -> bool {
    let lines =
        head.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let (mut all, mut good, mut known) = (0u32, 0u32, false);
    for line in lines {
        all += 1;
        if let Some((name, _)) = assignment(line) {
            good += 1;
            known |= KNOWN.iter().any(|prefix| name.starts_with(prefix));
        }
    }
    // `env` prints functions and values of several lines too.
    known && good * 2 > all
}

fn assignment(line: &str) -> Option<(&str, &str)> {
    let line = line.strip_prefix("export ").unwrap_or(line);
    let (name, value) = line.split_once('=')?;
    let lower = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !name.is_empty();
    lower.then_some((name, value.trim().trim_matches(['"', '\''])))
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let lines = || input.lines().map(|(number, line)| (number, line.trim()));
    let assigned = lines().filter(|(_, line)| !line.starts_with('#'));
    let mut all_nccl = true;
    let mut found = alloc::vec::Vec::new();
    for (number, line) in assigned {
        let Some((name, value)) = assignment(line) else { continue };
        if !is_variable(name) {
            continue;
        }
        all_nccl &= name.starts_with("NCCL_") || name.starts_with("RCCL_");
        found.push((number, name, value));
    }
    // The environment of a process holds more than one program's settings; nccl.conf does not.
    let from = if all_nccl { SettingFrom::File } else { SettingFrom::Environment };
    for (number, name, value) in found {
        if machine.platform.env.len() >= SETTINGS_MAX {
            break;
        }
        let value: alloc::string::String = value.chars().take(1024).collect();
        let fact = Fact { value: Setting { value, from }, origin: input.at(number) };
        let list = machine.platform.env.entry(name.to_string()).or_default();
        if list.len() < 16 {
            list.push(fact);
        }
    }
    Ok(Outcome::default())
}
