//! Statistics: levels 0 (off) to 3, as words in the order of the API's structures.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::lock;

/// Words of the level-1 structure since version 1.20; earlier ones end before `readv`.
pub const LEVEL1_WORDS: usize = 78;
/// Words of the level-1 structure before version 1.20.
pub const LEVEL1_WORDS_OLD: usize = 64;
/// Classes of each size histogram of level 2.
pub const CLASSES: usize = 32;
/// Words of one device of level 3, its UUID not counted.
pub const GPU_WORDS: usize = 29;
/// Devices of level 3.
pub const GPUS_MAX: usize = 16;

/// A counter of successes and failures: its first word in level 1; the failures follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Op(usize);

#[allow(missing_docs, reason = "the names of the API's structure")]
impl Op {
    pub(super) const READ: Self = Self(0);
    pub(super) const WRITE: Self = Self(2);
    pub(super) const HANDLE_REGISTER: Self = Self(4);
    pub(super) const HANDLE_DEREGISTER: Self = Self(6);
    pub(super) const BUF_REGISTER: Self = Self(8);
    pub(super) const BUF_DEREGISTER: Self = Self(10);
    pub(super) const BATCH_SUBMIT: Self = Self(22);
    pub(super) const BATCH_COMPLETE: Self = Self(24);
    pub(super) const BATCH_SETUP: Self = Self(26);
    pub(super) const BATCH_CANCEL: Self = Self(28);
    pub(super) const BATCH_DESTROY: Self = Self(30);
    const BATCH_ENQUEUED: Self = Self(32);
    const BATCH_POSIX_ENQUEUED: Self = Self(34);
    const BATCH_PROCESSED: Self = Self(36);
    const BATCH_POSIX_PROCESSED: Self = Self(38);
    const BATCH_TOTAL_SUBMIT: Self = Self(50);
    pub(super) const READV: Self = Self(64);
    pub(super) const WRITEV: Self = Self(66);
}

// Words of level 1 that are no counters of this kind: bytes, bandwidth, average, rate, sum.
const READ_BYTES: usize = 12;
const WRITE_BYTES: usize = 13;
const READ_BW: usize = 14;
const READ_LAT_AVG: usize = 16;
const READ_RATE: usize = 18;
const READ_LAT_SUM: usize = 20;
const WRITE_LAT_SUM: usize = 21;
const BATCH_READ_BYTES: usize = 52;
const BATCH_WRITE_BYTES: usize = 53;
const BATCH_SUBMIT_SUM: usize = 60;
const BATCH_COMPLETE_SUM: usize = 61;

/// The words of all levels.
pub(super) struct Stats {
    level: AtomicI32,
    running: AtomicBool,
    since: Mutex<Instant>,
    words: [AtomicU64; LEVEL1_WORDS],
    sizes: [[AtomicU64; CLASSES]; 2],
    /// CPU time of calling threads and helpers, in nanoseconds.
    cpu_ns: AtomicU64,
    gpus: Mutex<Vec<Arc<GpuStats>>>,
}

/// The words of one device.
pub(super) struct GpuStats {
    ordinal: i32,
    uuid: [u8; 16],
    words: [AtomicU64; GPU_WORDS],
}

/// Level 3 of one device, as it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuWords {
    /// Its UUID.
    pub uuid: [u8; 16],
    /// The words behind it, in the order of the API's structure.
    pub words: [u64; GPU_WORDS],
}

fn words<const N: usize>() -> [AtomicU64; N] {
    std::array::from_fn(|_| AtomicU64::new(0))
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            level: AtomicI32::new(0),
            running: AtomicBool::new(false),
            since: Mutex::new(Instant::now()),
            words: words(),
            sizes: [words(), words()],
            cpu_ns: AtomicU64::new(0),
            gpus: Mutex::default(),
        }
    }
}

impl Stats {
    pub(super) fn level(&self) -> i32 {
        self.level.load(Ordering::Relaxed)
    }

    pub(super) fn set_level(&self, level: i32) {
        self.level.store(level, Ordering::Relaxed);
        self.running.store(level > 0, Ordering::Relaxed);
    }

    pub(super) fn run(&self, running: bool) {
        self.running.store(running && self.level() > 0, Ordering::Relaxed);
    }

    /// Whether anything is counted.
    pub(super) fn is_on(&self) -> bool {
        self.running.load(Ordering::Relaxed)
    }

