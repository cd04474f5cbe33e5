//! `cuGetProcAddress`: functions by name and version.

use std::ffi::c_void;

use crate::capture::*;
use crate::device::*;
use crate::ffi::{Cu, Out, Text, export};
use crate::graph::*;
use crate::memory::*;
use crate::module::*;
use crate::peers::*;
use crate::settings::{Proc, Settings};
use crate::stream::*;

macro_rules! functions {
    ($($base:literal $version:literal $function:ident;)*) => {
        /// Name, CUDA version of the signature, address.
        fn find(wanted: &str) -> Vec<(i32, *mut c_void)> {
            let mut found = Vec::new();
            $(if wanted == $base {
                found.push(($version, $function as *const () as *mut c_void));
            })*
            found
        }
    };
}

functions! {
    "cuInit" 2000 cuInit;
    "cuDriverGetVersion" 2020 cuDriverGetVersion;
    "cuGetErrorName" 6000 cuGetErrorName;
    "cuGetErrorString" 6000 cuGetErrorString;
    "cuDeviceGet" 2000 cuDeviceGet;
    "cuDeviceGetCount" 2000 cuDeviceGetCount;
    "cuDeviceGetName" 2000 cuDeviceGetName;
    "cuDeviceGetUuid" 9020 cuDeviceGetUuid;
    "cuDeviceGetUuid" 11040 cuDeviceGetUuid_v2;
    "cuDeviceTotalMem" 3020 cuDeviceTotalMem_v2;
    "cuDeviceGetAttribute" 2000 cuDeviceGetAttribute;
    "cuDeviceGetPCIBusId" 4010 cuDeviceGetPCIBusId;
    "cuDeviceCanAccessPeer" 4000 cuDeviceCanAccessPeer;
    "cuDevicePrimaryCtxRetain" 7000 cuDevicePrimaryCtxRetain;
    "cuDevicePrimaryCtxRelease" 11000 cuDevicePrimaryCtxRelease_v2;
    "cuCtxPushCurrent" 4000 cuCtxPushCurrent_v2;
    "cuCtxPopCurrent" 4000 cuCtxPopCurrent_v2;
    "cuCtxGetCurrent" 4000 cuCtxGetCurrent;
    "cuCtxGetDevice" 2000 cuCtxGetDevice;
    "cuCtxGetId" 12000 cuCtxGetId;
    "cuCtxSynchronize" 2000 cuCtxSynchronize;
    "cuThreadExchangeStreamCaptureMode" 10010 cuThreadExchangeStreamCaptureMode;
    "cuMemGetInfo" 3020 cuMemGetInfo_v2;
    "cuMemAlloc" 3020 cuMemAlloc_v2;
    "cuMemAllocManaged" 6000 cuMemAllocManaged;
    "cuMemFree" 3020 cuMemFree_v2;
    "cuMemHostRegister" 6050 cuMemHostRegister_v2;
    "cuMemHostUnregister" 4000 cuMemHostUnregister;
    "cuMemHostGetDevicePointer" 3020 cuMemHostGetDevicePointer_v2;
    "cuPointerGetAttributes" 7000 cuPointerGetAttributes;
    "cuMemGetAllocationGranularity" 10020 cuMemGetAllocationGranularity;
    "cuMemCreate" 10020 cuMemCreate;
    "cuMemRelease" 10020 cuMemRelease;
    "cuMemAddressReserve" 10020 cuMemAddressReserve;
    "cuMemAddressFree" 10020 cuMemAddressFree;
    "cuMemMap" 10020 cuMemMap;
    "cuMemUnmap" 10020 cuMemUnmap;
    "cuMemSetAccess" 10020 cuMemSetAccess;
    "cuMemAllocAsync" 11020 cuMemAllocAsync;
    "cuMemFreeAsync" 11020 cuMemFreeAsync;
    "cuMemGetHandleForAddressRange" 11070 cuMemGetHandleForAddressRange;
    "cuMemcpyHtoDAsync" 3020 cuMemcpyHtoDAsync_v2;
    "cuMemcpyDtoHAsync" 3020 cuMemcpyDtoHAsync_v2;
    "cuMemcpyDtoDAsync" 3020 cuMemcpyDtoDAsync_v2;
    "cuMemcpyPeerAsync" 4000 cuMemcpyPeerAsync;
    "cuMemsetD8Async" 3020 cuMemsetD8Async;
    "cuStreamCreate" 2000 cuStreamCreate;
    "cuStreamCreateWithPriority" 5050 cuStreamCreateWithPriority;
    "cuStreamGetPriority" 5050 cuStreamGetPriority;
    "cuStreamGetFlags" 5050 cuStreamGetFlags;
    "cuStreamQuery" 2000 cuStreamQuery;
    "cuStreamSynchronize" 2000 cuStreamSynchronize;
    "cuDevicePrimaryCtxGetState" 7000 cuDevicePrimaryCtxGetState;
    "cuCtxSetCurrent" 4000 cuCtxSetCurrent;
    "cuMemcpyHtoD" 3020 cuMemcpyHtoD_v2;
    "cuMemcpyDtoH" 3020 cuMemcpyDtoH_v2;
    "cuMemsetD8" 3020 cuMemsetD8_v2;
    "cuStreamDestroy" 4000 cuStreamDestroy_v2;
    "cuStreamGetId" 12000 cuStreamGetId;
    "cuStreamGetCtx" 9020 cuStreamGetCtx;
    "cuStreamWaitEvent" 3020 cuStreamWaitEvent;
    "cuStreamIsCapturing" 10000 cuStreamIsCapturing;
    "cuStreamGetCaptureInfo" 11030 cuStreamGetCaptureInfo_v2;
    "cuStreamBeginCapture" 10010 cuStreamBeginCapture_v2;
    "cuStreamEndCapture" 10000 cuStreamEndCapture;
    "cuGraphInstantiate" 11040 cuGraphInstantiateWithFlags;
    "cuGraphInstantiateWithFlags" 11040 cuGraphInstantiateWithFlags;
    "cuGraphLaunch" 10000 cuGraphLaunch;
    "cuGraphGetNodes" 10000 cuGraphGetNodes;
    "cuGraphDestroy" 10000 cuGraphDestroy;
    "cuGraphExecDestroy" 10000 cuGraphExecDestroy;
    "cuStreamWriteValue32" 11070 cuStreamWriteValue32_v2;
    "cuStreamWriteValue64" 11070 cuStreamWriteValue64_v2;
    "cuStreamWaitValue64" 11070 cuStreamWaitValue64_v2;
    "cuStreamWaitValue32" 11070 cuStreamWaitValue32_v2;
    "cuEventCreate" 2000 cuEventCreate;
    "cuEventDestroy" 4000 cuEventDestroy_v2;
    "cuEventQuery" 2000 cuEventQuery;
    "cuEventRecord" 2000 cuEventRecord;
    "cuDeviceGetP2PAttribute" 8000 cuDeviceGetP2PAttribute;
    "cuCtxEnablePeerAccess" 4000 cuCtxEnablePeerAccess;
    "cuIpcGetMemHandle" 4010 cuIpcGetMemHandle;
    "cuIpcOpenMemHandle" 11000 cuIpcOpenMemHandle_v2;
    "cuIpcCloseMemHandle" 4010 cuIpcCloseMemHandle;
    "cuMemExportToShareableHandle" 10020 cuMemExportToShareableHandle;
    "cuMemImportFromShareableHandle" 10020 cuMemImportFromShareableHandle;
    "cuModuleLoadDataEx" 2010 cuModuleLoadDataEx;
    "cuModuleUnload" 2000 cuModuleUnload;
    "cuModuleGetFunction" 2000 cuModuleGetFunction;
    "cuFuncLoad" 12040 cuFuncLoad;
    "cuLaunchKernel" 4000 cuLaunchKernel;
    "cuGetProcAddress" 12000 cuGetProcAddress_v2;
}

