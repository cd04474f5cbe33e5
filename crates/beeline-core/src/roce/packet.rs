//! A whole packet: which headers stand in a datagram, and how one is put together.

use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use super::header::{
    Aeth, AethView, AtomicAckEth, AtomicAckEthView, AtomicEth, AtomicEthView, Bth, BthView, Deth,
    DethView, Ieth, IethView, ImmDt, ImmDtView, Reth, RethView,
};
use super::icrc::{ICRC_LEN, Identification, Path, icrc};
use super::mtu::Mtu;
use super::opcode::{Headers, Layout, Opcode, Place};

/// The headers of a packet. Which of the options are set follows from the opcode's [`Layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Base transport header.
    pub bth: Bth,
    /// What a WRITE or READ reaches.
    pub reth: Option<Reth>,
    /// Sender and queue key of a datagram.
    pub deth: Option<Deth>,
    /// An atomic request.
    pub atomic: Option<AtomicEth>,
    /// An acknowledgement.
    pub aeth: Option<Aeth>,
    /// An atomic result.
    pub atomic_ack: Option<AtomicAckEth>,
    /// Immediate data.
    pub imm: Option<ImmDt>,
    /// A key to be invalidated.
    pub ieth: Option<Ieth>,
}

impl Head {
    /// A head of nothing but a BTH.
    pub const fn new(bth: Bth) -> Self {
        Self {
            bth,
            reth: None,
            deth: None,
            atomic: None,
            aeth: None,
            atomic_ack: None,
            imm: None,
            ieth: None,
        }
    }

    /// Appends the headers in wire order, then room for `payload` bytes and their padding, all zero.
    /// Sets the padding count. Returns where the payload goes.
    pub fn emit(&mut self, payload: usize, datagram: &mut Vec<u8>) -> Range<usize> {
        let start = self.emit_headers(payload, datagram);
        datagram.resize(start + payload + usize::from(self.bth.pad), 0);
        start..start + payload
    }

    /// Appends the headers of a packet with `payload` bytes in wire order, and sets the padding count.
    /// The payload is to be appended before [`seal`], which adds the padding. Returns where it goes.
    pub fn emit_headers(&mut self, payload: usize, datagram: &mut Vec<u8>) -> usize {
        self.bth.pad = (payload.wrapping_neg() & 3) as u8;
        datagram.extend_from_slice(&self.bth.emit());
        if let Some(reth) = self.reth {
            datagram.extend_from_slice(&reth.emit());
        }
        if let Some(deth) = self.deth {
            datagram.extend_from_slice(&deth.emit());
        }
        if let Some(atomic) = self.atomic {
            datagram.extend_from_slice(&atomic.emit());
        }
        if let Some(aeth) = self.aeth {
            datagram.extend_from_slice(&aeth.emit());
        }
        if let Some(atomic_ack) = self.atomic_ack {
            datagram.extend_from_slice(&atomic_ack.emit());
        }
        if let Some(imm) = self.imm {
            datagram.extend_from_slice(&imm.emit());
        }
        if let Some(ieth) = self.ieth {
            datagram.extend_from_slice(&ieth.emit());
        }
        datagram.len()
    }
}

/// Closes a datagram with its padding and its ICRC.
///
/// On a path without IP header the four bytes are not an ICRC but say how many bytes of payload the
/// datagram names by reference: 0 where the payload is in place. What stands in its place then is a
/// matter between the links and the memory of both sides. On every other path `referenced` is 0.
pub fn seal(path: &Path, datagram: &mut Vec<u8>, referenced: u32) {
    // All headers are multiples of 4 long, so the length of the whole gives the padding.
    datagram.resize(datagram.len().next_multiple_of(4), 0);
    let last = match path.identification {
        Identification::Absent => referenced.to_le_bytes(),
        _ => icrc(path, datagram),
    };
    datagram.extend_from_slice(&last);
}

