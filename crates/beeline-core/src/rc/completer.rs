//! The completer: what the peer's answers mean for the requests outstanding, and the clocks.
//!
//! IBA 9.7.6 "Requester: receiving responses", 9.9.2 "Requester side error behavior", 9.9.2.4
//! "Requester side error retry".

use alloc::vec::Vec;

use crate::mr::Need;
use crate::roce::{NakCode, Operation, Packet, Psn, Syndrome};
use crate::time::Time;

use super::engine::Shared;
use super::memory::{MemKind, Owner, grant_pieces};
use super::qp::{Qp, segment};
use super::responder::into_memory;
use super::state::QpState;
use super::work::{Payload, SendOp, Status};

/// `rnr_retry` of 7 retries for ever (IBA 9.7.5.2.8).
const RNR_FOREVER: u8 = 7;

impl Qp {
    /// A response packet from the peer.
    pub(super) fn on_response(
        &mut self,
        shared: &mut Shared,
        now: Time,
        packet: &Packet,
        datagram: Vec<u8>,
    ) {
        let psn = packet.head.bth.psn;
        // A response to nothing outstanding is a late duplicate and is dropped (IBA 9.7.6.1, C9-178).
        let outstanding = self.req.sent_end.ahead_of(self.req.una);
        if self.state != QpState::Rts || psn.ahead_of(self.req.una) >= outstanding {
            shared.counters.stale_responses += 1;
            shared.recycle(datagram);
            return;
        }
        match packet.layout.operation {
            Operation::Ack => {
                shared.recycle(datagram);
                self.on_ack(shared, now, psn, packet.head.aeth.map(|aeth| aeth.syndrome()));
            }
            _ => self.on_data(shared, now, packet, datagram),
        }
        self.pump(shared);
    }

    fn on_ack(&mut self, shared: &mut Shared, now: Time, psn: Psn, syndrome: Option<Syndrome>) {
        match syndrome {
            Some(Syndrome::Ack(_)) => {
                // Acknowledges everything up to `psn` (IBA 9.7.5.1.2). One that passes a READ or an
                // atomic without an answer says that the answer was lost (9.7.5.1.2.1, implied NAK).
                if !self.acknowledge(shared, now, psn.add(1)) {
                    self.repeat(shared);
                }
            }
            Some(Syndrome::RnrNak(timer)) => {
                if self.acknowledge(shared, now, psn) {
                    self.on_receiver_not_ready(shared, now + timer.wait());
                } else {
                    self.repeat(shared);
                }
            }
            Some(Syndrome::Nak(code)) => {
                // A NAK acknowledges everything before `psn` (IBA 9.7.5.2.6).
                let reached = self.acknowledge(shared, now, psn);
                match refusal(code) {
                    Some(status) if reached => self.fail(shared, status),
                    // A lost packet, or an answer lost on the way to the refusal: once more.
                    _ => self.repeat(shared),
                }
            }
            // A reserved syndrome says nothing this side could act on (IBA table 44).
            Some(Syndrome::Reserved(_)) | None => {}
        }
    }

