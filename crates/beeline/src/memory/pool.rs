//! The pinned pool: a bounded number of slots that transfers take turns with.
//!
//! The limit makes callers wait, it never makes them fail: whoever holds a slot gives it back without
//! waiting for another one, so a wait for a slot always ends, or ends at its deadline.
//!
//! Several pools (one per device kind, one per drop-in) share one [`Budget`]. A pool keeps what it
//! has pinned, because pinning is slow, but gives it up when another pool waits for room.

use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::Duration;

use crate::config::{Config, SLOT_BYTES};
use crate::error::Result;
use crate::gpu::{Gpu, PinnedMem};
use crate::{lock, wait_timeout};

/// How much pinned memory all pools that share it may hold.
#[derive(Debug)]
pub struct Budget {
    slots_max: usize,
    state: Mutex<BudgetState>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct BudgetState {
    slots: usize,
    waiting: usize,
    pools: Vec<Weak<Inner>>,
}

impl Budget {
    /// A budget of its own for one engine.
    pub fn new(config: &Config) -> Arc<Self> {
        Arc::new(Self { slots_max: config.slots(), state: Mutex::default(), freed: Condvar::new() })
    }

    /// The budget that all shared engines of this process draw from; its size is that of the first
    /// configuration that asked.
    pub fn process(config: &Config) -> Arc<Self> {
        static PROCESS: OnceLock<Arc<Budget>> = OnceLock::new();
        Arc::clone(PROCESS.get_or_init(|| Self::new(config)))
    }

    /// Takes room for one slot, if there is some or another pool can spare an idle one.
    fn take(&self, own: &Arc<Inner>) -> bool {
        let pools = {
            let mut state = lock(&self.state);
            if state.slots < self.slots_max {
                state.slots += 1;
                return true;
            }
            state.pools.retain(|pool| pool.strong_count() > 0);
            state.pools.clone()
        };
        // Outside the lock: a pool that gives up a slot unpins it and calls `give`.
        let others = pools.iter().filter_map(Weak::upgrade);
        let mut others: Vec<_> = others.filter(|pool| !Arc::ptr_eq(pool, own)).collect();
        let spared = others.iter().any(|pool| pool.spare());
        if spared {
            return self.take_free();
        }
        // No slot is idle as such, but one may be kept by somebody who does nothing with it.
        others.sort_by_key(|pool| std::cmp::Reverse(pool.held()));
        let held = own.held();
        let reclaimed =
            others.iter().any(|pool| may_take(held, pool.held()) && pool.reclaim() && pool.spare());
        reclaimed && self.take_free()
    }

    fn take_free(&self) -> bool {
        let mut state = lock(&self.state);
        let free = state.slots < self.slots_max;
        state.slots += usize::from(free);
        free
    }

    fn give(&self, slots: usize) {
        let mut state = lock(&self.state);
        state.slots -= slots;
        self.freed.notify_all();
    }

    fn has_waiters(&self) -> bool {
        lock(&self.state).waiting > 0
    }
}

/// Whether a pool that holds `own` slots may have one that another, which holds `other`, keeps: always where
/// it has none, else only as far as to be equal, so that two pools do not take slots from each other in
/// turns.
const fn may_take(own: usize, other: usize) -> bool {
    own == 0 || own + 1 < other
}

/// Who keeps slots beyond the use of them, because what was made of them is slow to make again.
pub(crate) trait Keeper: Send + Sync + std::fmt::Debug {
    /// Gives one slot back that nobody uses now; says whether there was one. Waits for nothing.
    fn give_up_one(&self) -> bool;
}

/// What a pool holds now, in slots of [`SLOT_BYTES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Slots pinned and waiting.
    pub idle: usize,
    /// Slots in use by transfers.
    pub busy: usize,
    /// Of the busy ones, those whose transfer was given up while the kernel or a device could still
    /// write them.
    pub quarantined: usize,
    /// Most slots ever pinned at once.
    pub peak: usize,
    /// Most slots the budget allows.
    pub limit: usize,
}

/// Slots of pinned memory. Cheap to clone; every clone is the same pool.
#[derive(Clone, Debug)]
pub struct Pool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    budget: Arc<Budget>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<PinnedMem>,
    usage: PoolUsage,
    keeper: Option<Weak<dyn Keeper>>,
}

impl Pool {
    /// An empty pool that pins through `gpu` as slots are needed.
    pub fn new(gpu: &Gpu, budget: Arc<Budget>) -> Self {
        let usage = PoolUsage { limit: budget.slots_max, ..PoolUsage::default() };
        let state = Mutex::new(State { usage, ..State::default() });
        let inner = Arc::new(Inner { gpu: gpu.clone(), budget: Arc::clone(&budget), state });
        lock(&budget.state).pools.push(Arc::downgrade(&inner));
        Self { inner }
    }

