//! The devices, and everything that was given out.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use beeline::Error;
use beeline::config::SimConfig;
use beeline::gpu::sim::{Effect, Site};
use beeline::gpu::{Buffer, Event, Gpu, PinnedMem, Stream};

use crate::capture::{Captures, Place};
use crate::ffi::Cu;
use crate::graph::{Exec, Graph};
use crate::module::{Function, Module};
use crate::settings::Settings;

/// What capture mode a thread starts with (`CU_STREAM_CAPTURE_MODE_GLOBAL`), and the relaxed one.
pub(crate) const MODE_GLOBAL: i32 = 0;
pub(crate) const MODE_RELAXED: i32 = 2;

pub(crate) struct Driver {
    pub(crate) settings: Settings,
    pub(crate) devices: Vec<Device>,
    pub(crate) objects: Mutex<Objects>,
    pub(crate) copies: AtomicI64,
    pub(crate) pageable: AtomicI64,
    next: AtomicU64,
    pub(crate) captures: Mutex<Captures>,
}

pub(crate) struct Device {
    pub(crate) gpu: Gpu,
    /// Number among all devices, before `CUDA_VISIBLE_DEVICES`.
    pub(crate) physical: u32,
    pub(crate) retained: AtomicI32,
    /// What every call answers since the device was lost; 0 while it is not.
    lost: AtomicI32,
}

/// By handle or address.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) memory: BTreeMap<u64, DeviceMemory>,
    /// What was freed last, to be given out again, and the numbers of what was.
    pub(crate) freed: Vec<DeviceMemory>,
    pub(crate) numbers: HashMap<u64, u64>,
    pub(crate) host: BTreeMap<u64, PinnedMem>,
    pub(crate) streams: HashMap<u64, (usize, Arc<Stream>)>,
    /// Handles of destroyed streams, and the numbers of those that there are.
    pub(crate) destroyed: Vec<u64>,
    pub(crate) ids: HashMap<u64, u64>,
    /// Streams that do not wait for the legacy stream, nor that for them.
    pub(crate) apart: HashSet<u64>,
    /// Of streams that were made with one.
    pub(crate) priorities: HashMap<u64, i32>,
    pub(crate) events: HashMap<u64, (usize, Recorded)>,
    /// What `cuStreamQuery` waits to see, by stream.
    pub(crate) asked: HashMap<u64, (Event, u64)>,
    /// Operations queued so far, by stream.
    pub(crate) queued: HashMap<u64, u64>,
    pub(crate) modules: HashMap<u64, Module>,
    pub(crate) functions: HashMap<u64, Function>,
    pub(crate) graphs: HashMap<u64, Graph>,
    pub(crate) execs: HashMap<u64, Arc<Exec>>,
    pub(crate) physical: HashMap<u64, Physical>,
    /// What other processes may ask for, by the number of its handle.
    pub(crate) exported: HashMap<u64, Buffer>,
    /// Which device may access which.
    pub(crate) peers: HashSet<(usize, usize)>,
    /// Mapped memory, by address, and devices that may use it besides its own.
    pub(crate) opened: HashSet<(u64, usize)>,
}

/// Where an event was recorded last.
#[derive(Clone)]
pub(crate) enum Recorded {
    Never,
    At(Event),
    /// In a capture, by its number, after these of its nodes.
    Captured {
        capture: u64,
        after: Vec<usize>,
    },
}

#[derive(Clone)]
pub(crate) struct DeviceMemory {
    pub(crate) buffer: Buffer,
    pub(crate) device: usize,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Pool,
    Managed,
    /// Of another process.
    Ipc,
    /// Reserved addresses with this handle mapped.
    Virtual,
}

/// An allocation of virtual memory management. The simulated device knows an address for it from the
/// start, so that is the one a reservation of this size gets.
pub(crate) struct Physical {
    pub(crate) buffer: Buffer,
    pub(crate) device: usize,
    pub(crate) reserved: bool,
    pub(crate) mapped: bool,
    pub(crate) rdma: bool,
}

thread_local! {
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
    static MODE: Cell<i32> = const { Cell::new(MODE_GLOBAL) };
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// The driver, after `cuInit`.
pub(crate) fn driver() -> Result<&'static Driver, Cu> {
    DRIVER.get().ok_or(Cu::NOT_INITIALIZED)
}

/// Starts the driver, once.
pub(crate) fn start() -> Result<(), Cu> {
    let settings = Settings::from_env();
    if settings.init != 0 {
        return Err(Cu(settings.init));
    }
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let made = Driver::new(settings)?;
    if made.devices.is_empty() {
        return Err(Cu::NO_DEVICE);
    }
    DRIVER.get_or_init(|| made);
    Ok(())
}

impl Driver {
    fn new(settings: Settings) -> Result<Self, Cu> {
        let mut config = SimConfig::default();
        config.memory_bytes = settings.memory_bytes;
        let mut devices = Vec::new();
        for physical in visible(&settings) {
            let gpu = Gpu::simulated(&config).map_err(|_| Cu::OUT_OF_MEMORY)?;
            if let (0, Some(after)) = (physical, settings.lose_after_copies) {
                gpu.as_sim().ok_or(Cu::UNKNOWN)?.faults().arm(Site::Copy, after, Effect::Lose);
            }
            let (retained, lost) = (AtomicI32::new(0), AtomicI32::new(0));
            devices.push(Device { gpu, physical, retained, lost });
        }
        Ok(Self {
            settings,
            devices,
            objects: Mutex::default(),
            copies: AtomicI64::new(0),
            pageable: AtomicI64::new(0),
            next: AtomicU64::new(0x1000),
            captures: Mutex::default(),
        })
    }

