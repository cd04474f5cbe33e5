//! The engine: takes requests, keeps workers, bounds everything.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use beeline_core::plan::{Mode, Operation, Plan, StorageRequest, StorageRoute};
use beeline_core::segment::Segment;
use beeline_core::transfer::{Grid, split};

use super::file::File;
use super::job::{CancelToken, Claim, Job, Transfer};
use super::worker::{Held, Worker};
use crate::config::{Config, SLOT_BYTES};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, Gpu};
use crate::memory::{Budget, Pool, PoolUsage, Slot};
use crate::{lock, wait_timeout};

/// Bytes of a mapped chunk: registering page cache costs per call, so pieces are large.
const MAPPED_BYTES: u64 = 64 << 20;
/// How long a worker that only a deep thread pool needed stays without work.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long dropping an engine waits for its workers; one stuck in a system call is left behind.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// After how long in one system call a worker counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(1);

/// What to move. Build it with [`Request::read`] or [`Request::write`], then set what differs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// Which way.
    pub operation: Operation,
    /// The files; segments name them by index.
    pub files: Vec<Arc<File>>,
    /// Which bytes go where.
    pub segments: Vec<Segment>,
    /// The destinations of a read, each of which gets all bytes; the one source of a write.
    pub devices: Vec<Buffer>,
    /// How far the plan may go.
    pub mode: Mode,
    /// One route by name, and no other.
    pub route: Option<StorageRoute>,
    /// When to give up waiting. Without one, a transfer may take as long as it makes progress.
    pub deadline: Option<Instant>,
    /// Cancels the transfer from elsewhere.
    pub cancel: Option<CancelToken>,
    /// Whether written bytes shall be on the drive before the transfer counts as done.
    pub sync: bool,
}

impl Request {
    /// Reads `segments` of `files` into `device`.
    pub fn read(files: Vec<Arc<File>>, segments: Vec<Segment>, device: Buffer) -> Self {
        Self::new(Operation::Read, files, segments, device)
    }

    /// Writes `segments` from `device` into `files`. Bytes of the files that no segment names keep
    /// their value.
    pub fn write(files: Vec<Arc<File>>, segments: Vec<Segment>, device: Buffer) -> Self {
        Self::new(Operation::Write, files, segments, device)
    }

    fn new(
        operation: Operation,
        files: Vec<Arc<File>>,
        segments: Vec<Segment>,
        device: Buffer,
    ) -> Self {
        Self {
            operation,
            files,
            segments,
            devices: vec![device],
            mode: Mode::Auto,
            route: None,
            deadline: None,
            cancel: None,
            sync: false,
        }
    }
}

/// Moves bytes between files and devices. Share it: one engine serves any number of transfers at
/// once, within one pool and one set of threads.
pub struct Engine {
    shared: Arc<Shared>,
}

/// What workers, transfers and the engine itself know.
pub(super) struct Shared {
    pub(super) config: Config,
    /// Where the device sits, for workers to stay near.
    pub(super) node: Option<u32>,
    pub(super) pool: Pool,
    queue: Mutex<Queue>,
    work: Condvar,
    left: Condvar,
    epoch: Instant,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    stopping: bool,
    workers: Vec<Arc<Mark>>,
}

/// What others see of one worker.
#[derive(Default)]
pub(super) struct Mark {
    /// When it went into the system call it is in, in nanoseconds of the engine's clock; 0 outside.
    busy_since: AtomicU64,
    /// Set once another worker has taken its place.
    replaced: AtomicU64,
    /// What it has in flight, while it is in a call that may block.
    held: Mutex<Option<Held>>,
}

impl Engine {
    /// An engine with a pool and threads of its own, pinning memory through `gpu`.
    pub fn new(gpu: &Gpu, config: Config) -> Self {
        let budget = Budget::new(&config);
        Self::with_budget(gpu, config, budget)
    }

