//! The header of one safetensors file: parsed once, and valid from then on.
//!
//! A caller reads the first 8 bytes, asks [`Header::len_from_prefix`] how many more to read, and
//! hands those to [`Header::parse`]. The format itself is described in [the parent](super).

mod error;
mod json;
mod metadata;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use super::{Clipped, Dtype};
use crate::addr::ByteRange;

pub use error::HeaderError;
pub(super) use json::{METADATA_KEY, Text, json_detail};
pub use metadata::Metadata;

/// Bytes before the header: its length as a little-endian 64-bit number.
pub const PREFIX_LEN: u64 = 8;

/// Longest header in bytes that is read: the limit of the reference implementation.
pub const HEADER_LEN_MAX: u64 = 100_000_000;

/// Most dimensions a tensor may have. The format sets no limit; real models stay below 8.
pub const RANK_MAX: usize = 64;

/// The header of one file. Holding one means that its tensors cover the data section exactly, and
/// that each tensor's length agrees with its type and shape.
#[derive(Clone, Debug)]
pub struct Header {
    /// Ordered by place in the file.
    tensors: Vec<TensorInfo>,
    /// Indexes into `tensors`, ordered by name.
    by_name: Vec<u32>,
    metadata: Metadata,
    data: ByteRange,
}

impl Header {
    /// The length in bytes of the JSON header, from the first 8 bytes of a file of `file_len` bytes.
    ///
    /// Fails with `file-too-short`, `header-too-large` or `header-beyond-file`, so that a caller
    /// never allocates or reads what a hostile prefix claims.
    pub fn len_from_prefix(prefix: &[u8; 8], file_len: u64) -> Result<u64, HeaderError> {
        if file_len < PREFIX_LEN {
            return Err(HeaderError::FileTooShort { file_len });
        }
        let len = u64::from_le_bytes(*prefix);
        Self::check_len(len, file_len)?;
        Ok(len)
    }

    /// Parses and checks the header `json` (without the 8-byte prefix) of a file of `file_len` bytes.
    ///
    /// Deviations from the reference implementation, which this follows otherwise: names that stand
    /// twice are refused (as the format demands), a tensor has at most [`RANK_MAX`] dimensions, an
    /// entry is always an object and its dtype always a string, and an element type this build does
    /// not know is accepted by its byte length. Whitespace before the `{` is accepted as the
    /// reference does, although the format's text demands that the header begins with `{`: writers
    /// use it to align the data.
    ///
    /// Time is `O(n log n)` in the header's length; memory is at most a small multiple of it.
    pub fn parse(json: &[u8], file_len: u64) -> Result<Self, HeaderError> {
        // A slice's length always fits 64 bits on the platforms Rust knows.
        let len = json.len() as u64;
        Self::check_len(len, file_len)?;
        let text = core::str::from_utf8(json)
            .map_err(|error| HeaderError::BadUtf8 { at: error.valid_up_to() })?;
        check_start(json)?;
        let json::Entries { mut tensors, metadata } = json::parse(text)?;
        let by_name = index_names(&tensors)?;
        let by_name = if tensors.is_sorted_by_key(TensorInfo::place) {
            by_name
        } else {
            // Names were checked before the order: a name that stands twice would otherwise be
            // reported as an overlap, which is its consequence.
            tensors.sort_by_key(TensorInfo::place);
            index_names(&tensors)?
        };
        let start = PREFIX_LEN + len;
        let data = ByteRange { start, len: file_len - start };
        check_coverage(&tensors, data.len)?;
        Ok(Self { tensors, by_name, metadata, data })
    }

    /// Parses the header of a whole file that lies in memory.
    pub fn parse_file(file: &[u8]) -> Result<Self, HeaderError> {
        let file_len = file.len() as u64;
        let (prefix, rest) =
            file.split_first_chunk::<8>().ok_or(HeaderError::FileTooShort { file_len })?;
        let len = Self::len_from_prefix(prefix, file_len)?;
        let json = usize::try_from(len).ok().and_then(|len| rest.get(..len));
        Self::parse(json.ok_or(HeaderError::BeyondFile { len, file_len })?, file_len)
    }

