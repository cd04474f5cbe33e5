//! Simulated device memory: pages, allocations, moves.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};

use beeline_core::addr::{BusAddr, DevicePtr};
use beeline_sys::mem::{Extent, HostMem, OutOfBounds, PeerMem, punch_hole};

use super::attach::Importers;
use super::{Counted, Device};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Profile, RegisteredMap};
use crate::p2p::share::Name;
use crate::{lock, read_lock, write_lock};

/// The unit of allocation: the page size of GPU memory behind a BAR.
pub(super) const PAGE_BYTES: u64 = 64 << 10;

/// Where the simulated BAR sits on the simulated bus; device `n` starts `n` TiB further on.
const BAR_BASE: u64 = 0x380_0000_0000_0000 >> 8;

/// The free pages of a device, as runs.
#[derive(Debug)]
pub(super) struct Pages {
    /// Start of a free run -> its length, both in bytes; runs never touch each other.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
}

impl Pages {
    pub(super) fn new(capacity: u64) -> Self {
        let free = if capacity == 0 { BTreeMap::new() } else { BTreeMap::from([(0, capacity)]) };
        Self { free, free_bytes: capacity }
    }

    pub(super) const fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Takes `len` bytes (whole pages) from the lowest free runs, or nothing.
    fn take(&mut self, len: u64) -> Option<Vec<Extent>> {
        if len > self.free_bytes {
            return None;
        }
        let mut extents = Vec::new();
        let mut missing = len;
        while missing > 0 {
            let (offset, run) = self.free.pop_first()?;
            let taken = run.min(missing);
            extents.push(Extent { offset, len: taken });
            if taken < run {
                self.free.insert(offset + taken, run - taken);
            }
            missing -= taken;
        }
        self.free_bytes -= len;
        Some(extents)
    }

    fn give(&mut self, extents: &[Extent]) {
        for extent in extents {
            let (mut start, mut len) = (extent.offset, extent.len);
            if let Some((&before, &run)) = self.free.range(..start).next_back()
                && before + run == start
            {
                self.free.remove(&before);
                (start, len) = (before, run + len);
            }
            if let Some(run) = self.free.remove(&(start + len)) {
                len += run;
            }
            self.free.insert(start, len);
            self.free_bytes += extent.len;
        }
    }
}

/// Simulated device memory. Freed with the last handle.
pub struct Allocation {
    device: Device,
    /// No other allocation of the process has it.
    number: u64,
    mem: HostMem,
    /// Whole pages behind `mem`, in address order. Copies hold it shared, a move exclusively.
    extents: RwLock<Vec<Extent>>,
    /// Held during a move, and by whoever attaches the memory.
    moving: Mutex<()>,
    importers: Mutex<Importers>,
    /// Pages that pieces of `mem` may still be behind after a move that could not be undone; then there
    /// are no `extents`, so that nothing but the memory's own addresses reaches it.
    torn: Mutex<Vec<Extent>>,
    /// The pages are another process's: nothing is given back here.
    borrowed: bool,
}

impl Allocation {
    pub(super) fn new(device: &Device, len: u64) -> Result<Self> {
        let bytes = len.checked_next_multiple_of(PAGE_BYTES).ok_or_else(|| oom(device, len))?;
        // A statement of its own: the error text asks for the free bytes, under the same lock.
        let extents = lock(&device.inner.pages).take(bytes);
        let extents = extents.ok_or_else(|| oom(device, bytes))?;
        match HostMem::from_extents(&device.inner.memory, &extents) {
            Ok(mem) => {
                device.inner.allocated.fetch_add(bytes, Ordering::Relaxed);
                Ok(Self::of(device, mem, extents, false))
            }
            Err(error) => {
                lock(&device.inner.pages).give(&extents);
                Err(Error::io(format_args!("map {bytes} bytes of simulated device memory"), error))
            }
        }
    }

    fn of(device: &Device, mem: HostMem, extents: Vec<Extent>, borrowed: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);

        Self {
            device: device.clone(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            mem,
            extents: RwLock::new(extents),
            moving: Mutex::default(),
            importers: Mutex::default(),
            torn: Mutex::default(),
            borrowed,
        }
    }

