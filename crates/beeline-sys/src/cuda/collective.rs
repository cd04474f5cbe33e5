//! The kernels of collectives: their PTX, their arguments (as `kernels/beeline/layout.cuh` has them), and
//! their launch.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use beeline_core::addr::DevicePtr;

use super::core::Held;
use super::device::Context;
use super::error::Error;
use super::image::{Images, images};
use super::memory::DeviceMem;
use super::stream::Stream;
use super::types::*;

/// Ranks that the kernels can join.
pub const RANKS_MAX: usize = 16;
/// Bytes that one block of a low-latency kernel carries to a peer at most; there are [`ll_blocks`].
pub const LL_SPAN_MAX: u64 = 8192;
/// Bytes that it carries at least, where there are as many.
pub const LL_SPAN_MIN: u64 = 2048;
/// Blocks of a push kernel.
pub const PUSH_BLOCKS: u64 = 128;
/// Chunks of one pair and block under way.
pub const PUSH_SLOTS: u64 = 4;
/// Threads in a block of a push kernel.
pub const PUSH_THREADS: u32 = 1024;
/// Threads in a block of a low-latency kernel that carry packets, at most, and where there are several blocks; [`LL_THREADS_MORE`]
/// come on top. Few packets need fewer, but then a multiprocessor could be filled by blocks of packets and of lines, without room
/// for a tiny one.
pub const LL_THREADS_MAX: u32 = 320;
/// The warp that deals with headers.
pub const LL_THREADS_MORE: u32 = 32;

/// Blocks of the next kernel start when the kernel has ended.
pub const ADMIT_NEVER: u32 = 0;
/// They may start when the kernel does: for kernels of one block of few threads.
pub const ADMIT_AT_ONCE: u32 = 1;
/// They may start when every block has heard from its peers: no block that the kernel waits for needs room any more.
pub const ADMIT_HEARD: u32 = 2;
/// They may start when the peers' blocks have their room too, which they say when they start: for kernels of ranks that all exchange
/// something with each other, on devices that carry out each other's atomic operations ([`Comm::atomics`]).
pub const ADMIT_THERE: u32 = 3;
/// Where a window has the number of blocks that are done, of launches that count them (32 bits, wraps). Streams of its own device
/// may wait for it, and nobody else look at it: it is released to that device alone.
pub const DONE_AT: u64 = 704;

/// Where a window has what its rank has mapped of the others' registrations: by peer and entry an address and [`entry_word`].
pub const TABLE_AT: u64 = 229_376;

/// Where packets begin in every window.
pub const AT_LL: u64 = 262_144;
const LL_SLOTS: u64 = 2;
const LL_REGION: u64 = 2 * LL_SPAN_MAX;
/// Bytes of data in a line of 128 bytes, and in the lines that a warp carries at once.
const LINE_DATA: u64 = 120;
const LINE_GROUP: u64 = 4 * LINE_DATA;
/// Bytes that a block of lines carries to a peer at least, where there are as many.
const LINE_SPAN_MIN: u64 = 8 * LINE_GROUP;
/// Bytes of data in four times as many lines, of what is only moved.
const MOVED_GROUP: u64 = 16 * 124;
/// Bytes of a part in lines at most, between two ranks.
const LINE_BYTES_MAX: u64 = 48 << 20;
/// Threads in a block of lines: warps that send, warps that take, and the one that deals with headers.
pub const LINE_THREADS: u32 = 544;
/// As many where a launch moves little: two such blocks fit a multiprocessor, by the registers that their machine code is limited to.
pub const LINE_THREADS_FEW: u32 = 352;

/// Where the chunks of a window of `ranks` ranks begin, in bytes from its start.
pub const fn push_at(ranks: u32) -> u64 {
    AT_LL + others(ranks) * LL_SLOTS * ll_blocks(ranks) * LL_REGION
}

/// Blocks of a low-latency kernel at most.
pub const fn ll_blocks(ranks: u32) -> u64 {
    if ranks <= 8 { 128 } else { 64 }
}

