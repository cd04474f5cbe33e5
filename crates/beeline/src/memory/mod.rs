//! Memory that devices reach: pinned host memory within a budget, and the registration of every kind
//! of memory with a device that is not its own.

pub mod cache;
pub mod dmabuf;
mod gpu_memory;
mod numa;
pub mod peer;
pub mod pinned_vram;
mod pool;
pub mod registration;
pub mod revocation;
mod sync;
mod window;

pub(crate) use gpu_memory::holder_of;
pub use gpu_memory::{Atomicity, Flush, GpuMemory};

pub use pool::{Budget, Pool, PoolUsage};
pub use window::window_refusal;

/// `1 importer`, `2 importers`.
pub(crate) fn plural(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

pub(crate) use numa::stay_near;
pub(crate) use pool::{Keeper, Slot};
