//! Writing to a file through mappings of its page cache.
//!
//! A file system takes the file's lock for each `write`, so one file takes the bytes of one thread at a time.
//! What is in the page cache already can be written through a shared mapping by as many threads as there
//! are, without that lock. The kernel makes the copies, so that a file that somebody cuts meanwhile, or a
//! full disk, is an error and never a signal; after one, the request is written the ordinary way, which gives
//! the exact answer. What `write` does beside the bytes (times of the file, set-user-ID bits, notifications)
//! is done by a small ordinary write before it; of small writes in a crowd, once in 4 ms.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::Instant;

use beeline_core::addr::ByteRange;
use beeline_core::plan::Residency;
use beeline_sys::mem::HostMem;
use beeline_sys::window::FileWindow;
use rustix::fs::{IFlags, OFlags, SealFlags};

use crate::storage::{File, Prober};
use crate::{read_lock, write_lock};

/// Bytes of one mapping, most mappings of one file (2 GiB), and of all files together (8 GiB of addresses).
const WINDOW: u64 = 32 << 20;
const FILE_WINDOWS_MAX: usize = 64;
const WINDOWS_MAX: usize = 256;
/// Bytes that are made ready for writing at once.
const GRANULE: u64 = 128 << 10;
/// Smallest request that is written so: below, an ordinary write is as quick.
const LEN_MIN: u64 = 4096;
/// How old the file's times may be after a small write beside others.
const TICK_MICROS: u64 = 4000;
/// For how long writers count as beside each other after they were.
const CROWD_MICROS: u64 = 2000;
/// Bytes of the ordinary write.
const TOUCH: u64 = 4096;

/// File systems whose mappings are their page cache (linux/magic.h): ext2 to ext4, XFS, tmpfs.
const FILE_SYSTEMS: [u64; 3] = [0xef53, 0x5846_5342, 0x0102_1994];

static WINDOWS: AtomicUsize = AtomicUsize::new(0);

/// The mappings of one file.
pub(super) struct Mapped {
    usable: AtomicBool,
    windows: RwLock<BTreeMap<u64, Arc<Window>>>,
    /// Counts uses, to find the window that was used longest ago.
    clock: AtomicU64,
    writers: AtomicUsize,
    /// Microseconds since [`micros`] started, 0 for never.
    crowded_at: AtomicU64,
    touched_at: AtomicU64,
}

struct Window {
    memory: FileWindow,
    used: AtomicU64,
    /// One bit for each [`GRANULE`] that was made ready for writing.
    ready: [AtomicU64; (WINDOW / GRANULE / 64) as usize],
}

