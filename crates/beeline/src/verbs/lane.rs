//! One GPU as the mover uses it: a stream in each direction, and pinned memory to pass through.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::addr::ByteRange;
use beeline_core::rc::MemKind;
use beeline_sys::mem::HostMem;

use super::mover::{Fill, Run};
use super::stage::StageSlot;
use crate::error::{Error, Result};
use crate::gpu::{Buffer, Event, Gpu, KernelArg, PinnedMem, Stream};
use crate::memory::GpuMemory;

/// Pinned memory by the slot: a few large ones, and small ones for short operations.
pub(super) const SLOT_BYTES: u64 = 4 << 20;
const SLOTS: u64 = 8;
const SMALL_BYTES: u64 = 16 << 10;
const SMALL_SLOTS: u64 = 128;
/// Behind the slots: for what the thread waits for.
const OWN_BYTES: u64 = 256 << 10;
const STAGING_BYTES: u64 = SLOTS * SLOT_BYTES + SMALL_SLOTS * SMALL_BYTES + OWN_BYTES;

/// How long the thread waits for a copy of its own.
const PATIENCE: Duration = Duration::from_secs(30);

/// From the device, or to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dir {
    Out = 0,
    In = 1,
}

impl Dir {
    pub(super) const fn other(self) -> Self {
        match self {
            Self::Out => Self::In,
            Self::In => Self::Out,
        }
    }
}

/// A piece of the pinned memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) offset: u64,
    large: bool,
}

#[derive(Debug)]
pub(super) struct Lane {
    gpu: Gpu,
    streams: [Stream; 2],
    /// The newest event of each stream.
    last: [Option<Event>; 2],
    staging: PinnedMem,
    large: Vec<u64>,
    small: Vec<u64>,
    /// A word of device memory for each small slot, where atomics leave the old value.
    words: Buffer,
    /// A copy did not end, or nothing tells when one does: its memory may still be used. Nothing is
    /// started any more.
    stuck: bool,
    /// Slots that a copy may still use, which are never given out again.
    kept: u32,
    kept_stage: Vec<Arc<StageSlot>>,
}

