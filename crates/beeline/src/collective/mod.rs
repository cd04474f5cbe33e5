//! Collectives between the GPUs of one host.
//!
//! Ranks meet by a [`UniqueId`], which one of them makes and passes on ([`Communicator::join`]), or are all made by
//! one process ([`Communicator::local`]). From then on every rank makes the same calls in the same order, each
//! queued in a stream. What a call computes does not depend on its size, on how it is cut up, or on the
//! algorithm: ranks are combined in the order of their numbers.
//!
//! Before data moves the ranks compare the calls they make. Where they disagree, or one is missing, the call ends
//! with an error that names the rank and both calls; nothing hangs.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//!
//! use beeline::collective::{Communicator, DataType, RedOp, Settings, group};
//! use beeline::config::SimConfig;
//! use beeline::gpu::Gpu;
//!
//! # fn main() -> beeline::Result<()> {
//! let gpus = [Gpu::simulated(&SimConfig::default())?, Gpu::simulated(&SimConfig::default())?];
//! let ranks = Communicator::local(&gpus, &Settings::default())?;
//! let streams = [Arc::new(gpus[0].stream()?), Arc::new(gpus[1].stream()?)];
//! let buffers = [gpus[0].alloc(4096)?, gpus[1].alloc(4096)?];
//! streams[0].fill(&buffers[0], 0, 4096, 1)?;
//! streams[1].fill(&buffers[1], 0, 4096, 2)?;
//! // One thread drives both ranks, so their calls are a group.
//! group(|| {
//!     for ((rank, buffer), stream) in ranks.iter().zip(&buffers).zip(&streams) {
//!         rank.all_reduce(buffer, buffer, (4096, DataType::U8, RedOp::SUM), stream)?;
//!     }
//!     Ok(())
//! })?;
//! streams[0].synchronize(Instant::now() + Duration::from_secs(10))?;
//! assert!(ranks[0].async_error().is_none());
//! # Ok(())
//! # }
//! ```

mod bootstrap;
mod communicator;
mod control;
mod executor;
mod greeters;
mod group;
mod id;
mod parts;
mod queue;
mod secret;
mod together;
mod watch;
mod wire;

pub use communicator::Communicator;
pub use control::RANKS_MAX;
pub use executor::{Factor, Faults, Place, Settings};
pub use group::{group, group_depth, group_end, group_refuse, group_simulate_end, group_start};
pub use id::{UNIQUE_ID_BYTES, UniqueId};

pub use crate::core::collective::{
    Algorithm, Announcement, Call, CallError, Collective, DataType, Disagreement, Illegal, RedOp,
    Trouble,
};
