//! Order: streams, groups, splitting and going on.

use std::sync::Arc;

use beeline::collective::{Call, Collective, Communicator, DataType, Place, group, group_depth};

use crate::support::*;

/// Many calls on several streams, each using what the one before made.
#[test]
fn calls_run_in_order_over_streams() {
    let job = Job::new(3);
    let more: Vec<_> = job.comms.iter().map(|c| Arc::new(c.gpu().stream().unwrap())).collect();
    let buffers: Vec<_> = job.comms.iter().map(|c| c.gpu().alloc(4 * 1000).unwrap()).collect();
    for (buffer, stream) in buffers.iter().zip(&job.streams) {
        put(buffer, 0, &1_u32.to_le_bytes().repeat(1000), stream);
    }
    for turn in 0..10 {
        for rank in 0..3 {
            let stream = if turn % 3 == 2 { &more[rank] } else { &job.streams[rank] };
            let what = (1000, DataType::U32, beeline::collective::RedOp::SUM);
            job.comms[rank].all_reduce(&buffers[rank], &buffers[rank], what, stream).unwrap();
        }
    }
    // The last call was queued in the streams of the job.
    job.finish();
    for (buffer, stream) in buffers.iter().zip(&job.streams) {
        assert_eq!(get(buffer, 0, 4000, stream), 3_u32.pow(10).to_le_bytes().repeat(1000));
    }
}

#[test]
fn groups_nest_and_queue_at_the_outermost_end() {
    let job = Job::new(2);
    let call = all_reduce(100, DataType::I64);
    let inputs = inputs(&call, 2);
    let found = group(|| {
        assert_eq!(group_depth(), 1);
        let found = job.comms.iter().map(|comm| comm.gpu().alloc(800).unwrap()).collect::<Vec<_>>();
        for (rank, output) in found.iter().enumerate() {
            group(|| {
                assert_eq!(group_depth(), 2);
                let input = job.comms[rank].gpu().alloc(800)?;
                put(&input, 0, &inputs[rank], &job.streams[rank]);
                let places = (Place::Buffer(input, 0), Place::Buffer(output.clone(), 0));
                job.comms[rank].call(call, places.0, places.1, None, &job.streams[rank])
            })?;
        }
        Ok(found)
    })
    .unwrap();
    assert_eq!(group_depth(), 0);
    job.finish();
    for (rank, output) in found.iter().enumerate() {
        assert_eq!(get(output, 0, 800, &job.streams[rank]), expected(&call, &inputs, &[], 0));
    }
}

/// More calls of each rank than a stream holds, all in one group of one thread.
#[test]
fn a_group_may_hold_more_than_a_stream() {
    let job = Job::new(2);
    let buffers: Vec<_> = job.comms.iter().map(|c| c.gpu().alloc(64).unwrap()).collect();
    group(|| {
        for ((comm, stream), buffer) in job.comms.iter().zip(&job.streams).zip(&buffers) {
            for _ in 0..1500 {
                let what = (16, DataType::U32, beeline::collective::RedOp::MAX);
                comm.all_reduce(buffer, buffer, what, stream)?;
            }
        }
        Ok(())
    })
    .unwrap();
    job.finish();
}

fn on_all<T: Send>(job: &Job, work: impl Fn(&Communicator) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = job.comms.iter().map(|comm| scope.spawn(|| work(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_split_makes_communicators_that_work() {
    let job = Job::new(5);
    // Ranks 0, 2, 4 in reverse order; 1 alone; 3 in none.
    let parts = on_all(&job, |comm| {
        let color = match comm.rank() {
            1 => Some(7),
            3 => None,
            _ => Some(1),
        };
        comm.split(color, -(comm.rank() as i32), comm.settings()).unwrap()
    });
    assert!(parts[3].is_none());
    assert_eq!(parts[1].as_ref().map(|part| (part.rank(), part.ranks())), Some((0, 1)));
    let mut even: Vec<_> = [0, 2, 4].iter().filter_map(|rank| parts[*rank].clone()).collect();
    assert_eq!(even.iter().map(Communicator::rank).collect::<Vec<_>>(), [2, 1, 0]);
    even.reverse();
    Job::of(even).check(Call::new(Collective::AllGather, 77, DataType::U8), 0);
    job.check(all_reduce(5, DataType::F64), 0);
}

#[test]
fn survivors_go_on_without_the_others() {
    let job = Job::new(4);
    job.check(all_reduce(5, DataType::F64), 0);
    job.comms[2].abort();
    let left = on_all(&job, |comm| {
        (comm.rank() != 2).then(|| comm.shrink(&[2], comm.settings()).unwrap())
    });
    let left: Vec<_> = left.into_iter().flatten().collect();
    assert_eq!(left.iter().map(Communicator::rank).collect::<Vec<_>>(), [0, 1, 2]);
    Job::of(left).check(all_reduce(1001, DataType::F16), 0);
    for wrong in [&[0_u32][..], &[4], &[0, 1, 2, 3]] {
        assert!(job.comms[0].shrink(wrong, job.comms[0].settings()).unwrap_err().is_refused());
    }
}

/// Ranks divide the same transfers into groups as they like: rank 0 has all of its own in one, of which the last send lets
/// rank 1 begin what rank 0 receives first, over rank 2. Two rounds of one pair must not wait for another pair's first.
#[test]
fn a_group_does_not_wait_for_its_first_round() {
    let job = Job::new(3);
    let one = |rank: usize, kind, peer: u32, len: u64, buffer: &beeline::gpu::Buffer| {
        let place = Place::Buffer(buffer.clone(), 0);
        let (input, output) =
            if kind == Collective::Send { (place, Place::None) } else { (Place::None, place) };
        let call = Call::new(kind, len, DataType::U8).root(peer);
        job.comms[rank].call(call, input, output, None, &job.streams[rank])
    };
    let buffer = |rank: usize| job.comms[rank].gpu().alloc(4096).unwrap();
    for turn in 0..3 {
        let (sent, second, received) = (buffer(0), buffer(0), buffer(0));
        let (got, token, back) = (buffer(1), buffer(1), buffer(2));
        put(&sent, 0, &noise(4096, turn), &job.streams[0]);
        put(&token, 0, &noise(4096, turn + 70), &job.streams[1]);
        group(|| {
            one(0, Collective::Send, 1, 4000, &sent)?;
            one(0, Collective::Recv, 2, 500, &received)?;
            one(0, Collective::Send, 1, 300, &second)
        })
        .unwrap();
        one(1, Collective::Recv, 0, 4000, &got).unwrap();
        one(1, Collective::Recv, 0, 300, &buffer(1)).unwrap();
        one(1, Collective::Send, 2, 500, &token).unwrap();
        one(2, Collective::Recv, 1, 500, &back).unwrap();
        one(2, Collective::Send, 0, 500, &back).unwrap();
        job.finish();
        assert!(get(&got, 0, 4000, &job.streams[1]) == noise(4096, turn)[..4000]);
        assert!(get(&received, 0, 500, &job.streams[0]) == noise(4096, turn + 70)[..500]);
    }
}
