//! `beeline rdma`: what a NIC, in software or of the kernel's, does between two hosts or processes, measured.
//!
//! A server lends memory to one client at a time. Both tell each other their identifiers over a control
//! connection (TCP, or a Unix socket with `--local`), which also tells the server when a client is done.

mod measure;
mod stream;

use std::cell::Cell;
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use beeline::storage::CancelToken;
use beeline::verbs::{
    Completion, CompletionOp, Connect, Context as RdmaContext, Cq, Endpoint, LinkKind, Mr, Nic,
    Payload, Qp, QpCaps, QpKind, RecvWr, RemoteMemory, SendOp, SendWr, SoftOptions, Status,
};
use serde_json::Value;

use self::measure::Run;
use self::stream::{Listener, Stream, Waiting, nic_word};
use super::Context;
use super::rdma_memory::{Lent, Place, Room};
use super::rdma_nic::{port_json, port_line};
use crate::failure::Failure;
use crate::flags::{RdmaClientFlags, RdmaCommand, RdmaFlags, RdmaNicFlags, RdmaServeFlags};
use crate::output::{self, Answer};

/// How long the other side may take for anything but the work itself.
const PATIENCE: Duration = Duration::from_secs(10);

/// First word of a client; the number is the version of what follows.
const GREETING: &str = "beeline-rdma-2";
/// Last word of a client whose work was done: one that goes without it has failed.
const DONE: &str = "done";

/// Work requests in flight for bandwidth.
const DEPTH: u64 = 16;

/// Polls between two looks at the control connection, and for a signal.
const POLLS: u32 = 1024;
/// Completions between two looks for a signal.
const TURNS: u32 = 256;

/// Serves memory, or measures against a server.
///
/// # Errors
/// An address that is taken, a server that is not there or refuses, work that fails, bytes that differ.
pub(crate) fn run(flags: &RdmaFlags, context: &Context) -> Result<Answer, Failure> {
    match &flags.command {
        RdmaCommand::Serve(flags) => serve(flags, context),
        RdmaCommand::Ping(flags) => client("ping", flags, context),
        RdmaCommand::Write(flags) => client("write", flags, context),
        RdmaCommand::Read(flags) => client("read", flags, context),
        RdmaCommand::Bw(flags) => client("bw", flags, context),
    }
}

fn serve(flags: &RdmaServeFlags, context: &Context) -> Result<Answer, Failure> {
    let token = context.cancel_token()?;
    let (lends, place) = lent(&flags.memory);
    if let Place::Device(id) = &place {
        // A device that is not there is no client's fault.
        context.device(Some(&id.to_string()))?;
    }
    let (listener, nic) = Listener::open(flags)?;
    let (mut served, mut failed) = (0_u64, 0_u64);
    let mut waiting = Waiting::default();
    while flags.count.is_none_or(|count| served + failed < count) && !token.is_cancelled() {
        let Some(client) = listener.next(&mut waiting)? else {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        };
        let host = Host { lends, place: &place, listener: &listener, nic: nic.as_ref() };
        match session(&host, context, &mut waiting, (client, served + failed), &token) {
            Ok(()) => served += 1,
            // One client's trouble is not the end of the service.
            Err(failure) => {
                failed += 1;
                output::warn(&format!("a client: {}", failure.to_text()));
            }
        }
    }
    if let Some(failure) = context.interrupted() {
        return Err(failure);
    }
    let mut answer = Answer::of("rdma serve");
    answer.line("served", &output::plural(served, "client"));
    answer.line("failed", &output::plural(failed, "client"));
    answer.set("served", served);
    answer.set("failed", failed);
    if failed > 0 {
        let text = format!("{failed} of {}", output::plural(served + failed, "client"));
        answer.failure = Some(Failure::failed("clients-failed", format!("{text} failed")));
    }
    if let Some(error) = nic.and_then(|nic| traced(&nic, &flags.nic)) {
        answer.set("trace_error", error);
    }
    Ok(answer)
}

/// How much is lent, and where; the last word of each kind counts.
fn lent(words: &[Lent]) -> (u64, Place) {
    let (mut bytes, mut place) = (64 << 20, Place::Host);
    for word in words {
        match word {
            Lent::Bytes(most) => bytes = *most,
            Lent::In(there) => place = there.clone(),
        }
    }
    (bytes, place)
}

/// One end of a connection, with its memory.
struct Side {
    _context: RdmaContext,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    mem: Room,
    /// Cancelled by a signal.
    token: CancelToken,
    turns: Cell<u32>,
}

