//! Requests in streams: what is known at the call, and what is found out when the stream has come to them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_core::addr::ByteRange;
use beeline_core::plan::Operation;
use beeline_sys::cuda::{CELLS, Driver, Error as CudaError, ForeignStream, StageKernel};
use beeline_sys::user::UserPtr;

use super::buffers::{Looked, Place, Target};
use super::mover::{self, Job};
use super::options;
use super::ordered::{Ask, Begun, Carrier, Finish, Ordered, Refusal, Rest, Work};
use super::session::{Late, Session, uuid_of};
use super::status::{Failure, OpError, Outcome};

/// Bytes of a page, by which the start of a request may be moved in its slot.
const PAGE: u64 = 4096;

/// A request whose stream has not come to it yet: what is fixed by the stream's flags, and where the rest stands.
struct Asked {
    session: Arc<Session>,
    operation: Operation,
    handle: usize,
    ptr: UserPtr,
    late: Late,
    size: Option<usize>,
    file_offset: Option<i64>,
    ptr_offset: Option<i64>,
    /// What the pointer was at the call.
    looked: Looked,
    place: Place,
    /// Of a file that takes whole blocks alone, the length of one; else 1.
    block: u64,
}

/// Why a request is carried out at the call.
#[derive(Clone, Copy, Debug)]
enum AtCall {
    /// `miscellaneous.stream_memops_bypass`.
    Setting,
    NoStreamOperations,
    NoKernel,
    OtherContext,
    Managed,
    NoSlot,
    Blocks,
}

impl AtCall {
    const fn text(self) -> &'static str {
        match self {
            Self::Setting => "stream_memops_bypass is set",
            Self::NoStreamOperations => "the driver has no stream memory operations",
            Self::NoKernel => "the kernel that copies in the stream could not be loaded",
            Self::OtherContext => "the memory belongs to another device or context than the stream",
            Self::Managed => "the device lets the CPU use managed memory only while it is idle",
            Self::Blocks => {
                "the file is open for direct I/O alone, with blocks that no slot can be cut into"
            }
            Self::NoSlot => "all pinned memory for requests in streams is in use",
        }
    }
}

impl Session {
    /// Carries a request out when `stream` comes to it; what is fixed by the stream's flags is taken now.
    pub(super) fn queue(
        self: &Arc<Self>,
        operation: Operation,
        id: usize,
        ptr: UserPtr,
        late: Late,
        (stream, key): (ForeignStream, usize),
    ) -> Outcome<()> {
        const FIXED_PTR: u32 = 1;
        const FIXED_FILE: u32 = 2;
        const FIXED_SIZE: u32 = 4;
        let handle = self.handle(id)?;
        handle.check(operation)?;
        let block = if handle.direct_only { handle.file.direct_block().max(1) } else { 1 };
        drop(handle);
        if ptr.address() == 0 {
            return Err(Failure::value("the buffer is a null pointer"));
        }
        let Some(driver) = &self.cuda else {
            let text = "there is no CUDA driver, so there are no streams";
            return Err(Failure::new(OpError::ASYNC_NOT_SUPPORTED, text));
        };
        let flags = self.stream_flags(key, || stream.id(driver));
        let looked = Looked::at(Some(driver), ptr.address())?;
        let place = looked.place((ptr.address(), 0, 0), &self.lanes, self.settings())?;
        let asked = Asked {
            session: Arc::clone(self),
            operation,
            handle: id,
            ptr,
            late,
            size: (flags & FIXED_SIZE != 0).then(|| late.size.get()),
            file_offset: (flags & FIXED_FILE != 0).then(|| late.file_offset.get()),
            ptr_offset: (flags & FIXED_PTR != 0).then(|| late.ptr_offset.get()),
            looked,
            place,
            block,
        };
        late.moved.set(0);
        let (reason, asked) = match self.carry(driver, &asked, stream)? {
            Carried::AtCall(reason) => (reason, asked),
            Carried::InStream(ordered, carrier) => match ordered.queue(stream, carrier, asked) {
                Ok(()) => return Ok(()),
                Err(Refusal::Failed(failure)) => return Err(failure),
                Err(Refusal::Unsupported(asked)) => (AtCall::NoStreamOperations, asked),
            },
        };
        self.tell_once(reason);
        self.until_finished(driver, stream)?;
        asked.at_call();
        Ok(())
    }

