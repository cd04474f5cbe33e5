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

/// Bytes for messages: a power of two. Bounds what is on its way in one direction.
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
    /// A region on a GPU that the writer gave: the reader may map it.
    Offer = 3,
    /// A region on a GPU that the writer has mapped.
    Mapped = 4,
}

const SKIP: u64 = 2;

/// The end that writes.
#[derive(Debug)]
pub(super) struct Writer {
    mem: HostMem,
    head: u64,
    tail: u64,
}

/// The end that reads.
#[derive(Debug)]
pub(super) struct Reader {
    mem: HostMem,
    tail: u64,
    /// The writer broke the rules; nothing it writes is read any more.
    broken: bool,
}

impl Writer {
    /// A new ring, and the file to be passed to the reader.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let file = memfd("beeline-ring", BYTES)?;
        let mem = HostMem::of_sealed(&file, BYTES as usize)?;
        Ok((Self { mem, head: 0, tail: 0 }, file))
    }

    /// Writes a message. `false` when there is no room for it now; one too long is dropped.
    pub(super) fn push(&mut self, tag: Tag, message: &[u8]) -> bool {
        if message.len() > MESSAGE_MAX {
            return true;
        }
        let need = 8 + (message.len() as u64).next_multiple_of(8);
        let to_end = CAPACITY - self.head % CAPACITY;
        let skip = if need > to_end { to_end } else { 0 };
        if !self.has_room(skip + need) {
            return false;
        }
        let written = self.write(skip, tag, message);
        if written.is_ok() {
            self.head += skip + need;
        }
        true
    }

    /// Shows the reader what was written. `true` when it sleeps and has to be woken.
    pub(super) fn publish(&self) -> bool {
        let _ = self.mem.store_u64(HEAD, self.head);
        // Either this side sees that the reader sleeps, or the reader sees the new position before it
        // does: both put a fence between their store and their load.
        fence(Ordering::SeqCst);
        self.mem.load_u64(SLEEPING).unwrap_or(0) != 0
    }

    fn has_room(&mut self, bytes: u64) -> bool {
        let room = |tail: u64| CAPACITY.saturating_sub(self.head - tail) >= bytes;
        if room(self.tail) {
            return true;
        }
        let tail = self.mem.load_u64(TAIL).unwrap_or(0);
        // A reader that claims what was never written, or goes back, gets nothing more.
        if tail < self.tail || tail > self.head || !room(tail) {
            return false;
        }
        self.tail = tail;
        true
    }

    fn write(
        &self,
        skip: u64,
        tag: Tag,
        message: &[u8],
    ) -> Result<(), beeline_sys::mem::OutOfBounds> {
        let at = |position: u64| MESSAGES + position % CAPACITY;
        if skip > 0 {
            self.mem.store_u64(at(self.head), SKIP << 32)?;
        }
        let start = at(self.head + skip);
        self.mem.store_u64(start, ((tag as u64) << 32) | message.len() as u64)?;
        self.mem.write(start + 8, message)
    }
}

impl Reader {
    /// The ring behind a file that the writer passed on.
    pub(super) fn new(file: impl AsFd) -> io::Result<Self> {
        let mem = HostMem::of_sealed(file, BYTES as usize)?;
        Ok(Self { mem, tail: 0, broken: false })
    }

    /// Whether a message is there.
    pub(super) fn has_message(&self) -> bool {
        !self.broken && self.mem.load_u64(HEAD).unwrap_or(0) != self.tail
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
        let _ = self.mem.store_u64(TAIL, self.tail);
    }

    /// Says whether this side is about to sleep. Answers whether a message is there all the same.
    pub(super) fn set_sleeping(&self, sleeping: bool) -> bool {
        let _ = self.mem.store_u64(SLEEPING, u64::from(sleeping));
        fence(Ordering::SeqCst);
        self.has_message()
    }

