//! Memory regions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::addr::Iova;
use beeline_core::mr::{Access, DeregisterError, Lkey, Registered, Registration, Rkey};
use beeline_core::rc::{Remote, Sge};

use super::super::exchange::RemoteMemory;
use super::super::memory::Memory;
use super::context::{Pd, PdInner};
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
    pd: Arc<PdInner>,
    memory: Memory,
    registered: Registered,
    access: Access,
    /// Undone with the region.
    pub(super) registration: Option<Box<Pinning>>,
    gone: bool,
}

impl Pd {
    /// Registers `memory` under its own address.
    ///
    /// # Errors
    /// `is_refused` where the rights make no sense together, or too many regions are registered.
    pub fn reg_mr(&self, memory: impl Into<Memory>, access: Access) -> Result<Mr> {
        let memory = memory.into();
        let wanted = Registration {
            pd: self.inner.id,
            iova: Iova::new(memory.addr()),
            len: memory.len(),
            access,
            kind: memory.kind(),
        };
        let registered = self.inner.soft.shared.with(|core| {
            let registered = core.engine.register(wanted)?;
            core.memories.insert(registered.id, memory.clone());
            core.regions.insert(registered.lkey, registered.id);
            Ok(registered)
        });
        let registered = registered.map_err(|error: beeline_core::mr::RegisterError| {
            Error::refused("cannot register memory").because(error)
        })?;
        Ok(Mr {
            pd: Arc::clone(&self.inner),
            memory,
            registered,
            access,
            registration: None,
            gone: false,
        })
    }
}

impl Mr {
    /// The key for work requests of this side.
    pub const fn lkey(&self) -> Lkey {
        self.registered.lkey
    }

    /// The key for the peer.
    pub const fn rkey(&self) -> Rkey {
        self.registered.rkey
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
    /// accesses are under way, or the peer does not fetch.
    pub fn deregister(self) -> Result<(), (Self, Error)> {
        self.end(Instant::now() + FETCHED)
    }

    /// [`deregister`](Self::deregister), waiting for a peer until `deadline`.
    pub(super) fn end(mut self, deadline: Instant) -> Result<(), (Self, Error)> {
        let (pd, lkey) = (self.pd.id, self.lkey());
        loop {
            // The turn before brings what the peer has said.
            let lent = self.pd.soft.shared.with(|core| core.lent(lkey));
            if lent == 0 {
                break;
            }
            if Instant::now() >= deadline {
                let text = format!(
                    "cannot deregister memory: the peer has not fetched {lent} pieces that packets name"
                );
                let error = Error::refused(text).coded("region-in-use");
                return Err((self, error.remedy("wait until the peer's READs are complete")));
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        let done = self.pd.soft.shared.with(|core| match core.lent(lkey) {
            0 => core.deregister(pd, lkey),
            // Another thread's work request came in between.
            lent => Err(DeregisterError::Busy { lkey, posted: 0, in_flight: lent }),
        });
        match done {
            Ok(()) => {
                self.gone = true;
                Ok(())
            }
            Err(error) => {
                let busy = matches!(error, DeregisterError::Busy { .. });
                let code = if busy { "region-in-use" } else { "region-unknown" };
                let error = Error::refused("cannot deregister memory").because(error).coded(code);
                Err((self, error))
            }
        }
    }

    /// Takes every right away at once: accesses from now on are refused, as after a drop. Answers how
    /// many that were granted before are still under way.
    pub fn revoke(&self) -> u32 {
        self.pd.soft.shared.with(|core| core.engine.revoke(self.lkey())).unwrap_or(0)
    }

    /// Accesses under way, and on a local link pieces that a peer has yet to fetch.
    pub fn in_flight(&self) -> u32 {
        let lkey = self.lkey();
        self.pd.soft.shared.with(|core| {
            let accesses = core.engine.in_flight(lkey).unwrap_or(0);
            accesses.saturating_add(core.lent(lkey))
        })
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let (pd, lkey) = (self.pd.id, self.lkey());
        self.pd.soft.shared.with(|core| {
            if !core.forget(pd, lkey) {
                let _ = core.engine.revoke(lkey);
                core.retired.push((pd, lkey));
            }
        });
    }
}
