//! Work requests and completions: what a consumer posts and what it is told.
//!
//! IBA 10.8 "Work request processing model" and 11.4 "Work request verbs".

use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;

use crate::addr::Iova;
use crate::mr::{Lkey, Rkey};
use crate::roce::Qpn;

use super::state::QpState;

/// Longest message in bytes (IBA 9.3.3.1.3, C9-24).
pub const MESSAGE_BYTES_MAX: u32 = 1 << 31;

/// Most scatter/gather elements of one work request.
pub const SGES_MAX: usize = 32;

/// One element of a scatter/gather list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// First byte, as registered.
    pub addr: Iova,
    /// Length in bytes.
    pub len: u32,
    /// The region's local key.
    pub lkey: Lkey,
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// First byte, as the peer registered it.
    pub addr: Iova,
    /// The key the peer handed out.
    pub rkey: Rkey,
}

/// What a send work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendOp {
    /// Into a receive of the peer.
    Send {
        /// 32 bits for the receiver's completion.
        imm: Option<u32>,
    },
    /// Into named memory of the peer.
    Write {
        /// Where to.
        remote: Remote,
        /// 32 bits that consume a receive of the peer and complete it.
        imm: Option<u32>,
    },
    /// Out of named memory of the peer.
    Read {
        /// Where from.
        remote: Remote,
    },
    /// Stores `swap` in a 64-bit word of the peer where it holds `compare`; the old word comes back.
    CompareSwap {
        /// The word, 8-byte aligned.
        remote: Remote,
        /// What it must hold.
        compare: u64,
        /// What it shall hold then.
        swap: u64,
    },
    /// Adds to a 64-bit word of the peer, wrapping; the old word comes back.
    FetchAdd {
        /// The word, 8-byte aligned.
        remote: Remote,
        /// What to add.
        add: u64,
    },
    /// A SEND that invalidates a key of the peer. Not served: it needs type-2 memory windows.
    SendInvalidate {
        /// The key.
        rkey: Rkey,
    },
}

impl SendOp {
    /// Whether data flows back: READ and the atomics.
    pub const fn is_read_or_atomic(self) -> bool {
        matches!(self, Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// The opcode its completion carries.
    pub const fn completion(self) -> CompletionOp {
        match self {
            Self::Send { .. } | Self::SendInvalidate { .. } => CompletionOp::Send,
            Self::Write { .. } => CompletionOp::Write,
            Self::Read { .. } => CompletionOp::Read,
            Self::CompareSwap { .. } => CompletionOp::CompareSwap,
            Self::FetchAdd { .. } => CompletionOp::FetchAdd,
        }
    }
}

/// Where the bytes of a send work request are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// In registered memory: read for SEND and WRITE, written for READ and the atomics.
    Sges(Vec<Sge>),
    /// In the work request itself, copied when it was posted; SEND and WRITE only.
    Inline(Vec<u8>),
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The peer's address.
    pub addr: IpAddr,
    /// Its queue pair.
    pub qpn: Qpn,
    /// The queue key it holds.
    pub qkey: u32,
}

/// A send work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// The consumer's own name for it.
    pub id: u64,
    /// What to do.
    pub op: SendOp,
    /// With which bytes.
    pub payload: Payload,
    /// Whether success is reported; an error always is (IBA 10.7.3.1).
    pub signaled: bool,
    /// Whether the peer's completion raises a solicited event.
    pub solicited: bool,
    /// Whether it waits for earlier READs and atomics (IBA 10.8.3.3).
    pub fence: bool,
    /// Where a datagram goes; `None` on a connected queue pair.
    pub to: Option<Destination>,
}

impl SendWr {
    /// A signaled work request without the other flags.
    pub const fn new(id: u64, op: SendOp, payload: Payload) -> Self {
        Self { id, op, payload, signaled: true, solicited: false, fence: false, to: None }
    }
}

/// A receive work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecvWr {
    /// The consumer's own name for it.
    pub id: u64,
    /// Where the bytes go, in order.
    pub sges: Vec<Sge>,
}

/// What a completion reports on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum CompletionOp {
    Send,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
    /// A receive that a SEND consumed.
    Recv,
    /// A receive that a WRITE with immediate data consumed.
    RecvWriteImm,
}

/// A work completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The work request's id.
    pub wr_id: u64,
    /// How it went. Where it is not [`Status::Success`], only `wr_id` and `qpn` mean anything besides.
    pub status: Status,
    /// What it was.
    pub op: CompletionOp,
    /// Bytes received; for a send work request the length of its message.
    pub byte_len: u32,
    /// Immediate data.
    pub imm: Option<u32>,
    /// The queue pair.
    pub qpn: Qpn,
    /// The sender's queue pair (datagrams).
    pub src_qp: Option<Qpn>,
}

/// How a work request ended: the numbers of `ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Status(pub u32);

macro_rules! statuses {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        #[allow(non_upper_case_globals)]
        impl Status {
            $(#[doc = $text] pub const $name: Self = Self($value);)*

            /// What it says, as one clause.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* _ => "unknown status" }
            }

            const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* _ => "Status" }
            }
        }
    };
}

