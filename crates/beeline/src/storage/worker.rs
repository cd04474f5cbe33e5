//! A worker: reads or writes chunks and keeps several in flight.
//!
//! One thread, no callbacks. A chunk goes through stages: (reading ->) copying -> finished for a read,
//! copying -> writing -> finished for a write. While one chunk is copied by the device, the next is
//! read; direct reads are only started here and finish in the kernel, so one worker keeps many going.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::addr::{ByteRange, align_down};
use beeline_core::plan::{ChunkRoute, Operation, Residency, StorageRoute, route_chunk};
use beeline_core::reason::Code;
use beeline_core::transfer::split_write;
use beeline_sys::mem::FileMap;
use beeline_sys::uring::{self, Direction, Uring};
use beeline_sys::{file as sys, thread};

use super::engine::{Mark, Shared};
use super::fault::IoEffect;
use super::file::File;
use super::job::Job;
use super::report::RouteReport;
use crate::error::{Error, Kind, Result};
use crate::gpu::{DeviceId, Event, Stream};
use crate::memory::{Slot, stay_near};

/// Mapped chunks one worker has in flight: the next is registered while one is copied.
const MAPPED_IN_FLIGHT: usize = 2;
/// How long a worker looks at one kind of completion before it looks at the others.
const GLANCE: Duration = Duration::from_millis(1);
/// How long it waits where nothing else is likely to happen.
const LONG: Duration = Duration::from_millis(20);
/// Pages and blocks that direct and buffered writes must not share.
const WRITE_ALIGN: u64 = 4096;

pub(super) struct Worker {
    shared: Arc<Shared>,
    mark: Arc<Mark>,
    /// The worker whose place this one takes, until it has taken over what that one has in flight.
    stuck: Option<Arc<Mark>>,
    streams: Vec<(DeviceId, Stream)>,
    held: Held,
}

/// What one worker has in flight. It is left with its [`Mark`] during a call that may block, so that a
/// file that does not answer holds up nobody else's chunks: whoever takes the worker's place takes
/// them over.
#[derive(Default)]
pub(super) struct Held {
    /// Its tokens are indices of `flights`.
    ring: Option<Uring>,
    flights: Vec<Option<Flight>>,
}

/// A chunk in flight.
struct Flight {
    job: Arc<Job>,
    chunk: usize,
    slot: Option<Slot>,
    stage: Stage,
    route: ChunkRoute,
    /// Bytes of the read or write that have moved, from the start of its range.
    moved: u64,
    /// Whether the device may be writing the slot.
    filling: bool,
    cpu: Duration,
}

enum Stage {
    /// The kernel reads or writes by io_uring. The effect is applied to the answer (faults only).
    Io(Option<IoEffect>),
    /// An injected hang: started once it is released.
    Held(u64),
    /// The device copies; everything recorded here must have happened.
    Copying(Vec<Event>),
}

