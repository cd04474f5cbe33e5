//! The objects of verbs. Each holds what it was made from, so the order of dropping is of no matter.
//!
//! Each is one of two: of a NIC in software ([`soft`]), or of one of the kernel's
//! ([`super::ibv`]). Rules that both keep (what a transition takes, what may be posted) stand in
//! `beeline_core::rc` and are checked there for both.

mod context;
mod cq;
mod gpu_mr;
mod mr;
mod qp;
mod soft;

pub(super) use context::NicRef;
pub use context::{AsyncEvent, Context, Pd, Resolved};
pub use cq::Cq;
pub use mr::{Mr, MrResolved};
pub use qp::{Qp, QpCaps, Srq};

use beeline_core::mr::{DeregisterError, Lkey, MemoryKind};
use beeline_core::rc::{CqOverrun, CreateError, INLINE_BYTES_MAX, ModifyError, PostError, Sge};

use super::memory::Memory;
use crate::error::Error;

pub(super) fn create_error(what: &str, error: CreateError) -> Error {
    Error::refused(format!("cannot create a {what}")).because(error)
}

pub(super) fn modify_error(error: ModifyError) -> Error {
    let code = match error {
        ModifyError::Attributes { .. } => "qp-attributes",
        ModifyError::Transition { .. } => "qp-transition",
        ModifyError::Unsupported { .. } => "qp-state-unsupported",
        ModifyError::Value { .. } | ModifyError::Family { .. } => "qp-attribute-value",
        ModifyError::Unknown => "qp-unknown",
    };
    Error::refused("cannot modify the queue pair").because(error).coded(code)
}

pub(super) fn post_error(error: PostError) -> Error {
    let code = match error {
        PostError::QueueFull { .. } => "queue-full",
        PostError::State { .. } => "qp-state",
        PostError::InlineDeviceMemory { .. } => "inline-device-memory",
        PostError::Unsupported { .. } => "unsupported",
        _ => "work-request",
    };
    Error::refused("cannot post the work request").because(error).coded(code)
}

pub(super) fn overrun_error(error: CqOverrun) -> Error {
    Error::refused("cannot poll the completion queue").because(error).coded("cq-overrun")
}

pub(super) fn deregister_error(error: DeregisterError) -> Error {
    let busy = matches!(error, DeregisterError::Busy { .. });
    let code = if busy { "region-in-use" } else { "region-unknown" };
    Error::refused("cannot deregister memory").because(error).coded(code)
}

/// The bytes of a scatter/gather list of host memory; `find` knows the registered memory by its key.
pub(super) fn gather(
    sges: &[Sge],
    find: impl Fn(Lkey) -> Option<Memory>,
) -> Result<Vec<u8>, PostError> {
    let total: u64 = sges.iter().map(|sge| u64::from(sge.len)).sum();
    let max = INLINE_BYTES_MAX;
    if total > u64::from(max) {
        let given = usize::try_from(total).unwrap_or(usize::MAX);
        return Err(PostError::InlineTooLong { given, max });
    }
    let mut bytes = Vec::new();
    for sge in sges {
        let unknown =
            PostError::Unsupported { what: "inline data of memory that is not registered" };
        let memory = find(sge.lkey).ok_or(unknown)?;
        if memory.kind() == MemoryKind::Device {
            return Err(PostError::InlineDeviceMemory { lkey: sge.lkey });
        }
        let offset = sge.addr.as_u64().checked_sub(memory.addr()).ok_or(unknown)?;
        let start = bytes.len();
        bytes.resize(start + sge.len as usize, 0);
        let into = bytes.get_mut(start..).unwrap_or(&mut []);
        memory.read(offset, into).map_err(|_| unknown)?;
    }
    Ok(bytes)
}
