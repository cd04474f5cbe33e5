//! `beeline doctor`: which direct paths work, and why the others do not.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use beeline::core::checks::{self, Finding, Report, Severity, Status};
use beeline::core::facts::{Kind, Machine, Source, json, read, read_tree};
use beeline::probe::{self, Options};
use serde_json::{Value, json};

use super::{Context, html};
use crate::failure::Failure;
use crate::flags::{DoctorFlags, FactsFlags};
use crate::output::{Answer, printable};

/// Largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Judges the machine that the flags describe.
///
/// # Errors
/// An input that cannot be read or is refused, a file that cannot be written.
pub(crate) fn run(flags: &DoctorFlags, context: &Context) -> Result<Answer, Failure> {
    let mut machine = machine(&flags.facts)?;
    let transfers = super::probe::run(&flags.probe, &mut machine, context)?;
    if let Some(path) = &flags.save {
        let text = json::save(&machine, flags.personal)
            .map_err(|error| Failure::failed("io-failed", error.to_string()))?;
        write_file(path, &text)?;
    }
    let report = checks::run_with(&machine, &transfers);
    if let Some(path) = &flags.html {
        write_file(path, &html::page(&machine, &report))?;
    }
    let mut answer = Answer::of("doctor");
    answer.text = as_text(&machine, &report, flags.all);
    add_json(&mut answer, &machine, &report)?;
    if let Some(simulated) = context.simulated() {
        answer.set("simulated", simulated);
    }
    let failed = report.failures().count();
    if failed > 0 {
        let message = match failed {
            1 => "1 finding failed".to_owned(),
            count => format!("{count} findings failed"),
        };
        answer.failure = Some(Failure::failed("findings-failed", message));
    }
    Ok(answer)
}

fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| {
        Failure::failed("io-failed", format!("cannot write {}: {error}", path.display()))
    })
}

/// Settings of the environment that change how paths are chosen.
const PREFIXES: [&str; 10] =
    ["NCCL_", "RCCL_", "CUFILE_", "CUDA_", "UCX_", "MLX5_", "NVSHMEM_", "FI_", "KVIKIO_", "RDMAV_"];

/// The record that the flags describe: a captured root, a saved record, files, or this machine.
///
/// # Errors
/// An input that cannot be read or is refused.
pub(crate) fn machine(flags: &FactsFlags) -> Result<Machine, Failure> {
    if let Some(root) = &flags.root {
        if !root.is_dir() {
            let message = format!("{} is not a directory", root.display());
            return Err(Failure::refused("input-refused", message));
        }
        return Ok(probe::gather(&Options { root: root.clone(), ..Options::default() }));
    }
    let mut machine = match &flags.load {
        Some(path) => load(path)?,
        None if flags.files.is_empty() => {
            let all = std::env::vars_os().filter_map(|(name, value)| {
                Some((name.into_string().ok()?, value.into_string().ok()?))
            });
            let kept =
                all.filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)));
            let environment = kept.collect();
            return Ok(probe::gather(&Options { environment, ..Options::default() }));
        }
        None => Machine::new(),
    };
    for path in &flags.files {
        add(&mut machine, path)?;
    }
    machine.unify();
    Ok(machine)
}

/// A saved record.
pub(crate) fn load(path: &Path) -> Result<Machine, Failure> {
    let refused =
        |text: String| Failure::refused("input-refused", format!("{}: {text}", path.display()));
    let text =
        String::from_utf8(read_file(path)?).map_err(|_| refused("not UTF-8 text".to_owned()))?;
    json::load(&text).map_err(|error| refused(error.to_string()))
}

