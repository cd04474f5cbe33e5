//! Calls in graphs: captured on devices with a driver, replayed, and compared each time. Simulated devices have no graphs, so
//! that these run where `BEELINE_TEST_DEVICES` names devices: on the test library's (`emulated`), or on GPUs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use beeline::collective::{
    Call, Collective, Communicator, DataType, Factor, Place, RedOp, Settings, group,
};
use beeline::gpu::{Buffer, ForeignStream, Stream};

use crate::data::KINDS;
use crate::driver::Direct;
use crate::support::*;

/// What is replayed, this often, and once more with calls outside of the graph in between.
const REPLAYS: u64 = 2;

/// A communicator with the streams of a program that captures them.
struct World {
    /// A capture may forbid what another test does meanwhile.
    _alone: MutexGuard<'static, ()>,
    direct: Direct,
    comms: Vec<Communicator>,
    /// Contexts of the devices.
    contexts: Vec<usize>,
    handles: Vec<usize>,
    streams: Vec<Arc<Stream>>,
    /// Of this library, for what is outside of graphs.
    own: Vec<Arc<Stream>>,
}

/// The memory of one call on all ranks.
struct Memory {
    call: Call,
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
}

impl World {
    /// `None` on simulated devices.
    fn new(ranks: u32, settings: &Settings) -> Option<Self> {
        static ONE: Mutex<()> = Mutex::new(());

        let _alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let gpus = gpus(ranks);
        gpus.first()?.info().cuda?;
        let direct = Direct::open();
        let contexts: Vec<usize> =
            (0..ranks as usize).map(|device| direct.push_primary(device)).collect();
        let comms = Communicator::local(&gpus, settings).unwrap();
        let mut world =
            Self { _alone, direct, comms, contexts, handles: vec![], streams: vec![], own: vec![] };
        world.handles = (0..ranks as usize).map(|rank| world.stream(rank)).collect();
        let wrapped = |(gpu, handle): (_, &usize)| world.wrapped(gpu, *handle);
        world.streams = gpus.iter().zip(&world.handles).map(wrapped).collect();
        world.own = gpus.iter().map(|gpu| Arc::new(gpu.stream().unwrap())).collect();
        Some(world)
    }

    fn ranks(&self) -> u32 {
        self.comms.len() as u32
    }

    fn on(&self, rank: usize) {
        self.direct.done("cuCtxSetCurrent", &[self.contexts[rank]]);
    }

    /// A stream of the program's own.
    fn stream(&self, rank: usize) -> usize {
        self.on(rank);
        self.direct.ask("cuStreamCreate", 1)
    }

    fn wrapped(&self, gpu: &beeline::gpu::Gpu, handle: usize) -> Arc<Stream> {
        // SAFETY: a stream of this process's driver, which is never destroyed.
        Arc::new(gpu.foreign_stream(unsafe { ForeignStream::new(handle) }).unwrap())
    }

    fn memory(&self, call: Call) -> Memory {
        let ranks = self.ranks();
        let alloc = |bytes: fn(&Call, u32, u32) -> u64| {
            let one = |(rank, comm): (u32, &Communicator)| {
                comm.gpu().alloc(bytes(&call, rank, ranks).max(1)).unwrap()
            };
            (0..).zip(&self.comms).map(one).collect()
        };
        let inputs = alloc(|call, rank, ranks| call.input_bytes(rank, ranks).unwrap());
        let outputs = alloc(|call, rank, ranks| call.output_bytes(rank, ranks).unwrap());
        Memory { call, inputs, outputs }
    }

    /// Queues the call on all ranks.
    fn queue(&self, memory: &Memory, streams: &[Arc<Stream>]) {
        group(|| {
            for (rank, comm) in self.comms.iter().enumerate() {
                let place = |buffer: &Buffer| Place::Foreign(buffer.ptr());
                let (input, output) = (place(&memory.inputs[rank]), place(&memory.outputs[rank]));
                let factor = memory.factor().map(Factor::Host);
                comm.call(memory.call, input, output, factor, &streams[rank])?;
            }
            Ok(())
        })
        .unwrap();
    }

