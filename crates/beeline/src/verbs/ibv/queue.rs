//! What is posted: beside every queue of the kernel's, the work requests in it.
//!
//! The NIC gets names of ours, and gives them back with completions. A name says which life of which queue
//! pair it belongs to, so what a queue pair left behind when it was destroyed is nobody's.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use beeline_core::rc::CompletionOp;
use beeline_sys::ibverbs as sys;

use super::mr::Region;

/// Of a name: whether it is that of a receive.
const RECV: u64 = 1 << 63;
/// Bits for the life of a queue.
const LIFE_BITS: u32 = 23;
/// Bits below.
const LIFE_SHIFT: u32 = 40;
/// Of a receive's name: bits for its place.
const PLACE_BITS: u32 = 24;

/// Names one life of a queue: different from every other for the next 2^23 that are made.
pub(super) fn new_life() -> u64 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    (u64::from(number) & ((1 << LIFE_BITS) - 1)) << LIFE_SHIFT
}

/// Whether a name is that of a receive.
pub(super) const fn is_recv(name: u64) -> bool {
    name & RECV != 0
}

/// A work request that is posted. The regions it names are held until it is dropped.
#[derive(Debug)]
pub(super) struct Posted {
    /// The consumer's own name.
    pub(super) id: u64,
    pub(super) op: CompletionOp,
    /// Bytes of a send's message.
    pub(super) len: u32,
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) held: Vec<Held>,
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) ah: Option<Arc<sys::Ah>>,
}

/// A region that a posted work request names.
#[derive(Debug)]
pub(super) struct Held(Arc<Region>);

impl Held {
    pub(super) fn new(region: &Arc<Region>) -> Self {
        region.posted.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(region))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.posted.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Sends, in their order.
#[derive(Debug)]
pub(super) struct SendQueue {
    life: u64,
    entries: VecDeque<Posted>,
    /// Number of the first entry.
    first: u64,
}

impl SendQueue {
    const NUMBERS: u64 = (1 << LIFE_SHIFT) - 1;