fn read_file(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error: io::Error| {
        Failure::refused("input-refused", format!("cannot read {}: {error}", path.display()))
    };
    let file = fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Adds one file, or a captured tree.
pub(crate) fn add(machine: &mut Machine, path: &Path) -> Result<(), Failure> {
    let name = path.display().to_string();
    let refused = |error: beeline::core::facts::ReadError| {
        Failure::refused("input-refused", error.to_string())
    };
    if path.is_dir() {
        let mut files = Vec::new();
        collect(path, path, 0, &mut files)?;
        files.sort();
        return read_tree(machine, &name, &files).map(|_| ()).map_err(refused);
    }
    read(machine, &name, &read_file(path)?).map(|_| ()).map_err(refused)
}

/// Files of a captured tree, at most eight levels deep.
const DEPTH_MAX: u32 = 8;
/// Files of a captured tree.
const FILES_MAX: usize = 65_536;

fn collect(
    root: &Path,
    dir: &Path,
    depth: u32,
    files: &mut Vec<(String, Vec<u8>)>,
) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        Failure::refused("input-refused", format!("cannot read {}: {error}", dir.display()))
    };
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let Ok(kind) = path.symlink_metadata() else { continue };
        if kind.is_dir() && depth < DEPTH_MAX {
            collect(root, &path, depth + 1, files)?;
        } else if kind.is_file() {
            if files.len() >= FILES_MAX {
                let message = format!("{}: more than {FILES_MAX} files", root.display());
                return Err(Failure::refused("input-refused", message));
            }
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            files.push((name, read_file(&path)?));
        }
    }
    Ok(())
}

fn add_json(answer: &mut Answer, machine: &Machine, report: &Report) -> Result<(), Failure> {
    let failed = |error: serde_json::Error| Failure::failed("io-failed", error.to_string());
    let source = |source: &Source| {
        json!({
            "name": source.name,
            "kind": source.kind.as_str(),
            "lines": source.lines,
            "truncated": source.truncated,
        })
    };
    answer.set("version", machine.version);
    answer.set("sources", machine.sources.iter().map(source).collect::<Value>());
    answer.set("findings", serde_json::to_value(&report.findings).map_err(failed)?);
    answer.set("paths", serde_json::to_value(&report.paths).map_err(failed)?);
    answer.set("transfers", serde_json::to_value(&report.transfers).map_err(failed)?);
    let notes: Value = machine.notes.iter().map(|note| note.value.as_str()).collect();
    answer.set("notes", notes);
    Ok(())
}

/// Words for a status, the same in text and HTML.
pub(crate) const fn status_word(status: Status) -> &'static str {
    match status {
        Status::Pass => "pass",
        Status::Fail => "fail",
        Status::Skip => "skip",
        Status::Unknown => "unknown",
    }
}

/// Words for a severity.
pub(crate) const fn severity_word(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Error => "error",
        Severity::Critical => "critical",
    }
}

/// Whether a finding is worth a line when not everything was asked for.
pub(crate) fn is_interesting(finding: &Finding) -> bool {
    match finding.status {
        Status::Fail | Status::Unknown => true,
        Status::Pass => !finding.evidence.is_empty() || !finding.subjects.is_empty(),
        Status::Skip => false,
    }
}

/// Paths and lines of one list that are printed.
const LINES_MAX: usize = 32;

fn as_text(machine: &Machine, report: &Report, all: bool) -> String {
    let mut out = String::new();
    let live = machine.sources.iter().any(|source| source.kind == Kind::Live);
    if live {
        // What this machine has is no news; what could not be read in full is.
        let _ = writeln!(out, "this machine, from {} sources", machine.sources.len());
    }
    let given = |source: &&Source| source.kind != Kind::Live && (!live || source.truncated);
    for source in machine.sources.iter().filter(given) {
        let cut = if source.truncated { ", cut short: what is missing stays unknown" } else { "" };
        let _ = writeln!(out, "{}: {}{cut}", printable(&source.name), source.kind.what());
    }
    out.push('\n');
    for finding in report.findings.iter().filter(|finding| all || is_interesting(finding)) {
        finding_text(finding, &mut out);
    }
    if !report.paths.is_empty() {
        out.push_str("Paths:\n");
    }
    for path in report.paths.iter().take(LINES_MAX * 8) {
        let _ = writeln!(
            out,
            "  {} - {}: {} {} ({})",
            printable(&path.from),
            printable(&path.to),
            path.distance,
            path.level.as_str(),
            path.why
        );
    }
    super::probe::text(&report.transfers, &mut out);
    let count = |status| report.findings.iter().filter(|f| f.status == status).count();
    let _ = writeln!(
        out,
        "{} failed, {} unknown, {} passed, {} skipped for lack of input",
        count(Status::Fail),
        count(Status::Unknown),
        count(Status::Pass),
        count(Status::Skip)
    );
    out
}

