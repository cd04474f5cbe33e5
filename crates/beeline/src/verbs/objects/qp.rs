//! Queue pairs and shared receive queues.

use std::sync::Arc;

use beeline_core::rc::{
    Payload, PostError, QpAttr, QpInit, QpKind, QpState, RecvWr, SendWr, Sge, SrqId,
};
use beeline_core::roce::{Psn, Qpn};

use super::super::exchange::{Connect, Endpoint};
use super::super::soft::{Core, random};
use super::context::{Pd, PdInner};
use super::cq::Cq;
use super::{create_error, modify_error, post_error};
use crate::error::{Error, Result};

/// How large the queues of a queue pair are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCaps {
    /// Sends outstanding at most.
    pub max_send_wr: u32,
    /// Receives outstanding at most; ignored with a shared receive queue.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of a send at most.
    pub max_send_sge: u32,
    /// Scatter/gather elements of a receive at most; ignored with a shared receive queue.
    pub max_recv_sge: u32,
    /// Inline bytes of a send at most.
    pub max_inline: u32,
}

impl Default for QpCaps {
    fn default() -> Self {
        Self {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 220,
        }
    }
}

/// A queue pair. It is destroyed when dropped: what is posted ends without completions.
#[derive(Debug)]
pub struct Qp {
    pd: Arc<PdInner>,
    qpn: Qpn,
    psn: Psn,
    kind: QpKind,
    // Held for as long as the queue pair reports to them and takes from it.
    _send_cq: Cq,
    _recv_cq: Cq,
    _srq: Option<Arc<SrqInner>>,
}

impl Pd {
    /// Makes a queue pair in RESET.
    ///
    /// # Errors
    /// `is_refused` where a capacity is 0 or more than is possible, or a completion queue belongs to
    /// another NIC.
    pub fn create_qp(&self, kind: QpKind, send_cq: &Cq, recv_cq: &Cq, caps: QpCaps) -> Result<Qp> {
        self.make_qp(kind, (send_cq, recv_cq), caps, None)
    }

    /// Makes a queue pair in RESET that takes its receives from `srq`.
    ///
    /// # Errors
    /// As [`create_qp`](Self::create_qp); `is_refused` where `srq` belongs to another protection domain.
    pub fn create_qp_with_srq(
        &self,
        kind: QpKind,
        send_cq: &Cq,
        recv_cq: &Cq,
        caps: QpCaps,
        srq: &Srq,
    ) -> Result<Qp> {
        if !Arc::ptr_eq(&srq.inner.pd, &self.inner) {
            return Err(Error::refused("cannot create a queue pair")
                .because(beeline_core::rc::CreateError::OtherPd));
        }
        self.make_qp(kind, (send_cq, recv_cq), caps, Some(&srq.inner))
    }

    fn make_qp(
        &self,
        kind: QpKind,
        (send_cq, recv_cq): (&Cq, &Cq),
        caps: QpCaps,
        srq: Option<&Arc<SrqInner>>,
    ) -> Result<Qp> {
        if !send_cq.is_of(&self.inner.soft) || !recv_cq.is_of(&self.inner.soft) {
            return Err(Error::refused("the completion queue belongs to another NIC"));
        }
        let init = QpInit {
            kind,
            pd: self.inner.id,
            send_cq: send_cq.inner.id,
            recv_cq: recv_cq.inner.id,
            srq: srq.map(|srq| srq.id),
            max_send_wr: caps.max_send_wr,
            max_recv_wr: caps.max_recv_wr,
            max_send_sge: caps.max_send_sge,
            max_recv_sge: caps.max_recv_sge,
            max_inline: caps.max_inline,
        };
        let psn = Psn::new(u32::from_ne_bytes(random()?));
        let made = self.inner.soft.shared.with(|core| core.engine.create_qp(init));
        let qpn = made.map_err(|error| create_error("queue pair", error))?;
        Ok(Qp {
            pd: Arc::clone(&self.inner),
            qpn,
            psn,
            kind,
            _send_cq: send_cq.clone(),
            _recv_cq: recv_cq.clone(),
            _srq: srq.cloned(),
        })
    }

    /// Makes a shared receive queue of `max_wr` receives of up to `max_sge` elements.
    ///
    /// # Errors
    /// `is_refused` where a number is 0 or more than is possible.
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<Srq> {
        let pd = Arc::clone(&self.inner);
        let made = pd.soft.shared.with(|core| core.engine.create_srq(pd.id, max_wr, max_sge));
        let id = made.map_err(|error| create_error("shared receive queue", error))?;
        Ok(Srq { inner: Arc::new(SrqInner { pd, id }) })
    }
}

impl Qp {
    /// Its number.
    pub const fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// What it is.
    pub const fn kind(&self) -> QpKind {
        self.kind
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.with(|core, qpn| core.engine.qp_state(qpn)).unwrap_or(QpState::Err)
    }

    /// What the peer must know: the number, a random first sequence number, the address, the MTU.
    pub fn endpoint(&self) -> Endpoint {
        let shared = &self.pd.soft.shared;
        Endpoint { qpn: self.qpn, psn: self.psn, addr: shared.local, mtu: shared.mtu }
    }

    /// Moves the queue pair to a state, with the attributes the transition takes.
    ///
    /// # Errors
    /// `is_refused`, naming the attributes that are missing and those that do not belong, the transition
    /// that does not exist, or the value that is out of range. Nothing has changed then.
    pub fn modify(&self, to: QpState, attr: &QpAttr) -> Result<()> {
        self.with(|core, qpn| core.engine.modify_qp(qpn, to, attr)).map_err(modify_error)
    }

