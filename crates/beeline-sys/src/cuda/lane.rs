//! A lane: a stream of its own over one piece of pinned memory, for copies to and from device addresses
//! that somebody else owns. Made for small copies that one thread waits for: few driver calls, and no
//! call at all to see that a copy is done.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use beeline_core::addr::DevicePtr;

use super::device::{Context, Current};
use super::error::Error;
use super::memory::size;
use super::registration::HostRegistration;
use super::types::*;
use crate::mem::HostMem;

/// Bytes at the end of a lane's memory that it keeps for itself.
const FLAG_BYTES: u64 = 4096;
/// Marks that may be outstanding where events stand for them.
const EVENTS: usize = 16;
/// Asked of the driver, which takes the nearest priority it has: copies of a lane are waited for.
const PRIORITY: i32 = -10;

/// How the end of copies is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// The stream writes a word of pinned memory; looking at it needs no driver call.
    Word,
    /// An event.
    Event,
}

/// A point in a lane; copies before it are done once it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    number: u32,
    marking: Marking,
}

/// A stream of the highest priority that the default stream does not hold up.
fn stream(context: &Context) -> Result<RawStream, Error> {
    let table = context.table();
    let _current = context.enter()?;
    let mut raw = RawStream::NULL;
    let result = match table.cuStreamCreateWithPriority {
        // SAFETY: `raw` is a place for one stream; a context is current.
        Some(create) => unsafe { create(&raw mut raw, STREAM_NON_BLOCKING, PRIORITY) },
        // SAFETY: as above.
        None => unsafe { (table.cuStreamCreate)(&raw mut raw, STREAM_NON_BLOCKING) },
    };
    context.check("cuStreamCreate", result, String::new)?;
    Ok(raw)
}

/// One stream, one piece of pinned memory, one user at a time.
pub struct Lane {
    context: Arc<Context>,
    state: State,
}

struct State {
    raw: RawStream,
    memory: ManuallyDrop<Arc<HostRegistration>>,
    host: Arc<HostMem>,
    events: Vec<RawEvent>,
    marked: u32,
    /// Copies may be in flight behind the last mark.
    dirty: bool,
    /// The last mark that was seen to be reached.
    seen: u32,
    /// Whoever kept the lane has given it up while copies were in flight.
    given_up: bool,
}

impl Lane {
    /// A lane over `memory`, whose last 4 KiB it uses for itself.
    ///
    /// # Errors
    /// `Refused` where the memory is smaller than 8 KiB or read-only; what the driver says.
    pub fn new(
        context: &Arc<Context>,
        memory: Arc<HostRegistration>,
        host: Arc<HostMem>,
    ) -> Result<Self, Error> {
        if memory.len() < 2 * FLAG_BYTES || !memory.is_writable() || memory.len() != host.len() {
            return Err(Error::Refused("a lane needs writable memory of at least 8 KiB"));
        }
        let raw = stream(context)?;
        let state = State {
            raw,
            memory: ManuallyDrop::new(memory),
            host,
            events: Vec::new(),
            marked: 0,
            dirty: false,
            seen: 0,
            given_up: false,
        };
        let mut lane = Self { context: Arc::clone(context), state };
        lane.state.host.store_u32(lane.state.flag_at(), 0)?;
        lane.make_events()?;
        Ok(lane)
    }

    fn make_events(&mut self) -> Result<(), Error> {
        let _current = self.context.enter()?;
        for _ in 0..EVENTS {
            let mut event = RawEvent::NULL;
            let create = self.context.table().cuEventCreate;
            // SAFETY: `event` is a place for one event; the context is current.
            let result = unsafe { create(&raw mut event, EVENT_DISABLE_TIMING) };
            self.context.check("cuEventCreate", result, String::new)?;
            self.state.events.push(event);
        }
        Ok(())
    }

    /// Bytes that copies can use.
    pub fn room(&self) -> u64 {
        self.state.flag_at()
    }

    /// The pinned memory.
    pub const fn host(&self) -> &Arc<HostMem> {
        &self.state.host
    }

