//! Topology: how far two devices are apart, over what, and how fast.
//!
//! Distances carry the names of `nvidia-smi topo -m` and NCCL. Where a source gives a matrix, the matrix
//! decides; where it gives a PCI tree, the tree does; where neither is enough, the answer is
//! [`Answer::Unknown`] with the distances that remain possible, never a guess.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::facts::machine::GpuLinkKind;
use crate::facts::{Acs, Bdf, Distance, Endpoint, Kind, Known, Machine, Parent, PortKind};

mod diff;
pub mod view;

pub use diff::{Change, diff};

/// Longest chain of bridges that is followed; a longer one is a cycle in the input.
const CHAIN_MAX: usize = 64;

/// A device in the topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Point<'m> {
    /// A GPU by its position in [`Machine::gpus`].
    Gpu(usize),
    /// A NIC by its key in [`Machine::nics`].
    Nic(&'m str),
    /// Any PCI function, such as an NVMe controller.
    Pci(Bdf),
}

/// How far two devices are apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The facts decide.
    Known(Distance),
    /// The facts leave several possibilities.
    Unknown {
        /// What remains possible, nearest first.
        candidates: Vec<Distance>,
        /// What is missing.
        why: String,
    },
}

impl Answer {
    /// The distance, where it is known.
    pub const fn known(&self) -> Option<Distance> {
        match self {
            Self::Known(distance) => Some(*distance),
            Self::Unknown { .. } => None,
        }
    }
}

/// The PCI path between two devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// Distance over PCI, links beside PCI left out.
    pub distance: Answer,
    /// Bridges on the way, from the first device up and down to the second, the common one left out.
    pub bridges: Vec<Bdf>,
    /// The bridge both hang off; `None` where the way crosses a host bridge.
    pub common: Option<Bdf>,
    /// PCIe switches on the way before NCCL's flattening of two-level switches.
    pub switches_raw: u32,
    /// Bandwidth of the narrowest known link, MB/s in one direction.
    pub mb_per_s: Option<u64>,
}

/// GPUs and NICs that are compared with each other; no machine has more.
const DEVICES_MAX: usize = 128;

/// The graph of one machine.
#[derive(Clone, Debug)]
pub struct Topology<'m> {
    machine: &'m Machine,
    cells: BTreeMap<(Endpoint, Endpoint), Distance>,
}

impl<'m> Topology<'m> {
    /// The topology of `machine`, on which [`Machine::unify`] was called.
    pub fn new(machine: &'m Machine) -> Self {
        let cells = machine.matrix.iter().map(|fact| {
            let cell = &fact.value;
            ((cell.from.min(cell.to), cell.from.max(cell.to)), cell.distance)
        });
        Self { machine, cells: cells.collect() }
    }

