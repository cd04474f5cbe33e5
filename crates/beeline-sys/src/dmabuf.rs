//! dma-bufs: descriptors of memory that drivers share.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::mem::{Extent, HostMem};

/// `UDMABUF_CREATE_LIST` of linux/udmabuf.h: `_IOW('u', 0x43, struct udmabuf_create_list)`.
const CREATE_LIST: libc::c_ulong = 0x4008_7543;
const FLAGS_CLOEXEC: u32 = 1;
/// Items the kernel takes by default (module parameter `list_limit`).
const ITEMS_MAX: usize = 1024;

/// The device that makes dma-bufs of memory files.
pub const UDMABUF: &str = "/dev/udmabuf";

/// `struct udmabuf_create_item`
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Item {
    memfd: u32,
    pad: u32,
    offset: u64,
    size: u64,
}

/// A dma-buf of pieces of a memory file, which must be sealed against being made shorter.
///
/// # Errors
/// `NotFound` without [`UDMABUF`], `PermissionDenied`; `EINVAL` for pieces that are not whole pages or
/// more than the kernel takes (64 MiB by default), `EBADFD` for a file of another kind.
pub fn of_memory_file(memfd: impl AsFd, extents: &[Extent]) -> io::Result<OwnedFd> {
    let device = std::fs::File::options().read(true).write(true).open(Path::new(UDMABUF))?;
    if extents.is_empty() || extents.len() > ITEMS_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let number =
        u32::try_from(memfd.as_fd().as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // The header (flags, count) has the size of one word; an item has that of three.
    let mut list = vec![u64::from(FLAGS_CLOEXEC) | ((extents.len() as u64) << 32)];
    for extent in extents {
        let item = Item { memfd: number, pad: 0, offset: extent.offset, size: extent.len };
        list.extend([u64::from(item.memfd) | (u64::from(item.pad) << 32), item.offset, item.size]);
    }
    if cfg!(target_endian = "big") {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // SAFETY: the kernel reads the header and as many items as it names, which is what `list` holds, in
    // the layout of linux/udmabuf.h on a little-endian machine (checked above).
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), CREATE_LIST as _, list.as_ptr()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made the descriptor for the caller, who owns it from here on.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Maps `len` bytes of a dma-buf from `offset` on, where whoever exported it allows that: to be read and written
/// by the CPU. The memory behind it must stay as long as the mapping.
///
/// # Errors
/// What `mmap(2)` says; the CUDA driver answers 524 (`ENOTSUPP`, which has no name in user space).
pub fn map(fd: impl AsFd, offset: u64, len: usize) -> io::Result<HostMem> {
    HostMem::map(fd, offset, len)
}

/// Length of a dma-buf (or a memory file) in bytes, as the kernel knows it.
///
/// # Errors
/// What `lseek(2)` says.
pub fn len(fd: impl AsFd) -> io::Result<u64> {
    let end = rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0))?;
    rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(0))?;
    Ok(end)
}
