//! Faults on request: what a real device does on a bad day, at a chosen moment.

use std::sync::{Arc, Condvar, Mutex};

use super::device_error;
use crate::error::Result;
use crate::lock;

/// Where a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// Allocating device memory.
    Alloc,
    /// Pinning host memory.
    Pin,
    /// Registering mapped file pages.
    Register,
    /// A copy to, from or on the device.
    Copy,
    /// A kernel.
    Kernel,
}

/// What happens there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The operation fails.
    Fail,
    /// The operation does not finish until [`Faults::release`].
    Stall,
    /// The operation succeeds with one wrong byte (copies; elsewhere as `Fail`).
    Corrupt,
    /// The device is lost: this and every later operation fails.
    Lose,
}

/// The faults armed on one device. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Faults {
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
    lost: bool,
    /// Stalls before this number were released.
    epoch: u64,
    stalled: usize,
}

#[derive(Debug)]
struct Armed {
    site: Site,
    after: u64,
    effect: Effect,
}

impl Faults {
    /// Lets `after` operations at `site` pass and strikes the next one, once.
    pub fn arm(&self, site: Site, after: u64, effect: Effect) {
        lock(&self.inner.state).armed.push(Armed { site, after, effect });
    }

    /// Lets every stalled operation go on, and forgets faults that have not struck.
    pub fn release(&self) {
        let mut state = lock(&self.inner.state);
        state.armed.clear();
        state.epoch += 1;
        self.inner.released.notify_all();
    }

    /// Operations that are stalled now.
    pub fn stalled(&self) -> usize {
        lock(&self.inner.state).stalled
    }

    /// Counts one operation at `site`; answers whether its bytes shall be corrupted.
    pub(super) fn hit(&self, site: Site) -> Result<bool> {
        let mut state = lock(&self.inner.state);
        if state.lost {
            return Err(device_error("the simulated device is lost (injected fault)"));
        }
        let Some(effect) = state.strike(site) else { return Ok(false) };
        match effect {
            Effect::Corrupt if site == Site::Copy => Ok(true),
            Effect::Fail | Effect::Corrupt => {
                Err(device_error(format!("simulated failure of {site:?} (injected fault)")))
            }
            Effect::Lose => {
                state.lost = true;
                Err(device_error("the simulated device is lost (injected fault)"))
            }
            Effect::Stall => {
                let epoch = state.epoch;
                state.stalled += 1;
                let mut state = self
                    .inner
                    .released
                    .wait_while(state, |state| state.epoch == epoch)
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                state.stalled -= 1;
                Ok(false)
            }
        }
    }
}

impl State {
    fn strike(&mut self, site: Site) -> Option<Effect> {
        let mut struck = None;
        for (index, armed) in self.armed.iter_mut().enumerate() {
            if armed.site != site {
                continue;
            }
            if armed.after == 0 {
                struck = struck.or(Some(index));
            } else {
                armed.after -= 1;
            }
        }
        struck.map(|index| self.armed.swap_remove(index).effect)
    }
}
