//! The bytes of one request under way: whose turn it is at which cell of its slot.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_sys::cuda::{CELLS, Load};

use super::super::mover::{Job, Piece};
use super::super::status::{Failure, Outcome};
use super::request::{Common, Finish, Request};

/// Bytes that a thread reads or writes at a time, where the whole request lies in the slot.
const PIECE_MIN: u64 = 128 << 10;
/// Largest request that is always copied at once, if it fits into the slot. Where few are under way, the parts of a longer one are copied
/// while others are read or written, and the kernel waits for them; many requests have something to copy meanwhile anyway,
/// and their kernels would fill a device.
const WHOLE_MAX: u64 = 1 << 20;
const FEW: usize = 4;
/// Pieces of which each is worth a thread's coming.
const PIECE_LARGE: u64 = 256 << 10;
/// See [`Moving::in_order`].
const IN_ORDER: Duration = Duration::from_millis(2);

/// What a request's caller is to be told.
pub(super) struct Report {
    pub(super) finish: Finish,
    pub(super) outcome: Outcome<u64>,
    pub(super) cpu: Duration,
    /// The stream still waits at the gate, not at its end.
    pub(super) open: bool,
}

/// Whose turn it is at a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// The host's, to read into it or to write it out.
    Host,
    /// A thread is at it.
    Busy,
    /// The kernel's; where it copies the whole at once, the host's part is done (read), or yet to come (write).
    Device,
    Over,
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    chunk: u64,
    turn: Turn,
}

/// A piece that a thread deals with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    cell: usize,
    chunk: u64,
    /// In the slot, and in the request.
    pub(super) place: u64,
    pub(super) start: u64,
    pub(super) len: u64,
}

/// The bytes of a request under way.
pub(super) struct Moving {
    job: Arc<Job>,
    finish: Option<Finish>,
    /// For whoever looked or worked, once the lock is released.
    pub(super) report: Option<Report>,
    /// Where the bytes start in the slot, and end; further than the slot goes where it is used as a ring.
    first: u64,
    pub(super) last: u64,
    pub(super) ring: bool,
    /// Bytes of a chunk, and the slot's.
    cell: u64,
    bytes: u64,
    /// How many there are; lowered where the file ends early.
    chunks: u64,
    cells: [Cell; CELLS],
    pub(super) workers: usize,
    /// How many bytes are good, from the start.
    end: u64,
    failed: Option<Failure>,
    progress: Instant,
    /// How long a write by one thread waits for the kernel to be done with the next chunk, before it takes a later one.
    in_order: Duration,
    /// The stream was let through the gate.
    pub(super) opened: bool,
    /// All was reported, and the stream let through the end.
    pub(super) concluded: bool,
    pub(super) cpu: Duration,
}

impl Moving {
    /// Of a request beside `others`, with a slot of so many bytes.
    pub(super) fn new(
        mut job: Job,
        (cell, bytes): (u32, u64),
        others: usize,
        finish: Finish,
    ) -> Self {
        let (small, len) = (u64::from(cell), job.range.len);
        let cell = small.max(PIECE_MIN);
        // Not more than the slot has: what is read past the page cache comes in whole blocks.
        let whole = job.lay_out(cell.min(bytes));
        let ring = whole.saturating_add(len) > bytes || (len > WHOLE_MAX && others < FEW);
        let first = if ring { job.lay_out(small) } else { whole };
        let last = first.saturating_add(len);
        let cell = if ring { small } else { cell };
        let chunks = last.div_ceil(cell);
        let turn = if job.is_write() { Turn::Device } else { Turn::Host };
        let cells = std::array::from_fn(|at| {
            let chunk = at as u64;
            Cell { chunk, turn: if chunk < chunks { turn } else { Turn::Over } }
        });
        Self {
            opened: job.is_write(),
            job: Arc::new(job),
            finish: Some(finish),
            report: None,
            first,
            last,
            ring,
            cell,
            bytes,
            chunks,
            cells,
            workers: 0,
            end: len,
            failed: None,
            progress: Instant::now(),
            in_order: IN_ORDER,
            concluded: false,
            cpu: Duration::ZERO,
        }
    }

    /// Tells the kernel what to move, up to `last`.
    pub(super) fn describe(&self, request: &Request, common: &Common, last: u64) {
        let Self { first, ring, chunks, .. } = *self;
        let load = Load { address: self.job.device, first, last, ring, chunks };
        common.gates.describe(request.gate, &load);
        if self.ring && self.job.is_write() {
            for cell in self.cells.iter().filter(|cell| cell.turn == Turn::Device) {
                self.give_turn(request, common, cell.chunk, self.len_of(cell.chunk));
            }
        }
    }

