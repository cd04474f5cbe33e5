//! The protocol of a dynamic attachment: an exporter that moves memory, importers that access it.
//!
//! An importer translates once and keeps the answer. Before the exporter moves the pages it *revokes*
//! every translation: no access begins from then on, and those under way are waited for. After the move
//! it *resumes*; the next access finds no translation and faults the new pages in. A translation that
//! was asked for before a revocation and arrives after it is thrown away, by its generation.
//!
//! The file names its locks through `super::sync`, so that a model checker can put its own there.

use std::sync::{Arc, PoisonError};

use super::sync::{Condvar, Mutex, MutexGuard, wait_a_while};

/// Turns of [`wait_a_while`] in vain before a wait is given up.
const PATIENCE: u32 = 30;

/// A translation that can be taken away.
#[derive(Debug)]
pub struct Revocable<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    translation: Option<Arc<T>>,
    /// Revocations so far.
    generation: u64,
    /// Accesses under way, and those that wait for a move to end.
    users: u32,
    waiting: u32,
    /// Between a revocation and its end.
    moving: bool,
    faults: u64,
}

/// Why an access did not happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused<E> {
    /// The exporter did not finish a move in time.
    Moving,
    /// The pages could not be faulted in.
    Fault(E),
}

impl<T> Default for Revocable<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Revocable<T> {
    /// No translation yet: the first access faults it in.
    pub fn new() -> Self {
        let (generation, users, waiting, moving, faults) = (0, 0, 0, false, 0);
        let state = State { translation: None, generation, users, waiting, moving, faults };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Runs `work` on the translation, which stays valid until it returns. `fault` makes one where
    /// there is none; it is called again where a move came between, without any lock held.
    ///
    /// # Errors
    /// [`Refused::Moving`] where a move does not end; what `fault` says.
    pub fn access<R, E>(
        &self,
        mut fault: impl FnMut() -> Result<T, E>,
        work: impl FnOnce(&T) -> R,
    ) -> Result<R, Refused<E>> {
        let translation = self.enter(&mut fault)?;
        let answer = work(&translation);
        let mut state = self.lock();
        state.users -= 1;
        if state.users == 0 {
            self.changed.notify_all();
        }
        Ok(answer)
    }

    fn enter<E>(&self, fault: &mut impl FnMut() -> Result<T, E>) -> Result<Arc<T>, Refused<E>> {
        let mut turns = 0;
        let mut waited = false;
        let mut state = self.lock();
        let entered = loop {
            if state.moving {
                if !waited {
                    waited = true;
                    state.waiting += 1;
                }
                if turns >= PATIENCE {
                    break Err(Refused::Moving);
                }
                let in_vain;
                (state, in_vain) = wait_a_while(&self.changed, state);
                turns += u32::from(in_vain);
                continue;
            }
            if let Some(translation) = state.translation.clone() {
                state.users += 1;
                break Ok(translation);
            }
            let generation = state.generation;
            state.faults += 1;
            drop(state);
            let made = fault();
            state = self.lock();
            match made {
                // Otherwise it may name the pages of before the move.
                Ok(made) if state.generation == generation => {
                    state.translation = Some(Arc::new(made));
                }
                Ok(_) => {}
                Err(error) => break Err(Refused::Fault(error)),
            }
        };
        if waited {
            state.waiting -= 1;
            self.changed.notify_all();
        }
        entered
    }

    /// Takes the translation away and waits for the accesses under way. No access begins before
    /// [`resume`](Self::resume). Who waited for an earlier move has its turn first. `false` where an
    /// access did not end in time: the move must not happen, and accesses are allowed again.
    #[must_use = "memory may only move where the answer is yes"]
    pub fn revoke(&self) -> bool {
        let mut turns = 0;
        let mut state = self.lock();
        while state.waiting > 0 && turns < PATIENCE {
            let in_vain;
            (state, in_vain) = wait_a_while(&self.changed, state);
            turns += u32::from(in_vain);
        }
        state.generation += 1;
        state.moving = true;
        state.translation = None;
        while state.users > 0 && turns < PATIENCE {
            let in_vain;
            (state, in_vain) = wait_a_while(&self.changed, state);
            turns += u32::from(in_vain);
        }
        if state.users == 0 {
            return true;
        }
        state.moving = false;
        self.changed.notify_all();
        false
    }

    /// The memory is where it stays for now: accesses go on.
    pub fn resume(&self) {
        let mut state = self.lock();
        state.moving = false;
        self.changed.notify_all();
    }

    /// How often pages were faulted in.
    pub fn faults(&self) -> u64 {
        self.lock().faults
    }

    /// How often the translation was taken away.
    pub fn revocations(&self) -> u64 {
        self.lock().generation
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
