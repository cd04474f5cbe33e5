//! What a responder owes: ACKs, NAKs, READ responses and atomic results, sent strictly in order.
//!
//! IBA 9.7.5 "Responder: generating responses". An answer that depends on memory stays in the line until
//! the memory has answered, and holds back everything behind it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::addr::Iova;
use crate::mr::{Ask, Need};
use crate::roce::packet::seal;
use crate::roce::{
    Aeth, AtomicAckEth, Bth, Head, NakCode, Opcode, Operation, Place, Psn, Reth, Syndrome,
};

use super::engine::{Event, Shared, Transmit};
use super::memory::{MemKind, OneOrMore, Owner};
use super::qp::{Qp, bare, segment};

/// Answers owed at most; a request beyond is dropped, and the peer sends it again.
const REPLIES_MAX: usize = 1024;

/// READ response packets made and not yet sent at most: how far memory is read ahead.
const PACKETS_MAX: usize = 64;

/// Something owed to the peer.
#[derive(Debug)]
pub(super) enum Reply {
    /// An ACK or NAK, once the writes before `barrier` are done.
    Ack { psn: Psn, syndrome: Syndrome, msn: u32, barrier: u64 },
    /// The responses of a READ, of which `sent` packets have been made.
    Read { source: Psn, psn: Psn, reth: Reth, made: u32 },
    /// The result of an atomic, once it is known; `write` is its number among the writes.
    Atomic { psn: Psn, write: u64, result: Option<u64> },
}

impl Reply {
    /// Responses from `psn` on to a READ that was first asked for at `source`.
    pub(super) const fn read(source: Psn, psn: Psn, reth: Reth) -> Self {
        Self::Read { source, psn, reth, made: 0 }
    }
}

/// The line of answers: those not begun, and the packets at its head.
#[derive(Debug)]
pub(super) struct Line {
    replies: VecDeque<Reply>,
    packets: VecDeque<Packet>,
    packets_front: u64,
    pub(super) writes: Writes,
}

/// An answer at the head of the line.
#[derive(Debug)]
enum Packet {
    Ack {
        psn: Psn,
        syndrome: Syndrome,
        msn: u32,
        barrier: u64,
    },
    /// A READ response; `None` while its payload is being read.
    Data {
        datagram: Option<Vec<u8>>,
    },
    Atomic {
        psn: Psn,
        write: u64,
        result: Option<u64>,
    },
}

/// Writes in the order in which they were begun, and how far they are done without a gap.
#[derive(Debug, Default)]
pub(super) struct Writes {
    done_below: u64,
    done: VecDeque<bool>,
}

impl Writes {
    pub(super) fn begin(&mut self) -> u64 {
        self.done.push_back(false);
        self.next() - 1
    }

    pub(super) fn finish(&mut self, seq: u64) {
        let place = seq.checked_sub(self.done_below).and_then(|at| usize::try_from(at).ok());
        if let Some(done) = place.and_then(|at| self.done.get_mut(at)) {
            *done = true;
        }
        while self.done.front() == Some(&true) {
            self.done.pop_front();
            self.done_below += 1;
        }
    }

    /// The number the next write gets: a barrier behind all begun so far.
    pub(super) fn next(&self) -> u64 {
        self.done_below + self.done.len() as u64
    }

    pub(super) const fn reached(&self, barrier: u64) -> bool {
        self.done_below >= barrier
    }

    pub(super) fn len(&self) -> usize {
        self.done.len()
    }
}

impl Line {
    pub(super) fn new() -> Self {
        Self {
            replies: VecDeque::new(),
            packets: VecDeque::new(),
            packets_front: 0,
            writes: Writes::default(),
        }
    }

    pub(super) fn push(&mut self, reply: Reply) {
        // A second ACK of the same packet, behind the first and before anything else, says nothing.
        let repeats = match (&reply, self.replies.back()) {
            (
                Reply::Ack { psn, syndrome, .. },
                Some(Reply::Ack { psn: last, syndrome: said, .. }),
            ) => psn == last && syndrome == said,
            _ => false,
        };
        if repeats {
            return;
        }
        self.replies.push_back(reply);
    }

    pub(super) fn is_full(&self) -> bool {
        self.replies.len() + self.packets.len() >= REPLIES_MAX
    }

    /// Forgets what is left of a READ that is asked for again.
    pub(super) fn restart_read(&mut self, first: Psn) {
        self.replies
            .retain(|reply| !matches!(reply, Reply::Read { source, .. } if *source == first));
    }

