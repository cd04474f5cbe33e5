//! Bad days: drives that fail, hang or lie, devices that are lost, callers that change their mind.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::core::plan::DirectIo;
use beeline::gpu::sim::{Effect, Site};
use beeline::storage::{CancelToken, Engine, File, IoEffect, Request, StorageRoute};

use crate::support::{
    assert_nothing_left, config, contents, engine, folders, make_cold, open, pattern, segment, sim,
    soon, upload, whole, write,
};

const SIZE: usize = (24 << 20) + 123;
const EINTR: i32 = 4;
const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;

const ROUTES: [StorageRoute; 3] =
    [StorageRoute::PageCache, StorageRoute::Direct, StorageRoute::ThreadPool];

/// Whether the folder's file system carries the route at all.
fn carries(file: &File, route: StorageRoute) -> bool {
    route == StorageRoute::PageCache || !file.facts().memory_backed
}

#[test]
fn short_reads_and_interruptions_change_nothing() {
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    for folder in folders() {
        let bytes = pattern(1, SIZE);
        let path = write(folder.path(), "file", &bytes);
        for route in ROUTES {
            for effect in [IoEffect::Short(4096), IoEffect::Short(1), IoEffect::Errno(EINTR)] {
                let file = open(&path);
                if !carries(&file, route) {
                    continue;
                }
                file.faults().arm(1, 3, effect);
                let buffer = gpu.alloc(file.size()).unwrap();
                let mut request = whole(&file, &buffer);
                request.route = Some(route);
                engine.run(request).unwrap();
                assert!(contents(&gpu, &buffer) == bytes, "{route} {effect:?}");
            }
        }
    }
}

#[test]
fn an_error_in_the_middle_names_file_bytes_and_cause_and_leaves_nothing() {
    let gpu = sim(1 << 30);
    for folder in folders() {
        let path = write(folder.path(), "file", &pattern(2, SIZE));
        for route in ROUTES {
            let engine = engine(&gpu);
            let file = open(&path);
            if !carries(&file, route) {
                continue;
            }
            file.faults().arm(2, 1, IoEffect::Errno(EIO));
            let buffer = gpu.alloc(file.size()).unwrap();
            let mut request = whole(&file, &buffer);
            request.route = Some(route);
            let error = engine.run(request).unwrap_err();
            assert_eq!(error.errno(), Some(EIO), "{error:?}");
            assert!(error.to_string().contains("file") && error.to_string().contains("bytes"));
            drop((buffer, engine));
            assert_nothing_left(&gpu);
        }
    }
}

#[test]
fn a_drive_that_refuses_direct_io_late_is_read_through_the_page_cache() {
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    let folder = &folders()[0];
    let bytes = pattern(3, SIZE);
    let path = write(folder.path(), "file", &bytes);
    make_cold(&path);
    let file = open(&path);
    file.faults().arm(0, 1, IoEffect::Errno(EINVAL));
    let buffer = gpu.alloc(file.size()).unwrap();
    let report = engine.run(whole(&file, &buffer));
    let first = match report {
        Ok(report) => report,
        // Where there is no direct I/O, EINVAL is an error like any other.
        Err(error) => {
            let direct = matches!(file.facts().direct, DirectIo::Aligned { .. });
            assert!(!direct && error.errno() == Some(EINVAL), "{error:?}");
            return println!("SKIP direct-io");
        }
    };
    assert!(contents(&gpu, &buffer) == bytes);
    let fell_back = first.routes.iter().any(|part| part.why.as_str() == "direct-unsupported");
    assert!(fell_back, "{first:?}");
    // Where the caller insists on the route, the refusal is an error.
    file.faults().arm(0, 1, IoEffect::Errno(EINVAL));
    let mut request = whole(&file, &buffer);
    request.route = Some(StorageRoute::Direct);
    assert_eq!(engine.run(request).unwrap_err().errno(), Some(EINVAL));
}

