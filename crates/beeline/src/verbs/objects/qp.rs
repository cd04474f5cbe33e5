//! Queue pairs and shared receive queues.

use std::net::IpAddr;
use std::sync::Arc;

use beeline_core::rc::{CreateError, QpAttr, QpKind, QpState, RecvWr, SendWr};
use beeline_core::roce::{Mtu, Psn, Qpn};

use super::super::exchange::{Connect, Endpoint};
use super::super::ibv;
use super::super::soft::random;
use super::context::{Pd, PdInner};
use super::cq::{Cq, CqInner};
use super::create_error;
use super::soft::{SoftQp, SoftSrq};
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
    inner: QpInner,
    psn: Psn,
    kind: QpKind,
    // Held for as long as the queue pair reports to them and takes from it.
    _send_cq: Cq,
    _recv_cq: Cq,
}

#[derive(Debug)]
enum QpInner {
    Soft(SoftQp),
    Ibv(ibv::Qp),
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

    /// Makes a queue pair in RESET that takes its receives from `srq`. When it is reset or dropped, receives that it has
    /// taken are ended first: with a NIC of the kernel's that waits for the device, for half a second at most.
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
        self.make_qp(kind, (send_cq, recv_cq), caps, Some(srq))
    }

    fn make_qp(
        &self,
        kind: QpKind,
        (send_cq, recv_cq): (&Cq, &Cq),
        caps: QpCaps,
        srq: Option<&Srq>,
    ) -> Result<Qp> {
        let inner = match (&self.inner, &send_cq.inner, &recv_cq.inner) {
            (PdInner::Soft(pd), CqInner::Soft(send), CqInner::Soft(recv))
                if [send, recv].iter().all(|cq| Arc::ptr_eq(&cq.soft, &pd.soft)) =>
            {
                let srq = match srq.map(|srq| &srq.inner) {
                    None => None,
                    Some(SrqInner::Soft(srq)) if Arc::ptr_eq(&srq.pd, pd) => Some(srq),
                    Some(_) => return Err(create_error("queue pair", CreateError::OtherPd)),
                };
                QpInner::Soft(SoftQp::new(pd, kind, (send, recv), caps, srq)?)
            }
            (PdInner::Ibv(pd), CqInner::Ibv(send), CqInner::Ibv(recv))
                if [send, recv].iter().all(|cq| cq.is_of(&pd.device)) =>
            {
                let srq = match srq.map(|srq| &srq.inner) {
                    None => None,
                    Some(SrqInner::Ibv(srq)) if srq.is_of(pd) => Some(srq),
                    Some(_) => return Err(create_error("queue pair", CreateError::OtherPd)),
                };
                QpInner::Ibv(ibv::Qp::new(pd, kind, (send, recv), caps, srq)?)
            }
            _ => return Err(Error::refused("the completion queue belongs to another NIC")),
        };
        let psn = Psn::new(u32::from_ne_bytes(random()?));
        Ok(Qp { inner, psn, kind, _send_cq: send_cq.clone(), _recv_cq: recv_cq.clone() })
    }

    /// Makes a shared receive queue of `max_wr` receives of up to `max_sge` elements.
    ///
    /// # Errors
    /// `is_refused` where a number is 0 or more than is possible.
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<Srq> {
        let inner = match &self.inner {
            PdInner::Soft(pd) => SrqInner::Soft(SoftSrq::new(pd, max_wr, max_sge)?),
            PdInner::Ibv(pd) => SrqInner::Ibv(ibv::Srq::new(pd, max_wr, max_sge)?),
        };
        Ok(Srq { inner })
    }
}

impl Qp {
    /// Its number.
    pub fn qpn(&self) -> Qpn {
        match &self.inner {
            QpInner::Soft(qp) => qp.qpn,
            QpInner::Ibv(qp) => qp.qpn(),
        }
    }

    /// What it is.
    pub const fn kind(&self) -> QpKind {
        self.kind
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        match &self.inner {
            QpInner::Soft(qp) => qp.state(),
            QpInner::Ibv(qp) => qp.state(),
        }
    }

    /// What the peer must know: the number, a random first sequence number, the address, the MTU.
    pub fn endpoint(&self) -> Endpoint {
        let (addr, mtu) = self.port();
        Endpoint { qpn: self.qpn(), psn: self.psn, addr, mtu }
    }

    /// Address and largest path MTU of the NIC's port.
    fn port(&self) -> (IpAddr, Mtu) {
        match &self.inner {
            QpInner::Soft(qp) => (qp.pd.soft.shared.local, qp.pd.soft.shared.mtu),
            QpInner::Ibv(qp) => qp.port(),
        }
    }

    /// Moves the queue pair to a state, with the attributes the transition takes.
    ///
    /// # Errors
    /// `is_refused`, naming the attributes that are missing and those that do not belong, the transition
    /// that does not exist, or the value that is out of range. Nothing has changed then. `is_io` with what
    /// the driver of a NIC says.
    pub fn modify(&self, to: QpState, attr: &QpAttr) -> Result<()> {
        match &self.inner {
            QpInner::Soft(qp) => qp.modify(to, attr),
            QpInner::Ibv(qp) => qp.modify(to, attr),
        }
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
        let mtu = connect.mtu.unwrap_or_else(|| peer.mtu.min(self.port().1));
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
    /// or `work-request` with what is wrong with it. `is_io` with what the driver of a NIC says.
    pub fn post_send(&self, wr: SendWr) -> Result<()> {
        match &self.inner {
            QpInner::Soft(qp) => qp.post_send(wr),
            QpInner::Ibv(qp) => qp.post_send(wr),
        }
    }

    /// Posts a send work request whose payload is read now, so that its memory is free again at once.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send); code `inline-device-memory` where an element is device memory,
    /// which the CPU cannot read in place.
    pub fn post_send_inline(&self, wr: SendWr) -> Result<()> {
        match &self.inner {
            QpInner::Soft(qp) => qp.post_send_inline(wr),
            QpInner::Ibv(qp) => qp.post_send_inline(wr),
        }
    }

    /// Posts a receive work request; allowed from INIT on.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    pub fn post_recv(&self, wr: RecvWr) -> Result<()> {
        match &self.inner {
            QpInner::Soft(qp) => qp.post_recv(wr),
            QpInner::Ibv(qp) => qp.post_recv(wr),
        }
    }
}

/// A shared receive queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Srq {
    inner: SrqInner,
}

#[derive(Clone, Debug)]
enum SrqInner {
    Soft(Arc<SoftSrq>),
    Ibv(Arc<ibv::Srq>),
}

impl Srq {
    /// Posts a receive work request.
    ///
    /// # Errors
    /// `is_refused`: code `queue-full`, or what is wrong with it.
    pub fn post_recv(&self, wr: RecvWr) -> Result<()> {
        match &self.inner {
            SrqInner::Soft(srq) => srq.post_recv(wr),
            SrqInner::Ibv(srq) => srq.post_recv(wr),
        }
    }

    /// Asks for one asynchronous event when fewer than `limit` receives are left.
    ///
    /// # Errors
    /// None on a NIC in software while the queue exists; `is_io` with what the driver of another says.
    pub fn arm(&self, limit: u32) -> Result<()> {
        match &self.inner {
            SrqInner::Soft(srq) => srq.arm(limit),
            SrqInner::Ibv(srq) => srq.arm(limit),
        }
    }
}