impl Lane {
    /// # Errors
    /// Where the device has no stream or memory left, or the host no memory to pin.
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self {
            gpu: gpu.clone(),
            streams: [gpu.stream()?, gpu.stream()?],
            last: [None, None],
            staging: gpu.pin(STAGING_BYTES)?,
            large: (0..SLOTS).map(|n| n * SLOT_BYTES).collect(),
            small: (0..SMALL_SLOTS).map(|n| SLOTS * SLOT_BYTES + n * SMALL_BYTES).collect(),
            words: gpu.alloc(SMALL_SLOTS * 8)?,
            stuck: false,
            kept: 0,
            kept_stage: Vec::new(),
        })
    }

    pub(super) const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(super) fn is_of(&self, gpu: &Gpu) -> bool {
        self.gpu.same_device(gpu)
    }

    /// The pinned memory.
    pub(super) const fn staging(&self) -> &Arc<HostMem> {
        self.staging.mem()
    }

    /// A slot for `bytes`, if one is free.
    pub(super) fn take_slot(&mut self, bytes: u64) -> Option<Slot> {
        if bytes <= SMALL_BYTES
            && let Some(offset) = self.small.pop()
        {
            return Some(Slot { offset, large: false });
        }
        // An atomic needs the word of a small slot.
        if bytes <= 8 {
            return None;
        }
        self.large.pop().map(|offset| Slot { offset, large: true })
    }

    pub(super) fn give_back(&mut self, slot: Slot) {
        match slot {
            Slot { offset, large: true } => self.large.push(offset),
            Slot { offset, large: false } => self.small.push(offset),
        }
    }

    /// Takes a slot back after [`start`](Self::start) failed. Where the device may use it, and no event
    /// says until when, it is kept for good.
    pub(super) fn give_up(
        &mut self,
        slot: Option<Slot>,
        stage: Option<Arc<StageSlot>>,
        failed: &NotStarted,
    ) {
        let error = match failed {
            NotStarted::Nothing(error) => {
                tracing::debug!(%error, "work of a GPU was not started");
                if let Some(slot) = slot {
                    self.give_back(slot);
                }
                return;
            }
            NotStarted::MaybeQueued(error) => error,
        };
        self.stuck = true;
        self.kept = self.kept.saturating_add(u32::from(slot.is_some() || stage.is_some()));
        self.kept_stage.extend(stage);
        let (gpu, kept) = (self.gpu.id(), self.kept);
        tracing::warn!(%gpu, kept, %error, "work of a GPU cannot be followed: its memory is out of reach");
    }

    /// Queues a copy or a kernel; behind everything of the other direction where `behind`.
    ///
    /// # Errors
    /// What the device says; where watched memory is gone; after work that could not be followed.
    pub(super) fn start(
        &mut self,
        run: Run<'_>,
        dir: Dir,
        behind: bool,
    ) -> Result<Event, NotStarted> {
        let mut queued = false;
        self.queue(run, dir, behind, &mut queued).map_err(|error| match queued {
            true => NotStarted::MaybeQueued(error),
            false => NotStarted::Nothing(error),
        })
    }

    /// As [`start`](Self::start); sets `queued` once the device may have something to do.
    fn queue(&mut self, run: Run<'_>, dir: Dir, behind: bool, queued: &mut bool) -> Result<Event> {
        self.check()?;
        let mut push = |outcome: Result<()>| {
            // A refusal comes before anything is queued; of another failure nobody knows.
            *queued |= !outcome.as_ref().is_err_and(Error::is_refused);
            outcome
        };
        let [out, into] = &self.streams;
        let stream = if dir == Dir::Out { out } else { into };
        if behind && let Some(Some(event)) = self.last.get(dir.other() as usize) {
            stream.wait_event(event)?;
        }
        match run {
            Run::ToSlot { from, at, len, slot, watch } => {
                watch.map_or(Ok(()), GpuMemory::check)?;
                push(stream.copy_to_host(&self.staging, slot.offset, from, at, len))?;
            }
            Run::FromSlot { to, at, len, slot, fill, watch } => {
                self.fill(slot, &fill, len)?;
                watch.check()?;
                push(stream.copy_to_device(to, at, &self.staging, slot.offset, len))?;
            }
            Run::Across { to, at, from, from_at, len, watch } => {
                watch.check()?;
                push(stream.copy_on_device(to, at, from, from_at, len))?;
            }
            Run::ToStage { from, at, len, stage, offset } => {
                push(stream.copy_to_host(&stage, offset, from, at, len))?;
            }
            Run::FromStage { to, at, len, stage, offset, watch } => {
                watch.check()?;
                push(stream.copy_to_device(to, at, &stage, offset, len))?;
            }
            Run::Atomic { word, at, kind, slot, watch } => {
                watch.check()?;
                let word = part(word, at, 8)?;
                let number = slot.offset.saturating_sub(SLOTS * SLOT_BYTES) / SMALL_BYTES;
                let old = part(&self.words, number.saturating_mul(8), 8)?;
                let (op, a, b) = match kind {
                    MemKind::CompareSwap { compare, swap } => (1, compare, swap),
                    MemKind::FetchAdd { add } => (0, add, 0),
                    _ => return Err(Error::refused("this is no atomic operation")),
                };
                let args = [
                    KernelArg::Buffer(word),
                    KernelArg::Buffer(old.clone()),
                    KernelArg::U32(op),
                    KernelArg::U64(a),
                    KernelArg::U64(b),
                ];
                push(stream.launch("atomic_u64", &args))?;
                push(stream.copy_to_host(&self.staging, slot.offset, &old, 0, 8))?;
            }
            Run::Nothing => return Err(Error::refused("no memory to work on")),
        }
        let event = stream.record()?;
        if let Some(last) = self.last.get_mut(dir as usize) {
            *last = Some(event.clone());
        }
        Ok(event)
    }

    /// Puts the bytes to be copied to the device into a slot.
    fn fill(&self, slot: Slot, fill: &Fill<'_>, len: u64) -> Result<()> {
        match fill {
            Fill::Packets(jobs) => {
                let mut to = slot.offset;
                for job in *jobs {
                    let end = job.op.at.saturating_add(job.op.len());
                    let bytes = job.op.buffer.get(job.op.at..end);
                    let bytes = bytes.ok_or_else(|| Error::refused("a packet is too short"))?;
                    self.staging().write(to, bytes)?;
                    to = to.saturating_add(bytes.len() as u64);
                }
                Ok(())
            }
            Fill::Peer(piece) => {
                let copied = piece.memory.copy_to(piece.offset, self.staging(), slot.offset, len);
                copied.map_err(|_| Error::refused("no such host memory of the peer"))
            }
        }
    }

    /// Appends bytes of device memory to `into`, and waits for them.
    ///
    /// # Errors
    /// What the device says; `is_timeout` after 30 s.
    pub(super) fn read(
        &mut self,
        from: &Buffer,
        at: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<()> {
        self.in_steps(len as u64, |lane, own, done, step| {
            let [stream, _] = &lane.streams;
            stream.copy_to_host(&lane.staging, own, from, at.saturating_add(done), step)?;
            stream.synchronize(Instant::now() + PATIENCE)?;
            Ok(lane.staging().append_to(own, step as usize, into)?)
        })
    }

    /// Copies bytes into device memory, and waits until they are there.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) fn write(&mut self, to: &Buffer, at: u64, from: &[u8]) -> Result<()> {
        self.in_steps(from.len() as u64, |lane, own, done, step| {
            let end = done.saturating_add(step) as usize;
            let bytes = from.get(done as usize..end).unwrap_or_default();
            lane.staging().write(own, bytes)?;
            let [_, stream] = &lane.streams;
            stream.copy_to_device(to, at.saturating_add(done), &lane.staging, own, step)?;
            stream.synchronize(Instant::now() + PATIENCE)
        })
    }

    fn check(&self) -> Result<()> {
        match self.stuck {
            true => Err(Error::refused("an earlier copy of the device did not end")),
            false => Ok(()),
        }
    }

    fn in_steps(
        &mut self,
        len: u64,
        mut work: impl FnMut(&Self, u64, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let own = STAGING_BYTES - OWN_BYTES;
        let mut done = 0;
        while done < len {
            self.check()?;
            let step = OWN_BYTES.min(len - done);
            work(self, own, done, step).inspect_err(|error| self.stuck = error.is_timeout())?;
            done += step;
        }
        Ok(())
    }
}

