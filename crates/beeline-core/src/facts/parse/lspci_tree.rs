//! `lspci -tv`: the tree drawn with `+-`, `\-` and `-[bus]-`.
//!
//! The picture is read by columns. A function starts after `+-`, `\-` or a run of dashes that follows a
//! bus; a bus in brackets opens a level whose first column is where its bracket ends. Lines further down
//! continue the level whose column their own connector stands in.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::super::bdf::Bdf;
use super::super::machine::{Known, Machine, Parent};
use super::lspci::{register, vendor_by_name};
use super::{Input, Outcome, ReadError};

/// Deepest chain of bridges in a picture.
const DEPTH_MAX: usize = 64;
/// Functions in a picture.
const FUNCTIONS_MAX: usize = 16_384;

pub(super) fn recognise(head: &str) -> bool {
    let mut lines = head.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next().unwrap_or("").trim_start();
    first.starts_with("-[") && first.contains("]-") || first.starts_with("-+-[")
}

/// A bus in the picture: functions in `column` sit on it.
struct Level {
    column: usize,
    domain: u32,
    bus: u8,
    parent: Parent,
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let mut levels: Vec<Level> = Vec::new();
    let mut seen = 0usize;
    for (number, line) in input.lines() {
        if line.trim().is_empty() {
            continue;
        }
        let mut cursor = Cursor { text: line.as_bytes(), at: 0, last_function: None };
        cursor.skip(|b| matches!(b, b' ' | b'|'));
        let column = cursor.at;
        // A level without connectors holds one function, on the line that opened it.
        levels.retain(|level| level.column <= column);
        let mut open = false;
        loop {
            cursor.skip(|b| matches!(b, b'-' | b'+' | b'\\' | b' '));
            if cursor.peek() == Some(b'[') {
                bus(&mut levels, &mut cursor, input, number)?;
                open = true;
                continue;
            }
            let Some(text) = cursor.function() else { break };
            let Some(level) = levels.last() else {
                let message = "a function before any bus; expected lspci -tv".to_string();
                return Err(ReadError::new(input, number, message));
            };
            let Some(bdf) = join(level, text) else {
                let message = alloc::format!("\"{text}\" is not device.function");
                return Err(ReadError::new(input, number, message));
            };
            seen += 1;
            if seen > FUNCTIONS_MAX {
                let message = alloc::format!("more than {FUNCTIONS_MAX} functions");
                return Err(ReadError::new(input, number, message));
            }
            let at = input.at(number);
            let parent = level.parent.clone();
            let device = machine.pci_at(bdf);
            device.parent.learn(parent, at);
            if cursor.peek() == Some(b'-') {
                // A bus follows: this function is a bridge.
                device.class.learn(0x06_0400, at);
                cursor.last_function = Some(bdf);
                continue;
            }
            let name = line.get(cursor.at..).unwrap_or("").trim();
            describe(machine, bdf, name, input, number);
            open = true;
            break;
        }
        if !open && cursor.at < line.len() {
            let message = "expected a branch of lspci -tv".to_string();
            return Err(ReadError::new(input, number, message));
        }
    }
    Ok(Outcome::default())
}

/// `[0000:00]`, `[01]`, `[03-10]`.
fn bus(
    levels: &mut Vec<Level>,
    cursor: &mut Cursor<'_>,
    input: &Input<'_>,
    number: u32,
) -> Result<(), ReadError> {
    let inner = cursor.bracket().unwrap_or("");
    let (domain, buses) = match inner.split_once(':') {
        Some((domain, buses)) => (u32::from_str_radix(domain, 16).ok(), buses),
        None => (levels.last().map(|level| level.domain).or(Some(0)), inner),
    };
    let first = buses.split('-').next().unwrap_or("");
    let (Some(domain), Ok(bus)) = (domain, u8::from_str_radix(first, 16)) else {
        return Err(ReadError::new(input, number, alloc::format!("[{inner}] is not a bus")));
    };
    if levels.len() >= DEPTH_MAX {
        return Err(ReadError::new(input, number, alloc::format!("deeper than {DEPTH_MAX} buses")));
    }
    // The function before this bracket, on the same line, is the bridge that leads here.
    let bridge = cursor.last_function.take();
    let parent = match (bridge, inner.contains(':')) {
        (Some(bridge), false) => Parent::Bridge(bridge),
        _ => Parent::Host(alloc::format!("pci{domain:04x}:{bus:02x}")),
    };
    // Connectors of the level stand behind the dashes that follow the bracket.
    let column = cursor.column_of_connector();
    levels.push(Level { column, domain, bus, parent });
    Ok(())
}

fn join(level: &Level, text: &str) -> Option<Bdf> {
    let (device, function) = text.split_once('.')?;
    let device = u8::from_str_radix(device, 16).ok().filter(|device| *device < 32)?;
    let function = u8::from_str_radix(function, 16).ok().filter(|function| *function < 8)?;
    Some(Bdf { domain: level.domain, bus: level.bus, device, function })
}

/// `-tvv` prints no class; what a device is follows from its vendor and name where that is certain.
fn describe(machine: &mut Machine, bdf: Bdf, name: &str, input: &Input<'_>, number: u32) {
    if name.is_empty() {
        return;
    }
    let at = input.at(number);
    let device = machine.pci_at(bdf);
    device.name.learn(name.chars().take(256).collect::<String>(), at);
    let vendor = vendor_by_name(name);
    if let Some(vendor) = vendor {
        device.vendor.learn(vendor, at);
    }
    let class = match vendor {
        // Function 0 of an NVIDIA device that is no bridge is the GPU; function 1 is its audio.
        Some(0x10de)
            if bdf.function == 0 && !name.contains("Switch") && !name.contains("Audio") =>
        {
            Some(0x03_0200)
        }
        Some(0x15b3) if !name.contains("BlueField-3 SoC") => Some(0x02_0000),
        Some(0x144d) => Some(0x01_0802),
        _ if name.contains("NVMe") || name.contains("Non-Volatile") => Some(0x01_0802),
        _ => None,
    };
    if let Some(class) = class {
        device.class.learn(class, at);
        register(machine, bdf, at);
    }
}

struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
    last_function: Option<Bdf>,
}

impl<'a> Cursor<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn skip(&mut self, unwanted: impl Fn(u8) -> bool) {
        while self.peek().is_some_and(&unwanted) {
            self.at += 1;
        }
    }

    /// The text in brackets at the cursor.
    fn bracket(&mut self) -> Option<&'a str> {
        let rest = self.text.get(self.at + 1..)?;
        let end = rest.iter().position(|b| *b == b']')?;
        self.at += end + 2;
        core::str::from_utf8(rest.get(..end)?).ok()
    }

    /// `dd.f` at the cursor.
    fn function(&mut self) -> Option<&'a str> {
        let rest = self.text.get(self.at..)?;
        let shape = rest.get(2) == Some(&b'.') && rest.get(3).is_some_and(u8::is_ascii_hexdigit);
        let hex = rest.iter().take(2).all(u8::is_ascii_hexdigit);
        if !shape || !hex {
            return None;
        }
        self.at += 4;
        core::str::from_utf8(rest.get(..4)?).ok()
    }

    /// Where `+` or the first dash run of the level just opened stands.
    fn column_of_connector(&self) -> usize {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let dashes = rest.iter().take_while(|b| **b == b'-').count();
        match rest.get(dashes) {
            Some(b'+' | b'\\') => self.at + dashes,
            _ => usize::MAX,
        }
    }
}
