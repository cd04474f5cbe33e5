//! One call of a collective, as every rank describes it to the others.

use alloc::string::String;
use core::fmt;

use super::types::{DataType, Illegal, RedOp};

/// What a call does. Counts are elements of one rank's part, as in NCCL's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Collective {
    /// Every rank gets the reduction of all inputs. Input and output: `count`.
    AllReduce = 1,
    /// Every rank gets all inputs in rank order. Input `count`, output `ranks * count`.
    AllGather = 2,
    /// Rank `r` gets part `r` of the reduction. Input `ranks * count`, output `count`.
    ReduceScatter = 3,
    /// Every rank gets the root's input.
    Broadcast = 4,
    /// The root gets the reduction.
    Reduce = 5,
    /// The root gets all inputs in rank order.
    Gather = 6,
    /// Rank `r` gets part `r` of the root's input.
    Scatter = 7,
    /// Part `p` of rank `r`'s input becomes part `r` of rank `p`'s output. Both `ranks * count`.
    AllToAll = 8,
    /// All-to-all with a count and a displacement per pair; it runs as sends and receives.
    AllToAllV = 9,
    /// To one rank, which receives. `root` is the peer.
    Send = 10,
    /// From one rank, which sends. `root` is the peer.
    Recv = 11,
    /// Nobody goes on before everybody came. No data.
    Barrier = 12,
}

impl Collective {
    /// Every kind.
    pub const ALL: [Self; 12] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::AllToAllV,
        Self::Send,
        Self::Recv,
        Self::Barrier,
    ];

    /// Its name, for people and commands.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all-to-all",
            Self::AllToAllV => "all-to-all-v",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Barrier => "barrier",
        }
    }

    /// The kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        let plain =
            |text: &str| text.chars().filter(char::is_ascii_alphanumeric).collect::<String>();
        let wanted = plain(name);
        Self::ALL.into_iter().find(|kind| plain(kind.name()) == wanted)
    }

    /// The kind with this number on the wire.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Whether elements are combined.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Whether `root` means something: a root, or the peer of a send or receive.
    pub const fn has_root(self) -> bool {
        matches!(
            self,
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter | Self::Send | Self::Recv
        )
    }

    /// Whether only two ranks take part.
    pub const fn is_pairwise(self) -> bool {
        matches!(self, Self::Send | Self::Recv)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A call, as all ranks that take part must make it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// What it does.
    pub kind: Collective,
    /// Elements of one rank's part.
    pub count: u64,
    /// Type of the elements.
    pub dtype: DataType,
    /// The reduction; [`RedOp::SUM`] where nothing is reduced.
    pub op: RedOp,
    /// The root, or the peer of a send or receive; 0 where there is none.
    pub root: u32,
}

/// Why a call is refused before anything happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The type and the reduction.
    Illegal(Illegal),
    /// `root` is no rank of this communicator.
    Root {
        /// What was passed.
        root: u32,
        /// How many ranks there are.
        ranks: u32,
    },
    /// The bytes do not fit 63 bits.
    TooLarge {
        /// Elements of one part.
        count: u64,
        /// Parts.
        parts: u32,
        /// The element type.
        dtype: DataType,
    },
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Illegal(illegal) => fmt::Display::fmt(illegal, f),
            Self::Root { root, ranks } => {
                write!(f, "rank {root} is not one of the {ranks} ranks of this communicator")
            }
            Self::TooLarge { count, parts, dtype } => {
                write!(f, "{count} elements {dtype} times {parts} exceed the address space")
            }
        }
    }
}

impl core::error::Error for CallError {}

impl Call {
    /// A call without reduction and root.
    pub const fn new(kind: Collective, count: u64, dtype: DataType) -> Self {
        Self { kind, count, dtype, op: RedOp::SUM, root: 0 }
    }

    /// The same with a reduction.
    #[must_use]
    pub const fn op(self, op: RedOp) -> Self {
        Self { op, ..self }
    }

    /// The same with a root or peer.
    #[must_use]
    pub const fn root(self, root: u32) -> Self {
        Self { root, ..self }
    }

