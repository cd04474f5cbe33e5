//! Completion queues and their channels.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::rc::{Completion, CqId, Notify};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::super::soft::{Soft, eventfd};
use super::create_error;
use crate::error::{Error, Kind, Result};

/// A completion queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Cq {
    pub(super) inner: Arc<CqInner>,
}

#[derive(Debug)]
pub(super) struct CqInner {
    soft: Arc<Soft>,
    pub(super) id: CqId,
    channel: Arc<OwnedFd>,
}

impl Drop for CqInner {
    fn drop(&mut self) {
        self.soft.shared.with(|core| {
            core.channels.remove(&self.id);
            let _ = core.engine.destroy_cq(self.id);
        });
    }
}

impl Cq {
    pub(super) fn new(soft: Arc<Soft>, capacity: u32) -> Result<Self> {
        let channel = Arc::new(eventfd()?);
        let made = soft.shared.with(|core| {
            let id = core.engine.create_cq(capacity)?;
            core.channels.insert(id, Arc::clone(&channel));
            Ok(id)
        });
        let id = made.map_err(|error| create_error("completion queue", error))?;
        Ok(Self { inner: Arc::new(CqInner { soft, id, channel }) })
    }

    pub(super) fn is_of(&self, soft: &Arc<Soft>) -> bool {
        Arc::ptr_eq(&self.inner.soft, soft)
    }

    /// The oldest completion, if there is one. Never waits; moves packets where there is none.
    ///
    /// # Errors
    /// `is_refused` with code `cq-overrun` when completions were lost.
    pub fn poll(&self) -> Result<Option<Completion>> {
        let found = self
            .inner
            .soft
            .shared
            .poll(|core| core.engine.poll_completion(self.inner.id).transpose());
        found.transpose().map_err(|error| {
            Error::refused("cannot poll the completion queue").because(error).coded("cq-overrun")
        })
    }

    /// Waits for a completion until `timeout` has passed.
    ///
    /// # Errors
    /// `is_timeout` when none came; as [`poll`](Self::poll).
    pub fn wait(&self, timeout: Duration) -> Result<Completion> {
        let end = Instant::now().checked_add(timeout);
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            self.request_notify(Notify::Any);
            // What came between the poll and the request raises no event.
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            self.inner.soft.shared.hand_over();
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(Error::new(
                    Kind::Timeout,
                    format!("no completion within {} ms", timeout.as_millis()),
                ));
            }
            self.sleep(left);
            self.acknowledge();
        }
    }

    /// Asks for one event on the channel, for the next completion that `notify` names. Completions that
    /// are already there do not raise it: poll once more before waiting.
    pub fn request_notify(&self, notify: Notify) {
        let id = self.inner.id;
        self.inner.soft.shared.with(|core| core.engine.request_notify(id, notify));
        self.inner.soft.shared.hand_over();
    }

    /// The completion channel: readable after an event that was asked for, until it is acknowledged.
    pub fn channel(&self) -> BorrowedFd<'_> {
        self.inner.channel.as_fd()
    }

    /// Takes the events off the channel; answers how many there were.
    pub fn acknowledge(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&*self.inner.channel, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }

    fn sleep(&self, left: Option<Duration>) {
        let left = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&*self.inner.channel, PollFlags::IN)];
        // Interrupted or not: the caller looks again.
        let _ = rustix::event::poll(&mut fds, left.as_ref());
    }
}