#[test]
fn a_read_that_never_returns_ends_the_wait_and_quarantines_its_buffer() {
    let gpu = sim(1 << 30);
    let folder = &folders()[0];
    let bytes = pattern(4, SIZE);
    let path = write(folder.path(), "file", &bytes);
    for route in ROUTES {
        let engine = engine(&gpu);
        let file = open(&path);
        if !carries(&file, route) {
            continue;
        }
        file.faults().arm(1, 1, IoEffect::Hang);
        let buffer = gpu.alloc(file.size()).unwrap();
        let mut request = whole(&file, &buffer);
        request.route = Some(route);
        request.deadline = Some(Instant::now() + Duration::from_millis(300));
        let error = engine.run(request).unwrap_err();
        assert!(error.is_timeout(), "{error:?}");
        assert!(error.to_string().contains("chunks are still in flight"), "{error}");
        // On a slow machine another one was in flight too at the deadline.
        let quarantined = engine.pool_usage().quarantined;
        assert!((1..=8).contains(&quarantined), "{route}: {quarantined}");
        // The engine still serves others meanwhile.
        let other = open(&path);
        let second = gpu.alloc(other.size()).unwrap();
        engine.run(whole(&other, &second)).unwrap();
        assert!(contents(&gpu, &second) == bytes);
        assert!(engine.pool_usage().quarantined >= 1, "the buffer is still in the kernel's hands");
        file.faults().release();
        wait_until(|| engine.pool_usage().quarantined == 0);
        assert_eq!(engine.pool_usage().busy, 0);
        drop((buffer, second, engine));
        assert_nothing_left(&gpu);
    }
}

#[test]
fn all_workers_stuck_do_not_stop_the_next_load() {
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    let folder = &folders()[0];
    let bytes = pattern(5, SIZE);
    let path = write(folder.path(), "file", &bytes);
    let stuck = open(&path);
    stuck.faults().arm(0, 2, IoEffect::Hang); // One for each thread.
    let buffer = gpu.alloc(stuck.size()).unwrap();
    let mut request = whole(&stuck, &buffer);
    request.route = Some(StorageRoute::PageCache);
    let pending = engine.submit(request).unwrap();
    wait_until(|| stuck.faults().hanging() == 2);
    let file = open(&path);
    let second = gpu.alloc(file.size()).unwrap();
    let mut request = whole(&file, &second);
    request.route = Some(StorageRoute::PageCache);
    engine.run(request).unwrap();
    assert!(contents(&gpu, &second) == bytes);
    stuck.faults().release();
    pending.wait().unwrap();
    assert!(contents(&gpu, &buffer) == bytes);
}

#[test]
fn a_file_that_hangs_does_not_hold_up_the_chunks_of_another() {
    let gpu = sim(1 << 30);
    let mut single = config();
    single.threads = 1;
    let engine = Engine::new(&gpu, single);
    let folder = &folders()[0];
    let bytes = pattern(12, 4 << 20);
    let path = write(folder.path(), "file", &bytes);
    // The only worker has a chunk of the sound file at the device when it meets the hanging one.
    gpu.as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Stall);
    let (sound, hanging) = (open(&path), open(&path));
    hanging.faults().arm(0, 1, IoEffect::Hang);
    let ask = |file: &Arc<File>, buffer| {
        let mut request = whole(file, buffer);
        request.route = Some(StorageRoute::PageCache);
        request.deadline = Some(soon());
        request
    };
    let (first, second) = (gpu.alloc(4 << 20).unwrap(), gpu.alloc(4 << 20).unwrap());
    let one = engine.submit(ask(&sound, &first)).unwrap();
    wait_until(|| gpu.as_sim().unwrap().faults().stalled() == 1);
    let two = engine.submit(ask(&hanging, &second)).unwrap();
    wait_until(|| hanging.faults().hanging() == 1);
    gpu.as_sim().unwrap().faults().release();
    one.wait().unwrap();
    assert!(contents(&gpu, &first) == bytes);
    assert!(!two.is_finished());
    hanging.faults().release();
    two.wait().unwrap();
    assert!(contents(&gpu, &second) == bytes);
    drop((first, second, engine));
    assert_nothing_left(&gpu);
}

