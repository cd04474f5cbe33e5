//! The schedules themselves.

use alloc::vec;
use alloc::vec::Vec;

use super::{Flag, Span, Step, slice};
use crate::collective::call::{Algorithm, Call, Collective};
use crate::collective::schedule::Space::{Input, Output, Scratch};

/// The steps of one rank, as they are written.
pub(super) struct Builder {
    call: Call,
    me: u32,
    ranks: u32,
    steps: Vec<Step>,
}

impl Builder {
    pub(super) const fn new(call: Call, me: u32, ranks: u32) -> Self {
        Self { call, me, ranks, steps: Vec::new() }
    }

    pub(super) fn build(mut self, algorithm: Algorithm) -> Vec<Step> {
        match algorithm {
            Algorithm::Local => self.local(),
            Algorithm::OneShot | Algorithm::Staged => self.pull(),
            Algorithm::LowLatency => self.push(),
            Algorithm::TwoShot => self.two_shot(),
            Algorithm::CopyEngine if self.call.kind == Collective::AllReduce => self.exchange(),
            Algorithm::CopyEngine => self.push(),
            Algorithm::ScatterGather => self.scatter_gather(),
            Algorithm::Direct => {}
        }
        self.steps
    }

    /// One rank: its input is everybody's.
    fn local(&mut self) {
        let all = self.call.count;
        match self.call.kind {
            Collective::Barrier | Collective::AllToAllV | Collective::Send | Collective::Recv => {}
            kind if kind.reduces() => {
                let from = vec![Span::new(Input, 0, all)];
                self.steps.push(Step::Reduce { from, to: Span::new(Output, 0, all) });
            }
            _ => self.copy(Span::new(Input, 0, all), Span::new(Output, 0, all)),
        }
    }

    /// Everybody shows its input in its own scratch, and takes from the others' what it needs.
    fn pull(&mut self) {
        let (count, me) = (self.call.count, self.me);
        let shown =
            if self.gives() { count * u64::from(self.call.input_parts(self.ranks)) } else { 0 };
        self.copy(Span::new(Input, 0, shown), Span::new(Scratch(me), 0, shown));
        self.meet(Flag::Data);
        let root = self.call.root;
        let mine = u64::from(me) * count;
        match self.call.kind {
            Collective::AllReduce => self.reduce_all(0, count, Output, 0),
            Collective::Reduce if me == root => self.reduce_all(0, count, Output, 0),
            Collective::ReduceScatter => self.reduce_all(mine, count, Output, 0),
            Collective::AllGather => self.gather(0, count),
            Collective::Gather if me == root => self.gather(0, count),
            Collective::AllToAll => self.gather(mine, count),
            Collective::Broadcast => {
                self.copy(Span::new(Scratch(root), 0, count), Span::new(Output, 0, count));
            }
            Collective::Scatter => {
                self.copy(Span::new(Scratch(root), mine, count), Span::new(Output, 0, count));
            }
            _ => {}
        }
        self.end();
    }

    /// Everybody puts what the others need into their scratch, and takes from its own.
    fn push(&mut self) {
        let (count, me, root) = (self.call.count, self.me, self.call.root);
        let (mine, kind) = (u64::from(me) * count, self.call.kind);
        for to in 0..self.ranks {
            let theirs = u64::from(to) * count;
            let (from, at) = match kind {
                Collective::AllReduce | Collective::AllGather => (0, mine),
                Collective::Reduce | Collective::Gather if to == root => (0, mine),
                Collective::ReduceScatter | Collective::AllToAll => (theirs, mine),
                Collective::Broadcast if me == root => (0, 0),
                Collective::Scatter if me == root => (theirs, 0),
                _ => continue,
            };
            self.put(Span::new(Input, from, count), to, at);
        }
        self.meet(Flag::Data);
        let inbox = |rank: u32| Span::new(Scratch(me), u64::from(rank) * count, count);
        let takes = !matches!(kind, Collective::Reduce | Collective::Gather) || me == root;
        match kind {
            kind if kind.reduces() && takes => {
                let from = (0..self.ranks).map(inbox).collect();
                self.reduce(from, Span::new(Output, 0, count));
            }
            Collective::AllGather | Collective::AllToAll | Collective::Gather if takes => {
                for rank in 0..self.ranks {
                    self.copy(inbox(rank), Span::new(Output, u64::from(rank) * count, count));
                }
            }
            Collective::Broadcast | Collective::Scatter => {
                self.copy(Span::new(Scratch(me), 0, count), Span::new(Output, 0, count));
            }
            _ => {}
        }
        self.end();
    }

    /// Everybody reduces one part of the inputs, which all show; the results lie behind the input.
    fn two_shot(&mut self) {
        let (count, me, root) = (self.call.count, self.me, self.call.root);
        self.copy(Span::new(Input, 0, count), Span::new(Scratch(me), 0, count));
        self.meet(Flag::Data);
        let (start, len) = slice(count, me, self.ranks);
        if self.call.kind == Collective::AllReduce {
            self.reduce_all(start, len, Scratch(me), count + start);
            self.meet(Flag::Result);
            for rank in 0..self.ranks {
                let (start, len) = slice(count, rank, self.ranks);
                let from = Span::new(Scratch(rank), count + start, len);
                self.copy(from, Span::new(Output, start, len));
            }
        } else {
            self.reduce_all(start, len, Scratch(me), count + start);
            self.put(Span::new(Scratch(me), count + start, len), root, 2 * count + start);
            self.meet(Flag::Result);
            if me == root {
                let from = Span::new(Scratch(me), 2 * count, count);
                self.copy(from, Span::new(Output, 0, count));
            }
        }
        self.end();
    }

