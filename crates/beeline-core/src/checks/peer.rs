//! Checks of peer-to-peer access between GPUs.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::context::{Context, Iommu};
use super::{Finding, Severity, Verdict};
use crate::facts::{Acs, Bdf, Distance, Event, Kind, Known, Origin, P2pStatus};
use crate::topology::Point;

/// Ports between two GPUs that send peer traffic up to the root complex.
pub(super) fn acs_redirect(context: &Context<'_>) -> Verdict {
    let topology = &context.topology;
    let (mut pairs, mut staged, mut hidden): (Vec<String>, Vec<String>, bool) = Default::default();
    let mut bridges: Vec<(Bdf, Acs)> = Vec::new();
    let mut judged = 0u32;
    for (a, b) in topology.gpu_pairs().filter(|(a, b)| !context.linked(*a, *b)) {
        let distance = topology.distance(Point::Gpu(a), Point::Gpu(b)).known();
        if distance.is_some_and(|distance| distance >= Distance::Node) {
            staged.push(context.pair(a, b));
            continue;
        }
        let path = topology.path(Point::Gpu(a), Point::Gpu(b));
        if path.bridges.is_empty() && path.common.is_none() {
            continue;
        }
        judged += 1;
        hidden |= path.bridges.iter().any(|bdf| {
            let device = context.machine.pci.get(bdf);
            device.is_some_and(|device| device.hidden.known() == Some(&true))
        });
        let redirecting = topology.redirecting(&path);
        if !redirecting.is_empty() {
            pairs.push(context.pair(a, b));
            bridges.extend(redirecting);
        }
    }
    bridges.sort_unstable();
    bridges.dedup();
    if !pairs.is_empty() {
        return redirect_findings(context, pairs, staged, &bridges);
    }
    let gpus = context.machine.gpus.len();
    if hidden {
        let finding = Finding::unknown(Severity::Warning, "the ACS bits of the ports are hidden")
            .ask(["lspci -vvv, run as root"]);
        return finding.into();
    }
    if judged > 0 && topology.acs_visible() {
        return Verdict::pass("no port between two GPUs redirects peer traffic");
    }
    if gpus < 2 && context.live() {
        return Verdict::pass("fewer than two GPUs");
    }
    Verdict::skip(&["lspci -vvv, run as root, of a machine with two or more GPUs"])
}

fn redirect_findings(
    context: &Context<'_>,
    pairs: Vec<String>,
    staged: Vec<String>,
    bridges: &[(Bdf, Acs)],
) -> Verdict {
    let list: Vec<String> =
        bridges.iter().map(|(bdf, acs)| alloc::format!("{bdf} {acs}")).collect();
    let message = alloc::format!(
        "peer traffic of these pairs is sent up to the root complex by {}",
        list.join("; ")
    );
    let evidence = bridges.iter().filter_map(|(bdf, _)| {
        let fact = context.machine.pci.get(bdf)?.acs.as_ref()?;
        Some(context.cite(fact.origin))
    });
    let finding = Finding::error(message)
        .on(pairs)
        .seen(evidence)
        .fix(acs_remedies(context, bridges))
        .caution(acs_cautions(context));
    let mut findings = alloc::vec![finding];
    if !staged.is_empty() {
        let message =
            "these pairs are too far apart for peer access and are staged through the host";
        findings.push(Finding::info(message).on(staged));
    }
    Verdict::Found(findings)
}

