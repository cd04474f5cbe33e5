//! The thread of a rank: takes jobs, and interprets schedules.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_sys::mem::HostMem;

use super::{DATA, FACTOR, FLAGS, Job, Resolved, Scalar, Shared, Stop, Work};
use crate::collective::control::Failure;
use crate::core::collective::reduce::Reduction;
use crate::core::collective::schedule::{Flag, Space, Span, Step, rounds, scratch_elements, steps};
use crate::core::collective::{Algorithm, Announcement, Call, Collective, RedOp};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, Event, PinnedMem, Stream};
use crate::{lock, wait_timeout};

/// Elements that are reduced at a time.
const BLOCK: u64 = 4096;

pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    /// Of the thread alone; the caller's streams wait for its end.
    pub(super) stream: Stream,
    pub(super) input: PinnedMem,
    pub(super) output: PinnedMem,
    word: PinnedMem,
    /// Rounds of collectives so far, the same on every rank.
    epoch: u64,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, word: PinnedMem) -> Result<Self> {
        // A round's input or output has at most one part a rank; transfers have one slot a peer.
        let slots = shared.slot_bytes * u64::from(shared.ranks);
        let bytes = shared.scratch_bytes.max(slots);
        let (input, output) = (shared.gpu.pin(bytes)?, shared.gpu.pin(bytes)?);
        let stream = shared.gpu.stream()?;
        Ok(Self { shared, stream, input, output, word, epoch: 0 })
    }

    pub(super) fn run(mut self) {
        while let Some(job) = self.next() {
            let ticket = job.ticket;
            if let Err(Stop::Failed(failure)) = self.carry_out(job) {
                self.shared.control.fail(failure);
            }
            // Behind everything, and whatever happened: the caller's stream goes on.
            let _ = self.word.mem().store_u32(0, ticket);
        }
        lock(&self.shared.jobs).ended = true;
        self.shared.changed.notify_all();
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = lock(&self.shared.jobs);
        loop {
            if let Some(job) = jobs.queue.pop_front() {
                self.shared.changed.notify_all();
                return Some(job);
            }
            if jobs.closed {
                return None;
            }
            jobs = wait_timeout(&self.shared.changed, jobs, Duration::from_secs(60));
        }
    }

    fn carry_out(&mut self, job: Job) -> Result<(), Stop> {
        self.reach(&job.start)?;
        match &job.work {
            Work::Collective(call) => self.collective(call),
            Work::Transfers(all) => self.transfers(all),
        }
    }

    /// Waits until the caller's stream has come to the call. What it does before may take any time.
    fn reach(&self, start: &Event) -> Result<(), Stop> {
        let mut pause = Duration::from_micros(1);
        while !start.is_done()? {
            if self.shared.control.is_aborted() {
                return Err(Stop::Aborted);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_micros(500));
        }
        if self.shared.control.is_aborted() { Err(Stop::Aborted) } else { Ok(()) }
    }

    fn collective(&mut self, one: &Resolved) -> Result<(), Stop> {
        let shared = Arc::clone(&self.shared);
        let announcement = Announcement { sequence: one.sequence, call: one.call };
        self.show_factor(one)?;
        shared.meet(announcement)?;
        let factors = self.factors(&one.call);
        let algorithm = shared.algorithm(&one.call);
        let most = self.round_elements(&one.call, algorithm);
        for (start, count) in rounds(one.call.count, most) {
            self.epoch += 1;
            self.copy_in(one, start, count)?;
            let round = Round {
                shared: &shared,
                input: self.input.mem(),
                output: self.output.mem(),
                call: Call { count, ..one.call },
                announcement,
                epoch: self.epoch,
                factors: &factors,
            };
            round.run(algorithm)?;
            self.copy_out(one, start, count)?;
        }
        Ok(())
    }

    /// Elements of one part in a round: what scratch and staging have room for, shared by the channels.
    fn round_elements(&self, call: &Call, algorithm: Algorithm) -> u64 {
        let size = call.dtype.size_bytes().unwrap_or(1);
        let room = self.shared.scratch_bytes / size;
        let ranks = self.shared.ranks;
        let scratch = scratch_elements(algorithm, call.kind, 1 << 20, ranks).unwrap_or(1 << 20);
        let parts = u64::from(call.input_parts(ranks).max(call.output_parts(ranks)).max(1));
        // Rounding up in a slice takes one element a rank more.
        let by_scratch = (room.saturating_sub(u64::from(ranks)) << 20) / scratch.max(1 << 20);
        let most = by_scratch.min(room / parts).max(1);
        (most / u64::from(self.shared.settings.channels.max(1))).max(1)
    }

    /// Writes the own factor of a pre-multiplied sum where the others find it.
    fn show_factor(&self, one: &Resolved) -> Result<(), Stop> {
        let bytes = match &one.factor {
            None => return Ok(()),
            Some(Scalar::Host(bytes)) => *bytes,
            Some(Scalar::Device(buffer)) => {
                let mut bytes = [0; 8];
                self.stream.copy_to_host(&self.input, 0, buffer, 0, buffer.len())?;
                self.finish()?;
                let len = (buffer.len() as usize).min(8);
                self.input.mem().read(0, bytes.get_mut(..len).unwrap_or_default())?;
                bytes
            }
        };
        self.shared.store(self.shared.rank, FACTOR, u64::from_le_bytes(bytes));
        Ok(())
    }

    fn factors(&self, call: &Call) -> Vec<[u8; 8]> {
        if call.op != RedOp::PRE_MUL_SUM {
            return Vec::new();
        }
        (0..self.shared.ranks).map(|rank| self.shared.load(rank, FACTOR).to_le_bytes()).collect()
    }

    fn copy_in(&self, one: &Resolved, start: u64, count: u64) -> Result<(), Stop> {
        let Some((buffer, at)) = &one.input else { return Ok(()) };
        let size = one.call.dtype.size_bytes().unwrap_or(1);
        for part in 0..u64::from(one.call.input_parts(self.shared.ranks)) {
            let from = at + (part * one.call.count + start) * size;
            self.stream.copy_to_host(
                &self.input,
                part * count * size,
                buffer,
                from,
                count * size,
            )?;
        }
        self.finish()
    }

    fn copy_out(&self, one: &Resolved, start: u64, count: u64) -> Result<(), Stop> {
        let Some((buffer, at)) = &one.output else { return Ok(()) };
        let size = one.call.dtype.size_bytes().unwrap_or(1);
        for part in 0..u64::from(one.call.output_parts(self.shared.ranks)) {
            let to = at + (part * one.call.count + start) * size;
            self.stream.copy_to_device(
                buffer,
                to,
                &self.output,
                part * count * size,
                count * size,
            )?;
        }
        self.finish()
    }

    /// Waits for the copies of this thread, which wait for nobody.
    pub(super) fn finish(&self) -> Result<(), Stop> {
        let deadline = Instant::now() + self.shared.settings.deadline;
        Ok(self.stream.synchronize(deadline)?)
    }

    /// Copies between a buffer and the staging memory, without waiting.
    pub(super) fn stage_in(
        &self,
        at: u64,
        from: &(Buffer, u64),
        offset: u64,
        len: u64,
    ) -> Result<(), Stop> {
        Ok(self.stream.copy_to_host(&self.input, at, &from.0, from.1 + offset, len)?)
    }

    /// The other way.
    pub(super) fn stage_out(
        &self,
        to: &(Buffer, u64),
        offset: u64,
        at: u64,
        len: u64,
    ) -> Result<(), Stop> {
        Ok(self.stream.copy_to_device(&to.0, to.1 + offset, &self.output, at, len)?)
    }
}

