//! Rows of the first dimension, as tensor-parallel ranks take them, against a naive reference.

use beeline::core::model::{Dtype, Pattern, Selection, Slice};
use beeline::model::{LoadOptions, Model};

use crate::reader::{Witness, Witnesses, compare, model_file, witnesses};
use crate::support::{engine, folders, sim, write};

const TENSORS: &[(&str, Dtype, &[u64])] = &[
    ("even", Dtype::F32, &[8, 3, 5]),
    ("uneven", Dtype::Bf16, &[7, 1_000_003]),
    ("vector", Dtype::U8, &[13]),
    ("few", Dtype::I64, &[2, 2]),
    ("none", Dtype::F16, &[0, 4]),
    ("hollow", Dtype::F16, &[6, 0]),
    ("scalar", Dtype::F64, &[]),
    ("packed", Dtype::F4, &[6, 4]),
];

/// Rows `[start, end)` cut out one by one.
fn rows(tensor: &Witness, start: u64, end: u64) -> Witness {
    let Some(&dim) = tensor.shape.first() else { return tensor.clone() };
    let row = if dim == 0 { 0 } else { tensor.bytes.len() / dim as usize };
    let mut bytes = Vec::new();
    for index in start..end {
        bytes.extend_from_slice(&tensor.bytes[index as usize * row..][..row]);
    }
    let mut shape = tensor.shape.clone();
    shape[0] = end - start;
    Witness { dtype: tensor.dtype.clone(), shape, bytes }
}

/// The share of `rank`: rows dealt one at a time, so that the first ranks get the remainder.
fn share(tensor: &Witness, rank: u64, of: u64) -> Witness {
    let dim = tensor.shape.first().copied().unwrap_or(0);
    let mut counts = vec![0_u64; of as usize];
    for row in 0..dim {
        counts[(row % of) as usize] += 1;
    }
    let start = counts[..rank as usize].iter().sum();
    rows(tensor, start, start + counts[rank as usize])
}

#[test]
fn every_rank_gets_its_rows_and_together_they_are_the_model() {
    let folder = &folders()[0];
    let path = write(folder.path(), "m.safetensors", &model_file(TENSORS, 5));
    let whole = witnesses(&[&path]);
    let gpu = sim(1 << 26);
    let engine = engine(&gpu);
    let model = Model::open(&[&path]).unwrap();
    for of in [1, 2, 3, 8] {
        let mut together = Witnesses::new();
        for rank in 0..of {
            let expected: Witnesses =
                whole.iter().map(|(name, t)| (name.clone(), share(t, rank, of))).collect();
            let mut options = LoadOptions::default();
            options.selection = Selection::all().rows(Slice::rank(rank, of).unwrap());
            let loaded = model.load(&engine, std::slice::from_ref(&gpu), options).unwrap();
            compare(&loaded, 0, &gpu, &expected);
            assert_eq!(loaded.verify(None).unwrap().mismatches, [], "rank {rank} of {of}");
            for (name, part) in expected.into_iter().filter(|(_, part)| !part.shape.is_empty()) {
                let sum = together
                    .entry(name)
                    .or_insert_with(|| Witness { bytes: Vec::new(), ..part.clone() });
                sum.bytes.extend(part.bytes);
            }
        }
        assert!(together.iter().all(|(name, sum)| sum.bytes == whole[name].bytes), "{of} ranks");
    }
}

#[test]
fn named_rows_arrive_and_rows_that_are_not_there_are_refused() {
    let folder = &folders()[0];
    let path = write(folder.path(), "m.safetensors", &model_file(TENSORS, 0));
    let whole = witnesses(&[&path]);
    let gpu = sim(1 << 26);
    let engine = engine(&gpu);
    let model = Model::open(&[&path]).unwrap();
    let load = |pattern: &str, start, end| {
        let mut options = LoadOptions::default();
        options.selection = Selection::all()
            .include(Pattern::glob(pattern).unwrap())
            .rows(Slice::rows(start, end).unwrap());
        model.load(&engine, std::slice::from_ref(&gpu), options)
    };
    for (name, start, end) in [
        ("even", 0, 8),
        ("even", 2, 3),
        ("uneven", 6, 7),
        ("vector", 4, 4),
        ("packed", 1, 5),
        ("scalar", 3, 9),
    ] {
        let expected = Witnesses::from([(name.to_owned(), rows(&whole[name], start, end))]);
        compare(&load(name, start, end).unwrap(), 0, &gpu, &expected);
    }
    let error = load("*even", 0, 8).unwrap_err();
    assert_eq!(error.code(), "rows-out-of-range", "{error:?}");
    assert!(error.to_string().contains("uneven"), "{error}");
    assert_eq!(engine.pool_usage().busy, 0);
}

#[test]
fn rows_that_share_a_byte_or_have_no_known_size_are_refused() {
    use beeline::core::model::write::HeaderBuilder;
    let builder = HeaderBuilder::new()
        .tensor("half", Dtype::F4, &[2, 3])
        .and_then(|b| b.tensor_with_len("future", Dtype::from_name("X7"), &[3, 3], 10))
        .unwrap();
    let folder = &folders()[0];
    let path = write(folder.path(), "m.safetensors", &crate::reader::finish(&builder));
    let gpu = sim(1 << 20);
    let engine = engine(&gpu);
    let model = Model::open(&[&path]).unwrap();
    for (name, code) in [("half", "slice-inside-byte"), ("future", "slice-unknown-dtype")] {
        let mut options = LoadOptions::default();
        options.selection =
            Selection::all().include(Pattern::exact(name)).rows(Slice::rank(0, 2).unwrap());
        let error = model.load(&engine, std::slice::from_ref(&gpu), options).unwrap_err();
        assert!(error.is_refused() && error.code() == code, "{error:?}");
        // Whole, both load.
        let mut options = LoadOptions::default();
        options.selection = Selection::all().include(Pattern::exact(name));
        model.load(&engine, std::slice::from_ref(&gpu), options).unwrap();
    }
}
