//! The memory behind regions, and who carries out operations on it.
//!
//! Host memory is copied where the NIC runs. Everything else is carried out by a thread of its own, in
//! order, while the NIC goes on; what depends on an operation waits for its answer.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};

use beeline_core::mr::{MemoryKind, RegionId};
use beeline_core::rc::{MemFault, MemKind, MemOp, MemToken};
use beeline_core::roce::Qpn;
use beeline_sys::mem::HostMem;

use super::peer::{Peer, Piece, refer};
use crate::lock;

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
            Self::Device(mem) => mem.addr(),
        }
    }

    /// What kind of memory it is.
    pub const fn kind(&self) -> MemoryKind {
        match self {
            Self::Host(_) => MemoryKind::Host,
            Self::Device(_) => MemoryKind::Device,
        }
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemFault> {
        match self {
            Self::Host(mem) => mem.read(offset, into).map_err(|_| MemFault),
            Self::Device(mem) => mem.read(offset, into),
        }
    }

    /// Appends `len` bytes from `offset` on to `into`.
    fn append_to(&self, offset: u64, len: usize, into: &mut Vec<u8>) -> Result<(), MemFault> {
        match self {
            Self::Host(mem) => mem.append_to(offset, len, into).map_err(|_| MemFault),
            Self::Device(mem) => {
                let start = into.len();
                into.resize(start + len, 0);
                mem.read(offset, into.get_mut(start..).ok_or(MemFault)?)
            }
        }
    }

    /// Fetches bytes of the peer's memory.
    fn pull(&self, offset: u64, piece: &Piece) -> Result<(), MemFault> {
        let Piece { memory, offset: from, len } = piece;
        match self {
            Self::Host(mem) => {
                memory.copy_to(*from, mem, offset, u64::from(*len)).map_err(|_| MemFault)
            }
            Self::Device(mem) => {
                let mut bytes = vec![0; *len as usize];
                memory.read(*from, &mut bytes).map_err(|_| MemFault)?;
                mem.write(offset, &bytes)
            }
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemFault> {
        match self {
            Self::Host(mem) => mem.write(offset, from).map_err(|_| MemFault),
            Self::Device(mem) => mem.write(offset, from),
        }
    }

    fn update(&self, offset: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, MemFault> {
        match self {
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
    /// On a local link: the peer, and what its regions are called that it can read.
    peer: Option<Arc<Mutex<Peer>>>,
    given: HashMap<RegionId, u64>,
}

/// Answers of the mover.
#[derive(Debug)]
struct Finished {
    answers: Mutex<Vec<Answer>>,
    wake: OwnedFd,
}

#[derive(Debug)]
pub(super) struct Answer {
    pub(super) token: MemToken,
    pub(super) buffer: Vec<u8>,
    pub(super) result: Result<u64, MemFault>,
    qpn: Qpn,
}

#[derive(Debug)]
struct Mover {
    jobs: Sender<Job>,
    thread: std::thread::JoinHandle<()>,
}

/// An operation with the memory of its segments, and for [`MemKind::Pull`] where the bytes lie.
#[derive(Debug)]
struct Job {
    op: MemOp,
    memories: Vec<Option<Memory>>,
    sources: Vec<Piece>,
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
        if let (Some(peer), Memory::Host(mem)) = (&self.peer, &memory)
            && let Some(number) = lock(peer).give(mem)
        {
            self.given.insert(region, number);
        }
        self.regions.insert(region, memory);
    }

    pub(super) fn remove(&mut self, region: RegionId) {
        if let (Some(peer), Some(number)) = (&self.peer, self.given.remove(&region)) {
            lock(peer).take_back(number);
        }
        self.regions.remove(&region);
    }

    pub(super) fn get(&self, region: RegionId) -> Option<&Memory> {
        self.regions.get(&region)
    }

    /// Carries an operation out, or hands it to the mover and answers `None`.
    pub(super) fn run(&mut self, mut op: MemOp) -> Option<Answer> {
        let in_order = !self.with_mover.contains_key(&op.qpn);
        if in_order && let Some(len) = self.reference(&mut op) {
            let MemOp { token, buffer, qpn, .. } = op;
            return Some(Answer { token, buffer, result: Ok(len), qpn });
        }
        let Ok(sources) = self.sources(&op) else { return Some(failed(op)) };
        let memory = |region| self.regions.get(&region);
        let on_host = op
            .segments
            .iter()
            .all(|segment| matches!(memory(segment.region), Some(Memory::Host(_)) | None));
        if on_host && in_order {
            return Some(carry_out(op, &sources, |_, region| self.regions.get(&region)));
        }
        let memories = op.segments.iter().map(|segment| memory(segment.region).cloned()).collect();
        let qpn = op.qpn;
        match self.mover() {
            Some(mover) => match mover.jobs.send(Job { op, memories, sources }) {
                Ok(()) => {
                    *self.with_mover.entry(qpn).or_default() += 1;
                    None
                }
                Err(refused) => Some(failed(refused.0.op)),
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
            let Some(number) = self.given.get(&segment.region) else {
                op.buffer.truncate(start);
                return None;
            };
            refer(&mut op.buffer, *number, segment.offset, segment.len);
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
            let (jobs, inbox) = std::sync::mpsc::channel();
            let finished = Arc::clone(&self.finished);
            let thread = std::thread::Builder::new()
                .name("beeline-nic-mem".into())
                .spawn(move || move_bytes(&inbox, &finished));
            self.mover = thread.ok().map(|thread| Mover { jobs, thread });
        }
        self.mover.as_ref()
    }
}

impl Drop for Memories {
    fn drop(&mut self) {
        if let Some(Mover { jobs, thread }) = self.mover.take() {
            // Ends the thread after what it still has to do: memory must outlive operations on it.
            drop(jobs);
            let _ = thread.join();
        }
    }
}

fn move_bytes(inbox: &Receiver<Job>, finished: &Finished) {
    // Bounded: the engine's budgets bound the operations under way.
    while let Ok(Job { op, memories, sources }) = inbox.recv() {
        let answer =
            carry_out(op, &sources, |index, _| memories.get(index).and_then(Option::as_ref));
        lock(&finished.answers).push(answer);
        let _ = rustix::io::write(&finished.wake, &1u64.to_ne_bytes());
    }
}

fn failed(op: MemOp) -> Answer {
    Answer { token: op.token, buffer: op.buffer, result: Err(MemFault), qpn: op.qpn }
}

/// Carries an operation out on memory that `find` names by the segment's index and region.
fn carry_out<'a>(
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
    Answer { token: op.token, buffer: op.buffer, result, qpn: op.qpn }
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
