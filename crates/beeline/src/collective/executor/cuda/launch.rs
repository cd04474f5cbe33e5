//! From calls to kernels: what each rank sends to each, and which kernel carries it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use beeline_sys::cuda::collective::{
    ADMIT_AT_ONCE, ADMIT_HEARD, ADMIT_NEVER, ADMIT_THERE, Element, KernelSet, LINE_THREADS,
    LINE_THREADS_FEW, LL_SPAN_MAX, LL_SPAN_MIN, LL_THREADS_MAX, LL_THREADS_MORE, MoveArgs,
    Operator, PUSH_BLOCKS, PUSH_THREADS, Part, ReduceArgs, Shape, Way, chunk_bytes, line_blocks,
    line_bytes_max, line_messages, ll_blocks, ll_span,
};
use beeline_sys::cuda::{DeviceMem, Stream as Handle};

use super::Cuda;
use super::report::words;
use super::rounds::{ROOM, Transfer, launches};
use crate::collective::executor::{Factor, Place, Posted};
use crate::core::addr::ByteRange;
use crate::core::collective::plan::{
    PACKET_BYTES_MAX, PACKET_MOVED_BYTES_MAX, PACKET_ONLY_BYTES_MAX,
};
use crate::core::collective::{Call, CallError, Collective, DataType, RedOp};
use crate::error::{Error, Result};

/// Most bytes of a part for which lines take fewer threads: of which two blocks fit a multiprocessor, so that the next kernel has
/// come to its wait when this one ends. Where they reduce, where they are moved both ways, and one way.
const LINES_FEW_REDUCED_MAX: u64 = 2 << 20;
const LINES_FEW_MAX: u64 = 4 << 20;
const LINES_FEW_ONE_WAY_MAX: u64 = 8 << 20;
/// A launch of parts up to this many bytes may start while the kernel before it still runs: it saves a microsecond. Larger
/// ones do not miss it, and the room that waiting blocks take may be somebody else's.
const EARLY_MAX: u64 = 8 << 20;
/// A launch of parts up to this many bytes is one block of 64 threads of 64 registers (4096), which finds room beside the blocks of other
/// kernels of ours that start early. Of the 65536 registers of a multiprocessor, a block of lines takes 43520 or 28160 (544 or 352
/// threads of 80), a block of several of packets 22528 (352 of 64): two of 28160 leave the least. A kernel of one block takes part
/// of one multiprocessor.
const TINY_MAX: u64 = 256;
/// Bytes of a window's first page that barriers send and receive: nobody looks at them.
const BARRIER_AT: u64 = 512;

/// Memory that a launch keeps; empty where the caller does.
pub(super) type Held = Vec<Arc<DeviceMem>>;

impl Cuda {
    pub(super) fn collective(&mut self, posted: &Posted, stream: &Handle) -> Result<()> {
        let call = &posted.call;
        let size = call.dtype.size_bytes().ok_or_else(|| unknown(call))?;
        let bytes = call.count.checked_mul(size).ok_or_else(|| unknown(call))?;
        let mut held = Held::new();
        let invalid = |error: CallError| Error::refused(error.to_string());
        let read = call.input_bytes(self.rank, self.ranks).map_err(invalid)?;
        let written = call.output_bytes(self.rank, self.ranks).map_err(invalid)?;
        let input = address(&posted.input, read, "input", &mut held)?;
        let output = address(&posted.output, written, "output", &mut held)?;
        let (packed, word) = words(call);
        if bytes == 0 || call.kind == Collective::Barrier {
            return self.barrier((packed, word), stream, &[]);
        }
        if call.kind.reduces() {
            let work =
                Work { input, output, bytes, factor: posted.factor, packed, word, held: &held };
            return self.reduction(call, work, stream);
        }
        if self.pull(call, (input, output), bytes, (packed, word), stream, &held)? {
            return Ok(());
        }
        if call.kind == Collective::Broadcast && bytes > self.whole_bytes_max() {
            let work = Work { input, output, bytes, factor: None, packed, word, held: &held };
            return self.handed_on(call, work, stream);
        }
        if call.kind == Collective::AllToAll && self.way(bytes, false) != Way::Packets {
            warn_in_place((input, read), (output, written), call);
        }
        let mut args = Box::new(MoveArgs { comm: self.comm, ..MoveArgs::default() });
        args.comm.call = packed;
        for (part, peer) in args.parts.iter_mut().take(self.ranks as usize).zip(0..) {
            *part = part_of(call, (self.rank, peer), (input, output), bytes);
            (part.send_word, part.recv_word) = (word, word);
        }
        let mutual = matches!(call.kind, Collective::AllGather | Collective::AllToAll);
        self.launch_moves(&mut args, mutual, stream, &held)
    }

