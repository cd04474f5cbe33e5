//! Parts of the system crate that this library alone uses, over the test libcuda.

use std::sync::Arc;

use beeline_sys::cuda::{CELLS, Load, Slot, StageKernels, Turns};
use beeline_sys::cuda::{
    Context, DeviceMem, Driver, ForeignStream, Gate, Gates, HostRegistration, Lane, Reached,
};
use beeline_sys::mem::HostMem;

use crate::tools::Bench;

const LANE_BYTES: usize = 64 << 10;

struct Pinned(Arc<HostRegistration>, Arc<HostMem>);

fn context(bench: &Bench) -> (Arc<Driver>, Arc<Context>) {
    let driver = Driver::open(Some(&bench.driver())).unwrap();
    let context = driver.device(0).unwrap().retain_primary().unwrap();
    (driver, context)
}

fn pinned(context: &Arc<Context>) -> Pinned {
    let host = Arc::new(HostMem::anonymous(LANE_BYTES).unwrap());
    let registration = HostRegistration::pin(context, Arc::clone(&host)).unwrap();
    Pinned(Arc::new(registration), host)
}

/// A gate that is opened for a later pass before the stream looks lets the stream go on, across the end of
/// the numbers too; one that is open for an earlier pass does not.
#[test]
fn a_stream_that_looks_late_goes_through_its_gate() {
    let Some(bench) = Bench::built() else { return };
    let (driver, context) = context(&bench);
    let Pinned(registration, host) = pinned(&context);
    let gates = Gates::new(registration, host);
    let Pinned(registration, host) = pinned(&context);
    let mut lane = Lane::new(&context, registration, host).unwrap();
    // Makes the context current for the default stream.
    let _entered = lane.enter().unwrap();
    let stream = ForeignStream::PER_THREAD_DEFAULT;
    let cases = [(1, 1), (1, 2), (7, 1024), (u32::MAX, 1), (u32::MAX - 3, 5)];
    for (number, (pass, opened)) in cases.into_iter().enumerate() {
        let gate = Gate(u32::try_from(number).unwrap());
        gates.open(gate, opened);
        gates.pass(&driver, stream, gate, pass, None).unwrap();
        let went = stream.finish(&driver);
        assert!(went.is_ok(), "pass {pass} of a gate open for {opened}: {went:?}");
        assert!(gates.has_come(gate, pass));
    }
    let gate = Gate(50);
    gates.open(gate, 4);
    gates.pass(&driver, stream, gate, 5, None).unwrap();
    gates.pass(&driver, stream, Gate(51), 1, None).unwrap();
    assert!(!gates.has_come(Gate(51), 1), "went past a gate that is open for an earlier pass");
    gates.open(gate, 5);
    gates.open(Gate(51), 1);
    stream.finish(&driver).unwrap();
}

/// The kernel waits for its turns, copies what they say, and ends: after the last one, where there are fewer than was said
/// at first, and by itself where none comes.
#[test]
fn host_and_kernel_take_turns() {
    const CELL: u64 = 4096;
    let Some(bench) = Bench::built() else { return };
    let (driver, context) = context(&bench);
    let Pinned(registration, host) = pinned(&context);
    let gates = Gates::new(registration, host);
    let Pinned(slot, bytes) = pinned(&context);
    let Pinned(registration, host) = pinned(&context);
    let mut lane = Lane::new(&context, registration, host).unwrap();
    // Makes the context current for the default stream.
    let _entered = lane.enter().unwrap();
    let stream = ForeignStream::PER_THREAD_DEFAULT;
    let kernels = StageKernels::default();
    let home = stream.home(&driver).unwrap();
    let kernel = match kernels.of(&driver, stream, home) {
        Ok(kernel) => kernel,
        Err(error) => return println!("SKIP c++: {error}"),
    };
    let device = Arc::new(DeviceMem::alloc(&context, 1 << 20).unwrap());
    let len = CELLS as u64 * CELL;
    // Chunks that get a turn, whether the rest is called off, and whether the kernel gives up.
    for (number, (turns, fewer, fails)) in
        [(12, false, false), (9, true, false), (0, true, false), (3, false, true)]
            .into_iter()
            .enumerate()
    {
        let (gate, pass) = (Gate(u32::try_from(number).unwrap()), 7);
        gates.forget(gate);
        let chunks = 12;
        let load =
            Load { address: device.ptr(), first: 0, last: chunks * CELL, ring: true, chunks };
        gates.describe(gate, &load);
        let timeout_ns = if fails { 50_000_000 } else { 20_000_000_000 };
        let slot = Slot { memory: &slot, at: 0, cell: CELL as u32 };
        let turn = Turns { kernel, slot, out: false, timeout_ns };
        gates.open(gate, pass);
        gates.open_end(gate, pass);
        gates.pass(&driver, stream, gate, pass, Some(&turn)).unwrap();
        for chunk in 0..turns {
            let since = std::time::Instant::now();
            while chunk >= CELLS as u64 && !gates.is_done(gate, chunk - CELLS as u64) {
                assert!(since.elapsed().as_secs() < 20, "chunk {chunk} never done");
                std::thread::yield_now();
            }
            bytes.fill(chunk % CELLS as u64 * CELL, CELL, 1 + chunk as u8).unwrap();
            gates.give_turn(gate, chunk, CELL as u32);
        }
        if fewer {
            gates.limit(gate, turns);
        }
        stream.finish(&driver).unwrap();
        assert!(gates.has_ended(gate, pass) && !gates.has_ended(gate, pass + 1), "{number}");
        assert_eq!(gates.has_failed(gate, pass), fails, "{number}");
        assert!((0..turns).rev().take(CELLS).all(|chunk| gates.is_done(gate, chunk)), "{number}");
        assert!(!gates.is_done(gate, turns), "{number}");
    }
    let beyond = Slot { memory: &slot, at: 4096 * 16, cell: CELL as u32 };
    let unaligned = Slot { memory: &slot, at: 8, cell: CELL as u32 };
    let odd = Slot { memory: &slot, at: 0, cell: 5000 };
    assert!(len <= slot.len());
    for slot in [beyond, unaligned, odd] {
        let turn = Turns { kernel, slot, out: false, timeout_ns: 1 };
        let refused = gates.pass(&driver, stream, Gate(9), 1, Some(&turn));
        assert!(matches!(refused, Err((_, Reached::Nothing))), "{slot:?}");
    }
}
