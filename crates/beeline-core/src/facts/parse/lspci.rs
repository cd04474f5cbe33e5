//! `lspci`, `lspci -nn`, `lspci -vvv` and combinations: a line per function, details indented below.

use alloc::string::ToString;
use alloc::vec::Vec;

use super::super::bdf::Bdf;
use super::super::machine::{Acs, Known, Link, Machine, Origin, Parent, PortKind};
use super::hwloc::rdma_by_id;
use super::text::{after, bytes, number_after, signed_after, word_after};
use super::{Input, Outcome, ReadError};

/// Functions of one machine.
const FUNCTIONS_MAX: u32 = 16_384;

/// Most lines that are not indented, the first of them included, are functions.
pub(super) fn recognise(head: &str) -> bool {
    let lines = head.lines().filter(|line| !line.trim().is_empty());
    let heads = lines.filter(|line| !line.starts_with(char::is_whitespace)).take(40);
    let functions: Vec<bool> = heads.map(|line| device_line(line).is_some()).collect();
    let good = functions.iter().filter(|function| **function).count();
    functions.first() == Some(&true) && good * 2 >= functions.len()
}

/// `[dddd:]bb:dd.f Class [cccc]: Vendor Device [vvvv:dddd] (rev xx)`.
fn device_line(line: &str) -> Option<(Bdf, &str)> {
    let (address, rest) = line.split_once(' ')?;
    let shape = address.contains('.') && address.contains(':');
    let bdf = Bdf::parse(address).filter(|_| shape)?;
    rest.contains(": ").then_some((bdf, rest))
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let (mut current, mut count) = (None, 0u32);
    let mut seen: Vec<(Bdf, u32)> = Vec::new();
    for (number, line) in input.lines() {
        if line.trim().is_empty() {
            continue;
        }
        if line.starts_with(char::is_whitespace) {
            if let Some(bdf) = current {
                detail(machine, bdf, line.trim(), input.at(number));
            }
            continue;
        }
        let Some((bdf, rest)) = device_line(line) else {
            let message = "expected \"bus:device.function class: name\" as lspci prints it";
            return Err(ReadError::new(input, number, message));
        };
        count += 1;
        if count > FUNCTIONS_MAX {
            let message = alloc::format!("more than {FUNCTIONS_MAX} functions");
            return Err(ReadError::new(input, number, message));
        }
        function(machine, bdf, rest, input.at(number));
        current = Some(bdf);
        seen.push((bdf, number));
    }
    attach(machine, input, &seen)?;
    guest_signs(machine, input, &seen);
    for (bdf, number) in seen {
        register(machine, bdf, input.at(number));
    }
    Ok(Outcome::default())
}

fn function(machine: &mut Machine, bdf: Bdf, rest: &str, at: Origin) {
    let (class_text, name) = rest.split_once(": ").unwrap_or((rest, ""));
    let device = machine.pci_at(bdf);
    device.name.learn(name.chars().take(256).collect(), at);
    let class = bracketed_hex(class_text).or_else(|| class_by_name(class_text));
    if let Some(class) = class {
        device.class.learn(class << 8, at);
    }
    // The last [vvvv:dddd] of the line is the identifier; names may hold brackets too.
    let ids = name.rsplit('[').find_map(|part| {
        let (vendor, id) = part.split(']').next()?.split_once(':')?;
        let hex =
            |text: &str| (text.len() == 4).then(|| u16::from_str_radix(text, 16).ok()).flatten();
        Some((hex(vendor)?, hex(id)?))
    });
    if let Some((vendor, id)) = ids {
        device.vendor.learn(vendor, at);
        device.device.learn(id, at);
    } else if let Some(vendor) = vendor_by_name(name) {
        device.vendor.learn(vendor, at);
    }
}

fn bracketed_hex(text: &str) -> Option<u32> {
    let inner = text.rsplit('[').next()?.split(']').next()?;
    (inner.len() == 4).then(|| u32::from_str_radix(inner, 16).ok()).flatten()
}

