//! What the lock of a NIC in software protects: engine, memory and link, and the rounds that move between them.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::mr::{DeregisterError, Lkey, PdId, RegionId};
use beeline_core::rc::{CqId, Engine, Event, Transmit};
use beeline_core::time::Time;

use super::super::link::{Arrival, BATCH, Link, Pcap, Segmentation};
use super::super::memory::Memories;
use super::{POLLING, now};

/// Packets prepared for the link at most; the rest stays with the engine.
const OUT_MAX: usize = 2 * BATCH;

/// Rounds of work before the lock is given up.
const ROUNDS_MAX: usize = 64;

/// How soon a full link is tried again.
const LINK_RETRY: Duration = Duration::from_micros(50);

/// Asynchronous events kept for the consumer at most; the oldest goes.
const EVENTS_MAX: usize = 1024;

/// What the lock protects.
#[derive(Debug)]
pub(in crate::verbs) struct Core {
    pub(in crate::verbs) engine: Engine,
    pub(in crate::verbs) memories: Memories,
    pub(in crate::verbs) regions: HashMap<Lkey, RegionId>,
    /// Completion channels.
    pub(in crate::verbs) channels: HashMap<CqId, Arc<OwnedFd>>,
    pub(in crate::verbs) events: VecDeque<Event>,
    /// Regions dropped while they were in use, to be removed when they are not.
    pub(in crate::verbs) retired: Vec<(PdId, Lkey)>,
    pub(super) link: Link,
    out: VecDeque<Transmit>,
    link_full: bool,
    /// There was more to do than one turn allows.
    more: bool,
    /// The last round of a caller who polls may have left something to send.
    pending: bool,
    /// Polls of callers.
    pub(super) polls: u32,
    spare: Vec<Vec<u8>>,
    arrivals: Vec<Arrival>,
    sent: Vec<Vec<u8>>,
    pcap: Option<Pcap>,
    trace_error: Option<String>,
}

impl Core {
    pub(super) fn new(engine: Engine, memories: Memories, link: Link, pcap: Option<Pcap>) -> Self {
        Self {
            engine,
            memories,
            regions: HashMap::new(),
            channels: HashMap::new(),
            events: VecDeque::new(),
            retired: Vec::new(),
            link,
            out: VecDeque::new(),
            link_full: false,
            more: false,
            pending: false,
            polls: 0,
            spare: Vec::new(),
            arrivals: Vec::new(),
            sent: Vec::new(),
            pcap,
            trace_error: None,
        }
    }

    /// Moves packets, memory and clocks until there is nothing to do, or for a bounded while, from `time`
    /// on.
    pub(super) fn drive(&mut self, mut time: Time, start: Instant, events: &OwnedFd) {
        self.more = true;
        self.pending = false;
        for _ in 0..ROUNDS_MAX {
            let mut busy = self.receive(time);
            if self.engine.poll_timeout().is_some_and(|due| due <= time) {
                self.engine.handle_timeout(time);
            }
            self.run_memory();
            busy |= self.send(time);
            if !busy {
                self.more = false;
                break;
            }
            time = now(start);
        }
        // With nothing to do, what is not sent and waits nowhere was given up.
        if !self.more && self.memories.has_unsent() {
            self.memories.sweep(&self.engine, &self.out);
        }
        self.route_events(events);
        self.bury();
    }

    /// One round for a caller who polls: sends what the round before left, then takes what has arrived.
    /// What that causes waits for the next round, so that the caller sees what came without waiting for
    /// an ACK to be sent, and the ACK goes out with what the caller sends in return. The NIC's thread
    /// sends it where no next round comes.
    pub(super) fn turn(&mut self, time: Time, events: &OwnedFd) -> bool {
        let sent = self.send(time);
        let received = self.receive(time);
        let late = self.engine.poll_timeout().is_some_and(|due| due <= time);
        if late {
            self.engine.handle_timeout(time);
        }
        let ended = self.run_memory();
        self.route_events(events);
        self.bury();
        self.pending = sent || received || late || ended || self.link.has_word();
        self.pending
    }

    /// Whether a turn would find nothing to do, unless a clock has run out: what the turn before left is done,
    /// and nothing has come since.
    /// Nothing has changed either that the NIC's thread would have to know.
    pub(super) fn is_quiet(&self) -> bool {
        !(self.pending || self.more || self.link_full)
            && self.link.is_quiet()
            && self.out.is_empty()
            && self.memories.is_idle()
            && self.retired.is_empty()
    }

    /// Sends what there is, for a bounded while.
    pub(super) fn push(&mut self, time: Time, events: &OwnedFd) {
        self.run_memory();
        self.more = true;
        for _ in 0..ROUNDS_MAX {
            if !self.send(time) {
                self.more = false;
                break;
            }
        }
        self.route_events(events);
    }

    fn receive(&mut self, time: Time) -> bool {
        while self.spare.len() < BATCH {
            let buffer = self.engine.buffer();
            self.spare.push(buffer);
        }
        let mut arrivals = std::mem::take(&mut self.arrivals);
        self.link.receive(&mut self.spare, &mut arrivals);
        let busy = !arrivals.is_empty();
        for Arrival { path, datagram } in arrivals.drain(..) {
            self.trace(&path, &datagram);
            self.engine.handle_datagram(time, &path, datagram);
        }
        self.arrivals = arrivals;
        if self.link.take_unsettled() {
            // What has led to a fetch of the peer's memory is known now, and what has not.
            self.run_memory();
            self.memories.settle_arrivals();
        }
        busy
    }

