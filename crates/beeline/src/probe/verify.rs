//! Probing paths with real transfers, in a process that can be killed.
//!
//! A path that hangs takes the thread that waits for it along: the driver may never return. So transfers
//! run in a child process ([`serve`] in the program's own binary), one request at a time, and
//! [`verify`] kills the child that does not answer by the deadline, says so, and goes on with a new one.
//! Only what this module answers makes a path *verified*.

mod child;
mod parent;

pub use child::serve;
pub use parent::verify;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use beeline_core::checks::{Outcome, Place, Transfer};
use beeline_core::facts::Bdf;
use serde::{Deserialize, Serialize};

use crate::gpu::{DeviceId, Gpu, Info};

/// Devices that are probed with each other: 16 make 480 transfers between pairs.
pub const DEVICES_MAX: usize = 16;

/// Most bytes of one copy.
pub const BYTES_MAX: u64 = 1 << 30;

/// How a probe is run.
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    /// The program that calls [`serve`] when it is run with [`Self::args`].
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// How long one transfer may take, with the start of the child and its first use of the devices.
    pub deadline: Duration,
    /// How long all of them may take together; what is left then is not run.
    pub deadline_all: Duration,
    /// Bytes of one copy, at most [`BYTES_MAX`].
    pub bytes: u64,
    /// A folder for the temporary file, which never has a name for longer than it takes to open it.
    pub folder: PathBuf,
    /// Makes one transfer of simulated devices fail, by its place in [`paths`].
    pub fault: Option<(usize, Fault)>,
}

/// What shall go wrong on a simulated device while a transfer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The copy never ends.
    Stall,
    /// The copy succeeds with a wrong byte.
    Corrupt,
    /// The copy fails.
    Fail,
}

/// One transfer to try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// From one device's memory to another's.
    Peer {
        /// Owner of the source.
        from: String,
        /// Owner of the destination, which reads it back.
        to: String,
        /// The source's owner moves the bytes (a write), else the destination's (a read).
        pushed: bool,
    },
    /// Pinned host memory to a device.
    HostToDevice(String),
    /// A device to pinned host memory.
    DeviceToHost(String),
    /// A file to a device, the way a load would take.
    FileToDevice(String),
    /// Device memory as a dma-buf, the way a NIC's driver would take it. No byte moves.
    DmaBuf(String),
}

/// Every path between `devices`, the host and a file: each pair in each direction, moved by each side;
/// last, each device's memory as a dma-buf.
pub fn paths(devices: &[Info]) -> Vec<Path> {
    let names: Vec<String> =
        devices.iter().take(DEVICES_MAX).map(|info| info.id.to_string()).collect();
    let mut paths = Vec::new();
    for name in &names {
        paths.push(Path::HostToDevice(name.clone()));
        paths.push(Path::DeviceToHost(name.clone()));
        paths.push(Path::FileToDevice(name.clone()));
    }
    for from in &names {
        for to in names.iter().filter(|to| *to != from) {
            for pushed in [true, false] {
                paths.push(Path::Peer { from: from.clone(), to: to.clone(), pushed });
            }
        }
    }
    paths.extend(names.into_iter().map(Path::DmaBuf));
    paths
}

/// The devices that a probe of this machine uses: its GPUs, or the simulated ones where it has none.
///
/// # Errors
/// Why the GPUs that are there do not work.
pub fn devices() -> crate::Result<Vec<Info>> {
    let simulated = Gpu::default_device()?.info().simulated;
    Ok(Gpu::list().into_iter().filter(|info| info.simulated == simulated).collect())
}

/// What the parent asks of the child: one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    path: Path,
    bytes: u64,
    folder: PathBuf,
    fault: Option<Fault>,
    /// After this many milliseconds the child gives up by itself, should it still be alive.
    give_up_ms: u64,
}

/// What the child answers: one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    outcome: Outcome,
    mb_per_s: Option<u64>,
    direct: bool,
    note: String,
}

impl Answer {
    fn not_verified(outcome: Outcome, note: impl Into<String>) -> Self {
        Self { outcome, mb_per_s: None, direct: false, note: note.into() }
    }
}

/// The transfer that `path` is, with how it went.
fn transfer(path: &Path, devices: &[Info], bytes: u64, answer: Answer) -> Transfer {
    let place = |name: &str| place(name, devices);
    let (from, to, by) = match path {
        Path::Peer { from, to, pushed } => (from.as_str(), to, if *pushed { from } else { to }),
        Path::HostToDevice(device) => ("host", device, device),
        Path::FileToDevice(device) => ("file", device, device),
        Path::DeviceToHost(device) | Path::DmaBuf(device) => (device.as_str(), device, device),
    };
    let to = match path {
        Path::DeviceToHost(_) => place("host"),
        Path::DmaBuf(_) => place("dma-buf"),
        _ => place(to),
    };
    Transfer {
        from: place(from),
        to,
        by: place(by),
        outcome: answer.outcome,
        bytes,
        mb_per_s: answer.mb_per_s,
        direct: answer.direct,
        simulated: devices.iter().any(|info| info.simulated && info.id.to_string() == *by),
        note: answer.note,
    }
}

fn place(name: &str, devices: &[Info]) -> Place {
    let known = devices.iter().find(|info| info.id.to_string() == name);
    let address = known.and_then(|info| info.cuda.as_ref()?.pci).map(|pci| pci.to_string());
    Place { name: name.to_owned(), bdf: address.and_then(|text| Bdf::parse(&text)) }
}

/// The device that a path names.
fn open(name: &str) -> crate::Result<Gpu> {
    let id = name.parse::<DeviceId>()?;
    Gpu::open(&id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ordered_pair_is_moved_by_each_side() {
        let info = |index| Info {
            id: DeviceId::Sim(index),
            name: String::new(),
            simulated: true,
            profile: None,
            memory_bytes: 0,
            cuda: None,
        };
        let devices: Vec<Info> = (0..3).map(info).collect();
        let all = paths(&devices);
        let peers = all.iter().filter(|path| matches!(path, Path::Peer { .. })).count();
        assert_eq!((peers, all.len()), (3 * 2 * 2, 3 * 2 * 2 + 3 * 4));
        assert!(all.iter().enumerate().all(|(at, path)| !all[..at].contains(path)));
        let peer = Path::Peer { from: "sim:0".into(), to: "sim:2".into(), pushed: false };
        let made = transfer(&peer, &devices, 1, Answer::not_verified(Outcome::Failed, "x"));
        assert_eq!(made.label(), "sim:0 -> sim:2 by sim:2 (simulated)");
        let back = Path::DeviceToHost("sim:1".into());
        let made = transfer(&back, &devices, 1, Answer::not_verified(Outcome::Failed, "x"));
        assert_eq!(made.label(), "sim:1 -> host by sim:1 (simulated)");
        let many: Vec<Info> = (0..40).map(info).collect();
        assert_eq!(paths(&many).len(), 4 * DEVICES_MAX + 2 * DEVICES_MAX * (DEVICES_MAX - 1));
    }
}
