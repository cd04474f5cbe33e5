//! Device memory, registered host memory, and what is known about a pointer.

use std::ffi::c_void;
use std::sync::Arc;

use beeline::gpu::PinnedMem;
use beeline_core::addr::VirtAddr;
use beeline_sys::mem::HostMem;

use crate::device::handle_of;
use crate::ffi::{Cu, In, Out, export, read, write};
use crate::state::{DeviceMemory, Driver, Kind, Objects, Physical, driver};

const REGISTER_READ_ONLY: u32 = 8;
const GRANULARITY: usize = 2 << 20;

/// Freed memory that is kept to be given out again: how many, of which length at most.
const FREED_MAX: usize = 16;
const FREED_BYTES_MAX: u64 = 1 << 20;
/// Apart from the numbers that the simulated devices give.
const NUMBERS: u64 = 1 << 62;

/// `CUmemAllocationProp_v1`, as far as it is read here.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Prop {
    kind: i32,
    handle_types: i32,
    location: [i32; 2],
    win32: usize,
    flags: [u8; 8],
}

export! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let driver = driver()?;
        let index = driver.current()?;
        let memory = driver.devices[index].gpu.memory().map_err(|e| driver.code(index, &e))?;
        free.set(memory.free as usize)?;
        total.set(memory.total as usize)
    }

    fn cuMemAlloc_v2(ptr: Out<u64>, len: usize) { alloc(driver()?, ptr, len, Kind::Plain) }

    fn cuMemAllocAsync(ptr: Out<u64>, len: usize, stream: u64) {
        // Memory of a graph is not simulated.
        driver()?.apart(stream)?;
        alloc(driver()?, ptr, len, Kind::Pool)
    }

    fn cuMemAllocManaged(ptr: Out<u64>, len: usize, flags: u32) {
        if flags != 1 { return Err(Cu::INVALID_VALUE); }
        alloc(driver()?, ptr, len, Kind::Managed)
    }

    fn cuMemFree_v2(ptr: u64) {
        driver()?.current_unsafe()?;
        free(driver()?, ptr)
    }

    fn cuMemFreeAsync(ptr: u64, stream: u64) {
        driver()?.apart(stream)?;
        free(driver()?, ptr)
    }

    fn cuMemHostRegister_v2(ptr: *mut c_void, len: usize, flags: u32) {
        let driver = driver()?;
        let index = driver.current_unsafe()?;
        let read_only = flags & REGISTER_READ_ONLY != 0;
        if read_only && driver.settings.lacks("readonly") { return Err(Cu::NOT_SUPPORTED); }
        let start = ptr.addr() as u64;
        if !mapped(start, len as u64, !read_only) { return Err(Cu::INVALID_VALUE); }
        let mut objects = driver.objects();
        let end = start + len as u64;
        let before = objects.host.range(..end).next_back();
        if before.is_some_and(|(at, memory)| at + memory.len() > start) {
            return Err(Cu::ALREADY_REGISTERED);
        }
        let pinned = borrow(driver, index, ptr, len)?;
        objects.host.insert(start, pinned);
        Ok(())
    }

    fn cuMemHostUnregister(ptr: *mut c_void) {
        driver()?.current_unsafe()?;
        let gone = driver()?.objects().host.remove(&(ptr.addr() as u64));
        gone.map(drop).ok_or(Cu::NOT_REGISTERED)
    }

    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: *mut c_void, flags: u32) {
        driver()?.current()?;
        if flags != 0 { return Err(Cu::INVALID_VALUE); }
        driver()?.objects().host_memory(host.addr() as u64, 0).ok_or(Cu::INVALID_VALUE)?;
        device.set(host.addr() as u64)
    }

    fn cuPointerGetAttributes(count: u32, names: In<i32>, places: In<*mut c_void>, ptr: u64) {
        driver()?.current()?;
        for index in 0..count as usize {
            pointer_attribute(driver()?, names.at(index)?, places.at(index)?, ptr)?;
        }
        Ok(())
    }

    fn cuMemGetHandleForAddressRange(
        handle: Out<i32>, ptr: u64, len: usize, kind: i32, flags: u64,
    ) {
        driver()?.guard()?;
        let page = beeline_sys::mem::page_size() as u64;
        let whole = ptr.is_multiple_of(page) && (len as u64).is_multiple_of(page) && len > 0;
        if kind != 1 || flags != 0 || !whole { return Err(Cu::INVALID_VALUE); }
        // As the real driver: memory of a pool is not exported.
        let kind = driver()?.objects().device_memory(ptr, len as u64)?.0.kind;
        if !matches!(kind, Kind::Plain | Kind::Virtual) { return Err(Cu::NOT_SUPPORTED); }
        // A descriptor of the right size; the simulated device shows its pages to nobody.
        // It can be mapped, as no driver's can so far: whoever does finds that the bytes are others.
        let fd = match driver()?.settings.lacks("window") {
            false => beeline_sys::mem::memfd("test-dma-buf", len as u64),
            true => unmappable(len as u64),
        };
        let fd = fd.map_err(|_| Cu::UNKNOWN)?;
        handle.set(std::os::fd::IntoRawFd::into_raw_fd(fd))
    }

    fn cuMemGetAllocationGranularity(bytes: Out<usize>, prop: In<Prop>, option: i32) {
        let _ = (prop.at(0)?, option);
        bytes.set(GRANULARITY)
    }

    fn cuMemCreate(handle: Out<u64>, len: usize, prop: In<Prop>, flags: u64) {
        driver()?.guard()?;
        let driver = driver()?;
        let prop = prop.at(0)?;
        let fits = len > 0 && len.is_multiple_of(GRANULARITY) && prop.kind == 1 && flags == 0;
        if !fits || prop.location[0] != 1 || prop.win32 != 0 || prop.handle_types > 1 {
            return Err(Cu::INVALID_VALUE);
        }
        driver.device(prop.location[1])?;
        let device = prop.location[1] as usize;
        let buffer = driver.devices[device].gpu.alloc(len as u64);
        let buffer = buffer.map_err(|e| driver.code(device, &e))?;
        let rdma = prop.flags[1] != 0;
        let made = Physical { buffer, device, reserved: false, mapped: false, rdma };
        let number = driver.handle();
        driver.objects().physical.insert(number, made);
        handle.set(number)
    }

    fn cuMemAddressReserve(ptr: Out<u64>, len: usize, align: usize, at: u64, flags: u64) {
        driver()?.guard()?;
        if align != 0 || at != 0 || flags != 0 { return Err(Cu::INVALID_VALUE); }
        let driver = driver()?;
        let mut objects = driver.objects();
        let fits = |it: &&mut Physical| !it.reserved && it.buffer.len() == len as u64;
        let found = objects.physical.values_mut().find(fits).ok_or(Cu::OUT_OF_MEMORY)?;
        found.reserved = true;
        ptr.set(found.buffer.ptr().as_u64())
    }

    fn cuMemMap(ptr: u64, len: usize, offset: usize, handle: u64, flags: u64) {
        driver()?.guard()?;
        let driver = driver()?;
        let mut objects = driver.objects();
        let found = objects.physical.get_mut(&handle).ok_or(Cu::INVALID_VALUE)?;
        let same = found.buffer.ptr().as_u64() == ptr && found.buffer.len() == len as u64;
        if !same || offset != 0 || flags != 0 || !found.reserved || found.mapped {
            return Err(Cu::INVALID_VALUE);
        }
        found.mapped = true;
        Ok(())
    }

    fn cuMemSetAccess(ptr: u64, len: usize, access: In<[i32; 3]>, count: usize) {
        driver()?.guard()?;
        let driver = driver()?;
        let [kind, device, flags] = access.at(0)?;
        let mut objects = driver.objects();
        if let Some(memory) = objects.memory.get_mut(&ptr) {
            // Another device, for memory that its own has already.
            driver.device(device)?;
            let whole = memory.kind == Kind::Virtual && memory.buffer.len() == len as u64;
            if !whole || count != 1 || kind != 1 || flags != 3 { return Err(Cu::INVALID_VALUE); }
            objects.opened.insert((ptr, device as usize));
            return Ok(());
        }
        let Some(found) = objects.physical.values().find(|it| it.buffer.ptr().as_u64() == ptr)
        else { return Err(Cu::INVALID_VALUE) };
        let same = found.mapped && found.device as i32 == device && found.buffer.len() == len as u64;
        if !same || count != 1 || kind != 1 || flags != 3 { return Err(Cu::INVALID_VALUE); }
        let (buffer, device) = (found.buffer.clone(), found.device);
        objects.memory.insert(ptr, DeviceMemory { buffer, device, kind: Kind::Virtual });
        Ok(())
    }

    fn cuMemUnmap(ptr: u64, len: usize) {
        driver()?.guard()?;
        let mut objects = driver()?.objects();
        let known = |it: &&mut Physical| it.mapped && it.buffer.ptr().as_u64() == ptr;
        let found = objects.physical.values_mut().find(known).ok_or(Cu::INVALID_VALUE)?;
        if found.buffer.len() != len as u64 { return Err(Cu::INVALID_VALUE); }
        found.mapped = false;
        objects.memory.remove(&ptr);
        objects.opened.retain(|(opened, _)| *opened != ptr);
        Ok(())
    }

    fn cuMemAddressFree(ptr: u64, len: usize) {
        driver()?.guard()?;
        let mut objects = driver()?.objects();
        let known = |it: &&mut Physical| it.reserved && it.buffer.ptr().as_u64() == ptr;
        let found = objects.physical.values_mut().find(known).ok_or(Cu::INVALID_VALUE)?;
        if found.mapped || found.buffer.len() != len as u64 { return Err(Cu::INVALID_VALUE); }
        found.reserved = false;
        Ok(())
    }

    fn cuMemRelease(handle: u64) {
        driver()?.guard()?;
        driver()?.objects().physical.remove(&handle).map(drop).ok_or(Cu::INVALID_VALUE)
    }
}

