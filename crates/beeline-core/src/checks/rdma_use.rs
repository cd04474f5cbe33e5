//! Checks of whether GPUDirect RDMA is used, and why not.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::context::Context;
use super::{Finding, Severity, Status, Verdict};
use crate::facts::{Distance, Event, Kind, Known};
use crate::topology::Point;

/// One node of a job uses GPUDirect RDMA and another does not.
pub(super) fn gdr_asymmetric(context: &Context<'_>) -> Verdict {
    let channels = context.network_channels();
    let mut hosts: Vec<(&str, bool, &str, String)> = Vec::new();
    for (host, gdr, transport, seen) in channels {
        match hosts.iter_mut().find(|(name, ..)| *name == host) {
            Some((_, any, ..)) => *any |= gdr,
            None => hosts.push((host, gdr, transport, context.cite_seen(seen))),
        }
    }
    let with = hosts.iter().filter(|(_, gdr, ..)| *gdr).count();
    match (hosts.len(), with) {
        (0, _) => return Verdict::skip(&["NCCL_DEBUG=INFO logs with channel lines of every node"]),
        (1, _) => return Verdict::skip(&["the log of the other nodes"]),
        (all, with) if with == 0 || with == all => {
            return Verdict::pass("all nodes agree about GPUDirect RDMA");
        }
        _ => {}
    }
    let without: Vec<&(&str, bool, &str, String)> =
        hosts.iter().filter(|(_, gdr, ..)| !gdr).collect();
    let names: Vec<String> = without.iter().map(|(host, ..)| (*host).to_string()).collect();
    let message = alloc::format!(
        "node {} does not use GPUDirect RDMA (via {}), other nodes of the job do",
        names.join(", "),
        without.first().map_or("", |(_, _, transport, _)| transport)
    );
    Finding::warning(message)
        .on(names.clone())
        .seen(hosts.into_iter().map(|(.., cite)| cite))
        .fix([
            alloc::format!(
                "on {}: lsmod | grep peermem; modprobe nvidia-peermem, and keep it in \
                 /etc/modules-load.d",
                names.join(", ")
            ),
            "there too: whether the NIC is near enough to the GPU (nvidia-smi topo -m)".to_string(),
        ])
        .into()
}

/// RDMA works, through host memory.
pub(super) fn gdr_not_used(context: &Context<'_>) -> Verdict {
    let channels: Vec<_> = context
        .network_channels()
        .into_iter()
        .filter(|(_, _, transport, _)| !transport.starts_with("NET/Socket"))
        .collect();
    if channels.is_empty() {
        return Verdict::skip(&["NCCL_DEBUG=INFO log with channel lines over the network"]);
    }
    if channels.iter().any(|(_, gdr, ..)| *gdr) {
        return Verdict::pass("network channels use GPUDirect RDMA");
    }
    let transport = channels.first().map_or("", |(_, _, transport, _)| transport);
    let mut finding = Finding::warning(alloc::format!(
        "channels go via {transport} without GPUDirect RDMA: data is staged through host memory, which \
         works and is slower (\"Using network\" says nothing about it)"
    ))
    .seen(channels.iter().take(4).map(|(.., seen)| context.cite_seen(seen)));
    match context.peermem_loaded() {
        Some(false) => {
            finding = finding.fix(["modprobe nvidia-peermem (no peer memory module is loaded)"]);
        }
        Some(true) => {
            finding = finding.maybe([
                "the NIC is too far from the GPU",
                "GPUDirect RDMA is switched off by a setting",
            ]);
        }
        None => {
            finding = finding
                .fix(["load nvidia-peermem, or use dma-buf"])
                .ask(["lsmod", "/sys/kernel/mm/memory_peers"]);
        }
    }
    finding.into()
}

