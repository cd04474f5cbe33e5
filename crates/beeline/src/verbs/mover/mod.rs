//! The thread that carries out memory operations which are not done at once: those on GPU memory.
//!
//! Operations of one queue pair take effect in order; many are in flight. Neighbours in memory are done
//! as one: the packets of a message become one copy. Bytes that come from packets, or go into them, pass
//! through pinned memory; bytes that lie on a GPU of the peer go from GPU to GPU.

mod flight;
mod line;
mod pieces;
mod task;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use beeline_core::rc::{MemKind, MemOp};

use super::lane::{Dir, Lane, SLOT_BYTES};
use super::memory::{Answer, Finished, Memory, Order, failed};
use super::peer::{PeerRegion, Piece};
use super::stage::{LARGE_BYTES, Stage};
use crate::gpu::Gpu;
use crate::lock;

use self::flight::Flight;
use self::line::Lines;
pub(super) use self::task::{Fill, Run};
use self::task::{Room, Task, gpu_of, run_length, task_of, task_run};

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

/// How long the peer may keep all slots of the staging memory before bytes go through the ring instead, and
/// how often it is asked meanwhile whether some of them are kept by packets that were given up.
const DRY_MAX: Duration = Duration::from_millis(100);
const DRY_LOOK: Duration = Duration::from_millis(1);

/// How long whoever drops the thread's handle waits for it.
const FAREWELL: Duration = Duration::from_secs(2);

/// An operation with the memory of its segments, and for [`MemKind::Pull`] where the bytes lie.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) op: MemOp,
    pub(super) memories: Vec<Option<Memory>>,
    pub(super) sources: Vec<Piece>,
    /// For [`MemKind::Read`], where the peer reads staging memory of this side.
    pub(super) stage: Option<Arc<Stage>>,
}

impl Job {
    const fn order(&self) -> Order {
        (self.op.qpn, self.op.of_peer)
    }

    /// Cookies of what it fetches from the peer.
    fn cookies(&self) -> Vec<u64> {
        match self.op.kind {
            MemKind::Pull => self.sources.iter().map(|piece| piece.cookie).collect(),
            _ => Vec::new(),
        }
    }
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
    waiting: Lines,
    lanes: Vec<Lane>,
    /// In flight, per lane and direction, oldest first.
    flights: Vec<[VecDeque<Flight>; 2]>,
    /// Flights by the order they keep: lane, and how many in each direction.
    flying: HashMap<Order, (usize, [u32; 2])>,
    /// Since when no slot of the staging memory is free although one is wanted.
    dry: Option<Instant>,
    answers: Vec<Answer>,
    /// No job comes any more.
    closed: bool,
}

impl Worker {
    fn new(inbox: Receiver<Job>, finished: Arc<Finished>) -> Self {
        Self {
            inbox,
            finished,
            waiting: Lines::new(),
            lanes: Vec::new(),
            flights: Vec::new(),
            flying: HashMap::new(),
            dry: None,
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
            if !self.waiting.is_empty() || !self.flying.is_empty() {
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
                Ok(job) => self.waiting.push(job),
                Err(_) => self.closed = true,
            }
            idle = Instant::now();
        }
    }

    /// Between two looks at what is in flight, when nothing has happened for `quiet`.
    fn pause(&self, quiet: Duration) {
        if self.dry.is_some_and(|since| since.elapsed() >= DRY_LOOK)
            && !self.finished.starved.swap(true, Ordering::Relaxed)
        {
            let _ = rustix::io::write(&self.finished.wake, &1u64.to_ne_bytes());
        }
        if quiet < PATIENT {
            return std::thread::yield_now();
        }
        let longest = if self.closed { NAP_MAX_CLOSED } else { NAP_MAX };
        std::thread::sleep((quiet / 64).min(longest));
    }

