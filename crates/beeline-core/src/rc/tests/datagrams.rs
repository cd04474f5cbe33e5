//! Unreliable datagrams.

use alloc::vec;

use super::net::{Region, Setup, World, address, qp_init};
use crate::rc::{
    Destination, GRH_LEN, Payload, PostError, QpAttr, QpInit, QpKind, QpState, RecvWr, SendOp,
    SendWr, Status,
};
use crate::roce::{Psn, Qpn};

const QKEY: u32 = 0x1234;

/// Both sides with a datagram queue pair in RTS in place of the connected one.
fn world() -> (World, Region, Region) {
    let mut world = World::unconnected(1, Setup::default(), |_| {});
    for side in &mut world.sides {
        let init = QpInit { kind: QpKind::Ud, ..qp_init(side.pd, side.cq, 16) };
        side.engine.destroy_qp(side.qpn).unwrap();
        side.qpn = side.engine.create_qp(init).unwrap();
        let init =
            QpAttr { pkey_index: Some(0), port: Some(1), qkey: Some(QKEY), ..QpAttr::default() };
        let rts = QpAttr { sq_psn: Some(Psn::new(7)), ..QpAttr::default() };
        side.engine.modify_qp(side.qpn, QpState::Init, &init).unwrap();
        side.engine.modify_qp(side.qpn, QpState::Rtr, &QpAttr::default()).unwrap();
        side.engine.modify_qp(side.qpn, QpState::Rts, &rts).unwrap();
    }
    let (local, remote) = (world.plain(0, 8192), world.plain(1, 8192));
    (world, local, remote)
}

fn datagram(world: &World, id: u64, from: Region, len: u32, qkey: u32) -> SendWr {
    let to = Destination { addr: address(1), qpn: world.sides[1].qpn, qkey };
    let op = SendOp::Send { imm: Some(5) };
    SendWr { to: Some(to), ..SendWr::new(id, op, Payload::Sges(vec![from.sge(0, len)])) }
}

#[test]
fn a_datagram_arrives_behind_its_network_header() {
    let (mut world, local, remote) = world();
    world.bytes(0, local)[..4096].fill(7);
    let (qpn, src) = (world.sides[1].qpn, world.sides[0].qpn);
    for (id, len) in [(0, 0), (1, 1), (2, 4096)] {
        let sges = vec![remote.sge(0, 4096 + GRH_LEN)];
        world.sides[1].engine.post_recv(qpn, RecvWr { id, sges }).unwrap();
        let wr = datagram(&world, id, local, len, QKEY);
        world.sides[0].engine.post_send(src, wr).unwrap();
        world.settle();
        let cq = world.sides[1].cq;
        let done = world.sides[1].engine.poll_completion(cq).unwrap().unwrap();
        assert_eq!((done.wr_id, done.status, done.byte_len), (id, Status::Success, len + GRH_LEN));
        assert_eq!((done.src_qp, done.imm), (Some(src), Some(5)));
        let bytes = world.bytes(1, remote);
        assert_eq!(bytes[20], 0x45);
        assert_eq!(bytes[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
        assert!(bytes[40..40 + len as usize].iter().all(|byte| *byte == 7));
        let cq = world.sides[0].cq;
        let done = world.sides[0].engine.poll_completion(cq).unwrap().unwrap();
        assert_eq!((done.wr_id, done.status), (id, Status::Success));
    }
}

#[test]
fn what_does_not_fit_is_dropped_and_the_sender_does_not_know() {
    let (mut world, local, remote) = world();
    let (qpn, src) = (world.sides[1].qpn, world.sides[0].qpn);
    let sges = vec![remote.sge(0, 100)];
    world.sides[1].engine.post_recv(qpn, RecvWr { id: 1, sges }).unwrap();
    let mut stranger = datagram(&world, 2, local, 8, QKEY);
    if let Some(to) = &mut stranger.to {
        to.qpn = Qpn::new(to.qpn.as_u32() ^ 2);
    }
    for wr in [datagram(&world, 1, local, 8, QKEY + 1), stranger] {
        world.sides[0].engine.post_send(src, wr).unwrap();
    }
    world.settle();
    let cq = world.sides[1].cq;
    assert_eq!(world.sides[1].engine.poll_completion(cq), Ok(None));
    assert_eq!(world.sides[1].engine.counters().unwanted_datagrams, 1);
    let wr = datagram(&world, 3, local, 61, QKEY);
    world.sides[0].engine.post_send(src, wr).unwrap();
    world.settle();
    let done = world.sides[1].engine.poll_completion(cq).unwrap().unwrap();
    assert_eq!((done.wr_id, done.status), (1, Status::LocalLength));
    let cq = world.sides[0].cq;
    for id in 1..=3 {
        let done = world.sides[0].engine.poll_completion(cq).unwrap().unwrap();
        assert_eq!((done.wr_id, done.status), (id, Status::Success));
    }
}

#[test]
fn only_sends_of_one_packet_are_possible() {
    let (mut world, local, remote) = world();
    let src = world.sides[0].qpn;
    let send = |world: &mut World, wr| world.sides[0].engine.post_send(src, wr);
    let mut long = datagram(&world, 1, local, 4097, QKEY);
    let refused = send(&mut world, long.clone());
    assert_eq!(refused, Err(PostError::TooLong { given: 4097, max: 4096 }));
    long.payload = Payload::Sges(vec![local.sge(0, 8)]);
    long.op = SendOp::Read { remote: remote.remote(0) };
    assert!(matches!(send(&mut world, long.clone()), Err(PostError::Unsupported { .. })));
    long.op = SendOp::Send { imm: None };
    long.to = None;
    assert_eq!(send(&mut world, long), Err(PostError::Destination { needed: true }));
}
