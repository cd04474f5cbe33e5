//! How ranks find each other: one listens, all come, each proves that it has the identifier.
//!
//! 1. Whoever makes a [`UniqueId`] listens at its address, on a thread of its own.
//! 2. Every rank connects over TCP and tells who it is, with an HMAC under the secret over a challenge of
//!    the listener; the listener answers with an HMAC over a challenge of the rank. Nothing else is
//!    read from a connection before that. Once all ranks came it compares their hosts and answers all.
//! 3. On one host the ranks go on over a Unix socket (an abstract name), which carries descriptors: every
//!    [`Exchange`] gives each rank's bytes and descriptors to all. It lasts as long as all ranks do.
//!
//! Everything is bounded: a connection has [`GREETING`] in all to prove itself, in one short message, and some are
//! greeted at once ([`Greeters`]), so that others who say nothing keep no rank from joining; the listener gives up at
//! its deadline.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::control::RANKS_MAX;
use super::executor::Gathered;
use super::greeters::Greeters;
use super::id::UniqueId;
use super::secret::{DIGEST, equal, hmac};
use super::wire::{self, Timed};
use crate::error::{Error, Kind, Result};
use crate::verbs::random;

/// How long a connection may take to prove itself.
const GREETING: Duration = Duration::from_secs(5);
/// Bytes of the message that does: two digests and a [`Hello`].
const PROOF_MAX: usize = 2 * DIGEST + 4 + 4 + 1 + 255 + 255;
/// How often somebody who waits looks up.
const PAUSE: Duration = Duration::from_millis(2);

/// Starts to listen and answers how to come here. The listener ends when all ranks came and left, or, where not all
/// came, after `deadline`.
pub(super) fn listen(address: Option<SocketAddr>, deadline: Duration) -> Result<UniqueId> {
    let address = address.unwrap_or_else(|| SocketAddr::new(routed_address(), 0));
    let listener = TcpListener::bind(address)
        .map_err(|error| Error::io(format_args!("listen on {address}"), error))?;
    let local = listener.local_addr().map_err(|error| Error::io("name the listener", error))?;
    let id = UniqueId::of(local, random()?);
    serve(listener, id, deadline)?;
    Ok(id)
}

