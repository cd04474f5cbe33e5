//! RoCEv2 on a UDP socket, with a raw socket beside it where that is allowed.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use beeline_core::rc::Transmit;
use beeline_core::roce::{Identification, Path, UDP_PORT};
use beeline_sys::net::{Headers, Outgoing, RawUdpSocket, Received, UdpSocket};
use rustix::io::Errno;

use super::segments::{NoSegmentation, Pieces, Segmentation, segment_of};
use super::{Arrival, BATCH, LinkKind};
use crate::error::{Error, Kind, Result};

/// Asked of the kernel for each direction; it gives what it allows.
const SOCKET_BYTES: usize = 8 << 20;

/// Messages asked for at once at most. Each may be a piece of many packets.
const WANT_MAX: usize = 16;

/// The longest message: a packet of IPv4 or IPv6 with everything in it.
const MESSAGE_BYTES: usize = 1 << 16;

/// Room of a buffer that the NIC uses again: a full packet with all headers.
const PACKET_BYTES: usize = 4096 + 96;

/// Bytes of a UDP header.
const UDP_LEN: usize = 8;

#[derive(Debug)]
pub(in super::super) struct UdpLink {
    socket: UdpSocket,
    raw: Option<RawUdpSocket>,
    local: IpAddr,
    segmentation: Segmentation,
    pieces: Pieces,
    /// Where messages are received, to be taken apart into packets.
    messages: Vec<Vec<u8>>,
    /// IP and UDP headers of those from the raw socket.
    heads: Box<[Headers; BATCH]>,
    /// Messages to ask for next: few while few come, so that an answer that is waited for is not held up
    /// by what many would need.
    want: usize,
    /// Datagrams the kernel did not take: a path too small, no route. Lost, as on a wire.
    lost: u64,
}

impl UdpLink {
    /// The link of a NIC whose address is `local`. `wanted`: whether the raw socket must, may or must not
    /// be used.
    pub(in super::super) fn open(
        local: IpAddr,
        wanted: Option<LinkKind>,
        segmentation: Segmentation,
    ) -> Result<Self> {
        let address = SocketAddr::new(local, UDP_PORT);
        let mut socket = UdpSocket::bind(address).map_err(|error| bind_error(local, error))?;
        socket.set_buffers(SOCKET_BYTES);
        let raw = match (local, wanted) {
            (IpAddr::V4(local), None | Some(LinkKind::Raw)) => open_raw(&socket, local),
            (IpAddr::V6(_), Some(LinkKind::Raw)) => {
                Err(io::Error::new(io::ErrorKind::Unsupported, "IPv6 needs no raw socket"))
            }
            _ => Ok(None),
        };
        let raw = match (raw, wanted) {
            (Ok(raw), _) => raw,
            (Err(_), None) => None,
            (Err(error), Some(_)) => {
                return Err(Error::io(format_args!("open a raw socket on {local}"), error)
                    .remedy("grant CAP_NET_RAW, or use the UDP link"));
            }
        };
        if raw.is_none() {
            // Refused, the kernel cuts pieces before it hands them over.
            let _ = socket.merge();
        }
        Ok(Self {
            socket,
            raw,
            local,
            segmentation,
            pieces: Pieces::new(),
            messages: Vec::new(),
            heads: Box::new([[0; size_of::<Headers>()]; BATCH]),
            want: 1,
            lost: 0,
        })
    }

    pub(super) const fn kind(&self) -> LinkKind {
        if self.raw.is_some() { LinkKind::Raw } else { LinkKind::Udp }
    }

    pub(super) const fn segmentation(&self) -> Segmentation {
        self.segmentation
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.raw.as_ref().map_or_else(|| self.socket.as_fd(), AsFd::as_fd)
    }

    pub(super) fn send(&mut self, queue: &mut VecDeque<Transmit>, sent: &mut Vec<Vec<u8>>) -> bool {
        const NOTHING: Outgoing<'static> =
            Outgoing::new(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0), &[]);
        let joins = self.pieces.join(queue, self.segmentation);
        let mut batch = [NOTHING; BATCH];
        let mut count = 0;
        for ((slot, transmit), joined) in batch.iter_mut().zip(queue.iter()).zip(joins) {
            let to = SocketAddr::new(transmit.path.dst, UDP_PORT);
            *slot = Outgoing { to, payload: &transmit.datagram, joined };
            count += 1;
        }
        let taken = match self.socket.send(batch.get(..count).unwrap_or(&[])) {
            Ok(taken) => taken,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                let packets = 1 + joins.iter().skip(1).take_while(|joined| **joined).count();
                if packets > 1 && cannot_cut(&error) {
                    // From now on the kernel gets packet by packet.
                    self.segmentation = Segmentation::Off(NoSegmentation::Kernel);
                    return true;
                }
                self.lost += packets as u64;
                packets
            }
        };
        sent.extend(queue.drain(..taken.min(queue.len())).map(|transmit| transmit.datagram));
        true
    }

    pub(super) fn receive(&mut self, spare: &mut Vec<Vec<u8>>, arrivals: &mut Vec<Arrival>) {
        let want = self.want;
        while self.messages.len() < want {
            self.messages.push(Vec::with_capacity(MESSAGE_BYTES));
        }
        let mut metas: [Option<Received>; WANT_MAX] = [None; WANT_MAX];
        let Some(messages) = self.messages.get_mut(..want) else { return };
        let received = match &self.raw {
            Some(raw) => raw.receive(messages, &mut metas, &mut self.heads),
            None => self.socket.receive(messages, &mut metas),
        };
        // EAGAIN, or an ICMP error about something sent earlier: nothing has arrived.
        let count = received.unwrap_or(0).min(want);
        self.want = if count == want { (2 * want).min(WANT_MAX) } else { count.max(1) };
        for ((message, meta), head) in messages.iter().take(count).zip(metas).zip(self.heads.iter())
        {
            let Some(meta) = meta.filter(|meta| !meta.truncated) else { continue };
            if self.raw.is_none() {
                let path = Path {
                    src: meta.from.ip(),
                    dst: self.local,
                    src_port: meta.from.port(),
                    identification: Identification::Hidden,
                };
                cut(path, message, meta.segment, spare, arrivals);
            } else if let Some((path, piece)) = unwrap_ipv4(self.local, head, message) {
                cut(path, piece, segment_of(&path, piece), spare, arrivals);
            }
        }
    }
}

