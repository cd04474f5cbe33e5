//! One table from opcode to what follows it.
//!
//! IBA 9.2.1, table 35 "OpCode field", and 9.6 "Transport function". The top three bits name the service, the low
//! five the operation; the headers follow in the fixed order RETH, DETH, AtomicETH, AETH, AtomicAckETH,
//! ImmDt, IETH.

use core::fmt;

/// The opcode field of a BTH; any value is representable.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Opcode(pub u8);

macro_rules! opcodes {
    ($($name:ident = $value:literal, $service:ident $operation:ident $place:ident
        [$($header:ident)*];)*) => {
        impl Opcode {
            $(
                #[doc = concat!("`", stringify!($name), "`, ", stringify!($value), ".")]
                pub const $name: Self = Self($value);
            )*

            /// The field's standard name; `"unknown opcode"` where it has none here.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* _ => "unknown opcode" }
            }

            /// What the opcode means and which headers follow, or `None` for one this NIC does not know.
            pub const fn layout(self) -> Option<Layout> {
                match self {
                    $(Self::$name => Some(Layout {
                        service: Service::$service,
                        operation: Operation::$operation,
                        place: Place::$place,
                        headers: Headers(0 $(| Headers::$header.0)*),
                    }),)*
                    _ => None,
                }
            }

            /// Every opcode of the table.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];
        }
    };
}

opcodes! {
    RC_SEND_FIRST = 0x00, Rc Send First [];
    RC_SEND_MIDDLE = 0x01, Rc Send Middle [];
    RC_SEND_LAST = 0x02, Rc Send Last [];
    RC_SEND_LAST_IMM = 0x03, Rc Send Last [IMM];
    RC_SEND_ONLY = 0x04, Rc Send Only [];
    RC_SEND_ONLY_IMM = 0x05, Rc Send Only [IMM];
    RC_WRITE_FIRST = 0x06, Rc Write First [RETH];
    RC_WRITE_MIDDLE = 0x07, Rc Write Middle [];
    RC_WRITE_LAST = 0x08, Rc Write Last [];
    RC_WRITE_LAST_IMM = 0x09, Rc Write Last [IMM];
    RC_WRITE_ONLY = 0x0a, Rc Write Only [RETH];
    RC_WRITE_ONLY_IMM = 0x0b, Rc Write Only [RETH IMM];
    RC_READ_REQUEST = 0x0c, Rc ReadRequest Only [RETH];
    RC_READ_RESPONSE_FIRST = 0x0d, Rc ReadResponse First [AETH];
    RC_READ_RESPONSE_MIDDLE = 0x0e, Rc ReadResponse Middle [];
    RC_READ_RESPONSE_LAST = 0x0f, Rc ReadResponse Last [AETH];
    RC_READ_RESPONSE_ONLY = 0x10, Rc ReadResponse Only [AETH];
    RC_ACK = 0x11, Rc Ack Only [AETH];
    RC_ATOMIC_ACK = 0x12, Rc AtomicAck Only [AETH ATOMIC_ACK];
    RC_COMPARE_SWAP = 0x13, Rc CompareSwap Only [ATOMIC];
    RC_FETCH_ADD = 0x14, Rc FetchAdd Only [ATOMIC];
    RC_SEND_LAST_INVALIDATE = 0x16, Rc SendInvalidate Last [IETH];
    RC_SEND_ONLY_INVALIDATE = 0x17, Rc SendInvalidate Only [IETH];
    UC_SEND_FIRST = 0x20, Uc Send First [];
    UC_SEND_MIDDLE = 0x21, Uc Send Middle [];
    UC_SEND_LAST = 0x22, Uc Send Last [];
    UC_SEND_LAST_IMM = 0x23, Uc Send Last [IMM];
    UC_SEND_ONLY = 0x24, Uc Send Only [];
    UC_SEND_ONLY_IMM = 0x25, Uc Send Only [IMM];
    UC_WRITE_FIRST = 0x26, Uc Write First [RETH];
    UC_WRITE_MIDDLE = 0x27, Uc Write Middle [];
    UC_WRITE_LAST = 0x28, Uc Write Last [];
    UC_WRITE_LAST_IMM = 0x29, Uc Write Last [IMM];
    UC_WRITE_ONLY = 0x2a, Uc Write Only [RETH];
    UC_WRITE_ONLY_IMM = 0x2b, Uc Write Only [RETH IMM];
    UD_SEND_ONLY = 0x64, Ud Send Only [DETH];
    UD_SEND_ONLY_IMM = 0x65, Ud Send Only [DETH IMM];
    CNP = 0x81, Cnp CongestionNotice Only [];
}

