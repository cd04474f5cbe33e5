//! A large request, shared by the threads that carry it out: the caller and helpers take pieces by turns, each
//! overlapping its system calls and its copies.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use beeline_core::addr::{ByteRange, DevicePtr, align_down, align_up};
use beeline_core::plan::{Plan, Residency, StorageRoute, route_chunk};
use beeline_sys::cuda::Mark;
use beeline_sys::file as sys;
use beeline_sys::mem::HostMem;

use super::super::handle::{Handle, Routes};
use super::super::lanes::{Copy, InUse, Lanes};
use super::super::status::{Failure, Outcome};
use super::out::{fill, write_all};
use super::{Means, PROBE_MIN, SEGMENT_ALIGN, failed, read_cached, read_rest};
use crate::lock;

/// Pieces that one thread keeps in flight.
const IN_FLIGHT: usize = 4;
/// Pieces of a write that one thread keeps in flight: the copies are much quicker than what follows them.
const WRITES_IN_FLIGHT: usize = 2;
/// Most bytes that the caller of a write takes at once.
const LEAD_MAX: u64 = 1 << 20;
/// How often the caller looks whether helpers are done before it sleeps: for some 30 microseconds.
const JOIN_TURNS: u32 = 600;

/// A large read or a mapped write, shared by the threads that carry it out.
pub(in super::super) struct Share {
    handle: Arc<Handle>,
    lanes: Arc<Lanes>,
    way: Way,
    to: DevicePtr,
    at: u64,
    len: u64,
    cut: Cut,
    /// Where the part that nobody has taken yet begins.
    next: AtomicU64,
    /// Where the data ends, from `at`: the file may be shorter than asked for.
    end: AtomicU64,
    failed: std::sync::Mutex<Option<Failure>>,
    busy: AtomicUsize,
    caller: std::thread::Thread,
    stop: AtomicBool,
    /// A mapping could not be written: all is to be written again, the ordinary way.
    refused: AtomicBool,
}

/// How a request is cut into pieces: large ones first, since each copy costs the device some microseconds beside
/// its bytes, and smaller ones towards the end, so that the threads end together and their last copies are short.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// Most and fewest bytes of a piece, multiples of [`SEGMENT_ALIGN`].
    pub(super) most: u64,
    pub(super) least: u64,
    /// Threads that take part.
    pub(super) threads: u64,
}

impl Cut {
    /// Most bytes of a piece of a request of `len`.
    fn longest(self, len: u64) -> u64 {
        self.piece(len)
    }

    /// Bytes of the next piece where `left` are left.
    fn piece(self, left: u64) -> u64 {
        let fair = left / self.threads.max(1).saturating_mul(2) / SEGMENT_ALIGN * SEGMENT_ALIGN;
        fair.clamp(self.least, self.most.max(self.least)).min(left)
    }
}

impl Share {
    pub(super) fn new(
        (handle, lanes): (&Arc<Handle>, &Arc<Lanes>),
        way: Way,
        to: DevicePtr,
        range: ByteRange,
        cut: Cut,
    ) -> Self {
        Self {
            handle: Arc::clone(handle),
            lanes: Arc::clone(lanes),
            way,
            to,
            at: range.start,
            len: range.len,
            cut,
            next: AtomicU64::new(0),
            end: AtomicU64::new(range.len),
            failed: std::sync::Mutex::new(None),
            busy: AtomicUsize::new(0),
            caller: std::thread::current(),
            stop: AtomicBool::new(false),
            refused: AtomicBool::new(false),
        }
    }

    /// Carries the request out with up to `helpers` helpers; answers how many bytes the file had, for a write
    /// `None` where the mappings refused some.
    pub(super) fn run(self, means: Means<'_>, helpers: usize) -> Outcome<Option<u64>> {
        let force = means.force_direct || self.handle.direct_only;
        let share = Arc::new(self);
        let lead = share.lead();
        means.crew.enlist(&share, helpers, force);
        let worked = match share.lanes.acquire() {
            Ok(held) => share.work(held, lead, force),
            Err(failure) => Err(failure),
        };
        if let Err(failure) = worked {
            share.fail(failure);
        }
        share.join();
        if let Some(failure) = lock(&share.failed).take() {
            return Err(failure);
        }
        let whole = !share.refused.load(Ordering::SeqCst);
        Ok(whole.then(|| share.end.load(Ordering::SeqCst)))
    }

