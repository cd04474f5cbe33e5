//! States of a queue pair, and which attributes each transition takes: one table.
//!
//! IBA 10.3.1 "Queue pair and EE context states", 11.2.5.2 "Modify queue pair", tables 91 and 92.

use core::fmt;
use core::net::IpAddr;

use crate::mr::Access;
use crate::roce::{Mtu, Psn, Qpn, RnrTimer};

/// What a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpKind {
    /// Reliable connection.
    Rc,
    /// Unreliable datagram.
    Ud,
}

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// Made, nothing allowed.
    Reset,
    /// Receives may be posted.
    Init,
    /// Receives from the peer.
    Rtr,
    /// Sends as well.
    Rts,
    /// Send queue drained: named so that it can be refused by name.
    Sqd,
    /// Send queue in error: named so that it can be refused by name.
    Sqe,
    /// Everything posted is flushed.
    Err,
}

impl fmt::Display for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::Rtr => "RTR",
            Self::Rts => "RTS",
            Self::Sqd => "SQD",
            Self::Sqe => "SQE",
            Self::Err => "ERR",
        })
    }
}

/// Attributes for a transition; those that are `Some` make up its mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAttr {
    /// Index of the partition key; only 0 exists.
    pub pkey_index: Option<u16>,
    /// Port; only 1 exists.
    pub port: Option<u8>,
    /// What the peer may do: remote write, read, atomic.
    pub access: Option<Access>,
    /// Queue key (datagrams).
    pub qkey: Option<u32>,
    /// The peer's address.
    pub peer: Option<IpAddr>,
    /// Payload bytes of a packet; both ends must agree.
    pub path_mtu: Option<Mtu>,
    /// The peer's queue pair.
    pub dest_qpn: Option<Qpn>,
    /// First sequence number expected from the peer.
    pub rq_psn: Option<Psn>,
    /// READs and atomics of the peer that can be answered again.
    pub max_dest_rd_atomic: Option<u8>,
    /// How long the peer is told to wait when no receive is posted.
    pub min_rnr_timer: Option<RnrTimer>,
    /// Local ACK timeout: 4.096 us times two to this power; 0 waits for ever (IBA 9.9.2.1.2).
    pub timeout: Option<u8>,
    /// Retries after a timeout or a sequence error, 0 to 7.
    pub retry_cnt: Option<u8>,
    /// Retries after receiver not ready, 0 to 6; 7 retries for ever.
    pub rnr_retry: Option<u8>,
    /// First sequence number sent.
    pub sq_psn: Option<Psn>,
    /// READs and atomics outstanding at a time.
    pub max_rd_atomic: Option<u8>,
}

/// A set of attributes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct AttrMask(u16);

macro_rules! attributes {
    ($($bit:literal $constant:ident $field:ident;)*) => {
        impl AttrMask {
            $(
                #[doc = concat!("[`QpAttr::", stringify!($field), "`].")]
                pub const $constant: Self = Self(1 << $bit);
            )*

            /// The attributes that are set.
            pub const fn of(attr: &QpAttr) -> Self {
                Self(0 $(| if attr.$field.is_some() { 1 << $bit } else { 0 })*)
            }
        }

        impl fmt::Display for AttrMask {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut separator = "";
                $(if self.0 & (1 << $bit) != 0 {
                    write!(f, "{separator}{}", stringify!($field))?;
                    separator = ", ";
                })*
                f.write_str(if separator.is_empty() { "none" } else { "" })
            }
        }
    };
}

attributes! {
    0 PKEY_INDEX pkey_index;
    1 PORT port;
    2 ACCESS access;
    3 QKEY qkey;
    4 PEER peer;
    5 PATH_MTU path_mtu;
    6 DEST_QPN dest_qpn;
    7 RQ_PSN rq_psn;
    8 MAX_DEST_RD_ATOMIC max_dest_rd_atomic;
    9 MIN_RNR_TIMER min_rnr_timer;
    10 TIMEOUT timeout;
    11 RETRY_CNT retry_cnt;
    12 RNR_RETRY rnr_retry;
    13 SQ_PSN sq_psn;
    14 MAX_RD_ATOMIC max_rd_atomic;
}

impl AttrMask {
    /// No attribute.
    pub const NONE: Self = Self(0);

    const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether no attribute is in the set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Debug for AttrMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AttrMask({self})")
    }
}

struct Row {
    kind: QpKind,
    from: QpState,
    to: QpState,
    required: AttrMask,
    optional: AttrMask,
}

macro_rules! mask {
    ($($name:ident)*) => { AttrMask::NONE$(.and(AttrMask::$name))* };
}

