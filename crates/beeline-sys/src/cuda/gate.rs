//! Gates: a stream of the caller's tells the host that it has come to a point, and waits there until the
//! host lets it go on. Stream memory operations on words of pinned memory; no callback runs. Between two gates, the
//! kernel of a request may move bytes.

use std::fmt;
use std::sync::Arc;

use super::device::{Driver, StreamGuard};
use super::error::Error;
use super::registration::HostRegistration;
use super::stage::{CONTROL_BYTES, Turns};
use super::stream::ForeignStream;
use super::types::*;
use crate::mem::HostMem;

/// Bytes of one gate and its end: three words of the stream's, and those of the kernel between them.
pub const GATE_BYTES: u64 = CONTROL_BYTES;
const COME: u64 = 0;
const GO: u64 = 4;
const END: u64 = 8;
pub(super) const ENDED: u64 = 12;

/// Pinned memory full of gates.
pub struct Gates {
    /// None where no device knows the memory.
    memory: Option<Arc<HostRegistration>>,
    host: Arc<HostMem>,
}

/// How much of a pass was queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// Nothing.
    Nothing,
    /// That the stream has come, perhaps the gate, and no kernel.
    Gate,
    /// The kernel, too.
    Kernel,
}

/// One gate of a [`Gates`], by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate(pub u32);

impl Gates {
    /// As many gates as `memory` has room for.
    pub const fn new(memory: Arc<HostRegistration>, host: Arc<HostMem>) -> Self {
        Self { memory: Some(memory), host }
    }

    /// The same without a device, which no stream can pass: whoever holds the memory plays it.
    pub const fn without_device(host: Arc<HostMem>) -> Self {
        Self { memory: None, host }
    }

    /// How many there are.
    pub fn len(&self) -> u32 {
        u32::try_from(self.host.len() / GATE_BYTES).unwrap_or(u32::MAX)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Queues in `stream`: tell that pass `pass` has come to `gate`, and wait until it is opened for it or
    /// for a later one; with `turns`, also that kernel, to tell that it has ended, and to wait for the gate's end, which is opened
    /// likewise.
    /// Passes of a gate count up, and wrap.
    /// The stream is used in its own context, or the current one where it is a default stream.
    ///
    /// # Errors
    /// `Capturing` where the stream is being captured, and nothing was queued; `Unsupported` where the
    /// driver has no stream memory operations; `Refused` and `Bounds` for a slot; what the driver says. And how much was
    /// queued nevertheless: the gate must not be used again before the stream has come, and the kernel, where it was
    /// queued, has ended.
    pub fn pass(
        &self,
        driver: &Arc<Driver>,
        stream: ForeignStream,
        gate: Gate,
        pass: u32,
        turns: Option<&Turns<'_>>,
    ) -> Result<(), (Error, Reached)> {
        let clean = |error| (error, Reached::Nothing);
        let table = driver.table();
        let (Some(write), Some(wait)) = (table.cuStreamWriteValue32, table.cuStreamWaitValue32)
        else {
            return Err(clean(Error::Unsupported { what: "stream memory operations" }));
        };
        let _guard = StreamGuard::enter(driver, stream).map_err(clean)?;
        refuse_capturing(driver, stream).map_err(clean)?;
        let memory =
            self.memory.as_ref().ok_or(clean(Error::Refused("no device knows the gates")))?;
        let control = memory.device_at(u64::from(gate.0) * GATE_BYTES, GATE_BYTES);
        let control = control.map_err(|error| clean(error.into()))?;
        turns.map_or(Ok(()), |turns| turns.check(control, pass)).map_err(clean)?;
        // SAFETY: an aligned word of memory that lives as long as the process's gates.
        let result = unsafe { write(stream.raw(), control + COME, pass, 0) };
        if result == CuResult::NOT_SUPPORTED {
            return Err(clean(Error::Unsupported { what: "stream memory operations" }));
        }
        driver.check("cuStreamWriteValue32", result, || format!("{stream:?}")).map_err(clean)?;
        let wait_for = |word| {
            // A stream that looks late may find the gate opened for a later pass already: passes count up, and
            // the comparison is cyclic.
            // SAFETY: as above.
            let result = unsafe { wait(stream.raw(), control + word, pass, WaitFlags::GEQ) };
            driver.check("cuStreamWaitValue32", result, || format!("{stream:?}"))
        };
        wait_for(GO).map_err(|error| (error, Reached::Gate))?;
        if let Some(turns) = turns {
            let launched = turns.launch(driver, stream, control, pass);
            launched.map_err(|error| (error, Reached::Gate))?;
            let reached = |error| (error, Reached::Kernel);
            // Behind a fence that makes visible what the kernel has written.
            // SAFETY: as above.
            let result = unsafe { write(stream.raw(), control + ENDED, pass, 0) };
            let told = driver.check("cuStreamWriteValue32", result, || format!("{stream:?}"));
            told.map_err(reached)?;
            wait_for(END).map_err(reached)?;
        }
        Ok(())
    }

    /// Whether pass `pass` has come to `gate`.
    pub fn has_come(&self, gate: Gate, pass: u32) -> bool {
        self.load_u32(gate, COME) == pass
    }

    /// Opens `gate` for pass `pass`.
    pub fn open(&self, gate: Gate, pass: u32) {
        self.store_u32(gate, GO, pass);
    }

    /// Opens its end.
    pub fn open_end(&self, gate: Gate, pass: u32) {
        self.store_u32(gate, END, pass);
    }

    // A gate that there is not has no words: what is stored there is nowhere, and what is loaded is 0.
    pub(super) fn load_u32(&self, gate: Gate, word: u64) -> u32 {
        self.host.load_u32(u64::from(gate.0) * GATE_BYTES + word).unwrap_or(0)
    }

    pub(super) fn load_u64(&self, gate: Gate, word: u64) -> u64 {
        self.host.load_u64(u64::from(gate.0) * GATE_BYTES + word).unwrap_or(0)
    }

    pub(super) fn store_u32(&self, gate: Gate, word: u64, value: u32) {
        let _ = self.host.store_u32(u64::from(gate.0) * GATE_BYTES + word, value);
    }

    pub(super) fn store_u64(&self, gate: Gate, word: u64, value: u64) {
        let _ = self.host.store_u64(u64::from(gate.0) * GATE_BYTES + word, value);
    }
}

impl fmt::Debug for Gates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gates({})", self.len())
    }
}

impl Driver {
    /// Whether streams can write and wait for words.
    pub fn has_stream_operations(&self) -> bool {
        let table = self.table();
        table.cuStreamWriteValue32.is_some() && table.cuStreamWaitValue32.is_some()
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

    /// Whether the driver knows the stream; a default stream always.
    pub fn is_known(self, driver: &Arc<Driver>) -> bool {
        StreamGuard::enter(driver, self).is_ok()
    }
}

/// # Errors
/// `Capturing` where `stream` is being captured, or is the legacy default stream while another is.
pub(super) fn refuse_capturing(driver: &Driver, stream: ForeignStream) -> Result<(), Error> {
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
