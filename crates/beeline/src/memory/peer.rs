//! Peer memory clients: one per kind of memory, with the seven calls by which a NIC's driver gets at
//! memory that it does not know itself, and the callback by which the memory's owner takes it back.
//!
//! The calls and their order are those of the peer memory interface of Linux drivers: `acquire` (is it
//! mine?), `get_pages` (pin it), `dma_map` (addresses for this NIC), then `dma_unmap`, `put_pages`,
//! `release`; `page_size` between. When the owner invalidates the pages, the importer drops its mapping
//! and must *not* put the pages: they are gone already. [`super::registration::Registration`] keeps to
//! all of that.

use std::fmt;
use std::sync::Arc;

use beeline_core::addr::{BusAddr, ByteRange, DevicePtr, Iova, VirtAddr};
use beeline_sys::mem::{HostMem, page_size};

use super::GpuMemory;
use crate::error::{Error, Result};
use crate::gpu::{BarWindow, Buffer, PinnedMem};
use crate::verbs::Memory;

/// Unit in which GPUs show their memory on the bus.
const GPU_PAGE_BYTES: u64 = 64 << 10;

/// Pages described one by one at most; what lies behind is described as a whole.
const RUNS_MAX: usize = 1024;

/// Memory that somebody wants to register.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Subject {
    /// Host memory.
    Host(Arc<HostMem>),
    /// Host memory that a GPU reaches, too.
    Pinned(PinnedMem),
    /// Memory of a GPU, CUDA or simulated.
    Gpu(Buffer),
    /// A window into GPU memory, as the bus shows it.
    Window(BarWindow),
}

impl Subject {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Host(mem) => mem.len(),
            Self::Pinned(mem) => mem.len(),
            Self::Gpu(buffer) => buffer.len(),
            Self::Window(window) => window.len(),
        }
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What the owner of memory calls when the pages go away. Called at most once.
#[derive(Clone)]
pub struct Invalidate(Arc<dyn Fn() + Send + Sync>);

impl Invalidate {
    /// Calls `work`.
    pub fn new(work: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(work))
    }

    /// The pages go away now.
    pub fn call(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Invalidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Invalidate")
    }
}

/// A client's answer that memory is its own.
#[derive(Debug)]
pub struct Claim {
    /// The memory.
    pub subject: Subject,
    /// Which bytes of it.
    pub range: ByteRange,
}

/// Where a byte is, as its own processor names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// The CPU.
    Cpu(VirtAddr),
    /// The GPU.
    Device(DevicePtr),
}

/// Pages that lie one after the other on the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// The first byte.
    pub addr: Address,
    /// Its bus address, or why this process does not know it.
    pub bus: Result<BusAddr, &'static str>,
    /// Length in bytes.
    pub len: u64,
}

/// Pinned pages.
#[derive(Debug)]
pub struct PageTable {
    /// The unit the pages come in, in bytes.
    pub page_size: u64,
    /// Runs of pages in address order.
    pub runs: Vec<Pages>,
    /// What keeps them, and how a NIC in software reaches them.
    memory: Memory,
}

impl PageTable {
    /// The memory as a NIC in software takes it.
    pub const fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// Addresses by which one NIC names the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DmaMap {
    /// First address and length in bytes of each run.
    pub runs: Vec<(Iova, u64)>,
    /// How they came about, as a sentence.
    pub why: &'static str,
}

/// One kind of memory, as an importer sees it. Every call but `acquire` concerns what this client
/// acquired.
pub trait PeerClient: fmt::Debug + Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> &'static str;

    /// Whether the memory is of this kind: `None` where it is not.
    fn acquire(&self, subject: &Subject, range: ByteRange) -> Option<Claim>;

    /// Pins the pages. `invalidate` is called when they go away before they are put.
    ///
    /// # Errors
    /// `is_refused` with the reason where such memory cannot be pinned.
    fn get_pages(&self, claim: &Claim, holder: &str, invalidate: Invalidate) -> Result<PageTable>;

    /// Makes addresses for a NIC.
    ///
    /// # Errors
    /// Where the NIC cannot reach them.
    fn dma_map(&self, pages: &PageTable) -> Result<DmaMap>;

    /// Ends the addresses.
    fn dma_unmap(&self, map: DmaMap) {
        drop(map);
    }

    /// Unpins the pages. Not called where they were invalidated.
    fn put_pages(&self, pages: PageTable) {
        drop(pages);
    }

    /// The unit pages come in, in bytes.
    fn page_size(&self, claim: &Claim) -> u64;

    /// Ends the claim.
    fn release(&self, claim: Claim) {
        drop(claim);
    }
}

/// Every client there is, in the order in which they are asked.
pub const CLIENTS: &[&dyn PeerClient] =
    &[&WindowClient, &SimClient, &CudaClient, &PinnedClient, &HostClient];

