//! Every handed case that facts can decide, near misses, and inputs that lack what decides.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod doctor_common;

use beeline_core::checks::{Finding, Status, TABLE, run};
use beeline_core::facts::Machine;
use doctor_common::cases;
use doctor_common::more::{POSITIVE, QUIET, SUMMARIES};
use doctor_common::silent::{MISSING, NEAR_MISSES};
use doctor_common::{from_inputs, judge, words};

#[test]
fn handed_cases_get_the_right_answer_and_no_wrong_failure() {
    let mut wrong = Vec::new();
    for case in cases::all() {
        match judge(case) {
            Some(reasons) if !reasons.is_empty() => wrong.push((case.id, reasons)),
            _ => {}
        }
    }
    for (id, reasons) in &wrong {
        println!("{id}: {reasons:#?}");
    }
    assert!(wrong.is_empty(), "{} of {} cases are wrong", wrong.len(), cases::all().count());
}

#[test]
fn near_misses_stay_silent() {
    for (check, inputs) in NEAR_MISSES {
        let Some(machine) = from_inputs(inputs) else { continue };
        let report = run(&machine);
        for finding in report.of(check) {
            let silent = matches!(finding.status, Status::Pass | Status::Skip);
            assert!(silent, "{check} on {inputs:?}: {:?} {}", finding.status, words(finding));
        }
    }
}

#[test]
fn missing_evidence_is_said_and_never_a_failure() {
    for (check, inputs) in MISSING {
        let Some(machine) = from_inputs(inputs) else { continue };
        let report = run(&machine);
        let found = report.of(check);
        let open = |status| matches!(status, Status::Skip | Status::Unknown);
        assert!(
            found.iter().any(|finding| open(finding.status)),
            "{check} on {inputs:?}: {:?}",
            found.iter().map(|f| (f.status, words(f))).collect::<Vec<_>>()
        );
        for finding in found.iter().filter(|finding| open(finding.status)) {
            let asks = !finding.missing.is_empty() || !finding.candidates.is_empty();
            assert!(asks, "{check} on {inputs:?} does not say what is missing");
            assert_ne!(finding.status, Status::Fail);
        }
        assert!(found.iter().all(|finding| finding.status != Status::Fail), "{check} {inputs:?}");
    }
}

#[test]
fn without_any_input_no_check_fails() {
    let report = run(&Machine::new());
    for finding in &report.findings {
        assert!(matches!(finding.status, Status::Skip | Status::Pass), "{}", finding.check);
    }
}

/// Says something of its own: a failure, an open question, or a remark with what it is about.
fn is_loud(finding: &Finding) -> bool {
    match finding.status {
        Status::Fail | Status::Unknown => true,
        Status::Pass => {
            let about = !finding.evidence.is_empty() || !finding.subjects.is_empty();
            about || finding.check == "facts-hidden" && !finding.remedies.is_empty()
        }
        Status::Skip => false,
    }
}

