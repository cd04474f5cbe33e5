//! The responder: executes the peer's requests, in order and once.
//!
//! IBA 9.7.4 "Responder: receiving inbound request packets" (the order of the checks here is that of
//! figure 92 and table 55), 9.7.5.1.3 "Duplicates", 9.9.3 "Responder side behavior".

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::addr::Iova;
use crate::mr::{Access, Ask, Need};
use crate::roce::{NakCode, Operation, Packet, Place, Psn, Reth, Service, Syndrome};

use super::engine::{Event, Shared};
use super::memory::{MemKind, OneOrMore, Owner, PieceError, grant_pieces};
use super::qp::Qp;
use super::queue::RecvWqe;
use super::reply::{Line, Reply};
use super::state::QpState;
use super::work::{Completion, CompletionOp, MESSAGE_BYTES_MAX, Status};

/// Writes of one queue pair under way at most; a packet beyond is dropped, as by a NIC whose buffers
/// are full, and the peer sends it again.
const WRITES_MAX: usize = 512;

#[derive(Debug)]
pub(super) struct Responder {
    pub(super) expected: Psn,
    /// The last SEND or WRITE packet executed: what a repeated one is acknowledged with. An ACK never
    /// names a READ or an atomic, whose only answer is its data: Linux rdma_rxe would take the READ as
    /// done without it.
    acknowledged: Psn,
    /// Message sequence number: messages executed, 24 bits (IBA 9.7.7.1).
    pub(super) msn: u32,
    /// Whether the peer was told what is expected; it is told once (IBA 9.7.5.2.7).
    nak_sent: bool,
    current: Option<Current>,
    /// READs and atomics that can be answered again.
    saved: VecDeque<Saved>,
    pub(super) line: Line,
    held: VecDeque<Held>,
}

/// A message of which more packets are to come.
#[derive(Debug)]
enum Current {
    Send { wqe: RecvWqe, received: u32, first_write: u64 },
    Write { reth: Reth, received: u32 },
}

/// A receive consumed, to be reported when every write up to a barrier is done.
#[derive(Debug)]
pub(super) struct Held {
    barrier: u64,
    first_write: u64,
    pub(super) wqe: RecvWqe,
    pub(super) completion: Completion,
    pub(super) solicited: bool,
}

impl Held {
    pub(super) const fn new(wqe: RecvWqe, completion: Completion, solicited: bool) -> Self {
        Self { barrier: 0, first_write: 0, wqe, completion, solicited }
    }
}

/// A READ or atomic that was executed.
#[derive(Clone, Copy, Debug)]
struct Saved {
    first: Psn,
    packets: u32,
    what: SavedWhat,
}

#[derive(Clone, Copy, Debug)]
enum SavedWhat {
    Read(Reth),
    Atomic { result: Option<u64> },
}

/// Why a request packet was not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    /// No room now: as if it had been lost.
    Busy,
    /// No receive posted.
    NotReady,
    /// The peer is told, and the queue pair goes to ERR; a receive consumed gets the status.
    Nak(NakCode, Status),
}

const INVALID: Refused = Refused::Nak(NakCode::INVALID_REQUEST, Status::RemoteInvalidRequest);
const ACCESS: Refused = Refused::Nak(NakCode::REMOTE_ACCESS, Status::RemoteAccess);

/// How a packet's payload gets into memory.
pub(super) const fn into_memory(packet: &Packet) -> MemKind {
    if packet.referenced > 0 { MemKind::Pull } else { MemKind::Write }
}

impl Responder {
    pub(super) fn new() -> Self {
        Self {
            expected: Psn::default(),
            acknowledged: Psn::default(),
            msn: 0,
            nak_sent: false,
            current: None,
            saved: VecDeque::new(),
            line: Line::new(),
            held: VecDeque::new(),
        }
    }

    pub(super) fn start(&mut self, psn: Psn) {
        self.expected = psn;
    }

