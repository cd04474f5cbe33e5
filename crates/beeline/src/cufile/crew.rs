//! Threads of a session: helpers, who take part in large reads, and runners, who carry out what nobody
//! waits for in a call (batches, stream-ordered requests). Both bounded, both started when first needed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::mover::Share;
use crate::{lock, wait_timeout};

/// How long a helper looks for more before it sleeps: a program that reads in a loop comes back sooner, also where
/// the helper had little to do.
const LINGER: Duration = Duration::from_micros(100);
/// How long a runner does so after it was said that more is to be expected.
const LINGER_MICROS: u64 = 100;
/// For how long calls count as beside each other after they were.
const CROWD_MICROS: u64 = 2000;
/// How long a thread sleeps without work before it ends.
const IDLE: Duration = Duration::from_secs(5);

type Task = Box<dyn FnOnce() + Send>;

/// The threads.
pub(super) struct Crew {
    helpers_max: usize,
    runners_max: usize,
    cpus: usize,
    /// Calls that move much right now.
    active: AtomicUsize,
    epoch: Instant,
    /// When there was more than one, in microseconds of `epoch`.
    crowded_at: AtomicU64,
    /// Requests for help that nobody has taken.
    asked: AtomicUsize,
    /// Helpers that are awake and look for requests.
    looking: AtomicUsize,
    /// Until when, in microseconds of `epoch`, one runner looks for the next task before it sleeps.
    expects_until: AtomicU64,
    /// Tasks that nobody has taken.
    queued: AtomicUsize,
    state: Mutex<State>,
    help: Condvar,
    run: Condvar,
}

#[derive(Default)]
struct State {
    shares: VecDeque<(Arc<Share>, bool)>,
    tasks: VecDeque<Task>,
    helpers: usize,
    helpers_asleep: usize,
    runners: usize,
    runners_asleep: usize,
    /// A runner is awake and looks for a task. It takes one more look under the lock before it sleeps.
    runner_looks: bool,
}

/// Counts a call as active until dropped.
pub(super) struct Active<'a> {
    crew: &'a Crew,
    /// How many there were, this one included.
    level: usize,
    /// Whether others were active a moment ago.
    crowded: bool,
}

