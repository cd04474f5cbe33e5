//! What waits for memory, and memory that goes away.

use super::*;

impl World {
    /// Answers what side `side` wants of its memory, without touching any, and takes what it sends.
    fn sent(&mut self, side: usize) -> Vec<Vec<u8>> {
        let mut sent = Vec::new();
        loop {
            while let Some(op) = self.sides[side].engine.poll_memory() {
                self.sides[side].engine.handle_memory_done(op.token, op.zeros(), Ok(0));
            }
            match self.sides[side].engine.poll_transmit(self.now) {
                Some(transmit) => sent.push(transmit.datagram),
                None => return sent,
            }
        }
    }
}

#[test]
fn a_fenced_request_is_not_sent_before_earlier_reads_are_done() {
    for fence in [false, true] {
        let (mut world, local, remote) = world();
        world.send(0, read(1, local, remote, 8));
        world.send(0, SendWr { fence, ..write(2, local, remote, 8) });
        let sent = world.sent(0);
        assert_eq!(sent.len(), if fence { 1 } else { 2 });
        world.inject(1, sent[0].clone());
        let response = world.sent(1).remove(0);
        world.sides[0].engine.handle_datagram(world.now, &super::super::net::path_to(0), response);
        assert_eq!(world.sent(0).len(), if fence { 1 } else { 0 });
    }
}

#[test]
fn a_receive_is_reported_when_its_bytes_are_in_memory() {
    let (mut world, local, remote) = world();
    world.receive(1, 7, remote, 100);
    world.send(0, send(1, local, 100));
    let sent = world.sent(0).remove(0);
    world.inject(1, sent);
    assert_eq!(world.statuses(1), []);
    world.sent(1);
    assert_eq!(world.statuses(1), [(7, Status::Success)]);
}

/// The answer to an operation of a queue pair's earlier life is not for its present one.
#[test]
fn a_late_answer_misses_a_queue_pair_that_was_reset() {
    let (mut world, local, remote) = world();
    world.send(0, write(1, local, remote, 8));
    let late = world.sides[0].engine.poll_memory().unwrap();
    let qpn = world.sides[0].qpn;
    let attr = crate::rc::QpAttr {
        pkey_index: Some(0),
        port: Some(1),
        access: Some(Access::ALL),
        ..Default::default()
    };
    world.sides[0].engine.modify_qp(qpn, QpState::Reset, &Default::default()).unwrap();
    world.sides[0].engine.modify_qp(qpn, QpState::Init, &attr).unwrap();
    world.connect(0, Setup::default());
    world.send(0, write(2, local, remote, 8));
    let fresh = world.sides[0].engine.poll_memory().unwrap();
    world.sides[0].engine.handle_memory_done(late.token, late.buffer, Ok(0));
    assert!(world.sides[0].engine.poll_transmit(world.now).is_none(), "took the late answer");
    world.sides[0].engine.handle_memory_done(fresh.token, fresh.buffer, Ok(0));
    assert!(world.sides[0].engine.poll_transmit(world.now).is_some());
}

/// A request is judged as a whole before any of it is done.
#[test]
fn a_request_that_ends_outside_moves_nothing() {
    for is_read in [false, true] {
        let (mut world, local, _) = world();
        let remote = world.plain(1, 1500);
        world.bytes(0, local)[..2000].fill(3);
        let wr = if is_read { read(1, local, remote, 2000) } else { write(1, local, remote, 2000) };
        world.send(0, wr);
        world.settle();
        assert_eq!(world.statuses(0), [(1, Status::RemoteAccess)]);
        assert!(world.bytes(0, local)[..2000].iter().all(|byte| *byte == 3));
        assert!(world.bytes(1, remote).iter().all(|byte| *byte == 0));
    }
}

/// An ACK, a READ response and a completion wait for the memory they depend on.
#[test]
fn nothing_is_acknowledged_before_it_is_in_memory() {
    let (mut world, local, remote) = world();
    world.bytes(0, local)[..100].fill(3);
    world.send(0, write(1, local, remote, 100));
    let take = |world: &mut World, side: usize| world.sides[side].engine.poll_memory();
    let op = take(&mut world, 0).unwrap();
    assert!(world.sides[0].engine.poll_transmit(world.now).is_none(), "the payload is not there");
    world.sides[0].engine.handle_memory_done(op.token, op.zeros(), Ok(0));
    let sent = world.sides[0].engine.poll_transmit(world.now).unwrap();
    world.inject(1, sent.datagram);
    let op = take(&mut world, 1).unwrap();
    assert!(world.sides[1].engine.poll_transmit(world.now).is_none(), "not in memory yet");
    world.sides[1].engine.handle_memory_done(op.token, op.zeros(), Ok(0));
    let ack = world.sides[1].engine.poll_transmit(world.now).unwrap();
    world.sides[0].engine.handle_datagram(world.now, &super::super::net::path_to(0), ack.datagram);
    assert_eq!(world.statuses(0), [(1, Status::Success)]);
}

