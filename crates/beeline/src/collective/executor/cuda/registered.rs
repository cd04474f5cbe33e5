//! Registered memory, which senders write straight: what this rank has registered, and what it has mapped of the others'.
//!
//! Every rank has a table in its own segment of the control memory: entries with a generation, an address, a length, and the
//! name and IPC handle of their allocation. Before anything of a group with a large call is queued, a rank looks whether the
//! tables of the others have changed, maps what is new, and has written where it is into its own window, where its kernels read
//! it: in device memory, since a device reads a line of host memory once at a time, for one block after the other. The receiver's kernel says in which entry a part shall go, and of which generation; a sender that has that one
//! mapped stores there, any other uses slots. So nobody has to know what another has mapped, and a registration that
//! is gone is never written: its generation is.
//!
//! Mapping and unmapping may wait for the device. So nothing is mapped behind a launch of the same group, nothing by a process
//! that has several ranks of the communicator, and unmapped is only where a program expects that: when it registers,
//! deregisters, or ends the communicator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::collective::{
    AT_LL, DIRECT_ENTRIES, GENERATION_BITS, IpcMapping, Part, PushMoveArgs, RANKS_MAX, TABLE_AT,
    entry_word, ipc_handle, offer,
};
use beeline_sys::cuda::{
    BufferId, Context, Error as CudaError, Event, HostRegistration, PointerInfo, Stream as Handle,
    Word, is_open,
};
use beeline_sys::mem::HostMem;

use super::{Cuda, Peer};
use crate::collective::control::BYTES;
use crate::error::{Error, Result};

/// Where the table of a segment begins: how often it has changed, and from [`ENTRIES`] on its entries.
const TABLE: u64 = 64 << 10;
const ENTRIES: u64 = TABLE + 128;
const ENTRY_BYTES: u64 = 128;
/// Words of an entry: its generation (0: there is none), what it covers, where that begins in its allocation, the
/// allocation's handle, the name that no other allocation of the process ever has, and its length.
const GENERATION: u64 = 0;
const ADDRESS: u64 = 8;
const LEN: u64 = 16;
const OFFSET: u64 = 24;
const HANDLE: u64 = 32;
const ALLOCATION: u64 = 96;
const WHOLE: u64 = 104;

/// Mappings of memory that its owner has deregistered, at most: with as many, nothing new is mapped until they may go.
const GONE_MAX: usize = 8;

/// How long who deregisters waits for the words of the table, and how often it looks.
const WRITTEN_MAX: Duration = Duration::from_secs(1);
const WRITTEN_PAUSE: Duration = Duration::from_micros(20);

/// Memory in which kernels say how many parts went straight.
const PRIVATE_BYTES: usize = 64;

// Tables are within their memory.
const _: () = assert!(WHOLE + 8 <= ENTRY_BYTES && entry_at(DIRECT_ENTRIES) <= BYTES as u64);
const _: () = assert!(mapped_at(RANKS_MAX as u32, 0) <= AT_LL);

/// What one rank knows of registrations.
#[derive(Debug)]
pub(super) struct Registered {
    own: Vec<Own>,
    /// By peer.
    peers: Vec<Known>,
    /// What is not used any more, until it may be unmapped.
    gone: Vec<Mapping>,
    /// Behind the last launch that may use what is mapped; an error: that is not known.
    last: Option<Result<Arc<Event>, CudaError>>,
    /// In which the table of the window is written, made when first used, and behind the last change.
    writer: Option<Handle>,
    written: Option<Result<Arc<Event>, CudaError>>,
    /// The table may name what is gone: nothing is unmapped any more before the end.
    spoilt: bool,
    memory: Arc<HostMem>,
    pinned: HostRegistration,
    told: bool,
}

/// A place of the own table.
#[derive(Debug, Default)]
struct Own {
    generation: u64,
    covers: Option<Covers>,
}

#[derive(Clone, Copy, Debug)]
struct Covers {
    ptr: u64,
    len: u64,
    /// Of which allocation: the address may be another's one day.
    allocation: BufferId,
}

/// What is known of a peer's table.
#[derive(Debug)]
struct Known {
    changes: u64,
    entries: Vec<Entry>,
    /// Of them that can be written.
    there: usize,
}

/// An entry of a peer's as it was when it was looked at.
#[derive(Debug, Default)]
struct Entry {
    generation: u64,
    there: bool,
    mapping: Option<Mapping>,
}

/// A mapped allocation of another process.
#[derive(Clone, Debug)]
pub(super) struct Mapping {
    rank: u32,
    handle: [u8; 64],
    allocation: u64,
    /// Where it is in its own process.
    start: u64,
    len: u64,
    ipc: Arc<IpcMapping>,
}

