//! Starting the driver, devices, contexts, and the texts of results.

use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering;

use crate::ffi::{Cu, Out, export, write_text};
use crate::settings::Settings;
use crate::state::{self, driver};

/// Contexts are numbered from here.
const CONTEXT_BASE: usize = 0xc0_0000;

export! {
    fn cuInit(flags: u32) {
        if flags != 0 { return Err(Cu::INVALID_VALUE); }
        state::start()
    }

    fn cuDriverGetVersion(version: Out<i32>) { version.set(Settings::from_env().version) }

    fn cuGetErrorName(error: i32, text: Out<*const c_char>) {
        text.set(described(error).ok_or(Cu::INVALID_VALUE)?.0.as_ptr())
    }

    fn cuGetErrorString(error: i32, text: Out<*const c_char>) {
        text.set(described(error).ok_or(Cu::INVALID_VALUE)?.1.as_ptr())
    }

    fn cuDeviceGetCount(count: Out<i32>) { count.set(driver()?.devices.len() as i32) }

    fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        driver()?.device(ordinal)?;
        device.set(ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, len: i32, device: i32) {
        driver()?.device(device)?;
        let text = if driver()?.settings.mig { "Test GPU MIG 1g.16gb" } else { "Test GPU" };
        write_text(name, usize::try_from(len).unwrap_or(0), text)
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) {
        let physical = driver()?.device(device)?.physical;
        uuid.set(uuid_bytes(if driver()?.settings.mig { 0 } else { physical }, false))
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) {
        let physical = driver()?.device(device)?.physical;
        uuid.set(uuid_bytes(physical, driver()?.settings.mig))
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) {
        bytes.set(driver()?.device(device)?.gpu.info().memory_bytes as usize)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) {
        driver()?.device(device)?;
        value.set(self::attribute(&driver()?.settings, attribute).ok_or(Cu::INVALID_VALUE)?)
    }

    fn cuDeviceGetPCIBusId(id: *mut c_char, len: i32, device: i32) {
        let physical = driver()?.device(device)?.physical;
        let bus = 0x3b + if driver()?.settings.mig { 0 } else { physical };
        write_text(id, usize::try_from(len).unwrap_or(0), &format!("0000:{bus:02X}:00.0"))
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) {
        driver()?.device(device)?;
        driver()?.device(peer)?;
        can.set(i32::from(device != peer && !driver()?.settings.mig))
    }

    fn cuDevicePrimaryCtxRetain(context: Out<*mut c_void>, device: i32) {
        driver()?.device(device)?.retained.fetch_add(1, Ordering::Relaxed);
        context.set(handle_of(device as usize))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        let retained = &driver()?.device(device)?.retained;
        let less = |count: i32| (count > 0).then_some(count - 1);
        retained.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).map(drop)
            .map_err(|_| Cu::INVALID_CONTEXT)
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let retained = driver()?.device(device)?.retained.load(Ordering::Relaxed);
        flags.set(0)?;
        active.set(i32::from(retained > 0))
    }

    fn cuCtxSetCurrent(context: *mut c_void) {
        state::pop();
        if context.is_null() { return Ok(()); }
        state::push(context_index(context)?);
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: *mut c_void) {
        state::push(context_index(context)?);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<*mut c_void>) {
        context.set(handle_of(state::pop().ok_or(Cu::INVALID_CONTEXT)?))
    }

    fn cuCtxGetCurrent(context: Out<*mut c_void>) {
        driver()?;
        context.set(state::top().map_or(std::ptr::null_mut(), handle_of))
    }

    fn cuCtxGetDevice(device: Out<i32>) {
        driver()?;
        device.set(i32::try_from(state::top().ok_or(Cu::INVALID_CONTEXT)?).unwrap_or(0))
    }

    fn cuCtxGetId(context: *mut c_void, id: Out<u64>) {
        // A device has one context, its primary one.
        id.set(context_index(context)? as u64 + 1)
    }
}

/// The handle of a device's primary context.
pub(crate) const fn handle_of(index: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(CONTEXT_BASE + index)
}

/// The device of a primary context that is retained.
pub(crate) fn context_index(context: *mut c_void) -> Result<usize, Cu> {
    let index = context.addr().checked_sub(CONTEXT_BASE).ok_or(Cu::INVALID_CONTEXT)?;
    let device = driver()?.devices.get(index).ok_or(Cu::INVALID_CONTEXT)?;
    if device.retained.load(Ordering::Relaxed) <= 0 {
        return Err(Cu::INVALID_CONTEXT);
    }
    Ok(index)
}

fn uuid_bytes(number: u32, mig: bool) -> [u8; 16] {
    let mut bytes = *b"\xbe\xe1\x14\xe0 test GPU \x00\x00";
    bytes[14] = u8::from(mig);
    bytes[15] = number as u8;
    bytes
}

/// The name that `CUDA_VISIBLE_DEVICES` knows a device by.
pub(crate) fn uuid_text(settings: &Settings, physical: u32) -> String {
    let uuid =
        beeline::gpu::DeviceUuid { mig: settings.mig, bytes: uuid_bytes(physical, settings.mig) };
    uuid.to_string()
}

fn attribute(settings: &Settings, attribute: i32) -> Option<i32> {
    let unless = |ability: &str| i32::from(!settings.lacks(ability));
    Some(match attribute {
        16 => 4,                   // multiprocessors
        40 => 2,                   // copy engines
        75 => 9,                   // compute capability, major
        76 => 0,                   // and minor
        91 | 99 => 1,              // host pointers of registered memory, registering itself
        102 => unless("vmm"),      // virtual memory management
        110 => unless("vmm"),      // and for RDMA
        113 => unless("readonly"), // registering read-only memory
        115 => unless("pools"),    // memory pools
        123 => unless("nor"),      // stream wait NOR
        122 => 1,                  // 64-bit stream operations
        124 => unless("dmabuf"),   // dma-buf
        18 | 116 => 0,             // integrated, RDMA
        _ => return None,
    })
}

fn described(error: i32) -> Option<(&'static std::ffi::CStr, &'static std::ffi::CStr)> {
    Some(match error {
        0 => (c"CUDA_SUCCESS", c"no error"),
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        3 => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        34 => (c"CUDA_ERROR_STUB_LIBRARY", c"CUDA driver is a stub library"),
        100 => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
        101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        201 => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        217 => (c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"peer access is not supported"),
        704 => (c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled"),
        218 => (c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
        400 => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        500 => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        700 => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        712 => (c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"already registered"),
        801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        803 => (c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"system has unsupported driver combination"),
        401 => {
            (c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state")
        }
        900 => (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"not permitted while capturing"),
        901 => (
            c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            c"the capture failed because of an earlier error",
        ),
        902 => (c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"two captures would merge"),
        903 => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"the capture was not begun in this stream")
        }
        904 => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"the capture has streams that were not joined")
        }
        905 => (c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"a dependency would cross the capture"),
        906 => (c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"the legacy stream depends on a capture"),
        907 => (c"CUDA_ERROR_CAPTURED_EVENT", c"the event was last recorded in a capture"),
        908 => {
            (c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"the capture was begun by another thread")
        }
        999 => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
        _ => return None,
    })
}
