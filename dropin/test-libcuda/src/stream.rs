//! Streams, events, copies and stream memory operations.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline::gpu::{Compare, Stream};

use crate::capture::Wait;
use crate::device::{context_index, handle_of};
use crate::ffi::{Cu, Out, export};
use crate::memory::borrow;
use crate::state::{Driver, Recorded, driver, lock};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// As on an H200.
const PRIORITY_GREATEST: i32 = -5;

export! {
    fn cuStreamCreate(stream: Out<u64>, flags: u32) {
        stream.set(make(flags)?)
    }

    fn cuStreamCreateWithPriority(stream: Out<u64>, flags: u32, priority: i32) {
        let made = make(flags)?;
        // Clamped, as drivers do.
        driver()?.objects().priorities.insert(made, priority.clamp(PRIORITY_GREATEST, 0));
        stream.set(made)
    }

    fn cuStreamGetPriority(stream: u64, priority: Out<i32>) {
        let driver = driver()?;
        driver.stream(stream)?;
        priority.set(driver.objects().priorities.get(&stream).copied().unwrap_or(0))
    }

    fn cuStreamGetFlags(stream: u64, flags: Out<u32>) {
        let driver = driver()?;
        driver.apart(stream)?;
        flags.set(u32::from(driver.objects().apart.contains(&stream)))
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        driver()?.current()?;
        least.set(0)?;
        greatest.set(PRIORITY_GREATEST)
    }

    fn cuStreamQuery(stream: u64) {
        let driver = driver()?;
        driver.current_unsafe()?;
        let (index, queue) = driver.apart(stream)?;
        let key = driver.key(stream)?;
        // One event for as long as nothing else is queued: a caller that asks again and again neither fills the queue nor
        // waits for what it asked itself.
        let queued = driver.objects().queued.get(&key).copied().unwrap_or(0);
        let known = driver.objects().asked.get(&key).filter(|(_, at)| *at == queued).cloned();
        let (event, at) = match known {
            Some(known) => known,
            None => (queue.record().map_err(|error| driver.code(index, &error))?, queued),
        };
        let done = event.is_done().map_err(|error| driver.code(index, &error))?;
        driver.objects().asked.insert(key, (event, at));
        if done {
            return Ok(());
        }
        Err(Cu::NOT_READY)
    }

    fn cuStreamSynchronize(stream: u64) {
        let driver = driver()?;
        driver.current_unsafe()?;
        let (index, stream) = driver.apart(stream)?;
        finish(driver, index, &stream)
    }

    fn cuCtxSynchronize() {
        let driver = driver()?;
        let current = driver.current()?;
        driver.quiet(current)?;
        driver.guard()?;
        let all: Vec<Arc<Stream>> = {
            let objects = driver.objects();
            let of = |(device, stream): &(usize, Arc<Stream>)| {
                (*device == current).then(|| Arc::clone(stream))
            };
            objects.streams.values().filter_map(of).collect()
        };
        all.iter().try_for_each(|stream| finish(driver, current, stream))
    }

    fn cuMemcpyHtoD_v2(dst: u64, src: *const c_void, len: usize) {
        let (index, stream) = waited_for(driver()?)?;
        host_copy(driver()?, dst, src.cast_mut(), len as u64, 0, true)?;
        finish(driver()?, index, &stream)
    }

    fn cuMemcpyDtoH_v2(dst: *mut c_void, src: u64, len: usize) {
        let (index, stream) = waited_for(driver()?)?;
        host_copy(driver()?, src, dst, len as u64, 0, false)?;
        finish(driver()?, index, &stream)
    }

    fn cuMemsetD8_v2(dst: u64, value: u8, len: usize) {
        let (index, stream) = waited_for(driver()?)?;
        match cuMemsetD8Async(dst, value, len, 0) { 0 => {}, code => return Err(Cu(code)) }
        finish(driver()?, index, &stream)
    }

    fn cuStreamDestroy_v2(stream: u64) {
        driver()?.guard()?;
        if stream > 2 { lock(&driver()?.captures).destroyed(stream)?; }
        driver()?.objects().apart.remove(&stream);
        driver()?.objects().asked.remove(&stream);
        driver()?.objects().queued.remove(&stream);
        driver()?.objects().priorities.remove(&stream);
        driver()?.objects().streams.remove(&stream).ok_or(Cu::INVALID_HANDLE)?;
        driver()?.objects().ids.remove(&stream);
        driver()?.objects().destroyed.push(stream);
        Ok(())
    }

    fn cuStreamGetId(stream: u64, id: Out<u64>) {
        let driver = driver()?;
        let known = driver.objects().ids.get(&stream).copied().ok_or(Cu::INVALID_HANDLE)?;
        driver.unasked(stream)?;
        id.set(known)
    }

    fn cuStreamGetCtx(stream: u64, context: Out<*mut c_void>) {
        let index = match driver()?.objects().streams.get(&stream) {
            Some((index, _)) => *index,
            None if stream <= 2 => driver()?.current()?,
            None => return Err(Cu::INVALID_HANDLE),
        };
        context.set(handle_of(index))
    }

    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) {
        let driver = driver()?;
        driver.stream(stream)?;
        if flags != 0 { return Err(Cu::INVALID_VALUE); }
        let recorded = driver.objects().events.get(&event).ok_or(Cu::INVALID_HANDLE)?.1.clone();
        let place = driver.place(stream)?;
        let waits = lock(&driver.captures).wait(place, &recorded)?;
        match (waits, recorded) {
            (Wait::Outside, Recorded::At(event)) => {
                driver.submit(stream, move |stream| stream.wait_event(&event))
            }
            // An event that was never recorded is done.
            _ => Ok(()),
        }
    }

    fn cuEventCreate(event: Out<u64>, flags: u32) {
        let driver = driver()?;
        let index = driver.current()?;
        if flags > 7 { return Err(Cu::INVALID_VALUE); }
        let handle = driver.handle();
        driver.objects().events.insert(handle, (index, Recorded::Never));
        event.set(handle)
    }

    fn cuEventDestroy_v2(event: u64) {
        driver()?.objects().events.remove(&event).map(drop).ok_or(Cu::INVALID_HANDLE)
    }

    fn cuEventRecord(event: u64, stream: u64) {
        let driver = driver()?;
        let (index, queue) = driver.stream(stream)?;
        let known = driver.objects().events.get(&event).map(|(device, _)| *device);
        if known.ok_or(Cu::INVALID_HANDLE)? != index { return Err(Cu::INVALID_HANDLE); }
        let place = driver.place(stream)?;
        let inside = lock(&driver.captures).record(place)?;
        let recorded = match inside {
            Some(inside) => inside,
            None => {
                *driver.objects().queued.entry(place.key).or_default() += 1;
                Recorded::At(queue.record().map_err(|error| driver.code(index, &error))?)
            }
        };
        driver.objects().events.insert(event, (index, recorded));
        Ok(())
    }

    fn cuEventQuery(event: u64) {
        let driver = driver()?;
        driver.current()?;
        let known = driver.objects().events.get(&event).cloned();
        let (index, recorded) = known.ok_or(Cu::INVALID_HANDLE)?;
        lock(&driver.captures).ask(&recorded)?;
        driver.guard()?;
        let Recorded::At(recorded) = recorded else { return Ok(()) };
        match recorded.is_done() {
            Ok(true) => Ok(()),
            Ok(false) => Err(Cu::NOT_READY),
            Err(error) => Err(driver.code(index, &error)),
        }
    }

    fn cuMemcpyHtoDAsync_v2(dst: u64, src: *const c_void, len: usize, stream: u64) {
        host_copy(driver()?, dst, src.cast_mut(), len as u64, stream, true)
    }

    fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: u64, len: usize, stream: u64) {
        host_copy(driver()?, src, dst, len as u64, stream, false)
    }

    fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, len: usize, stream: u64) {
        if dst.abs_diff(src) < len as u64 { return Err(Cu::INVALID_VALUE); }
        device_copy(driver()?, dst, src, len as u64, stream, |to, from| to == from)
    }

    fn cuMemcpyPeerAsync(
        dst: u64, to: *mut c_void, src: u64, from: *mut c_void, len: usize, stream: u64,
    ) {
        let contexts = (context_index(to)?, context_index(from)?);
        device_copy(driver()?, dst, src, len as u64, stream, |to, from| (to, from) == contexts)
    }

    fn cuMemsetD8Async(dst: u64, value: u8, len: usize, stream: u64) {
        let driver = driver()?;
        let (memory, offset) = {
            let objects = driver.objects();
            let (memory, offset) = objects.device_memory(dst, len as u64)?;
            (memory.buffer.clone(), offset)
        };
        driver.submit(stream, move |stream| stream.fill(&memory, offset, len as u64, value))
    }

    fn cuStreamWriteValue32_v2(stream: u64, addr: u64, value: u32, flags: u32) {
        if flags != 0 { return Err(Cu::INVALID_VALUE); }
        word(driver()?, stream, addr, Word::Write(value))
    }

    fn cuStreamWriteValue64_v2(stream: u64, addr: u64, value: u64, flags: u32) {
        if flags != 0 || !addr.is_multiple_of(8) { return Err(Cu::INVALID_VALUE); }
        // The simulated device writes half a word at a time, the high half last.
        word(driver()?, stream, addr, Word::Write(value as u32))?;
        word(driver()?, stream, addr + 4, Word::Write((value >> 32) as u32))
    }

    fn cuStreamWaitValue64_v2(stream: u64, addr: u64, value: u64, flags: u32) {
        if !addr.is_multiple_of(8) { return Err(Cu::INVALID_VALUE); }
        // Halves can be compared one after the other for equality alone.
        if flags != 1 { return Err(Cu::NOT_SUPPORTED); }
        word(driver()?, stream, addr + 4, Word::Wait((value >> 32) as u32, Compare::Equal))?;
        word(driver()?, stream, addr, Word::Wait(value as u32, Compare::Equal))
    }

    fn cuStreamWaitValue32_v2(stream: u64, addr: u64, value: u32, flags: u32) {
        let compare = match flags {
            0 => Compare::GreaterOrEqual,
            1 => Compare::Equal,
            2 => Compare::AnyBit,
            3 if !driver()?.settings.lacks("nor") => Compare::Nor,
            3 => return Err(Cu::NOT_SUPPORTED),
            _ => return Err(Cu::INVALID_VALUE),
        };
        word(driver()?, stream, addr, Word::Wait(value, compare))
    }
}

