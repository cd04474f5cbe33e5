//! Device memory.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_core::addr::{DevicePtr, align_up};

use super::core::Core;
use super::device::Context;
use super::error::Error;
use super::types::*;
use crate::mem::OutOfBounds;

/// Device memory. Freed with the last handle; a stream that still uses it holds one.
pub struct DeviceMem {
    ptr: u64,
    len: u64,
    backing: Backing,
    context: Arc<Context>,
}

enum Backing {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemCreate`, mapped at an address of its own.
    Virtual(Mapping),
    /// `cuMemAllocAsync`, from the device's default pool; freed in the same stream.
    Pool(Arc<Core>),
    /// `cuMemAllocManaged`.
    Managed,
    /// `cuMemCreate` of another process, mapped here to be read.
    Imported(#[expect(dead_code, reason = "held for its drop")] Mapping),
    /// Somebody else's, who keeps it alive at least as long as the owner lives.
    Foreign(#[expect(dead_code, reason = "held for its drop")] Arc<dyn Any + Send + Sync>),
}

impl DeviceMem {
    /// `len` bytes by `cuMemAlloc`, aligned to at least 256 bytes.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` where the device has no room.
    pub fn alloc(context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        let bytes = size(len)?;
        let _current = context.enter()?;
        let mut ptr = 0;
        // SAFETY: `ptr` is a place for one device pointer; a context is current.
        let result = unsafe { (context.table().cuMemAlloc)(&raw mut ptr, bytes) };
        context.check("cuMemAlloc", result, || format!("{len} bytes"))?;
        Ok(Self::new(context, ptr, len, Backing::Plain))
    }

    /// `len` bytes by `cuMemCreate`, which other devices may map: asked to be fit for GPUDirect RDMA
    /// and exportable, where the device can. Rounded up to the device's granularity inside.
    ///
    /// # Errors
    /// `Unsupported` where the driver or the device has no virtual memory management;
    /// `OUT_OF_MEMORY` where the device has no room.
    pub fn alloc_virtual(context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        size(len)?;
        let mapping = Mapping::new(context, len)?;
        Ok(Self::new(context, mapping.ptr, len, Backing::Virtual(mapping)))
    }

    /// Whether it has a handle of its own, as [`Self::alloc_virtual`] makes.
    pub const fn is_virtual(&self) -> bool {
        matches!(self.backing, Backing::Virtual(_))
    }

    /// Lets the device of `peer` read and write the whole of this virtual memory.
    ///
    /// # Errors
    /// `Unsupported` for memory of another kind; what the driver says where the devices cannot reach each other.
    pub fn open_to(&self, peer: &Context) -> Result<(), Error> {
        let (Backing::Virtual(mapping), Some(set_access)) =
            (&self.backing, self.context.table().cuMemSetAccess)
        else {
            return Err(Error::Unsupported { what: "memory that is opened to another device" });
        };
        let location = MemLocation::device(peer.device().raw());
        let access = AccessDesc { location, flags: MEM_ACCESS_READ_WRITE };
        let _current = self.context.enter()?;
        // SAFETY: the range is the whole of what this value mapped; one description stands at `access`.
        let result = unsafe { set_access(mapping.ptr, mapping.bytes, &raw const access, 1) };
        self.context.check("cuMemSetAccess", result, || format!("{} bytes", mapping.bytes))
    }

    /// `len` bytes from the device's default pool, there once `core` has run what is queued before.
    pub(super) fn alloc_pooled(core: &Arc<Core>, len: u64) -> Result<Self, Error> {
        let context = core.context();
        let bytes = size(len)?;
        let (Some(alloc), Some(_)) =
            (context.table().cuMemAllocAsync, context.table().cuMemFreeAsync)
        else {
            return Err(Error::Unsupported { what: "memory pools" });
        };
        if context.device().attribute(DeviceAttribute::MEMORY_POOLS_SUPPORTED) == 0 {
            return Err(Error::Unsupported { what: "memory pools" });
        }
        let _current = context.enter()?;
        let mut ptr = 0;
        // SAFETY: `ptr` is a place for one device pointer; the stream is alive and of this context.
        let result = unsafe { alloc(&raw mut ptr, bytes, core.raw()) };
        context.check("cuMemAllocAsync", result, || format!("{len} bytes"))?;
        Ok(Self::new(context, ptr, len, Backing::Pool(Arc::clone(core))))
    }

