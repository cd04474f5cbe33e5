//! Bytes over a path before anybody relies on it.

use std::time::Instant;

use beeline_core::reason::{Code, Reason};
use beeline_sys::mem::HostMem;

use super::Options;
use crate::error::{Error, Result};
use crate::gpu::Gpu;

/// Copies of the source's device before the one over the path; tests count them to break that one.
#[cfg(test)]
pub(super) const COPIES_BEFORE: u64 = 1;

/// Why copies from `from` to `to` cannot be trusted to go directly; `None` where they can.
pub(super) fn direct(from: &Gpu, to: &Gpu, options: &Options) -> Option<Reason> {
    match from.reach(to) {
        Ok(true) => {}
        Ok(false) => {
            let detail = format!("{} to {}", from.id(), to.id());
            return Some(Reason::with(Code::P2pNotCapable, detail));
        }
        Err(error) => return Some(Reason::with(Code::P2pNotCapable, error.to_string())),
    }
    match transfer(from, to, options) {
        Ok(None) => None,
        Ok(Some(at)) => {
            let bytes = options.verify_bytes;
            let detail = format!("the first wrong byte of {bytes} is at offset {at}");
            Some(Reason::with(Code::ProbeTransfer, detail))
        }
        Err(error) => Some(Reason::with(Code::ProbeTransfer, format!("{error:#}"))),
    }
}

/// One pattern over the path; where the first byte differs. Whatever is still under way at the deadline
/// keeps its memory and its stream.
fn transfer(from: &Gpu, to: &Gpu, options: &Options) -> Result<Option<u64>> {
    let deadline = Instant::now() + options.verify_timeout;
    let len = options.verify_bytes.max(8);
    let (src, dst) = (from.alloc(len)?, to.alloc(len)?);
    let (host, back) = (from.pin(len)?, to.pin(len)?);
    let words = len / 8;
    for at in 0..words {
        host.mem().store_u64(at * 8, word(at))?;
    }
    // The target holds something else, so that bytes that never came show.
    let behind = to.stream()?;
    behind.fill(&dst, 0, len, 0x5a)?;
    behind.synchronize(deadline)?;
    let stream = from.stream()?;
    stream.copy_to_device(&src, 0, &host, 0, len)?;
    stream.copy_on_device(&dst, 0, &src, 0, len)?;
    stream.synchronize(deadline)?;
    behind.copy_to_host(&back, 0, &dst, 0, len)?;
    behind.synchronize(deadline)?;
    differs(back.mem(), words)
}

fn differs(mem: &HostMem, words: u64) -> Result<Option<u64>> {
    for at in 0..words {
        let found = mem.load_u64(at * 8).map_err(Error::from)?;
        if found != word(at) {
            let byte = u64::from((found ^ word(at)).trailing_zeros() / 8);
            return Ok(Some(at * 8 + byte));
        }
    }
    Ok(None)
}

/// Depends on the place, so that shifted bytes show.
const fn word(at: u64) -> u64 {
    (at ^ 0x6265_656c_696e_6521).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
