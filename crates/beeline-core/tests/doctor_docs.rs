//! The documentation pages that are made from the table of checks and from the cases, and the score.
//!
//! `BEELINE_UPDATE=1` writes the pages; otherwise they are compared.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod doctor_common;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use beeline_core::checks::TABLE;
use beeline_core::facts::Kind;
use doctor_common::cases::{self, NOT_DECIDABLE};
use doctor_common::judge;

fn page(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

fn compare(name: &str, text: &str) {
    let path = page(name);
    if std::env::var_os("BEELINE_UPDATE").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        return;
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == text, "docs/{name} is not what the table says: run with BEELINE_UPDATE=1");
}

#[test]
fn the_page_of_checks_is_the_table() {
    let mut text = String::from(
        "# Checks\n\nGenerated from the table in `beeline_core::checks`. A check that lacks what it needs \
         says so and decides nothing.\n",
    );
    for check in TABLE {
        write!(
            text,
            "\n## {}\n\n{}.\n\n- Needs: {}.\n- Decides: {}.\n",
            check.code, check.title, check.needs, check.decides
        )
        .unwrap();
        for (label, value) in [("Remedy", check.remedy), ("Source", check.source)] {
            if !value.is_empty() {
                writeln!(text, "- {label}: {value}.").unwrap();
            }
        }
        if let Some(code) = check.reason {
            writeln!(text, "- Code of a plan: `{code}`.").unwrap();
        }
        if !check.after.is_empty() {
            writeln!(text, "- May be a consequence of: `{}`.", check.after.join("`, `")).unwrap();
        }
    }
    compare("checks.md", &text);
}

#[test]
fn the_score_stands_in_the_page() {
    let mut kinds: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for case in cases::all() {
        let Some(wrong) = judge(case) else { return };
        let (right, all) = kinds.entry(case.kind()).or_default();
        *all += 1;
        *right += u32::from(wrong.is_empty());
    }
    let (right, all) = kinds.values().fold((0, 0), |(r, a), (x, y)| (r + x, a + y));
    let mut score = String::from("| kind | right | cases |\n|---|---|---|\n");
    for (kind, (right, all)) in &kinds {
        writeln!(score, "| {kind} | {right} | {all} |").unwrap();
    }
    writeln!(score, "| all | {right} | {all} |").unwrap();
    println!("{score}");
    assert!(right * 100 >= all * 95, "{right} of {all}");

    let mut files = String::new();
    for kind in Kind::FILES {
        writeln!(files, "- {} (`{}`)", kind.what(), kind.as_str()).unwrap();
    }
    let mut left = String::new();
    for (id, why) in NOT_DECIDABLE {
        writeln!(left, "- {id}: {why}").unwrap();
    }
    let template = include_str!("doctor_common/doctor.md");
    let text = template
        .replace("{FILES}", files.trim_end())
        .replace("{SCORE}", score.trim_end())
        .replace("{NOT_DECIDABLE}", left.trim_end());
    compare("doctor.md", &text);
}
