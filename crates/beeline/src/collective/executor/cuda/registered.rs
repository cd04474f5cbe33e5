//! Registered memory, which senders write straight: what this rank has registered, and what it has mapped of the others'.
//!
//! Every rank has a table in its own segment of the control memory: entries with a generation, an address, a length and the
//! IPC handle of their allocation. Who is about to send much looks whether the table of the receiver has changed, maps
//! what is new, and writes where it is into a table of its own, which its kernels read. The receiver's kernel says in which
//! entry a part shall go, and of which generation; a sender that has that one mapped stores there, any other uses slots. So
//! nobody has to know what another has mapped, and a registration that is gone is never written: its generation is.

use std::sync::Arc;

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::collective::{
    DIRECT_ENTRIES, GENERATION_BITS, IpcMapping, PushMoveArgs, RANKS_MAX, entry_word, ipc_handle,
    offer,
};
use beeline_sys::cuda::{
    BufferId, Context, Error as CudaError, Event, PointerInfo, Stream as Handle, is_open,
};

use super::{Cuda, Peer, REPORT_OFFSET};
use crate::collective::control::BYTES;

/// Where the table of a segment begins: how often it has changed, and from [`ENTRIES`] on its entries.
const TABLE: u64 = 64 << 10;
const ENTRIES: u64 = TABLE + 128;
const ENTRY_BYTES: u64 = 128;
/// Words of an entry: its generation (0: there is none), what it covers, and where that begins in its allocation.
const GENERATION: u64 = 0;
const ADDRESS: u64 = 8;
const LEN: u64 = 16;
const OFFSET: u64 = 24;
const HANDLE: u64 = 32;
/// What this rank has mapped, for its kernels: 16 bytes an entry, by peer.
const MAPPED: u64 = 80 << 10;
/// Counts the parts that went straight; written by kernels.
const STRAIGHT: u64 = REPORT_OFFSET + 128;
/// Mappings that are no longer used and wait for what may still use them; with more, nothing new is mapped.
const GONE_MAX: usize = 1024;

/// What one rank knows of registrations.
#[derive(Debug, Default)]
pub(super) struct Registered {
    own: Vec<Own>,
    /// By peer.
    peers: Vec<Known>,
    gone: Vec<(Arc<IpcMapping>, Option<Arc<Event>>)>,
    /// Whether a graph may use what is mapped now, at any time.
    captured: bool,
    told: bool,
}

