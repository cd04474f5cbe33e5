//! How ranks find each other: one listens, all come, each proves that it has the identifier.
//!
//! 1. Whoever makes a [`UniqueId`] listens at its address, on a thread of its own.
//! 2. Every rank connects over TCP and tells who it is, with an HMAC under the secret over a challenge of
//!    the listener; the listener answers with an HMAC over a challenge of the rank. Nothing else is
//!    read from a connection before that. Once all ranks came it compares their hosts and answers all.
//! 3. On one host the ranks go on over a Unix socket (an abstract name, made anew for each meeting), which carries descriptors: every
//!    [`Exchange`] gives each rank's bytes and descriptors to all. It lasts as long as all ranks do.
//!
//! Everything is bounded: a connection has [`GREETING`] in all to prove itself, in one short message, and some are
//! greeted at once, so that others who say nothing keep no rank from joining; the listener gives up at
//! its deadline.

mod root;

pub(super) use root::{listen, listen_agreed};

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::time::{Duration, Instant};

use super::control::RANKS_MAX;
use super::executor::Gathered;
use super::id::UniqueId;
use super::secret::{DIGEST, equal, hmac};
use super::wire::{self, Timed};
use crate::error::{Error, Kind, Result};
use crate::verbs::random;

/// How long a connection may take to prove itself.
const GREETING: Duration = Duration::from_secs(5);
/// Bytes of the message that does: two digests and a [`Hello`].
const PROOF_MAX: usize = 2 * DIGEST + 4 + 4 + 1 + 255 + 255;
/// First byte of the listener's answer where all is well; what follows makes the Unix socket's name. Else it is a text.
const GO_ON: u8 = 0;
/// Bytes that follow.
const PLACE: usize = 16;
/// How often somebody who waits looks up.
const PAUSE: Duration = Duration::from_millis(2);

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
        let place = match verdict.split_first() {
            Some((&GO_ON, place)) if place.len() == PLACE => place,
            _ => return Err(refusal(&String::from_utf8_lossy(&verdict))),
        };
        let name = unix_name(id, place).map_err(failed)?;
        let local = UnixStream::connect_addr(&name).map_err(|error| {
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

const SPANS: &str = "the communicator spans hosts";

/// The socket at which ranks of this host meet. Its name follows from the secret and from what the listener says in its
/// answer, so that nobody else finds or takes it, and no other meeting with the same secret.
fn unix_name(id: &UniqueId, place: &[u8]) -> io::Result<UnixAddr> {
    let mac = hmac(id.secret(), &[b"socket", place]);
    let name: String = mac.iter().take(16).map(|b| format!("{b:02x}")).collect();
    UnixAddr::from_abstract_name(format!("beeline-{name}"))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

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

    /// Two jobs with the same phrase on one host, and one job that meets twice at the same address.
    #[test]
    fn the_same_phrase_lets_several_meet_at_once() {
        let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (first, second) = (free(), free());
        let mut met = Vec::new();
        for address in [first, second, first] {
            let id = UniqueId::agreed(address, "none");
            listen_agreed(id, Duration::from_secs(20)).unwrap();
            let hellos = vec![hello(0, 2, "a"), hello(1, 2, "a")];
            let all: Result<Vec<_>> =
                meet(id, hellos, Duration::from_secs(20)).into_iter().collect();
            met.push(all.unwrap());
        }
        for (number, all) in (0_u8..).zip(&mut met) {
            let exchanges: Vec<_> = std::thread::scope(|scope| {
                let one = |exchange| scope.spawn(move || gathered(exchange, number));
                let threads: Vec<_> = all.iter_mut().map(one).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(exchanges, [[number; 2]; 2]);
        }
    }

    fn gathered(exchange: &mut Exchange, byte: u8) -> [u8; 2] {
        let all = exchange.all_gather(&[byte], &[], soon()).unwrap();
        [0, 1].map(|rank: usize| all[rank].bytes[0])
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
