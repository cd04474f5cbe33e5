//! The cases that run in a process of their own, on the test library.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use beeline::gpu::{
    Buffer, Compare, DeviceId, ForeignStream, Gpu, KernelArg, Profile, Stream, Usage,
};
use beeline_sys::cuda;
use beeline_sys::mem::{FileMap, HostMem};

use crate::captures;
use crate::driver::Direct;
use crate::guest;
use crate::library::answer;
use crate::pieces::{self, contents, loaded, noise, pinned, soon};

/// Every case by the name that its parent calls it.
pub const ALL: &[(&str, fn())] = &[
    ("pieces", pieces_on_cuda),
    ("open", open),
    ("default", default_device),
    ("default_works", default_works),
    ("names", names),
    ("names_reordered", names_reordered),
    ("names_by_uuid", names_by_uuid),
    ("names_mig", names_mig),
    ("manners", guest::manners),
    ("captures", guest::captures),
    ("capture_rules", captures::rules),
    ("capture_modes", captures::modes),
    ("capture_forks", captures::forks),
    ("replays", captures::replays),
    ("foreign_streams", guest::foreign_streams),
    ("per_thread_stream", guest::per_thread_stream),
    ("foreign_pointers", guest::foreign_pointers),
    ("retention", retention),
    ("dropped_streams", dropped_streams),
    ("failed_stream_keeps_memory", failed_stream_keeps_memory),
    ("deadline", deadline),
    ("out_of_memory", out_of_memory),
    ("device_lost", device_lost),
    ("full_stream", full_stream),
    ("pinned_twice", pinned_twice),
    ("mapped_file", mapped_file),
    ("mapped_file_refused", mapped_file_refused),
    ("shareable", shareable),
    ("shareable_falls_back", shareable_falls_back),
    ("pools", pools),
    ("old_driver", old_driver),
    ("no_nor", no_nor),
    ("no_stream_words", no_stream_words),
    ("two_devices", two_devices),
    ("kinds_do_not_mix", kinds_do_not_mix),
    ("threads", threads),
    ("words_of_64_bits", words_of_64_bits),
    ("dma_buf", dma_buf),
    ("dma_buf_refused", dma_buf_refused),
    ("foreign_memory_freed", crate::regions::foreign_memory_freed),
    ("registration_cache", crate::regions::registration_cache),
    ("region_refusals", crate::regions::refusals),
    ("window_of_other_bytes", crate::regions::window_of_other_bytes),
    ("window_not_mapped", crate::regions::window_not_mapped),
    ("local_plain_memory", crate::local::plain_memory),
    ("local_foreign_memory", crate::local::foreign_memory),
];

pub fn cuda(ordinal: u32) -> Gpu {
    Gpu::open(&DeviceId::Cuda(ordinal)).unwrap()
}

fn pieces_on_cuda() {
    pieces::all(&cuda(0));
    let direct = Direct::open();
    for (what, left) in [("memory", 0), ("host", 0), ("streams", 0), ("pageable", 0), ("stack", 0)]
    {
        assert_eq!(direct.counter(what), left, "{what}");
    }
    assert!(direct.counter("events") <= 64, "events are used again");
}

fn open() {
    answer(&Gpu::open(&DeviceId::Cuda(0)).unwrap_err());
    let first = Gpu::cuda_devices().unwrap_err();
    assert_eq!(first.code(), Gpu::open(&DeviceId::Cuda(0)).unwrap_err().code(), "asked again");
    assert!(Gpu::list().iter().all(|info| info.simulated), "no device that would not open");
}

fn default_device() {
    let error = Gpu::default_device().unwrap_err();
    assert!(error.hint().unwrap().contains("--to sim:0"), "{error:#}");
    answer(&error);
}

fn default_works() {
    let info = Gpu::default_device().unwrap().info();
    assert_eq!((info.id, info.simulated, info.profile), (DeviceId::Cuda(0), false, None));
    assert_eq!(Direct::open().counter("contexts"), 0, "no context before it is needed");
}

/// The ordinal that each name leads to, `None` where it leads nowhere.
fn check_names(cases: &[(&str, Option<u32>)]) {
    for (name, expected) in cases {
        let opened = Gpu::open(&name.parse().unwrap());
        match expected {
            Some(ordinal) => assert_eq!(opened.unwrap().id(), DeviceId::Cuda(*ordinal), "{name}"),
            None => assert!(opened.unwrap_err().is_not_found(), "{name}"),
        }
    }
}

