//! GPU memory of a CUDA driver as memory regions: whose it is, and when it is gone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::core::addr::ByteRange;
use beeline::gpu::{Buffer, Gpu};
use beeline::memory::cache::RegistrationCache;
use beeline::memory::dmabuf::{DmaBuf, Kind};
use beeline::memory::peer::Subject;
use beeline::memory::pinned_vram::{BUDGET_BYTES, PinnedVram};
use beeline::verbs::{
    Access, Connect, Cq, HostMem, Mr, Nic, Payload, Pd, Qp, QpCaps, QpKind, SendOp, SendWr,
    SoftOptions, Status,
};

use crate::cases::cuda;

const WAIT: Duration = Duration::from_secs(20);
const BYTES: u64 = 1 << 20;

struct Side {
    pd: Pd,
    cq: Cq,
    qp: Qp,
}

fn sides() -> (Side, Side) {
    let address = |n| [127, 17, (std::process::id() % 250) as u8, n].into();
    let pair = Nic::pair(SoftOptions::new(address(2)), SoftOptions::new(address(3))).unwrap();
    let side = |nic: &Nic| {
        let context = nic.open();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default()).unwrap();
        Side { pd, cq, qp }
    };
    let (a, b) = (side(&pair.0), side(&pair.1));
    a.qp.connect(&b.qp.endpoint(), &Connect::default()).unwrap();
    b.qp.connect(&a.qp.endpoint(), &Connect::default()).unwrap();
    (a, b)
}

fn foreign(gpu: &Gpu, owner: &Buffer) -> Buffer {
    Buffer::from_foreign(gpu, owner.ptr(), owner.len(), Arc::new(())).unwrap()
}

fn fill(gpu: &Gpu, buffer: &Buffer, value: u8) {
    let stream = gpu.stream().unwrap();
    stream.fill(buffer, 0, buffer.len(), value).unwrap();
    stream.synchronize(Instant::now() + WAIT).unwrap();
}

/// What a READ of the whole region brings, or how it ends.
fn read(side: &Side, target: &Mr) -> Result<Vec<u8>, Status> {
    let mem = Arc::new(HostMem::anonymous(BYTES as usize).unwrap());
    mem.fill(0, BYTES, 0xee).unwrap();
    let mr = side.pd.reg_mr(Arc::clone(&mem), Access::ALL).unwrap();
    let payload = Payload::Sges(vec![mr.sge(0, BYTES as u32).unwrap()]);
    side.qp
        .post_send(SendWr::new(1, SendOp::Read { remote: target.remote_at(0) }, payload))
        .unwrap();
    let status = side.cq.wait(WAIT).unwrap().status;
    let mut bytes = vec![0; BYTES as usize];
    mem.read(0, &mut bytes).unwrap();
    if status == Status::Success {
        Ok(bytes)
    } else {
        assert!(bytes.iter().all(|byte| [0xee, 1].contains(byte)), "nobody else's bytes");
        Err(status)
    }
}

/// Foreign memory that is freed: the peer is refused, and its region is never another allocation's.
pub fn foreign_memory_freed() {
    let gpu = cuda(0);
    for kept in [true, false] {
        let (a, b) = sides();
        let owner = gpu.alloc(BYTES).unwrap();
        fill(&gpu, &owner, 1);
        let buffer = foreign(&gpu, &owner);
        let range = ByteRange { start: 0, len: BYTES };
        let target = b.pd.register(&Subject::Gpu(buffer.clone()), range, Access::ALL).unwrap();
        assert_eq!(read(&a, &target), Ok(vec![1; BYTES as usize]));
        assert!(!target.registration().unwrap().is_invalidated());
        drop(owner);
        let other = kept.then(|| gpu.alloc(BYTES).unwrap());
        if let Some(other) = &other {
            assert_eq!(other.ptr(), buffer.ptr(), "the address is used again");
            fill(&gpu, other, 9);
        }
        assert_eq!(read(&a, &target), Err(Status::RemoteAccess), "kept {kept}");
        assert!(target.registration().unwrap().is_invalidated());
        let error = b.pd.reg_gpu(&buffer, Access::ALL);
        // A new registration is of what lies there now, or refused where nothing does.
        assert_eq!(error.is_ok(), kept);
    }
}

