//! Communicators: made, divided, asked, ended.

use std::collections::HashMap;
use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use beeline::collective::{Communicator, DataType, Factor, Settings, UniqueId};
use beeline::gpu::{DeviceId, ForeignStream, Gpu, Stream};

use crate::abi::{Address, Config, In, Out, RawId, VERSION, export, export_value};
use crate::failure::{self, Failure, IN_PROGRESS, SUCCESS, Status};
use crate::{group, log};

const ALIVE: u64 = 0x6e63_636c_2d62_6565;
const DEAD: u64 = 0xdead_636c_2d62_6565;

/// How long a call or a join waits for a missing rank, without `BEELINE_COMM_TIMEOUT`.
const DEADLINE: Duration = Duration::from_secs(30 * 60);
/// How long the end of a communicator waits for its calls; they go on after it.
const CLOSE_MAX: Duration = Duration::from_secs(30);
/// Streams that a communicator keeps wrapped.
const STREAMS_MAX: usize = 64;
/// `cudaStreamPerThread`: one name for as many streams as there are threads.
const PER_THREAD: usize = 2;
/// Created operations of a communicator.
const OPS_MAX: usize = 1 << 16;

/// What `ncclComm_t` points to. The few bytes are never freed, so that a handle used after its end is an error and not
/// memory of somebody else's.
pub(crate) struct Comm {
    magic: AtomicU64,
    pub(crate) gpu: Gpu,
    pub(crate) device: u32,
    state: RwLock<State>,
    streams: Mutex<Vec<Known>>,
    pub(crate) ops: Mutex<Vec<Option<(DataType, Factor)>>>,
    /// Address and bytes, by handle.
    pub(crate) registered: Mutex<HashMap<u64, (u64, u64)>>,
}

/// A stream by the driver's handle, and by the thread where the handle names a stream of each thread. The driver's number of
/// a stream (`cuStreamGetId`) would tell a destroyed one from the next with its handle, but asking for it ends the capture of a
/// graph.
type Known = ((usize, Option<ThreadId>), Arc<Stream>);

enum State {
    /// The ranks are coming together.
    Joining,
    Ready(Communicator),
    Failed(Failure),
    /// Finalized, aborted or destroyed.
    Ended,
}

/// `ncclComm_t` as an argument.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Handle(*const Comm);

impl Handle {
    const NULL: Self = Self(std::ptr::null());

    pub(crate) fn get(self) -> Result<&'static Comm, Failure> {
        if self.0.is_null() || !self.0.is_aligned() {
            return Err(Failure::argument("the communicator is null"));
        }
        // SAFETY: a C caller passes what a function here gave out, which is never freed.
        let comm = unsafe { &*self.0 };
        match comm.magic.load(Ordering::Acquire) {
            ALIVE => Ok(comm),
            DEAD => Err(Failure::argument("the communicator was destroyed")),
            _ => Err(Failure::argument("this is no communicator of this library")),
        }
    }
}

