//! Checks of registering GPU memory for RDMA, and of whether it is used.

use alloc::string::{String, ToString};

use super::context::{Context, is_consumer};
use super::{Finding, Severity, Verdict};
use crate::facts::{Event, Kind, Known};
use alloc::vec::Vec;

const REGISTER: &str = "ib_register_peer_memory_client";

fn is_peermem(module: &str) -> bool {
    module.contains("peermem") || module.contains("nv_peer_mem")
}

/// The peer memory module cannot find the interface it registers with.
pub(super) fn peermem_no_api(context: &Context<'_>) -> Verdict {
    let absent = context.events(|event| match event {
        Event::UnknownSymbol { module, symbol, err: 0 | -2 }
            if is_peermem(module) && symbol.contains("peer_memory_client") =>
        {
            Some((module, symbol))
        }
        _ => None,
    });
    let Some(((module, _), _)) = absent.first() else {
        return kernel_log_pass(context, "peermem links");
    };
    let kernel = context.kernel();
    let mut remedies = alloc::vec![alloc::format!(
        "install MOFED or DOCA-OFED, then rebuild {module} against it, and load it after ib_core"
    )];
    let mut missing = Vec::new();
    match (kernel, context.machine.platform.driver_open.known()) {
        (Some(version), _) if version < (5, 12) => {}
        (Some(_), Some(true)) => {
            remedies.push(
                "or use dma-buf instead: kernel and open driver modules allow it".to_string(),
            );
        }
        (Some(_), Some(false)) => {}
        _ => missing
            .push("uname -r and /proc/driver/nvidia/version, for dma-buf instead (5.12, open)"),
    }
    let message = alloc::format!(
        "{module} needs {REGISTER}, and the loaded ib_core does not export it (the inbox one does not)"
    );
    Finding::error(message)
        .on([module.to_string()])
        .seen(absent.iter().map(|(_, seen)| context.cite_seen(seen)))
        .fix(remedies)
        .ask(missing)
        .into()
}

fn kernel_log_pass(context: &Context<'_>, what: &str) -> Verdict {
    match context.machine.has(&[Kind::KernelLog]) {
        true => Verdict::Pass(alloc::format!("no line of the kernel log says otherwise: {what}")),
        false => Verdict::skip(&["dmesg"]),
    }
}

/// The peer memory module was built against another ib_core.
pub(super) fn peermem_abi(context: &Context<'_>) -> Verdict {
    let other = context.events(|event| match event {
        Event::UnknownSymbol { module, symbol, err: -22 } if is_peermem(module) => {
            Some((module, symbol))
        }
        Event::SymbolVersion { module, symbol } if is_peermem(module) => Some((module, symbol)),
        _ => None,
    });
    let Some(((module, _), _)) = other.first() else {
        return kernel_log_pass(context, "peermem matches ib_core");
    };
    let mut symbols: Vec<&String> = other.iter().map(|((_, symbol), _)| *symbol).collect();
    symbols.sort_unstable();
    symbols.dedup();
    let names: Vec<&str> = symbols.iter().map(|symbol| symbol.as_str()).collect();
    let message = alloc::format!(
        "{module} was built against another version of ib_core (err -22: the symbol is there, with \
         another version): {}",
        names.join(", ")
    );
    Finding::error(message)
        .on([module.to_string()])
        .seen(other.iter().map(|(_, seen)| context.cite_seen(seen)))
        .fix([
            alloc::format!("rebuild {module} against the running ib_core and load it again"),
            "on Kubernetes: restart the GPU driver pod after every upgrade of the network driver"
                .to_string(),
        ])
        .into()
}

/// The harmless message of older drivers.
pub(super) fn peermem_context(context: &Context<'_>) -> Verdict {
    let Some(seen) = context.seen(&Event::PeermemInvalidContext) else {
        return kernel_log_pass(context, "no invalid peermem context");
    };
    let message = alloc::format!(
        "nvidia-peermem reported an invalid context {} times: harmless by itself, and not the cause of \
         anything else",
        seen.count
    );
    Finding::info(message)
        .seen([context.cite_seen(seen)])
        .fix(["upgrade the driver to R560 or newer, which does not print it"])
        .into()
}

