//! RDMA between the memories of two GPUs, each in a process of its own: everything compared, then
//! measured. `rdma_gpu DEVICE DEVICE [quick|full|figures]`, for example `cuda:0 cuda:1` or `sim:0 sim:1`.
//! `quick` takes little of everything, `full` goes up to 1 GiB a message, `figures` measures only.
//!
//! The process starts a second one of itself, which does what it is told over a Unix socket.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a program for people, which ends at the first surprise"
)]

mod child;
mod measure;
mod side;

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::core::addr::ByteRange;
use beeline::gpu::{Buffer, DeviceId, Gpu};
use beeline::memory::dmabuf::DmaBuf;
use beeline::memory::pinned_vram::PinnedVram;
use beeline::verbs::{Access, LinkKind, Nic, RemoteMemory, SendOp, SoftOptions, Status};

use crate::side::{Control, Side};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const WAIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

fn main() -> Outcome {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["child", device, socket] => child::child(device, Path::new(socket)),
        [one, two] => parent(one, two, Extent::Usual),
        [one, two, "quick"] => parent(one, two, Extent::Quick),
        [one, two, "full"] => parent(one, two, Extent::Full),
        [one, two, "figures"] => parent(one, two, Extent::Figures),
        _ => Err("usage: rdma_gpu DEVICE DEVICE [quick|full|figures]".into()),
    }
}

/// How much is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Quick,
    Usual,
    Full,
    Figures,
}