/// What became of a step.
enum Step {
    /// The chunk is in flight with this stage.
    On(Stage),
    /// The chunk has moved all its bytes.
    Done,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, mark: Arc<Mark>, stuck: Option<Arc<Mark>>) -> Self {
        Self { shared, mark, stuck, streams: Vec::new(), held: Held::default() }
    }

    pub(super) fn run(mut self) {
        if let Some(node) = self.shared.node {
            stay_near(node);
        }
        if let Some(held) = self.stuck.take().and_then(|stuck| stuck.take_over()) {
            self.held = held;
        }
        loop {
            let moved = self.reap_io() | self.retire_copies();
            if self.start_next() || moved {
                continue;
            }
            if self.in_flight() > 0 {
                self.await_flight();
            } else if !self.await_start() {
                break;
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.held.flights.iter().flatten().count()
    }

    /// Takes one more chunk, if there is one and room for it.
    fn start_next(&mut self) -> bool {
        let (wants_slot, wants_mapped) = self.shared.waiting();
        if !(wants_slot || wants_mapped) || self.in_flight() >= self.shared.depth_per_worker() {
            return false;
        }
        let mapped_in_flight =
            self.held.flights.iter().flatten().filter(|f| f.slot.is_none()).count();
        let mapped = wants_mapped && mapped_in_flight < MAPPED_IN_FLIGHT;
        if let Some((job, chunk, slot)) = self.shared.claim(mapped) {
            self.start(Flight::new(job, chunk, slot));
            return true;
        }
        // Asked again: what the claim found exhausted has left the queue.
        if !self.shared.waiting().0 {
            return false;
        }
        match self.shared.pool.grow() {
            Ok(grown) => grown,
            Err(error) => {
                self.shared.fail_waiting(error);
                true
            }
        }
    }

    /// Waits, with nothing in flight, until there may be something to start.
    fn await_start(&self) -> bool {
        if self.shared.waiting().0 {
            // A job is there but no slot: they come back one by one, so look again soon.
            self.shared.pool.await_slot();
        }
        self.shared.await_work(&self.mark)
    }

    /// Waits until something in flight may have moved on.
    fn await_flight(&mut self) {
        let copying = self.held.flights.iter().flatten().find_map(Flight::first_event).cloned();
        let reading = self.held.ring.as_ref().is_some_and(|ring| ring.in_flight() > 0);
        match (reading, copying) {
            (true, copying) => {
                let span = if copying.is_some() { GLANCE } else { LONG };
                if let Some(ring) = &mut self.held.ring
                    && ring.wait(span).is_err()
                {
                    // The kernel refuses to wait (out of memory for a moment); try again shortly.
                    std::thread::sleep(GLANCE);
                }
            }
            (false, Some(event)) => {
                let until = Instant::now() + LONG;
                // A timeout or a failure is seen by `retire_copies`.
                let _ = self.shared.blocking(&self.mark, || event.wait(until));
            }
            (false, None) => std::thread::sleep(GLANCE),
        }
    }

    /// Looks at what the kernel has finished.
    fn reap_io(&mut self) -> bool {
        let mut any = self.release_held();
        while let Some(done) = self.held.ring.as_mut().and_then(Uring::poll) {
            any = true;
            let Ok(index) = usize::try_from(done.token) else { continue };
            self.advance(index, |worker, flight| worker.after_io(flight, done.result));
        }
        any
    }

    /// Starts requests whose injected hang is over.
    fn release_held(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.held.flights.len() {
            let released =
                self.held.flights.get(index).and_then(Option::as_ref).is_some_and(|flight| {
                    let Stage::Held(ticket) = flight.stage else { return false };
                    flight.file().is_some_and(|file| file.faults().is_released(ticket))
                });
            if released {
                any = true;
                self.advance(index, |worker, flight| {
                    if let Some(file) = flight.file() {
                        file.faults().end_hang();
                    }
                    worker.submit(index, flight)
                });
            }
        }
        any
    }

    /// Looks at what the device has finished.
    fn retire_copies(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.held.flights.len() {
            let outcome = match self.held.flights.get_mut(index).and_then(Option::as_mut) {
                Some(Flight { stage: Stage::Copying(events), .. }) => settled(events),
                _ => continue,
            };
            if matches!(outcome, Ok(false)) {
                continue;
            }
            any = true;
            self.advance(index, |worker, flight| {
                outcome.map_err(|error| flight.copy_failed(error))?;
                flight.filling = false;
                match flight.job.operation {
                    Operation::Read => Ok(Step::Done),
                    Operation::Write => worker.write_out(index, flight),
                }
            });
        }
        any
    }

    /// Begins with a claimed chunk.
    fn start(&mut self, flight: Flight) {
        let index = match self.held.flights.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.held.flights.push(None);
                self.held.flights.len() - 1
            }
        };
        if let Some(place) = self.held.flights.get_mut(index) {
            *place = Some(flight);
        }
        self.advance(index, |worker, flight| match flight.job.operation {
            Operation::Read => worker.read(index, flight),
            Operation::Write => worker.copy_out(flight),
        });
    }

    /// Runs `call`, which may block for as long as a file does not answer.
    fn blocking<T>(&mut self, call: impl FnOnce() -> T) -> T {
        self.mark.leave_behind(std::mem::take(&mut self.held));
        let out = self.shared.blocking(&self.mark, call);
        // Nothing is left where another worker has taken this one's place meanwhile.
        self.held = self.mark.take_over().unwrap_or_default();
        out
    }

    /// Takes flight `index` through `step` and puts it back, or finishes it.
    fn advance(&mut self, index: usize, step: impl FnOnce(&mut Self, &mut Flight) -> Result<Step>) {
        let Some(mut flight) = self.held.flights.get_mut(index).and_then(Option::take) else {
            return;
        };
        let before = thread::cpu_time();
        let outcome = step(self, &mut flight);
        flight.cpu += thread::cpu_time().saturating_sub(before);
        match outcome {
            Ok(Step::On(stage)) => {
                flight.stage = stage;
                if index >= self.held.flights.len() {
                    self.held.flights.resize_with(index + 1, || None);
                }
                if let Some(place) = self.held.flights.get_mut(index) {
                    *place = Some(flight);
                }
            }
            Ok(Step::Done) => {
                let report = flight.report();
                flight.finish(Ok(report), &self.shared);
            }
            Err(error) => flight.finish(Err(error), &self.shared),
        }
    }

    // --- Reading --------------------------------------------------------------------------------

    fn read(&mut self, index: usize, flight: &mut Flight) -> Result<Step> {
        if flight.job.is_stopped() {
            return Err(stopped());
        }
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let residency = file.prober().probe(file.buffered().as_fd(), chunk.want);
        flight.route = choose(&job, chunk, residency)?;
        match flight.route.route {
            StorageRoute::MappedPageCache => self.read_mapped(flight),
            StorageRoute::Direct => self.submit(index, flight),
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
    fn read_blocking(&mut self, flight: &mut Flight, direct: bool) -> Result<()> {
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
                Err(error) => return Err(read_failed(file, chunk.want, error)),
            }
        }
        Ok(())
    }

    /// Starts the rest of a direct read, or of a direct write's middle, by io_uring.
    fn submit(&mut self, index: usize, flight: &mut Flight) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let (direction, range, base) = match job.operation {
            Operation::Read => (Direction::Read, chunk.span, 0),
            Operation::Write => {
                let middle = split_write(chunk.want, WRITE_ALIGN.max(file.block_bytes())).middle;
                (Direction::Write, middle, middle.start - write_base(chunk.want))
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
            Operation::Write => self.write_blocking(flight),
        }
    }

    fn after_io(&mut self, flight: &mut Flight, result: io::Result<u32>) -> Result<Step> {
        let moved = match (&flight.stage, result) {
            (Stage::Io(Some(IoEffect::Short(most))), Ok(n)) => u64::from(n).min(*most),
            (_, Ok(n)) => u64::from(n),
            (_, Err(error)) => return self.after_failure(flight, error),
        };
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        flight.moved += moved;
        if job.operation == Operation::Write {
            return self.after_write(flight, file, chunk.want, moved);
        }
        if moved == 0 && chunk.span.start + flight.moved < chunk.want.end() {
            return Err(ended(file, chunk.span.start + flight.moved, chunk.want));
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
                Operation::Read => read_failed(file, chunk.want, error),
                Operation::Write => write_failed(file, chunk.want, error),
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
            Operation::Write => self.write_blocking(flight),
        }
    }

    /// Lets the device read the file's pages themselves.
    fn read_mapped(&mut self, flight: &Flight) -> Result<Step> {
        let job = &flight.job;
        let (chunk, pieces, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let page = beeline_sys::mem::page_size() as u64;
        let start = align_down(chunk.want.start, page);
        let len = usize::try_from(chunk.want.end() - start).map_err(|_| lost())?;
        let map = self
            .shared
            .blocking(&self.mark, || FileMap::new(file.buffered(), start, len))
            .map_err(|error| Error::at("map", file.path(), error))?;
        let map = Arc::new(map);
        let mut events = Vec::new();
        for device in &job.devices {
            let registered = device.gpu().register(Arc::clone(&map))?;
            let stream = self.stream(device.gpu())?;
            for piece in pieces {
                let at = chunk.span.start + piece.slot_offset - start;
                stream.copy_mapped_to_device(
                    device,
                    piece.device_offset,
                    &registered,
                    at,
                    piece.len,
                )?;
            }
            events.push(stream.record()?);
        }
        Ok(Step::On(Stage::Copying(events)))
    }

    /// Starts the copies of a chunk that lies in its slot.
    fn copy_in(&mut self, flight: &Flight) -> Result<Step> {
        let (_, pieces, _) = flight.job.chunk(flight.chunk).ok_or_else(lost)?;
        let memory = flight.slot.as_ref().and_then(Slot::memory).ok_or_else(lost)?;
        let mut events = Vec::new();
        for device in &flight.job.devices {
            let stream = self.stream(device.gpu())?;
            for piece in pieces {
                stream.copy_to_device(
                    device,
                    piece.device_offset,
                    memory,
                    piece.slot_offset,
                    piece.len,
                )?;
            }
            events.push(stream.record()?);
        }
        Ok(Step::On(Stage::Copying(events)))
    }

    // --- Writing --------------------------------------------------------------------------------

    /// Starts the copies from the device into the slot.
    fn copy_out(&mut self, flight: &mut Flight) -> Result<Step> {
        if flight.job.is_stopped() {
            return Err(stopped());
        }
        let job = Arc::clone(&flight.job);
        let (chunk, pieces, _) = job.chunk(flight.chunk).ok_or_else(lost)?;
        let device = job.devices.first().ok_or_else(lost)?;
        let base = chunk.want.start - write_base(chunk.want);
        let stream = self.stream(device.gpu())?;
        flight.filling = true;
        let memory = flight.slot.as_ref().and_then(Slot::memory).ok_or_else(lost)?;
        for piece in pieces {
            let at = base + piece.slot_offset;
            stream.copy_to_host(memory, at, device, piece.device_offset, piece.len)?;
        }
        Ok(Step::On(Stage::Copying(vec![stream.record()?])))
    }

    /// Writes a chunk that lies in its slot.
    fn write_out(&mut self, index: usize, flight: &mut Flight) -> Result<Step> {
        let job = Arc::clone(&flight.job);
        let (chunk, _, file) = job.chunk(flight.chunk).ok_or_else(lost)?;
        // New bytes are not in the page cache, and pushing them through it only costs a copy.
        let residency = match file.prober() {
            super::Prober::Memory => Residency::Memory,
            _ => Residency::Cached { bytes: 0, of: chunk.want.len.max(1) },
        };
        flight.route = choose(&job, chunk, residency)?;
        let split = split_write(chunk.want, WRITE_ALIGN.max(file.block_bytes()));
        let direct = matches!(flight.route.route, StorageRoute::Direct | StorageRoute::ThreadPool);
        if !direct || split.middle.is_empty() {
            if direct {
                flight.route = ChunkRoute { route: StorageRoute::PageCache, why: Code::Edge };
            }
            return self.write_blocking(flight);
        }
        for edge in [split.head, split.tail] {
            self.write_range(flight, file, edge, chunk.want, false)?;
        }
        if flight.route.route == StorageRoute::ThreadPool {
            self.write_range(flight, file, split.middle, chunk.want, true)?;
            return Ok(Step::Done);
        }
        self.submit(index, flight)
    }

    fn after_write(
        &mut self,
        flight: &mut Flight,
        file: &File,
        want: ByteRange,
        moved: u64,
    ) -> Result<Step> {
        let middle = split_write(want, WRITE_ALIGN.max(file.block_bytes())).middle;
        if moved == 0 {
            return Err(write_failed(file, want, io::ErrorKind::WriteZero.into()));
        }
        if flight.moved >= middle.len {
            return Ok(Step::Done);
        }
        self.write_blocking(flight)
    }

    /// Writes all of the chunk with buffered calls that wait.
    fn write_blocking(&mut self, flight: &Flight) -> Result<Step> {
        let (chunk, _, file) = flight.job.chunk(flight.chunk).ok_or_else(lost)?;
        self.write_range(flight, file, chunk.want, chunk.want, false)?;
        Ok(Step::Done)
    }

    /// Writes `range`, a part of the chunk's bytes `want`, with calls that wait.
    fn write_range(
        &mut self,
        flight: &Flight,
        file: &File,
        range: ByteRange,
        want: ByteRange,
        direct: bool,
    ) -> Result<()> {
        let memory = flight.slot.as_ref().and_then(Slot::memory).ok_or_else(lost)?;
        let fd = if direct { file.direct() } else { file.buffered() };
        let mut at = range.start;
        while at < range.end() {
            let n = self.blocking(|| {
                let most = file.faults().hit(range.end() - at)?;
                let from = at - write_base(want);
                let n = sys::pwrite(fd.as_fd(), memory.mem(), from, range.end() - at, at)?;
                Ok::<u64, io::Error>(n.min(most))
            });
            match n {
                Ok(0) => return Err(write_failed(file, range, io::ErrorKind::WriteZero.into())),
                Ok(n) => at += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(write_failed(file, range, error)),
            }
        }
        Ok(())
    }

    /// This worker's stream on `gpu`.
    fn stream(&mut self, gpu: crate::gpu::Gpu) -> Result<&Stream> {
        let id = gpu.id();
        let index = match self.streams.iter().position(|(known, _)| *known == id) {
            Some(index) => index,
            None => {
                self.streams.push((id, gpu.stream()?));
                self.streams.len() - 1
            }
        };
        self.streams.get(index).map(|(_, stream)| stream).ok_or_else(lost)
    }
}

