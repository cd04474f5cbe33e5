//! The library of a process: closed, opened by whoever needs it first, counted, closed by the last.

mod parameters;
mod statistics;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use beeline_sys::cuda::ForeignStream;
use beeline_sys::user::{UserPtr, is_forked, watch_forks};

use super::Operation;
use super::batch::Event;
use super::lanes::AllLanes;
use super::options::{self, Options};
use super::session::{Entry, Late, Session};
use super::sharded::{Local, Sharded};
use super::stats::Stats;
use super::status::{Failure, OpError, Outcome};
use crate::config::CufileConfig;
use crate::lock;

pub use parameters::{Limit, Properties};

/// The version reported where the environment says nothing else.
const VERSION: u32 = 1200;

/// The cuFile library of this process.
pub struct Library {
    session: Sharded<Option<Local<Session>>>,
    /// How often it was opened. Locked before `session`.
    count: Mutex<i64>,
    staged: Mutex<Option<Options>>,
    lanes: Arc<AllLanes>,
    stats: Arc<Stats>,
    settings: CufileConfig,
}

/// The library of this process.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(Library::new)
}

/// Refuses a child of `fork`: neither CUDA nor a lock of the parent's threads can be used in it.
fn not_forked() -> Outcome<()> {
    if is_forked() {
        return Err(Failure::new(
            OpError::IO_DISABLED,
            "this process was forked after cuFile was opened; start it with exec, or open after fork",
        ));
    }
    Ok(())
}

impl Library {
    fn new() -> Self {
        Self {
            session: Sharded::default(),
            count: Mutex::new(0),
            staged: Mutex::default(),
            lanes: Arc::default(),
            stats: Arc::default(),
            settings: CufileConfig::from_env(),
        }
    }

    /// What the environment said.
    pub const fn settings(&self) -> &CufileConfig {
        &self.settings
    }

    /// The version to report, as `1000 * major + 10 * minor`.
    pub fn version(&self) -> u32 {
        self.settings.version.unwrap_or(VERSION)
    }

    // ---- open and close

    /// Opens, or counts one more user.
    ///
    /// # Errors
    /// `DRIVER_NOT_INITIALIZED` where the settings forbid what there is; `INVALID_VALUE` for a file of
    /// settings that is no JSON; `IO_DISABLED` in a child of a process that had opened it.
    pub fn open(&self) -> Outcome<()> {
        not_forked()?;
        let mut count = lock(&self.count);
        self.open_first(&mut count)?;
        *count += 1;
        Ok(())
    }

    /// Opens for a call that needs it; counts as one user where nobody had opened it.
    fn opened(&self) -> Outcome<Local<Session>> {
        not_forked()?;
        if let Some(session) = self.current() {
            return Ok(session);
        }
        let mut count = lock(&self.count);
        let session = self.open_first(&mut count)?;
        if *count == 0 {
            *count = 1;
        }
        Ok(session)
    }

    /// The session of this moment.
    fn current(&self) -> Option<Local<Session>> {
        self.session.read(Option::clone)
    }

    fn open_first(&self, count: &mut i64) -> Outcome<Local<Session>> {
        if let Some(session) = self.current() {
            return Ok(session);
        }
        watch_forks();
        *count = 0;
        let options = self.options()?;
        for problem in &options.problems {
            tracing::warn!("cufile settings: {problem}");
        }
        if !options.bool(options::ALLOW_COMPAT) {
            return Err(Failure::new(
                OpError::DRIVER_NOT_INITIALIZED,
                "allow_compat_mode is false, and there is no path here without a copy in host memory; \
                 set properties.allow_compat_mode (or CUFILE_ALLOW_COMPAT_MODE) to true",
            ));
        }
        if std::path::Path::new("/proc/driver/nvidia-fs/stats").exists() {
            tracing::warn!(
                "nvidia-fs is loaded: NVIDIA's libcufile may move bytes past host memory here, this one \
                 copies them through it (faster for what is in the page cache, slower for what is not)"
            );
        }
        if self.stats.level() == 0 {
            let asked = i32::try_from(options.size(options::STATS)).unwrap_or(0);
            let least = i32::from(self.settings.stats_folder.is_some());
            self.stats.set_level(asked.max(least));
        }
        let (lanes, stats) = (Arc::clone(&self.lanes), Arc::clone(&self.stats));
        let made = Arc::new(Session::new(options, self.settings.clone(), lanes, stats));
        self.session.change(|session| session.replace(Arc::new(Arc::clone(&made))));
        if let Some(folder) = &self.settings.stats_folder {
            self.keep_snapshots(folder.clone());
        }
        Ok(Arc::new(made))
    }

