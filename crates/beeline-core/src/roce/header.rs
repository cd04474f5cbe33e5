//! Headers on the wire: for each a checked view that borrows the bytes, and a plain representation.
//!
//! A view exists only over as many bytes as its header has, so reading a field cannot fail. All fields
//! are big-endian (IBA 9.1). Layouts: BTH 9.2, RETH 9.3.3, AtomicETH 9.3.4, AETH 9.3.5,
//! AtomicAckETH 9.5.3, ImmDt 9.3.6, IETH 9.3.7, DETH 9.3.2.

use core::fmt;

use super::opcode::Opcode;
use super::psn::Psn;

/// The big-endian integer at a constant offset of an array.
macro_rules! int_const {
    (u8, $bytes:expr, $at:literal) => {
        $bytes[$at]
    };
    (u32, $bytes:expr, $at:literal) => {
        be($bytes, $at, 4) as u32
    };
    (u64, $bytes:expr, $at:literal) => {
        be($bytes, $at, 8)
    };
}

/// One header: its name, its length, and its fields with their byte offsets.
macro_rules! header {
    ($(#[$doc:meta])* $name:ident $view:ident $len:literal {
        $($(#[$field_doc:meta])* $field:ident: $int:tt @ $at:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$field_doc])* pub $field: $int,)* }

        #[doc = concat!("A checked view of a [`", stringify!($name), "`] in received bytes.")]
        #[derive(Clone, Copy, Debug)]
        pub struct $view<'a>(&'a [u8; $len]);

        impl<'a> $view<'a> {
            /// A view of the first bytes, and the rest; `None` where they are too few.
            pub fn split(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
                bytes.split_first_chunk::<$len>().map(|(head, rest)| (Self(head), rest))
            }

            $($(#[$field_doc])* pub const fn $field(self) -> $int { int_const!($int, self.0, $at) })*
        }

        impl $name {
            /// Length on the wire in bytes.
            pub const LEN: usize = $len;

            /// The representation of what a view shows.
            pub const fn parse(view: $view<'_>) -> Self {
                Self { $($field: view.$field(),)* }
            }

            /// The bytes on the wire.
            pub fn emit(self) -> [u8; $len] {
                let mut bytes = [0; $len];
                $(put(&mut bytes, $at, &self.$field.to_be_bytes());)*
                bytes
            }
        }
    };
}

header! {
    /// RDMA extended transport header: what a WRITE or READ reaches.
    Reth RethView 16 {
        /// First virtual address.
        va: u64 @ 0,
        /// The remote key.
        rkey: u32 @ 8,
        /// Length of the whole message in bytes.
        dma_len: u32 @ 12,
    }
}

header! {
    /// Atomic extended transport header.
    AtomicEth AtomicEthView 28 {
        /// The 64-bit word, 8-byte aligned.
        va: u64 @ 0,
        /// The remote key.
        rkey: u32 @ 8,
        /// What to store (compare and swap) or to add (fetch and add).
        swap_add: u64 @ 12,
        /// What to compare with.
        compare: u64 @ 20,
    }
}

header! {
    /// Acknowledge extended transport header, packed as it travels; see [`Syndrome`].
    Aeth AethView 4 {
        /// Syndrome in the top byte, message sequence number in the lower 24 bits.
        raw: u32 @ 0,
    }
}

header! {
    /// Atomic acknowledge extended transport header.
    AtomicAckEth AtomicAckEthView 8 {
        /// The word as it was before the operation.
        original: u64 @ 0,
    }
}

header! {
    /// Immediate data, handed to the receiver as it stands.
    ImmDt ImmDtView 4 {
        /// The 32 bits.
        data: u32 @ 0,
    }
}

header! {
    /// Invalidate extended transport header.
    Ieth IethView 4 {
        /// The key to be invalidated.
        rkey: u32 @ 0,
    }
}

header! {
    /// Datagram extended transport header.
    Deth DethView 8 {
        /// Queue key the receiver must hold.
        qkey: u32 @ 0,
        /// Sender's queue pair number in the lower 24 bits.
        src_qp: u32 @ 4,
    }
}

/// Base transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bth {
    /// What the packet is.
    pub opcode: Opcode,
    /// Asks the receiver to raise a completion event (IBA 9.2.3).
    pub solicited: bool,
    /// Migration state; kept, not acted on.
    pub migrated: bool,
    /// Bytes of padding after the payload, 0 to 3.
    pub pad: u8,
    /// Transport header version; only 0 is known.
    pub version: u8,
    /// Partition key.
    pub pkey: u16,
    /// Forward and backward congestion notification and six reserved bits; not covered by the ICRC.
    pub congestion: u8,
    /// Destination queue pair.
    pub dest_qp: Qpn,
    /// Asks for an acknowledgement (IBA 9.2.8).
    pub ack_request: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

/// A checked view of a [`Bth`] in received bytes.
#[derive(Clone, Copy, Debug)]
pub struct BthView<'a>(&'a [u8; Bth::LEN]);

impl<'a> BthView<'a> {
    /// A view of the first bytes, and the rest; `None` where they are too few.
    pub fn split(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        bytes.split_first_chunk::<{ Bth::LEN }>().map(|(head, rest)| (Self(head), rest))
    }

    /// The opcode field.
    pub const fn opcode(self) -> Opcode {
        Opcode(self.0[0])
    }

    /// Destination queue pair.
    pub const fn dest_qp(self) -> Qpn {
        Qpn::new(be(self.0, 4, 4) as u32)
    }

    /// Packet sequence number.
    pub const fn psn(self) -> Psn {
        Psn::new(be(self.0, 8, 4) as u32)
    }
}

impl Bth {
    /// Length on the wire in bytes.
    pub const LEN: usize = 12;

    /// The partition every port belongs to by default (IBA 10.9.1.2).
    pub const DEFAULT_PKEY: u16 = 0xffff;

    /// The header of an ordinary packet of this NIC.
    pub const fn new(opcode: Opcode, dest_qp: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            migrated: true,
            pad: 0,
            version: 0,
            pkey: Self::DEFAULT_PKEY,
            congestion: 0,
            dest_qp,
            ack_request: false,
            psn,
        }
    }

    /// The representation of what a view shows.
    pub const fn parse(view: BthView<'_>) -> Self {
        let bytes = view.0;
        Self {
            opcode: view.opcode(),
            solicited: bytes[1] & 0x80 != 0,
            migrated: bytes[1] & 0x40 != 0,
            pad: (bytes[1] >> 4) & 3,
            version: bytes[1] & 0x0f,
            pkey: u16::from_be_bytes([bytes[2], bytes[3]]),
            congestion: bytes[4],
            dest_qp: view.dest_qp(),
            ack_request: bytes[8] & 0x80 != 0,
            psn: view.psn(),
        }
    }

    /// The bytes on the wire.
    pub fn emit(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let flags = (u8::from(self.solicited) << 7)
            | (u8::from(self.migrated) << 6)
            | ((self.pad & 3) << 4)
            | (self.version & 0x0f);
        let psn = (u32::from(self.ack_request) << 31) | self.psn.as_u32();
        put(&mut bytes, 0, &[self.opcode.0, flags]);
        put(&mut bytes, 2, &self.pkey.to_be_bytes());
        put(&mut bytes, 4, &self.dest_qp.as_u32().to_be_bytes());
        put(&mut bytes, 4, &[self.congestion]);
        put(&mut bytes, 8, &psn.to_be_bytes());
        bytes
    }
}

/// A queue pair number, 24 bits.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Qpn(u32);

impl Qpn {
    /// Of the lower 24 bits of `raw`.
    pub const fn new(raw: u32) -> Self {
        Self(raw & 0x00ff_ffff)
    }

    /// The number.
    pub const fn as_u32(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qpn({:#08x})", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

/// What an AETH says (IBA 9.7.5.2.4, tables 44 to 46).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// Received; the five bits are a credit count, 0x1f meaning that credits are not used.
    Ack(u8),
    /// No receive was posted: try again after the time the five bits name.
    RnrNak(RnrTimer),
    /// Refused.
    Nak(NakCode),
    /// A reserved value.
    Reserved(u8),
}

impl Syndrome {
    /// An acknowledgement without end-to-end credits.
    pub const ACK: Self = Self::Ack(0x1f);

    /// Of the byte on the wire.
    pub const fn from_u8(raw: u8) -> Self {
        match raw >> 5 {
            0 => Self::Ack(raw & 0x1f),
            1 => Self::RnrNak(RnrTimer::new(raw & 0x1f)),
            3 => Self::Nak(NakCode(raw & 0x1f)),
            _ => Self::Reserved(raw),
        }
    }

    /// The byte on the wire.
    pub const fn as_u8(self) -> u8 {
        match self {
            Self::Ack(credits) => credits & 0x1f,
            Self::RnrNak(timer) => 0x20 | timer.code(),
            Self::Nak(code) => 0x60 | (code.0 & 0x1f),
            Self::Reserved(raw) => raw,
        }
    }
}

impl Aeth {
    /// A header of its two parts.
    pub const fn new(syndrome: Syndrome, msn: u32) -> Self {
        Self { raw: ((syndrome.as_u8() as u32) << 24) | (msn & 0x00ff_ffff) }
    }

    /// What it says.
    pub const fn syndrome(self) -> Syndrome {
        Syndrome::from_u8((self.raw >> 24) as u8)
    }

    /// Message sequence number, 24 bits.
    pub const fn msn(self) -> u32 {
        self.raw & 0x00ff_ffff
    }
}

/// Why a request was refused (IBA table 46); any value is representable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NakCode(pub u8);

impl NakCode {
    /// A packet is missing.
    pub const PSN_SEQUENCE: Self = Self(0);
    /// The request is malformed or not served.
    pub const INVALID_REQUEST: Self = Self(1);
    /// A key, a bound or a right.
    pub const REMOTE_ACCESS: Self = Self(2);
    /// The responder could not finish.
    pub const REMOTE_OPERATION: Self = Self(3);
}

impl fmt::Debug for NakCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::PSN_SEQUENCE => "PSN_SEQUENCE",
            Self::INVALID_REQUEST => "INVALID_REQUEST",
            Self::REMOTE_ACCESS => "REMOTE_ACCESS",
            Self::REMOTE_OPERATION => "REMOTE_OPERATION",
            Self(other) => return write!(f, "NakCode({other})"),
        })
    }
}

/// How long to wait after a receiver-not-ready NAK: a five-bit code (IBA table 45).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// Of the lower five bits of `code`.
    pub const fn new(code: u8) -> Self {
        Self(code & 0x1f)
    }

    /// The code.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The time it stands for.
    pub const fn wait(self) -> core::time::Duration {
        const HUNDREDTHS_MS: [u32; 32] = [
            65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768,
            1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
        ];
        core::time::Duration::from_micros(HUNDREDTHS_MS[self.0 as usize & 31] as u64 * 10)
    }
}

