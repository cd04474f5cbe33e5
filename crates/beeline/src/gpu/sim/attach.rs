//! Importers of simulated device memory: how a device that is not the GPU reaches it, by bus address.
//!
//! An importer never uses the mapping that the GPU's own copies use. It looks up where the pages lie and
//! goes there, through the whole of device memory as the bus shows it. So an access with an outdated
//! translation hits other bytes, as it would on hardware.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use beeline_sys::mem::{Extent, HostMem, OutOfBounds};

use super::{Allocation, Device};
use crate::error::{Error, Kind, Result};
use crate::lock;
use crate::memory::revocation::{Refused, Revocable};

/// Importers of one allocation at most.
const IMPORTERS_MAX: usize = 1024;

/// Who has an allocation attached.
#[derive(Debug, Default)]
pub(super) struct Importers {
    /// Holders of pins, by a number of their own.
    pins: Vec<(u64, String)>,
    dynamic: Vec<Weak<Translation>>,
    next: u64,
}

type Translation = Revocable<Vec<Extent>>;

/// Memory attached by an importer. Ends when dropped.
pub(crate) struct Attachment {
    allocation: Arc<Allocation>,
    kind: Kinds,
}

enum Kinds {
    /// The pages do not move while this lives.
    Pinned { pin: u64, extents: Vec<Extent> },
    /// The pages may move; the translation follows.
    Dynamic(Arc<Translation>),
}

impl Attachment {
    /// Attaches memory so that it does not move; a move is refused with the name of `holder`.
    pub(crate) fn pinned(allocation: &Arc<Allocation>, holder: &str) -> Result<Self> {
        // Waits for a move under way.
        let _still = lock(allocation.moving());
        let mut importers = lock(allocation.importers());
        importers.check(allocation)?;
        let pin = importers.next;
        importers.next += 1;
        importers.pins.push((pin, holder.to_owned()));
        let extents = allocation.extents();
        Ok(Self { allocation: Arc::clone(allocation), kind: Kinds::Pinned { pin, extents } })
    }

    /// Attaches memory that may move.
    pub(crate) fn dynamic(allocation: &Arc<Allocation>) -> Result<Self> {
        let _still = lock(allocation.moving());
        let mut importers = lock(allocation.importers());
        importers.dynamic.retain(|known| known.strong_count() > 0);
        importers.check(allocation)?;
        let translation = Arc::new(Translation::new());
        importers.dynamic.push(Arc::downgrade(&translation));
        Ok(Self { allocation: Arc::clone(allocation), kind: Kinds::Dynamic(translation) })
    }

    pub(crate) const fn is_dynamic(&self) -> bool {
        matches!(self.kind, Kinds::Dynamic(_))
    }

    /// Pages faulted in, and translations taken away, so far.
    pub(crate) fn counts(&self) -> (u64, u64) {
        match &self.kind {
            Kinds::Pinned { .. } => (0, 0),
            Kinds::Dynamic(translation) => (translation.faults(), translation.revocations()),
        }
    }