    /// Memory that `owner` keeps alive: allocated by somebody else on the device of `context`.
    ///
    /// The function is safe because the driver checks device addresses: if the promise is broken, a
    /// copy fails or hits other memory of the device, never memory of this program's. Ask
    /// [`PointerInfo::of`](super::PointerInfo::of) first what the pointer is.
    pub fn foreign(
        context: &Arc<Context>,
        ptr: DevicePtr,
        len: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, Error> {
        let end = ptr.checked_add(len);
        end.ok_or(Error::Refused("the memory would end outside the address space"))?;
        size(len)?;
        let (ptr, backing) = (ptr.as_u64(), Backing::Foreign(owner));
        Ok(Self { ptr, len, backing, context: Arc::clone(context) })
    }

    /// The bytes of `mapping`, which another process allocated.
    pub(super) fn imported(context: &Arc<Context>, mapping: Mapping, len: u64) -> Self {
        let (ptr, context) = (mapping.ptr, Arc::clone(context));
        Self { ptr, len, backing: Backing::Imported(mapping), context }
    }

    /// Managed memory, allocated by the caller at `ptr`.
    pub(super) fn managed(context: &Arc<Context>, ptr: u64, len: u64) -> Self {
        Self::new(context, ptr, len, Backing::Managed)
    }

    /// The allocation handle of virtual memory; `None` for every other kind.
    pub(super) const fn handle(&self) -> Option<u64> {
        match &self.backing {
            Backing::Virtual(mapping) => mapping.handle,
            _ => None,
        }
    }

    /// Bytes that the allocation takes: whole granules for virtual memory.
    pub const fn whole_len(&self) -> u64 {
        match &self.backing {
            Backing::Virtual(mapping) => mapping.bytes as u64,
            _ => self.len,
        }
    }

    /// How the memory was allocated, in a word of the driver API.
    pub const fn origin(&self) -> &'static str {
        match &self.backing {
            Backing::Plain => "cuMemAlloc",
            Backing::Virtual(_) => "cuMemCreate",
            Backing::Pool(_) => "cuMemAllocAsync",
            Backing::Managed => "cuMemAllocManaged",
            Backing::Imported(_) => "another process",
            Backing::Foreign(_) => "foreign",
        }
    }

    fn new(context: &Arc<Context>, ptr: u64, len: u64, backing: Backing) -> Self {
        context.counters.device.fetch_add(len, Ordering::Relaxed);
        Self { ptr, len, backing, context: Arc::clone(context) }
    }

    /// Where it starts.
    pub const fn ptr(&self) -> DevicePtr {
        DevicePtr::new(self.ptr)
    }

