//! An error of this library has the code, the reason and the remedies that doctor gives for the same failure.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

#[path = "../../beeline-core/tests/doctor_common/mod.rs"]
mod doctor_common;

use beeline::core::checks::run;
use beeline::gpu::Gpu;
use beeline::probe::explained;
use doctor_common::cases;
use doctor_common::from_inputs;
use doctor_common::run_time::{AT_RUN_TIME, happens_on};

/// Some error of the library's, as a failed call makes it.
fn failed() -> beeline::Error {
    Gpu::open(&"cuda:99".parse().unwrap()).unwrap_err()
}

#[test]
fn an_error_of_every_case_has_the_code_that_doctor_gives() {
    let before = failed().code();
    for (id, inputs, happened, code) in AT_RUN_TIME {
        let Some(machine) = from_inputs(inputs) else { continue };
        let error = explained(failed(), &happens_on(&machine, happened, code), &machine);
        assert_eq!(error.code(), *code, "{id}: {error:#}");
        assert_ne!(error.code(), before);
        assert!(error.hint().is_some(), "{id}: what to do");
        assert_eq!(error.to_string().lines().next(), failed().to_string().lines().next(), "{id}");
        // Doctor, from the log of the failing program.
        let case = cases::all().find(|case| case.id == *id).unwrap();
        let Some(read) = from_inputs(case.inputs) else { continue };
        let report = run(&read);
        let doctor = report.failures().find(|finding| finding.check == *code);
        let doctor = doctor.unwrap_or_else(|| panic!("{id}: doctor finds no {code}"));
        if let Some(reason) = doctor.reason {
            assert!(error.reasons().iter().any(|told| told.code == reason), "{id}");
        }
    }
}

#[test]
fn a_failure_that_nothing_explains_stays_as_it_is() {
    use beeline::core::checks::{Happened, Verb};

    let machine = from_inputs(&[]).unwrap();
    let happened = Happened::RegisterFailed { verb: Verb::Address, errno: 1, address: 0, len: 1 };
    let error = explained(failed(), &happened, &machine);
    assert_eq!((error.code(), error.to_string()), (failed().code(), failed().to_string()));
    assert!(error.reasons().is_empty());
}
