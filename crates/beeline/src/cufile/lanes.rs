//! Lanes of one context: bounded, cached, found by a thread without a common lock.
//!
//! A caller holds one lane and waits for nothing else while it does, so waiting for a lane always ends.
//! The memory of lanes comes from the pinned budget of the process.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::{Context, Entered, Error as CudaError, Lane, Mark, Marking, Owner};
use beeline_sys::thread::nap;

use super::ordered::Ordered;
use super::status::{Failure, Outcome};
use crate::config::{Config, CufileConfig, Waiting};
use crate::gpu::{DeviceId, Gpu};
use crate::memory::{Budget, Keeper, Pool, Slot};
use crate::{lock, wait_timeout};

/// Most lanes of one context.
const LANES_MAX: usize = 64;
/// How often a waiting thread asks the driver whether its stream is still well.
const CHECK_EVERY: Duration = Duration::from_millis(2);
/// How long a thread looks without pause for the end of one copy, about as long as a large one takes; who keeps several in
/// flight says for how long itself.
const SPIN: Duration = Duration::from_micros(60);
/// For how long one that asks the driver only yields, and how long a thread naps after that.
const SPIN_LONG: Duration = Duration::from_micros(400);
const NAP: Duration = Duration::from_micros(20);
/// How long the end of a context's lanes waits for copies that once did not end in time.
const STUCK: Duration = Duration::from_millis(50);

/// The lanes of one context.
pub(super) struct Lanes {
    pub(super) ordinal: i32,
    owner: Owner,
    gpu: Gpu,
    context: Arc<Context>,
    /// Whether it is the device's primary one, which stays as long as this value.
    is_primary: bool,
    pool: Pool,
    cells: Vec<Mutex<Option<Held>>>,
    /// Lanes whose copies did not end in time. Counted as quarantined until they are seen to have ended.
    stuck: Mutex<Vec<(Held, Option<Mark>)>>,
    waiting: Waiting,
    stall: Duration,
    waiters: AtomicUsize,
    gate: Mutex<()>,
    freed: Condvar,
}

/// A lane and the slot that its memory is.
struct Held {
    lane: Option<Lane>,
    slot: Option<Slot>,
    /// Where the last piece went.
    turn: usize,
}

impl Held {
    fn settle(&mut self) -> bool {
        self.lane.as_mut().is_none_or(Lane::settle)
    }

    /// Whether all before `mark`, the last one, is done.
    fn is_over(&mut self, mark: Option<Mark>) -> bool {
        let reached = self.lane.as_mut().zip(mark).map(|(lane, mark)| lane.is_reached(mark));
        matches!(reached, Some(Ok(true))) || self.settle()
    }

    /// Ends the lane; answers its slot, unless a device may still use the memory.
    fn into_slot(mut self) -> Option<Slot> {
        self.end();
        self.slot.take()
    }

    fn end(&mut self) {
        if self.settle() {
            drop(self.lane.take());
        } else if let (Some(lane), Some(slot)) = (self.lane.take(), self.slot.take()) {
            lane.give_up();
            slot.abandon();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.end();
    }
}

/// A lane in use by one thread; given back when dropped.
pub(super) struct InUse<'a> {
    lanes: &'a Lanes,
    cell: MutexGuard<'a, Option<Held>>,
}

thread_local! {
    static HINT: Cell<usize> = const { Cell::new(usize::MAX) };
    /// Where the thread found its last lane.
    static LAST: Cell<usize> = const { Cell::new(0) };
}
static NEXT_HINT: AtomicUsize = AtomicUsize::new(0);

/// A number of the calling thread's, by turns.
pub(super) fn hint() -> usize {
    if HINT.get() == usize::MAX {
        HINT.set(NEXT_HINT.fetch_add(1, Ordering::Relaxed));
    }
    HINT.get()
}

impl Lanes {
    /// Lanes in the context `owner` of the device `ordinal`; its primary one where `owner` is none.
    fn new(ordinal: i32, owner: Owner, settings: &CufileConfig) -> Outcome<Self> {
        let id = DeviceId::Cuda(u32::try_from(ordinal).unwrap_or(u32::MAX));
        let gpu = Gpu::open(&id)?;
        let primary = gpu.cuda_context()?;
        let is_primary = primary.is(owner);
        let context = if is_primary { primary } else { primary.device().foreign_context(owner) };
        let config = Config::from_env();
        let pool = Pool::new(&gpu, Budget::process(&config));
        let cells = (0..LANES_MAX.min(config.slots())).map(|_| Mutex::default()).collect();
        Ok(Self {
            ordinal,
            owner,
            gpu,
            context,
            is_primary,
            pool,
            cells,
            stuck: Mutex::default(),
            waiting: settings.waiting,
            stall: config.stall_timeout,
            waiters: AtomicUsize::new(0),
            gate: Mutex::default(),
            freed: Condvar::new(),
        })
    }