/// A copy between `host` and device memory at `ptr`; `into` the device or out of it.
fn host_copy(
    driver: &Driver,
    ptr: u64,
    host: *mut c_void,
    len: u64,
    stream: u64,
    into: bool,
) -> Result<(), Cu> {
    let (index, queue) = driver.stream(stream)?;
    let (memory, at, registered) = {
        let objects = driver.objects();
        let (memory, at) = objects.device_memory(ptr, len)?;
        let registered = objects.host_memory(host.addr() as u64, len);
        (memory.buffer.clone(), at, registered.map(|(pinned, from)| (pinned.clone(), from)))
    };
    driver.copies.fetch_add(1, Ordering::Relaxed);
    let pageable = registered.is_none();
    let (pinned, from) = match registered {
        Some(known) => known,
        None => (borrow(driver, index, host, len as usize)?, 0),
    };
    driver.submit(stream, move |stream| match into {
        true => stream.copy_to_device(&memory, at, &pinned, from, len),
        false => stream.copy_to_host(&pinned, from, &memory, at, len),
    })?;
    // In a graph it is the program's promise that the memory is there at every replay.
    let place = driver.place(stream)?;
    if pageable && !lock(&driver.captures).has(place) {
        // The memory may be gone after the call, so the copy is made now.
        driver.pageable.fetch_add(1, Ordering::Relaxed);
        finish(driver, index, &queue)?;
    }
    Ok(())
}

