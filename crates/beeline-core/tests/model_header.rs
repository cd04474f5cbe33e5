//! Headers against the public vectors and against every fault the format knows.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod common;

use std::fs;

use beeline_core::model::write::{HeaderBuilder, Padding};
use beeline_core::model::{Dtype, Header};
use common::{cases, file, reference};

/// What a file should turn out to be: tensors as `name dtype shape start+len`, or an error code.
fn outcome(file: &[u8]) -> Result<Vec<String>, &'static str> {
    reference::compare(file);
    let header = Header::parse_file(file).map_err(|error| {
        let text = error.to_string();
        assert!(text.len() < 1500 && !text.contains(char::is_control), "{text}");
        error.code()
    })?;
    let describe = |tensor| {
        let range = header.file_range(tensor);
        format!("{} {} {:?} {range}", tensor.name(), tensor.dtype(), tensor.shape())
    };
    Ok(header.tensors().iter().map(describe).collect())
}

type Expected = Result<&'static [&'static str], &'static str>;

fn check(what: &str, file: &[u8], expected: Expected) {
    let expected = expected.map(|tensors| tensors.iter().map(ToString::to_string).collect());
    assert_eq!(outcome(file), expected, "{what}");
}

#[test]
fn the_public_vectors() {
    let Some(cases) = cases() else { return };
    let table: &[(&str, Expected)] = &[
        ("fastsafetensors-a.safetensors", Ok(&["a0 F16 [16, 8] 104+256"])),
        ("hf-empty-file.safetensors", Err("file-too-short")),
        ("hf-nbytes-overflow.safetensors", Err("size-overflow")),
        ("hf-no-tensors-meta.safetensors", Ok(&[])),
        ("hf-no-tensors.safetensors", Ok(&[])),
        ("hf-non-utf8.safetensors", Err("bad-utf8")),
        ("hf-not-json.safetensors", Err("bad-json")),
        ("hf-ok-i32-2x2.safetensors", Ok(&["test I32 [2, 2] 68+16"])),
        ("hf-scalar-empty-shape.safetensors", Ok(&["test I32 [] 64+4"])),
        ("hf-short-data.safetensors", Err("missing-bytes")),
        ("hf-trailing-bytes.safetensors", Err("trailing-bytes")),
        ("hf-ws-padded.safetensors", Ok(&[])),
    ];
    let folder = cases.join("files/safetensors");
    for (name, expected) in table {
        check(name, &fs::read(folder.join(name)).unwrap(), *expected);
    }
    for entry in fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(table.iter().any(|(known, _)| *known == name), "{name} has no expected answer");
    }
    let read = |name: &str| Header::parse_file(&fs::read(folder.join(name)).unwrap());
    let meta = |name: &str, key| read(name).unwrap().metadata().get(key).map(String::from);
    assert_eq!(meta("hf-no-tensors-meta.safetensors", "framework"), Some("pt".into()));
    assert_eq!(meta("fastsafetensors-a.safetensors", "fst"), Some("sample".into()));
    let text = read("hf-trailing-bytes.safetensors").unwrap_err().to_string();
    assert!(text.starts_with("34 bytes trail after the last tensor"), "{text}");
    let text = read("hf-short-data.safetensors").unwrap_err().to_string();
    assert!(text.starts_with("2 bytes are missing: tensor 'test' ends at 16"), "{text}");
}