/// Bytes that a block of packets carries of a part of `bytes` to a peer; the same on both sides.
pub const fn ll_span(ranks: u32, bytes: u64) -> u64 {
    let mut span = LL_SPAN_MIN;
    while span < LL_SPAN_MAX && bytes > ll_blocks(ranks) * span {
        span *= 2;
    }
    span
}

/// Bytes of a chunk, so that a window stays within 64 MiB.
pub const fn chunk_bytes(ranks: u32) -> u32 {
    match ranks {
        0..=2 => 65536,
        3 => 32768,
        4..=5 => 16384,
        6..=8 => 8192,
        _ => 4096,
    }
}

/// Where the lines of a window begin, in bytes from its start.
pub const fn line_at(ranks: u32) -> u64 {
    push_at(ranks) + others(ranks) * PUSH_BLOCKS * PUSH_SLOTS * chunk_bytes(ranks) as u64
}

/// Bytes of data that a block carries to a peer in one message of lines; 0: windows of so many ranks have no room for
/// lines.
pub const fn line_span(ranks: u32) -> u32 {
    match ranks {
        0..=2 => 137 * LINE_GROUP as u32,
        3 => 68 * LINE_GROUP as u32,
        4 => 45 * LINE_GROUP as u32,
        _ => 0,
    }
}

/// Bytes that travel to a peer in lines at most; where larger, chunks take less time.
pub const fn line_bytes_max(ranks: u32) -> u64 {
    if line_span(ranks) == 0 { 0 } else { LINE_BYTES_MAX / others(ranks).next_power_of_two() }
}

/// Blocks that carry `bytes` and any smaller part in lines.
pub const fn line_blocks(ranks: u32, bytes: u64) -> u64 {
    // Above, all blocks carry more; a part that is a little smaller may then need more blocks than a larger one.
    let blocks = bytes.div_ceil(LINE_SPAN_MIN);
    if blocks > ll_blocks(ranks) { ll_blocks(ranks) } else { blocks }
}

/// Messages that a part of `bytes` takes in lines, where it is reduced or only moved.
pub const fn line_messages(ranks: u32, bytes: u64, reduces: bool) -> u64 {
    let groups = line_span(ranks) as u64 / LINE_GROUP;
    let room = if reduces { groups * LINE_GROUP } else { groups / 4 * MOVED_GROUP };
    if room == 0 { 0 } else { bytes.div_ceil(ll_blocks(ranks)).div_ceil(room) }
}

/// Bytes of a window of `ranks` ranks.
pub const fn window_bytes(ranks: u32) -> u64 {
    let region = line_span(ranks) as u64 / LINE_DATA * 128;
    line_at(ranks) + others(ranks) * LL_SLOTS * ll_blocks(ranks) * region
}

const fn others(ranks: u32) -> u64 {
    if ranks > 1 { ranks as u64 - 1 } else { 0 }
}

/// What a failing kernel writes to host memory; `code` last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Report {
    /// Why: 0 nothing, 1 another call, 2 the deadline, 3 an abort, 4 a rank that failed.
    pub code: u32,
    /// The rank that it is about.
    pub peer: u32,
    /// What was expected of it.
    pub mine: [u64; 2],
    /// What it said; zeros where it said nothing.
    pub theirs: [u64; 2],
    /// How long was waited.
    pub waited_ns: u64,
    /// The block that noticed.
    pub block: u32,
    /// At what: 1 room at the peer, 2 data, 3 the header.
    pub phase: u32,
}

