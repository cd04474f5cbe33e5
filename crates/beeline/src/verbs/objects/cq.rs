//! Completion queues and their channels.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::rc::{Completion, Notify};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::super::ibv;
use super::context::NicRef;
use super::soft::SoftCq;
use crate::error::{Error, Kind, Result};

/// A completion queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Cq {
    pub(super) inner: CqInner,
}

#[derive(Clone, Debug)]
pub(super) enum CqInner {
    Soft(Arc<SoftCq>),
    Ibv(Arc<ibv::Cq>),
}

impl Cq {
    pub(super) fn new(nic: &NicRef, capacity: u32) -> Result<Self> {
        let inner = match nic {
            NicRef::Soft(soft) => CqInner::Soft(Arc::new(SoftCq::new(soft, capacity)?)),
            NicRef::Ibv(device) => CqInner::Ibv(ibv::Cq::new(device, capacity)?),
        };
        Ok(Self { inner })
    }

    /// The oldest completion, if there is one. Never waits; a NIC in software moves packets where there is
    /// none.
    ///
    /// # Errors
    /// `is_refused` with code `cq-overrun` when completions were lost.
    pub fn poll(&self) -> Result<Option<Completion>> {
        match &self.inner {
            CqInner::Soft(cq) => cq.poll(),
            CqInner::Ibv(cq) => cq.poll(),
        }
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
            if let CqInner::Soft(cq) = &self.inner {
                cq.soft.shared.hand_over();
            }
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
        match &self.inner {
            CqInner::Soft(cq) => cq.request_notify(notify),
            CqInner::Ibv(cq) => cq.request_notify(notify),
        }
    }

    /// The completion channel: readable after an event that was asked for, until it is acknowledged.
    pub fn channel(&self) -> BorrowedFd<'_> {
        match &self.inner {
            CqInner::Soft(cq) => cq.channel.as_fd(),
            CqInner::Ibv(cq) => cq.channel(),
        }
    }

    /// Takes the events off the channel; answers how many there were.
    pub fn acknowledge(&self) -> u64 {
        match &self.inner {
            CqInner::Soft(cq) => cq.acknowledge(),
            CqInner::Ibv(cq) => cq.acknowledge(),
        }
    }

    fn sleep(&self, left: Option<Duration>) {
        let left = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let channel = self.channel();
        // That a queue of the kernel's was overrun is told as an asynchronous event only.
        let events = match &self.inner {
            CqInner::Soft(_) => channel,
            CqInner::Ibv(cq) => cq.events(),
        };
        let mut fds = [
            PollFd::from_borrowed_fd(channel, PollFlags::IN),
            PollFd::from_borrowed_fd(events, PollFlags::IN),
        ];
        // Interrupted or not: the caller looks again.
        let _ = rustix::event::poll(&mut fds, left.as_ref());
        if let CqInner::Ibv(cq) = &self.inner {
            cq.look_for_events();
        }
    }
}
