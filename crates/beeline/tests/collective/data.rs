//! Right answers: every collective, type and operation.

use beeline::collective::{Algorithm, Call, Collective, DataType, Place, RedOp, group};

use crate::support::*;

pub(crate) const KINDS: [Collective; 9] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::Barrier,
];

fn every_collective(ranks: u32, counts: &[u64]) {
    let job = Job::new(ranks);
    for kind in KINDS {
        for (turn, count) in counts.iter().enumerate() {
            // Addresses without alignment, too.
            let call = Call::new(kind, *count, DataType::F32).root(turn as u32 % ranks);
            job.check(call, turn as u64 % 4);
        }
    }
}

#[test]
fn every_collective_1() {
    every_collective(1, &[0, 1, 1000]);
}

#[test]
fn every_collective_2() {
    every_collective(2, &[0, 1, 3, 100_003, 3_000_001]);
}

#[test]
fn every_collective_3() {
    every_collective(3, &[0, 1, 1023]);
}

#[test]
fn every_collective_8() {
    every_collective(8, &[0, 1, 4097]);
}

#[test]
fn every_collective_16() {
    every_collective(16, &[0, 3, 1025]);
}

/// More than two ranks share the work of large calls: counts that divide and that do not, each root, with and without
/// alignment.
#[test]
fn large_parts_are_shared() {
    for ranks in [3, 4] {
        let job = Job::new(ranks);
        for (turn, count) in [140_003, 147_456].into_iter().enumerate() {
            let call = Call::new(Collective::Broadcast, count, DataType::F32);
            for root in [0, turn as u32 % ranks, ranks - 1] {
                job.check(call.root(root), turn as u64 % 4);
            }
            job.check(all_reduce(count, DataType::F32), turn as u64 % 4);
        }
        if ranks == 3 {
            // In several pieces.
            job.check(Call::new(Collective::Broadcast, 2_200_007, DataType::F32).root(1), 0);
        }
    }
}

/// One rank goes through the same code as many: every type and operation, counts of every remainder.
#[test]
fn every_type_and_operation() {
    for ranks in [1, 2, 3] {
        let job = Job::new(ranks);
        for &dtype in DataType::ALL {
            for &op in RedOp::ALL {
                if op.check(dtype, None).is_err() {
                    continue;
                }
                for count in [1, 33, 1025] {
                    job.check(all_reduce(count, dtype).op(op), 1);
                }
            }
        }
    }
}

/// The tail of a buffer that is not a multiple of anything (H-COLL-DATA-01), above 16 and 512 KiB.
#[test]
fn no_tail_is_dropped_by_one_rank() {
    let job = Job::new(1);
    for count in 1..=1025 {
        job.check(all_reduce(count, DataType::BF16).op(RedOp::AVG), count % 3);
    }
    for base in [9_u64 << 10, 300 << 10] {
        for rest in 0..32 {
            job.check(all_reduce(base + rest, DataType::BF16).op(RedOp::AVG), 0);
        }
    }
    // Of the others a few, each type and operation with other remainders.
    let each =
        DataType::ALL.iter().flat_map(|dtype| RedOp::ALL.iter().map(move |op| (*dtype, *op)));
    for (turn, (dtype, op)) in (0..).zip(each.filter(|(dtype, op)| op.check(*dtype, None).is_ok()))
    {
        for count in (1 + turn % 331..=1025).step_by(331).chain([20_000 + turn % 32]) {
            job.check(all_reduce(count, dtype).op(op), (count + turn) % 3);
        }
    }
}

/// Two's complement (H-COLL-DATA-02), the average of three, six and ten (-04), and bool (-06).
#[test]
fn handed_answers() {
    let job = Job::new(2);
    let sum = job.run(all_reduce(1, DataType::I8), &[vec![120], vec![100]], 0, &[]);
    assert_eq!(sum, [vec![(-36_i8) as u8], vec![(-36_i8) as u8]]);
    let or = job.run(all_reduce(3, DataType::BOOL), &[vec![0, 0, 1], vec![0, 1, 0]], 0, &[]);
    assert_eq!(or[0], [0, 1, 1]);
    let refused = all_reduce(1, DataType::BOOL).op(RedOp::AVG);
    let error = job.comms[0].call(refused, Place::None, Place::None, None, &job.streams[0]);
    assert!(error.unwrap_err().is_refused());
    for ranks in [3, 6, 10] {
        Job::new(ranks).check(all_reduce(999, DataType::BF16).op(RedOp::AVG), 0);
    }
}

