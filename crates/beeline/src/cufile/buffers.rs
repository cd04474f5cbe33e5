//! Registered buffers, and what a pointer means.

use std::collections::BTreeMap;
use std::sync::Arc;

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::{DeviceAttribute, Driver, Home, MemoryType, Owner, PointerInfo};
use beeline_sys::user::UserPtr;

use super::lanes::{AllLanes, Lanes};
use super::sharded::Local;
use super::status::{Failure, OpError, Outcome};
use crate::config::CufileConfig;

/// Most overlapping registrations that are looked through for the one that holds a pointer.
const OVERLAPS_MAX: usize = 64;

/// What an address is.
#[derive(Clone)]
pub(super) enum Place {
    /// Memory of a device, reached by lanes of its context.
    Device(Local<Lanes>),
    /// Memory of the host, by whatever allocator.
    Host,
}

/// A registered range.
pub(super) struct Registered {
    len: u64,
    place: Place,
}

/// The registered ranges by base address.
#[derive(Default)]
pub(super) struct Buffers {
    known: BTreeMap<u64, Registered>,
}

/// Where the bytes of one request go or come from, with its bounds checked.
pub(super) struct Target {
    pub(super) ptr: UserPtr,
    /// From the pointer to the first byte.
    pub(super) offset: u64,
    pub(super) place: Place,
}

impl Place {
    /// The same place, counted apart.
    pub(super) fn apart(&self) -> Self {
        match self {
            Self::Device(lanes) => Self::Device(Arc::new(Arc::clone(lanes))),
            Self::Host => Self::Host,
        }
    }
}

impl Target {
    pub(super) const fn device_ptr(&self) -> DevicePtr {
        DevicePtr::new(self.ptr.address().wrapping_add(self.offset))
    }
}

impl Buffers {
    /// # Errors
    /// `MEMORY_ALREADY_REGISTERED` for a base that is registered.
    pub(super) fn check_free(&self, base: u64) -> Outcome<()> {
        let Some(known) = self.known.get(&base) else { return Ok(()) };
        let text = format!("{base:#x} is registered already, with {} bytes", known.len);
        Err(Failure::new(OpError::MEMORY_ALREADY_REGISTERED, text))
    }

    pub(super) fn insert(&mut self, base: u64, len: u64, place: &Place) {
        self.known.insert(base, Registered { len, place: place.apart() });
    }

    /// # Errors
    /// `MEMORY_NOT_REGISTERED`.
    pub(super) fn check_known(&self, base: u64) -> Outcome<()> {
        if self.known.contains_key(&base) {
            return Ok(());
        }
        let text = format!("{base:#x} is the start of no registered buffer");
        Err(Failure::new(OpError::MEMORY_NOT_REGISTERED, text))
    }

    pub(super) fn remove(&mut self, base: u64) {
        self.known.remove(&base);
    }

    pub(super) fn clear(&mut self) {
        self.known.clear();
    }

    /// The registered place that holds `[address + offset, + len)`; `None` where `address` lies in no
    /// registered buffer.
    ///
    /// # Errors
    /// `INVALID_MAPPING_RANGE` where it does, but the range does not.
    pub(super) fn find(&self, address: u64, offset: u64, len: u64) -> Outcome<Option<Place>> {
        let mut longest: Option<(u64, u64)> = None;
        for (&base, known) in self.known.range(..=address).rev().take(OVERLAPS_MAX) {
            let inside = address - base;
            if inside >= known.len {
                continue;
            }
            let room = known.len - inside;
            if offset <= room && len <= room - offset {
                return Ok(Some(known.place.clone()));
            }
            if longest.is_none_or(|(_, most)| room > most) {
                longest = Some((base, room));
            }
        }
        let Some((base, room)) = longest else { return Ok(None) };
        let text = format!(
            "{len} bytes from {offset} on behind {address:#x}: the buffer registered at {base:#x} has \
             {room} bytes from there"
        );
        Err(Failure::new(OpError::INVALID_MAPPING_RANGE, text))
    }
}

/// What the driver says of an address.
pub(super) struct Looked {
    pub(super) info: Option<(PointerInfo, Owner)>,
}

