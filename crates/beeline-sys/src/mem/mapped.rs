//! Mappings to read what others write: a memory file of another process, an ordinary file.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use beeline_core::addr::VirtAddr;
use rustix::mm::{MapFlags, ProtFlags};

use super::memfd::check_sealed;
use super::{HostMem, OutOfBounds};

/// Memory of another process, to be read.
///
/// The other process writes it at any time; as with [`HostMem`], it is never lent out as a slice.
#[derive(Debug)]
pub struct PeerMem {
    mem: HostMem,
}

impl PeerMem {
    /// Maps `len` bytes of a memory file that another process passed on.
    ///
    /// # Errors
    /// `InvalidData` where the file could be made shorter (an access would then end in `SIGBUS`) or is
    /// shorter than `len`; what `mmap(2)` says.
    pub fn new(fd: impl AsFd, len: usize) -> io::Result<Self> {
        check_sealed(&fd, len)?;
        Ok(Self { mem: FileMap::new(fd, 0, len)?.mem })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.mem.len()
    }

    /// Whether there is no byte. Always false: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.mem.is_empty()
    }

    /// Copies `into.len()` bytes out, from `offset` on.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was copied then.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.mem.read(offset, into)
    }

    /// Copies `len` bytes from `offset` on into `target` at `target_offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`] of whichever side it is; nothing was copied then.
    pub fn copy_to(
        &self,
        offset: u64,
        target: &HostMem,
        target_offset: u64,
        len: u64,
    ) -> Result<(), OutOfBounds> {
        target.copy_from(target_offset, &self.mem, offset, len)
    }
}

/// A read-only mapping of an ordinary file: the page cache by address.
///
/// The CPU never reads it here, because a file that shrinks answers with `SIGBUS`; its address is
/// for devices (registered, they hold the pages) and for system calls, which answer `EFAULT`.
#[derive(Debug)]
pub struct FileMap {
    mem: HostMem,
}

impl FileMap {
    /// Maps the bytes `[offset, offset + len)` of `file`; `offset` is a multiple of the page size.
    ///
    /// # Errors
    /// What `mmap(2)` says: `ENODEV` where the file system has no mappings, `EACCES`, `ENOMEM`.
    pub fn new(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let ptr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::SHARED,
                file.as_fd(),
                offset,
            )
        }?;
        Ok(Self { mem: HostMem::own(ptr, len)? })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.mem.len()
    }

    /// Whether the mapping has no byte. Always false: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.mem.is_empty()
    }

    /// Where the mapping starts in this process.
    pub fn addr(&self) -> VirtAddr {
        self.mem.addr()
    }

    /// Writes mapped bytes to `fd` at `at`: one copy, made by the kernel, which survives a file that
    /// shrank. Returns the bytes written, fewer where the mapping ends early.
    ///
    /// # Errors
    /// `EFAULT` where the first page is gone (the file was truncated), else what `pwrite(2)` says;
    /// [`OutOfBounds`] as `InvalidInput`.
    pub fn write_to(&self, offset: u64, len: u64, fd: BorrowedFd<'_>, at: u64) -> io::Result<u64> {
        crate::file::pwrite(fd, &self.mem, offset, len, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::memfd;

    #[test]
    fn shareable_memory_is_read_by_others_and_written_by_nobody_else() {
        let mem = HostMem::shareable(8192).unwrap();
        let peer = PeerMem::new(mem.file().unwrap(), 8192).unwrap();
        mem.write(4090, &[1, 2, 3]).unwrap();
        let mut bytes = [0; 3];
        peer.read(4090, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3]);
        let target = HostMem::anonymous(4096).unwrap();
        peer.copy_to(4091, &target, 7, 2).unwrap();
        let mut appended = vec![9];
        target.append_to(7, 2, &mut appended).unwrap();
        assert_eq!(appended, [9, 2, 3]);
        assert!(target.append_to(4095, 2, &mut appended).is_err());
        assert!(peer.copy_to(8191, &target, 0, 2).is_err());
        assert!(peer.copy_to(0, &target, 4095, 2).is_err());
        let error = HostMem::of_sealed(mem.file().unwrap(), 8192).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM), "sealed against new writers");
        assert!(PeerMem::new(mem.file().unwrap(), 8193).is_err(), "too short");
        assert!(PeerMem::new(tempfile::tempfile().unwrap(), 1).is_err(), "no memory file");
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let unsealed = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&unsealed, 8192).unwrap();
        assert!(PeerMem::new(unsealed, 8192).is_err(), "it could be made shorter");
        assert!(HostMem::anonymous(4096).unwrap().file().is_none());
    }

    #[test]
    fn a_truncated_file_map_is_an_error_not_a_signal() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 16).unwrap();
        let map = FileMap::new(&file, 0, 1 << 16).unwrap();
        file.set_len(0).unwrap();
        let sink = memfd("sink", 1 << 16).unwrap();
        let error = map.write_to(0, 1 << 16, sink.as_fd(), 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