/// Input and output overlap as NCCL's in-place calls do.
#[test]
fn in_place() {
    for algorithm in
        [None, Some(Algorithm::TwoShot), Some(Algorithm::CopyEngine), Some(Algorithm::OneShot)]
    {
        let job = Job::with(4, &settings(|s| (s.algorithm, s.chunk_bytes) = (algorithm, 64 << 10)));
        for kind in [
            Collective::AllReduce,
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::AllToAll,
            Collective::Broadcast,
        ] {
            // NCCL leaves an all-to-all in place open; here small ones go.
            let count = if kind == Collective::AllToAll { 30_001 } else { 140_001 };
            let call = Call::new(kind, count, DataType::I32).root(u32::from(!kind.reduces()));
            let inputs = inputs(&call, 4);
            let part = call.count * 4;
            let buffers: Vec<_> = (0..4)
                .map(|rank| {
                    let buffer = job.comms[rank].gpu().alloc(part * 4).unwrap();
                    let at = if kind == Collective::AllGather { part * rank as u64 } else { 0 };
                    put(&buffer, at, &inputs[rank], &job.streams[rank]);
                    buffer
                })
                .collect();
            group(|| {
                for (rank, buffer) in buffers.iter().enumerate() {
                    let own = part * rank as u64;
                    let (input, output) = match kind {
                        Collective::AllGather => (own, 0),
                        Collective::ReduceScatter => (0, own),
                        _ => (0, 0),
                    };
                    let place = |at| Place::Buffer(buffer.clone(), at);
                    job.comms[rank].call(
                        call,
                        place(input),
                        place(output),
                        None,
                        &job.streams[rank],
                    )?;
                }
                Ok(())
            })
            .unwrap();
            job.finish();
            for (rank, buffer) in buffers.iter().enumerate() {
                let at = if kind == Collective::ReduceScatter { part * rank as u64 } else { 0 };
                let expected = expected(&call, &inputs, &[], rank as u32);
                let found = get(buffer, at, expected.len() as u64, &job.streams[rank]);
                assert!(found == expected, "{kind} {algorithm:?} rank {rank}");
            }
        }
    }
}

/// The same bits for every algorithm, size of a chunk and number of channels; and on all ranks.
#[test]
fn bits_do_not_depend_on_how() {
    for ranks in [2, 3, 8, 16] {
        for dtype in [DataType::F32, DataType::BF16, DataType::E4M3] {
            let call = all_reduce(20_011, dtype);
            let inputs = inputs(&call, ranks);
            let mut first: Option<Vec<u8>> = None;
            for (algorithm, chunk, channels) in [
                (Algorithm::OneShot, 1 << 20, 0),
                (Algorithm::TwoShot, 1 << 20, 1),
                (Algorithm::LowLatency, 64 << 10, 0),
                (Algorithm::CopyEngine, 128 << 10, 3),
                (Algorithm::OneShot, 64 << 10, 7),
            ] {
                let how = settings(|s| {
                    (s.algorithm, s.chunk_bytes, s.channels) = (Some(algorithm), chunk, channels);
                });
                for output in Job::with(ranks, &how).run(call, &inputs, 0, &[]) {
                    let first = first.get_or_insert_with(|| output.clone());
                    assert!(
                        *first == output,
                        "{ranks} ranks, {dtype}, {algorithm} {chunk} {channels}"
                    );
                }
            }
            assert_eq!(first.unwrap(), expected(&call, &inputs, &[], 0));
        }
    }
}

/// Sends and receives of a group progress together, several to one peer in order, one to itself.
#[test]
fn sends_and_receives() {
    let job = Job::new(3);
    let bytes = [5_u64, 700_001, 64];
    let buffer = |rank: usize, len| job.comms[rank].gpu().alloc(len).unwrap();
    let mut received = Vec::new();
    group(|| {
        for rank in 0..3 {
            for peer in 0..3 {
                for (turn, len) in bytes.iter().enumerate() {
                    let out = buffer(rank, *len);
                    let seed = (rank * 100 + peer * 10 + turn) as u64;
                    put(&out, 0, &noise(*len as usize, seed), &job.streams[rank]);
                    let send = Call::new(Collective::Send, *len, DataType::U8).root(peer as u32);
                    let (comm, stream) = (&job.comms[rank], &job.streams[rank]);
                    comm.call(send, Place::Buffer(out, 0), Place::None, None, stream)?;
                    let back = buffer(rank, *len);
                    let receive = Call { kind: Collective::Recv, ..send };
                    comm.call(receive, Place::None, Place::Buffer(back.clone(), 0), None, stream)?;
                    received.push((rank, peer, turn, back));
                }
            }
        }
        Ok(())
    })
    .unwrap();
    job.finish();
    for (rank, peer, turn, back) in received {
        let seed = (peer * 100 + rank * 10 + turn) as u64;
        let found = get(&back, 0, back.len(), &job.streams[rank]);
        assert!(found == noise(bytes[turn] as usize, seed), "{peer} to {rank}, number {turn}");
    }
}

