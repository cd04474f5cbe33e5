//! Checks of collective libraries: topology and graph files, providers, ranks that disagree.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::context::Context;
use super::{Finding, Severity, Verdict};
use crate::facts::machine::TopoFile;
use crate::facts::{Bdf, Event, Kind, Known};
use crate::topology::Point;

fn log_quiet(context: &Context<'_>, message: &str) -> Verdict {
    match context.machine.has(&[Kind::NcclLog]) {
        true => Verdict::pass(message),
        false => Verdict::skip(&["NCCL_DEBUG=INFO log"]),
    }
}

fn topology_files<'m>(context: &Context<'m>) -> Vec<&'m TopoFile> {
    let files = context.machine.topo_files.iter();
    files.filter(|file| matches!(file.format.as_str(), "nccl" | "rccl")).collect()
}

/// An attribute that the library needs is missing in the topology file.
pub(super) fn missing_attribute(context: &Context<'_>) -> Verdict {
    let missing = context.events(|event| match event {
        Event::TopoAttributeMissing { attribute, element } => Some((attribute, element)),
        _ => None,
    });
    let Some(((attribute, element), _)) = missing.first() else {
        return log_quiet(context, "no attribute of a topology file is missing");
    };
    let evidence = missing.iter().map(|(_, seen)| context.cite_seen(seen));
    let mut finding = Finding::error(alloc::format!(
        "attribute {attribute} of node {element} is missing in the topology file; the library fills it \
         only for CPUs that own a visible GPU"
    ))
    .seen(evidence)
    .fix([
        "use a newer network plugin, which writes the file for the GPUs at hand",
        "or add arch, vendor and affinity to every cpu node",
    ]);
    let gaps: Vec<_> = topology_files(context)
        .into_iter()
        .flat_map(|file| file.cpu_gaps.iter().map(move |gap| (file, gap)))
        .filter(|(_, (_, name, _))| name == *attribute)
        .collect();
    if gaps.is_empty() {
        finding = finding.ask(["the topology file (NCCL_TOPO_FILE or the plugin's)"]);
    }
    for (file, (node, _, gpus)) in gaps {
        let subset = match gpus.is_empty() {
            true => "a job without GPUs of this node".to_string(),
            false => alloc::format!("a job that leaves out all of {}", gpus.join(", ")),
        };
        finding = finding
            .on([alloc::format!("cpu numaid={node}")])
            .seen([context.cite(file.origin)])
            .maybe([alloc::format!("{subset} triggers it")]);
    }
    finding.into()
}

/// A graph file for another number of GPUs.
pub(super) fn graph_mismatch(context: &Context<'_>) -> Verdict {
    let missing = context.events(|event| match event {
        Event::GraphDevNotFound { dev } => Some(*dev),
        _ => None,
    });
    let graph = context.machine.topo_files.iter().find(|file| file.format == "graph");
    let ranks = context.events(|event| match event {
        Event::Communicator { ranks, .. } => Some(*ranks),
        _ => None,
    });
    let job = ranks.iter().map(|(ranks, _)| *ranks).max().map(u64::from);
    let setting = context.setting("NCCL_GRAPH_FILE");
    let listed = graph.map(|file| file.graph_devs.len() as u64);
    let differs = listed.zip(job).is_some_and(|(listed, job)| listed > job);
    if missing.is_empty() && !(differs && setting.is_some()) {
        return match (graph.is_some() || setting.is_some(), context.machine.has(&[Kind::NcclLog])) {
            (true, false) => Verdict::skip(&["NCCL_DEBUG=INFO log of the job"]),
            _ => log_quiet(context, "no graph file for other GPUs"),
        };
    }
    let count =
        |value: Option<u64>| value.map_or("an unknown number of".to_string(), |v| v.to_string());
    let mut finding = Finding::error(alloc::format!(
        "the graph file names {} devices, the job has {} GPUs: its first unknown device is {}",
        count(listed),
        count(job),
        missing.first().map_or("beyond the job".to_string(), |(dev, _)| dev.to_string())
    ))
    .seen(missing.iter().map(|(_, seen)| context.cite_seen(seen)))
    .seen(graph.map(|file| context.cite(file.origin)));
    match setting {
        Some(fact) => {
            finding = finding.seen([context.cite(fact.origin)]).fix([alloc::format!(
                "remove NCCL_GRAPH_FILE={} from {}; a topology file alone is fine",
                fact.value.value,
                context.setting_source(fact)
            )]);
        }
        None => {
            finding = finding
                .ask(["/etc/nccl.conf, ~/.nccl.conf and the environment (NCCL_GRAPH_FILE)"])
                .fix(["remove NCCL_GRAPH_FILE where it is set; a topology file alone is fine"]);
        }
    }
    finding.into()
}

