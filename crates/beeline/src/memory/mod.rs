//! Host memory that devices reach, within a budget.

mod pool;

pub use pool::{Budget, Pool, PoolUsage};

pub(crate) use pool::Slot;