/// Remedies that name the exact ports.
pub(super) fn acs_remedies(context: &Context<'_>, bridges: &[(Bdf, Acs)]) -> Vec<String> {
    if let Some(hypervisor) = context.hypervisor() {
        return alloc::vec![alloc::format!(
            "this is a guest ({hypervisor}): ACS belongs to the host; ask for GPUs whose switch allows \
             translated peer requests (ATS with DirectTrans) or use NCCL_P2P_DISABLE=1"
        )];
    }
    let commands = bridges.iter().map(|(bdf, _)| alloc::format!("setpci -s {bdf} ECAP_ACS+6.w=0"));
    let addresses: Vec<String> = bridges.iter().map(|(bdf, _)| bdf.to_string()).collect();
    let mut remedies: Vec<String> = commands.collect();
    remedies.push(alloc::format!(
        "to keep it over a reboot: kernel parameter pci=disable_acs_redir={}, or switch ACS off in the \
         firmware (a cold boot may be needed); pci=noacs is no option of the mainline kernel",
        addresses.join(";")
    ));
    remedies.push("or IOMMU off or pt: data is right then, but the detour stays".to_string());
    remedies.push("until then: NCCL_P2P_DISABLE=1".to_string());
    remedies
}

/// Where clearing ACS does harm.
pub(super) fn acs_cautions(context: &Context<'_>) -> Vec<String> {
    let mut cautions = alloc::vec![
        "never on a host that assigns devices to guests: ACS is what isolates them".to_string()
    ];
    if context.assigns_devices() {
        cautions.push("this host has vfio-pci: it probably assigns devices to guests".to_string());
    }
    if context.is_arm() {
        cautions.push(
            "on Arm with an SMMU and ATS the rule inverts: keep ACS on, with DirectTrans, and keep the \
             SMMU on"
                .to_string(),
        );
    }
    cautions
}

/// Ports between a GPU and a NIC that send peer traffic up to the root complex.
pub(super) fn rdma_acs_redirect(context: &Context<'_>) -> Verdict {
    let topology = &context.topology;
    let (mut pairs, mut bridges, mut judged) = (Vec::new(), Vec::new(), false);
    for gpu in topology.gpus() {
        for nic in topology.nics() {
            let Point::Nic(name) = nic else { continue };
            let record = context.machine.nics.get(name);
            if record.is_some_and(|nic| nic.rdma.known() == Some(&false)) {
                continue;
            }
            let path = topology.path(gpu, nic);
            // Beyond the host bridge the traffic goes up in any case.
            if path.common.is_none() {
                continue;
            }
            judged = true;
            let redirecting = topology.redirecting(&path);
            if !redirecting.is_empty() && pairs.len() < 64 {
                pairs.push(alloc::format!("{} - {name}", topology.label(gpu)));
                bridges.extend(redirecting);
            }
        }
    }
    bridges.sort_unstable();
    bridges.dedup();
    if pairs.is_empty() {
        return match judged && topology.acs_visible() {
            true => Verdict::pass("no port between a GPU and a NIC redirects peer traffic"),
            false => {
                Verdict::skip(&["lspci -vvv, run as root, with a GPU and a NIC below one switch"])
            }
        };
    }
    let list: Vec<String> =
        bridges.iter().map(|(bdf, acs)| alloc::format!("{bdf} {acs}")).collect();
    let evidence = bridges.iter().filter_map(|(bdf, _)| {
        let fact = context.machine.pci.get(bdf)?.acs.as_ref()?;
        Some(context.cite(fact.origin))
    });
    Finding::warning(alloc::format!(
        "GPUDirect RDMA between these is sent up to the root complex by {}: slow, and with an IOMMU that \
         translates it fails (completion status 4)",
        list.join("; ")
    ))
    .on(pairs)
    .seen(evidence)
    .fix(acs_remedies(context, &bridges))
    .caution(acs_cautions(context))
    .into()
}

