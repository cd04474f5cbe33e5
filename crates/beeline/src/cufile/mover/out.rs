//! Writes out of the device.

use std::collections::VecDeque;
use std::io;

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::Mark;
use beeline_sys::file as sys;

use super::super::handle::Handle;
use super::super::lanes::{Copy, InUse, Lanes};
use super::super::status::Outcome;
use super::{IN_FLIGHT, PIECE, failed};

/// Writes out of the device: the next piece is copied out while one is written.
pub(super) fn write_device(
    handle: &Handle,
    lanes: &Lanes,
    from: DevicePtr,
    at: u64,
    len: u64,
) -> Outcome<u64> {
    let mut held = lanes.acquire()?;
    let outcome = write_pieces(handle, &mut held, from, at, len);
    // Where it failed or came to an early end, copies may still be under way.
    held.settle(outcome.as_ref().err());
    outcome
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
        return write_cached(handle, held.lane()?, 0, at, len)
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
        held.wait(mark)?;
        let written = write_cached(handle, held.lane()?, in_lane, at + done, n);
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

fn write_cached(
    handle: &Handle,
    lane: &beeline_sys::cuda::Lane,
    from: u64,
    at: u64,
    len: u64,
) -> io::Result<u64> {
    let mut done = 0;
    while done < len {
        match sys::pwrite(handle.data(), lane.host(), from + done, len - done, at + done) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
