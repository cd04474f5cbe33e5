//! Loads that do not go as planned: files that change, devices that fail, callers that give up.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use beeline::core::model::Dtype;
use beeline::gpu::Gpu;
use beeline::gpu::sim::{Effect, Site};
use beeline::model::{LoadOptions, Loading, Model};
use beeline::storage::{CancelToken, Engine, IoEffect, StorageRoute};

use crate::reader::{compare, model_file, witnesses};
use crate::support::{assert_nothing_left, config, engine, folders, make_cold, sim, soon, write};

const ROUTES: [StorageRoute; 4] = [
    StorageRoute::PageCache,
    StorageRoute::MappedPageCache,
    StorageRoute::Direct,
    StorageRoute::ThreadPool,
];

/// 40 MiB in three tensors: ten chunks, more than the smallest pool holds.
fn model(folder: &Path) -> PathBuf {
    let tensors: [(&str, Dtype, &[u64]); 3] = [
        ("first", Dtype::F32, &[5 << 20]),
        ("odd", Dtype::U8, &[12_345]),
        ("last", Dtype::Bf16, &[10 << 20]),
    ];
    write(folder, "m.safetensors", &model_file(&tensors, 1))
}

fn options(route: Option<StorageRoute>) -> LoadOptions {
    let mut options = LoadOptions::default();
    options.route = route;
    options
}

/// Two slots only, so that most of the file has not been read when the first chunk is.
fn tiny(gpu: &Gpu) -> Engine {
    let mut tiny = config();
    tiny.pool_bytes = 8 << 20;
    Engine::new(gpu, tiny)
}

/// A load whose device has stalled on its first copies.
fn stalled(engine: &Engine, gpu: &Gpu, model: &Model, options: LoadOptions) -> Option<Loading> {
    let faults = gpu.as_sim().unwrap().faults();
    for _ in 0..2 {
        faults.arm(Site::Copy, 0, Effect::Stall);
    }
    let loading = match model.start(engine, std::slice::from_ref(gpu), options) {
        Ok(loading) => loading,
        Err(error) if error.is_no_route() => return None,
        Err(error) => panic!("{error:?}"),
    };
    let until = soon();
    while faults.stalled() == 0 {
        assert!(Instant::now() < until, "no copy was started");
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(loading)
}

/// Everything of engine and device is free once `engine` is gone.
fn assert_clean(gpu: &Gpu, engine: Engine) {
    let until = soon();
    while engine.pool_usage().busy != 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let usage = engine.pool_usage();
    assert_eq!((usage.busy, usage.quarantined), (0, 0), "{usage:?}");
    drop(engine);
    assert_nothing_left(gpu);
}

#[test]
fn a_file_replaced_by_rename_arrives_in_its_old_state() {
    let gpu = sim(1 << 28);
    for folder in folders() {
        for route in ROUTES {
            let path = model(folder.path());
            let expected = witnesses(&[&path]);
            let engine = tiny(&gpu);
            let model = Model::open(&[&path]).unwrap();
            let Some(loading) = stalled(&engine, &gpu, &model, options(Some(route))) else {
                gpu.as_sim().unwrap().faults().release();
                continue;
            };
            let other = write(folder.path(), "new", &model_file(&[("x", Dtype::U8, &[1])], 0));
            std::fs::rename(other, &path).unwrap();
            gpu.as_sim().unwrap().faults().release();
            let loaded = loading.wait().unwrap();
            compare(&loaded, 0, &gpu, &expected);
            assert_eq!(loaded.verify(None).unwrap().mismatches, [], "compared with the old file");
            drop(loaded);
            assert_clean(&gpu, engine);
        }
    }
}

#[test]
fn a_file_that_changes_during_the_load_is_an_error() {
    type Change = fn(&std::fs::File);
    let changes: [(&str, Change); 4] = [
        ("truncated", |file| file.set_len(5 << 20).unwrap()),
        ("emptied", |file| file.set_len(0).unwrap()),
        ("modified", |file| file.write_all_at(b"x", 30 << 20).unwrap()),
        ("longer", |mut file| file.write_all(b"more").unwrap()),
    ];
    let gpu = sim(1 << 28);
    for folder in folders() {
        for route in ROUTES {
            for (what, change) in changes {
                let path = model(folder.path());
                let engine = tiny(&gpu);
                let model = Model::open(&[&path]).unwrap();
                let Some(loading) = stalled(&engine, &gpu, &model, options(Some(route))) else {
                    gpu.as_sim().unwrap().faults().release();
                    continue;
                };
                let file =
                    std::fs::OpenOptions::new().append(what == "longer").write(true).open(&path);
                change(&file.unwrap());
                gpu.as_sim().unwrap().faults().release();
                let error = loading.wait().unwrap_err();
                assert!(error.is_corrupt(), "{what} {route}: {error:?}");
                assert_eq!(error.code(), "file-changed", "{what} {route}: {error:?}");
                assert!(error.to_string().contains("m.safetensors"), "{error}");
                assert_clean(&gpu, engine);
            }
        }
    }
}

#[test]
fn verification_finds_one_wrong_byte_and_names_its_tensor() {
    let folder = &folders()[0];
    let path = model(folder.path());
    for (after, found) in [(0, "first"), (9, "last")] {
        let gpu = sim(1 << 28);
        let engine = engine(&gpu);
        gpu.as_sim().unwrap().faults().arm(Site::Copy, after, Effect::Corrupt);
        let model = Model::open(&[&path]).unwrap();
        let mut options = options(Some(StorageRoute::PageCache));
        options.selection = beeline::core::model::Selection::all()
            .include(beeline::core::model::Pattern::exact(found));
        if after != 0 {
            options.selection = beeline::core::model::Selection::all();
        }
        let loaded = model.load(&engine, std::slice::from_ref(&gpu), options).unwrap();
        let verified = loaded.verify(None).unwrap();
        let [mismatch] = verified.mismatches.as_slice() else { panic!("{verified:?}") };
        assert_ne!(mismatch.file_crc, mismatch.device_crc);
        assert_eq!(mismatch.device, 0);
        if after == 0 {
            assert_eq!(&*mismatch.tensor, found);
        }
    }
}

#[test]
fn verification_tells_the_second_device_from_the_first() {
    let folder = &folders()[0];
    let path = model(folder.path());
    let gpus = [sim(1 << 28), sim(1 << 28)];
    let engine = engine(&gpus[0]);
    gpus[1].as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Corrupt);
    let model = Model::open(&[&path]).unwrap();
    let loaded = model.load(&engine, &gpus, LoadOptions::default()).unwrap();
    let verified = loaded.verify(None).unwrap();
    let devices: Vec<usize> = verified.mismatches.iter().map(|one| one.device).collect();
    assert_eq!(devices, [1]);
    let token = CancelToken::new();
    token.cancel();
    assert!(loaded.verify(Some(&token)).unwrap_err().is_cancelled());
}

