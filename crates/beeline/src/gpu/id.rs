//! Names of devices.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The name of a device in this process: `sim:0`, `cuda:1`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceId {
    /// A CUDA device, by the ordinal that the process sees (after `CUDA_VISIBLE_DEVICES`).
    Cuda(u32),
    /// A simulated device.
    Sim(u32),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Sim(index) => write!(f, "sim:{index}"),
        }
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (kind, number) = text.split_once(':').unwrap_or((text, "0"));
        let number = number.parse::<u32>().ok();
        match (kind, number) {
            ("sim", Some(index)) => Ok(Self::Sim(index)),
            ("cuda", Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(Error::refused(format!("'{text}' is not the name of a device"))
                .remedy("write sim:N or cuda:N, as `beeline devices` lists them")),
        }
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
        for text in ["sim:0", "sim:7", "cuda:0", "cuda:15"] {
            assert_eq!(text.parse::<DeviceId>().unwrap().to_string(), text);
        }
        assert_eq!("sim".parse::<DeviceId>().unwrap(), DeviceId::Sim(0));
        for text in ["", "gpu:0", "cuda:-1", "cuda:", "sim:0:0", "cuda:4294967296"] {
            assert!(text.parse::<DeviceId>().unwrap_err().is_refused(), "{text:?}");
        }
    }
}
