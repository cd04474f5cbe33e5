//! Device memory to device memory.
//!
//! A [`Path`] from one device to another is verified before it is used: bytes go over it within a time
//! limit and are compared. What a driver says about peer access is not enough: with an IOMMU or ACS in the
//! way writes can vanish, and a copy can hang for ever. A path that hangs, fails or lies is refused for the
//! rest of the process with its reason, and what hangs stays quarantined (its stream keeps its memory).
//! Where the mode allows it, bytes then go through pinned host memory.
//!
//! [`share`] passes device memory on to other processes of the host.

pub mod bench;
pub mod share;
mod verify;

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use beeline_core::addr::ByteRange;
use beeline_core::plan::Mode;
use beeline_core::reason::{Code, Reason};

use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, DeviceId, Event, Gpu, PinnedMem, Stream};
use crate::lock;

/// Bytes of pinned memory of a staged path: two pieces that take turns.
const STAGE_BYTES: u64 = 8 << 20;

/// How bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// Within one device.
    Local,
    /// From device to device, over NVLink or PCIe; simulated: from memory to memory.
    Direct,
    /// Through pinned host memory.
    Staged,
}

impl Route {
    /// Its stable name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Direct => "direct",
            Self::Staged => "staged",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How a path is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// `Require`: an error where the direct way is not open. `Software`: always staged.
    pub mode: Mode,
    /// How long the verification may take.
    pub verify_timeout: Duration,
    /// Bytes that are moved and compared.
    pub verify_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { mode: Mode::Auto, verify_timeout: Duration::from_secs(2), verify_bytes: 1 << 20 }
    }
}

/// A way from one device to another. Cheap to make once verified: each pair is verified once a process.
pub struct Path {
    from: Gpu,
    to: Gpu,
    route: Route,
    reasons: Vec<Reason>,
    /// Two pieces of pinned memory, and the stream of the source's side.
    stage: Option<Mutex<Stage>>,
}

struct Stage {
    host: PinnedMem,
    out: Stream,
    back: Stream,
    /// Reached when what each half held has arrived. Outlives the call: a copy that was given up on may
    /// still be under way.
    free: [Option<Event>; 2],
    /// The device may still read a half, and nothing tells until when.
    broken: bool,
}

impl Path {
    /// Opens and verifies the way of copies from `from` to `to`.
    ///
    /// # Errors
    /// `is_no_route` in mode `Require` where the direct way is not open, with the reasons; `is_refused` for
    /// devices of two kinds; what the devices say.
    pub fn open(from: &Gpu, to: &Gpu, options: &Options) -> Result<Self> {
        let make = |route, reasons| {
            Ok(Self { from: from.clone(), to: to.clone(), route, reasons, stage: None })
        };
        if from.as_sim().is_some() != to.as_sim().is_some() {
            return Err(Error::refused(format!(
                "no copies go between {} and {}: one of them is simulated",
                from.id(),
                to.id()
            )));
        }
        if from.same_device(to) {
            return make(Route::Local, Vec::new());
        }
        let refused = match options.mode {
            Mode::Software => vec![Reason::new(Code::SoftwareMode)],
            Mode::Auto | Mode::Require => match verdict(from, to, options) {
                None => return make(Route::Direct, Vec::new()),
                Some(reason) => vec![reason],
            },
        };
        if options.mode == Mode::Require {
            let text = format!("no direct way from {} to {}", from.id(), to.id());
            return Err(Error::new(Kind::NoRoute, text).with_reasons(refused));
        }
        let (out, back) = (from.stream()?, to.stream()?);
        let host = from.pin(STAGE_BYTES)?;
        let stage = Stage { host, out, back, free: [None, None], broken: false };
        let mut path = make(Route::Staged, refused)?;
        path.stage = Some(Mutex::new(stage));
        Ok(path)
    }

    /// How bytes go.
    pub const fn route(&self) -> Route {
        self.route
    }

    /// Why not straighter; empty where they go straight.
    pub fn reasons(&self) -> &[Reason] {
        &self.reasons
    }

