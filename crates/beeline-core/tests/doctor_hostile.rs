//! Hostile input: an error with a line number, in linear time, and never a panic.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod doctor_common;

use std::fmt::Write as _;
use std::fs;

use beeline_core::checks;
use beeline_core::facts::{Kind, Machine, json, read};
use beeline_core::topology::view::view;
use proptest::prelude::*;

fn refused(text: &[u8], line: u32, part: &str) {
    let mut machine = Machine::new();
    let error = read(&mut machine, "input", text).unwrap_err();
    assert_eq!(machine, Machine::new(), "a refused input leaves nothing behind");
    assert!(error.message.contains(part), "{error}");
    assert_eq!(error.line, line, "{error}");
}

#[test]
fn broken_input_is_refused_with_its_line() {
    refused(b"", 1, "empty file");
    refused(b"hello\nworld\n", 1, "text of no known tool; expected one of");
    refused(b"\n\n<html/>", 3, "XML whose root is none of");
    refused(b"{\"name\": 1}", 1, "JSON that is neither");
    refused(b"# nccl\nNCCL_DEBUG=INFO\n\xff\xfe\n", 3, "not UTF-8");
    refused(b"<system version=\"1\">\n<cpu numaid=\"0\">\n</system>", 3, "broken XML");
    refused(b"<system version=\"1\">\n<cpu numaid=\"x\"/>\n</system>", 2, "is not a number");
    refused(
        b"<system version=\"1\"><cpu numaid=\"0\">\n<pci busid=\"zz\"/></cpu></system>",
        2,
        "not a PCI address",
    );
    refused(b"<!DOCTYPE x [\n<!ENTITY a \"b\">]>\n<system/>", 2, "entity");
    refused(b"<topology version=\"1.11\"/>", 1, "expected version 2 or 3");
    refused(b"{\n\"properties\": {\n\"a\": }\n}", 3, "broken JSON");
    refused(b"\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tFAR\t X \n", 3, "expected X, NV#");
    refused(b"00:00.0 Host bridge: x\nnot a device\n", 2, "as lspci prints it");
    refused(b"00:02.0 PCI bridge: x\n\tBus: primary=00, secondary=01, subordinate=01\n01:00.0 PCI bridge: y\n\tBus: primary=01, secondary=01, subordinate=01\n", 3, "above itself");
    refused(b"-[0000:00]-+-00.0  a\n           +-zz  b\n", 2, "expected a branch");
    refused(b"hca_id:\tmlx5_0\n\tport:\tone\n", 2, "not a number");
    refused(b"Character devices:\n  x mem\n", 2, "major name");
}

#[test]
fn depth_width_and_cycles_are_bounded() {
    let mut deep = String::from("<system version=\"1\"><cpu numaid=\"0\">\n");
    for _ in 0..100_000 {
        deep.push_str("<pci busid=\"0000:01:00.0\" class=\"0x060400\">\n");
    }
    refused(deep.as_bytes(), 64, "nested deeper than 64");

    let mut wide = String::from("<system version=\"1\"><cpu numaid=\"0\" ");
    for index in 0..100_000 {
        write!(wide, "a{index}=\"1\" ").unwrap();
    }
    wide.push_str("/></system>");
    refused(wide.as_bytes(), 1, "attributes");

    let mut many = String::from("<system version=\"1\"><cpu numaid=\"0\">");
    for index in 0..20_000u32 {
        write!(many, "<pci busid=\"{index:04x}:00:00.0\" class=\"0x030200\"/>").unwrap();
    }
    many.push_str("</cpu></system>");
    refused(many.as_bytes(), 1, "more than 16384 functions");

    // A bridge inside itself: the same address nested.
    let cycle = "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0:1:0.0\" class=\"0x060400\">\
        <pci busid=\"0:2:0.0\" class=\"0x060400\"><pci busid=\"0:1:0.0\" class=\"0x060400\">\
        <pci busid=\"0:3:0.0\" class=\"0x030200\"/></pci></pci></pci></cpu></system>";
    let mut machine = Machine::new();
    read(&mut machine, "cycle", cycle.as_bytes()).unwrap();
    machine.unify();
    checks::run(&machine);

    let mut parents = Machine::new();
    let (a, b) = ("0000:01:00.0".parse().unwrap(), "0000:02:00.0".parse().unwrap());
    let origin = beeline_core::facts::Origin::default();
    for (child, parent) in [(a, b), (b, a)] {
        let fact = beeline_core::facts::Fact {
            value: beeline_core::facts::Parent::Bridge(parent),
            origin,
        };
        parents.pci_at(child).parent = Some(fact);
        parents.gpu_at(child, origin);
    }
    checks::run(&parents);
    view(&parents);
}