    /// Everybody tells everybody what it does, with eight bytes of nothing.
    pub(super) fn barrier(
        &mut self,
        (packed, word): (u64, u64),
        stream: &Handle,
        held: &[Arc<DeviceMem>],
    ) -> Result<()> {
        let own = self.window.ptr().as_u64() + BARRIER_AT;
        let mut args = Box::new(MoveArgs { comm: self.comm, ..MoveArgs::default() });
        args.comm.call = packed;
        for (part, peer) in args.parts.iter_mut().take(self.ranks as usize).zip(0..) {
            let bytes = if peer == u64::from(self.rank) { 0 } else { 8 };
            let recv = own + 8 * peer;
            *part = Part {
                send: own,
                send_bytes: bytes,
                recv,
                recv_bytes: bytes,
                send_word: word,
                recv_word: word,
            };
        }
        self.launch_moves(&mut args, true, stream, held)
    }

    /// Sends and receives, in as many launches as [`launches`] says, and in each small parts before large ones.
    pub(super) fn transfers(&mut self, list: &[Posted], stream: &Handle) -> Result<()> {
        let mut all = Vec::with_capacity(list.len());
        let mut ways = Vec::new();
        for posted in list {
            let call = &posted.call;
            if call.root != self.rank {
                ways.push(self.way(bytes_of(call)?, false));
            }
            let cost = match call.root == self.rank {
                // Both ends are in one launch: it is a copy.
                true => u64::MAX,
                false => self.room_of(bytes_of(call)?),
            };
            all.push(Transfer { peer: call.root, sends: call.kind == Collective::Send, cost });
        }
        let mixed = ways.windows(2).any(|two| matches!(two, [a, b] if a != b));
        for launch in launches(&all, mixed) {
            let mut args = Box::new(MoveArgs { comm: self.comm, ..MoveArgs::default() });
            let mut held = Held::new();
            for posted in launch.into_iter().filter_map(|index| list.get(index)) {
                let call = &posted.call;
                let (packed, word) = words(call);
                let bytes = bytes_of(call)?;
                let part = args.parts.get_mut(call.root as usize);
                let part =
                    part.ok_or_else(|| Error::refused(format!("there is no rank {}", call.root)))?;
                args.comm.call = packed;
                if call.kind == Collective::Send {
                    part.send = address(&posted.input, bytes, "input", &mut held)?;
                    (part.send_bytes, part.send_word) = (bytes, word);
                } else {
                    part.recv = address(&posted.output, bytes, "output", &mut held)?;
                    (part.recv_bytes, part.recv_word) = (bytes, word);
                }
            }
            let own = args.parts.get(self.rank as usize).copied().unwrap_or_default();
            if own.send_bytes != own.recv_bytes {
                return Err(Error::refused(format!(
                    "rank {} sends {} bytes to itself and receives {}",
                    self.rank, own.send_bytes, own.recv_bytes
                )));
            }
            self.launch_moves(&mut args, false, stream, &held)?;
        }
        Ok(())
    }

    /// Parts that travel alike in one kernel, small ones before large ones. `mutual`: every rank sends something to every
    /// other one, and all parts are equal.
    pub(super) fn launch_moves(
        &mut self,
        args: &mut MoveArgs,
        mutual: bool,
        stream: &Handle,
        held: &[Arc<DeviceMem>],
    ) -> Result<()> {
        let all = args.parts;
        for way in [Way::Packets, Way::Lines, Way::Push] {
            let mut most = 0;
            for (part, all) in args.parts.iter_mut().zip(&all) {
                let keep =
                    |bytes: u64| if bytes > 0 && self.way(bytes, false) == way { bytes } else { 0 };
                (part.send_bytes, part.recv_bytes) = (keep(all.send_bytes), keep(all.recv_bytes));
                most = most.max(part.send_bytes).max(part.recv_bytes);
            }
            if most > 0 {
                let others = || args.parts.iter().zip(0..).filter(|(_, peer)| *peer != self.rank);
                let sends = others().any(|(part, _)| part.send_bytes > 0);
                let both = sends && others().any(|(part, _)| part.recv_bytes > 0);
                let few_max = if both { LINES_FEW_MAX } else { LINES_FEW_ONE_WAY_MAX };
                let shape = self.shape(way, most, few_max);
                args.comm.admits = self.admits(shape, most, false, mutual);
                self.move_parts(args, shape, stream, held)?;
            }
        }
        Ok(())
    }

