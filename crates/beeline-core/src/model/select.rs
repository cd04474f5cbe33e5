//! What of a model to load: which tensors, and which of their rows.
//!
//! A [`Selection`] names tensors by exact name or by [glob](Pattern), may exclude some, and may take
//! a [`Slice`] of the first dimension of each, as tensor-parallel ranks do.

mod error;
mod glob;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

use super::{Dtype, Header, TensorInfo};
use crate::addr::ByteRange;

pub use error::SelectError;
pub use glob::{PATTERN_LEN_MAX, Pattern};

/// Steps spent on finding the name a mistyped pattern meant, over all names together.
const SUGGEST_STEPS: usize = 20_000_000;

/// Longest name that is suggested, in bytes.
const SUGGEST_NAME_MAX: usize = 512;

/// Which tensors of a model, and which rows of them.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
    slice: Slice,
}

impl Selection {
    /// Every tensor, whole.
    pub fn all() -> Self {
        Self::default()
    }

    /// Adds the tensors that match `pattern`. Without any such call all tensors are selected.
    #[must_use]
    pub fn include(mut self, pattern: Pattern) -> Self {
        self.include.push(pattern);
        self
    }

    /// Takes away the tensors that match `pattern`. It wins over [`Selection::include`], and may
    /// match nothing: one list of exclusions often serves several models.
    #[must_use]
    pub fn exclude(mut self, pattern: Pattern) -> Self {
        self.exclude.push(pattern);
        self
    }

    /// Takes only these rows of every selected tensor.
    #[must_use]
    pub const fn rows(mut self, slice: Slice) -> Self {
        self.slice = slice;
        self
    }

    /// Applies the selection to the files of one model.
    ///
    /// The answer is ordered by file and by place in the file. Fails with
    /// - `no-match` where an include pattern matches nothing, and `nothing-selected` where the
    ///   exclusions left nothing;
    /// - `duplicate-tensor` where two files hold a selected name;
    /// - `rows-out-of-range`, `slice-inside-byte` or `slice-unknown-dtype` where a tensor cannot be
    ///   sliced as asked;
    /// - `too-many-files` beyond 2^32 files.
    pub fn select<'a>(&self, files: &[&'a Header]) -> Result<Vec<Selected<'a>>, SelectError> {
        let mut hit: Vec<bool> = self.include.iter().map(|_| false).collect();
        let mut selected = Vec::new();
        for (file, header) in files.iter().enumerate() {
            let file = u32::try_from(file).map_err(|_| SelectError::TooManyFiles)?;
            for tensor in header.tensors() {
                if self.wants(tensor.name(), &mut hit) {
                    selected.push(self.cut(file, header, tensor)?);
                }
            }
        }
        if let Some((pattern, _)) = self.include.iter().zip(&hit).find(|(_, hit)| !**hit) {
            let closest = closest_name(pattern, files);
            return Err(SelectError::NoMatch { pattern: pattern.as_str().into(), closest });
        }
        if selected.is_empty() && !self.include.is_empty() {
            return Err(SelectError::NothingSelected);
        }
        refuse_twice(&selected)?;
        Ok(selected)
    }

    /// Whether the tensor is selected; notes in `hit` which include patterns match it.
    fn wants(&self, name: &str, hit: &mut [bool]) -> bool {
        let mut wanted = self.include.is_empty();
        for (pattern, hit) in self.include.iter().zip(hit) {
            let matches = pattern.matches(name);
            wanted |= matches;
            *hit |= matches;
        }
        wanted && !self.exclude.iter().any(|pattern| pattern.matches(name))
    }

    fn cut<'a>(
        &self,
        file: u32,
        header: &Header,
        tensor: &'a TensorInfo,
    ) -> Result<Selected<'a>, SelectError> {
        let whole = header.file_range(tensor);
        let mut shape: Box<[u64]> = tensor.shape().into();
        let Some(dim) = shape.first_mut() else {
            return Ok(Selected { file, tensor, shape, file_range: whole });
        };
        let Some(rows) = self.slice.of_rows(*dim, tensor)? else {
            return Ok(Selected { file, tensor, shape, file_range: whole });
        };
        let row_len = row_len(tensor, *dim)?;
        *dim = rows.end - rows.start;
        // `rows` lies inside the tensor, whose bytes lie inside the file: nothing can overflow.
        let file_range =
            ByteRange { start: whole.start + rows.start * row_len, len: *dim * row_len };
        Ok(Selected { file, tensor, shape, file_range })
    }
}

/// Which rows of a tensor. A row is one index of the first dimension; a scalar has none and is
/// always taken whole, because every rank needs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slice(SliceKind);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SliceKind {
    #[default]
    Whole,
    Rank {
        rank: u64,
        of: u64,
    },
    Rows {
        start: u64,
        end: u64,
    },
}

impl Slice {
    /// All rows.
    pub const fn whole() -> Self {
        Self(SliceKind::Whole)
    }

