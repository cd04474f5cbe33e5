//! Copies between memories of two devices by their addresses, and whose memory an address is.

use std::ffi::c_void;
use std::sync::Arc;

use beeline_core::addr::DevicePtr;

use super::core::Held;
use super::device::Context;
use super::error::Error;
use super::memory::{DeviceMem, size};
use super::stream::Stream;
use super::types::*;

impl Stream {
    /// Copies `len` bytes from an address of the device of `from.0` to one of the device of `to.0`; `held` is kept until
    /// the copy is done, and the caller keeps everything else.
    ///
    /// Safe because the driver takes addresses of devices only, and checks them: a wrong one fails, or hits other memory of
    /// devices, never memory of this program's.
    ///
    /// # Errors
    /// What the driver says.
    pub fn copy_between(
        &self,
        to: (&Arc<Context>, DevicePtr),
        from: (&Arc<Context>, DevicePtr),
        len: u64,
        held: &[Arc<DeviceMem>],
    ) -> Result<(), Error> {
        let bytes = size(len)?;
        let ((into, to), (outof, from)) = (to, from);
        let held = held.iter().map(|memory| Held::Device(Arc::clone(memory)));
        self.push(held, |context, stream| {
            let copy = context.table().cuMemcpyPeerAsync;
            let (into, outof) = (into.raw(), outof.raw());
            // SAFETY: two contexts that their values retain; both addresses are looked up among device memory.
            let result = unsafe { copy(to.as_u64(), into, from.as_u64(), outof, bytes, stream) };
            context
                .check("cuMemcpyPeerAsync", result, || format!("{len} bytes to {to} from {from}"))
        })
    }
}

impl Stream {
    /// Copies `len` bytes between addresses that the device of the stream reaches, its own or mapped ones. Also while a foreign
    /// stream is being captured. The caller keeps the memory; a wrong address does what it does in [`Self::copy_between`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn copy_at(&self, to: DevicePtr, from: DevicePtr, len: u64) -> Result<(), Error> {
        let bytes = size(len)?;
        let _current = self.context().make_current()?;
        let copy = self.context().table().cuMemcpyDtoDAsync;
        // SAFETY: both addresses are looked up among device memory; the stream is alive.
        let result = unsafe { copy(to.as_u64(), from.as_u64(), bytes, self.raw()) };
        let values = || format!("{len} bytes to {to} from {from}");
        self.context().check("cuMemcpyDtoDAsync", result, values)
    }
}

/// Whether `len` bytes at `ptr` are memory of the device of `owner` that the device of `user` can read and write:
/// `cuMemAlloc`'s of this very context, or mapped for the user. Not known is no. Peer access is the caller's affair.
pub fn is_open(owner: &Arc<Context>, user: &Arc<Context>, ptr: DevicePtr, len: u64) -> bool {
    const READ_WRITE: u32 = 3;
    const ASKED: [PointerAttribute; 8] = [
        PointerAttribute::CONTEXT,
        PointerAttribute::MEMORY_TYPE,
        PointerAttribute::IS_MANAGED,
        PointerAttribute::DEVICE_ORDINAL,
        PointerAttribute::IS_LEGACY_CUDA_IPC_CAPABLE,
        PointerAttribute::ACCESS_FLAGS,
        PointerAttribute::RANGE_START_ADDR,
        PointerAttribute::RANGE_SIZE,
    ];
    let (mut of, mut memory) = (RawContext::NULL, MemoryType::UNKNOWN);
    let (mut managed, mut plain, mut access) = (0_u32, 0_u32, 0_u32);
    let (mut device, mut start, mut bytes) = (-1_i32, 0_u64, 0_usize);
    let places: [*mut c_void; 8] = [
        (&raw mut of).cast(),
        (&raw mut memory).cast(),
        (&raw mut managed).cast(),
        (&raw mut device).cast(),
        (&raw mut plain).cast(),
        (&raw mut access).cast(),
        (&raw mut start).cast(),
        (&raw mut bytes).cast(),
    ];
    let Ok(_current) = user.enter() else { return false };
    let get = user.table().cuPointerGetAttributes;
    // SAFETY: eight attributes and eight places, each of the type (or larger than the type) that cuda.h gives its
    // attribute; the pointer asked about is a number that is not followed.
    let result = unsafe { get(8, ASKED.as_ptr(), places.as_ptr(), ptr.as_u64()) };
    let at = ptr.as_u64().checked_sub(start);
    let inside = at.is_some_and(|at| len <= (bytes as u64).saturating_sub(at));
    let open = match plain != 0 {
        true => of == owner.raw(),
        false => access & READ_WRITE == READ_WRITE,
    };
    let of_device = memory == MemoryType::DEVICE && managed == 0 && device == owner.device().raw();
    result == CuResult::SUCCESS && of_device && open && inside
}