    /// Names who keeps slots of this pool, and is asked for one where another pool has none.
    pub(crate) fn set_keeper(&self, keeper: Weak<dyn Keeper>) {
        lock(&self.inner.state).keeper = Some(keeper);
    }

    /// What the pool holds now.
    pub fn usage(&self) -> PoolUsage {
        let state = lock(&self.inner.state);
        PoolUsage { idle: state.idle.len(), ..state.usage }
    }

    /// Unpins every idle slot.
    pub fn trim(&self) {
        while self.inner.spare() {}
    }

    /// Counts `slots` busy ones as held by a transfer whose owner has given it up.
    pub(crate) fn quarantine(&self, slots: usize) {
        lock(&self.inner.state).usage.quarantined += slots;
    }

    /// Counts `slots` of them as finished after all.
    pub(crate) fn unquarantine(&self, slots: usize) {
        lock(&self.inner.state).usage.quarantined -= slots;
    }

    /// A slot, if one is idle. Never waits and never pins.
    pub(crate) fn reuse(&self) -> Option<Slot> {
        let memory = self.inner.reuse()?;
        Some(Slot { memory: Some(memory), pool: self.clone() })
    }

    /// Pins one more slot, which is idle then, if the budget has room or another pool can spare an
    /// idle one. Says whether it did.
    ///
    /// # Errors
    /// What pinning says, where the budget has room and the system has not.
    pub(crate) fn grow(&self) -> Result<bool> {
        if !self.inner.budget.take(&self.inner) {
            return Ok(false);
        }
        match self.inner.gpu.pin(SLOT_BYTES) {
            Ok(memory) => {
                let mut state = lock(&self.inner.state);
                state.idle.push(memory);
                state.usage.peak = state.usage.peak.max(state.usage.busy + state.idle.len());
                Ok(true)
            }
            Err(error) => {
                self.inner.budget.give(1);
                let state = lock(&self.inner.state);
                // With what it has, the pool makes callers wait; it fails them only where it has nothing.
                if state.usage.busy + state.idle.len() > 0 { Ok(false) } else { Err(error) }
            }
        }
    }

    /// Waits, for a few milliseconds at most, until a slot may have become free. Other pools of the
    /// budget give up what they have idle meanwhile.
    pub(crate) fn await_slot(&self) {
        let budget = &self.inner.budget;
        let mut state = lock(&budget.state);
        state.waiting += 1;
        // Short: a slot given back between the caller's look and this lock must not cost much.
        let mut state = wait_timeout(&budget.freed, state, Duration::from_millis(5));
        state.waiting -= 1;
    }
}

impl Inner {
    fn reuse(&self) -> Option<PinnedMem> {
        let mut state = lock(&self.state);
        let memory = state.idle.pop()?;
        state.usage.busy += 1;
        Some(memory)
    }

    /// Slots that the pool holds, in use or not.
    fn held(&self) -> usize {
        let state = lock(&self.state);
        state.usage.busy + state.idle.len()
    }

    /// Has the keeper make a slot idle that it keeps for nothing.
    fn reclaim(&self) -> bool {
        let keeper = lock(&self.state).keeper.clone();
        keeper.and_then(|keeper| keeper.upgrade()).is_some_and(|keeper| keeper.give_up_one())
    }

    /// Unpins one idle slot, if there is one.
    fn spare(&self) -> bool {
        let memory = lock(&self.state).idle.pop();
        let Some(memory) = memory else { return false };
        drop(memory);
        self.budget.give(1);
        true
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let idle = std::mem::take(&mut lock(&self.state).idle);
        let slots = idle.len();
        drop(idle);
        self.budget.give(slots);
    }
}

/// One slot in use. Goes back to its pool when dropped, so it is dropped only after whoever wrote or
/// read it has finished.
#[derive(Debug)]
pub(crate) struct Slot {
    memory: Option<PinnedMem>,
    pool: Pool,
}

impl Slot {
    /// The memory; `None` never while the slot lives.
    pub(crate) fn memory(&self) -> Option<&PinnedMem> {
        self.memory.as_ref()
    }
}

impl Slot {
    /// Gives the memory up instead of back: whatever still uses it holds it alone, and the pool may
    /// pin another in its place.
    pub(crate) fn discard(mut self) {
        let Some(memory) = self.memory.take() else { return };
        drop(memory);
        lock(&self.pool.inner.state).usage.busy -= 1;
        self.pool.inner.budget.give(1);
    }
}

