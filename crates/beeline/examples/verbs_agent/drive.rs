//! The driver: the same cases over any two agents.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const ALL: u32 = 15;
const KIB: u64 = 1024;

/// Bytes of each region: two buffers of the largest message.
const REGION: u64 = 40 << 20;
const SECOND: u64 = 20 << 20;

/// How long a completion may take: the guest is emulated, and the network loses packets on purpose.
const WAIT_MS: u32 = 60_000;

struct Options {
    mtus: Vec<u32>,
    sizes: Vec<u64>,
    bursts: u32,
    errors: bool,
    misaligned: bool,
    timeout: u32,
}

pub(crate) fn drive(first: &str, second: &str, words: &[&str]) -> Result<()> {
    let options = options(words)?;
    let (mut a, mut b) = (Agent::connect(first)?, Agent::connect(second)?);
    let start = Instant::now();
    let mut cases = 0;
    if options.errors || options.misaligned {
        let line = errors(&mut a, &mut b, options.misaligned)?;
        println!("statuses {line}");
        return Ok(());
    }
    for mtu in &options.mtus {
        join(&mut a, &mut b, Setup { mtu: *mtu, timeout: options.timeout, ..Setup::default() })?;
        let round = Instant::now();
        for size in sizes(&options, *mtu) {
            cases += transfers(&mut a, &mut b, size)
                .map_err(|error| format!("mtu {mtu}, {size} bytes: {error}"))?;
        }
        cases += atomics(&mut a, &mut b).map_err(|error| format!("mtu {mtu}: {error}"))?;
        for round in 0..options.bursts {
            let done = burst(&mut a, &mut b);
            cases += done.map_err(|error| format!("mtu {mtu}, burst {round}: {error}"))?;
        }
        println!("  mtu {mtu}: ok in {:.1} s", round.elapsed().as_secs_f64());
    }
    println!(
        "OK {first} -> {second}: {cases} cases, bytes compared, {:.1} s",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

fn options(words: &[&str]) -> Result<Options> {
    let mut options = Options {
        mtus: vec![256, 512, 1024, 2048, 4096],
        sizes: vec![64 * KIB],
        bursts: 1,
        errors: false,
        misaligned: false,
        timeout: 14,
    };
    let list = |text: &str| -> Result<Vec<u64>> {
        text.split(',').map(|word| Ok(word.parse()?)).collect()
    };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or("a value is missing");
        match *word {
            "--mtu" => options.mtus = list(value()?)?.into_iter().map(|mtu| mtu as u32).collect(),
            "--sizes" => options.sizes = list(value()?)?,
            "--bursts" => options.bursts = value()?.parse()?,
            "--timeout" => options.timeout = value()?.parse()?,
            "--errors" => options.errors = true,
            "--misaligned" => options.misaligned = true,
            other => return Err(format!("no option {other}").into()),
        }
    }
    Ok(options)
}

/// The sizes around a packet, and those that were asked for.
fn sizes(options: &Options, mtu: u32) -> Vec<u64> {
    let mtu = u64::from(mtu);
    let mut sizes = vec![0, 1, mtu - 1, mtu, mtu + 1];
    sizes.extend(&options.sizes);
    sizes
}

/// Every operation that moves bytes, with and without immediate data.
fn transfers(a: &mut Agent, b: &mut Agent, size: u64) -> Result<u32> {
    let mut cases = 0;
    let mut seed = 1 + (size % 200) as u32;
    a.ok(&format!("fill 0 {size} {seed}"))?;
    for imm in [-1i64, 0x1234_5678] {
        // WRITE
        b.ok(&format!("zero 64 {size}"))?;
        if imm >= 0 {
            b.ok(&format!("recv 7 {SECOND} 0"))?;
        }
        a.ok(&format!("write 1 0 {size} {} {} {imm}", b.va + 64, b.rkey))?;
        a.expect("wc 1 0 0 -1", "WRITE")?;
        if imm >= 0 {
            b.expect(&format!("wc 7 0 {size} {imm}"), "WRITE with immediate")?;
        }
        b.ok(&format!("check 64 {size} {seed}"))?;
        // SEND
        b.ok(&format!("zero {SECOND} {size}"))?;
        b.ok(&format!("recv 8 {SECOND} {}", size + 8))?;
        a.ok(&format!("send 2 0 {size} 0 0 {imm}"))?;
        b.expect(&format!("wc 8 0 {size} {imm}"), "SEND")?;
        a.expect("wc 2 0 0 -1", "SEND")?;
        b.ok(&format!("check {SECOND} {size} {seed}"))?;
        cases += 2;
    }
    // READ
    seed += 1;
    b.ok(&format!("fill 128 {size} {seed}"))?;
    a.ok(&format!("zero {SECOND} {size}"))?;
    a.ok(&format!("read 3 {SECOND} {size} {} {}", b.va + 128, b.rkey))?;
    a.expect("wc 3 0 0 -1", "READ")?;
    a.ok(&format!("check {SECOND} {size} {seed}"))?;
    Ok(cases + 1)
}

fn atomics(a: &mut Agent, b: &mut Agent) -> Result<u32> {
    let target = format!("{} {}", b.va + 8, b.rkey);
    b.ok("setword 8 40")?;
    for (kind, args, before, after) in [
        ("fadd", "2 0", 40u64, 42u64),
        ("cas", "42 7", 42, 7),
        ("cas", "42 8", 7, 7),
        ("fadd", "18446744073709551615 0", 7, 6),
    ] {
        a.ok(&format!("{kind} 4 0 8 {target} 0 {args}"))?;
        a.expect("wc 4 0 0 -1", kind)?;
        let (was, is) = (a.word(0)?, b.word(8)?);
        if (was, is) != (before, after) {
            return Err(format!("{kind}: {was} then {is}, not {before} then {after}").into());
        }
    }
    Ok(4)
}

/// Many work requests outstanding at once, mixed; all complete, in order.
fn burst(a: &mut Agent, b: &mut Agent) -> Result<u32> {
    b.ok("setword 8 0")?;
    a.ok("fill 0 4000 9")?;
    b.ok("fill 8192 4000 5")?;
    for id in 0..60u64 {
        let (va, rkey) = (b.va, b.rkey);
        let line = match id % 3 {
            0 => format!("write {id} 0 4000 {} {rkey} -1", va + (1 << 20) + id * 4096),
            1 => format!("read {id} {} 4000 {} {rkey}", SECOND + id * 4096, va + 8192),
            _ => format!("fadd {id} {} 8 {} {rkey} 0 1", (1 << 20) + id * 8, va + 8),
        };
        a.ok(&line)?;
    }
    for id in 0..60u64 {
        a.expect(&format!("wc {id} 0 0 -1"), "burst")?;
        match id % 3 {
            0 => b.ok(&format!("check {} 4000 9", (1 << 20) + id * 4096))?,
            1 => a.ok(&format!("check {} 4000 5", SECOND + id * 4096))?,
            _ => {
                let was = a.word((1 << 20) + id * 8)?;
                if was != id / 3 {
                    return Err(format!("FETCH_ADD {id} saw {was}").into());
                }
            }
        }
    }
    if b.word(8)? != 20 {
        return Err("an atomic was lost or executed twice".into());
    }
    Ok(60)
}

/// Requests that are refused: what both sides are told, as one line to be compared.
///
/// A misaligned atomic is a case of its own: libibverbs refuses to post one to rdma_rxe, so it reaches a
/// responder only from the software NIC.
fn errors(a: &mut Agent, b: &mut Agent, misaligned: bool) -> Result<String> {
    let mut lines = Vec::new();
    let normal = Setup::default();
    let cases: [(&str, Setup, &str); 9] = [
        ("rnr", Setup { rnr: 0, ..normal }, "send 1 0 8 0 0 -1"),
        ("bad-rkey-write", normal, "write 1 0 8 VA BAD -1"),
        ("bad-rkey-read", normal, "read 1 0 8 VA BAD"),
        ("bad-rkey-atomic", normal, "fadd 1 0 8 VA BAD 0 1"),
        ("bounds-write", normal, "write 1 0 64 END RKEY -1"),
        ("bounds-read", normal, "read 1 0 64 END RKEY"),
        ("region-flag", Setup { mr_access: 1, ..normal }, "write 1 0 8 VA RKEY -1"),
        ("qp-flag", Setup { qp_access: 1, ..normal }, "write 1 0 8 VA RKEY -1"),
        ("misaligned", normal, "fadd 1 0 8 ODD RKEY 0 1"),
    ];
    for (name, setup, line) in cases {
        if (name == "misaligned") != misaligned {
            continue;
        }
        join(a, b, setup)?;
        let line = line
            .replace("VA", &b.va.to_string())
            .replace("END", &(b.va + b.len - 32).to_string())
            .replace("ODD", &(b.va + 4).to_string())
            .replace("BAD", &(b.rkey ^ 0x1_0000).to_string())
            .replace("RKEY", &b.rkey.to_string());
        if name != "rnr" {
            b.ok("recv 9 0 64")?;
        }
        a.ok(&line)?;
        a.ok("send 2 0 8 0 0 -1")?;
        let first = a.status()?;
        let second = a.status()?;
        let receiver = if name == "rnr" { "-".to_owned() } else { b.status()? };
        let states = (a.ask("state")?, b.ask("state")?);
        let b_state = if name == "rnr" { "-" } else { states.1.trim_start_matches("ok ") };
        let a_state = states.0.trim_start_matches("ok ");
        lines.push(format!("{name}={first},{second}/{receiver}:{a_state}/{b_state}"));
    }
    Ok(lines.join(" "))
}

#[derive(Clone, Copy)]
struct Setup {
    mtu: u32,
    timeout: u32,
    rnr: u32,
    mr_access: u32,
    qp_access: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self { mtu: 1024, timeout: 14, rnr: 7, mr_access: ALL, qp_access: ALL }
    }
}