impl Mapping {
    /// Of whose memory.
    pub(super) const fn rank(&self) -> u32 {
        self.rank
    }
}

impl Registered {
    pub(super) fn new(context: &Arc<Context>, ranks: u32) -> Result<Self> {
        let entries = || std::iter::repeat_with(Entry::default).take(DIRECT_ENTRIES).collect();
        let known = || Known { changes: 0, entries: entries(), there: 0 };
        let memory = HostMem::anonymous(PRIVATE_BYTES);
        let memory = memory.map_err(|error| Error::io("make memory of a communicator", error))?;
        let memory = Arc::new(memory);
        let pinned = HostRegistration::pin(context, Arc::clone(&memory));
        Ok(Self {
            own: std::iter::repeat_with(Own::default).take(DIRECT_ENTRIES).collect(),
            peers: std::iter::repeat_with(known).take(ranks as usize).collect(),
            gone: Vec::new(),
            last: None,
            writer: None,
            written: None,
            spoilt: false,
            memory,
            pinned: pinned.map_err(|error| Error::refused("cannot pin memory").because(error))?,
            told: false,
        })
    }

    /// Unmaps what is not used any more, if no kernel can be inside. May wait for the device.
    pub(super) fn let_go(&mut self) {
        if !self.spoilt && is_over(self.last.as_ref()) && is_over(self.written.as_ref()) {
            self.gone.clear();
        }
    }

    /// [`Self::let_go`] once the table is as it was last changed, which nothing but the device's own pace keeps from being soon.
    fn let_go_soon(&mut self) {
        let until = Instant::now() + WRITTEN_MAX;
        while !is_over(self.written.as_ref()) && Instant::now() < until {
            std::thread::sleep(WRITTEN_PAUSE);
        }
        self.let_go();
    }

    /// Unmaps everything: no kernel runs any more.
    pub(super) fn end(&mut self) {
        self.gone.clear();
        self.peers.clear();
    }

    fn entry(&mut self, rank: u32, index: usize) -> Option<&mut Entry> {
        self.peers.get_mut(rank as usize)?.entries.get_mut(index)
    }

    /// All that is mapped of a rank.
    fn of(&self, rank: u32) -> impl Iterator<Item = &Mapping> {
        let known = self.peers.get(rank as usize).into_iter();
        let live = known.flat_map(|known| &known.entries).filter_map(|one| one.mapping.as_ref());
        live.chain(self.gone.iter().filter(move |one| one.rank == rank))
    }
}

impl Cuda {
    /// Offers the memory to senders from now on. What cannot be offered goes through slots, as ever.
    pub(in crate::collective) fn register(&mut self, ptr: DevicePtr, len: u64) {
        if !self.straight {
            return;
        }
        if let Err(error) = self.try_register(ptr, len) {
            tracing::debug!(%error, "{len} bytes at {ptr} are not written straight");
        }
    }

    fn try_register(&mut self, ptr: DevicePtr, len: u64) -> Result<(), CudaError> {
        const KIND: CudaError =
            CudaError::Refused("no device memory of one allocation of this device");
        let info = PointerInfo::of(&self.context, ptr)?;
        let offset = ptr.as_u64().checked_sub(info.start.as_u64()).ok_or(KIND)?;
        if !is_open(&self.context, &self.context, ptr, len) {
            return Err(KIND);
        }
        if !ptr.as_u64().is_multiple_of(16) || entry_word(1, len) == 0 {
            return Err(CudaError::Refused("an address that is no multiple of 16, or too long"));
        }
        let allocation = BufferId::of(&self.context, ptr)?;
        let allocation = allocation.ok_or(CudaError::Refused("an allocation without a number"))?;
        // Ranks of this process have the address.
        let others = self.peers.iter().any(|peer| matches!(peer, Peer::There(_)));
        let handle = if others { ipc_handle(&self.context, info.start).ok() } else { None };
        let handle = handle.unwrap_or([0; 64]);
        self.registered.let_go();
        // What was freed without being deregistered, and had these addresses.
        let whole = (info.start.as_u64(), info.len);
        for index in 0..DIRECT_ENTRIES {
            let covers = self.registered.own.get(index).and_then(|one| one.covers);
            let other =
                |one: &Covers| one.allocation != allocation && overlaps((one.ptr, one.len), whole);
            if covers.as_ref().is_some_and(other) {
                self.drop_entry(index);
            }
        }
        let Some(index) = self.free_entry() else {
            if !std::mem::replace(&mut self.registered.told, true) {
                tracing::warn!(
                    "more than {DIRECT_ENTRIES} registrations: the rest goes through windows"
                );
            }
            return Ok(());
        };
        let Some(place) = self.registered.own.get_mut(index) else { return Ok(()) };
        place.generation = place.generation.wrapping_add(1).max(1);
        place.covers = Some(Covers { ptr: ptr.as_u64(), len, allocation });
        let (generation, at) = (place.generation, entry_at(index));
        let write = |word: u64, value: u64| self.control.store(self.rank, at + word, value);
        write(ADDRESS, ptr.as_u64());
        write(LEN, len);
        write(OFFSET, offset);
        write(ALLOCATION, allocation.0);
        write(WHOLE, info.len);
        for (word, bytes) in (0_u64..).zip(handle.as_chunks::<8>().0) {
            write(HANDLE + 8 * word, u64::from_le_bytes(*bytes));
        }
        // Last: who sees it sees the rest.
        write(GENERATION, generation);
        self.changed();
        Ok(())
    }

