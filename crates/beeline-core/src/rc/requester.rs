//! The requester: cuts work requests into packets and sends them in order, again where needed.
//!
//! IBA 9.7.2 "Packet sequence numbers", 9.7.3 "Requester: generating request packets", 9.9.2 "Requester
//! side error behavior".
//!
//! A work request of `n` packets takes `n` sequence numbers, a READ those of its responses (9.7.3.1.2,
//! C9-57). Going back after a loss only moves a cursor: packets are made again from memory, with the
//! sequence numbers and opcodes they had (C9-62).

mod build;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::mr::Lkey;
use crate::roce::Psn;
use crate::roce::packet::seal;
use crate::time::Time;

use super::engine::{Shared, Transmit};
use super::limits::{SendLimits, check_send};
use super::qp::{Attrs, Qp};
use super::state::{QpKind, QpState};
use super::work::{Completion, Payload, PostError, SendOp, SendWr, Status};

/// Packets made and not yet handed out, at most: how far memory is read ahead.
const LINE_MAX: usize = 64;

/// Result operations (READ responses on their way into memory) above which no READ is sent.
const RESULTS_MAX: u32 = 512;

#[derive(Debug)]
pub(super) struct Requester {
    pub(super) queue: VecDeque<SendWqe>,
    /// Number of the work request at the front of `queue`; numbers are never reused.
    pub(super) base: u64,
    /// The oldest sequence number not acknowledged, and the work request it belongs to.
    pub(super) una: Psn,
    pub(super) una_wqe: u64,
    /// What is to be made into a packet next.
    cursor_wqe: u64,
    cursor_packet: u32,
    /// The next work request that gets sequence numbers, and its first one.
    numbered: u64,
    next_psn: Psn,
    /// One past the highest sequence number handed out: what the peer may acknowledge.
    pub(super) sent_end: Psn,
    line: VecDeque<Outgoing>,
    line_front: u64,
    /// Ends of the READs and atomics outstanding, oldest first.
    reads: VecDeque<Psn>,
    since_ack_request: u32,
    results: u32,
    pub(super) retry_left: u8,
    pub(super) rnr_left: u8,
    pub(super) rnr_until: Option<Time>,
    pub(super) ack_by: Option<Time>,
    /// Where the last repeat started: one gap is not repeated twice before a timeout.
    pub(super) retried_at: Option<Psn>,
}

/// A posted send work request.
#[derive(Debug)]
pub(super) struct SendWqe {
    pub(super) wr: SendWr,
    pub(super) len: u32,
    pub(super) packets: u32,
    /// Set when the cursor first reaches it.
    pub(super) first: Option<Psn>,
    /// Results on their way into its buffers.
    pub(super) results: u32,
    /// What it will fail with once everything before it is done.
    pub(super) fault: Option<Status>,
    held: Vec<Lkey>,
}

impl SendWqe {
    fn sges(&self) -> &[super::work::Sge] {
        match &self.wr.payload {
            Payload::Sges(sges) => sges,
            Payload::Inline(_) => &[],
        }
    }
}

/// A request packet made and not yet handed out.
#[derive(Debug)]
struct Outgoing {
    /// One past the last sequence number it covers.
    end: Psn,
    /// `None` while its payload is being read.
    datagram: Option<Vec<u8>>,
    wqe: u64,
    to: Option<super::work::Destination>,
}

