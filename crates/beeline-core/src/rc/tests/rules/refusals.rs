//! What is refused, with which status on which side.

use super::*;

/// The statuses of refused requests, as rdma_rxe against rdma_rxe gives them.
#[test]
fn refused_accesses_have_their_statuses() {
    #[derive(Clone, Copy, Debug)]
    enum Case {
        BadKey,
        OutOfBounds,
        RegionLacksRight,
        QpLacksRight,
        Misaligned,
        Revoked,
        OtherPd,
    }
    use Case::*;
    let cases = [
        (BadKey, Status::RemoteAccess),
        (OutOfBounds, Status::RemoteAccess),
        (RegionLacksRight, Status::RemoteAccess),
        (QpLacksRight, Status::RemoteInvalidRequest),
        (Misaligned, Status::RemoteInvalidRequest),
        (Revoked, Status::RemoteAccess),
        (OtherPd, Status::RemoteAccess),
    ];
    for (case, expected) in cases {
        for kind in 0..3 {
            let access = match case {
                QpLacksRight => Access::LOCAL_READ,
                _ => Access::ALL,
            };
            let (mut world, local, _) = world_of(Setup { access, ..Setup::default() });
            let rights = match case {
                RegionLacksRight => Access::LOCAL_WRITE,
                _ => Access::ALL,
            };
            if matches!(case, OtherPd) {
                let side = &mut world.sides[1];
                side.pd = side.engine.create_pd().unwrap();
            }
            let remote = world.region(1, 64, rights, Bytes::Plain(vec![0; 64]));
            let mut target = match case {
                OutOfBounds => remote.remote(60),
                Misaligned => remote.remote(4),
                _ => remote.remote(0),
            };
            match case {
                BadKey => target.rkey = crate::mr::Rkey::new(remote.rkey.as_u32() ^ 0x100),
                Revoked => assert_eq!(world.sides[1].engine.revoke(remote.lkey), Some(0)),
                _ => {}
            }
            let op = match kind {
                0 => SendOp::FetchAdd { remote: target, add: 1 },
                1 => SendOp::Write { remote: target, imm: None },
                _ => SendOp::Read { remote: target },
            };
            let alone = matches!(case, Misaligned) && kind > 0;
            let expected = if alone { Status::Success } else { expected };
            world.bytes(0, local)[..8].fill(0xee);
            // 60 is not aligned either, so the atomic out of bounds reaches over the end elsewhere.
            let op = match (case, op) {
                (OutOfBounds, SendOp::FetchAdd { add, .. }) => {
                    SendOp::FetchAdd { remote: remote.remote(64), add }
                }
                (_, op) => op,
            };
            world.send(0, SendWr::new(1, op, Payload::Sges(vec![local.sge(0, 8)])));
            world.send(0, send(2, local, 1));
            world.receive(1, 7, remote, 8);
            world.settle();
            if alone {
                continue;
            }
            let what = (case, kind);
            assert_eq!(world.statuses(0), [(1, expected), (2, Status::Flushed)], "{what:?}");
            assert_eq!(world.statuses(1), [(7, Status::Flushed)], "{what:?}");
            assert_eq!((world.state(0), world.state(1)), (QpState::Err, QpState::Err));
            assert_eq!(world.bytes(1, remote)[..], [0; 64], "{what:?}");
            let qpn = world.sides[1].qpn;
            let event = if expected == Status::RemoteAccess {
                Event::QpAccessError(qpn)
            } else {
                Event::QpRequestError(qpn)
            };
            assert_eq!(world.events(1), [event]);
        }
    }
}

#[test]
fn a_bad_local_key_fails_its_own_request_in_its_turn() {
    let (mut world, local, remote) = world();
    world.memory = MemoryModel { delay_ns: 5000, unordered: false };
    world.send(0, write(1, local, remote, 5000));
    let mut bad = write(2, local, remote, 5000);
    bad.payload = Payload::Sges(vec![local.sge(0, 2000), local.sge(1 << 16, 3000)]);
    bad.signaled = false;
    world.send(0, bad);
    world.send(0, write(3, local, remote, 1));
    world.settle();
    let (done, bad) = (Status::Success, Status::LocalProtection);
    assert_eq!(world.statuses(0), [(1, done), (2, bad), (3, Status::Flushed)]);
}