fn alloc(driver: &Driver, ptr: Out<u64>, len: usize, kind: Kind) -> Result<(), Cu> {
    // Memory from a pool is allocated in stream order, which no capture forbids.
    let pool = kind == Kind::Pool;
    let device = if pool { driver.current()? } else { driver.current_unsafe()? };
    if len == 0 {
        return Err(Cu::INVALID_VALUE);
    }
    ptr.set(allocate(driver, device, len as u64, kind)?)
}

/// Device memory that the driver will know as `kind`; answers its address.
pub(crate) fn allocate(driver: &Driver, device: usize, len: u64, kind: Kind) -> Result<u64, Cu> {
    if kind == Kind::Plain && driver.settings.addresses {
        let number = NUMBERS + driver.handle();
        if let Some(start) = again(&mut driver.objects(), device, len, number) {
            return Ok(start);
        }
    }
    let gpu = &driver.devices.get(device).ok_or(Cu::INVALID_DEVICE)?.gpu;
    let buffer = gpu.alloc(len).map_err(|error| driver.code(device, &error))?;
    let start = buffer.ptr().as_u64();
    driver.objects().memory.insert(start, DeviceMemory { buffer, device, kind });
    Ok(start)
}

/// Memory freed last of just this device and length, under another number, as the real driver often does.
fn again(objects: &mut Objects, device: usize, len: u64, number: u64) -> Option<u64> {
    let same = |one: &DeviceMemory| one.device == device && one.buffer.len() == len;
    let memory = objects.freed.remove(objects.freed.iter().rposition(same)?);
    let start = memory.buffer.ptr().as_u64();
    objects.numbers.insert(start, number);
    objects.memory.insert(start, memory);
    Some(start)
}