/// Why nothing will come of a [`Lane::start`].
#[derive(Debug)]
pub(super) enum NotStarted {
    /// The device has nothing to do.
    Nothing(Error),
    /// It may have.
    MaybeQueued(Error),
}

fn part(buffer: &Buffer, at: u64, len: u64) -> Result<Buffer> {
    buffer.slice(ByteRange { start: at, len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SimConfig;

    #[test]
    fn a_slot_comes_back_only_where_nothing_may_use_it() {
        let config = SimConfig { memory_bytes: 8 << 20, ..SimConfig::default() };
        let gpu = Gpu::simulated(&config).unwrap();
        let mut lane = Lane::new(&gpu).unwrap();
        let from = gpu.alloc(64).unwrap();
        let copy = |slot, len| Run::ToSlot { from: &from, at: 0, len, slot, watch: None };
        let free = |lane: &Lane| (lane.large.len() + lane.small.len()) as u64;
        // Outside: refused, and the slot is free again.
        let slot = lane.take_slot(64).unwrap();
        let failed = lane.start(copy(slot, 65), Dir::Out, false).unwrap_err();
        assert!(matches!(failed, NotStarted::Nothing(_)), "{failed:?}");
        lane.give_up(Some(slot), None, &failed);
        assert_eq!((free(&lane), lane.kept), (SLOTS + SMALL_SLOTS, 0));
        // What may be under way keeps its slot, and nothing is queued behind it.
        let slot = lane.take_slot(64).unwrap();
        lane.start(copy(slot, 64), Dir::Out, false).unwrap();
        lane.give_up(Some(slot), None, &NotStarted::MaybeQueued(Error::refused("no event")));
        assert_eq!((free(&lane), lane.kept), (SLOTS + SMALL_SLOTS - 1, 1));
        let slot = lane.take_slot(64).unwrap();
        let failed = lane.start(copy(slot, 64), Dir::Out, false).unwrap_err();
        assert!(matches!(failed, NotStarted::Nothing(_)), "{failed:?}");
        assert!(lane.read(&from, 0, 8, &mut Vec::new()).unwrap_err().is_refused());
    }
}
