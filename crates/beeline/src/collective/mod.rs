//! Collectives between the GPUs of one host.

mod control;
mod executor;

pub use crate::core::collective::{
    Algorithm, Announcement, Call, CallError, Collective, DataType, Disagreement, Illegal, RedOp,
    Trouble,
};
