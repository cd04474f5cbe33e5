//! What a function's configuration space says about ports and Access Control Services.
//!
//! Layouts: PCI Express Base 7.5.3 (PCI Express capability) and 7.7.11 (ACS extended capability).

use super::machine::{Acs, PortKind};

/// The parts of a configuration space that matter here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PciConfig {
    /// Kind of port or endpoint.
    pub port: Option<PortKind>,
    /// ACS control bits; `None` where the function has no such capability.
    pub acs: Option<Acs>,
    /// Only the first 64 bytes were readable: capabilities are hidden from this user.
    pub hidden: bool,
}

/// Bytes that every user may read.
const PUBLIC_BYTES: usize = 64;
/// Longest walk over either list of capabilities.
const CAPABILITIES_MAX: usize = 96;

/// Decodes a configuration space of 64, 256 or 4096 bytes.
pub fn decode(bytes: &[u8]) -> PciConfig {
    let mut config = PciConfig { hidden: bytes.len() <= PUBLIC_BYTES, ..PciConfig::default() };
    let has_capabilities = u16_at(bytes, 0x06).is_some_and(|status| status & 0x10 != 0);
    if config.hidden || !has_capabilities {
        return config;
    }
    let mut at = usize::from(bytes.get(0x34).copied().unwrap_or(0) & 0xfc);
    for _ in 0..CAPABILITIES_MAX {
        let (Some(id), Some(next)) = (bytes.get(at), bytes.get(at + 1)) else { break };
        if at < 0x40 {
            break;
        }
        if *id == 0x10 {
            config.port = u16_at(bytes, at + 2).and_then(port_kind);
        }
        at = usize::from(next & 0xfc);
    }
    let mut at = 0x100;
    for _ in 0..CAPABILITIES_MAX {
        let Some(header) = u32_at(bytes, at).filter(|header| *header != 0 && *header != u32::MAX)
        else {
            break;
        };
        if header & 0xffff == 0x000d {
            config.acs = u16_at(bytes, at + 6).map(|control| Acs(control & 0x7f));
        }
        at = (header >> 20) as usize & 0xffc;
        if at < 0x100 {
            break;
        }
    }
    config
}

fn port_kind(flags: u16) -> Option<PortKind> {
    match (flags >> 4) & 0xf {
        0 | 1 | 9 => Some(PortKind::Endpoint),
        4 => Some(PortKind::Root),
        5 => Some(PortKind::Upstream),
        6 => Some(PortKind::Downstream),
        7 => Some(PortKind::ToPci),
        _ => None,
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at.checked_add(2)?)?;
    pair.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    word.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn capabilities_are_found_and_lists_that_turn_back_end() {
        let mut space = vec![0u8; 4096];
        space[0x06] = 0x10;
        space[0x34] = 0x60;
        space[0x60] = 0x05;
        space[0x61] = 0x70;
        space[0x70] = 0x10;
        space[0x72] = 0x62;
        space[0x71] = 0x60; // back to the first: a cycle
        space[0x100..0x104].copy_from_slice(&0x1401_0001u32.to_le_bytes());
        space[0x140..0x144].copy_from_slice(&0x1001_000du32.to_le_bytes());
        space[0x146] = 0x1d;
        let config = decode(&space);
        assert_eq!(config.port, Some(PortKind::Downstream));
        assert_eq!(config.acs, Some(Acs(0x1d)));
        assert!(!config.hidden);
        assert!(decode(&space[..64]).hidden);
        assert_eq!(decode(&space[..256]).acs, None);
        assert_eq!(decode(&[]), PciConfig { hidden: true, ..PciConfig::default() });
    }
}
