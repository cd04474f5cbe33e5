//! Checks of the ports of RDMA devices: state, GIDs, MTU, rails, counters.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::context::Context;
use super::{Finding, Severity, Status, Verdict};
use crate::facts::machine::{GidClass, GidVersion};
use crate::facts::{Event, Known, Nic};

/// The first entry that can be routed over Ethernet: RoCE v2 with an IPv4 address.
pub(super) fn routable_gid(nic: &Nic) -> Option<(u8, u16)> {
    nic.ports.iter().find_map(|(port, record)| {
        let entry = record.gids.iter().find(|(_, fact)| {
            fact.value.version == GidVersion::V2 && fact.value.class == GidClass::Ipv4Mapped
        });
        entry.map(|(index, _)| (*port, *index))
    })
}

pub(super) fn is_ethernet(nic: &Nic) -> bool {
    nic.ports.values().any(|port| port.link_layer.known().is_some_and(|layer| layer == "Ethernet"))
}

/// A program uses a link-local GID.
pub(super) fn gid_link_local(context: &Context<'_>) -> Verdict {
    let used = context.events(|event| match event {
        Event::GidUsed { device, index } => Some((device.as_str(), *index)),
        _ => None,
    });
    let failed = context.events(|event| match event {
        Event::RtrFailed { errno } => Some(*errno),
        Event::CompletionError { status: 12, .. } => Some(110),
        _ => None,
    });
    if used.is_empty() {
        return Verdict::skip(&["log that names the GID index in use", "show_gids"]);
    }
    let (mut local, mut unknown) = (Vec::new(), false);
    for ((device, index), seen) in &used {
        let Some(nic) = context.machine.nics.get(*device) else {
            unknown = true;
            continue;
        };
        let entry = nic.ports.values().find_map(|port| {
            port.gids.get(&u16::try_from(*index).ok()?).map(|fact| fact.value.class)
        });
        match entry {
            Some(GidClass::LinkLocal) => {
                local.push((*device, *index, context.cite_seen(seen), nic));
            }
            Some(_) => {}
            None => unknown = true,
        }
    }
    if local.is_empty() {
        return match unknown {
            true => Verdict::skip(&["show_gids or ibv_devinfo -v of the devices in use"]),
            false => Verdict::pass("the GIDs in use can be routed"),
        };
    }
    let message = alloc::format!(
        "{} uses GID index {}, a link-local address: it reaches no other subnet",
        local.iter().map(|(device, ..)| *device).collect::<Vec<_>>().join(", "),
        local.first().map_or(0, |(_, index, ..)| *index)
    );
    let severity = if failed.is_empty() { Severity::Warning } else { Severity::Error };
    let fixes: Vec<String> = local
        .iter()
        .map(|(device, _, _, nic)| match routable_gid(nic) {
            Some((port, index)) => {
                alloc::format!("{device}: use GID index {index} (port {port}, RoCE v2, IPv4)")
            }
            None => alloc::format!(
                "{device}: give its network device an IPv4 address; no entry can be routed"
            ),
        })
        .collect();
    Finding::new(Status::Fail, severity, message)
        .on(local.iter().map(|(device, ..)| *device))
        .seen(local.iter().map(|(_, _, cite, _)| cite.clone()))
        .seen(failed.into_iter().map(|(_, seen)| context.cite_seen(seen)))
        .fix(fixes)
        .into()
}

/// Several NICs on each side, and a pair of them has no route.
pub(super) fn rail_crossing(context: &Context<'_>) -> Verdict {
    let timed_out = context.event(|event| match event {
        Event::RtrFailed { errno: 110 } => Some(()),
        _ => None,
    });
    let Some((_, seen)) = timed_out else {
        return Verdict::of_quiet_log(context, "no connection timed out");
    };
    let mut devices: Vec<&str> = context
        .events(|event| match event {
            Event::GidUsed { device, .. } if !device.is_empty() => Some(device.as_str()),
            _ => None,
        })
        .into_iter()
        .map(|(device, _)| device)
        .collect();
    devices.sort_unstable();
    devices.dedup();
    if devices.len() < 2 {
        return Verdict::pass("one NIC only: no rail is crossed");
    }
    Finding::warning(
        "the program connects any NIC to any NIC; NICs of different rails may have no route to each other",
    )
    .on(devices)
    .seen([context.cite_seen(seen)])
    .fix(["pair NICs rail by rail, or route between the subnets of the rails"])
    .into()
}

