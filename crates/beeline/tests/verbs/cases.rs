//! The cases: what every pair of NICs does, whichever they are. They use the public interface only.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline::verbs::{
    Access, AsyncEvent, CompletionOp, Destination, GRH_LEN, HostMem, Lkey, Payload, Psn, QpAttr,
    QpCaps, QpKind, QpState, RecvWr, Remote, Rkey, SendOp, SendWr, Sge, Status,
};

use super::side::{Side, WAIT, connect, pattern, usual};

/// What a pair of NICs has, and the cases it is told apart by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Can {
    /// Datagrams. The local link has none.
    pub(crate) datagrams: bool,
    /// The responder raises an event for an access that it refuses. `rdma_rxe` only moves the queue pair
    /// to ERR.
    pub(crate) access_event: bool,
    /// A completion queue holds exactly as many completions as were asked for. The kernel's may hold more.
    pub(crate) exact_cq: bool,
    /// A receive into a region that was revoked ends with this.
    pub(crate) revoked: Status,
}

impl Can {
    /// NICs in software.
    pub(crate) const SOFT: Self = Self {
        datagrams: true,
        access_event: true,
        exact_cq: true,
        revoked: Status::LocalProtection,
    };
}

/// A case, over two sides that are connected.
pub(crate) type Case = fn(&Side, &Side, Can);

pub(crate) const CASES: &[(&str, Case)] = &[
    ("bytes of every size", bytes_of_every_size),
    ("immediate data", immediate_data),
    ("several elements", several_elements),
    ("inline data is read when it is posted", inline_data),
    ("a READ sees nothing of what was posted behind it", read_before_write),
    ("errors are typed", errors_are_typed),
    ("a refused access", a_refused_access),
    ("keys, bounds and rights", keys_bounds_and_rights),
    ("a receiver that is not ready", not_ready),
    ("not every send tells", not_every_send_tells),
    ("a sleeper is woken", a_sleeper_is_woken),
    ("a receive queue is full", a_receive_queue_is_full),
    ("a completion queue is overrun", a_completion_queue_is_overrun),
    ("a shared receive queue", a_shared_receive_queue),
    ("a queue pair goes in the middle of a message", goes_in_the_middle),
    ("what is posted is flushed", what_is_posted_is_flushed),
    ("a queue pair is used again", a_queue_pair_is_used_again),
    ("a region in use", a_region_in_use),
    ("a region is taken away", a_region_is_taken_away),
    ("order is relaxed for bulk memory only", order_is_relaxed),
    ("datagrams", datagrams),
];

fn bytes_of_every_size(a: &Side, b: &Side, _: Can) {
    let data = pattern(1 << 20, 7);
    a.mem.write(0, &data).unwrap();
    for (id, len) in [0u32, 1, 1023, 1024, 1025, 4097, 65_536, 1 << 20].into_iter().enumerate() {
        let (id, all) = (id as u64, &data[..len as usize]);
        for (side, at) in [(a, 4 << 20), (b, 4 << 20), (b, 0)] {
            side.mem.fill(at, u64::from(len) + 128, 0).unwrap();
        }
        a.post(id, SendOp::Write { remote: b.mr.remote_at(64), imm: None }, 0, len);
        let done = a.good(id);
        assert_eq!((done.op, done.byte_len, done.qpn), (CompletionOp::Write, len, a.qp.qpn()));
        assert!(b.bytes(64, len as usize) == all, "WRITE of {len}");
        a.post(id, SendOp::Read { remote: b.mr.remote_at(64) }, 4 << 20, len);
        assert_eq!(a.good(id).op, CompletionOp::Read);
        assert!(a.bytes(4 << 20, len as usize) == all, "READ of {len}");
        b.qp.post_recv(b.recv(id, 4 << 20, 1 << 20)).unwrap();
        a.post(id, SendOp::Send { imm: None }, 0, len);
        let received = b.good(id);
        assert_eq!((received.op, received.byte_len), (CompletionOp::Recv, len));
        assert!(b.bytes(4 << 20, len as usize) == all, "SEND of {len}");
        assert_eq!(a.good(id).op, CompletionOp::Send);
    }
    b.mem.store_u64(8, 40).unwrap();
    a.post(1, SendOp::FetchAdd { remote: b.mr.remote_at(8), add: 2 }, 128, 8);
    assert_eq!(a.good(1).op, CompletionOp::FetchAdd);
    assert_eq!((a.mem.load_u64(128).unwrap(), b.mem.load_u64(8).unwrap()), (40, 42));
    for (compare, before, after) in [(42, 42, 1), (42, 1, 1)] {
        let swap = SendOp::CompareSwap { remote: b.mr.remote_at(8), compare, swap: 1 };
        a.post(2, swap, 128, 8);
        assert_eq!(a.good(2).op, CompletionOp::CompareSwap);
        assert_eq!((a.mem.load_u64(128).unwrap(), b.mem.load_u64(8).unwrap()), (before, after));
    }
}