#[test]
fn verification_does_not_blame_the_device_for_a_file_that_changed() {
    let folder = &folders()[0];
    let path = model(folder.path());
    let gpu = sim(1 << 28);
    let model = Model::open(&[&path]).unwrap();
    let loaded =
        model.load(&engine(&gpu), std::slice::from_ref(&gpu), LoadOptions::default()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"x", 30 << 20).unwrap();
    let error = loaded.verify(None).unwrap_err();
    assert_eq!(error.code(), "file-changed", "{error:?}");
}

#[test]
fn a_device_without_room_names_the_missing_bytes_and_keeps_nothing() {
    let folder = &folders()[0];
    let path = model(folder.path());
    let total = Model::open(&[&path]).unwrap().layout(&LoadOptions::default().selection).unwrap();
    let (small, large) = (sim(8 << 20), sim(1 << 28));
    for devices in [vec![small.clone()], vec![large.clone(), small.clone()]] {
        let engine = engine(&large);
        let model = Model::open(&[&path]).unwrap();
        let error = model.load(&engine, &devices, LoadOptions::default()).unwrap_err();
        assert!(error.is_out_of_memory() && error.code() == "out-of-memory", "{error:?}");
        // Device memory goes out in whole pages of 64 KiB.
        let short = (total.total_bytes.next_multiple_of(64 << 10) - (8 << 20)).to_string();
        let text = error.to_string();
        assert!(text.contains(&format!("{short} bytes short")), "{short} is not in: {text}");
        assert!(error.hint().is_some());
        assert_eq!(engine.pool_usage().peak, 0, "nothing was read");
        drop(engine);
        [&small, &large].into_iter().for_each(assert_nothing_left);
    }
}

#[test]
fn nothing_is_left_after_success_error_and_cancellation() {
    let folder = &folders()[0];
    let path = model(folder.path());
    for route in ROUTES {
        for what in [
            "success",
            "read error",
            "copy error",
            "register error",
            "pin error",
            "cancel",
            "token",
            "drop",
        ] {
            make_cold(&path);
            let gpu = sim(1 << 28);
            let faults = gpu.as_sim().unwrap().faults();
            let engine = tiny(&gpu);
            let model = Model::open(&[&path]).unwrap();
            let token = CancelToken::new();
            let mut options = options(Some(route));
            options.cancel = Some(token.clone());
            match what {
                "read error" => model.files()[0].faults().arm(1, 1, IoEffect::Errno(5)),
                "copy error" => faults.arm(Site::Copy, 1, Effect::Fail),
                "register error" => faults.arm(Site::Register, 0, Effect::Fail),
                "pin error" => faults.arm(Site::Pin, 0, Effect::Fail),
                _ => {}
            }
            let mapped = route == StorageRoute::MappedPageCache;
            let result = if matches!(what, "cancel" | "token" | "drop") {
                let Some(loading) = stalled(&engine, &gpu, &model, options) else { continue };
                match what {
                    "cancel" => loading.cancel(),
                    "token" => token.cancel(),
                    _ => {}
                }
                faults.release();
                if what == "drop" {
                    drop(loading);
                    None
                } else {
                    Some(loading.wait())
                }
            } else {
                Some(model.load(&engine, std::slice::from_ref(&gpu), options))
            };
            match (what, result.as_ref()) {
                (_, Some(Err(error))) if error.is_no_route() => continue,
                (_, None) => {}
                ("success", Some(Ok(_))) => {}
                // One mapping holds the whole file: it cannot be cancelled halfway, and has no
                // reads and no slots to fail.
                ("cancel" | "token" | "read error" | "pin error", Some(_)) if mapped => {}
                ("register error", Some(Ok(_))) if !mapped => {}
                ("copy error", Some(Ok(_))) if mapped => {}
                // Another worker pinned first: with one slot the load goes on.
                ("pin error", Some(Ok(_))) => {}
                ("cancel" | "token", Some(Err(error))) => {
                    assert!(error.is_cancelled(), "{error:?}");
                }
                ("read error", Some(Err(error))) => assert_eq!(error.errno(), Some(5), "{error:?}"),
                (_, Some(Err(error))) => assert!(error.is_device(), "{what} {route}: {error:?}"),
                (_, Some(Ok(loaded))) => panic!("{what} {route}: {:?}", loaded.report),
            }
            drop(result);
            assert_clean(&gpu, engine);
        }
    }
}

