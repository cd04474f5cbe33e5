//! The parts of the record that are not devices: kernel, driver, limits, storage, overrides.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::bdf::Bdf;
use super::machine::Fact;

/// Kernel, driver, storage stack and process environment of one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Platform {
    /// `uname -r`.
    pub kernel: Option<Fact<String>>,
    /// Kernel command line.
    pub cmdline: Option<Fact<String>>,
    /// Kernel configuration options that matter here, by name.
    pub config: BTreeMap<String, Fact<String>>,
    /// The boot log's default IOMMU domain: true for translated, false for passthrough.
    pub iommu_translated: Option<Fact<bool>>,
    /// The boot log says that an IOMMU is on.
    pub iommu_on: Option<Fact<bool>>,
    /// Machine architecture.
    pub arch: Option<Fact<String>>,
    /// CPU vendor, as `GenuineIntel`.
    pub cpu_vendor: Option<Fact<String>>,
    /// CPU family and model.
    pub cpu_model: Option<Fact<(u32, u32)>>,
    /// CPU sockets.
    pub sockets: Option<Fact<u32>>,
    /// NUMA nodes by number, with the number of CPUs.
    pub numa: BTreeMap<i32, Fact<u32>>,
    /// Hypervisor, where the machine is a guest.
    pub hypervisor: Option<Fact<String>>,
    /// Container runtime, where the process is in one.
    pub container: Option<Fact<String>>,
    /// NVIDIA driver version.
    pub driver: Option<Fact<String>>,
    /// Whether the driver's kernel modules are the open ones.
    pub driver_open: Option<Fact<bool>>,
    /// CUDA version that the driver supports.
    pub cuda: Option<Fact<String>>,
    /// Driver parameters by name.
    pub params: BTreeMap<String, Fact<String>>,
    /// Loaded kernel modules, dashes written as underscores.
    pub modules: BTreeMap<String, Fact<u64>>,
    /// The list of modules is complete.
    pub modules_listed: Option<Fact<bool>>,
    /// Character devices of `/proc/devices` with their major number.
    pub char_devices: BTreeMap<String, Fact<u32>>,
    /// That list is complete.
    pub char_devices_listed: Option<Fact<bool>>,
    /// Device nodes that exist, by path below `/dev`.
    pub dev_nodes: BTreeMap<String, Fact<bool>>,
    /// Those nodes were looked for.
    pub dev_nodes_listed: Option<Fact<bool>>,
    /// Symbol counts of loaded modules that tell patched from unpatched.
    pub symbols: Symbols,
    /// RDMA peer memory clients that are registered in the kernel.
    pub memory_peers: BTreeMap<String, Fact<bool>>,
    /// Those clients were looked for.
    pub memory_peers_listed: Option<Fact<bool>>,
    /// Locked-memory limits of processes.
    pub memlock: Vec<Fact<Memlock>>,
    /// Environment variables and configuration file entries, by name.
    pub env: BTreeMap<String, Vec<Fact<Setting>>>,
    /// Mounted file systems.
    pub mounts: Vec<Fact<Mount>>,
    /// Block devices by name.
    pub blocks: BTreeMap<String, Block>,
    /// Output of gdscheck.
    pub gds: Option<Gds>,
    /// Values of cufile.json by dotted path.
    pub cufile: BTreeMap<String, Fact<Vec<String>>>,
    /// Files with their residency in the page cache.
    pub files: Vec<Fact<FileResidency>>,
    /// Device mappings of a process.
    pub mappings: Vec<Fact<Mapping>>,
}

/// What a symbol table says about patched modules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Symbols {
    /// Symbols of the loaded `nvme` or `nvme_core` module.
    pub nvme: Option<Fact<u32>>,
    /// Those of them that belong to direct storage.
    pub nvme_nvfs: Option<Fact<u32>>,
    /// The kernel has peer-to-peer DMA: known where the whole table was read.
    pub p2pdma: Option<Fact<bool>>,
    /// The kernel exports the peer memory interface.
    pub peer_memory_api: Option<Fact<bool>>,
}

/// Locked-memory limit of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memlock {
    /// Soft limit in bytes; `None` is unlimited.
    pub soft: Option<u64>,
    /// Hard limit in bytes; `None` is unlimited.
    pub hard: Option<u64>,
    /// The failing process itself said so, or its `/proc/PID/limits`.
    pub of_process: bool,
}

/// One setting and where it takes effect from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The value.
    pub value: String,
    /// What set it.
    pub from: SettingFrom,
}

/// What set a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SettingFrom {
    /// The environment of the process.
    Environment,
    /// A configuration file such as `/etc/nccl.conf`.
    File,
    /// A log line that names neither.
    Log,
}

/// One mounted file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Device or source.
    pub device: String,
    /// Mount point.
    pub point: String,
    /// File system type.
    pub fs: String,
    /// Options.
    pub options: String,
    /// Major and minor number, where the source has them.
    pub dev: Option<(u32, u32)>,
}

/// One block device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Block {
    /// Devices it is made of.
    pub members: Vec<String>,
    /// RAID level, where it is an array.
    pub raid: Option<Fact<String>>,
    /// Mount points.
    pub mounts: Vec<String>,
    /// Logical block size in bytes.
    pub logical_bytes: Option<Fact<u32>>,
    /// NUMA node.
    pub numa: Option<Fact<i32>>,
    /// PCI address of its controller.
    pub controller: Option<Fact<Bdf>>,
    /// Transport: `nvme`, `virtio` and so on.
    pub transport: Option<Fact<String>>,
    /// File system on it.
    pub fs: Option<Fact<String>>,
    /// Journal mode of that file system.
    pub journal: Option<Fact<String>>,
}

/// What gdscheck printed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gds {
    /// Release of the tool.
    pub release: Option<Fact<String>>,
    /// Version of the loaded nvidia-fs module; absent when the module is not loaded or not visible.
    pub nvfs: Option<Fact<String>>,
    /// Oldest nvidia-fs that would do: a requirement, not a finding.
    pub nvfs_minimum: Option<Fact<String>>,
    /// Driver rows by name with their state.
    pub rows: BTreeMap<String, Fact<String>>,
    /// Effective cuFile properties.
    pub properties: BTreeMap<String, Fact<String>>,
    /// The section on GPUs is there.
    pub gpu_section: bool,
    /// The section on the platform is there.
    pub platform_section: bool,
    /// State of the IOMMU.
    pub iommu: Option<Fact<String>>,
    /// `Platform verification` verdict.
    pub verdict: Option<Fact<String>>,
}

/// A file and how much of it is in the page cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileResidency {
    /// Path.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Resident bytes.
    pub resident: u64,
}

/// A mapping of a device file in a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// One past the last address.
    pub end: u64,
    /// Device file.
    pub path: String,
}