    /// Who moves the bytes of a request.
    fn carry(
        &self,
        driver: &Arc<Driver>,
        asked: &Asked,
        stream: ForeignStream,
    ) -> Outcome<Carried> {
        if self.options.bool(options::MEMOPS_BYPASS) {
            return Ok(Carried::AtCall(AtCall::Setting));
        }
        if !driver.has_stream_operations() {
            return Ok(Carried::AtCall(AtCall::NoStreamOperations));
        }
        if !asked.looked.is_host_safe(driver) {
            return Ok(Carried::AtCall(AtCall::Managed));
        }
        let ordered = self.ordered(driver, &asked.place)?;
        if matches!(asked.place, Place::Host) || asked.looked.is_managed() {
            return Ok(Carried::InStream(ordered, None));
        }
        if !cells_hold(ordered.cell_max(), asked.block) {
            return Ok(Carried::AtCall(AtCall::Blocks));
        }
        let kernel = match self.kernel_for(driver, &ordered, &asked.looked, stream) {
            Ok(kernel) => kernel,
            Err(reason) => return Ok(Carried::AtCall(reason)),
        };
        // A guess, as they may be changed until the stream comes: a wrong one costs time.
        let bytes = asked.size() as u64;
        let lead = asked.ptr.address().wrapping_add_signed(asked.ptr_offset()) % 16;
        let lead = lead.max(u64::from(bytes > PAGE && asked.file_offset() % 512 != 0) * PAGE);
        let out = asked.operation == Operation::Write;
        let bytes = bytes.saturating_add(lead).max(slot_for(asked.block));
        let since = Instant::now();
        loop {
            // A smaller one may come where there is none of that length.
            let carrier = ordered.carrier(kernel, out, bytes)?;
            if let Some(carrier) = carrier.filter(|carrier| cells_hold(carrier.cell(), asked.block))
            {
                return Ok(Carried::InStream(ordered, Some(carrier)));
            }
            // Either comes: another request's end, or this stream's.
            if self.is_finished(driver, stream, since)? {
                return Ok(Carried::AtCall(AtCall::NoSlot));
            }
        }
    }

    fn kernel_for(
        &self,
        driver: &Arc<Driver>,
        ordered: &Ordered,
        looked: &Looked,
        stream: ForeignStream,
    ) -> Result<StageKernel, AtCall> {
        let told = |error: &CudaError| tracing::debug!(%error, "no kernel for {stream:?}");
        let home = stream.home(driver).map_err(|error| {
            told(&error);
            AtCall::NoKernel
        })?;
        if !looked.is_reached_from(home) {
            return Err(AtCall::OtherContext);
        }
        ordered.kernel(stream, home).map_err(|error| {
            if !matches!(error, CudaError::Unsupported { .. }) {
                tracing::warn!(%error, "the kernel of stream-ordered requests");
            }
            AtCall::NoKernel
        })
    }

    fn tell_once(&self, reason: AtCall) {
        let bit = 1_u32 << (reason as u32);
        if self.told.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            tracing::info!("requests in streams are carried out at the call: {}", reason.text());
        }
    }

    /// Waits until all that is queued in `stream` has run.
    fn until_finished(&self, driver: &Arc<Driver>, stream: ForeignStream) -> Outcome<()> {
        let since = Instant::now();
        while !self.is_finished(driver, stream, since)? {}
        Ok(())
    }

    /// Whether all that is queued in `stream` has run; pauses where not.
    fn is_finished(
        &self,
        driver: &Arc<Driver>,
        stream: ForeignStream,
        since: Instant,
    ) -> Outcome<bool> {
        let failed = |error| Failure::cuda("wait for the stream", &error);
        if stream.is_finished(driver).map_err(failed)? {
            return Ok(true);
        }
        let waited = since.elapsed();
        if waited > self.stall {
            return Err(Failure::timeout(format!(
                "the stream did not come to the request within {:?}; nothing was queued",
                self.stall
            )));
        }
        if waited > Duration::from_micros(100) {
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(false)
    }
}

/// Bytes of a slot of which each cell holds a block.
const fn slot_for(block: u64) -> u64 {
    block.saturating_mul(CELLS as u64)
}

/// Whether cells of so many bytes start with blocks, wherever the bytes of a request lie in the file: chunk by chunk, each is
/// read or written for itself.
const fn cells_hold(cell: u32, block: u64) -> bool {
    (cell as u64).is_multiple_of(block)
}

/// Who moves the bytes of a request.
enum Carried {
    AtCall(AtCall),
    /// The host alone, or with the kernel and the slot of a carrier.
    InStream(Arc<Ordered>, Option<Carrier>),
}

impl Asked {
    fn size(&self) -> usize {
        self.size.unwrap_or_else(|| self.late.size.get())
    }

    fn file_offset(&self) -> i64 {
        self.file_offset.unwrap_or_else(|| self.late.file_offset.get())
    }

