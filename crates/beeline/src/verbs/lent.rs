//! What the peer of a local link may be fetching, and what this side is fetching of the peer's.
//!
//! A packet on a local link names bytes instead of carrying them, so whoever owns the bytes has to know until
//! when they may be read. Every name carries a *cookie*. The owner notes what it stands for ([`Lent`]) and
//! keeps that memory what it is until the peer says that it has fetched the bytes, or never will
//! ([`Fetches`]): the message [`Tag::Released`](super::link). A cookie in a packet that is given up before it
//! is sent is found by asking what is still to be sent ([`Lent::sweep`]).
//!
//! A peer that lies about it harms itself alone: what it releases early it may find changed when it fetches it, and one
//! that releases nothing, or does not listen, is served the slow way from a bound on.

use std::collections::{HashMap, HashSet, VecDeque};

/// Cookies that one message releases: the first, and how many follow it.
pub(super) type Run = (u64, u64);

/// What a cookie stands for.
#[derive(Debug)]
pub(super) enum What<S> {
    /// A region that was given to the peer, by its number.
    Region(u64),
    /// A part of this side's staging memory, which is free again when this value is dropped.
    Slot(S),
}

/// Cookies in use. `S` is what a slot is held by.
#[derive(Debug)]
pub(super) struct Lent<S> {
    /// The cookie of the first entry; 0 stands for nothing.
    base: u64,
    entries: VecDeque<Option<Entry<S>>>,
    regions: HashMap<u64, u32>,
    unsent: usize,
    /// More that are not sent than this, and some were most likely given up.
    unsent_many: usize,
}

/// Packets made and not sent that are nothing out of the ordinary.
const UNSENT_MANY: usize = 4096;
/// Most cookies in use, and most runs of them that the peer is to be told.
const ENTRIES_MAX: usize = 1 << 18;

#[derive(Debug)]
struct Entry<S> {
    what: What<S>,
    /// The peer has been told the cookie.
    sent: bool,
}

impl<S> Lent<S> {
    pub(super) fn new() -> Self {
        Self {
            base: 1,
            entries: VecDeque::new(),
            regions: HashMap::new(),
            unsent: 0,
            unsent_many: UNSENT_MANY,
        }
    }

    /// A cookie for `what`.
    pub(super) fn lend(&mut self, what: What<S>) -> u64 {
        if let What::Region(number) = what {
            let count = self.regions.entry(number).or_default();
            *count = count.saturating_add(1);
        }
        self.entries.push_back(Some(Entry { what, sent: false }));
        self.unsent += 1;
        // 2^64 names take longer than any machine lives.
        self.base.saturating_add(self.entries.len() as u64 - 1)
    }

    /// The packet with this cookie is where the peer finds it.
    pub(super) fn sent(&mut self, cookie: u64) {
        if let Some(entry) = self.entry(cookie)
            && !entry.sent
        {
            entry.sent = true;
            self.unsent = self.unsent.saturating_sub(1);
        }
    }

    /// The peer has fetched what these cookies stand for, or never will. What it was not told it cannot
    /// release.
    pub(super) fn release(&mut self, (first, count): Run) {
        let end = self.base.saturating_add(self.entries.len() as u64);
        for cookie in first.max(self.base)..first.saturating_add(count).min(end) {
            if self.entry(cookie).is_some_and(|entry| entry.sent) {
                self.end(cookie);
            }
        }
        self.shrink();
    }

    /// Ends what was never sent and is not among `kept`: packets that were given up.
    pub(super) fn sweep(&mut self, kept: &HashSet<u64>) {
        if self.unsent == 0 {
            return;
        }
        let cookies = self.base..self.base.saturating_add(self.entries.len() as u64);
        for cookie in cookies {
            if self.entry(cookie).is_some_and(|entry| !entry.sent) && !kept.contains(&cookie) {
                self.end(cookie);
            }
        }
        self.shrink();
        self.unsent_many = UNSENT_MANY.max(self.unsent.saturating_mul(2));
    }

    /// Whether no further cookie is to be made for now.
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= ENTRIES_MAX
    }

    /// Whether a packet with a cookie was made, and not sent yet.
    pub(super) const fn has_unsent(&self) -> bool {
        self.unsent > 0
    }

    /// Whether some were most likely given up: they are to be swept.
    pub(super) const fn wants_sweep(&self) -> bool {
        self.unsent > self.unsent_many
    }

    /// Nobody fetches anything any more.
    pub(super) fn clear(&mut self) {
        self.base = self.base.saturating_add(self.entries.len() as u64);
        self.entries.clear();
        self.regions.clear();
        self.unsent = 0;
    }

    /// Names of bytes of a region that the peer may still follow.
    pub(super) fn of_region(&self, number: u64) -> u32 {
        self.regions.get(&number).copied().unwrap_or(0)
    }

    /// Entries, with those in between that are done.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Cookies made so far.
    #[cfg(test)]
    pub(super) fn ever(&self) -> u64 {
        self.base + self.entries.len() as u64 - 1
    }

    fn entry(&mut self, cookie: u64) -> Option<&mut Entry<S>> {
        let at = usize::try_from(cookie.checked_sub(self.base)?).ok()?;
        self.entries.get_mut(at)?.as_mut()
    }

    fn end(&mut self, cookie: u64) {
        let at = cookie.checked_sub(self.base).and_then(|at| usize::try_from(at).ok());
        let Some(entry) = at.and_then(|at| self.entries.get_mut(at)?.take()) else { return };
        if !entry.sent {
            self.unsent = self.unsent.saturating_sub(1);
        }
        if let What::Region(number) = entry.what
            && let Some(count) = self.regions.get_mut(&number)
        {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.regions.remove(&number);
            }
        }
    }

    fn shrink(&mut self) {
        while let Some(None) = self.entries.front() {
            self.entries.pop_front();
            self.base = self.base.saturating_add(1);
        }
    }
}

