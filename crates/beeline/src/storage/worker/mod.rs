//! A worker: reads or writes chunks and keeps several in flight.
//!
//! One thread, no callbacks. A chunk goes through stages: (reading ->) copying -> finished for a read,
//! copying -> writing -> finished for a write. While one chunk is copied by the device, the next is
//! read; direct reads are only started here and finish in the kernel, so one worker keeps many going.

mod direct;
mod flight;
mod read;
mod write;

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::plan::{ChunkRoute, Operation, Residency, route_chunk};
use beeline_core::transfer::Chunk;
use beeline_sys::thread;
use beeline_sys::uring::Uring;

use self::flight::{Flight, Stage, Step};
use super::engine::{Mark, Shared};
use super::job::Job;
use super::report::RouteReport;
use crate::error::{Error, Kind, Result};
use crate::gpu::{Gpu, Stream};
use crate::memory::stay_near;

/// Mapped chunks one worker has in flight: the next is registered while one is copied.
const MAPPED_IN_FLIGHT: usize = 2;
/// How long a worker looks at one kind of completion before it looks at the others.
const GLANCE: Duration = Duration::from_millis(1);
/// How long it waits where nothing else is likely to happen.
const LONG: Duration = Duration::from_millis(20);
/// How long a worker lets its direct reads finish before it makes a call that may wait for a drive.
const DRAIN: Duration = Duration::from_secs(1);

pub(super) struct Worker {
    shared: Arc<Shared>,
    mark: Arc<Mark>,
    /// The worker whose place this one takes, until it has taken over what that one has in flight.
    stuck: Option<Arc<Mark>>,
    streams: Vec<(Gpu, Stream)>,
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
            let failed = match self.held.flights.get_mut(index).and_then(Option::as_mut) {
                Some(Flight { stage: Stage::Copying(copies), .. }) => {
                    if !copies.settled() {
                        continue;
                    }
                    copies.failed.take()
                }
                _ => continue,
            };
            any = true;
            self.advance(index, |worker, flight| {
                if let Some(error) = failed {
                    // A stream that failed once fails for ever; the next chunk gets a new one.
                    worker.drop_streams(&flight.job);
                    return Err(flight.copy_failed(error));
                }
                flight.unsettled = false;
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
        self.held = match self.mark.take_over() {
            Some(held) => {
                // It was to be replaced, but came back first: it stays, and can be replaced again.
                self.mark.stay();
                held
            }
            None => Held::default(),
        };
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
                self.finish(flight, Ok(report));
            }
            Err(error) => self.finish(flight, Err(error)),
        }
    }

    fn finish(&mut self, flight: Flight, outcome: Result<RouteReport>) {
        if let Some(job) = flight.finish(outcome, &self.shared) {
            let written = self.blocking(|| job.write_back());
            job.synced(written, &self.shared);
        }
    }

    /// Lets the direct reads in flight finish, for a while. The kernel hands a completion to the thread
    /// that started the request, so a thread that a dead drive holds in a system call would hold back
    /// what it has started for others too.
    fn finish_direct(&mut self) {
        let until = Instant::now() + DRAIN;
        while self.held.ring.as_ref().is_some_and(|ring| ring.in_flight() > 0)
            && Instant::now() < until
        {
            self.await_flight();
            self.reap_io();
        }
    }

    /// This worker's stream on `gpu`.
    fn stream(&mut self, gpu: Gpu) -> Result<&Stream> {
        let index = match self.streams.iter().position(|(known, _)| known.same_device(&gpu)) {
            Some(index) => index,
            None => {
                let stream = gpu.stream()?;
                self.streams.push((gpu, stream));
                self.streams.len() - 1
            }
        };
        self.streams.get(index).map(|(_, stream)| stream).ok_or_else(lost)
    }

    /// Lets go of this worker's streams on the devices of `job`.
    fn drop_streams(&mut self, job: &Job) {
        self.streams
            .retain(|(gpu, _)| !job.devices.iter().any(|device| device.gpu().same_device(gpu)));
    }
}

fn choose(job: &Job, chunk: &Chunk, residency: Residency) -> Result<ChunkRoute> {
    job.plan(chunk).and_then(|plan| route_chunk(plan, residency)).ok_or_else(lost)
}

fn stopped() -> Error {
    Error::new(Kind::Cancelled, "the transfer was stopped")
}

/// A state that cannot be: an index of ours that names nothing.
fn lost() -> Error {
    Error::new(Kind::Io, "internal: a chunk in flight lost its place")
}