/// The legacy stream, for a call that waits for it: allowed beside the capture of a stream that does not.
fn waited_for(driver: &Driver) -> Result<(usize, Arc<Stream>), Cu> {
    driver.apart(0)
}

fn finish(driver: &Driver, index: usize, stream: &Stream) -> Result<(), Cu> {
    let deadline = Instant::now() + Duration::from_secs(60);
    stream.synchronize(deadline).map_err(|error| driver.code(index, &error))
}

/// Queues a copy between device memories, where `fits` says so of their devices.
fn device_copy(
    driver: &Driver,
    dst: u64,
    src: u64,
    len: u64,
    stream: u64,
    fits: impl FnOnce(usize, usize) -> bool,
) -> Result<(), Cu> {
    let (to, from) = {
        let objects = driver.objects();
        let (to, to_at) = objects.device_memory(dst, len)?;
        let (from, from_at) = objects.device_memory(src, len)?;
        ((to.clone(), to_at), (from.clone(), from_at))
    };
    if !fits(to.0.device, from.0.device) {
        return Err(Cu::INVALID_VALUE);
    }
    driver.copies.fetch_add(1, Ordering::Relaxed);
    driver.submit(stream, move |stream| {
        stream.copy_on_device(&to.0.buffer, to.1, &from.0.buffer, from.1, len)
    })
}

