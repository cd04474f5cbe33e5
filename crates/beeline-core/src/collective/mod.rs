//! Collectives without a device: what a call is, who moves what, in which order, and what it costs.
//!
//! - [`types`]: element types and reductions, by NCCL's numbers, and which go together.
//! - [`call`]: one call, its sizes, and the hash by which ranks find that they disagree.
//! - [`reduce`]: the arithmetic, in one fixed order.
//! - [`schedule`]: a collective as data (copy, put, reduce, signal, wait), for any number of ranks.
//! - [`check`]: runs a schedule symbolically and proves it.
//! - [`plan`]: chooses the algorithm, and says why not the others.

pub mod call;
pub mod check;
pub mod plan;
pub mod reduce;
pub mod schedule;
pub mod types;

pub use call::{Algorithm, Announcement, Call, CallError, Collective, Disagreement, Trouble};
pub use types::{DataType, Illegal, RedOp};
