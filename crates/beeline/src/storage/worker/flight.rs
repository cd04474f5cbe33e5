//! A chunk in flight: what it holds, where it is, and how it ends.

use std::sync::Arc;
use std::time::Duration;

use beeline_core::plan::{ChunkRoute, StorageRoute};
use beeline_core::reason::Code;

use super::super::engine::Shared;
use super::super::fault::IoEffect;
use super::super::file::File;
use super::super::job::Job;
use super::super::report::RouteReport;
use crate::error::{Error, Result};
use crate::gpu::Event;
use crate::memory::Slot;

pub(super) struct Flight {
    pub(super) job: Arc<Job>,
    pub(super) chunk: usize,
    pub(super) slot: Option<Slot>,
    pub(super) stage: Stage,
    pub(super) route: ChunkRoute,
    /// Bytes of the read or write that have moved, from the start of its range.
    pub(super) moved: u64,
    /// Whether a device may still use the slot although no event will tell.
    pub(super) unsettled: bool,
    pub(super) cpu: Duration,
}

pub(super) enum Stage {
    /// The kernel reads or writes by io_uring. The effect is applied to the answer (faults only).
    Io(Option<IoEffect>),
    /// An injected hang: started once it is released.
    Held(u64),
    /// Devices copy.
    Copying(Copies),
}

/// Copies of one chunk, by one or more devices. They end together: the slot is theirs until every one
/// has finished, also where one has failed.
#[derive(Default)]
pub(super) struct Copies {
    /// What has not happened yet.
    pub(super) events: Vec<Event>,
    /// The first failure.
    pub(super) failed: Option<Error>,
}

/// What became of a step.
pub(super) enum Step {
    /// The chunk is in flight with this stage.
    On(Stage),
    /// The chunk has moved all its bytes.
    Done,
}

impl Copies {
    /// Looks at every event; true when all have happened, well or badly.
    pub(super) fn settled(&mut self) -> bool {
        let Self { events, failed } = self;
        events.retain(|event| match event.is_done() {
            Ok(done) => !done,
            Err(error) => {
                failed.get_or_insert(error);
                false
            }
        });
        events.is_empty()
    }
}

impl Flight {
    pub(super) fn new(job: Arc<Job>, chunk: usize, slot: Option<Slot>) -> Self {
        let route = ChunkRoute { route: StorageRoute::PageCache, why: Code::OnlyRoute };
        let stage = Stage::Io(None);
        Self { job, chunk, slot, stage, route, moved: 0, unsettled: false, cpu: Duration::ZERO }
    }

    pub(super) fn file(&self) -> Option<&Arc<File>> {
        self.job.chunk(self.chunk).map(|(_, _, file)| file)
    }

    /// What to say of a copy that failed: a device that reads the file's own pages fails where the
    /// file shrank, and then the file is what its owner must hear of.
    pub(super) fn copy_failed(&self, error: Error) -> Error {
        if self.route.route != StorageRoute::MappedPageCache {
            return error;
        }
        match self.file().map(|file| file.check_unchanged()) {
            Some(Err(changed)) => changed.because(error),
            _ => error,
        }
    }

    pub(super) fn first_event(&self) -> Option<&Event> {
        match &self.stage {
            Stage::Copying(copies) => copies.events.first(),
            _ => None,
        }
    }

    pub(super) fn report(&self) -> RouteReport {
        let ChunkRoute { route, why } = self.route;
        let bytes = self.job.chunk(self.chunk).map_or(0, |(chunk, _, _)| chunk.bytes);
        RouteReport { route, why, bytes, chunks: 1, cpu: self.cpu }
    }

    /// Gives the slot back and tells the job. Answers whether the job now waits for its write-back.
    pub(super) fn finish(self, outcome: Result<RouteReport>, shared: &Shared) -> Option<Arc<Job>> {
        let Self { job, slot, stage, unsettled, .. } = self;
        drop(stage);
        if slot.is_some() {
            job.release_slot(shared);
        }
        // First the slot, then the job: a caller that saw the job finish must find the slot idle.
        match slot {
            // A device failed and may still use the memory; nobody else gets it.
            Some(slot) if unsettled => slot.discard(),
            slot => drop(slot),
        }
        job.finish(outcome, shared).then_some(job)
    }
}
