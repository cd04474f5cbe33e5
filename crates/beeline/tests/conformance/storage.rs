//! Files and device memory: every route, any offset and size, nothing left behind.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use beeline::core::reason::Code;
use beeline::storage::{Engine, Mode, Request, StorageRoute, WholeFile};

use crate::support::{
    assert_nothing_left, config, contents, devices, engine, folders, make_cold, open, pattern,
    segment, sim, upload, whole, write,
};

/// Sizes around every limit: blocks, pages, slots, mapped pieces.
const SIZES: [usize; 12] = [
    1,
    511,
    512,
    4095,
    4096,
    4097,
    (4 << 20) - 1,
    4 << 20,
    (4 << 20) + 1,
    (12 << 20) + 4093,
    (64 << 20) + 13,
    (65 << 20) - 1,
];

#[test]
fn every_route_reads_every_size_exactly() {
    for gpu in devices() {
        let engine = engine(&gpu);
        for folder in folders() {
            for size in SIZES {
                let bytes = pattern(size as u64, size);
                let path = write(folder.path(), "file", &bytes);
                let file = open(&path);
                for route in StorageRoute::ALL {
                    let buffer = gpu.alloc(size as u64).unwrap();
                    let mut request = whole(&file, &buffer);
                    request.route = Some(route);
                    make_cold(&path);
                    match engine.run(request) {
                        Ok(report) => {
                            assert_eq!(report.bytes, size as u64, "{route}");
                            assert!(report.routes.iter().all(|part| part.route == route));
                            assert!(contents(&gpu, &buffer) == bytes, "{route} {size} bytes");
                        }
                        Err(error) => {
                            assert!(error.is_no_route(), "{error:?}");
                            let peer = matches!(route, StorageRoute::P2pDma | StorageRoute::Nvme);
                            assert!(peer || file.facts().memory_backed, "{error:#}");
                        }
                    }
                }
            }
        }
        drop(engine);
        assert_nothing_left(&gpu);
    }
}

#[test]
fn chunks_follow_the_page_cache() {
    let gpu = sim(1 << 30);
    let engine = engine(&gpu);
    let folder = &folders()[0];
    let bytes = pattern(7, 32 << 20);
    let path = write(folder.path(), "file", &bytes);
    make_cold(&path);
    // Every second slot is brought back into the page cache.
    let plain = std::fs::File::open(&path).unwrap();
    rustix::fs::fadvise(&plain, 0, None, rustix::fs::Advice::Random).unwrap();
    for slot in (0..8).step_by(2) {
        let mut warm = vec![0; 4 << 20];
        plain.read_exact_at(&mut warm, slot * (4 << 20)).unwrap();
    }
    let file = open(&path);
    let buffer = gpu.alloc(file.size()).unwrap();
    let report = engine.run(whole(&file, &buffer)).unwrap();
    assert!(contents(&gpu, &buffer) == bytes);
    let by = |why: Code| -> u64 {
        report.routes.iter().filter(|part| part.why == why).map(|part| part.bytes).sum()
    };
    if file.facts().memory_backed
        || matches!(file.facts().direct, beeline::core::plan::DirectIo::No(..))
    {
        return println!("SKIP direct-io");
    }
    assert_eq!((by(Code::Resident), by(Code::NotResident)), (16 << 20, 16 << 20), "{report:?}");
}

#[test]
fn scattered_pieces_land_where_they_belong_and_nowhere_else() {
    for gpu in devices() {
        let engine = engine(&gpu);
        for folder in folders() {
            let bytes = pattern(9, 9 << 20);
            let file = open(&write(folder.path(), "file", &bytes));
            let size = bytes.len() as u64;
            let segments = vec![
                segment(3, 1000, 5),
                segment(8, 256, 300),
                segment((4 << 20) - 7, 4096, 20),
                segment(5_000_001, 10_000, 3_000_000),
                segment(size - 1, 0, 1),
                segment(100, 4_000_000, 0),
            ];
            let buffer = upload(&gpu, &vec![0xee; 5 << 20]);
            let mut expected = vec![0xee; 5 << 20];
            for part in &segments {
                let (from, to, len) =
                    (part.file_offset as usize, part.device_offset as usize, part.len as usize);
                expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            }
            let request = Request::read(vec![file], segments, buffer.clone());
            assert_eq!(engine.run(request).unwrap().bytes, 3_000_326);
            assert!(contents(&gpu, &buffer) == expected);
        }
    }
}

