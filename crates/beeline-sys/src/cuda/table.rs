//! The functions of `libcuda.so.1`, found at run time.
//!
//! Each is asked of `cuGetProcAddress_v2` in the version whose signature stands here, so that a later
//! driver never hands out a later signature under the same name; a driver too old for that function is
//! asked with `dlsym` for the versioned name. Stream functions are those of the legacy default stream.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use libloading::os::unix::{Library as Dl, RTLD_LOCAL, RTLD_NOW};

use super::error::OpenError;
use super::types::*;

/// The oldest driver that works: CUDA 11.4, the first with the UUIDs of MIG instances.
pub(super) const OLDEST: i32 = 11_040;

const LIBRARY: &str = "libcuda.so.1";

type ProcV1 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> CuResult;
type ProcV2 =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut ProcStatus) -> CuResult;

macro_rules! table {
    (@type required ($($arg:ty),*)) => { unsafe extern "C" fn($($arg),*) -> CuResult };
    (@type optional ($($arg:ty),*)) => { Option<unsafe extern "C" fn($($arg),*) -> CuResult> };
    (@find required $found:expr, $name:ident, $version:literal) => {
        $found?.ok_or(OpenError::SymbolMissing { symbol: stringify!($name), version: $version })?
    };
    // An optional function in a version that is not ours is as good as none.
    (@find optional $found:expr, $name:ident, $version:literal) => { $found.unwrap_or(None) };
    ($($need:ident $name:ident @ $version:literal = $export:literal $args:tt;)*) => {
        /// The driver's functions by their names in cuda.h.
        #[expect(non_snake_case, reason = "the names of cuda.h")]
        pub(super) struct Table { $(pub(super) $name: table!(@type $need $args),)* }

        impl Table {
            fn load(finder: &Finder) -> Result<Self, OpenError> {
                Ok(Self { $($name: {
                    let symbol = Symbol {
                        name: stringify!($name),
                        base: concat!(stringify!($name), "\0"),
                        export: concat!($export, "\0"),
                        version: $version,
                    };
                    // SAFETY: the type is the signature that cuda.h gives this function in this
                    // version, and the finder answers in no other version.
                    let found = unsafe { finder.find(&symbol) };
                    table!(@find $need found, $name, $version)
                },)* })
            }
        }
    };
}

