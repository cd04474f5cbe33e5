//! Every order of the steps of both ends, as far as the memory model lets them differ, on a ring that is
//! full after two messages.

use loom::cell::Cell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

use super::*;
use crate::verbs::lent::{Fetches, Lent, What};

/// Six words of messages. Their bytes are read and written without any order of their own, so that one which
/// is not ordered by the words of messages and the reader's position shows as a wrong byte.
struct Words {
    tail: AtomicU64,
    sleeping: AtomicU64,
    messages: [AtomicU64; 6],
}

type Shared = Arc<Words>;

fn words() -> Shared {
    let word = || AtomicU64::new(0);
    let messages = std::array::from_fn(|_| word());
    Arc::new(Words { tail: word(), sleeping: word(), messages })
}

impl Words {
    fn word(&self, offset: u64) -> &AtomicU64 {
        match offset {
            TAIL => &self.tail,
            SLEEPING => &self.sleeping,
            _ => &self.messages[((offset - MESSAGES) / 8) as usize],
        }
    }
}

impl RingMem for Shared {
    const CAPACITY: u64 = 48;

    fn load(&self, offset: u64) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    fn store(&self, offset: u64, word: u64) {
        self.word(offset).store(word, Ordering::Release);
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> bool {
        for (at, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let word = u64::from_le_bytes(*word);
            self.word(offset + 8 * at as u64).store(word, Ordering::Relaxed);
        }
        true
    }

    fn append_to(&self, offset: u64, len: usize, into: &mut Vec<u8>) -> bool {
        for at in 0..len as u64 / 8 {
            let word = self.word(offset + 8 * at).load(Ordering::Relaxed);
            into.extend_from_slice(&word.to_le_bytes());
        }
        true
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// Messages of one and two words, so that the end of the ring is met with a skip.
const LENGTHS: [usize; 4] = [8, 16, 8, 8];

fn message(n: usize) -> Vec<u8> {
    vec![n as u8 + 1; LENGTHS[n]]
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // More switches than that between two threads of this length find nothing new.
    builder.preemption_bound = Some(4);
    builder.check(model);
}

/// Takes what is there, up to `tries` looks; answers how many messages that were.
fn take(reader: &mut Reader<Shared>, first: usize, tries: usize) -> usize {
    let mut n = first;
    for _ in 0..tries {
        let mut bytes = Vec::new();
        if reader.pop(&mut bytes).is_some() {
            assert_eq!(bytes, message(n));
            n += 1;
            reader.release();
        }
    }
    n
}

#[test]
fn messages_are_whole_and_in_order_and_room_is_used_again() {
    check(|| {
        let shared = words();
        let mut writer = Writer::over(Arc::clone(&shared));
        assert!(writer.push(Tag::Packet, &message(0)));
        writer.publish();
        // No room for the next one until the first was taken; neither side waits for the other.
        let writing = thread::spawn(move || {
            let mut written = 1;
            for _ in 0..4 {
                if written < LENGTHS.len() && writer.push(Tag::Packet, &message(written)) {
                    writer.publish();
                    written += 1;
                }
            }
            written
        });
        let mut reader = Reader::over(shared);
        let read = take(&mut reader, 0, 3);
        let written = writing.join().unwrap();
        assert_eq!(take(&mut reader, read, LENGTHS.len()), written, "all that was written");
    });
}

/// What an eventfd is: a number that a sleeper waits for and takes.
#[derive(Default)]
struct Event {
    set: loom::sync::Mutex<bool>,
    changed: loom::sync::Condvar,
}

impl Event {
    fn set(&self) {
        *self.set.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut set = self.set.lock().unwrap();
        while !*set {
            set = self.changed.wait(set).unwrap();
        }
        *set = false;
    }
}

/// A reader that sleeps is woken for every message: one that is not would sleep for ever here.
#[test]
fn no_wake_up_is_lost() {
    check(|| {
        let shared = words();
        let event = Arc::new(Event::default());
        let mut writer = Writer::over(Arc::clone(&shared));
        let waking = Arc::clone(&event);
        let writing = thread::spawn(move || {
            for n in [0, 2] {
                assert!(writer.push(Tag::Packet, &message(n)));
                if writer.publish() {
                    waking.set();
                }
            }
        });
        let mut reader = Reader::over(shared);
        for n in [0, 2] {
            let mut bytes = Vec::new();
            while reader.pop(&mut bytes).is_none() {
                if !reader.set_sleeping(true) {
                    event.wait();
                }
                reader.set_sleeping(false);
            }
            assert_eq!(bytes, message(n));
        }
        writing.join().unwrap();
    });
}

/// The owner of memory that a packet names, and the peer that fetches it: memory is used for something else once
/// its name is released, and never before the fetch. That the region is gone is said behind every packet that
/// names it.
#[test]
fn memory_is_used_for_something_else_after_the_fetch_only() {
    use std::sync::atomic::AtomicU32;

    static USED_AGAIN: AtomicU32 = AtomicU32::new(0);
    check(|| {
        let (there, back) = (words(), words());
        // No atomic: an access that is not ordered by the rings ends the model.
        let memory = Arc::new(Cell::new(1_u64));
        let (far_there, far_back) = (Arc::clone(&there), Arc::clone(&back));
        let far_memory = Arc::clone(&memory);
        let peer = thread::spawn(move || {
            let mut reader = Reader::over(far_there);
            let mut writer = Writer::over(far_back);
            let mut fetches = Fetches::default();
            let mut gone = false;
            for _ in 0..3 {
                let mut bytes = Vec::new();
                match reader.pop(&mut bytes) {
                    Some(Tag::Packet) => {
                        assert!(!gone, "a name of what is gone");
                        let cookie = u64::from_le_bytes(bytes.try_into().unwrap());
                        fetches.arrive(cookie);
                        fetches.take(cookie);
                        fetches.settle();
                        assert_eq!(far_memory.get(), 1);
                        fetches.fetched(cookie);
                        tell(&mut fetches, &mut writer);
                    }
                    Some(_) => gone = true,
                    None => {}
                }
                reader.release();
            }
        });
        let mut writer = Writer::over(there);
        let mut reader = Reader::over(back);
        let mut lent: Lent<()> = Lent::new();
        let cookie = lent.lend(What::Region(7));
        assert!(writer.push(Tag::Packet, &cookie.to_le_bytes()));
        lent.sent(cookie);
        writer.publish();
        for _ in 0..2 {
            let mut bytes = Vec::new();
            if reader.pop(&mut bytes) == Some(Tag::Released) {
                let (words, _) = bytes.as_chunks::<8>();
                lent.release((u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])));
            }
        }
        if lent.of_region(7) == 0 {
            memory.set(2);
            USED_AGAIN.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            writer.push(Tag::Gone, &7_u64.to_le_bytes());
            writer.publish();
        }
        peer.join().unwrap();
    });
    assert!(USED_AGAIN.load(std::sync::atomic::Ordering::Relaxed) > 0, "it was never released");
}

fn tell(fetches: &mut Fetches, writer: &mut Writer<Shared>) {
    while let Some((first, count)) = fetches.to_tell() {
        let message = [first, count].map(u64::to_le_bytes).concat();
        assert!(writer.push(Tag::Released, &message));
        fetches.told();
    }
    writer.publish();
}