    fn reduction(&mut self, call: &Call, work: Work<'_>, stream: &Handle) -> Result<()> {
        let (rank, ranks) = (self.rank, self.ranks);
        let others = (((1_u64 << ranks) - 1) as u32) & !(1 << rank);
        let shot = |send_mask, recv_mask, stride| Shot { send_mask, recv_mask, stride };
        match call.kind {
            Collective::ReduceScatter => {
                self.shoot(call, &work, shot(others, others, work.bytes), stream)
            }
            Collective::Reduce if rank == call.root => {
                self.shoot(call, &work, shot(0, others, 0), stream)
            }
            Collective::Reduce => self.shoot(call, &work, shot(1 << call.root, 0, 0), stream),
            _ if work.bytes <= self.whole_bytes_max() => {
                self.shoot(call, &work, shot(others, others, 0), stream)
            }
            _ => self.two_shot(call, work, stream),
        }
    }

    pub(super) fn shoot(
        &mut self,
        call: &Call,
        work: &Work<'_>,
        shot: Shot,
        stream: &Handle,
    ) -> Result<()> {
        let set = kernels_of(call)?;
        let (scalar, multiply) = match (call.op, work.factor) {
            (RedOp::PRE_MUL_SUM, Some(Factor::Host(bytes))) => (u64::from_le_bytes(bytes), 1),
            (RedOp::PRE_MUL_SUM, Some(Factor::Device(ptr))) => (ptr.as_u64(), 2),
            (RedOp::PRE_MUL_SUM, None) => {
                return Err(Error::refused("a pre-multiplied sum needs a factor"));
            }
            _ => (0, 0),
        };
        let mut args = ReduceArgs {
            comm: self.comm,
            input: work.input,
            output: work.output,
            bytes: work.bytes,
            stride: shot.stride,
            send_mask: shot.send_mask,
            recv_mask: shot.recv_mask,
            scalar,
            multiply,
            divide: if call.op == RedOp::AVG { self.ranks } else { 0 },
            word: work.word,
        };
        args.comm.call = work.packed;
        let shape = self.shape(self.way(work.bytes, true), work.bytes, LINES_FEW_REDUCED_MAX);
        let mutual = shot.send_mask == shot.recv_mask;
        args.comm.admits = self.admits(shape, work.bytes, true, mutual);
        self.reduce(set, &args, shape, stream, work.held)
    }

    /// How a part of `bytes` travels, in a call that reduces or in one that does not.
    fn way(&self, bytes: u64, reduces: bool) -> Way {
        let lines = if self.comm.line_span > 0 { line_bytes_max(self.ranks) } else { 0 };
        // Both sides of a part must choose alike, so it depends on nothing but the size, the number of ranks, and what all
        // ranks agreed on when they joined.
        let packets = match (lines > 0, reduces) {
            (true, true) => PACKET_BYTES_MAX,
            (true, false) => PACKET_MOVED_BYTES_MAX,
            (false, _) => PACKET_ONLY_BYTES_MAX,
        };
        match bytes {
            _ if bytes <= packets.min(ll_blocks(self.ranks) * LL_SPAN_MAX) => Way::Packets,
            _ if bytes <= lines => Way::Lines,
            _ => Way::Push,
        }
    }

    /// What a message of so many bytes takes of the room in the receiver's window.
    fn room_of(&self, bytes: u64) -> u64 {
        match self.way(bytes, false) {
            // One of two places. The other may hold what an earlier call sent and nobody has acknowledged since: then the
            // second waits for the next call of the receiver.
            Way::Packets => ROOM / 2,
            Way::Lines => line_messages(self.ranks, bytes, false).saturating_mul(ROOM / 2),
            Way::Push => bytes.div_ceil(PUSH_BLOCKS * u64::from(chunk_bytes(self.ranks))),
        }
    }

    /// The launch of a kernel whose largest part has `most` bytes; lines up to `few_max` take fewer threads.
    fn shape(&self, way: Way, most: u64, few_max: u64) -> Shape {
        let blocks_max = ll_blocks(self.ranks);
        let (blocks, threads) = match way {
            Way::Packets => {
                let span = ll_span(self.ranks, most);
                let packets = most.min(span).div_ceil(8).next_multiple_of(32) as u32;
                let few = if most > span { LL_THREADS_MAX } else { packets.min(LL_THREADS_MAX) };
                let threads = few + LL_THREADS_MORE;
                // A smaller part than the largest may be cut finer, and need all blocks.
                let blocks = if span == LL_SPAN_MIN { most.div_ceil(span) } else { blocks_max };
                (blocks.clamp(1, blocks_max), threads)
            }
            Way::Lines => {
                let threads = if most <= few_max { LINE_THREADS_FEW } else { LINE_THREADS };
                (line_blocks(self.ranks, most).clamp(1, blocks_max), threads)
            }
            Way::Push => (most.div_ceil(16).clamp(1, PUSH_BLOCKS), PUSH_THREADS),
        };
        Shape { way, blocks: blocks as u32, threads, early: self.early && most <= EARLY_MAX }
    }

