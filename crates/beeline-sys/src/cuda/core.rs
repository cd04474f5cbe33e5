//! What stands behind a stream: the handle, the memory that queued operations hold, and the events by
//! which their end is seen.

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use super::device::{Context, lock};
use super::error::Error;
use super::memory::DeviceMem;
use super::module::Module;
use super::registration::HostRegistration;
use super::types::*;

/// Operations behind which the stream records an event of its own, where the caller records none.
const BATCH_OPS: usize = 64;
/// Batches in flight; together with [`BATCH_OPS`] the bound on what a stream holds.
const BATCHES_MAX: usize = 512;
/// How long a caller waits for a full stream before it counts as stuck.
const ROOM_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a full stream is looked at.
const ROOM_PAUSE: Duration = Duration::from_micros(100);

/// What an operation in flight keeps alive.
#[expect(dead_code, reason = "held for their drops")]
pub(super) enum Held {
    Device(Arc<DeviceMem>),
    Host(Arc<HostRegistration>),
    Module(Arc<Module>),
    Event(Arc<Event>),
}

/// The stream itself; outlives its [`super::Stream`] while operations are in flight.
pub(super) struct Core {
    context: Arc<Context>,
    raw: RawStream,
    own: bool,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// Held by operations behind which no event is recorded yet.
    open: Vec<Held>,
    /// Operations among `open`.
    ops: usize,
    /// Events in the order they were recorded, with what the operations before each hold.
    batches: VecDeque<(Arc<Event>, Vec<Held>)>,
    /// The first failure that ended the context; repeated to everybody who asks.
    failed: Option<Error>,
    /// The [`super::Stream`] was dropped: a foreign handle may be gone by now.
    closed: bool,
}

impl Core {
    pub(super) fn new(context: &Arc<Context>, raw: RawStream, own: bool) -> Self {
        Self { context: Arc::clone(context), raw, own, state: Mutex::default() }
    }

    pub(super) const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) const fn raw(&self) -> RawStream {
        self.raw
    }

    pub(super) const fn is_own(&self) -> bool {
        self.own
    }

    /// Queues one operation, which holds `held` until it has run.
    pub(super) fn push(
        self: &Arc<Self>,
        held: impl IntoIterator<Item = Held>,
        operation: impl FnOnce(&Context, RawStream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut state = self.room()?;
        // Held before the call: an answer that is an error does not prove that nothing was queued.
        state.open.extend(held);
        state.ops += 1;
        let _current = self.context.enter()?;
        let queued = operation(&self.context, self.raw);
        if let Err(error) = &queued {
            state.note(error);
        }
        if self.raw == RawStream::PER_THREAD && state.failed.is_none() {
            // The handle means another stream in another thread, so an event recorded later would
            // perhaps not stand behind this operation.
            state.close(self)?;
        }
        queued
    }

    /// The state, once there is room for one more operation.
    ///
    /// # Errors
    /// The stream's earlier failure; `Capturing`; `Stuck` after a minute without room.
    pub(super) fn room(self: &Arc<Self>) -> Result<MutexGuard<'_, State>, Error> {
        let deadline = Instant::now() + ROOM_TIMEOUT;
        loop {
            let mut state = lock(&self.state);
            if let Some(failed) = &state.failed {
                return Err(failed.clone());
            }
            if !self.own && self.is_capturing()? {
                return Err(Error::Capturing);
            }
            if state.ops >= BATCH_OPS && state.batches.len() < BATCHES_MAX {
                let _current = self.context.enter()?;
                state.close(self)?;
            }
            if state.ops < BATCH_OPS && state.batches.len() < BATCHES_MAX {
                return Ok(state);
            }
            drop(state);
            self.retire();
            if Instant::now() >= deadline {
                return Err(Error::Stuck(ROOM_TIMEOUT.as_secs()));
            }
            if lock(&self.state).batches.len() >= BATCHES_MAX {
                std::thread::sleep(ROOM_PAUSE);
            }
        }
    }

    /// Records an event behind operations that have none, so that their memory can be let go. With
    /// `close`, nothing is queued after that.
    pub(super) fn settle(self: &Arc<Self>, close: bool) {
        let mut state = lock(&self.state);
        if !state.closed && state.ops > 0 && state.failed.is_none() {
            let free = self.own || matches!(self.is_capturing(), Ok(false));
            let recorded = free && self.context.enter().is_ok_and(|_c| state.close(self).is_ok());
            if close && !recorded {
                // No event will ever tell when these are done.
                quarantine(&mut state);
            }
        }
        state.closed |= close;
    }

    /// Lets go of what finished operations held.
    pub(super) fn retire(&self) {
        let mut state = lock(&self.state);
        let mut done = Vec::new();
        while let Some((event, _)) = state.batches.front() {
            match event.query() {
                Ok(true) => done.extend(state.batches.pop_front()),
                Ok(false) => break,
                Err(error) => {
                    state.note(&error);
                    break;
                }
            }
        }
        drop(state);
        // Without the lock: letting go of memory calls the driver.
        drop(done);
    }

    /// Whether no operation is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.retire();
        let state = lock(&self.state);
        state.batches.is_empty() && state.open.is_empty()
    }

    /// # Errors
    /// `Unsupported` where the device cannot compare so.
    pub(super) fn check_flags(&self, flags: WaitFlags) -> Result<(), Error> {
        let nor = DeviceAttribute::CAN_USE_STREAM_WAIT_VALUE_NOR;
        if flags == WaitFlags::NOR && self.context.device().attribute(nor) == 0 {
            return Err(Error::Unsupported { what: "stream wait for a clear bit (NOR)" });
        }
        Ok(())
    }

    pub(super) fn is_capturing(&self) -> Result<bool, Error> {
        /// The legacy default stream, while another stream is being captured.
        const CAPTURE_IMPLICIT: CuResult = CuResult(906);
        let _current = self.context.make_current()?;
        let mut status = 0;
        let ask = self.context.table().cuStreamIsCapturing;
        // SAFETY: `status` is a place for one enum; the stream is alive while its `Stream` is, which
        // is when this is called.
        let result = unsafe { ask(self.raw, &raw mut status) };
        if result == CAPTURE_IMPLICIT {
            return Ok(true);
        }
        self.context.check("cuStreamIsCapturing", result, String::new)?;
        Ok(status != 0)
    }

    fn failure(&self) -> Option<Error> {
        lock(&self.state).failed.clone()
    }
}

