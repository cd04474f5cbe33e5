//! What a queue pair takes: the one place where a send work request is checked before it is posted, by a
//! NIC in software as by one of the kernel's.

use crate::roce::Mtu;

use super::state::{QpKind, QpState};
use super::work::{MESSAGE_BYTES_MAX, Payload, PostError, SendOp, SendWr, total_len};

/// What a send work request is checked against.
#[derive(Clone, Copy, Debug)]
pub struct SendLimits {
    /// What the queue pair is.
    pub kind: QpKind,
    /// Its state.
    pub state: QpState,
    /// Sends outstanding.
    pub queued: usize,
    /// Sends outstanding at most.
    pub max_send_wr: u32,
    /// Scatter/gather elements of a send at most.
    pub max_send_sge: u32,
    /// Inline bytes of a send at most.
    pub max_inline: u32,
    /// Path MTU, or that of the port on a datagram queue pair.
    pub mtu: Mtu,
    /// READs and atomics outstanding at a time.
    pub max_rd_atomic: u8,
}

/// Whether a queue pair takes a work request; answers the length of its message.
///
/// # Errors
/// The first rule that it breaks. Nothing is posted then.
pub fn check_send(wr: &SendWr, limits: &SendLimits) -> Result<u32, PostError> {
    if !matches!(limits.state, QpState::Rts | QpState::Err) {
        return Err(PostError::State { state: limits.state });
    }
    if limits.queued >= limits.max_send_wr as usize {
        return Err(PostError::QueueFull { capacity: limits.max_send_wr });
    }
    let len = match &wr.payload {
        Payload::Sges(sges) if sges.len() > limits.max_send_sge as usize => {
            let max = limits.max_send_sge as usize;
            return Err(PostError::TooManySges { given: sges.len(), max });
        }
        Payload::Sges(sges) => total_len(sges),
        Payload::Inline(_) if wr.op.is_read_or_atomic() => return Err(PostError::InlineResult),
        Payload::Inline(bytes) if bytes.len() > limits.max_inline as usize => {
            let max = limits.max_inline;
            return Err(PostError::InlineTooLong { given: bytes.len(), max });
        }
        Payload::Inline(bytes) => bytes.len() as u64,
    };
    let datagram = limits.kind == QpKind::Ud;
    let max = if datagram { limits.mtu.bytes() } else { MESSAGE_BYTES_MAX };
    let short = u32::try_from(len).ok().filter(|len| *len <= max);
    let short = short.ok_or(PostError::TooLong { given: len, max })?;
    if wr.to.is_some() != datagram {
        return Err(PostError::Destination { needed: datagram });
    }
    match wr.op {
        SendOp::SendInvalidate { .. } => {
            Err(PostError::Unsupported { what: "SEND with invalidate" })
        }
        SendOp::Send { .. } => Ok(short),
        _ if datagram => Err(PostError::Unsupported { what: "RDMA on a datagram queue pair" }),
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if len != 8 => {
            Err(PostError::AtomicLength { given: len })
        }
        op if op.is_read_or_atomic() && limits.max_rd_atomic == 0 => Err(PostError::NoReadDepth),
        _ => Ok(short),
    }
}
