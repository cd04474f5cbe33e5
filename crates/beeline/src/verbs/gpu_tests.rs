//! GPU memory as regions, on simulated devices of every profile, over packets and shared memory.

mod staged;

use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use super::tests::pattern;
use super::*;
use crate::config::SimConfig;
use crate::gpu::sim::{Effect, Site};
use crate::gpu::{Buffer, Gpu, Profile};
use crate::memory::Atomicity;

const WAIT: Duration = Duration::from_secs(20);
const BYTES: u64 = 10 << 20;

fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(2);
    IpAddr::from([127, 19, (std::process::id() % 250) as u8, NEXT.fetch_add(1, Ordering::Relaxed)])
}

fn gpu(profile: Profile) -> Gpu {
    let mut config = SimConfig::default();
    (config.profile, config.memory_bytes) = (profile, 64 << 20);
    Gpu::simulated(&config).unwrap()
}

/// One side of a connection.
struct Side {
    gpu: Gpu,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    buffer: Buffer,
}

impl Side {
    fn new(nic: &Nic, profile: Profile, dynamic: bool) -> Self {
        Self::on(nic, gpu(profile), dynamic)
    }

    fn on(nic: &Nic, gpu: Gpu, dynamic: bool) -> Self {
        let context = nic.open();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(1024).unwrap();
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default()).unwrap();
        let buffer = gpu.alloc(BYTES).unwrap();
        let mr = match dynamic {
            true => pd.reg_gpu_dynamic(&buffer, Access::ALL),
            false => pd.reg_gpu(&buffer, Access::ALL),
        };
        Self { gpu, pd, cq, qp, mr: mr.unwrap(), buffer }
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        let pinned = self.gpu.pin(bytes.len() as u64).unwrap();
        pinned.mem().write(0, bytes).unwrap();
        let stream = self.gpu.stream().unwrap();
        stream.copy_to_device(&self.buffer, offset, &pinned, 0, bytes.len() as u64).unwrap();
        stream.synchronize(Instant::now() + WAIT).unwrap();
    }

    fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let pinned = self.gpu.pin(len as u64).unwrap();
        let stream = self.gpu.stream().unwrap();
        stream.copy_to_host(&pinned, 0, &self.buffer, offset, len as u64).unwrap();
        stream.synchronize(Instant::now() + WAIT).unwrap();
        let mut bytes = vec![0; len];
        pinned.mem().read(0, &mut bytes).unwrap();
        bytes
    }

    fn post(&self, id: u64, op: SendOp, offset: u64, len: u32) {
        let payload = Payload::Sges(vec![self.mr.sge(offset, len).unwrap()]);
        self.qp.post_send(SendWr::new(id, op, payload)).unwrap();
    }

    fn done(&self) -> Completion {
        self.cq.wait(WAIT).unwrap()
    }
}

fn connected(a: Side, b: Side) -> (Side, Side) {
    // Copies of simulated devices take long under a sanitizer, and nothing is lost here.
    let connect = Connect { timeout: 20, ..Connect::default() };
    a.qp.connect(&b.qp.endpoint(), &connect).unwrap();
    b.qp.connect(&a.qp.endpoint(), &connect).unwrap();
    (a, b)
}

fn nics(local: bool) -> (Nic, Nic) {
    if !local {
        return Nic::pair(SoftOptions::new(address()), SoftOptions::new(address())).unwrap();
    }
    let (a, b) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| Nic::local(b).unwrap());
        (Nic::local(a).unwrap(), other.join().unwrap())
    })
}

