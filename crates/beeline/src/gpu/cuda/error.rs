//! What a failure of the driver means, and what to do about it.

use beeline_sys::cuda::{CuResult, Error as CudaError, Failure, MemoryInfo, OpenError};

use crate::config::CudaConfig;
use crate::error::{Error, Kind};

/// The driver cannot be used at all.
#[cold]
pub(super) fn unusable(cause: OpenError) -> Error {
    let (kind, code, remedy) = match &cause {
        OpenError::Missing { .. } => (
            Kind::Device,
            "cuda-library-missing",
            "install the NVIDIA driver; in a container, run it with the NVIDIA container toolkit",
        ),
        OpenError::Unloadable { .. } => (
            Kind::Device,
            "cuda-library-broken",
            "reinstall the NVIDIA driver; the library must be of this machine's architecture",
        ),
        OpenError::TooOld { .. } => {
            (Kind::Device, "cuda-driver-too-old", "install an NVIDIA driver of series 470 or newer")
        }
        OpenError::SymbolMissing { .. } => {
            (Kind::Device, "cuda-symbol-missing", "reinstall the NVIDIA driver")
        }
        OpenError::SymbolVersion { .. } => {
            (Kind::Device, "cuda-symbol-version", "install a newer NVIDIA driver")
        }
        OpenError::Init(failure) => return not_started(failure),
        _ => (Kind::Device, "cuda-init-failed", ""),
    };
    built(kind, "cannot use CUDA", code, remedy).because(cause)
}

fn not_started(failure: &Failure) -> Error {
    let (kind, code, remedy) = match failure.result {
        CuResult::NO_DEVICE => (
            Kind::NotFound,
            "cuda-no-device",
            "check that /dev/nvidia0 exists and that CUDA_VISIBLE_DEVICES does not hide the device",
        ),
        CuResult::SYSTEM_DRIVER_MISMATCH => (
            Kind::Device,
            "cuda-driver-mismatch",
            "the kernel module and the library are of different versions: reload the module or reboot",
        ),
        CuResult::OUT_OF_MEMORY => {
            (Kind::OutOfMemory, "cuda-out-of-memory", "free host memory, or raise its limit")
        }
        CuResult::SYSTEM_NOT_READY => (
            Kind::Device,
            "cuda-system-not-ready",
            "start nvidia-fabricmanager, and look at its log",
        ),
        CuResult::STUB_LIBRARY => (
            Kind::Device,
            "cuda-stub-library",
            "a stub of the toolkit was loaded: take its folder out of LD_LIBRARY_PATH",
        ),
        _ => (Kind::Device, "cuda-init-failed", "look for NVRM lines in the kernel log (dmesg)"),
    };
    let visible = match (failure.result, CudaConfig::from_env().visible_devices) {
        (CuResult::NO_DEVICE, Some(visible)) => format!(" (CUDA_VISIBLE_DEVICES={visible:?})"),
        _ => String::new(),
    };
    let text = format!("cannot use CUDA{visible}");
    built(kind, &text, code, remedy).because(OpenError::Init(failure.clone()))
}

/// `action` (a verb with its object) failed with what the driver said.
#[cold]
pub(super) fn failed(action: impl std::fmt::Display, cause: CudaError) -> Error {
    let (kind, code, remedy) = match &cause {
        CudaError::Call(failure) => call(failure.result),
        CudaError::Stuck(_) => (Kind::Device, "stream-stuck", ""),
        CudaError::Capturing => (
            Kind::Refused,
            "stream-capturing",
            "end the capture first, or use a stream that takes no part in it",
        ),
        CudaError::Unsupported { .. } => (Kind::Refused, "cuda-unsupported", ""),
        _ => (Kind::Refused, "refused", ""),
    };
    built(kind, &format!("cannot {action}"), code, remedy).because(cause)
}

/// Device memory ran out: says how much is missing.
#[cold]
pub(super) fn no_memory(device: &str, len: u64, memory: Option<MemoryInfo>) -> Error {
    let text = memory.map_or_else(
        || format!("{device} has no room for {len} bytes"),
        |MemoryInfo { free, total }| match len.saturating_sub(free) {
            0 => format!(
                "{device} has {free} of {total} bytes of device memory free, but not {len} bytes in \
                 one piece"
            ),
            short => format!(
                "{device} has {free} of {total} bytes of device memory free, {short} bytes short of \
                 the {len} needed"
            ),
        },
    );
    Error::new(Kind::OutOfMemory, text)
        .remedy("load fewer tensors (--tensors), or end other programs that use the device")
}

fn call(result: CuResult) -> (Kind, &'static str, &'static str) {
    match result {
        CuResult::OUT_OF_MEMORY => (Kind::OutOfMemory, "out-of-memory", ""),
        CuResult::NOT_PERMITTED => (Kind::PermissionDenied, "permission-denied", ""),
        CuResult::INVALID_DEVICE => (Kind::NotFound, "not-found", ""),
        CuResult::HOST_MEMORY_ALREADY_REGISTERED => (Kind::Refused, "already-registered", ""),
        CuResult::NOT_SUPPORTED => (Kind::Device, "cuda-unsupported", ""),
        result if result.is_sticky() => (
            Kind::Device,
            "device-lost",
            "this process cannot use the device any more: start it again, and look for Xid lines in \
             the kernel log (dmesg)",
        ),
        _ => (Kind::Device, "device-failed", ""),
    }
}

fn built(kind: Kind, text: &str, code: &'static str, remedy: &str) -> Error {
    let error = Error::new(kind, text).coded(code);
    if remedy.is_empty() { error } else { error.remedy(remedy) }
}
