//! Small device memory that never moves and never leaves the device: for queues, doorbells and flags.
//!
//! What a queue in device memory needs is stated when it is allocated and checked there: it is ordinary
//! memory of one device (not managed, not of a pool that may be trimmed), it stays at its bus address, and
//! a NIC may be given it. Each device has a budget for it, so that one user cannot take what another
//! needs; an error says who holds it. Writes to it keep their order whatever a registration asks for, also where it is
//! reached by another buffer: somebody waits for a byte of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, OnceLock};

use beeline_core::addr::DevicePtr;

use crate::error::{Error, Kind, Result};
use crate::gpu::{Buffer, DeviceId, Gpu, sim};
use crate::lock;

/// What all of it may take of one device, in bytes.
pub const BUDGET_BYTES: u64 = 16 << 20;

/// Longest single allocation, in bytes: it is for queues, not for data.
pub const BYTES_MAX: u64 = 4 << 20;

/// A small piece of device memory that stays where it is. Given back when dropped.
pub struct PinnedVram {
    buffer: Buffer,
    /// Keeps a simulated device from moving it.
    _attached: Option<sim::Attachment>,
    charge: Charge,
}

/// What a piece takes of its device's budget.
struct Charge {
    device: DeviceId,
    number: u64,
}

#[derive(Default)]
struct Ledger {
    next: u64,
    /// By device and number.
    held: BTreeMap<(String, u64), Holding>,
}

struct Holding {
    holder: String,
    bytes: u64,
    /// Where it is; nowhere while it is being allocated.
    ptr: Option<DevicePtr>,
}

fn ledger() -> &'static Mutex<Ledger> {
    static LEDGER: OnceLock<Mutex<Ledger>> = OnceLock::new();
    LEDGER.get_or_init(Mutex::default)
}

impl PinnedVram {
    /// Allocates `len` bytes of `gpu` for `holder`, zeroed and aligned to 64 KiB where the device maps in
    /// such pages.
    ///
    /// # Errors
    /// `is_refused` for 0 bytes, more than [`BYTES_MAX`], and with code `vram-not-pinnable` where the
    /// device's memory lacks a property; `is_out_of_memory` with code `vram-budget` where the budget is
    /// used up, naming the holders; as [`Gpu::alloc`].
    pub fn alloc(gpu: &Gpu, len: u64, holder: &str) -> Result<Self> {
        if len == 0 || len > BYTES_MAX {
            let text =
                format!("cannot pin {len} bytes of device memory: 1 to {BYTES_MAX} are possible");
            return Err(Error::refused(text));
        }
        let charge = Charge::take(gpu.id(), len, holder)?;
        let buffer = gpu.alloc(len)?;
        check(&buffer)?;
        charge.is_at(buffer.ptr());
        let attached = match buffer.allocation_sim() {
            Some(allocation) if buffer.window().is_ok() => {
                Some(sim::Attachment::pinned(allocation, holder)?)
            }
            _ => None,
        };
        let stream = gpu.stream()?;
        stream.fill(&buffer, 0, len, 0)?;
        stream.synchronize(std::time::Instant::now() + std::time::Duration::from_secs(10))?;
        Ok(Self { buffer, _attached: attached, charge })
    }

    /// The memory.
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// What is left of a device's budget, in bytes.
    pub fn budget_left(gpu: &Gpu) -> u64 {
        BUDGET_BYTES.saturating_sub(lock(ledger()).used(&gpu.id().to_string()))
    }
}

/// Who holds a byte of `buffer` as pinned memory, if anybody does: by this buffer or another one.
pub(crate) fn holder_of(buffer: &Buffer) -> Option<String> {
    let (device, at) = (buffer.gpu().id().to_string(), buffer.ptr().as_u64());
    let end = at.saturating_add(buffer.len());
    let ledger = lock(ledger());
    let overlaps = |one: &&Holding| {
        let start = one.ptr.map(DevicePtr::as_u64);
        start.is_some_and(|start| start < end && at < start.saturating_add(one.bytes))
    };
    ledger.of(&device).find(overlaps).map(|one| one.holder.clone())
}

/// The properties that a queue in device memory rests on.
fn check(buffer: &Buffer) -> Result<()> {
    let lacks = |what: &str| {
        Error::refused(format!("{buffer:?} cannot hold a queue: {what}")).coded("vram-not-pinnable")
    };
    match buffer.origin() {
        "cuMemAlloc" | "cuMemCreate" | "simulated" => {}
        "cuMemAllocManaged" => return Err(lacks("managed memory moves between host and devices")),
        "cuMemAllocAsync" => return Err(lacks("memory of a pool may be trimmed away")),
        _ => return Err(lacks("its owner may free it")),
    }
    match buffer.allocation_id()? {
        Some(_) => Ok(()),
        None => Err(lacks("its driver does not tell one allocation from the next")),
    }
}

impl Charge {
    fn take(device: DeviceId, len: u64, holder: &str) -> Result<Self> {
        let mut ledger = lock(ledger());
        let name = device.to_string();
        let used = ledger.used(&name);
        if used.saturating_add(len) > BUDGET_BYTES {
            let holders: Vec<String> = ledger
                .of(&name)
                .take(8)
                .map(|one| format!("{}: {}", one.holder, one.bytes))
                .collect();
            let text = format!(
                "{device} has {} of {BUDGET_BYTES} bytes for pinned device memory left, {len} wanted by \
                 {holder} (held by {})",
                BUDGET_BYTES - used,
                holders.join(", ")
            );
            return Err(Error::new(Kind::OutOfMemory, text)
                .coded("vram-budget")
                .remedy("drop what is not used, or use pinned host memory for queues"));
        }
        let number = ledger.next;
        ledger.next += 1;
        let holding = Holding { holder: holder.to_owned(), bytes: len, ptr: None };
        ledger.held.insert((name, number), holding);
        Ok(Self { device, number })
    }

    fn is_at(&self, ptr: DevicePtr) {
        if let Some(one) = lock(ledger()).held.get_mut(&(self.device.to_string(), self.number)) {
            one.ptr = Some(ptr);
        }
    }
}

impl Ledger {
    fn of<'a>(&'a self, device: &'a str) -> impl Iterator<Item = &'a Holding> {
        self.held.iter().filter(move |((known, _), _)| known == device).map(|(_, held)| held)
    }

    fn used(&self, device: &str) -> u64 {
        self.of(device).map(|one| one.bytes).sum()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        lock(ledger()).held.remove(&(self.device.to_string(), self.number));
    }
}

impl fmt::Debug for PinnedVram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedVram({:?}, number {})", self.buffer, self.charge.number)
    }
}
