//! A ring of messages in memory that two processes share: one writes, the other reads.
//!
//! Layout of the memory file, in bytes: 0 the writer's position, 128 the reader's position, 256 whether
//! the reader sleeps, 4096 the messages. Positions count bytes and never go back. A message is a word
//! with its length and kind, its bytes, and padding to 8 bytes; it never goes over the end of the ring,
//! where a skip fills the rest.
//!
//! Neither side trusts the other: own positions are kept here, the other's are checked, and a message is
//! copied out before anything looks at it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use beeline_core::roce::Mtu;
use beeline_sys::mem::{HostMem, memfd};

/// Bytes for messages. Bounds what is on its way in one direction.
const CAPACITY: u64 = 4 << 20;

const HEAD: u64 = 0;
const TAIL: u64 = 128;
const SLEEPING: u64 = 256;
const MESSAGES: u64 = 4096;

/// Length of the whole file.
const BYTES: u64 = MESSAGES + CAPACITY;

/// Longest message: a full payload in place and all headers.
pub(super) const MESSAGE_MAX: usize = Mtu::LOCAL.bytes() as usize + 96;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// A packet.
    Packet,
    /// A region of the writer that is no longer registered.
    Gone,
    /// A region on a GPU, or staging memory, that the writer gave: the reader may map it.
    Offer = 3,
    /// A region on a GPU, or staging memory, that the writer has mapped.
    Mapped = 4,
    /// Cookies of packets whose bytes the writer has fetched, or never will: the first, and how many.
    Released = 5,
}

const SKIP: u64 = 2;

/// Memory that a ring lies in: words that are read with acquire and written with release ordering, and
/// bytes. It is a trait so that the ends below run in a model that tries every order of their steps.
/// Nothing out of bounds is accessed; a word there reads as 0.
pub(super) trait RingMem {
    /// Bytes for messages: a multiple of 8, and a message fits.
    const CAPACITY: u64;

    fn load(&self, offset: u64) -> u64;
    fn store(&self, offset: u64, word: u64);
    /// `false` where nothing was written.
    fn write(&self, offset: u64, bytes: &[u8]) -> bool;
    /// `false` where nothing was appended.
    fn append_to(&self, offset: u64, len: usize, into: &mut Vec<u8>) -> bool;
    /// Sequentially consistent.
    fn fence();
}

impl RingMem for HostMem {
    const CAPACITY: u64 = CAPACITY;

    fn load(&self, offset: u64) -> u64 {
        self.load_u64(offset).unwrap_or(0)
    }

