//! The record of one machine: PCI tree, GPUs, NICs and what connects them.
//!
//! The parts that are not devices (kernel, driver, limits, storage) are in [`super::platform`].

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use super::bdf::Bdf;
use super::event::{Event, Seen};
use super::parse::Kind;
use super::platform::Platform;

/// Version of the saved form. Raised when a field changes its meaning; new fields do not raise it.
pub const FORMAT_VERSION: u32 = 1;

/// Distinct events kept of all logs together; further ones are counted in [`Machine::events_dropped`].
pub const EVENTS_MAX: usize = 8192;

/// Where a fact was read: an index into [`Machine::sources`] and a line, counted from 1 (0: no line).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(from = "(u16, u32)", into = "(u16, u32)")]
pub struct Origin {
    /// Index into [`Machine::sources`].
    pub source: u16,
    /// Line in that source, from 1; 0 where lines mean nothing.
    pub line: u32,
}

impl From<(u16, u32)> for Origin {
    fn from((source, line): (u16, u32)) -> Self {
        Self { source, line }
    }
}

impl From<Origin> for (u16, u32) {
    fn from(origin: Origin) -> Self {
        (origin.source, origin.line)
    }
}

/// A value together with where it was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact<T> {
    /// The value.
    pub value: T,
    /// Where it stands.
    pub origin: Origin,
}

/// How an optional fact is filled and read.
pub trait Known<T> {
    /// Keeps `value` unless an earlier source already said something: the first source wins.
    fn learn(&mut self, value: T, origin: Origin);
    /// The value, where one is known.
    fn known(&self) -> Option<&T>;
}

impl<T> Known<T> for Option<Fact<T>> {
    fn learn(&mut self, value: T, origin: Origin) {
        if self.is_none() {
            *self = Some(Fact { value, origin });
        }
    }

    fn known(&self) -> Option<&T> {
        self.as_ref().map(|fact| &fact.value)
    }
}

/// One input that was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// What the content was recognised as.
    pub kind: Kind,
    /// The name the caller gave: a path, or `live`.
    pub name: String,
    /// Number of lines read.
    pub lines: u32,
    /// Whether the content visibly ends before its end.
    pub truncated: bool,
}

/// Everything known about one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// [`FORMAT_VERSION`] of the record.
    pub version: u32,
    /// The inputs, in the order in which they were read.
    pub sources: Vec<Source>,
    /// PCI functions by address.
    pub pci: BTreeMap<Bdf, PciDevice>,
    /// GPUs, in no particular order until [`Machine::unify`].
    pub gpus: Vec<Gpu>,
    /// NICs by the name of their RDMA device, else network device, else PCI address.
    pub nics: BTreeMap<String, Nic>,
    /// Connection matrix as `nvidia-smi topo -m` prints it.
    pub matrix: Vec<Fact<Cell>>,
    /// Peer-to-peer capability as the driver reports it.
    pub p2p: Vec<Fact<P2pCell>>,
    /// Topology files (NCCL, RCCL, hwloc, graph) and what is particular about them.
    pub topo_files: Vec<TopoFile>,
    /// Everything that is not a device.
    pub platform: Platform,
    /// What logs reported, equal events folded together.
    #[serde(with = "super::json::as_list")]
    pub events: BTreeMap<Event, Seen>,
    /// Distinct events beyond [`EVENTS_MAX`].
    pub events_dropped: u64,
    /// Remarks about the gathering itself, such as facts hidden from an unprivileged user.
    pub notes: Vec<Fact<String>>,
}

impl Machine {
    /// An empty record of the current format.
    pub fn new() -> Self {
        Self { version: FORMAT_VERSION, ..Self::default() }
    }

    /// Adds an event, folding it into an equal one.
    pub fn event(&mut self, event: Event, origin: Origin) {
        if let Some(seen) = self.events.get_mut(&event) {
            seen.count = seen.count.saturating_add(1);
            seen.last = origin;
        } else if self.events.len() < EVENTS_MAX {
            self.events.insert(event, Seen { count: 1, first: origin, last: origin });
        } else {
            self.events_dropped = self.events_dropped.saturating_add(1);
        }
    }