#[test]
fn memory_that_fails_is_reported_on_the_side_that_asked() {
    let (mut world, local, remote) = world();
    let mut broken = |side| world.region(side, 64, Access::ALL, Bytes::Broken);
    let (bad_local, bad_remote) = (broken(0), broken(1));
    let add = |remote: Region| {
        let op = SendOp::FetchAdd { remote: remote.remote(0), add: 1 };
        SendWr::new(1, op, Payload::Sges(vec![local.sge(0, 8)]))
    };
    let cases = [
        (write(1, bad_local, remote, 8), Status::LocalProtection),
        (write(1, local, bad_remote, 8), Status::RemoteOperation),
        (read(1, bad_local, remote, 8), Status::LocalProtection),
        (read(1, local, bad_remote, 8), Status::RemoteOperation),
        (add(bad_remote), Status::RemoteOperation),
    ];
    for delay_ns in [0, 3000] {
        for (wr, status) in &cases {
            let (mut world, ..) = world_of(Setup::default());
            world.region(0, 64, Access::ALL, Bytes::Broken);
            world.region(1, 64, Access::ALL, Bytes::Broken);
            world.memory = MemoryModel { delay_ns, unordered: false };
            world.send(0, write(0, local, remote, 100));
            world.send(0, wr.clone());
            world.settle();
            assert_eq!(world.statuses(0), [(0, Status::Success), (1, *status)], "{wr:?}");
        }
    }
}

#[test]
fn a_message_longer_than_its_receive_ends_both() {
    for len in [101, 5000] {
        let (mut world, local, remote) = world();
        world.receive(1, 7, remote, 100);
        world.send(0, send(1, local, len));
        world.settle();
        assert_eq!(world.statuses(0), [(1, Status::RemoteInvalidRequest)]);
        assert_eq!(world.statuses(1), [(7, Status::LocalLength)]);
    }
}

#[test]
fn no_answer_at_all_uses_every_retry() {
    for retry_cnt in [0, 3, 7] {
        let (mut world, local, remote) = world_of(Setup { retry_cnt, ..Setup::default() });
        world.faults = Faults { loss: 1000, ..Faults::default() };
        world.send(0, write(1, local, remote, 3000));
        world.settle();
        assert_eq!(world.statuses(0), [(1, Status::RetryExceeded)]);
        assert_eq!(world.sides[0].engine.counters().timeouts, u64::from(retry_cnt) + 1);
        // The clock runs from the first packet, and 4.096 us x 2^8 each time (IBA 9.9.2.1.2).
        let waited = 4096 * 256 * (u64::from(retry_cnt) + 1);
        assert_eq!(world.now, Time::from_nanos(waited));
    }
}

#[test]
fn posting_errors_name_what_is_wrong() {
    let (mut world, local, remote) = world_of(Setup { depth: 2, ..Setup::default() });
    let long = write(1, local, remote, 0);
    let sges = |n: usize, len| Payload::Sges(vec![local.sge(0, len); n]);
    let with = |payload| SendWr { payload, ..long.clone() };
    let invalidate = SendOp::SendInvalidate { rkey: remote.rkey };
    let add = SendOp::FetchAdd { remote: remote.remote(0), add: 1 };
    let ud = crate::rc::Destination { addr: address(1), qpn: world.sides[1].qpn, qkey: 1 };
    let cases = [
        (with(sges(5, 1)), PostError::TooManySges { given: 5, max: 4 }),
        (with(sges(3, 1 << 30)), PostError::TooLong { given: 3 << 30, max: 1 << 31 }),
        (with(Payload::Inline(vec![0; 257])), PostError::InlineTooLong { given: 257, max: 256 }),
        (
            SendWr::new(1, invalidate, sges(1, 1)),
            PostError::Unsupported { what: "SEND with invalidate" },
        ),
        (SendWr::new(1, add, sges(1, 4)), PostError::AtomicLength { given: 4 }),
        (SendWr::new(1, add, Payload::Inline(vec![0; 8])), PostError::InlineResult),
        (SendWr { to: Some(ud), ..long.clone() }, PostError::Destination { needed: false }),
    ];
    for (wr, error) in cases {
        assert_eq!(world.try_send(0, wr), Err(error));
    }
    world.send(0, long.clone());
    world.send(0, long.clone());
    assert_eq!(world.try_send(0, long.clone()), Err(PostError::QueueFull { capacity: 2 }));
    world.receive(0, 1, local, 8);
    world.receive(0, 2, local, 8);
    let qpn = world.sides[0].qpn;
    let third = RecvWr { id: 3, sges: vec![] };
    let full = Err(PostError::QueueFull { capacity: 2 });
    assert_eq!(world.sides[0].engine.post_recv(qpn, third), full);
    let mut world = World::unconnected(1, Setup::default(), |_| {});
    assert_eq!(world.try_send(0, long.clone()), Err(PostError::State { state: QpState::Init }));
    let (mut world, ..) = world_of(Setup { rd_atomic: 0, ..Setup::default() });
    assert_eq!(world.try_send(0, read(1, local, remote, 1)), Err(PostError::NoReadDepth));
}