/// What every kernel gets. Addresses are the device's.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Comm {
    /// The windows of all ranks.
    pub windows: [u64; RANKS_MAX],
    /// A [`Report`] in host memory.
    pub report: u64,
    /// A 32-bit word in host memory: not 0 means leave.
    pub abort: u64,
    /// How long a wait may last.
    pub timeout_ns: u64,
    /// First word of the header: the call.
    pub call: u64,
    /// Offset of the chunks in every window.
    pub push_at: u64,
    /// Bytes of one.
    pub chunk: u32,
    /// This rank.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// Blocks of a low-latency kernel at most, a power of two.
    pub ll_blocks: u32,
    /// Offset of the lines in every window.
    pub line_at: u64,
    /// Bytes of data that a block carries to a peer in one message of lines; 0: there are none.
    pub line_span: u32,
    /// 1: every block of packets or lines adds itself to the word at [`DONE_AT`] when it is done; 0 in graphs, whose
    /// replays the host does not count.
    pub counted: u32,
    /// When blocks of the next kernel may start: [`ADMIT_NEVER`], [`ADMIT_AT_ONCE`], [`ADMIT_HEARD`], [`ADMIT_THERE`].
    pub admits: u32,
    /// 1: the devices of all ranks carry out atomic operations of the others.
    pub atomics: u32,
}

/// What a rank sends to one peer and receives from it (itself: a local copy).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Part {
    /// What is sent.
    pub send: u64,
    /// Its bytes.
    pub send_bytes: u64,
    /// Where to receive.
    pub recv: u64,
    /// Bytes received.
    pub recv_bytes: u64,
    /// Second word of the header to the peer.
    pub send_word: u64,
    /// Second word that is expected of the peer.
    pub recv_word: u64,
}

/// Arguments of a collective that computes nothing.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct MoveArgs {
    /// Everywhere the same.
    pub comm: Comm,
    /// By peer.
    pub parts: [Part; RANKS_MAX],
}

/// Registrations of one rank that others map.
pub const DIRECT_ENTRIES: usize = 64;
/// Bits that offers and tables have of an entry's generation.
pub const GENERATION_BITS: u32 = 21;
const OFFER_ENTRY: u32 = 57;
const OFFER_GENERATION: u32 = 36;
const ENTRY_GENERATION: u32 = 43;

/// How a receiver tells a sender that its part may go to byte `offset` of its entry; 0: what cannot be said.
pub const fn offer(entry: usize, generation: u32, offset: u64) -> u64 {
    let fits = entry < DIRECT_ENTRIES && generation >> GENERATION_BITS == 0;
    let unit = offset / 16;
    if !fits || !offset.is_multiple_of(16) || unit >> OFFER_GENERATION != 0 {
        return 0;
    }
    ((entry as u64 + 1) << OFFER_ENTRY) | ((generation as u64) << OFFER_GENERATION) | unit
}

/// What the table of a sender has behind the address of an entry of `len` bytes; 0: too long.
pub const fn entry_word(generation: u32, len: u64) -> u64 {
    if len >> ENTRY_GENERATION != 0 || generation >> GENERATION_BITS != 0 {
        return 0;
    }
    ((generation as u64) << ENTRY_GENERATION) | len
}

/// Arguments of a kernel of chunks that computes nothing.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct PushMoveArgs {
    /// As for the other ways.
    pub moves: MoveArgs,
    /// Where the part of each rank may go ([`offer`]); 0: through slots.
    pub offers: [u64; RANKS_MAX],
    /// In memory of the device: address and [`entry_word`] of what is mapped of each rank's [`DIRECT_ENTRIES`] entries.
    pub table: u64,
    /// 32 bits in host memory that are told how many parts went straight.
    pub straight: u64,
    /// Ranks of which something is mapped.
    pub mapped: u32,
    /// Nothing.
    pub unused: u32,
}

/// Arguments of a collective that reduces.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ReduceArgs {
    /// Everywhere the same.
    pub comm: Comm,
    /// Input.
    pub input: u64,
    /// Output.
    pub output: u64,
    /// Bytes of one part.
    pub bytes: u64,
    /// Bytes from one rank's part of the input to the next; 0: all get the same.
    pub stride: u64,
    /// Ranks that get a part.
    pub send_mask: u32,
    /// Ranks whose parts are reduced with the own one; 0: none.
    pub recv_mask: u32,
    /// Bits of the factor of a pre-multiplied sum.
    pub scalar: u64,
    /// 0 no factor, 1 `scalar` is one, 2 it is the address of one.
    pub multiply: u32,
    /// By what a sum is divided; 0: by nothing.
    pub divide: u32,
    /// Second word of every header.
    pub word: u64,
}

