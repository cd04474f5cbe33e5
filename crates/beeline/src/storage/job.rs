//! One request under way: what is claimed, what is finished, who waits.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use beeline_core::plan::{Operation, Plan, StorageRoute};
use beeline_core::transfer::{self, Chunk, Piece};

use super::engine::Shared;
use super::file::File;
use super::report::{Report, RouteReport};
use crate::error::{Error, Kind, Result};
use crate::gpu::Buffer;
use crate::memory::{Pool, Slot};
use crate::{lock, wait_timeout};

/// How many times the stall timeout a write-back may take.
const SYNC_PATIENCE: u32 = 10;
/// How often a wait looks whether a worker is stuck.
const LOOK_AFTER: Duration = Duration::from_millis(100);

/// What a worker gets of a job.
pub(super) enum Claim {
    /// This chunk, and the slot for it unless it is mapped.
    Chunk(usize, Option<Slot>),
    /// There are chunks, but not for this worker now.
    Later,
    /// There are none any more.
    Nothing,
}

/// A request, split and planned, shared by the workers that carry it out.
pub(super) struct Job {
    pub(super) operation: Operation,
    pub(super) files: Vec<(Arc<File>, Plan<StorageRoute>)>,
    /// Every byte goes to each of them (one for a write).
    pub(super) devices: Vec<Buffer>,
    pub(super) split: transfer::Transfer,
    /// Whether chunks are mapped file pages, which need no slot of the pool.
    pub(super) mapped: bool,
    /// Whether written bytes shall be on the drive before the transfer counts as done.
    pub(super) sync: bool,
    started_at: Instant,
    state: Mutex<State>,
    done: Condvar,
}

/// Where the write-back of a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sync {
    #[default]
    Due,
    UnderWay,
    Done,
}

#[derive(Default)]
struct State {
    claimed: usize,
    finished: usize,
    stopped: bool,
    sync: Sync,
    error: Option<Error>,
    /// Slots of the pool that hold bytes of this job.
    slots: usize,
    abandoned: bool,
    report: Report,
    last_progress: Option<Instant>,
    finished_at: Option<Instant>,
}

impl Job {
    pub(super) fn new(
        operation: Operation,
        files: Vec<(Arc<File>, Plan<StorageRoute>)>,
        devices: Vec<Buffer>,
        split: transfer::Transfer,
        (mapped, sync): (bool, bool),
    ) -> Self {
        let now = Instant::now();
        let state =
            State { finished_at: split.chunks.is_empty().then_some(now), ..State::default() };
        Self {
            operation,
            files,
            devices,
            split,
            mapped,
            sync,
            started_at: now,
            state: Mutex::new(state),
            done: Condvar::new(),
        }
    }

    /// The next chunk to work on, if any is left, with the idle slot it needs. In one step: a slot is
    /// never taken for a chunk that another worker gets, so a caller that saw the job finish finds
    /// every slot of it idle.
    pub(super) fn claim(&self, mapped: bool, pool: &Pool) -> Claim {
        let mut state = lock(&self.state);
        if state.stopped || state.claimed == self.split.chunks.len() {
            return Claim::Nothing;
        }
        let slot = if self.mapped { None } else { pool.reuse() };
        if !(if self.mapped { mapped } else { slot.is_some() }) {
            return Claim::Later;
        }
        state.claimed += 1;
        state.slots += usize::from(slot.is_some());
        Claim::Chunk(state.claimed - 1, slot)
    }

    /// Whether nobody wants the rest any more.
    pub(super) fn is_stopped(&self) -> bool {
        lock(&self.state).stopped
    }

    pub(super) fn chunk(&self, index: usize) -> Option<(&Chunk, &[Piece], &Arc<File>)> {
        let chunk = self.split.chunks.get(index)?;
        let pieces = self.split.pieces.get(chunk.pieces.clone())?;
        let (file, _) = self.files.get(chunk.file as usize)?;
        Some((chunk, pieces, file))
    }

    pub(super) fn plan(&self, chunk: &Chunk) -> Option<&Plan<StorageRoute>> {
        self.files.get(chunk.file as usize).map(|(_, plan)| plan)
    }

    /// Its slot can be used by others from now on. Told before the slot goes back to the pool, so that
    /// no more slots ever count as quarantined than as busy.
    pub(super) fn release_slot(&self, shared: &Shared) {
        let mut state = lock(&self.state);
        state.slots -= 1;
        if state.abandoned {
            shared.pool.unquarantine(1);
        }
    }