    /// How another process finds the memory.
    pub(in crate::gpu) fn name(&self) -> Result<Name> {
        if self.borrowed || self.device.inner.profile == Profile::Movable {
            return Err(Error::refused(
                "memory of another process, or memory that moves, cannot be shared",
            ));
        }
        let extents = read_lock(&self.extents).clone();
        if !lock(&self.torn).is_empty() {
            return Err(torn());
        }
        let file = self.device.inner.memory.try_clone();
        let file = file.map_err(|error| Error::io("share simulated device memory", error))?;
        Ok(Name::File(file, extents))
    }

    /// Memory of another process's simulated device, of at least `len` bytes.
    pub(super) fn named(device: &Device, name: Name, len: u64) -> Result<Self> {
        let Name::File(file, extents) = name else {
            return Err(Error::refused("memory of a CUDA device, for a simulated one"));
        };
        let run = |sum: u64, run: &Extent| sum.checked_add(run.len);
        let total = extents.iter().try_fold(0, run).filter(|total| *total >= len);
        if total.is_none() || extents.iter().any(|run| !run.len.is_multiple_of(PAGE_BYTES)) {
            return Err(Error::refused(format!("the memory shared has less than {len} bytes")));
        }
        let ends = extents.iter().map(|run| run.offset.checked_add(run.len));
        let end = ends.max().flatten().and_then(|end| usize::try_from(end).ok());
        let end = end.ok_or_else(|| Error::refused("the memory shared overflows"))?;
        // Only a file that cannot shrink is safe to access.
        let checked = PeerMem::new(&file, end);
        checked.and_then(|_| HostMem::from_extents(&file, &extents)).map_or_else(
            |error| Err(Error::io("map device memory of another process", error)),
            |mem| Ok(Self::of(device, mem, extents, true)),
        )
    }

    pub(in crate::gpu) const fn device(&self) -> &Device {
        &self.device
    }

    pub(in crate::gpu) const fn number(&self) -> u64 {
        self.number
    }

    pub(in crate::gpu) fn ptr(&self) -> DevicePtr {
        DevicePtr::new(self.mem.addr().as_u64())
    }

    /// The bus address of the byte at `offset`, and how many bytes follow it contiguously.
    pub(in crate::gpu) fn bus_addr(&self, offset: u64) -> Option<(BusAddr, u64)> {
        let base = BAR_BASE + (u64::from(self.device.inner.index) << 40);
        let mut skip = offset;
        for extent in read_lock(&self.extents).iter() {
            if skip < extent.len {
                return Some((BusAddr::new(base + extent.offset + skip), extent.len - skip));
            }
            skip -= extent.len;
        }
        None
    }

