//! Writes out of the device.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use beeline_core::addr::{ByteRange, DevicePtr};
use beeline_sys::cuda::Mark;
use beeline_sys::file as sys;
use beeline_sys::mem::HostMem;

use super::super::handle::{Handle, Routes};
use super::super::lanes::{Copy, InUse, Lanes};
use super::super::mapped::Mapped;
use super::super::status::Outcome;
use super::share::{Share, Way};
use super::{HUGE_MIN, HUGE_THREADS, MEDIUM_MAX, Means, PIECE, SINGLE_MAX, failed, piece_medium};

/// Bytes of a piece of a large mapped write.
const MAPPED_PIECE: u64 = 512 << 10;
/// How long a thread looks at a copy before it naps.
const LOOK: Duration = Duration::from_micros(25);
/// Pieces of an ordinary write that are copied ahead.
const IN_FLIGHT: usize = 4;
/// Most helpers of a mapped write. One thread fills the page cache with 5 to 10 GB/s.
const HELPERS_MEDIUM: usize = 1;
const HELPERS: usize = 3;
const HELPERS_HUGE: usize = 7;

/// Writes out of the device: through mappings by several threads where that is quicker, else by this one.
pub(super) fn write_device(
    means: Means<'_>,
    (handle, lanes): (&Arc<Handle>, &Arc<Lanes>),
    from: DevicePtr,
    range: ByteRange,
) -> Outcome<u64> {
    // Counted as long as the request takes, whichever way it goes.
    let writing = handle.mapped.as_ref().map(Mapped::enter);
    let crowded = writing.as_ref().map(|writing| writing.crowded);
    if let Some(crowded) = crowded
        && write_mapped(means, (handle, lanes), from, range, crowded)?
    {
        Routes::count(&handle.routes.mapped, range.len);
        return Ok(range.len);
    }
    let mut held = lanes.acquire()?;
    let outcome = write_pieces(handle, &mut held, from, range.start, range.len);
    // Where it failed or came to an early end, copies may still be under way.
    held.settle(outcome.as_ref().err());
    Routes::count(&handle.routes.written, *outcome.as_ref().unwrap_or(&0));
    outcome
}

/// Writes through mappings; false where that is not worth it, not possible, or did not come to its end.
fn write_mapped(
    means: Means<'_>,
    (handle, lanes): (&Arc<Handle>, &Arc<Lanes>),
    from: DevicePtr,
    range: ByteRange,
    crowded: bool,
) -> Outcome<bool> {
    let small = range.len <= SINGLE_MAX;
    if means.parallel <= 1 || (small && !crowded) {
        return Ok(false);
    }
    let active = (!small).then(|| means.crew.enter());
    let helpers = active.as_ref().map_or(0, |active| match range.len {
        ..=MEDIUM_MAX => active.alone_helpers(HELPERS_MEDIUM),
        HUGE_MIN.. => active.fair_helpers(HELPERS_HUGE.min(2 * means.parallel - 1), HUGE_THREADS),
        _ => active.fair_helpers(HELPERS.min(means.parallel - 1), HUGE_THREADS),
    });
    let fits = |mapped: &Mapped| mapped.fits(handle.data(), &handle.file, range);
    if (helpers == 0 && !crowded) || !handle.mapped.as_ref().is_some_and(fits) {
        return Ok(false);
    }
    if helpers == 0 && range.len <= PIECE {
        return write_single(handle, lanes, from, range);
    }
    let piece = if range.len <= MEDIUM_MAX { piece_medium(range.len) } else { MAPPED_PIECE };
    let share = Share::new((handle, lanes), Way::Write, from, range, piece);
    let whole = share.run(means, helpers)?.is_some();
    // Cut meanwhile: what was written through a mapping is gone, and `write` would have made the file longer.
    Ok(whole && Mapped::is_inside(handle.data(), range))
}

/// One copy, one fill.
fn write_single(
    handle: &Handle,
    lanes: &Lanes,
    from: DevicePtr,
    range: ByteRange,
) -> Outcome<bool> {
    let mut held = lanes.acquire()?;
    if let Err(failure) = held.copy(Copy { into: false, device: from, at: 0, len: range.len }) {
        held.settle(Some(&failure));
        return Err(failure);
    }
    Ok(fill(handle, held.lane()?.host(), 0, range, Some(range.len)).is_ok())
}

/// Copies a part of a request from `memory` at `from` into the file's pages. The beginning of a request's `first`
/// part, with the length of all, is written the ordinary way before, where that is due. Before, as `write` does: a
/// file that is cut meanwhile is then too short for the rest, which is an error, and never grows around a hole.
pub(super) fn fill(
    handle: &Handle,
    memory: &HostMem,
    from: u64,
    range: ByteRange,
    first: Option<u64>,
) -> io::Result<()> {
    let Some(mapped) = &handle.mapped else { return Err(io::ErrorKind::Unsupported.into()) };
    let owed = first.map_or(0, |whole| mapped.owed(range.len, whole <= SINGLE_MAX));
    if owed > 0 && sys::pwrite(handle.data(), memory, from, owed, range.start)? < owed {
        return Err(io::ErrorKind::WriteZero.into());
    }
    mapped.fill(handle.data(), (range.start, range.len), memory, from)
}

fn write_pieces(
    handle: &Handle,
    held: &mut InUse<'_>,
    from: DevicePtr,
    at: u64,
    len: u64,
) -> Outcome<u64> {
    let piece = PIECE;
    let segments = usize::try_from(held.lane()?.room() / piece).unwrap_or(1).clamp(1, IN_FLIGHT);
    let mut flying: VecDeque<(u64, u64, Mark)> = VecDeque::with_capacity(segments);
    let (mut started, mut done, mut place) = (0, 0, 0);
    if len <= piece {
        held.copy(Copy { into: false, device: from, at: 0, len })?;
        return write_cached(handle, held.lane()?.host(), 0, at, len)
            .map_err(|error| failed("write", handle, at, len, &error));
    }
    while done < len {
        while started < len && flying.len() < segments {
            let n = piece.min(len - started);
            let to = place as u64 * piece;
            place = (place + 1) % segments;
            let source = from.checked_add(started).unwrap_or(from);
            let copy = Copy { into: false, device: source, at: to, len: n };
            flying.push_back((to, n, held.start(copy)?));
            started += n;
        }
        let Some((in_lane, n, mark)) = flying.pop_front() else { break };
        held.wait(mark, LOOK)?;
        let written = write_cached(handle, held.lane()?.host(), in_lane, at + done, n);
        match written {
            Ok(written) => {
                done += written;
                if written < n {
                    return Ok(done);
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(error) => return Err(failed("write", handle, at + done, n, &error)),
        }
    }
    Ok(done)
}

pub(super) fn write_cached(
    handle: &Handle,
    memory: &HostMem,
    from: u64,
    at: u64,
    len: u64,
) -> io::Result<u64> {
    let mut done = 0;
    while done < len {
        match sys::pwrite(handle.data(), memory, from + done, len - done, at + done) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
