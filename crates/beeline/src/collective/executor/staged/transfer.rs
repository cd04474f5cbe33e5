//! Sends and receives.
//!
//! Words per peer in the owner's segment, at [`LINKS`] + 64 x peer: of the send to it sequence, hash, bytes, and
//! chunks put so far (over the life of the communicator); of the receive from it sequence, hash, bytes, and
//! chunks taken so far. A chunk lies in the receiver's slot for the sender; there is one at a time, and it
//! is put only once the one before was taken and both sides have shown the same call. A send ends when
//! its last chunk was taken: two ranks that both send first wait for each other, and are told so.

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
    /// The next chunk is in the staging memory (send), or a taken one still has to leave it (receive).
    staged: u64,
}

impl Worker {
    /// All of a group together.
    pub(super) fn transfers(&self, all: &[Resolved]) -> Result<(), Stop> {
        // Those of one pair and direction go one after the other.
        let mut left: Vec<&Resolved> = all.iter().collect();
        while !left.is_empty() {
            let mut now: Vec<&Resolved> = Vec::new();
            left.retain(|one| {
                let taken = now.iter().any(|other| {
                    other.call.kind == one.call.kind && other.call.root == one.call.root
                });
                if !taken {
                    now.push(one);
                }
                taken
            });
            self.together(&now)?;
        }
        Ok(())
    }

    /// Transfers of different pairs or directions.
    fn together(&self, calls: &[&Resolved]) -> Result<(), Stop> {
        let shared = &*self.shared;
        let (mut sends, mut receives) = (0, 0);
        let mut active = Vec::new();
        for one in calls {
            let sends_now = one.call.kind == Collective::Send;
            let index = if sends_now { &mut sends } else { &mut receives };
            let bytes = one.call.count * one.call.dtype.size_bytes().unwrap_or(1);
            let mine = Announcement { sequence: one.sequence, call: one.call };
            let transfer = Active {
                one,
                mine,
                peer: one.call.root,
                sends: sends_now,
                bytes,
                done: 0,
                at: *index * shared.slot_bytes,
                agreed: false,
                staged: 0,
            };
            *index += 1;
            shared.offer(&transfer);
            active.push(transfer);
        }
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
            active.retain(|transfer| !shared.is_over(transfer));
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

    /// Whether nothing more is to be done: a send is over when its last chunk was taken.
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
