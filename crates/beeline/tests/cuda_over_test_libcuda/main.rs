//! `Gpu::Cuda` and the loading of its driver, on a `libcuda.so.1` that is built over the simulated GPU.
//!
//! A process has one driver, so each case runs in a process of its own: this program again, with the
//! library in its search path and the faults of the case in its environment. [`pieces`] run on any
//! device: on the simulated one, on the test library, and on the device that `BEELINE_TEST_DEVICE`
//! names (`cuda:0` on a machine with a GPU).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    unreachable_pub,
    reason = "helpers of tests, which are not test functions themselves"
)]

mod captures;
mod cases;
#[allow(dead_code, reason = "what the other program needs besides")]
mod driver;
mod guest;
mod library;
mod local;
mod pieces;
mod regions;

use beeline::gpu::{DeviceId, Gpu};

use library::{Answer, Library, child};

#[test]
#[ignore = "the other tests run it, in processes of its own"]
fn in_a_process_of_its_own() {
    let Ok(name) = std::env::var(library::CASE) else { return };
    let case = cases::ALL.iter().find(|(known, _)| *known == name);
    case.unwrap_or_else(|| panic!("no case {name}")).1();
    println!("{}", library::DONE);
}

#[test]
fn pieces_on_the_simulated_device() {
    pieces::all(&Gpu::open(&DeviceId::Sim(0)).unwrap());
}

#[test]
fn regions_of_memory_that_its_owner_may_free() {
    let Some(library) = Library::built() else { return };
    for case in ["foreign_memory_freed", "registration_cache", "region_refusals"] {
        child(case, &library, &[]).passed();
    }
    child("window_of_other_bytes", &library, &[]).passed();
    child("window_not_mapped", &library, &[("BEELINE_TEST_CUDA_LACKS", "window")]).passed();
}

#[test]
fn memory_over_a_local_link() {
    let Some(library) = Library::built() else { return };
    let two = [("BEELINE_TEST_CUDA_DEVICES", "2")];
    for case in ["local_plain_memory", "local_foreign_memory"] {
        child(case, &library, &two).passed();
    }
}

#[test]
fn pieces_on_the_named_device() {
    let Ok(name) = std::env::var("BEELINE_TEST_DEVICE") else {
        println!("SKIP BEELINE_TEST_DEVICE");
        return;
    };
    pieces::all(&Gpu::open(&name.parse().unwrap()).unwrap());
}

#[test]
fn pieces_on_every_kind_of_driver() {
    let Some(library) = Library::built() else { return };
    let kinds: &[&[(&str, &str)]] = &[
        &[],
        &[("BEELINE_TEST_CUDA_PROC", "v1")],
        &[("BEELINE_TEST_CUDA_PROC", "none")],
        &[("BEELINE_TEST_CUDA_HIDE", "cuGetErrorName,cuGetErrorString")],
        &[("BEELINE_TEST_CUDA_LACKS", "vmm,pools")],
    ];
    for env in kinds {
        child("pieces", &library, env).passed();
    }
}

