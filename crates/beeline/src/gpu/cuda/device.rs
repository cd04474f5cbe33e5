//! The driver of this process, its devices and their names.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::collective::IpcMapping;
use beeline_sys::cuda::{
    Context, CuResult, Device as Handle, DeviceAttribute, DeviceMem, Driver, Error as CudaError,
    ForeignStream, HostRegistration, MemoryType, Module, PointerInfo,
};
use beeline_sys::mem::{FileMap, HostMem};

use super::error::{failed, no_memory, unusable};
use super::{Memory, Stream};
use crate::config::CudaConfig;
use crate::error::{Error, Kind, Result};
use crate::gpu::{
    DeviceId, DeviceUuid, Info, MemoryInfo, PciAddr, PinnedMem, RegisteredMap, Usage,
};
use crate::lock;
use crate::p2p::share::Name;

/// What only a CUDA device has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaInfo {
    /// Its UUID; that of the instance where the device is one (MIG).
    pub uuid: DeviceUuid,
    /// Where its GPU sits on PCI, where the driver says so in a form that is understood.
    pub pci: Option<PciAddr>,
    /// The NUMA node of the host that the GPU is attached to, where the kernel tells.
    pub numa_node: Option<u32>,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// The CUDA version of the driver, as `1000 * major + 10 * minor`.
    pub driver_version: u32,
}

/// A CUDA device. Cheap to clone; every clone is the same device.
#[derive(Clone)]
pub(crate) struct Device {
    inner: Arc<DeviceInner>,
}

struct DeviceInner {
    handle: Handle,
    info: Info,
    /// Made when first needed: a context costs device memory and a tenth of a second.
    context: Mutex<Option<Arc<Context>>>,
    module: Mutex<Option<Arc<Module>>>,
    atomic: Mutex<Option<Arc<Module>>>,
}

/// How many devices the process sees.
pub(crate) fn device_count() -> Result<u32> {
    count(&driver()?)
}

impl Device {
    /// The same device is handed out for the same ordinal.
    pub(crate) fn open(id: &DeviceId) -> Result<Self> {
        static DEVICES: OnceLock<Mutex<Vec<(u32, Device)>>> = OnceLock::new();

        let driver = driver()?;
        let ordinal = ordinal(&driver, id)?;
        let mut devices = lock(DEVICES.get_or_init(Mutex::default));
        if let Some((_, device)) = devices.iter().find(|(number, _)| *number == ordinal) {
            return Ok(device.clone());
        }
        let device =
            Self::new(&driver, ordinal).map_err(|error| failed(format!("open {id}"), error))?;
        devices.push((ordinal, device.clone()));
        Ok(device)
    }

    fn new(driver: &Arc<Driver>, ordinal: u32) -> Result<Self, CudaError> {
        let handle = handle(driver, ordinal)?;
        let uuid = uuid(&handle)?;
        let mut name = handle.name()?;
        if uuid.mig && !name.contains("MIG") {
            name.push_str(" (MIG instance)");
        }
        let pci = PciAddr::parse(&handle.pci_bus_id()?);
        let number = |attribute| u32::try_from(handle.attribute(attribute)).unwrap_or(0);
        let cuda = CudaInfo {
            uuid,
            pci,
            numa_node: pci.and_then(numa_node),
            compute_capability: (
                number(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR),
                number(DeviceAttribute::COMPUTE_CAPABILITY_MINOR),
            ),
            driver_version: u32::try_from(driver.version().0).unwrap_or(0),
        };
        let info = Info {
            id: DeviceId::Cuda(ordinal),
            name,
            simulated: false,
            profile: None,
            memory_bytes: handle.total_memory()?,
            cuda: Some(cuda),
        };
        let (context, module, atomic) = Default::default();
        let inner = DeviceInner { handle, info, context, module, atomic };
        Ok(Self { inner: Arc::new(inner) })
    }

    pub(crate) fn info(&self) -> &Info {
        &self.inner.info
    }

    /// The device's name, for messages.
    pub(super) fn label(&self) -> String {
        self.inner.info.id.to_string()
    }

