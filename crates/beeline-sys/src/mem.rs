//! Memory outside Rust's aliasing rules: shared with the kernel, a device or another process.

mod mapped;
mod memfd;

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use beeline_core::addr::VirtAddr;
use rustix::mm::{Advice, MapFlags, ProtFlags};

pub use mapped::{FileMap, PeerMem};
use memfd::check_sealed;
pub use memfd::{memfd, memfd_resident_bytes, punch_hole};

/// An access that does not lie inside its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBounds {
    /// First byte of the access.
    pub offset: u64,
    /// Length of the access in bytes.
    pub len: u64,
    /// Size of the memory in bytes.
    pub size: u64,
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes at offset {} do not lie inside {} bytes of memory",
            self.len, self.offset, self.size
        )
    }
}

impl std::error::Error for OutOfBounds {}

impl From<OutOfBounds> for io::Error {
    fn from(error: OutOfBounds) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}

/// A piece of one file or memfd, for [`HostMem::from_extents`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the file, a multiple of the page size.
    pub offset: u64,
    /// Length in bytes, a multiple of the page size.
    pub len: u64,
}

/// Readable and writable memory: a mapping owned by this value, or borrowed from somebody who promised
/// to keep it ([`HostMem::borrowed`]).
///
/// Others (the kernel, a device, a thread that copies) may write it at any time, so it is never
/// lent out as a slice. Two accesses that race give unspecified bytes, as they would on a device;
/// ordering them is the caller's task. Every access is bounds-checked.
pub struct HostMem {
    ptr: NonNull<u8>,
    len: usize,
    /// Whether the mapping ends with this value.
    owned: bool,
    /// The memory file behind it, where others may be given it to read.
    file: Option<OwnedFd>,
}

// SAFETY: the memory behind `ptr` is mapped while the value lives (owned, or promised by whoever lent
// it), and nothing in it belongs to one thread.
unsafe impl Send for HostMem {}
// SAFETY: all access goes through raw copies and atomics of plain bytes, for which every bit
// pattern is valid; no reference to the contents is ever handed out. Two copies that race are, by the
// letter of the language, a data race; as with memory that a device writes, the bytes are then
// unspecified, and nothing but bytes is ever read back.
unsafe impl Sync for HostMem {}