/// One round of one rank.
struct Round<'a> {
    shared: &'a Shared,
    input: &'a HostMem,
    output: &'a HostMem,
    /// The call with the count of this round.
    call: Call,
    announcement: Announcement,
    epoch: u64,
    factors: &'a [[u8; 8]],
}

impl Round<'_> {
    fn run(&self, algorithm: Algorithm) -> Result<(), Stop> {
        let shared = self.shared;
        let Some(steps) = steps(self.call, algorithm, shared.rank, shared.ranks) else {
            let text = format!("{algorithm} does not do {} of {} ranks", self.call, shared.ranks);
            return Err(Stop::Failed(Failure::Other(Kind::Refused, text)));
        };
        if self.call.kind == Collective::Barrier {
            // The ranks met already.
            return Ok(());
        }
        steps.iter().try_for_each(|step| self.step(step))
    }

    fn step(&self, step: &Step) -> Result<(), Stop> {
        match step {
            Step::Copy { from, to } => self.copy(from, to),
            Step::Put { from, to } => match to.space {
                Space::Scratch(peer)
                    if self.shared.settings.faults.drops(self.shared.rank, peer) =>
                {
                    Ok(())
                }
                _ => self.copy(from, to),
            },
            Step::Reduce { from, to } => self.reduce(from, to),
            Step::Signal { to, flag } => {
                if !self.shared.settings.faults.drops(self.shared.rank, *to) {
                    self.shared.store(self.shared.rank, flag_at(*to, *flag), self.epoch);
                }
                Ok(())
            }
            Step::Wait { from, flag } => {
                let at = flag_at(self.shared.rank, *flag);
                let ready = || self.shared.load(*from, at) >= self.epoch;
                self.shared.wait_for(self.announcement, *from, ready)
            }
        }
    }

    fn copy(&self, from: &Span, to: &Span) -> Result<(), Stop> {
        let ((src, src_at), (dst, dst_at)) = (self.place(from)?, self.place(to)?);
        Ok(dst.copy_from(dst_at, src, src_at, to.count * self.size())?)
    }

    fn reduce(&self, from: &[Span], to: &Span) -> Result<(), Stop> {
        let size = self.size();
        let reduction = Reduction::new(self.call.dtype, self.call.op, from.len() as u32)
            .map_err(|illegal| Error::refused(illegal.to_string()))?;
        let (out, out_at) = self.place(to)?;
        let mut inputs: Vec<Vec<u8>> = vec![Vec::new(); from.len()];
        let mut result = Vec::new();
        for (start, count) in rounds(to.count, BLOCK) {
            let (start, bytes) = (start * size, (count * size) as usize);
            for (input, span) in inputs.iter_mut().zip(from) {
                let (memory, at) = self.place(span)?;
                input.clear();
                memory.append_to(at + start, bytes, input)?;
            }
            result.clear();
            result.resize(bytes, 0);
            let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            reduction.run(&slices, self.factors, &mut result);
            out.write(out_at + start, &result)?;
        }
        Ok(())
    }

    fn place(&self, span: &Span) -> Result<(&HostMem, u64), Stop> {
        let at = span.at * self.size();
        Ok(match span.space {
            Space::Input => (self.input, at),
            Space::Output => (self.output, at),
            Space::Scratch(rank) => {
                let segment = self.shared.segments.get(rank as usize);
                let segment = segment.ok_or_else(|| Error::refused(format!("no rank {rank}")))?;
                // The slots of transfers lie behind; a schedule must never reach them.
                if at + span.count * self.size() > self.shared.scratch_bytes {
                    return Err(Error::refused(format!("{span:?} is outside the scratch")).into());
                }
                (segment, DATA + at)
            }
        })
    }

    fn size(&self) -> u64 {
        self.call.dtype.size_bytes().unwrap_or(1)
    }
}

const fn flag_at(to: u32, flag: Flag) -> u64 {
    FLAGS + (to as u64 * (Flag::COUNT + 1) + flag as u64) * 8
}
