//! What a NIC holds: protection domains, regions, completion and receive queues, queue pairs.

use crate::mr::{DeregisterError, Lkey, MemoryKind, PdId, RegisterError, Registered, Registration};
use crate::roce::Qpn;

use super::super::qp::{Qp, QpInit};
use super::super::queue::{Cq, CqId, RecvQueue, Srq, SrqId};
use super::super::state::{ModifyError, QpAttr, QpKind, QpState};
use super::super::work::{PostError, SGES_MAX};
use super::{CreateError, DestroyError, Engine, INLINE_BYTES_MAX, OBJECTS_MAX, QUEUE_ENTRIES_MAX};

impl Engine {
    /// Makes a protection domain.
    pub fn create_pd(&mut self) -> Result<PdId, CreateError> {
        limit(self.pds.len(), "protection domains")?;
        let pd = PdId(self.shared.next_object());
        self.pds.insert(pd, 0);
        Ok(pd)
    }

    /// Removes a protection domain that nothing belongs to.
    pub fn destroy_pd(&mut self, pd: PdId) -> Result<(), DestroyError> {
        match self.pds.get(&pd) {
            None => Err(DestroyError::Unknown),
            Some(0) => {
                self.pds.remove(&pd);
                Ok(())
            }
            Some(users) => Err(DestroyError::InUse { users: *users }),
        }
    }

    /// Registers memory.
    pub fn register(&mut self, region: Registration) -> Result<Registered, RegisterError> {
        let registered = self.shared.mrs.register(region)?;
        self.use_pd(region.pd, true);
        Ok(registered)
    }

    /// Removes a region of a protection domain. Refused while it is in use.
    pub fn deregister(&mut self, pd: PdId, lkey: Lkey) -> Result<(), DeregisterError> {
        self.shared.mrs.deregister(lkey)?;
        self.use_pd(pd, false);
        Ok(())
    }

    /// Takes every right from a region at once; see [`MrTable::revoke`].
    pub fn revoke(&mut self, lkey: Lkey) -> Option<u32> {
        self.shared.mrs.revoke(lkey)
    }

    /// Accesses of a region under way; see [`MrTable::in_flight`].
    pub fn in_flight(&self, lkey: Lkey) -> Option<u32> {
        self.shared.mrs.in_flight(lkey)
    }

    /// What kind of memory a region is.
    pub fn memory_kind(&self, lkey: Lkey) -> Option<MemoryKind> {
        self.shared.mrs.kind(lkey)
    }

    /// Makes a completion queue of `capacity` entries.
    pub fn create_cq(&mut self, capacity: u32) -> Result<CqId, CreateError> {
        limit(self.shared.cqs.len(), "completion queues")?;
        entries("completion queue entries", capacity)?;
        let id = self.shared.next_object();
        self.shared.cqs.insert(id, Cq::new(capacity));
        Ok(CqId(id))
    }

    /// Removes a completion queue that no queue pair reports to.
    pub fn destroy_cq(&mut self, cq: CqId) -> Result<(), DestroyError> {
        let users = self.shared.cqs.get(&cq.0).ok_or(DestroyError::Unknown)?.users;
        if users > 0 {
            return Err(DestroyError::InUse { users });
        }
        self.shared.cqs.remove(&cq.0);
        Ok(())
    }

    /// Makes a shared receive queue.
    pub fn create_srq(
        &mut self,
        pd: PdId,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SrqId, CreateError> {
        limit(self.shared.srqs.len(), "shared receive queues")?;
        entries("shared receive queue entries", max_wr)?;
        sges("scatter/gather elements", max_sge)?;
        if !self.pds.contains_key(&pd) {
            return Err(CreateError::Unknown { what: "protection domain" });
        }
        let id = self.shared.next_object();
        let queue = RecvQueue::new(max_wr, max_sge as usize);
        self.shared.srqs.insert(id, Srq { pd, queue, limit: 0, users: 0 });
        self.use_pd(pd, true);
        Ok(SrqId(id))
    }

    /// Asks for one [`Event::SrqLimit`] when fewer than `limit` receives are left.
    pub fn arm_srq(&mut self, srq: SrqId, limit: u32) -> Result<(), PostError> {
        self.shared.srqs.get_mut(&srq.0).ok_or(PostError::Unknown)?.limit = limit;
        Ok(())
    }

    /// Removes a shared receive queue that no queue pair takes from.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), DestroyError> {
        let users = self.shared.srqs.get(&srq.0).ok_or(DestroyError::Unknown)?.users;
        if users > 0 {
            return Err(DestroyError::InUse { users });
        }
        if let Some(mut removed) = self.shared.srqs.remove(&srq.0) {
            removed.queue.clear(&mut self.shared.mrs);
            self.use_pd(removed.pd, false);
        }
        Ok(())
    }

