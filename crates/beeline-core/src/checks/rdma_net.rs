//! Checks of the RDMA network: addresses, MTU, limits, counters, completion errors.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::context::Context;
use super::{Finding, Severity, Status, Verdict};
use crate::facts::machine::{GidClass, GidVersion};
use crate::facts::{Event, Kind, Known, Nic};

fn log_quiet(context: &Context<'_>, message: &str) -> Verdict {
    match context.machine.has(&[Kind::NcclLog, Kind::AppLog]) {
        true => Verdict::pass(message),
        false => Verdict::skip(&["log of the failing program"]),
    }
}

/// The first entry that can be routed over Ethernet: RoCE v2 with an IPv4 address.
fn routable_gid(nic: &Nic) -> Option<(u8, u16)> {
    nic.ports.iter().find_map(|(port, record)| {
        let entry = record.gids.iter().find(|(_, fact)| {
            fact.value.version == GidVersion::V2 && fact.value.class == GidClass::Ipv4Mapped
        });
        entry.map(|(index, _)| (*port, *index))
    })
}

fn is_ethernet(nic: &Nic) -> bool {
    nic.ports.values().any(|port| port.link_layer.known().is_some_and(|layer| layer == "Ethernet"))
}

/// Retries ran out (completion status 12).
pub(super) fn timeout(context: &Context<'_>) -> Verdict {
    let errors = context.events(|event| match event {
        Event::CompletionError { status: 12, hca, .. } => Some(hca.as_str()),
        _ => None,
    });
    if errors.is_empty() {
        return log_quiet(context, "no transport timeout");
    }
    let evidence: Vec<String> = errors.iter().map(|(_, seen)| context.cite_seen(seen)).collect();
    let named: Vec<&str> =
        errors.iter().map(|(hca, _)| *hca).filter(|hca| !hca.is_empty()).collect();
    let candidates: Vec<(&String, (u8, u16))> = context
        .machine
        .nics
        .iter()
        .filter(|(name, _)| named.is_empty() || named.contains(&name.as_str()))
        .filter_map(|(name, nic)| Some((name, routable_gid(nic)?)))
        .collect();
    let used =
        context.setting("NCCL_IB_GID_INDEX").and_then(|fact| fact.value.value.parse::<u16>().ok());
    let mut finding = Finding::error(
        "the transport retries ran out (completion status 12): packets or their answers do not arrive",
    )
    .seen(evidence)
    .on(named);
    let mut indices: Vec<u16> = candidates.iter().map(|(_, (_, index))| *index).collect();
    indices.sort_unstable();
    indices.dedup();
    let first = match indices[..] {
        [] => {
            finding = finding.ask(["show_gids, or ibv_devinfo -v"]);
            alloc::vec![
                "wrong GID type or index",
                "VLAN or route between the NICs",
                "switch: PFC, ACL"
            ]
        }
        _ if indices.iter().all(|index| Some(*index) == used) => {
            alloc::vec![
                "VLAN or route between the NICs",
                "switch: PFC, ACL",
                "wrong GID on the other node"
            ]
        }
        _ => alloc::vec![
            "wrong GID type or index",
            "VLAN or route between the NICs",
            "switch: PFC, ACL"
        ],
    };
    finding = finding.maybe(first);
    for (name, (port, index)) in &candidates {
        if Some(*index) != used {
            finding = finding.fix([alloc::format!(
                "NCCL_IB_GID_INDEX={index} for {name} port {port}: the first RoCE v2 entry with an IPv4 \
                 address"
            )]);
        }
    }
    finding
        .fix(["verify with ib_write_bw between the same two NICs, with the same GID index"])
        .into()
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
    let Some((_, seen)) = timed_out else { return log_quiet(context, "no connection timed out") };
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

/// Locked memory that is too little.
pub(super) fn memlock(context: &Context<'_>) -> Verdict {
    const ENOUGH: u64 = 64 << 20;
    let refused = context.events(|event| match event {
        Event::VerbsFailed { call, errno: 12, .. } => Some(call.as_str()),
        Event::PerftestMrFailed { errno: 12 } => Some("ibv_reg_mr"),
        _ => None,
    });
    let limits = &context.machine.platform.memlock;
    let low = |soft: Option<u64>| soft.is_some_and(|bytes| bytes < ENOUGH);
    let own = limits.iter().find(|fact| fact.value.of_process);
    let shell = limits.iter().find(|fact| !fact.value.of_process);
    let evidence: Vec<String> = refused.iter().map(|(_, seen)| context.cite_seen(seen)).collect();
    let remedies = [
        "limits.conf: memlock unlimited, then log in again; docker: --ulimit memlock=-1; systemd: \
         LimitMEMLOCK=infinity",
        "check inside mpirun or the job itself, not in a login shell",
    ];
    match (refused.is_empty(), own, shell) {
        (false, Some(fact), _) if low(fact.value.soft) => Finding::error(alloc::format!(
            "{}: the process may lock {} KiB only",
            refused.first().map_or("a verbs call", |(call, _)| call),
            fact.value.soft.unwrap_or(0) >> 10
        ))
        .seen(evidence)
        .seen([context.cite(fact.origin)])
        .fix(remedies)
        .into(),
        (false, Some(_), _) => Verdict::pass("the process may lock enough memory"),
        (false, None, shell) => {
            let finding = Finding::unknown(Severity::Error, "a verbs call could not get memory")
                .seen(evidence)
                .seen(shell.map(|fact| context.cite(fact.origin)))
                .maybe([
                    "the limit on locked memory of the failing process",
                    "the device's own limits",
                ])
                .ask(["/proc/PID/limits of the failing process; a login shell's limit can differ"])
                .fix(remedies);
            finding.into()
        }
        (true, Some(fact), _) if low(fact.value.soft) => {
            let rdma = context.machine.nics.values().any(|nic| nic.rdma.known() == Some(&true));
            if !rdma {
                return Verdict::pass("locked memory is limited, and there is no RDMA device");
            }
            let message = alloc::format!(
                "this process may lock {} KiB only; registering memory will fail beyond that",
                fact.value.soft.unwrap_or(0) >> 10
            );
            Finding::warning(message).seen([context.cite(fact.origin)]).fix(remedies).into()
        }
        (true, Some(_), _) => Verdict::pass("the process may lock enough memory"),
        (true, None, _) => Verdict::skip(&["/proc/PID/limits", "log of the failing program"]),
    }
}

/// A message longer than the port allows.
pub(super) fn message_too_big(context: &Context<'_>) -> Verdict {
    let errors = context.events(|event| match event {
        Event::LocalLengthError { length } => Some(*length),
        Event::CompletionError { status: 1, .. } => Some(0),
        _ => None,
    });
    if errors.is_empty() {
        return log_quiet(context, "no local length error");
    }
    let evidence: Vec<String> = errors.iter().map(|(_, seen)| context.cite_seen(seen)).collect();
    let limit = context
        .machine
        .nics
        .values()
        .flat_map(|nic| nic.ports.values())
        .filter_map(|port| port.max_msg_bytes.as_ref())
        .min_by_key(|fact| fact.value);
    let length = errors.iter().map(|(length, _)| *length).max().unwrap_or(0);
    let Some(limit) = limit else {
        return Finding::unknown(Severity::Error, "local length error")
            .seen(evidence)
            .maybe([
                "a message longer than max_msg_sz",
                "a receive buffer shorter than the message",
            ])
            .ask(["ibv_devinfo -v (max_msg_sz)"])
            .into();
    };
    if length > 0 && length <= limit.value {
        return Finding::unknown(Severity::Error, "local length error below the port's limit")
            .seen(evidence)
            .maybe(["a receive buffer shorter than the message"])
            .into();
    }
    let floats = limit.value / 4 + 1;
    Finding::error(alloc::format!(
        "a message is longer than the port allows: the limit is {} bytes ({floats} floats exceed it by 4 \
         bytes)",
        limit.value
    ))
    .seen(evidence)
    .seen([context.cite(limit.origin)])
    .fix([alloc::format!("split messages at {} bytes", limit.value)])
    .into()
}

/// Atomic results in network byte order.
pub(super) fn atomic_reply(context: &Context<'_>) -> Verdict {
    let swapped = context.seen(&Event::AtomicSwapped);
    let big: Vec<(&String, String)> = context
        .machine
        .nics
        .iter()
        .filter_map(|(name, nic)| {
            let fact = nic.atomic.as_ref().filter(|fact| fact.value.contains("REPLY_BE"))?;
            Some((name, context.cite(fact.origin)))
        })
        .collect();
    if let Some(seen) = swapped {
        return Finding::new(
            Status::Fail,
            Severity::Critical,
            "results of atomic operations are byte-swapped: the consumer does not convert them",
        )
        .on(big.iter().map(|(name, _)| (*name).clone()))
        .seen([context.cite_seen(seen)])
        .fix(["swap fetched values in the consumer, or use a library that does"])
        .into();
    }
    if big.is_empty() {
        return match context.machine.nics.values().any(|nic| nic.atomic.is_some()) {
            true => Verdict::pass("atomic results come in the host's byte order"),
            false => Verdict::skip(&["ibv_devinfo -v (atomic_cap)"]),
        };
    }
    Finding::info(
        "this device answers atomic operations in network byte order; consumers must swap",
    )
    .on(big.iter().map(|(name, _)| (*name).clone()))
    .seen(big.into_iter().map(|(_, cite)| cite))
    .into()
}

/// Receiver-not-ready retries: at start only, or all the time.
pub(super) fn rnr(context: &Context<'_>) -> Verdict {
    let mut findings = Vec::new();
    let (mut single, mut any) = (false, false);
    for (name, nic) in &context.machine.nics {
        for (number, port) in &nic.ports {
            let Some(samples) = port.counters.get("rnr_nak_retry_err") else { continue };
            any = true;
            let values: Vec<u64> = samples.iter().map(|fact| fact.value).collect();
            let label = alloc::format!("{name} port {number}");
            let evidence: Vec<String> =
                samples.iter().map(|fact| context.cite(fact.origin)).collect();
            match values[..] {
                [only] => single |= only > 0,
                [first, last] if last > first => {
                    let message = alloc::format!("rnr_nak_retry_err rose by {}", last - first);
                    let finding = Finding::unknown(Severity::Info, message)
                        .on([label])
                        .seen(evidence)
                        .maybe([
                            "receives posted late at start-up",
                            "receives posted too slowly under load",
                        ])
                        .ask(["a third snapshot under load"]);
                    findings.push(finding);
                }
                [first, .., before, last] if last > before => {
                    let message = alloc::format!(
                        "rnr_nak_retry_err keeps rising under load (by {} in all, {} in the last interval)",
                        last.saturating_sub(first),
                        last - before
                    );
                    let finding = Finding::warning(message).on([label]).seen(evidence);
                    findings.push(finding.fix(["post more receives, or post them earlier"]));
                }
                [first, .., last] if last > first => {
                    let message = alloc::format!(
                        "rnr_nak_retry_err rose by {} at start and then stayed: receives were posted \
                         after the connection was ready",
                        last - first
                    );
                    let finding = Finding::info(message).on([label]).seen(evidence);
                    findings.push(
                        finding.fix(["post receives before the queue pair is ready to receive"]),
                    );
                }
                _ => {}
            }
        }
    }
    Verdict::or(findings, || match (any, single) {
        (false, _) => Verdict::skip(&["hw_counters of the port"]),
        (true, true) => {
            Verdict::skip(&["two more snapshots of hw_counters, after start and under load"])
        }
        (true, false) => Verdict::pass("no receiver-not-ready retries"),
    })
}

/// Inline receive data copied by the CPU into GPU memory.
pub(super) fn scatter_to_cqe(context: &Context<'_>) -> Verdict {
    let Some(crash) = context.seen(&Event::ScatterCrash) else {
        return log_quiet(context, "no crash while polling completions");
    };
    let off = context.setting("MLX5_SCATTER_TO_CQE").is_some_and(|fact| fact.value.value == "0");
    if off {
        return Verdict::pass("scatter to CQE is off; the crash has another cause");
    }
    let message = "the library copied a small message from the completion entry into the receive buffer \
                   with the CPU";
    let finding = match context.seen(&Event::GpuBuffer) {
        Some(gpu) => Finding::error(alloc::format!("{message}, and that buffer is GPU memory"))
            .seen([context.cite_seen(gpu)]),
        None => Finding::unknown(Severity::Error, message)
            .maybe(["the receive buffer is GPU memory"])
            .ask(["whether receive buffers are in GPU memory"]),
    };
    finding
        .seen([context.cite_seen(crash)])
        .fix(["MLX5_SCATTER_TO_CQE=0, or the flag of the queue pair that switches it off"])
        .into()
}

/// Local protection error (completion status 4).
pub(super) fn local_protection(context: &Context<'_>) -> Verdict {
    let errors = context.events(|event| match event {
        Event::CompletionError { status: 4, hca, .. } => Some(hca.as_str()),
        _ => None,
    });
    if errors.is_empty() {
        return log_quiet(context, "no local protection error");
    }
    let mut layers: Vec<&str> = context
        .machine
        .nics
        .values()
        .flat_map(|nic| nic.ports.values())
        .filter_map(|port| port.link_layer.known().map(String::as_str))
        .collect();
    layers.sort_unstable();
    layers.dedup();
    let mixed =
        if layers.len() > 1 { " (this job sees both InfiniBand and Ethernet ports)" } else { "" };
    let topology = &context.topology;
    let redirects = topology.gpus().any(|gpu| {
        topology.nics().any(|nic| !topology.redirecting(&topology.path(gpu, nic)).is_empty())
    });
    let acs = if redirects {
        "ACS redirect on the way from a GPU to a NIC: the listing shows it"
    } else {
        "ACS redirect on a port between GPU and NIC: read every ACSCtl line rather than a claim"
    };
    Finding::unknown(Severity::Error, "local protection error (completion status 4)")
        .on(errors.iter().map(|(hca, _)| *hca).filter(|hca| !hca.is_empty()))
        .seen(errors.iter().map(|(_, seen)| context.cite_seen(seen)))
        .maybe([
            acs.to_string(),
            "PCI write ordering of the NIC (PCI_WR_ORDERING)".to_string(),
            alloc::format!("a mix of NICs{mixed}: filter with NCCL_IB_HCA"),
        ])
        .ask([
            "lspci -vvv as root, every ACSCtl line",
            "mlxconfig query PCI_WR_ORDERING",
            "whether it goes away with NCCL_NET_GDR_LEVEL=LOC: then the GPU path is at fault",
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
