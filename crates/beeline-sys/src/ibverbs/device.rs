//! Devices: what there is, opening one, what it says of itself, its unasked events.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::table::Table;
use super::types::*;
use super::{LoadError, check, last_error, library, owned, text};

/// Names of all RDMA devices of the kernel's that have a provider, in the library's order.
///
/// # Errors
/// The library is missing, or the kernel has no RDMA (`ENOSYS`).
pub fn names() -> Result<io::Result<Vec<String>>, LoadError> {
    let table = library()?;
    Ok(DeviceList::get(table).map(|list| list.names().into_iter().map(|(_, name)| name).collect()))
}

/// The library's list of devices, freed when dropped.
struct DeviceList {
    table: &'static Table,
    list: NonNull<*mut RawDevice>,
    len: usize,
}

impl DeviceList {
    fn get(table: &'static Table) -> io::Result<Self> {
        let mut len: c_int = 0;
        // SAFETY: `len` is a place for an int; the answer is null or a list that is freed once, below.
        let list = unsafe { (table.ibv_get_device_list)(&raw mut len) };
        let list = NonNull::new(list).ok_or_else(last_error)?;
        Ok(Self { table, list, len: usize::try_from(len).unwrap_or(0) })
    }

    fn names(&self) -> Vec<(NonNull<RawDevice>, String)> {
        (0..self.len)
            .filter_map(|index| {
                // SAFETY: the list has `len` entries, and one more that is null.
                let entry = unsafe { self.list.add(index) };
                // SAFETY: the entry is in the list, which lives as long as this value.
                let device = NonNull::new(unsafe { entry.read() })?;
                // SAFETY: the device is in a list that is not freed yet.
                let name = unsafe { (self.table.ibv_get_device_name)(device.as_ptr()) };
                if name.is_null() {
                    return None;
                }
                // SAFETY: not null, so a string that the device holds.
                Some((device, owned(unsafe { CStr::from_ptr(name) })))
            })
            .collect()
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from ibv_get_device_list and is freed here only.
        unsafe { (self.table.ibv_free_device_list)(self.list.as_ptr()) };
    }
}

/// An open device.
#[derive(Debug)]
pub struct Context {
    pub(super) table: &'static Table,
    pub(super) raw: NonNull<RawContext>,
    name: String,
}

// SAFETY: libibverbs allows its objects to be used from any thread, and from several at a time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What a device can do, as far as it is asked here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Firmware version.
    pub firmware: String,
    /// PCI vendor, or what stands for it: soft RoCE says 0xffffff.
    pub vendor_id: u32,
    /// Its name for the model.
    pub part_id: u32,
    /// Work requests of one queue at most.
    pub max_qp_wr: u32,
    /// Scatter/gather elements of one work request at most.
    pub max_sge: u32,
    /// Entries of one completion queue at most.
    pub max_cqe: u32,
    /// READs and atomics of a peer that can be answered again.
    pub max_dest_rd_atomic: u32,
    /// READs and atomics outstanding at a time.
    pub max_rd_atomic: u32,
    /// Whether a peer's atomics are atomic: 0 not at all, 1 towards this device, 2 towards all.
    pub atomic_cap: u32,
    /// Receives of a shared receive queue at most.
    pub max_srq_wr: u32,
    /// Scatter/gather elements of one of those at most.
    pub max_srq_sge: u32,
    /// Ports; they are numbered from 1.
    pub ports: u8,
}

/// A port as it is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortAttr {
    /// `enum ibv_port_state`: 4 is active.
    pub state: u32,
    /// `enum ibv_mtu` of the largest packet: 1 for 256 bytes to 5 for 4096.
    pub max_mtu: u32,
    /// Of the largest packet now.
    pub active_mtu: u32,
    /// Entries of the GID table.
    pub gids: u32,
    /// Longest message in bytes.
    pub max_message: u32,
    /// 1 InfiniBand, 2 Ethernet, 0 not said, which is InfiniBand.
    pub link_layer: u8,
}

/// An entry of a GID table that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The address.
    pub gid: [u8; 16],
    /// 0 InfiniBand, 1 RoCE v1, 2 RoCE v2; `None` where this library does not tell.
    pub kind: Option<u32>,
}

