//! Completion queues and receive queues.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;

use crate::mr::{Lkey, MrTable, PdId};

use super::work::{Completion, PostError, RecvWr, Sge, Status};

/// Names a completion queue of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CqId(pub(super) u32);

/// Names a shared receive queue of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SrqId(pub(super) u32);

/// Completions in the order in which they came about; bounded.
#[derive(Debug)]
pub(super) struct Cq {
    entries: VecDeque<Completion>,
    capacity: u32,
    overrun: bool,
    armed: Option<Notify>,
    /// Queue pairs that report here.
    pub(super) users: u32,
}

/// Which completions raise an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The next one.
    Any,
    /// The next that the peer asked an event for, or that is an error (IBA 11.4.2.2).
    Solicited,
}

/// What a new completion does to its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    Quiet,
    Event,
    Overrun,
}

impl Cq {
    pub(super) fn new(capacity: u32) -> Self {
        Self { entries: VecDeque::new(), capacity, overrun: false, armed: None, users: 0 }
    }

    /// A full queue is overrun for good: completions were lost, so nothing on it can be trusted
    /// (IBA 10.8.1, "completion queue errors").
    pub(super) fn push(&mut self, completion: Completion, solicited: bool) -> Pushed {
        if self.overrun || self.entries.len() >= self.capacity as usize {
            let first = !self.overrun;
            self.overrun = true;
            return if first { Pushed::Overrun } else { Pushed::Quiet };
        }
        self.entries.push_back(completion);
        let fires = match self.armed {
            Some(Notify::Any) => true,
            Some(Notify::Solicited) => solicited || completion.status != Status::Success,
            None => false,
        };
        if fires {
            self.armed = None;
            Pushed::Event
        } else {
            Pushed::Quiet
        }
    }

    pub(super) fn pop(&mut self) -> Result<Option<Completion>, CqOverrun> {
        match self.entries.pop_front() {
            None if self.overrun => Err(CqOverrun { capacity: self.capacity }),
            entry => Ok(entry),
        }
    }

    pub(super) const fn is_overrun(&self) -> bool {
        self.overrun
    }

    pub(super) const fn arm(&mut self, notify: Notify) {
        // "Any" asked for earlier is not weakened by a later "solicited" (IBA 11.4.2.2).
        if !matches!(self.armed, Some(Notify::Any)) {
            self.armed = Some(notify);
        }
    }
}

/// More completions came about than the queue holds; some are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqOverrun {
    /// How many it holds.
    pub capacity: u32,
}

impl fmt::Display for CqOverrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the completion queue of {} entries was overrun: make it as long as all the work \
             requests that may be outstanding",
            self.capacity
        )
    }
}

impl core::error::Error for CqOverrun {}

/// A receive that was posted. Its regions are held until it is done.
#[derive(Debug)]
pub(super) struct RecvWqe {
    pub(super) id: u64,
    pub(super) sges: Vec<Sge>,
    held: Vec<Lkey>,
}

impl RecvWqe {
    /// Ends its hold on the regions.
    pub(super) fn release(&mut self, mrs: &mut MrTable) {
        for lkey in self.held.drain(..) {
            mrs.unhold(lkey);
        }
    }
}

/// Receives posted and not yet consumed: a queue pair's own or shared.
#[derive(Debug)]
pub(super) struct RecvQueue {
    entries: VecDeque<RecvWqe>,
    capacity: u32,
    sges_max: usize,
    /// Receives consumed whose completion has not been reported: they still take an entry.
    pub(super) consumed: u32,
}

impl RecvQueue {
    pub(super) fn new(capacity: u32, sges_max: usize) -> Self {
        Self { entries: VecDeque::new(), capacity, sges_max, consumed: 0 }
    }

    pub(super) fn post(&mut self, wr: RecvWr, mrs: &mut MrTable) -> Result<(), PostError> {
        if wr.sges.len() > self.sges_max {
            return Err(PostError::TooManySges { given: wr.sges.len(), max: self.sges_max });
        }
        if self.entries.len() + self.consumed as usize >= self.capacity as usize {
            return Err(PostError::QueueFull { capacity: self.capacity });
        }
        let held = wr.sges.iter().map(|sge| sge.lkey).filter(|lkey| mrs.hold(*lkey)).collect();
        self.entries.push_back(RecvWqe { id: wr.id, sges: wr.sges, held });
        Ok(())
    }

    pub(super) fn take(&mut self) -> Option<RecvWqe> {
        let wqe = self.entries.pop_front()?;
        self.consumed += 1;
        Some(wqe)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Forgets everything posted.
    pub(super) fn clear(&mut self, mrs: &mut MrTable) {
        for mut wqe in self.entries.drain(..) {
            wqe.release(mrs);
        }
        self.consumed = 0;
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq {
    pub(super) pd: PdId,
    pub(super) queue: RecvQueue,
    /// An event is raised once when fewer receives than this are left; 0 is off.
    pub(super) limit: u32,
    pub(super) users: u32,
}