const UUIDS: [&str; 3] = [
    "cuda:GPU-bee114e0-2074-6573-7420-475055200000",
    "cuda:GPU-bee114e0-2074-6573-7420-475055200001",
    "cuda:GPU-bee114e0-2074-6573-7420-475055200002",
];

fn names() {
    check_names(&[
        ("cuda:0", Some(0)),
        ("cuda:2", Some(2)),
        ("cuda:3", None),
        ("cuda:4294967295", None),
        (UUIDS[1], Some(1)),
        ("cuda:0000:3c:00.0", Some(1)),
        ("cuda:3D:00.0", Some(2)),
        ("cuda:0000:3e:00.0", None),
        ("cuda:0000:3b:00.1", None),
        ("cuda:MIG-bee114e0-2074-6573-7420-475055200001", None),
    ]);
    let error = Gpu::open(&DeviceId::Cuda(3)).unwrap_err();
    assert!(error.to_string().contains("cuda:2 (GPU-bee114e0"), "{error}");
    let info = cuda(1).info();
    let cuda = info.cuda.unwrap();
    assert_eq!(format!("cuda:{}", cuda.uuid), UUIDS[1]);
    assert_eq!(cuda.pci.unwrap().to_string(), "0000:3c:00.0");
    assert_eq!((cuda.compute_capability, cuda.driver_version), ((9, 0), 13_000));
    assert_eq!(info.memory_bytes, 1 << 30);
    let listed = Gpu::list().iter().filter(|info| !info.simulated).count();
    assert_eq!((listed, Gpu::cuda_devices().unwrap()), (3, 3));
}

fn names_reordered() {
    check_names(&[
        ("cuda:0", Some(0)),
        (UUIDS[2], Some(0)),
        ("cuda:0000:3d:00.0", Some(0)),
        (UUIDS[0], Some(1)),
        (UUIDS[1], None),
    ]);
    let error = Gpu::open(&UUIDS[1].parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES=\"2,0\""), "{error}");
}

fn names_by_uuid() {
    check_names(&[("cuda:0", Some(0)), (UUIDS[1], Some(0)), (UUIDS[0], None), ("cuda:1", None)]);
}

fn names_mig() {
    check_names(&[
        ("cuda:1", Some(1)),
        ("cuda:MIG-bee114e0-2074-6573-7420-475055200101", Some(1)),
        (UUIDS[1], None),
    ]);
    let info = cuda(1).info();
    assert!(info.name.contains("MIG") && info.cuda.unwrap().uuid.mig);
    let error = Gpu::open(&"cuda:0000:3b:00.0".parse().unwrap()).unwrap_err();
    assert!(error.is_refused() && error.to_string().contains("cuda:2 (MIG-"), "{error}");
}

/// What is queued keeps its memory, whatever the caller drops, and gives it back when it has run.
fn retention() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let bytes = noise(1 << 20);
    let (buffer, copy) = (gpu.alloc(1 << 20).unwrap(), gpu.alloc(1 << 20).unwrap());
    direct.fault("copy", 0, "stall");
    stream.copy_to_device(&buffer, 0, &pinned(&gpu, &bytes), 0, 1 << 20).unwrap();
    stream.copy_on_device(&copy, 0, &buffer, 0, 1 << 20).unwrap();
    stream.launch("fill_u32", &[KernelArg::Buffer(buffer.clone()), KernelArg::U32(1)]).unwrap();
    drop(buffer);
    let held = Usage { allocated: 2 << 20, pinned: 1 << 20, registered: 0 };
    assert_eq!(gpu.usage(), held, "no event was recorded yet");
    let event = stream.record().unwrap();
    assert_eq!(gpu.usage(), held);
    assert!(!event.is_done().unwrap());
    direct.release();
    event.wait(soon()).unwrap();
    assert_eq!(gpu.usage(), Usage { allocated: 1 << 20, ..Usage::default() });
    assert!(contents(&gpu, &stream, &copy) == bytes);

    // Without any event of the caller's.
    stream.copy_to_device(&copy, 0, &pinned(&gpu, &bytes), 0, 1 << 20).unwrap();
    drop(copy);
    eventually(|| gpu.usage() == Usage::default());
}

