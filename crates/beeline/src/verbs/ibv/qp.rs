//! Queue pairs.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use beeline_core::mr::Access;
use beeline_core::rc::{
    CompletionOp, CreateError, INLINE_BYTES_MAX, Payload, PostError, QUEUE_ENTRIES_MAX, QpAttr,
    QpKind, QpState, RecvWr, SGES_MAX, SendLimits, SendOp, SendWr, Sge, check_modify, check_send,
};
use beeline_core::roce::{Mtu, Qpn};
use beeline_sys::ibverbs as sys;
use rustix::io::Errno;

use super::super::objects::{QpCaps, create_error, gather, modify_error, post_error};
use super::cq::{Cq, Queues};
use super::device::{Device, Pd};
use super::driver_error;
use super::queue::{Held, Posted, RecvQueue, SendQueue};
use super::srq::{Last, Srq};
use crate::error::{Error, Result};
use crate::{lock, read_lock};

/// Times that a queue pair is asked for with half the inline bytes, where a NIC refuses so many.
const INLINE_HALVINGS: u32 = 14;

/// A queue pair of the kernel's.
#[derive(Debug)]
pub(in crate::verbs) struct Qp {
    // Destroyed before what is posted lets go of its regions, and before its queues are left.
    qp: sys::Qp,
    member: Member,
    queues: Arc<Queues>,
    pd: Arc<Pd>,
    caps: QpCaps,
    set: Mutex<Set>,
    srq: Option<Arc<Srq>>,
}

/// A queue pair as its completion queues and its device know it.
#[derive(Debug)]
struct Member {
    qpn: u32,
    queues: Arc<Queues>,
    device: Arc<Device>,
    cqs: [Arc<Cq>; 2],
}

/// What was set, as far as posting depends on it.
#[derive(Clone, Copy, Debug)]
struct Set {
    state: QpState,
    mtu: Mtu,
    max_rd_atomic: u8,
}

impl Qp {
    pub(in crate::verbs) fn new(
        pd: &Arc<Pd>,
        kind: QpKind,
        (send_cq, recv_cq): (&Arc<Cq>, &Arc<Cq>),
        caps: QpCaps,
        srq: Option<&Arc<Srq>>,
    ) -> Result<Self> {
        check_caps(&pd.device, &caps, srq.is_some())
            .map_err(|error| create_error("queue pair", error))?;
        let (qp, max_inline) = make(pd, kind, (&send_cq.cq, &recv_cq.cq), &caps, srq)?;
        let recv = match srq {
            Some(srq) => Arc::clone(&srq.posted),
            None => Arc::new(Mutex::new(RecvQueue::new(caps.max_recv_wr, caps.max_recv_sge))),
        };
        let (send, failed) = (Mutex::new(SendQueue::new()), AtomicBool::new(false));
        let last = srq.map(|_| Last::default());
        let queues = Arc::new(Queues { kind, send, recv, failed, last });
        let cqs = [send_cq, recv_cq].map(Arc::clone);
        let member = Member::join(qp.qpn(), &queues, &pd.device, cqs);
        Ok(Self {
            qp,
            member,
            queues,
            pd: Arc::clone(pd),
            caps: QpCaps { max_inline, ..caps },
            set: Mutex::new(Set { state: QpState::Reset, mtu: pd.device.mtu, max_rd_atomic: 0 }),
            srq: srq.cloned(),
        })
    }

    pub(in crate::verbs) fn qpn(&self) -> Qpn {
        Qpn::new(self.qp.qpn())
    }

    /// Address and largest path MTU of the port.
    pub(in crate::verbs) fn port(&self) -> (IpAddr, Mtu) {
        (self.pd.device.local, self.pd.device.mtu)
    }

    /// As the kernel has it: a queue pair fails without being told to.
    pub(in crate::verbs) fn state(&self) -> QpState {
        if self.queues.failed.load(Ordering::Acquire) {
            return QpState::Err;
        }
        match self.qp.state() {
            Ok(0) => QpState::Reset,
            Ok(1) => QpState::Init,
            Ok(2) => QpState::Rtr,
            Ok(3) => QpState::Rts,
            Ok(4) => QpState::Sqd,
            Ok(5) => QpState::Sqe,
            _ => QpState::Err,
        }
    }

