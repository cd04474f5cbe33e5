//! Requests in stream order: the caller's stream comes to a gate, the request is carried out, the gate
//! opens. No callback runs in the driver's threads, so streams do not wait for each other.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use beeline_sys::cuda::{Driver, ForeignStream, Gate, Gates};

use super::crew::Crew;
use super::status::{Failure, OpError, Outcome};
use crate::gpu::{Gpu, PinnedMem};
use crate::{lock, wait_timeout};

/// Requests in streams at once, over the whole process.
const GATES: u64 = 1024;
const GATE_BYTES: u64 = 64;
/// How long the dispatcher looks without pause after something has happened.
const EAGER: Duration = Duration::from_micros(100);
/// Its pauses after that.
const PAUSE: Duration = Duration::from_micros(20);
const PAUSE_LONG: Duration = Duration::from_micros(200);
/// How long it sleeps without requests before it ends.
const IDLE: Duration = Duration::from_secs(5);

/// Streams that may wait at gates at once. The driver puts the streams of a device on few hardware queues, and a copy
/// that a gate opens after must not stand behind another closed gate: two streams were shown to go well on an H200,
/// forty were not.
const STREAMS_MAX: usize = 2;

type Work = Box<dyn FnOnce() + Send>;

/// The gates of the process and who watches them. They are made once and stay: a stream may still look at
/// a word after the request that it waited for has ended.
pub(super) struct Ordered {
    gates: Arc<Gates>,
    _memory: PinnedMem,
    driver: Arc<Driver>,
    stall: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Gates with their last pass, the longest unused first: streams that still look at it have gone on.
    free: VecDeque<(Gate, u32)>,
    waiting: Vec<(Gate, u32, Arc<Crew>, Work)>,
    running: bool,
    /// Streams with requests under way, and how many.
    streams: Vec<(ForeignStream, u32)>,
}

/// Leave for one request to let its stream wait at a gate; gone with the request.
pub(super) struct Admission {
    ordered: Arc<Ordered>,
    stream: ForeignStream,
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut state = lock(&self.ordered.state);
        let Some(at) = state.streams.iter().position(|(stream, _)| *stream == self.stream) else {
            return;
        };
        let count = state.streams.get(at).map_or(0, |(_, count)| count.saturating_sub(1));
        match state.streams.get_mut(at) {
            Some(entry) if count > 0 => entry.1 = count,
            _ => drop(state.streams.swap_remove(at)),
        }
    }
}

impl Ordered {
    /// # Errors
    /// What pinning says.
    pub(super) fn new(gpu: &Gpu, driver: &Arc<Driver>, stall: Duration) -> Outcome<Arc<Self>> {
        let memory = gpu.pin(GATES * GATE_BYTES)?;
        let gates = Gates::new(Arc::clone(memory.registration()?), Arc::clone(memory.mem()));
        let free = (0..gates.len()).map(|gate| (Gate(gate), 0)).collect();
        Ok(Arc::new(Self {
            gates: Arc::new(gates),
            _memory: memory,
            driver: Arc::clone(driver),
            stall,
            state: Mutex::new(State {
                free,
                waiting: Vec::new(),
                running: false,
                streams: Vec::new(),
            }),
            changed: Condvar::new(),
        }))
    }

    /// Leave to queue a request in `stream`; none while as many other streams as may wait have requests under way.
    pub(super) fn admit(self: &Arc<Self>, stream: ForeignStream) -> Option<Admission> {
        let mut state = lock(&self.state);
        if let Some((_, count)) = state.streams.iter_mut().find(|(known, _)| *known == stream) {
            *count = count.saturating_add(1);
        } else if state.streams.len() < STREAMS_MAX {
            state.streams.push((stream, 1));
        } else {
            return None;
        }
        Some(Admission { ordered: Arc::clone(self), stream })
    }

    /// Queues `work` in `stream`: it starts when the stream has come so far, and the stream goes on when
    /// it has ended.
    ///
    /// # Errors
    /// `ASYNC_NOT_SUPPORTED` while the stream is being captured (nothing was queued) and where the driver
    /// lacks stream memory operations; `ETIMEDOUT` where all gates stay in use.
    pub(super) fn queue(
        self: &Arc<Self>,
        stream: ForeignStream,
        crew: &Arc<Crew>,
        work: impl FnOnce() + Send + 'static,
    ) -> Outcome<()> {
        let (gate, last) = self.take()?;
        let pass = last.wrapping_add(1).max(1);
        let queued = self.gates.pass(&self.driver, stream, gate, pass);
        if let Err((error, used)) = &queued {
            // A gate that something may still write to is never used again.
            if !used {
                lock(&self.state).free.push_front((gate, last));
            }
            return Err(Failure::cuda(format!("queue a request in {stream:?}"), error));
        }
        let mut state = lock(&self.state);
        state.waiting.push((gate, pass, Arc::clone(crew), Box::new(work)));
        if !state.running {
            state.running = self.start();
            if !state.running {
                // No thread: the request is reported as failed, so it must never run. What stays is the
                // gate, which is free again only after the stream has come to it.
                let failed = state.waiting.pop();
                state.waiting.push((gate, pass, Arc::clone(crew), Box::new(|| ())));
                drop(state);
                drop(failed);
                self.gates.open(gate, pass);
                let text = "no thread for stream-ordered requests could be started";
                return Err(Failure::new(OpError::INTERNAL_ERROR, text));
            }
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
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

    /// Looks which requests' streams have come to them, and has those carried out.
    fn watch(self: &Arc<Self>) {
        let mut last = Instant::now();
        loop {
            let mut state = lock(&self.state);
            if state.waiting.is_empty() {
                if last.elapsed() > IDLE {
                    state.running = false;
                    return;
                }
                drop(wait_timeout(&self.changed, state, IDLE));
                continue;
            }
            let come = |(gate, pass, ..): &mut (Gate, u32, Arc<Crew>, Work)| {
                self.gates.has_come(*gate, *pass)
            };
            let ready: Vec<_> = state.waiting.extract_if(.., come).collect();
            drop(state);
            if !ready.is_empty() {
                last = Instant::now();
            }
            for (gate, pass, crew, work) in ready {
                let own = Arc::clone(self);
                crew.submit(move || {
                    let opener = Opener { ordered: own, gate, pass };
                    work();
                    drop(opener);
                });
            }
            match last.elapsed() {
                since if since < EAGER => std::hint::spin_loop(),
                since if since < Duration::from_millis(10) => std::thread::sleep(PAUSE),
                _ => std::thread::sleep(PAUSE_LONG),
            }
        }
    }
}

/// Opens the gate whatever becomes of the work.
struct Opener {
    ordered: Arc<Ordered>,
    gate: Gate,
    pass: u32,
}

impl Drop for Opener {
    fn drop(&mut self) {
        self.ordered.gates.open(self.gate, self.pass);
        lock(&self.ordered.state).free.push_back((self.gate, self.pass));
        self.ordered.changed.notify_all();
    }
}