    /// The GPU at `bdf`, added where it is new.
    pub fn gpu_at(&mut self, bdf: Bdf, origin: Origin) -> &mut Gpu {
        let found = self.gpus.iter().position(|gpu| gpu.bdf.known() == Some(&bdf));
        let index = found.unwrap_or_else(|| {
            let gpu = Gpu { bdf: Some(Fact { value: bdf, origin }), ..Gpu::default() };
            self.gpus.push(gpu);
            self.gpus.len() - 1
        });
        &mut self.gpus[index]
    }

    /// The GPU with driver index `number`, added where it is new.
    pub fn gpu_numbered(&mut self, number: u32, origin: Origin) -> &mut Gpu {
        let found = self.gpus.iter().position(|gpu| gpu.index.known() == Some(&number));
        let index = found.unwrap_or_else(|| {
            let gpu = Gpu { index: Some(Fact { value: number, origin }), ..Gpu::default() };
            self.gpus.push(gpu);
            self.gpus.len() - 1
        });
        &mut self.gpus[index]
    }

    /// Joins GPUs known only by number with GPUs known only by address, when both sets have the same
    /// size: the driver numbers GPUs by PCI address unless it is told otherwise. Then sorts by number.
    pub fn unify(&mut self) {
        let by_number = self.gpus.iter().filter(|g| g.bdf.is_none()).count();
        let by_address = self.gpus.iter().filter(|g| g.index.is_none()).count();
        if by_number > 0 && by_number == by_address && by_number * 2 == self.gpus.len() {
            let (mut numbered, mut addressed): (Vec<_>, Vec<_>) =
                self.gpus.drain(..).partition(|gpu| gpu.bdf.is_none());
            numbered.sort_by_key(|gpu| gpu.index.known().copied());
            addressed.sort_by_key(|gpu| gpu.bdf.known().copied());
            for (gpu, number) in addressed.iter_mut().zip(numbered) {
                gpu.join(number);
                gpu.numbering_assumed = true;
            }
            self.gpus = addressed;
        }
        self.gpus.sort_by_key(|gpu| {
            (gpu.index.known().copied().unwrap_or(u32::MAX), gpu.bdf.known().copied())
        });
    }

    /// The NIC called `name`, added where it is new.
    pub fn nic(&mut self, name: &str) -> &mut Nic {
        self.nics.entry(String::from(name)).or_default()
    }

    /// The PCI function at `bdf`, added where it is new.
    pub fn pci_at(&mut self, bdf: Bdf) -> &mut PciDevice {
        self.pci.entry(bdf).or_default()
    }

    /// The name of the source of `origin` with its line, for a reader.
    pub fn cite(&self, origin: Origin) -> String {
        let name = match self.sources.get(usize::from(origin.source)) {
            Some(source) => source.name.as_str(),
            None => "unknown source",
        };
        match origin.line {
            0 => String::from(name),
            line => alloc::format!("{name}:{line}"),
        }
    }

    /// Whether any source of one of these kinds was read.
    pub fn has(&self, kinds: &[Kind]) -> bool {
        self.sources.iter().any(|source| kinds.contains(&source.kind))
    }
}

/// One PCI function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PciDevice {
    /// Class code with subclass and interface, 24 bits.
    pub class: Option<Fact<u32>>,
    /// Vendor identifier.
    pub vendor: Option<Fact<u16>>,
    /// Device identifier.
    pub device: Option<Fact<u16>>,
    /// Subsystem vendor and device.
    pub subsystem: Option<Fact<(u16, u16)>>,
    /// Name as the tool printed it.
    pub name: Option<Fact<String>>,
    /// What it hangs off.
    pub parent: Option<Fact<Parent>>,
    /// Which kind of PCI Express port it is.
    pub port: Option<Fact<PortKind>>,
    /// Negotiated link.
    pub link: Option<Fact<Link>>,
    /// Fastest link it can do.
    pub link_max: Option<Fact<Link>>,
    /// Secondary and subordinate bus of a bridge.
    pub buses: Option<Fact<(u8, u8)>>,
    /// Access Control Services bits that are switched on.
    pub acs: Option<Fact<Acs>>,
    /// The tool was not allowed to read the capabilities.
    pub hidden: Option<Fact<bool>>,
    /// IOMMU group.
    pub iommu_group: Option<Fact<u32>>,
    /// Domain type of that group.
    pub iommu_type: Option<Fact<IommuType>>,
    /// NUMA node, -1 where the firmware gives none.
    pub numa: Option<Fact<i32>>,
    /// Kernel driver bound to it.
    pub driver: Option<Fact<String>>,
    /// Size in bytes of its largest memory window.
    pub bar_bytes: Option<Fact<u64>>,
}