impl HostMem {
    /// Zeroed private memory of `len` bytes, in huge pages where the kernel offers them.
    ///
    /// # Errors
    /// `ENOMEM` where the address space or the commit limit is exhausted, `EINVAL` for `len` 0.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let ptr = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let mem = Self::own(ptr, len)?;
        // Fewer page-table entries to pin per request. Refusal (no THP built in) costs only speed.
        let _ = mem.advise(Advice::LinuxHugepage);
        Ok(mem)
    }

    /// Zeroed memory of `len` bytes that another process may be given to read: its file is
    /// [`file`](Self::file), mapped there by [`PeerMem`].
    ///
    /// The file is sealed: nobody can make it shorter, and nobody but this mapping can write it.
    ///
    /// # Errors
    /// What `memfd_create(2)`, `ftruncate(2)`, `mmap(2)` and `fcntl(2)` say (`EINVAL` before Linux 5.1).
    pub fn shareable(len: usize) -> io::Result<Self> {
        use rustix::fs::{MemfdFlags, SealFlags};

        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("beeline-memory", flags)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        let mut mem = Self::shared(&file, 0, len)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        mem.file = Some(file);
        Ok(mem)
    }

    /// The file of [`shareable`](Self::shareable) memory, to be passed to another process.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// All of a memory file that somebody else made: `len` bytes, readable and writable.
    ///
    /// # Errors
    /// `InvalidData` where the file could be made shorter (an access would then end in `SIGBUS`) or is
    /// shorter than `len`; what `mmap(2)` says.
    pub fn of_sealed(fd: impl AsFd, len: usize) -> io::Result<Self> {
        check_sealed(&fd, len)?;
        Self::shared(fd, 0, len)
    }

    /// The bytes `[offset, offset + len)` of `fd`, shared with everybody who maps them.
    ///
    /// `fd` must refer to memory that never shrinks (a sealed or owned memfd): a mapped file that is
    /// truncated answers an access with `SIGBUS`. For ordinary files use [`FileMap`].
    ///
    /// # Errors
    /// What `mmap(2)` says.
    pub fn shared(fd: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        Self::from_extents(fd, &[Extent { offset, len: len as u64 }])
    }

    /// Pieces of `fd`, one after the other at consecutive addresses: a page table by hand.
    ///
    /// # Errors
    /// What `mmap(2)` says; `EINVAL` where a length is zero, not a multiple of the page size (except
    /// the last) or the sum overflows.
    pub fn from_extents(fd: impl AsFd, extents: &[Extent]) -> io::Result<Self> {
        let total = extents.iter().try_fold(0_u64, |sum, extent| sum.checked_add(extent.len));
        let len = total
            .and_then(|sum| usize::try_from(sum).ok())
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: a new reservation at an address of the kernel's choice aliases nothing.
        let ptr = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let mem = Self::own(ptr, len)?;
        mem.remap(fd, extents)?;
        Ok(mem)
    }

    /// Puts other pages of `fd` behind the same addresses: how simulated device memory moves.
    ///
    /// Accesses that race with the call see the old or the new pages. `extents` must cover exactly
    /// the length of the memory.
    ///
    /// # Errors
    /// `EINVAL` where the extents do not cover the memory or are not page-aligned, and for borrowed
    /// memory; what `mmap(2)` says. After an error some pieces may already have moved.
    pub fn remap(&self, fd: impl AsFd, extents: &[Extent]) -> io::Result<()> {
        if !self.owned {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let page = page_size() as u64;
        let mut at = 0_usize;
        for (index, extent) in extents.iter().enumerate() {
            let last = index + 1 == extents.len();
            let len = usize::try_from(extent.len).map_err(|_| io::ErrorKind::InvalidInput)?;
            if len == 0 || (!last && !extent.len.is_multiple_of(page)) || len > self.len - at {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            // SAFETY: `at <= self.len`, so the sum stays inside this value's own mapping.
            let target = unsafe { self.ptr.as_ptr().add(at) };
            // SAFETY: MAP_FIXED replaces `[at, at + len)`, checked above to lie inside the mapping
            // that this value owns; no reference into it exists.
            unsafe {
                rustix::mm::mmap(
                    target.cast::<c_void>(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::FIXED,
                    fd.as_fd(),
                    extent.offset,
                )
            }?;
            at += len;
        }
        if at == self.len { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// Memory of somebody else's, which is never unmapped here: a buffer that a caller passed in.
    ///
    /// # Errors
    /// `InvalidInput` for a null address, 0 bytes, or a range that leaves the address space.
    ///
    /// # Safety
    /// `[addr, addr + len)` is readable and writable, stays so while the value (or anything made of
    /// it) lives, and no Rust reference covers it meanwhile.
    pub unsafe fn borrowed(addr: VirtAddr, len: usize) -> io::Result<Self> {
        let end = addr.checked_add(len as u64);
        if len == 0 || end.is_none() || isize::try_from(len).is_err() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let start = std::ptr::with_exposed_provenance_mut(addr.as_u64() as usize);
        let ptr = NonNull::new(start).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { ptr, len, owned: false, file: None })
    }

    /// `len` bytes of what `fd` stands for, from `offset` on, shared, to be read and written. Unlike
    /// [`from_extents`](Self::from_extents) not over a reservation: where the mapping is refused, nothing is left
    /// of it.
    pub(crate) fn map(fd: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let ptr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd.as_fd(),
                offset,
            )
        }?;
        Self::own(ptr, len)
    }

    fn own(ptr: *mut c_void, len: usize) -> io::Result<Self> {
        let ptr = NonNull::new(ptr.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { ptr, len, owned: true, file: None })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether the memory has no byte. Always false: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the memory starts in this process.
    pub fn addr(&self) -> VirtAddr {
        VirtAddr::new(self.ptr.as_ptr() as u64)
    }

    /// Tells the kernel how the memory will be used. Only for whole mappings of our own: the kernel
    /// rounds to pages, and the neighbours of borrowed memory are somebody else's.
    fn advise(&self, advice: Advice) -> io::Result<()> {
        self.check_owned()?;
        // SAFETY: the range is exactly the mapping that this value owns (checked above), and the two
        // advices used here (huge pages, populate) change no byte of it.
        unsafe { rustix::mm::madvise(self.ptr.as_ptr().cast(), self.len, advice) }?;
        Ok(())
    }

    fn check_owned(&self) -> io::Result<()> {
        if self.owned { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// Asks that pages not yet present come from NUMA node `node`, where it has room.
    ///
    /// # Errors
    /// What `mbind(2)` says: `ENOSYS` without NUMA support, `EPERM` in some containers, `EINVAL` for
    /// a node that is not there. The memory is as usable as before then.
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        const MPOL_PREFERRED: libc::c_int = 1;
        const NODES_MAX: u32 = 1024;

        self.check_owned()?;
        if node >= NODES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bits = usize::BITS;
        let mut mask = [0_usize; (NODES_MAX / usize::BITS) as usize];
        if let Some(word) = mask.get_mut((node / bits) as usize) {
            *word = 1 << (node % bits);
        }
        // SAFETY: the range is exactly the mapping that this value owns; the kernel reads `mask`,
        // which holds the number of bits passed (one more than it counts) and lives until the return.
        let code = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.ptr.as_ptr(),
                self.len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                u64::from(NODES_MAX),
                0_u32,
            )
        };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Makes every page present now, so that no later access takes a page fault.
    ///
    /// # Errors
    /// `ENOMEM` where memory runs out, `EINVAL` before Linux 5.14.
    pub fn populate(&self) -> io::Result<()> {
        self.advise(Advice::LinuxPopulateWrite)
    }

    /// Copies `into.len()` bytes out, starting at `offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was copied then.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.at(offset, into.len() as u64)?;
        // SAFETY: `at` checked that the source lies inside this mapping; `into` is exclusive memory
        // of Rust's, which never overlaps a mapping that is not lent out.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Appends `len` bytes from `offset` on to `into`.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was appended then.
    pub fn append_to(
        &self,
        offset: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), OutOfBounds> {
        let from = self.at(offset, len as u64)?;
        into.reserve(len);
        let old = into.len();
        let room = into.spare_capacity_mut().as_mut_ptr().cast();
        // SAFETY: `at` checked the source, `reserve` made room for `len` bytes behind what `into`
        // holds, and memory of Rust's never overlaps a mapping that is not lent out.
        unsafe { std::ptr::copy_nonoverlapping(from, room, len) };
        // SAFETY: the `len` bytes behind `old` were just written, and are within the capacity.
        unsafe { into.set_len(old + len) };
        Ok(())
    }

    /// Copies all of `from` in, starting at `offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was copied then.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), OutOfBounds> {
        let into = self.at(offset, from.len() as u64)?;
        // SAFETY: `at` checked that the target lies inside this mapping, which no reference covers.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
        Ok(())
    }

    /// Sets `len` bytes from `offset` on to `value`.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was written then.
    pub fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), OutOfBounds> {
        let into = self.at(offset, len)?;
        // SAFETY: `at` checked that the range lies inside this mapping, so `len` fits `usize`.
        unsafe { std::ptr::write_bytes(into, value, len as usize) };
        Ok(())
    }

    /// Copies `len` bytes from `src` at `src_offset` to `self` at `offset`; overlap is allowed.
    ///
    /// # Errors
    /// [`OutOfBounds`] of whichever side it is; nothing was copied then.
    pub fn copy_from(
        &self,
        offset: u64,
        src: &Self,
        src_offset: u64,
        len: u64,
    ) -> Result<(), OutOfBounds> {
        let into = self.at(offset, len)?;
        let from = src.at(src_offset, len)?;
        // SAFETY: both ranges were checked by `at`; `copy` allows them to overlap.
        unsafe { std::ptr::copy(from, into, len as usize) };
        Ok(())
    }

    /// Reads an aligned 32-bit word with acquire ordering.
    ///
    /// # Errors
    /// [`OutOfBounds`], also where `offset` is not a multiple of 4.
    pub fn load_u32(&self, offset: u64) -> Result<u32, OutOfBounds> {
        let at = self.aligned(offset, 4)?;
        // SAFETY: `aligned` checked bounds and alignment; the word is only used atomically here.
        Ok(unsafe { AtomicU32::from_ptr(at.cast()) }.load(Ordering::Acquire))
    }

    /// Writes an aligned 32-bit word with release ordering.
    ///
    /// # Errors
    /// [`OutOfBounds`], also where `offset` is not a multiple of 4.
    pub fn store_u32(&self, offset: u64, value: u32) -> Result<(), OutOfBounds> {
        let at = self.aligned(offset, 4)?;
        // SAFETY: `aligned` checked bounds and alignment; the word is only used atomically here.
        unsafe { AtomicU32::from_ptr(at.cast()) }.store(value, Ordering::Release);
        Ok(())
    }

    /// Reads an aligned 64-bit word with acquire ordering.
    ///
    /// # Errors
    /// [`OutOfBounds`], also where `offset` is not a multiple of 8.
    pub fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        Ok(self.atomic_u64(offset)?.load(Ordering::Acquire))
    }

    /// Writes an aligned 64-bit word with release ordering.
    ///
    /// # Errors
    /// [`OutOfBounds`], also where `offset` is not a multiple of 8.
    pub fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        self.atomic_u64(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// The aligned 64-bit word at `offset`, for rings and remote atomics.
    ///
    /// # Errors
    /// [`OutOfBounds`], also where `offset` is not a multiple of 8.
    pub fn atomic_u64(&self, offset: u64) -> Result<&AtomicU64, OutOfBounds> {
        let at = self.aligned(offset, 8)?;
        // SAFETY: `aligned` checked bounds and alignment, the mapping lives as long as `self`, and
        // an atomic may be shared with whoever else writes the word.
        Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    /// Asks for the cache line of a byte, which is about to be read; nothing outside is asked for. Only a matter
    /// of speed.
    pub fn prefetch(&self, offset: u64) {
        #[cfg(target_arch = "x86_64")]
        if let Ok(at) = self.at(offset, 1) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, which reads nothing as far as the program can tell; the address is mapped.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast_const().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// As [`prefetch`](Self::prefetch), for a line that is about to be written.
    pub fn prefetch_write(&self, offset: u64) {
        #[cfg(target_arch = "x86_64")]
        if let Ok(at) = self.at(offset, 1) {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            // SAFETY: a hint, which changes nothing as far as the program can tell; the address is mapped.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast_const().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// The first byte of `[offset, offset + len)`, if the whole range lies inside.
    pub(crate) fn at(&self, offset: u64, len: u64) -> Result<*mut u8, OutOfBounds> {
        let size = self.len as u64;
        if offset > size || len > size - offset {
            return Err(OutOfBounds { offset, len, size });
        }
        // SAFETY: `offset <= self.len` was just checked, so the result stays in (or one past) the
        // mapping.
        Ok(unsafe { self.ptr.as_ptr().add(offset as usize) })
    }

    fn aligned(&self, offset: u64, size: u64) -> Result<*mut u8, OutOfBounds> {
        // A mapping starts on a page; borrowed memory may start anywhere.
        let start = self.ptr.as_ptr() as u64;
        if !start.wrapping_add(offset).is_multiple_of(size) {
            return Err(OutOfBounds { offset, len: size, size: self.len as u64 });
        }
        self.at(offset, size)
    }
}

impl Drop for HostMem {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // SAFETY: this value owns the mapping and nothing can use it after the drop.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

impl fmt::Debug for HostMem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMem").field("addr", &self.addr()).field("len", &self.len).finish()
    }
}

/// The page size of this machine in bytes.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// The descriptor as a number, for printing.
pub fn raw(fd: &impl AsFd) -> i32 {
    fd.as_fd().as_raw_fd()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_outside_are_refused_and_move_nothing() {
        let mem = HostMem::anonymous(4096).unwrap();
        mem.write(4092, &[1, 2, 3, 4]).unwrap();
        for (offset, len) in [(4093, 4), (4097, 0), (u64::MAX, 1), (0, 4097)] {
            let error = mem.write(offset, &vec![9; len]).unwrap_err();
            assert_eq!((error.offset, error.size), (offset, 4096));
        }
        let mut tail = [0; 4];
        mem.read(4092, &mut tail).unwrap();
        assert_eq!(tail, [1, 2, 3, 4]);
        assert!(mem.load_u32(2).is_err(), "a misaligned word is refused");
        assert!(mem.load_u64(4092).is_err(), "a word across the end is refused");
    }

    #[test]
    fn borrowed_memory_is_used_in_place_and_left_there() {
        let owner = HostMem::anonymous(8192).unwrap();
        let part = VirtAddr::new(owner.addr().as_u64() + 2);
        // SAFETY: `owner` outlives the borrowed value, and lends no reference.
        let borrowed = unsafe { HostMem::borrowed(part, 4096) }.unwrap();
        borrowed.write(0, &[1, 2]).unwrap();
        assert!(borrowed.load_u32(0).is_err(), "the address counts, not the offset");
        assert_eq!(borrowed.load_u32(2).unwrap(), 0);
        drop(borrowed);
        let mut bytes = [0; 2];
        owner.read(2, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2]);
        for (addr, len) in [(0, 1), (4096, 0), (u64::MAX, 2)] {
            // SAFETY: refused before anything is accessed.
            assert!(unsafe { HostMem::borrowed(VirtAddr::new(addr), len) }.is_err());
        }
    }

    #[test]
    fn pages_can_move_behind_the_same_address() {
        let page = page_size() as u64;
        let fd = memfd("test", 4 * page).unwrap();
        let extents = [Extent { offset: 0, len: page }, Extent { offset: 2 * page, len: page }];
        let mem = HostMem::from_extents(&fd, &extents).unwrap();
        mem.fill(0, 2 * page, 7).unwrap();
        let addr = mem.addr();
        mem.remap(&fd, &[Extent { offset: page, len: page }, Extent { offset: 0, len: page }])
            .unwrap();
        assert_eq!(mem.addr(), addr);
        let mut byte = [9];
        mem.read(0, &mut byte).unwrap();
        assert_eq!(byte, [0], "page 1 of the memfd was never written");
        mem.read(page, &mut byte).unwrap();
        assert_eq!(byte, [7], "page 0 of the memfd was");
        assert!(mem.remap(&fd, &[Extent { offset: 0, len: page }]).is_err(), "too short");
    }

    #[test]
    fn memory_can_prefer_a_node_that_is_there() {
        let mem = HostMem::anonymous(1 << 20).unwrap();
        match mem.prefer_node(0) {
            Ok(()) => mem.fill(0, 1 << 20, 1).unwrap(),
            Err(error) => println!("SKIP mbind ({error})"),
        }
        assert!(mem.prefer_node(u32::MAX).is_err());
    }
}
