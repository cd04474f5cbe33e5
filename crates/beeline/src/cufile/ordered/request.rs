//! One stream-ordered request, from its call to its end.
//!
//! Its stream comes to a gate, the host finds out what is asked for, and from then on host and kernel take turns at
//! the cells of the request's slot. What the host does are system calls on files, and looks at words; it waits for no
//! device and calls no driver, so that whatever the streams of the program wait for, a request whose stream has come
//! to it goes on to its end.
//!
//! The dispatcher only looks at words, begins what begins with words, and takes a few bytes that the page cache has. All
//! else is done by the threads of a crew; without a lock, the caller is told and gates are opened.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use beeline_sys::cuda::{Gate, Gates};

use super::super::crew::Crew;
use super::super::mover::Job;
use super::super::status::{Failure, OpError, Outcome};
use super::moving::{Moving, Report};
use super::slots::Run;
use crate::lock;

/// Largest read that the dispatcher takes out of the page cache, and largest write that it begins.
const QUICK_READ: u64 = 64 << 10;
const QUICK_WRITE: u64 = 4 << 20;
/// How long a thread looks for a cell that the kernel is about to give back, before it does something else.
const LINGER: Duration = Duration::from_micros(20);
/// The same for one that was called for a small write before the kernel has ended: about as long as that takes.
const LINGER_EARLY: Duration = Duration::from_micros(60);
/// Largest write for which a thread is called so early, and how many are under way at most then.
const EARLY_WRITE: u64 = 64 << 10;
const EARLY_MAX: usize = 2;
/// Pieces after which a thread looks what else there is to do.
const PIECES_MAX: usize = 32;

/// A request that waits for its stream.
pub(in super::super) trait Ask: Send {
    /// Finds out what is asked for, now that the stream has come to it; later, where that is more than `limit` bytes.
    fn begin(self: Box<Self>, limit: Option<u64>) -> Begun;

    /// Reports that nobody could.
    fn fail(self: Box<Self>, failure: Failure) -> Rest;
}

/// What a request turns out to be.
pub(in super::super) enum Begun {
    Now(Work, Finish),
    Later(Box<dyn Ask>),
}

/// What there is to do.
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

/// A part of a request.
pub(super) type Task = Box<dyn FnOnce() + Send>;

/// What requests share.
pub(super) struct Common {
    pub(super) gates: Arc<Gates>,
    pub(super) crew: Arc<Crew>,
    /// Tells callers what failed: its thread may wait for whoever reads the log, and never for a file.
    pub(super) tellers: Arc<Crew>,
    pub(super) threads: usize,
    pub(super) stall: Duration,
    /// Requests whose bytes are being moved.
    pub(super) moving: AtomicUsize,
    /// What ended requests held; let go of by a thread on which nothing depends.
    pub(super) bin: Mutex<Vec<Rest>>,
    /// What no thread could be had for, and whose it is.
    pub(super) pending: Mutex<Vec<(Arc<Crew>, Task)>>,
}

impl Common {
    pub(super) fn new(gates: Gates, threads: usize, stall: Duration) -> Self {
        Self {
            gates: Arc::new(gates),
            // Its own: threads of plain requests wait for copies, which a closed gate may hold up.
            crew: Crew::new(threads),
            tellers: Crew::new(1),
            threads,
            stall,
            moving: AtomicUsize::new(0),
            bin: Mutex::default(),
            pending: Mutex::default(),
        }
    }

    /// Has a thread of the crew do it, later where none can be had now; never the caller.
    fn submit(&self, task: Task) {
        self.submit_to(&self.crew, task);
    }

    fn submit_to(&self, crew: &Arc<Crew>, task: Task) {
        if let Err(task) = crew.try_submit(task) {
            lock(&self.pending).push((Arc::clone(crew), task));
        }
    }

    /// Has threads let go of what ended requests held, and do what is left over.
    pub(super) fn clear(&self) {
        let kept = std::mem::take(&mut *lock(&self.bin));
        if !kept.is_empty() {
            self.submit(Box::new(move || drop(kept)));
        }
        let pending = std::mem::take(&mut *lock(&self.pending));
        pending.into_iter().for_each(|(crew, task)| self.submit_to(&crew, task));
    }

    fn discard(&self, rest: Rest) {
        lock(&self.bin).push(rest);
    }
}

