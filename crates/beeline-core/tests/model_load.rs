//! From written headers over selections to layouts, and sharded models by their index.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod common;

use beeline_core::model::index::Finding;
use beeline_core::model::write::{HeaderBuilder, Padding};
use beeline_core::model::{Dtype, Header, Index, Layout, Pattern, Selection, Slice};
use common::{append_data, check_layout, file};

/// A file of tensors given as `(name, dtype, shape)`.
fn model(tensors: &[(&str, Dtype, &[u64])]) -> Vec<u8> {
    let mut builder = HeaderBuilder::new();
    for (name, dtype, shape) in tensors {
        builder = builder.tensor(name, dtype.clone(), shape).unwrap();
    }
    finish(&builder)
}

fn finish(builder: &HeaderBuilder) -> Vec<u8> {
    let mut file = builder.build().unwrap();
    append_data(&mut file, builder.data_len() as usize);
    file
}

#[test]
fn what_is_written_is_read() {
    let builder = HeaderBuilder::new()
        .metadata("quote\"", "line\nbreak")
        .padding(Padding::To { align: 4096, remainder: 3 })
        .tensor("é\"\\", Dtype::F4, &[2, 3])
        .unwrap()
        .tensor_with_len("later", Dtype::from_name("F3"), &[5], 2)
        .unwrap();
    let header = Header::parse_file(&finish(&builder)).unwrap();
    assert_eq!(header.data_range().start % 4096, 3);
    assert_eq!(header.metadata().get("quote\""), Some("line\nbreak"));
    assert_eq!(header.get("é\"\\").unwrap().len(), 3);
    assert_eq!(header.get("later").unwrap().dtype().name(), "F3");
}

#[test]
fn what_cannot_be_written_is_refused() {
    let new = HeaderBuilder::new;
    let two = |name| new().tensor("a", Dtype::U8, &[1])?.tensor(name, Dtype::U8, &[1]);
    let padded = |align, remainder| new().padding(Padding::To { align, remainder }).build();
    let huge = new().tensor("a", Dtype::U8, &[u64::MAX]).unwrap();
    let long = new().metadata("k", &"\u{1}".repeat(17_000_000));
    let codes = [
        two("a").map(|_| ()).map_err(|e| e.code()),
        two("__metadata__").map(|_| ()).map_err(|e| e.code()),
        new().tensor("a", Dtype::F4, &[3]).map(|_| ()).map_err(|e| e.code()),
        new().tensor("a", Dtype::F64, &[1 << 61]).map(|_| ()).map_err(|e| e.code()),
        new().tensor("a", Dtype::U8, &[1; 65]).map(|_| ()).map_err(|e| e.code()),
        new().tensor("a", Dtype::from_name("F2"), &[4]).map(|_| ()).map_err(|e| e.code()),
        huge.tensor("b", Dtype::U8, &[1]).map(|_| ()).map_err(|e| e.code()),
        padded(0, 0).map(|_| ()).map_err(|e| e.code()),
        padded(8, 8).map(|_| ()).map_err(|e| e.code()),
        padded(1 << 21, 0).map(|_| ()).map_err(|e| e.code()),
        long.build().map(|_| ()).map_err(|e| e.code()),
    ];
    let expected = [
        "bad-name",
        "bad-name",
        "bad-shape",
        "bad-shape",
        "bad-shape",
        "bad-shape",
        "data-too-large",
        "bad-padding",
        "bad-padding",
        "bad-padding",
        "header-too-large",
    ];
    assert_eq!(codes, expected.map(Err));
}

/// Selected names and shapes, or an error code and its text.
fn select(file: &[u8], selection: &Selection) -> Result<Vec<String>, (&'static str, String)> {
    let header = Header::parse_file(file).unwrap();
    let selected = selection.select(&[&header]).map_err(|e| (e.code(), e.to_string()))?;
    let layout = Layout::new(&selected).unwrap();
    check_layout(&layout, &selected, &[file.to_vec()]);
    Ok(layout.entries.iter().map(|entry| format!("{} {:?}", entry.name, entry.shape)).collect())
}

fn glob(text: &str) -> Pattern {
    Pattern::glob(text).unwrap()
}

