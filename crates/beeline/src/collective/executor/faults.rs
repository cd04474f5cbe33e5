//! Faults on request: paths that lie.

use std::sync::{Arc, Mutex};

use crate::lock;

/// Peer paths that drop what is written over them, as a redirecting or translating bus does. Cheap to clone; all
/// clones are the same. Of use on the staged path only.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    dropped: Arc<Mutex<Vec<(u32, u32)>>>,
}

impl Faults {
    /// From now on nothing that rank `from` writes to rank `to` arrives.
    pub fn drop_writes(&self, from: u32, to: u32) {
        lock(&self.dropped).push((from, to));
    }

    /// All paths work again.
    pub fn clear(&self) {
        lock(&self.dropped).clear();
    }

    pub(super) fn drops(&self, from: u32, to: u32) -> bool {
        lock(&self.dropped).contains(&(from, to))
    }
}
