//! The report as one static page: no script, no network, light and dark.
//!
//! Everything that comes from inputs is escaped; the page carries a policy that forbids loading.

use std::fmt::Write as _;

use beeline::core::checks::{Finding, Level, Outcome, PathVerdict, Report, Status};
use beeline::core::facts::Machine;

mod tree;

use super::doctor::{is_interesting, severity_word, status_word};

const STYLE: &str = "\
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--line:#c7ccd1;--soft:#f3f5f7;--good:#1a7f37;--bad:#b42318;\
--warn:#9a6700;--dim:#59636e}\
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e9ec;--line:#3b424a;--soft:#1d2126;--good:#4ac26b;\
--bad:#ff8f85;--warn:#e3b341;--dim:#9aa4ae}}\
body{margin:0 auto;max-width:70rem;padding:1.5rem;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}\
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem}\
article{border:1px solid var(--line);border-left-width:.4rem;border-radius:.4rem;padding:.6rem 1rem;margin:.8rem 0}\
article.critical,article.error{border-left-color:var(--bad)}article.warning{border-left-color:var(--warn)}\
article.info{border-left-color:var(--line)}article h3{font-size:1rem;margin:.2rem 0}\
article p{margin:.3rem 0}ul{margin:.2rem 0;padding-left:1.3rem}li{overflow-wrap:anywhere}\
.tag{font-weight:600;text-transform:uppercase;font-size:.8rem}.dim{color:var(--dim)}\
code{background:var(--soft);padding:0 .2rem;border-radius:.2rem}\
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--line)}\
td:first-child,td:nth-child(2),th,.state{white-space:nowrap}td{vertical-align:top}\
.state{font-weight:600}.plausible,.verified,.capable{color:var(--good)}.refused,.differs,.hung,.failed{color:var(--bad)}\
.unknown,.not-run{color:var(--warn)}#matrix td,#matrix th{text-align:center;border:1px solid var(--line)}#matrix{width:auto}\
details summary{cursor:pointer}\
.scroll{overflow-x:auto}svg{background:var(--soft);border-radius:.4rem}\
svg text{fill:var(--fg);font:13px ui-monospace,monospace}svg path{stroke:var(--dim);fill:none}\
svg rect,svg circle{stroke:var(--bg)}svg .gpu{fill:var(--good)}svg .nic{fill:var(--warn)}svg .drive{fill:var(--dim)}svg .port{fill:var(--line)}svg .redirect{fill:var(--bad)}";

/// The page.
pub(crate) fn page(machine: &Machine, report: &Report) -> String {
    let mut out = String::from(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>Beeline doctor</title>\n<style>",
    );
    out.push_str(STYLE);
    out.push_str("</style>\n</head>\n<body>\n<h1>Beeline doctor</h1>\n");
    summary(&mut out, machine, report);
    tree::tree(&mut out, machine);
    matrix(&mut out, report);
    paths(&mut out, report);
    transfers(&mut out, report);
    findings(&mut out, report);
    out.push_str("</body>\n</html>\n");
    out
}

/// Text as it may stand in an element or an attribute.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && c != '\n' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

fn summary(out: &mut String, machine: &Machine, report: &Report) {
    let failed = report.failures().count();
    let verdict = match failed {
        0 => "nothing failed".to_owned(),
        1 => "1 finding failed".to_owned(),
        count => format!("{count} findings failed"),
    };
    let _ = writeln!(out, "<p id=\"verdict\"><strong>{verdict}</strong></p>\n<ul id=\"sources\">");
    for source in machine.sources.iter().take(256) {
        let cut = if source.truncated { ", cut short" } else { "" };
        let _ = writeln!(out, "<li>{}: {}{cut}</li>", escape(&source.name), source.kind.what());
    }
    out.push_str("</ul>\n");
}

