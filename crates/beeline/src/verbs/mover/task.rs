//! What a device does for an operation, and which operations become one.

use std::collections::VecDeque;
use std::sync::Arc;

use beeline_core::rc::MemKind;

use super::super::lane::Slot;
use super::super::memory::Memory;
use super::super::peer::{PeerRegion, Piece};
use super::super::stage::{STAGE_MIN, StageSlot};
use super::Job;
use crate::gpu::{Buffer, Gpu, PinnedMem};
use crate::memory::{Atomicity, GpuMemory};

/// What one copy or kernel of a device does.
pub(super) enum Task {
    /// Device memory to a slot, and from there into packets.
    Out,
    /// Device memory to staging memory, which packets name.
    OutShared,
    /// Packets to a slot, and from there to device memory.
    In,
    /// A peer's host memory to a slot, and from there to device memory.
    PullHost,
    /// A peer's staging memory to device memory.
    PullStage,
    /// A peer's device memory to device memory.
    PullGpu,
    /// A peer's device memory to a slot, and from there to host memory.
    PullToHost,
    Atomic,
}

/// Host memory that a copy goes through.
pub(super) enum Room {
    None,
    /// Of the lane.
    Slot(Slot),
    /// Of this side's staging memory.
    Stage(Arc<StageSlot>, PinnedMem),
    /// The peer's staging memory.
    Peer(PinnedMem),
}

/// The memory behind a region that an access of `len` bytes reaches by a copy engine.
pub(super) fn by_engine(memory: &Memory, len: u64) -> Option<&Arc<GpuMemory>> {
    match memory {
        Memory::Gpu(gpu) if !gpu.in_place(len) => Some(gpu),
        _ => None,
    }
}

/// What a device does for a job; `None` where this thread does it.
pub(super) fn task_of(job: &Job) -> Option<Task> {
    let mut segments = job.op.segments.iter();
    let (Some(segment), None) = (segments.next(), segments.next()) else { return None };
    let [Some(memory)] = job.memories.as_slice() else { return None };
    let gpu = by_engine(memory, u64::from(segment.len));
    let source = match job.sources.as_slice() {
        [piece] => Some(&*piece.memory),
        _ => None,
    };
    match (job.op.kind, gpu, source) {
        (MemKind::Read, Some(gpu), _) => {
            let staged = job.stage.is_some()
                && u64::from(segment.len) >= STAGE_MIN
                // Nobody may see its bytes before the second look at whose they are.
                && !gpu.is_watched();
            Some(if staged { Task::OutShared } else { Task::Out })
        }
        (MemKind::Write, Some(_), _) => Some(Task::In),
        (MemKind::Pull, Some(_), Some(PeerRegion::Host(_))) => Some(Task::PullHost),
        (MemKind::Pull, Some(_), Some(PeerRegion::Stage(_))) => Some(Task::PullStage),
        (MemKind::Pull, Some(gpu), Some(PeerRegion::Gpu(from))) => {
            from.gpu().same_device(&gpu.gpu()).then_some(Task::PullGpu)
        }
        (MemKind::Pull, None, Some(PeerRegion::Gpu(_))) => {
            matches!(memory, Memory::Host(_)).then_some(Task::PullToHost)
        }
        (MemKind::CompareSwap { .. } | MemKind::FetchAdd { .. }, Some(gpu), _) => {
            (gpu.atomicity() == Atomicity::System).then_some(Task::Atomic)
        }
        _ => None,
    }
}

/// The device that does it.
pub(super) fn gpu_of(job: &Job, task: &Task) -> Option<Gpu> {
    match (task, job.memories.first(), job.sources.first()) {
        (Task::PullToHost, _, Some(Piece { memory, .. })) => match &**memory {
            PeerRegion::Gpu(buffer) => Some(buffer.gpu()),
            PeerRegion::Host(_) | PeerRegion::Stage(_) => None,
        },
        (_, Some(Some(Memory::Gpu(gpu))), _) => Some(gpu.gpu()),
        _ => None,
    }
}

/// How many jobs from the front are neighbours that one copy does, and their bytes.
pub(super) fn run_length(waiting: &VecDeque<Job>, task: &Task, bytes_max: u64) -> (usize, u64) {
    let place = |job: &Job| job.op.segments.iter().next().copied();
    let Some(first) = waiting.front() else { return (0, 0) };
    let Some(start) = place(first) else { return (1, 0) };
    let (mut count, mut bytes) = (1, u64::from(start.len));
    if matches!(task, Task::Atomic) {
        return (1, 8);
    }
    let source = first.sources.first();
    for job in waiting.iter().skip(1) {
        let Some(here) = place(job) else { break };
        let follows = job.op.qpn == first.op.qpn
            && job.op.kind == first.op.kind
            && here.region == start.region
            && here.offset == start.offset.saturating_add(bytes)
            && task_of(job).is_some_and(|other| {
                std::mem::discriminant(&other) == std::mem::discriminant(task)
            });
        let goes_on = match (source, job.sources.first()) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                Arc::ptr_eq(&a.memory, &b.memory) && b.offset == a.offset.saturating_add(bytes)
            }
            _ => false,
        };
        let sum = bytes.saturating_add(u64::from(here.len));
        if !follows || !goes_on || sum > bytes_max {
            break;
        }
        (count, bytes) = (count + 1, sum);
    }
    (count, bytes)
}