/// A place of the own table.
#[derive(Debug, Default)]
struct Own {
    generation: u32,
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
#[derive(Debug, Default)]
struct Known {
    changes: u64,
    entries: Vec<Mapped>,
}

/// An entry of a peer's as it was when it was looked at.
#[derive(Debug, Default)]
struct Mapped {
    generation: u32,
    there: bool,
    mapping: Option<([u8; 64], Arc<IpcMapping>)>,
}

impl Registered {
    pub(super) fn new(ranks: u32) -> Self {
        let entries = || std::iter::repeat_with(Mapped::default).take(DIRECT_ENTRIES).collect();
        let known = || Known { changes: 0, entries: entries() };
        Self {
            own: std::iter::repeat_with(Own::default).take(DIRECT_ENTRIES).collect(),
            peers: std::iter::repeat_with(known).take(ranks as usize).collect(),
            ..Self::default()
        }
    }
}

impl Cuda {
    /// Offers the memory to senders from now on. What cannot be offered goes through slots, as ever.
    pub(in crate::collective) fn register(&mut self, ptr: DevicePtr, len: u64) {
        if self.ranks < 2 {
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
        // Without one, the ranks of this process still have the address.
        let handle = ipc_handle(&self.context, info.start).unwrap_or([0; 64]);
        let Some(index) = self.free_entry() else {
            if !std::mem::replace(&mut self.registered.told, true) {
                tracing::warn!(
                    "more than {DIRECT_ENTRIES} registrations: the rest goes through windows"
                );
            }
            return Ok(());
        };
        let Some(place) = self.registered.own.get_mut(index) else { return Ok(()) };
        place.generation = next(place.generation);
        place.covers = Some(Covers { ptr: ptr.as_u64(), len, allocation });
        let (generation, at) = (place.generation, entry_at(index));
        let write = |word: u64, value: u64| self.control.store(self.rank, at + word, value);
        write(ADDRESS, ptr.as_u64());
        write(LEN, len);
        write(OFFSET, offset);
        for (word, bytes) in (0_u64..).zip(handle.as_chunks::<8>().0) {
            write(HANDLE + 8 * word, u64::from_le_bytes(*bytes));
        }
        // Last: who sees it sees the rest.
        write(GENERATION, generation.into());
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

    /// Undoes the first registration that begins at `ptr`.
    pub(in crate::collective) fn forget(&mut self, ptr: DevicePtr) {
        let begins = |one: &Own| one.covers.is_some_and(|covers| covers.ptr == ptr.as_u64());
        if let Some(index) = self.registered.own.iter().position(begins) {
            self.drop_entry(index);
        }
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

    /// How many parts have gone straight into the memory of their receivers.
    pub(in crate::collective) fn straight(&self) -> u64 {
        u64::from(self.control.load(self.rank, STRAIGHT) as u32)
    }

    /// Completes the arguments of a kernel of chunks: what this rank offers, and what it has mapped of the others' memory.
    pub(super) fn straighten(&mut self, args: &mut PushMoveArgs, stream: &Handle) {
        if self.ranks < 2 {
            return;
        }
        let host = self.pinned.device_ptr().as_u64();
        (args.table, args.straight) = (host + MAPPED, host + STRAIGHT);
        // One that cannot be asked is treated as one that is captured: nothing is let go.
        let capturing = stream.is_capturing().unwrap_or(true);
        self.refresh(stream, capturing);
        let parts = args.moves.parts;
        for ((peer, part), place) in (0_u32..).zip(&parts).zip(&mut args.offers) {
            if peer != self.rank && part.recv_bytes > 0 {
                *place = self.offer(part.recv, part.recv_bytes);
            }
            let known = self.registered.peers.get(peer as usize);
            let some = known.is_some_and(|known| known.entries.iter().any(|one| one.there));
            if some && part.send_bytes > 0 {
                args.mapped |= 1 << peer;
            }
        }
        self.registered.captured |= capturing && args.mapped != 0;
    }

    fn offer(&mut self, at: u64, bytes: u64) -> u64 {
        let covering = |one: &Own| {
            let covers = one.covers?;
            let offset = at.checked_sub(covers.ptr)?;
            let inside = offset.checked_add(bytes).is_some_and(|end| end <= covers.len);
            inside.then_some((covers, one.generation, offset))
        };
        let found = self.registered.own.iter().enumerate();
        let found = found.filter_map(|(index, one)| Some((index, covering(one)?))).next();
        let Some((index, (covers, generation, offset))) = found else { return 0 };
        if self.is_alive(&covers) {
            return offer(index, generation, offset);
        }
        // Freed, and perhaps somebody else's now.
        self.drop_entry(index);
        0
    }

    /// Maps what the others have registered since the last time, and lets go of what they have no more.
    fn refresh(&mut self, stream: &Handle, capturing: bool) {
        let before = self.registered.gone.len();
        for rank in 0..self.ranks {
            let Some(known) = self.registered.peers.get(rank as usize) else { continue };
            // Read before the entries: what changes while they are read is seen the next time.
            let changes = self.control.load(rank, TABLE);
            if rank == self.rank || changes == known.changes {
                continue;
            }
            let all = (0..DIRECT_ENTRIES).all(|index| self.look(rank, index));
            if let (true, Some(known)) = (all, self.registered.peers.get_mut(rank as usize)) {
                known.changes = changes;
            }
        }
        if capturing {
            return;
        }
        let gone = &mut self.registered.gone;
        if gone.len() > before {
            // Behind all calls of this communicator, whose order is one over all streams.
            let event = stream.record().ok();
            gone.iter_mut()
                .filter(|(_, end)| end.is_none())
                .for_each(|one| one.1.clone_from(&event));
        }
        if !self.registered.captured {
            let ended = |end: &Option<Arc<Event>>| {
                end.as_ref().is_some_and(|event| event.is_done().unwrap_or(false))
            };
            gone.retain(|(_, end)| !ended(end));
        }
    }

    /// Looks at one entry of a peer; false: it is being changed, or there is no room.
    fn look(&mut self, rank: u32, index: usize) -> bool {
        let (at, slot) = (entry_at(index), mapped_at(rank, index));
        let read = |word: u64| self.control.load(rank, at + word);
        let generation = read(GENERATION) as u32;
        let registered = &mut self.registered;
        let Some(one) = registered.peers.get_mut(rank as usize) else { return true };
        let Some(one) = one.entries.get_mut(index) else { return true };
        if one.generation == generation {
            return true;
        }
        // A kernel that reads the table now finds no entry rather than half of one.
        self.control.store(self.rank, slot + 8, 0);
        let old = std::mem::replace(one, Mapped { generation, ..Mapped::default() });
        registered.gone.extend(old.mapping.map(|(_, mapping)| (mapping, None)));
        if generation == 0 {
            return true;
        }
        let mut handle = [0; 64];
        for (word, bytes) in (0_u64..).zip(handle.as_chunks_mut::<8>().0) {
            *bytes = read(HANDLE + 8 * word).to_le_bytes();
        }
        let (address, len, offset) = (read(ADDRESS), read(LEN), read(OFFSET));
        if read(GENERATION) as u32 != generation || registered.gone.len() >= GONE_MAX {
            if let Some(known) = registered.peers.get_mut(rank as usize)
                && let Some(one) = known.entries.get_mut(index)
            {
                one.generation = 0;
            }
            return false;
        }
        let (place, mapping) = match self.peers.get(rank as usize) {
            Some(Peer::Here(window)) => {
                let ptr = DevicePtr::new(address);
                let open = is_open(window.context(), &self.context, ptr, len);
                (open.then_some(address), None)
            }
            Some(Peer::There(_)) => match self.map(rank, handle, offset, len) {
                Ok((place, mapping)) => (Some(place), Some((handle, mapping))),
                Err(error) => {
                    tracing::debug!(%error, "{len} bytes of rank {rank} are not written straight");
                    (None, None)
                }
            },
            _ => (None, None),
        };
        if let (Some(place), Some(known)) = (place, self.registered.peers.get_mut(rank as usize))
            && let Some(one) = known.entries.get_mut(index)
        {
            (one.there, one.mapping) = (true, mapping);
            self.control.store(self.rank, slot, place);
            self.control.store(self.rank, slot + 8, entry_word(generation, len));
        }
        true
    }

    /// Where `len` bytes of the allocation behind a handle are in this process.
    fn map(
        &self,
        rank: u32,
        handle: [u8; 64],
        offset: u64,
        len: u64,
    ) -> Result<(u64, Arc<IpcMapping>), CudaError> {
        let known = self.registered.peers.get(rank as usize).into_iter();
        let mut mapped =
            known.flat_map(|known| &known.entries).filter_map(|one| one.mapping.as_ref());
        let mapping = match mapped.find(|(known, _)| *known == handle) {
            Some((_, mapping)) => Arc::clone(mapping),
            None if handle == [0; 64] => {
                return Err(CudaError::Refused("memory that has no name for other processes"));
            }
            None => Arc::new(IpcMapping::open(&self.context, handle)?),
        };
        let end = offset.checked_add(len);
        let whole = mapped_len(&self.context, mapping.ptr());
        match (end, mapping.ptr().checked_add(offset)) {
            (Some(end), Some(place)) if end <= whole && place.is_multiple_of(16) => {
                Ok((place, mapping))
            }
            _ => Err(CudaError::Refused("a registration beyond the end of its allocation")),
        }
    }
}

/// How much is mapped at `ptr`, as far as the driver says.
fn mapped_len(context: &Arc<Context>, ptr: u64) -> u64 {
    let info = PointerInfo::of(context, DevicePtr::new(ptr));
    info.ok().filter(|info| info.start.as_u64() == ptr).map_or(u64::MAX, |info| info.len)
}

/// The generation after this one, of as many bits as an offer has for it; never 0.
const fn next(generation: u32) -> u32 {
    let next = (generation + 1) & ((1 << GENERATION_BITS) - 1);
    if next == 0 { 1 } else { next }
}

const fn entry_at(index: usize) -> u64 {
    ENTRIES + ENTRY_BYTES * index as u64
}

const fn mapped_at(rank: u32, index: usize) -> u64 {
    MAPPED + 16 * (rank as u64 * DIRECT_ENTRIES as u64 + index as u64)
}

// Tables are apart, and within the segment.
const _: () = assert!(STRAIGHT + 8 <= TABLE && HANDLE + 64 <= ENTRY_BYTES);
const _: () = assert!(entry_at(DIRECT_ENTRIES) <= MAPPED);
const _: () = assert!(mapped_at(RANKS_MAX as u32, 0) <= BYTES as u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_go_round_without_0() {
        let most = (1 << GENERATION_BITS) - 1;
        assert_eq!([0, 1, most - 1, most].map(next), [1, 2, most, 1]);
    }
}
