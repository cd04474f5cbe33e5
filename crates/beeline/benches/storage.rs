//! File to device, against bare loops, in one run.
//!
//! `cargo bench -p beeline --bench storage -- [--to DEVICE] [--file PATH] [--gib N] [--runs N]
//! [--once warm|cold|mixed [--route NAME] | --raw | --memory | --context-only]`
//!
//! With `--file`, a file that exists is read as it is; its size is a multiple of 64 MiB. `--once`
//! runs the engine alone, `--raw` the direct read, and prints a JSON object a run, for a script that
//! compares them with others; `--memory` loads once and says what memory that took beyond the data;
//! `--context-only` opens the device and leaves.
//!
//! Every line is the median of the runs with the spread, in GB/s (10^9 bytes), with the CPU time of
//! the whole process in seconds per GB and the routes the bytes took. The bytes of every engine run
//! are compared with the file. Bare loops do not copy to a device unless their name says so.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::panic,
    missing_docs
)]

use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline::config::{Config, SLOT_BYTES};
use beeline::core::segment::Segment;
use beeline::gpu::{Buffer, Gpu};
use beeline::storage::{Engine, File, Report, Request, StorageRoute};
use beeline_sys::file as sys;
use beeline_sys::mem::HostMem;
use beeline_sys::thread::process_cpu_time;
use beeline_sys::uring::{self, Direction, Uring};

const CHUNK: u64 = 4 << 20;
const STRETCH: u64 = 64 << 20;

struct Setup {
    path: PathBuf,
    size: u64,
    runs: usize,
    gpu: Gpu,
    device: Buffer,
    engine: Engine,
    /// Free device memory with the context there and nothing else.
    free_before: u64,
    /// Taken from the file after the first run where it was not made here: reading it before would
    /// warm every cache below.
    crc: OnceLock<u32>,
}

#[derive(Clone, Copy, PartialEq)]
enum Cache {
    Warm,
    Cold,
    Mixed,
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.iter().any(|arg| arg == "--list" || arg == "--test") {
        return; // `cargo test --benches` and nextest only ask what is here.
    }
    if args.iter().any(|arg| arg == "--context-only") {
        // What a process pays for the device alone: the floor under a fresh load.
        let id = value(&args, "--to").unwrap().parse().unwrap();
        drop(Gpu::open(&id).unwrap().alloc(1 << 20).unwrap());
        return;
    }
    let setup = Setup::new(&args);
    if args.iter().any(|arg| arg == "--raw") {
        return setup.raw();
    }
    if args.iter().any(|arg| arg == "--memory") {
        return setup.memory();
    }
    if let Some(cache) = value(&args, "--once") {
        return setup.once(&cache, value(&args, "--route").map(|name| name.parse().unwrap()));
    }
    setup.describe();
    let threads = Config::default().threads;
    let warm = [Cache::Warm, Cache::Cold];
    println!("{:<34} {:>7} {:>15} {:>9}  routes", "", "GB/s", "(spread)", "CPU-s/GB");
    for cache in warm {
        let name = cache.name();
        setup.row(&format!("{name}: threaded pread"), cache, || setup.pread(threads, false));
        setup.row(&format!("{name}: threaded pread + copy"), cache, || setup.pread(threads, true));
        setup.row(&format!("{name}: O_DIRECT depth 32"), cache, || setup.direct());
    }
    let warm = setup.row("warm: engine, auto", Cache::Warm, || setup.engine(None));
    let cold = setup.row("cold: engine, auto", Cache::Cold, || setup.engine(None));
    let mixed = setup.row("mixed: engine, auto", Cache::Mixed, || setup.engine(None));
    for route in [StorageRoute::MappedPageCache, StorageRoute::PageCache] {
        let name = format!("warm: engine, {route}");
        setup.row(&name, Cache::Warm, || setup.engine(Some(route)));
    }
    for route in [StorageRoute::Direct, StorageRoute::ThreadPool, StorageRoute::PageCache] {
        let name = format!("cold: engine, {route}");
        setup.row(&name, Cache::Cold, || setup.engine(Some(route)));
    }
    setup.row("cold: O_DIRECT depth 32, again", Cache::Cold, || setup.direct());
    let ideal = 2.0 / (1.0 / warm + 1.0 / cold);
    println!(
        "mixed / time-weighted mix of warm and cold: {:.3} (ideal {ideal:.2} GB/s)",
        mixed / ideal
    );
    if !args.iter().any(|arg| arg == "--file") {
        fs::remove_file(&setup.path).unwrap();
    }
}

