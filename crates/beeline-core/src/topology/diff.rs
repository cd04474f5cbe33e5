//! What changed between two records: for `topo --diff` and for "it worked yesterday".

use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::{Answer, Point, Topology};
use crate::facts::{Bdf, Fact, Known, Machine};

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Change {
    /// What differs: `0000:41:00.0 link`, `kernel`.
    pub what: String,
    /// Its value in the first record, empty where it has none.
    pub before: String,
    /// Its value in the second record, empty where it has none.
    pub after: String,
}

/// All differences that can matter for a path, in a stable order. Counters and logs are left out.
pub fn diff(before: &Machine, after: &Machine) -> Vec<Change> {
    let mut changes = Vec::new();
    platform(before, after, &mut changes);
    pci(before, after, &mut changes);
    distances(before, after, &mut changes);
    changes.retain(|change| change.before != change.after);
    changes
}

fn text<T: ToString>(fact: Option<&T>) -> String {
    fact.map(ToString::to_string).unwrap_or_default()
}

fn push(changes: &mut Vec<Change>, what: impl Into<String>, before: String, after: String) {
    changes.push(Change { what: what.into(), before, after });
}

fn platform(before: &Machine, after: &Machine, changes: &mut Vec<Change>) {
    let (a, b) = (&before.platform, &after.platform);
    for (what, x, y) in [
        ("kernel", &a.kernel, &b.kernel),
        ("kernel command line", &a.cmdline, &b.cmdline),
        ("driver", &a.driver, &b.driver),
        ("CUDA", &a.cuda, &b.cuda),
        ("hypervisor", &a.hypervisor, &b.hypervisor),
        ("container", &a.container, &b.container),
    ] {
        push(changes, what, text(x.known()), text(y.known()));
    }
    let maps =
        [("driver parameter", &a.params, &b.params), ("kernel option", &a.config, &b.config)];
    for (kind, x, y) in maps {
        for key in x.keys().chain(y.keys()).collect::<BTreeSet<_>>() {
            let value = |fact: Option<&Fact<String>>| text(fact.map(|fact| &fact.value));
            let what = alloc::format!("{kind} {key}");
            push(changes, what, value(x.get(key)), value(y.get(key)));
        }
    }
    for name in a.modules.keys().chain(b.modules.keys()).collect::<BTreeSet<_>>() {
        let state = |machine: &Machine| match machine.platform.modules.contains_key(name) {
            true => "loaded".to_string(),
            false => String::new(),
        };
        push(changes, alloc::format!("module {name}"), state(before), state(after));
    }
}

fn pci(before: &Machine, after: &Machine, changes: &mut Vec<Change>) {
    for bdf in before.pci.keys().chain(after.pci.keys()).collect::<BTreeSet<&Bdf>>() {
        let (a, b) = (before.pci.get(bdf), after.pci.get(bdf));
        let present = |there: bool| if there { "present".to_string() } else { String::new() };
        push(changes, alloc::format!("{bdf}"), present(a.is_some()), present(b.is_some()));
        let (Some(a), Some(b)) = (a, b) else { continue };
        push(changes, alloc::format!("{bdf} link"), text(a.link.known()), text(b.link.known()));
        push(changes, alloc::format!("{bdf} ACS"), text(a.acs.known()), text(b.acs.known()));
        push(
            changes,
            alloc::format!("{bdf} driver"),
            text(a.driver.known()),
            text(b.driver.known()),
        );
        push(
            changes,
            alloc::format!("{bdf} NUMA node"),
            text(a.numa.known()),
            text(b.numa.known()),
        );
    }
}

/// Distances between the devices that both records have.
fn distances(before: &Machine, after: &Machine, changes: &mut Vec<Change>) {
    let (a, b) = (Topology::new(before), Topology::new(after));
    let named = |topology: &Topology<'_>, machine: &Machine| -> Vec<String> {
        let gpus = (0..machine.gpus.len()).map(|index| topology.label(Point::Gpu(index)));
        gpus.chain(machine.nics.keys().cloned()).collect()
    };
    let (names_a, names_b) = (named(&a, before), named(&b, after));
    for name in &names_a {
        if !names_b.contains(name) {
            push(changes, name.clone(), "present".to_string(), String::new());
        }
    }
    for name in &names_b {
        if !names_a.contains(name) {
            push(changes, name.clone(), String::new(), "present".to_string());
        }
    }
    let common: Vec<&String> = names_a.iter().filter(|name| names_b.contains(name)).collect();
    for (index, first) in common.iter().enumerate() {
        for second in common.iter().skip(index + 1) {
            let one = |topology: &Topology<'_>, machine: &Machine| {
                let points = point(topology, machine, first).zip(point(topology, machine, second));
                match points.map(|(x, y)| topology.distance(x, y)) {
                    Some(Answer::Known(distance)) => distance.to_string(),
                    Some(Answer::Unknown { .. }) | None => "unknown".to_string(),
                }
            };
            let what = alloc::format!("{first} - {second}");
            push(changes, what, one(&a, before), one(&b, after));
        }
    }
}

fn point<'m>(topology: &Topology<'m>, machine: &'m Machine, name: &str) -> Option<Point<'m>> {
    let gpu = (0..machine.gpus.len()).find(|index| topology.label(Point::Gpu(*index)) == name);
    gpu.map(Point::Gpu).or_else(|| machine.nics.get_key_value(name).map(|(key, _)| Point::Nic(key)))
}
