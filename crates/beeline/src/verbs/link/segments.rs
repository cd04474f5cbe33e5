//! Several packets as one piece: what the kernel cuts on the way out, and merges on the way in.
//!
//! A full packet of a long message costs the kernel about as much as sixteen of them in one piece of
//! 64 KiB. The packet check allows it where whoever cuts the piece changes nothing that the check covers,
//! or changes it in a known way:
//!
//! - IPv6 has no identification, and lengths are those of each packet: always.
//! - IPv4: the kernel counts the identification up from 0, so each packet is closed for its place in the
//!   piece ([`Renumbering`]). A network interface that cuts by itself may count otherwise, and nothing
//!   tells: only on loopback, where the piece arrives whole, unless the caller knows better.
//!
//! A UDP socket learns from the kernel how long the packets of a piece are. A raw socket does not: it sees
//! one packet of up to 64 KiB. Only full packets are put together, and at most one that ends a message
//! behind them, so that its receiver can try the five lengths that a full packet may have; the check tells
//! which it is. An answer and the ACK behind it stay two: whoever waits for the answer gets it while the
//! ACK is still being sent.

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use beeline_core::rc::Transmit;
use beeline_core::roce::icrc::verify;
use beeline_core::roce::{Identification, Path, Renumbering, full_lens};
use beeline_sys::net::{Outgoing, PIECE_BYTES_MAX, UdpSocket};

use super::BATCH;

/// To whom several packets go as one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Segmentation {
    /// To every peer: over IPv6, where the packet check covers nothing that depends on who cuts.
    Everywhere,
    /// To peers on loopback addresses: a network interface might cut IPv4 packets with identifications that
    /// the packet check does not expect.
    Loopback,
    /// To every IPv4 peer because the options say so: exact where the kernel cuts, or whatever cuts counts
    /// the identification up from 0 as it does.
    Trusted,
    /// To nobody.
    Off(NoSegmentation),
}

/// Why packets go one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoSegmentation {
    /// The link has no UDP socket.
    NoSocket,
    /// The options say so.
    Unwanted,
    /// A trace is written, and shows packets as they travel one by one.
    Traced,
    /// The NIC's address is not on loopback, and an interface might cut IPv4 packets with identifications
    /// that the packet check does not expect.
    Identification,
    /// The kernel does not cut, or something else arrived than was sent.
    Kernel,
}

impl fmt::Display for Segmentation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Everywhere => "on: the check of IPv6 packets covers nothing that cutting changes",
            Self::Loopback => "on to loopback: identifications count up from 0",
            Self::Trusted => "on, as asked: identifications are taken to count up from 0",
            Self::Off(NoSegmentation::NoSocket) => "off: no UDP socket",
            Self::Off(NoSegmentation::Unwanted) => "off, as asked",
            Self::Off(NoSegmentation::Traced) => "off: a trace shows packets one by one",
            Self::Off(NoSegmentation::Identification) => {
                "off: an interface may cut IPv4 packets with other identifications than the check covers"
            }
            Self::Off(NoSegmentation::Kernel) => "off: the kernel does not cut UDP datagrams here",
        })
    }
}

impl Segmentation {
    /// A short name: `everywhere`, `loopback`, `trusted` or `off`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Everywhere => "everywhere",
            Self::Loopback => "loopback",
            Self::Trusted => "trusted",
            Self::Off(_) => "off",
        }
    }

    /// What is exact for a NIC at `local`. `wanted`: never, or over IPv4 to everybody.
    pub(in super::super) fn of(local: IpAddr, wanted: Option<bool>, traced: bool) -> Self {
        let on = match (local, wanted) {
            (_, Some(false)) => return Self::Off(NoSegmentation::Unwanted),
            _ if traced => return Self::Off(NoSegmentation::Traced),
            (IpAddr::V6(_), _) => Self::Everywhere,
            (_, Some(true)) => Self::Trusted,
            (local, None) if local.is_loopback() => Self::Loopback,
            _ => return Self::Off(NoSegmentation::Identification),
        };
        if probe(local) { on } else { Self::Off(NoSegmentation::Kernel) }
    }

    fn covers(self, peer: IpAddr) -> bool {
        match self {
            Self::Everywhere | Self::Trusted => true,
            Self::Loopback => peer.is_loopback(),
            Self::Off(_) => false,
        }
    }
}

/// How long the answer of the probe may take; on loopback it is there when the call that sends returns.
const PROBE_PATIENCE: Duration = Duration::from_millis(50);

