//! Who carries calls out: kernels and copy engines of CUDA devices, or the CPU through shared host memory.
//!
//! # The seam
//! A communicator of `ranks` ranks makes one [`Executor`] a rank, on the thread that makes the rank, at
//! the same time on every rank ([`Setup`]). From then on:
//!
//! - [`enqueue`](Executor::enqueue) queues one [`Batch`] in a stream and returns; it never waits for
//!   the device or another rank. Arguments are checked before: sizes fit, the root exists, the type and
//!   operation go together (except what only the executor knows, such as fp8 on an old device). Zero
//!   counts come too, since they take part in the agreement; only a zero-count send or receive is
//!   dropped by the communicator. Calls of one communicator run in the order they were queued, also over
//!   several streams: the communicator makes a stream wait for the end of what was queued in the
//!   previous one, as [`Ends`] says it is seen.
//! - Before data moves, the executor agrees with the others: every rank shows its
//!   [`Announcement`](super::Announcement) (its hash is compared word by word) and waits, until
//!   [`Settings::deadline`] at most, for all others (for a send or receive: for its peer). A rank that differs
//!   or is missing becomes a [`Disagreement`](super::Disagreement), which goes to
//!   [`Control::fail`](super::control::Control::fail), once; the
//!   call then ends early and so does everything queued behind it. Output is unspecified after that.
//! - [`Control::is_aborted`](super::control::Control::is_aborted) is one atomic load. Whatever waits
//!   looks at it again and again and ends when it is true. Kernels read the word itself: it is the
//!   64-bit word at [`ABORT_OFFSET`](super::control::ABORT_OFFSET) of the rank's own
//!   [`memory`](super::control::Control::memory), which may be pinned for a device.
//! - [`register`](Executor::register) is a hint (zero copy); [`forget`](Executor::forget) undoes it
//!   before the memory is freed. Both are local: what is registered stands in the rank's own control memory, where
//!   the others look when they queue a large call.
//! - [`close`](Executor::close) is given the [`Tail`] of what was queued, and never waits longer than its
//!   deadline; what is still in flight then keeps its memory until the tail is done.
//! - For graphs: `sequence` is what the host counted when the call was queued. An executor that supports
//!   capture counts on the device instead, since a replay reuses its arguments.

mod cuda;
mod faults;
mod staged;

pub use faults::Faults;

pub(super) use cuda::{REPORT_OFFSET, WAITING_OFFSET, failure, failure_of_others};
pub(super) use staged::process_is_gone;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use beeline_core::addr::DevicePtr;

use super::control::Control;
use crate::config;
use crate::core::collective::{Algorithm, Call};
use crate::error::Result;
use crate::gpu::{Buffer, Event, Gpu, Stream};

/// What an executor is made of. Every rank makes its own at the same time.
pub(crate) struct Setup<'a> {
    /// The device of this rank.
    pub(crate) gpu: Gpu,
    /// This rank, below `ranks`.
    pub(crate) rank: u32,
    /// How many ranks there are.
    pub(crate) ranks: u32,
    /// Host memory shared by all ranks: abort word, announcements, errors.
    pub(crate) control: std::sync::Arc<Control>,
    /// Gives bytes (at most 64 KiB) and descriptors (at most 16) to all ranks and gets theirs, in
    /// rank order, own included. May be called any number of times while the executor is made, as often
    /// on every rank.
    pub(crate) exchange: &'a mut ExchangeFn<'a>,
    /// What was asked for.
    pub(crate) settings: Settings,
}

/// Gives to all ranks and gets what they gave.
pub(crate) type ExchangeFn<'a> = dyn FnMut(&[u8], Vec<OwnedFd>) -> Result<Vec<Gathered>> + 'a;

/// What one rank gave to an exchange.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    /// Its bytes.
    pub(crate) bytes: Vec<u8>,
    /// Its descriptors.
    pub(crate) fds: Vec<OwnedFd>,
}

