//! The memory behind regions, and who carries out operations on it.
//!
//! Host memory is copied where the NIC runs, and so are a few bytes through a window of a GPU. Everything
//! else is carried out by a thread of its own ([`super::mover`]), in the order of each queue pair, while
//! the NIC goes on; what depends on an operation waits for its answer.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use beeline_core::mr::{MemoryKind, RegionId};
use beeline_core::rc::{Engine, MemFault, MemKind, MemOp, MemToken, Transmit};
use beeline_core::roce::Qpn;
use beeline_sys::mem::HostMem;

use super::mover::{Job, Mover};
use super::peer::{PeerLock, PeerRegion, Piece, cookies_in};
use super::stage::StageSlot;
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
    fn is_at_once(&self, kind: MemKind, len: u32) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Gpu(mem) => {
                mem.in_place(u64::from(len))
                    && !mem.may_wait()
                    && (!is_atomic(kind) || mem.atomic_in_place())
            }
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
        let Piece { memory, offset: from, len, .. } = piece;
        match self {
            Self::Host(mem) => memory.copy_to(*from, mem, offset, u64::from(*len)),
            Self::Gpu(_) | Self::Device(_) => {
                let mut bytes = vec![0; *len as usize];
                memory.read(*from, &mut bytes)?;
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
    /// Operations with the mover: later ones in the same order follow them there.
    with_mover: HashMap<Order, u32>,
    finished: Arc<Finished>,
    /// On a local link: the peer, and what the regions are called that it can read, with where they
    /// start in what it was given.
    peer: Option<Arc<PeerLock>>,
    given: HashMap<RegionId, (u64, u64)>,
    /// Some names were most likely given up before they were sent.
    many_lent: bool,
}

/// Whose operations take effect in the order in which they were handed out: those of a queue pair for the
/// peer's requests, and those for this side's own.
pub(super) type Order = (Qpn, bool);

/// Answers of the mover.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) answers: Mutex<Vec<Answer>>,
    pub(super) wake: OwnedFd,
    /// The mover waits for a slot that may be kept by a packet that was given up.
    pub(super) starved: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Answer {
    pub(super) token: MemToken,
    pub(super) buffer: Vec<u8>,
    pub(super) result: Result<u64, MemFault>,
    pub(super) order: Order,
    /// Regions whose memory was found to be gone: nothing may reach them again.
    pub(super) gone: Vec<RegionId>,
    /// Where the bytes of a read stand, where they are not in the buffer: slot, offset, and length.
    pub(super) staged: Option<(Arc<StageSlot>, u64, u32)>,
    /// Cookies of what was fetched from the peer.
    pub(super) fetched: Vec<u64>,
}

/// Shorter payloads are copied into the packet: cheaper than a reference.
const REFERENCE_MIN: usize = 512;

impl Memories {
    /// `wake` is written when the mover has finished something. `peer` is there on a local link.
    pub(super) fn new(wake: OwnedFd, peer: Option<Arc<PeerLock>>) -> Self {
        let starved = AtomicBool::new(false);
        let finished = Arc::new(Finished { answers: Mutex::default(), wake, starved });
        Self {
            regions: HashMap::new(),
            mover: None,
            with_mover: HashMap::new(),
            finished,
            peer,
            given: HashMap::new(),
            many_lent: false,
        }
    }

    pub(super) fn insert(&mut self, region: RegionId, memory: Memory) {
        let given = match (&self.peer, &memory) {
            (Some(peer), Memory::Host(mem)) => peer.lock().give(mem).map(|number| (number, 0)),
            (Some(peer), Memory::Gpu(mem)) => peer.lock().give_gpu(mem),
            _ => None,
        };
        if let (Some(peer), Memory::Gpu(mem), None) = (&self.peer, &memory, given)
            && !mem.is_watched()
        {
            peer.lock().give_stage();
        }
        if let Some(given) = given {
            self.given.insert(region, given);
        }
        self.regions.insert(region, memory);
    }

    pub(super) fn remove(&mut self, region: RegionId) {
        if let (Some(peer), Some((number, _))) = (&self.peer, self.given.remove(&region)) {
            peer.lock().take_back(number);
        }
        self.regions.remove(&region);
    }

    /// Names of bytes of a region that the peer may still follow. The region's memory must stay what it is
    /// meanwhile.
    pub(super) fn lent(&self, region: RegionId) -> u32 {
        match (&self.peer, self.given.get(&region)) {
            (Some(peer), Some((number, _))) => peer.lock().lent_of(*number),
            _ => 0,
        }
    }

    /// Forgets names in packets that were given up before they were sent. What has been finished must have
    /// been handed to the engine.
    pub(super) fn sweep(&self, engine: &Engine, waiting: &VecDeque<Transmit>) {
        let Some(peer) = &self.peer else { return };
        let mut kept = HashSet::new();
        engine.each_unsent(|datagram| kept.extend(cookies_in(datagram)));
        for transmit in waiting {
            kept.extend(cookies_in(&transmit.datagram));
        }
        peer.lock().lent.sweep(&kept);
    }

    /// Whether a packet that names something was made, and not sent yet.
    pub(super) fn has_unsent(&self) -> bool {
        self.peer.as_ref().is_some_and(|peer| peer.lock().lent.has_unsent())
    }

    /// Whether so many names are kept account of that some of them were most likely given up.
    pub(super) fn wants_sweep(&mut self) -> bool {
        let wanted = std::mem::take(&mut self.many_lent);
        wanted | self.finished.starved.swap(false, Ordering::Relaxed)
    }

    /// All that has arrived is dealt with: what was not fetched of the peer's never will be.
    pub(super) fn settle_arrivals(&self) {
        if let Some(peer) = &self.peer {
            peer.lock().fetches.settle();
        }
    }

    fn fetched(&self, cookies: impl IntoIterator<Item = u64>) {
        let mut cookies = cookies.into_iter().peekable();
        if let (Some(peer), Some(_)) = (&self.peer, cookies.peek()) {
            let fetches = &mut peer.lock().fetches;
            cookies.for_each(|cookie| fetches.fetched(cookie));
        }
    }

    #[cfg(test)]
    pub(super) fn peer(&self) -> Option<Arc<PeerLock>> {
        self.peer.clone()
    }

    /// As if the peer had mapped a region on a GPU.
    #[cfg(test)]
    pub(super) fn lend(&mut self, region: RegionId, number: u64) {
        self.given.insert(region, (number, 0));
        if let Some(peer) = &self.peer {
            peer.lock().lend(number);
        }
    }

    /// As if a region of the peer's GPU had been mapped here.
    #[cfg(test)]
    pub(super) fn borrow(&mut self, number: u64, buffer: crate::gpu::Buffer) {
        if let Some(peer) = &self.peer {
            peer.lock().insert(number, buffer);
        }
    }

    pub(super) fn get(&self, region: RegionId) -> Option<&Memory> {
        self.regions.get(&region)
    }

    /// Carries an operation out, or hands it to the mover and answers `None`.
    pub(super) fn run(&mut self, mut op: MemOp) -> Option<Answer> {
        let order = (op.qpn, op.of_peer);
        let in_order = !self.with_mover.contains_key(&order);
        if in_order && let Some(len) = self.reference(&mut op) {
            return Some(answered(op, Ok(len)));
        }
        let Ok(sources) = self.sources(&op) else { return Some(failed(op)) };
        let memory = |region| self.regions.get(&region);
        let local = sources.iter().all(|piece| !matches!(*piece.memory, PeerRegion::Gpu(_)));
        let at_once = local
            && op.segments.iter().all(|segment| {
                memory(segment.region).is_none_or(|memory| memory.is_at_once(op.kind, segment.len))
            });
        if at_once && in_order {
            let answer = carry_out(op, &sources, |_, region| self.regions.get(&region));
            self.fetched(sources.iter().map(|piece| piece.cookie));
            return Some(answer);
        }
        let memories = op.segments.iter().map(|segment| memory(segment.region).cloned()).collect();
        let stage = match (&self.peer, op.kind) {
            (Some(peer), MemKind::Read) => {
                let peer = peer.lock();
                peer.stage().filter(|_| !peer.lent.is_full()).cloned()
            }
            _ => None,
        };
        let job = Job { op, memories, sources, stage };
        let refused = match self.mover() {
            Some(mover) => match mover.send(job) {
                Ok(()) => {
                    *self.with_mover.entry(order).or_default() += 1;
                    return None;
                }
                Err(refused) => *refused,
            },
            None => job,
        };
        self.fetched(refused.sources.iter().map(|piece| piece.cookie));
        Some(failed(refused.op))
    }

    /// Names the bytes of a read instead of copying them, where the peer can read all of them. Answers
    /// how many.
    fn reference(&mut self, op: &mut MemOp) -> Option<u64> {
        if op.kind != MemKind::Read || self.peer.is_none() || op.len() < REFERENCE_MIN {
            return None;
        }
        let mut peer = self.peer.as_ref().map(|peer| peer.lock())?;
        // A peer that releases nothing gets the bytes themselves.
        if peer.lent.is_full() {
            return None;
        }
        let given =
            |region| self.given.get(&region).filter(|(number, _)| peer.can_read(*number)).copied();
        if !op.segments.iter().all(|segment| given(segment.region).is_some()) {
            return None;
        }
        let buffer = &mut op.buffer;
        for segment in op.segments.iter() {
            let (number, base) = self.given.get(&segment.region).copied()?;
            let offset = segment.offset.saturating_add(base);
            peer.refer_region(buffer, number, offset, segment.len);
        }
        self.many_lent |= peer.lent.wants_sweep();
        Some(op.len() as u64)
    }

    /// Where the bytes lie that an operation fetches from the peer.
    fn sources(&self, op: &MemOp) -> Result<Vec<Piece>, MemFault> {
        match (&self.peer, op.kind) {
            (Some(peer), MemKind::Pull) => {
                let pieces = peer.lock().resolve(op.buffer.get(op.at..).ok_or(MemFault)?)?;
                // The packet says how long it is, and each piece again: nothing is made room for that it did not say.
                let named: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
                if named != op.len() as u64 {
                    self.fetched(pieces.iter().map(|piece| piece.cookie));
                    return Err(MemFault);
                }
                Ok(pieces)
            }
            (None, MemKind::Pull) => Err(MemFault),
            _ => Ok(Vec::new()),
        }
    }

    /// Whether the mover has nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        self.with_mover.is_empty()
    }

    /// What the mover has finished since the last call.
    pub(super) fn finished(&mut self) -> Vec<Answer> {
        if self.with_mover.is_empty() {
            return Vec::new();
        }
        let mut answers = std::mem::take(&mut *lock(&self.finished.answers));
        for answer in &mut answers {
            if let Some(count) = self.with_mover.get_mut(&answer.order) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.with_mover.remove(&answer.order);
                }
            }
            self.fetched(std::mem::take(&mut answer.fetched));
            if let (Some((slot, offset, len)), Some(peer)) = (answer.staged.take(), &self.peer) {
                let mut peer = peer.lock();
                let named = peer.refer_slot(&mut answer.buffer, slot, offset, len);
                self.many_lent |= peer.lent.wants_sweep();
                answer.result = named.map(|()| u64::from(len));
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

pub(super) const fn is_atomic(kind: MemKind) -> bool {
    matches!(kind, MemKind::CompareSwap { .. } | MemKind::FetchAdd { .. })
}

pub(super) fn failed(op: MemOp) -> Answer {
    answered(op, Err(MemFault))
}

pub(super) fn answered(op: MemOp, result: Result<u64, MemFault>) -> Answer {
    let MemOp { token, buffer, qpn, of_peer, .. } = op;
    let order = (qpn, of_peer);
    Answer { token, buffer, result, order, gone: Vec::new(), staged: None, fetched: Vec::new() }
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
    answered(op, result)
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
            memory.pull(offset, &Piece { memory: source, offset: from, len: step, cookie: 0 })?;
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