fn immediate_data(a: &Side, b: &Side, _: Can) {
    a.mem.write(0, &pattern(5000, 3)).unwrap();
    for (id, imm) in [(1, 0), (2, 0x1234_5678), (3, u32::MAX)] {
        b.qp.post_recv(b.recv(id, 0, 8192)).unwrap();
        a.post(id, SendOp::Send { imm: Some(imm) }, 0, 5000);
        let received = b.good(id);
        assert_eq!((received.op, received.imm), (CompletionOp::Recv, Some(imm)));
        assert_eq!(a.good(id).imm, None, "the sender gave it");
        // Consumes a receive, and writes none of its bytes.
        b.qp.post_recv(b.recv(id, 0, 8)).unwrap();
        a.post(id, SendOp::Write { remote: b.mr.remote_at(65_536), imm: Some(imm) }, 0, 5000);
        let received = b.good(id);
        assert_eq!((received.op, received.imm), (CompletionOp::RecvWriteImm, Some(imm)));
        assert_eq!((received.byte_len, a.good(id).status), (5000, Status::Success));
        assert!(b.bytes(65_536, 5000) == pattern(5000, 3));
    }
}

fn several_elements(a: &Side, b: &Side, _: Can) {
    let data = pattern(10_000, 9);
    let places = [(0, 3000_u32), (100_000, 0), (200_001, 4095), (300_000, 2905)];
    let mut at = 0;
    for (offset, len) in places {
        a.mem.write(offset, &data[at..at + len as usize]).unwrap();
        at += len as usize;
    }
    let sges = |side: &Side| -> Vec<_> {
        places.iter().map(|(offset, len)| side.mr.sge(*offset, *len).unwrap()).collect()
    };
    b.qp.post_recv(RecvWr { id: 7, sges: sges(b) }).unwrap();
    let op = SendOp::Send { imm: None };
    a.qp.post_send(SendWr::new(7, op, Payload::Sges(sges(a)))).unwrap();
    assert_eq!((b.good(7).byte_len, a.good(7).byte_len), (10_000, 10_000));
    let all: Vec<u8> =
        places.iter().flat_map(|(offset, len)| b.bytes(*offset, *len as usize)).collect();
    assert!(all == data);
}

fn inline_data(a: &Side, b: &Side, _: Can) {
    a.mem.write(0, b"inlined!").unwrap();
    let op = SendOp::Write { remote: b.mr.remote_at(0), imm: None };
    a.qp.post_send_inline(a.wr(1, op, 0, 8)).unwrap();
    a.mem.fill(0, 8, 0).unwrap();
    a.good(1);
    assert_eq!(b.bytes(0, 8), b"inlined!");
    a.qp.post_send(SendWr::new(2, op, Payload::Inline(b"elsewhere".to_vec()))).unwrap();
    a.good(2);
    assert_eq!(b.bytes(0, 9), b"elsewhere");
    let long = SendWr::new(3, op, Payload::Inline(vec![0; 221]));
    assert_eq!(a.qp.post_send(long).unwrap_err().code(), "work-request");
}

fn read_before_write(a: &Side, b: &Side, _: Can) {
    const LEN: u32 = 1 << 18;
    for turn in 0..10_u8 {
        b.mem.fill(0, u64::from(LEN), turn).unwrap();
        a.mem.fill(0, u64::from(LEN), 100 + turn).unwrap();
        a.post(1, SendOp::Read { remote: b.mr.remote_at(0) }, 2 << 20, LEN);
        a.post(2, SendOp::Write { remote: b.mr.remote_at(0), imm: None }, 0, LEN);
        a.good(1);
        a.good(2);
        assert!(a.bytes(2 << 20, LEN as usize) == vec![turn; LEN as usize]);
        assert!(b.bytes(0, LEN as usize) == vec![100 + turn; LEN as usize]);
    }
}