/// What a program may expect of any pair of regions.
fn everything(a: &Side, b: &Side) {
    let data = pattern(5 << 20, 7);
    a.put(0, &data);
    for (id, len) in [1u32, 8, 1023, 4097, 65_536, 5 << 20].into_iter().enumerate() {
        let (id, size) = (id as u64, len as usize);
        b.put(0, &vec![0; 6 << 20]);
        a.post(id, SendOp::Write { remote: b.mr.remote_at(64), imm: None }, 0, len);
        assert_eq!((a.done().status, len), (Status::Success, len));
        assert_eq!(b.get(0, 64), [0; 64]);
        assert!(b.get(64, size) == data[..size], "WRITE of {len}");
        assert_eq!(b.get(64 + u64::from(len), 64), [0; 64], "nothing behind it");
        a.post(id, SendOp::Read { remote: b.mr.remote_at(64) }, 5 << 20, len);
        assert_eq!(a.done().status, Status::Success);
        assert!(a.get(5 << 20, size) == data[..size], "READ of {len}");
        let sges = vec![b.mr.sge(128, len).unwrap()];
        b.qp.post_recv(RecvWr { id, sges }).unwrap();
        a.post(id, SendOp::Send { imm: None }, 0, len);
        assert_eq!(a.done().status, Status::Success);
        assert_eq!((b.done().status, len), (Status::Success, len));
        assert!(b.get(128, size) == data[..size], "SEND of {len}");
    }
    // Order: a READ behind a WRITE of the same place sees it, without a wait between.
    for turn in 0..20u8 {
        a.put(0, &pattern(100_000, turn));
        a.post(1, SendOp::Write { remote: b.mr.remote_at(0), imm: None }, 0, 100_000);
        a.post(2, SendOp::Read { remote: b.mr.remote_at(0) }, 1 << 20, 100_000);
        assert_eq!((a.done().status, a.done().status), (Status::Success, Status::Success));
        assert!(a.get(1 << 20, 100_000) == pattern(100_000, turn), "turn {turn}");
    }
    b.put(8, &40u64.to_ne_bytes());
    for turn in 0..10u64 {
        a.post(turn, SendOp::FetchAdd { remote: b.mr.remote_at(8), add: 1 }, 16, 8);
        assert_eq!(a.done().status, Status::Success);
        assert_eq!(a.get(16, 8), (40 + turn).to_ne_bytes(), "what was there before");
    }
    let swap = |compare, swap| SendOp::CompareSwap { remote: b.mr.remote_at(8), compare, swap };
    a.post(1, swap(51, 7), 16, 8);
    a.post(2, swap(50, 9), 24, 8);
    assert_eq!((a.done().status, a.done().status), (Status::Success, Status::Success));
    assert_eq!(
        (a.get(16, 8), a.get(24, 8)),
        (50u64.to_ne_bytes().into(), 50u64.to_ne_bytes().into())
    );
    assert_eq!(b.get(8, 8), 9u64.to_ne_bytes());
}

#[test]
fn gpu_memory_is_a_region_like_any_other() {
    for local in [false, true] {
        for (profile, dynamic) in [
            (Profile::Plain, false),
            (Profile::Bar, false),
            (Profile::Movable, false),
            (Profile::Movable, true),
        ] {
            let (nic_a, nic_b) = nics(local);
            let (a, b) = connected(
                Side::new(&nic_a, profile, dynamic),
                Side::new(&nic_b, Profile::Plain, false),
            );
            everything(&a, &b);
            everything(&b, &a);
            assert_eq!(a.mr.atomicity(), Atomicity::System);
            assert!(!a.mr.flush().unwrap().needed);
        }
    }
}

#[test]
fn lists_of_host_and_device_memory_are_gathered_in_order() {
    for local in [false, true] {
        let (nic_a, nic_b) = nics(local);
        let (a, b) = connected(
            Side::new(&nic_a, Profile::Plain, false),
            Side::new(&nic_b, Profile::Bar, false),
        );
        let host = Arc::new(HostMem::shareable(1 << 20).unwrap());
        let host_mr = a.pd.reg_mr(Arc::clone(&host), Access::ALL).unwrap();
        host.write(0, &pattern(70_000, 1)).unwrap();
        a.put(0, &pattern(70_000, 2));
        let sges = vec![host_mr.sge(0, 70_000).unwrap(), a.mr.sge(0, 70_000).unwrap()];
        let op = SendOp::Write { remote: b.mr.remote_at(4), imm: None };
        a.qp.post_send(SendWr::new(1, op, Payload::Sges(sges))).unwrap();
        assert_eq!(a.done().status, Status::Success);
        let expected = [pattern(70_000, 1), pattern(70_000, 2)].concat();
        assert!(b.get(4, 140_000) == expected);
        // And back, into both.
        host.fill(0, 1 << 20, 0).unwrap();
        a.put(0, &[0; 70_000]);
        let sges = vec![a.mr.sge(0, 70_000).unwrap(), host_mr.sge(0, 70_000).unwrap()];
        let op = SendOp::Read { remote: b.mr.remote_at(4) };
        a.qp.post_send(SendWr::new(2, op, Payload::Sges(sges))).unwrap();
        assert_eq!(a.done().status, Status::Success);
        let mut bytes = vec![0; 70_000];
        host.read(0, &mut bytes).unwrap();
        assert!(a.get(0, 70_000) == expected[..70_000] && bytes == expected[70_000..]);
    }
}

/// Lets the NIC at `to` read the region of `from` where it lies, as after an import of it.
fn lend((from, side): (&Nic, &Side), to: &Nic, number: u64) {
    let number = 1 << 63 | number;
    let (Nic::Soft(from), Nic::Soft(to)) = (from, to) else { unreachable!() };
    let lkey = side.mr.lkey();
    from.soft.shared.with(|core| {
        let region = *core.regions.get(&lkey).unwrap();
        core.memories.lend(region, number);
    });
    to.soft.shared.with(|core| core.memories.borrow(number, side.buffer.clone()));
}

