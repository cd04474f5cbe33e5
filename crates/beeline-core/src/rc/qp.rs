//! A queue pair: what its requester, completer and responder share.

use alloc::vec::Vec;
use core::net::IpAddr;

use crate::mr::{Access, PdId};
use crate::roce::packet::seal;
use crate::roce::{Head, Identification, Mtu, Path, Psn, Qpn, RnrTimer};
use crate::time::{Duration, Time};

use super::engine::{Event, Shared, Transmit};
use super::memory::{Owner, QpRef};
use super::queue::{CqId, RecvQueue, RecvWqe, SrqId};
use super::requester::Requester;
use super::responder::{Held, Responder};
use super::state::{ModifyError, QpAttr, QpKind, QpState};
use super::work::{Completion, CompletionOp, Status};

/// How a queue pair is made.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// What it is.
    pub kind: QpKind,
    /// Its protection domain.
    pub pd: PdId,
    /// Where sends are reported.
    pub send_cq: CqId,
    /// Where receives are reported.
    pub recv_cq: CqId,
    /// A shared receive queue; `max_recv_wr` and `max_recv_sge` are then ignored.
    pub srq: Option<SrqId>,
    /// Sends outstanding at most.
    pub max_send_wr: u32,
    /// Receives outstanding at most.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of a send at most.
    pub max_send_sge: u32,
    /// Scatter/gather elements of a receive at most.
    pub max_recv_sge: u32,
    /// Inline bytes of a send at most.
    pub max_inline: u32,
}

#[derive(Debug)]
pub(super) struct Qp {
    pub(super) qpn: Qpn,
    /// Names this life of the queue pair: answers to operations of an earlier one are not for it.
    pub(super) uid: u64,
    pub(super) init: QpInit,
    pub(super) state: QpState,
    pub(super) attrs: Attrs,
    pub(super) req: Requester,
    pub(super) resp: Responder,
    pub(super) rq: RecvQueue,
    /// Whether it stands in the engine's line of queue pairs with packets to send.
    pub(super) in_line: bool,
    /// Whether a request goes before a reply.
    request_next: bool,
    /// The deadline the engine has on its list.
    pub(super) listed: Option<Time>,
}

/// Attributes as they stand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attrs {
    pub(super) access: Access,
    pub(super) qkey: u32,
    pub(super) peer: Option<IpAddr>,
    pub(super) mtu: Mtu,
    pub(super) dest_qpn: Qpn,
    pub(super) min_rnr_timer: RnrTimer,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
}

impl Attrs {
    const fn new(mtu: Mtu) -> Self {
        Self {
            access: Access::LOCAL_READ,
            qkey: 0,
            peer: None,
            mtu,
            dest_qpn: Qpn::new(0),
            min_rnr_timer: RnrTimer::new(0),
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
        }
    }

    /// 4.096 us x 2^timeout, `None` for ever (IBA 9.9.2.1.2, C9-141).
    pub(super) fn ack_timeout(&self) -> Option<Duration> {
        (self.timeout > 0).then(|| Duration::from_nanos(4096 << self.timeout.min(31)))
    }
}

impl Qp {
    pub(super) fn new(qpn: Qpn, uid: u64, init: QpInit, mtu: Mtu) -> Self {
        let rq = match init.srq {
            Some(_) => RecvQueue::new(0, 0),
            None => RecvQueue::new(init.max_recv_wr, init.max_recv_sge as usize),
        };
        Self {
            qpn,
            uid,
            init,
            state: QpState::Reset,
            attrs: Attrs::new(mtu),
            req: Requester::new(),
            resp: Responder::new(),
            rq,
            in_line: false,
            request_next: true,
            listed: None,
        }
    }

    pub(super) const fn id(&self) -> QpRef {
        QpRef { qpn: self.qpn, uid: self.uid }
    }

    pub(super) fn modify(
        &mut self,
        shared: &mut Shared,
        to: QpState,
        attr: &QpAttr,
    ) -> Result<(), ModifyError> {
        super::state::check_modify(self.init.kind, self.state, to, attr, &shared.attr_limits())?;
        match to {
            QpState::Reset => self.reset(shared),
            QpState::Err => {
                self.resp.forget_replies();
                self.enter_error(shared);
            }
            _ => {
                self.take(attr);
                self.state = to;
            }
        }
        Ok(())
    }