impl Comm {
    fn new(gpu: Gpu, device: u32) -> &'static Self {
        Box::leak(Box::new(Self {
            magic: AtomicU64::new(ALIVE),
            gpu,
            device,
            state: RwLock::new(State::Joining),
            streams: Mutex::default(),
            ops: Mutex::default(),
            registered: Mutex::default(),
        }))
    }

    /// The rank, once it is one.
    pub(crate) fn ready(&self) -> Result<Communicator, Failure> {
        match &*self.state.read().unwrap_or_else(PoisonError::into_inner) {
            State::Ready(comm) => Ok(comm.clone()),
            State::Joining => {
                Err(Failure::argument("the communicator is not ready yet (ncclInProgress)"))
            }
            State::Failed(failure) => Err(failure.clone()),
            State::Ended => Err(Failure::argument("the communicator was finalized or aborted")),
        }
    }

    /// Notes how joining ended, unless the rank was aborted meanwhile.
    fn joined(&self, result: beeline::Result<Communicator>) -> Result<(), Failure> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*state, State::Joining) {
            if let Ok(comm) = result {
                comm.abort();
            }
            return Err(Failure::usage(
                "the communicator was aborted while its ranks came together",
            ));
        }
        match result {
            Ok(comm) => {
                *state = State::Ready(comm);
                Ok(())
            }
            Err(error) => {
                let failure = Failure::from(error);
                *state = State::Failed(failure.clone());
                Err(failure)
            }
        }
    }

    /// Its rank does not come.
    pub(crate) fn failed(&self, why: &Failure) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Joining) {
            *state = State::Failed(why.clone());
        }
    }

    /// The stream with a handle of the driver.
    pub(crate) fn stream(&self, handle: Address) -> Result<Arc<Stream>, Failure> {
        let key = handle.get() as usize;
        let thread = (key == PER_THREAD).then(|| std::thread::current().id());
        let foreign = match key {
            1 => ForeignStream::LEGACY_DEFAULT,
            PER_THREAD => ForeignStream::PER_THREAD_DEFAULT,
            // SAFETY: the caller passes a stream of its CUDA runtime, which it keeps as this library's page says.
            _ => unsafe { ForeignStream::new(key) },
        };
        let name = (key, thread);
        let mut streams = lock(&self.streams);
        if let Some((_, stream)) = streams.iter().find(|(known, _)| *known == name) {
            return Ok(Arc::clone(stream));
        }
        let stream = Arc::new(self.gpu.foreign_stream(foreign)?);
        let before = (streams.len() >= STREAMS_MAX).then(|| streams.remove(0));
        streams.push((name, Arc::clone(&stream)));
        drop(streams);
        // Without the lock: its end calls the driver.
        drop(before);
        Ok(stream)
    }

    fn end(&self, abort: bool) -> Result<(), Failure> {
        let state = {
            let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *state, State::Ended)
        };
        lock(&self.streams).clear();
        match state {
            State::Ready(comm) if abort => comm.abort(),
            State::Ready(comm) => {
                comm.close(Instant::now() + comm.settings().deadline.min(CLOSE_MAX))?;
            }
            _ => {}
        }
        Ok(())
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn settings(config: Config) -> Settings {
    let mut settings = defaults();
    settings.channels = config.ctas_max;
    // The environment is stronger than the program, as with NCCL.
    settings.copy_engines = policy().unwrap_or(config.policy) & ZERO_CTAS != 0;
    settings
}

/// The flag of `CTAPolicy` that wants no multiprocessor where copy engines will do.
const ZERO_CTAS: u32 = 2;

/// What `NCCL_CTA_POLICY` says: names or numbers, joined by `|`.
fn policy() -> Option<u32> {
    let said = std::env::var("NCCL_CTA_POLICY").ok()?;
    let policy = policy_of(&said);
    if policy.is_none() {
        tracing::warn!("NCCL_CTA_POLICY is {said:?}, not DEFAULT, EFFICIENCY or ZERO: not used");
    }
    policy
}

fn policy_of(said: &str) -> Option<u32> {
    let flag = |name: &str| match name.trim().to_ascii_uppercase().as_str() {
        "DEFAULT" | "0" => Some(0),
        "EFFICIENCY" | "1" => Some(1),
        "ZERO" | "2" => Some(2),
        "3" => Some(3),
        _ => None,
    };
    said.split('|').try_fold(0, |all, name| Some(all | flag(name)?))
}

/// Programs written for NCCL expect that it waits for a late rank (one that loads data, or writes a checkpoint).
fn defaults() -> Settings {
    log::start();
    Settings::from_env_or(DEADLINE)
}

fn ordinal(gpu: &Gpu) -> u32 {
    match gpu.id() {
        DeviceId::Cuda(ordinal) => ordinal,
        _ => 0,
    }
}

