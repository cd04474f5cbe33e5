//! Calls that are queued together: nothing of a group reaches a stream before the outermost one ends.
//!
//! A group is one thread's. It may hold calls of several communicators, which is how one thread drives several
//! ranks, and sends and receives that need each other.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use super::communicator::{Communicator, Inner};
use super::executor::Posted;
use super::together;
use crate::error::{Error, Result};
use crate::gpu::Stream;

/// Calls that a group holds at most.
const CALLS_MAX: usize = 1 << 16;

/// A call with its stream.
pub(super) type Queued = (Posted, Arc<Stream>);
/// What a group has for one rank: calls of all ranks in their order, then sends and receives.
pub(super) type ByRank = (Arc<Inner>, VecDeque<Queued>, Vec<Queued>);

#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<(Arc<Inner>, Posted, Arc<Stream>)>,
    failed: Option<Error>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Queues all calls that `work` makes together.
///
/// # Errors
/// What `work` or one of its calls says, then nothing was queued; what queueing says.
pub fn group<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    group_start();
    let done = work();
    if let Err(error) = &done {
        group_refuse(&error.to_string());
    }
    match (done, group_end()) {
        (Ok(value), Ok(())) => Ok(value),
        (Err(error), _) | (Ok(_), Err(error)) => Err(error),
    }
}

/// Starts a group, or one within the present one. Prefer [`group()`]: every start needs its end.
pub fn group_start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Refuses the present group, as one of its calls does that is refused: its end queues nothing, and says why. For what a caller
/// finds wrong before a call is made; outside of a group there is nothing to refuse.
pub fn group_refuse(why: &str) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.failed.get_or_insert_with(|| refused(why));
        }
    });
}

fn refused(why: &str) -> Error {
    Error::refused(why.to_owned()).coded("collective-invalid")
}

/// Ends a group; the outermost end queues the calls.
///
/// # Errors
/// The first call of the group that was refused, then nothing was queued; what queueing says; `is_refused`
/// without a group.
pub fn group_end() -> Result<()> {
    let (calls, failed) = GROUP.with_borrow_mut(|group| {
        let Some(depth) = group.depth.checked_sub(1) else {
            let text = "a group ends that never started in this thread";
            return (Vec::new(), Some(Error::refused(text).coded("collective-invalid")));
        };
        group.depth = depth;
        if depth > 0 {
            return (Vec::new(), None);
        }
        (std::mem::take(&mut group.calls), group.failed.take())
    });
    if let Some(error) = failed {
        return Err(error);
    }
    queue_all(calls)
}

/// Queues the first call of every rank, then the second of every rank, and so on: a stream that is full of one rank's
/// calls would wait for those of another that this thread has not queued yet. Sends and receives come last, those of a
/// rank together.
fn queue_all(calls: Vec<(Arc<Inner>, Posted, Arc<Stream>)>) -> Result<()> {
    let mut by_rank: Vec<ByRank> = Vec::new();
    calls.iter().for_each(|(rank, posted, _)| rank.prepare(posted));
    for (rank, posted, stream) in calls {
        let at = by_rank.iter().position(|(known, ..)| Arc::ptr_eq(known, &rank));
        let at = at.unwrap_or_else(|| {
            by_rank.push((rank, VecDeque::new(), Vec::new()));
            by_rank.len() - 1
        });
        if let Some((_, collectives, transfers)) = by_rank.get_mut(at) {
            match posted.call.kind.is_pairwise() {
                true => transfers.push((posted, stream)),
                false => collectives.push_back((posted, stream)),
            }
        }
    }
    if let Some(queued) = together::queue(&by_rank) {
        return by_rank.iter().fold(queued, |first, (rank, ..)| first.and(rank.settle()));
    }
    // One that fails must not keep the others, who may wait for each other, from being queued.
    let mut first = Ok(());
    let longest = by_rank.iter().map(|(_, collectives, _)| collectives.len()).max().unwrap_or(0);
    for _ in 0..longest {
        for (rank, collectives, _) in &mut by_rank {
            if let Some(one) = collectives.pop_front() {
                let queued = rank.queue(vec![one]);
                first = first.and(queued);
            }
        }
    }
    for (rank, _, transfers) in by_rank {
        if !transfers.is_empty() {
            let queued = rank.queue(transfers);
            first = first.and(queued);
        }
        first = first.and(rank.settle());
    }
    first
}

/// Ends a group without queueing anything; at the outermost end, the nanoseconds that its calls are predicted to take,
/// one after the other on each rank.
///
/// # Errors
/// As [`group_end`].
pub fn group_simulate_end() -> Result<u64> {
    let calls = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(Error::refused("a group ends that never started in this thread")),
        1 => {
            group.depth = 0;
            let calls = std::mem::take(&mut group.calls);
            group.failed.take().map_or(Ok(calls), Err)
        }
        _ => {
            group.depth -= 1;
            Ok(Vec::new())
        }
    })?;
    let mut by_rank: Vec<(Arc<Inner>, u64)> = Vec::new();
    for (rank, posted, _) in calls {
        let time = rank.predict(&posted.call);
        match by_rank.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &rank)) {
            Some((_, sum)) => *sum = sum.saturating_add(time),
            None => by_rank.push((rank, time)),
        }
    }
    Ok(by_rank.into_iter().map(|(_, sum)| sum).max().unwrap_or(0))
}

/// How deep the present thread is in groups.
pub fn group_depth() -> usize {
    GROUP.with_borrow(|group| group.depth)
}

/// Takes a call (or why it is refused) into the present group, or queues it at once outside of any.
pub(super) fn post(
    comm: &Communicator,
    posted: Result<Posted>,
    stream: &Arc<Stream>,
) -> Result<()> {
    if group_depth() == 0 {
        let posted = posted?;
        comm.inner().prepare(&posted);
        let queued = comm.inner().queue(vec![(posted, Arc::clone(stream))]);
        return queued.and(comm.inner().settle());
    }
    GROUP.with_borrow_mut(|group| {
        let full = group.calls.len() >= CALLS_MAX;
        let posted = posted.and_then(|posted| {
            let text = format!("a group holds {CALLS_MAX} calls at most");
            if full { Err(Error::refused(text)) } else { Ok(posted) }
        });
        match posted {
            Ok(posted) => {
                group.calls.push((Arc::clone(comm.inner()), posted, Arc::clone(stream)));
                Ok(())
            }
            Err(error) => {
                // Both the call and the end of the group say so.
                group.failed.get_or_insert_with(|| refused(&error.to_string()));
                Err(error)
            }
        }
    })
}
