//! Beeline moves bytes on the straightest line between GPU memory and files, other GPUs and NICs.
//!
//! A transfer has three steps: facts about the machine go into a *plan*, the plan names the allowed
//! routes (and why the others were refused), and an engine moves the bytes. [`storage::File::plan`]
//! shows the plan of a file and a device; every result reports the routes its bytes really took.
#![deny(unsafe_code)]

pub mod collective;
pub mod config;
pub mod cufile;
pub mod error;
pub mod gpu;
pub mod log;
pub mod memory;
pub mod model;
pub mod p2p;
pub mod probe;
pub mod storage;
pub mod verbs;

pub use beeline_core as core;
pub use error::{Error, Result};

use std::path::Path;
use std::sync::{
    Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::Duration;

/// Locks `mutex`. A panic elsewhere does not spread: state behind our locks is valid between any two
/// statements, so a poisoned lock is as good as another.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// [`lock`], shared.
pub(crate) fn read_lock<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// [`lock`], exclusive.
pub(crate) fn write_lock<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `condvar` is notified or `span` has passed; the caller checks which.
pub(crate) fn wait_timeout<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    span: Duration,
) -> MutexGuard<'a, T> {
    match condvar.wait_timeout(guard, span) {
        Ok((guard, _)) => guard,
        Err(poisoned) => poisoned.into_inner().0,
    }
}

/// The folder that holds `path`, which may be a bare name.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}
