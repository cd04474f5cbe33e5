//! CUDA devices, through the driver API.
//!
//! What the driver is told, and how memory in flight is held, is `beeline_sys::cuda`; here are the
//! names of devices, the meaning of errors and the shape that [`super::Gpu`] has.

mod device;
mod error;
mod share;
mod stream;

pub use device::CudaInfo;

pub(crate) use device::{Device, device_count, driver};
pub(crate) use stream::{Event, Stream};

use std::sync::Arc;

use beeline_core::addr::DevicePtr;
use beeline_sys::cuda::DeviceMem;

use crate::error::Result;
use crate::p2p::share::Name;

/// Memory of a CUDA device. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Memory {
    device: Device,
    mem: Arc<DeviceMem>,
}

impl Memory {
    fn new(device: &Device, mem: DeviceMem) -> Self {
        Self { device: device.clone(), mem: Arc::new(mem) }
    }

    pub(super) const fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn ptr(&self) -> DevicePtr {
        self.mem.ptr()
    }

    /// How another process finds the memory.
    pub(super) fn name(&self) -> Result<Name> {
        let failed = |error| self.device.failed("share device memory", error);
        if self.mem.is_virtual() {
            let bytes = self.mem.whole_len();
            return Ok(Name::Handle(self.mem.export().map_err(failed)?, bytes));
        }
        Ok(Name::Ipc(self.mem.ipc_handle().map_err(failed)?))
    }

    pub(crate) const fn mem(&self) -> &Arc<DeviceMem> {
        &self.mem
    }
}
