//! What is made on a device: protection domains, regions, completion queues, shared receive queues,
//! address handles.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use beeline_core::addr::DevicePtr;

use super::device::Context;
use super::types::*;
use super::{check, last_error};
use crate::cuda;
use crate::mem::HostMem;

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    pub(super) context: Arc<Context>,
    pub(super) raw: NonNull<RawPd>,
}

// SAFETY: libibverbs allows its objects to be used from any thread, and from several at a time.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Makes one.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.table.ibv_alloc_pd)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        Ok(Arc::new(Self { context: Arc::clone(context), raw }))
    }

    /// What the library and its provider say to a dma-buf registration of no descriptor: `EBADF` where
    /// they would take one; `EOPNOTSUPP` or `EPROTONOSUPPORT` where not, as a library before 34.
    pub fn ask_dma_buf(&self) -> io::Error {
        let Some(register) = self.context.table.ibv_reg_dmabuf_mr else {
            return io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        };
        // SAFETY: the domain lives, and no descriptor is passed, so nothing can be registered.
        let raw = unsafe { register(self.raw.as_ptr(), 0, 0, 0, -1, 0) };
        let error = last_error();
        if let Some(raw) = NonNull::new(raw) {
            // SAFETY: a region that was made all the same, of nothing; ended at once.
            let _ = unsafe { (self.context.table.ibv_dereg_mr)(raw.as_ptr()) };
        }
        error
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain holds it, so nothing of it is left.
        let _ = unsafe { (self.context.table.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Regions whose memory is kept for good, because they could not be deregistered.
static KEPT: AtomicU64 = AtomicU64::new(0);

/// How many regions could not be deregistered so far; their memory is never freed.
pub fn memory_kept() -> u64 {
    KEPT.load(Ordering::Relaxed)
}

/// A memory region.
pub struct Mr {
    pd: Arc<Pd>,
    /// `None` when it was deregistered.
    raw: Mutex<Option<NonNull<RawMr>>>,
    /// What holds the memory.
    keep: Option<Box<dyn Any + Send + Sync>>,
    lkey: u32,
    rkey: u32,
}

// SAFETY: as for `Pd`; the pointer is used under the lock.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lkey, rkey, .. } = self;
        f.debug_struct("Mr").field("lkey", lkey).field("rkey", rkey).finish_non_exhaustive()
    }
}

impl Mr {
    /// `IBV_ACCESS_RELAXED_ORDERING`: dropped by the library where the kernel does not know it.
    pub const RELAXED_ORDERING: u32 = 1 << 20;

    /// Registers host memory under its own address. `access` is a set of `enum ibv_access_flags`.
    ///
    /// # Errors
    /// What the library says.
    pub fn host(pd: &Arc<Pd>, mem: &Arc<HostMem>, access: u32) -> io::Result<Self> {
        let len = usize::try_from(mem.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let addr = mem.addr().as_u64();
        // SAFETY: the memory is mapped while `mem` lives, which the region holds, and is never lent
        // out as a reference, so a device may write it.
        unsafe { Self::by_address(pd, addr, len, access, Box::new(Arc::clone(mem))) }
    }

    /// Registers memory of a CUDA device under its own address, by the peer memory client of its driver.
    ///
    /// # Errors
    /// `InvalidInput` where the driver does not know `[ptr, ptr + len)` as memory of a device; what the
    /// library says, as `EFAULT` without a peer memory client.
    pub fn device_pointer(
        pd: &Arc<Pd>,
        mem: &Arc<cuda::DeviceMem>,
        ptr: DevicePtr,
        len: u64,
        access: u32,
    ) -> io::Result<Self> {
        let inside = |start: DevicePtr, all: u64| {
            let offset = ptr.as_u64().checked_sub(start.as_u64());
            offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= all)
        };
        let info = cuda::PointerInfo::of(mem.context(), ptr).map_err(io::Error::other)?;
        let device = info.memory == cuda::MemoryType::DEVICE && !info.managed;
        if !device || !inside(info.start, info.len) || !inside(mem.ptr(), mem.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the driver just said that the range lies in one allocation of a device, which no Rust
        // reference covers; its client pins it, and tells the NIC where it goes away.
        unsafe { Self::by_address(pd, ptr.as_u64(), len, access, Box::new(Arc::clone(mem))) }
    }

    /// Registers `len` bytes from `offset` on of a dma-buf under the address `iova`. `keep` lives as long
    /// as the region; the kernel holds the dma-buf itself.
    ///
    /// # Errors
    /// What the library says: `EOPNOTSUPP` where it or the driver has no such registration.
    pub fn dma_buf(
        pd: &Arc<Pd>,
        fd: impl AsFd,
        (offset, len): (u64, u64),
        iova: u64,
        access: u32,
        keep: Box<dyn Any + Send + Sync>,
    ) -> io::Result<Self> {
        let Some(register) = pd.context.table.ibv_reg_dmabuf_mr else {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        };
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (fd, access) = (fd.as_fd().as_raw_fd(), access.cast_signed());
        // SAFETY: the domain lives, and the kernel checks descriptor and range; what it exports is the
        // memory of a device or of a file, which no Rust reference covers.
        let raw = unsafe { register(pd.raw.as_ptr(), offset, len, iova, fd, access) };
        Self::own(pd, raw, keep)
    }

    /// # Safety
    /// `[addr, addr + len)` may be read and written by a device while `keep` lives.
    unsafe fn by_address(
        pd: &Arc<Pd>,
        addr: u64,
        len: usize,
        access: u32,
        keep: Box<dyn Any + Send + Sync>,
    ) -> io::Result<Self> {
        let start: *mut c_void = ptr::with_exposed_provenance_mut(addr as usize);
        let raw = match pd.context.table.ibv_reg_mr_iova2 {
            // SAFETY: the domain lives, and the caller vouches for the memory.
            Some(register) => unsafe { register(pd.raw.as_ptr(), start, len, addr, access) },
            None => {
                let plain = (access & !Self::RELAXED_ORDERING).cast_signed();
                // SAFETY: as above.
                unsafe { (pd.context.table.ibv_reg_mr)(pd.raw.as_ptr(), start, len, plain) }
            }
        };
        Self::own(pd, raw, keep)
    }

    fn own(pd: &Arc<Pd>, raw: *mut RawMr, keep: Box<dyn Any + Send + Sync>) -> io::Result<Self> {
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        // SAFETY: the region was just made.
        let lkey = unsafe { (*raw.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*raw.as_ptr()).rkey };
        Ok(Self { pd: Arc::clone(pd), raw: Mutex::new(Some(raw)), keep: Some(keep), lkey, rkey })
    }

    /// The local key.
    pub const fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key for the peer.
    pub const fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Deregisters the region: when this returns, the NIC reaches the memory no more. Again, it does
    /// nothing.
    ///
    /// # Errors
    /// What the library says. The region is as it was.
    pub fn deregister(&self) -> io::Result<()> {
        let mut raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = *raw {
            // SAFETY: the region lives; under the lock it is ended once.
            check(unsafe { (self.pd.context.table.ibv_dereg_mr)(region.as_ptr()) })?;
            *raw = None;
        }
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if self.deregister().is_err() {
            KEPT.fetch_add(1, Ordering::Relaxed);
            // The NIC may still reach it.
            std::mem::forget(self.keep.take());
        }
    }
}

/// A completion channel: where events of completion queues arrive.
#[derive(Debug)]
pub struct Channel {
    context: Arc<Context>,
    raw: NonNull<RawChannel>,
}

// SAFETY: as for `Pd`.
unsafe impl Send for Channel {}
// SAFETY: as for `Pd`.
unsafe impl Sync for Channel {}

impl Channel {
    /// Makes one whose descriptor does not block.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.table.ibv_create_comp_channel)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        let channel = Self { context: Arc::clone(context), raw };
        rustix::io::ioctl_fionbio(&channel, true)?;
        Ok(channel)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives.
        let fd = unsafe { (*self.raw.as_ptr()).fd };
        // SAFETY: the channel owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the completion queue that reports here holds the channel, so it is gone.
        let _ = unsafe { (self.context.table.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

/// A completion queue with a channel of its own.
#[derive(Debug)]
pub struct Cq {
    pub(super) raw: NonNull<RawCq>,
    channel: Channel,
}

// SAFETY: as for `Pd`.
unsafe impl Send for Cq {}
// SAFETY: as for `Pd`.
unsafe impl Sync for Cq {}

impl Cq {
    /// Makes one of at least `capacity` entries.
    ///
    /// # Errors
    /// What the library says, as `EINVAL` for more than the device has.
    pub fn new(context: &Arc<Context>, capacity: u32) -> io::Result<Arc<Self>> {
        let channel = Channel::new(context)?;
        let entries = c_int::try_from(capacity).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (device, raw_channel) = (context.raw.as_ptr(), channel.raw.as_ptr());
        // SAFETY: context and channel live; vector 0 is always there.
        let raw = unsafe {
            (context.table.ibv_create_cq)(device, entries, ptr::null_mut(), raw_channel, 0)
        };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        Ok(Arc::new(Self { raw, channel }))
    }

    /// What events of this queue name it by.
    pub fn id(&self) -> usize {
        self.raw.addr().get()
    }

    /// Where its events arrive.
    pub const fn channel(&self) -> &Channel {
        &self.channel
    }

    pub(super) fn ops(&self) -> *const ContextOps {
        // SAFETY: the context is open, and its table stands in it; no reference to it is made.
        unsafe { &raw const (*self.channel.context.raw.as_ptr()).ops }
    }

    /// Asks for one event, for the next completion, or for the next solicited or failed one.
    ///
    /// # Errors
    /// What the provider says.
    pub fn request_notify(&self, solicited_only: bool) -> io::Result<()> {
        // SAFETY: the table stands in the open context.
        let request = unsafe { (*self.ops()).req_notify_cq };
        // SAFETY: the queue lives.
        check(unsafe { request(self.raw.as_ptr(), solicited_only.into()) })
    }

    /// Takes all events off the channel and acknowledges them; answers how many.
    pub fn take_events(&self) -> u64 {
        let table = self.channel.context.table;
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        let mut count = 0;
        loop {
            let channel = self.channel.raw.as_ptr();
            // SAFETY: the channel lives and does not block; both are places for a pointer.
            let code = unsafe { (table.ibv_get_cq_event)(channel, &raw mut cq, &raw mut context) };
            if code != 0 {
                return count;
            }
            // SAFETY: the channel has events of this queue only, and this one is acknowledged once.
            unsafe { (table.ibv_ack_cq_events)(cq, 1) };
            count += 1;
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs that report here hold it, so they are gone; all its events are
        // acknowledged where they are taken.
        let _ = unsafe { (self.channel.context.table.ibv_destroy_cq)(self.raw.as_ptr()) };
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    pub(super) pd: Arc<Pd>,
    pub(super) raw: NonNull<RawSrq>,
}

// SAFETY: as for `Pd`.
unsafe impl Send for Srq {}
// SAFETY: as for `Pd`.
unsafe impl Sync for Srq {}

impl Srq {
    /// Makes one.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(pd: &Arc<Pd>, max_wr: u32, max_sge: u32) -> io::Result<Arc<Self>> {
        let attr = RawSrqAttr { max_wr, max_sge, srq_limit: 0 };
        let mut init = RawSrqInitAttr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain lives, and `init` is what the function takes.
        let raw = unsafe { (pd.context.table.ibv_create_srq)(pd.raw.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        Ok(Arc::new(Self { pd: Arc::clone(pd), raw }))
    }

    /// What events of this queue name it by.
    pub fn id(&self) -> usize {
        self.raw.addr().get()
    }

    /// Asks for one event when fewer than `limit` receives are left.
    ///
    /// # Errors
    /// What the library says.
    pub fn arm(&self, limit: u32) -> io::Result<()> {
        const LIMIT: c_int = 2;
        let mut attr = RawSrqAttr { srq_limit: limit, ..RawSrqAttr::default() };
        let table = self.pd.context.table;
        // SAFETY: the queue lives, and only the limit is read.
        check(unsafe { (table.ibv_modify_srq)(self.raw.as_ptr(), &raw mut attr, LIMIT) })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: queue pairs that take from it hold it, so they are gone.
        let _ = unsafe { (self.pd.context.table.ibv_destroy_srq)(self.raw.as_ptr()) };
    }
}

/// Where packets go: a peer's GID, from an entry of a port's own table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AhAttr {
    /// The peer's GID.
    pub gid: [u8; 16],
    /// This side's, as an index into the port's table.
    pub gid_index: u8,
    /// The port.
    pub port: u8,
    /// Routers on the way at most.
    pub hop_limit: u8,
}

impl From<AhAttr> for RawAhAttr {
    fn from(attr: AhAttr) -> Self {
        let AhAttr { gid, gid_index, port, hop_limit } = attr;
        let dgid = RawGid(gid);
        let grh =
            RawGlobalRoute { dgid, sgid_index: gid_index, hop_limit, ..RawGlobalRoute::default() };
        Self { grh, is_global: 1, port_num: port, ..Self::default() }
    }
}

/// An address handle, for datagrams.
#[derive(Debug)]
pub struct Ah {
    pd: Arc<Pd>,
    pub(super) raw: NonNull<RawAh>,
}

// SAFETY: as for `Pd`.
unsafe impl Send for Ah {}
// SAFETY: as for `Pd`.
unsafe impl Sync for Ah {}

impl Ah {
    /// Makes one; a provider may look the peer's Ethernet address up, which takes time.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(pd: &Arc<Pd>, attr: AhAttr) -> io::Result<Self> {
        let mut attr = RawAhAttr::from(attr);
        // SAFETY: the domain lives, and `attr` is what the function takes.
        let raw = unsafe { (pd.context.table.ibv_create_ah)(pd.raw.as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        Ok(Self { pd: Arc::clone(pd), raw })
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: whoever posted a request with it holds it until that is done.
        let _ = unsafe { (self.pd.context.table.ibv_destroy_ah)(self.raw.as_ptr()) };
    }
}
