//! The driver, its devices, and their primary contexts.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::core::Core;
use super::error::{Error, Failure, OpenError, Version};
use super::pointer::Owner;
use super::stream::ForeignStream;
use super::table::{self, Loaded, Table};
use super::types::*;

/// Events kept for reuse by one context.
const SPARE_EVENTS_MAX: usize = 64;

/// The CUDA driver of this machine, started.
pub struct Driver {
    loaded: Loaded,
}

impl Driver {
    /// Loads `libcuda.so.1`, or the library at `path`, and starts it.
    ///
    /// # Errors
    /// One kind for each cause; see [`OpenError`].
    pub fn open(path: Option<&Path>) -> Result<Arc<Self>, OpenError> {
        let driver = Self { loaded: table::load(path)? };
        // SAFETY: cuInit takes flags, which must be 0, and may be called more than once.
        let result = unsafe { (driver.table().cuInit)(0) };
        if result != CuResult::SUCCESS {
            return Err(OpenError::Init(driver.failure("cuInit", result, "0".to_owned())));
        }
        Ok(Arc::new(driver))
    }

    /// The CUDA version that the driver speaks.
    pub const fn version(&self) -> Version {
        Version(self.loaded.version)
    }

    /// How many devices the process sees, after `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn device_count(&self) -> Result<i32, Error> {
        let mut count = 0;
        // SAFETY: `count` is a place for one int.
        let result = unsafe { (self.table().cuDeviceGetCount)(&raw mut count) };
        self.check("cuDeviceGetCount", result, String::new)?;
        Ok(count)
    }

    /// The device whose context is current in this thread; `None` where none is.
    pub fn current_device(&self) -> Option<i32> {
        let mut device = 0;
        let ask = self.table().cuCtxGetDevice?;
        // SAFETY: `device` is a place for one int.
        let result = unsafe { ask(&raw mut device) };
        (result == CuResult::SUCCESS).then_some(device)
    }

    /// The device with this ordinal.
    ///
    /// # Errors
    /// `INVALID_DEVICE` where there is none.
    pub fn device(self: &Arc<Self>, ordinal: i32) -> Result<Device, Error> {
        let mut raw = 0;
        // SAFETY: `raw` is a place for one CUdevice.
        let result = unsafe { (self.table().cuDeviceGet)(&raw mut raw, ordinal) };
        self.check("cuDeviceGet", result, || ordinal.to_string())?;
        Ok(Device { driver: Arc::clone(self), raw })
    }

    pub(super) const fn table(&self) -> &Table {
        &self.loaded.table
    }

    /// The number of a context, which none has twice; `None` where the driver does not tell, or there is
    /// no such context.
    pub(super) fn context_id(&self, raw: RawContext) -> Option<u64> {
        let ask = self.table().cuCtxGetId?;
        let mut id = 0;
        // SAFETY: `id` is a place for one number; the driver checks context handles.
        let result = unsafe { ask(raw, &raw mut id) };
        (result == CuResult::SUCCESS).then_some(id)
    }

    /// The error of `call`, unless it succeeded; `values` tells what it was called with.
    pub(super) fn check(
        &self,
        call: &'static str,
        result: CuResult,
        values: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        if result == CuResult::SUCCESS {
            return Ok(());
        }
        Err(Error::Call(Box::new(self.failure(call, result, values()))))
    }

    #[cold]
    fn failure(&self, call: &'static str, result: CuResult, values: String) -> Failure {
        let describe =
            |function: Option<unsafe extern "C" fn(CuResult, *mut *const c_char) -> _>| {
                let mut text = std::ptr::null();
                // SAFETY: `text` is a place for one pointer; an unknown result leaves it null.
                let described = function.map(|get| unsafe { get(result, &raw mut text) });
                if described != Some(CuResult::SUCCESS) || text.is_null() {
                    return String::new();
                }
                // SAFETY: the driver answers a C string that lives as long as the library, which is
                // never unloaded.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            };
        let name = describe(self.table().cuGetErrorName);
        let text = describe(self.table().cuGetErrorString);
        Failure { call, values, result, name, text }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver(CUDA {})", self.version())
    }
}

