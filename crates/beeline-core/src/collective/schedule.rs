//! A collective as data: what each rank copies, puts, reduces, signals and waits for.
//!
//! A [`Schedule`] is written for one *round*: as many elements as fit the scratch memory. A call of any size
//! is a sequence of rounds over parts of its elements ([`rounds`]), and since an element's result depends on
//! no other element, the size of a round never shows in the result.
//!
//! - Every rank has an input, an output and a *scratch* that all others read and write.
//! - [`Step::Signal`] is ordered after everything the rank did before; whoever passed the matching
//!   [`Step::Wait`] sees it. A flag belongs to a pair of ranks and is signalled at most once a round.
//! - The steps of a rank run in order. Every round ends so that the next may start at once on all
//!   ranks ([`Flag::Free`]); [`super::check`] proves it.

use alloc::vec::Vec;

use super::call::{Algorithm, Call, Collective};

mod build;

/// A place of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// What this rank reads.
    Input,
    /// What this rank writes.
    Output,
    /// The scratch of a rank.
    Scratch(u32),
}

/// Elements `[at, at + count)` of a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Where.
    pub space: Space,
    /// First element.
    pub at: u64,
    /// How many.
    pub count: u64,
}

impl Span {
    /// Elements `[at, at + count)` of `space`.
    pub const fn new(space: Space, at: u64, count: u64) -> Self {
        Self { space, at, count }
    }
}

/// What a signal says. One word a pair of ranks and flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Flag {
    /// The first data of the round is there.
    Data = 0,
    /// The second is: results, or pieces passed on.
    Result = 1,
    /// Nothing of this round is read any more.
    Free = 2,
}

impl Flag {
    /// How many there are.
    pub const COUNT: u64 = 3;
}

/// One step of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Reads elements, its own or of a peer's scratch, into a place of its own.
    Copy {
        /// Any space.
        from: Span,
        /// Output or its own scratch.
        to: Span,
    },
    /// Writes elements of its own into a peer's scratch.
    Put {
        /// Input, output or its own scratch.
        from: Span,
        /// A peer's scratch.
        to: Span,
    },
    /// Combines elements of several places, in this order, into a place of its own.
    Reduce {
        /// One span a rank, in rank order, all of one length.
        from: Vec<Span>,
        /// Output or its own scratch.
        to: Span,
    },
    /// Tells a peer.
    Signal {
        /// Whom.
        to: u32,
        /// What.
        flag: Flag,
    },
    /// Goes on once a peer told.
    Wait {
        /// Who.
        from: u32,
        /// What.
        flag: Flag,
    },
}

/// The steps of every rank for one round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The call; its count is that of one round.
    pub call: Call,
    /// How it is done.
    pub algorithm: Algorithm,
    /// Steps in order, one list a rank. Ranks that do not take part have none.
    pub programs: Vec<Vec<Step>>,
}

/// Largest number of ranks that schedules are written for.
pub const RANKS_MAX: u32 = 256;

impl Schedule {
    /// The schedule of all ranks. For a send or receive the pair is (`rank` of the sender, `call.root`)
    /// in a communicator of `ranks`; see [`transfer`].
    ///
    /// `None` where the algorithm does not do the call, or `ranks` is 0 or above [`RANKS_MAX`].
    pub fn new(call: Call, algorithm: Algorithm, ranks: u32) -> Option<Self> {
        let programs = (0..ranks).map(|rank| steps(call, algorithm, rank, ranks));
        let programs = programs.collect::<Option<Vec<_>>>().filter(|all| !all.is_empty())?;
        Some(Self { call, algorithm, programs })
    }
}

/// The steps of one rank for one round of `call.count` elements; `None` as in [`Schedule::new`].
pub fn steps(call: Call, algorithm: Algorithm, rank: u32, ranks: u32) -> Option<Vec<Step>> {
    if ranks == 0 || ranks > RANKS_MAX || rank >= ranks || !does(algorithm, call.kind, ranks) {
        return None;
    }
    Some(build::Builder::new(call, rank, ranks).build(algorithm))
}

