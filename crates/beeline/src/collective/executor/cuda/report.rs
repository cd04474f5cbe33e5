//! What a kernel says when it gave up.

use crate::collective::control::{Control, Failure};
use crate::core::collective::{
    Announcement, Call, Collective, DataType, Disagreement, RedOp, Trouble,
};
use crate::error::Kind;

/// Where kernels write their report in the own segment: code and rank, then as `Report` of beeline-sys
/// has it; 64 bytes. The word after it says that the rank has closed.
pub(in crate::collective) const REPORT_OFFSET: u64 = 57344;
/// Where they write whom they wait for (`WAITING_AT` of the kernels).
pub(in crate::collective) const WAITING_OFFSET: u64 = REPORT_OFFSET + 56;

/// What the kernels of one rank reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    code: u32,
    /// The rank that it is about.
    about: u32,
    mine: (u64, u64),
    theirs: (u64, u64),
    waited_ms: u64,
}

const MISMATCH: u32 = 1;
const DEADLINE: u32 = 2;
const ABORTED: u32 = 3;
const PEER_FAILED: u32 = 4;

impl Said {
    fn by(control: &Control, rank: u32) -> Option<Self> {
        let word = |at| control.load(rank, REPORT_OFFSET + at);
        let first = word(0);
        (first as u32 != 0).then(|| Self {
            code: first as u32,
            about: (first >> 32) as u32,
            mine: (word(8), word(16)),
            theirs: (word(24), word(32)),
            waited_ms: word(40) / 1_000_000,
        })
    }

    /// Where this rank learned of a failure from another: what that one found, as this one would have said it.
    fn cause(self, control: &Control) -> Self {
        let (own, mut said) = (control.rank(), self);
        // Each step goes to another rank's report; there are no more of them than ranks.
        for _ in 0..control.ranks() {
            if said.code != PEER_FAILED {
                break;
            }
            let teller = said.about;
            let Some(next) = Self::by(control, teller).filter(|_| teller != own) else { break };
            // One that waits for nothing has the call that the other saw of it, or one of those that it made.
            let mine = match self.mine {
                (0, 0) if next.about == own => next.theirs,
                (0, 0) => own_words(control, next.mine),
                mine => mine,
            };
            said = match next.code {
                MISMATCH if next.about == own || next.mine != mine => {
                    Self { code: MISMATCH, mine, theirs: next.mine, ..said }
                }
                MISMATCH => Self { mine, ..next },
                // It waited for this rank, and gave up.
                DEADLINE if next.about == own => break,
                DEADLINE => Self { mine, ..next },
                ABORTED => Self { code: ABORTED, mine, ..said },
                _ if next.about == own => break,
                _ => Self { about: next.about, mine, ..said },
            };
        }
        said
    }
}

/// The report of this rank's kernels, if there is one.
pub(in crate::collective) fn failure(control: &Control) -> Option<Failure> {
    Some(told(control, Said::by(control, control.rank())?.cause(control)))
}

/// What the kernels of another rank found, so that this one need not make another call to learn it.
pub(in crate::collective) fn failure_of_others(control: &Control) -> Option<Failure> {
    let own = control.rank();
    let found = (0..control.ranks()).filter(|rank| *rank != own).find(|rank| {
        Said::by(control, *rank).is_some_and(|said| [MISMATCH, DEADLINE].contains(&said.code))
    })?;
    let nothing = (0, 0);
    let learned =
        Said { code: PEER_FAILED, about: found, mine: nothing, theirs: nothing, waited_ms: 0 };
    Some(told(control, learned.cause(control)))
}

fn told(control: &Control, said: Said) -> Failure {
    let rank = control.rank();
    let Said { code, about: mut other, mine, theirs, waited_ms } = said;
    let trouble = match code {
        MISMATCH => Trouble::Mismatch,
        DEADLINE if theirs.0 == 0 => Trouble::Straggler,
        DEADLINE => Trouble::Stalled,
        // A rank that gave up first may have seen what this one learns only now.
        ABORTED | PEER_FAILED if control.first_lost().is_some() => {
            other = control.first_lost().unwrap_or(other);
            Trouble::Lost
        }
        ABORTED => Trouble::Aborted,
        PEER_FAILED if control.was_told_to_stop(other) => Trouble::Aborted,
        PEER_FAILED => Trouble::Stalled,
        code => return Failure::Other(Kind::Device, format!("a kernel reported code {code}")),
    };
    let last = control.last(rank);
    if trouble == Trouble::Mismatch && mine != theirs && call(mine) == call(theirs) {
        let text = format!(
            "ranks {rank} and {other} make the same call with memory at other places of their windows"
        );
        return Failure::Other(Kind::Refused, text);
    }
    let mine = call(mine).or_else(|| last.map(|last| last.call));
    let sequence = mine.map_or(0, |mine| number(control, &mine));
    let Some(mine) = mine else {
        let text = format!("a kernel waited {waited_ms} ms for rank {other}: {trouble:?}");
        return Failure::Other(Kind::Device, text);
    };
    let theirs = match call(theirs) {
        // Made at the same place of the order as ours.
        Some(call) if trouble == Trouble::Mismatch => Some(Announcement { sequence, call }),
        Some(call) => Some(Announcement { sequence: number_of(control, other, &call), call }),
        None => control.last(other),
    };
    let mine = Announcement { sequence, call: mine };
    Failure::Disagreement(Disagreement { trouble, rank, mine, other, theirs, waited_ms })
}

