//! RDMA between the memories of two GPUs, each in a process of its own: everything compared, then
//! measured. `rdma_gpu DEVICE DEVICE [quick]`, for example `cuda:0 cuda:1` or `sim:0 sim:1`.
//!
//! The process starts a second one of itself, which does what it is told over a Unix socket.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a program for people, which ends at the first surprise"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::core::addr::ByteRange;
use beeline::gpu::{Buffer, DeviceId, Gpu, KernelArg, PinnedMem, Stream};
use beeline::memory::dmabuf::DmaBuf;
use beeline::memory::pinned_vram::PinnedVram;
use beeline::verbs::{
    Access, Completion, CompletionOp, Connect, Context, Cq, Endpoint, LinkKind, Mr, Nic, Payload,
    Qp, QpCaps, QpKind, RecvWr, RemoteMemory, SendOp, SendWr, SoftOptions, Status,
};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const WAIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const PIECE: u64 = 32 * MIB;

fn main() -> Outcome {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["child", device, socket] => child(device, Path::new(socket)),
        [one, two] => parent(one, two, false),
        [one, two, "quick"] => parent(one, two, true),
        _ => Err("usage: rdma_gpu DEVICE DEVICE [quick]".into()),
    }
}

/// One end: a NIC with a region of GPU memory.
struct Side {
    stream: Stream,
    staging: PinnedMem,
    buffer: Buffer,
    context: Context,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    /// For a region of foreign memory: the owner's handle.
    owner: Option<Buffer>,
}

fn allocate(gpu: &Gpu, kind: &str, bytes: u64) -> Outcome<(Buffer, Option<Buffer>)> {
    Ok(match kind {
        "shareable" => (gpu.alloc_shareable(bytes)?, None),
        "foreign" => {
            let owner = gpu.alloc(bytes)?;
            let nobody = Arc::new(());
            (Buffer::from_foreign(gpu, owner.ptr(), bytes, nobody)?, Some(owner))
        }
        _ => (gpu.alloc(bytes)?, None),
    })
}

impl Side {
    fn new(nic: &Nic, gpu: &Gpu, kind: &str, bytes: u64) -> Outcome<Self> {
        let context = nic.open();
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(4096)?;
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default())?;
        let (buffer, owner) = allocate(gpu, kind, bytes)?;
        let mr = pd.reg_gpu(&buffer, Access::ALL)?;
        let (stream, staging) = (gpu.stream()?, gpu.pin(PIECE)?);
        Ok(Self { stream, staging, buffer, context, cq, qp, mr, owner })
    }

    fn connect(&self, peer: &Endpoint) -> Outcome {
        let mut connect = Connect::default();
        connect.timeout = 17;
        Ok(self.qp.connect(peer, &connect)?)
    }

    /// Fills device memory with the words of `seed`.
    fn fill(&self, seed: u64, offset: u64, len: u64) -> Outcome {
        for (at, step) in pieces(len) {
            self.staging.mem().write(0, &words(seed, at, step))?;
            self.stream.copy_to_device(&self.buffer, offset + at, &self.staging, 0, step)?;
            self.stream.synchronize(Instant::now() + WAIT)?;
        }
        Ok(())
    }

    /// Compares device memory with the words of `seed`.
    fn check(&self, seed: u64, offset: u64, len: u64) -> Outcome<bool> {
        let mut same = true;
        let mut bytes = Vec::new();
        for (at, step) in pieces(len) {
            self.stream.copy_to_host(&self.staging, 0, &self.buffer, offset + at, step)?;
            self.stream.synchronize(Instant::now() + WAIT)?;
            bytes.clear();
            self.staging.mem().append_to(0, step as usize, &mut bytes)?;
            same &= bytes == words(seed, at, step);
        }
        Ok(same)
    }

    fn word(&self, offset: u64) -> Outcome<u64> {
        self.stream.copy_to_host(&self.staging, 0, &self.buffer, offset, 8)?;
        self.stream.synchronize(Instant::now() + WAIT)?;
        Ok(self.staging.mem().load_u64(0)?)
    }

    fn set_word(&self, offset: u64, value: u64) -> Outcome {
        self.staging.mem().store_u64(0, value)?;
        self.stream.copy_to_device(&self.buffer, offset, &self.staging, 0, 8)?;
        Ok(self.stream.synchronize(Instant::now() + WAIT)?)
    }

    fn post(&self, id: u64, op: SendOp, offset: u64, len: u64) -> Outcome {
        let payload = Payload::Sges(vec![self.mr.sge(offset, u32::try_from(len)?)?]);
        Ok(self.qp.post_send(SendWr::new(id, op, payload))?)
    }

    fn receive(&self, offset: u64, len: u64) -> Outcome {
        let sges = vec![self.mr.sge(offset, u32::try_from(len)?)?];
        Ok(self.qp.post_recv(RecvWr { id: 0, sges })?)
    }

    fn any(&self) -> Outcome<Completion> {
        let end = Instant::now() + WAIT;
        loop {
            for _ in 0..1024 {
                if let Some(completion) = self.cq.poll()? {
                    return Ok(completion);
                }
            }
            if Instant::now() > end {
                return Err("no completion within 60 s".into());
            }
        }
    }

    fn done(&self) -> Outcome {
        let completion = self.any()?;
        if completion.status == Status::Success {
            return Ok(());
        }
        Err(format!("{completion:?}").into())
    }
}

