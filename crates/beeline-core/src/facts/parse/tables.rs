//! Output of lscpu, lsblk and fincore.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::super::machine::{Fact, Known, Machine};
use super::super::platform::FileResidency;
use super::text::{bytes, key_value};
use super::{Input, Outcome, ReadError};

/// Rows kept.
const ROWS_MAX: usize = 16_384;

pub(super) fn is_lscpu(head: &str) -> bool {
    let has = |key: &str| head.lines().any(|line| line.trim_start().starts_with(key));
    has("Architecture:") && has("CPU(s):")
}

pub(super) fn parse_lscpu(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let (mut family, mut model) = (None, None);
    let mut nodes = 0u32;
    for (number, line) in input.lines() {
        let at = input.at(number);
        let Some((key, value)) = key_value(line) else { continue };
        let platform = &mut machine.platform;
        match key {
            "Architecture" => platform.arch.learn(value.to_string(), at),
            "Vendor ID" => platform.cpu_vendor.learn(value.to_string(), at),
            "CPU family" => family = value.parse::<u32>().ok(),
            "Model" => model = value.parse::<u32>().ok(),
            "Hypervisor vendor" => platform.hypervisor.learn(value.to_string(), at),
            "Socket(s)" => {
                if let Ok(sockets) = value.parse() {
                    platform.sockets.learn(sockets, at);
                }
            }
            "NUMA node(s)" => nodes = value.parse().unwrap_or(0).min(1024),
            _ => {
                let node = key.strip_prefix("NUMA node").and_then(|rest| rest.split(' ').next());
                if let Some(Ok(node)) = node.map(str::parse::<i32>) {
                    let count = count_list(value).unwrap_or(0);
                    platform.numa.entry(node).or_insert(Fact { value: count, origin: at });
                }
            }
        }
    }
    if let (Some(family), Some(model)) = (family, model) {
        machine.platform.cpu_model.learn((family, model), input.at(1));
    }
    for node in 0..nodes {
        let Ok(node) = i32::try_from(node) else { break };
        machine.platform.numa.entry(node).or_insert(Fact { value: 0, origin: input.at(1) });
    }
    Ok(Outcome::default())
}

fn count_list(list: &str) -> Option<u32> {
    list.split(',').try_fold(0u32, |sum, part| {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let (low, high): (u32, u32) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
        sum.checked_add(high.checked_sub(low)?.checked_add(1)?)
    })
}

pub(super) fn is_lsblk(head: &str) -> bool {
    let first = head.lines().find(|line| !line.trim().is_empty()).unwrap_or("");
    let words: Vec<&str> = first.split_ascii_whitespace().collect();
    words.first() == Some(&"NAME") && (words.contains(&"MAJ:MIN") || words.contains(&"TYPE"))
}

/// The tree in the first column: a child stands below the device it lies on.
pub(super) fn parse_lsblk(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let mut columns: Vec<&str> = Vec::new();
    let mut stack: Vec<(usize, String)> = Vec::new();
    for (number, line) in input.lines() {
        if line.trim().is_empty() {
            continue;
        }
        if columns.is_empty() {
            columns = line.split_ascii_whitespace().collect();
            continue;
        }
        if machine.platform.blocks.len() >= ROWS_MAX {
            return Err(ReadError::new(input, number, "more block devices than any machine has"));
        }
        let drawn = line.chars().take_while(|c| !c.is_ascii_alphanumeric()).count();
        let mut words = line
            .split_ascii_whitespace()
            .skip_while(|word| !word.chars().any(|c| c.is_ascii_alphanumeric()));
        let name =
            words.next().unwrap_or("").trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
        if name.is_empty() {
            return Err(ReadError::new(input, number, "expected a device name"));
        }
        let cells: Vec<&str> = words.collect();
        stack.retain(|(depth, _)| *depth < drawn);
        let cell = |column: &str| {
            let index = columns.iter().position(|name| *name == column)?;
            cells.get(index.checked_sub(1)?).copied()
        };
        let (kind, logical) = (cell("TYPE"), cell("LOG-SEC"));
        let at = input.at(number);
        let parent = stack.last().map(|(_, name)| name.clone());
        let block = machine.platform.blocks.entry(name.to_string()).or_default();
        if let Some(kind) = kind.filter(|kind| kind.starts_with("raid")) {
            block.raid.learn(kind.to_string(), at);
        }
        if let Some(Ok(logical)) = logical.map(str::parse) {
            block.logical_bytes.learn(logical, at);
        }
        if let Some(parent) = parent.filter(|parent| !block.members.contains(parent)) {
            block.members.push(parent);
        }
        if let Some(point) = cells.iter().find(|cell| cell.starts_with('/')) {
            let point = (*point).to_string();
            if !block.mounts.contains(&point) {
                block.mounts.push(point);
            }
        }
        stack.push((drawn, name.to_string()));
    }
    Ok(Outcome::default())
}

pub(super) fn is_fincore(head: &str) -> bool {
    let first = head.lines().find(|line| !line.trim().is_empty()).unwrap_or("");
    first.split_ascii_whitespace().eq(["RES", "PAGES", "SIZE", "FILE"])
}

/// `2G 524288 2G model.safetensors`, with `-b` in bytes.
pub(super) fn parse_fincore(
    machine: &mut Machine,
    input: &Input<'_>,
) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines().filter(|(_, line)| !line.trim().is_empty()).skip(1) {
        let mut words = line.split_ascii_whitespace();
        let values = (|| {
            let resident = bytes(words.next()?, 1)?;
            words.next()?.parse::<u64>().ok()?;
            let size = bytes(words.next()?, 1)?;
            Some(FileResidency { path: words.next()?.to_string(), bytes: size, resident })
        })();
        let Some(value) = values else {
            return Err(ReadError::new(input, number, "expected \"RES PAGES SIZE FILE\""));
        };
        if machine.platform.files.len() < ROWS_MAX {
            machine.platform.files.push(Fact { value, origin: input.at(number) });
        }
    }
    Ok(Outcome::default())
}
