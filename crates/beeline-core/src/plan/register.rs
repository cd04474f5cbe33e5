//! Ways to register memory with a NIC whose driver is in the kernel.
//!
//! What the kernel would answer is decided before it is asked, and so is what it would answer wrongly: the
//! soft RoCE of Linux 7.3 accepts on-demand regions and then puts each packet at the start of its page.
//! The rig's test `memory` asks the kernel; its answers are compared with this plan.

use alloc::format;
use core::fmt;

use super::{Choice, Level, Plan, Rejected};
use crate::reason::{Code, Reason};

/// What stands behind the addresses of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Anonymous memory, or a memory file: pages of the kernel's own.
    Ordinary,
    /// The mapping of a dma-buf (`udmabuf`, a driver's): page frames without pages to pin.
    DmaBufMapping,
    /// Memory of a PCI device that its driver offers for peer-to-peer DMA (an NVMe controller's).
    Controller,
    /// Memory of a GPU, named by a pointer of its driver's.
    Gpu,
}

/// A way to register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RegisterRoute {
    /// The pages are pinned for as long as the region lives (`ibv_reg_mr`).
    Pinned,
    /// The driver imports the dma-buf (`ibv_reg_dmabuf_mr`).
    DmaBuf,
    /// The GPU driver's peer memory client pins it (`ibv_reg_mr` on a device pointer).
    PeerMemory,
    /// Pages are faulted in when they are accessed (`IBV_ACCESS_ON_DEMAND`).
    OnDemand,
}

impl RegisterRoute {
    /// Every route, simplest first.
    pub const ALL: [Self; 4] = [Self::Pinned, Self::DmaBuf, Self::PeerMemory, Self::OnDemand];

    /// The name as the command line and JSON write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::DmaBuf => "dma-buf",
            Self::PeerMemory => "peer-memory",
            Self::OnDemand => "on-demand",
        }
    }
}

impl fmt::Display for RegisterRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What registers: a NIC with its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Importer {
    /// The driver is Linux's soft RoCE (`rdma_rxe`).
    pub soft_roce: bool,
    /// The driver imports dma-bufs.
    pub dma_buf: bool,
    /// A peer memory client of the GPU's driver is there (`nvidia_peermem`).
    pub peer_memory: bool,
    /// The device has on-demand regions (`ODP_SUPPORT`).
    pub on_demand: bool,
    /// Path MTU of the connections that will use the region, in bytes.
    pub path_mtu: u32,
}

/// Memory that is to be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// What stands behind it.
    pub pages: Pages,
    /// It starts on a page.
    pub page_aligned: bool,
    /// A dma-buf of it can be had.
    pub has_dma_buf: bool,
}

/// Size of the pages that soft RoCE faults in, in bytes.
const PAGE_BYTES: u32 = 4096;

/// Plans a registration. Routes that the memory cannot take at all (no dma-buf of it) are left out.
pub fn register(wanted: &Wanted, importer: &Importer) -> Plan<RegisterRoute> {
    let mut plan = Plan { choices: alloc::vec![], rejected: alloc::vec![] };
    for route in RegisterRoute::ALL {
        let gpu = wanted.pages == Pages::Gpu;
        let possible = match route {
            RegisterRoute::DmaBuf => wanted.has_dma_buf,
            RegisterRoute::PeerMemory => gpu,
            RegisterRoute::Pinned | RegisterRoute::OnDemand => !gpu,
        };
        if !possible {
            continue;
        }
        let refused = match route {
            RegisterRoute::Pinned => pinned(wanted.pages),
            RegisterRoute::DmaBuf => (!importer.dma_buf).then(|| {
                Reason::with(Code::DmabufUnsupported, "the driver has no dma-buf registration")
            }),
            RegisterRoute::PeerMemory => {
                (!importer.peer_memory).then(|| Reason::new(Code::PeermemAbsent))
            }
            RegisterRoute::OnDemand => on_demand(wanted, importer),
        };
        match refused {
            Some(why) => plan.rejected.push(Rejected { route, why }),
            None => {
                let why = Reason::new(Code::Preferred);
                plan.choices.push(Choice { route, level: Level::Plausible, why });
            }
        }
    }
    if let [only] = &mut plan.choices[..] {
        only.why = Reason::new(Code::OnlyRoute);
    }
    plan
}

/// Long-term pinning takes pages that may stay where they are for good (pin_user_pages(FOLL_LONGTERM)).
fn pinned(pages: Pages) -> Option<Reason> {
    let what = match pages {
        Pages::Ordinary => return None,
        Pages::Gpu => "memory of a GPU has no pages of the host's",
        Pages::DmaBufMapping => "the mapping of a dma-buf has frames, and no pages to pin",
        Pages::Controller => "pages of a PCI device cannot be pinned for long",
    };
    Some(Reason::with(Code::PagesNotPinnable, format!("{what}: EFAULT")))
}

