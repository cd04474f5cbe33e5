//! Checks of links, topology files and what the live machine lacks.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::context::Context;
use super::{Finding, Severity, Verdict};
use crate::facts::{Bdf, Distance, Kind, Known, Parent};
use crate::topology::{Answer, Point};

/// A switch whose uplink is far slower than what hangs below it.
pub(super) fn uplink_slow(context: &Context<'_>) -> Verdict {
    let mut slow: Vec<(Bdf, String, String)> = Vec::new();
    let mut judged = false;
    for (bdf, device) in &context.machine.pci {
        let Some(Parent::Bridge(parent)) = device.parent.known() else { continue };
        let uplink = context.machine.pci.get(parent).and_then(|bridge| bridge.link.as_ref());
        let (Some(uplink), Some(link)) = (uplink, device.link.as_ref()) else { continue };
        judged = true;
        // Half is a generation: common, and often only an idle link. Less than half is not.
        if uplink.value.mb_per_s() * 2 < link.value.mb_per_s()
            && !slow.iter().any(|(known, _, _)| known == parent)
        {
            let text = alloc::format!(
                "{parent}: {} ({} MB/s) above {bdf}: {} ({} MB/s)",
                uplink.value,
                uplink.value.mb_per_s(),
                link.value,
                link.value.mb_per_s()
            );
            slow.push((*parent, text, context.cite(uplink.origin)));
        }
    }
    if !judged {
        return Verdict::skip(&["link speeds: an NCCL topology file or lspci -vvv"]);
    }
    if slow.is_empty() {
        return Verdict::pass("no switch has an uplink far slower than its devices");
    }
    let text: Vec<String> = slow.iter().map(|(_, text, _)| text.clone()).collect();
    let message = alloc::format!(
        "the uplink limits GPU to CPU and traffic across switches; devices below one switch are not \
         affected: {}",
        text.join("; ")
    );
    Finding::warning(message)
        .on(slow.iter().map(|(bdf, _, _)| bdf.to_string()))
        .seen(slow.iter().map(|(_, _, cite)| cite.clone()))
        .fix(["compare with LnkCap of the port (lspci -vvv); retrain or reseat if the port can do more"])
        .into()
}

/// A link that trained narrower than it can, or a low speed in one sample.
pub(super) fn link_reduced(context: &Context<'_>) -> Verdict {
    let (mut narrow, mut low, mut judged) = (Vec::new(), Vec::new(), false);
    for gpu in &context.machine.gpus {
        let Some(device) = gpu.bdf.known().and_then(|bdf| context.machine.pci.get(bdf)) else {
            continue;
        };
        let (Some(link), Some(max)) = (device.link.as_ref(), device.link_max.as_ref()) else {
            continue;
        };
        judged = true;
        let text = alloc::format!("{}: {} of {}", gpu.label(), link.value, max.value);
        if link.value.width < max.value.width {
            narrow.push((text, context.cite(link.origin)));
        } else if link.value.speed_100mt < max.value.speed_100mt {
            low.push((text, context.cite(link.origin)));
        }
    }
    let mut findings = Vec::new();
    if !narrow.is_empty() {
        let text: Vec<String> = narrow.iter().map(|(text, _)| text.clone()).collect();
        let message = alloc::format!("a link is narrower than the GPU can: {}", text.join("; "));
        let finding = Finding::warning(message).on(text).seen(narrow.into_iter().map(|(_, at)| at));
        findings.push(finding.fix(["reseat the board; look for a slot or riser with fewer lanes"]));
    }
    if !low.is_empty() {
        let text: Vec<String> = low.iter().map(|(text, _)| text.clone()).collect();
        let message = "a link runs below its best speed in this sample; idle GPUs lower it";
        findings.push(Finding::info(message).on(text).seen(low.into_iter().map(|(_, at)| at)));
    }
    Verdict::or(findings, || match judged {
        true => Verdict::pass("every GPU link is as wide and fast as it can"),
        false => Verdict::skip(&["nvidia-smi -q or lspci -vvv"]),
    })
}