/// Classes by the names of `lspci` without `-nn`.
fn class_by_name(text: &str) -> Option<u32> {
    Some(match text.trim() {
        "Host bridge" => 0x0600,
        "PCI bridge" => 0x0604,
        "Bridge" => 0x0680,
        "VGA compatible controller" => 0x0300,
        "3D controller" => 0x0302,
        "Display controller" => 0x0380,
        "Processing accelerators" => 0x1200,
        "Ethernet controller" => 0x0200,
        "Infiniband controller" => 0x0207,
        "Non-Volatile memory controller" => 0x0108,
        "SATA controller" => 0x0106,
        "SCSI storage controller" => 0x0100,
        "RAID bus controller" => 0x0104,
        _ => return None,
    })
}

pub(super) fn vendor_by_name(name: &str) -> Option<u16> {
    const NAMES: [(&str, u16); 9] = [
        ("NVIDIA Corporation", 0x10de),
        ("Mellanox Technologies", 0x15b3),
        ("Advanced Micro Devices", 0x1022),
        ("Intel Corporation", 0x8086),
        ("Samsung Electronics", 0x144d),
        ("Red Hat, Inc.", 0x1af4),
        ("Amazon.com", 0x1d0f),
        ("Broadcom", 0x14e4),
        ("Microsoft Corporation", 0x1414),
    ];
    NAMES.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, vendor)| *vendor)
}

fn detail(machine: &mut Machine, bdf: Bdf, line: &str, at: Origin) {
    let device = machine.pci_at(bdf);
    if let Some(rest) = line.strip_prefix("Bus: ") {
        let hex = |name: &str| u8::from_str_radix(word_after(rest, name)?, 16).ok();
        if let Some(buses) = hex("secondary=").zip(hex("subordinate=")) {
            device.buses.learn(buses, at);
        }
    } else if line.starts_with("Capabilities: <access denied>") {
        device.hidden.learn(true, at);
    } else if line.starts_with("Capabilities:") && line.contains("Express") {
        if let Some(kind) = port_kind(line) {
            device.port.learn(kind, at);
        }
    } else if line.starts_with("ACSCtl:") {
        device.acs.learn(acs_bits(line), at);
    } else if line.starts_with("LnkSta:") || line.starts_with("LnkCap:") {
        if let Some(link) = link(line) {
            let slot =
                if line.starts_with("LnkSta") { &mut device.link } else { &mut device.link_max };
            slot.learn(link, at);
        }
    } else if let Some(rest) = line.strip_prefix("IOMMU group:") {
        if let Ok(group) = rest.trim().parse() {
            device.iommu_group.learn(group, at);
        }
    } else if let Some(Ok(node)) = signed_after(line, "NUMA node:").map(i32::try_from) {
        device.numa.learn(node, at);
    } else if let Some(driver) = line.strip_prefix("Kernel driver in use:") {
        device.driver.learn(driver.trim().to_string(), at);
    } else if line.starts_with("Region ") && line.contains("Memory at") {
        let size = after(line, "[size=").and_then(|rest| bytes(rest.split(']').next()?, 1));
        if let Some(size) = size {
            let known = device.bar_bytes.known().copied().unwrap_or(0);
            if size > known {
                device.bar_bytes = None;
                device.bar_bytes.learn(size, at);
            }
        }
    } else if let Some(ids) = line.strip_prefix("Subsystem:") {
        let pair = ids.rsplit('[').next().and_then(|p| p.split(']').next()?.split_once(':'));
        let hex = |text: &str| u16::from_str_radix(text, 16).ok();
        if let Some((Some(vendor), Some(id))) = pair.map(|(a, b)| (hex(a), hex(b))) {
            device.subsystem.learn((vendor, id), at);
        }
    }
}

fn port_kind(line: &str) -> Option<PortKind> {
    Some(if line.contains("Root Port") {
        PortKind::Root
    } else if line.contains("Upstream Port") {
        PortKind::Upstream
    } else if line.contains("Downstream Port") {
        PortKind::Downstream
    } else if line.contains("to PCI/PCI-X") || line.contains("PCI-Express to PCI") {
        PortKind::ToPci
    } else if line.contains("Endpoint") {
        PortKind::Endpoint
    } else {
        return None;
    })
}

/// `ACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-`.
fn acs_bits(line: &str) -> Acs {
    let on = |name: &str| after(line, name).is_some_and(|rest| rest.starts_with('+'));
    let bits = Acs::NAMES.iter().filter(|(name, _)| on(name)).fold(0, |sum, (_, bit)| sum | bit);
    Acs(bits)
}

