//! Two processes that share memory.

use super::*;

#[test]
fn two_processes_that_share_memory() {
    for shareable in [[true, true], [true, false], [false, true], [false, false]] {
        let (a, b) = local_sides(8 << 20, shareable);
        assert_eq!(a.context.resolved().link, LinkKind::Local);
        everything_works_between(&a, &b);
        everything_works_between(&b, &a);
    }
}

/// The bytes of a READ are fetched when its answer is there: a WRITE behind it must not be faster.
#[test]
fn a_read_sees_nothing_of_what_was_posted_behind_it() {
    const LEN: u32 = 1 << 20;
    everywhere(4 << 20, |a, b| {
        for turn in 0..20_u8 {
            b.mem.fill(0, u64::from(LEN), turn).unwrap();
            a.mem.fill(0, u64::from(LEN), 100 + turn).unwrap();
            a.post(1, SendOp::Read { remote: b.mr.remote_at(0) }, 2 << 20, LEN);
            a.post(2, SendOp::Write { remote: b.mr.remote_at(0), imm: None }, 0, LEN);
            assert_eq!((a.done().wr_id, a.done().wr_id), (1, 2));
            assert_eq!(a.bytes(2 << 20, LEN as usize), vec![turn; LEN as usize]);
            assert_eq!(b.bytes(0, LEN as usize), vec![100 + turn; LEN as usize]);
        }
    });
}

/// Regions come and go by the thousands, and each is known while it is registered.
#[test]
fn regions_of_the_peer_are_forgotten_with_it() {
    let (a, b) = local_sides(1 << 16, [true, true]);
    for turn in 0..300_u32 {
        let mem = Arc::new(HostMem::shareable(1 << 16).unwrap());
        mem.fill(0, 1 << 16, turn as u8).unwrap();
        let mr = a.pd.reg_mr(Arc::clone(&mem), Access::LOCAL_READ).unwrap();
        let payload = Payload::Sges(vec![mr.sge(0, 1 << 16).unwrap()]);
        let op = SendOp::Write { remote: b.mr.remote_at(0), imm: None };
        a.qp.post_send(SendWr::new(1, op, payload)).unwrap();
        assert_eq!(a.done().status, Status::Success);
        assert_eq!(b.bytes(0, 1 << 16), vec![turn as u8; 1 << 16]);
        mr.deregister().map_err(|(_, error)| error).unwrap();
        assert_eq!(Arc::strong_count(&mem), 1);
    }
}

#[test]
fn a_local_link_has_no_datagrams_and_needs_a_peer() {
    let (a, _b) = local();
    let context = a.open();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(8).unwrap());
    let refused = pd.create_qp(QpKind::Ud, &cq, &cq, QpCaps::default()).unwrap_err();
    assert!(refused.to_string().contains("local link"), "{refused}");
    for options in [
        SoftOptions::new(address()).link(LinkKind::Local),
        SoftOptions::new(address()).mtu(Mtu::LOCAL),
    ] {
        assert!(Nic::soft(options).unwrap_err().is_refused());
    }
    let (end, gone) = UnixStream::pair().unwrap();
    drop(gone);
    assert!(Nic::local(end).is_err(), "nobody is there");
}

/// A peer that ends takes nobody with it.
#[test]
fn a_peer_that_is_gone_is_an_error_of_the_work_request() {
    let (a, b) = local_sides(1 << 16, [true, true]);
    let connect = Connect { timeout: 8, retry_cnt: 1, ..Connect::default() };
    let qp = a.pd.create_qp(QpKind::Rc, &a.cq, &a.cq, QpCaps::default()).unwrap();
    let peer = b.pd.create_qp(QpKind::Rc, &b.cq, &b.cq, QpCaps::default()).unwrap();
    qp.connect(&peer.endpoint(), &connect).unwrap();
    let remote = b.mr.remote_at(0);
    drop(peer);
    drop(b);
    let payload = Payload::Sges(vec![a.mr.sge(0, 4096).unwrap()]);
    qp.post_send(SendWr::new(1, SendOp::Write { remote, imm: None }, payload)).unwrap();
    assert_eq!(a.done().status, Status::RetryExceeded);
}
