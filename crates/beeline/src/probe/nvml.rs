//! Driver facts from NVML: links, peers, BAR1, MIG, distances. No context is created.
//!
//! Asking ([`ask`]) and understanding ([`facts`]) are apart: what the library answers is a plain record,
//! so every combination can be tested without a GPU.

use beeline_core::facts::{Bdf, Distance, Link, P2pStatus};
use beeline_sys::nvml::{Ancestor, Bar1, LinkEnd, Nvml, PcieLink, PeerCapability, PeerStatus};

use super::driver::{DriverDistance, DriverFacts, DriverGpu, DriverPeer};

/// GPUs that are asked, and links of each.
const GPUS_MAX: u32 = 128;
const LINKS_MAX: u32 = 36;

/// What the library answered.
#[derive(Clone, Debug, Default)]
struct Answers {
    driver: Option<String>,
    cuda: Option<i32>,
    gpus: Vec<Told>,
    pairs: Vec<Pair>,
}

/// What it answered about one GPU.
#[derive(Clone, Debug, Default)]
struct Told {
    number: u32,
    address: Option<String>,
    name: Option<String>,
    sm: Option<(i32, i32)>,
    bar1: Option<Bar1>,
    mig: Option<bool>,
    link: Option<PcieLink>,
    link_max: Option<PcieLink>,
    /// Active NVLinks: what is at the other end, and where.
    nvlinks: Vec<(Option<LinkEnd>, Option<String>)>,
}

/// What it answered about an ordered pair.
#[derive(Clone, Copy, Debug)]
struct Pair {
    from: u32,
    to: u32,
    read: Option<PeerStatus>,
    write: Option<PeerStatus>,
    ancestor: Option<Ancestor>,
}

/// What NVML says about the GPUs of this machine.
///
/// # Errors
/// Why there is no NVML, for a note.
pub(super) fn nvml_facts() -> Result<DriverFacts, String> {
    let nvml = Nvml::open(None).map_err(|error| error.to_string())?;
    Ok(facts(&ask(&nvml)))
}

fn ask(nvml: &std::sync::Arc<Nvml>) -> Answers {
    let count = nvml.device_count().min(GPUS_MAX);
    let devices: Vec<_> =
        (0..count).filter_map(|number| Some((number, nvml.device(number)?))).collect();
    let told = devices.iter().map(|(number, device)| Told {
        number: *number,
        address: device.pci_address(),
        name: device.name(),
        sm: device.compute_capability(),
        bar1: device.bar1(),
        mig: device.mig(),
        link: device.pcie_link(),
        link_max: device.pcie_link_max(),
        nvlinks: (0..LINKS_MAX)
            .filter(|link| device.nvlink_active(*link) == Some(true))
            .map(|link| (device.nvlink_remote_type(link), device.nvlink_remote(link)))
            .collect(),
    });
    let mut pairs = Vec::new();
    for (from, device) in &devices {
        for (to, peer) in devices.iter().filter(|(to, _)| to != from) {
            pairs.push(Pair {
                from: *from,
                to: *to,
                read: device.peer_status(peer, PeerCapability::READ),
                write: device.peer_status(peer, PeerCapability::WRITE),
                ancestor: device.common_ancestor(peer),
            });
        }
    }
    Answers {
        driver: nvml.driver_version(),
        cuda: nvml.cuda_version(),
        gpus: told.collect(),
        pairs,
    }
}

fn facts(answers: &Answers) -> DriverFacts {
    let gpus: Vec<DriverGpu> = answers.gpus.iter().filter_map(gpu).collect();
    let mut peers = Vec::new();
    let mut distances = Vec::new();
    for pair in &answers.pairs {
        let find = |number| gpus.iter().find(|gpu| gpu.index == number);
        let (Some(from), Some(to)) = (find(pair.from), find(pair.to)) else { continue };
        // A pair that can only read, or only write, is as good as its worse half.
        if let Some(status) = [pair.read, pair.write].into_iter().flatten().map(status).max() {
            peers.push(DriverPeer { from: from.index, to: to.index, status });
        }
        let linked = links_between(from, to);
        let nearest = if linked > 0 { Some(Distance::Nv(linked)) } else { pci(pair.ancestor) };
        if let Some(distance) = nearest {
            distances.push(DriverDistance { from: from.index, to: to.index, distance });
        }
    }
    DriverFacts {
        library: "NVML".to_owned(),
        driver_version: answers.driver.clone(),
        cuda_version: answers
            .cuda
            .filter(|version| *version >= 1000)
            .map(|version| format!("{}.{}", version / 1000, version % 1000 / 10)),
        gpus,
        peers,
        distances,
    }
}