fn errors_are_typed(a: &Side, b: &Side, _: Can) {
    let error = a.qp.modify(QpState::Rtr, &QpAttr::default()).unwrap_err();
    assert_eq!(error.code(), "qp-transition");
    let fresh = a.qp();
    let error = fresh.modify(QpState::Init, &QpAttr::default()).unwrap_err();
    assert_eq!(error.code(), "qp-attributes");
    assert!(error.to_string().contains("missing pkey_index, port, access"), "{error}");
    assert_eq!(fresh.post_recv(a.recv(1, 0, 8)).unwrap_err().code(), "qp-state");
    let send = |id| a.wr(id, SendOp::Send { imm: None }, 0, 8);
    assert_eq!(fresh.post_send(send(1)).unwrap_err().code(), "qp-state");
    fresh.init(&usual()).unwrap();
    assert_eq!(fresh.state(), QpState::Init);
    assert_eq!(fresh.post_send(send(1)).unwrap_err().code(), "qp-state");
    let attr = QpAttr {
        peer: Some(b.context.local()),
        path_mtu: Some(a.context.mtu()),
        dest_qpn: Some(b.qp.qpn()),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(255),
        min_rnr_timer: Some(usual().min_rnr_timer),
        ..QpAttr::default()
    };
    let error = fresh.modify(QpState::Rtr, &attr).unwrap_err();
    assert_eq!(error.code(), "qp-attribute-value", "{error}");
    assert!(error.to_string().contains("max_dest_rd_atomic 255"), "{error}");
    assert_eq!(fresh.state(), QpState::Init, "nothing has changed");
    let create = |caps| a.pd.create_qp(QpKind::Rc, &a.cq, &a.cq, caps);
    assert!(create(QpCaps { max_send_wr: 0, ..QpCaps::default() }).unwrap_err().is_refused());
    assert!(create(QpCaps { max_send_sge: 999, ..QpCaps::default() }).unwrap_err().is_refused());
    assert!(a.context.create_cq(0).unwrap_err().is_refused());
    assert!(a.pd.create_qp(QpKind::Rc, &b.cq, &a.cq, QpCaps::default()).is_err());
    let stranger = a.context.alloc_pd().unwrap();
    let srq = stranger.create_srq(8, 1).unwrap();
    let crossed = a.pd.create_qp_with_srq(QpKind::Rc, &a.cq, &a.cq, QpCaps::default(), &srq);
    assert!(crossed.unwrap_err().to_string().contains("protection domain"));
    let error = a.pd.reg_mr(Arc::clone(&a.mem), Access::REMOTE_WRITE).unwrap_err();
    assert!(error.is_refused() && error.to_string().contains("local"), "{error}");
    let short = a.wr(1, SendOp::FetchAdd { remote: b.mr.remote_at(0), add: 1 }, 0, 4);
    assert_eq!(a.qp.post_send(short).unwrap_err().code(), "work-request");
    let op = SendOp::SendInvalidate { rkey: Rkey::new(1) };
    assert_eq!(a.qp.post_send(a.wr(1, op, 0, 4)).unwrap_err().code(), "unsupported");
}

fn a_refused_access(a: &Side, b: &Side, can: Can) {
    let remote = Remote { rkey: Rkey::new(0), ..b.mr.remote_at(0) };
    a.post(1, SendOp::Write { remote, imm: None }, 0, 8);
    a.post(2, SendOp::Write { remote: b.mr.remote_at(0), imm: None }, 0, 8);
    assert_eq!(a.done().status, Status::RemoteAccess);
    let flushed = a.done();
    assert_eq!((flushed.wr_id, flushed.status), (2, Status::Flushed));
    if can.access_event {
        assert_eq!(b.event(), Some(AsyncEvent::QpAccessError(b.qp.qpn())));
    }
    assert_eq!(a.qp.state(), QpState::Err);
    // The peer's may be a little behind its refusal.
    assert!(soon(|| b.qp.state() == QpState::Err));
}

