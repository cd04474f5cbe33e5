//! `gdscheck -p`. People paste it cut short, so a missing section means unknown, not absent.

use alloc::string::ToString;

use super::super::machine::{Known, Machine, Origin};
use super::super::platform::Gds;
use super::text::{key_value, number_after, word_after};
use super::{Input, Outcome, ReadError};

pub(super) fn recognise(head: &str) -> bool {
    let lines = || head.lines().map(str::trim);
    lines().any(|line| line.starts_with("GDS release version"))
        || (lines().any(|line| line == "DRIVER CONFIGURATION:")
            && lines().any(|line| line.starts_with("NVMe")))
}

/// Properties and rows kept.
const ENTRIES_MAX: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    Head,
    Driver,
    Cufile,
    Gpu,
    Platform,
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let mut gds = Gds::default();
    let mut section = Section::Head;
    for (number, line) in input.lines() {
        let line = line.trim();
        let at = input.at(number);
        section = match line {
            "DRIVER CONFIGURATION:" => Section::Driver,
            // Releases before 1.0 have rows and properties in one section.
            "cuFile CONFIGURATION:" => Section::Driver,
            "CUFILE CONFIGURATION:" => Section::Cufile,
            "GPU INFO:" => Section::Gpu,
            "PLATFORM INFO:" => Section::Platform,
            _ => {
                if !line.starts_with("===") && line != "ENVIRONMENT:" && !line.is_empty() {
                    entry(machine, &mut gds, section, line, at);
                }
                section
            }
        };
        gds.gpu_section |= section == Section::Gpu;
        gds.platform_section |= section == Section::Platform;
    }
    if gds.release.is_none() && gds.rows.is_empty() {
        return Err(ReadError::new(
            input,
            1,
            "no release and no driver rows; expected gdscheck -p",
        ));
    }
    let truncated = !gds.gpu_section || !gds.platform_section || gds.verdict.is_none();
    machine.platform.gds = Some(gds);
    Ok(Outcome { truncated })
}

fn entry(machine: &mut Machine, gds: &mut Gds, section: Section, line: &str, at: Origin) {
    match section {
        Section::Head => {
            let release = word_after(line, "GDS release version:")
                .or_else(|| word_after(line, "GDS release version (beta):"));
            if let Some(release) = release {
                gds.release.learn(release.to_string(), at);
            }
            // Both versions stand on one line. "minimum version" is a requirement, not a module.
            if let Some(version) = word_after(line, "nvidia_fs version:") {
                gds.nvfs.learn(version.to_string(), at);
            }
            if let Some(version) = word_after(line, "nvidia_fs minimum version:") {
                gds.nvfs_minimum.learn(version.to_string(), at);
            }
        }
        Section::Driver | Section::Cufile => {
            let Some((key, value)) = key_value(line) else { return };
            if key == "IOMMU" {
                return platform(machine, gds, line, at);
            }
            let is_row = section == Section::Driver && !key.contains('.');
            let map = if is_row { &mut gds.rows } else { &mut gds.properties };
            if map.len() < ENTRIES_MAX {
                let key = key.trim_start_matches('-').to_string();
                let fact = super::super::machine::Fact { value: value.to_string(), origin: at };
                map.entry(key).or_insert(fact);
            }
        }
        // The old form ends with the platform's lines without a heading.
        Section::Gpu if !line.starts_with("GPU index") => platform(machine, gds, line, at),
        Section::Gpu => gpu(machine, line, at),
        Section::Platform => platform(machine, gds, line, at),
    }
}

/// `GPU index 0 NVIDIA RTX 6000 Ada Generation bar:1 bar size (MiB):65536 supports GDS, IOMMU State: Disabled`.
fn gpu(machine: &mut Machine, line: &str, at: Origin) {
    let Some(Ok(index)) = number_after(line, "GPU index ").map(u32::try_from) else { return };
    if index > 1024 {
        return;
    }
    let gpu = machine.gpu_numbered(index, at);
    let name = line.split(" bar:").next().and_then(|head| head.splitn(4, ' ').nth(3));
    if let Some(name) = name {
        gpu.name.learn(name.to_string(), at);
    }
    if let Some(mib) = number_after(line, "bar size (MiB):") {
        gpu.bar1_bytes.learn(mib.saturating_mul(1 << 20), at);
    }
    gpu.gds.learn(line.contains("supports GDS"), at);
}

fn platform(machine: &mut Machine, gds: &mut Gds, line: &str, at: Origin) {
    if let Some(state) =
        line.strip_prefix("IOMMU").map(|rest| rest.trim_start().trim_start_matches(':'))
    {
        gds.platform_section = true;
        gds.iommu.learn(state.trim().to_string(), at);
    }
    if let Some(rest) = line.strip_prefix("Nvidia Driver Info Status:") {
        machine.platform.driver_open.learn(rest.contains("Open"), at);
    }
    if let Some(verdict) = line.strip_prefix("Platform verification ") {
        gds.verdict.learn(verdict.trim().trim_end_matches('.').to_string(), at);
    }
    if let Some(kernel) = word_after(line, "(Linux ") {
        machine.platform.kernel.learn(kernel.to_string(), at);
    }
    if let Some(arch) = word_after(line, "Arch: ") {
        machine.platform.arch.learn(arch.split('(').next().unwrap_or(arch).to_string(), at);
    }
}