/// The module is loaded, and the kernel does not know it as a peer memory client.
pub(super) fn peermem_registered(context: &Context<'_>) -> Verdict {
    match context.peermem_loaded() {
        Some(true) => {}
        Some(false) => return Verdict::pass("no peer memory module is loaded"),
        None => return Verdict::skip(&["lsmod"]),
    }
    let platform = &context.machine.platform;
    let Some(listed) = platform.memory_peers_listed.as_ref() else {
        return Verdict::skip(&["/sys/kernel/mm/memory_peers"]);
    };
    if platform.memory_peers.keys().any(|client| client.contains("nv")) {
        return Verdict::pass("the peer memory module is registered with the kernel");
    }
    let module = platform.modules.iter().find(|(name, _)| is_peermem(name));
    Finding::error("the peer memory module is loaded and not registered: loading it is not enough")
        .seen([context.cite(listed.origin)])
        .seen(module.map(|(_, fact)| context.cite(fact.origin)))
        .fix([
            "load it after ib_core of the OFED it was built against; look at dmesg for its symbols",
        ])
        .into()
}

/// The RDMA stack refuses dma-buf.
pub(super) fn dmabuf_unsupported(context: &Context<'_>) -> Verdict {
    let refused = dmabuf_failures(context, 95);
    if refused.is_empty() {
        return dmabuf_quiet(context);
    }
    let falls_back = context.nccl().is_some_and(|version| version >= (2, 14));
    let evidence = refused.into_iter();
    if falls_back {
        let message = "the RDMA stack has no dma-buf registration; this NCCL falls back by itself";
        return Finding::info(message).seen(evidence).into();
    }
    let version = match context.nccl() {
        Some((major, minor)) => alloc::format!("NCCL {major}.{minor}"),
        None => "this program".to_string(),
    };
    Finding::error(alloc::format!(
        "the RDMA provider or driver has no dma-buf registration (error 95), and {version} does not \
         fall back"
    ))
    .seen(evidence)
    .fix([
        "upgrade rdma-core or the OFED so that the provider has ibv_reg_dmabuf_mr",
        "else switch dma-buf off (NCCL_DMABUF_ENABLE=0) and load nvidia-peermem",
    ])
    .into()
}

fn dmabuf_quiet(context: &Context<'_>) -> Verdict {
    match context.machine.has(&[Kind::NcclLog, Kind::AppLog]) {
        true => Verdict::pass("no registration of dma-buf is refused"),
        false => Verdict::skip(&["log of the failing program"]),
    }
}

fn dmabuf_failures(context: &Context<'_>, wanted: i32) -> Vec<String> {
    let failures = context.events(|event| match event {
        Event::VerbsFailed { call, errno, .. }
            if call == "ibv_reg_dmabuf_mr" && *errno == wanted =>
        {
            Some(())
        }
        Event::PerftestMrFailed { errno } if *errno == wanted => Some(()),
        _ => None,
    });
    failures.into_iter().map(|(_, seen)| context.cite_seen(seen)).collect()
}