    /// A chunk is finished, well or badly, and holds no slot any more. True where the caller shall now
    /// call [`Self::write_back`] and tell its outcome to [`Self::synced`].
    pub(super) fn finish(&self, outcome: Result<RouteReport>, shared: &Shared) -> bool {
        let mut state = lock(&self.state);
        state.finished += 1;
        match outcome {
            Ok(part) => {
                state.report.bytes += part.bytes;
                state.report.add(part);
                state.last_progress = Some(Instant::now());
            }
            Err(error) => state.stop(error),
        }
        self.settle(state, shared)
    }

    /// The write-back is over, well or badly.
    pub(super) fn synced(&self, outcome: Result<()>, shared: &Shared) {
        let mut state = lock(&self.state);
        state.sync = Sync::Done;
        if let Err(error) = outcome {
            state.stop(error);
        }
        self.settle(state, shared);
    }

    /// Ends the job with `error` once what is in flight has finished.
    pub(super) fn stop(&self, error: Error, shared: &Shared) {
        let mut state = lock(&self.state);
        if state.finished_at.is_none() {
            state.stop(error);
        }
        self.settle(state, shared);
    }

    /// Marks the job finished if it is. True where it has to be written back first.
    fn settle(&self, mut state: MutexGuard<'_, State>, shared: &Shared) -> bool {
        let all = state.stopped || state.claimed == self.split.chunks.len();
        let over = all && state.finished == state.claimed && state.finished_at.is_none();
        if !over || state.sync == Sync::UnderWay {
            return false;
        }
        if self.sync && !state.stopped && state.sync == Sync::Due {
            state.sync = Sync::UnderWay;
            state.last_progress = Some(Instant::now());
            return true;
        }
        state.finished_at = Some(Instant::now());
        self.done.notify_all();
        drop(state);
        shared.job_left();
        false
    }

    /// Puts what was written on the drives; may take as long as they need.
    pub(super) fn write_back(&self) -> Result<()> {
        self.files.iter().try_for_each(|(file, _)| {
            rustix::fs::fdatasync(&**file.buffered())
                .map_err(|error| Error::at("flush", file.path(), error.into()))
        })
    }
}

impl State {
    fn stop(&mut self, error: Error) {
        self.stopped = true;
        self.error.get_or_insert(error);
    }

    /// Counts the slots in flight as nobody's any more; once.
    fn quarantine(&mut self, shared: &Shared) {
        if !std::mem::replace(&mut self.abandoned, true) {
            shared.pool.quarantine(self.slots);
        }
    }
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes asked for.
    pub total: u64,
}

/// A transfer under way. Dropping it cancels what has not started; what is in flight finishes on its
/// own and keeps its memory until then.
pub struct Transfer {
    pub(super) job: Arc<Job>,
    pub(super) shared: Arc<Shared>,
    pub(super) deadline: Option<Instant>,
    pub(super) what: String,
}

impl Transfer {
    /// How far it is.
    pub fn progress(&self) -> Progress {
        Progress { done: lock(&self.job.state).report.bytes, total: self.job.split.bytes }
    }

    /// Whether everything has finished, well or badly.
    pub fn is_finished(&self) -> bool {
        lock(&self.job.state).finished_at.is_some()
    }

    /// Starts nothing more of it. [`Self::wait`] then returns an error with `is_cancelled`, once
    /// what is in flight has finished.
    pub fn cancel(&self) {
        self.job.stop(cancelled(), &self.shared);
    }

    /// Waits for up to `span` and says whether [`Self::wait`] would return at once: the transfer has
    /// finished, or its deadline has passed, or it has made no progress for too long.
    pub fn wait_for(&self, span: Duration) -> bool {
        // A span without an end in sight is no reason to overflow.
        let until = Instant::now().checked_add(span);
        let mut state = lock(&self.job.state);
        loop {
            let now = Instant::now();
            if state.finished_at.is_some() || self.overdue(&state, now).is_some() {
                return true;
            }
            if until.is_some_and(|until| now >= until) {
                return false;
            }
            let stalled = self.stalled(&state, now);
            let step = [until, self.deadline]
                .into_iter()
                .flatten()
                .map(|end| end.saturating_duration_since(now))
                .fold(LOOK_AFTER, Duration::min);
            if stalled > Duration::from_secs(1) {
                drop(state);
                self.shared.replace_stuck();
                state = lock(&self.job.state);
                if state.finished_at.is_some() {
                    return true;
                }
            }
            state = wait_timeout(&self.job.done, state, step);
        }
    }