    /// A place for a registration, if need be that of memory which was freed without being deregistered.
    fn free_entry(&mut self) -> Option<usize> {
        let free = |all: &[Own]| all.iter().position(|one| one.covers.is_none());
        if let Some(index) = free(&self.registered.own) {
            return Some(index);
        }
        for index in 0..DIRECT_ENTRIES {
            let covers = self.registered.own.get(index).and_then(|one| one.covers);
            if covers.is_some_and(|covers| !self.is_alive(&covers)) {
                self.drop_entry(index);
            }
        }
        free(&self.registered.own)
    }

    fn is_alive(&self, covers: &Covers) -> bool {
        let now = BufferId::of(&self.context, DevicePtr::new(covers.ptr));
        matches!(now, Ok(Some(id)) if id == covers.allocation)
    }

    /// Undoes a registration of just these bytes.
    pub(in crate::collective) fn forget(&mut self, ptr: DevicePtr, len: u64) {
        self.window_forget(ptr, len);
        let same = |one: &Own| {
            one.covers.is_some_and(|covers| (covers.ptr, covers.len) == (ptr.as_u64(), len))
        };
        if let Some(index) = self.registered.own.iter().position(same) {
            self.drop_entry(index);
        }
        self.registered.let_go();
        // The others' programs do the same about now.
        self.prepare();
        self.registered.let_go_soon();
    }

    fn drop_entry(&mut self, index: usize) {
        if let Some(one) = self.registered.own.get_mut(index) {
            one.covers = None;
            self.control.store(self.rank, entry_at(index) + GENERATION, 0);
            self.changed();
        }
    }

    fn changed(&self) {
        let changes = self.control.load(self.rank, TABLE);
        self.control.store(self.rank, TABLE, changes.wrapping_add(1));
    }

    /// How many parts have gone straight into the memory of their receivers; wraps at 32 bits.
    pub(in crate::collective) fn straight(&self) -> u64 {
        u64::from(self.registered.memory.load_u64(0).unwrap_or(0) as u32)
    }

    /// Completes the arguments of a kernel of chunks: what this rank offers, and what it has mapped of the others' memory.
    pub(super) fn straighten(&mut self, args: &mut PushMoveArgs) {
        if !self.straight {
            return;
        }
        args.straight = self.registered.pinned.device_ptr().as_u64();
        args.table = self.window.ptr().as_u64() + TABLE_AT;
        let registered = &self.registered;
        let owns = registered.own.iter().any(|one| one.covers.is_some());
        if !owns && registered.peers.iter().all(|known| known.there == 0) {
            return;
        }
        let parts = args.moves.parts;
        let takes_any =
            (0_u32..).zip(&parts).any(|(peer, part)| peer != self.rank && part.recv_bytes > 0);
        for ((peer, part), place) in (0_u32..).zip(&parts).zip(&mut args.offers) {
            let takes = (part.recv, part.recv_bytes);
            // What is sent in place must not be overwritten before it has been read.
            let sent =
                |one: &Part| one.send_bytes > 0 && overlaps((one.send, one.send_bytes), takes);
            if owns && peer != self.rank && part.recv_bytes > 0 && !parts.iter().any(sent) {
                *place = self.offer(part.recv, part.recv_bytes);
            }
            let known = self.registered.peers.get(peer as usize);
            // One way, windows are faster: what comes first need not wait until its receiver has come.
            if takes_any && known.is_some_and(|known| known.there > 0) && part.send_bytes > 0 {
                args.mapped |= 1 << peer;
            }
        }
    }

