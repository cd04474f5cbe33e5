//! Memory a device can reach: its own, pinned host memory, and mapped files.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use beeline_core::addr::{BusAddr, ByteRange, DevicePtr};
use beeline_core::reason::{Code, Reason};
use beeline_sys::cuda::HostRegistration;
use beeline_sys::mem::{FileMap, HostMem, OutOfBounds};

use super::{Gpu, Inner, cuda, sim};
use crate::error::{Error, Kind, Result};
use crate::p2p::share::Name;

/// Device memory, or a part of it. Cheap to clone and to slice; freed with the last handle and the
/// last operation in flight.
#[derive(Clone)]
pub struct Buffer {
    memory: DeviceMemory,
    offset: u64,
    len: u64,
}

#[derive(Clone)]
pub(crate) enum DeviceMemory {
    Sim(Arc<sim::Allocation>),
    Cuda(cuda::Memory),
}

impl Buffer {
    pub(crate) const fn sim(allocation: Arc<sim::Allocation>, len: u64) -> Self {
        Self { memory: DeviceMemory::Sim(allocation), offset: 0, len }
    }

    pub(crate) const fn cuda(memory: cuda::Memory, len: u64) -> Self {
        Self { memory: DeviceMemory::Cuda(memory), offset: 0, len }
    }

