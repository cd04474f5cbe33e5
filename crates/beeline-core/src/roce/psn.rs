//! Packet sequence numbers: 24 bits that wrap, ordered by the shorter way round (IBA 9.7.1, C9-40 ff).

use core::fmt;

const MASK: u32 = 0x00ff_ffff;

/// A packet sequence number.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// Most packets that may be outstanding: half the number space, so that old and new stay apart
    /// (IBA 9.7.5.1.1).
    pub const WINDOW: u32 = 1 << 23;

    /// Of the lower 24 bits of `raw`.
    pub const fn new(raw: u32) -> Self {
        Self(raw & MASK)
    }

    /// The number.
    pub const fn as_u32(self) -> u32 {
        self.0
    }

    /// The number `packets` further on.
    pub const fn add(self, packets: u32) -> Self {
        Self(self.0.wrapping_add(packets) & MASK)
    }

    /// Packets from `earlier` up to `self`, negative when `self` is the earlier one; between -2^23
    /// and 2^23 - 1.
    pub const fn since(self, earlier: Self) -> i32 {
        ((self.0.wrapping_sub(earlier.0) << 8) as i32) >> 8
    }

    /// Packets from `earlier` up to `self`, which must not be the earlier one; 0 to 2^24 - 1.
    pub const fn ahead_of(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0) & MASK
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({:#08x})", self.0)
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_survives_the_wrap() {
        let cases = [
            (0, 0, 0),
            (0, MASK, 1),
            (MASK, 0, -1),
            (5, MASK - 4, 10),
            (1 << 22, 0, 1 << 22),
            ((1 << 23) - 1, 0, (1 << 23) - 1),
            (1 << 23, 0, -(1 << 23)),
        ];
        for (a, b, expected) in cases {
            assert_eq!(Psn::new(a).since(Psn::new(b)), expected, "{a:#x} since {b:#x}");
        }
        assert_eq!(Psn::new(MASK).add(1), Psn::new(0));
        assert_eq!(Psn::new(2).ahead_of(Psn::new(MASK)), 3);
    }
}
