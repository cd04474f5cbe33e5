//! A thread that looks after ranks whose kernels wait.
//!
//! A kernel waits until its deadline, which may be half an hour, and cannot see whether the process of the rank that it
//! waits for is still there. It says whom it waits for in host memory; this thread reads that, ends the communicator
//! where the process is gone, and tells once, long before the deadline, which rank does not come.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::control::{Control, Failure};
use super::executor::failure_of_others;
use crate::core::collective::{Announcement, Call, Collective, DataType, Disagreement, Trouble};
use crate::error::{Error, Result};
use crate::lock;

/// How often ranks are looked at; a kernel that waits says so several times in between.
const TICK: Duration = Duration::from_millis(20);
/// How long a wait must go on after the other process was seen to be gone: what it has sent may still be taken.
const GRACE: Duration = Duration::from_millis(60);
/// After how long a wait is over that was not seen again: a thread of several that wait for several ranks is seen.
const QUIET: Duration = Duration::from_millis(500);
/// After how long a wait is told.
pub(super) const EARLY: Duration = Duration::from_secs(5);

/// All communicators of this process that are looked after, and whether the thread runs.
static WATCHED: Mutex<(Vec<Watched>, bool)> = Mutex::new((Vec::new(), false));

/// Looks after `control` for as long as it lives.
pub(super) fn over(control: &Arc<Control>) -> Result<()> {
    let mut watched = lock(&WATCHED);
    if !watched.1 {
        let thread = std::thread::Builder::new().name("beeline-watch".to_owned());
        let started = thread.spawn(run);
        started.map_err(|error| Error::io("start the thread that looks after ranks", error))?;
        watched.1 = true;
    }
    watched.0.push(Watched {
        control: Arc::downgrade(control),
        failed: None,
        waits: BTreeMap::new(),
    });
    Ok(())
}

/// Ends when there is nobody to look after.
fn run() {
    loop {
        std::thread::sleep(TICK);
        let mut watched = lock(&WATCHED);
        let now = Instant::now();
        watched.0.retain_mut(|one| one.look(now));
        if watched.0.is_empty() {
            watched.1 = false;
            return;
        }
    }
}

struct Watched {
    control: Weak<Control>,
    /// When another rank's failure was first seen.
    failed: Option<Instant>,
    /// By the rank that is waited for.
    waits: BTreeMap<u32, Wait>,
}

/// One wait for one rank.
#[derive(Clone, Copy)]
struct Wait {
    /// Calls that the two ranks have made: another number is another wait.
    calls: u32,
    since: Instant,
    seen: Instant,
    gone: Option<Instant>,
    told: bool,
}

impl Watched {
    /// Whether there is still something to look after.
    fn look(&mut self, now: Instant) -> bool {
        let Some(control) = self.control.upgrade() else { return false };
        if control.is_aborted() {
            // What its kernels report is read by whoever asks.
            return false;
        }
        // What another rank's kernels found ends the communicator here too, also where nothing waits: what was sent before
        // may have arrived without this rank's help. Its own kernels say more, where they wait.
        if control.has_failed() {
            return false;
        }
        if let Some(failure) = failure_of_others(&control) {
            if now.duration_since(*self.failed.get_or_insert(now)) >= GRACE {
                control.fail(failure);
                return false;
            }
        }
        if let Some((rank, calls)) = control.take_waiting() {
            let new = Wait { calls, since: now, seen: now, gone: None, told: false };
            let wait = self.waits.entry(rank).or_insert(new);
            if wait.calls != calls {
                *wait = new;
            }
            wait.seen = now;
        }
        self.waits.retain(|_, wait| now.duration_since(wait.seen) < QUIET);
        for (rank, wait) in &mut self.waits {
            let waited = now.duration_since(wait.since);
            if wait.seen == now && control.is_lost(*rank) {
                let gone = *wait.gone.get_or_insert(now);
                if now.duration_since(gone) >= GRACE {
                    control.fail(lost(&control, *rank, waited));
                    return false;
                }
            }
            if waited >= EARLY && !wait.told {
                wait.told = true;
                tell(&control, *rank, waited);
            }
        }
        true
    }
}

