//! Large moves by copies, where the calls of all ranks are known at once: at the end of a group of one thread that has them
//! all. A copy waits for events of the streams of both ranks, and they wait for its end: there is nothing here but the order of
//! streams, so nothing can wait for ever that was not waiting before, and no rank has to agree with another.

use std::sync::Arc;

use beeline_sys::cuda::{Error as CudaError, Event, Stream as Handle, is_open};

use super::launch::{Held, address, bytes_of, part_of};
use super::{Cuda, Peer};
use crate::collective::executor::Posted;
use crate::core::addr::DevicePtr;
use crate::core::collective::Collective;
use crate::error::{Error, Result};

/// Copies of one group at most: how many are compared, and queued, at once.
const MOVES_MAX: usize = 256;
/// Streams a pair of two ranks, by which a large copy goes in halves; one between more, which fill the links anyway.
const fn lanes_of(ranks: u32) -> usize {
    if ranks == 2 { 2 } else { 1 }
}

/// Streams of a rank for copies to others, by target.
pub(super) type Lanes = Vec<Vec<Handle>>;

/// One rank with what a group has for it.
pub(in crate::collective) struct Rank<'a> {
    pub(in crate::collective) cuda: &'a mut Cuda,
    pub(in crate::collective) stream: &'a Handle,
    /// One call that moves, or sends and receives in their order.
    pub(in crate::collective) calls: Vec<&'a Posted>,
}

/// One copy.
#[derive(Clone, Debug)]
pub(in crate::collective) struct Move {
    source: usize,
    target: usize,
    from: u64,
    to: u64,
    bytes: u64,
    held: Held,
}

/// Makes the lanes of a rank whose peers are all of this process; others have none.
pub(super) fn lanes(cuda: &Cuda) -> Result<Lanes, CudaError> {
    let alone = cuda.ranks < 2 || cuda.peers.iter().any(|peer| matches!(peer, Peer::There(_)));
    if alone {
        return Ok(Lanes::new());
    }
    let count = |peer: &Peer| if matches!(peer, Peer::Own) { 0 } else { lanes_of(cuda.ranks) };
    let make = |peer| (0..count(peer)).map(|_| Handle::new(&cuda.context)).collect();
    cuda.peers.iter().map(make).collect()
}

/// The copies that carry out what `ranks` (all of a communicator, in order) were called for; `None` where kernels must: too
/// little, a capture, memory that the other device does not reach, calls that do not match, bytes that are sent and overwritten.
pub(in crate::collective) fn plan(ranks: &[Rank<'_>], least: u64) -> Option<Vec<Move>> {
    let same = |rank: &Rank<'_>| {
        let windows = |cuda: &Cuda| cuda.comm.windows;
        ranks.first().is_some_and(|first| windows(first.cuda) == windows(rank.cuda))
    };
    let ready = |rank: &Rank<'_>| {
        rank.cuda.lanes.len() == ranks.len() && matches!(rank.stream.is_capturing(), Ok(false))
    };
    if !ranks.iter().all(|rank| same(rank) && ready(rank)) {
        return None;
    }
    let transfers = ranks.iter().all(|r| r.calls.iter().all(|one| one.call.kind.is_pairwise()));
    // What is wrong with an argument is told where the call is queued the usual way.
    let moves = if transfers { of_transfers(ranks) } else { of_collective(ranks) }.ok()??;
    // Nothing to do, but not nothing to check.
    let large = |one: &&Move| one.source != one.target;
    let moved = moves.iter().filter(large);
    let suited = moves.len() <= MOVES_MAX
        && moved.clone().all(|one| one.bytes >= least)
        && moved.count() > 0
        && are_apart(&moves)
        && moves.iter().all(|one| is_reachable(ranks, one));
    suited.then_some(moves)
}