/// Host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostClient;
/// Host memory that is pinned for a GPU already.
#[derive(Clone, Copy, Debug)]
pub struct PinnedClient;
/// Memory of CUDA devices.
#[derive(Clone, Copy, Debug)]
pub struct CudaClient;
/// Memory of simulated devices.
#[derive(Clone, Copy, Debug)]
pub struct SimClient;
/// Windows into GPU memory.
#[derive(Clone, Copy, Debug)]
pub struct WindowClient;

const IN_SOFTWARE: &str = "the NIC runs in this process: it names memory by the address of its first byte, and nothing \
     translates in between";

fn claim(subject: &Subject, range: ByteRange) -> Option<Claim> {
    Some(Claim { subject: subject.clone(), range })
}

/// The claimed range, checked against the memory.
fn checked(claim: &Claim) -> Result<ByteRange> {
    let whole = ByteRange { start: 0, len: claim.subject.len() };
    if claim.range.is_empty() || !whole.contains(claim.range) {
        return Err(Error::refused(format!(
            "bytes {} do not lie inside memory of {} bytes",
            claim.range, whole.len
        )));
    }
    Ok(claim.range)
}

/// The address of the first byte of each run, as this process names it.
fn own_addresses(pages: &PageTable) -> DmaMap {
    let runs = pages.runs.iter().map(|run| {
        let addr = match run.addr {
            Address::Cpu(addr) => addr.as_u64(),
            Address::Device(addr) => addr.as_u64(),
        };
        (Iova::new(addr), run.len)
    });
    DmaMap { runs: runs.collect(), why: IN_SOFTWARE }
}

fn host_pages(mem: &Arc<HostMem>, range: ByteRange) -> PageTable {
    let page = page_size() as u64;
    let first = mem.addr().as_u64().saturating_add(range.start);
    let mut runs: Vec<Pages> = Vec::new();
    let mut at = first;
    let end = first.saturating_add(range.len);
    let pagemap = std::fs::File::open("/proc/self/pagemap").ok();
    while at < end && runs.len() < RUNS_MAX {
        let len = (page - at % page).min(end - at);
        let bus = physical(pagemap.as_ref(), at, page);
        match runs.last_mut() {
            Some(last) if follows(last, bus) => last.len += len,
            _ => runs.push(Pages { addr: Address::Cpu(VirtAddr::new(at)), bus, len }),
        }
        at += len;
    }
    if at < end {
        let bus = Err("not looked up: too many runs");
        runs.push(Pages { addr: Address::Cpu(VirtAddr::new(at)), bus, len: end - at });
    }
    PageTable { page_size: page, runs, memory: Memory::Host(Arc::clone(mem)) }
}

/// Whether a page at `bus` continues a run.
fn follows(run: &Pages, bus: Result<BusAddr, &'static str>) -> bool {
    match (run.bus, bus) {
        (Ok(start), Ok(here)) => start.checked_add(run.len) == Some(here),
        (Err(a), Err(b)) => a == b,
        _ => false,
    }
}

/// The physical address of a byte of this process (proc_pid_pagemap(5)), which is its bus address where
/// no IOMMU translates.
fn physical(pagemap: Option<&std::fs::File>, at: u64, page: u64) -> Result<BusAddr, &'static str> {
    use std::os::unix::fs::FileExt;

    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let mut word = [0; 8];
    let file = pagemap.ok_or("the kernel shows no page map")?;
    file.read_exact_at(&mut word, at / page * 8).map_err(|_| "the page map cannot be read")?;
    let word = u64::from_le_bytes(word);
    match word & FRAME {
        _ if word & PRESENT == 0 => Err("not present yet: the first access brings it in"),
        0 => Err("hidden: the kernel shows frames to CAP_SYS_ADMIN only"),
        frame => frame
            .checked_mul(page)
            .and_then(|start| start.checked_add(at % page))
            .map(BusAddr::new)
            .ok_or("the page map makes no sense"),
    }
}

impl PeerClient for HostClient {
    fn name(&self) -> &'static str {
        "host"
    }

    fn acquire(&self, subject: &Subject, range: ByteRange) -> Option<Claim> {
        matches!(subject, Subject::Host(_)).then(|| claim(subject, range))?
    }

    fn get_pages(&self, claim: &Claim, _: &str, _: Invalidate) -> Result<PageTable> {
        let range = checked(claim)?;
        match &claim.subject {
            Subject::Host(mem) => Ok(host_pages(mem, range)),
            _ => Err(not_mine(self)),
        }
    }

    fn dma_map(&self, pages: &PageTable) -> Result<DmaMap> {
        Ok(own_addresses(pages))
    }

    fn page_size(&self, _: &Claim) -> u64 {
        page_size() as u64
    }
}

impl PeerClient for PinnedClient {
    fn name(&self) -> &'static str {
        "pinned host"
    }

    fn acquire(&self, subject: &Subject, range: ByteRange) -> Option<Claim> {
        matches!(subject, Subject::Pinned(_)).then(|| claim(subject, range))?
    }

    fn get_pages(&self, claim: &Claim, _: &str, _: Invalidate) -> Result<PageTable> {
        let range = checked(claim)?;
        match &claim.subject {
            Subject::Pinned(mem) => Ok(host_pages(mem.mem(), range)),
            _ => Err(not_mine(self)),
        }
    }

    fn dma_map(&self, pages: &PageTable) -> Result<DmaMap> {
        Ok(own_addresses(pages))
    }

    fn page_size(&self, _: &Claim) -> u64 {
        page_size() as u64
    }
}