/// Peer writes under an IOMMU that translates.
pub(super) fn iommu_translated(context: &Context<'_>) -> Verdict {
    let (sure, why) = match &context.iommu {
        Iommu::Off(why) | Iommu::Identity(why) => {
            return Verdict::Pass(alloc::format!("addresses are not translated: {why}"));
        }
        Iommu::Unknown => {
            return Verdict::skip(&["/proc/cmdline, or the boot log's \"Default domain type\""]);
        }
        Iommu::Translated(why) => (true, why),
        Iommu::LikelyTranslated(why) => (false, why),
    };
    if context.machine.gpus.len() < 2 {
        return Verdict::skip(&["nvidia-smi topo -m of a machine with two or more GPUs"]);
    }
    let pairs: Vec<String> = context
        .topology
        .gpu_pairs()
        .filter(|(a, b)| !context.linked(*a, *b))
        .filter(|(a, b)| match context.peer_status(*a, *b) {
            Some(status) => status == P2pStatus::Ok,
            // Without the driver's word: every pair that is not staged anyway.
            None => {
                let distance = context.topology.distance(Point::Gpu(*a), Point::Gpu(*b)).known();
                distance.is_none_or(|distance| distance < Distance::Node)
            }
        })
        .map(|(a, b)| context.pair(a, b))
        .collect();
    if pairs.is_empty() {
        return Verdict::pass("no pair of GPUs uses peer access over PCI");
    }
    let evidence = [
        context.machine.platform.cmdline.as_ref().map(|fact| fact.origin),
        context.machine.platform.iommu_translated.as_ref().map(|fact| fact.origin),
    ];
    let evidence: Vec<String> = evidence.into_iter().flatten().map(|o| context.cite(o)).collect();
    let group_type = "/sys/kernel/iommu_groups/*/type of a GPU (DMA or DMA-FQ against identity)";
    let remaps = context.machine.platform.params.get("DmaRemapPeerMmio");
    let finding = if !sure {
        Finding::unknown(Severity::Error, alloc::format!("translation is likely: {why}"))
            .maybe(["the IOMMU translates peer writes, which then hang or vanish"])
            .ask([group_type, "the boot log's \"Default domain type\""])
    } else if remaps.is_some_and(|fact| fact.value == "1") && context.driver_major() >= Some(570) {
        let message = alloc::format!(
            "the IOMMU translates ({why}), and this driver maps peer windows through it \
             (DmaRemapPeerMmio=1): only a probe decides"
        );
        Finding::unknown(Severity::Warning, message).ask(["a probe of each pair"])
    } else {
        Finding::error(alloc::format!("the IOMMU translates peer writes of these pairs: {why}"))
    };
    finding
        .on(pairs)
        .seen(evidence)
        .fix(iommu_remedies(context))
        .caution(iommu_cautions(context))
        .into()
}

fn iommu_remedies(context: &Context<'_>) -> Vec<String> {
    if context.is_arm() {
        return alloc::vec!["boot with iommu.passthrough=1".to_string()];
    }
    let off = match context.machine.platform.cpu_vendor.known().map(String::as_str) {
        Some("AuthenticAMD") => "amd_iommu=off",
        Some("GenuineIntel") => "intel_iommu=off",
        _ => "intel_iommu=off or amd_iommu=off",
    };
    alloc::vec![
        "boot with iommu=pt".to_string(),
        alloc::format!(
            "if that is not enough: {off}, or switch VT-d or AMD-Vi off in the firmware"
        ),
        "until the reboot: NCCL_P2P_DISABLE=1".to_string(),
    ]
}

fn iommu_cautions(context: &Context<'_>) -> Vec<String> {
    let mut cautions = Vec::new();
    if let Some(hypervisor) = context.hypervisor() {
        cautions.push(alloc::format!(
            "this is a guest ({hypervisor}): the host's IOMMU must stay on, it is what assigns the GPUs"
        ));
    }
    if context.assigns_devices() {
        cautions
            .push("this host has vfio-pci: guests need the IOMMU, use pt and not off".to_string());
    }
    if context.is_arm() {
        cautions
            .push("on Arm do not switch the SMMU off: devices reach memory through it".to_string());
    }
    cautions
}