fn of_collective(ranks: &[Rank<'_>]) -> Result<Option<Vec<Move>>> {
    use Collective as C;
    let Some([first]) = ranks.first().map(|rank| rank.calls.as_slice()) else { return Ok(None) };
    let moves = matches!(
        first.call.kind,
        C::AllGather | C::Broadcast | C::Gather | C::Scatter | C::AllToAll
    );
    // Of more ranks the root's link would carry every copy; kernels hand its pieces on (`steps.rs`).
    let moves = moves && (first.call.kind != C::Broadcast || ranks.len() <= 2);
    let alike = |rank: &Rank<'_>| matches!(rank.calls.as_slice(), [one] if one.call == first.call);
    if !moves || !ranks.iter().all(alike) {
        return Ok(None);
    }
    let (call, bytes) = (&first.call, bytes_of(&first.call)?);
    let count = ranks.len() as u32;
    let mut places = Vec::with_capacity(ranks.len());
    for (rank, index) in ranks.iter().zip(0..) {
        let Some(posted) = rank.calls.first() else { return Ok(None) };
        let invalid = |error: crate::core::collective::CallError| Error::refused(error.to_string());
        let (mut read, mut written) = (Held::new(), Held::new());
        let input = call.input_bytes(index, count).map_err(invalid)?;
        let input = address(&posted.input, input, "input", &mut read)?;
        let output = call.output_bytes(index, count).map_err(invalid)?;
        let output = address(&posted.output, output, "output", &mut written)?;
        places.push((index, (input, output), read, written));
    }
    let mut all = Vec::new();
    for (source, from, read, _) in &places {
        for (target, to, _, written) in &places {
            let sent = part_of(call, (*source, u64::from(*target)), *from, bytes);
            let received = part_of(call, (*target, u64::from(*source)), *to, bytes);
            if sent.send_bytes != received.recv_bytes {
                return Ok(None);
            }
            let held = read.iter().chain(written).cloned().collect();
            let (source, target) = (*source as usize, *target as usize);
            let (from, to, bytes) = (sent.send, received.recv, sent.send_bytes);
            all.push(Move { source, target, from, to, bytes, held });
        }
    }
    all.retain(|one| one.bytes > 0 && (one.source != one.target || one.from != one.to));
    Ok(Some(all))
}

/// The k-th send of a pair is for the k-th receive of it.
fn of_transfers(ranks: &[Rank<'_>]) -> Result<Option<Vec<Move>>> {
    let mut receives: Vec<_> = ranks.iter().map(|rank| calls_of(rank, Collective::Recv)).collect();
    let mut all = Vec::new();
    for (rank, source) in ranks.iter().zip(0_usize..) {
        for sent in calls_of(rank, Collective::Send) {
            let target = sent.call.root as usize;
            let Some(waiting) = receives.get_mut(target) else { return Ok(None) };
            let Some(at) = waiting.iter().position(|one| one.call.root as usize == source) else {
                return Ok(None);
            };
            let received = waiting.remove(at);
            let (sends, takes) = (&sent.call, &received.call);
            if (sends.count, sends.dtype) != (takes.count, takes.dtype) {
                return Ok(None);
            }
            let (bytes, mut held) = (bytes_of(&sent.call)?, Held::new());
            let from = address(&sent.input, bytes, "input", &mut held)?;
            let to = address(&received.output, bytes, "output", &mut held)?;
            all.push(Move { source, target, from, to, bytes, held });
        }
    }
    if receives.iter().any(|left| !left.is_empty()) {
        return Ok(None);
    }
    all.retain(|one| one.bytes > 0 && (one.source != one.target || one.from != one.to));
    Ok(Some(all))
}

fn calls_of<'a>(rank: &Rank<'a>, kind: Collective) -> Vec<&'a Posted> {
    rank.calls.iter().copied().filter(|one| one.call.kind == kind).collect()
}

/// Whether no byte is written that another copy reads or writes: copies go in any order. Addresses are of the whole
/// process.
fn are_apart(moves: &[Move]) -> bool {
    let apart = |a: u64, a_bytes: u64, b: u64, b_bytes: u64| {
        a.saturating_add(a_bytes) <= b || b.saturating_add(b_bytes) <= a
    };
    moves.iter().enumerate().all(|(index, one)| {
        moves.iter().enumerate().all(|(other_index, other)| {
            apart(one.to, one.bytes, other.from, other.bytes)
                && (index == other_index || apart(one.to, one.bytes, other.to, other.bytes))
        })
    })
}

