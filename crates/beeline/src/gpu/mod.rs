//! GPUs: devices, their memory, streams and events.
//!
//! A [`Gpu`] is a real CUDA device or a simulated one; code above this module does not know which.
//! The simulated GPU is a product, not a mock: its memory has a capacity and (in profile `movable`)
//! moves, its streams run in order on threads of their own, and it can be told to fail.
//!
//! Ownership: a [`Buffer`], [`Stream`] or [`PinnedMem`] keeps its device alive, and an operation in a
//! stream keeps the memory it touches alive until it has finished. So nothing here can be freed under
//! a running copy, whatever the caller drops.

mod buffer;
mod id;
pub mod sim;
mod stream;

pub use buffer::{BarWindow, Buffer, PinnedMem, RegisteredMap};
pub use id::{DeviceId, Profile};
pub use stream::{Compare, Event, KernelArg, Stream};

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use beeline_sys::mem::FileMap;

use crate::config::SimConfig;
use crate::error::{Error, Kind, Result};
use crate::lock;

/// A device that holds memory and copies. Cheap to clone; every clone is the same device.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) inner: Inner,
}

#[derive(Clone)]
pub(crate) enum Inner {
    Sim(sim::Device),
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// Its name in this process.
    pub id: DeviceId,
    /// Its model name.
    pub name: String,
    /// Whether it is simulated; every output that shows results must say so.
    pub simulated: bool,
    /// What it lets a process see of its memory; `None` for a real device.
    pub profile: Option<Profile>,
    /// Device memory in bytes.
    pub memory_bytes: u64,
}

/// Device memory now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// All of it, in bytes.
    pub total: u64,
    /// What can still be allocated, in bytes.
    pub free: u64,
}

/// What this process holds on one device through this library, in bytes.
///
/// All zero again after everything was dropped; tests compare exactly that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Device memory.
    pub allocated: u64,
    /// Pinned host memory.
    pub pinned: u64,
    /// File pages registered for the device to read.
    pub registered: u64,
}

impl Gpu {
    /// Opens the device `id`. The same simulated device is handed out for the same number.
    ///
    /// # Errors
    /// `is_not_found` where the device does not exist (the text names those that do),
    /// `is_device` where its driver fails.
    pub fn open(id: &DeviceId) -> Result<Self> {
        match id {
            DeviceId::Sim(index) => Ok(Self { inner: Inner::Sim(shared_sim(*index)?) }),
            DeviceId::Cuda(_) => Err(no_cuda(id)),
        }
    }

    /// A simulated device of its own, shared with nobody, for tests and experiments.
    ///
    /// # Errors
    /// `is_io` where the system refuses the memory behind it.
    pub fn simulated(config: &SimConfig) -> Result<Self> {
        Ok(Self { inner: Inner::Sim(sim::Device::new(0, config)?) })
    }

