//! Two questions about the machine that the API answers.

use std::path::Path;

use super::status::{Failure, Outcome};
use crate::gpu::{DeviceId, Gpu};

/// Bytes of the largest BAR of the CUDA device with this ordinal: its window for peers.
///
/// # Errors
/// `INVALID_VALUE` where there is no such device, or the kernel does not tell.
pub fn bar_bytes(ordinal: i32) -> Outcome<u64> {
    let none = |text: String| Failure::value(text);
    let number = u32::try_from(ordinal).map_err(|_| none(format!("there is no GPU {ordinal}")))?;
    let count = Gpu::cuda_devices()?;
    if number >= count {
        return Err(none(format!("there is no GPU {ordinal}; this process sees {count}")));
    }
    let info = Gpu::open(&DeviceId::Cuda(number))?.info();
    let pci = info.cuda.and_then(|cuda| cuda.pci);
    let pci = pci.ok_or_else(|| none(format!("the PCI address of GPU {ordinal} is unknown")))?;
    let path = format!("/sys/bus/pci/devices/{pci}/resource");
    let text = std::fs::read_to_string(&path)
        .map_err(|error| none(format!("the BARs of GPU {ordinal}: {path}: {error}")))?;
    largest(&text).ok_or_else(|| none(format!("{path} names no BAR")))
}

/// The largest range of a `resource` file: start, end and flags a line, in hexadecimal.
fn largest(text: &str) -> Option<u64> {
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let range = |line: &str| {
        let mut words = line.split_whitespace();
        let (start, end) = (number(words.next()?)?, number(words.next()?)?);
        (end > start).then(|| end - start + 1)
    };
    text.lines().take(6).filter_map(range).max()
}

/// Writes what is known of the machine (the PCI tree, GPUs, NICs, drives) to `path` as JSON, in the form
/// of `beeline doctor --save`.
///
/// # Errors
/// What writing says.
pub fn export_topology(path: &Path) -> Outcome<()> {
    let machine = crate::probe::gather(&crate::probe::Options::default());
    let text = beeline_core::facts::json::save(&machine, false)
        .map_err(|error| Failure::value(format!("save the facts: {error}")))?;
    std::fs::write(path, text)
        .map_err(|error| Failure::io(format_args!("write {}", path.display()), &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_bar_is_found() {
        let text = "0x00000000c0000000 0x00000000c0ffffff 0x0000000000040200\n\
                    0x0000004000000000 0x0000005fffffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(largest(text), Some(128 << 30));
        assert_eq!(largest("rubbish\n"), None);
    }
}
