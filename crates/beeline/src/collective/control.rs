//! Host memory that all ranks of a communicator share: who is where, who failed, who aborted.
//!
//! Every rank owns one segment (a sealed memory file, [`BYTES`] long) and maps those of all others. A word
//! is written by its owner, except the abort words, which any rank may set, and nobody clears.
//!
//! | offset | what |
//! |---|---|
//! | 0 | aborted: 0 no, 1 by a rank, 2 after an error |
//! | 64 | process number of the owner |
//! | 128 + 64 s, s = 0..4 | announcement of the collective whose sequence is `s` modulo 4 |
//! | 512 | announcement of what the owner does now, of whatever kind |
//! | 1024 | the word of the barrier of schedules (see the staged executor) |
//! | 4096 + 128 p | transfers to peer `p`: announcement, posted, taken |
//! | 49152 | a board for small messages between survivors: sequence, length, bytes |
//! | 57344 | written by the owner's kernels: their report (code and rank, then the calls); at 57400: whom they wait for; at 57408: closed |
//! | 65536 | what the owner has registered: how often that changed, then the entries (see `executor/cuda/registered.rs`) |

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use beeline_sys::mem::{HostMem, memfd};

use super::executor::{self, REPORT_OFFSET, WAITING_OFFSET, process_is_gone};
use super::id::UNIQUE_ID_BYTES;
use crate::core::collective::{Announcement, Disagreement};
use crate::error::{Error, Kind, Result};
use crate::lock;

/// Bytes of a segment.
pub(crate) const BYTES: usize = 80 << 10;
/// Where the abort word of a segment is: 64 bits, not 0 once aborted.
pub(crate) const ABORT_OFFSET: u64 = 0;
/// Ranks a communicator has at most: what a segment has room for.
pub const RANKS_MAX: u32 = 256;

const PROCESS: u64 = 64;
const CALLS: u64 = 128;
const NOW: u64 = 512;
const BOARD: u64 = 48 << 10;
/// Announcements that are kept at once.
const CALLS_KEPT: u64 = 4;

/// The shared memory of one communicator, as one rank sees it.
#[derive(Debug)]
pub(crate) struct Control {
    rank: u32,
    segments: Vec<Arc<HostMem>>,
    failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
    /// Ranks whose processes can be looked at from here.
    visible: OnceLock<Vec<bool>>,
}

/// Why a communicator no longer works.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The ranks disagree, or one is missing.
    Disagreement(Disagreement),
    /// Something else, in words.
    Other(Kind, String),
}

impl Control {
    /// A new segment for one rank, and its file to be given to the others.
    pub(crate) fn segment() -> Result<OwnedFd> {
        let file = memfd("beeline-control", BYTES as u64);
        file.map_err(|error| Error::io("make shared memory of a communicator", error))
    }

    /// The segments of all ranks, in rank order.
    pub(crate) fn join(rank: u32, files: &[impl AsFd]) -> Result<Self> {
        let map = |file: &_| HostMem::of_sealed(file, BYTES).map(Arc::new);
        let segments: std::io::Result<Vec<_>> = files.iter().map(map).collect();
        let segments = segments
            .map_err(|error| Error::io("map the shared memory of a communicator", error))?;
        let control = Self {
            rank,
            segments,
            failed: AtomicBool::new(false),
            failure: Mutex::default(),
            visible: OnceLock::new(),
        };
        control.store(rank, PROCESS, u64::from(std::process::id()));
        Ok(control)
    }

    /// This rank.
    pub(crate) const fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> u32 {
        self.segments.len() as u32
    }

    /// The segment of this rank.
    pub(crate) fn memory(&self) -> Option<&Arc<HostMem>> {
        self.segments.get(self.rank as usize)
    }

    /// Whether this rank was told to stop: one atomic load.
    pub(crate) fn is_aborted(&self) -> bool {
        self.load(self.rank, ABORT_OFFSET) != 0
    }