struct Pair {
    control: Control,
    listener: UnixListener,
    path: PathBuf,
    child: Child,
    gpu: Gpu,
    extent: Extent,
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn parent(one: &str, two: &str, extent: Extent) -> Outcome {
    let path = std::env::temp_dir().join(format!("beeline-rdma-gpu-{}", std::process::id()));
    let listener = UnixListener::bind(&path)?;
    let mut command = Command::new(std::env::current_exe()?);
    let child = command.args(["child", two]).arg(&path).spawn()?;
    let stream = accept(&listener)?;
    let gpu = Gpu::open(&one.parse::<DeviceId>()?)?;
    let simulated = if gpu.info().simulated { " SIMULATED" } else { "" };
    println!("devices: {one} here, {two} in process {}{simulated}", child.id());
    println!("here: {}; ability: {:?}", gpu.info().name, gpu.rdma_ability());
    let control = Control::new(stream)?;
    let mut pair = Pair { control, listener, path, child, gpu, extent };
    if extent != Extent::Figures {
        refusals(&pair.gpu)?;
        for local in [true, false] {
            everything(&mut pair, local)?;
            foreign(&mut pair, local)?;
            litmus(&mut pair, local)?;
        }
    }
    measure::throughput(&mut pair)?;
    for local in [true, false] {
        measure::latency(&mut pair, local)?;
    }
    pair.control.ask("quit")?;
    println!("ALL PASSED");
    Ok(())
}

fn accept(listener: &UnixListener) -> Outcome<UnixStream> {
    listener.set_nonblocking(true)?;
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if Instant::now() > end {
            return Err("the other process did not come".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn claim(what: &str, holds: bool) -> Outcome {
    println!("{} {what}", if holds { "ok  " } else { "FAIL" });
    if holds { Ok(()) } else { Err(format!("does not hold: {what}").into()) }
}

/// What is refused, and why; what one process can show.
fn refusals(gpu: &Gpu) -> Outcome {
    println!("\n== registration");
    let (nic, _other) = Nic::pair(address(9), address(10))?;
    let pd = nic.open().alloc_pd()?;
    match gpu.alloc_managed(1 << 20) {
        Ok(managed) => {
            let error = pd.reg_gpu(&managed, Access::ALL).unwrap_err();
            claim(
                &format!("managed memory is refused: {error}"),
                error.code() == "memory-managed",
            )?;
            let again =
                Buffer::from_foreign(gpu, managed.ptr(), 1 << 20, Arc::new(())).unwrap_err();
            claim(&format!("and as foreign memory: {again}"), again.is_refused())?;
        }
        Err(error) => println!("SKIP managed memory ({error})"),
    }
    let before = gpu.usage().allocated;
    let buffer = gpu.alloc(8 << 20)?;
    let mr = pd.reg_gpu(&buffer, Access::ALL)?;
    drop(buffer);
    claim("owned memory is not freed under a live region", gpu.usage().allocated > before)?;
    drop(mr);
    claim("and is after it", gpu.usage().allocated == before)?;
    for (name, buffer) in
        [("cuMemAlloc", gpu.alloc(6 << 20)?), ("cuMemCreate", gpu.alloc_shareable(6 << 20)?)]
    {
        match DmaBuf::export(&buffer) {
            Ok(exported) => {
                let len = exported.len()?;
                let fits = gpu.info().simulated || len == 6 << 20;
                claim(
                    &format!("dma-buf of {name} memory: {len} bytes, {:?}", exported.kind()),
                    fits,
                )?;
            }
            Err(error) => {
                println!("note dma-buf of {name} memory is refused [{}]: {error}", error.code());
            }
        }
    }
    let odd = buffer_part(&gpu.alloc(1 << 20)?, 64, 4096)?;
    let error = DmaBuf::export(&odd).unwrap_err();
    claim(
        &format!("a part of a page is not exported: {error}"),
        error.code() == "dmabuf-unaligned",
    )
    .or_else(|refused| if gpu.info().simulated { Ok(()) } else { Err(refused) })?;
    let pooled = gpu.stream()?.alloc(2 << 20)?;
    match DmaBuf::export(&pooled) {
        Ok(exported) => println!("note pool memory is exported: {} bytes", exported.len()?),
        Err(error) => println!("note pool memory is refused [{}]: {error}", error.code()),
    }
    let mut held = Vec::new();
    let refused = loop {
        match PinnedVram::alloc(gpu, 1 << 20, "a test queue") {
            Ok(piece) => held.push(piece),
            Err(error) => break error,
        }
    };
    let named = refused.to_string().contains("a test queue: 1048576");
    claim(&format!("the budget of pinned device memory names its holders: {refused}"), named)
}

fn buffer_part(buffer: &Buffer, at: u64, len: u64) -> Outcome<Buffer> {
    Ok(buffer.slice(ByteRange::new(at, len).ok_or("range")?)?)
}

fn address(n: u8) -> SoftOptions {
    let process = (std::process::id() % 250) as u8;
    SoftOptions::new(std::net::IpAddr::from([127, 78, process, n])).link(LinkKind::Udp)
}

impl Pair {
    fn quick(&self) -> bool {
        self.extent == Extent::Quick
    }

    /// Both NICs, joined by shared memory or over UDP.
    fn nic(&mut self, local: bool) -> Outcome<Nic> {
        if local {
            self.control.say("local")?;
            let stream = accept(&self.listener)?;
            let nic = Nic::local(stream)?;
            self.control.hear()?;
            return Ok(nic);
        }
        let [mine, theirs] = [1, 2].map(|n| address(n).local);
        self.control.ask(&format!("udp {theirs}"))?;
        let nic = SoftOptions::new(mine);
        Ok(Nic::soft(nic)?)
    }

    fn sides(&mut self, nic: &Nic, kind: &str, bytes: u64) -> Outcome<(Side, RemoteMemory)> {
        let side = Side::new(nic, &self.gpu, kind, bytes)?;
        let answer = self.control.ask(&format!("side {kind} {bytes}"))?;
        let (endpoint, memory) = answer.split_once('|').ok_or("no memory")?;
        side.connect(&endpoint.parse()?)?;
        self.control.ask(&format!("connect {}", side.qp.endpoint()))?;
        Ok((side, memory.parse()?))
    }

    fn there(&mut self, what: &str) -> Outcome<bool> {
        Ok(self.control.ask(what)? == "true")
    }
}

fn name(local: bool) -> &'static str {
    if local { "local" } else { "udp" }
}

/// Every operation at every size, compared byte for byte at both ends.
fn everything(pair: &mut Pair, local: bool) -> Outcome {
    println!("\n== every operation over {}", name(local));
    let top = match (pair.extent, local) {
        (Extent::Quick, _) => 4 * MIB,
        (Extent::Full, true) => 1024 * MIB,
        (_, true) => 64 * MIB,
        (_, false) => 16 * MIB,
    };
    for kind in ["shareable", "plain"] {
        let nic = pair.nic(local)?;
        let (side, remote) = pair.sides(&nic, kind, top + 64)?;
        println!("{kind}: {:?}, {}", side.context.resolved().link, side.context.resolved().why);
        println!("atomicity: {:?}; {}", side.mr.atomicity(), side.mr.flush()?.why);
        let mut sizes = vec![64, 4096, 4099, 65_536, MIB + 3, 16 * MIB, 64 * MIB, 1024 * MIB];
        sizes.retain(|size| *size <= top);
        for (seed, size) in (1..).zip(sizes) {
            let start = Instant::now();
            // WRITE.
            side.fill(seed, 0, size)?;
            pair.control.ask(&format!("fill 99 0 {}", size + 64))?;
            side.post(1, SendOp::Write { remote: remote.at(0), imm: None }, 0, size)?;
            side.done()?;
            let write = pair.there(&format!("check {seed} 0 {size}"))?;
            // READ of something else.
            pair.control.ask(&format!("fill {} 0 {size}", seed + 20))?;
            side.fill(98, 0, size)?;
            side.post(2, SendOp::Read { remote: remote.at(0) }, 0, size)?;
            side.done()?;
            let read = side.check(seed + 20, 0, size)?;
            // SEND there and back.
            pair.control.ask(&format!("fill 97 0 {size}"))?;
            pair.control.ask(&format!("receive 0 {size}"))?;
            side.fill(seed + 40, 0, size)?;
            side.post(3, SendOp::Send { imm: None }, 0, size)?;
            side.done()?;
            let arrived = pair.control.ask("received")? == "1";
            let send = arrived && pair.there(&format!("check {} 0 {size}", seed + 40))?;
            side.fill(96, 0, size)?;
            side.receive(0, size)?;
            pair.control.say(&format!("send 0 {size}"))?;
            side.done()?;
            pair.control.hear()?;
            let back = side.check(seed + 40, 0, size)?;
            claim(
                &format!("{size} bytes: WRITE READ SEND SEND-back ({:.2?})", start.elapsed()),
                write && read && send && back,
            )?;
        }
        pair.control.ask("set 8 100")?;
        for turn in 0..20 {
            side.post(turn, SendOp::FetchAdd { remote: remote.at(8), add: 3 }, 64, 8)?;
            side.done()?;
            claim_quietly("FETCH_ADD answers the old word", side.word(64)? == 100 + 3 * turn)?;
        }
        let swap = |compare, swap| SendOp::CompareSwap { remote: remote.at(8), compare, swap };
        side.post(1, swap(1, 2), 64, 8)?;
        side.done()?;
        let kept = pair.control.ask("word 8")? == "160" && side.word(64)? == 160;
        side.post(2, swap(160, 7), 64, 8)?;
        side.done()?;
        let swapped = pair.control.ask("word 8")? == "7" && side.word(64)? == 160;
        claim("FETCH_ADD and COMPARE_SWAP on device memory", kept && swapped)?;
        pair.control.ask("drop")?;
    }
    Ok(())
}

fn claim_quietly(what: &str, holds: bool) -> Outcome {
    if holds { Ok(()) } else { claim(what, false) }
}

/// Foreign memory that its owner frees under a live region.
fn foreign(pair: &mut Pair, local: bool) -> Outcome {
    if pair.gpu.info().simulated {
        println!("SKIP foreign memory (a simulated device has none)");
        return Ok(());
    }
    for read in [true, false] {
        let nic = pair.nic(local)?;
        let (side, remote) = pair.sides(&nic, "foreign", 8 * MIB)?;
        side.fill(1, 0, 8 * MIB)?;
        side.post(1, SendOp::Write { remote: remote.at(0), imm: None }, 0, 8 * MIB)?;
        side.done()?;
        let freed = pair.control.ask("free")?;
        side.fill(2, 0, 8 * MIB)?;
        let op = match read {
            true => SendOp::Read { remote: remote.at(0) },
            false => SendOp::Write { remote: remote.at(0), imm: None },
        };
        side.post(2, op, 0, 8 * MIB)?;
        let completion = side.any()?;
        let refused = completion.status == Status::RemoteAccess;
        let kept = side.check(2, 0, 8 * MIB)?;
        let stolen = pair.there("stolen")?;
        let what = if read { "READ" } else { "WRITE" };
        claim(
            &format!(
                "{}: {what} of foreign memory that was freed ({freed}): {:?}, nobody else's bytes",
                name(local),
                completion.status
            ),
            refused && kept && !stolen,
        )?;
        pair.control.ask("drop")?;
    }
    Ok(())
}

/// Atomics of the NIC and of a kernel that runs meanwhile, on one word.
fn litmus(pair: &mut Pair, local: bool) -> Outcome {
    let nic = pair.nic(local)?;
    let (side, remote) = pair.sides(&nic, "plain", MIB)?;
    let (times, adds) = if pair.quick() { (100_000_u64, 50_u64) } else { (2_000_000, 500) };
    pair.control.ask("set 128 0")?;
    pair.control.ask(&format!("kernel 128 {times}"))?;
    let mut during = 0;
    for turn in 0..adds {
        side.post(turn, SendOp::FetchAdd { remote: remote.at(128), add: 1 }, 0, 8)?;
        side.done()?;
        let seen = side.word(0)?;
        during += u64::from(seen > turn && seen < times + turn);
    }
    pair.control.ask("join")?;
    let total: u64 = pair.control.ask("word 128")?.parse()?;
    claim(
        &format!(
            "{}: {times} adds of a kernel and {adds} of the NIC: {total} ({during} while it ran)",
            name(local)
        ),
        total == times + adds,
    )?;
    pair.control.ask("drop")?;
    Ok(())
}