impl Side {
    fn new(
        nic: &Nic,
        bytes: u64,
        shareable: bool,
        place: &Place,
        of: &Context,
    ) -> Result<Self, Failure> {
        let context = nic.open();
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(1024)?;
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default())?;
        let (mem, mr) = Room::new(place, &pd, bytes, shareable, of)?;
        let (token, turns) = (of.cancel_token()?, Cell::new(0));
        Ok(Self { _context: context, cq, qp, mr, mem, token, turns })
    }

    fn post(&self, id: u64, op: SendOp, offset: u64, len: u32) -> Result<(), Failure> {
        let payload = Payload::Sges(vec![self.mr.sge(offset, len)?]);
        Ok(self.qp.post_send(SendWr::new(id, op, payload))?)
    }

    fn receive(&self, len: u32) -> Result<(), Failure> {
        Ok(self.qp.post_recv(RecvWr { id: 0, sges: vec![self.mr.sge(0, len)?] })?)
    }

    /// The next completion, by polling: a wait would measure the scheduler.
    fn done(&self) -> Result<Completion, Failure> {
        let end = Instant::now() + PATIENCE;
        self.turns.set(self.turns.get().wrapping_add(1));
        let mut look = self.turns.get().is_multiple_of(TURNS);
        loop {
            if look && self.token.is_cancelled() {
                // The signal is told instead.
                return Err(Failure::failed("cancelled", "called off"));
            }
            look = true;
            for _ in 0..POLLS {
                if let Some(completion) = self.cq.poll()? {
                    return checked(completion);
                }
            }
            if Instant::now() > end {
                return Err(Failure::failed("timed-out", "no completion within 10 s"));
            }
        }
    }
}

fn checked(completion: Completion) -> Result<Completion, Failure> {
    if completion.status == Status::Success {
        return Ok(completion);
    }
    let text = format!("{:?} ended with {:?}", completion.op, completion.status);
    let failure = Failure::failed("rdma-failed", text);
    Err(match completion.status {
        Status::RetryExceeded => {
            failure.hint("the other side answers no more: look whether it still runs")
        }
        _ => failure,
    })
}

/// What a server has for every client.
struct Host<'a> {
    lends: u64,
    place: &'a Place,
    listener: &'a Listener,
    nic: Option<&'a Nic>,
}

/// One client, from its first word to its last: it says what it wants, and that it is done.
fn session(
    host: &Host<'_>,
    context: &Context,
    waiting: &mut Waiting,
    ((mut stream, wanted), number): ((Stream, String), u64),
    token: &CancelToken,
) -> Result<(), Failure> {
    let Host { lends, place, listener, nic } = *host;
    let stop = || token.is_cancelled();
    let size = wanted
        .strip_prefix(GREETING)
        .and_then(|rest| rest.trim().strip_prefix("bytes="))
        .and_then(|text| text.parse::<u64>().ok());
    let refusal = match size {
        None => Some("this is no client of this version".to_owned()),
        Some(0) => Some("no memory wanted".to_owned()),
        Some(size) if size > lends => Some(format!("{size} bytes wanted, --memory {lends} lent")),
        Some(_) => None,
    };
    let (Some(size), None) = (size, &refusal) else {
        let text = refusal.unwrap_or_default();
        stream.say(&format!("error {text}"))?;
        return Err(Failure::refused("refused", text));
    };
    stream.say(&format!("ok {number}"))?;
    let joined = match nic {
        Some(_) => None,
        None => Some(Nic::local(listener.accept_nic(waiting, (&mut stream, number), &stop)?)?),
    };
    let nic = joined.as_ref().or(nic).ok_or_else(|| Failure::failed("io-failed", "no NIC"))?;
    let side = Side::new(nic, size, joined.is_some(), place, context)?;
    let peer: Endpoint = stream.hear(&stop)?.parse()?;
    side.qp.connect(&peer, &connect())?;
    // Two of them: the second ping may come before the first is answered here.
    let len = u32::try_from(size).unwrap_or(u32::MAX);
    side.receive(len)?;
    side.receive(len)?;
    stream.say(&format!("{} {}", side.qp.endpoint(), "ready"))?;
    stream.say(&side.mr.remote().to_string())?;
    while !stop() {
        match stream.poll()? {
            Some(word) if word == DONE => return Ok(()),
            Some(word) => {
                let text = format!("the client says '{}'", output::one_line(&word));
                return Err(Failure::failed("io-failed", text));
            }
            None => {}
        }
        for _ in 0..POLLS {
            let Some(completion) = side.cq.poll()? else { continue };
            // A client that goes away takes what was posted with it; the connection tells.
            if completion.status == Status::Success && completion.op == CompletionOp::Recv {
                side.receive(len)?;
                side.post(1, SendOp::Send { imm: None }, 0, completion.byte_len)?;
            }
        }
    }
    Ok(())
}

