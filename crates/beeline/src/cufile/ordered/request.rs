//! One stream-ordered request, from its call to its end.
//!
//! Its stream comes to a gate, the host finds out what is asked for, and from then on host and kernel take turns at
//! the cells of the request's slot. What the host does are system calls on files, and looks at words; it waits for no
//! device and calls no driver, so that whatever the streams of the program wait for, a request whose stream has come
//! to it goes on to its end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_sys::cuda::{ForeignStream, Gate, Gates};

use super::super::crew::Crew;
use super::super::mover::Job;
use super::super::status::{Failure, OpError, Outcome};
use super::moving::Moving;
use super::slots::Run;
use crate::lock;

/// Largest slot of a request whose bytes the dispatcher itself takes out of the page cache.
const QUICK_MAX: u64 = 64 << 10;
/// Ended requests that are kept before somebody lets go of what they hold.
const BIN_MAX: usize = 64;
/// How long a thread looks for a cell that the kernel is about to give back, before it does something else.
const LINGER: Duration = Duration::from_micros(20);

/// What a request turns out to be when its stream has come to it.
pub(in super::super) enum Work {
    /// There is nothing to move.
    Over(Outcome<u64>),
    /// The host moves the bytes itself.
    Direct(Box<dyn FnOnce() -> Outcome<u64> + Send>),
    /// They go through the slot.
    Through(Box<Job>),
}

/// Reports how many bytes were moved, and how much time of the CPU that took. Called once, before the stream goes on.
pub(in super::super) type Finish = Box<dyn FnOnce(Outcome<u64>, Duration) -> Rest + Send>;

/// What goes when the stream has gone on: its end may wait for a device.
pub(in super::super) type Rest = Box<dyn Send>;

/// Finds out what is asked for.
pub(in super::super) type Begin = Box<dyn FnOnce() -> (Work, Finish) + Send>;

/// What requests share.
pub(super) struct Common {
    pub(super) gates: Arc<Gates>,
    pub(super) crew: Arc<Crew>,
    pub(super) threads: usize,
    pub(super) stall: Duration,
    /// Requests whose bytes are being moved.
    pub(super) moving: AtomicUsize,
    /// What ended requests held: its end may wait for a device, and must not where others depend on the thread.
    pub(super) bin: Mutex<Vec<Rest>>,
}

impl Common {
    /// Lets go of `rest` later.
    fn discard(&self, rest: Rest) {
        let full = {
            let mut bin = lock(&self.bin);
            bin.push(rest);
            bin.len() >= BIN_MAX
        };
        if full {
            self.empty_bin();
        }
    }

    /// Has a thread let go of what is kept.
    pub(super) fn empty_bin(&self) {
        let kept = std::mem::take(&mut *lock(&self.bin));
        if !kept.is_empty() {
            self.crew.submit(move || drop(kept));
        }
    }
}

/// A part of a request.
pub(super) type Task = Box<dyn FnOnce() + Send>;

/// Who carries parts of requests out.
pub(super) enum Hands<'a> {
    /// Other threads; the dispatcher only what takes no time.
    Crew,
    /// The dispatcher takes the first part, once it has looked at all requests: no other stream waits for it.
    Own(&'a mut Vec<Task>),
}

/// A request that is queued.
pub(super) struct Request {
    pub(super) gate: Gate,
    pub(super) pass: u32,
    /// Where there is one, there is a kernel between the gate and its end.
    pub(super) run: Option<Run>,
    /// From the device to the file.
    out: bool,
    pub(super) stream: ForeignStream,
    state: Mutex<State>,
}

enum State {
    Waiting(Begin),
    /// A thread finds out, or moves the bytes itself.
    Begun,
    Moving(Box<Moving>),
    /// Reported; nobody uses the slot any more once the kernel has ended.
    Over,
}

