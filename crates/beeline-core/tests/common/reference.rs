//! The safetensors crate as the judge of our reading: the same files, the same ranges.
//!
//! The fuzz targets include this file as well.

use beeline_core::model::{Dtype, Header};
use safetensors::SafeTensors;
use serde_json::Value;

/// What the reference accepts and we refuse, by error code: what the format forbids and the
/// reference lets pass, and our bound on dimensions.
const STRICTER: &[&str] = &[
    // "Duplicate keys are disallowed."
    "duplicate-tensor",
    "duplicate-metadata",
    // More than 64 dimensions.
    "rank-too-large",
    // An entry written as an array, a dtype written as an object.
    "bad-entry",
];

/// Reads `file` with both; panics where they disagree in a way that is not documented.
pub fn compare(file: &[u8]) {
    match (Header::parse_file(file), SafeTensors::deserialize(file)) {
        (Ok(ours), Ok(theirs)) => compare_tensors(file, &ours, &theirs),
        (Err(ours), Ok(_)) => {
            assert!(STRICTER.contains(&ours.code()), "the reference accepts, we say: {ours}");
        }
        (Ok(ours), Err(theirs)) => {
            assert!(is_more(file, &ours), "we accept, the reference says: {theirs}");
        }
        (Err(_), Err(_)) => {}
    }
}

fn compare_tensors(file: &[u8], ours: &Header, theirs: &SafeTensors<'_>) {
    assert_eq!(ours.tensors().len(), theirs.len());
    for (name, view) in theirs.iter() {
        let tensor = ours.get(name).unwrap_or_else(|| panic!("we lack {name:?}"));
        let range = ours.file_range(tensor);
        assert_eq!(&file[range.start as usize..range.end() as usize], view.data(), "{name:?}");
        // Equal bytes may lie in two places: compare the place as well.
        assert_eq!(
            range.start as usize,
            view.data().as_ptr() as usize - file.as_ptr() as usize,
            "{name:?}"
        );
        assert!(tensor.shape().iter().copied().eq(view.shape().iter().map(|&dim| dim as u64)));
        assert_eq!(tensor.dtype().name(), view.dtype().to_string());
    }
    let (_, metadata) = SafeTensors::read_metadata(file).unwrap_or_else(|error| panic!("{error}"));
    let theirs: std::collections::BTreeMap<_, _> =
        metadata.metadata().clone().unwrap_or_default().into_iter().collect();
    assert_eq!(ours.metadata(), &theirs);
}

/// What we accept and the reference refuses: an element type that it does not know, and fields of an
/// entry that neither knows, whose value we skip unread and it reads.
fn is_more(file: &[u8], ours: &Header) -> bool {
    if ours.tensors().iter().any(|tensor| matches!(tensor.dtype(), Dtype::Other(_))) {
        return true;
    }
    let json = &file[8..ours.data_range().start as usize];
    match serde_json::from_slice::<Value>(json) {
        Ok(Value::Object(entries)) => entries.iter().any(|(name, entry)| {
            name != "__metadata__" && entry.as_object().is_some_and(|entry| entry.len() > 3)
        }),
        // A document cannot be built of it, but it can be skipped: nested too deeply, or a number
        // that no float holds.
        _ => true,
    }
}
