//! The nine steps, over every link that the machine allows.

use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use beeline_sys::mem::HostMem;

use super::*;

mod device;
mod local;
mod soak;
mod trace;

const WAIT: Duration = Duration::from_secs(20);

/// Loopback addresses of this process's tests: each NIC needs one of its own.
fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(2);
    // Tests run in processes of their own as well as in threads of one.
    let process = (std::process::id() % 250) as u8;
    let subnet = (std::process::id() / 250 % 200) as u8 + 20;
    IpAddr::from([127, subnet, process, NEXT.fetch_add(1, Ordering::Relaxed)])
}

/// One side of a connection.
struct Side {
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    mem: Arc<HostMem>,
}

impl Side {
    fn new(nic: &Nic, bytes: usize) -> Self {
        Self::with(nic, HostMem::anonymous(bytes).unwrap())
    }

    fn with(nic: &Nic, mem: HostMem) -> Self {
        let context = nic.open();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(1024).unwrap();
        let qp = pd.create_qp(QpKind::Rc, &cq, &cq, QpCaps::default()).unwrap();
        let mem = Arc::new(mem);
        let mr = pd.reg_mr(Arc::clone(&mem), Access::ALL).unwrap();
        Self { context, pd, cq, qp, mr, mem }
    }

    fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read(offset, &mut bytes).unwrap();
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

fn joined(a: &Nic, b: &Nic, bytes: usize) -> (Side, Side) {
    connected(Side::new(a, bytes), Side::new(b, bytes))
}

fn connected(a: Side, b: Side) -> (Side, Side) {
    let (to_a, to_b) = (a.qp.endpoint().to_string(), b.qp.endpoint().to_string());
    // Long enough that a machine busy with other things does not use up the retries.
    let connect = Connect { timeout: 15, ..Connect::default() };
    a.qp.connect(&to_b.parse().unwrap(), &connect).unwrap();
    b.qp.connect(&to_a.parse().unwrap(), &connect).unwrap();
    (a, b)
}

/// Two NICs joined as those of two processes are.
fn local() -> (Nic, Nic) {
    let (a, b) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| Nic::local(b).unwrap());
        (Nic::local(a).unwrap(), other.join().unwrap())
    })
}

/// Both sides with memory that they can or cannot share.
fn local_sides(bytes: usize, shareable: [bool; 2]) -> (Side, Side) {
    let (a, b) = local();
    let [mem_a, mem_b] = shareable.map(|shareable| {
        let mem = if shareable { HostMem::shareable(bytes) } else { HostMem::anonymous(bytes) };
        mem.unwrap()
    });
    connected(Side::with(&a, mem_a), Side::with(&b, mem_b))
}

/// Over packets, and over shared memory with and without payload in place.
fn everywhere(bytes: usize, test: impl Fn(Side, Side)) {
    let (a, b) = Nic::pair(SoftOptions::new(address()), SoftOptions::new(address())).unwrap();
    let (a, b) = joined(&a, &b, bytes);
    test(a, b);
    for shareable in [true, false] {
        let (a, b) = local_sides(bytes, [shareable; 2]);
        test(a, b);
    }
}

pub(super) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

/// Every operation, over links of this kind, at this MTU, with these faults.
fn everything_works(a: &Nic, b: &Nic) {
    let (a, b) = joined(a, b, 8 << 20);
    everything_works_between(&a, &b);
}

fn everything_works_between(a: &Side, b: &Side) {
    let data = pattern(3 << 20, 7);
    a.mem.write(0, &data).unwrap();
    for (id, len) in [0u32, 1, 1023, 1024, 1025, 65_536, 3 << 20].into_iter().enumerate() {
        let id = id as u64;
        b.mem.fill(0, 8 << 20, 0).unwrap();
        a.post(id, SendOp::Write { remote: b.mr.remote_at(64), imm: None }, 0, len);
        assert_eq!((a.done().status, len), (Status::Success, len));
        assert_eq!(b.bytes(64, len as usize), data[..len as usize], "WRITE of {len}");
        a.post(id, SendOp::Read { remote: b.mr.remote_at(64) }, 4 << 20, len);
        assert_eq!(a.done().status, Status::Success);
        assert_eq!(a.bytes(4 << 20, len as usize), data[..len as usize], "READ of {len}");
        let sges = vec![b.mr.sge(4 << 20, 3 << 20).unwrap()];
        b.qp.post_recv(RecvWr { id, sges }).unwrap();
        a.post(id, SendOp::Send { imm: Some(len) }, 0, len);
        let received = b.done();
        assert_eq!((received.status, received.byte_len), (Status::Success, len));
        assert_eq!(received.imm, Some(len));
        assert_eq!(b.bytes(4 << 20, len as usize), data[..len as usize], "SEND of {len}");
        assert_eq!(a.done().wr_id, id);
    }
    b.mem.store_u64(8, 40).unwrap();
    a.post(1, SendOp::FetchAdd { remote: b.mr.remote_at(8), add: 2 }, 128, 8);
    assert_eq!(a.done().status, Status::Success);
    assert_eq!((a.mem.load_u64(128).unwrap(), b.mem.load_u64(8).unwrap()), (40, 42));
    let swap = SendOp::CompareSwap { remote: b.mr.remote_at(8), compare: 42, swap: 1 };
    a.post(2, swap, 128, 8);
    assert_eq!(a.done().status, Status::Success);
    assert_eq!((a.mem.load_u64(128).unwrap(), b.mem.load_u64(8).unwrap()), (42, 1));
}