/// A mark for a state, so that colour is never alone.
const fn mark(level: Level) -> &'static str {
    match level {
        Level::Refused => "\u{2717}",
        Level::Unknown => "?",
        Level::Capable => "\u{25cb}",
        Level::Plausible => "\u{25d0}",
        Level::Verified => "\u{2713}",
    }
}

/// Ends of the matrix; a larger machine has the list only.
const MATRIX_MAX: usize = 24;

/// Every pair at a glance: distance and state.
fn matrix(out: &mut String, report: &Report) {
    let mut ends: Vec<&str> = Vec::new();
    for path in &report.paths {
        for end in [path.from.as_str(), path.to.as_str()] {
            if !ends.contains(&end) {
                ends.push(end);
            }
        }
    }
    if ends.len() < 3 || ends.len() > MATRIX_MAX {
        return;
    }
    let name = |end: &str| escape(end.split(" (").next().unwrap_or(end));
    out.push_str(
        "<h2>Pairs</h2>\n<p class=\"dim\">\u{2713} verified, \u{25d0} plausible, \u{25cb} capable, ? \
         unknown, \u{2717} refused; with the distance as nvidia-smi names it.</p>\n\
         <div class=\"scroll\"><table id=\"matrix\">\n<tr><th></th>",
    );
    for end in &ends {
        let _ = write!(out, "<th>{}</th>", name(end));
    }
    out.push_str("</tr>\n");
    for from in &ends {
        let _ = write!(out, "<tr><th>{}</th>", name(from));
        for to in &ends {
            let found = report.paths.iter().find(|path| joins(path, from, to));
            let _ = match found {
                Some(path) => {
                    let (level, distance) = (path.level.as_str(), escape(&path.distance));
                    let mark = mark(path.level);
                    write!(out, "<td class=\"{level}\" title=\"{level}\">{mark} {distance}</td>")
                }
                None => write!(out, "<td class=\"dim\">\u{b7}</td>"),
            };
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table></div>\n");
}

fn joins(path: &PathVerdict, a: &str, b: &str) -> bool {
    (path.from == a && path.to == b) || (path.from == b && path.to == a)
}

fn speed(mb_per_s: Option<u64>) -> String {
    mb_per_s.map_or_else(String::new, |mb| format!("{}.{}", mb / 1000, mb % 1000 / 100))
}

fn paths(out: &mut String, report: &Report) {
    if report.paths.is_empty() {
        return;
    }
    out.push_str(
        "<h2>Paths</h2>\n<div class=\"scroll\"><table id=\"paths\">\n<tr><th>from</th><th>to</th>\
         <th>distance</th><th>GB/s</th><th>state</th><th>why</th></tr>\n",
    );
    for path in report.paths.iter().take(1024) {
        let level = path.level.as_str();
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"state {level}\">{} {level}</td>\
             <td>{}</td></tr>",
            escape(&path.from),
            escape(&path.to),
            escape(&path.distance),
            speed(path.mb_per_s),
            mark(path.level),
            escape(&path.why)
        );
    }
    out.push_str("</table></div>\n<p class=\"dim\">GB/s: what the links allow, one way.</p>\n");
}

/// What a probe measured.
fn transfers(out: &mut String, report: &Report) {
    if report.transfers.is_empty() {
        return;
    }
    out.push_str(
        "<h2>Transfers</h2>\n<div class=\"scroll\"><table id=\"transfers\">\n<tr><th>from</th><th>to</th>\
         <th>moved by</th><th>GB/s</th><th>state</th><th>remark</th></tr>\n",
    );
    for transfer in report.transfers.iter().take(1024) {
        let state = transfer.outcome.as_str();
        let mark = match transfer.outcome {
            Outcome::Verified => "\u{2713}",
            Outcome::NotRun => "?",
            Outcome::Differs | Outcome::Hung | Outcome::Failed => "\u{2717}",
            Outcome::Absent => "\u{2013}",
        };
        let mut remarks = vec![escape(&transfer.note)];
        if transfer.simulated {
            remarks.insert(0, "simulated".to_owned());
        }
        remarks.retain(|remark| !remark.is_empty());
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"state {state}\">{mark} {state}</td>\
             <td>{}</td></tr>",
            escape(&transfer.from.to_string()),
            escape(&transfer.to.to_string()),
            escape(&transfer.by.to_string()),
            speed(transfer.mb_per_s),
            remarks.join("; ")
        );
    }
    out.push_str(
        "</table></div>\n<p class=\"dim\">GB/s: measured now; every byte was compared.</p>\n",
    );
}

