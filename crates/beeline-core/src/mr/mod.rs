//! Memory regions: the one place where an access to memory is allowed or refused.
//!
//! Everything that reaches memory on behalf of a queue pair, from this side or from a peer, first asks
//! [`MrTable::grant`]. It checks the key's generation, the protection domain, the access flags, the
//! bounds and revocation, and translates the address into an offset inside the region. A [`Grant`]
//! pins the region until it is given back, so memory is never freed under an access that is still on
//! its way: that is why [`MrTable::deregister`] refuses while work requests or accesses are
//! outstanding.
//!
//! Sources: InfiniBand Architecture Specification volume 1 (IBA), 10.6 "Memory management", 9.4.1.1.1
//! "Memory protection", and C10-56 and C10-57 for access rights.

use alloc::vec::Vec;
use core::fmt;

use crate::addr::{ByteRange, Iova};

mod key;

pub use key::{Lkey, RegionId, Rkey, Secret};

/// Most regions one table holds at a time.
pub const REGIONS_MAX: usize = 1 << 16;

/// Longest region in bytes: a region's offsets stay representable as a signed 64-bit number.
pub const REGION_BYTES_MAX: u64 = 1 << 62;

/// Every registered region of one NIC.
#[derive(Debug)]
pub struct MrTable {
    slots: Vec<Slot>,
    free: Vec<u16>,
    limit: usize,
    live: usize,
    cipher: key::KeyCipher,
}

impl fmt::Debug for key::KeyCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyCipher(..)")
    }
}

