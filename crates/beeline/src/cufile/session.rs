//! What lives between open and close: handles, buffers, batches, threads.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use beeline_core::plan::Operation;
use beeline_sys::cuda::{Driver, ForeignStream};
use beeline_sys::user::{UserCell, UserPtr};

use super::batch::{Batch, Event};
use super::buffers::{Buffers, Looked, Place, Target};
use super::crew::Crew;
use super::handle::{Handle, Routes};
use super::lanes::AllLanes;
use super::mover::{self, Means};
use super::options::{self, Options};
use super::ordered::Ordered;
use super::sharded::{Local, Sharded};
use super::stats::{Op, Stats};
use super::status::{Failure, OpError, Outcome};
use crate::config::CufileConfig;
use crate::gpu::{DeviceId, Gpu};
use crate::{lock, read_lock, write_lock};

/// Most registered files and most batches at once.
const HANDLES_MAX: usize = 1 << 20;
const BATCHES_MAX: usize = 1 << 16;
/// What opaque handles start at, so that no address of memory and no small number is one.
const HANDLE_BASE: usize = 0xbee1_0000_0000_0000;
const BATCH_BASE: usize = 0xbee2_0000_0000_0000;
const HANDLE_STEP: usize = 16;

/// A registered stream.
pub(super) struct Registered {
    flags: u32,
    /// The driver's number of it, where it tells one.
    id: Option<u64>,
}

/// Everything between open and close.
pub(super) struct Session {
    pub(super) options: Options,
    settings: CufileConfig,
    pub(super) cuda: Option<Arc<Driver>>,
    pub(super) lanes: Arc<AllLanes>,
    pub(super) stats: Arc<Stats>,
    crew: Arc<Crew>,
    handles: Sharded<HashMap<usize, Local<Handle>>>,
    buffers: Sharded<Buffers>,
    batches: RwLock<HashMap<usize, Arc<Batch>>>,
    pub(super) streams: Mutex<HashMap<usize, Registered>>,
    /// Bytes by route of files that are not registered any more.
    past: Routes,
    next: AtomicUsize,
    pub(super) stall: Duration,
    /// Why requests in streams were carried out at the call: each is told once.
    pub(super) told: AtomicU32,
}

/// One entry of a batch, its pointers checked by nobody yet.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the fields of the API's structure")]
pub struct Entry {
    pub cookie: u64,
    pub handle: usize,
    pub operation: Operation,
    pub ptr: UserPtr,
    pub file_offset: i64,
    pub ptr_offset: i64,
    pub size: u64,
}

/// The late arguments of a stream-ordered request.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the arguments of the API's function")]
pub struct Late {
    pub size: UserCell<usize>,
    pub file_offset: UserCell<i64>,
    pub ptr_offset: UserCell<i64>,
    pub moved: UserCell<isize>,
}

impl Session {
    pub(super) fn new(
        options: Options,
        settings: CufileConfig,
        lanes: Arc<AllLanes>,
        stats: Arc<Stats>,
    ) -> Self {
        let cuda = match crate::gpu::cuda_driver() {
            Ok(driver) => Some(driver),
            Err(error) => {
                tracing::warn!("no CUDA driver, only host memory will work: {error:#}");
                None
            }
        };
        let threads = usize::try_from(options.size(options::THREADS)).unwrap_or(8).max(1);
        Self {
            crew: Crew::new(threads),
            options,
            settings,
            cuda,
            lanes,
            stats,
            handles: Sharded::default(),
            buffers: Sharded::default(),
            batches: RwLock::default(),
            streams: Mutex::default(),
            past: Routes::default(),
            next: AtomicUsize::new(1),
            stall: crate::config::Config::from_env().stall_timeout,
            told: AtomicU32::new(0),
        }
    }

    fn number(&self, base: usize) -> usize {
        base + self.next.fetch_add(1, Ordering::Relaxed).wrapping_mul(HANDLE_STEP) % (1 << 40)
    }

    // ---- files