#[derive(Clone, Copy)]
enum Word {
    Write(u32),
    Wait(u32, Compare),
}

fn word(driver: &Driver, stream: u64, addr: u64, operation: Word) -> Result<(), Cu> {
    driver.stream(stream)?;
    if driver.settings.lacks("memops") {
        return Err(Cu::NOT_SUPPORTED);
    }
    let (device, host) = {
        let objects = driver.objects();
        let device = objects.device_memory(addr, 4).ok();
        let host = objects.host_memory(addr, 4);
        (
            device.map(|(memory, at)| (memory.buffer.clone(), at)),
            host.map(|(memory, at)| (memory.clone(), at)),
        )
    };
    if device.is_none() && host.is_none() {
        return Err(Cu::INVALID_VALUE);
    }
    driver.submit(stream, move |stream| match (operation, &device, &host) {
        (Word::Write(value), Some((memory, at)), _) => stream.write_value(memory, *at, value),
        (Word::Write(value), None, Some((memory, at))) => {
            stream.write_host_value(memory, *at, value)
        }
        (Word::Wait(value, compare), Some((memory, at)), _) => {
            stream.wait_value(memory, *at, value, compare)
        }
        (Word::Wait(value, compare), None, Some((memory, at))) => {
            stream.wait_host_value(memory, *at, value, compare)
        }
        (_, None, None) => Ok(()),
    })
}

/// A stream of the current device.
fn make(flags: u32) -> Result<u64, Cu> {
    let driver = driver()?;
    let index = driver.current()?;
    if flags > 1 {
        return Err(Cu::INVALID_VALUE);
    }
    let made = driver.devices[index].gpu.stream().map_err(|e| driver.code(index, &e))?;
    let id = driver.handle();
    let mut objects = driver.objects();
    let again = if driver.settings.reuse { objects.destroyed.pop() } else { None };
    let handle = again.unwrap_or(id);
    objects.ids.insert(handle, id);
    if flags & NON_BLOCKING != 0 {
        objects.apart.insert(handle);
    }
    objects.streams.insert(handle, (index, Arc::new(made)));
    Ok(handle)
}