    /// Makes the lane's context current for the calling thread until the guard is dropped.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(&mut self) -> Result<Entered<'_>, Error> {
        let current = self.context.enter()?;
        Ok(Entered { _current: current, context: &self.context, state: &mut self.state })
    }

    /// Whether everything before `mark` is done. Needs no driver call where words are used.
    ///
    /// # Errors
    /// What the driver says of the copies.
    pub fn is_reached(&mut self, mark: Mark) -> Result<bool, Error> {
        self.state.is_reached(&self.context, mark)
    }

    /// Asks the driver whether the stream still works: a copy that failed never reaches its mark.
    ///
    /// # Errors
    /// The failure of the stream.
    pub fn check(&self) -> Result<(), Error> {
        let Some(query) = self.context.table().cuStreamQuery else { return Ok(()) };
        let _current = self.context.enter()?;
        // SAFETY: the stream is this value's own.
        let result = unsafe { query(self.state.raw) };
        if result == CuResult::NOT_READY {
            return Ok(());
        }
        self.context.check("cuStreamQuery", result, String::new)
    }

    /// Whether nothing is in flight as far as was seen.
    pub const fn is_idle(&self) -> bool {
        !self.state.dirty && self.state.seen == self.state.marked
    }

    /// Whether nothing is in flight; asks the driver where that was not seen yet, and waits for nothing.
    pub fn settle(&mut self) -> bool {
        if self.is_idle() || !self.context.is_there() {
            return true;
        }
        let Some(query) = self.context.table().cuStreamQuery else { return false };
        let Ok(_current) = self.context.enter() else { return false };
        // SAFETY: the stream is this value's own, and its context is current.
        if unsafe { query(self.state.raw) } != CuResult::SUCCESS {
            return false;
        }
        self.state.dirty = false;
        self.state.seen = self.state.marked;
        true
    }

    /// Leaves the stream and the memory to the copies that are in flight, for good.
    pub fn give_up(mut self) {
        self.state.given_up = true;
    }
}

impl State {
    fn flag_at(&self) -> u64 {
        self.memory.len() - FLAG_BYTES
    }

    fn is_reached(&mut self, context: &Context, mark: Mark) -> Result<bool, Error> {
        if reached(self.seen, mark.number) {
            return Ok(true);
        }
        match mark.marking {
            Marking::Word => {
                if reached(self.host.load_u32(self.flag_at())?, mark.number) {
                    self.seen = mark.number;
                }
            }
            Marking::Event => {
                let Some(event) = self.events.get(mark.number as usize % EVENTS) else {
                    return Err(Error::Refused("a mark of another lane"));
                };
                let _current = context.enter()?;
                // SAFETY: the event is alive and was recorded when the mark was given.
                let result = unsafe { (context.table().cuEventQuery)(*event) };
                if result == CuResult::NOT_READY {
                    return Ok(false);
                }
                context.check("cuEventQuery", result, String::new)?;
                self.seen = mark.number;
            }
        }
        Ok(reached(self.seen, mark.number))
    }
}

/// Marks count up and wrap; fewer than 2^31 are ever outstanding.
const fn reached(seen: u32, mark: u32) -> bool {
    seen.wrapping_sub(mark) < 1 << 31
}

/// A lane whose context is current.
pub struct Entered<'a> {
    _current: Current<'a>,
    context: &'a Context,
    state: &'a mut State,
}

