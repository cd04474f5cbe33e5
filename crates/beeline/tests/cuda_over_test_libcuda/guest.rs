//! The cases of a guest: what belongs to the caller stays the caller's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use beeline::core::addr::DevicePtr;
use beeline::gpu::{Buffer, Compare, DeviceId, ForeignStream, Gpu, Usage};

use crate::cases::{cuda, eventually};
use crate::driver::Direct;
use crate::pieces::{self, contents, loaded, noise, pinned, soon};

/// A caller's current context and capture mode are the same after every call, and nobody else's
/// handles are touched.
pub fn manners() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let check = |when: &str, context: usize, depth: i64| {
        assert_eq!((direct.current(), direct.counter("stack")), (context, depth), "{when}");
        assert_eq!(direct.counter("mode"), 0, "{when}");
    };
    let stream = gpu.stream().unwrap();
    check("without a context", 0, 0);
    pieces::all(&gpu);
    check("without a context", 0, 0);
    let context = direct.push_primary(0);
    pieces::all(&gpu);
    check("with a context", context, 1);
    assert!(gpu.alloc(u64::MAX).is_err());
    assert!(gpu.alloc(2 << 30).is_err());
    assert!(stream.wait_value(&gpu.alloc(8).unwrap(), 1, 0, Compare::Equal).is_err());
    check("after failures", context, 1);
    direct.exchange_mode(1);
    pieces::all(&gpu);
    assert_eq!((direct.exchange_mode(0), direct.current()), (1, context), "the thread's own mode");
    assert_eq!(direct.counter("contexts"), 2, "retained once here, once by Beeline");
}

pub fn captures() {
    let direct = Direct::open();
    let gpu = cuda(0);
    direct.push_primary(0);
    let captured = direct.ask("cuStreamCreate", 1);
    // SAFETY: a stream of this process's driver, which is never destroyed.
    let foreign = gpu.foreign_stream(unsafe { ForeignStream::new(captured) }).unwrap();
    let buffer = gpu.alloc(4096).unwrap();
    foreign.fill(&buffer, 0, 4096, 1).unwrap();

    direct.begin(captured, 0);
    pieces::all(&gpu);
    gpu.alloc_shareable(1).unwrap();
    assert_eq!((direct.counter("capture"), direct.counter("refused")), (1, 0), "not spoilt");
    for outcome in [foreign.fill(&buffer, 0, 1, 2), foreign.record().map(drop)] {
        let error = outcome.unwrap_err();
        assert!(error.is_refused() && error.code() == "stream-capturing", "{error:?}");
    }
    assert_eq!(gpu.usage().allocated, 4096);
    assert_eq!((direct.counter("capture"), direct.counter("captured")), (1, 0));
    // The test library does tell a spoilt capture from a good one.
    assert_eq!(direct.call1("cuEventQuery", direct.ask("cuEventCreate", 2)), 900);
    assert_eq!((direct.counter("capture"), direct.counter("refused")), (2, 1));
    assert_eq!(direct.end(captured), Err(901));
    foreign.fill(&buffer, 0, 4096, 3).unwrap();
    assert_eq!(contents(&gpu, &foreign, &buffer), vec![3; 4096]);
}

pub fn foreign_streams() {
    let direct = Direct::open();
    let gpu = cuda(0);
    direct.push_primary(0);
    let own = direct.ask("cuStreamCreate", 1);
    let streams = direct.counter("streams");
    let bytes = noise(10_000);
    let handles = [
        // SAFETY: a stream of this process's driver, which is never destroyed.
        unsafe { ForeignStream::new(own) },
        // SAFETY: 0 is the legacy default stream.
        unsafe { ForeignStream::new(0) },
        ForeignStream::LEGACY_DEFAULT,
        ForeignStream::PER_THREAD_DEFAULT,
    ];
    for handle in handles {
        let stream = gpu.foreign_stream(handle).unwrap();
        let buffer = loaded(&gpu, &stream, &bytes);
        assert!(contents(&gpu, &stream, &buffer) == bytes, "{handle:?}");
        assert!(stream.alloc(4096).is_ok(), "not from the pool of a stream that may go");
        drop(stream);
    }
    assert_eq!(gpu.usage(), Usage::default());
    let left = direct.counter("streams") - streams;
    assert!((0..=2).contains(&left), "only default streams were added, and none destroyed: {left}");
    // SAFETY: as above; refused, because it is a stream of another device.
    let error = cuda(1).foreign_stream(unsafe { ForeignStream::new(own) }).unwrap_err();
    assert!(error.is_refused(), "{error:?}");
}

