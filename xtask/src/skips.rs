//! A test that cannot run says `SKIP <what>`. The list of what may be skipped is committed; anything
//! else that is skipped fails, so that a test never stops running unnoticed.

use std::collections::BTreeMap;
use std::fs;

use crate::Outcome;

pub(crate) fn run(args: &[String]) -> Outcome {
    let Some((log, lists)) = args.split_first().filter(|(_, lists)| !lists.is_empty()) else {
        return Err("usage: cargo xtask skips LOG LIST..".to_owned());
    };
    let read = |path: &String| fs::read(path).map_err(|error| format!("{path}: {error}"));
    let log = String::from_utf8_lossy(&read(log)?).into_owned();
    let mut allowed = String::new();
    for list in lists {
        allowed.push_str(&String::from_utf8_lossy(&read(list)?));
    }
    let allowed: Vec<&str> = names(&allowed).collect();
    let skipped = count(&log);
    let total: usize = skipped.values().sum();
    println!("{total} SKIP lines");
    for (what, times) in &skipped {
        println!("  SKIP {what} ({times}x)");
    }
    let unlisted: Vec<&str> =
        skipped.keys().map(String::as_str).filter(|what| !allowed.contains(what)).collect();
    if unlisted.is_empty() {
        return Ok(());
    }
    let lists = lists.join(", ");
    Err(format!("skipped, but not in the committed lists ({lists}): {}", unlisted.join(", ")))
}

/// The names of a list, without comments.
fn names(list: &str) -> impl Iterator<Item = &str> {
    list.lines().map(|line| line.split('#').next().unwrap_or("").trim()).filter(|n| !n.is_empty())
}

/// What a log says was skipped, and how often. The detail in parentheses does not count.
fn count(log: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in log.lines() {
        // Runners put words before the line of a test that runs beside others.
        let Some((before, what)) = line.split_once("SKIP ") else { continue };
        if !before.trim().is_empty() && !before.trim_end().ends_with("...") {
            continue;
        }
        let what = what.split('(').next().unwrap_or("").trim();
        *counts.entry(what.to_owned()).or_insert(0) += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::{count, names};

    #[test]
    fn lines_are_found_wherever_a_runner_puts_them() {
        let log = "    SKIP cuda\ntest a ... SKIP cuda (no device)\nok\nwe SKIP nothing here\nSKIP tmpfs\n";
        let counts = count(log);
        assert_eq!(counts.get("cuda"), Some(&2));
        assert_eq!(counts.get("tmpfs"), Some(&1));
        assert_eq!(counts.len(), 2);
    }

    #[test]
    fn lists_have_comments() {
        assert_eq!(names("# why\ncuda # no GPU\n\n").collect::<Vec<_>>(), ["cuda"]);
    }
}
