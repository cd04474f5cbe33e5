//! The memory behind regions, and who carries out operations on it.
//!
//! Host memory is copied where the NIC runs, and so are a few bytes through a window of a GPU. Everything
//! else is carried out by a thread of its own ([`super::mover`]), in the order of each queue pair, while
//! the NIC goes on; what depends on an operation waits for its answer.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use beeline_core::mr::{MemoryKind, RegionId};
use beeline_core::rc::{MemFault, MemKind, MemOp, MemToken};
use beeline_core::roce::Qpn;
use beeline_sys::mem::HostMem;

use super::mover::{Job, Mover};
use super::peer::{Peer, PeerRegion, Piece, refer};
use crate::lock;
use crate::memory::GpuMemory;

/// Memory that the CPU does not reach by plain loads and stores.
///
/// Calls come from one thread, in the order in which their effects must show.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// The address that work requests and peers name its first byte by.
    fn addr(&self) -> u64;

    /// Length in bytes.
    fn len(&self) -> u64;

    /// Whether there is no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `into.len()` bytes out, from `offset` on.
    ///
    /// # Errors
    /// The memory could not be read.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemFault>;

    /// Copies `from` in, from `offset` on.
    ///
    /// # Errors
    /// The memory could not be written.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemFault>;

    /// Replaces the aligned 64-bit word at `offset` with what `change` makes of it, and answers the old
    /// word. Atomic towards every other call of this trait.
    ///
    /// # Errors
    /// The memory could not be reached.
    fn update(&self, offset: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, MemFault> {
        let mut word = [0; 8];
        self.read(offset, &mut word)?;
        let old = u64::from_ne_bytes(word);
        self.write(offset, &change(old).to_ne_bytes())?;
        Ok(old)
    }
}

/// Memory that can be registered.
#[derive(Clone, Debug)]
pub enum Memory {
    /// Host memory.
    Host(Arc<HostMem>),
    /// Memory of a GPU.
    Gpu(Arc<GpuMemory>),
    /// Any other.
    Device(Arc<dyn DeviceMemory>),
}

impl From<Arc<HostMem>> for Memory {
    fn from(mem: Arc<HostMem>) -> Self {
        Self::Host(mem)
    }
}

impl From<Arc<dyn DeviceMemory>> for Memory {
    fn from(mem: Arc<dyn DeviceMemory>) -> Self {
        Self::Device(mem)
    }
}

impl Memory {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Host(mem) => mem.len(),
            Self::Gpu(mem) => mem.buffer().len(),
            Self::Device(mem) => mem.len(),
        }
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of its first byte.
    pub fn addr(&self) -> u64 {
        match self {
            Self::Host(mem) => mem.addr().as_u64(),
            Self::Gpu(mem) => mem.buffer().ptr().as_u64(),
            Self::Device(mem) => mem.addr(),
        }
    }

    /// What kind of memory it is.
    pub const fn kind(&self) -> MemoryKind {
        match self {
            Self::Host(_) => MemoryKind::Host,
            Self::Gpu(_) | Self::Device(_) => MemoryKind::Device,
        }
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemFault> {
        match self {
            Self::Host(mem) => mem.read(offset, into).map_err(|_| MemFault),
            Self::Gpu(mem) => mem.read(offset, into).map_err(|_| MemFault),
            Self::Device(mem) => mem.read(offset, into),
        }
    }

    /// Whether `len` bytes are accessed at once by the thread that runs the NIC: nothing is waited for.
    fn is_at_once(&self, len: u32) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Gpu(mem) => mem.in_place(u64::from(len)) && !mem.may_wait(),
            Self::Device(_) => false,
        }
    }

    /// Appends `len` bytes from `offset` on to `into`.
    pub(super) fn append_to(
        &self,
        offset: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), MemFault> {
        match self {
            Self::Host(mem) => mem.append_to(offset, len, into).map_err(|_| MemFault),
            Self::Gpu(_) | Self::Device(_) => {
                let start = into.len();
                into.resize(start + len, 0);
                self.read(offset, into.get_mut(start..).ok_or(MemFault)?)
            }
        }
    }

    /// Fetches bytes of the peer's memory.
    pub(super) fn pull(&self, offset: u64, piece: &Piece) -> Result<(), MemFault> {
        let Piece { memory, offset: from, len } = piece;
        // What lies on a GPU of the peer is fetched by the mover.
        let PeerRegion::Host(memory) = &**memory else { return Err(MemFault) };
        match self {
            Self::Host(mem) => {
                memory.copy_to(*from, mem, offset, u64::from(*len)).map_err(|_| MemFault)
            }
            Self::Gpu(_) | Self::Device(_) => {
                let mut bytes = vec![0; *len as usize];
                memory.read(*from, &mut bytes).map_err(|_| MemFault)?;
                self.write(offset, &bytes)
            }
        }
    }

    pub(super) fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemFault> {
        match self {
            Self::Host(mem) => mem.write(offset, from).map_err(|_| MemFault),
            Self::Gpu(mem) => mem.write(offset, from).map_err(|_| MemFault),
            Self::Device(mem) => mem.write(offset, from),
        }
    }

    pub(super) fn update(&self, offset: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, MemFault> {
        match self {
            Self::Gpu(mem) => mem.update(offset, change).map_err(|_| MemFault),
            Self::Host(mem) => {
                let word = mem.atomic_u64(offset).map_err(|_| MemFault)?;
                let old =
                    word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(change(old)));
                Ok(old.unwrap_or_else(|old| old))
            }
            Self::Device(mem) => mem.update(offset, change),
        }
    }
}

