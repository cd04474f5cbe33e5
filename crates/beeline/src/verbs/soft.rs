//! The software NIC: the engine of [`beeline_core::rc`], driven.
//!
//! Whoever has something to do drives it: posting a work request and polling a completion queue move
//! packets on the calling thread, which costs no hand-over. A thread of the NIC's own waits for packets
//! and clocks when no caller polls.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_core::mr::{DeregisterError, Lkey, PdId, RegionId, Secret};
use beeline_core::rc::{Config, CqId, Engine, Event, Transmit};
use beeline_core::roce::{Mtu, Strength};
use beeline_core::time::Time;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use super::alarm::Alarm;
use super::link::{Arrival, BATCH, Link, LinkKind, Pcap, Segmentation};
use super::memory::Memories;
use crate::error::{Error, Kind, Result};
use crate::lock;

/// Packets prepared for the link at most; the rest stays with the engine.
const OUT_MAX: usize = 2 * BATCH;

/// Rounds of work before the lock is given up.
const ROUNDS_MAX: usize = 64;

/// How long after a caller polled the NIC's own thread stays away.
const POLLING: Duration = Duration::from_millis(1);

/// How long a caller polls in vain before it gives its core up at every further poll. Whoever waits for a
/// peer on a machine with fewer cores than pollers would otherwise keep the peer from running.
const PATIENCE_NANOS: u64 = 20_000;

/// Polls in vain of which one looks at the clock.
const QUIET_POLLS: u32 = 8;

/// How soon a full link is tried again.
const LINK_RETRY: Duration = Duration::from_micros(50);

/// Asynchronous events kept for the consumer at most; the oldest goes.
const EVENTS_MAX: usize = 1024;

/// The NIC: shared by everything made on it, and stopped with the last of that.
#[derive(Debug)]
pub(super) struct Soft {
    pub(super) shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug)]
pub(super) struct Shared {
    core: Mutex<Core>,
    start: Instant,
    /// Wakes the NIC's thread.
    wake: OwnedFd,
    /// Readable when packets arrive.
    link: OwnedFd,
    /// Readable when an asynchronous event is there.
    pub(super) events: OwnedFd,
    pub(super) local: IpAddr,
    pub(super) mtu: Mtu,
    pub(super) kind: LinkKind,
    pub(super) strength: Strength,
    stop: AtomicBool,
    alarm: Alarm,
    /// When a caller last polled, in nanoseconds since `start`.
    polled: AtomicU64,
    /// Since when callers poll in vain, likewise; 0 when they do not.
    idle_since: AtomicU64,
}

/// What the lock protects.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) engine: Engine,
    pub(super) memories: Memories,
    pub(super) regions: HashMap<Lkey, RegionId>,
    /// Completion channels.
    pub(super) channels: HashMap<CqId, Arc<OwnedFd>>,
    pub(super) events: VecDeque<Event>,
    /// Regions dropped while they were in use, to be removed when they are not.
    pub(super) retired: Vec<(PdId, Lkey)>,
    link: Link,
    out: VecDeque<Transmit>,
    link_full: bool,
    /// There was more to do than one turn allows.
    more: bool,
    /// The last round of a caller who polls may have left something to send.
    pending: bool,
    /// Polls of callers.
    polls: u32,
    spare: Vec<Vec<u8>>,
    arrivals: Vec<Arrival>,
    sent: Vec<Vec<u8>>,
    pcap: Option<Pcap>,
}

