//! An open file: two descriptors, what is known of it, and its plan.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use beeline_core::addr::ByteRange;
use beeline_core::plan::{
    self, DeviceFacts, DirectIo, FileFacts, FileKind, HostFacts, IoUring, Plan, StorageRequest,
    StorageRoute,
};
use beeline_core::reason::Code;
use beeline_sys::file::{self as sys, FileStat};
use beeline_sys::uring::Uring;

use super::fault::IoFaults;
use super::residency::Prober;
use crate::error::{Error, Result};
use crate::gpu::{Gpu, Profile};

/// A file to read into, or write from, device memory. Cheap to share in an `Arc`.
pub struct File {
    path: PathBuf,
    buffered: Arc<OwnedFd>,
    direct: Option<Arc<OwnedFd>>,
    stat: FileStat,
    facts: FileFacts,
    prober: Prober,
    writable: bool,
    faults: IoFaults,
}

/// What tells one state of a file's contents from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    size: u64,
    mtime: (i64, u32),
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, changed at {}.{:09}", self.size, self.mtime.0, self.mtime.1)
    }
}

impl File {
    /// Opens `path` for reading. Never waits for a writer and never opens anything but a regular file
    /// or a block device.
    ///
    /// # Errors
    /// `is_not_found`, `is_permission_denied`, `is_refused` for a folder, FIFO, socket, character
    /// device or a file of procfs or sysfs; otherwise what the system says.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        refuse_special(path)?;
        let fd = sys::open(path, false, false).map_err(|error| Error::at("open", path, error))?;
        Self::from_fd(fd, path, false)
    }

    /// Takes a file that is open for reading and writing; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn for_writing(file: impl Into<OwnedFd>, path: impl AsRef<Path>) -> Result<Self> {
        Self::from_fd(file.into(), path.as_ref(), true)
    }

    /// Takes a file that is open for reading; `path` is for messages.
    pub(crate) fn for_reading(file: impl Into<OwnedFd>, path: &Path) -> Result<Self> {
        Self::from_fd(file.into(), path, false)
    }

    /// Takes an open descriptor; `path` is for messages, `write` says that it may be written.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(crate) fn from_fd(fd: OwnedFd, path: &Path, write: bool) -> Result<Self> {
        if write {
            refuse_unwritable(&fd, path)?;
        }
        let stat = sys::stat(&fd).map_err(|error| Error::at("examine", path, error))?;
        let kind = kind_of(stat.mode);
        if kind == FileKind::Other {
            return Err(refused_kind(path, stat.mode));
        }
        if matches!(stat.fs_magic, PROC_MAGIC | SYSFS_MAGIC) {
            return Err(Error::refused(format!(
                "{} is made up by the kernel while it is read ({}), it has no bytes at offsets",
                path.display(),
                fs_name(stat.fs_magic)
            ))
            .remedy("copy it to a regular file first"));
        }
        let memory_backed = is_memory(stat.fs_magic);
        let (direct, facts) = direct_descriptor(&fd, &stat, memory_backed, write);
        let facts = FileFacts {
            kind,
            size: stat.size,
            file_system: fs_name(stat.fs_magic),
            memory_backed,
            on_nvme: on_nvme(stat.device, memory_backed),
            direct: facts,
        };
        let prober = Prober::choose(fd.as_fd(), memory_backed, stat.fs_magic == OVERLAY_MAGIC);
        Ok(Self {
            path: path.to_owned(),
            buffered: Arc::new(fd),
            direct,
            stat,
            facts,
            prober,
            writable: write,
            faults: IoFaults::default(),
        })
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes when it was opened.
    pub const fn size(&self) -> u64 {
        self.facts.size
    }

    /// What is known of it.
    pub const fn facts(&self) -> &FileFacts {
        &self.facts
    }

    /// How its place in the page cache is asked for.
    pub const fn prober(&self) -> Prober {
        self.prober
    }

    /// Faults to inject into its reads and writes.
    pub const fn faults(&self) -> &IoFaults {
        &self.faults
    }

    /// The routes between this file and `gpu`.
    pub fn plan(&self, gpu: &Gpu, request: StorageRequest) -> Plan<StorageRoute> {
        self.plan_for(std::slice::from_ref(gpu), request, true)
    }

    /// [`Self::plan`] for a request that names several devices: what one of them cannot do, no chunk
    /// can. `io_uring` is the engine's own setting.
    pub(super) fn plan_for(
        &self,
        gpus: &[Gpu],
        request: StorageRequest,
        io_uring: bool,
    ) -> Plan<StorageRoute> {
        let device = gpus.iter().map(device_facts).reduce(|all, one| DeviceFacts {
            simulated: all.simulated || one.simulated,
            reads_file_pages: all.reads_file_pages && one.reads_file_pages,
            has_window: all.has_window && one.has_window,
        });
        let none = DeviceFacts { simulated: false, reads_file_pages: false, has_window: false };
        let device = device.unwrap_or(none);
        if io_uring {
            return plan::storage(request, &self.facts, &device, &host_facts());
        }
        let detail = "the engine's configuration turns it off".to_owned();
        let host = HostFacts { io_uring: IoUring::No(Code::IoUringDenied, detail) };
        plan::storage(request, &self.facts, &device, &host)
    }

    /// Whether it was opened for writing.
    pub const fn is_writable(&self) -> bool {
        self.writable
    }

    /// The state of its contents when it was opened.
    pub const fn stamp(&self) -> Stamp {
        Stamp { size: self.stat.size, mtime: self.stat.mtime }
    }

    /// Reads `len` bytes from `at` on with plain system calls, for headers and checks.
    ///
    /// # Errors
    /// `is_corrupt` where the file ends before; what `pread(2)` says; `is_out_of_memory`.
    pub(crate) fn read_to_vec(&self, at: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        bytes.try_reserve_exact(size).map_err(|error| {
            Error::new(crate::error::Kind::OutOfMemory, format!("no room for {len} bytes"))
                .because(error)
        })?;
        bytes.resize(size, 0);
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match rustix::io::pread(&*self.buffered, rest, at + done as u64) {
                Ok(0) => {
                    let text = format!("{} ended early", self.path.display());
                    return Err(Error::new(crate::error::Kind::Corrupt, text).coded("file-changed"));
                }
                Ok(n) => done += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::at("read", &self.path, error.into())),
            }
        }
        Ok(bytes)
    }

    /// Checks that the contents are still those of [`Self::stamp`].
    ///
    /// # Errors
    /// `is_corrupt` where size or time of change differ; what `statx(2)` says.
    pub fn check_unchanged(&self) -> Result<()> {
        let stat =
            sys::stat(&*self.buffered).map_err(|error| Error::at("examine", &self.path, error))?;
        let now = Stamp { size: stat.size, mtime: stat.mtime };
        if now == self.stamp() {
            return Ok(());
        }
        Err(Error::new(
            crate::error::Kind::Corrupt,
            format!(
                "{} changed while it was read: {}, now {now}",
                self.path.display(),
                self.stamp()
            ),
        )
        .coded("file-changed")
        .remedy("read it again once its writer has finished"))
    }

    /// [`Self::plan`] without io_uring: what a thread that waits can do.
    pub(crate) fn plan_blocking(&self, gpu: &Gpu, request: StorageRequest) -> Plan<StorageRoute> {
        self.plan_for(std::slice::from_ref(gpu), request, false)
    }

    /// Where the bytes of `range` are now.
    pub(crate) fn residency_of(&self, range: ByteRange) -> plan::Residency {
        self.prober.probe(self.buffered.as_fd(), range)
    }

    /// Inode and device, which together name the file.
    pub(crate) const fn identity(&self) -> (u64, (u32, u32)) {
        (self.stat.inode, self.stat.device)
    }

    /// Whether there is a descriptor for direct I/O.
    pub(crate) const fn has_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// The descriptor for direct I/O, and the buffered one where there is none.
    pub(crate) fn direct_fd(&self) -> BorrowedFd<'_> {
        self.direct().as_fd()
    }

    /// Alignment of direct I/O in bytes.
    pub(crate) const fn direct_block(&self) -> u64 {
        self.block_bytes()
    }

    pub(super) const fn buffered(&self) -> &Arc<OwnedFd> {
        &self.buffered
    }

    /// The descriptor for direct I/O, and the buffered one where there is none.
    pub(super) fn direct(&self) -> &Arc<OwnedFd> {
        self.direct.as_ref().unwrap_or(&self.buffered)
    }

    /// Alignment of direct I/O in bytes; that of a page where there is none.
    pub(super) const fn block_bytes(&self) -> u64 {
        match self.facts.direct {
            DirectIo::Aligned { offset, .. } => offset as u64,
            DirectIo::No(..) => 4096,
        }
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File").field("path", &self.path).field("facts", &self.facts).finish()
    }
}

