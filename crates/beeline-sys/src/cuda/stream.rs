//! Streams: what can be queued.

use std::fmt;
use std::sync::Arc;

use super::core::{Core, Event, Held};
use super::device::{Context, Driver, StreamGuard};
use super::error::Error;
use super::gate::refuse_capturing;
use super::memory::{DeviceMem, size};
use super::module::{Arg, Module, Packed};
use super::registration::HostRegistration;
use super::types::*;

/// Streams that may be dropped with work in flight before no new one is made.
const ORPHANS_MAX: usize = 256;
/// Threads in a block of a kernel over words, and most blocks of a launch (the kernels loop).
const BLOCK_THREADS: u32 = 256;
const BLOCKS_MAX: u64 = 4096;

/// A stream of the process that this crate did not make.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ForeignStream {
    raw: RawStream,
}

impl ForeignStream {
    /// The legacy default stream: ordered with every stream that is not created non-blocking.
    pub const LEGACY_DEFAULT: Self = Self { raw: RawStream::LEGACY };
    /// The default stream of whichever thread queues the operation or records the event: what one
    /// thread queues is not ordered with another's.
    pub const PER_THREAD_DEFAULT: Self = Self { raw: RawStream::PER_THREAD };

    /// The stream with this handle (`CUstream`, `cudaStream_t`); 0 is the legacy default stream.
    ///
    /// # Safety
    /// `handle` is a stream of this process's CUDA driver, and it is not destroyed while a
    /// [`Stream`] made from it lives.
    pub const unsafe fn new(handle: usize) -> Self {
        if handle == 0 {
            return Self::LEGACY_DEFAULT;
        }
        Self { raw: RawStream(std::ptr::with_exposed_provenance_mut(handle)) }
    }

    /// The number that no other stream of the process has, also not a later one that gets the same handle; `None` for a
    /// default stream, while the stream is being captured, and where the driver does not tell (before CUDA 12.0).
    pub fn id(self, driver: &Driver) -> Option<u64> {
        let ask = driver.table().cuStreamGetId.filter(|_| !self.is_default())?;
        // The question ends the stream's capture (driver 580), and where captures are guarded that of others.
        refuse_capturing(driver, self).ok()?;
        let _unguarded = StreamGuard::enter(driver, self).ok()?;
        let mut id = 0;
        // SAFETY: `id` is a place for one number; the stream is alive by the promise made when its handle was wrapped.
        let result = unsafe { ask(self.raw, &raw mut id) };
        (result == CuResult::SUCCESS).then_some(id)
    }

    pub(super) const fn raw(self) -> RawStream {
        self.raw
    }

    pub(super) fn is_default(self) -> bool {
        self == Self::LEGACY_DEFAULT || self == Self::PER_THREAD_DEFAULT
    }
}

impl fmt::Debug for ForeignStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForeignStream({:?})", self.raw.0)
    }
}

/// A queue of operations that run in order. Dropping it lets them finish.
pub struct Stream {
    core: Arc<Core>,
}

