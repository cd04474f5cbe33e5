//! The thread that carries out memory operations which are not done at once: those on GPU memory.
//!
//! Operations of one queue pair take effect in order; many are in flight. Neighbours in memory are done
//! as one: the packets of a message become one copy. Bytes that come from packets, or go into them, pass
//! through pinned memory; bytes that lie on a GPU of the peer go from GPU to GPU.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use beeline_core::mr::RegionId;
use beeline_core::rc::{MemFault, MemKind, MemOp, MemToken};
use beeline_core::roce::Qpn;

use super::lane::{Dir, Lane, SLOT_BYTES, Slot};
use super::memory::{Answer, Finished, Memory, carry_out, failed};
use super::peer::{PeerRegion, Piece};
use crate::gpu::{Buffer, Event, Gpu};
use crate::lock;
use crate::memory::{Atomicity, GpuMemory};

/// Jobs taken over before those in flight are looked at.
const BATCH: usize = 512;

/// Longest copy from GPU to GPU that several operations are made into.
const PULL_BYTES_MAX: u64 = 32 << 20;

/// How long the thread looks for work before it sleeps: a wake-up costs more than the copy of a word.
const SPIN: Duration = Duration::from_micros(50);

/// Looks at copies in flight before the thread lets others run between two of them.
const LOOKS: u32 = 200;

/// How long copies in flight are looked at again and again; then the thread sleeps between two looks, for
/// a part of the time since something happened; longer where no job comes any more.
const PATIENT: Duration = Duration::from_millis(2);
const NAP_MAX: Duration = Duration::from_millis(1);
const NAP_MAX_CLOSED: Duration = Duration::from_millis(50);

/// How long whoever drops the thread's handle waits for it.
const FAREWELL: Duration = Duration::from_secs(2);

/// An operation with the memory of its segments, and for [`MemKind::Pull`] where the bytes lie.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) op: MemOp,
    pub(super) memories: Vec<Option<Memory>>,
    pub(super) sources: Vec<Piece>,
}