impl Slot {
    /// Gives the memory up for good: a device may still use it, and whoever queued that holds it. It stays
    /// counted, as busy and quarantined, and in the budget.
    pub(crate) fn abandon(mut self) {
        let Some(memory) = self.memory.take() else { return };
        drop(memory);
        lock(&self.pool.inner.state).usage.quarantined += 1;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let inner = &self.pool.inner;
        {
            let mut state = lock(&inner.state);
            state.usage.busy -= 1;
            state.idle.push(memory);
        }
        if inner.budget.has_waiters() {
            inner.budget.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::config::SimConfig;

    /// A slot, as soon as there is one within `span`.
    fn take(pool: &Pool, span: Duration) -> Result<Option<Slot>> {
        let until = Instant::now() + span;
        loop {
            if let Some(slot) = pool.reuse() {
                return Ok(Some(slot));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            if !pool.grow()? {
                pool.await_slot();
            }
        }
    }

    const SOON: Duration = Duration::from_millis(20);

    /// A slot that must be there.
    fn slot(pool: &Pool) -> Slot {
        take(pool, SOON).unwrap().expect("a slot")
    }

    fn config(slots: u64) -> Config {
        Config { pool_bytes: slots * SLOT_BYTES, ..Config::default() }
    }

    #[test]
    fn a_full_pool_makes_callers_wait_and_drops_leave_nothing() {
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        let pool = Pool::new(&gpu, Budget::new(&config(2)));
        let first = slot(&pool);
        let second = slot(&pool);
        assert!(take(&pool, SOON).unwrap().is_none());
        let waiting = std::thread::spawn({
            let pool = pool.clone();
            move || take(&pool, Duration::from_secs(30)).unwrap().is_some()
        });
        drop(first);
        assert!(waiting.join().unwrap());
        drop(second);
        let usage = pool.usage();
        assert_eq!((usage.idle, usage.busy, usage.peak), (2, 0, 2));
        assert_eq!(gpu.usage().pinned, 2 * SLOT_BYTES);
        drop(pool);
        assert_eq!(gpu.usage().pinned, 0);
    }

    #[test]
    fn pools_that_share_a_budget_hand_idle_slots_over() {
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        let budget = Budget::new(&config(2));
        let one = Pool::new(&gpu, Arc::clone(&budget));
        let two = Pool::new(&gpu, Arc::clone(&budget));
        drop((slot(&one), slot(&one)));
        let slots = (slot(&two), slot(&two));
        assert_eq!(gpu.usage().pinned, 2 * SLOT_BYTES, "never more than the budget");
        assert!(take(&one, SOON).unwrap().is_none());
        drop(slots);
        slot(&one);
    }

    /// Keeps slots that it does nothing with.
    #[derive(Debug)]
    struct Kept(Mutex<Vec<Slot>>);

    impl Keeper for Kept {
        fn give_up_one(&self) -> bool {
            let slot = lock(&self.0).pop();
            slot.is_some()
        }
    }

    #[test]
    fn slots_that_are_kept_for_nothing_go_to_a_pool_that_has_none_and_are_shared_evenly() {
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        for (slots, expected) in [(2, 1), (4, 2), (5, 2), (8, 4)] {
            let budget = Budget::new(&config(slots));
            let (one, two) =
                (Pool::new(&gpu, Arc::clone(&budget)), Pool::new(&gpu, Arc::clone(&budget)));
            let kept: Vec<_> = (0..slots).map(|_| slot(&one)).collect();
            let kept = Arc::new(Kept(Mutex::new(kept)));
            assert!(take(&two, SOON).unwrap().is_none(), "nobody has been named");
            let keeper: Arc<dyn Keeper> = Arc::clone(&kept) as _;
            one.set_keeper(Arc::downgrade(&keeper));
            let taken: Vec<_> = std::iter::from_fn(|| take(&two, SOON).unwrap()).collect();
            assert_eq!((taken.len(), lock(&kept.0).len()), (expected, slots as usize - expected));
            assert!(gpu.usage().pinned <= slots * SLOT_BYTES);
        }
    }

    #[test]
    fn what_is_abandoned_stays_counted() {
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        let budget = Budget::new(&config(2));
        let pool = Pool::new(&gpu, Arc::clone(&budget));
        slot(&pool).abandon();
        let usage = pool.usage();
        assert_eq!((usage.busy, usage.quarantined), (1, 1));
        let _left = slot(&pool);
        assert!(take(&pool, SOON).unwrap().is_none(), "more than the budget was pinned");
    }

    #[test]
    fn a_device_that_cannot_pin_says_so_and_leaves_the_budget_whole() {
        use crate::gpu::sim::{Effect, Site};
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        let pool = Pool::new(&gpu, Budget::new(&config(2)));
        gpu.as_sim().unwrap().faults().arm(Site::Pin, 0, Effect::Fail);
        assert!(take(&pool, SOON).unwrap_err().is_device());
        let both = (slot(&pool), slot(&pool));
        drop(both);
    }
}
