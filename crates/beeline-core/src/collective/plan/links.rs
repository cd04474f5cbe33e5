//! What joins the GPUs of a machine, for collectives: the plan of every pair, and the slowest.

use alloc::vec::Vec;

use super::{Link, Ranks};
use crate::checks::Context;
use crate::plan::{self, DeviceRoute, End, Mode};
use crate::reason::{Code, Reason};
use crate::topology::{Answer, Point, Topology};

/// Two GPUs, by their positions in the record, and what joins them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// One.
    pub a: usize,
    /// The other.
    pub b: usize,
    /// How far they are apart.
    pub distance: Answer,
    /// What joins them.
    pub link: Link,
}

/// Every pair of the first `count` GPUs of a machine.
pub fn pairs(context: &Context<'_>, topology: &Topology<'_>, count: usize) -> Vec<Pair> {
    let wanted = topology.gpu_pairs().filter(|(a, b)| *a < count && *b < count);
    wanted.map(|(a, b)| pair(context, topology, a, b)).collect()
}

fn pair(context: &Context<'_>, topology: &Topology<'_>, a: usize, b: usize) -> Pair {
    let plan = plan::device(context, End::Gpu(a), End::Gpu(b), Mode::Auto);
    let stated = topology.mb_per_s(Point::Gpu(a), Point::Gpu(b));
    let open = |route| plan.choices.iter().any(|choice| choice.route == route);
    let link = if open(DeviceRoute::GpuLink) {
        // The copy engine reaches a little more than what topology files count a link as.
        let mb_per_s =
            stated.map_or(super::MEASURED_MB_PER_S, |rate| rate.saturating_mul(1055) / 1000);
        Link::Fabric { mb_per_s }
    } else if open(DeviceRoute::PciPeer) {
        Link::Pci { mb_per_s: stated.map_or(PCI_MB_PER_S, |rate| rate.saturating_mul(8) / 10) }
    } else {
        let why = plan.rejection(DeviceRoute::PciPeer).or(plan.rejection(DeviceRoute::GpuLink));
        Link::None(why.cloned().unwrap_or(Reason::new(Code::PathUnknown)))
    };
    Pair { a, b, distance: topology.distance(Point::Gpu(a), Point::Gpu(b)), link }
}

/// PCIe 4.0 x16, where no source states the link.
const PCI_MB_PER_S: u64 = 21_000;

/// The ranks of a communicator over these pairs; the slowest pair decides.
pub fn ranks(count: u32, pairs: &[Pair]) -> Ranks {
    let key = |link: &Link| match link {
        Link::None(_) => (0, 0),
        Link::Pci { mb_per_s } => (1, *mb_per_s),
        Link::Fabric { mb_per_s } => (2, *mb_per_s),
        Link::Same => (3, 0),
    };
    let slowest = pairs.iter().map(|pair| &pair.link).min_by_key(|link| key(link));
    let slowest = slowest.cloned().unwrap_or(Link::Same);
    Ranks { slowest, ..Ranks::like_h200(count) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Machine, read};

    /// A topology file of `gpus` GPUs on one switch, each with NVLinks to all others where `links` is not 0.
    fn machine(gpus: u32, links: u32) -> Machine {
        use alloc::format;
        use alloc::string::String;
        let bus = |gpu: u32| format!("0000:{:02x}:00.0", 0x10 + gpu);
        let one = |gpu: u32| {
            let peers = (0..gpus).filter(|peer| *peer != gpu && links > 0);
            let links: String = peers
                .map(|peer| {
                    format!(r#"<nvlink target="{}" count="{links}" tclass="0x030200"/>"#, bus(peer))
                })
                .collect();
            format!(
                r#"<pci busid="{}" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
                   <gpu dev="{gpu}" sm="90" rank="{gpu}" gdr="1">{links}</gpu></pci>"#,
                bus(gpu)
            )
        };
        let list: String = (0..gpus).map(one).collect();
        let text = format!(
            r#"<system version="1"><cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
               <pci busid="0000:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">{list}</pci></cpu></system>"#
        );
        let mut machine = Machine::new();
        read(&mut machine, "topology.xml", text.as_bytes()).unwrap();
        machine.unify();
        machine
    }

    #[test]
    fn links_of_a_topology_file_decide() {
        for (links, fabric) in [(18, true), (0, false)] {
            let machine = machine(4, links);
            let all = pairs(&Context::new(&machine), &Topology::new(&machine), 3);
            assert_eq!(all.len(), 3, "three GPUs, three pairs");
            for pair in &all {
                assert_eq!(matches!(pair.link, Link::Fabric { .. }), fabric, "{pair:?}");
            }
            let ranks = ranks(3, &all);
            assert_eq!(ranks.count, 3);
            if let Link::Fabric { mb_per_s } = ranks.slowest {
                assert!((380_000..400_000).contains(&mb_per_s), "{mb_per_s}");
            }
        }
        assert_eq!(ranks(1, &[]).slowest, Link::Same);
    }

    #[test]
    fn the_slowest_pair_decides() {
        let pair =
            |link| Pair { a: 0, b: 1, distance: Answer::Known(crate::facts::Distance::Sys), link };
        let none = Link::None(Reason::new(Code::P2pNotCapable));
        let order = [
            none,
            Link::Pci { mb_per_s: 10 },
            Link::Pci { mb_per_s: 20 },
            Link::Fabric { mb_per_s: 5 },
            Link::Fabric { mb_per_s: 50 },
        ];
        for (place, link) in order.iter().enumerate() {
            let all: Vec<Pair> = order.iter().skip(place).rev().cloned().map(pair).collect();
            assert_eq!(ranks(2, &all).slowest, *link);
        }
    }
}
