//! Slots: pieces of pinned memory, one for each stream-ordered request, taken when it is queued. Cut out of slabs of
//! the pinned memory that all engines of the process share; at most half of that, so that plain requests never go
//! without.

use std::sync::{Arc, Mutex};

use beeline_core::addr::VirtAddr;
use beeline_sys::cuda::{CELLS, HostRegistration};
use beeline_sys::mem::HostMem;

use super::super::status::Outcome;
use crate::config::{Config, SLOT_BYTES};
use crate::gpu::{Gpu, PinnedMem};
use crate::lock;
use crate::memory::{Budget, Keeper, Pool, Slot};

/// Slabs are cut into this many units, one for each bit of a word; a slot is a power of two of them.
const UNITS: u64 = 64;
/// Bytes of the smallest slot.
const UNIT: u64 = SLOT_BYTES / UNITS;
/// As many slots as there can be at least, whatever sizes are asked for, while all memory can be pinned.
const SLOTS_MIN: u64 = 16;

/// The slots of the process.
#[derive(Debug)]
pub(super) struct Slots {
    pool: Pool,
    slabs_max: usize,
    slabs: Mutex<Vec<Slab>>,
}

#[derive(Debug)]
struct Slab {
    memory: Slot,
    /// A bit for each unit in use.
    used: u64,
}

/// A slot in use; given back when dropped, so only after whoever uses it has ended.
#[derive(Debug)]
pub(super) struct Run {
    // Before the lease: a slab that is given back may be unpinned at once, and not by whoever drops this.
    memory: PinnedMem,
    registration: Arc<HostRegistration>,
    lease: Lease,
}

/// Units of a slab in use.
#[derive(Debug)]
struct Lease {
    slots: Arc<Slots>,
    /// By the address of its memory.
    slab: VirtAddr,
    units: u64,
    at: u64,
}

impl Slots {
    pub(super) fn new(gpu: &Gpu, config: &Config) -> Arc<Self> {
        let pool = Pool::new(gpu, Budget::process(config));
        let slabs_max = (pool.usage().limit / 2).max(1);
        let made = Arc::new(Self { pool, slabs_max, slabs: Mutex::default() });
        let keeper: Arc<dyn Keeper> = Arc::clone(&made) as _;
        made.pool.set_keeper(Arc::downgrade(&keeper));
        made
    }