    pub(super) const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// A lane, as soon as there is one.
    ///
    /// # Errors
    /// `ETIMEDOUT` where none came free within the stall timeout; what making one says; what the device
    /// says where all lanes have failed.
    pub(super) fn acquire(&self) -> Outcome<InUse<'_>> {
        if let Some(lane) = self.try_acquire()? {
            return Ok(lane);
        }
        let deadline = Instant::now() + self.stall;
        loop {
            self.check_stuck()?;
            self.waiters.fetch_add(1, Ordering::SeqCst);
            {
                let guard = lock(&self.gate);
                // Short: a lane given back between the look and the lock must not cost much.
                drop(wait_timeout(&self.freed, guard, Duration::from_millis(2)));
            }
            self.waiters.fetch_sub(1, Ordering::SeqCst);
            if let Some(lane) = self.try_acquire()? {
                return Ok(lane);
            }
            if Instant::now() >= deadline {
                return Err(Failure::timeout(format!(
                    "no staging memory came free within {:?}; raise BEELINE_POOL_BYTES",
                    self.stall
                )));
            }
        }
    }

    /// A lane, if one is free or can be made now.
    pub(super) fn try_acquire(&self) -> Outcome<Option<InUse<'_>>> {
        let start = LAST.get();
        let mut empty = None;
        for step in 0..self.cells.len() {
            let at = (start + step) % self.cells.len();
            let Some(cell) = self.cells.get(at) else { break };
            let guard = match cell.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            if guard.is_some() {
                LAST.set(at);
                return Ok(Some(InUse { lanes: self, cell: guard }));
            }
            if empty.is_none() {
                empty = Some((at, guard));
            }
        }
        // Only where every lane is in use is there to be one more.
        let Some((at, mut cell)) = empty else { return Ok(None) };
        *cell = self.make()?;
        if cell.is_some() {
            LAST.set(at);
            return Ok(Some(InUse { lanes: self, cell }));
        }
        drop(cell);
        Ok(self.any_made())
    }

    fn any_made(&self) -> Option<InUse<'_>> {
        self.cells.iter().find_map(|cell| {
            let cell = cell.try_lock().ok()?;
            cell.is_some().then_some(InUse { lanes: self, cell })
        })
    }

    fn make(&self) -> Outcome<Option<Held>> {
        if let Some(held) = self.recover() {
            return Ok(Some(held));
        }
        let slot = match self.pool.reuse() {
            Some(slot) => slot,
            None if self.pool.grow()? => match self.pool.reuse() {
                Some(slot) => slot,
                None => return Ok(None),
            },
            None => return Ok(None),
        };
        let Some(memory) = slot.memory() else { return Ok(None) };
        let registration = Arc::clone(memory.registration()?);
        let host = Arc::clone(memory.mem());
        let lane = Lane::new(&self.context, registration, host)
            .map_err(|error| Failure::cuda("make a staging lane", &error))?;
        Ok(Some(Held { lane: Some(lane), slot: Some(slot), turn: 0 }))
    }

    /// # Errors
    /// What the device says of lanes that are stuck, where there are no others to wait for.
    fn check_stuck(&self) -> Outcome<()> {
        let stuck = lock(&self.stuck);
        let none = |cell: &Mutex<Option<Held>>| cell.try_lock().is_ok_and(|cell| cell.is_none());
        if stuck.is_empty() || !self.cells.iter().all(none) {
            return Ok(());
        }
        for lane in stuck.iter().filter_map(|(held, _)| held.lane.as_ref()) {
            lane.check().map_err(|error| Failure::cuda("use a staging lane", &error))?;
        }
        Ok(())
    }

    /// A lane that was stuck and is not any more.
    fn recover(&self) -> Option<Held> {
        let mut stuck = lock(&self.stuck);
        let at = stuck.iter_mut().position(|(held, mark)| held.is_over(*mark))?;
        let (held, _) = stuck.swap_remove(at);
        self.pool.unquarantine(1);
        Some(held)
    }

    /// Ends every lane that nobody is using, with its stream and its events. Unpinning their memory takes
    /// long, and is left to whoever drops the answer and calls [`Self::trim`].
    pub(super) fn end(&self) -> Vec<Slot> {
        let mut ended: Vec<_> =
            self.cells.iter().filter_map(|cell| cell.try_lock().ok()?.take()).collect();
        let since = Instant::now();
        loop {
            ended.extend(std::iter::from_fn(|| self.recover()));
            if lock(&self.stuck).is_empty() || since.elapsed() > STUCK {
                break;
            }
            std::thread::sleep(NAP);
        }
        ended.into_iter().filter_map(Held::into_slot).collect()
    }

    /// Unpins the memory that no lane has.
    pub(super) fn trim(&self) {
        self.pool.trim();
    }

    fn is_for(&self, ordinal: i32, owner: Owner) -> bool {
        self.ordinal == ordinal && (self.owner == owner || self.context.is(owner))
    }
}

