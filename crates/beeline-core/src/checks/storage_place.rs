//! Checks of where files lie: drives, arrays, file systems, the page cache.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::context::Context;
use super::storage::{modes, row, supported};
use super::{Finding, Severity, Status, Verdict};
use crate::facts::{Bdf, Event, Fact, Kind, Known};
use crate::topology::{Answer, Point};

/// Drive and GPU below different root ports.
pub(super) fn root_crossing(context: &Context<'_>) -> Verdict {
    let topology = &context.topology;
    let drives: Vec<Bdf> = context
        .machine
        .pci
        .iter()
        .filter(|(_, device)| device.class.known().is_some_and(|class| class >> 8 == 0x0108))
        .map(|(bdf, _)| *bdf)
        .take(128)
        .collect();
    if drives.is_empty() || context.machine.gpus.is_empty() {
        return Verdict::skip(&["lspci -tv with a GPU and an NVMe drive"]);
    }
    let (mut crossing, mut judged) = (Vec::new(), false);
    for gpu in topology.gpus() {
        let paths: Vec<_> =
            drives.iter().map(|d| (d, topology.path(gpu, Point::Pci(*d)))).collect();
        // A GPU with one drive near it is served, and one whose distance is open may be.
        let beyond = |answer: &Answer| match answer {
            Answer::Known(distance) => !distance.below_host_bridge(),
            Answer::Unknown { candidates, .. } => candidates.iter().all(|d| !d.below_host_bridge()),
        };
        let crosses =
            |path: &crate::topology::Path| path.common.is_none() && beyond(&path.distance);
        judged |= paths.iter().any(|(_, path)| path.common.is_some() || crosses(path));
        if !paths.iter().all(|(_, path)| crosses(path)) {
            continue;
        }
        for (drive, path) in paths.iter().take(32usize.saturating_sub(crossing.len())) {
            let text = match &path.distance {
                Answer::Known(distance) => distance.to_string(),
                Answer::Unknown { candidates, .. } => {
                    candidates.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
                }
            };
            crossing.push(alloc::format!("{} - {drive}: {text}", topology.label(gpu)));
        }
    }
    if !judged {
        return Verdict::skip(&["lspci -tv: the tree between GPU and drive"]);
    }
    if crossing.is_empty() {
        return Verdict::pass("every GPU has a drive below its switch, or may have");
    }
    let used = context.machine.platform.gds.is_some() || context.machine.has(&[Kind::CufileLog]);
    let severity = if used { Severity::Warning } else { Severity::Info };
    let status = if used { Status::Fail } else { Status::Pass };
    Finding::new(
        status,
        severity,
        "GPU and drive hang off different root ports: direct transfers cross the root complex, which \
         needs the IOMMU off or pt and is slower than below one switch",
    )
    .on(crossing)
    .fix(["move the drive below the GPU's switch where there is one", "boot with iommu=pt"])
    .into()
}

/// A machine without an NVMe drive.
pub(super) fn no_nvme(context: &Context<'_>) -> Verdict {
    if !context.machine.has(&[Kind::Lspci, Kind::Live]) {
        return Verdict::skip(&["lspci -nn, complete"]);
    }
    let is_drive = |device: &crate::facts::PciDevice| {
        device.class.known().is_some_and(|class| class >> 8 == 0x0108)
    };
    if context.machine.pci.values().any(is_drive) {
        return Verdict::pass("there is an NVMe drive");
    }
    if context.machine.gpus.is_empty() {
        return Verdict::pass("no GPU to store for");
    }
    // A listing that someone filtered shows no host bridge and few functions.
    let bridges = context.machine.pci.values().filter_map(|device| device.class.known());
    let whole =
        bridges.into_iter().any(|class| class >> 8 == 0x0600) && context.machine.pci.len() >= 10;
    if !whole && !context.live() {
        return Verdict::skip(&["lspci -nn, complete"]);
    }
    let listing = context.machine.sources.iter().find(|source| source.kind == Kind::Lspci);
    let origin = listing.map(|source| source.name.clone());
    Finding::info(
        "no NVMe drive: the direct path to local storage is not possible, the compatibility path may be",
    )
    .seen(origin.or_else(|| context.live_source("/sys/bus/pci")))
    .into()
}