/// Element types that kernels reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "their names say it")]
pub enum Element {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    Bf16,
    F32,
    F64,
    E4m3,
    E5m2,
}

/// Operators that kernels have; averages and pre-multiplied sums are sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "their names say it")]
pub enum Operator {
    Sum,
    Prod,
    Min,
    Max,
}

/// Which kernels of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelSet {
    /// `bl_ll_move`, `bl_line_move` and `bl_push_move`.
    Move,
    /// `bl_ll_reduce`, `bl_line_reduce` and `bl_push_reduce` for one type and operator.
    Reduce(Element, Operator),
}

macro_rules! texts {
    ($(($type:ident, $sum:literal, $prod:literal, $min:literal, $max:literal))*) => {
        impl KernelSet {
            const fn images(self) -> Images {
                match self {
                    Self::Move => images!("move"),
                    $(Self::Reduce(Element::$type, Operator::Sum) => images!($sum),
                    Self::Reduce(Element::$type, Operator::Prod) => images!($prod),
                    Self::Reduce(Element::$type, Operator::Min) => images!($min),
                    Self::Reduce(Element::$type, Operator::Max) => images!($max),)*
                }
            }
        }
    };
}

texts! {
    (I8, "i8-sum", "i8-prod", "i8-min", "i8-max")
    (U8, "u8-sum", "u8-prod", "u8-min", "u8-max")
    (I32, "i32-sum", "i32-prod", "i32-min", "i32-max")
    (U32, "u32-sum", "u32-prod", "u32-min", "u32-max")
    (I64, "i64-sum", "i64-prod", "i64-min", "i64-max")
    (U64, "u64-sum", "u64-prod", "u64-min", "u64-max")
    (F16, "f16-sum", "f16-prod", "f16-min", "f16-max")
    (Bf16, "bf16-sum", "bf16-prod", "bf16-min", "bf16-max")
    (F32, "f32-sum", "f32-prod", "f32-min", "f32-max")
    (F64, "f64-sum", "f64-prod", "f64-min", "f64-max")
    (E4m3, "e4m3-sum", "e4m3-prod", "e4m3-min", "e4m3-max")
    (E5m2, "e5m2-sum", "e5m2-prod", "e5m2-min", "e5m2-max")
}

/// The kernels of one module, for one context.
pub struct Kernels {
    context: Arc<Context>,
    set: KernelSet,
    module: RawModule,
    /// Whether they are machine code, whose kernels of packets and lines wait themselves for what was queued before, and the driver
    /// has not refused to launch them so.
    early: AtomicBool,
    /// In the order of [`Way`].
    functions: [RawFunction; 3],
}

impl Kernels {
    /// Brings the module to the device of `context`: its machine code where there is some that the driver takes (a
    /// millisecond), else its PTX, which the driver compiles (a fifth of a second).
    ///
    /// # Errors
    /// What the driver says of the PTX.
    pub fn load(context: &Arc<Context>, set: KernelSet) -> Result<Self, Error> {
        let names = match set {
            KernelSet::Move => [c"bl_ll_move", c"bl_line_move", c"bl_push_move"],
            KernelSet::Reduce(..) => [c"bl_ll_reduce", c"bl_line_reduce", c"bl_push_reduce"],
        };
        let values = || format!("{set:?}");
        let _current = context.enter()?;
        let major = context.device().attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR);
        let (module, early) = match set.images().load(context.table(), major) {
            Ok(loaded) => loaded,
            Err(result) => {
                context.check("cuModuleLoadDataEx", result, values)?;
                (RawModule::NULL, false)
            }
        };
        let functions = [RawFunction::NULL; 3];
        let mut new = Self {
            context: Arc::clone(context),
            set,
            module,
            early: AtomicBool::new(early),
            functions,
        };
        let [packets, lines, push] = names;
        new.functions = [new.find(packets)?, new.find(lines)?, new.find(push)?];
        Ok(new)
    }

    /// The context it was compiled for.
    pub const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn find(&self, name: &CStr) -> Result<RawFunction, Error> {
        let mut function = RawFunction::NULL;
        let find = self.context.table().cuModuleGetFunction;
        // SAFETY: `function` is a place for one handle; the module is loaded, the name a C string.
        let result = unsafe { find(&raw mut function, self.module, name.as_ptr()) };
        let name = || name.to_string_lossy().into_owned();
        self.context.check("cuModuleGetFunction", result, name)?;
        Ok(function)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: loaded by this value; a launch in flight is kept by the driver or by its owner.
            let _ = unsafe { (self.context.table().cuModuleUnload)(self.module) };
        }
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels").finish_non_exhaustive()
    }
}

