//! The machine drawn as a tree: host bridges and CPUs, ports, and the devices that matter below them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use beeline::core::facts::machine::GpuLinkKind;
use beeline::core::facts::{Bdf, Gpu, Known, Machine, Parent};

use super::escape;

/// Rows of the drawing.
const ROWS_MAX: usize = 400;
/// Height of a row and width of a level, in pixels.
const ROW: usize = 22;
const LEVEL: usize = 26;

/// One row: depth, class for colour, text.
struct Row {
    depth: usize,
    class: &'static str,
    text: String,
}

/// The machine as a tree: host bridges and CPUs, ports, and the devices that matter below them.
pub(super) fn tree(out: &mut String, machine: &Machine) {
    let mut children: BTreeMap<Option<Parent>, Vec<Bdf>> = BTreeMap::new();
    for (bdf, device) in &machine.pci {
        let parent = device.parent.known().cloned();
        children.entry(parent).or_default().push(*bdf);
    }
    let roots: Vec<Parent> = children
        .keys()
        .flatten()
        .filter(|parent| !matches!(parent, Parent::Bridge(_)))
        .cloned()
        .collect();
    let mut rows = Vec::new();
    for root in &roots {
        let label = match root {
            Parent::Host(name) => format!("host bridge {name}"),
            Parent::Cpu(node) => format!("CPU, NUMA node {node}"),
            Parent::Bridge(bdf) => bdf.to_string(),
        };
        rows.push(Row { depth: 0, class: "port", text: label });
        let below = children.get(&Some(root.clone()));
        for bdf in below.into_iter().flatten() {
            descend(machine, &children, *bdf, 1, &mut rows);
        }
    }
    for gpu in machine.gpus.iter().filter(|gpu| gpu.bdf.is_none()) {
        rows.push(Row { depth: 0, class: "gpu", text: gpu.label() });
    }
    // A host bridge with nothing of interest below it says nothing.
    let mut kept: Vec<Row> = Vec::new();
    for row in rows {
        if row.depth == 0 && kept.last().is_some_and(|last| last.depth == 0 && last.class == "port")
        {
            kept.pop();
        }
        kept.push(row);
    }
    if kept.last().is_some_and(|last| last.depth == 0 && last.class == "port") {
        kept.pop();
    }
    draw(out, &kept);
}

/// Adds a device and what is below it; true where anything of interest is.
fn descend(
    machine: &Machine,
    children: &BTreeMap<Option<Parent>, Vec<Bdf>>,
    bdf: Bdf,
    depth: usize,
    rows: &mut Vec<Row>,
) -> bool {
    if depth > 32 || rows.len() >= ROWS_MAX {
        return false;
    }
    let place = rows.len();
    let (class, text, wanted) = describe(machine, bdf);
    rows.push(Row { depth, class, text });
    let mut any = wanted;
    for child in children.get(&Some(Parent::Bridge(bdf))).into_iter().flatten() {
        any |= descend(machine, children, *child, depth + 1, rows);
    }
    if !any {
        rows.truncate(place);
    }
    any
}

fn describe(machine: &Machine, bdf: Bdf) -> (&'static str, String, bool) {
    if let Some(gpu) = machine.gpus.iter().find(|gpu| gpu.bdf.known() == Some(&bdf)) {
        let name = gpu.name.known().map_or("", |name| short(name));
        return ("gpu", format!("{} {name}{}", gpu.label(), links(gpu)), true);
    }
    let nics: Vec<&str> = machine
        .nics
        .iter()
        .filter(|(_, nic)| nic.bdf.known() == Some(&bdf))
        .map(|(name, _)| name.as_str())
        .collect();
    if !nics.is_empty() {
        return ("nic", format!("NIC {} ({bdf})", nics.join(", ")), true);
    }
    let device = machine.pci.get(&bdf);
    let class = device.and_then(|device| device.class.known()).map_or(0, |class| class >> 8);
    let link = device
        .and_then(|device| device.link.known())
        .map_or(String::new(), |link| format!(" {link}"));
    if class == 0x0108 {
        return ("drive", format!("NVMe {bdf}{link}"), true);
    }
    match device.and_then(|device| device.acs.known()).filter(|acs| acs.redirects()) {
        Some(acs) => {
            ("redirect", format!("port {bdf}{link}, redirects peer traffic: ACS {acs}"), false)
        }
        None => ("port", format!("port {bdf}{link}"), false),
    }
}

/// A product name without its maker and revision, which are the same for all.
fn short(name: &str) -> &str {
    let name = name.strip_prefix("NVIDIA Corporation ").unwrap_or(name);
    name.split_once(" (rev ").map_or(name, |(name, _)| name)
}

/// `, 18 NVLinks`, or nothing.
fn links(gpu: &Gpu) -> String {
    let nvlinks = gpu.links.iter().filter(|link| link.value.kind == GpuLinkKind::NvLink);
    match nvlinks.map(|link| link.value.count).fold(0, u32::saturating_add) {
        0 => String::new(),
        1 => ", 1 NVLink".to_owned(),
        count => format!(", {count} NVLinks"),
    }
}

fn draw(out: &mut String, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let height = rows.len() * ROW + 12;
    let widest = rows.iter().map(|row| row.depth * LEVEL + row.text.chars().count() * 8).max();
    let width = widest.unwrap_or(0) + 60;
    let _ = writeln!(
        out,
        "<h2>Machine</h2>\n<p class=\"dim\">Square, green: GPU. Square, amber: NIC. Square, grey: drive. Dot, grey: \
         port. Dot, red: a port that redirects peer traffic.</p>\n<div class=\"scroll\"><svg id=\"machine\" role=\"img\" \
         aria-label=\"the machine as a tree\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">"
    );
    let mut last_at_depth: Vec<usize> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let (x, y) = (16 + row.depth * LEVEL, 18 + index * ROW);
        last_at_depth.truncate(row.depth);
        if let Some(parent) = last_at_depth.last() {
            let (px, py) = (16 + (row.depth - 1) * LEVEL, 18 + parent * ROW);
            let _ = writeln!(out, "<path d=\"M{px} {} V{y} H{}\"/>", py + 6, x - 6);
        }
        last_at_depth.resize(row.depth, index);
        last_at_depth.push(index);
        let class = row.class;
        let _ = match class {
            "port" | "redirect" => {
                write!(out, "<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"5\"/>")
            }
            _ => write!(
                out,
                "<rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" rx=\"2\"/>",
                x - 6,
                y - 6
            ),
        };
        let _ =
            writeln!(out, "<text x=\"{}\" y=\"{}\">{}</text>", x + 12, y + 4, escape(&row.text));
    }
    out.push_str("</svg></div>\n");
}