impl State {
    /// What is left of a request that was reported and that no thread is at any more.
    fn take_over(&mut self) -> Option<Box<Moving>> {
        let over = |moving: &Moving| moving.concluded && moving.workers == 0;
        if !matches!(self, Self::Moving(moving) if over(moving)) {
            return None;
        }
        match std::mem::replace(self, Self::Over) {
            Self::Moving(moving) => Some(moving),
            _ => None,
        }
    }
}

/// What became of a request that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Nothing,
    Progress,
    /// Its gate and its slot are free.
    Gone,
}

impl Request {
    pub(super) fn new(
        (gate, pass): (Gate, u32),
        stream: ForeignStream,
        (run, out): (Option<Run>, bool),
        begin: Begin,
    ) -> Self {
        Self { gate, pass, run, out, stream, state: Mutex::new(State::Waiting(begin)) }
    }

    /// Drops what it would have done: it is reported as failed by the call itself.
    pub(super) fn give_up(&self) {
        *lock(&self.state) = State::Over;
    }

    /// Looks how far the stream and the kernel have come, and has `hands` do what there is to do.
    pub(super) fn look(self: &Arc<Self>, common: &Arc<Common>, hands: &mut Hands<'_>) -> Seen {
        let mut state = lock(&self.state);
        let seen = match &mut *state {
            State::Waiting(_) if common.gates.has_come(self.gate, self.pass) => {
                let State::Waiting(begin) = std::mem::replace(&mut *state, State::Begun) else {
                    return Seen::Nothing;
                };
                drop(state);
                if matches!(hands, Hands::Crew) && self.is_quick() {
                    self.begin(begin, common, true);
                } else {
                    let task = move |own: &Arc<Self>, common: &Arc<Common>| {
                        own.begin(begin, common, false);
                    };
                    self.submit(common, hands, task);
                }
                return Seen::Progress;
            }
            State::Waiting(_) | State::Begun => Seen::Nothing,
            State::Over if self.is_unused(common) => Seen::Gone,
            State::Over => Seen::Nothing,
            State::Moving(moving) => {
                let seen = moving.look(self, common);
                let wanted = moving.hire(common);
                for _ in 0..wanted {
                    self.submit(common, hands, |request, common| request.work(common));
                }
                seen
            }
        };
        if let Some(moving) = state.take_over() {
            common.discard(moving);
            return Seen::Progress;
        }
        seen
    }

    /// Whether the dispatcher itself may begin it: a write, which begins with words alone, or a read of so little that
    /// the page cache may give it at once.
    fn is_quick(&self) -> bool {
        self.run.as_ref().is_some_and(|run| self.out || run.bytes() <= QUICK_MAX)
    }

    fn is_unused(&self, common: &Common) -> bool {
        self.run.is_none() || common.gates.has_ended(self.gate, self.pass)
    }

    fn submit(
        self: &Arc<Self>,
        common: &Arc<Common>,
        hands: &mut Hands<'_>,
        task: impl FnOnce(&Arc<Self>, &Arc<Common>) + Send + 'static,
    ) {
        let (request, shared) = (Arc::clone(self), Arc::clone(common));
        let task = move || task(&request, &shared);
        match hands {
            Hands::Own(own) if own.is_empty() => own.push(Box::new(task)),
            _ => common.crew.submit(task),
        }
    }

    /// Finds out what is asked for, and begins to move it; where `quick`, without a wait for a drive.
    fn begin(self: &Arc<Self>, begin: Begin, common: &Arc<Common>, quick: bool) {
        // Whatever becomes of it, the stream goes on.
        let mut opener = Opener { request: self, common, armed: true };
        let cpu = beeline_sys::thread::cpu_time();
        let (work, finish) = begin();
        let (outcome, finish) = match work {
            Work::Over(outcome) => (outcome, finish),
            Work::Direct(work) => (work(), finish),
            Work::Through(job) => match &self.run {
                Some(run) => {
                    opener.armed = false;
                    return self.start(*job, run, finish, common, quick);
                }
                None => {
                    let text = "the memory was the host's at the call, and is a device's now";
                    let failure = Failure::new(OpError::CUDA_MEMORY_TYPE_INVALID, text);
                    (Err(failure), finish)
                }
            },
        };
        common.discard(finish(outcome, beeline_sys::thread::cpu_time().saturating_sub(cpu)));
        // The opener does the rest.
    }

