//! Direct I/O by io_uring: started here, finished by the kernel.

use std::io;
use std::sync::Arc;

use beeline_core::plan::{ChunkRoute, Operation, StorageRoute};
use beeline_core::reason::Code;
use beeline_core::transfer::Chunk;
use beeline_sys::uring::{self, Direction, Uring};

use super::super::fault::IoEffect;
use super::super::job::Job;
use super::flight::{Flight, Stage, Step};
use super::{Worker, lost, read, write};
use crate::error::{Error, Result};
use crate::memory::Slot;

impl Worker {
    /// Starts the rest of a direct read, or of a direct write's middle, by io_uring.
    pub(super) fn submit(&mut self, index: usize, flight: &mut Flight) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let (direction, range, base) = match job.operation {
            Operation::Read => (Direction::Read, chunk.span, 0),
            Operation::Write => {
                let middle = write::parts(chunk.want, file).middle;
                (Direction::Write, middle, middle.start - write::base(chunk.want))
            }
        };
        let effect = match (&flight.stage, file.faults().strike()) {
            (Stage::Held(_), _) | (_, None) => None,
            (_, Some(IoEffect::Hang)) => {
                return Ok(Step::On(Stage::Held(file.faults().begin_hang())));
            }
            (_, effect) => effect,
        };
        if let Some(IoEffect::Errno(errno)) = effect {
            return self.after_failure(flight, io::Error::from_raw_os_error(errno));
        }
        let memory = flight.slot.as_ref().and_then(Slot::memory).ok_or_else(lost)?;
        let request = uring::Request {
            direction,
            file: Arc::clone(file.direct()),
            memory: Arc::clone(memory.mem()),
            offset: base + flight.moved,
            len: u32::try_from(range.len - flight.moved).map_err(|_| lost())?,
            at: range.start + flight.moved,
        };
        let depth = u32::try_from(self.shared.depth_per_worker()).unwrap_or(64);
        if self.held.ring.is_none() {
            match Uring::new(depth) {
                Ok(ring) => self.held.ring = Some(ring),
                Err(error) => return self.without_ring(flight, error),
            }
        }
        let Some(ring) = &mut self.held.ring else { return Err(lost()) };
        ring.submit(request, index as u64)
            .map_err(|error| Error::at("start direct I/O on", file.path(), error))?;
        Ok(Step::On(Stage::Io(effect)))
    }

    /// The ring that worked when the plan was made cannot be made now: read on this thread instead.
    ///
    /// Unless the caller insists on the route.
    fn without_ring(&mut self, flight: &mut Flight, error: io::Error) -> Result<Step> {
        let (chunk, _, file) = flight.job.chunk(flight.chunk).ok_or_else(lost)?;
        if !may_fall_back(&flight.job, chunk) {
            return Err(Error::at("set up io_uring for", file.path(), error));
        }
        tracing::warn!(%error, "io_uring is gone, direct I/O falls back to blocking calls");
        flight.route = ChunkRoute { route: StorageRoute::ThreadPool, why: Code::IoUringDenied };
        match flight.job.operation {
            Operation::Read => {
                self.read_blocking(flight, true)?;
                self.copy_in(flight)
            }
            Operation::Write => self.write_rest(flight),
        }
    }

    pub(super) fn after_io(
        &mut self,
        flight: &mut Flight,
        result: io::Result<u32>,
    ) -> Result<Step> {
        let moved = match (&flight.stage, result) {
            (Stage::Io(Some(IoEffect::Short(most))), Ok(n)) => u64::from(n).min(*most),
            (_, Ok(n)) => u64::from(n),
            (_, Err(error)) => return self.after_failure(flight, error),
        };
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        flight.moved += moved;
        if job.operation == Operation::Write {
            if moved == 0 {
                return Err(write::failed(file, chunk.want, io::ErrorKind::WriteZero.into()));
            }
            return self.write_rest(flight);
        }
        if moved == 0 && chunk.span.start + flight.moved < chunk.want.end() {
            return Err(read::ended(file, chunk.span.start + flight.moved, chunk.want));
        }
        // Short in the middle of a file: rare, and no longer on a block perhaps, so wait for the rest.
        self.read_blocking(flight, true)?;
        self.copy_in(flight)
    }

    fn after_failure(&mut self, flight: &mut Flight, error: io::Error) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        // The kernel cancels what a thread has started when the thread ends, also where another one
        // has taken it over.
        let cancelled = error.raw_os_error() == Some(rustix::io::Errno::CANCELED.raw_os_error());
        let again = cancelled
            || matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
        let fall_back = refuses_direct(&error) && may_fall_back(&job, chunk);
        if !again && !fall_back {
            return Err(match job.operation {
                Operation::Read => read::failed(file, chunk.want, error),
                Operation::Write => write::failed(file, chunk.want, error),
            });
        }
        if fall_back {
            flight.route =
                ChunkRoute { route: StorageRoute::PageCache, why: Code::DirectUnsupported };
        }
        match job.operation {
            Operation::Read => {
                self.read_blocking(flight, again)?;
                self.copy_in(flight)
            }
            Operation::Write if fall_back => self.write_blocking(flight),
            Operation::Write => self.write_rest(flight),
        }
    }
}

/// Whether the file refuses direct I/O as such, or this alignment.
pub(super) fn refuses_direct(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput
        || error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error())
}

/// Whether the plan allows the page cache beside a direct route.
pub(super) fn may_fall_back(job: &Job, chunk: &Chunk) -> bool {
    job.plan(chunk).is_some_and(|plan| plan.allows(StorageRoute::PageCache))
}
