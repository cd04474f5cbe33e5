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
    jobs: Sender<(MemOp, Vec<Option<Memory>>)>,
    thread: std::thread::JoinHandle<()>,
}

impl Memories {
    /// `wake` is written when the mover has finished something.
    pub(super) fn new(wake: OwnedFd) -> Self {
        let finished = Arc::new(Finished { answers: Mutex::default(), wake });
        Self { regions: HashMap::new(), mover: None, with_mover: HashMap::new(), finished }
    }

    pub(super) fn insert(&mut self, region: RegionId, memory: Memory) {
        self.regions.insert(region, memory);
    }

    pub(super) fn remove(&mut self, region: RegionId) {
        self.regions.remove(&region);
    }

    pub(super) fn get(&self, region: RegionId) -> Option<&Memory> {
        self.regions.get(&region)
    }

    /// Carries an operation out, or hands it to the mover and answers `None`.
    pub(super) fn run(&mut self, op: MemOp) -> Option<Answer> {
        let memory = |region| self.regions.get(&region);
        let on_host = op
            .segments
            .iter()
            .all(|segment| matches!(memory(segment.region), Some(Memory::Host(_)) | None));
        if on_host && !self.with_mover.contains_key(&op.qpn) {
            return Some(carry_out(op, |_, region| self.regions.get(&region)));
        }
        let memories = op.segments.iter().map(|segment| memory(segment.region).cloned()).collect();
        let qpn = op.qpn;
        match self.mover() {
            Some(mover) => match mover.jobs.send((op, memories)) {
                Ok(()) => {
                    *self.with_mover.entry(qpn).or_default() += 1;
                    None
                }
                Err(refused) => Some(failed(refused.0.0)),
            },
            None => Some(failed(op)),
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

fn move_bytes(inbox: &Receiver<(MemOp, Vec<Option<Memory>>)>, finished: &Finished) {
    // Bounded: the engine's budgets bound the operations under way.
    while let Ok((op, memories)) = inbox.recv() {
        let answer = carry_out(op, |index, _| memories.get(index).and_then(Option::as_ref));
        lock(&finished.answers).push(answer);
        let _ = rustix::io::write(&finished.wake, &1u64.to_ne_bytes());
    }
}

fn failed(op: MemOp) -> Answer {
    Answer { token: op.token, buffer: op.buffer, result: Err(MemFault), qpn: op.qpn }
}

/// Carries an operation out on memory that `find` names by the segment's index and region.
fn carry_out<'a>(mut op: MemOp, find: impl Fn(usize, RegionId) -> Option<&'a Memory>) -> Answer {
    let mut cursor = op.at;
    let mut result = Ok(0);
    for (index, segment) in op.segments.iter().enumerate() {
        let len = segment.len as usize;
        let done = find(index, segment.region).ok_or(MemFault).and_then(|memory| {
            let bytes = op.buffer.get_mut(cursor..cursor.saturating_add(len));
            match op.kind {
                MemKind::Read => memory.read(segment.offset, bytes.ok_or(MemFault)?).map(|()| 0),
                MemKind::Write => memory.write(segment.offset, bytes.ok_or(MemFault)?).map(|()| 0),
                MemKind::CompareSwap { compare, swap } => {
                    memory.update(segment.offset, &|old| if old == compare { swap } else { old })
                }
                MemKind::FetchAdd { add } => {
                    memory.update(segment.offset, &|old| old.wrapping_add(add))
                }
            }
        });
        result = result.and(done);
        cursor = cursor.saturating_add(len);
    }
    Answer { token: op.token, buffer: op.buffer, result, qpn: op.qpn }
}
