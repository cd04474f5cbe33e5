//! Ranks that make calls together.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_sys::user;

use super::bootstrap::{self, Exchange};
use super::control::Control;
use super::executor::{self, Batch, Executor, Factor, Gathered, Place, Posted, Settings, Setup};
use super::group;
use super::id::UniqueId;
use super::queue::Queue;
use super::watch;
use crate::config::LaunchConfig;
use crate::core::collective::plan::{Link, Planned, Ranks, plan};
use crate::core::collective::{Announcement, Call, Collective, DataType, RedOp};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, Gpu, Stream};
use crate::lock;

/// One rank of a communicator. Cheap to clone; every clone is the same rank.
///
/// Calls are queued in a stream and return; every rank makes the same calls in the same order. A call that
/// cannot be finished (another rank makes another call, is missing or gone) ends by itself after
/// [`Settings::deadline`] at most; [`Communicator::async_error`] then says who was to blame, and every later
/// call fails with the same error. What its output holds is unspecified.
///
/// A foreign stream may be destroyed as soon as the call, or the group that it is in, has returned. A captured graph
/// must have run to its end before the communicator is closed or dropped.
#[derive(Clone)]
pub struct Communicator {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) gpu: Gpu,
    sm: Option<u32>,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    settings: Settings,
    staged: bool,
    pub(super) control: Arc<Control>,
    pub(super) executor: Mutex<Option<Executor>>,
    /// Waits for what was queued when the communicator ends, which is no time to make a stream; `None` on the staged path.
    spare: Option<Stream>,
    pub(super) queue: Mutex<Queue>,
    pub(super) exchange: Mutex<Exchange>,
    pub(super) shrinks: AtomicU64,
    /// Of the process that made it.
    forks: u32,
}

impl UniqueId {
    /// A new identifier. This process listens for the ranks, on the address that packets to the outside leave
    /// from, until all came or `deadline` has passed.
    ///
    /// # Errors
    /// `is_io` where it cannot listen.
    pub fn new(deadline: Duration) -> Result<Self> {
        bootstrap::listen(None, deadline)
    }

    /// [`Self::new`] at an address of this host; port 0 takes a free one.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn at(address: SocketAddr, deadline: Duration) -> Result<Self> {
        bootstrap::listen(Some(address), deadline)
    }
}

impl Communicator {
    /// Joins the communicator `id` as `rank` of `ranks` (at most 256), with `gpu`. Returns once all ranks came and are
    /// ready; several ranks of one process each need a thread here (or [`Self::local`]).
    ///
    /// # Errors
    /// `is_timeout` after [`Settings::join_deadline`], naming who did not come; `is_permission_denied` with the wrong
    /// identifier; `is_no_route` (code `collective-spans-hosts`) where the ranks are on several hosts, and where a path
    /// between ranks drops writes; `is_refused` for ranks that contradict each other.
    pub fn join(
        id: &UniqueId,
        rank: u32,
        ranks: u32,
        gpu: &Gpu,
        settings: &Settings,
    ) -> Result<Self> {
        user::watch_forks();
        let deadline = Instant::now() + settings.join_deadline;
        let mut exchange = Exchange::join(id, rank, ranks, deadline)?;
        let segment = Control::segment()?;
        let all = exchange.all_gather(&[], &[segment], deadline)?;
        let files: Vec<&OwnedFd> = all.iter().filter_map(|given| given.fds.first()).collect();
        if files.len() != ranks as usize {
            return Err(Error::refused("a rank gave no shared memory"));
        }
        let files: Vec<_> = files.iter().map(|fd| fd.as_fd()).collect();
        let control = Arc::new(Control::join(rank, &files)?);
        // Processes are looked up once all have written theirs.
        exchange.all_gather(&[], &[], deadline)?;
        control.note_processes();
        let executor = Executor::join(&mut Setup {
            gpu: gpu.clone(),
            rank,
            ranks,
            control: Arc::clone(&control),
            exchange: &mut |bytes: &[u8], fds: Vec<OwnedFd>| -> Result<Vec<Gathered>> {
                exchange.all_gather(bytes, &fds, deadline)
            },
            settings: settings.clone(),
        })?;
        let spare = if executor.is_staged() { None } else { Some(gpu.stream()?) };
        if !executor.is_staged() && ranks > 1 {
            watch::over(&control)?;
        }
        // Nobody makes a call before everybody is ready for it.
        exchange.all_gather(&[], &[], deadline)?;
        Ok(Self {
            inner: Arc::new(Inner {
                sm: compute_capability(gpu),
                gpu: gpu.clone(),
                rank,
                ranks,
                settings: settings.clone(),
                staged: executor.is_staged(),
                control,
                executor: Mutex::new(Some(executor)),
                spare,
                queue: Mutex::new(Queue::new(ranks)),
                exchange: Mutex::new(exchange),
                shrinks: AtomicU64::new(0),
                forks: user::forks(),
            }),
        })
    }

