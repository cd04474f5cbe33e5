//! Device memory and other processes, other drivers and the lives of allocations: exporting and
//! importing handles, retaining them, telling one allocation from the next.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use beeline_core::addr::DevicePtr;

use super::device::Context;
use super::error::Error;
use super::memory::{DeviceMem, Mapping, size};
use super::types::*;

/// The name of an allocation that no other allocation of the process ever gets
/// (`CU_POINTER_ATTRIBUTE_BUFFER_ID`): addresses are used again, this is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u64);

impl BufferId {
    /// Of the allocation that holds `ptr`; `None` where there is none now, and where the driver names
    /// no such number.
    ///
    /// # Errors
    /// Where the context cannot be used at all.
    pub fn of(context: &Context, ptr: DevicePtr) -> Result<Option<Self>, Error> {
        let asked = [PointerAttribute::BUFFER_ID];
        let mut id = 0_u64;
        let places: [*mut c_void; 1] = [(&raw mut id).cast()];
        let get = context.table().cuPointerGetAttributes;
        let _current = context.enter()?;
        // SAFETY: one attribute and one place of its type, a 64-bit number; the pointer asked about is
        // a number that is not followed.
        let result = unsafe { get(1, asked.as_ptr(), places.as_ptr(), ptr.as_u64()) };
        Ok((result == CuResult::SUCCESS && id != 0).then_some(Self(id)))
    }
}

impl DeviceMem {
    /// Memory by the handle that another process passed as `fd`, `len` bytes as that one has mapped them,
    /// to be read and written.
    ///
    /// # Errors
    /// As [`Self::alloc_virtual`]; what the driver says of a descriptor that is none of its.
    pub fn import(context: &Arc<Context>, fd: impl AsFd, len: u64) -> Result<Self, Error> {
        let mapping = Mapping::import(context, fd, len, MEM_ACCESS_READ_WRITE)?;
        Ok(Self::imported(context, mapping, len))
    }

