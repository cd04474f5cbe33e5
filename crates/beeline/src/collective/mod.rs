//! Collectives between the GPUs of one host.
//!
//! Ranks meet by a [`UniqueId`], which one of them makes and passes on ([`Communicator::join`]), or are all made by
//! one process ([`Communicator::local`]). From then on every rank makes the same calls in the same order, each
//! queued in a stream. What a call computes does not depend on its size, on how it is cut up, or on the
//! algorithm: ranks are combined in the order of their numbers.
//!
//! Before data moves the ranks compare the calls they make. Where they disagree, or one is missing, the call ends
//! with an error that names the rank and both calls; nothing hangs.

mod bootstrap;
mod communicator;
mod control;
mod executor;
mod group;
mod id;
mod secret;
mod wire;

pub use communicator::Communicator;
pub use control::RANKS_MAX;
pub use executor::{Factor, Faults, Place, Settings};
pub use group::{group, group_depth, group_end, group_simulate_end, group_start};
pub use id::{UNIQUE_ID_BYTES, UniqueId};

pub use crate::core::collective::{
    Algorithm, Announcement, Call, CallError, Collective, DataType, Disagreement, Illegal, RedOp,
    Trouble,
};