pub fn eventually(mut ready: impl FnMut() -> bool) {
    let end = soon();
    while !ready() {
        assert!(Instant::now() < end, "it never came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A dropped stream finishes its work, and its memory is given back then.
fn dropped_streams() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let bytes = noise(65_536);
    let target = gpu.alloc(65_536).unwrap();
    direct.fault("copy", 0, "stall");
    let stream = gpu.stream().unwrap();
    stream.copy_to_device(&target, 0, &pinned(&gpu, &bytes), 0, 65_536).unwrap();
    drop(stream);
    assert_eq!(gpu.usage().pinned, 65_536);
    assert_eq!(direct.counter("streams"), 1);
    direct.release();
    eventually(|| gpu.usage().pinned == 0);
    assert_eq!(direct.counter("streams"), 0);
    assert!(contents(&gpu, &gpu.stream().unwrap(), &target) == bytes);
}

/// After a failure that ends the context no completion can be seen, so nothing is given back.
fn failed_stream_keeps_memory() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let buffer = gpu.alloc(4096).unwrap();
    direct.fault("kernel", 0, "fail");
    let words = [KernelArg::Buffer(buffer.clone()), KernelArg::U32(1)];
    let gate = pinned(&gpu, &[0; 64]);
    stream.wait_host_value(&gate, 0, 1, Compare::Equal).unwrap();
    stream.launch("fill_u32", &words).unwrap();
    stream.copy_to_device(&buffer, 0, &pinned(&gpu, &[1; 4096]), 0, 4096).unwrap();
    let event = stream.record().unwrap();
    gate.mem().store_u32(0, 1).unwrap();
    let first = event.wait(soon()).unwrap_err();
    assert!(first.is_device() && first.code() == "device-lost", "{first:?}");
    for outcome in [event.wait(soon()), stream.fill(&buffer, 0, 1, 1), stream.record().map(drop)] {
        assert_eq!(
            outcome.unwrap_err().to_string().split(": ").nth(1),
            first.to_string().split(": ").nth(1)
        );
    }
    drop((stream, event, buffer, words, gate));
    assert_eq!(gpu.usage(), Usage { allocated: 4096, pinned: 4096 + 64, registered: 0 });
}

fn deadline() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let buffer = gpu.alloc(4096).unwrap();
    direct.fault("copy", 0, "stall");
    stream.copy_to_device(&buffer, 0, &pinned(&gpu, &[7; 4096]), 0, 4096).unwrap();
    for span in [Duration::ZERO, Duration::from_millis(10)] {
        let error = stream.synchronize(Instant::now() + span).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("cuda:0"), "{error:?}");
    }
    assert_eq!(gpu.usage().pinned, 4096, "the copy goes on");
    direct.release();
    assert_eq!(contents(&gpu, &stream, &buffer), vec![7; 4096]);
}

fn out_of_memory() {
    let gpu = cuda(0);
    let kept = gpu.alloc(48 << 20).unwrap();
    for alloc in [Gpu::alloc, Gpu::alloc_shareable] {
        let error = alloc(&gpu, 32 << 20).unwrap_err();
        assert!(error.is_out_of_memory(), "{error:?}");
        let expected = "cuda:0 has 16777216 of 67108864 bytes of device memory free, 16777216 bytes \
                        short of the 33554432 needed";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{error}");
    }
    let error = gpu.stream().unwrap().alloc(32 << 20).unwrap_err();
    assert!(error.is_out_of_memory(), "{error:?}");
    // Memory that a finished operation still holds is let go before any is missed.
    let stream = gpu.stream().unwrap();
    stream.fill(&kept, 0, 48 << 20, 1).unwrap();
    drop(kept);
    eventually(|| gpu.alloc(64 << 20).is_ok());
    assert_eq!(gpu.usage(), Usage::default());
}