impl Flight {
    fn new(job: Arc<Job>, chunk: usize, slot: Option<Slot>) -> Self {
        let route = ChunkRoute { route: StorageRoute::PageCache, why: Code::OnlyRoute };
        let stage = Stage::Io(None);
        Self { job, chunk, slot, stage, route, moved: 0, filling: false, cpu: Duration::ZERO }
    }

    fn file(&self) -> Option<&Arc<File>> {
        self.job.chunk(self.chunk).map(|(_, _, file)| file)
    }

    /// What to say of a copy that failed: a device that reads the file's own pages fails where the
    /// file shrank, and then the file is what its owner must hear of.
    fn copy_failed(&self, error: Error) -> Error {
        if self.route.route != StorageRoute::MappedPageCache {
            return error;
        }
        match self.file().map(|file| file.check_unchanged()) {
            Some(Err(changed)) => changed.because(error),
            _ => error,
        }
    }

    fn first_event(&self) -> Option<&Event> {
        match &self.stage {
            Stage::Copying(events) => events.first(),
            _ => None,
        }
    }

    fn report(&self) -> RouteReport {
        let ChunkRoute { route, why } = self.route;
        let bytes = self.job.chunk(self.chunk).map_or(0, |(chunk, _, _)| chunk.bytes);
        RouteReport { route, why, bytes, chunks: 1, cpu: self.cpu }
    }

