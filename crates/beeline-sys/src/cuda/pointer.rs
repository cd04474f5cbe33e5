//! What a pointer is, asked of the driver.

use std::ffi::c_void;
use std::sync::Arc;

use beeline_core::addr::DevicePtr;

use super::device::{Context, Driver};
use super::error::Error;
use super::types::*;

/// What the driver knows about a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PointerInfo {
    /// Where it points; [`MemoryType::UNKNOWN`] where the driver does not know it.
    pub memory: MemoryType,
    /// Whether it is managed memory, which the driver moves between host and devices.
    pub managed: bool,
    /// Ordinal of the device it belongs to.
    pub device: i32,
    /// Start of its allocation.
    pub start: DevicePtr,
    /// Length of its allocation in bytes.
    pub len: u64,
    /// Whether it belongs to the context asked, or to none (pools and virtual memory belong to none).
    pub of_context: bool,
}

impl PointerInfo {
    /// Asks about `ptr`. A pointer that the driver does not know is no error here.
    ///
    /// # Errors
    /// What the driver says.
    pub fn of(context: &Context, ptr: DevicePtr) -> Result<Self, Error> {
        let _current = context.enter()?;
        let (mut info, owner) = ask(context.device().driver(), ptr)?;
        info.of_context = context.is(owner);
        Ok(info)
    }

    /// Asks about `ptr` with whatever context is current, or without one where the driver allows that;
    /// else with the context of a device that the process uses already. No context is made. `of_context`
    /// is false; the owner is the second answer. `None` where the process uses no device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn find(driver: &Arc<Driver>, ptr: DevicePtr) -> Result<Option<(Self, Owner)>, Error> {
        let homeless = |e: &Error| {
            matches!(e.result(), Some(CuResult::INVALID_CONTEXT | CuResult::NOT_INITIALIZED))
        };
        match ask(driver, ptr) {
            Err(error) if homeless(&error) => {}
            found => return found.map(Some),
        }
        for ordinal in 0..driver.device_count()? {
            let device = driver.device(ordinal)?;
            if device.has_primary() {
                let context = device.retain_primary()?;
                let _current = context.enter()?;
                return ask(driver, ptr).map(Some);
            }
        }
        Ok(None)
    }
}

/// The context that memory belongs to, as a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub(super) RawContext);

impl Owner {
    /// Whether it is no context: memory of pools and virtual memory belong to none.
    pub fn is_none(self) -> bool {
        self.0 == RawContext::NULL
    }
}

/// Asks with the context that is current.
fn ask(driver: &Driver, ptr: DevicePtr) -> Result<(PointerInfo, Owner), Error> {
    const ASKED: [PointerAttribute; 6] = [
        PointerAttribute::CONTEXT,
        PointerAttribute::MEMORY_TYPE,
        PointerAttribute::IS_MANAGED,
        PointerAttribute::DEVICE_ORDINAL,
        PointerAttribute::RANGE_START_ADDR,
        PointerAttribute::RANGE_SIZE,
    ];
    let (mut owner, mut memory, mut managed) = (RawContext::NULL, MemoryType::UNKNOWN, 0_u32);
    let (mut device, mut start, mut len) = (-1_i32, 0_u64, 0_usize);
    let places: [*mut c_void; 6] = [
        (&raw mut owner).cast(),
        (&raw mut memory).cast(),
        (&raw mut managed).cast(),
        (&raw mut device).cast(),
        (&raw mut start).cast(),
        (&raw mut len).cast(),
    ];
    let get = driver.table().cuPointerGetAttributes;
    // SAFETY: six attributes and six places, each of the type (or larger than the type) that
    // cuda.h gives its attribute; the pointer asked about is a number that is not followed.
    let result = unsafe { get(6, ASKED.as_ptr(), places.as_ptr(), ptr.as_u64()) };
    driver.check("cuPointerGetAttributes", result, || ptr.to_string())?;
    let info = PointerInfo {
        memory,
        managed: managed != 0,
        device,
        start: DevicePtr::new(start),
        len: len as u64,
        of_context: false,
    };
    Ok((info, Owner(owner)))
}
