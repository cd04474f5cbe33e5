//! The side that moves bytes and compares them. It may hang or die; nobody waits for it for ever.

use std::io::{self, BufRead, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::checks::Outcome;
use beeline_core::segment::Segment;
use beeline_sys::mem::{FileMap, HostMem};

use super::{Answer, BYTES_MAX, Fault, Path, Request, open};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gpu::sim::{Effect, Site};
use crate::gpu::{Buffer, Gpu, PinnedMem, Stream};
use crate::memory::dmabuf::{DmaBuf, Kind};
use crate::storage::{Engine, File, Request as FileRequest};

/// Longest request that is read, in bytes.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// What a bandwidth is measured over: copies of about this long together, and their number.
const MEASURED: Duration = Duration::from_millis(100);
const COPIES_MIN: u32 = 4;
const COPIES_MAX: u32 = 400;
/// Bytes compared at once.
const PIECE_BYTES: usize = 1 << 20;

/// Answers requests of [`super::verify`] until `input` ends. The process dies with its parent.
///
/// # Errors
/// What reading or writing says.
pub fn serve(mut input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    // A parent that is killed cannot kill a child that hangs; a kernel that refuses costs only that.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    loop {
        let mut line = String::new();
        if input.by_ref().take(REQUEST_BYTES_MAX).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let request: Request = serde_json::from_str(&line)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let answer = answer(&request);
        let text = serde_json::to_string(&answer).map_err(io::Error::other)?;
        writeln!(output, "{text}")?;
        output.flush()?;
    }
}

fn answer(request: &Request) -> Answer {
    match run(request) {
        Ok(answer) => answer,
        // A device without room says nothing about the path.
        Err(error) if error.is_out_of_memory() => {
            Answer::not_verified(Outcome::NotRun, format!("{error:#}"))
        }
        Err(error) if error.is_timeout() => {
            Answer::not_verified(Outcome::Hung, format!("{error:#}"))
        }
        Err(error) => Answer::not_verified(Outcome::Failed, format!("{error:#}")),
    }
}

fn run(request: &Request) -> Result<Answer> {
    if request.bytes == 0 || request.bytes > BYTES_MAX {
        return Err(Error::refused(format!(
            "a probe copies 1 to {BYTES_MAX} bytes at once, not {}",
            request.bytes
        )));
    }
    let end = Instant::now() + Duration::from_millis(request.give_up_ms.min(3_600_000));
    match &request.path {
        Path::Peer { from, to, pushed } => {
            peer(&Side::new(from, request, end)?, &Side::new(to, request, end)?, *pushed, request)
        }
        Path::HostToDevice(device) => host_to_device(&Side::new(device, request, end)?, request),
        Path::DeviceToHost(device) => device_to_host(&Side::new(device, request, end)?, request),
        Path::FileToDevice(device) => file_to_device(&Side::new(device, request, end)?, request),
        Path::DmaBuf(device) => dma_buf(device),
    }
}

/// One device with a buffer, and host memory that it reaches.
struct Side {
    gpu: Gpu,
    stream: Stream,
    buffer: Buffer,
    host: PinnedMem,
    end: Instant,
}

impl Side {
    fn new(name: &str, request: &Request, end: Instant) -> Result<Self> {
        let gpu = open(name)?;
        let buffer = gpu.alloc(request.bytes)?;
        let host = gpu.pin(request.bytes)?;
        Ok(Self { stream: gpu.stream()?, buffer, host, gpu, end })
    }

    /// Puts the pattern into the buffer, by the device's own engine.
    fn fill(&self, pattern: &Pattern) -> Result<()> {
        pattern.write(self.host.mem())?;
        self.stream.copy_to_device(&self.buffer, 0, &self.host, 0, self.buffer.len())?;
        self.stream.synchronize(self.end)
    }

    /// Makes sure that bytes which are right were brought, not found.
    fn clear(&self) -> Result<()> {
        self.stream.fill(&self.buffer, 0, self.buffer.len(), 0xa5)?;
        self.stream.synchronize(self.end)
    }

    /// Reads the buffer back on the owner's side and compares; the first offset that differs.
    fn differs(&self, pattern: &Pattern) -> Result<Option<u64>> {
        blank(self.host.mem())?;
        self.stream.copy_to_host(&self.host, 0, &self.buffer, 0, self.buffer.len())?;
        self.stream.synchronize(self.end)?;
        pattern.differs(self.host.mem())
    }

