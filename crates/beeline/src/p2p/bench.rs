//! What a path carries: the numbers of `beeline bench p2p`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_sys::cuda::{DeviceMem, Error as CudaError, PeerKernels, Stream as Handle};

use super::{Options, Path, Route};
use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, Gpu, Stream};
use crate::storage::CancelToken;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum What {
    /// The copy engine, one way.
    Copy,
    /// The copy engine, both ways at once; the sum.
    CopyBoth,
    /// Stores of threads to the other device, one way.
    Store,
    /// Stores, both ways at once; the sum.
    StoreBoth,
    /// Loads of threads from the other device, one way.
    Load,
    /// Loads, both ways at once; the sum.
    LoadBoth,
    /// Loads that are added to own memory, both ways at once; bytes read, the sum.
    ReadAddBoth,
    /// One copy of eight bytes in a stream of many, in nanoseconds.
    CopyLatency,
    /// A flag to the other device and back, in nanoseconds.
    FlagLatency,
}

impl What {
    /// Everything, in the order of a report.
    pub const ALL: [Self; 9] = [
        Self::Copy,
        Self::CopyBoth,
        Self::Store,
        Self::StoreBoth,
        Self::Load,
        Self::LoadBoth,
        Self::ReadAddBoth,
        Self::CopyLatency,
        Self::FlagLatency,
    ];

    /// Its stable name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::CopyBoth => "copy-both",
            Self::Store => "store",
            Self::StoreBoth => "store-both",
            Self::Load => "load",
            Self::LoadBoth => "load-both",
            Self::ReadAddBoth => "read-add-both",
            Self::CopyLatency => "copy-latency",
            Self::FlagLatency => "flag-latency",
        }
    }

    /// What it is, as a title.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Copy => "copy engine, one way, GB/s",
            Self::CopyBoth => "copy engine, both ways, sum, GB/s",
            Self::Store => "stores by kernels, one way, GB/s",
            Self::StoreBoth => "stores by kernels, both ways, sum, GB/s",
            Self::Load => "loads by kernels, one way, GB/s",
            Self::LoadBoth => "loads by kernels, both ways, sum, GB/s",
            Self::ReadAddBoth => "read and add by kernels, both ways, sum, GB/s",
            Self::CopyLatency => "copy of 8 bytes, microseconds each",
            Self::FlagLatency => "flag there and back, microseconds",
        }
    }

    /// Whether it is a time and not a rate.
    pub const fn is_latency(self) -> bool {
        matches!(self, Self::CopyLatency | Self::FlagLatency)
    }

    /// Whether both directions are measured at once.
    pub const fn is_both(self) -> bool {
        matches!(self, Self::CopyBoth | Self::StoreBoth | Self::LoadBoth | Self::ReadAddBoth)
    }
}

/// Between two devices.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Measured {
    /// How bytes went.
    pub route: Route,
    /// Megabytes (10^6) a second, or nanoseconds; what the device has no kernels for is missing.
    pub figures: Vec<(What, u64)>,
}

/// Copies of one measurement.
const REPEATS: u64 = 8;
/// Blocks of kernels that copy.
const BLOCKS: u32 = 132;
/// Rounds of a flag.
const ROUNDS: u32 = 4000;
/// Small copies of a latency.
const SMALL: u64 = 200;
/// Bytes of a copy through host memory, between which somebody may call it off.
const STAGED_PIECE: u64 = 64 << 20;
/// How long a wait goes on before it is looked whether somebody has called it off.
const LOOK: Duration = Duration::from_millis(50);

/// How long a measurement may go on.
#[derive(Clone, Copy, Debug)]
struct Until<'a> {
    deadline: Instant,
    cancel: Option<&'a CancelToken>,
}

impl Until<'_> {
    fn check(self) -> Result<()> {
        self.cancel.map_or(Ok(()), CancelToken::check)
    }

    /// Waits for everything that is queued in a stream.
    fn wait(self, stream: &Stream) -> Result<()> {
        let end = stream.record()?;
        loop {
            self.check()?;
            let look = self.deadline.min(Instant::now() + LOOK);
            match end.wait(look) {
                Err(error) if error.is_timeout() && look < self.deadline => {}
                done => return done,
            }
        }
    }
}

