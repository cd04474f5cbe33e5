//! Memory a device can reach: its own, pinned host memory, and mapped files.

use std::fmt;
use std::sync::Arc;

use beeline_core::addr::{BusAddr, ByteRange, DevicePtr};
use beeline_core::reason::{Code, Reason};
use beeline_sys::mem::{FileMap, HostMem, OutOfBounds};

use super::{Gpu, Inner, sim};
use crate::error::{Error, Kind, Result};

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
}

impl Buffer {
    pub(crate) const fn sim(allocation: Arc<sim::Allocation>, len: u64) -> Self {
        Self { memory: DeviceMemory::Sim(allocation), offset: 0, len }
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
        }
    }

    /// The device that holds it.
    pub fn gpu(&self) -> Gpu {
        match &self.memory {
            DeviceMemory::Sim(allocation) => Gpu { inner: Inner::Sim(allocation.device().clone()) },
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
            DeviceMemory::Sim(_) => Err(Error::new(
                Kind::NoRoute,
                format!("{} offers no BAR window into its memory", self.gpu().id()),
            )
            .with_reasons(vec![Reason::new(Code::DeviceNoBarWindow)])),
        }
    }

    /// The memory, and the absolute offset of `[offset, offset + len)` in it.
    pub(crate) fn locate(&self, offset: u64, len: u64) -> Result<(&DeviceMemory, u64)> {
        self.check(offset, len)?;
        Ok((&self.memory, self.offset + offset))
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

/// Device memory as the bus shows it.
#[derive(Clone, Debug)]
pub struct BarWindow {
    buffer: Buffer,
}

impl BarWindow {
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
        let (memory, at) = self.buffer.locate(offset, 0)?;
        match memory {
            DeviceMemory::Sim(allocation) => allocation
                .bus_addr(at)
                .map(|(addr, run)| (addr, run.min(self.len() - offset)))
                .ok_or_else(|| Error::refused(format!("no byte at offset {offset}"))),
        }
    }

    /// Copies bytes out of device memory by the CPU.
    ///
    /// # Errors
    /// `is_refused` outside the window.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (memory, at) = self.buffer.locate(offset, into.len() as u64)?;
        match memory {
            DeviceMemory::Sim(allocation) => Ok(allocation.read(at, into)?),
        }
    }

    /// Copies bytes into device memory by the CPU.
    ///
    /// # Errors
    /// `is_refused` outside the window.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let (memory, at) = self.buffer.locate(offset, from.len() as u64)?;
        match memory {
            DeviceMemory::Sim(allocation) => Ok(allocation.write(at, from)?),
        }
    }
}

/// Host memory that a device can read and write directly. Cheap to clone.
///
/// The CPU sees it as a [`HostMem`], never as a slice: the device may write it at any time.
#[derive(Clone)]
pub struct PinnedMem {
    mem: Arc<HostMem>,
    // Unpinned with the last handle; dropped before `mem` because it holds it too.
    _guard: Arc<dyn Send + Sync>,
}

impl PinnedMem {
    pub(crate) fn new(mem: Arc<HostMem>, guard: Arc<dyn Send + Sync>) -> Self {
        Self { mem, _guard: guard }
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
    _guard: Arc<dyn Send + Sync>,
}

impl RegisteredMap {
    pub(crate) fn new(map: Arc<FileMap>, guard: Arc<dyn Send + Sync>) -> Self {
        Self { map, _guard: guard }
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
