//! Splits a request into chunks: the pieces of work that one buffer of the pool carries.
//!
//! Chunks lie on a grid of the buffer size in each file, so two chunks of one request never share a
//! block of the drive, reads stay sequential, and a chunk's place in the page cache is asked once.
//! Inside a chunk the bytes wanted may belong to several places of the destination (tensors that land
//! aligned whatever the header's length); those are its [`Piece`]s.

use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;

use crate::addr::{ByteRange, align_down, align_up};
use crate::segment::Segment;

/// Sizes that rule how a request is split; all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Size of one buffer, and of the grid: a power of two.
    pub slot_bytes: u64,
    /// Alignment of file offsets and lengths of direct I/O: a power of two, at most `slot_bytes`.
    pub block_bytes: u64,
}

/// Bytes of one chunk that belong together at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte in the chunk's buffer, which starts with the first byte of [`Chunk::span`].
    pub slot_offset: u64,
    /// First byte in the destination.
    pub device_offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// One buffer's worth of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which of the request's files.
    pub file: u32,
    /// From the first to the last byte wanted.
    pub want: ByteRange,
    /// `want` widened to whole blocks: what a direct read asks for. Ends past the end of the file
    /// where the file does not end on a block.
    pub span: ByteRange,
    /// Sum of the lengths of the pieces.
    pub bytes: u64,
    /// Indices of its pieces in [`Transfer::pieces`].
    pub pieces: Range<usize>,
}

/// A request, split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// In the order of the request's segments.
    pub chunks: Vec<Chunk>,
    /// The pieces of all chunks.
    pub pieces: Vec<Piece>,
    /// Sum of the lengths of all segments.
    pub bytes: u64,
}

/// A request that cannot be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitError {
    /// The grid's sizes are not powers of two, or a block is larger than a slot.
    Grid(Grid),
    /// A segment ends beyond 64 bits or beyond the largest file offset.
    TooFar(Segment),
    /// The segments hold more bytes than 64 bits count.
    TooMuch,
    /// The request needs more than [`CHUNKS_MAX`] chunks.
    TooMany,
}

/// Most chunks of one request: 16 TiB in slots of 4 MiB. Bounds the memory that a plan takes.
pub const CHUNKS_MAX: usize = 1 << 22;

impl fmt::Display for SplitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Grid(grid) => write!(
                f,
                "slots of {} bytes and blocks of {} bytes do not make a grid: both must be powers of \
                 two and a block no larger than a slot",
                grid.slot_bytes, grid.block_bytes
            ),
            Self::TooFar(segment) => write!(f, "a piece ends beyond the largest offset: {segment}"),
            Self::TooMuch => f.write_str("the pieces hold more bytes than 64 bits count"),
            Self::TooMany => {
                write!(f, "the request needs more than {CHUNKS_MAX} chunks; split it into several")
            }
        }
    }
}

impl core::error::Error for SplitError {}

/// Largest file offset that system calls accept (`off_t` is signed).
const OFFSET_MAX: u64 = i64::MAX as u64;

/// Splits `segments`; empty ones leave nothing behind.
///
/// Segments that follow each other in file order share a chunk where they fall into one cell of the
/// grid and the gap between them is smaller than a block (a drive would read the gap anyway).
///
/// # Errors
/// [`SplitError`], naming the segment or the sizes.
pub fn split(segments: &[Segment], grid: Grid) -> Result<Transfer, SplitError> {
    let sound = grid.slot_bytes.is_power_of_two()
        && grid.block_bytes.is_power_of_two()
        && grid.block_bytes <= grid.slot_bytes;
    if !sound {
        return Err(SplitError::Grid(grid));
    }
    let mut out = Transfer::default();
    for segment in segments.iter().filter(|segment| !segment.is_empty()) {
        // One slot below the top, so that rounding up to a block stays representable.
        let ends = segment.file_end().zip(segment.device_end());
        if ends.is_none_or(|(end, _)| end > OFFSET_MAX - grid.slot_bytes) {
            return Err(SplitError::TooFar(*segment));
        }
        out.bytes = out.bytes.checked_add(segment.len).ok_or(SplitError::TooMuch)?;
        // Counted before cutting: a hostile length must not allocate first and fail later.
        let cells = segment.len / grid.slot_bytes;
        if cells.saturating_add(out.chunks.len() as u64) > CHUNKS_MAX as u64 {
            return Err(SplitError::TooMany);
        }
        out.cut(*segment, grid);
    }
    Ok(out)
}