/// The IOMMU refused an access of a GPU: what it wrote is lost.
pub(super) fn iommu_fault(context: &Context<'_>) -> Verdict {
    let faults = context.events(|event| match event {
        Event::IommuFault { bdf, driver, write } => Some((*bdf, driver.as_str(), *write)),
        _ => None,
    });
    if faults.is_empty() {
        return match context.machine.has(&[Kind::KernelLog]) {
            true => Verdict::pass("the kernel log has no IOMMU fault"),
            false => Verdict::skip(&["dmesg"]),
        };
    }
    let (mut of_gpu, mut writes, mut count, mut evidence) = (Vec::new(), false, 0u64, Vec::new());
    let mut findings = Vec::new();
    for ((bdf, driver, write), seen) in faults {
        let gpu =
            driver.starts_with("nvidia") || driver == "amdgpu" || context.gpu_at(bdf).is_some();
        let known = gpu || !driver.is_empty() || context.machine.pci.contains_key(&bdf);
        if gpu {
            of_gpu.push(bdf.to_string());
            writes |= write != Some(false);
            count = count.saturating_add(seen.count);
            evidence.push(context.cite_seen(seen));
        } else if known {
            let message = alloc::format!("{} IOMMU faults of {bdf}, which is no GPU", seen.count);
            findings
                .push(Finding::info(message).on([bdf.to_string()]).seen([context.cite_seen(seen)]));
        } else {
            let message = alloc::format!("{} IOMMU faults of {bdf}", seen.count);
            let finding = Finding::unknown(Severity::Error, message)
                .on([bdf.to_string()])
                .seen([context.cite_seen(seen)])
                .maybe(["a GPU, whose data is lost then", "another device"])
                .ask(["lspci -nn"]);
            findings.push(finding);
        }
    }
    of_gpu.dedup();
    if !of_gpu.is_empty() {
        let severity = if writes { Severity::Critical } else { Severity::Error };
        let lost = if writes { "what it wrote is lost" } else { "what it read is not the data" };
        let message = alloc::format!("{count} IOMMU faults of a GPU: {lost}");
        let mut finding =
            Finding::new(super::Status::Fail, severity, message).on(of_gpu).seen(evidence);
        finding = finding.fix(["stop using results made so far"]).fix(iommu_remedies(context));
        findings.insert(0, finding.caution(iommu_cautions(context)));
    }
    Verdict::Found(findings)
}

/// The driver offers no peer access.
pub(super) fn not_capable(context: &Context<'_>) -> Verdict {
    if context.machine.p2p.is_empty() {
        return Verdict::skip(&["nvidia-smi topo -p2p r"]);
    }
    let any_ok = context.machine.p2p.iter().any(|fact| fact.value.status == P2pStatus::Ok);
    let origin: Option<Origin> = context.machine.p2p.first().map(|fact| fact.origin);
    let evidence: Vec<String> = origin.map(|origin| context.cite(origin)).into_iter().collect();
    let mut by_status: Vec<(P2pStatus, Vec<String>)> = Vec::new();
    for (a, b) in context.topology.gpu_pairs() {
        let Some(status) = context.peer_status(a, b).filter(|status| *status != P2pStatus::Ok)
        else {
            continue;
        };
        match by_status.iter_mut().find(|(known, _)| *known == status) {
            Some((_, pairs)) => pairs.push(context.pair(a, b)),
            None => by_status.push((status, alloc::vec![context.pair(a, b)])),
        }
    }
    let findings = by_status.into_iter().map(|(status, pairs)| {
        let branch = context.machine.platform.driver.known();
        let branch = branch.map_or(String::new(), |version| alloc::format!(", driver {version}"));
        let words = status.words();
        let finding = match status {
            P2pStatus::Unknown => {
                Finding::unknown(Severity::Warning, "the driver does not know").ask(["a probe"])
            }
            _ if any_ok => Finding::info(alloc::format!(
                "not capable of peer access ({words}); other pairs of this machine are"
            )),
            _ => Finding::warning(alloc::format!(
                "the driver reports peer access as {words} for this product and branch{branch}; this \
                 does not say that the hardware cannot"
            ))
            .maybe(["the driver branch withholds it", "the product line has none", "the chipset is not on the list"])
            .fix([
                "try another driver branch",
                "an NVLink bridge, where the board takes one",
                "or accept staging through the host",
            ]),
        };
        finding.on(pairs).seen(evidence.clone())
    });
    let findings: Vec<Finding> = findings.collect();
    Verdict::or(findings, || Verdict::pass("the driver offers peer access for every pair"))
}

