//! Damage with a purpose: mutations that keep enough of an input's form to reach deep code.
//!
//! Everything here follows from the seed alone, so a run can be repeated.

/// A small generator of random numbers (SplitMix64, public domain by S. Vigna).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of that seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 for a bound of 0.
    pub const fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.next() % bound as u64) as usize }
    }

    /// One of `choices`; `None` of none.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> Option<&'a T> {
        choices.get(self.below(choices.len()))
    }
}

/// What holds an input together, so that a mutation inside does not end at the first check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Nothing: the bytes are the input.
    Plain,
    /// A little-endian 64-bit length, that many bytes of text, and data to the end. The text is
    /// what mutates; the length is mended, and mostly the data is cut or grown to suit.
    LengthPrefixed,
}

/// Longest input that is made, in bytes.
const INPUT_LEN_MAX: usize = 64 << 10;

/// Numbers at which something tips over.
const NUMBERS: &[u64] = &[
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    16,
    64,
    65,
    255,
    256,
    65_536,
    1 << 31,
    1 << 32,
    1 << 53,
    1 << 61,
    1 << 63,
    u64::MAX,
];

/// Makes a new input from one seed and, for splicing, another.
pub fn mutate(rng: &mut Rng, frame: Frame, words: &[&str], seed: &[u8], other: &[u8]) -> Vec<u8> {
    if frame == Frame::Plain || rng.below(16) == 0 {
        let mut bytes = seed.to_vec();
        edit(rng, words, &mut bytes, other);
        bytes.truncate(INPUT_LEN_MAX);
        return bytes;
    }
    let (mut text, mut data) = unframe(seed);
    let (other_text, _) = unframe(other);
    edit(rng, words, &mut text, &other_text);
    text.truncate(INPUT_LEN_MAX);
    match rng.below(4) {
        0 => {}
        // Mostly the data has the length of the largest number that stands as an offset.
        1 | 2 => data.resize(last_offset(&text), 0x5a),
        _ => data.resize(rng.below(300), 0x5a),
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes.extend(data);
    bytes
}

fn unframe(bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let Some((prefix, rest)) = bytes.split_first_chunk::<8>() else {
        return (bytes.to_vec(), Vec::new());
    };
    let len = usize::try_from(u64::from_le_bytes(*prefix)).unwrap_or(usize::MAX).min(rest.len());
    let (text, data) = rest.split_at(len);
    (text.to_vec(), data.to_vec())
}

/// The largest number before a `]`, as far as it is a sensible length.
fn last_offset(text: &[u8]) -> usize {
    let is_offset = |span: &&(usize, usize)| text.get(span.1) == Some(&b']');
    let number =
        |&(from, to): &(usize, usize)| std::str::from_utf8(&text[from..to]).ok()?.parse().ok();
    let offsets = numbers(text);
    offsets
        .iter()
        .filter(is_offset)
        .filter_map(number)
        .filter(|&n: &usize| n <= 4096)
        .max()
        .unwrap_or(0)
}

fn edit(rng: &mut Rng, words: &[&str], bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..=rng.below(4) {
        match rng.below(9) {
            0 => flip(rng, bytes),
            1 => remove(rng, bytes),
            2 => {
                let at = rng.below(bytes.len() + 1);
                bytes.insert(at, rng.next() as u8);
            }
            3 | 4 => replace_number(rng, bytes),
            5 => {
                if let Some(word) = rng.pick(words) {
                    let at = rng.below(bytes.len() + 1);
                    bytes.splice(at..at, word.bytes());
                }
            }
            6 => replace_token(rng, words, bytes),
            7 => repeat(rng, bytes),
            _ => splice(rng, bytes, other),
        }
        bytes.truncate(INPUT_LEN_MAX);
    }
}

fn flip(rng: &mut Rng, bytes: &mut [u8]) {
    let at = rng.below(bytes.len());
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << rng.below(8);
    }
}

fn span(rng: &mut Rng, len: usize) -> (usize, usize) {
    let from = rng.below(len + 1);
    let longest = (len - from).min(64);
    (from, from + rng.below(longest + 1))
}

fn remove(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let (from, to) = span(rng, bytes.len());
    bytes.drain(from..to);
}

/// Says a stretch twice: names, entries, whole objects.
fn repeat(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let (from, to) = span(rng, bytes.len());
    let piece = bytes[from..to].to_vec();
    bytes.splice(to..to, piece);
}

fn splice(rng: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    let (from, to) = span(rng, bytes.len());
    let (other_from, other_to) = span(rng, other.len());
    bytes.splice(from..to, other[other_from..other_to].iter().copied());
}

/// Places of decimal numbers, as `(first byte, one past the last)`.
fn numbers(bytes: &[u8]) -> Vec<(usize, usize)> {
    runs(bytes, |byte| byte.is_ascii_digit())
}

/// Places of the longest stretches whose bytes all satisfy `is_inside`.
fn runs(bytes: &[u8], is_inside: impl Fn(u8) -> bool) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for (at, &byte) in bytes.iter().enumerate() {
        match found.last_mut() {
            _ if !is_inside(byte) => {}
            Some((_, end)) if *end == at => *end = at + 1,
            _ => found.push((at, at + 1)),
        }
    }
    found
}

fn replace_number(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let Some(&(from, to)) = rng.pick(&numbers(bytes)) else { return };
    let old = std::str::from_utf8(&bytes[from..to]).ok().and_then(|text| text.parse::<u64>().ok());
    let new = match (rng.below(3), old) {
        (0, Some(old)) => old.wrapping_add(1),
        (1, Some(old)) => old.wrapping_sub(1),
        _ => rng.pick(NUMBERS).copied().unwrap_or_default(),
    };
    bytes.splice(from..to, new.to_string().into_bytes());
}

/// Puts a word of the dictionary in the place of a word of the text.
fn replace_token(rng: &mut Rng, words: &[&str], bytes: &mut Vec<u8>) {
    let is_word =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'"' | b'_' | b'.' | b'*' | b'?');
    let Some(&(from, to)) = rng.pick(&runs(bytes, is_word)) else { return };
    if let Some(word) = rng.pick(words) {
        bytes.splice(from..to, word.bytes());
    }
}
