//! Checks: what works on a machine, what does not, why, and what to do about it.
//!
//! Each check is one row of [`TABLE`]: a code, what it needs, how it decides, a remedy and the source of
//! the rule. It looks at facts only, so it decides the same from files as from the live machine. A check
//! that lacks evidence says so; it never guesses. The documentation page is generated from the table.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::Serialize;

use crate::facts::{Kind, Machine};
use crate::reason::Code;

mod asynchronous;
mod collective;
mod context;
mod paths;
mod peer;
mod platform;
mod rdma_net;
mod rdma_port;
mod rdma_reg;
mod rdma_use;
mod runtime;
mod storage;
mod storage_config;
mod storage_place;
mod table;
mod transfers;

pub(crate) use context::lacks_rdma;
pub use context::{Context, Iommu};
pub use paths::{Level, PathVerdict};
pub use runtime::{Happened, Verb, explain};
pub use table::TABLE;
pub use transfers::{Outcome, Place, Transfer};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Nothing is wrong; findings of severity info are remarks.
    Pass,
    /// Something is wrong.
    Fail,
    /// Not decided because something needed was not given; see [`Finding::missing`].
    Skip,
    /// Something is wrong or may be, and the cause is not decided; see [`Finding::candidates`].
    Unknown,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Worth knowing.
    Info,
    /// Slow or risky.
    Warning,
    /// A path is unusable.
    Error,
    /// Data is lost or wrong.
    Critical,
}

/// One result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Code of the check.
    pub check: &'static str,
    /// Title of the check.
    pub title: &'static str,
    /// How it ended.
    pub status: Status,
    /// How bad it is.
    pub severity: Severity,
    /// Devices, pairs, nodes or files it is about.
    pub subjects: Vec<String>,
    /// What was found, with values.
    pub message: String,
    /// Where the evidence stands.
    pub evidence: Vec<String>,
    /// Possible causes, most likely first, where the cause is not decided.
    pub candidates: Vec<String>,
    /// What would decide it.
    pub missing: Vec<String>,
    /// What to do, in order.
    pub remedies: Vec<String>,
    /// Where the usual remedy does harm.
    pub cautions: Vec<String>,
    /// The check whose failure explains this one; empty for a first failure.
    pub consequence_of: Option<&'static str>,
    /// The code that a plan gives for the same cause.
    #[serde(serialize_with = "code_text")]
    pub reason: Option<Code>,
}

fn code_text<S: serde::Serializer>(code: &Option<Code>, serializer: S) -> Result<S::Ok, S::Error> {
    match code {
        Some(code) => serializer.serialize_some(code.as_str()),
        None => serializer.serialize_none(),
    }
}

impl Finding {
    fn new(status: Status, severity: Severity, message: impl Into<String>) -> Self {
        Self {
            check: "",
            title: "",
            status,
            severity,
            subjects: Vec::new(),
            message: message.into(),
            evidence: Vec::new(),
            candidates: Vec::new(),
            missing: Vec::new(),
            remedies: Vec::new(),
            cautions: Vec::new(),
            consequence_of: None,
            reason: None,
        }
    }

    fn error(message: impl Into<String>) -> Self {
        Self::new(Status::Fail, Severity::Error, message)
    }

    fn warning(message: impl Into<String>) -> Self {
        Self::new(Status::Fail, Severity::Warning, message)
    }

    fn info(message: impl Into<String>) -> Self {
        Self::new(Status::Pass, Severity::Info, message)
    }

    fn unknown(severity: Severity, message: impl Into<String>) -> Self {
        Self::new(Status::Unknown, severity, message)
    }

    fn on(mut self, subjects: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.subjects.extend(subjects.into_iter().map(Into::into));
        self
    }

    fn seen(mut self, evidence: impl IntoIterator<Item = String>) -> Self {
        for text in evidence {
            if self.evidence.len() < 16 && !self.evidence.contains(&text) {
                self.evidence.push(text);
            }
        }
        self
    }

    fn maybe(mut self, candidates: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.candidates.extend(candidates.into_iter().map(Into::into));
        self
    }

    fn ask(mut self, missing: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.missing.extend(missing.into_iter().map(Into::into));
        self
    }

    fn fix(mut self, remedies: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.remedies.extend(remedies.into_iter().map(Into::into));
        self
    }

    fn caution(mut self, cautions: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.cautions.extend(cautions.into_iter().map(Into::into));
        self
    }
}

