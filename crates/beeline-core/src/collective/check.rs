//! Runs a schedule on symbols instead of bytes, and so proves it.
//!
//! What is proven, for the ranks, counts and roots that were given:
//!
//! - **Every element arrives, once.** Each element of every output is the reduction of exactly the inputs it
//!   should have, every one once and in rank order (or the copy of the one input it should be).
//! - **No step can hang.** A wait is for one signal, and signals are never taken back, so the order in which
//!   ranks run does not decide whether all of them end: one run to the end is a proof for all.
//! - **No race.** Two accesses of different ranks to one element, one of them a write, are always ordered by
//!   signals (vector clocks). So the values seen in this run are those of every run.
//! - **Rounds may follow each other.** All of that holds over several rounds on one scratch.
//!
//! Counts are numbers of elements, never loops over them, so any 64-bit count can be checked.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::call::{Call, Collective};
use super::schedule::{Flag, Schedule, Space, Span, Step, scratch_elements};

mod memory;

use memory::{Memory, Place, Value};

/// Rounds that are run on one scratch.
const ROUNDS: u32 = 3;

/// Proves `schedule`; with `in_place` for input and output that overlap as NCCL's in-place calls do.
///
/// # Errors
/// What is wrong, in words: a schedule that fails is a mistake in this crate.
pub fn prove(schedule: &Schedule, in_place: bool) -> Result<(), String> {
    let ranks = schedule.programs.len() as u32;
    let room = scratch_elements(schedule.algorithm, schedule.call.kind, schedule.call.count, ranks);
    let room = room.ok_or("the scratch does not fit 64 bits")?;
    let mut run = Run::new(schedule, in_place, room);
    for round in 0..ROUNDS {
        run.round(round)?;
    }
    Ok(())
}