/// A READ behind a WRITE of the same queue pair sees what was written, however slow memory is; a fenced
/// WRITE behind a READ does not change what the READ sees.
#[test]
fn order_between_requests_holds_with_slow_memory() {
    for unordered in [false, true] {
        let (mut world, local, remote) = world();
        world.memory = MemoryModel { delay_ns: 20_000, unordered };
        world.bytes(0, local)[..5000].fill(1);
        world.bytes(0, local)[10_000..15_000].fill(2);
        world.send(0, write(1, local, remote, 5000));
        let mut first = read(2, local, remote, 5000);
        first.payload = Payload::Sges(vec![local.sge(20_000, 5000)]);
        world.send(0, first);
        let mut second = write(3, local, remote, 5000);
        second.payload = Payload::Sges(vec![local.sge(10_000, 5000)]);
        world.send(0, SendWr { fence: true, ..second });
        world.settle();
        assert_eq!(world.statuses(0).len(), 3);
        assert!(world.bytes(0, local)[20_000..25_000].iter().all(|byte| *byte == 1));
        assert!(world.bytes(1, remote)[..5000].iter().all(|byte| *byte == 2));
    }
}

/// What is flushed is flushed only when no memory operation can touch its buffers any more.
#[test]
fn a_flush_waits_for_the_memory_under_way() {
    let (mut world, local, remote) = world();
    world.send(0, read(1, local, remote, 5000));
    let deliver = |world: &mut World| {
        while let Some(sent) = world.sides[0].engine.poll_transmit(world.now) {
            world.inject(1, sent.datagram);
        }
        while let Some(op) = world.sides[1].engine.poll_memory() {
            world.sides[1].engine.handle_memory_done(op.token, op.zeros(), Ok(0));
        }
    };
    deliver(&mut world);
    let first = world.sides[1].engine.poll_transmit(world.now).unwrap();
    let path = super::super::net::path_to(0);
    world.sides[0].engine.handle_datagram(world.now, &path, first.datagram);
    let op = world.sides[0].engine.poll_memory().unwrap();
    let qpn = world.sides[0].qpn;
    world.sides[0].engine.modify_qp(qpn, QpState::Err, &Default::default()).unwrap();
    assert_eq!(world.statuses(0), [], "a response is on its way into the buffer");
    world.sides[0].engine.handle_memory_done(op.token, op.zeros(), Ok(0));
    assert_eq!(world.statuses(0), [(1, Status::Flushed)]);
}

/// A region revoked while a READ is being answered: the rest is refused.
#[test]
fn revocation_under_traffic_is_seen_by_the_next_packet() {
    let (mut world, local, remote) = world();
    world.send(0, read(1, local, remote, 60_000));
    world.drain();
    for _ in 0..6 {
        world.step();
    }
    world.sides[1].engine.revoke(remote.lkey).unwrap();
    world.send(0, write(2, local, remote, 8));
    world.settle();
    let done = world.statuses(0);
    assert!(done[0].1 == Status::RemoteAccess || done[1].1 == Status::RemoteAccess, "{done:?}");
    assert_eq!(world.state(1), QpState::Err);
    let side = &mut world.sides[1];
    assert_eq!(side.engine.in_flight(remote.lkey), Some(0));
}

#[test]
fn a_queue_pair_destroyed_under_way_leaves_its_memory_pinned() {
    let (mut world, local, remote) = world();
    world.send(0, write(1, local, remote, 8));
    let op = world.sides[0].engine.poll_memory().unwrap();
    let side = &mut world.sides[0];
    side.engine.destroy_qp(side.qpn).unwrap();
    let busy = DeregisterError::Busy { lkey: local.lkey, posted: 0, in_flight: 1 };
    assert_eq!(side.engine.deregister(side.pd, local.lkey), Err(busy));
    side.engine.handle_memory_done(op.token, op.zeros(), Ok(0));
    assert_eq!(side.engine.deregister(side.pd, local.lkey), Ok(()));
    assert!(side.engine.poll_transmit(Time::ZERO).is_none());
}
