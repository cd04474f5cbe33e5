//! Checks of direct storage: nvidia-fs, drivers, file systems, what cuFile did.

use alloc::string::{String, ToString};

use super::context::Context;
use super::{Finding, Severity, Verdict};
use crate::facts::{Event, Fact, Kind};
use alloc::vec::Vec;

pub(super) fn row<'m>(context: &Context<'m>, name: &str) -> Option<&'m Fact<String>> {
    context.machine.platform.gds.as_ref()?.rows.get(name)
}

/// Modes of a row: `Supported` alone in older releases, a list such as `nvfs, compat` in newer ones.
pub(super) fn modes(fact: &Fact<String>) -> impl Iterator<Item = &str> {
    fact.value.split(',').map(str::trim)
}

/// Whether a row has a direct path of any kind.
pub(super) fn supported(fact: Option<&Fact<String>>) -> bool {
    let indirect = ["Unsupported", "compat", "Disabled", ""];
    fact.is_some_and(|fact| modes(fact).any(|mode| !indirect.contains(&mode)))
}

fn property<'m>(context: &Context<'m>, name: &str) -> Option<&'m Fact<String>> {
    context.machine.platform.gds.as_ref()?.properties.get(name)
}

/// The NVMe driver is not the one that knows nvidia-fs.
pub(super) fn nvme_patched(context: &Context<'_>) -> Verdict {
    let registered = context.seen(&Event::NvmeNotRegistered);
    let nvme = row(context, "NVMe");
    let gds = context.machine.platform.gds.as_ref();
    let loaded = gds.is_some_and(|gds| gds.nvfs.is_some());
    let unsupported = nvme.filter(|fact| !supported(Some(*fact)) && loaded);
    let asked = context.setting("ENABLE_NFSRDMA").filter(|fact| fact.value.value == "true");
    let symbols = &context.machine.platform.symbols;
    let unpatched = symbols.nvme.as_ref().zip(symbols.nvme_nvfs.as_ref());
    let unpatched = unpatched.filter(|(_, patched)| patched.value == 0).map(|(all, _)| all);
    let patched = symbols.nvme_nvfs.as_ref().is_some_and(|fact| fact.value > 0);

    let wanted = registered.is_some() || unsupported.is_some() || asked.is_some();
    if !wanted {
        return match gds.is_some() || context.machine.has(&[Kind::CufileLog]) {
            true => Verdict::pass("nothing says that NVMe is not registered with nvidia-fs"),
            false => Verdict::skip(&["cufile.log or gdscheck", "/proc/kallsyms"]),
        };
    }
    let mut evidence: Vec<String> = Vec::new();
    evidence.extend(registered.map(|seen| context.cite_seen(seen)));
    evidence.extend(unsupported.map(|fact| context.cite(fact.origin)));
    evidence.extend(unpatched.map(|fact| context.cite(fact.origin)));
    evidence.extend(asked.map(|fact| context.cite(fact.origin)));
    let remedies = [
        "look which nvme module is loaded first: the initramfs may hold the old one (modinfo -n nvme, \
         lsinitrd or lsinitramfs)",
        "install MOFED or DOCA-OFED with its direct storage option, rebuild the initramfs (dracut or \
         update-initramfs), reload nvme",
        "or use the kernel's peer-to-peer DMA on a new kernel",
    ];
    if let Some(fact) = unpatched {
        let mut message = alloc::format!(
            "the loaded nvme driver has {} symbols and none of nvidia-fs: it is not the patched one, so \
             the direct path is closed",
            fact.value
        );
        let mut finding = Finding::error("");
        if let Some(setting) = asked {
            message.push_str("; ENABLE_NFSRDMA asks for the patched one, and it is not there");
            let version =
                context.setting("NVIDIA_NIC_DRIVER_VER").or(context.setting("OPERATOR_VERSION"));
            let release = version.map_or("25.7".to_string(), |fact| fact.value.value.clone());
            finding = finding.seen([context.cite(setting.origin)]).fix([alloc::format!(
                "network operator 25.7 does not patch nvme although it is asked to (driver {release} \
                 here): use a release that does"
            )]);
        }
        finding.message = message;
        return finding.seen(evidence).fix(remedies).into();
    }
    if asked.is_some() && registered.is_none() && unsupported.is_none() {
        return Verdict::skip(&[
            "/proc/kallsyms, to see whether the loaded nvme is the patched one",
        ]);
    }
    if patched {
        return Finding::unknown(
            Severity::Error,
            "NVMe is patched, and not registered with nvidia-fs",
        )
        .seen(evidence)
        .maybe([
            "nvidia-fs was loaded after the file system was mounted",
            "nvidia-fs and nvme disagree",
        ])
        .ask(["dmesg"])
        .into();
    }
    if let Some(fact) = unsupported {
        let finding = Finding::error(
            "nvidia-fs is loaded and NVMe is unsupported: its driver is not enabled for the direct path, \
             most likely because the loaded nvme is not the patched one",
        );
        return finding
            .seen([context.cite(fact.origin)])
            .ask(["/proc/kallsyms (nvfs symbols in the loaded nvme)"])
            .fix(remedies)
            .caution(["switching the compatibility mode off cannot enable the direct path"])
            .into();
    }
    Verdict::pass("whether the loaded nvme is the patched one is not decided by the log line alone")
}

