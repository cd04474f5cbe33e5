//! Calls of more than two ranks that go in several launches, so that no rank's link carries the same bytes to each peer.

use beeline_sys::cuda::Stream as Handle;
use beeline_sys::cuda::collective::{KernelSet, MoveArgs};

use super::Cuda;
use super::launch::{Shot, Work, unknown};
use crate::core::collective::Call;
use crate::core::collective::plan::{pieces_of, whole_bytes_max};
use crate::error::Result;

impl Cuda {
    /// Most bytes of an all-reduce that each rank reduces itself, and of a broadcast that the root sends to each peer.
    pub(super) const fn whole_bytes_max(&self) -> u64 {
        whole_bytes_max(self.ranks, self.comm.line_span > 0)
    }

    /// Each rank reduces one part and gives it to all. Parts are equal; what does not divide goes in one
    /// shot. The order of ranks is that of one shot, and so are the bits.
    pub(super) fn two_shot(&mut self, call: &Call, work: Work<'_>, stream: &Handle) -> Result<()> {
        // Compiled before the first launch: compiling may wait for the device, whose kernel waits for ranks
        // that this thread may have yet to queue.
        self.kernels(KernelSet::Move)?;
        let size = call.dtype.size_bytes().ok_or_else(|| unknown(call))?;
        let ranks = u64::from(self.ranks);
        // Whole 16 bytes, so that every part is aligned as the whole is.
        let unit = (16 / size).max(1);
        let part = call.count / ranks / unit * unit * size;
        let done = part * ranks;
        let others = (((1_u64 << self.ranks) - 1) as u32) & !(1 << self.rank);
        let own = work.output + part * u64::from(self.rank);
        let scatter = Work { output: own, bytes: part, ..work };
        let shot = Shot { send_mask: others, recv_mask: others, stride: part };
        self.shoot(call, &scatter, shot, stream)?;
        let mut args = self.parts_of(&work);
        for (place, peer) in args.parts.iter_mut().take(self.ranks as usize).zip(0..) {
            (place.send, place.send_bytes) = (own, part);
            (place.recv, place.recv_bytes) = (work.output + part * peer, part);
        }
        self.launch_moves(&mut args, true, stream, work.held)?;
        if done == work.bytes {
            return Ok(());
        }
        let (input, output, bytes) = (work.input + done, work.output + done, work.bytes - done);
        let rest = Work { input, output, bytes, ..work };
        self.shoot(call, &rest, Shot { send_mask: others, recv_mask: others, stride: 0 }, stream)
    }

    /// A broadcast in pieces. The root hands out each piece in slices, one to each peer, and while it hands out the next one,
    /// they pass their slices on to each other: its link carries every byte once. What does not divide goes from the root
    /// to all.
    pub(super) fn handed_on(&mut self, call: &Call, work: Work<'_>, stream: &Handle) -> Result<()> {
        let cut = Cut::of(work.bytes, self.ranks, call.root);
        for turn in 0..=cut.pieces {
            let mut args = self.parts_of(&work);
            for (part, peer) in args.parts.iter_mut().take(self.ranks as usize).zip(0..) {
                let moved = cut.moved(turn, self.rank, peer);
                if let Some(at) = moved.sent {
                    let from = if self.rank == call.root { work.input } else { work.output };
                    (part.send, part.send_bytes) = (from + at, cut.slice);
                }
                if let Some(at) = moved.received {
                    (part.recv, part.recv_bytes) = (work.output + at, cut.slice);
                }
            }
            self.launch_moves(&mut args, false, stream, work.held)?;
        }
        let done = cut.done();
        let mut args = self.parts_of(&work);
        for (part, peer) in args.parts.iter_mut().take(self.ranks as usize).zip(0..) {
            let rest = work.bytes - done;
            match (self.rank == call.root, peer == call.root) {
                // The root's own copy is of everything: it has nothing else to do by now.
                (true, true) if work.input != work.output => {
                    (part.send, part.recv) = (work.input, work.output);
                    (part.send_bytes, part.recv_bytes) = (work.bytes, work.bytes);
                }
                (true, true) | (false, false) => {}
                (true, false) => (part.send, part.send_bytes) = (work.input + done, rest),
                (false, true) => (part.recv, part.recv_bytes) = (work.output + done, rest),
            }
        }
        self.launch_moves(&mut args, false, stream, work.held)
    }

