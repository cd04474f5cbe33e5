//! A group that has the calls of all ranks of one communicator, as programs with one thread for all devices make it: what
//! only moves bytes, and many of them, goes by copies then (`executor/cuda/direct.rs`).

use std::sync::Arc;

use super::communicator::Inner;
use super::control::Failure;
use super::executor::{Direct, Posted};
use super::group::{ByRank, Queued};
use crate::core::collective::plan::copied_bytes_min;
use crate::error::{Kind, Result};
use crate::gpu::Stream;
use crate::lock;

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
    let mut all: Vec<(&Arc<Inner>, Vec<&Posted>, &Arc<Stream>)> = Vec::with_capacity(group.len());
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
    let mut direct = Direct::new();
    for (executor, (_, calls, stream)) in executors.iter_mut().zip(&all) {
        direct.add(executor.as_mut()?, stream, calls)?;
    }
    let moves = direct.plan(least)?;
    drop(direct);
    let queued = all.iter().zip(&mut executors).try_for_each(|((rank, _, stream), executor)| {
        let executor = executor.as_mut();
        executor.map_or(Ok(()), |executor| lock(&rank.queue).turn_to(executor, stream))
    });
    let queued = queued.and_then(|()| {
        let mut direct = Direct::new();
        for (executor, (_, calls, stream)) in executors.iter_mut().zip(&all) {
            if let Some(executor) = executor.as_mut() {
                let _ = direct.add(executor, stream, calls);
            }
        }
        direct.queue(&moves)
    });
    for (rank, calls, _) in &all {
        match &queued {
            Ok(()) => note(rank, calls),
            // Some ranks may have what others have not.
            Err(error) => rank.control.fail(Failure::Other(Kind::Device, error.to_string())),
        }
    }
    Some(queued)
}

/// Counts the calls, as their kernels would be.
fn note(rank: &Inner, calls: &[&Posted]) {
    let last = lock(&rank.queue).copied(calls);
    match last {
        Some(last) if last.call.kind.is_pairwise() => rank.control.announce_transfer(&last),
        Some(last) => rank.control.announce(&last),
        None => {}
    }
}
