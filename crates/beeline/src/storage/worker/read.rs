//! Reading a chunk, and starting its copies to the devices.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use beeline_core::addr::{ByteRange, align_down};
use beeline_core::plan::{ChunkRoute, StorageRoute};
use beeline_core::reason::Code;
use beeline_sys::file as sys;
use beeline_sys::mem::FileMap;

use super::super::file::File;
use super::direct::{may_fall_back, refuses_direct};
use super::flight::{Copies, Flight, Stage, Step};
use super::{Worker, choose, lost, stopped};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, Event, Stream};
use crate::memory::Slot;

impl Worker {
    pub(super) fn read(&mut self, index: usize, flight: &mut Flight) -> Result<Step> {
        if flight.job.is_stopped() {
            return Err(stopped());
        }
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let residency = file.prober().probe(file.buffered().as_fd(), chunk.want);
        flight.route = choose(&job, chunk, residency)?;
        if flight.route.route == StorageRoute::Direct {
            return self.submit(index, flight);
        }
        if !matches!(flight.route.why, Code::Resident | Code::MemoryBacked) {
            self.finish_direct(); // What follows may wait for a drive.
        }
        match flight.route.route {
            StorageRoute::MappedPageCache => self.read_mapped(flight),
            StorageRoute::ThreadPool => {
                self.read_blocking(flight, true)?;
                self.copy_in(flight)
            }
            _ => {
                self.read_blocking(flight, false)?;
                self.copy_in(flight)
            }
        }
    }

    /// Reads the rest of the chunk with system calls that wait.
    pub(super) fn read_blocking(&mut self, flight: &mut Flight, direct: bool) -> Result<()> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let need = chunk.want.end() - chunk.span.start;
        // Buffered reads ask for the bytes wanted only, direct ones for whole blocks.
        if !direct && flight.moved == 0 {
            flight.moved = chunk.want.start - chunk.span.start;
        }
        while flight.moved < need {
            let block = file.block_bytes();
            let direct = direct && flight.moved.is_multiple_of(block);
            let fd = if direct { file.direct() } else { file.buffered() };
            let end = if direct { chunk.span.len } else { need };
            let at = chunk.span.start + flight.moved;
            let slot = flight.slot.as_ref().and_then(Slot::memory).ok_or_else(lost)?;
            let moved = flight.moved;
            let n = self.blocking(|| {
                let most = file.faults().hit(end - moved)?;
                let n = sys::pread(fd.as_fd(), slot.mem(), moved, end - moved, at)?;
                Ok::<u64, io::Error>(n.min(most))
            });
            match n {
                Ok(0) => return Err(ended(file, at, chunk.want)),
                Ok(n) => flight.moved += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if direct && refuses_direct(&error) && may_fall_back(&job, chunk) => {
                    flight.route =
                        ChunkRoute { route: StorageRoute::PageCache, why: Code::DirectUnsupported };
                    return self.read_blocking(flight, false);
                }
                Err(error) => return Err(failed(file, chunk.want, error)),
            }
        }
        Ok(())
    }

    /// Lets the devices read the file's pages themselves.
    fn read_mapped(&mut self, flight: &mut Flight) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (chunk, pieces, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let page = beeline_sys::mem::page_size() as u64;
        let start = align_down(chunk.want.start, page);
        let len = usize::try_from(chunk.want.end() - start).map_err(|_| lost())?;
        let map = self
            .blocking(|| FileMap::new(file.buffered(), start, len))
            .map_err(|error| Error::at("map", file.path(), error))?;
        // Once for all: a registration is good for every device of its kind, and a second one of the same
        // pages is refused.
        let first = job.devices.first().ok_or_else(lost)?;
        let registered = first.gpu().register(Arc::new(map))?;
        Ok(self.copy_to_all(flight, &job.devices, |stream, device| {
            for piece in pieces {
                let from = chunk.span.start + piece.slot_offset - start;
                let to = piece.device_offset;
                stream.copy_mapped_to_device(device, to, &registered, from, piece.len)?;
            }
            Ok(())
        }))
    }

    /// Starts the copies of a chunk that lies in its slot.
    pub(super) fn copy_in(&mut self, flight: &mut Flight) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (_, pieces, _) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let memory = flight.slot.as_ref().and_then(Slot::memory).ok_or_else(lost)?.clone();
        Ok(self.copy_to_all(flight, &job.devices, |stream, device| {
            for piece in pieces {
                let (to, from) = (piece.device_offset, piece.slot_offset);
                stream.copy_to_device(device, to, &memory, from, piece.len)?;
            }
            Ok(())
        }))
    }

    /// Queues the copies of one chunk to every device. After a failure the chunk stays in flight
    /// until what was queued before has ended: until then the source belongs to the devices.
    fn copy_to_all(
        &mut self,
        flight: &mut Flight,
        devices: &[Buffer],
        queue: impl Fn(&Stream, &Buffer) -> Result<()>,
    ) -> Step {
        let mut copies = Copies::default();
        for device in devices {
            let (queued, event) = self.copy_to(device, &queue);
            if event.is_none() && queued.is_err() {
                flight.unsettled = true;
            }
            copies.events.extend(event);
            if let Err(error) = queued {
                copies.failed.get_or_insert(error);
                break;
            }
        }
        Step::On(Stage::Copying(copies))
    }

    /// The event is there where the stream could record one, also behind a copy that it refused.
    fn copy_to(
        &mut self,
        device: &Buffer,
        queue: impl Fn(&Stream, &Buffer) -> Result<()>,
    ) -> (Result<()>, Option<Event>) {
        let stream = match self.stream(device.gpu()) {
            Ok(stream) => stream,
            Err(error) => return (Err(error), None),
        };
        let queued = queue(stream, device);
        match (queued, stream.record()) {
            (queued, Ok(event)) => (queued, Some(event)),
            (Ok(()), Err(error)) | (Err(error), Err(_)) => (Err(error), None),
        }
    }
}

pub(super) fn ended(file: &File, at: u64, want: ByteRange) -> Error {
    Error::new(
        Kind::Corrupt,
        format!(
            "{} ended at byte {at}, but it had {} bytes when it was opened and {want} was asked for",
            file.path().display(),
            file.size()
        ),
    )
    .coded("file-changed")
    .remedy("read it again once its writer has finished")
}

pub(super) fn failed(file: &File, want: ByteRange, error: io::Error) -> Error {
    Error::io(format_args!("read bytes {want} of {}", file.path().display()), error)
}