/// Something that happened unasked: `struct ibv_async_event`, with names in place of pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// `enum ibv_event_type`.
    pub kind: u32,
    /// For an event of a completion queue or a shared receive queue: whose it is, as its `id` says.
    pub object: usize,
    /// For an event of a queue pair: its number.
    pub qpn: u32,
    /// For an event of a port: its number.
    pub port: u32,
}

impl Event {
    const QP: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 16];
    const PORT: [u32; 7] = [9, 10, 11, 12, 13, 17, 18];
}

impl Context {
    /// Opens the device of that name.
    ///
    /// # Errors
    /// `NotFound` where there is none; what the library says.
    pub fn open(name: &str) -> Result<io::Result<Arc<Self>>, LoadError> {
        let table = library()?;
        Ok(DeviceList::get(table).and_then(|list| {
            let found = list.names().into_iter().find(|(_, known)| known == name);
            let (device, name) = found.ok_or(io::ErrorKind::NotFound)?;
            // SAFETY: the device is in a list that is not freed yet; an open one is held by the library.
            let raw = unsafe { (table.ibv_open_device)(device.as_ptr()) };
            let raw = NonNull::new(raw).ok_or_else(last_error)?;
            let context = Self { table, raw, name };
            // Events are asked for, never waited for inside the library.
            rustix::io::ioctl_fionbio(context.async_fd(), true)?;
            Ok(Arc::new(context))
        }))
    }

    /// Its name, as `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it can do.
    ///
    /// # Errors
    /// What the library says.
    pub fn attributes(&self) -> io::Result<DeviceAttr> {
        let mut attr = MaybeUninit::<RawDeviceAttr>::zeroed();
        // SAFETY: the context is open, and `attr` is a place for what is filled in.
        check(unsafe { (self.table.ibv_query_device)(self.raw.as_ptr(), attr.as_mut_ptr()) })?;
        // SAFETY: all bits zero is a valid value, and so is what was filled in.
        let attr = unsafe { attr.assume_init() };
        let count = |value: c_int| u32::try_from(value).unwrap_or(0);
        Ok(DeviceAttr {
            firmware: text(&attr.fw_ver),
            vendor_id: attr.vendor_id,
            part_id: attr.vendor_part_id,
            max_qp_wr: count(attr.max_qp_wr),
            max_sge: count(attr.max_sge),
            max_cqe: count(attr.max_cqe),
            max_dest_rd_atomic: count(attr.max_qp_rd_atom),
            max_rd_atomic: count(attr.max_qp_init_rd_atom),
            atomic_cap: count(attr.atomic_cap),
            max_srq_wr: count(attr.max_srq_wr),
            max_srq_sge: count(attr.max_srq_sge),
            ports: attr.phys_port_cnt,
        })
    }

    /// Whether regions can be faulted in on demand; `None` where the library does not tell.
    pub fn on_demand(&self) -> Option<bool> {
        let query = self.query_device_ex()?;
        let mut attr = MaybeUninit::<RawDeviceAttrEx>::zeroed();
        let size = size_of::<RawDeviceAttrEx>();
        // SAFETY: the context is open, no input is allowed, and at most `size` bytes are filled in.
        let code = unsafe { query(self.raw.as_ptr(), ptr::null(), attr.as_mut_ptr(), size) };
        // SAFETY: all bits zero is a valid value, and so is what was filled in.
        let attr = unsafe { attr.assume_init() };
        (code == 0).then_some(attr.odp_general_caps & 1 != 0)
    }

    /// The header's `verbs_get_ctx_op(context, query_device_ex)`.
    fn query_device_ex(&self) -> Option<QueryDeviceEx> {
        const WORD: usize = size_of::<usize>();
        const NEEDED: usize = QUERY_DEVICE_EX_WORDS * WORD + size_of::<RawContext>();
        // SAFETY: the context is open; the library puts the extended structure around it where the last
        // member says so.
        if unsafe { (*self.raw.as_ptr()).abi_compat } != usize::MAX {
            return None;
        }
        // SAFETY: the context is extended, so `sz` stands right before it.
        let size = unsafe { self.raw.byte_sub(WORD) };
        // SAFETY: as above; it is a size_t that is not written after the context was opened.
        if unsafe { size.cast::<usize>().read() } < NEEDED {
            return None;
        }
        // SAFETY: the size says that the member is there.
        let member = unsafe { self.raw.byte_sub(QUERY_DEVICE_EX_WORDS * WORD) };
        // SAFETY: it holds null or a function of this signature.
        unsafe { member.cast::<Option<QueryDeviceEx>>().read() }
    }

