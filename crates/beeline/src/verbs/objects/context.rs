//! An open NIC, and its protection domains.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use beeline_core::mr::PdId;
use beeline_core::rc::{Counters, Event};
use beeline_core::reason::Code;
use beeline_core::roce::{Mtu, Qpn, Strength};

use super::super::link::{LinkKind, Segmentation};
use super::super::soft::Soft;
use super::cq::Cq;
use super::create_error;
use crate::error::Result;

/// An open NIC. Cheap to clone; the NIC runs until everything made on it is dropped.
#[derive(Clone, Debug)]
pub struct Context {
    pub(super) soft: Arc<Soft>,
}

/// How a NIC reaches its peers, and what that costs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resolved {
    /// The link in use.
    pub link: LinkKind,
    /// How strong the check of received packets is.
    pub check: Strength,
    /// Why: [`Code::IcrcHalf`] where a UDP socket hides a part of what is checked.
    pub why: Code,
    /// To whom several packets go to the kernel as one piece, or why not. Turns off by itself where the
    /// kernel refuses one.
    pub segmentation: Segmentation,
}

/// Something that happens unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A completion queue was overrun; its queue pairs are in ERR.
    CqError,
    /// A peer's request was refused as invalid; the queue pair is in ERR.
    QpRequestError(Qpn),
    /// A peer's access was refused; the queue pair is in ERR.
    QpAccessError(Qpn),
    /// A queue pair failed on this side; it is in ERR.
    QpFatal(Qpn),
    /// A queue pair in ERR takes no more receives of its shared queue.
    LastWqeReached(Qpn),
    /// A shared receive queue fell below its limit.
    SrqLimit,
}

impl Context {
    pub(in super::super) const fn new(soft: Arc<Soft>) -> Self {
        Self { soft }
    }

    /// The NIC's address; its GID is this address, mapped into IPv6.
    pub fn local(&self) -> IpAddr {
        self.soft.shared.local
    }

    /// The largest path MTU of its port.
    pub fn mtu(&self) -> Mtu {
        self.soft.shared.mtu
    }

    /// Makes a protection domain.
    ///
    /// # Errors
    /// `is_refused` where there are too many.
    pub fn alloc_pd(&self) -> Result<Pd> {
        let made = self.soft.shared.with(|core| core.engine.create_pd());
        let id = made.map_err(|error| create_error("protection domain", error))?;
        Ok(Pd { inner: Arc::new(PdInner { soft: Arc::clone(&self.soft), id }) })
    }

    /// Makes a completion queue of `capacity` entries with its completion channel.
    ///
    /// Make it as long as all work requests that may be outstanding on its queue pairs: a queue that is
    /// overrun is an error for good.
    ///
    /// # Errors
    /// `is_refused` for a capacity of 0 or more than is possible; `is_io` where descriptors are used up.
    pub fn create_cq(&self, capacity: u32) -> Result<Cq> {
        Cq::new(Arc::clone(&self.soft), capacity)
    }

    /// The next asynchronous event, oldest first.
    pub fn poll_async(&self) -> Option<AsyncEvent> {
        let shared = &self.soft.shared;
        let event = shared.with(|core| {
            let event = core.events.pop_front();
            if core.events.is_empty() {
                let _ = rustix::io::read(&shared.events, &mut [0; 8]);
            }
            event
        })?;
        match event {
            Event::CqError(_) => Some(AsyncEvent::CqError),
            Event::QpRequestError(qpn) => Some(AsyncEvent::QpRequestError(qpn)),
            Event::QpAccessError(qpn) => Some(AsyncEvent::QpAccessError(qpn)),
            Event::QpFatal(qpn) => Some(AsyncEvent::QpFatal(qpn)),
            Event::LastWqeReached(qpn) => Some(AsyncEvent::LastWqeReached(qpn)),
            Event::SrqLimit(_) => Some(AsyncEvent::SrqLimit),
            // Goes to its completion channel, never here.
            Event::CompletionReady(_) => None,
        }
    }

    /// Readable while an asynchronous event waits for [`poll_async`](Self::poll_async).
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.soft.shared.events.as_fd()
    }

    /// What happened on this NIC so far.
    pub fn counters(&self) -> Counters {
        self.soft.shared.with(|core| *core.engine.counters())
    }

    /// How packets travel.
    pub fn resolved(&self) -> Resolved {
        let shared = &self.soft.shared;
        let why = match (shared.kind, shared.strength) {
            (LinkKind::Local, _) => Code::SharedMemory,
            (_, Strength::Full) => Code::IcrcFull,
            (_, Strength::Half) => Code::IcrcHalf,
        };
        let segmentation = shared.with(|core| core.segmentation());
        Resolved { link: shared.kind, check: shared.strength, why, segmentation }
    }
}

/// A protection domain: what is made in it works together, and with nothing else.
#[derive(Clone, Debug)]
pub struct Pd {
    pub(super) inner: Arc<PdInner>,
}

#[derive(Debug)]
pub(super) struct PdInner {
    pub(super) soft: Arc<Soft>,
    pub(super) id: PdId,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // Fails only while a retired region is still in use; the domain then stays with the NIC.
        let _ = self.soft.shared.with(|core| core.engine.destroy_pd(self.id));
    }
}

impl Pd {
    /// The NIC it is on.
    pub fn context(&self) -> Context {
        Context { soft: Arc::clone(&self.inner.soft) }
    }
}
