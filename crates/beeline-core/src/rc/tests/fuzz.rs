//! Structure-aware fuzzing: well-formed packets with every field near the edge of what is allowed, their
//! ICRC right, against queue pairs in RTS with requests outstanding.
//!
//! [`run`] is a plain function of its input bytes. What it checks: nothing panics, memory is touched only
//! inside granted regions (the simulated memory indexes its own bytes), a region without the right is
//! never written, and whatever happened, the world comes to rest.

use alloc::vec;
use alloc::vec::Vec;

use super::net::{Bytes, Faults, MemoryModel, Region, Rng, Setup, World, path_to};
use crate::mr::Access;
use crate::rc::{Payload, QpState, RecvWr, SendOp, SendWr};
use crate::roce::packet::seal;
use crate::roce::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Head, Headers, ImmDt, Mtu, Opcode, Psn, Qpn, Reth,
};
use crate::time::Duration;

/// Bytes of the region everything may touch; a message of the peer can be longer.
const REGION: u64 = 4096;

/// Reads choices from the input; zeros when it is used up.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }

    fn chance(&mut self, in_16: u8) -> bool {
        self.byte() % 16 < in_16
    }
}

/// One execution.
pub(super) fn run(input: &[u8]) {
    let mut choices = Choices(input);
    let setup = Setup {
        mtu: choices.of(&[Mtu::MIN, Mtu::ALL[1], Mtu::MAX]),
        psn: choices.of(&[0, 0xff_fffc, 0x7f_fffe]),
        rnr_retry: choices.of(&[0, 1, 7]),
        retry_cnt: choices.of(&[0, 1, 7]),
        rd_atomic: choices.of(&[1, 4, 16]),
        ..Setup::default()
    };
    let mut world = World::new(1, setup);
    world.memory = choices.of(&[
        MemoryModel { delay_ns: 0, unordered: false },
        MemoryModel { delay_ns: 5000, unordered: false },
        MemoryModel { delay_ns: 5000, unordered: true },
    ]);
    let shared = [0, 1].map(|side| world.plain(side, REGION as usize));
    let mut private = |side| {
        let bytes = Bytes::Plain(vec![0; REGION as usize]);
        world.region(side, REGION, Access::LOCAL_READ | Access::REMOTE_READ, bytes)
    };
    let private = [private(0), private(1)];
    for side in 0..2 {
        post(&mut world, &mut choices, side, shared);
    }
    for _ in 0..24 {
        match choices.byte() % 8 {
            0..4 => inject(&mut world, &mut choices, setup, shared, private),
            4 => {
                let side = usize::from(choices.byte() % 2);
                post(&mut world, &mut choices, side, shared);
            }
            5 | 6 => {
                for _ in 0..choices.byte() % 32 {
                    world.step();
                }
            }
            _ => disturb(&mut world, &mut choices, shared),
        }
    }
    world.faults = Faults::default();
    // At most so many steps: a receiver that stays away makes a sender with `rnr_retry` 7 try for ever.
    for _ in 0..2000 {
        if !world.step() {
            break;
        }
    }
    for (side, region) in private.into_iter().enumerate() {
        let bytes = world.bytes(side, region);
        assert!(bytes.iter().all(|byte| *byte == 0), "a region without the right was written");
    }
}

/// Work requests of `side`, of all kinds.
fn post(world: &mut World, choices: &mut Choices<'_>, side: usize, regions: [Region; 2]) {
    let (local, remote) = (regions[side], regions[1 - side]);
    for id in 0..choices.byte() % 6 {
        let len = u32::from(choices.byte()) * 8;
        let target = remote.remote(u64::from(choices.byte()));
        let op = match choices.byte() % 6 {
            0 => SendOp::Send { imm: None },
            1 => SendOp::Write { remote: target, imm: Some(1) },
            2 => SendOp::Write { remote: target, imm: None },
            3 => SendOp::Read { remote: target },
            4 => SendOp::FetchAdd { remote: remote.remote(8), add: 1 },
            _ => SendOp::CompareSwap { remote: remote.remote(16), compare: 0, swap: 1 },
        };
        let atomic = matches!(op, SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. });
        let len = if atomic { 8 } else { len };
        let payload = Payload::Sges(vec![local.sge(0, len)]);
        let qpn = world.sides[side].qpn;
        let engine = &mut world.sides[side].engine;
        let _ = engine.post_send(qpn, SendWr::new(u64::from(id), op, payload));
        let sges = vec![local.sge(2048, u32::from(choices.byte()) * 8)];
        let _ = engine.post_recv(qpn, RecvWr { id: u64::from(id), sges });
    }
}