impl Cache {
    const fn name(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Cold => "cold",
            Self::Mixed => "mixed",
        }
    }
}

impl Setup {
    fn new(args: &[String]) -> Self {
        let value = |name| value(args, name);
        let path = value("--file").map_or_else(|| build_folder().join("bench"), PathBuf::from);
        let runs = value("--runs").map_or(5, |n| n.parse().unwrap());
        let gpu = match value("--to") {
            Some(id) => Gpu::open(&id.parse().unwrap()).unwrap(),
            None => Gpu::default_device().unwrap(),
        };
        let (size, crc) = match fs::metadata(&path) {
            Ok(meta) if value("--file").is_some() => (meta.len(), OnceLock::new()),
            _ => {
                let size = value("--gib").map_or(2, |n| n.parse::<u64>().unwrap()) << 30;
                (size, OnceLock::from(make(&path, size)))
            }
        };
        assert_eq!(size % STRETCH, 0, "the file is a multiple of 64 MiB");
        let free_before = gpu.memory().unwrap().free;
        let device = gpu.alloc(size).unwrap();
        let engine = Engine::new(&gpu, Config::from_env());
        engine.warm_up(Config::from_env().pool_bytes).unwrap();
        let stream = gpu.stream().unwrap();
        stream.fill(&device, 0, size, 0).unwrap();
        stream.synchronize(Instant::now() + Duration::from_secs(300)).unwrap();
        Self { path, size, runs, gpu, device, engine, free_before, crc }
    }

    /// One run of the engine, context, pool and destination ready, as JSON.
    fn once(&self, cache: &str, route: Option<StorageRoute>) {
        let cache = [Cache::Warm, Cache::Cold, Cache::Mixed]
            .into_iter()
            .find(|known| known.name() == cache)
            .expect("warm, cold or mixed");
        for run in 0..self.runs {
            // A warm read leaves the page cache as it found it.
            if run == 0 || cache != Cache::Warm {
                self.prepare(cache);
            }
            let (start, cpu) = (Instant::now(), process_cpu_time());
            let report = self.engine(route).expect("a route");
            let seconds = start.elapsed().as_secs_f64();
            let cpu = (process_cpu_time() - cpu).as_secs_f64();
            let routes = describe(&report, self.size);
            println!(
                "{{\"bytes\":{},\"seconds\":{seconds:.6},\"cpu_seconds\":{cpu:.6},\"routes\":\"{routes}\"}}",
                self.size
            );
        }
        self.compare();
    }