    /// Gives back everything it holds; answers how many receives it had consumed.
    pub(super) fn abandon(&mut self, shared: &mut Shared) -> u32 {
        let current = self.current_receive();
        let wqes = self.held.drain(..).map(|held| held.wqe).chain(current);
        let mut taken = 0;
        for mut wqe in wqes {
            wqe.release(&mut shared.mrs);
            taken += 1;
        }
        taken
    }

    /// Takes the receive of a message that will not be finished.
    pub(super) fn current_receive(&mut self) -> Option<RecvWqe> {
        match self.current.take() {
            Some(Current::Send { wqe, .. }) => Some(wqe),
            _ => None,
        }
    }

    /// Owes the peer nothing any more.
    pub(super) fn forget_replies(&mut self) {
        self.line.clear();
    }

    /// Holds a receive until every write begun so far is done.
    pub(super) fn hold(&mut self, held: Held) {
        let barrier = self.line.writes.next();
        self.held.push_back(Held { barrier, ..held });
    }

    /// The next receive whose bytes are all in memory.
    pub(super) fn next_settled(&mut self) -> Option<Held> {
        let barrier = self.held.front()?.barrier;
        if self.line.writes.reached(barrier) { self.held.pop_front() } else { None }
    }

    fn msn_next(&mut self) {
        self.msn = (self.msn + 1) & 0x00ff_ffff;
    }
}

impl Qp {
    /// A request packet from the peer.
    pub(super) fn on_request(&mut self, shared: &mut Shared, packet: &Packet, datagram: Vec<u8>) {
        let bth = packet.head.bth;
        if !matches!(self.state, QpState::Rtr | QpState::Rts) || self.resp.line.is_full() {
            shared.counters.busy_drops += 1;
            shared.recycle(datagram);
            return;
        }
        let ahead = bth.psn.since(self.resp.expected);
        if ahead > 0 {
            shared.recycle(datagram);
            self.on_gap(shared);
        } else if ahead < 0 {
            shared.recycle(datagram);
            self.on_duplicate(shared, packet);
        } else {
            match self.execute(shared, packet, datagram) {
                Ok(()) => self.resp.nak_sent = false,
                Err(Refused::Busy) => shared.counters.busy_drops += 1,
                Err(Refused::NotReady) => self.on_not_ready(shared),
                Err(Refused::Nak(code, status)) => self.refuse(shared, code, status),
            }
        }
        self.settle_receives(shared);
        self.pump(shared);
    }

    /// A packet is missing: the peer is told once, then everything up to it is dropped
    /// (IBA 9.7.5.2.7, C9-114 and C9-115).
    fn on_gap(&mut self, shared: &mut Shared) {
        shared.counters.gaps += 1;
        if !self.resp.nak_sent {
            self.resp.nak_sent = true;
            self.answer(Syndrome::Nak(NakCode::PSN_SEQUENCE), self.resp.expected);
        }
    }

    /// No receive posted: the peer waits and sends again (IBA 9.7.5.2.8). What it has sent behind this
    /// packet is dropped without a further NAK.
    fn on_not_ready(&mut self, shared: &mut Shared) {
        shared.counters.rnr_sent += 1;
        self.resp.nak_sent = true;
        self.answer(Syndrome::RnrNak(self.attrs.min_rnr_timer), self.resp.expected);
    }