    /// A slot for `bytes`, or a smaller one where there is no such; none where all memory is in use. Waits for nothing.
    ///
    /// # Errors
    /// What pinning says, where there is not even one slab.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Outcome<Option<Run>> {
        let most = bytes.div_ceil(UNIT).clamp(1, self.units_max()).next_power_of_two();
        if let Some(run) = self.find(most)? {
            return Ok(Some(run));
        }
        if self.grow()?
            && let Some(run) = self.find(most)?
        {
            return Ok(Some(run));
        }
        let mut units = most;
        while units > 1 {
            units /= 2;
            if let Some(run) = self.find(units)? {
                return Ok(Some(run));
            }
        }
        Ok(None)
    }

    /// Units of the largest slot.
    const fn units_max(&self) -> u64 {
        let share = (self.slabs_max as u64).saturating_mul(UNITS) / SLOTS_MIN;
        // Rounded down to a power of two.
        if share > UNITS { UNITS } else { 1 << share.ilog2() }
    }

    /// Bytes of a cell of the largest slot.
    pub(super) fn cell_max(&self) -> u32 {
        cell_of(self.units_max() * UNIT)
    }

    fn find(self: &Arc<Self>, units: u64) -> Outcome<Option<Run>> {
        let mut slabs = lock(&self.slabs);
        let free = |slab: &Slab| Some((place_in(slab.used, units)?, slab.memory.memory()?.clone()));
        let Some((slab, (at, memory))) =
            slabs.iter_mut().find_map(|slab| free(slab).map(|found| (slab, found)))
        else {
            return Ok(None);
        };
        let registration = Arc::clone(memory.registration()?);
        slab.used |= mask(units) << at;
        let lease = Lease { slots: Arc::clone(self), slab: memory.mem().addr(), units, at };
        Ok(Some(Run { memory, registration, lease }))
    }

    /// Adds a slab; false where there may be no more.
    fn grow(&self) -> Outcome<bool> {
        let first = {
            let slabs = lock(&self.slabs);
            if slabs.len() >= self.slabs_max {
                return Ok(false);
            }
            slabs.is_empty()
        };
        // Without the lock: pinning takes long. Two at once may come to one slab more, which goes back below.
        let memory = match self.pool.reuse() {
            Some(memory) => memory,
            None => match self.pool.grow() {
                Ok(true) => match self.pool.reuse() {
                    Some(memory) => memory,
                    None => return Ok(false),
                },
                Ok(false) => return Ok(false),
                Err(error) if first => return Err(error.into()),
                Err(_) => return Ok(false),
            },
        };
        let mut slabs = lock(&self.slabs);
        if slabs.len() < self.slabs_max {
            slabs.push(Slab { memory, used: 0 });
        }
        Ok(true)
    }

    fn give(&self, lease: &Lease) {
        let is_of = |slab: &&mut Slab| {
            slab.memory.memory().is_some_and(|memory| memory.mem().addr() == lease.slab)
        };
        if let Some(slab) = lock(&self.slabs).iter_mut().find(is_of) {
            slab.used &= !(mask(lease.units) << lease.at);
        }
    }

    /// Unpins what no request uses.
    pub(super) fn trim(&self) {
        while self.give_up_one() {}
        self.pool.trim();
    }
}

impl Keeper for Slots {
    fn give_up_one(&self) -> bool {
        let Ok(mut slabs) = self.slabs.try_lock() else { return false };
        let idle = slabs.iter().position(|slab| slab.used == 0);
        idle.map(|at| drop(slabs.swap_remove(at))).is_some()
    }
}

impl Run {
    /// The memory that it is a part of.
    pub(super) const fn registration(&self) -> &Arc<HostRegistration> {
        &self.registration
    }

    /// The same memory, for the CPU.
    pub(super) fn host(&self) -> &Arc<HostMem> {
        self.memory.mem()
    }

    /// Where in it the slot starts.
    pub(super) const fn start(&self) -> u64 {
        self.lease.at * UNIT
    }

    /// Bytes of the slot.
    pub(super) const fn bytes(&self) -> u64 {
        self.lease.units * UNIT
    }

    /// Bytes of one of its cells.
    pub(super) fn cell(&self) -> u32 {
        cell_of(self.bytes())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.slots.give(self);
    }
}

/// Bytes of a cell of a slot of so many, at most `SLOT_BYTES / CELLS`.
fn cell_of(bytes: u64) -> u32 {
    u32::try_from(bytes / CELLS as u64).unwrap_or(4096)
}

/// `units` ones.
const fn mask(units: u64) -> u64 {
    if units >= UNITS { u64::MAX } else { (1 << units) - 1 }
}

/// The first place of `units`, a power of two, that are not in use.
fn place_in(used: u64, units: u64) -> Option<u64> {
    let step = usize::try_from(units).ok()?.max(1);
    (0..UNITS).step_by(step).find(|at| used & (mask(units) << at) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_aligned_and_free() {
        let cases = [
            (0, 1, Some(0)),
            (0, 64, Some(0)),
            (1, 64, None),
            (1, 1, Some(1)),
            (1, 2, Some(2)),
            (0x0f, 4, Some(4)),
            (0x1f, 4, Some(8)),
            (u64::MAX >> 1, 1, Some(63)),
            (u64::MAX >> 1, 2, None),
            (u64::MAX >> 32, 32, Some(32)),
            (u64::MAX, 1, None),
        ];
        for (used, units, expected) in cases {
            assert_eq!(place_in(used, units), expected, "{used:#x} {units}");
        }
    }
}
