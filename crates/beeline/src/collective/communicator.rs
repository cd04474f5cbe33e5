//! Ranks that make calls together.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::bootstrap::{self, Exchange};
use super::control::Control;
use super::executor::{Batch, Executor, Factor, Gathered, Place, Posted, Settings, Setup, Tail};
use super::group;
use super::id::{UNIQUE_ID_BYTES, UniqueId};
use super::watch;
use crate::config::LaunchConfig;
use crate::core::collective::plan::{Link, Planned, Ranks, plan};
use crate::core::collective::{Announcement, Call, Collective, DataType, RedOp};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, Event, Gpu, Stream};
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
    gpu: Gpu,
    sm: Option<u32>,
    rank: u32,
    ranks: u32,
    settings: Settings,
    staged: bool,
    control: Arc<Control>,
    executor: Mutex<Option<Executor>>,
    queue: Mutex<Queue>,
    exchange: Mutex<Exchange>,
    shrinks: AtomicU64,
}

/// Where the order of calls stands.
#[derive(Debug, Default)]
struct Queue {
    collectives: u64,
    sends: Vec<u64>,
    receives: Vec<u64>,
    /// The stream of calls behind which no event stands yet; only inside of a call or a group.
    open: Option<Arc<Stream>>,
    last: Option<Last>,
}

/// Where the calls queued so far end.
#[derive(Debug)]
struct Last {
    stream: Arc<Stream>,
    /// Behind the last call, in a stream that somebody may have destroyed since. One of this library lives as long as
    /// its handle; there an event is recorded when somebody needs it, not by each call.
    event: Option<Event>,
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
        // Nobody makes a call before everybody is ready for it.
        exchange.all_gather(&[], &[], deadline)?;
        if !executor.is_staged() && ranks > 1 {
            watch::over(&control)?;
        }
        let counts = vec![0; ranks as usize];
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
                queue: Mutex::new(Queue {
                    sends: counts.clone(),
                    receives: counts,
                    ..Queue::default()
                }),
                exchange: Mutex::new(exchange),
                shrinks: AtomicU64::new(0),
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

    /// Says that calls will use this memory often; a hint.
    ///
    /// # Errors
    /// What the device says.
    pub fn register(&self, ptr: crate::core::addr::DevicePtr, len: u64) -> Result<()> {
        lock(&self.inner.executor).as_mut().map_or(Ok(()), |executor| executor.register(ptr, len))
    }

    /// Undoes [`Self::register`], before the memory is freed.
    pub fn deregister(&self, ptr: crate::core::addr::DevicePtr) {
        if let Some(executor) = lock(&self.inner.executor).as_mut() {
            executor.forget(ptr);
        }
    }

    /// Why the communicator stopped, if it did. One atomic load while all is well.
    pub fn async_error(&self) -> Option<Error> {
        if !self.inner.control.has_failed() {
            return self.inner.control.is_aborted().then(aborted);
        }
        self.inner.control.failure().map(|failure| failure.error())
    }

    /// Stops this rank: calls in flight end early, streams go on, later calls fail. Other ranks learn of it when they
    /// wait for this one. Returns at once; waits for no stream and no rank.
    pub fn abort(&self) {
        self.inner.control.abort();
        // Another thread may be inside a call, compiling kernels; then the last handle closes the executor.
        let executor = match self.inner.executor.try_lock() {
            Ok(mut executor) => executor.take(),
            Err(_) => None,
        };
        if let Some(executor) = executor {
            executor.close(lock(&self.inner.queue).tail(), Instant::now());
        }
    }

    /// Lets what was queued finish, until `deadline`, and frees what the rank holds. Later calls fail.
    ///
    /// # Errors
    /// Why the communicator had stopped before.
    pub fn close(&self, deadline: Instant) -> Result<()> {
        let executor = lock(&self.inner.executor).take();
        if let Some(executor) = executor {
            let tail = lock(&self.inner.queue).tail();
            executor.close(tail, deadline);
        }
        self.async_error().map_or(Ok(()), Err)
    }

