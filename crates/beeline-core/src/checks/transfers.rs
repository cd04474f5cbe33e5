//! What a probe measured: transfers that ran and were compared, and those that hung, lied or failed.
//!
//! Measurements are no facts of a machine: they are never saved with its record, so a file never makes
//! a path *verified*. They are handed to [`super::Context::with_transfers`] by whoever ran them.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use super::context::Context;
use super::{Finding, Severity, Verdict};
use crate::facts::{Bdf, Known};

/// One end of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// `host`, `file`, or a device as the library names it: `cuda:0`, `sim:1`.
    pub name: String,
    /// PCI address of a device that has one.
    pub bdf: Option<Bdf>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bdf {
            Some(bdf) => write!(f, "{} ({bdf})", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Every byte arrived, read on the owner's side.
    Verified,
    /// It reported success and brought other bytes.
    Differs,
    /// It did not end by its deadline; the process that ran it was killed.
    Hung,
    /// It ended with an error.
    Failed,
    /// It could not be tried.
    NotRun,
    /// The driver offers no such path, and says so.
    Absent,
}

impl Outcome {
    /// The word for it, for output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::Differs => "differs",
            Self::Hung => "hung",
            Self::Failed => "failed",
            Self::NotRun => "not-run",
            Self::Absent => "absent",
        }
    }

    /// Whether the path is shown to be unfit.
    pub const fn is_bad(self) -> bool {
        matches!(self, Self::Differs | Self::Hung | Self::Failed)
    }
}

/// One transfer of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// Where the bytes were.
    pub from: Place,
    /// Where they were put, and read back by its owner.
    pub to: Place,
    /// The device whose engine moved them.
    pub by: Place,
    /// How it ended.
    pub outcome: Outcome,
    /// Bytes of one copy.
    pub bytes: u64,
    /// Bandwidth in MB/s (10^6 bytes a second), where it was measured.
    pub mb_per_s: Option<u64>,
    /// Nothing was staged in host memory on the way, by the driver's word.
    pub direct: bool,
    /// A device of it is simulated: the bytes are real, the speed is not that of a GPU.
    pub simulated: bool,
    /// What else is to say: the error, the route, why it was not run.
    pub note: String,
}

impl Transfer {
    /// `cuda:0 -> cuda:1 by cuda:0`.
    pub fn label(&self) -> String {
        let simulated = if self.simulated { " (simulated)" } else { "" };
        alloc::format!("{} -> {} by {}{simulated}", self.from, self.to, self.by)
    }

    fn joins(&self, a: Bdf, b: Bdf) -> bool {
        let ends = (self.from.bdf, self.to.bdf);
        ends == (Some(a), Some(b)) || ends == (Some(b), Some(a))
    }
}

impl Context<'_> {
    /// What a probe says of the direct path between two GPUs: `Some(Err)` with a transfer that failed,
    /// `Some(Ok)` where all four (each direction, moved by each side) were verified without staging.
    pub fn verified_peer(&self, a: usize, b: usize) -> Option<Result<(), String>> {
        let (a, b) = (self.gpu_bdf(a)?, self.gpu_bdf(b)?);
        let all: Vec<&Transfer> = self.transfers.iter().filter(|t| t.joins(a, b)).collect();
        if let Some(bad) = all.iter().find(|transfer| transfer.outcome.is_bad()) {
            return Some(Err(words(bad)));
        }
        let good = |from, by| {
            all.iter().any(|transfer| {
                transfer.outcome == Outcome::Verified
                    && transfer.direct
                    && transfer.from.bdf == Some(from)
                    && transfer.by.bdf == Some(by)
            })
        };
        let every = [(a, a), (a, b), (b, a), (b, b)];
        every.into_iter().all(|(from, by)| good(from, by)).then_some(Ok(()))
    }

    /// What a probe says of the path between host memory and a GPU, both directions.
    pub fn verified_host(&self, gpu: usize) -> Option<Result<(), String>> {
        let bdf = self.gpu_bdf(gpu)?;
        let of = |host_first: bool| {
            self.transfers.iter().find(move |transfer| {
                let (host, device) = match host_first {
                    true => (&transfer.from, &transfer.to),
                    false => (&transfer.to, &transfer.from),
                };
                host.name == "host" && device.bdf == Some(bdf)
            })
        };
        let (there, back) = (of(true)?, of(false)?);
        if let Some(bad) = [there, back].into_iter().find(|transfer| transfer.outcome.is_bad()) {
            return Some(Err(words(bad)));
        }
        let verified = there.outcome == Outcome::Verified && back.outcome == Outcome::Verified;
        verified.then_some(Ok(()))
    }

    fn gpu_bdf(&self, gpu: usize) -> Option<Bdf> {
        self.machine.gpus.get(gpu)?.bdf.known().copied()
    }
}