/// The library itself says that GPUDirect RDMA is off.
pub(super) fn gdr_disabled(context: &Context<'_>) -> Verdict {
    let plugin = context.events(|event| match event {
        Event::PluginGdrDisabled { reason } => Some(reason),
        _ => None,
    });
    let enabled = context.event(|event| match event {
        Event::GdrHca { enabled: true, .. } => Some(()),
        _ => None,
    });
    let hcas = context.events(|event| match event {
        // A socket has no GPUDirect RDMA to lose.
        Event::GdrHca { hca, enabled: false, network, .. } if network != "Socket" => Some(hca),
        _ => None,
    });
    let far = context.events(|event| match event {
        Event::GdrPair { gpu, hca, enabled: false, distance, limit, .. } => {
            Some((gpu, hca, *distance, *limit))
        }
        _ => None,
    });
    if let Some((reason, seen)) = plugin.first() {
        let mut finding = Finding::warning(alloc::format!("the network plugin switched it off: {reason}"))
            .seen([context.cite_seen(seen)])
            .fix(["use a libfabric whose provider supports GPU memory without CUDA calls, or a GPU and driver that do"]);
        if let Some(dmabuf) = context.seen(&Event::DmaBufAvailable) {
            finding = finding.seen([context.cite_seen(dmabuf)]).caution([
                "\"DMA-BUF is available\" in the same log is a property of the GPU only; it does not \
                 mean that the NIC uses it",
            ]);
        }
        return finding.into();
    }
    if !hcas.is_empty() && enabled.is_none() {
        return disabled_hcas(context, &hcas);
    }
    if let Some(((gpu, hca, distance, limit), _)) = far.first() {
        let message = alloc::format!(
            "off for GPU {gpu} and NIC {hca} because of their distance ({distance} > {limit})"
        );
        return Finding::warning(message)
            .on(far.iter().map(|((gpu, hca, ..), _)| alloc::format!("GPU {gpu} - NIC {hca}")))
            .seen(far.iter().take(8).map(|(_, seen)| context.cite_seen(seen)))
            .fix(["use a NIC below the same switch; raising NCCL_NET_GDR_LEVEL can be slower"])
            .into();
    }
    let topo_off: Vec<&str> = context
        .machine
        .nics
        .iter()
        .filter(|(_, nic)| nic.gdr.known() == Some(&false) && nic.rdma.known() == Some(&true))
        .map(|(name, _)| name.as_str())
        .collect();
    if !topo_off.is_empty() {
        let message = "the topology file records GPUDirect RDMA as off for these NICs";
        let file = context.machine.topo_files.first().map(|file| context.cite(file.origin));
        let finding = Finding::info(message).on(topo_off).seen(file);
        return finding.ask(["lsmod", "/sys/kernel/mm/memory_peers", "dma-buf support"]).into();
    }
    match context.machine.has(&[Kind::NcclLog]) {
        true => Verdict::pass("no line says that GPUDirect RDMA is off"),
        false => Verdict::skip(&["NCCL_DEBUG=INFO log"]),
    }
}

