//! Kernels of CUDA devices.
//!
//! Every rank has one window of device memory (at most 64 MiB), which all others of the host write
//! through peer access or CUDA IPC. What a user's buffer holds goes through it, so buffers need not be known to the
//! others; large parts that are only moved go straight into those that are (`registered.rs`). Small parts travel as
//! packets that carry their flag (`bl_ll_*`), larger ones as chunks behind flags, sent by one half of the threads
//! while the other half reduces (`bl_push_*`). The
//! counters that both need are in the windows, so a captured graph can be replayed. Which of the two a part
//! takes depends on its size alone, since both sides must choose the same.

mod direct;
mod join;
mod launch;
mod pulled;
mod registered;
mod report;
mod rounds;
mod steps;
mod verify;

pub(in crate::collective) use direct::{Move, Rank, plan, queue};
pub(in crate::collective) use pulled::Opened;
pub(in crate::collective) use report::{REPORT_OFFSET, WAITING_OFFSET, failure, failure_of_others};

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_sys::cuda::collective::{
    Args, Comm, DONE_AT, KernelSet, Kernels, MoveArgs, PushMoveArgs, ReduceArgs, Shape, Way,
};
use beeline_sys::cuda::{Context, DeviceMem, HostRegistration, Stream as Handle, WaitFlags, Word};

use super::staged::process_is_gone;
use super::{Batch, Ends, Setup, Tail};
use crate::collective::control::Control;
use crate::error::{Error, Kind, Result};
use crate::gpu::{CudaDevice, Stream};
use crate::lock;

/// One rank on a CUDA device.
#[derive(Debug)]
pub(crate) struct Cuda {
    rank: u32,
    ranks: u32,
    device: String,
    context: Arc<Context>,
    /// Filled in once; copied into every launch.
    comm: Comm,
    window: Arc<DeviceMem>,
    peers: Vec<Peer>,
    /// Ranks whose processes can be looked at.
    visible: Vec<u32>,
    control: Arc<Control>,
    #[allow(dead_code, reason = "held for its drop")]
    pinned: Arc<HostRegistration>,
    /// Whether kernels may start early.
    early: bool,
    /// Whether registered memory is offered, and that of others mapped.
    straight: bool,
    /// Whether a stream can wait for a number of blocks.
    counts: bool,
    /// Blocks that the kernels of packets and lines will have counted once all that is queued is done.
    blocks: u32,
    /// Of what the present batch has queued; `None`: nothing yet.
    ends: Option<Ends>,
    /// Kernels used so far, few enough to be searched.
    kernels: Vec<(KernelSet, Arc<Kernels>)>,
    /// For copies to the others, where all are of this process.
    lanes: direct::Lanes,
    /// Copies that were queued instead of kernels.
    copied: u64,
    registered: registered::Registered,
    /// Whether large moves in windows go by copies, on every rank.
    pulls: bool,
    windows: pulled::Windows,
    /// For copies beside a call, made when first used.
    side: Option<Handle>,
}

/// How the window of another rank is reached.
#[derive(Debug)]
enum Peer {
    /// The own one.
    Own,
    /// Of the same process: kept alive by this handle.
    Here(Arc<DeviceMem>),
    /// Of another process.
    There(Arc<DeviceMem>),
}

impl Cuda {
    /// Joins the other ranks; all of them are inside this call.
    ///
    /// # Errors
    /// `is_no_route` where a device cannot reach another or a rank is on none; the communicator then goes
    /// through host memory, on every rank, since the answer is exchanged.
    pub(crate) fn join(setup: &mut Setup<'_>) -> Result<Self> {
        let mut joined = join::join(setup)?;
        joined.kernels.reserve(8);
        Ok(joined)
    }

    pub(super) fn enqueue(&mut self, batch: &Batch, stream: &Stream) -> Result<Option<Ends>> {
        let handle = self.handle(stream)?;
        // An event behind every call in a stream of somebody else's would cost as much as the call. What becomes part of a
        // graph is not counted: it may run any number of times.
        let context = Arc::clone(&self.context);
        let failed = |error| self.failed("use a stream", error);
        let _current = context.make_current().map_err(failed)?;
        let counts = self.counts && !handle.is_own();
        let counted = counts && !handle.is_capturing().map_err(failed)?;
        self.comm.counted = u32::from(counted);
        self.ends = None;
        match batch {
            Batch::Collective(posted) => self.collective(posted, handle)?,
            Batch::Transfers(list) => self.transfers(list, handle)?,
        }
        Ok(self.ends)
    }