    /// Answers whether an operation has ended: there may be something to send then.
    fn run_memory(&mut self) -> bool {
        let mut ended = false;
        for answer in self.memories.finished() {
            // Before the answer, so that the peer hears that its access was refused.
            for region in &answer.gone {
                if let Some((lkey, _)) = self.regions.iter().find(|(_, known)| *known == region) {
                    let _ = self.engine.revoke(*lkey);
                }
            }
            self.engine.handle_memory_done(answer.token, answer.buffer, answer.result);
            ended = true;
        }
        while let Some(op) = self.engine.poll_memory() {
            if let Some(answer) = self.memories.run(op) {
                self.engine.handle_memory_done(answer.token, answer.buffer, answer.result);
                ended = true;
            }
        }
        if self.memories.wants_sweep() {
            self.memories.sweep(&self.engine, &self.out);
        }
        ended
    }

    /// Sends one batch. `false` when there was nothing to send or the link is full.
    fn send(&mut self, time: Time) -> bool {
        while self.out.len() < OUT_MAX {
            let Some(transmit) = self.engine.poll_transmit(time) else { break };
            if self.pcap.is_some() {
                let Transmit { path, datagram } = &transmit;
                let (path, datagram) = (*path, datagram.clone());
                self.trace(&path, &datagram);
            }
            self.out.push_back(transmit);
            // A packet sent makes room for the next one's payload.
            if self.out.len().is_multiple_of(BATCH / 2) {
                self.run_memory();
            }
        }
        let nothing = self.out.is_empty()
            && !self.link.has_word()
            && self.link.due().is_none_or(|due| due > Instant::now());
        if nothing {
            self.link_full = false;
            return false;
        }
        self.link_full = !self.link.send(&mut self.out, &mut self.sent);
        for buffer in self.sent.drain(..) {
            self.engine.recycle(buffer);
        }
        self.run_memory();
        !self.link_full
    }

    /// A trace that cannot be written is ended: it must not end the traffic.
    fn trace(&mut self, path: &beeline_core::roce::Path, datagram: &[u8]) {
        if let Some(pcap) = &mut self.pcap
            && let Err(error) = pcap.write(path, datagram).and_then(|()| pcap.flush())
        {
            self.pcap = None;
            self.trace_error = Some(error.to_string());
        }
    }

    fn route_events(&mut self, fd: &OwnedFd) {
        while let Some(event) = self.engine.poll_event() {
            match event {
                Event::CompletionReady(cq) => {
                    if let Some(channel) = self.channels.get(&cq) {
                        let _ = rustix::io::write(channel.as_fd(), &1u64.to_ne_bytes());
                    }
                }
                event => {
                    if self.events.len() >= EVENTS_MAX {
                        self.events.pop_front();
                    }
                    self.events.push_back(event);
                    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
                }
            }
        }
    }

    /// Why the trace ended, if it did.
    pub(in crate::verbs) fn trace_error(&self) -> Option<&str> {
        self.trace_error.as_deref()
    }

    pub(in crate::verbs) fn segmentation(&self) -> Segmentation {
        self.link.segmentation()
    }

    /// Removes regions that were dropped in use and are not in use any more.
    fn bury(&mut self) {
        if self.retired.is_empty() {
            return;
        }
        let mut retired = std::mem::take(&mut self.retired);
        retired.retain(|(pd, lkey)| !self.forget(*pd, *lkey));
        self.retired = retired;
    }

    /// Removes a region. `false` while it is in use, by this side or by a peer that fetches its bytes.
    pub(in crate::verbs) fn forget(&mut self, pd: PdId, lkey: Lkey) -> bool {
        self.lent(lkey) == 0 && self.deregister(pd, lkey).is_ok()
    }

    /// Removes a region.
    ///
    /// # Errors
    /// While it is in use, and for an unknown one.
    pub(in crate::verbs) fn deregister(
        &mut self,
        pd: PdId,
        lkey: Lkey,
    ) -> Result<(), DeregisterError> {
        self.engine.deregister(pd, lkey)?;
        if let Some(region) = self.regions.remove(&lkey) {
            self.memories.remove(region);
        }
        Ok(())
    }

    /// Names of a region's bytes in packets that the peer may still follow; none off a local link.
    pub(in crate::verbs) fn lent(&mut self, lkey: Lkey) -> u32 {
        let Some(region) = self.regions.get(&lkey).copied() else { return 0 };
        if self.memories.lent(region) > 0 {
            // What is finished must be with the engine before it is asked what is still to be sent.
            self.run_memory();
            self.memories.sweep(&self.engine, &self.out);
        }
        self.memories.lent(region)
    }

    /// When something is to be done although nothing arrives.
    pub(super) fn due(&self, start: Instant, time: Time) -> Option<Time> {
        let of_link = self.link.due().map(|due| {
            let nanos = due.saturating_duration_since(start).as_nanos();
            Time::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
        });
        let retry = self.link_full.then(|| time + LINK_RETRY);
        // Nothing else would tell: what is left may be packets to send, with no clock set for them.
        let more = self.more.then_some(time);
        // Whoever polls will most likely do so again before.
        let pending = self.pending.then(|| time + POLLING);
        [self.engine.poll_timeout(), of_link, retry, more, pending].into_iter().flatten().min()
    }
}
