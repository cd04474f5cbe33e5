//! Anonymous memory files.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// An anonymous memory file of `len` bytes that can be mapped more than once and passed on.
///
/// Pages exist from the first write on. The size is sealed, so mapping it can never fault.
///
/// # Errors
/// What `memfd_create(2)`, `ftruncate(2)` and `fcntl(2)` say.
pub fn memfd(name: &str, len: u64) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags};

    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Gives the pages `[offset, offset + len)` of a memfd back to the system; they read as zero again.
///
/// # Errors
/// What `fallocate(2)` says.
pub fn punch_hole(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    use rustix::fs::FallocateFlags;

    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, flags, offset, len)?;
    Ok(())
}

/// Bytes of memory behind `fd` (a memfd) right now.
///
/// # Errors
/// What `fstat(2)` says.
pub fn memfd_resident_bytes(fd: impl AsFd) -> io::Result<u64> {
    let stat = rustix::fs::fstat(fd)?;
    Ok(u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
}

/// That no access to the first `len` bytes of a memory file can ever end in `SIGBUS`.
pub(super) fn check_sealed(fd: &impl AsFd, len: usize) -> io::Result<()> {
    use rustix::fs::SealFlags;

    let bad = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| bad("this is no memory file"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(bad("the memory file is not sealed against being made shorter"));
    }
    let size = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
    if size < len as u64 { Err(bad("the memory file is too short")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::HostMem;

    #[test]
    fn punched_pages_read_zero_and_cost_nothing() {
        let fd = memfd("test", 1 << 20).unwrap();
        let mem = HostMem::shared(&fd, 0, 1 << 20).unwrap();
        mem.fill(0, 1 << 20, 1).unwrap();
        assert_eq!(memfd_resident_bytes(&fd).unwrap(), 1 << 20);
        punch_hole(&fd, 0, 1 << 20).unwrap();
        assert_eq!(memfd_resident_bytes(&fd).unwrap(), 0);
        assert_eq!(mem.load_u32(512).unwrap(), 0);
    }
}