/// The arguments of one launch.
#[derive(Clone, Copy, Debug)]
pub enum Args<'a> {
    /// Of a [`KernelSet::Move`], by packets or lines.
    Move(&'a MoveArgs),
    /// Of a [`KernelSet::Move`], by chunks.
    PushMove(&'a PushMoveArgs),
    /// Of a [`KernelSet::Reduce`].
    Reduce(&'a ReduceArgs),
}

/// How data travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Eight bytes and their flag in one store.
    Packets,
    /// Lines of 128 bytes with a flag at the end, stored by eight threads at once.
    Lines,
    /// Chunks behind a fence and a flag.
    Push,
}

/// How one launch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Which kernel.
    pub way: Way,
    /// Blocks.
    pub blocks: u32,
    /// Threads in each.
    pub threads: u32,
    /// Whether its blocks may start while the kernel before is still running, where the machine code knows how to wait for
    /// its end. They take room on the device from then on.
    pub early: bool,
}

impl Stream {
    /// Queues a kernel of a collective. Also while a foreign stream is being captured.
    ///
    /// Addresses in `args` are the caller's promise, like those of any CUDA program: the device checks
    /// them, and can reach only memory of devices and what the process registered. With `held`, memory is
    /// kept until the kernel has run (which a capture refuses); the window and the kernels themselves are
    /// kept by whoever made them, until nothing is in flight.
    ///
    /// # Errors
    /// `Refused` for kernels of another device; `Capturing`; what the driver says.
    pub fn launch_collective(
        &self,
        kernels: &Kernels,
        shape: Shape,
        args: Args<'_>,
        held: &[Arc<DeviceMem>],
    ) -> Result<(), Error> {
        if kernels.context.raw() != self.context().raw() {
            return Err(Error::Refused("the kernels were compiled for another device"));
        }
        let by_chunks = shape.way == Way::Push;
        let suited = match (kernels.set, args) {
            (KernelSet::Move, Args::Move(_)) => !by_chunks,
            (KernelSet::Move, Args::PushMove(_)) => by_chunks,
            (KernelSet::Reduce(..), Args::Reduce(_)) => true,
            _ => false,
        };
        if !suited {
            return Err(Error::Refused("the kernel takes other arguments"));
        }
        let [packets, lines, push] = kernels.functions;
        let function = match shape.way {
            Way::Packets => packets,
            Way::Lines => lines,
            Way::Push => push,
        };
        let mut params: [*mut c_void; 1] = [match args {
            Args::Move(args) => std::ptr::from_ref(args).cast_mut().cast(),
            Args::PushMove(args) => std::ptr::from_ref(args).cast_mut().cast(),
            Args::Reduce(args) => std::ptr::from_ref(args).cast_mut().cast(),
        }];
        // Others do not wait by themselves.
        let waits = matches!(shape.way, Way::Packets | Way::Lines);
        let early = shape.early && waits && kernels.early.load(Ordering::Relaxed);
        let mut launch = |context: &Context, stream: RawStream| {
            let (blocks, threads, params) = (shape.blocks, shape.threads, params.as_mut_ptr());
            let (values, extra) = (|| format!("collective, {shape:?}"), std::ptr::null());
            if let (true, Some(launch)) = (early, context.table().cuLaunchKernelEx) {
                let config = LaunchConfig {
                    grid: [blocks, 1, 1],
                    block: [threads, 1, 1],
                    shared_bytes: 0,
                    stream,
                    attributes: std::ptr::from_ref(&LaunchAttribute::EARLY),
                    count: 1,
                };
                // SAFETY: one attribute, laid out as the driver has it; the entry takes one struct, of the type that `args` has; all are copied during
                // the call. This machine code waits for what was queued before, before it touches memory.
                let result = unsafe { launch(&raw const config, function, params, extra) };
                if !matches!(result, CuResult::NOT_SUPPORTED | CuResult::INVALID_VALUE) {
                    return context.check("cuLaunchKernelEx", result, values);
                }
                // A driver without it, or a capture that cannot have it here: nothing was queued.
                kernels.early.store(false, Ordering::Relaxed);
            }
            let launch = context.table().cuLaunchKernel;
            // SAFETY: the entry takes one struct, of the type that `args` has; it is copied during the call.
            let result =
                unsafe { launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, params, extra) };
            context.check("cuLaunchKernel", result, values)
        };
        if held.is_empty() {
            let _current = self.context().make_current()?;
            return launch(self.context(), self.raw());
        }
        let held = held.iter().map(|memory| Held::Device(Arc::clone(memory)));
        self.push(held, launch)
    }
}