    /// Something was executed already (IBA 9.7.5.1.3, C9-105 and C9-110): it is acknowledged or answered
    /// again, never executed again.
    fn on_duplicate(&mut self, shared: &mut Shared, packet: &Packet) {
        shared.counters.duplicates += 1;
        let psn = packet.head.bth.psn;
        let saved = self.resp.saved.iter().find(|saved| psn.ahead_of(saved.first) < saved.packets);
        match (packet.layout.operation, saved.copied()) {
            (Operation::Send | Operation::Write, _) => {
                self.answer(Syndrome::ACK, self.resp.acknowledged);
            }
            (Operation::ReadRequest, Some(Saved { first, what: SavedWhat::Read(was), .. })) => {
                let Some(reth) = packet.head.reth else { return };
                let skipped = u64::from(psn.ahead_of(first)) * u64::from(self.attrs.mtu.bytes());
                // Only a part of what was asked then is answered again.
                let inside = u64::from(reth.dma_len) + skipped <= u64::from(was.dma_len);
                if reth.rkey == was.rkey && reth.va == was.va.wrapping_add(skipped) && inside {
                    self.resp.line.restart_read(first);
                    self.resp.line.push(Reply::read(first, psn, reth));
                }
            }
            (
                Operation::CompareSwap | Operation::FetchAdd,
                Some(Saved { what: SavedWhat::Atomic { result: Some(original) }, .. }),
            ) => {
                // Executed, so no write that is still under way comes before it.
                let (write, result) = (0, Some(original));
                self.resp.line.push(Reply::Atomic { psn, write, result });
            }
            // Not kept any more, or still being executed: the peer's clock will ask again.
            _ => {}
        }
    }

    fn execute(
        &mut self,
        shared: &mut Shared,
        packet: &Packet,
        datagram: Vec<u8>,
    ) -> Result<(), Refused> {
        let layout = packet.layout;
        if layout.service != Service::Rc {
            return Err(INVALID);
        }
        self.check_sequence(layout.operation, layout.place)?;
        // SEND with invalidate needs type-2 memory windows, which this NIC does not have.
        let right = match layout.operation {
            Operation::Send => Access::LOCAL_READ,
            Operation::Write => Access::REMOTE_WRITE,
            Operation::ReadRequest => Access::REMOTE_READ,
            Operation::CompareSwap | Operation::FetchAdd => Access::REMOTE_ATOMIC,
            _ => return Err(INVALID),
        };
        // A request the queue pair does not allow at all (IBA table 55, "unsupported request").
        if !self.attrs.access.contains(right) {
            return Err(INVALID);
        }
        if self.resp.line.writes.len() >= WRITES_MAX {
            shared.recycle(datagram);
            return Err(Refused::Busy);
        }
        match layout.operation {
            Operation::Send => self.execute_send(shared, packet, datagram),
            Operation::Write => self.execute_write(shared, packet, datagram),
            Operation::ReadRequest => self.execute_read(shared, packet),
            _ => self.execute_atomic(shared, packet, datagram),
        }
    }

    /// Whether a packet may follow the one before it (IBA 9.7.4.1.2, C9-87 to C9-92).
    fn check_sequence(&self, operation: Operation, place: Place) -> Result<(), Refused> {
        let follows = match &self.resp.current {
            None => place.starts(),
            Some(Current::Send { .. }) => !place.starts() && operation == Operation::Send,
            Some(Current::Write { .. }) => !place.starts() && operation == Operation::Write,
        };
        if follows { Ok(()) } else { Err(INVALID) }
    }

    /// A packet that another one follows is exactly full; the last one is not empty
    /// (IBA 9.7.4.1.6, C9-96 to C9-100).
    fn check_length(&self, packet: &Packet) -> Result<u32, Refused> {
        let (len, mtu) = (packet.payload_len(), self.attrs.mtu.bytes());
        let right = match packet.layout.place {
            Place::First | Place::Middle => len == mtu && packet.head.bth.pad == 0,
            Place::Last => (1..=mtu).contains(&len),
            Place::Only => len <= mtu,
        };
        if right { Ok(len) } else { Err(INVALID) }
    }