/// How long a datagram can be whose first bytes these are, if more of its message follow it: its headers, a
/// full payload of each path MTU, longest first, and the ICRC (IBA 9.7.2: FIRST and MIDDLE are full).
/// Nothing for the last or only packet of a message.
///
/// Such packets are what a sender lets the kernel cut from one piece, and by these lengths a receiver that
/// sees the piece takes it apart.
pub fn full_lens(datagram: &[u8]) -> impl Iterator<Item = usize> + use<> {
    let layout = datagram.first().and_then(|opcode| Opcode(*opcode).layout());
    let more = layout.filter(|layout| matches!(layout.place, Place::First | Place::Middle));
    let around = more.map(|layout| BTH_LEN + layout.headers.len() + ICRC_LEN);
    around
        .into_iter()
        .flat_map(|around| Mtu::ALL.iter().rev().map(move |mtu| around + mtu.bytes() as usize))
}

/// Bytes of a base transport header.
const BTH_LEN: usize = 12;

/// A received packet: its headers, and where its payload lies in the datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The headers.
    pub head: Head,
    /// What the opcode means.
    pub layout: Layout,
    /// The payload without padding, as a range of the datagram.
    pub payload: Range<usize>,
    /// Bytes of payload that `payload` only names; 0 where it is the payload itself.
    pub referenced: u32,
}

impl Packet {
    /// Takes a UDP payload apart. The ICRC is not checked here: [`super::icrc::verify`] does that.
    pub fn parse(datagram: &[u8]) -> Result<Self, WireError> {
        Self::parse_with(datagram, |_| 0)
    }

    /// Takes apart what came on a path without IP header; see [`seal`].
    pub fn parse_local(datagram: &[u8]) -> Result<Self, WireError> {
        Self::parse_with(datagram, u32::from_le_bytes)
    }

    fn parse_with(
        datagram: &[u8],
        referenced: impl FnOnce([u8; ICRC_LEN]) -> u32,
    ) -> Result<Self, WireError> {
        let short = WireError::TooShort { len: datagram.len() };
        let Some((body, last)) = datagram.split_last_chunk::<ICRC_LEN>() else {
            return Err(short);
        };
        let (view, rest) = BthView::split(body).ok_or(short)?;
        let bth = Bth::parse(view);
        // IBA 9.6.1.1, C9-7: an unknown transport header version makes the packet invalid.
        if bth.version != 0 {
            return Err(WireError::Version { version: bth.version });
        }
        let layout = bth.opcode.layout().ok_or(WireError::Opcode { opcode: bth.opcode })?;
        let mut head = Head::new(bth);
        let rest = parse_extended(&mut head, layout.headers, rest).ok_or(short)?;
        let referenced = referenced(*last);
        // The padding count is that of the payload, not of what stands for it.
        let pad = if referenced > 0 { 0 } else { usize::from(bth.pad) };
        let end = rest.len().checked_sub(pad).ok_or(short)?;
        let start = body.len() - rest.len();
        Ok(Self { head, layout, payload: start..start + end, referenced })
    }

    /// Payload bytes without padding; the length of a datagram fits 32 bits.
    pub fn payload_len(&self) -> u32 {
        if self.referenced > 0 { self.referenced } else { self.payload.len() as u32 }
    }
}

/// Parses the extended headers a layout names; answers what follows them.
fn parse_extended<'a>(head: &mut Head, has: Headers, mut rest: &'a [u8]) -> Option<&'a [u8]> {
    if has.has(Headers::RETH) {
        let (view, after) = RethView::split(rest)?;
        (head.reth, rest) = (Some(Reth::parse(view)), after);
    }
    if has.has(Headers::DETH) {
        let (view, after) = DethView::split(rest)?;
        (head.deth, rest) = (Some(Deth::parse(view)), after);
    }
    if has.has(Headers::ATOMIC) {
        let (view, after) = AtomicEthView::split(rest)?;
        (head.atomic, rest) = (Some(AtomicEth::parse(view)), after);
    }
    if has.has(Headers::AETH) {
        let (view, after) = AethView::split(rest)?;
        (head.aeth, rest) = (Some(Aeth::parse(view)), after);
    }
    if has.has(Headers::ATOMIC_ACK) {
        let (view, after) = AtomicAckEthView::split(rest)?;
        (head.atomic_ack, rest) = (Some(AtomicAckEth::parse(view)), after);
    }
    if has.has(Headers::IMM) {
        let (view, after) = ImmDtView::split(rest)?;
        (head.imm, rest) = (Some(ImmDt::parse(view)), after);
    }
    if has.has(Headers::IETH) {
        let (view, after) = IethView::split(rest)?;
        (head.ieth, rest) = (Some(Ieth::parse(view)), after);
    }
    Some(rest)
}