/// An array where only the kernel's peer-to-peer DMA is native.
pub(super) fn raid(context: &Context<'_>) -> Verdict {
    let arrays: Vec<(&String, &Fact<String>)> = context
        .machine
        .platform
        .blocks
        .iter()
        .filter_map(|(name, block)| Some((name, block.raid.as_ref()?)))
        .collect();
    if arrays.is_empty() {
        return match context.machine.platform.blocks.is_empty() {
            true => Verdict::skip(&["/proc/mdstat or lsblk"]),
            false => Verdict::pass("no array"),
        };
    }
    let Some(gds) = context.machine.platform.gds.as_ref() else {
        return Verdict::skip(&["gdscheck -p"]);
    };
    let nvme = row(context, "NVMe");
    let mode = |name: &str| nvme.is_some_and(|fact| modes(fact).any(|mode| mode.contains(name)));
    let p2pdma = supported(row(context, "NVMe P2PDMA")) || mode("p2pdma");
    let nvfs = mode("nvfs") || (mode("Supported") && gds.nvfs.is_some());
    if nvfs {
        return Verdict::pass(
            "nvidia-fs serves NVMe and supports arrays of level 0; an array is not required",
        );
    }
    if !p2pdma {
        return Verdict::pass("no direct path at all; the array is not the reason");
    }
    let names: Vec<String> =
        arrays.iter().map(|(name, level)| alloc::format!("{name} ({})", level.value)).collect();
    Finding::error(
        "the only direct path is the kernel's peer-to-peer DMA, which does not go through an array",
    )
    .on(names)
    .seen(arrays.iter().map(|(_, level)| context.cite(level.origin)))
    .fix([
        "load nvidia-fs with the patched nvme driver, which supports RAID 0",
        "or use a single drive",
    ])
    .into()
}

/// A file system without a block device, or one that has no direct path.
pub(super) fn file_system(context: &Context<'_>) -> Verdict {
    let lost = context.events(|event| match event {
        Event::NoUdevDevice { major, minor } => Some((*major, *minor)),
        _ => None,
    });
    if let Some(((major, minor), seen)) = lost.first() {
        let mounts = context.machine.platform.mounts.iter();
        let mount = mounts.clone().find(|fact| fact.value.dev == Some((*major, *minor)));
        let subject = alloc::format!("device {major}:{minor}");
        if *major != 0 {
            return Finding::unknown(
                Severity::Error,
                alloc::format!("{subject} is not known to udev"),
            )
            .seen([context.cite_seen(seen)])
            .maybe(["/run/udev is not mounted into the container"])
            .into();
        }
        let what = match mount {
            Some(fact) => alloc::format!("{} on {}", fact.value.fs, fact.value.point),
            None => "the log does not name the file system".to_string(),
        };
        let mut finding = Finding::error(alloc::format!(
            "{subject} has major number 0: an anonymous device, with no block device behind the mount \
             ({what})"
        ))
        .on([subject])
        .seen([context.cite_seen(seen)])
        .seen(mount.map(|fact| context.cite(fact.origin)))
        .fix(["mount an ext4 or xfs volume of a local drive and put the files there"]);
        if mount.is_none() {
            finding = finding
                .maybe(["overlay", "tmpfs", "a network file system", "btrfs"])
                .ask(["/proc/self/mountinfo of the process, or findmnt -T on the file"]);
        }
        return finding.into();
    }
    let used = context.machine.platform.gds.is_some() || context.machine.has(&[Kind::CufileLog]);
    let zfs: Vec<String> = context
        .machine
        .platform
        .mounts
        .iter()
        .filter(|fact| fact.value.fs == "zfs" && used)
        .map(|fact| alloc::format!("{} ({})", fact.value.point, fact.value.fs))
        .collect();
    if !zfs.is_empty() {
        return Finding::error("ZFS has no direct path for GPU memory, in any version")
            .on(zfs)
            .fix(["use the buffered or compatibility route there, or an xfs or ext4 volume"])
            .into();
    }
    match context.machine.has(&[Kind::CufileLog, Kind::Mounts]) {
        true => Verdict::pass("no file system without a direct path is in use"),
        false => Verdict::skip(&["cufile.log", "/proc/mounts"]),
    }
}

/// Cached files are faster through the page cache.
pub(super) fn may_be_slower(context: &Context<'_>) -> Verdict {
    let files = &context.machine.platform.files;
    if files.is_empty() {
        return Verdict::skip(&["fincore of the files"]);
    }
    let warm: Vec<String> = files
        .iter()
        .filter(|fact| fact.value.bytes > 0 && fact.value.resident >= fact.value.bytes / 10 * 9)
        .map(|fact| fact.value.path.clone())
        .collect();
    if warm.is_empty() {
        return Verdict::pass("the files are not in the page cache");
    }
    Finding::info(
        "these files are in the page cache: direct storage skips the cache and can be slower than reading \
         through it",
    )
    .on(warm)
    .seen(files.first().map(|fact| context.cite(fact.origin)))
    .fix(["read cached files through the page cache"])
    .into()
}