    /// Arms a fault for the next copy of a simulated device; real ones are never told to fail.
    fn arm(&self, fault: Option<Fault>) {
        if let (Some(device), Some(fault)) = (self.gpu.as_sim(), fault) {
            let effect = match fault {
                Fault::Stall => Effect::Stall,
                Fault::Corrupt => Effect::Corrupt,
                Fault::Fail => Effect::Fail,
            };
            device.faults().arm(Site::Copy, 0, effect);
        }
    }
}

fn peer(source: &Side, target: &Side, pushed: bool, request: &Request) -> Result<Answer> {
    let pattern = Pattern::new(request);
    source.fill(&pattern)?;
    target.clear()?;
    let actor = if pushed { source } else { target };
    let direct = actor.gpu.reach(if pushed { &target.gpu } else { &source.gpu })?;
    actor.arm(request.fault);
    let copy = || actor.stream.copy_on_device(&target.buffer, 0, &source.buffer, 0, request.bytes);
    let note = if direct { "" } else { "staged: the driver offers no peer access" };
    measured(actor, request, copy, || target.differs(&pattern)).map(|answer| Answer {
        direct,
        note: join(note, &answer.note),
        ..answer
    })
}

fn host_to_device(side: &Side, request: &Request) -> Result<Answer> {
    let pattern = Pattern::new(request);
    side.clear()?;
    let host = side.gpu.pin(request.bytes)?;
    pattern.write(host.mem())?;
    side.arm(request.fault);
    let copy = || side.stream.copy_to_device(&side.buffer, 0, &host, 0, request.bytes);
    measured(side, request, copy, || side.differs(&pattern))
}

fn device_to_host(side: &Side, request: &Request) -> Result<Answer> {
    let pattern = Pattern::new(request);
    side.fill(&pattern)?;
    let host = side.gpu.pin(request.bytes)?;
    blank(host.mem())?;
    side.arm(request.fault);
    let copy = || side.stream.copy_to_host(&host, 0, &side.buffer, 0, request.bytes);
    measured(side, request, copy, || pattern.differs(host.mem()))
}

/// One copy that is compared, then as many as measure a bandwidth, then compared again.
fn measured(
    actor: &Side,
    request: &Request,
    copy: impl Fn() -> Result<()>,
    differs: impl Fn() -> Result<Option<u64>>,
) -> Result<Answer> {
    let started = Instant::now();
    copy()?;
    actor.stream.synchronize(actor.end)?;
    let first = started.elapsed();
    if let Some(at) = differs()? {
        return Ok(lied(at, request));
    }
    let round = |copies: u32| {
        let started = Instant::now();
        for _ in 0..copies {
            copy()?;
        }
        actor.stream.synchronize(actor.end)?;
        Ok::<_, Error>(started.elapsed())
    };
    // The first copy pays for mappings and wake-ups; a short round says how many make a long one.
    let one = if first < MEASURED { round(COPIES_MIN)? / COPIES_MIN } else { first };
    let fit = MEASURED.as_nanos() / one.as_nanos().max(1);
    let copies = u32::try_from(fit).unwrap_or(COPIES_MAX).clamp(COPIES_MIN, COPIES_MAX);
    let mut rounds = [round(copies)?, round(copies)?, round(copies)?];
    rounds.sort_unstable();
    let [_, spent, _] = rounds;
    if let Some(at) = differs()? {
        return Ok(lied(at, request));
    }
    let mb_per_s = mb_per_s(request.bytes.saturating_mul(u64::from(copies)), spent);
    Ok(Answer { outcome: Outcome::Verified, mb_per_s, direct: true, note: String::new() })
}

fn file_to_device(side: &Side, request: &Request) -> Result<Answer> {
    let pattern = Pattern::new(request);
    side.clear()?;
    pattern.write(side.host.mem())?;
    let file = temporary(request, &side.host)?;
    side.arm(request.fault);
    let engine = Engine::new(&side.gpu, Config::from_env());
    let segment = Segment { file: 0, file_offset: 0, device_offset: 0, len: request.bytes };
    let mut read = FileRequest::read(vec![Arc::new(file)], vec![segment], side.buffer.clone());
    read.deadline = Some(side.end);
    let report = engine.run(read)?;
    if let Some(at) = side.differs(&pattern)? {
        return Ok(lied(at, request));
    }
    let routes: Vec<&str> = report.routes.iter().map(|route| route.route.as_str()).collect();
    let note = format!("route {}", routes.join(", "));
    let mb_per_s = mb_per_s(report.bytes, report.elapsed);
    // Every route of today stages in host memory; a file is never direct by the driver's word.
    Ok(Answer { outcome: Outcome::Verified, mb_per_s, direct: false, note })
}

