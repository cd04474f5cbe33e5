//! Collectives between simulated GPUs, in one process and in several.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    unreachable_pub,
    reason = "helpers of tests"
)]

mod copies;
mod data;
#[path = "../cuda_over_test_libcuda/driver.rs"]
#[allow(dead_code, reason = "what the other program needs besides")]
mod driver;
mod emulated;
mod graphs;
#[path = "../cuda_over_test_libcuda/library.rs"]
#[allow(dead_code, reason = "what the other program needs besides")]
mod library;
mod order;
mod processes;
mod straight;
mod support;
mod trouble;
mod windows;
