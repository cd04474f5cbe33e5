//! Registration of memory with a NIC of the kernel's: planned, tried in the plan's order, and explained.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use beeline_core::addr::Iova;
use beeline_core::checks::{Happened, Verb};
use beeline_core::mr::{Access, DeregisterError, Lkey, PdId, Registration, Rkey};
use beeline_core::plan::{Importer, Pages, RegisterRoute, Rejected, Wanted, register};
use beeline_core::reason::{Code, Reason};
use beeline_sys::ibverbs as sys;

use super::super::memory::Memory;
use super::super::objects::{MrResolved, deregister_error};
use super::device::Pd;
use super::driver_error;
use super::qp::access_flags;
use crate::error::{Error, Kind, Result};
use crate::memory::dmabuf::{DmaBuf, Kind as ExportKind};
use crate::memory::{GpuMemory, pinned_vram};
use crate::{probe, write_lock};

/// A memory region of a NIC of the kernel's.
#[derive(Debug)]
pub(in crate::verbs) struct Mr {
    region: Arc<Region>,
    pd: Arc<Pd>,
    pub(in crate::verbs) resolved: MrResolved,
}

/// What posted work requests hold.
#[derive(Debug)]
pub(super) struct Region {
    mr: sys::Mr,
    pub(super) memory: Memory,
    /// Work requests that name it.
    pub(super) posted: AtomicU32,
    revoked: AtomicBool,
}

impl Mr {
    pub(in crate::verbs) fn new(pd: &Arc<Pd>, memory: &Memory, access: Access) -> Result<Self> {
        let wanted = Registration {
            pd: PdId(0),
            iova: Iova::new(memory.addr()),
            len: memory.len(),
            access,
            kind: memory.kind(),
        };
        wanted.check().map_err(|error| Error::refused("cannot register memory").because(error))?;
        let known = pd.device.context.has_relaxed_ordering();
        let (relaxed, why) = ordering(access, memory, known);
        let flags = access_flags(access) | if relaxed { sys::Mr::RELAXED_ORDERING } else { 0 };
        let (mr, mut resolved) = take_a_way(pd, memory, flags)?;
        resolved.relaxed_ordering = relaxed;
        resolved.why.extend(why);
        let (posted, revoked) = (AtomicU32::new(0), AtomicBool::new(false));
        let region = Arc::new(Region { mr, memory: memory.clone(), posted, revoked });
        let lkey = Lkey::new(region.mr.lkey());
        write_lock(&pd.device.regions).insert(lkey, Arc::clone(&region));
        Ok(Self { region, pd: Arc::clone(pd), resolved })
    }

    pub(in crate::verbs) fn lkey(&self) -> Lkey {
        Lkey::new(self.region.mr.lkey())
    }

    pub(in crate::verbs) fn rkey(&self) -> Rkey {
        Rkey::new(self.region.mr.rkey())
    }

    /// The NIC says towards whom: 2 everything, 1 itself.
    pub(in crate::verbs) fn atomic_cap(&self) -> u32 {
        self.pd.device.attr.atomic_cap
    }

    pub(in crate::verbs) fn deregister(&mut self) -> Result<()> {
        let lkey = self.lkey();
        let mut regions = write_lock(&self.pd.device.regions);
        // Whoever posts holds the lock while it counts itself in.
        let posted = self.region.posted.load(Ordering::Acquire);
        if posted > 0 {
            return Err(deregister_error(DeregisterError::Busy { lkey, posted, in_flight: 0 }));
        }
        let done = self.region.mr.deregister();
        done.map_err(|error| driver_error(self.pd.device.name(), "deregister memory", error))?;
        self.forget(&mut regions);
        Ok(())
    }

    /// Takes the key away from the NIC: no access is under way when the driver has done so.
    pub(in crate::verbs) fn revoke(&self) -> u32 {
        self.region.revoked.store(true, Ordering::Release);
        self.in_flight()
    }

    pub(in crate::verbs) fn in_flight(&self) -> u32 {
        if !self.region.revoked.load(Ordering::Acquire) {
            return 0;
        }
        let ended = self.region.mr.deregister().is_ok();
        if ended {
            self.forget(&mut write_lock(&self.pd.device.regions));
        }
        u32::from(!ended)
    }