    /// Copies out of device memory from byte `at` of the allocation on.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let len = into.len() as u64;
        self.on_bus(|bar, extents| {
            each_run(extents, at, len, |bus, start, end| {
                let part = into.get_mut(start..end).unwrap_or_default();
                bar.read(bus, part)
            })
        })
    }

    /// Copies into device memory from byte `at` of the allocation on.
    pub(crate) fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        self.on_bus(|bar, extents| {
            each_run(extents, at, from.len() as u64, |bus, start, end| {
                bar.write(bus, from.get(start..end).unwrap_or_default())
            })
        })
    }

    /// Replaces an aligned 64-bit word atomically; answers what it was.
    pub(crate) fn update(&self, at: u64, change: &dyn Fn(u64) -> u64) -> Result<u64> {
        let mut old = 0;
        self.on_bus(|bar, extents| {
            each_run(extents, at, 8, |bus, _, _| {
                let word = bar.atomic_u64(bus)?;
                let was =
                    word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(change(old)));
                old = was.unwrap_or_else(|was| was);
                Ok(())
            })
        })?;
        Ok(old)
    }

    /// Runs `work` on the bus with a translation that stays valid meanwhile.
    fn on_bus(
        &self,
        mut work: impl FnMut(&HostMem, &[Extent]) -> Result<(), OutOfBounds>,
    ) -> Result<()> {
        let bar = self.allocation.device().bar()?;
        let done = match &self.kind {
            Kinds::Pinned { extents, .. } => work(bar, extents),
            Kinds::Dynamic(translation) => {
                let fault = || Ok::<_, std::convert::Infallible>(self.allocation.extents());
                let done = translation.access(fault, |extents| work(bar, extents));
                done.map_err(|refused| match refused {
                    Refused::Moving => {
                        Error::new(Kind::Timeout, "a move of device memory did not end in time")
                    }
                    Refused::Fault(never) => match never {},
                })?
            }
        };
        Ok(done?)
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if let Kinds::Pinned { pin, .. } = &self.kind {
            lock(self.allocation.importers()).pins.retain(|(known, _)| known != pin);
        }
    }
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_dynamic() { "dynamic" } else { "pinned" };
        write!(f, "Attachment({kind}, {:?})", self.allocation)
    }
}

impl Importers {
    fn check(&self, allocation: &Allocation) -> Result<()> {
        if self.pins.len() + self.dynamic.len() < IMPORTERS_MAX {
            return Ok(());
        }
        Err(Error::refused(format!("{allocation:?} has {IMPORTERS_MAX} importers already")))
    }
}

impl Allocation {
    /// Refuses a move of pinned memory; otherwise takes every translation away. The answer gives them
    /// back when dropped.
    pub(super) fn revoke_all(&self) -> Result<Revoked> {
        let dynamic: Vec<_> = {
            let importers = lock(self.importers());
            if !importers.pins.is_empty() {
                let holders: Vec<&str> =
                    importers.pins.iter().map(|(_, holder)| holder.as_str()).take(8).collect();
                let text = format!(
                    "{self:?} cannot move: {} pinned it ({})",
                    crate::memory::plural(importers.pins.len(), "importer"),
                    holders.join(", ")
                );
                return Err(Error::refused(text)
                    .coded("memory-pinned")
                    .remedy("end those registrations, or attach the memory dynamically"));
            }
            importers.dynamic.iter().filter_map(Weak::upgrade).collect()
        };
        let mut revoked = Revoked { translations: Vec::new() };
        for translation in dynamic {
            if !translation.revoke() {
                let text = "an access to device memory did not end, so it cannot move";
                return Err(Error::new(Kind::Timeout, text));
            }
            revoked.translations.push(translation);
        }
        Ok(revoked)
    }
}

/// Translations that were taken away for a move.
pub(super) struct Revoked {
    translations: Vec<Arc<Translation>>,
}

impl Drop for Revoked {
    fn drop(&mut self) {
        for translation in &self.translations {
            translation.resume();
        }
    }
}

impl Device {
    /// All of device memory as the bus shows it.
    fn bar(&self) -> Result<&HostMem> {
        if let Some(bar) = self.inner.bar.get() {
            return Ok(bar);
        }
        let len = usize::try_from(self.inner.capacity).unwrap_or(usize::MAX);
        let made = HostMem::shared(&self.inner.memory, 0, len)
            .map_err(|error| Error::io("map the window of a simulated device", error))?;
        Ok(self.inner.bar.get_or_init(|| made))
    }
}

/// Calls `work` with the bus offset of each contiguous run of `[at, at + len)`, and which bytes of the
/// range it holds.
fn each_run(
    extents: &[Extent],
    at: u64,
    len: u64,
    mut work: impl FnMut(u64, usize, usize) -> Result<(), OutOfBounds>,
) -> Result<(), OutOfBounds> {
    let mut done = 0;
    while done < len {
        let outside = OutOfBounds { offset: at, len, size: extents.iter().map(|e| e.len).sum() };
        let (bus, run) = super::memory::translate(extents, at + done).ok_or(outside)?;
        let step = run.min(len - done);
        work(bus, done as usize, (done + step) as usize)?;
        done += step;
    }
    Ok(())
}