#[test]
fn a_deadline_ends_the_wait_and_its_memory_stays_until_the_copy_is_done() {
    let folder = &folders()[0];
    let path = model(folder.path());
    let gpu = sim(1 << 28);
    let engine = tiny(&gpu);
    let model = Model::open(&[&path]).unwrap();
    let mut options = options(Some(StorageRoute::PageCache));
    options.deadline = Some(Instant::now() + Duration::from_millis(200));
    let loading = stalled(&engine, &gpu, &model, options).unwrap();
    let error = loading.wait().unwrap_err();
    assert!(error.is_timeout() && error.code() == "timeout", "{error:?}");
    assert!(engine.pool_usage().quarantined > 0);
    assert!(gpu.usage().allocated > 0, "the device may still write it");
    gpu.as_sim().unwrap().faults().release();
    assert_clean(&gpu, engine);
}

#[test]
fn waiting_in_steps_ends_at_the_deadline_too() {
    let folder = &folders()[0];
    let path = model(folder.path());
    let gpu = sim(1 << 28);
    let engine = tiny(&gpu);
    let model = Model::open(&[&path]).unwrap();
    let mut options = options(Some(StorageRoute::PageCache));
    options.deadline = Some(Instant::now() + Duration::from_millis(200));
    let loading = stalled(&engine, &gpu, &model, options).unwrap();
    let until = soon();
    while !loading.wait_for(Duration::from_millis(20)) {
        assert!(
            Instant::now() < until,
            "a caller that shows progress never learns of the deadline"
        );
    }
    assert!(loading.wait().unwrap_err().is_timeout());
    gpu.as_sim().unwrap().faults().release();
    assert_clean(&gpu, engine);
}

#[test]
fn a_dropped_load_that_hangs_is_counted_as_quarantined() {
    let folder = &folders()[0];
    let path = model(folder.path());
    let gpu = sim(1 << 28);
    let engine = tiny(&gpu);
    let model = Model::open(&[&path]).unwrap();
    let loading = stalled(&engine, &gpu, &model, options(Some(StorageRoute::PageCache))).unwrap();
    drop(loading);
    assert!(engine.pool_usage().quarantined > 0, "{:?}", engine.pool_usage());
    gpu.as_sim().unwrap().faults().release();
    assert_clean(&gpu, engine);
}

#[test]
fn the_longest_wait_there_is_does_not_overflow() {
    let folder = &folders()[0];
    let path = model(folder.path());
    let gpu = sim(1 << 28);
    let engine = engine(&gpu);
    let model = Model::open(&[&path]).unwrap();
    let loading = model.start(&engine, std::slice::from_ref(&gpu), LoadOptions::default()).unwrap();
    assert!(loading.wait_for(Duration::MAX));
    let progress = loading.progress();
    assert_eq!(progress.done, progress.total);
    compare(&loading.wait().unwrap(), 0, &gpu, &witnesses(&[&path]));
}

#[test]
fn an_engine_told_to_leave_io_uring_alone_uses_threads() {
    let folder = &folders()[0];
    let path = model(folder.path());
    let gpu = sim(1 << 28);
    let mut without = config();
    without.io_uring = false;
    let engine = Engine::new(&gpu, without);
    let model = Model::open(&[&path]).unwrap();
    let error = model
        .load(&engine, std::slice::from_ref(&gpu), options(Some(StorageRoute::Direct)))
        .unwrap_err();
    assert!(error.is_no_route() && error.to_string().contains("direct"), "{error:?}");
    make_cold(&path);
    let loaded = model.load(&engine, std::slice::from_ref(&gpu), LoadOptions::default()).unwrap();
    assert!(loaded.report.routes.iter().all(|part| part.route != StorageRoute::Direct));
    compare(&loaded, 0, &gpu, &witnesses(&[&path]));
}
