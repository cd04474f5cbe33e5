//! What is fuzzed, as plain functions: each takes any bytes, and panics where the code under test
//! breaks a promise.
//!
//! [`TARGETS`] lists them for `smoke`, which runs on stable Rust. `fuzz_targets/` gives each to
//! libFuzzer under cargo-fuzz. A new target is a function here, a row in the table, a file in
//! `fuzz_targets/` and some inputs in `seeds/`.

pub mod mutate;

#[path = "connected.rs"]
mod connected_target;

#[path = "../../crates/beeline-core/tests/common/mod.rs"]
mod common;

extern crate alloc;

use std::path::{Component, Path};

use beeline_core::addr::ByteRange;
use beeline_core::checks;
use beeline_core::facts::{Machine, json, read};
use beeline_core::model::{Header, Index, Layout, Pattern, Selection, Slice};
use beeline_core::segment::Segment;
use beeline_core::topology::diff;
use beeline_core::topology::view::view;
use beeline_core::transfer::{CHUNKS_MAX, Grid, split, split_write};
// By the names that the shared test files use.
use beeline_core::{addr, mr, rc, roce, time};
use mutate::Frame;

/// One thing that is fuzzed.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, also that of its folder in `seeds/`.
    pub name: &'static str,
    /// Runs one input; panics where a promise is broken.
    pub run: fn(&[u8]),
    /// What holds a mutated input together.
    pub frame: Frame,
    /// Pieces of its language, which random bytes would hardly hit upon.
    pub dictionary: &'static [&'static str],
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "safetensors_header",
        run: safetensors_header,
        frame: Frame::LengthPrefixed,
        dictionary: HEADER_WORDS,
    },
    Target {
        name: "safetensors_index",
        run: safetensors_index,
        frame: Frame::Plain,
        dictionary: INDEX_WORDS,
    },
    Target { name: "glob", run: glob, frame: Frame::Plain, dictionary: GLOB_WORDS },
    Target { name: "facts", run: facts, frame: Frame::Plain, dictionary: FACTS_WORDS },
    Target {
        name: "machine_json",
        run: machine_json,
        frame: Frame::Plain,
        dictionary: MACHINE_WORDS,
    },
    Target { name: "pci_config", run: pci_config, frame: Frame::Plain, dictionary: &[] },
    Target { name: "transfer", run: transfer, frame: Frame::Plain, dictionary: &[] },
    Target { name: "connected", run: connected, frame: Frame::Plain, dictionary: &[] },
];

const FACTS_WORDS: &[&str] = &[
    "GPU0",
    "NIC0",
    "NV18",
    " X ",
    "PIX",
    "\t",
    "<system version=\"1\">",
    "<cpu numaid=\"0\">",
    "<pci busid=\"0000:01:00.0\" class=\"0x060400\">",
    "<gpu dev=\"0\"/>",
    "<graphs>",
    "<topology version=\"2.0\">",
    "</pci>",
    "</cpu>",
    "</system>",
    "0000:01:00.0",
    " PCI bridge: ",
    "\tBus: primary=00, secondary=01, subordinate=02",
    "\t\tACSCtl:\tReqRedir+",
    "-[0000:00]-+-",
    "\\-00.0-[01]--",
    "hca_id:\tmlx5_0",
    "\t\tport:\t1",
    "GID[  3]:",
    " NCCL INFO ",
    "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA",
    "Unknown symbol x (err -22)",
    "IO_PAGE_FAULT",
    "[pid=1 tid=1] ERROR ",
    "GDS release version: 1",
    "DRIVER CONFIGURATION:",
    "{\"properties\": {",
    "// ",
    "/*",
    "NAME=",
    "[    1.000000] ",
    "Personalities : ",
    "md0 : active raid0 a[0]",
    "Max locked memory ",
];

const MACHINE_WORDS: &[&str] = &[
    "{\"version\": 1",
    "\"sources\": []",
    "\"pci\": {\"0000:01:00.0\": {",
    "\"parent\": {\"value\": {\"bridge\": \"0000:00:01.0\"}",
    "\"origin\": [0, 1]",
    "\"gpus\": [{",
    "\"matrix\": [",
    "\"events\": [[{\"event\": \"dma-buf-available\"}, {",
    "\"nics\": {\"a\": {",
    "65535",
    "4294967295",
    "-1",
    "null",
    "}",
    "]",
    ",",
];