/// Measures the path from `from` to `to` with buffers of `bytes` (rounded up to 16), verified first; and
/// compares the bytes of each way of moving them. Once `cancel` is cancelled it ends; what is in flight then keeps its
/// memory.
///
/// # Errors
/// `is_corrupt` where bytes arrive wrong; what the path and the devices say; `is_timeout`; `is_cancelled`.
pub fn measure(
    from: &Gpu,
    to: &Gpu,
    bytes: u64,
    deadline: Instant,
    cancel: Option<&CancelToken>,
) -> Result<Measured> {
    let until = Until { deadline, cancel };
    until.check()?;
    let path = Path::open(from, to, &Options::default())?;
    let whole = bytes.max(16).checked_next_multiple_of(16);
    let bytes = whole.ok_or_else(|| Error::refused(format!("{bytes} bytes are too many")))?;
    let (a, b) = (Side::new(from, bytes)?, Side::new(to, bytes)?);
    let mut found = Measured { route: path.route(), figures: Vec::new() };
    if path.route() == Route::Staged {
        // What was given is there, and nothing of it where it is to arrive: each waits for its device.
        a.blank(until)?;
        b.blank(until)?;
        let started = Instant::now();
        for at in (0..bytes).step_by(STAGED_PIECE as usize) {
            until.check()?;
            let len = STAGED_PIECE.min(bytes - at);
            path.copy((&b.taken, at), (&a.given, at), len, deadline)?;
        }
        found.figures.push((What::Copy, rate(bytes, started.elapsed())));
        b.check(until)?;
        return Ok(found);
    }
    // Both directions are open where one is; the way back is asked for all the same.
    let back = Path::open(to, from, &Options::default())?.route() != Route::Staged;
    for what in What::ALL.into_iter().filter(|what| back || !what.is_both()) {
        if let Some(figure) = one(what, &a, &b, bytes, until)? {
            found.figures.push((what, figure));
        }
    }
    Ok(found)
}

fn one(what: What, a: &Side, b: &Side, bytes: u64, until: Until<'_>) -> Result<Option<u64>> {
    let kernels = a.kernels.is_some() && b.kernels.is_some();
    let ways: &[(&Side, &Side)] = if what.is_both() { &[(a, b), (b, a)] } else { &[(a, b)] };
    match what {
        What::FlagLatency if kernels => return flag(a, b, until).map(Some),
        What::Copy | What::CopyBoth | What::CopyLatency => {}
        _ if !kernels => return Ok(None),
        _ => {}
    }
    let len = if what == What::CopyLatency { 8 } else { bytes };
    let repeats = if what == What::CopyLatency { SMALL } else { REPEATS };
    let queue = |times: u64| -> Result<Duration> {
        let started = Instant::now();
        for _ in 0..times {
            for (own, other) in ways {
                own.queue(what, other, len)?;
            }
        }
        for (own, _) in ways {
            until.wait(&own.stream)?;
        }
        Ok(started.elapsed())
    };
    for (own, other) in ways {
        own.blank(until)?;
        other.blank(until)?;
    }
    queue(1)?;
    if what != What::ReadAddBoth && what != What::CopyLatency {
        // What was pulled lies here, what was pushed there.
        let pulled = matches!(what, What::Load | What::LoadBoth);
        for (own, other) in ways {
            if pulled { own.check(until)? } else { other.check(until)? }
        }
    }
    let spent = queue(repeats)?;
    let total = len.saturating_mul(repeats).saturating_mul(ways.len() as u64);
    Ok(Some(if what.is_latency() {
        u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX) / repeats
    } else {
        rate(total, spent)
    }))
}

/// Half of the rounds warm up, so the difference of two runs is what the rounds cost.
fn flag(a: &Side, b: &Side, until: Until<'_>) -> Result<u64> {
    let run = |rounds: u32| -> Result<Duration> {
        for side in [a, b] {
            side.stream.fill(&side.taken, 0, 16, 0)?;
            until.wait(&side.stream)?;
        }
        let started = Instant::now();
        for (own, other, first) in [(a, b, true), (b, a, false)] {
            let timeout = until.deadline.saturating_duration_since(started);
            let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
            own.with_kernels(|kernels, stream| {
                kernels.ping(stream, own.memory()?, other.memory()?, first, rounds, timeout)
            })?;
        }
        until.wait(&a.stream)?;
        until.wait(&b.stream)?;
        Ok(started.elapsed())
    };
    let (short, long) = (run(ROUNDS)?, run(3 * ROUNDS)?);
    let spent = long.saturating_sub(short).as_nanos() / u128::from(2 * ROUNDS);
    Ok(u64::try_from(spent).unwrap_or(u64::MAX))
}