macro_rules! rows {
    ($($kind:ident $from:ident -> $to:ident [$($required:ident)*] [$($optional:ident)*];)*) => {
        &[$(Row {
            kind: QpKind::$kind,
            from: QpState::$from,
            to: QpState::$to,
            required: mask!($($required)*),
            optional: mask!($($optional)*),
        },)*]
    };
}

/// Every transition besides those to RESET and ERR, which are open from any state and take nothing.
const ROWS: &[Row] = rows! {
    Rc Reset -> Init [PKEY_INDEX PORT ACCESS] [];
    Rc Init -> Init [] [PKEY_INDEX PORT ACCESS];
    Rc Init -> Rtr [PEER PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER]
        [PKEY_INDEX ACCESS];
    Rc Rtr -> Rts [TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_RD_ATOMIC] [ACCESS MIN_RNR_TIMER];
    Rc Rts -> Rts [] [ACCESS MIN_RNR_TIMER];
    Ud Reset -> Init [PKEY_INDEX PORT QKEY] [];
    Ud Init -> Init [] [PKEY_INDEX PORT QKEY];
    Ud Init -> Rtr [] [PKEY_INDEX QKEY];
    Ud Rtr -> Rts [SQ_PSN] [QKEY];
    Ud Rts -> Rts [] [QKEY];
};

/// Checks a transition and its attributes; values are checked against `limits`.
///
/// # Errors
/// The transition does not exist, attributes are missing or do not belong, or a value is out of range.
pub fn check_modify(
    kind: QpKind,
    from: QpState,
    to: QpState,
    attr: &QpAttr,
    limits: &AttrLimits,
) -> Result<(), ModifyError> {
    let given = AttrMask::of(attr);
    let (required, optional) = match to {
        QpState::Sqd | QpState::Sqe => return Err(ModifyError::Unsupported { state: to }),
        QpState::Reset | QpState::Err => (AttrMask::NONE, AttrMask::NONE),
        _ => ROWS
            .iter()
            .find(|row| row.kind == kind && row.from == from && row.to == to)
            .map(|row| (row.required, row.optional))
            .ok_or(ModifyError::Transition { from, to })?,
    };
    let missing = required.without(given);
    let extra = given.without(required.and(optional));
    if !missing.is_empty() || !extra.is_empty() {
        return Err(ModifyError::Attributes { from, to, missing, extra });
    }
    check_values(attr, limits)
}

/// What the values of attributes may be.
#[derive(Clone, Copy, Debug)]
pub struct AttrLimits {
    /// Largest path MTU of the port.
    pub mtu: Mtu,
    /// READs and atomics outstanding at most.
    pub rd_atomic: u8,
    /// READs and atomics of a peer that can be answered again.
    pub dest_rd_atomic: u8,
    /// The NIC's address.
    pub local: IpAddr,
}

fn check_values(attr: &QpAttr, limits: &AttrLimits) -> Result<(), ModifyError> {
    let bound = |name, value: Option<u8>, max: u8| match value {
        Some(value) if value > max => {
            Err(ModifyError::Value { name, value: u32::from(value), max: u32::from(max) })
        }
        _ => Ok(()),
    };
    bound("timeout", attr.timeout, 31)?;
    bound("retry_cnt", attr.retry_cnt, 7)?;
    bound("rnr_retry", attr.rnr_retry, 7)?;
    bound("max_rd_atomic", attr.max_rd_atomic, limits.rd_atomic)?;
    bound("max_dest_rd_atomic", attr.max_dest_rd_atomic, limits.dest_rd_atomic)?;
    bound("port", attr.port, 1)?;
    if attr.pkey_index.is_some_and(|index| index != 0) {
        let value = attr.pkey_index.map_or(0, u32::from);
        return Err(ModifyError::Value { name: "pkey_index", value, max: 0 });
    }
    if let Some(mtu) = attr.path_mtu.filter(|mtu| *mtu > limits.mtu) {
        let (value, max) = (mtu.bytes(), limits.mtu.bytes());
        return Err(ModifyError::Value { name: "path_mtu", value, max });
    }
    match attr.peer {
        Some(peer) if peer.is_ipv4() != limits.local.is_ipv4() => {
            Err(ModifyError::Family { local: limits.local, peer })
        }
        _ => Ok(()),
    }
}

/// Why a queue pair was not modified. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ModifyError {
    /// No such queue pair.
    Unknown,
    /// The state does not follow.
    Transition { from: QpState, to: QpState },
    /// The state is not served.
    Unsupported { state: QpState },
    /// Attributes that are needed are missing, or such as do not belong here were given.
    Attributes { from: QpState, to: QpState, missing: AttrMask, extra: AttrMask },
    /// A value is out of its range.
    Value { name: &'static str, value: u32, max: u32 },
    /// The peer's address is of another family than this NIC's.
    Family { local: IpAddr, peer: IpAddr },
}