fn finding_text(finding: &Finding, out: &mut String) {
    // A title says what is wrong when a check fails: beside a pass it would mislead.
    if finding.status == Status::Pass || finding.status == Status::Skip {
        // A pass with a remedy is a remark: nothing is wrong, and something could be there.
        let is_remark = finding.status == Status::Pass && !finding.remedies.is_empty();
        let word = if is_remark { "note" } else { status_word(finding.status) }.to_uppercase();
        let _ = writeln!(out, "{word} [{}] {}", finding.check, printable(&finding.message));
    } else {
        failed_text(finding, out);
    }
    let lists = [
        ("on", &finding.subjects),
        ("may be", &finding.candidates),
        ("would decide", &finding.missing),
        ("do", &finding.remedies),
        ("careful", &finding.cautions),
        ("seen at", &finding.evidence),
    ];
    for (label, list) in lists.into_iter().filter(|_| finding.status != Status::Skip) {
        for line in list.iter().take(LINES_MAX) {
            let _ = writeln!(out, "    {label}: {}", printable(line));
        }
        if list.len() > LINES_MAX {
            let _ = writeln!(out, "    {label}: and {} more", list.len() - LINES_MAX);
        }
    }
    if finding.status != Status::Skip && is_interesting(finding) {
        out.push('\n');
    }
}

fn failed_text(finding: &Finding, out: &mut String) {
    let _ = writeln!(
        out,
        "{} {}: {} [{}]\n  {}",
        status_word(finding.status).to_uppercase(),
        severity_word(finding.severity),
        finding.title,
        finding.check,
        printable(&finding.message)
    );
    if let Some(cause) = finding.consequence_of {
        let _ = writeln!(out, "  a consequence of {cause}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../beeline-core/tests/fixtures").join(name)
    }

    fn of(files: Vec<PathBuf>) -> DoctorFlags {
        let facts = FactsFlags { files, ..FactsFlags::default() };
        DoctorFlags { facts, ..DoctorFlags::default() }
    }

    fn context() -> Context {
        Context::new(false)
    }

    #[test]
    fn exit_codes_tell_fine_failed_and_refused() {
        let answer = run(&of(vec![fixture("lspci-vvv-2gpu-gpp-001d.txt")]), &context()).unwrap();
        assert_eq!(answer.failure.unwrap().exit, crate::failure::EXIT_FAILED);
        assert!(
            answer.text.contains("FAIL error") && answer.text.contains("setpci -s 0000:40:01.1")
        );

        let answer = run(&of(vec![fixture("lspci-vvv-2gpu-gpp-0001.txt")]), &context()).unwrap();
        assert_eq!(answer.failure, None);
        assert!(answer.text.contains("0 failed"));

        let refusal = run(&of(vec![fixture("does-not-exist")]), &context()).unwrap_err();
        assert_eq!(refusal.exit, crate::failure::EXIT_REFUSED);
        assert!(refusal.message.contains("does-not-exist"));

        let dir = tempfile::tempdir().unwrap();
        let odd = dir.path().join("odd.txt");
        fs::write(&odd, "nothing of the kind\n").unwrap();
        let refusal = run(&of(vec![odd]), &context()).unwrap_err();
        assert_eq!(refusal.exit, crate::failure::EXIT_REFUSED);
        assert!(
            refusal.message.contains("odd.txt:1:") && refusal.message.contains("expected one of")
        );
    }

    #[test]
    fn a_saved_record_gives_the_same_findings() {
        let dir = tempfile::tempdir().unwrap();
        let saved = dir.path().join("machine.json");
        let page = dir.path().join("page.html");
        let mut flags = of(vec![fixture("nccl-node-a-nogdr.log"), fixture("nccl-node-b-gdr.log")]);
        (flags.save, flags.html) = (Some(saved.clone()), Some(page.clone()));
        let first = run(&flags, &context()).unwrap();
        let text = fs::read_to_string(&saved).unwrap();
        assert!(!text.contains("nodea") && text.contains("host-1"));
        assert!(fs::read_to_string(&page).unwrap().contains("gdr-asymmetric"));

        let mut again = of(Vec::new());
        again.facts.load = Some(saved);
        let second = run(&again, &context()).unwrap();
        let codes = |answer: &Answer| -> Vec<String> {
            let list = answer.json["findings"].as_array().unwrap();
            list.iter().map(|f| format!("{} {}", f["check"], f["status"])).collect()
        };
        assert_eq!(codes(&first), codes(&second));
        assert!(first.failure.is_some() && second.failure.is_some());
    }
}