#[test]
fn cancellation_ends_a_load_and_gives_everything_back() {
    let gpu = sim(1 << 30);
    let folder = &folders()[0];
    let path = write(folder.path(), "file", &pattern(6, SIZE));
    for by_token in [true, false] {
        let engine = engine(&gpu);
        let file = open(&path);
        // The device stalls, so the load cannot have finished before it is cancelled.
        gpu.as_sim().unwrap().faults().arm(Site::Copy, 1, Effect::Stall);
        let token = CancelToken::new();
        let buffer = gpu.alloc(file.size()).unwrap();
        let mut request = whole(&file, &buffer);
        request.cancel = Some(token.clone());
        let transfer = engine.submit(request).unwrap();
        wait_until(|| gpu.as_sim().unwrap().faults().stalled() == 1);
        if by_token {
            token.cancel();
        } else {
            transfer.cancel();
        }
        gpu.as_sim().unwrap().faults().release();
        assert!(transfer.wait().unwrap_err().is_cancelled());
        if by_token {
            let again = engine.submit({
                let mut request = whole(&file, &buffer);
                request.cancel = Some(token);
                request
            });
            assert!(again.unwrap_err().is_cancelled());
        }
        drop((buffer, engine));
        assert_nothing_left(&gpu);
    }
}

#[test]
fn dropping_a_transfer_or_its_engine_is_safe_while_chunks_are_in_flight() {
    let gpu = sim(1 << 30);
    let folder = &folders()[0];
    let path = write(folder.path(), "file", &pattern(7, SIZE));
    for drop_engine_first in [true, false] {
        let mut tiny = config();
        tiny.pool_bytes = 8 << 20; // Two slots: most chunks have not been claimed yet.
        let engine = Engine::new(&gpu, tiny);
        let file = open(&path);
        gpu.as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Stall);
        gpu.as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Stall);
        let buffer = gpu.alloc(file.size()).unwrap();
        let transfer = engine.submit(whole(&file, &buffer)).unwrap();
        wait_until(|| engine.pool_usage().busy == 2);
        drop(buffer);
        let release = std::thread::spawn({
            let gpu = gpu.clone();
            move || {
                std::thread::sleep(Duration::from_millis(50));
                gpu.as_sim().unwrap().faults().release();
            }
        });
        if drop_engine_first {
            drop(engine);
            assert!(transfer.wait().unwrap_err().is_cancelled());
        } else {
            drop(transfer);
            drop(engine);
        }
        release.join().unwrap();
        assert_nothing_left(&gpu);
    }
}

#[test]
fn a_device_that_fails_is_an_error_of_the_device() {
    let folder = &folders()[0];
    let path = write(folder.path(), "file", &pattern(8, SIZE));
    for (site, effect) in
        [(Site::Copy, Effect::Fail), (Site::Copy, Effect::Lose), (Site::Pin, Effect::Fail)]
    {
        let gpu = sim(1 << 30);
        let engine = engine(&gpu);
        gpu.as_sim().unwrap().faults().arm(site, 0, effect);
        let file = open(&path);
        let buffer = gpu.alloc(file.size()).unwrap();
        let error = engine.run(whole(&file, &buffer)).unwrap_err();
        assert!(error.is_device(), "{error:?}");
        drop((buffer, engine));
        assert_nothing_left(&gpu);
    }
    let gpu = sim(1 << 30);
    gpu.as_sim().unwrap().faults().arm(Site::Register, 0, Effect::Fail);
    let (engine, file) = (engine(&gpu), open(&path));
    let buffer = gpu.alloc(file.size()).unwrap();
    let mut request = whole(&file, &buffer);
    request.route = Some(StorageRoute::MappedPageCache);
    assert!(engine.run(request).unwrap_err().is_device());
}