/// A datagram that is no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// The headers its opcode names, its padding and its ICRC do not fit.
    TooShort {
        /// Its length in bytes.
        len: usize,
    },
    /// Its transport header version is not 0.
    Version {
        /// The version.
        version: u8,
    },
    /// Its opcode is not known.
    Opcode {
        /// The opcode.
        opcode: Opcode,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort { len } => write!(f, "a datagram of {len} bytes is too short"),
            Self::Version { version } => write!(f, "transport header version {version}"),
            Self::Opcode { opcode } => write!(f, "opcode {opcode}"),
        }
    }
}

impl core::error::Error for WireError {}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Head { bth, reth, aeth, .. } = &self.head;
        write!(f, "{} to {} psn {}", bth.opcode.name(), bth.dest_qp, bth.psn)?;
        if let Some(reth) = reth {
            write!(f, " va {:#x} len {}", reth.va, reth.dma_len)?;
        }
        if let Some(aeth) = aeth {
            write!(f, " {:?} msn {}", aeth.syndrome(), aeth.msn())?;
        }
        write!(f, " payload {}", self.payload.len())?;
        f.write_str(if bth.ack_request { " ack?" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roce::{Psn, Qpn};
    use proptest::prelude::*;

    fn head_of(opcode: Opcode) -> Head {
        let has = opcode.layout().unwrap().headers;
        let on = |header| has.has(header);
        Head {
            reth: on(Headers::RETH).then_some(Reth { va: 1, rkey: 2, dma_len: 3 }),
            deth: on(Headers::DETH).then_some(Deth { qkey: 4, src_qp: 5 }),
            atomic: on(Headers::ATOMIC).then_some(AtomicEth {
                va: 6,
                rkey: 7,
                swap_add: 8,
                compare: 9,
            }),
            aeth: on(Headers::AETH).then_some(Aeth { raw: 10 }),
            atomic_ack: on(Headers::ATOMIC_ACK).then_some(AtomicAckEth { original: 11 }),
            imm: on(Headers::IMM).then_some(ImmDt { data: 12 }),
            ieth: on(Headers::IETH).then_some(Ieth { rkey: 13 }),
            ..Head::new(Bth::new(opcode, Qpn::new(14), Psn::new(15)))
        }
    }

    #[test]
    fn every_opcode_parses_to_what_was_emitted() {
        for opcode in Opcode::ALL {
            for len in 0..9 {
                let mut head = head_of(*opcode);
                let mut datagram = Vec::new();
                let payload = head.emit(len, &mut datagram);
                datagram.extend([0; ICRC_LEN]);
                let packet = Packet::parse(&datagram).unwrap();
                assert_eq!((packet.head, packet.payload), (head, payload), "{opcode}");
                assert_eq!(datagram.len() % 4, 0);
                // Cut anywhere, the packet is refused or its payload shrinks; never does it panic.
                for cut in 0..datagram.len() {
                    let _ = Packet::parse(&datagram[..cut]);
                }
            }
        }
    }

    #[test]
    fn full_packets_have_one_of_five_lengths() {
        for opcode in Opcode::ALL {
            let more = matches!(opcode.layout().unwrap().place, Place::First | Place::Middle);
            let made: Vec<usize> = Mtu::ALL
                .iter()
                .rev()
                .filter(|_| more)
                .map(|mtu| {
                    let mut datagram = Vec::new();
                    head_of(*opcode).emit(mtu.bytes() as usize, &mut datagram);
                    datagram.len() + ICRC_LEN
                })
                .collect();
            assert_eq!(full_lens(&[opcode.0, 0]).collect::<Vec<_>>(), made, "{opcode}");
        }
        assert_eq!((full_lens(&[]).count(), full_lens(&[0xff]).count()), (0, 0));
    }

    proptest! {
        #[test]
        fn no_datagram_makes_the_parser_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..80),
        ) {
            if let Ok(packet) = Packet::parse(&bytes) {
                prop_assert!(packet.payload.end <= bytes.len());
            }
        }
    }
}