impl Keeper for Lanes {
    /// Ends a lane that nobody is using. Its stream and its events go, its memory becomes idle.
    fn give_up_one(&self) -> bool {
        let mut idle = self.cells.iter().rev().filter_map(|cell| cell.try_lock().ok()?.take());
        let held = idle.next().or_else(|| self.recover());
        held.and_then(Held::into_slot).is_some()
    }
}

impl std::fmt::Debug for Lanes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lanes(device {})", self.ordinal)
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        // Those that end count themselves, or are counted for good.
        let stuck = std::mem::take(&mut *lock(&self.stuck));
        self.pool.unquarantine(stuck.len());
    }
}

impl InUse<'_> {
    /// The lane.
    ///
    /// # Errors
    /// None while the value lives.
    pub(super) fn lane(&mut self) -> Outcome<&mut Lane> {
        match self.cell.as_mut().and_then(|held| held.lane.as_mut()) {
            Some(lane) => Ok(lane),
            None => Err(Failure::new(super::OpError::INTERNAL_ERROR, "the lane is gone")),
        }
    }

    /// Which of `segments` of the lane's memory the next piece goes to: by turns, also from one request to the next.
    /// What the device has just read is slower to write again than what has left the CPU's own cache.
    pub(super) fn turn(&mut self, segments: usize) -> u64 {
        self.cell.as_mut().map_or(0, |held| {
            held.turn = (held.turn + 1) % segments.max(1);
            held.turn as u64
        })
    }

    /// Gives the lane back although copies may be in flight: waits until they have ended, as long as the
    /// stall timeout, or not at all where `failure` says that a wait has just come to that. A lane whose
    /// copies did not end is put aside, and taken again once they have.
    pub(super) fn settle(mut self, failure: Option<&Failure>) {
        let timeout = rustix::io::Errno::TIMEDOUT.raw_os_error();
        let waited = failure.is_some_and(|failure| failure.errno == timeout);
        let mut mark = None;
        if self.lane().is_ok_and(|lane| !lane.is_idle()) {
            mark = self.lane().ok().and_then(|lane| lane.enter().ok()?.mark(Marking::Event).ok());
            if let Some(mark) = mark.filter(|_| !waited) {
                let _ = self.wait(mark, SPIN);
            }
        }
        let lanes = self.lanes;
        if self.cell.as_mut().is_some_and(|held| !held.is_over(mark))
            && let Some(held) = self.cell.take()
        {
            lanes.pool.quarantine(1);
            lock(&lanes.stuck).push((held, mark));
        }
    }

    /// Starts a copy of `len` bytes, which are among several of one request.
    ///
    /// # Errors
    /// What the device says; so all that follow. [`Self::settle`] gives the lane back then.
    pub(super) fn start(&mut self, copy: Copy) -> Outcome<Mark> {
        let failed = |error| Failure::cuda(copy, &error);
        let mut entered = self.lane()?.enter().map_err(failed)?;
        copy.queue(&mut entered).map_err(failed)?;
        entered.mark(Marking::Event).map_err(failed)
    }

    /// Copies `len` bytes and waits for them.
    pub(super) fn copy(&mut self, copy: Copy) -> Outcome<()> {
        let waiting = self.lanes.waiting;
        let stall = self.lanes.stall;
        let failed = |error| Failure::cuda(copy, &error);
        let mut entered = self.lane()?.enter().map_err(failed)?;
        copy.queue(&mut entered).map_err(failed)?;
        if waiting == Waiting::Driver
            && asked_until_done(&mut entered, stall).map_err(|error| match error {
                Some(error) => failed(error),
                None => Failure::timeout(format!("a copy did not finish within {stall:?}")),
            })?
        {
            return Ok(());
        }
        let marking = if waiting == Waiting::Word { Marking::Word } else { Marking::Event };
        let mark = entered.mark(marking).map_err(failed)?;
        drop(entered);
        self.wait(mark, SPIN)
    }

    /// Waits until `mark` is reached, by looking for as long as `look`, then by naps, each of which costs about 5
    /// microseconds of CPU; `ETIMEDOUT` after the stall timeout.
    pub(super) fn wait(&mut self, mark: Mark, look: Duration) -> Outcome<()> {
        let stall = self.lanes.stall;
        let lane = self.lane()?;
        let failed = |error| Failure::cuda("copy between host and device", &error);
        let since = Instant::now();
        let mut checked = since;
        while !lane.is_reached(mark).map_err(failed)? {
            let now = Instant::now();
            if now - checked > CHECK_EVERY {
                lane.check().map_err(failed)?;
                checked = now;
            }
            if now - since > stall {
                return Err(Failure::timeout(format!("a copy did not finish within {stall:?}")));
            }
            if now - since > look {
                nap(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }
}

/// Asks the driver until the lane's own stream is done; false where it cannot be asked. The error is none
/// where `stall` has passed.
fn asked_until_done(entered: &mut Entered<'_>, stall: Duration) -> Result<bool, Option<CudaError>> {
    let since = Instant::now();
    loop {
        for _ in 0..64 {
            match entered.is_done()? {
                Some(true) => return Ok(true),
                Some(false) => std::hint::spin_loop(),
                None => return Ok(false),
            }
        }
        if since.elapsed() > stall {
            return Err(None);
        }
        pause(since.elapsed());
    }
}

/// Gives the CPU away while a copy takes longer than one that nothing holds up.
fn pause(since: Duration) {
    if since > SPIN_LONG {
        std::thread::sleep(NAP);
    } else if since > SPIN {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

/// A copy between a lane and a device address.
#[derive(Clone, Copy)]
pub(super) struct Copy {
    /// Into the device, or out of it.
    pub(super) into: bool,
    pub(super) device: DevicePtr,
    /// Where in the lane.
    pub(super) at: u64,
    pub(super) len: u64,
}

impl Copy {
    fn queue(self, lane: &mut Entered<'_>) -> Result<(), CudaError> {
        if self.into {
            lane.copy_in(self.device, self.at, self.len)
        } else {
            lane.copy_out(self.at, self.device, self.len)
        }
    }
}

impl std::fmt::Display for Copy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let way = if self.into { "to" } else { "from" };
        write!(f, "copy {} bytes {way} {}", self.len, self.device)
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        if self.lanes.waiters.load(Ordering::SeqCst) > 0 {
            self.lanes.freed.notify_one();
        }
    }
}

/// The lanes of all contexts that were used so far.
#[derive(Default)]
pub(super) struct AllLanes {
    known: Mutex<Vec<Arc<Lanes>>>,
    /// Made when first needed.
    pub(super) gates: Mutex<Option<Arc<Ordered>>>,
}

/// Most contexts that keep lanes.
const CONTEXTS_MAX: usize = 64;

impl AllLanes {
    pub(super) fn of(
        &self,
        ordinal: i32,
        owner: Owner,
        settings: &CufileConfig,
    ) -> Outcome<Arc<Lanes>> {
        let mut known = lock(&self.known);
        let at = known.iter().position(|lanes| lanes.is_for(ordinal, owner));
        if let Some(lanes) = at.and_then(|at| known.get(at))
            && (lanes.is_primary || lanes.context.is_there())
        {
            return Ok(Arc::clone(lanes));
        }
        // One that was destroyed, and another made at its address; or one too many.
        let gone = match at {
            Some(at) => Some(known.remove(at)),
            None => (known.len() >= CONTEXTS_MAX).then(|| known.remove(0)),
        };
        let made = Arc::new(Lanes::new(ordinal, owner, settings)?);
        let keeper: Arc<dyn Keeper> = Arc::clone(&made) as _;
        made.pool.set_keeper(Arc::downgrade(&keeper));
        known.push(Arc::clone(&made));
        // Without the lock: unpinning takes long.
        drop(known);
        drop(gone);
        Ok(made)
    }

    /// The lanes of any context, to pin memory through.
    pub(super) fn any(&self) -> Option<Arc<Lanes>> {
        lock(&self.known).first().cloned()
    }

    /// Takes them all out.
    pub(super) fn take(&self) -> Vec<Arc<Lanes>> {
        std::mem::take(&mut *lock(&self.known))
    }
}