    pub(super) fn set_atomic(&mut self, psn: Psn, original: u64) {
        let set = |at: Psn, result: &mut Option<u64>| {
            if at == psn {
                *result = Some(original);
            }
        };
        for packet in &mut self.packets {
            if let Packet::Atomic { psn, result, .. } = packet {
                set(*psn, result);
            }
        }
        for reply in &mut self.replies {
            if let Reply::Atomic { psn, result, .. } = reply {
                set(*psn, result);
            }
        }
    }

    pub(super) fn each_unsent(&self, show: &mut impl FnMut(&[u8])) {
        for packet in &self.packets {
            if let Packet::Data { datagram: Some(datagram) } = packet {
                show(datagram);
            }
        }
    }

    /// Forgets every answer.
    pub(super) fn clear(&mut self) {
        self.replies.clear();
        self.packets_front += self.packets.len() as u64;
        self.packets.clear();
    }

    /// Forgets every answer that would acknowledge write `seq`, and all behind it.
    pub(super) fn cut(&mut self, seq: u64) {
        let passes = |packet: &Packet| {
            matches!(packet, Packet::Ack { barrier, .. } if *barrier > seq)
                || matches!(packet, Packet::Atomic { write, .. } if *write >= seq)
        };
        match self.packets.iter().position(passes) {
            Some(at) => {
                // Numbers of packets dropped are not used again.
                let dropped = self.packets.len() - at;
                self.packets.truncate(at);
                if at == 0 {
                    self.packets_front += dropped as u64;
                }
                self.replies.clear();
            }
            None => {
                let passes = |reply: &Reply| {
                    matches!(reply, Reply::Ack { barrier, .. } if *barrier > seq)
                        || matches!(reply, Reply::Atomic { write, .. } if *write >= seq)
                };
                if let Some(at) = self.replies.iter().position(passes) {
                    self.replies.truncate(at);
                }
            }
        }
    }

    fn is_ready(&self, packet: &Packet) -> bool {
        match packet {
            Packet::Ack { barrier, .. } => self.writes.reached(*barrier),
            Packet::Data { datagram } => datagram.is_some(),
            Packet::Atomic { result, .. } => result.is_some(),
        }
    }

    pub(super) fn has_reply(&self) -> bool {
        self.packets.front().is_some_and(|packet| self.is_ready(packet))
    }

    /// Takes the next answer. Of several ACKs in a row that are due, the last one says it all
    /// (IBA 9.7.5.1.2, coalescing).
    fn next(&mut self) -> Option<Packet> {
        while let [Packet::Ack { syndrome: Syndrome::Ack(_), .. }, second, ..] =
            self.packets.make_contiguous()
        {
            let is_ack = matches!(second, Packet::Ack { syndrome: Syndrome::Ack(_), barrier, .. }
                if self.writes.reached(*barrier));
            if !is_ack {
                break;
            }
            self.packets.pop_front();
            self.packets_front += 1;
        }
        if !self.has_reply() {
            return None;
        }
        self.packets_front += 1;
        self.packets.pop_front()
    }
}

impl super::responder::Responder {
    pub(super) fn has_reply(&self) -> bool {
        self.line.has_reply()
    }
}

impl Qp {
    /// Turns answers into packets, as far as there is room.
    pub(super) fn expand_replies(&mut self, shared: &mut Shared) {
        while self.resp.line.packets.len() < PACKETS_MAX {
            let Some(reply) = self.resp.line.replies.pop_front() else { return };
            let packet = match reply {
                Reply::Ack { psn, syndrome, msn, barrier } => {
                    Packet::Ack { psn, syndrome, msn, barrier }
                }
                Reply::Atomic { psn, write, result } => Packet::Atomic { psn, write, result },
                Reply::Read { source, psn, reth, made } => {
                    let Some(packet) = self.make_response(shared, source, psn, reth, made) else {
                        return;
                    };
                    let made = made + 1;
                    if made < self.attrs.mtu.packets(reth.dma_len) {
                        let rest = Reply::Read { source, psn, reth, made };
                        self.resp.line.replies.push_front(rest);
                    }
                    packet
                }
            };
            self.resp.line.packets.push_back(packet);
        }
    }

