//! Which algorithm a call takes, why not the others, and how long it should take.
//!
//! Predictions are `start + bytes / rate`, by numbers measured between two H200 with 18 NVLinks each, and
//! scaled by the bandwidth of the links where they are others. They order the algorithms and tell a person
//! what to expect (within a quarter, between two GPUs joined by NVLink); results never depend on them.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::call::{Algorithm, Call, Collective};
use super::schedule::{RANKS_MAX, does};
use crate::plan::{Choice, Level, Plan, Rejected};
use crate::reason::{Code, Reason};

mod links;

pub use links::{Pair, pairs, ranks};

/// What joins two ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// NVLink or its like, straight or through its switches.
    Fabric {
        /// MB/s in one direction, as the copy engine reaches it.
        mb_per_s: u64,
    },
    /// Peer access over PCI.
    Pci {
        /// MB/s in one direction.
        mb_per_s: u64,
    },
    /// Both ranks are on one device (simulated ones may be).
    Same,
    /// No peer access, for this reason.
    None(Reason),
}

/// The ranks of a communicator and what joins them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// How many there are.
    pub count: u32,
    /// The slowest link of any pair; bandwidth to all peers at once is that of one link for PCI, and of
    /// the whole fabric for NVLink.
    pub slowest: Link,
    /// Whether calls are launched one by one (`false`) or replayed from a graph.
    pub graph: bool,
    /// MB/s between one device and host memory.
    pub host_mb_per_s: u64,
}

impl Ranks {
    /// As many ranks, joined as the machine was that the numbers come from.
    pub const fn like_h200(count: u32) -> Self {
        let slowest = Link::Fabric { mb_per_s: MEASURED_MB_PER_S };
        Self { count, slowest, graph: false, host_mb_per_s: 50_000 }
    }
}

/// A plan with what each algorithm that could do the call is predicted to take.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// Algorithms in order of preference, and all others with their reasons.
    pub plan: Plan<Algorithm>,
    /// Predicted nanoseconds of every algorithm in `plan.choices`, in that order.
    pub predicted_ns: Vec<u64>,
}

impl Planned {
    /// The algorithm to take; `None` where no rank or too many were given.
    pub fn best(&self) -> Option<Algorithm> {
        self.plan.choices.first().map(|choice| choice.route)
    }
}

/// Most ranks of a communicator whose data goes through kernels.
const KERNEL_RANKS_MAX: u32 = 16;
/// The copy engine's rate on the machine of the measurements.
const MEASURED_MB_PER_S: u64 = 391_000;
/// Most bytes of a part that is reduced and goes as packets of data and flag; above, as lines with a flag at the end.
pub const PACKET_BYTES_MAX: u64 = 128 << 10;
/// Most bytes of a part that is only moved and goes as packets.
pub const PACKET_MOVED_BYTES_MAX: u64 = 256 << 10;
/// Most bytes of a part that goes as packets where windows have no room for lines: more than four ranks.
pub const PACKET_ONLY_BYTES_MAX: u64 = 512 << 10;

/// Most bytes of a part whose flags go in the same stores, as packets or in lines.
pub const fn flagged_bytes_max(ranks: u32) -> u64 {
    match ranks {
        0..=2 => 48 << 20,
        3 | 4 => (48 << 20) / (ranks as u64 - 1).next_power_of_two(),
        _ => PACKET_ONLY_BYTES_MAX,
    }
}
/// Least bytes to one peer from which on copies carry what is only moved, where the calls of all ranks are known at once:
/// below, events and the start of copies take longer than stores do. Measured between two ranks; never planned, since a
/// plan does not know of groups.
pub const fn copied_bytes_min(ranks: u32) -> u64 {
    if ranks > 1 { 128 << 20 } else { u64::MAX }
}
/// Most bytes of an all-reduce that every rank reduces itself, and of a broadcast that the root sends to each rank; above, they
/// share the work, which costs more launches and saves bytes on a link. `lines`: windows have room for lines. Where the two
/// are predicted alike.
pub const fn whole_bytes_max(ranks: u32, lines: bool) -> u64 {
    match (ranks, lines) {
        (0..=2, _) => u64::MAX,
        (3, true) => 2 << 20,
        (4, true) => 1 << 20,
        (3 | 4, false) => 512 << 10,
        (5..=8, _) => 256 << 10,
        _ => 128 << 10,
    }
}
/// In how many pieces a broadcast of more than two ranks goes, so that what comes before and behind the busiest time of the
/// root's link and one launch a piece cost the least together (four H200).
pub fn pieces_of(bytes: u64) -> u64 {
    (bytes / (2 << 20)).isqrt().clamp(1, PIECES_MAX)
}
const PIECES_MAX: u64 = 16;

