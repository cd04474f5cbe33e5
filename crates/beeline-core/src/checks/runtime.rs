//! What a failure of this process means: doctor's checks, with the failure itself as evidence.
//!
//! There is no second table for run time. A failure becomes the event that a log of it would have been
//! read as, and the checks decide on the machine's facts as ever. So the code of an error is the code
//! that doctor gives.

use alloc::string::ToString;
use alloc::vec::Vec;

use super::{Finding, Status, run};
use crate::facts::{Event, Kind, Machine, Origin, Source};

/// What happened in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Happened {
    /// A NIC's driver refused to register memory.
    RegisterFailed {
        /// The verb that was called.
        verb: Verb,
        /// Its error number.
        errno: i32,
        /// Where the memory is.
        address: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// gdrdrv refused to pin device memory.
    PinFailed {
        /// Its error number.
        errno: i32,
        /// The length in bytes that it was asked for.
        len: u64,
    },
    /// A stream memory operation was refused as not supported.
    StreamOpsRefused,
    /// A transfer "with GPU memory" passed, and the memory was managed.
    ManagedPassed,
    /// A transport that running kernels drive did not start.
    GpuInitiatedFailed {
        /// Its name, as `IBGDA`.
        transport: &'static str,
    },
}

/// How memory was to be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// By its address: host memory, or device memory through a peer memory client.
    Address,
    /// By a dma-buf.
    DmaBuf,
}

impl Verb {
    /// The function of libibverbs.
    pub const fn call(self) -> &'static str {
        match self {
            Self::Address => "ibv_reg_mr",
            Self::DmaBuf => "ibv_reg_dmabuf_mr",
        }
    }
}

impl Happened {
    /// The checks that can explain it, most particular first.
    const fn checks(&self) -> &'static [&'static str] {
        match self {
            Self::RegisterFailed { verb: Verb::DmaBuf, .. } => &[
                "gdr-sku-unsupported",
                "dmabuf-kernel-too-old",
                "dmabuf-unsupported",
                "bar1-small",
                "memlock-low",
            ],
            Self::RegisterFailed { verb: Verb::Address, .. } => &[
                "api-misuse",
                "gdr-sku-unsupported",
                "peermem-no-api",
                "peermem-abi-mismatch",
                "peermem-not-registered",
                "bar1-small",
                "memlock-low",
            ],
            Self::PinFailed { .. } => {
                &["gdr-sku-unsupported", "gdrdrv-pin-unaligned", "gdrdrv-no-major"]
            }
            Self::StreamOpsRefused => &["stream-memops-off"],
            Self::ManagedPassed => &["gdr-test-invalid"],
            Self::GpuInitiatedFailed { .. } => &["ibgda-unavailable", "infiniband-nodes-missing"],
        }
    }

    fn tell(&self, machine: &mut Machine, at: Origin) {
        match *self {
            Self::RegisterFailed { verb, errno, address, len } => {
                let call = verb.call().to_string();
                machine.event(Event::VerbsFailed { call, errno, address, length: len }, at);
            }
            Self::PinFailed { errno, len } => {
                machine.event(Event::GdrPinFailed { code: errno, size: len }, at);
                // The unit that the driver pins in; it says the same in its own words.
                if len % GPU_PAGE != 0 {
                    machine.event(Event::PinUnaligned { length: len, address_offset: 0 }, at);
                }
            }
            Self::StreamOpsRefused => machine.event(Event::StreamOpsRefused, at),
            Self::ManagedPassed => {
                let call = "cuMemAllocManaged".to_string();
                machine.event(Event::TestAllocation { call }, at);
                machine.event(Event::TestPassed, at);
            }
            Self::GpuInitiatedFailed { transport } => {
                let transport = transport.to_string();
                machine.event(Event::NvshmemTransportFailed { transport }, at);
            }
        }
    }
}

const GPU_PAGE: u64 = 64 << 10;

/// What explains a failure on this machine, most particular first; empty where nothing known does.
///
/// `machine` is what is known of it, on which [`Machine::unify`] was called.
pub fn explain(machine: &Machine, happened: &Happened) -> Vec<Finding> {
    let mut machine = machine.clone();
    let source = u16::try_from(machine.sources.len()).unwrap_or(u16::MAX);
    machine.sources.push(Source {
        kind: Kind::AppLog,
        name: "this process".to_string(),
        lines: 0,
        truncated: false,
    });
    happened.tell(&mut machine, Origin { source, line: 0 });
    let report = run(&machine);
    let open = |finding: &Finding| matches!(finding.status, Status::Fail | Status::Unknown);
    let of = |check: &&'static str| {
        report.findings.iter().find(|finding| finding.check == *check && open(finding)).cloned()
    };
    let mut found: Vec<Finding> = happened.checks().iter().filter_map(of).collect();
    // What is certain before what is possible; otherwise in the order of the list.
    found.sort_by_key(|finding| finding.status != Status::Fail);
    found
}
