//! The file's part of a request whose bytes are copied by somebody else: pieces read into pinned memory, or written
//! from there. Waits for no device.

use std::io;
use std::sync::Arc;

use beeline_core::addr::{ByteRange, DevicePtr};
use beeline_core::plan::Operation;
use beeline_sys::file as sys;
use beeline_sys::mem::HostMem;

use super::super::handle::{Handle, Routes};
use super::super::lanes::Lanes;
use super::super::mapped::Mapped;
use super::super::status::{Failure, Outcome};
use super::out::{fill, write_cached};
use super::share::{Way, read_direct};
use super::{MEDIUM_MAX, Means, SINGLE_MAX, failed, read_cached};

/// Threads that read a medium request, and that write one through mappings.
const READERS: usize = 4;
const WRITERS: usize = 3;
/// Threads at a larger one, for each that the settings allow to a request: its parts are copied by nobody of them.
const LARGE: usize = 2;

/// One request.
pub(in super::super) struct Job {
    handle: Arc<Handle>,
    way: Way,
    force: bool,
    /// Written through mappings, as far as they take it.
    mapped: bool,
    /// Its bytes lie in memory as in the blocks of the file, so that it may be read past the page cache.
    blocks: bool,
    pub(in super::super) device: DevicePtr,
    /// Of the file.
    pub(in super::super) range: ByteRange,
    /// Most threads that are of use.
    pub(in super::super) threads: usize,
}

/// How far a piece came.
pub(in super::super) struct Piece {
    /// Bytes from its start.
    pub(in super::super) done: u64,
    /// Why there were not more, unless the file has or takes no more.
    pub(in super::super) failure: Option<Failure>,
}

impl Job {
    /// `range` of a file, between `device` and whoever copies there.
    pub(in super::super) fn new(
        means: Means<'_>,
        (handle, lanes): (Arc<Handle>, &Lanes),
        operation: Operation,
        device: DevicePtr,
        range: ByteRange,
    ) -> Self {
        let force = means.force_direct || handle.direct_only;
        if operation == Operation::Write {
            let crowded = |mapped: &Mapped| mapped.enter().crowded;
            let worth = |mapped: &Mapped| range.len > SINGLE_MAX || crowded(mapped);
            let takes = |mapped: &Mapped| mapped.fits(handle.data(), &handle.file, range);
            let mapped = means.parallel > 1
                && handle.mapped.as_ref().is_some_and(|mapped| worth(mapped) && takes(mapped));
            let threads = match (mapped, range.len) {
                (false, _) => 1,
                (true, ..=MEDIUM_MAX) => WRITERS.min(means.parallel),
                (true, _) => LARGE * means.parallel,
            };
            let (way, blocks) = (Way::Write, false);
            return Self { handle, way, force, mapped, blocks, device, range, threads };
        }
        let way = Way::choose(means, &handle, lanes, range.start, range.len);
        let threads = match (range.len, &way) {
            (..=MEDIUM_MAX, Way::Cached) => READERS.min(means.parallel),
            (..=MEDIUM_MAX, _) => means.parallel,
            _ => LARGE * means.parallel,
        };
        let (mapped, blocks, threads) = (false, false, threads.max(1));
        Self { handle, way, force, mapped, blocks, device, range, threads }
    }

    #[cfg(test)]
    pub(in super::super) const fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    /// Of a file that nobody reads or writes: for whoever plays the threads.
    #[cfg(test)]
    pub(in super::super) fn played(
        handle: Arc<Handle>,
        operation: Operation,
        threads: usize,
        len: u64,
    ) -> Self {
        let way = if operation == Operation::Write { Way::Write } else { Way::Cached };
        let (force, mapped, blocks) = (false, threads > 1, false);
        let (device, range) = (DevicePtr::new(0x1000), ByteRange { start: 0, len });
        Self { handle, way, force, mapped, blocks, device, range, threads }
    }