/// A dump of one machine given to another as its topology.
pub(super) fn topology_lint(context: &Context<'_>) -> Verdict {
    let files = topology_files(context);
    if files.is_empty() {
        return Verdict::skip(&["the topology file"]);
    }
    let Some(setting) = context.setting("NCCL_TOPO_FILE") else {
        return Verdict::pass("the topology file is read only, no setting injects it");
    };
    let other = context.machine.has(&[Kind::Lspci, Kind::Live]);
    let mut findings = Vec::new();
    for file in files {
        let foreign: Vec<String> = file
            .devices
            .iter()
            .filter(|bdf| {
                // Another source that lists functions gives every one a name.
                let device = context.machine.pci.get(bdf);
                other && device.is_none_or(|device| device.name.is_none())
            })
            .map(Bdf::to_string)
            .collect();
        let elements = file.gpus + file.nets;
        if elements == 0 && foreign.is_empty() {
            continue;
        }
        let mut parts = Vec::new();
        if elements > 0 {
            parts.push(alloc::format!("{} gpu and {} net elements", file.gpus, file.nets));
        }
        if !foreign.is_empty() {
            parts.push(alloc::format!(
                "devices that this machine does not have: {}",
                foreign.join(", ")
            ));
        }
        let message = alloc::format!("an injected topology file holds {}", parts.join("; "));
        let finding = Finding::warning(message)
            .on(foreign)
            .seen([context.cite(file.origin), context.cite(setting.origin)])
            .fix([
                "keep cpu and pci elements only; the library fills in GPUs and NICs",
                "bus ids of devices must be the guest's; those of switches may be invented",
            ]);
        findings.push(finding);
    }
    Verdict::or(findings, || Verdict::pass("the injected file has only cpu and pci elements"))
}

/// Bus ids of another machine.
pub(super) fn foreign_busid(context: &Context<'_>) -> Verdict {
    let lost = context.events(|event| match event {
        Event::TopoPathNotFound { bus } => Some(bus.as_str()),
        _ => None,
    });
    if lost.is_empty() {
        return log_quiet(context, "every bus of the topology file exists here");
    }
    let buses: Vec<&str> = lost.iter().map(|(bus, _)| *bus).collect();
    let message = alloc::format!(
        "the topology file names buses that this machine does not have: {}",
        buses.join(", ")
    );
    Finding::warning(message)
        .on(buses)
        .seen(lost.iter().map(|(_, seen)| context.cite_seen(seen)))
        .fix(["rewrite the bus ids of devices to those of this guest (lspci)"])
        .into()
}

/// A path printed as PHB because GPUDirect RDMA is off, not because of the hardware.
pub(super) fn printed_phb(context: &Context<'_>) -> Verdict {
    let printed = context.events(|event| match event {
        Event::PathToNet { gpu, kind } if kind == "PHB" => Some(gpu.as_str()),
        _ => None,
    });
    if printed.is_empty() {
        return log_quiet(context, "no path to a NIC is printed as PHB");
    }
    let off = context.event(|event| match event {
        Event::GdrHca { enabled: false, .. } | Event::GdrPair { enabled: false, .. } => Some(()),
        _ => None,
    });
    let topology = &context.topology;
    let mut nearer = Vec::new();
    for (gpu, seen) in &printed {
        let Some(index) = log_gpu(gpu).and_then(|bdf| context.gpu_at(bdf)) else { continue };
        let near = topology.nics_near(index);
        if let Some((nic, distance)) = near.first().filter(|(_, d)| d.below_host_bridge()) {
            let text = alloc::format!("{} - {nic}: {distance}", topology.label(Point::Gpu(index)));
            nearer.push((text, context.cite_seen(seen)));
        }
    }
    if nearer.is_empty() {
        let tree = context.machine.pci.values().any(|device| device.parent.is_some());
        return match tree {
            true => Verdict::pass("the printed distances are the hardware's"),
            false => Verdict::skip(&["the topology dump of the job, or lspci -tv"]),
        };
    }
    let why = if off.is_some() {
        "GPUDirect RDMA is off, so"
    } else {
        "probably because GPUDirect RDMA is off,"
    };
    let finding = Finding::info(alloc::format!(
        "the log prints PHB where the hardware is nearer: {why} the library goes through the CPU"
    ));
    finding
        .on(nearer.iter().map(|(text, _)| text.clone()))
        .seen(nearer.into_iter().map(|(_, cite)| cite))
        .fix(["switch GPUDirect RDMA on; the printed distance follows"])
        .into()
}

