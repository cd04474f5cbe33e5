//! System calls on files whose memory is a [`HostMem`], and the ones that tell where bytes are.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

use crate::mem::HostMem;

/// Most bytes that one read or write system call moves (read(2), NOTES).
pub const RW_MAX: u64 = 0x7fff_f000;

/// The kernel's own file system of block devices (linux/magic.h), where their page cache lies.
pub const BDEVFS_MAGIC: u64 = 0x6264_6576;

/// What direct I/O needs on one file, as statx(2) tells since Linux 6.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlign {
    /// Alignment of the memory address, in bytes; 0 where the file has no direct I/O.
    pub memory: u32,
    /// Alignment of file offset and length, in bytes; 0 where the file has no direct I/O.
    pub offset: u32,
}

/// What `stat(2)` and `statfs(2)` tell of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// File type and mode bits.
    pub mode: u32,
    /// Size in bytes; the capacity for a block device.
    pub size: u64,
    /// Inode number and device, which together name the file.
    pub inode: u64,
    /// Major and minor number of the device that holds it; its own for a block device.
    pub device: (u32, u32),
    /// Last change of the contents: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// File system type as statfs(2) numbers it; [`BDEVFS_MAGIC`] for a block device.
    pub fs_magic: u64,
    /// Preferred block size in bytes.
    pub block_size: u32,
    /// Direct I/O alignment, `None` where the kernel or the file system does not say.
    pub direct: Option<DirectAlign>,
}

/// Opens `path` without ever waiting for a writer (a FIFO) and without following the process umask.
///
/// # Errors
/// What `open(2)` says; `EINVAL` for `direct` where the file system refuses the flag.
pub fn open(path: &Path, write: bool, direct: bool) -> io::Result<OwnedFd> {
    let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    flags |= if write { OFlags::RDWR } else { OFlags::RDONLY };
    if direct {
        flags |= OFlags::DIRECT;
    }
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Opens the file behind `fd` once more, with `O_DIRECT`: its own description, its own flags.
///
/// # Errors
/// What `open(2)` on /proc/self/fd says: `EINVAL` where the file system refuses the flag, `ENOENT`
/// where /proc is not mounted, `EACCES` where the mode of the file no longer allows it.
pub fn reopen_direct(fd: impl AsFd, write: bool) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    open(Path::new(&path), write, true)
}

/// Whether the open description really carries `O_DIRECT` (fcntl(2), not what was asked for).
pub fn is_direct(fd: impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
}

/// Everything [`FileStat`] holds, in two system calls.
///
/// # Errors
/// What `statx(2)` and `fstatfs(2)` say.
pub fn stat(fd: impl AsFd) -> io::Result<FileStat> {
    let want = StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN;
    let stx = rustix::fs::statx(fd.as_fd(), c"", AtFlags::EMPTY_PATH, want)?;
    let fs = rustix::fs::fstatfs(fd.as_fd())?;
    let told = StatxFlags::from_bits_retain(stx.stx_mask).contains(StatxFlags::DIOALIGN);
    let mode = u32::from(stx.stx_mode);
    let mut size = stx.stx_size;
    let mut device = (stx.stx_dev_major, stx.stx_dev_minor);
    let mut fs_magic = fs.f_type as u64;
    if mode & libc::S_IFMT == libc::S_IFBLK {
        // The node lies in devtmpfs, but its bytes do not.
        size = rustix::fs::seek(fd.as_fd(), rustix::fs::SeekFrom::End(0))?;
        device = (stx.stx_rdev_major, stx.stx_rdev_minor);
        fs_magic = BDEVFS_MAGIC;
    }
    Ok(FileStat {
        mode,
        size,
        inode: stx.stx_ino,
        device,
        mtime: (stx.stx_mtime.tv_sec, stx.stx_mtime.tv_nsec),
        fs_magic,
        block_size: stx.stx_blksize,
        direct: told.then_some(DirectAlign {
            memory: stx.stx_dio_mem_align,
            offset: stx.stx_dio_offset_align,
        }),
    })
}