    /// When a kernel whose largest part has `most` bytes lets blocks of the next one start, whoever's that is.
    fn admits(&self, shape: Shape, most: u64, reduces: bool, mutual: bool) -> u32 {
        let rounds = match shape.way {
            Way::Lines => line_messages(self.ranks, most, reduces),
            Way::Packets | Way::Push => 1,
        };
        let all = mutual || self.ranks <= 2;
        let way = shape.early.then_some(shape.way);
        admits(way, most <= TINY_MAX, self.comm.atomics != 0 && all, rounds)
    }
}

/// When a kernel that travels by `way` lets the next one start (`None`: it must not). `tiny`: as [`TINY_MAX`] says. `meets`: its
/// blocks tell each other of their room, and it exchanges something with every rank that its peers exchange something
/// with. `rounds`: messages of its largest part.
const fn admits(way: Option<Way>, tiny: bool, meets: bool, rounds: u64) -> u32 {
    match way {
        // Kernels of chunks fill multiprocessors, and have no words by which their blocks meet.
        None | Some(Way::Push) => ADMIT_NEVER,
        Some(Way::Packets) if tiny => ADMIT_AT_ONCE,
        Some(_) if meets => ADMIT_THERE,
        // Who goes on to a second round waits for ranks that this one may not hear from.
        Some(_) if rounds > 1 => ADMIT_NEVER,
        Some(_) => ADMIT_HEARD,
    }
}

/// A call with its memory.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) bytes: u64,
    pub(super) factor: Option<Factor>,
    pub(super) packed: u64,
    pub(super) word: u64,
    pub(super) held: &'a [Arc<DeviceMem>],
}

/// Who gets what in one kernel.
#[derive(Clone, Copy)]
pub(super) struct Shot {
    pub(super) send_mask: u32,
    pub(super) recv_mask: u32,
    pub(super) stride: u64,
}

/// What `rank` sends to `peer` and receives from it in a call that computes nothing.
pub(super) fn part_of(
    call: &Call,
    (rank, peer): (u32, u64),
    (input, output): (u64, u64),
    bytes: u64,
) -> Part {
    let (own, root) = (u64::from(rank), u64::from(call.root));
    let when = |condition: bool| if condition { bytes } else { 0 };
    let (send, send_bytes, recv, recv_bytes) = match call.kind {
        Collective::AllGather => (input, bytes, output + peer * bytes, bytes),
        Collective::Broadcast => (input, when(own == root), output, when(peer == root)),
        Collective::Gather => (input, when(peer == root), output + peer * bytes, when(own == root)),
        Collective::Scatter => {
            (input + peer * bytes, when(own == root), output, when(peer == root))
        }
        Collective::AllToAll => (input + peer * bytes, bytes, output + peer * bytes, bytes),
        _ => (0, 0, 0, 0),
    };
    Part { send, send_bytes, recv, recv_bytes, ..Part::default() }
}

pub(super) fn bytes_of(call: &Call) -> Result<u64> {
    let size = call.dtype.size_bytes().ok_or_else(|| unknown(call))?;
    call.count.checked_mul(size).ok_or_else(|| unknown(call))
}

fn kernels_of(call: &Call) -> Result<KernelSet> {
    let element = match call.dtype {
        DataType::I8 => Element::I8,
        DataType::U8 | DataType::BOOL => Element::U8,
        DataType::I32 => Element::I32,
        DataType::U32 => Element::U32,
        DataType::I64 => Element::I64,
        DataType::U64 => Element::U64,
        DataType::F16 => Element::F16,
        DataType::BF16 => Element::Bf16,
        DataType::F32 => Element::F32,
        DataType::F64 => Element::F64,
        DataType::E4M3 => Element::E4m3,
        DataType::E5M2 => Element::E5m2,
        _ => return Err(unknown(call)),
    };
    let bool = call.dtype == DataType::BOOL;
    let operator = match call.op {
        RedOp::SUM if bool => Operator::Max,
        RedOp::PROD if bool => Operator::Min,
        RedOp::SUM | RedOp::AVG | RedOp::PRE_MUL_SUM => Operator::Sum,
        RedOp::PROD => Operator::Prod,
        RedOp::MIN => Operator::Min,
        RedOp::MAX => Operator::Max,
        _ => return Err(unknown(call)),
    };
    Ok(KernelSet::Reduce(element, operator))
}