#[test]
fn a_file_that_shrinks_during_the_load_is_an_error_on_every_route() {
    let gpu = sim(1 << 30);
    let folder = &folders()[0];
    for route in [StorageRoute::MappedPageCache, ROUTES[0], ROUTES[1], ROUTES[2]] {
        let path = write(folder.path(), "file", &pattern(9, SIZE));
        let engine = engine(&gpu);
        let file = open(&path);
        if route != StorageRoute::MappedPageCache && !carries(&file, route) {
            continue;
        }
        let buffer = gpu.alloc(file.size()).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5 << 20).unwrap();
        let mut request = whole(&file, &buffer);
        request.route = Some(route);
        let error = engine.run(request).unwrap_err();
        assert!(error.is_corrupt(), "{route} {error:?}");
        assert!(file.check_unchanged().unwrap_err().is_corrupt());
        drop((buffer, engine));
        assert_nothing_left(&gpu);
    }
}

#[test]
fn writes_that_fail_say_so_and_short_writes_go_on() {
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    for folder in folders() {
        let bytes = pattern(10, SIZE);
        let device = upload(&gpu, &bytes);
        let path = write(folder.path(), "file", &vec![0; SIZE]);
        let ask = |path: &Path, faults: Option<IoEffect>| {
            let fd = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
            let file = Arc::new(File::for_writing(fd, path).unwrap());
            if let Some(effect) = faults {
                file.faults().arm(1, 2, effect);
            }
            Request::write(vec![file], vec![segment(0, 0, SIZE as u64)], device.clone())
        };
        let error = engine.run(ask(&path, Some(IoEffect::Errno(ENOSPC)))).unwrap_err();
        assert_eq!(error.errno(), Some(ENOSPC), "{error:?}");
        assert!(error.hint().is_some_and(|text| text.contains("free space")));
        engine.run(ask(&path, Some(IoEffect::Short(4096)))).unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
        std::fs::write(&path, vec![0; SIZE]).unwrap();
        engine.run(ask(&path, Some(IoEffect::Errno(EINTR)))).unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
    }
}

#[test]
fn a_full_file_system_keeps_the_old_file() {
    let Some(full) = small_tmpfs() else { return println!("SKIP mount") };
    let gpu = sim(1 << 30);
    let path = write(full.path(), "file", b"old contents");
    let error = beeline::storage::WholeFile::create(&path, 8 << 20, 0o644).unwrap_err();
    assert_eq!(error.errno(), Some(ENOSPC), "{error:?}");
    assert_eq!(std::fs::read(&path).unwrap(), b"old contents");
    assert_eq!(std::fs::read_dir(full.path()).unwrap().count(), 1);
    drop(gpu);
}

/// A tmpfs of 1 MiB, where this process may mount one.
fn small_tmpfs() -> Option<Mount> {
    let folder = tempfile::tempdir().ok()?;
    let done = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "beeline-test"])
        .arg(folder.path())
        .output()
        .ok()?;
    done.status.success().then_some(Mount { folder })
}

struct Mount {
    folder: tempfile::TempDir,
}

impl Mount {
    fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.folder.path()).status();
    }
}

#[test]
fn a_token_cancelled_from_another_thread_ends_a_wait_for_the_pool() {
    let gpu = sim(1 << 30);
    let mut tiny = config();
    tiny.pool_bytes = 8 << 20;
    let engine = Engine::new(&gpu, tiny);
    let folder = &folders()[0];
    let path = write(folder.path(), "file", &pattern(11, SIZE));
    gpu.as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Stall);
    gpu.as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Stall);
    let file = open(&path);
    let buffer = gpu.alloc(file.size()).unwrap();
    let first = engine.submit(whole(&file, &buffer)).unwrap();
    wait_until(|| engine.pool_usage().busy == 2);
    let token = CancelToken::new();
    let mut request = whole(&file, &buffer);
    request.cancel = Some(token.clone());
    let second = engine.submit(request).unwrap();
    token.cancel();
    assert!(second.wait().unwrap_err().is_cancelled(), "it held no slot, so it ends at once");
    gpu.as_sim().unwrap().faults().release();
    first.wait().unwrap();
}

