//! What the software NIC costs beside the bare sockets it stands on.
//!
//! ```text
//! cargo run --release -p beeline --example verbs_bench [SECONDS [local]]
//! ```
//! Bandwidth: one-way WRITEs of 1 MiB over UDP on loopback, against a bare loop that sends and receives
//! datagrams of the same size with `sendmmsg` and `recvmmsg` and runs a CRC over each on both sides.
//! Latency: half a round trip of 8-byte WRITEs that poll memory, against a bare UDP ping of the same
//! datagram size. Two NICs that share memory stand against a plain copy; there, beside the average, the
//! best slice of 10 ms is shown for both, and the median of latency: on a machine that does other things
//! too, averages tell of those. Received bytes are compared. Every figure is of one run; the commit is
//! printed.
#![allow(clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used)]

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline::verbs::{
    Access, Connect, Context, Cq, LinkKind, Mr, Mtu, Nic, Payload, Qp, QpCaps, QpKind, SendOp,
    SendWr, SoftOptions, Status,
};
use beeline_sys::mem::HostMem;
use beeline_sys::net::{BATCH_MAX, Outgoing, UdpSocket};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A full packet of path MTU 4096: BTH, RETH, payload, ICRC.
const DATAGRAM: usize = 12 + 16 + 4096 + 4;
const MESSAGE: u32 = 1 << 20;
const IN_FLIGHT: u64 = 8;
const PINGS: u64 = 20_000;
const PING_SPAN: Duration = Duration::from_secs(6);

fn main() -> Result<()> {
    let seconds = std::env::args().nth(1).map_or(Ok(3), |text| text.parse())?;
    let span = Duration::from_secs(seconds);
    let commit = std::process::Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    let commit = commit.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    println!("commit {}, path MTU 4096, loopback", commit.unwrap_or_default());
    if std::env::args().nth(2).is_some_and(|part| part == "local") {
        return local_memory(span);
    }
    let bare = bare_bandwidth(span)?;
    println!("bare sendmmsg/recvmmsg + CRC  {:7.2} GB/s", bare / 1e9);
    let bare_ping = bare_latency()?;
    println!("bare UDP ping                 {:7.2} us one way", bare_ping * 1e6);
    for link in [LinkKind::Udp, LinkKind::Raw] {
        let pair = |n| Nic::soft(SoftOptions::new(address(n)).link(link).mtu(Mtu::MAX));
        let (Ok(a), Ok(b)) = (pair(1), pair(2)) else {
            println!("SKIP {link:?}");
            continue;
        };
        let (a, b) = joined(&a, &b)?;
        let (got, _) = bandwidth(&a, &b, span)?;
        println!(
            "WRITE 1 MiB over {link:?}           {:7.2} GB/s  {:.2} of the bare loop, compared",
            got / 1e9,
            got / bare
        );
        let (ping, _) = latency(&a, &b, 8)?;
        println!(
            "WRITE 8 B over {link:?}             {:7.2} us one way  {:.2} of the bare ping",
            ping * 1e6,
            ping / bare_ping
        );
    }
    local_memory(span)
}

/// Two NICs that share memory, against a plain copy of the same memory.
fn local_memory(span: Duration) -> Result<()> {
    let copy = bare_copy(span)?;
    let (copy, copy_peak) = copy;
    println!("memcpy 1 MiB                  {:7.2} GB/s  peak {:.2}", copy / 1e9, copy_peak / 1e9);
    let (one, other) = std::os::unix::net::UnixStream::pair()?;
    let (a, b) = std::thread::scope(|scope| {
        let b = scope.spawn(|| Nic::local(other));
        (Nic::local(one), b.join())
    });
    let (a, b) = (a?, b.map_err(|_| "the other side failed")??);
    let (a, b) = joined(&a, &b)?;
    let (ping, median) = latency(&a, &b, 64)?;
    println!(
        "WRITE 64 B over Local         {:7.2} us one way  median {:.2}",
        ping * 1e6,
        median * 1e6
    );
    let (got, peak) = bandwidth_both_polling(&a, &b, span)?;
    println!(
        "WRITE 1 MiB over Local        {:7.2} GB/s  {:.2} of memcpy  peak {:.2}  {:.2}, compared",
        got / 1e9,
        got / copy,
        peak / 1e9,
        peak / copy_peak
    );
    Ok(())
}

/// Bytes per second of copies between two regions like those of the NICs, and in the best slice.
fn bare_copy(span: Duration) -> Result<(f64, f64)> {
    let bytes = IN_FLIGHT * u64::from(MESSAGE);
    let [from, to] = [(); 2].map(|()| HostMem::shareable(bytes as usize));
    let (from, to) = (from?, to?);
    from.populate()?;
    to.populate()?;
    let (start, mut count) = (Instant::now(), 0);
    let mut slices = Slices::new();
    while start.elapsed() < span {
        let at = (count % IN_FLIGHT) * u64::from(MESSAGE);
        to.copy_from(at, &from, at, u64::from(MESSAGE))?;
        count += 1;
        slices.message();
    }
    let rate = count as f64 * f64::from(MESSAGE) / start.elapsed().as_secs_f64();
    Ok((rate, slices.peak))
}

