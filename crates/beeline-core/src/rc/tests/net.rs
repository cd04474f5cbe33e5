//! Two NICs, their memory and the network between them, in virtual time.

use alloc::collections::{BTreeMap, BinaryHeap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::net::{IpAddr, Ipv4Addr};

use crate::addr::Iova;
use crate::mr::{Access, Lkey, MemoryKind, PdId, Registration, Rkey, Secret, Segment};
use crate::rc::{
    Config, CqId, Engine, MemFault, MemKind, MemOp, MemToken, QpAttr, QpInit, QpKind, QpState, Sge,
    Transmit,
};
use crate::roce::{Mtu, Path, Psn, Qpn, RnrTimer};
use crate::time::{Duration, Time};

/// A small generator: xorshift64*.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(Secret::new([seed, 0x5eed]).mix(seed) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 16) % bound.max(1)
    }

    /// True in `per_mille` of a thousand cases.
    pub(super) fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < u64::from(per_mille)
    }
}

/// What the network does to datagrams, each in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    pub(super) loss: u32,
    pub(super) duplication: u32,
    pub(super) reorder: u32,
    pub(super) corruption: u32,
}

/// How memory answers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemoryModel {
    /// Longest time an operation takes; 0 answers at once.
    pub(super) delay_ns: u64,
    /// Whether answers may overtake each other (effects never do).
    pub(super) unordered: bool,
}

/// The bytes behind a region.
pub(super) enum Bytes {
    Plain(Vec<u8>),
    /// As many bytes as one likes: reads as [`pattern`], and counts the bytes written that equal it.
    Pattern {
        matched: u64,
    },
    /// Every operation fails.
    Broken,
}

pub(super) fn pattern(offset: u64) -> u8 {
    ((offset >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (8 * (offset & 7))) as u8
}

pub(super) struct Side {
    pub(super) engine: Engine,
    pub(super) pd: PdId,
    pub(super) cq: CqId,
    pub(super) qpn: Qpn,
    pub(super) regions: BTreeMap<(usize, u16), Bytes>,
    queued: VecDeque<MemToken>,
    last_done: Time,
}

#[derive(Clone, Copy)]
pub(super) struct Region {
    pub(super) lkey: Lkey,
    pub(super) rkey: Rkey,
    pub(super) id: (usize, u16),
    pub(super) iova: u64,
}

impl Region {
    pub(super) fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { addr: Iova::new(self.iova + offset), len, lkey: self.lkey }
    }

    pub(super) fn remote(&self, offset: u64) -> crate::rc::Remote {
        crate::rc::Remote { addr: Iova::new(self.iova + offset), rkey: self.rkey }
    }
}

enum Happening {
    Datagram {
        to: usize,
        datagram: Vec<u8>,
    },
    /// An operation takes effect and is answered.
    Memory {
        at: usize,
        op: MemOp,
    },
    /// An operation that took effect before is answered.
    Answer {
        at: usize,
        token: MemToken,
        buffer: Vec<u8>,
        result: Option<u64>,
    },
}

/// Something that happens at a time, the earlier posted first.
struct Upcoming {
    when: Time,
    number: u64,
    happening: Happening,
}

impl PartialEq for Upcoming {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Upcoming {}

impl PartialOrd for Upcoming {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Upcoming {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (self.when, self.number).cmp(&(other.when, other.number))
    }
}

pub(super) struct World {
    pub(super) sides: [Side; 2],
    pub(super) now: Time,
    pub(super) rng: Rng,
    pub(super) faults: Faults,
    pub(super) memory: MemoryModel,
    pub(super) latency_ns: u64,
    happenings: BinaryHeap<Reverse<Upcoming>>,
    counter: u64,
    /// A digest of everything that went over the wire, with times.
    pub(super) trace: u64,
}

pub(super) fn address(side: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + side as u8))
}

pub(super) fn path_to(side: usize) -> Path {
    Path {
        src: address(1 - side),
        dst: address(side),
        src_port: crate::roce::UDP_PORT,
        identification: crate::roce::Identification::Known(0),
    }
}

