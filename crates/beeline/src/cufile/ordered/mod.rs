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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use beeline_sys::cuda::{
    Driver, Error, ForeignStream, GATE_BYTES, Gate, Gates, Home, Reached, Slot,
};
use beeline_sys::cuda::{StageKernel, StageKernels, Turns};

use super::status::{Failure, OpError, Outcome};
use crate::config::Config;
use crate::gpu::{Gpu, PinnedMem};
use crate::{lock, wait_timeout};
use request::{Common, Request, Seen};
use slots::{Run, Slots};

pub(super) use request::{Ask, Begun, Finish, Rest, Work};

/// Requests in streams at once, over the whole process.
const GATES: u64 = 1024;
/// How long the dispatcher looks without pause after something has happened, also where there is no request: a program that
/// waits for one queues the next one soon, and to wake the dispatcher takes as long as a small request.
const EAGER: Duration = Duration::from_micros(100);
/// Its pauses after that.
const PAUSE: Duration = Duration::from_micros(20);
const PAUSE_LONG: Duration = Duration::from_micros(200);
/// How often what ended requests held is let go of.
const CLEAR_EVERY: Duration = Duration::from_millis(5);
/// How long it sleeps without requests before it ends.
const IDLE: Duration = Duration::from_secs(5);
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
    /// Whether there are requests that the dispatcher does not know yet: it looks all the time, and would be in the way of
    /// callers if it took the lock for that.
    is_new: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Gates with their last pass, the longest unused first: streams that still look at it have gone on.
    free: VecDeque<(Gate, u32)>,
    /// Requests that the dispatcher does not know yet.
    new: Vec<Arc<Request>>,
    running: bool,
    /// Threads that wait for a change; without one, nobody is woken.
    waiting: usize,
}

/// What moves the bytes of a request between a device and the host.
pub(super) struct Carrier {
    run: Run,
    kernel: StageKernel,
    /// Out of the device.
    out: bool,
}

