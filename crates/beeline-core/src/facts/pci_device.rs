//! PCI functions: place, link, ACS, IOMMU.

use alloc::string::String;
use core::fmt;

use serde::{Deserialize, Serialize};

use super::bdf::Bdf;
use super::machine::Fact;

/// One PCI function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PciDevice {
    /// Class code with subclass and interface, 24 bits.
    pub class: Option<Fact<u32>>,
    /// Vendor identifier.
    pub vendor: Option<Fact<u16>>,
    /// Device identifier.
    pub device: Option<Fact<u16>>,
    /// Subsystem vendor and device.
    pub subsystem: Option<Fact<(u16, u16)>>,
    /// Name as the tool printed it.
    pub name: Option<Fact<String>>,
    /// What it hangs off.
    pub parent: Option<Fact<Parent>>,
    /// Which kind of PCI Express port it is.
    pub port: Option<Fact<PortKind>>,
    /// Negotiated link.
    pub link: Option<Fact<Link>>,
    /// Fastest link it can do.
    pub link_max: Option<Fact<Link>>,
    /// Secondary and subordinate bus of a bridge.
    pub buses: Option<Fact<(u8, u8)>>,
    /// Access Control Services bits that are switched on.
    pub acs: Option<Fact<Acs>>,
    /// The tool was not allowed to read the capabilities.
    pub hidden: Option<Fact<bool>>,
    /// IOMMU group.
    pub iommu_group: Option<Fact<u32>>,
    /// Domain type of that group.
    pub iommu_type: Option<Fact<IommuType>>,
    /// NUMA node, -1 where the firmware gives none.
    pub numa: Option<Fact<i32>>,
    /// Kernel driver bound to it.
    pub driver: Option<Fact<String>>,
    /// Size in bytes of its largest memory window.
    pub bar_bytes: Option<Fact<u64>>,
}

/// What a PCI function hangs off.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Parent {
    /// Another function: a bridge, a root port or a switch port.
    Bridge(Bdf),
    /// A host bridge, by the name the source uses.
    Host(String),
    /// A CPU of a topology file, by its NUMA node; the levels between are not in the file.
    Cpu(i32),
}

/// The kind of a PCI Express function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortKind {
    /// A port of the root complex.
    Root,
    /// The port of a switch that faces the root.
    Upstream,
    /// A port of a switch that faces a device.
    Downstream,
    /// A device, not a bridge.
    Endpoint,
    /// A bridge to conventional PCI.
    ToPci,
    /// A whole switch folded into one node, as topology files of NCCL have it.
    Switch,
}

/// Speed and width of a PCI Express link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Transfers per second and lane, in hundreds of megatransfers (160 is 16 GT/s).
    pub speed_100mt: u32,
    /// Number of lanes.
    pub width: u32,
}

impl Link {
    /// Parses `16 GT/s`, `16.0 GT/s PCIe` or `16GT/s`.
    pub fn parse_speed(text: &str) -> Option<u32> {
        let number = text.trim_start().split("GT/s").next()?.trim_end();
        decimal_tenths(number)
    }

    /// Usable bandwidth of one direction in MB/s by the field's rule: three quarters of the bit rate
    /// after encoding (8b/10b up to 5 GT/s), so 16 GT/s x16 is 24 GB/s and 5 GT/s x16 is 6 GB/s.
    pub const fn mb_per_s(self) -> u64 {
        // In kB/s for 100 MT/s of one lane: 12.5 MB/s raw, times 0.75, times 0.8 for 8b/10b.
        let exact = if self.speed_100mt <= 50 { 7500 } else { 9375 };
        (self.speed_100mt as u64).saturating_mul(self.width as u64).saturating_mul(exact) / 1000
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} GT/s x{}", self.speed_100mt / 10, self.speed_100mt % 10, self.width)
    }
}

/// `2.5` as 25, `16` as 160; `None` for anything else.
pub(crate) fn decimal_tenths(text: &str) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let tenth = fraction.chars().next().unwrap_or('0').to_digit(10)?;
    let digits = fraction.bytes().all(|b| b.is_ascii_digit());
    let whole: u32 = whole.parse().ok().filter(|_| digits)?;
    whole.checked_mul(10)?.checked_add(tenth)
}

/// Access Control Services control bits (PCI Express Base, 7.7.11.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Acs(pub u16);

impl Acs {
    /// Source validation: harmless for peer-to-peer.
    pub const SRC_VALID: u16 = 0x01;
    /// Translation blocking.
    pub const TRANS_BLOCK: u16 = 0x02;
    /// Peer requests go up to the root complex.
    pub const REQ_REDIR: u16 = 0x04;
    /// Peer completions go up to the root complex.
    pub const CMPLT_REDIR: u16 = 0x08;
    /// Requests that arrive at an upstream port's own window go up.
    pub const UPSTREAM_FWD: u16 = 0x10;
    /// Egress control vector.
    pub const EGRESS_CTRL: u16 = 0x20;
    /// Translated requests may still go straight.
    pub const DIRECT_TRANS: u16 = 0x40;
    /// Names as `lspci -vv` prints them, in bit order.
    pub const NAMES: [(&'static str, u16); 7] = [
        ("SrcValid", Self::SRC_VALID),
        ("TransBlk", Self::TRANS_BLOCK),
        ("ReqRedir", Self::REQ_REDIR),
        ("CmpltRedir", Self::CMPLT_REDIR),
        ("UpstreamFwd", Self::UPSTREAM_FWD),
        ("EgressCtrl", Self::EGRESS_CTRL),
        ("DirectTrans", Self::DIRECT_TRANS),
    ];

    /// Whether peer traffic through this port is sent up to the root complex.
    pub const fn redirects(self) -> bool {
        self.0 & (Self::REQ_REDIR | Self::CMPLT_REDIR | Self::UPSTREAM_FWD) != 0
    }
}

impl fmt::Display for Acs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:04x}", self.0)?;
        for (name, bit) in Self::NAMES {
            if self.0 & bit != 0 {
                write!(f, " {name}+")?;
            }
        }
        Ok(())
    }
}

/// Type of an IOMMU domain, as `/sys/kernel/iommu_groups/*/type` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IommuType {
    /// `identity`: addresses pass unchanged.
    Identity,
    /// `DMA` or `DMA-FQ`: addresses are translated.
    Translated,
    /// Anything else.
    Other,
}
