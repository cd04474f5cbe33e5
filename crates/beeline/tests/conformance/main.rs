//! The conformance suite of devices and storage: one set of tests, every device this machine has.
//!
//! Simulated devices of every profile run first, `plain` before the others. A CUDA device runs the
//! same tests where there is one; elsewhere the suite prints `SKIP cuda`.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::panic, missing_docs)]

mod faults;
mod gpu;
mod storage;
mod support;