    pub(in crate::verbs) fn modify(&self, to: QpState, attr: &QpAttr) -> Result<()> {
        let device = &self.pd.device;
        let mut set = lock(&self.set);
        let from = self.state();
        check_modify(self.queues.kind, from, to, attr, &device.attr_limits())
            .map_err(modify_error)?;
        match (&self.srq, to) {
            (Some(_), QpState::Reset) => {
                self.give_back();
                // Receives that it had taken are told, sends that are reset are not.
                lock(&self.queues.send).clear();
                self.member.drain();
            }
            // From here on it may take receives.
            (Some(_), QpState::Rtr) => self.queues.begin_to_take(),
            _ => {}
        }
        self.qp.modify(change(device, to, attr)).map_err(|error| {
            let peer = attr.peer.map(|peer| format!(" towards {peer}")).unwrap_or_default();
            let action = format!("move a queue pair from {from} to {to}{peer}");
            let error = driver_error(device.name(), &action, error);
            match attr.peer {
                Some(_) => error.remedy(format!(
                    "see that the peer answers at its address, from {} of this machine",
                    device.local
                )),
                None => error,
            }
        })?;
        set.state = to;
        set.mtu = attr.path_mtu.unwrap_or(set.mtu);
        set.max_rd_atomic = attr.max_rd_atomic.unwrap_or(set.max_rd_atomic);
        if to == QpState::Reset {
            self.queues.failed.store(false, Ordering::Release);
            lock(&self.queues.send).clear();
            match &self.srq {
                None => lock(&self.queues.recv).clear(),
                Some(_) => self.queues.end_taking(),
            }
            if let Some(last) = &self.queues.last {
                last.begin_again();
            }
        }
        Ok(())
    }

    /// Has the receives that it took from the shared queue come back as completions. A driver may forget what
    /// is under way when a queue pair is reset or destroyed without this, and without taking those completions.
    fn give_back(&self) {
        let Some(last) = &self.queues.last else { return };
        // One that never could receive has taken none, and may not go to ERR either.
        if matches!(self.state(), QpState::Reset | QpState::Init) {
            return;
        }
        last.expect();
        if self.qp.modify(sys::QpChange { state: 6, ..sys::QpChange::default() }).is_ok() {
            last.wait(|| self.pd.device.take_events());
        }
    }

    pub(in crate::verbs) fn post_send(&self, wr: SendWr) -> Result<()> {
        let Set { state, mtu, max_rd_atomic } = *lock(&self.set);
        let to = match &wr.to {
            Some(to) if self.queues.kind == QpKind::Ud => Some(self.pd.handle(to.addr)?),
            _ => None,
        };
        let mut queue = lock(&self.queues.send);
        let limits = SendLimits {
            kind: self.queues.kind,
            state,
            queued: queue.len(),
            max_send_wr: self.caps.max_send_wr,
            max_send_sge: self.caps.max_send_sge,
            max_inline: self.caps.max_inline,
            mtu,
            max_rd_atomic,
        };
        let len = check_send(&wr, &limits).map_err(post_error)?;
        let (sges, held) = match &wr.payload {
            Payload::Sges(sges) => (elements(sges), self.pd.device.hold(sges)),
            Payload::Inline(_) => (Elements::default(), Vec::new()),
        };
        let data = match &wr.payload {
            Payload::Sges(_) => sys::Data::Sges(sges.as_slice()),
            Payload::Inline(bytes) => sys::Data::Inline(bytes),
        };
        let to_peer = wr.to.as_ref().zip(to.as_deref());
        let to_peer = to_peer.map(|(to, handle)| (handle, to.qpn.as_u32(), to.qkey));
        let send = request(queue.next_name(), &wr, data, to_peer).map_err(post_error)?;
        queue.push(Posted { id: wr.id, op: wr.op.completion(), len, held, ah: to.clone() });
        self.qp.post_send(&send).map_err(|error| {
            queue.take_back();
            self.pd.device.post_failed(error, self.caps.max_send_wr)
        })
    }

    pub(in crate::verbs) fn post_send_inline(&self, mut wr: SendWr) -> Result<()> {
        if let Payload::Sges(sges) = &wr.payload {
            let find = |lkey| self.pd.device.region(lkey).map(|region| region.memory.clone());
            wr.payload = Payload::Inline(gather(sges, find).map_err(post_error)?);
        }
        self.post_send(wr)
    }

    pub(in crate::verbs) fn post_recv(&self, wr: RecvWr) -> Result<()> {
        if self.srq.is_some() {
            return Err(post_error(PostError::SharedReceives));
        }
        let state = lock(&self.set).state;
        if state == QpState::Reset {
            return Err(post_error(PostError::State { state }));
        }
        let post = |name, sges: &[sys::Sge]| self.qp.post_recv(name, sges);
        receive(&self.pd.device, &self.queues.recv, &wr, post)
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.give_back();
        self.member.drain();
    }
}

impl Member {
    fn join(qpn: u32, queues: &Arc<Queues>, device: &Arc<Device>, cqs: [Arc<Cq>; 2]) -> Self {
        for cq in &cqs {
            cq.join(qpn, queues);
        }
        if queues.last.is_some() {
            lock(&device.takers).insert(qpn, Arc::downgrade(queues));
        }
        Self { qpn, queues: Arc::clone(queues), device: Arc::clone(device), cqs }
    }