/// Attributes of the whole way to RTS, for tests to vary.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) mtu: Mtu,
    pub(super) psn: u32,
    pub(super) access: Access,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) rd_atomic: u8,
    pub(super) depth: u32,
    pub(super) cq: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mtu: Mtu::ALL[2],
            psn: 0xff_fff0,
            access: Access::ALL,
            timeout: 8,
            retry_cnt: 7,
            rnr_retry: 7,
            rd_atomic: 4,
            depth: 64,
            cq: 4096,
        }
    }
}

impl World {
    pub(super) fn new(seed: u64, setup: Setup) -> Self {
        Self::with(seed, setup, |_| {})
    }

    pub(super) fn with(seed: u64, setup: Setup, tune: impl Fn(&mut Config)) -> Self {
        let mut world = Self::unconnected(seed, setup, tune);
        for side in 0..2 {
            world.connect(side, setup);
        }
        world
    }

    /// Both queue pairs in INIT.
    pub(super) fn unconnected(seed: u64, setup: Setup, tune: impl Fn(&mut Config)) -> Self {
        let side = |at: usize| {
            let mut config = Config::new(address(at));
            tune(&mut config);
            let mut engine = Engine::new(config, &Secret::new([seed, at as u64]));
            let pd = engine.create_pd().unwrap();
            let cq = engine.create_cq(setup.cq).unwrap();
            let qpn = engine.create_qp(qp_init(pd, cq, setup.depth)).unwrap();
            let init = QpAttr {
                pkey_index: Some(0),
                port: Some(1),
                access: Some(setup.access),
                ..QpAttr::default()
            };
            engine.modify_qp(qpn, QpState::Init, &init).unwrap();
            Side {
                engine,
                pd,
                cq,
                qpn,
                regions: BTreeMap::new(),
                queued: VecDeque::new(),
                last_done: Time::ZERO,
            }
        };
        Self {
            sides: [side(0), side(1)],
            now: Time::ZERO,
            rng: Rng::new(seed),
            faults: Faults::default(),
            memory: MemoryModel::default(),
            latency_ns: 1000,
            happenings: BinaryHeap::new(),
            counter: 0,
            trace: 0,
        }
    }

    pub(super) fn connect(&mut self, side: usize, setup: Setup) {
        let peer_qpn = self.sides[1 - side].qpn;
        let Side { engine, qpn, .. } = &mut self.sides[side];
        let rtr = QpAttr {
            peer: Some(address(1 - side)),
            path_mtu: Some(setup.mtu),
            dest_qpn: Some(peer_qpn),
            rq_psn: Some(Psn::new(setup.psn)),
            max_dest_rd_atomic: Some(setup.rd_atomic),
            min_rnr_timer: Some(RnrTimer::new(1)),
            ..QpAttr::default()
        };
        engine.modify_qp(*qpn, QpState::Rtr, &rtr).unwrap();
        let rts = QpAttr {
            timeout: Some(setup.timeout),
            retry_cnt: Some(setup.retry_cnt),
            rnr_retry: Some(setup.rnr_retry),
            sq_psn: Some(Psn::new(setup.psn)),
            max_rd_atomic: Some(setup.rd_atomic),
            ..QpAttr::default()
        };
        engine.modify_qp(*qpn, QpState::Rts, &rts).unwrap();
    }

    pub(super) fn region(&mut self, side: usize, len: u64, access: Access, bytes: Bytes) -> Region {
        let side = &mut self.sides[side];
        let iova = 0x10_0000_0000;
        let registered = side
            .engine
            .register(Registration {
                pd: side.pd,
                iova: Iova::new(iova),
                len,
                access,
                kind: MemoryKind::Host,
            })
            .unwrap();
        let id = (registered.id.slot(), registered.id.generation());
        side.regions.insert(id, bytes);
        Region { lkey: registered.lkey, rkey: registered.rkey, id, iova }
    }