/// Plans `call` for `ranks`. Never more than one algorithm is chosen by another's failure: the order is that
/// of the predictions, and a rejected algorithm says what it lacks.
pub fn plan(call: &Call, ranks: &Ranks) -> Planned {
    let mut open: Vec<(u64, Algorithm)> = Vec::new();
    let mut rejected: Vec<Rejected<Algorithm>> = Vec::new();
    for route in Algorithm::ALL {
        match judge(call, ranks, route) {
            Ok(nanoseconds) => open.push((nanoseconds, route)),
            Err(why) => rejected.push(Rejected { route, why }),
        }
    }
    open.sort_by_key(|(nanoseconds, _)| *nanoseconds);
    let best = open.first().copied();
    let choices = open.iter().enumerate().map(|(place, (nanoseconds, route))| {
        let why = match best {
            _ if open.len() == 1 => Reason::new(Code::OnlyRoute),
            Some((least, _)) if place > 0 => Reason::with(
                Code::PredictedSlower,
                format!("{} instead of {}", time(*nanoseconds), time(least)),
            ),
            _ => Reason::with(Code::PredictedFastest, time(*nanoseconds)),
        };
        Choice { route: *route, level: Level::Plausible, why }
    });
    let choices = choices.collect();
    let predicted_ns = open.iter().map(|(nanoseconds, _)| *nanoseconds).collect();
    Planned { plan: Plan { choices, rejected }, predicted_ns }
}

fn judge(call: &Call, ranks: &Ranks, route: Algorithm) -> Result<u64, Reason> {
    let unsuited = |what: String| Reason::with(Code::AlgorithmUnsuited, what);
    let (kind, n) = (call.kind, ranks.count);
    if n == 0 || n > RANKS_MAX {
        return Err(unsuited(format!("{n} ranks; 1 to {RANKS_MAX} are possible")));
    }
    if !(does(route, kind, n) || (route == Algorithm::Staged && n > 1)) {
        let text = if n == 1 { "one rank".into() } else { format!("{kind} of {n} ranks") };
        return Err(unsuited(text));
    }
    let part = call.count.saturating_mul(call.dtype.size_bytes().unwrap_or(1));
    if route == Algorithm::Staged {
        return Ok(staged_ns(call, ranks, part));
    }
    let rate = match &ranks.slowest {
        Link::None(why) if n > 1 => return Err(why.clone()),
        Link::Fabric { mb_per_s } | Link::Pci { mb_per_s } => (*mb_per_s).max(1),
        Link::Same | Link::None(_) => MEASURED_MB_PER_S,
    };
    // Lines are for links that carry atomic operations.
    let fabric = !matches!(ranks.slowest, Link::Pci { .. });
    let most = if fabric { flagged_bytes_max(n) } else { PACKET_ONLY_BYTES_MAX };
    let kernels = matches!(ranks.slowest, Link::Fabric { .. } | Link::Pci { .. });
    if kernels {
        built(call, n, (part, most), route)?;
    }
    if route == Algorithm::LowLatency && part > most {
        let text = format!("{part} bytes a part, {most} at most go with a flag in every store");
        return Err(unsuited(text));
    }
    if kernels && let Some(nanoseconds) = shared_ns(call, n, part, route, rate) {
        return Ok(alone(call, nanoseconds, ranks.graph));
    }
    Ok(direct_ns(call, n, part, route, rate, ranks.graph))
}

