//! The objects on a NIC in software: names of what the engine holds.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::addr::Iova;
use beeline_core::mr::{Access, DeregisterError, Lkey, PdId, Registered, Registration};
use beeline_core::rc::{
    Completion, CqId, Notify, Payload, PostError, QpAttr, QpInit, QpKind, QpState, RecvWr, SendWr,
    Sge, SrqId,
};
use beeline_core::roce::Qpn;

use super::super::memory::Memory;
use super::super::soft::{Core, Soft, eventfd};
use super::{QpCaps, create_error, deregister_error, modify_error, overrun_error, post_error};
use crate::error::{Error, Result};

/// A protection domain.
#[derive(Debug)]
pub(super) struct SoftPd {
    pub(super) soft: Arc<Soft>,
    id: PdId,
}

impl SoftPd {
    pub(super) fn new(soft: &Arc<Soft>) -> Result<Arc<Self>> {
        let made = soft.shared.with(|core| core.engine.create_pd());
        let id = made.map_err(|error| create_error("protection domain", error))?;
        Ok(Arc::new(Self { soft: Arc::clone(soft), id }))
    }
}

impl Drop for SoftPd {
    fn drop(&mut self) {
        // Fails only while a retired region is still in use; the domain then stays with the NIC.
        let _ = self.soft.shared.with(|core| core.engine.destroy_pd(self.id));
    }
}

/// A completion queue and its channel.
#[derive(Debug)]
pub(super) struct SoftCq {
    pub(super) soft: Arc<Soft>,
    id: CqId,
    pub(super) channel: Arc<OwnedFd>,
}

impl SoftCq {
    pub(super) fn new(soft: &Arc<Soft>, capacity: u32) -> Result<Self> {
        let channel = Arc::new(eventfd()?);
        let made = soft.shared.with(|core| {
            let id = core.engine.create_cq(capacity)?;
            core.channels.insert(id, Arc::clone(&channel));
            Ok(id)
        });
        let id = made.map_err(|error| create_error("completion queue", error))?;
        Ok(Self { soft: Arc::clone(soft), id, channel })
    }

    pub(super) fn poll(&self) -> Result<Option<Completion>> {
        let found = self.soft.shared.poll(|core| core.engine.poll_completion(self.id).transpose());
        found.transpose().map_err(overrun_error)
    }

    pub(super) fn request_notify(&self, notify: Notify) {
        self.soft.shared.with(|core| core.engine.request_notify(self.id, notify));
        self.soft.shared.hand_over();
    }

    /// Takes the events off the channel; answers how many there were.
    pub(super) fn acknowledge(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&*self.channel, &mut count) {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }
}

impl Drop for SoftCq {
    fn drop(&mut self) {
        self.soft.shared.with(|core| {
            core.channels.remove(&self.id);
            let _ = core.engine.destroy_cq(self.id);
        });
    }
}

/// A memory region. Dropped in use, it is revoked, and its memory is kept until it is not.
#[derive(Debug)]
pub(super) struct SoftMr {
    pd: Arc<SoftPd>,
    pub(super) registered: Registered,
    gone: bool,
}

impl SoftMr {
    pub(super) fn new(pd: &Arc<SoftPd>, memory: &Memory, access: Access) -> Result<Self> {
        let wanted = Registration {
            pd: pd.id,
            iova: Iova::new(memory.addr()),
            len: memory.len(),
            access,
            kind: memory.kind(),
        };
        let registered = pd.soft.shared.with(|core| {
            let registered = core.engine.register(wanted)?;
            core.memories.insert(registered.id, memory.clone());
            core.regions.insert(registered.lkey, registered.id);
            Ok(registered)
        });
        let registered = registered.map_err(|error: beeline_core::mr::RegisterError| {
            Error::refused("cannot register memory").because(error)
        })?;
        Ok(Self { pd: Arc::clone(pd), registered, gone: false })
    }

    /// On a local link it waits until `deadline` for the peer to fetch what packets name.
    pub(super) fn deregister(&mut self, deadline: Instant) -> Result<()> {
        let (pd, lkey) = (self.pd.id, self.registered.lkey);
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
                return Err(error.remedy("wait until the peer's READs are complete"));
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        let done = self.pd.soft.shared.with(|core| match core.lent(lkey) {
            0 => core.deregister(pd, lkey),
            // Another thread's work request came in between.
            lent => Err(DeregisterError::Busy { lkey, posted: 0, in_flight: lent }),
        });
        self.gone = done.is_ok();
        done.map_err(deregister_error)
    }

    pub(super) fn revoke(&self) -> u32 {
        let lkey = self.registered.lkey;
        self.pd.soft.shared.with(|core| core.engine.revoke(lkey)).unwrap_or(0)
    }

