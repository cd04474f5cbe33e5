//! GPU memory as memory regions.

use std::sync::Arc;

use super::super::memory::Memory;
use super::{Mr, Pd};
use crate::error::Result;
use crate::gpu::Buffer;
use crate::memory::{Atomicity, Flush, GpuMemory, holder_of};
use crate::verbs::Access;

impl Pd {
    /// Registers GPU memory that stays where it is meanwhile.
    ///
    /// # Errors
    /// As [`Pd::reg_mr`]; code `memory-managed` for managed memory, `allocation-gone` for memory that its
    /// owner has freed.
    pub fn reg_gpu(&self, buffer: &Buffer, access: Access) -> Result<Mr> {
        let holder = holder_of(&self.context().local());
        self.reg_mr(Arc::new(GpuMemory::pinned(buffer, &holder)?), access)
    }

    /// Registers GPU memory that may move meanwhile.
    ///
    /// # Errors
    /// As [`Pd::reg_gpu`]; code `dynamic-unsupported` where the device does not move memory.
    pub fn reg_gpu_dynamic(&self, buffer: &Buffer, access: Access) -> Result<Mr> {
        self.reg_mr(Arc::new(GpuMemory::dynamic(buffer)?), access)
    }
}

impl Mr {
    /// The GPU memory behind it, if it is that.
    pub fn gpu_memory(&self) -> Option<&GpuMemory> {
        match self.memory() {
            Memory::Gpu(memory) => Some(memory),
            Memory::Host(_) | Memory::Device(_) => None,
        }
    }

    /// Towards whom a peer's atomics on it are atomic.
    pub fn atomicity(&self) -> Atomicity {
        match self.memory() {
            Memory::Gpu(memory) => memory.atomicity(),
            Memory::Host(_) => Atomicity::System,
            Memory::Device(_) => Atomicity::Nic,
        }
    }

    /// Makes what a peer wrote, in work that is known to be complete, visible to kernels that run on the
    /// memory's device; says where nothing had to be done, and why.
    ///
    /// # Errors
    /// None on this NIC: what completes has been written by the device itself.
    pub fn flush(&self) -> Result<Flush> {
        let why = "the CPU wrote it, in the order in which it completed";
        Ok(self.gpu_memory().map_or(Flush { needed: false, why }, GpuMemory::flush))
    }
}