    fn take(&mut self, attr: &QpAttr) {
        let attrs = &mut self.attrs;
        attrs.access = attr.access.unwrap_or(attrs.access);
        attrs.qkey = attr.qkey.unwrap_or(attrs.qkey);
        attrs.peer = attr.peer.or(attrs.peer);
        attrs.mtu = attr.path_mtu.unwrap_or(attrs.mtu);
        attrs.dest_qpn = attr.dest_qpn.unwrap_or(attrs.dest_qpn);
        attrs.min_rnr_timer = attr.min_rnr_timer.unwrap_or(attrs.min_rnr_timer);
        attrs.timeout = attr.timeout.unwrap_or(attrs.timeout);
        attrs.retry_cnt = attr.retry_cnt.unwrap_or(attrs.retry_cnt);
        attrs.rnr_retry = attr.rnr_retry.unwrap_or(attrs.rnr_retry);
        attrs.max_rd_atomic = attr.max_rd_atomic.unwrap_or(attrs.max_rd_atomic);
        attrs.max_dest_rd_atomic = attr.max_dest_rd_atomic.unwrap_or(attrs.max_dest_rd_atomic);
        if let Some(psn) = attr.rq_psn {
            self.resp.start(psn);
        }
        if let Some(psn) = attr.sq_psn {
            self.req.start(psn, attrs);
        }
    }

    /// Forgets everything posted, without completions (IBA 10.3.1.1). Operations under way keep their
    /// regions pinned until they are answered; the new `uid` makes their answers miss this queue pair.
    pub(super) fn reset(&mut self, shared: &mut Shared) {
        self.req.abandon(shared);
        let taken = self.resp.abandon(shared);
        if let Some(queue) = self.recv_queue(shared) {
            queue.consumed = queue.consumed.saturating_sub(taken);
        }
        self.rq.clear(&mut shared.mrs);
        self.uid = shared.next_uid();
        self.req = Requester::new();
        self.resp = Responder::new();
        self.attrs = Attrs::new(shared.config.mtu);
        self.state = QpState::Reset;
    }

    /// Moves to ERR: nothing new is sent, and everything posted is flushed in order as soon as no memory
    /// operation can touch its buffers any more (IBA 10.3.1.7). Replies already owed still go out.
    pub(super) fn enter_error(&mut self, shared: &mut Shared) {
        if self.state == QpState::Err {
            return;
        }
        self.state = QpState::Err;
        self.req.stop(shared);
        if self.init.srq.is_some() {
            shared.raise(Event::LastWqeReached(self.qpn));
        }
        if let Some(wqe) = self.resp.current_receive() {
            self.hold_receive(wqe, Status::Flushed);
        }
        self.flush_receives();
        self.settle_receives(shared);
        self.settle_sends(shared);
    }

    /// Lines up every posted receive to be flushed.
    pub(super) fn flush_receives(&mut self) {
        while let Some(wqe) = self.rq.take() {
            self.hold_receive(wqe, Status::Flushed);
        }
    }

    /// Lines up a receive that ends in an error, behind the writes that may still touch its buffers.
    pub(super) fn hold_receive(&mut self, wqe: RecvWqe, status: Status) {
        let completion = Completion {
            wr_id: wqe.id,
            status,
            op: CompletionOp::Recv,
            byte_len: 0,
            imm: None,
            qpn: self.qpn,
            src_qp: None,
        };
        self.resp.hold(Held::new(wqe, completion, true));
    }

    /// Reports the receives whose bytes have arrived in memory, in order.
    pub(super) fn settle_receives(&mut self, shared: &mut Shared) {
        while let Some(mut held) = self.resp.next_settled() {
            held.wqe.release(&mut shared.mrs);
            if let Some(queue) = self.recv_queue(shared) {
                queue.consumed = queue.consumed.saturating_sub(1);
            }
            shared.complete(self.init.recv_cq, held.completion, held.solicited);
        }
    }

