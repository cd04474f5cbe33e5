//! GPUs, NICs and what a topology file says beside them.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::bdf::Bdf;
use super::machine::{Fact, Known, Origin, Parent};

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// The driver's number.
    pub index: Option<Fact<u32>>,
    /// PCI address.
    pub bdf: Option<Fact<Bdf>>,
    /// Product name.
    pub name: Option<Fact<String>>,
    /// Compute capability times ten; AMD: as the file says.
    pub sm: Option<Fact<u32>>,
    /// Rank or device number of a topology file.
    pub dev: Option<Fact<u32>>,
    /// Size of the BAR1 window in bytes.
    pub bar1_bytes: Option<Fact<u64>>,
    /// Bytes of BAR1 in use.
    pub bar1_used: Option<Fact<u64>>,
    /// The driver or a topology file says that a NIC may reach its memory.
    pub gdr: Option<Fact<bool>>,
    /// gdscheck says that it supports direct storage.
    pub gds: Option<Fact<bool>>,
    /// MIG mode is on.
    pub mig: Option<Fact<bool>>,
    /// NVLink, C2C and XGMI links by what they reach.
    pub links: Vec<Fact<GpuLink>>,
    /// CUDA device attributes and other named numbers.
    pub attributes: BTreeMap<String, Fact<i64>>,
    /// Unique identifier of the device.
    pub uuid: Option<Fact<String>>,
    /// Serial number of the board.
    pub serial: Option<Fact<String>>,
    /// Number and address were joined by order, not by a source that has both.
    pub numbering_assumed: bool,
}

impl Gpu {
    /// What a person calls it: `GPU0 (0000:41:00.0)`, or the part that is known.
    pub fn label(&self) -> String {
        match (self.index.known(), self.bdf.known()) {
            (Some(index), Some(bdf)) => alloc::format!("GPU{index} ({bdf})"),
            (Some(index), None) => alloc::format!("GPU{index}"),
            (None, Some(bdf)) => alloc::format!("GPU {bdf}"),
            (None, None) => String::from("a GPU"),
        }
    }

    pub(super) fn join(&mut self, other: Self) {
        macro_rules! take { ($($field:ident),*) => { $(self.$field = self.$field.take().or(other.$field);)* } }
        take!(index, name, sm, dev, bar1_bytes, bar1_used, gdr, gds, mig, uuid, serial);
        self.links.extend(other.links);
        for (key, value) in other.attributes {
            self.attributes.entry(key).or_insert(value);
        }
    }
}

/// A bundle of links that leaves a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuLink {
    /// NVLink, C2C or XGMI.
    pub kind: GpuLinkKind,
    /// What it reaches, where the source says so.
    pub target: Option<Bdf>,
    /// Class code of the target: 0x068000 is an NVLink switch.
    pub target_class: u32,
    /// Number of links in the bundle.
    pub count: u32,
    /// Bandwidth of one direction in MB/s of the whole bundle, where the source states it.
    pub mb_per_s: Option<u64>,
}

/// The fabric a GPU link belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuLinkKind {
    /// NVLink to a GPU or a switch.
    NvLink,
    /// Chip-to-chip to the CPU.
    C2c,
    /// AMD's XGMI.
    Xgmi,
}

/// One NIC, RDMA or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nic {
    /// Number in the legend of `nvidia-smi topo -m`, or of a topology file.
    pub index: Option<Fact<u32>>,
    /// PCI address.
    pub bdf: Option<Fact<Bdf>>,
    /// Product or adapter type.
    pub model: Option<Fact<String>>,
    /// Firmware version.
    pub firmware: Option<Fact<String>>,
    /// PCI device identifier as verbs report it.
    pub part_id: Option<Fact<u32>>,
    /// Whether it speaks RDMA.
    pub rdma: Option<Fact<bool>>,
    /// A topology file says that it may reach GPU memory.
    pub gdr: Option<Fact<bool>>,
    /// Total speed in Mb/s.
    pub speed_mbps: Option<Fact<u64>>,
    /// Devices of which a merged NIC consists.
    pub members: Vec<String>,
    /// NUMA node, -1 where there is none.
    pub numa: Option<Fact<i32>>,
    /// Text of the atomic capability.
    pub atomic: Option<Fact<String>>,
    /// What it hangs off, where it has no PCI function in the source.
    pub parent: Option<Fact<Parent>>,
    /// Node GUID.
    pub guid: Option<Fact<String>>,
    /// Ports by number.
    pub ports: BTreeMap<u8, Port>,
}

/// One port of a NIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Port {
    /// `ACTIVE`, `DOWN` and so on, without its number.
    pub state: Option<Fact<String>>,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: Option<Fact<String>>,
    /// Rate text, such as `400 Gb/sec (4X NDR)`.
    pub rate: Option<Fact<String>>,
    /// Largest MTU in bytes.
    pub max_mtu: Option<Fact<u32>>,
    /// MTU in use in bytes.
    pub active_mtu: Option<Fact<u32>>,
    /// Largest message in bytes.
    pub max_msg_bytes: Option<Fact<u64>>,
    /// GID table by index.
    pub gids: BTreeMap<u16, Fact<Gid>>,
    /// Counters by name; several snapshots in the order of reading.
    pub counters: BTreeMap<String, Vec<Fact<u64>>>,
}

/// One entry of a GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gid {
    /// Address class, which is what decides whether it can be routed.
    pub class: GidClass,
    /// `IB/RoCE v1`, `RoCE v2` or empty where the source does not say.
    pub version: GidVersion,
    /// The address itself.
    pub gid: String,
}

/// Address class of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GidClass {
    /// All zero: the entry is empty.
    Empty,
    /// `fe80::/10`: reaches this link only.
    LinkLocal,
    /// `::ffff:a.b.c.d`.
    Ipv4Mapped,
    /// Any other.
    Global,
}

/// Protocol of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GidVersion {
    /// InfiniBand or RoCE version 1.
    V1,
    /// RoCE version 2 over UDP.
    V2,
    /// The source does not say.
    Unknown,
}

/// What is particular about one topology file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TopoFile {
    /// Where it was read.
    pub origin: Origin,
    /// Format: `nccl`, `rccl`, `hwloc` or `graph`.
    pub format: String,
    /// Attributes that a CPU node lacks: node, attribute, and the GPUs below it.
    pub cpu_gaps: Vec<(i32, String, Vec<String>)>,
    /// Number of `gpu` elements.
    pub gpus: u32,
    /// Number of `net` elements.
    pub nets: u32,
    /// Device numbers that a graph file names.
    pub graph_devs: Vec<u32>,
    /// Every bus id of a device (not of a bridge) in the file.
    pub devices: Vec<Bdf>,
}
