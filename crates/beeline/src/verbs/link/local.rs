//! Two processes of one host, joined by memory that they share.
//!
//! Packets go through a [ring](super::ring) in each direction; those with a payload of some length only
//! name it, where it lies in memory that the peer was given ([`Peer`]). Nothing has a name in the file
//! system: files and wake-ups are passed over a Unix socket.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::rc::Transmit;
use beeline_core::roce::{Identification, Path, UDP_PORT};

use super::super::peer::{Message, Peer, PeerLock, cookies_in, receive, send};
use super::super::soft::random;
use super::bell::{Bell, Ringer};
use super::ring::{Reader, Tag, Writer};
use super::{Arrival, BATCH};
use crate::error::{Error, Kind, Result};

/// How long the other process may take to answer.
const GREETING: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(in super::super) struct LocalLink {
    peer: Arc<PeerLock>,
    writer: Writer,
    reader: Reader,
    /// Wakes the peer; wakes this side.
    theirs: Ringer,
    ours: Bell,
    /// From the peer to here.
    path: Path,
    /// Packets have arrived that name something.
    unsettled: bool,
}

impl LocalLink {
    /// Joins the process at the other end of `socket`, which must do the same.
    pub(in super::super) fn join(socket: UnixStream) -> Result<Self> {
        let io = |error| Error::io("join the process at the other end of a Unix socket", error);
        let (writer, ring) = Writer::new().map_err(io)?;
        let (ours, ringer) = Bell::new().map_err(io)?;
        let name = u64::from_le_bytes(random()?);
        socket.set_nonblocking(false).map_err(io)?;
        socket.set_read_timeout(Some(GREETING)).map_err(io)?;
        socket.set_write_timeout(Some(GREETING)).map_err(io)?;
        send(&socket, [name, 0], &[ring.as_fd(), ringer.as_fd()]).map_err(io)?;
        drop(ringer);
        let greeting = receive(&socket).map_err(|error| {
            io(error).remedy("the other process must join at the same time, with this version")
        })?;
        let Message { words: [their_name, _], fds } = greeting;
        let Ok([ring, theirs]) = <[OwnedFd; 2]>::try_from(fds) else {
            return Err(Error::new(Kind::Refused, "the peer gave no ring and no wake-up"));
        };
        if their_name == name {
            return Err(Error::refused("a local NIC cannot be joined to itself"));
        }
        let theirs = Ringer::new(theirs).map_err(io)?;
        let reader = Reader::new(&ring).map_err(io)?;
        socket.set_nonblocking(true).map_err(io)?;
        let path = Path {
            src: address(their_name),
            dst: address(name),
            src_port: UDP_PORT,
            identification: Identification::Absent,
        };
        let peer = Arc::new(PeerLock::new(Peer::new(socket)));
        Ok(Self { peer, writer, reader, theirs, ours, path, unsettled: false })
    }

    /// The address of this side: of meaning to the two processes only.
    pub(in super::super) const fn local(&self) -> IpAddr {
        self.path.dst
    }

    pub(in super::super) fn peer(&self) -> Arc<PeerLock> {
        Arc::clone(&self.peer)
    }

    pub(super) fn send(&mut self, queue: &mut VecDeque<Transmit>, sent: &mut Vec<Vec<u8>>) -> bool {
        let mut open = true;
        for _ in 0..BATCH {
            let Some(transmit) = queue.pop_front() else { break };
            if !self.writer.push(Tag::Packet, &transmit.datagram) {
                queue.push_front(transmit);
                open = false;
                break;
            }
            self.named(&transmit.datagram);
            sent.push(transmit.datagram);
        }
        // Behind every packet that may name what is gone.
        if self.peer.has_news() {
            open &= tell(&mut self.writer, &mut self.peer.lock(), queue.is_empty());
        }
        if self.writer.publish() {
            self.theirs.ring();
        }
        open
    }

    /// Whether something is to be told to the peer that is in no hurry.
    pub(super) fn has_word(&self) -> bool {
        self.peer.has_news()
    }

    pub(super) fn receive(&mut self, spare: &mut Vec<Vec<u8>>, arrivals: &mut Vec<Arrival>) {
        if !self.reader.has_message() {
            return;
        }
        for _ in 0..BATCH {
            let mut datagram = spare.pop().unwrap_or_default();
            datagram.clear();
            match self.reader.pop(&mut datagram) {
                Some(Tag::Packet) => {
                    self.arrive(&datagram);
                    arrivals.push(Arrival { path: self.path, datagram });
                }
                Some(tag) => {
                    let (words, _) = datagram.as_chunks::<8>();
                    let words: Vec<u64> =
                        words.iter().map(|word| u64::from_le_bytes(*word)).collect();
                    self.hear(tag, &words);
                    spare.push(datagram);
                }
                None => {
                    spare.push(datagram);
                    break;
                }
            }
        }
        self.reader.release();
    }

    /// Notes that the peer finds what a packet names; most name nothing.
    fn named(&self, datagram: &[u8]) {
        let mut cookies = cookies_in(datagram).peekable();
        if cookies.peek().is_some() {
            let lent = &mut self.peer.lock().lent;
            cookies.for_each(|cookie| lent.sent(cookie));
        }
    }

