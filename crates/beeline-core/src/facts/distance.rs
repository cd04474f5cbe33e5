//! Matrices that drivers print: distances, and who may access whose memory.

use core::fmt;

use serde::{Deserialize, Serialize};

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