/// Listens at the address of an identifier that all ranks agreed on.
pub(super) fn listen_agreed(id: UniqueId, deadline: Duration) -> Result<()> {
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

/// What identifies the running kernel, and how a person calls the machine.
fn host() -> (Vec<u8>, String) {
    let read = |path| std::fs::read(path).unwrap_or_default().trim_ascii().to_vec();
    let name = String::from_utf8_lossy(&read("/proc/sys/kernel/hostname")).into_owned();
    let identity = crate::config::host_id()
        .map_or_else(|| read("/proc/sys/kernel/random/boot_id"), String::into_bytes);
    (identity, name)
}

/// Who a rank says it is.
#[derive(Clone, Debug)]
struct Hello {
    rank: u32,
    ranks: u32,
    host: Vec<u8>,
    name: String,
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&self.rank.to_le_bytes());
        bytes.extend_from_slice(&self.ranks.to_le_bytes());
        bytes.push(self.host.len().min(255) as u8);
        bytes.extend(self.host.iter().take(255));
        bytes.extend(self.name.bytes().take(255));
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (rank, rest) = bytes.split_first_chunk::<4>()?;
        let (ranks, rest) = rest.split_first_chunk::<4>()?;
        let (len, rest) = rest.split_first()?;
        let (host, name) = rest.split_at_checked(usize::from(*len))?;
        let name = String::from_utf8_lossy(name).into_owned();
        let (rank, ranks) = (u32::from_le_bytes(*rank), u32::from_le_bytes(*ranks));
        (rank < ranks && ranks <= RANKS_MAX).then(|| Self {
            rank,
            ranks,
            host: host.to_vec(),
            name,
        })
    }
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
        let verdict = judge(&ranks);
        let socket = verdict.as_ref().ok().and_then(|()| unix_listener(&self.id).ok());
        let answer = match (&verdict, &socket) {
            (Ok(()), Some(_)) => String::new(),
            (Ok(()), None) => "the host of rank 0 refuses Unix sockets".to_owned(),
            (Err(text), _) => text.clone(),
        };
        for (_, stream) in ranks.values_mut() {
            let _ = wire::send(stream, answer.as_bytes());
        }
        if let (true, Some(socket)) = (answer.is_empty(), socket) {
            let count = ranks.len() as u32;
            drop(ranks);
            exchange_rounds(&socket, &self.id, count, self.deadline);
        }
    }

    /// All ranks, once all came.
    fn gather(&self) -> Option<BTreeMap<u32, (Hello, TcpStream)>> {
        let mut ranks: BTreeMap<u32, (Hello, TcpStream)> = BTreeMap::new();
        let mut greeters = Greeters::new();
        while Instant::now() < self.deadline {
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

const SPANS: &str = "the communicator spans hosts";

/// The socket at which ranks of this host meet. Its name follows from the secret, so that nobody else finds or
/// takes it.
fn unix_name(id: &UniqueId) -> io::Result<UnixAddr> {
    let name: String =
        hmac(id.secret(), &[b"socket"]).iter().take(16).map(|b| format!("{b:02x}")).collect();
    UnixAddr::from_abstract_name(format!("beeline-{name}"))
}

fn unix_listener(id: &UniqueId) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&unix_name(id)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Carries exchanges until a rank leaves.
fn exchange_rounds(listener: &UnixListener, id: &UniqueId, count: u32, deadline: Instant) {
    let mut ranks: BTreeMap<u32, UnixStream> = BTreeMap::new();
    let mut greeters = Greeters::new();
    while ranks.len() < count as usize {
        if Instant::now() >= deadline {
            return;
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

/// One rank's end.
#[derive(Debug)]
pub(super) struct Exchange {
    stream: UnixStream,
    ranks: u32,
    /// An exchange failed, so that the next message is perhaps one of that.
    broken: bool,
}

impl Exchange {
    /// Meets the others.
    ///
    /// # Errors
    /// `is_timeout` naming the ranks that did not come; `is_permission_denied` where the other side has not the same
    /// identifier; `is_no_route` where the ranks are on several hosts.
    pub(super) fn join(id: &UniqueId, rank: u32, ranks: u32, deadline: Instant) -> Result<Self> {
        if rank >= ranks || ranks > RANKS_MAX {
            let text = format!("rank {rank} of {ranks}; a communicator has 1 to {RANKS_MAX} ranks");
            return Err(Error::refused(text));
        }
        let (host, name) = host();
        Self::join_as(id, &Hello { rank, ranks, host, name }, deadline)
    }

    fn join_as(id: &UniqueId, hello: &Hello, deadline: Instant) -> Result<Self> {
        let (rank, ranks) = (hello.rank, hello.ranks);
        let mut stream = greeted(id, &hello.encode(), deadline)?;
        let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
        let failed = |error: io::Error| lost(id, rank, error);
        // The listener ends a little earlier and says who is missing.
        stream.set_read_timeout(Some(left + GREETING)).map_err(failed)?;
        let verdict = wire::receive(&mut stream).map_err(failed)?;
        if !verdict.is_empty() {
            return Err(refusal(&String::from_utf8_lossy(&verdict)));
        }
        let local = UnixStream::connect_addr(&unix_name(id).map_err(failed)?).map_err(|error| {
            failed(error).remedy("ranks of one communicator share a network namespace")
        })?;
        let number = rank.to_le_bytes();
        let mac = hmac(id.secret(), &[b"local", &number]);
        wire::send(&mut &local, &[&mac[..], &number].concat()).map_err(failed)?;
        Ok(Self { stream: local, ranks, broken: false })
    }

    /// Gives `bytes` and `fds` to all ranks and gets theirs, in rank order.
    ///
    /// # Errors
    /// `is_timeout` where not all ranks exchange by `deadline`; `is_io` where one left. The exchange is of no use
    /// after that.
    pub(super) fn all_gather(
        &mut self,
        bytes: &[u8],
        fds: &[OwnedFd],
        deadline: Instant,
    ) -> Result<Vec<Gathered>> {
        if self.broken {
            let text = "an earlier exchange of this communicator failed, so that its ranks cannot exchange any more";
            return Err(Error::new(Kind::Io, text).remedy("make another communicator"));
        }
        let run = || -> io::Result<Vec<Gathered>> {
            let mut stream = Timed::new(&self.stream, Some(deadline));
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            wire::send_with(&mut stream, bytes, &fds)?;
            let mut one = || wire::receive_with(&mut stream);
            (0..self.ranks).map(|_| one().map(|(bytes, fds)| Gathered { bytes, fds })).collect()
        };
        let gathered = run();
        if gathered.is_err() {
            self.broken = true;
            // The others learn that no exchange will be whole any more.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        gathered.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Error::new(Kind::Timeout, "not all ranks exchanged by the deadline")
            }
            _ => Error::io("exchange with the other ranks (one of them left)", error),
        })
    }
}

fn connect(id: &UniqueId, deadline: Instant) -> Result<TcpStream> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
        match TcpStream::connect_timeout(&id.address(), left.min(GREETING)) {
            Ok(stream) => return Ok(stream),
            // Whoever listens may come later.
            Err(_) if Instant::now() < deadline => std::thread::sleep(10 * PAUSE),
            Err(error) => {
                let text = format!("nobody answers at {} by the deadline", id.address());
                return Err(Error::new(Kind::Timeout, text).because(error).remedy(
                    "keep the process that made the identifier alive until all ranks came",
                ));
            }
        }
    }
}

/// A connection over which both sides proved themselves; tries again until `deadline` where the listener is busy with
/// others.
fn greeted(id: &UniqueId, hello: &[u8], deadline: Instant) -> Result<TcpStream> {
    loop {
        let stream = connect(id, deadline)?;
        let until = deadline.max(Instant::now() + PAUSE).min(Instant::now() + 4 * GREETING);
        match prove(&stream, id, hello, until) {
            Ok(()) => return Ok(stream),
            Err(error) if error.is_permission_denied() || Instant::now() >= deadline => {
                return Err(error);
            }
            Err(_) => std::thread::sleep(10 * PAUSE),
        }
    }
}

fn prove(socket: &TcpStream, id: &UniqueId, hello: &[u8], deadline: Instant) -> Result<()> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            let text =
                format!("whoever listens at {} did not answer by the deadline", id.address());
            Error::new(Kind::Timeout, text)
        }
        _ => Error::io(format_args!("greet {}", id.address()), error),
    };
    socket.set_nodelay(true).map_err(failed)?;
    let stream = &mut Timed::new(socket, Some(deadline));
    let stranger = || {
        let text = format!("whoever listens at {} has not the same identifier", id.address());
        Error::new(Kind::PermissionDenied, text)
    };
    let theirs = wire::receive_at_most(PROOF_MAX, stream).map_err(failed)?;
    let mine: [u8; DIGEST] = random()?;
    let mac = hmac(id.secret(), &[b"rank", &theirs, &mine, hello]);
    wire::send(stream, &[&mac[..], &mine, hello].concat()).map_err(failed)?;
    let answer = wire::receive_at_most(PROOF_MAX, stream).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => failed(error),
        _ => stranger(),
    })?;
    let expected = hmac(id.secret(), &[b"root", &mine, &theirs]);
    match answer.first_chunk::<DIGEST>() {
        Some(mac) if equal(mac, &expected) => Ok(()),
        _ => Err(stranger()),
    }
}