impl Looked {
    /// # Errors
    /// What the driver says.
    pub(super) fn at(driver: Option<&Arc<Driver>>, address: u64) -> Outcome<Self> {
        let Some(driver) = driver else { return Ok(Self { info: None }) };
        let info = PointerInfo::find(driver, DevicePtr::new(address))
            .map_err(|error| Failure::cuda(format!("look up {address:#x}"), &error))?;
        let known =
            |(info, _): &(PointerInfo, Owner)| info.memory == MemoryType::DEVICE || info.managed;
        Ok(Self { info: info.filter(known) })
    }

    /// The place, for a range of `len` bytes from `offset` behind the address.
    ///
    /// # Errors
    /// As [`Self::check`]; what the driver says.
    pub(super) fn place(
        &self,
        (address, offset, len): (u64, u64, u64),
        all: &AllLanes,
        settings: &CufileConfig,
    ) -> Outcome<Place> {
        self.check((address, offset, len))?;
        let Some((info, owner)) = &self.info else { return Ok(Place::Host) };
        Ok(Place::Device(Arc::new(all.of(info.device, *owner, settings)?)))
    }

    /// Whether `len` bytes from `offset` behind the address lie in its allocation, as far as the driver knows it.
    ///
    /// # Errors
    /// `CUDA_POINTER_RANGE_ERROR` where they do not.
    pub(super) fn check(&self, (address, offset, len): (u64, u64, u64)) -> Outcome<()> {
        let Some((info, _)) = &self.info else { return Ok(()) };
        let inside = address.wrapping_sub(info.start.as_u64());
        let room = info.len.saturating_sub(inside);
        if offset > room || len > room - offset {
            let text = format!(
                "{len} bytes from {offset} on behind {address:#x}: the allocation has {room} bytes \
                 from there"
            );
            return Err(Failure::new(OpError::CUDA_POINTER_RANGE_ERROR, text));
        }
        Ok(())
    }

    /// Whether a kernel that runs at `home` reaches the memory: it is of the same context, or of none (pools and
    /// virtual memory) and on the same device.
    pub(super) fn is_reached_from(&self, home: Home) -> bool {
        self.info.as_ref().is_some_and(|(info, owner)| {
            info.device == home.device && (*owner == home.context || owner.is_none())
        })
    }

    /// Whether the CPU may use the memory while its device works, if it is managed memory; else it does not matter.
    pub(super) fn is_host_safe(&self, driver: &Arc<Driver>) -> bool {
        let Some((info, _)) = self.info.as_ref().filter(|_| self.is_managed()) else { return true };
        let device = driver.device(info.device);
        device.is_ok_and(|it| it.attribute(DeviceAttribute::CONCURRENT_MANAGED_ACCESS) != 0)
    }

    pub(super) fn is_managed(&self) -> bool {
        self.info.as_ref().is_some_and(|(info, _)| info.managed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_in_overlapping_registrations_and_refused_outside() {
        let mut buffers = Buffers::default();
        buffers.insert(1000, 100, &Place::Host);
        buffers.insert(1050, 10, &Place::Host);
        assert_eq!(buffers.check_free(1000).unwrap_err().code.0, 5023);
        let cases: [(u64, u64, u64, Result<bool, i32>); 8] = [
            (1000, 0, 100, Ok(true)),
            (1000, 0, 101, Err(5017)),
            (1055, 0, 45, Ok(true)),
            (1055, 10, 36, Err(5017)),
            (999, 0, 1, Ok(false)),
            (1100, 0, 1, Ok(false)),
            (1000, u64::MAX, 1, Err(5017)),
            (1000, 1, u64::MAX, Err(5017)),
        ];
        for (address, offset, len, expected) in cases {
            let found = buffers.find(address, offset, len);
            let found = found.map(|place| place.is_some()).map_err(|f| f.code.0);
            assert_eq!(found, expected, "{address} {offset} {len}");
        }
        assert_eq!(buffers.check_known(1001).unwrap_err().code.0, 5024);
        buffers.check_known(1000).unwrap();
        buffers.remove(1000);
        assert_eq!(buffers.check_known(1000).unwrap_err().code.0, 5024);
    }
}