#[test]
fn every_way_a_driver_cannot_be_used_has_its_own_error() {
    let Some(library) = Library::built() else { return };
    let missing = library.beside("missing/libcuda.so.1");
    let broken = library.with_bytes("broken", b"not a library");
    let renamed = library.renamed("cuThreadExchangeStreamCaptureMode");
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let from = "BEELINE_CUDA_LIBRARY";
    let init = "BEELINE_TEST_CUDA_INIT";
    let cases: &[(&str, &str, &str, &str, &str)] = &[
        (from, &path(&missing), "cuda-library-missing", "device", "missing/libcuda.so.1"),
        (from, &path(&broken), "cuda-library-broken", "device", "file too short"),
        (from, &path(&renamed), "cuda-symbol-missing", "device", "cuThreadExchangeStreamCapture"),
        (from, "libc.so.6", "cuda-symbol-missing", "device", "cuDriverGetVersion"),
        ("BEELINE_TEST_CUDA_VERSION", "11030", "cuda-driver-too-old", "device", "CUDA 11.3"),
        ("BEELINE_TEST_CUDA_VERSION", "10020", "cuda-driver-too-old", "device", "11.4 is needed"),
        ("BEELINE_TEST_CUDA_LATER", "cuMemAlloc", "cuda-symbol-version", "device", "cuMemAlloc"),
        (init, "100", "cuda-no-device", "not-found", "CUDA_ERROR_NO_DEVICE (100)"),
        ("CUDA_VISIBLE_DEVICES", "", "cuda-no-device", "not-found", "CUDA_VISIBLE_DEVICES=\"\""),
        (init, "803", "cuda-driver-mismatch", "device", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        (init, "802", "cuda-system-not-ready", "device", "802"),
        (init, "34", "cuda-stub-library", "device", "CUDA_ERROR_STUB_LIBRARY (34)"),
        (init, "2", "cuda-out-of-memory", "out-of-memory", "CUDA_ERROR_OUT_OF_MEMORY (2)"),
        (init, "999", "cuda-init-failed", "device", "CUDA_ERROR_UNKNOWN (999)"),
        (init, "4242", "cuda-init-failed", "device", "CUresult (4242)"),
    ];
    for (name, value, code, kind, text) in cases {
        let answer = child("open", &library, &[(name, value)]).answer();
        let expected = Answer { code: (*code).into(), kind: (*kind).into(), text: (*text).into() };
        answer.expect(&expected, &format!("{name}={value}"));
    }
}

#[test]
fn a_broken_driver_is_never_silently_a_simulation() {
    let Some(library) = Library::built() else { return };
    let path = library.path().to_str().unwrap().to_owned();
    let broken = [("BEELINE_CUDA_LIBRARY", path.as_str()), ("BEELINE_TEST_CUDA_INIT", "803")];
    let answer = child("default", &library, &broken).answer();
    let expected = Answer {
        code: "cuda-driver-mismatch".into(),
        kind: "device".into(),
        text: "this machine has an NVIDIA GPU".into(),
    };
    answer.expect(&expected, "a default device");
    child("default_works", &library, &[("BEELINE_CUDA_LIBRARY", &path)]).passed();
}

#[test]
fn ordinals_uuids_addresses_and_the_visible_devices_agree() {
    let Some(library) = Library::built() else { return };
    let three = ("BEELINE_TEST_CUDA_DEVICES", "3");
    child("names", &library, &[three]).passed();
    child("names_reordered", &library, &[three, ("CUDA_VISIBLE_DEVICES", "2,0")]).passed();
    let second = "GPU-bee114e0-2074-6573-7420-475055200001";
    child("names_by_uuid", &library, &[three, ("CUDA_VISIBLE_DEVICES", second)]).passed();
    child("names_mig", &library, &[three, ("BEELINE_TEST_CUDA_MIG", "1")]).passed();
}

/// Cases that need no other environment than the one given.
#[test]
fn cases_on_one_driver_each() {
    let Some(library) = Library::built() else { return };
    let small = ("BEELINE_TEST_CUDA_MEMORY", "67108864");
    let two = ("BEELINE_TEST_CUDA_DEVICES", "2");
    let cases: &[(&str, &[(&str, &str)])] = &[
        ("manners", &[]),
        ("captures", &[]),
        ("capture_rules", &[]),
        ("capture_modes", &[]),
        ("capture_forks", &[]),
        ("replays", &[two]),
        ("foreign_streams", &[two]),
        ("foreign_pointers", &[two]),
        ("per_thread_stream", &[]),
        ("retention", &[]),
        ("dropped_streams", &[]),
        ("failed_stream_keeps_memory", &[]),
        ("deadline", &[]),
        ("out_of_memory", &[small]),
        ("device_lost", &[("BEELINE_TEST_CUDA_LOSE_AFTER_COPIES", "3")]),
        (
            "device_lost",
            &[("BEELINE_TEST_CUDA_LOSE_AFTER_COPIES", "3"), ("BEELINE_TEST_CUDA_LOST", "719")],
        ),
        ("full_stream", &[]),
        ("pinned_twice", &[]),
        ("mapped_file", &[]),
        ("mapped_file_refused", &[("BEELINE_TEST_CUDA_LACKS", "readonly")]),
        ("shareable", &[]),
        ("shareable_falls_back", &[("BEELINE_TEST_CUDA_LACKS", "vmm")]),
        ("pools", &[]),
        ("old_driver", &[("BEELINE_TEST_CUDA_VERSION", "11040")]),
        ("no_nor", &[("BEELINE_TEST_CUDA_LACKS", "nor")]),
        ("no_stream_words", &[("BEELINE_TEST_CUDA_LACKS", "memops")]),
        ("two_devices", &[two]),
        ("kinds_do_not_mix", &[]),
        ("threads", &[]),
        ("words_of_64_bits", &[]),
        ("dma_buf", &[]),
        ("dma_buf_refused", &[("BEELINE_TEST_CUDA_LACKS", "dmabuf")]),
    ];
    for (name, env) in cases {
        child(name, &library, env).passed();
    }
}
