//! `beeline bench p2p`: what goes between the devices, beside what the link could carry.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use beeline::core::topology::{Point, Topology};
use beeline::gpu::{Gpu, Info};
use beeline::p2p::bench::{Measured, What, measure};
use beeline::p2p::{Options, Path};
use beeline::probe;
use serde_json::{Value, json};

use super::{Context, label};
use crate::failure::Failure;
use crate::flags::{BenchCommand, BenchFlags, BenchP2pFlags};
use crate::output::{self, Answer};

/// Time for one pair.
const PAIR_TIMEOUT: Duration = Duration::from_secs(60);
/// Devices of one run: every ordered pair is measured.
const DEVICES_MAX: usize = 16;

/// Runs the benchmark that was asked for.
///
/// # Errors
/// Devices that are not there, fewer than two; bytes that arrive wrong.
pub(crate) fn run(flags: &BenchFlags, context: &Context) -> Result<Answer, Failure> {
    match &flags.command {
        BenchCommand::P2p(flags) => p2p(flags, context),
    }
}

fn p2p(flags: &BenchP2pFlags, context: &Context) -> Result<Answer, Failure> {
    let token = context.cancel_token()?;
    let gpus = devices(flags, context)?;
    let limits = limits(&gpus);
    let mut answer = Answer::of("bench-p2p");
    let mut pairs: Vec<(usize, usize, Measured)> = Vec::new();
    let mut list: Vec<Value> = Vec::new();
    for (i, from) in gpus.iter().enumerate() {
        for (j, to) in gpus.iter().enumerate().filter(|(j, _)| *j != i) {
            let deadline = Instant::now() + PAIR_TIMEOUT;
            let found = measure(from, to, flags.bytes, deadline, Some(&token))?;
            let reasons: Vec<String> = Path::open(from, to, &Options::default())?
                .reasons()
                .iter()
                .map(ToString::to_string)
                .collect();
            let figures = found.figures.iter().map(|(what, figure)| {
                let unit = if what.is_latency() { "ns" } else { "mb_per_s" };
                json!({ "what": what.as_str(), unit: figure })
            });
            list.push(json!({
                "from": from.id().to_string(),
                "to": to.id().to_string(),
                "route": found.route.as_str(),
                "reasons": reasons,
                "limit_mb_per_s": limits(i, j),
                "figures": figures.collect::<Value>(),
            }));
            pairs.push((i, j, found));
        }
    }
    let infos: Vec<Info> = gpus.iter().map(Gpu::info).collect();
    answer.text = text(&infos, &pairs, flags.bytes, &limits);
    answer.set("simulated", infos.iter().any(|info| info.simulated));
    answer.set("bytes", flags.bytes);
    answer.set("commit", option_env!("BEELINE_COMMIT").unwrap_or("unknown"));
    answer.set("pairs", list);
    Ok(answer)
}

fn devices(flags: &BenchP2pFlags, context: &Context) -> Result<Vec<Gpu>, Failure> {
    let gpus = if flags.devices.is_empty() {
        let first = context.device(None)?;
        let simulated = first.info().simulated;
        let alike = Gpu::list().into_iter().filter(|info| info.simulated == simulated);
        alike.map(|info| Gpu::open(&info.id)).collect::<Result<Vec<_>, _>>()?
    } else {
        let open = |name: &String| context.device(Some(name.as_str()));
        flags.devices.iter().map(open).collect::<Result<Vec<_>, _>>()?
    };
    if gpus.len() < 2 || gpus.len() > DEVICES_MAX {
        let text = format!(
            "{} devices; a path goes between two, and {DEVICES_MAX} are measured at most",
            gpus.len()
        );
        return Err(Failure::refused("refused", text)
            .hint("name them with --devices, or set BEELINE_SIM_DEVICES=2 for simulated ones"));
    }
    Ok(gpus)
}

/// What the link between two devices carries at most, by the facts of this machine.
fn limits(gpus: &[Gpu]) -> impl Fn(usize, usize) -> Option<u64> + use<> {
    let real = gpus.iter().any(|gpu| !gpu.info().simulated);
    let machine = real.then(|| probe::gather(&probe::Options::default()));
    let addresses: Vec<Option<String>> = gpus
        .iter()
        .map(|gpu| gpu.info().cuda.and_then(|cuda| cuda.pci).map(|pci| pci.to_string()))
        .collect();
    move |from, to| {
        let topology = Topology::new(machine.as_ref()?);
        let point = |index: usize| -> Option<Point<'_>> {
            let address = addresses.get(index)?.as_deref()?;
            topology
                .gpus()
                .find(|gpu| topology.bdf(*gpu).is_some_and(|bdf| bdf.to_string() == address))
        };
        topology.mb_per_s(point(from)?, point(to)?)
    }
}

fn text(
    infos: &[Info],
    pairs: &[(usize, usize, Measured)],
    bytes: u64,
    limits: &impl Fn(usize, usize) -> Option<u64>,
) -> String {
    let mut out = String::new();
    for info in infos {
        let _ = writeln!(out, "{}  {}", label(info), output::printable(&info.name));
    }
    let _ = writeln!(out, "{bytes} bytes a copy, compared; rows send, columns receive");
    let names: Vec<String> = infos.iter().map(|info| info.id.to_string()).collect();
    let routes = |i: usize, j: usize| find(pairs, i, j).map(|found| found.route.to_string());
    matrix(&mut out, "route", &names, routes);
    for what in What::ALL {
        let cell = |i: usize, j: usize| {
            let figures = &find(pairs, i, j)?.figures;
            let (_, figure) = figures.iter().find(|(known, _)| *known == what)?;
            let ns = *figure as f64 / 1000.0;
            // Nanoseconds to microseconds, megabytes to gigabytes: the same factor.
            Some(if what.is_latency() { format!("{ns:.2}") } else { format!("{ns:.1}") })
        };
        matrix(&mut out, what.title(), &names, cell);
    }
    let limit = |i: usize, j: usize| Some(format!("{:.1}", limits(i, j)? as f64 / 1000.0));
    matrix(&mut out, "limit of the link, one way, GB/s (by its speed and width)", &names, limit);
    out
}

fn find(pairs: &[(usize, usize, Measured)], i: usize, j: usize) -> Option<&Measured> {
    pairs.iter().find(|(a, b, _)| (*a, *b) == (i, j)).map(|(.., found)| found)
}

/// One table, unless no cell has anything.
fn matrix(
    out: &mut String,
    title: &str,
    names: &[String],
    cell: impl Fn(usize, usize) -> Option<String>,
) {
    let all = |i: usize| (0..names.len()).map(|j| cell(i, j)).collect::<Vec<_>>();
    let rows: Vec<Vec<Option<String>>> = (0..names.len()).map(all).collect();
    if rows.iter().flatten().all(Option::is_none) {
        return;
    }
    let _ = write!(out, "\n{title}\n{:10}", "");
    for name in names {
        let _ = write!(out, "{name:>10}");
    }
    out.push('\n');
    for (name, row) in names.iter().zip(rows) {
        let _ = write!(out, "{name:10}");
        for cell in row {
            let _ = write!(out, "{:>10}", cell.as_deref().unwrap_or("-"));
        }
        out.push('\n');
    }
}
