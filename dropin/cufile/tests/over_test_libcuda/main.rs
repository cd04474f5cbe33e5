//! The drop-in library, called from C over the test libcuda: what it answers call by call, and what its
//! header and its symbols promise. `conformance.c` runs over a real driver as well (`benches/bundle`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    unreachable_pub,
    reason = "helpers of tests, which are not test functions themselves"
)]

mod abi;
mod calls;
mod cases;
mod commands;
mod parts;
mod tools;