/// Device memory of another process of this host, mapped by its IPC handle.
pub struct IpcMapping {
    context: Arc<Context>,
    ptr: u64,
}

impl IpcMapping {
    /// Maps what `handle` names; the exporter must keep the memory until this value is gone.
    ///
    /// # Errors
    /// `Unsupported` without IPC; what the driver says: `INVALID_VALUE` for a handle of this process.
    pub fn open(context: &Arc<Context>, handle: [u8; 64]) -> Result<Self, Error> {
        let open = context.table().cuIpcOpenMemHandle;
        let Some(open) = open else { return Err(Error::Unsupported { what: "IPC" }) };
        let _current = context.enter()?;
        let mut ptr = 0;
        // SAFETY: `ptr` is a place for one device pointer; the handle is plain bytes that the driver checks.
        let result = unsafe { open(&raw mut ptr, IpcHandle(handle), IPC_LAZY_ENABLE_PEER_ACCESS) };
        context.check("cuIpcOpenMemHandle", result, String::new)?;
        Ok(Self { context: Arc::clone(context), ptr })
    }

    /// Where it is mapped.
    pub const fn ptr(&self) -> u64 {
        self.ptr
    }
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        let close = self.context.table().cuIpcCloseMemHandle;
        if let (Some(close), Ok(_current)) = (close, self.context.enter()) {
            // SAFETY: opened by this value, closed once; its owner drops it when no kernel uses it.
            let _ = unsafe { close(self.ptr) };
        }
    }
}

impl fmt::Debug for IpcMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IpcMapping({:#x})", self.ptr)
    }
}

/// A name for other processes of the host of the allocation that begins at `start`, whoever made it.
///
/// # Errors
/// `Unsupported` without IPC; what the driver says, as for memory that is not of `cuMemAlloc`.
pub fn ipc_handle(context: &Arc<Context>, start: DevicePtr) -> Result<[u8; 64], Error> {
    let export = context.table().cuIpcGetMemHandle;
    let Some(export) = export else { return Err(Error::Unsupported { what: "IPC" }) };
    let _current = context.enter()?;
    let mut handle = IpcHandle([0; 64]);
    // SAFETY: `handle` is a place for one handle; the address is a number that the driver looks up and does not follow.
    let result = unsafe { export(&raw mut handle, start.as_u64()) };
    context.check("cuIpcGetMemHandle", result, || start.to_string())?;
    Ok(handle.0)
}

