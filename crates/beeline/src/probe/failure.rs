//! What a failure of this process means on this machine: the code, the reason and the remedies that doctor gives.

use beeline_core::checks::{self, Happened};
use beeline_core::facts::Machine;
use beeline_core::reason::Reason;

use super::{Options, gather};
use crate::error::Error;

/// `error` with what doctor's checks make of the failure on `machine`, which [`gather`] answers: the first
/// finding's code, the reasons of all, and what to do. Unchanged where nothing known explains it.
///
/// The checks are those of `beeline doctor`, so a failure has one code, whoever tells it.
#[must_use]
pub fn explained(error: Error, happened: &Happened, machine: &Machine) -> Error {
    let findings = checks::explain(machine, happened);
    let Some(first) = findings.first() else { return error };
    let reasons = findings
        .iter()
        .filter_map(|finding| Some(Reason::with(finding.reason?, finding.message.clone())))
        .collect();
    let causes = if first.remedies.is_empty() { &first.candidates } else { &first.remedies };
    let advice = causes.join("; ");
    let told = error.coded(first.check).with_reasons(reasons);
    if advice.is_empty() { told } else { told.remedy(advice) }
}

/// [`explained`] on the running machine, as far as its files tell. Takes milliseconds.
#[cold]
pub(crate) fn explained_here(error: Error, happened: &Happened) -> Error {
    let options = Options { driver: false, ..Options::default() };
    explained(error, happened, &gather(&options))
}