/// What a check's function answers.
pub enum Verdict {
    /// One or more results.
    Found(Vec<Finding>),
    /// Looked at, nothing wrong.
    Pass(String),
    /// Needed and not given.
    Skip(Vec<String>),
}

impl Verdict {
    fn pass(message: &str) -> Self {
        Self::Pass(message.to_string())
    }

    fn skip(missing: &[&str]) -> Self {
        Self::Skip(missing.iter().map(ToString::to_string).collect())
    }

    /// Nothing was found in the log of the failing program, if there is one.
    fn of_quiet_log(context: &Context<'_>, message: &str) -> Self {
        match context.machine.has(&[Kind::NcclLog, Kind::AppLog]) {
            true => Self::pass(message),
            false => Self::skip(&["log of the failing program"]),
        }
    }

    /// The findings, or `otherwise` where there is none.
    fn or(findings: Vec<Finding>, otherwise: impl FnOnce() -> Self) -> Self {
        if findings.is_empty() { otherwise() } else { Self::Found(findings) }
    }
}

impl From<Finding> for Verdict {
    fn from(finding: Finding) -> Self {
        Self::Found(alloc::vec![finding])
    }
}

/// One row of the table.
#[derive(Clone, Copy)]
pub struct Check {
    /// Stable code.
    pub code: &'static str,
    /// What is wrong when it fails.
    pub title: &'static str,
    /// Inputs that let it decide.
    pub needs: &'static str,
    /// The rule.
    pub decides: &'static str,
    /// The remedy in general words; findings name devices and values.
    pub remedy: &'static str,
    /// Where the rule comes from.
    pub source: &'static str,
    /// The code that a plan gives for the same cause.
    pub reason: Option<Code>,
    /// Checks whose failure explains a failure of this one.
    pub after: &'static [&'static str],
    /// The rule as code.
    pub run: fn(&Context<'_>) -> Verdict,
}

/// All results for one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Results, first failures before their consequences, worse before better.
    pub findings: Vec<Finding>,
    /// What is known of every path between GPUs, and from GPUs to NICs.
    pub paths: Vec<PathVerdict>,
    /// Transfers that a probe ran; empty without one.
    pub transfers: Vec<Transfer>,
}

impl Report {
    /// Results that are failures.
    pub fn failures(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.status == Status::Fail)
    }

    /// Results of one check.
    pub fn of(&self, check: &str) -> Vec<&Finding> {
        self.findings.iter().filter(|finding| finding.check == check).collect()
    }
}

/// Runs every check on `machine`, on which [`Machine::unify`] was called.
pub fn run(machine: &Machine) -> Report {
    run_with(machine, &[])
}

/// [`run`] with what a probe of the same machine measured, which alone makes a path *verified*.
pub fn run_with(machine: &Machine, transfers: &[Transfer]) -> Report {
    let context = Context::with_transfers(machine, transfers);
    let mut findings = Vec::new();
    for check in TABLE {
        let results = match (check.run)(&context) {
            Verdict::Found(results) => results,
            Verdict::Pass(message) => {
                alloc::vec![Finding::new(Status::Pass, Severity::Info, message)]
            }
            Verdict::Skip(missing) => {
                let message = alloc::format!("needs {}", missing.join(", "));
                alloc::vec![Finding::new(Status::Skip, Severity::Info, message).ask(missing)]
            }
        };
        findings.extend(results.into_iter().map(|mut finding| {
            finding.check = check.code;
            finding.title = check.title;
            finding.reason = check.reason;
            finding
        }));
    }
    link_consequences(&mut findings);
    findings.sort_by_key(|finding| {
        let rank = match finding.status {
            Status::Fail => 0,
            Status::Unknown => 1,
            Status::Pass => 2,
            Status::Skip => 3,
        };
        (rank, finding.consequence_of.is_some(), core::cmp::Reverse(finding.severity))
    });
    Report { findings, paths: paths::verdicts(&context), transfers: transfers.to_vec() }
}

/// Marks failures that another failure explains.
fn link_consequences(findings: &mut [Finding]) {
    let failed: Vec<&'static str> = findings
        .iter()
        .filter(|f| matches!(f.status, Status::Fail | Status::Unknown))
        .map(|f| f.check)
        .collect();
    // Plain passes and skips have no evidence and no cause.
    for finding in findings.iter_mut().filter(|finding| !finding.evidence.is_empty()) {
        let check = TABLE.iter().find(|check| check.code == finding.check);
        let cause = check.and_then(|check| check.after.iter().find(|code| failed.contains(code)));
        finding.consequence_of = cause.copied();
    }
}
