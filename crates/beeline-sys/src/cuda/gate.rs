//! Gates: a stream of the caller's tells the host that it has come to a point, and waits there until the
//! host lets it go on. Stream memory operations on words of pinned memory; no callback runs.

use std::fmt;
use std::sync::Arc;

use super::device::{Driver, StreamGuard};
use super::error::Error;
use super::memory::HostRegistration;
use super::stream::ForeignStream;
use super::types::*;
use crate::mem::HostMem;

/// Bytes of one gate: two words, on a cache line of their own.
const GATE_BYTES: u64 = 64;

/// Pinned memory full of gates.
pub struct Gates {
    memory: Arc<HostRegistration>,
    host: Arc<HostMem>,
}

/// One gate of a [`Gates`], by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate(pub u32);

impl Gates {
    /// As many gates as `memory` has room for.
    pub const fn new(memory: Arc<HostRegistration>, host: Arc<HostMem>) -> Self {
        Self { memory, host }
    }

    /// How many there are.
    pub fn len(&self) -> u32 {
        u32::try_from(self.memory.len() / GATE_BYTES).unwrap_or(u32::MAX)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Queues in `stream`: tell that pass `pass` has come to `gate`, and wait until it is opened for it or
    /// for a later one. Passes of a gate count up, and wrap.
    /// The stream is used in its own context, or the current one where it is a default stream.
    ///
    /// # Errors
    /// `Capturing` where the stream is being captured, and nothing was queued; `Unsupported` where the
    /// driver has no stream memory operations; what the driver says. Where the second of the two
    /// operations fails, the first was queued: true says so, and the gate must not be used again.
    pub fn pass(
        &self,
        driver: &Arc<Driver>,
        stream: ForeignStream,
        gate: Gate,
        pass: u32,
    ) -> Result<(), (Error, bool)> {
        let clean = |error| (error, false);
        let table = driver.table();
        let (Some(write), Some(wait)) = (table.cuStreamWriteValue32, table.cuStreamWaitValue32)
        else {
            return Err(clean(Error::Unsupported { what: "stream memory operations" }));
        };
        let _guard = StreamGuard::enter(driver, stream).map_err(clean)?;
        refuse_capturing(driver, stream).map_err(clean)?;
        let at = u64::from(gate.0) * GATE_BYTES;
        let told = self.memory.device_at(at, 4).map_err(|error| clean(error.into()))?;
        let opened = self.memory.device_at(at + 4, 4).map_err(|error| clean(error.into()))?;
        // SAFETY: an aligned word of memory that lives as long as the process's gates.
        let result = unsafe { write(stream.raw(), told, pass, 0) };
        driver.check("cuStreamWriteValue32", result, || format!("{stream:?}")).map_err(clean)?;
        // A stream that looks late may find the gate opened for a later pass already: passes count up, and
        // the comparison is cyclic.
        // SAFETY: as above.
        let result = unsafe { wait(stream.raw(), opened, pass, WaitFlags::GEQ) };
        let waits = driver.check("cuStreamWaitValue32", result, || format!("{stream:?}"));
        waits.map_err(|error| (error, true))
    }

    /// Whether pass `pass` has come to `gate`.
    pub fn has_come(&self, gate: Gate, pass: u32) -> bool {
        self.host.load_u32(u64::from(gate.0) * GATE_BYTES) == Ok(pass)
    }

    /// Opens `gate` for pass `pass`.
    pub fn open(&self, gate: Gate, pass: u32) {
        let _ = self.host.store_u32(u64::from(gate.0) * GATE_BYTES + 4, pass);
    }
}

impl fmt::Debug for Gates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gates({})", self.len())
    }
}

impl ForeignStream {
    /// Waits until everything queued in the stream has run. Refused while it is being captured.
    ///
    /// # Errors
    /// `Capturing`; `Unsupported`; what the driver says.
    pub fn finish(self, driver: &Arc<Driver>) -> Result<(), Error> {
        let wait = driver.table().cuStreamSynchronize;
        let wait = wait.ok_or(Error::Unsupported { what: "stream synchronisation" })?;
        let _guard = StreamGuard::enter(driver, self)?;
        refuse_capturing(driver, self)?;
        // SAFETY: a stream that its owner keeps while calls on it run.
        let result = unsafe { wait(self.raw()) };
        driver.check("cuStreamSynchronize", result, || format!("{self:?}"))
    }

    /// Whether everything queued in the stream has run. Refused while it is being captured.
    ///
    /// # Errors
    /// `Capturing`; `Unsupported`; what the driver says.
    pub fn is_finished(self, driver: &Arc<Driver>) -> Result<bool, Error> {
        let query = driver.table().cuStreamQuery;
        let Some(query) = query else { return self.finish(driver).map(|()| true) };
        let _guard = StreamGuard::enter(driver, self)?;
        refuse_capturing(driver, self)?;
        // SAFETY: a stream that its owner keeps while calls on it run.
        let result = unsafe { query(self.raw()) };
        if result == CuResult::NOT_READY {
            return Ok(false);
        }
        driver.check("cuStreamQuery", result, || format!("{self:?}"))?;
        Ok(true)
    }

    /// Whether the stream was made with a higher priority than usual. Not known is no.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_urgent(self, driver: &Arc<Driver>) -> Result<bool, Error> {
        let Some(ask) = driver.table().cuStreamGetPriority else { return Ok(false) };
        let _guard = StreamGuard::enter(driver, self)?;
        let mut priority = 0;
        // SAFETY: `priority` is a place for one number; a stream that its owner keeps.
        let result = unsafe { ask(self.raw(), &raw mut priority) };
        driver.check("cuStreamGetPriority", result, || format!("{self:?}"))?;
        // Lower numbers are more urgent, 0 is usual (CUDA driver API, cuCtxGetStreamPriorityRange).
        Ok(priority < 0)
    }

    /// Whether the driver knows the stream; a default stream always.
    pub fn is_known(self, driver: &Arc<Driver>) -> bool {
        StreamGuard::enter(driver, self).is_ok()
    }
}

/// # Errors
/// `Capturing` where `stream` is being captured, or is the legacy default stream while another is.
fn refuse_capturing(driver: &Driver, stream: ForeignStream) -> Result<(), Error> {
    const CAPTURE_IMPLICIT: CuResult = CuResult(906);
    let mut status = 0;
    // SAFETY: `status` is a place for one enum; a stream that its owner keeps.
    let result = unsafe { (driver.table().cuStreamIsCapturing)(stream.raw(), &raw mut status) };
    if result == CAPTURE_IMPLICIT {
        return Err(Error::Capturing);
    }
    driver.check("cuStreamIsCapturing", result, || format!("{stream:?}"))?;
    if status == 0 { Ok(()) } else { Err(Error::Capturing) }
}