    pub(super) fn plain(&mut self, side: usize, len: usize) -> Region {
        self.region(side, len as u64, Access::ALL, Bytes::Plain(vec![0; len]))
    }

    pub(super) fn bytes(&mut self, side: usize, region: Region) -> &mut Vec<u8> {
        match self.sides[side].regions.get_mut(&region.id) {
            Some(Bytes::Plain(bytes)) => bytes,
            _ => panic!("no plain region"),
        }
    }

    /// Takes everything the engines want to do now.
    pub(super) fn drain(&mut self) {
        for at in 0..2 {
            loop {
                let mut idle = true;
                while let Some(op) = self.sides[at].engine.poll_memory() {
                    self.run(at, op);
                    idle = false;
                }
                while let Some(transmit) = self.sides[at].engine.poll_transmit(self.now) {
                    self.transmit(1 - at, transmit);
                    idle = false;
                }
                if idle {
                    break;
                }
            }
        }
    }

    /// The next thing happens. `false` when nothing ever will.
    pub(super) fn step(&mut self) -> bool {
        self.drain();
        let happening = self.happenings.peek().map(|Reverse(upcoming)| upcoming.when);
        let clocks = [0, 1].map(|side| self.sides[side].engine.poll_timeout());
        let clock = clocks.into_iter().flatten().min();
        match (happening, clock) {
            (Some(at), clock) if clock.is_none_or(|clock| at <= clock) => {
                self.now = at.max(self.now);
                if let Some(Reverse(upcoming)) = self.happenings.pop() {
                    self.happen(upcoming.happening);
                }
            }
            (_, Some(at)) => {
                self.now = at.max(self.now);
                for side in &mut self.sides {
                    side.engine.handle_timeout(self.now);
                }
            }
            _ => return false,
        }
        self.drain();
        true
    }