/// A request that is queued.
pub(super) struct Request {
    pub(super) gate: Gate,
    pub(super) pass: u32,
    /// Where there is one, there is a kernel between the gate and its end.
    run: Option<Run>,
    /// How many bytes the dispatcher may begin with; none where there is no kernel.
    quick: Option<u64>,
    /// The caller was told, and the gates were opened.
    reported: AtomicBool,
    state: Mutex<State>,
}

enum State {
    Waiting(Box<dyn Ask>),
    /// Its stream has come, and a thread was asked for.
    Come(Box<dyn Ask>, Instant),
    /// A thread finds out, or moves the bytes itself.
    Running,
    Moving(Box<Moving>),
    /// No thread is at it any more.
    Over,
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
        (run, out): (Option<Run>, bool),
        ask: Box<dyn Ask>,
    ) -> Self {
        let quick = run.is_some().then_some(if out { QUICK_WRITE } else { QUICK_READ });
        let (reported, state) = (AtomicBool::new(false), Mutex::new(State::Waiting(ask)));
        Self { gate, pass, run, quick, reported, state }
    }

    /// One that was reported as failed by its call. What it holds is free when its stream has come through.
    pub(super) fn failed((gate, pass): (Gate, u32), run: Option<Run>) -> Self {
        let (reported, state) = (AtomicBool::new(true), Mutex::new(State::Over));
        Self { gate, pass, run, quick: None, reported, state }
    }

    /// Drops what it would have done: its call reports it as failed.
    pub(super) fn give_up(&self, common: &Common) {
        *lock(&self.state) = State::Over;
        drop(Opener { request: self, common, open: true });
    }

    /// Looks how far the stream and the kernel have come, and has threads do what there is to do. Only the dispatcher
    /// calls it.
    pub(super) fn look(self: &Arc<Self>, common: &Arc<Common>) -> Seen {
        let (mut wanted, mut report, mut progress) = (0, None, false);
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            // A thread is just at it: to wait for it would have it wake the dispatcher.
            Err(TryLockError::WouldBlock) => return Seen::Nothing,
        };
        match &mut *state {
            State::Waiting(_) if common.gates.has_come(self.gate, self.pass) => {
                let State::Waiting(ask) = std::mem::replace(&mut *state, State::Running) else {
                    return Seen::Nothing;
                };
                drop(state);
                self.come(ask, common);
                return Seen::Progress;
            }
            State::Come(_, since) if since.elapsed() > common.stall => {
                let State::Come(ask, _) = std::mem::replace(&mut *state, State::Running) else {
                    return Seen::Nothing;
                };
                drop(state);
                let text = format!("no thread came free for it within {:?}", common.stall);
                self.tell_later(common, move |request, common| {
                    let _opener = Opener { request, common, open: true };
                    common.discard(ask.fail(Failure::timeout(text)));
                });
                return Seen::Progress;
            }
            State::Waiting(_) | State::Come(..) | State::Running => {}
            State::Over if self.is_unused(common) => return Seen::Gone,
            State::Over => {}
            State::Moving(moving) => {
                progress = moving.look(self, common);
                wanted = moving.hire(common);
                report = moving.report.take();
            }
        }
        let over = state.take_over();
        drop(state);
        for _ in 0..wanted {
            self.submit(common, |request, common| request.work(common));
        }
        progress |= report.is_some() || over.is_some();
        if let Some(report) = report {
            self.pass_on(report, common);
        }
        if let Some(over) = over {
            common.discard(over);
        }
        if progress { Seen::Progress } else { Seen::Nothing }
    }

    /// Whether neither its stream nor its kernel uses its words and its slot any more.
    fn is_unused(&self, common: &Common) -> bool {
        self.reported.load(Ordering::Acquire)
            && common.gates.has_come(self.gate, self.pass)
            && (self.run.is_none() || common.gates.has_ended(self.gate, self.pass))
    }

    fn submit(
        self: &Arc<Self>,
        common: &Arc<Common>,
        task: impl FnOnce(&Arc<Self>, &Arc<Common>) + Send + 'static,
    ) {
        let (request, shared) = (Arc::clone(self), Arc::clone(common));
        common.submit(Box::new(move || task(&request, &shared)));
    }

    /// Its stream has come.
    fn come(self: &Arc<Self>, ask: Box<dyn Ask>, common: &Arc<Common>) {
        let _abort = Abort { request: self, common };
        let later = match self.quick {
            None => ask,
            Some(limit) => match ask.begin(Some(limit)) {
                Begun::Now(work, finish) => return self.carry_out(work, finish, common, true),
                Begun::Later(ask) => ask,
            },
        };
        *lock(&self.state) = State::Come(later, Instant::now());
        self.submit(common, |request, common| request.begin(common));
    }

    fn begin(self: &Arc<Self>, common: &Arc<Common>) {
        let _abort = Abort { request: self, common };
        let ask = {
            let mut state = lock(&self.state);
            match std::mem::replace(&mut *state, State::Running) {
                State::Come(ask, _) => ask,
                other => {
                    // It was too late.
                    *state = other;
                    return;
                }
            }
        };
        if let Begun::Now(work, finish) = ask.begin(None) {
            self.carry_out(work, finish, common, false);
        }
    }

    /// `quick`: without a wait for a drive, or for whoever reads the log.
    fn carry_out(self: &Arc<Self>, work: Work, finish: Finish, common: &Arc<Common>, quick: bool) {
        let (outcome, cpu) = match work {
            Work::Over(outcome) => (outcome, Duration::ZERO),
            Work::Direct(work) => {
                let cpu = beeline_sys::thread::cpu_time();
                let outcome = work();
                (outcome, beeline_sys::thread::cpu_time().saturating_sub(cpu))
            }
            Work::Through(job) => match &self.run {
                Some(run) => return self.start(*job, run, finish, common, quick),
                None => {
                    let text = "the request has no slot";
                    (Err(Failure::new(OpError::INTERNAL_ERROR, text)), Duration::ZERO)
                }
            },
        };
        let report = Report { finish, outcome, cpu, open: true };
        *lock(&self.state) = State::Over;
        if quick { self.pass_on(report, common) } else { self.tell(report, common) }
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
        let others = common.moving.fetch_add(1, Ordering::Relaxed);
        let slot = (run.cell(), run.bytes());
        let mut moving = Box::new(Moving::new(job, slot, others, finish));
        moving.describe(self, common, moving.last);
        if write {
            let early = !moving.ring && moving.last <= EARLY_WRITE && others < EARLY_MAX;
            moving.workers = usize::from(early);
            *lock(&self.state) = State::Moving(moving);
            common.gates.open(self.gate, self.pass);
            if early {
                // It comes while the kernel runs. Where that takes longer, it goes, and is called again.
                self.submit(common, |request, common| request.work_early(common));
            }
            return;
        }
        if !quick {
            moving.workers = 1;
        } else if let Some((job, piece)) = moving.claim() {
            let place = run.start() + piece.place;
            match job.piece_now(run.host(), place, piece.start, piece.len) {
                Some(came) => moving.take(&piece, came, self, common),
                None => moving.put_back(&piece),
            }
        }
        let (wanted, report) = (moving.hire(common), moving.report.take());
        *lock(&self.state) = State::Moving(moving);
        for _ in 0..wanted {
            self.submit(common, |request, common| request.work(common));
        }
        match report {
            Some(report) => self.pass_on(report, common),
            None if quick => {}
            None => self.work(common),
        }
    }

    /// [`Self::work`], for a write whose kernel runs yet.
    fn work_early(self: &Arc<Self>, common: &Arc<Common>) {
        let since = Instant::now();
        // Without the lock, which the dispatcher takes again and again.
        while !common.gates.has_ended(self.gate, self.pass) && since.elapsed() < LINGER_EARLY {
            std::hint::spin_loop();
        }
        self.work(common);
        // A program that writes little at a time comes again soon.
        common.crew.expect_more();
    }

    /// A thread's part: cells that are the host's turn, until there is none.
    fn work(self: &Arc<Self>, common: &Arc<Common>) {
        let Some(run) = &self.run else { return };
        let leave = Leave { request: self, common };
        let mut idle = Instant::now();
        let mut pieces = 0;
        while pieces < PIECES_MAX {
            let (claimed, report) = {
                let mut state = lock(&self.state);
                let State::Moving(moving) = &mut *state else { break };
                moving.look(self, common);
                let more = moving.ring && moving.opened && !moving.concluded;
                (moving.claim().ok_or(more), moving.report.take())
            };
            if let Some(report) = report {
                self.tell(report, common);
            }
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
            let report = {
                let mut state = lock(&self.state);
                let State::Moving(moving) = &mut *state else { break };
                moving.cpu = moving.cpu.saturating_add(spent);
                moving.take(&piece, came, self, common);
                moving.report.take()
            };
            if let Some(report) = report {
                self.tell(report, common);
            }
            pieces += 1;
            idle = Instant::now();
        }
        drop(leave);
    }

    /// Tells the caller and lets the stream go on.
    fn tell(&self, report: Report, common: &Common) {
        let Report { finish, outcome, cpu, open } = report;
        let _opener = Opener { request: self, common, open };
        common.discard(finish(outcome, cpu));
    }

    /// [`Self::tell`], by another thread where it takes more than a few words: what failed is logged. Not by one of those
    /// that it may be about: they all may hang in a file.
    fn pass_on(self: &Arc<Self>, report: Report, common: &Arc<Common>) {
        if report.outcome.is_ok() {
            return self.tell(report, common);
        }
        self.tell_later(common, move |request, common| request.tell(report, common));
    }

    fn tell_later(
        self: &Arc<Self>,
        common: &Arc<Common>,
        task: impl FnOnce(&Arc<Self>, &Arc<Common>) + Send + 'static,
    ) {
        let (request, shared) = (Arc::clone(self), Arc::clone(common));
        common.submit_to(&common.tellers, Box::new(move || task(&request, &shared)));
    }
}

