//! Batches: many requests handed over at once, whose ends are asked for later.
//!
//! Each entry is reported exactly once, whatever became of it. Entries wait in a queue of the session's
//! runners, each of which holds one lane at a time: a small pool makes a large batch slow, never stuck.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::status::{Failure, OpError, Outcome};
use crate::{lock, wait_timeout};

/// `CUfileStatus_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub i32);

#[expect(missing_docs, reason = "the names and numbers of the API")]
impl Status {
    pub const CANCELED: Self = Self(8);
    pub const COMPLETE: Self = Self(16);
    pub const TIMEOUT: Self = Self(32);
    pub const FAILED: Self = Self(64);
}

/// How one entry ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What the caller named the entry.
    pub cookie: u64,
    /// How it ended.
    pub status: Status,
    /// Bytes moved; for `FAILED` the negative error number of the system or the negative code.
    pub ret: isize,
}

/// One batch.
pub(super) struct Batch {
    capacity: usize,
    stall: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Submitted, and neither finished nor cancelled.
    pending: usize,
    /// Of these, how many a runner works on.
    running: usize,
    ended: VecDeque<Event>,
    /// Entries of earlier generations that have not started are cancelled.
    generation: u64,
}

/// One entry handed to a runner.
pub(super) struct Ticket {
    batch: Arc<Batch>,
    cookie: u64,
    generation: u64,
}

impl Batch {
    pub(super) fn new(capacity: usize, stall: Duration) -> Arc<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Arc::new(Self { capacity, stall, state, changed })
    }

    /// Takes `cookies.len()` entries in, all or none.
    ///
    /// # Errors
    /// `BATCH_FULL` where, with those that were not reported yet, there would be more than the batch
    /// was set up for.
    pub(super) fn admit(self: &Arc<Self>, cookies: &[u64]) -> Outcome<Vec<Ticket>> {
        let mut state = lock(&self.state);
        let held = state.pending + state.ended.len();
        if cookies.len() > self.capacity - held.min(self.capacity) {
            return Err(Failure::new(
                OpError::BATCH_FULL,
                format!(
                    "{} entries submitted to a batch of {} of which {held} are under way or not \
                     reported yet; ask for their status first",
                    cookies.len(),
                    self.capacity
                ),
            ));
        }
        state.pending += cookies.len();
        let generation = state.generation;
        let ticket = |&cookie: &u64| Ticket { batch: Arc::clone(self), cookie, generation };
        Ok(cookies.iter().map(ticket).collect())
    }

    /// Up to `most` events, once there are `least`, nothing is left to wait for, or `timeout` has passed
    /// (without one: the stall timeout).
    pub(super) fn events(
        &self,
        least: usize,
        most: usize,
        timeout: Option<Duration>,
    ) -> Vec<Event> {
        let span = timeout.map_or(self.stall, |span| span.min(self.stall));
        let deadline = Instant::now() + span;
        let mut state = lock(&self.state);
        while state.ended.len() < least.min(most) && state.pending > 0 {
            let now = Instant::now();
            if now >= deadline {
                break;
            }
            state = wait_timeout(&self.changed, state, deadline - now);
        }
        let count = state.ended.len().min(most);
        state.ended.drain(..count).collect()
    }

    /// Cancels what has not started; those entries are reported as cancelled.
    pub(super) fn cancel(&self) {
        lock(&self.state).generation += 1;
        // Each runner that comes to a cancelled entry ends it; they are quick.
    }

    /// Cancels, and waits until no runner uses the memory of an entry any more.
    pub(super) fn abandon(&self) {
        self.cancel();
        let deadline = Instant::now() + self.stall;
        let mut state = lock(&self.state);
        while state.running > 0 && Instant::now() < deadline {
            state = wait_timeout(&self.changed, state, Duration::from_millis(50));
        }
    }
}

impl Ticket {
    /// Carries the entry out, unless it was cancelled, and reports it.
    pub(super) fn run(self, work: impl FnOnce() -> Outcome<u64>) {
        let start = {
            let mut state = lock(&self.batch.state);
            let start = state.generation == self.generation;
            state.running += usize::from(start);
            start
        };
        let (status, ret) = if start {
            ended(&std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)))
        } else {
            (Status::CANCELED, 0)
        };
        let mut state = lock(&self.batch.state);
        state.pending -= 1;
        state.running -= usize::from(start);
        state.ended.push_back(Event { cookie: self.cookie, status, ret });
        drop(state);
        self.batch.changed.notify_all();
    }
}

fn ended(outcome: &std::thread::Result<Outcome<u64>>) -> (Status, isize) {
    match outcome {
        Ok(Ok(bytes)) => (Status::COMPLETE, isize::try_from(*bytes).unwrap_or(isize::MAX)),
        Ok(Err(failure)) if failure.errno == rustix::io::Errno::TIMEDOUT.raw_os_error() => {
            (Status::TIMEOUT, failure.reported())
        }
        Ok(Err(failure)) => (Status::FAILED, failure.reported()),
        Err(_) => (Status::FAILED, -(OpError::INTERNAL_ERROR.0 as isize)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn batch(capacity: usize) -> Arc<Batch> {
        Batch::new(capacity, SOON)
    }

    #[test]
    fn each_entry_is_reported_once_and_room_comes_back_with_the_report() {
        let batch = batch(3);
        let tickets = batch.admit(&[1, 2, 3]).unwrap();
        assert_eq!(batch.admit(&[4]).err().unwrap().code, OpError::BATCH_FULL);
        for (ticket, n) in tickets.into_iter().zip(10..) {
            ticket.run(move || if n == 11 { Err(Failure::value("no")) } else { Ok(n) });
        }
        assert!(batch.admit(&[4]).is_err(), "ended, but not reported");
        let two = batch.events(1, 2, None);
        let expected = [(1, Status::COMPLETE, 10), (2, Status::FAILED, -5022)];
        let seen: Vec<_> = two.iter().map(|e| (e.cookie, e.status, e.ret)).collect();
        assert_eq!(seen, expected);
        assert_eq!(batch.admit(&[4, 5]).unwrap().len(), 2);
        assert_eq!(batch.events(0, 9, None).len(), 1);
        assert_eq!(batch.events(0, 9, None).len(), 0);
    }

    #[test]
    fn what_is_cancelled_before_it_starts_is_reported_so() {
        let batch = batch(2);
        let mut tickets = batch.admit(&[7, 8]).unwrap();
        let second = tickets.pop().unwrap();
        tickets.pop().unwrap().run(|| Ok(1));
        batch.cancel();
        second.run(|| panic!("it must not run"));
        let statuses: Vec<_> = batch.events(2, 2, None).iter().map(|e| e.status).collect();
        assert_eq!(statuses, [Status::COMPLETE, Status::CANCELED]);
    }

    #[test]
    fn a_panic_is_a_failed_entry() {
        let batch = batch(1);
        for ticket in batch.admit(&[1]).unwrap() {
            ticket.run(|| panic!("on purpose"));
        }
        assert_eq!(batch.events(1, 1, None)[0].ret, -5030);
    }

    #[test]
    fn a_wait_ends_with_its_timeout_or_when_nothing_is_left() {
        let batch = batch(1);
        assert!(batch.events(1, 1, None).is_empty(), "nothing submitted");
        let held = batch.admit(&[1]).unwrap();
        assert!(batch.events(1, 1, Some(Duration::from_millis(5))).is_empty());
        drop(held);
    }
}
