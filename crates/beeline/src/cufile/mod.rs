//! The cuFile API (GPUDirect Storage) in safe Rust: what the drop-in `libcufile.so.0` and the command call.
//!
//! One [`Library`] a process, as the API has it: opened by whoever needs it first, counted, closed by the
//! last. Files and buffers are named by opaque numbers and addresses; a [`Failure`] carries the API's code,
//! the system's error number and a sentence.
//!
//! Bytes go through the page cache or past it, as [`crate::storage::File::plan`] and the place of the bytes
//! decide; pinned memory comes from the budget that all engines of the process share. A small request is
//! one system call and one copy on the calling thread; a large read is shared out among threads.

mod batch;
mod buffers;
mod crew;
mod extra;
mod handle;
mod lanes;
mod library;
mod mapped;
mod mover;
mod options;
mod ordered;
mod session;
mod sharded;
mod stats;
mod status;
mod streams;

pub use batch::{Event, Status};
pub use extra::{bar_bytes, export_topology};
pub use library::{Library, Limit, Properties, library};
pub use options::Options;
pub use session::{Entry, Late};
pub use stats::{CLASSES, GPU_WORDS, GPUS_MAX, GpuWords, LEVEL1_WORDS, LEVEL1_WORDS_OLD};
pub use status::{Failure, OpError};

pub use beeline_core::plan::Operation;
pub use beeline_sys::cuda::ForeignStream;
pub use beeline_sys::user::{UserCell, UserPtr};
