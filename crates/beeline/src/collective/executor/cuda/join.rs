//! Windows: making the own one and reaching those of the others.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use beeline_core::addr::DevicePtr;
use beeline_core::reason::{Code, Reason};
use beeline_sys::cuda::collective::{
    Comm, IpcMapping, RANKS_MAX, chunk_bytes, line_at, line_span, ll_blocks, push_at, window_bytes,
};
use beeline_sys::cuda::{DeviceMem, HostRegistration, Stream as Handle};

use super::pulled::Windows;
use super::registered::Registered;
use super::verify::{self, Probe};
use super::{Cuda, LEFT_MAX, Peer, REPORT_OFFSET, device_of, direct, process_is_gone, retire};
use crate::collective::control::ABORT_OFFSET;
use crate::collective::executor::{Setup, Tail};
use crate::error::{Error, Kind, Result};
use crate::gpu::{CudaDevice, DeviceId, DeviceUuid, Gpu};
use crate::lock;

/// How long clearing a window may take.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(20);

/// What a rank tells the others about its window: fit (1 byte), device ordinal (4), device UUID (16), process (16),
/// address (8), IPC handle (64).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offer {
    fit: bool,
    ordinal: u32,
    device: [u8; 16],
    process: [u8; 16],
    address: u64,
    handle: [u8; 64],
}

const OFFER_BYTES: usize = 1 + 4 + 16 + 16 + 8 + 64;

pub(super) fn join(setup: &mut Setup<'_>) -> Result<Cuda> {
    let kept = retire(None);
    let own = if kept < LEFT_MAX { Own::new(setup) } else { Err(crowded(kept)) };
    let offer = own.as_ref().map_or(Offer::UNFIT, |own| own.offer);
    let given = (setup.exchange)(&offer.encode(), Vec::new())?;
    let offers: Vec<Offer> =
        given.iter().map(|one| Offer::decode(&one.bytes).unwrap_or(Offer::UNFIT)).collect();
    let joined = own.and_then(|own| own.connect(setup, &offers));
    // Everybody goes one way. It is also the barrier behind which all windows are clear and mapped.
    let fabric = joined.as_ref().is_ok_and(|cuda| cuda.comm.atomics != 0);
    let pulls = joined.as_ref().is_ok_and(Cuda::can_pull);
    let said = [joined.is_ok(), fabric, pulls].map(u8::from);
    let answers = (setup.exchange)(&said, Vec::new())?;
    let first = answers.iter().position(|answer| answer.bytes.first() != Some(&1));
    let all = |at: usize| answers.iter().all(|answer| answer.bytes.get(at) == Some(&1));
    let (fabric, pulls) = (all(1), all(2));
    match (joined, first) {
        // Not to be hidden behind the slow path.
        (Err(error), _) if error.code() == CROWDED => Err(error),
        (Err(error), _) => Err(no_route(error)),
        (Ok(_), Some(rank)) => Err(Error::new(
            Kind::NoRoute,
            format!("rank {rank} cannot reach the others' device memory"),
        )
        .with_reasons(vec![Reason::with(Code::P2pNotCapable, format!("rank {rank}"))])),
        (Ok(mut cuda), None) => {
            if !fabric {
                (cuda.comm.atomics, cuda.comm.line_span) = (0, 0);
            }
            cuda.pulls = pulls;
            // Made now: later, making them may wait for a kernel that waits for a rank of the same thread.
            cuda.lanes = direct::lanes(&cuda).unwrap_or_default();
            verified(cuda, setup)
        }
    }
}

