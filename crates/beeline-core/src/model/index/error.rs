//! What can be wrong with an index, and what is merely worth saying.

use alloc::boxed::Box;
use core::fmt;

use super::{INDEX_LEN_MAX, SHARD_NAME_MAX, SHARDS_MAX};
use crate::model::Clipped;

/// Why an index, or a model by its index, cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexError {
    /// `index-too-large`: the index is longer than any sensible one.
    TooLarge {
        /// Length in bytes.
        len: u64,
    },
    /// `bad-utf8`: the index is not UTF-8.
    BadUtf8 {
        /// Offset of the first bad byte.
        at: usize,
    },
    /// `bad-index`: the index is not JSON, or lacks a `weight_map` of strings.
    BadJson {
        /// What the JSON reader says.
        detail: Box<str>,
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault in bytes, from 1.
        column: usize,
    },
    /// `duplicate-tensor`: the index lists a tensor twice.
    DuplicateTensor {
        /// The tensor.
        tensor: Box<str>,
    },
    /// `bad-shard-name`: the name of a shard is not a plain file name.
    BadShardName {
        /// The first tensor that should lie in it.
        tensor: Box<str>,
        /// The name.
        shard: Box<str>,
        /// What is wrong with it.
        fault: NameFault,
    },
    /// `too-many-shards`: the index names more files than any sensible one.
    TooManyShards,
    /// `missing-shard`: a shard is not in the index's directory.
    MissingShard {
        /// Its name.
        shard: Box<str>,
    },
    /// `header-count`: the caller gave another number of headers than the index has shards.
    HeaderCount {
        /// Shards of the index.
        shards: usize,
        /// Headers given.
        headers: usize,
    },
    /// `index-mismatch`: a shard does not hold a tensor that the index says it does.
    Mismatch {
        /// The tensor.
        tensor: Box<str>,
        /// The shard that the index names.
        shard: Box<str>,
        /// The shard that holds it, where one does.
        found_in: Option<Box<str>>,
    },
    /// `tensor-in-two-shards`: two shards hold a tensor of the same name.
    HeldTwice {
        /// The tensor.
        tensor: Box<str>,
        /// One shard.
        first: Box<str>,
        /// The other shard.
        second: Box<str>,
    },
}

/// What makes a shard's name no plain file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameFault {
    /// It is empty.
    Empty,
    /// It is longer than [`SHARD_NAME_MAX`](super::SHARD_NAME_MAX) bytes.
    TooLong,
    /// It is `.` or `..`.
    Directory,
    /// It contains `/` or `\`, so it may be absolute or lead out of the directory.
    Separator,
    /// It contains a control character, NUL among them.
    Control,
}

/// Something about a sharded model that does not stop a load and should be told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// `stray-file`: a `.safetensors` file beside the shards that the index does not name.
    StrayFile {
        /// Its name.
        file: Box<str>,
    },
    /// `unlisted-tensors`: a shard holds tensors that the index does not list.
    UnlistedTensors {
        /// The shard.
        shard: Box<str>,
        /// The first of them in file order.
        tensor: Box<str>,
        /// How many.
        count: usize,
    },
    /// `total-size`: the index tells another number of bytes than the shards hold.
    TotalSize {
        /// Bytes by the index.
        declared: u64,
        /// Bytes in the shards.
        found: u64,
    },
}

impl IndexError {
    /// The stable name of the fault.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } => "index-too-large",
            Self::BadUtf8 { .. } => "bad-utf8",
            Self::BadJson { .. } => "bad-index",
            Self::DuplicateTensor { .. } => "duplicate-tensor",
            Self::BadShardName { .. } => "bad-shard-name",
            Self::TooManyShards => "too-many-shards",
            Self::MissingShard { .. } => "missing-shard",
            Self::HeaderCount { .. } => "header-count",
            Self::Mismatch { .. } => "index-mismatch",
            Self::HeldTwice { .. } => "tensor-in-two-shards",
        }
    }

    /// What a person can do about it.
    pub const fn remedy(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } | Self::TooManyShards => {
                "this is hardly an index: name the *.index.json of the model"
            }
            Self::BadUtf8 { .. } | Self::BadJson { .. } => {
                "fetch the index again, or name the *.index.json of the model"
            }
            Self::BadShardName { .. } => {
                "shards lie beside their index: mend the name, and trust this index no further"
            }
            Self::MissingShard { .. } => "fetch the missing file into the index's directory",
            Self::HeaderCount { .. } => "give one header for each shard, in the index's order",
            Self::DuplicateTensor { .. } | Self::Mismatch { .. } | Self::HeldTwice { .. } => {
                "index and shards are of different exports: fetch the whole model again, or mend the index"
            }
        }
    }

    fn fmt_fault(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { len } => {
                write!(f, "the index has {len} bytes, more than the limit of {INDEX_LEN_MAX}")
            }
            Self::BadUtf8 { at } => write!(f, "byte {at} of the index is not UTF-8"),
            Self::BadJson { detail, line, column } => {
                let detail = Clipped(detail);
                write!(f, "the index cannot be read: {detail} (line {line}, column {column})")
            }
            Self::DuplicateTensor { tensor } => {
                write!(f, "the index lists tensor '{}' twice", Clipped(tensor))
            }
            Self::BadShardName { tensor, shard, fault } => write!(
                f,
                "the index puts tensor '{}' into file '{}', which is no plain file name: it {fault}",
                Clipped(tensor),
                Clipped(shard)
            ),
            Self::TooManyShards => write!(f, "the index names more than {SHARDS_MAX} files"),
            Self::MissingShard { shard } => {
                write!(f, "the index names file '{}', which is not there", Clipped(shard))
            }
            Self::HeaderCount { shards, headers } => {
                write!(f, "the index has {shards} shards, but {headers} headers were given")
            }
            Self::Mismatch { tensor, shard, found_in } => {
                let (tensor, shard) = (Clipped(tensor), Clipped(shard));
                write!(f, "the index puts tensor '{tensor}' into '{shard}', which lacks it")?;
                match found_in {
                    Some(holder) => write!(f, " ('{}' holds it)", Clipped(holder)),
                    None => f.write_str(" (as do all other shards)"),
                }
            }
            Self::HeldTwice { tensor, first, second } => write!(
                f,
                "tensor '{}' stands in two shards, '{}' and '{}'",
                Clipped(tensor),
                Clipped(first),
                Clipped(second)
            ),
        }
    }
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_fault(f)?;
        write!(f, "; {}", self.remedy())
    }
}

impl core::error::Error for IndexError {}

impl fmt::Display for NameFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("is empty"),
            Self::TooLong => write!(f, "is longer than {SHARD_NAME_MAX} bytes"),
            Self::Directory => f.write_str("is a directory"),
            Self::Separator => f.write_str("contains a path separator"),
            Self::Control => f.write_str("contains a control character"),
        }
    }
}

impl Finding {
    /// The stable name of the finding.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::StrayFile { .. } => "stray-file",
            Self::UnlistedTensors { .. } => "unlisted-tensors",
            Self::TotalSize { .. } => "total-size",
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StrayFile { file } => write!(
                f,
                "'{}' lies beside the shards and is none of them: load by the index, never by '*.safetensors'",
                Clipped(file)
            ),
            Self::UnlistedTensors { shard, tensor, count } => write!(
                f,
                "'{}' holds {count} tensors that the index does not list, '{}' first",
                Clipped(shard),
                Clipped(tensor)
            ),
            Self::TotalSize { declared, found } => {
                write!(f, "the index tells {declared} bytes, the shards hold {found}")
            }
        }
    }
}
