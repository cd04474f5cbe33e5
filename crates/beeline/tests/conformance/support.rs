//! What every test here needs: devices, files with known bytes, and looks at what is left behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::config::{Config, SimConfig};
use beeline::core::segment::Segment;
use beeline::gpu::{Buffer, DeviceId, Gpu, Profile};
use beeline::storage::{Engine, File, Request};

/// Long enough for a slow machine, short enough to end a hung test.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Every device the suite runs on.
pub(crate) fn devices() -> Vec<Gpu> {
    let mut devices: Vec<Gpu> = Profile::ALL
        .into_iter()
        .map(|profile| {
            let mut config = SimConfig::default();
            config.profile = profile;
            config.memory_bytes = 8 << 30;
            Gpu::simulated(&config).unwrap()
        })
        .collect();
    match Gpu::open(&DeviceId::Cuda(0)) {
        Ok(gpu) => devices.push(gpu),
        Err(_) => println!("SKIP cuda"),
    }
    devices
}

/// One simulated device with `memory_bytes` of memory.
pub(crate) fn sim(memory_bytes: u64) -> Gpu {
    let mut config = SimConfig::default();
    config.memory_bytes = memory_bytes;
    Gpu::simulated(&config).unwrap()
}

pub(crate) fn engine(gpu: &Gpu) -> Engine {
    Engine::new(gpu, config())
}

pub(crate) fn config() -> Config {
    let mut config = Config::default();
    config.pool_bytes = 32 << 20;
    config.threads = 2;
    config
}

/// Bytes that differ at every position, so that a shift or a hole shows.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Folders on different file systems, so that every route is taken somewhere: the build folder
/// (a drive) and shared memory.
pub(crate) fn folders() -> Vec<tempfile::TempDir> {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // A bundle runs on another machine, where the build folder does not exist.
    let drive = if built.is_dir() { built } else { Path::new("/tmp") };
    let mut folders = vec![tempfile::tempdir_in(drive).unwrap()];
    match tempfile::tempdir_in("/dev/shm") {
        Ok(folder) => folders.push(folder),
        Err(_) => println!("SKIP tmpfs"),
    }
    folders
}

pub(crate) fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

pub(crate) fn open(path: &Path) -> Arc<File> {
    Arc::new(File::open(path).unwrap())
}

/// Drops the file's pages from the page cache, as far as the kernel lets an ordinary user.
pub(crate) fn make_cold(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

pub(crate) const fn segment(file_offset: u64, device_offset: u64, len: u64) -> Segment {
    Segment { file: 0, file_offset, device_offset, len }
}

/// Reads all of `buffer` back through pinned memory.
pub(crate) fn contents(gpu: &Gpu, buffer: &Buffer) -> Vec<u8> {
    let mut out = vec![0; usize::try_from(buffer.len()).unwrap()];
    if out.is_empty() {
        return out;
    }
    let pinned = gpu.pin(buffer.len()).unwrap();
    let stream = gpu.stream().unwrap();
    stream.copy_to_host(&pinned, 0, buffer, 0, buffer.len()).unwrap();
    stream.synchronize(soon()).unwrap();
    pinned.mem().read(0, &mut out).unwrap();
    out
}

/// Puts `bytes` into new device memory.
pub(crate) fn upload(gpu: &Gpu, bytes: &[u8]) -> Buffer {
    let buffer = gpu.alloc(bytes.len() as u64).unwrap();
    let pinned = gpu.pin(buffer.len()).unwrap();
    pinned.mem().write(0, bytes).unwrap();
    let stream = gpu.stream().unwrap();
    stream.copy_to_device(&buffer, 0, &pinned, 0, buffer.len()).unwrap();
    stream.synchronize(soon()).unwrap();
    buffer
}

/// A read of the whole file into the start of `buffer`.
pub(crate) fn whole(file: &Arc<File>, buffer: &Buffer) -> Request {
    let segments = vec![segment(0, 0, file.size())];
    Request::read(vec![Arc::clone(file)], segments, buffer.clone())
}

/// Everything was given back: nothing pinned, registered or allocated.
pub(crate) fn assert_nothing_left(gpu: &Gpu) {
    let until = soon();
    // A stream lets go of memory on its own thread, a moment after its last event.
    while gpu.usage() != beeline::gpu::Usage::default() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(gpu.usage(), beeline::gpu::Usage::default(), "{gpu:?}");
}