/// Memory that is exported for the probe: one of the driver's large pages.
const EXPORTED: u64 = 2 << 20;

/// Whether the driver exports memory as a dma-buf of its exact size, and whether the CPU may map that.
/// A driver that refuses closes a way of the NIC; nothing is wrong with the device.
fn dma_buf(name: &str) -> Result<Answer> {
    let buffer = open(name)?.alloc(EXPORTED)?;
    let exported = match DmaBuf::export(&buffer) {
        Ok(exported) => exported,
        Err(error) => {
            return Ok(Answer::not_verified(Outcome::Absent, format!("not exported: {error}")));
        }
    };
    let len = exported.len()?;
    // The file behind a simulated device is all of its memory.
    if exported.kind() == Kind::Cuda && len != EXPORTED {
        let note = format!("{EXPORTED} bytes were exported as a dma-buf of {len}");
        return Ok(Answer::not_verified(Outcome::Differs, note));
    }
    let note = match FileMap::new(exported.fd(), 0, beeline_sys::mem::page_size()) {
        Ok(_) => "exported; the CPU can map it".to_owned(),
        Err(error) => match error.raw_os_error() {
            // ENOTSUPP of the kernel, which has no name in user space.
            Some(524) => "exported; the CPU cannot map it (errno 524, no mmap in the driver): \
                          other drivers can import it"
                .to_owned(),
            _ => format!("exported; the CPU cannot map it ({error})"),
        },
    };
    Ok(Answer { outcome: Outcome::Verified, mb_per_s: None, direct: true, note })
}

/// A file of the pattern without a name, written through and out of the page cache.
fn temporary(request: &Request, host: &PinnedMem) -> Result<File> {
    let name = format!(".beeline-probe-{}-{}", std::process::id(), pattern_seed(request));
    let path = request.folder.join(name);
    let created = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path);
    let mut file = created.map_err(|error| Error::at("create", &path, error))?;
    // From here on nothing is left behind, however the process ends.
    std::fs::remove_file(&path).map_err(|error| Error::at("remove", &path, error))?;
    let mut piece = vec![0; PIECE_BYTES];
    each_piece(host.mem(), &mut piece, |_, bytes| {
        file.write_all(bytes).map_err(|error| Error::at("write", &path, error)).map(|()| true)
    })?;
    file.sync_all().map_err(|error| Error::at("write", &path, error))?;
    // Only advice: where the pages stay, the route says so.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    File::for_reading(OwnedFd::from(file), &path)
}

fn lied(at: u64, request: &Request) -> Answer {
    let note = format!("the first wrong byte of {} is at offset {at}", request.bytes);
    Answer::not_verified(Outcome::Differs, note)
}

fn join(a: &str, b: &str) -> String {
    let parts: Vec<&str> = [a, b].into_iter().filter(|part| !part.is_empty()).collect();
    parts.join("; ")
}

fn mb_per_s(bytes: u64, spent: Duration) -> Option<u64> {
    let rate = u128::from(bytes).saturating_mul(1000) / spent.as_nanos().max(1);
    u64::try_from(rate).ok()
}

/// Bytes that depend on their place and on the path, so that stale or shifted ones show.
struct Pattern {
    seed: u64,
}

/// Different for every path, and for every run.
fn pattern_seed(request: &Request) -> u64 {
    let text = serde_json::to_string(&request.path).unwrap_or_default();
    u64::from(crc32fast::hash(text.as_bytes())) | u64::from(std::process::id()) << 32
}

impl Pattern {
    fn new(request: &Request) -> Self {
        Self { seed: pattern_seed(request) }
    }

