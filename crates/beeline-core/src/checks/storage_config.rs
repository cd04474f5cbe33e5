//! Checks of cuFile's configuration and start-up.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::context::Context;
use super::storage::compat_off;
use super::{Finding, Severity, Status, Verdict};
use crate::facts::{Event, Fact, Kind};

fn values<'m>(context: &Context<'m>, path: &str) -> Option<&'m Fact<Vec<String>>> {
    context.machine.platform.cufile.get(path)
}

fn number(context: &Context<'_>, path: &str) -> Option<u64> {
    values(context, path)?.value.first()?.parse().ok()
}

fn no_config(context: &Context<'_>) -> Option<Verdict> {
    context.machine.platform.cufile.is_empty().then(|| Verdict::skip(&["cufile.json"]))
}

/// Default of the pinned limit in KiB, from the documentation of the file.
const PINNED_KIB: u64 = 33_554_432;
/// Default of the device cache in KiB.
const CACHE_KIB: u64 = 131_072;

/// The pinned limit must cover the device cache and registered buffers.
pub(super) fn pinned_too_small(context: &Context<'_>) -> Verdict {
    if let Some(verdict) = no_config(context) {
        return verdict;
    }
    let pinned = number(context, "properties.max_device_pinned_mem_size_kb").unwrap_or(PINNED_KIB);
    let cache = number(context, "properties.max_device_cache_size_kb").unwrap_or(CACHE_KIB);
    if pinned > cache {
        return Verdict::Pass(alloc::format!(
            "pinned limit {} MiB covers the cache of {} MiB and leaves {} MiB for buffers",
            pinned >> 10,
            cache >> 10,
            (pinned - cache) >> 10
        ));
    }
    let origin = values(context, "properties.max_device_pinned_mem_size_kb");
    Finding::error(alloc::format!(
        "the pinned limit ({pinned} KiB) must cover the device cache ({cache} KiB) plus registered \
         buffers: nothing is left for buffers, and registration fails"
    ))
    .seen(origin.map(|fact| context.cite(fact.origin)))
    .fix([alloc::format!(
        "raise properties.max_device_pinned_mem_size_kb above {cache} plus the buffers you register \
         (default {PINNED_KIB})"
    )])
    .into()
}

/// Host memory of the compatibility path.
pub(super) fn posix_pool(context: &Context<'_>) -> Verdict {
    if let Some(verdict) = no_config(context) {
        return verdict;
    }
    let sizes = values(context, "properties.posix_pool_slab_size_kb");
    let counts = values(context, "properties.posix_pool_slab_count");
    let (Some(sizes), Some(counts)) = (sizes, counts) else {
        return Verdict::pass("the pool of the compatibility path has its default size");
    };
    let numbers = |fact: &Fact<Vec<String>>| -> Option<Vec<u64>> {
        fact.value.iter().map(|text| text.parse().ok()).collect()
    };
    let (Some(size), Some(count)) = (numbers(sizes), numbers(counts)) else {
        return Verdict::skip(&["slab sizes and counts that are numbers"]);
    };
    let kib = size.iter().zip(&count).map(|(size, count)| size.saturating_mul(*count));
    let kib = kib.fold(0u64, u64::saturating_add);
    let gib = alloc::format!("{}.{:02}", kib >> 20, ((kib & 0xf_ffff) * 100) >> 20);
    if size.len() != count.len() {
        let message = alloc::format!("{} slab sizes for {} slab counts", size.len(), count.len());
        return Finding::warning(message).seen([context.cite(sizes.origin)]).into();
    }
    if kib <= 4 << 20 {
        return Verdict::Pass(alloc::format!("the pool of the compatibility path takes {gib} GiB"));
    }
    Finding::warning(alloc::format!(
        "the pool of the compatibility path takes {gib} GiB of host memory in every process"
    ))
    .seen([context.cite(counts.origin)])
    .fix(["lower properties.posix_pool_slab_count; the default is 128 64 64"])
    .into()
}

/// Logging and statistics that slow I/O down.
pub(super) fn slow_settings(context: &Context<'_>) -> Verdict {
    if let Some(verdict) = no_config(context) {
        return verdict;
    }
    let level = values(context, "logging.level");
    let verbose = level.filter(|fact| {
        fact.value.first().is_some_and(|level| matches!(level.as_str(), "DEBUG" | "TRACE"))
    });
    let stats = values(context, "profile.cufile_stats")
        .filter(|_| number(context, "profile.cufile_stats").is_some_and(|level| level >= 3));
    let mut parts = Vec::new();
    let mut evidence = Vec::new();
    if let Some(fact) = verbose {
        parts.push(alloc::format!("log level {}", fact.value.join("")));
        evidence.push(context.cite(fact.origin));
    }
    if let Some(fact) = stats {
        parts.push(alloc::format!("cufile_stats {}", fact.value.join("")));
        evidence.push(context.cite(fact.origin));
    }
    if parts.is_empty() {
        return Verdict::pass("logging and statistics are cheap");
    }
    Finding::warning(alloc::format!("these settings slow every request down: {}", parts.join(", ")))
        .seen(evidence)
        .fix(["logging.level ERROR, profile.cufile_stats 0 outside of debugging"])
        .into()
}

