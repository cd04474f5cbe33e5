//! The committed kernels, run by the CPU in the place of a device: see `kernels/emulate`.

use std::ffi::c_void;

use beeline::gpu::Stream;

use crate::ffi::{Cu, In};

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// The name of a committed module by its text.
pub(crate) fn module(text: &str) -> Option<&'static str> {
    MODULES.iter().find(|(_, known)| *known == text).map(|(name, _)| *name)
}

/// An entry of a committed module.
#[derive(Clone, Copy)]
pub(crate) struct Entry(
    #[cfg(emulated)] &'static raw::Entry,
    #[cfg(not(emulated))] std::convert::Infallible,
);

/// Blocks of a launch at most.
const BLOCKS_MAX: u32 = 4096;

#[cfg(emulated)]
mod raw {
    use std::ffi::{c_char, c_void};

    /// `EmulatedEntry` of `kernels/emulate/entries.h`.
    #[repr(C)]
    pub(super) struct Entry {
        module: *const c_char,
        name: *const c_char,
        pub(super) count: u32,
        pub(super) sizes: *const u32,
        call: extern "C" fn(*const *mut c_void),
    }

    // SAFETY: constants of the library's own.
    unsafe impl Sync for Entry {}

    unsafe extern "C" {
        pub(super) fn beeline_emulated_find(
            module: *const c_char,
            name: *const c_char,
        ) -> *const Entry;
        pub(super) fn beeline_emulated_run(
            entry: *const Entry,
            params: *const *mut c_void,
            blocks: u32,
            threads: u32,
        );
    }
}

/// Whether kernels were built for the CPU.
pub(crate) const fn is_there() -> bool {
    cfg!(emulated)
}

#[cfg(not(emulated))]
impl Entry {
    pub(crate) fn find(_module: &str, _name: &str) -> Option<Self> {
        None
    }

    pub(crate) fn arguments(self, _params: &In<*mut c_void>) -> Result<Vec<Vec<u64>>, Cu> {
        match self.0 {}
    }

    pub(crate) fn launch(
        self,
        _arguments: Vec<Vec<u64>>,
        _shape: (u32, u32),
        _stream: &Stream,
    ) -> beeline::Result<()> {
        match self.0 {}
    }
}

#[cfg(emulated)]
impl Entry {
    pub(crate) fn find(module: &str, name: &str) -> Option<Self> {
        let module = std::ffi::CString::new(module).ok()?;
        let name = std::ffi::CString::new(name).ok()?;
        // SAFETY: two C strings.
        let found = unsafe { raw::beeline_emulated_find(module.as_ptr(), name.as_ptr()) };
        // SAFETY: null, or a constant of the library's own.
        unsafe { found.as_ref() }.map(Self)
    }

    /// The arguments of a launch, copied: the caller's may be gone when it runs.
    pub(crate) fn arguments(self, params: &In<*mut c_void>) -> Result<Vec<Vec<u64>>, Cu> {
        let sizes = In::new(self.0.sizes);
        (0..self.0.count as usize)
            .map(|index| {
                let len = sizes.at(index)? as usize;
                let from = In::new(params.at(index)?.cast_const().cast::<u8>());
                let mut words = vec![0_u64; len.div_ceil(8)];
                for (at, word) in words.iter_mut().enumerate() {
                    let mut bytes = [0; 8];
                    for (byte, place) in bytes.iter_mut().zip(at * 8..len) {
                        *byte = from.at(place)?;
                    }
                    *word = u64::from_ne_bytes(bytes);
                }
                Ok(words)
            })
            .collect()
    }

    /// Queues a launch of so many blocks and threads.
    pub(crate) fn launch(
        self,
        arguments: Vec<Vec<u64>>,
        (blocks, threads): (u32, u32),
        stream: &Stream,
    ) -> beeline::Result<()> {
        stream.launch_on_cpu(move || {
            let params: Vec<*mut c_void> =
                arguments.iter().map(|words| words.as_ptr().cast_mut().cast()).collect();
            let blocks = blocks.min(BLOCKS_MAX);
            // SAFETY: the entry's own parameters, each as long as it says, alive during the call. What they point to
            // is the program's promise, as with any device.
            unsafe { raw::beeline_emulated_run(self.0, params.as_ptr(), blocks, threads) };
            Ok(())
        })
    }
}
