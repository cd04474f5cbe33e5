//! Random models, random damage, random patterns.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod common;

use beeline_core::model::write::{HeaderBuilder, Padding};
use beeline_core::model::{Dtype, Header, Index, Layout, Pattern, Selection, Slice};
use common::{append_data, check_layout, reference};
use proptest::collection::vec;
use proptest::prelude::*;

/// A whole file, and whether it holds a type that the reference does not know.
fn any_file() -> impl Strategy<Value = Vec<u8>> {
    let dtype = prop_oneof![
        9 => (0..Dtype::KNOWN.len()).prop_map(|index| Dtype::KNOWN[index].clone()),
        1 => "[A-Z][0-9]{1,2}_NEW".prop_map(|name| Dtype::from_name(&name)),
    ];
    let tensor = ("\\PC{0,12}", dtype, vec(0_u64..7, 0..4), 0_u64..600);
    let padding = prop_oneof![
        Just(Padding::None),
        (1_u64..300).prop_flat_map(|align| {
            (0..align).prop_map(move |remainder| Padding::To { align, remainder })
        }),
    ];
    let metadata = proptest::option::of(("\\PC{0,6}", "\\PC{0,6}"));
    (vec(tensor, 0..9), padding, metadata).prop_map(|(tensors, padding, metadata)| {
        let mut builder = HeaderBuilder::new().padding(padding);
        if let Some((key, value)) = metadata {
            builder = builder.metadata(&key, &value);
        }
        for (at, (name, dtype, mut shape, len)) in tensors.into_iter().enumerate() {
            let name = format!("{name}{at}");
            builder = match dtype.bits() {
                None => builder.tensor_with_len(&name, dtype, &shape, len).unwrap(),
                Some(bits) => {
                    if bits % 8 != 0 {
                        shape.push(4);
                    }
                    builder.tensor(&name, dtype, &shape).unwrap()
                }
            };
        }
        let mut file = builder.build().unwrap();
        append_data(&mut file, builder.data_len() as usize);
        file
    })
}

/// One edit: where (as a fraction of 2^16), what to do, with which byte.
fn edits() -> impl Strategy<Value = Vec<(u16, u8, u8)>> {
    vec((any::<u16>(), 0_u8..4, prop_oneof![any::<u8>(), vec_of(b"0123456789{}[],:\" ")]), 1..6)
}

fn vec_of(bytes: &'static [u8]) -> impl Strategy<Value = u8> {
    (0..bytes.len()).prop_map(move |index| bytes[index])
}

