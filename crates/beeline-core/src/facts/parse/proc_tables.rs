//! Tables of /proc: modules, devices, symbols, arrays, mounts, mappings.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::super::machine::{Fact, Known, Machine};
use super::super::platform::{Mapping, Mount};
use super::{Input, Outcome, ReadError};

/// Rows kept of any of these tables.
const ROWS_MAX: usize = 65_536;

fn first_line(head: &str) -> &str {
    head.lines().find(|line| !line.trim().is_empty()).unwrap_or("")
}

pub(super) fn is_modules(head: &str) -> bool {
    let first = first_line(head);
    let lsmod = first.starts_with("Module ") && first.contains("Size");
    let words: Vec<&str> = first.split_ascii_whitespace().collect();
    // nvidia_peermem 16384 0 - Live 0x0000000000000000
    let proc_form = words.len() >= 6
        && words.get(1).is_some_and(|size| size.parse::<u64>().is_ok())
        && words.get(4).is_some_and(|state| matches!(*state, "Live" | "Loading" | "Unloading"));
    lsmod || proc_form || is_filtered_lsmod(head)
}

/// Lines of lsmod without its header, as `grep` leaves them: what is not there may still be loaded.
fn is_filtered_lsmod(head: &str) -> bool {
    let mut lines = head.lines().filter(|line| !line.trim().is_empty()).peekable();
    let shape = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let name = words.first().is_some_and(|name| {
            let shape = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            shape && name.bytes().any(|b| b.is_ascii_alphabetic())
        });
        let number =
            |index: usize| words.get(index).is_some_and(|word| word.parse::<u64>().is_ok());
        name && number(1) && number(2) && matches!(words.len(), 3 | 4)
    };
    lines.peek().is_some() && lines.all(shape)
}

pub(super) fn parse_modules(
    machine: &mut Machine,
    input: &Input<'_>,
) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(name), Some(size)) = (words.next(), words.next()) else { continue };
        if name == "Module" {
            continue;
        }
        let Ok(size) = size.parse::<u64>() else {
            return Err(ReadError::new(input, number, "expected \"module size users\""));
        };
        if machine.platform.modules.len() < ROWS_MAX {
            let fact = Fact { value: size, origin: input.at(number) };
            machine.platform.modules.entry(name.replace('-', "_")).or_insert(fact);
        }
    }
    if !is_filtered_lsmod(input.text) {
        machine.platform.modules_listed.learn(true, input.at(1));
    }
    Ok(Outcome::default())
}

pub(super) fn is_devices(head: &str) -> bool {
    first_line(head).starts_with("Character devices:")
}

pub(super) fn parse_devices(
    machine: &mut Machine,
    input: &Input<'_>,
) -> Result<Outcome, ReadError> {
    let mut blocks = false;
    for (number, line) in input.lines() {
        let line = line.trim();
        match line {
            "" | "Character devices:" => continue,
            "Block devices:" => {
                blocks = true;
                continue;
            }
            _ => {}
        }
        let Some((Ok(major), name)) = line.split_once(' ').map(|(m, n)| (m.parse::<u32>(), n))
        else {
            return Err(ReadError::new(input, number, "expected \"major name\""));
        };
        if !blocks && machine.platform.char_devices.len() < ROWS_MAX {
            let fact = Fact { value: major, origin: input.at(number) };
            machine.platform.char_devices.entry(name.trim().to_string()).or_insert(fact);
        }
    }
    machine.platform.char_devices_listed.learn(true, input.at(1));
    Ok(Outcome::default())
}

pub(super) fn is_symbols(head: &str) -> bool {
    let lines = head.lines().filter(|line| !line.trim().is_empty()).take(20);
    let mut count = 0;
    let good = lines.inspect(|_| count += 1).all(|line| symbol(line).is_some());
    good && count > 0
}

/// `ffffffffc0a1b000 t nvme_queue_rq [nvme]`.
fn symbol(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_ascii_whitespace();
    let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
    let module = words.next().unwrap_or("");
    let shape = (8..=16).contains(&address.len())
        && address.bytes().all(|b| b.is_ascii_hexdigit())
        && kind.len() == 1
        && (module.is_empty() || module.starts_with('['));
    shape.then_some((name, module.trim_matches(['[', ']'])))
}

