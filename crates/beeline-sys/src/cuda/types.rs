//! Numbers and layouts of the CUDA driver API (cuda.h). Every enumeration of it is an open newtype:
//! a value that a newer driver invents is representable, printable and never a panic.

use std::ffi::c_void;
use std::fmt;

/// What a driver call answered (`CUresult`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct CuResult(pub i32);

#[expect(missing_docs, reason = "the names and numbers of cuda.h")]
impl CuResult {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const NOT_INITIALIZED: Self = Self(3);
    pub const DEINITIALIZED: Self = Self(4);
    pub const STUB_LIBRARY: Self = Self(34);
    pub const DEVICE_UNAVAILABLE: Self = Self(46);
    pub const NO_DEVICE: Self = Self(100);
    pub const INVALID_DEVICE: Self = Self(101);
    pub const INVALID_CONTEXT: Self = Self(201);
    pub const ECC_UNCORRECTABLE: Self = Self(214);
    pub const INVALID_PTX: Self = Self(218);
    pub const NVLINK_UNCORRECTABLE: Self = Self(220);
    pub const CONTAINED: Self = Self(226);
    pub const OPERATING_SYSTEM: Self = Self(304);
    pub const INVALID_HANDLE: Self = Self(400);
    pub const NOT_FOUND: Self = Self(500);
    pub const NOT_READY: Self = Self(600);
    pub const ILLEGAL_ADDRESS: Self = Self(700);
    pub const LAUNCH_TIMEOUT: Self = Self(702);
    pub const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    pub const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub const ASSERT: Self = Self(710);
    pub const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub const LAUNCH_FAILED: Self = Self(719);
    pub const NOT_PERMITTED: Self = Self(800);
    pub const NOT_SUPPORTED: Self = Self(801);
    pub const SYSTEM_NOT_READY: Self = Self(802);
    pub const SYSTEM_DRIVER_MISMATCH: Self = Self(803);
    pub const COMPAT_NOT_SUPPORTED_ON_DEVICE: Self = Self(804);
    pub const UNKNOWN: Self = Self(999);
}

impl CuResult {
    /// Whether the failure leaves the context unusable: every later call repeats it, and only a new
    /// process gets a working device (cuda.h, "this leaves the process in an inconsistent state").
    pub const fn is_sticky(self) -> bool {
        matches!(
            self.0,
            4 | 46 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 806 | 809 | 999
        )
    }
}

impl fmt::Debug for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUresult({})", self.0)
    }
}

/// A property of a device (`CUdevice_attribute`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DeviceAttribute(pub i32);

#[expect(missing_docs, reason = "the names and numbers of cuda.h")]
impl DeviceAttribute {
    pub const MULTIPROCESSOR_COUNT: Self = Self(16);
    pub const INTEGRATED: Self = Self(18);
    pub const ASYNC_ENGINE_COUNT: Self = Self(40);
    pub const COMPUTE_CAPABILITY_MAJOR: Self = Self(75);
    pub const COMPUTE_CAPABILITY_MINOR: Self = Self(76);
    pub const CONCURRENT_MANAGED_ACCESS: Self = Self(89);
    pub const CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: Self = Self(91);
    pub const HOST_REGISTER_SUPPORTED: Self = Self(99);
    pub const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(102);
    pub const GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: Self = Self(110);
    pub const READ_ONLY_HOST_REGISTER_SUPPORTED: Self = Self(113);
    pub const MEMORY_POOLS_SUPPORTED: Self = Self(115);
    pub const GPU_DIRECT_RDMA_SUPPORTED: Self = Self(116);
    pub const GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: Self = Self(117);
    pub const GPU_DIRECT_RDMA_WRITES_ORDERING: Self = Self(118);
    pub const CAN_USE_64_BIT_STREAM_MEM_OPS: Self = Self(122);
    pub const CAN_USE_STREAM_WAIT_VALUE_NOR: Self = Self(123);
    pub const DMA_BUF_SUPPORTED: Self = Self(124);
}

/// A property of a pointer (`CUpointer_attribute`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct PointerAttribute(pub(super) i32);

impl PointerAttribute {
    pub(super) const CONTEXT: Self = Self(1);
    pub(super) const MEMORY_TYPE: Self = Self(2);
    pub(super) const BUFFER_ID: Self = Self(7);
    pub(super) const IS_MANAGED: Self = Self(8);
    pub(super) const DEVICE_ORDINAL: Self = Self(9);
    pub(super) const IS_LEGACY_CUDA_IPC_CAPABLE: Self = Self(10);
    pub(super) const RANGE_START_ADDR: Self = Self(11);
    pub(super) const RANGE_SIZE: Self = Self(12);
    pub(super) const ACCESS_FLAGS: Self = Self(16);
}

/// Where a pointer points (`CUmemorytype`); 0 for memory the driver does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct MemoryType(pub u32);

#[expect(missing_docs, reason = "the names and numbers of cuda.h")]
impl MemoryType {
    pub const UNKNOWN: Self = Self(0);
    pub const HOST: Self = Self(1);
    pub const DEVICE: Self = Self(2);
    pub const ARRAY: Self = Self(3);
    pub const UNIFIED: Self = Self(4);
}

/// What `cuGetProcAddress_v2` found (`CUdriverProcAddressQueryResult`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct ProcStatus(pub(super) i32);

impl ProcStatus {
    pub(super) const VERSION_NOT_SUFFICIENT: Self = Self(2);
}

/// How strictly the calling thread guards stream captures (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct CaptureMode(pub(super) i32);