    /// Checks everything that does not depend on memory. `sm` as in [`RedOp::check`].
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, ranks: u32, sm: Option<u32>) -> Result<(), CallError> {
        if self.kind.reduces() {
            self.op.check(self.dtype, sm).map_err(CallError::Illegal)?;
        } else if self.dtype.size_bytes().is_none() {
            return Err(CallError::Illegal(Illegal::UnknownType(self.dtype)));
        }
        if self.kind.has_root() && self.root >= ranks {
            return Err(CallError::Root { root: self.root, ranks });
        }
        let parts = self.input_parts(ranks).max(self.output_parts(ranks));
        self.bytes(parts).map(|_| ())
    }

    /// Parts of `count` elements that a rank reads (for a root's input: the root).
    pub const fn input_parts(&self, ranks: u32) -> u32 {
        match self.kind {
            Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => ranks,
            Collective::Recv | Collective::Barrier | Collective::AllToAllV => 0,
            _ => 1,
        }
    }

    /// Parts of `count` elements that a rank writes (for a root's output: the root).
    pub const fn output_parts(&self, ranks: u32) -> u32 {
        match self.kind {
            Collective::AllGather | Collective::AllToAll | Collective::Gather => ranks,
            Collective::Send | Collective::Barrier | Collective::AllToAllV => 0,
            _ => 1,
        }
    }

    /// Bytes that `rank` reads.
    ///
    /// # Errors
    /// `TooLarge`; `Illegal` for an unknown type.
    pub fn input_bytes(&self, rank: u32, ranks: u32) -> Result<u64, CallError> {
        let idle =
            matches!(self.kind, Collective::Broadcast | Collective::Scatter) && rank != self.root;
        self.bytes(if idle { 0 } else { self.input_parts(ranks) })
    }

    /// Bytes that `rank` writes.
    ///
    /// # Errors
    /// As [`Self::input_bytes`].
    pub fn output_bytes(&self, rank: u32, ranks: u32) -> Result<u64, CallError> {
        let idle =
            matches!(self.kind, Collective::Reduce | Collective::Gather) && rank != self.root;
        self.bytes(if idle { 0 } else { self.output_parts(ranks) })
    }

    fn bytes(&self, parts: u32) -> Result<u64, CallError> {
        let size = self.dtype.size_bytes();
        let size = size.ok_or(CallError::Illegal(Illegal::UnknownType(self.dtype)))?;
        let bytes = self.count.checked_mul(size).and_then(|part| part.checked_mul(parts.into()));
        bytes.filter(|bytes| *bytes <= i64::MAX as u64).ok_or(CallError::TooLarge {
            count: self.count,
            parts,
            dtype: self.dtype,
        })
    }

    /// What ranks compare before any data moves: equal for equal calls at the same place in the order
    /// of calls. `sequence` counts the collectives of the communicator; for a send and its receive it
    /// counts those of the pair, and both hash as a send without a root. Factors of pre-multiplied
    /// sums are left out, since ranks may differ in them. FNV-1a over the fields, 64 bits; never 0,
    /// so that a word of memory nobody wrote cannot match.
    pub fn agreement(&self, sequence: u64) -> u64 {
        let kind = if self.kind == Collective::Recv { Collective::Send } else { self.kind };
        let root = if self.kind.is_pairwise() { 0 } else { self.root };
        let op = if kind.reduces() { self.op } else { RedOp::SUM };
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let numbers = (i64::from(self.dtype.number()) as u64, i64::from(op.number()) as u64);
        for word in [sequence, kind as u64, self.count, numbers.0, numbers.1, root.into()] {
            for byte in word.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
        hash.max(1)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, count, dtype, op, root } = self;
        write!(f, "{kind}(count {count}, {dtype}")?;
        if kind.reduces() {
            write!(f, ", {op}")?;
        }
        match kind {
            Collective::Send => write!(f, ", to rank {root})"),
            Collective::Recv => write!(f, ", from rank {root})"),
            _ if kind.has_root() => write!(f, ", root {root})"),
            _ => f.write_str(")"),
        }
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A call with its place in the order of calls: what a rank writes where the others can see it before
/// it takes part. Four 64-bit words, little endian: sequence; kind, type, operation and root packed
/// (bits 0-7, 8-23, 24-31, 32-63); count; agreement hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Place in the order of the communicator's calls, from 1.
    pub sequence: u64,
    /// The call.
    pub call: Call,
}

impl Announcement {
    /// Words of the form above.
    pub const WORDS: usize = 4;

    /// The words that others read.
    pub fn encode(&self) -> [u64; Self::WORDS] {
        let Call { kind, count, dtype, op, root } = self.call;
        let packed = u64::from(kind as u8)
            | (dtype.number() as u64 & 0xffff) << 8
            | (op.number() as u64 & 0xff) << 24
            | u64::from(root) << 32;
        [self.sequence, packed, count, self.call.agreement(self.sequence)]
    }