impl Requester {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            base: 0,
            una: Psn::default(),
            una_wqe: 0,
            cursor_wqe: 0,
            cursor_packet: 0,
            numbered: 0,
            next_psn: Psn::default(),
            sent_end: Psn::default(),
            line: VecDeque::new(),
            line_front: 0,
            reads: VecDeque::new(),
            since_ack_request: 0,
            results: 0,
            retry_left: 0,
            rnr_left: 0,
            rnr_until: None,
            ack_by: None,
            retried_at: None,
        }
    }

    /// Sets the first sequence number and the counters, on the way to RTS.
    pub(super) fn start(&mut self, psn: Psn, attrs: &Attrs) {
        self.una = psn;
        self.next_psn = psn;
        self.sent_end = psn;
        self.retry_left = attrs.retry_cnt;
        self.rnr_left = attrs.rnr_retry;
    }

    /// Gives back everything it holds.
    pub(super) fn abandon(&mut self, shared: &mut Shared) {
        self.stop(shared);
        for wqe in self.queue.drain(..) {
            release(shared, wqe.held);
        }
    }

    /// Sends nothing more.
    pub(super) fn stop(&mut self, shared: &mut Shared) {
        self.drop_line(shared);
        self.reads.clear();
        self.ack_by = None;
        self.rnr_until = None;
    }

    pub(super) fn wqe(&self, number: u64) -> Option<&SendWqe> {
        self.queue.get(usize::try_from(number.checked_sub(self.base)?).ok()?)
    }

    pub(super) fn wqe_mut(&mut self, number: u64) -> Option<&mut SendWqe> {
        self.queue.get_mut(usize::try_from(number.checked_sub(self.base)?).ok()?)
    }

    #[cfg(test)]
    pub(super) fn start_numbers_at(&mut self, number: u64) {
        (self.base, self.una_wqe, self.cursor_wqe, self.numbered) =
            (number, number, number, number);
        self.line_front = number;
    }

    /// The work request under the cursor.
    pub(super) fn next_wqe(&self) -> Option<&SendWqe> {
        self.wqe(self.cursor_wqe)
    }

    pub(super) fn deadline(&self) -> Option<Time> {
        self.rnr_until.or(self.ack_by)
    }

    pub(super) fn has_request(&self) -> bool {
        self.line.front().is_some_and(|packet| packet.datagram.is_some())
    }

    pub(super) fn each_unsent(&self, show: &mut impl FnMut(&[u8])) {
        self.line.iter().filter_map(|packet| packet.datagram.as_deref()).for_each(show);
    }

    /// Whether a READ or atomic before work request `number` is not done.
    fn reads_before(&self, number: u64) -> bool {
        let before = number.saturating_sub(self.base) as usize;
        self.queue.iter().take(before).any(|wqe| wqe.wr.op.is_read_or_atomic())
    }

    /// Goes back to the oldest packet not acknowledged.
    pub(super) fn go_back(&mut self, shared: &mut Shared) {
        shared.counters.repeats += 1;
        self.drop_line(shared);
        self.reads.clear();
        self.since_ack_request = 0;
        (self.cursor_wqe, self.cursor_packet) = (self.una_wqe, self.una_packet());
    }

    /// After progress: forgets packets made again in vain, and moves a cursor that fell behind.
    pub(super) fn catch_up(&mut self, shared: &mut Shared) {
        while self.reads.front().is_some_and(|end| self.una.since(*end) >= 0) {
            self.reads.pop_front();
        }
        while self.line.front().is_some_and(|packet| self.una.since(packet.end) >= 0) {
            self.line_front += 1;
            if let Some(Outgoing { datagram: Some(datagram), .. }) = self.line.pop_front() {
                shared.recycle(datagram);
            }
        }
        let una = (self.una_wqe, self.una_packet());
        if (self.cursor_wqe, self.cursor_packet) < una {
            (self.cursor_wqe, self.cursor_packet) = una;
        }
    }

    fn una_packet(&self) -> u32 {
        let first = self.wqe(self.una_wqe).and_then(|wqe| wqe.first);
        first.map_or(0, |first| self.una.ahead_of(first))
    }

    fn drop_line(&mut self, shared: &mut Shared) {
        self.line_front += self.line.len() as u64;
        for packet in self.line.drain(..) {
            if let Some(datagram) = packet.datagram {
                shared.recycle(datagram);
            }
        }
    }

    fn enqueue(
        &mut self,
        end: Psn,
        to: Option<super::work::Destination>,
        datagram: Option<Vec<u8>>,
    ) {
        self.line.push_back(Outgoing { end, datagram, wqe: self.cursor_wqe, to });
    }

    /// Moves the cursor behind packet `end - 1` of a work request of `packets`.
    pub(super) fn advance_cursor(&mut self, end: u32, packets: u32) {
        (self.cursor_wqe, self.cursor_packet) =
            if end >= packets { (self.cursor_wqe + 1, 0) } else { (self.cursor_wqe, end) };
    }
}

impl Qp {
    pub(super) fn post_send(&mut self, shared: &mut Shared, wr: SendWr) -> Result<(), PostError> {
        let len = self.check_send(&wr)?;
        let lkeys = match &wr.payload {
            Payload::Sges(sges) => sges.as_slice(),
            Payload::Inline(_) => &[],
        };
        let held = lkeys.iter().map(|sge| sge.lkey).filter(|key| shared.mrs.hold(*key)).collect();
        let packets = match self.init.kind {
            QpKind::Rc
                if !matches!(wr.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) =>
            {
                self.attrs.mtu.packets(len)
            }
            _ => 1,
        };
        let wqe = SendWqe { wr, len, packets, first: None, results: 0, fault: None, held };
        self.req.queue.push_back(wqe);
        if self.state == QpState::Err {
            self.settle_sends(shared);
        } else {
            self.build_requests(shared);
            self.settle_sends(shared);
        }
        Ok(())
    }

