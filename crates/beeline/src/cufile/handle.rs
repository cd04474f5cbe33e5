//! Registered files.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_core::plan::{Mode, Operation, Plan, StorageRequest, StorageRoute};
use beeline_sys::user::duplicate;
use rustix::fs::OFlags;

use super::mapped::Mapped;
use super::status::{Failure, OpError, Outcome};
use crate::gpu::Gpu;
use crate::storage::File;

/// A registered file: its own descriptors, so that what the caller does to its number changes nothing.
pub(super) struct Handle {
    /// The descriptor's number in the caller, for the rule that it is registered once.
    pub(super) number: i32,
    pub(super) file: File,
    /// Where bytes are written, and read through the page cache.
    data: Arc<OwnedFd>,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The data descriptor itself is for direct I/O, because no other could be had.
    pub(super) direct_only: bool,
    identity: (u64, (u32, u32)),
    /// For writes through mappings; none where the data descriptor cannot be mapped.
    pub(super) mapped: Option<Mapped>,
    pub(super) routes: Routes,
}

/// Bytes by the way they went.
#[derive(Default)]
pub(super) struct Routes {
    pub(super) cached: AtomicU64,
    pub(super) direct: AtomicU64,
    pub(super) written: AtomicU64,
    pub(super) mapped: AtomicU64,
    pub(super) host: AtomicU64,
}

impl Routes {
    pub(super) fn count(counter: &AtomicU64, bytes: u64) {
        counter.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn add(&self, other: &Self) {
        let all = [
            (&self.cached, &other.cached),
            (&self.direct, &other.direct),
            (&self.host, &other.host),
            (&self.written, &other.written),
            (&self.mapped, &other.mapped),
        ];
        for (sum, part) in all {
            Self::count(sum, part.load(Ordering::Relaxed));
        }
    }

    /// The sums by name.
    pub(super) fn named(&self) -> [(&'static str, u64); 5] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("read-page-cache", read(&self.cached)),
            ("read-direct", read(&self.direct)),
            ("read-to-host", read(&self.host)),
            ("written", read(&self.written)),
            ("written-mapped", read(&self.mapped)),
        ]
    }
}

impl Handle {
    /// Registers the file that is open as `number`.
    ///
    /// # Errors
    /// `INVALID_VALUE` where nothing is open; `INVALID_FILE_TYPE` for what has no bytes at offsets;
    /// `INVALID_FILE_OPEN_FLAG` for O_APPEND and O_PATH; `GETNEWFD_FAILED` where descriptors run out.
    pub(super) fn new(number: i32) -> Outcome<Self> {
        let fd = duplicate(number).map_err(|error| {
            if error.raw_os_error() == Some(rustix::io::Errno::BADF.raw_os_error()) {
                return Failure::value(format!("descriptor {number} is not open"));
            }
            Failure::new(
                OpError::GETNEWFD_FAILED,
                format!("duplicate descriptor {number}: {error}"),
            )
        })?;
        let flags = rustix::fs::fcntl_getfl(&fd)
            .map_err(|error| Failure::io("examine the descriptor", &error.into()))?;
        if flags.contains(OFlags::APPEND) || flags.contains(OFlags::PATH) {
            let flag = if flags.contains(OFlags::PATH) { "O_PATH" } else { "O_APPEND" };
            return Err(Failure::new(
                OpError::INVALID_FILE_OPEN_FLAG,
                format!("descriptor {number} was opened with {flag}; open it without"),
            ));
        }
        let access = flags & OFlags::ACCMODE;
        let (readable, writable) = (access != OFlags::WRONLY, access != OFlags::RDONLY);
        let path = name_of(number);
        let (data, direct_only) = buffered(&fd, flags)?;
        let again = data.try_clone().map_err(|error| {
            Failure::new(
                OpError::GETNEWFD_FAILED,
                format!("duplicate descriptor {number}: {error}"),
            )
        })?;
        let file = File::from_fd(again, &path, false).map_err(|error| {
            if error.is_refused() {
                return Failure::new(OpError::INVALID_FILE_TYPE, format!("{error:#}"));
            }
            error.into()
        })?;
        let identity = file.identity();
        // What was asked for with O_DIRECT is open a second time without, or is `direct_only`.
        let mapped = (!direct_only)
            .then(|| Mapped::new(data.as_fd(), flags - OFlags::DIRECT, &file))
            .flatten();
        let data = Arc::new(data);
        let routes = Routes::default();
        Ok(Self { number, file, data, readable, writable, direct_only, identity, mapped, routes })
    }

    pub(super) fn data(&self) -> BorrowedFd<'_> {
        self.data.as_fd()
    }

    /// Whether the descriptor number still means this file in the caller.
    pub(super) fn is_current(&self) -> bool {
        let Ok(fd) = duplicate(self.number) else { return false };
        beeline_sys::file::stat(&fd).is_ok_and(|stat| (stat.inode, stat.device) == self.identity)
    }

    pub(super) fn plan(&self, gpu: &Gpu) -> Plan<StorageRoute> {
        let ask = StorageRequest { operation: Operation::Read, mode: Mode::Auto, route: None };
        self.file.plan_blocking(gpu, ask)
    }

    /// # Errors
    /// `INVALID_FILE_OPEN_FLAG`.
    pub(super) fn check(&self, operation: Operation) -> Outcome<()> {
        let (fits, needed) = match operation {
            Operation::Read => (self.readable, "reading"),
            Operation::Write => (self.writable, "writing"),
        };
        if fits {
            return Ok(());
        }
        let path = self.file.path().display();
        let text = format!("{path} was not opened for {needed}");
        Err(Failure::new(OpError::INVALID_FILE_OPEN_FLAG, text))
    }
}

/// A descriptor of the same file that goes through the page cache: the one given, unless that is for
/// direct I/O, in which case the file is opened once more.
fn buffered(fd: &OwnedFd, flags: OFlags) -> Outcome<(OwnedFd, bool)> {
    let given = || {
        fd.try_clone()
            .map_err(|e| Failure::new(OpError::GETNEWFD_FAILED, format!("duplicate: {e}")))
    };
    if !flags.contains(OFlags::DIRECT) {
        return Ok((given()?, false));
    }
    let keep = OFlags::ACCMODE | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME;
    let wanted = (flags & keep) | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let path = format!("/proc/self/fd/{}", beeline_sys::mem::raw(fd));
    match rustix::fs::open(path, wanted, rustix::fs::Mode::empty()) {
        Ok(other) => Ok((other, false)),
        Err(error) => {
            tracing::warn!(%error, "no second descriptor: only aligned requests will work");
            Ok((given()?, true))
        }
    }
}

/// The path behind a descriptor, for messages.
fn name_of(number: i32) -> PathBuf {
    std::fs::read_link(Path::new("/proc/self/fd").join(number.to_string()))
        .unwrap_or_else(|_| PathBuf::from(format!("descriptor {number}")))
}
