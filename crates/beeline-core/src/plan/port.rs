//! Which device, port and GID to use: ranked by the type, the scope and the reach of each entry.
//!
//! Programs that take GID index 0, or a fixed number, take a link-local or a version 1 entry on many
//! machines and time out (cases H-RDMA-NET-01 and 02). The right entry follows from the table.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::Ipv6Addr;

use crate::facts::machine::{Gid, GidClass, GidVersion};
use crate::facts::{Known, Machine};
use crate::reason::{Code, Reason};

/// An entry of a GID table that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortChoice {
    /// The RDMA device.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// Index into the port's GID table.
    pub gid_index: u16,
    /// Whether the routing table sends from this address to the peer.
    pub routed: bool,
    /// Why it stands at this place.
    pub why: String,
}

/// An entry, or a whole port, that cannot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortRefused {
    /// The RDMA device.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// The entry; `None` where the whole port is meant.
    pub gid_index: Option<u16>,
    /// Why not.
    pub why: Reason,
}

/// Where a connection goes, as far as that is known. Addresses of IPv4 are mapped into IPv6, as in a GID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// The address of the other side.
    pub peer: Option<Ipv6Addr>,
    /// This machine's address that its routing table sends from to the peer.
    pub source: Option<Ipv6Addr>,
}

/// Every usable entry, best first, and every other with the reason. The entry that the routing table
/// sends from comes before others of its type and scope, then the one that shares more of the peer's
/// address; one of another family is refused.
pub fn ports(machine: &Machine, reach: Reach) -> (Vec<PortChoice>, Vec<PortRefused>) {
    let (mut ranked, mut refused) = (Vec::new(), Vec::new());
    for (device, nic) in &machine.nics {
        for (number, port) in &nic.ports {
            let refuse = |gid_index, why| PortRefused {
                device: device.clone(),
                port: *number,
                gid_index,
                why,
            };
            if let Some(state) = port.state.known().filter(|state| !state.contains("ACTIVE")) {
                refused.push(refuse(None, Reason::with(Code::PortDown, state.clone())));
                continue;
            }
            let ethernet = port.link_layer.known().is_some_and(|layer| layer == "Ethernet");
            for (index, fact) in &port.gids {
                match rank(&fact.value, ethernet, reach) {
                    Ok((rank, why)) => {
                        let (device, port, gid_index) = (device.clone(), *number, *index);
                        let routed = rank[2] > 0;
                        ranked.push((rank, PortChoice { device, port, gid_index, routed, why }));
                    }
                    Err(why) => refused.push(refuse(Some(*index), why)),
                }
            }
        }
    }
    // Equal ranks stay in the order of the table.
    ranked.sort_by_key(|(rank, _)| core::cmp::Reverse(*rank));
    (ranked.into_iter().map(|(_, choice)| choice).collect(), refused)
}