    /// The receive queue in use: the shared one or its own.
    pub(super) fn recv_queue<'a>(
        &'a mut self,
        shared: &'a mut Shared,
    ) -> Option<&'a mut RecvQueue> {
        match self.init.srq {
            Some(srq) => shared.srqs.get_mut(&srq.0).map(|srq| &mut srq.queue),
            None => Some(&mut self.rq),
        }
    }

    /// The next datagram to send. Requests and replies take turns where both are there: neither side's
    /// progress waits for the other's, and an answer of the consumer does not wait for an ACK.
    pub(super) fn transmit(&mut self, shared: &mut Shared, now: Time) -> Option<Transmit> {
        let request = if self.request_next { self.next_request(shared, now) } else { None };
        let was_request = request.is_some();
        let sent = match request.or_else(|| self.next_reply(shared)) {
            Some(sent) => sent,
            None => self.next_request(shared, now)?,
        };
        self.request_next = !(was_request && self.resp.has_reply());
        self.pump(shared);
        Some(sent)
    }

    /// Whether [`transmit`](Self::transmit) would answer something.
    pub(super) fn has_packets(&self) -> bool {
        self.resp.has_reply() || self.req.has_request()
    }

    /// Makes as many packets as the windows allow.
    pub(super) fn pump(&mut self, shared: &mut Shared) {
        self.expand_replies(shared);
        // What is done makes room and lifts fences; what is built may find a fault to report.
        self.settle_sends(shared);
        self.build_requests(shared);
        self.settle_sends(shared);
    }

    /// The answer to one of its memory operations.
    pub(super) fn on_memory(
        &mut self,
        shared: &mut Shared,
        owner: Owner,
        buffer: Vec<u8>,
        result: Result<u64, super::memory::MemFault>,
    ) {
        match owner {
            Owner::Request { seq } => {
                self.on_request_payload(shared, seq, buffer, referenced(result));
            }
            Owner::Result { wqe } => {
                shared.recycle(buffer);
                self.on_result_stored(wqe, result.is_ok());
            }
            Owner::Reply { seq } => self.on_reply_payload(shared, seq, buffer, referenced(result)),
            Owner::Inbound { seq, psn } => {
                shared.recycle(buffer);
                self.on_inbound_stored(shared, seq, psn, result.is_ok());
            }
            Owner::Atomic { seq, psn } => {
                shared.recycle(buffer);
                self.on_atomic_done(shared, seq, psn, result.ok());
            }
        }
        self.settle_receives(shared);
        self.pump(shared);
    }

    /// When [`on_timeout`](Self::on_timeout) is to be called next.
    pub(super) fn deadline(&self) -> Option<Time> {
        self.req.deadline()
    }

    /// The path to the peer.
    pub(super) fn path(&self, shared: &Shared) -> Path {
        let local = shared.config.local;
        path(shared, self.attrs.peer.unwrap_or(local))
    }
}

/// The path from this NIC to `to`.
pub(super) fn path(shared: &Shared, to: IpAddr) -> Path {
    Path {
        src: shared.config.local,
        dst: to,
        src_port: shared.config.src_port,
        identification: if shared.config.shared_memory {
            Identification::Absent
        } else {
            Identification::Known(0)
        },
    }
}

/// How many bytes a memory operation gave by reference; `None` when it failed.
fn referenced(result: Result<u64, super::memory::MemFault>) -> Option<u32> {
    u32::try_from(result.ok()?).ok()
}

/// A packet without payload, closed.
pub(super) fn bare(shared: &mut Shared, path: &Path, mut head: Head) -> Vec<u8> {
    let mut datagram = shared.buffer();
    head.emit(0, &mut datagram);
    seal(path, &mut datagram, 0);
    datagram
}

/// The range of a message that packet `index` carries: its first byte and its length.
pub(super) fn segment(mtu: Mtu, len: u32, index: u32) -> (u32, u32) {
    // Fits: index is below `mtu.packets(len)`, and a message is at most 2^31 bytes long.
    let start = index.saturating_mul(mtu.bytes()).min(len);
    (start, mtu.bytes().min(len - start))
}

/// The sequence number of packet `index` of a message that starts at `first`.
pub(super) const fn psn_of(first: Psn, index: u32) -> Psn {
    first.add(index)
}