/// A device that the driver offers this process: a GPU, or an instance of one (MIG).
#[derive(Clone, Debug)]
pub struct Device {
    driver: Arc<Driver>,
    raw: i32,
}

impl Device {
    /// The driver.
    pub const fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// The model name.
    ///
    /// # Errors
    /// What the driver says.
    pub fn name(&self) -> Result<String, Error> {
        self.text("cuDeviceGetName", self.driver.table().cuDeviceGetName)
    }

    /// The PCI address of the GPU, as `domain:bus:device.function` in hexadecimal.
    ///
    /// # Errors
    /// What the driver says.
    pub fn pci_bus_id(&self) -> Result<String, Error> {
        self.text("cuDeviceGetPCIBusId", self.driver.table().cuDeviceGetPCIBusId)
    }

    /// The UUID: that of the instance where the device is one (MIG), else that of the GPU.
    ///
    /// # Errors
    /// What the driver says.
    pub fn uuid(&self) -> Result<[u8; 16], Error> {
        let mut uuid = RawUuid::default();
        // SAFETY: `uuid` is a place for one CUuuid, `raw` a device of this driver.
        let result = unsafe { (self.driver.table().cuDeviceGetUuid)(&raw mut uuid, self.raw) };
        self.driver.check("cuDeviceGetUuid", result, || self.raw.to_string())?;
        Ok(uuid.0)
    }

    /// The UUID of the whole GPU; differs from [`Self::uuid`] exactly where the device is a MIG
    /// instance. `None` where the driver does not tell.
    pub fn gpu_uuid(&self) -> Option<[u8; 16]> {
        let mut uuid = RawUuid::default();
        // SAFETY: `uuid` is a place for one CUuuid, `raw` a device of this driver.
        let result = unsafe { (self.driver.loaded.gpu_uuid?)(&raw mut uuid, self.raw) };
        (result == CuResult::SUCCESS).then_some(uuid.0)
    }