/// Makes a handle, gives it to the caller, and joins: at once, at the end of the group, or in the background.
fn join(
    place: Out<Handle>,
    gpu: Gpu,
    blocking: bool,
    work: impl FnOnce() -> beeline::Result<Communicator> + Send + 'static,
) -> Result<(), Failure> {
    place.check()?;
    let device = ordinal(&gpu);
    let comm = Comm::new(gpu, device);
    place.set(Handle(comm))?;
    let run = move || comm.joined(work());
    match (blocking, beeline::collective::group_depth()) {
        (true, 0) => run(),
        (true, _) => {
            group::later(Some(comm), Box::new(run));
            Ok(())
        }
        (false, _) => {
            let started = std::thread::Builder::new()
                .name("beeline-join".to_owned())
                .spawn(move || drop(run()));
            started
                .map_err(|error| Failure { status: failure::SYSTEM, text: error.to_string() })?;
            Err(Failure { status: IN_PROGRESS, text: String::new() })
        }
    }
}

fn init_rank(
    place: Out<Handle>,
    ranks: i32,
    id: RawId,
    rank: i32,
    config: In<u8>,
) -> Result<(), Failure> {
    let config = Config::read(config)?;
    let (Ok(of), Ok(which)) = (u32::try_from(ranks), u32::try_from(rank)) else {
        return Err(Failure::argument(format!("rank {rank} of {ranks}")));
    };
    if which >= of {
        return Err(Failure::argument(format!("rank {rank} of {ranks}")));
    }
    let id = UniqueId::from_bytes(&id.0)?;
    let gpu = Gpu::current_cuda()?;
    let settings = settings(config);
    let device = gpu.clone();
    join(place, gpu, config.blocking, move || {
        Communicator::join(&id, which, of, &device, &settings)
    })
}

fn split(
    comm: Handle,
    color: i32,
    key: i32,
    made: Out<Handle>,
    config: In<u8>,
) -> Result<(), Failure> {
    const NO_COLOR: i32 = -1;
    made.check()?;
    let (parent, config) = (comm.get()?, Config::read(config)?);
    let color = match color {
        NO_COLOR => None,
        color => {
            Some(u32::try_from(color).map_err(|_| Failure::argument(format!("color {color}")))?)
        }
    };
    let (rank, settings) = (parent.ready()?, settings(config));
    let Some(color) = color else {
        made.set(Handle::NULL)?;
        let take_part = move || Ok(rank.split(None, key, &settings).map(drop)?);
        if beeline::collective::group_depth() == 0 {
            return take_part();
        }
        group::later(None, Box::new(take_part));
        return Ok(());
    };
    join(made, parent.gpu.clone(), config.blocking, move || rank.part(color, key, &settings))
}

fn shrink(
    comm: Handle,
    (excluded, count): (In<i32>, i32),
    made: Out<Handle>,
    config: In<u8>,
    flags: i32,
) -> Result<(), Failure> {
    const ABORT: i32 = 1;
    let (parent, config) = (comm.get()?, Config::read(config)?);
    let count = usize::try_from(count).map_err(|_| Failure::argument(format!("{count} ranks")))?;
    if count == 0 || flags & !ABORT != 0 {
        return Err(Failure::argument(format!("{count} ranks to leave out, flags {flags}")));
    }
    made.check()?;
    let (rank, settings) = (parent.ready()?, settings(config));
    let mut list = Vec::new();
    for index in 0..count.min(rank.ranks() as usize + 1) {
        let one = excluded.at(index)?;
        list.push(u32::try_from(one).map_err(|_| Failure::argument(format!("rank {one}")))?);
    }
    // Before anything is ended.
    if let Some(one) = list.iter().find(|one| **one == rank.rank() || **one >= rank.ranks()) {
        let text = format!("rank {} of {} goes on without rank {one}", rank.rank(), rank.ranks());
        return Err(Failure::argument(text));
    }
    if flags & ABORT != 0 {
        rank.abort();
    }
    join(made, parent.gpu.clone(), config.blocking, move || rank.shrink(&list, &settings))
}