    /// The driver may give the same key out again: only our own region is forgotten.
    fn forget(&self, regions: &mut std::collections::HashMap<Lkey, Arc<Region>>) {
        let lkey = self.lkey();
        if regions.get(&lkey).is_some_and(|known| Arc::ptr_eq(known, &self.region)) {
            regions.remove(&lkey);
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // In use or not: the NIC reaches it no more. Posted work requests keep the memory itself.
        let _ = self.region.mr.deregister();
        self.forget(&mut write_lock(&self.pd.device.regions));
    }
}

/// Whether writes may pass one another, and why where that was asked for. `known`: the library knows the flag.
fn ordering(access: Access, memory: &Memory, known: bool) -> (bool, Option<Reason>) {
    if !access.contains(Access::RELAXED_ORDERING) {
        return (false, None);
    }
    let refused = |why: &str| (false, Some(Reason::with(Code::RelaxedOrderingRefused, why)));
    if access.contains(Access::REMOTE_ATOMIC) {
        return refused("the region takes atomics, so it carries flags or counters");
    }
    let pinned = match memory {
        Memory::Gpu(gpu) => pinned_vram::holder_of(gpu.buffer()),
        Memory::Host(_) | Memory::Device(_) => None,
    };
    if let Some(holder) = pinned {
        return refused(&format!("the region is memory for queues and flags (of {holder})"));
    }
    if !known {
        return refused("this libibverbs has no such flag");
    }
    (true, Some(Reason::new(Code::RelaxedOrdering)))
}

/// Registers by the first way of the plan that the driver takes.
fn take_a_way(pd: &Arc<Pd>, memory: &Memory, flags: u32) -> Result<(sys::Mr, MrResolved)> {
    let mut plan = register(&wanted(memory)?, &importer(pd, memory));
    let (mut rejected, mut failure) = (std::mem::take(&mut plan.rejected), None);
    explain_simulated(memory, &mut rejected);
    for choice in plan.choices {
        if choice.route == RegisterRoute::OnDemand {
            // A region that faults is slower, and on soft RoCE wrong for some path MTUs: only by name.
            let why = Reason::new(Code::NotRequested);
            rejected.push(Rejected { route: choice.route, why });
            continue;
        }
        match by(pd, memory, choice.route, flags) {
            Ok(mr) => {
                let (route, why) = (Some(choice.route), vec![choice.why]);
                return Ok((mr, MrResolved { route, relaxed_ordering: false, why, rejected }));
            }
            Err((why, error)) => {
                rejected.push(Rejected { route: choice.route, why });
                failure = failure.or(Some(error));
            }
        }
    }
    let reasons = rejected
        .into_iter()
        .map(|one| Reason { detail: format!("{}: {}", one.route, one.why.detail), ..one.why })
        .collect();
    let none = || {
        let text = format!("no way to register {} bytes with {}", memory.len(), pd.device.name());
        Error::new(Kind::NoRoute, text)
    };
    Err(failure.unwrap_or_else(none).with_reasons(reasons))
}

fn wanted(memory: &Memory) -> Result<Wanted> {
    let page_aligned = memory.addr().is_multiple_of(beeline_sys::mem::page_size() as u64);
    match memory {
        Memory::Host(_) => Ok(Wanted { pages: Pages::Ordinary, page_aligned, has_dma_buf: false }),
        Memory::Gpu(gpu) if gpu.is_dynamic() => Err(Error::refused(
            "whether memory may move while a NIC of the kernel's has it registered is the ability of \
             the NIC's driver",
        )
        .coded("dynamic-unsupported")
        .remedy("register it pinned (Pd::reg_gpu)")),
        Memory::Gpu(_) => Ok(Wanted { pages: Pages::Gpu, page_aligned, has_dma_buf: true }),
        Memory::Device(_) => Err(Error::refused(
            "memory that only this process can copy cannot be registered with a NIC of the kernel's",
        )
        .coded("memory-not-addressable")
        .remedy("register host memory, or memory of a GPU")),
    }
}

fn importer(pd: &Pd, memory: &Memory) -> Importer {
    let importer = pd.device.importer(&pd.pd);
    let cuda = matches!(memory, Memory::Gpu(gpu) if gpu.buffer().as_cuda().is_some());
    Importer { peer_memory: importer.peer_memory && cuda, ..importer }
}

/// No module helps memory of a simulated device.
fn explain_simulated(memory: &Memory, rejected: &mut [Rejected<RegisterRoute>]) {
    if !matches!(memory, Memory::Gpu(gpu) if gpu.buffer().as_cuda().is_none()) {
        return;
    }
    for one in rejected.iter_mut().filter(|one| one.route == RegisterRoute::PeerMemory) {
        one.why = Reason::new(Code::DeviceSimulated);
    }
}

/// Registers by one way.
fn by(
    pd: &Arc<Pd>,
    memory: &Memory,
    route: RegisterRoute,
    flags: u32,
) -> Result<sys::Mr, (Reason, Error)> {
    match (route, memory) {
        (RegisterRoute::Pinned, Memory::Host(mem)) => sys::Mr::host(&pd.pd, mem, flags)
            .map_err(|error| refused(pd, memory, Verb::Address, Code::PagesNotPinnable, error)),
        (RegisterRoute::PeerMemory, Memory::Gpu(gpu)) => by_peer_memory(pd, memory, gpu, flags),
        (RegisterRoute::DmaBuf, Memory::Gpu(gpu)) => by_dma_buf(pd, memory, gpu, flags),
        _ => {
            let error = Error::refused(format!("{route} is no way to register this memory"));
            Err((Reason::with(Code::PagesNotPinnable, route.as_str()), error))
        }
    }
}

fn by_peer_memory(
    pd: &Arc<Pd>,
    memory: &Memory,
    gpu: &Arc<GpuMemory>,
    flags: u32,
) -> Result<sys::Mr, (Reason, Error)> {
    let buffer = gpu.buffer();
    let Some(mem) = buffer.as_cuda() else {
        let why = Reason::new(Code::DeviceSimulated);
        return Err((why, Error::refused("a simulated device has no peer memory client")));
    };
    sys::Mr::device_pointer(&pd.pd, mem, buffer.ptr(), buffer.len(), flags)
        .map_err(|error| refused(pd, memory, Verb::Address, Code::PeermemNotRegistered, error))
}

fn by_dma_buf(
    pd: &Arc<Pd>,
    memory: &Memory,
    gpu: &Arc<GpuMemory>,
    flags: u32,
) -> Result<sys::Mr, (Reason, Error)> {
    let exported = DmaBuf::export(gpu.buffer()).and_then(|exported| match exported.kind() {
        ExportKind::MemoryFile => Err(Error::refused(
            "a memory file stands in for the dma-buf, because the kernel made none (/dev/udmabuf)",
        )
        .coded("dmabuf-export")),
        _ => Ok(exported),
    });
    let exported =
        exported.map_err(|error| (Reason::with(Code::DmabufExport, error.to_string()), error))?;
    let (fd, range) = (exported.fd(), (0, gpu.buffer().len()));
    // The kernel holds the dma-buf, and this side the memory that it exports.
    let keep = Box::new(Arc::clone(gpu));
    sys::Mr::dma_buf(&pd.pd, fd, range, memory.addr(), flags, keep)
        .map_err(|error| refused(pd, memory, Verb::DmaBuf, Code::DmabufUnsupported, error))
}

/// The driver said no: what doctor's checks make of it, and otherwise `code`.
fn refused(pd: &Pd, memory: &Memory, verb: Verb, code: Code, error: io::Error) -> (Reason, Error) {
    let errno = error.raw_os_error().unwrap_or(0);
    let (address, len) = (memory.addr(), memory.len());
    let why = Reason::with(code, format!("{}: {error}", verb.call()));
    let options = probe::Options { driver: false, kernel_log: false, ..probe::Options::default() };
    let happened = Happened::RegisterFailed { verb, errno, address, len };
    let action = format!("register {len} bytes at {address:#x}");
    let new = driver_error(pd.device.name(), &action, error);
    (why, probe::explained(new, &happened, &probe::gather(&options)))
}

#[cfg(test)]
mod tests {
    use beeline_core::addr::ByteRange;