fn wait_until(condition: impl Fn() -> bool) {
    let until = soon();
    while !condition() {
        assert!(Instant::now() < until, "the condition never came true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn permission_denied_names_the_file() {
    if rustix::process::getuid().is_root() {
        return println!("SKIP non-root");
    }
    let folder = &folders()[0];
    let path = write(folder.path(), "file", b"secret");
    let mut mode = std::fs::metadata(&path).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0);
    std::fs::set_permissions(&path, mode).unwrap();
    let error = File::open(&path).unwrap_err();
    assert!(error.is_permission_denied() && error.to_string().contains("file"), "{error:?}");
}

#[test]
fn an_engine_serves_the_next_load_after_every_kind_of_failure() {
    let folder = &folders()[0];
    let bytes = pattern(12, SIZE);
    let path = write(folder.path(), "file", &bytes);
    let short = write(folder.path(), "short", &bytes);
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    let healthy = || {
        let file = open(&path);
        let buffer = gpu.alloc(file.size()).unwrap();
        engine.run(whole(&file, &buffer)).unwrap();
        assert!(contents(&gpu, &buffer) == bytes);
    };
    // A copy that fails.
    gpu.as_sim().unwrap().faults().arm(Site::Copy, 1, Effect::Fail);
    let file = open(&path);
    let buffer = gpu.alloc(file.size()).unwrap();
    assert!(engine.run(whole(&file, &buffer)).unwrap_err().is_device());
    healthy();
    // The same on the way out.
    let out = write(folder.path(), "out", &vec![0; SIZE]);
    let fd = std::fs::OpenOptions::new().read(true).write(true).open(&out).unwrap();
    let target = Arc::new(File::for_writing(fd, &out).unwrap());
    let device = upload(&gpu, &bytes);
    gpu.as_sim().unwrap().faults().arm(Site::Copy, 1, Effect::Fail);
    let all = vec![segment(0, 0, SIZE as u64)];
    let request = Request::write(vec![target], all, device);
    assert!(engine.run(request).unwrap_err().is_device());
    healthy();
    // A mapped file that shrinks under the device.
    let file = open(&short);
    std::fs::OpenOptions::new().write(true).open(&short).unwrap().set_len(5 << 20).unwrap();
    let mut request = whole(&file, &buffer);
    request.route = Some(StorageRoute::MappedPageCache);
    assert!(engine.run(request).unwrap_err().is_corrupt());
    healthy();
}

#[test]
fn a_worker_that_never_comes_back_does_not_keep_its_place() {
    let gpu = sim(1 << 30);
    let mut single = config();
    single.threads = 1;
    let engine = Engine::new(&gpu, single);
    let folder = &folders()[0];
    let bytes = pattern(13, SIZE);
    let path = write(folder.path(), "file", &bytes);
    let stuck = open(&path);
    stuck.faults().arm(0, 1, IoEffect::Hang);
    let buffer = gpu.alloc(stuck.size()).unwrap();
    let mut request = whole(&stuck, &buffer);
    request.route = Some(StorageRoute::PageCache);
    request.deadline = Some(Instant::now() + Duration::from_secs(3));
    assert!(engine.run(request).unwrap_err().is_timeout());
    for _ in 0..2 {
        // Long enough for idle workers to have left, were they more than wanted.
        std::thread::sleep(Duration::from_millis(2500));
        let file = open(&path);
        let second = gpu.alloc(file.size()).unwrap();
        let mut request = whole(&file, &second);
        request.deadline = Some(soon());
        engine.run(request).unwrap();
        assert!(contents(&gpu, &second) == bytes);
    }
    stuck.faults().release();
}

#[test]
fn a_slot_stays_with_every_device_until_the_last_has_let_go() {
    let (slow, broken) = (sim(1 << 30), sim(1 << 30));
    let engine = engine(&slow);
    let folder = &folders()[0];
    let path = write(folder.path(), "file", &pattern(14, 1 << 20));
    let file = open(&path);
    let (one, two) = (slow.alloc(1 << 20).unwrap(), broken.alloc(1 << 20).unwrap());
    slow.as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Stall);
    broken.as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Fail);
    let mut request = whole(&file, &one);
    request.devices.push(two);
    let transfer = engine.submit(request).unwrap();
    wait_until(|| slow.as_sim().unwrap().faults().stalled() == 1);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!transfer.is_finished(), "the slow device has not let go of the slot");
    assert_eq!(engine.pool_usage().busy, 1);
    slow.as_sim().unwrap().faults().release();
    assert!(transfer.wait().unwrap_err().is_device());
    assert_eq!(engine.pool_usage().busy, 0);
}

