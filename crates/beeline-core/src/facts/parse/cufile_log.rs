//! Statements of cufile.log.

use alloc::string::ToString;

use super::super::bdf::Bdf;
use super::super::event::Event;
use super::super::machine::{Known, Machine};
use super::scan::{Line, Table};
use super::text::{after, number, number_after, signed_after, word_after};

/// Lines start with `dd-mm-yyyy hh:mm:ss:ms [pid=N tid=N] LEVEL  module:line`.
pub(super) fn recognise(head: &str) -> bool {
    head.lines().filter(|line| !line.trim().is_empty()).take(20).any(|line| {
        let stamped = line.trim_start().bytes().take(10).filter(|b| *b == b'-').count() == 2;
        stamped && line.contains(" [pid=") && line.contains(" tid=")
    })
}

pub(super) const PHRASES: &Table = &[
    ("NVMe Driver not registered with nvidia-fs", |machine, line| {
        machine.event(Event::NvmeNotRegistered, line.at);
    }),
    ("using cuFile posix read/write", |machine, line| machine.event(Event::CompatUsed, line.at)),
    ("running in compatible mode", |machine, line| machine.event(Event::CompatMode, line.at)),
    ("dumping volume attributes: ", volume),
    ("numa_run_on_node encountered error", numa),
    (".so", library),
    ("cuFileDriverOpen error", init_failed),
    ("cuFile initialization failed", init_failed),
    ("cuInit Failed", init_failed),
    ("Inc-bar-usage failed", bar),
    ("error creating udev_device for block device", udev),
    ("Config doesn't support PCIP2PDMA", |machine, line| {
        machine.event(Event::P2pDmaOffByConfig, line.at);
    }),
    ("pci_p2pdma not supported", p2pdma),
    ("block device supported by cufile", supported),
    ("Block dev: /dev/", block_dev),
    ("nvidia_peermem.ko is not loaded", |machine, line| {
        machine.event(Event::CufilePeermemMissing, line.at);
    }),
    ("No matching pair for network device", |machine, line| {
        machine.event(Event::CufileNoNicPair, line.at);
    }),
];

/// Name without `/dev/`.
fn device_name(path: &str) -> &str {
    path.strip_prefix("/dev/").unwrap_or(path)
}

fn volume(machine: &mut Machine, line: &Line<'_>) {
    let Some(list) = after(line.text, "dumping volume attributes: ") else { return };
    let field = |name: &str| {
        list.split(',').find_map(|part| part.trim().strip_prefix(name)?.strip_prefix(':'))
    };
    let Some(name) = field("DEVNAME").map(device_name).filter(|name| !name.is_empty()) else {
        return;
    };
    if machine.platform.blocks.len() >= 4096 {
        return;
    }
    let numa = field("numa_node").and_then(|text| text.parse().ok());
    let logical = field("queue/logical_block_size").and_then(|text| text.parse().ok());
    let block = machine.platform.blocks.entry(name.to_string()).or_default();
    if let Some(fs) = field("ID_FS_TYPE") {
        block.fs.learn(fs.to_string(), line.at);
    }
    if let Some(mode) = field("ext4_journal_mode") {
        block.journal.learn(mode.to_string(), line.at);
    }
    if let Some(numa) = numa {
        block.numa.learn(numa, line.at);
    }
    if let Some(logical) = logical {
        block.logical_bytes.learn(logical, line.at);
    }
}

fn numa(machine: &mut Machine, line: &Line<'_>) {
    let values = signed_after(line.text, "for node ").zip(signed_after(line.text, "errno "));
    if let Some((Ok(node), Ok(errno))) = values.map(|(n, e)| (i32::try_from(n), i32::try_from(e))) {
        machine.event(Event::NumaBindFailed { node, errno }, line.at);
    }
}

/// A loader error; `Loaded successfully` and mere mentions of a library are not one.
fn library(machine: &mut Machine, line: &Line<'_>) {
    let failed = line.text.contains("cannot open shared object file")
        || line.text.contains("unable to load")
        || line.text.contains("failed to load")
        || line.text.contains("Failed to load")
        || line.text.contains("could not be loaded");
    if !failed || !line.text.contains("ERROR") {
        return;
    }
    let name = line.text.split(|c: char| c.is_whitespace() || matches!(c, ':' | ',' | '\'' | '"'));
    if let Some(name) = name.map(|w| w.trim_matches(['(', ')'])).find(|w| w.contains(".so")) {
        let library = name.rsplit('/').next().unwrap_or(name).to_string();
        machine.event(Event::LibraryMissing { library }, line.at);
    }
}

fn init_failed(machine: &mut Machine, line: &Line<'_>) {
    machine.event(Event::CufileInitFailed, line.at);
}

fn bar(machine: &mut Machine, line: &Line<'_>) {
    let values = number_after(line.text, "size ").zip(number_after(line.text, "remaining bytes "));
    if let Some((need, have)) = values {
        machine.event(Event::Bar1Exhausted { need, have }, line.at);
    }
}

fn udev(machine: &mut Machine, line: &Line<'_>) {
    let numbers = after(line.text, "dev_no: ").and_then(|rest| rest.split_once(':'));
    let Some((Some(major), Some(minor))) = numbers.map(|(a, b)| (number(a), number(b))) else {
        return;
    };
    if let (Ok(major), Ok(minor)) = (u32::try_from(major), u32::try_from(minor)) {
        machine.event(Event::NoUdevDevice { major, minor }, line.at);
    }
}

fn p2pdma(machine: &mut Machine, line: &Line<'_>) {
    let error = signed_after(line.text, "errornum: ").and_then(|error| i32::try_from(error).ok());
    machine.event(Event::P2pDmaNotSupported { error: error.unwrap_or(0) }, line.at);
}

fn supported(machine: &mut Machine, line: &Line<'_>) {
    let device = word_after(line.text, "bdev : ").map(device_name).unwrap_or("").to_string();
    let module = word_after(line.text, "module ").unwrap_or("").to_string();
    machine.event(Event::BlockDeviceSupported { device, module }, line.at);
}

/// `Block dev: /dev/nvme0n1p4 numa node: 1 pci bridge: 0000:85:02.0`.
fn block_dev(machine: &mut Machine, line: &Line<'_>) {
    let Some(name) = word_after(line.text, "Block dev: ").map(device_name) else { return };
    if machine.platform.blocks.len() >= 4096 {
        return;
    }
    let numa = signed_after(line.text, "numa node: ").and_then(|node| i32::try_from(node).ok());
    let bridge = word_after(line.text, "pci bridge: ").and_then(Bdf::parse);
    let block = machine.platform.blocks.entry(name.to_string()).or_default();
    if let Some(numa) = numa {
        block.numa.learn(numa, line.at);
    }
    if let Some(bridge) = bridge {
        block.controller.learn(bridge, line.at);
    }
}