/// Whether it comes about within a while.
fn soon(mut is: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + WAIT;
    while !is() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Every way to be refused, each on queue pairs of its own.
fn keys_bounds_and_rights(a: &Side, b: &Side, _: Can) {
    let with = |access| {
        let mem = Arc::new(HostMem::anonymous(4096).unwrap());
        b.pd.reg_mr(mem, access).unwrap()
    };
    let (read, write) =
        (Access::LOCAL_WRITE | Access::REMOTE_READ, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let (readable, writable) = (with(read), with(write));
    let end = Remote { addr: b.mr.remote_at(b.mr.len() - 4).addr, rkey: b.mr.rkey() };
    let to = |remote| SendOp::Write { remote, imm: None };
    let from = |remote| SendOp::Read { remote };
    let add = |remote| SendOp::FetchAdd { remote, add: 1 };
    let mut other = usual();
    other.access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let cases = [
        (
            "a key of nobody's",
            from(Remote { rkey: Rkey::new(0), ..end }),
            usual(),
            Status::RemoteAccess,
        ),
        ("over the end", to(end), usual(), Status::RemoteAccess),
        ("no right to write", to(readable.remote_at(0)), usual(), Status::RemoteAccess),
        ("no right to read", from(writable.remote_at(0)), usual(), Status::RemoteAccess),
        ("no right to atomics", add(writable.remote_at(0)), usual(), Status::RemoteAccess),
        (
            "the queue pair does not allow it",
            to(b.mr.remote_at(0)),
            other,
            Status::RemoteInvalidRequest,
        ),
    ];
    for (what, op, of_b, expected) in cases {
        let (at_a, at_b) = (a.qp(), b.qp());
        connect(&at_a, &at_b, (&usual(), &of_b));
        at_a.post_send(a.wr(1, op, 0, 8)).unwrap();
        assert_eq!(a.done().status, expected, "{what}");
        assert_eq!(at_a.state(), QpState::Err, "{what}");
    }
}

fn not_ready(a: &Side, b: &Side, _: Can) {
    let mut impatient = usual();
    impatient.rnr_retry = 0;
    let (at_a, at_b) = (a.qp(), b.qp());
    connect(&at_a, &at_b, (&impatient, &usual()));
    at_a.post_send(a.wr(1, SendOp::Send { imm: None }, 0, 8)).unwrap();
    assert_eq!(a.done().status, Status::RnrRetryExceeded);
    // The patient one waits until a receive is there.
    a.mem.write(0, b"patience").unwrap();
    a.post(2, SendOp::Send { imm: None }, 0, 8);
    std::thread::sleep(Duration::from_millis(5));
    assert!(b.cq.poll().unwrap().is_none());
    b.qp.post_recv(b.recv(3, 64, 8)).unwrap();
    b.good(3);
    a.good(2);
    assert_eq!(b.bytes(64, 8), b"patience");
}

/// Places of the queue are free again when a later send tells.
fn not_every_send_tells(a: &Side, b: &Side, _: Can) {
    let op = SendOp::Write { remote: b.mr.remote_at(0), imm: None };
    for id in 0..512 {
        let signaled = id % 64 == 63;
        a.qp.post_send(SendWr { signaled, ..a.wr(id, op, 0, 64) }).unwrap();
        if signaled {
            a.good(id);
        }
    }
    assert!(a.cq.poll().unwrap().is_none());
}

fn a_sleeper_is_woken(a: &Side, b: &Side, _: Can) {
    let error = a.cq.wait(Duration::from_millis(5)).unwrap_err();
    assert!(error.is_timeout());
    b.qp.post_recv(b.recv(9, 0, 64)).unwrap();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| b.cq.wait(WAIT).unwrap().wr_id);
        std::thread::sleep(Duration::from_millis(20));
        a.post(1, SendOp::Send { imm: None }, 0, 64);
        assert_eq!(sleeper.join().unwrap(), 9);
    });
    a.good(1);
}

fn a_receive_queue_is_full(a: &Side, _: &Side, _: Can) {
    let max = u64::from(QpCaps::default().max_recv_wr);
    for id in 0..max {
        a.qp.post_recv(a.recv(id, 0, 8)).unwrap();
    }
    assert_eq!(a.qp.post_recv(a.recv(max, 0, 8)).unwrap_err().code(), "queue-full");
    let many = RecvWr { id: 0, sges: vec![a.mr.sge(0, 1).unwrap(); 5] };
    assert_eq!(a.qp.post_recv(many).unwrap_err().code(), "work-request");
}