    /// Device memory in bytes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn total_memory(&self) -> Result<u64, Error> {
        let mut bytes = 0;
        // SAFETY: `bytes` is a place for one size, `raw` a device of this driver.
        let result = unsafe { (self.driver.table().cuDeviceTotalMem)(&raw mut bytes, self.raw) };
        self.driver.check("cuDeviceTotalMem", result, || self.raw.to_string())?;
        Ok(bytes as u64)
    }

    /// A property of the device; 0 where this driver does not know it.
    pub fn attribute(&self, attribute: DeviceAttribute) -> i32 {
        let mut value = 0;
        let get = self.driver.table().cuDeviceGetAttribute;
        // SAFETY: `value` is a place for one int, `raw` a device of this driver; an attribute
        // unknown to the driver is answered with an error.
        let result = unsafe { get(&raw mut value, attribute, self.raw) };
        if result == CuResult::SUCCESS { value } else { 0 }
    }

    /// Whether copies and kernels of this device can address the memory of `peer` directly.
    pub fn can_access_peer(&self, peer: &Self) -> bool {
        let Some(can) = self.driver.table().cuDeviceCanAccessPeer else { return false };
        let mut answer = 0;
        // SAFETY: `answer` is a place for one int, both numbers are devices of this driver.
        let result = unsafe { can(&raw mut answer, self.raw, peer.raw) };
        result == CuResult::SUCCESS && answer != 0
    }

    /// What the link to `peer` can do (`CUdevice_P2PAttribute`: 1 a rank of performance, 2 access, 3 atomics,
    /// 4 array access); `None` where the driver does not tell.
    pub fn p2p_attribute(&self, attribute: i32, peer: &Self) -> Option<i32> {
        let get = self.driver.table().cuDeviceGetP2PAttribute?;
        let mut value = 0;
        // SAFETY: `value` is a place for one int, both numbers are devices of this driver.
        let result = unsafe { get(&raw mut value, attribute, self.raw, peer.raw) };
        (result == CuResult::SUCCESS).then_some(value)
    }

    /// Retains the primary context, which the CUDA runtime of this process shares.
    ///
    /// # Errors
    /// What the driver says: `OUT_OF_MEMORY` where the device has no room for a context.
    pub fn retain_primary(&self) -> Result<Arc<Context>, Error> {
        let mut raw = RawContext::NULL;
        let retain = self.driver.table().cuDevicePrimaryCtxRetain;
        // SAFETY: `raw` is a place for one context, `self.raw` a device of this driver.
        let result = unsafe { retain(&raw mut raw, self.raw) };
        self.driver.check("cuDevicePrimaryCtxRetain", result, || format!("device {}", self.raw))?;
        Ok(self.context_of(raw, true))
    }

    /// A context that somebody else made on this device and keeps: it is used, never released.
    ///
    /// Safe because the driver checks context handles: one that is gone answers an error.
    pub fn foreign_context(&self, owner: Owner) -> Arc<Context> {
        self.context_of(owner.0, false)
    }

    /// Whether somebody has made the primary context, which is not made by asking.
    pub fn has_primary(&self) -> bool {
        let Some(ask) = self.driver.table().cuDevicePrimaryCtxGetState else { return false };
        let (mut flags, mut active) = (0, 0);
        // SAFETY: two places for one number each, `raw` a device of this driver.
        let result = unsafe { ask(self.raw, &raw mut flags, &raw mut active) };
        result == CuResult::SUCCESS && active != 0
    }

    fn context_of(&self, raw: RawContext, retained: bool) -> Arc<Context> {
        Arc::new(Context {
            device: self.clone(),
            raw,
            id: self.driver.context_id(raw),
            retained,
            counters: Counters::default(),
            cores: Mutex::default(),
            orphans: Mutex::default(),
            spare_events: Mutex::default(),
        })
    }

    fn text(
        &self,
        call: &'static str,
        get: unsafe extern "C" fn(*mut c_char, i32, i32) -> CuResult,
    ) -> Result<String, Error> {
        let mut bytes = [0_u8; 256];
        // SAFETY: the driver writes at most 255 bytes and a zero into the 256 offered (the length
        // is one less than the array, whose last byte stays 0).
        let result = unsafe { get(bytes.as_mut_ptr().cast(), 255, self.raw) };
        self.driver.check(call, result, || self.raw.to_string())?;
        Ok(CStr::from_bytes_until_nul(&bytes)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default())
    }

    pub(super) const fn raw(&self) -> i32 {
        self.raw
    }
}

/// What a process holds through one context, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Device memory.
    pub device: u64,
    /// Host memory registered for reading and writing.
    pub pinned: u64,
    /// Mapped file pages registered for reading.
    pub mapped: u64,
}

/// Device memory now, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// What can still be allocated.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) device: AtomicU64,
    pub(super) pinned: AtomicU64,
    pub(super) mapped: AtomicU64,
}

/// A primary context, retained until the last handle made from it is gone; or somebody else's.
pub struct Context {
    device: Device,
    raw: RawContext,
    /// The number that no other context of the process has; `None` before CUDA 12.
    id: Option<u64>,
    /// Whether this value retains it.
    retained: bool,
    pub(super) counters: Counters,
    /// Streams in use, so that memory held for finished operations can be let go from anywhere.
    cores: Mutex<Vec<Weak<Core>>>,
    /// Streams that were dropped while operations were in flight.
    orphans: Mutex<Vec<Arc<Core>>>,
    spare_events: Mutex<Vec<RawEvent>>,
}