    /// A descriptor by which another process imports the whole allocation ([`Self::import`],
    /// [`Imported`]). Only for `cuMemCreate` memory.
    ///
    /// # Errors
    /// `Unsupported` for every other kind of memory; what the driver says.
    pub fn export(&self) -> Result<OwnedFd, Error> {
        const WHAT: &str = "export of this memory to another process";
        let context = self.context();
        let (Some(handle), Some(export)) =
            (self.handle(), context.table().cuMemExportToShareableHandle)
        else {
            return Err(Error::Unsupported { what: WHAT });
        };
        let _current = context.enter()?;
        let mut fd = -1_i32;
        let place = (&raw mut fd).cast::<c_void>();
        // SAFETY: for this kind of handle the answer is one int, and `place` points at one; the handle
        // is alive as long as this memory.
        let result = unsafe { export(place, handle, MEM_HANDLE_TYPE_POSIX_FD, 0) };
        context.check("cuMemExportToShareableHandle", result, String::new)?;
        if fd < 0 {
            return Err(Error::Refused("the driver answered no descriptor for the memory"));
        }
        // SAFETY: the driver made the descriptor for the caller, who owns it from here on.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// Memory of another process, mapped for a device of this one to read.
#[derive(Debug)]
pub struct Imported;

impl Imported {
    /// Maps the `len` bytes of an allocation that another process [exported](DeviceMem::export) for
    /// the device of `context`. The allocation lives on until the answer is dropped, whatever its
    /// process does, so that its bytes are never another allocation's.
    ///
    /// # Errors
    /// `Unsupported` without virtual memory management; what the driver says, where the two devices
    /// cannot reach each other.
    pub fn map(context: &Arc<Context>, fd: impl AsFd, len: u64) -> Result<DeviceMem, Error> {
        let mapping = Mapping::import(context, fd, len, MEM_ACCESS_READ)?;
        Ok(DeviceMem::imported(context, mapping, len))
    }
}

impl Mapping {
    /// Maps what another process exported as `fd`; `flags` as [`Self::attach`] takes them.
    fn import(context: &Arc<Context>, fd: impl AsFd, len: u64, flags: i32) -> Result<Self, Error> {
        let Some(import) = context.table().cuMemImportFromShareableHandle else {
            return Err(Error::Unsupported { what: "import of device memory" });
        };
        let bytes = size(len)?;
        let mut handle = 0;
        {
            let _current = context.enter()?;
            let number = fd.as_fd().as_raw_fd() as usize;
            let place = std::ptr::without_provenance_mut(number);
            // SAFETY: `handle` is a place for one allocation handle; for this kind of handle the
            // descriptor itself is passed as the pointer, and it is open during the call.
            let result = unsafe { import(&raw mut handle, place, MEM_HANDLE_TYPE_POSIX_FD) };
            context.check("cuMemImportFromShareableHandle", result, || format!("{len} bytes"))?;
        }
        Self::attach(context, handle, bytes, flags)
    }
}

/// A hold on the allocation behind an address: it is not freed before this value is dropped.
#[derive(Debug)]
pub struct Retained {
    context: Arc<Context>,
    handle: u64,
}

impl Retained {
    /// Holds the virtual memory (`cuMemCreate`) mapped at `ptr`, whoever allocated it.
    ///
    /// # Errors
    /// `Unsupported` before CUDA 11.0; `INVALID_VALUE` where no such memory is mapped there.
    pub fn at(context: &Arc<Context>, ptr: DevicePtr) -> Result<Self, Error> {
        let Some(retain) = context.table().cuMemRetainAllocationHandle else {
            return Err(Error::Unsupported { what: "retained allocation handles" });
        };
        let mut handle = 0;
        let _current = context.enter()?;
        let at = std::ptr::without_provenance_mut(ptr.as_u64() as usize);
        // SAFETY: `handle` is a place for one allocation handle; the address is a number that the
        // driver looks up and does not follow.
        let result = unsafe { retain(&raw mut handle, at) };
        context.check("cuMemRetainAllocationHandle", result, || ptr.to_string())?;
        Ok(Self { context: Arc::clone(context), handle })
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        if let Some(release) = self.context.table().cuMemRelease {
            // SAFETY: retained by this value and released once.
            let _ = unsafe { release(self.handle) };
        }
    }
}

/// `len` bytes of managed memory, which the driver moves between host and devices.
///
/// # Errors
/// `Unsupported` where the driver has none; what it says.
pub fn managed(context: &Arc<Context>, len: u64) -> Result<DeviceMem, Error> {
    let Some(alloc) = context.table().cuMemAllocManaged else {
        return Err(Error::Unsupported { what: "managed memory" });
    };
    let bytes = size(len)?;
    let mut ptr = 0;
    {
        let _current = context.enter()?;
        // SAFETY: `ptr` is a place for one device pointer; a context is current.
        let result = unsafe { alloc(&raw mut ptr, bytes, MEM_ATTACH_GLOBAL) };
        context.check("cuMemAllocManaged", result, || format!("{len} bytes"))?;
    }
    Ok(DeviceMem::managed(context, ptr, len))
}

impl Context {
    /// Makes what other devices wrote into memory of this one visible to its running kernels.
    ///
    /// # Errors
    /// `Unsupported` where the driver has no such call or the device does not support it.
    pub fn flush_remote_writes(&self) -> Result<(), Error> {
        let Some(flush) = self.table().cuFlushGPUDirectRDMAWrites else {
            return Err(Error::Unsupported { what: "a flush of remote writes" });
        };
        let _current = self.enter()?;
        // SAFETY: two numbers as cuda.h defines them; a context is current.
        let result = unsafe { flush(FLUSH_TARGET_CURRENT_CONTEXT, FLUSH_SCOPE_ALL_DEVICES) };
        self.check("cuFlushGPUDirectRDMAWrites", result, String::new)
    }
}