/// Bytes from everybody to everybody, compared. All ranks are inside.
fn verified(cuda: Cuda, setup: &mut Setup<'_>) -> Result<Cuda> {
    if cuda.ranks == 1 {
        // There is nobody to reach, and the window has no room for what others write.
        return Ok(cuda);
    }
    let written = Probe::write(&cuda);
    (setup.exchange)(&[], Vec::new())?;
    let checked = written.and_then(|probe| probe.check(&cuda));
    // Also the barrier behind which all windows are clear again.
    let answers = (setup.exchange)(&[u8::from(checked.is_ok())], Vec::new())?;
    let first = answers.iter().position(|answer| answer.bytes.first() != Some(&1));
    if checked.is_ok() && first.is_none() {
        return Ok(cuda);
    }
    cuda.close(Tail::Idle, Instant::now());
    match (checked, first) {
        (Err(error), _) => Err(no_route(error)),
        (Ok(()), rank) => {
            let rank = rank.unwrap_or(0);
            let detail = format!("rank {rank} says so");
            Err(Error::new(Kind::NoRoute, "a path between devices cannot be trusted")
                .with_reasons(vec![Reason::with(Code::ProbeTransfer, detail)]))
        }
    }
}

const CROWDED: &str = "collective-crowded";

fn crowded(kept: usize) -> Error {
    let text = format!(
        "{kept} communicators that this process ended still have kernels queued, or wait for ranks of other processes"
    );
    Error::refused(text)
        .coded(CROWDED)
        .remedy("destroy or abort a communicator on all of its ranks, and let its streams finish")
}

/// Whatever kept this rank from joining: the way through host memory is open.
fn no_route(error: Error) -> Error {
    if error.is_no_route() {
        return error;
    }
    let reason = Reason::with(Code::P2pNotCapable, error.to_string());
    Error::new(Kind::NoRoute, "collectives cannot go between the devices")
        .because(error)
        .with_reasons(vec![reason])
}

/// The own window, before the others are known.
struct Own {
    window: Arc<DeviceMem>,
    pinned: Arc<HostRegistration>,
    offer: Offer,
}

impl Own {
    fn new(setup: &Setup<'_>) -> Result<Self> {
        let device = device_of(setup).ok_or_else(|| simulated(setup))?;
        if setup.ranks as usize > RANKS_MAX || setup.rank >= setup.ranks {
            let text = format!("the kernels join {RANKS_MAX} ranks, not {}", setup.ranks);
            return Err(
                Error::new(Kind::NoRoute, text).with_reasons(vec![Reason::new(Code::NotBuilt)])
            );
        }
        let context = device.context()?;
        let DeviceId::Cuda(ordinal) = device.info().id else { return Err(simulated(setup)) };
        let uuid = device.info().cuda.as_ref().map_or([0; 16], |cuda| cuda.uuid.bytes);
        let window = DeviceMem::alloc(&context, window_bytes(setup.ranks));
        let window = window.map_err(|e| device.failed("make a window for collectives", e))?;
        let window = Arc::new(window);
        clear(&context, &window).map_err(|error| device.failed("clear a window", error))?;
        let segment = setup.control.memory().ok_or_else(|| Error::refused("no control memory"))?;
        let pinned = HostRegistration::pin(&context, Arc::clone(segment));
        let pinned = pinned.map_err(|e| device.failed("pin the control memory", e))?;
        // Without IPC the ranks of one process still reach each other.
        let handle = window.ipc_handle().unwrap_or([0; 64]);
        let address = window.ptr().as_u64();
        remember(&window);
        let offer = Offer { fit: true, ordinal, device: uuid, process: process(), address, handle };
        Ok(Self { window, pinned: Arc::new(pinned), offer })
    }