impl State {
    /// Records an event behind everything queued. The context is current.
    pub(super) fn close(&mut self, core: &Arc<Core>) -> Result<Arc<Event>, Error> {
        let event = Arc::new(Event::new(core)?);
        let record = core.context.table().cuEventRecord;
        // SAFETY: both handles are alive and of the current context.
        let result = unsafe { record(event.raw, core.raw) };
        core.context.check("cuEventRecord", result, String::new).inspect_err(|e| self.note(e))?;
        // In a stream of somebody else's that holds nothing, the event is the caller's alone and takes no room here:
        // collectives record one behind every call, and how many may be in flight is the driver's bound.
        if core.own || !self.open.is_empty() {
            self.batches.push_back((Arc::clone(&event), std::mem::take(&mut self.open)));
        }
        self.ops = 0;
        Ok(event)
    }

    /// Remembers a failure that ends the context.
    fn note(&mut self, error: &Error) {
        if self.failed.is_none() && error.result().is_some_and(CuResult::is_sticky) {
            self.failed = Some(error.clone());
            quarantine(self);
        }
    }
}

/// Keeps for ever what operations hold whose end can no longer be seen: a device may still write it.
/// At most one stream's worth; the counters go on counting it.
fn quarantine(state: &mut State) {
    let kept = (std::mem::take(&mut state.open), std::mem::take(&mut state.batches));
    state.ops = 0;
    let _kept = ManuallyDrop::new(kept);
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Ok(state) = self.state.get_mut() {
            quarantine(state);
        }
        if !self.own {
            return;
        }
        if let Ok(_current) = self.context.enter() {
            // SAFETY: made by this crate, and no handle is left; work still queued goes on.
            let _ = unsafe { (self.context.table().cuStreamDestroy)(self.raw) };
        }
    }
}

/// A point in a stream.
pub struct Event {
    context: Arc<Context>,
    raw: RawEvent,
    /// Whose memory can be let go once the point is reached.
    core: Weak<Core>,
    /// Seen done: a point that was reached stays so, whatever fails later.
    done: AtomicBool,
}

impl Event {
    /// An event without timing. The context is current.
    fn new(core: &Arc<Core>) -> Result<Self, Error> {
        let context = Arc::clone(&core.context);
        let mut raw = context.spare_event().unwrap_or(RawEvent::NULL);
        if raw == RawEvent::NULL {
            let create = context.table().cuEventCreate;
            // SAFETY: `raw` is a place for one event; a context is current.
            let result = unsafe { create(&raw mut raw, EVENT_DISABLE_TIMING) };
            context.check("cuEventCreate", result, String::new)?;
        }
        Ok(Self { context, raw, core: Arc::downgrade(core), done: AtomicBool::new(false) })
    }

    /// Whether the point has been reached; never waits. Lets go of memory where it has.
    ///
    /// # Errors
    /// The failure of the context, by an operation before the point.
    pub fn is_done(&self) -> Result<bool, Error> {
        if self.done.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let core = self.core.upgrade();
        if let Some(failed) = core.as_ref().and_then(|core| core.failure()) {
            return Err(failed);
        }
        let done = self.query();
        if let (true, Some(core)) = (!matches!(done, Ok(false)), core) {
            core.retire();
        }
        done
    }

    fn query(&self) -> Result<bool, Error> {
        let _current = self.context.enter()?;
        // SAFETY: the event is alive, and was recorded before anybody got this value.
        let result = unsafe { (self.context.table().cuEventQuery)(self.raw) };
        if result == CuResult::NOT_READY {
            return Ok(false);
        }
        self.context.check("cuEventQuery", result, String::new)?;
        self.done.store(true, Ordering::Relaxed);
        Ok(true)
    }

    pub(super) const fn raw(&self) -> RawEvent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.keep_event(self.raw) {
            return;
        }
        if let Ok(_current) = self.context.enter() {
            // SAFETY: made by this value, and no handle is left; the driver keeps it until recorded.
            let _ = unsafe { (self.context.table().cuEventDestroy)(self.raw) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:?})", self.raw.0)
    }
}