/// The big-endian integer of `len` bytes at `at`.
const fn be<const N: usize>(bytes: &[u8; N], at: usize, len: usize) -> u64 {
    let mut value = 0;
    let mut i = at;
    while i < at + len {
        value = (value << 8) | bytes[i] as u64;
        i += 1;
    }
    value
}

/// Copies `from` to `at`; every call passes constants that fit.
fn put<const N: usize>(bytes: &mut [u8; N], at: usize, from: &[u8]) {
    if let Some(into) = bytes.get_mut(at..at + from.len()) {
        into.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_stand_where_the_standard_puts_them() {
        let bth = Bth {
            solicited: true,
            pad: 2,
            ack_request: true,
            congestion: 0x40,
            ..Bth::new(Opcode::RC_WRITE_ONLY, Qpn::new(0x12_3456), Psn::new(0xab_cdef))
        };
        let bytes = [0x0a, 0xe0, 0xff, 0xff, 0x40, 0x12, 0x34, 0x56, 0x80, 0xab, 0xcd, 0xef];
        assert_eq!(bth.emit(), bytes);
        let atomic = AtomicEth { va: 1 << 56, rkey: 2 << 24, swap_add: 3 << 56, compare: 4 << 56 };
        let bytes = atomic.emit();
        assert_eq!((bytes[0], bytes[8], bytes[12], bytes[20]), (1, 2, 3, 4));
        let aeth = Aeth::new(Syndrome::Nak(NakCode::REMOTE_ACCESS), 0x01_0203);
        assert_eq!(aeth.emit(), [0x62, 1, 2, 3]);
    }

    #[test]
    fn receiver_not_ready_times_are_those_of_the_table() {
        for (code, micros) in [(0, 655_360), (1, 10), (12, 640), (14, 1280), (31, 491_520)] {
            assert_eq!(RnrTimer::new(code).wait().as_micros(), micros, "code {code}");
        }
    }

    proptest! {
        #[test]
        fn what_is_emitted_parses_to_itself(bytes in any::<[u8; 28]>()) {
            let (view, _) = BthView::split(&bytes).unwrap();
            prop_assert_eq!(Bth::parse(view).emit()[4..8].to_vec(), bytes[4..8].to_vec());
            let bth = Bth::parse(view);
            prop_assert_eq!(Bth::parse(BthView::split(&bth.emit()).unwrap().0), bth);
            let (view, _) = RethView::split(&bytes).unwrap();
            prop_assert_eq!(&Reth::parse(view).emit()[..], &bytes[..16]);
            let (view, _) = AtomicEthView::split(&bytes).unwrap();
            prop_assert_eq!(&AtomicEth::parse(view).emit()[..], &bytes[..]);
            let (view, _) = DethView::split(&bytes).unwrap();
            prop_assert_eq!(&Deth::parse(view).emit()[..], &bytes[..8]);
            prop_assert_eq!(Syndrome::from_u8(bytes[0]).as_u8(), bytes[0]);
        }

        #[test]
        fn too_few_bytes_make_no_view(len in 0usize..12) {
            prop_assert!(BthView::split(&[0; 12][..len]).is_none());
        }
    }
}