    /// Holds back `stream` until so many blocks are done, unless it is being captured.
    pub(super) fn hold_back(&self, stream: &Stream, blocks: u32) -> Result<()> {
        let handle = self.handle(stream)?;
        let failed = |error| self.failed("order calls of a communicator in two streams", error);
        if handle.is_capturing().map_err(failed)? {
            return Ok(());
        }
        let word = Word::Device(&self.window, DONE_AT);
        handle.wait_u32(word, blocks, WaitFlags::GEQ).map_err(failed)
    }

    /// How many copies stood in for kernels.
    pub(super) const fn copied(&self) -> u64 {
        self.copied
    }

    pub(super) fn handle<'a>(&self, stream: &'a Stream) -> Result<&'a Handle> {
        stream.as_cuda().ok_or_else(|| {
            Error::refused(format!(
                "the stream is of {}, the rank of {}",
                stream.gpu().id(),
                self.device
            ))
        })
    }

    /// Notes a kernel that was queued.
    fn queued(&mut self, shape: Shape, held: &[Arc<DeviceMem>]) {
        let counted = self.comm.counted != 0 && matches!(shape.way, Way::Packets | Way::Lines);
        if counted {
            self.blocks = self.blocks.wrapping_add(shape.blocks);
        }
        self.ends = Some(match self.ends {
            None | Some(Ends::Counted(_)) if counted && held.is_empty() => {
                Ends::Counted(self.blocks)
            }
            // Buffers are let go behind an event, and kernels of chunks do not count.
            _ => Ends::Event,
        });
    }

    /// Waits for the kernels until `deadline`. Windows and control memory stay until the last one has ended, even
    /// where that is later.
    pub(super) fn close(mut self, tail: Tail, deadline: Instant) {
        let parts = self.straight();
        if parts > 0 {
            tracing::debug!("rank {} has sent {parts} parts straight", self.rank);
        }
        while !tail.is_done() && Instant::now() < deadline {
            std::thread::sleep(CLOSE_PAUSE);
        }
        // Unmapping waits for the device, whatever runs there: only where the caller has time.
        if tail.is_done() && Instant::now() < deadline {
            // Nobody but this rank's kernels used what it has mapped of the others' memory.
            self.registered.end();
            self.windows.end();
        }
        retire(Some(Left { cuda: self, tail }));
    }

    fn move_parts(
        &mut self,
        args: &MoveArgs,
        shape: Shape,
        stream: &Handle,
        held: &[Arc<DeviceMem>],
    ) -> Result<()> {
        let kernels = self.kernels(KernelSet::Move)?;
        let queued = if shape.way == Way::Push {
            let mut push = Box::new(PushMoveArgs { moves: *args, ..PushMoveArgs::default() });
            self.straighten(&mut push);
            if push.mapped != 0 {
                let waits = self.await_table(stream);
                waits.map_err(|error| self.failed("wait for a table", error))?;
            }
            let queued = stream.launch_collective(&kernels, shape, Args::PushMove(&push), held);
            if push.mapped != 0 {
                self.straightened(stream);
            }
            queued
        } else {
            stream.launch_collective(&kernels, shape, Args::Move(args), held)
        };
        queued.map_err(|error| self.failed("queue a collective", error))?;
        self.queued(shape, held);
        Ok(())
    }

    fn reduce(
        &mut self,
        set: KernelSet,
        args: &ReduceArgs,
        shape: Shape,
        stream: &Handle,
        held: &[Arc<DeviceMem>],
    ) -> Result<()> {
        let kernels = self.kernels(set)?;
        let queued = stream.launch_collective(&kernels, shape, Args::Reduce(args), held);
        queued.map_err(|error| self.failed("queue a collective", error))?;
        self.queued(shape, held);
        Ok(())
    }

    /// The kernels of `set`, compiled when first used; shared by all communicators of the device.
    fn kernels(&mut self, set: KernelSet) -> Result<Arc<Kernels>> {
        if let Some((_, kernels)) = self.kernels.iter().find(|(known, _)| *known == set) {
            return Ok(Arc::clone(kernels));
        }
        let kernels =
            compiled(&self.context, set).map_err(|e| self.failed("load the kernels", e))?;
        self.kernels.push((set, Arc::clone(&kernels)));
        Ok(kernels)
    }

    #[cold]
    fn failed(&self, action: &str, error: beeline_sys::cuda::Error) -> Error {
        Error::new(Kind::Device, format!("cannot {action} on {}", self.device)).because(error)
    }
}

