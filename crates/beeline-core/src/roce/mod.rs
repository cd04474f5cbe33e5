//! RoCEv2 packets: the transport headers of InfiniBand inside UDP port 4791.
//!
//! A datagram is `BTH | extended headers | payload | 0 to 3 bytes of padding | ICRC`. This module knows
//! the bytes and nothing of queue pairs: [`opcode`] says which headers an opcode brings, [`header`] has a
//! checked view and a representation for each, [`packet`] puts them together, [`icrc`] closes and checks
//! a datagram, and [`psn`] and [`mtu`] hold the two numbers everything is counted in.
//!
//! Clauses are those of the InfiniBand Architecture Specification, volume 1 (IBA), and its annex A17,
//! "RoCEv2".

pub mod header;
pub mod icrc;
pub mod mtu;
pub mod opcode;
pub mod packet;
pub mod psn;

pub use header::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Ieth, ImmDt, NakCode, Qpn, Reth, RnrTimer, Syndrome,
};
pub use icrc::{ICRC_LEN, Identification, Path, Renumbering, Strength, UDP_PORT};
pub use mtu::Mtu;
pub use opcode::{Headers, Layout, Opcode, Operation, Place, Service};
pub use packet::{Head, Packet, WireError, full_lens};
pub use psn::Psn;
