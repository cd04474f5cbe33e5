//! Lanes of one context: bounded, cached, found by a thread without a common lock.
//!
//! A caller holds one lane and waits for nothing else while it does, so waiting for a lane always ends.
//! The memory of lanes comes from the pinned budget of the process.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::{
    Bulk, Context, Entered, Error as CudaError, Lane, Mark, Marking, Owner, Way,
};

use super::status::{Failure, Outcome};
use crate::config::{Config, CufileConfig, Waiting};
use crate::gpu::{DeviceId, Gpu};
use crate::memory::{Budget, Pool, Slot};
use crate::{lock, wait_timeout};

/// Most lanes of one context.
const LANES_MAX: usize = 64;
/// How often a waiting thread asks the driver whether its stream is still well.
const CHECK_EVERY: Duration = Duration::from_millis(2);
/// How long a thread looks at a mark without pause: about as long as a large copy takes.
const SPIN: Duration = Duration::from_micros(60);
/// For how long it only yields, and how long it naps after that.
const SPIN_LONG: Duration = Duration::from_micros(400);
const NAP: Duration = Duration::from_micros(20);

/// The lanes of one context.
pub(super) struct Lanes {
    pub(super) ordinal: i32,
    owner: Owner,
    gpu: Gpu,
    context: Arc<Context>,
    pool: Pool,
    cells: Vec<Mutex<Option<Held>>>,
    waiting: Waiting,
    stall: Duration,
    bulk: Arc<Bulk>,
    /// Lanes there are.
    made: AtomicUsize,
    waiters: AtomicUsize,
    gate: Mutex<()>,
    freed: Condvar,
}

/// A lane and the slot that its memory is. The lane is dropped first.
struct Held {
    lane: Lane,
    slot: Slot,
}

/// A lane in use by one thread; given back when dropped.
pub(super) struct InUse<'a> {
    lanes: &'a Lanes,
    cell: MutexGuard<'a, Option<Held>>,
}

thread_local! {
    static HINT: Cell<usize> = const { Cell::new(usize::MAX) };
}
static NEXT_HINT: AtomicUsize = AtomicUsize::new(0);

