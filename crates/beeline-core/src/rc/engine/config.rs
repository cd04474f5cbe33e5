//! How a NIC is set up.

use core::net::IpAddr;

use crate::roce::{Mtu, Place, UDP_PORT};

/// How a NIC is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its one address.
    pub local: IpAddr,
    /// Largest path MTU of its port.
    pub mtu: Mtu,
    /// UDP source port of what it sends.
    pub src_port: u16,
    /// Packets of one queue pair outstanding at most, 2 or more. Linux rdma_rxe works with 128.
    pub window_packets: u32,
    /// Responses one READ request asks for at most; a longer READ goes out as several requests.
    pub read_packets: u32,
    /// READs and atomics outstanding at most, in either direction.
    pub rd_atomic_max: u8,
    /// Regions registered at most.
    pub regions_max: usize,
    /// How READ responses begin when a part of a READ is asked for again.
    pub read_replay: ReadReplay,
    /// Byte order of atomic results in memory.
    pub atomic_reply: AtomicReply,
    /// Whether its packets go through memory shared with a process of this host, rather than over a
    /// network: they carry no check, and may name their payload (see [`crate::roce::packet::seal`]).
    pub shared_memory: bool,
}

impl Config {
    /// The usual set-up for an address.
    pub const fn new(local: IpAddr) -> Self {
        Self {
            local,
            mtu: Mtu::MAX,
            src_port: UDP_PORT,
            window_packets: 128,
            read_packets: 128,
            rd_atomic_max: 16,
            regions_max: crate::mr::REGIONS_MAX,
            read_replay: ReadReplay::Continue,
            atomic_reply: AtomicReply::Native,
            shared_memory: false,
        }
    }
}

/// The opcode of the first response when a READ is repeated from its middle. Received responses are
/// judged by their sequence number, so either form is understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadReplay {
    /// As if the earlier responses had just been sent. This is what Linux rdma_rxe sends and expects.
    Continue,
    /// As for a new READ.
    Restart,
}

impl ReadReplay {
    pub(in super::super) const fn place(self, replay: bool, index: u32, packets: u32) -> Place {
        match self {
            Self::Continue if replay => Place::of(index + 1, packets + 1),
            _ => Place::of(index, packets),
        }
    }
}

/// Byte order in which an atomic's result lands in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicReply {
    /// The CPU's.
    Native,
    /// Big-endian, as devices that report `ATOMIC_HCA_REPLY_BE` do: the consumer swaps.
    BigEndian,
}

impl AtomicReply {
    pub(in super::super) const fn bytes(self, original: u64) -> [u8; 8] {
        match self {
            Self::Native => original.to_ne_bytes(),
            Self::BigEndian => original.to_be_bytes(),
        }
    }

    /// The value of a result as it stands in memory.
    pub const fn value(self, bytes: [u8; 8]) -> u64 {
        match self {
            Self::Native => u64::from_ne_bytes(bytes),
            Self::BigEndian => u64::from_be_bytes(bytes),
        }
    }
}