/// Sends one piece from `local` to itself, and looks whether what arrives is what was sent.
fn probe(local: IpAddr) -> bool {
    let made = [[1_u8; 276], [2; 276], [3; 276]];
    let pair = || -> std::io::Result<_> {
        let from = UdpSocket::bind(SocketAddr::new(local, 0))?;
        let to = UdpSocket::bind(SocketAddr::new(local, 0))?;
        let piece = made.iter().enumerate();
        let piece: Vec<_> =
            piece.map(|(i, payload)| Outgoing { to: to.local(), payload, joined: i > 0 }).collect();
        from.send(&piece)?;
        Ok((from.local(), to))
    };
    let Ok((from, to)) = pair() else { return false };
    let (mut got, end) = (Vec::new(), Instant::now() + PROBE_PATIENCE);
    while got.len() < made.len() && Instant::now() < end {
        let (mut buffers, mut metas) = ([Vec::with_capacity(1024)], [None]);
        match (to.receive(&mut buffers, &mut metas), metas[0]) {
            (Ok(1..), Some(meta)) if meta.from == from => got.extend(buffers),
            (Ok(1..), _) => return false,
            _ => std::thread::yield_now(),
        }
    }
    got == made
}

/// Packets as one piece at most: what every kernel with `UDP_SEGMENT` takes.
const PACKETS_MAX: usize = 64;

/// Decides which of the packets at the front of a queue go together, and closes them for their places.
#[derive(Debug)]
pub(super) struct Pieces {
    /// For the length that came last.
    renumbering: Renumbering,
}

impl Pieces {
    pub(super) fn new() -> Self {
        Self { renumbering: Renumbering::of_len(0) }
    }

    /// Answers for each of the first [`BATCH`] packets whether it joins the one before it.
    pub(super) fn join(
        &mut self,
        queue: &mut VecDeque<Transmit>,
        segmentation: Segmentation,
    ) -> [bool; BATCH] {
        let mut joins = [false; BATCH];
        let mut piece: Option<Piece> = None;
        for (joins, transmit) in joins.iter_mut().zip(queue) {
            *joins = piece.as_mut().is_some_and(|piece| piece.takes(transmit));
            if !*joins {
                piece = Piece::begin(transmit).filter(|piece| segmentation.covers(piece.to));
            }
            let place = piece.as_ref().filter(|_| *joins).map_or(0, |piece| piece.packets - 1);
            self.number(transmit, place as u16);
        }
        joins
    }

    /// Closes a packet for an identification, whatever it was closed for before.
    fn number(&mut self, transmit: &mut Transmit, to: u16) {
        let Identification::Known(from) = transmit.path.identification else { return };
        if from == to || transmit.path.dst.is_ipv6() {
            return;
        }
        if self.renumbering.len() != transmit.datagram.len() {
            self.renumbering = Renumbering::of_len(transmit.datagram.len());
        }
        self.renumbering.apply(&mut transmit.datagram, from, to);
        transmit.path.identification = Identification::Known(to);
    }
}

/// A piece that is being put together.
struct Piece {
    to: IpAddr,
    /// Length of all packets but the last.
    len: usize,
    packets: usize,
    bytes: usize,
    ended: bool,
}

impl Piece {
    /// A piece that begins with a full packet; `None` where the packet is none.
    fn begin(first: &Transmit) -> Option<Self> {
        let len = first.datagram.len();
        full_lens(&first.datagram).any(|full| full == len).then_some(Self {
            to: first.path.dst,
            len,
            packets: 1,
            bytes: len,
            ended: false,
        })
    }

    fn takes(&mut self, next: &Transmit) -> bool {
        let len = next.datagram.len();
        let takes = !self.ended
            && next.path.dst == self.to
            && len <= self.len
            && self.packets < PACKETS_MAX
            && self.bytes + len <= PIECE_BYTES_MAX;
        if takes {
            self.packets += 1;
            self.bytes += len;
            self.ended = len < self.len;
        }
        takes
    }
}