/// Refuses a descriptor through which bytes cannot be put at offsets.
fn refuse_unwritable(fd: &OwnedFd, path: &Path) -> Result<()> {
    use rustix::fs::OFlags;

    let flags =
        rustix::fs::fcntl_getfl(fd).map_err(|error| Error::at("examine", path, error.into()))?;
    let fault = if !flags.contains(OFlags::RDWR) {
        "is not open for reading and writing"
    } else if flags.contains(OFlags::APPEND) {
        // pwrite(2), BUGS: Linux appends then, whatever the offset.
        "is open for appending, which puts every write at its end"
    } else if flags.contains(OFlags::DIRECT) {
        "is open for direct I/O only, which cannot write the edges of a request"
    } else {
        return Ok(());
    };
    Err(Error::refused(format!("{} {fault}", path.display()))
        .remedy("open it for reading and writing, without O_APPEND and O_DIRECT"))
}

/// Refuses what must not even be opened: opening a FIFO or a device can have effects.
fn refuse_special(path: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    match std::fs::metadata(path) {
        Ok(meta) if kind_of(meta.mode()) == FileKind::Other => Err(refused_kind(path, meta.mode())),
        Ok(_) => Ok(()),
        Err(error) => Err(Error::at("open", path, error)),
    }
}

fn refused_kind(path: &Path, mode: u32) -> Error {
    let what = match mode & S_IFMT {
        S_IFDIR => "a folder",
        S_IFIFO => "a FIFO",
        S_IFSOCK => "a socket",
        S_IFCHR => "a character device",
        _ => "not a regular file",
    };
    Error::refused(format!("{} is {what}, it has no bytes at offsets", path.display()))
        .remedy("name a regular file")
}

