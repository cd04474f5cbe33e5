//! Reads and writes: at once, in batches, in stream order.

use std::time::Duration;

use beeline::cufile::{Entry, Failure, ForeignStream, Late, Operation, UserCell, library};

use crate::driver::user;
use crate::ffi::{In, Out, bytes, status, value};
use crate::layout::{CUfileError, IoEvent, IoParams, IoVec, Timespec};

/// Most buffers of one vector, as the system's own calls have it.
const IOV_MAX: usize = 1024;
/// Most entries looked at in one submission.
const ENTRIES_MAX: u32 = 1 << 16;

#[unsafe(no_mangle)]
extern "C" fn cuFileRead(
    handle: usize,
    ptr: u64,
    size: usize,
    file_offset: i64,
    ptr_offset: i64,
) -> isize {
    bytes("cuFileRead", || {
        let offsets = (file_offset, ptr_offset);
        library().transfer(Operation::Read, handle, user(ptr), size as u64, offsets)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWrite(
    handle: usize,
    ptr: u64,
    size: usize,
    file_offset: i64,
    ptr_offset: i64,
) -> isize {
    bytes("cuFileWrite", || {
        let offsets = (file_offset, ptr_offset);
        library().transfer(Operation::Write, handle, user(ptr), size as u64, offsets)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileReadv(
    handle: usize,
    iov: In<IoVec>,
    count: usize,
    file_offset: i64,
    flags: u32,
) -> isize {
    bytes("cuFileReadv", || vector(Operation::Read, handle, &iov, count, file_offset, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWritev(
    handle: usize,
    iov: In<IoVec>,
    count: usize,
    file_offset: i64,
    flags: u32,
) -> isize {
    bytes("cuFileWritev", || vector(Operation::Write, handle, &iov, count, file_offset, flags))
}

fn vector(
    operation: Operation,
    handle: usize,
    iov: &In<IoVec>,
    count: usize,
    file_offset: i64,
    flags: u32,
) -> Result<u64, Failure> {
    if count > IOV_MAX || flags != 0 {
        return Err(value(format!("{count} buffers ({IOV_MAX} at most), flags {flags} (0)")));
    }
    let parts = iov.all(count)?;
    let parts: Vec<_> = parts.iter().map(|part| (user(part.base), part.len as u64)).collect();
    library().transfer_many(operation, handle, &parts, file_offset)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBatchIOSetUp(batch: Out<usize>, entries: u32) -> CUfileError {
    status("cuFileBatchIOSetUp", || {
        batch.check()?;
        batch.set(library().set_up_batch(entries)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBatchIOSubmit(
    batch: usize,
    count: u32,
    params: In<IoParams>,
    _flags: u32,
) -> CUfileError {
    status("cuFileBatchIOSubmit", || {
        if count == 0 || count > ENTRIES_MAX {
            return Err(value(format!("a submission of {count} entries")));
        }
        let params = params.all(count as usize)?;
        let entries = params.iter().map(entry).collect::<Result<Vec<_>, _>>()?;
        library().submit(batch, &entries)
    })
}

fn entry(params: &IoParams) -> Result<Entry, Failure> {
    let operation = match (params.mode, params.opcode) {
        (1, 0) => Operation::Read,
        (1, 1) => Operation::Write,
        (mode, opcode) => {
            return Err(value(format!("an entry of mode {mode} and opcode {opcode}")));
        }
    };
    Ok(Entry {
        cookie: params.cookie,
        handle: params.handle,
        operation,
        ptr: user(params.ptr),
        file_offset: params.file_offset,
        ptr_offset: params.ptr_offset,
        size: params.size as u64,
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBatchIOGetStatus(
    batch: usize,
    least: u32,
    count: Out<u32>,
    events: Out<IoEvent>,
    timeout: In<Timespec>,
) -> CUfileError {
    status("cuFileBatchIOGetStatus", || {
        let most = count.get()?;
        events.check()?;
        let timeout = timeout.get().ok().map(duration).transpose()?;
        let found = library().events(batch, (least, most), timeout)?;
        let event = |event: &beeline::cufile::Event| IoEvent {
            cookie: event.cookie,
            status: event.status.0,
            ret: event.ret,
        };
        let found: Vec<IoEvent> = found.iter().map(event).collect();
        events.set_all(&found)?;
        count.set(u32::try_from(found.len()).unwrap_or(most))
    })
}

fn duration(time: Timespec) -> Result<Duration, Failure> {
    match (u64::try_from(time.seconds), u32::try_from(time.nanos)) {
        (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => Ok(Duration::new(seconds, nanos)),
        _ => Err(value(format!("a timeout of {} s and {} ns", time.seconds, time.nanos))),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBatchIOCancel(batch: usize) -> CUfileError {
    status("cuFileBatchIOCancel", || library().cancel(batch))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBatchIODestroy(batch: usize) {
    status("cuFileBatchIODestroy", || {
        library().destroy(batch);
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn cuFileReadAsync(
    handle: usize,
    ptr: u64,
    size: Out<usize>,
    file_offset: Out<i64>,
    ptr_offset: Out<i64>,
    moved: Out<isize>,
    stream: usize,
) -> CUfileError {
    status("cuFileReadAsync", || {
        let late = late(&size, &file_offset, &ptr_offset, &moved)?;
        library().queue(Operation::Read, handle, user(ptr), late, foreign(stream))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWriteAsync(
    handle: usize,
    ptr: u64,
    size: Out<usize>,
    file_offset: Out<i64>,
    ptr_offset: Out<i64>,
    moved: Out<isize>,
    stream: usize,
) -> CUfileError {
    status("cuFileWriteAsync", || {
        let late = late(&size, &file_offset, &ptr_offset, &moved)?;
        library().queue(Operation::Write, handle, user(ptr), late, foreign(stream))
    })
}

fn late(
    size: &Out<usize>,
    file_offset: &Out<i64>,
    ptr_offset: &Out<i64>,
    moved: &Out<isize>,
) -> Result<Late, Failure> {
    let null = || value("an argument is a null pointer");
    Ok(Late {
        // SAFETY: the caller keeps its variables until the stream has passed the request (cuFile API).
        size: unsafe { UserCell::new(size.raw()) }.ok_or_else(null)?,
        // SAFETY: as above.
        file_offset: unsafe { UserCell::new(file_offset.raw()) }.ok_or_else(null)?,
        // SAFETY: as above.
        ptr_offset: unsafe { UserCell::new(ptr_offset.raw()) }.ok_or_else(null)?,
        // SAFETY: as above.
        moved: unsafe { UserCell::new(moved.raw()) }.ok_or_else(null)?,
    })
}

const fn foreign(stream: usize) -> (ForeignStream, usize) {
    // SAFETY: the caller passes a stream of its own, which it keeps until the request has ended.
    (unsafe { ForeignStream::new(stream) }, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStreamRegister(stream: usize, flags: u32) -> CUfileError {
    status("cuFileStreamRegister", || library().register_stream(stream, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStreamDeregister(stream: usize) -> CUfileError {
    status("cuFileStreamDeregister", || library().deregister_stream(stream))
}
