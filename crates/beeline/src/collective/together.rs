//! A group that has the calls of all ranks of one communicator, as programs with one thread for all devices make it: what
//! only moves bytes, and many of them, goes by copies then (`executor/cuda/direct.rs`).

use std::sync::{Arc, MutexGuard};

use super::communicator::Inner;
use super::control::Failure;
use super::executor::{Direct, Executor, Posted};
use super::group::{ByRank, Queued};
use super::queue::{Counts, Queue};
use crate::core::collective::plan::copied_bytes_min;
use crate::error::{Error, Kind, Result};
use crate::gpu::Stream;
use crate::lock;

/// One rank with the calls of the group, and their stream.
type Calls<'a> = (&'a Arc<Inner>, Vec<&'a Posted>, &'a Arc<Stream>);

/// Queues all calls of the group as copies; `None`: nothing was queued, and nothing keeps the calls from going the usual way.
pub(super) fn queue(group: &[ByRank]) -> Option<Result<()>> {
    let (first, ..) = group.first()?;
    let least = first.settings().copy_engine_bytes.unwrap_or(copied_bytes_min(first.ranks));
    let large = |(posted, _): &Queued| {
        let size = posted.call.dtype.size_bytes().unwrap_or(0);
        posted.call.count.saturating_mul(size) >= least
    };
    // Asked of every group: most have nothing for copies.
    let some =
        |(_, collectives, transfers): &ByRank| collectives.iter().chain(transfers).any(large);
    if group.len() < 2 || first.ranks as usize != group.len() || !group.iter().all(some) {
        return None;
    }
    let mut all: Vec<Calls<'_>> = Vec::with_capacity(group.len());
    for (rank, collectives, transfers) in group {
        let queued = match (collectives.len(), transfers.is_empty()) {
            (1, true) => collectives.iter().collect::<Vec<_>>(),
            (0, false) => transfers.iter().collect(),
            _ => return None,
        };
        let (_, stream) = queued.first()?;
        if queued.iter().any(|(_, other)| !Arc::ptr_eq(stream, other)) {
            return None;
        }
        let calls = queued.iter().map(|(posted, _)| posted).filter(|one| one.call.count > 0);
        all.push((rank, calls.collect(), stream));
    }
    all.sort_by_key(|(rank, ..)| rank.rank);
    let ranks = all.len() as u32;
    let whole = all.iter().zip(0..).all(|((rank, ..), at)| (rank.rank, rank.ranks) == (at, ranks));
    if !whole || all.iter().any(|(rank, ..)| rank.control.is_aborted() || rank.control.has_failed())
    {
        return None;
    }
    // In the order of ranks, which no other thread that drives several of them does otherwise.
    let mut executors: Vec<_> = all.iter().map(|(rank, ..)| lock(&rank.executor)).collect();
    let mut queues: Vec<_> = all.iter().map(|(rank, ..)| lock(&rank.queue)).collect();
    let counts: Vec<_> = queues.iter().map(|queue| queue.counts()).collect();
    if !are_even(&counts) {
        return None;
    }
    let moves = direct(&mut executors, &all)?.plan(least)?;
    let turned = all.iter().zip(&executors).zip(&mut queues);
    let queued = turned.map(|(((_, _, stream), executor), queue)| {
        executor.as_ref().map_or(Ok(()), |executor| queue.turn_to(executor, stream))
    });
    let queued = queued.collect::<Result<Vec<()>>>().and_then(|_| {
        queues.iter_mut().for_each(|queue| queue.copies());
        let direct = direct(&mut executors, &all);
        direct.ok_or_else(|| Error::refused("a rank is gone"))?.queue(&moves)
    });
    for ((rank, calls, _), queue) in all.iter().zip(&mut queues) {
        match &queued {
            Ok(()) => note(rank, queue, calls),
            // Some ranks may have what others have not.
            Err(error) => rank.control.fail(Failure::Other(Kind::Device, error.to_string())),
        }
    }
    Some(queued)
}

/// The executors of all ranks with what they are called for; `None` where one has no device that copies, or is gone.
fn direct<'a>(
    executors: &'a mut [MutexGuard<'_, Option<Executor>>],
    all: &'a [Calls<'_>],
) -> Option<Direct<'a>> {
    let mut direct = Direct::new();
    for (executor, (_, calls, stream)) in executors.iter_mut().zip(all) {
        direct.add(executor.as_mut()?, stream, calls)?;
    }
    Some(direct)
}

/// Whether every earlier call of a rank has been made by its partners too: else the calls of this group are for those.
fn are_even(all: &[Counts<'_>]) -> bool {
    all.iter().zip(0_usize..).all(|(one, rank)| {
        let of = |counts: &[u64], at: usize| counts.get(at).copied();
        all.iter().zip(0_usize..).all(|(other, peer)| {
            one.collectives == other.collectives
                && of(one.sends, peer).is_some()
                && of(one.sends, peer) == of(other.receives, rank)
        })
    })
}

/// Counts the calls, as their kernels would be.
fn note(rank: &Inner, queue: &mut Queue, calls: &[&Posted]) {
    match queue.copied(calls) {
        Some(last) if last.call.kind.is_pairwise() => rank.control.announce_transfer(&last),
        Some(last) => rank.control.announce(&last),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_rank_made_alone_before_is_for_the_kernels() {
        let check = |counts: [(u64, [u64; 2], [u64; 2]); 2], even| {
            let all: Vec<Counts<'_>> = counts
                .iter()
                .map(|(collectives, sends, receives)| Counts {
                    collectives: *collectives,
                    sends,
                    receives,
                })
                .collect();
            assert_eq!(are_even(&all), even, "{counts:?}");
        };
        check([(3, [1, 2], [1, 5]), (3, [5, 0], [2, 0])], true);
        check([(3, [0, 0], [0, 0]), (4, [0, 0], [0, 0])], false);
        check([(0, [0, 1], [0, 0]), (0, [0, 0], [0, 0])], false);
        check([(0, [0, 0], [0, 0]), (0, [1, 0], [0, 0])], false);
        check([(0, [0, 0], [1, 0]), (0, [0, 0], [0, 0])], false);
    }
}
