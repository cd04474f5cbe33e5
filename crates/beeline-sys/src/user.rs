//! Memory of a caller in C: addresses that the caller vouches for and that this program never follows by
//! itself. The kernel copies (and answers `EFAULT` for a wrong one), or a volatile access does. The calls
//! are bare system calls: a sanitizer that guards the C library's would end the program at a wrong
//! address instead of letting the kernel refuse it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use beeline_core::addr::DevicePtr;

use crate::file::RW_MAX;

/// An address that a C caller passed as a buffer: of host memory or of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserPtr {
    address: u64,
    device_only: bool,
}

impl UserPtr {
    /// The address that a caller passed.
    ///
    /// # Safety
    /// If it is host memory, then the kernel may read and write the bytes that an operation names,
    /// counted from here, until that operation has ended; no Rust reference covers them.
    pub const unsafe fn new(address: u64) -> Self {
        Self { address, device_only: false }
    }

    /// A device address, which operations on host memory refuse.
    pub const fn device(ptr: DevicePtr) -> Self {
        Self { address: ptr.as_u64(), device_only: true }
    }

    /// The address as a number.
    pub const fn address(self) -> u64 {
        self.address
    }

    fn host(self, offset: u64) -> io::Result<*mut libc::c_void> {
        let at = self.address.checked_add(offset).filter(|_| !self.device_only);
        let at = at.ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))?;
        Ok(std::ptr::with_exposed_provenance_mut(at as usize))
    }

    /// Reads up to `len` bytes of `fd` from `at` to `offset` behind the address; one system call.
    ///
    /// # Errors
    /// What `pread(2)` says, `EFAULT` where the memory is not the caller's.
    pub fn pread(self, fd: BorrowedFd<'_>, offset: u64, len: u64, at: u64) -> io::Result<u64> {
        let into = self.host(offset)?;
        let at = i64::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
        let len = len.min(RW_MAX) as usize;
        // SAFETY: the caller of `new` vouched for the memory, and the kernel checks the address.
        let n = unsafe { libc::syscall(libc::SYS_pread64, fd.as_raw_fd(), into, len, at) };
        u64::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Writes up to `len` bytes from `offset` behind the address to `fd` at `at`; one system call.
    ///
    /// # Errors
    /// What `pwrite(2)` says, `EFAULT` where the memory is not the caller's.
    pub fn pwrite(self, fd: BorrowedFd<'_>, offset: u64, len: u64, at: u64) -> io::Result<u64> {
        let from = self.host(offset)?;
        let at = i64::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
        let len = len.min(RW_MAX) as usize;
        // SAFETY: the caller of `new` vouched for the memory, and the kernel checks the address.
        let n = unsafe { libc::syscall(libc::SYS_pwrite64, fd.as_raw_fd(), from, len, at) };
        u64::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

/// A variable of a C caller that is read or written later.
#[derive(Clone, Copy, Debug)]
pub struct UserCell<T> {
    place: *mut T,
}

// SAFETY: the place is only used by volatile accesses, at moments that the caller of `new` vouched for.
unsafe impl<T: Send> Send for UserCell<T> {}

impl<T: Copy> UserCell<T> {
    /// The variable at `place`; `None` where that is null.
    ///
    /// # Safety
    /// Unless null, `place` is a valid variable of type `T` until the operation it belongs to has ended,
    /// and whoever else uses it orders that with the operation's stream.
    pub const unsafe fn new(place: *mut T) -> Option<Self> {
        if place.is_null() { None } else { Some(Self { place }) }
    }

    /// Its value now.
    pub fn get(self) -> T {
        // SAFETY: the caller of `new` vouched for the place.
        unsafe { self.place.read_volatile() }
    }

    /// Changes it.
    pub fn set(self, value: T) {
        // SAFETY: the caller of `new` vouched for the place.
        unsafe { self.place.write_volatile(value) };
    }
}

/// Takes an additional, close-on-exec descriptor of the file that is open as `fd`.
///
/// # Errors
/// `EBADF` where nothing is open under the number; `EMFILE`.
pub fn duplicate(fd: i32) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: fcntl(2) with a number that may be anything; the kernel checks it.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if new < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor for this call alone.
    Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(new) })
}

/// Sets `errno` of the calling thread.
pub fn set_errno(value: i32) {
    // SAFETY: glibc answers the address of the thread's own variable.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { *place = value };
}

/// `errno` of the calling thread.
pub fn errno() -> i32 {
    // SAFETY: glibc answers the address of the thread's own variable.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { *place }
}

static FORKS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// From now on [`forks`] tells children of this process from it.
pub fn watch_forks() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    extern "C" fn child() {
        FORKS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    ONCE.call_once(|| {
        // SAFETY: the handler does nothing but count, and the library is never unloaded.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
}

/// How often this process was forked since a process called [`watch_forks`]: another number than a parent's.
pub fn forks() -> u32 {
    FORKS.load(std::sync::atomic::Ordering::Relaxed)
}

/// Whether this process is a child of one that had called [`watch_forks`].
pub fn is_forked() -> bool {
    forks() > 0
}