    fn store(&self, offset: u64, word: u64) {
        let _ = self.store_u64(offset, word);
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> bool {
        Self::write(self, offset, bytes).is_ok()
    }

    fn append_to(&self, offset: u64, len: usize, into: &mut Vec<u8>) -> bool {
        Self::append_to(self, offset, len, into).is_ok()
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// The end that writes.
#[derive(Debug)]
pub(super) struct Writer<M = HostMem> {
    mem: M,
    head: u64,
    tail: u64,
}

/// The end that reads.
#[derive(Debug)]
pub(super) struct Reader<M = HostMem> {
    mem: M,
    tail: u64,
    /// The writer broke the rules; nothing it writes is read any more.
    broken: bool,
}

impl Writer {
    /// A new ring, and the file to be passed to the reader.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let file = memfd("beeline-ring", BYTES)?;
        let mem = HostMem::of_sealed(&file, BYTES as usize)?;
        Ok((Self::over(mem), file))
    }
}

impl<M: RingMem> Writer<M> {
    const fn over(mem: M) -> Self {
        Self { mem, head: 0, tail: 0 }
    }

    /// Writes a message. `false` when there is no room for it now; one too long is dropped.
    pub(super) fn push(&mut self, tag: Tag, message: &[u8]) -> bool {
        if message.len() > MESSAGE_MAX {
            return true;
        }
        let need = 8 + (message.len() as u64).next_multiple_of(8);
        let to_end = M::CAPACITY - self.head % M::CAPACITY;
        let skip = if need > to_end { to_end } else { 0 };
        if !self.has_room(skip + need) {
            return false;
        }
        if self.write(skip, tag, message) {
            self.head += skip + need;
        }
        true
    }

    /// Shows the reader what was written. `true` when it sleeps and has to be woken.
    pub(super) fn publish(&self) -> bool {
        self.mem.store(HEAD, self.head);
        // Either this side sees that the reader sleeps, or the reader sees the new position before it
        // does: both put a fence between their store and their load.
        M::fence(); // Pairs with that of `set_sleeping`.
        self.mem.load(SLEEPING) != 0
    }

    fn has_room(&mut self, bytes: u64) -> bool {
        let room = |tail: u64| M::CAPACITY.saturating_sub(self.head - tail) >= bytes;
        if room(self.tail) {
            return true;
        }
        let tail = self.mem.load(TAIL);
        // A reader that claims what was never written, or goes back, gets nothing more.
        if tail < self.tail || tail > self.head || !room(tail) {
            return false;
        }
        self.tail = tail;
        true
    }

    fn write(&self, skip: u64, tag: Tag, message: &[u8]) -> bool {
        let at = |position: u64| MESSAGES + position % M::CAPACITY;
        if skip > 0 {
            self.mem.store(at(self.head), SKIP << 32);
        }
        let start = at(self.head + skip);
        self.mem.store(start, ((tag as u64) << 32) | message.len() as u64);
        self.mem.write(start + 8, message)
    }
}

impl Reader {
    /// The ring behind a file that the writer passed on.
    pub(super) fn new(file: impl AsFd) -> io::Result<Self> {
        let mem = HostMem::of_sealed(file, BYTES as usize)?;
        Ok(Self::over(mem))
    }
}

impl<M: RingMem> Reader<M> {
    const fn over(mem: M) -> Self {
        Self { mem, tail: 0, broken: false }
    }

    /// Whether a message is there.
    pub(super) fn has_message(&self) -> bool {
        !self.broken && self.mem.load(HEAD) != self.tail
    }

    /// Takes the next message, into `into`, which is empty.
    pub(super) fn pop(&mut self, into: &mut Vec<u8>) -> Option<Tag> {
        while self.has_message() {
            match self.take(into) {
                Some(Some(tag)) => return Some(tag),
                // A skip: the next message lies at the start.
                Some(None) => {}
                None => self.broken = true,
            }
        }
        None
    }

    /// Gives the room of what was taken back to the writer.
    pub(super) fn release(&self) {
        self.mem.store(TAIL, self.tail);
    }

    /// Says whether this side is about to sleep. Answers whether a message is there all the same.
    pub(super) fn set_sleeping(&self, sleeping: bool) -> bool {
        self.mem.store(SLEEPING, u64::from(sleeping));
        M::fence(); // Pairs with that of `publish`.
        self.has_message()
    }

    /// `None` when the ring is broken, `Some(None)` for a skip.
    fn take(&mut self, into: &mut Vec<u8>) -> Option<Option<Tag>> {
        let head = self.mem.load(HEAD);
        let there = head.checked_sub(self.tail).filter(|there| *there <= M::CAPACITY)?;
        let at = self.tail % M::CAPACITY;
        let word = self.mem.load(MESSAGES + at);
        let tag = match word >> 32 {
            0 => Tag::Packet,
            1 => Tag::Gone,
            3 => Tag::Offer,
            4 => Tag::Mapped,
            5 => Tag::Released,
            SKIP => {
                let rest = M::CAPACITY - at;
                self.tail = self.tail.checked_add(rest.min(there))?;
                return (rest <= there).then_some(None);
            }
            _ => return None,
        };
        let len = usize::try_from(word & 0xffff_ffff).ok().filter(|len| *len <= MESSAGE_MAX)?;
        let bytes = 8 + (len as u64).next_multiple_of(8);
        if bytes > there || at + bytes > M::CAPACITY {
            return None;
        }
        if !self.mem.append_to(MESSAGES + at + 8, len, into) {
            return None;
        }
        self.tail += bytes;
        Some(Some(tag))
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