    pub(super) fn new() -> Self {
        Self { life: new_life(), entries: VecDeque::new(), first: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The name of the next entry.
    pub(super) fn next_name(&self) -> u64 {
        let number = self.first.wrapping_add(self.entries.len() as u64) & Self::NUMBERS;
        self.life | number
    }

    pub(super) fn push(&mut self, posted: Posted) {
        self.entries.push_back(posted);
    }

    /// Takes the last entry back: it was not posted.
    pub(super) fn take_back(&mut self) {
        self.entries.pop_back();
    }

    /// The entry of that name. Those before it are done as well: sends of a queue pair complete in order,
    /// and some do not tell.
    pub(super) fn complete(&mut self, name: u64) -> Option<Posted> {
        if name & !Self::NUMBERS != self.life {
            return None;
        }
        let ahead = name.wrapping_sub(self.first) & Self::NUMBERS;
        let ahead = usize::try_from(ahead).ok().filter(|ahead| *ahead < self.entries.len())?;
        self.first = self.first.wrapping_add(ahead as u64 + 1) & Self::NUMBERS;
        self.entries.drain(..=ahead).next_back()
    }

    /// Forgets everything; what is under way is nobody's from here on.
    pub(super) fn clear(&mut self) {
        *self = Self::new();
    }
}

/// Receives: of one queue pair, or shared, where they complete in any order.
#[derive(Debug)]
pub(super) struct RecvQueue {
    life: u64,
    places: Vec<Place>,
    free: Vec<u32>,
    capacity: u32,
    sges_max: u32,
    /// Number of the next receive.
    next: u64,
    /// Of a shared queue, where the driver may forget a receive: who may have one.
    takers: Option<Takers>,
}

#[derive(Debug, Default)]
struct Place {
    /// How often it was used: a name is that of one use.
    turn: u16,
    /// The number of the receive in it.
    number: u64,
    posted: Option<Posted>,
}

/// Who may still have a receive that no completion tells of.
///
/// Receives are taken from a shared queue in the order in which they were posted, and each queue pair completes its own
/// in that order. So a queue pair has none from before the last that it completed, and none that was taken before it began.
#[derive(Debug, Default)]
struct Takers {
    /// Of each queue pair that can receive: from which number on it may have one.
    from: HashMap<u64, u64>,
    /// Receives before this number are taken.
    taken: u64,
    /// Receives before this number may have been taken by a queue pair that has ended since; 0: none.
    doubtful: u64,
    /// Receives that the driver's queue holds at most: those from before are taken.
    ring: u32,
}

impl RecvQueue {
    pub(super) fn new(capacity: u32, sges_max: u32) -> Self {
        let (places, free) = (Vec::new(), Vec::new());
        Self { life: new_life(), places, free, capacity, sges_max, next: 0, takers: None }
    }

    /// One that several queue pairs take from. `ring` where their driver drops what a queue pair had taken
    /// when it ends, without a completion: how many receives the driver's own queue holds.
    pub(super) fn shared(capacity: u32, sges_max: u32, ring: Option<u32>) -> Self {
        let takers = ring.map(|ring| Takers { ring, ..Takers::default() });
        Self { takers, ..Self::new(capacity, sges_max) }
    }

    pub(super) const fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(super) const fn sges_max(&self) -> u32 {
        self.sges_max
    }

    /// Puts a receive in; answers its name, or gives it back where the queue is full.
    pub(super) fn push(&mut self, posted: Posted) -> Result<u64, Posted> {
        if self.outstanding() >= self.outstanding_max() {
            return Err(posted);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            (self.places.len() - 1) as u32
        });
        let Some(place) = self.places.get_mut(index as usize) else { return Err(posted) };
        (place.posted, place.number) = (Some(posted), self.next);
        self.next += 1;
        let turn = u64::from(place.turn) << PLACE_BITS;
        Ok(RECV | self.life | turn | u64::from(index))
    }

    fn outstanding(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Receives at most. Those that may be forgotten have places and none in the driver's queue, so there the
    /// driver says when it is full.
    fn outstanding_max(&self) -> usize {
        let is_doubtful = self.takers.as_ref().is_some_and(|takers| takers.doubtful > 0);
        self.capacity as usize * if is_doubtful { 2 } else { 1 }
    }

    /// Takes the last receive back: the driver refused it.
    pub(super) fn take_back(&mut self, name: u64) -> Option<Posted> {
        self.next -= 1;
        self.complete(name)
    }

    /// The driver has taken what was pushed last.
    pub(super) fn accepted(&mut self) {
        if let Some(takers) = &mut self.takers {
            takers.taken = takers.taken.max(self.next.saturating_sub(u64::from(takers.ring)));
            self.release_forgotten();
        }
    }

    /// Takes the receive of that name out, which `taker` has completed.
    pub(super) fn complete_by(&mut self, name: u64, taker: u64) -> Option<Posted> {
        let index = (name & ((1 << PLACE_BITS) - 1)) as usize;
        let number = self.places.get(index).map(|place| place.number);
        let posted = self.complete(name)?;
        if let (Some(takers), Some(number)) = (&mut self.takers, number) {
            takers.taken = takers.taken.max(number + 1);
            if let Some(from) = takers.from.get_mut(&taker) {
                *from = number + 1;
            }
            self.release_forgotten();
        }
        Some(posted)
    }

    /// From here on `taker` may take receives.
    pub(super) fn begin(&mut self, taker: u64) {
        if let Some(takers) = &mut self.takers {
            takers.from.entry(taker).or_insert(takers.taken);
        }
    }

    /// `taker` has ended, and what it completed was taken out.
    pub(super) fn end(&mut self, taker: u64) {
        let Some(takers) = &mut self.takers else { return };
        if takers.from.remove(&taker).is_some() {
            takers.doubtful = self.next;
            self.release_forgotten();
        }
    }

    /// Lets go of receives that are taken, and that no queue pair can have any more.
    fn release_forgotten(&mut self) {
        let Some(takers) = &mut self.takers else { return };
        if takers.doubtful == 0 {
            return;
        }
        let settled = takers.from.values().copied().min().unwrap_or(takers.taken);
        for (index, place) in self.places.iter_mut().enumerate() {
            if place.number < settled && place.posted.take().is_some() {
                place.turn = place.turn.wrapping_add(1);
                self.free.push(index as u32);
            }
        }
        if settled >= takers.doubtful {
            takers.doubtful = 0;
        }
    }

    /// Takes the receive of that name out.
    pub(super) fn complete(&mut self, name: u64) -> Option<Posted> {
        if name & !RECV & !((1 << LIFE_SHIFT) - 1) != self.life {
            return None;
        }
        let index = (name & ((1 << PLACE_BITS) - 1)) as u32;
        let turn = (name >> PLACE_BITS) as u16;
        let place = self.places.get_mut(index as usize).filter(|place| place.turn == turn)?;
        let posted = place.posted.take()?;
        place.turn = place.turn.wrapping_add(1);
        self.free.push(index);
        Some(posted)
    }

    /// Forgets everything; what is under way is nobody's from here on.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.capacity, self.sges_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(id: u64) -> Posted {
        Posted { id, op: CompletionOp::Send, len: 0, held: Vec::new(), ah: None }
    }

    #[test]
    fn a_completion_ends_what_was_posted_before_it() {
        let mut queue = SendQueue::new();
        let names: Vec<u64> = (0..5)
            .map(|id| {
                let name = queue.next_name();
                queue.push(posted(id));
                name
            })
            .collect();
        assert!(names.iter().all(|name| !is_recv(*name)));
        assert_eq!(queue.complete(names[2]).map(|done| done.id), Some(2));
        assert_eq!(queue.len(), 2);
        assert!(queue.complete(names[1]).is_none(), "done already");
        queue.take_back();
        assert!(queue.complete(names[4]).is_none(), "never posted");
        assert_eq!(queue.complete(names[3]).map(|done| done.id), Some(3));
        assert_eq!(queue.next_name(), names[4], "its number is free again");
    }

    #[test]
    fn numbers_of_sends_wrap() {
        let mut queue = SendQueue::new();
        queue.first = SendQueue::NUMBERS;
        let names = [(); 3].map(|()| {
            let name = queue.next_name();
            queue.push(posted(name));
            name
        });
        assert_eq!(names.map(|name| name & SendQueue::NUMBERS), [SendQueue::NUMBERS, 0, 1]);
        for name in names {
            assert_eq!(queue.complete(name).map(|done| done.id), Some(name));
        }
    }

    #[test]
    fn receives_complete_in_any_order_and_places_are_used_again() {
        let mut queue = RecvQueue::new(3, 1);
        let names: Vec<u64> = (0..3).map(|id| queue.push(posted(id)).unwrap()).collect();
        assert!(names.iter().all(|name| is_recv(*name)));
        assert_eq!(queue.push(posted(9)).unwrap_err().id, 9, "full");
        assert_eq!(queue.complete(names[1]).map(|done| done.id), Some(1));
        let again = queue.push(posted(4)).unwrap();
        assert_ne!(again, names[1], "a name is that of one use");
        assert!(queue.complete(names[1]).is_none());
        assert_eq!(queue.complete(again).map(|done| done.id), Some(4));
        assert_eq!(queue.places.len(), 3);
    }

    /// A shared queue of a driver that forgets, whose own queue holds `ring` receives.
    fn forgetful(capacity: u32, ring: u32) -> RecvQueue {
        RecvQueue::shared(capacity, 1, Some(ring))
    }

    /// Posts as many receives as there is room for, here and in a driver's queue that has `in_driver`.
    fn fill(queue: &mut RecvQueue, in_driver: &mut usize, ring: usize) -> Vec<u64> {
        let mut names = Vec::new();
        while let Ok(name) = queue.push(posted(0)) {
            if *in_driver == ring {
                queue.take_back(name).unwrap();
                break;
            }
            queue.accepted();
            *in_driver += 1;
            names.push(name);
        }
        names
    }

    #[test]
    fn what_a_queue_pair_took_and_did_not_complete_is_released_by_a_later_one() {
        let mut queue = forgetful(4, 4);
        let names: Vec<u64> = (0..4).map(|id| queue.push(posted(id)).unwrap()).collect();
        queue.begin(1);
        queue.begin(2);
        // 1 took the first and ended; 2 may have it until it completes a later one.
        queue.end(1);
        assert_eq!(queue.outstanding(), 4);
        assert_eq!(queue.complete_by(names[2], 2).map(|done| done.id), Some(2));
        assert_eq!(queue.outstanding(), 1, "the first is forgotten, the second was behind it");
        assert!(queue.complete_by(names[0], 2).is_none());
        assert_eq!(queue.complete_by(names[3], 2).map(|done| done.id), Some(3));
    }

    #[test]
    fn what_a_living_queue_pair_may_have_is_held() {
        let mut queue = forgetful(4, 4);
        let names: Vec<u64> = (0..4).map(|id| queue.push(posted(id)).unwrap()).collect();
        for taker in 1..=3 {
            queue.begin(taker);
        }
        queue.end(1);
        queue.complete_by(names[2], 2).unwrap();
        assert_eq!(queue.outstanding(), 3, "3 may have either");
        // One that began later cannot have what was taken before.
        queue.begin(4);
        queue.end(3);
        assert_eq!(queue.outstanding(), 1);
        // Nobody has ended since: a receive that is passed over is under way.
        let mut queue = forgetful(4, 4);
        let names: Vec<u64> = (0..4).map(|id| queue.push(posted(id)).unwrap()).collect();
        queue.begin(1);
        queue.complete_by(names[1], 1).unwrap();
        assert_eq!(queue.outstanding(), 3);
    }

    #[test]
    fn a_queue_whose_receives_are_all_forgotten_takes_new_ones() {
        for (capacity, ring) in [(4, 4), (4, 7), (8, 15), (1, 1)] {
            let (mut queue, mut in_driver) = (forgetful(capacity, ring), 0);
            for taker in 0..50 {
                let names = fill(&mut queue, &mut in_driver, ring as usize);
                assert!(in_driver > 0, "{capacity} {ring} {taker}: {} posted", names.len());
                assert!(queue.places.len() <= 2 * capacity as usize);
                queue.begin(taker);
                in_driver -= 1;
                queue.end(taker);
            }
            // A queue pair that lives completes whatever is left, and the count is that of before.
            queue.begin(99);
            let mut names: Vec<(u64, u64)> = (0..)
                .zip(&queue.places)
                .map(|(at, place)| (place.number, u64::from(place.turn) << PLACE_BITS | at))
                .collect();
            names.sort_unstable();
            for (_, name) in names {
                queue.complete_by(RECV | queue.life | name, 99);
            }
            assert_eq!(queue.outstanding(), 0, "{capacity} {ring}");
            for _ in 0..capacity {
                queue.push(posted(0)).unwrap();
                queue.accepted();
            }
            assert!(queue.push(posted(0)).is_err(), "{capacity} {ring}");
        }
    }

    #[test]
    fn where_nothing_is_forgotten_the_end_of_a_queue_pair_releases_nothing() {
        let mut queue = RecvQueue::shared(4, 1, None);
        let names: Vec<u64> = (0..4).map(|id| queue.push(posted(id)).unwrap()).collect();
        queue.begin(1);
        queue.end(1);
        queue.complete_by(names[3], 2).unwrap();
        assert_eq!(queue.outstanding(), 3);
        queue.push(posted(9)).unwrap();
        assert!(queue.push(posted(9)).is_err());
    }

    #[test]
    fn what_another_life_left_behind_is_nobodys() {
        let (mut send, mut recv) = (SendQueue::new(), RecvQueue::new(4, 1));
        let name = send.next_name();
        send.push(posted(1));
        let received = recv.push(posted(2)).unwrap();
        send.clear();
        recv.clear();
        send.push(posted(3));
        recv.push(posted(4)).unwrap();
        assert!(send.complete(name).is_none() && recv.complete(received).is_none());
    }
}