fn hint() -> usize {
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
        let context =
            if primary.is(owner) { primary } else { primary.device().foreign_context(owner) };
        let bulk = Bulk::new(&context)
            .map_err(|error| Failure::cuda("make a stream for copies", &error))?;
        let bulk = Arc::new(bulk);
        let config = Config::from_env();
        let pool = Pool::new(&gpu, Budget::process(&config));
        let cells = (0..LANES_MAX.min(config.slots())).map(|_| Mutex::default()).collect();
        Ok(Self {
            ordinal,
            owner,
            gpu,
            context,
            pool,
            cells,
            waiting: settings.waiting,
            stall: config.stall_timeout,
            bulk,
            made: AtomicUsize::new(0),
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
    /// `ETIMEDOUT` where none came free within the stall timeout; what making one says.
    pub(super) fn acquire(&self) -> Outcome<InUse<'_>> {
        if let Some(lane) = self.try_acquire()? {
            return Ok(lane);
        }
        let deadline = Instant::now() + self.stall;
        loop {
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
        let start = hint();
        let mut empty = None;
        for step in 0..self.cells.len() {
            let Some(cell) = self.cells.get((start + step) % self.cells.len()) else { break };
            let guard = match cell.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            if guard.is_some() {
                return Ok(Some(InUse { lanes: self, cell: guard }));
            }
            // Its own place first, so that a thread finds the same lane again.
            if empty.is_none() {
                empty = Some(guard);
                if step == 0 {
                    break;
                }
            }
        }
        let Some(mut cell) = empty else { return Ok(None) };
        *cell = self.make()?;
        if cell.is_some() {
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
        let (host, bulk) = (Arc::clone(memory.mem()), Arc::clone(&self.bulk));
        let lane = Lane::new(&self.context, registration, host, bulk)
            .map_err(|error| Failure::cuda("make a staging lane", &error))?;
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Held { lane, slot }))
    }

    /// Gives up every lane that nobody is using.
    pub(super) fn trim(&self) {
        for cell in &self.cells {
            if let Ok(mut cell) = cell.try_lock()
                && cell.take().is_some()
            {
                self.made.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.pool.trim();
    }

    fn is_for(&self, ordinal: i32, owner: Owner) -> bool {
        self.ordinal == ordinal && (self.owner == owner || self.context.is(owner))
    }
}

impl InUse<'_> {
    /// The lane.
    ///
    /// # Errors
    /// None while the value lives and [`Self::discard`] was not called.
    pub(super) fn lane(&mut self) -> Outcome<&mut Lane> {
        match &mut *self.cell {
            Some(held) => Ok(&mut held.lane),
            None => Err(Failure::new(super::OpError::INTERNAL_ERROR, "the lane is gone")),
        }
    }

    /// Gives the lane up after a failure: whatever is still in flight keeps its memory.
    pub(super) fn discard(mut self) {
        if let Some(Held { lane, slot }) = self.cell.take() {
            self.lanes.made.fetch_sub(1, Ordering::Relaxed);
            drop(lane);
            slot.discard();
        }
    }

    /// Starts a copy of `len` bytes, which are among several of one request.
    ///
    /// # Errors
    /// What the device says; so all that follow. The lane must be discarded then.
    pub(super) fn start(&mut self, copy: Copy) -> Outcome<Mark> {
        let way = match self.lanes.waiting {
            Waiting::Event => Way::Own,
            // Into the device: from there nobody reads several pieces at once.
            _ if copy.into => Way::Bulk,
            _ => Way::Own,
        };
        let failed = |error| Failure::cuda(copy, &error);
        let mut entered = self.lane()?.enter().map_err(failed)?;
        copy.queue(&mut entered, way).map_err(failed)?;
        entered.mark(way, Marking::Event).map_err(failed)
    }

    /// Copies `len` bytes and waits for them.
    pub(super) fn copy(&mut self, copy: Copy) -> Outcome<()> {
        let word = match self.lanes.waiting {
            Waiting::Word => true,
            Waiting::Event | Waiting::Driver => false,
            // Measured on an H200: threads that all write words get in each other's way.
            Waiting::Auto => self.lanes.made.load(Ordering::Relaxed) <= 2,
        };
        let stall = self.lanes.stall;
        let failed = |error| Failure::cuda(copy, &error);
        let mut entered = self.lane()?.enter().map_err(failed)?;
        copy.queue(&mut entered, Way::Own).map_err(failed)?;
        if !word
            && asked_until_done(&mut entered, stall).map_err(|error| match error {
                Some(error) => failed(error),
                None => Failure::timeout(format!("a copy did not finish within {stall:?}")),
            })?
        {
            return Ok(());
        }
        let mark = entered.mark(Way::Own, Marking::Word).map_err(failed)?;
        drop(entered);
        self.wait(mark)
    }

    /// Waits until `mark` is reached; `ETIMEDOUT` after the stall timeout.
    pub(super) fn wait(&mut self, mark: Mark) -> Outcome<()> {
        let stall = self.lanes.stall;
        let lane = self.lane()?;
        let failed = |error| Failure::cuda("copy between host and device", &error);
        let mut turns = 0_u32;
        while turns < 200 {
            if lane.is_reached(mark).map_err(failed)? {
                return Ok(());
            }
            std::hint::spin_loop();
            turns += 1;
        }
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
            pause(now - since);
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
    fn queue(self, lane: &mut Entered<'_>, way: Way) -> Result<(), CudaError> {
        if self.into {
            lane.copy_in(self.device, self.at, self.len, way)
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
        if let Some(lanes) = known.iter().find(|lanes| lanes.is_for(ordinal, owner)) {
            return Ok(Arc::clone(lanes));
        }
        if known.len() >= CONTEXTS_MAX {
            known.remove(0);
        }
        let made = Arc::new(Lanes::new(ordinal, owner, settings)?);
        known.push(Arc::clone(&made));
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
