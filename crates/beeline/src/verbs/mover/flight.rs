//! Work of a device that is under way, and what is left to do when it has ended.

use std::sync::Arc;

use beeline_core::mr::RegionId;
use beeline_core::rc::{MemFault, MemOp, MemToken};

use super::super::lane::Lane;
use super::super::memory::{Answer, Memory, Order};
use super::Job;
use super::task::{Room, Task};
use crate::gpu::Event;
use crate::memory::GpuMemory;

/// Work of a device, done when `event` is.
pub(super) struct Flight {
    pub(super) event: Event,
    pub(super) order: Order,
    room: Room,
    memory: Option<Arc<GpuMemory>>,
    parts: Vec<Part>,
}

/// One operation of a flight.
struct Part {
    token: MemToken,
    buffer: Vec<u8>,
    region: RegionId,
    /// Where its bytes lie in the slot.
    at: u64,
    len: u32,
    then: Then,
    /// Cookies of what it fetches from the peer.
    fetched: Vec<u64>,
}

/// What is left to do when the device has done its part.
enum Then {
    Nothing,
    /// The packet names the bytes where they are.
    Named,
    /// Bytes to the end of the buffer.
    Append,
    /// The word that an atomic found.
    Word,
    /// Bytes to host memory.
    ToHost(Memory, u64),
}

impl Flight {
    /// What `jobs` have become; `room` is theirs until it ends.
    pub(super) fn new(jobs: Vec<Job>, task: &Task, event: Event, order: Order, room: Room) -> Self {
        let mut watched = None;
        let mut at = 0;
        let mut parts = Vec::with_capacity(jobs.len());
        for mut job in jobs {
            let len = job.op.len() as u32;
            let fetched = job.cookies();
            let memory = job.memories.pop().flatten();
            let Some(segment) = job.op.segments.iter().next().copied() else { continue };
            let then = match (task, memory) {
                (Task::PullToHost, Some(memory)) => Then::ToHost(memory, segment.offset),
                (Task::Out, memory) => {
                    watched = watched.or(watched_of(memory));
                    Then::Append
                }
                (Task::OutShared, _) => Then::Named,
                (Task::Atomic, memory) => {
                    watched = watched.or(watched_of(memory));
                    Then::Word
                }
                (_, memory) => {
                    watched = watched.or(watched_of(memory));
                    Then::Nothing
                }
            };
            let MemOp { token, buffer, .. } = job.op;
            parts.push(Part { token, buffer, region: segment.region, at, len, then, fetched });
            at += u64::from(len);
        }
        Self { event, order, room, memory: watched, parts }
    }

    /// Answers its operations; `done` where the device has done its part. Gives its slot back.
    pub(super) fn land(self, lane: &mut Lane, done: bool, answers: &mut Vec<Answer>) {
        let Self { order, room, memory, parts, .. } = self;
        let same = memory.as_ref().is_none_or(|memory| memory.check().is_ok());
        for part in parts {
            let Part { token, mut buffer, region, at, len, then, fetched } = part;
            let (mut result, mut staged) = (Err(MemFault), None);
            if done && same {
                match (&then, &room) {
                    (Then::Named, Room::Stage(slot, _)) => {
                        let offset = slot.offset.saturating_add(at);
                        staged = Some((Arc::clone(slot), offset, len));
                        result = Ok(u64::from(len));
                    }
                    _ => result = finish(lane, &room, at, len, &then, &mut buffer),
                }
            }
            let gone = if same { Vec::new() } else { vec![region] };
            answers.push(Answer { token, buffer, result, order, gone, staged, fetched });
        }
        if let Room::Slot(slot) = room {
            lane.give_back(slot);
        }
    }
}

fn watched_of(memory: Option<Memory>) -> Option<Arc<GpuMemory>> {
    match memory {
        Some(Memory::Gpu(gpu)) if gpu.is_watched() => Some(gpu),
        _ => None,
    }
}

fn finish(
    lane: &Lane,
    room: &Room,
    at: u64,
    len: u32,
    then: &Then,
    buffer: &mut Vec<u8>,
) -> Result<u64, MemFault> {
    let staged = || {
        let Room::Slot(slot) = room else { return Err(MemFault) };
        Ok((lane.staging(), slot.offset.checked_add(at).ok_or(MemFault)?))
    };
    match then {
        Then::Nothing => Ok(0),
        Then::Named => Err(MemFault),
        Then::Append => {
            let (mem, from) = staged()?;
            mem.append_to(from, len as usize, buffer).map(|()| 0).map_err(|_| MemFault)
        }
        Then::Word => {
            let (mem, from) = staged()?;
            mem.load_u64(from).map_err(|_| MemFault)
        }
        Then::ToHost(Memory::Host(host), offset) => {
            let (mem, from) = staged()?;
            host.copy_from(*offset, mem, from, u64::from(len)).map(|()| 0).map_err(|_| MemFault)
        }
        Then::ToHost(..) => Err(MemFault),
    }
}
