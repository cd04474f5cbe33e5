//! Writing a chunk: out of the device into its slot, out of the slot into the file.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use beeline_core::addr::{ByteRange, align_down};
use beeline_core::plan::{ChunkRoute, Residency, StorageRoute};
use beeline_core::reason::Code;
use beeline_core::transfer::{WriteSplit, split_write};
use beeline_sys::file as sys;
use beeline_sys::mem::page_size;

use super::super::Prober;
use super::super::file::File;
use super::direct::{may_fall_back, refuses_direct};
use super::flight::{Copies, Flight, Stage, Step};
use super::{Worker, choose, lost, stopped};
use crate::error::{Error, Result};
use crate::memory::Slot;

/// What memory and file must share for direct I/O: the slot starts at such a byte of the file.
const SLOT_ALIGN: u64 = 4096;

impl Worker {
    /// Starts the copies from the device into the slot.
    pub(super) fn copy_out(&mut self, flight: &mut Flight) -> Result<Step> {
        if flight.job.is_stopped() {
            return Err(stopped());
        }
        let job = Arc::clone(&flight.job);
        let (chunk, pieces, _) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let device = job.devices.first().ok_or_else(lost)?;
        let skip = chunk.want.start - base(chunk.want);
        let stream = self.stream(device.gpu())?;
        let memory = flight.slot.as_ref().and_then(Slot::memory).ok_or_else(lost)?;
        let queued = pieces.iter().try_for_each(|piece| {
            let at = skip + piece.slot_offset;
            stream.copy_to_host(memory, at, device, piece.device_offset, piece.len)
        });
        let copies = match (queued, stream.record()) {
            (queued, Ok(event)) => Copies { events: vec![event], failed: queued.err() },
            (queued, Err(error)) => {
                flight.unsettled = true;
                Copies { events: Vec::new(), failed: Some(queued.err().unwrap_or(error)) }
            }
        };
        Ok(Step::On(Stage::Copying(copies)))
    }

    /// Writes a chunk that lies in its slot.
    pub(super) fn write_out(&mut self, index: usize, flight: &mut Flight) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        // New bytes are not in the page cache, and pushing them through it only costs a copy.
        let residency = match file.prober() {
            Prober::Memory => Residency::Memory,
            _ => Residency::Cached { bytes: 0, of: chunk.want.len.max(1) },
        };
        flight.route = choose(&job, chunk, residency)?;
        let split = parts(chunk.want, file);
        let direct = matches!(flight.route.route, StorageRoute::Direct | StorageRoute::ThreadPool);
        if !direct || split.middle.is_empty() {
            if direct {
                flight.route = ChunkRoute { route: StorageRoute::PageCache, why: Code::Edge };
            }
            return self.write_blocking(flight);
        }
        for edge in [split.head, split.tail] {
            self.write_range(flight, edge, false)?;
        }
        if flight.route.route == StorageRoute::ThreadPool {
            return self.write_rest(flight);
        }
        self.submit(index, flight)
    }

    /// Writes what is left of the chunk's whole pages, with direct calls that wait.
    pub(super) fn write_rest(&mut self, flight: &mut Flight) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let middle = parts(chunk.want, file).middle;
        // A short write may end inside a block, which is then written again.
        let done = align_down(flight.moved, file.block_bytes()).min(middle.len);
        let rest = ByteRange { start: middle.start + done, len: middle.len - done };
        self.write_range(flight, rest, true)?;
        Ok(Step::Done)
    }

    /// Writes all of the chunk with buffered calls that wait.
    pub(super) fn write_blocking(&mut self, flight: &mut Flight) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, _) = job.chunk(flight.chunk).ok_or_else(lost)?;
        self.write_range(flight, chunk.want, false)?;
        Ok(Step::Done)
    }

    /// Writes `range`, a part of the chunk, with calls that wait. Where the file refuses direct I/O
    /// late, the rest goes through the page cache if the plan allows that.
    fn write_range(&mut self, flight: &mut Flight, range: ByteRange, direct: bool) -> Result<()> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let memory = flight.slot.as_ref().and_then(Slot::memory).ok_or_else(lost)?.clone();
        let base = base(chunk.want);
        let mut direct = direct;
        let mut at = range.start;
        while at < range.end() {
            let aligned = at.is_multiple_of(file.block_bytes());
            let fd = if direct && aligned { file.direct() } else { file.buffered() };
            let n = self.blocking(|| {
                let most = file.faults().hit(range.end() - at)?;
                let n = sys::pwrite(fd.as_fd(), memory.mem(), at - base, range.end() - at, at)?;
                Ok::<u64, io::Error>(n.min(most))
            });
            match n {
                Ok(0) => return Err(failed(file, range, io::ErrorKind::WriteZero.into())),
                // Part of a block: written again from its start, since half a block is no direct I/O.
                Ok(n) if direct && n < range.end() - at => {
                    let next = align_down(at + n, file.block_bytes());
                    direct = next > at;
                    at = next.max(at);
                }
                Ok(n) => at += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if direct && refuses_direct(&error) && may_fall_back(&job, chunk) => {
                    direct = false;
                    flight.route =
                        ChunkRoute { route: StorageRoute::PageCache, why: Code::DirectUnsupported };
                }
                Err(error) => return Err(failed(file, range, error)),
            }
        }
        Ok(())
    }
}

/// The file byte that lies at the start of the slot of a write.
pub(super) const fn base(want: ByteRange) -> u64 {
    align_down(want.start, SLOT_ALIGN)
}

/// The chunk's edges and whole pages: direct and buffered writes never share a page of this machine or
/// a block of the drive.
pub(super) fn parts(want: ByteRange, file: &File) -> WriteSplit {
    split_write(want, SLOT_ALIGN.max(page_size() as u64).max(file.block_bytes()))
}

pub(super) fn failed(file: &File, range: ByteRange, error: io::Error) -> Error {
    Error::io(format_args!("write bytes {range} of {}", file.path().display()), error)
}