/// One after the other, outside of any group.
#[test]
fn many_sends_in_a_row() {
    let job = Job::new(2);
    let buffers: Vec<_> = job.comms.iter().map(|comm| comm.gpu().alloc(4096).unwrap()).collect();
    put(&buffers[0], 0, &noise(4096, 5), &job.streams[0]);
    for turn in 0..400 {
        let len = 1 + turn % 4096;
        for (rank, kind) in [(0, Collective::Send), (1, Collective::Recv)] {
            let place = Place::Buffer(buffers[rank].clone(), 0);
            let (input, output) =
                if rank == 0 { (place, Place::None) } else { (Place::None, place) };
            let call = Call::new(kind, len, DataType::U8).root(1 - rank as u32);
            job.comms[rank].call(call, input, output, None, &job.streams[rank]).unwrap();
        }
    }
    job.finish();
    assert!(get(&buffers[1], 0, 400, &job.streams[1]) == noise(4096, 5)[..400]);
}

#[test]
fn all_to_all_with_counts() {
    let job = Job::new(3);
    // Rank r sends 10 r + p elements to rank p.
    let count = |from: u64, to: u64| 10 * from + to;
    let list = |counts: [u64; 3]| {
        let mut at = 0;
        counts.map(|count| {
            at += count;
            (count, at - count)
        })
    };
    let mut outputs = Vec::new();
    group(|| {
        for rank in 0..3_u64 {
            let (comm, stream) = (&job.comms[rank as usize], &job.streams[rank as usize]);
            let send = list([0, 1, 2].map(|to| count(rank, to)));
            let receive = list([0, 1, 2].map(|from| count(from, rank)));
            let (input, output) = (comm.gpu().alloc(1024)?, comm.gpu().alloc(1024)?);
            put(&input, 0, &noise(1024, rank), stream);
            comm.all_to_all_v((&input, &send), (&output, &receive), DataType::I32, stream)?;
            outputs.push(output);
        }
        Ok(())
    })
    .unwrap();
    job.finish();
    for (rank, output) in (0_u64..).zip(outputs) {
        let mut expected = Vec::new();
        for from in 0..3 {
            let before: u64 = (0..rank).map(|to| count(from, to)).sum();
            let bytes = noise(1024, from);
            expected
                .extend_from_slice(&bytes[before as usize * 4..][..count(from, rank) as usize * 4]);
        }
        assert_eq!(get(&output, 0, expected.len() as u64, &job.streams[rank as usize]), expected);
    }
}

#[test]
fn a_call_that_is_impossible_is_refused_and_changes_nothing() {
    let job = Job::new(2);
    let buffer = job.comms[0].gpu().alloc(64).unwrap();
    let place = || Place::Buffer(buffer.clone(), 0);
    let cases = [
        all_reduce(1, DataType::new(12)),
        all_reduce(1, DataType::F32).op(RedOp::new(6)),
        all_reduce(1, DataType::F32).op(RedOp::PRE_MUL_SUM),
        all_reduce(u64::MAX, DataType::F32),
        all_reduce(17, DataType::F32),
        Call::new(Collective::Broadcast, 1, DataType::F32).root(2),
        Call::new(Collective::AllToAllV, 1, DataType::F32),
    ];
    for call in cases {
        let error = job.comms[0].call(call, place(), place(), None, &job.streams[0]).unwrap_err();
        assert!(error.is_refused(), "{call}: {error:?}");
        let grouped = group(|| job.comms[0].call(call, place(), place(), None, &job.streams[0]));
        assert!(grouped.unwrap_err().is_refused(), "{call}");
    }
    let missing = job.comms[0].call(
        all_reduce(4, DataType::F32),
        Place::None,
        place(),
        None,
        &job.streams[0],
    );
    assert!(missing.unwrap_err().is_refused());
    assert!(beeline::collective::group_end().unwrap_err().is_refused());
    job.check(all_reduce(4, DataType::F32), 0);
}
