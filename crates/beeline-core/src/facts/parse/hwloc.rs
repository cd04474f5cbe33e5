//! hwloc XML, version 2.
//!
//! PCI devices hang below `Bridge` objects; a bridge of type `0-1` is a host bridge, `1-1` a PCI-PCI
//! bridge. `pci_link_speed` is in GB/s, 0 where the kernel does not tell.

use alloc::string::ToString;

use roxmltree::Node;

use super::super::bdf::Bdf;
use super::super::machine::{Fact, Known, Machine, Origin, Parent, TopoFile};
use super::xml::{Tree, root_name};
use super::{Input, Outcome, ReadError};

pub(super) fn recognise(head: &str) -> bool {
    root_name(head) == Some("topology")
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let tree = Tree::parse(input)?;
    let root = tree.document.root_element();
    let version = root.attribute("version").unwrap_or("1");
    if !version.starts_with('2') && !version.starts_with('3') {
        let message = alloc::format!("hwloc XML of version {version}; expected version 2 or 3");
        return Err(ReadError::new(input, tree.line(&root), message));
    }
    let mut file = TopoFile {
        format: "hwloc".to_string(),
        origin: input.at(tree.line(&root)),
        ..TopoFile::default()
    };
    let mut stack = alloc::vec![(root, Place::default())];
    while let Some((node, place)) = stack.pop() {
        let mut numa = place.numa;
        // Memory children stand before the devices of the same package.
        for child in node.children().filter(|c| c.attribute("type") == Some("NUMANode")) {
            let at = input.at(tree.line(&child));
            if let Some(number) = child.attribute("os_index").and_then(|text| text.parse().ok()) {
                let cpus = child.attribute("cpuset").map_or(0, count_cpus);
                machine.platform.numa.entry(number).or_insert(Fact { value: cpus, origin: at });
                numa = Some(number);
            }
        }
        for child in node.children().filter(Node::is_element) {
            let at = input.at(tree.line(&child));
            let mut below = Place { numa, parent: place.parent.clone(), speed: place.speed };
            match child.attribute("type") {
                Some("Package") => {
                    let sockets = machine.platform.sockets.known().copied().unwrap_or(0);
                    machine.platform.sockets = Some(Fact { value: sockets + 1, origin: at });
                }
                Some("Bridge") => {
                    below.parent = bridge(machine, &child, &below, at);
                    below.speed = sampled_speed(&child);
                }
                Some("PCIDev") => {
                    if let Some(bdf) = device(machine, input, &tree, &child, &below)? {
                        file.devices.push(bdf);
                        below.parent = Some(Parent::Bridge(bdf));
                    }
                }
                Some("OSDev") => os_device(machine, &child, &below, at),
                _ => {}
            }
            stack.push((child, below));
        }
        info(machine, &node, input.at(tree.line(&node)));
    }
    machine.topo_files.push(file);
    Ok(Outcome::default())
}

/// PCI functions of one file.
const FUNCTIONS_MAX: usize = 16_384;

#[derive(Clone, Default)]
struct Place {
    numa: Option<i32>,
    parent: Option<Parent>,
    /// Link speed of the bridge above in hundredths of GB/s; 0 where it is not known.
    speed: u32,
}

/// A host bridge is named by its bus range; a PCI bridge is a device of its own.
fn bridge(machine: &mut Machine, node: &Node<'_, '_>, place: &Place, at: Origin) -> Option<Parent> {
    if let Some(bdf) = node.attribute("pci_busid").and_then(Bdf::parse) {
        let parent = place.parent.clone();
        let device = machine.pci_at(bdf);
        device.class.learn(0x06_0400, at);
        if let Some(parent) = parent {
            device.parent.learn(parent, at);
        }
        if let Some(numa) = place.numa {
            device.numa.learn(numa, at);
        }
        ids(machine, node, bdf, at);
        return Some(Parent::Bridge(bdf));
    }
    let name = node.attribute("bridge_pci").or_else(|| node.attribute("gp_index")).unwrap_or("?");
    Some(Parent::Host(name.to_string()))
}