    pub(crate) fn device(&self, ordinal: i32) -> Result<&Device, Cu> {
        let index = usize::try_from(ordinal).map_err(|_| Cu::INVALID_DEVICE)?;
        self.devices.get(index).ok_or(Cu::INVALID_DEVICE)
    }

    /// A number that no other object has.
    pub(crate) fn handle(&self) -> u64 {
        self.next.fetch_add(8, Ordering::Relaxed)
    }

    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        lock(&self.objects)
    }

    /// The device whose context is current, unless it was lost.
    pub(crate) fn current(&self) -> Result<usize, Cu> {
        let index = top().ok_or(Cu::INVALID_CONTEXT)?;
        match self.devices.get(index).map(|device| device.lost.load(Ordering::Relaxed)) {
            Some(0) => Ok(index),
            Some(lost) => Err(Cu(lost)),
            None => Err(Cu::INVALID_CONTEXT),
        }
    }

    /// [`Self::current`], for a call that is not safe beside a capture.
    pub(crate) fn current_unsafe(&self) -> Result<usize, Cu> {
        self.guard()?;
        self.current()
    }

    /// What a failure of the simulated device is called here; one of the device itself lasts.
    pub(crate) fn code(&self, index: usize, error: &Error) -> Cu {
        if error.is_out_of_memory() {
            return Cu::OUT_OF_MEMORY;
        }
        if !error.is_device() {
            return Cu::INVALID_VALUE;
        }
        if let Some(device) = self.devices.get(index) {
            device.lost.store(self.settings.lost, Ordering::Relaxed);
        }
        Cu(self.settings.lost)
    }

    /// What a stream is known by: its handle, and for the default streams what stands for the one that is meant.
    pub(crate) fn key(&self, handle: u64) -> Result<u64, Cu> {
        let current = self.current()? as u64;
        Ok(match handle {
            0 | 1 => current,
            2 => self.per_thread() + current,
            _ => handle,
        })
    }

    /// A stream as captures know it.
    pub(crate) fn place(&self, handle: u64) -> Result<Place, Cu> {
        let (key, device) = (self.key(handle)?, self.current()?);
        let apart = self.objects().apart.contains(&key);
        Ok(Place { key, legacy: (!apart).then_some(device as u64), device })
    }

    /// The stream behind a handle, 0 to 2 being the default streams of the current device.
    pub(crate) fn stream(&self, handle: u64) -> Result<(usize, Arc<Stream>), Cu> {
        let current = self.current()?;
        let default = handle <= 2;
        let key = self.key(handle)?;
        let mut objects = self.objects();
        if let Some((device, stream)) = objects.streams.get(&key) {
            if *device != current {
                return Err(Cu::INVALID_CONTEXT);
            }
            return Ok((*device, Arc::clone(stream)));
        }
        if !default {
            return Err(Cu::INVALID_HANDLE);
        }
        let made = self.devices.get(current).ok_or(Cu::INVALID_CONTEXT)?.gpu.stream();
        let made = Arc::new(made.map_err(|error| self.code(current, &error))?);
        objects.streams.insert(key, (current, Arc::clone(&made)));
        Ok((current, made))
    }
}

impl Driver {
    /// Where the keys of the calling thread's own default streams start, apart from every handle.
    fn per_thread(&self) -> u64 {
        (1 << 60) + self.thread() * 16
    }

    /// The number of the calling thread.
    pub(crate) fn thread(&self) -> u64 {
        if THREAD.get() == 0 {
            THREAD.set(self.handle());
        }
        THREAD.get()
    }
}

impl Objects {
    /// The device memory that holds `[ptr, ptr + len)`, and where in it the range starts.
    pub(crate) fn device_memory(&self, ptr: u64, len: u64) -> Result<(&DeviceMemory, u64), Cu> {
        let (start, memory) = self.memory.range(..=ptr).next_back().ok_or(Cu::INVALID_VALUE)?;
        let offset = ptr - start;
        let size = memory.buffer.len();
        if offset > size || len > size - offset || (len == 0 && offset == size) {
            return Err(Cu::INVALID_VALUE);
        }
        Ok((memory, offset))
    }

    /// The registered host memory that holds `[ptr, ptr + len)`, and where in it the range starts.
    pub(crate) fn host_memory(&self, ptr: u64, len: u64) -> Option<(&PinnedMem, u64)> {
        let (start, memory) = self.host.range(..=ptr).next_back()?;
        let offset = ptr - start;
        (offset < memory.len() && len <= memory.len() - offset).then_some((memory, offset))
    }
}

/// Physical numbers of the devices that `CUDA_VISIBLE_DEVICES` leaves, in its order; as the driver
/// does, the list ends at the first entry that names nothing.
fn visible(settings: &Settings) -> Vec<u32> {
    let Some(names) = &settings.visible else { return (0..settings.devices).collect() };
    let find = |name: &String| {
        (0..settings.devices).find(|device| {
            *name == device.to_string() || *name == crate::device::uuid_text(settings, *device)
        })
    };
    names.iter().map_while(find).collect()
}

pub(crate) fn top() -> Option<usize> {
    STACK.with_borrow(|stack| stack.last().copied())
}

pub(crate) fn push(index: usize) {
    STACK.with_borrow_mut(|stack| stack.push(index));
}

pub(crate) fn pop() -> Option<usize> {
    STACK.with_borrow_mut(Vec::pop)
}

pub(crate) fn depth() -> usize {
    STACK.with_borrow(Vec::len)
}

pub(crate) fn mode() -> &'static std::thread::LocalKey<Cell<i32>> {
    &MODE
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