/// NVLink joins some pairs only.
pub(super) fn nvlink_partial(context: &Context<'_>) -> Verdict {
    let pairs: Vec<(usize, usize)> = context.topology.gpu_pairs().collect();
    if pairs.is_empty() {
        return Verdict::skip(&["nvidia-smi topo -m, or an NCCL topology file"]);
    }
    let joined: Vec<String> = pairs
        .iter()
        .filter(|(a, b)| context.linked(*a, *b))
        .map(|(a, b)| context.pair(*a, *b))
        .collect();
    if joined.len() == pairs.len() {
        return Verdict::pass("every pair of GPUs is joined by NVLink; fully connected: yes");
    }
    let told = !context.machine.matrix.is_empty()
        || context.machine.has(&[Kind::NcclTopo, Kind::RcclTopo])
        || context.machine.gpus.iter().any(|gpu| !gpu.links.is_empty());
    if joined.is_empty() && !told {
        return Verdict::skip(&["nvidia-smi topo -m, or a topology file"]);
    }
    if joined.is_empty() {
        return Verdict::pass("no pair of GPUs is joined by NVLink");
    }
    let message = alloc::format!(
        "{} of {} pairs are joined by NVLink; fully connected: no",
        joined.len(),
        pairs.len()
    );
    let origin = context.machine.matrix.first().map(|fact| context.cite(fact.origin));
    Finding::info(message).on(joined).seen(origin).into()
}

/// Staging through the host is slower with one NUMA node per EPYC socket.
pub(super) fn staging_nps(context: &Context<'_>) -> Verdict {
    let platform = &context.machine.platform;
    if platform.cpu_vendor.known().is_some_and(|vendor| vendor != "AuthenticAMD") {
        return Verdict::pass("not an AMD host");
    }
    let nodes = platform.numa.keys().filter(|node| **node >= 0).count();
    let sockets = platform.sockets.as_ref();
    let (Some(sockets), true) = (sockets, nodes > 0 && platform.cpu_vendor.is_some()) else {
        return Verdict::skip(&["lscpu"]);
    };
    let per_socket = nodes / usize::try_from(sockets.value.max(1)).unwrap_or(1);
    let staged = context.event(|event| match event {
        Event::Channel { transport, .. } if transport.starts_with("SHM") => Some(()),
        _ => None,
    });
    let refused = matches!(context.iommu, Iommu::Translated(_) | Iommu::LikelyTranslated(_));
    let unlinked = context.topology.gpu_pairs().any(|(a, b)| !context.linked(a, b));
    let many = context.machine.gpus.len() >= 4;
    if per_socket != 1 || !many || !unlinked || !(staged.is_some() || refused) {
        return Verdict::pass("GPUs are not staged through one big NUMA node");
    }
    let evidence: Vec<String> = [Some(sockets.origin), staged.map(|(_, seen)| seen.first)]
        .into_iter()
        .flatten()
        .map(|origin| context.cite(origin))
        .collect();
    Finding::warning(
        "data between GPUs is staged through the host, and each socket is one NUMA node: a small loss \
         of bandwidth (about 1 GB/s was seen), not the cause of a hang",
    )
    .seen(evidence)
    .fix(["set NPS4 in the firmware; judge by the largest sizes of a sweep, not by its average"])
    .into()
}
