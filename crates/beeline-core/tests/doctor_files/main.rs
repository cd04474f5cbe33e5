//! The handed files, each recognised, with its right answer.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

#[path = "../doctor_common/mod.rs"]
mod doctor_common;
mod logs;
mod topologies;

use std::collections::BTreeMap;

use beeline_core::checks::{Severity, Status, run};
use beeline_core::facts::{Distance, Kind, Known, Machine};
use beeline_core::topology::{Answer, Point, Topology};
use doctor_common::{from_inputs, words};

/// A handed file in a machine of its own.
fn handed(file: &str, kind: Kind) -> Option<Machine> {
    let machine = from_inputs(&[&format!("handed:{file}")])?;
    assert_eq!(machine.sources[0].kind, kind, "{file}");
    let saved = beeline_core::facts::json::save(&machine, true).unwrap();
    assert_eq!(beeline_core::facts::json::load(&saved).unwrap(), machine, "{file}");
    Some(machine)
}

fn gpu(machine: &Machine, bdf: &str) -> usize {
    let found = machine.gpus.iter().position(|g| g.bdf.known().unwrap().to_string() == bdf);
    found.unwrap_or_else(|| panic!("no GPU {bdf}"))
}

fn known(topology: &Topology<'_>, a: Point<'_>, b: Point<'_>) -> Distance {
    topology.distance(a, b).known().unwrap()
}

/// How often each distance occurs between GPUs and NICs.
fn gpu_nic_counts(machine: &Machine) -> BTreeMap<String, usize> {
    let topology = Topology::new(machine);
    let mut counts = BTreeMap::new();
    for gpu in topology.gpus() {
        for nic in topology.nics() {
            *counts.entry(known(&topology, gpu, nic).to_string()).or_insert(0) += 1;
        }
    }
    counts
}

/// The one finding of a check that is neither skipped nor a plain pass.
fn only<'r>(
    report: &'r beeline_core::checks::Report,
    check: &str,
) -> &'r beeline_core::checks::Finding {
    let found = report.of(check);
    assert_eq!(found.len(), 1, "{check}");
    found[0]
}

fn no_failure(machine: &Machine) {
    let report = run(machine);
    let failures: Vec<String> = report.failures().map(words).collect();
    assert!(failures.is_empty(), "{failures:?}");
}

/// Functions by vendor and device.
fn count(machine: &Machine, vendor: u16, device: u16) -> usize {
    let functions = machine.pci.values();
    functions
        .filter(|d| d.vendor.known() == Some(&vendor) && d.device.known() == Some(&device))
        .count()
}

fn bridges(machine: &Machine) -> usize {
    machine.pci.values().filter(|d| d.class.known() == Some(&0x06_0400)).count()
}

fn host_bridges(machine: &Machine) -> usize {
    use beeline_core::facts::Parent;
    let parents = machine.pci.values().filter_map(|d| match d.parent.known() {
        Some(Parent::Host(name)) => Some(name.clone()),
        _ => None,
    });
    parents.collect::<std::collections::BTreeSet<_>>().len()
}
