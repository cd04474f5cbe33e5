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
use super::{IN_FLIGHT, Means, PROBE_MIN, SEGMENT_ALIGN, failed, read_cached, read_rest};
use crate::lock;

/// Pieces of a write that one thread keeps in flight: the copies are much quicker than what follows them.
const WRITES_IN_FLIGHT: usize = 2;

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
    next: AtomicU64,
    /// Where the data ends, from `at`: the file may be shorter than asked for.
    end: AtomicU64,
    failed: std::sync::Mutex<Option<Failure>>,
    busy: AtomicUsize,
    caller: std::thread::Thread,
    stop: AtomicBool,
    /// A mapping could not be written: all is to be written again, the ordinary way.
    refused: AtomicBool,
    /// The caller's staging memory, where all pieces go into it and are copied at once.
    common: Option<Arc<HostMem>>,
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
            common: None,
        }
    }

    /// The whole request lies in the caller's lane, which threads fill or empty side by side, and one copy
    /// carries it all. Answers as [`Self::run`].
    pub(super) fn run_together(mut self, means: Means<'_>, most: usize) -> Outcome<Option<u64>> {
        let lanes = Arc::clone(&self.lanes);
        let mut held = lanes.acquire()?;
        self.common = Some(Arc::clone(held.lane()?.host()));
        let writes = matches!(self.way, Way::Write);
        let copy = Copy { into: !writes, device: self.to, at: 0, len: self.len };
        if writes && let Err(failure) = held.copy(copy) {
            held.settle(Some(&failure));
            return Err(failure);
        }
        let share = Arc::new(self);
        means.crew.enlist(&share, most, false);
        if let Err(failure) = share.work_together() {
            share.fail(failure);
        }
        share.join();
        if let Some(failure) = lock(&share.failed).take() {
            return Err(failure);
        }
        let n = share.end.load(Ordering::SeqCst);
        if writes {
            return Ok((!share.refused.load(Ordering::SeqCst)).then_some(n));
        }
        Routes::count(&share.handle.routes.cached, n);
        if n > 0
            && let Err(failure) = held.copy(Copy { len: n, ..copy })
        {
            held.settle(Some(&failure));
            return Err(failure);
        }
        Ok(Some(n))
    }

    /// Takes pieces and reads them to their places in the common memory, or writes them from there.
    fn work_together(&self) -> Outcome<()> {
        let Some(host) = &self.common else { return Ok(()) };
        while let Some(piece) = self.claim() {
            let start = piece * self.piece;
            let len = self.piece.min(self.len - start);
            if matches!(self.way, Way::Write) {
                self.write_piece(host, (start, start), len);
                continue;
            }
            let n = read_cached(&self.handle, host, start, self.at + start, len)?;
            if n < len {
                self.end.fetch_min(start + n, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    /// Carries the request out with up to `most` helpers; answers how many bytes the file had, for a write
    /// `None` where the mappings refused some.
    pub(super) fn run(self, means: Means<'_>, most: usize) -> Outcome<Option<u64>> {
        let force = means.force_direct || self.handle.direct_only;
        let helpers = usize::try_from(self.pieces - 1).unwrap_or(usize::MAX);
        let share = Arc::new(self);
        means.crew.enlist(&share, helpers.min(most), force);
        let worked = match share.lanes.acquire() {
            Ok(held) => share.work(held, force),
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

    /// A helper's part: whatever pieces are left, with a lane of its own, if there is one.
    pub(in super::super) fn help(&self, force: bool) {
        self.busy.fetch_add(1, Ordering::SeqCst);
        // Looked at after `busy`: the caller leaves only when nobody is busy and no piece is left.
        if self.next.load(Ordering::SeqCst) < self.pieces && !self.stop.load(Ordering::SeqCst) {
            let worked = match self.lane_to_help() {
                _ if self.common.is_some() => self.work_together(),
                Ok(Some(held)) => self.work(held, force),
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

    fn lane_to_help(&self) -> Outcome<Option<InUse<'_>>> {
        if self.common.is_some() { Ok(None) } else { self.lanes.try_acquire() }
    }

    /// Whether there is still something to help with.
    pub(in super::super) fn wants_help(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.pieces
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
            if turns < 4000 {
                std::hint::spin_loop();
            } else {
                // Helpers end with their piece; the timeout only guards against a lost wake-up.
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
    }

    fn claim(&self) -> Option<u64> {
        if self.stop.load(Ordering::SeqCst) {
            return None;
        }
        let piece = self.next.fetch_add(1, Ordering::SeqCst);
        (piece < self.pieces && piece * self.piece < self.end.load(Ordering::Relaxed))
            .then_some(piece)
    }

    /// Takes pieces until none is left, reading one while others are copied.
    fn work(&self, mut held: InUse<'_>, force: bool) -> Outcome<()> {
        let outcome = match self.way {
            Way::Write => self.write_in(&mut held),
            _ => self.work_in(&mut held, force),
        };
        if let Err(failure) = &outcome {
            held.settle(Some(failure));
        }
        outcome
    }

    fn work_in(&self, held: &mut InUse<'_>, force: bool) -> Outcome<()> {
        // A direct read may start up to a block early and end a block late.
        let segment = align_up(self.piece + 2 * self.handle.file.direct_block(), SEGMENT_ALIGN)
            .unwrap_or(self.piece);
        let segments =
            usize::try_from(held.lane()?.room() / segment).unwrap_or(1).clamp(1, IN_FLIGHT);
        let mut flying: VecDeque<Mark> = VecDeque::with_capacity(segments);
        let mut place = 0;
        while let Some(piece) = self.claim() {
            if flying.len() == segments
                && let Some(first) = flying.pop_front()
            {
                held.wait(first)?;
            }
            let from = place as u64 * segment;
            place = (place + 1) % segments;
            let start = piece * self.piece;
            let want = ByteRange { start: self.at + start, len: self.piece.min(self.len - start) };
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

    /// Takes pieces until none is left, copying one out of the device while another is written.
    fn write_in(&self, held: &mut InUse<'_>) -> Outcome<()> {
        let segments = usize::try_from(held.lane()?.room() / self.piece).unwrap_or(1);
        let segments = segments.clamp(1, WRITES_IN_FLIGHT);
        let mut flying: VecDeque<(u64, u64, Mark)> = VecDeque::with_capacity(segments);
        let mut place = 0;
        loop {
            while flying.len() < segments
                && let Some(piece) = self.claim()
            {
                let (start, into) = (piece * self.piece, place as u64 * self.piece);
                place = (place + 1) % segments;
                let device = self.to.checked_add(start).unwrap_or(self.to);
                let len = self.piece.min(self.len - start);
                let mark = held.start(Copy { into: false, device, at: into, len })?;
                flying.push_back((start, into, mark));
            }
            let Some((start, from, mark)) = flying.pop_front() else { return Ok(()) };
            held.wait(mark)?;
            self.write_piece(held.lane()?.host(), (from, start), self.piece.min(self.len - start));
        }
    }

    /// Writes a piece that lies at `from` in `memory`, and starts at `start` of the request.
    fn write_piece(&self, memory: &HostMem, (from, start): (u64, u64), len: u64) {
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
