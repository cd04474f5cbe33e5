//! NICs of the kernel's, through libibverbs.
//!
//! The kernel and the NIC hold the state that [`super::soft`] holds in its engine. What they do not tell
//! is kept here beside it: `queue` remembers every posted work request, so that a region is not given up
//! under one, a completion says what it was, and a full queue is noticed before the driver sees it. `select`
//! chooses device, port and GID, `mr` registers memory.

mod cq;
mod device;
mod mr;
mod qp;
mod queue;
mod select;
mod srq;
mod stats;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use beeline_core::plan::{PortChoice, PortRefused};
use beeline_sys::ibverbs as sys;

pub(super) use cq::Cq;
pub(super) use device::{Device, Pd};
pub(super) use mr::Mr;
pub(super) use qp::Qp;
pub(super) use srq::Srq;

use super::Nic;
use crate::error::{Error, Kind, Result};

/// An open NIC of the kernel's.
#[derive(Debug)]
pub struct IbvNic {
    pub(super) device: Arc<Device>,
}

/// Which NIC of the kernel's, port and address to use. What is not named is chosen: RoCE v2 before v1, an
/// address that routers pass on before one of this link, and the one that the way to the peer starts at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IbvOptions {
    /// The device, as `mlx5_0`.
    pub device: Option<String>,
    /// Its port, from 1.
    pub port: Option<u8>,
    /// Index into the port's table of GIDs.
    pub gid_index: Option<u16>,
    /// The address of the other side, where it is known.
    pub peer: Option<IpAddr>,
    /// Only an address that the way to the peer starts at.
    pub routed: bool,
}

impl IbvOptions {
    /// Any NIC.
    pub const fn new() -> Self {
        Self { device: None, port: None, gid_index: None, peer: None, routed: false }
    }

    /// The device of this name.
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// This port of it.
    #[must_use]
    pub const fn port(mut self, port: u8) -> Self {
        self.port = Some(port);
        self
    }

    /// This entry of the port's table of GIDs.
    #[must_use]
    pub const fn gid_index(mut self, index: u16) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// Only one that this machine's way to this address starts at, by its routing table: on the right
    /// network, and of the right device.
    #[must_use]
    pub const fn reaching(mut self, peer: IpAddr) -> Self {
        (self.peer, self.routed) = (Some(peer), true);
        self
    }

    /// One that is near this address, best first.
    #[must_use]
    pub const fn peer(mut self, peer: IpAddr) -> Self {
        self.peer = Some(peer);
        self
    }
}

/// Which port and GID of a NIC of the kernel's are used, and why not another.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortResolved {
    /// Device, port, GID index, and why it is these.
    pub chosen: PortChoice,
    /// What would have done as well, next best first.
    pub others: Vec<PortChoice>,
    /// What cannot be used, with the reason.
    pub rejected: Vec<PortRefused>,
}

/// A NIC of the kernel's, as a list shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NicInfo {
    /// Its name, as `mlx5_0`.
    pub name: String,
    /// Whether it is Linux's soft RoCE: a NIC of the kernel's, and software all the same.
    pub soft_roce: bool,
    /// Firmware version; empty where it has none.
    pub firmware: String,
    /// Its ports, from port 1 on.
    pub ports: Vec<PortInfo>,
    /// Entries that can be used, best first; and everything else, with the reason.
    pub gids: Vec<PortChoice>,
    /// What cannot be used, with the reason.
    pub rejected: Vec<PortRefused>,
}

/// A port, as a list shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortInfo {
    /// Its number.
    pub number: u8,
    /// `ACTIVE`, `DOWN` and so on.
    pub state: &'static str,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: &'static str,
    /// Largest path MTU now, in bytes; 0 where it has none.
    pub mtu: u32,
}

impl Nic {
    /// Opens a NIC of the kernel's (`rdma_rxe` among them) through libibverbs.
    ///
    /// # Errors
    /// `is_no_route`: code `libibverbs-absent` where the library is missing, `rdma-device-absent` where
    /// there is no device, `rdma-port-unusable` where none has an active port with a usable GID, with a
    /// reason for each that was thought of. `is_not_found` where the device named is not there.
    pub fn ibv(options: IbvOptions) -> Result<Self> {
        let device = select::open(&options)?;
        Ok(Self::Ibv(IbvNic { device }))
    }

    /// What NICs the kernel has. An empty list where it has none, or no RDMA.
    ///
    /// # Errors
    /// `is_no_route` with code `libibverbs-absent` where the library is missing although the kernel has
    /// RDMA devices.
    pub fn list() -> Result<Vec<NicInfo>> {
        select::list()
    }
}

fn library_error(error: sys::LoadError) -> Error {
    Error::new(Kind::NoRoute, "NICs of the kernel's need libibverbs")
        .because(error)
        .coded("libibverbs-absent")
        .remedy("install rdma-core (Debian: libibverbs1 and ibverbs-providers), or use the NIC in software")
}

/// `action` failed with what libibverbs or the driver said.
fn driver_error(device: &str, action: &str, error: io::Error) -> Error {
    Error::io(format_args!("{action} on {device}"), error)
}