fn a_completion_queue_is_overrun(a: &Side, b: &Side, can: Can) {
    let small = a.context.create_cq(1).unwrap();
    let qp = a.pd.create_qp(QpKind::Rc, &small, &small, QpCaps::default()).unwrap();
    let peer = b.qp();
    connect(&qp, &peer, (&usual(), &usual()));
    let op = SendOp::Write { remote: b.mr.remote_at(0), imm: None };
    for id in 0..if can.exact_cq { 2 } else { 100 } {
        qp.post_send(a.wr(id, op, 0, 8)).unwrap();
    }
    while a.event().expect("an event of the overrun") != AsyncEvent::CqError {}
    let (mut taken, mut last) = (0, 0);
    let error = loop {
        match small.poll() {
            Ok(Some(done)) => {
                assert_eq!(done.status, Status::Success);
                // The kernel's goes on where there is room again: what was lost is missing in between.
                assert!(done.wr_id == taken || (done.wr_id > last && !can.exact_cq), "{done:?}");
                (taken, last) = (taken + 1, done.wr_id);
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), "cq-overrun");
    assert!(taken >= 1 && (taken == 1 || !can.exact_cq), "{taken} taken");
}

fn a_shared_receive_queue(a: &Side, b: &Side, _: Can) {
    let srq = b.pd.create_srq(8, 1).unwrap();
    let caps = QpCaps::default();
    let make = || b.pd.create_qp_with_srq(QpKind::Rc, &b.cq, &b.cq, caps, &srq).unwrap();
    let pairs = [(a.qp(), make()), (a.qp(), make())];
    for (at_a, at_b) in &pairs {
        connect(at_a, at_b, (&usual(), &usual()));
        assert_eq!(at_b.post_recv(b.recv(1, 0, 8)).unwrap_err().code(), "work-request");
    }
    for id in 0..8 {
        srq.post_recv(b.recv(id, id * 64, 64)).unwrap();
    }
    assert_eq!(srq.post_recv(b.recv(8, 0, 64)).unwrap_err().code(), "queue-full");
    srq.arm(6).unwrap();
    let mut seen = Vec::new();
    for id in 0..8_u8 {
        let (at_a, at_b) = &pairs[usize::from(id % 2)];
        a.mem.fill(0, 64, id).unwrap();
        at_a.post_send(a.wr(u64::from(id), SendOp::Send { imm: None }, 0, 64)).unwrap();
        a.good(u64::from(id));
        let received = b.done();
        assert_eq!((received.status, received.qpn), (Status::Success, at_b.qpn()));
        assert_eq!(b.bytes(received.wr_id * 64, 64), [id; 64]);
        seen.push(received.wr_id);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..8).collect::<Vec<_>>());
    assert_eq!(b.event(), Some(AsyncEvent::SrqLimit));
    // All places are free again.
    for id in 0..8 {
        srq.post_recv(b.recv(id, 0, 64)).unwrap();
    }
}

