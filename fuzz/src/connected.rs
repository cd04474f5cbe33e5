//! Packets against connected queue pairs: the simulated network and the target of the core's own tests.

#[allow(dead_code)]
#[path = "../../crates/beeline-core/src/rc/tests/fuzz.rs"]
mod fuzz;
#[allow(dead_code)]
#[path = "../../crates/beeline-core/src/rc/tests/net.rs"]
mod net;

/// Runs one input.
pub(super) fn run(data: &[u8]) {
    fuzz::run(data);
}