#[test]
fn names_select_tensors() {
    let file = model(&[
        ("layers.0.weight", Dtype::U8, &[3]),
        ("layers.0.bias", Dtype::U8, &[3]),
        ("layers.1.weight", Dtype::U8, &[3]),
        ("w[0]", Dtype::U8, &[]),
    ]);
    let all = Selection::all;
    let names = |selection: Selection| {
        let selected = select(&file, &selection).map_err(|(code, _)| code)?;
        Ok(selected.join(", "))
    };
    let table = [
        (all(), Ok("layers.0.weight [3], layers.0.bias [3], layers.1.weight [3], w[0] []")),
        (all().include(glob("*.weight")), Ok("layers.0.weight [3], layers.1.weight [3]")),
        (
            all().include(glob("*.weight")).include(glob("layers.0.*")),
            Ok("layers.0.weight [3], layers.0.bias [3], layers.1.weight [3]"),
        ),
        (all().include(Pattern::exact("w[0]")), Ok("w[0] []")),
        (all().exclude(glob("layers.*")), Ok("w[0] []")),
        (all().exclude(glob("nothing-of-this")).include(glob("w*")), Ok("w[0] []")),
        (all().exclude(glob("*")), Ok("")),
        (all().include(glob("w*")).exclude(glob("*")), Err("nothing-selected")),
        (all().include(glob("w*")).include(glob("layers.2.*")), Err("no-match")),
    ];
    for (selection, expected) in table {
        assert_eq!(names(selection.clone()), expected.map(String::from), "{selection:?}");
    }
}

#[test]
fn a_pattern_without_a_match_names_the_nearest_tensor() {
    let file = model(&[
        ("model.embed_tokens.weights", Dtype::U8, &[1]),
        ("model.embed_tokens.weight", Dtype::U8, &[1]),
        ("model.embed_tokens.weight_s", Dtype::U8, &[1]),
        ("lm_head.weight", Dtype::U8, &[1]),
    ]);
    let text = |pattern| select(&file, &Selection::all().include(pattern)).unwrap_err().1;
    assert_eq!(
        text(Pattern::exact("model.embed_token.weight")),
        "no tensor matches 'model.embed_token.weight'; did you mean 'model.embed_tokens.weight'?"
    );
    assert_eq!(
        text(glob("lm_haed.*")),
        "no tensor matches 'lm_haed.*'; did you mean 'lm_head.weight'?"
    );
    assert_eq!(
        text(glob("transformer.h.*")),
        "no tensor matches 'transformer.h.*'; the names stand in the JSON that begins at byte 8 of each file"
    );
}

#[test]
fn rows_are_dealt_to_ranks() {
    let shares = |rows: u64, of: u64| -> Vec<String> {
        let file = model(&[("w", Dtype::F32, &[rows, 3]), ("scale", Dtype::F32, &[])]);
        let rank = |rank| Selection::all().rows(Slice::rank(rank, of).unwrap());
        (0..of).map(|r| select(&file, &rank(r)).unwrap().join(" ")).collect()
    };
    assert_eq!(shares(5, 2), ["w [3, 3] scale []", "w [2, 3] scale []"]);
    assert_eq!(shares(4, 1), ["w [4, 3] scale []"]);
    assert_eq!(shares(1, 3), ["w [1, 3] scale []", "w [0, 3] scale []", "w [0, 3] scale []"]);
    assert_eq!(shares(0, 2), ["w [0, 3] scale []", "w [0, 3] scale []"]);
    assert_eq!(Slice::rank(2, 2).map_err(|e| e.code()), Err("bad-rank"));
    assert_eq!(Slice::rank(0, 0).map_err(|e| e.code()), Err("bad-rank"));
    // Products of outside numbers stay inside 64 bits.
    let last = Selection::all().rows(Slice::rank(u64::MAX - 1, u64::MAX).unwrap());
    let file = model(&[("w", Dtype::U8, &[7])]);
    assert_eq!(select(&file, &last).unwrap(), ["w [0]"]);
}