    pub(super) fn in_flight(&self) -> u32 {
        let lkey = self.registered.lkey;
        self.pd.soft.shared.with(|core| {
            let accesses = core.engine.in_flight(lkey).unwrap_or(0);
            accesses.saturating_add(core.lent(lkey))
        })
    }
}

impl Drop for SoftMr {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let (pd, lkey) = (self.pd.id, self.registered.lkey);
        self.pd.soft.shared.with(|core| {
            if !core.forget(pd, lkey) {
                let _ = core.engine.revoke(lkey);
                core.retired.push((pd, lkey));
            }
        });
    }
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct SoftQp {
    pub(super) pd: Arc<SoftPd>,
    pub(super) qpn: Qpn,
    _srq: Option<Arc<SoftSrq>>,
}

impl SoftQp {
    pub(super) fn new(
        pd: &Arc<SoftPd>,
        kind: QpKind,
        (send_cq, recv_cq): (&SoftCq, &SoftCq),
        caps: QpCaps,
        srq: Option<&Arc<SoftSrq>>,
    ) -> Result<Self> {
        let init = QpInit {
            kind,
            pd: pd.id,
            send_cq: send_cq.id,
            recv_cq: recv_cq.id,
            srq: srq.map(|srq| srq.id),
            max_send_wr: caps.max_send_wr,
            max_recv_wr: caps.max_recv_wr,
            max_send_sge: caps.max_send_sge,
            max_recv_sge: caps.max_recv_sge,
            max_inline: caps.max_inline,
        };
        let made = pd.soft.shared.with(|core| core.engine.create_qp(init));
        let qpn = made.map_err(|error| create_error("queue pair", error))?;
        Ok(Self { pd: Arc::clone(pd), qpn, _srq: srq.cloned() })
    }

    pub(super) fn state(&self) -> QpState {
        self.with(|core, qpn| core.engine.qp_state(qpn)).unwrap_or(QpState::Err)
    }

    pub(super) fn modify(&self, to: QpState, attr: &QpAttr) -> Result<()> {
        self.with(|core, qpn| core.engine.modify_qp(qpn, to, attr)).map_err(modify_error)
    }

    pub(super) fn post_send(&self, wr: SendWr) -> Result<()> {
        self.post(|core, qpn| core.engine.post_send(qpn, wr)).map_err(post_error)
    }

    pub(super) fn post_send_inline(&self, mut wr: SendWr) -> Result<()> {
        let posted = self.post(|core, qpn| {
            if let Payload::Sges(sges) = &wr.payload {
                wr.payload = Payload::Inline(gather(core, sges)?);
            }
            core.engine.post_send(qpn, wr)
        });
        posted.map_err(post_error)
    }

    pub(super) fn post_recv(&self, wr: RecvWr) -> Result<()> {
        self.post(|core, qpn| core.engine.post_recv(qpn, wr)).map_err(post_error)
    }

    fn post<T>(&self, work: impl FnOnce(&mut Core, Qpn) -> T) -> T {
        self.pd.soft.shared.post(|core| work(core, self.qpn))
    }

    fn with<T>(&self, work: impl FnOnce(&mut Core, Qpn) -> T) -> T {
        self.pd.soft.shared.with(|core| work(core, self.qpn))
    }
}

impl Drop for SoftQp {
    fn drop(&mut self) {
        let _ = self.with(|core, qpn| core.engine.destroy_qp(qpn));
    }
}

/// The bytes of a scatter/gather list of host memory.
fn gather(core: &Core, sges: &[Sge]) -> Result<Vec<u8>, PostError> {
    super::gather(sges, |lkey: Lkey| {
        core.regions.get(&lkey).and_then(|region| core.memories.get(*region)).cloned()
    })
}

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct SoftSrq {
    pub(super) pd: Arc<SoftPd>,
    id: SrqId,
}

impl SoftSrq {
    pub(super) fn new(pd: &Arc<SoftPd>, max_wr: u32, max_sge: u32) -> Result<Arc<Self>> {
        let made = pd.soft.shared.with(|core| core.engine.create_srq(pd.id, max_wr, max_sge));
        let id = made.map_err(|error| create_error("shared receive queue", error))?;
        Ok(Arc::new(Self { pd: Arc::clone(pd), id }))
    }

    pub(super) fn post_recv(&self, wr: RecvWr) -> Result<()> {
        let shared = &self.pd.soft.shared;
        shared.with(|core| core.engine.post_srq_recv(self.id, wr)).map_err(post_error)
    }

    pub(super) fn arm(&self, limit: u32) -> Result<()> {
        let shared = &self.pd.soft.shared;
        shared.with(|core| core.engine.arm_srq(self.id, limit)).map_err(post_error)
    }
}

impl Drop for SoftSrq {
    fn drop(&mut self) {
        let _ = self.pd.soft.shared.with(|core| core.engine.destroy_srq(self.id));
    }
}
