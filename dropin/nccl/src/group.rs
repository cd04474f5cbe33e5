//! Groups: calls of the library's, and ranks that come together at the end.

use std::cell::RefCell;

use crate::abi::{Out, export};
use crate::failure::Failure;

type Work = Box<dyn FnOnce() -> Result<(), Failure> + Send>;

/// Ranks that a group makes at most.
const JOINS_MAX: usize = 256;

thread_local! {
    static LATER: RefCell<Vec<Work>> = RefCell::default();
}

/// Runs `work` at the end of the outermost group, beside all others.
pub(crate) fn later(work: Work) {
    LATER.with_borrow_mut(|all| all.push(work));
}

/// Ranks of one thread wait for each other, so each comes on a thread of its own.
fn join_all(all: Vec<Work>) -> Result<(), Failure> {
    if all.len() > JOINS_MAX {
        return Err(Failure::usage(format!("a group makes {JOINS_MAX} communicators at most")));
    }
    let threads: Vec<_> = all
        .into_iter()
        .map(|work| std::thread::Builder::new().name("beeline-join".to_owned()).spawn(work))
        .collect();
    let mut first = Ok(());
    for thread in threads {
        let result = match thread.map(std::thread::JoinHandle::join) {
            Ok(Ok(result)) => result,
            _ => Err(Failure::usage("a thread that joins a communicator could not run")),
        };
        first = first.and(result);
    }
    first
}

/// `ncclSimInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SimInfo {
    size: usize,
    magic: u32,
    version: u32,
    estimated_us: f32,
}

export! {
    fn ncclGroupStart, pncclGroupStart() {
        beeline::collective::group_start();
        Ok(())
    }

    fn ncclGroupEnd, pncclGroupEnd() {
        let outermost = beeline::collective::group_depth() == 1;
        let joins = if outermost { LATER.take() } else { Vec::new() };
        let joined = join_all(joins);
        // Ends the group also where joining failed.
        let queued = beeline::collective::group_end();
        joined?;
        Ok(queued?)
    }

    fn ncclGroupSimulateEnd, pncclGroupSimulateEnd(info: Out<SimInfo>) {
        if beeline::collective::group_depth() == 1 { drop(LATER.take()); }
        let nanoseconds = beeline::collective::group_simulate_end()?;
        if info.is_null() { return Ok(()); }
        // Size, magic and version are the caller's.
        let known = info.read()?;
        info.set(SimInfo { estimated_us: nanoseconds as f32 / 1e3, ..known })
    }
}