#[test]
fn two_nics_joined_in_memory() {
    let (a, b) = Nic::pair(SoftOptions::new(address()), SoftOptions::new(address())).unwrap();
    let resolved = a.open().resolved();
    assert_eq!((resolved.link, resolved.why.as_str()), (LinkKind::Pair, "icrc-full"));
    everything_works(&a, &b);
}

#[test]
fn every_mtu() {
    for mtu in Mtu::ALL {
        let options = || SoftOptions::new(address()).mtu(mtu);
        let (a, b) = Nic::pair(options(), options()).unwrap();
        everything_works(&a, &b);
    }
}

#[test]
fn a_bad_network() {
    let faults = Faults {
        seed: 1,
        loss: 10,
        duplication: 10,
        reorder: 10,
        corruption: 5,
        delay: Duration::from_micros(5),
    };
    let options = || SoftOptions::new(address()).faults(faults);
    let (a, b) = Nic::pair(options(), options()).unwrap();
    everything_works(&a, &b);
    assert!(a.open().counters().repeats > 0);
}

#[test]
fn udp_sockets_need_no_privilege() {
    let nic = || Nic::soft(SoftOptions::new(address()).link(LinkKind::Udp)).unwrap();
    let (a, b) = (nic(), nic());
    let resolved = a.open().resolved();
    assert_eq!((resolved.link, resolved.check), (LinkKind::Udp, Strength::Half));
    assert_eq!(resolved.why.as_str(), "icrc-half");
    assert_eq!(resolved.segmentation, Segmentation::Loopback);
    everything_works(&a, &b);
    assert_eq!(a.open().resolved().segmentation, Segmentation::Loopback, "the kernel took all");
    assert_eq!(a.open().counters().icrc_errors, 0);
    assert!(a.open().counters().icrc_half > 0);
}

#[test]
fn raw_sockets_check_in_full() {
    let nic = || Nic::soft(SoftOptions::new(address()).link(LinkKind::Raw));
    let (a, b) = match (nic(), nic()) {
        (Ok(a), Ok(b)) => (a, b),
        (Err(error), _) if error.is_permission_denied() => {
            println!("SKIP CAP_NET_RAW");
            return;
        }
        (a, b) => panic!("{a:?} {b:?}"),
    };
    let resolved = a.open().resolved();
    assert_eq!((resolved.check, resolved.why.as_str()), (Strength::Full, "icrc-full"));
    everything_works(&a, &b);
    let counters = a.open().counters();
    assert_eq!((counters.icrc_errors, counters.icrc_half), (0, 0));
    assert!(counters.icrc_full > 0);
}

#[test]
fn a_taken_address_is_an_error_that_names_it() {
    let local = address();
    let first = Nic::soft(SoftOptions::new(local).link(LinkKind::Udp)).unwrap();
    let error = Nic::soft(SoftOptions::new(local).link(LinkKind::Udp)).unwrap_err();
    assert!(error.is_refused());
    assert_eq!(error.code(), "address-in-use");
    assert!(error.to_string().contains(&local.to_string()), "{error}");
    drop(first);
    Nic::soft(SoftOptions::new(local).link(LinkKind::Udp)).unwrap();
    let foreign = IpAddr::from([192, 0, 2, 1]);
    let error = Nic::soft(SoftOptions::new(foreign).link(LinkKind::Udp)).unwrap_err();
    assert_eq!(error.code(), "address-not-local");
}
