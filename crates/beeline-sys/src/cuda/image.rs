//! Compiled modules in both forms: PTX for every device, machine code for compute capability 9.0.

use super::table::Table;
use super::types::*;

/// A module in both forms.
#[derive(Clone, Copy)]
pub(super) struct Images {
    /// For every device, compiled by the driver when it is loaded; ends with a zero byte.
    pub(super) ptx: &'static str,
    /// Machine code for compute capability 9.0, compressed; drivers of CUDA 13 and later take it.
    pub(super) sm_90: &'static [u8],
}

/// The driver reads words of what it is given.
#[repr(C, align(16))]
pub(super) struct Aligned<T: ?Sized>(pub(super) T);

/// The committed module of this name.
macro_rules! images {
    ($name:literal) => {{
        use $crate::cuda::image::{Aligned, Images};
        const SM_90: &Aligned<[u8]> =
            &Aligned(*include_bytes!(concat!("../../../../kernels/sm_90/", $name, ".fatbin")));
        let path = concat!(include_str!(concat!("../../../../kernels/ptx/", $name, ".ptx")), "\0");
        Images { ptx: path, sm_90: &SM_90.0 }
    }};
}
pub(super) use images;

impl Images {
    /// Brings the module to the context that is current: its machine code where the device's compute capability
    /// begins with `major` 9 and the driver takes it (a millisecond), else its PTX, which the driver compiles. Whether it is the
    /// machine code stands beside it.
    ///
    /// # Errors
    /// What the driver says of the PTX.
    pub(super) fn load(self, table: &Table, major: i32) -> Result<(RawModule, bool), CuResult> {
        let Self { ptx, sm_90 } = self;
        let (load, none) = (table.cuModuleLoadDataEx, std::ptr::null());
        let mut module = RawModule::NULL;
        let mut result = CuResult::INVALID_VALUE;
        if major == 9 {
            // SAFETY: a whole fat binary, which says how long it is; aligned for its words; no options.
            result = unsafe { load(&raw mut module, sm_90.as_ptr().cast(), 0, none, none.cast()) };
        }
        let native = result == CuResult::SUCCESS;
        if !native {
            // SAFETY: the text ends with a zero byte; no options.
            result = unsafe { load(&raw mut module, ptx.as_ptr().cast(), 0, none, none.cast()) };
        }
        if result == CuResult::SUCCESS { Ok((module, native)) } else { Err(result) }
    }
}