    fn give_turn(&self, request: &Request, common: &Common, chunk: u64, bytes: u64) {
        // A cell has at most 512 KiB.
        common.gates.give_turn(request.gate, chunk, u32::try_from(bytes).unwrap_or(0));
    }

    /// Where a chunk starts, counted as `first`.
    const fn start_of(&self, chunk: u64) -> u64 {
        if chunk == 0 { self.first } else { chunk.saturating_mul(self.cell) }
    }

    fn len_of(&self, chunk: u64) -> u64 {
        let end = chunk.saturating_add(1).saturating_mul(self.cell).min(self.last);
        end.saturating_sub(self.start_of(chunk))
    }

    /// How many more threads shall take part; they count as being there.
    pub(super) fn hire(&mut self, common: &Common) -> usize {
        if self.concluded {
            return 0;
        }
        let host = |cell: &&Cell| cell.turn == Turn::Host && cell.chunk < self.chunks;
        let ready = self.cells.iter().filter(host).count();
        let busy = self.cells.iter().filter(|cell| cell.turn == Turn::Busy).count();
        let most = if self.is_alone() {
            1
        } else {
            let fair = common.threads / common.moving.load(Ordering::Relaxed).max(1);
            // A thread that comes for one small piece comes too late.
            let pieces = if self.cell < PIECE_LARGE { 2 } else { 1 };
            self.job.threads.min(fair.max(1)).min((ready + busy).div_ceil(pieces))
        };
        let more = most.saturating_sub(self.workers).min(ready);
        self.workers += more;
        more
    }

    /// The next piece for a thread: the first one that is the host's turn. A write by one thread goes forward, so that
    /// one that fails leaves no hole; unless the kernel's blocks do not run side by side, and the next chunk waits for it.
    pub(super) fn claim(&mut self) -> Option<(Arc<Job>, Claim)> {
        let alone = self.is_alone();
        if self.concluded || alone && self.has_busy() {
            return None;
        }
        let chunks = self.chunks;
        let open = self.cells.iter().enumerate();
        let open = open.filter(|(_, cell)| cell.turn != Turn::Over && cell.chunk < chunks);
        let ready = open.clone().filter(|(_, cell)| cell.turn == Turn::Host);
        let (at, chunk) = ready.map(|(at, cell)| (at, cell.chunk)).min_by_key(|one| one.1)?;
        let next = open.map(|(_, cell)| cell.chunk).min().unwrap_or(chunk);
        if alone && next < chunk && self.progress.elapsed() < self.in_order {
            return None;
        }
        self.progress = Instant::now();
        if let Some(cell) = self.cells.get_mut(at) {
            cell.turn = Turn::Busy;
        }
        let start = self.start_of(chunk);
        let claim = Claim {
            cell: at,
            chunk,
            place: if self.ring { start % self.bytes } else { start },
            start: start - self.first,
            len: self.len_of(chunk),
        };
        Some((Arc::clone(&self.job), claim))
    }

    /// A write of which one thread at a time writes a piece.
    fn is_alone(&self) -> bool {
        self.job.is_write() && !self.job.is_shared()
    }

    /// A write of which the kernel has not given everything yet.
    fn waits_for_kernel(&self) -> bool {
        self.job.is_write() && self.cells.iter().any(|cell| cell.turn == Turn::Device)
    }

    fn has_busy(&self) -> bool {
        self.cells.iter().any(|cell| cell.turn == Turn::Busy)
    }

    /// A piece that was claimed is to be dealt with by another thread.
    pub(super) fn put_back(&mut self, claim: &Claim) {
        if let Some(cell) = self.cells.get_mut(claim.cell) {
            cell.turn = Turn::Host;
        }
    }

    /// Takes in how far a piece came.
    pub(super) fn take(&mut self, claim: &Claim, came: Piece, request: &Request, common: &Common) {
        if self.concluded {
            return;
        }
        self.progress = Instant::now();
        let whole = came.done >= claim.len && came.failure.is_none();
        if self.job.is_write() {
            self.written(claim, came, whole, request, common);
        } else if let Some(failure) = came.failure {
            return self.fail(failure, request, common);
        } else {
            if !whole {
                self.end = self.end.min(claim.start + came.done);
                self.lower(claim.chunk + 1, request, common);
            }
            self.pass_on(claim.cell, came.done, request, common);
        }
        self.settle(request, common);
    }

    fn written(
        &mut self,
        claim: &Claim,
        came: Piece,
        whole: bool,
        request: &Request,
        common: &Common,
    ) {
        if !whole {
            if claim.start + came.done < self.end {
                self.end = claim.start + came.done;
                self.failed = came.failure;
            }
            self.lower(claim.chunk, request, common);
        }
        let next = claim.chunk.saturating_add(CELLS as u64);
        let more = self.ring && next < self.chunks;
        if let Some(cell) = self.cells.get_mut(claim.cell) {
            *cell = Cell { chunk: next, turn: if more { Turn::Device } else { Turn::Over } };
        }
        if more {
            self.give_turn(request, common, next, self.len_of(next));
        }
    }