    /// Notes what a packet names that has arrived.
    fn arrive(&mut self, datagram: &[u8]) {
        let mut cookies = cookies_in(datagram).peekable();
        if cookies.peek().is_some() {
            self.unsettled = true;
            let fetches = &mut self.peer.lock().fetches;
            cookies.for_each(|cookie| fetches.arrive(cookie));
        }
    }

    /// Whether packets have arrived that name something, since the last call.
    pub(super) fn take_unsettled(&mut self) -> bool {
        std::mem::take(&mut self.unsettled)
    }

    /// Whether nothing has arrived.
    pub(super) fn is_quiet(&self) -> bool {
        !self.reader.has_message()
    }

    /// What the peer says about memory.
    fn hear(&self, tag: Tag, words: &[u64]) {
        let mut peer = self.peer.lock();
        match (tag, words) {
            (Tag::Gone, [number]) => peer.forget(*number),
            (Tag::Offer, [_]) => peer.read_messages(),
            (Tag::Mapped, [number]) => peer.is_mapped(*number),
            (Tag::Released, [first, count]) => peer.lent.release((*first, *count)),
            _ => {}
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.ours.fd()
    }

    /// The thread that waits for [`fd`](Self::fd) is about to, or has. Answers whether it must not.
    pub(super) fn set_sleeping(&self, sleeping: bool) -> bool {
        if !sleeping {
            self.ours.quiet();
        }
        self.reader.set_sleeping(sleeping)
    }

    pub(super) fn due(&self) -> Option<Instant> {
        // With a look at the flag, as this is asked after every turn.
        (self.peer.has_news() && self.peer.lock().is_urgent()).then(Instant::now)
    }
}

/// Tells the peer what there is to be told about memory; `false` where the ring is full. What is `gone` waits
/// until no packet waits that may name it.
fn tell(writer: &mut Writer, peer: &mut Peer, gone: bool) -> bool {
    while let Some((first, count)) = peer.fetches.to_tell() {
        let [first, count] = [first, count].map(u64::to_le_bytes);
        if !writer.push(Tag::Released, &[first, count].concat()) {
            return false;
        }
        peer.fetches.told();
    }
    let kinds: [(Tag, &mut Vec<u64>); 3] = [
        (Tag::Offer, &mut peer.offers),
        (Tag::Mapped, &mut peer.mapped),
        (Tag::Gone, &mut peer.gone),
    ];
    for (tag, numbers) in kinds {
        while let Some(number) = numbers.last().filter(|_| gone || tag != Tag::Gone) {
            if !writer.push(tag, &number.to_le_bytes()) {
                return false;
            }
            numbers.pop();
        }
    }
    true
}

/// An address of the range for private use (RFC 4193), so that it can never be one of a network.
fn address(name: u64) -> IpAddr {
    let [a, b, c, d, e, f, g, h] = name.to_be_bytes();
    IpAddr::V6(Ipv6Addr::from([0xfd, b'b', b'e', b'e', 0, 0, 0, 0, a, b, c, d, e, f, g, h]))
}

#[cfg(test)]
mod tests {
    use beeline_sys::mem::HostMem;

    use super::*;

    fn joined() -> (LocalLink, LocalLink) {
        let (one, other) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let far = scope.spawn(|| LocalLink::join(other).unwrap());
            (LocalLink::join(one).unwrap(), far.join().unwrap())
        })
    }

    /// A region is said to be gone behind every packet that waits, however full the ring is.
    #[test]
    fn what_is_gone_overtakes_no_packet() {
        const PACKETS: usize = 100;
        let (mut near, mut far) = joined();
        let mem = HostMem::shareable(4096).unwrap();
        let number = near.peer.lock().give(&mem).unwrap();
        let path = Path { src: near.path.dst, dst: near.path.src, ..near.path };
        let packet = |n: usize| Transmit { path, datagram: vec![n as u8; 100_000] };
        let mut queue: VecDeque<Transmit> = (0..PACKETS).map(packet).collect();
        near.peer.lock().take_back(number);
        let (mut sent, mut spare, mut arrivals) = (Vec::new(), Vec::new(), Vec::new());
        // More than the ring holds: some are left, and the region is not gone yet.
        while near.send(&mut queue, &mut sent) {}
        assert!(!queue.is_empty() && !near.peer.lock().gone.is_empty());
        while arrivals.len() < PACKETS {
            let known = far.peer.lock().knows(number);
            assert!(known, "gone after {} packets", arrivals.len());
            near.send(&mut queue, &mut sent);
            // One batch at a time, as they come.
            far.receive(&mut spare, &mut arrivals);
        }
        near.send(&mut queue, &mut sent);
        far.receive(&mut spare, &mut arrivals);
        assert!(!far.peer.lock().knows(number));
        assert!(near.peer.lock().gone.is_empty() && near.due().is_none());
        assert!(arrivals.iter().enumerate().all(|(n, arrival)| arrival.datagram[0] == n as u8));
    }
}
