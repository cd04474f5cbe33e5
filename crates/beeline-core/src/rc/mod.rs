//! Work requests over a reliable connection, and datagrams: a NIC's rules without its I/O.
//!
//! [`Engine`] is one NIC. It holds the protection domains, regions, completion queues, shared receive
//! queues and queue pairs of [`crate::mr`] and this module, takes packets of [`crate::roce`] and work
//! requests in, and gives packets, memory operations, completions and events out. It opens no socket,
//! reads no clock and touches no memory, so a whole network of NICs runs in a test with virtual time.
//!
//! Who does what, file by file: `requester` cuts work requests into packets, `completer` reads the
//! peer's answers, `responder` executes the peer's requests and `reply` sends what is owed for them,
//! `ud` is for datagrams, `limits` checks what is posted, `state` has the table of queue pair states, `memory` the operations on
//! memory, `queue` the completion and receive queues, and `work` the words for what is posted and
//! completed.
//!
//! Not served, and refused by name: unreliable connections, the states SQD and SQE, and SEND with
//! invalidate, which needs type-2 memory windows.

mod completer;
mod engine;
mod limits;
mod memory;
mod qp;
mod queue;
mod reply;
mod requester;
mod responder;
mod state;
mod ud;
mod work;

#[cfg(test)]
mod tests;

pub use engine::{
    AtomicReply, Config, Counters, CreateError, DestroyError, Engine, Event, INLINE_BYTES_MAX,
    QUEUE_ENTRIES_MAX, ReadReplay, Transmit,
};
pub use limits::{SendLimits, check_send};
pub use memory::{MemFault, MemKind, MemOp, MemToken, OneOrMore};
pub use qp::QpInit;
pub use queue::{CqId, CqOverrun, Notify, SrqId};
pub use state::{AttrLimits, AttrMask, ModifyError, QpAttr, QpKind, QpState, check_modify};
pub use ud::GRH_LEN;
pub use work::{
    Completion, CompletionOp, Destination, MESSAGE_BYTES_MAX, Payload, PostError, RecvWr, Remote,
    SGES_MAX, SendOp, SendWr, Sge, Status,
};