/// Choices of a communicator.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// How long a call waits for the other ranks before it fails, naming who is missing.
    pub deadline: Duration,
    /// How long ranks may take to come together in the first place.
    pub join_deadline: Duration,
    /// Only this algorithm, where it can do the call; `None` lets the planner choose.
    pub algorithm: Option<Algorithm>,
    /// Bytes that go through shared memory at a time (the staged path); results never depend on it.
    pub chunk_bytes: u64,
    /// Blocks or threads that work on one call (0: by size); results never depend on it.
    pub channels: u32,
    /// From so many bytes to one peer on, copies carry what is only moved, in groups of one thread that have all ranks; `None`:
    /// where they are faster, as measured. Of rank 0 counts.
    pub copy_engine_bytes: Option<u64>,
    /// Whether kernels of small calls may start while what was queued before them still runs, and wait for its end themselves,
    /// where the device has instructions for that. What a program sees is the same; graphs have programmatic edges then.
    pub early: bool,
    /// Whether registering memory does anything: large parts that are only moved, both ways, then go straight into it
    /// ([`Communicator::register`](super::Communicator::register)). Each rank's own affair.
    pub straight: bool,
    /// Whether moves of a MiB a part or more go by copy engines rather than by kernels, where each rank is a process of its own and the memory was
    /// registered by all together ([`Communicator::register_window`](super::Communicator::register_window)). All ranks must want it.
    pub copy_engines: bool,
    /// Always through host memory, also where the devices reach each other.
    pub staged: bool,
    /// What is to go wrong, for tests of programs that must bear it.
    pub faults: Faults,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(30),
            join_deadline: Duration::from_secs(120),
            algorithm: None,
            chunk_bytes: 1 << 20,
            channels: 0,
            copy_engine_bytes: None,
            early: true,
            straight: false,
            copy_engines: false,
            staged: false,
            faults: Faults::default(),
        }
    }
}

impl Settings {
    /// The defaults, overridden by `BEELINE_COMM_TIMEOUT` (seconds, for both deadlines), `BEELINE_COMM_PATH` (`staged`),
    /// `BEELINE_COMM_EARLY` (0), `BEELINE_COMM_STRAIGHT` (1), `BEELINE_COMM_COPY_ENGINE_BYTES` and `BEELINE_COMM_CHUNK_BYTES`.
    pub fn from_env() -> Self {
        Self::default().overridden()
    }

    /// [`Self::from_env`] with another default for both deadlines.
    pub fn from_env_or(deadline: Duration) -> Self {
        Self { deadline, join_deadline: deadline, ..Self::default() }.overridden()
    }

    fn overridden(self) -> Self {
        let mut settings = self;
        if let Some(seconds) = config::comm_seconds() {
            settings.deadline = Duration::from_secs(seconds);
            settings.join_deadline = settings.deadline;
        }
        settings.staged = config::comm_staged();
        settings.early = config::comm_early();
        settings.straight = config::comm_straight();
        settings.copy_engine_bytes = config::comm_copy_engine_bytes();
        settings.chunk_bytes = config::comm_chunk_bytes().unwrap_or(settings.chunk_bytes);
        settings
    }
}

/// What is queued at once.
#[derive(Debug)]
pub(crate) enum Batch {
    /// A call of all ranks. An all-to-all-v never comes: it is a batch of transfers.
    Collective(Posted),
    /// Sends and receives that progress together, in no order between pairs; those of one pair and
    /// direction match in the order given.
    Transfers(Vec<Posted>),
}

/// A call with its memory.
#[derive(Clone, Debug)]
pub(crate) struct Posted {
    /// The call.
    pub(crate) call: Call,
    /// Its number for [`Call::agreement`], from 1.
    pub(crate) sequence: u64,
    /// What is read; `None` where this rank reads nothing.
    pub(crate) input: Place,
    /// What is written. May be `input` (in place), or overlap it as NCCL's in-place rules say.
    pub(crate) output: Place,
    /// Of a pre-multiplied sum.
    pub(crate) factor: Option<Factor>,
}