    /// Why the wait shall end although the transfer has not.
    fn overdue(&self, state: &State, now: Instant) -> Option<String> {
        if let Some(deadline) = self.deadline {
            return (now >= deadline).then(|| "did not finish by its deadline".to_owned());
        }
        let stalled = self.stalled(state, now);
        // A drive may take its time to put gigabytes in order, and tells nothing meanwhile.
        let patience = if state.sync == Sync::UnderWay { SYNC_PATIENCE } else { 1 };
        let too_long = stalled > self.shared.config.stall_timeout.saturating_mul(patience);
        too_long.then(|| format!("made no progress for {:.0} s", stalled.as_secs_f64()))
    }

    /// For how long nothing has finished.
    fn stalled(&self, state: &State, now: Instant) -> Duration {
        now.saturating_duration_since(state.last_progress.unwrap_or(self.job.started_at))
    }

    /// Waits until the transfer has finished.
    ///
    /// # Errors
    /// The first failure of any chunk; `is_cancelled`; `is_timeout` where the deadline passes, or
    /// nothing has finished for [`crate::config::Config::stall_timeout`]. After a timeout, bytes of
    /// the destination may still change until the chunks in flight have finished.
    pub fn wait(self) -> Result<Report> {
        self.wait_with(|_| {})
    }

    /// [`Self::wait`], calling `tick` about ten times a second with how far the transfer is.
    ///
    /// # Errors
    /// Those of [`Self::wait`].
    pub fn wait_with(self, mut tick: impl FnMut(Progress)) -> Result<Report> {
        while !self.wait_for(LOOK_AFTER) {
            tick(self.progress());
        }
        let state = lock(&self.job.state);
        if state.finished_at.is_some() {
            return self.result(state);
        }
        // It may have moved on between the two looks, but its owner's time is up all the same.
        let why = self.overdue(&state, Instant::now());
        Err(self.abandon(state, &why.unwrap_or_else(|| "made no progress for too long".to_owned())))
    }

    fn result(&self, mut state: MutexGuard<'_, State>) -> Result<Report> {
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        let mut report = std::mem::take(&mut state.report);
        let end = state.finished_at.unwrap_or_else(Instant::now);
        report.elapsed = end.saturating_duration_since(self.job.started_at);
        Ok(report)
    }

    /// Gives up the wait: what is in flight stays with the workers, and is counted.
    fn abandon(&self, mut state: MutexGuard<'_, State>, why: &str) -> Error {
        state.stopped = true;
        let in_flight = state.claimed - state.finished;
        state.quarantine(&self.shared);
        let (done, total) = (state.report.bytes, self.job.split.bytes);
        let text = format!("{} {why}: {done} of {total} bytes had arrived", self.what);
        if in_flight == 0 {
            return Error::new(Kind::Timeout, format!("{text}, and nothing is in flight"))
                .remedy("give it more time");
        }
        let still =
            format!("{in_flight} chunks are still in flight and their buffers stay quarantined");
        Error::new(Kind::Timeout, format!("{text}, {still}")).remedy(
            "give it more time, or look for a drive or network file system that does not answer",
        )
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.is_finished() {
            return;
        }
        self.cancel();
        let mut state = lock(&self.job.state);
        if state.finished_at.is_none() {
            state.quarantine(&self.shared);
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("what", &self.what).field("at", &self.progress()).finish()
    }
}

fn cancelled() -> Error {
    Error::new(Kind::Cancelled, "the transfer was cancelled")
}

/// Cancels every transfer it was given to, also those that start later. Cheap to clone.
#[derive(Clone, Default)]
pub struct CancelToken {
    inner: Arc<Mutex<Token>>,
}

#[derive(Default)]
struct Token {
    cancelled: bool,
    jobs: Vec<(Weak<Job>, Weak<Shared>)>,
}

impl CancelToken {
    /// A token that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels.
    pub fn cancel(&self) {
        let jobs = {
            let mut token = lock(&self.inner);
            token.cancelled = true;
            std::mem::take(&mut token.jobs)
        };
        for (job, shared) in jobs {
            if let Some((job, shared)) = job.upgrade().zip(shared.upgrade()) {
                job.stop(cancelled(), &shared);
            }
        }
    }

    /// Whether [`Self::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        lock(&self.inner).cancelled
    }

    /// # Errors
    /// `is_cancelled` where the token is.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(cancelled()) } else { Ok(()) }
    }

    pub(super) fn watch(&self, job: &Arc<Job>, shared: &Arc<Shared>) {
        let mut token = lock(&self.inner);
        token.jobs.retain(|(job, _)| job.strong_count() > 0);
        token.jobs.push((Arc::downgrade(job), Arc::downgrade(shared)));
        let already = token.cancelled;
        drop(token);
        if already {
            job.stop(cancelled(), shared);
        }
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CancelToken({})", self.is_cancelled())
    }
}