impl Carrier {
    /// Bytes of a cell of its slot.
    pub(super) fn cell(&self) -> u32 {
        self.run.cell()
    }
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
        let common = Common::new(gates, threads, stall);
        Ok(Arc::new(Self {
            common: Arc::new(common),
            _memory: memory,
            driver: Arc::clone(driver),
            kernels: StageKernels::default(),
            slots: Slots::new(gpu, &Config::from_env()),
            is_new: AtomicBool::new(false),
            state: Mutex::new(State { free, new: Vec::new(), running: false, waiting: 0 }),
            changed: Condvar::new(),
        }))
    }

    /// The kernel for `stream`, loaded when first asked for.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn kernel(&self, stream: ForeignStream, home: Home) -> Result<StageKernel, Error> {
        self.kernels.of(&self.driver, stream, home)
    }

    /// Bytes of a cell of the largest slot.
    pub(super) fn cell_max(&self) -> u32 {
        self.slots.cell_max()
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
    /// it has ended.
    ///
    /// # Errors
    /// `ASYNC_NOT_SUPPORTED` while the stream is being captured (nothing was queued); `ETIMEDOUT` where all gates stay
    /// in use; what the driver says. Where it has no stream memory operations nothing was queued, and `ask` comes back.
    pub(super) fn queue<A: Ask + 'static>(
        self: &Arc<Self>,
        stream: ForeignStream,
        carrier: Option<Carrier>,
        ask: A,
    ) -> Result<(), Refusal<A>> {
        let (gate, last) = self.take()?;
        let pass = last.wrapping_add(1).max(1);
        let gates = &self.common.gates;
        gates.forget(gate);
        let timeout = self.common.stall.saturating_mul(2).saturating_add(Duration::from_secs(10));
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let turns = carrier.as_ref().map(|Carrier { run, kernel, out }| {
            let slot = Slot { memory: run.registration(), at: run.start(), cell: run.cell() };
            Turns { kernel: *kernel, slot, out: *out, timeout_ns }
        });
        let queued = gates.pass(&self.driver, stream, gate, pass, turns.as_ref());
        let out = carrier.as_ref().is_some_and(|carrier| carrier.out);
        let run = carrier.map(|carrier| carrier.run);
        let Err((error, reached)) = queued else {
            let request = Request::new((gate, pass), (run, out), Box::new(ask));
            return Ok(self.hand_over(request)?);
        };
        if reached == Reached::Nothing {
            lock(&self.state).free.push_front((gate, last));
            if matches!(error, Error::Unsupported { .. }) {
                return Err(Refusal::Unsupported(ask));
            }
        } else {
            // What was queued goes through, and moves nothing.
            gates.open_end(gate, pass);
            gates.open(gate, pass);
            let run = run.filter(|_| reached == Reached::Kernel);
            self.hand_over(Request::failed((gate, pass), run))?;
        }
        Err(Failure::cuda(format!("queue a request in {stream:?}"), &error).into())
    }

    /// Has the dispatcher look at a request that was queued.
    fn hand_over(self: &Arc<Self>, request: Request) -> Outcome<()> {
        let request = Arc::new(request);
        let mut state = lock(&self.state);
        if !state.running {
            // It takes what is pushed below.
            state.running = self.start();
        }
        if !state.running {
            drop(state);
            // No thread: the request is reported as failed, so it must never run, and nobody knows it before it is over.
            // What it holds is free again when there is a thread that sees its end.
            request.give_up(&self.common);
            lock(&self.state).new.push(request);
            self.is_new.store(true, Ordering::Release);
            let text = "no thread for stream-ordered requests could be started";
            return Err(Failure::new(OpError::INTERNAL_ERROR, text));
        }
        state.new.push(request);
        self.is_new.store(true, Ordering::Release);
        self.tell(state);
        Ok(())
    }

    /// Wakes who waits for a change.
    fn tell(&self, state: MutexGuard<'_, State>) {
        let waiting = state.waiting > 0;
        drop(state);
        if waiting {
            self.changed.notify_all();
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, most: Duration) -> MutexGuard<'a, State> {
        let mut state = state;
        state.waiting += 1;
        let mut state = wait_timeout(&self.changed, state, most);
        state.waiting -= 1;
        state
    }

    /// Unpins what no request uses.
    pub(super) fn trim(&self) {
        self.slots.trim();
    }

    fn take(&self) -> Outcome<(Gate, u32)> {
        let deadline = Instant::now() + self.common.stall;
        let mut state = lock(&self.state);
        loop {
            if let Some(free) = state.free.pop_front() {
                return Ok(free);
            }
            if Instant::now() >= deadline {
                return Err(Failure::timeout(format!(
                    "{GATES} stream-ordered requests are under way and none ended within {:?}",
                    self.common.stall
                )));
            }
            state = self.wait(state, Duration::from_millis(5));
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
        let mut requests: Vec<Arc<Request>> = Vec::new();
        let (mut last, mut cleared) = (Instant::now(), Instant::now());
        loop {
            match self.take_in(&mut requests, last) {
                None => return,
                Some(true) => last = Instant::now(),
                Some(false) => {}
            }
            let mut gone = Vec::new();
            requests.retain(|request| {
                // What panics must not take the thread along.
                let look = std::panic::AssertUnwindSafe(|| request.look(&self.common));
                let seen = std::panic::catch_unwind(look).unwrap_or(Seen::Progress);
                if seen != Seen::Nothing {
                    last = Instant::now();
                }
                if seen == Seen::Gone {
                    gone.push((request.gate, request.pass));
                }
                seen != Seen::Gone
            });
            if !gone.is_empty() {
                let mut state = lock(&self.state);
                state.free.extend(gone);
                self.tell(state);
            }
            if cleared.elapsed() > CLEAR_EVERY {
                self.common.clear();
                cleared = Instant::now();
            }
            match last.elapsed() {
                since if since < EAGER => std::hint::spin_loop(),
                since if since < Duration::from_millis(10) => std::thread::sleep(PAUSE),
                _ => std::thread::sleep(PAUSE_LONG),
            }
        }
    }

    /// Takes in new requests, and says whether there were any; sleeps while there are none at all. None: nothing has
    /// happened for long, and the thread ends.
    fn take_in(&self, requests: &mut Vec<Arc<Request>>, last: Instant) -> Option<bool> {
        let busy = !requests.is_empty() || last.elapsed() < EAGER;
        if busy && !self.is_new.load(Ordering::Acquire) {
            return Some(false);
        }
        let mut state = lock(&self.state);
        while requests.is_empty() && state.new.is_empty() {
            if last.elapsed() > IDLE {
                state.running = false;
                drop(state);
                self.common.clear();
                return None;
            }
            drop(state);
            self.common.clear();
            state = lock(&self.state);
            if state.new.is_empty() {
                state = self.wait(state, IDLE);
            }
        }
        self.is_new.store(false, Ordering::Release);
        let new = !state.new.is_empty();
        requests.append(&mut state.new);
        Some(new)
    }
}
