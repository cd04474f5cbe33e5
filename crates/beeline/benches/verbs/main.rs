//! What the software NIC costs beside what it stands on, in one run.
//!
//! ```text
//! cargo bench -p beeline --bench verbs -- [--runs N] [--seconds N] [--only TEXT|TEXT]
//!     [--cores A,B] [--json]
//! ```
//! Bandwidth: one-way WRITEs of 1 MiB, 8 in flight, both sides polling, all bytes compared; beside it a
//! loop that sends and receives datagrams of the same size with `sendmmsg` and `recvmmsg` and runs a CRC
//! over each on both sides, a plain copy of memory of the same kind and size, and a loopback TCP stream.
//! Latency: half a round trip of small WRITEs whose target is polled, the median of one run; beside it a
//! UDP ping of the same datagram size and a TCP ping; and beside the local link what the machine itself
//! takes to carry one cache line, and four, from one core to the other. The two threads of a ping stay on two
//! cores (`--cores`, else the first two that are not one core's threads), for all cases the same. What the NIC
//! itself takes of it shows between two that are joined in memory ("over a pair"). Where several packets go to the
//! kernel as one piece (`UDP_SEGMENT`), a case without, and a bare loop with, stand beside.
//!
//! Every case is run `--runs` times, in turns and in alternating order (A B B A ...), so that a slow moment
//! of the machine, and what a case leaves behind, meet all of them. What stands there is the median of the
//! runs with the lowest and the highest; a ratio is the median of the ratios of each turn, with the lowest
//! and the highest. Nothing needs root; the raw link needs `CAP_NET_RAW` and says SKIP without it. Cores
//! that other programs use make every figure worse, the ratios too; `taskset` keeps the threads on some.
#![allow(clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used, clippy::expect_used)]

mod bare;
mod cores;
mod nic;

use std::error::Error;
use std::net::IpAddr;
use std::time::Duration;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Bytes of a WRITE for bandwidth, and how many are in flight.
const MESSAGE: u32 = 1 << 20;
const IN_FLIGHT: u64 = 8;

/// Round trips of one run for latency, and how long they may take on a busy machine.
const PINGS: u64 = 20_000;
const PING_SPAN: Duration = Duration::from_secs(6);

/// Payload of a small WRITE.
const SMALL_UDP: u32 = 8;
const SMALL_LOCAL: u32 = 64;

#[derive(Clone, Copy)]
enum Unit {
    BytesPerSecond,
    SecondsOneWay,
}

/// Name, unit, what it is held against, and one run of it.
struct Case {
    name: &'static str,
    unit: Unit,
    against: Option<&'static str>,
    run: fn(Duration) -> Result<Option<f64>>,
}

const CASES: &[Case] = &[
    Case {
        name: "bare sendmmsg/recvmmsg + CRC",
        unit: Unit::BytesPerSecond,
        against: None,
        run: |span| bare::datagrams(span).map(Some),
    },
    Case {
        name: "bare pieces of 15 + CRC",
        unit: Unit::BytesPerSecond,
        against: None,
        run: |span| bare::pieces(span),
    },
    Case {
        name: "TCP loopback stream",
        unit: Unit::BytesPerSecond,
        against: None,
        run: |span| bare::tcp_stream(span).map(Some),
    },
    Case {
        name: "WRITE 1 MiB over UDP",
        unit: Unit::BytesPerSecond,
        against: Some("bare sendmmsg/recvmmsg + CRC"),
        run: |span| nic::udp_bandwidth(span),
    },
    Case {
        name: "WRITE 1 MiB over UDP, no pieces",
        unit: Unit::BytesPerSecond,
        against: Some("bare sendmmsg/recvmmsg + CRC"),
        run: |span| nic::udp_bandwidth_without_pieces(span),
    },
    Case {
        name: "WRITE 1 MiB over raw",
        unit: Unit::BytesPerSecond,
        against: Some("bare sendmmsg/recvmmsg + CRC"),
        run: |span| nic::raw_bandwidth(span),
    },
    Case {
        name: "bare UDP ping",
        unit: Unit::SecondsOneWay,
        against: None,
        run: |_| bare::udp_ping().map(Some),
    },
    Case {
        name: "TCP loopback ping",
        unit: Unit::SecondsOneWay,
        against: None,
        run: |_| bare::tcp_ping().map(Some),
    },
    Case {
        name: "WRITE 8 B over UDP",
        unit: Unit::SecondsOneWay,
        against: Some("bare UDP ping"),
        run: |_| nic::udp_latency(),
    },
    Case {
        name: "WRITE 8 B over UDP, no pieces",
        unit: Unit::SecondsOneWay,
        against: Some("bare UDP ping"),
        run: |_| nic::udp_latency_without_pieces(),
    },
    Case {
        name: "WRITE 8 B over raw",
        unit: Unit::SecondsOneWay,
        against: Some("bare UDP ping"),
        run: |_| nic::raw_latency(),
    },
    Case {
        name: "WRITE 8 B over a pair",
        unit: Unit::SecondsOneWay,
        against: None,
        run: |_| nic::pair_latency().map(Some),
    },
    Case {
        name: "memcpy 1 MiB",
        unit: Unit::BytesPerSecond,
        against: None,
        run: |span| bare::copy(span).map(Some),
    },
    Case {
        name: "WRITE 1 MiB over local",
        unit: Unit::BytesPerSecond,
        against: Some("memcpy 1 MiB"),
        run: |span| nic::local_bandwidth(span).map(Some),
    },
    Case {
        name: "bare line, local cores",
        unit: Unit::SecondsOneWay,
        against: None,
        run: |_| bare::line_ping(1).map(Some),
    },
    Case {
        name: "bare 4 lines, local cores",
        unit: Unit::SecondsOneWay,
        against: Some("bare line, local cores"),
        run: |_| bare::line_ping(4).map(Some),
    },
    Case {
        name: "WRITE 64 B over local",
        unit: Unit::SecondsOneWay,
        against: Some("bare line, local cores"),
        run: |_| nic::local_latency().map(Some),
    },
];

