//! The requester: cuts work requests into packets and sends them in order, again where needed.
//!
//! IBA 9.7.2 "Packet sequence numbers", 9.7.3 "Requester: generating request packets", 9.9.2 "Requester
//! side error behavior".
//!
//! A work request of `n` packets takes `n` sequence numbers, a READ those of its responses (9.7.3.1.2,
//! C9-57). Going back after a loss only moves a cursor: packets are made again from memory, with the
//! sequence numbers and opcodes they had (C9-62).

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::mr::{Lkey, Need};
use crate::roce::packet::seal;
use crate::roce::{AtomicEth, Bth, Head, ImmDt, Opcode, Operation, Place, Psn, Reth};
use crate::time::Time;

use super::engine::{Shared, Transmit};
use super::memory::{MemKind, Owner, grant_pieces};
use super::qp::{Attrs, Qp, bare, psn_of, segment};
use super::state::{QpKind, QpState};
use super::work::{
    Completion, MESSAGE_BYTES_MAX, Payload, PostError, Remote, SendOp, SendWr, Status, total_len,
};

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
        if !matches!(self.state, QpState::Rts | QpState::Err) {
            return Err(PostError::State { state: self.state });
        }
        if self.req.queue.len() >= self.init.max_send_wr as usize {
            return Err(PostError::QueueFull { capacity: self.init.max_send_wr });
        }
        let len = match &wr.payload {
            Payload::Sges(sges) if sges.len() > self.init.max_send_sge as usize => {
                let max = self.init.max_send_sge as usize;
                return Err(PostError::TooManySges { given: sges.len(), max });
            }
            Payload::Sges(sges) => total_len(sges),
            Payload::Inline(_) if wr.op.is_read_or_atomic() => return Err(PostError::InlineResult),
            Payload::Inline(bytes) if bytes.len() > self.init.max_inline as usize => {
                let max = self.init.max_inline;
                return Err(PostError::InlineTooLong { given: bytes.len(), max });
            }
            Payload::Inline(bytes) => bytes.len() as u64,
        };
        let datagram = self.init.kind == QpKind::Ud;
        let max = if datagram { self.attrs.mtu.bytes() } else { MESSAGE_BYTES_MAX };
        let short = u32::try_from(len).ok().filter(|len| *len <= max);
        let short = short.ok_or(PostError::TooLong { given: len, max })?;
        if wr.to.is_some() != datagram {
            return Err(PostError::Destination { needed: datagram });
        }
        match wr.op {
            SendOp::SendInvalidate { .. } => {
                Err(PostError::Unsupported { what: "SEND with invalidate" })
            }
            SendOp::Send { .. } => Ok(short),
            _ if datagram => Err(PostError::Unsupported { what: "RDMA on a datagram queue pair" }),
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if len != 8 => {
                Err(PostError::AtomicLength { given: len })
            }
            op if op.is_read_or_atomic() && self.attrs.max_rd_atomic == 0 => {
                Err(PostError::NoReadDepth)
            }
            _ => Ok(short),
        }
    }

    pub(super) fn build_requests(&mut self, shared: &mut Shared) {
        while self.state == QpState::Rts && self.build_request(shared) {}
    }

    /// Makes the packet under the cursor. `false` when there is none or it has to wait.
    fn build_request(&mut self, shared: &mut Shared) -> bool {
        let req = &mut self.req;
        if req.rnr_until.is_some() || req.line.len() >= LINE_MAX {
            return false;
        }
        let (number, packet, next) = (req.cursor_wqe, req.cursor_packet, req.next_psn);
        let fresh = number == req.numbered;
        let una = req.una;
        let fenced = fresh && req.wqe(number).is_some_and(|wqe| wqe.wr.fence);
        // A fenced work request waits until earlier READs and atomics are done (IBA 10.8.3.3).
        if fenced && req.reads_before(number) {
            return false;
        }
        // Through shared memory this side fetches the bytes of a READ when the answer is there, so what
        // changes the peer's memory waits: a READ sees nothing of what was posted behind it.
        let reads_on = |wqe: &SendWqe| matches!(wqe.wr.op, SendOp::Read { .. });
        let changes = fresh && req.wqe(number).is_some_and(|wqe| !reads_on(wqe));
        if shared.config.shared_memory && changes && req.reads_before(number) {
            return false;
        }
        let Some(wqe) = req.wqe_mut(number).filter(|wqe| wqe.fault.is_none()) else {
            return false;
        };
        let (first, packets) = (*wqe.first.get_or_insert(next), wqe.packets);
        if fresh {
            req.numbered += 1;
            req.next_psn = next.add(packets);
        }
        if psn_of(first, packet).ahead_of(una) >= shared.config.window_packets {
            return false;
        }
        let Some(op) = req.wqe(number).map(|wqe| wqe.wr.op) else { return false };
        match op {
            _ if self.init.kind == QpKind::Ud => self.build_datagram(shared),
            SendOp::Read { remote } => self.build_read(shared, remote, first),
            SendOp::CompareSwap { remote, compare, swap } => {
                let atomic = atomic_header(remote, swap, compare);
                self.build_atomic(shared, Operation::CompareSwap, atomic, first)
            }
            SendOp::FetchAdd { remote, add } => {
                let atomic = atomic_header(remote, add, 0);
                self.build_atomic(shared, Operation::FetchAdd, atomic, first)
            }
            SendOp::Send { imm } => self.build_segment(shared, None, imm, first),
            SendOp::Write { remote, imm } => self.build_segment(shared, Some(remote), imm, first),
            // Never posted.
            SendOp::SendInvalidate { .. } => false,
        }
    }

    /// One packet of a SEND or WRITE.
    fn build_segment(
        &mut self,
        shared: &mut Shared,
        remote: Option<Remote>,
        imm: Option<u32>,
        first: Psn,
    ) -> bool {
        let index = self.req.cursor_packet;
        let Some(wqe) = self.req.wqe(self.req.cursor_wqe) else { return false };
        let (packets, len, solicited) = (wqe.packets, wqe.len, wqe.wr.solicited);
        let place = Place::of(index, packets);
        let imm = imm.filter(|_| place.ends());
        let operation = if remote.is_some() { Operation::Write } else { Operation::Send };
        let Some(opcode) = Opcode::of_segment(operation, place, imm.is_some()) else {
            return false;
        };
        let psn = psn_of(first, index);
        // The last packet asks for an ACK; so does one in between from time to time, so that a message
        // longer than either side's window goes on (IBA 9.7.3.2.1).
        self.req.since_ack_request += 1;
        let every = (shared.config.window_packets / 4).clamp(1, 32);
        let ack_request = place.ends() || self.req.since_ack_request >= every;
        if ack_request {
            self.req.since_ack_request = 0;
        }
        let mut head = Head {
            reth: remote.filter(|_| place.starts()).map(|remote| Reth {
                va: remote.addr.as_u64(),
                rkey: remote.rkey.as_u32(),
                dma_len: len,
            }),
            imm: imm.map(|data| ImmDt { data }),
            ..Head::new(Bth {
                ack_request,
                // Solicited is for the packet that completes a receive (IBA 9.2.3).
                solicited: solicited && place.ends() && (remote.is_none() || imm.is_some()),
                ..Bth::new(opcode, self.attrs.dest_qpn, psn)
            })
        };
        let built =
            self.build_payload(shared, &mut head, segment(self.attrs.mtu, len, index), None);
        if built {
            self.req.advance_cursor(index + 1, packets);
        }
        built
    }

    /// Emits the headers, and the payload from the work request or through a memory operation.
    pub(super) fn build_payload(
        &mut self,
        shared: &mut Shared,
        head: &mut Head,
        (start, len): (u32, u32),
        to: Option<super::work::Destination>,
    ) -> bool {
        let path = match to {
            Some(to) => super::qp::path(shared, to.addr),
            None => self.path(shared),
        };
        let number = self.req.cursor_wqe;
        let end = head.bth.psn.add(1);
        let id = self.id();
        let mut datagram = shared.buffer();
        let at = head.emit_headers(len as usize, &mut datagram);
        let Some(wqe) = self.req.wqe_mut(number) else { return false };
        let inline = match &wqe.wr.payload {
            Payload::Inline(bytes) => Some(bytes.get(start as usize..(start + len) as usize)),
            Payload::Sges(_) => None,
        };
        match inline {
            Some(Some(bytes)) => datagram.extend_from_slice(bytes),
            _ if len == 0 => {}
            _ => {
                let range = (start, len);
                let mrs = &mut shared.mrs;
                let Ok(grants) =
                    grant_pieces(mrs, self.init.pd, wqe.sges(), range, Need::LocalRead)
                else {
                    // The work request fails when its turn has come (IBA 10.7.3.2).
                    wqe.fault = Some(Status::LocalProtection);
                    shared.recycle(datagram);
                    return false;
                };
                let seq = self.req.line_front + self.req.line.len() as u64;
                let buffer = (datagram, at);
                let owner = Owner::Request { seq };
                shared.memory.push(id, owner, MemKind::Read, grants, buffer);
                self.req.enqueue(end, to, None);
                return true;
            }
        }
        seal(&path, &mut datagram, 0);
        self.req.enqueue(end, to, Some(datagram));
        true
    }

    /// A READ request. Long READs go out as several requests, each for its own run of responses: that
    /// bounds what the peer sends unasked and what a loss costs.
    fn build_read(&mut self, shared: &mut Shared, remote: Remote, first: Psn) -> bool {
        if self.req.reads.len() >= usize::from(self.attrs.max_rd_atomic)
            || self.req.results >= RESULTS_MAX
        {
            return false;
        }
        let (index, chunk) = (self.req.cursor_packet, shared.config.read_packets.max(1));
        let Some(wqe) = self.req.wqe(self.req.cursor_wqe) else { return false };
        let (packets, len) = (wqe.packets, wqe.len);
        // Boundaries do not depend on where a repeat starts: it asks for a part of one request, which is
        // what a responder can answer again (IBA 9.7.5.1.3, C9-110).
        let end = (index / chunk + 1).saturating_mul(chunk).min(packets);
        let (start, _) = segment(self.attrs.mtu, len, index);
        let (stop, stop_len) = segment(self.attrs.mtu, len, end - 1);
        let psn = psn_of(first, index);
        let head = Head {
            reth: Some(Reth {
                va: remote.addr.as_u64().wrapping_add(u64::from(start)),
                rkey: remote.rkey.as_u32(),
                dma_len: stop + stop_len - start,
            }),
            ..Head::new(Bth {
                ack_request: true,
                ..Bth::new(Opcode::RC_READ_REQUEST, self.attrs.dest_qpn, psn)
            })
        };
        self.build_bare(shared, head, psn_of(first, end));
        self.req.advance_cursor(end, packets);
        true
    }

    fn build_atomic(
        &mut self,
        shared: &mut Shared,
        operation: Operation,
        atomic: AtomicEth,
        first: Psn,
    ) -> bool {
        if self.req.reads.len() >= usize::from(self.attrs.max_rd_atomic)
            || self.req.results >= RESULTS_MAX
        {
            return false;
        }
        let Some(opcode) = Opcode::of_segment(operation, Place::Only, false) else { return false };
        let head = Head {
            atomic: Some(atomic),
            ..Head::new(Bth { ack_request: true, ..Bth::new(opcode, self.attrs.dest_qpn, first) })
        };
        self.build_bare(shared, head, first.add(1));
        self.req.advance_cursor(1, 1);
        true
    }

    fn build_bare(&mut self, shared: &mut Shared, head: Head, end: Psn) {
        let path = self.path(shared);
        let datagram = bare(shared, &path, head);
        self.req.reads.push_back(end);
        self.req.enqueue(end, None, Some(datagram));
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

const fn atomic_header(remote: Remote, swap_add: u64, compare: u64) -> AtomicEth {
    AtomicEth { va: remote.addr.as_u64(), rkey: remote.rkey.as_u32(), swap_add, compare }
}

fn release(shared: &mut Shared, held: Vec<Lkey>) {
    for lkey in held {
        shared.mrs.unhold(lkey);
    }
}