impl State {
    /// What is left of a request that was reported and that no thread is at any more.
    fn take_over(&mut self) -> Option<Box<Moving>> {
        let over =
            |moving: &Moving| moving.concluded && moving.workers == 0 && moving.report.is_none();
        if !matches!(self, Self::Moving(moving) if over(moving)) {
            return None;
        }
        match std::mem::replace(self, Self::Over) {
            Self::Moving(moving) => Some(moving),
            _ => None,
        }
    }
}

/// Opens the gates of a request, whatever became of what was done before.
struct Opener<'a> {
    request: &'a Request,
    common: &'a Common,
    /// Also the first one: the stream still waits there.
    open: bool,
}

impl Drop for Opener<'_> {
    fn drop(&mut self) {
        let Request { gate, pass, .. } = *self.request;
        self.common.gates.open_end(gate, pass);
        if self.open {
            self.common.gates.open(gate, pass);
        }
        // Last: from then on the words may be another request's.
        self.request.reported.store(true, Ordering::Release);
        let mut state = lock(&self.request.state);
        if matches!(&*state, State::Running) {
            *state = State::Over;
        }
    }
}

/// Lets the stream go on where finding out what is asked for panics.
struct Abort<'a> {
    request: &'a Request,
    common: &'a Common,
}

impl Drop for Abort<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() || self.request.reported.load(Ordering::Acquire) {
            return;
        }
        if matches!(&*lock(&self.request.state), State::Running) {
            drop(Opener { request: self.request, common: self.common, open: true });
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
        let report = moving.report.take();
        let over = state.take_over();
        drop(state);
        if let Some(report) = report {
            self.request.tell(report, self.common);
        }
        if let Some(over) = over {
            self.common.discard(over);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use beeline_sys::mem::HostMem;

    use super::*;

    struct Nobody;

    impl Ask for Nobody {
        fn begin(self: Box<Self>, _: Option<u64>) -> Begun {
            Begun::Now(Work::Over(Ok(0)), Box::new(|_, _| Box::new(())))
        }

        fn fail(self: Box<Self>, _: Failure) -> Rest {
            Box::new(())
        }
    }

    /// All threads that deal with files hang: who waits is told all the same, and the stream let go on.
    #[test]
    fn what_failed_is_told_though_every_thread_hangs_in_a_file() {
        let host = Arc::new(HostMem::anonymous(4096).unwrap());
        let common = Arc::new(Common::new(Gates::without_device(host), 1, Duration::ZERO));
        let (hangs, hung) = mpsc::channel::<()>();
        common.submit(Box::new(move || {
            let _ = hung.recv();
        }));
        let request = || Arc::new(Request::new((Gate(0), 1), (None, false), Box::new(Nobody)));
        let soon = Duration::from_secs(20);

        let (failed, told) = (request(), mpsc::channel());
        let finish: Finish = Box::new(move |outcome, _| {
            told.0.send(outcome.is_err()).unwrap();
            Box::new(())
        });
        let outcome = Err(Failure::timeout("a read did not end"));
        failed.pass_on(Report { finish, outcome, cpu: Duration::ZERO, open: true }, &common);
        assert_eq!(told.1.recv_timeout(soon), Ok(true));

        let late = request();
        *lock(&late.state) = State::Come(Box::new(Nobody), Instant::now());
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(late.look(&common), Seen::Progress);
        let since = Instant::now();
        while ![&failed, &late].iter().all(|one| one.reported.load(Ordering::Acquire)) {
            assert!(since.elapsed() < soon, "the stream was not let go on");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(hangs);
    }
}