    /// What another rank wrote; `None` where it is no call (never written, or torn).
    pub fn decode(words: [u64; Self::WORDS]) -> Option<Self> {
        let [sequence, packed, count, hash] = words;
        let call = Call {
            kind: Collective::numbered((packed & 0xff) as u8)?,
            count,
            dtype: DataType::new((packed >> 8 & 0xffff) as i32),
            op: RedOp::new((packed >> 24 & 0xff) as i32),
            root: (packed >> 32) as u32,
        };
        (call.agreement(sequence) == hash).then_some(Self { sequence, call })
    }
}

impl fmt::Display for Announcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "call #{} {}", self.sequence, self.call)
    }
}

/// What kept a call from finishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The ranks made different calls.
    Mismatch,
    /// The other rank did not come by the deadline.
    Straggler,
    /// The other rank came and then stopped in the middle.
    Stalled,
    /// The other rank's process is gone.
    Lost,
    /// The other rank aborted.
    Aborted,
}

/// A named disagreement: which rank, what it did, what this one does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// What is wrong.
    pub trouble: Trouble,
    /// The rank that reports.
    pub rank: u32,
    /// What it does.
    pub mine: Announcement,
    /// The rank that differs or is missing.
    pub other: u32,
    /// What that one announced last; `None` where it never announced anything.
    pub theirs: Option<Announcement>,
    /// How long the reporting rank waited, in milliseconds.
    pub waited_ms: u64,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trouble, rank, mine, other, theirs, waited_ms } = self;
        write!(f, "rank {rank} is in {mine}; rank {other} ")?;
        match trouble {
            Trouble::Mismatch => f.write_str("makes another call: ")?,
            Trouble::Straggler => {
                write!(f, "did not come within {waited_ms} ms, and its last call was ")?;
            }
            Trouble::Stalled => {
                write!(f, "came and made no progress for {waited_ms} ms in ")?;
            }
            Trouble::Lost => f.write_str("is gone (its process ended); its last call was ")?,
            Trouble::Aborted => f.write_str("aborted the communicator; its last call was ")?,
        }
        match theirs {
            Some(theirs) => fmt::Display::fmt(theirs, f),
            None => f.write_str("none"),
        }
    }
}

impl core::error::Error for Disagreement {}

