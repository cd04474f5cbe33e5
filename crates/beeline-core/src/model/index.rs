//! The index of a sharded model, `*.index.json`: which tensor is in which file.
//!
//! Source: the `save_pretrained` / `split_torch_state_dict_into_shards` convention of the Hugging
//! Face libraries. `{"metadata": {"total_size": BYTES}, "weight_map": {"TENSOR": "FILE", ...}}`,
//! where `FILE` is a plain name in the index's own directory. Only `weight_map` is required;
//! `total_size` is informative, and other fields are skipped.
//!
//! An index comes from the same place as the model, so it is trusted as little: a file name in it
//! never leaves the index's directory.

mod error;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::header::{Header, TensorInfo, Text, json_detail};

pub use error::{Finding, IndexError, NameFault};

/// Longest index in bytes that is read; the same limit as for a header.
pub const INDEX_LEN_MAX: u64 = 100_000_000;

/// Most shards of one model. The largest published ones have a few hundred.
pub const SHARDS_MAX: usize = 65_536;

/// Longest name of a shard in bytes: `NAME_MAX` of Linux.
pub const SHARD_NAME_MAX: usize = 255;

/// A parsed index. Holding one means that no tensor stands twice and that every shard name is a
/// plain file name.
#[derive(Clone, Debug)]
pub struct Index {
    /// Ordered by tensor name.
    weights: Vec<(Box<str>, u32)>,
    /// In the order of first mention.
    shards: Vec<Box<str>>,
    total_size: Option<u64>,
}

impl Index {
    /// Parses the text of an index.
    pub fn parse(json: &[u8]) -> Result<Self, IndexError> {
        let len = json.len() as u64;
        if len > INDEX_LEN_MAX {
            return Err(IndexError::TooLarge { len });
        }
        let text = core::str::from_utf8(json)
            .map_err(|error| IndexError::BadUtf8 { at: error.valid_up_to() })?;
        let mut sink = Sink::default();
        let mut json = serde_json::Deserializer::from_str(text);
        let outcome = IndexSeed(&mut sink).deserialize(&mut json).and_then(|()| json.end());
        if let Err(error) = outcome {
            let (line, column) = (error.line(), error.column());
            let detail = json_detail(&error);
            return Err(sink.fault.unwrap_or(IndexError::BadJson { detail, line, column }));
        }
        let mut weights = sink.weights.unwrap_or_default();
        weights.sort();
        refuse_twice(&weights)?;
        Ok(Self { weights, shards: sink.shards.names, total_size: sink.total_size })
    }

    /// The files of the model, in the order in which the index first mentions them.
    pub fn shards(&self) -> &[Box<str>] {
        &self.shards
    }

    /// The tensors and the position of each one's file in [`Index::shards`], ordered by name.
    pub fn weights(&self) -> impl ExactSizeIterator<Item = (&str, u32)> {
        self.weights.iter().map(|(tensor, shard)| (&**tensor, *shard))
    }

    /// The position in [`Index::shards`] of the file that should hold `tensor`.
    pub fn shard_of(&self, tensor: &str) -> Option<u32> {
        let found = self.weights.binary_search_by(|(name, _)| (**name).cmp(tensor));
        self.weights.get(found.ok()?).map(|&(_, shard)| shard)
    }

    /// Bytes of all tensors as the index tells them; `None` where it does not, or tells nonsense.
    pub const fn total_size(&self) -> Option<u64> {
        self.total_size
    }

    /// Compares the index with the files of its directory, given by plain name.
    ///
    /// A shard that is not there is an error. A `.safetensors` file that is there and no shard is a
    /// [`Finding::StrayFile`]: whoever loads "all safetensors files" gets it as well.
    pub fn check_listing<'a>(
        &self,
        listing: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<Finding>, IndexError> {
        let present: BTreeSet<&str> = listing.into_iter().collect();
        if let Some(shard) = self.shards.iter().find(|shard| !present.contains(&***shard)) {
            return Err(IndexError::MissingShard { shard: shard.clone() });
        }
        let named: BTreeSet<&str> = self.shards.iter().map(|shard| &**shard).collect();
        let is_stray = |file: &&str| file.ends_with(".safetensors") && !named.contains(*file);
        let stray = present.into_iter().filter(is_stray);
        Ok(stray.map(|file| Finding::StrayFile { file: file.into() }).collect())
    }

