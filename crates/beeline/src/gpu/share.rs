//! Device memory as others see it: other processes, other drivers, and whoever must know whether an
//! allocation is still the same.

use std::os::fd::{AsFd, OwnedFd};

use super::buffer::DeviceMemory;
use super::{Buffer, Gpu, Inner};
use crate::error::{Error, Result};

/// What a device says about being reached by NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaAbility {
    /// A NIC can be given ordinary memory (`GPU_DIRECT_RDMA_SUPPORTED`).
    pub memory: bool,
    /// A NIC can be given virtual memory (`GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`).
    pub virtual_memory: bool,
    /// The driver exports dma-bufs (`DMA_BUF_SUPPORTED`).
    pub dma_buf: bool,
    /// A running kernel sees what a NIC wrote without a flush (`GPU_DIRECT_RDMA_WRITES_ORDERING`).
    pub ordered: bool,
}

impl Gpu {
    /// Allocates managed memory, which the driver moves between host and devices. It can be copied and
    /// computed on; registering it for RDMA is refused.
    ///
    /// # Errors
    /// As [`Gpu::alloc`]; `is_refused` on a simulated device.
    pub fn alloc_managed(&self, len: u64) -> Result<Buffer> {
        match &self.inner {
            Inner::Cuda(device) if len > 0 => Ok(Buffer::cuda(device.managed(len)?, len)),
            Inner::Cuda(_) => Err(Error::refused("cannot allocate 0 bytes of device memory")),
            Inner::Sim(_) => Err(Error::refused(format!("{} has no managed memory", self.id()))),
        }
    }

    /// What the device says about being reached by NICs. For a simulated one: what its profile shows.
    pub fn rdma_ability(&self) -> RdmaAbility {
        match &self.inner {
            Inner::Cuda(device) => RdmaAbility {
                memory: device.rdma_capable(),
                virtual_memory: device.rdma_capable_vmm(),
                dma_buf: device.dma_buf_capable(),
                ordered: device.remote_write_order() >= 100,
            },
            Inner::Sim(device) => {
                let window = device.has_window();
                RdmaAbility {
                    memory: window,
                    virtual_memory: false,
                    dma_buf: window,
                    ordered: true,
                }
            }
        }
    }

    /// Makes what other devices wrote into this one's memory visible to its running kernels.
    ///
    /// # Errors
    /// `is_refused` where the driver has no such call; `is_device` where it fails.
    pub fn flush_remote_writes(&self) -> Result<()> {
        match &self.inner {
            Inner::Cuda(device) => device.flush(),
            Inner::Sim(_) => Ok(()),
        }
    }

    /// Maps `whole` bytes that another process exported; `None` on a simulated device.
    pub(crate) fn import(&self, fd: impl AsFd, whole: u64) -> Option<Result<Buffer>> {
        match &self.inner {
            Inner::Cuda(device) => {
                Some(device.import(fd, whole).map(|memory| Buffer::cuda(memory, whole)))
            }
            Inner::Sim(_) => None,
        }
    }
}

impl Buffer {
    /// How the memory came about: a word of the CUDA driver API, `foreign`, or `simulated`.
    pub fn origin(&self) -> &'static str {
        match self.locate(0, 0) {
            Ok((DeviceMemory::Cuda(memory), _)) => memory.origin(),
            _ => "simulated",
        }
    }

    /// Whether somebody else allocated it and may free it.
    pub fn is_foreign(&self) -> bool {
        self.origin() == "foreign"
    }

    /// The number of the allocation behind the first byte, which no other allocation ever gets; `None`
    /// where there is no allocation now.
    ///
    /// # Errors
    /// `is_device` where the driver fails.
    pub fn allocation_id(&self) -> Result<Option<u64>> {
        match self.locate(0, 0)? {
            (DeviceMemory::Cuda(memory), at) => memory.buffer_id(at),
            (DeviceMemory::Sim(allocation), _) => Ok(Some(allocation.number())),
        }
    }

    /// The whole allocation as a descriptor for another process, its length, and where this buffer
    /// starts in it. `None` where this kind of memory cannot be passed on.
    pub(crate) fn export(&self) -> Option<(OwnedFd, u64, u64)> {
        match self.locate(0, self.len()).ok()? {
            (DeviceMemory::Cuda(memory), at) if memory.origin() == "cuMemCreate" => {
                Some((memory.export().ok()?, memory.whole_len(), at))
            }
            _ => None,
        }
    }
}

impl Buffer {
    /// A hold on virtual memory of somebody else's; `None` where the memory is of another kind.
    pub(crate) fn retain(&self) -> Option<beeline_sys::cuda::Retained> {
        match self.locate(0, self.len()).ok()? {
            (DeviceMemory::Cuda(memory), at) => memory.retain(at).ok(),
            (DeviceMemory::Sim(_), _) => None,
        }
    }

    /// The allocation of a simulated device.
    pub(crate) fn allocation_sim(&self) -> Option<&std::sync::Arc<super::sim::Allocation>> {
        self.locate_sim(0, 0).ok().map(|(allocation, _)| allocation)
    }
}

impl Buffer {
    /// A dma-buf of the CUDA driver's.
    pub(crate) fn dma_buf_cuda(&self) -> Result<OwnedFd> {
        let (memory, at) = self.locate_cuda(0, self.len())?;
        memory.dma_buf(at, self.len())
    }
}