/// The memory of every region, and the thread for what is not host memory.
#[derive(Debug)]
pub(super) struct Memories {
    regions: HashMap<RegionId, Memory>,
    mover: Option<Mover>,
    /// Operations with the mover, by queue pair: later ones of the same queue pair follow them there.
    with_mover: HashMap<Qpn, u32>,
    finished: Arc<Finished>,
    /// On a local link: the peer, and what the regions are called that it can read, with where they
    /// start in what it was given.
    peer: Option<Arc<Mutex<Peer>>>,
    given: HashMap<RegionId, (u64, u64)>,
}

/// Answers of the mover.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) answers: Mutex<Vec<Answer>>,
    pub(super) wake: OwnedFd,
}

#[derive(Debug)]
pub(super) struct Answer {
    pub(super) token: MemToken,
    pub(super) buffer: Vec<u8>,
    pub(super) result: Result<u64, MemFault>,
    pub(super) qpn: Qpn,
    /// Regions whose memory was found to be gone: nothing may reach them again.
    pub(super) gone: Vec<RegionId>,
}

/// Shorter payloads are copied into the packet: cheaper than a reference.
const REFERENCE_MIN: usize = 512;

impl Memories {
    /// `wake` is written when the mover has finished something. `peer` is there on a local link.
    pub(super) fn new(wake: OwnedFd, peer: Option<Arc<Mutex<Peer>>>) -> Self {
        let finished = Arc::new(Finished { answers: Mutex::default(), wake });
        Self {
            regions: HashMap::new(),
            mover: None,
            with_mover: HashMap::new(),
            finished,
            peer,
            given: HashMap::new(),
        }
    }

    pub(super) fn insert(&mut self, region: RegionId, memory: Memory) {
        let given = match (&self.peer, &memory) {
            (Some(peer), Memory::Host(mem)) => lock(peer).give(mem).map(|number| (number, 0)),
            (Some(peer), Memory::Gpu(mem)) => lock(peer).give_gpu(mem),
            _ => None,
        };
        if let Some(given) = given {
            self.given.insert(region, given);
        }
        self.regions.insert(region, memory);
    }

    pub(super) fn remove(&mut self, region: RegionId) {
        if let (Some(peer), Some((number, _))) = (&self.peer, self.given.remove(&region)) {
            lock(peer).take_back(number);
        }
        self.regions.remove(&region);
    }

    /// As if the peer had mapped a region on a GPU.
    #[cfg(test)]
    pub(super) fn lend(&mut self, region: RegionId, number: u64) {
        self.given.insert(region, (number, 0));
        if let Some(peer) = &self.peer {
            lock(peer).lend(number);
        }
    }

    /// As if a region of the peer's GPU had been mapped here.
    #[cfg(test)]
    pub(super) fn borrow(&mut self, number: u64, buffer: crate::gpu::Buffer) {
        if let Some(peer) = &self.peer {
            lock(peer).insert(number, buffer);
        }
    }

    pub(super) fn get(&self, region: RegionId) -> Option<&Memory> {
        self.regions.get(&region)
    }

    /// Carries an operation out, or hands it to the mover and answers `None`.
    pub(super) fn run(&mut self, mut op: MemOp) -> Option<Answer> {
        let in_order = !self.with_mover.contains_key(&op.qpn);
        if in_order && let Some(len) = self.reference(&mut op) {
            let MemOp { token, buffer, qpn, .. } = op;
            return Some(Answer { token, buffer, result: Ok(len), qpn, gone: Vec::new() });
        }
        let Ok(sources) = self.sources(&op) else { return Some(failed(op)) };
        let memory = |region| self.regions.get(&region);
        let local = sources.iter().all(|piece| matches!(*piece.memory, PeerRegion::Host(_)));
        let at_once = local
            && op.segments.iter().all(|segment| {
                memory(segment.region).is_none_or(|memory| memory.is_at_once(segment.len))
            });
        if at_once && in_order {
            return Some(carry_out(op, &sources, |_, region| self.regions.get(&region)));
        }
        let memories = op.segments.iter().map(|segment| memory(segment.region).cloned()).collect();
        let qpn = op.qpn;
        match self.mover() {
            Some(mover) => match mover.send(Job { op, memories, sources }) {
                Ok(()) => {
                    *self.with_mover.entry(qpn).or_default() += 1;
                    None
                }
                Err(refused) => Some(failed(refused.op)),
            },
            None => Some(failed(op)),
        }
    }