/// Type before scope before reach; higher is better.
fn rank(gid: &Gid, ethernet: bool, reach: Reach) -> Result<([u32; 4], String), Reason> {
    let Reach { peer, source } = reach;
    let kind = match (ethernet, gid.version) {
        (false, _) => 2,
        (true, GidVersion::V2) => 2,
        (true, GidVersion::Unknown) => 1,
        (true, GidVersion::V1) => 0,
    };
    let scope = match gid.class {
        GidClass::Empty => return Err(Reason::with(Code::GidUnusable, "the entry is empty")),
        GidClass::LinkLocal if ethernet => 0,
        GidClass::LinkLocal => 1,
        GidClass::Global => 1,
        GidClass::Ipv4Mapped => 2,
    };
    let own: Option<Ipv6Addr> = gid.gid.parse().ok();
    let shared = match (own, peer) {
        (Some(own), Some(peer)) => (u128::from(own) ^ u128::from(peer)).leading_zeros(),
        _ => 0,
    };
    if let (Some(own), Some(peer)) = (own, peer)
        && own.to_ipv4_mapped().is_some() != peer.to_ipv4_mapped().is_some()
    {
        let text = format!("{own} and the peer's {peer} are of different families");
        return Err(Reason::with(Code::GidUnusable, text));
    }
    let version = match (ethernet, gid.version) {
        (false, _) => "InfiniBand",
        (true, GidVersion::V1) => "RoCE v1, which no router passes on",
        (true, GidVersion::V2) => "RoCE v2",
        (true, GidVersion::Unknown) => "RoCE of unknown version",
    };
    let class = match gid.class {
        GidClass::Ipv4Mapped => "an IPv4 address",
        GidClass::LinkLocal => "link-local: reaches this link only",
        _ => "a global address",
    };
    let routed = own.is_some() && own == source;
    let near = if routed {
        ", which the way to the peer starts at".into()
    } else if shared > 0 {
        format!(", {shared} bits shared with the peer")
    } else {
        String::new()
    };
    Ok(([kind, scope, routed.into(), shared], format!("{version}, {class}{near}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::machine::Port;
    use crate::facts::{Fact, Nic, Origin};

    fn fact<T>(value: T) -> Fact<T> {
        Fact { value, origin: Origin::default() }
    }

    fn nic(state: &str, layer: &str, gids: &[(u16, GidClass, GidVersion, &str)]) -> Nic {
        let (state, link_layer) = (Some(fact(state.into())), Some(fact(layer.into())));
        let mut port = Port { state, link_layer, ..Port::default() };
        for (index, class, version, gid) in gids {
            let gid = Gid { class: *class, version: *version, gid: (*gid).into() };
            port.gids.insert(*index, fact(gid));
        }
        let mut nic = Nic::default();
        nic.ports.insert(1, port);
        nic
    }

    const TABLE: &[(u16, GidClass, GidVersion, &str)] = &[
        (0, GidClass::LinkLocal, GidVersion::V1, "fe80::1"),
        (1, GidClass::LinkLocal, GidVersion::V2, "fe80::1"),
        (2, GidClass::Ipv4Mapped, GidVersion::V1, "::ffff:10.9.0.1"),
        (3, GidClass::Ipv4Mapped, GidVersion::V2, "::ffff:10.9.0.1"),
        (4, GidClass::Empty, GidVersion::Unknown, "::"),
    ];

    fn order(machine: &Machine, peer: Option<&str>) -> Vec<String> {
        let peer = peer.map(|peer| peer.parse().unwrap());
        let (choices, _) = ports(machine, Reach { peer, source: None });
        choices.iter().map(|choice| format!("{}:{}", choice.device, choice.gid_index)).collect()
    }

    #[test]
    fn the_routable_entry_comes_first_wherever_it_stands() {
        let mut machine = Machine::new();
        machine.nics.insert("mlx5_0".into(), nic("ACTIVE", "Ethernet", TABLE));
        machine.nics.insert("mlx5_1".into(), nic("DOWN", "Ethernet", TABLE));
        assert_eq!(order(&machine, None), ["mlx5_0:3", "mlx5_0:1", "mlx5_0:2", "mlx5_0:0"]);
        let (_, refused) = ports(&machine, Reach::default());
        let codes: Vec<_> = refused.iter().map(|one| (one.gid_index, one.why.code)).collect();
        assert_eq!(codes, [(Some(4), Code::GidUnusable), (None, Code::PortDown)]);
    }

    #[test]
    fn of_equals_the_one_near_the_peer_is_taken() {
        let near = [(3, GidClass::Ipv4Mapped, GidVersion::V2, "::ffff:10.9.1.7")];
        let mut machine = Machine::new();
        machine.nics.insert("a".into(), nic("ACTIVE", "Ethernet", TABLE));
        machine.nics.insert("b".into(), nic("ACTIVE", "Ethernet", &near));
        let taken = |peer| order(&machine, Some(peer)).remove(0);
        assert_eq!(taken("::ffff:10.9.0.200"), "a:3");
        assert_eq!(taken("::ffff:10.9.1.200"), "b:3");
        assert_eq!(order(&machine, Some("fe80::9")), ["a:1", "a:0"], "of the peer's family");
        let (peer, source) = ("::ffff:10.9.0.200".parse().ok(), "::ffff:10.9.1.7".parse().ok());
        let (choices, _) = ports(&machine, Reach { peer, source });
        assert_eq!(choices[0].device, "b", "the routing table knows better");
    }
}