    /// All ranks of a communicator in this process, one a device, in the order of `gpus`.
    ///
    /// # Errors
    /// As [`Self::join`]; the first rank's that failed.
    pub fn local(gpus: &[Gpu], settings: &Settings) -> Result<Vec<Self>> {
        let ranks = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
        if ranks == 0 {
            return Err(Error::refused("a communicator without a device"));
        }
        let id = UniqueId::at(SocketAddr::from(([127, 0, 0, 1], 0)), settings.join_deadline)?;
        in_parallel(
            (0..ranks)
                .zip(gpus)
                .map(|(rank, gpu)| move || Self::join(&id, rank, ranks, gpu, settings)),
        )
    }

    /// Joins the communicator of all processes that `torchrun` (or what follows it) started, as the environment says
    /// (see [`LaunchConfig::from_env`]). Rank 0 listens at the port after `MASTER_PORT`.
    ///
    /// # Errors
    /// `is_not_found` outside such a job; as [`Self::join`].
    pub fn launched(gpu: &Gpu, settings: &Settings) -> Result<Self> {
        let Some(launch) = LaunchConfig::from_env() else {
            return Err(Error::new(
                Kind::NotFound,
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set",
            )
            .remedy("start the program with torchrun, or pass a unique identifier yourself"));
        };
        let port =
            launch.port.checked_add(1).ok_or_else(|| Error::refused("MASTER_PORT is 65535"))?;
        let found = (launch.address.as_str(), port).to_socket_addrs();
        let found = found
            .map_err(|error| Error::io(format_args!("look up {}", launch.address), error))?
            .next();
        let address = found.ok_or_else(|| {
            Error::new(Kind::NotFound, format!("{} has no address", launch.address))
        })?;
        let id = UniqueId::agreed(address, &launch.job);
        if launch.rank == 0 {
            bootstrap::listen_agreed(id, settings.join_deadline)?;
        }
        Self::join(&id, launch.rank, launch.ranks, gpu, settings)
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.inner.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.inner.ranks
    }

    /// The device of this rank.
    pub fn gpu(&self) -> &Gpu {
        &self.inner.gpu
    }

    /// What it was made with.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Whether both are the same rank of the same communicator.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// How a call would travel, why not otherwise, and how long it is predicted to take between real devices.
    pub fn explain(&self, call: &Call) -> Planned {
        let slowest =
            if self.inner.staged { Link::Same } else { Ranks::like_h200(self.inner.ranks).slowest };
        plan(call, &Ranks { slowest, ..Ranks::like_h200(self.inner.ranks) })
    }