/// Reads up to `len` bytes of `fd` from `at` into `mem` at `offset`; one system call, so it may read
/// fewer, and 0 means end of file.
///
/// # Errors
/// What `pread(2)` says, `EINTR` included; an access outside `mem` is `InvalidInput`.
pub fn pread(fd: BorrowedFd<'_>, mem: &HostMem, offset: u64, len: u64, at: u64) -> io::Result<u64> {
    let len = len.min(RW_MAX);
    let into = mem.at(offset, len)?;
    let at = i64::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `mem.at` checked that `len` bytes from `into` lie inside `mem`, which outlives the
    // call; no Rust reference covers them.
    let n = unsafe { libc::pread64(fd.as_raw_fd(), into.cast(), len as usize, at) };
    u64::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Writes up to `len` bytes of `mem` from `offset` to `fd` at `at`; one system call, so it may write
/// fewer.
///
/// # Errors
/// What `pwrite(2)` says, `EINTR` included; an access outside `mem` is `InvalidInput`.
pub fn pwrite(
    fd: BorrowedFd<'_>,
    mem: &HostMem,
    offset: u64,
    len: u64,
    at: u64,
) -> io::Result<u64> {
    let len = len.min(RW_MAX);
    let from = mem.at(offset, len)?;
    let at = i64::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `mem.at` checked that `len` bytes from `from` lie inside `mem`, which outlives the
    // call; the kernel only reads them.
    let n = unsafe { libc::pwrite64(fd.as_raw_fd(), from.cast(), len as usize, at) };
    u64::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Whether the byte at `at` could be read without waiting for a drive (preadv2 with RWF_NOWAIT).
///
/// Works for every user on a readable file. A negative answer makes the kernel fetch that one page
/// in the background, so ask for single bytes, sparingly.
///
/// # Errors
/// `EOPNOTSUPP` where the file system has no such reads (tmpfs), `ENOSYS` before Linux 4.14.
pub fn is_readable_now(fd: BorrowedFd<'_>, at: u64) -> io::Result<bool> {
    let mut byte = 0_u8;
    let at = i64::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    let iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: `iov` names one byte of this frame, which lives until the call returns.
    let n = unsafe { libc::preadv2(fd.as_raw_fd(), &raw const iov, 1, at, libc::RWF_NOWAIT) };
    if n >= 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EAGAIN) { Ok(false) } else { Err(error) }
}

/// Reads up to `len` bytes of `fd` from `at` into `mem` from `offset` on, as far as they are in the page cache; never waits
/// for a drive. One system call.
///
/// # Errors
/// As [`is_readable_now`]; `EAGAIN` where the first of them is not in the page cache.
pub fn pread_now(
    fd: BorrowedFd<'_>,
    mem: &HostMem,
    offset: u64,
    len: u64,
    at: u64,
) -> io::Result<u64> {
    let len = len.min(RW_MAX);
    let into = mem.at(offset, len)?;
    let at = i64::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    let iov = libc::iovec { iov_base: into.cast(), iov_len: len as usize };
    // SAFETY: `iov` names bytes inside `mem`, which `at` checked and which lives until the call returns.
    let n = unsafe { libc::preadv2(fd.as_raw_fd(), &raw const iov, 1, at, libc::RWF_NOWAIT) };
    u64::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Bytes of `[at, at + len)` that the page cache holds (cachestat, Linux 6.5), whole pages counted.
///
/// # Errors
/// `EPERM` where the caller neither owns nor may write the file, `ENOSYS` before Linux 6.5,
/// `EOPNOTSUPP` for hugetlbfs.
pub fn cached_bytes(fd: BorrowedFd<'_>, at: u64, len: u64) -> io::Result<u64> {
    /// `struct cachestat_range` of linux/mman.h.
    #[repr(C)]
    struct Range {
        off: u64,
        len: u64,
    }
    /// `struct cachestat` of linux/mman.h: counts of pages.
    #[repr(C)]
    #[derive(Default)]
    struct Stat {
        cache: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    /// The number is the same on every architecture: it was added after the unification.
    const SYS_CACHESTAT: libc::c_long = 451;

    let range = Range { off: at, len };
    let mut stat = Stat::default();
    // SAFETY: both structures have the kernel's layout and live until the call returns; the kernel
    // reads the first and writes the second.
    let code = unsafe {
        libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw const range, &raw mut stat, 0_u32)
    };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(stat.cache.saturating_mul(crate::mem::page_size() as u64))
}

/// Bytes of `[at, at + len)` that are in memory, whole pages counted, asked through a mapping: on a
/// stacked file system (overlayfs) a mapping leads to the file below, whose page cache counts.
///
/// Call it only for a user whom [`cached_bytes`] answers: to others mincore(2) calls every page
/// resident (since Linux 5.0).
///
/// # Errors
/// What `mmap(2)` says (`ENODEV` where the file cannot be mapped) and what `mincore(2)` says.
pub fn mapped_bytes(fd: BorrowedFd<'_>, at: u64, len: u64) -> io::Result<u64> {
    let page = crate::mem::page_size();
    let start = at - at % page as u64;
    let span = at.checked_add(len).and_then(|end| usize::try_from(end - start).ok());
    let span = span.ok_or(io::ErrorKind::InvalidInput)?;
    if span == 0 {
        return Ok(0);
    }
    let offset = i64::try_from(start).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut pages = vec![0_u8; span.div_ceil(page)];
    let flags = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: a new mapping at a place of the kernel's choice touches no memory of this process.
    let map = unsafe {
        libc::mmap64(std::ptr::null_mut(), span, flags.0, flags.1, fd.as_raw_fd(), offset)
    };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `map` was just mapped with `span` bytes; `pages` has one byte for each of its pages.
    let code = unsafe { libc::mincore(map, span, pages.as_mut_ptr()) };
    let error = (code != 0).then(io::Error::last_os_error);
    // SAFETY: the mapping is ours alone, and no pointer into it was kept.
    let _ = unsafe { libc::munmap(map, span) };
    match error {
        Some(error) => Err(error),
        None => Ok(pages.iter().filter(|page| **page & 1 != 0).count() as u64 * page as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn reads_and_writes_stay_inside_their_memory() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[5; 1000]).unwrap();
        let mem = HostMem::anonymous(4096).unwrap();
        assert_eq!(pread(file.as_fd(), &mem, 3596, 500, 0).unwrap(), 500);
        assert!(pread(file.as_fd(), &mem, 3597, 500, 0).is_err());
        assert_eq!(pread(file.as_fd(), &mem, 0, 4096, 600).unwrap(), 400, "short at end of file");
        assert_eq!(pread(file.as_fd(), &mem, 0, 4096, 1000).unwrap(), 0, "0 at end of file");
        assert_eq!(pwrite(file.as_fd(), &mem, 3596, 500, 1000).unwrap(), 500);
        assert_eq!(stat(&file).unwrap().size, 1500);
    }

    #[test]
    fn a_just_written_file_is_resident() {
        let mut file = tempfile::tempfile_in(".").unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        match cached_bytes(file.as_fd(), 0, 1 << 20) {
            Ok(bytes) => assert_eq!(bytes, 1 << 20),
            Err(error) => println!("SKIP cachestat ({error})"),
        }
        assert_eq!(mapped_bytes(file.as_fd(), 0, 1 << 20).unwrap(), 1 << 20);
        assert_eq!(mapped_bytes(file.as_fd(), 5000, 10).unwrap(), crate::mem::page_size() as u64);
        assert!(mapped_bytes(file.as_fd(), u64::MAX, 2).is_err());
        match is_readable_now(file.as_fd(), 4096) {
            Ok(now) => {
                assert!(now);
                let mem = HostMem::anonymous(4096).unwrap();
                assert_eq!(pread_now(file.as_fd(), &mem, 5, 1000, 4096).unwrap(), 1000);
                assert!(pread_now(file.as_fd(), &mem, 4000, 97, 0).is_err());
            }
            Err(error) => println!("SKIP rwf-nowait ({error})"),
        }
    }
}