    /// Whether `rank` stopped.
    pub(crate) fn has_aborted(&self, rank: u32) -> bool {
        self.load(rank, ABORT_OFFSET) != 0
    }

    /// Whether `rank` stopped because somebody told it to, and not after an error.
    pub(crate) fn was_told_to_stop(&self, rank: u32) -> bool {
        self.load(rank, ABORT_OFFSET) == 1
    }

    /// Tells this rank to stop, now. The others find out when they wait for it.
    pub(crate) fn abort(&self) {
        self.store(self.rank, ABORT_OFFSET, 1);
    }

    /// Whether [`Self::fail`] was called: one atomic load.
    pub(crate) fn has_failed(&self) -> bool {
        if self.failed.load(Ordering::Acquire) {
            return true;
        }
        // Kernels report in the own segment.
        if self.load(self.rank, REPORT_OFFSET) == 0 {
            return false;
        }
        if let Some(failure) = executor::failure(self) {
            self.fail(failure);
        }
        self.failed.load(Ordering::Acquire)
    }

    /// Notes why the communicator stopped, the first time, and stops this rank.
    pub(crate) fn fail(&self, failure: Failure) {
        let mut first = lock(&self.failure);
        if first.is_none() {
            *first = Some(failure);
        }
        drop(first);
        self.failed.store(true, Ordering::Release);
        self.store(self.rank, ABORT_OFFSET, 2);
    }

    /// Why it stopped.
    pub(crate) fn failure(&self) -> Option<Failure> {
        lock(&self.failure).clone()
    }

    /// Shows the others the collective that this rank is about to make.
    pub(crate) fn announce(&self, announcement: &Announcement) {
        let at = CALLS + 64 * (announcement.sequence % CALLS_KEPT);
        self.write(at, announcement);
        self.write(NOW, announcement);
    }

    /// Shows what this rank does, where it is no collective.
    pub(crate) fn announce_transfer(&self, announcement: &Announcement) {
        self.write(NOW, announcement);
    }

    /// The hash of `rank`'s collective number `sequence`, once it announced that one.
    pub(crate) fn agreement(&self, rank: u32, sequence: u64) -> Option<u64> {
        let at = CALLS + 64 * (sequence % CALLS_KEPT);
        (self.load(rank, at) == sequence).then(|| self.load(rank, at + 24))
    }

    /// What `rank` announced as its collective number `sequence`.
    pub(crate) fn announced(&self, rank: u32, sequence: u64) -> Option<Announcement> {
        self.read(rank, CALLS + 64 * (sequence % CALLS_KEPT)).filter(|a| a.sequence == sequence)
    }

    /// What `rank` announced last, of whatever kind.
    pub(crate) fn last(&self, rank: u32) -> Option<Announcement> {
        self.read(rank, NOW)
    }

    /// The process of `rank`.
    pub(crate) fn process(&self, rank: u32) -> u64 {
        self.load(rank, PROCESS)
    }

    /// Notes whose processes can be looked at: those that are there now, when all have written theirs.
    pub(crate) fn note_processes(&self) {
        let ranks = 0..self.ranks();
        self.visible.get_or_init(|| ranks.map(|r| !process_is_gone(self.process(r))).collect());
    }

    /// Whether the process of `rank` has ended; one that cannot be looked at has not.
    pub(crate) fn is_lost(&self, rank: u32) -> bool {
        let visible = self.visible.get().and_then(|all| all.get(rank as usize));
        visible == Some(&true) && process_is_gone(self.process(rank))
    }

    /// The first rank whose process has ended.
    pub(crate) fn first_lost(&self) -> Option<u32> {
        (0..self.ranks()).find(|rank| self.is_lost(*rank))
    }

