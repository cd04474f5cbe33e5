//! The peer behind a lock.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::Peer;
use crate::lock;

/// The peer behind a lock, with a flag beside it: nobody takes the lock to find that there is nothing to tell.
#[derive(Debug)]
pub(in crate::verbs) struct PeerLock {
    peer: Mutex<Peer>,
    news: AtomicBool,
}

impl PeerLock {
    pub(in crate::verbs) const fn new(peer: Peer) -> Self {
        Self { peer: Mutex::new(peer), news: AtomicBool::new(false) }
    }

    pub(in crate::verbs) fn lock(&self) -> PeerGuard<'_> {
        PeerGuard { peer: lock(&self.peer), news: &self.news }
    }

    /// Whether the peer is to be told something.
    pub(in crate::verbs) fn has_news(&self) -> bool {
        self.news.load(Ordering::Relaxed)
    }
}

/// The locked peer. Whatever is done to it, the flag is right afterwards.
pub(in crate::verbs) struct PeerGuard<'a> {
    peer: MutexGuard<'a, Peer>,
    news: &'a AtomicBool,
}

impl Deref for PeerGuard<'_> {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl DerefMut for PeerGuard<'_> {
    fn deref_mut(&mut self) -> &mut Peer {
        &mut self.peer
    }
}

impl Drop for PeerGuard<'_> {
    fn drop(&mut self) {
        let news = self.peer.is_urgent() || self.peer.fetches.to_tell().is_some();
        self.news.store(news, Ordering::Relaxed);
    }
}