/// A SEND that ends behind its first packets has taken a receive that no message completes. The queue pair is
/// destroyed with it, or reset: the shared queue has its places again.
fn goes_in_the_middle(a: &Side, b: &Side, _: Can) {
    const RECEIVES: usize = 4;
    const LEN: u32 = 128 << 10;
    let srq = b.pd.create_srq(RECEIVES as u32, 1).unwrap();
    let make = || {
        let pair = b.pd.create_qp_with_srq(QpKind::Rc, &b.cq, &b.cq, QpCaps::default(), &srq);
        (a.qp(), pair.unwrap())
    };
    // Until there is no more room.
    let fill = || (0..).take_while(|id| srq.post_recv(b.recv(*id, 0, LEN)).is_ok()).count();
    assert_eq!(fill(), RECEIVES);
    for turn in 0..3 * RECEIVES {
        let (at_a, at_b) = make();
        connect(&at_a, &at_b, (&usual(), &usual()));
        a.mem.fill(0, u64::from(LEN), turn as u8 + 1).unwrap();
        let mut part = a.wr(1, SendOp::Send { imm: None }, 0, LEN / 2);
        if let Payload::Sges(sges) = &mut part.payload {
            // A key that is nobody's.
            sges.push(Sge { lkey: Lkey::new(sges[0].lkey.as_u32() ^ 0x5a00), ..sges[0] });
        }
        at_a.post_send(part).unwrap();
        assert_ne!(a.done().status, Status::Success);
        // Where anything of it is sent, until it is there.
        let end = Instant::now() + Duration::from_millis(50);
        while b.bytes(0, 1) != [turn as u8 + 1] && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        if turn % 2 == 1 {
            at_b.modify(QpState::Reset, &QpAttr::default()).unwrap();
        }
        drop((at_a, at_b));
        fill();
        while b.cq.poll().unwrap().is_some() {}
    }
    assert_eq!(b.context.poll_async(), None, "nobody asked for the event of the last receive");
    let (at_a, at_b) = make();
    connect(&at_a, &at_b, (&usual(), &usual()));
    // As many as there may be under way and more, so that none from before is left.
    for turn in 0..3 * RECEIVES {
        a.mem.fill(0, u64::from(LEN), turn as u8).unwrap();
        at_a.post_send(a.wr(2, SendOp::Send { imm: None }, 0, LEN)).unwrap();
        a.good(2);
        assert_eq!(b.done().status, Status::Success);
        assert_eq!(b.bytes(0, LEN as usize), [turn as u8; LEN as usize]);
        fill();
    }
    for _ in 0..RECEIVES {
        at_a.post_send(a.wr(3, SendOp::Send { imm: None }, 0, 8)).unwrap();
        a.good(3);
        assert_eq!(b.done().status, Status::Success);
    }
}

fn what_is_posted_is_flushed(a: &Side, b: &Side, _: Can) {
    for id in 0..3 {
        b.qp.post_recv(b.recv(id, 0, 64)).unwrap();
    }
    b.qp.modify(QpState::Err, &QpAttr::default()).unwrap();
    assert_eq!(b.qp.state(), QpState::Err);
    for id in 0..3 {
        let done = b.done();
        assert_eq!((done.wr_id, done.status, done.qpn), (id, Status::Flushed, b.qp.qpn()));
    }
    b.post(9, SendOp::Write { remote: a.mr.remote_at(0), imm: None }, 0, 8);
    let done = b.done();
    assert_eq!((done.wr_id, done.status), (9, Status::Flushed));
}

fn a_queue_pair_is_used_again(a: &Side, b: &Side, _: Can) {
    for turn in 0..3_u8 {
        for side in [a, b] {
            side.qp.post_recv(side.recv(77, 0, 64)).unwrap();
            side.qp.modify(QpState::Reset, &QpAttr::default()).unwrap();
            assert_eq!(side.qp.state(), QpState::Reset);
        }
        connect(&a.qp, &b.qp, (&usual(), &usual()));
        assert_eq!((a.qp.state(), b.qp.state()), (QpState::Rts, QpState::Rts));
        a.mem.fill(0, 64, turn).unwrap();
        b.qp.post_recv(b.recv(5, 64, 64)).unwrap();
        a.post(1, SendOp::Send { imm: None }, 0, 64);
        a.good(1);
        // Not the one from before.
        b.good(5);
        assert_eq!(b.bytes(64, 64), [turn; 64]);
    }
}

fn a_region_in_use(a: &Side, b: &Side, can: Can) {
    let mem = Arc::new(HostMem::anonymous(4096).unwrap());
    let region = || a.pd.reg_mr(Arc::clone(&mem), Access::ALL).unwrap();
    let posted = region();
    let recv = |mr: &beeline::verbs::Mr, id| RecvWr { id, sges: vec![mr.sge(0, 4096).unwrap()] };
    a.qp.post_recv(recv(&posted, 1)).unwrap();
    let (posted, error) = posted.deregister().unwrap_err();
    assert_eq!(error.code(), "region-in-use");
    drop(posted);
    assert!(Arc::strong_count(&mem) > 1, "the NIC keeps the memory");
    b.post(5, SendOp::Send { imm: None }, 0, 8);
    // The receive names a region without rights now.
    assert_eq!(a.done().status, can.revoked);
    assert_ne!(b.done().status, Status::Success);
    a.context.counters();
    assert_eq!(Arc::strong_count(&mem), 1, "done: the memory is free");
    let idle = region();
    idle.deregister().map_err(|(_, error)| error).unwrap();
    assert_eq!(Arc::strong_count(&mem), 1);
}

