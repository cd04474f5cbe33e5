//! A failure of this process gets the code that doctor gives for the same failure in a log.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod doctor_common;

use beeline_core::checks::{Happened, Verb, explain, run};
use doctor_common::cases;
use doctor_common::from_inputs;
use doctor_common::run_time::{AT_RUN_TIME, happens_on};

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
        let case = cases::all().find(|case| case.id == *id).unwrap();
        assert!(case.want.iter().any(|want| want.check == *code), "{id}: doctor says {code}");
        let Some(machine) = from_inputs(inputs) else { continue };
        let happened = happens_on(&machine, happened, code);
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
    for case in cases::all().filter(|case| ["RDMA-REG", "ASYNC"].contains(&case.kind())) {
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
