//! `show_gids`: the GID table of all ports; and the classes of GIDs.

use alloc::string::ToString;
use core::net::Ipv6Addr;

use super::super::machine::{Fact, Gid, GidClass, GidVersion, Known, Machine};
use super::{Input, Outcome, ReadError};

pub(super) fn recognise(head: &str) -> bool {
    head.lines().take(5).any(|line| {
        let words: alloc::vec::Vec<&str> = line.split_ascii_whitespace().collect();
        words.starts_with(&["DEV", "PORT", "INDEX", "GID"])
    })
}

/// A GID with its class; `None` for text that is no address.
pub(super) fn gid(text: &str, version: GidVersion) -> Option<Gid> {
    let address: Ipv6Addr = text.parse().ok()?;
    let class = if address.is_unspecified() {
        GidClass::Empty
    } else if address.is_unicast_link_local() {
        GidClass::LinkLocal
    } else if address.to_ipv4_mapped().is_some() {
        GidClass::Ipv4Mapped
    } else {
        GidClass::Global
    };
    Some(Gid { class, version, gid: text.to_string() })
}

/// `v1`, `v2`, `RoCE v2`, `IB/RoCE v1`.
pub(super) fn version_of(text: &str) -> GidVersion {
    match text.trim() {
        text if text.ends_with("v2") => GidVersion::V2,
        text if text.ends_with("v1") => GidVersion::V1,
        _ => GidVersion::Unknown,
    }
}

/// `mlx5_0  1  3  0000:..:ffff:c000:0201  192.0.2.1  v2  eth0`; the IPv4 column may be empty.
pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(device), Some(port), Some(index), Some(address)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        if device == "DEV" || device.starts_with("---") || device.starts_with("n_gids_found") {
            continue;
        }
        let version = words.find(|word| matches!(*word, "v1" | "v2")).map_or("", |word| word);
        let values = (port.parse::<u8>(), index.parse::<u16>(), gid(address, version_of(version)));
        let (Ok(port), Ok(index), Some(value)) = values else {
            let message = "expected device, port, index and GID as show_gids prints them";
            return Err(ReadError::new(input, number, message));
        };
        let at = input.at(number);
        let nic = machine.nic(device);
        nic.rdma.learn(true, at);
        let record = nic.ports.entry(port).or_default();
        record.gids.entry(index).or_insert(Fact { value, origin: at });
    }
    Ok(Outcome::default())
}