fn findings(out: &mut String, report: &Report) {
    out.push_str("<h2>Findings</h2>\n<section id=\"findings\">\n");
    for finding in report.findings.iter().filter(|finding| is_interesting(finding)) {
        article(out, finding);
    }
    let quiet: Vec<&str> =
        report.findings.iter().filter(|f| !is_interesting(f)).map(|f| f.check).collect();
    let _ = writeln!(
        out,
        "</section>\n<details class=\"dim\"><summary>Passed without a remark, or skipped for lack of input: {}</summary>\
         <p>{}.</p></details>",
        quiet.len(),
        quiet.join(", ")
    );
}

fn article(out: &mut String, finding: &Finding) {
    let severity = severity_word(finding.severity);
    let _ = writeln!(
        out,
        "<article class=\"{severity}\" id=\"{0}\">\n<h3>{1}</h3>\n<p><span class=\"tag\">{2}, {severity}</span> \
         <code>{0}</code></p>\n<p>{3}</p>",
        finding.check,
        if finding.status == Status::Pass { "Remark" } else { finding.title },
        status_word(finding.status),
        escape(&finding.message)
    );
    if let Some(cause) = finding.consequence_of {
        let _ = writeln!(out, "<p>A consequence of <a href=\"#{cause}\">{cause}</a>.</p>");
    }
    let lists = [
        ("On", &finding.subjects),
        ("May be", &finding.candidates),
        ("Would decide", &finding.missing),
        ("Do", &finding.remedies),
        ("Careful", &finding.cautions),
        ("Seen at", &finding.evidence),
    ];
    for (label, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
        let _ = writeln!(out, "<p>{label}:</p>\n<ul>");
        for line in list.iter().take(64) {
            let _ = writeln!(out, "<li>{}</li>", escape(line));
        }
        out.push_str("</ul>\n");
    }
    out.push_str("</article>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline::core::checks;

    #[test]
    fn the_page_is_static_escaped_and_well_formed() {
        let mut machine = Machine::new();
        let listing = "0000:40:01.1 PCI bridge: <script>alert(1)</script>\n\
            \tBus: primary=40, secondary=41, subordinate=41\n\
            \tCapabilities: [58] Express (v2) Root Port\n\
            \t\tACSCtl:\tSrcValid+ ReqRedir+\n\
            0000:41:00.0 3D controller: NVIDIA Corporation \"A\" & <b>\n";
        beeline::core::facts::read(&mut machine, "<x>.txt", listing.as_bytes()).unwrap();
        machine.unify();
        let page = page(&machine, &checks::run(&machine));
        assert!(!page.contains("<script") && !page.contains("<b>") && !page.contains("http://"));
        assert!(
            page.contains("&lt;x&gt;.txt")
                && page.contains("id=\"machine\"")
                && page.contains("id=\"findings\"")
        );
        assert!(page.contains("class=\"redirect\""));
        assert!(page.contains("prefers-color-scheme:dark"));
        // Every element that is opened is closed.
        for element in
            ["html", "body", "svg", "ul", "article", "section", "div", "text", "table", "details"]
        {
            let count = |text: &str| page.matches(text).count();
            let opened = count(&format!("<{element}>")) + count(&format!("<{element} "));
            assert_eq!(opened, count(&format!("</{element}>")), "{element}");
        }
    }
}