const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFIFO: u32 = 0o010_000;
const S_IFSOCK: u32 = 0o140_000;
const S_IFCHR: u32 = 0o020_000;
const S_IFREG: u32 = 0o100_000;
const S_IFBLK: u32 = 0o060_000;

const fn kind_of(mode: u32) -> FileKind {
    match mode & S_IFMT {
        S_IFREG => FileKind::Regular,
        S_IFBLK => FileKind::Block,
        _ => FileKind::Other,
    }
}

// Numbers of statfs(2), from linux/magic.h.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
const OVERLAY_MAGIC: u64 = 0x794c_7630;
const PROC_MAGIC: u64 = 0x9fa0;
const SYSFS_MAGIC: u64 = 0x6265_6572;

fn is_memory(magic: u64) -> bool {
    matches!(magic, TMPFS_MAGIC | RAMFS_MAGIC | HUGETLBFS_MAGIC)
}

fn fs_name(magic: u64) -> String {
    let name = match magic {
        TMPFS_MAGIC => "tmpfs",
        RAMFS_MAGIC => "ramfs",
        HUGETLBFS_MAGIC => "hugetlbfs",
        OVERLAY_MAGIC => "overlayfs",
        PROC_MAGIC => "procfs",
        SYSFS_MAGIC => "sysfs",
        sys::BDEVFS_MAGIC => "block device",
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0xf2f5_2010 => "f2fs",
        0x2fc1_2fc1 => "zfs",
        0x6969 => "nfs",
        0xff53_4d42 | 0xfe53_4d42 => "cifs",
        0x0bd0_0bd0 => "lustre",
        0x6573_5546 => "fuse",
        0x00c3_6400 => "ceph",
        0x0102_1997 => "9p",
        0x7371_7368 => "squashfs",
        0xe0f5_e1e2 => "erofs",
        0xca45_1a4e => "bcachefs",
        _ => return format!("{magic:#x}"),
    };
    name.to_owned()
}

/// The descriptor for direct I/O, if the file really has it, and what is known either way.
fn direct_descriptor(
    fd: &OwnedFd,
    stat: &FileStat,
    memory_backed: bool,
    write: bool,
) -> (Option<Arc<OwnedFd>>, DirectIo) {
    let name = fs_name(stat.fs_magic);
    if memory_backed {
        // From Linux 6.6 on tmpfs accepts the flag, but there is no drive behind it.
        return (None, DirectIo::No(Code::DirectNotHonoured, name));
    }
    let (memory, offset) = match stat.direct {
        Some(align) if align.memory == 0 || align.offset == 0 => {
            let detail = format!("{name}: statx gives no direct I/O alignment");
            return (None, DirectIo::No(Code::DirectUnsupported, detail));
        }
        Some(align) => (align.memory, align.offset),
        // The kernel does not tell (before 6.1, or the file system is silent): a page suits every
        // logical block size in use.
        None => (4096, 4096),
    };
    let logical = logical_block_bytes(stat.device).unwrap_or(512);
    let offset = offset.max(logical).max(512);
    let usable = offset.is_power_of_two() && memory.is_power_of_two() && offset <= 1 << 20;
    if !usable || memory > 1 << 20 {
        let detail = format!("{name}: alignment {memory}/{offset}");
        return (None, DirectIo::No(Code::DirectUnsupported, detail));
    }
    match sys::reopen_direct(fd, write) {
        Ok(direct) if sys::is_direct(&direct) => {
            (Some(Arc::new(direct)), DirectIo::Aligned { memory, offset })
        }
        Ok(_) => {
            (None, DirectIo::No(Code::DirectNotHonoured, format!("{name}: the flag was dropped")))
        }
        Err(error) => (None, DirectIo::No(Code::DirectUnsupported, format!("{name}: {error}"))),
    }
}

