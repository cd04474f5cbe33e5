//! The locks of [`super::revocation`]: those of the standard library.

use std::sync::PoisonError;
use std::time::Duration;

pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

/// One turn of a bounded wait, of at most a second; whether it passed in vain.
pub(super) fn wait_a_while<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
) -> (MutexGuard<'a, T>, bool) {
    let waited = changed.wait_timeout(guard, Duration::from_secs(1));
    let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
    (guard, timeout.timed_out())
}
