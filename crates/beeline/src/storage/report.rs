//! What a transfer did: bytes by route, time, CPU time.

use std::time::Duration;

use beeline_core::plan::StorageRoute;
use beeline_core::reason::Code;

/// What went along one route for one cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteReport {
    /// The route.
    pub route: StorageRoute,
    /// What decided it.
    pub why: Code,
    /// Bytes wanted that went along it.
    pub bytes: u64,
    /// Chunks they came in.
    pub chunks: u64,
    /// CPU time of the engine's threads for them. Copies by a simulated device are not in it.
    pub cpu: Duration,
}

/// What a transfer did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Bytes moved.
    pub bytes: u64,
    /// From the submission to the last byte.
    pub elapsed: Duration,
    /// By route and cause, in the order they were first used.
    pub routes: Vec<RouteReport>,
}

impl Report {
    /// CPU time of the engine's threads for this transfer.
    pub fn cpu(&self) -> Duration {
        self.routes.iter().map(|route| route.cpu).sum()
    }

    /// Bytes per second, 0 for a transfer too short to measure.
    pub fn bytes_per_second(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds } else { 0.0 }
    }

    /// Adds what another transfer did; the times add up too.
    pub fn merge(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.elapsed += other.elapsed;
        for route in &other.routes {
            self.add(*route);
        }
    }

    pub(super) fn add(&mut self, part: RouteReport) {
        let same =
            self.routes.iter_mut().find(|route| route.route == part.route && route.why == part.why);
        match same {
            Some(route) => {
                route.bytes += part.bytes;
                route.chunks += part.chunks;
                route.cpu += part.cpu;
            }
            None => self.routes.push(part),
        }
    }
}
