//! The report as one static page: no script, no network, light and dark.
//!
//! Everything that comes from inputs is escaped; the page carries a policy that forbids loading.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use beeline::core::checks::{Finding, Level, Report, Status};
use beeline::core::facts::{Bdf, Known, Machine, Parent};

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
.plausible,.verified,.capable{color:var(--good)}.refused{color:var(--bad)}.unknown{color:var(--warn)}\
.scroll{overflow-x:auto}svg{background:var(--soft);border-radius:.4rem}\
svg text{fill:var(--fg);font:13px ui-monospace,monospace}svg path{stroke:var(--dim);fill:none}\
svg .gpu{fill:var(--good)}svg .nic{fill:var(--warn)}svg .drive{fill:var(--dim)}svg .port{fill:var(--line)}svg .redirect{fill:var(--bad)}";

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
    tree(&mut out, machine);
    paths(&mut out, report);
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

/// Rows of the drawing.
const ROWS_MAX: usize = 400;
/// Height of a row and width of a level, in pixels.
const ROW: usize = 22;
const LEVEL: usize = 26;

/// One row: depth, class for colour, text.
struct Row {
    depth: usize,
    class: &'static str,
    text: String,
}

/// The machine as a tree: host bridges and CPUs, ports, and the devices that matter below them.
fn tree(out: &mut String, machine: &Machine) {
    let mut children: BTreeMap<Option<Parent>, Vec<Bdf>> = BTreeMap::new();
    for (bdf, device) in &machine.pci {
        let parent = device.parent.known().cloned();
        children.entry(parent).or_default().push(*bdf);
    }
    let roots: Vec<Parent> = children
        .keys()
        .flatten()
        .filter(|parent| !matches!(parent, Parent::Bridge(_)))
        .cloned()
        .collect();
    let mut rows = Vec::new();
    for root in &roots {
        let label = match root {
            Parent::Host(name) => format!("host bridge {name}"),
            Parent::Cpu(node) => format!("CPU, NUMA node {node}"),
            Parent::Bridge(bdf) => bdf.to_string(),
        };
        rows.push(Row { depth: 0, class: "port", text: label });
        let below = children.get(&Some(root.clone()));
        for bdf in below.into_iter().flatten() {
            descend(machine, &children, *bdf, 1, &mut rows);
        }
    }
    for gpu in machine.gpus.iter().filter(|gpu| gpu.bdf.is_none()) {
        rows.push(Row { depth: 0, class: "gpu", text: gpu.label() });
    }
    // A host bridge with nothing of interest below it says nothing.
    let mut kept: Vec<Row> = Vec::new();
    for row in rows {
        if row.depth == 0 && kept.last().is_some_and(|last| last.depth == 0 && last.class == "port")
        {
            kept.pop();
        }
        kept.push(row);
    }
    if kept.last().is_some_and(|last| last.depth == 0 && last.class == "port") {
        kept.pop();
    }
    draw(out, &kept);
}

/// Adds a device and what is below it; true where anything of interest is.
fn descend(
    machine: &Machine,
    children: &BTreeMap<Option<Parent>, Vec<Bdf>>,
    bdf: Bdf,
    depth: usize,
    rows: &mut Vec<Row>,
) -> bool {
    if depth > 32 || rows.len() >= ROWS_MAX {
        return false;
    }
    let place = rows.len();
    let (class, text, wanted) = describe(machine, bdf);
    rows.push(Row { depth, class, text });
    let mut any = wanted;
    for child in children.get(&Some(Parent::Bridge(bdf))).into_iter().flatten() {
        any |= descend(machine, children, *child, depth + 1, rows);
    }
    if !any {
        rows.truncate(place);
    }
    any
}