    /// What the caller takes before anybody else: of a write, its whole share in one piece.
    fn lead(&self) -> Option<(u64, u64)> {
        let Way::Write { ordinary: true } = self.way else { return self.claim() };
        let share = self.len / self.cut.threads.max(1) / SEGMENT_ALIGN * SEGMENT_ALIGN;
        let len = share.clamp(self.cut.least.min(self.len), LEAD_MAX);
        self.next.store(len, Ordering::SeqCst);
        Some((0, len))
    }

    /// A helper's part: whatever pieces are left, with a lane of its own, if there is one.
    pub(in super::super) fn help(&self, force: bool) {
        self.busy.fetch_add(1, Ordering::SeqCst);
        // Looked at after `busy`: the caller leaves only when nobody is busy and no piece is left.
        if self.wants_help() && !self.stop.load(Ordering::SeqCst) {
            let worked = match self.lanes.try_acquire() {
                Ok(Some(held)) => self.work(held, None, force),
                Ok(None) => Ok(()),
                Err(_) => Ok(()), // The caller has a lane, or says why it has none.
            };
            if let Err(failure) = worked {
                self.fail(failure);
            }
        }
        if self.busy.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.caller.unpark();
        }
    }

    /// Whether there is still something to help with.
    pub(in super::super) fn wants_help(&self) -> bool {
        self.next.load(Ordering::SeqCst) < self.len
    }

    fn fail(&self, failure: Failure) {
        self.stop.store(true, Ordering::SeqCst);
        let mut failed = lock(&self.failed);
        if failed.is_none() {
            *failed = Some(failure);
        }
    }

    fn join(&self) {
        self.next.store(u64::MAX / 2, Ordering::SeqCst);
        let mut turns = 0_u32;
        while self.busy.load(Ordering::SeqCst) > 0 {
            turns += 1;
            if turns < JOIN_TURNS {
                std::hint::spin_loop();
            } else {
                // Helpers end with their piece; the timeout only guards against a lost wake-up.
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
    }

    /// Takes the next piece: where it starts in the request, and its length.
    fn claim(&self) -> Option<(u64, u64)> {
        let mut start = self.next.load(Ordering::SeqCst);
        loop {
            let over = start >= self.len || start >= self.end.load(Ordering::Relaxed);
            if over || self.stop.load(Ordering::SeqCst) {
                return None;
            }
            let len = self.cut.piece(self.len - start);
            let order = Ordering::SeqCst;
            match self.next.compare_exchange_weak(start, start + len, order, order) {
                Ok(_) => return Some((start, len)),
                Err(now) => start = now,
            }
        }
    }

    /// Takes pieces until none is left, reading one while others are copied. The caller has taken `lead` already.
    fn work(&self, mut held: InUse<'_>, lead: Option<(u64, u64)>, force: bool) -> Outcome<()> {
        let outcome = match self.way {
            Way::Write { .. } => self.write_in(&mut held, lead),
            _ => self.read_in(&mut held, lead, force),
        };
        if let Err(failure) = &outcome {
            held.settle(Some(failure));
        }
        outcome
    }

    fn read_in(&self, held: &mut InUse<'_>, lead: Option<(u64, u64)>, force: bool) -> Outcome<()> {
        // A direct read may start up to a block early and end a block late.
        let edges = match self.way {
            Way::Asked(_) => 2 * self.handle.file.direct_block(),
            _ => 0,
        };
        let longest = self.cut.longest(self.len);
        let segment = align_up(longest + edges, SEGMENT_ALIGN).unwrap_or(longest);
        let segments = usize::try_from(held.lane()?.room() / segment).unwrap_or(1).max(1);
        let most = segments.min(IN_FLIGHT);
        let mut flying: VecDeque<Mark> = VecDeque::with_capacity(most);
        let mut next = lead;
        while let Some((start, len)) = next.take().or_else(|| self.claim()) {
            if flying.len() == most
                && let Some(first) = flying.pop_front()
            {
                held.wait(first)?;
            }
            let from = held.turn(segments) * segment;
            let want = ByteRange { start: self.at + start, len };
            let (skip, n) = self.fill(held, from, want, force)?;
            if n < want.len {
                self.end.fetch_min(start + n, Ordering::SeqCst);
            }
            if n > 0 {
                let to = self.to.checked_add(start).unwrap_or(self.to);
                let copy = Copy { into: true, device: to, at: from + skip, len: n };
                flying.push_back(held.start(copy)?);
            }
        }
        match flying.pop_back() {
            Some(last) => held.wait(last),
            None => Ok(()),
        }
    }

    /// Takes pieces until none is left, copying one out of the device while another is written. What the caller
    /// writes may go the ordinary way: `lead` says which thread this is.
    fn write_in(&self, held: &mut InUse<'_>, lead: Option<(u64, u64)>) -> Outcome<()> {
        let ordinary = lead.is_some() && matches!(self.way, Way::Write { ordinary: true });
        let segment = self.cut.longest(self.len).max(lead.map_or(0, |(_, len)| len));
        let segments = usize::try_from(held.lane()?.room() / segment.max(1)).unwrap_or(1);
        let segments = segments.clamp(1, WRITES_IN_FLIGHT);
        let mut flying: VecDeque<(u64, u64, u64, Mark)> = VecDeque::with_capacity(segments);
        // What follows a large ordinary write is known when it is done, not before.
        let ahead = if ordinary { 1 } else { segments };
        let mut next = lead;
        loop {
            while flying.len() < ahead
                && let Some((start, len)) = next.take().or_else(|| self.claim())
            {
                let into = held.turn(segments) * segment;
                let device = self.to.checked_add(start).unwrap_or(self.to);
                let mark = held.start(Copy { into: false, device, at: into, len })?;
                flying.push_back((start, len, into, mark));
            }
            let Some((start, len, from, mark)) = flying.pop_front() else { return Ok(()) };
            held.wait(mark)?;
            self.write_piece(held.lane()?.host(), from, (start, len), ordinary);
        }
    }

    /// Writes a piece of the request that lies at `from` in `memory`.
    fn write_piece(&self, memory: &HostMem, from: u64, (start, len): (u64, u64), ordinary: bool) {
        let range = ByteRange { start: self.at + start, len };
        let written = if ordinary {
            write_all(&self.handle, memory, from, range)
        } else {
            // Where the caller writes the ordinary way, that sets the file's times.
            let sole = matches!(self.way, Way::Write { ordinary: false });
            fill(&self.handle, memory, from, range, (sole && start == 0).then_some(self.len))
        };
        if let Err(error) = written {
            tracing::debug!(%error, "a mapping was not written; the file is, the ordinary way");
            self.refused.store(true, Ordering::SeqCst);
            self.stop.store(true, Ordering::SeqCst);
        }
    }

    /// Reads `want` into the lane from `from` on; answers where in the segment it starts, and how many
    /// bytes there are.
    fn fill(
        &self,
        held: &mut InUse<'_>,
        from: u64,
        want: ByteRange,
        force: bool,
    ) -> Outcome<(u64, u64)> {
        let handle = &*self.handle;
        let lane = held.lane()?;
        if self.way.is_direct(handle, force, want) {
            match read_direct(handle, lane, from, want) {
                Ok((skip, n)) => {
                    Routes::count(&handle.routes.direct, n);
                    return Ok((skip, n));
                }
                // This file refuses direct I/O after all.
                Err(error)
                    if error.kind() == io::ErrorKind::InvalidInput && !handle.direct_only => {}
                Err(error) => return Err(failed("read", handle, want.start, want.len, &error)),
            }
        }
        let n = read_cached(handle, lane.host(), from, want.start, want.len)?;
        Routes::count(&handle.routes.cached, n);
        Ok((0, n))
    }
}

/// How the pieces of a read are read.
pub(super) enum Way {
    /// Through the page cache, where (nearly) all of it is, or which is all there is.
    Cached,
    /// Each piece by where its bytes are.
    Asked(Plan<StorageRoute>),
    /// It is no read: written through mappings of the page cache, by the caller `ordinary`.
    Write {
        /// Whether the caller writes what it takes by `write`, which is quicker as long as nobody else does.
        ordinary: bool,
    },
}

impl Way {
    pub(super) fn choose(
        means: Means<'_>,
        handle: &Handle,
        lanes: &Lanes,
        at: u64,
        len: u64,
    ) -> Self {
        if len < PROBE_MIN && !means.force_direct && !handle.direct_only {
            return Self::Cached;
        }
        let residency = handle.file.residency_of(ByteRange { start: at, len });
        if let Residency::Memory = residency {
            return Self::Cached;
        }
        let plan = handle.plan(lanes.gpu());
        let route = if means.force_direct || handle.direct_only {
            StorageRoute::ThreadPool
        } else {
            route_chunk(&plan, residency).map_or(StorageRoute::PageCache, |chosen| chosen.route)
        };
        if is_direct(route) && handle.file.has_direct() { Self::Asked(plan) } else { Self::Cached }
    }

    fn is_direct(&self, handle: &Handle, force: bool, range: ByteRange) -> bool {
        let Self::Asked(plan) = self else { return false };
        force
            || route_chunk(plan, handle.file.residency_of(range))
                .is_some_and(|chosen| is_direct(chosen.route))
    }
}

const fn is_direct(route: StorageRoute) -> bool {
    matches!(route, StorageRoute::Direct | StorageRoute::ThreadPool)
}

/// Reads the blocks around `want` past the page cache.
fn read_direct(
    handle: &Handle,
    lane: &beeline_sys::cuda::Lane,
    from: u64,
    want: ByteRange,
) -> io::Result<(u64, u64)> {
    let block = handle.file.direct_block();
    let start = align_down(want.start, block);
    let skip = want.start - start;
    let end = align_up(want.end(), block).ok_or(io::ErrorKind::InvalidInput)?;
    let mut done = 0;
    while start + done < end {
        let fd = handle.file.direct_fd();
        match sys::pread(fd, lane.host(), from + done, end - start - done, start + done) {
            Ok(0) => break,
            Ok(n) => {
                done += n;
                // A part of a block is the end of the file, or as far as the file system got: what
                // follows cannot be asked for past the page cache.
                if !n.is_multiple_of(block) {
                    if !handle.direct_only {
                        done += read_rest(
                            handle,
                            lane.host(),
                            from + done,
                            end - start - done,
                            start + done,
                        )?;
                    }
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok((skip, done.saturating_sub(skip).min(want.len)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces are within their bounds and aligned, never longer than one before, and make up the request.
    fn check((most, least, threads): (u64, u64, u64), len: u64, pieces: u64) {
        let cut = Cut { most, least, threads };
        let (mut left, mut last, mut number) = (len, u64::MAX, 0);
        while left > 0 {
            let piece = cut.piece(left);
            assert!(piece <= cut.longest(len) && piece <= last, "{piece} of {left} after {last}");
            let whole = piece >= least && piece.is_multiple_of(SEGMENT_ALIGN);
            assert!(piece > 0 && (piece == left || whole), "{piece} of {left}");
            (left, last, number) = (left - piece, piece, number + 1);
        }
        assert_eq!(number, pieces, "{len} bytes in pieces of {least} to {most} for {threads}");
    }

    #[test]
    fn a_request_is_cut_into_pieces_that_get_smaller() {
        const KIB: u64 = 1 << 10;
        check((256 * KIB, 256 * KIB, 2), 1 << 20, 4);
        check((256 * KIB, 256 * KIB, 4), (1 << 20) + 1, 5);
        check((1 << 20, 256 * KIB, 1), 16 << 20, 18);
        check((1 << 20, 256 * KIB, 4), 16 << 20, 27);
        check((1 << 20, 256 * KIB, u64::MAX / 2), 3 << 20, 12);
        check((256 * KIB, 1 << 20, 2), 3 << 20, 3);
        check((1 << 20, 256 * KIB, 0), 5, 1);
    }
}
