//! Patterns for tensor names.
//!
//! `*` matches any run of characters, `?` one character, `[abc]`, `[a-z]` and `[!a-z]` one
//! character of a set. A name has no path inside, so `.` and `/` are characters like all others and
//! `**` is the same as `*`. There is no escape character: `[*]` is a literal star.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::iter::Peekable;
use core::str::Chars;

use super::SelectError;

/// Longest pattern in characters. With it, matching is linear in the name's length.
pub const PATTERN_LEN_MAX: usize = 1024;

/// One pattern for names: either one exact name or a glob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    text: Box<str>,
    tokens: Vec<Token>,
    /// Whether the text matches itself alone: then it is compared as a whole.
    literal: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Char(char),
    AnyChar,
    AnyRun,
    Set { negated: bool, ranges: Vec<(char, char)> },
}

impl Pattern {
    /// The pattern that matches `name` alone, whatever characters it holds.
    pub fn exact(name: &str) -> Self {
        Self { text: name.into(), tokens: name.chars().map(Token::Char).collect(), literal: true }
    }

    /// Compiles a glob. Fails with `bad-pattern` where a set is not closed, holds nothing or holds a
    /// range that ends before it begins, and where the pattern is longer than [`PATTERN_LEN_MAX`].
    pub fn glob(text: &str) -> Result<Self, SelectError> {
        let bad = |fault| SelectError::BadPattern { pattern: text.into(), fault };
        if text.chars().nth(PATTERN_LEN_MAX).is_some() {
            return Err(bad("is too long"));
        }
        let mut tokens = Vec::new();
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '*' if tokens.last() == Some(&Token::AnyRun) => {}
                '*' => tokens.push(Token::AnyRun),
                '?' => tokens.push(Token::AnyChar),
                '[' => tokens.push(set(&mut chars).map_err(bad)?),
                literal => tokens.push(Token::Char(literal)),
            }
        }
        let literal = tokens.iter().all(|token| matches!(token, Token::Char(_)));
        Ok(Self { text: text.into(), tokens, literal })
    }

    /// The pattern as it was written.
    pub const fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether `name` matches as a whole.
    ///
    /// Only the latest `*` is ever widened: an earlier one cannot help once a later one was reached.
    /// So the time is at most pattern length times name length.
    pub fn matches(&self, name: &str) -> bool {
        if self.literal {
            return &*self.text == name;
        }
        let (mut tokens, mut chars) = (self.tokens.iter(), name.chars());
        // Where to go on when the text after the latest star does not fit.
        let mut retry = None;
        loop {
            let (token, before) = (tokens.next(), chars.clone());
            match (token, chars.next()) {
                (None, None) => return true,
                (Some(Token::AnyRun), _) => {
                    chars = before;
                    retry = Some((tokens.clone(), chars.clone()));
                }
                (Some(token), Some(c)) if token.matches(c) => {}
                _ => {
                    let Some((after_star, text)) = &mut retry else {
                        return false;
                    };
                    if text.next().is_none() {
                        return false;
                    }
                    (tokens, chars) = (after_star.clone(), text.clone());
                }
            }
        }
    }

    /// How many single-character changes lie between `name` and what the pattern matches, with what
    /// `*` covers free of charge; for suggestions. Takes pattern length times name length steps.
    pub(super) fn distance(&self, name: &str) -> usize {
        // Row by row over the tokens; `row[j]` is the distance of the tokens so far to the name's
        // first `j` characters.
        let mut row: Vec<usize> = (0..=name.chars().count()).collect();
        for token in &self.tokens {
            let star = *token == Token::AnyRun;
            let mut next = Vec::with_capacity(row.len());
            let first = row.first().copied().unwrap_or_default();
            let mut left = if star { first } else { first + 1 };
            next.push(left);
            for (c, pair) in name.chars().zip(row.windows(2)) {
                let &[diagonal, up] = pair else { break };
                left = if star {
                    left.min(up)
                } else {
                    let change = usize::from(!token.matches(c));
                    (diagonal + change).min(up + 1).min(left + 1)
                };
                next.push(left);
            }
            row = next;
        }
        row.last().copied().unwrap_or_default()
    }

    /// Number of characters that the pattern asks for.
    pub(super) fn chars_asked(&self) -> usize {
        self.tokens.iter().filter(|token| **token != Token::AnyRun).count()
    }
}

