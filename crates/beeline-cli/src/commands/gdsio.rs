//! `beeline gdsio`: gdsio's parameters and its line of figures, over the cuFile library of Beeline.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline::cufile::{Entry, Operation, UserPtr, library};
use beeline::gpu::{Buffer, DeviceId, Gpu, PinnedMem};
use beeline::storage::process_cpu_time;
use serde_json::json;

use super::Context;
use crate::failure::Failure;
use crate::flags::GdsioFlags;
use crate::output::Answer;

/// Entries of one batch where batches are measured.
const BATCH: u32 = 16;
/// Latencies kept by one thread.
const SAMPLES_MAX: usize = 1 << 20;

/// # Errors
/// A device that is no CUDA device, files that cannot be made, a call that failed, bytes that differ.
pub(crate) fn run(flags: &GdsioFlags, context: &Context) -> Result<Answer, Failure> {
    let id = DeviceId::Cuda(flags.device);
    let gpu = Gpu::open(&id)?;
    context.set_simulated(gpu.info().simulated);
    let paths = paths(flags)?;
    let write = flags.operation & 1 == 1;
    let per_thread = (flags.size / u64::from(flags.threads)).max(flags.io_size);
    let files = open(flags, &paths, write, per_thread)?;
    let library = library();
    library.open().map_err(failed)?;
    let handles = files
        .iter()
        .map(|file| library.register_handle(file.as_raw_fd()).map_err(failed))
        .collect::<Result<Vec<_>, _>>()?;
    let stop = AtomicBool::new(false);
    let (cpu, began) = (process_cpu_time(), Instant::now());
    let work = |index: u32| {
        let at = if files.len() > 1 { index as usize } else { 0 };
        let missing = || Failure::failed("internal", "a thread without a file");
        let worker = Worker {
            flags,
            gpu: &gpu,
            file: files.get(at).ok_or_else(missing)?,
            handle: *handles.get(at).ok_or_else(missing)?,
            base: if files.len() > 1 { 0 } else { u64::from(index) * per_thread },
            bytes: per_thread,
            seed: u64::from(index) * 7919 + 88_172_645_463_325_252,
            write,
            until: flags.seconds.map(|span| began + span),
            stop: &stop,
        };
        worker.run().inspect_err(|_| stop.store(true, Ordering::Relaxed))
    };
    let outcomes: Vec<Result<Done, Failure>> = std::thread::scope(|scope| {
        let spawn = |index| scope.spawn(move || work(index));
        let threads: Vec<_> = (0..flags.threads).map(spawn).collect();
        let lost = || Err(Failure::failed("internal", "a thread panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
    });
    let (span, cpu) = (began.elapsed(), process_cpu_time().saturating_sub(cpu));
    for handle in handles {
        library.deregister_handle(handle);
    }
    library.close().map_err(failed)?;
    let done = outcomes.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(report(flags, &done, span, cpu))
}

fn failed(failure: beeline::cufile::Failure) -> Failure {
    let (code, errno) = (failure.code.0, failure.errno);
    let text = if errno == 0 { format!("{} [cuFile {code}]", failure.text) } else { failure.text };
    Failure::failed("cufile-failed", text)
}

fn paths(flags: &GdsioFlags) -> Result<Vec<PathBuf>, Failure> {
    match (&flags.file, &flags.folder) {
        (Some(file), None) => Ok(vec![file.clone()]),
        (None, Some(folder)) => {
            Ok((0..flags.threads).map(|n| folder.join(format!("gdsio.{n}"))).collect())
        }
        _ => Err(Failure::refused("usage", "name one file with -f, or a folder with -D")),
    }
}

/// Opens the files. What is read must be there and long enough, or not there at all: then it is made. A file
/// of somebody's is never changed to be read, and only regular files are written.
fn open(
    flags: &GdsioFlags,
    paths: &[PathBuf],
    write: bool,
    per_thread: u64,
) -> Result<Vec<File>, Failure> {
    // Up to the end of the last thread's last whole request.
    let before = per_thread.saturating_mul(u64::from(flags.threads.saturating_sub(1)));
    let before = if paths.len() > 1 { 0 } else { before };
    let bytes = before.saturating_add(per_thread / flags.io_size * flags.io_size);
    let one = |path: &PathBuf| match write {
        true => to_write(path),
        false => to_read(path, bytes),
    };
    paths.iter().map(one).collect()
}

fn to_write(path: &Path) -> Result<File, Failure> {
    // Asked before it is opened: opening a device for writing can do something already.
    if let Ok(meta) = std::fs::metadata(path) {
        regular(path, &meta)?;
    }
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    opened.map_err(|error| io_failed("open", path, &error))
}

fn to_read(path: &Path, bytes: u64) -> Result<File, Failure> {
    match OpenOptions::new().read(true).write(true).create_new(true).open(path) {
        Ok(file) => match fill(&file, bytes) {
            Ok(()) => Ok(file),
            Err(error) => {
                // Made here a moment ago; half of it would be in the way of the next run.
                let _ = std::fs::remove_file(path);
                Err(io_failed("fill", path, &error))
            }
        },
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let file = File::open(path).map_err(|error| io_failed("open", path, &error))?;
            let meta = file.metadata().map_err(|error| io_failed("look at", path, &error))?;
            regular(path, &meta)?;
            if meta.len() < bytes {
                let text = format!(
                    "{} has {} bytes, and {bytes} are to be read",
                    path.display(),
                    meta.len()
                );
                let hint = "make -s smaller, or name a file that is not there yet: it is made";
                return Err(Failure::refused("file-too-short", text).hint(hint));
            }
            Ok(file)
        }
        Err(error) => Err(io_failed("create", path, &error)),
    }
}

fn regular(path: &Path, meta: &std::fs::Metadata) -> Result<(), Failure> {
    if meta.is_file() {
        return Ok(());
    }
    let text = format!("{} is no regular file", path.display());
    Err(Failure::refused("not-a-regular-file", text).hint("name a file of a file system"))
}

fn io_failed(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::failed("io-failed", format!("{what} {}: {error}", path.display()))
}

fn fill(file: &File, to: u64) -> std::io::Result<()> {
    let mut at = 0;
    while at < to {
        let len = (to - at).min(4 << 20);
        file.write_all_at(&pattern(at, len), at)?;
        at += len;
    }
    Ok(())
}

/// The bytes that belong at a place of a file, by words.
fn pattern(at: u64, len: u64) -> Vec<u8> {
    let first = at / 8;
    let words = (at % 8 + len).div_ceil(8);
    let word = |n: u64| (first + n).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let bytes = (0..words).flat_map(word).skip((at % 8) as usize);
    bytes.take(usize::try_from(len).unwrap_or(usize::MAX)).collect()
}

/// One thread's part.
struct Worker<'a> {
    flags: &'a GdsioFlags,
    gpu: &'a Gpu,
    file: &'a File,
    handle: usize,
    base: u64,
    bytes: u64,
    seed: u64,
    write: bool,
    until: Option<Instant>,
    stop: &'a AtomicBool,
}