    pub(in super::super) const fn is_write(&self) -> bool {
        matches!(self.way, Way::Write)
    }

    /// Whether more than one thread may be at it.
    pub(in super::super) const fn is_shared(&self) -> bool {
        self.threads > 1
    }

    /// Where in the first cell, of `cell` bytes, the first byte is to lie. A copy is quick where that agrees with the
    /// device's address modulo 16; what may be read past the page cache lies as in the file's blocks.
    pub(in super::super) fn lay_out(&mut self, cell: u64) -> u64 {
        let block = self.handle.file.direct_block().max(1);
        self.blocks = matches!(self.way, Way::Asked(_)) && cell.is_multiple_of(block);
        if self.blocks || self.handle.direct_only {
            // Whoever writes past the page cache needs that too.
            self.range.start % block % cell
        } else {
            self.device.as_u64() % 16
        }
    }

    /// Reads or writes the piece from `start` of the request on, which lies in `memory` at `place`. A piece other than the
    /// first one starts a cell.
    pub(in super::super) fn piece(
        &self,
        memory: &HostMem,
        place: u64,
        start: u64,
        len: u64,
    ) -> Piece {
        let range = ByteRange { start: self.range.start.saturating_add(start), len };
        if self.is_write() {
            return self.write(memory, place, range);
        }
        match self.read(memory, place, range) {
            Ok(done) => Piece { done, failure: None },
            Err(failure) => Piece { done: 0, failure: Some(failure) },
        }
    }

    /// Reads a piece as [`Self::piece`] does, if that takes no waiting for a drive: through the page cache, where all of it is.
    pub(in super::super) fn piece_now(
        &self,
        memory: &HostMem,
        place: u64,
        start: u64,
        len: u64,
    ) -> Option<Piece> {
        if !matches!(self.way, Way::Cached) || self.force {
            return None;
        }
        let at = self.range.start.saturating_add(start);
        let done = sys::pread_now(self.handle.data(), memory, place, len, at);
        let done = done.ok().filter(|done| *done == len)?;
        Routes::count(&self.handle.routes.cached, done);
        Some(Piece { done, failure: None })
    }

    fn read(&self, memory: &HostMem, place: u64, range: ByteRange) -> Outcome<u64> {
        let handle = &*self.handle;
        if self.blocks && self.way.is_direct(handle, self.force, range) {
            let skip = range.start % handle.file.direct_block().max(1);
            match read_direct(handle, memory, place.saturating_sub(skip), range) {
                Ok((_, n)) => {
                    Routes::count(&handle.routes.direct, n);
                    return Ok(n);
                }
                // This file refuses direct I/O after all.
                Err(error)
                    if error.kind() == io::ErrorKind::InvalidInput && !handle.direct_only => {}
                Err(error) => return Err(failed("read", handle, range.start, range.len, &error)),
            }
        }
        let n = read_cached(handle, memory, place, range.start, range.len)?;
        Routes::count(&handle.routes.cached, n);
        Ok(n)
    }

    fn write(&self, memory: &HostMem, place: u64, range: ByteRange) -> Piece {
        let handle = &*self.handle;
        // Counted as long as it takes, whichever way it goes.
        let _writing = handle.mapped.as_ref().map(Mapped::enter);
        let first = (range.start == self.range.start).then_some(self.range.len);
        if self.mapped {
            match fill(handle, memory, place, range, first) {
                Ok(()) => {
                    Routes::count(&handle.routes.mapped, range.len);
                    return Piece { done: range.len, failure: None };
                }
                Err(error) => {
                    tracing::debug!(%error, "a mapping was not written; the file is, the ordinary way");
                }
            }
        }
        match write_cached(handle, memory, place, range.start, range.len) {
            Ok(done) => {
                Routes::count(&handle.routes.written, done);
                Piece { done, failure: None }
            }
            Err(error) => {
                let failure = failed("write", handle, range.start, range.len, &error);
                Piece { done: 0, failure: Some(failure) }
            }
        }
    }
}