    /// The tensors, ordered by their place in the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        let tensor = |index: &u32| self.tensors.get(*index as usize);
        let found = self
            .by_name
            .binary_search_by(|index| tensor(index).map_or("", TensorInfo::name).cmp(name));
        self.by_name.get(found.ok()?).and_then(tensor)
    }

    /// The free-form metadata; empty where the file has none.
    pub const fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The data section as a range of the file.
    pub const fn data_range(&self) -> ByteRange {
        self.data
    }

    /// The bytes of `tensor`, which must be one of [`Header::tensors`], as a range of the file.
    pub const fn file_range(&self, tensor: &TensorInfo) -> ByteRange {
        // Cannot overflow for a tensor of this header; for a stray one a saturated start is refused
        // by every reader.
        ByteRange { start: self.data.start.saturating_add(tensor.data.start), len: tensor.data.len }
    }

    /// Tensors whose place in the file is no multiple of their element size, or `None` where there
    /// are none. A remark, never an error: the format demands no alignment.
    pub fn misaligned(&self) -> Option<Misaligned> {
        let mut odd = self.tensors.iter().filter(|tensor| self.is_misaligned(tensor));
        let first = odd.next()?;
        Some(Misaligned { tensor: first.name.clone(), count: 1 + odd.count() })
    }

    /// Only whole-byte elements of a known type count: packed ones have no alignment.
    fn is_misaligned(&self, tensor: &TensorInfo) -> bool {
        match tensor.dtype.bits() {
            Some(bits) if bits % 8 == 0 => {
                !self.file_range(tensor).start.is_multiple_of(u64::from(bits / 8))
            }
            _ => false,
        }
    }

    const fn check_len(len: u64, file_len: u64) -> Result<(), HeaderError> {
        if len > HEADER_LEN_MAX {
            return Err(HeaderError::TooLarge { len });
        }
        // `len` is bounded, so the sum cannot overflow.
        if file_len < PREFIX_LEN + len {
            return Err(HeaderError::BeyondFile { len, file_len });
        }
        Ok(())
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    name: Box<str>,
    dtype: Dtype,
    shape: Box<[u64]>,
    /// Relative to the data section.
    data: ByteRange,
}

impl TensorInfo {
    /// The name.
    pub const fn name(&self) -> &str {
        &self.name
    }

    /// The type of the elements.
    pub const fn dtype(&self) -> &Dtype {
        &self.dtype
    }

    /// The dimensions, outermost first; empty for a scalar.
    pub const fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The bytes, as a range of the data section. [`Header::file_range`] gives the range of the file.
    pub const fn data_range(&self) -> ByteRange {
        self.data
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an empty tensor is asked for by its length")]
    pub const fn len(&self) -> u64 {
        self.data.len
    }

    /// Number of elements; 1 for a scalar.
    pub fn elements(&self) -> u64 {
        // Checked at parse time, so nothing saturates.
        self.shape.iter().fold(1, |product, &dim| product.saturating_mul(dim))
    }

    /// Bits per element. Of an unknown type they follow from length and shape where the division is
    /// exact; else, and where there is no element or no byte, they are unknown.
    pub fn bits_per_element(&self) -> Option<u64> {
        if let Some(bits) = self.dtype.bits() {
            return Some(u64::from(bits));
        }
        let (bits, elements) = (u128::from(self.data.len) * 8, u128::from(self.elements()));
        if elements == 0 || bits == 0 || bits % elements != 0 {
            return None;
        }
        u64::try_from(bits / elements).ok()
    }

    const fn place(&self) -> (u64, u64) {
        (self.data.start, self.data.len)
    }

    /// Whether length, type and shape agree.
    fn check_size(&self) -> Result<(), HeaderError> {
        let tensor = || self.name.clone();
        let product = self.shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
        let Some(elements) = product else {
            return Err(HeaderError::ShapeOverflow { tensor: tensor(), shape: self.shape.clone() });
        };
        let Some(bits) = self.dtype.bits() else {
            return Ok(());
        };
        let total_bits = u128::from(elements) * u128::from(bits);
        if total_bits % 8 != 0 {
            let dtype = self.dtype.clone();
            return Err(HeaderError::PartialByte { tensor: tensor(), dtype, elements });
        }
        let Ok(expected) = u64::try_from(total_bits / 8) else {
            return Err(HeaderError::SizeOverflow { tensor: tensor(), elements, bits });
        };
        if expected != self.data.len {
            let (dtype, found) = (self.dtype.clone(), self.data.len);
            return Err(HeaderError::SizeMismatch { tensor: tensor(), dtype, expected, found });
        }
        Ok(())
    }
}

/// A remark (code `misaligned`): some tensors lie at no multiple of their element size.
///
/// A reader that maps the file cannot use such a tensor in place. One that copies it, as this one
/// does, gives it an aligned place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misaligned {
    /// How many tensors.
    pub count: usize,
    /// The first of them in file order.
    pub tensor: Box<str>,
}

