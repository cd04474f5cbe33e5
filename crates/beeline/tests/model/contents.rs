//! What files may hold: alignments, types, shapes, orders, many tensors, and parts of them by name.

use std::path::Path;

use beeline::core::model::write::HeaderBuilder;
use beeline::core::model::{Dtype, Pattern, Selection};
use beeline::model::{LoadOptions, Loaded, Model};
use beeline::storage::{Mode, StorageRoute};

use crate::reader::{compare, finish, model_file, raw_file, witnesses};
use crate::support::{
    assert_nothing_left, devices, engine, folders, make_cold, pattern, sim, write,
};

/// Loads the file at `path` whole on every device of the suite and compares every bit.
fn check_everywhere(path: &Path) {
    let expected = witnesses(&[path]);
    for gpu in devices() {
        let engine = engine(&gpu);
        let model = Model::open(&[path]).unwrap();
        let loaded =
            model.load(&engine, std::slice::from_ref(&gpu), LoadOptions::default()).unwrap();
        compare(&loaded, 0, &gpu, &expected);
        let verified = loaded.verify(None).unwrap();
        assert_eq!(verified.mismatches, []);
        let total: usize = expected.values().map(|tensor| tensor.bytes.len()).sum();
        assert_eq!((verified.bytes, loaded.report.bytes), (total as u64, total as u64));
        drop((loaded, model, engine));
        assert_nothing_left(&gpu);
    }
}

#[test]
fn headers_of_every_length_give_aligned_tensors() {
    for folder in folders() {
        for remainder in [0, 1, 7, 33, 63] {
            let tensors: [(&str, Dtype, &[u64]); 6] = [
                ("odd", Dtype::U8, &[4093]),
                ("scalar", Dtype::F64, &[]),
                ("empty", Dtype::F32, &[0, 7]),
                ("empty.inside", Dtype::F32, &[3, 0, 5]),
                ("one", Dtype::I8, &[1]),
                ("large", Dtype::Bf16, &[3, 1_500_001]),
            ];
            let path = write(folder.path(), "m.safetensors", &model_file(&tensors, remainder));
            make_cold(&path);
            check_everywhere(&path);
        }
    }
}

#[test]
fn a_misaligned_file_is_remarked_on_and_loaded() {
    let folder = &folders()[0];
    let cases: [(u64, Option<&str>); 2] = [(0, None), (1, Some("2 tensors"))];
    for (remainder, remark) in cases {
        let file = model_file(&[("a", Dtype::F32, &[5]), ("b", Dtype::F16, &[5])], remainder);
        let path = write(folder.path(), "m.safetensors", &file);
        let model = Model::open(&[&path]).unwrap();
        let texts: Vec<_> = model.remarks().iter().map(|one| (one.code, one.warning)).collect();
        assert_eq!(texts, if remark.is_some() { vec![("misaligned", false)] } else { vec![] });
        assert!(remark.is_none_or(|text| model.remarks()[0].text.contains(text)));
    }
}

#[test]
fn every_known_type_arrives_bit_for_bit() {
    let names: Vec<String> = Dtype::KNOWN.iter().map(|dtype| format!("t.{dtype:?}")).collect();
    let mut builder = HeaderBuilder::new();
    for (name, dtype) in names.iter().zip(Dtype::KNOWN) {
        // 24 elements fill whole bytes of every width, packed ones included.
        builder = builder.tensor(name, dtype.clone(), &[3, 8]).unwrap();
    }
    let folder = &folders()[0];
    let path = write(folder.path(), "m.safetensors", &finish(&builder));
    assert_eq!(witnesses(&[&path]).len(), Dtype::KNOWN.len());
    check_everywhere(&path);
}

#[test]
fn a_type_of_the_future_arrives_by_its_length() {
    let builder = HeaderBuilder::new()
        .tensor("known", Dtype::U8, &[3])
        .and_then(|b| b.tensor_with_len("t", Dtype::from_name("F3_E1M1"), &[7, 5], 14))
        .and_then(|b| b.tensor_with_len("none", Dtype::from_name("F3_E1M1"), &[0], 0))
        .unwrap();
    let folder = &folders()[0];
    let path = write(folder.path(), "m.safetensors", &finish(&builder));
    check_everywhere(&path);
}

