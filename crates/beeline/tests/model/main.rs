//! Models from files onto devices, end to end: what is read, where it lands, what is refused.
//!
//! Every file is also read by [`reader`], which shares no code with the library, and the bytes on the
//! device are compared with what it found.
#![allow(missing_docs, reason = "tests")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::print_stdout, reason = "SKIP lines")]

#[allow(dead_code, reason = "shared with the conformance suite, which uses all of it")]
#[path = "../conformance/support.rs"]
mod support;

mod contents;
mod handed;
mod reader;
mod shards;
mod slices;
mod trouble;