/// The log line alone: not registered, cause unknown.
pub(super) fn nvme_registered(context: &Context<'_>) -> Verdict {
    let Some(seen) = context.seen(&Event::NvmeNotRegistered) else {
        return match context.machine.has(&[Kind::CufileLog]) {
            true => Verdict::pass("no line says that NVMe is not registered"),
            false => Verdict::skip(&["cufile.log"]),
        };
    };
    let symbols = &context.machine.platform.symbols;
    let mut finding =
        Finding::error("NVMe is not registered with nvidia-fs: the direct path is closed")
            .seen([context.cite_seen(seen)]);
    if symbols.nvme_nvfs.is_none() {
        finding = finding
            .maybe([
                "the loaded nvme driver is not the patched one (gds-nvme-not-patched)",
                "nvidia-fs is not loaded or not visible here",
            ])
            .ask(["/proc/kallsyms (nvfs symbols in the loaded nvme)"])
            .fix(["look which nvme module is loaded (initramfs) before reinstalling anything"]);
    }
    finding.into()
}

/// I/O goes through host memory, which works.
pub(super) fn compat(context: &Context<'_>) -> Verdict {
    let used = context.seen(&Event::CompatUsed).or_else(|| context.seen(&Event::CompatMode));
    if let Some(seen) = used {
        return Finding::info("the compatibility path is in use: I/O works, through host memory")
            .seen([context.cite_seen(seen)])
            .into();
    }
    let allowed = property(context, "properties.use_compat_mode");
    match allowed {
        Some(fact) if fact.value == "true" => Finding::info(
            "the compatibility path is allowed: where the direct one is closed, I/O works",
        )
        .seen([context.cite(fact.origin)])
        .into(),
        Some(_) => {
            Verdict::pass("the compatibility path is not allowed; only the direct one is used")
        }
        None => Verdict::skip(&["cufile.log or gdscheck"]),
    }
}

/// gdscheck finds no direct path at all.
pub(super) fn no_native_path(context: &Context<'_>) -> Verdict {
    let Some(gds) = context.machine.platform.gds.as_ref() else {
        return Verdict::skip(&["gdscheck -p"]);
    };
    let rows = gds.rows.iter().filter(|(name, _)| !is_rdma_row(name));
    let native: Vec<&str> = rows
        .clone()
        .filter(|(_, fact)| supported(Some(*fact)))
        .map(|(name, _)| name.as_str())
        .collect();
    if !native.is_empty() {
        let by = gds
            .nvfs
            .as_ref()
            .map_or(String::new(), |fact| alloc::format!(" (nvidia-fs {})", fact.value));
        return Verdict::Pass(alloc::format!("direct path for {}{by}", native.join(", ")));
    }
    if gds.rows.is_empty() {
        return Verdict::skip(&["the driver section of gdscheck -p"]);
    }
    let evidence: Vec<String> = rows.take(1).map(|(_, fact)| context.cite(fact.origin)).collect();
    let mut finding = Finding::error("no file system or driver has a direct path").seen(evidence);
    if gds.nvfs.is_none() {
        finding = finding
            .maybe(["nvidia-fs is not loaded", "nvidia-fs is not visible here (a container)"])
            .ask(["lsmod on the host"])
            .fix(["load nvidia-fs, and in a container pass /dev/nvidia-fs* and mount /run/udev"]);
        if let Some(minimum) = &gds.nvfs_minimum {
            finding = finding.caution([alloc::format!(
                "\"nvidia_fs minimum version: {}\" is a requirement, not a loaded module",
                minimum.value
            )]);
        }
    }
    finding.into()
}

fn is_rdma_row(name: &str) -> bool {
    name == "Userspace RDMA" || name.starts_with("rdma") || name == "Mellanox PeerDirect"
}

