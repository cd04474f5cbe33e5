//! Throughput and latency.

use std::time::{Duration, Instant};

use beeline::gpu::Gpu;
use beeline::verbs::{RemoteMemory, SendOp};

use crate::side::Side;
use crate::{MIB, Outcome, Pair, WAIT, claim, claim_quietly, name};

/// Kinds of memory that are measured.
const KINDS: &[&str] = &["shareable", "plain", "foreign"];

/// Messages in flight for throughput.
const DEPTH: u64 = 4;

/// Bytes per second of pinned copies from the device and to it.
pub(crate) fn rates(gpu: &Gpu) -> Outcome<(f64, f64)> {
    let (len, times) = if gpu.info().simulated { (16 * MIB, 4) } else { (256 * MIB, 16) };
    let (pinned, buffer, stream) = (gpu.pin(len)?, gpu.alloc(len)?, gpu.stream()?);
    let mut best = [0.0_f64; 2];
    for (out, best) in [true, false].into_iter().zip(&mut best) {
        for round in 0..3 {
            let start = Instant::now();
            for _ in 0..times {
                match out {
                    true => stream.copy_to_host(&pinned, 0, &buffer, 0, len)?,
                    false => stream.copy_to_device(&buffer, 0, &pinned, 0, len)?,
                }
            }
            stream.synchronize(Instant::now() + WAIT)?;
            if round > 0 {
                *best = best.max((len * times) as f64 / start.elapsed().as_secs_f64());
            }
        }
    }
    Ok((best[0], best[1]))
}

pub(crate) fn throughput(pair: &mut Pair) -> Outcome {
    println!("\n== throughput (GB/s; bytes compared after each)");
    let (out, into) = rates(&pair.gpu)?;
    let far: Vec<f64> =
        pair.control.ask("rates")?.split(' ').filter_map(|text| text.parse().ok()).collect();
    println!("pinned copies here: D2H {:.1}, H2D {:.1}", out / 1e9, into / 1e9);
    println!("pinned copies there: D2H {:.1}, H2D {:.1}", far[0] / 1e9, far[1] / 1e9);
    let slower = [out, into, far[0], far[1]].into_iter().fold(f64::MAX, f64::min);
    for local in [true, false] {
        let message = match (pair.quick(), local) {
            (true, _) => MIB,
            (false, true) => 64 * MIB,
            (false, false) => 4 * MIB,
        };
        let span = Duration::from_millis(if pair.quick() { 200 } else { 1200 });
        for kind in KINDS {
            if *kind == "foreign" && pair.gpu.info().simulated {
                continue;
            }
            let nic = pair.nic(local)?;
            let (side, remote) = pair.sides(&nic, kind, message * DEPTH)?;
            let mut line = format!("{:5} {kind:9} {message:>9} B:", name(local));
            let mut add = |what: &str, rate: f64| {
                line += &format!(" {what} {:.2} ({:.2})", rate / 1e9, rate / slower);
            };
            side.fill(5, 0, message * DEPTH)?;
            add("WRITE", flood(&side, &remote, false, (message, DEPTH), span)?);
            let there = pair.there(&format!("check 5 0 {}", message * DEPTH))?;
            claim_quietly("bytes after the WRITEs", there)?;
            pair.control.ask(&format!("fill 6 0 {}", message * DEPTH))?;
            add("READ", flood(&side, &remote, true, (message, DEPTH), span)?);
            claim_quietly("bytes after the READs", side.check(6, 0, message * DEPTH)?)?;
            // Both write at the same time: the same bytes, so that they can be compared all the same.
            let mine = side.mr.remote();
            let millis = span.as_millis();
            pair.control.say(&format!("write {message} {DEPTH} {millis} {mine}"))?;
            let here = flood(&side, &remote, false, (message, DEPTH), span)?;
            let there: f64 = pair.control.hear()?.parse()?;
            add("both at once", here + there);
            let same = side.check(6, 0, message * DEPTH)?
                && pair.there(&format!("check 6 0 {}", message * DEPTH))?;
            claim_quietly("bytes after both", same)?;
            println!("{line} (of the slower copy), compared");
            pair.control.ask("drop")?;
        }
    }
    Ok(())
}

/// Bytes per second of WRITEs from a region to the same places of the peer's, or of READs from there;
/// `depth` in flight.
pub(crate) fn flood(
    side: &Side,
    remote: &RemoteMemory,
    read: bool,
    (message, depth): (u64, u64),
    span: Duration,
) -> Outcome<f64> {
    let (mut posted, mut done) = (0_u64, 0_u64);
    let mut start = Instant::now();
    let mut counted = 0;
    let places = (side.buffer.len() / message).max(1);
    while start.elapsed() < span || done < posted {
        while posted - done < depth && start.elapsed() < span {
            let at = posted % places * message;
            let op = match read {
                true => SendOp::Read { remote: remote.at(at) },
                false => SendOp::Write { remote: remote.at(at), imm: None },
            };
            side.post(posted, op, at, message)?;
            posted += 1;
        }
        side.done()?;
        done += 1;
        // The first messages go while the peer still maps the memory.
        if done == 2 * depth {
            (start, counted) = (Instant::now(), done);
        }
    }
    let end = start.elapsed();
    Ok(done.saturating_sub(counted) as f64 * message as f64 / end.as_secs_f64())
}

pub(crate) fn latency(pair: &mut Pair, local: bool) -> Outcome {
    println!("\n== latency over {}: median us from post to completion", name(local));
    println!("{:9} {:>8} {:>9} {:>9} {:>9}", "memory", "bytes", "WRITE", "READ", "ADD");
    let turns = if pair.quick() { 20 } else { 200 };
    for kind in KINDS {
        if *kind == "foreign" && pair.gpu.info().simulated {
            continue;
        }
        let nic = pair.nic(local)?;
        let (side, remote) = pair.sides(&nic, kind, MIB)?;
        side.fill(3, 0, MIB)?;
        pair.control.ask(&format!("fill 3 0 {MIB}"))?;
        for shift in [3, 6, 9, 12, 14, 16, 18, 20] {
            let len = 1_u64 << shift;
            let mut row = format!("{kind:9} {len:>8}");
            for what in 0..3 {
                if what == 2 && len != 8 {
                    continue;
                }
                let micros = median(&side, &remote, what, len, turns)?;
                row += &format!(" {micros:>9.1}");
            }
            println!("{row}");
        }
        let same = side.check(3, 0, MIB)? && pair.there(&format!("check 3 0 {MIB}"))?;
        claim(&format!("bytes of {kind} memory after it"), same)?;
        pair.control.ask("drop")?;
    }
    Ok(())
}

/// Microseconds from the post to the completion: of a WRITE, a READ or an addition of nothing.
fn median(side: &Side, remote: &RemoteMemory, what: u32, len: u64, turns: u64) -> Outcome<f64> {
    let mut nanos = Vec::new();
    for turn in 0..turns {
        let op = match what {
            0 => SendOp::Write { remote: remote.at(0), imm: None },
            1 => SendOp::Read { remote: remote.at(0) },
            _ => SendOp::FetchAdd { remote: remote.at(0), add: 0 },
        };
        let start = Instant::now();
        side.post(turn, op, 0, len)?;
        side.done()?;
        nanos.push(start.elapsed().as_nanos());
    }
    nanos.sort_unstable();
    Ok(nanos[nanos.len() / 2] as f64 / 1e3)
}
