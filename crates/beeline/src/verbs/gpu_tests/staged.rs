//! GPU memory that is not passed on: through staging memory that both sides reach, and what is waited for.

use super::*;
use crate::verbs::peer::PeerLock;

fn peer_of(nic: &Nic) -> Arc<PeerLock> {
    let Nic::Soft(nic) = nic else { panic!("not a NIC in software") };
    nic.soft.shared.with(|core| core.memories.peer().unwrap())
}

/// Until the peer reads this side's staging memory.
fn staged(nic: &Nic) -> Arc<stage::Stage> {
    let (peer, end) = (peer_of(nic), Instant::now() + WAIT);
    loop {
        // The turn brings what the peer says.
        nic.open().counters();
        if let Some(stage) = peer.lock().stage() {
            return Arc::clone(stage);
        }
        assert!(Instant::now() < end, "the peer does not map it");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write(side: &Side, other: &Side, id: u64, len: u32) {
    let at = id % 4 * (2 << 20);
    side.post(id, SendOp::Write { remote: other.mr.remote_at(at), imm: None }, at, len);
}

#[test]
fn both_directions_at_once_pass_through_staging_memory_and_its_slots_come_back() {
    let (nic_a, nic_b) = nics(true);
    let (a, b) = connected(
        Side::new(&nic_a, Profile::Plain, false),
        Side::new(&nic_b, Profile::Plain, false),
    );
    let (stage_a, stage_b) = (staged(&nic_a), staged(&nic_b));
    let named = |nic: &Nic| peer_of(nic).lock().lent.ever();
    let before = [named(&nic_a), named(&nic_b)];
    let (one, other) = (pattern(8 << 20, 1), pattern(8 << 20, 2));
    std::thread::scope(|scope| {
        for (side, far, data) in [(&a, &b, &one), (&b, &a, &other)] {
            scope.spawn(move || {
                for round in 0..5 {
                    // Odd lengths, and longer than a slot at the end.
                    let len = [2 << 20, (2 << 20) - 5, 4096, 70_001, 2 << 20][round];
                    let source = side.gpu.alloc(8 << 20).unwrap();
                    let region = side.pd.reg_gpu(&source, Access::ALL).unwrap();
                    let pinned = side.gpu.pin(8 << 20).unwrap();
                    pinned.mem().write(0, data).unwrap();
                    let stream = side.gpu.stream().unwrap();
                    stream.copy_to_device(&source, 0, &pinned, 0, 8 << 20).unwrap();
                    stream.synchronize(Instant::now() + WAIT).unwrap();
                    for id in 0..4_u64 {
                        let at = id * (2 << 20);
                        let payload = Payload::Sges(vec![region.sge(at, len).unwrap()]);
                        let op = SendOp::Write { remote: far.mr.remote_at(at), imm: None };
                        side.qp.post_send(SendWr::new(id, op, payload)).unwrap();
                    }
                    for id in 0..4 {
                        let done = side.done();
                        assert_eq!((done.status, done.wr_id), (Status::Success, id));
                    }
                    region.drain(Instant::now() + WAIT).map_err(|(_, error)| error).unwrap();
                }
            });
        }
    });
    assert!(a.get(0, 8 << 20) == other && b.get(0, 8 << 20) == one);
    assert!(named(&nic_a) > before[0] && named(&nic_b) > before[1], "nothing was staged");
    let end = Instant::now() + WAIT;
    while !(stage_a.is_idle() && stage_b.is_idle()) {
        nic_a.open().counters();
        nic_b.open().counters();
        assert!(Instant::now() < end, "slots are missing");
    }
}

/// Every slot, as if the peer kept them.
fn take_all(stage: &Arc<stage::Stage>) -> Vec<Arc<stage::StageSlot>> {
    let of = |bytes: u64| std::iter::from_fn(move || stage.take(bytes));
    of(1).chain(of(stage.slot_bytes())).collect()
}

/// One slot for several requests: each packet names its own bytes in it.
#[test]
fn neighbours_that_waited_for_a_slot_share_one() {
    const LEN: u32 = 100_001;
    let (nic_a, nic_b) = nics(true);
    let (a, b) = connected(
        Side::new(&nic_a, Profile::Plain, false),
        Side::new(&nic_b, Profile::Plain, false),
    );
    let stage = staged(&nic_a);
    let data = pattern(8 << 20, 5);
    a.put(0, &data);
    for round in 0..4 {
        let kept = take_all(&stage);
        for id in 8 * round..8 * round + 8 {
            let at = id * u64::from(LEN);
            a.post(id, SendOp::Write { remote: b.mr.remote_at(at), imm: None }, at, LEN);
        }
        // Until all of them wait; not so long that they would go through the ring.
        std::thread::sleep(Duration::from_millis(10));
        drop(kept);
        (0..8).for_each(|_| assert_eq!(a.done().status, Status::Success));
    }
    let whole = 32 * LEN as usize;
    assert!(b.get(0, whole) == data[..whole]);
}

#[test]
fn without_a_free_slot_bytes_go_through_the_ring() {
    let (nic_a, nic_b) = nics(true);
    let (a, b) = connected(
        Side::new(&nic_a, Profile::Plain, false),
        Side::new(&nic_b, Profile::Plain, false),
    );
    let stage = staged(&nic_a);
    let kept = take_all(&stage);
    let data = pattern(8 << 20, 3);
    a.put(0, &data);
    (0..4).for_each(|id| write(&a, &b, id, 2 << 20));
    (0..4).for_each(|_| assert_eq!(a.done().status, Status::Success));
    assert!(b.get(0, 8 << 20) == data);
    drop(kept);
    assert!(stage.is_idle());
}

#[test]
fn host_memory_and_lists_take_staged_bytes() {
    let (nic_a, nic_b) = nics(true);
    let (a, b) =
        connected(Side::new(&nic_a, Profile::Plain, false), Side::new(&nic_b, Profile::Bar, false));
    staged(&nic_a);
    let host = Arc::new(HostMem::anonymous(4 << 20).unwrap());
    let target = b.pd.reg_mr(Arc::clone(&host), Access::ALL).unwrap();
    let data = pattern(3 << 20, 4);
    a.put(0, &data);
    a.post(1, SendOp::Write { remote: target.remote_at(5), imm: None }, 0, 3 << 20);
    assert_eq!(a.done().status, Status::Success);
    let mut bytes = vec![0; 3 << 20];
    host.read(5, &mut bytes).unwrap();
    assert!(bytes == data);
    // A receive of two pieces, one of each kind.
    let sges = vec![target.sge(0, 100_001).unwrap(), b.mr.sge(0, 2 << 20).unwrap()];
    b.qp.post_recv(RecvWr { id: 7, sges }).unwrap();
    a.post(2, SendOp::Send { imm: None }, 0, 2 << 20);
    assert_eq!((a.done().status, b.done().status), (Status::Success, Status::Success));
    host.read(0, &mut bytes[..100_001]).unwrap();
    assert!(bytes[..100_001] == data[..100_001]);
    assert!(b.get(0, (2 << 20) - 100_001) == data[100_001..2 << 20]);
}

/// Memory of the host at `a` that `b` reads into a GPU whose copies hang.
fn read_that_hangs() -> (Nic, Nic, Side, Side, Mr, Arc<HostMem>) {
    let (nic_a, nic_b) = nics(true);
    let (a, b) = connected(
        Side::new(&nic_a, Profile::Plain, false),
        Side::new(&nic_b, Profile::Plain, false),
    );
    let host = Arc::new(HostMem::shareable(1 << 20).unwrap());
    host.fill(0, 1 << 20, 5).unwrap();
    let region = a.pd.reg_mr(Arc::clone(&host), Access::ALL).unwrap();
    let faults = b.gpu.as_sim().unwrap().faults();
    faults.arm(Site::Copy, 0, Effect::Stall);
    b.post(1, SendOp::Read { remote: region.remote_at(0) }, 0, 1 << 20);
    let end = Instant::now() + WAIT;
    while faults.stalled() == 0 {
        a.cq.poll().unwrap();
        b.cq.poll().unwrap();
        assert!(Instant::now() < end, "the copy has not begun");
    }
    (nic_a, nic_b, a, b, region, host)
}

#[test]
fn a_region_is_not_gone_before_the_peer_has_fetched_what_answers_name() {
    let (_nic_a, _nic_b, _a, b, region, host) = read_that_hangs();
    assert!(region.in_flight() > 0);
    let (region, error) = region.deregister().unwrap_err();
    assert_eq!((error.is_refused(), error.code()), (true, "region-in-use"));
    let (region, error) = region.drain(Instant::now() + Duration::from_millis(5)).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    b.gpu.as_sim().unwrap().faults().release();
    region.drain(Instant::now() + WAIT).map_err(|(_, error)| error).unwrap();
    assert_eq!(Arc::strong_count(&host), 1);
    host.fill(0, 1 << 20, 6).unwrap();
    assert_eq!(b.done().status, Status::Success);
    assert_eq!(b.get(0, 1 << 20), vec![5; 1 << 20], "what it was when it was granted");
}

#[test]
fn a_dropped_region_lives_until_the_peer_has_fetched() {
    let (_nic_a, _nic_b, a, b, region, host) = read_that_hangs();
    drop(region);
    a.pd.context().counters();
    assert_eq!(Arc::strong_count(&host), 2, "the NIC keeps the memory");
    b.gpu.as_sim().unwrap().faults().release();
    assert_eq!(b.done().status, Status::Success);
    let end = Instant::now() + WAIT;
    while Arc::strong_count(&host) > 1 {
        a.pd.context().counters();
        assert!(Instant::now() < end, "it is kept for ever");
    }
}

#[test]
fn a_peer_that_is_gone_fetches_nothing() {
    let (_nic_a, nic_b, _a, b, region, _host) = read_that_hangs();
    let gpu = b.gpu.clone();
    drop((b, nic_b));
    region.drain(Instant::now() + WAIT).map_err(|(_, error)| error).unwrap();
    gpu.as_sim().unwrap().faults().release();
}

#[test]
fn what_the_peer_does_not_want_and_what_is_given_up_is_released_too() {
    let (nic_a, nic_b) = nics(true);
    let (a, b) = connected(
        Side::new(&nic_a, Profile::Plain, false),
        Side::new(&nic_b, Profile::Plain, false),
    );
    let stage = staged(&nic_a);
    // Nobody has this queue pair.
    let qp = a.pd.create_qp(QpKind::Rc, &a.cq, &a.cq, QpCaps::default()).unwrap();
    let peer = Endpoint { qpn: Qpn::new(0xff_fff1), ..b.qp.endpoint() };
    qp.connect(&peer, &Connect { timeout: 8, retry_cnt: 1, ..Connect::default() }).unwrap();
    let host = Arc::new(HostMem::shareable(1 << 20).unwrap());
    let region = a.pd.reg_mr(Arc::clone(&host), Access::ALL).unwrap();
    let remote = Remote { addr: region.addr(), rkey: Rkey::new(1) };
    for (id, sge) in
        [region.sge(0, 1 << 20).unwrap(), a.mr.sge(0, 4 << 20).unwrap()].into_iter().enumerate()
    {
        let op = SendOp::Write { remote, imm: None };
        qp.post_send(SendWr::new(id as u64, op, Payload::Sges(vec![sge]))).unwrap();
    }
    assert_eq!(a.done().status, Status::RetryExceeded);
    assert_eq!(a.done().status, Status::Flushed);
    drop(qp);
    region.drain(Instant::now() + WAIT).map_err(|(_, error)| error).unwrap();
    // The packets of the second were given up before they were sent: their slots come back all the same.
    let end = Instant::now() + WAIT;
    while !stage.is_idle() {
        a.pd.context().counters();
        assert!(Instant::now() < end, "slots are missing: {stage:?}");
    }
}
