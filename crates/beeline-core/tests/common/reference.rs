//! The safetensors crate as the judge of our reading: the same files, the same ranges.
//!
//! The fuzz targets include this file as well.

use std::fmt;

use beeline_core::model::{Dtype, Header};
use safetensors::SafeTensors;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
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
            let documented = STRICTER.contains(&ours.code()) || has_name_twice(file);
            assert!(documented, "the reference accepts, we say: {ours}");
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
    let theirs = metadata.metadata().clone().unwrap_or_default();
    assert_eq!(ours.metadata().len(), theirs.len());
    for (key, value) in &theirs {
        assert_eq!(ours.metadata().get(key), Some(value.as_str()), "{key:?}");
    }
}

/// Whether a name stands twice. The reference never looks at the first of two entries, so any fault
/// of it passes there.
fn has_name_twice(file: &[u8]) -> bool {
    let Ok(len) = Header::len_from_prefix(file.first_chunk().unwrap_or(&[0; 8]), u64::MAX) else {
        return false;
    };
    let json = file.get(8..8 + len as usize).unwrap_or_default();
    serde_json::from_slice::<Names>(json).is_ok_and(|mut names| {
        names.0.sort();
        names.0.windows(2).any(|pair| pair[0] == pair[1])
    })
}

/// The keys of an object, in their order and as often as they stand.
struct Names(Vec<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_map(NamesVisitor)
    }
}

struct NamesVisitor;

impl<'de> Visitor<'de> for NamesVisitor {
    type Value = Names;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
        let mut names = Vec::new();
        while let Some((name, IgnoredAny)) = map.next_entry::<String, _>()? {
            names.push(name);
        }
        Ok(Names(names))
    }
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