    /// Counts how an operation ended.
    pub(super) fn count(&self, op: Op, well: bool) {
        if self.is_on() {
            self.add(op.0 + usize::from(!well), 1);
        }
    }

    /// Counts a read or a write: its end, bytes, time and size, and its device.
    pub(super) fn moved(&self, write: bool, asked: u64, outcome: Option<u64>, took: Duration) {
        if !self.is_on() {
            return;
        }
        self.count(if write { Op::WRITE } else { Op::READ }, outcome.is_some());
        let Some(bytes) = outcome else { return };
        self.add(if write { WRITE_BYTES } else { READ_BYTES }, bytes);
        self.add(if write { WRITE_LAT_SUM } else { READ_LAT_SUM }, micros(took));
        if self.level() >= 2 {
            let class = size_class(asked);
            if let Some(place) = self.sizes.get(usize::from(write)).and_then(|s| s.get(class)) {
                place.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Adds CPU time.
    pub(super) fn spent(&self, cpu: Duration) {
        let nanos = u64::try_from(cpu.as_nanos()).unwrap_or(0);
        self.cpu_ns.fetch_add(nanos, Ordering::Relaxed);
    }

    /// CPU time of the calls so far, in seconds.
    pub(super) fn cpu_seconds(&self) -> f64 {
        self.cpu_ns.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// Counts an entry of a batch that has ended.
    pub(super) fn batch_ended(&self, write: bool, outcome: Option<u64>, took: Duration) {
        if !self.is_on() {
            return;
        }
        let well = outcome.is_some();
        for op in [Op::BATCH_COMPLETE, Op::BATCH_PROCESSED, Op::BATCH_POSIX_PROCESSED] {
            self.count(op, well);
        }
        self.add(if write { BATCH_WRITE_BYTES } else { BATCH_READ_BYTES }, outcome.unwrap_or(0));
        self.add(BATCH_COMPLETE_SUM, micros(took));
    }

    /// Counts a submission of `entries`.
    pub(super) fn batch_submitted(&self, entries: usize, well: bool, took: Duration) {
        if !self.is_on() {
            return;
        }
        self.count(Op::BATCH_SUBMIT, well);
        if well {
            for op in [Op::BATCH_ENQUEUED, Op::BATCH_POSIX_ENQUEUED, Op::BATCH_TOTAL_SUBMIT] {
                self.add(op.0, entries as u64);
            }
            self.add(BATCH_SUBMIT_SUM, micros(took));
        }
    }

    fn add(&self, at: usize, value: u64) {
        if let Some(word) = self.words.get(at) {
            word.fetch_add(value, Ordering::Relaxed);
        }
    }

    /// The words of a device, for level 3; `None` below.
    pub(super) fn gpu(
        &self,
        ordinal: i32,
        uuid: impl FnOnce() -> [u8; 16],
    ) -> Option<Arc<GpuStats>> {
        if !self.is_on() || self.level() < 3 {
            return None;
        }
        let mut gpus = lock(&self.gpus);
        if let Some(known) = gpus.iter().find(|gpu| gpu.ordinal == ordinal) {
            return Some(Arc::clone(known));
        }
        if gpus.len() >= GPUS_MAX {
            return None;
        }
        let made = Arc::new(GpuStats { ordinal, uuid: uuid(), words: words() });
        gpus.push(Arc::clone(&made));
        Some(made)
    }

    /// Level 1, its rates and averages computed now.
    pub(super) fn level1(&self) -> [u64; LEVEL1_WORDS] {
        let mut out: [u64; LEVEL1_WORDS] =
            std::array::from_fn(|at| self.words.get(at).map_or(0, |w| w.load(Ordering::Relaxed)));
        let seconds = lock(&self.since).elapsed().as_secs_f64().max(1e-6);
        let rate = |value: u64| (value as f64 / seconds) as u64;
        let average = |sum: u64, count: u64| sum.checked_div(count).unwrap_or(0);
        let get = |out: &[u64; LEVEL1_WORDS], at: usize| out.get(at).copied().unwrap_or(0);
        let derived = [
            (READ_BW, rate(get(&out, READ_BYTES))),
            (READ_BW + 1, rate(get(&out, WRITE_BYTES))),
            (READ_LAT_AVG, average(get(&out, READ_LAT_SUM), get(&out, 0))),
            (READ_LAT_AVG + 1, average(get(&out, WRITE_LAT_SUM), get(&out, 2))),
            (READ_RATE, rate(get(&out, 0))),
            (READ_RATE + 1, rate(get(&out, 2))),
            (54, rate(get(&out, BATCH_READ_BYTES))),
            (55, rate(get(&out, BATCH_WRITE_BYTES))),
            (56, average(get(&out, BATCH_SUBMIT_SUM), get(&out, Op::BATCH_SUBMIT.0))),
            (57, average(get(&out, BATCH_COMPLETE_SUM), get(&out, Op::BATCH_COMPLETE.0))),
            (58, rate(get(&out, Op::BATCH_SUBMIT.0))),
            (59, rate(get(&out, Op::BATCH_COMPLETE.0))),
        ];
        for (at, value) in derived {
            if let Some(place) = out.get_mut(at) {
                *place = value;
            }
        }
        out
    }

    /// The histograms of level 2: reads, writes.
    pub(super) fn level2(&self) -> [[u64; CLASSES]; 2] {
        std::array::from_fn(|way| {
            std::array::from_fn(|class| {
                let place = self.sizes.get(way).and_then(|sizes| sizes.get(class));
                place.map_or(0, |word| word.load(Ordering::Relaxed))
            })
        })
    }

    /// The devices of level 3.
    pub(super) fn level3(&self) -> Vec<GpuWords> {
        let read = |gpu: &Arc<GpuStats>| GpuWords {
            uuid: gpu.uuid,
            words: std::array::from_fn(|at| {
                gpu.words.get(at).map_or(0, |word| word.load(Ordering::Relaxed))
            }),
        };
        lock(&self.gpus).iter().map(read).collect()
    }

    pub(super) fn reset(&self) {
        *lock(&self.since) = Instant::now();
        for word in self.words.iter().chain(self.sizes.iter().flatten()).chain([&self.cpu_ns]) {
            word.store(0, Ordering::Relaxed);
        }
        lock(&self.gpus).clear();
    }
}

impl GpuStats {
    const READS: usize = 0;
    const WRITES: usize = 13;
    const BUFFERS: usize = 24;

    /// Counts a read or a write of this device.
    pub(super) fn moved(&self, write: bool, aligned: bool, outcome: Option<u64>, took: Duration) {
        let base = if write { Self::WRITES } else { Self::READS };
        let (errors, unaligned) = if write { (10, 8) } else { (12, 8) };
        let Some(bytes) = outcome else { return self.add(base + errors, 1) };
        self.add(base, bytes);
        self.add(base + 3, micros(took));
        self.add(base + 4, 1);
        self.add(base + 7, 1);
        if !aligned {
            self.add(base + unaligned, 1);
        }
    }

    pub(super) fn registered(&self, well: bool, bytes: u64) {
        self.add(Self::BUFFERS, 1);
        self.add(Self::BUFFERS + if well { 1 } else { 2 }, 1);
        if well {
            self.add(Self::BUFFERS + 4, bytes);
        }
    }

    fn add(&self, at: usize, value: u64) {
        if let Some(word) = self.words.get(at) {
            word.fetch_add(value, Ordering::Relaxed);
        }
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

/// The class of a size: 0 below 4 KiB, then by powers of two, the last without end.
fn size_class(bytes: u64) -> usize {
    match bytes / 4096 {
        0 => 0,
        pages => (pages.ilog2() as usize + 1).min(CLASSES - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_classes_that_were_observed() {
        let cases = [(0, 0), (4095, 0), (4096, 1), (8192, 2), (1 << 20, 9), (u64::MAX, 31)];
        for (bytes, class) in cases {
            assert_eq!(size_class(bytes), class, "{bytes}");
        }
    }

    #[test]
    fn nothing_is_counted_at_level_0_and_reset_starts_again() {
        let stats = Stats::default();
        stats.moved(false, 10, Some(10), Duration::from_micros(3));
        assert_eq!(stats.level1().iter().sum::<u64>(), 0);
        stats.set_level(2);
        stats.moved(false, 1 << 20, Some(10), Duration::from_micros(3));
        stats.moved(true, 5, None, Duration::ZERO);
        let words = stats.level1();
        assert_eq!((words[0], words[3], words[READ_BYTES], words[READ_LAT_SUM]), (1, 1, 10, 3));
        assert_eq!(stats.level2()[0][9], 1);
        stats.reset();
        assert_eq!(stats.level1().iter().sum::<u64>(), 0);
    }
}