#[test]
fn exact_rows_and_what_cannot_be_sliced() {
    let file = |dtype: &str, shape: &[u64], len| {
        let dtype = Dtype::from_name(dtype);
        finish(&HeaderBuilder::new().tensor_with_len("w", dtype, shape, len).unwrap())
    };
    let rows = |start, end| Selection::all().rows(Slice::rows(start, end).unwrap());
    let table = [
        ("F16", &[4, 2][..], 16, (1, 3), Ok("w [2, 2]")),
        ("F16", &[4, 2], 16, (4, 4), Ok("w [0, 2]")),
        ("F16", &[4, 2], 16, (3, 5), Err("rows-out-of-range")),
        ("F16", &[], 2, (3, 5), Ok("w []")),
        ("F4", &[4, 2], 4, (1, 3), Ok("w [2, 2]")),
        // H-FMT-05: legal as a whole, not to be cut inside a byte.
        ("F4", &[2, 3], 3, (0, 1), Err("slice-inside-byte")),
        ("F4", &[2, 3], 3, (0, 2), Err("slice-inside-byte")),
        ("F6_E2M3", &[2, 4], 6, (1, 2), Ok("w [1, 4]")),
        // An unknown type is cut where its length makes the rows plain.
        ("Q5", &[4, 8], 20, (1, 3), Ok("w [2, 8]")),
        ("Q5", &[4, 8], 21, (1, 3), Err("slice-unknown-dtype")),
        ("Q5", &[4, 0], 0, (1, 3), Ok("w [2, 0]")),
        // Bytes that belong to no row would be lost.
        ("Q5", &[0], 1, (0, 0), Err("slice-unknown-dtype")),
    ];
    for (dtype, shape, len, (start, end), expected) in table {
        let file = file(dtype, shape, len);
        let got = select(&file, &rows(start, end)).map_err(|(code, _)| code);
        assert_eq!(
            got.map(|entries| entries.join(" ")),
            expected.map(String::from),
            "{dtype} {shape:?}"
        );
        // Whole, every one of them loads.
        assert!(select(&file, &Selection::all().rows(Slice::rank(0, 1).unwrap())).is_ok());
    }
    assert_eq!(Slice::rows(2, 1).map_err(|e| e.code()), Err("bad-rows"));
}

#[test]
fn neighbours_that_touch_on_both_sides_move_as_one() {
    let file = model(&[
        ("a", Dtype::U8, &[256]),
        ("empty", Dtype::U8, &[0]),
        ("b", Dtype::U8, &[512]),
        ("c", Dtype::U8, &[8]),
        ("d", Dtype::U8, &[248]),
        ("last", Dtype::F32, &[0]),
    ]);
    let header = Header::parse_file(&file).unwrap();
    let selected = Selection::all().select(&[&header]).unwrap();
    let layout = Layout::new(&selected).unwrap();
    check_layout(&layout, &selected, std::slice::from_ref(&file));
    let places: Vec<_> = layout.entries.iter().map(|entry| entry.device_offset).collect();
    assert_eq!(places, [0, 256, 256, 768, 1024, 1280]);
    let lens: Vec<_> = layout.segments.iter().map(|segment| segment.len).collect();
    assert_eq!(lens, [776, 248]);
    assert_eq!(layout.total_bytes, 1280);

    // What lies between two wanted tensors is not read, even where the distances agree.
    let selection = Selection::all().exclude(glob("b")).exclude(glob("c"));
    let selected = selection.select(&[&header]).unwrap();
    let layout = Layout::new(&selected).unwrap();
    check_layout(&layout, &selected, std::slice::from_ref(&file));
    assert_eq!(layout.segments.len(), 2);
}

#[test]
fn several_files_share_one_allocation() {
    let files = [
        model(&[("a", Dtype::U8, &[10]), ("b", Dtype::U8, &[10])]),
        model(&[]),
        model(&[("c", Dtype::U8, &[10])]),
    ];
    let headers: Vec<Header> = files.iter().map(|file| Header::parse_file(file).unwrap()).collect();
    let refs: Vec<&Header> = headers.iter().collect();
    let mut selected = Selection::all().select(&refs).unwrap();
    // The order of the selection does not matter.
    selected.reverse();
    let layout = Layout::new(&selected).unwrap();
    check_layout(&layout, &selected, &files);
    let files: Vec<_> = layout.entries.iter().map(|entry| (entry.file, &*entry.name)).collect();
    assert_eq!(files, [(0, "a"), (0, "b"), (2, "c")]);

    let twice = Selection::all().select(&[&headers[0], &headers[0]]).unwrap_err();
    assert_eq!(
        twice.to_string(),
        "tensor 'a' stands in file 0 and in file 1; load one of them, or exclude it"
    );
}