impl Entered<'_> {
    /// Queues a copy of `[at, at + len)` of the lane's memory to the device address `to`.
    ///
    /// Safe because the driver checks device addresses: a wrong one fails, or hits other memory of the
    /// device, never memory of this program's.
    ///
    /// # Errors
    /// `Bounds`; what the driver says.
    pub fn copy_in(&mut self, to: DevicePtr, at: u64, len: u64) -> Result<(), Error> {
        let (context, lane) = (self.context, &mut *self.state);
        let (from, bytes) = (lane.memory.at(at, len)?, size(len)?);
        let copy = context.table().cuMemcpyHtoDAsync;
        lane.dirty = true;
        // SAFETY: the source was checked, and the lane keeps it until the copy is seen done, or for
        // ever; the destination is a device address, which the driver checks.
        let result = unsafe { copy(to.as_u64(), from, bytes, lane.raw) };
        context.check("cuMemcpyHtoDAsync", result, || format!("{len} bytes to {to}"))
    }

    /// Queues a copy of `len` bytes at the device address `from` to `at` in the lane's memory.
    ///
    /// # Errors
    /// As [`Self::copy_in`].
    pub fn copy_out(&mut self, at: u64, from: DevicePtr, len: u64) -> Result<(), Error> {
        let (context, lane) = (self.context, &mut *self.state);
        let (to, bytes) = (lane.memory.at(at, len)?, size(len)?);
        let copy = context.table().cuMemcpyDtoHAsync;
        lane.dirty = true;
        // SAFETY: the destination was checked, and the lane keeps it until the copy is seen done, or
        // for ever; the source is a device address, which the driver checks.
        let result = unsafe { copy(to, from.as_u64(), bytes, lane.raw) };
        context.check("cuMemcpyDtoHAsync", result, || format!("{len} bytes from {from}"))
    }

    /// Marks the point behind what is queued; by an event where the driver has no stream memory
    /// operations.
    ///
    /// # Errors
    /// What the driver says.
    pub fn mark(&mut self, marking: Marking) -> Result<Mark, Error> {
        let (context, lane) = (self.context, &mut *self.state);
        let number = lane.marked.wrapping_add(1);
        let table = context.table();
        let write = table
            .cuStreamWriteValue32
            .filter(|_| marking == Marking::Word && table.cuStreamQuery.is_some());
        let result = match write {
            Some(write) => {
                let at = lane.memory.device_at(lane.flag_at(), 4)?;
                // SAFETY: an aligned word inside the lane's memory, which it keeps until then.
                unsafe { write(lane.raw, at, number, 0) }
            }
            None => {
                let Some(event) = lane.events.get(number as usize % EVENTS) else {
                    return Err(Error::Refused("a lane without events"));
                };
                // SAFETY: both handles are alive, and their context is current.
                unsafe { (table.cuEventRecord)(*event, lane.raw) }
            }
        };
        context.check("mark a stream", result, String::new)?;
        lane.marked = number;
        lane.dirty = false;
        let marking = if write.is_some() { Marking::Word } else { Marking::Event };
        Ok(Mark { number, marking })
    }

    /// Whether everything in the lane's stream is done. Then nothing that was queued needs a mark. `None` where the driver has no such question.
    ///
    /// # Errors
    /// What the driver says of the copies.
    pub fn is_done(&mut self) -> Result<Option<bool>, Error> {
        let (context, lane) = (self.context, &mut *self.state);
        let Some(query) = context.table().cuStreamQuery else { return Ok(None) };
        // SAFETY: the stream is the lane's own, and its context is current.
        let result = unsafe { query(lane.raw) };
        if result == CuResult::NOT_READY {
            return Ok(Some(false));
        }
        context.check("cuStreamQuery", result, String::new)?;
        lane.dirty = false;
        lane.seen = lane.marked;
        Ok(Some(true))
    }

    /// [`Lane::is_reached`].
    ///
    /// # Errors
    /// What the driver says of the copies.
    pub fn is_reached(&mut self, mark: Mark) -> Result<bool, Error> {
        self.state.is_reached(self.context, mark)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if !self.context.is_there() {
            // The stream and the events went with the context, and what was in flight ended with it.
            // SAFETY: taken once, here, and nothing of the device uses the memory any more.
            unsafe { ManuallyDrop::drop(&mut self.state.memory) };
            return;
        }
        if self.state.given_up || !self.settle() {
            // What was not seen done may be under way: a device may still read or write the memory, so
            // neither it nor the stream is given up.
            return;
        }
        if let Ok(_current) = self.context.enter() {
            let table = self.context.table();
            for event in self.state.events.drain(..) {
                // SAFETY: made by this value, and no handle is left.
                let _ = unsafe { (table.cuEventDestroy)(event) };
            }
            // SAFETY: made by this value, and nothing is in flight.
            let _ = unsafe { (table.cuStreamDestroy)(self.state.raw) };
        }
        // SAFETY: taken once, here, and nothing of the device uses the memory any more.
        unsafe { ManuallyDrop::drop(&mut self.state.memory) };
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({} bytes)", self.room())
    }
}
