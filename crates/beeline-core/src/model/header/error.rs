//! What can be wrong with a header, with the values and the remedy.

use alloc::boxed::Box;
use core::fmt;

use super::{HEADER_LEN_MAX, RANK_MAX};
use crate::model::{Clipped, Dtype};

/// Why a file is no valid safetensors file.
///
/// All offsets are bytes from the start of the data section, all lengths are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// `file-too-short`: the file cannot even hold the 8-byte length.
    FileTooShort {
        /// Length of the file.
        file_len: u64,
    },
    /// `header-too-large`: the header is longer than the format's readers accept.
    TooLarge {
        /// Length of the header.
        len: u64,
    },
    /// `header-beyond-file`: the header claims to be longer than the file.
    BeyondFile {
        /// Length of the header.
        len: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// `bad-utf8`: the header is not UTF-8.
    BadUtf8 {
        /// Offset of the first bad byte inside the header.
        at: usize,
    },
    /// `bad-header-start`: the header does not open an object.
    BadStart {
        /// The byte found in place of `{`; `None` where the header is empty or all whitespace.
        found: Option<u8>,
    },
    /// `bad-json`: the header is not JSON.
    BadJson {
        /// The tensor being read, where one was.
        tensor: Option<Box<str>>,
        /// What the JSON reader says.
        detail: Box<str>,
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault in bytes, from 1.
        column: usize,
    },
    /// `bad-entry`: the JSON is sound, but not of the shape that the format prescribes.
    BadEntry {
        /// The tensor being read, where one was.
        tensor: Option<Box<str>>,
        /// What was found and what was expected.
        detail: Box<str>,
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault in bytes, from 1.
        column: usize,
    },
    /// `duplicate-tensor`: two entries have one name.
    DuplicateTensor {
        /// The name.
        tensor: Box<str>,
    },
    /// `duplicate-metadata`: two metadata entries have one key.
    DuplicateMetadata {
        /// The key.
        key: Box<str>,
    },
    /// `rank-too-large`: a tensor has more dimensions than anything sensible.
    RankTooLarge {
        /// The tensor.
        tensor: Box<str>,
    },
    /// `offsets-reversed`: a tensor ends before it begins.
    OffsetsReversed {
        /// The tensor.
        tensor: Box<str>,
        /// First offset.
        begin: u64,
        /// Second offset.
        end: u64,
    },
    /// `shape-overflow`: the number of elements does not fit 64 bits.
    ShapeOverflow {
        /// The tensor.
        tensor: Box<str>,
        /// Its shape.
        shape: Box<[u64]>,
    },
    /// `size-overflow`: the number of elements fits 64 bits, the number of bytes does not.
    SizeOverflow {
        /// The tensor.
        tensor: Box<str>,
        /// Elements.
        elements: u64,
        /// Bits per element.
        bits: u32,
    },
    /// `partial-byte`: the elements do not fill whole bytes.
    PartialByte {
        /// The tensor.
        tensor: Box<str>,
        /// Type of the elements.
        dtype: Dtype,
        /// Elements.
        elements: u64,
    },
    /// `size-mismatch`: type and shape ask for another length than the offsets give.
    SizeMismatch {
        /// The tensor.
        tensor: Box<str>,
        /// Type of the elements.
        dtype: Dtype,
        /// Bytes by type and shape.
        expected: u64,
        /// Bytes by the offsets.
        found: u64,
    },
    /// `data-hole`: bytes that belong to no tensor, before a tensor.
    Hole {
        /// The tensor after the hole.
        tensor: Box<str>,
        /// Where the tensor should begin.
        expected: u64,
        /// Where it begins.
        begin: u64,
    },
    /// `data-overlap`: two tensors share bytes.
    Overlap {
        /// The tensor that begins first.
        first: Box<str>,
        /// The tensor that begins inside it.
        second: Box<str>,
        /// Where the first ends.
        end: u64,
        /// Where the second begins.
        begin: u64,
    },
    /// `trailing-bytes`: the file goes on after the last tensor.
    TrailingBytes {
        /// Where the last tensor ends.
        data_end: u64,
        /// Length of the data section.
        data_len: u64,
    },
    /// `missing-bytes`: the file ends before the last tensor does.
    MissingBytes {
        /// The last tensor.
        tensor: Box<str>,
        /// Where it ends.
        data_end: u64,
        /// Length of the data section.
        data_len: u64,
    },
}

