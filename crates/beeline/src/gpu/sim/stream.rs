//! Streams of the simulated device: one thread each, operations in order.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use beeline_sys::mem::{HostMem, OutOfBounds};

use super::{Allocation, Device, Kernel, Site, device_error};
use crate::error::{Error, Kind, Result};
use crate::gpu::buffer::{PinnedMem, RegisteredMap};
use crate::gpu::stream::Compare;
use crate::{lock, wait_timeout};

/// Operations a stream holds before the caller waits for room.
const QUEUE_MAX: usize = 1024;
/// How long a caller waits for room before the stream counts as hung.
const ROOM_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a dropped stream goes on waiting for a word or event that never comes.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(10);

/// One operation.
pub(crate) enum Op {
    Copy {
        dst: Place,
        src: Place,
        len: u64,
    },
    Fill {
        dst: Place,
        len: u64,
        value: u8,
    },
    WriteValue {
        dst: Place,
        value: u32,
    },
    WaitValue {
        src: Place,
        value: u32,
        compare: Compare,
    },
    Kernel(Kernel),
    /// Work of the embedder's.
    Call(Box<dyn Fn() -> Result<()> + Send>),
    Record(Event),
    WaitEvent(Event),
}

/// Memory an operation touches, kept alive by it.
pub(crate) struct Place {
    memory: Memory,
    offset: u64,
}

enum Memory {
    Device(Arc<Allocation>),
    Pinned(PinnedMem),
    Mapped(RegisteredMap),
}

impl Place {
    pub(crate) fn device(allocation: &Arc<Allocation>, offset: u64) -> Self {
        Self { memory: Memory::Device(Arc::clone(allocation)), offset }
    }

    pub(crate) fn pinned(pinned: &PinnedMem, offset: u64, len: u64) -> Result<Self> {
        inside(offset, len, pinned.len())?;
        Ok(Self { memory: Memory::Pinned(pinned.clone()), offset })
    }

    pub(crate) fn mapped(map: &RegisteredMap, offset: u64, len: u64) -> Result<Self> {
        inside(offset, len, map.map().len())?;
        Ok(Self { memory: Memory::Mapped(map.clone()), offset })
    }

    pub(crate) fn aligned(self, align: u64) -> Result<Self> {
        if self.offset.is_multiple_of(align) {
            return Ok(self);
        }
        Err(Error::refused(format!("offset {} is not a multiple of {align}", self.offset)))
    }

    /// Runs `work` on the memory while it stays where it is. A mapped file has no CPU access.
    fn with<T>(&self, work: impl FnOnce(&HostMem) -> Result<T, OutOfBounds>) -> Result<T> {
        match &self.memory {
            Memory::Device(allocation) => Ok(allocation.with(work)?),
            Memory::Pinned(pinned) => Ok(work(pinned.mem())?),
            Memory::Mapped(_) => Err(Error::refused("a mapped file can only be copied from")),
        }
    }
}

fn inside(offset: u64, len: u64, size: u64) -> Result<()> {
    if offset > size || len > size - offset {
        return Err(OutOfBounds { offset, len, size }.into());
    }
    Ok(())
}

/// The queue's owning end. Dropping it lets the thread finish what is queued.
pub(crate) struct Stream {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Op>,
    closed_at: Option<Instant>,
    failed: Option<Failure>,
}

/// The first failure of a stream, repeated to everybody who asks.
#[derive(Clone, Debug)]
struct Failure {
    kind: Kind,
    text: Arc<str>,
}

impl Failure {
    fn of(error: &Error) -> Self {
        Self { kind: error.kind(), text: error.to_string().into() }
    }

    fn error(&self) -> Error {
        Error::new(self.kind, &*self.text)
    }
}

impl Stream {
    pub(super) fn new(device: Device) -> Result<Self> {
        let shared = Arc::new(Shared { device, state: Mutex::default(), changed: Condvar::new() });
        let worker = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("beeline-sim".to_owned())
            .spawn(move || worker.run())
            .map_err(|error| Error::io("start the thread of a simulated stream", error))?;
        Ok(Self { shared })
    }

    pub(crate) fn push(&self, op: Op) -> Result<()> {
        let deadline = Instant::now() + ROOM_TIMEOUT;
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(failure) = &state.failed {
                return Err(failure.error());
            }
            if state.queue.len() < QUEUE_MAX {
                state.queue.push_back(op);
                self.shared.changed.notify_all();
                return Ok(());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(device_error(format!(
                    "a simulated stream took no operation for {} s",
                    ROOM_TIMEOUT.as_secs()
                )));
            }
            state = wait_timeout(&self.shared.changed, state, deadline - now);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        lock(&self.shared.state).closed_at = Some(Instant::now());
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sim::Stream")
    }
}