/// Network file systems over RDMA.
pub(super) fn rdma_storage(context: &Context<'_>) -> Verdict {
    let Some(fact) = row(context, "Userspace RDMA") else { return Verdict::skip(&["gdscheck -p"]) };
    if fact.value == "Supported" {
        return Verdict::pass("RDMA file systems have a direct path");
    }
    let detail =
        |name: &str| row(context, name).map(|fact| alloc::format!("{name}: {}", fact.value));
    let parts: Vec<String> = ["rdma library", "rdma devices", "rdma_device_status"]
        .into_iter()
        .filter_map(detail)
        .collect();
    Finding::info(alloc::format!("no direct path for RDMA file systems ({})", parts.join("; ")))
        .seen([context.cite(fact.origin)])
        .into()
}

/// nvidia-fs could not be linked.
pub(super) fn nvfs_symbols(context: &Context<'_>) -> Verdict {
    let missing = context.events(|event| match event {
        Event::UnknownSymbol { module, symbol, err } if module.contains("nvidia_fs") => {
            Some((symbol.as_str(), *err))
        }
        _ => None,
    });
    let unversioned = context.events(|event| match event {
        Event::NoSymbolVersion { module, symbol } if module.contains("nvidia_fs") => {
            Some(symbol.as_str())
        }
        _ => None,
    });
    if let Some(((_, err), _)) = missing.first() {
        let names: Vec<&str> = missing.iter().map(|((symbol, _), _)| *symbol).collect();
        let cause = if *err == -22 {
            "it was built against another driver"
        } else {
            "the GPU driver is not loaded, or nvidia-fs was built without its symbols"
        };
        let message =
            alloc::format!("nvidia-fs cannot be loaded: {} (err {err}): {cause}", names.join(", "));
        return Finding::error(message)
            .seen(missing.iter().map(|(_, seen)| context.cite_seen(seen)))
            .fix(["load the nvidia driver first", "rebuild nvidia-fs against the running driver"])
            .into();
    }
    if !unversioned.is_empty() {
        let names: Vec<&str> = unversioned.iter().map(|(symbol, _)| *symbol).collect();
        let message = alloc::format!(
            "nvidia-fs was loaded without symbol versions ({}): it works until driver and module differ",
            names.join(", ")
        );
        return Finding::warning(message)
            .seen(unversioned.iter().map(|(_, seen)| context.cite_seen(seen)))
            .fix(["rebuild nvidia-fs against the running driver, with its Module.symvers"])
            .into();
    }
    match context.machine.has(&[Kind::KernelLog]) {
        true => Verdict::pass("nvidia-fs links"),
        false => Verdict::skip(&["dmesg"]),
    }
}

/// Registered buffers exceed BAR1.
pub(super) fn bar1_exhausted(context: &Context<'_>) -> Verdict {
    let failed = context.events(|event| match event {
        Event::Bar1Exhausted { need, have } => Some((*need, *have)),
        _ => None,
    });
    let Some(((need, have), _)) = failed.first() else {
        return match context.machine.has(&[Kind::CufileLog]) {
            true => Verdict::pass("no registration exceeds BAR1"),
            false => Verdict::skip(&["cufile.log"]),
        };
    };
    let message = alloc::format!("BAR1 is exhausted: need {need} have {have} bytes");
    let mut finding = Finding::error(message)
        .seen(failed.iter().map(|(_, seen)| context.cite_seen(seen)))
        .fix(["register smaller buffers, or fewer of them, or run fewer processes per GPU"]);
    if context.seen(&Event::CufilePeermemMissing).is_some()
        || context.seen(&Event::CufileNoNicPair).is_some()
    {
        finding = finding.caution([
            "the lines about nvidia_peermem and network devices concern RDMA file systems, not local NVMe",
        ]);
    }
    finding.into()
}

/// A file could not be opened for cuFile.
pub(super) fn open_failed(context: &Context<'_>) -> Verdict {
    let failed = context.event(|event| match event {
        Event::CufileOpenFailed { compat } => Some(*compat),
        _ => None,
    });
    let Some((_, seen)) = failed else {
        return match context.machine.has(&[Kind::AppLog, Kind::CufileLog]) {
            true => Verdict::pass("no open fails"),
            false => Verdict::skip(&["log of the failing program"]),
        };
    };
    let container = context.machine.platform.container.is_some();
    let nodes = context.machine.platform.dev_nodes_listed.is_some();
    let node = context.machine.platform.dev_nodes.keys().any(|name| name.starts_with("nvidia-fs"));
    let mut finding = Finding::unknown(Severity::Error, "a file cannot be opened for cuFile")
        .seen([context.cite_seen(seen)]);
    if !(nodes && node) {
        finding = finding.maybe([
            "the device nodes of nvidia-fs are not passed into the container",
            "nvidia-fs is absent on the host",
        ]);
    }
    finding = finding.maybe(["the file lies on overlay or tmpfs, which refuse direct I/O"]);
    let place = if container { "in the container and on the host" } else { "here and on the host" };
    finding
        .ask([alloc::format!("ls /dev/nvidia-fs* {place}"), "findmnt -T on the file".to_string()])
        .into()
}

