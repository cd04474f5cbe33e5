//! What goes wrong ends, with a name.

use std::time::{Duration, Instant};

use beeline::collective::{Call, Collective, Communicator, DataType, Place, RedOp, group};
use beeline::gpu::Gpu;

use crate::support::*;

/// A deadline that tests wait for.
const SHORT: Duration = Duration::from_millis(400);

fn short(ranks: u32) -> Job {
    Job::with(ranks, &settings(|settings| settings.deadline = SHORT))
}

fn make(job: &Job, rank: usize, call: Call) -> beeline::Result<()> {
    let buffer = job.comms[rank].gpu().alloc(1 << 20).unwrap();
    let place = || Place::Buffer(buffer.clone(), 0);
    job.comms[rank].call(call, place(), place(), None, &job.streams[rank])
}

/// Every stream ends, and every rank that made a call has an error; their texts.
fn errors(job: &Job, ranks: &[usize]) -> Vec<beeline::Error> {
    ranks
        .iter()
        .map(|rank| {
            job.streams[*rank].synchronize(Instant::now() + LONG).unwrap();
            // A rank whose small data went without anybody's help learns of it a moment later.
            let end = Instant::now() + LONG;
            loop {
                match job.comms[*rank].async_error() {
                    Some(error) => break error,
                    None => assert!(Instant::now() < end, "rank {rank} has no error"),
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        })
        .collect()
}

/// Ranks 0 and 1 make `call`, rank 2 `other`.
fn two_against_one(call: Call, other: Call) -> Job {
    let job = short(3);
    for (rank, call) in [call, call, other].into_iter().enumerate() {
        make(&job, rank, call).unwrap();
    }
    job
}

/// Different counts, types, operations, roots, kinds and orders: every rank learns who differs, and both calls.
#[test]
fn different_calls_are_named() {
    let call = all_reduce(100, DataType::F32);
    let others = [
        Call { count: 101, ..call },
        Call { dtype: DataType::I32, ..call },
        call.op(RedOp::MAX),
        Call::new(Collective::AllGather, 100, DataType::F32),
        Call::new(Collective::Broadcast, 100, DataType::F32).root(1),
    ];
    for other in others {
        let job = two_against_one(call, other);
        for (rank, error) in errors(&job, &[0, 1, 2]).iter().enumerate() {
            let text = format!("{error}");
            assert_eq!(error.code(), "collective-mismatch", "{text}");
            let (mine, theirs) = if rank == 2 { (other, call) } else { (call, other) };
            for part in [format!("rank {rank} is in call #1 {mine}"), format!("call #1 {theirs}")] {
                assert!(text.contains(&part), "{text} lacks {part}");
            }
            assert!(rank == 2 || text.contains("rank 2"), "{text}");
        }
        // The first failure stays.
        assert_eq!(make(&job, 0, call).unwrap_err().code(), "collective-mismatch");
    }
}

/// Calls of several launches each: who differs is told as ever.
#[test]
fn different_large_broadcasts_are_named() {
    let call = Call::new(Collective::Broadcast, 50_001, DataType::F32);
    let other = Call { count: 50_002, ..call };
    let job = two_against_one(call, other);
    for (rank, error) in errors(&job, &[0, 1, 2]).iter().enumerate() {
        let text = format!("{error}");
        assert_eq!(error.code(), "collective-mismatch", "{text}");
        for part in [call, other] {
            assert!(text.contains(&format!("call #1 {part}")), "rank {rank}: {text}");
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_with_its_last_call() {
    let job = short(3);
    job.check(Call::new(Collective::Broadcast, 9, DataType::U8), 0);
    for rank in [0, 2] {
        make(&job, rank, all_reduce(8, DataType::F32)).unwrap();
    }
    for error in errors(&job, &[0, 2]) {
        let text = error.to_string();
        assert!(error.is_timeout() && error.code() == "collective-straggler", "{text}");
        assert!(text.contains("rank 1 did not come") && text.contains("#1 broadcast"), "{text}");
    }
}

/// Sends before receives on both sides, outside a group: a deadlock that is told (H-COLL-08). Grouped they work.
#[test]
fn sends_that_wait_for_each_other_are_told() {
    // Kernels send this little without waiting for anybody.
    let job = Job::simulated(2, &settings(|settings| settings.deadline = SHORT));
    let transfer = |rank: usize, kind| {
        make(&job, rank, Call::new(kind, 10, DataType::F32).root(1 - rank as u32))
    };
    group(|| {
        for rank in 0..2 {
            transfer(rank, Collective::Send)?;
            transfer(rank, Collective::Recv)?;
        }
        Ok(())
    })
    .unwrap();
    job.finish();
    for rank in 0..2 {
        transfer(rank, Collective::Send).unwrap();
        transfer(rank, Collective::Recv).unwrap();
    }
    for error in errors(&job, &[0, 1]) {
        let text = format!("{error:#}");
        assert!(text.contains("send(count 10, f32") && text.contains("one group"), "{text}");
    }
}

/// A call that is made of several, of which a later one cannot be: nothing of it waits for the others.
#[test]
fn a_group_that_fails_half_way_queues_nothing() {
    let job = Job::new(2);
    let buffer = job.comms[1].gpu().alloc(64).unwrap();
    let (send, receive) = ([(1, 0), (1, u64::MAX)], [(1, 0), (1, 1)]);
    let places = ((&buffer, &send[..]), (&buffer, &receive[..]));
    let failed = job.comms[1].all_to_all_v(places.0, places.1, DataType::F32, &job.streams[1]);
    assert!(failed.unwrap_err().is_refused());
    job.check(all_reduce(100, DataType::F32), 0);
}

#[test]
fn a_send_and_a_receive_of_two_sizes_are_named() {
    let job = short(2);
    make(&job, 0, Call::new(Collective::Send, 10, DataType::F32).root(1)).unwrap();
    make(&job, 1, Call::new(Collective::Recv, 12, DataType::F32).root(0)).unwrap();
    for error in errors(&job, &[0, 1]) {
        let text = error.to_string();
        assert_eq!(error.code(), "collective-mismatch", "{text}");
        assert!(text.contains("count 10") && text.contains("count 12"), "{text}");
    }
}

/// Abort with calls in flight that can never end: it returns, and the streams end. The deadline is far.
#[test]
fn an_abort_waits_for_nothing() {
    let job = Job::with(3, &settings(|settings| settings.deadline = Duration::from_secs(86_400)));
    for rank in [0, 1] {
        for _ in 0..3 {
            make(&job, rank, all_reduce(1000, DataType::F32)).unwrap();
        }
    }
    job.comms[0].abort();
    job.comms[1].abort();
    for rank in [0, 1] {
        job.streams[rank].synchronize(Instant::now() + LONG).unwrap();
        assert!(job.comms[rank].async_error().unwrap().is_cancelled());
        assert!(make(&job, rank, all_reduce(1, DataType::F32)).unwrap_err().is_cancelled());
    }
    // A rank that waits for one that aborted learns of it long before the deadline.
    // What they had sent of the first call may still be taken.
    for _ in 0..2 {
        let _ = make(&job, 2, all_reduce(1000, DataType::F32));
    }
    let text = errors(&job, &[2])[0].to_string();
    assert!(text.contains("aborted"), "{text}");
}

/// A path that drops writes is found when the communicator is made, on every rank.
#[test]
fn a_path_that_drops_writes_is_refused() {
    let gpus: Vec<Gpu> = (0..3).map(|_| gpu()).collect();
    let how = settings(|settings| settings.faults.drop_writes(2, 1));
    let error = Communicator::local(&gpus, &how).unwrap_err();
    assert!(
        error.is_no_route() && error.to_string().contains("from rank 2 to rank 1"),
        "{error:?}"
    );
    how.faults.clear();
    Job::of(Communicator::local(&gpus, &how).unwrap()).check(all_reduce(3, DataType::U8), 0);
}

/// One that starts to drop later makes calls end with who stalled.
#[test]
fn a_path_that_starts_to_drop_is_named() {
    for call in
        [all_reduce(50_000, DataType::F32), Call::new(Collective::AllToAll, 100, DataType::U8)]
    {
        let how = settings(|settings| settings.deadline = SHORT);
        let job = Job::simulated(3, &how);
        job.check(call, 0);
        how.faults.drop_writes(2, 1);
        for rank in 0..3 {
            make(&job, rank, call).unwrap();
        }
        let texts: Vec<String> = errors(&job, &[0, 1, 2]).iter().map(ToString::to_string).collect();
        assert!(texts[1].contains("rank 2 came and made no progress"), "{texts:?}");
    }
}

#[test]
fn a_shrink_that_failed_on_one_rank_can_be_made_again_by_all() {
    let job = Job::simulated(3, &settings(|_| {}));
    let short = settings(|settings| settings.join_deadline = Duration::from_millis(300));
    assert!(job.comms[0].shrink(&[2], &short).is_err());
    let long = settings(|settings| settings.join_deadline = Duration::from_secs(10));
    let ranks = std::thread::scope(|scope| {
        let threads: Vec<_> =
            job.comms[..2].iter().map(|one| scope.spawn(|| one.shrink(&[2], &long))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for rank in ranks {
        assert_eq!(rank.unwrap().ranks(), 2);
    }
}