    /// Steps until nothing happens any more.
    pub(super) fn settle(&mut self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < 10_000_000, "never comes to rest");
        }
    }

    /// Delivers a datagram made by the test.
    pub(super) fn inject(&mut self, to: usize, datagram: Vec<u8>) {
        self.sides[to].engine.handle_datagram(self.now, &path_to(to), datagram);
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Datagram { to, datagram } => {
                self.sides[to].engine.handle_datagram(self.now, &path_to(to), datagram);
            }
            Happening::Memory { at, op } => {
                assert_eq!(self.sides[at].queued.pop_front(), Some(op.token));
                let (token, buffer, result) = self.carry_out(at, op);
                let engine = &mut self.sides[at].engine;
                engine.handle_memory_done(token, buffer, result.ok_or(MemFault));
            }
            Happening::Answer { at, token, buffer, result } => {
                let engine = &mut self.sides[at].engine;
                engine.handle_memory_done(token, buffer, result.ok_or(MemFault));
            }
        }
    }

    fn at(&mut self, when: Time, happening: Happening) {
        self.counter += 1;
        self.happenings.push(Reverse(Upcoming { when, number: self.counter, happening }));
    }

    fn transmit(&mut self, to: usize, transmit: Transmit) {
        let Transmit { path, datagram } = transmit;
        assert_eq!(path, path_to(to));
        let digest = crc32fast::hash(&datagram);
        self.trace = self.trace.rotate_left(5) ^ u64::from(digest) ^ self.now.as_nanos() << 20;
        let copies = 1 + usize::from(self.rng.chance(self.faults.duplication));
        for _ in 0..copies {
            if self.rng.chance(self.faults.loss) {
                continue;
            }
            let mut delay = self.latency_ns;
            if self.rng.chance(self.faults.reorder) {
                delay += self.rng.below(20 * self.latency_ns);
            }
            let mut datagram = datagram.clone();
            if self.rng.chance(self.faults.corruption) {
                let bit = self.rng.below(datagram.len() as u64 * 8) as usize;
                datagram[bit / 8] ^= 1 << (bit % 8);
            }
            let when = self.now + Duration::from_nanos(delay);
            self.at(when, Happening::Datagram { to, datagram });
        }
        self.sides[1 - to].engine.recycle(datagram);
    }

    /// Takes an operation. It takes effect when it is answered, or, where answers may overtake each
    /// other, at once: effects always keep their order.
    fn run(&mut self, at: usize, op: MemOp) {
        if self.memory.delay_ns == 0 {
            let (token, buffer, result) = self.carry_out(at, op);
            let engine = &mut self.sides[at].engine;
            engine.handle_memory_done(token, buffer, result.ok_or(MemFault));
            return;
        }
        let delay = 1 + self.rng.below(self.memory.delay_ns);
        let when = self.now + Duration::from_nanos(delay);
        if self.memory.unordered {
            let (token, buffer, result) = self.carry_out(at, op);
            self.at(when, Happening::Answer { at, token, buffer, result });
            return;
        }
        let side = &mut self.sides[at];
        side.last_done = when.max(side.last_done);
        side.queued.push_back(op.token);
        let when = side.last_done;
        self.at(when, Happening::Memory { at, op });
    }

    fn carry_out(&mut self, at: usize, op: MemOp) -> (MemToken, Vec<u8>, Option<u64>) {
        let MemOp { token, kind, segments, mut buffer, at: start, .. } = op;
        let mut result = Some(0);
        let mut cursor = start;
        if kind == MemKind::Read {
            let len: usize = segments.iter().map(|segment| segment.len as usize).sum();
            buffer.resize(start + len, 0);
        }
        for segment in segments.iter() {
            let len = segment.len as usize;
            let done = self.apply(at, *segment, kind, &mut buffer, cursor);
            result = result.and(done);
            cursor += len;
        }
        (token, buffer, result)
    }

    fn apply(
        &mut self,
        at: usize,
        segment: Segment,
        kind: MemKind,
        buffer: &mut [u8],
        cursor: usize,
    ) -> Option<u64> {
        let id = (segment.region.slot(), segment.region.generation());
        let len = segment.len as usize;
        let bytes = self.sides[at].regions.get_mut(&id).expect("memory freed under an access");
        match (bytes, kind) {
            (Bytes::Broken, _) | (_, MemKind::Pull) => return None,
            (Bytes::Plain(bytes), MemKind::Read) => {
                let from = &bytes[segment.offset as usize..][..len];
                buffer[cursor..cursor + len].copy_from_slice(from);
            }
            (Bytes::Plain(bytes), MemKind::Write) => {
                let into = &mut bytes[segment.offset as usize..][..len];
                into.copy_from_slice(&buffer[cursor..cursor + len]);
            }
            (Bytes::Plain(bytes), MemKind::CompareSwap { compare, swap }) => {
                let word = &mut bytes[segment.offset as usize..][..8];
                let old = u64::from_ne_bytes(word.try_into().unwrap());
                if old == compare {
                    word.copy_from_slice(&swap.to_ne_bytes());
                }
                return Some(old);
            }
            (Bytes::Plain(bytes), MemKind::FetchAdd { add }) => {
                let word = &mut bytes[segment.offset as usize..][..8];
                let old = u64::from_ne_bytes(word.try_into().unwrap());
                word.copy_from_slice(&old.wrapping_add(add).to_ne_bytes());
                return Some(old);
            }
            (Bytes::Pattern { .. }, MemKind::Read) => {
                for (i, byte) in buffer[cursor..cursor + len].iter_mut().enumerate() {
                    *byte = pattern(segment.offset + i as u64);
                }
            }
            (Bytes::Pattern { matched }, _) => {
                let got = &buffer[cursor..cursor + len];
                let same = |(i, byte): (usize, &u8)| *byte == pattern(segment.offset + i as u64);
                *matched += got.iter().enumerate().filter(|at| same(*at)).count() as u64;
            }
        }
        Some(0)
    }
}

pub(super) fn qp_init(pd: PdId, cq: CqId, depth: u32) -> QpInit {
    QpInit {
        kind: QpKind::Rc,
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        max_send_wr: depth,
        max_recv_wr: depth,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 256,
    }
}