fn lost(control: &Control, other: u32, waited: Duration) -> Failure {
    let rank = control.rank();
    let nothing =
        || Announcement { sequence: 0, call: Call::new(Collective::Barrier, 0, DataType::U8) };
    Failure::Disagreement(Disagreement {
        trouble: Trouble::Lost,
        rank,
        mine: control.last(rank).unwrap_or_else(nothing),
        other,
        theirs: control.last(other),
        waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
    })
}

/// Says once who does not come, while there is time to look at it.
pub(super) fn tell(control: &Control, other: u32, waited: Duration) {
    let said = |rank| control.last(rank).map_or_else(|| "none".to_owned(), |call| call.to_string());
    tracing::warn!(
        "rank {} has waited {} s for rank {other} in {}; the last call of rank {other} was {}",
        control.rank(),
        waited.as_secs(),
        said(control.rank()),
        said(other),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::executor::WAITING_OFFSET;

    /// Three ranks, the process of the last being one that has ended.
    fn ranks() -> (Vec<Arc<Control>>, Watched) {
        let files: Vec<_> = (0..3).map(|_| Control::segment().unwrap()).collect();
        let join = |rank| Arc::new(Control::join(rank, &files).unwrap());
        let ranks: Vec<_> = (0..3).map(join).collect();
        let watched =
            Watched { control: Arc::downgrade(&ranks[0]), failed: None, waits: BTreeMap::new() };
        (ranks, watched)
    }

    fn wait_for(control: &Control, rank: u32, calls: u64) {
        control.store(0, WAITING_OFFSET, calls << 32 | u64::from(rank + 1));
    }

    #[test]
    fn a_rank_that_is_gone_ends_a_wait_but_not_what_is_over() {
        let (ranks, mut watched) = ranks();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        ranks[2].store(2, 64, child.id().into());
        ranks[0].note_processes();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        wait_for(&ranks[0], 2, 7);
        assert!(watched.look(at(0)) && watched.look(at(20)));
        child.kill().unwrap();
        child.wait().unwrap();
        // The wait ended by itself: nothing is wrong.
        assert!(watched.look(at(400)) && watched.look(at(1000)));
        assert!(!ranks[0].has_failed());
        // Another begins, and makes progress in between.
        for (ms, calls) in [(2000, 8), (2100, 9), (2140, 9)] {
            wait_for(&ranks[0], 2, calls);
            assert!(watched.look(at(ms)), "{ms}");
        }
        wait_for(&ranks[0], 2, 9);
        assert!(!watched.look(at(2200)));
        let text = ranks[0].failure().unwrap().error().to_string();
        assert!(text.contains("rank 2 is gone"), "{text}");
        assert!(ranks[0].is_aborted() && !ranks[1].is_aborted());
    }

    #[test]
    fn a_wait_is_told_once_and_a_new_one_again() {
        let (ranks, mut watched) = ranks();
        let start = Instant::now();
        let mut told = Vec::new();
        for ms in (0..30_000).step_by(100) {
            // Two ranks are waited for in turn, the second for another call from second 12 on.
            let calls = if ms >= 12_000 { 5 } else { 4 };
            wait_for(&ranks[0], 1 + ms as u32 / 100 % 2, if ms / 100 % 2 == 0 { 4 } else { calls });
            assert!(watched.look(start + Duration::from_millis(ms)));
            let now: Vec<u32> =
                watched.waits.iter().filter(|(_, wait)| wait.told).map(|(rank, _)| *rank).collect();
            if told.last() != Some(&now) {
                told.push(now);
            }
        }
        assert_eq!(told, [vec![], vec![1], vec![1, 2], vec![1], vec![1, 2]]);
        drop(ranks);
        assert!(!watched.look(Instant::now()));
    }
}