/// The schedule of one send with its receive: `from` sends `call.count` elements to `to`.
pub fn transfer(call: Call, from: u32, to: u32, ranks: u32) -> Option<Schedule> {
    if ranks > RANKS_MAX || from >= ranks || to >= ranks {
        return None;
    }
    let program = |rank| build::transfer(call.count, rank, from, to);
    let programs = (0..ranks).map(program).collect();
    Some(Schedule { call, algorithm: Algorithm::Direct, programs })
}

/// Whether an algorithm is one for this collective.
pub const fn does(algorithm: Algorithm, kind: Collective, ranks: u32) -> bool {
    use Collective as C;
    if ranks == 1 {
        return matches!(algorithm, Algorithm::Local);
    }
    match algorithm {
        Algorithm::Local => false,
        // Its inner schedule is the one-shot; only the memory is another.
        Algorithm::OneShot | Algorithm::Staged => !matches!(kind, C::AllToAllV | C::Send | C::Recv),
        Algorithm::LowLatency => !matches!(kind, C::AllToAllV | C::Send | C::Recv),
        Algorithm::TwoShot => matches!(kind, C::AllReduce | C::Reduce),
        Algorithm::CopyEngine => !matches!(kind, C::Barrier | C::AllToAllV | C::Send | C::Recv),
        Algorithm::ScatterGather => matches!(kind, C::Broadcast),
        Algorithm::Direct => matches!(kind, C::AllToAllV | C::Send | C::Recv),
    }
}

/// Elements of scratch that a round of `count` elements takes, the most of any rank.
pub fn scratch_elements(
    algorithm: Algorithm,
    kind: Collective,
    count: u64,
    ranks: u32,
) -> Option<u64> {
    use Collective as C;
    let all = count.checked_mul(u64::from(ranks))?;
    Some(match (algorithm, kind) {
        (Algorithm::Local, _) | (_, C::Barrier) => 0,
        (Algorithm::OneShot | Algorithm::Staged, C::ReduceScatter | C::AllToAll | C::Scatter) => {
            all
        }
        (Algorithm::OneShot | Algorithm::Staged, _) => count,
        (Algorithm::TwoShot, C::AllReduce) => count.checked_mul(2)?,
        (Algorithm::TwoShot, _) => count.checked_mul(3)?,
        (Algorithm::CopyEngine, C::AllReduce) => {
            count.div_ceil(u64::from(ranks)).checked_mul(u64::from(ranks))?.checked_add(count)?
        }
        (_, C::Broadcast | C::Scatter) => count,
        _ => all,
    })
}

/// The parts `[start, start + count)` that a call of `count` elements is done in, `most` at a time. A call
/// without elements has one empty round, since the ranks meet all the same.
pub fn rounds(count: u64, most: u64) -> impl Iterator<Item = (u64, u64)> {
    let most = most.max(1);
    let number = count.div_ceil(most).max(1);
    (0..number).map(move |round| {
        let start = round * most;
        (start, most.min(count - start))
    })
}

/// Part `rank` when `count` elements are shared among `ranks`: start and length. The first ranks get one
/// more where it does not divide, so nothing is left over.
pub const fn slice(count: u64, rank: u32, ranks: u32) -> (u64, u64) {
    let (rank, ranks) = (rank as u64, ranks as u64);
    let (whole, rest) = (count / ranks, count % ranks);
    let extra = if rank < rest { rank } else { rest };
    (rank * whole + extra, whole + if rank < rest { 1 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_rounds_cover_everything_once() {
        for count in [0, 1, 2, 7, 8, 1023, (1 << 33) + 5] {
            for ranks in 1..=16 {
                let mut at = 0;
                for rank in 0..ranks {
                    let (start, len) = slice(count, rank, ranks);
                    assert_eq!(start, at);
                    at += len;
                }
                assert_eq!(at, count);
            }
            for most in [1_u64 << 20, (1 << 33) + 4, u64::MAX] {
                let mut at = 0;
                for (start, len) in rounds(count, most) {
                    assert_eq!(start, at);
                    assert!(len <= most);
                    at += len;
                }
                assert_eq!(at, count);
            }
        }
        assert_eq!(rounds(0, 8).count(), 1, "the ranks meet all the same");
    }
}