impl Shared {
    fn run(&self) {
        while let Some(op) = self.next() {
            let failed = lock(&self.state).failed.clone();
            match (op, failed) {
                (Op::Record(event), failed) => event.finish(failed),
                (_, Some(_)) => {}
                (op, None) => {
                    if let Err(error) = self.execute(&op) {
                        lock(&self.state).failed = Some(Failure::of(&error));
                    }
                    // The memory of `op` is let go here, before the next operation starts.
                }
            }
        }
    }

    fn next(&self) -> Option<Op> {
        let mut state = lock(&self.state);
        loop {
            if let Some(op) = state.queue.pop_front() {
                self.changed.notify_all();
                return Some(op);
            }
            if state.closed_at.is_some() {
                return None;
            }
            state = wait_timeout(&self.changed, state, Duration::from_secs(3600));
        }
    }

    fn execute(&self, op: &Op) -> Result<()> {
        match op {
            Op::Copy { dst, src, len } => self.copy(dst, src, *len),
            Op::Fill { dst, len, value } => dst.with(|mem| mem.fill(dst.offset, *len, *value)),
            Op::WriteValue { dst, value } => dst.with(|mem| mem.store_u32(dst.offset, *value)),
            Op::WaitValue { src, value, compare } => self.poll("a memory word", || {
                Ok(compare.matches(src.with(|mem| mem.load_u32(src.offset))?, *value))
            }),
            Op::Kernel(kernel) => {
                self.device.faults().hit(Site::Kernel)?;
                kernel.run()
            }
            Op::Call(work) => {
                self.device.faults().hit(Site::Kernel)?;
                work()
            }
            Op::WaitEvent(event) => self.poll("an event", || event.is_done()),
            Op::Record(event) => {
                event.finish(None);
                Ok(())
            }
        }
    }

    fn copy(&self, dst: &Place, src: &Place, len: u64) -> Result<()> {
        let corrupt = self.device.faults().hit(Site::Copy)?;
        match (&dst.memory, &src.memory) {
            (Memory::Device(allocation), Memory::Mapped(map)) => {
                allocation.fill_from_map(dst.offset, map, src.offset, len)?;
            }
            (Memory::Device(into), Memory::Device(from)) => {
                Allocation::with_both(into, from, |into, from| {
                    into.copy_from(dst.offset, from, src.offset, len)
                })?;
            }
            _ => src.with(|from| {
                Ok(dst.with(|into| into.copy_from(dst.offset, from, src.offset, len)))
            })??,
        }
        if corrupt && len > 0 {
            let mut byte = [0];
            dst.with(|mem| mem.read(dst.offset, &mut byte))?;
            dst.with(|mem| mem.write(dst.offset, &[!byte[0]]))?;
        }
        Ok(())
    }

    /// Asks `ready` until it says yes, ever more slowly; gives up some time after the stream was
    /// dropped, when nobody can be waiting any more.
    fn poll(&self, what: &str, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
        let mut pause = Duration::from_micros(1);
        while !ready()? {
            if let Some(closed_at) = lock(&self.state).closed_at
                && closed_at.elapsed() > ORPHAN_TIMEOUT
            {
                return Err(device_error(format!("a dropped stream gave up waiting for {what}")));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// A point in a stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Event {
    inner: Arc<EventInner>,
}

#[derive(Debug, Default)]
struct EventInner {
    outcome: Mutex<Option<Option<Failure>>>,
    reached: Condvar,
}

impl Event {
    fn finish(&self, failed: Option<Failure>) {
        *lock(&self.inner.outcome) = Some(failed);
        self.inner.reached.notify_all();
    }

    pub(crate) fn is_done(&self) -> Result<bool> {
        match &*lock(&self.inner.outcome) {
            None => Ok(false),
            Some(None) => Ok(true),
            Some(Some(failure)) => Err(failure.error()),
        }
    }

    pub(crate) fn wait(&self, deadline: Instant) -> Result<()> {
        let mut outcome = lock(&self.inner.outcome);
        loop {
            match &*outcome {
                Some(None) => return Ok(()),
                Some(Some(failure)) => return Err(failure.error()),
                None => {}
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::new(Kind::Timeout, "the device did not finish by the deadline"));
            }
            outcome = wait_timeout(&self.inner.reached, outcome, deadline - now);
        }
    }
}
