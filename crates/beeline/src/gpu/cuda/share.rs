//! CUDA memory and other processes, other drivers, and the lives of allocations.

use std::os::fd::{AsFd, OwnedFd};

use beeline_sys::cuda::{
    BufferId, DeviceAttribute, Error as CudaError, Imported, Retained, managed,
};

use super::{Device, Memory};
use crate::error::{Error, Result};

impl Memory {
    /// How it was allocated, in a word of the driver API.
    pub(crate) fn origin(&self) -> &'static str {
        self.mem.origin()
    }

    /// Bytes that the allocation takes, which is what [`Self::export`] exports.
    pub(crate) fn whole_len(&self) -> u64 {
        self.mem.whole_len()
    }

    /// The number of the allocation at byte `at`, `None` where there is none now.
    pub(crate) fn buffer_id(&self, at: u64) -> Result<Option<u64>> {
        let Some(ptr) = self.mem.ptr().checked_add(at) else { return Ok(None) };
        let id = BufferId::of(self.mem.context(), ptr);
        let id = id.map_err(|error| self.device.failed(format_args!("look up {ptr}"), error))?;
        Ok(id.map(|BufferId(id)| id))
    }

    /// A hold on the virtual memory behind it, so that nobody frees it.
    pub(crate) fn retain(&self, at: u64) -> Result<Retained> {
        let ptr = self.mem.ptr().checked_add(at).unwrap_or(self.mem.ptr());
        let held = Retained::at(self.mem.context(), ptr);
        held.map_err(|error| self.device.failed(format_args!("hold the memory at {ptr}"), error))
    }

    /// A descriptor by which another process of this host imports the whole allocation.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let fd = self.mem.export();
        fd.map_err(|error| self.device.failed("export memory to another process", error))
    }

    /// A dma-buf of `[at, at + len)`, both multiples of the page size.
    pub(crate) fn dma_buf(&self, at: u64, len: u64) -> Result<OwnedFd> {
        let fd = self.mem.dma_buf(at, len);
        fd.map_err(|error| {
            let what = format!("export {len} bytes of {} memory as a dma-buf", self.mem.origin());
            let error = self.device.failed(what, error);
            match self.mem.origin() {
                "cuMemAllocAsync" => error.coded("dmabuf-pool-memory").remedy(
                    "the driver exports no memory of its stream-ordered pool: use Gpu::alloc or \
                     Gpu::alloc_shareable",
                ),
                _ => error.coded("dmabuf-export"),
            }
        })
    }
}

impl Device {
    /// Maps memory that another process exported, to be read by this device.
    pub(crate) fn import(&self, fd: impl AsFd, whole: u64) -> Result<Memory> {
        let context = self.context()?;
        let mem = Imported::map(&context, fd, whole);
        mem.map(|mem| Memory::new(self, mem))
            .map_err(|error| self.failed(format_args!("map {whole} bytes of a peer"), error))
    }

    /// Managed memory.
    pub(crate) fn managed(&self, len: u64) -> Result<Memory> {
        let context = self.context()?;
        let mem = managed(&context, len);
        mem.map(|mem| Memory::new(self, mem)).map_err(|error| self.not_allocated(len, error))
    }

    /// Whether the device can be named by a NIC at all, as its driver says.
    pub(crate) fn rdma_capable(&self) -> bool {
        self.attribute(DeviceAttribute::GPU_DIRECT_RDMA_SUPPORTED) != 0
    }

    /// Whether memory of `cuMemCreate` can be, as the driver says.
    pub(crate) fn rdma_capable_vmm(&self) -> bool {
        self.attribute(DeviceAttribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0
    }

    /// Whether the driver exports dma-bufs, as it says.
    pub(crate) fn dma_buf_capable(&self) -> bool {
        self.attribute(DeviceAttribute::DMA_BUF_SUPPORTED) != 0
    }

    /// How far writes of other devices are ordered for running kernels without a flush (100: for this
    /// device, 200: for all), as the driver says.
    pub(crate) fn remote_write_order(&self) -> i32 {
        self.attribute(DeviceAttribute::GPU_DIRECT_RDMA_WRITES_ORDERING)
    }

    /// Makes what other devices wrote visible to running kernels.
    pub(crate) fn flush(&self) -> Result<()> {
        match self.context()?.flush_remote_writes() {
            Err(CudaError::Unsupported { what }) => {
                Err(Error::refused(format!("{} has no {what}", self.label())))
            }
            other => other.map_err(|error| self.failed("flush remote writes", error)),
        }
    }
}