fn on_demand(wanted: &Wanted, importer: &Importer) -> Option<Reason> {
    if !importer.on_demand {
        return Some(Reason::new(Code::OnDemandUnsupported));
    }
    if wanted.pages == Pages::DmaBufMapping {
        let what = "registered, but every access fails: frames without pages cannot be faulted in";
        return Some(Reason::with(Code::PagesNotPinnable, what));
    }
    if importer.soft_roce && (importer.path_mtu != PAGE_BYTES || !wanted.page_aligned) {
        let what = format!(
            "path MTU {}{}; right are only 4096 and memory that starts on a page",
            importer.path_mtu,
            if wanted.page_aligned { "" } else { ", memory inside a page" }
        );
        return Some(Reason::with(Code::OnDemandOffset, what));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = include_str!("../../../../rig/logs/memory.txt");

    fn field<'a>(line: &'a str, name: &str) -> &'a str {
        let found = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("{name} in {line}"))
    }

    /// What the kernel answered, and what became of the bytes, where the plan says this.
    fn predicted(plan: &Plan<RegisterRoute>, route: RegisterRoute) -> (&'static str, &'static str) {
        match plan.rejection(route).map(|why| (why.code, route)) {
            None => ("registered", "equal"),
            Some((Code::PagesNotPinnable, RegisterRoute::Pinned)) => ("errno-14", "none"),
            Some((Code::DmabufUnsupported, _)) => ("errno-95", "none"),
            // Accepted by the kernel, and refused here because it then goes wrong.
            Some((Code::PagesNotPinnable, _)) => ("registered", "refused"),
            Some((Code::OnDemandOffset, _)) => ("registered", "wrong"),
            Some((code, _)) => panic!("{code}"),
        }
    }

    #[test]
    fn the_plan_predicts_what_the_kernel_answers() {
        let mut seen = 0;
        for line in LOG.lines().filter(|line| line.starts_with("memory kind=")) {
            let pages = match field(line, "kind") {
                "ram" | "memory-file" => Pages::Ordinary,
                "udmabuf" => Pages::DmaBufMapping,
                "controller-memory" => Pages::Controller,
                other => panic!("{other}"),
            };
            let way = field(line, "way");
            let route = RegisterRoute::ALL.into_iter().find(|route| route.as_str() == way).unwrap();
            let wanted =
                Wanted { pages, page_aligned: true, has_dma_buf: pages == Pages::DmaBufMapping };
            let path_mtu = field(line, "mtu").parse().unwrap();
            let importer = Importer {
                soft_roce: true,
                dma_buf: false,
                peer_memory: false,
                on_demand: true,
                path_mtu,
            };
            let plan = register(&wanted, &importer);
            let answered = (field(line, "answer"), field(line, "data"));
            assert_eq!(answered, predicted(&plan, route), "{line}");
            seen += 1;
        }
        assert_eq!(seen, 17, "four kinds, each way, each path MTU");
    }

    #[test]
    fn a_nic_that_has_everything_is_refused_nothing_but_what_cannot_be() {
        let nic = Importer {
            soft_roce: false,
            dma_buf: true,
            peer_memory: true,
            on_demand: true,
            path_mtu: 1024,
        };
        let wanted = |pages| Wanted { pages, page_aligned: false, has_dma_buf: true };
        let routes = |pages, nic: &Importer| {
            let plan = register(&wanted(pages), nic);
            plan.choices.iter().map(|choice| choice.route).collect::<alloc::vec::Vec<_>>()
        };
        use RegisterRoute::{DmaBuf, OnDemand, PeerMemory, Pinned};
        assert_eq!(routes(Pages::Ordinary, &nic), [Pinned, DmaBuf, OnDemand]);
        assert_eq!(routes(Pages::Controller, &nic), [DmaBuf, OnDemand]);
        assert_eq!(routes(Pages::DmaBufMapping, &nic), [DmaBuf]);
        assert_eq!(routes(Pages::Gpu, &nic), [DmaBuf, PeerMemory]);
        let plain = Importer { dma_buf: false, on_demand: false, ..nic };
        assert!(routes(Pages::DmaBufMapping, &plain).is_empty());
        assert_eq!(routes(Pages::Gpu, &plain), [PeerMemory]);
        let none = register(&wanted(Pages::Gpu), &Importer { peer_memory: false, ..plain });
        let codes: alloc::vec::Vec<_> = none.rejected.iter().map(|one| one.why.code).collect();
        assert_eq!(codes, [Code::DmabufUnsupported, Code::PeermemAbsent]);
    }
}
