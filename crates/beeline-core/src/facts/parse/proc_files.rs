//! Small files of /proc: driver parameters and version, command line, kernel version, limits.

use alloc::string::ToString;

use super::super::machine::{Fact, Known, Machine, Origin};
use super::super::platform::Memlock;
use super::text::{bytes, key_value, word_after};
use super::{Input, Outcome, ReadError};

pub(super) fn is_params(head: &str) -> bool {
    let marks =
        ["ResmanDebugLevel:", "EnableStreamMemOPs:", "RegistryDwords:", "ModifyDeviceFiles:"];
    let found = |mark: &&&str| head.lines().any(|line| line.starts_with(**mark));
    marks.iter().filter(found).count() >= 2
}

/// `Key: value`, the value quoted or not.
pub(super) fn parse_params(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines() {
        if line.trim().is_empty() {
            continue;
        }
        let Some((key, value)) = key_value(line) else {
            return Err(ReadError::new(input, number, "expected \"Parameter: value\""));
        };
        if machine.platform.params.len() >= 4096 {
            return Err(ReadError::new(input, number, "more than 4096 parameters"));
        }
        let value = value.trim_matches('"').to_string();
        let fact = Fact { value, origin: input.at(number) };
        machine.platform.params.entry(key.to_string()).or_insert(fact);
    }
    Ok(Outcome::default())
}

pub(super) fn is_version(head: &str) -> bool {
    head.trim_start().starts_with("NVRM version:")
}

pub(super) fn parse_version(
    machine: &mut Machine,
    input: &Input<'_>,
) -> Result<Outcome, ReadError> {
    let first = input.lines().find(|(_, line)| line.starts_with("NVRM version:"));
    if let Some((number, line)) = first {
        learn_driver(machine, line, input.at(number));
    }
    Ok(Outcome::default())
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ..` and
/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.216.03  ..`.
pub(crate) fn learn_driver(machine: &mut Machine, line: &str, at: Origin) {
    let version = line.split_ascii_whitespace().find(|word| {
        let numeric = word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        numeric && word.contains('.') && !word.starts_with('.')
    });
    if let Some(version) = version {
        machine.platform.driver.learn(version.to_string(), at);
        machine.platform.driver_open.learn(line.contains("Open Kernel Module"), at);
    }
}

pub(super) fn is_cmdline(head: &str) -> bool {
    let mut lines = head.lines().filter(|line| !line.trim().is_empty());
    let (Some(line), None) = (lines.next(), lines.next()) else { return false };
    let words = || line.split_ascii_whitespace();
    words().any(|word| {
        word.starts_with("BOOT_IMAGE=") || word.starts_with("root=") || word.starts_with("initrd=")
    }) || words().any(|word| {
        let options = ["iommu=", "intel_iommu=", "amd_iommu=", "pci=", "console="];
        options.iter().any(|option| word.starts_with(option))
    })
}

pub(super) fn parse_cmdline(
    machine: &mut Machine,
    input: &Input<'_>,
) -> Result<Outcome, ReadError> {
    if let Some((number, line)) = input.lines().find(|(_, line)| !line.trim().is_empty()) {
        learn_cmdline(machine, line, input.at(number));
    }
    Ok(Outcome::default())
}

pub(crate) fn learn_cmdline(machine: &mut Machine, text: &str, at: Origin) {
    let text = text.trim().chars().take(4096).collect();
    machine.platform.cmdline.learn(text, at);
}

pub(super) fn is_uname(head: &str) -> bool {
    let first = head.trim_start();
    is_release(head.trim())
        || first.starts_with("Linux version ")
        || (first.starts_with("Linux ") && first.contains(" SMP"))
}

/// `5.10.0-28-amd64` alone: `uname -r`.
fn is_release(text: &str) -> bool {
    let numbers = text
        .split(['.', '-'])
        .take(3)
        .filter(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    let shape = text.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_+~".contains(&b));
    text.len() < 128 && shape && text.contains('-') && text.contains('.') && numbers.count() == 3
}

/// `uname -a` or /proc/version.
pub(super) fn parse_uname(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    if is_release(input.text.trim()) {
        machine.platform.kernel.learn(input.text.trim().to_string(), input.at(1));
        return Ok(Outcome::default());
    }
    let Some((number, line)) = input.lines().find(|(_, line)| line.starts_with("Linux ")) else {
        return Ok(Outcome::default());
    };
    let release = word_after(line, "Linux version ")
        .or_else(|| line.split_ascii_whitespace().find(|w| w.bytes().next().is_some_and(is_digit)));
    if let Some(release) = release {
        machine.platform.kernel.learn(release.to_string(), input.at(number));
    }
    for arch in ["x86_64", "aarch64"] {
        if line.split_ascii_whitespace().any(|word| word == arch) {
            machine.platform.arch.learn(arch.to_string(), input.at(number));
        }
    }
    Ok(Outcome::default())
}

fn is_digit(byte: u8) -> bool {
    byte.is_ascii_digit()
}

pub(super) fn is_limits(head: &str) -> bool {
    head.lines().any(|line| line.starts_with("Max locked memory"))
        || head.lines().any(|line| line.starts_with("max locked memory"))
}

/// `Max locked memory  65536  65536  bytes`, or `max locked memory (kbytes, -l) 64` of a shell.
pub(super) fn parse_limits(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines() {
        let limit = if let Some(rest) = line.strip_prefix("Max locked memory") {
            let mut words = rest.split_ascii_whitespace();
            let soft = words.next().and_then(|word| amount(word, 1));
            let hard = words.next().and_then(|word| amount(word, 1));
            soft.zip(hard).map(|(soft, hard)| Memlock { soft, hard, of_process: true })
        } else if line.starts_with("max locked memory") {
            let value = line.rsplit(')').next().unwrap_or("");
            amount(value.trim(), 1024).map(|soft| Memlock { soft, hard: soft, of_process: false })
        } else {
            continue;
        };
        let Some(value) = limit else {
            let message = "expected a number of bytes or \"unlimited\"";
            return Err(ReadError::new(input, number, message));
        };
        machine.platform.memlock.push(Fact { value, origin: input.at(number) });
    }
    Ok(Outcome::default())
}

/// `unlimited` is `Some(None)`.
fn amount(word: &str, unit: u64) -> Option<Option<u64>> {
    if word == "unlimited" { Some(None) } else { bytes(word, unit).map(Some) }
}
