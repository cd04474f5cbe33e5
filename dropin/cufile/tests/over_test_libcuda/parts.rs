//! Parts of the system crate that this library alone uses, over the test libcuda.

use std::sync::Arc;

use beeline_sys::cuda::{Context, Driver, ForeignStream, Gate, Gates, HostRegistration, Lane};
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
    let gate = Gate(100);
    gates.open(gate, 4);
    gates.pass(&driver, stream, gate, 5, None).unwrap();
    gates.pass(&driver, stream, Gate(101), 1, None).unwrap();
    assert!(!gates.has_come(Gate(101), 1), "went past a gate that is open for an earlier pass");
    gates.open(gate, 5);
    gates.open(Gate(101), 1);
    stream.finish(&driver).unwrap();
}