/// The kernel's RDMA core has no dma-buf command.
pub(super) fn dmabuf_kernel(context: &Context<'_>) -> Verdict {
    let refused = dmabuf_failures(context, 93);
    if refused.is_empty() {
        return dmabuf_quiet(context);
    }
    let exported = context
        .machine
        .gpus
        .iter()
        .any(|gpu| gpu.attributes.get("DMA_BUF_SUPPORTED").is_some_and(|fact| fact.value != 0));
    let half = if exported { "; that the GPU exports dma-buf is only half of it" } else { "" };
    let message = alloc::format!(
        "the kernel's RDMA core has no command to register dma-buf (error 93){half}"
    );
    let mut finding = Finding::error(message).seen(refused);
    match context.kernel() {
        Some(version) if version < (5, 12) => {
            let text = alloc::format!("kernel {}.{} is older than 5.12", version.0, version.1);
            finding = finding.maybe([text]);
        }
        Some(_) => {
            finding = finding
                .maybe(["an out-of-tree OFED core older than the kernel's own is loaded"])
                .ask(["which ib_core is loaded: modinfo -n ib_core"]);
        }
        None => {
            finding = finding
                .maybe(["kernel older than 5.12", "an older out-of-tree OFED core is loaded"])
                .ask(["uname -r", "which ib_core is loaded: modinfo -n ib_core"]);
        }
    }
    finding
        .fix([
            "run Linux 5.12 or newer, or an OFED that matches the kernel",
            "then a recent rdma-core inside the container",
        ])
        .into()
}

/// Registration of GPU memory failed: because the product line has none, or for another cause.
pub(super) fn gpu_registration(context: &Context<'_>) -> Verdict {
    let failures = context.events(|event| match event {
        Event::PerftestMrFailed { errno: 0 } => Some((0, false)),
        Event::PerftestMrFailed { errno: 14 } => Some((14, true)),
        Event::VerbsFailed { call, errno: 14, .. } if call.starts_with("ibv_reg_mr") => {
            Some((14, true))
        }
        Event::GdrPinFailed { code: 22, .. } => Some((22, true)),
        _ => None,
    });
    let gpu_buffer = context.seen(&Event::GpuBuffer).is_some();
    let failures: Vec<_> =
        failures.into_iter().filter(|((_, gpu), _)| *gpu || gpu_buffer).collect();
    if failures.is_empty() {
        return match context.machine.has(&[Kind::NcclLog, Kind::AppLog]) {
            true => Verdict::pass("no registration of GPU memory fails with a refusal"),
            false => Verdict::skip(&["log of the failing program"]),
        };
    }
    let evidence: Vec<String> = failures.iter().map(|(_, seen)| context.cite_seen(seen)).collect();
    if let Some((label, origin)) = context.consumer_gpu() {
        return Finding::error(alloc::format!(
            "{label} offers no GPUDirect RDMA: its memory cannot be pinned for a NIC or gdrcopy"
        ))
        .on([label])
        .seen(evidence)
        .seen(origin.map(|origin| context.cite(origin)))
        .fix(["use a data-centre or professional GPU; reinstalling drivers or OFED does not help"])
        .into();
    }
    if misused_mapping(context).is_some() {
        return Verdict::pass("explained by the pointer that was registered");
    }
    let mut finding = Finding::unknown(Severity::Error, "GPU memory cannot be registered")
        .seen(evidence)
        .maybe([
            "no peer memory module is loaded, and dma-buf is not used",
            "memory of cuMemCreate without gpuDirectRDMACapable",
            "an address or length that is not a multiple of 64 KiB",
        ]);
    if !context.gpu_named() {
        finding =
            finding.maybe(["a GeForce GPU, which has no GPUDirect RDMA"]).ask(["nvidia-smi -q"]);
    }
    if context.peermem_loaded().is_none() {
        finding = finding.ask(["lsmod"]);
    }
    finding.into()
}

