//! Open, close, properties, files and buffers.

use beeline::cufile::{Failure, Limit, OpError, UserPtr, library};

use crate::ffi::{In, Out, status, value};
use crate::layout::{CUfileDescr, CUfileError, DrvProps};

/// The pointer that a C caller passed as a buffer.
pub(crate) const fn user(ptr: u64) -> UserPtr {
    // SAFETY: the caller of every function that takes a buffer promises that it is memory of its own
    // until the operation has ended; the kernel or the driver checks the address.
    unsafe { UserPtr::new(ptr) }
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverOpen() -> CUfileError {
    status("cuFileDriverOpen", || library().open())
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverClose() -> CUfileError {
    status("cuFileDriverClose", || library().close())
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverClose_v2() -> CUfileError {
    status("cuFileDriverClose", || library().close())
}

#[unsafe(no_mangle)]
extern "C" fn cuFileUseCount() -> std::ffi::c_long {
    std::panic::catch_unwind(|| library().use_count()).unwrap_or(-1)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetVersion(version: Out<i32>) -> CUfileError {
    status("cuFileGetVersion", || version.set(i32::try_from(library().version()).unwrap_or(0)))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverGetProperties(props: Out<DrvProps>) -> CUfileError {
    status("cuFileDriverGetProperties", || {
        props.check()?;
        let found = library().properties()?;
        let size = |kb: u64| usize::try_from(kb).unwrap_or(usize::MAX);
        props.set(DrvProps {
            major: 0,
            minor: 0,
            poll_kb: size(found.poll_kb),
            direct_kb: size(found.direct_kb),
            status_flags: 0,
            control_flags: found.control_flags,
            feature_flags: found.feature_flags,
            cache_kb: found.cache_kb,
            per_buffer_kb: found.per_buffer_kb,
            pinned_kb: found.pinned_kb,
            batch: found.batch,
            batch_ms: found.batch_ms,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverSetPollMode(_poll: bool, threshold_kb: usize) -> CUfileError {
    limit("cuFileDriverSetPollMode", Limit::Poll, threshold_kb)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverSetMaxDirectIOSize(kb: usize) -> CUfileError {
    limit("cuFileDriverSetMaxDirectIOSize", Limit::Direct, kb)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverSetMaxCacheSize(kb: usize) -> CUfileError {
    limit("cuFileDriverSetMaxCacheSize", Limit::Cache, kb)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverSetMaxPinnedMemSize(kb: usize) -> CUfileError {
    limit("cuFileDriverSetMaxPinnedMemSize", Limit::Pinned, kb)
}

fn limit(name: &str, limit: Limit, kb: usize) -> CUfileError {
    status(name, || library().check_limit(limit, kb as u64))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleRegister(handle: Out<usize>, descr: In<CUfileDescr>) -> CUfileError {
    status("cuFileHandleRegister", || {
        handle.check()?;
        let descr = descr.get()?;
        if descr.kind != 1 {
            return Err(Failure::of(
                OpError::IO_NOT_SUPPORTED,
                format!(
                    "handles of type {} are not supported, only file descriptors (1)",
                    descr.kind
                ),
            ));
        }
        // The union's int is its first four bytes.
        let fd = descr.handle as u32 as i32;
        handle.set(library().register_handle(fd)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleDeregister(handle: usize) {
    status("cuFileHandleDeregister", || {
        library().deregister_handle(handle);
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBufRegister(ptr: u64, len: usize, _flags: i32) -> CUfileError {
    // The flags speak of RDMA, of which there is none on this path.
    status("cuFileBufRegister", || library().register_buffer(user(ptr), len as u64))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBufDeregister(ptr: u64) -> CUfileError {
    status("cuFileBufDeregister", || library().deregister_buffer(user(ptr)))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverSetP2PFlags(_driver: u32, _flags: u32) -> CUfileError {
    // No driver here uses peer-to-peer transfers, so there is nothing that the flags could change.
    status("cuFileDriverSetP2PFlags", || {
        let text = "no file system here moves bytes between drive and GPU directly";
        Err(Failure::of(OpError::IO_NOT_SUPPORTED, text))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverGetP2PFlags(_driver: u32, flags: Out<u32>) -> CUfileError {
    status("cuFileDriverGetP2PFlags", || flags.set(0))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetBARSizeInKB(gpu: i32, kb: Out<usize>) -> CUfileError {
    status("cuFileGetBARSizeInKB", || {
        kb.check()?;
        let bytes = beeline::cufile::bar_bytes(gpu)?;
        kb.set(usize::try_from(bytes / 1024).unwrap_or(usize::MAX))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileExportPCIeTopology(path: crate::ffi::Text) -> CUfileError {
    status("cuFileExportPCIeTopology", || {
        let path = path.read()?;
        if path.is_empty() {
            return Err(value("the path is empty"));
        }
        beeline::cufile::export_topology(std::path::Path::new(&path))
    })
}
