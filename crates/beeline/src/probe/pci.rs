//! The PCI tree from `/sys/bus/pci/devices`.

use beeline_core::facts::{
    Bdf, IommuType, Known, Link, Origin, Parent, pci_config, register_functions,
};

use super::Probe;

const DEVICES: &str = "/sys/bus/pci/devices";

pub(super) fn gather(probe: &mut Probe) {
    let names = probe.tree.list(DEVICES);
    if names.is_empty() {
        return;
    }
    let at = probe.source(DEVICES);
    let (mut hidden, mut readable) = (0u32, 0u32);
    for name in &names {
        let Some(bdf) = Bdf::parse(name) else { continue };
        let path = format!("{DEVICES}/{name}");
        identity(probe, &path, bdf, at);
        place(probe, &path, bdf, at);
        link(probe, &path, bdf, at);
        if let Some(bytes) = probe.tree.read(&format!("{path}/config"), 4096) {
            let config = pci_config::decode(&bytes);
            let device = probe.machine.pci_at(bdf);
            if config.hidden {
                hidden += 1;
                device.hidden.learn(true, at);
            } else {
                readable += 1;
            }
            if let Some(port) = config.port {
                device.port.learn(port, at);
            }
            if let Some(acs) = config.acs {
                device.acs.learn(acs, at);
            }
        }
    }
    if hidden > 0 && readable == 0 {
        let text = "PCI capabilities (ACS, ports) are hidden from this user".to_owned();
        probe.note(text);
    }
    register_functions(&mut probe.machine, at);
    gpus_of_the_driver(probe);
}

fn hex(probe: &Probe, path: &str) -> Option<u32> {
    let text = probe.text(path)?;
    u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

fn identity(probe: &mut Probe, path: &str, bdf: Bdf, at: Origin) {
    let number = |file: &str| hex(probe, &format!("{path}/{file}"));
    let class = number("class");
    let short = |file: &str| number(file).and_then(|value| u16::try_from(value).ok());
    let (vendor, id) = (short("vendor"), short("device"));
    let subsystem = short("subsystem_vendor").zip(short("subsystem_device"));
    let driver = probe.tree.link_name(&format!("{path}/driver"));
    let bars = probe.text(&format!("{path}/resource"));
    let device = probe.machine.pci_at(bdf);
    if let Some(class) = class {
        device.class.learn(class, at);
    }
    if let Some(vendor) = vendor {
        device.vendor.learn(vendor, at);
    }
    if let Some(id) = id {
        device.device.learn(id, at);
    }
    if let Some(subsystem) = subsystem {
        device.subsystem.learn(subsystem, at);
    }
    if let Some(driver) = driver {
        device.driver.learn(driver, at);
    }
    if let Some(bytes) = bars.and_then(|text| largest_bar(&text)) {
        device.bar_bytes.learn(bytes, at);
    }
    // Other sources give every function a name; sysfs has none, and its presence is what counts.
    let name = format!("{:04x}:{:04x}", vendor.unwrap_or(0), id.unwrap_or(0));
    device.name.learn(name, at);
    if let Some(vendor) = vendor {
        guest_sign(probe, vendor, at);
    }
}

/// Devices that only a hypervisor makes.
fn guest_sign(probe: &mut Probe, vendor: u16, at: Origin) {
    match vendor {
        0x1af4 => probe.learn_hypervisor("QEMU or KVM, by its devices", at),
        0x1414 => probe.learn_hypervisor("Hyper-V, by its devices", at),
        0x15ad => probe.learn_hypervisor("VMware, by its devices", at),
        _ => {}
    }
}

/// Lines of `start end flags`; the first six are the BARs.
fn largest_bar(text: &str) -> Option<u64> {
    let bars = text.lines().take(6).filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let mut number = || u64::from_str_radix(words.next()?.trim_start_matches("0x"), 16).ok();
        let (start, end) = (number()?, number()?);
        (end > start).then(|| end - start + 1)
    });
    bars.max()
}

/// The link of a device leads through all bridges above it.
fn place(probe: &mut Probe, path: &str, bdf: Bdf, at: Origin) {
    let parts = probe.tree.link_parts(path);
    let parent = parts.iter().rev().nth(1).and_then(|above| match Bdf::parse(above) {
        Some(bridge) => Some(Parent::Bridge(bridge)),
        None => above.starts_with("pci").then(|| Parent::Host(above.clone())),
    });
    let numa = probe.text(&format!("{path}/numa_node")).and_then(|text| text.parse::<i32>().ok());
    let group = probe.tree.link_name(&format!("{path}/iommu_group"));
    let kind = group.as_ref().and_then(|group| {
        let text = probe.text(&format!("/sys/kernel/iommu_groups/{group}/type"))?;
        Some(match text.as_str() {
            "identity" => IommuType::Identity,
            "DMA" | "DMA-FQ" => IommuType::Translated,
            _ => IommuType::Other,
        })
    });
    let buses = ["secondary_bus_number", "subordinate_bus_number"]
        .map(|file| probe.text(&format!("{path}/{file}")).and_then(|text| text.parse::<u8>().ok()));
    let device = probe.machine.pci_at(bdf);
    if let Some(parent) = parent {
        device.parent.learn(parent, at);
    }
    if let Some(numa) = numa {
        device.numa.learn(numa, at);
    }
    if let Some(Ok(group)) = group.map(|group| group.parse()) {
        device.iommu_group.learn(group, at);
    }
    if let Some(kind) = kind {
        device.iommu_type.learn(kind, at);
    }
    if let [Some(secondary), Some(subordinate)] = buses {
        device.buses.learn((secondary, subordinate), at);
    }
}

fn link(probe: &mut Probe, path: &str, bdf: Bdf, at: Origin) {
    for (prefix, is_current) in [("current", true), ("max", false)] {
        let speed = probe.text(&format!("{path}/{prefix}_link_speed"));
        let width = probe.text(&format!("{path}/{prefix}_link_width"));
        let values =
            speed.and_then(|text| Link::parse_speed(&text)).zip(width.and_then(|w| w.parse().ok()));
        let Some((speed_100mt, width)) = values else { continue };
        // Devices without a link (emulated ones) report zero or 255.
        if speed_100mt == 0 || width == 0 || width > 64 {
            continue;
        }
        let device = probe.machine.pci_at(bdf);
        let link = Link { speed_100mt, width };
        if is_current { device.link.learn(link, at) } else { device.link_max.learn(link, at) }
    }
}

/// `/proc/driver/nvidia/gpus/BDF/information`: model and UUID without any driver call.
fn gpus_of_the_driver(probe: &mut Probe) {
    const GPUS: &str = "/proc/driver/nvidia/gpus";
    let names = probe.tree.list(GPUS);
    if names.is_empty() {
        return;
    }
    let at = probe.source(GPUS);
    for name in names {
        let Some(bdf) = Bdf::parse(&name) else { continue };
        let Some(text) = probe.text(&format!("{GPUS}/{name}/information")) else { continue };
        let field = |key: &str| {
            let line = text.lines().find(|line| line.trim_start().starts_with(key))?;
            line.split_once(':').map(|(_, value)| value.trim().to_owned())
        };
        let gpu = probe.machine.gpu_at(bdf, at);
        if let Some(model) = field("Model:") {
            // The name of the PCI function is only its numbers.
            gpu.name = None;
            gpu.name.learn(model, at);
        }
        if let Some(uuid) = field("GPU UUID:") {
            gpu.uuid.learn(uuid, at);
        }
    }
}
