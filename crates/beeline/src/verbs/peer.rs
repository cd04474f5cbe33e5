//! Memory that two processes of one host let each other read.
//!
//! A region of [`HostMem::shareable`] memory is passed to the peer as a file descriptor over a Unix
//! socket (`SCM_RIGHTS`, unix(7)), which maps it read-only. A packet then names bytes of it, and whoever
//! receives the packet fetches them. So every byte is written by the process that owns it, after its own
//! check; what a peer gains is to *read* the regions that were registered on the local link, whatever
//! their rights.
//!
//! Memory of a GPU is passed the same way, where its driver can (`cuMemCreate` memory): the peer maps the
//! allocation for a GPU of its own and says so; only then is it named in packets. Until then, and where
//! the two GPUs cannot reach each other, its bytes go through the ring.
//!
//! **Trust.** Host memory is sealed before it is passed: a peer cannot write it. The handle of GPU memory
//! stands for the *whole* allocation, and carries no rights: this library maps it read-only where the
//! device can, but another program at the other end could map it for writing, and keep it. So GPU memory
//! is passed to processes that are trusted with all of its allocation.
//!
//! Memory of a GPU that is not passed on goes through [staging memory](super::stage), which both sides pin. What
//! the peer may still be fetching is kept account of in [`super::lent`].
//!
//! Of a peer's messages so many are read at a time, and numbers only grow: a peer that sends without end
//! holds nobody up and fills nothing.

mod guard;
mod wire;

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use beeline_core::rc::MemFault;
use beeline_sys::mem::{HostMem, PeerMem};

pub(super) use self::guard::PeerLock;
pub(super) use self::wire::{Message, cookies_in, receive, send};
use self::wire::{PIECE, cookies_of, refer};
use super::lent::{Fetches, Lent, What};
use super::stage::{STAGE_BYTES_MAX, Stage, StageMem, StageSlot};
use crate::config::StageConfig;
use crate::gpu::{Buffer, Gpu};
use crate::memory::GpuMemory;

/// Regions given to the peer, and taken from it, at most. What is registered beyond goes through the
/// ring.
const REGIONS_MAX: usize = 4096;
/// Handles of GPU memory that wait until there is a GPU to map them: each is a descriptor.
const PENDING_MAX: usize = 64;

/// Set in the number of a region that lies on a GPU.
const ON_GPU: u64 = 1 << 63;

/// Set in the number of staging memory.
const ON_STAGE: u64 = 1 << 62;

/// Messages read at a time: more than the peer's socket holds, so that what was sent before is read, and
/// a peer that goes on sending is not followed.
const MESSAGES_MAX: usize = 512;

/// Bytes of this side's end of the socket. The kernel doubles them, and counts at least 512 for a message.
const SOCKET_BYTES: usize = 96 << 10;

/// The other process, as far as memory is concerned.
#[derive(Debug)]
pub(super) struct Peer {
    socket: UnixStream,
    next: u64,
    given: usize,
    /// Regions on a GPU that are given now.
    lent_gpu: HashSet<u64>,
    /// The newest number of the peer's: numbers only grow.
    newest: u64,
    taken: HashMap<u64, Arc<PeerRegion>>,
    /// Regions on a GPU that were given before this side had a GPU to map them for.
    pending: Vec<(u64, u64, OwnedFd)>,
    /// GPUs of this side that have memory registered.
    gpus: Vec<Gpu>,
    /// Regions on a GPU that the peer has mapped.
    ready: HashSet<u64>,
    /// What is to be told to the peer: regions that are no longer registered here, regions on a GPU
    /// that were given to it, and regions of its that were mapped here.
    pub(super) gone: Vec<u64>,
    pub(super) offers: Vec<u64>,
    pub(super) mapped: Vec<u64>,
    /// What the peer may be fetching of this side's, and this side of the peer's.
    pub(super) lent: Lent<Arc<StageSlot>>,
    pub(super) fetches: Fetches,
    /// This side's staging memory and its number, once there is use for it, and whether the peer has mapped it.
    stage: Option<(u64, Arc<Stage>)>,
    stage_ready: bool,
    /// Staging memory could not be made, or the peer does not listen.
    stage_failed: bool,
    /// The peer is gone, or said something that is not understood.
    ended: bool,
}