fn disabled_hcas(context: &Context<'_>, hcas: &[(&String, &crate::facts::Seen)]) -> Verdict {
    let mut names: Vec<&str> = hcas.iter().map(|(hca, _)| hca.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let evidence: Vec<String> = hcas.iter().map(|(_, seen)| context.cite_seen(seen)).collect();
    if context.single_node() {
        let message = "off for every NIC, but the job runs on one node and does not use them";
        return Finding::info(message).on(names).seen(evidence).into();
    }
    let mut finding =
        Finding::warning("GPUDirect RDMA is off for every NIC; the log does not say why")
            .on(names)
            .seen(evidence);
    let kernel = context.kernel();
    let told = context.event(|event| match event {
        Event::GdrHca { enabled: false, reason, .. } if reason.contains("no module") => Some(()),
        _ => None,
    });
    if told.is_some() {
        finding.message = "GPUDirect RDMA is off for every NIC: no peer memory module".to_string();
    }
    match context.peermem_loaded().or(told.map(|_| false)) {
        Some(false) => {
            finding = finding
                .maybe(["no peer memory module is loaded, and dma-buf is not used"])
                .fix(["modprobe nvidia-peermem"]);
        }
        state => {
            if state.is_none() {
                finding = finding.ask(["lsmod"]);
            }
            finding = finding.maybe([
                "no peer memory module is loaded, and dma-buf is not used",
                "the peer memory module is loaded but not registered with ib_core",
                "kernel, driver or RDMA library without dma-buf",
            ]);
        }
    }
    finding = finding.ask(["/sys/kernel/mm/memory_peers"]);
    if kernel.is_none() {
        finding = finding.ask(["uname -r and the driver's flavour, for dma-buf"]);
    }
    finding.into()
}

/// A job of several nodes talks over TCP.
pub(super) fn tcp(context: &Context<'_>) -> Verdict {
    let socket = context.event(|event| match event {
        Event::UsingNetwork { network, .. } if network == "Socket" => Some(()),
        _ => None,
    });
    let Some((_, seen)) = socket else {
        return match context.machine.has(&[Kind::NcclLog]) {
            true => Verdict::pass("the network is not plain TCP, as far as the log says"),
            false => Verdict::skip(&["NCCL_DEBUG=INFO log"]),
        };
    };
    if context.single_node() {
        return Verdict::pass("TCP, and the job runs on one node and does not use it");
    }
    let none = context.event(|event| match event {
        Event::NoIbDevice { .. } => Some(()),
        _ => None,
    });
    let mut finding = Finding::warning("the nodes talk over TCP sockets: no RDMA at all")
        .seen([context.cite_seen(seen)])
        .seen(none.map(|(_, seen)| context.cite_seen(seen)));
    finding = match none {
        Some(_) => finding
            .maybe(["this machine or container has no RDMA device"])
            .ask(["ls /sys/class/infiniband /dev/infiniband in the job"]),
        None => finding.maybe(["a setting chose it (NCCL_IB_DISABLE, NCCL_NET)", "no RDMA device"]),
    };
    finding.into()
}

/// GPUDirect RDMA is used across the CPU.
pub(super) fn gdr_through_cpu(context: &Context<'_>) -> Verdict {
    let used = context.event(|event| match event {
        Event::Channel { gdr: true, .. } | Event::GdrPair { enabled: true, .. } => Some(()),
        _ => None,
    });
    let Some((_, used)) = used else {
        return match context.machine.has(&[Kind::NcclLog]) {
            true => Verdict::pass("GPUDirect RDMA is not in use"),
            false => Verdict::skip(&["NCCL_DEBUG=INFO log"]),
        };
    };
    let topology = &context.topology;
    let mut far: Vec<String> = Vec::new();
    let mut judged = false;
    for gpu in 0..context.machine.gpus.len().min(128) {
        let near = topology.nics_near(gpu);
        let Some((nic, distance)) = near.first() else { continue };
        judged = true;
        if !distance.below_host_bridge() && *distance != Distance::P2c {
            far.push(alloc::format!("{} - {nic}: {distance}", topology.label(Point::Gpu(gpu))));
        }
    }
    if !judged {
        return Verdict::skip(&["nvidia-smi topo -m, or the topology dump of the job"]);
    }
    if far.is_empty() {
        return Verdict::pass("GPUDirect RDMA stays below the host bridge");
    }
    let setting = context.setting("NCCL_NET_GDR_LEVEL");
    let mut finding = Finding::new(
        Status::Fail,
        Severity::Warning,
        "GPUDirect RDMA goes through the CPU's root complex, which is slower than staging on many CPUs",
    )
    .on(far)
    .seen([context.cite_seen(used)]);
    if let Some(fact) = setting {
        finding = finding.seen([context.cite(fact.origin)]).fix([alloc::format!(
            "remove NCCL_NET_GDR_LEVEL={} from {}: the default level, PXB, leaves it off here",
            fact.value.value,
            context.setting_source(fact)
        )]);
    } else {
        finding = finding.fix(["set NCCL_NET_GDR_LEVEL=PXB (the default of NCCL)"]);
    }
    finding.into()
}
