//! What every device does, whatever kind it is.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::core::addr::ByteRange;
use beeline::gpu::{Buffer, Compare, Gpu, KernelArg, PinnedMem, Stream};
use beeline_sys::mem::FileMap;

pub fn all(gpu: &Gpu) {
    let pieces: &[fn(&Gpu, &Stream)] = &[
        bytes_come_back,
        pieces_at_odd_places,
        overlapping_copies,
        fills_and_kernels,
        words_order_two_streams,
        events_order_two_streams,
        every_kind_of_memory,
        pages_of_a_file,
        what_is_refused,
    ];
    let before = gpu.usage();
    for piece in pieces {
        let stream = gpu.stream().unwrap();
        piece(gpu, &stream);
        stream.synchronize(soon()).unwrap();
        drop(stream);
        assert_eq!(gpu.usage(), before, "everything is given back");
    }
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Bytes without a period that an address could share.
pub fn noise(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

pub fn pinned(gpu: &Gpu, bytes: &[u8]) -> PinnedMem {
    let mem = gpu.pin(bytes.len() as u64).unwrap();
    mem.mem().write(0, bytes).unwrap();
    mem
}

/// A buffer with these bytes in it.
pub fn loaded(gpu: &Gpu, stream: &Stream, bytes: &[u8]) -> Buffer {
    let buffer = gpu.alloc(bytes.len() as u64).unwrap();
    stream.copy_to_device(&buffer, 0, &pinned(gpu, bytes), 0, bytes.len() as u64).unwrap();
    buffer
}

/// The bytes of a buffer, after everything queued in `stream`.
pub fn contents(gpu: &Gpu, stream: &Stream, buffer: &Buffer) -> Vec<u8> {
    let mem = gpu.pin(buffer.len()).unwrap();
    stream.copy_to_host(&mem, 0, buffer, 0, buffer.len()).unwrap();
    stream.synchronize(soon()).unwrap();
    let mut bytes = vec![0; buffer.len() as usize];
    mem.mem().read(0, &mut bytes).unwrap();
    bytes
}

fn bytes_come_back(gpu: &Gpu, stream: &Stream) {
    for len in [1, 4096, 100_001, 3 << 20] {
        let bytes = noise(len);
        let buffer = loaded(gpu, stream, &bytes);
        assert!(buffer.ptr().is_aligned(256));
        assert!(contents(gpu, stream, &buffer) == bytes, "{len} bytes");
    }
}

fn pieces_at_odd_places(gpu: &Gpu, stream: &Stream) {
    let bytes = noise(70_000);
    let source = pinned(gpu, &bytes);
    let buffer = gpu.alloc(70_000).unwrap();
    let mut expected = vec![0xee; 70_000];
    stream.fill(&buffer, 0, 70_000, 0xee).unwrap();
    for (to, from, len) in
        [(1, 0, 7), (4099, 13, 60_001), (69_999, 1, 1), (10, 10, 0), (70_000, 70_000, 0)]
    {
        let part = buffer.slice(ByteRange::new(to, 70_000 - to).unwrap()).unwrap();
        stream.copy_to_device(&part, 0, &source, from, len).unwrap();
        let (to, from, len) = (to as usize, from as usize, len as usize);
        expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
    }
    assert!(contents(gpu, stream, &buffer) == expected);
}

fn overlapping_copies(gpu: &Gpu, stream: &Stream) {
    let bytes = noise(50_000);
    for (to, from, len) in [(0, 1, 49_999), (1, 0, 49_999), (0, 30_000, 20_000), (7, 7, 100)] {
        let buffer = loaded(gpu, stream, &bytes);
        stream.copy_on_device(&buffer, to as u64, &buffer, from as u64, len as u64).unwrap();
        let mut expected = bytes.clone();
        expected.copy_within(from..from + len, to);
        assert!(contents(gpu, stream, &buffer) == expected, "{len} bytes from {from} to {to}");
    }
}

fn fills_and_kernels(gpu: &Gpu, stream: &Stream) {
    let words = 300_001_u32;
    let len = u64::from(words) * 4;
    let (sum, addend) = (gpu.alloc(len).unwrap(), gpu.alloc(len).unwrap());
    let buffer = |buffer: &Buffer| KernelArg::Buffer(buffer.clone());
    stream.launch("iota_u32", &[buffer(&sum), KernelArg::U32(u32::MAX - 5)]).unwrap();
    stream.launch("fill_u32", &[buffer(&addend), KernelArg::U32(17)]).unwrap();
    stream.launch("add_u32", &[buffer(&sum), buffer(&addend)]).unwrap();
    let expected =
        (0..words).flat_map(|i| i.wrapping_add(u32::MAX - 5).wrapping_add(17).to_le_bytes());
    assert!(contents(gpu, stream, &sum) == expected.collect::<Vec<_>>());

    let refused: &[(&str, &[KernelArg])] = &[
        ("no_such_kernel", &[]),
        ("fill_u32", &[]),
        ("fill_u32", &[KernelArg::U32(1), KernelArg::U32(1)]),
        ("add_u32", &[buffer(&sum), KernelArg::U64(1)]),
        (
            "add_u32",
            &[buffer(&sum), KernelArg::Buffer(sum.slice(ByteRange::new(0, 8).unwrap()).unwrap())],
        ),
        (
            "fill_u32",
            &[
                KernelArg::Buffer(sum.slice(ByteRange::new(2, 8).unwrap()).unwrap()),
                KernelArg::U32(1),
            ],
        ),
    ];
    for (name, args) in refused {
        let error = stream.launch(name, args).unwrap_err();
        assert!(error.is_refused(), "{name} {}: {error:?}", args.len());
    }
}

// While a stream is held back, nothing is allocated, pinned or freed here: a driver may wait for the
// device then.

fn words_order_two_streams(gpu: &Gpu, first: &Stream) {
    let second = gpu.stream().unwrap();
    let bytes = noise(1 << 20);
    let (flags, host) = (loaded(gpu, first, &[0; 64]), pinned(gpu, &[0; 64]));
    let (source, result) = (pinned(gpu, &bytes), gpu.pin(1 << 20).unwrap());
    let target = gpu.alloc(1 << 20).unwrap();
    first.synchronize(soon()).unwrap();

    // The second stream waits for a word that the first writes, and that for one the CPU writes.
    second.wait_value(&flags, 8, 3, Compare::GreaterOrEqual).unwrap();
    second.copy_to_host(&result, 0, &target, 0, 1 << 20).unwrap();
    second.write_host_value(&host, 12, 9).unwrap();
    let done = second.record().unwrap();
    first.wait_host_value(&host, 4, 1, Compare::Equal).unwrap();
    first.copy_to_device(&target, 0, &source, 0, 1 << 20).unwrap();
    first.write_value(&flags, 8, 5).unwrap();
    let early = done.is_done().unwrap();
    host.mem().store_u32(4, 1).unwrap();
    done.wait(soon()).unwrap();
    assert!(!early, "nothing ran before the word");
    assert_eq!(host.mem().load_u32(12).unwrap(), 9);
    let mut copied = vec![0; 1 << 20];
    result.mem().read(0, &mut copied).unwrap();
    assert!(copied == bytes);
    for offset in [2, 62] {
        assert!(first.write_value(&flags, offset, 1).unwrap_err().is_refused(), "{offset}");
    }
}

fn events_order_two_streams(gpu: &Gpu, first: &Stream) {
    let second = gpu.stream().unwrap();
    let gate = pinned(gpu, &[0; 4096]);
    let bytes = noise(1 << 20);
    let (source, target) = (pinned(gpu, &bytes), gpu.alloc(1 << 20).unwrap());
    first.wait_host_value(&gate, 0, 1, Compare::Equal).unwrap();
    first.copy_to_device(&target, 0, &source, 0, 1 << 20).unwrap();
    second.wait_event(&first.record().unwrap()).unwrap();
    let early = second.record().unwrap().wait(Instant::now() + Duration::from_millis(20));
    gate.mem().store_u32(0, 1).unwrap();
    assert!(early.unwrap_err().is_timeout());
    assert!(contents(gpu, &second, &target) == bytes);
}

fn every_kind_of_memory(gpu: &Gpu, stream: &Stream) {
    let bytes = noise(70_001);
    for buffer in [gpu.alloc_shareable(70_001).unwrap(), stream.alloc(70_001).unwrap()] {
        stream.copy_to_device(&buffer, 0, &pinned(gpu, &bytes), 0, 70_001).unwrap();
        assert!(contents(gpu, stream, &buffer) == bytes);
    }
}

fn pages_of_a_file(gpu: &Gpu, stream: &Stream) {
    let bytes = noise(300_000);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    // Opened for reading alone, as a model is: the pages may not be written.
    let reader = File::open(file.path()).unwrap();
    let map = match gpu.register(Arc::new(FileMap::new(&reader, 0, 300_000).unwrap())) {
        Err(error) if error.code() == "cuda-unsupported" => {
            println!("SKIP registering read-only pages on {}", gpu.id());
            return;
        }
        registered => registered.unwrap(),
    };
    let buffer = gpu.alloc(300_000).unwrap();
    stream.copy_mapped_to_device(&buffer, 0, &map, 5, 299_995).unwrap();
    stream.copy_mapped_to_device(&buffer, 299_995, &map, 0, 5).unwrap();
    assert!(stream.copy_mapped_to_device(&buffer, 0, &map, 1, 300_000).unwrap_err().is_refused());
    drop(map);
    let expected = [&bytes[5..], &bytes[..5]].concat();
    assert!(contents(gpu, stream, &buffer) == expected);
}

fn what_is_refused(gpu: &Gpu, stream: &Stream) {
    assert!(gpu.alloc(0).unwrap_err().is_refused());
    assert!(gpu.pin(0).unwrap_err().is_refused());
    let total = gpu.memory().unwrap().total;
    for len in [total + 1, u64::MAX] {
        let error = gpu.alloc(len).unwrap_err();
        assert!(error.is_out_of_memory() || error.is_refused(), "{len}: {error:?}");
    }
    let (buffer, host) = (gpu.alloc(4096).unwrap(), gpu.pin(4096).unwrap());
    for (to, from, len) in
        [(4096, 0, 1), (0, 4096, 1), (1, 0, 4096), (u64::MAX, 0, 1), (0, 0, u64::MAX)]
    {
        assert!(stream.copy_to_device(&buffer, to, &host, from, len).unwrap_err().is_refused());
        assert!(stream.copy_to_host(&host, from, &buffer, to, len).unwrap_err().is_refused());
    }
    assert!(stream.fill(&buffer, 1, 4096, 0).unwrap_err().is_refused());
    assert!(buffer.slice(ByteRange { start: 4000, len: 97 }).is_err());
    // A refusal leaves the stream as it was.
    stream.fill(&buffer, 0, 4096, 3).unwrap();
    assert_eq!(contents(gpu, stream, &buffer), vec![3; 4096]);
    let kept: Arc<_> = Arc::clone(host.mem());
    drop(host);
    kept.write(0, &[1]).unwrap();
}
