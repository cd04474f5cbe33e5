//! One request: a file's bytes to or from one place.
//!
//! Small requests take one lane and one copy. Larger reads are cut into pieces that the calling thread
//! and helpers take by turns, each overlapping its reads and its copies. Writes into what is in the page cache
//! are shared out likewise, through mappings; other writes overlap too, but one thread makes them: file
//! systems take the file's lock for each write.

mod out;
mod share;
mod staged;

use std::io;
use std::sync::Arc;

use beeline_core::addr::{ByteRange, DevicePtr};
use beeline_sys::file as sys;
use beeline_sys::mem::HostMem;

use super::buffers::{Place, Target};
use super::crew::Crew;
use super::handle::{Handle, Routes};
use super::lanes::{Copy, Lanes};
use super::status::{Failure, OpError, Outcome};
use out::write_device;
use share::Way;

pub(super) use share::Share;
pub(super) use staged::{Job, Piece};

/// Largest request that one copy serves.
const SINGLE_MAX: u64 = 128 << 10;
/// Largest request that is medium: shared by two threads, and not where others are active. Each copy costs the device
/// several microseconds beside its bytes, so pieces are not small; and what a CPU has just written is read from its
/// cache at half the rate of the link, so that more threads gain little.
const MEDIUM_MAX: u64 = 2 << 20;
const MEDIUM_THREADS: usize = 2;
const PIECE_MEDIUM: u64 = 256 << 10;
/// Most helpers of a larger read, and the threads of all requests together beyond which they gain nothing: one
/// core reads 7 GB/s out of the page cache.
const LARGE_HELPERS: usize = 5;
const LARGE_THREADS: usize = 12;
/// Four of these fill a lane.
const PIECE_LARGE: u64 = 1020 << 10;
/// The size from which a request has twice as many threads as the setting says; two of its pieces
/// fill a lane.
const HUGE_MIN: u64 = 64 << 20;
const PIECE_HUGE: u64 = (2 << 20) - (16 << 10);
/// Threads beyond which a link to one device is not filled any better.
const HUGE_THREADS: usize = 16;
/// Most and fewest bytes of a piece that is read past the page cache, and of an ordinary write.
const PIECE_DIRECT: u64 = 1 << 20;
const PIECE_DIRECT_MIN: u64 = 256 << 10;
const PIECE: u64 = 1 << 20;
/// Requests below this are read through the page cache without asking where their bytes are.
const PROBE_MIN: u64 = 64 << 10;
/// Alignment of pieces in a lane, enough for every drive.
const SEGMENT_ALIGN: u64 = 4096;

/// What one call needs of its session.
#[derive(Clone, Copy)]
pub(super) struct Means<'a> {
    pub(super) crew: &'a Arc<Crew>,
    /// Most threads of one request, the caller's included.
    pub(super) parallel: usize,
    pub(super) force_direct: bool,
}

/// Reads `len` bytes from `at` on; answers how many there were before the end of the file.
///
/// # Errors
/// What reading and copying say.
pub(super) fn read(
    means: Means<'_>,
    handle: &Arc<Handle>,
    target: &Target,
    at: u64,
    len: u64,
) -> Outcome<u64> {
    let lanes = match &target.place {
        Place::Host => return read_host(handle, target, at, len),
        Place::Device(lanes) => lanes,
    };
    if len == 0 {
        return Ok(0);
    }
    let plain = !means.force_direct && !handle.direct_only;
    if len <= SINGLE_MAX && plain {
        return read_single(handle, lanes, target.device_ptr(), at, len);
    }
    let way = Way::choose(means, handle, lanes, at, len);
    let active = means.crew.enter();
    let cold = matches!(way, Way::Asked(_));
    let most = means.parallel.saturating_sub(1);
    let helpers = match len {
        _ if most == 0 => 0,
        ..=MEDIUM_MAX if cold => most,
        ..=MEDIUM_MAX => active.alone_helpers(MEDIUM_THREADS - 1),
        HUGE_MIN.. => active.fair_helpers(2 * most + 1, HUGE_THREADS),
        _ if cold => active.fair_helpers(most, HUGE_THREADS),
        _ => active.fair_helpers(LARGE_HELPERS.min(most), LARGE_THREADS),
    };
    if !cold && len <= MEDIUM_MAX && helpers == 0 {
        // Beside others, one read and one copy cost least of all.
        return read_single(handle, lanes, target.device_ptr(), at, len);
    }
    let piece = match len {
        _ if cold => {
            PIECE_DIRECT.min((len / 4).next_multiple_of(SEGMENT_ALIGN)).max(PIECE_DIRECT_MIN)
        }
        ..=MEDIUM_MAX => piece_medium(len),
        HUGE_MIN.. => PIECE_HUGE,
        _ => PIECE_LARGE,
    };
    let range = ByteRange { start: at, len };
    let share = Share::new((handle, lanes), way, target.device_ptr(), range, piece);
    // Reads are never refused.
    share.run(means, helpers).map(Option::unwrap_or_default)
}