    fn connect(self, setup: &Setup<'_>, offers: &[Offer]) -> Result<Cuda> {
        let device = device_of(setup).ok_or_else(|| simulated(setup))?;
        let context = device.context()?;
        let mut comm = Comm { rank: setup.rank, ranks: setup.ranks, ..Comm::default() };
        let mut peers = Vec::with_capacity(offers.len());
        for ((offer, rank), at) in offers.iter().zip(0_u32..).zip(&mut comm.windows) {
            let (peer, window) = self.reach(setup, offer, rank)?;
            peers.push(peer);
            *at = window;
        }
        if peers.len() != setup.ranks as usize {
            return Err(Error::refused(format!("{} ranks answered", peers.len())));
        }
        let host = self.pinned.device_ptr().as_u64();
        comm.report = host + REPORT_OFFSET;
        comm.abort = host + ABORT_OFFSET;
        comm.timeout_ns = u64::try_from(setup.settings.deadline.as_nanos()).unwrap_or(u64::MAX);
        comm.push_at = push_at(setup.ranks);
        comm.chunk = chunk_bytes(setup.ranks);
        comm.ll_blocks = ll_blocks(setup.ranks) as u32;
        comm.line_at = line_at(setup.ranks);
        let others = offers.iter().filter(|offer| offer.device != self.offer.device);
        if setup.ranks > 1 && others.into_iter().all(|offer| has_fabric(device, offer)) {
            (comm.atomics, comm.line_span) = (1, line_span(setup.ranks));
        }
        let visible = (0..setup.ranks).filter(|r| !process_is_gone(setup.control.process(*r)));
        let counts = context.has_stream_waits();
        let registered = Registered::new(&context, setup.ranks)?;
        Ok(Cuda {
            visible: visible.collect(),
            rank: setup.rank,
            ranks: setup.ranks,
            device: device.info().id.to_string(),
            context,
            comm,
            window: self.window,
            peers,
            control: Arc::clone(&setup.control),
            pinned: self.pinned,
            early: setup.settings.early,
            straight: setup.settings.straight && setup.ranks > 1,
            counts,
            blocks: 0,
            ends: None,
            kernels: Vec::new(),
            lanes: direct::Lanes::new(),
            copied: 0,
            registered,
            pulls: setup.settings.copy_engines,
            windows: Windows::default(),
            side: None,
        })
    }

    /// Makes the window of `rank` reachable, and says where it is for this device.
    fn reach(&self, setup: &Setup<'_>, offer: &Offer, rank: u32) -> Result<(Peer, u64)> {
        if rank == setup.rank {
            return Ok((Peer::Own, self.offer.address));
        }
        let refuse = |code, detail: String| {
            Error::new(Kind::NoRoute, format!("rank {rank} is out of reach: {detail}"))
                .with_reasons(vec![Reason::with(code, detail)])
        };
        if !offer.fit {
            return Err(refuse(Code::P2pNotCapable, "it has no window".to_owned()));
        }
        if offer.process != self.offer.process {
            let context = device_of(setup).ok_or_else(|| simulated(setup))?.context()?;
            let mapping = IpcMapping::open(&context, offer.handle);
            let mapping = mapping.map_err(|e| refuse(Code::P2pNotCapable, e.to_string()))?;
            let at = mapping.ptr();
            let (len, owner) = (window_bytes(setup.ranks), Arc::new(mapping));
            let memory = DeviceMem::foreign(&context, DevicePtr::new(at), len, owner);
            let memory = memory.map_err(|e| refuse(Code::P2pNotCapable, e.to_string()))?;
            return Ok((Peer::There(Arc::new(memory)), at));
        }
        if offer.ordinal == self.offer.ordinal {
            // Kernels that wait for each other on one device may never run side by side.
            return Err(refuse(
                Code::P2pNotCapable,
                format!("it is on cuda:{} too", offer.ordinal),
            ));
        }
        let gpu = Gpu::open(&DeviceId::Cuda(offer.ordinal))?;
        if !setup.gpu.reach(&gpu)? {
            let detail = format!("{} cannot access {}", setup.gpu.id(), gpu.id());
            return Err(refuse(Code::P2pNotCapable, detail));
        }
        let memory = recall(offer.address)
            .ok_or_else(|| refuse(Code::P2pNotCapable, "its window is gone".to_owned()))?;
        Ok((Peer::Here(memory), offer.address))
    }
}