    /// All GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = Point<'m>> + use<'m> {
        (0..self.machine.gpus.len().min(DEVICES_MAX)).map(Point::Gpu)
    }

    /// All NICs.
    pub fn nics(&self) -> impl Iterator<Item = Point<'m>> + use<'m> {
        self.machine.nics.keys().take(DEVICES_MAX).map(|name| Point::Nic(name))
    }

    /// Every unordered pair of GPUs.
    pub fn gpu_pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<'m> {
        let count = self.machine.gpus.len().min(DEVICES_MAX);
        (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
    }

    /// What a person calls the device.
    pub fn label(&self, point: Point<'_>) -> String {
        match point {
            Point::Gpu(index) => {
                self.machine.gpus.get(index).map_or_else(|| "a GPU".to_string(), |gpu| gpu.label())
            }
            Point::Nic(name) => name.to_string(),
            Point::Pci(bdf) => bdf.to_string(),
        }
    }

    /// PCI address of a device.
    pub fn bdf(&self, point: Point<'_>) -> Option<Bdf> {
        match point {
            Point::Gpu(index) => self.machine.gpus.get(index)?.bdf.known().copied(),
            Point::Nic(name) => self.machine.nics.get(name)?.bdf.known().copied(),
            Point::Pci(bdf) => Some(bdf),
        }
    }

    /// How far two devices are apart.
    pub fn distance(&self, a: Point<'_>, b: Point<'_>) -> Answer {
        if let Some(distance) = self.matrix(a, b) {
            return Answer::Known(distance);
        }
        if let (Point::Gpu(a), Point::Gpu(b)) = (a, b)
            && let Some(count) = self.gpu_links(a, b)
        {
            return Answer::Known(Distance::Nv(count));
        }
        self.path(a, b).distance
    }

    /// Bandwidth in one direction in MB/s over the nearest way, where the facts state it.
    pub fn mb_per_s(&self, a: Point<'_>, b: Point<'_>) -> Option<u64> {
        if let (Point::Gpu(a), Point::Gpu(b)) = (a, b)
            && self.gpu_links(a, b).is_some()
        {
            return self.gpu_link_mb_per_s(a, b);
        }
        self.path(a, b).mb_per_s
    }

    /// The cell of a connection matrix, whichever way round it was printed.
    fn matrix(&self, a: Point<'_>, b: Point<'_>) -> Option<Distance> {
        let (a, b) = (self.endpoint(a)?, self.endpoint(b)?);
        self.cells.get(&(a.min(b), a.max(b))).copied()
    }

    fn endpoint(&self, point: Point<'_>) -> Option<Endpoint> {
        if self.machine.matrix.is_empty() {
            return None;
        }
        match point {
            Point::Gpu(index) => Some(Endpoint::Gpu(*self.machine.gpus.get(index)?.index.known()?)),
            Point::Nic(name) => Some(Endpoint::Nic(*self.machine.nics.get(name)?.index.known()?)),
            Point::Pci(_) => None,
        }
    }

    /// NVLinks or XGMI links between two GPUs, directly or through a switch of that fabric.
    pub fn gpu_links(&self, a: usize, b: usize) -> Option<u32> {
        let (first, second) = (self.machine.gpus.get(a)?, self.machine.gpus.get(b)?);
        let peer = |link: &GpuKindCount| link.kind != GpuLinkKind::C2c;
        let counts = |gpu: &crate::facts::Gpu| -> Vec<GpuKindCount> {
            gpu.links.iter().map(|l| GpuKindCount::from(&l.value)).filter(peer).collect()
        };
        let (of_first, of_second) = (counts(first), counts(second));
        if let (Some(x), Some(y)) = (first.bdf.known(), second.bdf.known()) {
            let to = |links: &[GpuKindCount], target: &Bdf| -> u32 {
                let wanted = links.iter().filter(|link| link.target.as_ref() == Some(target));
                wanted.map(|link| link.count).fold(0, u32::saturating_add)
            };
            let direct = to(&of_first, y).min(to(&of_second, x));
            if direct > 0 {
                return Some(direct);
            }
        }
        // Through a switch: both ends need links to one; a guest does not see which.
        let switched = |links: &[GpuKindCount]| -> u32 {
            let wanted = links.iter().filter(|link| link.to_switch);
            wanted.map(|link| link.count).fold(0, u32::saturating_add)
        };
        Some(switched(&of_first).min(switched(&of_second))).filter(|count| *count > 0)
    }

    fn gpu_link_mb_per_s(&self, a: usize, b: usize) -> Option<u64> {
        let count = u64::from(self.gpu_links(a, b)?);
        let (first, second) = (self.machine.gpus.get(a)?, self.machine.gpus.get(b)?);
        let per_link = |gpu: &crate::facts::Gpu| nvlink_mb_per_s(*gpu.sm.known()?);
        Some(count.saturating_mul(per_link(first)?.min(per_link(second)?)))
    }

    /// The PCI path between two devices.
    pub fn path(&self, a: Point<'_>, b: Point<'_>) -> Path {
        let unknown = |candidates: &[Distance], why: &str| Path {
            distance: Answer::Unknown { candidates: candidates.to_vec(), why: why.to_string() },
            bridges: Vec::new(),
            common: None,
            switches_raw: 0,
            mb_per_s: None,
        };
        let any = [Distance::Pix, Distance::Pxb, Distance::Phb, Distance::Node, Distance::Sys];
        let (up_a, up_b) = (self.chain(a), self.chain(b));
        let (Some(root_a), Some(root_b)) = (&up_a.root, &up_b.root) else {
            if let Some(reason) = self.flat_but_apart(a, b) {
                return unknown(&any[2..], &reason);
            }
            return unknown(&any, "no source shows the PCI tree between them");
        };
        let common = up_a.bridges.iter().find(|bridge| up_b.bridges.contains(bridge)).copied();
        let below = |chain: &[Bdf]| -> Vec<Bdf> {
            chain.iter().take_while(|bridge| Some(**bridge) != common).copied().collect()
        };
        let (side_a, mut side_b) = (below(&up_a.bridges), below(&up_b.bridges));
        let mb_per_s = self.narrowest(&[self.bdf(a), self.bdf(b)], &[&side_a, &side_b]);
        side_b.reverse();
        let bridges: Vec<Bdf> = side_a.into_iter().chain(side_b).collect();

        let (raw, flat) = self.switches(&bridges, common);
        let distance = match common {
            Some(_) if flat <= 1 => Answer::Known(Distance::Pix),
            Some(_) => Answer::Known(Distance::Pxb),
            None => self.across_roots(a, b, root_a, root_b, &up_a, &up_b),
        };
        Path { distance, bridges, common, switches_raw: raw, mb_per_s }
    }

    /// Distance of devices without a common bridge, by their host bridges and NUMA nodes.
    fn across_roots(
        &self,
        a: Point<'_>,
        b: Point<'_>,
        root_a: &Parent,
        root_b: &Parent,
        up_a: &Chain,
        up_b: &Chain,
    ) -> Answer {
        let same = root_a == root_b;
        match (root_a, root_b) {
            (Parent::Cpu(_), Parent::Cpu(_)) if same => {
                let c2c = self.has_c2c(a) || self.has_c2c(b);
                Answer::Known(if c2c { Distance::P2c } else { Distance::Phb })
            }
            (Parent::Cpu(_), Parent::Cpu(_)) => Answer::Known(Distance::Sys),
            (Parent::Host(_), Parent::Host(_)) if same => {
                if up_a.bridges.is_empty() && up_b.bridges.is_empty() {
                    return Answer::Unknown {
                        candidates: [Distance::Pix, Distance::Pxb, Distance::Phb].to_vec(),
                        why: "the source shows the shared host bridge but no PCI bridges below it"
                            .to_string(),
                    };
                }
                Answer::Known(Distance::Phb)
            }
            _ => match (self.numa(a), self.numa(b)) {
                (Some(x), Some(y)) if x == y && x >= 0 => Answer::Known(Distance::Node),
                (Some(x), Some(y)) if x >= 0 && y >= 0 => Answer::Known(Distance::Sys),
                _ => Answer::Unknown {
                    candidates: [Distance::Node, Distance::Sys].to_vec(),
                    why: "different host bridges, and no NUMA node is known for both".to_string(),
                },
            },
        }
    }

    /// A listing without a tree still tells devices apart when every bridge sits on the root bus: then
    /// each leads to one bus, and devices on two buses are below two root ports.
    fn flat_but_apart(&self, a: Point<'_>, b: Point<'_>) -> Option<String> {
        let (a, b) = (self.bdf(a)?, self.bdf(b)?);
        if a.domain != b.domain || a.bus == b.bus || a.bus == 0 || b.bus == 0 {
            return None;
        }
        let is_bridge = |bdf: &Bdf| {
            let class = self.machine.pci.get(bdf).and_then(|device| device.class.known());
            class.is_some_and(|class| class >> 8 == 0x0604)
        };
        let mut bridges =
            self.machine.pci.keys().filter(|bdf| bdf.domain == a.domain && is_bridge(bdf));
        let mut count = 0;
        let on_root = bridges.by_ref().inspect(|_| count += 1).all(|bdf| bdf.bus == 0);
        (on_root && count >= 2).then(|| {
            "the listing has no tree, but all bridges are root ports, so the way crosses the root complex"
                .to_string()
        })
    }

    /// Number of PCIe switches on a path: as the tree has them, and with two-level switches of Broadcom
    /// counted once, as NCCL does.
    fn switches(&self, bridges: &[Bdf], common: Option<Bdf>) -> (u32, u32) {
        let mut nodes: Vec<Bdf> =
            bridges.iter().chain(&common).filter(|bdf| self.is_switch(**bdf)).copied().collect();
        nodes.sort_unstable();
        nodes.dedup();
        let raw = nodes.len();
        let folded = nodes.iter().filter(|bdf| self.folds_into_parent(**bdf, &nodes)).count();
        let as_count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        (as_count(raw), as_count(raw - folded))
    }

    /// Whether the bridge stands for a switch: a folded node, or an upstream port. Where the kind is not
    /// known, root port, upstream and downstream ports alternate from the root on.
    fn is_switch(&self, bdf: Bdf) -> bool {
        match self.machine.pci.get(&bdf).and_then(|device| device.port.known()) {
            Some(PortKind::Switch | PortKind::Upstream) => true,
            Some(_) => false,
            None => self.chain(Point::Pci(bdf)).bridges.len() % 2 == 1,
        }
    }

    /// NCCL's rule for two-level switches: same generation, the upper one's subsystem says level 0, the
    /// lower one's level 1 (fifth generation), or both carry the fourth generation's identifier.
    fn folds_into_parent(&self, bdf: Bdf, path: &[Bdf]) -> bool {
        let Some(device) = self.machine.pci.get(&bdf) else { return false };
        let Some(Parent::Bridge(parent)) = device.parent.known() else { return false };
        let Some(upper) = self.machine.pci.get(parent).filter(|_| path.contains(parent)) else {
            return false;
        };
        let (lower, upper) = (broadcom(device, 1), broadcom(upper, 0));
        lower.is_some() && lower == upper
    }

    fn has_c2c(&self, point: Point<'_>) -> bool {
        let Point::Gpu(index) = point else { return false };
        let gpu = self.machine.gpus.get(index);
        gpu.is_some_and(|gpu| gpu.links.iter().any(|link| link.value.kind == GpuLinkKind::C2c))
    }

    /// NUMA node of a device: its own, its CPU's in a topology file, or the nearest bridge's.
    pub fn numa(&self, point: Point<'_>) -> Option<i32> {
        let own = match point {
            Point::Gpu(index) => self.machine.gpus.get(index).and_then(|gpu| {
                gpu.attributes.get("numa").and_then(|fact| i32::try_from(fact.value).ok())
            }),
            Point::Nic(name) => {
                self.machine.nics.get(name).and_then(|nic| nic.numa.known().copied())
            }
            Point::Pci(_) => None,
        };
        if own.is_some() {
            return own;
        }
        let chain = self.chain(point);
        if let Some(Parent::Cpu(node)) = chain.root {
            return Some(node);
        }
        let mut ways = self.bdf(point).into_iter().chain(chain.bridges);
        ways.find_map(|bdf| self.machine.pci.get(&bdf)?.numa.known().copied())
    }

    /// Bandwidth from a device to its CPU, MB/s in one direction, and the bridge that limits it.
    pub fn to_cpu(&self, point: Point<'_>) -> Option<(u64, Bdf)> {
        let chain = self.chain(point);
        let ways = self.bdf(point).into_iter().chain(chain.bridges);
        ways.filter_map(|bdf| Some((self.machine.pci.get(&bdf)?.link.known()?.mb_per_s(), bdf)))
            .min()
    }

    fn narrowest(&self, ends: &[Option<Bdf>], sides: &[&[Bdf]]) -> Option<u64> {
        let ways = ends.iter().flatten().chain(sides.iter().copied().flatten());
        ways.filter_map(|bdf| Some(self.machine.pci.get(bdf)?.link.known()?.mb_per_s())).min()
    }

    /// Ports on the path whose ACS bits send peer traffic up to the root complex.
    pub fn redirecting(&self, path: &Path) -> Vec<(Bdf, Acs)> {
        let mut found: Vec<(Bdf, Acs)> = path
            .bridges
            .iter()
            .filter_map(|bdf| Some((*bdf, *self.machine.pci.get(bdf)?.acs.known()?)))
            .filter(|(_, acs)| acs.redirects())
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Bridges up from a device, nearest first, and what the topmost hangs off.
    pub fn chain(&self, point: Point<'_>) -> Chain {
        let mut chain = Chain { bridges: Vec::new(), root: None };
        let start = match point {
            Point::Nic(name) => {
                let nic = self.machine.nics.get(name);
                nic.and_then(|nic| match nic.bdf.known() {
                    Some(bdf) => self.machine.pci.get(bdf)?.parent.known(),
                    None => nic.parent.known(),
                })
            }
            _ => self.bdf(point).and_then(|bdf| self.machine.pci.get(&bdf)?.parent.known()),
        };
        let mut next = start;
        while let Some(parent) = next {
            match parent {
                Parent::Bridge(bdf) => {
                    if chain.bridges.len() >= CHAIN_MAX || chain.bridges.contains(bdf) {
                        return Chain { bridges: Vec::new(), root: None };
                    }
                    chain.bridges.push(*bdf);
                    next = self.machine.pci.get(bdf).and_then(|device| device.parent.known());
                }
                root => {
                    chain.root = Some(root.clone());
                    break;
                }
            }
        }
        chain
    }

    /// NICs of a GPU, nearest first, with those of unknown distance left out.
    pub fn nics_near(&self, gpu: usize) -> Vec<(&'m str, Distance)> {
        let mut near: Vec<(&'m str, Distance)> = self
            .machine
            .nics
            .keys()
            .take(DEVICES_MAX)
            .filter_map(|name| {
                let distance = self.distance(Point::Gpu(gpu), Point::Nic(name)).known()?;
                Some((name.as_str(), distance))
            })
            .collect();
        near.sort_by_key(|(name, distance)| (*distance, *name));
        near
    }

    /// Whether the sources can show ACS bits at all: a verbose listing or the live machine.
    pub fn acs_visible(&self) -> bool {
        let readable = self.machine.pci.values().any(|device| device.port.is_some());
        self.machine.has(&[Kind::Lspci, Kind::Live])
            && (readable || self.machine.pci.values().any(|device| device.acs.is_some()))
            && !self.machine.pci.values().any(|device| device.hidden.known() == Some(&true))
    }
}

/// Bridges above a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Nearest first.
    pub bridges: Vec<Bdf>,
    /// What the topmost bridge hangs off; `None` where the source does not say.
    pub root: Option<Parent>,
}

