use super::*;
use crate::collective::call::Algorithm;
use crate::collective::schedule::{self, does};
use crate::collective::types::DataType;
use proptest::prelude::*;

const COUNTS: [u64; 6] = [0, 1, 5, 16, 1023, (1 << 33) + 7];

fn proof(call: Call, algorithm: Algorithm, ranks: u32, in_place: bool) {
    let schedule = Schedule::new(call, algorithm, ranks).unwrap();
    if let Err(what) = prove(&schedule, in_place) {
        panic!("{algorithm} {call:?} ranks {ranks} in place {in_place}: {what}");
    }
}

/// Every schedule there is, for 1 to 16 ranks, counts that do not divide, none, and above 2^32.
#[test]
fn every_schedule_is_proven() {
    let mut proven = 0;
    for kind in Collective::ALL {
        for algorithm in Algorithm::ALL {
            for ranks in 1..=16 {
                if !does(algorithm, kind, ranks) || matches!(algorithm, Algorithm::Direct) {
                    continue;
                }
                // Every rank more costs; above 8 the counts that differ in kind are enough.
                let counts = if ranks > 8 { &COUNTS[4..] } else { &COUNTS[..] };
                for &count in counts {
                    // The last rank as root is unlike the others: it has the short slice.
                    for root in [0, ranks - 1] {
                        let call = Call::new(kind, count, DataType::F32).root(root);
                        let in_place =
                            kind != Collective::AllToAll || algorithm != Algorithm::Local;
                        for in_place in [false, in_place] {
                            proof(call, algorithm, ranks, in_place);
                        }
                        proven += 1;
                    }
                }
            }
        }
    }
    assert!(proven > 2000, "{proven}");
}

#[test]
fn transfers_are_proven() {
    for (from, to) in [(0, 1), (1, 0), (2, 2), (3, 1)] {
        for count in COUNTS {
            let mut call = Call::new(Collective::Recv, count, DataType::U8);
            let schedule = schedule::transfer(call, from, to, 4).unwrap();
            // Rooms of the checker are those of a receive; the sender's input is as large.
            call.kind = Collective::Broadcast;
            let schedule = Schedule { call: call.root(from), ..schedule };
            let trimmed = only(&schedule, to);
            assert_eq!(trimmed, Ok(()), "{from} {to} {count}");
        }
    }
}

/// [`prove`] where only `to` must have an output.
fn only(schedule: &Schedule, to: u32) -> Result<(), String> {
    let mut run = Run::new(schedule, false, schedule.call.count);
    for round in 0..ROUNDS {
        match run.round(round) {
            Err(what)
                if what.contains("never written") && !what.contains(&format!("Output({to})")) => {}
            other => other?,
        }
        run.check_output(to)?;
    }
    Ok(())
}

/// What the proof is worth: a schedule with a step taken out, or two changed for each other, fails.
#[test]
fn a_schedule_without_one_of_its_steps_is_refused() {
    let mut refused = 0;
    for (kind, algorithm) in [
        (Collective::AllReduce, Algorithm::OneShot),
        (Collective::AllReduce, Algorithm::TwoShot),
        (Collective::AllReduce, Algorithm::LowLatency),
        (Collective::AllReduce, Algorithm::CopyEngine),
        (Collective::ReduceScatter, Algorithm::LowLatency),
        (Collective::AllGather, Algorithm::CopyEngine),
        (Collective::Broadcast, Algorithm::ScatterGather),
        (Collective::Reduce, Algorithm::TwoShot),
        (Collective::AllToAll, Algorithm::OneShot),
    ] {
        let call = Call::new(kind, 10, DataType::I32).root(1);
        let whole = Schedule::new(call, algorithm, 3).unwrap();
        prove(&whole, false).unwrap();
        for rank in 0..3 {
            for at in 0..whole.programs[rank].len() {
                let mut less = whole.clone();
                let gone = less.programs[rank].remove(at);
                assert!(prove(&less, false).is_err(), "{algorithm} {kind} without {gone:?}");
                refused += 1;
            }
        }
    }
    assert!(refused > 200, "{refused}");
}

#[test]
fn order_and_doubles_are_seen() {
    let call = Call::new(Collective::AllReduce, 10, DataType::I32);
    let whole = Schedule::new(call, Algorithm::OneShot, 3).unwrap();
    for change in [|from: &mut Vec<Span>| from.swap(0, 1), |from: &mut Vec<Span>| from[2] = from[1]]
    {
        let mut other = whole.clone();
        for step in &mut other.programs[1] {
            if let Step::Reduce { from, .. } = step {
                change(from);
            }
        }
        assert!(prove(&other, false).unwrap_err().contains("instead of"));
    }
    let mut outside = whole;
    if let Some(Step::Copy { to, .. }) = outside.programs[0].first_mut() {
        to.at = u64::MAX;
    }
    assert!(prove(&outside, false).unwrap_err().contains("64 bits"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_count_and_root(count in 0..u64::MAX >> 12, ranks in 1_u32..=16, root in 0_u32..16, kind in 0_usize..12) {
        let kind = Collective::ALL[kind];
        for algorithm in Algorithm::ALL {
            if does(algorithm, kind, ranks) && algorithm != Algorithm::Direct {
                proof(Call::new(kind, count, DataType::BF16).root(root % ranks), algorithm, ranks, false);
            }
        }
    }
}
