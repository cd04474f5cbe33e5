//! Waiting for other ranks, and finding out who is to blame.

use std::time::{Duration, Instant};

use super::{Shared, Stop};
use crate::collective::control::Failure;
use crate::collective::watch;
use crate::core::collective::{Announcement, Disagreement, Trouble};

/// How long the rank that is to blame is looked for after another one gave up first.
const GRACE: Duration = Duration::from_millis(250);
/// How often the processes of missing ranks are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// A wait: spins a little, then sleeps ever longer.
pub(super) struct Wait<'a> {
    shared: &'a Shared,
    started: Instant,
    turns: u32,
    looked: Instant,
    /// When somebody else was first seen to have given up.
    given_up: Option<Instant>,
    told: bool,
}

/// What a wait should do after a turn.
pub(super) enum Turn {
    /// Look again.
    Again,
    /// The deadline has passed, or somebody gave up: say who is to blame.
    Over,
}

impl<'a> Wait<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        let now = Instant::now();
        Self { shared, started: now, turns: 0, looked: now, given_up: None, told: false }
    }

    /// Progress was made: the deadline counts from now.
    pub(super) fn renew(&mut self) {
        self.started = Instant::now();
        self.turns = 0;
    }

    /// One turn of waiting for `missing`.
    pub(super) fn turn(&mut self, missing: &[u32]) -> Result<Turn, Stop> {
        let control = &self.shared.control;
        if control.is_aborted() {
            return Err(Stop::Aborted);
        }
        self.turns = self.turns.saturating_add(1);
        if self.turns < 64 {
            std::thread::yield_now();
            return Ok(Turn::Again);
        }
        std::thread::sleep(Duration::from_micros(u64::from(self.turns.min(500))));
        let now = Instant::now();
        if now.duration_since(self.looked) >= LOOK {
            self.looked = now;
            if missing.iter().any(|rank| self.is_lost(*rank)) {
                return Ok(Turn::Over);
            }
        }
        if missing.iter().any(|rank| control.has_aborted(*rank)) {
            let since = *self.given_up.get_or_insert(now);
            if now.duration_since(since) >= GRACE {
                return Ok(Turn::Over);
            }
        }
        let waited = now.duration_since(self.started);
        if let (false, true, Some(rank)) = (self.told, waited >= watch::EARLY, missing.first()) {
            self.told = true;
            watch::tell(control, *rank, waited);
        }
        let late = waited >= self.shared.settings.deadline;
        Ok(if late { Turn::Over } else { Turn::Again })
    }

    /// The report about the one of `missing` that is to blame: a lost process, else one that neither came nor gave
    /// up, else one that gave up.
    pub(super) fn blame(&self, mine: Announcement, missing: &[u32]) -> Stop {
        let control = &self.shared.control;
        let lost = missing.iter().find(|rank| self.is_lost(**rank));
        let silent = missing.iter().find(|rank| !control.has_aborted(**rank));
        let other = lost.or(silent).or_else(|| missing.first()).copied().unwrap_or(0);
        let theirs = control.last(other);
        let same = theirs.is_some_and(|theirs| {
            let pair = theirs.call.kind.is_pairwise() && mine.call.kind.is_pairwise();
            theirs.call == mine.call && (pair || theirs.sequence == mine.sequence)
        });
        // One that gave up after an error of its own did not come, as one that is only late.
        let trouble = match (lost, control.was_told_to_stop(other), same) {
            (Some(_), ..) => Trouble::Lost,
            (None, true, _) => Trouble::Aborted,
            (None, false, true) => Trouble::Stalled,
            (None, false, false) => Trouble::Straggler,
        };
        self.report(trouble, mine, other, theirs)
    }

    /// A report that `other` makes another call.
    pub(super) fn mismatch(
        &self,
        mine: Announcement,
        other: u32,
        theirs: Option<Announcement>,
    ) -> Stop {
        self.report(Trouble::Mismatch, mine, other, theirs)
    }

    fn report(
        &self,
        trouble: Trouble,
        mine: Announcement,
        other: u32,
        theirs: Option<Announcement>,
    ) -> Stop {
        let waited_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let rank = self.shared.rank;
        Stop::Failed(Failure::Disagreement(Disagreement {
            trouble,
            rank,
            mine,
            other,
            theirs,
            waited_ms,
        }))
    }

    fn is_lost(&self, rank: u32) -> bool {
        let visible = self.shared.visible.get(rank as usize).copied().unwrap_or(false);
        visible && process_is_gone(self.shared.control.process(rank))
    }
}

impl Shared {
    /// Shows the others the call, and waits until all are in the same one.
    pub(super) fn meet(&self, mine: Announcement) -> Result<(), Stop> {
        let hash = mine.call.agreement(mine.sequence);
        self.control.announce(&mine);
        let mut wait = Wait::new(self);
        let mut missing: Vec<u32> = (0..self.ranks).filter(|rank| *rank != self.rank).collect();
        loop {
            let mut differs = None;
            missing.retain(|rank| match self.control.agreement(*rank, mine.sequence) {
                Some(theirs) if theirs == hash => false,
                Some(_) => {
                    differs = differs.or(Some(*rank));
                    true
                }
                None => true,
            });
            if let Some(other) = differs {
                let theirs = self.control.announced(other, mine.sequence);
                return Err(wait.mismatch(mine, other, theirs));
            }
            if missing.is_empty() {
                return Ok(());
            }
            if matches!(wait.turn(&missing)?, Turn::Over) {
                return Err(wait.blame(mine, &missing));
            }
        }
    }

    /// Waits until `ready`, for which `other` has to do something.
    pub(super) fn wait_for(
        &self,
        mine: Announcement,
        other: u32,
        mut ready: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let mut wait = Wait::new(self);
        while !ready() {
            if matches!(wait.turn(&[other])?, Turn::Over) {
                return Err(wait.blame(mine, &[other]));
            }
        }
        Ok(())
    }
}

/// Whether a process of this host has ended, also where nobody has taken note of that yet.
pub(in crate::collective) fn process_is_gone(process: u64) -> bool {
    if process == 0 || process == u64::from(std::process::id()) {
        return false;
    }
    match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => {
            let state =
                stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
            matches!(state, Some('Z' | 'X' | 'x'))
        }
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}
