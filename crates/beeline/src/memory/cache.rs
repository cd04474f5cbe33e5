//! A cache of registrations, keyed by the allocation and not by its address.
//!
//! Registering costs far more than an access, so programs keep regions. A cache that goes by the address
//! is wrong as soon as an allocator uses it again; one that trusts hooks on `free` is wrong as soon as one
//! is missed. Here every lookup asks which allocation lies there *now*, and an entry of another one is
//! thrown away. An allocation that is freed under its region is, besides, noticed at every access
//! ([`super::GpuMemory`]).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use beeline_core::addr::DevicePtr;

use crate::error::Result;
use crate::gpu::{Buffer, DeviceId};
use crate::lock;
use crate::verbs::{Access, Mr, Pd};

/// Regions of GPU memory that are used again. Holds the memory of this library's that is registered in
/// it, until the entry is the oldest of too many or [`clear`](Self::clear)ed.
#[derive(Debug)]
pub struct RegistrationCache {
    pd: Pd,
    regions_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Last used at the back.
    entries: VecDeque<Entry>,
    counts: Counts,
}

#[derive(Debug)]
struct Entry {
    device: DeviceId,
    allocation: u64,
    start: DevicePtr,
    len: u64,
    access: Access,
    mr: Arc<Mr>,
}

/// What a cache did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Answered with a region that was there.
    pub hits: u64,
    /// Registered anew.
    pub misses: u64,
    /// Thrown away because another allocation lies there now.
    pub stale: u64,
    /// Thrown away because there were too many.
    pub evicted: u64,
}

impl RegistrationCache {
    /// An empty cache of at most `regions_max` regions (at least 1) of one protection domain.
    pub fn new(pd: &Pd, regions_max: usize) -> Self {
        Self { pd: pd.clone(), regions_max: regions_max.max(1), state: Mutex::default() }
    }

    /// A region that holds all of `buffer` with at least these rights.
    ///
    /// # Errors
    /// As [`Pd::reg_gpu`].
    pub fn region(&self, buffer: &Buffer, access: Access) -> Result<Arc<Mr>> {
        let device = buffer.gpu().id();
        let now = buffer.allocation_id()?;
        let mut state = lock(&self.state);
        let (start, len) = (buffer.ptr(), buffer.len());
        let before = state.entries.len();
        // Whoever overlaps and is of another allocation is of one that is gone.
        state.entries.retain(|entry| {
            !(entry.device == device && entry.overlaps(start, len) && Some(entry.allocation) != now)
        });
        state.counts.stale += (before - state.entries.len()) as u64;
        let found = state.entries.iter().position(|entry| {
            entry.device == device
                && Some(entry.allocation) == now
                && entry.holds(start, len)
                && entry.access.contains(access)
        });
        if let Some(entry) = found.and_then(|at| state.entries.remove(at)) {
            state.counts.hits += 1;
            let mr = Arc::clone(&entry.mr);
            state.entries.push_back(entry);
            return Ok(mr);
        }
        state.counts.misses += 1;
        let mr = Arc::new(self.pd.reg_gpu(buffer, access)?);
        if let Some(allocation) = now {
            let mr = Arc::clone(&mr);
            state.entries.push_back(Entry { device, allocation, start, len, access, mr });
        }
        while state.entries.len() > self.regions_max {
            state.entries.pop_front();
            state.counts.evicted += 1;
        }
        Ok(mr)
    }

    /// Ends every registration that nobody else holds.
    pub fn clear(&self) {
        let entries = std::mem::take(&mut lock(&self.state).entries);
        // Without the lock: ending a registration may take a while.
        drop(entries);
    }

    /// What it did so far.
    pub fn counts(&self) -> Counts {
        lock(&self.state).counts
    }
}

impl Entry {
    fn end(&self) -> u64 {
        self.start.as_u64().saturating_add(self.len)
    }

    fn overlaps(&self, start: DevicePtr, len: u64) -> bool {
        start.as_u64() < self.end() && self.start.as_u64() < start.as_u64().saturating_add(len)
    }

    fn holds(&self, start: DevicePtr, len: u64) -> bool {
        self.start <= start && start.as_u64().saturating_add(len) <= self.end()
    }
}
