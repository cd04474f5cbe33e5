//! `beeline topo`: distances and bandwidths between GPUs and NICs, and what differs between two records.

use std::fmt::Write as _;
use std::path::Path;

use beeline::core::facts::Machine;
use beeline::core::topology::view::{View, view};
use beeline::core::topology::{Change, diff};
use serde_json::{Value, json};

use super::doctor;
use crate::failure::Failure;
use crate::flags::TopoFlags;
use crate::output::{Answer, printable};

/// Shows the topology, or what differs. A difference is a failure, as it is for `diff`.
///
/// # Errors
/// An input that cannot be read or is refused.
pub(crate) fn run(flags: &TopoFlags) -> Result<Answer, Failure> {
    let mut answer = Answer::of("topo");
    if let [before, after] = &flags.diff[..] {
        let changes = diff(&one(before)?, &one(after)?);
        answer.text = changes_text(&changes);
        let change = |c: &Change| json!({ "what": c.what, "before": c.before, "after": c.after });
        answer.set("changes", changes.iter().map(change).collect::<Value>());
        if !changes.is_empty() {
            let message = format!("{} differences", changes.len());
            answer.failure = Some(Failure::failed("topology-differs", message));
        }
        return Ok(answer);
    }
    let view = view(&doctor::machine(&flags.facts)?);
    answer.text = matrix(&view);
    let value = serde_json::to_value(&view)
        .map_err(|error| Failure::failed("io-failed", error.to_string()))?;
    answer.set("topology", value);
    Ok(answer)
}

/// A saved record, or a file of any kind that doctor reads.
fn one(path: &Path) -> Result<Machine, Failure> {
    if let Ok(machine) = doctor::load(path) {
        return Ok(machine);
    }
    let mut machine = Machine::new();
    doctor::add(&mut machine, path)?;
    machine.unify();
    Ok(machine)
}

fn changes_text(changes: &[Change]) -> String {
    if changes.is_empty() {
        return "no difference\n".to_owned();
    }
    let shown = |text: &str| if text.is_empty() { "-".to_owned() } else { printable(text) };
    let line = |change: &Change| {
        format!(
            "{}: {} -> {}\n",
            printable(&change.what),
            shown(&change.before),
            shown(&change.after)
        )
    };
    changes.iter().map(line).collect()
}

fn matrix(view: &View) -> String {
    let mut out = String::new();
    if view.devices.is_empty() {
        return "no GPU and no NIC\n".to_owned();
    }
    let short: Vec<String> = view
        .devices
        .iter()
        .map(|device| device.label.split(" (").next().unwrap_or(&device.label).to_owned())
        .collect();
    let width =
        short.iter().chain(view.cells.iter().flatten()).map(String::len).max().unwrap_or(4) + 1;
    let first = short.iter().map(String::len).max().unwrap_or(4) + 2;
    let _ = write!(out, "{:first$}", "");
    for name in &short {
        let _ = write!(out, "{name:>width$}");
    }
    out.push('\n');
    for (name, row) in short.iter().zip(&view.cells) {
        let _ = write!(out, "{name:first$}");
        for cell in row {
            let _ = write!(out, "{cell:>width$}");
        }
        out.push('\n');
    }
    out.push('\n');
    for device in &view.devices {
        let _ = write!(out, "{}", device.label);
        if !device.model.is_empty() {
            let _ = write!(out, ", {}", device.model);
        }
        if let Some(node) = device.numa {
            let _ = write!(out, ", NUMA node {node}");
        }
        if let Some(speed) = device.to_cpu_mb_per_s {
            let _ = write!(out, ", {}.{} GB/s to its CPU", speed / 1000, speed % 1000 / 100);
        }
        if !device.nearest_nics.is_empty() {
            let _ = write!(out, ", nearest NICs: {}", device.nearest_nics.join(", "));
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::FactsFlags;
    use std::path::PathBuf;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../beeline-core/tests/fixtures").join(name)
    }

    #[test]
    fn a_matrix_and_a_difference() {
        let files = vec![fixture("topo-1gpu-pix-nic.txt")];
        let facts = FactsFlags { files, ..FactsFlags::default() };
        let answer = run(&TopoFlags { facts, diff: Vec::new() }).unwrap();
        assert!(answer.text.contains("PIX") && answer.text.contains("nearest NICs: mlx5_0"));

        let differ = |a: &str, b: &str| {
            let diff = vec![fixture(a), fixture(b)];
            run(&TopoFlags { facts: FactsFlags::default(), diff }).unwrap()
        };
        let answer = differ("topo-1gpu-pix-nic.txt", "topo-1gpu-phb-nic.txt");
        assert_eq!(answer.text, "GPU0 - mlx5_0: PIX -> PHB\n");
        assert!(answer.failure.is_some());
        assert_eq!(differ("topo-1gpu-pix-nic.txt", "topo-1gpu-pix-nic.txt").failure, None);
    }
}
