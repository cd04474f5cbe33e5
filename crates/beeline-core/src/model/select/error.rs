//! Why a selection cannot be made.

use alloc::boxed::Box;
use core::fmt;

use super::PATTERN_LEN_MAX;
use crate::model::{Clipped, Dtype};

/// Why a selection cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SelectError {
    /// `bad-pattern`: a glob cannot be read.
    BadPattern {
        /// The glob.
        pattern: Box<str>,
        /// What it does wrong, as a verb phrase.
        fault: &'static str,
    },
    /// `bad-rank`: a rank that its number of ranks does not have.
    BadRank {
        /// The rank, from 0.
        rank: u64,
        /// Number of ranks.
        of: u64,
    },
    /// `bad-rows`: a range of rows that ends before it begins.
    BadRows {
        /// First row.
        start: u64,
        /// One past the last row.
        end: u64,
    },
    /// `no-match`: a pattern matches no tensor.
    NoMatch {
        /// The pattern.
        pattern: Box<str>,
        /// The name of a tensor that it may have meant.
        closest: Option<Box<str>>,
    },
    /// `nothing-selected`: every tensor that was included was excluded as well.
    NothingSelected,
    /// `duplicate-tensor`: two files hold a selected tensor of the same name.
    DuplicateTensor {
        /// The name.
        tensor: Box<str>,
        /// Index of one file.
        first: u32,
        /// Index of the other file.
        second: u32,
    },
    /// `rows-out-of-range`: a tensor has not all the rows that are asked for.
    RowsOutOfRange {
        /// The tensor.
        tensor: Box<str>,
        /// How many rows it has.
        rows: u64,
        /// First row asked for.
        start: u64,
        /// One past the last row asked for.
        end: u64,
    },
    /// `slice-inside-byte`: a row of a packed type does not fill whole bytes.
    InsideByte {
        /// The tensor.
        tensor: Box<str>,
        /// Type of its elements.
        dtype: Dtype,
        /// How many rows it has.
        rows: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// `slice-unknown-dtype`: where a row of an unknown type begins is not known.
    UnknownDtype {
        /// The tensor.
        tensor: Box<str>,
        /// Type of its elements.
        dtype: Dtype,
    },
    /// `too-many-files`: more files than 32 bits count.
    TooManyFiles,
}

impl SelectError {
    /// The stable name of the fault.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::BadPattern { .. } => "bad-pattern",
            Self::BadRank { .. } => "bad-rank",
            Self::BadRows { .. } => "bad-rows",
            Self::NoMatch { .. } => "no-match",
            Self::NothingSelected => "nothing-selected",
            Self::DuplicateTensor { .. } => "duplicate-tensor",
            Self::RowsOutOfRange { .. } => "rows-out-of-range",
            Self::InsideByte { .. } => "slice-inside-byte",
            Self::UnknownDtype { .. } => "slice-unknown-dtype",
            Self::TooManyFiles => "too-many-files",
        }
    }
}

impl fmt::Display for SelectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadPattern { pattern, fault } => write!(
                f,
                "pattern '{}' {fault}; write at most {PATTERN_LEN_MAX} characters, and '[[]' for a literal '['",
                Clipped(pattern)
            ),
            Self::BadRank { rank, of } => {
                write!(f, "rank {rank} of {of} does not exist; ranks count from 0")
            }
            Self::BadRows { start, end } => {
                write!(f, "rows {start} to {end} end before they begin; give the lower bound first")
            }
            Self::NoMatch { pattern, closest: Some(name) } => write!(
                f,
                "no tensor matches '{}'; did you mean '{}'?",
                Clipped(pattern),
                Clipped(name)
            ),
            Self::NoMatch { pattern, closest: None } => write!(
                f,
                "no tensor matches '{}'; the names stand in the JSON that begins at byte 8 of each file",
                Clipped(pattern)
            ),
            Self::NothingSelected => {
                f.write_str("every tensor that is included is excluded as well; exclude less")
            }
            Self::DuplicateTensor { tensor, first, second } => write!(
                f,
                "tensor '{}' stands in file {first} and in file {second}; load one of them, or exclude it",
                Clipped(tensor)
            ),
            Self::RowsOutOfRange { tensor, rows, start, end } => write!(
                f,
                "tensor '{}' has {rows} rows, not {start} to {end}; ask for fewer, or for a rank's share",
                Clipped(tensor)
            ),
            Self::InsideByte { tensor, dtype, rows, len } => write!(
                f,
                "tensor '{}' packs {rows} rows of {dtype} into {len} bytes, so a row ends inside a byte; load it whole",
                Clipped(tensor)
            ),
            Self::UnknownDtype { tensor, dtype } => write!(
                f,
                "tensor '{}' is of the unknown type {dtype}, whose rows have no known size; load it whole",
                Clipped(tensor)
            ),
            Self::TooManyFiles => f.write_str("more than 4294967295 files; load fewer at a time"),
        }
    }
}

impl core::error::Error for SelectError {}
