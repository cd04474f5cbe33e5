//! Memory that all ranks register together, of which large moves are pulled by copies. On simulated devices the same bytes go
//! through host memory.

use std::sync::Arc;
use std::time::Instant;

use beeline::collective::{Call, Collective, Communicator, DataType, Place};
use beeline::core::addr::DevicePtr;
use beeline::gpu::{Buffer, ForeignStream, Stream};

use crate::driver::Direct;
use crate::support::*;

pub(crate) const RANKS: u32 = 3;

/// Not of whole pages, nor of whole 16 bytes.
const COUNT: u64 = (1 << 20) + 333;
const SMALL: u64 = 100_000;

/// Where the memory of a call is: both in one window, at these bytes (of which another rank's may be others), or not in any.
#[derive(Clone, Copy, Debug)]
enum At {
    Window(u64, u64),
    /// The input is the place of the output where the call finds it.
    InPlace(u64),
    Outside,
}

use Collective as C;

/// Calls, their parts' bytes, where, and how many parts rank 0 and another pull.
const CALLS: [(C, u64, At, [u64; 2]); 14] = [
    (C::AllGather, COUNT, At::Window(0, 5 << 20), [2, 2]),
    (C::AllGather, COUNT, At::Window(5 << 20, 48), [2, 2]),
    (C::AllGather, COUNT, At::InPlace(4096 + 13), [2, 2]),
    (C::AllGather, SMALL, At::Window(0, 5 << 20), [0, 0]),
    (C::AllGather, COUNT, At::Outside, [0, 0]),
    (C::AllToAll, COUNT, At::Window(0, 5 << 20), [2, 2]),
    (C::AllToAll, COUNT, At::Window(5 << 20, 5), [2, 2]),
    // From rank 1: its own is no part that is pulled; then in two pieces.
    (C::Broadcast, COUNT, At::Window(0, 5 << 20), [1, 0]),
    (C::Broadcast, (8 << 20) + 5, At::Window(0, 9 << 20), [2, 0]),
    (C::Broadcast, COUNT, At::Outside, [0, 0]),
    (C::Broadcast, 1 << 20, At::InPlace(16), [1, 0]),
    // What the others have no address for.
    (C::Scatter, COUNT, At::Window(0, 5 << 20), [0, 0]),
    (C::Gather, COUNT, At::Window(0, 5 << 20), [0, 0]),
    (C::AllReduce, 1000, At::Window(0, 5 << 20), [0, 0]),
];

pub(crate) fn rank(comm: &Communicator) {
    let pulls = comm.gpu().as_sim().is_none();
    let stream = Arc::new(comm.gpu().stream().unwrap());
    let memory = comm.gpu().alloc(18 << 20).unwrap();
    let outside = comm.gpu().alloc(10 << 20).unwrap();
    // Windows need not begin where their memory does.
    let start = DevicePtr::new(memory.ptr().as_u64() + 256);
    let len = memory.len() - 256;
    comm.register_window(start, len).unwrap();
    let both = |buffer: &Buffer| (buffer.clone(), buffer.clone());
    for (call, at, parts) in calls() {
        let (input, output, offsets) = match at {
            At::Window(from, to) => {
                let (input, output) = both(&memory);
                (input, output, (256 + from, 256 + to))
            }
            At::InPlace(to) => {
                let own = if call.kind == C::AllGather { call.count } else { 0 };
                let (input, output) = both(&memory);
                (input, output, (256 + to + own * u64::from(comm.rank()), 256 + to))
            }
            At::Outside => {
                let (input, output) = both(&outside);
                (input, output, (0, 5 << 20))
            }
        };
        let before = comm.copied();
        check(comm, &stream, call, (&input, &output), offsets);
        let expected = if pulls { parts[usize::from(comm.rank() == 1)] } else { 0 };
        assert_eq!(comm.copied() - before, expected, "{call} {at:?}");
    }
    in_a_graph(comm, &stream, (&memory, &outside));
    // Another window over a part of the same memory, and both gone one after the other.
    let (half, rest) = (len / 2, DevicePtr::new(start.as_u64() + len / 2));
    comm.register_window(rest, half).unwrap();
    comm.deregister(start, len);
    let gather = Call::new(C::AllGather, 1 << 20, DataType::U8);
    for (from, parts) in [(0, 0), (256 + half, 2)] {
        let before = comm.copied();
        check(comm, &stream, gather, (&memory, &outside), (256 + from, 0));
        assert_eq!(comm.copied() - before, if pulls { parts } else { 0 }, "from {from}");
    }
    comm.deregister(rest, half);
    let before = comm.copied();
    check(comm, &stream, gather, (&memory, &outside), (256 + half, 0));
    assert_eq!(comm.copied(), before);
    // Memory of one rank that has no name for the others: nobody pulls.
    let unnamed = match comm.rank() {
        2 => comm.gpu().alloc_shareable(2 << 20).unwrap(),
        _ => comm.gpu().alloc(2 << 20).unwrap(),
    };
    comm.register_window(unnamed.ptr(), 2 << 20).unwrap();
    check(comm, &stream, gather, (&unnamed, &outside), (0, 0));
    assert_eq!(comm.copied(), before);
    trouble(comm, &stream, (&memory, &outside));
}