impl MrTable {
    /// An empty table of at most `limit` regions (itself capped at [`REGIONS_MAX`]), whose keys are
    /// derived from `secret`.
    pub fn new(limit: usize, secret: Secret) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            limit: limit.min(REGIONS_MAX),
            live: 0,
            cipher: key::KeyCipher::new(secret),
        }
    }

    /// Registers a region and makes its keys.
    pub fn register(&mut self, wanted: Registration) -> Result<Registered, RegisterError> {
        wanted.check()?;
        let id = self.vacant().ok_or(RegisterError::TableFull { limit: self.limit })?;
        let key = self.cipher.seal(id);
        if let Some(slot) = self.slots.get_mut(id.slot()) {
            slot.region = Some(Region {
                pd: wanted.pd,
                iova: wanted.iova,
                len: wanted.len,
                access: wanted.access,
                kind: wanted.kind,
                revoked: false,
                posted: 0,
                in_flight: 0,
            });
        }
        self.live += 1;
        Ok(Registered { id, lkey: Lkey::new(key), rkey: Rkey::new(key) })
    }

    /// Removes a region. Refused while a posted work request names it or an access is under way: the
    /// memory must not be freed before (IBA 10.6.7.2.4 leaves it to the consumer; this table does not).
    pub fn deregister(&mut self, lkey: Lkey) -> Result<(), DeregisterError> {
        let id = self.cipher.open(lkey.as_u32());
        let Some(slot) = self.slots.get_mut(id.slot()).filter(|s| s.generation == id.generation)
        else {
            return Err(DeregisterError::Unknown { lkey });
        };
        match &slot.region {
            None => return Err(DeregisterError::Unknown { lkey }),
            Some(region) if region.posted > 0 || region.in_flight > 0 => {
                return Err(DeregisterError::Busy {
                    lkey,
                    posted: region.posted,
                    in_flight: region.in_flight,
                });
            }
            Some(_) => slot.region = None,
        }
        self.live -= 1;
        // A slot whose generations are used up is retired: a key is never given out twice.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(id.slot);
        }
        Ok(())
    }

    /// Takes every right from a region at once, because its memory goes away or moves.
    ///
    /// No new access is granted from here on. Returns how many granted accesses are still under way;
    /// the memory may go when [`in_flight`](Self::in_flight) has fallen to zero.
    pub fn revoke(&mut self, lkey: Lkey) -> Option<u32> {
        let id = self.cipher.open(lkey.as_u32());
        let region = self.region_mut(id)?;
        region.revoked = true;
        Some(region.in_flight)
    }

    /// Whether a region was revoked; a region that is not there any more was, too.
    pub(crate) fn is_revoked(&self, id: RegionId) -> bool {
        self.region(id).is_none_or(|region| region.revoked)
    }

    /// Granted accesses of a region that are still under way; `None` for an unknown region.
    pub fn in_flight(&self, lkey: Lkey) -> Option<u32> {
        self.region(self.cipher.open(lkey.as_u32())).map(|region| region.in_flight)
    }

    /// What kind of memory a region is, or `None` for a key that names no region.
    pub fn kind(&self, lkey: Lkey) -> Option<MemoryKind> {
        self.region(self.cipher.open(lkey.as_u32())).map(|region| region.kind)
    }

    /// How many regions are registered.
    pub const fn len(&self) -> usize {
        self.live
    }

    /// Whether no region is registered.
    pub const fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Allows or refuses an access, and pins the region for it.
    ///
    /// `len` zero is allowed inside or at the end of a region; callers skip the check altogether where
    /// the standard says that a zero-length access names no memory.
    pub fn grant(&mut self, ask: Ask) -> Result<Grant, AccessError> {
        let refuse = |why| AccessError { ask, why };
        let id = self.cipher.open(ask.key);
        let region = match self.slots.get_mut(id.slot()) {
            Some(slot) if slot.generation == id.generation => slot.region.as_mut(),
            _ => None,
        }
        .ok_or(refuse(Refusal::UnknownKey))?;
        if region.pd != ask.pd {
            return Err(refuse(Refusal::OtherPd));
        }
        if region.revoked {
            return Err(refuse(Refusal::Revoked));
        }
        let right = ask.need.right();
        if !region.access.contains(right) {
            return Err(refuse(Refusal::MissingRight { right }));
        }
        let offset = ask.iova.checked_offset_from(region.iova);
        let end = offset.and_then(|offset| offset.checked_add(u64::from(ask.len)));
        let (Some(offset), Some(true)) = (offset, end.map(|end| end <= region.len)) else {
            let len = region.len;
            return Err(refuse(Refusal::OutOfBounds { start: region.iova, len }));
        };
        region.in_flight =
            region.in_flight.checked_add(1).ok_or(refuse(Refusal::TooManyInFlight))?;
        Ok(Grant { segment: Segment { region: id, offset, len: ask.len } })
    }

    /// Checks without pinning: what [`grant`](Self::grant) would answer.
    pub fn check(&mut self, ask: Ask) -> Result<(), AccessError> {
        let grant = self.grant(ask)?;
        self.release(grant);
        Ok(())
    }

    /// Ends an access.
    pub fn release(&mut self, grant: Grant) {
        if let Some(region) = self.region_mut(grant.segment.region) {
            region.in_flight = region.in_flight.saturating_sub(1);
        }
    }

    /// Notes that a posted work request names the region. `false` when the key names none: the work
    /// request is then posted all the same and fails when it runs, as the standard has it.
    pub fn hold(&mut self, lkey: Lkey) -> bool {
        let id = self.cipher.open(lkey.as_u32());
        match self.region_mut(id) {
            Some(region) if region.posted < u32::MAX => {
                region.posted += 1;
                true
            }
            _ => false,
        }
    }

    /// Ends a [`hold`](Self::hold) that answered `true`.
    pub fn unhold(&mut self, lkey: Lkey) {
        let id = self.cipher.open(lkey.as_u32());
        if let Some(region) = self.region_mut(id) {
            region.posted = region.posted.saturating_sub(1);
        }
    }

    fn vacant(&mut self) -> Option<RegionId> {
        if self.live >= self.limit {
            return None;
        }
        if let Some(slot) = self.free.pop() {
            let generation = self.slots.get(usize::from(slot))?.generation;
            return Some(RegionId { slot, generation });
        }
        let slot = u16::try_from(self.slots.len()).ok()?;
        self.slots.push(Slot { generation: 1, region: None });
        Some(RegionId { slot, generation: 1 })
    }

    fn region(&self, id: RegionId) -> Option<&Region> {
        let slot = self.slots.get(id.slot())?;
        slot.region.as_ref().filter(|_| slot.generation == id.generation)
    }

    fn region_mut(&mut self, id: RegionId) -> Option<&mut Region> {
        let slot = self.slots.get_mut(id.slot())?;
        slot.region.as_mut().filter(|_| slot.generation == id.generation)
    }
}

