//! Large moves of groups that have all ranks: copies between the devices, where these are not simulated; the same bytes by
//! whatever there is else.

use std::sync::Arc;
use std::time::Instant;

use beeline::collective::{Call, Collective, Communicator, DataType, Place, group};
use beeline::gpu::{Buffer, Compare, Gpu, Stream};

use crate::support::*;

const MOVES: [Collective; 5] = [
    Collective::AllGather,
    Collective::Broadcast,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
];

fn job(ranks: u32) -> Job {
    Job::with(ranks, &settings(|settings| settings.copy_engine_bytes = Some(10_000)))
}

fn copied(job: &Job) -> u64 {
    job.comms.iter().map(Communicator::copied).sum()
}

/// Whether copies can be expected: `made` of them since there were `before`.
fn expect(job: &Job, before: u64, made: bool, what: &str) {
    let made = made && job.comms[0].gpu().as_sim().is_none();
    assert_eq!(copied(job) > before, made, "{what}");
}

#[test]
fn every_move_of_every_number_of_ranks() {
    for (ranks, counts) in
        [(2, &[9_999, 10_000, 12_289, 400_001][..]), (3, &[70_003]), (8, &[10_000, 20_001])]
    {
        for closed in [false, true] {
            let mut job = job(ranks);
            job.closed = closed;
            for kind in MOVES {
                for (turn, count) in (0_u32..).zip(counts) {
                    let call = Call::new(kind, *count, DataType::U8).root(turn % ranks);
                    let before = copied(&job);
                    job.check(call, u64::from(turn) % 4);
                    // The root of more ranks does not send everything to each of them.
                    let copies = *count >= 10_000 && (kind != Collective::Broadcast || ranks == 2);
                    expect(&job, before, copies && !closed, &format!("{call} {closed}"));
                }
            }
            // Kernels in between, and what reduces.
            let before = copied(&job);
            job.check(all_reduce(300_000, DataType::F32), 0);
            job.check(Call::new(Collective::AllGather, 999, DataType::F32), 0);
            expect(&job, before, false, "what reduces, and what is small");
        }
    }
}

/// Memory that is mapped for its own device alone goes by kernels until it is opened.
#[test]
fn memory_is_opened_to_other_devices() {
    let job = job(2);
    let call = Call::new(Collective::Broadcast, 50_000, DataType::U8).root(1);
    let alloc = |gpu: &Gpu| gpu.alloc_shareable(50_000).unwrap();
    let buffers: Vec<Buffer> = job.comms.iter().map(|comm| alloc(comm.gpu())).collect();
    for opened in [false, true] {
        let before = copied(&job);
        let sent = noise(50_000, 9 + u64::from(opened));
        put(&buffers[1], 0, &sent, &job.streams[1]);
        if opened && job.comms[0].gpu().as_sim().is_none() {
            buffers[0].open_to(job.comms[1].gpu()).unwrap();
        }
        in_one_group(&job, call, |rank| (buffers[rank].clone(), 0, 0));
        job.finish();
        assert!(get(&buffers[0], 0, 50_000, &job.streams[0]) == sent);
        expect(&job, before, opened, "opened");
    }
}

