//! Random traffic in both directions over a bad network: nothing is lost, doubled or changed.

use alloc::vec::Vec;

use super::net::{Faults, MemoryModel, Region, Rng, Setup, World};
use crate::rc::{CompletionOp, Payload, RecvWr, SendOp, SendWr, Sge, Status};
use crate::roce::Mtu;
use crate::time::Duration;

/// Work requests outstanding in each direction.
const DEPTH: u64 = 16;

/// One run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) messages: u64,
    pub(super) mtu: Mtu,
    pub(super) faults: Faults,
    pub(super) memory: MemoryModel,
}

/// One direction: side `from` sends to the other.
struct Flow {
    from: usize,
    slot: u64,
    source: Region,
    sink: Region,
    inbox: Region,
    /// A counter at the start of the sink that FETCH_ADD adds one to.
    adds: u64,
    added: Vec<bool>,
    posted: u64,
    done: u64,
    kinds: Vec<Kind>,
    /// SENDs posted and received, in order.
    sends: Vec<(u64, u32)>,
    received: usize,
    receives_posted: u64,
    rng: Rng,
}

#[derive(Clone, Copy, Debug)]
struct Kind {
    op: Op,
    len: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    Send,
    Write,
    WriteImm,
    Read,
    Add,
}

/// What run `run` is allowed to take in virtual time: a minute, far above what any of them needs.
const LIMIT: Duration = Duration::from_secs(600);

pub(super) fn check(run: Run) -> u64 {
    let setup = Setup { mtu: run.mtu, timeout: 5, ..Setup::default() };
    let mut world = World::new(run.seed, setup);
    world.faults = run.faults;
    world.memory = run.memory;
    let mut flows = [0, 1].map(|from| Flow::new(&mut world, from, run));
    for flow in &mut flows {
        flow.refill(&mut world, run.messages);
    }
    while flows.iter().any(|flow| flow.done < run.messages || !flow.all_received()) {
        assert!(world.step(), "stalled: {run:?} at {}", world.now);
        assert!(world.now - crate::time::Time::ZERO < LIMIT, "too slow: {run:?}");
        for side in 0..2 {
            while let Some(done) =
                world.sides[side].engine.poll_completion(world.sides[side].cq).unwrap()
            {
                assert_eq!(done.status, Status::Success, "{run:?}");
                match done.op {
                    CompletionOp::Recv | CompletionOp::RecvWriteImm => {
                        flows[1 - side].on_receive(&mut world, done);
                    }
                    _ => flows[side].on_done(&mut world, done.wr_id),
                }
            }
            flows[side].refill(&mut world, run.messages);
        }
    }
    world.settle();
    for flow in &mut flows {
        let counter = &world.bytes(1 - flow.from, flow.sink)[..8];
        assert_eq!(u64::from_ne_bytes(counter.try_into().unwrap()), flow.adds, "{run:?}");
        assert!(flow.added.iter().all(|seen| *seen));
    }
    world.trace
}

impl Flow {
    fn new(world: &mut World, from: usize, run: Run) -> Self {
        let slot = u64::from(run.mtu.bytes()) * 5;
        let bytes = ((DEPTH + 1) * slot) as usize;
        let source = world.plain(from, bytes);
        let sink = world.plain(1 - from, bytes);
        let inbox = world.plain(1 - from, bytes);
        let mut flow = Self {
            from,
            slot,
            source,
            sink,
            inbox,
            adds: 0,
            added: Vec::new(),
            posted: 0,
            done: 0,
            kinds: Vec::new(),
            sends: Vec::new(),
            received: 0,
            receives_posted: 0,
            rng: Rng::new(run.seed ^ from as u64),
        };
        for _ in 0..DEPTH {
            flow.post_receive(world);
        }
        flow
    }

    fn all_received(&self) -> bool {
        self.received == self.sends.len()
    }

    fn post_receive(&mut self, world: &mut World) {
        let id = self.receives_posted;
        self.receives_posted += 1;
        let offset = (id % DEPTH) * self.slot;
        let (len, half) = (self.slot as u32, self.slot as u32 / 3);
        let sges = alloc::vec![
            self.inbox.sge(offset, half),
            self.inbox.sge(offset + u64::from(half), len - half),
        ];
        let side = &mut world.sides[1 - self.from];
        side.engine.post_recv(side.qpn, RecvWr { id, sges }).unwrap();
    }

    fn refill(&mut self, world: &mut World, messages: u64) {
        while self.posted < messages && self.posted - self.done < DEPTH {
            self.post(world);
        }
    }