/// Bytes of the peer's memory.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) memory: Arc<PeerRegion>,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) cookie: u64,
}

/// A region of the peer.
#[derive(Debug)]
pub(super) enum PeerRegion {
    Host(PeerMem),
    /// Mapped for one GPU of this process.
    Gpu(Buffer),
    /// Its staging memory.
    Stage(StageMem),
}

impl PeerRegion {
    /// Copies bytes into host memory.
    ///
    /// # Errors
    /// Where they lie outside of either, or on a GPU.
    pub(super) fn copy_to(
        &self,
        offset: u64,
        target: &HostMem,
        target_offset: u64,
        len: u64,
    ) -> Result<(), MemFault> {
        let copied = match self {
            Self::Host(memory) => memory.copy_to(offset, target, target_offset, len),
            Self::Stage(memory) => memory.copy_to(offset, target, target_offset, len),
            // Fetched by the mover.
            Self::Gpu(_) => return Err(MemFault),
        };
        copied.map_err(|_| MemFault)
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// As [`copy_to`](Self::copy_to).
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemFault> {
        let read = match self {
            Self::Host(memory) => memory.read(offset, into),
            Self::Stage(memory) => memory.read(offset, into),
            Self::Gpu(_) => return Err(MemFault),
        };
        read.map_err(|_| MemFault)
    }
}

impl Peer {
    /// `socket` is the end of a stream that the peer reads the other end of; non-blocking.
    pub(super) fn new(socket: UnixStream) -> Self {
        // Where it stays larger, messages may be read later, and an access that names them fails.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BYTES);
        Self {
            socket,
            next: 1,
            given: 0,
            lent_gpu: HashSet::new(),
            newest: 0,
            taken: HashMap::new(),
            pending: Vec::new(),
            gpus: Vec::new(),
            ready: HashSet::new(),
            gone: Vec::new(),
            offers: Vec::new(),
            mapped: Vec::new(),
            lent: Lent::new(),
            fetches: Fetches::default(),
            stage: None,
            stage_ready: false,
            stage_failed: false,
            ended: false,
        }
    }

    /// Lets the peer read `mem`, and answers the number it is named by. `None` for memory that cannot be
    /// shared, or where the peer does not listen: its bytes go through the ring.
    pub(super) fn give(&mut self, mem: &HostMem) -> Option<u64> {
        let file = mem.file()?;
        if self.given >= REGIONS_MAX {
            return None;
        }
        let number = self.next;
        send(&self.socket, [number, mem.len()], &[file]).ok()?;
        self.next += 1;
        self.given += 1;
        Some(number)
    }

    /// Offers the peer to map memory of a GPU. Answers the number it is named by, and where it starts in
    /// what was given; `None` where this memory cannot be passed on.
    ///
    /// Memory that somebody else may free is never passed on: its bytes are checked at every access.
    pub(super) fn give_gpu(&mut self, mem: &GpuMemory) -> Option<(u64, u64)> {
        self.map_for(&mem.gpu());
        if self.given >= REGIONS_MAX || mem.is_watched() || mem.is_dynamic() {
            return None;
        }
        let (fd, whole, base) = mem.buffer().export()?;
        let number = self.next | ON_GPU;
        send(&self.socket, [number, whole], &[fd.as_fd()]).ok()?;
        self.next += 1;
        self.given += 1;
        self.offers.push(number);
        self.lent_gpu.insert(number);
        Some((number, base))
    }

    /// Whether the peer is to be told something at once.
    pub(super) fn is_urgent(&self) -> bool {
        !(self.gone.is_empty() && self.offers.is_empty() && self.mapped.is_empty())
    }