    /// One user less; the last closes.
    ///
    /// # Errors
    /// `DRIVER_NOT_INITIALIZED` where it is not open.
    pub fn close(&self) -> Outcome<()> {
        not_forked()?;
        let mut count = lock(&self.count);
        if *count <= 0 {
            let text = "closed more often than opened";
            return Err(Failure::new(OpError::DRIVER_NOT_INITIALIZED, text));
        }
        *count -= 1;
        if *count > 0 {
            return Ok(());
        }
        if let Some(folder) = &self.settings.stats_folder {
            self.leave_snapshot(folder);
        }
        let session = self.session.change(Option::take);
        drop(count);
        if let Some(session) = session {
            session.end();
        }
        let lanes = self.lanes.take();
        // Streams and events go now: the caller may destroy their contexts next.
        let slots: Vec<_> = lanes.iter().flat_map(|lanes| lanes.end()).collect();
        let ordered = lock(&self.lanes.gates).clone();
        // Unpinning takes milliseconds a lane, and nobody has to wait for it.
        let trim = move || {
            drop(slots);
            lanes.iter().for_each(|lanes| lanes.trim());
            ordered.iter().for_each(|ordered| ordered.trim());
        };
        let _ = std::thread::Builder::new().name("beeline-trim".to_owned()).spawn(trim);
        Ok(())
    }

    /// How many users there are; -1 in a child of a process that had opened it.
    pub fn use_count(&self) -> i64 {
        if is_forked() { -1 } else { *lock(&self.count) }
    }

    fn session(&self) -> Outcome<Option<Local<Session>>> {
        not_forked()?;
        Ok(self.current())
    }

    fn needed(&self, code: OpError) -> Outcome<Local<Session>> {
        self.session()?.ok_or_else(|| Failure::new(code, "cuFile is not open"))
    }

    // ---- files, buffers, transfers

    /// Registers the file that is open as `fd`; answers its handle. Opens the library if nobody has.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `INVALID_FILE_TYPE`, `INVALID_FILE_OPEN_FLAG`, `HANDLE_ALREADY_REGISTERED`.
    pub fn register_handle(&self, fd: i32) -> Outcome<usize> {
        self.opened()?.register_handle(fd)
    }

    /// Forgets a handle; one that is none is left alone.
    pub fn deregister_handle(&self, handle: usize) {
        if let Ok(Some(session)) = self.session() {
            session.deregister_handle(handle);
        }
    }

    /// Registers `[ptr, ptr + len)`. Opens the library if nobody has.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `CUDA_POINTER_RANGE_ERROR`, `CUDA_MEMORY_TYPE_INVALID` for managed memory,
    /// `MEMORY_ALREADY_REGISTERED`.
    pub fn register_buffer(&self, ptr: UserPtr, len: u64) -> Outcome<()> {
        self.opened()?.register_buffer(ptr.address(), len)
    }

    /// Forgets a registered buffer.
    ///
    /// # Errors
    /// `MEMORY_NOT_REGISTERED`; `INVALID_VALUE` for a null pointer.
    pub fn deregister_buffer(&self, ptr: UserPtr) -> Outcome<()> {
        match self.session()? {
            Some(session) => session.deregister_buffer(ptr.address()),
            None if ptr.address() == 0 => Err(Failure::value("the buffer is a null pointer")),
            None => Err(Failure::new(OpError::MEMORY_NOT_REGISTERED, "cuFile is not open")),
        }
    }