impl fmt::Display for ModifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no such queue pair"),
            Self::Transition { from, to } => {
                write!(f, "a queue pair does not go from {from} to {to}")
            }
            Self::Unsupported { state } => write!(f, "state {state} is not supported"),
            Self::Attributes { from, to, missing, extra } => {
                write!(f, "from {from} to {to}: missing {missing}; not taken here: {extra}")
            }
            Self::Value { name, value, max } => write!(f, "{name} {value}: {max} is the most"),
            Self::Family { local, peer } => {
                write!(f, "peer {peer} and this NIC's address {local} are of two families")
            }
        }
    }
}

impl core::error::Error for ModifyError {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    const LIMITS: AttrLimits = AttrLimits {
        mtu: Mtu::MAX,
        rd_atomic: 16,
        dest_rd_atomic: 16,
        local: IpAddr::V4(core::net::Ipv4Addr::LOCALHOST),
    };

    fn attr(mask: AttrMask) -> QpAttr {
        let has = |bit: AttrMask| mask.0 & bit.0 != 0;
        QpAttr {
            pkey_index: has(AttrMask::PKEY_INDEX).then_some(0),
            port: has(AttrMask::PORT).then_some(1),
            access: has(AttrMask::ACCESS).then_some(Access::ALL),
            qkey: has(AttrMask::QKEY).then_some(1),
            peer: has(AttrMask::PEER).then_some(LIMITS.local),
            path_mtu: has(AttrMask::PATH_MTU).then_some(Mtu::MIN),
            dest_qpn: has(AttrMask::DEST_QPN).then_some(Qpn::new(1)),
            rq_psn: has(AttrMask::RQ_PSN).then_some(Psn::new(1)),
            max_dest_rd_atomic: has(AttrMask::MAX_DEST_RD_ATOMIC).then_some(1),
            min_rnr_timer: has(AttrMask::MIN_RNR_TIMER).then_some(RnrTimer::new(1)),
            timeout: has(AttrMask::TIMEOUT).then_some(14),
            retry_cnt: has(AttrMask::RETRY_CNT).then_some(7),
            rnr_retry: has(AttrMask::RNR_RETRY).then_some(7),
            sq_psn: has(AttrMask::SQ_PSN).then_some(Psn::new(1)),
            max_rd_atomic: has(AttrMask::MAX_RD_ATOMIC).then_some(1),
        }
    }

    #[test]
    fn every_missing_and_every_extra_attribute_is_named() {
        for row in ROWS {
            let run = |mask| check_modify(row.kind, row.from, row.to, &attr(mask), &LIMITS);
            assert_eq!(run(row.required), Ok(()));
            assert_eq!(run(row.required.and(row.optional)), Ok(()));
            for bit in 0..15 {
                let bit = AttrMask(1 << bit);
                let expected = |missing, extra| {
                    Err(ModifyError::Attributes { from: row.from, to: row.to, missing, extra })
                };
                if row.required.0 & bit.0 != 0 {
                    assert_eq!(run(row.required.without(bit)), expected(bit, AttrMask::NONE));
                } else if row.optional.0 & bit.0 == 0 {
                    assert_eq!(run(row.required.and(bit)), expected(AttrMask::NONE, bit));
                }
            }
        }
    }

    #[test]
    fn an_error_reads_as_a_sentence() {
        let mut given = attr(mask!(PEER PATH_MTU DEST_QPN RQ_PSN TIMEOUT));
        let error =
            check_modify(QpKind::Rc, QpState::Init, QpState::Rtr, &given, &LIMITS).unwrap_err();
        assert_eq!(
            error.to_string(),
            "from INIT to RTR: missing max_dest_rd_atomic, min_rnr_timer; not taken here: timeout"
        );
        given = QpAttr { retry_cnt: Some(8), ..attr(ROWS[3].required) };
        let error =
            check_modify(QpKind::Rc, QpState::Rtr, QpState::Rts, &given, &LIMITS).unwrap_err();
        assert_eq!(error.to_string(), "retry_cnt 8: 7 is the most");
    }

    #[test]
    fn states_out_of_order_and_states_not_served_are_refused() {
        let none = QpAttr::default();
        let run = |from, to| check_modify(QpKind::Rc, from, to, &none, &LIMITS);
        let (reset, rts) = (QpState::Reset, QpState::Rts);
        assert_eq!(run(reset, rts), Err(ModifyError::Transition { from: reset, to: rts }));
        assert_eq!(run(rts, QpState::Sqd), Err(ModifyError::Unsupported { state: QpState::Sqd }));
        for from in [reset, QpState::Init, QpState::Rtr, rts, QpState::Err] {
            assert_eq!(run(from, QpState::Err), Ok(()));
            assert_eq!(run(from, reset), Ok(()));
        }
    }
}
