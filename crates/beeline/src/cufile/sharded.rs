//! What every call reads and few calls change, once for each of several groups of threads: a call takes a
//! lock and counts references in its own group's copy alone, so that many threads at once do not pass
//! cache lines around.

use std::sync::{Arc, Mutex, RwLock};

use super::lanes::hint;
use crate::{lock, read_lock, write_lock};

/// Copies; more threads than that share them.
const SHARDS: usize = 16;

/// A shared value behind a reference count of one shard's own.
pub(super) type Local<T> = Arc<Arc<T>>;

/// The copies of a value.
pub(super) struct Sharded<T> {
    shards: [Shard<T>; SHARDS],
    writing: Mutex<()>,
}

/// On cache lines of its own.
#[repr(align(128))]
struct Shard<T>(RwLock<T>);

impl<T: Default> Default for Sharded<T> {
    fn default() -> Self {
        let shards = std::array::from_fn(|_| Shard(RwLock::default()));
        Self { shards, writing: Mutex::default() }
    }
}

impl<T> Sharded<T> {
    /// Looks at the calling thread's copy.
    pub(super) fn read<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        let [first, ..] = &self.shards;
        let shard = self.shards.get(hint() % SHARDS).unwrap_or(first);
        look(&read_lock(&shard.0))
    }

    /// Changes every copy. What `check` refuses, on one copy, is not changed at all.
    pub(super) fn write<R, E>(
        &self,
        check: impl FnOnce(&T) -> Result<R, E>,
        mut change: impl FnMut(&mut T),
    ) -> Result<R, E> {
        let _one = lock(&self.writing);
        let [first, ..] = &self.shards;
        let answer = check(&read_lock(&first.0))?;
        for shard in &self.shards {
            change(&mut write_lock(&shard.0));
        }
        Ok(answer)
    }

    /// Changes every copy, and answers what `change` said of the last.
    pub(super) fn change<R>(&self, mut change: impl FnMut(&mut T) -> Option<R>) -> Option<R> {
        let _one = lock(&self.writing);
        let mut answer = None;
        for shard in &self.shards {
            answer = change(&mut write_lock(&shard.0));
        }
        answer
    }
}