    /// `len` bytes at `ptr` on `gpu` that somebody else allocated (a framework's tensor). They are
    /// used in place and never freed here; `owner` is dropped when no buffer and no operation in
    /// flight uses them any more, and must keep them alive until then.
    ///
    /// The function is safe although it takes an address: the driver is asked whether `[ptr, ptr +
    /// len)` is device memory of this device, and device addresses are checked by the device. Where
    /// the owner frees the memory early, a copy fails or hits other device memory, but no memory of
    /// this process's.
    ///
    /// # Errors
    /// `is_refused` where the range is not wholly one allocation of ordinary memory of this device:
    /// managed memory (the driver moves it), host memory, memory of another device or context, an
    /// address the driver does not know; and for a simulated device.
    pub fn from_foreign(
        gpu: &Gpu,
        ptr: DevicePtr,
        len: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        match &gpu.inner {
            Inner::Cuda(device) => Ok(Self::cuda(device.foreign(ptr, len, owner)?, len)),
            Inner::Sim(_) => Err(Error::refused(format!(
                "{} has no memory but its own, so {ptr} cannot be used on it",
                gpu.id()
            ))),
        }
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the buffer has no byte (an empty slice of another).
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the buffer starts in the device's address space. It stays there for its whole life, also
    /// where the pages behind it move.
    pub fn ptr(&self) -> DevicePtr {
        match &self.memory {
            DeviceMemory::Sim(allocation) => {
                DevicePtr::new(allocation.ptr().as_u64() + self.offset)
            }
            DeviceMemory::Cuda(memory) => DevicePtr::new(memory.ptr().as_u64() + self.offset),
        }
    }

    /// The driver's memory behind it, on a CUDA device.
    pub(crate) fn as_cuda(&self) -> Option<&Arc<beeline_sys::cuda::DeviceMem>> {
        match &self.memory {
            DeviceMemory::Cuda(memory) => Some(memory.mem()),
            DeviceMemory::Sim(_) => None,
        }
    }

    /// Lets another CUDA device of this process read and write the whole memory behind this buffer, which is from
    /// [`Gpu::alloc_shareable`]: collectives then copy straight into it.
    ///
    /// # Errors
    /// `is_refused` for memory of another kind; what the devices say that cannot reach each other.
    pub fn open_to(&self, gpu: &Gpu) -> Result<()> {
        let text = || format!("memory of {} for {}", self.gpu().id(), gpu.id());
        let memory = self.as_cuda().ok_or_else(|| Error::refused(text()))?;
        let opened = memory.open_to(&*gpu.cuda_context()?);
        opened.map_err(|error| Error::refused(format!("cannot open {}", text())).because(error))
    }

    /// How another process finds the memory, and where in it this buffer starts.
    ///
    /// # Errors
    /// `is_refused` for memory that cannot be shared.
    pub(crate) fn name(&self) -> Result<(Name, u64)> {
        let name = match &self.memory {
            DeviceMemory::Sim(allocation) => allocation.name()?,
            DeviceMemory::Cuda(memory) => memory.name()?,
        };
        Ok((name, self.offset))
    }

    /// `len` bytes at `offset` of memory that another process shares, as `gpu` reaches them.
    pub(crate) fn named(gpu: &Gpu, name: Name, offset: u64, len: u64) -> Result<Self> {
        let end = offset.checked_add(len).filter(|_| len > 0);
        let end =
            end.ok_or_else(|| Error::refused(format!("{len} bytes at {offset} of memory")))?;
        let memory = match &gpu.inner {
            Inner::Sim(device) => DeviceMemory::Sim(device.named(name, end)?),
            Inner::Cuda(device) => DeviceMemory::Cuda(device.named(name, end)?),
        };
        Ok(Self { memory, offset, len })
    }

    /// The device that holds it.
    pub fn gpu(&self) -> Gpu {
        match &self.memory {
            DeviceMemory::Sim(allocation) => Gpu { inner: Inner::Sim(allocation.device().clone()) },
            DeviceMemory::Cuda(memory) => Gpu { inner: Inner::Cuda(memory.device().clone()) },
        }
    }

    /// The part `range` of this buffer, sharing its memory.
    ///
    /// # Errors
    /// `is_refused` where the range does not lie inside.
    pub fn slice(&self, range: ByteRange) -> Result<Self> {
        self.check(range.start, range.len)?;
        Ok(Self { memory: self.memory.clone(), offset: self.offset + range.start, len: range.len })
    }

    /// A window through which the CPU and peers address this memory.
    ///
    /// # Errors
    /// `is_no_route` where the device has none (profile `plain`).
    pub fn window(&self) -> Result<BarWindow> {
        match &self.memory {
            DeviceMemory::Sim(allocation) if allocation.device().has_window() => {
                Ok(BarWindow { buffer: self.clone() })
            }
            _ => Err(no_window(&self.gpu())),
        }
    }

    /// The memory, and the absolute offset of `[offset, offset + len)` in it.
    pub(crate) fn locate(&self, offset: u64, len: u64) -> Result<(&DeviceMemory, u64)> {
        self.check(offset, len)?;
        Ok((&self.memory, self.offset + offset))
    }

    /// [`Self::locate`], for memory of a simulated device.
    pub(crate) fn locate_sim(&self, offset: u64, len: u64) -> Result<(&Arc<sim::Allocation>, u64)> {
        match self.locate(offset, len)? {
            (DeviceMemory::Sim(allocation), at) => Ok((allocation, at)),
            (DeviceMemory::Cuda(_), _) => Err(self.misplaced("a simulated device")),
        }
    }

    /// [`Self::locate`], for memory of a CUDA device.
    pub(crate) fn locate_cuda(&self, offset: u64, len: u64) -> Result<(&cuda::Memory, u64)> {
        match self.locate(offset, len)? {
            (DeviceMemory::Cuda(memory), at) => Ok((memory, at)),
            (DeviceMemory::Sim(_), _) => Err(self.misplaced("a CUDA device")),
        }
    }

    fn misplaced(&self, wanted: &str) -> Error {
        Error::refused(format!("a buffer of {} cannot be used on {wanted}", self.gpu().id()))
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        if offset > self.len || len > self.len - offset {
            let outside = OutOfBounds { offset, len, size: self.len };
            return Err(Error::refused("cannot use this part of a device buffer").because(outside));
        }
        Ok(())
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({}, {} bytes at {})", self.gpu().id(), self.len, self.ptr())
    }
}

fn no_window(gpu: &Gpu) -> Error {
    let text = format!("{} offers no BAR window into its memory", gpu.id());
    Error::new(Kind::NoRoute, text).with_reasons(vec![Reason::new(Code::DeviceNoBarWindow)])
}

/// Device memory as the bus shows it.
#[derive(Clone, Debug)]
pub struct BarWindow {
    buffer: Buffer,
}

impl BarWindow {
    /// The memory behind it.
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.buffer.len()
    }

