//! `nvidia-smi topo -m` and `nvidia-smi topo -p2p`.
//!
//! Columns are separated by tabs in the tool's own output and by runs of blanks in pasted copies; cells
//! are `X`, a distance or a status; rows may be shorter than the header.

use alloc::string::ToString;
use alloc::vec::Vec;

use super::super::machine::{Cell, Distance, Endpoint, Fact, Known, Machine, P2pCell, P2pStatus};
use super::{Input, Outcome, ReadError};

/// GPUs and NICs of one matrix.
const COLUMNS_MAX: usize = 512;

pub(super) fn is_matrix(head: &str) -> bool {
    matrix_shape(head, |cell| cell == "X" || Distance::parse(cell).is_some())
}

pub(super) fn is_p2p(head: &str) -> bool {
    matrix_shape(head, |cell| cell == "X" || P2pStatus::parse(cell).is_some())
}

/// A header that starts with GPU0, and below it a row `GPU0` whose cells all satisfy `cell`.
fn matrix_shape(head: &str, cell: impl Fn(&str) -> bool) -> bool {
    let mut lines = head.lines().map(clean).filter(|line| !line.trim().is_empty()).take(64);
    let Some(columns) = lines.find_map(|line| header(line).map(|columns| columns.ends.len()))
    else {
        return false;
    };
    lines
        .next()
        .and_then(|row| {
            let mut words = row.split_ascii_whitespace();
            endpoint(words.next()?)?;
            let cells: Vec<&str> = words.take(columns).collect();
            Some(!cells.is_empty() && cells.iter().all(|word| cell(word)))
        })
        .unwrap_or(false)
}

/// The columns of a matrix: what they stand for, and their names.
struct Columns<'a> {
    ends: Vec<Endpoint>,
    names: Vec<&'a str>,
}

impl Columns<'_> {
    fn find(&self, name: &str) -> Option<Endpoint> {
        let place = self.names.iter().position(|known| *known == name)?;
        self.ends.get(place).copied()
    }
}

/// The columns of a header line, up to the affinity. Drivers before the NIC legend print names of
/// devices (`mlx5_bond_0`) as columns: those are numbered in their order.
fn header(line: &str) -> Option<Columns<'_>> {
    let names: Vec<&str> =
        line.split_ascii_whitespace().take_while(|word| *word != "CPU").collect();
    if !names.first().is_some_and(|name| matches!(endpoint(name), Some(Endpoint::Gpu(_)))) {
        return None;
    }
    let mut unnumbered = 0u32;
    let ends = names.iter().map(|name| {
        endpoint(name).unwrap_or_else(|| {
            unnumbered += 1;
            Endpoint::Nic(unnumbered - 1)
        })
    });
    let ends = ends.collect();
    Some(Columns { ends, names })
}

/// `GPU3` and `NIC2`.
fn endpoint(word: &str) -> Option<Endpoint> {
    let number = |prefix: &str| word.strip_prefix(prefix)?.parse::<u32>().ok();
    number("GPU").map(Endpoint::Gpu).or_else(|| number("NIC").map(Endpoint::Nic))
}

/// Terminal escapes around the header are dropped.
fn clean(line: &str) -> &str {
    let line = line.strip_prefix("\u{1b}[4m").unwrap_or(line);
    line.split('\u{1b}').next().unwrap_or(line)
}

pub(super) fn parse_matrix(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let mut columns: Option<Columns<'_>> = None;
    let (mut rows, mut legend, mut tail_seen) = (0usize, false, false);
    for (number, line) in input.lines() {
        let line = clean(line);
        let at = input.at(number);
        let trimmed = line.trim();
        if trimmed.is_empty() {
            continue;
        }
        if trimmed.starts_with("NIC Legend") {
            legend = true;
            continue;
        }
        if legend {
            if let Some((Some(Endpoint::Nic(index)), name)) =
                trimmed.split_once(':').map(|(key, name)| (endpoint(key.trim()), name.trim()))
            {
                let nic = machine.nic(name);
                nic.index.learn(index, at);
                nic.rdma.learn(true, at);
            }
            continue;
        }
        if trimmed.starts_with("Legend") {
            tail_seen = true;
            continue;
        }
        let Some(known) = &columns else {
            columns = header(line);
            if columns.as_ref().is_some_and(|columns| columns.ends.len() > COLUMNS_MAX) {
                let message = alloc::format!("matrix with more than {COLUMNS_MAX} columns");
                return Err(ReadError::new(input, number, message));
            }
            continue;
        };
        if tail_seen {
            continue;
        }
        let name = line.split_ascii_whitespace().next().unwrap_or("");
        let Some(from) = known.find(name) else { continue };
        rows += 1;
        if matches!(from, Endpoint::Nic(index) if !name.starts_with("NIC") && index < 1024) {
            let nic = machine.nic(name);
            if let Endpoint::Nic(index) = from {
                nic.index.learn(index, at);
            }
            nic.rdma.learn(true, at);
        }
        row(machine, input, number, line, from, &known.ends)?;
    }
    let columns = columns.map_or(0, |columns| columns.ends.len());
    if rows > columns {
        let message = alloc::format!("{rows} rows for {columns} columns");
        return Err(ReadError::new(input, 1, message));
    }
    name_unnamed_nics(machine, input);
    Ok(Outcome { truncated: rows < columns })
}

