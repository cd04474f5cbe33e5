//! RoCEv2 on a UDP socket, with a raw socket beside it where that is allowed.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use beeline_core::rc::Transmit;
use beeline_core::roce::{Identification, Path, UDP_PORT};
use beeline_sys::net::{Headers, Outgoing, RawUdpSocket, Received, UdpSocket};

use super::{Arrival, BATCH, LinkKind};
use crate::error::{Error, Kind, Result};

/// Asked of the kernel for each direction; it gives what it allows.
const SOCKET_BYTES: usize = 8 << 20;

/// Datagrams asked for at least.
const WANT_MIN: usize = 2;

/// Bytes of a UDP header.
const UDP_LEN: usize = 8;

#[derive(Debug)]
pub(in super::super) struct UdpLink {
    socket: UdpSocket,
    raw: Option<RawUdpSocket>,
    local: IpAddr,
    /// Datagrams to ask for next: few while few come, so that an answer that is waited for is not held up
    /// by what many would need.
    want: usize,
    /// Datagrams the kernel did not take: a path too small, no route. Lost, as on a wire.
    lost: u64,
}

impl UdpLink {
    /// The link of a NIC whose address is `local`. `raw`: whether the raw socket must, may or must not
    /// be used.
    pub(in super::super) fn open(local: IpAddr, wanted: Option<LinkKind>) -> Result<Self> {
        let address = SocketAddr::new(local, UDP_PORT);
        let socket = UdpSocket::bind(address).map_err(|error| bind_error(local, error))?;
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
        Ok(Self { socket, raw, local, want: WANT_MIN, lost: 0 })
    }

    pub(super) const fn kind(&self) -> LinkKind {
        if self.raw.is_some() { LinkKind::Raw } else { LinkKind::Udp }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.raw.as_ref().map_or_else(|| self.socket.as_fd(), AsFd::as_fd)
    }

    pub(super) fn send(&mut self, queue: &mut VecDeque<Transmit>, sent: &mut Vec<Vec<u8>>) -> bool {
        const NOTHING: Outgoing<'static> =
            Outgoing { to: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0), payload: &[] };
        let mut batch = [NOTHING; BATCH];
        let mut count = 0;
        for (slot, transmit) in batch.iter_mut().zip(queue.iter()) {
            let to = SocketAddr::new(transmit.path.dst, UDP_PORT);
            *slot = Outgoing { to, payload: &transmit.datagram };
            count += 1;
        }
        let taken = match self.socket.send(batch.get(..count).unwrap_or(&[])) {
            Ok(taken) => taken,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(_) => {
                self.lost += 1;
                1
            }
        };
        sent.extend(queue.drain(..taken.min(queue.len())).map(|transmit| transmit.datagram));
        true
    }

    pub(super) fn receive(&mut self, spare: &mut Vec<Vec<u8>>, arrivals: &mut Vec<Arrival>) {
        let mut metas: [Option<Received>; BATCH] = [None; BATCH];
        let mut heads: [Headers; BATCH] = [[0; size_of::<Headers>()]; BATCH];
        let want = self.want.min(spare.len());
        let Some(buffers) = spare.get_mut(..want) else { return };
        let received = match &self.raw {
            Some(raw) => raw.receive(buffers, &mut metas, &mut heads),
            None => self.socket.receive(buffers, &mut metas),
        };
        // EAGAIN, or an ICMP error about something sent earlier: nothing has arrived.
        let count = received.unwrap_or(0).min(want);
        self.want = if count == want {
            BATCH
        } else if count == 0 {
            WANT_MIN
        } else {
            self.want
        };
        for ((datagram, meta), head) in spare.drain(..count).zip(metas).zip(&heads) {
            let Some(meta) = meta.filter(|meta| !meta.truncated) else { continue };
            let arrival = match &self.raw {
                Some(_) => unwrap_ipv4(self.local, head, datagram),
                None => Some(Arrival {
                    path: Path {
                        src: meta.from.ip(),
                        dst: self.local,
                        src_port: meta.from.port(),
                        identification: Identification::Hidden,
                    },
                    datagram,
                }),
            };
            arrivals.extend(arrival);
        }
    }
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

/// What the IPv4 and UDP headers of a packet say, whose rest is `datagram`. A packet with IP options is
/// no RoCEv2 packet (IBA A17.3.1), a fragment neither.
fn unwrap_ipv4(local: IpAddr, head: &Headers, mut datagram: Vec<u8>) -> Option<Arrival> {
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
    if !plain || datagram.len() < len {
        return None;
    }
    datagram.truncate(len);
    Some(Arrival { path, datagram })
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
        let rest = || vec![7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2];
        let arrival = unwrap_ipv4(local, &head, rest()).unwrap();
        assert_eq!(arrival.datagram, [7, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(arrival.path.src, IpAddr::from([10, 0, 0, 9]));
        assert_eq!((arrival.path.src_port, arrival.path.dst), (0xc001, local));
        assert_eq!(arrival.path.identification, Identification::Known(0x1234));
        for (at, value) in [(0, 0x46), (6, 0x20), (7, 1), (25, 7), (25, 21)] {
            let mut bad = head;
            bad[at] = value;
            assert!(unwrap_ipv4(local, &bad, rest()).is_none(), "byte {at} = {value}");
        }
        assert!(unwrap_ipv4(local, &head, vec![7; 9]).is_none());
    }
}