impl Context {
    /// The device.
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Device memory now.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory_info(&self) -> Result<MemoryInfo, Error> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two places for one size each; a context is current.
        let result = unsafe { (self.table().cuMemGetInfo)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", result, String::new)?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    /// Lets work of this context address the memory of `peer` directly, until the context ends; false
    /// where the driver has no such function.
    ///
    /// # Errors
    /// What the driver says: `PEER_ACCESS_UNSUPPORTED` where the devices cannot.
    pub fn enable_peer(&self, peer: &Self) -> Result<bool, Error> {
        let Some(enable) = self.table().cuCtxEnablePeerAccess else { return Ok(false) };
        let _current = self.enter()?;
        // SAFETY: `peer` retains its context, this one is current, and the flags must be 0.
        let result = unsafe { enable(peer.raw, 0) };
        if result == CuResult::PEER_ACCESS_ALREADY_ENABLED {
            return Ok(true);
        }
        self.check("cuCtxEnablePeerAccess", result, || format!("device {}", peer.device.raw))?;
        Ok(true)
    }

    /// What this process holds through this context. Memory of finished operations is let go first.
    pub fn usage(&self) -> Usage {
        self.sweep();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Usage {
            device: read(&self.counters.device),
            pinned: read(&self.counters.pinned),
            mapped: read(&self.counters.mapped),
        }
    }

    /// Lets go of memory that finished operations held, in every stream and of every stream dropped.
    pub fn sweep(&self) {
        let mut cores: Vec<Arc<Core>> = {
            let mut known = lock(&self.cores);
            known.retain(|core| core.strong_count() > 0);
            known.iter().filter_map(Weak::upgrade).collect()
        };
        for core in &cores {
            core.settle(false);
            core.retire();
        }
        cores.clear();
        // Without the lock: letting go of memory calls the driver, and the owner of foreign memory.
        let mut left = std::mem::take(&mut *lock(&self.orphans));
        left.retain(|core| !core.is_idle());
        lock(&self.orphans).append(&mut left);
    }

    /// Whether `owner` is this context, or no context (pools and virtual memory belong to none).
    pub fn is(&self, owner: Owner) -> bool {
        owner.0 == RawContext::NULL || owner.0 == self.raw
    }

    /// Whether the context is still the one that this value was made for: false where it was destroyed,
    /// even if another one was made at its address. True where the driver does not tell (before CUDA 12).
    pub fn is_there(&self) -> bool {
        self.id.is_none() || self.device.driver.context_id(self.raw) == self.id
    }

    pub(super) fn adopt(&self, core: &Arc<Core>) {
        lock(&self.cores).push(Arc::downgrade(core));
    }

    pub(super) fn orphan(&self, core: Arc<Core>) {
        lock(&self.orphans).push(core);
    }

    pub(super) fn orphans(&self) -> usize {
        lock(&self.orphans).len()
    }

    pub(super) fn spare_event(&self) -> Option<RawEvent> {
        lock(&self.spare_events).pop()
    }

    /// Keeps an event that nobody uses any more, unless there are enough.
    pub(super) fn keep_event(&self, event: RawEvent) -> bool {
        let mut spare = lock(&self.spare_events);
        let room = spare.len() < SPARE_EVENTS_MAX;
        if room {
            spare.push(event);
        }
        room
    }

    /// Whether a stream can wait until a word of memory compares.
    pub fn has_stream_waits(&self) -> bool {
        self.table().cuStreamWaitValue32.is_some()
            && self.device.attribute(DeviceAttribute::CAN_USE_64_BIT_STREAM_MEM_OPS) == 1
    }

    /// Makes the context current for the calling thread until the guard is dropped, for calls that a capture allows, where
    /// every hundred nanoseconds count: most programs have it current when they make a call.
    ///
    /// # Errors
    /// What the driver says.
    pub fn make_current(&self) -> Result<Current<'_>, Error> {
        let mut current = RawContext::NULL;
        if let Some(ask) = self.table().cuCtxGetCurrent {
            // SAFETY: `current` is a place for one context.
            let result = unsafe { ask(&raw mut current) };
            if result == CuResult::SUCCESS && current == self.raw {
                let (table, _of_this_thread) = (self.table(), PhantomData);
                return Ok(Current { table, pushed: false, mode: None, _of_this_thread });
            }
        }
        // SAFETY: `raw` is a context that this value retains.
        let result = unsafe { (self.table().cuCtxPushCurrent)(self.raw) };
        self.check("cuCtxPushCurrent", result, || format!("device {}", self.device.raw))?;
        let (table, _of_this_thread) = (self.table(), PhantomData);
        Ok(Current { table, pushed: true, mode: None, _of_this_thread })
    }

