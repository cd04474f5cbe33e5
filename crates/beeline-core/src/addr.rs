//! Addresses as types, because the first problem of GPUDirect is that one byte has many names.
//!
//! A GPU buffer is a [`DevicePtr`] to CUDA, perhaps a [`VirtAddr`] to the CPU, a [`BusAddr`] on PCI
//! and an [`Iova`] to a NIC behind an IOMMU. Mixing two of them compiles in C and corrupts memory at
//! run time. Here each is its own type, none converts silently into another, and arithmetic is
//! checked: overflow is the caller's visible decision, never a wrap.

use core::fmt;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// Wraps a raw address.
            pub const fn new(raw: u64) -> Self {
                Self(raw)
            }

            /// The raw address.
            pub const fn as_u64(self) -> u64 {
                self.0
            }

            /// The address `bytes` further on, or `None` where it would leave the address space.
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(raw) => Some(Self(raw)),
                    None => None,
                }
            }

            /// Bytes from `base` up to `self`, or `None` when `self` lies below `base`.
            pub const fn checked_offset_from(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }

            /// Whether the address is a multiple of `align` (a power of two, in bytes).
            pub const fn is_aligned(self, align: u64) -> bool {
                align.is_power_of_two() && self.0 & (align - 1) == 0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// An address in this process's CPU address space.
    VirtAddr
}
address! {
    /// An address in a GPU's address space, as the CUDA driver hands it out (`CUdeviceptr`).
    DevicePtr
}
address! {
    /// An address on the PCI bus: what a BAR decodes.
    BusAddr
}
address! {
    /// An I/O virtual address: what a device or a peer names, before the IOMMU translates it.
    Iova
}

/// A half-open range of bytes `[start, start + len)` inside a file or a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// First byte of the range.
    pub start: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

impl ByteRange {
    /// The range `[start, start + len)`, or `None` where its end does not fit 64 bits.
    pub const fn new(start: u64, len: u64) -> Option<Self> {
        match start.checked_add(len) {
            Some(_) => Some(Self { start, len }),
            None => None,
        }
    }

    /// One past the last byte. Saturates for a range built by hand whose end does not fit.
    pub const fn end(self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Whether the range holds no byte.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Whether `inner` lies wholly inside `self`.
    pub const fn contains(self, inner: Self) -> bool {
        inner.start >= self.start && inner.end() <= self.end()
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.start, self.len)
    }
}

/// `value` rounded down to a multiple of `align`, a power of two in bytes.
pub const fn align_down(value: u64, align: u64) -> u64 {
    debug_assert!(align.is_power_of_two());
    value & !(align - 1)
}

/// `value` rounded up to a multiple of `align`, a power of two in bytes; `None` on overflow.
pub const fn align_up(value: u64, align: u64) -> Option<u64> {
    debug_assert!(align.is_power_of_two());
    match value.checked_add(align - 1) {
        Some(sum) => Some(sum & !(align - 1)),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_an_aligned_value_moves_nothing() {
        // A well-known slip adds `align - 1` to an already rounded value and pins one page too many.
        for value in [0, 1, 0xfff, 0x1000, 0x1_0000, 0x1_0100] {
            let down = align_down(value, 0x1_0000);
            let up = align_up(value, 0x1_0000).unwrap();
            assert!(down <= value && value <= up);
            assert!(up - down == 0 || up - down == 0x1_0000);
            assert_eq!(align_down(down, 0x1_0000), down);
            assert_eq!(align_up(up, 0x1_0000), Some(up));
        }
        assert_eq!(align_up(u64::MAX, 4096), None);
    }

    #[test]
    fn arithmetic_never_wraps() {
        assert_eq!(DevicePtr::new(u64::MAX).checked_add(1), None);
        assert_eq!(VirtAddr::new(1).checked_offset_from(VirtAddr::new(2)), None);
        assert_eq!(ByteRange::new(u64::MAX, 1), None);
        assert!(ByteRange { start: 10, len: 10 }.contains(ByteRange { start: 20, len: 0 }));
        assert!(!ByteRange { start: 10, len: 10 }.contains(ByteRange { start: 19, len: 2 }));
    }
}