table! {
    required cuInit @ 2000 = "cuInit" (u32);
    optional cuGetErrorName @ 6000 = "cuGetErrorName" (CuResult, *mut *const c_char);
    optional cuGetErrorString @ 6000 = "cuGetErrorString" (CuResult, *mut *const c_char);

    required cuDeviceGet @ 2000 = "cuDeviceGet" (*mut i32, i32);
    required cuDeviceGetCount @ 2000 = "cuDeviceGetCount" (*mut i32);
    required cuDeviceGetName @ 2000 = "cuDeviceGetName" (*mut c_char, i32, i32);
    required cuDeviceGetUuid @ 11040 = "cuDeviceGetUuid_v2" (*mut RawUuid, i32);
    required cuDeviceTotalMem @ 3020 = "cuDeviceTotalMem_v2" (*mut usize, i32);
    required cuDeviceGetAttribute @ 2000 = "cuDeviceGetAttribute" (*mut i32, DeviceAttribute, i32);
    required cuDeviceGetPCIBusId @ 4010 = "cuDeviceGetPCIBusId" (*mut c_char, i32, i32);
    required cuDevicePrimaryCtxRetain @ 7000 = "cuDevicePrimaryCtxRetain" (*mut RawContext, i32);
    required cuDevicePrimaryCtxRelease @ 11000 = "cuDevicePrimaryCtxRelease_v2" (i32);
    optional cuDeviceCanAccessPeer @ 4000 = "cuDeviceCanAccessPeer" (*mut i32, i32, i32);

    required cuCtxPushCurrent @ 4000 = "cuCtxPushCurrent_v2" (RawContext);
    optional cuCtxGetCurrent @ 4000 = "cuCtxGetCurrent" (*mut RawContext);
    required cuCtxPopCurrent @ 4000 = "cuCtxPopCurrent_v2" (*mut RawContext);
    optional cuDevicePrimaryCtxGetState @ 7000 = "cuDevicePrimaryCtxGetState" (i32, *mut u32, *mut i32);
    required cuThreadExchangeStreamCaptureMode @ 10010 = "cuThreadExchangeStreamCaptureMode" (*mut CaptureMode);

    optional cuCtxGetDevice @ 2000 = "cuCtxGetDevice" (*mut i32);
    optional cuCtxGetId @ 12000 = "cuCtxGetId" (RawContext, *mut u64);
    optional cuCtxEnablePeerAccess @ 4000 = "cuCtxEnablePeerAccess" (RawContext, u32);

    optional cuIpcGetMemHandle @ 4010 = "cuIpcGetMemHandle" (*mut IpcHandle, u64);
    optional cuIpcOpenMemHandle @ 11000 = "cuIpcOpenMemHandle_v2" (*mut u64, IpcHandle, u32);
    optional cuIpcCloseMemHandle @ 4010 = "cuIpcCloseMemHandle" (u64);
    optional cuDeviceGetP2PAttribute @ 8000 = "cuDeviceGetP2PAttribute" (*mut i32, i32, i32, i32);

    required cuMemGetInfo @ 3020 = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    required cuMemAlloc @ 3020 = "cuMemAlloc_v2" (*mut u64, usize);
    required cuMemFree @ 3020 = "cuMemFree_v2" (u64);
    required cuMemHostRegister @ 6050 = "cuMemHostRegister_v2" (*mut c_void, usize, u32);
    required cuMemHostUnregister @ 4000 = "cuMemHostUnregister" (*mut c_void);
    required cuMemHostGetDevicePointer @ 3020 = "cuMemHostGetDevicePointer_v2" (*mut u64, *mut c_void, u32);
    required cuPointerGetAttributes @ 7000 = "cuPointerGetAttributes" (u32, *const PointerAttribute, *const *mut c_void, u64);

    optional cuMemGetAllocationGranularity @ 10020 = "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProp, i32);
    optional cuMemCreate @ 10020 = "cuMemCreate" (*mut u64, usize, *const AllocationProp, u64);
    optional cuMemExportToShareableHandle @ 10020 = "cuMemExportToShareableHandle" (*mut c_void, u64, i32, u64);
    optional cuMemImportFromShareableHandle @ 10020 = "cuMemImportFromShareableHandle" (*mut u64, *mut c_void, i32);
    optional cuMemRelease @ 10020 = "cuMemRelease" (u64);
    optional cuMemAddressReserve @ 10020 = "cuMemAddressReserve" (*mut u64, usize, usize, u64, u64);
    optional cuMemAddressFree @ 10020 = "cuMemAddressFree" (u64, usize);
    optional cuMemMap @ 10020 = "cuMemMap" (u64, usize, usize, u64, u64);
    optional cuMemUnmap @ 10020 = "cuMemUnmap" (u64, usize);
    optional cuMemSetAccess @ 10020 = "cuMemSetAccess" (u64, usize, *const AccessDesc, usize);
    optional cuMemAllocAsync @ 11020 = "cuMemAllocAsync" (*mut u64, usize, RawStream);
    optional cuMemFreeAsync @ 11020 = "cuMemFreeAsync" (u64, RawStream);
    optional cuMemRetainAllocationHandle @ 11000 = "cuMemRetainAllocationHandle" (*mut u64, *mut c_void);
    optional cuMemAllocManaged @ 6000 = "cuMemAllocManaged" (*mut u64, usize, u32);
    optional cuFlushGPUDirectRDMAWrites @ 11030 = "cuFlushGPUDirectRDMAWrites" (i32, i32);
    optional cuMemGetHandleForAddressRange @ 11070 = "cuMemGetHandleForAddressRange" (*mut c_void, u64, usize, i32, u64);

    required cuMemcpyHtoDAsync @ 3020 = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, RawStream);
    required cuMemcpyDtoHAsync @ 3020 = "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, RawStream);
    required cuMemcpyDtoDAsync @ 3020 = "cuMemcpyDtoDAsync_v2" (u64, u64, usize, RawStream);
    required cuMemcpyPeerAsync @ 4000 = "cuMemcpyPeerAsync" (u64, RawContext, u64, RawContext, usize, RawStream);
    required cuMemsetD8Async @ 3020 = "cuMemsetD8Async" (u64, u8, usize, RawStream);

    required cuStreamCreate @ 2000 = "cuStreamCreate" (*mut RawStream, u32);
    optional cuStreamCreateWithPriority @ 5050 = "cuStreamCreateWithPriority" (*mut RawStream, u32, i32);
    optional cuStreamQuery @ 2000 = "cuStreamQuery" (RawStream);
    optional cuStreamSynchronize @ 2000 = "cuStreamSynchronize" (RawStream);
    required cuStreamDestroy @ 4000 = "cuStreamDestroy_v2" (RawStream);
    required cuStreamWaitEvent @ 3020 = "cuStreamWaitEvent" (RawStream, RawEvent, u32);
    required cuStreamIsCapturing @ 10000 = "cuStreamIsCapturing" (RawStream, *mut i32);
    optional cuStreamGetCaptureInfo @ 11030 = "cuStreamGetCaptureInfo_v2" (RawStream, *mut i32, *mut u64, *mut *mut c_void, *mut *const *mut c_void, *mut usize);
    optional cuStreamGetId @ 12000 = "cuStreamGetId" (RawStream, *mut u64);
    optional cuStreamGetCtx @ 9020 = "cuStreamGetCtx" (RawStream, *mut RawContext);
    optional cuStreamWriteValue32 @ 11070 = "cuStreamWriteValue32_v2" (RawStream, u64, u32, u32);
    optional cuStreamWriteValue64 @ 11070 = "cuStreamWriteValue64_v2" (RawStream, u64, u64, u32);
    optional cuStreamWaitValue32 @ 11070 = "cuStreamWaitValue32_v2" (RawStream, u64, u32, WaitFlags);
    optional cuStreamWaitValue64 @ 11070 = "cuStreamWaitValue64_v2" (RawStream, u64, u64, WaitFlags);

    required cuEventCreate @ 2000 = "cuEventCreate" (*mut RawEvent, u32);
    required cuEventDestroy @ 4000 = "cuEventDestroy_v2" (RawEvent);
    required cuEventQuery @ 2000 = "cuEventQuery" (RawEvent);
    required cuEventRecord @ 2000 = "cuEventRecord" (RawEvent, RawStream);

    required cuModuleLoadDataEx @ 2010 = "cuModuleLoadDataEx" (*mut RawModule, *const c_void, u32, *const i32, *const *mut c_void);
    required cuModuleUnload @ 2000 = "cuModuleUnload" (RawModule);
    required cuModuleGetFunction @ 2000 = "cuModuleGetFunction" (*mut RawFunction, RawModule, *const c_char);
    optional cuFuncLoad @ 12040 = "cuFuncLoad" (RawFunction);
    required cuLaunchKernel @ 4000 = "cuLaunchKernel" (RawFunction, u32, u32, u32, u32, u32, u32, u32, RawStream, *const *mut c_void, *const *mut c_void);
    optional cuLaunchKernelEx @ 11060 = "cuLaunchKernelEx" (*const LaunchConfig, RawFunction, *const *mut c_void, *const *mut c_void);
}