    /// All-reduce by puts alone: parts to their owners, results to everybody.
    fn exchange(&mut self) {
        let (count, me, ranks) = (self.call.count, self.me, self.ranks);
        let room = count.div_ceil(u64::from(ranks));
        let results = room * u64::from(ranks);
        for to in 0..ranks {
            let (start, len) = slice(count, to, ranks);
            self.put(Span::new(Input, start, len), to, u64::from(me) * room);
        }
        self.meet(Flag::Data);
        let (start, len) = slice(count, me, ranks);
        let inbox = |rank: u32| Span::new(Scratch(me), u64::from(rank) * room, len);
        let result = Span::new(Scratch(me), results + start, len);
        self.reduce((0..ranks).map(inbox).collect(), result);
        for to in (0..ranks).filter(|to| *to != me) {
            self.put(result, to, results + start);
        }
        self.meet(Flag::Result);
        self.copy(Span::new(Scratch(me), results, count), Span::new(Output, 0, count));
        self.end();
    }

    /// The root puts one part to each rank, which passes it on to all others.
    fn scatter_gather(&mut self) {
        let (count, me, root, ranks) = (self.call.count, self.me, self.call.root, self.ranks);
        if me == root {
            let (own, own_len) = slice(count, me, ranks);
            for to in (0..ranks).filter(|to| *to != me) {
                let (start, len) = slice(count, to, ranks);
                self.put(Span::new(Input, start, len), to, start);
                self.put(Span::new(Input, own, own_len), to, own);
                self.steps.push(Step::Signal { to, flag: Flag::Data });
            }
        } else {
            self.steps.push(Step::Wait { from: root, flag: Flag::Data });
            let (start, len) = slice(count, me, ranks);
            for to in (0..ranks).filter(|to| *to != me && *to != root) {
                self.put(Span::new(Scratch(me), start, len), to, start);
            }
        }
        self.meet(Flag::Result);
        if me == root {
            self.copy(Span::new(Input, 0, count), Span::new(Output, 0, count));
        } else {
            self.copy(Span::new(Scratch(me), 0, count), Span::new(Output, 0, count));
        }
        self.end();
    }

    /// Whether this rank has an input.
    const fn gives(&self) -> bool {
        match self.call.kind {
            Collective::Broadcast | Collective::Scatter => self.me == self.call.root,
            _ => true,
        }
    }

    /// Element `at` on of every scratch, reduced in rank order.
    fn reduce_all(&mut self, at: u64, count: u64, space: super::Space, to: u64) {
        let from = (0..self.ranks).map(|rank| Span::new(Scratch(rank), at, count)).collect();
        self.reduce(from, Span::new(space, to, count));
    }

    /// One part of every scratch, side by side into the output.
    fn gather(&mut self, at: u64, count: u64) {
        for rank in 0..self.ranks {
            let to = Span::new(Output, u64::from(rank) * count, count);
            self.copy(Span::new(Scratch(rank), at, count), to);
        }
    }

    fn put(&mut self, from: Span, to: u32, at: u64) {
        let into = Span::new(Scratch(to), at, from.count);
        if to == self.me {
            self.copy(from, into);
        } else if from.count > 0 {
            self.steps.push(Step::Put { from, to: into });
        }
    }

    fn copy(&mut self, from: Span, to: Span) {
        if from.count > 0 {
            self.steps.push(Step::Copy { from, to });
        }
    }

    fn reduce(&mut self, from: Vec<Span>, to: Span) {
        if to.count > 0 {
            self.steps.push(Step::Reduce { from, to });
        }
    }

    /// Everybody tells everybody, and waits for everybody.
    fn meet(&mut self, flag: Flag) {
        let others = || (0..self.ranks).filter(|rank| *rank != self.me);
        self.steps.extend(others().map(|to| Step::Signal { to, flag }));
        self.steps.extend(others().map(|from| Step::Wait { from, flag }));
    }

    /// Nobody starts the next round before all have read what they need of this one.
    fn end(&mut self) {
        if self.call.kind != Collective::Barrier {
            self.meet(Flag::Free);
        }
    }
}

/// The steps of `rank` in a transfer.
pub(super) fn transfer(count: u64, rank: u32, from: u32, to: u32) -> Vec<Step> {
    let (input, output) = (Span::new(Input, 0, count), Span::new(Output, 0, count));
    if from == to {
        let copy = Step::Copy { from: input, to: output };
        return if rank == from { vec![copy] } else { Vec::new() };
    }
    let inbox = Span::new(Scratch(to), 0, count);
    if rank == from {
        vec![
            Step::Put { from: input, to: inbox },
            Step::Signal { to, flag: Flag::Data },
            Step::Wait { from: to, flag: Flag::Free },
        ]
    } else if rank == to {
        vec![
            Step::Wait { from, flag: Flag::Data },
            Step::Copy { from: inbox, to: output },
            Step::Signal { to: from, flag: Flag::Free },
        ]
    } else {
        Vec::new()
    }
}