/// How long the packets are of which a raw socket got `piece` under one IP header; all of it where it is
/// one packet.
pub(super) fn segment_of(path: &Path, piece: &[u8]) -> usize {
    full_lens(piece)
        .filter(|len| *len < piece.len())
        .find(|len| piece.get(..*len).is_some_and(|first| verify(path, first).is_some()))
        .unwrap_or(piece.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_core::roce::packet::seal;
    use beeline_core::roce::{Bth, Head, Opcode, Psn, Qpn, UDP_PORT};

    fn transmit(opcode: Opcode, payload: usize, dst: [u8; 4]) -> Transmit {
        let path = Path {
            src: [127, 0, 0, 1].into(),
            dst: dst.into(),
            src_port: UDP_PORT,
            identification: Identification::Known(0),
        };
        let mut datagram = Vec::new();
        Head::new(Bth::new(opcode, Qpn::new(5), Psn::new(7))).emit(payload, &mut datagram);
        seal(&path, &mut datagram, 0);
        Transmit { path, datagram }
    }

    const HOME: [u8; 4] = [127, 0, 0, 2];

    #[test]
    fn full_packets_of_one_message_go_together() {
        let (middle, last) = (Opcode::RC_SEND_MIDDLE, Opcode::RC_SEND_LAST);
        let far = [10, 0, 0, 1];
        // Opcode, payload, peer, and whether it joins the one before.
        let cases = [
            (Opcode::RC_SEND_FIRST, 1024, HOME, false),
            (middle, 1024, HOME, true),
            (middle, 1024, HOME, true),
            (last, 10, HOME, true),
            // Behind a shorter one nothing.
            (middle, 1024, HOME, false),
            (middle, 1024, [127, 0, 0, 3], false),
            // Longer than the first.
            (middle, 2048, [127, 0, 0, 3], false),
            (last, 2048, [127, 0, 0, 3], true),
            // No full packet to begin with.
            (last, 1024, HOME, false),
            (last, 1024, HOME, false),
            // An answer with the ACK behind it.
            (Opcode::RC_SEND_ONLY, 8, HOME, false),
            (Opcode::RC_ACK, 0, HOME, false),
            // Not on loopback.
            (middle, 1024, far, false),
            (middle, 1024, far, false),
        ];
        let mut queue: VecDeque<_> =
            cases.iter().map(|(opcode, len, dst, _)| transmit(*opcode, *len, *dst)).collect();
        let joins = Pieces::new().join(&mut queue, Segmentation::Loopback);
        let mut place = 0;
        for (n, ((_, _, _, joined), transmit)) in cases.iter().zip(&queue).enumerate() {
            assert_eq!(joins[n], *joined, "packet {n}");
            place = if *joined { place + 1 } else { 0 };
            assert_eq!(transmit.path.identification, Identification::Known(place), "packet {n}");
            assert!(verify(&transmit.path, &transmit.datagram).is_some(), "packet {n}");
        }
        // Once more, without: every packet is closed for 0 again.
        let off = Segmentation::Off(NoSegmentation::Unwanted);
        assert_eq!(Pieces::new().join(&mut queue, off), [false; BATCH]);
        for ((opcode, len, dst, _), now) in cases.iter().zip(&queue) {
            assert_eq!(*now, transmit(*opcode, *len, *dst));
        }
    }

    #[test]
    fn a_piece_is_bounded() {
        for (payload, expected) in [(4096, 65_507 / 4112), (256, BATCH)] {
            let one = || transmit(Opcode::RC_WRITE_MIDDLE, payload, HOME);
            let mut queue: VecDeque<_> = (0..BATCH + 8).map(|_| one()).collect();
            let joins = Pieces::new().join(&mut queue, Segmentation::Loopback);
            let first = 1 + joins.iter().skip(1).take_while(|joined| **joined).count();
            assert_eq!(first, expected, "packets of {payload} bytes");
        }
    }

    #[test]
    fn a_raw_receiver_takes_a_piece_apart() {
        for mtu in beeline_core::roce::Mtu::ALL {
            let full = mtu.bytes() as usize;
            let pair = [(Opcode::RC_SEND_FIRST, full), (Opcode::RC_SEND_LAST, 4)];
            a_piece_is_taken_apart(pair);
        }
        assert_eq!(segment_of(&transmit(Opcode::RC_ACK, 0, HOME).path, &[]), 0);
    }

    fn a_piece_is_taken_apart(pair: [(Opcode, usize); 2]) {
        let mut queue: VecDeque<_> = pair.map(|(opcode, len)| transmit(opcode, len, HOME)).into();
        let joins = Pieces::new().join(&mut queue, Segmentation::Loopback);
        assert_eq!(joins[..3], [false, true, false]);
        let lens: Vec<_> = queue.iter().map(|transmit| transmit.datagram.len()).collect();
        let path = queue[0].path;
        let mut piece: Vec<u8> = queue.into_iter().flat_map(|one| one.datagram).collect();
        assert_eq!(segment_of(&path, &piece), lens[0], "{pair:?}");
        assert_eq!(segment_of(&path, &piece[..lens[0]]), lens[0], "one packet");
        // What does not pass the check is left whole, and dropped by whoever checks it.
        piece[11] ^= 1;
        assert_eq!(segment_of(&path, &piece), piece.len());
    }

    #[test]
    fn where_it_is_exact() {
        let cases = [
            ("127.0.0.1", None, false, Segmentation::Loopback),
            ("192.0.2.1", None, false, Segmentation::Off(NoSegmentation::Identification)),
            ("127.0.0.1", Some(false), false, Segmentation::Off(NoSegmentation::Unwanted)),
            ("127.0.0.1", None, true, Segmentation::Off(NoSegmentation::Traced)),
            // Not an address of this machine, so nothing arrives.
            ("192.0.2.1", Some(true), false, Segmentation::Off(NoSegmentation::Kernel)),
            ("127.0.0.1", Some(true), false, Segmentation::Trusted),
        ];
        for (local, wanted, traced, expected) in cases {
            let found = Segmentation::of(local.parse().unwrap(), wanted, traced);
            assert_eq!(found, expected, "{local} {wanted:?}");
            assert!(!found.to_string().is_empty());
        }
    }
}
