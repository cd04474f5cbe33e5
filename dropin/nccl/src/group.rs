//! Groups: calls of the library's, and ranks that come together at the end.

use std::cell::RefCell;

use crate::abi::{Out, export};
use crate::comm::Comm;
use crate::failure::{Failure, IN_PROGRESS};

type Work = Box<dyn FnOnce() -> Result<(), Failure> + Send>;

/// What a group does at its end, and the communicator that comes of it, if any does.
type Later = (Option<&'static Comm>, Work);

/// Ranks that a group makes at most.
const JOINS_MAX: usize = 256;

thread_local! {
    static LATER: RefCell<Vec<Later>> = RefCell::default();
    static REFUSED: RefCell<Option<Failure>> = RefCell::default();
}

/// Runs `work` at the end of the outermost group, beside all others.
pub(crate) fn later(comm: Option<&'static Comm>, work: Work) {
    LATER.with_borrow_mut(|all| all.push((comm, work)));
}

/// A call was refused: of the group that it is in, if it is in one, nothing is done. Its end says so too.
pub(crate) fn refused(failure: Failure) -> Failure {
    if beeline::collective::group_depth() > 0 && failure.status != IN_PROGRESS {
        REFUSED.with_borrow_mut(|first| _ = first.get_or_insert_with(|| failure.clone()));
        beeline::collective::group_refuse(&failure.text);
    }
    failure
}

/// None of these ranks comes.
fn cancel(all: Vec<Later>, why: &Failure) {
    all.into_iter().filter_map(|(comm, _)| comm).for_each(|comm| comm.failed(why));
}

fn outside() -> Result<(), Failure> {
    if beeline::collective::group_depth() > 0 {
        return Ok(());
    }
    Err(Failure::usage("a group ends that never started in this thread"))
}

/// Ranks of one thread wait for each other, so each comes on a thread of its own.
fn join_all(all: Vec<Later>) -> Result<(), Failure> {
    if all.len() > JOINS_MAX {
        let why = Failure::usage(format!("a group makes {JOINS_MAX} communicators at most"));
        cancel(all, &why);
        return Err(why);
    }
    let threads: Vec<_> = all
        .into_iter()
        .map(|(_, work)| std::thread::Builder::new().name("beeline-join".to_owned()).spawn(work))
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
        outside()?;
        let outermost = beeline::collective::group_depth() == 1;
        let (joins, refused) = if outermost { (LATER.take(), REFUSED.take()) } else { Default::default() };
        let joined = match refused {
            None => join_all(joins),
            Some(why) => {
                cancel(joins, &why);
                Err(why)
            }
        };
        // Ends the group also where joining failed.
        let queued = beeline::collective::group_end();
        joined?;
        Ok(queued?)
    }

    fn ncclGroupSimulateEnd, pncclGroupSimulateEnd(info: Out<SimInfo>) {
        outside()?;
        let outermost = beeline::collective::group_depth() == 1;
        let refused = if outermost {
            cancel(LATER.take(), &Failure::usage("its group was only simulated"));
            REFUSED.take()
        } else {
            None
        };
        let nanoseconds = beeline::collective::group_simulate_end();
        if let Some(why) = refused { return Err(why); }
        let nanoseconds = nanoseconds?;
        if info.is_null() { return Ok(()); }
        // Size, magic and version are the caller's.
        let known = info.read()?;
        info.set(SimInfo { estimated_us: nanoseconds as f32 / 1e3, ..known })
    }
}