    fn start(
        self: &Arc<Self>,
        job: Job,
        run: &Run,
        finish: Finish,
        common: &Arc<Common>,
        quick: bool,
    ) {
        let write = job.is_write();
        let mut moving = Box::new(Moving::new(job, run, finish));
        moving.describe(self, common, moving.last);
        common.moving.fetch_add(1, Ordering::Relaxed);
        if write {
            *lock(&self.state) = State::Moving(moving);
            common.gates.open(self.gate, self.pass);
            return;
        }
        if quick && let Some((job, piece)) = moving.claim() {
            let place = run.start() + piece.place;
            match job.piece_now(run.host(), place, piece.start, piece.len) {
                Some(came) => moving.take(&piece, came, self, common),
                None => moving.put_back(&piece),
            }
        }
        if !quick {
            moving.workers = 1;
        }
        let wanted = moving.hire(common);
        *lock(&self.state) = State::Moving(moving);
        for _ in 0..wanted {
            self.submit(common, &mut Hands::Crew, |request, common| request.work(common));
        }
        if !quick {
            self.work(common);
        }
    }

    /// A thread's part: cells that are the host's turn, until there is none.
    fn work(self: &Arc<Self>, common: &Arc<Common>) {
        let Some(run) = &self.run else { return };
        let leave = Leave { request: self, common };
        let mut idle = Instant::now();
        loop {
            let claimed = {
                let mut state = lock(&self.state);
                let State::Moving(moving) = &mut *state else { break };
                if moving.concluded {
                    break;
                }
                moving.look(self, common);
                let more = moving.ring && moving.opened && !moving.concluded;
                moving.claim().ok_or(more)
            };
            let (job, piece) = match claimed {
                Ok(claimed) => claimed,
                Err(true) if idle.elapsed() < LINGER => {
                    std::hint::spin_loop();
                    continue;
                }
                Err(_) => break,
            };
            let cpu = beeline_sys::thread::cpu_time();
            let place = run.start() + piece.place;
            let came = job.piece(run.host(), place, piece.start, piece.len);
            let spent = beeline_sys::thread::cpu_time().saturating_sub(cpu);
            let mut state = lock(&self.state);
            let State::Moving(moving) = &mut *state else { break };
            moving.cpu = moving.cpu.saturating_add(spent);
            moving.take(&piece, came, self, common);
            idle = Instant::now();
        }
        drop(leave);
    }
}

/// Opens the gates of a request that has no bytes to move, whatever became of it.
struct Opener<'a> {
    request: &'a Arc<Request>,
    common: &'a Common,
    armed: bool,
}

impl Drop for Opener<'_> {
    fn drop(&mut self) {
        if self.armed {
            // The kernel's load is empty from the start.
            *lock(&self.request.state) = State::Over;
            self.common.gates.open_end(self.request.gate, self.request.pass);
            self.common.gates.open(self.request.gate, self.request.pass);
        }
    }
}

/// A thread leaves, also where it panics: then the request fails.
struct Leave<'a> {
    request: &'a Arc<Request>,
    common: &'a Common,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.request.state);
        let State::Moving(moving) = &mut *state else { return };
        moving.workers = moving.workers.saturating_sub(1);
        if std::thread::panicking() {
            let failure = Failure::new(OpError::INTERNAL_ERROR, "a thread of the request panicked");
            moving.fail(failure, self.request, self.common);
        }
        let over = state.take_over();
        drop(state);
        if let Some(over) = over {
            self.common.discard(over);
        }
    }
}