export! {
    fn cuGetProcAddress(
        symbol: Text, function: Out<*mut c_void>, version: i32, _flags: u64,
    ) {
        let settings = Settings::from_env();
        if settings.proc == Proc::None { return Err(Cu::NOT_FOUND); }
        match look_up(&settings, &symbol.read()?, version)? {
            Ok(address) => function.set(address),
            Err(_) => Err(Cu::NOT_FOUND),
        }
    }

    fn cuGetProcAddress_v2(
        symbol: Text, function: Out<*mut c_void>, version: i32, _flags: u64, status: Out<i32>,
    ) {
        let settings = Settings::from_env();
        if settings.proc != Proc::V2 { return Err(Cu::NOT_FOUND); }
        match look_up(&settings, &symbol.read()?, version)? {
            Ok(address) => {
                status.set(0)?;
                function.set(address)
            }
            Err(reason) => {
                status.set(reason)?;
                function.set(std::ptr::null_mut())?;
                Err(Cu::NOT_FOUND)
            }
        }
    }
}

/// The latest function that `version` may call; else 1 (not found) or 2 (known in later versions).
fn look_up(settings: &Settings, name: &str, version: i32) -> Result<Result<*mut c_void, i32>, Cu> {
    if version > settings.version {
        return Err(Cu::INVALID_VALUE);
    }
    if settings.hide.iter().any(|hidden| hidden == name) {
        return Ok(Err(1));
    }
    if settings.later.iter().any(|later| later == name) {
        return Ok(Err(2));
    }
    let mut found = find(name);
    found.retain(|(since, _)| *since <= settings.version);
    if found.is_empty() {
        return Ok(Err(1));
    }
    let fits = found.into_iter().filter(|(since, _)| *since <= version);
    Ok(fits.max_by_key(|(since, _)| *since).map(|(_, address)| address).ok_or(2))
}
