//! A failure of this process gets the code that doctor gives for the same failure in a log.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod doctor_common;

use beeline_core::checks::{Happened, Verb, explain, run};
use doctor_common::cases::CASES;
use doctor_common::from_inputs;

/// A case, the facts of its machine without the log of the failing program, what happens in this process
/// instead, and the code.
const AT_RUN_TIME: &[(&str, &[&str], Happened, &str)] = &[
    (
        "H-RDMA-REG-01",
        &["dmesg-peermem-no-symbol.txt"],
        Happened::RegisterFailed { verb: Verb::Address, errno: 14, address: 0, len: 4096 },
        "peermem-no-api",
    ),
    (
        "H-RDMA-REG-02",
        &["handed:dmesg/peermem-disagrees-version.log"],
        Happened::RegisterFailed { verb: Verb::Address, errno: 14, address: 0, len: 4096 },
        "peermem-abi-mismatch",
    ),
    (
        "H-RDMA-REG-05",
        &[],
        Happened::RegisterFailed { verb: Verb::DmaBuf, errno: 95, address: 0, len: 4096 },
        "dmabuf-unsupported",
    ),
    (
        "H-RDMA-REG-06",
        &["uname-5.10.txt"],
        Happened::RegisterFailed { verb: Verb::DmaBuf, errno: 93, address: 0, len: 4096 },
        "dmabuf-kernel-too-old",
    ),
    (
        "H-RDMA-REG-07",
        &["smi-q-geforce-3090.txt"],
        Happened::RegisterFailed { verb: Verb::Address, errno: 14, address: 0, len: 4096 },
        "gdr-sku-unsupported",
    ),
    (
        "H-RDMA-REG-08",
        &["smi-q-t4.txt"],
        Happened::RegisterFailed { verb: Verb::Address, errno: 12, address: 0, len: 300 << 20 },
        "bar1-small",
    ),
    (
        "H-RDMA-REG-10",
        &["maps-gdrdrv.txt"],
        // The address is put in below.
        Happened::RegisterFailed { verb: Verb::Address, errno: 14, address: 0, len: 4096 },
        "api-misuse",
    ),
    ("H-RDMA-REG-11", &[], Happened::ManagedPassed, "gdr-test-invalid"),
    (
        "H-ASYNC-01",
        &["params-memops-off.txt", "smi-q-p100-390.txt"],
        Happened::StreamOpsRefused,
        "stream-memops-off",
    ),
    (
        "H-ASYNC-02",
        &["params-memops-off.txt", "lsmod-peermem.txt", "dev:nvidia0,nvidiactl,nvidia-uvm"],
        Happened::GpuInitiatedFailed { transport: "IBGDA" },
        "ibgda-unavailable",
    ),
    (
        "H-ASYNC-03",
        &["lsmod-gdrdrv.txt", "devices-no-gdrdrv.txt"],
        Happened::PinFailed { errno: 22, len: 1 << 16 },
        "gdrdrv-no-major",
    ),
    ("H-ASYNC-04", &[], Happened::PinFailed { errno: 22, len: 0x10008 }, "gdrdrv-pin-unaligned"),
    (
        "H-ASYNC-05",
        &["smi-q-geforce-2070.txt"],
        Happened::PinFailed { errno: 22, len: 1 << 16 },
        "gdr-sku-unsupported",
    ),
];

/// Cases of other programs' logs or of several nodes, which have no failure of this process.
const OF_LOGS: &[(&str, &str)] = &[
    ("H-RDMA-REG-03", "compares the logs of two nodes"),
    ("H-RDMA-REG-04", "nothing fails: another library takes a slower way"),
    ("H-RDMA-REG-09", "a harmless line of the kernel's log"),
    ("H-RDMA-REG-12", "which of two lines of a log counts"),
    ("H-RDMA-REG-13", "nothing fails: a setting makes it slower"),
];

#[test]
fn run_time_and_doctor_agree() {
    for (id, inputs, happened, code) in AT_RUN_TIME {
        let case = CASES.iter().find(|case| case.id == *id).unwrap();
        assert!(case.want.iter().any(|want| want.check == *code), "{id}: doctor says {code}");
        let Some(machine) = from_inputs(inputs) else { continue };
        let mut happened = happened.clone();
        if let Happened::RegisterFailed { address, .. } = &mut happened
            && code == &"api-misuse"
        {
            // Inside the mapping that the record shows.
            *address = machine.platform.mappings[0].value.start;
        }
        let found = explain(&machine, &happened);
        let first = found.first().unwrap_or_else(|| panic!("{id}: nothing explains {happened:?}"));
        assert_eq!(first.check, *code, "{id}: {}", first.message);
        assert!(!first.remedies.is_empty() || !first.candidates.is_empty(), "{id}: what to do");
        // The log of the failing program, read by doctor, has the same answer.
        let Some(read) = from_inputs(case.inputs) else { continue };
        let report = run(&read);
        let doctor = report.failures().find(|finding| finding.check == *code);
        assert_eq!(doctor.map(|f| f.reason), Some(first.reason), "{id}");
    }
}

#[test]
fn every_case_of_registration_and_async_is_here() {
    for case in CASES.iter().filter(|case| ["RDMA-REG", "ASYNC"].contains(&case.kind())) {
        let there = AT_RUN_TIME.iter().any(|(id, ..)| *id == case.id);
        let elsewhere = OF_LOGS.iter().any(|(id, _)| *id == case.id);
        assert!(there != elsewhere, "{}", case.id);
    }
}

#[test]
fn a_failure_that_nothing_explains_is_not_explained() {
    let machine = from_inputs(&[]).unwrap();
    let happened = Happened::RegisterFailed { verb: Verb::Address, errno: 1, address: 0, len: 1 };
    let found = explain(&machine, &happened);
    assert!(found.is_empty(), "{:?}", found.iter().map(|f| f.check).collect::<Vec<_>>());
}
