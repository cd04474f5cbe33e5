//! RDMA verbs: the nine steps of every RDMA program, over a NIC in software or one of the kernel's.
//!
//! 1. **Context**: [`Nic::soft`] or [`Nic::ibv`], then [`Nic::open`].
//! 2. **Protection domain**: [`Context::alloc_pd`].
//! 3. **Completion queue**: [`Context::create_cq`].
//! 4. **Queue pair**: [`Pd::create_qp`].
//! 5. **Exchange of identifiers**: [`Qp::endpoint`] goes to the peer by any means, the peer's comes back.
//! 6. **RESET -> INIT -> RTR -> RTS**: [`Qp::modify`], or [`Qp::connect`] for all of them.
//! 7. **Memory region**: [`Pd::reg_mr`].
//! 8. **Exchange of memory**: [`Mr::remote`] to the peer.
//! 9. **Work requests**: [`Qp::post_send`], [`Qp::post_recv`], [`Cq::poll`].
//!
//! [`Nic::soft`] speaks RoCEv2 on the wire: its peer may be another software NIC, Linux `rdma_rxe` or
//! hardware. One software NIC is one local address. [`Nic::ibv`] opens a NIC that the kernel has a driver for,
//! through libibverbs, which is loaded when it is asked for.

mod alarm;
mod exchange;
mod ibv;
mod lane;
mod lent;
mod link;
mod memory;
mod mover;
mod objects;
mod peer;
mod soft;
mod stage;

#[cfg(test)]
mod gpu_tests;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use beeline_core::mr::Secret;
use beeline_core::rc::Config;

pub use beeline_core::mr::{Access, Lkey, MemoryKind, Rkey};
pub use beeline_core::rc::{
    Completion, CompletionOp, Counters, Destination, GRH_LEN, MemFault, Notify, Payload, QpAttr,
    QpKind, QpState, RecvWr, Remote, SendOp, SendWr, Sge, Status,
};
pub use beeline_core::roce::{Mtu, Psn, Qpn, RnrTimer, Strength};
pub use beeline_sys::mem::HostMem;

pub use exchange::{Connect, Endpoint, RemoteMemory};
pub use ibv::{IbvNic, IbvOptions, NicInfo, PortInfo, PortResolved};
pub use link::{Faults, LinkKind, NoSegmentation, Segmentation};
pub use memory::{DeviceMemory, Memory};
pub use objects::{AsyncEvent, Context, Cq, Mr, MrResolved, Pd, Qp, QpCaps, Resolved, Srq};

use self::link::{FaultLink, Link, LocalLink, PairLink, Pcap, UdpLink};
use self::objects::NicRef;
use self::soft::Soft;
pub(crate) use self::soft::random;
use crate::error::{Error, Result};

/// A NIC.
#[derive(Debug)]
#[non_exhaustive]
pub enum Nic {
    /// In software: RoCEv2 from user space.
    Soft(SoftNic),
    /// One of the kernel's, through libibverbs.
    Ibv(IbvNic),
}

/// A running software NIC.
#[derive(Debug)]
pub struct SoftNic {
    soft: Arc<Soft>,
}

/// How a software NIC is set up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SoftOptions {
    /// Its one address; it must be this machine's.
    pub local: IpAddr,
    /// Which link; `None` takes the raw socket where it is allowed, else the UDP socket.
    pub link: Option<LinkKind>,
    /// Largest path MTU; `None` takes what the interface allows.
    pub mtu: Option<Mtu>,
    /// Packets of one queue pair outstanding at most.
    pub window_packets: u32,
    /// A bad network on the sending side.
    pub faults: Option<Faults>,
    /// Where to write a trace of all packets.
    pub pcap: Option<PathBuf>,
    /// Whether several packets go to the kernel as one piece; `None` where that is exact, see
    /// [`Segmentation`]. `Some(true)` extends it to IPv4 peers off loopback.
    pub segmentation: Option<bool>,
}

impl SoftOptions {
    /// The usual set-up for an address.
    pub const fn new(local: IpAddr) -> Self {
        Self {
            local,
            link: None,
            mtu: None,
            window_packets: 128,
            faults: None,
            pcap: None,
            segmentation: None,
        }
    }

    /// The link to use.
    #[must_use]
    pub const fn link(mut self, link: LinkKind) -> Self {
        self.link = Some(link);
        self
    }

    /// The largest path MTU.
    #[must_use]
    pub const fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// A bad network on the sending side.
    #[must_use]
    pub const fn faults(mut self, faults: Faults) -> Self {
        self.faults = Some(faults);
        self
    }