    /// A READ response or an atomic result.
    fn on_data(&mut self, shared: &mut Shared, now: Time, packet: &Packet, datagram: Vec<u8>) {
        let psn = packet.head.bth.psn;
        // Answers come in order, so this one acknowledges the SENDs and WRITEs before it; another READ
        // or atomic before it that has no answer yet lost it (IBA 9.7.5.1.2.1).
        if !self.acknowledge(shared, now, psn) {
            shared.recycle(datagram);
            self.repeat(shared);
            return;
        }
        let number = self.req.una_wqe;
        let Some((op, len, Some(first))) =
            self.req.wqe(number).map(|wqe| (wqe.wr.op, wqe.len, wqe.first))
        else {
            shared.recycle(datagram);
            return;
        };
        let expected = match (op, packet.layout.operation) {
            (SendOp::Read { .. }, Operation::ReadResponse) => {
                segment(self.attrs.mtu, len, psn.ahead_of(first))
            }
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Operation::AtomicAck) => (0, 8),
            // The peer answered something that was not asked (IBA 9.9.2.2, "unexpected opcode").
            _ => {
                shared.recycle(datagram);
                self.fail(shared, Status::BadResponse);
                return;
            }
        };
        let refused = packet.head.aeth.is_some_and(|aeth| !is_ack(aeth.syndrome()));
        let (data, wrong_len) = match packet.head.atomic_ack {
            Some(result) => (store_result(shared, result.original, datagram), false),
            None => ((datagram, packet.payload.start), packet.payload_len() != expected.1),
        };
        if refused || wrong_len {
            shared.recycle(data.0);
            self.fail(shared, Status::BadResponse);
            return;
        }
        let kind = match packet.head.atomic_ack {
            Some(_) => MemKind::Write,
            None => into_memory(packet),
        };
        self.store(shared, number, expected, kind, data);
        self.acknowledged(shared, now, psn.add(1));
    }

    /// Sends the bytes of a response on their way into the work request's buffers.
    fn store(
        &mut self,
        shared: &mut Shared,
        number: u64,
        (start, len): (u32, u32),
        kind: MemKind,
        data: (Vec<u8>, usize),
    ) {
        if len == 0 {
            shared.recycle(data.0);
            return;
        }
        let (id, pd) = (self.id(), self.init.pd);
        let Some(wqe) = self.req.wqe_mut(number) else { return };
        let Payload::Sges(sges) = &wqe.wr.payload else { return };
        match grant_pieces(&mut shared.mrs, pd, sges, (start, len), Need::LocalWrite) {
            Ok(grants) => {
                let owner = Owner::Result { wqe: number };
                shared.memory.push(id, owner, kind, grants, data);
                self.result_started(number);
            }
            Err(_) => {
                shared.recycle(data.0);
                wqe.fault = Some(Status::LocalProtection);
            }
        }
    }

    /// Takes everything before `to` as received by the peer. `false` when a READ or atomic without an
    /// answer stands in between; what comes before it is taken all the same.
    fn acknowledge(&mut self, shared: &mut Shared, now: Time, to: Psn) -> bool {
        let mut una = self.req.una;
        let mut number = self.req.una_wqe;
        while una != to {
            let Some(wqe) = self.req.wqe(number) else { break };
            let Some(first) = wqe.first.filter(|_| !wqe.wr.op.is_read_or_atomic()) else { break };
            let left = wqe.packets - una.ahead_of(first).min(wqe.packets);
            let step = to.ahead_of(una).min(left);
            una = una.add(step);
            if step < left {
                break;
            }
            number += 1;
        }
        if una != self.req.una || number != self.req.una_wqe {
            (self.req.una, self.req.una_wqe) = (una, number);
            self.progress(shared, now);
        }
        una == to
    }

    /// Takes one packet of the READ or atomic at the front as answered.
    fn acknowledged(&mut self, shared: &mut Shared, now: Time, to: Psn) {
        self.req.una = to;
        let done = self
            .req
            .wqe(self.req.una_wqe)
            .is_some_and(|wqe| wqe.first.is_some_and(|first| to.ahead_of(first) >= wqe.packets));
        if done {
            self.req.una_wqe += 1;
        }
        self.progress(shared, now);
    }

    /// Progress sets the counters and the clock back (IBA 9.9.2.4.1, 9.9.2.1.2).
    fn progress(&mut self, shared: &mut Shared, now: Time) {
        self.req.retry_left = self.attrs.retry_cnt;
        self.req.rnr_left = self.attrs.rnr_retry;
        self.req.retried_at = None;
        let outstanding = self.req.sent_end != self.req.una;
        let wait = self.attrs.ack_timeout().filter(|_| outstanding);
        self.req.ack_by = wait.map(|wait| now + wait);
        self.req.catch_up(shared);
    }

    /// Sends again from the oldest packet without an answer; once per gap, the clock sees to the rest.
    fn repeat(&mut self, shared: &mut Shared) {
        if self.req.retried_at == Some(self.req.una) {
            return;
        }
        if !spend(&mut self.req.retry_left) {
            self.fail(shared, Status::RetryExceeded);
            return;
        }
        self.req.retried_at = Some(self.req.una);
        self.req.go_back(shared);
    }

    fn on_receiver_not_ready(&mut self, shared: &mut Shared, until: Time) {
        shared.counters.rnr_received += 1;
        if self.req.rnr_until.is_some() {
            return;
        }
        if self.attrs.rnr_retry != RNR_FOREVER && !spend(&mut self.req.rnr_left) {
            self.fail(shared, Status::RnrRetryExceeded);
            return;
        }
        self.req.go_back(shared);
        self.req.ack_by = None;
        self.req.rnr_until = Some(until);
    }

    /// The oldest work request not acknowledged failed; the queue pair goes to ERR (IBA 10.7.3.2).
    fn fail(&mut self, shared: &mut Shared, status: Status) {
        let number = self.req.una_wqe;
        if let Some(wqe) = self.req.wqe_mut(number) {
            wqe.fault.get_or_insert(status);
        }
        self.enter_error(shared);
    }

    /// A clock ran out: the wait after receiver not ready, or the wait for an ACK.
    pub(super) fn on_timeout(&mut self, shared: &mut Shared, now: Time) {
        if self.req.rnr_until.is_some_and(|until| until <= now) {
            self.req.rnr_until = None;
        }
        if self.req.rnr_until.is_none() && self.req.ack_by.is_some_and(|by| by <= now) {
            self.req.ack_by = None;
            if self.req.sent_end != self.req.una {
                self.on_no_answer(shared);
            }
        }
        self.pump(shared);
    }

    fn on_no_answer(&mut self, shared: &mut Shared) {
        shared.counters.timeouts += 1;
        if !spend(&mut self.req.retry_left) {
            self.fail(shared, Status::RetryExceeded);
            return;
        }
        self.req.retried_at = None;
        self.req.go_back(shared);
    }
}

/// What a NAK does to the request it names; `None` for a lost packet, which is sent again.
const fn refusal(code: NakCode) -> Option<Status> {
    match code {
        NakCode::PSN_SEQUENCE => None,
        NakCode::INVALID_REQUEST => Some(Status::RemoteInvalidRequest),
        NakCode::REMOTE_ACCESS => Some(Status::RemoteAccess),
        // Reserved codes too: the peer will not do it (IBA table 46).
        _ => Some(Status::RemoteOperation),
    }
}

const fn is_ack(syndrome: Syndrome) -> bool {
    matches!(syndrome, Syndrome::Ack(_))
}

/// The result of an atomic as it goes into memory.
fn store_result(shared: &mut Shared, original: u64, mut datagram: Vec<u8>) -> (Vec<u8>, usize) {
    datagram.clear();
    datagram.extend_from_slice(&shared.config.atomic_reply.bytes(original));
    (datagram, 0)
}

/// Takes one from a counter; `false` when nothing was left.
fn spend(left: &mut u8) -> bool {
    match left.checked_sub(1) {
        Some(less) => {
            *left = less;
            true
        }
        None => false,
    }
}
