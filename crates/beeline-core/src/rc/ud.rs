//! Unreliable datagrams: one packet a message, sent and forgotten.
//!
//! IBA 9.8.3 "Unreliable datagram operations". A received message is preceded by 40 bytes that stand for
//! its network header (11.4.2.1); for IPv4 the header fills the last 20 of them (A17.4.5.1).

use alloc::vec::Vec;
use core::net::IpAddr;

use crate::mr::Need;
use crate::roce::{Bth, Deth, Head, ImmDt, Opcode, Operation, Packet, Path, Psn, Qpn};

use super::engine::Shared;
use super::memory::{MemKind, Owner, grant_pieces};
use super::qp::Qp;
use super::responder::Held;
use super::state::QpState;
use super::work::{Completion, CompletionOp, SendOp, Status, total_len};

/// Bytes before a received datagram's payload.
pub const GRH_LEN: u32 = 40;

impl Qp {
    /// The datagram of the work request under the cursor.
    pub(super) fn build_datagram(&mut self, shared: &mut Shared) -> bool {
        let Some(wqe) = self.req.next_wqe() else { return false };
        let (Some(to), Some(psn), len) = (wqe.wr.to, wqe.first, wqe.len) else { return false };
        let imm = match wqe.wr.op {
            SendOp::Send { imm } => imm,
            _ => return false,
        };
        let solicited = wqe.wr.solicited;
        let opcode = if imm.is_some() { Opcode::UD_SEND_ONLY_IMM } else { Opcode::UD_SEND_ONLY };
        let mut head = Head {
            deth: Some(Deth { qkey: to.qkey, src_qp: self.qpn.as_u32() }),
            imm: imm.map(|data| ImmDt { data }),
            ..Head::new(Bth { solicited, ..Bth::new(opcode, to.qpn, psn) })
        };
        let built = self.build_payload(shared, &mut head, (0, len), Some(to));
        if built {
            self.req.advance_cursor(1, 1);
        }
        built
    }

    /// A datagram went out: its work request is done.
    pub(super) fn on_datagram_sent(&mut self, number: u64, end: Psn) {
        self.req.una_wqe = number + 1;
        self.req.una = end;
        self.req.sent_end = end;
    }

    /// A datagram came in. Whatever does not fit is dropped silently (IBA 9.8.3.2).
    pub(super) fn on_datagram(
        &mut self,
        shared: &mut Shared,
        path: &Path,
        packet: &Packet,
        datagram: &[u8],
    ) {
        let Some(deth) = packet.head.deth else { return };
        let len = packet.payload_len() + GRH_LEN;
        let takes = matches!(self.state, QpState::Rtr | QpState::Rts)
            && packet.layout.operation == Operation::Send
            && deth.qkey == self.attrs.qkey;
        if !takes {
            shared.counters.unwanted_datagrams += 1;
            return;
        }
        let Some(payload) = datagram.get(packet.payload.clone()) else { return };
        let Some(wqe) = self.take_receive(shared) else {
            shared.counters.unwanted_datagrams += 1;
            return;
        };
        if total_len(&wqe.sges) < u64::from(len) {
            self.hold_receive(wqe, Status::LocalLength);
            return;
        }
        let pd = self.init.pd;
        let granted = grant_pieces(&mut shared.mrs, pd, &wqe.sges, (0, len), Need::LocalWrite);
        let Ok(grants) = granted else {
            self.hold_receive(wqe, Status::LocalProtection);
            return;
        };
        let mut buffer = shared.buffer();
        network_header(path, packet.payload_len(), &mut buffer);
        buffer.extend_from_slice(payload);
        let seq = self.resp.line.writes.begin();
        let owner = Owner::Inbound { seq, psn: packet.head.bth.psn };
        shared.memory.push(self.id(), owner, MemKind::Write, grants, (buffer, 0));
        let completion = Completion {
            wr_id: wqe.id,
            status: Status::Success,
            op: CompletionOp::Recv,
            byte_len: len,
            imm: packet.head.imm.map(|imm| imm.data),
            qpn: self.qpn,
            src_qp: Some(Qpn::new(deth.src_qp)),
        };
        self.resp.hold(Held::new(wqe, completion, packet.head.bth.solicited));
    }
}

/// The 40 bytes for a datagram of `payload` bytes; what a socket does not tell is left zero.
fn network_header(path: &Path, payload: u32, buffer: &mut Vec<u8>) {
    let len = payload as u16;
    match (path.src, path.dst) {
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            buffer.extend_from_slice(&[0x60, 0, 0, 0]);
            buffer.extend_from_slice(&len.to_be_bytes());
            buffer.extend_from_slice(&[17, 0]);
            buffer.extend_from_slice(&src.octets());
            buffer.extend_from_slice(&dst.octets());
        }
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            buffer.extend_from_slice(&[0; 20]);
            buffer.extend_from_slice(&[0x45, 0]);
            buffer.extend_from_slice(&len.to_be_bytes());
            buffer.extend_from_slice(&[0, 0, 0x40, 0, 0, 17, 0, 0]);
            buffer.extend_from_slice(&src.octets());
            buffer.extend_from_slice(&dst.octets());
        }
        _ => buffer.extend_from_slice(&[0; GRH_LEN as usize]),
    }
}
