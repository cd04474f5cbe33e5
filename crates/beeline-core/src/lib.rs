//! The deterministic half of Beeline: vocabulary and decisions, without any input or output.
//!
//! Nothing in this crate opens a file, reads a clock, starts a thread or touches memory that a
//! device can write. Time arrives as [`time::Time`], facts arrive as values, and every answer is a
//! pure function of what was passed in. That is what makes a plan explainable after the fact and a
//! protocol testable with virtual time.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod addr;
pub mod checks;
pub mod collective;
pub mod facts;
pub mod model;
pub mod mr;
pub mod plan;
pub mod rc;
pub mod reason;
pub mod roce;
pub mod segment;
pub mod time;
pub mod topology;
pub mod transfer;
