//! Kernels and copy engines of CUDA devices. (This file is the seam only; the kernels are not in it yet.)

use std::time::Instant;

use beeline_core::addr::DevicePtr;
use beeline_core::reason::{Code, Reason};

use super::{Batch, Setup};
use crate::error::{Error, Kind, Result};
use crate::gpu::Stream;

/// One rank on a CUDA device.
#[derive(Debug)]
pub(crate) enum Cuda {}

impl Cuda {
    /// Joins the other ranks; all of them are inside this call.
    ///
    /// # Errors
    /// `is_no_route` where the devices cannot reach each other or kernels are not built; the communicator
    /// then goes through host memory, on every rank, since the answer is exchanged.
    pub(crate) fn join(setup: &mut Setup<'_>) -> Result<Self> {
        Err(Error::new(Kind::NoRoute, format!("{} has no collective kernels", setup.gpu.id()))
            .with_reasons(vec![Reason::new(Code::NotBuilt)]))
    }

    pub(super) fn enqueue(&mut self, _batch: &Batch, _stream: &Stream) -> Result<()> {
        match *self {}
    }

    pub(super) fn register(&mut self, _ptr: DevicePtr, _len: u64) -> Result<()> {
        match *self {}
    }

    pub(super) fn forget(&mut self, _ptr: DevicePtr) {
        match *self {}
    }

    pub(super) fn close(self, _deadline: Instant) {
        match self {}
    }
}