#[test]
fn memory_that_the_peer_has_mapped_goes_from_gpu_to_gpu() {
    let one = gpu(Profile::Plain);
    // The same GPU at both ends, and another one, which the mapping is not for.
    for other in [one.clone(), gpu(Profile::Plain)] {
        let (nic_a, nic_b) = nics(true);
        let sides = (Side::on(&nic_a, one.clone(), false), Side::on(&nic_b, other, false));
        let (a, b) = connected(sides.0, sides.1);
        lend((&nic_a, &a), &nic_b, 1);
        lend((&nic_b, &b), &nic_a, 1);
        everything(&a, &b);
        everything(&b, &a);
    }
}

#[test]
fn host_memory_takes_what_lies_on_a_gpu_of_the_peer() {
    let (nic_a, nic_b) = nics(true);
    let (a, b) = connected(
        Side::new(&nic_a, Profile::Plain, false),
        Side::new(&nic_b, Profile::Plain, false),
    );
    lend((&nic_a, &a), &nic_b, 1);
    let host = Arc::new(HostMem::shareable(6 << 20).unwrap());
    let target = b.pd.reg_mr(Arc::clone(&host), Access::ALL).unwrap();
    for (seed, len) in [(1, 600_u32), (2, 70_001), (3, 5 << 20)] {
        let data = pattern(len as usize, seed);
        a.put(0, &data);
        host.fill(0, 6 << 20, 0).unwrap();
        a.post(1, SendOp::Write { remote: target.remote_at(3), imm: None }, 0, len);
        assert_eq!(a.done().status, Status::Success);
        let mut bytes = vec![9; len as usize + 4];
        host.read(0, &mut bytes).unwrap();
        assert!(bytes[3..len as usize + 3] == data && bytes[..3] == [0; 3], "{len}");
        assert_eq!(bytes.last(), Some(&0));
    }
}

/// Few bytes through a mapping, more by the copy engine, atomics by a kernel: in the order of the queue pair.
#[test]
fn mapped_memory_is_a_region_like_any_other() {
    for local in [false, true] {
        let (nic_a, nic_b) = nics(local);
        let sides = [&nic_a, &nic_b].map(|nic| {
            let mut side = Side::new(nic, Profile::Bar, false);
            let mapped = crate::memory::GpuMemory::mapped(&side.buffer).unwrap();
            assert!(mapped.in_place(256) && !mapped.in_place(257) && !mapped.atomic_in_place());
            side.mr = side.pd.reg_mr(Arc::new(mapped), Access::ALL).unwrap();
            side
        });
        let [a, b] = sides;
        let (a, b) = connected(a, b);
        everything(&a, &b);
        everything(&b, &a);
        assert_eq!(a.mr.atomicity(), Atomicity::System);
    }
}

#[test]
fn pinned_memory_does_not_move_and_says_who_holds_it() {
    let (nic, _other) = nics(false);
    let side = Side::new(&nic, Profile::Movable, false);
    let error = side.gpu.as_sim().unwrap().relocate(&side.buffer).unwrap_err();
    assert_eq!((error.is_refused(), error.code()), (true, "memory-pinned"));
    let holder = format!("a memory region of NIC {}", nic.open().local());
    assert!(error.to_string().contains(&holder), "{error}");
    let (device, buffer) = (side.gpu.clone(), side.buffer.clone());
    drop(side);
    device.as_sim().unwrap().relocate(&buffer).unwrap();
    let plain = gpu(Profile::Plain);
    let pd = nic.open().alloc_pd().unwrap();
    let error = pd.reg_gpu_dynamic(&plain.alloc(4096).unwrap(), Access::ALL).unwrap_err();
    assert_eq!(error.code(), "dynamic-unsupported");
}

#[test]
fn a_nic_ends_though_a_copy_does_not_and_the_copy_keeps_its_memory() {
    let (nic_a, nic_b) = nics(false);
    let (a, b) = connected(
        Side::new(&nic_a, Profile::Plain, false),
        Side::new(&nic_b, Profile::Plain, false),
    );
    let gpu = b.gpu.clone();
    let faults = gpu.as_sim().unwrap().faults();
    faults.arm(Site::Copy, 0, Effect::Stall);
    a.post(1, SendOp::Write { remote: b.mr.remote_at(0), imm: None }, 0, 4096);
    let end = Instant::now() + WAIT;
    while faults.stalled() == 0 {
        assert!(Instant::now() < end, "the copy has not begun");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop((a, b, nic_a, nic_b));
    assert_eq!(faults.stalled(), 1);
    assert!(gpu.usage().allocated >= BYTES);
    faults.release();
    let end = Instant::now() + WAIT;
    while gpu.usage().allocated > 0 {
        assert!(Instant::now() < end, "{} bytes are still held", gpu.usage().allocated);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn memory_outlives_its_last_handle_while_it_is_registered() {
    let (nic, _other) = nics(false);
    let Side { gpu, mr, buffer, .. } = Side::new(&nic, Profile::Plain, false);
    drop(buffer);
    assert_eq!(gpu.usage().allocated, BYTES, "the region holds it");
    drop(mr);
    assert_eq!(gpu.usage().allocated, 0);
}
