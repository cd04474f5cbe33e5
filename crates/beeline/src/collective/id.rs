//! The name of a communicator to be: where its ranks meet, and the secret that lets them in.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::secret::{DIGEST, Sha256};
use crate::error::{Error, Result};

/// Bytes of an identifier, as in NCCL's interface.
pub const UNIQUE_ID_BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"beelin01";

/// Where ranks meet, and a secret of 256 bits. Whoever has the bytes can join, so they are passed on as a
/// secret is; printing one shows the address only.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId {
    address: SocketAddr,
    secret: [u8; DIGEST],
}

impl UniqueId {
    pub(super) const fn of(address: SocketAddr, secret: [u8; DIGEST]) -> Self {
        Self { address, secret }
    }

    /// An identifier that every rank makes for itself out of what all of them know: an address at which
    /// rank 0 listens, and a phrase. It is as secret as the phrase.
    pub fn agreed(address: SocketAddr, phrase: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"beeline agreed identifier");
        hash.update(phrase.as_bytes());
        Self { address, secret: hash.finish() }
    }

    /// Where the ranks meet.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) const fn secret(&self) -> &[u8; DIGEST] {
        &self.secret
    }

    /// The identifier as bytes to be passed on.
    pub fn to_bytes(&self) -> [u8; UNIQUE_ID_BYTES] {
        let mut bytes = [0; UNIQUE_ID_BYTES];
        let ip = match self.address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let fields: [&[u8]; 4] =
            [&MAGIC, &ip.octets(), &self.address.port().to_le_bytes(), &self.secret];
        for (into, from) in bytes.iter_mut().zip(fields.concat()) {
            *into = from;
        }
        bytes
    }

    /// The identifier that these bytes are.
    ///
    /// # Errors
    /// `is_refused` for bytes that are none: of another library, or cut off.
    pub fn from_bytes(bytes: &[u8; UNIQUE_ID_BYTES]) -> Result<Self> {
        let parse = || {
            let rest = bytes.strip_prefix(&MAGIC)?;
            let (ip, rest) = rest.split_first_chunk::<16>()?;
            let (port, rest) = rest.split_first_chunk::<2>()?;
            let (secret, rest) = rest.split_first_chunk::<DIGEST>()?;
            let port = u16::from_le_bytes(*port);
            let ip = Ipv6Addr::from(*ip).to_canonical();
            let padded = rest.iter().all(|byte| *byte == 0);
            (padded && port != 0).then(|| Self { address: (ip, port).into(), secret: *secret })
        };
        parse().ok_or_else(|| {
            Error::refused("these bytes are no unique identifier of this library").remedy(
                "make it with the same library on one rank, and pass all 128 bytes to the others",
            )
        })
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({}, secret)", self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_others_are_refused() {
        for address in ["10.1.2.3:4567", "[fd00::1]:9"] {
            let id = UniqueId::of(address.parse().unwrap(), [7; DIGEST]);
            let bytes = id.to_bytes();
            assert_eq!(UniqueId::from_bytes(&bytes).unwrap(), id);
            assert!(!format!("{id:?}").contains('7') || address.contains('7'));
            for at in [0, 7, 127] {
                let mut other = bytes;
                other[at] ^= 1;
                assert!(UniqueId::from_bytes(&other).unwrap_err().is_refused());
            }
        }
        assert!(UniqueId::from_bytes(&[0; UNIQUE_ID_BYTES]).is_err());
        let address = "127.0.0.1:1".parse().unwrap();
        assert_eq!(UniqueId::agreed(address, "x"), UniqueId::agreed(address, "x"));
        assert_ne!(UniqueId::agreed(address, "x"), UniqueId::agreed(address, "y"));
    }
}