impl HeaderError {
    /// The stable name of the fault.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::FileTooShort { .. } => "file-too-short",
            Self::TooLarge { .. } => "header-too-large",
            Self::BeyondFile { .. } => "header-beyond-file",
            Self::BadUtf8 { .. } => "bad-utf8",
            Self::BadStart { .. } => "bad-header-start",
            Self::BadJson { .. } => "bad-json",
            Self::BadEntry { .. } => "bad-entry",
            Self::DuplicateTensor { .. } => "duplicate-tensor",
            Self::DuplicateMetadata { .. } => "duplicate-metadata",
            Self::RankTooLarge { .. } => "rank-too-large",
            Self::OffsetsReversed { .. } => "offsets-reversed",
            Self::ShapeOverflow { .. } => "shape-overflow",
            Self::SizeOverflow { .. } => "size-overflow",
            Self::PartialByte { .. } => "partial-byte",
            Self::SizeMismatch { .. } => "size-mismatch",
            Self::Hole { .. } => "data-hole",
            Self::Overlap { .. } => "data-overlap",
            Self::TrailingBytes { .. } => "trailing-bytes",
            Self::MissingBytes { .. } => "missing-bytes",
        }
    }

    /// What a person can do about it.
    pub const fn remedy(&self) -> &'static str {
        match self {
            Self::FileTooShort { .. } | Self::MissingBytes { .. } | Self::BeyondFile { .. } => {
                "the file is cut short or no safetensors file: fetch it again"
            }
            Self::TooLarge { .. } => "split the model into several files",
            Self::BadUtf8 { .. } | Self::BadStart { .. } => {
                "this is no safetensors file, or it is damaged: fetch it again"
            }
            Self::BadJson { .. } | Self::BadEntry { .. } => {
                "the file is damaged or its writer is faulty: fetch it again, or write it with a current writer"
            }
            Self::TrailingBytes { .. } => {
                "something was appended to the file: fetch it again, or write it anew"
            }
            _ => "the writer is faulty: write the file again with a current writer",
        }
    }

    fn fmt_fault(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FileTooShort { file_len } => {
                write!(f, "the file has {file_len} bytes, the length of its header alone takes 8")
            }
            Self::TooLarge { len } => {
                write!(f, "the header has {len} bytes, more than the limit of {HEADER_LEN_MAX}")
            }
            Self::BeyondFile { len, file_len } => {
                write!(f, "the header should have {len} bytes, but the file has {file_len} in all")
            }
            Self::BadUtf8 { at } => write!(f, "byte {at} of the header is not UTF-8"),
            Self::BadStart { found: Some(byte) } => {
                write!(f, "the header begins with byte {byte:#04x} where '{{' must stand")
            }
            Self::BadStart { found: None } => f.write_str("the header holds no JSON object"),
            Self::BadJson { tensor, detail, line, column } => {
                fmt_json(f, "the header is not JSON", tensor, detail, *line, *column)
            }
            Self::BadEntry { tensor, detail, line, column } => {
                fmt_json(f, "the header breaks the format", tensor, detail, *line, *column)
            }
            Self::DuplicateTensor { tensor } => {
                write!(f, "the header lists tensor '{}' twice", Clipped(tensor))
            }
            Self::DuplicateMetadata { key } => {
                write!(f, "the metadata lists key '{}' twice", Clipped(key))
            }
            Self::RankTooLarge { tensor } => {
                write!(f, "tensor '{}' has more than {RANK_MAX} dimensions", Clipped(tensor))
            }
            Self::OffsetsReversed { tensor, begin, end } => {
                write!(f, "tensor '{}' begins at {begin} and ends at {end}", Clipped(tensor))
            }
            Self::ShapeOverflow { tensor, shape } => write!(
                f,
                "tensor '{}' of shape {shape:?} has more elements than 64 bits count",
                Clipped(tensor)
            ),
            Self::SizeOverflow { tensor, elements, bits } => write!(
                f,
                "tensor '{}' has {elements} elements of {bits} bits, more bytes than 64 bits count",
                Clipped(tensor)
            ),
            Self::PartialByte { tensor, dtype, elements } => write!(
                f,
                "tensor '{}' has {elements} elements of {dtype}, which do not fill whole bytes",
                Clipped(tensor)
            ),
            Self::SizeMismatch { tensor, dtype, expected, found } => write!(
                f,
                "tensor '{}' of {dtype} needs {expected} bytes by its shape and has {found} by its offsets",
                Clipped(tensor)
            ),
            Self::Hole { tensor, expected, begin } => write!(
                f,
                "bytes {expected} to {begin} of the data, before tensor '{}', belong to no tensor",
                Clipped(tensor)
            ),
            Self::Overlap { first, second, end, begin } => write!(
                f,
                "tensor '{}' begins at {begin}, inside tensor '{}' which ends at {end}",
                Clipped(second),
                Clipped(first)
            ),
            Self::TrailingBytes { data_end, data_len } => write!(
                f,
                "{} bytes trail after the last tensor: the data has {data_len} bytes, the tensors end at {data_end}",
                data_len.saturating_sub(*data_end)
            ),
            Self::MissingBytes { tensor, data_end, data_len } => write!(
                f,
                "{} bytes are missing: tensor '{}' ends at {data_end}, the data has {data_len} bytes",
                data_end.saturating_sub(*data_len),
                Clipped(tensor)
            ),
        }
    }
}

fn fmt_json(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    tensor: &Option<Box<str>>,
    detail: &str,
    line: usize,
    column: usize,
) -> fmt::Result {
    f.write_str(what)?;
    if let Some(tensor) = tensor {
        write!(f, " in tensor '{}'", Clipped(tensor))?;
    }
    write!(f, ": {} (line {line}, column {column})", Clipped(detail))
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_fault(f)?;
        write!(f, "; {}", self.remedy())
    }
}

impl core::error::Error for HeaderError {}
