//! Collectives through host memory: what a simulated GPU has for peer access, and what CUDA devices use
//! that cannot reach each other.
//!
//! Every rank has a shared segment that all ranks map (flags, scratch, slots for transfers) and a thread
//! that interprets schedules ([`crate::core::collective::schedule`]). A call goes like this:
//!
//! - [`enqueue`](Staged::enqueue) records an event in the caller's stream, queues a job for the thread and
//!   makes the stream wait for the job's ticket, a word in pinned memory. It never waits for another rank.
//! - The thread waits for the event, agrees with the others, and then, round by round, copies a piece of the
//!   input out of the device (in a stream of its own), runs the steps, and copies the result back.
//! - The last thing is the ticket: also after a failure or an abort, so that no stream hangs.

mod meet;
mod run;
mod transfer;

pub(in crate::collective) use meet::process_is_gone;

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use beeline_core::addr::DevicePtr;
use beeline_core::reason::{Code, Reason};
use beeline_sys::mem::{HostMem, memfd};

use super::{Batch, Factor, Gathered, Place, Posted, Settings, Setup};
use crate::collective::control::{Control, Failure, RANKS_MAX};
use crate::core::collective::plan::{Link, Ranks, plan};
use crate::core::collective::{Algorithm, Call, Collective};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, Compare, Event, Gpu, PinnedMem, Stream};
use crate::{lock, wait_timeout};

// A segment: what is where, in bytes. Words are 64 bits and written by the owner of the segment, except
// scratch, slots and the words of the test, which peers write.

/// Flags of schedules: one word per receiver and flag, the number of the last round signalled.
const FLAGS: u64 = 0;
/// Transfers: 64 bytes per peer, see [`transfer`].
const LINKS: u64 = 8 << 10;
/// The factor of the pre-multiplied sum this rank is in.
const FACTOR: u64 = 24 << 10;
/// One word per peer, written by it when the communicator is made.
const TESTED: u64 = 26 << 10;
/// Scratch of schedules, then slots of transfers, one per peer.
const DATA: u64 = 32 << 10;

/// Jobs that wait for the thread of a rank at most; the next caller waits for room.
const JOBS_MAX: usize = 1 << 17;
/// Bounds of the scratch.
const CHUNK_MIN: u64 = 64 << 10;
const CHUNK_MAX: u64 = 16 << 20;

/// One rank.
pub(crate) struct Staged {
    shared: Arc<Shared>,
    word: PinnedMem,
    ticket: u32,
}

/// What the rank and its thread share.
pub(super) struct Shared {
    control: Arc<Control>,
    gpu: Gpu,
    rank: u32,
    ranks: u32,
    segments: Vec<HostMem>,
    /// Which ranks' processes can be looked at.
    visible: Vec<bool>,
    scratch_bytes: u64,
    slot_bytes: u64,
    settings: Settings,
    jobs: Mutex<Jobs>,
    changed: Condvar,
}

#[derive(Default)]
struct Jobs {
    queue: VecDeque<Job>,
    /// Nothing more comes.
    closed: bool,
    /// The thread has ended.
    ended: bool,
}

struct Job {
    start: Event,
    work: Work,
    ticket: u32,
}

enum Work {
    Collective(Resolved),
    Transfers(Vec<Resolved>),
}

/// A call whose memory was looked up.
struct Resolved {
    call: Call,
    sequence: u64,
    input: Option<(Buffer, u64)>,
    output: Option<(Buffer, u64)>,
    factor: Option<Scalar>,
}

enum Scalar {
    Host([u8; 8]),
    Device(Buffer),
}

