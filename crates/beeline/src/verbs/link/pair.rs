//! Two NICs of one process, joined in memory.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use beeline_core::rc::Transmit;
use rustix::event::EventfdFlags;

use super::{Arrival, BATCH};
use crate::lock;

/// Datagrams on their way in one direction at most; the rest is lost, as on a wire.
const QUEUE_MAX: usize = 4096;

#[derive(Debug)]
pub(in super::super) struct PairLink {
    inbound: Arc<Direction>,
    outbound: Arc<Direction>,
}

#[derive(Debug)]
struct Direction {
    queue: Mutex<VecDeque<Arrival>>,
    ready: OwnedFd,
}

impl PairLink {
    /// Both ends.
    pub(in super::super) fn new() -> io::Result<(Self, Self)> {
        let direction = || {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let ready = rustix::event::eventfd(0, flags)?;
            io::Result::Ok(Arc::new(Direction { queue: Mutex::default(), ready }))
        };
        let (there, back) = (direction()?, direction()?);
        let end = |inbound: &Arc<Direction>, outbound: &Arc<Direction>| Self {
            inbound: Arc::clone(inbound),
            outbound: Arc::clone(outbound),
        };
        Ok((end(&back, &there), end(&there, &back)))
    }

    pub(super) fn send(&self, from: &mut VecDeque<Transmit>) -> bool {
        let mut queue = lock(&self.outbound.queue);
        let was_empty = queue.is_empty();
        for Transmit { path, datagram } in from.drain(..) {
            if queue.len() < QUEUE_MAX {
                queue.push_back(Arrival { path, datagram });
            }
        }
        if was_empty && !queue.is_empty() {
            // Cannot fail short of 2^64 unread wake-ups; a full counter is readable all the same.
            let _ = rustix::io::write(&self.outbound.ready, &1u64.to_ne_bytes());
        }
        true
    }

    pub(super) fn receive(&self, arrivals: &mut Vec<Arrival>) {
        let mut queue = lock(&self.inbound.queue);
        let count = queue.len().min(BATCH);
        arrivals.extend(queue.drain(..count));
        if count > 0 && queue.is_empty() {
            // Under the lock, so no wake-up of a later send is taken; without datagrams there is none.
            let _ = rustix::io::read(&self.inbound.ready, &mut [0; 8]);
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.inbound.ready.as_fd()
    }
}