    /// Makes the context current for the calling thread until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Current<'_>, Error> {
        // SAFETY: `raw` is a context that this value retains.
        let result = unsafe { (self.table().cuCtxPushCurrent)(self.raw) };
        self.check("cuCtxPushCurrent", result, || format!("device {}", self.device.raw))?;
        let mut mode = CaptureMode::RELAXED;
        // SAFETY: `mode` is a place for one enum, which the driver swaps with the thread's own.
        let result = unsafe { (self.table().cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        let mode = (result == CuResult::SUCCESS).then_some(mode);
        let (table, _of_this_thread) = (self.table(), PhantomData);
        Ok(Current { table, pushed: true, mode, _of_this_thread })
    }

    pub(super) fn check(
        &self,
        call: &'static str,
        result: CuResult,
        values: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        self.device.driver.check(call, result, values)
    }

    pub(super) fn table(&self) -> &Table {
        self.device.driver.table()
    }

    pub(super) const fn raw(&self) -> RawContext {
        self.raw
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let spare = std::mem::take(&mut *lock(&self.spare_events));
        // Events of a context that is gone went with it.
        if self.is_there()
            && let Ok(_current) = self.enter()
        {
            for event in spare {
                // SAFETY: the event was made in this context and nobody else has its handle.
                let _ = unsafe { (self.table().cuEventDestroy)(event) };
            }
        }
        if !self.retained {
            return;
        }
        // SAFETY: balances the retain of `retain_primary`; no handle of the context is left.
        let _ = unsafe { (self.table().cuDevicePrimaryCtxRelease)(self.device.raw) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context(device {})", self.device.raw)
    }
}

/// While it lives, a context is current for the calling thread, and, of `enter`, captures are not guarded there. Guards are
/// dropped in the reverse of the order they were made in.
#[must_use]
pub struct Current<'a> {
    table: &'a Table,
    pushed: bool,
    mode: Option<CaptureMode>,
    // Both stacks belong to the thread, so the guard must not leave it.
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: `mode` is a place for one enum; puts back what `enter` found.
            let _ = unsafe { (self.table.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        }
        if !self.pushed {
            return;
        }
        let mut popped = RawContext::NULL;
        // SAFETY: `popped` is a place for one context; balances the push of `enter`.
        let _ = unsafe { (self.table.cuCtxPopCurrent)(&raw mut popped) };
    }
}

/// State behind these locks is valid between any two statements, so a panic elsewhere spoils nothing.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lives, the context of a stream is current (for a default stream: the one that was), and
/// captures are not guarded in the calling thread.
pub(super) struct StreamGuard<'a> {
    table: &'a Table,
    pushed: bool,
    mode: Option<CaptureMode>,
    // Both stacks belong to the thread, so the guard must not leave it.
    _of_this_thread: PhantomData<*const ()>,
}

impl<'a> StreamGuard<'a> {
    pub(super) fn enter(driver: &'a Driver, stream: ForeignStream) -> Result<Self, Error> {
        let table = driver.table();
        let mut guard = Self { table, pushed: false, mode: None, _of_this_thread: PhantomData };
        if let (false, Some(get)) = (stream.is_default(), table.cuStreamGetCtx) {
            let mut owner = RawContext::NULL;
            // SAFETY: `owner` is a place for one context; a stream that its owner keeps.
            let result = unsafe { get(stream.raw(), &raw mut owner) };
            driver.check("cuStreamGetCtx", result, || format!("{stream:?}"))?;
            // SAFETY: the driver has just named the context.
            let result = unsafe { (table.cuCtxPushCurrent)(owner) };
            driver.check("cuCtxPushCurrent", result, || format!("{stream:?}"))?;
            guard.pushed = true;
        }
        let mut mode = CaptureMode::RELAXED;
        // SAFETY: `mode` is a place for one enum, which the driver swaps with the thread's own.
        let result = unsafe { (table.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        guard.mode = (result == CuResult::SUCCESS).then_some(mode);
        Ok(guard)
    }
}

impl Drop for StreamGuard<'_> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: `mode` is a place for one enum; puts back what `enter` found.
            let _ = unsafe { (self.table.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        }
        if self.pushed {
            let mut popped = RawContext::NULL;
            // SAFETY: `popped` is a place for one context; balances the push of `enter`.
            let _ = unsafe { (self.table.cuCtxPopCurrent)(&raw mut popped) };
        }
    }
}