impl Staged {
    /// Joins the other ranks, and finds out whether what one writes arrives at the other.
    pub(crate) fn join(setup: &mut Setup<'_>) -> Result<Self> {
        let (rank, ranks) = (setup.rank, setup.ranks);
        let settings = agree(setup)?;
        let scratch_bytes = settings.chunk_bytes;
        let slot_bytes = ((1 << 20) / u64::from(ranks)).clamp(4 << 10, 256 << 10);
        let bytes = DATA + scratch_bytes + slot_bytes * u64::from(ranks);
        let failed = |error| Error::io("share memory between ranks", error);
        let file = memfd("beeline-staged", bytes).map_err(failed)?;
        let files: Vec<Gathered> = (setup.exchange)(&[], vec![file])?;
        let map = |given: &Gathered| {
            let fd = given.fds.first().ok_or(std::io::ErrorKind::InvalidData)?;
            HostMem::of_sealed(fd.as_fd(), bytes as usize)
        };
        let segments: std::io::Result<Vec<HostMem>> = files.iter().map(map).collect();
        let visible =
            (0..ranks).map(|peer| !process_is_gone(setup.control.process(peer))).collect();
        let shared = Arc::new(Shared {
            control: Arc::clone(&setup.control),
            gpu: setup.gpu.clone(),
            rank,
            ranks,
            segments: segments.map_err(failed)?,
            visible,
            scratch_bytes,
            slot_bytes,
            settings,
            jobs: Mutex::default(),
            changed: Condvar::new(),
        });
        shared.test_paths(setup)?;
        let word = setup.gpu.pin(4096)?;
        let thread = run::Worker::new(Arc::clone(&shared), word.clone())?;
        std::thread::Builder::new()
            .name(format!("beeline-rank{rank}"))
            .spawn(move || thread.run())
            .map_err(|error| Error::io("start the thread of a rank", error))?;
        Ok(Self { shared, word, ticket: 0 })
    }

    /// Queues a batch, and makes `stream` wait for it.
    pub(crate) fn enqueue(&mut self, batch: &Batch, stream: &Stream) -> Result<()> {
        let work = match batch {
            Batch::Collective(posted) => Work::Collective(self.shared.resolve(posted)?),
            Batch::Transfers(all) => Work::Transfers(
                all.iter().map(|posted| self.shared.resolve(posted)).collect::<Result<_>>()?,
            ),
        };
        let start = stream.record()?;
        let ticket = self.ticket.wrapping_add(1);
        self.shared.push(Job { start, work, ticket })?;
        self.ticket = ticket;
        stream.wait_host_value(&self.word, 0, ticket, Compare::GreaterOrEqual)
    }

