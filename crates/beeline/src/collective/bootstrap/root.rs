//! The side that listens: whoever made the identifier.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::{GO_ON, GREETING, Hello, PAUSE, PLACE, PROOF_MAX, SPANS, unix_name};
use crate::collective::greeters::Greeters;
use crate::collective::id::UniqueId;
use crate::collective::secret::{DIGEST, equal, hmac};
use crate::collective::wire::{self, Timed};
use crate::error::{Error, Result};
use crate::verbs::random;

/// Starts to listen and answers how to come here. The listener ends when all ranks came and left, or, where not all
/// came, after `deadline`.
pub(in crate::collective) fn listen(
    address: Option<SocketAddr>,
    deadline: Duration,
) -> Result<UniqueId> {
    let address = address.unwrap_or_else(|| SocketAddr::new(routed_address(), 0));
    let listener = TcpListener::bind(address)
        .map_err(|error| Error::io(format_args!("listen on {address}"), error))?;
    let local = listener.local_addr().map_err(|error| Error::io("name the listener", error))?;
    let id = UniqueId::of(local, random()?);
    serve(listener, id, deadline)?;
    Ok(id)
}

/// Listens at the address of an identifier that all ranks agreed on.
pub(in crate::collective) fn listen_agreed(id: UniqueId, deadline: Duration) -> Result<()> {
    let listener = TcpListener::bind(id.address())
        .map_err(|error| Error::io(format_args!("listen on {}", id.address()), error))?;
    serve(listener, id, deadline)
}

fn serve(listener: TcpListener, id: UniqueId, deadline: Duration) -> Result<()> {
    listener.set_nonblocking(true).map_err(|error| Error::io("set up the listener", error))?;
    let root = Root { listener, id, deadline: Instant::now() + deadline };
    std::thread::Builder::new()
        .name("beeline-root".to_owned())
        .spawn(move || root.run())
        .map_err(|error| Error::io("start the thread that ranks meet at", error))?;
    Ok(())
}

/// The address that packets to the outside leave from; loopback without a network.
fn routed_address() -> IpAddr {
    let ask = || -> io::Result<IpAddr> {
        // Connecting a UDP socket sends nothing; the kernel only picks the route (a documentation address).
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        Ok(socket.local_addr()?.ip())
    };
    ask().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// The side that listens.
struct Root {
    listener: TcpListener,
    id: UniqueId,
    deadline: Instant,
}

impl Root {
    fn run(self) {
        let Some(mut ranks) = self.gather() else { return };
        let Self { listener, id, deadline } = self;
        // Others may meet at this address as soon as a rank knows that this meeting is over.
        drop(listener);
        let opened = judge(&ranks).and_then(|()| {
            unix_listener(&id)
                .map_err(|error| format!("the host of rank 0 refuses a Unix socket: {error}"))
        });
        let answer = match &opened {
            Ok((_, place)) => [&[GO_ON], &place[..]].concat(),
            Err(text) => text.as_bytes().to_vec(),
        };
        for (_, stream) in ranks.values_mut() {
            let _ = wire::send(stream, &answer);
        }
        if let Ok((socket, _)) = opened {
            let count = ranks.len() as u32;
            drop(ranks);
            exchange_rounds(&socket, &id, count, deadline);
        }
    }

    /// All ranks, once all came.
    fn gather(&self) -> Option<BTreeMap<u32, (Hello, TcpStream)>> {
        let mut ranks: BTreeMap<u32, (Hello, TcpStream)> = BTreeMap::new();
        let mut greeters = Greeters::new();
        while Instant::now() < self.deadline {
            if greeters.is_idle() {
                await_visitor(&self.listener, self.deadline);
            }
            while greeters.has_room()
                && let Ok((stream, _)) = self.listener.accept()
            {
                let (id, until) = (self.id, self.deadline.min(Instant::now() + GREETING));
                greeters
                    .start(move || greet(&stream, &id, until).ok().map(|hello| (hello, stream)));
            }
            let Some((hello, mut stream)) = greeters.next(PAUSE) else { continue };
            if let Some((first, earlier)) = ranks.get(&hello.rank)
                && !has_left(earlier)
            {
                let text = format!("rank {} came twice (of {})", first.rank, first.ranks);
                let _ = wire::send(&mut stream, text.as_bytes());
                continue;
            }
            if let Some((first, _)) = ranks.values().next()
                && first.ranks != hello.ranks
            {
                let text = format!(
                    "rank {} counts {} ranks, rank {} counts {}",
                    hello.rank, hello.ranks, first.rank, first.ranks
                );
                let _ = wire::send(&mut stream, text.as_bytes());
                continue;
            }
            let all = hello.ranks as usize;
            ranks.insert(hello.rank, (hello, stream));
            if ranks.len() == all {
                return Some(ranks);
            }
        }
        let missing = |count: u32| {
            let absent = (0..count).filter(|rank| !ranks.contains_key(rank)).map(|r| r.to_string());
            absent.collect::<Vec<_>>().join(", ")
        };
        let count = ranks.values().next().map_or(0, |(hello, _)| hello.ranks);
        let text = format!("these ranks did not come by the deadline: {}", missing(count));
        for (_, stream) in ranks.values_mut() {
            let _ = wire::send(stream, text.as_bytes());
        }
        None
    }
}

/// Proves both sides to each other, from the listener's side.
fn greet(socket: &TcpStream, id: &UniqueId, deadline: Instant) -> Result<Hello, io::Error> {
    socket.set_nonblocking(false)?;
    socket.set_nodelay(true)?;
    let stream = &mut Timed::new(socket, Some(deadline));
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let mine: [u8; DIGEST] = random().map_err(|_| refused())?;
    wire::send(stream, &mine)?;
    let message = wire::receive_at_most(PROOF_MAX, stream)?;
    let (mac, rest) = message.split_first_chunk::<DIGEST>().ok_or_else(refused)?;
    let (theirs, hello) = rest.split_first_chunk::<DIGEST>().ok_or_else(refused)?;
    if !equal(mac, &hmac(id.secret(), &[b"rank", &mine, theirs, hello])) {
        return Err(refused());
    }
    wire::send(stream, &hmac(id.secret(), &[b"root", theirs, &mine]))?;
    socket.set_write_timeout(Some(GREETING))?;
    Hello::decode(hello).ok_or_else(refused)
}

/// Whether a rank has closed its connection, as one does that comes again.
fn has_left(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let back = stream.set_nonblocking(false);
    let there = matches!(&peeked, Ok(1..))
        || peeked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
    back.is_err() || !there
}

/// Waits until somebody comes to the listener, or until `deadline`. An identifier may lie unused for as long as that, and wakes
/// nobody meanwhile.
fn await_visitor(listener: &impl AsFd, deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    // Interrupted or not: the caller looks again.
    let _ = rustix::event::poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&left));
}