    /// Whether a work request is one that this queue pair takes; answers its length.
    fn check_send(&self, wr: &SendWr) -> Result<u32, PostError> {
        let limits = SendLimits {
            kind: self.init.kind,
            state: self.state,
            queued: self.req.queue.len(),
            max_send_wr: self.init.max_send_wr,
            max_send_sge: self.init.max_send_sge,
            max_inline: self.init.max_inline,
            mtu: self.attrs.mtu,
            max_rd_atomic: self.attrs.max_rd_atomic,
        };
        check_send(wr, &limits)
    }

    pub(super) fn on_request_payload(
        &mut self,
        shared: &mut Shared,
        seq: u64,
        mut datagram: Vec<u8>,
        referenced: Option<u32>,
    ) {
        let place = seq.checked_sub(self.req.line_front).and_then(|at| usize::try_from(at).ok());
        let Some(packet) = place.and_then(|at| self.req.line.get_mut(at)) else {
            // Given up in the meantime.
            shared.recycle(datagram);
            return;
        };
        let Some(referenced) = referenced else {
            let number = packet.wqe;
            shared.recycle(datagram);
            if let Some(wqe) = self.req.wqe_mut(number) {
                wqe.fault = Some(Status::LocalProtection);
            }
            // Makes everything before it again; the cursor stops at the fault.
            self.req.go_back(shared);
            return;
        };
        let to = packet.to;
        let path = match to {
            Some(to) => super::qp::path(shared, to.addr),
            None => self.path(shared),
        };
        seal(&path, &mut datagram, referenced);
        if let Some(packet) = place.and_then(|at| self.req.line.get_mut(at)) {
            packet.datagram = Some(datagram);
        }
    }

    /// Hands out the next request packet and starts the clock for its ACK.
    pub(super) fn next_request(&mut self, shared: &mut Shared, now: Time) -> Option<Transmit> {
        let req = &mut self.req;
        let datagram = req.line.front_mut()?.datagram.take()?;
        let packet = req.line.pop_front()?;
        req.line_front += 1;
        if let Some(to) = packet.to {
            // A datagram is done when it is sent (IBA 9.8.3).
            self.on_datagram_sent(packet.wqe, packet.end);
            return Some(Transmit { path: super::qp::path(shared, to.addr), datagram });
        }
        if packet.end.since(req.sent_end) > 0 {
            req.sent_end = packet.end;
        }
        if req.ack_by.is_none() {
            req.ack_by = self.attrs.ack_timeout().map(|wait| now + wait);
        }
        Some(Transmit { path: self.path(shared), datagram })
    }

    /// Reports the sends that are done, in order; in ERR flushes the rest.
    pub(super) fn settle_sends(&mut self, shared: &mut Shared) {
        while let Some(front) = self.req.queue.front() {
            let acked = self.req.base < self.req.una_wqe;
            let in_error = self.state == QpState::Err;
            let status = match front.fault {
                Some(fault) => fault,
                None if acked => Status::Success,
                None if in_error => Status::Flushed,
                None => return,
            };
            if front.results > 0 {
                return;
            }
            let Some(wqe) = self.req.queue.pop_front() else { return };
            self.req.base += 1;
            self.req.una_wqe = self.req.una_wqe.max(self.req.base);
            self.complete_send(shared, wqe, status);
            if status != Status::Success {
                self.enter_error(shared);
            }
        }
    }

    fn complete_send(&mut self, shared: &mut Shared, wqe: SendWqe, status: Status) {
        release(shared, wqe.held);
        if !wqe.wr.signaled && status == Status::Success {
            return;
        }
        let completion = Completion {
            wr_id: wqe.wr.id,
            status,
            op: wqe.wr.op.completion(),
            byte_len: wqe.len,
            imm: None,
            qpn: self.qpn,
            src_qp: None,
        };
        shared.complete(self.init.send_cq, completion, false);
    }

    /// Notes that a result is on its way into the buffers of a work request.
    pub(super) fn result_started(&mut self, number: u64) {
        self.req.results += 1;
        if let Some(wqe) = self.req.wqe_mut(number) {
            wqe.results += 1;
        }
    }

    pub(super) fn on_result_stored(&mut self, number: u64, ok: bool) {
        self.req.results = self.req.results.saturating_sub(1);
        if let Some(wqe) = self.req.wqe_mut(number) {
            wqe.results = wqe.results.saturating_sub(1);
            if !ok {
                wqe.fault = Some(Status::LocalProtection);
            }
        }
    }
}

fn release(shared: &mut Shared, held: Vec<Lkey>) {
    for lkey in held {
        shared.mrs.unhold(lkey);
    }
}