/// `LnkSta: Speed 16GT/s (ok), Width x16 (ok)`; `LnkCap: Port #0, Speed 16GT/s, Width x16, ..`.
fn link(line: &str) -> Option<Link> {
    let speed_100mt = Link::parse_speed(after(line, "Speed ")?)?;
    let width = u32::try_from(number_after(line, "Width x")?).ok()?;
    (speed_100mt > 0 && width > 0 && width <= 64).then_some(Link { speed_100mt, width })
}

/// Parents from the bus ranges of bridges: a function hangs off the bridge whose secondary bus is its
/// own. A function on a bus that no bridge of the listing leads to hangs off a host bridge.
fn attach(machine: &mut Machine, input: &Input<'_>, seen: &[(Bdf, u32)]) -> Result<(), ReadError> {
    let mut leads: alloc::collections::BTreeMap<(u32, u8), Bdf> = Default::default();
    for (bdf, line) in seen {
        let buses = machine.pci.get(bdf).and_then(|d| d.buses.known().copied());
        let Some((secondary, _)) = buses.filter(|(secondary, _)| *secondary != 0) else { continue };
        if secondary <= bdf.bus {
            let message = alloc::format!("bridge {bdf} leads to bus {secondary:02x}, above itself");
            return Err(ReadError::new(input, *line, message));
        }
        leads.entry((bdf.domain, secondary)).or_insert(*bdf);
    }
    if leads.is_empty() {
        return Ok(());
    }
    for (bdf, line) in seen {
        let parent = match leads.get(&(bdf.domain, bdf.bus)) {
            Some(bridge) => Parent::Bridge(*bridge),
            None => Parent::Host(alloc::format!("pci{:04x}:{:02x}", bdf.domain, bdf.bus)),
        };
        machine.pci_at(*bdf).parent.learn(parent, input.at(*line));
    }
    Ok(())
}

/// Devices that only a hypervisor makes.
fn guest_signs(machine: &mut Machine, input: &Input<'_>, seen: &[(Bdf, u32)]) {
    for (bdf, line) in seen {
        let Some(device) = machine.pci.get(bdf) else { continue };
        let class = device.class.known().map_or(0, |class| class >> 8);
        let sign = match (device.vendor.known(), class) {
            // A QEMU bridge may be emulated anywhere; a virtio device exists in guests only.
            (Some(0x1b36), 0x0604) | (Some(0x1af4), _) => "QEMU or KVM, by its devices",
            (Some(0x1414), _) => "Hyper-V, by its devices",
            (Some(0x15ad), _) => "VMware, by its devices",
            _ => continue,
        };
        machine.platform.hypervisor.learn(sign.to_string(), input.at(*line));
        return;
    }
}

/// GPUs and NICs get records of their own.
pub(super) fn register(machine: &mut Machine, bdf: Bdf, at: Origin) {
    let device = machine.pci_at(bdf);
    let class = device.class.known().map_or(0, |class| class >> 8);
    let vendor = device.vendor.known().copied().unwrap_or(0);
    let id = device.device.known().copied();
    let (numa, name) = (device.numa.clone(), device.name.clone());
    let is_gpu = match vendor {
        0x10de => matches!(class, 0x0300 | 0x0302),
        0x1002 => matches!(class, 0x0380 | 0x1200),
        _ => false,
    };
    if is_gpu {
        let gpu = machine.gpu_at(bdf, at);
        if let Some(name) = name {
            gpu.name.learn(name.value, name.origin);
        }
    } else if matches!(class, 0x0200 | 0x0207) {
        let known = machine.nics.values().any(|nic| nic.bdf.known() == Some(&bdf));
        if known {
            return;
        }
        let nic = machine.nic(&bdf.to_string());
        nic.bdf.learn(bdf, at);
        if let Some(name) = name {
            nic.model.learn(name.value, name.origin);
        }
        if let Some(numa) = numa {
            nic.numa.learn(numa.value, numa.origin);
        }
        let rdma = if class == 0x0207 { Some(true) } else { rdma_by_id(vendor, id.unwrap_or(0)) };
        if let Some(rdma) = rdma {
            nic.rdma.learn(rdma, at);
        }
    }
}