    fn drain(&self) {
        for cq in &self.cqs {
            cq.drain();
        }
    }
}

impl Drop for Member {
    /// The queue pair is destroyed: no completion of it comes any more, and its number may be another's.
    fn drop(&mut self) {
        for cq in &self.cqs {
            cq.drain();
            cq.leave(self.qpn, &self.queues);
        }
        if self.queues.last.is_some() {
            let mut takers = lock(&self.device.takers);
            if takers
                .get(&self.qpn)
                .is_some_and(|known| known.as_ptr() == Arc::as_ptr(&self.queues))
            {
                takers.remove(&self.qpn);
            }
            drop(takers);
            self.queues.end_taking();
        }
    }
}

impl Device {
    /// Holds the regions that elements name. A key that is nobody's is posted all the same, and fails.
    fn hold(&self, sges: &[Sge]) -> Vec<Held> {
        let regions = read_lock(&self.regions);
        sges.iter().filter_map(|sge| regions.get(&sge.lkey)).map(Held::new).collect()
    }

    fn post_failed(&self, error: std::io::Error, capacity: u32) -> Error {
        if error.raw_os_error() == Some(Errno::NOMEM.raw_os_error()) {
            return post_error(PostError::QueueFull { capacity });
        }
        driver_error(self.name(), "post a work request", error)
    }
}

/// Posts a receive to a queue, its own or a shared one.
pub(super) fn receive(
    device: &Device,
    posted: &Mutex<RecvQueue>,
    wr: &RecvWr,
    post: impl FnOnce(u64, &[sys::Sge]) -> std::io::Result<()>,
) -> Result<()> {
    let mut queue = lock(posted);
    let (given, max) = (wr.sges.len(), queue.sges_max() as usize);
    if given > max {
        return Err(post_error(PostError::TooManySges { given, max }));
    }
    let capacity = queue.capacity();
    let held = device.hold(&wr.sges);
    let entry = Posted { id: wr.id, op: CompletionOp::Recv, len: 0, held, ah: None };
    let name = queue.push(entry).map_err(|_| post_error(PostError::QueueFull { capacity }))?;
    post(name, elements(&wr.sges).as_slice()).map_err(|error| {
        drop(queue.take_back(name));
        device.post_failed(error, capacity)
    })?;
    queue.accepted();
    Ok(())
}

fn check_caps(device: &Device, caps: &QpCaps, shared: bool) -> Result<(), CreateError> {
    let attr = &device.attr;
    entries("max_send_wr", caps.max_send_wr, attr.max_qp_wr)?;
    sges_most("max_send_sge", caps.max_send_sge, attr.max_sge)?;
    if caps.max_inline > INLINE_BYTES_MAX {
        let (value, max) = (caps.max_inline, INLINE_BYTES_MAX);
        return Err(CreateError::TooMany { what: "max_inline", value, max });
    }
    if !shared {
        entries("max_recv_wr", caps.max_recv_wr, attr.max_qp_wr)?;
        sges_most("max_recv_sge", caps.max_recv_sge, attr.max_sge)?;
    }
    Ok(())
}

pub(super) fn entries(what: &'static str, value: u32, most: u32) -> Result<(), CreateError> {
    within(what, value, most.min(QUEUE_ENTRIES_MAX))
}

pub(super) fn sges_most(what: &'static str, value: u32, most: u32) -> Result<(), CreateError> {
    within(what, value, most.min(SGES_MAX as u32))
}

fn within(what: &'static str, value: u32, max: u32) -> Result<(), CreateError> {
    if value == 0 || value > max { Err(CreateError::TooMany { what, value, max }) } else { Ok(()) }
}

/// Makes the queue pair; answers how many inline bytes it takes. A NIC that refuses so many is asked for
/// fewer: the others of a request's limits are known beforehand, this one is not.
fn make(
    pd: &Pd,
    kind: QpKind,
    cqs: (&Arc<sys::Cq>, &Arc<sys::Cq>),
    caps: &QpCaps,
    srq: Option<&Arc<Srq>>,
) -> Result<(sys::Qp, u32)> {
    let number = match kind {
        QpKind::Rc => sys::Qp::RC,
        QpKind::Ud => sys::Qp::UD,
    };
    let shared = srq.is_some();
    let srq = srq.map(|srq| &srq.srq);
    let mut max_inline = caps.max_inline;
    for _ in 0..INLINE_HALVINGS {
        let caps = sys::Caps {
            max_send_wr: caps.max_send_wr,
            max_recv_wr: if shared { 0 } else { caps.max_recv_wr },
            max_send_sge: caps.max_send_sge,
            max_recv_sge: if shared { 0 } else { caps.max_recv_sge },
            max_inline,
        };
        match sys::Qp::new(&pd.pd, number, cqs, srq, caps) {
            Ok((qp, given)) => return Ok((qp, max_inline.min(given.max_inline))),
            Err(_) if max_inline > 0 => max_inline /= 2,
            Err(error) => return Err(driver_error(pd.device.name(), "create a queue pair", error)),
        }
    }
    Err(Error::refused("the NIC takes no queue pair of these capacities"))
}