    /// Fills the inputs with something that depends on `turn`, has `run` made the calls, and compares.
    fn check(&self, memory: &Memory, turn: u64, run: impl FnOnce()) {
        let inputs = memory.filled(self, turn);
        run();
        for (rank, stream) in self.own.iter().enumerate() {
            self.on(rank);
            self.direct.finish(self.handles[rank]);
            // Between a graph and what is outside of it the program keeps the order.
            stream.synchronize(Instant::now() + LONG).unwrap();
            let call = &memory.call;
            let bytes = call.output_bytes(rank as u32, self.ranks()).unwrap();
            let factors: Vec<_> = self.comms.iter().filter_map(|_| memory.factor()).collect();
            let right = expected(call, &inputs, &factors, rank as u32);
            let found = get(&memory.outputs[rank], 0, bytes, stream);
            let at = found.iter().zip(&right).position(|(found, right)| found != right);
            assert_eq!(at, None, "{call}, {} ranks, turn {turn}, rank {rank}", self.ranks());
        }
        for comm in &self.comms {
            assert!(comm.async_error().is_none(), "{:?}", comm.async_error());
        }
    }

    /// Captures every rank's stream by itself while `work` runs; the graphs, one a rank.
    fn captured(&self, mode: usize, work: impl FnOnce()) -> Vec<usize> {
        for (rank, handle) in self.handles.iter().enumerate() {
            self.on(rank);
            self.direct.begin(*handle, mode);
        }
        work();
        let ended = self.handles.iter().enumerate().map(|(rank, handle)| {
            self.on(rank);
            self.direct.end_graph(*handle).unwrap_or_else(|code| panic!("mode {mode}: {code}"))
        });
        let graphs: Vec<usize> = ended.collect();
        graphs.into_iter().map(|graph| self.direct.instance(graph)).collect()
    }

    fn launch(&self, graphs: &[usize]) {
        for (rank, graph) in graphs.iter().enumerate() {
            self.on(rank);
            self.direct.done("cuGraphLaunch", &[*graph, self.handles[rank]]);
        }
    }

    fn close(self) {
        self.comms.iter().for_each(|comm| comm.close(Instant::now() + LONG).unwrap());
        assert_eq!(self.direct.refused(), 0, "calls that captures do not allow");
    }
}

impl Memory {
    fn factor(&self) -> Option<[u8; 8]> {
        (self.call.op == RedOp::PRE_MUL_SUM).then(|| noise(8, 77).try_into().unwrap())
    }

    fn filled(&self, world: &World, turn: u64) -> Vec<Vec<u8>> {
        let ranks = world.ranks();
        let each = |(rank, buffer): (u32, &Buffer)| {
            // The root's alone is read of some calls; what the answers are made from is as long on all.
            let size = self.call.dtype.size_bytes().unwrap();
            let whole = self.call.count * size * u64::from(self.call.input_parts(ranks));
            let bytes = noise(whole as usize, turn * 100 + u64::from(rank) + 1);
            let read = self.call.input_bytes(rank, ranks).unwrap() as usize;
            put(buffer, 0, &bytes[..read], &world.own[rank as usize]);
            bytes
        };
        (0..).zip(&self.inputs).map(each).collect()
    }
}