/// Whether the ranks can be one communicator here.
fn judge(ranks: &BTreeMap<u32, (Hello, TcpStream)>) -> Result<(), String> {
    let mut hosts: BTreeMap<&[u8], (&str, Vec<String>)> = BTreeMap::new();
    for (hello, _) in ranks.values() {
        let entry = hosts.entry(&hello.host).or_insert((&hello.name, Vec::new()));
        entry.1.push(hello.rank.to_string());
    }
    if hosts.len() < 2 {
        return Ok(());
    }
    let list = hosts.values().map(|(name, ranks)| format!("{name}: ranks {}", ranks.join(" ")));
    Err(format!("{SPANS} ({})", list.collect::<Vec<_>>().join("; ")))
}

/// A socket of this meeting alone, and what ranks find it by: the same phrase may let other ranks meet at the same time.
fn unix_listener(id: &UniqueId) -> io::Result<(UnixListener, [u8; PLACE])> {
    let place = random().map_err(|error| io::Error::other(error.to_string()))?;
    let listener = UnixListener::bind_addr(&unix_name(id, &place)?)?;
    listener.set_nonblocking(true)?;
    Ok((listener, place))
}

/// Carries exchanges until a rank leaves.
fn exchange_rounds(listener: &UnixListener, id: &UniqueId, count: u32, deadline: Instant) {
    let mut ranks: BTreeMap<u32, UnixStream> = BTreeMap::new();
    let mut greeters = Greeters::new();
    while ranks.len() < count as usize {
        if Instant::now() >= deadline {
            return;
        }
        if greeters.is_idle() {
            await_visitor(listener, deadline);
        }
        while greeters.has_room()
            && let Ok((stream, _)) = listener.accept()
        {
            let (id, until) = (*id, deadline.min(Instant::now() + GREETING));
            greeters.start(move || admit(&stream, &id, until).ok().map(|rank| (rank, stream)));
        }
        if let Some((rank, stream)) = greeters.next(PAUSE) {
            ranks.entry(rank).or_insert(stream);
        }
    }
    // Between exchanges nothing is due; a rank that leaves ends it.
    while let Some(round) = one_round(&ranks) {
        for stream in ranks.values() {
            for (bytes, fds) in &round {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                let until = Instant::now() + GREETING;
                if wire::send_with(&mut Timed::new(stream, Some(until)), bytes, &fds).is_err() {
                    return;
                }
            }
        }
    }
}

fn one_round(ranks: &BTreeMap<u32, UnixStream>) -> Option<Vec<(Vec<u8>, Vec<OwnedFd>)>> {
    ranks.values().map(|stream| wire::receive_with(&mut Timed::new(stream, None)).ok()).collect()
}

fn admit(stream: &UnixStream, id: &UniqueId, deadline: Instant) -> io::Result<u32> {
    stream.set_nonblocking(false)?;
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let message = wire::receive_at_most(PROOF_MAX, &mut Timed::new(stream, Some(deadline)))?;
    let (mac, rank) = message.split_first_chunk::<DIGEST>().ok_or_else(refused)?;
    let rank = rank.first_chunk::<4>().copied().map(u32::from_le_bytes).ok_or_else(refused)?;
    if !equal(mac, &hmac(id.secret(), &[b"local", &rank.to_le_bytes()])) {
        return Err(refused());
    }
    Ok(rank)
}