fn describe(machine: &Machine, bdf: Bdf) -> (&'static str, String, bool) {
    if let Some(gpu) = machine.gpus.iter().find(|gpu| gpu.bdf.known() == Some(&bdf)) {
        let name = gpu.name.known().map_or("", String::as_str);
        return ("gpu", format!("{} {name}", gpu.label()), true);
    }
    let nics: Vec<&str> = machine
        .nics
        .iter()
        .filter(|(_, nic)| nic.bdf.known() == Some(&bdf))
        .map(|(name, _)| name.as_str())
        .collect();
    if !nics.is_empty() {
        return ("nic", format!("NIC {} ({bdf})", nics.join(", ")), true);
    }
    let device = machine.pci.get(&bdf);
    let class = device.and_then(|device| device.class.known()).map_or(0, |class| class >> 8);
    let link = device
        .and_then(|device| device.link.known())
        .map_or(String::new(), |link| format!(" {link}"));
    if class == 0x0108 {
        return ("drive", format!("NVMe {bdf}{link}"), true);
    }
    match device.and_then(|device| device.acs.known()).filter(|acs| acs.redirects()) {
        Some(acs) => ("redirect", format!("port {bdf}{link}, ACS {acs}"), false),
        None => ("port", format!("port {bdf}{link}"), false),
    }
}

fn draw(out: &mut String, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let height = rows.len() * ROW + 12;
    let widest = rows.iter().map(|row| row.depth * LEVEL + row.text.chars().count() * 8).max();
    let width = widest.unwrap_or(0) + 60;
    let _ = writeln!(
        out,
        "<h2>Machine</h2>\n<p class=\"dim\">Green: GPU. Amber: NIC. Grey: drive or port. Red: a port that \
         redirects peer traffic.</p>\n<div class=\"scroll\"><svg id=\"machine\" role=\"img\" \
         aria-label=\"the machine as a tree\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">"
    );
    let mut last_at_depth: Vec<usize> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let (x, y) = (16 + row.depth * LEVEL, 18 + index * ROW);
        last_at_depth.truncate(row.depth);
        if let Some(parent) = last_at_depth.last() {
            let (px, py) = (16 + (row.depth - 1) * LEVEL, 18 + parent * ROW);
            let _ = writeln!(out, "<path d=\"M{px} {} V{y} H{}\"/>", py + 6, x - 6);
        }
        last_at_depth.resize(row.depth, index);
        last_at_depth.push(index);
        let _ = writeln!(
            out,
            "<circle class=\"{}\" cx=\"{x}\" cy=\"{y}\" r=\"5\"/><text x=\"{}\" y=\"{}\">{}</text>",
            row.class,
            x + 12,
            y + 4,
            escape(&row.text)
        );
    }
    out.push_str("</svg></div>\n");
}

fn paths(out: &mut String, report: &Report) {
    if report.paths.is_empty() {
        return;
    }
    out.push_str(
        "<h2>Paths</h2>\n<div class=\"scroll\"><table id=\"paths\">\n<tr><th>from</th><th>to</th>\
         <th>distance</th><th>GB/s, one way</th><th>state</th><th>why</th></tr>\n",
    );
    for path in report.paths.iter().take(1024) {
        let level = match path.level {
            Level::Refused => "refused",
            Level::Unknown => "unknown",
            other => other.as_str(),
        };
        let speed = path
            .mb_per_s
            .map_or_else(String::new, |mb| format!("{}.{}", mb / 1000, mb % 1000 / 100));
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{speed}</td><td class=\"{level}\">{level}</td>\
             <td>{}</td></tr>",
            escape(&path.from),
            escape(&path.to),
            escape(&path.distance),
            escape(&path.why)
        );
    }
    out.push_str("</table></div>\n");
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
        "</section>\n<p class=\"dim\">Passed without a remark, or skipped for lack of input: {}.</p>",
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
        if finding.status == Status::Pass { "" } else { finding.title },
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
        for element in ["html", "body", "svg", "ul", "article", "section", "div", "text", "table"] {
            let count = |text: &str| page.matches(text).count();
            let opened = count(&format!("<{element}>")) + count(&format!("<{element} "));
            assert_eq!(opened, count(&format!("</{element}>")), "{element}");
        }
    }
}