fn row(
    machine: &mut Machine,
    input: &Input<'_>,
    number: u32,
    line: &str,
    from: Endpoint,
    columns: &[Endpoint],
) -> Result<(), ReadError> {
    let at = input.at(number);
    let words: Vec<&str> = line.split_ascii_whitespace().skip(1).collect();
    let mut used = 0;
    for (to, word) in columns.iter().zip(&words) {
        used += 1;
        if *word == "X" {
            continue;
        }
        let Some(distance) = Distance::parse(word) else {
            let message =
                alloc::format!("cell \"{word}\"; expected X, NV#, C2C, PIX, PXB, PHB, NODE or SYS");
            return Err(ReadError::new(input, number, message));
        };
        machine.matrix.push(Fact { value: Cell { from, to: *to, distance }, origin: at });
    }
    if let Endpoint::Gpu(index) = from {
        machine.gpu_numbered(index, at);
        affinity(machine, index, words.get(used..).unwrap_or_default(), input, number);
    }
    Ok(())
}

/// `CPU Affinity`, `NUMA Affinity`: the second may be `N/A`; an empty first leaves one word.
fn affinity(machine: &mut Machine, gpu: u32, words: &[&str], input: &Input<'_>, number: u32) {
    let at = input.at(number);
    let [cpus, node, ..] = words else { return };
    let count = count_list(cpus);
    if let (Some(count), Ok(node)) = (count, node.parse::<i32>()) {
        let known = machine.platform.numa.entry(node).or_insert(Fact { value: 0, origin: at });
        known.value = known.value.max(count);
        let attributes = &mut machine.gpu_numbered(gpu, at).attributes;
        attributes.entry("numa".to_string()).or_insert(Fact { value: i64::from(node), origin: at });
    }
}

/// `0-63,128-191` as 128.
fn count_list(list: &str) -> Option<u32> {
    list.split(',').try_fold(0u32, |sum, part| {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let (low, high): (u32, u32) = (low.parse().ok()?, high.parse().ok()?);
        sum.checked_add(high.checked_sub(low)?.checked_add(1)?)
    })
}

/// NIC columns without a legend still are NICs: they get the name of their column.
fn name_unnamed_nics(machine: &mut Machine, input: &Input<'_>) {
    let mut missing: Vec<(u32, u32)> = Vec::new();
    for cell in &machine.matrix {
        if cell.origin.source != input.source {
            continue;
        }
        if let Endpoint::Nic(index) = cell.value.from {
            let named = machine.nics.values().any(|nic| nic.index.known() == Some(&index));
            if !named && !missing.iter().any(|(known, _)| *known == index) {
                missing.push((index, cell.origin.line));
            }
        }
    }
    for (index, line) in missing {
        let at = input.at(line);
        machine.nic(&alloc::format!("NIC{index}")).index.learn(index, at);
    }
}

pub(super) fn parse_p2p(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let mut columns: Option<Columns<'_>> = None;
    let mut rows = 0usize;
    for (number, line) in input.lines() {
        let line = clean(line);
        let Some(known) = &columns else {
            columns = header(line);
            continue;
        };
        let mut words = line.split_ascii_whitespace();
        let Some(Endpoint::Gpu(from)) = words.next().and_then(endpoint) else { continue };
        rows += 1;
        machine.gpu_numbered(from, input.at(number));
        for (to, word) in known.ends.iter().zip(words) {
            let Endpoint::Gpu(to) = *to else { continue };
            if word == "X" {
                continue;
            }
            let Some(status) = P2pStatus::parse(word) else {
                let message =
                    alloc::format!("cell \"{word}\"; expected X, OK, CNS, GNS, TNS, NS, DR or U");
                return Err(ReadError::new(input, number, message));
            };
            let value = P2pCell { from, to, status };
            machine.p2p.push(Fact { value, origin: input.at(number) });
        }
    }
    let columns = columns.map_or(0, |columns| columns.ends.len());
    Ok(Outcome { truncated: rows < columns })
}