/// As [`bandwidth`], with the receiving side polling too.
fn bandwidth_both_polling(a: &Side, b: &Side, span: Duration) -> Result<(f64, f64)> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _ = b.cq.poll();
            }
        });
        let rate = bandwidth(a, b, span);
        stop.store(true, Ordering::Relaxed);
        rate
    })
}

fn address(n: u8) -> IpAddr {
    IpAddr::from([127, 77, (std::process::id() % 250) as u8, n])
}

/// Bytes of payload per second that arrive.
fn bare_bandwidth(span: Duration) -> Result<f64> {
    let (from, to) =
        (UdpSocket::bind((address(3), 0).into())?, UdpSocket::bind((address(4), 0).into())?);
    for socket in [&from, &to] {
        socket.set_buffers(8 << 20);
    }
    let stop = AtomicBool::new(false);
    let bytes = AtomicU64::new(0);
    let target: SocketAddr = to.local();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let payload = vec![7u8; DATAGRAM];
            let mut sum = 0u64;
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..BATCH_MAX {
                    sum = sum.wrapping_add(u64::from(crc32fast::hash(&payload)));
                }
                let batch = [Outgoing { to: target, payload: &payload }; BATCH_MAX];
                let _ = from.send(&batch);
            }
            sum
        });
        scope.spawn(|| {
            let mut buffers: Vec<Vec<u8>> =
                (0..BATCH_MAX).map(|_| Vec::with_capacity(DATAGRAM + 64)).collect();
            let mut metas = [None; BATCH_MAX];
            let mut sum = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let count = to.receive(&mut buffers, &mut metas).unwrap_or(0);
                for buffer in buffers.iter().take(count) {
                    sum = sum.wrapping_add(u64::from(crc32fast::hash(buffer)));
                }
                bytes.fetch_add(count as u64 * 4096, Ordering::Relaxed);
            }
            sum
        });
        std::thread::sleep(Duration::from_millis(200));
        let (start, before) = (Instant::now(), bytes.load(Ordering::Relaxed));
        std::thread::sleep(span);
        let moved = bytes.load(Ordering::Relaxed) - before;
        let rate = moved as f64 / start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        Ok(rate)
    })
}

/// Seconds one way.
fn bare_latency() -> Result<f64> {
    let (a, b) =
        (UdpSocket::bind((address(5), 0).into())?, UdpSocket::bind((address(6), 0).into())?);
    let stop = AtomicBool::new(false);
    // The size of an 8-byte WRITE.
    let payload = [7u8; 12 + 16 + 8 + 4];
    let turn = |socket: &UdpSocket, buffers: &mut [Vec<u8>]| {
        let mut metas = [None; 1];
        while !stop.load(Ordering::Relaxed) {
            if socket.receive(buffers, &mut metas).unwrap_or(0) > 0 {
                return true;
            }
        }
        false
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffers = [Vec::with_capacity(2048)];
            while turn(&b, &mut buffers) {
                let _ = b.send(&[Outgoing { to: a.local(), payload: &payload }]);
            }
        });
        let mut buffers = [Vec::with_capacity(2048)];
        let start = Instant::now();
        for _ in 0..PINGS {
            a.send(&[Outgoing { to: b.local(), payload: &payload }])?;
            turn(&a, &mut buffers);
        }
        let each = start.elapsed().as_secs_f64() / PINGS as f64 / 2.0;
        stop.store(true, Ordering::Relaxed);
        Ok(each)
    })
}

struct Side {
    _context: Context,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    mem: Arc<HostMem>,
}

fn side(nic: &Nic) -> Result<Side> {
    let context = nic.open();
    let pd = context.alloc_pd()?;
    let cq = context.create_cq(1024)?;
    let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default())?;
    let mem = Arc::new(HostMem::shareable(IN_FLIGHT as usize * MESSAGE as usize)?);
    mem.populate()?;
    let mr = pd.reg_mr(Arc::clone(&mem), Access::ALL)?;
    Ok(Side { _context: context, cq, qp, mr, mem })
}

fn joined(a: &Nic, b: &Nic) -> Result<(Side, Side)> {
    let (a, b) = (side(a)?, side(b)?);
    let connect = Connect::default();
    a.qp.connect(&b.qp.endpoint(), &connect)?;
    b.qp.connect(&a.qp.endpoint(), &connect)?;
    Ok((a, b))
}

impl Side {
    fn write(&self, to: &Self, id: u64, offset: u64, len: u32) -> Result<()> {
        let op = SendOp::Write { remote: to.mr.remote_at(offset), imm: None };
        let payload = Payload::Sges(vec![self.mr.sge(offset, len)?]);
        Ok(self.qp.post_send(SendWr::new(id, op, payload))?)
    }
}

