//! Links: what carries a software NIC's datagrams.

mod bell;
mod fault;
mod local;
mod pair;
mod pcap;
mod ring;
mod segments;
mod udp;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use beeline_core::rc::Transmit;
use beeline_core::roce::{Path, Strength};

pub(super) use fault::FaultLink;
pub use fault::Faults;
pub(super) use local::LocalLink;
pub(super) use pair::PairLink;
pub(super) use pcap::Pcap;
pub use segments::{NoSegmentation, Segmentation};
pub(super) use udp::UdpLink;

use super::peer::PeerLock;

/// Datagrams that are moved before anything else gets a turn.
pub(super) const BATCH: usize = beeline_sys::net::BATCH_MAX;

/// What a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkKind {
    /// A UDP socket: no privilege needed. Over IPv4 the received identification is hidden, so 16 of the
    /// 32 bits of the packet check remain.
    Udp,
    /// A UDP socket to send, and a raw socket that sees the whole IP header: the full check. Needs
    /// `CAP_NET_RAW`.
    Raw,
    /// Two NICs of one process, joined in memory.
    Pair,
    /// Two processes of one host, joined by memory they share; the payload of shareable memory moves
    /// straight from the one's to the other's.
    Local,
    /// None of ours: a NIC of the kernel's sends and receives.
    Kernel,
}

/// A link and what stands around it.
#[derive(Debug)]
pub(super) enum Link {
    Udp(UdpLink),
    Pair(PairLink),
    Fault(Box<FaultLink>),
    Local(LocalLink),
}

/// A datagram that came in.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) path: Path,
    pub(super) datagram: Vec<u8>,
}

impl Link {
    pub(super) fn kind(&self) -> LinkKind {
        match self {
            Self::Udp(link) => link.kind(),
            Self::Pair(_) => LinkKind::Pair,
            Self::Local(_) => LinkKind::Local,
            Self::Fault(link) => link.inner.kind(),
        }
    }

    /// To whom several packets go as one piece.
    pub(super) fn segmentation(&self) -> Segmentation {
        match self {
            Self::Udp(link) => link.segmentation(),
            Self::Pair(_) | Self::Local(_) => Segmentation::Off(NoSegmentation::NoSocket),
            Self::Fault(link) => link.inner.segmentation(),
        }
    }

    /// The process at the other end, where memory is shared with one.
    pub(super) fn peer(&self) -> Option<Arc<PeerLock>> {
        match self {
            Self::Local(link) => Some(link.peer()),
            Self::Fault(link) => link.inner.peer(),
            Self::Udp(_) | Self::Pair(_) => None,
        }
    }

    /// How strong the check of received packets is.
    pub(super) fn strength(&self, local: IpAddr) -> Strength {
        match self.kind() {
            LinkKind::Udp if local.is_ipv4() => Strength::Half,
            _ => Strength::Full,
        }
    }

    /// Sends from the front of `queue` until it is empty or the link is full, at most [`BATCH`]; what
    /// was sent, or lost on the way, goes to `sent`. `false` when the link is full.
    pub(super) fn send(&mut self, queue: &mut VecDeque<Transmit>, sent: &mut Vec<Vec<u8>>) -> bool {
        match self {
            Self::Udp(link) => link.send(queue, sent),
            Self::Pair(link) => link.send(queue),
            Self::Local(link) => link.send(queue, sent),
            Self::Fault(link) => link.send(queue, sent),
        }
    }

    /// Takes what has arrived, at most [`BATCH`] datagrams or some merged ones, into buffers from `spare`
    /// and new ones.
    pub(super) fn receive(&mut self, spare: &mut Vec<Vec<u8>>, arrivals: &mut Vec<Arrival>) {
        match self {
            Self::Udp(link) => link.receive(spare, arrivals),
            Self::Pair(link) => link.receive(arrivals),
            Self::Local(link) => link.receive(spare, arrivals),
            Self::Fault(link) => link.inner.receive(spare, arrivals),
        }
    }

    /// Readable when something has arrived.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Udp(link) => link.fd(),
            Self::Pair(link) => link.fd(),
            Self::Local(link) => link.fd(),
            Self::Fault(link) => link.inner.fd(),
        }
    }

    /// When [`send`](Self::send) is to be called although nothing new is to be sent.
    pub(super) fn due(&self) -> Option<Instant> {
        match self {
            Self::Fault(link) => link.due(),
            Self::Local(link) => link.due(),
            _ => None,
        }
    }

    /// Whether [`send`](Self::send) has something to say although no packet waits, with the next packets or
    /// the next poll.
    pub(super) fn has_word(&self) -> bool {
        match self {
            Self::Local(link) => link.has_word(),
            Self::Fault(link) => link.inner.has_word(),
            Self::Udp(_) | Self::Pair(_) => false,
        }
    }

    /// Whether packets have arrived, since the last call, that name memory of the peer.
    pub(super) fn take_unsettled(&mut self) -> bool {
        match self {
            Self::Local(link) => link.take_unsettled(),
            Self::Fault(link) => link.inner.take_unsettled(),
            Self::Udp(_) | Self::Pair(_) => false,
        }
    }

    /// Whether it is known, without asking anybody, that nothing has arrived.
    pub(super) fn is_quiet(&self) -> bool {
        matches!(self, Self::Local(link) if link.is_quiet())
    }

    /// Tells the link that a thread is about to wait for [`fd`](Self::fd), or has waited. Answers
    /// whether something is there already, so that it must not wait.
    pub(super) fn set_sleeping(&self, sleeping: bool) -> bool {
        match self {
            Self::Local(link) => link.set_sleeping(sleeping),
            Self::Fault(link) => link.inner.set_sleeping(sleeping),
            // The kernel, or the sender's lock, sees to it.
            Self::Udp(_) | Self::Pair(_) => false,
        }
    }
}