export! {
    fn ncclGetVersion, pncclGetVersion(version: Out<i32>) { version.set(VERSION) }

    fn ncclGetUniqueId, pncclGetUniqueId(id: Out<RawId>) {
        id.check()?;
        id.set(RawId(UniqueId::new(defaults().join_deadline)?.to_bytes()))
    }

    fn ncclCommInitRank, pncclCommInitRank(comm: Out<Handle>, ranks: i32, id: RawId, rank: i32) {
        init_rank(comm, ranks, id, rank, Address::default().read()).map_err(group::refused)
    }

    fn ncclCommInitRankConfig, pncclCommInitRankConfig(
        comm: Out<Handle>, ranks: i32, id: RawId, rank: i32, config: Address,
    ) {
        init_rank(comm, ranks, id, rank, config.read()).map_err(group::refused)
    }

    fn ncclCommInitRankScalable, pncclCommInitRankScalable(
        comm: Out<Handle>, ranks: i32, rank: i32, ids: i32, list: In<RawId>, config: Address,
    ) {
        if ids < 1 { return Err(Failure::argument(format!("{ids} identifiers"))); }
        // More than one would share the work of meeting, which one host does not need.
        init_rank(comm, ranks, list.at(0)?, rank, config.read()).map_err(group::refused)
    }

    fn ncclCommInitAll, pncclCommInitAll(comms: Out<Handle>, count: i32, devices: In<i32>) {
        comms.check()?;
        let count = u32::try_from(count).ok().filter(|count| *count > 0)
            .ok_or_else(|| Failure::argument(format!("{count} devices")))?;
        let mut gpus = Vec::new();
        for index in 0..count {
            let device = if devices.is_null() { index } else {
                let device = devices.at(index as usize)?;
                u32::try_from(device).map_err(|_| Failure::argument(format!("device {device}")))?
            };
            gpus.push(Gpu::open(&DeviceId::Cuda(device))?);
        }
        let made = Communicator::local(&gpus, &defaults())?;
        for (index, (gpu, made)) in gpus.into_iter().zip(made).enumerate() {
            let device = ordinal(&gpu);
            let comm = Comm::new(gpu, device);
            comm.joined(Ok(made))?;
            comms.nth(index).set(Handle(comm))?;
        }
        Ok(())
    }

    fn ncclCommFinalize, pncclCommFinalize(comm: Handle) { comm.get()?.end(false) }

    fn ncclCommDestroy, pncclCommDestroy(comm: Handle) {
        if comm.0.is_null() { return Ok(()); }
        let comm = comm.get()?;
        comm.magic.store(DEAD, Ordering::Release);
        // An error of the communicator was told before; the end itself works.
        drop(comm.end(false));
        Ok(())
    }

    fn ncclCommAbort, pncclCommAbort(comm: Handle) {
        if comm.0.is_null() { return Ok(()); }
        let comm = comm.get()?;
        comm.magic.store(DEAD, Ordering::Release);
        comm.end(true)
    }

    fn ncclCommSplit, pncclCommSplit(
        comm: Handle, color: i32, key: i32, made: Out<Handle>, config: Address,
    ) {
        split(comm, color, key, made, config.read()).map_err(group::refused)
    }

    fn ncclCommShrink, pncclCommShrink(
        comm: Handle, excluded: In<i32>, count: i32, made: Out<Handle>, config: Address, flags: i32,
    ) {
        shrink(comm, (excluded, count), made, config.read(), flags).map_err(group::refused)
    }

    fn ncclCommGetAsyncError, pncclCommGetAsyncError(comm: Handle, result: Out<Status>) {
        let comm = comm.get()?;
        let state = comm.state.read().unwrap_or_else(PoisonError::into_inner);
        result.set(match &*state {
            State::Joining => IN_PROGRESS,
            State::Failed(failure) => failure.status,
            State::Ended => SUCCESS,
            State::Ready(rank) => match rank.async_error() {
                None => SUCCESS,
                Some(error) => {
                    let failure = Failure::from(error);
                    failure::note(&failure.text);
                    failure.status
                }
            },
        })
    }

    fn ncclCommCount, pncclCommCount(comm: Handle, count: Out<i32>) {
        count.set(comm.get()?.ready()?.ranks() as i32)
    }

    fn ncclCommCuDevice, pncclCommCuDevice(comm: Handle, device: Out<i32>) {
        device.set(comm.get()?.device as i32)
    }

    fn ncclCommUserRank, pncclCommUserRank(comm: Handle, rank: Out<i32>) {
        rank.set(comm.get()?.ready()?.rank() as i32)
    }

    fn ncclRedOpCreatePreMulSum, pncclRedOpCreatePreMulSum(
        op: Out<i32>, scalar: Address, dtype: i32, residence: i32, comm: Handle,
    ) {
        const DEVICE: i32 = 0;
        const HOST_IMMEDIATE: i32 = 1;
        op.check()?;
        let comm = comm.get()?;
        let dtype = DataType::new(dtype);
        let size = dtype.size_bytes().filter(|_| dtype.is_nccl())
            .ok_or_else(|| Failure::argument(format!("there is no {dtype:?}")))?;
        if scalar.get() == 0 { return Err(Failure::argument("the scalar is null")); }
        let factor = match residence {
            DEVICE => Factor::Device(beeline::core::addr::DevicePtr::new(scalar.get())),
            HOST_IMMEDIATE => {
                let mut bytes = [0; 8];
                for (into, from) in bytes.iter_mut().zip(scalar.read().bytes(size as usize)?) {
                    *into = from;
                }
                Factor::Host(bytes)
            }
            other => return Err(Failure::argument(format!("residence {other}"))),
        };
        let mut ops = lock(&comm.ops);
        let free = ops.iter().position(Option::is_none).unwrap_or(ops.len());
        if free >= OPS_MAX { return Err(Failure::usage(format!("{OPS_MAX} operations exist"))); }
        if free == ops.len() { ops.push(None); }
        if let Some(slot) = ops.get_mut(free) { *slot = Some((dtype, factor)); }
        op.set(5 + free as i32)
    }

    fn ncclRedOpDestroy, pncclRedOpDestroy(op: i32, comm: Handle) {
        let comm = comm.get()?;
        let index = usize::try_from(i64::from(op) - 5).map_err(|_| Failure::argument(format!("operation {op} is built in")))?;
        let gone = lock(&comm.ops).get_mut(index).and_then(Option::take);
        gone.map(drop).ok_or_else(|| Failure::argument(format!("there is no operation {op}")))
    }
}

/// A pointer to text, as a value with a default.
#[repr(transparent)]
struct Text(*const c_char);

impl Default for Text {
    fn default() -> Self {
        Self(c"".as_ptr())
    }
}

export_value! {
    fn ncclGetErrorString, pncclGetErrorString(status: Status) -> Text { Text(failure::words(status).as_ptr()) }
    fn ncclGetLastError, pncclGetLastError(_comm: Handle) -> Text { Text(failure::last()) }
    fn ncclResetDebugInit, pncclResetDebugInit() -> () {}
    fn ncclResetDebugInitInternal, pncclResetDebugInitInternal() -> () {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_named_or_numbered() {
        for (said, policy) in [
            ("ZERO", Some(2)),
            ("zero | Efficiency", Some(3)),
            ("2", Some(2)),
            ("0", Some(0)),
            ("DEFAULT", Some(0)),
            ("", None),
            ("ZERO|", None),
            ("4", None),
        ] {
            assert_eq!(policy_of(said), policy, "{said:?}");
        }
    }
}
