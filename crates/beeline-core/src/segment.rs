//! One straight stretch of bytes that goes from a file to a device, or back.
//!
//! A [`Segment`] is what a model layout hands to the transfer planner: it says *which* bytes lie
//! *where* on both sides, and nothing about how they travel. The planner cuts it into chunks and
//! picks a route for each.

use core::fmt;

use crate::addr::ByteRange;

/// `len` bytes at `file_offset` of one file, that belong at `device_offset` of one device buffer.
///
/// Offsets and length are in bytes. A segment is plain data that anybody may build, so nothing
/// about it is trusted: [`Segment::is_valid`] says whether both ends fit 64 bits, and every helper
/// answers `None` rather than wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Segment {
    /// Which file, as an index into the list that the caller opened.
    pub file: u32,
    /// First byte inside the file.
    pub file_offset: u64,
    /// First byte inside the device buffer.
    pub device_offset: u64,
    /// Length in bytes; a segment without bytes is legal and moves nothing.
    pub len: u64,
}

impl Segment {
    /// One past the last byte in the file, or `None` where that does not fit 64 bits.
    pub const fn file_end(self) -> Option<u64> {
        self.file_offset.checked_add(self.len)
    }

    /// One past the last byte on the device, or `None` where that does not fit 64 bits.
    pub const fn device_end(self) -> Option<u64> {
        self.device_offset.checked_add(self.len)
    }

    /// The bytes in the file, or `None` where their end does not fit 64 bits.
    pub const fn file_range(self) -> Option<ByteRange> {
        ByteRange::new(self.file_offset, self.len)
    }

    /// The bytes on the device, or `None` where their end does not fit 64 bits.
    pub const fn device_range(self) -> Option<ByteRange> {
        ByteRange::new(self.device_offset, self.len)
    }

    /// Whether the segment holds no byte.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Whether both ends fit 64 bits.
    pub const fn is_valid(self) -> bool {
        self.file_end().is_some() && self.device_end().is_some()
    }

    /// Cuts the segment after its first `len` bytes; `None` where it is shorter than that or not
    /// [valid](Self::is_valid).
    pub const fn split_at(self, len: u64) -> Option<(Self, Self)> {
        if len > self.len || !self.is_valid() {
            return None;
        }
        // `len <= self.len` and both ends fit, so neither sum can overflow.
        let tail = Self {
            file: self.file,
            file_offset: self.file_offset + len,
            device_offset: self.device_offset + len,
            len: self.len - len,
        };
        Some((Self { len, ..self }, tail))
    }

    /// Joins `next` to the end of `self`, or `None` unless `next` begins in the same file and on the
    /// device exactly where `self` ends.
    ///
    /// No gap is bridged: the bytes of the joined segment are the bytes of both and no others.
    pub fn join(self, next: Self) -> Option<Self> {
        let follows = self.file == next.file
            && self.file_end() == Some(next.file_offset)
            && self.device_end() == Some(next.device_offset)
            && next.is_valid();
        if !follows {
            return None;
        }
        Some(Self { len: self.len.checked_add(next.len)?, ..self })
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, file_offset, device_offset, len } = self;
        write!(f, "file {file} at {file_offset} -> device at {device_offset}, {len} bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn segment(file: u32, file_offset: u64, device_offset: u64, len: u64) -> Segment {
        Segment { file, file_offset, device_offset, len }
    }

    #[test]
    fn joins_only_what_touches_on_both_sides() {
        let first = segment(0, 100, 256, 512);
        let table = [
            (segment(0, 612, 768, 8), Some(520)),
            (segment(0, 612, 768, 0), Some(512)),
            (segment(1, 612, 768, 8), None),
            (segment(0, 613, 768, 8), None),
            (segment(0, 612, 1024, 8), None),
            // The same distance on both sides is still a gap: bytes nobody asked for lie in it.
            (segment(0, 620, 776, 8), None),
            (segment(0, 612, 768, u64::MAX), None),
        ];
        for (next, len) in table {
            assert_eq!(first.join(next).map(|joined| joined.len), len, "{next}");
        }
    }

    #[test]
    fn splitting_then_joining_gives_the_segment_back() {
        let whole = segment(3, 100, 256, 512);
        for len in [0, 1, 511, 512] {
            let (head, tail) = whole.split_at(len).unwrap();
            assert_eq!((head.len, tail.len), (len, 512 - len));
            assert_eq!(head.join(tail), Some(whole));
        }
        assert_eq!(whole.split_at(513), None);
    }

    #[test]
    fn an_end_that_does_not_fit_is_never_wrapped() {
        let wild = segment(0, u64::MAX, 0, 2);
        assert!(!wild.is_valid());
        assert_eq!(wild.file_end(), None);
        assert_eq!(wild.file_range(), None);
        assert_eq!(wild.split_at(1), None);
        assert_eq!(wild.device_range().map(ByteRange::end), Some(2));
    }
}
