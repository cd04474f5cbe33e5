//! Collectives between the GPUs of one host.

mod bootstrap;
mod control;
mod executor;
mod id;
mod secret;
mod wire;

pub use id::{UNIQUE_ID_BYTES, UniqueId};

pub use crate::core::collective::{
    Algorithm, Announcement, Call, CallError, Collective, DataType, Disagreement, Illegal, RedOp,
    Trouble,
};