    /// Compares the index with the headers of its shards, given in the order of [`Index::shards`].
    ///
    /// A tensor that its shard does not hold, and a tensor that two shards hold, are errors. Tensors
    /// that the index does not list, and a wrong `total_size`, are findings.
    pub fn check(&self, headers: &[&Header]) -> Result<Vec<Finding>, IndexError> {
        if headers.len() != self.shards.len() {
            let (shards, headers) = (self.shards.len(), headers.len());
            return Err(IndexError::HeaderCount { shards, headers });
        }
        for (tensor, shard) in &self.weights {
            let header = headers.get(*shard as usize);
            if header.is_none_or(|header| header.get(tensor).is_none()) {
                return Err(self.mismatch(tensor, *shard, headers));
            }
        }
        self.refuse_held_twice(headers)?;
        let mut findings = self.unlisted(headers);
        findings.extend(self.wrong_total(headers));
        Ok(findings)
    }

    fn mismatch(&self, tensor: &str, shard: u32, headers: &[&Header]) -> IndexError {
        let holder = headers.iter().position(|header| header.get(tensor).is_some());
        IndexError::Mismatch {
            tensor: tensor.into(),
            shard: self.shard_name(shard as usize),
            found_in: holder.map(|holder| self.shard_name(holder)),
        }
    }

    fn refuse_held_twice(&self, headers: &[&Header]) -> Result<(), IndexError> {
        let mut held: Vec<(&str, usize)> = headers
            .iter()
            .enumerate()
            .flat_map(|(shard, header)| header.tensors().iter().map(move |t| (t.name(), shard)))
            .collect();
        held.sort_unstable();
        let twice = held.windows(2).find_map(|pair| match pair {
            [(a, first), (b, second)] if a == b => Some((*a, *first, *second)),
            _ => None,
        });
        match twice {
            None => Ok(()),
            Some((tensor, first, second)) => Err(IndexError::HeldTwice {
                tensor: tensor.into(),
                first: self.shard_name(first),
                second: self.shard_name(second),
            }),
        }
    }

    /// One finding a shard, however many tensors: a wrong index must not flood its reader.
    fn unlisted(&self, headers: &[&Header]) -> Vec<Finding> {
        let of_shard = |(shard, header): (usize, &&Header)| {
            let is_unlisted = |tensor: &&TensorInfo| self.shard_of(tensor.name()).is_none();
            let mut unlisted = header.tensors().iter().filter(is_unlisted);
            let tensor = unlisted.next()?.name().into();
            let count = 1 + unlisted.count();
            Some(Finding::UnlistedTensors { shard: self.shard_name(shard), tensor, count })
        };
        headers.iter().enumerate().filter_map(of_shard).collect()
    }

    fn wrong_total(&self, headers: &[&Header]) -> Option<Finding> {
        let declared = self.total_size?;
        // A finding is only a remark, so a sum beyond 64 bits may as well stop there.
        let found = headers.iter().fold(0_u64, |sum, h| sum.saturating_add(h.data_range().len));
        (declared != found).then_some(Finding::TotalSize { declared, found })
    }

    fn shard_name(&self, shard: usize) -> Box<str> {
        self.shards.get(shard).cloned().unwrap_or_default()
    }
}

fn refuse_twice(weights: &[(Box<str>, u32)]) -> Result<(), IndexError> {
    let twice = weights.windows(2).find_map(|pair| match pair {
        [(a, _), (b, _)] if a == b => Some(a),
        _ => None,
    });
    match twice {
        Some(tensor) => Err(IndexError::DuplicateTensor { tensor: tensor.clone() }),
        None => Ok(()),
    }
}