    /// Has a kernel that may use what is mapped wait until that is in its table. One in a graph does not: where it were
    /// replayed that soon, it would find nothing, and use slots.
    pub(super) fn await_table(&self, stream: &Handle) -> Result<(), CudaError> {
        let Some(Ok(event)) = &self.registered.written else { return Ok(()) };
        if event.is_done()? || stream.is_capturing()? {
            return Ok(());
        }
        stream.wait_event(event)
    }

    /// Notes that a kernel was queued which may use what is mapped.
    pub(super) fn straightened(&mut self, stream: &Handle) {
        // A replay is inside only while its receiver still is: registrations outlive graphs.
        if !stream.is_capturing().unwrap_or(false) {
            self.registered.last = Some(stream.record());
        }
    }

    fn offer(&mut self, at: u64, bytes: u64) -> u64 {
        for index in 0..DIRECT_ENTRIES {
            let Some(one) = self.registered.own.get(index) else { return 0 };
            let Some(covers) = one.covers else { continue };
            let generation = one.generation;
            let Some(offset) = at.checked_sub(covers.ptr) else { continue };
            let inside = offset.checked_add(bytes).is_some_and(|end| end <= covers.len);
            if !inside {
                continue;
            }
            if self.is_alive(&covers) {
                match offer(index, low(generation), offset) {
                    0 => continue,
                    word => return word,
                }
            }
            // Freed, and perhaps somebody else's now.
            self.drop_entry(index);
        }
        0
    }

    /// Maps what the others have registered since the last time, and puts aside what they have no more. May wait for the
    /// device: nothing of the present group is queued yet.
    pub(in crate::collective) fn prepare(&mut self) {
        if !self.straight {
            return;
        }
        let own = self.rank;
        let mut changed = false;
        for rank in (0..self.ranks).filter(|rank| *rank != own) {
            let Some(known) = self.registered.peers.get(rank as usize) else { continue };
            // Read before the entries: what changes while they are read is seen the next time.
            let changes = self.control.load(rank, TABLE);
            if changes == known.changes {
                continue;
            }
            changed = true;
            // All of them, also behind one that has to wait.
            let open = (0..DIRECT_ENTRIES).filter(|index| !self.look(rank, *index)).count();
            if let Some(known) = self.registered.peers.get_mut(rank as usize) {
                known.there = known.entries.iter().filter(|one| one.there).count();
                if open == 0 {
                    known.changes = changes;
                }
            }
        }
        if changed && let Some(writer) = &self.registered.writer {
            self.registered.written = Some(writer.record());
        }
    }

    /// Looks at one entry of a peer; false: to be looked at again.
    fn look(&mut self, rank: u32, index: usize) -> bool {
        let (at, slot) = (entry_at(index), mapped_at(rank, index));
        let control = Arc::clone(&self.control);
        let read = |word: u64| control.load(rank, at + word);
        let generation = read(GENERATION);
        let Some(one) = self.registered.entry(rank, index) else { return true };
        if one.generation == generation {
            return true;
        }
        let old = std::mem::replace(one, Entry { generation, ..Entry::default() });
        // A kernel that reads the table now finds no entry rather than half of one.
        let cleared = if old.there { self.write(slot + 8, 0) } else { Ok(()) };
        let known = |one: &Mapping| {
            self.registered.gone.iter().any(|gone| Arc::ptr_eq(&gone.ipc, &one.ipc))
        };
        // Once for all of its registrations.
        let gone = old.mapping.filter(|one| !known(one));
        self.registered.gone.extend(gone);
        if cleared.is_err() {
            self.registered.spoilt = true;
            return true;
        }
        if generation == 0 {
            return true;
        }
        let (address, len, offset) = (read(ADDRESS), read(LEN), read(OFFSET));
        let mut handle = [0; 64];
        for (word, bytes) in (0_u64..).zip(handle.as_chunks_mut::<8>().0) {
            *bytes = read(HANDLE + 8 * word).to_le_bytes();
        }
        let (allocation, whole) = (read(ALLOCATION), read(WHOLE));
        let found = match self.peers.get(rank as usize) {
            _ if read(GENERATION) != generation => Found::Later,
            Some(Peer::Here(window)) => {
                let ptr = DevicePtr::new(address);
                match is_open(window.context(), &self.context, ptr, len) {
                    true => Found::At(address, None),
                    false => Found::Never,
                }
            }
            Some(Peer::There(_)) => {
                let start = address.wrapping_sub(offset);
                self.map((rank, handle, allocation), (start, whole), offset, len)
            }
            _ => Found::Never,
        };
        let Some(one) = self.registered.entry(rank, index) else { return true };
        match found {
            Found::At(place, mapping) => {
                (one.there, one.mapping) = (true, mapping);
                let word = entry_word(low(generation), len);
                let written = self.write(slot, place).and_then(|()| self.write(slot + 8, word));
                if let Err(error) = written {
                    tracing::debug!(%error, "{len} bytes of rank {rank} are not written straight");
                }
                true
            }
            Found::Never => true,
            Found::Later => {
                one.generation = 0;
                false
            }
        }
    }