    /// Lets the thread finish what is queued, until `deadline`; then it goes on alone, and ends by itself.
    pub(crate) fn close(self, deadline: Instant) {
        let mut jobs = lock(&self.shared.jobs);
        jobs.closed = true;
        self.shared.changed.notify_all();
        while !jobs.ended {
            let now = Instant::now();
            if now >= deadline {
                return;
            }
            jobs = wait_timeout(&self.shared.changed, jobs, deadline - now);
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        lock(&self.shared.jobs).closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn push(&self, job: Job) -> Result<()> {
        let deadline = Instant::now() + self.settings.deadline;
        let mut jobs = lock(&self.jobs);
        while jobs.queue.len() >= JOBS_MAX && !self.control.is_aborted() {
            let now = Instant::now();
            if now >= deadline {
                let text = format!("{JOBS_MAX} calls are in flight and none ended");
                return Err(Error::new(Kind::Timeout, text));
            }
            jobs =
                wait_timeout(&self.changed, jobs, (deadline - now).min(Duration::from_millis(50)));
        }
        jobs.queue.push_back(job);
        self.changed.notify_all();
        Ok(())
    }

    fn resolve(&self, posted: &Posted) -> Result<Resolved> {
        let call = posted.call;
        let invalid = |error: crate::core::collective::CallError| Error::refused(error.to_string());
        let input = call.input_bytes(self.rank, self.ranks).map_err(invalid)?;
        let output = call.output_bytes(self.rank, self.ranks).map_err(invalid)?;
        let size = call.dtype.size_bytes().unwrap_or(1);
        let factor = match posted.factor {
            None => None,
            Some(Factor::Host(bytes)) => Some(Scalar::Host(bytes)),
            Some(Factor::Device(ptr)) => Some(Scalar::Device(self.foreign(ptr, size)?)),
        };
        Ok(Resolved {
            call,
            sequence: posted.sequence,
            input: self.place(&posted.input, input, "input")?,
            output: self.place(&posted.output, output, "output")?,
            factor,
        })
    }

    fn place(&self, place: &Place, bytes: u64, what: &str) -> Result<Option<(Buffer, u64)>> {
        match place {
            _ if bytes == 0 => Ok(None),
            Place::None => {
                Err(Error::refused(format!("the call has {bytes} bytes of {what}, and no memory")))
            }
            Place::Foreign(ptr) => Ok(Some((self.foreign(*ptr, bytes)?, 0))),
            Place::Buffer(buffer, at) => {
                let range = crate::core::addr::ByteRange::new(*at, bytes).ok_or_else(|| {
                    Error::refused(format!("{what} at byte {at} ends beyond 64 bits"))
                })?;
                Ok(Some((buffer.slice(range)?, 0)))
            }
        }
    }

    fn foreign(&self, ptr: DevicePtr, bytes: u64) -> Result<Buffer> {
        Buffer::from_foreign(&self.gpu, ptr, bytes, Arc::new(()))
    }

    /// The algorithm of a call: the same on every rank, since all decide by the same numbers.
    fn algorithm(&self, call: &Call) -> Algorithm {
        use crate::core::collective::schedule::does;
        let wanted = self.settings.algorithm.filter(|wanted| does(*wanted, call.kind, self.ranks));
        wanted.unwrap_or_else(|| {
            let slowest = Link::Same;
            let best = plan(call, &Ranks { slowest, ..Ranks::like_h200(self.ranks) }).best();
            best.filter(|best| does(*best, call.kind, self.ranks)).unwrap_or(Algorithm::OneShot)
        })
    }

    fn load(&self, rank: u32, at: u64) -> u64 {
        self.segments.get(rank as usize).and_then(|mem| mem.load_u64(at).ok()).unwrap_or(0)
    }

    fn store(&self, rank: u32, at: u64, value: u64) {
        if let Some(mem) = self.segments.get(rank as usize) {
            let _ = mem.store_u64(at, value);
        }
    }

    /// Every rank writes to every other and all compare what came: a path that drops writes is found here, in
    /// bounded time, and every rank learns of it.
    fn test_paths(&self, setup: &mut Setup<'_>) -> Result<()> {
        let pattern = |from: u32, to: u32| {
            Call::new(Collective::Send, u64::from(to) + 1, crate::core::collective::DataType::U8)
                .agreement(u64::from(from) + 1)
        };
        for to in 0..self.ranks {
            if !self.settings.faults.drops(self.rank, to) {
                self.store(to, TESTED + 8 * u64::from(self.rank), pattern(self.rank, to));
            }
        }
        (setup.exchange)(&[], Vec::new())?;
        let arrived = |from: u32| {
            self.load(self.rank, TESTED + 8 * u64::from(from)) == pattern(from, self.rank)
        };
        let bad: Vec<u8> =
            (0..self.ranks).filter(|from| !arrived(*from)).flat_map(u32::to_le_bytes).collect();
        let all = (setup.exchange)(&bad, Vec::new())?;
        let mut paths = Vec::new();
        for (to, given) in all.iter().enumerate() {
            for from in given.bytes.as_chunks::<4>().0 {
                paths.push(format!("from rank {} to rank {to}", u32::from_le_bytes(*from)));
            }
        }
        if paths.is_empty() {
            return Ok(());
        }
        let text = format!("what is written {} does not arrive", paths.join(", "));
        Err(Error::new(Kind::NoRoute, text.clone())
            .with_reasons(vec![Reason::with(Code::ProbeTransfer, text)]))
    }
}

/// Settings must be the same on all ranks, so those of rank 0 hold.
fn agree(setup: &mut Setup<'_>) -> Result<Settings> {
    if setup.ranks > RANKS_MAX {
        return Err(Error::refused(format!("{} ranks; at most {RANKS_MAX}", setup.ranks)));
    }
    let mut settings = setup.settings.clone();
    settings.chunk_bytes = settings.chunk_bytes.clamp(CHUNK_MIN, CHUNK_MAX).next_multiple_of(4096);
    let number = settings.algorithm.map_or(0, |algorithm| algorithm as u64 + 1);
    let words = [settings.chunk_bytes, u64::from(settings.channels), number];
    let mine: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let all = (setup.exchange)(&mine, Vec::new())?;
    let first: Vec<u64> = all.first().map_or_else(Vec::new, |given| {
        given.bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    });
    let [chunk_bytes, channels, number] = first[..] else {
        return Err(Error::refused(
            "rank 0 sent no settings; all ranks need one version of the library",
        ));
    };
    settings.chunk_bytes = chunk_bytes.clamp(CHUNK_MIN, CHUNK_MAX).next_multiple_of(4096);
    settings.channels = u32::try_from(channels).unwrap_or(0);
    settings.algorithm = Algorithm::ALL.into_iter().find(|one| *one as u64 + 1 == number);
    Ok(settings)
}

/// Why the thread leaves a call early.
enum Stop {
    /// Somebody told this rank to.
    Aborted,
    /// It found something wrong, which is to be reported.
    Failed(Failure),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(Failure::Other(error.kind(), error.to_string()))
    }
}

impl From<beeline_sys::mem::OutOfBounds> for Stop {
    fn from(error: beeline_sys::mem::OutOfBounds) -> Self {
        Error::from(error).into()
    }
}
