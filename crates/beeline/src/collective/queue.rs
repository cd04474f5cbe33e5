//! Where the order of one rank's calls stands: over streams, into captures, and at the end.

use std::sync::Arc;

use beeline_sys::cuda::CapturePoint;

use super::executor::{Batch, Executor, Posted, Tail};
use crate::core::collective::{Announcement, Collective};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Event, Stream};

/// Where the order of calls stands.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) collectives: u64,
    sends: Vec<u64>,
    receives: Vec<u64>,
    /// The stream of calls behind which no event stands yet; only inside of a call or a group.
    open: Option<Arc<Stream>>,
    last: Option<Last>,
    /// The end of the last call that became part of a graph.
    captured: Option<(Arc<Stream>, CapturePoint)>,
}

/// Where the calls queued so far end.
#[derive(Debug)]
struct Last {
    stream: Arc<Stream>,
    /// Behind the last call, in a stream that somebody may have destroyed since. One of this library lives as long as
    /// its handle; there an event is recorded when somebody needs it, not by each call.
    event: Option<Event>,
}

impl Queue {
    pub(super) fn new(ranks: u32) -> Self {
        let counts = vec![0; ranks as usize];
        Self { sends: counts.clone(), receives: counts, ..Self::default() }
    }

    /// Makes `stream`, which the next call is for, wait for what was queued in another one.
    pub(super) fn turn_to(&mut self, stream: &Arc<Stream>) -> Result<()> {
        if self.open.as_ref().is_some_and(|open| Arc::ptr_eq(open, stream)) {
            return Ok(());
        }
        self.settle()?;
        let other = |known: &Arc<Stream>| !Arc::ptr_eq(known, stream);
        if let Some((_, point)) = self.captured.as_ref().filter(|(known, _)| other(known))
            && let Some(handle) = stream.as_cuda()
        {
            // Of another capture, or of none: the program keeps the order, as with CUDA itself.
            handle.come_after(point).map_err(|error| uncaptured(stream, error))?;
        }
        if let Some(last) = self.last.as_ref().filter(|last| other(&last.stream)) {
            let waits = last.event().and_then(|event| stream.wait_event(&event));
            waits.or_else(unless_capturing)?;
        }
        self.open = Some(Arc::clone(stream));
        Ok(())
    }

    /// Records where the calls of the open stream end, where it would be too late afterwards.
    pub(super) fn settle(&mut self) -> Result<()> {
        let Some(stream) = self.open.take() else { return Ok(()) };
        let Some(handle) = stream.as_cuda().filter(|handle| !handle.is_own()) else {
            self.last = Some(Last { stream, event: None });
            return Ok(());
        };
        let result = match stream.record() {
            Ok(event) => {
                self.last = Some(Last { stream: Arc::clone(&stream), event: Some(event) });
                Ok(())
            }
            Err(error) if error.code() == CAPTURING => handle
                .capture_point()
                .map(|point| {
                    if let Some(point) = point {
                        self.captured = Some((Arc::clone(&stream), point));
                    }
                })
                .map_err(|error| uncaptured(&stream, error)),
            Err(error) => Err(error),
        };
        if result.is_err() {
            self.open = Some(stream);
        }
        result
    }

    /// Where everything that was queued ends.
    pub(super) fn tail(&mut self) -> Tail {
        match self.settle().and_then(|()| self.last.as_ref().map(Last::event).transpose()) {
            Ok(None) => Tail::Idle,
            Ok(Some(event)) => Tail::Event(event),
            Err(error) => {
                tracing::warn!(%error, "no event can be recorded behind the calls of a communicator");
                Tail::Unknown
            }
        }
    }

    pub(super) fn transfers(
        &mut self,
        executor: &mut Executor,
        all: Vec<(Posted, Arc<Stream>)>,
        stream: &Arc<Stream>,
    ) -> Result<Option<Announcement>> {
        let mut others: Vec<Arc<Stream>> = Vec::new();
        for (_, other) in &all {
            if !Arc::ptr_eq(other, stream) && !others.iter().any(|known| Arc::ptr_eq(known, other))
            {
                stream.wait_event(&other.record()?)?;
                others.push(Arc::clone(other));
            }
        }
        let (mut sends, mut receives) = (self.sends.clone(), self.receives.clone());
        let mut batch = Vec::with_capacity(all.len());
        for (mut posted, _) in all {
            let counts =
                if posted.call.kind == Collective::Send { &mut sends } else { &mut receives };
            if let Some(count) = counts.get_mut(posted.call.root as usize) {
                *count += 1;
                posted.sequence = *count;
            }
            batch.push(posted);
        }
        let last = batch.last();
        let last = last.map(|one| Announcement { sequence: one.sequence, call: one.call });
        executor.enqueue(&Batch::Transfers(batch), stream)?;
        (self.sends, self.receives) = (sends, receives);
        if !others.is_empty() {
            let done = stream.record()?;
            // The second event lets go of the first, so that the end of a handle need not touch the stream.
            others.iter().try_for_each(|other| {
                other.wait_event(&done)?;
                other.record().map(drop)
            })?;
        }
        Ok(last)
    }
}

impl Last {
    fn event(&self) -> Result<Event> {
        self.event.clone().map_or_else(|| self.stream.record(), Ok)
    }
}

#[cold]
fn uncaptured(stream: &Stream, error: beeline_sys::cuda::Error) -> Error {
    let text = format!("cannot order calls of a communicator in the capture of {stream:?}");
    Error::new(Kind::Device, text).because(error)
}

const CAPTURING: &str = "stream-capturing";

/// Between a graph and what is outside of it the program keeps the order, as with CUDA itself.
fn unless_capturing(error: Error) -> Result<()> {
    if error.code() == CAPTURING { Ok(()) } else { Err(error) }
}
