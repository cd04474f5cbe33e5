//! An open device with the port and the GID that are used, and its protection domains.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};

use beeline_core::mr::Lkey;
use beeline_core::plan::Importer;
use beeline_core::rc::{AttrLimits, Counters};
use beeline_core::roce::{Mtu, Qpn};
use beeline_sys::ibverbs as sys;
use rustix::event::epoll;

use super::super::AsyncEvent;
use super::super::soft::eventfd;
use super::cq::{Cq, Queues};
use super::mr::Region;
use super::{PortResolved, driver_error, stats};
use crate::error::{Error, Result};
use crate::{lock, read_lock};

/// Asynchronous events kept for the consumer at most; the oldest goes.
const EVENTS_MAX: usize = 1024;

/// What `rdma_rxe` says that its vendor is.
pub(super) const SOFT_ROCE_VENDOR: u32 = 0xff_ffff;

/// Address handles of one protection domain at most.
const HANDLES_MAX: usize = 1024;

/// Routers on the way at most.
const HOP_LIMIT: u8 = 64;

/// An open device.
#[derive(Debug)]
pub(in crate::verbs) struct Device {
    pub(super) context: Arc<sys::Context>,
    pub(super) attr: sys::DeviceAttr,
    pub(super) port: u8,
    pub(super) gid_index: u8,
    pub(in crate::verbs) local: IpAddr,
    pub(in crate::verbs) mtu: Mtu,
    pub(in crate::verbs) resolved: PortResolved,
    /// Regions by the key that work requests name them by.
    pub(super) regions: RwLock<HashMap<Lkey, Arc<Region>>>,
    /// Completion queues by the name that events name them by.
    pub(super) cqs: Mutex<HashMap<usize, Weak<Cq>>>,
    /// Queue pairs with a shared receive queue, by their number.
    pub(super) takers: Mutex<HashMap<u32, Weak<Queues>>>,
    events: Events,
    importer: OnceLock<Importer>,
}

/// Events that were taken from the kernel and not yet from here.
#[derive(Debug)]
struct Events {
    queue: Mutex<VecDeque<AsyncEvent>>,
    /// Readable while there are any.
    waiting: OwnedFd,
    /// Readable while `waiting` or the kernel's descriptor is.
    either: OwnedFd,
}

/// What is chosen of a device.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub(super) port: u8,
    pub(super) gid_index: u8,
    pub(super) gid: [u8; 16],
    pub(super) mtu: Mtu,
    pub(super) resolved: PortResolved,
}