fn rate(bytes: u64, spent: Duration) -> u64 {
    let rate = u128::from(bytes).saturating_mul(1000) / spent.as_nanos().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// One device with what it gives and what it takes.
struct Side {
    stream: Stream,
    given: Buffer,
    taken: Buffer,
    kernels: Option<PeerKernels>,
}

/// What a byte of every fill is: the pattern given, and that of nothing.
const GIVEN: u8 = 0x3f;
const NOTHING: u8 = 0x00;

impl Side {
    fn new(gpu: &Gpu, bytes: u64) -> Result<Self> {
        let stream = gpu.stream()?;
        let (given, taken) = (gpu.alloc(bytes)?, gpu.alloc(bytes)?);
        stream.fill(&given, 0, bytes, GIVEN)?;
        let kernels = match gpu.as_cuda() {
            None => None,
            Some(device) => {
                let loaded = PeerKernels::load(&device.context()?);
                Some(loaded.map_err(|error| device.failed("load the kernels", error))?)
            }
        };
        Ok(Self { stream, given, taken, kernels })
    }

    fn queue(&self, what: What, other: &Self, len: u64) -> Result<()> {
        match what {
            What::Store | What::StoreBoth => self.with_kernels(|kernels, stream| {
                let (to, from) = (cuda(&other.taken)?, cuda(&self.given)?);
                kernels.copy(stream, (to, 0), (from, 0), len, BLOCKS)
            }),
            What::Load | What::LoadBoth => self.with_kernels(|kernels, stream| {
                let (to, from) = (cuda(&self.taken)?, cuda(&other.given)?);
                kernels.copy(stream, (to, 0), (from, 0), len, BLOCKS)
            }),
            What::ReadAddBoth => self.with_kernels(|kernels, stream| {
                let (to, from) = (cuda(&self.taken)?, cuda(&other.given)?);
                kernels.read_add(stream, (to, 0), (from, 0), len, BLOCKS)
            }),
            _ => self.stream.copy_on_device(&other.taken, 0, &self.given, 0, len),
        }
    }

    fn with_kernels(
        &self,
        work: impl FnOnce(&PeerKernels, &Handle) -> Result<(), CudaError>,
    ) -> Result<()> {
        let (Some(kernels), Some(stream)) = (&self.kernels, self.stream.as_cuda()) else {
            return Err(Error::refused("the device has no kernels for this"));
        };
        work(kernels, stream).map_err(|error| {
            Error::new(Kind::Device, "a kernel between devices failed").because(error)
        })
    }

    fn memory(&self) -> Result<&Arc<DeviceMem>, CudaError> {
        cuda(&self.taken)
    }

    fn blank(&self, until: Until<'_>) -> Result<()> {
        self.stream.fill(&self.taken, 0, self.taken.len(), NOTHING)?;
        until.wait(&self.stream)
    }

    /// Whether what was taken is what was given: first and last MiB.
    fn check(&self, until: Until<'_>) -> Result<()> {
        let len = self.taken.len();
        let part = len.min(1 << 20);
        let host = self.taken.gpu().pin(part)?;
        for at in [0, len - part] {
            self.stream.copy_to_host(&host, 0, &self.taken, at, part)?;
            until.wait(&self.stream)?;
            let mut bytes = vec![0; usize::try_from(part).unwrap_or(0)];
            host.mem().read(0, &mut bytes)?;
            if let Some(wrong) = bytes.iter().position(|byte| *byte != GIVEN) {
                let place = at + wrong as u64;
                let text =
                    format!("byte {place} of {len} arrived wrong at {}", self.taken.gpu().id());
                return Err(Error::new(Kind::Corrupt, text));
            }
        }
        Ok(())
    }
}

fn cuda(buffer: &Buffer) -> Result<&Arc<DeviceMem>, CudaError> {
    buffer.as_cuda().ok_or(CudaError::Refused("the memory is not a CUDA device's"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SimConfig;
    use crate::gpu::sim::{Effect, Site};

    #[test]
    fn simulated_devices_have_rates_and_a_lie_is_found() {
        let config = SimConfig { memory_bytes: 32 << 20, ..SimConfig::default() };
        let pair = || (Gpu::simulated(&config).unwrap(), Gpu::simulated(&config).unwrap());
        let end = || Instant::now() + Duration::from_secs(20);
        let (a, b) = pair();
        let found = measure(&a, &b, 3 << 20, end(), None).unwrap();
        let names: Vec<_> = found.figures.iter().map(|(what, _)| what.as_str()).collect();
        assert_eq!(names, ["copy", "copy-both", "copy-latency"]);
        assert!(found.figures.iter().all(|(_, figure)| *figure > 0));
        let (a, b) = pair();
        // After both verifications: two copies each of the first device's.
        a.as_sim().unwrap().faults().arm(Site::Copy, 3, Effect::Corrupt);
        assert!(measure(&a, &b, 1 << 20, end(), None).unwrap_err().is_corrupt());
    }

    #[test]
    fn a_measurement_is_called_off_also_while_a_copy_hangs() {
        let config = SimConfig { memory_bytes: 32 << 20, ..SimConfig::default() };
        let (a, b) = (Gpu::simulated(&config).unwrap(), Gpu::simulated(&config).unwrap());
        let faults = a.as_sim().unwrap().faults();
        let token = CancelToken::new();
        // After both verifications.
        faults.arm(Site::Copy, 3, Effect::Stall);
        let end = Instant::now() + Duration::from_secs(60);
        let found = std::thread::scope(|scope| {
            let running = scope.spawn(|| measure(&a, &b, 1 << 20, end, Some(&token)));
            while faults.stalled() == 0 {
                std::thread::yield_now();
            }
            token.cancel();
            running.join().unwrap()
        });
        assert!(found.unwrap_err().is_cancelled());
        faults.release();
        assert!(measure(&a, &b, 1 << 20, end, Some(&token)).unwrap_err().is_cancelled());
        assert!(measure(&a, &b, 1 << 20, end, Some(&CancelToken::new())).is_ok());
    }
}