/// How often a rank that closes looks whether its kernels have ended.
const CLOSE_PAUSE: Duration = Duration::from_micros(50);
/// Where a rank says in its own segment that it uses no window any more.
const CLOSED_OFFSET: u64 = REPORT_OFFSET + 64;

type Loaded = Vec<(usize, KernelSet, Arc<Kernels>)>;

fn compiled(
    context: &Arc<Context>,
    set: KernelSet,
) -> Result<Arc<Kernels>, beeline_sys::cuda::Error> {
    static LOADED: Mutex<Loaded> = Mutex::new(Vec::new());

    let key = Arc::as_ptr(context).addr();
    {
        let loaded = lock(&LOADED);
        if let Some((.., kernels)) =
            loaded.iter().find(|(at, known, _)| (*at, *known) == (key, set))
        {
            return Ok(Arc::clone(kernels));
        }
    }
    // Without the lock, so that several devices compile at once; each keeps its context alive.
    let kernels = Arc::new(Kernels::load(context, set)?);
    lock(&LOADED).push((key, set, Arc::clone(&kernels)));
    Ok(kernels)
}

/// What a rank leaves, and where the last of its kernels ends.
struct Left {
    cuda: Cuda,
    tail: Tail,
}

/// What ranks of this process may have left behind before it joins no communicator over devices: their windows add up.
const LEFT_MAX: usize = 64;

/// Keeps what a rank leaves until the others use it no more, and lets go of what earlier ones left; how many
/// are kept.
///
/// A kernel of a peer writes a last word after ours has ended, so a window outlives its rank: in one
/// process each rank holds the others' windows, across processes it waits here for their word, or for their end.
/// That goes for a communicator that failed or was aborted too: its kernels leave by themselves. Nothing here waits.
fn retire(rank: Option<Left>) -> usize {
    static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

    let mut gone = Vec::new();
    let mut left = lock(&LEFT);
    left.extend(rank);
    let all = std::mem::take(&mut *left);
    for one in all {
        let Left { cuda, tail } = &one;
        let others = cuda.peers.iter().zip(0..).filter(|(peer, _)| matches!(peer, Peer::There(_)));
        let others = others.map(|(_, rank)| (rank, cuda.visible.contains(&rank)));
        match tail.is_done() && all_closed(&cuda.control, others) {
            true => gone.push(one),
            false => left.push(one),
        }
    }
    let kept = left.len();
    drop(left);
    // Without the lock: freeing device memory calls the driver.
    drop(gone);
    kept
}

/// Says that this rank's last kernel has ended (not before: the others then free what it writes), and whether those of
/// `others` have too. A rank whose process can be looked at (`true`) has also ended with it.
fn all_closed(control: &Control, mut others: impl Iterator<Item = (u32, bool)>) -> bool {
    control.store(control.rank(), CLOSED_OFFSET, 1);
    others.all(|(rank, visible)| {
        control.load(rank, CLOSED_OFFSET) != 0
            || (visible && process_is_gone(control.process(rank)))
    })
}

/// The device behind a rank.
fn device_of<'a>(setup: &'a Setup<'_>) -> Option<&'a CudaDevice> {
    setup.gpu.as_cuda()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_free_once_the_others_closed_or_are_gone() {
        let files: Vec<_> = (0..3).map(|_| Control::segment().unwrap()).collect();
        let ranks: Vec<_> = (0..3).map(|rank| Control::join(rank, &files).unwrap()).collect();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        // The word of the process is the owner's, 64 bytes into its segment.
        ranks[2].store(2, 64, ended.id().into());
        let closed = |visible: bool| all_closed(&ranks[0], [(1, true), (2, visible)].into_iter());
        assert!(!closed(true));
        assert_eq!(ranks[1].load(0, CLOSED_OFFSET), 1);
        assert!(!all_closed(&ranks[1], [(0, true), (2, false)].into_iter()));
        // A process of another namespace may be there though its number is not here.
        assert!(!closed(false));
        // Aborted ranks, too, are done with their windows once all closed.
        ranks[0].abort();
        assert!(closed(true));
        ranks[2].store(2, CLOSED_OFFSET, 1);
        assert!(closed(false));
    }
}
