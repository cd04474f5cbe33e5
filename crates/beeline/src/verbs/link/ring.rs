//! A ring of messages in memory that two processes share: one writes, the other reads.
//!
//! Layout of the memory file, in bytes: 0 the reader's position, 128 whether the reader sleeps, 4096 the
//! messages. Positions count bytes and never go back. A message is a word with its length and kind, its bytes,
//! and padding to 8 bytes; it never goes over the end of the ring, where a skip fills the rest. Behind the last
//! message stands a word of zero.
//!
//! The writer's position stands nowhere: the word of the first of the new messages, which was zero and is
//! written last, shows all of them. So what the reader polls is the cache line that the message begins in, and
//! a message costs the lines it fills. The reader writes a line of its own, which the writer reads when it
//! takes the ring for full, and another one when it goes to sleep.
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

const TAIL: u64 = 0;
const SLEEPING: u64 = 128;
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

/// Set in the word of every message, so that none is zero.
const MESSAGE: u64 = 1 << 63;

/// Cache lines that are asked for when the first one of a message is there.
const LINES_AHEAD: u64 = 2;
const LINE_BYTES: u64 = 64;

/// The word behind the last message.
const END_BYTES: u64 = 8;

/// Memory that a ring lies in: words that are read with acquire and written with release ordering, and
/// bytes. It is a trait so that the ends below run in a model that tries every order of their steps.
/// Nothing out of bounds is accessed; a word there reads as 0.
pub(super) trait RingMem {
    /// Bytes for messages: a multiple of 8, and a skip, a message and the word behind it fit.
    const CAPACITY: u64;

    fn load(&self, offset: u64) -> u64;
    fn store(&self, offset: u64, word: u64);
    /// `false` where nothing was written.
    fn write(&self, offset: u64, bytes: &[u8]) -> bool;
    /// `false` where nothing was appended.
    fn append_to(&self, offset: u64, len: usize, into: &mut Vec<u8>) -> bool;
    /// A hint that a cache line is about to be read.
    fn prefetch(&self, _offset: u64) {}
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

    fn prefetch(&self, offset: u64) {
        Self::prefetch(self, offset);
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
    /// Where the first message begins that the reader does not see yet, and its word.
    hidden: Option<(u64, u64)>,
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
        Self { mem, head: 0, tail: 0, hidden: None }
    }

    /// Writes a message. `false` when there is no room for it now; one too long is dropped.
    pub(super) fn push(&mut self, tag: Tag, message: &[u8]) -> bool {
        if message.len() > MESSAGE_MAX {
            return true;
        }
        let need = 8 + (message.len() as u64).next_multiple_of(8);
        let to_end = M::CAPACITY - self.head % M::CAPACITY;
        let skip = if need > to_end { to_end } else { 0 };
        if !self.has_room(skip + need + END_BYTES) {
            return false;
        }
        let start = self.head + skip;
        // Nothing of it is seen before the words are there.
        if self.mem.write(place::<M>(start) + 8, message) {
            self.mem.store(place::<M>(start + need), 0);
            self.put(start, ((tag as u64) << 32) | message.len() as u64);
            if skip > 0 {
                self.put(self.head, SKIP << 32);
            }
            self.head = start + need;
        }
        true
    }

    /// Writes the word of a message, or keeps it back: the first one shows all that follow.
    fn put(&mut self, position: u64, word: u64) {
        let word = word | MESSAGE;
        match self.hidden {
            // A skip comes in front of the message that it makes room for.
            Some((first, shown)) if position < first => {
                self.mem.store(place::<M>(first), shown);
                self.hidden = Some((position, word));
            }
            Some(_) => self.mem.store(place::<M>(position), word),
            None => self.hidden = Some((position, word)),
        }
    }

    /// Shows the reader what was written. `true` when it sleeps and has to be woken.
    pub(super) fn publish(&mut self) -> bool {
        if let Some((position, word)) = self.hidden.take() {
            self.mem.store(place::<M>(position), word);
        }
        // Either this side sees that the reader sleeps, or the reader sees the message before it does:
        // both put a fence between their store and their load.
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
}

/// Where a position lies in the memory.
fn place<M: RingMem>(position: u64) -> u64 {
    MESSAGES + position % M::CAPACITY
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
        !self.broken && self.mem.load(place::<M>(self.tail)) != 0
    }

    /// Takes the next message, into `into`, which is empty.
    pub(super) fn pop(&mut self, into: &mut Vec<u8>) -> Option<Tag> {
        // The second time behind a skip, which is never followed by another.
        for _ in 0..2 {
            if self.broken {
                return None;
            }
            match self.take(into) {
                Taken::Message(tag) => return Some(tag),
                Taken::Skip => {}
                Taken::Nothing => return None,
                Taken::Nonsense => self.broken = true,
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

    fn take(&mut self, into: &mut Vec<u8>) -> Taken {
        let at = self.tail % M::CAPACITY;
        let word = self.mem.load(MESSAGES + at);
        if word == 0 {
            return Taken::Nothing;
        }
        // The lines that follow come while the first one is looked at: most messages are short, and more than
        // one at a time.
        for ahead in 1..=LINES_AHEAD {
            self.mem.prefetch(MESSAGES + at + ahead * LINE_BYTES);
        }
        let tag = match (word & !MESSAGE) >> 32 {
            _ if word & MESSAGE == 0 => return Taken::Nonsense,
            0 => Tag::Packet,
            1 => Tag::Gone,
            3 => Tag::Offer,
            4 => Tag::Mapped,
            5 => Tag::Released,
            SKIP if at > 0 => {
                self.tail += M::CAPACITY - at;
                return Taken::Skip;
            }
            _ => return Taken::Nonsense,
        };
        let len = usize::try_from(word & 0xffff_ffff).unwrap_or(usize::MAX);
        if len > MESSAGE_MAX {
            return Taken::Nonsense;
        }
        let bytes = 8 + (len as u64).next_multiple_of(8);
        if at + bytes > M::CAPACITY || !self.mem.append_to(MESSAGES + at + 8, len, into) {
            return Taken::Nonsense;
        }
        self.tail += bytes;
        Taken::Message(tag)
    }
}

/// What stands at the reader's position.
enum Taken {
    Message(Tag),
    /// The next message lies at the start.
    Skip,
    /// No message yet.
    Nothing,
    /// What no writer of this version writes.
    Nonsense,
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
