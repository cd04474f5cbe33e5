//! Names of devices.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The name of a device in this process: `sim:0`, `cuda:1`.
///
/// A CUDA device can also be named by what does not change with `CUDA_VISIBLE_DEVICES`: its UUID
/// (`cuda:GPU-...`, `cuda:MIG-...` as `nvidia-smi -L` prints them) or the PCI address of its GPU
/// (`cuda:0000:3b:00.0`). [`super::Gpu::id`] always answers the ordinal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceId {
    /// A CUDA device, by the ordinal that the process sees (after `CUDA_VISIBLE_DEVICES`).
    Cuda(u32),
    /// The CUDA device at a PCI address.
    CudaPci(PciAddr),
    /// The CUDA device with a UUID.
    CudaUuid(DeviceUuid),
    /// A simulated device.
    Sim(u32),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::CudaPci(address) => write!(f, "cuda:{address}"),
            Self::CudaUuid(uuid) => write!(f, "cuda:{uuid}"),
            Self::Sim(index) => write!(f, "sim:{index}"),
        }
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (kind, rest) = text.split_once(':').unwrap_or((text, "0"));
        let id = match kind {
            "sim" => number(rest).map(Self::Sim),
            "cuda" => cuda_name(rest),
            _ => None,
        };
        id.ok_or_else(|| {
            Error::refused(format!("'{text}' is not the name of a device"))
                .remedy("write sim:N or cuda:N, as `beeline devices` lists them")
        })
    }
}

fn cuda_name(text: &str) -> Option<DeviceId> {
    let ordinal = number(text).map(DeviceId::Cuda);
    ordinal
        .or_else(|| DeviceUuid::parse(text).map(DeviceId::CudaUuid))
        .or_else(|| PciAddr::parse(text).map(DeviceId::CudaPci))
}

/// Decimal digits alone; the standard parser would take a sign, too.
fn number(text: &str) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

/// The UUID of a GPU, or of one instance of it (MIG).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceUuid {
    /// Whether it names an instance (MIG) and not a whole GPU.
    pub mig: bool,
    /// The sixteen bytes.
    pub bytes: [u8; 16],
}

impl DeviceUuid {
    /// `GPU-` or `MIG-` and 32 hexadecimal digits, grouped 8-4-4-4-12.
    pub fn parse(text: &str) -> Option<Self> {
        let (mig, digits) = match (text.strip_prefix("GPU-"), text.strip_prefix("MIG-")) {
            (Some(digits), _) => (false, digits),
            (_, Some(digits)) => (true, digits),
            _ => return None,
        };
        if !digits.split('-').map(str::len).eq([8, 4, 4, 4, 12]) {
            return None;
        }
        let mut bytes = [0; 16];
        let mut nibbles = digits.chars().filter(|&digit| digit != '-').map(|d| d.to_digit(16));
        for byte in &mut bytes {
            let (high, low) = (nibbles.next()??, nibbles.next()??);
            *byte = u8::try_from(high << 4 | low).ok()?;
        }
        Some(Self { mig, bytes })
    }
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.mig { "MIG" } else { "GPU" })?;
        for (index, byte) in self.bytes.iter().enumerate() {
            let dash = if matches!(index, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

/// Where a function sits on PCI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddr {
    /// The domain (segment).
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device on the bus, below 32.
    pub device: u8,
    /// The function of the device, below 8.
    pub function: u8,
}

impl PciAddr {
    /// `[domain:]bus:device.function` in hexadecimal, the domain in up to eight digits.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.rsplit_once('.')?;
        let mut parts = rest.rsplit(':');
        let device = hex(parts.next()?, 2)?;
        let bus = hex(parts.next()?, 2)?;
        let domain = parts.next().map_or(Some(0), |domain| hex(domain, 8))?;
        let function = hex(function, 1)?;
        if parts.next().is_some() || device > 0x1f || function > 7 {
            return None;
        }
        Some(Self {
            domain,
            bus: u8::try_from(bus).ok()?,
            device: u8::try_from(device).ok()?,
            function: u8::try_from(function).ok()?,
        })
    }
}

/// Hexadecimal digits alone: no sign, no blank, at most `digits_max` of them.
fn hex(text: &str, digits_max: usize) -> Option<u32> {
    let fits = (1..=digits_max).contains(&text.len());
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if fits && digits { u32::from_str_radix(text, 16).ok() } else { None }
}

impl fmt::Display for PciAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// What a simulated device lets a process see of its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Profile {
    /// No window into device memory, and nothing moves: what most GPUs give a process.
    #[default]
    Plain,
    /// Device memory shows through a BAR window that the CPU and peers can address.
    Bar,
    /// As `Bar`, and the device may move an allocation that nobody has pinned.
    Movable,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Bar, Self::Movable];

    /// The name, as the environment and the command line write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Bar => "bar",
            Self::Movable => "movable",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Profile {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|profile| profile.as_str() == text).ok_or_else(|| {
            Error::refused(format!("'{text}' is not a profile of a simulated device"))
                .remedy("write plain, bar or movable")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_the_rest_is_refused() {
        for text in [
            "sim:0",
            "sim:7",
            "cuda:0",
            "cuda:15",
            "cuda:GPU-01234567-89ab-cdef-0011-223344556677",
            "cuda:MIG-01234567-89ab-cdef-0011-223344556677",
            "cuda:0000:3b:00.0",
            "cuda:10000:e1:1f.7",
        ] {
            assert_eq!(text.parse::<DeviceId>().unwrap().to_string(), text);
        }
        assert_eq!("sim".parse::<DeviceId>().unwrap(), DeviceId::Sim(0));
        for text in ["cuda:3B:00.0", "cuda:00000000:3b:00.0"] {
            assert_eq!(text.parse::<DeviceId>().unwrap().to_string(), "cuda:0000:3b:00.0");
        }
        for text in [
            "",
            "gpu:0",
            "cuda:-1",
            "cuda:+1",
            "cuda:",
            "sim:0:0",
            "cuda:4294967296",
            "cuda:GPU-01234567-89ab-cdef-0011-22334455667",
            "cuda:GPU-0123456789abcdef0011223344556677",
            "cuda:GPU-0123456g-89ab-cdef-0011-223344556677",
            "cuda:GPU-+1234567-89ab-cdef-0011-223344556677",
            "cuda:3b:00",
            "cuda:3b:20.0",
            "cuda:3b:00.8",
            "cuda:0:0000:3b:00.0",
            "cuda:+b:00.0",
            "sim:GPU-01234567-89ab-cdef-0011-223344556677",
        ] {
            assert!(text.parse::<DeviceId>().unwrap_err().is_refused(), "{text:?}");
        }
    }
}
