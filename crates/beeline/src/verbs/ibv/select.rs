//! Which device, port and GID: every entry is ranked by the plan, and every other has its reason.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::path::Path;
use std::sync::Arc;

use beeline_core::facts::machine::{Gid, GidClass, GidVersion, Port};
use beeline_core::facts::{Fact, Machine, Origin};
use beeline_core::plan::{PortChoice, PortRefused, Reach, ports};
use beeline_core::reason::{Code, Reason};
use beeline_core::roce::Mtu;
use beeline_sys::ibverbs as sys;

use super::device::{Chosen, Device, SOFT_ROCE_VENDOR, gid_of};
use super::{IbvOptions, NicInfo, PortInfo, PortResolved, driver_error, library_error};
use crate::error::{Error, Kind, Result};

const SYSFS: &str = "/sys/class/infiniband";

/// Entries of a table that are looked at: connections name them by 8 bits.
const GIDS_MAX: u32 = 256;

/// What there is.
#[derive(Default)]
struct Seen {
    devices: HashMap<String, Arc<sys::Context>>,
    ports: HashMap<(String, u8), sys::PortAttr>,
    gids: HashMap<(String, u8, u16), [u8; 16]>,
    machine: Machine,
    refused: Vec<PortRefused>,
}

/// Opens what `options` leave open, best first.
pub(super) fn open(options: &IbvOptions) -> Result<Arc<Device>> {
    let names = names()?;
    if names.is_empty() {
        return Err(Error::new(Kind::NoRoute, "the kernel has no RDMA device")
            .coded("rdma-device-absent")
            .remedy(
                "load the driver of the NIC, or make a soft one: rdma link add rxe0 type rxe netdev DEV; or \
                 use the NIC in software",
            ));
    }
    let wanted: Vec<&String> = names
        .iter()
        .filter(|name| options.device.as_ref().is_none_or(|wanted| wanted == *name))
        .collect();
    if let (Some(device), true) = (&options.device, wanted.is_empty()) {
        let text = format!("there is no RDMA device {device}: there are {}", names.join(", "));
        return Err(Error::new(Kind::NotFound, text).coded("rdma-device-absent"));
    }
    let mut seen = Seen::default();
    for name in wanted {
        seen.look_at(name);
    }
    choose(seen, options)
}

/// Everything there is, ranked without a peer.
pub(super) fn list() -> Result<Vec<NicInfo>> {
    let mut seen = Seen::default();
    let names = match names() {
        Ok(names) => names,
        // Without devices nobody misses the library.
        Err(_) if !has_devices() => Vec::new(),
        Err(error) => return Err(error),
    };
    for name in &names {
        seen.look_at(name);
    }
    let (choices, refused) = seen.ranked(Reach::default());
    let of = |name: &String| seen.devices.get(name).and_then(|context| context.attributes().ok());
    let infos = names.iter().map(|name| {
        let attr = of(name).unwrap_or_default();
        NicInfo {
            name: name.clone(),
            soft_roce: attr.vendor_id == SOFT_ROCE_VENDOR,
            firmware: attr.firmware.clone(),
            ports: (1..=attr.ports).filter_map(|number| seen.info(name, number)).collect(),
            gids: choices.iter().filter(|one| one.device == *name).cloned().collect(),
            rejected: refused.iter().filter(|one| one.device == *name).cloned().collect(),
        }
    });
    Ok(infos.collect())
}

fn has_devices() -> bool {
    std::fs::read_dir(SYSFS).is_ok_and(|mut entries| entries.next().is_some())
}

/// The names of all devices; none where the kernel has no RDMA at all.
fn names() -> Result<Vec<String>> {
    match sys::names().map_err(library_error)? {
        Ok(names) => Ok(names),
        Err(_) if !has_devices() => Ok(Vec::new()),
        Err(error) => Err(Error::io("list the RDMA devices", error).remedy(
            "see that /dev/infiniband is there and may be opened (in a container: pass it in)",
        )),
    }
}