/// Takes a message apart into packets of `len` bytes, the last may be shorter, whose identifications count
/// up from that of `path`.
fn cut(
    path: Path,
    message: &[u8],
    len: usize,
    spare: &mut Vec<Vec<u8>>,
    arrivals: &mut Vec<Arrival>,
) {
    for (place, packet) in message.chunks(len.max(1)).enumerate() {
        let identification = match path.identification {
            Identification::Known(first) => Identification::Known(first.wrapping_add(place as u16)),
            other => other,
        };
        let mut datagram = spare.pop().unwrap_or_else(|| Vec::with_capacity(PACKET_BYTES));
        datagram.clear();
        datagram.extend_from_slice(packet);
        arrivals.push(Arrival { path: Path { identification, ..path }, datagram });
    }
}

/// Whether an error says that a piece cannot be cut on its way: too long a packet for the path, a device
/// without checksums, a kernel that does not know how.
fn cannot_cut(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::INVAL | Errno::IO | Errno::MSGSIZE | Errno::OPNOTSUPP))
}

fn open_raw(socket: &UdpSocket, local: Ipv4Addr) -> io::Result<Option<RawUdpSocket>> {
    let raw = RawUdpSocket::open(local, UDP_PORT)?;
    raw.set_buffers(SOCKET_BYTES);
    socket.refuse_all()?;
    Ok(Some(raw))
}

fn bind_error(local: IpAddr, error: io::Error) -> Error {
    let message = format!("cannot use {local} port {UDP_PORT} for a software NIC");
    let new = |kind, remedy: &str| Error::new(kind, message.clone()).remedy(remedy);
    match error.kind() {
        io::ErrorKind::AddrInUse => new(
            Kind::Refused,
            "another NIC has this address: one software NIC is one local address (on loopback \
             127.0.0.2, 127.0.0.3, ...), and kernel rdma_rxe takes the port on all of them",
        )
        .coded("address-in-use"),
        io::ErrorKind::AddrNotAvailable => {
            new(Kind::Refused, "name an address of this machine").coded("address-not-local")
        }
        _ => Error::new(Kind::Io, message),
    }
    .because(error)
}

/// What the IPv4 and UDP headers of a packet say, whose rest is `rest`, and its payload. A packet with IP
/// options is no RoCEv2 packet (IBA A17.3.1), a fragment neither.
fn unwrap_ipv4<'a>(local: IpAddr, head: &Headers, rest: &'a [u8]) -> Option<(Path, &'a [u8])> {
    let half = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let plain = head[0] == 0x45 && half(6) == 0x4000;
    let len = usize::from(half(24)).checked_sub(UDP_LEN)?;
    let src = Ipv4Addr::new(head[12], head[13], head[14], head[15]);
    let path = Path {
        src: IpAddr::V4(src),
        dst: local,
        src_port: half(20),
        identification: Identification::Known(half(4)),
    };
    rest.get(..len).filter(|_| plain).map(|payload| (path, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_plain_packets_are_unwrapped() {
        let local = IpAddr::from([127, 0, 0, 1]);
        let mut head = [0; size_of::<Headers>()];
        head[..8].copy_from_slice(&[0x45, 0, 0, 40, 0x12, 0x34, 0x40, 0]);
        head[12..16].copy_from_slice(&[10, 0, 0, 9]);
        head[20..26].copy_from_slice(&[0xc0, 1, 0x12, 0xb7, 0, 18]);
        let rest = [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2];
        let (path, payload) = unwrap_ipv4(local, &head, &rest).unwrap();
        assert_eq!(payload, [7, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(path.src, IpAddr::from([10, 0, 0, 9]));
        assert_eq!((path.src_port, path.dst), (0xc001, local));
        assert_eq!(path.identification, Identification::Known(0x1234));
        for (at, value) in [(0, 0x46), (6, 0x20), (7, 1), (25, 7), (25, 21)] {
            let mut bad = head;
            bad[at] = value;
            assert!(unwrap_ipv4(local, &bad, &rest).is_none(), "byte {at} = {value}");
        }
        assert!(unwrap_ipv4(local, &head, &[7; 9]).is_none());
    }
}