    /// Tells the job, after the slot can be used by others.
    fn finish(self, outcome: Result<RouteReport>, shared: &Shared) {
        let Self { job, slot, stage, filling, .. } = self;
        drop(stage);
        if slot.is_some() {
            job.release_slot(shared);
        }
        // First the slot, then the job: a caller that saw the job finish must find the slot idle.
        match slot {
            // The device failed and may still write the memory; nobody else gets it.
            Some(slot) if filling => slot.discard(),
            slot => drop(slot),
        }
        job.finish(outcome, shared);
    }
}

/// Drops the events that are done; true when all are.
fn settled(events: &mut Vec<Event>) -> Result<bool> {
    while let Some(event) = events.last() {
        if !event.is_done()? {
            return Ok(false);
        }
        events.pop();
    }
    Ok(true)
}

fn choose(
    job: &Job,
    chunk: &beeline_core::transfer::Chunk,
    residency: Residency,
) -> Result<ChunkRoute> {
    job.plan(chunk).and_then(|plan| route_chunk(plan, residency)).ok_or_else(lost)
}

/// The file byte that lies at the start of the slot of a write: direct I/O needs memory and file
/// aligned alike.
const fn write_base(want: ByteRange) -> u64 {
    align_down(want.start, WRITE_ALIGN)
}

fn refuses_direct(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput
        || error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error())
}

/// Whether the plan allows the page cache beside a direct route.
fn may_fall_back(job: &Job, chunk: &beeline_core::transfer::Chunk) -> bool {
    job.plan(chunk).is_some_and(|plan| plan.allows(StorageRoute::PageCache))
}

fn ended(file: &File, at: u64, want: ByteRange) -> Error {
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

fn read_failed(file: &File, want: ByteRange, error: io::Error) -> Error {
    Error::io(format_args!("read bytes {want} of {}", file.path().display()), error)
}

fn write_failed(file: &File, range: ByteRange, error: io::Error) -> Error {
    Error::io(format_args!("write bytes {range} of {}", file.path().display()), error)
}

fn stopped() -> Error {
    Error::new(Kind::Cancelled, "the transfer was stopped")
}

/// A state that cannot be: an index of ours that names nothing.
fn lost() -> Error {
    Error::new(Kind::Io, "internal: a chunk in flight lost its place")
}