    fn execute_send(
        &mut self,
        shared: &mut Shared,
        packet: &Packet,
        datagram: Vec<u8>,
    ) -> Result<(), Refused> {
        let len = self.check_length(packet)?;
        if packet.layout.place.starts() {
            let wqe = self.take_receive(shared).ok_or(Refused::NotReady)?;
            let first_write = self.resp.line.writes.next();
            self.resp.current = Some(Current::Send { wqe, received: 0, first_write });
        }
        let Some(Current::Send { wqe, received, .. }) = &mut self.resp.current else {
            return Err(INVALID);
        };
        let range = (*received, len);
        *received = received.checked_add(len).ok_or(INVALID)?;
        if len > 0 {
            let granted =
                grant_pieces(&mut shared.mrs, self.init.pd, &wqe.sges, range, Need::LocalWrite);
            let grants = granted.map_err(|error| match error {
                // The message is longer than the receive (IBA 9.7.4.1.6, C9-99; 11.6.2).
                PieceError::TooShort => Refused::Nak(NakCode::INVALID_REQUEST, Status::LocalLength),
                PieceError::Refused => {
                    Refused::Nak(NakCode::REMOTE_OPERATION, Status::LocalProtection)
                }
            })?;
            self.write(shared, packet, grants, datagram);
        } else {
            shared.recycle(datagram);
        }
        if packet.layout.place.ends()
            && let Some(Current::Send { wqe, received, first_write }) = self.resp.current.take()
        {
            self.received(wqe, CompletionOp::Recv, received, first_write, packet);
        }
        self.executed(packet, 1);
        Ok(())
    }

    fn execute_write(
        &mut self,
        shared: &mut Shared,
        packet: &Packet,
        datagram: Vec<u8>,
    ) -> Result<(), Refused> {
        let len = self.check_length(packet)?;
        let place = packet.layout.place;
        let (reth, received) = match (&self.resp.current, packet.head.reth) {
            (Some(Current::Write { reth, received }), None) => (*reth, *received),
            (None, Some(reth)) => {
                self.check_remote(shared, reth, Need::RemoteWrite)?;
                (reth, 0)
            }
            _ => return Err(INVALID),
        };
        let total = received.checked_add(len).ok_or(INVALID)?;
        // All packets together have the length that the first one named (IBA 9.7.4.1.6, C9-98).
        if total > reth.dma_len || place.ends() != (total == reth.dma_len) {
            return Err(INVALID);
        }
        let receive = match packet.head.imm {
            Some(_) => Some(self.take_receive(shared).ok_or(Refused::NotReady)?),
            None => None,
        };
        let first_write = self.resp.line.writes.next();
        let granted = (len > 0).then(|| {
            let iova = Iova::new(reth.va.wrapping_add(u64::from(received)));
            let pd = self.init.pd;
            shared.mrs.grant(Ask { pd, key: reth.rkey, iova, len, need: Need::RemoteWrite })
        });
        match granted {
            Some(Ok(grant)) => self.write(shared, packet, OneOrMore::new(grant), datagram),
            Some(Err(_)) => {
                if let Some(wqe) = receive {
                    self.hold_receive(wqe, Status::Flushed);
                }
                return Err(ACCESS);
            }
            None => shared.recycle(datagram),
        }
        self.resp.current =
            if place.ends() { None } else { Some(Current::Write { reth, received: total }) };
        if let Some(wqe) = receive {
            self.received(wqe, CompletionOp::RecvWriteImm, total, first_write, packet);
        }
        self.executed(packet, 1);
        Ok(())
    }

    fn execute_read(&mut self, shared: &mut Shared, packet: &Packet) -> Result<(), Refused> {
        let reth = packet.head.reth.ok_or(INVALID)?;
        self.check_remote(shared, reth, Need::RemoteRead)?;
        let (psn, packets) = (packet.head.bth.psn, self.attrs.mtu.packets(reth.dma_len));
        self.save(Saved { first: psn, packets, what: SavedWhat::Read(reth) })?;
        // A READ counts as executed when it is accepted (IBA 9.7.7.1, C9-148).
        self.executed(packet, packets);
        self.resp.line.push(Reply::read(psn, psn, reth));
        Ok(())
    }