/// A region to be registered.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// The protection domain it belongs to.
    pub pd: PdId,
    /// The address a work request or a peer names its first byte by.
    pub iova: Iova,
    /// Length in bytes, `1..=REGION_BYTES_MAX`.
    pub len: u64,
    /// Who may do what. Local reading is always allowed.
    pub access: Access,
    /// What kind of memory it is.
    pub kind: MemoryKind,
}

impl Registration {
    /// Whether the length is possible and the rights make sense together; every NIC asks this first.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), RegisterError> {
        let Self { iova, len, access, .. } = *self;
        if len == 0 || len > REGION_BYTES_MAX {
            return Err(RegisterError::Length { len });
        }
        if iova.checked_add(len).is_none() {
            return Err(RegisterError::Wraps { iova, len });
        }
        // IBA 10.6.3.1: remote write and remote atomic rights require the local write right.
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if access.intersects(writes) && !access.contains(Access::LOCAL_WRITE) {
            return Err(RegisterError::NeedsLocalWrite { access });
        }
        Ok(())
    }
}

/// What a registration answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// The region's name for whoever moves the bytes.
    pub id: RegionId,
    /// The key for scatter/gather lists of this side.
    pub lkey: Lkey,
    /// The key to hand to a peer.
    pub rkey: Rkey,
}

/// A protection domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PdId(pub u32);

/// What kind of memory a region is: whether the CPU can read it in place decides about inline data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Host memory that the CPU reads with ordinary loads.
    Host,
    /// Device memory: only its driver or a mapped window reaches it.
    Device,
}

/// A set of access rights.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// Only local reading, which every region allows.
    pub const LOCAL_READ: Self = Self(0);
    /// This side's own requests may write: receives, READ responses, atomic results.
    pub const LOCAL_WRITE: Self = Self(1);
    /// A peer may write.
    pub const REMOTE_WRITE: Self = Self(2);
    /// A peer may read.
    pub const REMOTE_READ: Self = Self(4);
    /// A peer may run atomic operations.
    pub const REMOTE_ATOMIC: Self = Self(8);
    /// Every right there is.
    pub const ALL: Self = Self(15);
    /// Not a right, but a promise: whoever waits for what is written here waits for a completion, or for
    /// memory without this flag, and never for a byte of this memory. Writes to it may then pass one
    /// another on PCIe, which is faster for bulk memory. A NIC in software has no use for it.
    pub const RELAXED_ORDERING: Self = Self(16);

    /// Whether every right of `other` is in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether any right of `other` is in this set.
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl core::ops::BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("local-read")?;
        let names = [
            (Self::LOCAL_WRITE, "local-write"),
            (Self::REMOTE_WRITE, "remote-write"),
            (Self::REMOTE_READ, "remote-read"),
            (Self::REMOTE_ATOMIC, "remote-atomic"),
            (Self::RELAXED_ORDERING, "relaxed-ordering"),
        ];
        names.iter().filter(|(flag, _)| self.contains(*flag)).try_for_each(|(_, name)| {
            f.write_str("+")?;
            f.write_str(name)
        })
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Access({self})")
    }
}

/// What an access wants to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// Gather the payload of a request of this side.
    LocalRead,
    /// Scatter a receive, a READ response or an atomic result of this side.
    LocalWrite,
    /// Serve a peer's READ.
    RemoteRead,
    /// Serve a peer's WRITE.
    RemoteWrite,
    /// Serve a peer's atomic.
    RemoteAtomic,
}

impl Need {
    /// The right it takes.
    pub const fn right(self) -> Access {
        match self {
            Self::LocalRead => Access::LOCAL_READ,
            Self::LocalWrite => Access::LOCAL_WRITE,
            Self::RemoteRead => Access::REMOTE_READ,
            Self::RemoteWrite => Access::REMOTE_WRITE,
            Self::RemoteAtomic => Access::REMOTE_ATOMIC,
        }
    }
}

/// A question to [`MrTable::grant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The protection domain of the queue pair that asks.
    pub pd: PdId,
    /// The key presented, local or remote.
    pub key: u32,
    /// The first byte.
    pub iova: Iova,
    /// Length in bytes.
    pub len: u32,
    /// What for.
    pub need: Need,
}