/// Which path each file system effectively takes.
pub(super) fn effective_path(context: &Context<'_>) -> Verdict {
    if let Some(verdict) = no_config(context) {
        return verdict;
    }
    let on = |path: &str| {
        values(context, path).is_some_and(|fact| fact.value.first().is_some_and(|v| v == "true"))
    };
    let configured = |fs: &str| {
        let prefix = alloc::format!("fs.{fs}.");
        context.machine.platform.cufile.keys().any(|key| key.starts_with(&prefix))
    };
    let mut rows = Vec::new();
    for (fs, option, default) in [
        ("weka", "fs.weka.rdma_write_support", false),
        ("gpfs", "fs.gpfs.gds_write_support", false),
    ] {
        if !configured(fs) {
            continue;
        }
        let writes = if values(context, option).is_some() { on(option) } else { default };
        if !writes {
            rows.push(alloc::format!(
                "{fs}: read=direct where the client supports it, write=posix ({option} is false)"
            ));
        }
    }
    let dynamic = on("properties.rdma_dynamic_routing");
    let addresses: usize = context
        .machine
        .platform
        .cufile
        .iter()
        .filter(|(key, _)| key.ends_with("rdma_dev_addr_list"))
        .map(|(_, fact)| fact.value.len())
        .sum();
    if dynamic {
        rows.push(alloc::format!("dynamic routing is on, {addresses} RDMA addresses"));
    }
    if rows.is_empty() {
        return Verdict::pass("no file system option overrides the general ones");
    }
    let strict = compat_off(context);
    let posix = rows.iter().any(|row| row.contains("write=posix"));
    let (status, severity) = match (posix, strict.is_some()) {
        (true, true) => (Status::Fail, Severity::Warning),
        _ => (Status::Pass, Severity::Info),
    };
    let mut message = rows.join("; ");
    if status == Status::Fail {
        message
            .push_str("; the compatibility path is off, and this option overrides it for writes");
    }
    let option = values(context, "fs.weka.rdma_write_support")
        .or(values(context, "fs.gpfs.gds_write_support"));
    let mut finding = Finding::new(status, severity, message)
        .seen(option.map(|fact| context.cite(fact.origin)))
        .seen(strict);
    if posix {
        finding = finding.fix(["set the option to true where the servers support it"]);
    }
    finding.into()
}

/// Threads that could not be bound to a node.
pub(super) fn numa_bind(context: &Context<'_>) -> Verdict {
    let failed = context.events(|event| match event {
        Event::NumaBindFailed { node, errno } => Some((*node, *errno)),
        _ => None,
    });
    if failed.is_empty() {
        return cufile_quiet(context, "threads are bound to their nodes");
    }
    let total: u64 = failed.iter().map(|(_, seen)| seen.count).sum();
    let each: Vec<String> = failed
        .iter()
        .map(|((node, errno), seen)| alloc::format!("node {node}: {} (errno {errno})", seen.count))
        .collect();
    Finding::info(alloc::format!(
        "{total} threads were not bound to a NUMA node, logged as errors: {}; the node is absent or \
         outside the process's cpuset",
        each.join(", ")
    ))
    .seen(failed.iter().map(|(_, seen)| context.cite_seen(seen)))
    .into()
}

fn cufile_quiet(context: &Context<'_>, message: &str) -> Verdict {
    match context.machine.has(&[Kind::CufileLog]) {
        true => Verdict::pass(message),
        false => Verdict::skip(&["cufile.log"]),
    }
}

/// cuFile did not start because a library is missing.
pub(super) fn library(context: &Context<'_>) -> Verdict {
    let missing = context.events(|event| match event {
        Event::LibraryMissing { library } => Some(library.as_str()),
        _ => None,
    });
    let init = context.seen(&Event::CufileInitFailed);
    if missing.is_empty() {
        return match init {
            Some(seen) => Finding::unknown(Severity::Error, "cuFile did not start")
                .seen([context.cite_seen(seen)])
                .ask(["the lines before it, at level INFO"])
                .into(),
            None => cufile_quiet(context, "cuFile started"),
        };
    }
    let names: Vec<String> = missing
        .iter()
        .map(|(library, seen)| alloc::format!("{library} ({} times)", seen.count))
        .collect();
    let mut finding = Finding::error(alloc::format!(
        "cannot load {}: the driver's library is not in this host or container, or not on the loader's \
         path",
        names.join(", ")
    ))
    .on(missing.iter().map(|(library, _)| library.to_string()))
    .seen(missing.iter().map(|(_, seen)| context.cite_seen(seen)));
    if let Some(seen) = init {
        finding.message.push_str("; cuFile's failed start is the consequence");
        finding = finding.seen([context.cite_seen(seen)]);
    }
    finding
        .fix(["run the container with the NVIDIA runtime (--gpus), or install the driver's user-space libraries"])
        .into()
}
