//! dma-bufs of GPU memory: a descriptor that another driver imports, and importers of our own.
//!
//! An exporter lends pages; an importer attaches them **pinned** (they do not move while it holds them)
//! or **dynamic** (they may move: the importer is told, gives its translation up, and asks again). A
//! CUDA driver's dma-buf is imported by other drivers of the kernel only, and whether that is dynamic is
//! their ability. Between the simulated GPU and importers of this library both kinds are real.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use beeline_core::addr::{BusAddr, align_up};
use beeline_sys::dmabuf;

use crate::error::{Error, Result};
use crate::gpu::{Buffer, sim};

/// How an importer attaches memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attach {
    /// The memory stays where it is; whoever wants to move it is told this name.
    Pinned {
        /// Who holds it.
        holder: String,
    },
    /// The memory may move.
    Dynamic,
}

/// What stands behind the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// The CUDA driver's.
    Cuda,
    /// The kernel's, of a memory file (`/dev/udmabuf`).
    Udmabuf,
    /// The memory file itself: processes map it, drivers cannot import it.
    MemoryFile,
}

/// Exported GPU memory. The memory lives at least as long as this value; a driver that imports the
/// descriptor must let go of it first.
#[derive(Debug)]
pub struct DmaBuf {
    fd: OwnedFd,
    kind: Kind,
    buffer: Buffer,
}

impl DmaBuf {
    /// Exports exactly the bytes of `buffer`, which must be whole pages of the host: a driver exports
    /// pages, and what stands beside them is somebody else's.
    ///
    /// # Errors
    /// `is_refused`, with a code: `dmabuf-unaligned`; `memory-managed`; `gdr-vmm-unsupported` where the
    /// device's virtual memory cannot be given to a NIC; `dmabuf-pool-memory` where the driver exports no
    /// memory of its pools; `dmabuf-export` with what the driver said. `is_no_route` for a simulated device
    /// without a window.
    pub fn export(buffer: &Buffer) -> Result<Self> {
        let page = beeline_sys::mem::page_size() as u64;
        if buffer.is_empty() || !buffer.ptr().is_aligned(page) || !buffer.len().is_multiple_of(page)
        {
            let error =
                format!("{buffer:?} cannot be exported: it is not whole pages of {page} bytes");
            return Err(Error::refused(error)
                .coded("dmabuf-unaligned")
                .remedy("allocate and export whole pages"));
        }
        let ability = buffer.gpu().rdma_ability();
        match buffer.origin() {
            "cuMemAllocManaged" => return Err(super::gpu_memory::managed(buffer)),
            "cuMemCreate" if !ability.virtual_memory => {
                return Err(Error::refused(format!(
                    "{buffer:?} was not made for GPUDirect RDMA: the device's virtual memory cannot be \
                     (gpuDirectRDMACapable)"
                ))
                .coded("gdr-vmm-unsupported")
                .remedy("use Gpu::alloc"));
            }
            _ => {}
        }
        let (fd, kind) = match buffer.allocation_sim() {
            None => (buffer.dma_buf_cuda()?, Kind::Cuda),
            Some(_) => export_sim(buffer)?,
        };
        Ok(Self { fd, kind, buffer: buffer.clone() })
    }

    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// What stands behind it.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Where the first byte lies behind the descriptor, for a mapping; `None` where the bytes lie apart.
    pub(crate) fn start(&self) -> Option<u64> {
        if self.kind != Kind::MemoryFile {
            return Some(0);
        }
        let (allocation, at) = self.buffer.locate_sim(0, self.buffer.len()).ok()?;
        match allocation.extents_of(at, self.buffer.len()).as_slice() {
            [extent] => Some(extent.offset),
            _ => None,
        }
    }

    /// The memory.
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Length in bytes, as the kernel knows it: for a memory file that of the whole device.
    ///
    /// # Errors
    /// What `lseek(2)` says.
    pub fn len(&self) -> Result<u64> {
        dmabuf::len(&self.fd).map_err(|error| Error::io("ask for the size of a dma-buf", error))
    }

    /// Whether it has no byte. Always false.
    pub const fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Attaches the memory to an importer of this library.
    ///
    /// # Errors
    /// `is_refused`: for CUDA memory (code `import-unsupported`), and for too many importers.
    pub fn attach(&self, how: Attach) -> Result<Attached> {
        let Some(allocation) = self.buffer.allocation_sim() else {
            return Err(Error::refused(
                "a dma-buf of the CUDA driver is imported by drivers of the kernel only",
            )
            .coded("import-unsupported"));
        };
        let inner = match &how {
            Attach::Pinned { holder } => sim::Attachment::pinned(allocation, holder)?,
            Attach::Dynamic => sim::Attachment::dynamic(allocation)?,
        };
        Ok(Attached { buffer: self.buffer.clone(), inner })
    }
}

/// Memory as an importer reaches it: by bus address, through a translation of its own.
#[derive(Debug)]
pub struct Attached {
    buffer: Buffer,
    inner: sim::Attachment,
}

impl Attached {
    /// Copies bytes out.
    ///
    /// # Errors
    /// `is_refused` outside the memory; `is_timeout` where a move does not end.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (_, at) = self.buffer.locate(offset, into.len() as u64)?;
        self.inner.read(at, into)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let (_, at) = self.buffer.locate(offset, from.len() as u64)?;
        self.inner.write(at, from)
    }

    /// The bus address of a byte now, and how many bytes follow it contiguously; of dynamic memory it is
    /// the address until the next move.
    ///
    /// # Errors
    /// `is_refused` outside the memory.
    pub fn bus_addr(&self, offset: u64) -> Result<(BusAddr, u64)> {
        self.buffer.window()?.bus_addr(offset)
    }

    /// Pages faulted in, and translations taken away, so far; both 0 where it is pinned.
    pub fn moves(&self) -> (u64, u64) {
        self.inner.counts()
    }
}

/// A dma-buf of the kernel's where it makes them, else the memory file.
fn export_sim(buffer: &Buffer) -> Result<(OwnedFd, Kind)> {
    buffer.window()?;
    let (allocation, at) = buffer.locate_sim(0, buffer.len())?;
    let io = |error| Error::io("export simulated device memory", error);
    let memory = allocation.memory_file();
    let extents = allocation.extents_of(at, buffer.len());
    let whole = extents.iter().all(|extent| align_up(extent.len, 4096) == Some(extent.len));
    match dmabuf::of_memory_file(memory, &extents) {
        Ok(fd) if whole => Ok((fd, Kind::Udmabuf)),
        // No such device, no permission, or larger than it takes: the pages can be mapped all the same.
        _ => Ok((memory.try_clone_to_owned().map_err(io)?, Kind::MemoryFile)),
    }
}