#[test]
fn a_file_may_stand_in_a_request_twice() {
    for gpu in devices() {
        let engine = engine(&gpu);
        let bytes = pattern(10, 1 << 20);
        let file = open(&write(folders()[0].path(), "file", &bytes));
        let buffer = gpu.alloc(1 << 20).unwrap();
        let mut all = segment(0, 0, 1 << 20);
        all.file = 1; // Only the second of the two is read from.
        let request = Request::read(vec![Arc::clone(&file), file], vec![all], buffer.clone());
        engine.run(request).unwrap();
        assert!(contents(&gpu, &buffer) == bytes);
    }
}

#[test]
fn writes_leave_their_neighbours_alone() {
    for gpu in devices() {
        let engine = engine(&gpu);
        for folder in folders() {
            let old = pattern(11, 9 << 20);
            let mut salt = 0;
            let path = write(folder.path(), "file", &old);
            let mut expected = old.clone();
            let cases = [
                (0, 1),
                (1, 4095),
                (4095, 2),
                (8191, 8194),
                (100_003, 5 << 20),
                ((4 << 20) - 1, 2),
                (3 << 20, 4 << 20),
                ((9 << 20) - 4097, 4097),
            ];
            for (start, len) in cases {
                for route in [
                    None,
                    Some(StorageRoute::PageCache),
                    Some(StorageRoute::Direct),
                    Some(StorageRoute::ThreadPool),
                ] {
                    // Other bytes for each route, so that none can pass by another's work.
                    salt += 1;
                    let new = pattern(100 + salt, len as usize);
                    let device = upload(&gpu, &new);
                    let fd =
                        std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
                    let file = Arc::new(beeline::storage::File::for_writing(fd, &path).unwrap());
                    let segments = vec![segment(start, 0, len)];
                    let mut request = Request::write(vec![file], segments, device);
                    request.route = route;
                    match engine.run(request) {
                        Ok(report) => {
                            assert_eq!(report.bytes, len);
                            let (from, end) = (start as usize, (start + len) as usize);
                            expected[from..end].copy_from_slice(&new);
                        }
                        Err(error) => assert!(error.is_no_route(), "{error:?}"),
                    }
                    let seen = std::fs::read(&path).unwrap();
                    assert!(seen == expected, "{start}+{len} by {route:?}");
                }
            }
        }
    }
}

#[test]
fn a_whole_file_is_replaced_at_once() {
    for gpu in devices() {
        let engine = engine(&gpu);
        for folder in folders() {
            for size in [0_usize, 1, 4096, 10_000_001] {
                let bytes = pattern(size as u64 + 13, size.max(1));
                let path = write(folder.path(), "file", b"old contents");
                let out = WholeFile::create(&path, size as u64, 0o644).unwrap();
                let device = upload(&gpu, &bytes);
                let segments = vec![segment(0, 0, size as u64)];
                let mut request =
                    Request::write(vec![Arc::clone(out.file())], segments, device.clone());
                request.sync = true;
                engine.run(request).unwrap();
                assert_eq!(std::fs::read(&path).unwrap(), b"old contents");
                out.commit(true).unwrap();
                assert!(std::fs::read(&path).unwrap() == bytes[..size]);
            }
            assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no temporary file is left");
        }
    }
}

#[test]
fn sparse_files_over_4_gib_keep_their_holes_zero() {
    let gpu = sim(8 << 30);
    let engine = engine(&gpu);
    for folder in folders() {
        let path = folder.path().join("sparse");
        let plain = std::fs::File::create(&path).unwrap();
        let size = (4_u64 << 30) + (3 << 20) + 1;
        plain.set_len(size).unwrap();
        // Around the largest read of one system call, and around 32 bits.
        let marks = [0, 0x7fff_effe, (4 << 30) - 2, size - 4];
        for &at in &marks {
            plain.write_all_at(b"mark", at).unwrap();
        }
        let file = open(&path);
        let buffer = gpu.alloc(64 << 20).unwrap();
        // A window around each mark, all in one request.
        let window = 1 << 20;
        let segments: Vec<_> = marks
            .iter()
            .enumerate()
            .map(|(index, &at)| {
                let start = at.saturating_sub(window / 2).min(size - window);
                segment(start, index as u64 * window, window)
            })
            .collect();
        engine.run(Request::read(vec![file], segments.clone(), buffer.clone())).unwrap();
        let seen = contents(&gpu, &buffer);
        for (part, &at) in segments.iter().zip(&marks) {
            let base = part.device_offset as usize;
            let bytes = &seen[base..base + window as usize];
            let mark = (at - part.file_offset) as usize;
            assert_eq!(&bytes[mark..mark + 4], b"mark");
            assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 4);
        }
    }
}