/// One packet, nearly right.
fn inject(
    world: &mut World,
    choices: &mut Choices<'_>,
    setup: Setup,
    shared: [Region; 2],
    private: [Region; 2],
) {
    let to = usize::from(choices.byte() % 2);
    let opcode = match choices.byte() {
        byte if byte < 240 => Opcode::ALL[usize::from(byte) % Opcode::ALL.len()],
        byte => Opcode(byte),
    };
    let psn = Psn::new(setup.psn.wrapping_add(u32::from(choices.byte() % 40)).wrapping_sub(8));
    let region = if choices.chance(12) { shared[to] } else { private[to] };
    let near = |choices: &mut Choices<'_>| {
        let edge = choices.of(&[0, 8, REGION - 8, REGION, u64::MAX, 1 << 63]);
        let step = u64::from(choices.of(&[0u8, 0, 0, 1, 4, 7]));
        region.iova.wrapping_add(edge).wrapping_add(step)
    };
    let rkey = region.rkey.as_u32() ^ u32::from(choices.chance(2));
    let mtu = setup.mtu.bytes();
    let lens = [0, 1, 8, mtu - 1, mtu, mtu + 1, 2 * mtu, 1 << 31, u32::MAX];
    let has = opcode.layout().map_or(Headers::default(), |layout| layout.headers);
    let on = |header| has.has(header);
    let mut head = Head {
        reth: on(Headers::RETH).then(|| Reth {
            va: near(choices),
            rkey,
            dma_len: choices.of(&lens),
        }),
        atomic: on(Headers::ATOMIC).then(|| AtomicEth {
            va: near(choices),
            rkey,
            swap_add: 1,
            compare: 0,
        }),
        aeth: on(Headers::AETH).then(|| Aeth { raw: u32::from(choices.byte()) << 24 }),
        atomic_ack: on(Headers::ATOMIC_ACK).then_some(AtomicAckEth { original: 5 }),
        imm: on(Headers::IMM).then_some(ImmDt { data: 9 }),
        ..Head::new(Bth {
            ack_request: choices.chance(8),
            solicited: choices.chance(4),
            ..Bth::new(opcode, world.sides[to].qpn, psn)
        })
    };
    if choices.chance(1) {
        head.bth.dest_qp = Qpn::new(u32::from(choices.byte()));
    }
    let payload = choices.of(&[0, 0, 1, 8, mtu - 1, mtu, mtu, mtu + 1, 5]);
    let mut datagram = Vec::new();
    head.emit(payload as usize, &mut datagram);
    if choices.chance(1) {
        let cut = usize::from(choices.byte());
        datagram.truncate(datagram.len().saturating_sub(cut));
    }
    if choices.chance(1) && datagram.len() > 1 {
        datagram[1] ^= choices.byte();
    }
    seal(&path_to(to), &mut datagram, 0);
    world.inject(to, datagram);
    world.drain();
}

/// Something else happens.
fn disturb(world: &mut World, choices: &mut Choices<'_>, regions: [Region; 2]) {
    let at = usize::from(choices.byte() % 2);
    let qpn = world.sides[at].qpn;
    match choices.byte() % 8 {
        0 => {
            let _ = world.sides[at].engine.modify_qp(qpn, QpState::Err, &Default::default());
        }
        1 => {
            let _ = world.sides[at].engine.modify_qp(qpn, QpState::Reset, &Default::default());
        }
        2 => {
            let _ = world.sides[at].engine.revoke(regions[at].lkey);
        }
        3 => world.faults = Faults { loss: 300, duplication: 300, reorder: 300, corruption: 100 },
        4 => world.faults = Faults::default(),
        5 => {
            let side = &mut world.sides[at];
            let _ = side.engine.deregister(side.pd, regions[at].lkey);
        }
        _ => {
            let now = world.now + Duration::from_micros(u64::from(choices.byte()) * 100);
            // Only when nothing was to happen before: time does not run backwards.
            world.now = now;
            world.sides[at].engine.handle_timeout(now);
            world.drain();
        }
    }
}

fn executions(count: u64, first_seed: u64) {
    let mut input = [0; 512];
    for seed in 0..count {
        let mut rng = Rng::new(first_seed + seed);
        for chunk in input.chunks_mut(8) {
            chunk.copy_from_slice(&rng.next().to_le_bytes()[..chunk.len()]);
        }
        run(&input);
    }
}

#[test]
fn a_seeded_run_of_the_fuzz_target() {
    executions(3000, 0);
}

/// The long run. `BEELINE_FUZZ_RUNS` executions in release, from `BEELINE_FUZZ_SEED` on.
#[test]
#[ignore = "long: run in release"]
fn a_long_run_of_the_fuzz_target() {
    extern crate std;
    let number = |name, otherwise| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    };
    executions(number("BEELINE_FUZZ_RUNS", 1_000_000), number("BEELINE_FUZZ_SEED", 1 << 32));
}
