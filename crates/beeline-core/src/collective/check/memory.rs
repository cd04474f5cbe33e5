//! Memory that holds symbols, as runs of elements.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

/// A memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Input(u32),
    Output(u32),
    Scratch(u32),
}

/// The value of the first element of a run; the next one's is that of the next input element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Value {
    /// Ranks whose inputs are in it, in the order they were combined.
    ranks: Vec<u32>,
    /// Whether it went through a reduction.
    reduced: bool,
    /// Which element of the inputs.
    index: u64,
}

impl Value {
    /// Element `index` of a rank's input.
    pub(super) fn input(rank: u32, index: u64) -> Self {
        Self { ranks: vec![rank], reduced: false, index }
    }

    /// Element `index` of all inputs, combined in rank order.
    pub(super) fn sum(ranks: u32, index: u64) -> Self {
        Self { ranks: (0..ranks).collect(), reduced: true, index }
    }

    pub(super) fn shifted(self, by: u64) -> Self {
        Self { index: self.index + by, ..self }
    }

    /// The same as the first term of a reduction.
    pub(super) fn reduced(self) -> Result<Self, String> {
        if self.reduced {
            Err(format!("{self:?} would be reduced twice"))
        } else {
            Ok(Self { reduced: true, ..self })
        }
    }

    /// A partial reduction with one more input.
    pub(super) fn join(so_far: &Self, more: &Self) -> Result<Self, String> {
        if more.reduced || so_far.index != more.index {
            return Err(format!("{so_far:?} cannot be combined with {more:?}"));
        }
        let mut ranks = so_far.ranks.clone();
        ranks.extend(&more.ranks);
        Ok(Self { ranks, reduced: true, index: so_far.index })
    }
}

/// One access, for the search for races.
#[derive(Clone, Copy)]
struct Access {
    start: u64,
    end: u64,
    rank: u32,
    time: u64,
    write: bool,
}

#[derive(Default)]
pub(super) struct Memory {
    /// Runs by place and start: length and first value.
    runs: BTreeMap<(Place, u64), (u64, Value)>,
    accesses: BTreeMap<Place, Vec<Access>>,
}

impl Memory {
    /// Inputs and outputs of the next round are other memory; the scratch stays.
    pub(super) fn forget_buffers(&mut self) {
        self.runs.retain(|(place, _), _| matches!(place, Place::Scratch(_)));
        self.accesses.retain(|place, _| matches!(place, Place::Scratch(_)));
    }

    /// Writes a run.
    pub(super) fn set(&mut self, place: Place, at: u64, len: u64, value: Value) {
        if len == 0 {
            return;
        }
        let end = at + len;
        let old: Vec<(u64, u64, Value)> = self
            .runs
            .range((place, 0)..(place, end))
            .filter(|((_, start), (len, _))| start + len > at)
            .map(|((_, start), (len, value))| (*start, *len, value.clone()))
            .collect();
        for (start, old_len, value) in old {
            self.runs.remove(&(place, start));
            if start < at {
                self.runs.insert((place, start), (at - start, value.clone()));
            }
            if start + old_len > end {
                let rest = value.shifted(end - start);
                self.runs.insert((place, end), (start + old_len - end, rest));
            }
        }
        self.runs.insert((place, at), (len, value));
    }

    /// Reads `len` elements: runs in order, without a gap.
    pub(super) fn get(&self, place: Place, at: u64, len: u64) -> Result<Vec<(u64, Value)>, String> {
        let (mut found, mut next, end) = (Vec::new(), at, at + len);
        let before = self.runs.range((place, 0)..=(place, at)).next_back();
        let first = before.map_or(at, |((_, start), _)| *start);
        for ((_, start), (run, value)) in self.runs.range((place, first)..(place, end)) {
            let stop = (start + run).min(end);
            if *start > next || stop <= next {
                continue;
            }
            found.push((stop - next, value.clone().shifted(next - start)));
            next = stop;
        }
        if next == end {
            Ok(found)
        } else {
            Err(format!("element {next} of {place:?} was never written"))
        }
    }

    /// Notes an access, and looks for one of another rank that is not ordered before it.
    pub(super) fn touch(
        &mut self,
        place: Place,
        at: u64,
        len: u64,
        rank: u32,
        clock: &[u64],
        write: bool,
    ) -> Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        let (start, end) = (at, at + len);
        let list = self.accesses.entry(place).or_default();
        for old in list.iter() {
            let conflict =
                (old.write || write) && old.rank != rank && old.start < end && start < old.end;
            if conflict && clock[old.rank as usize] < old.time {
                let what = |write| if write { "write" } else { "read" };
                return Err(format!(
                    "{} of {place:?} [{start}, {end}) races with a {} of rank {}",
                    what(write),
                    what(old.write),
                    old.rank
                ));
            }
        }
        list.push(Access { start, end, rank, time: clock[rank as usize], write });
        Ok(())
    }
}

/// Combines two lists of runs of one length, run by run.
pub(super) fn zip(
    a: &[(u64, Value)],
    b: &[(u64, Value)],
    join: impl Fn(&Value, &Value) -> Result<Value, String>,
) -> Result<Vec<(u64, Value)>, String> {
    let mut joined = Vec::new();
    let (mut left, mut right) = (a.iter(), b.iter());
    let (mut x, mut y) = (left.next().cloned(), right.next().cloned());
    while let (Some((xlen, xvalue)), Some((ylen, yvalue))) = (&x, &y) {
        let len = (*xlen).min(*ylen);
        joined.push((len, join(xvalue, yvalue)?));
        let rest = |total: u64, value: &Value| {
            (total > len).then(|| (total - len, value.clone().shifted(len)))
        };
        let (next_x, next_y) = (rest(*xlen, xvalue), rest(*ylen, yvalue));
        x = next_x.or_else(|| left.next().cloned());
        y = next_y.or_else(|| right.next().cloned());
    }
    if x.is_some() || y.is_some() { Err("runs of two lengths".into()) } else { Ok(joined) }
}