    /// Has a word of the own window written, behind those before. Nobody waits for it here: the device may be busy with what
    /// waits for the calls of this thread.
    fn write(&mut self, at: u64, value: u64) -> Result<(), CudaError> {
        let writer = match self.registered.writer.take() {
            Some(writer) => writer,
            None => Handle::new(&self.context)?,
        };
        let written = writer.write_u64(Word::Device(&self.window, at), value);
        self.registered.writer = Some(writer);
        written
    }

    /// Where `len` bytes of an allocation of another process are in this one.
    pub(super) fn map(
        &self,
        (rank, handle, allocation): (u32, [u8; 64], u64),
        (start, whole): (u64, u64),
        offset: u64,
        len: u64,
    ) -> Found {
        // Which may wait for a kernel that waits for a rank of the same process.
        if self.peers.iter().any(|peer| matches!(peer, Peer::Here(_))) || handle == [0; 64] {
            return Found::Never;
        }
        let same = |one: &&Mapping| one.handle == handle && one.allocation == allocation;
        let all = || self.registered.of(rank).chain(self.windows.of(rank));
        let known = all().find(same).cloned();
        if known.is_none() && all().any(|one| overlaps((one.start, one.len), (start, whole))) {
            // An allocation that is gone had these addresses; the driver may take the two for one.
            return Found::Later;
        }
        if known.is_none() && self.registered.gone.len() >= GONE_MAX {
            // What they keep from being given back is bounded.
            return Found::Later;
        }
        let refused = |error: CudaError| {
            tracing::debug!(%error, "{len} bytes of rank {rank} are not written straight");
            Found::Never
        };
        let mapping = match known.map_or_else(
            || IpcMapping::open(&self.context, handle).map(Arc::new),
            |one| Ok(one.ipc),
        ) {
            Ok(ipc) => Mapping { rank, handle, allocation, start, len: whole, ipc },
            Err(error) => return refused(error),
        };
        let at = mapping.ipc.ptr();
        let info = match PointerInfo::of(&self.context, DevicePtr::new(at)) {
            Ok(info) => info,
            Err(error) => return refused(error),
        };
        let fits =
            info.start.as_u64() == at && offset.checked_add(len).is_some_and(|end| end <= info.len);
        match at.checked_add(offset) {
            Some(place) if fits && place.is_multiple_of(16) => Found::At(place, Some(mapping)),
            _ => refused(CudaError::Refused("a registration beyond the end of what is mapped")),
        }
    }
}

/// What an entry of a peer's has come to.
pub(super) enum Found {
    At(u64, Option<Mapping>),
    /// Through slots.
    Never,
    /// Through slots, and to be looked at again.
    Later,
}

/// What offers and tables have of a generation.
const fn low(generation: u64) -> u32 {
    (generation & ((1 << GENERATION_BITS) - 1)) as u32
}

pub(super) const fn overlaps((a, a_len): (u64, u64), (b, b_len): (u64, u64)) -> bool {
    a < b.saturating_add(b_len) && b < a.saturating_add(a_len)
}

const fn entry_at(index: usize) -> u64 {
    ENTRIES + ENTRY_BYTES * index as u64
}

/// Whether what an event stands behind has ended; not where that is not known.
fn is_over(event: Option<&Result<Arc<Event>, CudaError>>) -> bool {
    match event {
        None => true,
        Some(Ok(event)) => event.is_done().unwrap_or(false),
        Some(Err(_)) => false,
    }
}

/// What the window has of a peer's entry: its address, and behind it [`entry_word`].
const fn mapped_at(rank: u32, index: usize) -> u64 {
    TABLE_AT + 16 * (rank as u64 * DIRECT_ENTRIES as u64 + index as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_where_they_share_a_byte() {
        for (a, b, shared) in [
            ((0, 10), (10, 10), false),
            ((0, 11), (10, 10), true),
            ((15, 1), (10, 10), true),
            ((u64::MAX - 1, 8), (0, 8), false),
        ] {
            assert_eq!((overlaps(a, b), overlaps(b, a)), (shared, shared), "{a:?} {b:?}");
        }
    }

    #[test]
    fn generations_are_told_apart_by_their_low_bits() {
        assert_eq!([1, 1 << 21, (1 << 21) + 1].map(low), [1, 0, 1]);
    }
}
