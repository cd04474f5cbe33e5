//! Kernels: modules from PTX text, and what may be passed to them.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;

use super::device::Context;
use super::error::Error;
use super::memory::DeviceMem;
use super::types::*;

/// Bytes of the compiler's error log that are kept.
const LOG_BYTES: usize = 4096;

/// One parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Param {
    /// Two parameters of the entry: a pointer to 32-bit words, and their number in 64 bits.
    Words,
    /// A 32-bit number.
    U32,
    /// A 64-bit number.
    U64,
}

/// The name and the parameters of one kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelSpec {
    /// The entry's name.
    pub name: &'static CStr,
    /// Its parameters in order.
    pub params: &'static [Param],
}

/// PTX text with a promise about what it does.
#[derive(Clone, Copy)]
pub struct Ptx {
    text: &'static CStr,
    kernels: &'static [KernelSpec],
}

impl Ptx {
    /// Vouches for `text`.
    ///
    /// # Safety
    /// Every kernel of `kernels` is an entry of `text` with exactly these parameters, and accesses no
    /// memory but the words passed to it, in any launch of one-dimensional blocks.
    pub const unsafe fn new(text: &'static CStr, kernels: &'static [KernelSpec]) -> Self {
        Self { text, kernels }
    }
}

impl fmt::Debug for Ptx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ptx").field("kernels", &self.kernels).finish_non_exhaustive()
    }
}

const BASIC_TEXT: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("basic.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    };

/// `fill_u32`, `iota_u32` and `add_u32`: the kernels that every device of Beeline has.
// SAFETY: basic.ptx declares these three entries with these parameters, and each checks its index
// against the number of words before it accesses one.
pub const BASIC: Ptx = unsafe {
    Ptx::new(
        BASIC_TEXT,
        &[
            KernelSpec { name: c"fill_u32", params: &[Param::Words, Param::U32] },
            KernelSpec { name: c"iota_u32", params: &[Param::Words, Param::U32] },
            KernelSpec { name: c"add_u32", params: &[Param::Words, Param::Words] },
        ],
    )
};

const ATOMIC_TEXT: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("atomic.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    };

/// `atomic_u64` and `add_many_u64`: atomic operations on one word towards everything that reaches it.
// SAFETY: atomic.ptx declares these two entries with these parameters, and each checks that the
// memories hold at least the two words that it accesses.
pub const ATOMIC: Ptx = unsafe {
    Ptx::new(
        ATOMIC_TEXT,
        &[
            KernelSpec {
                name: c"atomic_u64",
                params: &[Param::Words, Param::Words, Param::U32, Param::U64, Param::U64],
            },
            KernelSpec { name: c"add_many_u64", params: &[Param::Words, Param::U32] },
        ],
    )
};

const PEER_TEXT: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("../../../../kernels/ptx/peer.ptx"), "\0").as_bytes(),
) {
    Ok(text) => text,
    Err(_) => c"",
};

/// Kernels between devices; launched by [`super::PeerKernels`] only, which knows their parameters.
// SAFETY: peer.cu declares these entries. The module stays inside `PeerKernels`, which passes what they take, so
// that `Stream::launch` never sees it.
pub(super) const PEER: Ptx = unsafe {
    Ptx::new(
        PEER_TEXT,
        &[
            KernelSpec { name: c"bl_copy", params: &[] },
            KernelSpec { name: c"bl_read_add", params: &[] },
            KernelSpec { name: c"bl_ping", params: &[] },
        ],
    )
};

/// An argument of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// Words of device memory.
    Words {
        /// The memory.
        mem: &'a Arc<DeviceMem>,
        /// First byte, a multiple of 4 from an aligned start.
        offset: u64,
        /// Number of 32-bit words.
        count: u64,
    },
    /// A 32-bit number.
    U32(u32),
    /// A 64-bit number.
    U64(u64),
}