impl Window {
    /// Makes the granules of which `[start, start + len)` covers all ready, once: as long as their pages are not
    /// written to the drive, none of them costs a fault then.
    fn prepare(&self, start: u64, len: u64) {
        for granule in start.div_ceil(GRANULE)..(start + len) / GRANULE {
            let Some(word) = self.ready.get((granule / 64) as usize) else { return };
            let bit = 1 << (granule % 64);
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
                // Where it cannot be had, the copy says so.
                let _ = self.memory.populate(granule * GRANULE, GRANULE);
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        WINDOWS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a writer of the file until dropped.
pub(super) struct Writing<'a> {
    mapped: &'a Mapped,
    /// Whether there are others, or were a moment ago.
    pub(super) crowded: bool,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.mapped.writers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Mapped {
    /// For a file that is open with `flags`, of which `file` tells the rest; none where it must not be written
    /// so.
    pub(super) fn new(fd: BorrowedFd<'_>, flags: OFlags, file: &File) -> Option<Self> {
        is_usable(fd, flags, file).then(|| Self {
            usable: AtomicBool::new(true),
            windows: RwLock::default(),
            clock: AtomicU64::new(0),
            writers: AtomicUsize::new(0),
            crowded_at: AtomicU64::new(0),
            touched_at: AtomicU64::new(0),
        })
    }

    pub(super) fn enter(&self) -> Writing<'_> {
        let others = self.writers.fetch_add(1, Ordering::Relaxed) > 0;
        let last = self.crowded_at.load(Ordering::Relaxed);
        if !others && last == 0 {
            return Writing { mapped: self, crowded: false };
        }
        let now = micros();
        if others && now.saturating_sub(last) > CROWD_MICROS / 8 {
            self.crowded_at.store(now, Ordering::Relaxed);
        }
        let recent = last != 0 && now.saturating_sub(last) < CROWD_MICROS;
        Writing { mapped: self, crowded: others || recent }
    }

    /// Whether `range` can be written so now: it lies inside the file, and in the page cache.
    pub(super) fn fits(&self, fd: BorrowedFd<'_>, file: &File, range: ByteRange) -> bool {
        if range.len < LEN_MIN || !self.usable.load(Ordering::Relaxed) {
            return false;
        }
        // The description is the caller's too, who may have changed its flags since.
        let unfit = OFlags::APPEND | OFlags::DIRECT;
        if rustix::fs::fcntl_getfl(fd).map_or(true, |flags| flags.intersects(unfit)) {
            return false;
        }
        Self::is_inside(fd, range)
            && match file.residency_of(range) {
                Residency::Memory => true,
                Residency::Cached { bytes, of } => bytes >= of,
                Residency::Unknown => false,
            }
    }

    /// Whether the file reaches to the end of `range`.
    pub(super) fn is_inside(fd: BorrowedFd<'_>, range: ByteRange) -> bool {
        rustix::fs::fstat(fd)
            .is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(|size| range.end() <= size))
    }

    /// Copies `len` bytes of `from` at `from_offset` to `at` in the file.
    ///
    /// # Errors
    /// `EFAULT` where not all were; what mapping says. The range may be written in parts then.
    pub(super) fn fill(
        &self,
        fd: BorrowedFd<'_>,
        (at, len): (u64, u64),
        from: &HostMem,
        from_offset: u64,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let start = (at + done) % WINDOW;
            let n = (len - done).min(WINDOW - start);
            let window = self.window(fd, (at + done) / WINDOW).inspect_err(|error| {
                // What is short may come back; what is forbidden stays so.
                let short = [rustix::io::Errno::NOMEM, rustix::io::Errno::INTR];
                if !short.iter().any(|no| error.raw_os_error() == Some(no.raw_os_error())) {
                    self.usable.store(false, Ordering::Relaxed);
                }
            })?;
            window.prepare(start, n);
            let copied = window.memory.fill(start, n, from, from_offset + done);
            match copied {
                Ok(copied) if copied == n => done += n,
                Ok(_) => return Err(rustix::io::Errno::FAULT.into()),
                Err(error) => {
                    // A sandbox forbids the call: it will the next time.
                    let forbidden = [rustix::io::Errno::PERM, rustix::io::Errno::NOSYS];
                    if forbidden.iter().any(|no| error.raw_os_error() == Some(no.raw_os_error())) {
                        self.usable.store(false, Ordering::Relaxed);
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Of a request of which `len` bytes are to be written so: how many of its first ones are to be written the
    /// ordinary way before. Of a small one only where that is a while ago.
    pub(super) fn owed(&self, len: u64, small: bool) -> u64 {
        if !small {
            return len.min(TOUCH);
        }
        let (now, last) = (micros(), self.touched_at.load(Ordering::Relaxed));
        if last != 0 && now.saturating_sub(last) < TICK_MICROS {
            return 0;
        }
        let won = self.touched_at.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed);
        if won.is_ok() { len.min(TOUCH) } else { 0 }
    }

    fn window(&self, fd: BorrowedFd<'_>, number: u64) -> io::Result<Arc<Window>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        if let Some(window) = read_lock(&self.windows).get(&number) {
            window.used.store(now, Ordering::Relaxed);
            return Ok(Arc::clone(window));
        }
        let mut windows = write_lock(&self.windows);
        if let Some(window) = windows.get(&number) {
            return Ok(Arc::clone(window));
        }
        let full = WINDOWS.load(Ordering::Relaxed) >= WINDOWS_MAX;
        let gone = if full || windows.len() >= FILE_WINDOWS_MAX {
            let oldest =
                windows.iter().min_by_key(|(_, window)| window.used.load(Ordering::Relaxed));
            let oldest = oldest.map(|(&number, _)| number);
            oldest.and_then(|number| windows.remove(&number))
        } else {
            None
        };
        if full && gone.is_none() {
            return Err(rustix::io::Errno::NOMEM.into());
        }
        let offset = number.checked_mul(WINDOW).ok_or(io::ErrorKind::InvalidInput)?;
        let memory = FileWindow::new(fd, offset, WINDOW as usize)?;
        WINDOWS.fetch_add(1, Ordering::Relaxed);
        let window =
            Arc::new(Window { memory, used: AtomicU64::new(now), ready: Default::default() });
        windows.insert(number, Arc::clone(&window));
        drop(windows);
        // Unmapped outside the lock, or by who uses it last.
        drop(gone);
        Ok(window)
    }
}

fn is_usable(fd: BorrowedFd<'_>, flags: OFlags, file: &File) -> bool {
    const SET_ID: u32 = 0o6000;
    let both = flags & OFlags::ACCMODE == OFlags::RDWR;
    if !both || flags.intersects(OFlags::SYNC | OFlags::DSYNC) {
        return false;
    }
    let Ok(stat) = beeline_sys::file::stat(fd) else { return false };
    let Ok(mount) = rustix::fs::fstatvfs(fd) else { return false };
    let regular = rustix::fs::FileType::from_raw_mode(stat.mode).is_file();
    // What is or may yet be sealed against writing must have no writable mapping; only memory files have seals.
    let sealable = rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| {
        !seals.contains(SealFlags::SEAL)
            || seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE)
    });
    // `chattr +S`: every write is to be on the drive before it returns.
    let synchronous =
        rustix::fs::ioctl_getflags(fd).is_ok_and(|flags| flags.contains(IFlags::SYNC));
    regular
        && !sealable
        && !synchronous
        && stat.mode & SET_ID == 0
        && FILE_SYSTEMS.contains(&stat.fs_magic)
        && !mount.f_flag.contains(rustix::fs::StatVfsMountFlags::SYNCHRONOUS)
        && matches!(file.prober(), Prober::CacheStat | Prober::Memory)
}

/// Microseconds since the first call, at least 1.
fn micros() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let since = START.get_or_init(Instant::now).elapsed().as_micros();
    u64::try_from(since).unwrap_or(u64::MAX).max(1)
}