impl DeviceMem {
    /// A name of this allocation for other processes of the host.
    ///
    /// # Errors
    /// As [`ipc_handle`].
    pub fn ipc_handle(&self) -> Result<[u8; 64], Error> {
        ipc_handle(self.context(), self.ptr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_layout_cuh() {
        assert_eq!((size_of::<Comm>(), align_of::<Comm>()), (16 * 8 + 5 * 8 + 40, 8));
        assert_eq!(size_of::<MoveArgs>(), size_of::<Comm>() + 16 * 48);
        assert_eq!(size_of::<PushMoveArgs>(), size_of::<MoveArgs>() + 16 * 8 + 24);
        assert_eq!(size_of::<ReduceArgs>(), size_of::<Comm>() + 64);
        assert_eq!(size_of::<Report>(), 56);
        assert_eq!(std::mem::offset_of!(Report, waited_ns), 40);
        for ranks in 0..=RANKS_MAX as u32 {
            assert!(window_bytes(ranks) <= 64 << 20, "{ranks}");
        }
    }

    #[test]
    fn offers_say_what_fits_their_bits() {
        for (entry, generation, offset, word) in [
            (0, 1, 0, 1 << 57 | 1 << 36),
            (63, (1 << 21) - 1, 4080, 64 << 57 | ((1 << 21) - 1) << 36 | 255),
            (64, 1, 0, 0),
            (0, 1 << 21, 0, 0),
            (0, 1, 8, 0),
            (0, 1, 1 << 40, 0),
        ] {
            assert_eq!(offer(entry, generation, offset), word, "{entry} {generation} {offset}");
        }
        assert_eq!([entry_word(2, 5), entry_word(1, 1 << 43)], [2 << 43 | 5, 0]);
    }

    /// As `line_rounds` of line.cuh and `moved_rounds` of moved.cuh have them.
    #[test]
    fn messages_of_lines_follow_from_the_size() {
        for (ranks, bytes, reduced, moved) in [
            (2, 1, 1, 1),
            (2, 128 * 137 * 480, 1, 1),
            (2, 128 * 137 * 480 + 1, 2, 1),
            (2, 128 * 34 * 1984, 2, 1),
            (2, 128 * 34 * 1984 + 1, 2, 2),
            (2, 48 << 20, 6, 6),
            (3, 24 << 20, 7, 6),
            (4, 12 << 20, 5, 5),
            (5, 1 << 20, 0, 0),
        ] {
            let both = [true, false].map(|reduces| line_messages(ranks, bytes, reduces));
            assert_eq!(both, [reduced, moved], "{ranks} ranks, {bytes} bytes");
        }
        // A message has room for a group of either kind, or there are no lines.
        for span in (0..=RANKS_MAX as u32).map(line_span) {
            assert!(span == 0 || u64::from(span) >= 4 * LINE_GROUP, "{span}");
        }
    }

    /// As `ll_shift` of layout.cuh has them.
    #[test]
    fn shares_of_packets_follow_from_the_size() {
        for (ranks, kib, share) in
            [(2, 1, 2048), (2, 256, 2048), (2, 257, 4096), (2, 512, 4096), (2, 513, 8192)]
        {
            assert_eq!(ll_span(ranks, kib << 10), share, "{kib} KiB");
        }
        assert_eq!([(128 << 10), (128 << 10) + 1].map(|bytes| ll_span(16, bytes)), [2048, 4096]);
        assert_eq!(ll_span(16, u64::MAX), LL_SPAN_MAX);
    }

    #[test]
    fn every_text_is_ptx_of_its_kernels() {
        for set in [KernelSet::Move, KernelSet::Reduce(Element::E5m2, Operator::Max)] {
            let text = set.images().ptx;
            let kind = if set == KernelSet::Move { "move" } else { "reduce" };
            for name in ["ll", "line", "push"] {
                assert!(text.contains(&format!(".entry bl_{name}_{kind}(")), "{set:?} {name}");
            }
            assert!(text.contains("\n.version 8.2\n") && text.ends_with('\0'));
            // A fat binary says how long it is: the magic and sizes of its header, then of what follows.
            let binary = set.images().sm_90;
            assert_eq!(binary[..4], [0x50, 0xed, 0x55, 0xba], "{set:?}");
            let size = u64::from_le_bytes(*binary[8..].first_chunk().unwrap());
            assert_eq!(size + 16, binary.len() as u64, "{set:?}");
        }
    }
}