impl PeerClient for CudaClient {
    fn name(&self) -> &'static str {
        "CUDA"
    }

    fn acquire(&self, subject: &Subject, range: ByteRange) -> Option<Claim> {
        match subject {
            Subject::Gpu(buffer) if buffer.gpu().as_sim().is_none() => claim(subject, range),
            _ => None,
        }
    }

    fn get_pages(&self, claim: &Claim, holder: &str, invalidate: Invalidate) -> Result<PageTable> {
        let range = checked(claim)?;
        let Subject::Gpu(buffer) = &claim.subject else { return Err(not_mine(self)) };
        let buffer = buffer.slice(range)?;
        let memory = GpuMemory::pinned(&buffer, holder)?.on_gone(invalidate);
        let bus = Err("known to the driver alone, which gives it to drivers of the kernel");
        let runs = vec![Pages { addr: Address::Device(buffer.ptr()), bus, len: buffer.len() }];
        Ok(PageTable { page_size: GPU_PAGE_BYTES, runs, memory: Memory::Gpu(Arc::new(memory)) })
    }

    fn dma_map(&self, pages: &PageTable) -> Result<DmaMap> {
        Ok(own_addresses(pages))
    }

    fn page_size(&self, _: &Claim) -> u64 {
        GPU_PAGE_BYTES
    }
}

impl PeerClient for SimClient {
    fn name(&self) -> &'static str {
        "simulated GPU"
    }

    fn acquire(&self, subject: &Subject, range: ByteRange) -> Option<Claim> {
        match subject {
            Subject::Gpu(buffer) if buffer.gpu().as_sim().is_some() => claim(subject, range),
            _ => None,
        }
    }

    fn get_pages(&self, claim: &Claim, holder: &str, invalidate: Invalidate) -> Result<PageTable> {
        let range = checked(claim)?;
        let Subject::Gpu(buffer) = &claim.subject else { return Err(not_mine(self)) };
        sim_pages(&buffer.slice(range)?, holder, invalidate)
    }

    fn dma_map(&self, pages: &PageTable) -> Result<DmaMap> {
        Ok(own_addresses(pages))
    }

    fn page_size(&self, _: &Claim) -> u64 {
        GPU_PAGE_BYTES
    }
}

impl PeerClient for WindowClient {
    fn name(&self) -> &'static str {
        "BAR window"
    }

    fn acquire(&self, subject: &Subject, range: ByteRange) -> Option<Claim> {
        matches!(subject, Subject::Window(_)).then(|| claim(subject, range))?
    }

    fn get_pages(&self, claim: &Claim, holder: &str, invalidate: Invalidate) -> Result<PageTable> {
        let range = checked(claim)?;
        let Subject::Window(window) = &claim.subject else { return Err(not_mine(self)) };
        sim_pages(&window.buffer().slice(range)?, holder, invalidate)
    }

    /// By bus address: what a device beside this one would use.
    fn dma_map(&self, pages: &PageTable) -> Result<DmaMap> {
        let runs: Result<Vec<_>, _> = pages
            .runs
            .iter()
            .map(|run| run.bus.map(|bus| (Iova::new(bus.as_u64()), run.len)))
            .collect();
        let runs = runs.map_err(|why| Error::refused(format!("no bus address: {why}")))?;
        Ok(DmaMap { runs, why: "the window decodes bus addresses, and no IOMMU translates them" })
    }

    fn page_size(&self, _: &Claim) -> u64 {
        GPU_PAGE_BYTES
    }
}

fn sim_pages(buffer: &Buffer, holder: &str, invalidate: Invalidate) -> Result<PageTable> {
    // Pinned first, so that the addresses are those that stay.
    let memory = GpuMemory::pinned(buffer, holder)?.on_gone(invalidate);
    let mut runs = Vec::new();
    match buffer.window() {
        Err(_) => {
            let bus = Err("the device shows none of its memory on the bus (profile plain)");
            runs.push(Pages { addr: Address::Device(buffer.ptr()), bus, len: buffer.len() });
        }
        Ok(window) => {
            let mut at = 0;
            while at < buffer.len() {
                let (bus, len) = window.bus_addr(at)?;
                let addr = buffer.ptr().checked_add(at).unwrap_or_default();
                runs.push(Pages { addr: Address::Device(addr), bus: Ok(bus), len });
                at += len;
            }
        }
    }
    Ok(PageTable { page_size: GPU_PAGE_BYTES, runs, memory: Memory::Gpu(Arc::new(memory)) })
}

fn not_mine(client: &dyn PeerClient) -> Error {
    Error::refused(format!("this memory was not acquired by the {} client", client.name()))
}
