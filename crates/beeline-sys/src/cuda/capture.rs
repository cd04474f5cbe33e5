//! Order between the streams of one capture, where what is queued becomes part of a graph.

use std::sync::Arc;

use super::device::Context;
use super::error::Error;
use super::stream::Stream;
use super::types::*;

/// A point in a stream while it was being captured.
#[derive(Debug)]
pub struct CapturePoint {
    context: Arc<Context>,
    event: RawEvent,
    /// Which capture; no other of the process has its number.
    capture: u64,
}

impl Stream {
    /// Where what was queued so far ends, in the capture that this stream is part of; `None` where it is part of none.
    ///
    /// # Errors
    /// What the driver says, as of a capture that was spoilt.
    pub fn capture_point(&self) -> Result<Option<CapturePoint>, Error> {
        let Some(capture) = self.capture_number()? else { return Ok(None) };
        let context = Arc::clone(self.context());
        let _current = context.enter()?;
        let mut event = RawEvent::NULL;
        let create = context.table().cuEventCreate;
        // SAFETY: `event` is a place for one event; a context is current.
        let result = unsafe { create(&raw mut event, EVENT_DISABLE_TIMING) };
        context.check("cuEventCreate", result, String::new)?;
        let point = CapturePoint { context: Arc::clone(&context), event, capture };
        // SAFETY: both handles are alive and of the current context; in a capture this queues nothing.
        let result = unsafe { (context.table().cuEventRecord)(event, self.raw()) };
        context.check("cuEventRecord", result, || format!("in capture {capture}"))?;
        Ok(Some(point))
    }

    /// Has what is queued next come after `point` in the graph, where this stream is part of the same capture; whether it
    /// is. Between different captures, and between a graph and what is outside of it, the program keeps the order.
    ///
    /// # Errors
    /// What the driver says.
    pub fn come_after(&self, point: &CapturePoint) -> Result<bool, Error> {
        if self.capture_number()? != Some(point.capture) {
            return Ok(false);
        }
        let _current = self.context().enter()?;
        let wait = self.context().table().cuStreamWaitEvent;
        // SAFETY: both handles are alive; the event was recorded in the capture that the stream is part of.
        let result = unsafe { wait(self.raw(), point.event, 0) };
        let values = || format!("in capture {}", point.capture);
        self.context().check("cuStreamWaitEvent", result, values)?;
        Ok(true)
    }

    /// Has the stream, which is of this library and part of no capture, become part of the one of `point`, behind it. It must come
    /// together with a stream of the program's there again ([`Self::come_after`]) before the capture ends.
    ///
    /// # Errors
    /// `Refused` for a stream of somebody else's; what the driver says.
    pub fn enter_capture(&self, point: &CapturePoint) -> Result<(), Error> {
        if !self.is_own() {
            return Err(Error::Refused("only a stream of this library enters a capture"));
        }
        let _current = self.context().enter()?;
        let wait = self.context().table().cuStreamWaitEvent;
        // SAFETY: both handles are alive; the event was recorded in a capture.
        let result = unsafe { wait(self.raw(), point.event, 0) };
        self.context()
            .check("cuStreamWaitEvent", result, || format!("in capture {}", point.capture))
    }

    /// The number of the capture that the stream is part of; `None` also where the driver does not tell (before CUDA
    /// 11.3).
    fn capture_number(&self) -> Result<Option<u64>, Error> {
        const ACTIVE: i32 = 1;
        let Some(ask) = self.context().table().cuStreamGetCaptureInfo else { return Ok(None) };
        let _current = self.context().enter()?;
        let (mut status, mut number) = (0, 0);
        let (graph, after, count) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: places for one enum and one number, no others; the stream is alive while its `Stream` is.
        let result =
            unsafe { ask(self.raw(), &raw mut status, &raw mut number, graph, after, count) };
        self.context().check("cuStreamGetCaptureInfo", result, String::new)?;
        Ok((status == ACTIVE).then_some(number))
    }
}

impl Drop for CapturePoint {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: created by this value, destroyed once; a capture keeps what it needs of it.
            let _ = unsafe { (self.context.table().cuEventDestroy)(self.event) };
        }
    }
}
