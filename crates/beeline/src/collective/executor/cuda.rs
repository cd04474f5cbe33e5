//! Kernels of CUDA devices.
//!
//! Every rank has one window of device memory (at most 64 MiB), which all others of the host write
//! through peer access or CUDA IPC; what a user's buffer holds goes through it, so no buffer has to be
//! known to the others. Small parts travel as packets that carry their flag (`bl_ll_*`), larger ones as
//! chunks behind flags, sent by one half of the threads while the other half reduces (`bl_push_*`). The
//! counters that both need are in the windows, so a captured graph can be replayed. Which of the two a part
//! takes depends on its size alone, since both sides must choose the same.

mod join;
mod launch;
mod report;
mod rounds;
mod verify;

pub(in crate::collective) use report::{REPORT_OFFSET, WAITING_OFFSET, failure, failure_of_others};

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::collective::{Args, Comm, KernelSet, Kernels, MoveArgs, ReduceArgs, Shape};
use beeline_sys::cuda::{Context, DeviceMem, HostRegistration, Stream as Handle};

use super::staged::process_is_gone;
use super::{Batch, Setup, Tail};
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
    /// Kernels used so far, few enough to be searched.
    kernels: Vec<(KernelSet, Arc<Kernels>)>,
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

    pub(super) fn enqueue(&mut self, batch: &Batch, stream: &Stream) -> Result<()> {
        let handle = stream.as_cuda().ok_or_else(|| {
            Error::refused(format!(
                "the stream is of {}, the rank of {}",
                stream.gpu().id(),
                self.device
            ))
        })?;
        match batch {
            Batch::Collective(posted) => self.collective(posted, handle),
            Batch::Transfers(list) => self.transfers(list, handle),
        }
    }

    /// Nothing to do: data goes through the windows, wherever it comes from.
    pub(super) fn register(&mut self, _ptr: DevicePtr, _len: u64) -> Result<()> {
        Ok(())
    }

    pub(super) fn forget(&mut self, _ptr: DevicePtr) {}

    /// Waits for the kernels until `deadline`. Windows and control memory stay until the last one has ended, even
    /// where that is later.
    pub(super) fn close(self, tail: Tail, deadline: Instant) {
        while !tail.is_done() && Instant::now() < deadline {
            std::thread::sleep(CLOSE_PAUSE);
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
        let queued = stream.launch_collective(&kernels, shape, Args::Move(args), held);
        queued.map_err(|error| self.failed("queue a collective", error))
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
        queued.map_err(|error| self.failed("queue a collective", error))
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