fn lost(id: &UniqueId, rank: u32, error: io::Error) -> Error {
    let what = format_args!("meet the other ranks at {} as rank {rank}", id.address()).to_string();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            Error::new(Kind::Timeout, format!("cannot {what} by the deadline"))
        }
        _ => Error::io(what, error),
    }
}

fn refusal(text: &str) -> Error {
    if text.starts_with(SPANS) {
        return Error::new(Kind::NoRoute, text).coded("collective-spans-hosts").remedy(
            "collectives of this library are for the GPUs of one host; between hosts use NCCL itself, \
             over this library's network plugin",
        );
    }
    let kind = if text.contains("deadline") { Kind::Timeout } else { Kind::Refused };
    Error::new(kind, text).coded("collective-bootstrap")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn hello(rank: u32, ranks: u32, host: &str) -> Hello {
        Hello { rank, ranks, host: host.into(), name: host.to_owned() }
    }

    /// All of `hellos` at once; the results in their order.
    fn meet(id: UniqueId, hellos: Vec<Hello>, deadline: Duration) -> Vec<Result<Exchange>> {
        let join = |hello: Hello| {
            std::thread::spawn(move || Exchange::join_as(&id, &hello, Instant::now() + deadline))
        };
        let threads: Vec<_> = hellos.into_iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    fn loopback() -> Option<SocketAddr> {
        Some("127.0.0.1:0".parse().unwrap())
    }

    #[test]
    fn bytes_and_descriptors_reach_all_ranks() {
        let id = listen(loopback(), Duration::from_secs(20)).unwrap();
        let all =
            meet(id, (0..5).map(|rank| hello(rank, 5, "a")).collect(), Duration::from_secs(20));
        let threads: Vec<_> = (0_u8..)
            .zip(all)
            .map(|(rank, exchange)| {
                let mut exchange = exchange.unwrap();
                std::thread::spawn(move || {
                    for round in 0..3 {
                        let file = beeline_sys::mem::memfd("test", 4096 * (1 + u64::from(rank)));
                        let all = exchange.all_gather(&[rank, round], &[file.unwrap()], soon());
                        for (other, given) in (0_u8..).zip(all.unwrap()) {
                            assert_eq!(given.bytes, [other, round]);
                            let len = rustix::fs::fstat(&given.fds[0]).unwrap().st_size;
                            assert_eq!(len, 4096 * (1 + i64::from(other)));
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn several_hosts_are_refused_with_the_way_to_go() {
        let id = listen(loopback(), Duration::from_secs(20)).unwrap();
        let hellos = vec![hello(0, 3, "alpha"), hello(1, 3, "beta"), hello(2, 3, "alpha")];
        for result in meet(id, hellos, Duration::from_secs(20)) {
            let error = result.unwrap_err();
            assert!(error.is_no_route() && error.code() == "collective-spans-hosts", "{error:?}");
            let text = format!("{error:#}");
            for part in ["alpha: ranks 0 2", "beta: ranks 1", "network plugin"] {
                assert!(text.contains(part), "{text}");
            }
        }
    }

    #[test]
    fn a_stranger_is_turned_away_and_does_not_count() {
        let id = listen(loopback(), Duration::from_secs(20)).unwrap();
        let forged = UniqueId::of(id.address(), [9; DIGEST]);
        let error = Exchange::join_as(&forged, &hello(0, 2, "a"), soon()).unwrap_err();
        assert!(error.is_permission_denied(), "{error:?}");
        drop(TcpStream::connect(id.address()).unwrap());
        let all = meet(id, vec![hello(0, 2, "a"), hello(1, 2, "a")], Duration::from_secs(20));
        assert!(all.iter().all(Result::is_ok));
    }

    #[test]
    fn connections_that_say_nothing_or_little_keep_nobody_from_joining() {
        let deadline = Duration::from_secs(4);
        let id = listen(loopback(), deadline).unwrap();
        let idle: Vec<_> = (0..30).map(|_| TcpStream::connect(id.address()).unwrap()).collect();
        let mut slow = TcpStream::connect(id.address()).unwrap();
        let dripper = std::thread::spawn(move || {
            let mut bytes = [200, 0, 0, 0].into_iter().chain(std::iter::repeat(0));
            while io::Write::write_all(&mut slow, &[bytes.next().unwrap()]).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let all = meet(id, vec![hello(0, 2, "a"), hello(1, 2, "a")], deadline);
        assert!(all.iter().all(Result::is_ok), "{all:?}");
        drop(idle);
        dripper.join().unwrap();
    }

    #[test]
    fn after_a_failure_no_exchange_takes_what_was_left_of_it() {
        let id = listen(loopback(), Duration::from_secs(20)).unwrap();
        let all = meet(id, vec![hello(0, 2, "a"), hello(1, 2, "a")], Duration::from_secs(20));
        let [mut early, mut late] =
            <[_; 2]>::try_from(all).unwrap().map(|exchange: Result<Exchange>| exchange.unwrap());
        let now = Instant::now() + Duration::from_millis(50);
        assert!(early.all_gather(b"stale", &[], now).unwrap_err().is_timeout());
        // Its round is whole only now.
        drop(late.all_gather(b"late", &[], Instant::now() + Duration::from_millis(500)));
        let error = early.all_gather(b"new", &[], soon()).unwrap_err();
        assert!(error.to_string().contains("earlier exchange"), "{error:?}");
    }

    #[test]
    fn who_is_missing_double_or_counts_otherwise_is_named() {
        let id = listen(loopback(), Duration::from_millis(300)).unwrap();
        let all = meet(id, vec![hello(0, 4, "a"), hello(2, 4, "a")], Duration::from_millis(300));
        for result in all {
            let error = result.unwrap_err();
            assert!(error.is_timeout() && error.to_string().contains(": 1, 3"), "{error:?}");
        }
        for (second, part) in [(hello(0, 2, "a"), "twice"), (hello(1, 3, "a"), "counts")] {
            let id = listen(loopback(), Duration::from_millis(500)).unwrap();
            let first = std::thread::spawn(move || {
                Exchange::join_as(
                    &id,
                    &hello(0, 2, "a"),
                    Instant::now() + Duration::from_millis(500),
                )
            });
            std::thread::sleep(Duration::from_millis(100));
            let error = Exchange::join_as(&id, &second, soon()).unwrap_err();
            assert!(first.join().unwrap().is_err());
            // Which of the two came first is not certain.
            assert!(error.to_string().contains(part) || error.is_timeout(), "{error:?}");
        }
        let nobody = UniqueId::of("127.0.0.1:1".parse().unwrap(), [0; DIGEST]);
        let deadline = Instant::now() + Duration::from_millis(100);
        assert!(Exchange::join_as(&nobody, &hello(0, 1, "a"), deadline).unwrap_err().is_timeout());
        assert!(Exchange::join(&nobody, 2, 2, soon()).unwrap_err().is_refused());
    }
}
