//! Where the order of one rank's calls stands: over streams, into captures, and at the end.

use std::sync::Arc;

use beeline_sys::cuda::CapturePoint;

use super::executor::{Batch, Ends, Executor, Posted, Tail};
use crate::core::collective::{Announcement, Collective};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Event, Stream};

/// Where the order of calls stands.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) collectives: u64,
    sends: Vec<u64>,
    receives: Vec<u64>,
    /// The stream of calls whose end is not noted yet; only inside of a call or a group.
    open: Option<Open>,
    last: Option<Last>,
    /// The end of the last call that became part of a graph.
    captured: Option<(Arc<Stream>, CapturePoint)>,
}

#[derive(Debug)]
struct Open {
    stream: Arc<Stream>,
    /// Of all calls; once one needs an event, it stays so. `None`: nothing was queued.
    ends: Option<Ends>,
    /// Whether it was made to wait for another stream: then it holds what it waits for until an event stands behind that.
    waits: bool,
}

/// Where the calls queued so far end.
#[derive(Debug)]
struct Last {
    stream: Arc<Stream>,
    end: End,
}

#[derive(Debug)]
enum End {
    /// Of a stream of this library, which lives as long as its handle: an event is recorded when somebody needs it.
    Stream,
    /// Somebody may have destroyed the stream since.
    Event(Event),
    /// So many blocks are done then: no call of the driver stands behind the last kernel.
    Counted(u32),
}

/// How many calls were queued: of all ranks, and of this one to and from each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts<'a> {
    pub(super) collectives: u64,
    pub(super) sends: &'a [u64],
    pub(super) receives: &'a [u64],
}

impl Queue {
    pub(super) fn counts(&self) -> Counts<'_> {
        let Self { collectives, sends, receives, .. } = self;
        Counts { collectives: *collectives, sends, receives }
    }

    pub(super) fn new(ranks: u32) -> Self {
        let counts = vec![0; ranks as usize];
        Self { sends: counts.clone(), receives: counts, ..Self::default() }
    }

    /// Makes `stream`, which the next call is for, wait for what was queued in another one.
    pub(super) fn turn_to(&mut self, executor: &Executor, stream: &Arc<Stream>) -> Result<()> {
        if self.open.as_ref().is_some_and(|open| Arc::ptr_eq(&open.stream, stream)) {
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
        let last = self.last.as_ref().filter(|last| other(&last.stream));
        if let Some(last) = last {
            let held = last.hold_back(executor, stream).or_else(unless_capturing);
            if held.is_err() {
                // What the stream may hold for it is let go behind an event; the order stands as it was noted.
                let _ = stream.record();
            }
            held?;
        }
        let waits = last.is_some();
        self.open = Some(Open { stream: Arc::clone(stream), ends: None, waits });
        Ok(())
    }

    /// Notes that copies are about to be queued in the open stream, or a part of them.
    pub(super) fn copies(&mut self) {
        if let Some(open) = &mut self.open {
            open.ends = Some(Ends::Event);
        }
    }

    /// Counts calls that copies carry; how the last one is announced.
    pub(super) fn copied(&mut self, calls: &[&Posted]) -> Option<Announcement> {
        let mut last = None;
        for posted in calls {
            let counts = match posted.call.kind {
                Collective::Send => self.sends.get_mut(posted.call.root as usize),
                Collective::Recv => self.receives.get_mut(posted.call.root as usize),
                _ => Some(&mut self.collectives),
            };
            if let Some(count) = counts {
                *count += 1;
                last = Some(Announcement { sequence: *count, call: posted.call });
            }
        }
        last
    }

    /// Queues calls in the open stream.
    pub(super) fn enqueue(
        &mut self,
        executor: &mut Executor,
        batch: &Batch,
        stream: &Stream,
    ) -> Result<()> {
        let queued = executor.enqueue(batch, stream);
        if let Some(open) = &mut self.open {
            // One that fails may have queued a part.
            let new = queued.as_ref().map_or(Some(Ends::Event), |ends| *ends);
            open.ends = Ends::both(open.ends, new);
        }
        queued.map(drop)
    }

    /// Notes where the calls of the open stream end, where it would be too late afterwards.
    pub(super) fn settle(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let Open { stream, ends, waits } = open;
        let Some(handle) = stream.as_cuda().filter(|handle| !handle.is_own()) else {
            self.last = Some(Last { stream, end: End::Stream });
            return Ok(());
        };
        match (ends, waits) {
            // What was noted before still is the end.
            (None, false) => return Ok(()),
            (Some(Ends::Counted(blocks)), false) => {
                self.last = Some(Last { stream, end: End::Counted(blocks) });
                return Ok(());
            }
            _ => {}
        }
        let result = match stream.record() {
            Ok(event) => {
                let end = End::Event(event);
                self.last = Some(Last { stream: Arc::clone(&stream), end });
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
            self.open = Some(Open { stream, ends, waits });
        }
        result
    }

    /// Where everything that was queued ends.
    pub(super) fn tail(&mut self, executor: &Executor, spare: Option<&Stream>) -> Tail {
        let settled = self.settle();
        let event = |last: &Last| last.event(executor, spare);
        match settled.and_then(|()| self.last.as_ref().map(event).transpose()) {
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
        if let (false, Some(open)) = (others.is_empty(), &mut self.open) {
            open.waits = true;
        }
        self.enqueue(executor, &Batch::Transfers(batch), stream)?;
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
    /// Holds `stream` back until these calls have ended.
    fn hold_back(&self, executor: &Executor, stream: &Stream) -> Result<()> {
        match &self.end {
            End::Stream => stream.wait_event(&self.stream.record()?),
            End::Event(event) => stream.wait_event(event),
            End::Counted(blocks) => executor.hold_back(stream, *blocks),
        }
    }

    /// An event that stands behind them; for the end of a communicator.
    fn event(&self, executor: &Executor, spare: Option<&Stream>) -> Result<Event> {
        match &self.end {
            End::Stream => self.stream.record(),
            End::Event(event) => Ok(event.clone()),
            End::Counted(blocks) => {
                let spare = spare.ok_or_else(|| Error::refused("no stream waits for the end"))?;
                executor.hold_back(spare, *blocks)?;
                spare.record()
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_one_call_needs_stands_behind_all() {
        let (event, counted) = (Some(Ends::Event), |blocks| Some(Ends::Counted(blocks)));
        for (first, second, both) in [
            (None, None, None),
            (None, counted(7), counted(7)),
            // What queues nothing changes nothing.
            (counted(7), None, counted(7)),
            (event, None, event),
            (counted(7), counted(9), counted(9)),
            (event, counted(9), event),
            (counted(7), event, event),
        ] {
            assert_eq!(Ends::both(first, second), both, "{first:?}, {second:?}");
        }
    }
}
