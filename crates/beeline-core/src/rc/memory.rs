//! Memory as I/O: operations go out, answers come in, and nothing here waits for them.
//!
//! GPU memory answers after microseconds, so many operations are under way at a time. What depends on
//! one of them (an ACK, a READ response, a completion) is held until its answer is in.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;

use crate::mr::{Ask, Grant, MrTable, Need, PdId, Segment};
use crate::roce::{Psn, Qpn};

use super::work::{Sge, pieces};

/// Names a memory operation until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemToken(u64);

/// A memory operation to be carried out.
///
/// Operations of one queue pair take effect in the order in which they were handed out, those for the
/// peer's requests ([`of_peer`](Self::of_peer)) and those for this side's own each for themselves: a READ
/// behind a WRITE sees what was written. They may be answered in any order.
#[derive(Debug)]
pub struct MemOp {
    /// To be passed back with the answer.
    pub token: MemToken,
    /// The queue pair it belongs to, for keeping the order.
    pub qpn: Qpn,
    /// Whether it belongs to a request of the peer; else to one of this side. What the one does has no order
    /// towards what the other does (IBA 9.5 orders the requests of one requester).
    pub of_peer: bool,
    /// What to do.
    pub kind: MemKind,
    /// Where, in order; checked and pinned.
    pub segments: OneOrMore<Segment>,
    /// Bytes that are read into or written from, at `at`; to be passed back with the answer.
    pub buffer: Vec<u8>,
    /// Where in `buffer` the bytes start. For [`MemKind::Read`] that is its end: bytes are appended.
    pub at: usize,
}

impl MemOp {
    /// Length of all segments in bytes.
    pub fn len(&self) -> usize {
        self.segments.iter().map(|segment| segment.len as usize).sum()
    }

    /// Its buffer as if it had read zeros, and written nothing.
    #[cfg(test)]
    pub(super) fn zeros(mut self) -> Vec<u8> {
        if self.kind == MemKind::Read {
            self.buffer.resize(self.at + self.len(), 0);
        }
        self.buffer
    }

    /// Whether it moves no byte; no such operation is handed out.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a memory operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemKind {
    /// Memory to the end of the buffer. Answered with 0, or on a local link with the number of bytes
    /// that what was appended only names.
    Read,
    /// Buffer to memory.
    Write,
    /// What the buffer names, which is memory of the peer, to memory. On a local link only.
    Pull,
    /// On one aligned 64-bit word in the CPU's byte order, atomic towards every other operation.
    CompareSwap {
        /// What the word must hold.
        compare: u64,
        /// What it shall hold then.
        swap: u64,
    },
    /// On one aligned 64-bit word in the CPU's byte order, wrapping.
    FetchAdd {
        /// What to add.
        add: u64,
    },
}

/// A memory operation that could not be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemFault;

impl fmt::Display for MemFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the memory could not be accessed")
    }
}

impl core::error::Error for MemFault {}

/// A list that is never empty and takes no allocation for one element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneOrMore<T> {
    first: T,
    rest: Vec<T>,
}

impl<T> OneOrMore<T> {
    /// A list of one.
    pub const fn new(first: T) -> Self {
        Self { first, rest: Vec::new() }
    }

    /// Its elements, in order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        core::iter::once(&self.first).chain(&self.rest)
    }

    fn into_iter(self) -> impl Iterator<Item = T> {
        core::iter::once(self.first).chain(self.rest)
    }
}

/// What an operation was for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Owner {
    /// Payload of a request packet, by its place in the requester's line.
    Request { seq: u64 },
    /// Payload of a READ response packet, by its place in the responder's line.
    Reply { seq: u64 },
    /// Payload that a peer or a peer's SEND brought.
    Inbound { seq: u64, psn: Psn },
    /// A peer's atomic.
    Atomic { seq: u64, psn: Psn },
    /// A READ response or atomic result of a work request of this side.
    Result { wqe: u64 },
}

impl Owner {
    const fn is_of_peer(self) -> bool {
        match self {
            Self::Request { .. } | Self::Result { .. } => false,
            Self::Reply { .. } | Self::Inbound { .. } | Self::Atomic { .. } => true,
        }
    }
}