/// Whether the link to the device of `offer` is one that lines can be sent over; not where this process does not see it.
fn has_fabric(device: &CudaDevice, offer: &Offer) -> bool {
    let id = [false, true].map(|mig| DeviceId::CudaUuid(DeviceUuid { mig, bytes: offer.device }));
    let peer = id.iter().find_map(|id| Gpu::open(id).ok());
    peer.as_ref().and_then(Gpu::as_cuda).is_some_and(|peer| device.has_fabric_to(peer))
}

fn simulated(setup: &Setup<'_>) -> Error {
    Error::new(Kind::NoRoute, format!("{} runs no collective kernels", setup.gpu.id()))
        .with_reasons(vec![Reason::new(Code::DeviceSimulated)])
}

/// Sets a window to zero and waits for it: a flag of an earlier owner must not look like one of ours.
fn clear(
    context: &Arc<beeline_sys::cuda::Context>,
    window: &Arc<DeviceMem>,
) -> Result<(), beeline_sys::cuda::Error> {
    let stream = Handle::new(context)?;
    stream.fill((window, 0), window.len(), 0)?;
    let event = stream.record()?;
    if verify::wait(&event, Instant::now() + CLEAR_TIMEOUT)? {
        return Ok(());
    }
    Err(beeline_sys::cuda::Error::Stuck(CLEAR_TIMEOUT.as_secs()))
}

/// Windows of this process, so that a rank can keep that of another.
static WINDOWS: Mutex<Vec<Weak<DeviceMem>>> = Mutex::new(Vec::new());

fn remember(window: &Arc<DeviceMem>) {
    let mut windows = lock(&WINDOWS);
    windows.retain(|known| known.strong_count() > 0);
    windows.push(Arc::downgrade(window));
}

fn recall(address: u64) -> Option<Arc<DeviceMem>> {
    let windows = lock(&WINDOWS);
    windows.iter().filter_map(Weak::upgrade).find(|window| window.ptr().as_u64() == address)
}

/// A number that no other process has, whatever its namespace.
fn process() -> [u8; 16] {
    static PROCESS: OnceLock<[u8; 16]> = OnceLock::new();
    *PROCESS.get_or_init(|| {
        let random = || RandomState::new().hash_one(std::process::id());
        let mut bytes = [0; 16];
        let (low, high) = bytes.split_at_mut(8);
        low.copy_from_slice(&random().to_le_bytes());
        high.copy_from_slice(&random().to_le_bytes());
        bytes
    })
}

impl Offer {
    const UNFIT: Self = Self {
        fit: false,
        ordinal: 0,
        device: [0; 16],
        process: [0; 16],
        address: 0,
        handle: [0; 64],
    };

    fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.fit)];
        bytes.extend(self.ordinal.to_le_bytes());
        bytes.extend(self.device);
        bytes.extend(self.process);
        bytes.extend(self.address.to_le_bytes());
        bytes.extend(self.handle);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; OFFER_BYTES] = bytes.try_into().ok()?;
        let (fit, rest) = bytes.split_first()?;
        let (ordinal, rest) = rest.split_first_chunk()?;
        let (device, rest) = rest.split_first_chunk()?;
        let (process, rest) = rest.split_first_chunk()?;
        let (address, rest) = rest.split_first_chunk()?;
        Some(Self {
            fit: *fit == 1,
            ordinal: u32::from_le_bytes(*ordinal),
            device: *device,
            process: *process,
            address: u64::from_le_bytes(*address),
            handle: *rest.first_chunk()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_survive_and_others_are_unfit() {
        let offer = Offer {
            fit: true,
            ordinal: 3,
            device: [5; 16],
            process: process(),
            address: 7 << 40,
            handle: [9; 64],
        };
        assert_eq!(Offer::decode(&offer.encode()), Some(offer));
        for bytes in [vec![], vec![1; OFFER_BYTES - 1], vec![1; OFFER_BYTES + 1]] {
            assert_eq!(Offer::decode(&bytes), None);
        }
    }
}
