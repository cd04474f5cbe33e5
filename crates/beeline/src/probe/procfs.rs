//! Files of procfs and a few of `/etc`, `/boot` and `/dev`.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use beeline_core::facts::{Fact, Kind, Known};
use flate2::read::GzDecoder;

use super::Probe;

pub(super) fn gather(probe: &mut Probe) {
    for (path, kind) in [
        ("/proc/cmdline", Kind::Cmdline),
        ("/proc/version", Kind::KernelVersion),
        ("/proc/modules", Kind::Modules),
        ("/proc/devices", Kind::Devices),
        ("/proc/self/limits", Kind::Limits),
        ("/proc/mdstat", Kind::Mdstat),
        ("/proc/driver/nvidia/params", Kind::NvidiaParams),
        ("/proc/driver/nvidia/version", Kind::NvidiaVersion),
        ("/etc/nccl.conf", Kind::Settings),
        ("/etc/cufile.json", Kind::CufileJson),
    ] {
        probe.file(path, kind);
    }
    if !probe.file("/proc/self/mountinfo", Kind::Mounts) {
        probe.file("/proc/mounts", Kind::Mounts);
    }
    cpu(probe);
    kernel_config(probe);
    guest_and_container(probe);
    device_nodes(probe);
    probe.file("/proc/kallsyms", Kind::Symbols);
}