#[test]
fn a_layout_beyond_64_bits_is_an_error() {
    let header = |name| {
        let json = format!(
            r#"{{"{name}":{{"dtype":"U8","shape":[18446744073709550000],"data_offsets":[0,18446744073709550000]}}}}"#
        );
        Header::parse(json.as_bytes(), 18_446_744_073_709_550_000 + 8 + json.len() as u64).unwrap()
    };
    let headers = [header("a"), header("b")];
    let selected = Selection::all().select(&[&headers[0], &headers[1]]).unwrap();
    assert_eq!(Layout::new(&selected[..1]).unwrap().segments.len(), 1);
    let error = Layout::new(&selected).unwrap_err();
    assert_eq!(error.code(), "layout-overflow");
    assert!(error.to_string().starts_with("tensor 'b' of 18446744073709550000 bytes"), "{error}");
}

#[test]
fn an_index_is_read() {
    let index = |json: &str| {
        Index::parse(json.as_bytes())
            .map(|index| {
                let weights: Vec<_> =
                    index.weights().map(|(name, at)| format!("{name}={at}")).collect();
                format!("{:?} {:?} {}", index.total_size(), index.shards(), weights.join(","))
            })
            .map_err(|error| error.code())
    };
    let one = r#"None ["f"] a=0"#;
    let bad_name = |name: &str| index(&format!(r#"{{"weight_map":{{"a":{name}}}}}"#));
    let table = [
        (
            r#"{"metadata":{"total_size":7,"x":{}},"weight_map":{"b":"f","a":"g","c":"f"}}"#,
            Ok(r#"Some(7) ["f", "g"] a=1,b=0,c=0"#),
        ),
        (r#"{"weight_map":{"a":"f"}}"#, Ok(one)),
        (r#"{"metadata":{"total_size":7.0},"weight_map":{"a":"f"}}"#, Ok(r#"Some(7) ["f"] a=0"#)),
        (r#"{"metadata":{"total_size":7.5},"weight_map":{"a":"f"}}"#, Ok(one)),
        (r#"{"metadata":{"total_size":1e300},"weight_map":{"a":"f"}}"#, Ok(one)),
        (r#"{"metadata":{"total_size":-7},"weight_map":{"a":"f"}}"#, Ok(one)),
        (r#"{"metadata":{"total_size":"7"},"weight_map":{"a":"f"}}"#, Ok(one)),
        (r#"{"metadata":{"total_size":{"total_size":7}},"weight_map":{"a":"f"}}"#, Ok(one)),
        (r#"{"metadata":{"total_size":[7,[]]},"weight_map":{"a":"f"}}"#, Ok(one)),
        (r#"{"metadata":7,"weight_map":{"a":"f"}}"#, Ok(one)),
        (r#"{"metadata":null,"weight_map":{"a":"f"},"later":[]}"#, Ok(one)),
        (r#"{"weight_map":{}}"#, Ok("None [] ")),
        ("{}", Err("bad-index")),
        ("", Err("bad-index")),
        ("[]", Err("bad-index")),
        (r#"{"weight_map":{}} x"#, Err("bad-index")),
        (r#"{"weight_map":{"a":1}}"#, Err("bad-index")),
        (r#"{"weight_map":[]}"#, Err("bad-index")),
        (r#"{"weight_map":{},"weight_map":{}}"#, Err("bad-index")),
        (r#"{"weight_map":{"a":"f","a":"f"}}"#, Err("duplicate-tensor")),
    ];
    for (json, expected) in table {
        assert_eq!(index(json), expected.map(String::from), "{json}");
    }
    for name in [
        "\"\"",
        "\".\"",
        "\"..\"",
        "\"/etc/passwd\"",
        "\"a/b\"",
        "\"../b\"",
        "\"a\\\\b\"",
        "\"a\\u0000\"",
        "\"a\\n\"",
    ] {
        assert_eq!(bad_name(name), Err("bad-shard-name"), "{name}");
    }
    let of_len = |len: usize| bad_name(&format!("\"{}\"", "x".repeat(len)));
    assert!(of_len(255).is_ok());
    assert_eq!(of_len(256), Err("bad-shard-name"));
    assert!(
        bad_name("\"..a\"").is_ok() && bad_name("\"a..b\"").is_ok() && bad_name("\"é b\"").is_ok()
    );
    assert_eq!(Index::parse(b"{\"a\":\"\xff\"}").unwrap_err().code(), "bad-utf8");
    let text = Index::parse(br#"{"weight_map":{"a":"../b"}}"#).unwrap_err().to_string();
    assert_eq!(
        text,
        "the index puts tensor 'a' into file '../b', which is no plain file name: it contains a path separator; \
         shards lie beside their index: mend the name, and trust this index no further"
    );
}

#[test]
fn the_number_of_shards_is_bounded() {
    let index = |count: usize| {
        let map: Vec<_> = (0..count).map(|at| format!(r#""t{at}":"f{at}""#)).collect();
        Index::parse(format!(r#"{{"weight_map":{{{}}}}}"#, map.join(",")).as_bytes())
    };
    assert_eq!(index(65_536).unwrap().shards().len(), 65_536);
    assert_eq!(index(65_537).unwrap_err().code(), "too-many-shards");
}

/// Two shards that hold `a` and `b`, `c` in this order.
fn shards() -> [Header; 2] {
    let header = |file: Vec<u8>| Header::parse_file(&file).unwrap();
    [
        header(model(&[("a", Dtype::U8, &[10])])),
        header(model(&[("b", Dtype::U8, &[10]), ("c", Dtype::U8, &[10])])),
    ]
}

#[test]
fn fmt_06_an_index_that_points_to_the_wrong_shard() {
    let [first, second] = shards();
    let check = |json: &str, headers: &[&Header]| {
        let found = Index::parse(json.as_bytes()).unwrap().check(headers);
        found.map_err(|error| (error.code(), error.to_string()))
    };
    let good = r#"{"metadata":{"total_size":30},"weight_map":{"a":"1","b":"2","c":"2"}}"#;
    assert_eq!(check(good, &[&first, &second]), Ok(vec![]));

    let (code, text) =
        check(r#"{"weight_map":{"b":"1","c":"2"}}"#, &[&first, &second]).unwrap_err();
    assert_eq!(code, "index-mismatch");
    assert!(
        text.starts_with("the index puts tensor 'b' into '1', which lacks it ('2' holds it)"),
        "{text}"
    );
    let (code, text) =
        check(r#"{"weight_map":{"a":"1","b":"2","d":"2"}}"#, &[&first, &second]).unwrap_err();
    assert_eq!(code, "index-mismatch");
    assert!(
        text.starts_with("the index puts tensor 'd' into '2', which lacks it (as do all"),
        "{text}"
    );

    let (code, text) = check(r#"{"weight_map":{"a":"1","b":"2"}}"#, &[&first]).unwrap_err();
    assert_eq!(code, "header-count");
    assert!(text.starts_with("the index has 2 shards, but 1 headers were given"), "{text}");
    let (code, text) =
        check(r#"{"weight_map":{"b":"1","c":"2"}}"#, &[&second, &second]).unwrap_err();
    assert_eq!(code, "tensor-in-two-shards");
    assert!(text.starts_with("tensor 'b' stands in two shards, '1' and '2'"), "{text}");

    let findings = check(
        r#"{"metadata":{"total_size":31},"weight_map":{"a":"1","c":"2"}}"#,
        &[&first, &second],
    );
    assert_eq!(
        findings.unwrap(),
        [
            Finding::UnlistedTensors { shard: "2".into(), tensor: "b".into(), count: 1 },
            Finding::TotalSize { declared: 31, found: 30 },
        ]
    );
}

#[test]
fn fmt_07_a_stray_file_beside_the_shards() {
    let json = br#"{"weight_map":{"a":"m-1-of-2.safetensors","b":"m-2-of-2.safetensors"}}"#;
    let index = Index::parse(json).unwrap();
    let shards = ["m-1-of-2.safetensors", "m-2-of-2.safetensors"];
    let findings = |more: &[&str]| {
        let found = index.check_listing(shards.iter().chain(more).copied()).unwrap();
        found.iter().map(|finding| (finding.code(), finding.to_string())).collect::<Vec<_>>()
    };
    assert_eq!(findings(&["config.json", "model.safetensors.index.json", "tokenizer.model"]), []);
    let stray = findings(&["model.safetensors", "config.json"]);
    assert_eq!(
        stray,
        [(
            "stray-file",
            "'model.safetensors' lies beside the shards and is none of them: \
           load by the index, never by '*.safetensors'"
                .to_string()
        )]
    );
    let missing = index.check_listing([shards[1], "model.safetensors"]).unwrap_err();
    assert_eq!(missing.code(), "missing-shard");
    assert!(missing.to_string().contains("'m-1-of-2.safetensors', which is not there"));
}

#[test]
fn hand_written_files_may_have_any_order() {
    let json = r#"{"z":{"dtype":"U8","shape":[3],"data_offsets":[5,8]},"y":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#;
    let entries = select(&file(json, 8), &Selection::all()).unwrap();
    assert_eq!(entries, ["y [5]", "z [3]"]);
}