    /// One load while a thread watches the device's free memory: what the load takes beyond its data,
    /// on the device and pinned, and what is missing once everything is dropped. As JSON, in bytes.
    fn memory(self) {
        self.prepare(Cache::Warm);
        let done = AtomicBool::new(false);
        let lowest = std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut lowest = u64::MAX;
                while !done.load(Ordering::Relaxed) {
                    lowest = lowest.min(self.gpu.memory().unwrap().free);
                    std::thread::sleep(Duration::from_millis(1));
                }
                lowest
            });
            self.engine(None);
            done.store(true, Ordering::Relaxed);
            watch.join().unwrap()
        });
        let device = (self.free_before - lowest).saturating_sub(self.size);
        let pool = self.engine.pool_usage();
        let pinned = pool.peak as u64 * SLOT_BYTES;
        let Self { gpu, device: buffer, engine, free_before, path, size, .. } = self;
        drop((engine, buffer));
        let free_after = gpu.memory().unwrap().free;
        // The driver keeps what the first streams of a process needed; whether Beeline leaves
        // anything shows in what a second load adds.
        let engine = Engine::new(&gpu, Config::from_env());
        let buffer = gpu.alloc(size).unwrap();
        let file = Arc::new(File::open(&path).unwrap());
        let all = Segment { file: 0, file_offset: 0, device_offset: 0, len: size };
        engine.run(Request::read(vec![file], vec![all], buffer.clone())).unwrap();
        drop((engine, buffer));
        let (first, second) = (
            free_before.saturating_sub(free_after),
            free_after.saturating_sub(gpu.memory().unwrap().free),
        );
        println!(
            "{{\"device_beyond_data\":{device},\"pinned\":{pinned},\"left_by_the_first_load\":{first},\
             \"left_by_the_second\":{second}}}"
        );
    }

    /// The raw read alone, as JSON.
    fn raw(&self) {
        for _ in 0..self.runs {
            self.prepare(Cache::Cold);
            let (start, cpu) = (Instant::now(), process_cpu_time());
            self.direct();
            let seconds = start.elapsed().as_secs_f64();
            let cpu = (process_cpu_time() - cpu).as_secs_f64();
            println!(
                "{{\"bytes\":{},\"seconds\":{seconds:.6},\"cpu_seconds\":{cpu:.6}}}",
                self.size
            );
        }
    }

    fn describe(&self) {
        let commit =
            std::process::Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
        let commit = commit.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
        let file = File::open(&self.path).unwrap();
        let info = self.gpu.info();
        println!(
            "commit {}, {} GiB on {}, {} ({}{}), {} CPUs, {} runs each",
            commit.unwrap_or_default(),
            self.size >> 30,
            file.facts().file_system,
            info.id,
            info.name,
            if info.simulated { ", simulated" } else { "" },
            std::thread::available_parallelism().unwrap(),
            self.runs
        );
    }

    /// Runs `body` and prints its line; answers the median in GB/s.
    fn row(&self, name: &str, cache: Cache, body: impl Fn() -> Option<Report>) -> f64 {
        let mut speeds = Vec::new();
        let mut costs = Vec::new();
        let mut routes = String::new();
        for _ in 0..self.runs {
            self.prepare(cache);
            let (start, cpu) = (Instant::now(), process_cpu_time());
            let report = body();
            let seconds = start.elapsed().as_secs_f64();
            let gb = self.size as f64 / 1e9;
            speeds.push(gb / seconds);
            costs.push((process_cpu_time() - cpu).as_secs_f64() / gb);
            if let Some(report) = report {
                routes = describe(&report, self.size);
                self.compare();
            }
        }
        speeds.sort_by(f64::total_cmp);
        costs.sort_by(f64::total_cmp);
        let middle = self.runs / 2;
        let spread = format!("({:.2}-{:.2})", speeds[0], speeds[self.runs - 1]);
        println!(
            "{name:<34} {:>7.2} {spread:>15} {:>9.3}  {routes}",
            speeds[middle], costs[middle]
        );
        speeds[middle]
    }

    fn prepare(&self, cache: Cache) {
        let file = fs::File::open(&self.path).unwrap();
        let drop = |at: u64, len| {
            let len = std::num::NonZeroU64::new(len);
            rustix::fs::fadvise(&file, at, len, rustix::fs::Advice::DontNeed).unwrap();
        };
        if cache == Cache::Cold {
            return drop(0, self.size);
        }
        // Read-ahead brings the file in as it does for everybody, in large folios; reads that switch
        // it off would leave a page cache of single pages, which is twice as slow to copy from.
        let mut bytes = vec![0; STRETCH as usize];
        while std::io::Read::read(&mut &file, &mut bytes).unwrap() > 0 {}
        if cache == Cache::Mixed {
            (STRETCH..self.size).step_by(2 * STRETCH as usize).for_each(|at| drop(at, STRETCH));
        }
    }

    fn engine(&self, route: Option<StorageRoute>) -> Option<Report> {
        let file = Arc::new(File::open(&self.path).unwrap());
        let all = Segment { file: 0, file_offset: 0, device_offset: 0, len: self.size };
        let mut request = Request::read(vec![file], vec![all], self.device.clone());
        request.route = route;
        match self.engine.run(request) {
            Ok(report) => Some(report),
            Err(error) if error.is_no_route() => None,
            Err(error) => panic!("{error:#}"),
        }
    }

    /// Plain reads by `threads`, with or without a copy into memory of the device's size.
    fn pread(&self, threads: usize, copy: bool) -> Option<Report> {
        let file: OwnedFd = fs::File::open(&self.path).unwrap().into();
        let target = copy.then(|| target(self.size));
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let buffer = HostMem::anonymous(CHUNK as usize).unwrap();
                    loop {
                        let at = next.fetch_add(CHUNK, Ordering::Relaxed);
                        if at >= self.size {
                            break;
                        }
                        let mut done = 0;
                        while done < CHUNK {
                            done +=
                                sys::pread(file.as_fd(), &buffer, done, CHUNK - done, at + done)
                                    .unwrap();
                        }
                        if let Some(target) = target {
                            target.copy_from(at, &buffer, 0, CHUNK).unwrap();
                        }
                    }
                });
            }
        });
        None
    }

    /// 32 direct reads of 1 MiB in flight, on one thread.
    fn direct(&self) -> Option<Report> {
        const READ: u64 = 1 << 20;
        let plain = fs::File::open(&self.path).unwrap();
        let Ok(file) = sys::reopen_direct(&plain, false) else { return None };
        let file = Arc::new(file);
        let memory = Arc::new(HostMem::anonymous(32 * READ as usize).unwrap());
        let mut ring = Uring::new(32).unwrap();
        let mut next = 0;
        let mut free: Vec<u64> = (0..32).collect();
        while next < self.size || ring.in_flight() > 0 {
            while next < self.size
                && let Some(slot) = free.pop()
            {
                let request = uring::Request {
                    direction: Direction::Read,
                    file: Arc::clone(&file),
                    memory: Arc::clone(&memory),
                    offset: slot * READ,
                    len: READ as u32,
                    at: next,
                };
                ring.submit(request, slot).unwrap();
                next += READ;
            }
            ring.wait(Duration::from_secs(10)).unwrap();
            while let Some(done) = ring.poll() {
                assert_eq!(u64::from(done.result.unwrap()), READ);
                free.push(done.token);
            }
        }
        None
    }

    /// Compares what is on the device with the file, and clears it for the next run.
    fn compare(&self) {
        let pinned = self.gpu.pin(STRETCH).unwrap();
        let stream = self.gpu.stream().unwrap();
        let mut crc = crc32fast::Hasher::new();
        let mut bytes = vec![0; STRETCH as usize];
        for at in (0..self.size).step_by(STRETCH as usize) {
            stream.copy_to_host(&pinned, 0, &self.device, at, STRETCH).unwrap();
            stream.synchronize(Instant::now() + Duration::from_secs(60)).unwrap();
            pinned.mem().read(0, &mut bytes).unwrap();
            crc.update(&bytes);
        }
        let expected = *self.crc.get_or_init(|| checksum(&self.path));
        assert_eq!(crc.finalize(), expected, "the bytes on the device differ from the file");
        stream.fill(&self.device, 0, self.size, 0).unwrap();
        stream.synchronize(Instant::now() + Duration::from_secs(300)).unwrap();
    }
}