    use super::*;
    use crate::config::SimConfig;
    use crate::gpu::{Gpu, Profile};
    use crate::memory::pinned_vram::PinnedVram;
    use crate::verbs::HostMem;

    /// Bulk memory may be written in any order, memory that somebody waits for a byte of may not.
    #[test]
    fn order_is_relaxed_for_bulk_memory_only() {
        let config =
            SimConfig { profile: Profile::Bar, memory_bytes: 4 << 20, ..SimConfig::default() };
        let gpu = Gpu::simulated(&config).unwrap();
        let bulk = gpu.alloc(65_536).unwrap();
        let pinned = PinnedVram::alloc(&gpu, 65_536, "a test's ring").unwrap();
        let flag = pinned.buffer().slice(ByteRange { start: 64, len: 8 }).unwrap();
        let host = Memory::Host(Arc::new(HostMem::anonymous(4096).unwrap()));
        let of = |buffer: &crate::gpu::Buffer| {
            Memory::Gpu(GpuMemory::pinned(buffer, "a test").unwrap().into())
        };
        let asked = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING;
        let cases = [
            (&host, asked, true, Ok(())),
            (&of(&bulk), asked, true, Ok(())),
            (&of(pinned.buffer()), asked, true, Err("a test's ring")),
            (&of(&flag), asked, true, Err("queues and flags")),
            (&of(&bulk), asked | Access::REMOTE_ATOMIC, true, Err("atomics")),
            (&host, asked, false, Err("no such flag")),
        ];
        for (memory, access, known, expected) in cases {
            let (relaxed, why) = ordering(access, memory, known);
            let why = why.unwrap();
            assert_eq!(relaxed, expected.is_ok(), "{why}");
            assert!(why.detail.contains(expected.err().unwrap_or("")), "{why}");
        }
        assert_eq!(ordering(Access::ALL, &host, true), (false, None), "nobody asked");
        // The memory is anybody's again.
        let ptr = pinned.buffer().clone();
        drop(pinned);
        assert!(ordering(asked, &of(&ptr), true).0);
    }
}