/// Takes the best of what was seen and `options` allow.
fn choose(seen: Seen, options: &IbvOptions) -> Result<Arc<Device>> {
    let peer = options.peer.map(mapped);
    let source = options.peer.and_then(source).map(mapped);
    let (ranked, mut rejected) = seen.ranked(Reach { peer, source });
    let asked = |one: &PortChoice| {
        options.port.is_none_or(|port| port == one.port)
            && options.gid_index.is_none_or(|index| index == one.gid_index)
            && (one.routed || !options.routed)
    };
    let against = |one: &PortChoice| match options.peer.filter(|_| options.routed && !one.routed) {
        Some(peer) => {
            Reason::with(Code::GidUnusable, format!("the way to {peer} does not start there"))
        }
        None => Reason::with(Code::NotRequested, "another port or GID was asked for"),
    };
    let (mut fit, others): (Vec<_>, Vec<_>) = ranked.into_iter().partition(asked);
    rejected.extend(others.into_iter().map(|one| PortRefused {
        why: against(&one),
        device: one.device,
        port: one.port,
        gid_index: Some(one.gid_index),
    }));
    if fit.is_empty() {
        let reasons = rejected
            .iter()
            .map(|one| {
                let gid = one.gid_index.map(|index| format!(" GID {index}")).unwrap_or_default();
                let at = format!("{} port {}{gid}", one.device, one.port);
                let detail = match one.why.detail.as_str() {
                    "" => at,
                    detail => format!("{at}: {detail}"),
                };
                Reason { detail, ..one.why.clone() }
            })
            .collect();
        return Err(Error::new(Kind::NoRoute, "no RDMA port can be used")
            .coded("rdma-port-unusable")
            .with_reasons(reasons)
            .remedy("bring the port and its network interface up, and give it an address"));
    }
    let chosen = fit.remove(0);
    let resolved = PortResolved { chosen, others: fit, rejected };
    seen.open(resolved)
}

impl Seen {
    /// Opens the device and looks at its ports. What does not open is refused with what it said.
    fn look_at(&mut self, name: &str) {
        let refuse = |port, code, text: String| PortRefused {
            device: name.to_owned(),
            port,
            gid_index: None,
            why: Reason::with(code, text),
        };
        let opened = match sys::Context::open(name) {
            Ok(Ok(context)) => context.attributes().map(|attr| (context, attr)),
            Ok(Err(error)) => Err(error),
            Err(error) => Err(std::io::Error::other(error)),
        };
        let (context, attr) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let text = format!("it does not open: {error}");
                self.refused.push(refuse(0, Code::InfinibandNodesMissing, text));
                return;
            }
        };
        for port in 1..=attr.ports {
            match context.port(port) {
                Ok(known) if known.link_layer == 2 => self.look_at_port(&context, port, known),
                Ok(known) => {
                    self.ports.insert((name.to_owned(), port), known);
                    self.refused.push(refuse(port, Code::InfinibandLink, String::new()));
                }
                Err(error) => self.refused.push(refuse(port, Code::PortDown, error.to_string())),
            }
        }
        self.devices.insert(name.to_owned(), context);
    }

    fn look_at_port(&mut self, context: &sys::Context, number: u8, attr: sys::PortAttr) {
        let name = context.name().to_owned();
        let mut port = Port {
            state: Some(fact(state_name(attr.state).to_owned())),
            link_layer: Some(fact("Ethernet".to_owned())),
            ..Port::default()
        };
        for index in 0..attr.gids.min(GIDS_MAX) as u16 {
            let Ok(Some(entry)) = context.gid(number, index) else { continue };
            let address = Ipv6Addr::from(entry.gid);
            let version = match entry.kind {
                Some(2) => GidVersion::V2,
                Some(_) => GidVersion::V1,
                None => version_in_sysfs(&name, number, index),
            };
            let gid = Gid { class: class(address), version, gid: address.to_string() };
            port.gids.insert(index, fact(gid));
            self.gids.insert((name.clone(), number, index), entry.gid);
        }
        self.ports.insert((name.clone(), number), attr);
        self.machine.nics.entry(name).or_default().ports.insert(number, port);
    }

    fn ranked(&self, reach: Reach) -> (Vec<PortChoice>, Vec<PortRefused>) {
        let (choices, mut refused) = ports(&self.machine, reach);
        refused.extend(self.refused.iter().cloned());
        (choices, refused)
    }

    fn info(&self, name: &str, number: u8) -> Option<PortInfo> {
        let attr = self.ports.get(&(name.to_owned(), number))?;
        let link_layer = if attr.link_layer == 2 { "Ethernet" } else { "InfiniBand" };
        let mtu = mtu(attr.active_mtu).map_or(0, Mtu::bytes);
        Some(PortInfo { number, state: state_name(attr.state), link_layer, mtu })
    }

    fn open(mut self, resolved: PortResolved) -> Result<Arc<Device>> {
        let PortChoice { device, port, gid_index, .. } = &resolved.chosen;
        let place = (device.clone(), *port);
        let missing = || Error::new(Kind::NotFound, format!("{device} port {port} is gone"));
        let context = self.devices.remove(device).ok_or_else(missing)?;
        let attr = self.ports.get(&place).ok_or_else(missing)?;
        let gid = self.gids.get(&(place.0, place.1, *gid_index)).ok_or_else(missing)?;
        let mtu = mtu(attr.active_mtu).ok_or_else(|| {
            let error = std::io::ErrorKind::InvalidData.into();
            driver_error(device, &format!("read the MTU of port {port}"), error)
        })?;
        let index = u8::try_from(*gid_index).map_err(|_| missing())?;
        let chosen =
            Chosen { port: *port, gid_index: index, gid: *gid, mtu, resolved: resolved.clone() };
        Device::new(context, chosen)
    }
}

