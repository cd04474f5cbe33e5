//! cufile.json: JSON with `//` and `/* */` comments.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde_json::Value;

use super::super::machine::{Fact, Machine, Origin};
use super::{Input, Outcome, ReadError};

/// Top-level sections of the format.
const SECTIONS: [&str; 7] =
    ["logging", "profile", "execution", "properties", "fs", "denylist", "miscellaneous"];

/// Settings kept.
const SETTINGS_MAX: usize = 4096;

pub(super) fn recognise(head: &str) -> bool {
    let bare = strip_comments(head);
    bare.trim_start().starts_with('{')
        && SECTIONS.iter().any(|name| bare.contains(&alloc::format!("\"{name}\"")))
        && !bare.contains("\"sources\"")
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let bare = strip_comments(input.text);
    let value: Value = serde_json::from_str(&bare).map_err(|error| {
        let line = u32::try_from(error.line()).unwrap_or(u32::MAX);
        ReadError::new(input, line, alloc::format!("broken JSON: {error}"))
    })?;
    let Value::Object(sections) = value else {
        return Err(ReadError::new(input, 1, "expected an object of sections"));
    };
    if !sections.keys().any(|key| SECTIONS.contains(&key.as_str())) {
        let message = alloc::format!("no section of cufile.json; expected {}", SECTIONS.join(", "));
        return Err(ReadError::new(input, 1, message));
    }
    let lines = key_lines(&bare);
    for (section, value) in sections {
        flatten(machine, input, &lines, &section, &value, 0);
    }
    Ok(Outcome::default())
}

/// Replaces the comments of a cufile.json by blanks, so that lines stay.
pub fn strip_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    let mut in_string = false;
    while let Some(c) = chars.next() {
        match (in_string, c, chars.peek().copied()) {
            (true, '\\', Some(next)) => {
                chars.next();
                out.push(c);
                out.push(next);
            }
            (_, '"', _) => {
                in_string = !in_string;
                out.push(c);
            }
            (false, '/', Some('/')) => {
                while chars.peek().is_some_and(|c| *c != '\n') {
                    chars.next();
                }
            }
            (false, '/', Some('*')) => {
                chars.next();
                let mut previous = ' ';
                for inner in chars.by_ref() {
                    if inner == '\n' {
                        out.push('\n');
                    }
                    if previous == '*' && inner == '/' {
                        break;
                    }
                    previous = inner;
                }
            }
            _ => out.push(c),
        }
    }
    out
}

/// First line of every quoted key.
fn key_lines(bare: &str) -> alloc::collections::BTreeMap<String, u32> {
    let mut lines = alloc::collections::BTreeMap::new();
    for (line, number) in bare.lines().zip(1u32..) {
        if let Some((key, _)) = line.trim_start().strip_prefix('"').and_then(|r| r.split_once('"'))
            && lines.len() < SETTINGS_MAX
        {
            lines.entry(key.to_string()).or_insert(number);
        }
    }
    lines
}

fn flatten(
    machine: &mut Machine,
    input: &Input<'_>,
    lines: &alloc::collections::BTreeMap<String, u32>,
    path: &str,
    value: &Value,
    depth: u32,
) {
    // serde_json itself refuses nesting beyond 128; the format has three levels.
    if depth > 8 || machine.platform.cufile.len() >= SETTINGS_MAX {
        return;
    }
    let key = path.rsplit('.').next().unwrap_or(path);
    let origin: Origin = input.at(lines.get(key).copied().unwrap_or(0));
    let values: Vec<String> = match value {
        Value::Object(map) => {
            for (key, inner) in map {
                let path = alloc::format!("{path}.{key}");
                flatten(machine, input, lines, &path, inner, depth + 1);
            }
            return;
        }
        Value::Array(list) => list.iter().map(scalar).collect(),
        other => alloc::vec![scalar(other)],
    };
    machine.platform.cufile.entry(path.to_string()).or_insert(Fact { value: values, origin });
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