/// The first copies arrive, then everything answers that the device is lost; nothing hangs.
fn device_lost() {
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let buffer = gpu.alloc(4096).unwrap();
    let source = pinned(&gpu, &[1; 4096]);
    let lost = (0..100).find_map(|_| {
        stream
            .copy_to_device(&buffer, 0, &source, 0, 4096)
            .err()
            .or_else(|| stream.synchronize(soon()).err())
    });
    let code = std::env::var("BEELINE_TEST_CUDA_LOST").unwrap_or_else(|_| "999".to_owned());
    let check = |error: beeline::Error| {
        assert!(error.is_device() && error.code() == "device-lost", "{error:?}");
        assert!(error.to_string().contains(&format!("({code})")), "{error}");
        assert!(error.hint().unwrap().contains("Xid"), "{error:#}");
    };
    check(lost.unwrap());
    check(gpu.alloc(1).unwrap_err());
    check(gpu.pin(1).unwrap_err());
    check(gpu.stream().unwrap_err());
    check(gpu.memory().unwrap_err());
    check(stream.fill(&buffer, 0, 1, 1).unwrap_err());
    assert_eq!(Direct::open().counter("copies"), 4, "three arrived");
    drop((stream, buffer, source));
}

/// A stream holds a bounded number of operations: the caller waits for room.
fn full_stream() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let buffer = gpu.alloc(4).unwrap();
    direct.fault("copy", 0, "stall");
    stream.copy_to_device(&buffer, 0, &pinned(&gpu, &[0; 4]), 0, 4).unwrap();
    let queued = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for _ in 0..2_000 {
                stream.record().unwrap();
                queued.fetch_add(1, Ordering::SeqCst);
            }
        });
        eventually(|| queued.load(Ordering::SeqCst) > 400);
        std::thread::sleep(Duration::from_millis(100));
        assert!(!writer.is_finished(), "held back");
        assert!(queued.load(Ordering::SeqCst) <= 512, "the bound is the library's own");
        direct.release();
    });
    stream.write_value(&buffer, 0, 7).unwrap();
    assert_eq!(contents(&gpu, &stream, &buffer), 7_u32.to_le_bytes());
}

fn pinned_twice() {
    let gpu = cuda(0);
    let mem = Arc::new(HostMem::anonymous(8192).unwrap());
    let first = gpu.pin_mem(Arc::clone(&mem)).unwrap();
    let error = gpu.pin_mem(Arc::clone(&mem)).unwrap_err();
    assert!(error.is_refused() && error.code() == "already-registered", "{error:?}");
    assert!(error.to_string().contains("8192 bytes at 0x"), "{error}");
    drop(first);
    gpu.pin_mem(mem).unwrap();
    assert_eq!(gpu.usage().pinned, 0);
}

fn mapping(bytes: &[u8]) -> Arc<FileMap> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, bytes).unwrap();
    // Opened for reading alone, as a model is: the pages may not be written.
    let file = File::open(file.path()).unwrap();
    Arc::new(FileMap::new(&file, 0, bytes.len()).unwrap())
}

fn mapped_file() {
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let bytes = noise(300_000);
    let map = gpu.register(mapping(&bytes)).unwrap();
    let buffer = gpu.alloc(300_000).unwrap();
    stream.copy_mapped_to_device(&buffer, 0, &map, 0, 300_000).unwrap();
    assert!(stream.copy_mapped_to_device(&buffer, 0, &map, 1, 300_000).unwrap_err().is_refused());
    assert_eq!(gpu.usage().registered, 300_000);
    drop(map);
    assert!(contents(&gpu, &stream, &buffer) == bytes);
    assert_eq!(gpu.usage().registered, 0);
}

fn mapped_file_refused() {
    let error = cuda(0).register(mapping(&noise(5_000))).unwrap_err();
    assert!(
        error.code() == "cuda-unsupported" && error.to_string().contains("flags 0xb"),
        "{error}"
    );
}

fn shareable() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let bytes = noise((2 << 20) + 5);
    let buffer = gpu.alloc_shareable((2 << 20) + 5).unwrap();
    assert_eq!(direct.counter("physical"), 1, "fit for RDMA");
    assert_eq!(gpu.memory().unwrap().free, (1 << 30) - (4 << 20), "whole granules");
    stream.copy_to_device(&buffer, 0, &pinned(&gpu, &bytes), 0, bytes.len() as u64).unwrap();
    assert!(contents(&gpu, &stream, &buffer) == bytes);
    drop(buffer);
    assert_eq!((direct.counter("physical"), direct.counter("memory")), (0, 0));
    assert_eq!(gpu.memory().unwrap().free, 1 << 30);
}