    pub(super) fn register_handle(&self, fd: i32) -> Outcome<usize> {
        let made = Handle::new(fd);
        self.stats.count(Op::HANDLE_REGISTER, made.is_ok());
        let made = made?;
        let (id, made) = (self.number(HANDLE_BASE), Arc::new(made));
        let free = |handles: &HashMap<usize, Local<Handle>>| {
            // A number that was closed meanwhile and stands for another file now is free again.
            let known = handles.values().find(|handle| handle.number == fd && handle.is_current());
            if let Some(known) = known {
                let path = known.file.path().display();
                let text = format!("descriptor {fd} ({path}) is registered already");
                return Err(Failure::new(OpError::HANDLE_ALREADY_REGISTERED, text));
            }
            if handles.len() >= HANDLES_MAX {
                return Err(Failure::value(format!("{HANDLES_MAX} files are registered already")));
            }
            Ok(())
        };
        self.handles.write(free, |handles| {
            handles.insert(id, Arc::new(Arc::clone(&made)));
        })?;
        let facts = made.file.facts();
        tracing::info!(
            path = %made.file.path().display(),
            file_system = %facts.file_system,
            prober = made.file.prober().as_str(),
            "registered; routes: {}",
            routes_of(&made)
        );
        Ok(id)
    }

    pub(super) fn deregister_handle(&self, id: usize) {
        let gone = self.handles.change(|handles| handles.remove(&id));
        self.stats.count(Op::HANDLE_DEREGISTER, gone.is_some());
        if let Some(handle) = gone {
            self.past.add(&handle.routes);
            let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            tracing::info!(
                path = %handle.file.path().display(),
                page_cache = count(&handle.routes.cached),
                direct = count(&handle.routes.direct),
                host = count(&handle.routes.host),
                written = count(&handle.routes.written),
                written_mapped = count(&handle.routes.mapped),
                "deregistered; bytes by route"
            );
        }
    }

    pub(super) fn handle(&self, id: usize) -> Outcome<Local<Handle>> {
        let found = self.handles.read(|handles| handles.get(&id).cloned());
        found.ok_or_else(|| {
            Failure::new(OpError::HANDLE_NOT_REGISTERED, format!("{id:#x} is no registered file"))
        })
    }

