//! Files and device memory: one engine behind every front (command, library, drop-ins).
//!
//! [`File`] knows what a file is and how it can be read; its [`File::plan`] names the routes. An
//! [`Engine`] carries out a [`Request`]: it splits it into chunks, asks for each where its bytes are,
//! reads, and starts the copy to the device while the next chunk is being read. Pinned memory comes
//! from a bounded pool; a full pool makes the engine wait, never fail.
//!
//! A deadline ends the *wait* for a transfer, not the transfer: buffers that the kernel or a device
//! may still write stay quarantined, counted in [`crate::memory::PoolUsage`], until their completion
//! is seen.

mod engine;
mod fault;
mod file;
mod job;
mod report;
mod residency;
mod whole;
mod worker;

pub use engine::{Engine, Request};
pub use fault::{IoEffect, IoFaults};
pub use file::{File, Stamp};
pub use job::{CancelToken, Progress, Transfer};
pub use report::{Report, RouteReport};
pub use residency::{Prober, RouteShare};
pub use whole::WholeFile;

/// CPU time of the whole process, for CPU-seconds per byte.
pub use beeline_sys::thread::process_cpu_time;

pub use beeline_core::plan::{
    Mode, Operation, Plan, Residency, StorageRequest, StorageRoute, route_chunk,
};