fn in_one_group(job: &Job, call: Call, places: impl Fn(usize) -> (Buffer, u64, u64)) {
    group(|| {
        for (rank, (comm, stream)) in job.comms.iter().zip(&job.streams).enumerate() {
            let (buffer, input, output) = places(rank);
            let place = |at| Place::Buffer(buffer.clone(), at);
            comm.call(call, place(input), place(output), None, stream)?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn in_place_where_nothing_is_overwritten() {
    let job = job(3);
    let bytes = 20_000_u64;
    for (kind, made) in [(Collective::AllGather, true), (Collective::AllToAll, false)] {
        let call = Call::new(kind, bytes, DataType::U8);
        let inputs = inputs(&call, 3);
        let gathers = kind == Collective::AllGather;
        let buffers: Vec<Buffer> =
            job.comms.iter().map(|comm| comm.gpu().alloc(3 * bytes).unwrap()).collect();
        let own = |rank: usize| if gathers { rank as u64 * bytes } else { 0 };
        for (rank, buffer) in buffers.iter().enumerate() {
            put(buffer, own(rank), &inputs[rank], &job.streams[rank]);
        }
        let before = copied(&job);
        in_one_group(&job, call, |rank| (buffers[rank].clone(), own(rank), 0));
        job.finish();
        expect(&job, before, made, kind.name());
        for (rank, buffer) in (0_u32..).zip(&buffers) {
            let found = get(buffer, 0, 3 * bytes, &job.streams[rank as usize]);
            assert!(found == expected(&call, &inputs, &[], rank), "{kind} rank {rank}");
        }
    }
}

/// Sends and receives: rings, several of a pair, a rank to itself; with a small one among them, kernels.
#[test]
fn groups_of_sends_and_receives() {
    let job = job(3);
    let rings: [&[(usize, usize, u64)]; 2] = [
        &[(0, 1, 60_000), (0, 1, 200_001), (1, 2, 30_000), (2, 0, 90_000), (2, 2, 50_000)],
        &[(0, 1, 60_000), (1, 2, 100), (2, 0, 90_000)],
    ];
    for (list, made) in rings.into_iter().zip([true, false]) {
        let before = copied(&job);
        let buffers: Vec<[Buffer; 2]> = list
            .iter()
            .map(|(from, to, len)| {
                [*from, *to].map(|rank| job.comms[rank].gpu().alloc(*len).unwrap())
            })
            .collect();
        for (seed, ((from, _, len), [sent, _])) in (0..).zip(list.iter().zip(&buffers)) {
            put(sent, 0, &noise(*len as usize, seed), &job.streams[*from]);
        }
        group(|| {
            for ((from, to, len), [sent, received]) in list.iter().zip(&buffers) {
                for (rank, peer, kind, buffer) in
                    [(*to, *from, Collective::Recv, received), (*from, *to, Collective::Send, sent)]
                {
                    let call = Call::new(kind, *len, DataType::U8).root(peer as u32);
                    let place = || Place::Buffer(buffer.clone(), 0);
                    job.comms[rank].call(call, place(), place(), None, &job.streams[rank])?;
                }
            }
            Ok(())
        })
        .unwrap();
        job.finish();
        expect(&job, before, made, "transfers");
        for (seed, ((_, to, len), [_, received])) in (0..).zip(list.iter().zip(&buffers)) {
            let got = get(received, 0, *len, &job.streams[*to]);
            assert!(got == noise(*len as usize, seed), "transfer {seed}");
        }
    }
}

/// Copies come after what stands in the streams of both ranks, and before what follows in either, also in another stream.
#[test]
fn the_order_is_that_of_the_streams() {
    let job = job(2);
    let more: Vec<_> = job.comms.iter().map(|c| Arc::new(c.gpu().stream().unwrap())).collect();
    // Without a gate first: what is used for the first time is loaded, which may wait for the device, and so for a gate that
    // this thread would open.
    for from in 0..2 {
        one_way(&job, &more, from, None);
        for late in 0..2 {
            one_way(&job, &more, from, Some(late));
        }
    }
}

/// One rank sends to the other, where the stream of one is held back by the host: behind that, what is sent is written, and
/// where it goes, too.
fn one_way(job: &Job, more: &[Arc<Stream>], from: usize, late: Option<usize>) {
    let (len, to) = (100_000_u64, 1 - from);
    let gates: Vec<_> = job.comms.iter().map(|comm| comm.gpu().pin(4096).unwrap()).collect();
    let alloc = || job.comms.iter().map(|c| c.gpu().alloc(len).unwrap()).collect::<Vec<_>>();
    let (buffers, summed) = (alloc(), alloc());
    for rank in 0..2 {
        let stream = &job.streams[rank];
        if late == Some(rank) {
            stream.wait_host_value(&gates[rank], 0, 1, Compare::Equal).unwrap();
        }
        stream.fill(&buffers[rank], 0, len, if rank == from { 3 } else { 0xee }).unwrap();
    }
    let before = copied(job);
    let call = Call::new(Collective::Broadcast, len, DataType::U8).root(from as u32);
    in_one_group(job, call, |rank| (buffers[rank].clone(), 0, 0));
    expect(job, before, true, "a broadcast");
    // What was received is copied in the same stream and summed in another one, and what was sent overwritten.
    let seen = job.comms[to].gpu().alloc(len).unwrap();
    job.streams[to].copy_on_device(&seen, 0, &buffers[to], 0, len).unwrap();
    job.streams[from].fill(&buffers[from], 0, len, 5).unwrap();
    for (rank, other) in more.iter().enumerate() {
        let what = (1000, DataType::U8, beeline::collective::RedOp::SUM);
        job.comms[rank].all_reduce(&buffers[rank], &summed[rank], what, other).unwrap();
    }
    if let Some(late) = late {
        std::thread::sleep(std::time::Duration::from_millis(50));
        gates[late].mem().write(0, &1_u32.to_le_bytes()).unwrap();
    }
    for (rank, other) in more.iter().enumerate() {
        other.synchronize(Instant::now() + LONG).unwrap();
        // The sum is not ordered with what follows in the first stream: what was sent or what it was overwritten with.
        let sum = get(&summed[rank], 0, 1000, other);
        assert!(sum.iter().all(|byte| [6, 8].contains(byte)), "{from} {late:?}: {:?}", sum[0]);
    }
    job.finish();
    let got = get(&seen, 0, len, &job.streams[to]);
    assert!(got == vec![3; len as usize], "from {from}, late {late:?}");
}

/// A receive is for the first send that has none, also where the group has another one that would fit.
#[test]
fn what_was_sent_before_comes_first() {
    let (len, job) = (20_000, job(2));
    let buffer = |rank: usize| job.comms[rank].gpu().alloc(len).unwrap();
    let (sent, received) = ([buffer(0), buffer(0)], [buffer(1), buffer(1)]);
    for (seed, buffer) in (0..).zip(&sent) {
        put(buffer, 0, &noise(len as usize, seed), &job.streams[0]);
    }
    let one = |rank: usize, kind, buffer: &Buffer| {
        let call = Call::new(kind, len, DataType::U8).root(1 - rank as u32);
        let place = || Place::Buffer(buffer.clone(), 0);
        job.comms[rank].call(call, place(), place(), None, &job.streams[rank])
    };
    one(0, Collective::Send, &sent[0]).unwrap();
    group(|| {
        one(0, Collective::Send, &sent[1])?;
        one(1, Collective::Recv, &received[0])
    })
    .unwrap();
    one(1, Collective::Recv, &received[1]).unwrap();
    job.finish();
    for (seed, buffer) in (0..).zip(&received) {
        assert!(get(buffer, 0, len, &job.streams[1]) == noise(len as usize, seed), "{seed}");
    }
    expect(&job, 0, false, "an earlier send");
}

/// Calls that differ are left to the kernels, which name who differs.
#[test]
fn different_calls_are_named() {
    let job = job(2);
    let call = Call::new(Collective::AllGather, 30_000, DataType::U8);
    group(|| {
        for (rank, (comm, stream)) in job.comms.iter().zip(&job.streams).enumerate() {
            // Nothing but the calls speaks against copies.
            let place = || Ok::<_, beeline::Error>(Place::Buffer(comm.gpu().alloc(100_000)?, 0));
            let call = Call { count: call.count + rank as u64, ..call };
            comm.call(call, place()?, place()?, None, stream)?;
        }
        Ok(())
    })
    .unwrap();
    for (comm, stream) in job.comms.iter().zip(&job.streams) {
        stream.synchronize(Instant::now() + LONG).unwrap();
        assert_eq!(comm.async_error().unwrap().code(), "collective-mismatch");
    }
    assert_eq!(copied(&job), 0);
}