/// How near the nearest NIC of each GPU is.
pub(super) fn nic_distance(context: &Context<'_>) -> Verdict {
    let topology = &context.topology;
    let (gpus, nics) = (context.machine.gpus.len(), rdma_nics(context));
    if gpus == 0 || nics.is_empty() {
        return match context.live() {
            true => Verdict::pass("no pair of a GPU and an RDMA NIC"),
            false => Verdict::skip(&["nvidia-smi topo -m or an NCCL topology file with a NIC"]),
        };
    }
    let (mut far, mut unknown, mut near) = (Vec::new(), Vec::new(), 0u32);
    for gpu in topology.gpus() {
        let mut best: Option<Distance> = None;
        let mut open = None;
        for nic in &nics {
            match topology.distance(gpu, Point::Nic(nic)) {
                Answer::Known(distance) => best = Some(best.map_or(distance, |b| b.min(distance))),
                Answer::Unknown { why, .. } => open = Some(why),
            }
        }
        match (best, open) {
            (Some(distance), _) if distance.below_host_bridge() => near += 1,
            (_, Some(why)) => unknown.push((topology.label(gpu), why)),
            (Some(distance), None) => {
                far.push(alloc::format!("{}: {distance}", topology.label(gpu)));
            }
            (None, None) => {}
        }
    }
    let mut findings = Vec::new();
    if !far.is_empty() {
        let rccl = context.machine.has(&[Kind::RcclTopo]);
        let message = if rccl {
            "the nearest NIC is beyond the host bridge, so it is not used for GPUDirect RDMA at level \
             PXB; RCCL raises the level on some CPUs, so this file does not say that it is off"
        } else {
            "the nearest NIC is beyond the host bridge, so NCCL does not choose GPUDirect RDMA at its \
             default level (PXB)"
        };
        findings.push(Finding::info(message).on(far));
    }
    if let Some((_, why)) = unknown.first() {
        let why = why.clone();
        let finding = Finding::unknown(Severity::Info, alloc::format!("distance not known: {why}"));
        let ask = ["lspci -tv and lspci -vvv, or nvidia-smi topo -m"];
        findings.push(finding.on(unknown.into_iter().map(|(label, _)| label)).ask(ask));
    }
    findings.extend(nic_far_from_all(context, &nics));
    let _ = near;
    Verdict::or(findings, || Verdict::pass("every GPU has a NIC below its host bridge"))
}

/// A NIC that is SYS to GPUs of every socket has no NUMA node of its own.
fn nic_far_from_all(context: &Context<'_>, nics: &[&str]) -> Vec<Finding> {
    let topology = &context.topology;
    let mut nodes: Vec<i32> = topology.gpus().filter_map(|gpu| topology.numa(gpu)).collect();
    nodes.sort_unstable();
    nodes.dedup();
    if nodes.len() < 2 {
        return Vec::new();
    }
    let lost = nics.iter().filter(|nic| {
        let own = topology.numa(Point::Nic(nic)).filter(|node| *node >= 0);
        own.is_none()
            && topology
                .gpus()
                .all(|gpu| topology.distance(gpu, Point::Nic(nic)).known() == Some(Distance::Sys))
    });
    let lost: Vec<&str> = lost.copied().collect();
    // With other NICs near the GPUs this one serves management or storage: nothing to ask.
    if lost.is_empty() || lost.len() < nics.len() {
        return Vec::new();
    }
    let message = "SYS to the GPUs of every socket";
    let finding = Finding::unknown(Severity::Info, message)
        .on(lost)
        .maybe(["the NIC has no NUMA node", "the NIC is virtual"])
        .ask(["lspci -vvv or the NIC's numa_node in sysfs"]);
    alloc::vec![finding]
}

fn rdma_nics<'m>(context: &Context<'m>) -> Vec<&'m str> {
    let nics = context.machine.nics.iter().take(128);
    let rdma = nics.filter(|(_, nic)| nic.rdma.known() != Some(&false));
    rdma.map(|(name, _)| name.as_str()).collect()
}

/// What the running machine lacks for RDMA.
pub(super) fn no_rdma_device(context: &Context<'_>) -> Verdict {
    if !context.live() {
        return Verdict::skip(&["the live machine"]);
    }
    let ports = context.machine.nics.values().any(|nic| nic.rdma.known() == Some(&true));
    if ports {
        return Verdict::pass("there is an RDMA device");
    }
    Finding::info("no RDMA device: GPUDirect RDMA has nothing to use")
        .seen(context.live_source("/sys/class/infiniband"))
        .into()
}

/// Peer-to-peer DMA of the kernel.
pub(super) fn kernel_p2pdma(context: &Context<'_>) -> Verdict {
    let option = context.machine.platform.config.get("CONFIG_PCI_P2PDMA");
    match option {
        Some(fact) if fact.value == "y" => Verdict::pass("the kernel has CONFIG_PCI_P2PDMA"),
        Some(fact) => Finding::info(alloc::format!(
            "the kernel has no peer-to-peer DMA (CONFIG_PCI_P2PDMA is {})",
            if fact.value.is_empty() { "not set" } else { &fact.value }
        ))
        .seen([context.cite(fact.origin)])
        .fix(["run a kernel with CONFIG_PCI_P2PDMA=y"])
        .into(),
        None => match context.machine.platform.symbols.p2pdma.as_ref() {
            Some(fact) if fact.value => Verdict::pass("the kernel has peer-to-peer DMA"),
            Some(fact) => Finding::info("the kernel has no peer-to-peer DMA (no symbol of it)")
                .seen([context.cite(fact.origin)])
                .fix(["run a kernel with CONFIG_PCI_P2PDMA=y"])
                .into(),
            None => Verdict::skip(&["/boot/config of this kernel, or /proc/kallsyms"]),
        },
    }
}

