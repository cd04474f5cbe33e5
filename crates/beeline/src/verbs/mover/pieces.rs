//! Operations that this thread carries out itself, piece by piece, waiting for each.

use beeline_core::rc::{MemFault, MemKind};

use super::super::memory::{Answer, Memory, answered, carry_out};
use super::super::peer::{PeerRegion, Piece};
use super::task::by_engine;
use super::{Job, Worker};

impl Worker {
    /// Carries an operation out piece by piece, waiting for each.
    pub(super) fn do_now(&mut self, job: Job) -> Answer {
        let plain = |memory: &Option<Memory>, len| match memory {
            Some(Memory::Gpu(gpu)) => gpu.in_place(u64::from(len)),
            _ => true,
        };
        let simple = job.memories.iter().zip(job.op.segments.iter()).all(|(m, s)| plain(m, s.len))
            && job.sources.iter().all(|piece| !matches!(*piece.memory, PeerRegion::Gpu(_)));
        let fetched = job.cookies();
        let answer = if simple {
            let Job { op, memories, sources, .. } = job;
            carry_out(op, &sources, |i, _| memories.get(i).and_then(Option::as_ref))
        } else {
            self.in_pieces(job)
        };
        Answer { fetched, ..answer }
    }

    fn in_pieces(&mut self, mut job: Job) -> Answer {
        let mut incoming = std::mem::take(&mut job.op.buffer);
        let mut result = Ok(0);
        let mut taken = job.op.at;
        if job.op.kind == MemKind::Pull {
            incoming.truncate(job.op.at);
            result = self.fetch(&job.sources, &mut incoming).map(|()| 0);
        }
        let segments: Vec<_> = job.op.segments.iter().copied().collect();
        let mut gone = Vec::new();
        for (segment, memory) in segments.iter().zip(&job.memories) {
            let (at, len) = (segment.offset, segment.len as usize);
            let done = match (memory, job.op.kind) {
                (None, _) => Err(MemFault),
                (Some(memory), MemKind::Read) => {
                    self.read(memory, at, len, &mut incoming).map(|()| 0)
                }
                (Some(memory), MemKind::Write | MemKind::Pull) => {
                    let end = taken.saturating_add(len);
                    let bytes = incoming.get(taken..end).ok_or(MemFault);
                    taken = end;
                    bytes.and_then(|bytes| self.write(memory, at, bytes)).map(|()| 0)
                }
                (Some(memory), MemKind::CompareSwap { compare, swap }) => {
                    self.update(memory, at, &|old| if old == compare { swap } else { old })
                }
                (Some(memory), MemKind::FetchAdd { add }) => {
                    self.update(memory, at, &|old| old.wrapping_add(add))
                }
            };
            if let (Err(_), Some(Memory::Gpu(gpu))) = (&done, memory)
                && gpu.is_gone()
            {
                gone.push(segment.region);
            }
            result = result.and(done);
        }
        job.op.buffer = incoming;
        Answer { gone, ..answered(job.op, result) }
    }

    fn fetch(&mut self, sources: &[Piece], into: &mut Vec<u8>) -> Result<(), MemFault> {
        for piece in sources {
            let len = piece.len as usize;
            let start = into.len();
            match &*piece.memory {
                memory @ (PeerRegion::Host(_) | PeerRegion::Stage(_)) => {
                    into.resize(start + len, 0);
                    let part = into.get_mut(start..).ok_or(MemFault)?;
                    memory.read(piece.offset, part)?;
                }
                PeerRegion::Gpu(buffer) => {
                    let lane = self.lane(&buffer.gpu()).ok_or(MemFault)?;
                    let lane = self.lanes.get_mut(lane).ok_or(MemFault)?;
                    lane.read(buffer, piece.offset, len, into).map_err(|_| MemFault)?;
                }
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        memory: &Memory,
        at: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), MemFault> {
        let Some(gpu) = by_engine(memory, len as u64) else {
            return memory.append_to(at, len, into);
        };
        let lane = self.lane(&gpu.gpu()).ok_or(MemFault)?;
        let lane = self.lanes.get_mut(lane).ok_or(MemFault)?;
        let start = into.len();
        let read = gpu.check().and_then(|()| lane.read(gpu.buffer(), at, len, into));
        read.and_then(|()| gpu.check()).map_err(|_| {
            // What lies there now is nobody's business.
            into.truncate(start);
            MemFault
        })
    }

    fn write(&mut self, memory: &Memory, at: u64, from: &[u8]) -> Result<(), MemFault> {
        let Some(gpu) = by_engine(memory, from.len() as u64) else { return memory.write(at, from) };
        let lane = self.lane(&gpu.gpu()).ok_or(MemFault)?;
        let lane = self.lanes.get_mut(lane).ok_or(MemFault)?;
        let written = gpu.check().and_then(|()| lane.write(gpu.buffer(), at, from));
        written.and_then(|()| gpu.check()).map_err(|_| MemFault)
    }

    fn update(
        &mut self,
        memory: &Memory,
        at: u64,
        change: &dyn Fn(u64) -> u64,
    ) -> Result<u64, MemFault> {
        if by_engine(memory, 8).is_none() {
            return memory.update(at, change);
        }
        let mut bytes = Vec::with_capacity(8);
        self.read(memory, at, 8, &mut bytes)?;
        let old = <[u8; 8]>::try_from(bytes.as_slice()).map_err(|_| MemFault)?;
        let old = u64::from_ne_bytes(old);
        self.write(memory, at, &change(old).to_ne_bytes())?;
        Ok(old)
    }
}