/// What the kernels of CUDA devices do not do; the staged path does all of it.
fn built(call: &Call, n: u32, (part, most): (u64, u64), route: Algorithm) -> Result<(), Reason> {
    if n > KERNEL_RANKS_MAX {
        let text = format!("{n} ranks; {KERNEL_RANKS_MAX} at most on CUDA devices");
        return Err(Reason::with(Code::AlgorithmUnsuited, text));
    }
    let whole = matches!(route, Algorithm::LowLatency | Algorithm::OneShot);
    if route == Algorithm::CopyEngine {
        return Err(Reason::with(
            Code::AlgorithmUnsuited,
            "kernels push with stores; copies carry large moves that one group has for all ranks",
        ));
    }
    let shared = matches!(route, Algorithm::ScatterGather | Algorithm::TwoShot);
    if shared && (n <= 2 || call.kind == Collective::Reduce) {
        let text =
            if n <= 2 { "two ranks have nothing to share" } else { "all inputs go to the root" };
        return Err(Reason::with(Code::AlgorithmUnsuited, text));
    }
    if route == Algorithm::OneShot && part <= most {
        let text = format!("up to {most} bytes flags go with the data");
        return Err(Reason::with(Code::AlgorithmUnsuited, text));
    }
    if matches!(call.kind, Collective::AllReduce | Collective::Broadcast) && n > 2 {
        let least = whole_bytes_max(n, most > PACKET_ONLY_BYTES_MAX);
        let unsuited = if part > least { whole } else { shared };
        if unsuited {
            let text = format!("above {least} bytes {n} ranks share the work, and only there");
            return Err(Reason::with(Code::AlgorithmUnsuited, text));
        }
    }
    Ok(())
}

/// Nanoseconds of an algorithm over direct links.
fn direct_ns(call: &Call, n: u32, part: u64, route: Algorithm, rate: u64, graph: bool) -> u64 {
    let others = u64::from(n.saturating_sub(1));
    let all = part.saturating_mul(others);
    // What one rank moves over its link, in the direction that moves more.
    let wire = match (call.kind, route) {
        (Collective::AllReduce, Algorithm::TwoShot | Algorithm::CopyEngine) => {
            all.saturating_mul(2) / u64::from(n)
        }
        (Collective::Broadcast, Algorithm::ScatterGather) => {
            part.saturating_add(part / u64::from(n))
        }
        (Collective::Reduce, Algorithm::TwoShot) => part.saturating_add(part / u64::from(n)),
        (Collective::Send | Collective::Recv, _) => part,
        (Collective::Barrier, _) => 0,
        _ => all,
    };
    // Start and meetings of an algorithm in a graph; what part of the link it reaches (percent).
    let (start, percent) = match route {
        Algorithm::Local => (2_000, 400),
        Algorithm::LowLatency => flagged(call, n, part),
        Algorithm::Direct if part <= flagged_bytes_max(n) => flagged(call, n, part),
        Algorithm::OneShot | Algorithm::Direct => (18_000, 93),
        Algorithm::TwoShot => (20_000, 93),
        Algorithm::ScatterGather => (20_000, 93),
        Algorithm::CopyEngine if call.kind.reduces() => (9_500, 95),
        _ => (5_900, 97),
    };
    alone(call, start + move_ns(wire, rate.saturating_mul(percent) / 100), graph)
}

/// What kernels of more than two ranks take that share the work: several launches, each of which moves a part of it.
fn shared_ns(call: &Call, n: u32, part: u64, route: Algorithm, rate: u64) -> Option<u64> {
    let ranks = u64::from(n);
    let (launches, slice, wire) = match route {
        Algorithm::TwoShot => {
            (2, part / ranks, u128::from(part) * u128::from(2 * (ranks - 1)) / u128::from(ranks))
        }
        Algorithm::ScatterGather => {
            let (pieces, others) = (pieces_of(part), ranks.checked_sub(1)?.max(1));
            let behind = u128::from(part) * u128::from(others - 1) / u128::from(others * pieces);
            (pieces + 1, part / (pieces * others), u128::from(part) + behind)
        }
        _ => return None,
    };
    let flags = slice <= flagged_bytes_max(n);
    let (start, percent) = if flags { flagged(call, n, slice) } else { (18_000, 93) };
    let wire = u64::try_from(wire).unwrap_or(u64::MAX);
    let moved = move_ns(wire, rate.saturating_mul(percent) / 100);
    Some((launches * start).saturating_add(moved))
}