/// A GPU without an address cannot be told from others, so it is left out.
fn gpu(told: &Told) -> Option<DriverGpu> {
    let bdf = Bdf::parse(told.address.as_deref()?)?;
    let sm = told.sm.and_then(|(major, minor)| {
        u32::try_from(major.checked_mul(10)?.checked_add(minor)?).ok().filter(|sm| *sm > 0)
    });
    let mut nvlinks: Vec<(Option<Bdf>, u32)> = Vec::new();
    for (end, address) in &told.nvlinks {
        let address = address.as_deref().and_then(Bdf::parse);
        let target = match *end {
            Some(LinkEnd::GPU) => match address {
                Some(address) => Some(address),
                None => continue,
            },
            // A switch joins everything that hangs on it; a guest sees neither its kind nor its
            // address.
            Some(LinkEnd::SWITCH) | None => None,
            // A link to a CPU reaches no GPU.
            Some(_) => continue,
        };
        match nvlinks.iter_mut().find(|(known, _)| *known == target) {
            Some((_, count)) => *count += 1,
            None => nvlinks.push((target, 1)),
        }
    }
    Some(DriverGpu {
        index: told.number,
        bdf,
        name: told.name.clone(),
        sm,
        bar1_bytes: told.bar1.map(|bar1| bar1.total).filter(|total| *total > 0),
        bar1_used: told.bar1.filter(|bar1| bar1.total > 0).map(|bar1| bar1.used),
        mig: told.mig,
        link: told.link.and_then(link),
        link_max: told.link_max.and_then(link),
        attributes: Vec::new(),
        nvlinks,
    })
}

/// Links that join two GPUs: their own, else those to a switch that both have.
fn links_between(a: &DriverGpu, b: &DriverGpu) -> u32 {
    let to = |gpu: &DriverGpu, target| {
        let found = gpu.nvlinks.iter().find(|(known, _)| *known == target);
        found.map_or(0, |(_, count)| *count)
    };
    let own = to(a, Some(b.bdf)).max(to(b, Some(a.bdf)));
    if own > 0 { own } else { to(a, None).min(to(b, None)) }
}

/// Speed by generation (PCI Express Base 8.2); an unknown generation says nothing.
fn link(raw: PcieLink) -> Option<Link> {
    let speed_100mt = match raw.generation {
        1 => 25,
        2 => 50,
        3 => 80,
        4 => 160,
        5 => 320,
        6 => 640,
        _ => return None,
    };
    (1..=32).contains(&raw.width).then_some(Link { speed_100mt, width: raw.width })
}

fn status(raw: PeerStatus) -> P2pStatus {
    match raw.0 {
        0 => P2pStatus::Ok,
        1 => P2pStatus::Chipset,
        2 => P2pStatus::Gpu,
        3 => P2pStatus::Topology,
        4 => P2pStatus::Disabled,
        5 => P2pStatus::NotSupported,
        _ => P2pStatus::Unknown,
    }
}

