//! Sends and receives.
//!
//! Words per peer in the owner's segment, at [`LINKS`] + 64 x peer: of the send to it sequence, hash, bytes, and
//! chunks put so far (over the life of the communicator); of the receive from it sequence, hash, bytes, and
//! chunks taken so far. A chunk lies in the receiver's slot for the sender; there is one at a time, and it
//! is put only once the one before was taken and both sides have shown the same call. A send ends when
//! its last chunk was taken: two ranks that both send first wait for each other, and are told so.

use std::collections::VecDeque;

use super::meet::{Turn, Wait};
use super::run::Worker;
use super::{DATA, LINKS, Resolved, Shared, Stop};
use crate::core::collective::{Announcement, Collective};

const SEND: u64 = 0;
const RECV: u64 = 32;

/// One transfer under way.
struct Active<'a> {
    one: &'a Resolved,
    mine: Announcement,
    peer: u32,
    sends: bool,
    bytes: u64,
    /// Bytes put or taken.
    done: u64,
    /// Place in the staging memory.
    at: u64,
    /// Whether the other side has shown the same call.
    agreed: bool,
    /// Bytes of the next chunk, in the staging memory of a send.
    staged: u64,
    /// What follows between the same ranks.
    later: VecDeque<&'a Resolved>,
}

impl<'a> Active<'a> {
    fn new(one: &'a Resolved, at: u64) -> Self {
        Self {
            one,
            mine: Announcement { sequence: one.sequence, call: one.call },
            peer: one.call.root,
            sends: one.call.kind == Collective::Send,
            // Checked when the call was made.
            bytes: one.call.count * one.call.dtype.size_bytes().unwrap_or(1),
            done: 0,
            at,
            agreed: false,
            staged: 0,
            later: VecDeque::new(),
        }
    }

    /// Whether `one` goes between the same ranks, in the same direction.
    fn is_before(&self, one: &Resolved) -> bool {
        self.one.call.kind == one.call.kind && self.peer == one.call.root
    }

    /// Turns to the next transfer between these ranks, if there is one.
    fn go_on(&mut self) -> bool {
        let Some(next) = self.later.pop_front() else { return false };
        let later = std::mem::take(&mut self.later);
        *self = Self { later, ..Self::new(next, self.at) };
        true
    }
}

impl Worker {
    /// All of a group together: those of one pair and direction go one after the other, and nothing waits for anything
    /// else. So a group ends wherever the ranks make matching transfers, however these are divided into groups.
    pub(super) fn transfers(&self, all: &[Resolved]) -> Result<(), Stop> {
        let shared = &*self.shared;
        let (mut sends, mut receives) = (0, 0);
        let mut active: Vec<Active<'_>> = Vec::new();
        for one in all {
            let chain = active.iter_mut().find(|chain| chain.is_before(one));
            if let Some(chain) = chain {
                chain.later.push_back(one);
                continue;
            }
            let index = if one.call.kind == Collective::Send { &mut sends } else { &mut receives };
            active.push(Active::new(one, *index * shared.slot_bytes));
            *index += 1;
        }
        active.iter().for_each(|transfer| shared.offer(transfer));
        if let Some(first) = active.first() {
            shared.control.announce_transfer(&first.mine);
        }
        let mut wait = Wait::new(shared);
        loop {
            let mut moved = false;
            for transfer in &mut active {
                moved |= if transfer.sends {
                    self.send(transfer, &wait)?
                } else {
                    self.receive(transfer, &wait)?
                };
            }
            // Asked once: a transfer that is over a moment later still has its followers.
            active.retain_mut(|transfer| {
                if !shared.is_over(transfer) {
                    return true;
                }
                let goes_on = transfer.go_on();
                if goes_on {
                    shared.offer(transfer);
                    shared.control.announce_transfer(&transfer.mine);
                    moved = true;
                }
                goes_on
            });
            let Some(first) = active.first() else { return Ok(()) };
            if moved {
                wait.renew();
                continue;
            }
            let missing: Vec<u32> = active.iter().map(|transfer| transfer.peer).collect();
            if matches!(wait.turn(&missing)?, Turn::Over) {
                let mine = first.mine;
                return Err(wait.blame(mine, &missing));
            }
        }
    }