/// Memory that stands for the device in the bare loop; touched once, kept for the process.
fn target(size: u64) -> &'static HostMem {
    static TARGET: OnceLock<HostMem> = OnceLock::new();
    TARGET.get_or_init(|| {
        let memory = HostMem::anonymous(size as usize).unwrap();
        memory.fill(0, size, 1).unwrap();
        memory
    })
}

fn describe(report: &Report, size: u64) -> String {
    let part = |part: &beeline::storage::RouteReport| {
        format!("{} {:.0}% ({})", part.route, 100.0 * part.bytes as f64 / size as f64, part.why)
    };
    report.routes.iter().map(part).collect::<Vec<_>>().join(", ")
}

fn value(args: &[String], name: &str) -> Option<String> {
    let at = args.iter().position(|arg| arg == name)?;
    args.get(at + 1).cloned()
}

/// A folder on a drive: where this was built, or the system's where that does not exist (a bundle).
fn build_folder() -> PathBuf {
    let built = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    if built.is_dir() { built } else { std::env::temp_dir() }
}

fn checksum(path: &Path) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    let mut file = fs::File::open(path).unwrap();
    let mut bytes = vec![0; STRETCH as usize];
    loop {
        match std::io::Read::read(&mut file, &mut bytes).unwrap() {
            0 => return crc.finalize(),
            n => crc.update(&bytes[..n]),
        }
    }
}

/// Writes a file of random bytes and answers its checksum.
fn make(path: &Path, size: u64) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut file = fs::File::create(path).unwrap();
    let mut bytes = vec![0_u8; STRETCH as usize];
    for _ in 0..size / STRETCH {
        for word in bytes.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        crc.update(&bytes);
        file.write_all(&bytes).unwrap();
    }
    file.sync_all().unwrap();
    crc.finalize()
}