/// In a graph what the device takes; launched call by call, the time of the process where that is longer.
fn alone(call: &Call, replayed: u64, graph: bool) -> u64 {
    let launch = match call.kind {
        Collective::Send | Collective::Recv => LAUNCH_NS + GROUP_NS,
        _ => LAUNCH_NS,
    };
    if graph { replayed } else { replayed.saturating_add(1_000).max(launch) }
}

/// Start and part of the link (percent) of packets, which carry as many bytes of flags as of data, and of lines. What goes one way
/// overlaps with what comes next.
const fn flagged(call: &Call, n: u32, part: u64) -> (u64, u64) {
    use Collective as C;
    let one_way = matches!(call.kind, C::Broadcast | C::Reduce | C::Gather | C::Scatter);
    let reduces = matches!(call.kind, C::AllReduce | C::ReduceScatter | C::Reduce);
    let packets = match (n, reduces) {
        (0..=4, true) => PACKET_BYTES_MAX,
        (0..=4, false) => PACKET_MOVED_BYTES_MAX,
        _ => PACKET_ONLY_BYTES_MAX,
    };
    let (start, percent) = match (part <= packets, one_way, reduces) {
        (true, true, _) => (2_250, 75),
        (true, false, _) => (2_500, 34),
        (false, true, false) => (2_000, 90),
        (false, _, true) => (3_100, 80),
        (false, _, false) => (3_400, 85),
    };
    (start + MORE_NS * (n as u64).saturating_sub(2), percent)
}

/// What meeting one rank more takes (four H200).
const MORE_NS: u64 = 1_400;

/// What one call costs its process outside of a graph.
const LAUNCH_NS: u64 = 4_100;
/// As much more where it is a group of a send and a receive.
const GROUP_NS: u64 = 1_200;

/// Through host memory: out of the device, a pass of the CPU over all inputs, into the device.
fn staged_ns(call: &Call, ranks: &Ranks, part: u64) -> u64 {
    let inputs = part.saturating_mul(u64::from(call.input_parts(ranks.count).max(1)));
    let outputs = part.saturating_mul(u64::from(call.output_parts(ranks.count)));
    let passes = part.saturating_mul(u64::from(ranks.count));
    60_000_u64
        .saturating_add(move_ns(inputs.saturating_add(outputs), ranks.host_mb_per_s))
        .saturating_add(move_ns(passes, 8_000))
}

/// Nanoseconds of `bytes` at `mb_per_s` (10^6 bytes a second).
fn move_ns(bytes: u64, mb_per_s: u64) -> u64 {
    let ns = u128::from(bytes) * 1000 / u128::from(mb_per_s.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX / 4)
}

