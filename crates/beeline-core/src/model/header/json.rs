//! The JSON of a header, read in one pass straight into [`TensorInfo`]s.
//!
//! No intermediate document is built: a header of 100 MB holds a million tensors, and a tree of
//! them would take several times the memory of the result. What JSON itself cannot express (a name
//! twice, too many dimensions, reversed offsets) leaves through [`Sink::fault`], because a serde
//! error carries only text.

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;
use core::fmt;

use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::error::Category;

use super::{HeaderError, Metadata, RANK_MAX, TensorInfo};
use crate::addr::ByteRange;
use crate::model::Dtype;

/// The key that holds the metadata and is no tensor.
pub(crate) const METADATA_KEY: &str = "__metadata__";

/// Characters of the JSON reader's own message that an error keeps.
const DETAIL_CHARS: usize = 256;

/// What a header's JSON says, in the order it says it; only the JSON and each single entry is
/// checked.
pub(super) struct Entries {
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) metadata: Metadata,
}

/// Reads the whole header text.
pub(super) fn parse(text: &str) -> Result<Entries, HeaderError> {
    let mut sink = Sink::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let outcome = ObjectSeed(&mut sink).deserialize(&mut json).and_then(|()| json.end());
    if let Err(error) = outcome {
        return Err(sink.fault.unwrap_or_else(|| json_error(&error, sink.reading)));
    }
    let metadata = Metadata::new(sink.metadata.unwrap_or_default())?;
    Ok(Entries { tensors: sink.tensors, metadata })
}

#[derive(Default)]
struct Sink {
    tensors: Vec<TensorInfo>,
    metadata: Option<Vec<(Box<str>, Box<str>)>>,
    /// The tensor whose entry could not be read, for the message.
    reading: Option<Box<str>>,
    /// A fault that is more than text.
    fault: Option<HeaderError>,
}

fn json_error(error: &serde_json::Error, tensor: Option<Box<str>>) -> HeaderError {
    let (line, column) = (error.line(), error.column());
    let detail = json_detail(error);
    match error.classify() {
        Category::Data => HeaderError::BadEntry { tensor, detail, line, column },
        _ => HeaderError::BadJson { tensor, detail, line, column },
    }
}

/// The reader's message without its position, bounded: it may quote the file.
pub(crate) fn json_detail(error: &serde_json::Error) -> Box<str> {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let message = text.strip_suffix(place.as_str()).unwrap_or(&text);
    message.chars().take(DETAIL_CHARS).collect()
}

struct ObjectSeed<'a>(&'a mut Sink);

impl<'de> DeserializeSeed<'de> for ObjectSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ObjectSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let sink = self.0;
        while let Some(name) = map.next_key_seed(Text)? {
            if &*name == METADATA_KEY {
                map.next_value_seed(MetadataSeed(&mut *sink))?;
                continue;
            }
            match map.next_value_seed(EntrySeed { name: &name, fault: &mut sink.fault }) {
                Ok(Entry { dtype, shape, data }) => {
                    sink.tensors.push(TensorInfo { name, dtype, shape, data });
                }
                Err(error) => {
                    sink.reading = Some(name);
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

/// A string, copied exactly once.
pub(crate) struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Box<str>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Box<str>, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Text {
    type Value = Box<str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<Box<str>, E> {
        Ok(text.into())
    }
}

struct MetadataSeed<'a>(&'a mut Sink);

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        if self.0.metadata.is_some() {
            self.0.fault = Some(HeaderError::DuplicateTensor { tensor: METADATA_KEY.into() });
            return Err(D::Error::custom("__metadata__ stands twice"));
        }
        self.0.metadata = Some(Vec::new());
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings to strings as __metadata__")
    }

    /// `null` stands for no metadata, as in the reference implementation.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let metadata = self.0.metadata.get_or_insert_default();
        while let Some(key) = map.next_key_seed(Text)? {
            metadata.push((key, map.next_value_seed(Text)?));
        }
        Ok(())
    }
}

/// The value of one tensor's key.
struct Entry {
    dtype: Dtype,
    shape: Box<[u64]>,
    data: ByteRange,
}

struct EntrySeed<'a> {
    name: &'a str,
    fault: &'a mut Option<HeaderError>,
}

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = Entry;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Entry, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    /// Fields this build does not know are skipped, as the reference implementation does.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key_seed(FieldSeed)? {
            match field {
                Field::Dtype => {
                    let value = map.next_value_seed(DtypeSeed)?;
                    once(&mut dtype, value, "dtype")?;
                }
                Field::Shape => {
                    let seed = ShapeSeed { name: self.name, fault: &mut *self.fault };
                    let value = map.next_value_seed(seed)?;
                    once(&mut shape, value, "shape")?;
                }
                Field::DataOffsets => {
                    let value = map.next_value::<(u64, u64)>()?;
                    once(&mut offsets, value, "data_offsets")?;
                }
                Field::Unknown => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let dtype = dtype.ok_or_else(|| A::Error::missing_field("dtype"))?;
        let shape = shape.ok_or_else(|| A::Error::missing_field("shape"))?;
        let (begin, end) = offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?;
        let Some(len) = end.checked_sub(begin) else {
            let tensor = self.name.into();
            *self.fault = Some(HeaderError::OffsetsReversed { tensor, begin, end });
            return Err(A::Error::custom("data_offsets are reversed"));
        };
        Ok(Entry { dtype, shape, data: ByteRange { start: begin, len } })
    }
}

fn once<T, E: serde::de::Error>(
    slot: &mut Option<T>,
    value: T,
    field: &'static str,
) -> Result<(), E> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(E::duplicate_field(field)),
    }
}

enum Field {
    Dtype,
    Shape,
    DataOffsets,
    Unknown,
}

struct FieldSeed;

impl<'de> DeserializeSeed<'de> for FieldSeed {
    type Value = Field;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Field, D::Error> {
        json.deserialize_identifier(self)
    }
}

impl Visitor<'_> for FieldSeed {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Field, E> {
        Ok(match name {
            "dtype" => Field::Dtype,
            "shape" => Field::Shape,
            "data_offsets" => Field::DataOffsets,
            _ => Field::Unknown,
        })
    }
}

struct DtypeSeed;

impl<'de> DeserializeSeed<'de> for DtypeSeed {
    type Value = Dtype;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Dtype, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for DtypeSeed {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of an element type")
    }

    fn visit_str<E>(self, name: &str) -> Result<Dtype, E> {
        Ok(Dtype::from_name(name))
    }
}

struct ShapeSeed<'a> {
    name: &'a str,
    fault: &'a mut Option<HeaderError>,
}

impl<'de> DeserializeSeed<'de> for ShapeSeed<'_> {
    type Value = Box<[u64]>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Box<[u64]>, D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed<'_> {
    type Value = Box<[u64]>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Box<[u64]>, A::Error> {
        // Gathered on the stack first: one exact allocation per tensor, none for a scalar.
        let mut dims = [0; RANK_MAX];
        let mut rank = 0;
        while let Some(dim) = seq.next_element::<u64>()? {
            let Some(slot) = dims.get_mut(rank) else {
                let tensor = self.name.to_owned().into();
                *self.fault = Some(HeaderError::RankTooLarge { tensor });
                return Err(A::Error::custom("too many dimensions"));
            };
            *slot = dim;
            rank += 1;
        }
        Ok(dims.get(..rank).unwrap_or_default().into())
    }
}
