//! `beeline copy`: file -> device -> file, in two windows of device memory that alternate.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use beeline::config::SLOT_BYTES;
use beeline::core::segment::Segment;
use beeline::gpu::{Buffer, Gpu};
use beeline::storage::{
    self, CancelToken, Engine, File, Operation, Report, Request, Transfer, WholeFile,
};
use serde_json::{Map, Value};

use super::{Context, deadline, device_json, engine, label, route_line, routes_json};
use crate::failure::Failure;
use crate::flags::CopyFlags;
use crate::output::{self, Answer};
use crate::progress::Progress;

/// Most bytes of one of the two windows.
const WINDOW_BYTES: u64 = 256 << 20;
/// Permission bits that a copy takes over; set-user-ID and its like stay behind, as with `cp`.
const PERMISSIONS: u32 = 0o777;
/// The permissions while the copy is incomplete.
const PRIVATE: u32 = 0o600;

/// Copies one file.
///
/// # Errors
/// `same-file`; what either file, the device or the transfer says; a source that changed. The target
/// is as it was then.
pub(crate) fn run(flags: &CopyFlags, context: &Context) -> Result<Answer, Failure> {
    let source = Arc::new(File::open(&flags.source)?);
    let stat = examine(&flags.source)?.ok_or_else(|| vanished(&flags.source))?;
    let target = target(&flags.source, &flags.target)?;
    refuse_same(&stat, &flags.source, &target)?;
    let gpu = context.device(flags.via.as_deref())?;
    let token = context.cancel_token()?;
    let since = Instant::now();
    let cpu_before = storage::process_cpu_time();

    let whole = WholeFile::create(&target, source.size(), PRIVATE)?;
    let moved = move_bytes(flags, &gpu, &source, &whole, &token)?;
    source.check_unchanged()?;
    if let Some(failure) = context.interrupted() {
        return Err(failure);
    }
    whole.set_mode(stat.mode() & PERMISSIONS)?;
    whole.commit(!flags.no_sync)?;

    let seconds = since.elapsed().as_secs_f64();
    let cpu = storage::process_cpu_time().saturating_sub(cpu_before).as_secs_f64();
    Ok(report(&source, &target, &gpu, &moved, (seconds, cpu)))
}

/// The file to write: `target`, or in it where it is a folder.
fn target(source: &Path, target: &Path) -> Result<PathBuf, Failure> {
    if !target.is_dir() {
        return Ok(target.to_owned());
    }
    let Some(name) = source.file_name() else {
        let text = format!("{} has no file name to use in {}", source.display(), target.display());
        return Err(Failure::refused("refused", text).hint("name the file to write"));
    };
    Ok(target.join(name))
}

fn examine(path: &Path) -> Result<Option<fs::Metadata>, Failure> {
    match fs::metadata(path) {
        Ok(stat) => Ok(Some(stat)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let text = format!("cannot examine {}: {error}", path.display());
            Err(Failure::failed("io-failed", text))
        }
    }
}

fn vanished(path: &Path) -> Failure {
    Failure::failed("not-found", format!("{} is no longer there", path.display()))
}

fn refuse_same(stat: &fs::Metadata, source: &Path, target: &Path) -> Result<(), Failure> {
    let same = examine(target)?
        .is_some_and(|other| (other.dev(), other.ino()) == (stat.dev(), stat.ino()));
    if !same {
        return Ok(());
    }
    let text = format!("{} and {} are the same file", source.display(), target.display());
    Err(Failure::refused("same-file", text).hint("name another file to write"))
}

/// What went which way, in both directions.
#[derive(Default)]
struct Moved {
    read: Report,
    written: Report,
    window_bytes: u64,
}

fn move_bytes(
    flags: &CopyFlags,
    gpu: &Gpu,
    source: &Arc<File>,
    whole: &WholeFile,
    token: &CancelToken,
) -> Result<Moved, Failure> {
    let size = source.size();
    if size == 0 {
        return Ok(Moved::default());
    }
    let window_bytes = window_bytes(size, gpu.memory()?.free);
    let mut buffers = vec![gpu.alloc(window_bytes)?];
    if size > window_bytes {
        buffers.push(gpu.alloc(window_bytes)?);
    }
    let pump = Pump {
        engine: engine(gpu, &flags.engine),
        flags,
        source: Arc::clone(source),
        target: Arc::clone(whole.file()),
        buffers,
        window_bytes,
        deadline: deadline(flags.engine.timeout),
        token: token.clone(),
        bar: Progress::new(format!("copying through {}", label(&gpu.info())), size),
    };
    pump.run()
}

/// Bytes of one window: the whole file if it is small, and never more than half of what is free.
/// Windows are whole slots, so that the grid of the engine and theirs agree, unless the device has
/// no room for two slots.
fn window_bytes(size: u64, free: u64) -> u64 {
    let most = (free / 2).min(WINDOW_BYTES);
    let grid = if most < SLOT_BYTES { 4096 } else { SLOT_BYTES };
    // A device without room for even that says how much is missing.
    let whole = (most / grid * grid).max(4096);
    if size <= WINDOW_BYTES && size <= free { size } else { whole }
}