/// A path MTU larger than the port's.
pub(super) fn mtu(context: &Context<'_>) -> Verdict {
    let asked = context.events(|event| match event {
        Event::MtuRequested { bytes } => Some(*bytes),
        _ => None,
    });
    let Some(largest) = asked.iter().map(|(bytes, _)| *bytes).max() else {
        return Verdict::skip(&["output of the program with the MTU it asked for", "ibv_devinfo"]);
    };
    if context.seen(&Event::MtuLowered).is_some() {
        return Verdict::pass("the program lowered the MTU by itself");
    }
    let active: Vec<(String, u32, Option<u32>, String)> = context
        .machine
        .nics
        .iter()
        .flat_map(|(name, nic)| nic.ports.iter().map(move |(number, port)| (name, *number, port)))
        .filter_map(|(name, number, port)| {
            let fact = port.active_mtu.as_ref()?;
            let label = alloc::format!("{name} port {number}");
            Some((label, fact.value, port.max_mtu.known().copied(), context.cite(fact.origin)))
        })
        .collect();
    if active.is_empty() {
        return Verdict::skip(&["ibv_devinfo (active_mtu)"]);
    }
    let small: Vec<_> = active.into_iter().filter(|(_, mtu, ..)| *mtu < largest).collect();
    if small.is_empty() {
        return Verdict::pass("the MTU asked for is the port's or smaller");
    }
    let text: Vec<String> =
        small.iter().map(|(label, mtu, ..)| alloc::format!("{label}: active {mtu}")).collect();
    let usable = small.iter().map(|(_, mtu, ..)| *mtu).min().unwrap_or(1024);
    let message = alloc::format!(
        "path MTU {largest} was asked for, more than the port carries ({}); a network device MTU of 1500 \
         gives 1024",
        text.join(", ")
    );
    Finding::error(message)
        .on(small.iter().map(|(label, ..)| label.clone()))
        .seen(asked.iter().map(|(_, seen)| context.cite_seen(seen)))
        .seen(small.iter().map(|(.., cite)| cite.clone()))
        .fix([
            alloc::format!("use the active MTU, {usable}"),
            "or raise the MTU of the network devices and the switch ports to 4200 or more"
                .to_string(),
        ])
        .into()
}

/// Ports that are down.
pub(super) fn port_down(context: &Context<'_>) -> Verdict {
    let asked: Vec<&str> = ["NCCL_IB_HCA", "UCX_NET_DEVICES"]
        .into_iter()
        .filter_map(|name| context.setting(name))
        .flat_map(|fact| fact.value.value.split([',', '=', '^']))
        .map(|name| name.split(':').next().unwrap_or(name))
        .collect();
    let (mut idle, mut wanted, mut known) = (Vec::new(), Vec::new(), false);
    for (name, nic) in &context.machine.nics {
        for (number, port) in &nic.ports {
            let Some(state) = port.state.as_ref() else { continue };
            known = true;
            if state.value == "ACTIVE" {
                continue;
            }
            let layer = port.link_layer.known().map_or("", String::as_str);
            let entry = (
                alloc::format!("{name} port {number}"),
                alloc::format!("{name} port {number} is {} ({layer})", state.value),
                context.cite(state.origin),
            );
            if asked.contains(&name.as_str()) { wanted.push(entry) } else { idle.push(entry) }
        }
    }
    let mut findings = Vec::new();
    let text = |list: &[(String, String, String)]| {
        let lines: Vec<&str> = list.iter().map(|(_, text, _)| text.as_str()).collect();
        lines.join("; ")
    };
    if !wanted.is_empty() {
        let finding = Finding::error(alloc::format!("asked for, and down: {}", text(&wanted)))
            .on(wanted.iter().map(|(label, ..)| label.clone()))
            .seen(wanted.iter().map(|(.., cite)| cite.clone()));
        findings.push(
            finding.fix([
                "cable, switch port, subnet manager (InfiniBand), ip link set up (Ethernet)",
            ]),
        );
    }
    if !idle.is_empty() {
        let finding = Finding::info(text(&idle))
            .on(idle.iter().map(|(label, ..)| label.clone()))
            .seen(idle.iter().map(|(.., cite)| cite.clone()));
        findings.push(finding);
    }
    Verdict::or(findings, || match known {
        true => Verdict::pass("every port is active"),
        false => Verdict::skip(&["ibv_devinfo or /sys/class/infiniband"]),
    })
}

