//! Collectives between simulated GPUs, in one process and in several.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    unreachable_pub,
    reason = "helpers of tests"
)]

mod data;
mod order;
mod processes;
mod support;
mod trouble;