struct Run<'a> {
    schedule: &'a Schedule,
    ranks: u32,
    in_place: bool,
    scratch: u64,
    memory: Memory,
    /// What each rank knows of the others' progress.
    clocks: Vec<Vec<u64>>,
    /// Clocks that signals carried, by sender, receiver, flag; one list a pair, in order.
    signals: BTreeMap<(u32, u32, Flag), Vec<Vec<u64>>>,
    waited: BTreeMap<(u32, u32, Flag), usize>,
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, in_place: bool, scratch: u64) -> Self {
        let ranks = schedule.programs.len() as u32;
        Self {
            schedule,
            ranks,
            in_place,
            scratch,
            memory: Memory::default(),
            clocks: vec![vec![0; ranks as usize]; ranks as usize],
            signals: BTreeMap::new(),
            waited: BTreeMap::new(),
        }
    }

    fn round(&mut self, round: u32) -> Result<(), String> {
        self.memory.forget_buffers();
        for rank in 0..self.ranks {
            self.fill_input(rank)?;
        }
        let mut next = vec![0_usize; self.ranks as usize];
        loop {
            let mut moved = false;
            for rank in 0..self.ranks {
                while let Some(step) = self.step(rank, next[rank as usize]) {
                    let done = self.run(rank, step);
                    if !done
                        .map_err(|what| format!("round {round}, rank {rank}, {step:?}: {what}"))?
                    {
                        break;
                    }
                    next[rank as usize] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        for rank in 0..self.ranks {
            if let Some(step) = self.step(rank, next[rank as usize]) {
                return Err(format!("round {round}: rank {rank} waits for ever in {step:?}"));
            }
        }
        self.check_flags(round)?;
        (0..self.ranks).try_for_each(|rank| self.check_output(rank))
    }

    fn step(&self, rank: u32, at: usize) -> Option<&'a Step> {
        self.schedule.programs.get(rank as usize)?.get(at)
    }

    /// Runs a step; `false` where it has to wait.
    fn run(&mut self, rank: u32, step: &Step) -> Result<bool, String> {
        if let Step::Wait { from, flag } = step {
            let key = (*from, rank, *flag);
            let count = self.waited.entry(key).or_default();
            let Some(clock) = self.signals.get(&key).and_then(|list| list.get(*count)) else {
                return Ok(false);
            };
            *count += 1;
            for (mine, theirs) in self.clocks[rank as usize].iter_mut().zip(clock) {
                *mine = (*mine).max(*theirs);
            }
            return Ok(true);
        }
        self.clocks[rank as usize][rank as usize] += 1;
        match step {
            Step::Copy { from, to } => {
                self.own(rank, to)?;
                let values = self.read(rank, from)?;
                self.write(rank, to, values)?;
            }
            Step::Put { from, to } => {
                self.own(rank, from)?;
                if self.own(rank, to).is_ok() {
                    return Err("a put goes to a peer".into());
                }
                let values = self.read(rank, from)?;
                self.write(rank, to, values)?;
            }
            Step::Reduce { from, to } => {
                self.own(rank, to)?;
                let values = self.reduce(rank, from, to.count)?;
                self.write(rank, to, values)?;
            }
            Step::Signal { to, flag } => {
                let clock = self.clocks[rank as usize].clone();
                self.signals.entry((rank, *to, *flag)).or_default().push(clock);
            }
            Step::Wait { .. } => {}
        }
        Ok(true)
    }

    fn own(&self, rank: u32, span: &Span) -> Result<(), String> {
        match span.space {
            Space::Scratch(owner) if owner != rank => Err(format!("scratch of rank {owner}")),
            _ => Ok(()),
        }
    }

    /// Where a span lies: in place, the smaller of input and output is a part of the larger.
    fn place(&self, rank: u32, span: &Span) -> Result<(Place, u64), String> {
        let call = &self.schedule.call;
        let (place, base, room) = match span.space {
            Space::Scratch(owner) => (Place::Scratch(owner), 0, self.scratch),
            Space::Input => {
                let room = elements(call, call.input_bytes(rank, self.ranks).ok())?;
                let inside = self.in_place && !input_is_larger(call.kind);
                if inside {
                    (Place::Output(rank), overlap(call, rank), room)
                } else {
                    (Place::Input(rank), 0, room)
                }
            }
            Space::Output => {
                let room = elements(call, call.output_bytes(rank, self.ranks).ok())?;
                let inside = self.in_place && input_is_larger(call.kind);
                if inside {
                    (Place::Input(rank), overlap(call, rank), room)
                } else {
                    (Place::Output(rank), 0, room)
                }
            }
        };
        let end = span.at.checked_add(span.count).ok_or("the end does not fit 64 bits")?;
        if end > room {
            return Err(format!("{span:?} ends behind {room} elements"));
        }
        Ok((place, base + span.at))
    }

    fn fill_input(&mut self, rank: u32) -> Result<(), String> {
        let call = &self.schedule.call;
        let sends =
            self.schedule.programs.get(rank as usize).is_some_and(|steps| !steps.is_empty());
        let count = elements(call, call.input_bytes(rank, self.ranks).ok())?;
        if !sends || count == 0 {
            return Ok(());
        }
        let span = Span::new(Space::Input, 0, count);
        let (place, at) = self.place(rank, &span)?;
        self.memory.set(place, at, count, Value::input(rank, 0));
        Ok(())
    }

    fn read(&mut self, rank: u32, span: &Span) -> Result<Vec<(u64, Value)>, String> {
        let (place, at) = self.place(rank, span)?;
        self.memory.touch(place, at, span.count, rank, &self.clocks[rank as usize], false)?;
        let pieces = self.memory.get(place, at, span.count)?;
        // Values are told relative to the span, not to the memory.
        Ok(pieces)
    }

    fn write(&mut self, rank: u32, to: &Span, values: Vec<(u64, Value)>) -> Result<(), String> {
        let (place, mut at) = self.place(rank, to)?;
        let total: u64 = values.iter().map(|(len, _)| len).sum();
        if total != to.count {
            return Err(format!("{total} elements into {}", to.count));
        }
        self.memory.touch(place, at, to.count, rank, &self.clocks[rank as usize], true)?;
        for (len, value) in values {
            self.memory.set(place, at, len, value);
            at += len;
        }
        Ok(())
    }

    fn reduce(
        &mut self,
        rank: u32,
        from: &[Span],
        count: u64,
    ) -> Result<Vec<(u64, Value)>, String> {
        let mut result: Vec<(u64, Value)> = Vec::new();
        for (index, span) in from.iter().enumerate() {
            if span.count != count {
                return Err(format!("{span:?} in a reduction of {count} elements"));
            }
            let pieces = self.read(rank, span)?;
            result = if index == 0 {
                pieces
                    .into_iter()
                    .map(|(len, value)| Ok((len, value.reduced()?)))
                    .collect::<Result<_, String>>()?
            } else {
                memory::zip(&result, &pieces, Value::join)?
            };
        }
        Ok(result)
    }

    /// Each flag at most once a pair and round: that is what a counter that only grows can carry.
    fn check_flags(&self, round: u32) -> Result<(), String> {
        for (key, sent) in &self.signals {
            if sent.len() > round as usize + 1 {
                return Err(format!("{key:?} is signalled twice in round {round}"));
            }
            if self.waited.get(key).copied().unwrap_or(0) != sent.len() {
                return Err(format!("nobody waits for {key:?} in round {round}"));
            }
        }
        Ok(())
    }

    fn check_output(&self, rank: u32) -> Result<(), String> {
        for (start, count, expected) in expected(&self.schedule.call, &self.schedule.programs, rank)
        {
            if count == 0 {
                continue;
            }
            let span = Span::new(Space::Output, start, count);
            let (place, at) = self.place(rank, &span)?;
            let mut seen = 0;
            for (len, value) in self.memory.get(place, at, count)? {
                let wanted = expected.clone().shifted(seen);
                if value != wanted {
                    return Err(format!(
                        "rank {rank}, element {}: {value:?} instead of {wanted:?}",
                        start + seen
                    ));
                }
                seen += len;
            }
        }
        Ok(())
    }
}

fn elements(call: &Call, bytes: Option<u64>) -> Result<u64, String> {
    let bytes = bytes.ok_or("the bytes do not fit 63 bits")?;
    Ok(bytes / call.dtype.size_bytes().unwrap_or(1))
}

/// Whether the output of an in-place call is a part of its input.
const fn input_is_larger(kind: Collective) -> bool {
    matches!(kind, Collective::ReduceScatter | Collective::Scatter)
}

/// Where the smaller buffer of an in-place call starts in the larger.
const fn overlap(call: &Call, rank: u32) -> u64 {
    match call.kind {
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Gather
        | Collective::Scatter => rank as u64 * call.count,
        _ => 0,
    }
}

/// What the output of `rank` must hold: start, length, value of the first element.
fn expected(call: &Call, programs: &[Vec<Step>], rank: u32) -> Vec<(u64, u64, Value)> {
    let (count, ranks) = (call.count, programs.len() as u32);
    let mine = u64::from(rank) * count;
    let at_root = rank == call.root;
    let gathered = |from: u64| {
        (0..ranks).map(move |r| (u64::from(r) * count, count, Value::input(r, from))).collect()
    };
    match call.kind {
        Collective::AllReduce => vec![(0, count, Value::sum(ranks, 0))],
        Collective::Reduce if at_root => vec![(0, count, Value::sum(ranks, 0))],
        Collective::ReduceScatter => vec![(0, count, Value::sum(ranks, mine))],
        Collective::AllGather => gathered(0),
        Collective::Gather if at_root => gathered(0),
        Collective::AllToAll => gathered(mine),
        Collective::Broadcast => vec![(0, count, Value::input(call.root, 0))],
        Collective::Scatter => vec![(0, count, Value::input(call.root, mine))],
        Collective::Recv => received(programs, rank, count),
        _ => Vec::new(),
    }
}

/// The receiver of a transfer is the rank that writes its output.
fn received(programs: &[Vec<Step>], rank: u32, count: u64) -> Vec<(u64, u64, Value)> {
    let writes = |steps: &Vec<Step>| {
        steps.iter().any(|s| matches!(s, Step::Copy { to, .. } if to.space == Space::Output))
    };
    let reads = |steps: &Vec<Step>| {
        steps.iter().any(|s| matches!(s, Step::Put { from, .. } | Step::Copy { from, .. } if from.space == Space::Input))
    };
    let sender = programs.iter().position(reads).unwrap_or(0) as u32;
    match programs.get(rank as usize).is_some_and(writes) {
        true => vec![(0, count, Value::input(sender, 0))],
        false => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