    /// Makes staging memory and offers it to the peer, at the first call.
    pub(super) fn give_stage(&mut self) {
        if self.stage.is_some() || self.stage_failed {
            return;
        }
        let number = self.next | ON_STAGE;
        let made = Stage::new(StageConfig::from_env()).and_then(|(stage, file)| {
            send(&self.socket, [number, stage.mem.len()], &[file.as_fd()])?;
            Ok(stage)
        });
        match made {
            Ok(stage) => {
                self.next += 1;
                self.offers.push(number);
                self.stage = Some((number, stage));
            }
            Err(error) => {
                tracing::info!(%error, "no staging memory for a local link: bytes go through its ring");
                self.stage_failed = true;
            }
        }
    }

    /// Staging memory that the peer reads.
    pub(super) fn stage(&self) -> Option<&Arc<Stage>> {
        self.stage.as_ref().map(|(_, stage)| stage).filter(|_| self.stage_ready)
    }

    /// Names `len` bytes from `offset` on of a slot, which is kept until the peer has fetched them.
    ///
    /// # Errors
    /// Without staging memory.
    pub(super) fn refer_slot(
        &mut self,
        buffer: &mut Vec<u8>,
        slot: Arc<StageSlot>,
        offset: u64,
        len: u32,
    ) -> Result<(), MemFault> {
        let (number, _) = self.stage.as_ref().ok_or(MemFault)?;
        let number = *number;
        let cookie = self.lent.lend(What::Slot(slot));
        refer(buffer, number, offset, len, cookie);
        Ok(())
    }

    /// Names bytes of a region given to the peer, which is kept until the peer has fetched them.
    pub(super) fn refer_region(
        &mut self,
        buffer: &mut Vec<u8>,
        number: u64,
        offset: u64,
        len: u32,
    ) {
        let cookie = self.lent.lend(What::Region(number));
        refer(buffer, number, offset, len, cookie);
    }

    /// Names of a region's bytes that the peer may still follow. None once the peer's process is gone.
    pub(super) fn lent_of(&mut self, number: u64) -> u32 {
        if self.lent.of_region(number) > 0 {
            // Finds out whether the peer is still there.
            self.read_messages();
        }
        self.lent.of_region(number)
    }

    /// Memory of `gpu` is registered here: what the peer has given can be mapped for it.
    fn map_for(&mut self, gpu: &Gpu) {
        if gpu.as_sim().is_some() || self.gpus.iter().any(|known| known.same_device(gpu)) {
            return;
        }
        self.gpus.push(gpu.clone());
        for (number, whole, fd) in std::mem::take(&mut self.pending) {
            self.take_gpu(number, whole, fd);
        }
    }

    /// Maps memory that lies on a GPU of the peer.
    fn take_gpu(&mut self, number: u64, whole: u64, fd: OwnedFd) {
        // The peer does not listen to what it is told.
        if self.mapped.len() >= 2 * REGIONS_MAX {
            return;
        }
        let Some(gpu) = self.gpus.first() else {
            if self.pending.len() < PENDING_MAX {
                self.pending.push((number, whole, fd));
            }
            return;
        };
        // Where it cannot be mapped the peer is told nothing, and goes on sending the bytes.
        match gpu.import(fd, whole) {
            Some(Ok(buffer)) => {
                self.taken.insert(number, Arc::new(PeerRegion::Gpu(buffer)));
                self.mapped.push(number);
            }
            Some(Err(error)) => tracing::info!(%error, "memory of a peer's GPU is not mapped"),
            None => {}
        }
    }

    #[cfg(test)]
    pub(super) fn knows(&mut self, number: u64) -> bool {
        self.read_messages();
        self.taken.contains_key(&number)
    }

    #[cfg(test)]
    pub(super) fn insert(&mut self, number: u64, buffer: Buffer) {
        self.taken.insert(number, Arc::new(PeerRegion::Gpu(buffer)));
    }

    /// As if a region on a GPU had been given, and the peer had mapped it.
    #[cfg(test)]
    pub(super) fn lend(&mut self, number: u64) {
        self.lent_gpu.insert(number);
        self.is_mapped(number);
    }