/// One row: header text, bytes of data, what it is.
#[test]
fn every_rule_of_the_format() {
    let table: &[(&str, usize, Expected)] = &[
        // Shapes.
        (r#"{"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}"#, 8, Ok(&["s F64 [] 61+8"])),
        (
            r#"{"e":{"dtype":"I32","shape":[2,0],"data_offsets":[0,0]}}"#,
            0,
            Ok(&["e I32 [2, 0] 64+0"]),
        ),
        (
            r#"{"e":{"dtype":"I32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}"#,
            0,
            Ok(&["e I32 [0, 18446744073709551615] 83+0"]),
        ),
        (
            r#"{"e":{"dtype":"I32","shape":[2,18446744073709551615,0],"data_offsets":[0,0]}}"#,
            0,
            Err("shape-overflow"),
        ),
        (
            r#"{"e":{"dtype":"I32","shape":[2,18446744073709551614],"data_offsets":[0,16]}}"#,
            16,
            Err("shape-overflow"),
        ),
        (r#"{"e":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#, 1, Err("bad-entry")),
        (r#"{"e":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}"#, 1, Err("bad-entry")),
        (
            r#"{"e":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}}"#,
            1,
            Err("bad-entry"),
        ),
        (r#"{"e":{"dtype":"U8","shape":4,"data_offsets":[0,4]}}"#, 4, Err("bad-entry")),
        // Offsets.
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}"#, 2, Err("offsets-reversed")),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#, 3, Err("data-hole")),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}"#,
            4,
            Err("data-hole"),
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
            3,
            Err("data-overlap"),
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
            2,
            Err("data-overlap"),
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,18446744073709551615]}}"#,
            2,
            Err("size-mismatch"),
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#,
            2,
            Err("missing-bytes"),
        ),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,3]}}"#, 3, Err("size-mismatch")),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0]}}"#, 2, Err("bad-entry")),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1,2]}}"#, 2, Err("bad-json")),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, 3, Err("trailing-bytes")),
        (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, 1, Err("missing-bytes")),
        ("{}", 1, Err("trailing-bytes")),
        // Any order in the header, file order in the answer.
        (
            r#"{"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
            3,
            Ok(&["a U8 [2] 113+2", "b U8 [1] 115+1"]),
        ),
        // Names.
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
            Err("duplicate-tensor"),
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
            2,
            Err("duplicate-tensor"),
        ),
        (
            r#"{"\u00e9\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
            Ok(&["é\n U8 [1] 68+1"]),
        ),
        (r#"{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1, Ok(&[" U8 [1] 60+1"])),
        (r#"{"\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1, Err("bad-json")),
        // The reference never sees the first entry; we see its fault first.
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
            Err("offsets-reversed"),
        ),
        // Entries.
        (r#"{"a":{"dtype":"U8","shape":[1]}}"#, 1, Err("bad-entry")),
        (r#"{"a":{"shape":[1],"data_offsets":[0,1]}}"#, 1, Err("bad-entry")),
        (r#"{"a":{"dtype":"U8","data_offsets":[0,1]}}"#, 1, Err("bad-entry")),
        (
            r#"{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
            Err("bad-entry"),
        ),
        (r#"{"a":["U8",[1],[0,1]]}"#, 1, Err("bad-entry")),
        (r#"{"a":null}"#, 0, Err("bad-entry")),
        (r#"{"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}}"#, 1, Err("bad-entry")),
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"later":{"x":[1,null]}}}"#,
            1,
            Ok(&["a U8 [1] 84+1"]),
        ),
        // Types that are not known yet.
        (r#"{"a":{"dtype":"F2","shape":[3],"data_offsets":[0,1]}}"#, 1, Ok(&["a F2 [3] 61+1"])),
        // Metadata.
        (r#"{"__metadata__":null}"#, 0, Ok(&[])),
        (r#"{"__metadata__":{"a":1}}"#, 0, Err("bad-entry")),
        (r#"{"__metadata__":[]}"#, 0, Err("bad-entry")),
        (r#"{"__metadata__":"x"}"#, 0, Err("bad-entry")),
        (r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0, Err("duplicate-metadata")),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, 0, Err("duplicate-tensor")),
        // The object.
        ("", 0, Err("bad-header-start")),
        ("  ", 0, Err("bad-header-start")),
        ("[]", 0, Err("bad-header-start")),
        ("null", 0, Err("bad-header-start")),
        ("\u{feff}{}", 0, Err("bad-header-start")),
        ("\t\n{}\r ", 0, Ok(&[])),
        ("{}\0", 0, Err("bad-json")),
        ("{}x", 0, Err("bad-json")),
        ("{\"a\"}", 0, Err("bad-json")),
        ("{,}", 0, Err("bad-json")),
    ];
    for (json, data_len, expected) in table {
        check(json, &file(json, *data_len), *expected);
    }
}

#[test]
fn dimensions_are_bounded() {
    let with_rank = |rank: usize| {
        let shape = vec!["1"; rank].join(",");
        file(&format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}"#), 1)
    };
    assert_eq!(Header::parse_file(&with_rank(64)).unwrap().tensors()[0].shape(), [1; 64]);
    check("65", &with_rank(65), Err("rank-too-large"));
    check("100000", &with_rank(100_000), Err("rank-too-large"));
}

#[test]
fn a_message_says_which_tensor_and_stays_short() {
    let json = r#"{"good":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"bad":{"dtype":"U8"}}"#;
    let text = Header::parse_file(&file(json, 1)).unwrap_err().to_string();
    assert_eq!(
        text,
        "the header breaks the format in tensor 'bad': missing field `shape` (line 1, column 76); \
         the file is damaged or its writer is faulty: fetch it again, or write it with a current writer"
    );
    let long = "n".repeat(1_000_000);
    let json = format!(r#"{{"{long}":{{"dtype":"U8","shape":["{long}"]}}}}"#);
    check("long", &file(&json, 0), Err("bad-entry"));
}

#[test]
fn the_prefix_is_checked_before_anything_is_read() {
    let code = |len: u64, file_len| {
        Header::len_from_prefix(&len.to_le_bytes(), file_len).map_err(|error| error.code())
    };
    assert_eq!(code(0, 8), Ok(0));
    assert_eq!(code(2, 10), Ok(2));
    assert_eq!(code(2, 9), Err("header-beyond-file"));
    assert_eq!(code(2, 7), Err("file-too-short"));
    assert_eq!(code(100_000_000, u64::MAX), Ok(100_000_000));
    assert_eq!(code(100_000_001, u64::MAX), Err("header-too-large"));
    assert_eq!(code(u64::MAX, u64::MAX), Err("header-too-large"));
    assert_eq!(Header::parse(b"{}", 9).map_err(|e| e.code()).unwrap_err(), "header-beyond-file");
}

#[test]
fn fmt_01_misaligned_tensors_are_counted_and_accepted() {
    // The header length of the report: 0xa766, so that the data begins at 0xa76e, 2 modulo 4.
    let json = concat!(
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"#,
        r#""b":{"dtype":"F16","shape":[2],"data_offsets":[8,12]},"#,
        r#""c":{"dtype":"U8","shape":[2],"data_offsets":[12,14]},"#,
        r#""d":{"dtype":"F32","shape":[1],"data_offsets":[14,18]},"#,
        r#""e":{"dtype":"F4","shape":[2],"data_offsets":[18,19]},"#,
        r#""f":{"dtype":"I64","shape":[1],"data_offsets":[19,27]}}"#,
    );
    let file = file(&format!("{json:width$}", width = 0xa766), 27);
    let header = Header::parse_file(&file).unwrap();
    assert_eq!(header.data_range().start, 0xa76e);
    let misaligned = header.misaligned().unwrap();
    // a at 0xa76e, f at 0xa781; d, 14 bytes on, happens to be aligned.
    assert_eq!((misaligned.count, &*misaligned.tensor, misaligned.code()), (2, "a", "misaligned"));
    let (padded, odd) =
        (Padding::To { align: 8, remainder: 0 }, Padding::To { align: 8, remainder: 1 });
    for (padding, count) in [(padded, None), (odd, Some(1))] {
        let builder = HeaderBuilder::new().padding(padding).tensor("w", Dtype::F32, &[3]).unwrap();
        let mut file = builder.build().unwrap();
        file.extend([0; 12]);
        let header = Header::parse_file(&file).unwrap();
        assert_eq!(header.misaligned().map(|misaligned| misaligned.count), count);
    }
}

#[test]
fn fmt_02_a_header_over_the_limit_names_both_numbers() {
    let prefix = [0x40, 0x9d, 0xdf, 0x07, 0, 0, 0, 0];
    let error = Header::len_from_prefix(&prefix, 1 << 40).unwrap_err();
    assert_eq!(error.code(), "header-too-large");
    assert_eq!(
        error.to_string(),
        "the header has 132095296 bytes, more than the limit of 100000000; split the model into several files"
    );
}

#[test]
fn fmt_03_metadata_alone() {
    check("writer bug", &file(r#"{},"__metadata__":{"a":"b"}"#, 0), Err("bad-json"));
    check("done right", &file(r#"{"__metadata__":{"a":"b"}}"#, 0), Ok(&[]));
}

#[test]
fn fmt_04_empty_metadata() {
    let json = r#"{"__metadata__":{},"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}"#;
    check("empty", &file(json, 4), Ok(&["w BF16 [2] 81+4"]));
    assert!(Header::parse_file(&file(json, 4)).unwrap().metadata().is_empty());
}

#[test]
fn fmt_05_packed_types_fill_whole_bytes() {
    let one = |dtype: &str, shape: &str, len: usize| {
        let json =
            format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{len}]}}}}"#);
        outcome(&file(&json, len)).map(|_| len)
    };
    for (dtype, shape, len, expected) in [
        ("F4", "[1,3]", 1, Err("partial-byte")),
        ("F4", "[1,3]", 2, Err("partial-byte")),
        ("F4", "[2,3]", 3, Ok(3)),
        ("F4", "[2,3]", 4, Err("size-mismatch")),
        ("F4", "[2,32]", 32, Ok(32)),
        ("F4", "[]", 1, Err("partial-byte")),
        ("F4", "[3,0]", 0, Ok(0)),
        ("F6_E2M3", "[4]", 3, Ok(3)),
        ("F6_E3M2", "[3]", 3, Err("partial-byte")),
        ("F8_E8M0", "[3]", 3, Ok(3)),
    ] {
        assert_eq!(one(dtype, shape, len), expected, "{dtype} {shape} {len}");
    }
}

#[test]
fn bits_of_an_unknown_type_follow_from_the_length() {
    for (shape, len, bits) in [
        ("[4]", 8, Some(16)),
        ("[4]", 1, Some(2)),
        ("[3]", 2, None),
        ("[]", 5, Some(40)),
        ("[0]", 0, None),
        ("[0]", 7, None),
        ("[7]", 0, None),
    ] {
        let json = format!(r#"{{"w":{{"dtype":"Q7","shape":{shape},"data_offsets":[0,{len}]}}}}"#);
        let file = file(&json, len);
        reference::compare(&file);
        let header = Header::parse_file(&file).unwrap();
        assert_eq!(header.tensors()[0].bits_per_element(), bits, "{shape} {len}");
        assert_eq!(header.misaligned(), None);
    }
}

#[test]
fn names_are_found() {
    let mut builder = HeaderBuilder::new();
    for index in (0..100).rev() {
        builder = builder.tensor(&format!("layer.{index}"), Dtype::U8, &[1]).unwrap();
    }
    let mut file = builder.build().unwrap();
    file.extend([0; 100]);
    let header = Header::parse_file(&file).unwrap();
    for (place, index) in (0..100).rev().enumerate() {
        let tensor = header.get(&format!("layer.{index}")).unwrap();
        assert_eq!(tensor.data_range().start, place as u64);
    }
    assert_eq!(header.get("layer.100"), None);
    assert_eq!(header.get(""), None);
}