fn join(a: &mut Agent, b: &mut Agent, setup: Setup) -> Result<()> {
    let Setup { mtu, timeout, rnr, mr_access, qp_access } = setup;
    a.make(ALL, ALL)?;
    b.make(mr_access, qp_access)?;
    let (to_a, to_b) = (b.peer(), a.peer());
    for (agent, peer) in [(a, to_a), (b, to_b)] {
        agent.ok(&format!("connect {peer} {mtu} {timeout} 7 {rnr} 8"))?;
    }
    Ok(())
}

/// An agent, over TCP.
struct Agent {
    input: BufReader<TcpStream>,
    output: TcpStream,
    name: String,
    qpn: u64,
    psn: u64,
    addr: String,
    va: u64,
    len: u64,
    rkey: u64,
}

impl Agent {
    fn connect(address: &str) -> Result<Self> {
        let parsed: SocketAddr = address.parse()?;
        let end = Instant::now() + Duration::from_secs(20);
        let stream = loop {
            match TcpStream::connect(parsed) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > end => return Err(error.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_millis(u64::from(2 * WAIT_MS))))?;
        Ok(Self {
            input: BufReader::new(stream.try_clone()?),
            output: stream,
            name: address.into(),
            qpn: 0,
            psn: 0,
            addr: String::new(),
            va: 0,
            len: 0,
            rkey: 0,
        })
    }