/// Every collective by every kernel (packets, lines where devices have atomics between them, chunks), in every mode.
fn every_collective(ranks: u32, counts: &[u64]) {
    let Some(world) = World::new(ranks, &settings(|_| {})) else { return };
    let mut mode = 0;
    for (number, kind) in KINDS.into_iter().enumerate() {
        for (count, root) in counts.iter().zip(0..) {
            let count = if kind == Collective::Barrier { 0 } else { *count };
            // What is large takes long here, and is carried alike by all.
            let large = count > 50_000;
            if large && !matches!(number, 0 | 3) {
                continue;
            }
            let memory = world.memory(Call::new(kind, count, DataType::F32).root(root % ranks));
            // Twice in one graph: the second begins where the first ends.
            let graphs = world.captured(mode, || {
                world.queue(&memory, &world.streams);
                world.queue(&memory, &world.streams);
            });
            mode = (mode + 1) % 3;
            for turn in 1..=if large { 1 } else { REPLAYS } {
                world.check(&memory, turn, || world.launch(&graphs));
            }
            world.check(&memory, 10, || world.queue(&memory, &world.streams));
            world.check(&memory, 11, || world.launch(&graphs));
            if !large {
                world.check(&memory, 12, || world.queue(&memory, &world.own));
                world.check(&memory, 13, || {
                    world.launch(&graphs);
                    world.launch(&graphs);
                });
            }
            world.direct.destroy(&graphs);
        }
    }
    world.close();
}

#[test]
fn every_collective_2() {
    every_collective(2, &[2, 5003, 140_001]);
}

#[test]
fn every_collective_3() {
    every_collective(3, &[1, 5001]);
}

#[test]
fn every_collective_8() {
    every_collective(8, &[513]);
}

/// Broadcasts that ranks hand on, in several launches a call, from memory of its own and in place; an all-reduce in two shots.
#[test]
fn shared_work_is_captured() {
    let Some(world) = World::new(3, &settings(|_| {})) else { return };
    for (mode, kind) in [Collective::Broadcast, Collective::AllReduce].into_iter().enumerate() {
        let memory = world.memory(Call::new(kind, 40_003, DataType::F32).root(1));
        let outputs = || memory.outputs.clone();
        let in_place = Memory { call: memory.call, inputs: outputs(), outputs: outputs() };
        for memory in [&memory, &in_place] {
            let graphs = world.captured(mode, || world.queue(memory, &world.streams));
            for turn in 1..=REPLAYS {
                world.check(memory, turn, || world.launch(&graphs));
            }
            world.check(memory, 10, || world.queue(memory, &world.streams));
            world.direct.destroy(&graphs);
        }
    }
    world.close();
}

/// Sends and receives, and factors, in graphs; a group of several calls.
#[test]
fn groups_are_captured() {
    let Some(world) = World::new(3, &settings(|_| {})) else { return };
    for count in [3, 9011, 150_003] {
        let sum = Call::new(Collective::AllReduce, count, DataType::I32).op(RedOp::PRE_MUL_SUM);
        let (sum, all) = (
            world.memory(sum),
            world.memory(Call::new(Collective::AllGather, count, DataType::U8)),
        );
        // Everybody's right neighbour gets what its left one has.
        let around = |streams: &[Arc<Stream>]| {
            for (rank, comm) in (0..).zip(&world.comms) {
                let call = |kind, peer: u32| Call::new(kind, count, DataType::U8).root(peer % 3);
                let from = Place::Foreign(all.inputs[rank as usize].ptr());
                let to = Place::Foreign(all.outputs[rank as usize].ptr());
                comm.call(
                    call(Collective::Send, rank + 1),
                    from,
                    Place::None,
                    None,
                    &streams[rank as usize],
                )
                .unwrap();
                comm.call(
                    call(Collective::Recv, rank + 2),
                    Place::None,
                    to,
                    None,
                    &streams[rank as usize],
                )
                .unwrap();
            }
            Ok(())
        };
        let graphs = world.captured(1, || {
            group(|| {
                world.queue(&sum, &world.streams);
                world.queue(&all, &world.streams);
                Ok(())
            })
            .unwrap();
        });
        let passed = world.captured(2, || group(|| around(&world.streams)).unwrap());
        for turn in 1..=REPLAYS {
            let inputs = all.filled(&world, turn);
            world.check(&sum, turn, || world.launch(&graphs));
            let compare = |rank: usize, right: &[u8]| {
                let found = get(&all.outputs[rank], 0, right.len() as u64, &world.own[rank]);
                assert!(found == right, "{count} elements, turn {turn}, rank {rank}");
            };
            (0..3).for_each(|rank| compare(rank, &inputs.concat()));
            world.launch(&passed);
            for rank in 0..3 {
                world.on(rank);
                world.direct.finish(world.handles[rank]);
                compare(rank, &inputs[(rank + 2) % 3]);
            }
        }
        world.direct.destroy(&graphs);
        world.direct.destroy(&passed);
    }
    world.close();
}