    /// Reads or writes `size` bytes; answers how many. Fewer for a read only at the end of the file.
    ///
    /// # Errors
    /// `HANDLE_NOT_REGISTERED`, `INVALID_VALUE`, `INVALID_FILE_OPEN_FLAG`, `INVALID_MAPPING_RANGE` and
    /// `CUDA_POINTER_RANGE_ERROR` outside a buffer; errors of the system and of the device.
    pub fn transfer(
        &self,
        operation: Operation,
        handle: usize,
        ptr: UserPtr,
        size: u64,
        (file_offset, ptr_offset): (i64, i64),
    ) -> Outcome<u64> {
        let session = self.needed(OpError::HANDLE_NOT_REGISTERED)?;
        session.transfer(operation, handle, ptr, size, (file_offset, ptr_offset))
    }

    /// [`Self::transfer`] for several buffers that lie one after the other in the file.
    ///
    /// # Errors
    /// As [`Self::transfer`], where no byte was moved.
    pub fn transfer_many(
        &self,
        operation: Operation,
        handle: usize,
        parts: &[(UserPtr, u64)],
        file_offset: i64,
    ) -> Outcome<u64> {
        let session = self.needed(OpError::HANDLE_NOT_REGISTERED)?;
        session.transfer_many(operation, handle, parts, file_offset)
    }

    // ---- batches

    /// Sets a batch up for `entries` entries at once. Opens the library if nobody has.
    ///
    /// # Errors
    /// `INVALID_VALUE`.
    pub fn set_up_batch(&self, entries: u32) -> Outcome<usize> {
        self.opened()?.set_up_batch(entries)
    }

    /// Submits all of `entries`, or none.
    ///
    /// # Errors
    /// What is wrong with the first bad entry; `BATCH_FULL`; `INVALID_VALUE` for no batch or no entry.
    pub fn submit(&self, batch: usize, entries: &[Entry]) -> Outcome<()> {
        self.needed(OpError::INVALID_VALUE)?.submit(batch, entries)
    }

    /// The events since the last call, each once: `least` to `most`, fewer where nothing is left to wait
    /// for or `timeout` has passed (without one, the stall timeout).
    ///
    /// # Errors
    /// `INVALID_VALUE`.
    pub fn events(
        &self,
        batch: usize,
        (least, most): (u32, u32),
        timeout: Option<Duration>,
    ) -> Outcome<Vec<Event>> {
        self.needed(OpError::INVALID_VALUE)?.events(batch, least, most, timeout)
    }

    /// Takes back what was submitted and not reported, and waits for what has started; none of it is
    /// reported.
    ///
    /// # Errors
    /// `INVALID_VALUE`; `ETIMEDOUT` where what has started does not end within the stall timeout.
    pub fn cancel(&self, batch: usize) -> Outcome<()> {
        self.needed(OpError::INVALID_VALUE)?.cancel(batch)
    }

    /// Ends a batch; waits until nothing uses its buffers any more.
    pub fn destroy(&self, batch: usize) {
        if let Ok(Some(session)) = self.session() {
            session.destroy(batch);
        }
    }

    // ---- streams

    /// Registers a stream with flags of the API. Opens the library if nobody has.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a stream that is registered, and unknown flags.
    pub fn register_stream(&self, stream: (ForeignStream, usize), flags: u32) -> Outcome<()> {
        self.opened()?.register_stream(stream, flags)
    }

    /// Forgets a registered stream.
    ///
    /// # Errors
    /// `INVALID_VALUE` for one that is not registered.
    pub fn deregister_stream(&self, key: usize) -> Outcome<()> {
        self.needed(OpError::INVALID_VALUE)?.deregister_stream(key)
    }

    /// Reads or writes in stream order.
    ///
    /// # Errors
    /// `HANDLE_NOT_REGISTERED`, `INVALID_FILE_OPEN_FLAG`, `INVALID_VALUE`; `ASYNC_NOT_SUPPORTED` while the
    /// stream is being captured; what the driver says. What fails later is reported in `late.moved`.
    pub fn queue(
        &self,
        operation: Operation,
        handle: usize,
        ptr: UserPtr,
        late: Late,
        stream: (ForeignStream, usize),
    ) -> Outcome<()> {
        let session = self.needed(OpError::HANDLE_NOT_REGISTERED)?;
        session.queue(operation, handle, ptr, late, stream)
    }
}