#[test]
fn the_order_of_the_header_need_not_be_that_of_the_data() {
    let json = r#"{"z":{"dtype":"U8","shape":[5],"data_offsets":[9,14]},
        "__metadata__":{"format":"pt"},
        "a":{"dtype":"U8","shape":[6],"data_offsets":[3,9]},
        "m":{"data_offsets":[0,3],"shape":[3],"dtype":"U8"},
        "nothing":{"dtype":"F32","shape":[0],"data_offsets":[9,9]}}"#;
    let folder = &folders()[0];
    let path = write(folder.path(), "m.safetensors", &raw_file(json, 14));
    check_everywhere(&path);
}

#[test]
fn ten_thousand_small_tensors_arrive() {
    let mut builder = HeaderBuilder::new();
    for index in 0..10_000_u64 {
        let name = format!("layers.{index}.w");
        builder = builder.tensor(&name, Dtype::U16, &[index % 97]).unwrap();
    }
    let folder = &folders()[0];
    let path = write(folder.path(), "m.safetensors", &finish(&builder));
    make_cold(&path);
    let expected = witnesses(&[&path]);
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    let model = Model::open(&[&path]).unwrap();
    let loaded = model.load(&engine, std::slice::from_ref(&gpu), LoadOptions::default()).unwrap();
    compare(&loaded, 0, &gpu, &expected);
    assert_eq!(loaded.verify(None).unwrap().mismatches, []);
    for (name, witness) in &expected {
        let tensor = loaded.tensor(name).unwrap();
        assert_eq!(&*tensor.name, name);
        assert_eq!(tensor.buffer.map_or(0, |view| view.len()), witness.bytes.len() as u64);
    }
    assert!(loaded.tensor("layers.10000.w").is_none());
}

#[test]
fn tensors_around_the_size_of_a_slot_arrive_on_every_route() {
    let slot = beeline::config::SLOT_BYTES;
    let folder = &folders()[0];
    let tensors: [(&str, Dtype, &[u64]); 5] = [
        ("less", Dtype::U8, &[slot - 1]),
        ("same", Dtype::U8, &[slot]),
        ("more", Dtype::U8, &[slot + 1]),
        ("tiny", Dtype::U8, &[1]),
        ("two", Dtype::U8, &[2, slot]),
    ];
    let path = write(folder.path(), "m.safetensors", &model_file(&tensors, 17));
    let expected = witnesses(&[&path]);
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    let model = Model::open(&[&path]).unwrap();
    for route in [
        StorageRoute::PageCache,
        StorageRoute::MappedPageCache,
        StorageRoute::Direct,
        StorageRoute::ThreadPool,
    ] {
        make_cold(&path);
        let mut options = LoadOptions::default();
        options.route = Some(route);
        match model.load(&engine, std::slice::from_ref(&gpu), options) {
            Ok(loaded) => {
                compare(&loaded, 0, &gpu, &expected);
                assert!(loaded.report.routes.iter().all(|part| part.route == route));
            }
            Err(error) => assert!(error.is_no_route(), "{route}: {error:?}"),
        }
    }
    for mode in [Mode::Auto, Mode::Software] {
        let mut options = LoadOptions::default();
        options.mode = mode;
        compare(
            &model.load(&engine, std::slice::from_ref(&gpu), options).unwrap(),
            0,
            &gpu,
            &expected,
        );
    }
}