#[test]
fn a_file_that_cannot_take_bytes_at_offsets_is_refused() {
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    let folder = &folders()[0];
    let path = write(folder.path(), "file", &pattern(15, 1 << 20));
    let append = std::fs::OpenOptions::new().read(true).append(true).open(&path).unwrap();
    let error = File::for_writing(append, &path).unwrap_err();
    assert!(error.is_refused() && error.to_string().contains("appending"), "{error:?}");
    let write_only = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    assert!(File::for_writing(write_only, &path).unwrap_err().is_refused());
    let device = upload(&gpu, &pattern(16, 100));
    let reader = open(&path);
    let request = Request::write(vec![reader], vec![segment(0, 0, 100)], device);
    assert!(engine.run(request).unwrap_err().is_refused());
    assert!(std::fs::read(&path).unwrap() == pattern(15, 1 << 20));
}

#[test]
fn direct_writes_that_are_cut_short_go_on_by_the_same_route() {
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    let folder = &folders()[0];
    let bytes = pattern(17, SIZE);
    let device = upload(&gpu, &bytes);
    for route in [StorageRoute::Direct, StorageRoute::ThreadPool] {
        for effect in [IoEffect::Short(4096), IoEffect::Short(1000), IoEffect::Errno(EINTR)] {
            let path = write(folder.path(), "file", &vec![0; SIZE]);
            let fd = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
            let file = Arc::new(File::for_writing(fd, &path).unwrap());
            if !carries(&file, route) {
                return println!("SKIP direct-io");
            }
            file.faults().arm(0, 3, effect);
            let all = vec![segment(0, 0, SIZE as u64)];
            let mut request = Request::write(vec![file], all, device.clone());
            request.route = Some(route);
            let report = engine.run(request).unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes, "{route} {effect:?}");
            let direct: u64 =
                report.routes.iter().filter(|part| part.route == route).map(|p| p.bytes).sum();
            assert!(direct >= SIZE as u64 - 4096, "{report:?}");
        }
    }
}

#[test]
fn one_refusal_to_pin_is_no_reason_to_fail_while_there_are_slots() {
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    engine.warm_up(4 << 20).unwrap();
    let folder = &folders()[0];
    let bytes = pattern(18, SIZE);
    let file = open(&write(folder.path(), "file", &bytes));
    for after in 0..3 {
        gpu.as_sim().unwrap().faults().arm(Site::Pin, after, Effect::Fail);
    }
    let buffer = gpu.alloc(file.size()).unwrap();
    engine.run(whole(&file, &buffer)).unwrap();
    assert!(contents(&gpu, &buffer) == bytes);
}
