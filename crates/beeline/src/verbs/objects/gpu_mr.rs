//! GPU memory as memory regions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::addr::ByteRange;

use super::super::memory::Memory;
use super::mr::MrInner;
use super::{Mr, Pd};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, Gpu};
use crate::memory::peer::Subject;
use crate::memory::registration::Registration;
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

    /// Registers `range` of any kind of memory, by the peer memory client whose it is.
    ///
    /// # Errors
    /// As [`Pd::reg_gpu`], and [`Registration::new`].
    pub fn register(&self, subject: &Subject, range: ByteRange, access: Access) -> Result<Mr> {
        let holder = holder_of(&self.context().local());
        let registration = Registration::new(subject, range, &holder)?;
        if let Memory::Host(mem) = registration.memory()?
            && mem.len() != range.len
        {
            let text = "host memory is registered as a whole by a NIC in software";
            return Err(Error::refused(text).coded("range-of-host-memory"));
        }
        let mut mr = self.reg_mr(registration.memory()?, access)?;
        mr.registration = Some(Box::new(registration));
        Ok(mr)
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
    /// The pinning and mapping behind it, where [`Pd::register`] made it.
    pub fn registration(&self) -> Option<&Registration> {
        self.registration.as_deref()
    }

    /// Revokes the region, waits until no access is under way and, on a local link, until the peer has fetched
    /// what packets name of it, and ends it: afterwards its memory may be freed or used for something else.
    ///
    /// # Errors
    /// `is_timeout`, and the region back, where an access does not end by `deadline`; `is_refused` with code
    /// `region-in-use` while posted work requests name it. It stays revoked.
    pub fn drain(self, deadline: Instant) -> Result<(), (Self, Error)> {
        self.revoke();
        while self.in_flight() > 0 {
            if Instant::now() >= deadline {
                let text = format!("{} accesses of a region are under way", self.in_flight());
                return Err((self, Error::new(Kind::Timeout, text)));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        self.end(deadline)
    }

    /// The GPU memory behind it, if it is that.
    pub fn gpu_memory(&self) -> Option<&GpuMemory> {
        match self.memory() {
            Memory::Gpu(memory) => Some(memory),
            Memory::Host(_) | Memory::Device(_) => None,
        }
    }

    /// Towards whom a peer's atomics on it are atomic.
    pub fn atomicity(&self) -> Atomicity {
        if let MrInner::Ibv(mr) = self.inner() {
            // IBV_ATOMIC_GLOB: towards every component of the system, the CPU among them. Whether a GPU is
            // one, no NIC says.
            let whole = mr.atomic_cap() == 2 && self.gpu_memory().is_none();
            return if whole { Atomicity::System } else { Atomicity::Nic };
        }
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
    /// None on a NIC in software: what completes has been written by the device itself. On one of the kernel's
    /// what the GPU's driver says.
    pub fn flush(&self) -> Result<Flush> {
        let why = "the CPU wrote it, in the order in which it completed";
        match (self.inner(), self.gpu_memory()) {
            (MrInner::Soft(_), memory) => {
                Ok(memory.map_or(Flush { needed: false, why }, GpuMemory::flush))
            }
            (MrInner::Ibv(_), None) => {
                let why = "the NIC wrote host memory before it reported the completion";
                Ok(Flush { needed: false, why })
            }
            (MrInner::Ibv(_), Some(memory)) => flush_gpu(&memory.gpu()),
        }
    }
}

/// After writes of a NIC that goes past the device's own engines.
fn flush_gpu(gpu: &Gpu) -> Result<Flush> {
    if gpu.rdma_ability().ordered {
        let why = "the device orders writes from PCIe before what is read after their completion";
        return Ok(Flush { needed: false, why });
    }
    gpu.flush_remote_writes()?;
    let why = "the device was told to make writes from PCIe visible to its kernels";
    Ok(Flush { needed: true, why })
}