/// Whether the device of the source, which copies, reaches both ends.
fn is_reachable(ranks: &[Rank<'_>], one: &Move) -> bool {
    let context = |rank: usize| ranks.get(rank).map(|rank| &rank.cuda.context);
    context(one.source).zip(context(one.target)).is_some_and(|(source, target)| {
        is_open(source, source, DevicePtr::new(one.from), one.bytes)
            && is_open(target, source, DevicePtr::new(one.to), one.bytes)
    })
}

/// Queues the copies. What is queued next in the streams of the ranks comes after those that touch the rank.
///
/// # Errors
/// What the driver says; then some of the copies may be queued, and the communicator must stop.
pub(in crate::collective) fn queue(ranks: &mut [Rank<'_>], moves: &[Move]) -> Result<()> {
    let queued = queue_all(ranks, moves);
    let count = |index: usize| moves.iter().filter(|one| one.source == index).count() as u64;
    for (index, rank) in ranks.iter_mut().enumerate() {
        rank.cuda.copied = rank.cuda.copied.wrapping_add(count(index));
    }
    let failed = |error| match ranks.first() {
        Some(rank) => rank.cuda.failed("queue copies between devices", error),
        None => Error::refused("copies of no rank"),
    };
    queued.map_err(failed)
}

fn queue_all(ranks: &[Rank<'_>], moves: &[Move]) -> Result<(), CudaError> {
    const GONE: CudaError = CudaError::Refused("a copy of a rank that is not there");
    let begun: Vec<Arc<Event>> =
        ranks.iter().map(|rank| rank.stream.record()).collect::<Result<_, _>>()?;
    let mut done = Vec::new();
    for one in moves {
        let (Some(source), Some(target)) = (ranks.get(one.source), ranks.get(one.target)) else {
            return Err(GONE);
        };
        let copy = |stream: &Handle, at: u64, bytes: u64| {
            let place = |address: u64| DevicePtr::new(address + at);
            let (to, from) = (place(one.to), place(one.from));
            let (into, outof) = (&target.cuda.context, &source.cuda.context);
            stream.copy_between((into, to), (outof, from), bytes, &one.held)
        };
        if one.source == one.target {
            // The streams of others need not wait for it.
            copy(source.stream, 0, one.bytes)?;
            continue;
        }
        let lanes = source.cuda.lanes.get(one.target).ok_or(GONE)?;
        let share = one.bytes.div_ceil(lanes.len().max(1) as u64).next_multiple_of(4096);
        for (lane, at) in lanes.iter().zip((0..one.bytes).step_by(share as usize)) {
            for rank in [one.source, one.target] {
                lane.wait_event(begun.get(rank).ok_or(GONE)?)?;
            }
            copy(lane, at, share.min(one.bytes - at))?;
            done.push((source.stream, target.stream, lane.record()?));
        }
    }
    for (source, target, event) in &done {
        source.wait_event(event)?;
        target.wait_event(event)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_touch_what_another_one_writes_are_not_made() {
        let one =
            |from, to, bytes| Move { source: 0, target: 1, from, to, bytes, held: Held::new() };
        for (moves, apart) in [
            (vec![one(0, 100, 100)], true),
            (vec![one(0, 99, 100)], false),
            // The same bytes to two places.
            (vec![one(0, 100, 100), one(0, 200, 100)], true),
            (vec![one(0, 100, 100), one(0, 199, 100)], false),
            // One is sent on before it came.
            (vec![one(0, 100, 100), one(199, 300, 100)], false),
            (vec![one(u64::MAX - 9, 0, 10), one(500, u64::MAX - 100, 200)], false),
        ] {
            assert_eq!(are_apart(&moves), apart, "{moves:?}");
        }
    }
}