/// Reads window after window; while one is written, the next is read.
struct Pump<'a> {
    engine: Engine,
    flags: &'a CopyFlags,
    source: Arc<File>,
    target: Arc<File>,
    buffers: Vec<Buffer>,
    window_bytes: u64,
    deadline: Option<Instant>,
    token: CancelToken,
    bar: Progress,
}

impl Pump<'_> {
    fn run(&self) -> Result<Moved, Failure> {
        let mut moved = Moved { window_bytes: self.window_bytes, ..Moved::default() };
        let mut reading = self.start(Operation::Read, 0)?;
        let mut index = 0;
        while let Some(read) = reading.take() {
            moved.read.merge(&read.wait()?);
            // The other buffer is free: its write was waited for in the round before.
            reading = self.start(Operation::Read, index + 1)?;
            let done = index * self.window_bytes;
            if let Some(write) = self.start(Operation::Write, index)? {
                let report = write.wait_with(|progress| self.bar.at(done + progress.done))?;
                moved.written.merge(&report);
            }
            index += 1;
        }
        Ok(moved)
    }

    /// Starts to read or write window number `index`; `None` behind the end of the file.
    fn start(&self, operation: Operation, index: u64) -> Result<Option<Transfer>, Failure> {
        let size = self.source.size();
        let start = index.saturating_mul(self.window_bytes);
        let odd = usize::from(index % 2 == 1);
        let Some(buffer) = self.buffers.get(odd).filter(|_| start < size) else { return Ok(None) };
        let len = self.window_bytes.min(size - start);
        let segments = vec![Segment { file: 0, file_offset: start, device_offset: 0, len }];
        let mut request = match operation {
            Operation::Read => {
                Request::read(vec![Arc::clone(&self.source)], segments, buffer.clone())
            }
            Operation::Write => {
                Request::write(vec![Arc::clone(&self.target)], segments, buffer.clone())
            }
        };
        request.mode = self.flags.route.mode;
        request.route = self.flags.route.route;
        request.deadline = self.deadline;
        request.cancel = Some(self.token.clone());
        Ok(Some(self.engine.submit(request)?))
    }
}

fn report(
    source: &File,
    target: &Path,
    gpu: &Gpu,
    moved: &Moved,
    (seconds, cpu): (f64, f64),
) -> Answer {
    let bytes = source.size();
    let info = gpu.info();
    let speed = output::gb_per_s(bytes, seconds).filter(|_| bytes > 0);
    let cpu_per_gb = output::per_gb(cpu, bytes);
    let mut answer = Answer::of("copy");
    answer.line(
        "copied",
        &format!(
            "{} from {} to {} through {}",
            output::bytes(bytes),
            source.path().display(),
            target.display(),
            label(&info)
        ),
    );
    answer.line("time", &format!("{seconds:.4} s, {}", output::figure(speed, "GB/s")));
    answer.line("CPU time", &format!("{cpu:.4} s, {}", output::figure(cpu_per_gb, "CPU-s/GB")));
    for route in &moved.read.routes {
        answer.line("read", &route_line(route, bytes));
    }
    for route in &moved.written.routes {
        answer.line("written", &route_line(route, bytes));
    }
    answer.set("simulated", info.simulated);
    answer.set("device", device_json(&info));
    answer.set("source", path_json(source.path()));
    answer.set("target", path_json(target));
    answer.set("bytes", bytes);
    answer.set("window_bytes", moved.window_bytes);
    answer.set("seconds", seconds);
    answer.set("gb_per_s", speed);
    answer.set("cpu_seconds", cpu);
    answer.set("cpu_seconds_per_gb", cpu_per_gb);
    answer.set("read_routes", routes_json(&moved.read, Operation::Read));
    answer.set("write_routes", routes_json(&moved.written, Operation::Write));
    answer
}

fn path_json(path: &Path) -> Value {
    let mut object = Map::new();
    output::insert_path(&mut object, "path", path);
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_fit_the_file_and_the_device() {
        let slot = SLOT_BYTES;
        let cases = [
            (1, 16 << 30, 1),
            (300 << 20, 16 << 30, WINDOW_BYTES),
            (WINDOW_BYTES, 16 << 30, WINDOW_BYTES),
            (100 << 20, 100 << 20, 100 << 20),
            (101 << 20, 100 << 20, 48 << 20),
            (100 << 20, 3 * slot, slot),
            (100 << 20, 1 << 20, 512 << 10),
            (100 << 20, 0, 4096),
        ];
        for (size, free, expected) in cases {
            assert_eq!(window_bytes(size, free), expected, "{size} bytes, {free} free");
        }
    }
}
