//! The library of a process: closed, opened by whoever needs it first, counted, closed by the last.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use beeline_sys::cuda::ForeignStream;
use beeline_sys::user::{UserPtr, is_forked, watch_forks};

use super::Operation;
use super::batch::Event;
use super::lanes::AllLanes;
use super::options::{self, Options, Slabs, check_kb};
use super::session::{Entry, Late, Session};
use super::sharded::{Local, Sharded};
use super::stats::{CLASSES, GpuWords, LEVEL1_WORDS, Stats};
use super::status::{Failure, OpError, Outcome};
use crate::config::CufileConfig;
use crate::lock;

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

/// What `cuFileDriverGetProperties` answers, sizes in KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields of the API's structure")]
pub struct Properties {
    pub poll_kb: u64,
    pub direct_kb: u64,
    pub control_flags: u32,
    pub feature_flags: u32,
    pub cache_kb: u32,
    pub per_buffer_kb: u32,
    pub pinned_kb: u32,
    pub batch: u32,
    pub batch_ms: u32,
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
        // Unpinning takes milliseconds a lane, and nobody has to wait for it.
        let trim = move || {
            drop(slots);
            lanes.iter().for_each(|lanes| lanes.trim());
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
    pub fn register_stream(&self, key: usize, flags: u32) -> Outcome<()> {
        self.opened()?.register_stream(key, flags)
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

    // ---- parameters

    /// The parameters in force, or those that opening would bring into force.
    fn options(&self) -> Outcome<Options> {
        if let Some(session) = self.current() {
            return Ok(session.options.clone());
        }
        let mut staged = lock(&self.staged);
        if let Some(options) = &*staged {
            return Ok(options.clone());
        }
        let loaded = Options::load(self.settings.json.as_deref(), &self.settings.env)?;
        Ok(staged.insert(loaded).clone())
    }

    /// Changes parameters, which only a closed library allows.
    ///
    /// # Errors
    /// What `change` says; `DRIVER_ALREADY_OPEN`.
    fn stage(&self, change: impl FnOnce(&mut Options) -> Outcome<()>) -> Outcome<()> {
        not_forked()?;
        let mut options = self.options()?;
        change(&mut options)?;
        let _count = lock(&self.count);
        if self.current().is_some() {
            let text = "parameters can be set while cuFile is closed; close it first";
            return Err(Failure::new(OpError::DRIVER_ALREADY_OPEN, text));
        }
        *lock(&self.staged) = Some(options);
        Ok(())
    }

    /// # Errors
    /// `INVALID_VALUE` for an unknown parameter; so the ones that follow, which also answer it for values
    /// out of bounds, and `DRIVER_ALREADY_OPEN` where something is to be set.
    pub fn size(&self, parameter: i32) -> Outcome<u64> {
        not_forked()?;
        self.options()?.get_size(parameter)
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn set_size(&self, parameter: i32, value: u64) -> Outcome<()> {
        self.stage(|options| options.set_size(parameter, value))
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn bounds(&self, parameter: i32) -> Outcome<(u64, u64)> {
        not_forked()?;
        Options::bounds(parameter)
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn flag(&self, parameter: i32) -> Outcome<bool> {
        not_forked()?;
        self.options()?.get_bool(parameter)
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn set_flag(&self, parameter: i32, value: bool) -> Outcome<()> {
        self.stage(|options| options.set_bool(parameter, value))
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn text(&self, parameter: i32) -> Outcome<String> {
        not_forked()?;
        self.options()?.get_string(parameter).map(str::to_owned)
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn set_text(&self, parameter: i32, value: &str) -> Outcome<()> {
        self.stage(|options| options.set_string(parameter, value))
    }

    /// Slab classes: sizes in KiB and counts; of the host pool, or of the device's.
    ///
    /// # Errors
    /// `INVALID_VALUE` where the settings cannot be read.
    pub fn slabs(&self, device: bool) -> Outcome<(Vec<u64>, Vec<u64>)> {
        not_forked()?;
        let options = self.options()?;
        let slabs = if device { options.gpu_slabs } else { options.posix_slabs };
        Ok((slabs.sizes_kb, slabs.counts))
    }

    /// Stages slab classes; they are reported, the pool itself is one.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `DRIVER_ALREADY_OPEN`.
    pub fn set_slabs(&self, device: bool, sizes_kb: Vec<u64>, counts: Vec<u64>) -> Outcome<()> {
        let slabs = Slabs::new(sizes_kb, counts)?;
        self.stage(|options| {
            *(if device { &mut options.gpu_slabs } else { &mut options.posix_slabs }) = slabs;
            Ok(())
        })
    }

    /// # Errors
    /// `INVALID_VALUE` where the settings cannot be read.
    pub fn properties(&self) -> Outcome<Properties> {
        /// Batches, streams and parallel I/O.
        const FEATURES: u32 = 0b1110;
        const ALLOW_COMPAT_FLAG: u32 = 0b10;
        not_forked()?;
        let options = self.options()?;
        let word = |at| u32::try_from(options.size(at)).unwrap_or(u32::MAX);
        let poll = u32::from(options.bool(options::POLL_MODE));
        let compat = if options.bool(options::ALLOW_COMPAT) { ALLOW_COMPAT_FLAG } else { 0 };
        Ok(Properties {
            poll_kb: options.size(options::POLL_KB),
            direct_kb: options.size(options::DIRECT_KB),
            control_flags: poll | compat,
            feature_flags: FEATURES,
            cache_kb: word(options::CACHE_KB),
            per_buffer_kb: word(options::PER_BUFFER_KB),
            pinned_kb: word(options::PINNED_KB),
            batch: word(options::BATCH),
            batch_ms: word(options::BATCH_MS),
        })
    }

    /// Checks a limit of `cuFileDriverSetPollMode` and its kin, which change nothing here: the pool of
    /// pinned memory is set by `BEELINE_POOL_BYTES`.
    ///
    /// # Errors
    /// `DRIVER_UNSUPPORTED_LIMIT`, `INVALID_VALUE`.
    pub fn check_limit(&self, limit: Limit, kb: u64) -> Outcome<()> {
        not_forked()?;
        match limit {
            Limit::Poll => check_kb(options::POLL_KB, kb, 4),
            Limit::Direct => check_kb(options::DIRECT_KB, kb, 64),
            Limit::Cache => check_kb(options::CACHE_KB, kb, 64),
            Limit::Pinned => check_kb(options::PINNED_KB, kb, 64),
        }
    }

    // ---- statistics

    /// # Errors
    /// `INVALID_VALUE` outside 0 to 3.
    pub fn set_stats_level(&self, level: i32) -> Outcome<()> {
        not_forked()?;
        if !(0..=3).contains(&level) {
            return Err(Failure::value(format!("statistics level {level} is not 0 to 3")));
        }
        self.stats.set_level(level);
        Ok(())
    }

    /// The level of statistics.
    pub fn stats_level(&self) -> i32 {
        self.stats.level()
    }

    /// Starts or stops counting.
    ///
    /// # Errors
    /// `DRIVER_NOT_INITIALIZED`; `INTERNAL_ERROR` for a start at level 0.
    pub fn run_stats(&self, run: bool) -> Outcome<()> {
        if run {
            self.needed(OpError::DRIVER_NOT_INITIALIZED)?;
            if self.stats.level() == 0 {
                let text = "statistics are at level 0; set a level first";
                return Err(Failure::new(OpError::INTERNAL_ERROR, text));
            }
        }
        self.stats.run(run);
        Ok(())
    }

    /// Sets all counters to 0.
    pub fn reset_stats(&self) {
        self.stats.reset();
    }

    /// Level 1, in the order of the API's structure.
    ///
    /// # Errors
    /// `INVALID_VALUE` below that level; so the ones that follow.
    pub fn stats1(&self) -> Outcome<[u64; LEVEL1_WORDS]> {
        self.level(1)?;
        Ok(self.stats.level1())
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `stats1`")]
    pub fn stats2(&self) -> Outcome<[[u64; CLASSES]; 2]> {
        self.level(2)?;
        Ok(self.stats.level2())
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `stats1`")]
    pub fn stats3(&self) -> Outcome<Vec<GpuWords>> {
        self.level(3)?;
        Ok(self.stats.level3())
    }

    fn level(&self, least: i32) -> Outcome<()> {
        not_forked()?;
        let level = self.stats.level();
        if level >= least {
            return Ok(());
        }
        Err(Failure::value(format!("statistics are at level {level}, {least} is needed")))
    }

    /// Leaves the statistics in `folder` once a second, for `beeline cufile stats`.
    fn keep_snapshots(&self, folder: PathBuf) {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            let keep = move || {
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                    let library = library();
                    if library.current().is_some() {
                        library.leave_snapshot(&folder);
                    }
                }
            };
            let _ = std::thread::Builder::new().name("beeline-stats".to_owned()).spawn(keep);
        });
    }

    fn leave_snapshot(&self, folder: &std::path::Path) {
        let path = folder.join(format!("beeline-cufile-{}.json", std::process::id()));
        let next = path.with_extension("tmp");
        let written = std::fs::write(&next, self.snapshot().to_string());
        if let Err(error) = written.and_then(|()| std::fs::rename(&next, &path)) {
            tracing::warn!("leave statistics in {}: {error}", folder.display());
        }
    }

    /// What this process did so far: process, counts, bytes by route, CPU seconds.
    pub fn snapshot(&self) -> serde_json::Value {
        let words = self.stats.level1();
        let word = |at: usize| words.get(at).copied().unwrap_or(0);
        let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let routes: serde_json::Map<_, _> = self
            .routes()
            .into_iter()
            .map(|(name, bytes)| (name.to_owned(), bytes.into()))
            .collect();
        serde_json::json!({
            "pid": std::process::id(),
            "program": program.trim(),
            "level": self.stats.level(),
            "reads": word(0),
            "read_errors": word(1),
            "writes": word(2),
            "write_errors": word(3),
            "read_bytes": word(12),
            "written_bytes": word(13),
            "read_us_mean": word(16),
            "write_us_mean": word(17),
            "batch_read_bytes": word(52),
            "batch_written_bytes": word(53),
            "routes": routes,
            "cpu_seconds": self.stats.cpu_seconds(),
        })
    }

    /// Bytes by route since the library was opened.
    pub fn routes(&self) -> Vec<(&'static str, u64)> {
        match self.session() {
            Ok(Some(session)) => session.routes().to_vec(),
            _ => Vec::new(),
        }
    }

    /// The file of settings, and where the log goes.
    pub fn log_settings(&self) -> (String, PathBuf) {
        let options = self.options().unwrap_or_default();
        let file = options.string(options::LOG_FILE).to_owned();
        (options.string(options::LOG_LEVEL).to_owned(), PathBuf::from(file))
    }
}

/// Which limit is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the API's functions")]
pub enum Limit {
    Poll,
    Direct,
    Cache,
    Pinned,
}
