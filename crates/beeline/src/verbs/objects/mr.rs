//! Memory regions.

use std::time::{Duration, Instant};

use beeline_core::addr::Iova;
use beeline_core::mr::{Access, Lkey, Rkey};
use beeline_core::plan::{RegisterRoute, Rejected};
use beeline_core::rc::{Remote, Sge};
use beeline_core::reason::Reason;

use super::super::exchange::RemoteMemory;
use super::super::ibv;
use super::super::memory::Memory;
use super::context::{Pd, PdInner};
use super::soft::SoftMr;
use crate::error::{Error, Result};
use crate::memory::registration::Registration as Pinning;

/// How long [`Mr::deregister`] waits for a peer to fetch what packets name.
const FETCHED: Duration = Duration::from_secs(1);

/// Registered memory. It holds the memory, so that nothing the NIC may still touch is freed.
///
/// Dropped while work requests name it or accesses are under way, it is revoked at once, and its memory
/// is kept until they are done. [`Mr::deregister`] answers instead.
#[derive(Debug)]
pub struct Mr {
    inner: MrInner,
    memory: Memory,
    access: Access,
    /// Undone with the region.
    pub(super) registration: Option<Box<Pinning>>,
}

#[derive(Debug)]
pub(super) enum MrInner {
    Soft(SoftMr),
    Ibv(Box<ibv::Mr>),
}

/// How a region was registered, and why so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MrResolved {
    /// How the kernel's driver holds the memory; `None` on a NIC in software, which reaches it itself.
    pub route: Option<RegisterRoute>,
    /// Whether writes of a peer may pass one another on the way.
    pub relaxed_ordering: bool,
    /// Why this way, and why this order where another was asked for.
    pub why: Vec<Reason>,
    /// What else was thought of, with the reason against it.
    pub rejected: Vec<Rejected<RegisterRoute>>,
}

impl Pd {
    /// Registers `memory` under its own address.
    ///
    /// A NIC in software reaches every kind of memory. For one of the kernel's the way is planned
    /// (`beeline_core::plan::register`), and [`Mr::resolved`] says which it is: host memory is pinned, memory
    /// of a GPU goes as dma-buf or through the peer memory client of its driver.
    ///
    /// # Errors
    /// `is_refused` where the rights make no sense together, too many regions are registered, or no way
    /// is open (with the reason for each); on a NIC of the kernel's with what its driver says, and the code
    /// that `beeline doctor` has for it.
    pub fn reg_mr(&self, memory: impl Into<Memory>, access: Access) -> Result<Mr> {
        let memory = memory.into();
        let inner = match &self.inner {
            PdInner::Soft(pd) => MrInner::Soft(SoftMr::new(pd, &memory, access)?),
            PdInner::Ibv(pd) => MrInner::Ibv(Box::new(ibv::Mr::new(pd, &memory, access)?)),
        };
        Ok(Mr { inner, memory, access, registration: None })
    }
}

impl Mr {
    /// The key for work requests of this side.
    pub fn lkey(&self) -> Lkey {
        match &self.inner {
            MrInner::Soft(mr) => mr.registered.lkey,
            MrInner::Ibv(mr) => mr.lkey(),
        }
    }

    /// The key for the peer.
    pub fn rkey(&self) -> Rkey {
        match &self.inner {
            MrInner::Soft(mr) => mr.registered.rkey,
            MrInner::Ibv(mr) => mr.rkey(),
        }
    }

    /// How it was registered.
    pub fn resolved(&self) -> MrResolved {
        match &self.inner {
            MrInner::Soft(_) => MrResolved::default(),
            MrInner::Ibv(mr) => mr.resolved.clone(),
        }
    }

    /// The address of its first byte.
    pub fn addr(&self) -> Iova {
        Iova::new(self.memory.addr())
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.memory.len()
    }

    /// Whether there is no byte. Always false: an empty region cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// What may be done with it.
    pub const fn access(&self) -> Access {
        self.access
    }

    /// The memory itself.
    pub const fn memory(&self) -> &Memory {
        &self.memory
    }

    /// A scatter/gather element of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `is_refused` where it does not lie inside.
    pub fn sge(&self, offset: u64, len: u32) -> Result<Sge> {
        let end = offset.checked_add(u64::from(len));
        if end.is_none_or(|end| end > self.len()) {
            let size = self.len();
            return Err(Error::refused(format!(
                "{len} bytes at offset {offset} do not lie inside a region of {size} bytes"
            )));
        }
        let addr = Iova::new(self.memory.addr().wrapping_add(offset));
        Ok(Sge { addr, len, lkey: self.lkey() })
    }

    /// What a peer of this process, or a test, names byte `offset` by.
    pub fn remote_at(&self, offset: u64) -> Remote {
        self.remote().at(offset)
    }

    /// What the peer must know to reach it.
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { addr: self.addr(), len: self.len(), rkey: self.rkey() }
    }

    /// Ends the registration. On a local link it waits, 1 s at most, until the peer has fetched what packets
    /// name of it: then nobody reads the memory any more.
    ///
    /// # Errors
    /// `is_refused` with code `region-in-use`, and the region back, while posted work requests name it,
    /// accesses are under way, or the peer does not fetch; `is_io`, and the region back, with what the driver of a
    /// NIC says.
    pub fn deregister(self) -> Result<(), (Self, Error)> {
        self.end(Instant::now() + FETCHED)
    }

    /// [`deregister`](Self::deregister), waiting for a peer until `deadline`.
    pub(super) fn end(mut self, deadline: Instant) -> Result<(), (Self, Error)> {
        let done = match &mut self.inner {
            MrInner::Soft(mr) => mr.deregister(deadline),
            MrInner::Ibv(mr) => mr.deregister(),
        };
        done.map_err(|error| (self, error))
    }

    /// Takes every right away at once: accesses from now on are refused, as after a drop. Answers how
    /// many that were granted before are still under way.
    pub fn revoke(&self) -> u32 {
        match &self.inner {
            MrInner::Soft(mr) => mr.revoke(),
            MrInner::Ibv(mr) => mr.revoke(),
        }
    }

    /// Accesses under way, and on a local link pieces that a peer has yet to fetch. A NIC of the kernel's does not tell how many: there it is 0, and 1 for a region
    /// that was revoked and that the driver still holds.
    pub fn in_flight(&self) -> u32 {
        match &self.inner {
            MrInner::Soft(mr) => mr.in_flight(),
            MrInner::Ibv(mr) => mr.in_flight(),
        }
    }

    pub(super) const fn inner(&self) -> &MrInner {
        &self.inner
    }
}