/// What a PCI function hangs off.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Parent {
    /// Another function: a bridge, a root port or a switch port.
    Bridge(Bdf),
    /// A host bridge, by the name the source uses.
    Host(String),
    /// A CPU of a topology file, by its NUMA node; the levels between are not in the file.
    Cpu(i32),
}

/// The kind of a PCI Express function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortKind {
    /// A port of the root complex.
    Root,
    /// The port of a switch that faces the root.
    Upstream,
    /// A port of a switch that faces a device.
    Downstream,
    /// A device, not a bridge.
    Endpoint,
    /// A bridge to conventional PCI.
    ToPci,
    /// A whole switch folded into one node, as topology files of NCCL have it.
    Switch,
}

/// Speed and width of a PCI Express link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Transfers per second and lane, in hundreds of megatransfers (160 is 16 GT/s).
    pub speed_100mt: u32,
    /// Number of lanes.
    pub width: u32,
}

impl Link {
    /// Parses `16 GT/s`, `16.0 GT/s PCIe` or `16GT/s`.
    pub fn parse_speed(text: &str) -> Option<u32> {
        let number = text.trim_start().split("GT/s").next()?.trim_end();
        decimal_tenths(number)
    }

    /// Usable bandwidth of one direction in MB/s by the field's rule: three quarters of the bit rate
    /// after encoding (8b/10b up to 5 GT/s), so 16 GT/s x16 is 24 GB/s and 5 GT/s x16 is 6 GB/s.
    pub const fn mb_per_s(self) -> u64 {
        // In kB/s for 100 MT/s of one lane: 12.5 MB/s raw, times 0.75, times 0.8 for 8b/10b.
        let exact = if self.speed_100mt <= 50 { 7500 } else { 9375 };
        (self.speed_100mt as u64).saturating_mul(self.width as u64).saturating_mul(exact) / 1000
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} GT/s x{}", self.speed_100mt / 10, self.speed_100mt % 10, self.width)
    }
}

/// `2.5` as 25, `16` as 160; `None` for anything else.
pub(crate) fn decimal_tenths(text: &str) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let tenth = fraction.chars().next().unwrap_or('0').to_digit(10)?;
    let digits = fraction.bytes().all(|b| b.is_ascii_digit());
    let whole: u32 = whole.parse().ok().filter(|_| digits)?;
    whole.checked_mul(10)?.checked_add(tenth)
}

/// Access Control Services control bits (PCI Express Base, 7.7.11.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Acs(pub u16);

impl Acs {
    /// Source validation: harmless for peer-to-peer.
    pub const SRC_VALID: u16 = 0x01;
    /// Translation blocking.
    pub const TRANS_BLOCK: u16 = 0x02;
    /// Peer requests go up to the root complex.
    pub const REQ_REDIR: u16 = 0x04;
    /// Peer completions go up to the root complex.
    pub const CMPLT_REDIR: u16 = 0x08;
    /// Requests that arrive at an upstream port's own window go up.
    pub const UPSTREAM_FWD: u16 = 0x10;
    /// Egress control vector.
    pub const EGRESS_CTRL: u16 = 0x20;
    /// Translated requests may still go straight.
    pub const DIRECT_TRANS: u16 = 0x40;
    /// Names as `lspci -vv` prints them, in bit order.
    pub const NAMES: [(&'static str, u16); 7] = [
        ("SrcValid", Self::SRC_VALID),
        ("TransBlk", Self::TRANS_BLOCK),
        ("ReqRedir", Self::REQ_REDIR),
        ("CmpltRedir", Self::CMPLT_REDIR),
        ("UpstreamFwd", Self::UPSTREAM_FWD),
        ("EgressCtrl", Self::EGRESS_CTRL),
        ("DirectTrans", Self::DIRECT_TRANS),
    ];

    /// Whether peer traffic through this port is sent up to the root complex.
    pub const fn redirects(self) -> bool {
        self.0 & (Self::REQ_REDIR | Self::CMPLT_REDIR | Self::UPSTREAM_FWD) != 0
    }
}

impl fmt::Display for Acs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:04x}", self.0)?;
        for (name, bit) in Self::NAMES {
            if self.0 & bit != 0 {
                write!(f, " {name}+")?;
            }
        }
        Ok(())
    }
}