    fn make(&mut self, mr_access: u32, qp_access: u32) -> Result<()> {
        let made = self.ask(&format!("new {REGION} {mr_access} {qp_access}"))?;
        let field = |name: &str| -> Result<String> {
            let value = made.split_whitespace().find_map(|word| word.strip_prefix(name));
            Ok(value.ok_or_else(|| format!("{}: {made}", self.name))?.to_owned())
        };
        let (qpn, psn, addr) = (field("qpn=")?.parse()?, field("psn=")?.parse()?, field("addr=")?);
        let (va, len) = (field("va=")?.parse()?, field("len=")?.parse()?);
        let rkey = field("rkey=")?.parse()?;
        (self.qpn, self.psn, self.addr) = (qpn, psn, addr);
        (self.va, self.len, self.rkey) = (va, len, rkey);
        Ok(())
    }

    /// What the other side must know.
    fn peer(&self) -> String {
        format!("{} {} {}", self.qpn, self.psn, self.addr)
    }

    fn ask(&mut self, line: &str) -> Result<String> {
        self.output.write_all(format!("{line}\n").as_bytes())?;
        let mut answer = String::new();
        if self.input.read_line(&mut answer)? == 0 {
            return Err(format!("{} hung up after `{line}`", self.name).into());
        }
        Ok(answer.trim().to_owned())
    }

    fn ok(&mut self, line: &str) -> Result<()> {
        let answer = self.ask(line)?;
        if answer.starts_with("ok") {
            return Ok(());
        }
        Err(format!("{}: `{line}`: {answer}", self.name).into())
    }

    fn expect(&mut self, completion: &str, what: &str) -> Result<()> {
        let answer = self.ask(&format!("poll {WAIT_MS}"))?;
        if answer == completion {
            return Ok(());
        }
        Err(format!("{}: {what}: `{answer}` instead of `{completion}`", self.name).into())
    }

    /// The status of the next completion.
    fn status(&mut self) -> Result<String> {
        let answer = self.ask(&format!("poll {WAIT_MS}"))?;
        Ok(answer.split_whitespace().nth(2).unwrap_or("none").to_owned())
    }

    fn word(&mut self, offset: u64) -> Result<u64> {
        let answer = self.ask(&format!("word {offset}"))?;
        Ok(answer.trim_start_matches("ok ").parse()?)
    }
}
