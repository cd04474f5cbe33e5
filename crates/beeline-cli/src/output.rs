//! What goes to stdout and stderr: answers as text or JSON, warnings, numbers for people.
//!
//! A reader that closes stdout early has what it wanted: the rest is dropped without a word, and the
//! exit code stays that of the work done.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use serde_json::{Map, Value};

use crate::commands::Context;
use crate::failure::{EXIT_DONE, EXIT_FAILED, Failure};

/// What a command found out, in both forms.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// For people; ends with a newline.
    pub(crate) text: String,
    /// For programs; keys are described in docs/json.md.
    pub(crate) json: Map<String, Value>,
    /// What was wrong although there is an answer (a tensor that differs).
    pub(crate) failure: Option<Failure>,
}

impl Answer {
    /// An answer of the command `name`.
    pub(crate) fn of(name: &str) -> Self {
        let mut answer = Self::default();
        answer.set("command", name);
        answer
    }

    /// Sets a key of the JSON form.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.json.insert(key.to_owned(), value.into());
    }

    /// Adds a line of the text form: a label and what stands beside it.
    pub(crate) fn line(&mut self, label: &str, text: &str) {
        let _ = writeln!(self.text, "{label:<10} {}", one_line(text));
    }
}

/// Writes an answer and gives the exit code.
pub(crate) fn answer(mut answer: Answer, context: &Context) -> u8 {
    let failure = answer.failure.take();
    if context.json {
        if let Some(failure) = &failure {
            answer.set("error", failure.to_json());
        }
        let code = failure.map_or(EXIT_DONE, |failure| failure.exit);
        return to_stdout(&json_line(answer.json), code);
    }
    let code = to_stdout(&answer.text, failure.as_ref().map_or(EXIT_DONE, |failure| failure.exit));
    if let Some(failure) = failure {
        to_stderr("error", &failure.to_text());
    }
    code
}

/// Writes a failure and gives the exit code.
pub(crate) fn failure(failure: Failure, context: &Context) -> u8 {
    if !context.json {
        to_stderr("error", &failure.to_text());
        return failure.exit;
    }
    let mut object = Map::new();
    object.insert("error".to_owned(), failure.to_json());
    if let Some(simulated) = context.simulated() {
        object.insert("simulated".to_owned(), simulated.into());
    }
    to_stdout(&json_line(object), failure.exit)
}

/// Warns on stderr.
pub(crate) fn warn(text: &str) {
    to_stderr("warning", text);
}

/// Says something worth knowing on stderr.
pub(crate) fn note(text: &str) {
    to_stderr("note", text);
}

fn json_line(object: Map<String, Value>) -> String {
    format!("{:#}\n", Value::Object(object))
}

fn to_stderr(class: &str, text: &str) {
    // Where stderr is gone there is nowhere left to complain; the exit code still tells.
    let _ = writeln!(io::stderr().lock(), "beeline: {class}: {}", printable(text));
}

fn to_stdout(text: &str, code: u8) -> u8 {
    written(io::stdout().lock().write_all(text.as_bytes()), code)
}

/// The exit code after an answer was written to stdout with this outcome.
pub(crate) fn written(outcome: io::Result<()>, code: u8) -> u8 {
    match outcome.and_then(|()| io::stdout().lock().flush()) {
        Ok(()) => code,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => code,
        Err(error) => {
            to_stderr("error", &format!("cannot write to stdout: {error}"));
            code.max(EXIT_FAILED)
        }
    }
}

/// `text` without control characters that a hostile file name could send to a terminal; line ends
/// stay.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && c != '\n' {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// [`printable`] without line ends either, so that a hostile file name cannot add lines of its own.
pub(crate) fn one_line(text: &str) -> String {
    printable(text).replace('\n', "\\n")
}

/// Puts a path into a JSON object: `key` with U+FFFD for what is not UTF-8, and then `key_hex` too,
/// which holds every byte.
pub(crate) fn insert_path(object: &mut Map<String, Value>, key: &str, path: &Path) {
    use std::os::unix::ffi::OsStrExt as _;

    object.insert(key.to_owned(), path.to_string_lossy().into_owned().into());
    if path.to_str().is_none() {
        let mut hex = String::new();
        for byte in path.as_os_str().as_bytes() {
            let _ = write!(hex, "{byte:02x}");
        }
        object.insert(format!("{key}_hex"), hex.into());
    }
}

/// A number of bytes, exact, with its size in decimal units.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    let unit = UNITS.into_iter().find(|(size, _)| count >= *size);
    match unit {
        Some((size, name)) => format!("{count} bytes ({:.2} {name})", count as f64 / size as f64),
        None => plural(count, "byte"),
    }
}

/// `1 chunk`, `2 chunks`.
pub(crate) fn plural(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// `amount` per 10^9 bytes; `None` where there was no byte.
pub(crate) fn per_gb(amount: f64, bytes: u64) -> Option<f64> {
    (bytes > 0).then(|| amount * 1e9 / bytes as f64)
}

/// 10^9 bytes a second; `None` where it took no time that can be measured.
pub(crate) fn gb_per_s(bytes: u64, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| bytes as f64 / 1e9 / seconds)
}

/// A figure with two digits, or a dash where there is none.
pub(crate) fn figure(value: Option<f64>, unit: &str) -> String {
    value.map_or_else(|| format!("- {unit}"), |value| format!("{value:.2} {unit}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well_and_stay_exact() {
        let cases = [
            (0, "0 bytes"),
            (1, "1 byte"),
            (999, "999 bytes"),
            (1_000, "1000 bytes (1.00 kB)"),
            (2_500_000_000, "2500000000 bytes (2.50 GB)"),
        ];
        for (count, expected) in cases {
            assert_eq!(bytes(count), expected);
        }
        assert_eq!((per_gb(1.0, 0), per_gb(1.0, 500_000_000)), (None, Some(2.0)));
        assert_eq!((gb_per_s(1, 0.0), gb_per_s(4_000_000_000, 2.0)), (None, Some(2.0)));
    }

    #[test]
    fn a_hostile_name_cannot_write_to_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\tc\nd"), "a\\u{1b}[2Jb\\tc\nd");
        let mut answer = Answer::default();
        answer.line("loaded", "x\nverified   all");
        assert_eq!(answer.text, "loaded     x\\nverified   all\n");
        let failure = Failure::failed("io-failed", "cannot open x\nbeeline: error: y").hint("a\nb");
        assert_eq!(failure.to_text(), "cannot open x\\nbeeline: error: y\n  try: a\\nb");
    }
}