/// PTX text compiled for one context.
pub struct Module {
    context: Arc<Context>,
    raw: RawModule,
    functions: Vec<(&'static KernelSpec, RawFunction)>,
}

impl Module {
    /// Compiles `ptx` for the device of `context` and finds its kernels.
    ///
    /// # Errors
    /// What the driver says, with the compiler's log among the values.
    pub fn load(context: &Arc<Context>, ptx: Ptx) -> Result<Self, Error> {
        let mut log = vec![0_u8; LOG_BYTES];
        let options = [JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let values: [*mut c_void; 2] =
            [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES - 1)];
        let mut raw = RawModule::NULL;
        let load = context.table().cuModuleLoadDataEx;
        let text = ptx.text.as_ptr().cast();
        let _current = context.enter()?;
        // SAFETY: the text ends with a zero byte; two options with two values as cuda.h defines them:
        // a buffer that outlives the call, and one byte less than its size.
        let result = unsafe { load(&raw mut raw, text, 2, options.as_ptr(), values.as_ptr()) };
        context.check("cuModuleLoadDataEx", result, || log_text(&log))?;
        let mut module = Self { context: Arc::clone(context), raw, functions: Vec::new() };
        for spec in ptx.kernels {
            let mut function = RawFunction::NULL;
            let find = context.table().cuModuleGetFunction;
            // SAFETY: `function` is a place for one handle; the module is loaded, the name a C string.
            let result = unsafe { find(&raw mut function, raw, spec.name.as_ptr()) };
            let name = || spec.name.to_string_lossy().into_owned();
            context.check("cuModuleGetFunction", result, name)?;
            module.functions.push((spec, function));
        }
        Ok(module)
    }

    /// The kernel `name`, if the module has it.
    pub fn kernel(&self, name: &str) -> Option<&'static KernelSpec> {
        self.find(name).map(|(spec, _)| spec)
    }

    pub(super) fn find(&self, name: &str) -> Option<(&'static KernelSpec, RawFunction)> {
        let found = self.functions.iter().find(|(spec, _)| spec.name.to_bytes() == name.as_bytes());
        found.copied()
    }

    pub(super) const fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

fn log_text(log: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(log).unwrap_or_default().to_string_lossy();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: loaded by this value; launches in flight hold a handle, so none is left.
            let _ = unsafe { (self.context.table().cuModuleUnload)(self.raw) };
        }
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("kernels", &self.functions.len()).finish_non_exhaustive()
    }
}

/// The arguments of one launch as the driver takes them: each in its own place.
pub(super) struct Packed {
    words: Vec<u64>,
    /// Words in the longest memory passed, for the size of the grid.
    pub(super) count: u64,
}

impl Packed {
    /// Checks `args` against the kernel's parameters.
    pub(super) fn new(spec: &KernelSpec, args: &[Arg<'_>]) -> Result<Self, Error> {
        if spec.params.len() != args.len() {
            return Err(Error::Refused("the kernel takes another number of arguments"));
        }
        let mut packed = Self { words: Vec::with_capacity(2 * args.len()), count: 0 };
        for (param, arg) in spec.params.iter().zip(args) {
            match (param, *arg) {
                (Param::Words, Arg::Words { mem, offset, count }) => {
                    let len = count.checked_mul(4).ok_or(Error::Refused("too many words"))?;
                    let address = mem.at(offset, len)?;
                    if !address.is_multiple_of(4) {
                        return Err(Error::Misaligned { address, align: 4 });
                    }
                    packed.words.extend([address, count]);
                    packed.count = packed.count.max(count);
                }
                // A 32-bit parameter is read from the low half of its place (little endian).
                (Param::U32, Arg::U32(value)) => packed.words.push(u64::from(value)),
                (Param::U64, Arg::U64(value)) => packed.words.push(value),
                _ => return Err(Error::Refused("an argument is not of the kind the kernel takes")),
            }
        }
        Ok(packed)
    }

    /// Pointers to the arguments; valid while `self` stands still.
    pub(super) fn pointers(&self) -> Vec<*mut c_void> {
        self.words.iter().map(|word| std::ptr::from_ref(word).cast_mut().cast()).collect()
    }
}
