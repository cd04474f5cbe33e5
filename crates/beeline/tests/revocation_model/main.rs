//! The revocation protocol under a model checker: every interleaving of importers and an exporter that
//! moves the memory. The file of the protocol is compiled here a second time, over the checker's locks.
#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    dead_code,
    reason = "tests, and a file of the library"
)]

#[path = "../../src/memory/revocation.rs"]
mod revocation;

/// The checker's locks in the place of those of the standard library.
mod sync {
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};

    /// Without a bound: a wait that nobody ends is a deadlock, which the checker reports.
    pub(super) fn wait_a_while<'a, T>(
        changed: &Condvar,
        guard: MutexGuard<'a, T>,
    ) -> (MutexGuard<'a, T>, bool) {
        (changed.wait(guard).unwrap(), false)
    }
}

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use loom::thread;

use revocation::Revocable;

/// What a page holds that was given back.
const POISON: u64 = u64::MAX;

/// Memory of two pages, of which one is in use, and importers' translations to it.
struct Memory {
    pages: [AtomicU64; 2],
    place: AtomicUsize,
    importers: Vec<Revocable<usize>>,
}

impl Memory {
    fn new(importers: usize) -> Arc<Self> {
        Arc::new(Self {
            pages: [AtomicU64::new(0), AtomicU64::new(POISON)],
            place: AtomicUsize::new(0),
            importers: (0..importers).map(|_| Revocable::new()).collect(),
        })
    }

    /// An importer's access: by its translation, faulted in where there is none.
    fn access<R>(&self, importer: usize, work: impl FnOnce(&AtomicU64) -> R) -> R {
        let fault = || Ok::<_, ()>(self.place.load(Ordering::SeqCst));
        let done = self.importers[importer].access(fault, |page| work(&self.pages[*page]));
        done.unwrap()
    }

    /// Moves the memory to the other page, as the exporter does.
    fn relocate(&self) {
        for importer in &self.importers {
            assert!(importer.revoke());
        }
        let old = self.place.load(Ordering::SeqCst);
        let new = 1 - old;
        let value = self.pages[old].load(Ordering::SeqCst);
        self.pages[new].store(value, Ordering::SeqCst);
        self.place.store(new, Ordering::SeqCst);
        self.pages[old].store(POISON, Ordering::SeqCst);
        for importer in &self.importers {
            importer.resume();
        }
    }
}

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

#[test]
fn a_write_is_never_lost_and_a_read_never_stale() {
    check(4, || {
        let memory = Memory::new(1);
        let of_mover = Arc::clone(&memory);
        let mover = thread::spawn(move || of_mover.relocate());
        for stamp in 1..=2 {
            memory.access(0, |page| page.store(stamp, Ordering::SeqCst));
            let read = memory.access(0, |page| page.load(Ordering::SeqCst));
            assert_eq!(read, stamp, "lost, or an old page");
        }
        mover.join().unwrap();
    });
}

#[test]
fn memory_moves_twice_under_two_importers() {
    check(2, || {
        let memory = Memory::new(2);
        let of_mover = Arc::clone(&memory);
        let mover = thread::spawn(move || {
            of_mover.relocate();
            of_mover.relocate();
        });
        let other = Arc::clone(&memory);
        let reader = thread::spawn(move || {
            let read = other.access(1, |page| page.load(Ordering::SeqCst));
            assert!(read <= 1, "an old page: {read:#x}");
        });
        memory.access(0, |page| page.store(1, Ordering::SeqCst));
        assert_eq!(memory.access(0, |page| page.load(Ordering::SeqCst)), 1);
        reader.join().unwrap();
        mover.join().unwrap();
    });
}

#[test]
fn two_threads_share_one_translation() {
    check(3, || {
        let memory = Memory::new(1);
        let of_mover = Arc::clone(&memory);
        let mover = thread::spawn(move || of_mover.relocate());
        let other = Arc::clone(&memory);
        let second = thread::spawn(move || {
            other.access(0, |page| page.fetch_add(1, Ordering::SeqCst));
        });
        memory.access(0, |page| page.fetch_add(1, Ordering::SeqCst));
        second.join().unwrap();
        mover.join().unwrap();
        assert_eq!(memory.access(0, |page| page.load(Ordering::SeqCst)), 2);
        assert_eq!(memory.importers[0].revocations(), 1);
    });
}