    /// The arguments of a launch of `work`, which moves nothing yet.
    fn parts_of(&self, work: &Work<'_>) -> Box<MoveArgs> {
        let mut args = Box::new(MoveArgs { comm: self.comm, ..MoveArgs::default() });
        args.comm.call = work.packed;
        for part in args.parts.iter_mut().take(self.ranks as usize) {
            (part.send_word, part.recv_word) = (work.word, work.word);
        }
        args
    }
}

/// How a broadcast is cut: pieces of one slice for each peer of the root.
#[derive(Clone, Copy, Debug)]
struct Cut {
    pieces: u64,
    slice: u64,
    ranks: u32,
    root: u32,
}

/// Where in the buffer the slice is that a rank sends to another one in a turn, and the one that it receives from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Moved {
    sent: Option<u64>,
    received: Option<u64>,
}

impl Cut {
    /// `ranks` is more than two. Slices are whole 16 bytes, so that each is aligned as the whole is.
    fn of(bytes: u64, ranks: u32, root: u32) -> Self {
        let pieces = pieces_of(bytes);
        let slice = bytes / (pieces * u64::from(ranks - 1)) / 16 * 16;
        Self { pieces, slice, ranks, root }
    }

    const fn done(&self) -> u64 {
        self.pieces * self.slice * (self.ranks as u64 - 1)
    }

    /// Of piece `turn`, the slice of `peer` goes from the root to it; of the one before, those who have a slice pass it on.
    fn moved(&self, turn: u64, rank: u32, peer: u32) -> Moved {
        let before = turn.checked_sub(1);
        let now = (turn < self.pieces).then_some(turn);
        match (rank == self.root, peer == self.root) {
            _ if rank == peer => Moved::default(),
            (true, _) => Moved { sent: now.map(|piece| self.at(piece, peer)), received: None },
            (_, true) => Moved { sent: None, received: now.map(|piece| self.at(piece, rank)) },
            _ => Moved {
                sent: before.map(|piece| self.at(piece, rank)),
                received: before.map(|piece| self.at(piece, peer)),
            },
        }
    }

    /// The slice of `rank`, which is not the root, in a piece.
    fn at(&self, piece: u64, rank: u32) -> u64 {
        let place = u64::from(if rank < self.root { rank } else { rank - 1 });
        (piece * (u64::from(self.ranks) - 1) + place) * self.slice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each rank gets each byte once, from somebody who has it by then; both ends of a pair agree.
    #[test]
    fn broadcasts_reach_everybody_once() {
        for ranks in [3, 4, 5, 8, 16] {
            for root in [0, 1, ranks - 1] {
                for bytes in [1 << 20, (3 << 20) + 5, 100_000_007, 1 << 30] {
                    let cut = Cut::of(bytes, ranks, root);
                    assert!(cut.slice > 0 && cut.done() <= bytes, "{cut:?}");
                    assert!(bytes - cut.done() < cut.pieces * u64::from(ranks) * 16, "{cut:?}");
                    let all: Vec<u64> =
                        (0..cut.done() / cut.slice).map(|k| k * cut.slice).collect();
                    let mut has = vec![Vec::new(); ranks as usize];
                    has[root as usize] = all.clone();
                    for turn in 0..=cut.pieces {
                        let mut came = Vec::new();
                        for (rank, peer) in (0..ranks).flat_map(|r| (0..ranks).map(move |p| (r, p)))
                        {
                            let moved = cut.moved(turn, rank, peer);
                            assert_eq!(moved.sent, cut.moved(turn, peer, rank).received, "{cut:?}");
                            let Some(at) = moved.sent else { continue };
                            assert!(
                                has[rank as usize].contains(&at),
                                "{cut:?} {turn} {rank} to {peer}"
                            );
                            came.push((peer, at));
                        }
                        for (peer, at) in came {
                            assert!(
                                !has[peer as usize].contains(&at),
                                "{cut:?} {turn} {peer} again"
                            );
                            has[peer as usize].push(at);
                        }
                    }
                    for slices in &mut has {
                        slices.sort_unstable();
                        assert_eq!(*slices, all, "{cut:?}");
                    }
                }
            }
        }
    }
}