/// How the bytes of a call travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// One rank: a copy (or a reduction of one input) where it is.
    Local,
    /// Every rank pushes its data, with the flag in the same store, to every other; no barrier.
    LowLatency,
    /// Every rank gets all inputs and reduces all of them; what is only moved goes straight to its place.
    OneShot,
    /// Every rank reduces one part and gives it to all others.
    TwoShot,
    /// The copy engine pushes whole parts to their owners; reductions happen where the parts arrive.
    CopyEngine,
    /// A broadcast as scatter and all-gather.
    ScatterGather,
    /// Straight from one rank to another, chunk by chunk.
    Direct,
    /// Through pinned host memory that all ranks share; reductions by the CPU.
    Staged,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 8] = [
        Self::Local,
        Self::LowLatency,
        Self::OneShot,
        Self::TwoShot,
        Self::CopyEngine,
        Self::ScatterGather,
        Self::Direct,
        Self::Staged,
    ];

    /// Its stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::LowLatency => "low-latency",
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
            Self::CopyEngine => "copy-engine",
            Self::ScatterGather => "scatter-gather",
            Self::Direct => "direct",
            Self::Staged => "staged",
        }
    }

    /// What it does, as one clause.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Local => "nothing leaves the device",
            Self::LowLatency => "every rank pushes its data with the flag in the same store",
            Self::OneShot => {
                "every rank gets all that it needs at once, and reduces it itself where the call reduces"
            }
            Self::TwoShot => "every rank reduces one part and gives it to the others",
            Self::CopyEngine => "the copy engine pushes parts to the ranks that own them",
            Self::ScatterGather => "the root scatters, then all ranks gather",
            Self::Direct => "straight from one rank to the other, in chunks",
            Self::Staged => "through pinned host memory, where the CPU reduces if the call does",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    const CALL: Call = Call::new(Collective::AllReduce, 1 << 33, DataType::BF16);

    #[test]
    fn sizes_are_checked() {
        use Collective::*;
        // (kind, input of rank 0, output of rank 0, input of rank 2, output of rank 2) in parts, root 2
        let cases = [
            (AllReduce, 1, 1, 1, 1),
            (AllGather, 1, 3, 1, 3),
            (ReduceScatter, 3, 1, 3, 1),
            (Broadcast, 0, 1, 1, 1),
            (Reduce, 1, 0, 1, 1),
            (Gather, 1, 0, 1, 3),
            (Scatter, 0, 1, 3, 1),
            (AllToAll, 3, 3, 3, 3),
            (Send, 1, 0, 1, 0),
            (Recv, 0, 1, 0, 1),
            (Barrier, 0, 0, 0, 0),
        ];
        for (kind, in0, out0, in2, out2) in cases {
            // Byte counts around 2^31, where 32-bit arithmetic ends.
            for bytes in [0, (1_u64 << 31) - 1, 1 << 31, (1 << 31) + 4, 1 << 34] {
                let call = Call::new(kind, bytes, DataType::U8).root(2);
                call.check(3, None).unwrap();
                assert_eq!(call.input_bytes(0, 3), Ok(in0 * bytes), "{kind}");
                assert_eq!(call.output_bytes(0, 3), Ok(out0 * bytes), "{kind}");
                assert_eq!(call.input_bytes(2, 3), Ok(in2 * bytes), "{kind}");
                assert_eq!(call.output_bytes(2, 3), Ok(out2 * bytes), "{kind}");
            }
            if call_moves(kind) {
                let call = Call::new(kind, u64::MAX / 4, DataType::F64).root(1);
                assert!(matches!(call.check(3, None), Err(CallError::TooLarge { .. })), "{kind}");
            }
            let outside = Call::new(kind, 1, DataType::U8).root(3).check(3, None);
            assert_eq!(outside.is_err(), kind.has_root(), "{kind}");
        }
    }

    fn call_moves(kind: Collective) -> bool {
        !matches!(kind, Collective::Barrier | Collective::AllToAllV)
    }

    #[test]
    fn every_difference_changes_the_hash_and_pairs_agree() {
        let same = CALL.agreement(7);
        let others = [
            CALL.agreement(8),
            Call { count: CALL.count + 1, ..CALL }.agreement(7),
            Call { dtype: DataType::F16, ..CALL }.agreement(7),
            CALL.op(RedOp::MAX).agreement(7),
            Call { kind: Collective::Reduce, ..CALL }.agreement(7),
            CALL.root(1).agreement(7),
        ];
        for other in others {
            assert_ne!(same, other);
        }
        let send = Call::new(Collective::Send, 5, DataType::I8).root(1);
        let recv = Call::new(Collective::Recv, 5, DataType::I8).root(0);
        assert_eq!(send.agreement(3), recv.agreement(3));
    }

    #[test]
    fn announcements_survive_and_torn_ones_are_nothing() {
        for kind in Collective::ALL {
            let call = Call::new(kind, u64::MAX >> 3, DataType::BOOL).op(RedOp::AVG).root(u32::MAX);
            let sent = Announcement { sequence: 9, call };
            let words = sent.encode();
            assert_eq!(Announcement::decode(words), Some(sent));
            for at in 0..words.len() {
                let mut torn = words;
                torn[at] ^= 1 << 40;
                // An operation does not count where nothing is reduced; a bit of the root always does
                // for those that have one.
                let decoded = Announcement::decode(torn);
                assert!(decoded.is_none() || (at == 1 && kind.is_pairwise()), "{kind} {at}");
            }
            assert_eq!(Collective::named(kind.name()), Some(kind));
        }
        assert_eq!(Announcement::decode([0; 4]), None);
        assert_eq!(Collective::named("allreduce"), Some(Collective::AllReduce));
    }

    #[test]
    fn a_disagreement_names_both_calls() {
        let report = Disagreement {
            trouble: Trouble::Mismatch,
            rank: 0,
            mine: Announcement { sequence: 4, call: CALL },
            other: 3,
            theirs: Some(Announcement { sequence: 4, call: CALL.op(RedOp::MAX) }),
            waited_ms: 12,
        };
        let text = report.to_string();
        for part in ["rank 0", "rank 3", "call #4", "8589934592", "bf16", "sum", "max"] {
            assert!(text.contains(part), "{text}");
        }
        let late = Disagreement { trouble: Trouble::Straggler, theirs: None, ..report };
        assert!(late.to_string().contains("within 12 ms"), "{late}");
    }
}