/// Operations waiting to be taken, and those taken and not answered.
#[derive(Debug)]
pub(super) struct MemQueue {
    waiting: VecDeque<MemOp>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    pending: Option<Pending>,
}

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) qpn: Qpn,
    pub(super) uid: u64,
    pub(super) owner: Owner,
    grants: OneOrMore<Grant>,
}

/// Which queue pair an operation is for: numbers are reused, `uid`s are not.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpRef {
    pub(super) qpn: Qpn,
    pub(super) uid: u64,
}

impl MemQueue {
    pub(super) const fn new() -> Self {
        Self { waiting: VecDeque::new(), slots: Vec::new(), free: Vec::new() }
    }

    pub(super) fn push(
        &mut self,
        qp: QpRef,
        owner: Owner,
        kind: MemKind,
        grants: OneOrMore<Grant>,
        (buffer, at): (Vec<u8>, usize),
    ) {
        let segments = OneOrMore {
            first: grants.first.segment(),
            rest: grants.rest.iter().map(Grant::segment).collect(),
        };
        let pending = Some(Pending { qpn: qp.qpn, uid: qp.uid, owner, grants });
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                // Bounded by the budgets of the queue pairs, far below 2^32.
                let index = self.slots.len() as u32;
                self.slots.push(Slot { generation: 0, pending: None });
                index
            }
        };
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        slot.pending = pending;
        let token = MemToken((u64::from(slot.generation) << 32) | u64::from(index));
        let of_peer = owner.is_of_peer();
        self.waiting.push_back(MemOp { token, qpn: qp.qpn, of_peer, kind, segments, buffer, at });
    }

    pub(super) fn pop(&mut self) -> Option<MemOp> {
        self.waiting.pop_front()
    }

    /// Ends an operation and gives its grants back. `None` for a token that is not outstanding.
    pub(super) fn finish(&mut self, token: MemToken, mrs: &mut MrTable) -> Option<FinishedOp> {
        let index = token.0 as u32;
        let slot = self.slots.get_mut(index as usize)?;
        if u64::from(slot.generation) != token.0 >> 32 {
            return None;
        }
        let Pending { qpn, uid, owner, grants } = slot.pending.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        let mut revoked = false;
        for grant in grants.into_iter() {
            revoked |= mrs.is_revoked(grant.segment().region);
            mrs.release(grant);
        }
        Some(FinishedOp { qp: QpRef { qpn, uid }, owner, revoked })
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FinishedOp {
    pub(super) qp: QpRef,
    pub(super) owner: Owner,
    /// Some of its memory was taken away meanwhile.
    pub(super) revoked: bool,
}

/// Grants for bytes `offset..offset + len` of a scatter/gather list, all or none; `len` is above zero.
pub(super) fn grant_pieces(
    mrs: &mut MrTable,
    pd: PdId,
    sges: &[Sge],
    (offset, len): (u32, u32),
    need: Need,
) -> Result<OneOrMore<Grant>, PieceError> {
    let mut granted: Option<OneOrMore<Grant>> = None;
    let mut left = len;
    for piece in pieces(sges, offset, len) {
        let ask = Ask { pd, key: piece.lkey.as_u32(), iova: piece.addr, len: piece.len, need };
        match (mrs.grant(ask), &mut granted) {
            (Ok(grant), Some(list)) => list.rest.push(grant),
            (Ok(grant), none) => *none = Some(OneOrMore::new(grant)),
            (Err(_), _) => {
                give_back(mrs, granted);
                return Err(PieceError::Refused);
            }
        }
        left -= piece.len;
    }
    if left > 0 {
        give_back(mrs, granted);
        return Err(PieceError::TooShort);
    }
    granted.ok_or(PieceError::TooShort)
}

fn give_back(mrs: &mut MrTable, granted: Option<OneOrMore<Grant>>) {
    for grant in granted.into_iter().flat_map(OneOrMore::into_iter) {
        mrs.release(grant);
    }
}

/// Why a scatter/gather list could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceError {
    /// An element's access was refused.
    Refused,
    /// The list ends before the bytes do.
    TooShort,
}