impl Token {
    /// Whether one character matches; a run of characters is the caller's to handle.
    fn matches(&self, c: char) -> bool {
        match self {
            Self::Char(literal) => *literal == c,
            Self::AnyChar => true,
            Self::AnyRun => false,
            Self::Set { negated, ranges } => {
                ranges.iter().any(|&(first, last)| (first..=last).contains(&c)) != *negated
            }
        }
    }
}

/// Reads a set up to its closing bracket. A `]` in first place is a member, as in every shell.
fn set(chars: &mut Peekable<Chars<'_>>) -> Result<Token, &'static str> {
    let negated = chars.next_if_eq(&'!').is_some();
    let mut ranges = Vec::new();
    loop {
        let first = match chars.next().ok_or("has a '[' without its ']'")? {
            ']' if !ranges.is_empty() => return Ok(Token::Set { negated, ranges }),
            c => c,
        };
        // A '-' before the closing bracket is a member.
        let is_range = chars.peek() == Some(&'-') && {
            let mut ahead = chars.clone();
            ahead.next();
            ahead.peek().is_some_and(|&c| c != ']')
        };
        let last = if is_range { chars.nth(1).unwrap_or(first) } else { first };
        if last < first {
            return Err("has a range that ends before it begins");
        }
        ranges.push((first, last));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_as_the_table_says() {
        let table: &[(&str, &[&str], &[&str])] = &[
            ("", &[""], &["a"]),
            ("*", &["", "a", "model.layers.0/x"], &[]),
            ("**", &["", "a.b/c"], &[]),
            ("?", &["a", "é", "."], &["", "ab"]),
            ("a*b*c", &["abc", "a..b..c", "abcbc", "aabbcc"], &["ab", "abcd", "acb"]),
            ("model.layers.?.*", &["model.layers.0.w", "model.layers.9."], &["model.layers.10.w"]),
            ("*.weight", &[".weight", "a.weight.weight"], &["a.weight.", "aweight"]),
            ("[abc]", &["a", "b", "c"], &["d", "", "ab", "[abc]"]),
            ("[a-c]x", &["ax", "cx"], &["dx", "-x"]),
            ("[!a-c]", &["d", "-", "!"], &["a", "b", "c", ""]),
            ("[]a]", &["]", "a"], &["[", "]a"]),
            ("[!]]", &["a"], &["]"]),
            ("[a-]", &["a", "-"], &["b"]),
            ("[*][?]", &["*?"], &["ab", "**"]),
            ("a]b", &["a]b"], &["ab"]),
            ("A", &["A"], &["a"]),
        ];
        for (pattern, yes, no) in table {
            let glob = Pattern::glob(pattern).unwrap();
            for name in *yes {
                assert!(glob.matches(name), "{pattern} should match {name}");
                assert_eq!(glob.distance(name), 0, "{pattern} is at {name}");
            }
            for name in *no {
                assert!(!glob.matches(name), "{pattern} should not match {name}");
                assert_ne!(glob.distance(name), 0, "{pattern} is not at {name}");
            }
        }
    }

    #[test]
    fn refuses_what_is_no_pattern() {
        let long = "x".repeat(PATTERN_LEN_MAX + 1);
        for text in ["[", "a[b", "[]", "[!]", "[a-", "[z-a]", "[a-b", &*long] {
            let code = Pattern::glob(text).map_err(|error| error.code());
            assert_eq!(code, Err("bad-pattern"), "{text}");
        }
        assert!(Pattern::glob(&long[1..]).is_ok());
    }

    #[test]
    fn an_exact_name_is_no_pattern() {
        let name = "w[0]*?";
        assert!(Pattern::exact(name).matches(name));
        assert!(!Pattern::exact(name).matches("w0abc"));
    }

    #[test]
    fn many_stars_do_not_explode() {
        // Exponential backtracking would take longer than the age of the universe.
        let pattern = "a*".repeat(500) + "b";
        let name = "a".repeat(20_000);
        assert!(!Pattern::glob(&pattern).unwrap().matches(&name));
    }

    #[test]
    fn distance_counts_changes() {
        for (pattern, name, distance) in [
            ("abc", "abd", 1),
            ("abc", "ac", 1),
            ("", "abc", 3),
            ("*.wieght", "a.weight", 2),
            ("*x", "abc", 1),
        ] {
            assert_eq!(
                Pattern::glob(pattern).unwrap().distance(name),
                distance,
                "{pattern} {name}"
            );
        }
    }
}
