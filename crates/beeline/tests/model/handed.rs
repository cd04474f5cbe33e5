//! The handed cases of the format, and the public vectors, from the file to the answer.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use beeline::core::model::write::{HeaderBuilder, Padding};
use beeline::core::model::{Dtype, Selection, Slice};
use beeline::model::{LoadOptions, Model};

use crate::reader::{compare, finish, model_file, raw_file, witnesses};
use crate::support::{assert_nothing_left, engine, folders, sim, write};

/// The folder of public cases; `None`, with a line that says so, where it is absent.
fn cases() -> Option<PathBuf> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases");
    let cases = std::env::var_os("BEELINE_CASES").map_or(beside, PathBuf::from);
    if !cases.is_dir() {
        println!("SKIP cases");
        return None;
    }
    Some(cases)
}

/// The codes of the remarks, or that of the refusal.
type Expected = Result<&'static [&'static str], &'static str>;

/// Opens `path` and loads it: the remarks, or the code and text of the refusal.
fn outcome(path: &Path) -> Result<Vec<&'static str>, (&'static str, String)> {
    let gpu = sim(1 << 24);
    let engine = engine(&gpu);
    let refusal = |error: beeline::Error| {
        assert!(error.is_refused(), "{error:?}");
        (error.code(), format!("{error:#}"))
    };
    let model = Model::open(&[path]).map_err(refusal)?;
    let loaded =
        model.load(&engine, std::slice::from_ref(&gpu), LoadOptions::default()).map_err(refusal)?;
    let paths: Vec<&Path> = model.files().iter().map(|file| file.path()).collect();
    compare(&loaded, 0, &gpu, &witnesses(&paths));
    assert_eq!(loaded.verify(None).unwrap().mismatches, []);
    let remarks = model.remarks().iter().map(|remark| remark.code).collect();
    drop((loaded, engine));
    assert_nothing_left(&gpu);
    Ok(remarks)
}

fn check(path: &Path, expected: Expected) {
    let got = outcome(path);
    let got = got.as_ref().map(Vec::as_slice).map_err(|(code, _)| *code);
    assert_eq!(got, expected, "{}", path.display());
}

#[test]
fn every_public_vector_is_loaded_or_refused() {
    let Some(cases) = cases() else { return };
    let table: &[(&str, Expected)] = &[
        ("fastsafetensors-a.safetensors", Ok(&[])),
        ("hf-empty-file.safetensors", Err("file-too-short")),
        ("hf-nbytes-overflow.safetensors", Err("size-overflow")),
        ("hf-no-tensors-meta.safetensors", Ok(&[])),
        ("hf-no-tensors.safetensors", Ok(&[])),
        ("hf-non-utf8.safetensors", Err("bad-utf8")),
        ("hf-not-json.safetensors", Err("bad-json")),
        ("hf-ok-i32-2x2.safetensors", Ok(&[])),
        ("hf-scalar-empty-shape.safetensors", Ok(&[])),
        ("hf-short-data.safetensors", Err("missing-bytes")),
        ("hf-trailing-bytes.safetensors", Err("trailing-bytes")),
        ("hf-ws-padded.safetensors", Ok(&[])),
    ];
    let folder = cases.join("files/safetensors");
    for (name, expected) in table {
        check(&folder.join(name), *expected);
    }
    let files = std::fs::read_dir(&folder).unwrap().count();
    assert_eq!(files, table.len(), "a vector has no expected answer");
}

#[test]
fn fmt_01_a_misaligned_file_loads_with_a_remark() {
    // The header length of the case; every tensor of more than one byte lies off its alignment.
    let start = 8 + 0xa766;
    let name = "x".repeat(30_000);
    let tensors: [(&str, Dtype, &[u64]); 3] =
        [(&name, Dtype::F32, &[11]), ("b", Dtype::U8, &[1]), ("c", Dtype::F64, &[2])];
    let mut builder = HeaderBuilder::new();
    for (name, dtype, shape) in tensors {
        builder = builder.tensor(name, dtype, shape).unwrap();
    }
    let builder = builder.padding(Padding::To { align: 1 << 20, remainder: start });
    let folder = &folders()[0];
    let path = write(folder.path(), "m.safetensors", &finish(&builder));
    let model = Model::open(&[&path]).unwrap();
    assert_eq!(model.headers()[0].data_range().start, start);
    let naive = [(0_u64, 4_u64), (44, 1), (45, 8)]
        .into_iter()
        .filter(|(begin, size)| !(start + begin).is_multiple_of(*size))
        .count();
    assert!(model.remarks()[0].text.contains(&format!("{naive} tensors")));
    check(&path, Ok(&["misaligned"]));
}

