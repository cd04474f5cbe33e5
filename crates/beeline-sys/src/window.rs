//! A writable mapping of an ordinary file, which the kernel alone writes.

use std::io;
use std::os::fd::AsFd;

use crate::mem::HostMem;

/// Part of a file's page cache by address, for writing without the file's lock.
///
/// The CPU of this program never touches it: an access by an instruction ends in `SIGBUS` where the file
/// was cut or its file system is full. [`fill`](Self::fill) has the kernel copy, which answers `EFAULT`.
#[derive(Debug)]
pub struct FileWindow {
    mem: HostMem,
}

impl FileWindow {
    /// Maps `[offset, offset + len)` of `file`, which is open for reading and writing; `offset` is a
    /// multiple of the page size. The range may reach past the end of the file.
    ///
    /// # Errors
    /// What `mmap(2)` says: `EACCES` where the file is not open for both, `ENODEV` where its file system
    /// has no such mappings, `EPERM` for a sealed file, `ENOMEM`.
    pub fn new(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        Ok(Self { mem: HostMem::map(file, offset, len)? })
    }

    /// Has the kernel make `[offset, offset + len)` of the window ready for writing at once (`madvise(2)`,
    /// `MADV_POPULATE_WRITE`), which is quicker than a fault for each page. The pages count as changed; both
    /// ends are multiples of the page size.
    ///
    /// # Errors
    /// `EFAULT` where the file ends before; `EINVAL` before Linux 5.14; an access outside the window is
    /// `InvalidInput`. What was not made ready is so by the copy.
    pub fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        let start = self.mem.at(offset, len)?;
        let advice = rustix::mm::Advice::LinuxPopulateWrite;
        // SAFETY: `at` checked that the range lies inside this value's own mapping, whose contents stay as they
        // are.
        unsafe { rustix::mm::madvise(start.cast(), len as usize, advice) }?;
        Ok(())
    }

    /// Copies `len` bytes of `from` at `from_offset` into the file's pages at `offset` of the window, by
    /// the kernel (`process_vm_readv(2)` of this process). Answers how many were copied, fewer where a page
    /// cannot be had.
    ///
    /// # Errors
    /// `EFAULT` where that is so for the first page (the file is shorter now, the file system is full);
    /// `EPERM` and `ENOSYS` where a sandbox forbids the call; [`OutOfBounds`](crate::mem::OutOfBounds) as
    /// `InvalidInput`.
    pub fn fill(&self, offset: u64, len: u64, from: &HostMem, from_offset: u64) -> io::Result<u64> {
        let into = self.mem.at(offset, len)?;
        let source = from.at(from_offset, len)?;
        let local = libc::iovec { iov_base: into.cast(), iov_len: len as usize };
        let remote = libc::iovec { iov_base: source.cast(), iov_len: len as usize };
        // SAFETY: getpid(2) has no conditions.
        let own = unsafe { libc::getpid() };
        // SAFETY: `at` checked that `len` bytes from both addresses lie inside mappings that outlive the
        // call; no Rust reference covers them, and the kernel checks each page it copies to.
        let n =
            unsafe { libc::process_vm_readv(own, &raw const local, 1, &raw const remote, 1, 0) };
        u64::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_window_writes_the_file_and_outlives_a_cut() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(100_000).unwrap();
        let window = FileWindow::new(&file, 0, 1 << 20).unwrap();
        let source = HostMem::anonymous(1 << 20).unwrap();
        source.fill(0, 1 << 20, 7).unwrap();
        match window.fill(5000, 90_000, &source, 3) {
            Ok(n) => assert_eq!(n, 90_000),
            Err(error) => return println!("SKIP process_vm_readv: {error}"),
        }
        // Ready or not, the bytes stay; what lies past the end cannot be had.
        let ready = window.populate(8192, 8192);
        assert!(ready.is_ok() || ready.unwrap_err().raw_os_error() == Some(libc::EINVAL));
        assert!(window.populate(512 << 10, 8192).is_err());
        assert_eq!(window.populate(0, 2 << 20).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let mut seen = vec![0; 100_000];
        file.read_exact_at(&mut seen, 0).unwrap();
        let inside = |at: usize| (5000..95_000).contains(&at);
        assert!(seen.iter().enumerate().all(|(at, &byte)| byte == if inside(at) { 7 } else { 0 }));
        // Past the last page of the file there is nothing to write to; a part is told as such.
        let cut = |from, len| window.fill(from, len, &source, 0);
        assert_eq!(cut(0, 1 << 20).unwrap(), 102_400);
        assert_eq!(cut(200_000, 10).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        file.set_len(0).unwrap();
        assert_eq!(cut(0, 4096).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        assert_eq!(cut(1 << 20, 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(
            window.fill(0, 2, &source, (1 << 20) - 1).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }

    #[test]
    fn a_file_that_is_open_for_one_of_them_alone_is_refused() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let reader = std::fs::File::open(named.path()).unwrap();
        assert_eq!(
            FileWindow::new(&reader, 0, 4096).unwrap_err().raw_os_error(),
            Some(libc::EACCES)
        );
    }
}