fn words(transfer: &Transfer) -> String {
    let note = if transfer.note.is_empty() { "" } else { ": " };
    alloc::format!("{} {}{note}{}", transfer.label(), transfer.outcome.as_str(), transfer.note)
}

/// Findings for transfers of one kind that are spelled out; the rest are counted.
const FINDINGS_MAX: usize = 64;

/// Transfers that hung, failed or brought other bytes.
pub(super) fn probe_transfer(context: &Context<'_>) -> Verdict {
    let transfers = context.transfers;
    if transfers.is_empty() {
        return Verdict::skip(&["beeline doctor --probe, on the machine itself"]);
    }
    let bad = transfers.iter().filter(|transfer| transfer.outcome.is_bad());
    let mut findings: Vec<Finding> = bad.take(FINDINGS_MAX).map(failed).collect();
    let idle: Vec<&Transfer> =
        transfers.iter().filter(|transfer| transfer.outcome == Outcome::NotRun).collect();
    if let Some(first) = idle.first() {
        let message =
            alloc::format!("{} of {} transfers were not run", idle.len(), transfers.len());
        let labels = idle.iter().take(FINDINGS_MAX).map(|transfer| transfer.label());
        let mut reasons: Vec<String> = idle.iter().map(|transfer| transfer.note.clone()).collect();
        reasons.dedup();
        reasons.truncate(8);
        let finding = Finding::unknown(Severity::Warning, message).on(labels).maybe(reasons);
        findings.push(finding.ask([alloc::format!("a probe that reaches {}", first.label())]));
    }
    let verified = transfers.iter().filter(|t| t.outcome == Outcome::Verified).count();
    if verified > 0 && findings.is_empty() {
        let message = alloc::format!("{verified} transfers ran and every byte was compared");
        let subjects = transfers.iter().take(FINDINGS_MAX).map(Transfer::label);
        findings.push(Finding::info(message).on(subjects));
    }
    Verdict::Found(findings)
}

fn failed(transfer: &Transfer) -> Finding {
    let (severity, text) = match transfer.outcome {
        Outcome::Differs => (
            Severity::Critical,
            "the transfer reported success and brought other bytes: data is lost without a word",
        ),
        Outcome::Hung => {
            (Severity::Error, "the transfer did not end by its deadline; its process was killed")
        }
        _ => (Severity::Error, "the transfer failed"),
    };
    let note = if transfer.note.is_empty() { "" } else { ": " };
    let message = alloc::format!("{}: {text}{note}{}", transfer.label(), transfer.note);
    let finding = Finding::new(super::Status::Fail, severity, message);
    let seen = alloc::format!("{} bytes, probed now", transfer.bytes);
    let finding = finding.on([transfer.label()]).seen([seen]);
    let peer = transfer.from.bdf.is_some() && transfer.to.bdf.is_some();
    match (transfer.outcome, peer) {
        (Outcome::Differs | Outcome::Hung, true) => finding
            .fix([
                "keep peer traffic off this path until it is mended: NCCL_P2P_DISABLE=1"
                    .to_string(),
                "look for an IOMMU that translates and for ports that redirect, then probe again"
                    .to_string(),
            ])
            .caution(["results that were made over this path may be wrong"]),
        _ => finding.fix(["look at dmesg for what the driver says, then probe again"]),
    }
}

