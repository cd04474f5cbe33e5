//! The engine: one NIC without its wires, its memory and its clock.
//!
//! Nothing here does I/O. The caller drives it, in any order and as often as it likes:
//!
//! 1. `handle_*`: what happened. [`Engine::handle_datagram`], [`Engine::handle_memory_done`],
//!    [`Engine::handle_timeout`].
//! 2. What the consumer wants: `create_*`, [`Engine::modify_qp`], [`Engine::post_send`] and their like.
//! 3. `poll_*`: what to do now. [`Engine::poll_memory`], [`Engine::poll_transmit`],
//!    [`Engine::poll_completion`], [`Engine::poll_event`] until each answers none, and
//!    [`Engine::poll_timeout`] for how long to sleep.
//!
//! The same calls with the same times and the same [`Secret`] give the same answers.

mod config;
mod error;
mod objects;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::mr::{MrTable, PdId, Secret};
use crate::roce::icrc::verify;
use crate::roce::{Bth, NakCode, Packet, Path, Qpn, Service, Strength};
use crate::time::Time;

use super::memory::{MemFault, MemOp, MemQueue, MemToken};
use super::qp::Qp;
use super::queue::{Cq, CqId, CqOverrun, Notify, Pushed, Srq, SrqId};
use super::state::{AttrLimits, QpKind, QpState};
use super::work::{Completion, PostError, RecvWr, SendWr};

pub use config::{AtomicReply, Config, ReadReplay};
pub use error::{CreateError, DestroyError};

/// Events waiting to be polled at most.
const EVENTS_MAX: usize = 4096;

/// Packet buffers kept for reuse at most.
const BUFFERS_MAX: usize = 2048;

/// Packet buffers longer than usual kept for reuse at most.
const LONG_BUFFERS_MAX: usize = 32;

/// The longest packet on a wire: all headers, a full payload, the ICRC.
const BUFFER_BYTES: usize = 4096 + 96;

/// Most objects of one kind, and most entries of one queue.
const OBJECTS_MAX: usize = 1 << 16;

/// Longest queue that can be made, in entries.
pub const QUEUE_ENTRIES_MAX: u32 = 1 << 20;

/// Longest inline data, in bytes.
pub const INLINE_BYTES_MAX: u32 = 4096;

/// One NIC.
#[derive(Debug)]
pub struct Engine {
    qps: BTreeMap<Qpn, Qp>,
    /// Queue pairs with packets to send, served in turn.
    line: VecDeque<Qpn>,
    clocks: BTreeSet<(Time, Qpn)>,
    pds: BTreeMap<PdId, u32>,
    shared: Shared,
}

/// A datagram to be sent.
#[derive(Debug, PartialEq, Eq)]
pub struct Transmit {
    /// From where to where.
    pub path: Path,
    /// The UDP payload, BTH to ICRC. Pass it to [`Engine::recycle`] when it is sent.
    pub datagram: Vec<u8>,
}

/// Something the consumer is told unasked (IBA 11.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A completion queue that was armed has a completion.
    CompletionReady(CqId),
    /// A completion queue was overrun.
    CqError(CqId),
    /// A peer's request was refused as invalid; the queue pair is in ERR.
    QpRequestError(Qpn),
    /// A peer's access was refused; the queue pair is in ERR.
    QpAccessError(Qpn),
    /// The queue pair failed on this side; it is in ERR.
    QpFatal(Qpn),
    /// No more receive of the shared queue is taken by a queue pair in ERR.
    LastWqeReached(Qpn),
    /// A shared receive queue fell below its limit.
    SrqLimit(SrqId),
}

/// What happened, counted since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counters {
    pub received: u64,
    pub sent: u64,
    /// Datagrams whose ICRC was checked in full, and with 16 bits.
    pub icrc_full: u64,
    pub icrc_half: u64,
    pub icrc_errors: u64,
    pub malformed: u64,
    /// For a queue pair that does not exist, or not for this address or partition.
    pub unknown_destination: u64,
    /// From an address other than the connected peer's.
    pub wrong_peer: u64,
    pub congestion_notices: u64,
    pub duplicates: u64,
    pub gaps: u64,
    pub stale_responses: u64,
    pub repeats: u64,
    pub timeouts: u64,
    pub rnr_sent: u64,
    pub rnr_received: u64,
    /// Dropped because the queue pair's state or its bounds did not allow more.
    pub busy_drops: u64,
    pub unwanted_datagrams: u64,
    /// Events lost because nobody polled them.
    pub events_lost: u64,
}