    /// Names the bytes of a read instead of copying them, where the peer can read all of them. Answers
    /// how many.
    fn reference(&self, op: &mut MemOp) -> Option<u64> {
        if self.peer.is_none() || op.kind != MemKind::Read || op.len() < REFERENCE_MIN {
            return None;
        }
        let start = op.buffer.len();
        for segment in op.segments.iter() {
            let given = self.given.get(&segment.region).filter(|(number, _)| {
                self.peer.as_ref().is_some_and(|peer| lock(peer).can_read(*number))
            });
            let Some((number, base)) = given else {
                op.buffer.truncate(start);
                return None;
            };
            refer(&mut op.buffer, *number, segment.offset.saturating_add(*base), segment.len);
        }
        Some(op.len() as u64)
    }

    /// Where the bytes lie that an operation fetches from the peer.
    fn sources(&self, op: &MemOp) -> Result<Vec<Piece>, MemFault> {
        match (&self.peer, op.kind) {
            (Some(peer), MemKind::Pull) => {
                lock(peer).resolve(op.buffer.get(op.at..).ok_or(MemFault)?)
            }
            (None, MemKind::Pull) => Err(MemFault),
            _ => Ok(Vec::new()),
        }
    }

    /// What the mover has finished since the last call.
    pub(super) fn finished(&mut self) -> Vec<Answer> {
        if self.with_mover.is_empty() {
            return Vec::new();
        }
        let answers = std::mem::take(&mut *lock(&self.finished.answers));
        for answer in &answers {
            if let Some(count) = self.with_mover.get_mut(&answer.qpn) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.with_mover.remove(&answer.qpn);
                }
            }
        }
        answers
    }

    /// The mover, started when it is first needed.
    fn mover(&mut self) -> Option<&Mover> {
        if self.mover.is_none() {
            self.mover = Mover::start(&self.finished);
        }
        self.mover.as_ref()
    }
}

pub(super) fn failed(op: MemOp) -> Answer {
    let MemOp { token, buffer, qpn, .. } = op;
    Answer { token, buffer, result: Err(MemFault), qpn, gone: Vec::new() }
}

/// Carries an operation out on memory that `find` names by the segment's index and region.
pub(super) fn carry_out<'a>(
    mut op: MemOp,
    sources: &[Piece],
    find: impl Fn(usize, RegionId) -> Option<&'a Memory>,
) -> Answer {
    let mut cursor = op.at;
    let mut sources = Sources { pieces: sources, done: 0 };
    let mut result = Ok(0);
    for (index, segment) in op.segments.iter().enumerate() {
        let len = segment.len as usize;
        let done = find(index, segment.region).ok_or(MemFault).and_then(|memory| match op.kind {
            MemKind::Read => memory.append_to(segment.offset, len, &mut op.buffer).map(|()| 0),
            MemKind::Write => {
                let bytes = op.buffer.get(cursor..cursor.saturating_add(len));
                memory.write(segment.offset, bytes.ok_or(MemFault)?).map(|()| 0)
            }
            MemKind::Pull => sources.pull(memory, segment.offset, segment.len),
            MemKind::CompareSwap { compare, swap } => {
                memory.update(segment.offset, &|old| if old == compare { swap } else { old })
            }
            MemKind::FetchAdd { add } => {
                memory.update(segment.offset, &|old| old.wrapping_add(add))
            }
        });
        result = result.and(done);
        cursor = cursor.saturating_add(len);
    }
    let MemOp { token, buffer, qpn, .. } = op;
    Answer { token, buffer, result, qpn, gone: Vec::new() }
}

/// Bytes of the peer's memory, taken from the front.
struct Sources<'a> {
    pieces: &'a [Piece],
    /// Bytes taken of the first piece.
    done: u32,
}

impl Sources<'_> {
    /// Fetches the next `len` bytes to `offset` of `memory`.
    fn pull(&mut self, memory: &Memory, mut offset: u64, mut len: u32) -> Result<u64, MemFault> {
        while len > 0 {
            let (piece, rest) = self.pieces.split_first().ok_or(MemFault)?;
            let left = piece.len.saturating_sub(self.done);
            let step = left.min(len);
            let from = piece.offset.checked_add(u64::from(self.done)).ok_or(MemFault)?;
            let source = Arc::clone(&piece.memory);
            memory.pull(offset, &Piece { memory: source, offset: from, len: step })?;
            offset = offset.saturating_add(u64::from(step));
            len -= step;
            self.done += step;
            if self.done == piece.len {
                (self.pieces, self.done) = (rest, 0);
            }
        }
        Ok(0)
    }
}
