//! Facts that only drivers know, merged into a record that files made.
//!
//! This is the seam between gathering and the driver libraries: whoever can call NVML, CUDA or ibverbs
//! fills in [`DriverFacts`]. Without them everything else works.

use beeline_core::facts::machine::{GpuLink, GpuLinkKind, P2pCell};
use beeline_core::facts::{
    Bdf, Cell, Distance, Endpoint, Fact, Kind, Known, Link, Machine, Origin, P2pStatus, Source,
};

/// What the driver libraries said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFacts {
    /// Library that answered, such as `NVML` or `CUDA driver`.
    pub library: String,
    /// Driver version.
    pub driver_version: Option<String>,
    /// CUDA version that the driver supports.
    pub cuda_version: Option<String>,
    /// GPUs.
    pub gpus: Vec<DriverGpu>,
    /// Peer access between ordered pairs.
    pub peers: Vec<DriverPeer>,
    /// Distances between ordered pairs.
    pub distances: Vec<DriverDistance>,
}

/// One GPU as a driver library describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverGpu {
    /// The driver's number.
    pub index: u32,
    /// PCI address.
    pub bdf: Bdf,
    /// Product name.
    pub name: Option<String>,
    /// Compute capability times ten.
    pub sm: Option<u32>,
    /// Size of BAR1 in bytes.
    pub bar1_bytes: Option<u64>,
    /// Bytes of BAR1 in use.
    pub bar1_used: Option<u64>,
    /// PCI Express link as it runs now.
    pub link: Option<Link>,
    /// The fastest link it can do.
    pub link_max: Option<Link>,
    /// MIG mode is on.
    pub mig: Option<bool>,
    /// Device attributes by their CUDA names without prefix, such as `DMA_BUF_SUPPORTED`.
    pub attributes: Vec<(String, i64)>,
    /// Active NVLinks by target; `None` where the target is a switch that a guest does not see.
    pub nvlinks: Vec<(Option<Bdf>, u32)>,
}

/// Peer access from one GPU to another's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverPeer {
    /// The GPU that accesses.
    pub from: u32,
    /// The GPU that owns the memory.
    pub to: u32,
    /// What the driver says.
    pub status: P2pStatus,
}

/// How far two GPUs are apart, by the driver's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverDistance {
    /// The driver's number of one.
    pub from: u32,
    /// The driver's number of the other.
    pub to: u32,
    /// As `nvidia-smi topo -m` prints it.
    pub distance: Distance,
}

/// `second` with the numbers that `first` gives the same GPUs, and of its peers only those that say
/// something new: a pair that `first` lacks, or that it allows and `second` refuses.
pub(super) fn reconcile(first: &DriverFacts, mut second: DriverFacts) -> DriverFacts {
    let renumbered: Vec<(u32, u32)> = second
        .gpus
        .iter()
        .map(|gpu| {
            let same = first.gpus.iter().find(|known| known.bdf == gpu.bdf);
            (gpu.index, same.map_or(gpu.index, |known| known.index))
        })
        .collect();
    let number = |old: u32| {
        renumbered.iter().find(|(from, _)| *from == old).map_or(old, |(_, number)| *number)
    };
    for gpu in &mut second.gpus {
        gpu.index = number(gpu.index);
    }
    for peer in &mut second.peers {
        (peer.from, peer.to) = (number(peer.from), number(peer.to));
    }
    second.peers.retain(|peer| {
        let known = first.peers.iter().find(|p| (p.from, p.to) == (peer.from, peer.to));
        known.is_none_or(|known| known.status == P2pStatus::Ok && peer.status != P2pStatus::Ok)
    });
    second
}

