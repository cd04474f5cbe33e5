//! `nvidia-smi -q`: indented `key : value` lines, one block per GPU.

use alloc::string::ToString;

use super::super::bdf::Bdf;
use super::super::machine::{Fact, Known, Link, Machine, Origin};
use super::text::{bytes, key_value};
use super::{Input, Outcome, ReadError};

/// GPUs of one machine.
const GPUS_MAX: u32 = 1024;

pub(super) fn recognise(head: &str) -> bool {
    head.lines().take(20).any(|line| line.contains("NVSMI LOG"))
        || (head.contains("Attached GPUs") && head.contains("\nGPU 0"))
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let mut gpu: Option<Bdf> = None;
    let mut announced: Option<u32> = None;
    let mut count = 0u32;
    let mut path: Sections<'_> = [("", 0usize); SECTIONS_MAX];
    let mut link = PartialLink::default();
    for (number, line) in input.lines() {
        let at = input.at(number);
        let indent = line.len() - line.trim_start().len();
        let trimmed = line.trim();
        if trimmed.is_empty() {
            continue;
        }
        if indent == 0 && trimmed.starts_with("GPU ") {
            let text = trimmed.trim_start_matches("GPU ");
            let Some(bdf) = Bdf::parse(text) else {
                let message = alloc::format!("\"{trimmed}\" names no PCI address");
                return Err(ReadError::new(input, number, message));
            };
            if count >= GPUS_MAX {
                let message = alloc::format!("more than {GPUS_MAX} GPUs");
                return Err(ReadError::new(input, number, message));
            }
            machine.gpu_at(bdf, at).index.learn(count, at);
            count += 1;
            gpu = Some(bdf);
            link = PartialLink::default();
            continue;
        }
        let (key, value) = key_value(trimmed).unwrap_or((trimmed, ""));
        remember(&mut path, indent, key);
        match (key, gpu) {
            ("Driver Version", _) => machine.platform.driver.learn(value.to_string(), at),
            ("CUDA Version", _) => machine.platform.cuda.learn(value.to_string(), at),
            ("Attached GPUs", _) => announced = value.parse().ok(),
            (_, Some(bdf)) => {
                field(machine, bdf, &path, key, value, at);
                link.field(machine, bdf, &path, key, value, at);
            }
            _ => {}
        }
    }
    if count == 0 && announced != Some(0) {
        let message = "no block \"GPU <PCI address>\"; expected nvidia-smi -q";
        return Err(ReadError::new(input, 1, message));
    }
    Ok(Outcome { truncated: announced.is_some_and(|announced| announced != count) })
}

/// Sections around a line: the list of GPUs, `PCI`, `GPU Link Info`, `PCIe Generation`, the line itself,
/// and one to spare.
const SECTIONS_MAX: usize = 6;

/// Names of sections with their indentation, outermost first.
type Sections<'a> = [(&'a str, usize); SECTIONS_MAX];

/// Keeps the sections around the current line, by indentation.
fn remember<'a>(path: &mut Sections<'a>, indent: usize, key: &'a str) {
    let depth = path.iter().position(|(name, at)| name.is_empty() || *at >= indent);
    let depth = depth.unwrap_or(path.len() - 1);
    path[depth] = (key, indent);
    for slot in path.iter_mut().skip(depth + 1) {
        *slot = ("", 0);
    }
}

fn inside(path: &Sections<'_>, section: &str) -> bool {
    path.iter().any(|(name, _)| *name == section)
}

fn field(machine: &mut Machine, bdf: Bdf, path: &Sections<'_>, key: &str, value: &str, at: Origin) {
    let gpu = machine.gpu_at(bdf, at);
    match key {
        "Product Name" => gpu.name.learn(value.to_string(), at),
        "GPU UUID" => gpu.uuid.learn(value.to_string(), at),
        "Serial Number" if value != "N/A" => gpu.serial.learn(value.to_string(), at),
        "Current" if inside(path, "MIG Mode") => match value {
            "Enabled" => gpu.mig.learn(true, at),
            "Disabled" | "N/A" => gpu.mig.learn(false, at),
            _ => {}
        },
        "Total" if inside(path, "BAR1 Memory Usage") => {
            if let Some(bytes) = bytes(value, 1 << 20) {
                gpu.bar1_bytes.learn(bytes, at);
            }
        }
        "Used" if inside(path, "BAR1 Memory Usage") => {
            if let Some(bytes) = bytes(value, 1 << 20) {
                gpu.bar1_used.learn(bytes, at);
            }
        }
        "Virtualization Mode" => {
            let guest = matches!(value, "Pass-Through" | "VGPU");
            gpu.attributes
                .entry("virtualization-guest".to_string())
                .or_insert(Fact { value: i64::from(guest), origin: at });
            if guest {
                machine.platform.hypervisor.learn(value.to_string(), at);
            }
        }
        _ => {}
    }
}

#[derive(Default)]
struct PartialLink {
    generation: [Option<u32>; 2],
    width: [Option<u32>; 2],
}

impl PartialLink {
    /// `GPU Link Info > PCIe Generation > Max/Current`, `Link Width > Max/Current`.
    fn field(
        &mut self,
        machine: &mut Machine,
        bdf: Bdf,
        path: &Sections<'_>,
        key: &str,
        value: &str,
        at: Origin,
    ) {
        let slot = match key {
            "Max" => 0,
            "Current" => 1,
            _ => return,
        };
        if inside(path, "PCIe Generation") {
            self.generation[slot] = value.parse().ok();
        } else if inside(path, "Link Width") {
            self.width[slot] = value.trim_end_matches('x').parse().ok();
        } else {
            return;
        }
        let (Some(generation), Some(width)) = (self.generation[slot], self.width[slot]) else {
            return;
        };
        let speed = match generation {
            1 => 25,
            2 => 50,
            3 => 80,
            4 => 160,
            5 => 320,
            6 => 640,
            _ => return,
        };
        let device = machine.pci_at(bdf);
        let link = Link { speed_100mt: speed, width };
        if slot == 0 { device.link_max.learn(link, at) } else { device.link.learn(link, at) }
    }
}