    fn fill(&self, start: u64, bytes: &mut [u8]) {
        // Pieces start at multiples of 8, so a word has one place whatever the piece.
        for (index, chunk) in bytes.chunks_mut(8).enumerate() {
            let word = start / 8 + index as u64;
            let mixed = (word ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
            let all = mixed.wrapping_add(word).to_le_bytes();
            for (byte, value) in chunk.iter_mut().zip(all) {
                *byte = value;
            }
        }
    }

    fn write(&self, mem: &HostMem) -> Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        let mut at = 0;
        while at < mem.len() {
            let len = usize::try_from(mem.len() - at).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            let part = piece.get_mut(..len).unwrap_or_default();
            self.fill(at, part);
            mem.write(at, part)?;
            at += len as u64;
        }
        Ok(())
    }

    fn differs(&self, mem: &HostMem) -> Result<Option<u64>> {
        let (mut piece, mut wanted) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
        let mut found = None;
        each_piece(mem, &mut piece, |at, bytes| {
            let expected = wanted.get_mut(..bytes.len()).unwrap_or_default();
            self.fill(at, expected);
            if *bytes != *expected {
                let place = bytes.iter().zip(expected.iter()).position(|(a, b)| a != b);
                found = Some(at + place.unwrap_or(0) as u64);
            }
            Ok(found.is_none())
        })?;
        Ok(found)
    }
}

/// Hands out `mem` piece by piece until `work` has enough.
fn each_piece(
    mem: &HostMem,
    piece: &mut [u8],
    mut work: impl FnMut(u64, &[u8]) -> Result<bool>,
) -> Result<()> {
    let mut at = 0;
    while at < mem.len() {
        let len = usize::try_from(mem.len() - at).unwrap_or(piece.len()).min(piece.len());
        let part = piece.get_mut(..len).unwrap_or_default();
        mem.read(at, part)?;
        if !work(at, part)? {
            return Ok(());
        }
        at += len as u64;
    }
    Ok(())
}

fn blank(mem: &HostMem) -> Result<()> {
    Ok(mem.fill(0, mem.len(), 0x5a)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fault: Option<Fault>, path: Path) -> Request {
        let folder = std::env::temp_dir();
        Request { path, bytes: 3 << 20 | 5, folder, fault, give_up_ms: 60_000 }
    }

    #[test]
    fn a_path_is_verified_lies_fails_or_hangs() {
        let path = || Path::HostToDevice("sim:0".to_owned());
        for (fault, outcome) in [
            (None, Outcome::Verified),
            (Some(Fault::Corrupt), Outcome::Differs),
            (Some(Fault::Fail), Outcome::Failed),
            (None, Outcome::Verified),
        ] {
            let answer = answer(&request(fault, path()));
            assert_eq!(answer.outcome, outcome, "{fault:?}: {}", answer.note);
        }
        let back = answer(&request(None, Path::DeviceToHost("sim:0".to_owned())));
        assert_eq!(back.outcome, Outcome::Verified, "{}", back.note);
        let file = answer(&request(None, Path::FileToDevice("sim:0".to_owned())));
        assert_eq!(file.outcome, Outcome::Verified, "{}", file.note);
        assert!(file.note.starts_with("route ") && file.mb_per_s.is_some());
        let lie = answer(&request(Some(Fault::Corrupt), Path::FileToDevice("sim:0".to_owned())));
        assert_eq!(lie.outcome, Outcome::Differs, "{}", lie.note);
        let none = answer(&request(None, Path::HostToDevice("sim:63".to_owned())));
        assert_eq!(none.outcome, Outcome::Failed);
        let huge = Request { bytes: u64::MAX, ..request(None, path()) };
        assert_eq!(answer(&huge).outcome, Outcome::Failed);
    }

    #[test]
    fn a_shift_a_stale_byte_and_another_path_show() {
        let one = Pattern { seed: 1 };
        let mem = HostMem::anonymous(PIECE_BYTES + 100).unwrap();
        one.write(&mem).unwrap();
        assert_eq!(one.differs(&mem).unwrap(), None);
        assert!(Pattern { seed: 2 }.differs(&mem).unwrap().is_some());
        mem.write(PIECE_BYTES as u64 + 99, &[0xee]).unwrap();
        assert_eq!(one.differs(&mem).unwrap(), Some(PIECE_BYTES as u64 + 99));
    }

    #[test]
    fn requests_that_are_none_end_the_child() {
        let mut out = Vec::new();
        assert!(answer_lines("nonsense\n", &mut out).is_err());
        assert!(answer_lines("", &mut out).is_ok());
    }

    fn answer_lines(text: &str, out: &mut Vec<u8>) -> io::Result<()> {
        serve(text.as_bytes(), out)
    }
}