/// What queue pairs share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) mrs: MrTable,
    pub(super) memory: MemQueue,
    pub(super) cqs: BTreeMap<u32, Cq>,
    pub(super) srqs: BTreeMap<u32, Srq>,
    pub(super) counters: Counters,
    events: VecDeque<Event>,
    buffers: Vec<Vec<u8>>,
    secret: Secret,
    drawn: u64,
    uid: u64,
    next_object: u32,
    overrun: bool,
    /// What a peer is told when the memory behind its request fails.
    pub(super) fault: NakCode,
}

impl Engine {
    /// A NIC with nothing in it. `secret` comes from the operating system's generator; keys and queue
    /// pair numbers follow from it.
    pub fn new(config: Config, secret: &Secret) -> Self {
        let shared = Shared {
            mrs: MrTable::new(config.regions_max, secret.derive(1)),
            config,
            memory: MemQueue::new(),
            cqs: BTreeMap::new(),
            srqs: BTreeMap::new(),
            counters: Counters::default(),
            events: VecDeque::new(),
            buffers: Vec::new(),
            secret: secret.derive(2),
            drawn: 0,
            uid: 0,
            next_object: 1,
            overrun: false,
            fault: NakCode::REMOTE_OPERATION,
        };
        Self {
            qps: BTreeMap::new(),
            line: VecDeque::new(),
            clocks: BTreeSet::new(),
            pds: BTreeMap::new(),
            shared,
        }
    }

    /// The set-up.
    pub const fn config(&self) -> &Config {
        &self.shared.config
    }

    /// What happened so far.
    pub const fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Posts a send work request.
    pub fn post_send(&mut self, qpn: Qpn, wr: SendWr) -> Result<(), PostError> {
        let qp = self.qps.get_mut(&qpn).ok_or(PostError::Unknown)?;
        let posted = qp.post_send(&mut self.shared, wr);
        self.settle(qpn);
        posted
    }

    /// Posts a receive work request; allowed from INIT on (IBA 10.3.1.2).
    pub fn post_recv(&mut self, qpn: Qpn, wr: RecvWr) -> Result<(), PostError> {
        let qp = self.qps.get_mut(&qpn).ok_or(PostError::Unknown)?;
        if qp.init.srq.is_some() {
            return Err(PostError::SharedReceives);
        }
        if qp.state == QpState::Reset {
            return Err(PostError::State { state: qp.state });
        }
        qp.rq.post(wr, &mut self.shared.mrs)?;
        if qp.state == QpState::Err {
            qp.flush_receives();
            qp.settle_receives(&mut self.shared);
            self.settle(qpn);
        }
        Ok(())
    }

    /// Posts a receive work request to a shared receive queue.
    pub fn post_srq_recv(&mut self, srq: SrqId, wr: RecvWr) -> Result<(), PostError> {
        let srq = self.shared.srqs.get_mut(&srq.0).ok_or(PostError::Unknown)?;
        srq.queue.post(wr, &mut self.shared.mrs)
    }

    /// The oldest completion of a queue. An error once the queue was overrun and what it still held has
    /// been taken.
    pub fn poll_completion(&mut self, cq: CqId) -> Result<Option<Completion>, CqOverrun> {
        self.shared.cqs.get_mut(&cq.0).map_or(Ok(None), Cq::pop)
    }

    /// Asks for one [`Event::CompletionReady`]; completions that are already there do not raise it.
    pub fn request_notify(&mut self, cq: CqId, notify: Notify) {
        if let Some(cq) = self.shared.cqs.get_mut(&cq.0) {
            cq.arm(notify);
        }
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.shared.events.pop_front()
    }

