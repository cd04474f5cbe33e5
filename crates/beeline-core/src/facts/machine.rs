//! The record of one machine: PCI tree, GPUs, NICs and what connects them.
//!
//! Devices and distances have files of their own; their types are named from here. The parts that are
//! not devices (kernel, driver, limits, storage) are in [`super::platform`].

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::bdf::Bdf;
use super::event::{Event, Seen};
use super::parse::Kind;
use super::platform::Platform;

pub use super::device::{
    Gid, GidClass, GidVersion, Gpu, GpuLink, GpuLinkKind, Nic, Port, TopoFile,
};
pub use super::distance::{Cell, Distance, Endpoint, P2pCell, P2pStatus};
pub(crate) use super::pci_device::decimal_tenths;
pub use super::pci_device::{Acs, IommuType, Link, Parent, PciDevice, PortKind};

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