    /// One packet of a READ's responses. `None` when the memory was taken away since the READ was
    /// accepted: the peer gets a NAK in its place.
    fn make_response(
        &mut self,
        shared: &mut Shared,
        source: Psn,
        start: Psn,
        reth: Reth,
        index: u32,
    ) -> Option<Packet> {
        let psn = start.add(index);
        let packets = self.attrs.mtu.packets(reth.dma_len);
        let place = shared.config.read_replay.place(source != start, index, packets);
        let opcode = Opcode::of_segment(Operation::ReadResponse, place, false)?;
        let (offset, len) = segment(self.attrs.mtu, reth.dma_len, index);
        let has_aeth = place != Place::Middle;
        let mut head = Head {
            aeth: has_aeth.then(|| Aeth::new(Syndrome::ACK, self.resp.msn)),
            ..Head::new(Bth::new(opcode, self.attrs.dest_qpn, psn))
        };
        if len == 0 {
            let path = self.path(shared);
            return Some(Packet::Data { datagram: Some(bare(shared, &path, head)) });
        }
        let ask = Ask {
            pd: self.init.pd,
            key: reth.rkey,
            iova: Iova::new(reth.va.wrapping_add(u64::from(offset))),
            len,
            need: Need::RemoteRead,
        };
        match shared.mrs.grant(ask) {
            Ok(grant) => {
                let mut datagram = shared.buffer();
                let at = head.emit_headers(len as usize, &mut datagram);
                let seq = self.resp.line.packets_front + self.resp.line.packets.len() as u64;
                let (owner, buffer) = (Owner::Reply { seq }, (datagram, at));
                let grants = OneOrMore::new(grant);
                shared.memory.push(self.id(), owner, MemKind::Read, grants, buffer);
                Some(Packet::Data { datagram: None })
            }
            Err(_) => {
                self.refuse_response(shared, psn, NakCode::REMOTE_ACCESS);
                None
            }
        }
    }

    /// Ends a READ that cannot be answered to its end.
    fn refuse_response(&mut self, shared: &mut Shared, psn: Psn, code: NakCode) {
        let (syndrome, msn) = (Syndrome::Nak(code), self.resp.msn);
        self.resp.line.replies.clear();
        self.resp.line.packets.push_back(Packet::Ack { psn, syndrome, msn, barrier: 0 });
        let remote_access = code == NakCode::REMOTE_ACCESS;
        let event = if remote_access { Event::QpAccessError } else { Event::QpFatal };
        shared.raise(event(self.qpn));
        self.enter_error(shared);
    }

    pub(super) fn on_reply_payload(
        &mut self,
        shared: &mut Shared,
        seq: u64,
        mut datagram: Vec<u8>,
        referenced: Option<u32>,
    ) {
        let place = seq.checked_sub(self.resp.line.packets_front);
        let place = place.and_then(|at| usize::try_from(at).ok());
        let path = self.path(shared);
        let line = &mut self.resp.line;
        let Some(Packet::Data { datagram: slot }) = place.and_then(|at| line.packets.get_mut(at))
        else {
            shared.recycle(datagram);
            return;
        };
        if let Some(referenced) = referenced {
            seal(&path, &mut datagram, referenced);
            *slot = Some(datagram);
            return;
        }
        // The sequence number stands in the packet that cannot be sent.
        let psn = crate::roce::header::BthView::split(&datagram).map(|(bth, _)| bth.psn());
        shared.recycle(datagram);
        let at = place.unwrap_or(0);
        line.packets.truncate(at);
        if at == 0 {
            line.packets_front = seq + 1;
        }
        let code = shared.fault;
        self.refuse_response(shared, psn.unwrap_or_default(), code);
    }

    pub(super) fn next_reply(&mut self, shared: &mut Shared) -> Option<Transmit> {
        let packet = self.resp.line.next()?;
        let path = self.path(shared);
        let (dest, msn_now) = (self.attrs.dest_qpn, self.resp.msn);
        let datagram = match packet {
            Packet::Data { datagram } => datagram?,
            Packet::Ack { psn, syndrome, msn, .. } => {
                let head = Head {
                    aeth: Some(Aeth::new(syndrome, msn)),
                    ..Head::new(Bth::new(Opcode::RC_ACK, dest, psn))
                };
                bare(shared, &path, head)
            }
            Packet::Atomic { psn, result, .. } => {
                let head = Head {
                    aeth: Some(Aeth::new(Syndrome::ACK, msn_now)),
                    atomic_ack: Some(AtomicAckEth { original: result? }),
                    ..Head::new(Bth::new(Opcode::RC_ATOMIC_ACK, dest, psn))
                };
                bare(shared, &path, head)
            }
        };
        Some(Transmit { path, datagram })
    }
}