    /// A datagram arrived: the UDP payload and what the link knows of its headers.
    pub fn handle_datagram(&mut self, now: Time, path: &Path, datagram: Vec<u8>) {
        self.shared.counters.received += 1;
        match verify(path, &datagram) {
            Some(Strength::Full) => self.shared.counters.icrc_full += 1,
            Some(Strength::Half) => self.shared.counters.icrc_half += 1,
            // A packet with a wrong ICRC is dropped silently (IBA 9.6.1.1, C9-6).
            None => {
                self.shared.counters.icrc_errors += 1;
                return self.shared.recycle(datagram);
            }
        }
        let parsed = if self.shared.config.shared_memory {
            Packet::parse_local(&datagram)
        } else {
            Packet::parse(&datagram)
        };
        let Ok(packet) = parsed else {
            self.shared.counters.malformed += 1;
            return self.shared.recycle(datagram);
        };
        let bth = packet.head.bth;
        if packet.layout.service == Service::Cnp {
            self.shared.counters.congestion_notices += 1;
            return self.shared.recycle(datagram);
        }
        let ours = path.dst == self.shared.config.local && bth.pkey == Bth::DEFAULT_PKEY;
        let Some(qp) = self.qps.get_mut(&bth.dest_qp).filter(|_| ours) else {
            self.shared.counters.unknown_destination += 1;
            return self.shared.recycle(datagram);
        };
        match (qp.init.kind, packet.layout.service) {
            (QpKind::Ud, Service::Ud) => {
                qp.on_datagram(&mut self.shared, path, &packet, &datagram);
                qp.settle_receives(&mut self.shared);
                self.shared.recycle(datagram);
            }
            (QpKind::Rc, Service::Rc) if qp.attrs.peer == Some(path.src) => {
                if packet.layout.operation.is_response() {
                    qp.on_response(&mut self.shared, now, &packet, datagram);
                } else {
                    qp.on_request(&mut self.shared, &packet, datagram);
                }
            }
            // Another sender than the peer (IBA 9.6.1.2.1), or an opcode of another service than the
            // queue pair's (9.6.1.1.2): dropped silently.
            (QpKind::Rc, Service::Rc) => {
                self.shared.counters.wrong_peer += 1;
                return self.shared.recycle(datagram);
            }
            _ => {
                self.shared.counters.malformed += 1;
                return self.shared.recycle(datagram);
            }
        }
        self.settle(bth.dest_qp);
    }

    /// The next memory operation to carry out.
    pub fn poll_memory(&mut self) -> Option<MemOp> {
        self.shared.memory.pop()
    }

    /// The answer to a memory operation: its buffer back, and for an atomic the old value (0 otherwise).
    /// An unknown token is ignored.
    pub fn handle_memory_done(
        &mut self,
        token: MemToken,
        buffer: Vec<u8>,
        result: Result<u64, MemFault>,
    ) {
        let Some(done) = self.shared.memory.finish(token, &mut self.shared.mrs) else { return };
        // Memory that was taken away is an access that is no longer allowed; any other failure is one of
        // this side (IBA 9.9.3, table 46).
        self.shared.fault = match done.revoked {
            true => NakCode::REMOTE_ACCESS,
            false => NakCode::REMOTE_OPERATION,
        };
        match self.qps.get_mut(&done.qp.qpn).filter(|qp| qp.uid == done.qp.uid) {
            Some(qp) => {
                qp.on_memory(&mut self.shared, done.owner, buffer, result);
                self.settle(done.qp.qpn);
            }
            None => self.shared.recycle(buffer),
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.clocks.first().map(|(at, _)| *at)
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Time) {
        // Each queue pair once: a clock that is set anew runs at the next call.
        let due: Vec<Qpn> =
            self.clocks.iter().take_while(|(at, _)| *at <= now).map(|(_, qpn)| *qpn).collect();
        for qpn in due {
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.on_timeout(&mut self.shared, now);
            }
            self.settle(qpn);
        }
    }