fn pieces(len: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..len.div_ceil(PIECE)).map(move |n| (n * PIECE, PIECE.min(len - n * PIECE)))
}

/// Bytes `[at, at + len)` of a sequence of words that all differ; `at` is a multiple of 8.
fn words(seed: u64, at: u64, len: u64) -> Vec<u8> {
    let first = at / 8;
    let mut bytes = Vec::with_capacity(len as usize + 8);
    for n in first..first + len.div_ceil(8) {
        let word = n.wrapping_add(seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}

/// A control connection: one line there, one line back.
struct Control {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Control {
    fn new(stream: UnixStream) -> Outcome<Self> {
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        Ok(Self { reader: BufReader::new(stream.try_clone()?), stream })
    }

    fn say(&mut self, line: &str) -> Outcome {
        Ok(self.stream.write_all(format!("{line}\n").as_bytes())?)
    }

    fn hear(&mut self) -> Outcome<String> {
        let mut line = String::new();
        if self.reader.by_ref().take(4096).read_line(&mut line)? == 0 {
            return Err("the other process ended".into());
        }
        match line.trim_end().strip_prefix("error ") {
            Some(text) => Err(format!("the other process: {text}").into()),
            None => Ok(line.trim_end().to_owned()),
        }
    }

    fn ask(&mut self, line: &str) -> Outcome<String> {
        self.say(line)?;
        self.hear()
    }

    /// Whether a line is there.
    fn is_ready(&mut self) -> bool {
        if !self.reader.buffer().is_empty() {
            return true;
        }
        let _ = self.stream.set_nonblocking(true);
        let ready =
            !matches!(self.reader.fill_buf(), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock);
        let _ = self.stream.set_nonblocking(false);
        ready
    }
}

// ---- the second process ------------------------------------------------------------------------------

fn child(device: &str, socket: &Path) -> Outcome {
    let gpu = Gpu::open(&device.parse()?)?;
    let mut control = Control::new(UnixStream::connect(socket)?)?;
    let mut nic: Option<Nic> = None;
    let mut side: Option<Side> = None;
    let mut received = 0_u64;
    let mut kernel: Option<Stream> = None;
    loop {
        // Polls between two orders, as a program does that waits for messages.
        while !control.is_ready() {
            for _ in 0..256 {
                if let Some(side) = &side
                    && let Some(completion) = side.cq.poll()?
                {
                    let fine = completion.status == Status::Success;
                    received += u64::from(fine && completion.op == CompletionOp::Recv);
                }
            }
        }
        let line = control.hear()?;
        let words: Vec<&str> = line.split(' ').collect();
        let number = |n: usize| words.get(n).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let answer: Outcome<String> = (|| match words[0] {
            "local" => {
                (side, nic) = (None, None);
                nic = Some(Nic::local(UnixStream::connect(socket)?)?);
                Ok("ok".to_owned())
            }
            "udp" => {
                (side, nic) = (None, None);
                nic = Some(Nic::soft(SoftOptions::new(words[1].parse()?))?);
                Ok("ok".to_owned())
            }
            "side" => {
                side = None;
                received = 0;
                let made = Side::new(nic.as_ref().ok_or("no NIC")?, &gpu, words[1], number(2))?;
                let answer = format!("{}|{}", made.qp.endpoint(), made.mr.remote());
                side = Some(made);
                Ok(answer)
            }
            "connect" => {
                on(&side)?.connect(&words[1..].join(" ").parse()?).map(|()| "ok".to_owned())
            }
            "fill" => on(&side)?.fill(number(1), number(2), number(3)).map(|()| "ok".to_owned()),
            "check" => {
                on(&side)?.check(number(1), number(2), number(3)).map(|same| same.to_string())
            }
            "word" => on(&side)?.word(number(1)).map(|word| word.to_string()),
            "set" => on(&side)?.set_word(number(1), number(2)).map(|()| "ok".to_owned()),
            "receive" => on(&side)?.receive(number(1), number(2)).map(|()| "ok".to_owned()),
            "received" => {
                let end = Instant::now() + WAIT;
                while received == 0 && Instant::now() < end {
                    if let Some(completion) = on(&side)?.cq.poll()? {
                        received += u64::from(completion.status == Status::Success);
                    }
                }
                Ok(std::mem::take(&mut received).to_string())
            }
            "send" => {
                let side = on(&side)?;
                side.post(1, SendOp::Send { imm: None }, number(1), number(2))?;
                side.done().map(|()| "ok".to_owned())
            }
            "free" => {
                let side = side.as_mut().ok_or("no side")?;
                let len = side.buffer.len();
                drop(side.owner.take());
                // Most likely at the same address: somebody else's bytes.
                let other = gpu.alloc(len)?;
                let same = other.ptr() == side.buffer.ptr();
                side.stream.fill(&other, 0, len, 0x5e)?;
                side.stream.synchronize(Instant::now() + WAIT)?;
                side.owner = Some(other);
                Ok(format!("same-address={same}"))
            }
            "stolen" => {
                // Whether the other allocation was written.
                let side = on(&side)?;
                let other = side.owner.as_ref().ok_or("no other allocation")?;
                side.stream.copy_to_host(&side.staging, 0, other, 0, other.len().min(PIECE))?;
                side.stream.synchronize(Instant::now() + WAIT)?;
                let mut bytes = vec![0; other.len().min(PIECE) as usize];
                side.staging.mem().read(0, &mut bytes)?;
                Ok(bytes.iter().any(|byte| *byte != 0x5e).to_string())
            }
            "kernel" => {
                let side = on(&side)?;
                let word = side.buffer.slice(ByteRange::new(number(1), 8).ok_or("range")?)?;
                let stream = gpu.stream()?;
                let times = u32::try_from(number(2))?;
                stream.launch("add_many_u64", &[KernelArg::Buffer(word), KernelArg::U32(times)])?;
                kernel = Some(stream);
                Ok("ok".to_owned())
            }
            "join" => {
                kernel.take().ok_or("no kernel")?.synchronize(Instant::now() + WAIT)?;
                Ok("ok".to_owned())
            }
            "rates" => rates(&gpu).map(|(out, into)| format!("{out} {into}")),
            "drop" => {
                side = None;
                Ok(format!("{}", gpu.usage().allocated))
            }
            "quit" => Ok("bye".to_owned()),
            other => Err(format!("what is {other}?").into()),
        })();
        match answer {
            Ok(text) => control.say(&text)?,
            Err(error) => {
                control.say(&format!("error {}", error.to_string().replace('\n', " ")))?;
            }
        }
        if words[0] == "quit" {
            return Ok(());
        }
    }
}

fn on(side: &Option<Side>) -> Result<&Side, &'static str> {
    side.as_ref().ok_or("no side")
}

/// Bytes per second of pinned copies from the device and to it.
fn rates(gpu: &Gpu) -> Outcome<(f64, f64)> {
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

// ---- the first process -------------------------------------------------------------------------------

struct Pair {
    control: Control,
    listener: UnixListener,
    path: PathBuf,
    child: Child,
    gpu: Gpu,
    quick: bool,
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn parent(one: &str, two: &str, quick: bool) -> Outcome {
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
    let mut pair = Pair { control, listener, path, child, gpu, quick };
    refusals(&pair.gpu)?;
    for local in [true, false] {
        everything(&mut pair, local)?;
        foreign(&mut pair, local)?;
        litmus(&mut pair, local)?;
    }
    throughput(&mut pair)?;
    for local in [true, false] {
        latency(&mut pair, local)?;
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
    let top = match (pair.quick, local) {
        (true, _) => 4 * MIB,
        (false, true) => 1024 * MIB,
        (false, false) => 64 * MIB,
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
    let (times, adds) = if pair.quick { (100_000_u64, 50_u64) } else { (2_000_000, 500) };
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

fn throughput(pair: &mut Pair) -> Outcome {
    println!("\n== throughput (GB/s; bytes compared after each)");
    let (out, into) = rates(&pair.gpu)?;
    let far: Vec<f64> =
        pair.control.ask("rates")?.split(' ').filter_map(|text| text.parse().ok()).collect();
    println!("pinned copies here: D2H {:.1}, H2D {:.1}", out / 1e9, into / 1e9);
    println!("pinned copies there: D2H {:.1}, H2D {:.1}", far[0] / 1e9, far[1] / 1e9);
    let slower = [out, into, far[0], far[1]].into_iter().fold(f64::MAX, f64::min);
    for (local, kind) in
        [(true, "shareable"), (true, "plain"), (false, "shareable"), (false, "plain")]
    {
        let message = if pair.quick {
            MIB
        } else if local {
            64 * MIB
        } else {
            4 * MIB
        };
        let depth = 4;
        let nic = pair.nic(local)?;
        let (side, remote) = pair.sides(&nic, kind, message * depth)?;
        side.fill(5, 0, message * depth)?;
        let mut line = format!("{:5} {kind:9} {message:>9} B:", name(local));
        for read in [false, true] {
            if read {
                pair.control.ask(&format!("fill 6 0 {}", message * depth))?;
            }
            let span = Duration::from_millis(if pair.quick { 200 } else { 2500 });
            let (mut posted, mut done) = (0_u64, 0_u64);
            let mut start = Instant::now();
            let mut counted = 0;
            while start.elapsed() < span || done < posted {
                while posted - done < depth && start.elapsed() < span {
                    let at = (posted % depth) * message;
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
            let rate = (done - counted) as f64 * message as f64 / start.elapsed().as_secs_f64();
            let same = match read {
                true => side.check(6, 0, message * depth)?,
                false => pair.there(&format!("check 5 0 {}", message * depth))?,
            };
            let what = if read { "READ" } else { "WRITE" };
            line += &format!(" {what} {:.2} ({:.2} of the slower copy)", rate / 1e9, rate / slower);
            claim_quietly("bytes after the measurement", same)?;
        }
        println!("{line}, compared");
        pair.control.ask("drop")?;
    }
    Ok(())
}

fn latency(pair: &mut Pair, local: bool) -> Outcome {
    println!("\n== latency over {}: median us from post to completion", name(local));
    println!("{:>8} {:>9} {:>9} {:>9}", "bytes", "WRITE", "READ", "ADD");
    let nic = pair.nic(local)?;
    let (side, remote) = pair.sides(&nic, "shareable", MIB)?;
    let turns = if pair.quick { 20 } else { 200 };
    side.fill(3, 0, MIB)?;
    pair.control.ask(&format!("fill 3 0 {MIB}"))?;
    for shift in [3, 6, 9, 12, 14, 16, 18, 20] {
        let len = 1_u64 << shift;
        let mut row = format!("{len:>8}");
        for what in 0..3 {
            if what == 2 && len != 8 {
                continue;
            }
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
            row += &format!(" {:>9.1}", nanos[nanos.len() / 2] as f64 / 1e3);
        }
        println!("{row}");
    }
    claim("bytes after it", side.check(3, 0, MIB)? && pair.there(&format!("check 3 0 {MIB}"))?)?;
    pair.control.ask("drop")?;
    Ok(())
}
