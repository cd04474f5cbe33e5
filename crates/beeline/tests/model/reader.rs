//! The independent witness: a safetensors file taken apart by a plain JSON reader, and the comparison
//! of a loaded model with it.

use std::collections::BTreeMap;
use std::path::Path;

use beeline::core::model::Dtype;
use beeline::core::model::write::{HeaderBuilder, Padding};
use beeline::gpu::Gpu;
use beeline::model::Loaded;
use serde_json::Value;

use crate::support::{contents, pattern};

/// One tensor as the file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Witness {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) type Witnesses = BTreeMap<String, Witness>;

/// Every tensor of the files at `paths`.
pub(crate) fn witnesses(paths: &[impl AsRef<Path>]) -> Witnesses {
    let mut all = Witnesses::new();
    for path in paths {
        let file = std::fs::read(path).unwrap();
        let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let data = &file[8 + len..];
        let Value::Object(entries) = serde_json::from_slice(&file[8..8 + len]).unwrap() else {
            panic!("{} has no object for a header", path.as_ref().display());
        };
        for (name, entry) in entries.into_iter().filter(|(name, _)| name != "__metadata__") {
            let number = |value: &Value| value.as_u64().unwrap();
            let shape = entry["shape"].as_array().unwrap().iter().map(number).collect();
            let begin = number(&entry["data_offsets"][0]) as usize;
            let end = number(&entry["data_offsets"][1]) as usize;
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            let witness = Witness { dtype, shape, bytes: data[begin..end].to_vec() };
            assert!(all.insert(name, witness).is_none(), "a name stands twice");
        }
    }
    all
}

/// Compares device number `device` of `loaded` with `expected`: names, types, shapes, every bit, and
/// the alignment of each tensor.
pub(crate) fn compare(loaded: &Loaded, device: usize, gpu: &Gpu, expected: &Witnesses) {
    let all = loaded.buffers().get(device).map(|buffer| contents(gpu, buffer)).unwrap_or_default();
    let mut names: Vec<String> = Vec::new();
    for tensor in loaded.tensors(device) {
        let witness = expected.get(&*tensor.name).unwrap_or_else(|| panic!("{}", tensor.name));
        assert_eq!(tensor.dtype.name(), witness.dtype, "{}", tensor.name);
        assert_eq!(&*tensor.shape, witness.shape, "{}", tensor.name);
        let bytes = match &tensor.buffer {
            None => &[][..],
            Some(view) => {
                assert!(
                    view.ptr().as_u64().is_multiple_of(256),
                    "{} at {}",
                    tensor.name,
                    view.ptr()
                );
                let base = loaded.buffers()[device].ptr().as_u64();
                let at = (view.ptr().as_u64() - base) as usize;
                &all[at..at + view.len() as usize]
            }
        };
        assert!(bytes == witness.bytes, "{} has other bytes than the file", tensor.name);
        names.push(tensor.name.to_string());
    }
    names.sort_unstable();
    assert!(names.iter().eq(expected.keys()), "{names:?} is not {:?}", expected.keys());
}

/// The bytes of a file with these tensors; every dtype must be known.
pub(crate) fn model_file(tensors: &[(&str, Dtype, &[u64])], remainder: u64) -> Vec<u8> {
    let mut builder = HeaderBuilder::new().padding(Padding::To { align: 64, remainder });
    for (name, dtype, shape) in tensors {
        builder = builder.tensor(name, dtype.clone(), shape).unwrap();
    }
    finish(&builder)
}

/// The file of `builder`, with bytes behind the header that tell their own place.
pub(crate) fn finish(builder: &HeaderBuilder) -> Vec<u8> {
    let mut file = builder.build().unwrap();
    file.extend(pattern(file.len() as u64, builder.data_len() as usize));
    file
}

/// A file with that header text, whatever it says, and `data_len` bytes of data.
pub(crate) fn raw_file(json: &str, data_len: usize) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json.as_bytes());
    file.extend(pattern(7, data_len));
    file
}