impl Opcode {
    /// The opcode of one packet of a request message: a segment's place, with immediate data or not.
    /// `None` where the combination does not exist.
    pub const fn of_segment(operation: Operation, place: Place, immediate: bool) -> Option<Self> {
        let (base, imm_ok) = match (operation, place) {
            (Operation::Send, Place::First) => (Self::RC_SEND_FIRST, false),
            (Operation::Send, Place::Middle) => (Self::RC_SEND_MIDDLE, false),
            (Operation::Send, Place::Last) => (Self::RC_SEND_LAST, true),
            (Operation::Send, Place::Only) => (Self::RC_SEND_ONLY, true),
            (Operation::Write, Place::First) => (Self::RC_WRITE_FIRST, false),
            (Operation::Write, Place::Middle) => (Self::RC_WRITE_MIDDLE, false),
            (Operation::Write, Place::Last) => (Self::RC_WRITE_LAST, true),
            (Operation::Write, Place::Only) => (Self::RC_WRITE_ONLY, true),
            (Operation::ReadRequest, Place::Only) => (Self::RC_READ_REQUEST, false),
            (Operation::CompareSwap, Place::Only) => (Self::RC_COMPARE_SWAP, false),
            (Operation::FetchAdd, Place::Only) => (Self::RC_FETCH_ADD, false),
            (Operation::ReadResponse, Place::First) => (Self::RC_READ_RESPONSE_FIRST, false),
            (Operation::ReadResponse, Place::Middle) => (Self::RC_READ_RESPONSE_MIDDLE, false),
            (Operation::ReadResponse, Place::Last) => (Self::RC_READ_RESPONSE_LAST, false),
            (Operation::ReadResponse, Place::Only) => (Self::RC_READ_RESPONSE_ONLY, false),
            _ => return None,
        };
        match (immediate, imm_ok) {
            (false, _) => Some(base),
            // With immediate data the opcode is the next higher one (IBA table 35).
            (true, true) => Some(Self(base.0 + 1)),
            (true, false) => None,
        }
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({:#04x})", self.name(), self.0)
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:#04x})", self.name(), self.0)
    }
}

/// What an opcode means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The transport service.
    pub service: Service,
    /// The operation.
    pub operation: Operation,
    /// The packet's place in its message.
    pub place: Place,
    /// The extended headers after the BTH.
    pub headers: Headers,
}

/// A transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection: known by name, not served.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification (IBA annex A17.9.3).
    Cnp,
}

/// What a packet asks for or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Operation {
    Send,
    SendInvalidate,
    Write,
    ReadRequest,
    ReadResponse,
    Ack,
    AtomicAck,
    CompareSwap,
    FetchAdd,
    CongestionNotice,
}

impl Operation {
    /// Whether the packet answers a request, and so belongs to the completer.
    pub const fn is_response(self) -> bool {
        matches!(self, Self::ReadResponse | Self::Ack | Self::AtomicAck)
    }

    /// Whether packets of this operation carry payload.
    pub const fn has_payload(self) -> bool {
        matches!(self, Self::Send | Self::SendInvalidate | Self::Write | Self::ReadResponse)
    }
}

/// A packet's place in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Place {
    First,
    Middle,
    Last,
    Only,
}

impl Place {
    /// The place of packet `index` of `count`.
    pub const fn of(index: u32, count: u32) -> Self {
        match (index == 0, index + 1 >= count) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }

    /// Whether the packet begins a message.
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether the packet ends a message.
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// A set of extended headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Headers(u8);

impl Headers {
    /// RDMA extended transport header.
    pub const RETH: Self = Self(1);
    /// Datagram extended transport header.
    pub const DETH: Self = Self(2);
    /// Atomic extended transport header.
    pub const ATOMIC: Self = Self(4);
    /// Acknowledge extended transport header.
    pub const AETH: Self = Self(8);
    /// Atomic acknowledge extended transport header.
    pub const ATOMIC_ACK: Self = Self(16);
    /// Immediate data.
    pub const IMM: Self = Self(32);
    /// Invalidate extended transport header.
    pub const IETH: Self = Self(64);

    /// Whether `header` is in the set.
    pub const fn has(self, header: Self) -> bool {
        self.0 & header.0 != 0
    }

    /// Bytes of all of them.
    pub const fn len(self) -> usize {
        let lens = [
            (Self::RETH, 16),
            (Self::DETH, 8),
            (Self::ATOMIC, 28),
            (Self::AETH, 4),
            (Self::ATOMIC_ACK, 8),
            (Self::IMM, 4),
            (Self::IETH, 4),
        ];
        let (mut bytes, mut i) = (0, 0);
        while i < lens.len() {
            if self.has(lens[i].0) {
                bytes += lens[i].1;
            }
            i += 1;
        }
        bytes
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_agree_with_the_table() {
        let operations = [
            Operation::Send,
            Operation::Write,
            Operation::ReadRequest,
            Operation::ReadResponse,
            Operation::CompareSwap,
            Operation::FetchAdd,
        ];
        let mut made = 0;
        for operation in operations {
            for place in [Place::First, Place::Middle, Place::Last, Place::Only] {
                for immediate in [false, true] {
                    let Some(opcode) = Opcode::of_segment(operation, place, immediate) else {
                        continue;
                    };
                    let layout = opcode.layout().unwrap();
                    assert_eq!((layout.operation, layout.place), (operation, place));
                    assert_eq!(layout.headers.has(Headers::IMM), immediate, "{opcode}");
                    made += 1;
                }
            }
        }
        assert_eq!(made, 19);
    }

    #[test]
    fn only_a_starting_write_carries_an_address() {
        for opcode in Opcode::ALL {
            let layout = opcode.layout().unwrap();
            if layout.operation == Operation::Write {
                assert_eq!(layout.headers.has(Headers::RETH), layout.place.starts(), "{opcode}");
            }
        }
        assert_eq!(Opcode(0x15).layout(), None);
    }
}