/// Logical block size of the drive behind the file, in bytes.
fn logical_block_bytes((major, minor): (u32, u32)) -> Option<u32> {
    let device = format!("/sys/dev/block/{major}:{minor}");
    // A partition has its queue one folder up.
    ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("{device}/{queue}/logical_block_size");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

/// Whether the drive behind the file is an NVMe namespace of this machine.
fn on_nvme((major, minor): (u32, u32), memory_backed: bool) -> Option<bool> {
    if memory_backed {
        return Some(false);
    }
    let target = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    Some(target.components().any(|part| part.as_os_str().to_string_lossy().starts_with("nvme")))
}

fn device_facts(gpu: &Gpu) -> DeviceFacts {
    let info = gpu.info();
    DeviceFacts {
        simulated: info.simulated,
        reads_file_pages: true,
        // `Buffer::window` gives none into a CUDA device yet.
        has_window: info.profile.is_some_and(|profile| profile != Profile::Plain),
    }
}

/// What is known of this host. What the kernel answers for good is asked once per process; a lack of
/// descriptors or memory passes, and is asked about again.
fn host_facts() -> HostFacts {
    static ANSWER: OnceLock<HostFacts> = OnceLock::new();
    if let Some(known) = ANSWER.get() {
        return known.clone();
    }
    if !crate::config::Config::from_env().io_uring {
        let detail = "BEELINE_IO_URING=0".to_owned();
        return remember(&ANSWER, IoUring::No(Code::IoUringDenied, detail));
    }
    match Uring::new(1) {
        Ok(_) => remember(&ANSWER, IoUring::Yes),
        Err(error) => match error.kind() {
            io::ErrorKind::Unsupported => {
                remember(&ANSWER, IoUring::No(Code::IoUringAbsent, error.to_string()))
            }
            io::ErrorKind::PermissionDenied => {
                remember(&ANSWER, IoUring::No(Code::IoUringDenied, error.to_string()))
            }
            _ => HostFacts { io_uring: IoUring::No(Code::IoUringDenied, error.to_string()) },
        },
    }
}

fn remember(answer: &OnceLock<HostFacts>, io_uring: IoUring) -> HostFacts {
    answer.get_or_init(|| HostFacts { io_uring }).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_bytes_at_offsets_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let fifo = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        let cases = [
            (folder.path(), "a folder"),
            (&socket, "a socket"),
            (&fifo, "a FIFO"),
            (Path::new("/dev/zero"), "a character device"),
            (Path::new("/proc/self/maps"), "made up by the kernel"),
        ];
        for (path, text) in cases {
            let error = File::open(path).unwrap_err();
            assert!(error.is_refused() && error.to_string().contains(text), "{error:?}");
        }
        assert!(File::open(folder.path().join("none")).unwrap_err().is_not_found());
    }

    #[test]
    fn tmpfs_is_never_called_direct() {
        let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
            return println!("SKIP tmpfs");
        };
        let file = File::open(file.path()).unwrap();
        assert!(file.facts().memory_backed);
        assert!(matches!(file.facts().direct, DirectIo::No(Code::DirectNotHonoured, _)));
        assert_eq!(file.prober(), Prober::Memory);
    }

    #[test]
    fn a_change_between_two_looks_is_noticed() {
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&path, [1; 100]).unwrap();
        let file = File::open(path.path()).unwrap();
        file.check_unchanged().unwrap();
        std::fs::write(&path, [1; 99]).unwrap();
        let error = file.check_unchanged().unwrap_err();
        assert!(error.is_corrupt() && error.code() == "file-changed", "{error:?}");
    }
}