/// A BAR1 window that bounds registration.
pub(super) fn bar1_small(context: &Context<'_>) -> Verdict {
    let known: Vec<_> =
        context.machine.gpus.iter().filter(|gpu| gpu.bar1_bytes.is_some()).collect();
    if known.is_empty() {
        return Verdict::skip(&["nvidia-smi -q (BAR1 Memory Usage)"]);
    }
    let findings: Vec<Finding> = known
        .into_iter()
        .filter(|gpu| gpu.name.known().is_none_or(|name| !is_consumer(name)))
        .filter_map(|gpu| {
            let total = gpu.bar1_bytes.as_ref().filter(|fact| fact.value <= 256 << 20)?;
            let used = gpu.bar1_used.known().copied();
            let left = total.value.saturating_sub(used.unwrap_or(0)) & !0xffff;
            let estimate = match used {
                Some(used) => alloc::format!(
                    "{} MiB are used, so at most {} MiB ({left} bytes) can be registered now, and \
                     another part is reserved",
                    used >> 20,
                    left >> 20
                ),
                None => "a part of it is reserved, so less than that can be registered".to_string(),
            };
            let message = alloc::format!(
                "{}: BAR1 is {} MiB and is the budget for registered GPU memory; {estimate}",
                gpu.label(),
                total.value >> 20
            );
            let safe = (left.saturating_mul(3) / 4) & !0xffff;
            let finding = Finding::warning(message)
                .on([gpu.label()])
                .seen([context.cite(total.origin)])
                .fix([
                    alloc::format!(
                        "register at most {} MiB at once, in smaller windows",
                        safe >> 20
                    ),
                    "or a GPU and firmware with a large BAR1 (resizable BAR, above 4G decoding)"
                        .to_string(),
                ]);
            Some(finding)
        })
        .collect();
    Verdict::or(findings, || Verdict::pass("BAR1 is larger than 256 MiB"))
}

/// A registered address that is a CPU mapping of GPU memory.
fn misused_mapping(context: &Context<'_>) -> Option<(u64, String)> {
    let refused = context.events(|event| match event {
        Event::VerbsFailed { call, errno: 14, address, .. } if call.starts_with("ibv_reg_mr") => {
            Some(*address)
        }
        _ => None,
    });
    refused.into_iter().find_map(|(address, seen)| {
        let mut mappings = context.machine.platform.mappings.iter();
        let inside = mappings.find(|fact| {
            fact.value.path == "/dev/gdrdrv"
                && (fact.value.start..fact.value.end).contains(&address)
        })?;
        let cites = alloc::format!("{}, {}", context.cite_seen(seen), context.cite(inside.origin));
        Some((address, cites))
    })
}

/// A program registers the wrong kind of pointer.
pub(super) fn api_misuse(context: &Context<'_>) -> Verdict {
    let Some((address, cites)) = misused_mapping(context) else {
        let refused = context.event(|event| match event {
            Event::VerbsFailed { call, errno: 14, .. } if call.starts_with("ibv_reg_mr") => {
                Some(())
            }
            _ => None,
        });
        return match (refused.is_some(), context.machine.has(&[Kind::Maps])) {
            (true, false) => Verdict::skip(&["/proc/PID/maps of the failing process"]),
            (_, true) => Verdict::pass("no refused address is a mapping of gdrdrv"),
            (false, false) => Verdict::skip(&["log of the failing program", "/proc/PID/maps"]),
        };
    };
    Finding::error(alloc::format!(
        "address {address:#x} is the CPU's mapping of GPU memory (gdr_map): such a mapping has no pages \
         that a NIC driver could pin; the environment is not at fault"
    ))
    .seen([cites])
    .fix(["register the device pointer itself, or its dma-buf"])
    .into()
}

/// A test that passed without testing GPU memory.
pub(super) fn test_invalid(context: &Context<'_>) -> Verdict {
    let managed = context.event(|event| match event {
        Event::TestAllocation { call } if call == "cuMemAllocManaged" => Some(()),
        _ => None,
    });
    let passed = context.seen(&Event::TestPassed);
    let (Some((_, managed)), Some(passed)) = (managed, passed) else {
        return match context.machine.has(&[Kind::AppLog]) {
            true => Verdict::pass("no test ran over managed memory"),
            false => Verdict::skip(&["output of the test program"]),
        };
    };
    if context.is_arm() {
        return Verdict::pass("managed memory may be GPU memory on this machine");
    }
    Finding::warning(
        "the test passed over managed memory, whose pages are in host memory on x86 while the CPU or a \
         NIC touches them: this is no evidence for GPUDirect RDMA",
    )
    .seen([context.cite_seen(managed), context.cite_seen(passed)])
    .fix(["test with memory of cuMemAlloc"])
    .into()
}