    /// A cell was filled with so many bytes: the kernel's turn.
    fn pass_on(&mut self, at: usize, bytes: u64, request: &Request, common: &Common) {
        let Some(cell) = self.cells.get_mut(at) else { return };
        cell.turn = Turn::Device;
        let chunk = cell.chunk;
        if self.ring {
            self.give_turn(request, common, chunk, bytes);
            if !self.opened {
                self.opened = true;
                common.gates.open(request.gate, request.pass);
            }
        }
    }

    /// Of the chunks from there on none is moved.
    fn lower(&mut self, chunks: u64, request: &Request, common: &Common) {
        if chunks < self.chunks {
            self.chunks = chunks;
            common.gates.limit(request.gate, chunks);
        }
    }

    /// The request fails. A write is over when no thread writes any more.
    pub(super) fn fail(&mut self, failure: Failure, request: &Request, common: &Common) {
        if self.concluded {
            return;
        }
        self.end = 0;
        self.failed = Some(failure);
        self.lower(0, request, common);
        self.settle(request, common);
        if !self.job.is_write() {
            self.conclude(request, common);
        }
    }

    /// Looks at the kernel's words and the clock; whether anything came on.
    pub(super) fn look(&mut self, request: &Request, common: &Common) -> bool {
        if self.concluded {
            return false;
        }
        let done = self.refresh(request, common);
        if done > 0 {
            self.progress = Instant::now();
        }
        self.settle(request, common);
        if self.concluded {
            return true;
        }
        // A thread that came for a write before its kernel has ended waits for the device.
        let called = self.workers > 0 && (self.ring || !self.waits_for_kernel());
        let late = self.progress.elapsed() > common.stall;
        // Not again where all of it has failed already; a failed piece leaves those before it to be moved.
        let given_up = self.failed.is_some() && self.end == 0;
        if self.ring && !given_up && common.gates.has_failed(request.gate, request.pass) {
            let text = "the kernel of a stream-ordered request had no turn in time";
            self.fail(Failure::timeout(text), request, common);
        } else if late && (self.has_busy() || called) {
            let text = format!("a read or write of the file did not end within {:?}", common.stall);
            self.fail(Failure::timeout(text), request, common);
            // Whatever a thread still does.
            self.conclude(request, common);
        }
        self.concluded || done > 0
    }

    /// Takes over the cells that the kernel is done with; answers how many.
    fn refresh(&mut self, request: &Request, common: &Common) -> usize {
        let (gates, gate) = (&common.gates, request.gate);
        let (write, chunks) = (self.job.is_write(), self.chunks);
        let ended = !self.ring && write && gates.has_ended(gate, request.pass);
        let mut done = 0;
        for cell in self.cells.iter_mut().filter(|cell| cell.turn == Turn::Device) {
            if ended {
                cell.turn = Turn::Host;
            } else if self.ring && gates.is_done(gate, cell.chunk) {
                if !write {
                    cell.chunk = cell.chunk.saturating_add(CELLS as u64);
                }
                cell.turn = if cell.chunk < chunks { Turn::Host } else { Turn::Over };
            } else {
                continue;
            }
            done += 1;
        }
        done
    }

    /// Reports the request, if it has come to its end: every chunk was read and copied, or copied and written.
    fn settle(&mut self, request: &Request, common: &Common) {
        if self.concluded {
            return;
        }
        let left = |turns: &[Turn]| {
            let open = |cell: &Cell| cell.chunk < self.chunks && turns.contains(&cell.turn);
            self.cells.iter().any(open)
        };
        let over = if self.job.is_write() {
            !left(&[Turn::Host, Turn::Device]) && !self.has_busy()
        } else if self.ring {
            self.opened && !left(&[Turn::Host, Turn::Busy, Turn::Device])
        } else {
            !left(&[Turn::Host, Turn::Busy])
        };
        if over {
            self.conclude(request, common);
        }
    }

    fn conclude(&mut self, request: &Request, common: &Common) {
        if self.concluded {
            return;
        }
        self.concluded = true;
        common.moving.fetch_sub(1, Ordering::Relaxed);
        let open = !self.opened;
        if open {
            // All the kernel's at once; nothing where it failed, or the gate was to be opened by a first chunk.
            self.opened = true;
            self.ring = false;
            self.describe(request, common, self.first.saturating_add(self.end));
        }
        let outcome = match self.failed.take() {
            Some(failure) if self.end == 0 => Err(failure),
            _ => Ok(self.end),
        };
        let cpu = self.cpu;
        self.report = self.finish.take().map(|finish| Report { finish, outcome, cpu, open });
    }
}

#[cfg(test)]
mod tests;
