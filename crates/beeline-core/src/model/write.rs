//! Headers for files to be written: for tools, benchmarks and tests.

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use super::header::{HEADER_LEN_MAX, METADATA_KEY, PREFIX_LEN, RANK_MAX};
use super::{Clipped, Dtype};

/// Where the data section shall begin. Padding is spaces behind the JSON, as the format allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// Directly behind the JSON.
    None,
    /// At the next file offset that is `remainder` modulo `align`. `align` 8 with remainder 0 is what
    /// common writers do; remainder 1 makes a file whose tensors are all misaligned.
    To {
        /// The modulus in bytes, from 1 to 1 MiB.
        align: u64,
        /// The remainder, below `align`.
        remainder: u64,
    },
}

/// Largest modulus of a [`Padding`].
const ALIGN_MAX: u64 = 1 << 20;

/// Builds the 8-byte prefix and the header of a file whose tensors follow one another in the order
/// in which they were added. What it builds, [`Header::parse`](super::Header::parse) accepts.
#[derive(Clone, Debug)]
pub struct HeaderBuilder {
    entries: String,
    names: BTreeSet<Box<str>>,
    metadata: BTreeMap<String, String>,
    padding: Padding,
    data_len: u64,
}

impl Default for HeaderBuilder {
    fn default() -> Self {
        Self {
            entries: String::new(),
            names: BTreeSet::new(),
            metadata: BTreeMap::new(),
            padding: Padding::To { align: 8, remainder: 0 },
            data_len: 0,
        }
    }
}

