//! The locks of [`super::revocation`]: those of the standard library.

use std::time::Duration;

pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

/// One turn of a bounded wait.
pub(super) fn wait_a_while<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
) -> MutexGuard<'a, T> {
    crate::wait_timeout(changed, guard, Duration::from_secs(1))
}
