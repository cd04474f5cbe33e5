//! What two sides tell each other before RDMA works, as text that goes through any channel.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use beeline_core::addr::Iova;
use beeline_core::mr::{Access, Rkey};
use beeline_core::rc::Remote;
use beeline_core::roce::{Mtu, Psn, Qpn, RnrTimer};

use crate::error::{Error, Result};

/// A queue pair as the other side must know it.
///
/// As text: `qpn=0x00abcd psn=0x123456 addr=10.0.0.1 mtu=4096`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Its number.
    pub qpn: Qpn,
    /// The first sequence number it sends.
    pub psn: Psn,
    /// The address of its NIC; the GID is this address, mapped into IPv6.
    pub addr: IpAddr,
    /// The largest path MTU of its port.
    pub mtu: Mtu,
}

/// Memory as the other side must know it. As text: `addr=0x7f0000000000 len=4096 rkey=0x12345678`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// First byte.
    pub addr: Iova,
    /// Length in bytes.
    pub len: u64,
    /// The key.
    pub rkey: Rkey,
}

impl RemoteMemory {
    /// The memory from byte `offset` on.
    pub const fn at(&self, offset: u64) -> Remote {
        let addr = Iova::new(self.addr.as_u64().wrapping_add(offset));
        Remote { addr, rkey: self.rkey }
    }
}

/// Choices of a connection.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Connect {
    /// What the peer may do.
    pub access: Access,
    /// Path MTU; `None` takes the smaller of both ports'.
    pub mtu: Option<Mtu>,
    /// READs and atomics outstanding in each direction.
    pub rd_atomic: u8,
    /// Local ACK timeout: 4.096 us times two to this power, 0 for ever.
    pub timeout: u8,
    /// Retries after a timeout or a lost packet, 0 to 7.
    pub retry_cnt: u8,
    /// Retries while the peer has no receive posted, 0 to 6; 7 for ever.
    pub rnr_retry: u8,
    /// How long the peer is told to wait when no receive is posted.
    pub min_rnr_timer: RnrTimer,
}

impl Default for Connect {
    /// Everything allowed, 67 ms timeout, 7 retries, receiver not ready retried for ever after 0.64 ms.
    fn default() -> Self {
        Self {
            access: Access::ALL,
            mtu: None,
            rd_atomic: 16,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: RnrTimer::new(12),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { qpn, psn, addr, mtu } = self;
        write!(f, "qpn={qpn} psn={psn} addr={addr} mtu={mtu}")
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fields = Fields { text };
        let addr = fields.text("addr")?;
        let mtu = fields.number("mtu")?;
        Ok(Self {
            qpn: Qpn::new(fields.number("qpn")? as u32),
            psn: Psn::new(fields.number("psn")? as u32),
            addr: addr.parse().map_err(|_| fields.bad("addr"))?,
            mtu: u32::try_from(mtu).ok().and_then(path_mtu).ok_or_else(|| fields.bad("mtu"))?,
        })
    }
}

impl fmt::Display for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addr, len, rkey } = self;
        write!(f, "addr={addr} len={len} rkey={rkey}")
    }
}

impl FromStr for RemoteMemory {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fields = Fields { text };
        let rkey = u32::try_from(fields.number("rkey")?).map_err(|_| fields.bad("rkey"))?;
        Ok(Self {
            addr: Iova::new(fields.number("addr")?),
            len: fields.number("len")?,
            rkey: Rkey::new(rkey),
        })
    }
}

fn path_mtu(bytes: u32) -> Option<Mtu> {
    if bytes == Mtu::LOCAL.bytes() { Some(Mtu::LOCAL) } else { Mtu::new(bytes) }
}

/// Words of the form `name=value`.
struct Fields<'a> {
    text: &'a str,
}

impl<'a> Fields<'a> {
    fn text(&self, name: &str) -> Result<&'a str> {
        self.text
            .split_whitespace()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
            .ok_or_else(|| self.bad(name))
    }

    /// Decimal, or hexadecimal after `0x`.
    fn number(&self, name: &str) -> Result<u64> {
        let text = self.text(name)?;
        let parsed = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        };
        parsed.map_err(|_| self.bad(name))
    }

    fn bad(&self, name: &str) -> Error {
        let text: String = self.text.chars().take(200).collect();
        Error::refused(format!("`{text}` has no valid `{name}=`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_survive_as_text() {
        let endpoint = Endpoint {
            qpn: Qpn::new(0xabcd),
            psn: Psn::new(0xff_ffff),
            addr: "fe80::1".parse().unwrap(),
            mtu: Mtu::MAX,
        };
        assert_eq!(endpoint.to_string().parse::<Endpoint>().unwrap(), endpoint);
        let memory = RemoteMemory { addr: Iova::new(u64::MAX), len: 7, rkey: Rkey::new(9) };
        assert_eq!(memory.to_string().parse::<RemoteMemory>().unwrap(), memory);
        for bad in ["", "qpn=1 psn=2 addr=x mtu=256", "qpn=1 psn=2 addr=::1 mtu=1500", "qpn= 1"] {
            assert!(bad.parse::<Endpoint>().unwrap_err().is_refused(), "{bad}");
        }
    }
}