/// The thread's handle. Dropping it lets the thread finish, and waits for that, but not for ever: a copy may
/// hang. The thread owns what it works on, so memory outlives the operations on it in any case.
#[derive(Debug)]
pub(super) struct Mover {
    jobs: Option<Sender<Job>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Mover {
    /// Starts the thread; `None` where the system has none left.
    pub(super) fn start(finished: &Arc<Finished>) -> Option<Self> {
        let (jobs, inbox) = std::sync::mpsc::channel();
        let finished = Arc::clone(finished);
        let thread = std::thread::Builder::new()
            .name("beeline-nic-mem".into())
            .spawn(move || Worker::new(inbox, finished).run())
            .ok()?;
        Some(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Hands a job over; back where the thread is gone. Bounded by the engine's budgets.
    pub(super) fn send(&self, job: Job) -> Result<(), Box<Job>> {
        match &self.jobs {
            Some(jobs) => jobs.send(job).map_err(|refused| Box::new(refused.0)),
            None => Err(Box::new(job)),
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let Some(thread) = self.thread.take() else { return };
        let (started, mut pause) = (Instant::now(), Duration::from_micros(10));
        while !thread.is_finished() {
            if started.elapsed() >= FAREWELL {
                tracing::warn!(
                    "operations on GPU memory do not end: they keep it, and their thread"
                );
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(NAP_MAX);
        }
        let _ = thread.join();
    }
}

struct Worker {
    inbox: Receiver<Job>,
    finished: Arc<Finished>,
    waiting: VecDeque<Job>,
    lanes: Vec<Lane>,
    /// In flight, per lane and direction, oldest first.
    flights: Vec<[VecDeque<Flight>; 2]>,
    /// Flights by queue pair: lane, and how many in each direction.
    of_qp: HashMap<Qpn, (usize, [u32; 2])>,
    answers: Vec<Answer>,
    /// No job comes any more.
    closed: bool,
}

/// Work of a device, done when `event` is.
struct Flight {
    event: Event,
    qpn: Qpn,
    slot: Option<Slot>,
    memory: Option<Arc<GpuMemory>>,
    parts: Vec<Part>,
}

/// One operation of a flight.
struct Part {
    token: MemToken,
    buffer: Vec<u8>,
    region: RegionId,
    /// Where its bytes lie in the slot.
    at: u64,
    len: u32,
    then: Then,
}

/// What is left to do when the device has done its part.
enum Then {
    Nothing,
    /// Bytes to the end of the buffer.
    Append,
    /// The word that an atomic found.
    Word,
    /// Bytes to host memory.
    ToHost(Memory, u64),
}

/// What one copy or kernel of a device does.
enum Task {
    /// Device memory to a slot, and from there into packets.
    Out,
    /// Packets to a slot, and from there to device memory.
    In,
    /// A peer's host memory to a slot, and from there to device memory.
    PullHost,
    /// A peer's device memory to device memory.
    PullGpu,
    /// A peer's device memory to a slot, and from there to host memory.
    PullToHost,
    Atomic,
}

impl Worker {
    fn new(inbox: Receiver<Job>, finished: Arc<Finished>) -> Self {
        Self {
            inbox,
            finished,
            waiting: VecDeque::new(),
            lanes: Vec::new(),
            flights: Vec::new(),
            of_qp: HashMap::new(),
            answers: Vec::new(),
            closed: false,
        }
    }

    fn run(mut self) {
        let (mut idle, mut looks) = (Instant::now(), 0_u32);
        loop {
            self.collect();
            let mut busy = false;
            while self.start_next() {
                busy = true;
            }
            busy |= self.land();
            self.tell();
            if busy {
                (idle, looks) = (Instant::now(), 0);
                continue;
            }
            if !self.waiting.is_empty() || !self.of_qp.is_empty() {
                looks = looks.saturating_add(1);
                if looks > LOOKS {
                    self.pause(idle.elapsed());
                }
                continue;
            }
            if self.closed {
                return;
            }
            if idle.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            match self.inbox.recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(_) => self.closed = true,
            }
            idle = Instant::now();
        }
    }

    /// Between two looks at what is in flight, when nothing has happened for `quiet`.
    fn pause(&self, quiet: Duration) {
        if quiet < PATIENT {
            return std::thread::yield_now();
        }
        let longest = if self.closed { NAP_MAX_CLOSED } else { NAP_MAX };
        std::thread::sleep((quiet / 64).min(longest));
    }

    fn collect(&mut self) {
        while !self.closed && self.waiting.len() < BATCH {
            match self.inbox.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => self.closed = true,
            }
        }
    }

    fn tell(&mut self) {
        if self.answers.is_empty() {
            return;
        }
        lock(&self.finished.answers).append(&mut self.answers);
        let _ = rustix::io::write(&self.finished.wake, &1u64.to_ne_bytes());
    }

    /// Starts the next job, with those behind it that become one with it. `false` where there is none or
    /// it has to wait.
    fn start_next(&mut self) -> bool {
        let Some(job) = self.waiting.front() else { return false };
        let qpn = job.op.qpn;
        let Some(task) = task_of(job) else {
            // Done by this thread, behind everything of its queue pair.
            if self.of_qp.contains_key(&qpn) {
                return false;
            }
            let Some(job) = self.waiting.pop_front() else { return false };
            let answer = self.do_now(job);
            self.answers.push(answer);
            return true;
        };
        let Some(lane) = gpu_of(job, &task).and_then(|gpu| self.lane(&gpu)) else {
            if let Some(job) = self.waiting.pop_front() {
                self.answers.push(failed(job.op));
            }
            return true;
        };
        // Order between two devices is not kept by their streams.
        if self.of_qp.get(&qpn).is_some_and(|(known, _)| *known != lane) {
            return false;
        }
        self.launch(lane, &task)
    }

    fn launch(&mut self, lane: usize, task: &Task) -> bool {
        let bytes_max = if matches!(task, Task::PullGpu) { PULL_BYTES_MAX } else { SLOT_BYTES };
        let (count, bytes) = run_length(&self.waiting, task, bytes_max);
        let Some(to) = self.lanes.get_mut(lane) else { return false };
        let slot = match task {
            Task::PullGpu => None,
            _ => match to.take_slot(bytes) {
                Some(slot) => Some(slot),
                None => return false,
            },
        };
        let jobs: Vec<Job> = self.waiting.drain(..count).collect();
        let qpn = jobs.first().map_or(Qpn::new(0), |job| job.op.qpn);
        let dir = match task {
            Task::Out | Task::PullToHost => Dir::Out,
            _ => Dir::In,
        };
        let entry = self.of_qp.entry(qpn).or_insert((lane, [0; 2]));
        let behind = entry.1.get(dir.other() as usize).is_some_and(|count| *count > 0);
        match to.start(task_run(&jobs, task, slot), dir, behind) {
            Ok(event) => {
                let flight = flight(jobs, task, event, slot);
                if let Some(count) = entry.1.get_mut(dir as usize) {
                    *count += 1;
                }
                if let Some(line) = self.flights.get_mut(lane).and_then(|l| l.get_mut(dir as usize))
                {
                    line.push_back(flight);
                }
            }
            Err(failed) => {
                to.give_up(slot, &failed);
                if entry.1 == [0; 2] {
                    self.of_qp.remove(&qpn);
                }
                self.answers.extend(jobs.into_iter().map(refused));
            }
        }
        true
    }

    /// Ends flights whose device has done its part.
    fn land(&mut self) -> bool {
        let mut landed = false;
        for (lane, lines) in self.lanes.iter_mut().zip(&mut self.flights) {
            for (dir, line) in lines.iter_mut().enumerate() {
                while let Some(flight) = line.front() {
                    let done = match flight.event.is_done() {
                        Ok(false) => break,
                        other => other.is_ok(),
                    };
                    let Some(flight) = line.pop_front() else { break };
                    landed = true;
                    if let Some((_, counts)) = self.of_qp.get_mut(&flight.qpn) {
                        if let Some(count) = counts.get_mut(dir) {
                            *count = count.saturating_sub(1);
                        }
                        if *counts == [0; 2] {
                            self.of_qp.remove(&flight.qpn);
                        }
                    }
                    let slot = flight.slot;
                    land_one(lane, flight, done, &mut self.answers);
                    lane.give_back(slot);
                }
            }
        }
        landed
    }

    /// Carries an operation out piece by piece, waiting for each.
    fn do_now(&mut self, job: Job) -> Answer {
        let plain = |memory: &Option<Memory>, len| match memory {
            Some(Memory::Gpu(gpu)) => gpu.in_place(u64::from(len)),
            _ => true,
        };
        let simple = job.memories.iter().zip(job.op.segments.iter()).all(|(m, s)| plain(m, s.len))
            && job.sources.iter().all(|piece| matches!(*piece.memory, PeerRegion::Host(_)));
        if simple {
            let Job { op, memories, sources } = job;
            return carry_out(op, &sources, |i, _| memories.get(i).and_then(Option::as_ref));
        }
        self.in_pieces(job)
    }

    fn in_pieces(&mut self, mut job: Job) -> Answer {
        let mut incoming = std::mem::take(&mut job.op.buffer);
        let mut result = Ok(0);
        let mut taken = job.op.at;
        if job.op.kind == MemKind::Pull {
            incoming.truncate(job.op.at);
            result = self.fetch(&job.sources, &mut incoming).map(|()| 0);
        }
        let segments: Vec<_> = job.op.segments.iter().copied().collect();
        let mut gone = Vec::new();
        for (segment, memory) in segments.iter().zip(&job.memories) {
            let (at, len) = (segment.offset, segment.len as usize);
            let done = match (memory, job.op.kind) {
                (None, _) => Err(MemFault),
                (Some(memory), MemKind::Read) => {
                    self.read(memory, at, len, &mut incoming).map(|()| 0)
                }
                (Some(memory), MemKind::Write | MemKind::Pull) => {
                    let end = taken.saturating_add(len);
                    let bytes = incoming.get(taken..end).ok_or(MemFault);
                    taken = end;
                    bytes.and_then(|bytes| self.write(memory, at, bytes)).map(|()| 0)
                }
                (Some(memory), MemKind::CompareSwap { compare, swap }) => {
                    self.update(memory, at, &|old| if old == compare { swap } else { old })
                }
                (Some(memory), MemKind::FetchAdd { add }) => {
                    self.update(memory, at, &|old| old.wrapping_add(add))
                }
            };
            if let (Err(_), Some(Memory::Gpu(gpu))) = (&done, memory)
                && gpu.is_gone()
            {
                gone.push(segment.region);
            }
            result = result.and(done);
        }
        Answer { token: job.op.token, buffer: incoming, result, qpn: job.op.qpn, gone }
    }

    fn fetch(&mut self, sources: &[Piece], into: &mut Vec<u8>) -> Result<(), MemFault> {
        for piece in sources {
            let len = piece.len as usize;
            let start = into.len();
            match &*piece.memory {
                PeerRegion::Host(memory) => {
                    into.resize(start + len, 0);
                    let part = into.get_mut(start..).ok_or(MemFault)?;
                    memory.read(piece.offset, part).map_err(|_| MemFault)?;
                }
                PeerRegion::Gpu(buffer) => {
                    let lane = self.lane(&buffer.gpu()).ok_or(MemFault)?;
                    let lane = self.lanes.get_mut(lane).ok_or(MemFault)?;
                    lane.read(buffer, piece.offset, len, into).map_err(|_| MemFault)?;
                }
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        memory: &Memory,
        at: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), MemFault> {
        let Some(gpu) = by_engine(memory, len as u64) else {
            return memory.append_to(at, len, into);
        };
        let lane = self.lane(&gpu.gpu()).ok_or(MemFault)?;
        let lane = self.lanes.get_mut(lane).ok_or(MemFault)?;
        let start = into.len();
        let read = gpu.check().and_then(|()| lane.read(gpu.buffer(), at, len, into));
        read.and_then(|()| gpu.check()).map_err(|_| {
            // What lies there now is nobody's business.
            into.truncate(start);
            MemFault
        })
    }

    fn write(&mut self, memory: &Memory, at: u64, from: &[u8]) -> Result<(), MemFault> {
        let Some(gpu) = by_engine(memory, from.len() as u64) else { return memory.write(at, from) };
        let lane = self.lane(&gpu.gpu()).ok_or(MemFault)?;
        let lane = self.lanes.get_mut(lane).ok_or(MemFault)?;
        let written = gpu.check().and_then(|()| lane.write(gpu.buffer(), at, from));
        written.and_then(|()| gpu.check()).map_err(|_| MemFault)
    }

    fn update(
        &mut self,
        memory: &Memory,
        at: u64,
        change: &dyn Fn(u64) -> u64,
    ) -> Result<u64, MemFault> {
        if by_engine(memory, 8).is_none() {
            return memory.update(at, change);
        }
        let mut bytes = Vec::with_capacity(8);
        self.read(memory, at, 8, &mut bytes)?;
        let old = <[u8; 8]>::try_from(bytes.as_slice()).map_err(|_| MemFault)?;
        let old = u64::from_ne_bytes(old);
        self.write(memory, at, &change(old).to_ne_bytes())?;
        Ok(old)
    }

    /// The lane of a device, made when it is first needed.
    fn lane(&mut self, gpu: &Gpu) -> Option<usize> {
        if let Some(known) = self.lanes.iter().position(|lane| lane.is_of(gpu)) {
            return Some(known);
        }
        match Lane::new(gpu) {
            Ok(lane) => {
                self.lanes.push(lane);
                self.flights.push(Default::default());
                Some(self.lanes.len() - 1)
            }
            Err(error) => {
                tracing::warn!(%error, "GPU memory cannot be reached");
                None
            }
        }
    }
}

fn refused(job: Job) -> Answer {
    let gone = match job.memories.first() {
        Some(Some(Memory::Gpu(gpu))) if gpu.is_gone() => {
            job.op.segments.iter().take(1).map(|segment| segment.region).collect()
        }
        _ => Vec::new(),
    };
    Answer { gone, ..failed(job.op) }
}

/// The memory behind a region that an access of `len` bytes reaches by a copy engine.
fn by_engine(memory: &Memory, len: u64) -> Option<&Arc<GpuMemory>> {
    match memory {
        Memory::Gpu(gpu) if !gpu.in_place(len) => Some(gpu),
        _ => None,
    }
}

/// What a device does for a job; `None` where this thread does it.
fn task_of(job: &Job) -> Option<Task> {
    let mut segments = job.op.segments.iter();
    let (Some(segment), None) = (segments.next(), segments.next()) else { return None };
    let [Some(memory)] = job.memories.as_slice() else { return None };
    let gpu = by_engine(memory, u64::from(segment.len));
    let source = match job.sources.as_slice() {
        [piece] => Some(&*piece.memory),
        _ => None,
    };
    match (job.op.kind, gpu, source) {
        (MemKind::Read, Some(_), _) => Some(Task::Out),
        (MemKind::Write, Some(_), _) => Some(Task::In),
        (MemKind::Pull, Some(_), Some(PeerRegion::Host(_))) => Some(Task::PullHost),
        (MemKind::Pull, Some(gpu), Some(PeerRegion::Gpu(from))) => {
            from.gpu().same_device(&gpu.gpu()).then_some(Task::PullGpu)
        }
        (MemKind::Pull, None, Some(PeerRegion::Gpu(_))) => {
            matches!(memory, Memory::Host(_)).then_some(Task::PullToHost)
        }
        (MemKind::CompareSwap { .. } | MemKind::FetchAdd { .. }, Some(gpu), _) => {
            (gpu.atomicity() == Atomicity::System).then_some(Task::Atomic)
        }
        _ => None,
    }
}

/// The device that does it.
fn gpu_of(job: &Job, task: &Task) -> Option<Gpu> {
    match (task, job.memories.first(), job.sources.first()) {
        (Task::PullToHost, _, Some(Piece { memory, .. })) => match &**memory {
            PeerRegion::Gpu(buffer) => Some(buffer.gpu()),
            PeerRegion::Host(_) => None,
        },
        (_, Some(Some(Memory::Gpu(gpu))), _) => Some(gpu.gpu()),
        _ => None,
    }
}

/// How many jobs from the front are neighbours that one copy does, and their bytes.
fn run_length(waiting: &VecDeque<Job>, task: &Task, bytes_max: u64) -> (usize, u64) {
    let place = |job: &Job| job.op.segments.iter().next().copied();
    let Some(first) = waiting.front() else { return (0, 0) };
    let Some(start) = place(first) else { return (1, 0) };
    let (mut count, mut bytes) = (1, u64::from(start.len));
    if matches!(task, Task::Atomic) {
        return (1, 8);
    }
    let source = first.sources.first();
    for job in waiting.iter().skip(1) {
        let Some(here) = place(job) else { break };
        let follows = job.op.qpn == first.op.qpn
            && job.op.kind == first.op.kind
            && here.region == start.region
            && here.offset == start.offset.saturating_add(bytes)
            && task_of(job).is_some_and(|other| {
                std::mem::discriminant(&other) == std::mem::discriminant(task)
            });
        let goes_on = match (source, job.sources.first()) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                Arc::ptr_eq(&a.memory, &b.memory) && b.offset == a.offset.saturating_add(bytes)
            }
            _ => false,
        };
        let sum = bytes.saturating_add(u64::from(here.len));
        if !follows || !goes_on || sum > bytes_max {
            break;
        }
        (count, bytes) = (count + 1, sum);
    }
    (count, bytes)
}

/// One copy or kernel, as a lane takes it.
pub(super) enum Run<'a> {
    /// Device memory to the slot.
    ToSlot { from: &'a Buffer, at: u64, len: u64, slot: Slot, watch: Option<&'a GpuMemory> },
    /// The slot, once it is filled, to device memory.
    FromSlot { to: &'a Buffer, at: u64, len: u64, slot: Slot, fill: Fill<'a>, watch: &'a GpuMemory },
    /// Device memory to device memory.
    Across {
        to: &'a Buffer,
        at: u64,
        from: &'a Buffer,
        from_at: u64,
        len: u64,
        watch: &'a GpuMemory,
    },
    /// An atomic on a word, whose old value goes to the slot.
    Atomic { word: &'a Buffer, at: u64, kind: MemKind, slot: Slot, watch: &'a GpuMemory },
    /// Nothing that can be done.
    Nothing,
}

/// Where the bytes of a slot come from.
pub(super) enum Fill<'a> {
    Packets(&'a [Job]),
    Peer(&'a Piece),
}

fn task_run<'a>(jobs: &'a [Job], task: &Task, slot: Option<Slot>) -> Run<'a> {
    let Some(job) = jobs.first() else { return Run::Nothing };
    let Some(segment) = job.op.segments.iter().next() else { return Run::Nothing };
    let len = jobs.iter().map(|job| job.op.len() as u64).sum();
    let at = segment.offset;
    let source = job.sources.first();
    let gpu = match job.memories.first() {
        Some(Some(Memory::Gpu(gpu))) => Some(&**gpu),
        _ => None,
    };
    let far = source.and_then(|piece| match &*piece.memory {
        PeerRegion::Gpu(buffer) => Some((buffer, piece.offset)),
        PeerRegion::Host(_) => None,
    });
    match (task, gpu, slot, source, far) {
        (Task::Out, Some(gpu), Some(slot), ..) => {
            Run::ToSlot { from: gpu.buffer(), at, len, slot, watch: Some(gpu) }
        }
        (Task::In, Some(watch), Some(slot), ..) => {
            let fill = Fill::Packets(jobs);
            Run::FromSlot { to: watch.buffer(), at, len, slot, fill, watch }
        }
        (Task::PullHost, Some(watch), Some(slot), Some(piece), _) => {
            let fill = Fill::Peer(piece);
            Run::FromSlot { to: watch.buffer(), at, len, slot, fill, watch }
        }
        (Task::PullGpu, Some(watch), _, _, Some((from, from_at))) => {
            Run::Across { to: watch.buffer(), at, from, from_at, len, watch }
        }
        (Task::PullToHost, _, Some(slot), _, Some((from, at))) => {
            Run::ToSlot { from, at, len, slot, watch: None }
        }
        (Task::Atomic, Some(watch), Some(slot), ..) => {
            Run::Atomic { word: watch.buffer(), at, kind: job.op.kind, slot, watch }
        }
        _ => Run::Nothing,
    }
}

fn flight(jobs: Vec<Job>, task: &Task, event: Event, slot: Option<Slot>) -> Flight {
    let mut qpn = Qpn::new(0);
    let mut watched = None;
    let mut at = 0;
    let mut parts = Vec::with_capacity(jobs.len());
    for mut job in jobs {
        let len = job.op.len() as u32;
        let memory = job.memories.pop().flatten();
        let Some(segment) = job.op.segments.iter().next().copied() else { continue };
        let then = match (task, memory) {
            (Task::PullToHost, Some(memory)) => Then::ToHost(memory, segment.offset),
            (Task::Out, memory) => {
                watched = watched.or(watched_of(memory));
                Then::Append
            }
            (Task::Atomic, memory) => {
                watched = watched.or(watched_of(memory));
                Then::Word
            }
            (_, memory) => {
                watched = watched.or(watched_of(memory));
                Then::Nothing
            }
        };
        let MemOp { token, buffer, qpn: of, .. } = job.op;
        qpn = of;
        parts.push(Part { token, buffer, region: segment.region, at, len, then });
        at += u64::from(len);
    }
    Flight { event, qpn, slot, memory: watched, parts }
}

fn watched_of(memory: Option<Memory>) -> Option<Arc<GpuMemory>> {
    match memory {
        Some(Memory::Gpu(gpu)) if gpu.is_watched() => Some(gpu),
        _ => None,
    }
}

fn land_one(lane: &Lane, flight: Flight, done: bool, answers: &mut Vec<Answer>) {
    let Flight { qpn, slot, memory, parts, .. } = flight;
    let same = memory.as_ref().is_none_or(|memory| memory.check().is_ok());
    for Part { token, mut buffer, region, at, len, then } in parts {
        let result = if done && same {
            finish(lane, slot, at, len, &then, &mut buffer)
        } else {
            Err(MemFault)
        };
        let gone = if same { Vec::new() } else { vec![region] };
        answers.push(Answer { token, buffer, result, qpn, gone });
    }
}

fn finish(
    lane: &Lane,
    slot: Option<Slot>,
    at: u64,
    len: u32,
    then: &Then,
    buffer: &mut Vec<u8>,
) -> Result<u64, MemFault> {
    let staged = || {
        let slot = slot.ok_or(MemFault)?;
        Ok((lane.staging(), slot.offset.checked_add(at).ok_or(MemFault)?))
    };
    match then {
        Then::Nothing => Ok(0),
        Then::Append => {
            let (mem, from) = staged()?;
            mem.append_to(from, len as usize, buffer).map(|()| 0).map_err(|_| MemFault)
        }
        Then::Word => {
            let (mem, from) = staged()?;
            mem.load_u64(from).map_err(|_| MemFault)
        }
        Then::ToHost(Memory::Host(host), offset) => {
            let (mem, from) = staged()?;
            host.copy_from(*offset, mem, from, u64::from(len)).map(|()| 0).map_err(|_| MemFault)
        }
        Then::ToHost(..) => Err(MemFault),
    }
}