impl Transfer {
    /// Cuts one segment at the grid's lines.
    fn cut(&mut self, mut rest: Segment, grid: Grid) {
        while !rest.is_empty() {
            let line = align_down(rest.file_offset, grid.slot_bytes) + grid.slot_bytes;
            let len = rest.len.min(line - rest.file_offset);
            let Some((head, tail)) = rest.split_at(len) else { return };
            self.append(head, grid);
            rest = tail;
        }
    }

    /// Adds bytes of one cell to the last chunk, or to a new one.
    fn append(&mut self, part: Segment, grid: Grid) {
        let start = part.file_offset;
        let end = start + part.len;
        let index = self.pieces.len();
        let shared = self.chunks.last_mut().filter(|chunk| {
            chunk.file == part.file
                && align_down(chunk.want.start, grid.slot_bytes)
                    == align_down(start, grid.slot_bytes)
                && chunk.want.end() <= start
                && start - chunk.want.end() < grid.block_bytes
        });
        let base = match shared {
            Some(chunk) => {
                chunk.want.len = end - chunk.want.start;
                chunk.span.len = widen(chunk.want, grid).len;
                chunk.bytes += part.len;
                chunk.pieces.end = index + 1;
                chunk.span.start
            }
            None => {
                let want = ByteRange { start, len: part.len };
                let span = widen(want, grid);
                let pieces = index..index + 1;
                self.chunks.push(Chunk { file: part.file, want, span, bytes: part.len, pieces });
                span.start
            }
        };
        self.pieces.push(Piece {
            slot_offset: start - base,
            device_offset: part.device_offset,
            len: part.len,
        });
    }
}

fn widen(want: ByteRange, grid: Grid) -> ByteRange {
    let start = align_down(want.start, grid.block_bytes);
    // `split` refused what lies within a slot of the largest offset.
    let end = align_up(want.end(), grid.block_bytes).unwrap_or(OFFSET_MAX);
    ByteRange { start, len: end - start }
}

/// A write, split so that direct I/O never touches a page that a buffered write touches.
///
/// Where both met in one page, the page cache would hold the page with old bytes of the direct part
/// and write them back over the new ones later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteSplit {
    /// Bytes before the first whole page; buffered.
    pub head: ByteRange,
    /// Whole pages; direct.
    pub middle: ByteRange,
    /// Bytes after the last whole page; buffered.
    pub tail: ByteRange,
}