/// Memory of a call.
#[derive(Clone, Debug, Default)]
pub enum Place {
    /// None.
    #[default]
    None,
    /// In a buffer, from this byte on. It is kept while the call runs.
    Buffer(Buffer, u64),
    /// Memory that the caller keeps, as CUDA programs do: device memory, or host memory the device maps.
    Foreign(DevicePtr),
}

/// The factor of a pre-multiplied sum.
#[derive(Clone, Copy, Debug)]
pub enum Factor {
    /// One element of the call's type, in the low bytes.
    Host([u8; 8]),
    /// One element in device memory, read when the call runs (`ncclScalarDevice`).
    Device(DevicePtr),
}

/// How the end of what was queued is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// By an event that is recorded behind it, or as a point of a capture.
    Event,
    /// Once so many blocks are done, ever ([`Executor::hold_back`]; the number wraps). Nothing has to be recorded.
    Counted(u32),
}

impl Ends {
    /// How the end of both is seen, the second queued behind the first: an event, if one of them needs it, as it may hold memory
    /// or be none of the kernels that count.
    pub(crate) fn both(first: Option<Self>, second: Option<Self>) -> Option<Self> {
        match (first, second) {
            (Some(Self::Event), _) | (_, Some(Self::Event)) => Some(Self::Event),
            (first, second) => second.or(first),
        }
    }
}

/// Where the last call that was queued ends. A graph that a program still runs is not part of it.
#[derive(Debug)]
pub(crate) enum Tail {
    /// Nothing was queued.
    Idle,
    /// This event stands behind all calls.
    Event(Event),
    /// No event could be recorded: what was queued may be running.
    Unknown,
}

impl Tail {
    /// Whether nothing runs any more, as far as can be seen; never waits.
    pub(crate) fn is_done(&self) -> bool {
        match self {
            Self::Idle => true,
            Self::Event(event) => event.is_done().unwrap_or(false),
            Self::Unknown => false,
        }
    }
}

/// Carries out the calls of one rank.
pub(crate) enum Executor {
    /// Kernels and copy engines.
    Cuda(Box<cuda::Cuda>),
    /// The CPU, through host memory.
    Staged(staged::Staged),
}

impl Executor {
    /// The best executor that all ranks can have. All ranks are inside this call.
    pub(crate) fn join(setup: &mut Setup<'_>) -> Result<Self> {
        let real = setup.gpu.as_sim().is_none();
        let direct = real && !setup.settings.staged;
        // Whether to try is a decision of all.
        let all = (setup.exchange)(&[u8::from(direct)], Vec::new())?;
        if all.iter().all(|given| given.bytes == [1]) {
            let joined = cuda::Cuda::join(setup);
            let all = (setup.exchange)(&[u8::from(joined.is_ok())], Vec::new())?;
            let agreed = all.iter().all(|given| given.bytes == [1]);
            match joined {
                Ok(cuda) if agreed => return Ok(Self::Cuda(Box::new(cuda))),
                Ok(cuda) => cuda.close(Tail::Idle, Instant::now()),
                Err(error) if error.is_no_route() => {
                    tracing::info!(%error, "collectives go through host memory");
                }
                Err(error) => return Err(error),
            }
        }
        staged::Staged::join(setup).map(Self::Staged)
    }

    /// How many copies stood in for kernels.
    pub(crate) const fn copied(&self) -> u64 {
        match self {
            Self::Cuda(cuda) => cuda.copied(),
            Self::Staged(_) => 0,
        }
    }

    /// Whether calls go through host memory.
    pub(crate) const fn is_staged(&self) -> bool {
        matches!(self, Self::Staged(_))
    }

    /// Queues `batch` in `stream`. How its end is seen; `None` where there was nothing to queue.
    pub(crate) fn enqueue(&mut self, batch: &Batch, stream: &Stream) -> Result<Option<Ends>> {
        match self {
            Self::Cuda(cuda) => cuda.enqueue(batch, stream),
            Self::Staged(staged) => staged.enqueue(batch, stream).map(|()| Some(Ends::Event)),
        }
    }