/// The UUID of the whole GPU, also where the device is a MIG instance: the first version of
/// `cuDeviceGetUuid`, which the table above has in its second.
pub(super) type DeviceGetUuidV1 = unsafe extern "C" fn(*mut RawUuid, i32) -> CuResult;

/// The loaded library.
pub(super) struct Loaded {
    pub(super) table: Table,
    pub(super) gpu_uuid: Option<DeviceGetUuidV1>,
    pub(super) version: i32,
}

/// Loads the driver library, from `path` where one is given, and checks its version.
///
/// The library is never unloaded: the driver keeps threads of its own.
pub(super) fn load(path: Option<&Path>) -> Result<Loaded, OpenError> {
    let library = path.map_or_else(|| LIBRARY.into(), |path| path.display().to_string());
    let name = path.unwrap_or(Path::new(LIBRARY));
    // SAFETY: initialisers of the vendor's driver library (or of a file that the user named in its
    // place) run here; loading it is what was asked for.
    let opened = unsafe { Dl::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
    let dl = opened.map_err(|error| unloaded(library, &error))?;
    let mut finder = Finder::new(std::mem::ManuallyDrop::new(dl));
    let version = driver_version(&finder)?;
    if version < OLDEST {
        return Err(OpenError::TooOld { found: version, needed: OLDEST });
    }
    finder.version = version;
    let table = Table::load(&finder)?;
    let v1 = Symbol {
        name: "cuDeviceGetUuid",
        base: "cuDeviceGetUuid\0",
        export: "cuDeviceGetUuid\0",
        version: 9020,
    };
    // SAFETY: the type is the signature of cuDeviceGetUuid since CUDA 9.2.
    let gpu_uuid = unsafe { finder.find(&v1) }.unwrap_or(None);
    Ok(Loaded { table, gpu_uuid, version })
}

/// The version, asked before anything else is looked up: an old driver lacks functions, and "too old"
/// says more than the name of the first one missing.
fn driver_version(finder: &Finder) -> Result<i32, OpenError> {
    type GetVersion = unsafe extern "C" fn(*mut i32) -> CuResult;
    let symbol = "cuDriverGetVersion";
    // SAFETY: the type is the signature of cuDriverGetVersion since CUDA 2.2.
    let get: GetVersion = unsafe { finder.dlsym("cuDriverGetVersion\0") }
        .ok_or(OpenError::SymbolMissing { symbol, version: 2020 })?;
    let mut version = 0;
    // SAFETY: `version` is a place for one int; the function works before cuInit.
    let result = unsafe { get(&raw mut version) };
    if result == CuResult::SUCCESS {
        return Ok(version);
    }
    Err(OpenError::Init(super::Failure {
        call: symbol,
        values: String::new(),
        result,
        name: String::new(),
        text: String::new(),
    }))
}

fn unloaded(library: String, error: &libloading::Error) -> OpenError {
    let text = std::error::Error::source(error).map_or(error.to_string(), ToString::to_string);
    // The loader says "NAME: cannot open ..." of the library itself or of one that it needs.
    let own = text.strip_prefix(&library).is_some_and(|rest| rest.starts_with(": cannot open"));
    if own && text.contains("No such file") {
        OpenError::Missing { library, text }
    } else {
        OpenError::Unloadable { library, text }
    }
}

struct Symbol {
    name: &'static str,
    /// The name without version, ended by a zero byte.
    base: &'static str,
    /// The name that the library exports this version under, ended by a zero byte.
    export: &'static str,
    version: i32,
}

struct Finder {
    dl: std::mem::ManuallyDrop<Dl>,
    v2: Option<ProcV2>,
    v1: Option<ProcV1>,
    /// CUDA version of the driver; it is not asked for functions of later ones.
    version: i32,
}

impl Finder {
    fn new(dl: std::mem::ManuallyDrop<Dl>) -> Self {
        let mut finder = Self { dl, v2: None, v1: None, version: 0 };
        // SAFETY: the type is the signature of cuGetProcAddress_v2 (CUDA 12.0).
        finder.v2 = unsafe { finder.dlsym("cuGetProcAddress_v2\0") };
        // SAFETY: the type is the signature of cuGetProcAddress (CUDA 11.3).
        finder.v1 = unsafe { finder.dlsym("cuGetProcAddress\0") };
        finder
    }

    /// # Safety
    /// `F` is a function pointer type with the signature of `symbol` in its version.
    unsafe fn find<F: Copy>(&self, symbol: &Symbol) -> Result<Option<F>, OpenError> {
        if symbol.version > self.version {
            return Ok(None);
        }
        let (found, status) = self.proc_address(symbol);
        if status == ProcStatus::VERSION_NOT_SUFFICIENT {
            let (symbol, version) = (symbol.name, symbol.version);
            return Err(OpenError::SymbolVersion { symbol, version });
        }
        if found.is_null() {
            // SAFETY: the caller's promise, and `export` names exactly this version.
            return Ok(unsafe { self.dlsym(symbol.export) });
        }
        // SAFETY: `found` is not null, and the caller promises that it has type `F`.
        Ok(Some(unsafe { as_function(found) }))
    }

    fn proc_address(&self, symbol: &Symbol) -> (*mut c_void, ProcStatus) {
        let mut found = std::ptr::null_mut();
        let mut status = ProcStatus::default();
        let Ok(base) = CStr::from_bytes_with_nul(symbol.base.as_bytes()) else {
            return (found, status);
        };
        let flags = GET_PROC_ADDRESS_LEGACY_STREAM;
        let (name, version) = (base.as_ptr(), symbol.version);
        let result = match (self.v2, self.v1) {
            (Some(v2), _) => {
                // SAFETY: a C string and places for one pointer and one enum, as declared.
                unsafe { v2(name, &raw mut found, version, flags, &raw mut status) }
            }
            (None, Some(v1)) => {
                // SAFETY: a C string and a place for one pointer, as declared.
                unsafe { v1(name, &raw mut found, version, flags) }
            }
            (None, None) => CuResult::NOT_FOUND,
        };
        if result != CuResult::SUCCESS {
            found = std::ptr::null_mut();
        }
        (found, status)
    }

    /// # Safety
    /// `F` is a function pointer type with the signature of the function that is exported as `name`.
    unsafe fn dlsym<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the symbol is only read as an address here.
        let symbol = unsafe { self.dl.get::<*mut c_void>(name.as_bytes()) }.ok()?;
        let found = symbol.into_raw();
        if found.is_null() {
            return None;
        }
        // SAFETY: `found` is not null, and the caller promises that it has type `F`.
        Some(unsafe { as_function(found) })
    }
}

/// # Safety
/// `F` is a function pointer type, and `address` that of a function of that type.
unsafe fn as_function<F: Copy>(address: *mut c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the sizes are equal, and the caller promises that the bits are a function of type `F`.
    unsafe { std::mem::transmute_copy(&address) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_and_one_that_is_none_are_different_errors() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("libcuda.so.1");
        let error = load(Some(&missing)).err().unwrap();
        assert!(matches!(&error, OpenError::Missing { .. }), "{error}");

        std::fs::write(&missing, "not a library").unwrap();
        let error = load(Some(&missing)).err().unwrap();
        assert!(matches!(&error, OpenError::Unloadable { .. }), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_says_which_is_missing() {
        let error = load(Some(Path::new("libc.so.6"))).err().unwrap();
        assert_eq!(error, OpenError::SymbolMissing { symbol: "cuDriverGetVersion", version: 2020 });
    }
}