/// The handle of the per-thread stream means another stream in another thread, whose idleness says
/// nothing about this one's.
pub fn per_thread_stream() {
    let direct = Direct::open();
    let gpu = cuda(0);
    let stream = gpu.foreign_stream(ForeignStream::PER_THREAD_DEFAULT).unwrap();
    let buffer = gpu.alloc(4096).unwrap();
    let source = pinned(&gpu, &[9; 4096]);
    direct.fault("copy", 0, "stall");
    stream.copy_to_device(&buffer, 0, &source, 0, 4096).unwrap();
    drop(source);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            stream.synchronize(soon()).unwrap();
            gpu.usage().pinned
        });
        assert_eq!(other.join().unwrap(), 4096, "still being read");
    });
    direct.release();
    assert_eq!(contents(&gpu, &stream, &buffer), vec![9; 4096]);
    drop((stream, buffer));
    eventually(|| gpu.usage() == Usage::default());
}

pub fn foreign_pointers() {
    struct Owner(Arc<AtomicBool>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let direct = Direct::open();
    let (gpu, other) = (cuda(0), cuda(1));
    direct.push_primary(0);
    let ptr = direct.ask("cuMemAlloc_v2", 100_000) as u64;
    let managed = direct.managed(4096);
    let host = gpu.pin(4096).unwrap();
    let stream = gpu.stream().unwrap();
    let foreign = |gpu: &Gpu, ptr: u64, len: u64| {
        Buffer::from_foreign(gpu, DevicePtr::new(ptr), len, Arc::new(()))
    };
    let refused = [
        (&gpu, ptr, 100_001, "its allocation is 100000 bytes"),
        (&gpu, ptr, 0, "the range is empty"),
        (&gpu, ptr + 99_999, 2, "its allocation is 100000 bytes"),
        (&gpu, ptr, u64::MAX, "its allocation is 100000 bytes"),
        (&gpu, managed, 4096, "managed memory"),
        (&gpu, host.mem().addr().as_u64(), 4096, "host memory"),
        (&gpu, 0x1000, 4096, "does not know"),
        (&other, ptr, 4096, "it belongs to cuda:0"),
    ];
    for (gpu, ptr, len, text) in refused {
        let error = foreign(gpu, ptr, len).unwrap_err();
        assert!(error.is_refused() && error.to_string().contains(text), "{error:?}");
    }
    let sim = Gpu::open(&DeviceId::Sim(0)).unwrap();
    assert!(foreign(&sim, ptr, 1).unwrap_err().is_refused());

    let gone = Arc::new(AtomicBool::new(false));
    let owner = Arc::new(Owner(Arc::clone(&gone)));
    let buffer = Buffer::from_foreign(&gpu, DevicePtr::new(ptr + 8), 50_000, owner).unwrap();
    assert_eq!((buffer.ptr().as_u64(), gpu.usage().allocated), (ptr + 8, 0));
    let bytes = noise(50_000);
    stream.copy_to_device(&buffer, 0, &pinned(&gpu, &bytes), 0, 50_000).unwrap();
    assert!(contents(&gpu, &stream, &buffer) == bytes);
    let before = direct.counter("memory");
    direct.fault("copy", 0, "stall");
    stream.copy_to_host(&host, 0, &buffer, 0, 1).unwrap();
    let done = stream.record().unwrap();
    drop(buffer);
    assert!(!gone.load(Ordering::SeqCst), "in use");
    direct.release();
    done.wait(soon()).unwrap();
    assert!(gone.load(Ordering::SeqCst), "let go");
    assert_eq!(direct.counter("memory"), before, "never freed here");
}