    /// Holds back what is queued next in `stream` until `blocks` are done; nothing where it is being captured.
    pub(crate) fn hold_back(&self, stream: &Stream, blocks: u32) -> Result<()> {
        match self {
            Self::Cuda(cuda) => cuda.hold_back(stream, blocks),
            // Never says `Ends::Counted`.
            Self::Staged(_) => Ok(()),
        }
    }

    /// Says that memory will be used often.
    pub(crate) fn register(&mut self, ptr: DevicePtr, len: u64) {
        match self {
            Self::Cuda(cuda) => cuda.register(ptr, len),
            Self::Staged(_) => {}
        }
    }

    /// How many parts went straight into registered memory of other ranks.
    pub(crate) fn straight(&self) -> u64 {
        match self {
            Self::Cuda(cuda) => cuda.straight(),
            Self::Staged(_) => 0,
        }
    }

    /// What this rank tells the others about memory that all register together; `None` where that does nothing, for all.
    pub(crate) fn window_offer(&self, ptr: DevicePtr, len: u64) -> Option<Vec<u8>> {
        match self {
            Self::Cuda(cuda) if cuda.pulls() => Some(cuda.window_offer(ptr, len)),
            _ => None,
        }
    }

    /// Maps what all have told.
    pub(crate) fn window_open(
        &mut self,
        ptr: DevicePtr,
        len: u64,
        offers: &[Vec<u8>],
    ) -> Option<Opened> {
        match self {
            Self::Cuda(cuda) => Some(cuda.window_open(ptr, len, offers)),
            Self::Staged(_) => None,
        }
    }

    /// Uses it, if `all` have mapped it.
    pub(crate) fn window_keep(&mut self, opened: Opened, all: bool) {
        if let Self::Cuda(cuda) = self {
            cuda.window_keep(opened, all);
        }
    }

    /// Undoes [`Self::register`].
    pub(crate) fn forget(&mut self, ptr: DevicePtr, len: u64) {
        match self {
            Self::Cuda(cuda) => cuda.forget(ptr, len),
            Self::Staged(_) => {}
        }
    }

    /// Maps what others have registered; before anything of a group with large calls is queued, on any of its ranks.
    pub(crate) fn prepare(&mut self) {
        match self {
            Self::Cuda(cuda) => cuda.prepare(),
            Self::Staged(_) => {}
        }
    }

    /// The end. Never waits beyond `deadline`.
    pub(crate) fn close(self, tail: Tail, deadline: Instant) {
        match self {
            Self::Cuda(cuda) => cuda.close(tail, deadline),
            Self::Staged(staged) => staged.close(deadline),
        }
    }
}

/// The executors of all ranks of a communicator, for what their calls of one group say together.
pub(crate) struct Direct<'a> {
    ranks: Vec<cuda::Rank<'a>>,
}

/// Copies that carry out a group.
pub(crate) type Moves = Vec<cuda::Move>;

/// A window that is being made.
pub(crate) type Opened = cuda::Opened;

impl<'a> Direct<'a> {
    pub(crate) const fn new() -> Self {
        Self { ranks: Vec::new() }
    }

    /// The next rank; `None` where it has no device that copies, or the stream is another's.
    pub(crate) fn add(
        &mut self,
        executor: &'a mut Executor,
        stream: &'a Stream,
        calls: &[&'a Posted],
    ) -> Option<()> {
        let Executor::Cuda(cuda) = executor else { return None };
        let stream = cuda.handle(stream).ok()?;
        self.ranks.push(cuda::Rank { cuda, stream, calls: calls.to_vec() });
        Some(())
    }

    /// The copies, of at least so many bytes from rank to rank; `None` where kernels must do it.
    pub(crate) fn plan(&self, least: u64) -> Option<Moves> {
        cuda::plan(&self.ranks, least)
    }

    /// Queues them.
    pub(crate) fn queue(&mut self, moves: &Moves) -> Result<()> {
        cuda::queue(&mut self.ranks, moves)
    }
}
