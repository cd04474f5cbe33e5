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
    one("cuFileRead", Operation::Read, handle, (ptr, size), (file_offset, ptr_offset))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWrite(
    handle: usize,
    ptr: u64,
    size: usize,
    file_offset: i64,
    ptr_offset: i64,
) -> isize {
    one("cuFileWrite", Operation::Write, handle, (ptr, size), (file_offset, ptr_offset))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileReadv(
    handle: usize,
    iov: In<IoVec>,
    count: usize,
    file_offset: i64,
    flags: u32,
) -> isize {
    vector("cuFileReadv", Operation::Read, handle, (&iov, count), file_offset, flags)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWritev(
    handle: usize,
    iov: In<IoVec>,
    count: usize,
    file_offset: i64,
    flags: u32,
) -> isize {
    vector("cuFileWritev", Operation::Write, handle, (&iov, count), file_offset, flags)
}

fn one(
    name: &str,
    operation: Operation,
    handle: usize,
    (ptr, size): (u64, usize),
    offsets: (i64, i64),
) -> isize {
    bytes(name, || library().transfer(operation, handle, user(ptr), size as u64, offsets))
}

fn vector(
    name: &str,
    operation: Operation,
    handle: usize,
    (iov, count): (&In<IoVec>, usize),
    file_offset: i64,
    flags: u32,
) -> isize {
    bytes(name, || {
        if count > IOV_MAX || flags != 0 {
            let text = format!("{count} buffers ({IOV_MAX} at most), flags {flags} (0)");
            return Err(value(text));
        }
        let parts = iov.all(count)?;
        let parts: Vec<_> = parts.iter().map(|part| (user(part.base), part.len as u64)).collect();
        library().transfer_many(operation, handle, &parts, file_offset)
    })
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
    let places = Places { size, file_offset, ptr_offset, moved };
    queued("cuFileReadAsync", Operation::Read, handle, ptr, &places, stream)
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
    let places = Places { size, file_offset, ptr_offset, moved };
    queued("cuFileWriteAsync", Operation::Write, handle, ptr, &places, stream)
}

/// Where the late arguments of a stream-ordered request stand.
struct Places {
    size: Out<usize>,
    file_offset: Out<i64>,
    ptr_offset: Out<i64>,
    moved: Out<isize>,
}

impl Places {
    fn late(&self) -> Result<Late, Failure> {
        let null = || value("an argument is a null pointer");
        Ok(Late {
            // SAFETY: the caller keeps its variables until the stream has passed the request (cuFile API).
            size: unsafe { UserCell::new(self.size.raw()) }.ok_or_else(null)?,
            // SAFETY: as above.
            file_offset: unsafe { UserCell::new(self.file_offset.raw()) }.ok_or_else(null)?,
            // SAFETY: as above.
            ptr_offset: unsafe { UserCell::new(self.ptr_offset.raw()) }.ok_or_else(null)?,
            // SAFETY: as above.
            moved: unsafe { UserCell::new(self.moved.raw()) }.ok_or_else(null)?,
        })
    }
}

fn queued(
    name: &str,
    operation: Operation,
    handle: usize,
    ptr: u64,
    places: &Places,
    stream: usize,
) -> CUfileError {
    status(name, || {
        let late = places.late()?;
        library().queue(operation, handle, user(ptr), late, foreign(stream))
    })
}

const fn foreign(stream: usize) -> (ForeignStream, usize) {
    // SAFETY: the caller passes a stream of its own, which it keeps until the request has ended; to be registered, during the
    // call.
    (unsafe { ForeignStream::new(stream) }, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStreamRegister(stream: usize, flags: u32) -> CUfileError {
    status("cuFileStreamRegister", || library().register_stream(foreign(stream), flags))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStreamDeregister(stream: usize) -> CUfileError {
    status("cuFileStreamDeregister", || library().deregister_stream(stream))
}
