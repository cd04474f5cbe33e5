//! Host memory that is registered with the driver.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_core::addr::{DevicePtr, VirtAddr};

use super::device::Context;
use super::error::Error;
use super::memory::size;
use super::types::*;
use crate::mem::{FileMap, HostMem, OutOfBounds};

/// Host memory that devices read and write directly, until the last handle is gone.
pub struct HostRegistration {
    context: Arc<Context>,
    host: Host,
    /// The address that devices know the memory by.
    device_ptr: u64,
    len: u64,
}

enum Host {
    Memory(Arc<HostMem>),
    File(Arc<FileMap>),
}

impl HostRegistration {
    /// Registers `mem` with every context of the process (portable).
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` where the host cannot lock so much, `HOST_MEMORY_ALREADY_REGISTERED`.
    pub fn pin(context: &Arc<Context>, mem: Arc<HostMem>) -> Result<Self, Error> {
        let (addr, len) = (mem.addr(), mem.len());
        let flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP;
        let device_ptr = register(context, addr, len, flags)?;
        context.counters.pinned.fetch_add(len, Ordering::Relaxed);
        Ok(Self { context: Arc::clone(context), host: Host::Memory(mem), device_ptr, len })
    }

    /// Registers the mapped pages of a file for reading, with every context of the process.
    ///
    /// A device that cannot register read-only memory is asked to take it as it is; where the kernel
    /// refuses that for a read-only mapping, the driver's first answer is the error.
    ///
    /// # Errors
    /// `NOT_SUPPORTED`, `NOT_PERMITTED` or `INVALID_VALUE` where such pages cannot be registered.
    pub fn map(context: &Arc<Context>, map: Arc<FileMap>) -> Result<Self, Error> {
        let (addr, len) = (map.addr(), map.len());
        let flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP;
        let first = register(context, addr, len, flags | HOST_REGISTER_READ_ONLY);
        let unfit =
            |result| matches!(result, Some(CuResult::NOT_SUPPORTED | CuResult::INVALID_VALUE));
        let device_ptr = match first {
            Err(error) if unfit(error.result()) => {
                register(context, addr, len, flags).map_err(|_| error)?
            }
            other => other?,
        };
        context.counters.mapped.fetch_add(len, Ordering::Relaxed);
        Ok(Self { context: Arc::clone(context), host: Host::File(map), device_ptr, len })
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no byte. Always false: an empty mapping cannot be made.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether devices may write it too.
    pub const fn is_writable(&self) -> bool {
        matches!(self.host, Host::Memory(_))
    }

    /// The CPU's address of `[offset, offset + len)`, if the range lies inside.
    pub(super) fn at(&self, offset: u64, len: u64) -> Result<*mut c_void, OutOfBounds> {
        self.check(offset, len)?;
        let at = self.addr().as_u64() + offset;
        Ok(std::ptr::with_exposed_provenance_mut(at as usize))
    }

    /// The address that devices know the memory by.
    pub const fn device_ptr(&self) -> DevicePtr {
        DevicePtr::new(self.device_ptr)
    }

    /// The device's address of `[offset, offset + len)`, if the range lies inside.
    pub(super) fn device_at(&self, offset: u64, len: u64) -> Result<u64, OutOfBounds> {
        self.check(offset, len)?;
        Ok(self.device_ptr + offset)
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), OutOfBounds> {
        if offset > self.len || len > self.len - offset {
            return Err(OutOfBounds { offset, len, size: self.len });
        }
        Ok(())
    }

    fn addr(&self) -> VirtAddr {
        match &self.host {
            Host::Memory(mem) => mem.addr(),
            Host::File(map) => map.addr(),
        }
    }

    fn counter(&self) -> &AtomicU64 {
        match &self.host {
            Host::Memory(_) => &self.context.counters.pinned,
            Host::File(_) => &self.context.counters.mapped,
        }
    }
}

fn register(context: &Context, addr: VirtAddr, len: u64, flags: u32) -> Result<u64, Error> {
    let table = context.table();
    let (start, bytes) =
        (std::ptr::with_exposed_provenance_mut(addr.as_u64() as usize), size(len)?);
    let values = || format!("{len} bytes at {addr}, flags {flags:#x}");
    let _current = context.enter()?;
    // SAFETY: the range is a mapping that the caller's handle keeps until it is unregistered.
    let result = unsafe { (table.cuMemHostRegister)(start, bytes, flags) };
    context.check("cuMemHostRegister", result, values)?;
    let mut device_ptr = 0;
    // SAFETY: `device_ptr` is a place for one device pointer; the range was registered above.
    let result = unsafe { (table.cuMemHostGetDevicePointer)(&raw mut device_ptr, start, 0) };
    let answer = context.check("cuMemHostGetDevicePointer", result, values);
    if answer.is_err() {
        // SAFETY: registered above, and nobody knows of it yet.
        let _ = unsafe { (table.cuMemHostUnregister)(start) };
    }
    answer.map(|()| device_ptr)
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            let start = std::ptr::with_exposed_provenance_mut(self.addr().as_u64() as usize);
            // SAFETY: registered by this value; operations that use it hold a handle, so none is left.
            let _ = unsafe { (self.context.table().cuMemHostUnregister)(start) };
        }
        self.counter().fetch_sub(self.len, Ordering::Relaxed);
    }
}

impl fmt::Debug for HostRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostRegistration({} bytes at {})", self.len, self.addr())
    }
}