impl Active<'_> {
    /// Helpers for a request that is small enough to do without where others are active too.
    pub(super) fn alone_helpers(&self, most: usize) -> usize {
        if self.crowded { 0 } else { most.min(self.crew.helpers_max) }
    }

    /// This call's share of the machine, of which no more than `useful` threads gain anything; itself not counted.
    pub(super) fn fair_helpers(&self, most: usize, useful: usize) -> usize {
        let cpus = self.crew.cpus.min(useful);
        most.min((cpus / self.level).saturating_sub(1)).min(self.crew.helpers_max)
    }
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.crew.active.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Crew {
    pub(super) fn new(runners: usize) -> Arc<Self> {
        let cpus = std::thread::available_parallelism().map_or(2, usize::from);
        Arc::new(Self {
            helpers_max: cpus.saturating_sub(1).clamp(1, 32),
            runners_max: runners.clamp(1, 64),
            cpus,
            active: AtomicUsize::new(0),
            epoch: Instant::now(),
            crowded_at: AtomicU64::new(0),
            asked: AtomicUsize::new(0),
            looking: AtomicUsize::new(0),
            expects_until: AtomicU64::new(0),
            queued: AtomicUsize::new(0),
            state: Mutex::default(),
            help: Condvar::new(),
            run: Condvar::new(),
        })
    }

    /// Counts a call that moves much.
    pub(super) fn enter(&self) -> Active<'_> {
        let level = self.active.fetch_add(1, Ordering::Relaxed) + 1;
        let now = self.micros();
        let last = self.crowded_at.load(Ordering::Relaxed);
        if level > 1 && now.saturating_sub(last) > CROWD_MICROS / 8 {
            self.crowded_at.store(now.max(1), Ordering::Relaxed);
        }
        let recent = last != 0 && now.saturating_sub(last) < CROWD_MICROS;
        Active { crew: self, level, crowded: level > 1 || recent }
    }

    fn micros(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Says that another task is likely to come soon, and short: for a moment one runner that has nothing to do looks for it
    /// before it sleeps, as to wake one takes longer than a small write.
    pub(super) fn expect_more(&self) {
        let until = self.micros().saturating_add(LINGER_MICROS);
        self.expects_until.store(until, Ordering::Relaxed);
    }

    fn expects_more(&self) -> bool {
        self.micros() < self.expects_until.load(Ordering::Relaxed)
    }

    /// Asks `count` helpers to take part in `share`.
    pub(super) fn enlist(self: &Arc<Self>, share: &Arc<Share>, count: usize, force: bool) {
        if count > 0 {
            let mut state = lock(&self.state);
            // What nobody came for in time is not kept.
            state.shares.retain(|(share, _)| share.wants_help());
            for _ in 0..count {
                state.shares.push_back((Arc::clone(share), force));
            }
            // A helper that looks sees this, or, before it sleeps, what was queued: nobody else is woken for it. One helper
            // takes one entry, so all that is queued counts.
            let queued = state.shares.len();
            self.asked.store(queued, Ordering::SeqCst);
            let looking = self.looking.load(Ordering::SeqCst);
            let (wake, start) = called(queued, looking, state.helpers_asleep);
            for _ in 0..start.min(self.helpers_max.saturating_sub(state.helpers)) {
                if self.spawn("beeline-help", Self::helper) {
                    state.helpers += 1;
                }
            }
            drop(state);
            for _ in 0..wake {
                self.help.notify_one();
            }
        }
    }

    /// No more help is wanted for `share`: nothing of it is kept.
    pub(super) fn dismiss(&self, share: &Arc<Share>) {
        if self.asked.load(Ordering::SeqCst) > 0 {
            let mut state = lock(&self.state);
            state.shares.retain(|(one, _)| !Arc::ptr_eq(one, share));
            self.asked.store(state.shares.len(), Ordering::SeqCst);
        }
    }

    /// Has a runner carry out `task`; the caller, where no thread can be had.
    pub(super) fn submit(self: &Arc<Self>, task: impl FnOnce() + Send + 'static) {
        if let Err(task) = self.try_submit(Box::new(task)) {
            task();
        }
    }

    /// Has a runner carry out `task`; gives it back where no thread can be had.
    pub(super) fn try_submit(self: &Arc<Self>, task: Task) -> Result<(), Task> {
        let mut state = lock(&self.state);
        state.tasks.push_back(task);
        // One that looks or sleeps takes one task, however many there are.
        let lacking = state.tasks.len().saturating_sub(usize::from(state.runner_looks));
        if lacking > state.runners_asleep && state.runners < self.runners_max {
            if self.spawn("beeline-run", Self::runner) {
                state.runners += 1;
            } else if state.runners == 0 {
                return state.tasks.pop_back().map_or(Ok(()), Err);
            }
        }
        self.queued.store(state.tasks.len(), Ordering::Release);
        drop(state);
        if lacking > 0 {
            self.run.notify_one();
        }
        Ok(())
    }

    fn spawn(self: &Arc<Self>, name: &str, body: fn(&Self)) -> bool {
        let crew = Arc::clone(self);
        std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&crew)).is_ok()
    }

    fn helper(&self) {
        let mut idle_since = Instant::now();
        loop {
            if let Some((share, force)) = self.look() {
                if share.wants_help() {
                    share.help(force);
                }
                idle_since = Instant::now();
                continue;
            }
            let mut state = lock(&self.state);
            if !state.shares.is_empty() {
                continue;
            }
            if idle_since.elapsed() > IDLE {
                state.helpers -= 1;
                return;
            }
            state.helpers_asleep += 1;
            let mut state = wait_timeout(&self.help, state, IDLE);
            state.helpers_asleep -= 1;
        }
    }

    /// A request that wants help, if there is one within [`LINGER`].
    fn look(&self) -> Option<(Arc<Share>, bool)> {
        self.looking.fetch_add(1, Ordering::SeqCst);
        let since = Instant::now();
        loop {
            if self.asked.load(Ordering::SeqCst) > 0 {
                let mut state = lock(&self.state);
                if let Some(found) = state.shares.pop_front() {
                    self.asked.store(state.shares.len(), Ordering::SeqCst);
                    // Under the lock, so that nobody counts on it for another request.
                    self.looking.fetch_sub(1, Ordering::SeqCst);
                    return Some(found);
                }
            }
            if since.elapsed() > LINGER {
                self.looking.fetch_sub(1, Ordering::SeqCst);
                return None;
            }
            std::hint::spin_loop();
        }
    }

    fn runner(&self) {
        let mut idle_since = Instant::now();
        let mut state = lock(&self.state);
        loop {
            if let Some(task) = state.tasks.pop_front() {
                self.queued.store(state.tasks.len(), Ordering::Release);
                drop(state);
                // A task that panics must not take its thread along.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task));
                idle_since = Instant::now();
                state = lock(&self.state);
                continue;
            }
            if idle_since.elapsed() > IDLE {
                state.runners -= 1;
                return;
            }
            if !state.runner_looks && self.expects_more() {
                state.runner_looks = true;
                drop(state);
                while self.queued.load(Ordering::Acquire) == 0 && self.expects_more() {
                    std::hint::spin_loop();
                }
                state = lock(&self.state);
                state.runner_looks = false;
                continue;
            }
            state.runners_asleep += 1;
            state = wait_timeout(&self.run, state, IDLE);
            state.runners_asleep -= 1;
        }
    }
}