    /// The peer has mapped a region on a GPU. What is not given, or no longer, is nothing it can have.
    pub(super) fn is_mapped(&mut self, number: u64) {
        if self.stage.as_ref().is_some_and(|(known, _)| *known == number) {
            self.stage_ready = true;
        }
        if self.lent_gpu.contains(&number) {
            self.ready.insert(number);
        }
    }

    /// Whether a packet may name bytes of the region given as `number`.
    pub(super) fn can_read(&self, number: u64) -> bool {
        number & ON_GPU == 0 || self.ready.contains(&number)
    }

    /// A region is no longer registered.
    pub(super) fn take_back(&mut self, number: u64) {
        self.ready.remove(&number);
        self.lent_gpu.remove(&number);
        self.gone.push(number);
        self.given = self.given.saturating_sub(1);
    }

    /// The peer's region is no longer registered.
    pub(super) fn forget(&mut self, number: u64) {
        // It may have been given after the last message that was read.
        self.read_messages();
        self.taken.remove(&number);
        self.pending.retain(|(known, ..)| *known != number);
        self.mapped.retain(|known| *known != number);
    }

    /// The memory that a reference names. Its cookies are taken, and to be answered with
    /// [`Fetches::fetched`]; where it names what is not there, they are answered already.
    pub(super) fn resolve(&mut self, reference: &[u8]) -> Result<Vec<Piece>, MemFault> {
        let (pieces, _) = reference.as_chunks::<PIECE>();
        cookies_of(reference).for_each(|cookie| self.fetches.take(cookie));
        let resolved: Result<Vec<Piece>, MemFault> =
            pieces.iter().map(|piece| self.resolve_piece(piece)).collect();
        if resolved.is_err() {
            cookies_of(reference).for_each(|cookie| self.fetches.fetched(cookie));
        }
        resolved
    }

    fn resolve_piece(&mut self, piece: &[u8; PIECE]) -> Result<Piece, MemFault> {
        let (words, _) = piece.as_chunks::<8>();
        let [number, offset, len, cookie] = words else { return Err(MemFault) };
        let [number, offset, len, cookie] =
            [*number, *offset, *len, *cookie].map(u64::from_le_bytes);
        let len = u32::try_from(len).map_err(|_| MemFault)?;
        if !self.taken.contains_key(&number) {
            self.read_messages();
        }
        let memory = Arc::clone(self.taken.get(&number).ok_or(MemFault)?);
        Ok(Piece { memory, offset, len, cookie })
    }

    /// Takes the regions that the peer has given.
    pub(super) fn read_messages(&mut self) {
        for _ in 0..MESSAGES_MAX {
            // The peer counts what it told to be gone as gone before this side has heard of it.
            if self.ended || self.taken.len() >= 2 * REGIONS_MAX {
                return;
            }
            match receive(&self.socket) {
                Ok(message) => self.take(message),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    self.ended = true;
                    if error.kind() != io::ErrorKind::InvalidData {
                        // Its process is gone, or its NIC is: nobody fetches anything any more.
                        self.lent.clear();
                    }
                }
            }
        }
    }

    fn take(&mut self, message: Message) {
        let Message { words: [number, len], fds } = message;
        let (plain, fd) = (number & !(ON_GPU | ON_STAGE), fds.into_iter().next());
        let Some(fd) = fd.filter(|_| plain > self.newest) else {
            tracing::warn!(number, "a local peer gave a region twice, or none: no more is taken");
            self.ended = true;
            return;
        };
        self.newest = plain;
        if number & ON_STAGE != 0 {
            return self.take_stage(number, len, &fd);
        }
        if number & ON_GPU != 0 {
            return self.take_gpu(number, len, fd);
        }
        // What cannot be mapped is not known later: the access then fails.
        let memory = usize::try_from(len).ok().and_then(|len| PeerMem::new(&fd, len).ok());
        if let Some(memory) = memory {
            self.taken.insert(number, Arc::new(PeerRegion::Host(memory)));
        }
    }
}

