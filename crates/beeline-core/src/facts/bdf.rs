//! PCI addresses: domain, bus, device and function.

use alloc::string::String;
use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// The address of one PCI function, printed as `0000:41:00.0`.
///
/// The domain has more than 16 bits because virtual bridges of topology files and some hosts use
/// wider ones. Order is the order of `lspci`, which is also the order in which the driver numbers GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    /// PCI domain (segment).
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

impl Bdf {
    /// Parses `[domain:]bus:device[.function]` in hexadecimal; domain and function default to 0.
    pub fn parse(text: &str) -> Option<Self> {
        let (head, function) = match text.split_once('.') {
            Some((head, function)) => (head, hex(function, 1)?),
            None => (text, 0),
        };
        let mut parts = head.rsplit(':');
        let device = hex(parts.next()?, 2)?;
        let bus = hex(parts.next()?, 2)?;
        let domain = match parts.next() {
            Some(domain) => hex(domain, 8)?,
            None => 0,
        };
        if parts.next().is_some() || device > 31 || function > 7 {
            return None;
        }
        let (bus, device) = (u8::try_from(bus).ok()?, u8::try_from(device).ok()?);
        Some(Self { domain, bus, device, function: u8::try_from(function).ok()? })
    }

    /// Parses the form of communication logs, where `1c000` stands for bus 1c, device 00,
    /// function 0, with the domain in front where it is not zero.
    pub fn from_log_id(text: &str) -> Option<Self> {
        let raw = u64::from_str_radix(text, 16).ok()?;
        let domain = u32::try_from(raw >> 20).ok()?;
        let device = u8::try_from((raw >> 4) & 0xff).ok()?;
        if device > 31 {
            return None;
        }
        Some(Self {
            domain,
            bus: u8::try_from((raw >> 12) & 0xff).ok()?,
            device,
            function: u8::try_from(raw & 0xf).ok()?,
        })
    }

    /// Whether the address is one that hypervisor topology files invent: it is in no machine's sysfs.
    pub const fn is_virtual(self) -> bool {
        self.domain >= 0xffff && self.bus == 0xff
    }
}

fn hex(text: &str, digits: usize) -> Option<u32> {
    let plain = !text.is_empty() && text.len() <= digits;
    let all_hex = text.bytes().all(|b| b.is_ascii_hexdigit());
    (plain && all_hex).then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for Bdf {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text).ok_or("a PCI address has the form domain:bus:device.function")
    }
}

impl Serialize for Bdf {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bdf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn addresses_parse_in_every_form_the_tools_print() {
        for (text, expected) in [
            ("41:00.0", Some("0000:41:00.0")),
            ("0000:41:00.0", Some("0000:41:00.0")),
            ("00000000:65:00.0", Some("0000:65:00.0")),
            ("fffffff:ff:ff.0", None),
            ("ffff:ff:01.0", Some("ffff:ff:01.0")),
            ("17:00", Some("0000:17:00.0")),
            ("0000:17:20.0", None),
            ("0000:17:00.8", None),
            ("1:2:3:4.0", None),
            ("", None),
            ("zz:00.0", None),
        ] {
            assert_eq!(Bdf::parse(text).map(|b| b.to_string()).as_deref(), expected, "{text}");
        }
        assert_eq!(Bdf::from_log_id("1c000").unwrap().to_string(), "0000:1c:00.0");
        assert_eq!(Bdf::from_log_id("101b01c0").unwrap().to_string(), "0101:b0:1c.0");
    }
}
