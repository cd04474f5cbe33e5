//! The built command, run as people and programs run it.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod bench;
mod copy;
mod doctor;
mod explain;
mod load;
mod page;
mod rdma;
mod refusals;
mod support;
mod surface;
