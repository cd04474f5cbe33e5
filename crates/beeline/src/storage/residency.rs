//! Is this chunk in the page cache? Three ways to ask, chosen once per file.
//!
//! Measured on Linux 6.18, ext4, chunks of 4 MiB (2026-11-29): `cachestat` 0.4 us and exact, but refused
//! (`EPERM`) to a user who neither owns nor may write the file; one byte by `RWF_NOWAIT` 1 us when
//! resident, 6-9 us when not (it starts the fetch of that page), allowed for every reader; `mincore`
//! 40-55 us, and for such a user it answers "resident" for every page. So `mincore` is used only where
//! the other two see nothing: on overlayfs (a container's image), whose own page cache is always empty
//! and which has no `RWF_NOWAIT` reads, and there only for a user whom `cachestat` would answer.

use std::os::fd::{AsFd, BorrowedFd};

use beeline_core::addr::{ByteRange, align_up};
use beeline_core::plan::{Plan, Residency, StorageRoute, route_chunk};
use beeline_core::reason::Code;
use beeline_sys::file;

use super::file::File;
use crate::config::SLOT_BYTES;

/// How a file is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prober {
    /// `cachestat(2)`: exact.
    CacheStat,
    /// `preadv2(2)` with `RWF_NOWAIT`: three samples a chunk.
    NoWait,
    /// `mincore(2)` of a mapping, which leads through a stacked file system to the file below.
    Mincore,
    /// The file system lives in memory; nothing to ask.
    Memory,
    /// The kernel does not tell.
    Unknown,
}

impl Prober {
    /// The best way that works for this file and this user. `stacked` says that the descriptor's own
    /// page cache is not the one that holds the bytes (overlayfs), where `cachestat` sees nothing.
    pub(super) fn choose(fd: BorrowedFd<'_>, memory_backed: bool, stacked: bool) -> Self {
        if memory_backed {
            return Self::Memory;
        }
        let may_ask = file::cached_bytes(fd, 0, 1).is_ok();
        if may_ask && !stacked {
            return Self::CacheStat;
        }
        if file::is_readable_now(fd, 0).is_ok() {
            return Self::NoWait;
        }
        // Without `cachestat` nothing says whether this user would be told the truth.
        if may_ask && file::mapped_bytes(fd, 0, 1).is_ok() {
            return Self::Mincore;
        }
        Self::Unknown
    }

    /// Where the bytes of `range` are.
    pub(super) fn probe(self, fd: BorrowedFd<'_>, range: ByteRange) -> Residency {
        match self {
            Self::Memory => Residency::Memory,
            Self::Unknown => Residency::Unknown,
            Self::CacheStat => counted(file::cached_bytes(fd, range.start, range.len), range),
            Self::Mincore => counted(file::mapped_bytes(fd, range.start, range.len), range),
            Self::NoWait => sample(fd, range),
        }
    }

    /// The name, for `explain`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::CacheStat => "cachestat",
            Self::NoWait => "RWF_NOWAIT",
            Self::Mincore => "mincore",
            Self::Memory => "none needed",
            Self::Unknown => "none",
        }
    }
}

/// What of a file would go along one route for one cause, if it were read now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteShare {
    /// The route.
    pub route: StorageRoute,
    /// What decides it.
    pub why: Code,
    /// Bytes that would go along it.
    pub bytes: u64,
    /// Chunks they would come in.
    pub chunks: u64,
    /// How many of these bytes are in the page cache; `None` where the kernel does not tell.
    pub resident_bytes: Option<u64>,
}

/// Most chunks that one look at a file asks about; larger files are asked in larger chunks.
const LOOKS_MAX: u64 = 1 << 16;

impl File {
    /// Where the bytes are now, summed by the route that `plan` gives each chunk; in file order of
    /// the first chunk of each. Empty where the plan allows no route or the file has no byte.
    ///
    /// A look, not a promise: the page cache changes under it. Where the file is asked by
    /// [`Prober::NoWait`], the look itself starts to fetch a page of each chunk that is not there.
    pub fn residency(&self, plan: &Plan<StorageRoute>) -> Vec<RouteShare> {
        let size = self.size();
        let step = align_up(size.div_ceil(LOOKS_MAX), SLOT_BYTES).unwrap_or(SLOT_BYTES);
        let mut shares: Vec<RouteShare> = Vec::new();
        let mut start = 0;
        while start < size {
            let len = step.min(size - start);
            let residency = self.prober().probe(self.buffered().as_fd(), ByteRange { start, len });
            let Some(chosen) = route_chunk(plan, residency) else { return Vec::new() };
            let resident_bytes = match residency {
                Residency::Memory => Some(len),
                Residency::Cached { bytes, .. } => Some(bytes),
                Residency::Unknown => None,
            };
            let part = RouteShare {
                route: chosen.route,
                why: chosen.why,
                bytes: len,
                chunks: 1,
                resident_bytes,
            };
            match shares.iter_mut().find(|s| s.route == part.route && s.why == part.why) {
                Some(share) => share.add(part),
                None => shares.push(part),
            }
            start += len;
        }
        shares
    }
}

impl RouteShare {
    fn add(&mut self, part: Self) {
        self.bytes += part.bytes;
        self.chunks += part.chunks;
        let both = self.resident_bytes.zip(part.resident_bytes);
        self.resident_bytes = both.map(|(a, b)| a + b);
    }
}

/// Whole pages were counted, of which the first and last may lie partly outside.
fn counted(bytes: std::io::Result<u64>, range: ByteRange) -> Residency {
    match bytes {
        Ok(bytes) => Residency::Cached { bytes: bytes.min(range.len), of: range.len },
        Err(_) => Residency::Unknown,
    }
}

/// Asks for the middle byte first: chunks are mostly all there or all gone, and each "no" makes the
/// kernel fetch a page, so the other two are asked only where the first is there.
fn sample(fd: BorrowedFd<'_>, range: ByteRange) -> Residency {
    let last = range.end().saturating_sub(1);
    let middle = range.start + range.len / 2;
    let mut there = 0;
    for at in [middle, range.start, last] {
        match file::is_readable_now(fd, at) {
            Ok(true) => there += 1,
            Ok(false) if at == middle => break,
            Ok(false) => {}
            Err(_) => return Residency::Unknown,
        }
    }
    Residency::Cached { bytes: range.len / 3 * there + range.len % 3 * (there / 3), of: range.len }
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_core::plan::{Mode, Operation, StorageRequest};

    #[test]
    fn the_shares_of_all_routes_make_up_the_file() {
        let gpu = crate::gpu::Gpu::simulated(&crate::config::SimConfig::default()).unwrap();
        let ask = |mode| StorageRequest { operation: Operation::Read, mode, route: None };
        let size = 2 * SLOT_BYTES + 77;
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&path, vec![7; usize::try_from(size).unwrap()]).unwrap();
        let file = File::open(path.path()).unwrap();
        let shares = file.residency(&file.plan(&gpu, ask(Mode::Auto)));
        assert_eq!(shares.iter().map(|share| share.bytes).sum::<u64>(), size);
        assert_eq!(shares.iter().map(|share| share.chunks).sum::<u64>(), 3);
        assert!(shares.iter().all(|s| s.resident_bytes.is_none_or(|bytes| bytes <= s.bytes)));
        assert_eq!(file.residency(&file.plan(&gpu, ask(Mode::Require))), []);
    }
}
