//! Requests in stream order: the caller's stream comes to a gate, the request is carried out, the gate opens. No
//! callback runs in the driver's threads, so streams do not wait for each other.
//!
//! All that a device does for a request is queued in the caller's own stream at the call: a word that says that the
//! stream has come, a gate, a kernel that moves the bytes between the device and the request's slot, the gate's end.
//! No other stream is needed for it, whose copies a closed gate might hold up: the driver puts the streams of a device
//! on few hardware queues, and does not tell which share one.

mod moving;
mod request;
mod slots;

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use beeline_sys::cuda::{Driver, Error, ForeignStream, Gate, Gates, Home, Slot};
use beeline_sys::cuda::{StageKernel, StageKernels, Turns};

use super::crew::Crew;
use super::status::{Failure, OpError, Outcome};
use crate::config::Config;
use crate::gpu::{Gpu, PinnedMem};
use crate::{lock, wait_timeout};
use request::{Common, Hands, Request, Seen, Task};
use slots::{Run, Slots};

pub(super) use request::{Begin, Finish, Rest, Work};

/// Requests in streams at once, over the whole process.
const GATES: u64 = 1024;
const GATE_BYTES: u64 = 512;
/// How long the dispatcher looks without pause after something has happened.
const EAGER: Duration = Duration::from_micros(100);
/// Its pauses after that.
const PAUSE: Duration = Duration::from_micros(20);
const PAUSE_LONG: Duration = Duration::from_micros(200);
/// How long it sleeps without requests before it ends.
const IDLE: Duration = Duration::from_secs(5);
/// Threads that dispatch, at most.
const DISPATCHERS_MAX: usize = 4;
/// Threads that read and write files for requests in streams.
const THREADS_MIN: usize = 4;
const THREADS_MAX: usize = 16;

/// The gates of the process and who watches them. They are made once and stay: a stream may still look at
/// a word after the request that it waited for has ended.
pub(super) struct Ordered {
    common: Arc<Common>,
    _memory: PinnedMem,
    driver: Arc<Driver>,
    kernels: StageKernels,
    slots: Arc<Slots>,
    stall: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// What the dispatcher looks at.
    watched: Mutex<Vec<Arc<Request>>>,
}

struct State {
    /// Gates with their last pass, the longest unused first: streams that still look at it have gone on.
    free: VecDeque<(Gate, u32)>,
    /// Requests that the dispatcher does not know yet.
    new: Vec<Arc<Request>>,
    /// Threads that dispatch: one, and more while those are busy with a part of a request.
    dispatchers: usize,
    busy: usize,
}

/// What moves the bytes of a request between a device and the host.
pub(super) struct Carrier {
    run: Run,
    kernel: StageKernel,
    /// Out of the device.
    out: bool,
}

/// Why a request was not queued.
pub(super) enum Refusal<A> {
    Failed(Failure),
    /// The driver does not do that; here is the request again.
    Unsupported(A),
}

impl<A> From<Failure> for Refusal<A> {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl Ordered {
    /// # Errors
    /// What pinning says.
    pub(super) fn new(gpu: &Gpu, driver: &Arc<Driver>, stall: Duration) -> Outcome<Arc<Self>> {
        let memory = gpu.pin(GATES * GATE_BYTES)?;
        let gates = Gates::new(Arc::clone(memory.registration()?), Arc::clone(memory.mem()));
        let free = (0..gates.len()).map(|gate| (Gate(gate), 0)).collect();
        let cpus = std::thread::available_parallelism().map_or(THREADS_MIN, usize::from);
        let threads = cpus.clamp(THREADS_MIN, THREADS_MAX);
        let common = Common {
            gates: Arc::new(gates),
            // Its own: threads of plain requests wait for copies, which a closed gate may hold up.
            crew: Crew::new(threads),
            threads,
            stall,
            moving: AtomicUsize::new(0),
            bin: Mutex::default(),
        };
        Ok(Arc::new(Self {
            common: Arc::new(common),
            _memory: memory,
            driver: Arc::clone(driver),
            kernels: StageKernels::default(),
            slots: Slots::new(gpu, &Config::from_env()),
            stall,
            state: Mutex::new(State { free, new: Vec::new(), dispatchers: 0, busy: 0 }),
            changed: Condvar::new(),
            watched: Mutex::default(),
        }))
    }

    /// The kernel for `stream`, loaded when first asked for.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn kernel(&self, stream: ForeignStream, home: Home) -> Result<StageKernel, Error> {
        self.kernels.of(&self.driver, stream, home)
    }

    /// A slot for a request of about `bytes`, with the kernel that goes with it; none where all are in use now. Never
    /// waits.
    ///
    /// # Errors
    /// What pinning says.
    pub(super) fn carrier(
        &self,
        kernel: StageKernel,
        out: bool,
        bytes: u64,
    ) -> Outcome<Option<Carrier>> {
        let run = self.slots.take(bytes)?;
        Ok(run.map(|run| Carrier { run, kernel, out }))
    }