#[test]
fn a_file_without_tensors_loads_to_nothing() {
    let folder = &folders()[0];
    let gpu = sim(1 << 20);
    let engine = engine(&gpu);
    for json in
        ["{}", r#"{"__metadata__":{}}"#, r#"{"e":{"dtype":"F4","shape":[0],"data_offsets":[0,0]}}"#]
    {
        let path = write(folder.path(), "m.safetensors", &raw_file(json, 0));
        let model = Model::open(&[&path]).unwrap();
        let loaded =
            model.load(&engine, std::slice::from_ref(&gpu), LoadOptions::default()).unwrap();
        assert!(loaded.buffers().is_empty());
        compare(&loaded, 0, &gpu, &witnesses(&[&path]));
        assert_eq!(loaded.verify(None).unwrap().tensors, 0);
    }
}

/// Whether a selection shall keep the tensor of that name.
type Keeps<'a> = &'a dyn Fn(&str) -> bool;

#[test]
fn only_what_is_asked_for_is_read() {
    let folder = &folders()[0];
    let mut builder = HeaderBuilder::new();
    for layer in 0..4 {
        for part in ["weight", "bias", "scale"] {
            let name = format!("layers.{layer}.{part}");
            builder = builder.tensor(&name, Dtype::U8, &[2000 + layer]).unwrap();
        }
    }
    let path = write(folder.path(), "m.safetensors", &finish(&builder));
    let glob = |text| Pattern::glob(text).unwrap();
    let cases: [(Selection, Keeps<'_>); 5] = [
        (Selection::all().include(Pattern::exact("layers.2.bias")), &|name| {
            name == "layers.2.bias"
        }),
        (Selection::all().include(glob("*.bias")), &|name| name.ends_with(".bias")),
        (Selection::all().include(glob("layers.[0-1].*")), &|name| &name[7..8] < "2"),
        (Selection::all().exclude(glob("*.scale")), &|name| !name.ends_with(".scale")),
        (Selection::all().include(glob("*.3.*")).exclude(glob("*.weight")), &|name| {
            name.contains(".3.") && !name.ends_with(".weight")
        }),
    ];
    let gpu = sim(1 << 24);
    let engine = engine(&gpu);
    let model = Model::open(&[&path]).unwrap();
    for (selection, keeps) in cases {
        let mut expected = witnesses(&[&path]);
        expected.retain(|name, _| keeps(name));
        let loaded = load_part(&model, &engine, &gpu, selection.clone()).unwrap();
        compare(&loaded, 0, &gpu, &expected);
        let bytes: usize = expected.values().map(|tensor| tensor.bytes.len()).sum();
        assert_eq!(loaded.report.bytes, bytes as u64, "{selection:?}");
        assert_eq!(loaded.verify(None).unwrap().mismatches, []);
    }
    let miss = load_part(&model, &engine, &gpu, Selection::all().include(glob("layer.*")));
    let error = miss.unwrap_err();
    assert!(error.is_refused() && error.code() == "no-match", "{error:?}");
    assert!(error.to_string().contains("did you mean"), "{error}");
}

fn load_part(
    model: &Model,
    engine: &beeline::storage::Engine,
    gpu: &beeline::gpu::Gpu,
    selection: Selection,
) -> beeline::Result<Loaded> {
    let mut options = LoadOptions::default();
    options.selection = selection;
    model.load(engine, std::slice::from_ref(gpu), options)
}

#[test]
fn two_devices_get_the_same_model_from_one_reading() {
    let folder = &folders()[0];
    let tensors: [(&str, Dtype, &[u64]); 2] =
        [("a", Dtype::F32, &[3_000_001]), ("b", Dtype::U8, &[77])];
    let path = write(folder.path(), "m.safetensors", &model_file(&tensors, 3));
    let expected = witnesses(&[&path]);
    let gpus = [sim(1 << 28), sim(1 << 28)];
    for route in [None, Some(StorageRoute::MappedPageCache), Some(StorageRoute::PageCache)] {
        let engine = engine(&gpus[0]);
        let model = Model::open(&[&path]).unwrap();
        let mut options = LoadOptions::default();
        options.route = route;
        let loaded = model.load(&engine, &gpus, options).unwrap();
        for (device, gpu) in gpus.iter().enumerate() {
            compare(&loaded, device, gpu, &expected);
        }
        let bytes = expected.values().map(|tensor| tensor.bytes.len() as u64).sum::<u64>();
        assert_eq!(loaded.report.bytes, bytes, "each byte is read once");
        let verified = loaded.verify(None).unwrap();
        assert_eq!((verified.tensors, verified.bytes), (4, 2 * bytes));
        drop((loaded, engine));
        gpus.iter().for_each(assert_nothing_left);
    }
}

#[test]
fn the_pattern_of_the_tests_has_no_period() {
    let bytes = pattern(1, 1 << 16);
    assert!((1..1024).all(|shift| bytes[shift..] != bytes[..bytes.len() - shift]));
}
