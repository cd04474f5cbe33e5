//! `setpci -v -s BDF ECAP_ACS+6.w`: the ACS control register of single ports.

use super::super::bdf::Bdf;
use super::super::machine::{Acs, Known, Machine};
use super::{Input, Outcome, ReadError};

pub(super) fn recognise(head: &str) -> bool {
    let mut lines = head.lines().filter(|line| !line.trim().is_empty()).peekable();
    lines.peek().is_some() && lines.all(|line| register(line).is_some())
}

/// `0000:40:01.1 (ecap 000d @2a0 v1) @2a6 = 001d`: capability 000d, six bytes in.
fn register(line: &str) -> Option<(Bdf, u16)> {
    let (address, rest) = line.trim().split_once(" (ecap 000d @")?;
    let bdf = Bdf::parse(address)?;
    let (base, rest) = rest.split_once(' ')?;
    let (place, value) = rest.split_once(") @")?.1.split_once(" = ")?;
    let base = u32::from_str_radix(base, 16).ok()?;
    let place = u32::from_str_radix(place.trim(), 16).ok()?;
    let value = u16::from_str_radix(value.trim(), 16).ok()?;
    (place.checked_sub(base)? == 6).then_some((bdf, value))
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    for (number, line) in input.lines().filter(|(_, line)| !line.trim().is_empty()) {
        let Some((bdf, value)) = register(line) else {
            let message = "expected the ACS control register as setpci -v prints it";
            return Err(ReadError::new(input, number, message));
        };
        machine.pci_at(bdf).acs.learn(Acs(value & 0x7f), input.at(number));
    }
    Ok(Outcome::default())
}
