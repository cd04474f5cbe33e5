//! An open NIC, and its protection domains.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use beeline_core::rc::{Counters, Event};
use beeline_core::reason::Code;
use beeline_core::roce::{Mtu, Qpn, Strength};

use super::super::ibv;
use super::super::link::{LinkKind, NoSegmentation, Segmentation};
use super::super::soft::Soft;
use super::cq::Cq;
use super::soft::SoftPd;
use crate::error::Result;

/// An open NIC. Cheap to clone; the NIC runs until everything made on it is dropped.
#[derive(Clone, Debug)]
pub struct Context {
    pub(super) nic: NicRef,
}

/// Whose objects are made.
#[derive(Clone, Debug)]
pub(in super::super) enum NicRef {
    Soft(Arc<Soft>),
    Ibv(Arc<ibv::Device>),
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
    /// Of a NIC of the kernel's: which port and GID, and why not another.
    pub port: Option<ibv::PortResolved>,
    /// Why the trace of packets ended before its NIC: it must not end the traffic.
    pub trace_error: Option<String>,
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
    /// A shared receive queue failed (NICs of the kernel's).
    SrqError,
    /// The NIC failed, and with it all that was made on it (NICs of the kernel's).
    DeviceFatal,
    /// The port is up (NICs of the kernel's).
    PortActive,
    /// The port is down (NICs of the kernel's).
    PortError,
    /// An address of the port was added or taken away (NICs of the kernel's).
    GidChange,
    /// Any other event of a NIC of the kernel's: its number in `enum ibv_event_type`.
    Other(u32),
}

impl Context {
    pub(in super::super) const fn new(nic: NicRef) -> Self {
        Self { nic }
    }

    /// The NIC's address; its GID is this address, mapped into IPv6.
    pub fn local(&self) -> IpAddr {
        match &self.nic {
            NicRef::Soft(soft) => soft.shared.local,
            NicRef::Ibv(device) => device.local,
        }
    }

    /// The largest path MTU of its port.
    pub fn mtu(&self) -> Mtu {
        match &self.nic {
            NicRef::Soft(soft) => soft.shared.mtu,
            NicRef::Ibv(device) => device.mtu,
        }
    }

    /// Makes a protection domain.
    ///
    /// # Errors
    /// `is_refused` where there are too many; `is_io` with what a NIC of the kernel's says.
    pub fn alloc_pd(&self) -> Result<Pd> {
        let inner = match &self.nic {
            NicRef::Soft(soft) => PdInner::Soft(SoftPd::new(soft)?),
            NicRef::Ibv(device) => PdInner::Ibv(ibv::Pd::new(device)?),
        };
        Ok(Pd { inner })
    }

    /// Makes a completion queue of `capacity` entries with its completion channel.
    ///
    /// Make it as long as all work requests that may be outstanding on its queue pairs: a queue that is
    /// overrun is an error for good. A NIC of the kernel's may make it longer.
    ///
    /// # Errors
    /// `is_refused` for a capacity of 0 or more than is possible; `is_io` where descriptors are used up.
    pub fn create_cq(&self, capacity: u32) -> Result<Cq> {
        Cq::new(&self.nic, capacity)
    }

    /// The next asynchronous event, oldest first.
    pub fn poll_async(&self) -> Option<AsyncEvent> {
        match &self.nic {
            NicRef::Soft(soft) => poll_soft(soft),
            NicRef::Ibv(device) => device.poll_async(),
        }
    }

    /// Readable while an asynchronous event waits for [`poll_async`](Self::poll_async).
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        match &self.nic {
            NicRef::Soft(soft) => soft.shared.events.as_fd(),
            NicRef::Ibv(device) => device.async_fd(),
        }
    }

    /// What happened on this NIC so far. Of a NIC of the kernel's: what its driver counts for the whole
    /// port, whoever uses it, since the driver was loaded; what it does not count is 0.
    pub fn counters(&self) -> Counters {
        match &self.nic {
            NicRef::Soft(soft) => soft.shared.with(|core| *core.engine.counters()),
            NicRef::Ibv(device) => device.counters(),
        }
    }

    /// How packets travel.
    pub fn resolved(&self) -> Resolved {
        let shared = match &self.nic {
            NicRef::Soft(soft) => &soft.shared,
            NicRef::Ibv(device) => {
                let (link, why) = (LinkKind::Kernel, Code::IcrcByNic);
                let port = Some(device.resolved.clone());
                let segmentation = Segmentation::Off(NoSegmentation::NoSocket);
                let (check, trace_error) = (Strength::Full, None);
                return Resolved { link, check, why, segmentation, port, trace_error };
            }
        };
        let why = match (shared.kind, shared.strength) {
            (LinkKind::Local, _) => Code::SharedMemory,
            (_, Strength::Full) => Code::IcrcFull,
            (_, Strength::Half) => Code::IcrcHalf,
        };
        let (segmentation, trace_error) =
            shared.with(|core| (core.segmentation(), core.trace_error().map(str::to_owned)));
        let (link, check) = (shared.kind, shared.strength);
        Resolved { link, check, why, segmentation, port: None, trace_error }
    }
}

fn poll_soft(soft: &Soft) -> Option<AsyncEvent> {
    let shared = &soft.shared;
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

/// A protection domain: what is made in it works together, and with nothing else.
#[derive(Clone, Debug)]
pub struct Pd {
    pub(super) inner: PdInner,
}

#[derive(Clone, Debug)]
pub(super) enum PdInner {
    Soft(Arc<SoftPd>),
    Ibv(Arc<ibv::Pd>),
}

impl Pd {
    /// The NIC it is on.
    pub fn context(&self) -> Context {
        let nic = match &self.inner {
            PdInner::Soft(pd) => NicRef::Soft(Arc::clone(&pd.soft)),
            PdInner::Ibv(pd) => NicRef::Ibv(Arc::clone(&pd.device)),
        };
        Context { nic }
    }
}