fn shareable_falls_back() {
    let gpu = cuda(0);
    let buffer = gpu.alloc_shareable(4096).unwrap();
    let direct = Direct::open();
    assert_eq!((direct.counter("physical"), direct.counter("memory")), (0, 1));
    drop(buffer);
}

fn pools() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let bytes = noise(9_999);
    let buffer = stream.alloc(9_999).unwrap();
    assert!(stream.alloc(0).unwrap_err().is_refused());
    stream.copy_to_device(&buffer, 0, &pinned(&gpu, &bytes), 0, 9_999).unwrap();
    let other = gpu.stream().unwrap();
    other.wait_event(&stream.record().unwrap()).unwrap();
    assert!(contents(&gpu, &other, &buffer) == bytes);
    drop((stream, other));
    drop(buffer);
    assert_eq!(gpu.usage(), Usage::default());
    assert_eq!((direct.counter("memory"), direct.counter("streams")), (0, 0));
}

/// CUDA 11.4 has no stream memory operations that may be used, and everything else works.
fn old_driver() {
    let gpu = cuda(0);
    assert_eq!(gpu.info().cuda.unwrap().driver_version, 11_040);
    let stream = gpu.stream().unwrap();
    let buffer = loaded(&gpu, &stream, &[5; 64]);
    for outcome in
        [stream.write_value(&buffer, 0, 1), stream.wait_value(&buffer, 0, 1, Compare::Equal)]
    {
        let error = outcome.unwrap_err();
        assert!(error.is_refused() && error.code() == "cuda-unsupported", "{error:?}");
    }
    assert_eq!(contents(&gpu, &stream, &buffer), [5; 64]);
}

fn no_nor() {
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let buffer = loaded(&gpu, &stream, &[5; 64]);
    let error = stream.wait_value(&buffer, 0, 1, Compare::Nor).unwrap_err();
    assert!(error.is_refused() && error.code() == "cuda-unsupported", "{error:?}");
    stream.wait_value(&buffer, 0, 5, Compare::AnyBit).unwrap();
    stream.synchronize(soon()).unwrap();
}

/// Stream operations on words that the driver refuses: a device error that names the call, with doctor's code
/// where the machine's settings show the cause.
fn no_stream_words() {
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    let buffer = loaded(&gpu, &stream, &[5; 64]);
    let error = stream.write_value(&buffer, 0, 1).unwrap_err();
    let code = error.code();
    assert!(
        error.is_device() && ["cuda-unsupported", "stream-memops-off"].contains(&code),
        "{code}"
    );
    assert!(format!("{error:#}").contains("cuStreamWriteValue32"), "{error:#}");
    // Of other operations nothing is said.
    stream.fill(&buffer, 0, 64, 1).unwrap();
}

fn two_devices() {
    let (a, b) = (cuda(0), cuda(1));
    let (on_a, on_b) = (a.stream().unwrap(), b.stream().unwrap());
    let bytes = noise(1 << 20);
    let source = loaded(&a, &on_a, &bytes);
    let target = b.alloc(1 << 20).unwrap();
    on_b.wait_event(&on_a.record().unwrap()).unwrap();
    on_b.copy_on_device(&target, 0, &source, 0, 1 << 20).unwrap();
    assert!(contents(&b, &on_b, &target) == bytes);
    // Host memory is pinned for every device.
    let host = a.pin(1 << 20).unwrap();
    on_b.copy_to_host(&host, 0, &target, 0, 1 << 20).unwrap();
    on_b.synchronize(soon()).unwrap();
    assert_eq!((a.usage().allocated, b.usage().allocated), (1 << 20, 1 << 20));
    assert_eq!((target.gpu().id(), source.gpu().id()), (b.id(), a.id()));
    // A kernel of one device does not reach memory of the other.
    drop((source, host));
    assert_eq!(a.usage(), Usage::default());
}

