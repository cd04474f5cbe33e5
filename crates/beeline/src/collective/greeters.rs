//! Connections that have to prove themselves, several at once, each until a deadline of its own.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Greetings under way at once; further connections wait in the queue of the listener.
const UNDER_WAY_MAX: usize = 64;

/// Greetings under way, each on a thread, so that one who says nothing keeps nobody else waiting.
pub(super) struct Greeters<T> {
    sender: Sender<Option<T>>,
    results: Receiver<Option<T>>,
    under_way: usize,
}

impl<T: Send + 'static> Greeters<T> {
    pub(super) fn new() -> Self {
        let (sender, results) = channel();
        Self { sender, results, under_way: 0 }
    }

    pub(super) const fn has_room(&self) -> bool {
        self.under_way < UNDER_WAY_MAX
    }

    /// Whether nobody has to prove anything just now.
    pub(super) const fn is_idle(&self) -> bool {
        self.under_way == 0
    }

    /// Starts one, which has to end by itself; `None` says that it proved nothing.
    pub(super) fn start(&mut self, greeting: impl FnOnce() -> Option<T> + Send + 'static) {
        let sender = self.sender.clone();
        let thread = std::thread::Builder::new().name("beeline-greet".to_owned());
        // Nobody is there to take the result once the listener has given up.
        let started = thread.spawn(move || drop(sender.send(greeting())));
        self.under_way += usize::from(started.is_ok());
    }

    /// One that proved itself; `None` where none did within `wait`.
    pub(super) fn next(&mut self, wait: Duration) -> Option<T> {
        let result = self.results.recv_timeout(wait).ok()?;
        self.under_way = self.under_way.saturating_sub(1);
        result
    }
}