struct Done {
    bytes: u64,
    calls: u64,
    micros: Vec<f32>,
    verified: u64,
}

impl Worker<'_> {
    fn run(mut self) -> Result<Done, Failure> {
        let io = self.flags.io_size;
        let entries = if self.flags.transfer == 6 { u64::from(BATCH) } else { 1 };
        let buffer = self.gpu.alloc(io * entries)?;
        let pinned = self.gpu.pin(io)?;
        let ptr = UserPtr::device(buffer.ptr());
        library().register_buffer(ptr, buffer.len()).map_err(failed)?;
        let mut done = Done { bytes: 0, calls: 0, micros: Vec::new(), verified: 0 };
        let units = (self.bytes / io).max(1);
        let outcome = self.loop_over(&buffer, &pinned, units, entries, &mut done);
        library().deregister_buffer(ptr).map_err(failed)?;
        outcome.map(|()| done)
    }

    fn loop_over(
        &mut self,
        buffer: &Buffer,
        pinned: &PinnedMem,
        units: u64,
        entries: u64,
        done: &mut Done,
    ) -> Result<(), Failure> {
        let ptr = UserPtr::device(buffer.ptr());
        let io = self.flags.io_size;
        let batch = (entries > 1).then(|| library().set_up_batch(BATCH)).transpose();
        let batch = batch.map_err(failed)?;
        let mut unit = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let over = self.until.map_or(unit >= units, |until| Instant::now() >= until);
            if over {
                break;
            }
            let places: Vec<u64> = (0..entries).map(|n| self.place(unit + n, units)).collect();
            if self.write && self.flags.verify {
                self.put(buffer, pinned, &places)?;
            }
            let began = Instant::now();
            let moved = match batch {
                Some(batch) => self.batch(batch, ptr, &places)?,
                None => {
                    let at = i64::try_from(places.first().copied().unwrap_or(0)).unwrap_or(0);
                    let moved = library().transfer(self.operation(), self.handle, ptr, io, (at, 0));
                    moved.map_err(failed)?
                }
            };
            if done.micros.len() < SAMPLES_MAX {
                done.micros.push(began.elapsed().as_secs_f32() * 1e6);
            }
            if moved != io * entries {
                return Err(Failure::failed("short", format!("{moved} bytes of {}", io * entries)));
            }
            done.bytes += moved;
            done.calls += entries;
            if self.flags.verify {
                done.verified += self.compare(buffer, pinned, &places)?;
            }
            unit += entries;
        }
        if let Some(batch) = batch {
            library().destroy(batch);
        }
        Ok(())
    }

    const fn operation(&self) -> Operation {
        if self.write { Operation::Write } else { Operation::Read }
    }

    fn place(&mut self, unit: u64, units: u64) -> u64 {
        let unit = if self.flags.operation >= 2 {
            self.seed ^= self.seed << 13;
            self.seed ^= self.seed >> 7;
            self.seed ^= self.seed << 17;
            self.seed
        } else {
            unit
        };
        self.base + unit % units * self.flags.io_size
    }

    fn batch(&self, batch: usize, ptr: UserPtr, places: &[u64]) -> Result<u64, Failure> {
        let io = self.flags.io_size;
        let entry = |(n, at): (u64, &u64)| Entry {
            cookie: n,
            handle: self.handle,
            operation: self.operation(),
            ptr,
            file_offset: i64::try_from(*at).unwrap_or(i64::MAX),
            ptr_offset: i64::try_from(n * io).unwrap_or(i64::MAX),
            size: io,
        };
        let entries: Vec<Entry> = (0..).zip(places).map(entry).collect();
        library().submit(batch, &entries).map_err(failed)?;
        let count = u32::try_from(places.len()).unwrap_or(BATCH);
        let events = library().events(batch, (count, count), None).map_err(failed)?;
        let bad = events.iter().find(|event| event.status != beeline::cufile::Status::COMPLETE);
        match bad {
            Some(event) => Err(Failure::failed("cufile-failed", format!("{event:?}"))),
            None => Ok(events.iter().map(|event| event.ret as u64).sum()),
        }
    }

    /// Puts what belongs at `places` into the device.
    fn put(&self, buffer: &Buffer, pinned: &PinnedMem, places: &[u64]) -> Result<(), Failure> {
        let stream = self.gpu.stream()?;
        for (n, at) in (0..).zip(places) {
            let bytes = pattern(*at, self.flags.io_size);
            pinned.mem().write(0, &bytes).map_err(outside)?;
            stream.copy_to_device(buffer, n * self.flags.io_size, pinned, 0, self.flags.io_size)?;
            stream.synchronize(Instant::now() + Duration::from_secs(60))?;
        }
        Ok(())
    }

    /// Compares file and device, and after a write the file with what belongs there.
    fn compare(&self, buffer: &Buffer, pinned: &PinnedMem, places: &[u64]) -> Result<u64, Failure> {
        let io = self.flags.io_size;
        let size = usize::try_from(io).unwrap_or(usize::MAX);
        let stream = self.gpu.stream()?;
        let (mut file, mut device) = (vec![0; size], vec![0; size]);
        for (n, at) in (0..).zip(places) {
            stream.copy_to_host(pinned, 0, buffer, n * io, io)?;
            stream.synchronize(Instant::now() + Duration::from_secs(60))?;
            pinned.mem().read(0, &mut device).map_err(outside)?;
            self.file
                .read_exact_at(&mut file, *at)
                .map_err(|error| Failure::failed("io-failed", format!("read back: {error}")))?;
            if file != device || (self.write && file != pattern(*at, io)) {
                let text = format!("{io} bytes at {at}: file and device differ");
                return Err(Failure::failed("verify-failed", text));
            }
        }
        Ok(io * places.len() as u64)
    }
}

