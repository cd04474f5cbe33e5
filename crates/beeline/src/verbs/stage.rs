//! Staging memory that the peer of a local link reads: pinned at both ends, so that each copy engine works on it.
//!
//! Memory of a GPU that cannot be passed on goes through it: the owner's copy engine writes a slot, the packet
//! names it, and the peer's copy engine reads it. No CPU touches the bytes. A slot is free again when the peer
//! has said so for every packet that names it ([`super::lent`]).
//!
//! The file is one that both sides can write, because a driver pins no memory that is mapped read-only
//! everywhere. What stands in it was or will be sent to that very peer, so a peer that writes there spoils
//! what it is told, and nothing else. Memory that its owner may free meanwhile does not go this way: its
//! bytes must not be seen by anybody before the second look at its allocation.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use beeline_sys::mem::{HostMem, OutOfBounds, memfd};

use crate::config::StageConfig;
use crate::gpu::{Gpu, PinnedMem};
use crate::lock;

/// Slots for shorter operations.
const SMALL_BYTES: u64 = 64 << 10;
const SMALL: u64 = 32;

/// Longest staging memory that a peer is believed to need.
pub(super) const STAGE_BYTES_MAX: u64 = 64 * (4 << 20) + SMALL * SMALL_BYTES;

/// Shorter operations go through the ring: a slot for each would cost more than copying them.
pub(super) const STAGE_MIN: u64 = 4 << 10;

/// This side's staging memory.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) mem: StageMem,
    /// Length of a large slot.
    slot_bytes: u64,
    /// Offsets of free slots, those used last at the end: large ones, small ones. Taken from the end, so that few
    /// of them are in use and stay in the processor's cache.
    free: Mutex<[Vec<u64>; 2]>,
}

/// Staging memory, of this side or of the peer, as devices of this process reach it.
pub(super) struct StageMem {
    mem: Arc<HostMem>,
    /// By kind of device; `None` where it cannot be pinned.
    pins: Mutex<Vec<(bool, Option<PinnedMem>)>>,
}

/// A slot, free again when the last clone is dropped.
pub(super) struct StageSlot {
    stage: Arc<Stage>,
    pub(super) offset: u64,
    large: bool,
}

impl Stage {
    /// Staging memory, and the file to be passed to the peer.
    pub(super) fn new(config: StageConfig) -> io::Result<(Arc<Self>, OwnedFd)> {
        let StageConfig { slots, slot_bytes } = config;
        let small_at = slots.saturating_mul(slot_bytes);
        let bytes = small_at.saturating_add(SMALL * SMALL_BYTES);
        let file = memfd("beeline-stage", bytes)?;
        let mem = StageMem::new(&file, bytes)?;
        let large = (0..slots).rev().map(|n| n * slot_bytes).collect();
        let small = (0..SMALL).rev().map(|n| small_at + n * SMALL_BYTES).collect();
        Ok((Arc::new(Self { mem, slot_bytes, free: Mutex::new([large, small]) }), file))
    }

    /// Length of the longest copy.
    pub(super) const fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// A slot for `bytes`, if one is free; a large one where they do not fit a small one.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Arc<StageSlot>> {
        let large = bytes > SMALL_BYTES;
        if bytes > self.slot_bytes {
            return None;
        }
        let offset = {
            let mut free = lock(&self.free);
            let [large_ones, small_ones] = &mut *free;
            if large { large_ones.pop() } else { small_ones.pop() }
        }?;
        Some(Arc::new(StageSlot { stage: Arc::clone(self), offset, large }))
    }

    /// Whether every slot is free.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let [large, small] = &*lock(&self.free);
        let slots = (self.mem.len() - SMALL * SMALL_BYTES) / self.slot_bytes;
        large.len() as u64 == slots && small.len() as u64 == SMALL
    }
}

impl fmt::Debug for StageSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StageSlot({:#x})", self.offset)
    }
}

impl Drop for StageSlot {
    fn drop(&mut self) {
        let [large, small] = &mut *lock(&self.stage.free);
        if self.large { large.push(self.offset) } else { small.push(self.offset) }
    }
}

impl StageMem {
    /// Maps all of a memory file, the peer's or this side's.
    ///
    /// # Errors
    /// `InvalidData` where it could become shorter or is; what `mmap(2)` says.
    pub(super) fn new(file: impl AsFd, len: u64) -> io::Result<Self> {
        let bytes = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidData)?;
        let mem = Arc::new(HostMem::of_sealed(file, bytes)?);
        Ok(Self { mem, pins: Mutex::default() })
    }

    /// As `gpu` and all devices of its kind reach it; pinned at the first call. `None` where it cannot be.
    pub(super) fn pinned(&self, gpu: &Gpu) -> Option<PinnedMem> {
        let simulated = gpu.as_sim().is_some();
        let mut pins = lock(&self.pins);
        if let Some((_, pin)) = pins.iter().find(|(kind, _)| *kind == simulated) {
            return pin.clone();
        }
        let pin = gpu.pin_mem(Arc::clone(&self.mem)).inspect_err(|error| {
            tracing::warn!(%error, "staging memory of a local link is not pinned: the CPU copies");
        });
        let pin = pin.ok();
        pins.push((simulated, pin.clone()));
        pin
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.mem.len()
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.mem.read(offset, into)
    }

    pub(super) fn copy_to(
        &self,
        offset: u64,
        target: &HostMem,
        target_offset: u64,
        len: u64,
    ) -> Result<(), OutOfBounds> {
        target.copy_from(target_offset, &self.mem, offset, len)
    }
}

impl fmt::Debug for StageMem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StageMem({:?})", self.mem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SimConfig;

    #[test]
    fn slots_are_apart_bounded_and_come_back() {
        let config = StageConfig::default();
        let (stage, _file) = Stage::new(config).unwrap();
        let mut taken = Vec::new();
        for (bytes, count) in [(config.slot_bytes, config.slots), (1, SMALL), (SMALL_BYTES, 0)] {
            let before = taken.len() as u64;
            while let Some(slot) = stage.take(bytes) {
                let end = slot.offset + if slot.large { config.slot_bytes } else { SMALL_BYTES };
                taken.push((slot.offset, end, slot));
            }
            assert_eq!(taken.len() as u64 - before, count, "{bytes}");
        }
        taken.sort_by_key(|(start, ..)| *start);
        assert!(taken.windows(2).all(|two| two[0].1 == two[1].0));
        assert_eq!(taken.last().map(|(_, end, _)| *end), Some(stage.mem.len()));
        assert!(!stage.is_idle());
        drop(taken);
        assert!(stage.is_idle());
        assert!(stage.take(config.slot_bytes + 1).is_none(), "longer than any slot");
        // The one used last is used next.
        let first = stage.take(config.slot_bytes).map(|slot| slot.offset);
        assert_eq!(stage.take(config.slot_bytes).map(|slot| slot.offset), first);
    }

    #[test]
    fn both_sides_pin_the_same_bytes() {
        let (stage, file) = Stage::new(StageConfig::default()).unwrap();
        let far = StageMem::new(&file, stage.mem.len()).unwrap();
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        stage.mem.pinned(&gpu).unwrap().mem().write(7, &[1, 2, 3]).unwrap();
        let mut bytes = [0; 3];
        far.pinned(&gpu).unwrap().mem().read(7, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3]);
        assert!(StageMem::new(&file, stage.mem.len() + 1).is_err(), "too short");
    }
}