/// What this side fetches of the peer's: each cookie that arrives is answered once.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    /// Of packets that have arrived and may or may not lead to a fetch.
    arrived: Vec<u64>,
    /// Of those, the ones that did; in the same order.
    taken: Vec<u64>,
    done: VecDeque<Run>,
}

impl Fetches {
    /// A packet with this cookie has arrived.
    pub(super) fn arrive(&mut self, cookie: u64) {
        if cookie != 0 {
            self.arrived.push(cookie);
        }
    }

    /// What it names is about to be fetched: [`fetched`](Self::fetched) follows.
    pub(super) fn take(&mut self, cookie: u64) {
        if cookie != 0 {
            self.taken.push(cookie);
        }
    }

    /// The bytes are here, or will never be fetched.
    pub(super) fn fetched(&mut self, cookie: u64) {
        if cookie == 0 {
            return;
        }
        if let Some((first, count)) = self.done.back_mut()
            && first.checked_add(*count) == Some(cookie)
        {
            *count += 1;
        } else if self.done.len() < ENTRIES_MAX {
            // Beyond, the peer does not listen: it is told no more.
            self.done.push_back((cookie, 1));
        }
    }

    /// Every packet that has arrived is dealt with: what led to no fetch never will.
    pub(super) fn settle(&mut self) {
        if self.arrived.is_empty() {
            return;
        }
        let mut taken = std::mem::take(&mut self.taken).into_iter().peekable();
        for cookie in std::mem::take(&mut self.arrived) {
            if taken.next_if_eq(&cookie).is_none() {
                self.fetched(cookie);
            }
        }
    }

    /// What is to be told to the peer next.
    pub(super) fn to_tell(&self) -> Option<Run> {
        self.done.front().copied()
    }

    /// That has been told.
    pub(super) fn told(&mut self) {
        self.done.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_region_is_lent_until_every_name_of_it_is_released() {
        let mut lent: Lent<()> = Lent::new();
        let cookies: Vec<u64> = (0..4).map(|n| lent.lend(What::Region(7 + n % 2))).collect();
        assert_eq!(cookies, [1, 2, 3, 4]);
        assert_eq!((lent.of_region(7), lent.of_region(8)), (2, 2));
        lent.release((1, 4));
        assert_eq!(lent.of_region(7), 2, "the peer was told nothing");
        for cookie in cookies {
            lent.sent(cookie);
        }
        lent.release((2, 1));
        lent.release((2, 1));
        assert_eq!((lent.of_region(7), lent.of_region(8)), (2, 1), "once");
        for run in [(0, 1), (5, u64::MAX), (u64::MAX, u64::MAX), (3, 0)] {
            lent.release(run);
            assert_eq!((lent.of_region(7), lent.of_region(8)), (2, 1), "{run:?}");
        }
        lent.release((0, u64::MAX));
        assert_eq!((lent.of_region(7), lent.of_region(8), lent.len()), (0, 0, 0));
        assert_eq!(lent.lend(What::Region(7)), 5, "no cookie comes twice");
    }

    #[test]
    fn a_slot_is_free_with_the_last_name_of_it() {
        let slot = Arc::new(());
        let mut lent = Lent::new();
        for _ in 0..3 {
            let cookie = lent.lend(What::Slot(Arc::clone(&slot)));
            lent.sent(cookie);
        }
        for left in [3, 2, 1] {
            assert_eq!(Arc::strong_count(&slot), left + 1);
            lent.release((left as u64, 1));
        }
        assert_eq!((Arc::strong_count(&slot), lent.len()), (1, 0));
        lent.lend(What::Slot(Arc::clone(&slot)));
        lent.clear();
        assert_eq!(Arc::strong_count(&slot), 1);
    }

    #[test]
    fn what_is_given_up_before_it_is_sent_is_swept() {
        let mut lent: Lent<()> = Lent::new();
        let [a, b, c] = [1, 2, 3].map(|n| lent.lend(What::Region(n)));
        lent.sent(a);
        lent.sweep(&HashSet::from([c]));
        assert_eq!([1, 2, 3].map(|n| lent.of_region(n)), [1, 0, 1]);
        lent.sent(b);
        lent.sent(c);
        lent.sweep(&HashSet::new());
        assert_eq!(lent.of_region(3), 1, "sent: the peer has to release it");
    }

    #[test]
    fn every_cookie_that_arrives_is_answered_once() {
        let mut fetches = Fetches::default();
        let told = |fetches: &mut Fetches| {
            let mut runs = Vec::new();
            while let Some(run) = fetches.to_tell() {
                runs.push(run);
                fetches.told();
            }
            runs
        };
        for cookie in [0, 4, 5, 6, 7, 9] {
            fetches.arrive(cookie);
        }
        for cookie in [4, 6, 7] {
            fetches.take(cookie);
        }
        // One is fetched before the others are dealt with.
        fetches.fetched(4);
        fetches.settle();
        assert_eq!(told(&mut fetches), [(4, 2), (9, 1)]);
        fetches.settle();
        fetches.fetched(6);
        fetches.fetched(7);
        assert_eq!(told(&mut fetches), [(6, 2)]);
    }
}