/// One copy or kernel, as a lane takes it.
pub(in super::super) enum Run<'a> {
    /// Device memory to the slot.
    ToSlot { from: &'a Buffer, at: u64, len: u64, slot: Slot, watch: Option<&'a GpuMemory> },
    /// The slot, once it is filled, to device memory.
    FromSlot { to: &'a Buffer, at: u64, len: u64, slot: Slot, fill: Fill<'a>, watch: &'a GpuMemory },
    /// Device memory to device memory.
    Across {
        to: &'a Buffer,
        at: u64,
        from: &'a Buffer,
        from_at: u64,
        len: u64,
        watch: &'a GpuMemory,
    },
    /// Device memory to staging memory that the peer reads.
    ToStage { from: &'a Buffer, at: u64, len: u64, stage: PinnedMem, offset: u64 },
    /// Staging memory of the peer to device memory.
    FromStage {
        to: &'a Buffer,
        at: u64,
        len: u64,
        stage: PinnedMem,
        offset: u64,
        watch: &'a GpuMemory,
    },
    /// An atomic on a word, whose old value goes to the slot.
    Atomic { word: &'a Buffer, at: u64, kind: MemKind, slot: Slot, watch: &'a GpuMemory },
    /// Nothing that can be done.
    Nothing,
}

/// Where the bytes of a slot come from.
pub(in super::super) enum Fill<'a> {
    Packets(&'a [Job]),
    Peer(&'a Piece),
}

pub(super) fn task_run<'a>(jobs: &'a [Job], task: &Task, room: &Room) -> Run<'a> {
    let Some(job) = jobs.first() else { return Run::Nothing };
    let Some(segment) = job.op.segments.iter().next() else { return Run::Nothing };
    let len = jobs.iter().map(|job| job.op.len() as u64).sum();
    let at = segment.offset;
    let source = job.sources.first();
    let gpu = match job.memories.first() {
        Some(Some(Memory::Gpu(gpu))) => Some(&**gpu),
        _ => None,
    };
    let far = source.and_then(|piece| match &*piece.memory {
        PeerRegion::Gpu(buffer) => Some((buffer, piece.offset)),
        PeerRegion::Host(_) | PeerRegion::Stage(_) => None,
    });
    let slot = match room {
        Room::Slot(slot) => Some(*slot),
        _ => None,
    };
    match (task, gpu, slot, source, far) {
        (Task::OutShared, Some(gpu), ..) => match room {
            Room::Stage(slot, stage) => {
                let (stage, offset) = (stage.clone(), slot.offset);
                Run::ToStage { from: gpu.buffer(), at, len, stage, offset }
            }
            _ => Run::Nothing,
        },
        (Task::PullStage, Some(watch), _, Some(piece), _) => match room {
            Room::Peer(stage) => {
                let (stage, offset) = (stage.clone(), piece.offset);
                Run::FromStage { to: watch.buffer(), at, len, stage, offset, watch }
            }
            _ => Run::Nothing,
        },
        (Task::Out, Some(gpu), Some(slot), ..) => {
            Run::ToSlot { from: gpu.buffer(), at, len, slot, watch: Some(gpu) }
        }
        (Task::In, Some(watch), Some(slot), ..) => {
            let fill = Fill::Packets(jobs);
            Run::FromSlot { to: watch.buffer(), at, len, slot, fill, watch }
        }
        (Task::PullHost, Some(watch), Some(slot), Some(piece), _) => {
            let fill = Fill::Peer(piece);
            Run::FromSlot { to: watch.buffer(), at, len, slot, fill, watch }
        }
        (Task::PullGpu, Some(watch), _, _, Some((from, from_at))) => {
            Run::Across { to: watch.buffer(), at, from, from_at, len, watch }
        }
        (Task::PullToHost, _, Some(slot), _, Some((from, at))) => {
            Run::ToSlot { from, at, len, slot, watch: None }
        }
        (Task::Atomic, Some(watch), Some(slot), ..) => {
            Run::Atomic { word: watch.buffer(), at, kind: job.op.kind, slot, watch }
        }
        _ => Run::Nothing,
    }
}