    fn execute_atomic(
        &mut self,
        shared: &mut Shared,
        packet: &Packet,
        datagram: Vec<u8>,
    ) -> Result<(), Refused> {
        let (atomic, psn) = (packet.head.atomic.ok_or(INVALID)?, packet.head.bth.psn);
        // IBA 9.4.5, C9-37: the address is a multiple of 8.
        if atomic.va % 8 != 0 {
            return Err(INVALID);
        }
        let (pd, iova) = (self.init.pd, Iova::new(atomic.va));
        let ask = Ask { pd, key: atomic.rkey, iova, len: 8, need: Need::RemoteAtomic };
        shared.mrs.check(ask).map_err(|_| ACCESS)?;
        self.save(Saved { first: psn, packets: 1, what: SavedWhat::Atomic { result: None } })?;
        let grant = shared.mrs.grant(ask).map_err(|_| ACCESS)?;
        let kind = if packet.layout.operation == Operation::CompareSwap {
            MemKind::CompareSwap { compare: atomic.compare, swap: atomic.swap_add }
        } else {
            MemKind::FetchAdd { add: atomic.swap_add }
        };
        let seq = self.resp.line.writes.begin();
        let owner = Owner::Atomic { seq, psn };
        shared.memory.push(self.id(), owner, kind, OneOrMore::new(grant), (datagram, 0));
        self.executed(packet, 1);
        self.resp.line.push(Reply::Atomic { psn, write: seq, result: None });
        Ok(())
    }

    /// Whether the memory a request names may be accessed as a whole. A request of length zero names
    /// none (IBA 9.7.4.1.5, C9-88).
    fn check_remote(&self, shared: &mut Shared, reth: Reth, need: Need) -> Result<(), Refused> {
        let Reth { va, rkey, dma_len: len } = reth;
        if len > MESSAGE_BYTES_MAX {
            return Err(INVALID);
        }
        if len == 0 {
            return Ok(());
        }
        let ask = Ask { pd: self.init.pd, key: rkey, iova: Iova::new(va), len, need };
        shared.mrs.check(ask).map_err(|_| ACCESS)
    }

    fn save(&mut self, saved: Saved) -> Result<(), Refused> {
        let depth = usize::from(self.attrs.max_dest_rd_atomic);
        if depth == 0 {
            return Err(INVALID);
        }
        // The oldest gives way: the peer keeps count of its own requests (IBA 9.7.5.1.3.2).
        while self.resp.saved.len() >= depth {
            self.resp.saved.pop_front();
        }
        self.resp.saved.push_back(saved);
        Ok(())
    }

    fn write(
        &mut self,
        shared: &mut Shared,
        packet: &Packet,
        grants: OneOrMore<crate::mr::Grant>,
        datagram: Vec<u8>,
    ) {
        let seq = self.resp.line.writes.begin();
        let owner = Owner::Inbound { seq, psn: packet.head.bth.psn };
        let data = (datagram, packet.payload.start);
        shared.memory.push(self.id(), owner, into_memory(packet), grants, data);
    }

    pub(super) fn take_receive(&mut self, shared: &mut Shared) -> Option<RecvWqe> {
        let Some(srq) = self.init.srq else { return self.rq.take() };
        let queue = shared.srqs.get_mut(&srq.0)?;
        let wqe = queue.queue.take()?;
        if queue.limit > 0 && queue.queue.len() < queue.limit as usize {
            queue.limit = 0;
            shared.raise(Event::SrqLimit(srq));
        }
        Some(wqe)
    }

    fn received(
        &mut self,
        wqe: RecvWqe,
        op: CompletionOp,
        byte_len: u32,
        first_write: u64,
        packet: &Packet,
    ) {
        let completion = Completion {
            wr_id: wqe.id,
            status: Status::Success,
            op,
            byte_len,
            imm: packet.head.imm.map(|imm| imm.data),
            qpn: self.qpn,
            src_qp: None,
        };
        let held = Held::new(wqe, completion, packet.head.bth.solicited);
        self.resp.hold(Held { first_write, ..held });
    }