    /// Queues a request in `stream`: it begins when the stream has come so far, and the stream goes on when
    /// it has ended. `begin` makes of `asked` what is done then.
    ///
    /// # Errors
    /// `ASYNC_NOT_SUPPORTED` while the stream is being captured (nothing was queued); `ETIMEDOUT` where all gates stay
    /// in use; what the driver says. Where it has no stream memory operations nothing was queued, and `asked` comes back.
    pub(super) fn queue<A>(
        self: &Arc<Self>,
        stream: ForeignStream,
        carrier: Option<Carrier>,
        asked: A,
        begin: fn(A) -> Begin,
    ) -> Result<(), Refusal<A>> {
        let (gate, last) = self.take()?;
        let pass = last.wrapping_add(1).max(1);
        let gates = &self.common.gates;
        gates.forget(gate);
        let timeout = self.stall.saturating_mul(2).saturating_add(Duration::from_secs(10));
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let turns = carrier.as_ref().map(|Carrier { run, kernel, out }| {
            let slot = Slot { memory: run.registration(), at: run.start(), cell: run.cell() };
            Turns { kernel: *kernel, slot, out: *out, timeout_ns }
        });
        let queued = gates.pass(&self.driver, stream, gate, pass, turns.as_ref());
        if let Err((error, used)) = &queued {
            if *used {
                // What was queued goes through, and moves nothing. A gate that something may still write to is never
                // used again, nor is the slot.
                gates.open_end(gate, pass);
                gates.open(gate, pass);
                std::mem::forget(carrier);
            } else {
                lock(&self.state).free.push_front((gate, last));
                if matches!(error, Error::Unsupported { .. }) {
                    return Err(Refusal::Unsupported(asked));
                }
            }
            return Err(Failure::cuda(format!("queue a request in {stream:?}"), error).into());
        }
        let out = carrier.as_ref().is_some_and(|carrier| carrier.out);
        let run = carrier.map(|carrier| carrier.run);
        self.hand_over(Request::new((gate, pass), stream, (run, out), begin(asked)))?;
        Ok(())
    }

    /// Has the dispatcher look at a request that was queued.
    fn hand_over(self: &Arc<Self>, request: Request) -> Outcome<()> {
        let request = Arc::new(request);
        let mut state = lock(&self.state);
        state.new.push(Arc::clone(&request));
        let wanted = (1 + state.busy).min(DISPATCHERS_MAX);
        if state.dispatchers < wanted && self.start() {
            state.dispatchers += 1;
        }
        if state.dispatchers == 0 {
            // No thread: the request is reported as failed, so it must never run. What it holds is free again
            // when there is a thread that sees its end.
            drop(state);
            request.give_up();
            self.common.gates.open_end(request.gate, request.pass);
            self.common.gates.open(request.gate, request.pass);
            let text = "no thread for stream-ordered requests could be started";
            return Err(Failure::new(OpError::INTERNAL_ERROR, text));
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Unpins what no request uses.
    pub(super) fn trim(&self) {
        self.slots.trim();
    }

    fn take(&self) -> Outcome<(Gate, u32)> {
        let deadline = Instant::now() + self.stall;
        let mut state = lock(&self.state);
        loop {
            if let Some(free) = state.free.pop_front() {
                return Ok(free);
            }
            if Instant::now() >= deadline {
                return Err(Failure::timeout(format!(
                    "{GATES} stream-ordered requests are under way and none ended within {:?}",
                    self.stall
                )));
            }
            state = wait_timeout(&self.changed, state, Duration::from_millis(5));
        }
    }

    fn start(self: &Arc<Self>) -> bool {
        let own = Arc::clone(self);
        let builder = std::thread::Builder::new().name("beeline-gates".to_owned());
        builder.spawn(move || own.watch()).is_ok()
    }

    /// Looks which requests' streams have come to them, and how far their kernels are.
    fn watch(self: &Arc<Self>) {
        // A nap takes as long as it says, and not 50 us more. Only a matter of speed.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1000));
        let mut last = Instant::now();
        loop {
            if self.is_done(&mut last) {
                return;
            }
            let mut own: Vec<Task> = Vec::new();
            // What panics must not take its thread along.
            let look = std::panic::AssertUnwindSafe(|| self.look(&mut own));
            if std::panic::catch_unwind(look).unwrap_or(true) {
                last = Instant::now();
            }
            for task in own {
                // The next request of another stream finds somebody who looks.
                lock(&self.state).busy += 1;
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task));
                lock(&self.state).busy -= 1;
                last = Instant::now();
            }
            match last.elapsed() {
                since if since < EAGER => std::hint::spin_loop(),
                since if since < Duration::from_millis(10) => std::thread::sleep(PAUSE),
                _ => {
                    self.common.empty_bin();
                    std::thread::sleep(PAUSE_LONG);
                }
            }
        }
    }

    /// Takes in new requests, which are something that happened; sleeps while there are none. Whether the calling thread
    /// is not needed any more.
    fn is_done(&self, last: &mut Instant) -> bool {
        loop {
            let mut state = lock(&self.state);
            if state.dispatchers > 1 + state.busy {
                state.dispatchers -= 1;
                return true;
            }
            let mut watched = lock(&self.watched);
            if !state.new.is_empty() {
                *last = Instant::now();
            }
            watched.append(&mut state.new);
            if !watched.is_empty() {
                return false;
            }
            drop(watched);
            if last.elapsed() > IDLE {
                state.dispatchers = state.dispatchers.saturating_sub(1);
                return true;
            }
            if lock(&self.common.bin).is_empty() {
                drop(wait_timeout(&self.changed, state, IDLE));
            } else {
                drop(state);
                self.common.empty_bin();
            }
        }
    }

    /// Looks at every request once; whether any came on. `own` is what is left to the calling thread.
    fn look(&self, own: &mut Vec<Task>) -> bool {
        let mut gone = Vec::new();
        let mut progress = false;
        {
            let mut watched = lock(&self.watched);
            let first = watched.first().map(|request| request.stream);
            let alone = watched.iter().all(|request| Some(request.stream) == first);
            let mut hands = if alone { Hands::Own(own) } else { Hands::Crew };
            watched.retain(|request| {
                let seen = request.look(&self.common, &mut hands);
                progress |= seen != Seen::Nothing;
                if seen == Seen::Gone {
                    gone.push((request.gate, request.pass));
                }
                seen != Seen::Gone
            });
        }
        if !gone.is_empty() {
            lock(&self.state).free.extend(gone);
            self.changed.notify_all();
        }
        progress
    }
}
