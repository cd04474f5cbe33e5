//! Batches: many requests handed over at once, whose ends are asked for later.
//!
//! Each entry is reported exactly once, or taken back by a cancel and never reported: NVIDIA's library does
//! so, and its clients ask for no events after one. Entries wait in a queue of the session's runners, each of
//! which holds one lane at a time: a small pool makes a large batch slow, never stuck.

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

/// How many times its size a batch may have in the runners' queue, with what was cancelled there.
const WITHDRAWN_MAX: usize = 8;

#[derive(Default)]
struct State {
    /// Submitted since the last cancel, and not finished.
    pending: usize,
    /// Of these, how many a runner works on.
    running: usize,
    /// Taken back, but a runner still works on them.
    stale: usize,
    /// Taken back before a runner came to them: they still stand in its queue.
    withdrawn: usize,
    ended: VecDeque<Event>,
    /// Entries of earlier generations are taken back.
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
        if state.withdrawn + held + cookies.len() > WITHDRAWN_MAX.saturating_mul(self.capacity) {
            return Err(Failure::new(
                OpError::BATCH_FULL,
                format!(
                    "{} cancelled entries still stand in the queue; try again",
                    state.withdrawn
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

    /// Takes back all that was submitted and not reported: what has not started never does, and nothing of
    /// it is reported. The batch has room for as much again at once. Does not wait.
    pub(super) fn take_back(&self) {
        let mut state = lock(&self.state);
        state.generation += 1;
        let running = std::mem::take(&mut state.running);
        state.stale += running;
        state.withdrawn += std::mem::take(&mut state.pending).saturating_sub(running);
        state.ended.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// [`Self::take_back`], and waits until no runner uses the memory of such an entry any more.
    ///
    /// # Errors
    /// `ETIMEDOUT` where some still do after the stall timeout.
    pub(super) fn cancel(&self) -> Outcome<()> {
        self.take_back();
        let deadline = Instant::now() + self.stall;
        let mut state = lock(&self.state);
        while state.stale > 0 {
            let now = Instant::now();
            if now >= deadline {
                return Err(Failure::timeout(format!(
                    "{} cancelled entries did not end within {:?}; their buffers are still in use",
                    state.stale, self.stall
                )));
            }
            state = wait_timeout(&self.changed, state, deadline - now);
        }
        Ok(())
    }
}

impl Ticket {
    /// Carries the entry out and has it reported, unless it was taken back.
    pub(super) fn run(self, work: impl FnOnce() -> Outcome<u64>) {
        {
            let mut state = lock(&self.batch.state);
            if state.generation != self.generation {
                state.withdrawn = state.withdrawn.saturating_sub(1);
                return;
            }
            state.running += 1;
        }
        let (status, ret) = ended(&std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)));
        let mut state = lock(&self.batch.state);
        if state.generation == self.generation {
            state.pending -= 1;
            state.running -= 1;
            state.ended.push_back(Event { cookie: self.cookie, status, ret });
        } else {
            state.stale -= 1;
        }
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
    fn what_is_cancelled_never_starts_and_is_not_reported_and_its_room_is_free() {
        let batch = batch(3);
        let mut tickets = batch.admit(&[6, 7, 8]).unwrap();
        let (last, middle) = (tickets.pop().unwrap(), tickets.pop().unwrap());
        tickets.pop().unwrap().run(|| Ok(1));
        // One is under way when the cancel comes: it is waited for.
        let (entered, is_entered) = std::sync::mpsc::channel();
        let (go, may_go) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                middle.run(|| {
                    entered.send(()).unwrap();
                    may_go.recv().unwrap();
                    Ok(2)
                });
            });
            is_entered.recv().unwrap();
            let cancel = scope.spawn(|| batch.cancel().unwrap());
            while lock(&batch.state).stale == 0 {
                std::thread::yield_now();
            }
            // As much as the batch holds, while the old one is still under way.
            for ticket in batch.admit(&[1, 2, 3]).unwrap() {
                ticket.run(|| Ok(9));
            }
            go.send(()).unwrap();
            cancel.join().unwrap();
        });
        last.run(|| panic!("it must not run"));
        let cookies: Vec<_> = batch.events(3, 3, None).iter().map(|e| e.cookie).collect();
        assert_eq!(cookies, [1, 2, 3]);
        assert!(batch.events(1, 1, None).is_empty());
    }

    #[test]
    fn a_cancel_that_cannot_end_in_time_says_so() {
        let batch = Batch::new(1, Duration::from_millis(5));
        let ticket = batch.admit(&[1]).unwrap().pop().unwrap();
        let other = Arc::clone(&batch);
        ticket.run(move || {
            assert_eq!(other.cancel().unwrap_err().errno, 110);
            Ok(0)
        });
        batch.cancel().unwrap();
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
