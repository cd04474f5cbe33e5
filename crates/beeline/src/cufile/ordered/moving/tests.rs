//! The kernel and the threads of a request are played, so that every order of their steps can be had.

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

fn played(operation: Operation, threads: usize, len: u64, bytes: u64, stall: Duration) -> Played {
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
        let moving = Moving::new(job, (512 << 10, 4 << 20), others, Box::new(|_, _| Box::new(())));
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
