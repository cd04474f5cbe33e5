//! What is known of each path, at its level: capable, plausible, verified.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::Serialize;

use super::context::{Context, Iommu};
use crate::facts::{Distance, P2pStatus};
use crate::topology::{Answer, Point};

/// How much is known about a path. Files alone never reach [`Level::Verified`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Something refuses it.
    Refused,
    /// Nothing decides.
    Unknown,
    /// The driver says it can.
    Capable,
    /// Topology, ACS and IOMMU agree.
    Plausible,
    /// Bytes went through and were compared.
    Verified,
}

impl Level {
    /// The name, for output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Unknown => "unknown",
            Self::Capable => "capable",
            Self::Plausible => "plausible",
            Self::Verified => "verified",
        }
    }
}

/// One path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathVerdict {
    /// One end.
    pub from: String,
    /// The other end.
    pub to: String,
    /// Distance, `?` where unknown.
    pub distance: String,
    /// Bandwidth of one direction in MB/s, where the facts state it.
    pub mb_per_s: Option<u64>,
    /// How much is known.
    pub level: Level,
    /// Why it is no better.
    pub why: String,
}

/// Paths between GPUs, then from each GPU to each NIC.
pub(super) fn verdicts(context: &Context<'_>) -> Vec<PathVerdict> {
    let topology = &context.topology;
    let mut paths = Vec::new();
    for (a, b) in topology.gpu_pairs() {
        let (level, why) = peer(context, a, b);
        paths.push(verdict(context, Point::Gpu(a), Point::Gpu(b), level, why));
    }
    for gpu in topology.gpus() {
        for nic in topology.nics() {
            let (level, why) = to_nic(context, gpu, nic);
            paths.push(verdict(context, gpu, nic, level, why));
        }
    }
    paths
}

fn verdict(
    context: &Context<'_>,
    from: Point<'_>,
    to: Point<'_>,
    level: Level,
    why: String,
) -> PathVerdict {
    let distance = match context.topology.distance(from, to) {
        Answer::Known(distance) => distance.to_string(),
        Answer::Unknown { .. } => "?".to_string(),
    };
    PathVerdict {
        from: context.topology.label(from),
        to: context.topology.label(to),
        distance,
        mb_per_s: context.topology.mb_per_s(from, to),
        level,
        why,
    }
}

fn peer(context: &Context<'_>, a: usize, b: usize) -> (Level, String) {
    let status = context.p2p_status(a, b);
    match status {
        Some(P2pStatus::Ok) | None => {}
        Some(P2pStatus::Unknown) => {
            return (Level::Unknown, "the driver does not know".to_string());
        }
        Some(other) => return (Level::Refused, alloc::format!("driver: {}", other.words())),
    }
    let capable = status == Some(P2pStatus::Ok);
    if context.linked(a, b) {
        let why =
            if capable { "joined by NVLink; run a probe to verify" } else { "joined by NVLink" };
        return (Level::Plausible, why.to_string());
    }
    let distance = context.topology.distance(Point::Gpu(a), Point::Gpu(b)).known();
    if !capable && distance.is_some_and(|distance| distance >= Distance::Node) {
        return (Level::Unknown, "far apart: staged through the host by default".to_string());
    }
    let path = context.topology.path(Point::Gpu(a), Point::Gpu(b));
    if !context.topology.redirecting(&path).is_empty() {
        return (Level::Refused, "ACS redirect on the way".to_string());
    }
    if let Iommu::Translated(_) = context.iommu {
        return (Level::Refused, "the IOMMU translates peer addresses".to_string());
    }
    let clear = matches!(context.iommu, Iommu::Off(_) | Iommu::Identity(_));
    let near = path.distance.known().is_some_and(|distance| distance <= Distance::Phb);
    match (capable, near && clear && context.topology.acs_visible()) {
        (true, true) => (Level::Plausible, "run a probe to verify".to_string()),
        (true, false) => {
            (Level::Capable, "topology, ACS or IOMMU state is not known to agree".to_string())
        }
        (false, _) => (Level::Unknown, "the driver was not asked".to_string()),
    }
}

fn to_nic(context: &Context<'_>, gpu: Point<'_>, nic: Point<'_>) -> (Level, String) {
    let Point::Nic(name) = nic else { return (Level::Unknown, String::new()) };
    let Some(record) = context.machine.nics.get(name) else {
        return (Level::Unknown, String::new());
    };
    if record.rdma.as_ref().is_some_and(|fact| !fact.value) {
        return (Level::Refused, "not an RDMA device".to_string());
    }
    if record.gdr.as_ref().is_some_and(|fact| !fact.value) {
        return (Level::Refused, "GPUDirect RDMA is off for this NIC".to_string());
    }
    let path = context.topology.path(gpu, nic);
    if !context.topology.redirecting(&path).is_empty() {
        return (Level::Refused, "ACS redirect on the way".to_string());
    }
    match context.topology.distance(gpu, nic) {
        Answer::Known(distance) if distance.below_host_bridge() => {
            let agreed = record.gdr.as_ref().is_some_and(|fact| fact.value);
            let level = if agreed { Level::Plausible } else { Level::Capable };
            (level, "near enough for the default level of NCCL".to_string())
        }
        Answer::Known(distance) => {
            let why = alloc::format!("{distance}: farther than the default level of NCCL (PXB)");
            (Level::Unknown, why)
        }
        Answer::Unknown { why, .. } => (Level::Unknown, why),
    }
}