    /// An engine that shares `budget` with others.
    pub fn with_budget(gpu: &Gpu, config: Config, budget: Arc<Budget>) -> Self {
        let shared = Shared {
            node: gpu.numa_node(),
            pool: Pool::new(gpu, budget),
            config: config.bounded(),
            queue: Mutex::default(),
            work: Condvar::new(),
            left: Condvar::new(),
            epoch: Instant::now(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The engine that this process shares for `gpu`, configured by the environment.
    pub fn shared(gpu: &Gpu) -> Arc<Self> {
        type Engines = Mutex<Vec<(Gpu, Arc<Engine>)>>;
        static ENGINES: OnceLock<Engines> = OnceLock::new();
        let mut engines = lock(ENGINES.get_or_init(Mutex::default));
        if let Some((_, engine)) = engines.iter().find(|(known, _)| known.same_device(gpu)) {
            return Arc::clone(engine);
        }
        let config = Config::from_env();
        let budget = Budget::process(&config);
        let engine = Arc::new(Self::with_budget(gpu, config, budget));
        engines.push((gpu.clone(), Arc::clone(&engine)));
        engine
    }

    /// What its pool holds now.
    pub fn pool_usage(&self) -> PoolUsage {
        self.shared.pool.usage()
    }

    /// Unpins the memory that no transfer is using.
    pub fn trim(&self) {
        self.shared.pool.trim();
    }

    /// Pins up to `bytes` of the pool now, so that no transfer has to.
    ///
    /// # Errors
    /// What pinning says.
    pub fn warm_up(&self, bytes: u64) -> Result<()> {
        let slots = usize::try_from(bytes.div_ceil(SLOT_BYTES)).unwrap_or(usize::MAX);
        let mut held = Vec::new();
        while held.len() < slots.min(self.shared.config.slots()) {
            let Some(slot) = self.shared.pool.reuse() else {
                if self.shared.pool.grow()? {
                    continue;
                }
                break;
            };
            if let Some(memory) = slot.memory() {
                // Refusal (before Linux 5.14) costs only the page faults of the first use.
                let _ = memory.mem().populate();
            }
            held.push(slot);
        }
        Ok(())
    }

    /// Starts `request`.
    ///
    /// # Errors
    /// `is_refused` where a segment does not lie inside its file (reads) or device memory;
    /// `is_no_route` where the plan allows no route; `is_cancelled` where the token already is.
    pub fn submit(&self, request: Request) -> Result<Transfer> {
        if let Some(token) = &request.cancel {
            token.check()?;
        }
        check_bounds(&request)?;
        let plans = plans(&request, &self.shared.config)?;
        let mapped = plans.iter().any(|plan| {
            plan.choices.first().is_some_and(|c| c.route == StorageRoute::MappedPageCache)
        });
        let grid = grid(&request, mapped, self.shared.config.chunk_bytes);
        let transfer = split(&request.segments, grid)
            .map_err(|error| Error::refused("cannot plan the transfer").because(error))?;
        let what = describe(&request);
        let files = request.files.into_iter().zip(plans).collect();
        let flags = (mapped, request.sync);
        let job = Job::new(request.operation, files, request.devices, transfer, flags);
        let job = Arc::new(job);
        self.start(&job)?;
        if let Some(token) = &request.cancel {
            token.watch(&job, &self.shared);
        }
        let shared = Arc::clone(&self.shared);
        Ok(Transfer { job, shared, deadline: request.deadline, what })
    }

    /// [`Self::submit`] and [`Transfer::wait`].
    ///
    /// # Errors
    /// Those of both.
    pub fn run(&self, request: Request) -> Result<super::Report> {
        self.submit(request)?.wait()
    }

    fn start(&self, job: &Arc<Job>) -> Result<()> {
        if job.split.chunks.is_empty() {
            return Ok(());
        }
        let deep = job.files.iter().any(|(_, plan)| plan.allows(StorageRoute::ThreadPool));
        let config = &self.shared.config;
        let threads = if deep { config.queue_depth.max(config.threads) } else { config.threads };
        let wanted = threads.min(job.split.chunks.len());
        let mut queue = lock(&self.shared.queue);
        queue.jobs.push_back(Arc::clone(job));
        let most = self.shared.workers_max();
        while queue.serving() < wanted && queue.workers.len() < most {
            if let Err(error) = self.shared.spawn(&mut queue, None) {
                if queue.serving() == 0 {
                    queue.jobs.pop_back();
                    return Err(error);
                }
                break; // Fewer threads than wished for still do the work.
            }
        }
        drop(queue);
        self.shared.work.notify_all();
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let jobs = {
            let mut queue = lock(&self.shared.queue);
            queue.stopping = true;
            std::mem::take(&mut queue.jobs)
        };
        for job in jobs {
            let error = Error::new(Kind::Cancelled, "the engine was dropped during the transfer");
            job.stop(error, &self.shared);
        }
        self.shared.work.notify_all();
        let until = Instant::now() + LEAVE_TIMEOUT;
        let mut queue = lock(&self.shared.queue);
        while !queue.workers.is_empty() && Instant::now() < until {
            queue = wait_timeout(&self.shared.left, queue, Duration::from_millis(50));
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("pool", &self.pool_usage()).finish()
    }
}

impl Shared {
    /// Starts a worker; one that takes the place of `stuck` carries on with what that one has in flight.
    fn spawn(self: &Arc<Self>, queue: &mut Queue, stuck: Option<Arc<Mark>>) -> Result<()> {
        let mark = Arc::new(Mark::default());
        let worker = Worker::new(Arc::clone(self), Arc::clone(&mark), stuck);
        std::thread::Builder::new()
            .name("beeline-io".to_owned())
            .spawn(move || worker.run())
            .map_err(|error| Error::io("start an I/O thread", error))?;
        queue.workers.push(mark);
        Ok(())
    }

    /// The next chunk of any job, jobs taking turns, with an idle slot to put it in where it needs
    /// one. `mapped` says whether the caller takes chunks that need none.
    pub(super) fn claim(&self, mapped: bool) -> Option<(Arc<Job>, usize, Option<Slot>)> {
        let mut queue = lock(&self.queue);
        for _ in 0..queue.jobs.len() {
            let job = queue.jobs.pop_front()?;
            match job.claim(mapped, &self.pool) {
                Claim::Chunk(chunk, slot) => {
                    queue.jobs.push_back(Arc::clone(&job));
                    return Some((job, chunk, slot));
                }
                Claim::Later => queue.jobs.push_back(job),
                // It leaves the queue and finishes with its last chunk.
                Claim::Nothing => {}
            }
        }
        None
    }

    /// No slot can be had: one of the jobs that wait for one fails with `error`.
    pub(super) fn fail_waiting(&self, error: Error) {
        let job = lock(&self.queue).jobs.iter().find(|job| !job.mapped).cloned();
        if let Some(job) = job {
            job.stop(error, self);
        }
    }

    /// What kinds of chunks are waiting: such as need a slot, and mapped ones.
    pub(super) fn waiting(&self) -> (bool, bool) {
        let queue = lock(&self.queue);
        let mapped = queue.jobs.iter().any(|job| job.mapped);
        let slot = queue.jobs.iter().any(|job| !job.mapped);
        (slot, mapped)
    }

    /// Waits for work. False where the worker shall leave: the engine is gone, another has its place,
    /// or only a deep thread pool needed it. It no longer counts as a worker then: decided and counted
    /// under one lock, so that neither all leave at once nor a new job relies on one that is leaving.
    pub(super) fn await_work(&self, mark: &Arc<Mark>) -> bool {
        let since = Instant::now();
        let mut queue = lock(&self.queue);
        loop {
            let replaced = mark.replaced.load(Ordering::Relaxed) != 0;
            if !queue.stopping && !replaced && !queue.jobs.is_empty() {
                return true;
            }
            let idle = queue.serving() > self.config.threads && since.elapsed() > IDLE_TIMEOUT;
            if queue.stopping || replaced || idle {
                queue.workers.retain(|other| !Arc::ptr_eq(other, mark));
                self.left.notify_all();
                return false;
            }
            queue = wait_timeout(&self.work, queue, IDLE_TIMEOUT);
        }
    }

    /// A job has finished; workers that wait for its slots look again.
    pub(super) fn job_left(&self) {
        self.work.notify_all();
    }

    /// Puts a new worker in the place of each that has been in one system call for too long.
    pub(super) fn replace_stuck(self: &Arc<Self>) {
        let now = self.now();
        let mut queue = lock(&self.queue);
        let most = self.workers_max();
        let stuck: Vec<Arc<Mark>> = queue
            .workers
            .iter()
            .filter(|mark| mark.is_stuck(now) && mark.replaced.load(Ordering::Relaxed) == 0)
            .cloned()
            .collect();
        for mark in stuck {
            if queue.workers.len() >= most {
                break;
            }
            // Before the other starts: the worker may come back at any moment and stay.
            mark.replaced.store(1, Ordering::Relaxed);
            if self.spawn(&mut queue, Some(Arc::clone(&mark))).is_err() {
                mark.stay();
            }
        }
    }

    /// Most workers at once, those included that never came back from a system call.
    fn workers_max(&self) -> usize {
        2 * self.config.threads.max(self.config.queue_depth)
    }

    /// Runs `call`, which may block, so that others see since when.
    pub(super) fn blocking<T>(&self, mark: &Mark, call: impl FnOnce() -> T) -> T {
        mark.busy_since.store(self.now().max(1), Ordering::Relaxed);
        let out = call();
        mark.busy_since.store(0, Ordering::Relaxed);
        out
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Requests one worker may have in flight.
    pub(super) fn depth_per_worker(&self) -> usize {
        let threads = self.config.threads.max(1);
        self.config.queue_depth.min(self.config.slots()).div_ceil(threads).max(2)
    }
}

impl Queue {
    /// Workers that take work: all but those whose place another has taken.
    fn serving(&self) -> usize {
        self.workers.iter().filter(|mark| mark.replaced.load(Ordering::Relaxed) == 0).count()
    }
}

impl Mark {
    /// The worker is still in its place.
    pub(super) fn stay(&self) {
        self.replaced.store(0, Ordering::Relaxed);
    }

    /// Leaves what a worker has in flight to whoever may take its place.
    pub(super) fn leave_behind(&self, held: Held) {
        *lock(&self.held) = Some(held);
    }

    /// What was left behind, once.
    pub(super) fn take_over(&self) -> Option<Held> {
        lock(&self.held).take()
    }

    fn is_stuck(&self, now: u64) -> bool {
        let since = self.busy_since.load(Ordering::Relaxed);
        since != 0 && Duration::from_nanos(now.saturating_sub(since)) > STUCK_AFTER
    }
}

/// Every segment inside its file (reads) and inside each device buffer.
fn check_bounds(request: &Request) -> Result<()> {
    if request.devices.is_empty() || (request.devices.len() > 1 && is_write(request)) {
        return Err(Error::refused(format!(
            "a transfer needs one device buffer (a read may have more), not {}",
            request.devices.len()
        )));
    }
    let room = request.devices.iter().map(Buffer::len).min().unwrap_or(0);
    for segment in &request.segments {
        let Some(file) = request.files.get(segment.file as usize) else {
            return Err(Error::refused(format!(
                "{segment}: there are {} files",
                request.files.len()
            )));
        };
        if is_write(request) && !file.is_writable() {
            return Err(Error::refused(format!(
                "{} was not opened for writing",
                file.path().display()
            ))
            .remedy("open it with File::for_writing"));
        }
        if segment.device_end().is_none_or(|end| end > room) {
            return Err(Error::refused(format!("{segment}: the device buffer has {room} bytes")));
        }
        let end = segment.file_end();
        if end.is_none() || (!is_write(request) && end.is_some_and(|end| end > file.size())) {
            return Err(Error::refused(format!(
                "{segment}: {} has {} bytes",
                file.path().display(),
                file.size()
            )));
        }
    }
    Ok(())
}

fn is_write(request: &Request) -> bool {
    request.operation == Operation::Write
}

fn plans(request: &Request, config: &Config) -> Result<Vec<Plan<StorageRoute>>> {
    let gpus: Vec<Gpu> = request.devices.iter().map(Buffer::gpu).collect();
    let Some(gpu) = gpus.first() else { return Ok(Vec::new()) };
    let ask =
        StorageRequest { operation: request.operation, mode: request.mode, route: request.route };
    // What no byte comes from needs no route. By number: one file may stand in the list twice.
    let used: BTreeSet<u32> = request.segments.iter().map(|part| part.file).collect();
    let plan = |(index, file): (usize, &Arc<File>)| {
        if !u32::try_from(index).is_ok_and(|index| used.contains(&index)) {
            return Ok(Plan { choices: Vec::new(), rejected: Vec::new() });
        }
        let plan = file.plan_for(&gpus, ask, config.io_uring);
        if plan.choices.is_empty() { Err(no_route(file, gpu, request, plan)) } else { Ok(plan) }
    };
    request.files.iter().enumerate().map(plan).collect()
}

fn no_route(file: &File, gpu: &Gpu, request: &Request, plan: Plan<StorageRoute>) -> Error {
    let asked = match request.route {
        Some(route) => format!("route {route}"),
        None => format!("mode {}", request.mode),
    };
    let text = format!(
        "no route between {} and {} is open under {asked}",
        file.path().display(),
        gpu.id()
    );
    let wanted = |route: StorageRoute| request.route.is_none_or(|named| named == route);
    let reasons: Vec<_> = plan
        .rejected
        .into_iter()
        .filter(|rejected| wanted(rejected.route))
        .map(|rejected| {
            let mut why = rejected.why;
            why.detail = match why.detail.as_str() {
                "" => rejected.route.to_string(),
                detail => format!("{}: {detail}", rejected.route),
            };
            why
        })
        .collect();
    let remedy = reasons.iter().map(|why| why.code.remedy()).find(|text| !text.is_empty());
    let error = Error::new(Kind::NoRoute, text).with_reasons(reasons);
    match remedy {
        Some(remedy) => error.remedy(remedy),
        None => error,
    }
}

fn grid(request: &Request, mapped: bool, chunk_bytes: u64) -> Grid {
    let block = request.files.iter().map(|file| file.block_bytes()).max().unwrap_or(4096);
    // A write must not touch the gap between two segments, however small.
    let block_bytes = if is_write(request) { 1 } else { block };
    // A block of a drive may be larger than a small chunk, never than a slot.
    let chunk = chunk_bytes.clamp(block.min(SLOT_BYTES), SLOT_BYTES);
    Grid { slot_bytes: if mapped { MAPPED_BYTES } else { chunk }, block_bytes }
}

fn describe(request: &Request) -> String {
    let verb = if is_write(request) { "writing" } else { "reading" };
    match request.files.as_slice() {
        [file] => format!("{verb} {}", file.path().display()),
        files => format!("{verb} {} files", files.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SimConfig;

    #[test]
    fn workers_of_a_deep_thread_pool_leave_and_the_others_stay() {
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        let config = Config { threads: 2, queue_depth: 16, ..Config::default() };
        let engine = Engine::new(&gpu, config);
        let workers = || lock(&engine.shared.queue).workers.len();
        {
            let mut queue = lock(&engine.shared.queue);
            while queue.workers.len() < 16 {
                engine.shared.spawn(&mut queue, None).unwrap();
            }
        }
        // They all find the queue empty at about the same time.
        let until = Instant::now() + Duration::from_secs(60);
        while workers() > 2 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(IDLE_TIMEOUT);
        assert_eq!(workers(), 2);
    }

    #[test]
    fn a_worker_told_to_leave_no_longer_counts_as_one() {
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        let engine = Engine::new(&gpu, Config::default());
        let leaving = Arc::new(Mark::default());
        lock(&engine.shared.queue).workers.push(Arc::clone(&leaving));
        leaving.replaced.store(1, Ordering::Relaxed);
        assert!(!engine.shared.await_work(&leaving));
        // A job that comes now starts a worker of its own instead of waiting for this one.
        assert_eq!(lock(&engine.shared.queue).workers.len(), 0);
    }
}