    fn collect(&mut self) {
        while !self.closed && self.waiting.len() < BATCH {
            match self.inbox.try_recv() {
                Ok(job) => self.waiting.push(job),
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

    /// Starts the next job that can be, with those behind it that become one with it; orders take turns.
    /// `false` where there is none or all have to wait.
    fn start_next(&mut self) -> bool {
        for _ in 0..self.waiting.orders() {
            let Some(order) = self.waiting.turn() else { return false };
            if self.start_of(order) {
                return true;
            }
        }
        false
    }

    fn start_of(&mut self, order: Order) -> bool {
        let Some(job) = self.waiting.front(order) else { return false };
        let Some(task) = task_of(job) else {
            // Done by this thread, behind everything of its order.
            if self.flying.contains_key(&order) {
                return false;
            }
            let Some(job) = self.waiting.pop(order) else { return false };
            let answer = self.do_now(job);
            self.answers.push(answer);
            return true;
        };
        let Some(lane) = gpu_of(job, &task).and_then(|gpu| self.lane(&gpu)) else {
            if let Some(job) = self.waiting.pop(order) {
                self.answers.push(Answer { fetched: job.cookies(), ..failed(job.op) });
            }
            return true;
        };
        // Order between two devices is not kept by their streams.
        if self.flying.get(&order).is_some_and(|(known, _)| *known != lane) {
            return false;
        }
        self.launch(order, lane, task)
    }

    fn launch(&mut self, order: Order, lane: usize, task: Task) -> bool {
        let Some((task, room, count)) = self.find_room(order, lane, task) else { return false };
        let jobs = self.waiting.take(order, count);
        let Some(to) = self.lanes.get_mut(lane) else { return false };
        let dir = match task {
            Task::Out | Task::OutShared | Task::PullToHost => Dir::Out,
            _ => Dir::In,
        };
        let entry = self.flying.entry(order).or_insert((lane, [0; 2]));
        let behind = entry.1.get(dir.other() as usize).is_some_and(|count| *count > 0);
        match to.start(task_run(&jobs, &task, &room), dir, behind) {
            Ok(event) => {
                let flight = Flight::new(jobs, &task, event, order, room);
                if let Some(count) = entry.1.get_mut(dir as usize) {
                    *count += 1;
                }
                if let Some(line) = self.flights.get_mut(lane).and_then(|l| l.get_mut(dir as usize))
                {
                    line.push_back(flight);
                }
            }
            Err(failed) => {
                match room {
                    Room::Slot(slot) => to.give_up(Some(slot), None, &failed),
                    Room::Stage(slot, _) => to.give_up(None, Some(slot), &failed),
                    Room::None | Room::Peer(_) => to.give_up(None, None, &failed),
                }
                if entry.1 == [0; 2] {
                    self.flying.remove(&order);
                }
                self.answers.extend(jobs.into_iter().map(refused));
            }
        }
        true
    }

    /// Where the bytes of the next jobs go through, and how many jobs. The task may become another one where
    /// staging memory cannot be had. `None` where they have to wait.
    fn find_room(&mut self, order: Order, lane: usize, task: Task) -> Option<(Task, Room, usize)> {
        let line = self.waiting.line(order)?;
        let lane = self.lanes.get_mut(lane)?;
        match task {
            Task::PullGpu => {
                let (count, _) = run_length(line, &task, PULL_BYTES_MAX);
                return Some((task, Room::None, count));
            }
            Task::OutShared => {
                let stage = line.front()?.stage.as_ref()?;
                let (count, bytes) = run_length(line, &task, LARGE_BYTES);
                if let Some(pinned) = stage.mem.pinned(lane.gpu()) {
                    if let Some(slot) = stage.take(bytes) {
                        self.dry = None;
                        return Some((task, Room::Stage(slot, pinned), count));
                    }
                    let since = *self.dry.get_or_insert_with(Instant::now);
                    if since.elapsed() < DRY_MAX {
                        return None;
                    }
                }
            }
            Task::PullStage => {
                let (count, _) = run_length(line, &task, SLOT_BYTES);
                if let Some(PeerRegion::Stage(stage)) =
                    line.front()?.sources.first().map(|piece| &*piece.memory)
                    && let Some(pinned) = stage.pinned(lane.gpu())
                {
                    return Some((task, Room::Peer(pinned), count));
                }
            }
            _ => {}
        }
        // As many as follow each other, whichever way they would have gone.
        let (count, bytes) = run_length(line, &task, SLOT_BYTES);
        let task = match task {
            Task::OutShared => Task::Out,
            Task::PullStage => Task::PullHost,
            task => task,
        };
        Some((task, Room::Slot(lane.take_slot(bytes)?), count))
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
                    if let Some((_, counts)) = self.flying.get_mut(&flight.order) {
                        if let Some(count) = counts.get_mut(dir) {
                            *count = count.saturating_sub(1);
                        }
                        if *counts == [0; 2] {
                            self.flying.remove(&flight.order);
                        }
                    }
                    flight.land(lane, done, &mut self.answers);
                }
            }
        }
        landed
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
    Answer { gone, fetched: job.cookies(), ..failed(job.op) }
}
