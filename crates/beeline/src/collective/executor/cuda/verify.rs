//! Bytes into every peer's window before a call relies on them: a driver that says "peer access" is not proof.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::reason::{Code, Reason};
use beeline_sys::cuda::collective::{AT_LL, RANKS_MAX};
use beeline_sys::cuda::{Error as CudaError, Event, HostRegistration, Stream as Handle};
use beeline_sys::mem::HostMem;

use super::{Cuda, Peer};
use crate::error::{Error, Kind, Result};

/// Where the patterns of all ranks lie in a window, one after the other: where packets lie later.
const AT: u64 = AT_LL;
/// Bytes of one.
const BYTES: u64 = 4096;
/// How long the copies of one rank may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The copies of one rank while the others make theirs.
pub(super) struct Probe {
    stream: Handle,
    host: Arc<HostRegistration>,
    mem: Arc<HostMem>,
}

impl Probe {
    /// Writes this rank's pattern into the window of every other. What is still under way at the deadline keeps
    /// its memory.
    pub(super) fn write(cuda: &Cuda) -> Result<Self> {
        let failed = |error| cuda.failed("write to the windows of the other ranks", error);
        let mem = Arc::new(
            HostMem::anonymous(BYTES as usize)
                .map_err(|error| Error::io("make memory for a probe", error))?,
        );
        for at in 0..BYTES / 8 {
            mem.store_u64(at * 8, word(cuda.rank, at))?;
        }
        let host = HostRegistration::pin(&cuda.context, Arc::clone(&mem)).map_err(failed)?;
        let stream = Handle::new(&cuda.context).map_err(failed)?;
        let probe = Self { stream, host: Arc::new(host), mem };
        let own = AT + BYTES * u64::from(cuda.rank);
        probe
            .stream
            .copy_to_device((&cuda.window, own), (&probe.host, 0), BYTES)
            .map_err(failed)?;
        for peer in &cuda.peers {
            if let Peer::Here(window) | Peer::There(window) = peer {
                let copied = probe.stream.copy_on_device((window, own), (&cuda.window, own), BYTES);
                copied.map_err(failed)?;
            }
        }
        probe.finish(cuda)?;
        Ok(probe)
    }

    /// Compares what the others have written here, and clears it.
    pub(super) fn check(&self, cuda: &Cuda) -> Result<()> {
        let failed = |error| cuda.failed("read the own window", error);
        for rank in (0..cuda.ranks).filter(|rank| *rank != cuda.rank) {
            let place = AT + BYTES * u64::from(rank);
            let copied = self.stream.copy_to_host((&self.host, 0), (&cuda.window, place), BYTES);
            copied.map_err(failed)?;
            self.finish(cuda)?;
            for at in 0..BYTES / 8 {
                if self.mem.load_u64(at * 8)? != word(rank, at) {
                    let detail = format!(
                        "bytes of rank {rank} did not arrive at rank {} ({}), from offset {} on",
                        cuda.rank,
                        cuda.device,
                        at * 8
                    );
                    return Err(lied(detail));
                }
            }
        }
        let all = BYTES * RANKS_MAX as u64;
        self.stream.fill((&cuda.window, AT), all, 0).map_err(failed)?;
        self.finish(cuda)
    }

    fn finish(&self, cuda: &Cuda) -> Result<()> {
        let failed = |error| cuda.failed("verify the way to the other ranks", error);
        let event = self.stream.record().map_err(failed)?;
        if wait(&event, Instant::now() + TIMEOUT).map_err(failed)? {
            return Ok(());
        }
        Err(lied(format!("a copy of rank {} hung for {} s", cuda.rank, TIMEOUT.as_secs())))
    }
}

/// Whether `event` was done by the deadline.
pub(super) fn wait(event: &Event, deadline: Instant) -> Result<bool, CudaError> {
    while !event.is_done()? {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(true)
}

fn lied(detail: String) -> Error {
    Error::new(Kind::NoRoute, format!("a path between devices cannot be trusted: {detail}"))
        .with_reasons(vec![Reason::with(Code::ProbeTransfer, detail)])
}

/// Depends on the rank and the place; never zero, as a cleared window is.
const fn word(rank: u32, at: u64) -> u64 {
    (at << 8 | rank as u64 | 1 << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}