/// Type of an IOMMU domain, as `/sys/kernel/iommu_groups/*/type` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IommuType {
    /// `identity`: addresses pass unchanged.
    Identity,
    /// `DMA` or `DMA-FQ`: addresses are translated.
    Translated,
    /// Anything else.
    Other,
}

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

    fn join(&mut self, other: Self) {
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

/// One end in a connection matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Endpoint {
    /// A GPU by the driver's number.
    Gpu(u32),
    /// A NIC by the number in the legend.
    Nic(u32),
}

/// One cell of a connection matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    /// Row.
    pub from: Endpoint,
    /// Column.
    pub to: Endpoint,
    /// What stands in the cell.
    pub distance: Distance,
}

/// How far two devices are apart, by the names of `nvidia-smi topo -m` and NCCL, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Distance {
    /// Joined by that many NVLinks (or XGMI links).
    Nv(u32),
    /// Joined by the chip-to-chip link of one package.
    C2c,
    /// At most one PCIe switch between.
    Pix,
    /// Several PCIe switches, no host bridge.
    Pxb,
    /// Chip-to-chip link to the CPU, then its PCIe port.
    P2c,
    /// Through a PCIe host bridge.
    Phb,
    /// Between host bridges of one NUMA node.
    Node,
    /// Between NUMA nodes.
    Sys,
}

impl Distance {
    /// Parses a matrix cell; `None` for anything that is not a distance.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "C2C" => Self::C2c,
            "PIX" => Self::Pix,
            "PXB" => Self::Pxb,
            "P2C" => Self::P2c,
            "PHB" => Self::Phb,
            "NODE" => Self::Node,
            "SYS" | "SOC" => Self::Sys,
            _ => Self::Nv(text.strip_prefix("NV")?.parse().ok().filter(|count| *count <= 1024)?),
        })
    }

    /// Whether peer traffic stays below the host bridge (the default limit for RDMA to GPU memory).
    pub fn below_host_bridge(self) -> bool {
        self <= Self::Pxb
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nv(count) => write!(f, "NV{count}"),
            Self::C2c => f.write_str("C2C"),
            Self::Pix => f.write_str("PIX"),
            Self::Pxb => f.write_str("PXB"),
            Self::P2c => f.write_str("P2C"),
            Self::Phb => f.write_str("PHB"),
            Self::Node => f.write_str("NODE"),
            Self::Sys => f.write_str("SYS"),
        }
    }
}

/// One cell of the driver's peer-to-peer capability matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct P2pCell {
    /// The GPU that accesses.
    pub from: u32,
    /// The GPU that owns the memory.
    pub to: u32,
    /// What the driver says.
    pub status: P2pStatus,
}

/// Peer-to-peer status by the names of `nvidia-smi topo -p2p`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum P2pStatus {
    /// `OK`.
    Ok,
    /// `CNS`: chipset not supported.
    Chipset,
    /// `GNS`: GPU not supported.
    Gpu,
    /// `TNS`: topology not supported.
    Topology,
    /// `NS`: not supported.
    NotSupported,
    /// `DR`: disabled by registry key.
    Disabled,
    /// `U`: unknown.
    Unknown,
}

impl P2pStatus {
    /// Parses a matrix cell.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "OK" => Self::Ok,
            "CNS" => Self::Chipset,
            "GNS" => Self::Gpu,
            "TNS" => Self::Topology,
            "NS" => Self::NotSupported,
            "DR" => Self::Disabled,
            "U" => Self::Unknown,
            _ => return None,
        })
    }

    /// The driver's words for it.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Ok => "supported",
            Self::Chipset => "chipset not supported",
            Self::Gpu => "GPU not supported",
            Self::Topology => "topology not supported",
            Self::NotSupported => "not supported",
            Self::Disabled => "disabled by registry key",
            Self::Unknown => "unknown",
        }
    }
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