impl Misaligned {
    /// The stable name of the remark.
    pub const fn code(&self) -> &'static str {
        "misaligned"
    }
}

impl fmt::Display for Misaligned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tensors lie at no multiple of their element size in the file, '{}' first; they are aligned on the device",
            self.count,
            Clipped(&self.tensor)
        )
    }
}

/// The reference implementation skips JSON whitespace before the object, and so do we.
fn check_start(json: &[u8]) -> Result<(), HeaderError> {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    match json.iter().copied().find(|byte| !is_blank(byte)) {
        Some(b'{') => Ok(()),
        found => Err(HeaderError::BadStart { found }),
    }
}

/// Indexes of `tensors` ordered by name; refuses a name that stands twice.
fn index_names(tensors: &[TensorInfo]) -> Result<Vec<u32>, HeaderError> {
    let name = |index: &u32| tensors.get(*index as usize).map_or("", TensorInfo::name);
    // An entry takes 40 bytes of a bounded header, so every index fits.
    let mut by_name: Vec<u32> = (0..).take(tensors.len()).collect();
    // Stable, because names mostly stand in long sorted runs, which this sort exploits.
    by_name.sort_by(|a, b| name(a).cmp(name(b)));
    let twice = by_name.windows(2).find_map(|pair| match pair {
        [a, b] if name(a) == name(b) => Some(name(a)),
        _ => None,
    });
    match twice {
        Some(tensor) => Err(HeaderError::DuplicateTensor { tensor: tensor.into() }),
        None => Ok(by_name),
    }
}

/// Walks the tensors in file order: each sound in itself, each beginning where the last one ended.
fn check_coverage(tensors: &[TensorInfo], data_len: u64) -> Result<(), HeaderError> {
    let mut cursor = 0;
    let mut last: Option<&TensorInfo> = None;
    for tensor in tensors {
        let begin = tensor.data.start;
        if begin > cursor {
            let tensor = tensor.name.clone();
            return Err(HeaderError::Hole { tensor, expected: cursor, begin });
        }
        if begin < cursor {
            let first = last.map_or_else(Box::default, |last| last.name.clone());
            let second = tensor.name.clone();
            return Err(HeaderError::Overlap { first, second, end: cursor, begin });
        }
        tensor.check_size()?;
        // Cannot saturate: the end stood in the file as a 64-bit number.
        cursor = tensor.data.end();
        last = Some(tensor);
    }
    if let (true, Some(last)) = (cursor > data_len, last) {
        let tensor = last.name.clone();
        return Err(HeaderError::MissingBytes { tensor, data_end: cursor, data_len });
    }
    if cursor < data_len {
        return Err(HeaderError::TrailingBytes { data_end: cursor, data_len });
    }
    Ok(())
}