fn outside(error: impl std::fmt::Display) -> Failure {
    Failure::failed("internal", error.to_string())
}

fn report(flags: &GdsioFlags, done: &[Done], span: Duration, cpu: Duration) -> Answer {
    let bytes: u64 = done.iter().map(|one| one.bytes).sum();
    let calls: u64 = done.iter().map(|one| one.calls).sum();
    let verified: u64 = done.iter().map(|one| one.verified).sum();
    let mut micros: Vec<f32> = done.iter().flat_map(|one| one.micros.iter().copied()).collect();
    micros.sort_by(f32::total_cmp);
    let part = |share: usize| micros.get(micros.len() * share / 100).copied().unwrap_or(0.0);
    let gib = bytes as f64 / f64::from(1 << 30);
    let seconds = span.as_secs_f64();
    let rate = if seconds > 0.0 { gib / seconds } else { 0.0 };
    let sum: f64 = micros.iter().map(|us| f64::from(*us)).sum();
    let mean = if micros.is_empty() { 0.0 } else { sum / micros.len() as f64 };
    let kind = ["READ", "WRITE", "RANDREAD", "RANDWRITE"];
    let kind = kind.get(usize::from(flags.operation)).copied().unwrap_or("?");
    let transfer = if flags.transfer == 6 { "GPU_BATCH" } else { "CPU_GPU" };
    let cost = if gib > 0.0 { cpu.as_secs_f64() / gib } else { 0.0 };
    let mut answer = Answer::of("gdsio");
    answer.text = format!(
        "IoType: {kind} XferType: {transfer} Threads: {} DataSetSize: {}/{}(KiB) IOSize: {}(KiB) \
         Throughput: {rate:.6} GiB/sec, Avg_Latency: {mean:.6} usecs ops: {calls} total_time \
         {seconds:.6} secs\np50: {:.1} usecs p99: {:.1} usecs CPU: {cost:.4} s/GiB{}\n",
        flags.threads,
        bytes / 1024,
        flags.size / 1024,
        flags.io_size / 1024,
        part(50),
        part(99),
        if flags.verify {
            format!(" Verify: {verified} bytes compared equal")
        } else {
            String::new()
        },
    );
    answer.set("io_type", kind);
    answer.set("transfer_type", transfer);
    answer.set("threads", flags.threads);
    answer.set("bytes", bytes);
    answer.set("operations", calls);
    answer.set("seconds", seconds);
    answer.set("gib_per_second", rate);
    answer.set("latency_us", json!({ "mean": mean, "p50": part(50), "p99": part(99) }));
    answer.set("cpu_seconds_per_gib", cost);
    answer.set("verified_bytes", verified);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_somebodys_is_not_changed_to_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let theirs = dir.path().join("theirs");
        std::fs::write(&theirs, b"thirteen byte").unwrap();
        let refused = to_read(&theirs, 4096).unwrap_err();
        assert!(refused.message.contains("has 13 bytes, and 4096 are to be read"), "{refused:?}");
        assert_eq!(std::fs::read(&theirs).unwrap(), b"thirteen byte");
        assert_eq!(to_read(&theirs, 13).unwrap().metadata().unwrap().len(), 13);

        let ours = dir.path().join("ours");
        assert_eq!(to_read(&ours, 4097).unwrap().metadata().unwrap().len(), 4097);
        assert_eq!(std::fs::read(&ours).unwrap(), pattern(0, 4097));
    }

    #[test]
    fn only_regular_files_are_read_and_written() {
        for path in ["/dev/null", "/dev/zero", "/proc/self"] {
            let path = Path::new(path);
            assert!(to_write(path).unwrap_err().message.contains("no regular file"));
            assert!(to_read(path, 1).unwrap_err().message.contains("no regular file"));
        }
    }
}