    /// Divides the ranks: those of one `color` become a communicator, ordered by `key` and then by rank. `None` as color
    /// takes part and joins none. All ranks are inside this call at once.
    ///
    /// # Errors
    /// As [`Self::join`]; `is_io` where a rank has left.
    pub fn split(&self, color: Option<u32>, key: i32, settings: &Settings) -> Result<Option<Self>> {
        let deadline = Instant::now() + settings.join_deadline;
        let mut mine = vec![u8::from(color.is_some())];
        mine.extend(color.unwrap_or(0).to_le_bytes());
        mine.extend(key.to_le_bytes());
        let mut exchange = lock(&self.inner.exchange);
        let all = exchange.all_gather(&mine, &[], deadline)?;
        let mut members: Vec<(i32, u32)> = (0..)
            .zip(&all)
            .filter_map(|(rank, given)| {
                let (used, rest) = given.bytes.split_first()?;
                let (theirs, key) = rest.split_first_chunk::<4>()?;
                let key = i32::from_le_bytes(*key.first_chunk::<4>()?);
                let same = *used == 1 && Some(u32::from_le_bytes(*theirs)) == color;
                same.then_some((key, rank))
            })
            .collect();
        members.sort_unstable();
        let place = members.iter().position(|(_, rank)| *rank == self.inner.rank);
        let id = match place {
            Some(0) => UniqueId::new(settings.join_deadline)?.to_bytes().to_vec(),
            _ => Vec::new(),
        };
        let ids = exchange.all_gather(&id, &[], deadline)?;
        drop(exchange);
        let Some(((_, leader), place)) = members.first().zip(place) else { return Ok(None) };
        let bytes = ids.get(*leader as usize).map(|given| given.bytes.as_slice());
        let bytes = bytes.and_then(|bytes| bytes.first_chunk::<UNIQUE_ID_BYTES>());
        let bytes =
            bytes.ok_or_else(|| Error::refused(format!("rank {leader} made no identifier")))?;
        let id = UniqueId::from_bytes(bytes)?;
        Self::join(&id, place as u32, members.len() as u32, &self.inner.gpu, settings).map(Some)
    }

    /// [`Self::split`] for a rank that has a color.
    ///
    /// # Errors
    /// As [`Self::split`].
    pub fn part(&self, color: u32, key: i32, settings: &Settings) -> Result<Self> {
        let part = self.split(Some(color), key, settings)?;
        part.ok_or_else(|| Error::refused(format!("rank {} is in no part", self.inner.rank)))
    }