impl CaptureMode {
    pub(super) const RELAXED: Self = Self(2);
}

/// `CUlaunchConfig`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    pub(super) stream: RawStream,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) count: u32,
}

/// `CUlaunchAttribute`: its number, and a union of 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    number: i32,
    unused: u32,
    value: [u32; 16],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<LaunchConfig>() == 56 && size_of::<LaunchAttribute>() == 72);
    assert!(offset_of!(LaunchConfig, stream) == 32 && offset_of!(LaunchConfig, attributes) == 40);
    assert!(offset_of!(LaunchConfig, count) == 48 && offset_of!(LaunchAttribute, value) == 8);
};

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: blocks may start while the kernel before in the stream still
    /// runs, once it lets them; they wait for its end themselves.
    pub(super) const EARLY: Self =
        Self { number: 6, unused: 0, value: [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] };
}

/// How `cuStreamWaitValue` compares (`CUstreamWaitValue_flags`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct WaitFlags(pub u32);

impl WaitFlags {
    /// Ready once `(word - value)`, as a signed number, is not negative.
    pub const GEQ: Self = Self(0);
    /// Ready once the word equals the value.
    pub const EQ: Self = Self(1);
    /// Ready once word and value share a set bit.
    pub const AND: Self = Self(2);
    /// Ready once some bit is clear in both. Not on every device.
    pub const NOR: Self = Self(3);
}

macro_rules! handle {
    ($(#[$doc:meta] $name:ident)*) => {$(
        #[$doc]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) *mut c_void);

        impl $name {
            pub(super) const NULL: Self = Self(std::ptr::null_mut());
        }

        // SAFETY: the pointer is never followed here; it is a number that the driver understands,
        // and the driver API may be called from every thread.
        unsafe impl Send for $name {}
        // SAFETY: as above; shared use only reads the number.
        unsafe impl Sync for $name {}
    )*};
}

handle! {
    /// `CUcontext`
    RawContext
    /// `CUstream`
    RawStream
    /// `CUevent`
    RawEvent
    /// `CUmodule`
    RawModule
    /// `CUfunction`
    RawFunction
}

/// The two default streams of cuda.h, which need no creation.
impl RawStream {
    pub(super) const LEGACY: Self = Self(std::ptr::without_provenance_mut(1));
    pub(super) const PER_THREAD: Self = Self(std::ptr::without_provenance_mut(2));
}

/// `CUipcMemHandle`
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct IpcHandle(pub(super) [u8; 64]);

/// `CUuuid`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct RawUuid(pub(super) [u8; 16]);

/// `CUmemLocation`: a device by ordinal.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct MemLocation {
    pub(super) kind: i32,
    pub(super) id: i32,
}

impl MemLocation {
    pub(super) const fn device(ordinal: i32) -> Self {
        Self { kind: 1, id: ordinal }
    }
}

/// `CUmemAllocationProp_v1`
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AllocationProp {
    pub(super) kind: i32,
    pub(super) handle_types: i32,
    pub(super) location: MemLocation,
    pub(super) win32_metadata: *mut c_void,
    pub(super) compression: u8,
    pub(super) gpu_direct_rdma_capable: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// `CUmemAccessDesc_v1`
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AccessDesc {
    pub(super) location: MemLocation,
    pub(super) flags: i32,
}

pub(super) const IPC_LAZY_ENABLE_PEER_ACCESS: u32 = 1;
pub(super) const MEM_ALLOCATION_TYPE_PINNED: i32 = 1;
pub(super) const MEM_HANDLE_TYPE_POSIX_FD: i32 = 1;
pub(super) const MEM_ACCESS_READ: i32 = 1;
pub(super) const MEM_ACCESS_READ_WRITE: i32 = 3;
pub(super) const MEM_ATTACH_GLOBAL: u32 = 1;
pub(super) const FLUSH_TARGET_CURRENT_CONTEXT: i32 = 0;
pub(super) const FLUSH_SCOPE_ALL_DEVICES: i32 = 200;
pub(super) const MEM_GRANULARITY_MINIMUM: i32 = 0;
pub(super) const MEM_RANGE_HANDLE_DMA_BUF_FD: i32 = 1;
pub(super) const HOST_REGISTER_PORTABLE: u32 = 0x01;
pub(super) const HOST_REGISTER_DEVICEMAP: u32 = 0x02;
pub(super) const HOST_REGISTER_READ_ONLY: u32 = 0x08;
pub(super) const STREAM_NON_BLOCKING: u32 = 1;
pub(super) const EVENT_DISABLE_TIMING: u32 = 2;
pub(super) const GET_PROC_ADDRESS_LEGACY_STREAM: u64 = 1;
pub(super) const JIT_ERROR_LOG_BUFFER: i32 = 5;
pub(super) const JIT_ERROR_LOG_BUFFER_SIZE_BYTES: i32 = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_cuda_h() {
        assert_eq!((size_of::<AllocationProp>(), align_of::<AllocationProp>()), (32, 8));
        assert_eq!(std::mem::offset_of!(AllocationProp, gpu_direct_rdma_capable), 25);
        assert_eq!(size_of::<AccessDesc>(), 12);
        assert_eq!(size_of::<RawUuid>(), 16);
    }

    #[test]
    fn unknown_results_are_representable() {
        assert_eq!(format!("{:?}", CuResult(-7)), "CUresult(-7)");
        assert!(CuResult::ILLEGAL_ADDRESS.is_sticky() && CuResult(717).is_sticky());
        assert!(!CuResult::OUT_OF_MEMORY.is_sticky() && !CuResult(123_456).is_sticky());
    }
}
