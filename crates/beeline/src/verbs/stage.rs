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

use crate::gpu::{Gpu, PinnedMem};
use crate::lock;

/// Slots for long operations. A copy of that length takes some 40 us on PCIe 5.0 x16, of which a hand-over
/// from one process to the other is a small part; eight of them in flight cover it.
pub(super) const LARGE_BYTES: u64 = 2 << 20;
const LARGE: u64 = 16;

/// Slots for shorter ones.
const SMALL_BYTES: u64 = 64 << 10;
const SMALL: u64 = 32;

/// Length of the whole.
pub(super) const STAGE_BYTES: u64 = LARGE * LARGE_BYTES + SMALL * SMALL_BYTES;

/// Shorter operations go through the ring: a slot for each would cost more than copying them.
pub(super) const STAGE_MIN: u64 = 4 << 10;

/// This side's staging memory.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) mem: StageMem,
    /// Offsets of free slots: large ones, small ones.
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
    pub(super) fn new() -> io::Result<(Arc<Self>, OwnedFd)> {
        let file = memfd("beeline-stage", STAGE_BYTES)?;
        let mem = StageMem::new(&file, STAGE_BYTES)?;
        let large = (0..LARGE).rev().map(|n| n * LARGE_BYTES).collect();
        let small = (0..SMALL).rev().map(|n| LARGE * LARGE_BYTES + n * SMALL_BYTES).collect();
        Ok((Arc::new(Self { mem, free: Mutex::new([large, small]) }), file))
    }

    /// A slot for `bytes`, if one is free; a large one where they do not fit a small one.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Arc<StageSlot>> {
        let large = bytes > SMALL_BYTES;
        if bytes > LARGE_BYTES {
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
        large.len() as u64 == LARGE && small.len() as u64 == SMALL
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
        let (stage, _file) = Stage::new().unwrap();
        let mut taken = Vec::new();
        for (bytes, count) in [(LARGE_BYTES, LARGE), (1, SMALL), (SMALL_BYTES, 0)] {
            let before = taken.len() as u64;
            while let Some(slot) = stage.take(bytes) {
                let end = slot.offset + if slot.large { LARGE_BYTES } else { SMALL_BYTES };
                taken.push((slot.offset, end, slot));
            }
            assert_eq!(taken.len() as u64 - before, count, "{bytes}");
        }
        taken.sort_by_key(|(start, ..)| *start);
        assert!(taken.windows(2).all(|two| two[0].1 == two[1].0));
        assert_eq!(taken.last().map(|(_, end, _)| *end), Some(STAGE_BYTES));
        drop(taken);
        assert!(stage.take(LARGE_BYTES).is_some() && stage.take(8).is_some());
        assert!(stage.take(LARGE_BYTES + 1).is_none(), "longer than any slot");
    }

    #[test]
    fn both_sides_pin_the_same_bytes() {
        let (stage, file) = Stage::new().unwrap();
        let far = StageMem::new(&file, STAGE_BYTES).unwrap();
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        stage.mem.pinned(&gpu).unwrap().mem().write(7, &[1, 2, 3]).unwrap();
        let mut bytes = [0; 3];
        far.pinned(&gpu).unwrap().mem().read(7, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3]);
        assert!(StageMem::new(&file, STAGE_BYTES + 1).is_err(), "too short");
    }
}