/// nvidia-fs on the running machine.
pub(super) fn nvidia_fs(context: &Context<'_>) -> Verdict {
    if let Some(fact) = context.machine.platform.gds.as_ref().and_then(|gds| gds.nvfs.as_ref()) {
        return Verdict::Pass(alloc::format!("nvidia-fs {} is loaded", fact.value));
    }
    match context.module("nvidia_fs") {
        Some(true) => Verdict::pass("nvidia-fs is loaded"),
        Some(false) => {
            let listed = context.machine.platform.modules_listed.as_ref();
            Finding::info("nvidia-fs is not loaded: no direct storage through it")
                .seen(listed.map(|fact| context.cite(fact.origin)))
                .fix(["install nvidia-fs and load it, or use the kernel's peer-to-peer DMA"])
                .into()
        }
        None => Verdict::skip(&["lsmod or /proc/modules"]),
    }
}

/// Whether GPUs can export dma-buf.
pub(super) fn dmabuf_export(context: &Context<'_>) -> Verdict {
    let states: Vec<(String, bool, String)> = context
        .machine
        .gpus
        .iter()
        .filter_map(|gpu| {
            let fact = gpu.attributes.get("DMA_BUF_SUPPORTED")?;
            Some((gpu.label(), fact.value != 0, context.cite(fact.origin)))
        })
        .collect();
    if states.is_empty() {
        return Verdict::skip(&[
            "the CUDA device attribute DMA_BUF_SUPPORTED, from the live driver",
        ]);
    }
    let without: Vec<String> =
        states.iter().filter(|(_, able, _)| !able).map(|(label, _, _)| label.clone()).collect();
    if without.is_empty() {
        return Verdict::pass(
            "every GPU can export its memory as dma-buf; importing it is the NIC's half",
        );
    }
    Finding::info("GPU memory cannot be exported as dma-buf")
        .on(without)
        .seen(states.into_iter().map(|(_, _, at)| at))
        .fix(["use the open kernel modules of the driver and Linux 5.12 or newer"])
        .into()
}

/// PCI functions whose details an unprivileged user cannot see.
pub(super) fn hidden(context: &Context<'_>) -> Verdict {
    let notes = &context.machine.notes;
    if notes.is_empty() {
        return Verdict::pass("nothing was hidden from this user");
    }
    let text: Vec<String> = notes.iter().map(|note| note.value.clone()).collect();
    Finding::info(text.join("; ")).fix(["run again as root for the full picture"]).into()
}

/// The declared speed of a topology file against a GPU whose model another source names.
pub(super) fn declared_speed(context: &Context<'_>) -> Verdict {
    let mut findings = Vec::new();
    let mut judged = false;
    for gpu in &context.machine.gpus {
        let device = gpu.bdf.known().and_then(|bdf| context.machine.pci.get(bdf));
        let link = device.and_then(|device| device.link.as_ref());
        let (Some(link), Some(limit)) = (link, gpu.name.known().and_then(|name| fastest(name)))
        else {
            continue;
        };
        judged = true;
        if link.value.speed_100mt > limit {
            let message = alloc::format!(
                "{}: the topology file declares {}, the GPU does at most {}.{} GT/s",
                gpu.label(),
                link.value,
                limit / 10,
                limit % 10
            );
            let finding =
                Finding::warning(message).on([gpu.label()]).seen([context.cite(link.origin)]);
            findings.push(finding.fix(["correct link_speed in the file"]));
        }
    }
    Verdict::or(findings, || match judged {
        true => Verdict::pass("no link is declared faster than its GPU"),
        false => Verdict::skip(&["a topology file together with a source that names the GPUs"]),
    })
}

/// Fastest link of a product, in hundreds of MT/s.
fn fastest(name: &str) -> Option<u32> {
    const FASTEST: [(&str, u32); 9] = [
        ("V100", 80),
        ("P100", 80),
        ("T4", 80),
        ("A100", 160),
        ("A10", 160),
        ("A40", 160),
        ("L40", 160),
        ("H100", 320),
        ("H200", 320),
    ];
    FASTEST.iter().find(|(part, _)| name.contains(part)).map(|(_, speed)| *speed)
}

/// An hwloc sample of a link that is slower than the bridges above it.
pub(super) fn sampled_speed(context: &Context<'_>) -> Verdict {
    let low: Vec<String> = context
        .machine
        .gpus
        .iter()
        .filter(|gpu| gpu.attributes.get("hwloc_link_low").is_some_and(|fact| fact.value == 1))
        .map(crate::facts::Gpu::label)
        .collect();
    if !context.machine.has(&[Kind::Hwloc]) {
        return Verdict::skip(&["hwloc XML"]);
    }
    if low.is_empty() {
        return Verdict::pass("no GPU link is sampled below the bridges above it");
    }
    let message = "the link speed in this file is one sample, perhaps of an idle GPU; it does not show a \
                   slow link";
    Finding::info(message.to_string()).on(low).into()
}