#[test]
fn fmt_02_a_header_over_the_limit_is_refused_with_both_numbers() {
    let folder = &folders()[0];
    let path = folder.path().join("m.safetensors");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(140_000_000).unwrap(); // Sparse: nothing of it may be read.
    file.write_all_at(&[0x40, 0x9d, 0xdf, 0x07, 0, 0, 0, 0], 0).unwrap();
    let (code, text) = outcome(&path).unwrap_err();
    assert_eq!(code, "header-too-large");
    assert!(text.contains("132095296") && text.contains("100000000"), "{text}");
}

#[test]
fn fmt_03_and_04_metadata_alone_is_a_model() {
    let folder = &folders()[0];
    let table: &[(&str, Expected)] = &[
        (r#"{},"__metadata__":{"a":"b"}"#, Err("bad-json")),
        (r#"{"__metadata__":{"a":"b"}}"#, Ok(&[])),
        (r#"{"__metadata__":{}}"#, Ok(&[])),
        (r#"{"__metadata__":{},"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, Ok(&[])),
        (r#"{"__metadata__":[]}"#, Err("bad-entry")),
    ];
    for (json, expected) in table {
        check(&write(folder.path(), "m.safetensors", &raw_file(json, 0)), *expected);
    }
}

#[test]
fn fmt_05_packed_elements_must_fill_whole_bytes() {
    let folder = &folders()[0];
    let table: &[(&str, usize, Expected)] = &[
        (r#"{"t":{"dtype":"F4","shape":[1,3],"data_offsets":[0,2]}}"#, 2, Err("partial-byte")),
        (r#"{"t":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}"#, 3, Ok(&[])),
        (r#"{"t":{"dtype":"F4","shape":[2,3],"data_offsets":[0,4]}}"#, 4, Err("size-mismatch")),
        (r#"{"t":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[0,3]}}"#, 3, Ok(&[])),
    ];
    for (json, data, expected) in table {
        check(&write(folder.path(), "m.safetensors", &raw_file(json, *data)), *expected);
    }
    // Legal as a whole, but a row of it ends inside a byte.
    let path = write(folder.path(), "m.safetensors", &model_file(&[("t", Dtype::F4, &[2, 3])], 0));
    let model = Model::open(&[path]).unwrap();
    let halves = Selection::all().rows(Slice::rank(0, 2).unwrap());
    assert_eq!(model.layout(&halves).unwrap_err().code(), "slice-inside-byte");
}

#[test]
fn fmt_06_an_index_that_points_to_the_wrong_shard_names_both() {
    let folder = &folders()[0];
    write(folder.path(), "1.safetensors", &model_file(&[("a", Dtype::U8, &[1])], 0));
    write(folder.path(), "2.safetensors", &model_file(&[("b", Dtype::U8, &[1])], 0));
    let json = br#"{"weight_map":{"a":"2.safetensors","b":"2.safetensors","c":"1.safetensors"}}"#;
    let path = write(folder.path(), "model.safetensors.index.json", json);
    let (code, text) = outcome(&path).unwrap_err();
    assert_eq!(code, "index-mismatch");
    for part in ["'a'", "2.safetensors", "1.safetensors", "index.json"] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
}

#[test]
fn fmt_07_a_stray_file_beside_the_shards_is_a_warning_and_not_loaded() {
    let folder = &folders()[0];
    write(folder.path(), "1.safetensors", &model_file(&[("a", Dtype::U8, &[1])], 0));
    write(folder.path(), "model.safetensors", &model_file(&[("a", Dtype::F32, &[1])], 0));
    let json = br#"{"weight_map":{"a":"1.safetensors"}}"#;
    write(folder.path(), "model.safetensors.index.json", json);
    // `outcome` compares with the shards alone, so the stray file was not loaded.
    check(folder.path(), Ok(&["stray-file"]));
    let model = Model::open(&[folder.path()]).unwrap();
    let remark = &model.remarks()[0];
    assert!(remark.warning && remark.text.contains("model.safetensors"), "{remark}");
}