    pub(crate) fn memory(&self) -> Result<MemoryInfo> {
        let info = self.context()?.memory_info();
        let info = info.map_err(|error| self.failed("ask for the free memory", error))?;
        Ok(MemoryInfo { total: info.total, free: info.free })
    }

    pub(crate) fn usage(&self) -> Usage {
        let context = lock(&self.inner.context).clone();
        let used = context.map(|context| context.usage()).unwrap_or_default();
        Usage { allocated: used.device, pinned: used.pinned, registered: used.mapped }
    }

    pub(crate) fn alloc(&self, len: u64, shareable: bool) -> Result<Memory> {
        let context = self.context()?;
        if len > self.inner.info.memory_bytes {
            // More than the device has: the driver would round it up, and what then overflows is its
            // business.
            return Err(no_memory(&self.label(), len, context.memory_info().ok()));
        }
        // What finished operations still hold would otherwise be counted as in use.
        context.sweep();
        let mem = match shareable.then(|| DeviceMem::alloc_virtual(&context, len)) {
            None | Some(Err(CudaError::Unsupported { .. })) => DeviceMem::alloc(&context, len),
            Some(made) => made,
        };
        mem.map(|mem| Memory::new(self, mem)).map_err(|error| self.not_allocated(len, error))
    }

    pub(super) fn not_allocated(&self, len: u64, error: CudaError) -> Error {
        if error.result() != Some(CuResult::OUT_OF_MEMORY) {
            return self.failed(format_args!("allocate {len} bytes"), error);
        }
        let memory = lock(&self.inner.context).clone().and_then(|known| known.memory_info().ok());
        no_memory(&self.label(), len, memory).because(error)
    }