struct Options {
    runs: usize,
    span: Duration,
    only: Option<String>,
    json: bool,
    cores: Option<[usize; 2]>,
}

fn main() -> Result<()> {
    let options = options()?;
    cores::choose(options.cores)?;
    let cases: Vec<&Case> = CASES.iter().filter(|case| wanted(&options, case)).collect();
    // Of each case one value a turn.
    let mut values: Vec<Vec<Option<f64>>> = vec![Vec::new(); cases.len()];
    for turn in 0..options.runs {
        let mut order: Vec<usize> = (0..cases.len()).collect();
        if turn % 2 == 1 {
            order.reverse();
        }
        for at in order {
            let value = (cases[at].run)(options.span);
            values[at].push(value.map_err(|error| format!("{}: {error}", cases[at].name))?);
        }
    }
    if !options.json {
        println!("{}", heading(&options));
    }
    for (case, own) in cases.iter().zip(&values) {
        let Some(value) = Spread::of(own.iter().flatten().copied()) else {
            println!("SKIP {}", case.name);
            continue;
        };
        let ratio = case.against.and_then(|name| {
            let other = values.get(cases.iter().position(|case| case.name == name)?)?;
            let each = own.iter().zip(other).filter_map(|(own, other)| Some((*own)? / (*other)?));
            Some((name, Spread::of(each)?))
        });
        print_case(case, value, ratio, options.json);
    }
    Ok(())
}

/// Whether a case is asked for: by any of the texts between the bars.
fn wanted(options: &Options, case: &Case) -> bool {
    let texts = options.only.as_deref().unwrap_or_default();
    texts.split('|').any(|text| case.name.contains(text))
}

fn options() -> Result<Options> {
    let mut options =
        Options { runs: 5, span: Duration::from_secs(1), only: None, json: false, cores: None };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--runs" => options.runs = value()?.parse()?,
            "--seconds" => options.span = Duration::from_secs_f64(value()?.parse()?),
            "--only" => options.only = Some(value()?),
            "--cores" => {
                let text = value()?;
                let (one, other) = text.split_once(',').ok_or("--cores needs two numbers")?;
                options.cores = Some([one.parse()?, other.parse()?]);
            }
            "--json" => options.json = true,
            // Cargo adds it.
            "--bench" => {}
            _ => return Err(format!("no option {arg}").into()),
        }
    }
    if options.runs == 0 || options.span.is_zero() {
        return Err("at least one run of some length".into());
    }
    Ok(options)
}

fn heading(options: &Options) -> String {
    // In a bundle a file says it.
    let commit = std::fs::read_to_string("COMMIT").or_else(|_| {
        let git = std::process::Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
        git.map(|out| String::from_utf8_lossy(&out.stdout).into_owned())
    });
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!(
        "commit {}, {cores} cores, loopback, path MTU 4096, {} runs of {} s, pings between {}; bytes compared",
        commit.unwrap_or_default().trim(),
        options.runs,
        options.span.as_secs_f64(),
        cores::text()
    )
}

/// The median, the lowest and the highest of some values.
struct Spread {
    median: f64,
    low: f64,
    high: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (*sorted.first()?, *sorted.last()?);
        Some(Self { median: *sorted.get(sorted.len() / 2)?, low, high })
    }
}

fn print_case(case: &Case, value: Spread, ratio: Option<(&str, Spread)>, json: bool) {
    let (scale, unit) = match case.unit {
        Unit::BytesPerSecond => (1e-9, "GB/s"),
        Unit::SecondsOneWay => (1e6, "us"),
    };
    let Spread { median, low, high } = value;
    let (median, low, high) = (median * scale, low * scale, high * scale);
    if json {
        let (against, ratio) = ratio.map_or(("null".to_owned(), "null".to_owned()), |(name, r)| {
            (format!("\"{name}\""), format!("{:.3}", r.median))
        });
        println!(
            "{{\"case\": \"{}\", \"unit\": \"{unit}\", \"median\": {median:.3}, \"min\": {low:.3}, \
             \"max\": {high:.3}, \"against\": {against}, \"ratio\": {ratio}}}",
            case.name
        );
        return;
    }
    let ratio = ratio.map_or_else(String::new, |(name, ratio)| {
        format!("  {:.2} ({:.2}-{:.2}) of {name}", ratio.median, ratio.low, ratio.high)
    });
    println!("{:<32} {median:>7.2} ({low:.2}-{high:.2}) {unit}{ratio}", case.name);
}

/// Loopback addresses of this process: each NIC needs one of its own.
fn address(n: u8) -> IpAddr {
    let process = std::process::id();
    IpAddr::from([127, 70 + (process / 250 % 150) as u8, (process % 250) as u8, n])
}