    /// Puts a chunk, where the other side has room; whether anything moved.
    fn send(&self, transfer: &mut Active<'_>, wait: &Wait<'_>) -> Result<bool, Stop> {
        let shared = &*self.shared;
        if transfer.done == transfer.bytes {
            return Ok(false);
        }
        let mut moved = false;
        if transfer.staged == 0 {
            let len = shared.slot_bytes.min(transfer.bytes - transfer.done);
            if let Some(input) = &transfer.one.input {
                self.stage_in(transfer.at, input, transfer.done, len)?;
                self.finish()?;
            }
            transfer.staged = len;
            moved = true;
        }
        if !transfer.agreed && !shared.agrees(transfer, wait)? {
            return Ok(moved);
        }
        transfer.agreed = true;
        let (me, peer) = (shared.rank, transfer.peer);
        let put = shared.load(me, link(peer, SEND + 24));
        if shared.load(peer, link(me, RECV + 24)) != put {
            return Ok(moved);
        }
        if !shared.settings.faults.drops(me, peer) {
            if let Some(segment) = shared.segments.get(peer as usize) {
                segment.copy_from(
                    shared.slot(me),
                    self.input.mem(),
                    transfer.at,
                    transfer.staged,
                )?;
            }
            shared.store(me, link(peer, SEND + 24), put + 1);
        }
        transfer.done += transfer.staged;
        transfer.staged = 0;
        Ok(true)
    }

    /// Takes a chunk that is there; whether anything moved.
    fn receive(&self, transfer: &mut Active<'_>, wait: &Wait<'_>) -> Result<bool, Stop> {
        let shared = &*self.shared;
        if transfer.done == transfer.bytes
            || (!transfer.agreed && !shared.agrees(transfer, wait)?)
        {
            return Ok(false);
        }
        transfer.agreed = true;
        let (me, peer) = (shared.rank, transfer.peer);
        let taken = shared.load(me, link(peer, RECV + 24));
        if shared.load(peer, link(me, SEND + 24)) <= taken {
            return Ok(false);
        }
        let len = shared.slot_bytes.min(transfer.bytes - transfer.done);
        if let Some(segment) = shared.segments.get(me as usize) {
            self.output.mem().copy_from(transfer.at, segment, shared.slot(peer), len)?;
        }
        if let Some(output) = &transfer.one.output {
            self.stage_out(output, transfer.done, transfer.at, len)?;
            self.finish()?;
        }
        shared.store(me, link(peer, RECV + 24), taken + 1);
        transfer.done += len;
        Ok(true)
    }
}

impl Shared {
    /// Shows the peer this side of a transfer; the sequence last.
    fn offer(&self, transfer: &Active<'_>) {
        let side = if transfer.sends { SEND } else { RECV };
        let at = |word: u64| link(transfer.peer, side + word);
        self.store(self.rank, at(0), 0);
        self.store(self.rank, at(8), transfer.mine.call.agreement(transfer.mine.sequence));
        self.store(self.rank, at(16), transfer.bytes);
        self.store(self.rank, at(0), transfer.mine.sequence);
    }

    /// Whether the peer shows the other side of the same transfer.
    fn agrees(&self, transfer: &Active<'_>, wait: &Wait<'_>) -> Result<bool, Stop> {
        let side = if transfer.sends { RECV } else { SEND };
        let at = |word: u64| link(self.rank, side + word);
        if self.load(transfer.peer, at(0)) != transfer.mine.sequence {
            return Ok(false);
        }
        let mine = transfer.mine;
        if self.load(transfer.peer, at(8)) == mine.call.agreement(mine.sequence) {
            return Ok(true);
        }
        // The peer shows what it does now; the bytes are of this very transfer.
        let mut theirs = mine;
        theirs.call.kind = if transfer.sends { Collective::Recv } else { Collective::Send };
        theirs.call.root = self.rank;
        let bytes = self.load(transfer.peer, at(16));
        theirs.call.count = bytes / mine.call.dtype.size_bytes().unwrap_or(1);
        let theirs = self
            .control
            .last(transfer.peer)
            .filter(|last| {
                last.sequence == mine.sequence
                    && last.call.kind == theirs.call.kind
                    && last.call.root == self.rank
            })
            .unwrap_or(theirs);
        Err(wait.mismatch(mine, transfer.peer, Some(theirs)))
    }

    /// Whether nothing more is to be done. A send is over once its last chunk was taken, not when it was put: only then
    /// has the receiver seen this offer, which the next send to it replaces.
    fn is_over(&self, transfer: &Active<'_>) -> bool {
        let (me, peer) = (self.rank, transfer.peer);
        let taken = || self.load(peer, link(me, RECV + 24)) == self.load(me, link(peer, SEND + 24));
        let dropped = transfer.sends && self.settings.faults.drops(me, peer);
        transfer.done == transfer.bytes && !dropped && (!transfer.sends || taken())
    }

    /// Where in a segment the slot for what `from` sends is.
    fn slot(&self, from: u32) -> u64 {
        DATA + self.scratch_bytes + u64::from(from) * self.slot_bytes
    }
}

const fn link(peer: u32, word: u64) -> u64 {
    LINKS + 64 * peer as u64 + word
}
