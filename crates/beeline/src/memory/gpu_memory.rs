//! GPU memory as a NIC in software reaches it: checked when it is registered, and at every access.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use beeline_sys::cuda::Retained;

use super::peer::Invalidate;
use super::window::{MAPPED_BYTES_MAX, Window};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, Gpu, sim};
use crate::lock;

/// Longer accesses go through the copy engine where there is one.
const WINDOW_BYTES_MAX: u64 = 16 << 10;

/// Device memory that may be registered, with what keeps it the same memory.
///
/// Whose it is decides what a free does. Memory of this library's is held, so that it is freed after the
/// last registration. Memory of somebody else's is looked up before and after every access, by the number
/// of its allocation: where that has changed the access fails, and no byte of what lies there now is
/// passed on. Virtual memory of somebody else's is held by a retained handle as well, so that its pages
/// are nobody else's meanwhile. What remains is a write that is under way at the very moment of a free:
/// `cuMemFree` waits for copies that are queued, so such a write hits memory that is not yet anybody
/// else's.
pub struct GpuMemory {
    buffer: Buffer,
    hold: Hold,
    reach: Reach,
    /// Told, once, when the memory is found to be gone.
    told: Mutex<Option<Invalidate>>,
}

/// What keeps the memory from becoming another.
#[derive(Debug)]
enum Hold {
    /// The buffer itself holds it.
    Owned,
    /// Nothing: it is looked up. The pages of virtual memory are held all the same.
    Foreign { id: u64, gone: AtomicBool, _retained: Option<Retained> },
}

/// How its bytes are reached.
#[derive(Debug)]
enum Reach {
    /// The device's copy engine.
    CopyEngine,
    /// Bus addresses, which others than the device may use.
    Window(sim::Attachment),
    /// A mapping for the CPU; longer accesses and atomics by the copy engine and a kernel.
    Mapped(Window),
}

/// Towards whom an atomic operation on device memory is atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomicity {
    /// Everything that reaches the memory, running kernels among them: a kernel of system scope, or an
    /// atomic through a window.
    System,
    /// Only the operations of this NIC: a kernel that changes the word at the same time may be lost.
    Nic,
}

/// Whether a running kernel sees what a peer wrote, once the write is known to have happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flush {
    /// Whether something had to be done.
    pub needed: bool,
    /// Why it is so, as a sentence.
    pub why: &'static str,
}

impl GpuMemory {
    /// Memory that stays where it is while it is registered; `holder` is named to whoever wants to move
    /// it.
    ///
    /// # Errors
    /// `is_refused`: code `memory-managed` for managed memory, which the driver moves;
    /// `allocation-gone` for memory that is no allocation any more.
    pub fn pinned(buffer: &Buffer, holder: &str) -> Result<Self> {
        let reach = match buffer.allocation_sim() {
            Some(allocation) if buffer.window().is_ok() => {
                Reach::Window(sim::Attachment::pinned(allocation, holder)?)
            }
            Some(_) => Reach::CopyEngine,
            // Memory that somebody else may free is looked up at every access, which costs more.
            None if buffer.is_foreign() => Reach::CopyEngine,
            None => Window::of(buffer).map_or(Reach::CopyEngine, Reach::Mapped),
        };
        Ok(Self { buffer: buffer.clone(), hold: hold(buffer)?, reach, told: Mutex::default() })
    }

    /// Memory that the CPU has mapped, on any device that lets it.
    #[cfg(test)]
    pub(crate) fn mapped(buffer: &Buffer) -> Result<Self> {
        let reach = Reach::Mapped(Window::map(buffer)?);
        Ok(Self { buffer: buffer.clone(), hold: Hold::Owned, reach, told: Mutex::default() })
    }

    /// Memory that may move while it is registered: its translation is taken away before, and the next
    /// access faults the new pages in.
    ///
    /// # Errors
    /// `is_refused` where the device does not move memory (code `dynamic-unsupported`).
    pub fn dynamic(buffer: &Buffer) -> Result<Self> {
        let movable = buffer.gpu().info().profile == Some(crate::gpu::Profile::Movable);
        let Some(allocation) = buffer.allocation_sim().filter(|_| movable) else {
            return Err(Error::refused(format!(
                "{} tells nobody when its memory moves, so memory cannot be attached dynamically",
                buffer.gpu().id()
            ))
            .coded("dynamic-unsupported")
            .remedy("attach it pinned"));
        };
        let reach = Reach::Window(sim::Attachment::dynamic(allocation)?);
        Ok(Self { buffer: buffer.clone(), hold: Hold::Owned, reach, told: Mutex::default() })
    }

    /// Calls `invalidate` when the memory is found to be gone.
    pub(crate) fn on_gone(self, invalidate: Invalidate) -> Self {
        Self { told: Mutex::new(Some(invalidate)), ..self }
    }

    /// The memory.
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Whether it may move while it is registered.
    pub const fn is_dynamic(&self) -> bool {
        matches!(&self.reach, Reach::Window(attachment) if attachment.is_dynamic())
    }

    /// Pages faulted in, and translations taken away, so far; both 0 for pinned memory.
    pub fn moves(&self) -> (u64, u64) {
        match &self.reach {
            Reach::Window(attachment) => attachment.counts(),
            Reach::CopyEngine | Reach::Mapped(_) => (0, 0),
        }
    }