/// The cache goes by the allocation, not by the address.
pub fn registration_cache() {
    let gpu = cuda(0);
    let (_a, b) = sides();
    let cache = RegistrationCache::new(&b.pd, 2);
    let owner = gpu.alloc(BYTES).unwrap();
    let first = cache.region(&foreign(&gpu, &owner), Access::ALL).unwrap();
    let part = foreign(&gpu, &owner).slice(ByteRange { start: 4096, len: 64 }).unwrap();
    let again = cache.region(&part, Access::LOCAL_WRITE).unwrap();
    assert_eq!(first.lkey(), again.lkey(), "a part of what is there");
    let ptr = owner.ptr();
    drop(owner);
    let other = gpu.alloc(BYTES).unwrap();
    assert_eq!(other.ptr(), ptr, "the address is used again");
    let fresh = cache.region(&foreign(&gpu, &other), Access::ALL).unwrap();
    assert_ne!(first.lkey(), fresh.lkey());
    let counts = cache.counts();
    assert_eq!((counts.hits, counts.misses, counts.stale), (1, 2, 1));
    // Bounded, and what it holds is freed with it.
    for _ in 0..4 {
        cache.region(&gpu.alloc(BYTES).unwrap(), Access::ALL).unwrap();
    }
    assert_eq!(cache.counts().evicted, 3);
    assert_eq!(gpu.usage().allocated, 3 * BYTES, "two in the cache, and `other`");
    cache.clear();
    assert_eq!(gpu.usage().allocated, BYTES);
}

/// What cannot be registered or exported, and why.
pub fn refusals() {
    let gpu = cuda(0);
    let (_a, b) = sides();
    let managed = gpu.alloc_managed(BYTES).unwrap();
    assert_eq!(b.pd.reg_gpu(&managed, Access::ALL).unwrap_err().code(), "memory-managed");
    assert_eq!(DmaBuf::export(&managed).unwrap_err().code(), "memory-managed");
    let plain = gpu.alloc(BYTES).unwrap();
    let exported = DmaBuf::export(&plain).unwrap();
    assert_eq!((exported.kind(), exported.len().unwrap()), (Kind::Cuda, BYTES));
    let part = plain.slice(ByteRange { start: 4096, len: 8192 }).unwrap();
    assert_eq!(DmaBuf::export(&part).unwrap().len().unwrap(), 8192, "the exact range");
    for (start, len) in [(64, 4096), (0, 100), (0, 0)] {
        let odd = plain.slice(ByteRange { start, len }).unwrap();
        assert_eq!(DmaBuf::export(&odd).unwrap_err().code(), "dmabuf-unaligned", "{start}+{len}");
    }
    let whole = gpu.alloc_shareable(2 << 20).unwrap();
    assert_eq!(DmaBuf::export(&whole).unwrap().len().unwrap(), 2 << 20);
    let pooled = gpu.stream().unwrap().alloc(BYTES).unwrap();
    let error = DmaBuf::export(&pooled).unwrap_err();
    assert_eq!(error.code(), "dmabuf-pool-memory");
    assert!(error.to_string().contains("CUDA_ERROR_NOT_SUPPORTED"), "{error}");
    // Memory that never moves: small, and within a budget.
    let held: Vec<_> =
        (0..16).map(|_| PinnedVram::alloc(&gpu, 1 << 20, "a queue").unwrap()).collect();
    assert_eq!(PinnedVram::budget_left(&gpu), 0);
    let error = PinnedVram::alloc(&gpu, 1, "one more").unwrap_err();
    assert!(error.is_out_of_memory() && error.code() == "vram-budget", "{error}");
    assert!(error.to_string().contains("held by a queue: 1048576"), "{error}");
    drop(held);
    assert_eq!(PinnedVram::budget_left(&gpu), BUDGET_BYTES);
    assert!(PinnedVram::alloc(&gpu, 0, "x").unwrap_err().is_refused());
    // A region is drained before its memory is used for something else.
    let mr = b.pd.reg_gpu(&plain, Access::ALL).unwrap();
    mr.drain(Instant::now() + WAIT).map_err(|(_, error)| error).unwrap();
}

/// A window is refused, with the reason: the mapping shows other bytes, or there is none. Regions work all the same.
fn no_window(reason: &str) {
    let gpu = cuda(0);
    let why = beeline::memory::window_refusal(&gpu).unwrap();
    assert!(why.contains(reason), "{why}");
    assert_eq!(gpu.usage().allocated, 0, "what was tried is given back");
    let (a, b) = sides();
    let buffer = gpu.alloc(BYTES).unwrap();
    fill(&gpu, &buffer, 5);
    let target = b.pd.reg_gpu(&buffer, Access::ALL).unwrap();
    assert_eq!(read(&a, &target), Ok(vec![5; BYTES as usize]));
}

pub fn window_of_other_bytes() {
    no_window("shows other bytes (what the CPU wrote)");
}

pub fn window_not_mapped() {
    no_window("maps no dma-buf of its memory for the CPU");
}