    pub(in crate::gpu) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        let _still = read_lock(&self.extents);
        self.mem.read(at, into)
    }

    pub(in crate::gpu) fn write(&self, at: u64, from: &[u8]) -> Result<(), OutOfBounds> {
        let _still = read_lock(&self.extents);
        self.mem.write(at, from)
    }

    /// Runs `work` on the memory while it stays where it is.
    pub(super) fn with<T>(&self, work: impl FnOnce(&HostMem) -> T) -> T {
        let _still = read_lock(&self.extents);
        work(&self.mem)
    }

    /// Runs `work` on two allocations, or one twice, while both stay where they are.
    ///
    /// The locks are taken in address order: two copies in opposite directions and two moves would
    /// otherwise be able to wait for each other.
    pub(super) fn with_both<T>(
        a: &Self,
        b: &Self,
        work: impl FnOnce(&HostMem, &HostMem) -> T,
    ) -> T {
        let (low, high) = if a.ptr() <= b.ptr() { (a, b) } else { (b, a) };
        let _low = read_lock(&low.extents);
        let _high = (!std::ptr::eq(low, high)).then(|| read_lock(&high.extents));
        work(&a.mem, &b.mem)
    }

    /// Copies mapped file pages into this memory; the kernel makes the copy, so a file that was
    /// truncated is an error and not a signal.
    pub(super) fn fill_from_map(
        &self,
        at: u64,
        src: &RegisteredMap,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let mut done = 0;
        while done < len {
            let extents = read_lock(&self.extents);
            if self.borrowed {
                return Err(Error::refused("mapped pages into memory of another process"));
            }
            let Some((offset, run)) = translate(&extents, at + done) else {
                return Err(OutOfBounds { offset: at + done, len, size: self.mem.len() }.into());
            };
            let want = run.min(len - done);
            let memory = self.device.inner.memory.as_fd();
            let n =
                src.map().write_to(src_offset + done, want, memory, offset).map_err(|error| {
                    Error::new(Kind::Corrupt, "the file shrank while its mapped pages were copied")
                        .because(error)
                })?;
            if n == 0 {
                return Err(Error::new(Kind::Corrupt, "mapped pages of the file are gone"));
            }
            done += n;
        }
        Ok(())
    }

    /// The pages behind it, in address order, as they lie now.
    pub(super) fn extents(&self) -> Vec<Extent> {
        read_lock(&self.extents).clone()
    }

    /// Those of `[at, at + len)`.
    pub(crate) fn extents_of(&self, at: u64, len: u64) -> Vec<Extent> {
        let extents = read_lock(&self.extents);
        let mut found = Vec::new();
        let mut done = 0;
        while done < len
            && let Some((offset, run)) = translate(&extents, at + done)
        {
            let step = run.min(len - done);
            found.push(Extent { offset, len: step });
            done += step;
        }
        found
    }

    /// The memory file of the device.
    pub(crate) fn memory_file(&self) -> std::os::fd::BorrowedFd<'_> {
        self.device.inner.memory.as_fd()
    }

    pub(super) const fn moving(&self) -> &Mutex<()> {
        &self.moving
    }

    pub(super) const fn importers(&self) -> &Mutex<Importers> {
        &self.importers
    }

    pub(super) fn relocate(&self) -> Result<()> {
        if self.borrowed {
            return Err(Error::refused("the memory belongs to another process"));
        }
        let _one_at_a_time = lock(&self.moving);
        // Given back at the end, when the new pages are in place and the old ones are gone.
        let _revoked = self.revoke_all()?;
        let mut extents = write_lock(&self.extents);
        if !lock(&self.torn).is_empty() {
            return Err(torn());
        }
        let bytes = extents.iter().map(|extent| extent.len).sum();
        let fresh = lock(&self.device.inner.pages).take(bytes);
        let fresh = fresh.ok_or_else(|| oom(&self.device, bytes))?;
        let copied = HostMem::from_extents(&self.device.inner.memory, &fresh)
            .map_err(|error| Error::io("map the new place of simulated device memory", error))
            .and_then(|target| Ok(target.copy_from(0, &self.mem, 0, bytes)?));
        if let Err(error) = copied {
            self.device.return_pages(&fresh);
            return Err(error);
        }
        self.settle(&mut extents, fresh, |to| self.mem.remap(&self.device.inner.memory, to))
    }

    /// Puts the memory on `fresh` pages by `remap`, which may fail half-way: then on the old ones again.
    /// Pages are given back only where no piece of the memory is behind them.
    fn settle(
        &self,
        extents: &mut Vec<Extent>,
        fresh: Vec<Extent>,
        mut remap: impl FnMut(&[Extent]) -> io::Result<()>,
    ) -> Result<()> {
        let Err(error) = remap(&fresh) else {
            let old = std::mem::replace(extents, fresh);
            self.device.return_pages(&old);
            return Ok(());
        };
        if remap(extents).is_ok() {
            self.device.return_pages(&fresh);
            return Err(Error::io("move simulated device memory", error));
        }
        let bytes = fresh.iter().map(|extent| extent.len).sum();
        self.device.inner.allocated.fetch_add(bytes, Ordering::Relaxed);
        let mut kept = lock(&self.torn);
        kept.append(extents);
        kept.extend(fresh);
        Err(Error::io("move simulated device memory, and undo it: it stays torn", error))
    }
}

impl Device {
    fn return_pages(&self, extents: &[Extent]) {
        for extent in extents {
            // Failure leaves the host pages in place, which costs memory but loses nothing.
            let _ = punch_hole(&self.inner.memory, extent.offset, extent.len);
        }
        lock(&self.inner.pages).give(extents);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.borrowed {
            return;
        }
        let mut extents = std::mem::take(&mut *write_lock(&self.extents));
        extents.append(&mut lock(&self.torn));
        let bytes: u64 = extents.iter().map(|extent| extent.len).sum();
        self.device.return_pages(&extents);
        self.device.inner.allocated.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation({:?})", self.mem)
    }
}

impl<T> fmt::Debug for Counted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Counted({} bytes)", self.bytes)
    }
}