    /// Copies `len` bytes and waits until they are there.
    ///
    /// # Errors
    /// `is_refused` for buffers of other devices or ranges outside them; `is_timeout` where `deadline`
    /// passes first: the copy may still be under way, and keeps its memory.
    pub fn copy(
        &self,
        (dst, dst_offset): (&Buffer, u64),
        (src, src_offset): (&Buffer, u64),
        len: u64,
        deadline: Instant,
    ) -> Result<()> {
        for (buffer, gpu) in [(src, &self.from), (dst, &self.to)] {
            if !buffer.gpu().same_device(gpu) {
                return Err(Error::refused(format!(
                    "a buffer of {} on the path from {} to {}",
                    buffer.gpu().id(),
                    self.from.id(),
                    self.to.id()
                )));
            }
        }
        let Some(stage) = &self.stage else {
            let stream = self.from.stream()?;
            stream.copy_on_device(dst, dst_offset, src, src_offset, len)?;
            return stream.synchronize(deadline);
        };
        staged(&mut lock(stage), (dst, dst_offset), (src, src_offset), len, deadline)
    }
}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Path({} -> {}, {})", self.from.id(), self.to.id(), self.route)
    }
}

/// Piece by piece through host memory: while one half goes out, the other comes in.
fn staged(
    stage: &mut Stage,
    (dst, dst_offset): (&Buffer, u64),
    (src, src_offset): (&Buffer, u64),
    len: u64,
    deadline: Instant,
) -> Result<()> {
    const PIECE: u64 = STAGE_BYTES / 2;
    if stage.broken {
        return Err(Error::refused("an earlier copy of this path failed half-way: open it anew"));
    }
    // Before the first piece goes: the whole of both.
    for (buffer, offset) in [(src, src_offset), (dst, dst_offset)] {
        buffer.slice(ByteRange { start: offset, len })?;
    }
    let (mut done, mut half) = (0, 0_usize);
    while done < len {
        let part = PIECE.min(len - done);
        let at = half as u64 * PIECE;
        // A half is written again once what it held has arrived, in this call or an earlier one.
        if let Some(event) = stage.free.get(half).and_then(Option::as_ref) {
            stage.out.wait_event(event)?;
        }
        stage.out.copy_to_host(&stage.host, at, src, src_offset + done, part)?;
        stage.back.wait_event(&stage.out.record()?)?;
        let back = &stage.back;
        let queued = back.copy_to_device(dst, dst_offset + done, &stage.host, at, part);
        let arrived = queued.and_then(|()| back.record()).inspect_err(|_| stage.broken = true)?;
        if let Some(place) = stage.free.get_mut(half) {
            *place = Some(arrived);
        }
        done += part;
        half = 1 - half;
    }
    stage.back.synchronize(deadline)
}

type Verdicts = Vec<(DeviceId, DeviceId, Option<Reason>)>;