    /// A packet was accepted: what is expected next, and the ACK if one was asked for.
    fn executed(&mut self, packet: &Packet, packets: u32) {
        let (bth, layout) = (packet.head.bth, packet.layout);
        self.resp.expected = bth.psn.add(packets);
        if layout.place.ends() {
            self.resp.msn_next();
        }
        if matches!(layout.operation, Operation::Send | Operation::Write) {
            self.resp.acknowledged = bth.psn;
            if bth.ack_request {
                self.answer(Syndrome::ACK, bth.psn);
            }
        }
    }

    /// An ACK or NAK, held until every write begun so far is done (IBA 9.7.5.1.1: an ACK says that the
    /// data is in the responder's memory, so far as the peer can tell).
    fn answer(&mut self, syndrome: Syndrome, psn: Psn) {
        let (msn, barrier) = (self.resp.msn, self.resp.line.writes.next());
        self.resp.line.push(Reply::Ack { psn, syndrome, msn, barrier });
    }

    /// Refuses the expected packet for good (IBA 9.9.3.1, error classes A and C).
    fn refuse(&mut self, shared: &mut Shared, code: NakCode, status: Status) {
        self.answer(Syndrome::Nak(code), self.resp.expected);
        if let Some(wqe) = self.resp.current_receive() {
            self.hold_receive(wqe, status);
        }
        shared.raise(match code {
            NakCode::REMOTE_ACCESS => Event::QpAccessError(self.qpn),
            NakCode::INVALID_REQUEST => Event::QpRequestError(self.qpn),
            _ => Event::QpFatal(self.qpn),
        });
        self.enter_error(shared);
    }

    pub(super) fn on_inbound_stored(&mut self, shared: &mut Shared, seq: u64, psn: Psn, ok: bool) {
        if !ok {
            self.on_fault(shared, seq, psn);
        }
        self.resp.line.writes.finish(seq);
    }

    pub(super) fn on_atomic_done(
        &mut self,
        shared: &mut Shared,
        seq: u64,
        psn: Psn,
        result: Option<u64>,
    ) {
        match result {
            Some(original) => {
                self.resp.line.set_atomic(psn, original);
                let saved = self.resp.saved.iter_mut().rev().find(|saved| saved.first == psn);
                if let Some(Saved { what: SavedWhat::Atomic { result }, .. }) = saved {
                    *result = Some(original);
                }
            }
            None => self.on_fault(shared, seq, psn),
        }
        self.resp.line.writes.finish(seq);
    }

    /// The memory behind an accepted request failed: the peer learns that it could not be finished
    /// (IBA table 46, "remote operational error"). Nothing after it is acknowledged.
    pub(super) fn on_fault(&mut self, shared: &mut Shared, seq: u64, psn: Psn) {
        if self.state == QpState::Err {
            return;
        }
        for held in &mut self.resp.held {
            if (held.first_write..held.barrier).contains(&seq) {
                held.completion.status = Status::LocalProtection;
            } else if held.barrier > seq {
                held.completion.status = Status::Flushed;
            }
        }
        let hit = matches!(&self.resp.current,
            Some(Current::Send { first_write, .. }) if *first_write <= seq);
        if let Some(wqe) = self.resp.current_receive() {
            let status = if hit { Status::LocalProtection } else { Status::Flushed };
            self.hold_receive(wqe, status);
        }
        self.resp.line.cut(seq);
        let (msn, syndrome) = (self.resp.msn, Syndrome::Nak(shared.fault));
        self.resp.line.push(Reply::Ack { psn, syndrome, msn, barrier: seq });
        shared.raise(Event::QpFatal(self.qpn));
        self.enter_error(shared);
    }
}