/// All streams of all ranks in one capture, two of each rank: calls keep their order from stream to stream.
#[test]
fn streams_fork_and_join() {
    let Some(world) = World::new(2, &settings(|_| {})) else { return };
    let direct = &world.direct;
    let sides: Vec<usize> = (0..2).map(|rank| world.stream(rank)).collect();
    let gpus: Vec<_> = world.comms.iter().map(Communicator::gpu).collect();
    let wrapped: Vec<_> =
        gpus.iter().zip(&sides).map(|(gpu, side)| world.wrapped(gpu, *side)).collect();
    let event = |rank: usize| {
        world.on(rank);
        direct.ask("cuEventCreate", 2)
    };
    let events = [event(0), event(1), event(0), event(1)];
    let [first, second] = [world.handles[0], world.handles[1]];
    let call = Call::new(Collective::AllReduce, 5003, DataType::I32);
    let memory = world.memory(call);
    let doubled = Memory { call, inputs: memory.outputs.clone(), outputs: memory.outputs.clone() };
    world.on(0);
    direct.begin(first, 0);
    direct.done("cuEventRecord", &[events[0], first]);
    for (rank, stream) in [(1, second), (0, sides[0]), (1, sides[1])] {
        world.on(rank);
        direct.done("cuStreamWaitEvent", &[stream, events[0], 0]);
    }
    world.queue(&memory, &world.streams);
    world.queue(&doubled, &wrapped);
    world.queue(&doubled, &world.streams);
    for (rank, stream, event) in [(1, second, 1), (0, sides[0], 2), (1, sides[1], 3)] {
        world.on(rank);
        direct.done("cuEventRecord", &[events[event], stream]);
        world.on(0);
        direct.done("cuStreamWaitEvent", &[first, events[event], 0]);
    }
    let graph = direct.end(first).unwrap();
    for turn in 1..=REPLAYS {
        let inputs = memory.filled(&world, turn);
        world.on(0);
        direct.done("cuGraphLaunch", &[graph, first]);
        direct.finish(first);
        let once = expected(&call, &inputs, &[], 0);
        // Twice the sum of two equal numbers each.
        let right: Vec<u8> = once
            .chunks_exact(4)
            .flat_map(|word| {
                i32::from_le_bytes(word.try_into().unwrap()).wrapping_mul(4).to_le_bytes()
            })
            .collect();
        for rank in 0..2 {
            let found = get(&memory.outputs[rank], 0, right.len() as u64, &world.own[rank]);
            assert!(found == right, "turn {turn}, rank {rank}");
        }
        world.check(&memory, turn + 10, || {
            world.queue(&memory, &wrapped);
            (0..2).for_each(|rank| {
                world.on(rank);
                direct.finish(sides[rank]);
            });
        });
    }
    direct.destroy(&[graph]);
    world.close();
}

