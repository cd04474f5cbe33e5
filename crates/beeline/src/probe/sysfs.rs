//! RDMA devices, block devices, NUMA nodes and peer memory clients of sysfs.

use beeline_core::facts::{Bdf, Fact, Known, read_tree};

use super::Probe;

pub(super) fn gather(probe: &mut Probe) {
    infiniband(probe);
    // What has no entry there does not speak RDMA, whatever its maker.
    if probe.tree.exists("/sys/class") {
        let at = probe.source("/sys/class/infiniband (complete)");
        for nic in probe.machine.nics.values_mut().filter(|nic| nic.ports.is_empty()) {
            nic.rdma = Some(Fact { value: false, origin: at });
        }
    }
    blocks(probe);
    numa(probe);
    memory_peers(probe);
}

const INFINIBAND: &str = "/sys/class/infiniband";
/// Files of all RDMA devices together.
const FILES_MAX: usize = 65_536;

fn infiniband(probe: &mut Probe) {
    let devices = probe.tree.list(INFINIBAND);
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    for device in &devices {
        let base = format!("{INFINIBAND}/{device}");
        for name in ["hca_type", "fw_ver", "node_guid"] {
            push(probe, &mut files, &base, device, name);
        }
        for port in probe.tree.list(&format!("{base}/ports")) {
            for name in ["state", "rate", "link_layer"] {
                push(probe, &mut files, &base, device, &format!("ports/{port}/{name}"));
            }
            for folder in ["counters", "hw_counters", "gids", "gid_attrs/types"] {
                for name in probe.tree.list(&format!("{base}/ports/{port}/{folder}")) {
                    push(
                        probe,
                        &mut files,
                        &base,
                        device,
                        &format!("ports/{port}/{folder}/{name}"),
                    );
                }
            }
        }
    }
    if files.is_empty() {
        return;
    }
    if let Err(error) = read_tree(&mut probe.machine, INFINIBAND, &files) {
        probe.note(error.to_string());
        return;
    }
    let at = probe.source(INFINIBAND);
    for device in devices {
        let bdf = probe.tree.link_name(&format!("{INFINIBAND}/{device}/device"));
        let bdf = bdf.and_then(|name| Bdf::parse(&name));
        let Some(bdf) = bdf.or_else(|| by_link(probe, &device)) else { continue };
        // The function already has a record under its address: the device's name is the better one.
        let listed = probe.machine.nics.remove(&bdf.to_string());
        let nic = probe.machine.nic(&device);
        nic.bdf.learn(bdf, at);
        if let Some(listed) = listed {
            nic.numa = nic.numa.take().or(listed.numa);
        }
    }
}

/// The class entry itself is a link through the device.
fn by_link(probe: &Probe, device: &str) -> Option<Bdf> {
    let parts = probe.tree.link_parts(&format!("{INFINIBAND}/{device}"));
    parts.iter().rev().find_map(|part| Bdf::parse(part))
}

fn push(probe: &Probe, files: &mut Vec<(String, Vec<u8>)>, base: &str, device: &str, name: &str) {
    if files.len() >= FILES_MAX {
        return;
    }
    if let Some(bytes) = probe.tree.read(&format!("{base}/{name}"), 4096) {
        files.push((format!("{device}/{name}"), bytes));
    }
}

/// Block devices of one machine.
const BLOCKS_MAX: usize = 4096;

fn blocks(probe: &mut Probe) {
    const BLOCK: &str = "/sys/block";
    let names = probe.tree.list(BLOCK);
    if names.is_empty() {
        return;
    }
    let at = probe.source(BLOCK);
    for name in names.into_iter().take(BLOCKS_MAX) {
        if name.starts_with("loop") || name.starts_with("ram") {
            continue;
        }
        let base = format!("{BLOCK}/{name}");
        let logical = probe.text(&format!("{base}/queue/logical_block_size"));
        let level = probe.text(&format!("{base}/md/level"));
        let members = probe.tree.list(&format!("{base}/slaves"));
        let parts = probe.tree.link_parts(&base);
        let controller = parts.iter().rev().find_map(|part| Bdf::parse(part));
        let transport = ["nvme", "vd", "sd", "md", "dm-", "zram", "mmcblk", "xvd"]
            .into_iter()
            .find(|prefix| name.starts_with(prefix));
        let block = probe.machine.platform.blocks.entry(name.clone()).or_default();
        if let Some(Ok(bytes)) = logical.map(|text| text.parse()) {
            block.logical_bytes.learn(bytes, at);
        }
        if let Some(level) = level {
            block.raid.learn(level, at);
        }
        if block.members.is_empty() {
            block.members = members;
        }
        if let Some(controller) = controller {
            block.controller.learn(controller, at);
        }
        if let Some(transport) = transport {
            block.transport.learn(transport.to_owned(), at);
        }
    }
}

fn numa(probe: &mut Probe) {
    const NODES: &str = "/sys/devices/system/node";
    let names = probe.tree.list(NODES);
    if names.is_empty() {
        return;
    }
    let at = probe.source(NODES);
    for name in names.into_iter().take(4096) {
        let Some(Ok(node)) = name.strip_prefix("node").map(str::parse::<i32>) else { continue };
        let list = probe.text(&format!("{NODES}/{name}/cpulist")).unwrap_or_default();
        let fact = Fact { value: count(&list), origin: at };
        probe.machine.platform.numa.entry(node).or_insert(fact);
    }
    let mut packages: Vec<String> = Vec::new();
    for cpu in 0..4096 {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id");
        let Some(package) = probe.text(&path) else {
            if cpu > 0 && !probe.tree.exists(&format!("/sys/devices/system/cpu/cpu{cpu}")) {
                break;
            }
            continue;
        };
        if !packages.contains(&package) {
            packages.push(package);
        }
    }
    if let Ok(sockets @ 1..) = u32::try_from(packages.len()) {
        probe.machine.platform.sockets.learn(sockets, at);
    }
}

/// CPUs in `0-3,8-11`.
fn count(list: &str) -> u32 {
    let spans = list.split(',').filter_map(|part| {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let (low, high): (u32, u32) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
        high.checked_sub(low)?.checked_add(1)
    });
    spans.fold(0, u32::saturating_add)
}

fn memory_peers(probe: &mut Probe) {
    const PEERS: &str = "/sys/kernel/mm/memory_peers";
    // The folder comes with the peer memory interface; without that interface nothing can register.
    if !probe.tree.exists(PEERS) {
        return;
    }
    let at = probe.source(PEERS);
    probe.machine.platform.memory_peers_listed.learn(true, at);
    for name in probe.tree.list(PEERS) {
        probe.machine.platform.memory_peers.insert(name, Fact { value: true, origin: at });
    }
}