statuses! {
    Success = 0, "success";
    LocalLength = 1, "the message is longer than the receive, or than a message may be";
    LocalQpOperation = 2, "the queue pair could not process the work request";
    LocalProtection = 4, "a scatter/gather element names memory this queue pair may not use";
    Flushed = 5, "flushed: the queue pair is in error";
    BadResponse = 7, "the peer's response makes no sense";
    RemoteInvalidRequest = 9, "the peer refused the request as invalid";
    RemoteAccess = 10, "the peer refused the access: key, bounds or right";
    RemoteOperation = 11, "the peer could not finish the operation";
    RetryExceeded = 12, "no answer from the peer, all retries used";
    RnrRetryExceeded = 13, "the peer had no receive posted, all retries used";
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (status {})", self.text(), self.0)
    }
}

/// Why a work request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum PostError {
    /// No such queue pair or shared receive queue.
    Unknown,
    /// The queue pair's state does not take it.
    State { state: QpState },
    /// The queue is full.
    QueueFull { capacity: u32 },
    /// More scatter/gather elements than the queue takes.
    TooManySges { given: usize, max: usize },
    /// More inline bytes than the queue takes.
    InlineTooLong { given: usize, max: u32 },
    /// The message is longer than a message, or a datagram, may be.
    TooLong { given: u64, max: u32 },
    /// The result of an atomic takes exactly 8 bytes.
    AtomicLength { given: u64 },
    /// READ and the atomics cannot be inline.
    InlineResult,
    /// Inline data is read by the CPU when it is posted, which device memory does not allow.
    InlineDeviceMemory { lkey: Lkey },
    /// The queue pair was connected with no READ or atomic allowed.
    NoReadDepth,
    /// The operation is not served on this kind of queue pair.
    Unsupported { what: &'static str },
    /// A datagram needs a destination, a connected queue pair must not have one.
    Destination { needed: bool },
    /// The queue pair takes its receives from a shared receive queue.
    SharedReceives,
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no such queue"),
            Self::State { state } => write!(f, "the queue pair is in {state}"),
            Self::QueueFull { capacity } => {
                write!(f, "all {capacity} entries of the queue are in use: poll completions first")
            }
            Self::TooManySges { given, max } => {
                write!(f, "{given} scatter/gather elements where the queue takes {max}")
            }
            Self::InlineTooLong { given, max } => {
                write!(f, "{given} inline bytes where the queue takes {max}")
            }
            Self::TooLong { given, max } => {
                write!(f, "a message of {given} bytes; {max} is the most")
            }
            Self::AtomicLength { given } => {
                write!(f, "an atomic's result takes 8 bytes, {given} were given")
            }
            Self::InlineResult => f.write_str("READ and atomics have no inline form"),
            Self::InlineDeviceMemory { lkey } => write!(
                f,
                "region {lkey} is device memory: inline data is read by the CPU, post it without"
            ),
            Self::NoReadDepth => f.write_str(
                "READ and atomics need max_rd_atomic above 0: set it when moving to RTS",
            ),
            Self::Unsupported { what } => write!(f, "{what} is not supported"),
            Self::Destination { needed: true } => f.write_str("a datagram needs a destination"),
            Self::Destination { needed: false } => {
                f.write_str("a connected queue pair has its destination already")
            }
            Self::SharedReceives => f.write_str("post receives to the shared receive queue"),
        }
    }
}

impl core::error::Error for PostError {}

/// Total length of a scatter/gather list in bytes.
pub(super) fn total_len(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.len)).sum()
}

/// The parts of a scatter/gather list that hold bytes `offset..offset + len` of the message.
pub(super) fn pieces(sges: &[Sge], offset: u32, len: u32) -> impl Iterator<Item = Sge> + '_ {
    let (mut skip, mut left) = (offset, len);
    sges.iter().filter_map(move |sge| {
        let skipped = skip.min(sge.len);
        skip -= skipped;
        let take = (sge.len - skipped).min(left);
        left -= take;
        (take > 0).then(|| Sge {
            addr: Iova::new(sge.addr.as_u64().saturating_add(u64::from(skipped))),
            len: take,
            lkey: sge.lkey,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_the_range_once_and_in_order(
            lens in proptest::collection::vec(0u32..50, 0..6), from in 0u32..300, len in 0u32..300,
        ) {
            let sge = |(i, len): (usize, &u32)| Sge {
                addr: Iova::new(1000 * i as u64), len: *len, lkey: Lkey::new(i as u32),
            };
            let sges: Vec<_> = lens.iter().enumerate().map(sge).collect();
            let byte = |sge: &Sge| (0..u64::from(sge.len)).map(|i| sge.addr.as_u64() + i).collect::<Vec<_>>();
            let whole: Vec<_> = sges.iter().flat_map(byte).collect();
            let parts: Vec<_> = pieces(&sges, from, len).collect();
            let covered: Vec<_> = parts.iter().flat_map(byte).collect();
            let from = (from as usize).min(whole.len());
            let end = (from + len as usize).min(whole.len());
            prop_assert_eq!(covered, &whole[from..end]);
        }
    }
}