#[test]
fn every_check_speaks_up_keeps_quiet_and_says_what_it_lacks() {
    // Decided by transfers that ran, which no file holds: `checks::transfers` has their inputs.
    let checks = TABLE.iter().filter(|check| !check.code.starts_with("probe-"));
    let mut wrong = Vec::new();
    for code in checks.map(|check| check.code) {
        let cases = cases::all().filter(|case| case.want.iter().any(|want| want.check == code));
        let more = POSITIVE.iter().filter(|(check, _)| *check == code).map(|(_, inputs)| *inputs);
        let positive: Vec<&[&str]> = cases.map(|case| case.inputs).chain(more).collect();
        let spoken = positive.iter().filter_map(|inputs| from_inputs(inputs)).any(|machine| {
            let summary = SUMMARIES.contains(&code);
            run(&machine)
                .of(code)
                .iter()
                .any(|f| is_loud(f) || summary && f.status == Status::Pass && !f.message.is_empty())
        });
        let readable = |inputs: &&[&str]| from_inputs(inputs).is_some();
        if positive.is_empty() || (!spoken && positive.iter().all(readable)) {
            wrong.push(format!("{code} speaks up on none of {positive:?}"));
        }
        let quiet = QUIET.iter().chain(NEAR_MISSES).any(|(check, _)| *check == code);
        if !quiet && !SUMMARIES.contains(&code) {
            wrong.push(format!("{code} has no near miss"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn remarks_keep_quiet_on_what_is_near() {
    for (check, inputs) in QUIET {
        let Some(machine) = from_inputs(inputs) else { continue };
        let report = run(&machine);
        for finding in report.of(check) {
            assert!(!is_loud(finding), "{check} on {inputs:?}: {}", words(finding));
        }
    }
}

#[test]
fn without_its_evidence_every_check_says_what_it_needs() {
    // A kernel's name decides about no path.
    for machine in [Machine::new(), from_inputs(&["uname-r.txt"]).unwrap()] {
        let report = run(&machine);
        for check in TABLE.iter().filter(|check| check.code != "facts-hidden") {
            for finding in report.of(check.code) {
                let open = matches!(finding.status, Status::Skip | Status::Unknown);
                assert!(open, "{}: {:?} {}", check.code, finding.status, finding.message);
                let asks = !finding.missing.is_empty() || !finding.candidates.is_empty();
                assert!(asks, "{} does not say what is missing", check.code);
            }
        }
    }
}

#[test]
fn consequences_name_their_cause() {
    let late =
        from_inputs(&["nvshmem-ibgda.log", "params-memops-off.txt", "lsmod-peermem.txt"]).unwrap();
    let report = run(&late);
    assert_eq!(report.of("late-failure")[0].consequence_of, Some("ibgda-unavailable"));
    assert_eq!(report.of("ibgda-unavailable")[0].consequence_of, None);
    let position = |code| report.findings.iter().position(|f| f.check == code).unwrap();
    assert!(position("ibgda-unavailable") < position("late-failure"));
}

#[test]
fn remedies_turn_round_in_a_guest_and_on_arm() {
    let mut machine = from_inputs(&["lspci-vvv-2gpu-gpp-001d.txt"]).unwrap();
    let origin = beeline_core::facts::Origin::default();
    machine.platform.hypervisor = Some(beeline_core::facts::Fact { value: "KVM".into(), origin });
    let report = run(&machine);
    let text = words(report.of("p2p-acs-redirect")[0]);
    assert!(text.contains("this is a guest") && !text.contains("setpci"), "{text}");

    machine.platform.hypervisor = None;
    machine.platform.arch = Some(beeline_core::facts::Fact { value: "aarch64".into(), origin });
    let report = run(&machine);
    assert!(words(report.of("p2p-acs-redirect")[0]).contains("keep ACS on"));
}

#[test]
fn older_and_newer_wordings_are_read_too() {
    let machine = from_inputs(&["nccl-no-module.log"]).unwrap();
    let text = words(run(&machine).of("gdr-disabled")[0]);
    assert!(text.contains("no peer memory module") && text.contains("modprobe"), "{text}");
    let machine = from_inputs(&["nccl-socket.log"]).unwrap();
    assert_eq!(run(&machine).of("nccl-over-tcp")[0].status, Status::Fail);

    let machine = from_inputs(&["gdscheck-beta.txt"]).unwrap();
    let gds = machine.platform.gds.as_ref().unwrap();
    assert_eq!(gds.nvfs.as_ref().unwrap().value, "2.4");
    assert_eq!(gds.iommu.as_ref().unwrap().value, "disabled");
    assert_eq!(gds.verdict.as_ref().unwrap().value, "succeeded");
    assert_eq!(gds.properties["properties.use_compat_mode"].value, "0");
    assert_eq!(machine.gpus[0].bar1_bytes.as_ref().unwrap().value, 256 << 20);
    assert!(!machine.sources[0].truncated);
}

#[test]
fn forms_that_people_paste_are_read() {
    let machine = from_inputs(&["topo-old-names.txt"]).unwrap();
    let topology = beeline_core::topology::Topology::new(&machine);
    let near: Vec<String> =
        topology.nics_near(0).iter().map(|(name, distance)| format!("{name} {distance}")).collect();
    assert_eq!(near, ["mlx5_0 PIX", "mlx5_bond_0 SYS"]);

    let machine = from_inputs(&["lsmod-grep.txt"]).unwrap();
    assert!(machine.platform.modules.contains_key("nvidia_peermem"));
    assert_eq!(machine.platform.modules_listed, None, "what grep left out may be loaded");

    let machine = from_inputs(&["dmesg-x.txt"]).unwrap();
    assert_eq!(run(&machine).of("peermem-no-api")[0].status, Status::Fail);
    let machine = from_inputs(&["uname-r.txt"]).unwrap();
    assert_eq!(machine.platform.kernel.as_ref().unwrap().value, "5.10.0-28-amd64");

    let machine = from_inputs(&["lspci-vvv-2gpu-gpp-0001.txt", "setpci-acs-001d.txt"]).unwrap();
    assert!(machine.sources.len() == 2);
    let machine = from_inputs(&["setpci-acs-001d.txt", "lspci-vvv-2gpu-gpp-0001.txt"]).unwrap();
    assert_eq!(run(&machine).of("p2p-acs-redirect")[0].status, Status::Fail);

    let machine = from_inputs(&["lspci-vvv-gpu-nic-acs-on.txt"]).unwrap();
    let report = run(&machine);
    let text = words(report.of("rdma-acs-redirect")[0]);
    assert!(text.contains("0000:19:08.0") && text.contains("setpci -s"), "{text}");
}

#[test]
fn loaded_is_not_registered() {
    let mut machine = from_inputs(&["lsmod-peermem.txt"]).unwrap();
    assert_eq!(run(&machine).of("peermem-not-registered")[0].status, Status::Skip);
    let origin = beeline_core::facts::Origin::default();
    let yes = || beeline_core::facts::Fact { value: true, origin };
    machine.platform.memory_peers_listed = Some(yes());
    assert_eq!(run(&machine).of("peermem-not-registered")[0].status, Status::Fail);
    machine.platform.memory_peers.insert("nv_mem".into(), yes());
    assert_eq!(run(&machine).of("peermem-not-registered")[0].status, Status::Pass);
}

#[test]
fn files_never_verify_a_path() {
    for inputs in cases::all().map(|case| case.inputs).chain(NEAR_MISSES.iter().map(|(_, i)| *i)) {
        let Some(machine) = from_inputs(inputs) else { continue };
        for path in run(&machine).paths {
            assert!(path.level < beeline_core::checks::Level::Verified, "{inputs:?} {path:?}");
        }
    }
}

#[test]
fn reasons_of_checks_are_codes_of_plans() {
    for check in TABLE {
        if let Some(code) = check.reason {
            // Two checks share a code that plans had before; all others have the check's own name.
            let shared = ["kernel-no-p2pdma", "gds-may-be-slower"].contains(&check.code);
            assert!(shared || code.as_str() == check.code, "{} {code}", check.code);
        }
    }
}