impl Device {
    pub(super) fn new(context: Arc<sys::Context>, chosen: Chosen) -> Result<Arc<Self>> {
        let failed = |error| driver_error(context.name(), "ask for the limits", error);
        let attr = context.attributes().map_err(failed)?;
        let waiting = eventfd()?;
        let io = |error: rustix::io::Errno| Error::io("make an event descriptor", error.into());
        let either = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io)?;
        for (number, fd) in [context.async_fd(), waiting.as_fd()].into_iter().enumerate() {
            let data = epoll::EventData::new_u64(number as u64);
            epoll::add(&either, fd, data, epoll::EventFlags::IN).map_err(io)?;
        }
        let Chosen { port, gid_index, gid, mtu, resolved } = chosen;
        Ok(Arc::new(Self {
            context,
            attr,
            port,
            gid_index,
            local: address(gid),
            mtu,
            resolved,
            regions: RwLock::default(),
            cqs: Mutex::default(),
            takers: Mutex::default(),
            events: Events { queue: Mutex::default(), waiting, either },
            importer: OnceLock::new(),
        }))
    }

    pub(super) fn name(&self) -> &str {
        self.context.name()
    }

    pub(super) fn region(&self, lkey: Lkey) -> Option<Arc<Region>> {
        read_lock(&self.regions).get(&lkey).cloned()
    }

    /// What values of attributes may be.
    pub(super) fn attr_limits(&self) -> AttrLimits {
        let most = |value: u32| u8::try_from(value).unwrap_or(u8::MAX);
        AttrLimits {
            mtu: self.mtu,
            rd_atomic: most(self.attr.max_rd_atomic),
            dest_rd_atomic: most(self.attr.max_dest_rd_atomic),
            local: self.local,
        }
    }

    /// The way to a peer.
    pub(super) fn path(&self, peer: IpAddr) -> sys::AhAttr {
        let gid = gid_of(peer);
        sys::AhAttr { gid, gid_index: self.gid_index, port: self.port, hop_limit: HOP_LIMIT }
    }

    pub(in crate::verbs) fn poll_async(&self) -> Option<AsyncEvent> {
        self.take_events();
        let mut queue = lock(&self.events.queue);
        let event = queue.pop_front();
        if queue.is_empty() {
            let _ = rustix::io::read(&self.events.waiting, &mut [0; 8]);
        }
        event
    }

    pub(in crate::verbs) fn async_fd(&self) -> BorrowedFd<'_> {
        self.events.either.as_fd()
    }

    pub(in crate::verbs) fn counters(&self) -> Counters {
        stats::counters(self.name(), self.port)
    }

    /// Takes what the kernel has to tell. Bounded: what is more comes with the next call.
    pub(super) fn take_events(&self) {
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.context.next_event() else { return };
            let Some(event) = self.known(event) else { continue };
            let mut queue = lock(&self.events.queue);
            if queue.len() >= EVENTS_MAX {
                queue.pop_front();
            }
            queue.push_back(event);
            let _ = rustix::io::write(&self.events.waiting, &1u64.to_ne_bytes());
        }
    }

    /// `enum ibv_event_type`; `None` for what tells nothing here.
    fn known(&self, event: sys::Event) -> Option<AsyncEvent> {
        let qpn = Qpn::new(event.qpn);
        // A device has several ports, and this is about one of them.
        let ours = event.port == u32::from(self.port);
        Some(match event.kind {
            0 => {
                let cq = lock(&self.cqs).get(&event.object).and_then(Weak::upgrade);
                if let Some(cq) = cq {
                    cq.set_overrun();
                }
                AsyncEvent::CqError
            }
            1 => AsyncEvent::QpFatal(qpn),
            2 => AsyncEvent::QpRequestError(qpn),
            3 => AsyncEvent::QpAccessError(qpn),
            // Established, drained, migrated: nobody asked for it.
            4..=7 => return None,
            8 => AsyncEvent::DeviceFatal,
            9..=13 | 17..=18 if !ours => return None,
            9 => AsyncEvent::PortActive,
            10 => AsyncEvent::PortError,
            14 => AsyncEvent::SrqError,
            15 => AsyncEvent::SrqLimit,
            16 => {
                let taker = lock(&self.takers).get(&event.qpn).and_then(Weak::upgrade)?;
                taker.last.as_ref().filter(|last| last.reach())?;
                AsyncEvent::LastWqeReached(qpn)
            }
            18 => AsyncEvent::GidChange,
            other => AsyncEvent::Other(other),
        })
    }

    /// What the NIC and its driver can do with memory; asked once.
    pub(super) fn importer(&self, pd: &Arc<sys::Pd>) -> Importer {
        *self.importer.get_or_init(|| Importer {
            soft_roce: self.attr.vendor_id == SOFT_ROCE_VENDOR,
            dma_buf: pd.ask_dma_buf().raw_os_error()
                == Some(rustix::io::Errno::BADF.raw_os_error()),
            peer_memory: peer_memory(),
            on_demand: self.context.on_demand().unwrap_or(false),
            path_mtu: self.mtu.bytes(),
        })
    }
}

/// Whether a peer memory client of a GPU's driver is there.
fn peer_memory() -> bool {
    ["/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem", "/sys/kernel/mm/memory_peers/nv_mem"]
        .iter()
        .any(|path| std::path::Path::new(path).exists())
}

/// The address that a GID stands for.
pub(super) fn address(gid: [u8; 16]) -> IpAddr {
    let v6 = std::net::Ipv6Addr::from(gid);
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

/// The GID of an address.
pub(super) fn gid_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// A protection domain.
#[derive(Debug)]
pub(in crate::verbs) struct Pd {
    pub(in crate::verbs) device: Arc<Device>,
    pub(super) pd: Arc<sys::Pd>,
    /// Ways to peers, for datagrams.
    handles: Mutex<HashMap<IpAddr, Arc<sys::Ah>>>,
}

impl Pd {
    pub(in crate::verbs) fn new(device: &Arc<Device>) -> Result<Arc<Self>> {
        let made = sys::Pd::new(&device.context);
        let pd = made
            .map_err(|error| driver_error(device.name(), "allocate a protection domain", error))?;
        Ok(Arc::new(Self { device: Arc::clone(device), pd, handles: Mutex::default() }))
    }

    /// The address handle of a peer, made when it is first needed.
    pub(super) fn handle(&self, peer: IpAddr) -> Result<Arc<sys::Ah>> {
        let mut handles = lock(&self.handles);
        if let Some(handle) = handles.get(&peer) {
            return Ok(Arc::clone(handle));
        }
        let made = sys::Ah::new(&self.pd, self.device.path(peer));
        let made = made.map_err(|error| {
            driver_error(self.device.name(), &format!("find the way to {peer}"), error)
        })?;
        // Those in use live on with the work requests that use them.
        if handles.len() >= HANDLES_MAX {
            handles.clear();
        }
        let handle = Arc::new(made);
        handles.insert(peer, Arc::clone(&handle));
        Ok(handle)
    }
}