/// Counts what tells a patched driver from an unpatched one; nothing of the table is kept.
pub(super) fn parse_symbols(
    machine: &mut Machine,
    input: &Input<'_>,
) -> Result<Outcome, ReadError> {
    let (mut nvme, mut patched, mut api) = (0u32, 0u32, false);
    let (mut whole, mut p2pdma) = (false, false);
    let (mut nvme_line, mut patched_line, mut api_line) = (0, 0, 0);
    for (number, line) in input.lines() {
        if line.is_empty() {
            continue;
        }
        let Some((name, module)) = symbol(line) else {
            return Err(ReadError::new(input, number, "expected \"address type name [module]\""));
        };
        if module == "nvme" || module == "nvme_core" {
            nvme = nvme.saturating_add(1);
            nvme_line = number;
            if name.contains("nvfs") {
                patched = patched.saturating_add(1);
                patched_line = number;
            }
        }
        // A table that holds this symbol of the core holds all of them.
        whole |= name == "pci_enable_device";
        p2pdma |= name.starts_with("pci_p2pdma_");
        if name == "ib_register_peer_memory_client" {
            (api, api_line) = (true, number);
        }
    }
    let symbols = &mut machine.platform.symbols;
    if nvme > 0 {
        symbols.nvme.learn(nvme, input.at(nvme_line));
        symbols
            .nvme_nvfs
            .learn(patched, input.at(if patched > 0 { patched_line } else { nvme_line }));
    }
    if whole {
        symbols.p2pdma.learn(p2pdma, input.at(1));
    }
    if api {
        symbols.peer_memory_api.learn(true, input.at(api_line));
    }
    Ok(Outcome::default())
}

pub(super) fn is_mdstat(head: &str) -> bool {
    first_line(head).starts_with("Personalities")
}

/// `md127 : active raid0 nvme1n1[1] nvme0n1[0]`.
pub(super) fn parse_mdstat(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines() {
        let Some((name, rest)) = line.split_once(" : ") else { continue };
        if !name.starts_with("md") || machine.platform.blocks.len() >= ROWS_MAX {
            continue;
        }
        let mut members: Vec<String> = Vec::new();
        let mut level = None;
        for word in rest.split_ascii_whitespace() {
            if word.starts_with("raid") || word == "linear" {
                level = Some(word.to_string());
            } else if let Some((member, _)) = word.split_once('[') {
                members.push(member.to_string());
            }
        }
        let block = machine.platform.blocks.entry(name.trim().to_string()).or_default();
        block.members = members;
        if let Some(level) = level {
            block.raid.learn(level, input.at(number));
        }
    }
    Ok(Outcome::default())
}

pub(super) fn is_mounts(head: &str) -> bool {
    mount(first_line(head)).is_some()
}

/// `dev point fs options 0 0` of /proc/mounts, `id parent major:minor root point options - fs dev super`
/// of mountinfo, `dev on point type fs (options)` of mount.
fn mount(line: &str) -> Option<Mount> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    if let [device, "on", point, "type", fs, options] = words[..] {
        let options = options.trim_matches(['(', ')']);
        return Some(Mount {
            device: device.to_string(),
            point: point.to_string(),
            fs: fs.to_string(),
            options: options.to_string(),
            dev: None,
        });
    }
    let dash = words.iter().position(|word| *word == "-");
    if let (Some(dash), Some(numbers)) = (dash, words.get(2).and_then(|w| w.split_once(':'))) {
        let dev = (numbers.0.parse().ok()?, numbers.1.parse().ok()?);
        return Some(Mount {
            device: (*words.get(dash + 2)?).to_string(),
            point: (*words.get(4)?).to_string(),
            fs: (*words.get(dash + 1)?).to_string(),
            options: (*words.get(5)?).to_string(),
            dev: Some(dev),
        });
    }
    match words[..] {
        [device, point, fs, options, "0" | "1", _] if point.starts_with('/') => Some(Mount {
            device: device.to_string(),
            point: point.to_string(),
            fs: fs.to_string(),
            options: options.to_string(),
            dev: None,
        }),
        _ => None,
    }
}

pub(super) fn parse_mounts(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines() {
        if line.trim().is_empty() || machine.platform.mounts.len() >= ROWS_MAX {
            continue;
        }
        let Some(value) = mount(line) else {
            return Err(ReadError::new(
                input,
                number,
                "expected a line of /proc/mounts or mountinfo",
            ));
        };
        machine.platform.mounts.push(Fact { value, origin: input.at(number) });
    }
    Ok(Outcome::default())
}

pub(super) fn is_maps(head: &str) -> bool {
    mapping(first_line(head)).is_some()
}

/// `7f0000000000-7f0000010000 rw-s 00000000 00:06 1234 /dev/gdrdrv`.
fn mapping(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let end = u64::from_str_radix(end, 16).ok().filter(|end| *end > start)?;
    let permissions = words.next().filter(|word| word.len() == 4)?;
    permissions.bytes().all(|b| b"rwxsp-".contains(&b)).then_some(())?;
    let path = words.nth(3).unwrap_or("").to_string();
    Some(Mapping { start, end, path })
}

/// Keeps mappings of device files only.
pub(super) fn parse_maps(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines() {
        if line.is_empty() {
            continue;
        }
        let Some(value) = mapping(line) else {
            return Err(ReadError::new(input, number, "expected a line of /proc/PID/maps"));
        };
        if value.path.starts_with("/dev/") && machine.platform.mappings.len() < ROWS_MAX {
            machine.platform.mappings.push(Fact { value, origin: input.at(number) });
        }
    }
    Ok(Outcome::default())
}
