//! What is posted: beside every queue of the kernel's, the work requests in it.
//!
//! The NIC gets names of ours, and gives them back with completions. A name says which life of which queue
//! pair it belongs to, so what a queue pair left behind when it was destroyed is nobody's.

use std::collections::VecDeque;
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
}

#[derive(Debug, Default)]
struct Place {
    /// How often it was used: a name is that of one use.
    turn: u16,
    posted: Option<Posted>,
}

impl RecvQueue {
    pub(super) fn new(capacity: u32, sges_max: u32) -> Self {
        let (places, free) = (Vec::new(), Vec::new());
        Self { life: new_life(), places, free, capacity, sges_max }
    }

    pub(super) const fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(super) const fn sges_max(&self) -> u32 {
        self.sges_max
    }

    /// Puts a receive in; answers its name, or gives it back where the queue is full.
    pub(super) fn push(&mut self, posted: Posted) -> Result<u64, Posted> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.places.len() < self.capacity as usize => {
                self.places.push(Place::default());
                (self.places.len() - 1) as u32
            }
            None => return Err(posted),
        };
        let Some(place) = self.places.get_mut(index as usize) else { return Err(posted) };
        place.posted = Some(posted);
        let turn = u64::from(place.turn) << PLACE_BITS;
        Ok(RECV | self.life | turn | u64::from(index))
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