/// The attributes of a transition as the kernel takes them.
fn change(device: &Device, to: QpState, attr: &QpAttr) -> sys::QpChange {
    let state = match to {
        QpState::Reset => 0,
        QpState::Init => 1,
        QpState::Rtr => 2,
        QpState::Rts => 3,
        QpState::Sqd => 4,
        QpState::Sqe => 5,
        QpState::Err => 6,
    };
    sys::QpChange {
        state,
        pkey_index: attr.pkey_index,
        // To a consumer a NIC is one port; which of the device's, was chosen when it was opened.
        port: attr.port.map(|_| device.port),
        access: attr.access.map(access_flags),
        qkey: attr.qkey,
        path: attr.peer.map(|peer| device.path(peer)),
        path_mtu: attr.path_mtu.map(|mtu| mtu.bytes().ilog2().saturating_sub(7)),
        dest_qpn: attr.dest_qpn.map(Qpn::as_u32),
        rq_psn: attr.rq_psn.map(|psn| psn.as_u32()),
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer.map(|timer| timer.code()),
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        sq_psn: attr.sq_psn.map(|psn| psn.as_u32()),
        max_rd_atomic: attr.max_rd_atomic,
    }
}

/// `enum ibv_access_flags`, without those that are not rights.
pub(super) fn access_flags(access: Access) -> u32 {
    [Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC]
        .into_iter()
        .enumerate()
        .filter(|(_, right)| access.contains(*right))
        .fold(0, |flags, (bit, _)| flags | 1 << bit)
}

/// A scatter/gather list as the kernel takes it.
struct Elements {
    list: [sys::Sge; SGES_MAX],
    len: usize,
}

impl Default for Elements {
    fn default() -> Self {
        Self { list: [sys::Sge::default(); SGES_MAX], len: 0 }
    }
}

impl Elements {
    fn as_slice(&self) -> &[sys::Sge] {
        self.list.get(..self.len).unwrap_or(&[])
    }
}

/// Elements without a byte are left out: to some NICs a length of 0 means 2 GiB.
fn elements(sges: &[Sge]) -> Elements {
    let mut elements = Elements::default();
    let filled = sges.iter().filter(|sge| sge.len > 0);
    for (place, sge) in elements.list.iter_mut().zip(filled) {
        let Sge { addr, len, lkey } = *sge;
        *place = sys::Sge { addr: addr.as_u64(), length: len, lkey: lkey.as_u32() };
        elements.len += 1;
    }
    elements
}

/// A send work request as the kernel takes it.
fn request<'a>(
    name: u64,
    wr: &SendWr,
    data: sys::Data<'a>,
    to: Option<(&'a sys::Ah, u32, u32)>,
) -> Result<sys::SendWr<'a>, PostError> {
    let (mut remote, mut atomic) = ((0, 0), (0, 0));
    let mut name_remote = |at: &beeline_core::rc::Remote| {
        remote = (at.addr.as_u64(), at.rkey.as_u32());
    };
    let (opcode, imm) = match &wr.op {
        SendOp::Send { imm: None } => (sys::Opcode::Send, None),
        SendOp::Send { imm } => (sys::Opcode::SendImm, *imm),
        SendOp::Write { remote, imm } => {
            name_remote(remote);
            (if imm.is_some() { sys::Opcode::WriteImm } else { sys::Opcode::Write }, *imm)
        }
        SendOp::Read { remote } => {
            name_remote(remote);
            (sys::Opcode::Read, None)
        }
        SendOp::CompareSwap { remote, compare, swap } => {
            name_remote(remote);
            atomic = (*compare, *swap);
            (sys::Opcode::CompareSwap, None)
        }
        SendOp::FetchAdd { remote, add } => {
            name_remote(remote);
            atomic = (*add, 0);
            (sys::Opcode::FetchAdd, None)
        }
        _ => return Err(PostError::Unsupported { what: "the operation" }),
    };
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    Ok(sys::SendWr {
        id: name,
        opcode,
        flags: flag(wr.fence, 1) | flag(wr.signaled, 2) | flag(wr.solicited, 4),
        imm: imm.unwrap_or(0),
        remote,
        atomic,
        to,
        data,
    })
}