/// Registered memory is written straight by each replay, as long as its receiver has it registered; slots are used once the
/// sender knows that it is gone.
#[test]
fn registered_memory_is_written_by_replays() {
    let settings = settings(|settings| settings.straight = true);
    let Some(world) = World::new(6, &settings) else { return };
    // More than the slots of so many ranks have room for.
    let bytes: u64 = (4 << 20) + 1003;
    let alloc = |rank: usize| world.comms[rank].gpu().alloc(bytes).unwrap();
    let (inputs, outputs) = ([alloc(0), alloc(1)], [alloc(0), alloc(1)]);
    let pair = |streams: &[Arc<Stream>]| {
        group(|| {
            for rank in 0..2 {
                let call = |kind| Call::new(kind, bytes, DataType::U8).root(1 - rank as u32);
                let place = |buffer: &Buffer| Place::Foreign(buffer.ptr());
                let (comm, stream) = (&world.comms[rank], &streams[rank]);
                let (from, to) = (place(&inputs[rank]), place(&outputs[rank]));
                comm.call(call(Collective::Send), from, Place::None, None, stream)?;
                comm.call(call(Collective::Recv), Place::None, to, None, stream)?;
            }
            Ok(())
        })
        .unwrap();
    };
    let register = |rank: usize| world.comms[rank].register(outputs[rank].ptr(), bytes);
    (0..2).for_each(register);
    let graphs = world.captured(1, || pair(&world.streams));
    let check = |turn: u64, straight: [u64; 2], run: &dyn Fn()| {
        let seed = |rank: usize| turn * 10 + rank as u64;
        let before = [0, 1].map(|rank| world.comms[rank].straight());
        for (rank, input) in inputs.iter().enumerate() {
            put(input, 0, &noise(bytes as usize, seed(rank)), &world.own[rank]);
        }
        run();
        for rank in 0..2 {
            world.on(rank);
            world.direct.finish(world.handles[rank]);
            let found = get(&outputs[rank], 0, bytes, &world.own[rank]);
            let error = world.comms[rank].async_error();
            assert!(error.is_none(), "turn {turn}: {error:?}");
            assert!(found == noise(bytes as usize, seed(1 - rank)), "turn {turn}, rank {rank}");
            assert_eq!(world.comms[rank].straight() - before[rank], straight[rank], "turn {turn}");
        }
    };
    for turn in 1..=REPLAYS {
        check(turn, [1, 1], &|| world.launch(&graphs));
    }
    check(11, [1, 1], &|| pair(&world.streams));
    world.comms[1].deregister(outputs[1].ptr(), bytes);
    check(12, [0, 1], &|| pair(&world.streams));
    check(13, [0, 1], &|| world.launch(&graphs));
    register(1);
    check(14, [1, 1], &|| pair(&world.streams));
    // The graph means the registration that is gone.
    check(15, [0, 1], &|| world.launch(&graphs));
    world.direct.destroy(&graphs);
    world.close();
}

/// What copies would carry outside of a graph is carried by kernels inside of it: copies are queued in streams of the
/// library's own.
#[test]
fn copies_are_not_captured() {
    let copies = |settings: &mut Settings| settings.copy_engine_bytes = Some(64 << 10);
    let Some(world) = World::new(2, &settings(copies)) else { return };
    let copied = || world.comms.iter().map(Communicator::copied).sum::<u64>();
    let memory = world.memory(Call::new(Collective::AllGather, 30_001, DataType::F32));
    for mode in 0..3 {
        let before = copied();
        let graphs = world.captured(mode, || world.queue(&memory, &world.streams));
        world.check(&memory, 1, || world.launch(&graphs));
        assert_eq!(copied(), before, "mode {mode}");
        world.check(&memory, 2, || world.queue(&memory, &world.streams));
        assert!(copied() > before, "outside of a graph they are copies");
        world.check(&memory, 3, || world.launch(&graphs));
        world.direct.destroy(&graphs);
    }
    world.close();
}

/// Through host memory nothing can be captured: it is said, and the capture is not spoilt.
#[test]
fn host_memory_is_not_captured() {
    let Some(world) = World::new(2, &settings(|settings| settings.staged = true)) else { return };
    let memory = world.memory(Call::new(Collective::AllReduce, 100, DataType::F32));
    for mode in 0..3 {
        let graphs = world.captured(mode, || {
            let place = |buffer: &Buffer| Place::Foreign(buffer.ptr());
            let (input, output) = (place(&memory.inputs[0]), place(&memory.outputs[0]));
            let refused = world.comms[0].call(memory.call, input, output, None, &world.streams[0]);
            assert_eq!(refused.unwrap_err().code(), "stream-capturing");
        });
        world.direct.destroy(&graphs);
    }
    world.check(&memory, 1, || world.queue(&memory, &world.streams));
    world.close();
}