/// The words of the call that another rank is in, where this rank has made that call lately, or else of its own last.
fn own_words(control: &Control, theirs: (u64, u64)) -> (u64, u64) {
    let made = call(theirs).is_some_and(|call| number(control, &call) != 0);
    let last = control.last(control.rank()).filter(|_| !made);
    last.map_or(theirs, |last| words(&last.call))
}

/// The number of a call that this rank's host queued; 0 where it is none of the last few, as in a graph that is replayed.
fn number(control: &Control, call: &Call) -> u64 {
    number_of(control, control.rank(), call)
}

fn number_of(control: &Control, rank: u32, call: &Call) -> u64 {
    let Some(last) = control.last(rank) else { return 0 };
    let same = |queued: &Announcement| match call.kind.is_pairwise() {
        // The words of a transfer do not say which way it goes, or to whom.
        true => queued.call.kind.is_pairwise() && queued.call.count == call.count,
        false => queued.call == *call,
    };
    let earlier =
        (1..4).filter_map(|back| control.announced(rank, last.sequence.checked_sub(back)?));
    earlier.chain([last]).filter(same).map(|queued| queued.sequence).min().unwrap_or(0)
}

/// The two words of a header: kind, type, operation and root packed as in an announcement, then the count;
/// a transfer's type is in the upper byte of its count.
pub(super) fn words(call: &Call) -> (u64, u64) {
    if call.kind.is_pairwise() {
        let dtype = call.dtype.number() as u64 & 0xff;
        return (Collective::Send as u64, (call.count & COUNT_MASK) | dtype << 56);
    }
    let [_, packed, count, _] = Announcement { sequence: 0, call: *call }.encode();
    (packed, count)
}

const COUNT_MASK: u64 = (1 << 56) - 1;

/// The second word of a call whose bytes are pulled from `place` (a byte, not 0) of windows: all ranks must mean the same.
pub(super) const fn placed(word: u64, place: u64) -> u64 {
    (word & COUNT_MASK) | place << 56
}

fn call((packed, count): (u64, u64)) -> Option<Call> {
    let kind = Collective::numbered((packed & 0xff) as u8)?;
    if packed == 0 && count == 0 {
        return None;
    }
    if kind.is_pairwise() {
        return Some(Call::new(kind, count & COUNT_MASK, DataType::new((count >> 56) as i32)));
    }
    let dtype = DataType::new((packed >> 8 & 0xffff) as i32);
    let call =
        Call::new(kind, count & COUNT_MASK, dtype).op(RedOp::new((packed >> 24 & 0xff) as i32));
    Some(call.root((packed >> 32) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: (u64, u64) = (7, 100);
    const OTHER: (u64, u64) = (9, 5);

    /// What rank 0 makes of the reports of three ranks: code, whom it is about, own call, the other's.
    #[test]
    fn a_failure_that_came_from_another_rank_names_who_is_to_blame() {
        type Report = (u32, u32, (u64, u64), (u64, u64));
        type Case = ([Report; 3], (u32, u32, (u64, u64)));
        let none = (0, 0, (0, 0), (0, 0));
        let cases: [Case; 8] = [
            // Rank 2 missed rank 1, or found it in another call.
            ([(4, 2, SUM, (0, 0)), none, (2, 1, SUM, (0, 0))], (2, 1, (0, 0))),
            ([(4, 2, SUM, (0, 0)), none, (1, 1, SUM, OTHER)], (1, 1, OTHER)),
            // Rank 2 makes another call than rank 0 and found rank 1, or rank 0, to do so.
            ([(4, 2, SUM, (0, 0)), none, (1, 1, OTHER, SUM)], (1, 2, OTHER)),
            ([(4, 2, SUM, (0, 0)), none, (1, 0, OTHER, SUM)], (1, 2, OTHER)),
            // It learned of it from rank 1 itself.
            ([(4, 2, SUM, (0, 0)), (3, 0, SUM, (0, 0)), (4, 1, SUM, (0, 0))], (3, 1, (0, 0))),
            // It waited for rank 0, or learned from it.
            ([(4, 2, SUM, (0, 0)), none, (2, 0, SUM, (0, 0))], (4, 2, (0, 0))),
            ([(4, 2, SUM, (0, 0)), none, (4, 0, SUM, (0, 0))], (4, 2, (0, 0))),
            // Its own report says it all.
            ([(1, 1, SUM, OTHER), none, (2, 0, SUM, (0, 0))], (1, 1, OTHER)),
        ];
        for (reports, expected) in cases {
            let files: Vec<_> = (0..3).map(|_| Control::segment().unwrap()).collect();
            let control = Control::join(0, &files).unwrap();
            for (rank, (code, about, mine, theirs)) in (0..).zip(reports) {
                let first = u64::from(code) | u64::from(about) << 32;
                let words = [first, mine.0, mine.1, theirs.0, theirs.1];
                for (at, word) in (0..).step_by(8).zip(words) {
                    control.store(rank, REPORT_OFFSET + at, word);
                }
            }
            let said = Said::by(&control, 0).unwrap().cause(&control);
            assert_eq!((said.code, said.about, said.theirs), expected, "{reports:?}");
            assert_eq!(said.mine, SUM);
        }
    }
}