/// Why the direct way is not open; `None` where bytes went over it and were right.
///
/// The answer holds for the process: a path that hung once is not tried again, since what it holds cannot be
/// freed. Private simulated devices share a name, so theirs is not remembered.
fn verdict(from: &Gpu, to: &Gpu, options: &Options) -> Option<Reason> {
    static VERDICTS: Mutex<Verdicts> = Mutex::new(Vec::new());

    let real = from.as_sim().is_none();
    let (a, b) = (from.id(), to.id());
    let known = lock(&VERDICTS).iter().find(|(x, y, _)| (x, y) == (&a, &b)).cloned();
    if let (true, Some((.., verdict))) = (real, known) {
        return verdict;
    }
    let verdict = verify::direct(from, to, options);
    if real {
        lock(&VERDICTS).push((a, b, verdict.clone()));
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SimConfig;
    use crate::gpu::sim::{Effect, Site};

    fn pair() -> (Gpu, Gpu) {
        let config = SimConfig { memory_bytes: 64 << 20, ..SimConfig::default() };
        (Gpu::simulated(&config).unwrap(), Gpu::simulated(&config).unwrap())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn options(mode: Mode) -> Options {
        let verify_timeout = Duration::from_millis(400);
        Options { mode, verify_timeout, ..Options::default() }
    }

    /// Copies 9 MiB and some over `path` and compares.
    fn moves(path: &Path, a: &Gpu, b: &Gpu) {
        let len = (9 << 20) + 5;
        let (src, dst) = (a.alloc(len).unwrap(), b.alloc(len).unwrap());
        let (host, stream) = (a.pin(len).unwrap(), a.stream().unwrap());
        for at in 0..len / 8 {
            host.mem().store_u64(at * 8, at.wrapping_mul(0x9e37_79b9)).unwrap();
        }
        stream.copy_to_device(&src, 0, &host, 0, len).unwrap();
        stream.synchronize(soon()).unwrap();
        path.copy((&dst, 0), (&src, 0), len, soon()).unwrap();
        let (back, stream) = (b.pin(len).unwrap(), b.stream().unwrap());
        stream.copy_to_host(&back, 0, &dst, 0, len).unwrap();
        stream.synchronize(soon()).unwrap();
        for at in 0..len / 8 {
            assert_eq!(back.mem().load_u64(at * 8).unwrap(), at.wrapping_mul(0x9e37_79b9));
        }
        assert!(path.copy((&src, 0), (&dst, 0), 1, soon()).unwrap_err().is_refused());
        assert!(path.copy((&dst, len), (&src, 0), 1, soon()).unwrap_err().is_refused());
    }

    #[test]
    fn a_path_that_works_is_direct_and_software_mode_is_staged() {
        let (a, b) = pair();
        for (mode, route) in [
            (Mode::Auto, Route::Direct),
            (Mode::Require, Route::Direct),
            (Mode::Software, Route::Staged),
        ] {
            let path = Path::open(&a, &b, &options(mode)).unwrap();
            assert_eq!((path.route(), path.reasons().is_empty()), (route, route == Route::Direct));
            moves(&path, &a, &b);
        }
        assert_eq!(Path::open(&a, &a, &options(Mode::Auto)).unwrap().route(), Route::Local);
    }

    #[test]
    fn a_staged_copy_that_was_given_up_on_keeps_its_halves_and_nothing_outside_is_begun() {
        let (a, b) = pair();
        let path = Path::open(&a, &b, &options(Mode::Software)).unwrap();
        let (src, dst) = (a.alloc(9 << 20).unwrap(), b.alloc(9 << 20).unwrap());
        let (first, second) = (vec![1; 64], vec![2; 64]);
        let put = |bytes: &[u8]| {
            let (host, stream) = (a.pin(64).unwrap(), a.stream().unwrap());
            host.mem().write(0, bytes).unwrap();
            stream.copy_to_device(&src, 0, &host, 0, 64).unwrap();
            stream.synchronize(soon()).unwrap();
        };
        let get = |at| {
            let (host, stream) = (b.pin(64).unwrap(), b.stream().unwrap());
            stream.copy_to_host(&host, 0, &dst, at, 64).unwrap();
            stream.synchronize(soon()).unwrap();
            let mut bytes = vec![0; 64];
            host.mem().read(0, &mut bytes).unwrap();
            bytes
        };
        put(&first);
        // The way back hangs: the half still holds what is to arrive.
        b.as_sim().unwrap().faults().arm(Site::Copy, 0, Effect::Stall);
        let short = Instant::now() + Duration::from_millis(300);
        assert!(path.copy((&dst, 0), (&src, 0), 64, short).unwrap_err().is_timeout());
        put(&second);
        let short = Instant::now() + Duration::from_millis(300);
        assert!(path.copy((&dst, 64), (&src, 0), 64, short).unwrap_err().is_timeout());
        b.as_sim().unwrap().faults().release();
        path.copy((&dst, 128), (&src, 0), 64, soon()).unwrap();
        assert_eq!([get(0), get(64), get(128)], [first, second.clone(), second]);
        // The second piece of this one would be outside.
        let before = get(0);
        assert!(path.copy((&dst, 0), (&src, 64), 9 << 20, soon()).unwrap_err().is_refused());
        assert_eq!(get(0), before);
    }

    #[test]
    fn a_path_that_lies_fails_or_hangs_is_refused_in_time_and_bytes_go_another_way() {
        for effect in [Effect::Corrupt, Effect::Fail, Effect::Stall] {
            let (a, b) = pair();
            let arm =
                || a.as_sim().unwrap().faults().arm(Site::Copy, verify::COPIES_BEFORE, effect);
            arm();
            let started = Instant::now();
            let path = Path::open(&a, &b, &options(Mode::Auto)).unwrap();
            assert!(started.elapsed() < Duration::from_secs(10), "{effect:?}");
            assert_eq!(path.route(), Route::Staged, "{effect:?}");
            assert_eq!(path.reasons()[0].code, Code::ProbeTransfer, "{effect:?}");
            moves(&path, &a, &b);
            let (a, b) = pair();
            a.as_sim().unwrap().faults().arm(Site::Copy, verify::COPIES_BEFORE, effect);
            let error = Path::open(&a, &b, &options(Mode::Require)).unwrap_err();
            assert!(error.is_no_route(), "{error:#}");
            assert_eq!(error.reasons()[0].code, Code::ProbeTransfer);
        }
    }
}