/// A time for people.
pub fn time(nanoseconds: u64) -> String {
    match nanoseconds {
        0..10_000_000 => format!("{}.{} us", nanoseconds / 1000, nanoseconds % 1000 / 100),
        10_000_000..10_000_000_000 => {
            format!("{}.{} ms", nanoseconds / 1_000_000, nanoseconds % 1_000_000 / 100_000)
        }
        _ => format!(
            "{}.{} s",
            nanoseconds / 1_000_000_000,
            nanoseconds % 1_000_000_000 / 100_000_000
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::types::DataType;

    fn all_reduce(bytes: u64, ranks: &Ranks) -> Planned {
        plan(&Call::new(Collective::AllReduce, bytes, DataType::U8), ranks)
    }

    /// All-reduces of two H200 in a graph, a process a GPU, 2026-11-30, commit 548fbe3: size, tenths of a microsecond, algorithm that
    /// was measured.
    #[test]
    fn predictions_are_near_what_was_measured() {
        let measured = [
            (8, 24, Algorithm::LowLatency),
            (4 << 10, 27, Algorithm::LowLatency),
            (32 << 10, 29, Algorithm::LowLatency),
            (128 << 10, 36, Algorithm::LowLatency),
            (256 << 10, 41, Algorithm::LowLatency),
            (1 << 20, 67, Algorithm::LowLatency),
            (4 << 20, 167, Algorithm::LowLatency),
            (32 << 20, 1079, Algorithm::LowLatency),
            (128 << 20, 3898, Algorithm::OneShot),
            (1 << 30, 29702, Algorithm::OneShot),
        ];
        for (bytes, tenths, algorithm) in measured {
            let ranks = Ranks { graph: true, ..Ranks::like_h200(2) };
            let planned = all_reduce(bytes, &ranks);
            assert_eq!(planned.best(), Some(algorithm), "{bytes}");
            let predicted = planned.predicted_ns[0] / 100;
            let error = predicted.abs_diff(tenths) * 100 / tenths;
            assert!(error <= 25, "{bytes} bytes: {predicted} for {tenths} tenths of a microsecond");
        }
    }

    /// Others of two H200, likewise: kind, size, tenths of a microsecond in a graph and in a loop. What a call costs its process
    /// varies from run to run: all-reduces of 8 bytes took 3.4 in this one, 4.8 in one of 1d586ad.
    #[test]
    fn predictions_of_all_calls_are_near_what_was_measured() {
        use Collective as C;
        let measured = [
            (C::AllReduce, 8, 24, 34),
            (C::AllReduce, 8, 24, 48),
            (C::AllReduce, 128 << 10, 36, 42),
            (C::AllReduce, 512 << 10, 47, 57),
            (C::AllReduce, 1 << 20, 67, 77),
            (C::AllReduce, 8 << 20, 299, 311),
            (C::AllGather, 8, 26, 50),
            (C::AllGather, 128 << 10, 36, 49),
            (C::AllGather, 512 << 10, 52, 60),
            (C::AllGather, 2 << 20, 96, 105),
            (C::AllGather, 8 << 20, 279, 301),
            (C::AllGather, 32 << 20, 1065, 1089),
            (C::ReduceScatter, 128 << 10, 36, 47),
            (C::ReduceScatter, 8 << 20, 327, 337),
            (C::Broadcast, 8, 22, 37),
            (C::Broadcast, 128 << 10, 28, 37),
            (C::Broadcast, 512 << 10, 36, 48),
            (C::Broadcast, 2 << 20, 81, 85),
            (C::Broadcast, 8 << 20, 257, 261),
            (C::Broadcast, 32 << 20, 994, 1019),
            (C::Send, 8, 26, 64),
            (C::Send, 128 << 10, 35, 59),
            (C::Send, 512 << 10, 51, 61),
            (C::Send, 8 << 20, 281, 299),
            (C::Send, 256 << 20, 7588, 7623),
        ];
        for (kind, bytes, graph, alone) in measured {
            for (graph, tenths) in [(true, graph), (false, alone)] {
                let ranks = Ranks { graph, ..Ranks::like_h200(2) };
                let planned = plan(&Call::new(kind, bytes, DataType::U8), &ranks);
                let predicted = planned.predicted_ns[0] / 100;
                let error = predicted.abs_diff(tenths) * 100 / tenths;
                assert!(error <= 25, "{kind}, {bytes} bytes, {graph}: {predicted} for {tenths}");
            }
        }
    }

    /// Of four H200, in a graph (1d586ad): tenths of a microsecond; a third off at most. Bytes are those of a part.
    #[test]
    fn predictions_of_four_ranks_are_of_the_right_size() {
        use Collective as C;
        for (kind, bytes, tenths) in [
            (C::AllReduce, 8, 58),
            (C::AllReduce, 8 << 20, 572),
            (C::AllGather, 4 << 10, 61),
            (C::AllGather, 64 << 10, 73),
            (C::AllGather, 2 << 20, 309),
            (C::ReduceScatter, 2 << 20, 273),
            (C::Broadcast, 256 << 10, 78),
        ] {
            let ranks = Ranks { graph: true, ..Ranks::like_h200(4) };
            let predicted =
                plan(&Call::new(kind, bytes, DataType::U8), &ranks).predicted_ns[0] / 100;
            let error = predicted.abs_diff(tenths) * 100 / tenths;
            assert!(error <= 34, "{kind}, {bytes} bytes: {predicted} for {tenths}");
        }
    }

    /// Where ranks begin to share the work, both ways are predicted alike: nobody pays twice for one byte more.
    #[test]
    fn sharing_begins_where_it_pays() {
        for kind in [Collective::AllReduce, Collective::Broadcast] {
            for count in 3..=KERNEL_RANKS_MAX {
                let at = |bytes| {
                    let call = Call::new(kind, bytes, DataType::U8);
                    let ranks = Ranks { graph: true, ..Ranks::like_h200(count) };
                    plan(&call, &ranks).predicted_ns[0]
                };
                let most = whole_bytes_max(count, count <= 4);
                let (whole, shared) = (at(most), at(most + 1));
                assert!(
                    shared < 2 * whole && whole < 2 * shared,
                    "{kind} {count}: {whole}, {shared}"
                );
            }
        }
        let many =
            plan(&Call::new(Collective::AllReduce, 1 << 20, DataType::U8), &Ranks::like_h200(17));
        assert_eq!(many.best(), Some(Algorithm::Staged));
    }

    #[test]
    fn every_algorithm_is_chosen_or_says_why_not() {
        let refused = Reason::new(Code::P2pNotCapable);
        let links = [
            Link::Fabric { mb_per_s: 391_000 },
            Link::Pci { mb_per_s: 25_000 },
            Link::Same,
            Link::None(refused.clone()),
        ];
        for kind in Collective::ALL {
            for slowest in &links {
                for count in [1, 2, 8, 16] {
                    for bytes in [0, 8, 1 << 20, 1 << 40] {
                        let ranks = Ranks { slowest: slowest.clone(), ..Ranks::like_h200(count) };
                        let planned = plan(&Call::new(kind, bytes, DataType::U8), &ranks);
                        let Plan { choices, rejected } = &planned.plan;
                        assert_eq!(choices.len() + rejected.len(), Algorithm::ALL.len());
                        assert_eq!(choices.len(), planned.predicted_ns.len());
                        assert!(planned.predicted_ns.is_sorted());
                        let direct = choices.iter().any(|choice| choice.route != Algorithm::Staged);
                        assert_eq!(direct, count == 1 || *slowest != links[3], "{kind} {count}");
                        if *slowest == links[3] && count > 1 {
                            assert!(rejected.iter().any(|one| one.why == refused));
                        }
                    }
                }
            }
        }
        assert_eq!(all_reduce(8, &Ranks::like_h200(0)).best(), None);
        assert_eq!(all_reduce(8, &Ranks::like_h200(257)).best(), None);
    }

    #[test]
    fn size_and_number_of_ranks_decide() {
        let cases = [
            (8, 1, Algorithm::Local),
            (8, 2, Algorithm::LowLatency),
            (2 << 20, 2, Algorithm::LowLatency),
            (1 << 30, 2, Algorithm::OneShot),
            (8, 8, Algorithm::LowLatency),
            (64 << 10, 8, Algorithm::LowLatency),
            (1 << 20, 4, Algorithm::LowLatency),
            (512 << 10, 8, Algorithm::TwoShot),
            (4 << 20, 8, Algorithm::TwoShot),
        ];
        for (bytes, ranks, best) in cases {
            assert_eq!(all_reduce(bytes, &Ranks::like_h200(ranks)).best(), Some(best), "{bytes}");
        }
        let broadcast = Call::new(Collective::Broadcast, 1 << 30, DataType::U8);
        let best = |bytes| plan(&Call { count: bytes, ..broadcast }, &Ranks::like_h200(8)).best();
        assert_eq!(best(1 << 30), Some(Algorithm::ScatterGather));
        assert_eq!(best(64 << 10), Some(Algorithm::LowLatency));
        let staged = Ranks { slowest: Link::Same, ..Ranks::like_h200(8) };
        assert_eq!(plan(&broadcast, &staged).best(), Some(Algorithm::ScatterGather));
        assert_eq!(time(8_600), "8.6 us");
        assert_eq!(time(12_340_000), "12.3 ms");
    }
}
