//! The objects of verbs. Each holds what it was made from, so the order of dropping is of no matter.

mod context;
mod cq;
mod gpu_mr;
mod mr;
mod qp;

pub use context::{AsyncEvent, Context, Pd, Resolved};
pub use cq::Cq;
pub use mr::Mr;
pub use qp::{Qp, QpCaps, Srq};

use beeline_core::rc::{CreateError, ModifyError, PostError};

use crate::error::Error;

fn create_error(what: &str, error: CreateError) -> Error {
    Error::refused(format!("cannot create a {what}")).because(error)
}

fn modify_error(error: ModifyError) -> Error {
    let code = match error {
        ModifyError::Attributes { .. } => "qp-attributes",
        ModifyError::Transition { .. } => "qp-transition",
        ModifyError::Unsupported { .. } => "qp-state-unsupported",
        ModifyError::Value { .. } | ModifyError::Family { .. } => "qp-attribute-value",
        ModifyError::Unknown => "qp-unknown",
    };
    Error::refused("cannot modify the queue pair").because(error).coded(code)
}

fn post_error(error: PostError) -> Error {
    let code = match error {
        PostError::QueueFull { .. } => "queue-full",
        PostError::State { .. } => "qp-state",
        PostError::InlineDeviceMemory { .. } => "inline-device-memory",
        PostError::Unsupported { .. } => "unsupported",
        _ => "work-request",
    };
    Error::refused("cannot post the work request").because(error).coded(code)
}
