//! GPUs: devices, their memory, streams and events.
//!
//! A [`Gpu`] is a real CUDA device or a simulated one; code above this module does not know which.
//! The simulated GPU is a product, not a mock: its memory has a capacity and (in profile `movable`)
//! moves, its streams run in order on threads of their own, and it can be told to fail.
//!
//! Ownership: a [`Buffer`], [`Stream`] or [`PinnedMem`] keeps its device alive, and an operation in a
//! stream keeps the memory it touches alive until it has finished. So nothing here can be freed under
//! a running copy, whatever the caller drops.
//!
//! CUDA: the calling thread's current context, its streams and its captures stay as they were. The
//! primary context of a device (the one the CUDA runtime uses) is retained at the first allocation or
//! stream and kept for the rest of the process. [`Gpu::stream`] makes a stream that does not wait for
//! the default streams; [`Gpu::foreign_stream`] uses one that the caller has, the legacy default stream
//! and the per-thread default stream among them. Handle 0 is always the legacy default stream: a
//! program compiled for per-thread default streams passes [`ForeignStream::PER_THREAD_DEFAULT`], which
//! is that of whichever thread makes the call.

mod buffer;
mod cuda;
mod id;
mod share;
pub mod sim;
mod stream;

pub use beeline_sys::cuda::ForeignStream;
pub use buffer::{BarWindow, Buffer, PinnedMem, RegisteredMap};
pub use cuda::CudaInfo;
pub(crate) use cuda::{Device as CudaDevice, driver as cuda_driver};
pub use id::{DeviceId, DeviceUuid, PciAddr, Profile};
pub use share::RdmaAbility;
pub use stream::{Compare, Event, KernelArg, Stream};

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use beeline_sys::mem::{FileMap, HostMem};