/// Counters that stand at their ceiling (InfiniBand Architecture, PortCounters widths).
pub(super) fn saturated(context: &Context<'_>) -> Verdict {
    const CEILINGS: [(&str, u64); 12] = [
        ("symbol_error", 65_535),
        ("link_error_recovery", 255),
        ("link_downed", 255),
        ("port_rcv_errors", 65_535),
        ("port_rcv_remote_physical_errors", 65_535),
        ("port_rcv_switch_relay_errors", 65_535),
        ("port_xmit_discards", 65_535),
        ("port_xmit_constraint_errors", 255),
        ("port_rcv_constraint_errors", 255),
        ("local_link_integrity_errors", 15),
        ("excessive_buffer_overrun_errors", 15),
        ("VL15_dropped", 65_535),
    ];
    let mut findings = Vec::new();
    let mut known = false;
    for (counter, ceiling) in CEILINGS {
        let (mut ports, mut evidence) = (Vec::new(), Vec::new());
        for (name, nic) in &context.machine.nics {
            for (number, port) in &nic.ports {
                let Some(last) = port.counters.get(counter).and_then(|list| list.last()) else {
                    continue;
                };
                known = true;
                if last.value == ceiling {
                    ports.push(alloc::format!("{name} port {number}"));
                    evidence.push(context.cite(last.origin));
                }
            }
        }
        if !ports.is_empty() {
            let message = alloc::format!(
                "{counter} is >={ceiling}, saturated: the counter stops there, the true number is unknown"
            );
            let finding = Finding::warning(message).on(ports).seen(evidence);
            findings
                .push(finding.fix(["clear the counters (perfquery -R) and look again under load"]));
        }
    }
    Verdict::or(findings, || match known {
        true => Verdict::pass("no counter stands at its ceiling"),
        false => Verdict::skip(&["counters of /sys/class/infiniband"]),
    })
}

/// Two kinds of port in one table: ports with an empty GID table cannot be judged.
pub(super) fn ethernet_without_gid(context: &Context<'_>) -> Verdict {
    let (mut bare, mut known) = (Vec::new(), false);
    for (name, nic) in context.machine.nics.iter().filter(|(_, nic)| is_ethernet(nic)) {
        for (number, port) in nic.ports.iter().filter(|(_, port)| !port.gids.is_empty()) {
            known = true;
            let active = port.state.known().is_none_or(|state| state == "ACTIVE");
            let routable = port.gids.values().any(|fact| {
                fact.value.version != GidVersion::V1
                    && matches!(fact.value.class, GidClass::Ipv4Mapped | GidClass::Global)
            });
            if active && !routable {
                bare.push(alloc::format!("{name} port {number}"));
            }
        }
    }
    match (bare.is_empty(), known) {
        (true, true) => Verdict::pass("every Ethernet port has a GID that can be routed"),
        (true, false) => Verdict::skip(&["show_gids or ibv_devinfo -v"]),
        (false, _) => {
            Finding::warning("no RoCE v2 address that can be routed: RDMA stays on the link")
                .on(bare)
                .fix(["give the network device an IPv4 address"])
                .into()
        }
    }
}
