//! The path MTU: how many payload bytes one packet carries.

use core::fmt;

/// A path MTU: one of the five of IBA 9.3.1 (256, 512, 1024, 2048 or 4096 bytes), or [`Mtu::LOCAL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mtu(u32);

impl Mtu {
    /// Every path MTU, smallest first.
    pub const ALL: [Self; 5] = [Self(256), Self(512), Self(1024), Self(2048), Self(4096)];
    /// The smallest.
    pub const MIN: Self = Self(256);
    /// The largest.
    pub const MAX: Self = Self(4096);

    /// What one packet names or carries between two processes that share memory. No wire has it.
    pub const LOCAL: Self = Self(262_144);

    /// Bytes a packet adds around its payload at most, as Linux counts them when it derives the path
    /// MTU of a network device: IPv6, UDP, BTH, the longest extended headers, and the ICRC.
    pub const HEADERS_MAX: u32 = 80;

    /// The MTU of `bytes`, or `None` when it is none of the five.
    pub fn new(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// The largest MTU that fits a network device whose own MTU is `device` bytes; `None` below 336.
    pub fn of_device(device: u32) -> Option<Self> {
        let room = device.checked_sub(Self::HEADERS_MAX)?;
        Self::ALL.into_iter().rev().find(|mtu| mtu.bytes() <= room)
    }

    /// Payload bytes of a full packet.
    pub const fn bytes(self) -> u32 {
        self.0
    }

    /// Packets that a message of `len` bytes takes. A message without payload takes one packet all the
    /// same (IBA 9.7.2), and so one sequence number.
    pub const fn packets(self, len: u32) -> u32 {
        let full = len.div_ceil(self.bytes());
        if full == 0 { 1 } else { full }
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_takes_at_least_one_packet() {
        for mtu in Mtu::ALL {
            let bytes = mtu.bytes();
            let cases = [(0, 1), (1, 1), (bytes - 1, 1), (bytes, 1), (bytes + 1, 2)];
            for (len, packets) in cases {
                assert_eq!(mtu.packets(len), packets, "{len} bytes at MTU {mtu}");
            }
        }
        assert_eq!(Mtu::MIN.packets(1 << 31), 1 << 23);
        assert_eq!(Mtu::MIN.packets(u32::MAX), 1 << 24);
    }

    #[test]
    fn the_device_bounds_the_path() {
        let cases = [(1500, Some(1024)), (4200, Some(4096)), (9000, Some(4096)), (336, Some(256))];
        for (device, mtu) in cases {
            assert_eq!(Mtu::of_device(device), mtu.and_then(Mtu::new));
        }
        assert_eq!(Mtu::of_device(335), None);
        assert_eq!(Mtu::new(1500), None);
    }
}