const HEADER_WORDS: &[&str] = &[
    "\"__metadata__\"",
    "\"dtype\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"F32\"",
    "\"BF16\"",
    "\"F4\"",
    "\"F6_E2M3\"",
    "\"C64\"",
    "\"F99\"",
    "[]",
    "[0]",
    "[2,3]",
    "[0,0]",
    "[0,16]",
    "{}",
    "null",
    "true",
    "\"\\ud800\"",
    "\"\\u0061\"",
    "1e3",
    "-0",
    "1.0",
    ",",
    ":",
    " \n\t",
    "18446744073709551615",
    "9223372036854775807",
    "[1,1,1,1,1,1,1,1]",
    "{\"a\":{\"a\":[[[]]]}}",
    "\"w\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
];

const INDEX_WORDS: &[&str] = &[
    "\"weight_map\"",
    "\"metadata\"",
    "\"total_size\"",
    "\"a\":\"m-1.safetensors\",",
    "\"..\"",
    "\"../x\"",
    "\"/\"",
    "\"\\u0000\"",
    "\"\\\\\"",
    "{}",
    "[]",
    "null",
    "1e300",
    "7.0",
    "-1",
    "18446744073709551616",
    ",",
    ":",
];

const GLOB_WORDS: &[&str] = &[
    "*",
    "**",
    "?",
    "[",
    "]",
    "[!",
    "[a-z]",
    "[]]",
    "[!]]",
    "[-a]",
    "a-",
    "\n",
    "model.layers.",
    ".weight",
    "é",
];

/// A whole file: judged as the reference implementation judges it, and laid out, whole and in the
/// shares of three ranks, so that every byte arrives in its place.
pub fn safetensors_header(data: &[u8]) {
    common::reference::compare(data);
    let Ok(header) = Header::parse_file(data) else { return };
    let _ = header.misaligned();
    let files = [data.to_vec()];
    let ranks = (0..3).filter_map(|rank| Slice::rank(rank, 3).ok());
    for slice in ranks.chain([Slice::whole()]) {
        let selected = match Selection::all().rows(slice).select(&[&header]) {
            Ok(selected) => selected,
            Err(error) => {
                assert!(slice != Slice::whole(), "a whole load is always possible: {error}");
                continue;
            }
        };
        let layout = Layout::new(&selected).unwrap_or_else(|error| panic!("{error}"));
        common::check_layout(&layout, &selected, &files);
    }
}

/// The text of an index: what it names stays in its directory, and what it holds is found.
pub fn safetensors_index(data: &[u8]) {
    let index = match Index::parse(data) {
        Ok(index) => index,
        Err(error) => {
            assert!(!error.to_string().contains(char::is_control));
            return;
        }
    };
    for shard in index.shards() {
        let parts: Vec<_> = Path::new(&**shard).components().collect();
        assert!(matches!(parts[..], [Component::Normal(_)]), "{shard:?} leaves the directory");
    }
    for (tensor, shard) in index.weights() {
        assert_eq!(index.shard_of(tensor), Some(shard));
        assert!((shard as usize) < index.shards().len());
    }
    let listing = index.check_listing(index.shards().iter().map(|shard| &**shard));
    assert!(listing.is_ok_and(|findings| findings.is_empty()));
    let empty: &[Header] = &[];
    assert_eq!(index.check(&empty.iter().collect::<Vec<_>>()).is_ok(), index.shards().is_empty());
}

/// A pattern, a newline, and a name: what matches still matches when both are made wider.
pub fn glob(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (pattern, name) = text.split_once('\n').unwrap_or((&text, ""));
    assert!(Pattern::exact(name).matches(name));
    assert!(!Pattern::exact(name).matches(&format!("{name}x")));
    let Ok(glob) = Pattern::glob(pattern) else { return };
    let matches = glob.matches(name);
    let wider = [
        (format!("{pattern}*"), format!("{name}tail")),
        (format!("*{pattern}"), format!("head{name}")),
        (format!("{pattern}?"), format!("{name}é")),
        (format!("x{pattern}"), format!("x{name}")),
    ];
    for (pattern, name) in wider {
        if let Ok(glob) = Pattern::glob(&pattern) {
            assert!(!matches || glob.matches(&name), "{pattern:?} should match {name:?}");
        }
    }
}

