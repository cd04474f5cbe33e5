//! What is known of each path, at its level: capable, plausible, verified.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::Serialize;

use super::context::Context;
use crate::facts::Known;
use crate::plan::{self, End, Mode};
use crate::reason::Code;
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
        for nic in topology.nics().filter(|nic| may_rdma(context, *nic)) {
            let (level, why) = to_nic(context, gpu, nic);
            paths.push(verdict(context, gpu, nic, level, why));
        }
    }
    paths
}

/// NICs known to have no RDMA are no end of a direct path.
fn may_rdma(context: &Context<'_>, nic: Point<'_>) -> bool {
    let Point::Nic(name) = nic else { return false };
    let rdma = context.machine.nics.get(name).and_then(|nic| nic.rdma.known());
    rdma != Some(&false)
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

/// The level of the straightest route of a plan; without one, why the straightest was refused.
fn level(context: &Context<'_>, from: End<'_>, to: End<'_>) -> (Level, String) {
    let plan = plan::device(context, from, to, Mode::Auto);
    if let Some(choice) = plan.choices.iter().find(|choice| choice.route.is_direct()) {
        let level = match choice.level {
            plan::Level::Capable => Level::Capable,
            plan::Level::Plausible => Level::Plausible,
            plan::Level::Verified => Level::Verified,
        };
        let next = match level {
            Level::Verified => "bytes were compared in both directions",
            _ => "run a probe to verify",
        };
        return (level, alloc::format!("{}; {next}", choice.route));
    }
    // Of two refused routes the last is the one that any machine has.
    let refused = plan.rejected.iter().rfind(|rejected| rejected.route.is_direct());
    let Some(rejected) = refused else { return (Level::Unknown, String::new()) };
    let open = [Code::PathUnknown, Code::PathTooFar, Code::GdrDistance];
    let level = if open.contains(&rejected.why.code) { Level::Unknown } else { Level::Refused };
    (level, alloc::format!("{}: {}", rejected.route, rejected.why))
}

fn peer(context: &Context<'_>, a: usize, b: usize) -> (Level, String) {
    level(context, End::Gpu(a), End::Gpu(b))
}

fn to_nic(context: &Context<'_>, gpu: Point<'_>, nic: Point<'_>) -> (Level, String) {
    match (gpu, nic) {
        (Point::Gpu(gpu), Point::Nic(nic)) => level(context, End::Gpu(gpu), End::Nic(nic)),
        _ => (Level::Unknown, String::new()),
    }
}