/// Whether `name` names a file of the index's own directory and nothing else.
fn check_shard_name(name: &str) -> Result<(), NameFault> {
    if name.is_empty() {
        return Err(NameFault::Empty);
    }
    if name.len() > SHARD_NAME_MAX {
        return Err(NameFault::TooLong);
    }
    if name == "." || name == ".." {
        return Err(NameFault::Directory);
    }
    // The backslash separates directories where a model is copied to next.
    if name.contains(['/', '\\']) {
        return Err(NameFault::Separator);
    }
    if name.chars().any(char::is_control) {
        return Err(NameFault::Control);
    }
    Ok(())
}

#[derive(Default)]
struct Sink {
    weights: Option<Vec<(Box<str>, u32)>>,
    shards: Shards,
    total_size: Option<u64>,
    /// A fault that is more than text.
    fault: Option<IndexError>,
}

/// Names of shards, each kept once.
#[derive(Default)]
struct Shards {
    names: Vec<Box<str>>,
    positions: BTreeMap<Box<str>, u32>,
}

impl Shards {
    fn position(&mut self, name: &str, tensor: &str) -> Result<u32, IndexError> {
        if let Some(&position) = self.positions.get(name) {
            return Ok(position);
        }
        check_shard_name(name).map_err(|fault| IndexError::BadShardName {
            tensor: tensor.into(),
            shard: name.into(),
            fault,
        })?;
        let position = match u32::try_from(self.names.len()) {
            Ok(position) if self.names.len() < SHARDS_MAX => position,
            _ => return Err(IndexError::TooManyShards),
        };
        self.names.push(name.into());
        self.positions.insert(name.into(), position);
        Ok(position)
    }
}

struct IndexSeed<'a>(&'a mut Sink);

impl<'de> DeserializeSeed<'de> for IndexSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let sink = self.0;
        while let Some(field) = map.next_key_seed(Text)? {
            match &*field {
                "weight_map" if sink.weights.is_some() => {
                    return Err(A::Error::duplicate_field("weight_map"));
                }
                "weight_map" => map.next_value_seed(WeightsSeed(&mut *sink))?,
                "metadata" => sink.total_size = map.next_value_seed(TotalSizeSeed::Metadata)?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        if sink.weights.is_none() {
            return Err(A::Error::missing_field("weight_map"));
        }
        Ok(())
    }
}

struct WeightsSeed<'a>(&'a mut Sink);

impl<'de> DeserializeSeed<'de> for WeightsSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightsSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Sink { weights, shards, fault, .. } = self.0;
        let weights = weights.get_or_insert_default();
        while let Some(tensor) = map.next_key_seed(Text)? {
            let shard = map.next_value_seed(Text)?;
            match shards.position(&shard, &tensor) {
                Ok(position) => weights.push((tensor, position)),
                Err(error) => {
                    *fault = Some(error);
                    return Err(A::Error::custom("bad shard"));
                }
            }
        }
        Ok(())
    }
}

/// Finds `total_size` in `metadata`. It informs and decides nothing, so a value of any other shape
/// is no total rather than an error.
#[derive(Clone, Copy)]
enum TotalSizeSeed {
    Metadata,
    Value,
}

impl<'de> DeserializeSeed<'de> for TotalSizeSeed {
    type Value = Option<u64>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Option<u64>, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TotalSizeSeed {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("metadata")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<u64>, A::Error> {
        let mut total = None;
        while let Some(key) = map.next_key_seed(Text)? {
            if matches!(self, Self::Metadata) && &*key == "total_size" {
                total = map.next_value_seed(Self::Value)?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(total)
    }

    fn visit_u64<E>(self, value: u64) -> Result<Option<u64>, E> {
        Ok(matches!(self, Self::Value).then_some(value))
    }

    /// Some writers put a float; a whole number of bytes is meant.
    fn visit_f64<E>(self, value: f64) -> Result<Option<u64>, E> {
        // Whole and at most 2^53, so the cast is exact.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        let whole = (0.0..=9_007_199_254_740_992.0).contains(&value).then_some(value as u64);
        Ok(whole.filter(|&whole| matches!(self, Self::Value) && whole as f64 == value))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_str<E>(self, _: &str) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Option<u64>, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }
}