fn cpu(probe: &mut Probe) {
    let Some(bytes) = probe.tree.read("/proc/cpuinfo", 16 << 10) else { return };
    let text = String::from_utf8_lossy(&bytes);
    let at = probe.source("/proc/cpuinfo");
    let field = |key: &str| {
        let line =
            text.lines().find(|line| line.split(':').next().is_some_and(|k| k.trim() == key))?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let platform = &mut probe.machine.platform;
    if let Some(vendor) = field("vendor_id") {
        platform.cpu_vendor.learn(vendor, at);
        platform.arch.learn("x86_64".to_owned(), at);
    }
    if field("CPU implementer").is_some() {
        platform.arch.learn("aarch64".to_owned(), at);
    }
    let model = field("cpu family").zip(field("model"));
    if let Some((Ok(family), Ok(model))) = model.map(|(f, m)| (f.parse(), m.parse())) {
        platform.cpu_model.learn((family, model), at);
    }
    let flags = field("flags").unwrap_or_default();
    if flags.split(' ').any(|flag| flag == "hypervisor") {
        let vendor = probe.text("/sys/class/dmi/id/sys_vendor");
        let name = vendor.unwrap_or_else(|| "a hypervisor, by the CPU's flag".to_owned());
        probe.learn_hypervisor(&name, at);
    }
}

/// Options of the kernel that decide about direct paths.
const OPTIONS: [&str; 6] = [
    "CONFIG_PCI_P2PDMA",
    "CONFIG_ZONE_DEVICE",
    "CONFIG_INFINIBAND",
    "CONFIG_DMABUF_MOVE_NOTIFY",
    "CONFIG_IOMMU_DEFAULT_PASSTHROUGH",
    "CONFIG_VFIO_PCI",
];

/// Far more than any kernel's configuration.
const CONFIG_BYTES_MAX: usize = 4 << 20;

fn kernel_config(probe: &mut Probe) {
    let Some((path, bytes)) = running_config(probe).or_else(|| installed_config(probe)) else {
        return;
    };
    let text = String::from_utf8_lossy(&bytes);
    let at = probe.source(&path);
    for option in OPTIONS {
        let value = text.lines().find_map(|line| line.strip_prefix(option)?.strip_prefix('='));
        let fact = Fact { value: value.unwrap_or("").to_owned(), origin: at };
        probe.machine.platform.config.insert(option.to_owned(), fact);
    }
}

/// What a kernel built with `CONFIG_IKCONFIG_PROC` says of itself.
fn running_config(probe: &Probe) -> Option<(String, Vec<u8>)> {
    let path = "/proc/config.gz";
    let packed = probe.tree.read(path, CONFIG_BYTES_MAX)?;
    let mut bytes = Vec::new();
    // A few kilobytes may unpack to gigabytes; a text that is longer than any kernel's is none.
    let limit = CONFIG_BYTES_MAX as u64;
    let n = GzDecoder::new(&*packed).take(limit).read_to_end(&mut bytes).ok()?;
    (n < CONFIG_BYTES_MAX).then(|| (path.to_owned(), bytes))
}

/// What the package of the running kernel left on the disk.
fn installed_config(probe: &Probe) -> Option<(String, Vec<u8>)> {
    let release = probe.machine.platform.kernel.known()?;
    // A release with a slash would leave the directory.
    if release.contains('/') {
        return None;
    }
    let places = [format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
    places.into_iter().find_map(|path| {
        let bytes = probe.tree.read(&path, CONFIG_BYTES_MAX)?;
        Some((path, bytes))
    })
}

fn guest_and_container(probe: &mut Probe) {
    if let Some(kind) = probe.text("/sys/hypervisor/type") {
        let at = probe.source("/sys/hypervisor/type");
        probe.learn_hypervisor(&kind, at);
    }
    let cgroup = probe.text("/proc/1/cgroup").unwrap_or_default();
    let marks =
        [("docker", "docker"), ("kubepods", "kubernetes"), ("lxc", "lxc"), ("libpod", "podman")];
    let by_file = [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")];
    let name = by_file
        .iter()
        .find(|(path, _)| probe.tree.exists(path))
        .or_else(|| marks.iter().find(|(mark, _)| cgroup.contains(mark)))
        .map(|(_, name)| *name);
    if let Some(name) = name {
        let at = probe.source("/proc/1/cgroup");
        probe.machine.platform.container.learn(name.to_owned(), at);
    }
}

fn device_nodes(probe: &mut Probe) {
    let names = probe.tree.list("/dev");
    if names.is_empty() {
        return;
    }
    let at = probe.source("/dev");
    probe.machine.platform.dev_nodes_listed.learn(true, at);
    let wanted = |name: &str| name.starts_with("nvidia") || name == "gdrdrv" || name == "kvm";
    let mut nodes: Vec<String> = names.into_iter().filter(|name| wanted(name)).collect();
    for folder in ["infiniband", "vfio"] {
        let inner = probe.tree.list(&format!("/dev/{folder}"));
        nodes.extend(inner.into_iter().map(|name| format!("{folder}/{name}")));
    }
    for node in nodes.into_iter().take(4096) {
        probe.machine.platform.dev_nodes.insert(node, Fact { value: true, origin: at });
    }
}

/// Bytes of kernel log that are read.
const KERNEL_LOG_BYTES_MAX: usize = 16 << 20;

/// The live kernel log record by record, without waiting; of a captured root, the file of the last boot.
pub(super) fn kernel_log(probe: &mut Probe, live: bool) {
    if !live {
        for path in ["/var/log/dmesg", "/dmesg", "/dmesg.txt"] {
            if probe.file(path, Kind::KernelLog) {
                return;
            }
        }
        return;
    }
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let mut file = match OpenOptions::new().read(true).custom_flags(nonblock).open("/dev/kmsg") {
        Ok(file) => file,
        Err(error) => {
            if error.kind() == ErrorKind::PermissionDenied {
                probe.note("the kernel log (/dev/kmsg) is not readable for this user".to_owned());
            }
            return;
        }
    };
    let (mut log, mut record) = (Vec::new(), vec![0u8; 8192]);
    while log.len() < KERNEL_LOG_BYTES_MAX {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(length) => log.extend_from_slice(record.get(..length).unwrap_or_default()),
            // A record that was overwritten while we read: go on with the next.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let text = String::from_utf8_lossy(&log);
    if !text.is_empty() {
        let result = beeline_core::facts::read_as(
            &mut probe.machine,
            Kind::KernelLog,
            "/dev/kmsg",
            text.as_bytes(),
        );
        if let Err(error) = result {
            probe.note(format!("the kernel log is not understood: {error}"));
        }
    }
}
