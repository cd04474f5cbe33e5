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
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::OnceLock;

    use beeline_core::plan::Operation;
    use beeline_sys::cuda::{Gate, Gates};
    use beeline_sys::mem::HostMem;

    use super::super::super::handle::Handle;
    use super::super::request::{Ask, Begun, Rest};
    use super::*;

    const CELL: u64 = 4096;
    const PASS: u32 = 7;
    const GATE: Gate = Gate(0);

    struct Nothing;

    impl Ask for Nothing {
        fn begin(self: Box<Self>, _: Option<u64>) -> Begun {
            Begun::Later(self)
        }

        fn fail(self: Box<Self>, _: Failure) -> Rest {
            self
        }
    }

    /// A request of so many bytes, whose kernel and threads the test plays.
    struct Played {
        common: Common,
        request: Request,
        moving: Moving,
    }

    fn played(
        operation: Operation,
        threads: usize,
        len: u64,
        bytes: u64,
        stall: Duration,
    ) -> Played {
        static FILE: OnceLock<(tempfile::NamedTempFile, Arc<Handle>)> = OnceLock::new();
        let (_, handle) = FILE.get_or_init(|| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let handle = Arc::new(Handle::new(file.as_file().as_raw_fd()).unwrap());
            (file, handle)
        });
        let host = Arc::new(HostMem::anonymous(4096).unwrap());
        let common = Common::new(Gates::without_device(host), 8, stall);
        common.moving.store(1, Ordering::Relaxed);
        let write = operation == Operation::Write;
        let request = Request::new((GATE, PASS), (None, write), Box::new(Nothing));
        let job = Job::played(Arc::clone(handle), operation, threads, len);
        let finish: Finish = Box::new(|_, _| Box::new(()));
        let moving = Moving::new(job, ((bytes / CELLS as u64) as u32, bytes), 0, finish);
        moving.describe(&request, &common, moving.last);
        Played { common, request, moving }
    }

    const LONG: Duration = Duration::from_secs(60);

    impl Played {
        fn look(&mut self) {
            self.moving.look(&self.request, &self.common);
        }

        /// A thread takes the next piece, and comes as far as `came` says of its length.
        fn piece(&mut self, came: impl FnOnce(u64) -> u64) -> Option<u64> {
            let (_, claim) = self.moving.claim()?;
            self.come(&claim, came(claim.len));
            Some(claim.chunk)
        }

        fn come(&mut self, claim: &Claim, done: u64) {
            let failure = (done == u64::MAX).then(|| Failure::value("refused"));
            let done = if failure.is_some() { 0 } else { done };
            self.moving.take(claim, Piece { done, failure }, &self.request, &self.common);
        }

        fn done(&mut self, chunks: std::ops::Range<u64>) {
            chunks.for_each(|chunk| self.common.gates.play_done(GATE, chunk));
            self.look();
        }

        /// What the caller is told: bytes, or the error's number or code.
        fn told(&self) -> Option<Result<u64, i32>> {
            let outcome = &self.moving.report.as_ref()?.outcome;
            Some(outcome.clone().map_err(|f| if f.errno == 0 { f.code.0 } else { f.errno }))
        }
    }

    const TIMEOUT: i32 = 110;
    const SLOT: u64 = CELLS as u64 * CELL;

    #[test]
    fn a_long_read_is_over_when_every_chunk_was_seen_done() {
        let mut it = played(Operation::Read, 4, 9 * CELL + 5, SLOT, LONG);
        for chunk in 0..8 {
            assert_eq!(it.piece(|len| len), Some(chunk));
            assert_eq!(it.common.gates.turn_at(GATE, chunk), Some((chunk as u32, CELL as u32)));
        }
        assert_eq!(it.piece(|len| len), None, "no cell is free");
        assert_eq!(it.common.gates.are_open(GATE, PASS), (true, false));
        it.done(1..8);
        assert_eq!(it.piece(|len| len), Some(9), "cell 1 is free, cell 0 is not");
        it.done(9..10);
        it.common.gates.play_end(GATE, PASS, false);
        it.look();
        assert_eq!(it.told(), None, "chunks 0 and 8 were not seen done");
        it.done(0..1);
        assert_eq!(it.piece(|len| len), Some(8));
        assert_eq!(it.told(), None);
        it.done(8..9);
        assert_eq!(it.told(), Some(Ok(9 * CELL + 5)));
    }

    /// All that it had was copied, then the host stood still for too long, and looks again.
    #[test]
    fn a_kernel_that_gave_up_is_no_success() {
        let mut it = played(Operation::Read, 4, 20 * CELL, SLOT, LONG);
        (0..8).for_each(|_| assert!(it.piece(|len| len).is_some()));
        (0..8).for_each(|chunk| it.common.gates.play_done(GATE, chunk));
        it.common.gates.play_end(GATE, PASS, true);
        it.look();
        assert_eq!(it.told(), Some(Err(TIMEOUT)));
        assert_eq!(it.common.gates.load_of(GATE).chunks, 0);
    }

    #[test]
    fn the_end_of_the_file_ends_the_read() {
        for (short, came, chunks) in [(2, 100, 3), (0, 0, 1)] {
            let mut it = played(Operation::Read, 4, 20 * CELL, SLOT, LONG);
            for chunk in 0..8 {
                let piece = it.piece(|len| if chunk == short { came } else { len });
                assert!(piece.is_some() || chunk > short);
            }
            assert_eq!(it.common.gates.load_of(GATE).chunks, chunks);
            it.done(0..chunks);
            assert_eq!(it.told(), Some(Ok(short * CELL + came)), "short at {short}");
        }
    }

    #[test]
    fn what_fits_is_copied_at_once_as_far_as_there_is() {
        for (came, told, copied) in
            [(8 * CELL, Ok(8 * CELL), 8 * CELL), (77, Ok(77), 77), (0, Ok(0), 0)]
        {
            let mut it = played(Operation::Read, 4, 8 * CELL, SLOT, LONG);
            it.piece(|_| came);
            assert_eq!(it.told(), Some(told));
            let load = it.common.gates.load_of(GATE);
            assert_eq!((load.first, load.last, load.ring), (0, copied, false));
            assert_eq!(it.common.gates.are_open(GATE, PASS), (false, false), "before it is told");
        }
        let mut it = played(Operation::Read, 4, 8 * CELL, SLOT, LONG);
        it.piece(|_| u64::MAX);
        assert_eq!(it.told(), Some(Err(5022)));
        assert_eq!(it.common.gates.load_of(GATE).last, 0, "nothing is copied");
    }

    #[test]
    fn beside_many_a_request_that_fits_is_copied_at_once() {
        for (others, len, parts) in
            [(FEW - 1, 2 << 20, true), (FEW, 2 << 20, false), (FEW, 5 << 20, true)]
        {
            let it = played(Operation::Read, 4, len, 4 << 20, LONG);
            let job = Job::played(Arc::clone(it.moving.job.handle()), Operation::Read, 4, len);
            let moving =
                Moving::new(job, (512 << 10, 4 << 20), others, Box::new(|_, _| Box::new(())));
            assert_eq!(moving.ring, parts, "{others} others, {len} bytes");
        }
    }

    /// The thread of a small write comes before its kernel has ended: what is late then is the device, which may be so.
    #[test]
    fn a_thread_that_came_early_does_not_count_as_one_that_hangs() {
        let mut it = played(Operation::Write, 1, 100, SLOT, Duration::ZERO);
        it.moving.workers = 1;
        std::thread::sleep(Duration::from_millis(1));
        it.look();
        assert_eq!(it.told(), None);
        it.common.gates.play_end(GATE, PASS, false);
        it.look();
        std::thread::sleep(Duration::from_millis(1));
        it.look();
        assert_eq!(it.told(), Some(Err(TIMEOUT)));
    }

    /// Its stream goes on when the first part is there.
    #[test]
    fn a_long_request_is_copied_in_parts_though_it_fits() {
        for (len, parts) in [(WHOLE_MAX, false), (WHOLE_MAX + 1, true)] {
            let mut it = played(Operation::Read, 4, len, 4 << 20, LONG);
            assert_eq!(it.common.gates.load_of(GATE).ring, parts, "{len}");
            assert!(it.piece(|len| len).is_some());
            assert_eq!(it.common.gates.are_open(GATE, PASS), (parts, false), "{len}");
        }
    }

    #[test]
    fn a_write_by_one_thread_goes_forward() {
        let mut it = played(Operation::Write, 1, 9 * CELL, SLOT, LONG);
        it.moving.in_order = LONG;
        it.done(3..4);
        assert!(it.moving.claim().is_none(), "chunk 0 comes first");
        it.done(0..1);
        let (_, first) = it.moving.claim().unwrap();
        assert_eq!(first.chunk, 0);
        assert!(it.moving.claim().is_none(), "one piece at a time");
        it.come(&first, CELL);
        assert_eq!(it.common.gates.turn_at(GATE, 0), Some((8, CELL as u32)));
        assert!(it.moving.claim().is_none(), "chunk 1 comes first");
        it.moving.in_order = Duration::ZERO;
        assert_eq!(it.piece(|len| len), Some(3), "the others do not run");
        it.done(1..9);
        (0..7).for_each(|_| assert!(it.piece(|len| len).is_some()));
        assert_eq!(it.told(), Some(Ok(9 * CELL)));
    }

    #[test]
    fn a_write_that_fails_is_over_when_no_thread_writes() {
        let mut it = played(Operation::Write, 3, 9 * CELL, SLOT, LONG);
        it.done(0..8);
        let claims: Vec<Claim> = (0..3).map(|_| it.moving.claim().unwrap().1).collect();
        it.come(&claims[1], u64::MAX);
        assert_eq!(it.told(), None, "0 and 2 are being written");
        it.come(&claims[0], CELL);
        assert_eq!(it.told(), None, "2 is being written");
        it.come(&claims[2], CELL);
        assert_eq!(it.told(), Some(Ok(CELL)), "the bytes before the first that failed");
    }

    #[test]
    fn what_hangs_is_given_up_and_comes_too_late() {
        let mut it = played(Operation::Write, 1, 9 * CELL, SLOT, Duration::ZERO);
        it.done(0..8);
        let (_, claim) = it.moving.claim().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        it.look();
        assert_eq!(it.told(), Some(Err(TIMEOUT)));
        it.come(&claim, CELL);
        assert_eq!(it.told(), Some(Err(TIMEOUT)));
        assert!(it.moving.claim().is_none());
    }
}