    /// A port.
    ///
    /// # Errors
    /// `InvalidInput` where there is none of that number; what the library says.
    pub fn port(&self, port: u8) -> io::Result<PortAttr> {
        let mut attr = RawPortAttr::default();
        // SAFETY: the context is open, and `attr` is at least as large as what is filled in.
        check(unsafe { (self.table.ibv_query_port)(self.raw.as_ptr(), port, &raw mut attr) })?;
        let count = |value: c_int| u32::try_from(value).unwrap_or(0);
        Ok(PortAttr {
            state: count(attr.state),
            max_mtu: count(attr.max_mtu),
            active_mtu: count(attr.active_mtu),
            gids: count(attr.gid_tbl_len),
            max_message: attr.max_msg_sz,
            link_layer: attr.link_layer,
        })
    }

    /// An entry of a port's GID table; `None` where it is empty.
    ///
    /// # Errors
    /// What the library says, as for an index behind the table.
    pub fn gid(&self, port: u8, index: u16) -> io::Result<Option<GidEntry>> {
        if let Some(query) = self.table._ibv_query_gid_ex {
            let mut entry = RawGidEntry::default();
            let (raw, size) = (self.raw.as_ptr(), size_of::<RawGidEntry>());
            // SAFETY: the context is open, and `entry` is a place for `size` bytes.
            let code = unsafe { query(raw, port.into(), index.into(), &raw mut entry, 0, size) };
            match check(code) {
                Ok(()) => {
                    return Ok(Some(GidEntry { gid: entry.gid.0, kind: Some(entry.gid_type) }));
                }
                Err(error) if error.raw_os_error() == Some(libc::ENODATA) => return Ok(None),
                // A kernel before 5.10 and a mount without sysfs: the plain question remains.
                Err(_) => {}
            }
        }
        let mut gid = RawGid::default();
        // SAFETY: the context is open, and `gid` is a place for what is filled in.
        let code = unsafe {
            (self.table.ibv_query_gid)(self.raw.as_ptr(), port, index.into(), &raw mut gid)
        };
        check(code)?;
        Ok((gid.0 != [0; 16]).then_some(GidEntry { gid: gid.0, kind: None }))
    }

    /// Whether the library takes the flag for relaxed ordering.
    pub const fn has_relaxed_ordering(&self) -> bool {
        self.table.ibv_reg_mr_iova2.is_some()
    }

    /// Readable while an event waits.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.raw.as_ptr()).async_fd };
        // SAFETY: the context owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// The next event; never waits. It is acknowledged here.
    pub fn next_event(&self) -> Option<Event> {
        let mut raw = RawAsyncEvent { element: ptr::null_mut(), event_type: 0 };
        // SAFETY: the context is open, its descriptor does not block, and `raw` is a place for the event.
        let code = unsafe { (self.table.ibv_get_async_event)(self.raw.as_ptr(), &raw mut raw) };
        if code != 0 {
            return None;
        }
        let kind = u32::try_from(raw.event_type).unwrap_or(u32::MAX);
        let mut event = Event { kind, object: raw.element.addr(), qpn: 0, port: 0 };
        if Event::QP.contains(&kind) {
            let qp: *mut RawQp = raw.element.cast();
            // SAFETY: an event of this kind names a queue pair, which is not destroyed before the event
            // is acknowledged.
            event.qpn = unsafe { (*qp).qp_num };
        } else if Event::PORT.contains(&kind) {
            // A union with an int: its bytes are the first.
            event.port = u32::from_ne_bytes(first_word(raw.element));
        }
        // SAFETY: `raw` is the event as it was given, acknowledged once.
        unsafe { (self.table.ibv_ack_async_event)(&raw mut raw) };
        Some(event)
    }
}

fn first_word(element: *mut c_void) -> [u8; 4] {
    let [a, b, c, d, ..] = element.addr().to_ne_bytes();
    [a, b, c, d]
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made on the context holds it, so nothing of it is left, and it is closed once.
        let _ = unsafe { (self.table.ibv_close_device)(self.raw.as_ptr()) };
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.async_fd()
    }
}