    /// The share of `rank` when the rows are dealt to `of` ranks: consecutive rows, equal shares,
    /// with the remainder to the first ranks, one row each. With fewer rows than ranks the last
    /// ranks get an empty tensor. Fails with `bad-rank` unless `rank < of`.
    pub const fn rank(rank: u64, of: u64) -> Result<Self, SelectError> {
        match of {
            _ if rank >= of => Err(SelectError::BadRank { rank, of }),
            1 => Ok(Self(SliceKind::Whole)),
            _ => Ok(Self(SliceKind::Rank { rank, of })),
        }
    }

    /// Exactly the rows `[start, end)`, which every selected tensor of one dimension or more must
    /// have. Fails with `bad-rows` where they end before they begin.
    pub const fn rows(start: u64, end: u64) -> Result<Self, SelectError> {
        if end < start {
            return Err(SelectError::BadRows { start, end });
        }
        Ok(Self(SliceKind::Rows { start, end }))
    }

    /// The rows out of `dim`, or `None` where the tensor is taken whole.
    fn of_rows(self, dim: u64, tensor: &TensorInfo) -> Result<Option<Range<u64>>, SelectError> {
        let rows = match self.0 {
            SliceKind::Whole => return Ok(None),
            SliceKind::Rank { rank, of } => {
                let (share, rest) = (dim / of, dim % of);
                let start = share * rank + rank.min(rest);
                start..start + share + u64::from(rank < rest)
            }
            SliceKind::Rows { start, end } if end > dim => {
                let tensor = tensor.name().into();
                return Err(SelectError::RowsOutOfRange { tensor, rows: dim, start, end });
            }
            SliceKind::Rows { start, end } => start..end,
        };
        Ok(Some(rows))
    }
}

/// One tensor that is wanted, or the wanted rows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected<'a> {
    file: u32,
    tensor: &'a TensorInfo,
    shape: Box<[u64]>,
    file_range: ByteRange,
}

impl<'a> Selected<'a> {
    /// Which file, as an index into the list given to [`Selection::select`].
    pub const fn file(&self) -> u32 {
        self.file
    }

    /// The tensor as it stands in the file.
    pub const fn tensor(&self) -> &'a TensorInfo {
        self.tensor
    }

    /// The type of the elements.
    pub const fn dtype(&self) -> &'a Dtype {
        self.tensor.dtype()
    }

    /// The dimensions of what is wanted.
    pub const fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The wanted bytes of the file.
    pub const fn file_range(&self) -> ByteRange {
        self.file_range
    }
}

/// Bytes of one row of a tensor of `dim` rows.
fn row_len(tensor: &TensorInfo, dim: u64) -> Result<u64, SelectError> {
    if tensor.len() == 0 {
        return Ok(0);
    }
    // Bytes without a row, as only an unknown type can have, are of no known element size either.
    if tensor.bits_per_element().is_none() {
        let (tensor, dtype) = (tensor.name().into(), tensor.dtype().clone());
        return Err(SelectError::UnknownDtype { tensor, dtype });
    }
    if !tensor.len().is_multiple_of(dim) {
        let (rows, len) = (dim, tensor.len());
        let (tensor, dtype) = (tensor.name().into(), tensor.dtype().clone());
        return Err(SelectError::InsideByte { tensor, dtype, rows, len });
    }
    Ok(tensor.len() / dim)
}

fn refuse_twice(selected: &[Selected<'_>]) -> Result<(), SelectError> {
    let mut names: Vec<(&str, u32)> =
        selected.iter().map(|wanted| (wanted.tensor.name(), wanted.file)).collect();
    names.sort_unstable();
    let twice = names.windows(2).find_map(|pair| match pair {
        [(a, first), (b, second)] if a == b => Some((*a, *first, *second)),
        _ => None,
    });
    match twice {
        None => Ok(()),
        Some((tensor, first, second)) => {
            Err(SelectError::DuplicateTensor { tensor: tensor.into(), first, second })
        }
    }
}

/// The name that is nearest to what the pattern asks for, if any is near. Bounded work: on a model
/// of a million tensors the search ends early.
fn closest_name(pattern: &Pattern, files: &[&Header]) -> Option<Box<str>> {
    let asked = pattern.chars_asked();
    let limit = (asked / 3).max(1);
    let mut best: Option<(usize, &str)> = None;
    let mut steps = 0_usize;
    for tensor in files.iter().flat_map(|header| header.tensors()) {
        let name = tensor.name();
        if name.len() > SUGGEST_NAME_MAX {
            continue;
        }
        steps = steps.saturating_add((asked + 2).saturating_mul(name.len() + 1));
        if steps > SUGGEST_STEPS {
            break;
        }
        let distance = pattern.distance(name);
        if distance <= limit && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, name));
        }
    }
    best.map(|(_, name)| name.into())
}
