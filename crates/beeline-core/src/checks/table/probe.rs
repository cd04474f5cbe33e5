//! Rows of the table: checks of transfers that a probe ran.

use super::super::{Check, transfers};
use crate::reason::Code;

pub(super) const ROWS: &[Check] = &[
    Check {
        code: "probe-transfer",
        title: "a transfer over the path hung, failed or brought other bytes",
        needs: "beeline doctor --probe, on the machine itself",
        decides: "real copies in a process that can be killed: every ordered pair of GPUs moved by either side, host and GPU both ways, file to GPU; read on the owner's side and compared; a deadline for each",
        remedy: "keep traffic off the path; look for address translation and redirecting ports",
        source: "nccl#631, cuda-samples p2pBandwidthLatencyTest",
        reason: Some(Code::ProbeTransfer),
        after: &["p2p-iommu-fault", "p2p-iommu-translated", "p2p-acs-redirect"],
        run: transfers::probe_transfer,
    },
    Check {
        code: "probe-rdma",
        title: "bytes through an RDMA NIC and back",
        needs: "beeline doctor --probe on a machine with an RDMA NIC",
        decides: "nothing yet: the probe drives no RDMA hardware, and a software NIC proves none",
        remedy: "",
        source: "",
        reason: None,
        after: &[],
        run: transfers::probe_rdma,
    },
];