/// How many helpers to wake, and how many to start, where `queued` requests for one wait, `looking` look for requests and
/// `asleep` sleep.
fn called(queued: usize, looking: usize, asleep: usize) -> (usize, usize) {
    let lacking = queued.saturating_sub(looking);
    let wake = lacking.min(asleep);
    (wake, lacking - wake)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helpers_that_look_come_before_those_that_sleep_and_those_before_new_ones() {
        let check = |count, looking, asleep, expected| {
            assert_eq!(called(count, looking, asleep), expected, "{count} {looking} {asleep}");
        };
        check(1, 1, 5, (0, 0));
        check(1, 0, 5, (1, 0));
        check(3, 1, 1, (1, 1));
        check(3, 0, 0, (0, 3));
        check(2, 7, 0, (0, 0));
        // Those of two requests that ask at once, before anybody has come.
        check(10, 5, 0, (0, 5));
        check(10, 0, 5, (5, 5));
    }

    /// A burst comes before the one that sleeps has woken: here it never does.
    #[test]
    fn a_burst_starts_runners_beside_the_one_that_sleeps() {
        let crew = Crew::new(4);
        {
            let mut state = lock(&crew.state);
            (state.runners, state.runners_asleep) = (1, 1);
        }
        let (done, carried_out) = std::sync::mpsc::channel();
        for number in 0..3 {
            let done = done.clone();
            crew.submit(move || done.send(number).unwrap());
        }
        for _ in 0..3 {
            carried_out.recv_timeout(Duration::from_secs(20)).unwrap();
        }
    }

    /// One that looks counts for one task: it takes it without being woken, and the second one is somebody else's.
    #[test]
    fn a_runner_that_looks_takes_one_task() {
        for (looks, asleep, runners_max, tasks, started) in [
            (true, 0, 4, 1, 0),
            (true, 0, 4, 2, 1),
            (true, 1, 4, 2, 0),
            (false, 0, 4, 1, 1),
            (true, 0, 1, 3, 0),
        ] {
            let crew = Crew::new(runners_max);
            let before = asleep + usize::from(looks);
            {
                let mut state = lock(&crew.state);
                (state.runner_looks, state.runners_asleep, state.runners) = (looks, asleep, before);
            }
            // They do not end before all were submitted, so none takes two.
            let (open, gate) = std::sync::mpsc::channel::<()>();
            let gate = Arc::new(Mutex::new(gate));
            for _ in 0..tasks {
                let gate = Arc::clone(&gate);
                crew.submit(move || {
                    let _ = lock(&gate).recv();
                });
            }
            let runners = lock(&crew.state).runners - before;
            assert_eq!(runners, started, "{looks} {asleep} {runners_max} {tasks}");
            drop(open);
        }
    }

    #[test]
    fn what_comes_while_a_runner_looks_and_just_after_is_carried_out() {
        let crew = Crew::new(1);
        let (done, carried_out) = std::sync::mpsc::channel();
        for pause_us in (0..300).step_by(3) {
            let done = done.clone();
            crew.expect_more();
            crew.submit(move || done.send(()).unwrap());
            // One that sleeps though there is a task would take it when it wakes by itself.
            carried_out.recv_timeout(IDLE - Duration::from_secs(1)).unwrap();
            std::thread::sleep(Duration::from_micros(pause_us));
        }
    }
}