impl Peer {
    /// Maps the peer's staging memory; a peer has one.
    fn take_stage(&mut self, number: u64, len: u64, fd: &OwnedFd) {
        let known = self.taken.values().any(|region| matches!(**region, PeerRegion::Stage(_)));
        if known || len > STAGE_BYTES_MAX {
            tracing::warn!(
                number,
                len,
                "a local peer gave staging memory twice, or too much of it"
            );
            self.ended = true;
            return;
        }
        // Where it cannot be mapped the peer is told nothing, and goes on sending the bytes.
        match StageMem::new(fd, len) {
            Ok(memory) => {
                self.taken.insert(number, Arc::new(PeerRegion::Stage(memory)));
                self.mapped.push(number);
            }
            Err(error) => tracing::info!(%error, "staging memory of a local peer is not mapped"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer, and the other end of its socket.
    fn peer() -> (Peer, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        for end in [&ours, &theirs] {
            end.set_nonblocking(true).unwrap();
        }
        (Peer::new(ours), theirs)
    }

    fn named(peer: &mut Peer, number: u64) -> bool {
        let mut reference = Vec::new();
        refer(&mut reference, number, 0, 8, 0);
        peer.resolve(&reference).is_ok()
    }

    #[test]
    fn numbers_only_grow_and_the_link_ends_where_they_do_not() {
        let mem = HostMem::shareable(4096).unwrap();
        let file = mem.file().unwrap();
        for (numbers, ended) in [
            (&[1, 2, 9][..], false),
            (&[1, 1][..], true),
            (&[2, 1][..], true),
            (&[1, ON_GPU | 1][..], true),
            (&[0][..], true),
        ] {
            let (mut peer, socket) = peer();
            for number in numbers {
                send(&socket, [*number, 4096], &[file]).unwrap();
            }
            peer.read_messages();
            assert_eq!(peer.ended, ended, "{numbers:?}");
            assert!(named(&mut peer, numbers[0]) || numbers[0] == 0);
            // A number that was forgotten does not come again either.
            peer.forget(numbers[0]);
            let _ = send(&socket, [numbers[0], 4096], &[file]);
            assert!(!named(&mut peer, numbers[0]));
            assert!(peer.ended);
        }
        let (mut peer, socket) = peer();
        send(&socket, [1, 4096], &[]).unwrap();
        peer.read_messages();
        assert!(peer.ended, "a region without memory");
    }

    #[test]
    fn a_peer_that_sends_without_end_is_not_followed() {
        let (mut peer, socket) = peer();
        let mem = HostMem::shareable(4096).unwrap();
        let file = mem.file().unwrap();
        // What the socket holds is read in one call, as long as it is this version's.
        rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BYTES).unwrap();
        let mut number = 0;
        while send(&socket, [number + 1, 4096], &[file]).is_ok() {
            number += 1;
        }
        assert!(number > 8 && number < MESSAGES_MAX as u64, "{number}");
        assert!(named(&mut peer, number));
        // More than a call reads, through a socket that holds more.
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut peer = Peer::new(ours);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                for number in 1..=2 * MESSAGES_MAX as u64 {
                    send(&theirs, [number, 4096], &[file]).unwrap();
                }
            });
            let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while peer.newest < 2 * MESSAGES_MAX as u64 {
                let before = peer.newest;
                peer.read_messages();
                assert!(peer.newest - before <= MESSAGES_MAX as u64);
                assert!(std::time::Instant::now() < end, "{}", peer.newest);
            }
            sender.join().unwrap();
        });
    }

    #[test]
    fn only_what_is_given_now_counts_as_mapped_by_the_peer() {
        let (mut peer, _socket) = peer();
        peer.is_mapped(ON_GPU | 5);
        assert!(!peer.can_read(ON_GPU | 5), "never given");
        peer.lend(ON_GPU | 6);
        assert!(peer.can_read(ON_GPU | 6));
        peer.take_back(ON_GPU | 6);
        peer.is_mapped(ON_GPU | 6);
        assert!(!peer.can_read(ON_GPU | 6), "no longer given");
        assert_eq!(peer.ready.len(), 0);
    }
}