fn a_region_is_taken_away(a: &Side, b: &Side, _: Can) {
    let mem = Arc::new(HostMem::anonymous(4096).unwrap());
    let mr = b.pd.reg_mr(Arc::clone(&mem), Access::ALL).unwrap();
    let remote = mr.remote_at(0);
    a.mem.fill(0, 8, 1).unwrap();
    a.post(1, SendOp::Write { remote, imm: None }, 0, 8);
    a.good(1);
    mr.drain(Instant::now() + WAIT).map_err(|(_, error)| error).unwrap();
    a.mem.fill(0, 8, 2).unwrap();
    a.post(2, SendOp::Write { remote, imm: None }, 0, 8);
    assert_eq!(a.done().status, Status::RemoteAccess);
    let mut bytes = [0; 8];
    mem.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 8]);
    assert_eq!(Arc::strong_count(&mem), 1);
}

fn order_is_relaxed(a: &Side, b: &Side, _: Can) {
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING;
    let mem = Arc::new(HostMem::anonymous(65_536).unwrap());
    let bulk = b.pd.reg_mr(Arc::clone(&mem), access).unwrap();
    let data = pattern(65_536, 4);
    a.mem.write(0, &data).unwrap();
    a.post(1, SendOp::Write { remote: bulk.remote_at(0), imm: None }, 0, 65_536);
    a.good(1);
    let mut bytes = vec![0; 65_536];
    mem.read(0, &mut bytes).unwrap();
    assert!(bytes == data);
    // Memory that takes atomics carries flags.
    let flags = b.pd.reg_mr(Arc::clone(&mem), access | Access::REMOTE_ATOMIC).unwrap();
    assert!(!flags.resolved().relaxed_ordering);
    if bulk.resolved().route.is_some() {
        let why = |mr: &beeline::verbs::Mr| {
            mr.resolved().why.iter().map(|why| why.code.as_str()).collect::<Vec<_>>().join(" ")
        };
        assert!(why(&flags).contains("relaxed-ordering-refused"), "{}", why(&flags));
        assert_ne!(bulk.resolved().relaxed_ordering, why(&bulk).contains("refused"));
    }
}

fn datagrams(a: &Side, b: &Side, can: Can) {
    if !can.datagrams {
        return;
    }
    const QKEY: u32 = 0x1111_1111;
    let grh = u64::from(GRH_LEN);
    let make = |side: &Side| {
        let qp = side.pd.create_qp(QpKind::Ud, &side.cq, &side.cq, QpCaps::default()).unwrap();
        let init =
            QpAttr { pkey_index: Some(0), port: Some(1), qkey: Some(QKEY), ..QpAttr::default() };
        qp.modify(QpState::Init, &init).unwrap();
        qp.modify(QpState::Rtr, &QpAttr::default()).unwrap();
        let rts = QpAttr { sq_psn: Some(Psn::new(0)), ..QpAttr::default() };
        qp.modify(QpState::Rts, &rts).unwrap();
        qp
    };
    let (at_a, at_b) = (make(a), make(b));
    let to = Destination { addr: b.context.local(), qpn: at_b.qpn(), qkey: QKEY };
    for (id, len) in [(1, 0_u32), (2, 1), (3, 1000)] {
        let data = pattern(len as usize, id as u8);
        a.mem.write(0, &data).unwrap();
        at_b.post_recv(b.recv(id, 0, 2048)).unwrap();
        let imm = (id == 2).then_some(99);
        let wr = SendWr { to: Some(to), ..a.wr(id, SendOp::Send { imm }, 0, len) };
        at_a.post_send(wr).unwrap();
        a.good(id);
        let received = b.good(id);
        assert_eq!((received.byte_len, received.imm), (len + GRH_LEN, imm));
        assert_eq!((received.src_qp, received.qpn), (Some(at_a.qpn()), at_b.qpn()));
        assert!(b.bytes(grh, len as usize) == data);
    }
    let lost = a.wr(9, SendOp::Send { imm: None }, 0, 8);
    assert_eq!(at_a.post_send(lost).unwrap_err().code(), "work-request", "without a destination");
    let write = SendOp::Write { remote: b.mr.remote_at(0), imm: None };
    let wr = SendWr { to: Some(to), ..a.wr(9, write, 0, 8) };
    assert_eq!(at_a.post_send(wr).unwrap_err().code(), "unsupported");
}
