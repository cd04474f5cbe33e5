//! What the tests of model files share.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

pub mod reference;

use std::path::PathBuf;

use beeline_core::model::{Layout, Selected};

/// A file with that header text, whatever it says, and `data_len` bytes of data.
pub fn file(json: &str, data_len: usize) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json.as_bytes());
    append_data(&mut file, data_len);
    file
}

/// Appends bytes that tell their own place, so that a wrong copy shows.
pub fn append_data(file: &mut Vec<u8>, data_len: usize) {
    let mut state = 0x9e37_79b9_u32;
    file.extend((0..data_len).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    }));
}

/// The folder of public cases; `None`, with a line that says so, where it is absent.
pub fn cases() -> Option<PathBuf> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases");
    let cases = std::env::var_os("BEELINE_CASES").map_or(beside, PathBuf::from);
    if !cases.is_dir() {
        println!("SKIP cases");
        return None;
    }
    Some(cases)
}

/// Everything that a layout promises, and that moving its segments moves the right bytes.
pub fn check_layout(layout: &Layout, selected: &[Selected<'_>], files: &[Vec<u8>]) {
    const UNTOUCHED: u8 = 0xee;
    let bytes_of =
        |file: u32, start: u64, len: u64| &files[file as usize][start as usize..][..len as usize];
    let mut device = vec![UNTOUCHED; layout.total_bytes as usize];
    for segment in &layout.segments {
        assert!(!segment.is_empty());
        device[segment.device_offset as usize..][..segment.len as usize].copy_from_slice(bytes_of(
            segment.file,
            segment.file_offset,
            segment.len,
        ));
    }
    for pair in layout.segments.windows(2) {
        assert!(pair[0].join(pair[1]).is_none(), "{} and {} are one", pair[0], pair[1]);
        assert!((pair[0].file, pair[0].file_end().unwrap()) <= (pair[1].file, pair[1].file_offset));
    }
    let moved: u64 = layout.segments.iter().map(|segment| segment.len).sum();
    assert_eq!(moved, layout.entries.iter().map(|entry| entry.len).sum::<u64>());

    assert_eq!(layout.total_bytes % 256, 0);
    assert_eq!(layout.entries.len(), selected.len());
    let mut end = 0;
    for entry in &layout.entries {
        assert_eq!(entry.device_offset % 256, 0);
        assert!(entry.device_offset >= end, "{entry:?} overlaps the one before");
        let padding = &device[end as usize..entry.device_offset as usize];
        assert!(padding.len() < 256 && padding.iter().all(|&byte| byte == UNTOUCHED));
        end = entry.device_offset + entry.len;
        assert!(end <= layout.total_bytes);
        assert_eq!(entry.file_range.len, entry.len);
        assert_eq!(
            &device[entry.device_offset as usize..end as usize],
            bytes_of(entry.file, entry.file_range.start, entry.len)
        );
    }
    assert!(device[end as usize..].iter().all(|&byte| byte == UNTOUCHED));
    assert!(device.len() as u64 - end < 256);
}