/// Applies the edits to the JSON part and mends the prefix, so that the damage reaches the parser.
fn damage(file: &[u8], edits: &[(u16, u8, u8)]) -> Vec<u8> {
    let len = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let (mut json, data) = (file[8..8 + len].to_vec(), &file[8 + len..]);
    for &(place, kind, byte) in edits {
        let at = usize::from(place) * json.len() / 65_536;
        match kind {
            0 if at < json.len() => json[at] = byte,
            1 if at < json.len() => drop(json.remove(at)),
            2 => json.insert(at, byte),
            _ => json.truncate(json.len() - at.min(json.len()) / 8),
        }
    }
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json);
    file.extend(data);
    file
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_valid_model_is_read_and_laid_out(file in any_file()) {
        reference::compare(&file);
        let header = Header::parse_file(&file).unwrap();
        let covered: u64 = header.tensors().iter().map(|tensor| tensor.len()).sum();
        prop_assert_eq!(covered, header.data_range().len);
        let selected = Selection::all().select(&[&header]).unwrap();
        prop_assert_eq!(selected.len(), header.tensors().len());
        check_layout(&Layout::new(&selected).unwrap(), &selected, &[file]);
    }

    #[test]
    fn every_other_tensor_is_laid_out_alone(file in any_file(), odd in any::<bool>()) {
        let header = Header::parse_file(&file).unwrap();
        let names = header.tensors().iter().map(|tensor| tensor.name());
        let left_out = names.skip(usize::from(odd)).step_by(2);
        let selection = left_out.fold(Selection::all(), |s, name| s.exclude(Pattern::exact(name)));
        let selected = selection.select(&[&header]).unwrap();
        check_layout(&Layout::new(&selected).unwrap(), &selected, &[file]);
    }

    #[test]
    fn the_shares_of_all_ranks_are_the_whole(file in any_file(), of in 1_u64..6) {
        let header = Header::parse_file(&file).unwrap();
        for tensor in header.tensors() {
            let whole = header.file_range(tensor);
            let mut next = whole.start;
            let mut rows = 0;
            for rank in 0..of {
                let selection = Selection::all()
                    .include(Pattern::exact(tensor.name()))
                    .rows(Slice::rank(rank, of).unwrap());
                let selected = match selection.select(&[&header]) {
                    Ok(selected) => selected,
                    Err(error) => {
                        let code = error.code();
                        prop_assert!(matches!(code, "slice-inside-byte" | "slice-unknown-dtype"), "{error}");
                        prop_assert!(tensor.dtype().bits().is_none_or(|bits| bits % 8 != 0), "{error}");
                        // Refused for one rank, refused for all.
                        prop_assert_eq!(rank, 0);
                        next = whole.end();
                        rows = tensor.shape()[0];
                        break;
                    }
                };
                let [part] = &selected[..] else { panic!("one tensor was asked for") };
                match tensor.shape() {
                    [] => {
                        prop_assert_eq!(part.file_range(), whole);
                        next = whole.end();
                    }
                    [_, inner @ ..] => {
                        prop_assert_eq!(part.file_range().start, next);
                        prop_assert_eq!(&part.shape()[1..], inner);
                        next = part.file_range().end();
                        rows += part.shape()[0];
                    }
                }
                check_layout(&Layout::new(&selected).unwrap(), &selected, std::slice::from_ref(&file));
            }
            prop_assert_eq!(next, whole.end());
            prop_assert_eq!(rows, tensor.shape().first().copied().unwrap_or_default());
        }
    }

    #[test]
    fn a_damaged_model_is_judged_as_the_reference_does(file in any_file(), edits in edits()) {
        let file = damage(&file, &edits);
        reference::compare(&file);
        if let Ok(header) = Header::parse_file(&file) {
            let selected = Selection::all().select(&[&header]).unwrap();
            check_layout(&Layout::new(&selected).unwrap(), &selected, &[file]);
        }
    }

    #[test]
    fn any_bytes_are_judged_as_the_reference_does(bytes in vec(any::<u8>(), 0..200), len in 0_u8..220) {
        reference::compare(&bytes);
        let mut file = bytes;
        if let Some(prefix) = file.first_chunk_mut::<8>() {
            *prefix = u64::from(len).to_le_bytes();
        }
        reference::compare(&file);
    }

    #[test]
    fn a_damaged_index_never_panics(edits in edits()) {
        let json = br#"{"metadata":{"total_size":7},"weight_map":{"b":"f1","a":"g2","c":"f1"}}"#;
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend(json);
        let damaged = damage(&file, &edits);
        match Index::parse(&damaged[8..]) {
            Ok(index) => {
                for (tensor, shard) in index.weights() {
                    prop_assert_eq!(index.shard_of(tensor), Some(shard));
                    prop_assert!(!index.shards()[shard as usize].contains('/'));
                }
            }
            Err(error) => prop_assert!(!error.to_string().contains(char::is_control)),
        }
    }

    #[test]
    fn a_glob_matches_what_the_naive_matcher_does(
        pattern in "([ab?*]|\\[!?[ab]{1,2}\\]|\\[a-b\\]){0,8}",
        name in "[abc]{0,10}",
    ) {
        let glob = Pattern::glob(&pattern).unwrap();
        let tokens: Vec<char> = pattern.chars().collect();
        let chars: Vec<char> = name.chars().collect();
        prop_assert_eq!(glob.matches(&name), naive(&tokens, &chars), "{} {}", pattern, name);
    }

    #[test]
    fn any_text_as_a_glob_is_harmless(pattern in "\\PC{0,20}", name in "\\PC{0,20}") {
        if let Ok(glob) = Pattern::glob(&pattern) {
            glob.matches(&name);
        }
        prop_assert!(Pattern::exact(&name).matches(&name));
    }
}

/// The definition of a glob, written down without a thought for time.
fn naive(pattern: &[char], name: &[char]) -> bool {
    match (pattern, name) {
        ([], _) => name.is_empty(),
        (['*', rest @ ..], _) => (0..=name.len()).any(|taken| naive(rest, &name[taken..])),
        (_, []) => false,
        (['?', rest @ ..], [_, name @ ..]) => naive(rest, name),
        (['[', rest @ ..], [c, name @ ..]) => {
            let close = rest.iter().position(|&c| c == ']').unwrap();
            let (set, rest) = (&rest[..close], &rest[close + 1..]);
            let (negated, set) = match set {
                ['!', set @ ..] => (true, set),
                set => (false, set),
            };
            let member = match set {
                [first, '-', last] => (first..=last).contains(&c),
                set => set.contains(c),
            };
            member != negated && naive(rest, name)
        }
        ([literal, rest @ ..], [c, name @ ..]) => literal == c && naive(rest, name),
    }
}