struct GpuKindCount {
    kind: GpuLinkKind,
    target: Option<Bdf>,
    to_switch: bool,
    count: u32,
}

impl From<&crate::facts::machine::GpuLink> for GpuKindCount {
    fn from(link: &crate::facts::machine::GpuLink) -> Self {
        let hidden = link.kind == GpuLinkKind::NvLink && link.target.is_none();
        Self {
            kind: link.kind,
            target: link.target,
            to_switch: link.target_class == 0x06_8000 || hidden,
            count: link.count,
        }
    }
}

/// Generation of a Broadcom switch at a level of its hierarchy.
fn broadcom(device: &crate::facts::PciDevice, level: u16) -> Option<u8> {
    let vendor = *device.vendor.known()?;
    let id = *device.device.known()?;
    let (sub_vendor, sub_device) = *device.subsystem.known()?;
    match (vendor, id, sub_vendor, sub_device >> 12) {
        (0x1000, 0xc010 | 0xc012, 0x1000, 0xa) => Some(4),
        (0x1000, 0xc030, 0x1000, nibble) if nibble == level => Some(5),
        _ => None,
    }
}

/// Bandwidth of one NVLink in one direction by compute capability, as copies reach it.
const fn nvlink_mb_per_s(sm: u32) -> Option<u64> {
    match sm {
        60..=69 => Some(18_000),
        70..=79 => Some(20_000),
        86..=89 => Some(12_000),
        80..=85 => Some(20_000),
        90..=99 => Some(20_600),
        100..=119 => Some(40_100),
        _ => None,
    }
}
