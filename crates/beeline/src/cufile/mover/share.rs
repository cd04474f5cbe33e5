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
use super::out::fill;
use super::{MEDIUM_MAX, Means, PROBE_MIN, SEGMENT_ALIGN, failed, read_cached, read_rest};
use crate::lock;

/// Pieces that one thread keeps in flight.
const IN_FLIGHT: usize = 4;
/// Pieces of a write that one thread keeps in flight: the copies are much quicker than what follows them.
const WRITES_IN_FLIGHT: usize = 2;
/// How long a thread looks at a copy before it naps: of a medium request as long as its last copies take; of a large
/// one hardly, since other copies are before it.
const LOOK_MEDIUM: Duration = Duration::from_micros(40);
const LOOK: Duration = Duration::from_micros(5);
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
    piece: u64,
    pieces: u64,
    /// The first piece that nobody has taken yet.
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

impl Share {
    pub(super) fn new(
        (handle, lanes): (&Arc<Handle>, &Arc<Lanes>),
        way: Way,
        to: DevicePtr,
        range: ByteRange,
        piece: u64,
    ) -> Self {
        Self {
            handle: Arc::clone(handle),
            lanes: Arc::clone(lanes),
            way,
            to,
            at: range.start,
            len: range.len,
            piece,
            pieces: range.len.div_ceil(piece),
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
        // The caller's own first: it needs no help where that is all.
        let first = share.claim();
        let left = usize::try_from(share.pieces - 1).unwrap_or(usize::MAX);
        means.crew.enlist(&share, helpers.min(left), force);
        let worked = match share.lanes.acquire() {
            Ok(held) => share.work(held, first, force),
            Err(failure) => Err(failure),
        };
        if let Err(failure) = worked {
            share.fail(failure);
        }
        share.join();
        means.crew.dismiss(&share);
        if let Some(failure) = lock(&share.failed).take() {
            return Err(failure);
        }
        let whole = !share.refused.load(Ordering::SeqCst);
        Ok(whole.then(|| share.end.load(Ordering::SeqCst)))
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
        self.next.load(Ordering::SeqCst) < self.pieces
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
        if self.stop.load(Ordering::SeqCst) {
            return None;
        }
        let piece = self.next.fetch_add(1, Ordering::SeqCst);
        let start = (piece < self.pieces).then(|| piece * self.piece)?;
        let len = self.piece.min(self.len - start);
        (start < self.end.load(Ordering::Relaxed)).then_some((start, len))
    }

    /// How long a thread looks at the mark of a copy before it naps.
    fn look(&self) -> Duration {
        if self.len <= MEDIUM_MAX { LOOK_MEDIUM } else { LOOK }
    }

    /// Takes pieces until none is left, reading one while others are copied; `first` is taken already.
    fn work(&self, mut held: InUse<'_>, first: Option<(u64, u64)>, force: bool) -> Outcome<()> {
        let outcome = match self.way {
            Way::Write => self.write_in(&mut held, first),
            _ => self.read_in(&mut held, first, force),
        };
        if let Err(failure) = &outcome {
            held.settle(Some(failure));
        }
        outcome
    }

    fn read_in(&self, held: &mut InUse<'_>, first: Option<(u64, u64)>, force: bool) -> Outcome<()> {
        // A direct read may start up to a block early and end a block late.
        let edges = match self.way {
            Way::Asked(_) => 2 * self.handle.file.direct_block(),
            _ => 0,
        };
        let segment = align_up(self.piece + edges, SEGMENT_ALIGN).unwrap_or(self.piece);
        let segments = usize::try_from(held.lane()?.room() / segment).unwrap_or(1).max(1);
        let most = segments.min(IN_FLIGHT);
        let mut flying: VecDeque<Mark> = VecDeque::with_capacity(most);
        let mut next = first;
        while let Some((start, len)) = next.take().or_else(|| self.claim()) {
            if flying.len() == most
                && let Some(first) = flying.pop_front()
            {
                held.wait(first, self.look())?;
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
            Some(last) => held.wait(last, self.look()),
            None => Ok(()),
        }
    }

    /// Takes pieces until none is left, copying one out of the device while another is written.
    fn write_in(&self, held: &mut InUse<'_>, first: Option<(u64, u64)>) -> Outcome<()> {
        let segments = usize::try_from(held.lane()?.room() / self.piece).unwrap_or(1);
        let segments = segments.max(1);
        let most = segments.min(WRITES_IN_FLIGHT);
        let mut flying: VecDeque<(u64, u64, u64, Mark)> = VecDeque::with_capacity(most);
        let mut next = first;
        loop {
            while flying.len() < most
                && let Some((start, len)) = next.take().or_else(|| self.claim())
            {
                let into = held.turn(segments) * self.piece;
                let device = self.to.checked_add(start).unwrap_or(self.to);
                let mark = held.start(Copy { into: false, device, at: into, len })?;
                flying.push_back((start, len, into, mark));
            }
            let Some((start, len, from, mark)) = flying.pop_front() else { return Ok(()) };
            held.wait(mark, self.look())?;
            self.write_piece(held.lane()?.host(), from, (start, len));
        }
    }

    /// Writes a piece of the request that lies at `from` in `memory`.
    fn write_piece(&self, memory: &HostMem, from: u64, (start, len): (u64, u64)) {
        let range = ByteRange { start: self.at + start, len };
        let first = (start == 0).then_some(self.len);
        if let Err(error) = fill(&self.handle, memory, from, range, first) {
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
            match read_direct(handle, lane.host(), from, want) {
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
    /// It is no read: written through mappings of the page cache.
    Write,
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

    pub(super) fn is_direct(&self, handle: &Handle, force: bool, range: ByteRange) -> bool {
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
pub(super) fn read_direct(
    handle: &Handle,
    memory: &HostMem,
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
        match sys::pread(fd, memory, from + done, end - start - done, start + done) {
            Ok(0) => break,
            Ok(n) => {
                done += n;
                // A part of a block is the end of the file, or as far as the file system got: what
                // follows cannot be asked for past the page cache.
                if !n.is_multiple_of(block) {
                    if !handle.direct_only {
                        done += read_rest(
                            handle,
                            memory,
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