/// The device's address of `bytes` bytes at a place, whose memory is added to `held` where it is a buffer's; 0
/// where there are none. Foreign memory is as long as the caller says.
pub(super) fn address(place: &Place, bytes: u64, what: &str, held: &mut Held) -> Result<u64> {
    match place {
        _ if bytes == 0 => Ok(0),
        Place::None => {
            Err(Error::refused(format!("the call has {bytes} bytes of {what}, and no memory")))
        }
        Place::Foreign(ptr) => {
            let end = ptr.as_u64().checked_add(bytes);
            end.map(|_| ptr.as_u64()).ok_or_else(|| {
                Error::refused(format!("{bytes} bytes of {what} at {ptr} end beyond 64 bits"))
            })
        }
        Place::Buffer(buffer, offset) => {
            let range = ByteRange::new(*offset, bytes).ok_or_else(|| {
                Error::refused(format!("{what} at byte {offset} ends beyond 64 bits"))
            })?;
            let part = buffer.slice(range)?;
            let memory = buffer.as_cuda().ok_or_else(|| {
                Error::refused(format!("a buffer of {} in a call of CUDA ranks", buffer.gpu().id()))
            })?;
            held.push(Arc::clone(memory));
            Ok(part.ptr().as_u64())
        }
    }
}

/// Says once that what comes in a large all-to-all may overwrite what is still to be sent.
fn warn_in_place((input, read): (u64, u64), (output, written): (u64, u64), call: &Call) {
    static SAID: AtomicBool = AtomicBool::new(false);

    let apart = input.saturating_add(read) <= output || output.saturating_add(written) <= input;
    if !apart && !SAID.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "{call}: what comes overwrites what is sent, perhaps before it was sent; NCCL does not define that either: \
             give an output of its own"
        );
    }
}

#[cold]
pub(super) fn unknown(call: &Call) -> Error {
    Error::refused(format!("no kernel carries out {call}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SimConfig;
    use crate::core::addr::DevicePtr;
    use crate::gpu::Gpu;

    #[test]
    fn who_lets_the_next_kernel_start() {
        let (packets, lines, push) = (Some(Way::Packets), Some(Way::Lines), Some(Way::Push));
        for (way, tiny, meets, rounds, expected) in [
            (None, true, true, 1, ADMIT_NEVER),
            (push, true, true, 1, ADMIT_NEVER),
            (push, false, false, 1, ADMIT_NEVER),
            (packets, true, true, 1, ADMIT_AT_ONCE),
            (packets, true, false, 1, ADMIT_AT_ONCE),
            (packets, false, true, 1, ADMIT_THERE),
            (packets, false, false, 1, ADMIT_HEARD),
            (lines, true, true, 1, ADMIT_THERE),
            (lines, false, true, 3, ADMIT_THERE),
            (lines, false, false, 1, ADMIT_HEARD),
            (lines, false, false, 2, ADMIT_NEVER),
        ] {
            assert_eq!(admits(way, tiny, meets, rounds), expected, "{way:?} {meets} {rounds}");
        }
    }

    #[test]
    fn places_have_the_bytes_of_the_call() {
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        let buffer = gpu.alloc(4096).unwrap();
        let within = |place: Place, bytes| address(&place, bytes, "input", &mut Held::new());
        let foreign = |at| Place::Foreign(DevicePtr::new(at));
        for (place, bytes, expected) in [
            (Place::None, 0, Ok(0)),
            (Place::None, 1, Err("no memory")),
            (foreign(64), 8, Ok(64)),
            (foreign(64), 0, Ok(0)),
            (foreign(u64::MAX - 7), 8, Err("beyond 64 bits")),
            (Place::Buffer(buffer.clone(), 4090), 8, Err("cannot use this part")),
            (Place::Buffer(buffer.clone(), u64::MAX), 8, Err("beyond 64 bits")),
            // Inside; what is wrong with it is the device alone.
            (Place::Buffer(buffer, 4088), 8, Err("in a call of CUDA ranks")),
        ] {
            match (within(place, bytes), expected) {
                (Ok(at), Ok(wanted)) => assert_eq!(at, wanted),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (got, wanted) => panic!("{got:?}, not {wanted:?}"),
            }
        }
    }
}