/// A word in memory for a stream memory operation.
#[derive(Clone, Copy, Debug)]
pub enum Word<'a> {
    /// In device memory, at this offset.
    Device(&'a Arc<DeviceMem>, u64),
    /// In registered host memory, at this offset.
    Host(&'a Arc<HostRegistration>, u64),
}

impl Stream {
    /// A new stream that does not wait for the legacy default stream, nor that for it.
    ///
    /// # Errors
    /// `Stuck` while too many dropped streams have work in flight; what the driver says.
    pub fn new(context: &Arc<Context>) -> Result<Self, Error> {
        context.sweep();
        if context.orphans() >= ORPHANS_MAX {
            return Err(Error::Refused("too many dropped streams still have work in flight"));
        }
        let _current = context.enter()?;
        let mut raw = RawStream::NULL;
        let create = context.table().cuStreamCreate;
        // SAFETY: `raw` is a place for one stream; a context is current.
        let result = unsafe { create(&raw mut raw, STREAM_NON_BLOCKING) };
        context.check("cuStreamCreate", result, String::new)?;
        Ok(Self::of(Core::new(context, raw, true)))
    }

    /// Uses a stream that somebody else made, in the primary context of the same device. It is never
    /// destroyed or synchronised here, and nothing is queued while it is being captured.
    ///
    /// # Errors
    /// `Refused` where the stream belongs to another context.
    pub fn foreign(context: &Arc<Context>, stream: ForeignStream) -> Result<Self, Error> {
        let get = context.table().cuStreamGetCtx;
        if let (false, Some(get)) = (stream.is_default(), get) {
            let _current = context.enter()?;
            let mut owner = RawContext::NULL;
            // SAFETY: `owner` is a place for one context; the stream is alive by the promise made
            // when its handle was wrapped.
            let result = unsafe { get(stream.raw, &raw mut owner) };
            context.check("cuStreamGetCtx", result, || format!("{stream:?}"))?;
            if owner != context.raw() {
                return Err(Error::Refused("the stream belongs to another context or device"));
            }
        }
        Ok(Self::of(Core::new(context, stream.raw, false)))
    }

    fn of(core: Core) -> Self {
        let core = Arc::new(core);
        core.context().adopt(&core);
        Self { core }
    }

    /// `len` bytes of device memory from the device's pool, there once everything queued before has
    /// run; another stream may use it after an event recorded behind this call.
    ///
    /// # Errors
    /// `Unsupported` on a device without pools and for a foreign stream, which may be gone before the
    /// memory; `OUT_OF_MEMORY`.
    pub fn alloc(&self, len: u64) -> Result<DeviceMem, Error> {
        if !self.core.is_own() {
            return Err(Error::Unsupported { what: "pool memory in a foreign stream" });
        }
        drop(self.core.room()?);
        DeviceMem::alloc_pooled(&self.core, len)
    }

    /// Copies from registered host memory to the device.
    ///
    /// # Errors
    /// `Bounds` of whichever side it is; what the driver says.
    pub fn copy_to_device(
        &self,
        (dst, dst_offset): (&Arc<DeviceMem>, u64),
        (src, src_offset): (&Arc<HostRegistration>, u64),
        len: u64,
    ) -> Result<(), Error> {
        let (to, from, bytes) = (dst.at(dst_offset, len)?, src.at(src_offset, len)?, size(len)?);
        if bytes == 0 {
            return Ok(());
        }
        let held = [Held::Device(Arc::clone(dst)), Held::Host(Arc::clone(src))];
        self.core.push(held, |context, stream| {
            let copy = context.table().cuMemcpyHtoDAsync;
            // SAFETY: both ranges were checked, and `held` keeps both memories until the copy is done.
            let result = unsafe { copy(to, from, bytes, stream) };
            context.check("cuMemcpyHtoDAsync", result, || {
                format!("{len} bytes to {to:#x} from {from:?}")
            })
        })
    }

    /// Copies from the device to registered host memory.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`]; `Refused` where the host memory is registered for reading only.
    pub fn copy_to_host(
        &self,
        (dst, dst_offset): (&Arc<HostRegistration>, u64),
        (src, src_offset): (&Arc<DeviceMem>, u64),
        len: u64,
    ) -> Result<(), Error> {
        if !dst.is_writable() {
            return Err(Error::Refused("the host memory is registered for reading only"));
        }
        let (to, from, bytes) = (dst.at(dst_offset, len)?, src.at(src_offset, len)?, size(len)?);
        if bytes == 0 {
            return Ok(());
        }
        let held = [Held::Host(Arc::clone(dst)), Held::Device(Arc::clone(src))];
        self.core.push(held, |context, stream| {
            let copy = context.table().cuMemcpyDtoHAsync;
            // SAFETY: both ranges were checked, and `held` keeps both memories until the copy is done.
            let result = unsafe { copy(to, from, bytes, stream) };
            context.check("cuMemcpyDtoHAsync", result, || {
                format!("{len} bytes to {to:?} from {from:#x}")
            })
        })
    }

    /// Copies between device memories, of one device or two. Ranges that overlap give unspecified
    /// bytes.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`].
    pub fn copy_on_device(
        &self,
        (dst, dst_offset): (&Arc<DeviceMem>, u64),
        (src, src_offset): (&Arc<DeviceMem>, u64),
        len: u64,
    ) -> Result<(), Error> {
        let (to, from, bytes) = (dst.at(dst_offset, len)?, src.at(src_offset, len)?, size(len)?);
        if bytes == 0 {
            return Ok(());
        }
        let (into, outof) = (dst.context().raw(), src.context().raw());
        let held = [Held::Device(Arc::clone(dst)), Held::Device(Arc::clone(src))];
        self.core.push(held, |context, stream| {
            let values = || format!("{len} bytes to {to:#x} from {from:#x}");
            if into == outof {
                let copy = context.table().cuMemcpyDtoDAsync;
                // SAFETY: both ranges were checked, and `held` keeps both memories.
                let result = unsafe { copy(to, from, bytes, stream) };
                return context.check("cuMemcpyDtoDAsync", result, values);
            }
            let copy = context.table().cuMemcpyPeerAsync;
            // SAFETY: both ranges were checked and belong to these contexts, which the memories
            // retain; `held` keeps both memories.
            let result = unsafe { copy(to, into, from, outof, bytes, stream) };
            context.check("cuMemcpyPeerAsync", result, values)
        })
    }

    /// Sets `len` bytes to `value`.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`].
    pub fn fill(
        &self,
        (dst, offset): (&Arc<DeviceMem>, u64),
        len: u64,
        value: u8,
    ) -> Result<(), Error> {
        let (to, bytes) = (dst.at(offset, len)?, size(len)?);
        if bytes == 0 {
            return Ok(());
        }
        self.core.push([Held::Device(Arc::clone(dst))], |context, stream| {
            let set = context.table().cuMemsetD8Async;
            // SAFETY: the range was checked, and the memory is held until it is set.
            let result = unsafe { set(to, value, bytes, stream) };
            context.check("cuMemsetD8Async", result, || format!("{len} bytes at {to:#x}"))
        })
    }

    /// Writes a 32-bit word, behind a fence that makes everything queued before visible.
    ///
    /// # Errors
    /// `Unsupported` before CUDA 11.7; `Bounds`; `Misaligned`; `Refused` where the word lies in
    /// memory that is registered for reading only.
    pub fn write_u32(&self, dst: Word<'_>, value: u32) -> Result<(), Error> {
        let (address, held) = dst.writable(4)?;
        self.core.push([held], |context, stream| {
            let what = Error::Unsupported { what: "stream memory operations" };
            let write = context.table().cuStreamWriteValue32.ok_or(what)?;
            // SAFETY: an aligned word inside memory that is held until it is written.
            let result = unsafe { write(stream, address, value, 0) };
            context.check("cuStreamWriteValue32", result, || format!("{value} at {address:#x}"))
        })
    }

    /// Writes a 64-bit word; as [`Self::write_u32`].
    ///
    /// # Errors
    /// As [`Self::write_u32`].
    pub fn write_u64(&self, dst: Word<'_>, value: u64) -> Result<(), Error> {
        let (address, held) = dst.writable(8)?;
        self.core.push([held], |context, stream| {
            let what = Error::Unsupported { what: "64-bit stream memory operations" };
            let write = context.table().cuStreamWriteValue64.ok_or(what)?;
            // SAFETY: an aligned word inside memory that is held until it is written.
            let result = unsafe { write(stream, address, value, 0) };
            context.check("cuStreamWriteValue64", result, || format!("{value} at {address:#x}"))
        })
    }

    /// Holds back what is queued next until a 32-bit word compares.
    ///
    /// # Errors
    /// As [`Self::write_u32`]; `Unsupported` for `NOR` on a device without.
    pub fn wait_u32(&self, src: Word<'_>, value: u32, flags: WaitFlags) -> Result<(), Error> {
        let (address, held) = src.locate(4)?;
        self.core.check_flags(flags)?;
        self.core.push([held], |context, stream| {
            let what = Error::Unsupported { what: "stream memory operations" };
            let wait = context.table().cuStreamWaitValue32.ok_or(what)?;
            // SAFETY: an aligned word inside memory that is held until the wait is over.
            let result = unsafe { wait(stream, address, value, flags) };
            context.check("cuStreamWaitValue32", result, || format!("{value} at {address:#x}"))
        })
    }

    /// Holds back what is queued next until a 64-bit word compares.
    ///
    /// # Errors
    /// As [`Self::wait_u32`].
    pub fn wait_u64(&self, src: Word<'_>, value: u64, flags: WaitFlags) -> Result<(), Error> {
        let (address, held) = src.locate(8)?;
        self.core.check_flags(flags)?;
        self.core.push([held], |context, stream| {
            let what = Error::Unsupported { what: "64-bit stream memory operations" };
            let wait = context.table().cuStreamWaitValue64.ok_or(what)?;
            // SAFETY: an aligned word inside memory that is held until the wait is over.
            let result = unsafe { wait(stream, address, value, flags) };
            context.check("cuStreamWaitValue64", result, || format!("{value} at {address:#x}"))
        })
    }

    /// Runs a kernel over the words passed to it.
    ///
    /// # Errors
    /// `Refused` for an unknown name or arguments that do not fit it; `Bounds`; `Misaligned`.
    pub fn launch(&self, module: &Arc<Module>, name: &str, args: &[Arg<'_>]) -> Result<(), Error> {
        let Some((spec, function)) = module.find(name) else {
            return Err(Error::Refused("the module has no kernel of this name"));
        };
        if module.context().raw() != self.core.context().raw() {
            return Err(Error::Refused("the module was compiled for another device"));
        }
        let packed = Packed::new(spec, args)?;
        let blocks = packed.count.div_ceil(u64::from(BLOCK_THREADS)).clamp(1, BLOCKS_MAX) as u32;
        let memories = args.iter().filter_map(|arg| match arg {
            Arg::Words { mem, .. } => Some(Held::Device(Arc::clone(mem))),
            Arg::U32(_) | Arg::U64(_) => None,
        });
        let held = memories.chain([Held::Module(Arc::clone(module))]);
        self.core.push(held, |context, stream| {
            let (params, extra) = (packed.pointers(), std::ptr::null());
            let (launch, threads) = (context.table().cuLaunchKernel, BLOCK_THREADS);
            // SAFETY: the arguments were checked against the parameters that the module's author
            // vouched for; they are copied during the call, and module and memories are held.
            let result = unsafe {
                launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, params.as_ptr(), extra)
            };
            context.check("cuLaunchKernel", result, || name.to_owned())
        })
    }

    /// An event that is done once everything queued so far has run.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self) -> Result<Arc<Event>, Error> {
        let event = {
            let mut state = self.core.room()?;
            let _current = self.core.context().enter()?;
            state.close(&self.core)?
        };
        self.core.retire();
        Ok(event)
    }

    /// Holds back what is queued next until `event` is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_event(&self, event: &Arc<Event>) -> Result<(), Error> {
        self.core.push([Held::Event(Arc::clone(event))], |context, stream| {
            let wait = context.table().cuStreamWaitEvent;
            // SAFETY: both handles are alive; the event is held until the stream has passed it.
            let result = unsafe { wait(stream, event.raw(), 0) };
            context.check("cuStreamWaitEvent", result, String::new)
        })
    }

    /// Lets go of memory that finished operations held.
    pub fn retire(&self) {
        self.core.retire();
    }

    /// Whether this crate made it: then it is there as long as this value, else somebody may destroy it.
    pub fn is_own(&self) -> bool {
        self.core.is_own()
    }

    /// Whether what is queued becomes part of a graph; the legacy default stream's work may, while another is captured.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_capturing(&self) -> Result<bool, Error> {
        self.core.is_capturing()
    }

    pub(super) fn raw(&self) -> RawStream {
        self.core.raw()
    }

    pub(super) fn push(
        &self,
        held: impl IntoIterator<Item = Held>,
        operation: impl FnOnce(&Context, RawStream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.core.push(held, operation)
    }

    /// The context the stream belongs to.
    pub fn context(&self) -> &Arc<Context> {
        self.core.context()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.core.settle(true);
        if !self.core.is_idle() {
            self.core.context().orphan(Arc::clone(&self.core));
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.core.raw().0)
    }
}

impl Word<'_> {
    fn locate(&self, size: u64) -> Result<(u64, Held), Error> {
        let (address, held) = match *self {
            Self::Device(mem, at) => (mem.at(at, size)?, Held::Device(Arc::clone(mem))),
            Self::Host(mem, at) => (mem.device_at(at, size)?, Held::Host(Arc::clone(mem))),
        };
        if address.is_multiple_of(size) {
            return Ok((address, held));
        }
        Err(Error::Misaligned { address, align: size })
    }

    fn writable(&self, size: u64) -> Result<(u64, Held), Error> {
        match self {
            Self::Host(mem, _) if !mem.is_writable() => {
                Err(Error::Refused("the host memory is registered for reading only"))
            }
            _ => self.locate(size),
        }
    }
}
