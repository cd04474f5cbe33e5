//! Host memory that devices reach, within a budget.

mod numa;
mod pool;

pub use pool::{Budget, Pool, PoolUsage};

pub(crate) use numa::stay_near;
pub(crate) use pool::Slot;