/// Adds driver facts to `machine`. Facts of files that say the same thing stay; names of products and
/// numbers of GPUs come from the driver.
pub fn add_driver_facts(machine: &mut Machine, facts: &DriverFacts) {
    let number = u16::try_from(machine.sources.len()).unwrap_or(u16::MAX);
    let at = Origin { source: number, line: 0 };
    machine.sources.push(Source {
        kind: Kind::Live,
        name: facts.library.clone(),
        lines: 0,
        truncated: false,
    });
    if let Some(version) = &facts.driver_version {
        machine.platform.driver.learn(version.clone(), at);
    }
    if let Some(version) = &facts.cuda_version {
        machine.platform.cuda.learn(version.clone(), at);
    }
    for described in &facts.gpus {
        let gpu = machine.gpu_at(described.bdf, at);
        gpu.index = None;
        gpu.index.learn(described.index, at);
        gpu.numbering_assumed = false;
        if let Some(name) = &described.name {
            gpu.name = Some(Fact { value: name.clone(), origin: at });
        }
        if let Some(sm) = described.sm {
            gpu.sm.learn(sm, at);
        }
        if let Some(bytes) = described.bar1_bytes {
            gpu.bar1_bytes.learn(bytes, at);
        }
        if let Some(bytes) = described.bar1_used {
            gpu.bar1_used.learn(bytes, at);
        }
        if let Some(mig) = described.mig {
            gpu.mig.learn(mig, at);
        }
        for (name, value) in described.attributes.iter().take(1024) {
            gpu.attributes.entry(name.clone()).or_insert(Fact { value: *value, origin: at });
        }
        if gpu.links.is_empty() {
            let links = described.nvlinks.iter().take(256).map(|(target, count)| GpuLink {
                kind: GpuLinkKind::NvLink,
                target: *target,
                target_class: 0,
                count: *count,
                mb_per_s: None,
            });
            gpu.links = links.map(|value| Fact { value, origin: at }).collect();
        }
        let device = machine.pci_at(described.bdf);
        if let Some(link) = described.link {
            device.link.learn(link, at);
        }
        if let Some(link) = described.link_max {
            device.link_max.learn(link, at);
        }
    }
    let peers = facts.peers.iter().take(65_536).map(|peer| P2pCell {
        from: peer.from,
        to: peer.to,
        status: peer.status,
    });
    machine.p2p.extend(peers.map(|value| Fact { value, origin: at }));
    let cells = facts.distances.iter().take(65_536).map(|pair| Cell {
        from: Endpoint::Gpu(pair.from),
        to: Endpoint::Gpu(pair.to),
        distance: pair.distance,
    });
    machine.matrix.extend(cells.map(|value| Fact { value, origin: at }));
    machine.unify();
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_core::checks;
    use beeline_core::topology::{Point, Topology};

    #[test]
    fn a_guest_with_hidden_switches_gets_its_links_from_the_driver() {
        let gpu = |index: u32, bdf: &str| DriverGpu {
            index,
            bdf: bdf.parse().unwrap(),
            name: Some("NVIDIA H200".to_owned()),
            sm: Some(90),
            bar1_bytes: Some(256 << 30),
            bar1_used: None,
            link: None,
            link_max: None,
            mig: Some(false),
            attributes: vec![("DMA_BUF_SUPPORTED".to_owned(), 1)],
            nvlinks: vec![(None, 18)],
        };
        let peer = |from, to| DriverPeer { from, to, status: P2pStatus::Ok };
        let facts = DriverFacts {
            library: "NVML".to_owned(),
            driver_version: Some("580.95.05".to_owned()),
            cuda_version: Some("13.0".to_owned()),
            gpus: vec![gpu(0, "0000:04:00.0"), gpu(1, "0000:05:00.0")],
            peers: vec![peer(0, 1), peer(1, 0)],
            distances: Vec::new(),
        };
        let mut machine = Machine::new();
        add_driver_facts(&mut machine, &facts);
        let topology = Topology::new(&machine);
        let distance = topology.distance(Point::Gpu(0), Point::Gpu(1));
        assert_eq!(distance.known(), Some(Distance::Nv(18)));
        let report = checks::run(&machine);
        assert_eq!(report.failures().count(), 0);
        assert_eq!(report.paths[0].level, checks::Level::Plausible);
    }
}
