//! I/O faults on request: what a drive or a network file system does on a bad day.

use std::io;
use std::sync::{Arc, Condvar, Mutex};

use crate::lock;

/// What happens to one read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEffect {
    /// It fails with this error number.
    Errno(i32),
    /// It moves at most this many bytes.
    Short(u64),
    /// It does not return until [`IoFaults::release`].
    Hang,
}

/// The faults armed on one file. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct IoFaults {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    armed: Vec<Armed>,
    epoch: u64,
    hanging: usize,
}

#[derive(Debug)]
struct Armed {
    after: u64,
    times: u64,
    effect: IoEffect,
}

impl IoFaults {
    /// Lets `after` operations pass and strikes the `times` next ones.
    pub fn arm(&self, after: u64, times: u64, effect: IoEffect) {
        lock(&self.inner.state).armed.push(Armed { after, times, effect });
    }

    /// Lets every hanging operation go on, and forgets faults that have not struck.
    pub fn release(&self) {
        let mut state = lock(&self.inner.state);
        state.armed.clear();
        state.epoch += 1;
        self.inner.released.notify_all();
    }

    /// Operations that hang now.
    pub fn hanging(&self) -> usize {
        lock(&self.inner.state).hanging
    }

    /// Counts one operation and answers what shall happen to it.
    pub(super) fn strike(&self) -> Option<IoEffect> {
        lock(&self.inner.state).strike()
    }

    /// Counts one blocking operation of `len` bytes: answers the bytes it may move, or its error.
    /// Hangs here where a hang was armed.
    pub(super) fn hit(&self, len: u64) -> io::Result<u64> {
        match self.strike() {
            None => Ok(len),
            Some(IoEffect::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(IoEffect::Short(most)) => Ok(len.min(most)),
            Some(IoEffect::Hang) => {
                let ticket = self.begin_hang();
                let state = lock(&self.inner.state);
                let waited = self.inner.released.wait_while(state, |state| state.epoch == ticket);
                drop(waited);
                self.end_hang();
                Ok(len)
            }
        }
    }

    /// Counts an operation as hanging; [`Self::is_released`] says when the ticket may go on.
    pub(super) fn begin_hang(&self) -> u64 {
        let mut state = lock(&self.inner.state);
        state.hanging += 1;
        state.epoch
    }

    pub(super) fn is_released(&self, ticket: u64) -> bool {
        lock(&self.inner.state).epoch != ticket
    }

    pub(super) fn end_hang(&self) {
        lock(&self.inner.state).hanging -= 1;
    }
}

impl State {
    fn strike(&mut self) -> Option<IoEffect> {
        let mut due = None;
        for (index, armed) in self.armed.iter_mut().enumerate() {
            match armed.after.checked_sub(1) {
                Some(less) => armed.after = less,
                None => due = due.or(Some(index)),
            }
        }
        let index = due?;
        let armed = self.armed.get_mut(index)?;
        let effect = armed.effect;
        armed.times = armed.times.saturating_sub(1);
        if armed.times == 0 {
            self.armed.swap_remove(index);
        }
        Some(effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_strike_when_they_were_armed_for() {
        let faults = IoFaults::default();
        faults.arm(1, 2, IoEffect::Errno(5));
        faults.arm(4, 1, IoEffect::Short(10));
        let seen: Vec<_> = (0..6).map(|_| faults.hit(100).map_err(|e| e.raw_os_error())).collect();
        assert_eq!(seen, [Ok(100), Err(Some(5)), Err(Some(5)), Ok(100), Ok(10), Ok(100)]);
        assert_eq!(faults.hanging(), 0);
    }
}