    /// A communicator of all ranks but `excluded`, whose processes may be gone. All others are inside this call at once, and
    /// this one works no longer where it had failed; its calls in flight may be anywhere.
    ///
    /// # Errors
    /// `is_refused` for a list with this rank, with ranks that are none, or with all; `is_timeout` where the others
    /// exclude other ranks or do not come; as [`Self::join`].
    pub fn shrink(&self, excluded: &[u32], settings: &Settings) -> Result<Self> {
        let Inner { rank, ranks, .. } = *self.inner;
        if excluded.contains(&rank) || excluded.iter().any(|other| *other >= ranks) {
            let text = format!("rank {rank} of {ranks} cannot go on without {excluded:?}");
            return Err(Error::refused(text).coded("collective-invalid"));
        }
        let left: Vec<u32> = (0..ranks).filter(|one| !excluded.contains(one)).collect();
        let leader = left.first().copied().unwrap_or(rank);
        // Survivors that exclude the same ranks for the same time find each other by this number.
        let number = self.inner.shrinks.load(Ordering::Relaxed) + 1;
        let tag = left.iter().fold(number, |tag, one| {
            Call::new(Collective::Barrier, u64::from(*one) + 1, DataType::U8).agreement(tag)
        });
        let deadline = Instant::now() + settings.join_deadline;
        let id = if leader == rank {
            let id = UniqueId::new(settings.join_deadline)?;
            self.inner.control.post(tag, &id.to_bytes());
            id
        } else {
            loop {
                if let Some(bytes) = self.inner.control.posted(leader, tag) {
                    break UniqueId::from_bytes(&bytes)?;
                }
                if Instant::now() >= deadline {
                    let text = format!("rank {leader} did not start to go on without {excluded:?}");
                    return Err(Error::new(Kind::Timeout, text));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let place = left.iter().position(|one| *one == rank).unwrap_or(0);
        let joined = Self::join(&id, place as u32, left.len() as u32, &self.inner.gpu, settings);
        // An attempt that failed does not count, since it may have failed on some ranks only, or for want of them.
        match joined.is_ok() {
            true => self.inner.shrinks.store(number, Ordering::Relaxed),
            false if leader == rank => self.inner.control.unpost(),
            false => {}
        }
        joined
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

impl Inner {
    /// Whether the call can be made at all.
    fn check(&self, posted: &Posted) -> Result<()> {
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
            queue.turn_to(&stream)?;
            posted.sequence = queue.collectives + 1;
            let announcement = Announcement { sequence: posted.sequence, call: posted.call };
            executor.enqueue(&Batch::Collective(posted), &stream)?;
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
        queue.turn_to(&stream)?;
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
        if let Some(executor) = lock(&self.executor).take() {
            let tail = lock(&self.queue).tail();
            executor.close(tail, Instant::now());
        }
    }
}

impl Queue {
    /// Makes `stream`, which the next call is for, wait for what was queued in another one.
    fn turn_to(&mut self, stream: &Arc<Stream>) -> Result<()> {
        if self.open.as_ref().is_some_and(|open| Arc::ptr_eq(open, stream)) {
            return Ok(());
        }
        self.settle()?;
        if let Some(last) = self.last.as_ref().filter(|last| !Arc::ptr_eq(&last.stream, stream)) {
            let waits = last.event().and_then(|event| stream.wait_event(&event));
            waits.or_else(unless_capturing)?;
        }
        self.open = Some(Arc::clone(stream));
        Ok(())
    }

    /// Records where the calls of the open stream end, where it would be too late afterwards.
    fn settle(&mut self) -> Result<()> {
        let Some(stream) = self.open.take() else { return Ok(()) };
        let event = match stream.as_cuda().is_some_and(|handle| !handle.is_own()) {
            false => None,
            true => match stream.record() {
                Ok(event) => Some(event),
                Err(error) => {
                    let result = unless_capturing(error);
                    if result.is_err() {
                        self.open = Some(stream);
                    }
                    return result;
                }
            },
        };
        self.last = Some(Last { stream, event });
        Ok(())
    }

    /// Where everything that was queued ends.
    fn tail(&mut self) -> Tail {
        match self.settle().and_then(|()| self.last.as_ref().map(Last::event).transpose()) {
            Ok(None) => Tail::Idle,
            Ok(Some(event)) => Tail::Event(event),
            Err(error) => {
                tracing::warn!(%error, "no event can be recorded behind the calls of a communicator");
                Tail::Unknown
            }
        }
    }

    fn transfers(
        &mut self,
        executor: &mut Executor,
        all: Vec<(Posted, Arc<Stream>)>,
        stream: &Arc<Stream>,
    ) -> Result<Option<Announcement>> {
        let mut others: Vec<Arc<Stream>> = Vec::new();
        for (_, other) in &all {
            if !Arc::ptr_eq(other, stream) && !others.iter().any(|known| Arc::ptr_eq(known, other))
            {
                stream.wait_event(&other.record()?)?;
                others.push(Arc::clone(other));
            }
        }
        let (mut sends, mut receives) = (self.sends.clone(), self.receives.clone());
        let mut batch = Vec::with_capacity(all.len());
        for (mut posted, _) in all {
            let counts =
                if posted.call.kind == Collective::Send { &mut sends } else { &mut receives };
            if let Some(count) = counts.get_mut(posted.call.root as usize) {
                *count += 1;
                posted.sequence = *count;
            }
            batch.push(posted);
        }
        let last = batch.last();
        let last = last.map(|one| Announcement { sequence: one.sequence, call: one.call });
        executor.enqueue(&Batch::Transfers(batch), stream)?;
        (self.sends, self.receives) = (sends, receives);
        if !others.is_empty() {
            let done = stream.record()?;
            // The second event lets go of the first, so that the end of a handle need not touch the stream.
            others.iter().try_for_each(|other| {
                other.wait_event(&done)?;
                other.record().map(drop)
            })?;
        }
        Ok(last)
    }
}

impl Last {
    fn event(&self) -> Result<Event> {
        self.event.clone().map_or_else(|| self.stream.record(), Ok)
    }
}

/// Between a graph and what is outside of it the program keeps the order, as with CUDA itself.
fn unless_capturing(error: Error) -> Result<()> {
    if error.code() == "stream-capturing" { Ok(()) } else { Err(error) }
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