/// A loopback over RDMA hardware, which this probe does not drive.
pub(super) fn probe_rdma(context: &Context<'_>) -> Verdict {
    if context.transfers.is_empty() {
        return Verdict::skip(&["beeline doctor --probe, on the machine itself"]);
    }
    let nics = &context.machine.nics;
    let rdma = nics.iter().find(|(_, nic)| nic.rdma.known() == Some(&true));
    match rdma {
        None => Verdict::skip(&["an RDMA NIC: this machine has none to loop bytes through"]),
        Some((name, _)) => Verdict::Skip(alloc::vec![alloc::format!(
            "a loopback over {name} (ib_write_bw --use_cuda=0 -d {name}): the probe drives no RDMA hardware"
        )]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::{Level, Report, Status, run, run_with};
    use crate::facts::{Machine, read};
    use crate::plan::{self, DeviceRoute, End, Mode};
    use crate::reason::Code;

    const LISTING: &str = include_str!("../../tests/fixtures/lspci-vvv-2gpu-gpp-0001.txt");

    fn machine() -> Machine {
        let mut machine = Machine::new();
        read(&mut machine, "lspci", LISTING.as_bytes()).unwrap();
        machine.unify();
        machine
    }

    fn gpu(machine: &Machine, index: usize) -> Place {
        let bdf = machine.gpus[index].bdf.known().copied();
        Place { name: alloc::format!("cuda:{index}"), bdf }
    }

    fn transfer(from: &Place, to: &Place, by: &Place, outcome: Outcome) -> Transfer {
        Transfer {
            from: from.clone(),
            to: to.clone(),
            by: by.clone(),
            outcome,
            bytes: 4096,
            mb_per_s: Some(1),
            direct: true,
            simulated: false,
            note: String::new(),
        }
    }

    fn all(machine: &Machine) -> Vec<Transfer> {
        let (a, b) = (gpu(machine, 0), gpu(machine, 1));
        let list = [(&a, &b, &a), (&a, &b, &b), (&b, &a, &a), (&b, &a, &b)];
        list.into_iter().map(|(f, t, by)| transfer(f, t, by, Outcome::Verified)).collect()
    }

    fn level(machine: &Machine, transfers: &[Transfer]) -> (Level, Report) {
        let report = run_with(machine, transfers);
        (report.paths[0].level, report)
    }

    #[test]
    fn only_bytes_that_were_compared_verify_a_path() {
        let machine = machine();
        assert!(run(&machine).paths[0].level < Level::Verified);
        let mut transfers = all(&machine);
        let (verified, report) = level(&machine, &transfers);
        assert_eq!(verified, Level::Verified);
        assert_eq!(report.of("probe-transfer")[0].status, Status::Pass);

        // Three of four, and staged copies, verify nothing.
        assert!(level(&machine, &transfers[..3]).0 < Level::Verified);
        transfers[2].direct = false;
        assert!(level(&machine, &transfers).0 < Level::Verified);
    }

    #[test]
    fn a_lying_hanging_or_failing_path_is_refused_by_the_plan_with_the_code_of_the_check() {
        let machine = machine();
        for (outcome, severity) in [
            (Outcome::Differs, Severity::Critical),
            (Outcome::Hung, Severity::Error),
            (Outcome::Failed, Severity::Error),
        ] {
            let mut transfers = all(&machine);
            transfers[1].outcome = outcome;
            let (refused, report) = level(&machine, &transfers);
            assert_eq!(refused, Level::Refused, "{outcome:?}");
            let finding = report.failures().next().unwrap();
            assert_eq!((finding.check, finding.severity), ("probe-transfer", severity));
            assert_eq!(finding.reason, Some(Code::ProbeTransfer));
            let context = Context::with_transfers(&machine, &transfers);
            let plan = plan::device(&context, End::Gpu(0), End::Gpu(1), Mode::Auto);
            for route in [DeviceRoute::GpuLink, DeviceRoute::PciPeer] {
                assert_eq!(plan.rejection(route).unwrap().code, Code::ProbeTransfer);
            }
            assert_eq!(plan.choices[0].route, DeviceRoute::HostStaging);
        }
    }

    #[test]
    fn what_was_not_run_is_unknown_and_names_why() {
        let machine = machine();
        let mut transfers = all(&machine);
        transfers[0].outcome = Outcome::NotRun;
        transfers[0].note = "no room".to_string();
        let report = level(&machine, &transfers).1;
        let finding = report.of("probe-transfer")[0];
        assert_eq!(finding.status, Status::Unknown);
        assert_eq!(finding.candidates, ["no room"]);
        assert_eq!(report.of("probe-rdma")[0].status, Status::Skip);
        assert_eq!(run(&machine).of("probe-transfer")[0].status, Status::Skip);
    }

    #[test]
    fn host_paths_need_both_directions() {
        let machine = machine();
        let (gpu, host) = (gpu(&machine, 0), Place { name: "host".to_string(), bdf: None });
        let there = transfer(&host, &gpu, &gpu, Outcome::Verified);
        let back = transfer(&gpu, &host, &gpu, Outcome::Verified);
        let plan = |transfers: &[Transfer]| {
            let context = Context::with_transfers(&machine, transfers);
            plan::device(&context, End::Host, End::Gpu(0), Mode::Auto)
        };
        assert_eq!(plan(&[there.clone(), back.clone()]).choices[0].level, plan::Level::Verified);
        assert_eq!(plan(core::slice::from_ref(&there)).choices[0].level, plan::Level::Plausible);
        let bad = Transfer { outcome: Outcome::Differs, ..back };
        assert_eq!(plan(&[there, bad]).rejected[0].why.code, Code::ProbeTransfer);
    }
}