fn fact<T>(value: T) -> Fact<T> {
    Fact { value, origin: Origin::default() }
}

/// `enum ibv_mtu`.
fn mtu(number: u32) -> Option<Mtu> {
    (1..=5).contains(&number).then(|| 128 << number).and_then(Mtu::new)
}

/// `enum ibv_port_state`.
const fn state_name(state: u32) -> &'static str {
    match state {
        1 => "DOWN",
        2 => "INIT",
        3 => "ARMED",
        4 => "ACTIVE",
        5 => "ACTIVE_DEFER",
        _ => "UNKNOWN",
    }
}

const fn class(gid: Ipv6Addr) -> GidClass {
    if gid.is_unspecified() {
        GidClass::Empty
    } else if gid.to_ipv4_mapped().is_some() {
        GidClass::Ipv4Mapped
    } else if gid.is_unicast_link_local() {
        GidClass::LinkLocal
    } else {
        GidClass::Global
    }
}

/// Where the library does not tell the type of an entry.
fn version_in_sysfs(device: &str, port: u8, index: u16) -> GidVersion {
    let path = format!("{SYSFS}/{device}/ports/{port}/gid_attrs/types/{index}");
    match std::fs::read_to_string(Path::new(&path)) {
        Ok(text) if text.trim() == "RoCE v2" => GidVersion::V2,
        Ok(_) => GidVersion::V1,
        Err(_) => GidVersion::Unknown,
    }
}

/// An address as a GID has it.
fn mapped(address: IpAddr) -> Ipv6Addr {
    Ipv6Addr::from(gid_of(address))
}

/// This machine's address that packets to `peer` start from, as its routing table has it.
fn source(peer: IpAddr) -> Option<IpAddr> {
    const ROCE_PORT: u16 = 4791;
    let any: IpAddr = match peer {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // Nothing is sent by this.
    socket.connect((peer, ROCE_PORT)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_class_and_a_gid() {
        let cases = [
            ("::", GidClass::Empty),
            ("fe80::1", GidClass::LinkLocal),
            ("::ffff:10.9.0.1", GidClass::Ipv4Mapped),
            ("fd00::1", GidClass::Global),
            ("2001:db8::1", GidClass::Global),
        ];
        for (text, expected) in cases {
            assert_eq!(class(text.parse().unwrap()), expected, "{text}");
        }
        for text in ["10.9.0.1", "fd00::1"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(super::super::device::address(gid_of(address)), address);
        }
    }

    #[test]
    fn the_way_to_a_peer_starts_at_an_address_of_this_machine() {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(source(loopback), Some(loopback));
    }

    fn seen(gids: &[(u8, u16, &str, GidVersion)]) -> Seen {
        let mut seen = Seen::default();
        for (port, index, gid, version) in gids {
            let address: Ipv6Addr = gid.parse().unwrap();
            let gid = Gid { class: class(address), version: *version, gid: address.to_string() };
            let nic = seen.machine.nics.entry("mlx5_0".into()).or_default();
            let port = nic.ports.entry(*port).or_default();
            port.state = Some(fact("ACTIVE".into()));
            port.link_layer = Some(fact("Ethernet".into()));
            port.gids.insert(*index, fact(gid));
        }
        seen
    }

    /// Each entry that is not taken has its reason in the error.
    #[test]
    fn an_error_names_every_candidate() {
        let table = [(1, 0, "fe80::1", GidVersion::V1), (1, 3, "::ffff:10.9.0.1", GidVersion::V2)];
        let options = IbvOptions::new().port(2).peer("10.9.0.2".parse().unwrap());
        let error = choose(seen(&table), &options).unwrap_err();
        assert_eq!(error.code(), "rdma-port-unusable");
        let reasons: Vec<_> =
            error.reasons().iter().map(|one| (one.code, one.detail.as_str())).collect();
        assert_eq!(reasons.len(), 2, "{reasons:?}");
        assert!(reasons.iter().any(|(code, detail)| {
            *code == Code::GidUnusable && detail.contains("mlx5_0 port 1 GID 0")
        }));
        assert!(reasons.iter().any(|(code, detail)| {
            *code == Code::NotRequested && detail.contains("mlx5_0 port 1 GID 3")
        }));
        let options = IbvOptions::new().reaching("192.0.2.1".parse().unwrap());
        let error = choose(seen(&table), &options).unwrap_err();
        assert!(error.reasons().iter().all(|one| one.code == Code::GidUnusable), "{error:#}");
        assert!(format!("{error:#}").contains("the way to 192.0.2.1 does not start there"));
    }
}