    pub(crate) fn foreign(
        &self,
        ptr: DevicePtr,
        len: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Memory> {
        let context = self.context()?;
        let info = PointerInfo::of(&context, ptr);
        let info = info.map_err(|error| self.failed(format_args!("look up {ptr}"), error))?;
        if let Some(reason) = self.unfit(&info, ptr, len) {
            return Err(Error::refused(format!(
                "{len} bytes at {ptr} cannot be used on {}: {reason}",
                self.label()
            )));
        }
        let mem = DeviceMem::foreign(&context, ptr, len, owner);
        mem.map(|mem| Memory::new(self, mem))
            .map_err(|error| self.failed(format_args!("use {len} bytes at {ptr}"), error))
    }

    /// Memory that another process shares, of at least `len` bytes, where this device reaches it.
    pub(crate) fn named(&self, name: Name, len: u64) -> Result<Memory> {
        let context = self.context()?;
        let failed = |error| self.failed("map device memory of another process", error);
        let mem = match name {
            Name::Handle(fd, bytes) if bytes >= len => DeviceMem::import(&context, &fd, bytes),
            Name::Handle(_, bytes) => {
                return Err(Error::refused(format!("{len} bytes of memory that has {bytes}")));
            }
            Name::Ipc(handle) => IpcMapping::open(&context, handle).and_then(|mapping| {
                let ptr = DevicePtr::new(mapping.ptr());
                let known = PointerInfo::of(&context, ptr)?;
                if known.len < len {
                    return Err(CudaError::Refused("the memory shared is shorter"));
                }
                DeviceMem::foreign(&context, ptr, len, Arc::new(mapping))
            }),
            Name::File(..) => return Err(Error::refused("simulated memory, for a CUDA device")),
        };
        mem.map(|mem| Memory::new(self, mem)).map_err(failed)
    }

    /// Why `[ptr, ptr + len)` is not ordinary memory of this device.
    fn unfit(&self, info: &PointerInfo, ptr: DevicePtr, len: u64) -> Option<String> {
        if len == 0 {
            return Some("the range is empty".to_owned());
        }
        if info.managed {
            return Some("it is managed memory, which the driver moves".to_owned());
        }
        match info.memory {
            MemoryType::DEVICE => {}
            MemoryType::UNKNOWN => return Some("the driver does not know the address".to_owned()),
            MemoryType::HOST => return Some("it is host memory".to_owned()),
            MemoryType(other) => return Some(format!("it is memory of CUDA type {other}")),
        }
        if DeviceId::Cuda(u32::try_from(info.device).unwrap_or(u32::MAX)) != self.inner.info.id {
            return Some(format!("it belongs to cuda:{}", info.device));
        }
        if !info.of_context {
            return Some("it belongs to a context other than the device's primary one".to_owned());
        }
        let offset = ptr.checked_offset_from(info.start)?;
        if offset > info.len || len > info.len - offset {
            return Some(format!("its allocation is {} bytes at {}", info.len, info.start));
        }
        None
    }

    pub(crate) fn pin(&self, mem: Arc<HostMem>) -> Result<PinnedMem> {
        let context = self.context()?;
        let registration = HostRegistration::pin(&context, Arc::clone(&mem)).map_err(|error| {
            let full = error.result() == Some(CuResult::OUT_OF_MEMORY);
            let error = self.failed(format_args!("pin {} bytes of host memory", mem.len()), error);
            if full {
                return error.remedy("raise the limit on locked memory (ulimit -l), or pin less");
            }
            error
        })?;
        Ok(PinnedMem::cuda(mem, Arc::new(registration)))
    }

    pub(crate) fn register(&self, map: Arc<FileMap>) -> Result<RegisteredMap> {
        let context = self.context()?;
        let registration = HostRegistration::map(&context, Arc::clone(&map)).map_err(|error| {
            self.failed(format_args!("register {} bytes of a mapped file", map.len()), error)
        })?;
        Ok(RegisteredMap::cuda(map, Arc::new(registration)))
    }

    pub(crate) fn stream(&self) -> Result<Stream> {
        Stream::new(self, None)
    }

    pub(crate) fn foreign_stream(&self, stream: ForeignStream) -> Result<Stream> {
        Stream::new(self, Some(stream))
    }

    pub(crate) fn reach(&self, peer: &Self) -> Result<bool> {
        if !self.inner.handle.can_access_peer(&peer.inner.handle) {
            return Ok(false);
        }
        let (context, other) = (self.context()?, peer.context()?);
        let enabled = context.enable_peer(&other);
        enabled.map_err(|error| self.failed(format_args!("reach {}", peer.label()), error))
    }

    /// Whether the link to `peer` carries atomic operations of the devices, as NVLink does and PCI does not.
    pub(crate) fn has_fabric_to(&self, peer: &Self) -> bool {
        const NATIVE_ATOMICS: i32 = 3;
        self.inner.handle.p2p_attribute(NATIVE_ATOMICS, &peer.inner.handle) == Some(1)
    }

    pub(crate) fn context(&self) -> Result<Arc<Context>> {
        let mut context = lock(&self.inner.context);
        if let Some(context) = &*context {
            return Ok(Arc::clone(context));
        }
        let made = self.inner.handle.retain_primary();
        let made = made.map_err(|error| self.failed("make the context", error))?;
        Ok(Arc::clone(context.insert(made)))
    }

    /// The kernels that every device of Beeline has.
    pub(super) fn module(&self) -> Result<Arc<Module>> {
        let context = self.context()?;
        let mut module = lock(&self.inner.module);
        if let Some(module) = &*module {
            return Ok(Arc::clone(module));
        }
        let loaded = Module::load(&context, beeline_sys::cuda::BASIC);
        let loaded = loaded.map_err(|error| self.failed("load the kernels", error))?;
        Ok(Arc::clone(module.insert(Arc::new(loaded))))
    }

    /// The kernels for atomic operations, compiled when they are first needed.
    pub(super) fn atomic_module(&self) -> Result<Arc<Module>> {
        let context = self.context()?;
        let mut module = lock(&self.inner.atomic);
        if let Some(module) = &*module {
            return Ok(Arc::clone(module));
        }
        let loaded = Module::load(&context, beeline_sys::cuda::ATOMIC);
        let loaded = loaded.map_err(|error| self.failed("load the atomic kernels", error))?;
        Ok(Arc::clone(module.insert(Arc::new(loaded))))
    }

    pub(super) fn attribute(&self, attribute: DeviceAttribute) -> i32 {
        self.inner.handle.attribute(attribute)
    }

    #[cold]
    pub(crate) fn failed(&self, action: impl fmt::Display, error: CudaError) -> Error {
        failed(format_args!("{action} on {}", self.label()), error)
    }
}

/// The driver, started once. A failure is not remembered: the next call tries again.
pub(crate) fn driver() -> Result<Arc<Driver>> {
    static DRIVER: OnceLock<Mutex<Option<Arc<Driver>>>> = OnceLock::new();

    let mut driver = lock(DRIVER.get_or_init(Mutex::default));
    if let Some(driver) = &*driver {
        return Ok(Arc::clone(driver));
    }
    let config = CudaConfig::from_env();
    let started = Driver::open(config.library.as_deref()).map_err(unusable)?;
    Ok(Arc::clone(driver.insert(started)))
}

fn count(driver: &Arc<Driver>) -> Result<u32> {
    let count = driver.device_count().map_err(|error| failed("count CUDA devices", error))?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn handle(driver: &Arc<Driver>, ordinal: u32) -> Result<Handle, CudaError> {
    driver.device(i32::try_from(ordinal).unwrap_or(i32::MAX))
}

fn uuid(handle: &Handle) -> Result<DeviceUuid, CudaError> {
    let bytes = handle.uuid()?;
    // The two differ exactly where the device is an instance of a GPU.
    let mig = handle.gpu_uuid().is_some_and(|gpu| gpu != bytes);
    Ok(DeviceUuid { mig, bytes })
}

/// The ordinal of the device that `id` names, among those that the process sees.
fn ordinal(driver: &Arc<Driver>, id: &DeviceId) -> Result<u32> {
    let count = count(driver)?;
    let matches = |ordinal: &u32| -> Result<bool, CudaError> {
        let handle = handle(driver, *ordinal)?;
        Ok(match id {
            DeviceId::CudaUuid(wanted) => uuid(&handle)? == *wanted,
            DeviceId::CudaPci(wanted) => PciAddr::parse(&handle.pci_bus_id()?) == Some(*wanted),
            DeviceId::Cuda(wanted) => ordinal == wanted,
            DeviceId::Sim(_) => false,
        })
    };
    let mut found = Vec::new();
    for ordinal in 0..count {
        if matches(&ordinal).map_err(|error| failed(format!("look for {id}"), error))? {
            found.push(ordinal);
        }
    }
    match found.as_slice() {
        [ordinal] => Ok(*ordinal),
        [] => Err(not_found(driver, id, count)),
        several => Err(Error::refused(format!(
            "{id} names {} devices (MIG instances of one GPU): {}",
            several.len(),
            names(driver, several)
        ))
        .remedy("name one of them by its ordinal or its MIG UUID")),
    }
}

fn not_found(driver: &Arc<Driver>, id: &DeviceId, count: u32) -> Error {
    let all: Vec<u32> = (0..count).collect();
    let visible = CudaConfig::from_env().visible_devices;
    let hidden = visible.map(|list| format!("; CUDA_VISIBLE_DEVICES={list:?} may hide it"));
    let text = format!(
        "there is no device {id}; this process sees {}{}",
        if all.is_empty() { "no CUDA device".to_owned() } else { names(driver, &all) },
        hidden.unwrap_or_default()
    );
    Error::new(Kind::NotFound, text).remedy("name one of `beeline devices`")
}

/// `cuda:0 (GPU-..., 0000:3b:00.0), cuda:1 ...`
fn names(driver: &Arc<Driver>, ordinals: &[u32]) -> String {
    let name = |ordinal: &u32| {
        let handle = handle(driver, *ordinal).ok();
        let uuid = handle.as_ref().and_then(|handle| uuid(handle).ok());
        let address = handle.and_then(|handle| handle.pci_bus_id().ok());
        match (uuid, address.as_deref().and_then(PciAddr::parse)) {
            (Some(uuid), Some(address)) => format!("cuda:{ordinal} ({uuid}, {address})"),
            (Some(uuid), None) => format!("cuda:{ordinal} ({uuid})"),
            _ => format!("cuda:{ordinal}"),
        }
    };
    ordinals.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// The host's NUMA node of a PCI function; the kernel says -1 where there is only one.
fn numa_node(address: PciAddr) -> Option<u32> {
    let path = format!("/sys/bus/pci/devices/{address}/numa_node");
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