    /// Bytes by route since the library was opened.
    pub(super) fn routes(&self) -> [(&'static str, u64); 5] {
        let sums = Routes::default();
        sums.add(&self.past);
        self.handles.read(|handles| {
            for handle in handles.values() {
                sums.add(&handle.routes);
            }
        });
        sums.named()
    }

    // ---- buffers

    pub(super) fn register_buffer(&self, address: u64, len: u64) -> Outcome<()> {
        let outcome = self.try_register(address, len);
        self.stats.count(Op::BUF_REGISTER, outcome.is_ok());
        outcome
    }

    fn try_register(&self, address: u64, len: u64) -> Outcome<()> {
        if address == 0 || len == 0 {
            return Err(Failure::value(format!("{len} bytes at {address:#x} are no buffer")));
        }
        if address.checked_add(len).is_none() {
            let text = format!("{len} bytes at {address:#x} end outside the address space");
            return Err(Failure::new(OpError::CUDA_POINTER_RANGE_ERROR, text));
        }
        let looked = Looked::at(self.cuda.as_ref(), address)?;
        if looked.is_managed() {
            let text = format!("{address:#x} is managed memory; it works without registration");
            return Err(Failure::new(OpError::CUDA_MEMORY_TYPE_INVALID, text));
        }
        let place = looked.place((address, 0, len), &self.lanes, &self.settings)?;
        if let Place::Device(lanes) = &place
            && let Some(gpu) = self.stats.gpu(lanes.ordinal, || uuid_of(lanes.gpu()))
        {
            gpu.registered(true, len);
        }
        let free = |buffers: &Buffers| buffers.check_free(address);
        self.buffers.write(free, |buffers| buffers.insert(address, len, &place))
    }

    pub(super) fn deregister_buffer(&self, address: u64) -> Outcome<()> {
        let outcome = if address == 0 {
            Err(Failure::value("the buffer is a null pointer"))
        } else {
            let known = |buffers: &Buffers| buffers.check_known(address);
            self.buffers.write(known, |buffers| buffers.remove(address))
        };
        self.stats.count(Op::BUF_DEREGISTER, outcome.is_ok());
        outcome
    }

    fn target(&self, ptr: UserPtr, offset: i64, len: u64) -> Outcome<Target> {
        let (offset, registered) = self.registered(ptr, offset, len)?;
        if let Some(place) = registered {
            return Ok(Target { ptr, offset, place });
        }
        let looked = Looked::at(self.cuda.as_ref(), ptr.address())?;
        let place = looked.place((ptr.address(), offset, len), &self.lanes, &self.settings)?;
        Ok(Target { ptr, offset, place })
    }

    /// Checks what can be checked of a range without the driver; answers its offset, and its place where it is
    /// registered as a device's.
    pub(super) fn registered(
        &self,
        ptr: UserPtr,
        offset: i64,
        len: u64,
    ) -> Outcome<(u64, Option<Place>)> {
        let address = ptr.address();
        if address == 0 {
            return Err(Failure::value("the buffer is a null pointer"));
        }
        let offset = u64::try_from(offset)
            .map_err(|_| Failure::value(format!("the buffer offset {offset} is negative")))?;
        if offset.checked_add(len).and_then(|end| address.checked_add(end)).is_none() {
            let text =
                format!("{len} bytes from {offset} behind {address:#x} leave the address space");
            return Err(Failure::new(OpError::CUDA_POINTER_RANGE_ERROR, text));
        }
        // A range registered as host memory may hold anything by now: what the driver knows wins.
        let registered = self.buffers.read(|buffers| buffers.find(address, offset, len))?;
        Ok((offset, registered.filter(|place| matches!(place, Place::Device(_)))))
    }

    // ---- read and write

    pub(super) fn transfer(
        &self,
        operation: Operation,
        id: usize,
        ptr: UserPtr,
        size: u64,
        (file_offset, ptr_offset): (i64, i64),
    ) -> Outcome<u64> {
        let counted = self.stats.is_on().then(Instant::now);
        let cpu = counted.map(|_| beeline_sys::thread::cpu_time());
        let outcome = self.try_transfer(operation, id, ptr, size, (file_offset, ptr_offset));
        if let Some(since) = counted {
            let moved = outcome.as_ref().ok().copied();
            self.stats.moved(operation == Operation::Write, size, moved, since.elapsed());
            let cpu = cpu.map(|before| beeline_sys::thread::cpu_time().saturating_sub(before));
            self.stats.spent(cpu.unwrap_or_default());
        }
        outcome
    }

    fn try_transfer(
        &self,
        operation: Operation,
        id: usize,
        ptr: UserPtr,
        size: u64,
        (file_offset, ptr_offset): (i64, i64),
    ) -> Outcome<u64> {
        let handle = self.handle(id)?;
        handle.check(operation)?;
        let at = u64::try_from(file_offset)
            .map_err(|_| Failure::value(format!("the file offset {file_offset} is negative")))?;
        let target = self.target(ptr, ptr_offset, size)?;
        if at.checked_add(size).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(Failure::value(format!("{size} bytes at {at} end beyond every file")));
        }
        let since = Instant::now;
        let started = (self.stats.level() >= 3).then(since);
        let outcome = match operation {
            Operation::Read => mover::read(self.means(), &handle, &target, at, size),
            Operation::Write => mover::write(self.means(), &handle, &target, at, size),
        };
        if let (Some(started), Place::Device(lanes)) = (started, &target.place)
            && let Some(gpu) = self.stats.gpu(lanes.ordinal, || uuid_of(lanes.gpu()))
        {
            let aligned = (at | size | target.offset).is_multiple_of(4096);
            let moved = outcome.as_ref().ok().copied();
            gpu.moved(operation == Operation::Write, aligned, moved, started.elapsed());
        }
        outcome
    }