/// Bytes of a piece of a medium request.
const fn piece_medium(len: u64) -> u64 {
    if len <= 2 * PIECE_MEDIUM { PIECE_MEDIUM / 2 } else { PIECE_MEDIUM }
}

/// Writes `len` bytes to `at`; answers how many were written, less than `len` only where the file took
/// no more.
///
/// # Errors
/// What copying says, and writing where nothing was written.
pub(super) fn write(
    means: Means<'_>,
    handle: &Arc<Handle>,
    target: &Target,
    at: u64,
    len: u64,
) -> Outcome<u64> {
    if len == 0 {
        return Ok(0);
    }
    match &target.place {
        Place::Host => write_host(handle, target, at, len),
        Place::Device(lanes) => {
            let range = ByteRange { start: at, len };
            write_device(means, (handle, lanes), target.device_ptr(), range)
        }
    }
}

fn read_host(handle: &Handle, target: &Target, at: u64, len: u64) -> Outcome<u64> {
    let part = |done| target.ptr.pread(handle.data(), target.offset + done, len - done, at + done);
    let done = to_the_end(len, part).map_err(|error| failed("read", handle, at, len, &error))?;
    Routes::count(&handle.routes.host, done);
    Ok(done)
}

fn write_host(handle: &Handle, target: &Target, at: u64, len: u64) -> Outcome<u64> {
    let part = |done| target.ptr.pwrite(handle.data(), target.offset + done, len - done, at + done);
    let done = to_the_end(len, part).map_err(|error| failed("write", handle, at, len, &error))?;
    Routes::count(&handle.routes.written, done);
    Ok(done)
}

/// Moves `len` bytes by calls that may move fewer, each told how many are done; an error only where nothing was
/// moved before.
fn to_the_end(len: u64, mut part: impl FnMut(u64) -> io::Result<u64>) -> io::Result<u64> {
    let mut done = 0;
    while done < len {
        match part(done) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// One read, one copy.
fn read_single(handle: &Handle, lanes: &Lanes, to: DevicePtr, at: u64, len: u64) -> Outcome<u64> {
    let mut held = lanes.acquire()?;
    let n = read_cached(handle, held.lane()?.host(), 0, at, len)?;
    if n == 0 {
        return Ok(0);
    }
    if let Err(failure) = held.copy(Copy { into: true, device: to, at: 0, len: n }) {
        held.settle(Some(&failure));
        return Err(failure);
    }
    Routes::count(&handle.routes.cached, n);
    Ok(n)
}

/// Reads through the page cache into `memory` at `into`, until `len` bytes or the end of the file.
fn read_cached(handle: &Handle, memory: &HostMem, into: u64, at: u64, len: u64) -> Outcome<u64> {
    read_rest(handle, memory, into, len, at)
        .map_err(|error| failed("read", handle, at, len, &error))
}

/// Reads through the page cache until `len` bytes or the end of the file.
fn read_rest(handle: &Handle, memory: &HostMem, into: u64, len: u64, at: u64) -> io::Result<u64> {
    let mut done = 0;
    while done < len {
        match sys::pread(handle.data(), memory, into + done, len - done, at + done) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn failed(verb: &str, handle: &Handle, at: u64, len: u64, error: &io::Error) -> Failure {
    let path = handle.file.path().display();
    if handle.direct_only && error.kind() == io::ErrorKind::InvalidInput {
        let text = format!(
            "{verb} {len} bytes at {at} of {path}: it is open for direct I/O and could not be opened \
             again, so offsets and lengths must be multiples of its block"
        );
        return Failure::new(OpError::INVALID_FILE_OPEN_FLAG, text);
    }
    Failure::io(format_args!("{verb} {len} bytes at {at} of {path}"), error)
}
