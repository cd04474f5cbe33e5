//! Large moves by copy engines between processes, where memory was registered by all ranks together (windows, in the words of
//! NCCL) and nobody wants kernels for it (`Settings::copy_engines`).
//!
//! Each rank knows where the others have mapped windows, and a call uses the same place of a window on every rank. So a rank
//! can name the memory of the others without asking anybody, and *pulls* its parts by copies in the stream of the call: one
//! barrier before them, since the others must have come here, and one behind them, since the others must have read.
//! The barriers are the kernel of any barrier: a block of 96 threads, with the deadline, abort and comparison of calls that every
//! wait has. The copies are in the order of the stream, so a graph captures them, and no host thread is in between.
//!
//! Pulled and not pushed, so that a failure is harmless: copies behind a barrier that gave up cannot be called off, but they
//! read what this rank has mapped (and keeps), and write the output of its own call in its own stream.
//!
//! A part that only its sender has an address for (scatter, sends and receives) cannot be pulled: it goes by kernels.

use beeline_sys::cuda::collective::ipc_handle;
use beeline_sys::cuda::{BufferId, Error as CudaError, PointerInfo, Stream as Handle, is_open};

use super::launch::Held;
use super::registered::{Found, Mapping, overlaps};
use super::report::placed;
use super::{Cuda, Peer};
use crate::core::addr::DevicePtr;
use crate::core::collective::{Call, Collective};
use crate::error::Result;

/// Windows of a rank at most.
const WINDOWS_MAX: usize = 64;
/// Bytes of a part from which on copies carry it.
const PULLED_MIN: u64 = 1 << 20;
/// Into how many pieces at most what the root of a broadcast sends is cut, each twice as large as the one before: it
/// copies a piece to its own output, where the others find it, while they pull the one before.
const PIECES: usize = 5;
const PIECE_MIN: u64 = 4 << 20;

/// Memory that all ranks have registered together.
#[derive(Debug)]
struct Window {
    start: u64,
    len: u64,
    /// Which one it is on every rank.
    number: u64,
    /// Where it is for this rank's device, by rank.
    bases: Vec<u64>,
    mappings: Vec<Mapping>,
}

/// The windows of one rank.
#[derive(Debug, Default)]
pub(super) struct Windows {
    all: Vec<Window>,
    made: u64,
}

/// A window that is being made, and what this rank has mapped for it.
#[derive(Debug)]
pub(in crate::collective) struct Opened(Option<Window>);

impl Opened {
    /// Whether this rank has mapped it all.
    pub(in crate::collective) const fn is_whole(&self) -> bool {
        self.0.is_some()
    }
}

/// What a rank tells the others about a window, 8 bytes each: fit, offset in its allocation, length, number, start and length of the
/// allocation; then its IPC handle (64).
const OFFER_WORDS: usize = 6;
const OFFER_BYTES: usize = OFFER_WORDS * 8 + 64;

/// One copy: from, to, bytes.
type Copied = (u64, u64, u64);

/// Copies of one call, and what the ranks compare before them.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    place: u64,
    /// Of the own part, beside everything else.
    own: Option<Copied>,
    /// Behind a barrier each; then the last barrier.
    steps: Vec<Step>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Step {
    /// What must be there when the others come to the barrier.
    before: Option<Copied>,
    behind: Vec<Copied>,
}

impl Windows {
    /// Which window has `len` bytes at `at`, and where in it they are.
    fn find(&self, at: u64, len: u64) -> Option<(&Window, u64)> {
        self.all.iter().find_map(|one| {
            let offset = at.checked_sub(one.start)?;
            (offset.checked_add(len)? <= one.len).then_some((one, offset))
        })
    }

    /// Unmaps everything: no copy is under way any more.
    pub(super) fn end(&mut self) {
        self.all.clear();
    }

    /// All that is mapped of a rank.
    pub(super) fn of(&self, rank: u32) -> impl Iterator<Item = &Mapping> {
        self.all.iter().flat_map(|one| &one.mappings).filter(move |one| one.rank() == rank)
    }

    fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// How `rank` of `ranks` carries out a call of parts of `bytes`; `None`: by kernels. What it depends on is the same on every rank
    /// whose program keeps to the rule of windows, and compared before anything is copied.
    fn plan(
        &self,
        (rank, ranks): (u32, u32),
        call: &Call,
        (input, output): (u64, u64),
        bytes: u64,
    ) -> Option<Plan> {
        let (own, count) = (u64::from(rank), u64::from(ranks));
        let whole = bytes.checked_mul(count)?;
        // Everybody begins with another one.
        let others = (1..count).map(|step| (own + step) % count);
        let base = |window: &Window, peer: u64| window.bases.get(peer as usize).copied();
        match call.kind {
            _ if bytes < PULLED_MIN || ranks < 2 => None,
            Collective::AllGather => {
                let in_place = input == output.checked_add(own * bytes)?;
                let (window, offset) = match in_place {
                    true => self.find(output, whole)?,
                    false => self.find(input, bytes)?,
                };
                let at = |peer: u64| if in_place { offset + peer * bytes } else { offset };
                let pull =
                    |peer| Some((base(window, peer)? + at(peer), output + peer * bytes, bytes));
                let behind = others.map(pull).collect::<Option<_>>()?;
                let own = (!in_place).then_some((input, output + own * bytes, bytes));
                Some(Plan::new((window, at(0)), own, vec![Step { before: None, behind }]))
            }
            // What is pulled must not be overwritten by what comes.
            Collective::AllToAll if !overlaps((input, whole), (output, whole)) => {
                let (window, offset) = self.find(input, whole)?;
                let from = |peer| Some(base(window, peer)? + offset + own * bytes);
                let pull = |peer| Some((from(peer)?, output + peer * bytes, bytes));
                let behind = others.map(pull).collect::<Option<_>>()?;
                let own = Some((input + own * bytes, output + own * bytes, bytes));
                Some(Plan::new((window, offset), own, vec![Step { before: None, behind }]))
            }
            // Only the root has an input: the others pull from its output.
            Collective::Broadcast => {
                let (window, offset) = self.find(output, bytes)?;
                let from = base(window, call.root.into())? + offset;
                let step = |(at, len): (u64, u64)| match rank == call.root {
                    true => Step {
                        before: (input != output).then_some((input + at, output + at, len)),
                        behind: Vec::new(),
                    },
                    false => Step { before: None, behind: vec![(from + at, output + at, len)] },
                };
                let steps = pieces(bytes).into_iter().map(step).collect();
                Some(Plan::new((window, offset), None, steps))
            }
            _ => None,
        }
    }
}

impl Plan {
    fn new((window, offset): (&Window, u64), own: Option<Copied>, steps: Vec<Step>) -> Self {
        // Told apart from its neighbours and from no place, which is all that a byte is good for.
        let mixed = (offset ^ window.number.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { place: 1 + (mixed >> 32) % 255, own, steps }
    }

    fn copies(&self) -> u64 {
        let of = |step: &Step| step.behind.len() as u64;
        self.steps.iter().map(of).sum()
    }
}

/// The pieces of a broadcast: where they begin, and their bytes.
fn pieces(bytes: u64) -> Vec<(u64, u64)> {
    // A barrier more is worth it where the first piece takes much longer.
    let count = (1..PIECES).filter(|piece| bytes >> piece >= PIECE_MIN).count();
    let parts = (2 << count) - 1;
    let (mut all, mut at) = (Vec::new(), 0);
    for piece in 0..=count {
        let len = match piece == count {
            true => bytes - at,
            false => ((bytes / parts) << piece) / 4096 * 4096,
        };
        all.push((at, len));
        at += len;
    }
    all
}

impl Cuda {
    /// Whether this rank can pull, and wants to: from other processes only, since each other rank must come to a meeting by itself.
    pub(super) fn can_pull(&self) -> bool {
        let other = |peer: &Peer| matches!(peer, Peer::Own | Peer::There(_));
        self.pulls && self.ranks > 1 && self.peers.iter().all(other)
    }

