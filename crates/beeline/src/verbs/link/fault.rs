//! A bad network around any link: loss, duplication, reordering, corruption and delay, from a seed.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use beeline_core::rc::Transmit;

use super::Link;

/// What happens to datagrams that are sent, in thousandths of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of the choices.
    pub seed: u64,
    /// Lost.
    pub loss: u16,
    /// Sent twice.
    pub duplication: u16,
    /// Held back until a few later ones have gone.
    pub reorder: u16,
    /// One bit changed.
    pub corruption: u16,
    /// Added to every datagram's way.
    pub delay: Duration,
}

/// Datagrams held back at most.
const HELD_MAX: usize = 8192;

/// How long a datagram is held back to be overtaken.
const OVERTAKEN: Duration = Duration::from_micros(200);

#[derive(Debug)]
pub(in super::super) struct FaultLink {
    pub(super) inner: Link,
    faults: Faults,
    state: u64,
    held: Vec<(Instant, Transmit)>,
}

impl FaultLink {
    pub(in super::super) fn new(inner: Link, faults: Faults) -> Self {
        Self { inner, faults, state: faults.seed ^ 0x9e37_79b9_7f4a_7c15, held: Vec::new() }
    }

    pub(super) fn send(&mut self, queue: &mut VecDeque<Transmit>, sent: &mut Vec<Vec<u8>>) -> bool {
        let now = Instant::now();
        let mut ready = VecDeque::new();
        self.held.sort_by_key(|(due, _)| *due);
        let due = self.held.partition_point(|(due, _)| *due <= now);
        ready.extend(self.held.drain(..due).map(|(_, transmit)| transmit));
        for mut transmit in queue.drain(..) {
            if self.chance(self.faults.loss) {
                sent.push(transmit.datagram);
                continue;
            }
            if self.chance(self.faults.corruption) && !transmit.datagram.is_empty() {
                let bit = self.next() as usize % (transmit.datagram.len() * 8);
                if let Some(byte) = transmit.datagram.get_mut(bit / 8) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            if self.chance(self.faults.duplication) {
                let (path, datagram) = (transmit.path, transmit.datagram.clone());
                self.hold_or_send(now, Transmit { path, datagram }, &mut ready);
            }
            self.hold_or_send(now, transmit, &mut ready);
        }
        let mut open = self.inner.send(&mut ready, sent);
        while open && !ready.is_empty() {
            open = self.inner.send(&mut ready, sent);
        }
        // What the link did not take waits here; its order is kept by its time.
        self.held.extend(ready.into_iter().map(|transmit| (now, transmit)));
        open
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.held.iter().map(|(due, _)| *due).chain(self.inner.due()).min()
    }

    fn hold_or_send(&mut self, now: Instant, transmit: Transmit, ready: &mut VecDeque<Transmit>) {
        let mut delay = self.faults.delay;
        if self.chance(self.faults.reorder) {
            delay += OVERTAKEN;
        }
        if delay.is_zero() || self.held.len() >= HELD_MAX {
            ready.push_back(transmit);
        } else {
            self.held.push((now + delay, transmit));
        }
    }

    fn chance(&mut self, thousandths: u16) -> bool {
        thousandths > 0 && self.next() % 1000 < u64::from(thousandths)
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