impl Soft {
    pub(super) fn start(
        config: Config,
        link: Link,
        pcap: Option<Pcap>,
        secret: &Secret,
    ) -> Result<Arc<Self>> {
        let (local, mtu) = (config.local, config.mtu);
        let peer = link.peer();
        let wake = eventfd()?;
        let io = |error| Error::io("duplicate a descriptor", error);
        let mover_wake = wake.try_clone().map_err(io)?;
        let shared = Arc::new(Shared {
            start: Instant::now(),
            link: link.fd().try_clone_to_owned().map_err(io)?,
            events: eventfd()?,
            local,
            mtu,
            kind: link.kind(),
            strength: link.strength(local),
            core: Mutex::new(Core {
                engine: Engine::new(config, secret),
                memories: Memories::new(mover_wake, peer),
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
            }),
            wake,
            stop: AtomicBool::new(false),
            polled: AtomicU64::new(0),
            alarm: Alarm::new(),
            idle_since: AtomicU64::new(0),
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("beeline-nic".into())
            .spawn(move || of_thread.run())
            .map_err(|error| Error::io("start the thread of a software NIC", error))?;
        Ok(Arc::new(Self { shared, thread: Some(thread) }))
    }
}

impl Drop for Soft {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Runs `work` on the NIC, then moves what it caused.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = lock(&self.core);
        let answer = work(&mut core);
        let time = self.now();
        core.drive(time, self.start, &self.events);
        self.watch(core, time);
        answer
    }

    /// As [`with`](Self::with), for work requests: only sends what they caused. What arrives is for whoever
    /// polls, or for the NIC's thread.
    pub(super) fn post<T>(&self, work: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = lock(&self.core);
        let answer = work(&mut core);
        let time = self.now();
        core.push(time, &self.events);
        self.watch(core, time);
        answer
    }

    /// Looks for something with `find`, and where it finds nothing, moves packets and looks again. Tells
    /// the NIC's thread that the caller is polling.
    pub(super) fn poll<T>(&self, mut find: impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        let mut core = lock(&self.core);
        if let Some(found) = find(&mut core) {
            self.idle_since.store(0, Ordering::Relaxed);
            return Some(found);
        }
        // A look at the clock is a good part of what a poll costs on a fast link: where nothing has come, one
        // in several polls does. What has come is then seen so much sooner.
        let quiet = core.is_quiet();
        core.polls = core.polls.wrapping_add(1);
        if quiet && !core.polls.is_multiple_of(QUIET_POLLS) {
            return None;
        }
        let time = self.now();
        self.polled.store(time.as_nanos().max(1), Ordering::Relaxed);
        if quiet && core.engine.poll_timeout().is_none_or(|due| due > time) {
            drop(core);
            self.idle(time, true);
            return None;
        }
        let moved = core.turn(time, &self.events);
        let found = find(&mut core);
        self.watch(core, time);
        self.idle(time, !moved && found.is_none());
        found
    }

    /// Keeps count of polls in vain, and gives the core up after some of them.
    fn idle(&self, time: Time, in_vain: bool) {
        let since = self.idle_since.load(Ordering::Relaxed);
        if !in_vain {
            if since != 0 {
                self.idle_since.store(0, Ordering::Relaxed);
            }
        } else if since == 0 {
            self.idle_since.store(time.as_nanos().max(1), Ordering::Relaxed);
        } else if time.as_nanos().saturating_sub(since) > PATIENCE_NANOS {
            std::thread::yield_now();
        }
    }

    /// The caller is about to wait rather than poll: the NIC's thread takes over.
    pub(super) fn hand_over(&self) {
        if self.polled.swap(0, Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    pub(super) fn now(&self) -> Time {
        now(self.start)
    }

    /// Wakes the NIC's thread when a clock runs out before it would look.
    fn watch(&self, core: std::sync::MutexGuard<'_, Core>, time: Time) {
        let due = core.due(self.start, time);
        drop(core);
        if self.alarm.oversleeps(due) {
            self.wake();
        }
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The NIC's thread.
    fn run(&self) {
        while !self.stop.load(Ordering::Acquire) {
            let polled = self.polled.load(Ordering::Relaxed);
            let now = self.now();
            let polling = polled != 0 && now.saturating_since(Time::from_nanos(polled)) < POLLING;
            let due = {
                let mut core = lock(&self.core);
                if !polling {
                    core.drive(now, self.start, &self.events);
                }
                let now = self.now();
                let due = core.due(self.start, now);
                let look = polling.then(|| now + POLLING);
                let due = [due, look].into_iter().flatten().min();
                // Under the lock, so that whoever changes a clock next compares with this.
                self.alarm.sleeps(due);
                due
            };
            let wait = due.map(|due| due.saturating_since(self.now()));
            if !polling && lock(&self.core).link.set_sleeping(true) {
                continue;
            }
            self.sleep(wait, !polling);
            self.alarm.wakes();
            if !polling {
                lock(&self.core).link.set_sleeping(false);
            }
        }
    }

    fn sleep(&self, wait: Option<Duration>, for_packets: bool) {
        let wait = wait.map(|wait| Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        let mut fds =
            [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.link, PollFlags::IN)];
        let count = if for_packets { 2 } else { 1 };
        let Some(fds) = fds.get_mut(..count) else { return };
        // Interrupted or not: the loop looks at everything again.
        let _ = rustix::event::poll(fds, wait.as_ref());
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

impl Core {
    /// Moves packets, memory and clocks until there is nothing to do, or for a bounded while, from `time`
    /// on.
    fn drive(&mut self, mut time: Time, start: Instant, events: &OwnedFd) {
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
        self.route_events(events);
        self.bury();
    }

    /// One round for a caller who polls: sends what the round before left, then takes what has arrived.
    /// What that causes waits for the next round, so that the caller sees what came without waiting for
    /// an ACK to be sent, and the ACK goes out with what the caller sends in return. The NIC's thread
    /// sends it where no next round comes.
    fn turn(&mut self, time: Time, events: &OwnedFd) -> bool {
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
    fn is_quiet(&self) -> bool {
        !(self.pending || self.more || self.link_full)
            && self.link.is_quiet()
            && self.out.is_empty()
            && self.memories.is_idle()
            && self.retired.is_empty()
    }

    /// Sends what there is, for a bounded while.
    fn push(&mut self, time: Time, events: &OwnedFd) {
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
            && pcap.write(path, datagram).and_then(|()| pcap.flush()).is_err()
        {
            self.pcap = None;
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

    pub(super) fn segmentation(&self) -> Segmentation {
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
    pub(super) fn forget(&mut self, pd: PdId, lkey: Lkey) -> bool {
        self.lent(lkey) == 0 && self.deregister(pd, lkey).is_ok()
    }

    /// Removes a region.
    ///
    /// # Errors
    /// While it is in use, and for an unknown one.
    pub(super) fn deregister(&mut self, pd: PdId, lkey: Lkey) -> Result<(), DeregisterError> {
        self.engine.deregister(pd, lkey)?;
        if let Some(region) = self.regions.remove(&lkey) {
            self.memories.remove(region);
        }
        Ok(())
    }

    /// Names of a region's bytes in packets that the peer may still follow; none off a local link.
    pub(super) fn lent(&mut self, lkey: Lkey) -> u32 {
        let Some(region) = self.regions.get(&lkey).copied() else { return 0 };
        if self.memories.lent(region) > 0 {
            // What is finished must be with the engine before it is asked what is still to be sent.
            self.run_memory();
            self.memories.sweep(&self.engine, &self.out);
        }
        self.memories.lent(region)
    }

    /// When something is to be done although nothing arrives.
    fn due(&self, start: Instant, time: Time) -> Option<Time> {
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

fn now(start: Instant) -> Time {
    Time::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

pub(super) fn eventfd() -> Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| Error::io("make an event descriptor", error.into()))
}

/// Random bits from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    use std::io::Read;

    let mut bytes = [0; N];
    let path = std::path::Path::new("/dev/urandom");
    std::fs::File::open(path)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Error::at("read", path, error))?;
    Ok(bytes)
}

/// The largest path MTU of the interface that has `local`.
pub(super) fn interface_mtu(local: IpAddr) -> Result<Mtu> {
    let loopback = local.is_loopback();
    let name = match beeline_sys::net::interface_of(local) {
        Ok(name) => name,
        // All of 127.0.0.0/8 is there although only one address is listed.
        Err(_) if loopback => "lo".to_owned(),
        Err(error) => {
            return Err(Error::io(format_args!("find the interface of {local}"), error)
                .remedy("name an address of this machine"));
        }
    };
    let path = std::path::Path::new("/sys/class/net").join(&name).join("mtu");
    let text = std::fs::read_to_string(&path).map_err(|error| Error::at("read", &path, error))?;
    let device: u32 = text.trim().parse().unwrap_or(0);
    Mtu::of_device(device).ok_or_else(|| {
        Error::new(Kind::Refused, format!("interface {name} has an MTU of {device}"))
            .remedy("RoCEv2 needs at least 336")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::link::PairLink;
    use crate::verbs::{
        Access, Connect, Context, Endpoint, HostMem, Payload, Psn, QpCaps, QpKind, Qpn, Remote,
        Rkey, SendOp, SendWr,
    };

    /// A message of more packets than one turn sends, to a peer that never answers, with no clock set:
    /// all of it goes out, although nothing arrives and nobody polls.
    #[test]
    fn work_left_over_is_not_forgotten() {
        const BYTES: u32 = 4 << 20;
        let (link, _far) = PairLink::new().unwrap();
        let local = IpAddr::from([127, 0, 0, 1]);
        let config = Config { mtu: Mtu::MIN, window_packets: 1 << 20, ..Config::new(local) };
        let soft = Soft::start(config, Link::Pair(link), None, &Secret::new([1, 2])).unwrap();
        let context = Context::new(crate::verbs::NicRef::Soft(Arc::clone(&soft)));
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(8).unwrap();
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default()).unwrap();
        let mem = Arc::new(HostMem::anonymous(BYTES as usize).unwrap());
        let mr = pd.reg_mr(mem, Access::ALL).unwrap();
        let peer = Endpoint { qpn: Qpn::new(9), psn: Psn::new(0), addr: local, mtu: Mtu::MIN };
        qp.connect(&peer, &Connect { timeout: 0, ..Connect::default() }).unwrap();
        let remote = Remote { addr: mr.addr(), rkey: Rkey::new(1) };
        let payload = Payload::Sges(vec![mr.sge(0, BYTES).unwrap()]);
        qp.post_send(SendWr::new(1, SendOp::Write { remote, imm: None }, payload)).unwrap();
        let packets = u64::from(Mtu::MIN.packets(BYTES));
        let end = Instant::now() + Duration::from_secs(20);
        // Looks without driving.
        let sent = || lock(&soft.shared.core).engine.counters().sent;
        while sent() < packets && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(sent(), packets);
    }
}