    /// The next datagram to send. Queue pairs take turns.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Transmit> {
        while let Some(qpn) = self.line.pop_front() {
            let Some(qp) = self.qps.get_mut(&qpn) else { continue };
            qp.in_line = false;
            let sent = qp.transmit(&mut self.shared, now);
            self.settle(qpn);
            if sent.is_some() {
                self.shared.counters.sent += 1;
                return sent;
            }
        }
        None
    }

    /// Shows every datagram that is made and not handed out yet, in no order: what names memory in them is
    /// still to be sent. What was handed over to [`handle_memory_done`](Self::handle_memory_done) and is
    /// not among them will never be.
    pub fn each_unsent(&self, mut show: impl FnMut(&[u8])) {
        for qp in self.qps.values() {
            qp.req.each_unsent(&mut show);
            qp.resp.line.each_unsent(&mut show);
        }
    }

    /// An empty buffer for a datagram, with room for the longest.
    pub fn buffer(&mut self) -> Vec<u8> {
        self.shared.buffer()
    }

    /// Takes a buffer back.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        self.shared.recycle(buffer);
    }

    /// Lets the work request numbers of a queue pair start elsewhere.
    #[cfg(test)]
    pub(super) fn start_numbers_at(&mut self, qpn: Qpn, number: u64) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.req.start_numbers_at(number);
        }
    }

    /// Brings the lists up to date with a queue pair that was touched.
    fn settle(&mut self, qpn: Qpn) {
        if core::mem::take(&mut self.shared.overrun) {
            self.on_overrun();
        }
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if !qp.in_line && qp.has_packets() {
            qp.in_line = true;
            self.line.push_back(qpn);
        }
        let deadline = qp.deadline();
        if deadline != qp.listed {
            if let Some(at) = qp.listed {
                self.clocks.remove(&(at, qpn));
            }
            if let Some(at) = deadline {
                self.clocks.insert((at, qpn));
            }
            qp.listed = deadline;
        }
    }

    /// Queue pairs whose completions were lost cannot go on (IBA 10.10.2.3).
    fn on_overrun(&mut self) {
        for qp in self.qps.values_mut() {
            let lost = |cq: CqId| self.shared.cqs.get(&cq.0).is_some_and(|cq| cq.is_overrun());
            if (lost(qp.init.send_cq) || lost(qp.init.recv_cq)) && qp.state != QpState::Reset {
                qp.enter_error(&mut self.shared);
            }
        }
        self.shared.overrun = false;
    }
}

impl Shared {
    pub(super) const fn attr_limits(&self) -> AttrLimits {
        let Config { mtu, rd_atomic_max, local, .. } = self.config;
        AttrLimits { mtu, rd_atomic: rd_atomic_max, dest_rd_atomic: rd_atomic_max, local }
    }

    pub(super) fn raise(&mut self, event: Event) {
        if self.events.len() >= EVENTS_MAX {
            self.counters.events_lost += 1;
            return;
        }
        self.events.push_back(event);
    }

    pub(super) fn complete(&mut self, cq: CqId, completion: Completion, solicited: bool) {
        let Some(queue) = self.cqs.get_mut(&cq.0) else { return };
        match queue.push(completion, solicited) {
            Pushed::Quiet => {}
            Pushed::Event => self.raise(Event::CompletionReady(cq)),
            Pushed::Overrun => {
                self.overrun = true;
                self.raise(Event::CqError(cq));
            }
        }
    }

    pub(super) fn buffer(&mut self) -> Vec<u8> {
        self.buffers.pop().unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES))
    }

    pub(super) fn recycle(&mut self, mut buffer: Vec<u8>) {
        // Long ones come from a local link, where most packets only name their payload.
        let long = buffer.capacity() > 2 * BUFFER_BYTES;
        if self.buffers.len() < if long { LONG_BUFFERS_MAX } else { BUFFERS_MAX } {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }

    pub(super) const fn next_uid(&mut self) -> u64 {
        self.uid += 1;
        self.uid
    }

    const fn next_object(&mut self) -> u32 {
        self.next_object += 1;
        self.next_object
    }

    fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.secret.mix(self.drawn)
    }
}