/// A descriptor of that size whose mapping is refused: sealed against writers, as the answer 524 cannot be had.
fn unmappable(len: u64) -> std::io::Result<std::os::fd::OwnedFd> {
    let mem = HostMem::shareable(usize::try_from(len).map_err(std::io::Error::other)?)?;
    let file = mem.file().ok_or(std::io::ErrorKind::Unsupported)?;
    file.try_clone_to_owned()
}

fn free(driver: &Driver, ptr: u64) -> Result<(), Cu> {
    let mut objects = driver.objects();
    match objects.memory.get(&ptr).map(|memory| memory.kind) {
        Some(Kind::Plain | Kind::Pool | Kind::Managed) => {
            objects.numbers.remove(&ptr);
            let Some(memory) = objects.memory.remove(&ptr) else { return Ok(()) };
            let small = memory.buffer.len() <= FREED_BYTES_MAX;
            if driver.settings.addresses && memory.kind == Kind::Plain && small {
                if objects.freed.len() >= FREED_MAX {
                    objects.freed.remove(0);
                }
                objects.freed.push(memory);
            }
            Ok(())
        }
        Some(Kind::Virtual | Kind::Ipc) | None => Err(Cu::INVALID_VALUE),
    }
}

/// Host memory of the caller's as the simulated device takes it.
pub(crate) fn borrow(
    driver: &Driver,
    index: usize,
    ptr: *mut c_void,
    len: usize,
) -> Result<PinnedMem, Cu> {
    let addr = VirtAddr::new(ptr.expose_provenance() as u64);
    // SAFETY: the C caller promises that the memory stays until it is unregistered (or, for a copy of
    // unregistered memory, until the call returns) and that what is registered read-only is only read.
    let mem = unsafe { HostMem::borrowed(addr, len) }.map_err(|_| Cu::INVALID_VALUE)?;
    let gpu = &driver.devices.get(index).ok_or(Cu::INVALID_DEVICE)?.gpu;
    gpu.pin_mem(Arc::new(mem)).map_err(|error| driver.code(index, &error))
}