    fn ptr_offset(&self) -> i64 {
        self.ptr_offset.unwrap_or_else(|| self.late.ptr_offset.get())
    }

    /// The stream has come to it: like any other request.
    fn at_call(self) {
        let (size, offsets) = (self.size() as u64, (self.file_offset(), self.ptr_offset()));
        let Self { session, operation, handle, ptr, late, .. } = self;
        report(late, &session.transfer(operation, handle, ptr, size, offsets));
    }

    fn count(
        &self,
        size: u64,
        (file_offset, ptr_offset): (i64, i64),
        outcome: &Outcome<u64>,
        took: Duration,
        cpu: Duration,
    ) {
        let stats = &self.session.stats;
        let moved = outcome.as_ref().ok().copied();
        let write = self.operation == Operation::Write;
        if stats.is_on() {
            stats.moved(write, size, moved, took);
            stats.spent(cpu);
        }
        if let Place::Device(lanes) = &self.place
            && let Some(gpu) = stats.gpu(lanes.ordinal, || uuid_of(lanes.gpu()))
        {
            let places = size | file_offset.cast_unsigned() | ptr_offset.cast_unsigned();
            gpu.moved(write, places.is_multiple_of(PAGE), moved, took);
        }
    }

    /// Checks what is asked for, now that it is known. Calls no driver: the call did.
    fn work(&self, size: u64, (file_offset, ptr_offset): (i64, i64)) -> Outcome<Work> {
        let (session, operation, ptr) = (&self.session, self.operation, self.ptr);
        let handle = session.handle(self.handle)?;
        handle.check(operation)?;
        let at = u64::try_from(file_offset)
            .map_err(|_| Failure::value(format!("the file offset {file_offset} is negative")))?;
        let (offset, registered) = session.registered(ptr, ptr_offset, size)?;
        if registered.is_none() {
            self.looked.check((ptr.address(), offset, size))?;
        }
        if at.checked_add(size).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(Failure::value(format!("{size} bytes at {at} end beyond every file")));
        }
        let target = Target { ptr, offset, place: self.place.clone() };
        let lanes = match &target.place {
            Place::Device(lanes) if !self.looked.is_managed() => lanes,
            _ => {
                let target = Target { place: Place::Host, ..target };
                let session = Arc::clone(session);
                return Ok(Work::Direct(Box::new(move || match operation {
                    Operation::Read => mover::read(session.means(), &handle, &target, at, size),
                    Operation::Write => mover::write(session.means(), &handle, &target, at, size),
                })));
            }
        };
        if size == 0 {
            return Ok(Work::Over(Ok(0)));
        }
        let (device, range) = (target.device_ptr(), ByteRange { start: at, len: size });
        let job = Job::new(session.means(), (Arc::clone(&handle), lanes), operation, device, range);
        Ok(Work::Through(Box::new(job)))
    }
}

impl Ask for Asked {
    fn begin(self: Box<Self>, limit: Option<u64>) -> Begun {
        let size = self.size() as u64;
        if limit.is_some_and(|limit| size > limit) {
            return Begun::Later(self);
        }
        let offsets = (self.file_offset(), self.ptr_offset());
        let since = Instant::now();
        let work = self.work(size, offsets).unwrap_or_else(|failure| Work::Over(Err(failure)));
        let finish: Finish = Box::new(move |outcome, cpu| {
            self.count(size, offsets, &outcome, since.elapsed(), cpu);
            report(self.late, &outcome);
            // What it holds may be the last of its kind, which goes when the stream has gone on.
            self as Rest
        });
        Begun::Now(work, finish)
    }

    fn fail(self: Box<Self>, failure: Failure) -> Rest {
        report(self.late, &Err(failure));
        self
    }
}

/// Tells the caller how many bytes were moved, or why none.
fn report(late: Late, outcome: &Outcome<u64>) {
    late.moved.set(match outcome {
        Ok(moved) => isize::try_from(*moved).unwrap_or(isize::MAX),
        Err(failure) => {
            tracing::error!(code = failure.code.0, "stream-ordered: {}", failure.text);
            failure.reported()
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where memory is short a slot may be smaller than was asked for.
    #[test]
    fn a_cell_holds_whole_blocks() {
        for (block, slot, smaller) in [
            (1, 8, true),
            (512, 4096, true),
            (4096, 32 << 10, true),
            (8192, 64 << 10, true),
            (16 << 10, 128 << 10, false),
            (64 << 10, 512 << 10, false),
        ] {
            assert_eq!(slot_for(block), slot, "{block}");
            // Of the smallest slot there is.
            assert_eq!(cells_hold(8192, block), smaller, "{block}");
            assert!(cells_hold(512 << 10, block), "{block}");
        }
    }
}