    /// Whether the window has no byte.
    pub const fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The bus address of the byte at `offset` and how many bytes follow it contiguously. It changes
    /// when the memory moves; memory that is pinned does not.
    ///
    /// # Errors
    /// `is_refused` outside the window.
    pub fn bus_addr(&self, offset: u64) -> Result<(BusAddr, u64)> {
        let (allocation, at) = self.buffer.locate_sim(offset, 0)?;
        allocation
            .bus_addr(at)
            .map(|(addr, run)| (addr, run.min(self.len() - offset)))
            .ok_or_else(|| Error::refused(format!("no byte at offset {offset}")))
    }

    /// Copies bytes out of device memory by the CPU.
    ///
    /// # Errors
    /// `is_refused` outside the window.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (allocation, at) = self.buffer.locate_sim(offset, into.len() as u64)?;
        Ok(allocation.read(at, into)?)
    }

    /// Copies bytes into device memory by the CPU.
    ///
    /// # Errors
    /// `is_refused` outside the window.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let (allocation, at) = self.buffer.locate_sim(offset, from.len() as u64)?;
        Ok(allocation.write(at, from)?)
    }
}

/// Host memory that a device can read and write directly. Cheap to clone.
///
/// The CPU sees it as a [`HostMem`], never as a slice: the device may write it at any time.
#[derive(Clone)]
pub struct PinnedMem {
    mem: Arc<HostMem>,
    // Unpinned with the last handle; unpinned before `mem` is unmapped because it holds it too.
    pin: Pin,
}

/// What undoes the pinning, with the kind of device it is for. CUDA pins for every CUDA device.
#[derive(Clone)]
enum Pin {
    Sim { _guard: Arc<dyn Send + Sync> },
    Cuda(Arc<HostRegistration>),
}

impl Pin {
    fn cuda(&self, what: &str) -> Result<&Arc<HostRegistration>> {
        match self {
            Self::Cuda(registration) => Ok(registration),
            Self::Sim { .. } => Err(Error::refused(format!(
                "{what} pinned for a simulated device cannot be used by a CUDA device"
            ))),
        }
    }
}

impl PinnedMem {
    pub(crate) fn sim(mem: Arc<HostMem>, guard: Arc<dyn Send + Sync>) -> Self {
        Self { mem, pin: Pin::Sim { _guard: guard } }
    }

    pub(crate) fn cuda(mem: Arc<HostMem>, registration: Arc<HostRegistration>) -> Self {
        Self { mem, pin: Pin::Cuda(registration) }
    }

    /// The memory as a CUDA device knows it.
    pub(crate) fn registration(&self) -> Result<&Arc<HostRegistration>> {
        self.pin.cuda("host memory")
    }

    /// The memory as the CPU and the kernel use it.
    pub const fn mem(&self) -> &Arc<HostMem> {
        &self.mem
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.mem.len()
    }

    /// Whether there is no byte. Always false.
    pub fn is_empty(&self) -> bool {
        self.mem.is_empty()
    }
}

impl fmt::Debug for PinnedMem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedMem({:?})", self.mem)
    }
}

/// File pages that a device may read directly. Cheap to clone.
#[derive(Clone)]
pub struct RegisteredMap {
    map: Arc<FileMap>,
    pin: Pin,
}

impl RegisteredMap {
    pub(crate) fn sim(map: Arc<FileMap>, guard: Arc<dyn Send + Sync>) -> Self {
        Self { map, pin: Pin::Sim { _guard: guard } }
    }

    pub(crate) fn cuda(map: Arc<FileMap>, registration: Arc<HostRegistration>) -> Self {
        Self { map, pin: Pin::Cuda(registration) }
    }

    /// The mapping as a CUDA device knows it.
    pub(crate) fn registration(&self) -> Result<&Arc<HostRegistration>> {
        self.pin.cuda("a mapped file")
    }

    /// The mapping.
    pub const fn map(&self) -> &Arc<FileMap> {
        &self.map
    }
}

impl fmt::Debug for RegisteredMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegisteredMap({:?})", self.map)
    }
}

impl From<OutOfBounds> for Error {
    fn from(outside: OutOfBounds) -> Self {
        Self::refused("cannot access memory").because(outside)
    }
}