    /// Where to write a trace of all packets.
    #[must_use]
    pub fn pcap(mut self, path: impl Into<PathBuf>) -> Self {
        self.pcap = Some(path.into());
        self
    }

    /// Whether several packets go to the kernel as one piece.
    #[must_use]
    pub const fn segmentation(mut self, wanted: bool) -> Self {
        self.segmentation = Some(wanted);
        self
    }
}

impl Nic {
    /// Starts a software NIC.
    ///
    /// # Errors
    /// `is_refused` where the address is taken (code `address-in-use`) or not this machine's; `is_io`
    /// and `is_permission_denied` with what the kernel said.
    pub fn soft(options: SoftOptions) -> Result<Self> {
        match options.link {
            Some(LinkKind::Pair) => {
                return Err(Error::refused("a pair has two ends").remedy("use Nic::pair"));
            }
            Some(LinkKind::Local) => {
                let error = Error::refused("a local NIC is joined through a Unix socket");
                return Err(error.remedy("use Nic::local"));
            }
            Some(LinkKind::Kernel) => {
                let error = Error::refused("a NIC of the kernel's is none in software");
                return Err(error.remedy("use Nic::ibv"));
            }
            _ => {}
        }
        if options.mtu.is_some_and(|mtu| mtu > Mtu::MAX) {
            return Err(Error::refused(format!("no wire has an MTU above {}", Mtu::MAX)));
        }
        let traced = options.pcap.is_some();
        let segmentation = Segmentation::of(options.local, options.segmentation, traced);
        let link = Link::Udp(UdpLink::open(options.local, options.link, segmentation)?);
        let mtu = match options.mtu {
            Some(mtu) => mtu,
            None => soft::interface_mtu(options.local)?,
        };
        start(options, link, mtu)
    }

    /// Starts two software NICs that are joined in memory.
    ///
    /// # Errors
    /// `is_io` where descriptors or threads are used up.
    pub fn pair(first: SoftOptions, second: SoftOptions) -> Result<(Self, Self)> {
        let (a, b) = PairLink::new().map_err(|error| Error::io("make a pair of links", error))?;
        let mtu = |options: &SoftOptions| options.mtu.unwrap_or(Mtu::MAX);
        let (mtu_a, mtu_b) = (mtu(&first), mtu(&second));
        Ok((start(first, Link::Pair(a), mtu_a)?, start(second, Link::Pair(b), mtu_b)?))
    }

    /// Starts a software NIC that is joined to one other process of this host by shared memory.
    ///
    /// `socket` is one end of a stream whose other end the other process passes to this function at the
    /// same time; both wait for each other, up to 10 s. The NIC has one peer, and an address that means
    /// something to the two alone. Memory made by `HostMem::shareable` moves straight from one process
    /// to the other; the peer can read all of it from when it is registered until it is deregistered,
    /// and writes only what its keys allow. Other memory goes through a bounded ring.
    ///
    /// There is no datagram service, and a READ is waited for by what is posted behind it.
    ///
    /// # Errors
    /// `is_io` and `is_refused` where the other side does not join.
    pub fn local(socket: UnixStream) -> Result<Self> {
        let link = LocalLink::join(socket)?;
        let options = SoftOptions::new(link.local());
        start(options, Link::Local(link), Mtu::LOCAL)
    }

    /// Opens the NIC: the first of the nine steps.
    pub fn open(&self) -> Context {
        match self {
            Self::Soft(nic) => Context::new(NicRef::Soft(Arc::clone(&nic.soft))),
            Self::Ibv(nic) => Context::new(NicRef::Ibv(Arc::clone(&nic.device))),
        }
    }
}

fn start(options: SoftOptions, link: Link, mtu: Mtu) -> Result<Nic> {
    let shared_memory = link.kind() == LinkKind::Local;
    let link = match options.faults {
        Some(faults) => Link::Fault(Box::new(FaultLink::new(link, faults))),
        None => link,
    };
    let pcap = match &options.pcap {
        Some(path) => Some(Pcap::create(path).map_err(|error| Error::at("create", path, error))?),
        None => None,
    };
    let config = Config {
        mtu,
        window_packets: options.window_packets.max(2),
        shared_memory,
        ..Config::new(options.local)
    };
    let [a, b] = [random::<8>()?, random::<8>()?].map(u64::from_ne_bytes);
    let soft = Soft::start(config, link, pcap, &Secret::new([a, b]))?;
    Ok(Nic::Soft(SoftNic { soft }))
}