    /// Whether registering memory together does anything; the same on every rank.
    pub(in crate::collective) const fn pulls(&self) -> bool {
        self.pulls
    }

    /// What this rank tells the others about memory that all register together now; of no use to them where it cannot be a
    /// window.
    pub(in crate::collective) fn window_offer(&self, ptr: DevicePtr, len: u64) -> Vec<u8> {
        let offer = || -> Result<_, CudaError> {
            let info = PointerInfo::of(&self.context, ptr)?;
            let allocation = BufferId::of(&self.context, ptr)?.map_or(0, |number| number.0);
            let inside = is_open(&self.context, &self.context, ptr, len) && allocation != 0;
            let room = self.windows.all.len() < WINDOWS_MAX;
            let offset = ptr.as_u64().wrapping_sub(info.start.as_u64());
            let handle = ipc_handle(&self.context, info.start)?;
            let start = info.start.as_u64();
            Ok(([u64::from(inside && room), offset, len, allocation, start, info.len], handle))
        };
        let (words, handle) = offer().unwrap_or_else(|error| {
            tracing::debug!(%error, "{len} bytes at {ptr} are no window");
            ([0, 0, len, 0, 0, 0], [0; 64])
        });
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(handle);
        bytes
    }

    /// Maps what all ranks have told, in rank order. May wait for the device.
    pub(in crate::collective) fn window_open(
        &mut self,
        ptr: DevicePtr,
        len: u64,
        offers: &[Vec<u8>],
    ) -> Opened {
        self.registered.let_go();
        let number = self.windows.made;
        self.windows.made = number.wrapping_add(1);
        let mut window =
            Window { start: ptr.as_u64(), len, number, bases: Vec::new(), mappings: Vec::new() };
        for (rank, offer) in (0_u32..).zip(offers) {
            let Some((words, handle)) = decoded(offer) else { return Opened(None) };
            let [fit, offset, theirs, allocation, start, whole] = words;
            if fit != 1 || theirs != len {
                return Opened(None);
            }
            if rank == self.rank {
                window.bases.push(ptr.as_u64());
                continue;
            }
            match self.map((rank, handle, allocation), (start, whole), offset, len) {
                Found::At(at, Some(mapping)) => {
                    window.bases.push(at);
                    window.mappings.push(mapping);
                }
                _ => return Opened(None),
            }
        }
        Opened((window.bases.len() == self.ranks as usize).then_some(window))
    }

    /// Uses a window from now on, if `all` ranks have opened it.
    pub(in crate::collective) fn window_keep(&mut self, opened: Opened, all: bool) {
        match opened.0 {
            Some(window) if all => self.windows.all.push(window),
            _ => tracing::debug!("rank {}: a window that not all ranks can map", self.rank),
        }
    }

    /// Forgets the window of just these bytes. Unmapping may wait for the device.
    pub(super) fn window_forget(&mut self, ptr: DevicePtr, len: u64) {
        let same = |one: &Window| (one.start, one.len) == (ptr.as_u64(), len);
        if let Some(at) = self.windows.all.iter().position(same) {
            drop(self.windows.all.remove(at));
        }
    }

    /// Carries out a call of parts of `bytes` by copies; false: nothing was queued, it goes by kernels.
    pub(super) fn pull(
        &mut self,
        call: &Call,
        (input, output): (u64, u64),
        bytes: u64,
        (packed, word): (u64, u64),
        stream: &Handle,
        held: &Held,
    ) -> Result<bool> {
        if !self.pulls || self.windows.is_empty() {
            return Ok(false);
        }
        let plan = self.windows.plan((self.rank, self.ranks), call, (input, output), bytes);
        let Some(plan) = plan else { return Ok(false) };
        let side = match self.side.take() {
            Some(side) => side,
            None => {
                Handle::new(&self.context).map_err(|error| self.failed("make a stream", error))?
            }
        };
        let queued =
            self.queue_plan(&plan, (packed, placed(word, plan.place)), (stream, &side), held);
        self.side = Some(side);
        queued?;
        self.copied = self.copied.wrapping_add(plan.copies());
        Ok(true)
    }