/// An allowed access; the region stays pinned until it is passed to [`MrTable::release`].
#[must_use = "a grant pins its region until it is released"]
#[derive(Debug, PartialEq, Eq)]
pub struct Grant {
    segment: Segment,
}

impl Grant {
    /// Where the bytes are.
    pub const fn segment(&self) -> Segment {
        self.segment
    }
}

/// Bytes of one region, translated: what an executor of memory operations works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// The region.
    pub region: RegionId,
    /// Byte offset of the first byte inside the region.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl Segment {
    /// The bytes as a range of the region.
    pub const fn range(self) -> ByteRange {
        ByteRange { start: self.offset, len: self.len as u64 }
    }
}

/// An access that was refused, with the question it was refused for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessError {
    /// The question.
    pub ask: Ask,
    /// Why not.
    pub why: Refusal,
}

/// Why an access was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The key names no region that is registered now; it may be stale.
    UnknownKey,
    /// The region belongs to another protection domain.
    OtherPd,
    /// The region's memory was taken away.
    Revoked,
    /// The region does not carry the right.
    MissingRight {
        /// The right it would take.
        right: Access,
    },
    /// The bytes do not lie inside the region.
    OutOfBounds {
        /// The region's first address.
        start: Iova,
        /// The region's length in bytes.
        len: u64,
    },
    /// More accesses are under way than can be counted.
    TooManyInFlight,
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ask { key, iova, len, need, .. } = self.ask;
        write!(f, "{need:?} of {len} bytes at {iova} with key {key:#010x}: ")?;
        match self.why {
            Refusal::UnknownKey => f.write_str("the key names no registered region"),
            Refusal::OtherPd => f.write_str("the region belongs to another protection domain"),
            Refusal::Revoked => f.write_str("the region was revoked"),
            Refusal::MissingRight { right } => write!(f, "the region lacks {right}"),
            Refusal::OutOfBounds { start, len } => {
                write!(f, "outside the region of {len} bytes at {start}")
            }
            Refusal::TooManyInFlight => f.write_str("too many accesses under way"),
        }
    }
}

impl core::error::Error for AccessError {}

/// A registration that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterError {
    /// The length is zero or above [`REGION_BYTES_MAX`].
    Length {
        /// The length asked for, in bytes.
        len: u64,
    },
    /// The region would leave the address space.
    Wraps {
        /// Its first address.
        iova: Iova,
        /// Its length in bytes.
        len: u64,
    },
    /// Remote write or remote atomic was asked for without local write.
    NeedsLocalWrite {
        /// The rights asked for.
        access: Access,
    },
    /// The table is full.
    TableFull {
        /// How many regions it holds.
        limit: usize,
    },
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { len } => {
                write!(f, "a region of {len} bytes: 1 to {REGION_BYTES_MAX} are possible")
            }
            Self::Wraps { iova, len } => {
                write!(f, "a region of {len} bytes at {iova} leaves the address space")
            }
            Self::NeedsLocalWrite { access } => {
                write!(f, "access {access}: remote-write and remote-atomic need local-write")
            }
            Self::TableFull { limit } => write!(f, "all {limit} memory regions are in use"),
        }
    }
}

impl core::error::Error for RegisterError {}

/// A deregistration that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeregisterError {
    /// The key names no registered region.
    Unknown {
        /// The key.
        lkey: Lkey,
    },
    /// The region is in use.
    Busy {
        /// The key.
        lkey: Lkey,
        /// Work requests posted and not completed that name it.
        posted: u32,
        /// Accesses under way.
        in_flight: u32,
    },
}

impl fmt::Display for DeregisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { lkey } => write!(f, "key {lkey} names no registered region"),
            Self::Busy { lkey, posted, in_flight } => write!(
                f,
                "region {lkey} is in use by {posted} posted work requests and {in_flight} accesses \
                 under way: wait for their completions, or reset the queue pair"
            ),
        }
    }
}

impl core::error::Error for DeregisterError {}

#[derive(Debug)]
struct Slot {
    generation: u16,
    region: Option<Region>,
}

#[derive(Debug)]
struct Region {
    pd: PdId,
    iova: Iova,
    len: u64,
    access: Access,
    kind: MemoryKind,
    revoked: bool,
    posted: u32,
    in_flight: u32,
}

#[cfg(test)]
mod tests;