fn bandwidth(a: &Side, b: &Side, span: Duration) -> Result<(f64, f64)> {
    let mut slices = Slices::new();
    for slot in 0..IN_FLIGHT {
        a.mem.fill(slot * u64::from(MESSAGE), u64::from(MESSAGE), 1 + slot as u8)?;
    }
    let (mut posted, mut done) = (0u64, 0u64);
    let start = Instant::now();
    while start.elapsed() < span || done < posted {
        while posted - done < IN_FLIGHT && start.elapsed() < span {
            a.write(b, posted, (posted % IN_FLIGHT) * u64::from(MESSAGE), MESSAGE)?;
            posted += 1;
        }
        while let Some(completion) = a.cq.poll()? {
            if completion.status != Status::Success {
                return Err(format!("{completion:?}").into());
            }
            done += 1;
            slices.message();
        }
    }
    let rate = done as f64 * f64::from(MESSAGE) / start.elapsed().as_secs_f64();
    let mut bytes = vec![0; MESSAGE as usize];
    for slot in 0..IN_FLIGHT {
        b.mem.read(slot * u64::from(MESSAGE), &mut bytes)?;
        if bytes.iter().any(|byte| *byte != 1 + slot as u8) {
            return Err("the bytes differ".into());
        }
    }
    Ok((rate, slices.peak))
}

/// Bytes per second of the best slice of at least 10 ms.
struct Slices {
    start: Instant,
    messages: u32,
    peak: f64,
}

impl Slices {
    fn new() -> Self {
        Self { start: Instant::now(), messages: 0, peak: 0.0 }
    }

    fn message(&mut self) {
        self.messages += 1;
        let seconds = self.start.elapsed().as_secs_f64();
        if seconds >= 0.01 {
            let rate = f64::from(self.messages) * f64::from(MESSAGE) / seconds;
            *self = Self { peak: self.peak.max(rate), ..Self::new() };
        }
    }
}

/// Each side writes a rising number into the other's memory, and polls its own. Ends early, with the
/// count it reached, rather than run for ever: on a busy machine two threads that poll take turns.
fn latency(a: &Side, b: &Side, len: u32) -> Result<(f64, f64)> {
    let (at_a, at_b) = (0, 4096);
    a.mem.store_u64(at_a, 0)?;
    b.mem.store_u64(at_b, 0)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let echoed = (1..=PINGS).try_for_each(|turn| {
                b.reached(at_b, turn, &stop)?;
                b.mem.store_u64(at_a, turn).map_err(|e| e.to_string())?;
                b.write(a, turn, at_a, len).map_err(|e| e.to_string())
            });
            if echoed.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            echoed
        });
        let start = Instant::now();
        let mut done = 0;
        let mut each = Vec::new();
        let pinged = (1..=PINGS).try_for_each(|turn| {
            if start.elapsed() > PING_SPAN {
                return Err(String::new());
            }
            let sent = Instant::now();
            a.mem.store_u64(at_b, turn).map_err(|e| e.to_string())?;
            a.write(b, turn, at_b, len).map_err(|e| e.to_string())?;
            a.reached(at_a, turn, &stop)?;
            each.push(sent.elapsed());
            done = turn;
            Ok(())
        });
        let average = start.elapsed().as_secs_f64() / (done.max(1)) as f64 / 2.0;
        each.sort_unstable();
        let median = each.get(each.len() / 2).map_or(0.0, Duration::as_secs_f64) / 2.0;
        stop.store(true, Ordering::Relaxed);
        let echoed = echo.join().map_err(|_| "the echo failed")?;
        match (pinged, echoed) {
            (Ok(()), Ok(())) => Ok((average, median)),
            (Err(why), _) if why.is_empty() => {
                println!("(ended after {done} of {PINGS} pings)");
                Ok((average, median))
            }
            (Err(why), _) | (_, Err(why)) => Err(why.into()),
        }
    })
}

impl Side {
    /// Polls until the word at `at` is `turn`; a failed work request or a silent second is an error.
    fn reached(&self, at: u64, turn: u64, stop: &AtomicBool) -> std::result::Result<(), String> {
        let start = Instant::now();
        let mut polls = 0_u32;
        while self.mem.load_u64(at).map_err(|e| e.to_string())? < turn {
            if let Some(done) = self.cq.poll().map_err(|e| e.to_string())?
                && done.status != Status::Success
            {
                return Err(format!("{done:?}"));
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(1024) && start.elapsed() > Duration::from_secs(5) {
                return Err(format!("ping {turn} did not arrive within 5 s: a stall"));
            }
            if stop.load(Ordering::Relaxed) {
                return Err("the other side has ended".into());
            }
        }
        // Completions are fewer than the queue holds, whichever way the number came.
        while self.cq.poll().map_err(|e| e.to_string())?.is_some() {}
        Ok(())
    }
}