/// `1c000`, or `0-1c000` of newer logs with the system number in front.
fn log_gpu(text: &str) -> Option<Bdf> {
    Bdf::from_log_id(text.rsplit('-').next().unwrap_or(text))
}

/// The network plugin found no provider.
pub(super) fn no_provider(context: &Context<'_>) -> Verdict {
    let Some(seen) = context.seen(&Event::OfiNoProvider) else {
        return log_quiet(context, "the network plugin found a provider");
    };
    let wanted = context.setting("FI_PROVIDER").map_or("efa", |fact| fact.value.value.as_str());
    Finding::unknown(Severity::Error, "the network plugin found no provider")
        .seen([context.cite_seen(seen)])
        .maybe([
            alloc::format!(
                "the libfabric found first has no {wanted} provider: list each install and its providers \
                 (fi_info -l, LD_LIBRARY_PATH)"
            ),
            "the devices are not accessible (/dev/infiniband)".to_string(),
        ])
        .ask(["fi_info -p efa of each libfabric", "ls -l /dev/infiniband in the job"])
        .into()
}

/// Sizes of one collective differ between ranks.
pub(super) fn rank_mismatch(context: &Context<'_>) -> Verdict {
    let pairs = context.events(|event| match event {
        Event::CollectiveMismatch { local, remote } => Some((*local, *remote)),
        _ => None,
    });
    if pairs.is_empty() {
        return log_quiet(context, "no sizes differ between ranks");
    }
    let sizes: Vec<String> =
        pairs.iter().map(|((l, r), _)| alloc::format!("local {l}, remote {r}")).collect();
    Finding::error(alloc::format!(
        "two ranks disagree about one collective: {} bytes",
        sizes.join("; ")
    ))
    .seen(pairs.iter().map(|(_, seen)| context.cite_seen(seen)))
    .maybe([
        "NCCL_* settings or tuning differ between the ranks",
        "the ranks issue different collectives: count, type or order",
    ])
    .ask([
        "the NCCL_* environment of every rank",
        "where that agrees: count, type and order of the calls",
    ])
    .fix(["use the same environment and library on all nodes"])
    .into()
}

/// Messages that look bad and are not.
pub(super) fn benign(context: &Context<'_>) -> Verdict {
    let symbols = context.events(|event| match event {
        Event::OptionalSymbolMissing { symbol } => Some(symbol.as_str()),
        _ => None,
    });
    if symbols.is_empty() {
        return log_quiet(context, "no optional symbol is missing");
    }
    let names: Vec<&str> = symbols.iter().map(|(symbol, _)| *symbol).collect();
    Finding::info(alloc::format!(
        "optional symbols of a newer library are missing, which is harmless: {}",
        names.join(", ")
    ))
    .seen(symbols.iter().map(|(_, seen)| context.cite_seen(seen)))
    .into()
}

/// What a normal log says, for its own sake.
pub(super) fn summary(context: &Context<'_>) -> Verdict {
    let mut parts: Vec<String> = Vec::new();
    for event in context.machine.events.keys() {
        match event {
            Event::NcclVersion { version } => parts.push(alloc::format!("NCCL {version}")),
            Event::Channels { count } => parts.push(alloc::format!("{count} channels")),
            Event::SystemLink { kind, tenths_gb_s } => {
                parts.push(alloc::format!("{kind} {}.{} GB/s", tenths_gb_s / 10, tenths_gb_s % 10));
            }
            Event::AverageBusBandwidth { milli_gb_s } => parts.push(alloc::format!(
                "average bus bandwidth {}.{:03} GB/s (an average over sizes, no verdict)",
                milli_gb_s / 1000,
                milli_gb_s % 1000
            )),
            _ => {}
        }
    }
    if parts.is_empty() {
        return Verdict::skip(&["NCCL_DEBUG=INFO log"]);
    }
    Verdict::Pass(parts.join(", "))
}

/// A merged NIC of several ports.
pub(super) fn merged_nic(context: &Context<'_>) -> Verdict {
    let merged: Vec<(&String, String)> = context
        .machine
        .nics
        .iter()
        .filter(|(_, nic)| nic.members.len() > 1)
        .map(|(name, nic)| {
            let speed = nic.speed_mbps.known().copied().unwrap_or(0);
            (name, alloc::format!("{name}: {} ports, {speed} Mb/s together", nic.members.len()))
        })
        .collect();
    if merged.is_empty() {
        return Verdict::skip(&["a topology file with a merged NIC"]);
    }
    let text: Vec<String> = merged.iter().map(|(_, text)| text.clone()).collect();
    Finding::info(alloc::format!("a virtual NIC made of several ports: {}", text.join("; ")))
        .on(merged.iter().map(|(name, _)| (*name).clone()))
        .into()
}