    /// Length in bytes, as asked for.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no byte. Always false for allocations.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The context it belongs to.
    pub const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A dma-buf of the bytes `[offset, offset + len)`, for a driver that maps device memory; both are
    /// multiples of the page size. The memory must outlive every mapping of the dma-buf.
    ///
    /// # Errors
    /// `Unsupported` before CUDA 11.7 or on a device without; `Bounds`; what the driver says.
    pub fn dma_buf(&self, offset: u64, len: u64) -> Result<OwnedFd, Error> {
        const WHAT: &str = "dma-buf export";
        let ptr = self.at(offset, len)?;
        let device = self.context.device();
        let export = self.context.table().cuMemGetHandleForAddressRange;
        let Some(export) = export else { return Err(Error::Unsupported { what: WHAT }) };
        if device.attribute(DeviceAttribute::DMA_BUF_SUPPORTED) == 0 {
            return Err(Error::Unsupported { what: WHAT });
        }
        let _current = self.context.enter()?;
        let mut fd = -1_i32;
        let place = (&raw mut fd).cast::<c_void>();
        // SAFETY: for a dma-buf the handle is one int, and `place` points at one; the range lies
        // inside this memory.
        let result = unsafe { export(place, ptr, size(len)?, MEM_RANGE_HANDLE_DMA_BUF_FD, 0) };
        let values = || format!("{len} bytes at {ptr:#x}");
        self.context.check("cuMemGetHandleForAddressRange", result, values)?;
        if fd < 0 {
            return Err(Error::Refused("the driver answered no descriptor for the dma-buf"));
        }
        // SAFETY: the driver made the descriptor for the caller, who owns it from here on.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The address of `[offset, offset + len)`, if the range lies inside.
    pub(super) fn at(&self, offset: u64, len: u64) -> Result<u64, OutOfBounds> {
        if offset > self.len || len > self.len - offset {
            return Err(OutOfBounds { offset, len, size: self.len });
        }
        Ok(self.ptr + offset)
    }
}

impl Drop for DeviceMem {
    fn drop(&mut self) {
        let table = self.context.table();
        match &self.backing {
            Backing::Foreign(_) | Backing::Imported(_) => return,
            Backing::Virtual(_) => {}
            Backing::Plain | Backing::Managed => {
                if let Ok(_current) = self.context.enter() {
                    // SAFETY: allocated by cuMemAlloc or cuMemAllocManaged in this context, and no
                    // handle is left.
                    let _ = unsafe { (table.cuMemFree)(self.ptr) };
                }
            }
            Backing::Pool(core) => {
                if let (Some(free), Ok(_current)) = (table.cuMemFreeAsync, self.context.enter()) {
                    // SAFETY: allocated by cuMemAllocAsync in this stream, which lives as long as
                    // `core`; whatever used the memory has finished, because it held a handle.
                    let _ = unsafe { free(self.ptr, core.raw()) };
                }
            }
        }
        self.context.counters.device.fetch_sub(self.len, Ordering::Relaxed);
    }
}

impl fmt::Debug for DeviceMem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMem({} bytes at {:#x})", self.len, self.ptr)
    }
}

/// Device memory by virtual memory management: a handle, mapped at a reserved address.
pub(super) struct Mapping {
    context: Arc<Context>,
    handle: Option<u64>,
    ptr: u64,
    bytes: usize,
    mapped: bool,
}

impl Mapping {
    fn new(context: &Arc<Context>, len: u64) -> Result<Self, Error> {
        const WHAT: &str = "virtual memory management";
        let table = context.table();
        let (Some(granularity), Some(create)) =
            (table.cuMemGetAllocationGranularity, table.cuMemCreate)
        else {
            return Err(Error::Unsupported { what: WHAT });
        };
        let device = context.device();
        if device.attribute(DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0 {
            return Err(Error::Unsupported { what: WHAT });
        }
        let prop = shareable(context);
        let _current = context.enter()?;
        let mut unit = 0;
        // SAFETY: `unit` is a place for one size, `prop` a description as cuda.h lays it out.
        let result =
            unsafe { granularity(&raw mut unit, &raw const prop, MEM_GRANULARITY_MINIMUM) };
        context.check("cuMemGetAllocationGranularity", result, String::new)?;
        let unit = if unit.is_power_of_two() { unit as u64 } else { 2 << 20 };
        let bytes = size(align_up(len, unit).ok_or(Error::Refused("the size overflows"))?)?;

        let mut handle = 0;
        // SAFETY: `handle` is a place for one allocation handle, `prop` is as above.
        let result = unsafe { create(&raw mut handle, bytes, &raw const prop, 0) };
        context.check("cuMemCreate", result, || format!("{bytes} bytes"))?;
        Self::attach(context, handle, bytes, MEM_ACCESS_READ_WRITE)
    }

    /// Maps all `bytes` of `handle`, which it owns from here on, at an address of its own. Where the
    /// device has no read-only mappings, [`MEM_ACCESS_READ`] makes one to be read and written.
    pub(super) fn attach(
        context: &Arc<Context>,
        handle: u64,
        bytes: usize,
        flags: i32,
    ) -> Result<Self, Error> {
        // Undone by its drop, as far as it has got.
        let mut new = Self {
            context: Arc::clone(context),
            handle: Some(handle),
            ptr: 0,
            bytes,
            mapped: false,
        };
        let table = context.table();
        let (Some(reserve), Some(map), Some(set_access)) =
            (table.cuMemAddressReserve, table.cuMemMap, table.cuMemSetAccess)
        else {
            return Err(Error::Unsupported { what: "virtual memory management" });
        };
        let values = || format!("{bytes} bytes");
        let _current = context.enter()?;
        // SAFETY: `new.ptr` is a place for one device pointer; no address is asked for.
        let result = unsafe { reserve(&raw mut new.ptr, bytes, 0, 0, 0) };
        context.check("cuMemAddressReserve", result, values)?;
        // SAFETY: the range was reserved above and is not mapped; the handle has exactly its size.
        let result = unsafe { map(new.ptr, bytes, 0, handle, 0) };
        context.check("cuMemMap", result, values)?;
        new.mapped = true;
        let location = MemLocation::device(context.device().raw());
        let access = AccessDesc { location, flags };
        // SAFETY: the range was mapped above; one description stands at `access`.
        let mut result = unsafe { set_access(new.ptr, bytes, &raw const access, 1) };
        if result != CuResult::SUCCESS && flags == MEM_ACCESS_READ {
            let access = AccessDesc { location, flags: MEM_ACCESS_READ_WRITE };
            // SAFETY: as above.
            result = unsafe { set_access(new.ptr, bytes, &raw const access, 1) };
        }
        context.check("cuMemSetAccess", result, values)?;
        Ok(new)
    }
}

fn shareable(context: &Context) -> AllocationProp {
    let device = context.device();
    let rdma = device.attribute(DeviceAttribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
    AllocationProp {
        kind: MEM_ALLOCATION_TYPE_PINNED,
        handle_types: MEM_HANDLE_TYPE_POSIX_FD,
        location: MemLocation::device(device.raw()),
        win32_metadata: std::ptr::null_mut(),
        compression: 0,
        gpu_direct_rdma_capable: u8::from(rdma),
        usage: 0,
        reserved: [0; 4],
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let table = self.context.table();
        let Ok(_current) = self.context.enter() else { return };
        if let (true, Some(unmap)) = (self.mapped, table.cuMemUnmap) {
            // SAFETY: this value mapped exactly this range, and no handle of the memory is left.
            let _ = unsafe { unmap(self.ptr, self.bytes) };
        }
        if let (true, Some(free)) = (self.ptr != 0, table.cuMemAddressFree) {
            // SAFETY: this value reserved exactly this range, and it is no longer mapped.
            let _ = unsafe { free(self.ptr, self.bytes) };
        }
        if let (Some(handle), Some(release)) = (self.handle, table.cuMemRelease) {
            // SAFETY: the handle was made by this value and is released once.
            let _ = unsafe { release(handle) };
        }
    }
}

/// A length as the driver takes it.
pub(super) fn size(len: u64) -> Result<usize, Error> {
    usize::try_from(len).map_err(|_| Error::Refused("the length does not fit this address space"))
}
