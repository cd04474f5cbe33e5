//! Checks of the RDMA network: addresses, MTU, limits, counters, completion errors.

use alloc::string::{String, ToString};

use super::context::Context;
use super::rdma_port::routable_gid;
use super::{Finding, Severity, Status, Verdict};
use crate::facts::{Event, Known};
use alloc::vec::Vec;

/// Retries ran out (completion status 12).
pub(super) fn timeout(context: &Context<'_>) -> Verdict {
    let errors = context.events(|event| match event {
        Event::CompletionError { status: 12, hca, .. } => Some(hca.as_str()),
        _ => None,
    });
    if errors.is_empty() {
        return Verdict::of_quiet_log(context, "no transport timeout");
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
        return Verdict::of_quiet_log(context, "no local length error");
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
        return Verdict::of_quiet_log(context, "no crash while polling completions");
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
        return Verdict::of_quiet_log(context, "no local protection error");
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
