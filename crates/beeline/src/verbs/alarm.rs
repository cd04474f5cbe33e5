//! Until when the NIC's thread sleeps, so that whoever brings a clock forward knows to wake it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_core::time::Time;

/// A word that one thread writes and others read: a trait so that a model can try every order.
pub(super) trait Word: fmt::Debug {
    fn load(&self) -> u64;
    fn store(&self, word: u64);
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn store(&self, word: u64) {
        self.store(word, Ordering::Release);
    }
}

/// The protocol: under the lock of the clocks the sleeper calls [`sleeps`](Self::sleeps) with the first
/// of them, sleeps without the lock, calls [`wakes`](Self::wakes), and looks at the clocks again. Whoever
/// sets a clock does so under the lock, and wakes the sleeper afterwards when
/// [`oversleeps`](Self::oversleeps) says so.
#[derive(Debug)]
pub(super) struct Alarm<W = AtomicU64> {
    until: W,
}

impl Alarm {
    pub(super) const fn new() -> Self {
        // As if asleep for good: whoever comes before the thread's first look wakes it.
        Self { until: AtomicU64::new(u64::MAX) }
    }
}

impl<W: Word> Alarm<W> {
    /// The sleeper sleeps until then, or for ever.
    pub(super) fn sleeps(&self, until: Option<Time>) {
        self.until.store(nanos(until));
    }

    /// The sleeper is awake, and will look at the clocks.
    pub(super) fn wakes(&self) {
        self.until.store(0);
    }

    /// Whether the sleeper would miss `due`.
    pub(super) fn oversleeps(&self, due: Option<Time>) -> bool {
        nanos(due) < self.until.load()
    }
}

fn nanos(time: Option<Time>) -> u64 {
    time.map_or(u64::MAX, Time::as_nanos)
}

#[cfg(test)]
mod model {
    use loom::sync::{Arc, Condvar, Mutex, atomic};
    use loom::thread;

    use super::*;

    impl Word for atomic::AtomicU64 {
        fn load(&self) -> u64 {
            self.load(Ordering::Acquire)
        }

        fn store(&self, word: u64) {
            self.store(word, Ordering::Release);
        }
    }

    struct Nic {
        /// The first clock.
        due: Mutex<Option<Time>>,
        alarm: Alarm<atomic::AtomicU64>,
        woken: Mutex<bool>,
        changed: Condvar,
    }

    /// A clock that is set while the thread is about to sleep, asleep or about to wake is never slept
    /// through: the model would stand still.
    #[test]
    fn no_clock_is_slept_through() {
        loom::model(|| {
            let nic = Arc::new(Nic {
                due: Mutex::new(None),
                alarm: Alarm { until: atomic::AtomicU64::new(u64::MAX) },
                woken: Mutex::new(false),
                changed: Condvar::new(),
            });
            let sleeper = Arc::clone(&nic);
            let sleeper = thread::spawn(move || {
                loop {
                    {
                        let due = sleeper.due.lock().unwrap();
                        if due.is_some_and(|due| due <= Time::from_nanos(1)) {
                            return;
                        }
                        sleeper.alarm.sleeps(*due);
                    }
                    let mut woken = sleeper.woken.lock().unwrap();
                    while !*woken {
                        woken = sleeper.changed.wait(woken).unwrap();
                    }
                    *woken = false;
                    drop(woken);
                    sleeper.alarm.wakes();
                }
            });
            // First one that is far off, then one that is due.
            for nanos in [100, 1] {
                let due = Some(Time::from_nanos(nanos));
                *nic.due.lock().unwrap() = due;
                if nic.alarm.oversleeps(due) {
                    *nic.woken.lock().unwrap() = true;
                    nic.changed.notify_one();
                }
            }
            sleeper.join().unwrap();
        });
    }
}