/// Where byte `at` of the allocation lies in the device's memory, and how far its run goes.
pub(super) fn translate(extents: &[Extent], at: u64) -> Option<(u64, u64)> {
    let mut skip = at;
    for extent in extents {
        if skip < extent.len {
            return Some((extent.offset + skip, extent.len - skip));
        }
        skip -= extent.len;
    }
    None
}

fn torn() -> Error {
    Error::refused("a move of this device memory failed and could not be undone: allocate it anew")
}

fn oom(device: &Device, len: u64) -> Error {
    let memory = device.memory();
    Error::new(
        Kind::OutOfMemory,
        format!(
            "sim:{} has {} of {} bytes of device memory free, {} bytes short of the {len} needed \
             (whole pages of 64 KiB)",
            device.inner.index,
            memory.free,
            memory.total,
            len.saturating_sub(memory.free)
        ),
    )
    .remedy("load fewer tensors (--tensors), or raise BEELINE_SIM_MEMORY")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::SimConfig;
    use crate::gpu::Gpu;

    #[test]
    fn pages_are_taken_whole_and_runs_grow_together_again() {
        let mut pages = Pages::new(8 * PAGE_BYTES);
        let a = pages.take(3 * PAGE_BYTES).unwrap();
        let b = pages.take(2 * PAGE_BYTES).unwrap();
        assert_eq!(pages.free_bytes(), 3 * PAGE_BYTES);
        assert!(pages.take(4 * PAGE_BYTES).is_none(), "too much takes nothing");
        pages.give(&a);
        let c = pages.take(5 * PAGE_BYTES).unwrap();
        assert_eq!(c.len(), 2, "the rest may lie in pieces");
        pages.give(&c);
        pages.give(&b);
        assert_eq!(pages.free, BTreeMap::from([(0, 8 * PAGE_BYTES)]));
    }

    #[test]
    fn a_move_that_fails_gives_no_page_away_that_is_mapped() {
        // Which calls of `remap` fail; bytes free afterwards of 8 pages, and whether it can move on.
        let cases = [(&[][..], 6, true), (&[0][..], 6, true), (&[0, 1][..], 4, false)];
        for (fails, free, whole) in cases {
            let config = SimConfig {
                memory_bytes: 8 * PAGE_BYTES,
                profile: Profile::Movable,
                ..SimConfig::default()
            };
            let gpu = Gpu::simulated(&config).unwrap();
            let buffer = gpu.alloc(2 * PAGE_BYTES).unwrap();
            let memory = Arc::clone(buffer.locate_sim(0, 0).unwrap().0);
            memory.write(0, &[7; 4096]).unwrap();
            let pages = &memory.device.inner.pages;
            let fresh = lock(pages).take(2 * PAGE_BYTES).unwrap();
            let mut extents = write_lock(&memory.extents);
            let mut call = 0;
            let moved = memory.settle(&mut extents, fresh, |_| {
                call += 1;
                if fails.contains(&(call - 1)) {
                    Err(io::ErrorKind::OutOfMemory.into())
                } else {
                    Ok(())
                }
            });
            drop(extents);
            assert_eq!(moved.is_ok(), fails.is_empty());
            assert_eq!(lock(pages).free_bytes(), free * PAGE_BYTES, "{fails:?}");
            assert_eq!(gpu.usage().allocated, (8 - free) * PAGE_BYTES, "{fails:?}");
            assert_eq!(memory.bus_addr(0).is_some(), whole);
            let again = memory.relocate();
            assert_eq!(again.is_ok(), whole, "{again:?}");
            if !fails.is_empty() {
                let mut bytes = [0; 4096];
                memory.read(0, &mut bytes).unwrap();
                assert_eq!(bytes, [7; 4096], "{fails:?}");
            }
            let device = memory.device.clone();
            drop((memory, buffer));
            assert_eq!(lock(&device.inner.pages).free_bytes(), 8 * PAGE_BYTES);
            assert_eq!(gpu.usage().allocated, 0);
        }
    }

    #[test]
    fn translation_follows_the_extents() {
        let extents = [Extent { offset: 640, len: 64 }, Extent { offset: 64, len: 128 }];
        let cases =
            [(0, Some((640, 64))), (63, Some((703, 1))), (64, Some((64, 128))), (192, None)];
        for (at, expected) in cases {
            assert_eq!(translate(&extents, at), expected, "{at}");
        }
    }
}
