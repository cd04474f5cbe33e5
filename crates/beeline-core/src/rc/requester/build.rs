//! Request packets: what the cursor stands at, cut and closed.

use crate::mr::Need;
use crate::roce::packet::seal;
use crate::roce::{AtomicEth, Bth, Head, ImmDt, Opcode, Operation, Place, Psn, Reth};

use super::super::engine::Shared;
use super::super::memory::{MemKind, Owner, grant_pieces};
use super::super::qp::{Qp, bare, psn_of, segment};
use super::super::state::{QpKind, QpState};
use super::super::work::{Payload, Remote, SendOp, Status};
use super::{LINE_MAX, RESULTS_MAX, SendWqe};

impl Qp {
    pub(in super::super) fn build_requests(&mut self, shared: &mut Shared) {
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
    pub(in super::super) fn build_payload(
        &mut self,
        shared: &mut Shared,
        head: &mut Head,
        (start, len): (u32, u32),
        to: Option<super::super::work::Destination>,
    ) -> bool {
        let path = match to {
            Some(to) => super::super::qp::path(shared, to.addr),
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
}

const fn atomic_header(remote: Remote, swap_add: u64, compare: u64) -> AtomicEth {
    AtomicEth { va: remote.addr.as_u64(), rkey: remote.rkey.as_u32(), swap_add, compare }
}
