//! Models of several files: indexes, folders, and everything that can be wrong with them.

use std::path::{Path, PathBuf};

use beeline::core::model::{Dtype, Pattern, Selection};
use beeline::model::{LoadOptions, Model};

use crate::reader::{compare, model_file, raw_file, witnesses};
use crate::support::{assert_nothing_left, engine, folders, sim, write};

/// Three shards and their index in `folder`; answers the paths of the shards.
fn sharded(folder: &Path) -> Vec<PathBuf> {
    let mut map = Vec::new();
    let paths = (0..3_u64)
        .map(|shard| {
            let name = format!("model-{shard}.safetensors");
            let (a, b) = (format!("layers.{shard}.w"), format!("layers.{shard}.b"));
            map.push(format!(r#""{a}":"{name}","{b}":"{name}""#));
            let tensors: [(&str, Dtype, &[u64]); 2] =
                [(&a, Dtype::F32, &[shard + 1, 400_003]), (&b, Dtype::U8, &[shard * 7])];
            write(folder, &name, &model_file(&tensors, shard))
        })
        .collect();
    let index = format!(r#"{{"metadata":{{}},"weight_map":{{{}}}}}"#, map.join(","));
    write(folder, "model.safetensors.index.json", index.as_bytes());
    paths
}

#[test]
fn a_sharded_model_is_one_model_however_it_is_named() {
    for folder in folders() {
        let shards = sharded(folder.path());
        let expected = witnesses(&shards);
        let ways: Vec<Vec<PathBuf>> = vec![
            vec![folder.path().to_owned()],
            vec![folder.path().join("model.safetensors.index.json")],
            vec![folder.path().join(".")],
            shards,
        ];
        for way in ways {
            let gpu = sim(1 << 26);
            let engine = engine(&gpu);
            let model = Model::open(&way).unwrap();
            let loaded =
                model.load(&engine, std::slice::from_ref(&gpu), LoadOptions::default()).unwrap();
            compare(&loaded, 0, &gpu, &expected);
            assert_eq!(loaded.verify(None).unwrap().mismatches, []);
            assert_eq!(loaded.buffers().len(), 1, "one allocation for all shards");
            assert_eq!(loaded.tensor("layers.2.w").unwrap().shape, [3, 400_003].into());
            drop((loaded, engine));
            assert_nothing_left(&gpu);
        }
    }
}

#[test]
fn a_part_of_a_sharded_model_reads_only_its_shard() {
    let folder = &folders()[0];
    let shards = sharded(folder.path());
    let gpu = sim(1 << 26);
    let engine = engine(&gpu);
    let model = Model::open(&[folder.path()]).unwrap();
    // A read of the other shards would fail.
    for index in [0, 2] {
        let effect = beeline::storage::IoEffect::Errno(5);
        model.files()[index].faults().arm(0, 1000, effect);
    }
    let mut options = LoadOptions::default();
    options.selection = Selection::all().include(Pattern::glob("layers.1.*").unwrap());
    let loaded = model.load(&engine, std::slice::from_ref(&gpu), options).unwrap();
    compare(&loaded, 0, &gpu, &witnesses(&[&shards[1]]));
}

#[test]
fn a_folder_must_say_which_model_it_holds() {
    let file = |name: &str| model_file(&[(name, Dtype::U8, &[9])], 0);
    let folder = &folders()[0];
    let refused = |text: &str| {
        let error = Model::open(&[folder.path()]).unwrap_err();
        assert!(error.is_refused() && error.to_string().contains(text), "{error:?}");
        assert!(error.hint().is_some(), "{error:?}");
    };
    refused("holds no safetensors file");
    write(folder.path(), "config.json", b"{}");
    std::fs::create_dir(folder.path().join("old.safetensors")).unwrap();
    refused("holds no safetensors file");
    let one = write(folder.path(), "one.safetensors", &file("a"));
    assert_eq!(Model::open(&[folder.path()]).unwrap().files()[0].path(), one);
    write(folder.path(), "two.safetensors", &file("b"));
    refused("holds 2 safetensors files");
    let index = |name: &str| {
        write(folder.path(), name, br#"{"weight_map":{"a":"one.safetensors"}}"#);
    };
    index("model.safetensors.index.json");
    assert_eq!(Model::open(&[folder.path()]).unwrap().files().len(), 1);
    index("model.fp16.safetensors.index.json");
    refused("holds 2 indexes");
}

#[test]
fn a_folder_that_holds_itself_is_no_model() {
    let folder = &folders()[0];
    std::os::unix::fs::symlink(".", folder.path().join("loop.safetensors")).unwrap();
    let error = Model::open(&[folder.path()]).unwrap_err();
    assert!(error.to_string().contains("holds no safetensors file"), "{error:?}");
    std::os::unix::fs::symlink("gone", folder.path().join("gone.safetensors")).unwrap();
    assert!(Model::open(&[folder.path()]).unwrap_err().is_not_found(), "a dangling link is named");
}

#[test]
fn what_is_not_there_is_named() {
    let folder = &folders()[0];
    let error = Model::open(&[folder.path().join("none.safetensors")]).unwrap_err();
    assert!(error.is_not_found() && error.to_string().contains("none.safetensors"), "{error:?}");
    assert!(Model::open::<&Path>(&[]).unwrap_err().is_refused());
    let gpu = sim(1 << 20);
    let path = write(folder.path(), "m.safetensors", &model_file(&[("a", Dtype::U8, &[9])], 0));
    let model = Model::open(&[&path]).unwrap();
    let error = model.load(&engine(&gpu), &[], LoadOptions::default()).unwrap_err();
    assert!(error.is_refused() && error.to_string().contains("no device"), "{error:?}");
    let twice = Model::open(&[&path, &path]).unwrap();
    let error =
        twice.load(&engine(&gpu), std::slice::from_ref(&gpu), LoadOptions::default()).unwrap_err();
    assert!(error.is_refused() && error.code() == "duplicate-tensor", "{error:?}");
}

#[test]
fn broken_indexes_and_shards_are_refused_by_code() {
    let good = model_file(&[("a", Dtype::U8, &[9])], 0);
    let truncated = good[..good.len() - 1].to_vec();
    let long = [good.clone(), vec![0]].concat();
    let index = r#"{"weight_map":{"a":"1.safetensors"}}"#;
    let json = raw_file("{", 0);
    let table: &[(&str, &str, &[u8], &str)] = &[
        ("missing shard", r#"{"weight_map":{"a":"2.safetensors"}}"#, &good, "missing-shard"),
        ("not JSON", "{", &good, "bad-index"),
        ("no map", r#"{"metadata":{"total_size":1}}"#, &good, "bad-index"),
        ("not UTF-8", "\u{0}", &good, "bad-index"),
        ("outside", r#"{"weight_map":{"a":"../1.safetensors"}}"#, &good, "bad-shard-name"),
        ("absolute", r#"{"weight_map":{"a":"/etc/passwd"}}"#, &good, "bad-shard-name"),
        ("tensor not there", r#"{"weight_map":{"b":"1.safetensors"}}"#, &good, "index-mismatch"),
        (
            "name twice",
            r#"{"weight_map":{"a":"1.safetensors","a":"1.safetensors"}}"#,
            &good,
            "duplicate-tensor",
        ),
        ("empty shard", index, &[], "file-too-short"),
        ("truncated shard", index, &truncated, "missing-bytes"),
        ("overlong shard", index, &long, "trailing-bytes"),
        ("shard without JSON", index, &json, "bad-json"),
        ("shard that claims much", index, &[0xff; 64], "header-too-large"),
        (
            "shard shorter than its header",
            index,
            &[200, 0, 0, 0, 0, 0, 0, 0, b'{'],
            "header-beyond-file",
        ),
    ];
    for (what, index, shard, code) in table {
        let folder = &folders()[0];
        write(folder.path(), "1.safetensors", shard);
        write(folder.path(), "m.safetensors.index.json", index.as_bytes());
        let error = Model::open(&[folder.path()]).unwrap_err();
        assert!(error.is_refused() && error.code() == *code, "{what}: {error:?}");
        assert!(error.to_string().contains("safetensors"), "{what} names its file: {error}");
    }
}

#[test]
fn a_missing_shard_is_named_before_anything_is_loaded() {
    let folder = &folders()[0];
    let shards = sharded(folder.path());
    std::fs::remove_file(&shards[1]).unwrap();
    let error = Model::open(&[folder.path()]).unwrap_err();
    assert_eq!(error.code(), "missing-shard");
    let text = format!("{error:#}");
    assert!(text.contains("model-1.safetensors") && text.contains("fetch"), "{text}");
    // A name that is taken by a folder is no shard either.
    std::fs::create_dir(&shards[1]).unwrap();
    let error = Model::open(&[folder.path()]).unwrap_err();
    assert!(error.is_refused() && error.to_string().contains("a folder"), "{error:?}");
}