/// Whether `[start, start + len)` is mapped, readable and (if asked) writable.
fn mapped(start: u64, len: u64, write: bool) -> bool {
    let Some(end) = start.checked_add(len) else { return false };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut at = start;
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (Some(range), Some(access)) = (fields.next(), fields.next()) else { continue };
        let Some((low, high)) = range.split_once('-') else { continue };
        let parsed = (u64::from_str_radix(low, 16), u64::from_str_radix(high, 16));
        let (Ok(low), Ok(high)) = parsed else { continue };
        let fits = access.starts_with('r') && (!write || access.starts_with("rw"));
        if low <= at && at < high && fits {
            at = high;
        }
        if at >= end {
            return true;
        }
    }
    false
}

fn pointer_attribute(driver: &Driver, name: i32, place: *mut c_void, ptr: u64) -> Result<(), Cu> {
    let objects = driver.objects();
    let memory = objects.device_memory(ptr, 0).ok();
    let host = objects.host_memory(ptr, 0);
    let start = match (&memory, &host) {
        (Some((_, offset)), _) | (None, Some((_, offset))) => ptr - offset,
        _ => 0,
    };
    let len = memory.map(|(known, _)| known.buffer.len()).or(host.map(|(known, _)| known.len()));
    let kind = memory.map(|(known, _)| known.kind);
    let device = memory.map_or(0, |(known, _)| known.device);
    match name {
        1 => {
            let owned = matches!(kind, Some(Kind::Plain | Kind::Managed | Kind::Ipc));
            write(place, if owned { handle_of(device) } else { std::ptr::null_mut() })
        }
        2 => write(place, if memory.is_some() { 2_u32 } else { u32::from(host.is_some()) }),
        7 => {
            let id = memory.and_then(|(known, _)| known.buffer.allocation_id().ok().flatten());
            let id = objects.numbers.get(&start).copied().or(id);
            write(place, id.ok_or(Cu::INVALID_VALUE)?)
        }
        // The driver writes less than a word here, or a whole one: a caller must be ready for both.
        8 => write(place, u8::from(kind == Some(Kind::Managed))),
        9 => write(place, if memory.is_some() || host.is_some() { device as i32 } else { -2 }),
        10 => write(place, u32::from(kind == Some(Kind::Plain))),
        11 => write(place, start),
        12 => write(place, len.unwrap_or(0) as usize),
        // What was mapped is open to its own device alone.
        16 => {
            let open = memory.is_some_and(|(known, _)| {
                let device = driver.current().unwrap_or(usize::MAX);
                let opened = objects.opened.contains(&(start, device));
                known.kind != Kind::Virtual || device == known.device || opened
            });
            write(place, if open { 3_u32 } else { 0 })
        }
        _ => Err(Cu::INVALID_VALUE),
    }
}

/// A kernel parameter: words of device memory, as an address and a number of words.
pub(crate) fn words(
    driver: &Driver,
    params: &In<*mut c_void>,
    at: usize,
) -> Result<beeline::gpu::Buffer, Cu> {
    let (ptr, count): (u64, u64) = (read(params.at(at)?)?, read(params.at(at + 1)?)?);
    let len = count.checked_mul(4).ok_or(Cu::INVALID_VALUE)?;
    let objects = driver.objects();
    let (memory, offset) = objects.device_memory(ptr, len)?;
    let range = beeline_core::addr::ByteRange::new(offset, len).ok_or(Cu::INVALID_VALUE)?;
    memory.buffer.slice(range).map_err(|_| Cu::INVALID_VALUE)
}
