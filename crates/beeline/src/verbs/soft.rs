//! The software NIC: the engine of [`beeline_core::rc`], driven.
//!
//! Whoever has something to do drives it: posting a work request and polling a completion queue move
//! packets on the calling thread, which costs no hand-over. A thread of the NIC's own waits for packets
//! and clocks when no caller polls.

mod core;

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_core::mr::Secret;
use beeline_core::rc::{Config, Engine};
use beeline_core::roce::{Mtu, Strength};
use beeline_core::time::Time;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

pub(super) use self::core::Core;
use super::alarm::Alarm;
use super::link::{Link, LinkKind, Pcap};
use super::memory::Memories;
use crate::error::{Error, Kind, Result};
use crate::lock;

/// How long after a caller polled the NIC's own thread stays away.
const POLLING: Duration = Duration::from_millis(1);

/// How long a caller polls in vain before it gives its core up at every further poll. Whoever waits for a
/// peer on a machine with fewer cores than pollers would otherwise keep the peer from running.
const PATIENCE_NANOS: u64 = 20_000;

/// Polls in vain of which one looks at the clock.
const QUIET_POLLS: u32 = 8;

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
        let (engine, memories) = (Engine::new(config, secret), Memories::new(mover_wake, peer));
        let shared = Arc::new(Shared {
            start: Instant::now(),
            link: link.fd().try_clone_to_owned().map_err(io)?,
            events: eventfd()?,
            local,
            mtu,
            kind: link.kind(),
            strength: link.strength(local),
            core: Mutex::new(Core::new(engine, memories, link, pcap)),
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
            drop(core);
            // The other thread of this core may be the peer.
            std::hint::spin_loop();
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