/// Peer-to-peer DMA of the kernel is off, by configuration or by the driver.
pub(super) fn p2pdma(context: &Context<'_>) -> Verdict {
    let off = context.seen(&Event::P2pDmaOffByConfig);
    let error = context.event(|event| match event {
        Event::P2pDmaNotSupported { error } => Some(*error),
        _ => None,
    });
    let mut evidence: Vec<String> = off.into_iter().map(|seen| context.cite_seen(seen)).collect();
    evidence.extend(error.map(|(_, seen)| context.cite_seen(seen)));
    match (off, error) {
        (Some(_), Some((error, _))) => Finding::info(alloc::format!(
            "the kernel's peer-to-peer DMA is off by configuration; error {error} is its consequence"
        ))
        .seen(evidence)
        .into(),
        (Some(_), None) => {
            Finding::info("the kernel's peer-to-peer DMA is off by configuration").seen(evidence).into()
        }
        (None, Some((error, _))) => Finding::info(alloc::format!(
            "the driver or kernel does not support peer-to-peer DMA (error {error})"
        ))
        .seen(evidence)
        .maybe(["kernel without CONFIG_PCI_P2PDMA", "driver without it"])
        .into(),
        (None, None) => match context.machine.has(&[Kind::CufileLog]) {
            true => Verdict::pass("the log says nothing about peer-to-peer DMA"),
            false => Verdict::skip(&["cufile.log"]),
        },
    }
}

/// Which path a transfer took.
pub(super) fn path_taken(context: &Context<'_>) -> Verdict {
    let allowed = context.events(|event| match event {
        Event::BlockDeviceSupported { device, module } => Some((device.as_str(), module.as_str())),
        _ => None,
    });
    let Some(((device, module), seen)) = allowed.first() else {
        return Verdict::skip(&["cufile.log at level TRACE"]);
    };
    let p2p_off = context.seen(&Event::P2pDmaOffByConfig).is_some();
    let compat_off = compat_off(context);
    let compat_used = context.seen(&Event::CompatUsed).is_some();
    let evidence = [context.cite_seen(seen)];
    let subject = [alloc::format!("{device} (module {module})")];
    if p2p_off && compat_off.is_some() && !compat_used {
        return Finding::info(
            "path=nvfs, plausible: peer-to-peer DMA and the compatibility path are both off, and the \
             device is accepted; the counters of nvidia-fs would verify it. The speed of one thread is \
             no evidence for the compatibility path",
        )
        .on(subject)
        .seen(evidence)
        .seen(compat_off)
        .ask(["/proc/driver/nvidia-fs/stats before and after"])
        .into();
    }
    if compat_used {
        return Finding::info("path=compat, through host memory").on(subject).seen(evidence).into();
    }
    Finding::unknown(
        Severity::Info,
        "the device is accepted, which allows the path through nvidia-fs and does not show that it was \
         taken",
    )
    .on(subject)
    .seen(evidence)
    .maybe(["nvfs", "compat"])
    .ask(["allow_compat_mode of cufile.json or CUFILE_ALLOW_COMPAT_MODE", "/proc/driver/nvidia-fs/stats"])
    .into()
}

/// Where the compatibility path is switched off.
pub(super) fn compat_off(context: &Context<'_>) -> Option<String> {
    let no = |value: &str| matches!(value, "false" | "0" | "no");
    let env = context.setting("CUFILE_ALLOW_COMPAT_MODE").filter(|fact| no(&fact.value.value));
    if let Some(fact) = env {
        return Some(context.cite(fact.origin));
    }
    let json = context.machine.platform.cufile.get("properties.allow_compat_mode");
    let json = json.filter(|fact| fact.value.first().is_some_and(|value| no(value)));
    let gds = property(context, "properties.use_compat_mode").filter(|fact| no(&fact.value));
    json.map(|fact| context.cite(fact.origin)).or_else(|| gds.map(|fact| context.cite(fact.origin)))
}