    /// The device to use where none is named: the first GPU, or `sim:0` on a machine without one.
    ///
    /// A machine that has an NVIDIA GPU whose driver does not work is an error here, never silently a
    /// simulation.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn default_device() -> Result<Self> {
        match nvidia_evidence() {
            None => Self::open(&DeviceId::Sim(0)),
            Some(evidence) => Self::open(&DeviceId::Cuda(0)).map_err(|error| {
                Error::new(Kind::Device, format!("this machine has an NVIDIA GPU ({evidence})"))
                    .because(error)
                    .remedy("name a simulated device with --to sim:0")
            }),
        }
    }

    /// Every device that [`Self::open`] would open without an error.
    pub fn list() -> Vec<Info> {
        let config = SimConfig::from_env();
        (0..config.devices)
            .filter_map(|index| Self::open(&DeviceId::Sim(index)).ok())
            .map(|gpu| gpu.info())
            .collect()
    }

    /// What the device is.
    pub fn info(&self) -> Info {
        match &self.inner {
            Inner::Sim(device) => device.info(),
        }
    }

    /// The device's name in this process.
    pub fn id(&self) -> DeviceId {
        self.info().id
    }

    /// Device memory now.
    ///
    /// # Errors
    /// `is_device` where the driver fails.
    pub fn memory(&self) -> Result<MemoryInfo> {
        match &self.inner {
            Inner::Sim(device) => Ok(device.memory()),
        }
    }

    /// What this process holds on the device through this library.
    pub fn usage(&self) -> Usage {
        match &self.inner {
            Inner::Sim(device) => device.usage(),
        }
    }

    /// Allocates `len` bytes of device memory, aligned to at least 256 bytes. Contents are unspecified.
    ///
    /// # Errors
    /// `is_out_of_memory`, saying how much is missing; `is_refused` for 0 bytes.
    pub fn alloc(&self, len: u64) -> Result<Buffer> {
        if len == 0 {
            return Err(Error::refused("cannot allocate 0 bytes of device memory"));
        }
        match &self.inner {
            Inner::Sim(device) => Ok(Buffer::sim(device.alloc(len)?, len)),
        }
    }

    /// Allocates `len` bytes of host memory that the device can read and write directly.
    ///
    /// # Errors
    /// `is_out_of_memory` where the host or its limit on locked memory has no room; `is_refused` for
    /// 0 bytes.
    pub fn pin(&self, len: u64) -> Result<PinnedMem> {
        if len == 0 {
            return Err(Error::refused("cannot pin 0 bytes of host memory"));
        }
        match &self.inner {
            Inner::Sim(device) => device.pin(len),
        }
    }

    /// Lets the device read the mapped pages of a file directly, until the value is dropped.
    ///
    /// # Errors
    /// `is_device` where the driver refuses the mapping.
    pub fn register(&self, map: Arc<FileMap>) -> Result<RegisteredMap> {
        match &self.inner {
            Inner::Sim(device) => device.register(map),
        }
    }

    /// A new stream: a queue of operations that run in order, beside other streams.
    ///
    /// # Errors
    /// `is_device` or `is_io` where it cannot be made.
    pub fn stream(&self) -> Result<Stream> {
        match &self.inner {
            Inner::Sim(device) => device.stream().map(Stream::sim),
        }
    }

    /// The simulated device behind this one, to inject faults or move memory.
    pub fn as_sim(&self) -> Option<&sim::Device> {
        match &self.inner {
            Inner::Sim(device) => Some(device),
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gpu").field(&self.id()).finish()
    }
}

/// One simulated device per number and process, so that capacity is shared like that of a real one.
fn shared_sim(index: u32) -> Result<sim::Device> {
    static DEVICES: OnceLock<Mutex<Vec<(u32, sim::Device)>>> = OnceLock::new();

    let config = SimConfig::from_env();
    if index >= config.devices {
        return Err(Error::new(
            Kind::NotFound,
            format!(
                "there is no device sim:{index}; this process has {} simulated",
                config.devices
            ),
        )
        .remedy("name one of `beeline devices`, or set BEELINE_SIM_DEVICES"));
    }
    let mut devices = lock(DEVICES.get_or_init(Mutex::default));
    if let Some((_, device)) = devices.iter().find(|(number, _)| *number == index) {
        return Ok(device.clone());
    }
    let device = sim::Device::new(index, &config)?;
    devices.push((index, device.clone()));
    Ok(device)
}

fn no_cuda(id: &DeviceId) -> Error {
    Error::new(Kind::Device, format!("cannot open {id}: this build drives simulated devices only"))
        .remedy("name a simulated device: sim:0")
}

/// What shows that this machine has an NVIDIA GPU, whether or not its driver works.
fn nvidia_evidence() -> Option<String> {
    for node in ["/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"] {
        if Path::new(node).exists() {
            return Some(node.to_owned());
        }
    }
    let entries = std::fs::read_dir("/sys/bus/pci/devices").ok()?;
    entries.flatten().find_map(|entry| {
        let read = |name: &str| std::fs::read_to_string(entry.path().join(name)).ok();
        let display = read("class")?.trim().strip_prefix("0x03").is_some();
        let nvidia = read("vendor")?.trim() == "0x10de";
        (display && nvidia).then(|| format!("PCI function {}", entry.file_name().to_string_lossy()))
    })
}