fn client(
    what: &'static str,
    flags: &RdmaClientFlags,
    context: &Context,
) -> Result<Answer, Failure> {
    let bytes = flags.size.unwrap_or(if what == "bw" { 1 << 20 } else { 64 });
    let len = u32::try_from(bytes).ok().filter(|len| (1..=1 << 30).contains(len));
    let len = len.ok_or_else(|| {
        Failure::refused("size", format!("--size {bytes}: from 1 byte to 1 GiB is possible"))
    })?;
    let token = context.cancel_token()?;
    let stop = || token.is_cancelled();
    let (mut stream, target) = reach(flags, &stop)?;
    stream.say(&format!("{GREETING} bytes={bytes}"))?;
    let number = stream.hear(&stop)?;
    let number = number.strip_prefix("ok ").and_then(|text| text.parse::<u64>().ok());
    let nic = match &target {
        Target::Net { local, server } => {
            flags.nic.nic.open(*server, options(*local, &flags.nic))?
        }
        Target::Local(path) => {
            let number = number.ok_or_else(|| {
                Failure::failed("io-failed", "the other side is no server of this version")
            })?;
            let mut socket =
                UnixStream::connect(path).map_err(|error| connect_error(path, &error))?;
            socket.write_all(format!("{}\n", nic_word(number)).as_bytes()).map_err(io_failure)?;
            Nic::local(socket)?
        }
    };
    let slots = if what == "bw" { DEPTH.min((64 << 20) / bytes).max(1) } else { 1 };
    let room = bytes.saturating_mul(slots);
    let local = matches!(target, Target::Local(_));
    let side = Side::new(&nic, room, local, &flags.memory, context)?;
    stream.say(&side.qp.endpoint().to_string())?;
    let peer: Endpoint = stream.hear(&stop)?.parse()?;
    let remote: RemoteMemory = stream.hear(&stop)?.parse()?;
    side.qp.connect(&peer, &connect())?;
    let run = Run { side: &side, remote, len, slots, iterations: flags.iterations };
    let mut answer = Answer::of(&format!("rdma {what}"));
    let resolved = nic.open().resolved();
    answer.line("link", &format!("{:?}: {}", resolved.link, resolved.why.title()));
    answer.set("link", format!("{:?}", resolved.link).to_lowercase());
    answer.set("why", resolved.why.as_str());
    answer.set("why_text", resolved.why.title());
    if let Some(port) = &resolved.port {
        answer.line("port", &port_line(port));
        answer.set("port", port_json(port));
    }
    if let Some(route) = side.mr.resolved().route {
        answer.line("registered", &format!("{route}"));
        answer.set("registered", route.as_str());
    }
    let simulated = if side.mem.is_simulated() { " (SIMULATED)" } else { "" };
    answer.line("memory", &format!("{} here{simulated}", flags.memory));
    answer.set("memory", flags.memory.to_string());
    answer.set("bytes", bytes);
    answer.set("iterations", flags.iterations);
    let rows = match what {
        "bw" => vec![run.bandwidth("write")?, run.bandwidth("read")?],
        _ => vec![run.latency(what)?],
    };
    stream.say(DONE)?;
    if matches!(resolved.link, LinkKind::Udp | LinkKind::Raw) {
        // As it is when the work is done: it turns off by itself where the kernel refuses a piece.
        let segmentation = nic.open().resolved().segmentation;
        answer.line("pieces", &segmentation.to_string());
        answer.set("segmentation", segmentation.as_str());
        answer.set("segmentation_text", segmentation.to_string());
    }
    if let Some(error) = traced(&nic, &flags.nic) {
        answer.set("trace_error", error);
    }
    for (text, _) in &rows {
        answer.text.push_str(text);
    }
    answer.line("compared", "all bytes equal");
    answer.set("compared", true);
    answer.set("results", rows.into_iter().map(|(_, json)| json).collect::<Vec<Value>>());
    Ok(answer)
}

/// Where a client's NIC is.
enum Target {
    Net { local: IpAddr, server: IpAddr },
    Local(std::path::PathBuf),
}

fn reach(flags: &RdmaClientFlags, stop: &dyn Fn() -> bool) -> Result<(Stream, Target), Failure> {
    if let Some(path) = &flags.nic.local {
        return Ok((Stream::local(path)?, Target::Local(path.clone())));
    }
    let server = flags.server.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let (stream, own) = Stream::connect((server, flags.nic.port).into(), stop)?;
    let local = match (flags.from, server) {
        (Some(from), _) => from,
        // The server's NIC has the address itself; all of 127.0.0.0/8 is this machine.
        (None, IpAddr::V4(v4)) if v4.is_loopback() => IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)),
        _ => own,
    };
    Ok((stream, Target::Net { local, server }))
}

fn options(local: IpAddr, flags: &RdmaNicFlags) -> SoftOptions {
    let mut options = SoftOptions::new(local);
    if let Some(link) = flags.link {
        options = options.link(link);
    }
    if let Some(path) = &flags.pcap {
        options = options.pcap(path);
    }
    options
}

/// Why the trace of packets ended early, if it did; told on standard error too.
fn traced(nic: &Nic, flags: &RdmaNicFlags) -> Option<String> {
    let error = nic.open().resolved().trace_error?;
    let path = flags.pcap.as_deref().unwrap_or(Path::new("the trace")).display();
    output::warn(&format!("{path} ends early, packets after that are missing in it: {error}"));
    Some(error)
}

fn connect() -> Connect {
    Connect::default()
}

fn io_failure(error: io::Error) -> Failure {
    match error.kind() {
        // As a socket with a time limit says it.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            let text = format!("the other side said nothing for {} s", PATIENCE.as_secs());
            Failure::failed("timed-out", text).hint(
                "a server serves one client at a time: try again when it is done with another",
            )
        }
        _ => Failure::failed("io-failed", error.to_string()),
    }
}

fn connect_error(path: &Path, error: &io::Error) -> Failure {
    Failure::failed("io-failed", format!("cannot use {}: {error}", path.display()))
}