    /// Makes a queue pair in RESET.
    pub fn create_qp(&mut self, init: QpInit) -> Result<Qpn, CreateError> {
        limit(self.qps.len(), "queue pairs")?;
        entries("max_send_wr", init.max_send_wr)?;
        sges("max_send_sge", init.max_send_sge)?;
        if init.max_inline > INLINE_BYTES_MAX {
            let (value, max) = (init.max_inline, INLINE_BYTES_MAX);
            return Err(CreateError::TooMany { what: "max_inline", value, max });
        }
        if init.kind == QpKind::Ud && self.shared.config.shared_memory {
            return Err(CreateError::Unsupported { what: "a datagram queue pair on a local link" });
        }
        let unknown = |what| CreateError::Unknown { what };
        if !self.pds.contains_key(&init.pd) {
            return Err(unknown("protection domain"));
        }
        for cq in [init.send_cq, init.recv_cq] {
            if !self.shared.cqs.contains_key(&cq.0) {
                return Err(unknown("completion queue"));
            }
        }
        match init.srq {
            // With a shared receive queue the receive capabilities are ignored (IBA 11.2.5.1).
            Some(srq) => {
                let srq =
                    self.shared.srqs.get_mut(&srq.0).ok_or(unknown("shared receive queue"))?;
                if srq.pd != init.pd {
                    return Err(CreateError::OtherPd);
                }
                srq.users += 1;
            }
            None => {
                entries("max_recv_wr", init.max_recv_wr)?;
                sges("max_recv_sge", init.max_recv_sge)?;
            }
        }
        for cq in [init.send_cq, init.recv_cq] {
            if let Some(cq) = self.shared.cqs.get_mut(&cq.0) {
                cq.users += 1;
            }
        }
        self.use_pd(init.pd, true);
        let qpn = self.draw_qpn();
        let uid = self.shared.next_uid();
        self.qps.insert(qpn, Qp::new(qpn, uid, init, self.shared.config.mtu));
        Ok(qpn)
    }

    /// Moves a queue pair to a state, with the attributes that the transition takes.
    pub fn modify_qp(&mut self, qpn: Qpn, to: QpState, attr: &QpAttr) -> Result<(), ModifyError> {
        let qp = self.qps.get_mut(&qpn).ok_or(ModifyError::Unknown)?;
        qp.modify(&mut self.shared, to, attr)?;
        self.settle(qpn);
        Ok(())
    }

    /// The state of a queue pair.
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.qps.get(&qpn).map(|qp| qp.state)
    }

    /// Removes a queue pair and everything posted to it, without completions. Memory operations under
    /// way keep their regions pinned until they are answered.
    pub fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), DestroyError> {
        let mut qp = self.qps.remove(&qpn).ok_or(DestroyError::Unknown)?;
        qp.reset(&mut self.shared);
        if let Some(at) = qp.listed {
            self.clocks.remove(&(at, qpn));
        }
        for cq in [qp.init.send_cq, qp.init.recv_cq] {
            if let Some(cq) = self.shared.cqs.get_mut(&cq.0) {
                cq.users = cq.users.saturating_sub(1);
            }
        }
        if let Some(srq) = qp.init.srq.and_then(|srq| self.shared.srqs.get_mut(&srq.0)) {
            srq.users = srq.users.saturating_sub(1);
        }
        self.use_pd(qp.init.pd, false);
        Ok(())
    }

    fn use_pd(&mut self, pd: PdId, more: bool) {
        if let Some(users) = self.pds.get_mut(&pd) {
            *users = if more { users.saturating_add(1) } else { users.saturating_sub(1) };
        }
    }

    /// A random number that no queue pair has; 0 and 1 are reserved (IBA 9.2.7).
    fn draw_qpn(&mut self) -> Qpn {
        loop {
            let qpn = Qpn::new(self.shared.draw() as u32);
            if qpn.as_u32() > 1 && !self.qps.contains_key(&qpn) {
                return qpn;
            }
        }
    }
}

fn limit(count: usize, what: &'static str) -> Result<(), CreateError> {
    if count < OBJECTS_MAX {
        return Ok(());
    }
    Err(CreateError::TooMany { what, value: count as u32, max: OBJECTS_MAX as u32 })
}

const fn entries(what: &'static str, value: u32) -> Result<(), CreateError> {
    if value == 0 || value > QUEUE_ENTRIES_MAX {
        return Err(CreateError::TooMany { what, value, max: QUEUE_ENTRIES_MAX });
    }
    Ok(())
}

const fn sges(what: &'static str, value: u32) -> Result<(), CreateError> {
    if value as usize > SGES_MAX {
        return Err(CreateError::TooMany { what, value, max: SGES_MAX as u32 });
    }
    Ok(())
}