    /// Every rank's `output` becomes the reduction of all `input`s.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn all_reduce(
        &self,
        input: &Buffer,
        output: &Buffer,
        (count, dtype, op): (u64, DataType, RedOp),
        stream: &Arc<Stream>,
    ) -> Result<()> {
        let call = Call::new(Collective::AllReduce, count, dtype).op(op);
        self.call(
            call,
            Place::Buffer(input.clone(), 0),
            Place::Buffer(output.clone(), 0),
            None,
            stream,
        )
    }

    /// Nobody's stream goes on before everybody's came here.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn barrier(&self, stream: &Arc<Stream>) -> Result<()> {
        let call = Call::new(Collective::Barrier, 0, DataType::U8);
        self.call(call, Place::None, Place::None, None, stream)
    }

    /// Queues any call. In a [group](super::group()) it is queued when the outermost group ends.
    ///
    /// `input` and `output` are what [`Call::input_bytes`] and [`Call::output_bytes`] say for this rank, and may
    /// overlap as NCCL's in-place calls do. A pre-multiplied sum takes a `factor`.
    ///
    /// # Errors
    /// `is_refused` for a call that is not possible (code `collective-invalid`); why the communicator stopped; what the
    /// stream says. `stream-capturing` while the stream is captured, where calls go through host memory.
    pub fn call(
        &self,
        call: Call,
        input: Place,
        output: Place,
        factor: Option<Factor>,
        stream: &Arc<Stream>,
    ) -> Result<()> {
        let posted = Posted { call, sequence: 0, input, output, factor };
        let checked = self.inner.check(&posted);
        group::post(self, checked.map(|()| posted), stream)
    }

    /// All-to-all with counts and displacements (in elements) per rank, as `MPI_Alltoallv` has them.
    ///
    /// # Errors
    /// As [`Self::call`]; `is_refused` where a list has not one entry a rank.
    pub fn all_to_all_v(
        &self,
        (input, send): (&Buffer, &[(u64, u64)]),
        (output, receive): (&Buffer, &[(u64, u64)]),
        dtype: DataType,
        stream: &Arc<Stream>,
    ) -> Result<()> {
        let ranks = self.ranks() as usize;
        if send.len() != ranks || receive.len() != ranks {
            let text = format!("{} and {} counts for {ranks} ranks", send.len(), receive.len());
            return Err(Error::refused(text).coded("collective-invalid"));
        }
        let size = dtype.size_bytes().unwrap_or(1);
        let at = |displacement: u64| {
            displacement
                .checked_mul(size)
                .ok_or_else(|| Error::refused("a displacement beyond 64 bits"))
        };
        group(|| {
            for (peer, ((out, out_at), (back, back_at))) in (0..).zip(send.iter().zip(receive)) {
                let one = Call::new(Collective::Send, *out, dtype).root(peer);
                let input = Place::Buffer(input.clone(), at(*out_at)?);
                self.call(one, input, Place::None, None, stream)?;
                let one = Call::new(Collective::Recv, *back, dtype).root(peer);
                let output = Place::Buffer(output.clone(), at(*back_at)?);
                self.call(one, Place::None, output, None, stream)?;
            }
            Ok(())
        })
    }

    /// Says that calls will often receive in this memory; a hint, and of this rank alone. It does nothing but where
    /// [`Settings::straight`] is set (`BEELINE_COMM_STRAIGHT=1`). Other ranks for which it is set, too, then store large parts
    /// of moves in which they also receive straight into it, where it is device memory of one `cudaMalloc` on the rank's own device (between ranks of
    /// one process also other device memory that the sender's device reaches) and begins at a multiple of 16 bytes. At
    /// most 64 registrations of a rank count at a time. May wait for the device, as freeing memory does.
    ///
    /// It holds until [`Self::deregister`], which must not come before the calls that use the memory have ended, and
    /// before graphs with such calls are gone. A rank that has mapped the memory keeps it from being given back to
    /// the device until that rank itself registers or deregisters something, or ends its communicator (of at most 8 allocations: then
    /// it maps no more). After a failure
    /// or an abort, memory that a call was to receive in is let alone by all others once the rank's own kernel has
    /// ended (it waits for senders that have begun, 50 ms at most).
    pub fn register(&self, ptr: crate::core::addr::DevicePtr, len: u64) {
        if self.inner.own().is_ok()
            && let Some(executor) = lock(&self.inner.executor).as_mut()
        {
            executor.register(ptr, len);
        }
    }

    /// Says by all ranks together, which wait for each other here, where memory is: with [`Settings::copy_engines`], large all-gathers,
    /// all-to-alls and broadcasts go by copies where what is sent (of a broadcast and of gathers in place: what is received) lies at
    /// the same place of such memory on every rank. All ranks register as many bytes, in the same order. Without that setting
    /// on all ranks, or where several of them are of one process, it does nothing. [`Self::register`] is another thing, of each rank alone, and may
    /// be done besides. [`Self::deregister`] undoes both.
    ///
    /// # Errors
    /// Why the communicator stopped; `is_timeout` where not all ranks came within [`Settings::join_deadline`].
    pub fn register_window(&self, ptr: crate::core::addr::DevicePtr, len: u64) -> Result<()> {
        self.inner.own()?;
        let offer = {
            let executor = lock(&self.inner.executor);
            executor.as_ref().ok_or_else(aborted)?.window_offer(ptr, len)
        };
        let Some(offer) = offer else { return Ok(()) };
        let deadline = Instant::now() + self.inner.settings.join_deadline;
        let mut exchange = lock(&self.inner.exchange);
        let offers = exchange.all_gather(&offer, &[], deadline)?;
        let offers: Vec<Vec<u8>> = offers.into_iter().map(|one| one.bytes).collect();
        let opened = match lock(&self.inner.executor).as_mut() {
            Some(executor) => executor.window_open(ptr, len, &offers),
            None => None,
        };
        let whole = opened.as_ref().is_some_and(executor::Opened::is_whole);
        let answers = exchange.all_gather(&[u8::from(whole)], &[], deadline)?;
        let all = answers.iter().all(|answer| answer.bytes == [1]);
        if let (Some(executor), Some(opened)) = (lock(&self.inner.executor).as_mut(), opened) {
            executor.window_keep(opened, all);
        }
        Ok(())
    }

    /// Undoes a [`Self::register`] or [`Self::register_window`] of the same bytes, before the memory is freed. May wait for the device, as freeing memory
    /// does.
    pub fn deregister(&self, ptr: crate::core::addr::DevicePtr, len: u64) {
        if self.inner.own().is_ok()
            && let Some(executor) = lock(&self.inner.executor).as_mut()
        {
            executor.forget(ptr, len);
        }
    }

    /// How many copies this rank has queued where kernels would do as well: large moves of groups that have all ranks, and parts that
    /// it pulled from windows ([`Self::register_window`]).
    pub fn copied(&self) -> u64 {
        lock(&self.inner.executor).as_ref().map_or(0, Executor::copied)
    }

    /// How many parts this rank has stored straight into registered memory of other ranks, in calls that have ended.
    pub fn straight(&self) -> u64 {
        lock(&self.inner.executor).as_ref().map_or(0, Executor::straight)
    }

    /// Why the communicator stopped, if it did. One atomic load while all is well.
    pub fn async_error(&self) -> Option<Error> {
        if !self.inner.control.has_failed() {
            return self.inner.control.is_aborted().then(aborted);
        }
        self.inner.control.failure().map(|failure| failure.error())
    }

    /// Stops this rank: calls in flight end early, streams go on, later calls fail. Other ranks learn of it when they
    /// wait for this one. Returns at once; waits for no stream and no rank. Nothing in a process forked from the rank's.
    pub fn abort(&self) {
        if self.inner.own().is_err() {
            return;
        }
        self.inner.control.abort();
        // Another thread may be inside a call, compiling kernels; then the last handle closes the executor.
        let executor = match self.inner.executor.try_lock() {
            Ok(mut executor) => executor.take(),
            Err(_) => None,
        };
        if let Some(executor) = executor {
            let tail = lock(&self.inner.queue).tail(&executor, self.inner.spare.as_ref());
            executor.close(tail, Instant::now());
        }
    }

    /// Lets what was queued finish, until `deadline`, and frees what the rank holds. Later calls fail.
    ///
    /// # Errors
    /// Why the communicator had stopped before.
    pub fn close(&self, deadline: Instant) -> Result<()> {
        self.inner.own()?;
        let executor = lock(&self.inner.executor).take();
        if let Some(executor) = executor {
            let tail = lock(&self.inner.queue).tail(&executor, self.inner.spare.as_ref());
            executor.close(tail, deadline);
        }
        self.async_error().map_or(Ok(()), Err)
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

/// Bytes of a call from which on a part of it may go straight into registered memory.
const STRAIGHT_MIN: u64 = 512 << 10;

impl Inner {
    pub(super) const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether this is the process that joined, and no child of it: that one shares memory with the ranks, and has none of the
    /// driver's and none of the threads. Whatever it did would be done to its parent.
    pub(super) fn own(&self) -> Result<()> {
        if user::forks() == self.forks {
            return Ok(());
        }
        let text = "this process was forked from the one that joined the communicator";
        let error = Error::refused(text).coded("collective-invalid");
        Err(error.remedy("join in the child, or start it anew (spawn) instead of forking"))
    }

    /// Whether the call can be made at all.
    fn check(&self, posted: &Posted) -> Result<()> {
        self.own()?;
        let invalid = |error: Error| error.coded("collective-invalid");
        let call = &posted.call;
        call.check(self.ranks, self.sm)
            .map_err(|error| invalid(Error::refused(error.to_string())))?;
        if call.kind == Collective::AllToAllV {
            return Err(invalid(Error::refused("an all-to-all-v is made of sends and receives")));
        }
        let multiplies = call.kind.reduces() && call.op == RedOp::PRE_MUL_SUM;
        if multiplies != posted.factor.is_some() {
            return Err(invalid(Error::refused(
                "a pre-multiplied sum, and nothing else, has a factor",
            )));
        }
        Ok(())
    }

    /// Nanoseconds that a call is predicted to take.
    pub(super) fn predict(&self, call: &Call) -> u64 {
        let slowest = if self.staged { Link::Same } else { Ranks::like_h200(self.ranks).slowest };
        let planned = plan(call, &Ranks { slowest, ..Ranks::like_h200(self.ranks) });
        planned.predicted_ns.first().copied().unwrap_or(0)
    }

    /// To be called before anything of a group is queued that has `posted` for this rank.
    pub(super) fn prepare(&self, posted: &Posted) {
        if !self.settings.straight {
            return;
        }
        let size = posted.call.dtype.size_bytes().unwrap_or(1);
        if posted.call.count.saturating_mul(size) >= STRAIGHT_MIN
            && let Some(executor) = lock(&self.executor).as_mut()
        {
            executor.prepare();
        }
    }

    /// Queues what one group (or one call outside of any) has for this rank.
    pub(super) fn queue(&self, all: Vec<group::Queued>) -> Result<()> {
        if self.control.has_failed()
            && let Some(failure) = self.control.failure()
        {
            return Err(failure.error());
        }
        let (transfers, collectives): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(posted, _)| posted.call.kind.is_pairwise());
        let mut executor = lock(&self.executor);
        let Some(executor) = executor.as_mut().filter(|_| !self.control.is_aborted()) else {
            return Err(aborted());
        };
        let mut queue = lock(&self.queue);
        for (mut posted, stream) in collectives {
            queue.turn_to(executor, &stream)?;
            posted.sequence = queue.collectives + 1;
            let announcement = Announcement { sequence: posted.sequence, call: posted.call };
            queue.enqueue(executor, &Batch::Collective(posted), &stream)?;
            // Kernels tell each other what they do; this is for people who ask what a rank did last.
            if !self.staged {
                self.control.announce(&announcement);
            }
            queue.collectives += 1;
        }
        let Some(stream) = transfers.first().map(|(_, stream)| Arc::clone(stream)) else {
            return Ok(());
        };
        let moves: Vec<_> =
            transfers.into_iter().filter(|(posted, _)| posted.call.count > 0).collect();
        if moves.is_empty() {
            return Ok(());
        }
        queue.turn_to(executor, &stream)?;
        let last = queue.transfers(executor, moves, &stream)?;
        if let (false, Some(last)) = (self.staged, last) {
            self.control.announce_transfer(&last);
        }
        Ok(())
    }

    /// After the last call of a group, or a call outside of any: from here on the stream may be destroyed.
    pub(super) fn settle(&self) -> Result<()> {
        lock(&self.queue).settle()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.own().is_err() {
            // Its end would be the parent's, and a lock may have been held when the parent forked.
            if let Ok(mut executor) = self.executor.try_lock() {
                std::mem::forget(executor.take());
            }
            std::mem::forget(self.spare.take());
            return;
        }
        if let Some(executor) = lock(&self.executor).take() {
            let tail = lock(&self.queue).tail(&executor, self.spare.as_ref());
            executor.close(tail, Instant::now());
        }
    }
}

/// Runs all at once, each on a thread of its own; their results in order, or the first failure.
pub(super) fn in_parallel<T: Send>(
    all: impl Iterator<Item = impl FnOnce() -> Result<T> + Send>,
) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = all
            .map(|one| {
                std::thread::Builder::new().name("beeline-join".to_owned()).spawn_scoped(scope, one)
            })
            .collect();
        let results: Vec<Result<T>> = threads
            .into_iter()
            .map(|thread| match thread.map(std::thread::ScopedJoinHandle::join) {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => {
                    Err(Error::refused("a thread that joined a communicator ended early"))
                }
                Err(error) => Err(Error::io("start a thread", error)),
            })
            .collect();
        results.into_iter().collect()
    })
}

fn aborted() -> Error {
    Error::new(Kind::Cancelled, "this rank aborted or closed the communicator")
        .coded("collective-aborted")
}

/// Times ten; `None` for a simulated device, which does everything.
fn compute_capability(gpu: &Gpu) -> Option<u32> {
    let (major, minor) = gpu.info().cuda?.compute_capability;
    Some(major * 10 + minor)
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Communicator(rank {} of {}, {})",
            self.inner.rank,
            self.inner.ranks,
            self.inner.gpu.id()
        )
    }
}