use crate::config::{CudaConfig, SimConfig};
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
    Cuda(cuda::Device),
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
    /// What only a CUDA device has.
    pub cuda: Option<CudaInfo>,
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
/// All zero again after everything was dropped and what was in flight has run; tests compare exactly
/// that. After a failure that ends a CUDA context, what was in flight is never freed, since its end
/// can no longer be seen, and stays counted.
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
    /// Opening a CUDA device loads and starts the driver, but makes no context yet.
    ///
    /// # Errors
    /// `is_not_found` where the device does not exist (the text names those that do),
    /// `is_device` where its driver is missing or fails; [`Error::code`] tells how:
    /// `cuda-library-missing`, `cuda-library-broken`, `cuda-driver-too-old`, `cuda-symbol-missing`,
    /// `cuda-symbol-version`, `cuda-no-device` (not found), `cuda-driver-mismatch`,
    /// `cuda-init-failed`; `is_out_of_memory` where the driver has no memory to start.
    pub fn open(id: &DeviceId) -> Result<Self> {
        let inner = match id {
            DeviceId::Sim(index) => Inner::Sim(shared_sim(*index)?),
            DeviceId::Cuda(_) | DeviceId::CudaPci(_) | DeviceId::CudaUuid(_) => {
                Inner::Cuda(cuda::Device::open(id)?)
            }
        };
        Ok(Self { inner })
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
                let code = error.code();
                let remedy = error.hint().map_or_else(String::new, |hint| format!("{hint}; or "));
                Error::new(Kind::Device, format!("this machine has an NVIDIA GPU ({evidence})"))
                    .because(error)
                    .coded(code)
                    .remedy(remedy + "name a simulated device with --to sim:0")
            }),
        }
    }

    /// The CUDA device whose context is current in this thread; device 0 where none is.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn current_cuda() -> Result<Self> {
        let current = cuda_driver()?.current_device().and_then(|device| u32::try_from(device).ok());
        Self::open(&DeviceId::Cuda(current.unwrap_or(0)))
    }

    /// Every device that [`Self::open`] would open without an error, CUDA devices first. Where no CUDA
    /// device is listed, [`Self::cuda_devices`] says why.
    pub fn list() -> Vec<Info> {
        let cuda = Self::cuda_devices().unwrap_or(0);
        let simulated = SimConfig::from_env().devices;
        let ids = (0..cuda).map(DeviceId::Cuda).chain((0..simulated).map(DeviceId::Sim));
        ids.filter_map(|id| Self::open(&id).ok()).map(|gpu| gpu.info()).collect()
    }

    /// How many CUDA devices the process sees.
    ///
    /// # Errors
    /// Why there are none to be seen; as [`Self::open`].
    pub fn cuda_devices() -> Result<u32> {
        cuda::device_count()
    }

    /// What the device is.
    pub fn info(&self) -> Info {
        match &self.inner {
            Inner::Sim(device) => device.info(),
            Inner::Cuda(device) => device.info().clone(),
        }
    }

    /// Whether both are the same device; two private simulated ones are not, whatever their names.
    pub fn same_device(&self, other: &Self) -> bool {
        match (&self.inner, &other.inner) {
            (Inner::Sim(one), Inner::Sim(two)) => one.same(two),
            (Inner::Cuda(one), Inner::Cuda(two)) => one.info().id == two.info().id,
            (Inner::Sim(_), Inner::Cuda(_)) | (Inner::Cuda(_), Inner::Sim(_)) => false,
        }
    }

    /// The device's name in this process.
    pub fn id(&self) -> DeviceId {
        self.info().id
    }

    /// The NUMA node whose memory and CPUs are nearest to the device; `None` where that is unknown or
    /// makes no difference.
    pub fn numa_node(&self) -> Option<u32> {
        match &self.inner {
            Inner::Sim(_) => None,
            Inner::Cuda(device) => device.info().cuda.as_ref()?.numa_node,
        }
    }

    /// Device memory now.
    ///
    /// # Errors
    /// `is_device` where the driver fails.
    pub fn memory(&self) -> Result<MemoryInfo> {
        match &self.inner {
            Inner::Sim(device) => Ok(device.memory()),
            Inner::Cuda(device) => device.memory(),
        }
    }

    /// What this process holds on the device through this library.
    pub fn usage(&self) -> Usage {
        match &self.inner {
            Inner::Sim(device) => device.usage(),
            Inner::Cuda(device) => device.usage(),
        }
    }

    /// Allocates `len` bytes of device memory, aligned to at least 256 bytes. Contents are unspecified.
    ///
    /// # Errors
    /// `is_out_of_memory`, saying how much is missing; `is_refused` for 0 bytes.
    pub fn alloc(&self, len: u64) -> Result<Buffer> {
        self.alloc_as(len, false)
    }

    /// [`Self::alloc`] of memory that other devices may map: CUDA virtual memory that is fit for
    /// GPUDirect RDMA and for passing on, where the device has that; elsewhere ordinary memory.
    /// Takes whole granules of the device (2 MiB).
    ///
    /// # Errors
    /// As [`Self::alloc`].
    pub fn alloc_shareable(&self, len: u64) -> Result<Buffer> {
        self.alloc_as(len, true)
    }

    fn alloc_as(&self, len: u64, shareable: bool) -> Result<Buffer> {
        if len == 0 {
            return Err(Error::refused("cannot allocate 0 bytes of device memory"));
        }
        match &self.inner {
            Inner::Sim(device) => Ok(Buffer::sim(device.alloc(len)?, len)),
            Inner::Cuda(device) => Ok(Buffer::cuda(device.alloc(len, shareable)?, len)),
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
        let size = usize::try_from(len)
            .map_err(|_| Error::refused(format!("{len} bytes do not fit this address space")))?;
        let mem = HostMem::anonymous(size)
            .map_err(|error| Error::io(format_args!("pin {len} bytes of host memory"), error))?;
        if let Some(node) = self.numa_node() {
            // Only a matter of speed; containers may refuse it.
            let _ = mem.prefer_node(node);
        }
        self.pin_mem(Arc::new(mem))
    }

    /// Lets the device read and write host memory that is there already, until the value and what is
    /// in flight on it are gone. On CUDA it is pinned for every CUDA device of the process.
    ///
    /// # Errors
    /// As [`Self::pin`]; `is_refused` where the memory is pinned already.
    pub fn pin_mem(&self, mem: Arc<HostMem>) -> Result<PinnedMem> {
        match &self.inner {
            Inner::Sim(device) => device.pin(mem),
            Inner::Cuda(device) => device.pin(mem),
        }
    }

    /// Lets the device read the mapped pages of a file directly, until the value is dropped.
    ///
    /// # Errors
    /// `is_device` where the driver refuses the mapping.
    pub fn register(&self, map: Arc<FileMap>) -> Result<RegisteredMap> {
        match &self.inner {
            Inner::Sim(device) => device.register(map),
            Inner::Cuda(device) => device.register(map),
        }
    }

    /// A new stream: a queue of operations that run in order, beside other streams.
    ///
    /// # Errors
    /// `is_device` or `is_io` where it cannot be made.
    pub fn stream(&self) -> Result<Stream> {
        match &self.inner {
            Inner::Sim(device) => Ok(Stream::sim(device.stream()?, self.clone())),
            Inner::Cuda(device) => Ok(Stream::cuda(device.stream()?, self.clone())),
        }
    }

    /// Uses a CUDA stream that the caller has. It is never destroyed or synchronised here; while it is
    /// being captured into a graph, every operation is refused with code `stream-capturing`.
    ///
    /// # Errors
    /// `is_refused` for a stream of another device or context, and on a simulated device.
    pub fn foreign_stream(&self, stream: ForeignStream) -> Result<Stream> {
        match &self.inner {
            Inner::Cuda(device) => Ok(Stream::cuda(device.foreign_stream(stream)?, self.clone())),
            Inner::Sim(_) => {
                Err(Error::refused(format!("{} has no CUDA streams to use", self.id())))
            }
        }
    }

    /// Lets copies of this device reach the memory of `peer` without a stop in host memory; whether
    /// they can. On CUDA it stays so for the rest of the process.
    pub(crate) fn reach(&self, peer: &Self) -> Result<bool> {
        match (&self.inner, &peer.inner) {
            (Inner::Sim(_), Inner::Sim(_)) => Ok(true),
            (Inner::Cuda(device), Inner::Cuda(peer)) => device.reach(peer),
            (Inner::Sim(_), Inner::Cuda(_)) | (Inner::Cuda(_), Inner::Sim(_)) => Ok(false),
        }
    }

    /// The CUDA device behind this one.
    pub(crate) const fn as_cuda(&self) -> Option<&cuda::Device> {
        match &self.inner {
            Inner::Cuda(device) => Some(device),
            Inner::Sim(_) => None,
        }
    }

    /// The primary context of a CUDA device, made if nobody has.
    ///
    /// # Errors
    /// `is_device`; `is_refused` for a simulated device.
    pub(crate) fn cuda_context(&self) -> Result<Arc<beeline_sys::cuda::Context>> {
        match &self.inner {
            Inner::Cuda(device) => device.context(),
            Inner::Sim(_) => Err(Error::refused(format!("{} is no CUDA device", self.id()))),
        }
    }

    /// The simulated device behind this one, to inject faults or move memory.
    pub fn as_sim(&self) -> Option<&sim::Device> {
        match &self.inner {
            Inner::Sim(device) => Some(device),
            Inner::Cuda(_) => None,
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

/// What shows that this machine has an NVIDIA GPU, whether or not its driver works.
fn nvidia_evidence() -> Option<String> {
    if let Some(library) = CudaConfig::from_env().library {
        return Some(format!("BEELINE_CUDA_LIBRARY={}", library.display()));
    }
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