fn calls() -> impl Iterator<Item = (Call, At, [u64; 2])> {
    let of = |(kind, count, at, parts)| (Call::new(kind, count, DataType::U8).root(1), at, parts);
    CALLS.into_iter().map(of)
}

fn check(
    comm: &Communicator,
    stream: &Arc<Stream>,
    call: Call,
    (input, output): (&Buffer, &Buffer),
    (from, to): (u64, u64),
) {
    let inputs = inputs(&call, comm.ranks());
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let bytes = call.output_bytes(rank, ranks).unwrap();
    if call.input_bytes(rank, ranks).unwrap() > 0 {
        put(input, from, &inputs[rank as usize], stream);
    }
    // Ranks come one after the other; who pulls early gets what was there before.
    std::thread::sleep(std::time::Duration::from_millis(u64::from(rank) * 20));
    let places = (Place::Buffer(input.clone(), from), Place::Buffer(output.clone(), to));
    comm.call(call, places.0, places.1, None, stream).unwrap();
    // Who goes on early overwrites what others have yet to pull.
    if call.input_bytes(rank, ranks).unwrap() > 0 && bytes > 0 && input.ptr() != output.ptr() {
        put(input, from, &[0xee; 4096], stream);
    }
    let found = get(output, to, bytes, stream);
    assert!(comm.async_error().is_none(), "{call}: {:?}", comm.async_error());
    assert!(found == expected(&call, &inputs, &[], rank), "{call} from {from} to {to}");
}

/// Own parts and pieces go beside the barriers in a graph, too, and each replay pulls what is there then.
fn in_a_graph(comm: &Communicator, stream: &Arc<Stream>, (memory, outside): (&Buffer, &Buffer)) {
    if comm.gpu().as_sim().is_some() {
        return;
    }
    let (direct, rank) = (Direct::open(), comm.rank());
    direct.push_primary(rank as usize);
    let handle = direct.ask("cuStreamCreate", 1);
    // SAFETY: a stream of this process's driver, which is never destroyed.
    let foreign = comm.gpu().foreign_stream(unsafe { ForeignStream::new(handle) });
    let foreign = Arc::new(foreign.unwrap());
    for (kind, count) in [(C::AllGather, 1 << 20), (C::AllToAll, 1 << 20), (C::Broadcast, 8 << 20)]
    {
        let call = Call::new(kind, count, DataType::U8).root(1);
        // Of a broadcast what is received is in the window, else what is sent.
        let (input, output) = match kind {
            C::Broadcast => ((outside, 0), (memory, 256)),
            _ => ((memory, 256), (outside, 0)),
        };
        let places = [input, output]
            .map(|(buffer, at)| Place::Foreign(DevicePtr::new(buffer.ptr().as_u64() + at)));
        let before = comm.copied();
        direct.begin(handle, 1);
        let [from, to] = places;
        comm.call(call, from, to, None, &foreign).unwrap();
        let graph = direct.end(handle).unwrap();
        assert!(comm.copied() > before || rank == call.root, "{call}");
        for turn in 0..3 {
            let inputs: Vec<Vec<u8>> = inputs(&call, comm.ranks())
                .into_iter()
                .map(|bytes| bytes.into_iter().map(|byte| byte ^ turn).collect())
                .collect();
            if call.input_bytes(rank, comm.ranks()).unwrap() > 0 {
                put(input.0, input.1, &inputs[rank as usize], stream);
            }
            direct.done("cuGraphLaunch", &[graph, handle]);
            direct.finish(handle);
            let bytes = call.output_bytes(rank, comm.ranks()).unwrap();
            let found = get(output.0, output.1, bytes, stream);
            assert!(comm.async_error().is_none(), "{call}: {:?}", comm.async_error());
            assert!(found == expected(&call, &inputs, &[], rank), "{call}, turn {turn}");
        }
        direct.destroy(&[graph]);
    }
    assert_eq!(direct.refused(), 0, "calls that captures do not allow");
}

/// Ranks that mean other places of a window: told before a byte is copied.
fn trouble(comm: &Communicator, stream: &Arc<Stream>, (memory, outside): (&Buffer, &Buffer)) {
    comm.register_window(memory.ptr(), memory.len()).unwrap();
    let call = Call::new(C::AllGather, 1 << 20, DataType::U8);
    let from = if comm.rank() == 2 { 4096 } else { 0 };
    let places = (Place::Buffer(memory.clone(), from), Place::Buffer(outside.clone(), 0));
    comm.call(call, places.0, places.1, None, stream).unwrap();
    stream.synchronize(Instant::now() + LONG).unwrap();
    let error = comm.async_error();
    if comm.gpu().as_sim().is_some() {
        assert!(error.is_none(), "{error:?}");
        return;
    }
    let text = error.unwrap().to_string();
    assert!(text.contains("other places of their windows"), "{text}");
    // And nothing waits for anybody at the end.
    let _stopped = comm.close(Instant::now() + LONG);
}
