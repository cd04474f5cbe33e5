//! Checks of stream memory operations, gdrcopy and GPU-initiated transports.

use alloc::string::String;
use alloc::vec::Vec;

use super::context::Context;
use super::{Finding, Severity, Status, Verdict};
use crate::facts::{Event, Kind};

fn parameter<'m>(context: &Context<'m>, name: &str) -> Option<&'m crate::facts::Fact<String>> {
    context.machine.platform.params.get(name)
}

/// Stream memory operations of the first interface are switched off.
pub(super) fn stream_memops(context: &Context<'_>) -> Verdict {
    let Some(refused) = context.seen(&Event::StreamOpsRefused) else {
        return match context.machine.has(&[Kind::AppLog]) {
            true => Verdict::pass("no stream memory operation is refused"),
            false => Verdict::skip(&["log of the failing program"]),
        };
    };
    let evidence = [context.cite_seen(refused)];
    let version = context.cuda_major();
    let switch = parameter(context, "EnableStreamMemOPs");
    match (version, switch) {
        (Some(12..), _) => {
            Finding::unknown(Severity::Error, "stream memory operations are refused although CUDA 12 has them always")
                .seen(evidence)
                .maybe(["the program uses the first interface of cuStreamBatchMemOp", "a device without them"])
                .into()
        }
        (Some(_), Some(fact)) if fact.value != "0" => {
            Finding::unknown(Severity::Error, "stream memory operations are refused although they are on")
                .seen(evidence)
                .seen([context.cite(fact.origin)])
                .maybe(["a device or virtual GPU without them"])
                .into()
        }
        (Some(major), switch) if switch.is_some() || context.machine.has(&[Kind::NvidiaParams]) => {
            Finding::error(alloc::format!(
                "EnableStreamMemOPs is off, and CUDA {major} needs it for stream memory operations"
            ))
            .seen(evidence)
            .seen(switch.map(|fact| context.cite(fact.origin)))
            .fix(["options nvidia NVreg_EnableStreamMemOPs=1 in /etc/modprobe.d, then reload the driver"])
            .into()
        }
        _ => Finding::unknown(Severity::Error, "stream memory operations are refused")
            .seen(evidence)
            .maybe(["EnableStreamMemOPs is off (drivers 387 to 524)"])
            .ask(["/proc/driver/nvidia/params", "driver or CUDA version"])
            .into(),
    }
}

/// GPU-initiated transport without either of its two ways in.
pub(super) fn ibgda(context: &Context<'_>) -> Verdict {
    let failed = context.event(|event| match event {
        Event::NvshmemTransportFailed { transport } if transport == "IBGDA" => Some(()),
        _ => None,
    });
    let Some((_, seen)) = failed else {
        return match context.machine.has(&[Kind::AppLog]) {
            true => Verdict::pass("the GPU-initiated transport did not fail"),
            false => Verdict::skip(&["log of the failing program"]),
        };
    };
    let evidence = [context.cite_seen(seen)];
    let params = parameter(context, "EnableStreamMemOPs").map(|fact| fact.value == "1");
    let mapping = parameter(context, "RegistryDwords")
        .map(|fact| fact.value.contains("PeerMappingOverride=1"));
    let by_params = params.zip(mapping).map(|(ops, map)| ops && map).or(params.filter(|on| !on));
    let by_gdrdrv = gdrdrv_usable(context);
    let routes = [
        "options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords=\"PeerMappingOverride=1;\" in \
         /etc/modprobe.d, update the initramfs, reboot",
        "or load gdrdrv and pass /dev/gdrdrv into the container",
    ];
    match (by_params, by_gdrdrv) {
        (Some(false), Some(false)) => Finding::error(
            "GPU-initiated RDMA has neither of its ways to map the NIC's doorbell: driver parameters off \
             (EnableStreamMemOPs, PeerMappingOverride), no usable gdrdrv",
        )
        .seen(evidence)
        .fix(routes)
        .into(),
        (Some(true), _) | (_, Some(true)) => {
            Finding::unknown(Severity::Error, "the transport failed although a way is open")
                .seen(evidence)
                .maybe(["no access to /dev/infiniband", "a NIC or firmware without the feature"])
                .ask(["NVSHMEM_DEBUG=INFO log"])
                .into()
        }
        _ => Finding::unknown(Severity::Error, "the GPU-initiated transport did not start")
            .seen(evidence)
            .maybe(["driver parameters off and no gdrdrv", "no access to /dev/infiniband"])
            .ask(["/proc/driver/nvidia/params", "lsmod", "/proc/devices"])
            .into(),
    }
}

/// Whether gdrdrv can be opened; `None` where nothing tells.
fn gdrdrv_usable(context: &Context<'_>) -> Option<bool> {
    let platform = &context.machine.platform;
    if platform.dev_nodes_listed.is_some() {
        return Some(platform.dev_nodes.contains_key("gdrdrv"));
    }
    if platform.char_devices_listed.is_some() {
        return Some(platform.char_devices.contains_key("gdrdrv"));
    }
    context.module("gdrdrv")
}