    fn post(&mut self, world: &mut World) {
        let id = self.posted;
        self.posted += 1;
        let mtu = self.slot as u32 / 5;
        let sizes = [0, 1, mtu - 1, mtu, mtu + 1, 3 * mtu + 7, 64, 8];
        let len = sizes[self.rng.below(8) as usize];
        let op = [Op::Send, Op::Write, Op::WriteImm, Op::Read, Op::Add][self.rng.below(5) as usize];
        let len = if op == Op::Add { 8 } else { len };
        self.kinds.push(Kind { op, len });
        let offset = (1 + id % DEPTH) * self.slot;
        let (from, source, sink) = (self.from, self.source, self.sink);
        match op {
            Op::Read => fill(&mut world.bytes(1 - from, sink)[offset as usize..], id, len),
            _ => fill(&mut world.bytes(from, source)[offset as usize..], id, len),
        }
        let remote = sink.remote(offset);
        let op = match op {
            Op::Send => SendOp::Send { imm: Some(id as u32) },
            Op::Write => SendOp::Write { remote, imm: None },
            Op::WriteImm => SendOp::Write { remote, imm: Some(id as u32) },
            Op::Read => SendOp::Read { remote },
            Op::Add => SendOp::FetchAdd { remote: sink.remote(0), add: 1 },
        };
        if matches!(op, SendOp::Send { .. } | SendOp::Write { imm: Some(_), .. }) {
            self.sends.push((id, len));
        }
        self.adds += u64::from(matches!(op, SendOp::FetchAdd { .. }));
        self.added.resize(self.adds as usize, false);
        let whole = source.sge(offset, len);
        let payload = match op {
            SendOp::Send { .. } if len == 64 => {
                let bytes = &world.bytes(from, source)[offset as usize..][..64];
                Payload::Inline(bytes.to_vec())
            }
            _ if len > 2 => {
                let rest = Sge { len: len - 2, ..source.sge(offset + 2, 0) };
                Payload::Sges(alloc::vec![Sge { len: 2, ..whole }, rest])
            }
            _ => Payload::Sges(alloc::vec![whole]),
        };
        let side = &mut world.sides[from];
        side.engine.post_send(side.qpn, SendWr::new(id, op, payload)).unwrap();
    }

    fn on_done(&mut self, world: &mut World, id: u64) {
        assert_eq!(id, self.done, "completions come in the order of posting");
        self.done += 1;
        let Kind { op, len } = self.kinds[id as usize];
        let offset = ((1 + id % DEPTH) * self.slot) as usize;
        match op {
            Op::Send => {}
            Op::Write | Op::WriteImm => {
                expect(&world.bytes(1 - self.from, self.sink)[offset..], id, len);
            }
            Op::Read => expect(&world.bytes(self.from, self.source)[offset..], id, len),
            Op::Add => {
                let old = &world.bytes(self.from, self.source)[offset..][..8];
                let old = u64::from_ne_bytes(old.try_into().unwrap()) as usize;
                assert!(!core::mem::replace(&mut self.added[old], true), "{old} was seen twice");
            }
        }
    }

    fn on_receive(&mut self, world: &mut World, done: crate::rc::Completion) {
        assert_eq!(done.wr_id, self.received as u64, "receives complete in order");
        let (id, len) = self.sends[self.received];
        self.received += 1;
        assert_eq!((done.imm, done.byte_len), (Some(id as u32), len));
        if self.kinds[id as usize].op == Op::Send {
            let offset = ((done.wr_id % DEPTH) * self.slot) as usize;
            expect(&world.bytes(1 - self.from, self.inbox)[offset..], id, len);
        }
        self.post_receive(world);
    }
}

fn fill(into: &mut [u8], id: u64, len: u32) {
    let mut rng = Rng::new(id);
    for byte in &mut into[..len as usize] {
        *byte = rng.next() as u8;
    }
}

fn expect(got: &[u8], id: u64, len: u32) {
    let mut rng = Rng::new(id);
    for (i, byte) in got[..len as usize].iter().enumerate() {
        assert_eq!(*byte, rng.next() as u8, "message {id}, byte {i} of {len}");
    }
}

const CLEAN: Faults = Faults { loss: 0, duplication: 0, reorder: 0, corruption: 0 };
const BAD: Faults = Faults { loss: 50, duplication: 30, reorder: 50, corruption: 10 };
const AT_ONCE: MemoryModel = MemoryModel { delay_ns: 0, unordered: false };
const SLOW: MemoryModel = MemoryModel { delay_ns: 10_000, unordered: false };
const UNORDERED: MemoryModel = MemoryModel { delay_ns: 10_000, unordered: true };

/// Loss x reorder x duplication x corruption, each on and off.
fn networks() -> impl Iterator<Item = Faults> {
    (0..16u32).map(|bits| Faults {
        loss: 50 * (bits & 1),
        duplication: 30 * (bits >> 1 & 1),
        reorder: 50 * (bits >> 2 & 1),
        corruption: 10 * (bits >> 3 & 1),
    })
}

fn matrix(messages: u64) -> u64 {
    let mut runs = 0;
    for faults in networks() {
        for memory in [AT_ONCE, SLOW, UNORDERED] {
            for mtu in Mtu::ALL {
                check(Run { seed: runs, messages, mtu, faults, memory });
                runs += 1;
            }
        }
    }
    runs * messages * 2
}

#[test]
fn every_network_every_memory_every_mtu() {
    assert_eq!(matrix(60), 16 * 3 * 5 * 120);
}

/// The same with a million messages. In release: `cargo test --release -p beeline-core -- --ignored
/// a_million_messages`.
#[test]
#[ignore = "a million messages: run in release"]
fn a_million_messages() {
    assert!(matrix(2100) >= 1_000_000);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let run = Run { seed: 7, messages: 100, mtu: Mtu::MIN, faults: BAD, memory: UNORDERED };
    assert_eq!(check(run), check(run));
    assert_ne!(check(run), check(Run { seed: 8, ..run }));
    assert_ne!(check(run), check(Run { faults: CLEAN, ..run }));
}
