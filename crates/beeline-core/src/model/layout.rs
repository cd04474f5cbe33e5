//! Where everything goes: one device allocation, a place in it for each tensor, and the stretches
//! of bytes to move.
//!
//! A file promises no alignment, a kernel that reads a tensor wants it. So every tensor begins at a
//! multiple of [`DEVICE_ALIGN`], wherever it lies in its file. Where two neighbours still touch on
//! both sides, their bytes are one [`Segment`] and move as one.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use super::{Clipped, Dtype, Selected};
use crate::addr::{ByteRange, align_up};
use crate::segment::Segment;

/// Alignment in bytes of every tensor on the device: what `cudaMalloc` gives, and enough for the
/// widest load and for TMA descriptors (CUDA programming guide, "Device memory accesses").
pub const DEVICE_ALIGN: u64 = 256;

/// Where one load puts its tensors.
///
/// - Entries and segments are in file order: by file, then by place in it, so that reads go forward.
/// - Every device offset is a multiple of [`DEVICE_ALIGN`] and grows from entry to entry; entries do
///   not overlap and lie inside `total_bytes`.
/// - The segments hold exactly the bytes of the entries, each once. Between tensors the device
///   memory is not written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of the one device allocation: a multiple of [`DEVICE_ALIGN`], 0 without a byte to load.
    pub total_bytes: u64,
    /// The tensors.
    pub entries: Vec<Placement>,
    /// What to move.
    pub segments: Vec<Segment>,
}

/// The place of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Which file, as an index into the list that the selection was made from.
    pub file: u32,
    /// The name.
    pub name: Box<str>,
    /// The type of the elements.
    pub dtype: Dtype,
    /// The dimensions, after slicing.
    pub shape: Box<[u64]>,
    /// The bytes in the file, after slicing.
    pub file_range: ByteRange,
    /// First byte in the device allocation, a multiple of [`DEVICE_ALIGN`].
    pub device_offset: u64,
    /// Length in bytes; 0 for an empty tensor, which has a place and no segment.
    pub len: u64,
}

impl Layout {
    /// Places the selected tensors of one load, in any order. Fails with `layout-overflow` where
    /// they do not fit a 64-bit address space together.
    pub fn new(selected: &[Selected<'_>]) -> Result<Self, LayoutError> {
        let mut order: Vec<&Selected<'_>> = selected.iter().collect();
        order.sort_by_key(|wanted| {
            (wanted.file(), wanted.file_range().start, wanted.file_range().len)
        });
        let mut layout = Self::default();
        layout.entries.reserve_exact(order.len());
        for wanted in order {
            layout.place(wanted)?;
        }
        Ok(layout)
    }

    /// Puts one more tensor behind all others.
    fn place(&mut self, wanted: &Selected<'_>) -> Result<(), LayoutError> {
        let file_range = wanted.file_range();
        let (device_offset, len) = (self.total_bytes, file_range.len);
        let end = device_offset.checked_add(len).and_then(|end| align_up(end, DEVICE_ALIGN));
        let Some(end) = end else {
            let tensor = wanted.tensor().name().into();
            return Err(LayoutError::Overflow { tensor, placed: device_offset, len });
        };
        self.total_bytes = end;
        let file = wanted.file();
        if len > 0 {
            let file_offset = file_range.start;
            self.append(Segment { file, file_offset, device_offset, len });
        }
        self.entries.push(Placement {
            file,
            name: wanted.tensor().name().into(),
            dtype: wanted.dtype().clone(),
            shape: wanted.shape().into(),
            file_range,
            device_offset,
            len,
        });
        Ok(())
    }

    fn append(&mut self, segment: Segment) {
        let joined = self.segments.last().and_then(|last| last.join(segment));
        match (self.segments.last_mut(), joined) {
            (Some(last), Some(joined)) => *last = joined,
            _ => self.segments.push(segment),
        }
    }
}

/// Why tensors cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// `layout-overflow`: together the tensors take more bytes than 64 bits count.
    Overflow {
        /// The tensor that does not fit any more.
        tensor: Box<str>,
        /// Bytes placed before it.
        placed: u64,
        /// Its length in bytes.
        len: u64,
    },
}

impl LayoutError {
    /// The stable name of the fault.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Overflow { .. } => "layout-overflow",
        }
    }
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overflow { tensor, placed, len } => write!(
                f,
                "tensor '{}' of {len} bytes does not fit behind {placed} bytes in 64 bits; select fewer tensors",
                Clipped(tensor)
            ),
        }
    }
}

impl core::error::Error for LayoutError {}