/// No verbs device nodes where the program runs.
pub(super) fn infiniband_nodes(context: &Context<'_>) -> Verdict {
    let platform = &context.machine.platform;
    let Some(listed) = platform.dev_nodes_listed.as_ref() else {
        return Verdict::skip(&["a listing of /dev of the process (live, or --root)"]);
    };
    let there = platform.dev_nodes.keys().any(|node| node.starts_with("infiniband/uverbs"));
    if there {
        return Verdict::pass("/dev/infiniband has verbs devices");
    }
    let wanted = context.event(|event| match event {
        Event::NvshmemTransportFailed { .. }
        | Event::VerbsFailed { .. }
        | Event::UsingNetwork { .. } => Some(()),
        _ => None,
    });
    let rdma =
        context.machine.nics.values().any(|nic| nic.ports.values().any(|p| p.state.is_some()));
    if wanted.is_none() && !rdma {
        return Verdict::pass("no verbs devices, and nothing asks for them");
    }
    Finding::error("/dev/infiniband has no verbs device where the program runs; no RDMA route helps without it")
        .seen([context.cite(listed.origin)])
        .fix(["pass the devices into the container: --device=/dev/infiniband/uverbs0 and the others"])
        .into()
}

/// Failures that other failures cause.
pub(super) fn late_failure(context: &Context<'_>) -> Verdict {
    let late = context.events(|event| match event {
        Event::LateFailure { what } => Some(what.as_str()),
        _ => None,
    });
    if late.is_empty() {
        return match context.machine.has(&[Kind::AppLog]) {
            true => Verdict::pass("no late failure"),
            false => Verdict::skip(&["log of the failing program"]),
        };
    }
    let message = alloc::format!(
        "{}: far from its cause; look at the first failure",
        late.iter().map(|(what, _)| *what).collect::<Vec<_>>().join("; ")
    );
    Finding::unknown(Severity::Warning, message)
        .seen(late.iter().map(|(_, seen)| context.cite_seen(seen)))
        .maybe(["a transport that did not start", "an illegal address in a kernel"])
        .into()
}

/// gdrdrv lost its device number.
pub(super) fn gdrdrv_major(context: &Context<'_>) -> Verdict {
    match context.module("gdrdrv") {
        Some(true) => {}
        Some(false) => return Verdict::pass("gdrdrv is not loaded"),
        None => return Verdict::skip(&["lsmod"]),
    }
    let platform = &context.machine.platform;
    let Some(listed) = platform.char_devices_listed.as_ref() else {
        return Verdict::skip(&["/proc/devices"]);
    };
    if platform.char_devices.contains_key("gdrdrv") {
        return Verdict::pass("gdrdrv has its device number");
    }
    let module = platform.modules.get("gdrdrv").map(|fact| context.cite(fact.origin));
    Finding::error("gdrdrv is loaded but owns no device number: /dev/gdrdrv opens something else or nothing")
        .seen([context.cite(listed.origin)])
        .seen(module)
        .fix([
            "rmmod gdrdrv, modprobe gdrdrv, and make /dev/gdrdrv again with the number of /proc/devices",
            "install a newer gdrdrv",
        ])
        .into()
}

/// Pin requests that are not multiples of a GPU page.
pub(super) fn pin_unaligned(context: &Context<'_>) -> Verdict {
    let requests = context.events(|event| match event {
        Event::PinUnaligned { length, address_offset } => Some((*length, *address_offset)),
        _ => None,
    });
    if requests.is_empty() {
        return match context.machine.has(&[Kind::KernelLog]) {
            true => Verdict::pass("no pin request is misaligned"),
            false => Verdict::skip(&["dmesg"]),
        };
    }
    let values: Vec<String> = requests
        .iter()
        .map(|((length, offset), _)| {
            let rest = length % 0x1_0000;
            let address = if *offset == 0 {
                String::new()
            } else {
                alloc::format!(", address off by {offset:#x}")
            };
            alloc::format!("{length:#x} % 0x10000 = {rest:#x}{address}")
        })
        .collect();
    Finding::new(
        Status::Fail,
        Severity::Error,
        alloc::format!(
            "the driver refused to pin: the length must be a multiple of 64 KiB ({})",
            values.join("; ")
        ),
    )
    .seen(requests.iter().map(|(_, seen)| context.cite_seen(seen)))
    .maybe([
        "a gdrdrv that does not round the length up",
        "a driver that began to enforce the rule (555 rejects, 550 only asserts)",
    ])
    .fix(["install a newer gdrdrv; an older driver branch is a stop-gap"])
    .into()
}

/// What the list of parameters says for its own sake.
pub(super) fn parameters(context: &Context<'_>) -> Verdict {
    let params = &context.machine.platform.params;
    if params.is_empty() {
        return Verdict::skip(&["/proc/driver/nvidia/params"]);
    }
    let names = [
        "EnableStreamMemOPs",
        "RegistryDwords",
        "GrdmaPciTopoCheckOverride",
        "EnablePCIERelaxedOrderingMode",
        "DmaRemapPeerMmio",
    ];
    let values: Vec<String> = names
        .iter()
        .filter_map(|name| {
            let value = &params.get(*name)?.value;
            Some(alloc::format!("{name}={}", if value.is_empty() { "(empty)" } else { value }))
        })
        .collect();
    Verdict::Pass(alloc::format!("{} parameters; {}", params.len(), values.join(", ")))
}