impl HeaderBuilder {
    /// A header without tensors, padded to 8 bytes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata entry; a key that was there is replaced.
    #[must_use]
    pub fn metadata(mut self, key: &str, value: &str) -> Self {
        self.metadata.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Chooses where the data begins.
    #[must_use]
    pub const fn padding(mut self, padding: Padding) -> Self {
        self.padding = padding;
        self
    }

    /// Adds a tensor of a known type, whose length follows from its shape.
    pub fn tensor(self, name: &str, dtype: Dtype, shape: &[u64]) -> Result<Self, WriteError> {
        let bad_shape = || WriteError::BadShape {
            tensor: name.into(),
            dtype: dtype.clone(),
            shape: shape.into(),
        };
        let elements = shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
        let (Some(elements), Some(bits)) = (elements, dtype.bits()) else {
            return Err(bad_shape());
        };
        let bits = u128::from(elements) * u128::from(bits);
        let len = (bits % 8 == 0).then(|| u64::try_from(bits / 8).ok()).flatten();
        let len = len.ok_or_else(bad_shape)?;
        self.tensor_with_len(name, dtype, shape, len)
    }

    /// Adds a tensor of `len` bytes, for types whose length does not follow from the shape. Nothing
    /// compares `len` with a known type: use [`HeaderBuilder::tensor`] for those.
    pub fn tensor_with_len(
        mut self,
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        len: u64,
    ) -> Result<Self, WriteError> {
        if shape.len() > RANK_MAX {
            return Err(WriteError::BadShape { tensor: name.into(), dtype, shape: shape.into() });
        }
        if name == METADATA_KEY || !self.names.insert(name.into()) {
            return Err(WriteError::BadName { tensor: name.into() });
        }
        let begin = self.data_len;
        let Some(end) = begin.checked_add(len) else {
            return Err(WriteError::DataTooLarge { tensor: name.into(), begin, len });
        };
        self.data_len = end;
        let (name, dtype) = (quoted(name), quoted(dtype.name()));
        let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
        let comma = if self.entries.is_empty() { "" } else { "," };
        self.entries += &format!(
            r#"{comma}{name}:{{"dtype":{dtype},"shape":[{}],"data_offsets":[{begin},{end}]}}"#,
            dims.join(",")
        );
        Ok(self)
    }

    /// Bytes of the data section, which the caller writes behind the header.
    pub const fn data_len(&self) -> u64 {
        self.data_len
    }

    /// The first bytes of the file: prefix, JSON, padding.
    pub fn build(&self) -> Result<Vec<u8>, WriteError> {
        let mut json = String::from("{");
        if !self.metadata.is_empty() {
            let pairs: Vec<String> = self
                .metadata
                .iter()
                .map(|(key, value)| format!("{}:{}", quoted(key), quoted(value)))
                .collect();
            json += &format!(r#""{METADATA_KEY}":{{{}}}"#, pairs.join(","));
            if !self.entries.is_empty() {
                json.push(',');
            }
        }
        json += &self.entries;
        json.push('}');
        let padded = self.padded_len(json.len() as u64)?;
        let mut bytes = padded.to_le_bytes().to_vec();
        bytes.extend(json.into_bytes());
        // Bounded by HEADER_LEN_MAX, so it fits any usize.
        let len = usize::try_from(PREFIX_LEN + padded).unwrap_or(usize::MAX);
        bytes.resize(len, b' ');
        Ok(bytes)
    }

    /// Length of the header with its padding.
    fn padded_len(&self, json_len: u64) -> Result<u64, WriteError> {
        let padding = match self.padding {
            Padding::None => 0,
            Padding::To { align, remainder } => {
                if align == 0 || align > ALIGN_MAX || remainder >= align {
                    return Err(WriteError::BadPadding { align, remainder });
                }
                // All terms are bounded: no sum or difference can overflow.
                (align + remainder - (PREFIX_LEN + json_len) % align) % align
            }
        };
        let len = json_len + padding;
        if len > HEADER_LEN_MAX {
            return Err(WriteError::HeaderTooLarge { len });
        }
        Ok(len)
    }
}

/// `text` as a JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Why a header cannot be written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteError {
    /// `bad-shape`: too many dimensions, or type and shape give no whole number of bytes that fits
    /// 64 bits.
    BadShape {
        /// The tensor.
        tensor: Box<str>,
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Box<[u64]>,
    },
    /// `bad-name`: the name is taken or reserved.
    BadName {
        /// The tensor.
        tensor: Box<str>,
    },
    /// `bad-padding`: a modulus out of range, or a remainder not below it.
    BadPadding {
        /// The modulus.
        align: u64,
        /// The remainder.
        remainder: u64,
    },
    /// `data-too-large`: the data section does not fit 64 bits.
    DataTooLarge {
        /// The tensor that does not fit any more.
        tensor: Box<str>,
        /// Where it would begin.
        begin: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// `header-too-large`: the header is longer than readers accept.
    HeaderTooLarge {
        /// Its length in bytes.
        len: u64,
    },
}

impl WriteError {
    /// The stable name of the fault.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::BadShape { .. } => "bad-shape",
            Self::BadName { .. } => "bad-name",
            Self::BadPadding { .. } => "bad-padding",
            Self::DataTooLarge { .. } => "data-too-large",
            Self::HeaderTooLarge { .. } => "header-too-large",
        }
    }
}

impl fmt::Display for WriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadShape { tensor, dtype, shape } => write!(
                f,
                "tensor '{}' of {dtype} and shape {shape:?} has no whole number of bytes or more than {RANK_MAX} dimensions; mend the shape, or give the length of an unknown type",
                Clipped(tensor)
            ),
            Self::BadName { tensor } => {
                write!(f, "tensor '{}' is taken or reserved; choose another name", Clipped(tensor))
            }
            Self::BadPadding { align, remainder } => write!(
                f,
                "the data cannot begin at {remainder} modulo {align}; take a modulus up to {ALIGN_MAX} and a remainder below it"
            ),
            Self::DataTooLarge { tensor, begin, len } => write!(
                f,
                "tensor '{}' of {len} bytes does not fit behind {begin} bytes; write several files",
                Clipped(tensor)
            ),
            Self::HeaderTooLarge { len } => write!(
                f,
                "the header would have {len} bytes, more than the limit of {HEADER_LEN_MAX}; write several files"
            ),
        }
    }
}

impl core::error::Error for WriteError {}
