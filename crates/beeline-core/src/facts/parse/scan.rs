//! One pass over a log for all statements that matter, whatever log it is.
//!
//! Programs print into each other's logs (a job's output holds NCCL lines, UCX lines and a backtrace),
//! so every log is searched for the statements of all of them. The statements are compiled into one
//! automaton: the pass costs one table step per byte, however many statements there are.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use super::super::machine::{Machine, Origin};
use super::{Input, Outcome, ReadError, app_log, cufile_log, dmesg, nccl_log};

/// What happens on a line that contains a phrase.
pub(super) type Handler = fn(&mut Machine, &Line<'_>);

/// Phrases with their handlers.
pub(super) type Table = [(&'static str, Handler)];

/// Longest part of a line that handlers look at, in bytes.
const LINE_MAX: usize = 16 << 10;

/// One line of a log.
pub(super) struct Line<'a> {
    pub(super) text: &'a str,
    pub(super) at: Origin,
}

/// Parses a log whose kind is known by its shape.
pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    scan(machine, input);
    Ok(Outcome::default())
}

/// Parses a log that counts only if it says something known.
pub(super) fn parse_known(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    if scan(machine, input) == 0 {
        let message = "text of no known tool, and no line in it is a known statement of one";
        return Err(ReadError::new(input, 1, message));
    }
    Ok(Outcome::default())
}

/// Whether `text` contains a phrase of one of the tables.
pub(super) fn contains_any(text: &str, table: &Table) -> bool {
    let automaton = Automaton::build(table.iter().map(|(phrase, _)| *phrase));
    let mut state = 0u32;
    text.bytes().any(|byte| {
        state = automaton.step(state, byte);
        automaton.hits(state).next().is_some()
    })
}

fn scan(machine: &mut Machine, input: &Input<'_>) -> u64 {
    let tables: [&Table; 4] =
        [nccl_log::PHRASES, dmesg::PHRASES, cufile_log::PHRASES, app_log::PHRASES];
    let entries: Vec<(&str, Handler)> = tables.into_iter().flatten().copied().collect();
    let automaton = Automaton::build(entries.iter().map(|(phrase, _)| *phrase));

    let mut found = 0u64;
    let mut hits: Vec<u16> = Vec::new();
    let (mut state, mut start, mut number) = (0u32, 0usize, 1u32);
    for (at, byte) in input.text.bytes().enumerate() {
        if byte == b'\n' {
            if !hits.is_empty() {
                found += dispatch(machine, input, (start, at), number, &entries, &mut hits);
            }
            (state, start, number) = (0, at + 1, number.saturating_add(1));
            continue;
        }
        state = automaton.step(state, byte);
        if automaton.accepting(state) {
            for hit in automaton.hits(state) {
                if !hits.contains(&hit) {
                    hits.push(hit);
                }
            }
        }
    }
    if !hits.is_empty() {
        found += dispatch(machine, input, (start, input.text.len()), number, &entries, &mut hits);
    }
    found
}

fn dispatch(
    machine: &mut Machine,
    input: &Input<'_>,
    (start, end): (usize, usize),
    number: u32,
    entries: &[(&str, Handler)],
    hits: &mut Vec<u16>,
) -> u64 {
    let line = input.text.get(start..end).unwrap_or_default();
    let mut cut = line.len().min(LINE_MAX);
    while !line.is_char_boundary(cut) {
        cut -= 1;
    }
    let text = line.get(..cut).unwrap_or_default().trim_end_matches('\r');
    let line = Line { text, at: input.at(number) };
    let mut found = 0;
    for hit in hits.drain(..) {
        if let Some((_, handle)) = entries.get(usize::from(hit)) {
            handle(machine, &line);
            found += 1;
        }
    }
    found
}

/// An Aho-Corasick automaton over classes of bytes, as a full transition table.
struct Automaton {
    classes: [u8; 256],
    class_count: usize,
    next: Vec<u32>,
    accept: Vec<bool>,
    output: Vec<Option<u16>>,
    dictionary: Vec<u32>,
}

impl Automaton {
    fn build<'p>(phrases: impl Iterator<Item = &'p str> + Clone) -> Self {
        let (classes, class_count) = byte_classes(phrases.clone());
        let mut automaton = Self {
            classes,
            class_count,
            next: vec![0; class_count],
            accept: vec![false],
            output: vec![None],
            dictionary: vec![0],
        };
        for (number, phrase) in phrases.enumerate() {
            automaton.insert(phrase, u16::try_from(number).unwrap_or(u16::MAX));
        }
        automaton.close();
        automaton
    }

    fn insert(&mut self, phrase: &str, number: u16) {
        let mut state = 0usize;
        for byte in phrase.bytes() {
            let slot = state * self.class_count + usize::from(self.classes[usize::from(byte)]);
            if self.next[slot] == 0 {
                let fresh = self.output.len();
                self.next.extend(core::iter::repeat_n(0, self.class_count));
                self.output.push(None);
                self.accept.push(false);
                self.dictionary.push(0);
                self.next[slot] = u32::try_from(fresh).unwrap_or(0);
            }
            state = self.next[slot] as usize;
        }
        // Equal phrases keep the first handler.
        if self.output[state].is_none() {
            self.output[state] = Some(number);
        }
    }

    /// Fills in failure transitions, breadth first.
    fn close(&mut self) {
        let mut failure = vec![0u32; self.output.len()];
        let mut queue: VecDeque<u32> = VecDeque::new();
        for class in 0..self.class_count {
            if self.next[class] != 0 {
                queue.push_back(self.next[class]);
            }
        }
        while let Some(state) = queue.pop_front() {
            let (at, fail) = (state as usize, failure[state as usize] as usize);
            self.dictionary[at] =
                if self.output[fail].is_some() { fail as u32 } else { self.dictionary[fail] };
            self.accept[at] = self.output[at].is_some() || self.dictionary[at] != 0;
            for class in 0..self.class_count {
                let slot = at * self.class_count + class;
                let fallback = self.next[fail * self.class_count + class];
                match self.next[slot] {
                    0 => self.next[slot] = fallback,
                    child => {
                        failure[child as usize] = fallback;
                        queue.push_back(child);
                    }
                }
            }
        }
    }

    fn step(&self, state: u32, byte: u8) -> u32 {
        let class = usize::from(self.classes[usize::from(byte)]);
        self.next[state as usize * self.class_count + class]
    }

    fn accepting(&self, state: u32) -> bool {
        self.accept[state as usize]
    }

    /// Every phrase that ends in `state`.
    fn hits(&self, state: u32) -> impl Iterator<Item = u16> + '_ {
        let first = Some(state);
        core::iter::successors(first, |state| match self.dictionary[*state as usize] {
            0 => None,
            next => Some(next),
        })
        .filter_map(|state| self.output[state as usize])
    }
}

/// Bytes that occur in no phrase share class 0.
fn byte_classes<'p>(phrases: impl Iterator<Item = &'p str>) -> ([u8; 256], usize) {
    let (mut classes, mut count) = ([0u8; 256], 1usize);
    for byte in phrases.flat_map(str::bytes) {
        let class = &mut classes[usize::from(byte)];
        if *class == 0 {
            *class = u8::try_from(count).unwrap_or(u8::MAX);
            count += 1;
        }
    }
    (classes, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_automaton_finds_overlapping_phrases_and_nothing_else() {
        let phrases = ["he", "she", "his", "hers", "a needle"];
        let automaton = Automaton::build(phrases.into_iter());
        let find = |text: &str| {
            let (mut state, mut found) = (0, Vec::new());
            for byte in text.bytes() {
                state = automaton.step(state, byte);
                found.extend(automaton.hits(state).map(|hit| phrases[usize::from(hit)]));
            }
            found
        };
        assert_eq!(find("ushers"), ["she", "he", "hers"]);
        assert_eq!(find("a nee a needle"), ["a needle"]);
        assert!(find("hi s h e \u{e9}").is_empty());
    }
}