#[test]
fn saved_records_are_versioned() {
    for (text, line, part) in [
        ("{\"version\": 99}", 0, "version 99"),
        ("{}", 0, "no \"version\""),
        ("{\n\"version\": 1,\n\"sources\": 3}", 3, "not a saved machine record"),
        ("[", 1, "not a saved machine record"),
    ] {
        let error = json::load(text).unwrap_err();
        assert!(error.message.contains(part) && error.line == line, "{error}");
    }
}

/// Every text of the project's own inputs.
fn corpus() -> Vec<Vec<u8>> {
    let mut texts: Vec<Vec<u8>> = Vec::new();
    for entry in fs::read_dir(doctor_common::fixtures()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            texts.push(fs::read(path).unwrap());
        }
    }
    texts.sort();
    texts
}

/// Parses, checks and shows whatever is accepted.
fn digest(bytes: &[u8]) {
    let mut machine = Machine::new();
    if read(&mut machine, "input", bytes).is_ok() {
        machine.unify();
        checks::run(&machine);
        view(&machine);
        let saved = json::save(&machine, false).unwrap();
        json::load(&saved).unwrap();
    }
}

#[test]
fn every_prefix_of_an_input_is_handled() {
    for text in corpus() {
        let step = (text.len() / 12).max(1);
        for end in (0..text.len()).step_by(step) {
            digest(&text[..end]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_inputs_never_panic(
        pick in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..12),
    ) {
        let corpus = corpus();
        let mut text = corpus[pick.index(corpus.len())].clone();
        for (place, byte, kind) in edits {
            if text.is_empty() { break; }
            let at = place.index(text.len());
            match kind {
                0 => text[at] = byte,
                1 => text.insert(at, byte),
                2 => { text.remove(at); }
                _ => { let tail = text[at..].to_vec(); text.extend(tail); }
            }
            text.truncate(1 << 16);
        }
        digest(&text);
    }
}

#[test]
fn a_large_log_folds_into_few_events() {
    let mut log = String::new();
    for index in 0..200_000u32 {
        writeln!(
            log,
            "host{}:1:{index} [0] NCCL INFO Channel {:02}/0 : {index}[0] -> 0[1] [send] via NET/IB/{}/GDRDMA",
            index % 3, index % 32, index % 4
        )
        .unwrap();
    }
    let mut machine = Machine::new();
    assert_eq!(read(&mut machine, "big.log", log.as_bytes()).unwrap(), Kind::NcclLog);
    assert_eq!(machine.events.len(), 12);
    assert_eq!(machine.events.values().map(|seen| seen.count).sum::<u64>(), 200_000);

    // Distinct events beyond the bound are counted, not kept.
    let mut many = String::new();
    for index in 0..20_000u32 {
        writeln!(many, "[    1.000000] m{index}: Unknown symbol s{index} (err 0)").unwrap();
    }
    let mut machine = Machine::new();
    read(&mut machine, "many.log", many.as_bytes()).unwrap();
    assert_eq!(machine.events.len(), 8192);
    assert_eq!(machine.events_dropped, 20_000 - 8192);
}