#[test]
fn an_invalidating_send_of_the_peer_is_refused() {
    let (mut world, _, remote) = world();
    world.receive(1, 7, remote, 8);
    let (qpn, psn) = (world.sides[1].qpn, Psn::new(Setup::default().psn));
    let mut head = Head {
        ieth: Some(Ieth { rkey: remote.rkey.as_u32() }),
        ..Head::new(Bth::new(Opcode::RC_SEND_ONLY_INVALIDATE, qpn, psn))
    };
    let mut datagram = Vec::new();
    head.emit(4, &mut datagram);
    seal(&super::super::net::path_to(1), &mut datagram, 0);
    world.inject(1, datagram);
    assert_eq!(world.statuses(1), [(7, Status::Flushed)]);
    assert_eq!(world.events(1), [Event::QpRequestError(qpn)]);
}

/// The packets of a message have the lengths that its first one and the path MTU say (IBA 9.7.4.1.6).
#[test]
fn a_message_of_the_wrong_length_is_refused_and_not_written() {
    let mtu = Setup::default().mtu.bytes();
    let cases = [
        (Opcode::RC_WRITE_ONLY, 8, 16),
        (Opcode::RC_WRITE_ONLY, 16, 8),
        (Opcode::RC_WRITE_ONLY, 0, 8),
        (Opcode::RC_WRITE_ONLY, 2 * mtu, mtu),
        (Opcode::RC_WRITE_FIRST, mtu, mtu),
        (Opcode::RC_WRITE_FIRST, 2 * mtu, mtu - 4),
        (Opcode::RC_WRITE_FIRST, 2 * mtu, mtu + 4),
    ];
    for (opcode, dma_len, payload) in cases {
        let (mut world, _, remote) = world();
        let (qpn, psn) = (world.sides[1].qpn, Psn::new(Setup::default().psn));
        let target = remote.remote(0);
        let reth =
            crate::roce::Reth { va: target.addr.as_u64(), rkey: target.rkey.as_u32(), dma_len };
        let mut head = Head { reth: Some(reth), ..Head::new(Bth::new(opcode, qpn, psn)) };
        let mut datagram = Vec::new();
        let range = head.emit(payload as usize, &mut datagram);
        datagram[range].fill(7);
        seal(&super::super::net::path_to(1), &mut datagram, 0);
        world.inject(1, datagram);
        assert!(world.sides[1].engine.poll_memory().is_none(), "{opcode} {dma_len} {payload}");
        assert_eq!(world.events(1), [Event::QpRequestError(qpn)], "{opcode} {dma_len} {payload}");
    }
}

#[test]
fn only_the_peer_is_heard() {
    let (mut world, local, remote) = world();
    world.send(0, write(1, local, remote, 8));
    let path = super::super::net::path_to(1);
    while let Some(op) = world.sides[0].engine.poll_memory() {
        world.sides[0].engine.handle_memory_done(op.token, op.zeros(), Ok(0));
    }
    let sent = world.sides[0].engine.poll_transmit(Time::ZERO).unwrap().datagram;
    let body = &sent[..sent.len() - 4];
    let forged = |change: &dyn Fn(&mut Vec<u8>), path: crate::roce::Path| {
        let mut datagram = body.to_vec();
        change(&mut datagram);
        seal(&path, &mut datagram, 0);
        (path, datagram)
    };
    let stranger = crate::roce::Path { src: address(7), ..path };
    let elsewhere = crate::roce::Path { dst: address(7), ..path };
    let unchanged = |_: &mut Vec<u8>| {};
    let attempts = [
        forged(&unchanged, stranger),
        forged(&unchanged, elsewhere),
        forged(&|bytes| bytes[2] = 0x7f, path),
        forged(&|bytes| bytes[0] = Opcode::UC_SEND_ONLY.0, path),
        forged(&|bytes| bytes[0] = Opcode::UD_SEND_ONLY.0, path),
        forged(&|bytes| bytes[1] |= 1, path),
        forged(&|bytes| bytes[0] = 0xff, path),
    ];
    for (path, datagram) in attempts {
        world.sides[1].engine.handle_datagram(Time::ZERO, &path, datagram);
        assert!(world.sides[1].engine.poll_memory().is_none());
        assert!(world.sides[1].engine.poll_transmit(Time::ZERO).is_none());
    }
    let counters = world.sides[1].engine.counters();
    assert_eq!((counters.wrong_peer, counters.unknown_destination), (1, 2));
    assert_eq!(counters.malformed, 4);
    world.sides[1].engine.handle_datagram(Time::ZERO, &path, sent);
    assert!(world.sides[1].engine.poll_memory().is_some(), "the real one is taken");
}
