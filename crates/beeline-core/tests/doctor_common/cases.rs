//! Every handed case that can be decided from facts, as inputs in the tools' formats and the right answer.
//!
//! `handed:` names a file of the handed cases; `dev:` lists device nodes; all others are fixtures.

use beeline_core::checks::{Severity, Status};

/// One expected finding. Every text must occur in it: in its message, subjects, remedies, cautions,
/// candidates or what it asks for.
pub struct Want {
    pub check: &'static str,
    pub status: Status,
    pub severity: Severity,
    pub texts: &'static [&'static str],
}

/// One case.
pub struct Case {
    pub id: &'static str,
    pub inputs: &'static [&'static str],
    pub want: &'static [Want],
}

impl Case {
    /// `H-RDMA-REG-01` belongs to `RDMA-REG`.
    pub fn kind(&self) -> &'static str {
        let id = self.id.strip_prefix("H-").unwrap_or(self.id);
        id.rsplit_once('-').map_or(id, |(kind, _)| kind)
    }
}

/// Cases that no file can decide, with the reason. They are properties of code, tested where that lives.
pub const NOT_DECIDABLE: &[(&str, &str)] = &[
    (
        "H-P2P-07",
        "a rule for all answers: files never give \"verified\"; held by a test of its own",
    ),
    ("H-RDMA-NET-06", "property: a message of length zero takes one packet number"),
    ("H-RDMA-NET-07", "property: request numbers of 64 bits"),
    ("H-RDMA-NET-10", "property: receiver-not-ready retry counts"),
    ("H-RDMA-NET-11", "property: receive limits are ignored with a shared receive queue"),
    ("H-RDMA-NET-13", "property: inline sends from device memory are refused"),
    ("H-RDMA-NET-15", "property: memory regions outlive their work requests"),
    ("H-COLL-08", "property: ungrouped symmetric sends end with a message"),
];

macro_rules! want {
    ($check:literal, $status:ident, $severity:ident $(, $text:literal)* $(,)?) => {
        Want {
            check: $check,
            status: Status::$status,
            severity: Severity::$severity,
            texts: &[$($text),*],
        }
    };
}

mod p2p;
mod rdma;
mod storage;

/// All of them.
pub fn all() -> impl Iterator<Item = &'static Case> {
    p2p::CASES.iter().chain(rdma::CASES).chain(storage::CASES)
}