    /// From RESET to INIT with these rights for the peer: receives can be posted then.
    ///
    /// # Errors
    /// As [`modify`](Self::modify).
    pub fn init(&self, connect: &Connect) -> Result<()> {
        let attr = QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(connect.access),
            ..QpAttr::default()
        };
        self.modify(QpState::Init, &attr)
    }

    /// From RESET or INIT through RTR to RTS, connected to `peer`.
    ///
    /// # Errors
    /// As [`modify`](Self::modify).
    pub fn connect(&self, peer: &Endpoint, connect: &Connect) -> Result<()> {
        if self.state() == QpState::Reset {
            self.init(connect)?;
        }
        let mtu = connect.mtu.unwrap_or_else(|| peer.mtu.min(self.pd.soft.shared.mtu));
        let rtr = QpAttr {
            peer: Some(peer.addr),
            path_mtu: Some(mtu),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(peer.psn),
            max_dest_rd_atomic: Some(connect.rd_atomic),
            min_rnr_timer: Some(connect.min_rnr_timer),
            ..QpAttr::default()
        };
        self.modify(QpState::Rtr, &rtr)?;
        let rts = QpAttr {
            timeout: Some(connect.timeout),
            retry_cnt: Some(connect.retry_cnt),
            rnr_retry: Some(connect.rnr_retry),
            sq_psn: Some(self.psn),
            max_rd_atomic: Some(connect.rd_atomic),
            ..QpAttr::default()
        };
        self.modify(QpState::Rts, &rts)
    }

    /// Posts a send work request. The regions it names stay registered until it completes.
    ///
    /// # Errors
    /// `is_refused`: code `queue-full` where completions must be polled first, `qp-state`, `unsupported`,
    /// or `work-request` with what is wrong with it.
    pub fn post_send(&self, wr: SendWr) -> Result<()> {
        self.post(|core, qpn| core.engine.post_send(qpn, wr)).map_err(post_error)
    }

    /// Posts a send work request whose payload is read now, so that its memory is free again at once.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send); code `inline-device-memory` where an element is device memory,
    /// which the CPU cannot read in place.
    pub fn post_send_inline(&self, mut wr: SendWr) -> Result<()> {
        let posted = self.post(|core, qpn| {
            if let Payload::Sges(sges) = &wr.payload {
                wr.payload = Payload::Inline(gather(core, sges)?);
            }
            core.engine.post_send(qpn, wr)
        });
        posted.map_err(post_error)
    }

    /// Posts a receive work request; allowed from INIT on.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    pub fn post_recv(&self, wr: RecvWr) -> Result<()> {
        self.post(|core, qpn| core.engine.post_recv(qpn, wr)).map_err(post_error)
    }

    fn post<T>(&self, work: impl FnOnce(&mut Core, Qpn) -> T) -> T {
        self.pd.soft.shared.post(|core| work(core, self.qpn))
    }

    fn with<T>(&self, work: impl FnOnce(&mut Core, Qpn) -> T) -> T {
        self.pd.soft.shared.with(|core| work(core, self.qpn))
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let _ = self.with(|core, qpn| core.engine.destroy_qp(qpn));
    }
}

/// The bytes of a scatter/gather list of host memory.
fn gather(core: &Core, sges: &[Sge]) -> Result<Vec<u8>, PostError> {
    let total: u64 = sges.iter().map(|sge| u64::from(sge.len)).sum();
    let max = beeline_core::rc::INLINE_BYTES_MAX;
    if total > u64::from(max) {
        let given = usize::try_from(total).unwrap_or(usize::MAX);
        return Err(PostError::InlineTooLong { given, max });
    }
    let mut bytes = Vec::new();
    for sge in sges {
        let unknown =
            PostError::Unsupported { what: "inline data of memory that is not registered" };
        let region = core.regions.get(&sge.lkey).ok_or(unknown)?;
        let memory = core.memories.get(*region).ok_or(unknown)?;
        if memory.kind() == beeline_core::mr::MemoryKind::Device {
            return Err(PostError::InlineDeviceMemory { lkey: sge.lkey });
        }
        let offset = sge.addr.as_u64().checked_sub(memory.addr()).ok_or(unknown)?;
        let start = bytes.len();
        bytes.resize(start + sge.len as usize, 0);
        let into = bytes.get_mut(start..).unwrap_or(&mut []);
        memory.read(offset, into).map_err(|_| unknown)?;
    }
    Ok(bytes)
}

/// A shared receive queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Srq {
    pub(super) inner: Arc<SrqInner>,
}

#[derive(Debug)]
pub(super) struct SrqInner {
    pd: Arc<PdInner>,
    id: SrqId,
}

impl Srq {
    /// Posts a receive work request.
    ///
    /// # Errors
    /// `is_refused`: code `queue-full`, or what is wrong with it.
    pub fn post_recv(&self, wr: RecvWr) -> Result<()> {
        let shared = &self.inner.pd.soft.shared;
        shared.with(|core| core.engine.post_srq_recv(self.inner.id, wr)).map_err(post_error)
    }

    /// Asks for one asynchronous event when fewer than `limit` receives are left.
    ///
    /// # Errors
    /// None while the queue exists.
    pub fn arm(&self, limit: u32) -> Result<()> {
        let shared = &self.inner.pd.soft.shared;
        shared.with(|core| core.engine.arm_srq(self.inner.id, limit)).map_err(post_error)
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        let _ = self.pd.soft.shared.with(|core| core.engine.destroy_srq(self.id));
    }
}