fn device(
    machine: &mut Machine,
    input: &Input<'_>,
    tree: &Tree<'_>,
    node: &Node<'_, '_>,
    place: &Place,
) -> Result<Option<Bdf>, ReadError> {
    let line = tree.line(node);
    let text = node.attribute("pci_busid").unwrap_or("");
    let Some(bdf) = Bdf::parse(text) else {
        let message = alloc::format!("pci_busid=\"{text}\" is not a PCI address");
        return Err(ReadError::new(input, line, message));
    };
    if machine.pci.len() >= FUNCTIONS_MAX {
        let message = alloc::format!("more than {FUNCTIONS_MAX} functions");
        return Err(ReadError::new(input, line, message));
    }
    let at = input.at(line);
    let device = machine.pci_at(bdf);
    if let Some(parent) = &place.parent {
        device.parent.learn(parent.clone(), at);
    }
    if let Some(numa) = place.numa {
        device.numa.learn(numa, at);
    }
    ids(machine, node, bdf, at);
    let device = machine.pci_at(bdf);
    let class = device.class.known().map_or(0, |class| class >> 8);
    let vendor = device.vendor.known().copied().unwrap_or(0);
    let id = device.device.known().copied().unwrap_or(0);
    if matches!(class, 0x0300 | 0x0302) && vendor == 0x10de {
        let own = sampled_speed(node);
        let low = i64::from(own > 0 && own < place.speed);
        let attributes = &mut machine.gpu_at(bdf, at).attributes;
        attributes.entry("hwloc_link_low".to_string()).or_insert(Fact { value: low, origin: at });
    }
    // The fabric adapter reports a network class, as the plain adapter of the same vendor does.
    if matches!(class, 0x0200 | 0x0207) {
        let nic = machine.nic(&bdf.to_string());
        nic.bdf.learn(bdf, at);
        if let Some(rdma) = rdma_by_id(vendor, id) {
            nic.rdma.learn(rdma, at);
        }
        if let Some(numa) = place.numa {
            nic.numa.learn(numa, at);
        }
    }
    Ok(Some(bdf))
}

/// `pci_link_speed="15.753846"` in hundredths of GB/s.
fn sampled_speed(node: &Node<'_, '_>) -> u32 {
    let text = node.attribute("pci_link_speed").unwrap_or("");
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let hundredths = fraction.get(..2).and_then(|digits| digits.parse::<u32>().ok()).unwrap_or(0);
    let whole = whole.parse::<u32>().unwrap_or(0);
    whole.saturating_mul(100).saturating_add(hundredths)
}

/// What a PCI identifier says about RDMA; `None` where it does not decide.
pub(super) fn rdma_by_id(vendor: u16, device: u16) -> Option<bool> {
    match (vendor, device) {
        // Amazon: efa0, efa1, .. are fabric adapters, ec20 is the plain one.
        (0x1d0f, 0xefa0..=0xefaf) => Some(true),
        (0x1d0f, 0xec20 | 0xec21 | 0x0ec2) => Some(false),
        (0x15b3, _) => Some(true),
        // virtio and Realtek have none; of Intel, Broadcom and others some have.
        (0x1af4 | 0x10ec, _) => Some(false),
        _ => None,
    }
}

/// `pci_type="0302 [10de:20b0] [10de:134f] a1"`, `pci_link_speed="31.507692"`.
fn ids(machine: &mut Machine, node: &Node<'_, '_>, bdf: Bdf, at: Origin) {
    let text = node.attribute("pci_type").unwrap_or("");
    let mut words = text.split_ascii_whitespace();
    let class = words.next().and_then(|word| u32::from_str_radix(word.get(..4)?, 16).ok());
    let pair = |word: &str| {
        let (a, b) = word.trim_matches(['[', ']']).split_once(':')?;
        Some((u16::from_str_radix(a, 16).ok()?, u16::from_str_radix(b, 16).ok()?))
    };
    let device = machine.pci_at(bdf);
    if let Some(class) = class {
        device.class.learn(class << 8, at);
    }
    if let Some((vendor, id)) = words.next().and_then(pair) {
        device.vendor.learn(vendor, at);
        device.device.learn(id, at);
    }
    if let Some(subsystem) = words.next().and_then(pair) {
        device.subsystem.learn(subsystem, at);
    }
}

/// 0 block, 1 GPU, 2 network, 3 OpenFabrics, 4 DMA, 5 co-processor.
fn os_device(machine: &mut Machine, node: &Node<'_, '_>, place: &Place, at: Origin) {
    let Some(Parent::Bridge(bdf)) = place.parent else { return };
    let name = node.attribute("name").unwrap_or("");
    if name.is_empty() {
        return;
    }
    match node.attribute("osdev_type") {
        Some("3") => {
            let numa = place.numa;
            machine.nics.remove(&bdf.to_string());
            let nic = machine.nic(name);
            nic.bdf.learn(bdf, at);
            nic.rdma.learn(true, at);
            if let Some(numa) = numa {
                nic.numa.learn(numa, at);
            }
        }
        Some("0") => {
            let block = machine.platform.blocks.entry(name.to_string()).or_default();
            block.controller.learn(bdf, at);
        }
        _ => {}
    }
}

fn info(machine: &mut Machine, node: &Node<'_, '_>, at: Origin) {
    for child in node.children().filter(|child| child.has_tag_name("info")) {
        let value = child.attribute("value").unwrap_or("").to_string();
        let platform = &mut machine.platform;
        match child.attribute("name") {
            Some("Architecture") => platform.arch.learn(value, at),
            Some("CPUVendor") => platform.cpu_vendor.learn(value, at),
            Some("OSRelease") => platform.kernel.learn(value, at),
            _ => {}
        }
    }
}

/// CPUs in a set of comma-separated hexadecimal words with `0x`.
fn count_cpus(set: &str) -> u32 {
    set.split(',')
        .filter_map(|word| u64::from_str_radix(word.trim().trim_start_matches("0x"), 16).ok())
        .map(u64::count_ones)
        .fold(0, u32::saturating_add)
}