fn pci(raw: Option<Ancestor>) -> Option<Distance> {
    Some(match raw?.0 {
        // Two GPUs of one board hang off the switch on it.
        0 | 10 => Distance::Pix,
        20 => Distance::Pxb,
        30 => Distance::Phb,
        40 => Distance::Node,
        50 => Distance::Sys,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::driver::{add_driver_facts, reconcile};
    use super::*;
    use beeline_core::checks;
    use beeline_core::facts::{Known, Machine};
    use beeline_core::topology::{Point, Topology};

    /// Two GPUs of a guest: 18 links each to switches that the guest does not see.
    fn guest() -> Answers {
        let told = |number: u32, address: &str| Told {
            number,
            address: Some(address.to_owned()),
            name: Some("NVIDIA H200".to_owned()),
            sm: Some((9, 0)),
            bar1: Some(Bar1 { total: 256 << 30, used: 5 << 20 }),
            mig: Some(false),
            link: Some(PcieLink { generation: 5, width: 16 }),
            link_max: Some(PcieLink { generation: 5, width: 16 }),
            nvlinks: vec![(Some(LinkEnd::SWITCH), None); 18],
        };
        let ok = Some(PeerStatus(0));
        let pair = |from, to| Pair { from, to, read: ok, write: ok, ancestor: Some(Ancestor(50)) };
        Answers {
            driver: Some("580.95.05".to_owned()),
            cuda: Some(13000),
            gpus: vec![told(0, "0000:04:00.0"), told(1, "0000:05:00.0")],
            pairs: vec![pair(0, 1), pair(1, 0)],
        }
    }

    fn distance(answers: &Answers) -> Option<Distance> {
        let mut machine = Machine::new();
        add_driver_facts(&mut machine, &facts(answers));
        Topology::new(&machine).distance(Point::Gpu(0), Point::Gpu(1)).known()
    }

    #[test]
    fn the_matrix_is_that_of_nvidia_smi() {
        let mut answers = guest();
        assert_eq!(distance(&answers), Some(Distance::Nv(18)));
        // Direct links, of which one is down on one side's count.
        for (index, other) in ["0000:05:00.0", "0000:04:00.0"].into_iter().enumerate() {
            answers.gpus[index].nvlinks =
                vec![(Some(LinkEnd::GPU), Some(other.to_owned())); 4 - index];
        }
        assert_eq!(distance(&answers), Some(Distance::Nv(4)));
        // Links that lead elsewhere join nothing: then the way over PCI counts.
        for gpu in &mut answers.gpus {
            gpu.nvlinks = vec![(Some(LinkEnd(1)), Some("0000:00:01.0".to_owned())); 6];
        }
        for (level, expected) in [
            (0, Some(Distance::Pix)),
            (10, Some(Distance::Pix)),
            (20, Some(Distance::Pxb)),
            (30, Some(Distance::Phb)),
            (40, Some(Distance::Node)),
            (50, Some(Distance::Sys)),
            (60, None),
        ] {
            for pair in &mut answers.pairs {
                pair.ancestor = Some(Ancestor(level));
            }
            assert_eq!(distance(&answers), expected, "{level}");
        }
    }

    #[test]
    fn facts_reach_the_record_and_the_checks() {
        let mut machine = Machine::new();
        add_driver_facts(&mut machine, &facts(&guest()));
        let gpu = &machine.gpus[1];
        assert_eq!(gpu.bar1_bytes.known(), Some(&(256 << 30)));
        assert_eq!(gpu.bar1_used.known(), Some(&(5 << 20)));
        assert_eq!((gpu.mig.known(), gpu.sm.known()), (Some(&false), Some(&90)));
        let device = &machine.pci[gpu.bdf.known().unwrap()];
        assert_eq!(device.link.known().unwrap().to_string(), "32.0 GT/s x16");
        assert_eq!(machine.platform.driver.known().unwrap(), "580.95.05");
        assert_eq!(machine.platform.cuda.known().unwrap(), "13.0");
        let report = checks::run(&machine);
        assert_eq!(report.failures().count(), 0);
        assert_eq!(report.paths[0].level, checks::Level::Plausible);

        let mut refused = guest();
        refused.pairs[0].write = Some(PeerStatus(1));
        let mut machine = Machine::new();
        add_driver_facts(&mut machine, &facts(&refused));
        assert_eq!(checks::run(&machine).paths[0].level, checks::Level::Refused);
    }

    #[test]
    fn answers_of_no_use_and_of_later_versions_are_left_out() {
        let mut answers = guest();
        answers.gpus[0].address = None;
        answers.gpus[1].link = Some(PcieLink { generation: 9, width: 16 });
        answers.gpus[1].link_max = Some(PcieLink { generation: 4, width: 0 });
        answers.gpus[1].bar1 = Some(Bar1 { total: 0, used: 0 });
        answers.cuda = Some(0);
        let facts = facts(&answers);
        assert_eq!(facts.gpus.len(), 1);
        assert_eq!((facts.gpus[0].link, facts.gpus[0].link_max), (None, None));
        assert_eq!((facts.gpus[0].bar1_bytes, facts.gpus[0].bar1_used), (None, None));
        assert!(facts.peers.is_empty() && facts.cuda_version.is_none());
        assert_eq!(status(PeerStatus(99)), P2pStatus::Unknown);
        assert_eq!(status(PeerStatus(4)), P2pStatus::Disabled);
        assert_eq!(status(PeerStatus(5)), P2pStatus::NotSupported);
        assert!(super::facts(&Answers::default()).gpus.is_empty());
    }

    #[test]
    fn a_second_library_takes_the_numbers_of_the_first_and_keeps_its_reasons() {
        let mut first = guest();
        first.pairs[0].read = Some(PeerStatus(1));
        let first = facts(&first);
        // CUDA sees one device only, as number 0 (CUDA_VISIBLE_DEVICES=1).
        let mut second = facts(&guest());
        second.gpus.remove(0);
        second.gpus[0].index = 0;
        second.peers.clear();
        let merged = reconcile(&first, second);
        assert_eq!(merged.gpus[0].index, 1);

        let mut second = facts(&guest());
        for peer in &mut second.peers {
            peer.status = P2pStatus::NotSupported;
        }
        let merged = reconcile(&first, second);
        // 0 -> 1 has its reason already; 1 -> 0 was fine by NVML, and CUDA refuses it.
        let left: Vec<(u32, u32)> = merged.peers.iter().map(|p| (p.from, p.to)).collect();
        assert_eq!(left, [(1, 0)]);
    }

    #[test]
    fn without_the_library_there_is_a_reason() {
        match nvml_facts() {
            Ok(facts) => assert_eq!(facts.library, "NVML"),
            Err(text) => assert!(!text.is_empty()),
        }
    }
}