    /// Towards whom atomics on it are atomic.
    pub fn atomicity(&self) -> Atomicity {
        let info = self.buffer.gpu().info();
        match (&self.reach, info.cuda) {
            (Reach::Window(_), _) | (_, None) => Atomicity::System,
            // The kernel uses atomics of system scope, which came with compute capability 6.0.
            (_, Some(cuda)) if cuda.compute_capability.0 >= 6 => Atomicity::System,
            _ => Atomicity::Nic,
        }
    }

    /// What a running kernel may rely on after a remote write completed.
    pub fn flush(&self) -> Flush {
        let why = match &self.reach {
            Reach::CopyEngine => {
                "the copy engine had written every byte before the write was acknowledged, and kernels \
                 of the device see what its own copy engine wrote"
            }
            Reach::Mapped(_) => {
                "the CPU read back what it wrote through a mapping, before the acknowledgement; the rest \
                 is the copy engine's"
            }
            Reach::Window(_) => {
                "the window writes device memory itself, before the acknowledgement"
            }
        };
        Flush { needed: false, why }
    }

    pub(crate) fn gpu(&self) -> Gpu {
        self.buffer.gpu()
    }

    /// Whether an access of this length is done by the calling thread, in place.
    pub(crate) fn in_place(&self, len: u64) -> bool {
        match &self.reach {
            Reach::Window(attachment) => attachment.is_dynamic() || len <= WINDOW_BYTES_MAX,
            Reach::Mapped(_) => len <= MAPPED_BYTES_MAX,
            Reach::CopyEngine => false,
        }
    }

    /// Whether an atomic operation is done by the calling thread, in place. Through a mapping of a bus it would not
    /// be one towards the device.
    pub(crate) const fn atomic_in_place(&self) -> bool {
        matches!(&self.reach, Reach::Window(_))
    }

    /// Whether an access in place may have to wait for a move.
    pub(crate) fn may_wait(&self) -> bool {
        self.is_dynamic()
    }

    /// Whether the memory is still what was registered.
    ///
    /// # Errors
    /// `is_refused` with code `allocation-gone` where it is not, for good.
    pub(crate) fn check(&self) -> Result<()> {
        let Hold::Foreign { id, gone, .. } = &self.hold else { return Ok(()) };
        let now = if gone.load(Ordering::Acquire) { None } else { self.buffer.allocation_id()? };
        if now == Some(*id) {
            return Ok(());
        }
        gone.store(true, Ordering::Release);
        let told = lock(&self.told).take();
        if let Some(invalidate) = told {
            invalidate.call();
        }
        Err(allocation_gone(&self.buffer))
    }

    /// Whether [`check`](Self::check) has ever failed.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(&self.hold, Hold::Foreign { gone, .. } if gone.load(Ordering::Acquire))
    }

    /// Whether it must be looked up at every access.
    pub(crate) const fn is_watched(&self) -> bool {
        matches!(self.hold, Hold::Foreign { .. })
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        if let Reach::Mapped(window) = &self.reach {
            return window.read(offset, into);
        }
        let (attachment, at) = self.window(offset, into.len() as u64)?;
        attachment.read(at, into)
    }

    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        if let Reach::Mapped(window) = &self.reach {
            return window.write(offset, from);
        }
        let (attachment, at) = self.window(offset, from.len() as u64)?;
        attachment.write(at, from)
    }

    pub(crate) fn update(&self, offset: u64, change: &dyn Fn(u64) -> u64) -> Result<u64> {
        let (attachment, at) = self.window(offset, 8)?;
        attachment.update(at, change)
    }

    fn window(&self, offset: u64, len: u64) -> Result<(&sim::Attachment, u64)> {
        let (_, at) = self.buffer.locate(offset, len)?;
        match &self.reach {
            Reach::Window(attachment) => Ok((attachment, at)),
            Reach::CopyEngine | Reach::Mapped(_) => {
                Err(Error::refused("the device has no window into its memory"))
            }
        }
    }
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuMemory")
            .field("buffer", &self.buffer)
            .field("hold", &self.hold)
            .field("reach", &self.reach)
            .finish()
    }
}

/// What keeps `buffer` the same memory, or why it cannot be registered.
fn hold(buffer: &Buffer) -> Result<Hold> {
    match buffer.origin() {
        "cuMemAllocManaged" => Err(managed(buffer)),
        "foreign" => {
            let id = buffer.allocation_id()?.ok_or_else(|| allocation_gone(buffer))?;
            Ok(Hold::Foreign { id, gone: AtomicBool::new(false), _retained: buffer.retain() })
        }
        _ => Ok(Hold::Owned),
    }
}

pub(super) fn managed(buffer: &Buffer) -> Error {
    Error::refused(format!(
        "{buffer:?} cannot be registered: it is managed memory, which the driver moves between host \
         and devices, so its pages have no lasting address"
    ))
    .coded("memory-managed")
    .remedy("allocate it with cuMemAlloc or cuMemCreate (Gpu::alloc, Gpu::alloc_shareable)")
}

fn allocation_gone(buffer: &Buffer) -> Error {
    Error::refused(format!("the allocation behind {buffer:?} was freed by its owner"))
        .coded("allocation-gone")
        .remedy("end the registration before the memory is freed")
}

/// Who holds memory of a device registered, for messages: `a region of NIC 10.0.0.1`.
pub(crate) fn holder_of(what: &impl fmt::Display) -> String {
    format!("a memory region of NIC {what}")
}

impl From<Arc<GpuMemory>> for crate::verbs::Memory {
    fn from(memory: Arc<GpuMemory>) -> Self {
        Self::Gpu(memory)
    }
}