    fn queue_plan(
        &mut self,
        plan: &Plan,
        words: (u64, u64),
        (stream, side): (&Handle, &Handle),
        held: &Held,
    ) -> Result<()> {
        let failed = |cuda: &Self, error| cuda.failed("queue copies", error);
        let fork = Fork::of(stream, side).map_err(|error| failed(self, error))?;
        // What is pulled piece by piece need not stop at the barriers between, nor they for it.
        let in_pieces = plan.steps.len() > 1;
        let mut forked = false;
        for step in &plan.steps {
            let queued = step.before.iter().try_for_each(|one| copy(stream, *one));
            queued.map_err(|error| failed(self, error))?;
            self.barrier(words, stream, &[])?;
            let (within, beside): (&[Copied], &[Copied]) =
                if in_pieces { (&[], &step.behind) } else { (&step.behind, plan.own.as_slice()) };
            let queued = fork.queue((stream, within), (side, beside));
            forked |= queued.map_err(|error| failed(self, error))?;
        }
        if forked {
            fork.join(stream, side).map_err(|error| failed(self, error))?;
        }
        self.barrier(words, stream, held)
    }
}

/// How copies are made beside the stream of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fork {
    /// In a stream of this rank's, by events.
    Events,
    /// In that stream, which becomes part of the capture for so long.
    InGraph,
    /// Not at all: that stream is part of another capture, which has not ended.
    Within,
}

impl Fork {
    fn of(stream: &Handle, side: &Handle) -> Result<Self, CudaError> {
        Ok(match (side.is_capturing()?, stream.is_capturing()?) {
            (true, _) => Self::Within,
            (false, true) => Self::InGraph,
            (false, false) => Self::Events,
        })
    }

    /// Queues copies within the stream, and others beside it behind what is queued there so far; whether there are any.
    fn queue(
        self,
        (stream, within): (&Handle, &[Copied]),
        (side, beside): (&Handle, &[Copied]),
    ) -> Result<bool, CudaError> {
        let all = |stream: &Handle, copies: &[Copied]| {
            copies.iter().try_for_each(|one| copy(stream, *one))
        };
        if beside.is_empty() || self == Self::Within {
            all(stream, within)?;
            return all(stream, beside).map(|()| false);
        }
        match self {
            Self::InGraph => match stream.capture_point()? {
                Some(point) => side.enter_capture(&point)?,
                None => {
                    return Err(CudaError::Refused("a capture that the driver does not tell of"));
                }
            },
            _ => side.wait_event(&stream.record()?)?,
        }
        all(stream, within)?;
        all(side, beside).map(|()| true)
    }

    fn join(self, stream: &Handle, side: &Handle) -> Result<(), CudaError> {
        match self {
            Self::Within => Ok(()),
            Self::Events => stream.wait_event(&side.record()?),
            Self::InGraph => match side.capture_point()? {
                Some(point) => stream.come_after(&point).map(drop),
                None => Ok(()),
            },
        }
    }
}

fn copy(stream: &Handle, (from, to, bytes): Copied) -> Result<(), CudaError> {
    stream.copy_at(DevicePtr::new(to), DevicePtr::new(from), bytes)
}

