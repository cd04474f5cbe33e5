//! Where the memory of `beeline rdma` lies: in the host, or on a GPU.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::gpu::{Buffer, DeviceId, Gpu, PinnedMem, Stream};
use beeline::verbs::{Access, HostMem, Mr, Pd};

use super::Context;
use crate::failure::Failure;

/// Bytes that pass through pinned memory at a time.
const PIECE: u64 = 4 << 20;

/// How long a copy may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// `host` or the name of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Place {
    /// Host memory.
    #[default]
    Host,
    /// Memory of a GPU.
    Device(DeviceId),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "host" => Ok(Self::Host),
            _ if text.contains(':') => match text.parse() {
                Ok(device) => Ok(Self::Device(device)),
                Err(error) => Err(format!("{error}")),
            },
            _ => Err("write host, cuda:N or sim:N".to_owned()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Device(device) => write!(f, "{device}"),
        }
    }
}

/// What a server lends: how many bytes, or where they lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lent {
    /// At most this much.
    Bytes(u64),
    /// There.
    In(Place),
}

impl FromStr for Lent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(place) => Ok(Self::In(place)),
            Err(place) => crate::flags::parse_size(text)
                .map(Self::Bytes)
                .map_err(|size| format!("{size}; or {place}")),
        }
    }
}

/// Registered memory that this side fills and looks at.
pub(crate) enum Room {
    Host(Arc<HostMem>),
    Gpu { gpu: Gpu, buffer: Buffer, stream: Stream, pinned: PinnedMem },
}

impl Room {
    /// Memory of `bytes` in `place`, and its region.
    pub(crate) fn new(
        place: &Place,
        pd: &Pd,
        bytes: u64,
        shareable: bool,
        context: &Context,
    ) -> Result<(Self, Mr), Failure> {
        let Place::Device(id) = place else {
            let len = usize::try_from(bytes).unwrap_or(usize::MAX);
            let mem = if shareable { HostMem::shareable(len) } else { HostMem::anonymous(len) };
            let mem = Arc::new(mem.map_err(failed)?);
            mem.populate().map_err(failed)?;
            let mr = pd.reg_mr(Arc::clone(&mem), Access::ALL)?;
            return Ok((Self::Host(mem), mr));
        };
        let gpu = context.device(Some(&id.to_string()))?;
        let buffer = if shareable { gpu.alloc_shareable(bytes)? } else { gpu.alloc(bytes)? };
        let mr = pd.reg_gpu(&buffer, Access::ALL)?;
        let (stream, pinned) = (gpu.stream()?, gpu.pin(PIECE.min(bytes))?);
        Ok((Self::Gpu { gpu, buffer, stream, pinned }, mr))
    }

    /// Whether it lies on a simulated device.
    pub(crate) fn is_simulated(&self) -> bool {
        matches!(self, Self::Gpu { gpu, .. } if gpu.info().simulated)
    }

    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> Result<(), Failure> {
        let (buffer, stream, pinned) = match self {
            Self::Host(mem) => return mem.write(offset, from).map_err(failed),
            Self::Gpu { buffer, stream, pinned, .. } => (buffer, stream, pinned),
        };
        let mut at = offset;
        for piece in from.chunks(pinned.len() as usize) {
            pinned.mem().write(0, piece).map_err(failed)?;
            stream.copy_to_device(buffer, at, pinned, 0, piece.len() as u64)?;
            stream.synchronize(Instant::now() + PATIENCE)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Failure> {
        let (buffer, stream, pinned) = match self {
            Self::Host(mem) => return mem.read(offset, into).map_err(failed),
            Self::Gpu { buffer, stream, pinned, .. } => (buffer, stream, pinned),
        };
        let mut at = offset;
        for piece in into.chunks_mut(pinned.len() as usize) {
            stream.copy_to_host(pinned, 0, buffer, at, piece.len() as u64)?;
            stream.synchronize(Instant::now() + PATIENCE)?;
            pinned.mem().read(0, piece).map_err(failed)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    pub(crate) fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), Failure> {
        match self {
            Self::Host(mem) => mem.fill(offset, len, value).map_err(failed),
            Self::Gpu { buffer, stream, .. } => {
                stream.fill(buffer, offset, len, value)?;
                Ok(stream.synchronize(Instant::now() + PATIENCE)?)
            }
        }
    }
}

fn failed(error: impl fmt::Display) -> Failure {
    Failure::failed("io-failed", error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_and_a_place_are_told_apart() {
        let cases = [
            ("64M", Some(Lent::Bytes(64 << 20))),
            ("host", Some(Lent::In(Place::Host))),
            ("sim:0", Some(Lent::In(Place::Device(DeviceId::Sim(0))))),
            ("cuda:1", Some(Lent::In(Place::Device(DeviceId::Cuda(1))))),
            ("gpu", None),
            ("cuda:x", None),
            ("", None),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse::<Lent>().ok(), expected, "{text}");
        }
    }
}