    /// Whom this rank's kernels wait for, and how many calls the two have made; `None` where they have not waited since
    /// the last time this was asked.
    pub(crate) fn take_waiting(&self) -> Option<(u32, u32)> {
        let word = self.load(self.rank, WAITING_OFFSET);
        self.store(self.rank, WAITING_OFFSET, 0);
        Some(((word as u32).checked_sub(1)?, (word >> 32) as u32))
    }

    /// Puts an identifier on the board of this rank, for those who look for `tag`.
    pub(crate) fn post(&self, tag: u64, id: &[u8; UNIQUE_ID_BYTES]) {
        self.store(self.rank, BOARD, 0);
        for (at, word) in (1_u64..).zip(id.as_chunks::<8>().0) {
            self.store(self.rank, BOARD + 8 * at, u64::from_le_bytes(*word));
        }
        self.store(self.rank, BOARD, tag);
    }

    /// Takes the identifier off the board: nobody is waited for there any more.
    pub(crate) fn unpost(&self) {
        self.store(self.rank, BOARD, 0);
    }

    /// What `rank` put on its board for `tag`.
    pub(crate) fn posted(&self, rank: u32, tag: u64) -> Option<[u8; UNIQUE_ID_BYTES]> {
        let there = || self.load(rank, BOARD) == tag;
        let mut id = [0; UNIQUE_ID_BYTES];
        if !there() {
            return None;
        }
        for (at, word) in (1_u64..).zip(id.as_chunks_mut::<8>().0) {
            *word = self.load(rank, BOARD + 8 * at).to_le_bytes();
        }
        there().then_some(id)
    }

    /// A word of `rank`'s segment; 0 outside of it.
    pub(crate) fn load(&self, rank: u32, at: u64) -> u64 {
        let segment = self.segments.get(rank as usize);
        segment.and_then(|segment| segment.load_u64(at).ok()).unwrap_or(0)
    }

    /// Writes a word of `rank`'s segment.
    pub(crate) fn store(&self, rank: u32, at: u64, value: u64) {
        if let Some(segment) = self.segments.get(rank as usize) {
            let _ = segment.store_u64(at, value);
        }
    }

    /// The sequence goes last: whoever sees it sees the rest.
    fn write(&self, at: u64, announcement: &Announcement) {
        let [sequence, rest @ ..] = announcement.encode();
        self.store(self.rank, at, 0);
        for (word, value) in (1_u64..).zip(rest) {
            self.store(self.rank, at + 8 * word, value);
        }
        self.store(self.rank, at, sequence);
    }

    fn read(&self, rank: u32, at: u64) -> Option<Announcement> {
        Announcement::decode([0, 8, 16, 24].map(|word| self.load(rank, at + word)))
    }
}

impl Failure {
    /// As the error that every later call gets.
    pub(crate) fn error(&self) -> Error {
        use crate::core::collective::Trouble;
        match self {
            Self::Disagreement(what) => {
                let (kind, code, remedy) = match what.trouble {
                    Trouble::Mismatch => (
                        Kind::Refused,
                        "collective-mismatch",
                        "make the same calls with the same counts, types and roots, in the same order, \
                         on every rank",
                    ),
                    Trouble::Straggler => (
                        Kind::Timeout,
                        "collective-straggler",
                        "look at what the missing rank does; pair sends and receives in one group; \
                         raise the deadline where a rank may be this late",
                    ),
                    Trouble::Stalled => (
                        Kind::Timeout,
                        "collective-stalled",
                        "look at the path between these ranks (beeline doctor)",
                    ),
                    Trouble::Lost => {
                        (Kind::Device, "collective-rank-lost", "shrink the communicator and go on")
                    }
                    Trouble::Aborted => (
                        Kind::Cancelled,
                        "collective-aborted",
                        "shrink the communicator or make another",
                    ),
                };
                Error::new(kind, what.to_string()).coded(code).remedy(remedy)
            }
            Self::Other(kind, text) => Error::new(*kind, text.clone()),
        }
    }
}