fn decoded(offer: &[u8]) -> Option<([u64; OFFER_WORDS], [u8; 64])> {
    let bytes: &[u8; OFFER_BYTES] = offer.try_into().ok()?;
    let (words, handle) = bytes.split_first_chunk::<{ OFFER_WORDS * 8 }>()?;
    let mut all = [0; OFFER_WORDS];
    for (word, bytes) in all.iter_mut().zip(words.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    Some((all, handle.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::collective::DataType;

    const M: u64 = 1 << 20;

    /// One window of 100 MiB at 1000 MiB, of which rank r has mapped that of rank p at (2000 + 1000 p) MiB.
    fn windows(rank: usize) -> Windows {
        let mut bases: Vec<u64> = (0..3).map(|peer| (2000 + 1000 * peer) * M).collect();
        bases[rank] = 1000 * M;
        let window =
            Window { start: 1000 * M, len: 100 * M, number: 7, bases, mappings: Vec::new() };
        Windows { all: vec![window], made: 8 }
    }

    #[test]
    fn what_is_pulled_is_where_the_others_have_it() {
        let of = |rank: u32, kind, input: u64, output: u64, bytes| {
            let call = Call::new(kind, bytes, DataType::U8).root(2);
            windows(rank as usize).plan((rank, 3), &call, (input * M, output * M), bytes)
        };
        let steps = |plan: Option<Plan>| {
            plan.map(|plan| {
                let at = |(from, to, bytes): Copied| (from / M, to / M, bytes / M);
                let pulled = plan.steps.iter().flat_map(|step| step.behind.clone()).map(at);
                (plan.own.map(at), pulled.collect::<Vec<_>>())
            })
        };
        use Collective as C;
        for (rank, kind, input, output, own, pulled) in [
            (1, C::AllGather, 1010, 50, Some((1010, 52, 2)), vec![(4010, 54, 2), (2010, 50, 2)]),
            (1, C::AllGather, 1032, 1030, None, vec![(4034, 1034, 2), (2030, 1030, 2)]),
            (0, C::AllToAll, 1010, 50, Some((1010, 50, 2)), vec![(3010, 52, 2), (4010, 54, 2)]),
            (0, C::Broadcast, 0, 1020, None, vec![(4020, 1020, 2)]),
            (2, C::Broadcast, 50, 1020, None, vec![]),
        ] {
            let found = steps(of(rank, kind, input, output, 2 * M));
            assert_eq!(found, Some((own, pulled)), "{rank} {kind:?}");
        }
        // The root has it in its output before the others come.
        let root = of(2, C::Broadcast, 50, 1020, 2 * M).unwrap();
        assert_eq!(root.steps[0].before, Some((50 * M, 1020 * M, 2 * M)));
        for (kind, input, output, bytes) in [
            (C::AllGather, 1010, 50, M - 1),
            (C::AllGather, 1099, 50, 2 * M),
            (C::AllGather, 50, 1010, 2 * M),
            (C::AllToAll, 1010, 1012, 2 * M),
            (C::AllToAll, 1095, 50, 2 * M),
            (C::Broadcast, 1010, 50, 2 * M),
            (C::Scatter, 1010, 1020, 2 * M),
            (C::Gather, 1010, 1020, 2 * M),
            (C::AllReduce, 1010, 1020, 2 * M),
            (C::AllGather, 1010, 50, u64::MAX / 2),
        ] {
            assert_eq!(
                of(0, kind, input, output, bytes),
                None,
                "{kind:?} {input} {output} {bytes}"
            );
        }
    }

    #[test]
    fn ranks_compare_a_byte_that_tells_places_apart() {
        let place = |at: u64| {
            let call = Call::new(Collective::AllGather, M, DataType::U8);
            windows(0).plan((0, 3), &call, (at, 0), M).map_or(0, |plan| plan.place)
        };
        let all: Vec<u64> = (0..64).map(|page| place(1000 * M + 4096 * page)).collect();
        assert!(all.iter().all(|place| (1..256).contains(place)));
        assert!(all.windows(2).all(|two| two[0] != two[1]), "{all:?}");
        assert_eq!(placed(5 | 9 << 56, 3), 5 | 3 << 56);
    }

    #[test]
    fn pieces_are_all_of_it_and_grow() {
        for bytes in [M, 8 * M - 1, 8 * M, 64 * M + 5, 1 << 33] {
            let all = pieces(bytes);
            let mut end = 0;
            for (at, len) in &all {
                assert_eq!(*at, end);
                end += len;
            }
            assert_eq!(end, bytes);
            assert!(all.windows(2).all(|two| two[0].1 < two[1].1), "{all:?}");
        }
        assert_eq!([M, 8 * M - 1, 8 * M, 1 << 33].map(|bytes| pieces(bytes).len()), [1, 1, 2, 5]);
    }
}