    pub(super) fn means(&self) -> Means<'_> {
        let parallel = if self.options.bool(options::PARALLEL) {
            usize::try_from(self.options.size(options::PARALLELISM)).unwrap_or(1).max(1)
        } else {
            1
        };
        let force_direct = self.options.bool(options::FORCE_DIRECT);
        Means { crew: &self.crew, parallel, force_direct }
    }

    /// Reads or writes several buffers one after the other in the file; stops at the first short one.
    pub(super) fn transfer_many(
        &self,
        operation: Operation,
        id: usize,
        parts: &[(UserPtr, u64)],
        file_offset: i64,
    ) -> Outcome<u64> {
        let mut done = 0_u64;
        for &(ptr, size) in parts {
            let at = i64::try_from(done).ok().and_then(|done| file_offset.checked_add(done));
            let at = at.ok_or_else(|| Failure::value("the vector ends beyond every file"))?;
            let moved = match self.transfer(operation, id, ptr, size, (at, 0)) {
                Ok(moved) => moved,
                Err(_) if done > 0 => break,
                Err(failure) => return Err(failure),
            };
            done += moved;
            if moved < size {
                break;
            }
        }
        self.stats.count(if operation == Operation::Write { Op::WRITEV } else { Op::READV }, true);
        Ok(done)
    }

    // ---- batches

    pub(super) fn set_up_batch(&self, entries: u32) -> Outcome<usize> {
        let most = self.options.size(options::BATCH);
        let fits = entries > 0 && u64::from(entries) <= most;
        self.stats.count(Op::BATCH_SETUP, fits);
        if !fits {
            return Err(Failure::value(format!(
                "a batch of {entries} entries: 1 to {most} are allowed (properties.io_batchsize)"
            )));
        }
        let mut batches = write_lock(&self.batches);
        if batches.len() >= BATCHES_MAX {
            return Err(Failure::value(format!("{BATCHES_MAX} batches are set up already")));
        }
        let id = self.number(BATCH_BASE);
        batches.insert(id, Batch::new(entries as usize, self.stall));
        Ok(id)
    }

    fn batch(&self, id: usize) -> Outcome<Arc<Batch>> {
        let found = read_lock(&self.batches).get(&id).cloned();
        found.ok_or_else(|| Failure::value(format!("{id:#x} is no batch that was set up")))
    }

    /// Hands `entries` over, all or none.
    pub(super) fn submit(self: &Arc<Self>, id: usize, entries: &[Entry]) -> Outcome<()> {
        let since = Instant::now();
        let outcome = self.try_submit(id, entries);
        self.stats.batch_submitted(entries.len(), outcome.is_ok(), since.elapsed());
        outcome
    }

    fn try_submit(self: &Arc<Self>, id: usize, entries: &[Entry]) -> Outcome<()> {
        let batch = self.batch(id)?;
        if entries.is_empty() {
            return Err(Failure::value("a submission of 0 entries"));
        }
        for (number, entry) in entries.iter().enumerate() {
            self.check_entry(entry).map_err(|mut failure| {
                failure.text = format!("entry {number}: {}", failure.text);
                failure
            })?;
        }
        let cookies: Vec<u64> = entries.iter().map(|entry| entry.cookie).collect();
        let tickets = batch.admit(&cookies)?;
        for (ticket, entry) in tickets.into_iter().zip(entries.iter().copied()) {
            let session = Arc::clone(self);
            self.crew.submit(move || {
                let since = Instant::now();
                let stats = Arc::clone(&session.stats);
                let write = entry.operation == Operation::Write;
                ticket.run(move || {
                    let offsets = (entry.file_offset, entry.ptr_offset);
                    let Entry { operation, handle, ptr, size, .. } = entry;
                    let outcome = session.try_transfer(operation, handle, ptr, size, offsets);
                    let moved = outcome.as_ref().ok().copied();
                    stats.batch_ended(write, moved, since.elapsed());
                    outcome
                });
            });
        }
        Ok(())
    }

    /// What is wrong with an entry for certain, before any starts.
    fn check_entry(&self, entry: &Entry) -> Outcome<()> {
        self.handle(entry.handle)?.check(entry.operation)?;
        if entry.file_offset < 0 {
            return Err(Failure::value(format!("file offset {} is negative", entry.file_offset)));
        }
        self.target(entry.ptr, entry.ptr_offset, entry.size).map(drop)
    }

    pub(super) fn events(
        &self,
        id: usize,
        least: u32,
        most: u32,
        timeout: Option<Duration>,
    ) -> Outcome<Vec<Event>> {
        if most == 0 || least > most {
            return Err(Failure::value(format!("at least {least} and at most {most} events")));
        }
        Ok(self.batch(id)?.events(least as usize, most as usize, timeout))
    }

    pub(super) fn cancel(&self, id: usize) -> Outcome<()> {
        let batch = self.batch(id);
        self.stats.count(Op::BATCH_CANCEL, batch.is_ok());
        batch?.cancel()
    }

    pub(super) fn destroy(&self, id: usize) {
        let gone = write_lock(&self.batches).remove(&id);
        self.stats.count(Op::BATCH_DESTROY, gone.is_some());
        if let Some(Err(failure)) = gone.map(|batch| batch.cancel()) {
            tracing::error!("destroy a batch: {}", failure.text);
        }
    }

    // ---- streams

    pub(super) fn register_stream(
        &self,
        (stream, key): (ForeignStream, usize),
        flags: u32,
    ) -> Outcome<()> {
        if flags > 15 {
            return Err(Failure::value(format!("stream flags {flags:#x}: bits 0 to 3 are known")));
        }
        // Without the lock: this asks the driver.
        let id = self.cuda.as_ref().and_then(|cuda| stream.id(cuda));
        let mut streams = lock(&self.streams);
        // One that was destroyed meanwhile is registered no more.
        if streams.get(&key).is_some_and(|known| id.is_none() || known.id == id) {
            return Err(Failure::value(format!("stream {key:#x} is registered already")));
        }
        if streams.len() >= HANDLES_MAX {
            return Err(Failure::value("too many streams are registered"));
        }
        streams.insert(key, Registered { flags, id });
        Ok(())
    }

    /// The flags that a stream was registered with; 0 where it was not, also where one was that is gone and had the same
    /// handle.
    pub(super) fn stream_flags(&self, key: usize, id: impl FnOnce() -> Option<u64>) -> u32 {
        if !lock(&self.streams).contains_key(&key) {
            return 0;
        }
        // Without the lock: this asks the driver.
        let id = id();
        let mut streams = lock(&self.streams);
        let Some(known) = streams.get(&key) else { return 0 };
        if known.id == id {
            return known.flags;
        }
        streams.remove(&key);
        0
    }

    pub(super) fn deregister_stream(&self, key: usize) -> Outcome<()> {
        let gone = lock(&self.streams).remove(&key);
        let unknown = || Failure::value(format!("stream {key:#x} is not registered"));
        gone.map(drop).ok_or_else(unknown)
    }

    /// What carries requests out in streams; made when first needed, and pinned through the device of `place` where no
    /// other is in use.
    pub(super) fn ordered(&self, driver: &Arc<Driver>, place: &Place) -> Outcome<Arc<Ordered>> {
        let mut gates = lock(&self.lanes.gates);
        if let Some(gates) = &*gates {
            return Ok(Arc::clone(gates));
        }
        // Pinned memory is for every context; it only has to be pinned through some device in use.
        let gpu = match (self.lanes.any(), place) {
            (Some(lanes), _) => lanes.gpu().clone(),
            (None, Place::Device(lanes)) => lanes.gpu().clone(),
            (None, Place::Host) => Gpu::open(&DeviceId::Cuda(0))?,
        };
        let made = Ordered::new(&gpu, driver, self.stall)?;
        Ok(Arc::clone(gates.insert(made)))
    }

    /// What the environment said.
    pub(super) const fn settings(&self) -> &CufileConfig {
        &self.settings
    }

    /// Ends what can be ended without waiting.
    pub(super) fn end(&self) {
        for (_, batch) in write_lock(&self.batches).drain() {
            batch.take_back();
        }
        self.handles.change(|handles| {
            handles.clear();
            None::<()>
        });
        self.buffers.change(|buffers| {
            buffers.clear();
            None::<()>
        });
        lock(&self.streams).clear();
    }
}

fn routes_of(handle: &Handle) -> String {
    let direct = if handle.file.has_direct() { ", direct for what is not in it" } else { "" };
    format!("page cache{direct}; copied through pinned memory, as there is no nvidia-fs path here")
}

pub(super) fn uuid_of(gpu: &Gpu) -> [u8; 16] {
    gpu.info().cuda.map_or([0; 16], |cuda| cuda.uuid.bytes)
}