fn kinds_do_not_mix() {
    let (cuda, sim) = (cuda(0), Gpu::open(&DeviceId::Sim(0)).unwrap());
    let streams = [cuda.stream().unwrap(), sim.stream().unwrap()];
    let (of_cuda, of_sim) = (cuda.alloc(64).unwrap(), sim.alloc(64).unwrap());
    let refused = |stream: &Stream, buffer: &Buffer, gpu: &Gpu| {
        let host = gpu.pin(64).unwrap();
        assert!(stream.copy_to_device(buffer, 0, &host, 0, 64).unwrap_err().is_refused());
        assert!(stream.fill(buffer, 0, 64, 0).unwrap_err().is_refused());
        let words = [KernelArg::Buffer(buffer.clone()), KernelArg::U32(1)];
        assert!(stream.launch("fill_u32", &words).unwrap_err().is_refused());
    };
    refused(&streams[0], &of_sim, &sim);
    refused(&streams[1], &of_cuda, &cuda);
    let host = sim.pin(64).unwrap();
    assert!(streams[0].copy_to_device(&of_cuda, 0, &host, 0, 64).unwrap_err().is_refused());
    assert!(streams[0].wait_event(&streams[1].record().unwrap()).unwrap_err().is_refused());
    assert!(streams[1].wait_event(&streams[0].record().unwrap()).unwrap_err().is_refused());
    assert!(sim.foreign_stream(ForeignStream::LEGACY_DEFAULT).unwrap_err().is_refused());
    let error = of_cuda.window().unwrap_err();
    assert!(error.is_no_route() && error.reasons().len() == 1, "{error:?}");
    assert!(cuda.as_sim().is_none() && cuda.info().profile.is_none());
    assert_eq!(sim.info().profile, Some(Profile::Plain));
}

fn threads() {
    let gpu = cuda(0);
    let stream = gpu.stream().unwrap();
    std::thread::scope(|scope| {
        for seed in 0..8_u8 {
            let (gpu, stream) = (&gpu, &stream);
            scope.spawn(move || {
                let own = gpu.stream().unwrap();
                for round in 0..20 {
                    let bytes = vec![seed ^ round; 20_000];
                    let buffer = loaded(gpu, stream, &bytes);
                    own.wait_event(&stream.record().unwrap()).unwrap();
                    assert!(contents(gpu, &own, &buffer) == bytes);
                }
            });
        }
    });
    drop(stream);
    assert_eq!(gpu.usage(), Usage::default());
    assert_eq!(Direct::open().counter("memory"), 0);
}

/// A context and a page of device memory as the system layer has them.
fn below() -> (Arc<cuda::Context>, Arc<cuda::DeviceMem>) {
    let context = cuda::Driver::open(None).unwrap().device(0).unwrap().retain_primary().unwrap();
    let mem = Arc::new(cuda::DeviceMem::alloc(&context, 65_536).unwrap());
    (context, mem)
}

fn words_of_64_bits() {
    let (context, mem) = below();
    let stream = cuda::Stream::new(&context).unwrap();
    let host = Arc::new(HostMem::anonymous(4096).unwrap());
    let pinned = Arc::new(cuda::HostRegistration::pin(&context, Arc::clone(&host)).unwrap());
    let value = 0x1122_3344_5566_7788;
    stream.write_u64(cuda::Word::Device(&mem, 8), value).unwrap();
    stream.wait_u64(cuda::Word::Device(&mem, 8), value, cuda::WaitFlags::EQ).unwrap();
    stream.write_u64(cuda::Word::Host(&pinned, 16), value).unwrap();
    let event = stream.record().unwrap();
    eventually(|| event.is_done().unwrap());
    assert_eq!(host.load_u64(16).unwrap(), value);
    for (offset, text) in [(4, "not a multiple of 8"), (65_536, "do not lie inside")] {
        let word = cuda::Word::Device(&mem, offset);
        for outcome in [stream.write_u64(word, 1), stream.wait_u64(word, 1, cuda::WaitFlags::EQ)] {
            assert!(outcome.unwrap_err().to_string().contains(text), "{offset}");
        }
    }
}

fn dma_buf() {
    let (_context, mem) = below();
    let fd = mem.dma_buf(4096, 8192).unwrap();
    assert_eq!(File::from(fd).metadata().unwrap().len(), 8192);
    for (offset, len) in [(0, 65_537), (65_536, 4096), (1, 4096)] {
        assert!(mem.dma_buf(offset, len).is_err(), "{len} bytes at {offset}");
    }
}

fn dma_buf_refused() {
    let (_context, mem) = below();
    let error = mem.dma_buf(0, 4096).unwrap_err();
    assert_eq!(error, cuda::Error::Unsupported { what: "dma-buf export" });
}