/// Splits `want` at multiples of `align` (the larger of page and block, a power of two).
pub fn split_write(want: ByteRange, align: u64) -> WriteSplit {
    let end = want.end();
    let middle_start = align_up(want.start, align).map_or(end, |start| start.min(end));
    let middle_end = align_down(end, align).max(middle_start);
    let range = |start: u64, end: u64| ByteRange { start, len: end - start };
    WriteSplit {
        head: range(want.start, middle_start),
        middle: range(middle_start, middle_end),
        tail: range(middle_end, end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    const GRID: Grid = Grid { slot_bytes: 1 << 16, block_bytes: 4096 };

    const fn segment(file: u32, file_offset: u64, device_offset: u64, len: u64) -> Segment {
        Segment { file, file_offset, device_offset, len }
    }

    /// What must hold for every split: each byte once, inside its buffer, on the grid.
    fn check(segments: &[Segment], grid: Grid) {
        let transfer = split(segments, grid).unwrap();
        let mut moved = vec![];
        for chunk in &transfer.chunks {
            assert!(chunk.span.contains(chunk.want));
            assert!(chunk.span.len <= grid.slot_bytes, "a chunk fits one slot");
            assert_eq!(chunk.span.start % grid.block_bytes, 0);
            assert_eq!(chunk.span.len % grid.block_bytes, 0);
            let cell = |at: u64| at / grid.slot_bytes;
            assert_eq!(cell(chunk.span.start), cell(chunk.span.end() - 1), "one cell");
            let pieces = &transfer.pieces[chunk.pieces.clone()];
            assert_eq!(pieces.iter().map(|piece| piece.len).sum::<u64>(), chunk.bytes);
            for piece in pieces {
                let file_offset = chunk.span.start + piece.slot_offset;
                let bytes = ByteRange { start: file_offset, len: piece.len };
                assert!(chunk.want.contains(bytes));
                moved.push(segment(chunk.file, file_offset, piece.device_offset, piece.len));
            }
        }
        let mut joined: Vec<Segment> = vec![];
        for part in moved {
            match joined.last_mut().and_then(|last| last.join(part)) {
                Some(longer) => *joined.last_mut().unwrap() = longer,
                None => joined.push(part),
            }
        }
        let mut expected: Vec<Segment> = vec![];
        for part in segments.iter().copied().filter(|part| part.len > 0) {
            match expected.last_mut().and_then(|last| last.join(part)) {
                Some(longer) => *expected.last_mut().unwrap() = longer,
                None => expected.push(part),
            }
        }
        assert_eq!(joined, expected, "the same bytes in the same order, and no others");
        assert_eq!(transfer.bytes, segments.iter().map(|part| part.len).sum::<u64>());
    }

    #[test]
    fn tensors_of_one_cell_share_a_chunk_unless_a_block_lies_between() {
        let near = [segment(0, 100, 0, 1000), segment(0, 1100, 1024, 8), segment(0, 5000, 2048, 8)];
        assert_eq!(split(&near, GRID).unwrap().chunks.len(), 1);
        let far = [segment(0, 100, 0, 1000), segment(0, 5196, 1024, 8)];
        assert_eq!(split(&far, GRID).unwrap().chunks.len(), 2, "a gap of 4096 is not read");
        let back = [segment(0, 5000, 0, 8), segment(0, 100, 256, 8)];
        assert_eq!(split(&back, GRID).unwrap().chunks.len(), 2, "order is kept, not sorted");
        for case in [&near[..], &far, &back] {
            check(case, GRID);
        }
    }

    #[test]
    fn sizes_around_the_limits_of_the_kernel() {
        // One system call moves at most 0x7ffff000 bytes; chunks are far below, sums are not.
        for len in [0x7fff_efff, 0x7fff_f000, 0x7fff_f001, 0x1_0000_0001_u64] {
            let transfer =
                split(&[segment(0, 1, 0, len)], Grid { slot_bytes: 4 << 20, block_bytes: 512 })
                    .unwrap();
            assert_eq!(transfer.bytes, len);
            assert_eq!(transfer.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>(), len);
        }
    }

    #[test]
    fn what_cannot_be_split_is_named() {
        let wild = segment(0, u64::MAX - 1, 0, 1);
        assert_eq!(split(&[wild], GRID), Err(SplitError::TooFar(wild)));
        let high = segment(0, i64::MAX as u64 - 1, 0, 1);
        assert_eq!(split(&[high], GRID), Err(SplitError::TooFar(high)));
        let grid = Grid { slot_bytes: 4096, block_bytes: 8192 };
        assert_eq!(split(&[], grid), Err(SplitError::Grid(grid)));
        assert!(split(&[segment(0, 0, u64::MAX, 1)], GRID).is_err());
        assert_eq!(split(&[segment(0, 0, 0, 1 << 62)], GRID), Err(SplitError::TooMany));
    }

    #[test]
    fn direct_and_buffered_writes_never_share_a_page() {
        let cases = [
            ((0, 8192), (0, 8192, 0)),
            ((1, 4096), (4095, 0, 1)),
            ((1, 8192), (4095, 4096, 1)),
            ((4096, 1), (0, 0, 1)),
            ((10, 20), (20, 0, 0)),
            ((4095, 4098), (1, 4096, 1)),
        ];
        for ((start, len), (head, middle, tail)) in cases {
            let split = split_write(ByteRange { start, len }, 4096);
            assert_eq!((split.head.len, split.middle.len, split.tail.len), (head, middle, tail));
            assert_eq!(split.head.end(), split.middle.start);
            assert_eq!(split.middle.end(), split.tail.start);
            assert_eq!(split.tail.end(), start + len);
        }
    }

    proptest! {
        #[test]
        fn every_byte_goes_once(
            parts in prop::collection::vec((0_u32..3, 0_u64..400_000, 0_u64..200_000), 0..20),
            slot in 12_u32..20,
            block in 9_u32..=12,
        ) {
            let mut device = 0;
            let segments: Vec<Segment> = parts
                .into_iter()
                .map(|(file, file_offset, len)| {
                    let part = segment(file, file_offset, device, len);
                    device += len + 256;
                    part
                })
                .collect();
            check(&segments, Grid { slot_bytes: 1 << slot, block_bytes: 1 << block });
        }
    }
}