#[test]
fn a_file_of_more_than_4_gib_arrives_whole() {
    let gpu = sim(6 << 30);
    let engine = engine(&gpu);
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return println!("SKIP tmpfs") };
    let path = folder.path().join("big");
    let size = (4_u64 << 30) + 4097;
    let plain = std::fs::File::create(&path).unwrap();
    plain.set_len(size).unwrap();
    // A stamp in each 16 MiB keeps the test fast and still shows a swapped or missing piece.
    for at in (0..size - 8).step_by(16 << 20) {
        plain.write_all_at(&(at + 1).to_le_bytes(), at).unwrap();
    }
    plain.write_all_at(b"end!", size - 4).unwrap();
    let file = open(&path);
    let buffer = gpu.alloc(size).unwrap();
    assert_eq!(engine.run(whole(&file, &buffer)).unwrap().bytes, size);
    for at in (0..size - 8).step_by(16 << 20) {
        let part = buffer.slice(beeline::core::addr::ByteRange { start: at, len: 8 }).unwrap();
        assert_eq!(contents(&gpu, &part), (at + 1).to_le_bytes());
    }
    let last = beeline::core::addr::ByteRange { start: size - 4, len: 4 };
    assert_eq!(contents(&gpu, &buffer.slice(last).unwrap()), b"end!");
}

#[test]
fn what_does_not_fit_is_refused_before_a_byte_moves() {
    let gpu = sim(1 << 20);
    let engine = engine(&gpu);
    let folder = &folders()[0];
    let file = open(&write(folder.path(), "file", &pattern(1, 1000)));
    let buffer = gpu.alloc(500).unwrap();
    let ask = |part| Request::read(vec![Arc::clone(&file)], vec![part], buffer.clone());
    for (part, text) in [
        (segment(0, 0, 501), "500 bytes"),
        (segment(999, 0, 2), "1000 bytes"),
        (segment(0, u64::MAX, 2), "device buffer"),
        (segment(u64::MAX, 0, 2), "1000 bytes"),
    ] {
        let error = engine.submit(ask(part)).unwrap_err();
        assert!(error.is_refused() && error.to_string().contains(text), "{error:?}");
    }
    let mut other = ask(segment(0, 0, 1));
    other.segments[0].file = 1;
    assert!(engine.submit(other).unwrap_err().is_refused());
    let mut require = ask(segment(0, 0, 1));
    require.mode = Mode::Require;
    let error = engine.submit(require).unwrap_err();
    assert!(error.is_no_route() && error.reasons().len() == StorageRoute::ALL.len());
    assert_eq!(engine.run(ask(segment(0, 0, 0))).unwrap().bytes, 0);
}

#[test]
fn sixty_four_loads_at_once_stay_inside_the_pool() {
    let gpu = sim(2 << 30);
    let mut small = config();
    small.pool_bytes = 16 << 20;
    let engine = Engine::new(&gpu, small);
    let folder = &folders()[0];
    let bytes = pattern(5, 17 << 20);
    let path = write(folder.path(), "file", &bytes);
    std::thread::scope(|scope| {
        for load in 0..64 {
            let (gpu, engine, path, bytes) = (&gpu, &engine, &path, &bytes);
            scope.spawn(move || {
                let file = open(path);
                let buffer = gpu.alloc(file.size()).unwrap();
                let mut request = whole(&file, &buffer);
                request.route = match load % 4 {
                    0 => Some(StorageRoute::Direct),
                    1 => Some(StorageRoute::MappedPageCache),
                    2 => Some(StorageRoute::ThreadPool),
                    _ => None,
                };
                match engine.run(request) {
                    Ok(_) => assert!(contents(gpu, &buffer) == *bytes, "load {load}"),
                    Err(error) => assert!(error.is_no_route(), "{error:?}"),
                }
            });
        }
    });
    let usage = engine.pool_usage();
    assert_eq!((usage.busy, usage.quarantined, usage.limit), (0, 0, 4));
    assert!(usage.peak <= usage.limit, "{usage:?}");
    engine.trim();
    assert_eq!(engine.pool_usage().idle, 0);
    drop(engine);
    assert_nothing_left(&gpu);
}
