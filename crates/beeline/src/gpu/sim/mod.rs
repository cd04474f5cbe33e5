//! The simulated GPU: the embedded default, and the device that CI knows.
//!
//! Device memory is one memfd of the device's capacity, handed out in 64 KiB pages that need not be
//! contiguous, as a GPU's page tables do. An allocation keeps its device address while the pages
//! behind it may move. Streams are threads; copies are copies by the CPU, so its bandwidth is that of
//! host memory and every output says `simulated`.

mod attach;
mod fault;
mod kernel;
mod memory;
mod stream;

pub use fault::{Effect, Faults, Site};
pub(crate) use kernel::ATOMIC_KERNELS;
pub use kernel::KERNELS;
pub use memory::Allocation;

pub(crate) use attach::Attachment;
pub(crate) use kernel::Kernel;
pub(crate) use stream::{Event, Op, Place, Stream};

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use beeline_sys::mem::{FileMap, HostMem, memfd};

use self::memory::Pages;
use super::{Buffer, DeviceId, Info, MemoryInfo, PinnedMem, Profile, RegisteredMap, Usage};
use crate::config::SimConfig;
use crate::error::{Error, Kind, Result};
use crate::lock;
use crate::p2p::share::Name;

/// A simulated GPU. Cheap to clone; every clone is the same device.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<DeviceInner>,
}

#[derive(Debug)]
struct DeviceInner {
    index: u32,
    profile: Profile,
    capacity: u64,
    memory: OwnedFd,
    /// All of `memory`, mapped when an importer first needs it.
    bar: OnceLock<HostMem>,
    pages: Mutex<Pages>,
    allocated: AtomicU64,
    pinned: Arc<AtomicU64>,
    registered: Arc<AtomicU64>,
    faults: Faults,
}

/// Bytes counted while the value lives, with the memory they are about.
struct Counted<T> {
    counter: Arc<AtomicU64>,
    bytes: u64,
    _held: T,
}

impl<T> Counted<T> {
    fn new(counter: &Arc<AtomicU64>, bytes: u64, held: T) -> Self {
        counter.fetch_add(bytes, Ordering::Relaxed);
        Self { counter: Arc::clone(counter), bytes, _held: held }
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        self.counter.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Device {
    pub(super) fn new(index: u32, config: &SimConfig) -> Result<Self> {
        // Beyond the last page the kernel refuses a size just the same, and says so.
        let capacity = config.memory_bytes.checked_next_multiple_of(memory::PAGE_BYTES);
        let capacity = capacity.unwrap_or(config.memory_bytes);
        let memory = memfd("beeline-sim", capacity).map_err(|error| {
            Error::io(format_args!("make {capacity} bytes of simulated device memory"), error)
        })?;
        Ok(Self {
            inner: Arc::new(DeviceInner {
                index,
                profile: config.profile,
                capacity,
                memory,
                bar: OnceLock::new(),
                pages: Mutex::new(Pages::new(capacity)),
                allocated: AtomicU64::new(0),
                pinned: Arc::default(),
                registered: Arc::default(),
                faults: Faults::default(),
            }),
        })
    }

    pub(super) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// What to make fail, and when.
    pub fn faults(&self) -> &Faults {
        &self.inner.faults
    }

    /// Moves the pages behind `buffer` elsewhere in device memory; its address stays.
    ///
    /// Copies in flight finish first, later ones see the new pages. Importers that attached the memory
    /// dynamically lose their translation before the move and fault the new pages in after it.
    ///
    /// # Errors
    /// `is_refused` unless the profile is `movable`, and (code `memory-pinned`, naming the holders)
    /// where an importer pinned the memory; `is_out_of_memory` where there is no second place;
    /// `is_timeout` where an importer's access does not end.
    pub fn relocate(&self, buffer: &Buffer) -> Result<()> {
        if self.inner.profile != Profile::Movable {
            return Err(Error::refused(format!(
                "memory of a simulated device with profile {} does not move",
                self.inner.profile
            )));
        }
        buffer.locate_sim(0, 0)?.0.relocate()
    }

    pub(super) fn info(&self) -> Info {
        Info {
            id: DeviceId::Sim(self.inner.index),
            name: "Beeline simulated GPU".to_owned(),
            simulated: true,
            profile: Some(self.inner.profile),
            memory_bytes: self.inner.capacity,
            cuda: None,
        }
    }

    pub(super) fn memory(&self) -> MemoryInfo {
        MemoryInfo { total: self.inner.capacity, free: lock(&self.inner.pages).free_bytes() }
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            allocated: self.inner.allocated.load(Ordering::Relaxed),
            pinned: self.inner.pinned.load(Ordering::Relaxed),
            registered: self.inner.registered.load(Ordering::Relaxed),
        }
    }

    pub(super) fn has_window(&self) -> bool {
        self.inner.profile != Profile::Plain
    }

    pub(super) fn alloc(&self, len: u64) -> Result<Arc<Allocation>> {
        self.inner.faults.hit(Site::Alloc)?;
        Allocation::new(self, len).map(Arc::new)
    }

    /// Memory that another process shares, of at least `len` bytes.
    pub(super) fn named(&self, name: Name, len: u64) -> Result<Arc<Allocation>> {
        Allocation::named(self, name, len).map(Arc::new)
    }

    pub(super) fn pin(&self, mem: Arc<HostMem>) -> Result<PinnedMem> {
        self.inner.faults.hit(Site::Pin)?;
        let guard = Counted::new(&self.inner.pinned, mem.len(), Arc::clone(&mem));
        Ok(PinnedMem::sim(mem, Arc::new(guard)))
    }

    pub(super) fn register(&self, map: Arc<FileMap>) -> Result<RegisteredMap> {
        self.inner.faults.hit(Site::Register)?;
        let guard = Counted::new(&self.inner.registered, map.len(), Arc::clone(&map));
        Ok(RegisteredMap::sim(map, Arc::new(guard)))
    }

    pub(super) fn stream(&self) -> Result<Stream> {
        Stream::new(self.clone())
    }
}

/// The error of an operation that the simulated device failed.
fn device_error(text: impl Into<String>) -> Error {
    Error::new(Kind::Device, text)
}