/// Splits a request into chunks: two bytes of grid, then 18 bytes a segment (file and shape of its
/// numbers, file offset, device offset, length as 8, 4 and 4 bytes).
///
/// Promises: whatever is accepted goes exactly once, inside its buffer, on the grid; writes never
/// share a page between a direct and a buffered part.
pub fn transfer(data: &[u8]) {
    let Some((&[slot, block], rest)) = data.split_first_chunk() else { return };
    // Large slots, so that an input is a handful of chunks and not a million.
    let grid = Grid { slot_bytes: 1 << (12 + slot % 16), block_bytes: 1 << (block % 28) };
    let segments: Vec<Segment> = rest.chunks_exact(18).filter_map(segment).collect();
    let chunks =
        segments.iter().map(|part| part.len / grid.slot_bytes).fold(0, u64::saturating_add);
    if (10_000..CHUNKS_MAX as u64).contains(&chunks) {
        return; // Right, but it takes the time of a thousand other inputs.
    }
    let Ok(transfer) = split(&segments, grid) else { return };
    let mut moved = 0;
    for chunk in &transfer.chunks {
        assert!(chunk.span.contains(chunk.want) && chunk.span.len <= grid.slot_bytes);
        assert!(chunk.span.start.is_multiple_of(grid.block_bytes));
        assert!(chunk.span.len.is_multiple_of(grid.block_bytes));
        let pieces = &transfer.pieces[chunk.pieces.clone()];
        assert_eq!(pieces.iter().map(|piece| piece.len).sum::<u64>(), chunk.bytes);
        for piece in pieces {
            let start = chunk.span.start + piece.slot_offset;
            assert!(chunk.want.contains(ByteRange { start, len: piece.len }));
        }
        moved += chunk.bytes;
        let parts = split_write(chunk.want, 4096);
        assert_eq!(parts.head.len + parts.middle.len + parts.tail.len, chunk.want.len);
        assert!(parts.middle.is_empty() || parts.middle.start.is_multiple_of(4096));
        assert!(parts.middle.is_empty() || parts.middle.len.is_multiple_of(4096));
    }
    assert_eq!(moved, transfer.bytes);
    assert_eq!(moved, segments.iter().map(|part| part.len).sum::<u64>());
}

fn segment(bytes: &[u8]) -> Option<Segment> {
    let (&[file, shape], rest) = bytes.split_first_chunk()?;
    let (offset, rest) = rest.split_first_chunk::<8>()?;
    let (device, rest) = rest.split_first_chunk::<4>()?;
    let len = u64::from(u32::from_le_bytes(*rest.first_chunk()?));
    // Mostly numbers that fit each other; sometimes such as only an attacker would write.
    let wild = shape & 7 == 0;
    let file_offset = u64::from_le_bytes(*offset) >> if wild { 0 } else { 32 };
    let len = if wild { len << 32 } else { len >> 14 };
    let device_offset = u64::from(u32::from_le_bytes(*device));
    Some(Segment { file: u32::from(file % 3), file_offset, device_offset, len })
}

/// Any input that doctor recognises: parsing, checks, topology, redaction and saving never panic, and what
/// is saved with personal values reads back as it was.
pub fn facts(data: &[u8]) {
    let mut machine = Machine::new();
    if read(&mut machine, "input", data).is_err() {
        assert_eq!(machine, Machine::new(), "a refused input leaves nothing behind");
        return;
    }
    machine.unify();
    judge(&machine);
    let saved = json::save(&machine, true).expect("a record can be saved");
    assert_eq!(json::load(&saved).expect("what was saved can be loaded"), machine);
    let private = json::save(&machine, false).expect("a record can be saved");
    judge(&json::load(&private).expect("what was redacted can be loaded"));
}

/// A saved record that nobody saved.
pub fn machine_json(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(mut machine) = json::load(text) {
        machine.unify();
        judge(&machine);
        diff(&machine, &Machine::new());
    }
}

fn judge(machine: &Machine) {
    for path in checks::run(machine).paths {
        assert!(path.level < checks::Level::Verified, "facts never verify a path");
    }
    view(machine);
}

/// A configuration space of any length and content.
pub fn pci_config(data: &[u8]) {
    let config = beeline_core::facts::pci_config::decode(data);
    assert_eq!(config.hidden, data.len() <= 64);
}

/// Choices for packets, work requests and disturbances between two connected queue pairs: nothing
/// panics, and no byte is touched outside a granted region.
pub fn connected(data: &[u8]) {
    connected_target::run(data);
}