    /// `None` when the ring is broken, `Some(None)` for a skip.
    fn take(&mut self, into: &mut Vec<u8>) -> Option<Option<Tag>> {
        let head = self.mem.load_u64(HEAD).ok()?;
        let there = head.checked_sub(self.tail).filter(|there| *there <= CAPACITY)?;
        let at = self.tail % CAPACITY;
        let word = self.mem.load_u64(MESSAGES + at).ok()?;
        let tag = match word >> 32 {
            0 => Tag::Packet,
            1 => Tag::Gone,
            3 => Tag::Offer,
            4 => Tag::Mapped,
            SKIP => {
                let rest = CAPACITY - at;
                self.tail = self.tail.checked_add(rest.min(there))?;
                return (rest <= there).then_some(None);
            }
            _ => return None,
        };
        let len = usize::try_from(word & 0xffff_ffff).ok().filter(|len| *len <= MESSAGE_MAX)?;
        let bytes = 8 + (len as u64).next_multiple_of(8);
        if bytes > there || at + bytes > CAPACITY {
            return None;
        }
        self.mem.append_to(MESSAGES + at + 8, len, into).ok()?;
        self.tail += bytes;
        Some(Some(tag))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> (Writer, Reader) {
        let (writer, file) = Writer::new().unwrap();
        (writer, Reader::new(&file).unwrap())
    }

    fn pop(reader: &mut Reader) -> Option<(Tag, Vec<u8>)> {
        let mut bytes = Vec::new();
        let tag = reader.pop(&mut bytes)?;
        Some((tag, bytes))
    }

    #[test]
    fn messages_of_every_length_arrive_in_order_many_times_around() {
        let (mut writer, mut reader) = ring();
        let message = |n: usize| vec![n as u8; (n * 7919) % (MESSAGE_MAX + 1)];
        let (mut written, mut read) = (0, 0);
        while read < 2000 {
            let tag = if written % 5 == 0 { Tag::Gone } else { Tag::Packet };
            if written < 2000 && writer.push(tag, &message(written)) {
                written += 1;
                continue;
            }
            // Full: nothing more goes in until something was taken and given back.
            writer.publish();
            for _ in 0..3 {
                let Some((tag, bytes)) = pop(&mut reader) else { break };
                assert_eq!(bytes, message(read));
                assert_eq!(tag == Tag::Gone, read % 5 == 0);
                read += 1;
            }
            reader.release();
        }
        assert!(!reader.has_message());
    }

    #[test]
    fn a_sleeper_is_seen_or_sees() {
        let (mut writer, reader) = ring();
        assert!(!writer.publish());
        assert!(!reader.set_sleeping(true));
        assert!(writer.push(Tag::Packet, &[1]));
        assert!(writer.publish(), "the reader sleeps");
        assert!(reader.set_sleeping(true), "a message is there");
        reader.set_sleeping(false);
        assert!(!writer.publish());
    }

    /// Whatever the writer puts there, the reader takes what fits or stops.
    #[test]
    fn a_writer_that_lies_is_not_followed() {
        let word = |tag: u64, len: u64| (tag << 32) | len;
        let cases = [
            (u64::MAX, word(0, 8)),
            (CAPACITY + 8, word(0, 8)),
            (16, word(0, 9)),
            (16, word(0, MESSAGE_MAX as u64 + 1)),
            (16, word(5, 8)),
            (16, word(SKIP, 0)),
            (8, word(0, 0xffff_ffff)),
        ];
        for (head, first) in cases {
            let (writer, mut reader) = ring();
            writer.mem.store_u64(MESSAGES, first).unwrap();
            writer.mem.store_u64(HEAD, head).unwrap();
            assert!(pop(&mut reader).is_none(), "{head} {first:#x}");
            assert!(!reader.has_message());
        }
    }

    #[test]
    fn a_reader_that_lies_gets_nothing_overwritten() {
        for tail in [u64::MAX, 1 << 40] {
            let (mut writer, reader) = ring();
            while writer.push(Tag::Packet, &[0; 4096]) {}
            reader.mem.store_u64(TAIL, tail).unwrap();
            assert!(!writer.push(Tag::Packet, &[0; 4096]), "{tail}");
        }
    }

    #[test]
    fn a_thread_on_each_side() {
        let (mut writer, mut reader) = ring();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for n in 0..20_000_u64 {
                    while !writer.push(Tag::Packet, &n.to_le_bytes().repeat(64)) {
                        std::thread::yield_now();
                    }
                    writer.publish();
                }
            });
            for n in 0..20_000_u64 {
                let bytes = loop {
                    match pop(&mut reader) {
                        Some((_, bytes)) => break bytes,
                        None => std::thread::yield_now(),
                    }
                };
                reader.release();
                assert_eq!(bytes, n.to_le_bytes().repeat(64));
            }
        });
    }
}
