//! The kernel that moves a stream-ordered request's bytes between a device and a slot of pinned memory, in the
//! caller's own stream; and the words by which it and the host take turns (`kernels/beeline/stage.cuh` has the same
//! layout).

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex};

use beeline_core::addr::DevicePtr;

use super::device::{Driver, StreamGuard, lock};
use super::error::Error;
use super::gate::{ENDED, Gate, Gates};
use super::image::{Images, images};
use super::pointer::Owner;
use super::registration::HostRegistration;
use super::stream::ForeignStream;
use super::types::*;

/// Cells of a slot, and blocks of the kernel.
pub const CELLS: usize = 8;
/// Threads in each block.
const THREADS: u32 = 512;
/// Most contexts whose kernels are remembered.
const CONTEXTS_MAX: usize = 64;
const MISSING: &str = "the kernel of stream-ordered requests";

const IMAGES: Images = images!("stage");

/// Where a stream runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// Its context.
    pub context: Owner,
    /// The ordinal of its device.
    pub device: i32,
}

impl ForeignStream {
    /// Where the stream runs: for a default stream, where the calling thread's current context is.
    ///
    /// # Errors
    /// `Unsupported` where the driver does not tell; what it says.
    pub fn home(self, driver: &Arc<Driver>) -> Result<Home, Error> {
        let table = driver.table();
        let (Some(context_of), Some(device_of)) = (table.cuStreamGetCtx, table.cuCtxGetDevice)
        else {
            return Err(Error::Unsupported { what: "contexts of streams" });
        };
        let _guard = StreamGuard::enter(driver, self)?;
        let mut context = RawContext::NULL;
        // SAFETY: `context` is a place for one context; a stream that its owner keeps.
        let result = unsafe { context_of(self.raw(), &raw mut context) };
        driver.check("cuStreamGetCtx", result, || format!("{self:?}"))?;
        let mut device = -1;
        // SAFETY: `device` is a place for one number; the stream's context is current.
        let result = unsafe { device_of(&raw mut device) };
        driver.check("cuCtxGetDevice", result, || format!("{self:?}"))?;
        Ok(Home { context: Owner(context), device })
    }
}

/// The kernel in each context that has asked for it. What was loaded stays as long as its context.
#[derive(Default)]
pub struct StageKernels {
    known: Mutex<Vec<Known>>,
}

struct Known {
    context: RawContext,
    /// The number that no other context of the process has.
    id: Option<u64>,
    /// None where it could not be had.
    kernel: Option<StageKernel>,
}

/// The kernel in one context.
#[derive(Clone, Copy)]
pub struct StageKernel {
    function: RawFunction,
    context: RawContext,
}

impl StageKernels {
    /// The kernel for `stream`, which runs at `home`; loaded when first asked for.
    ///
    /// # Errors
    /// What the driver says, the first time, or each time where it may pass; else `Unsupported` from then on.
    pub fn of(
        &self,
        driver: &Arc<Driver>,
        stream: ForeignStream,
        home: Home,
    ) -> Result<StageKernel, Error> {
        let (context, id) = (home.context.0, driver.context_id(home.context.0));
        let mut known = lock(&self.known);
        if let Some(found) = known.iter().find(|one| one.context == context && one.id == id) {
            return found.kernel.ok_or(Error::Unsupported { what: MISSING });
        }
        // Without the driver's number, another context at the same address cannot be told from this one.
        let loaded = match id {
            Some(_) => load(driver, stream, home),
            None => Err(Error::Unsupported { what: MISSING }),
        };
        if loaded.as_ref().is_err_and(may_pass) {
            return loaded;
        }
        known.retain(|one| one.context != context);
        if known.len() >= CONTEXTS_MAX {
            known.remove(0);
        }
        let kernel = loaded.as_ref().ok().copied();
        known.push(Known { context, id, kernel });
        loaded
    }
}

/// Whether the failure may be another one the next time, as where the device has no memory left.
fn may_pass(error: &Error) -> bool {
    /// `NO_BINARY_FOR_GPU`, `UNSUPPORTED_PTX_VERSION`, `JIT_COMPILER_NOT_FOUND`, `JIT_COMPILATION_DISABLED`.
    const LASTING: [CuResult; 7] = [
        CuResult(209),
        CuResult(222),
        CuResult(221),
        CuResult(223),
        CuResult::INVALID_PTX,
        CuResult::NOT_FOUND,
        CuResult::NOT_SUPPORTED,
    ];
    error.result().is_some_and(|result| !LASTING.contains(&result))
}

fn load(driver: &Arc<Driver>, stream: ForeignStream, home: Home) -> Result<StageKernel, Error> {
    let _guard = StreamGuard::enter(driver, stream)?;
    let major = driver.device(home.device)?.attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR);
    let module = match IMAGES.load(driver.table(), major) {
        Ok((module, _)) => module,
        Err(result) => {
            driver.check("cuModuleLoadDataEx", result, || "stage".to_owned())?;
            return Err(Error::Unsupported { what: MISSING });
        }
    };
    let mut function = RawFunction::NULL;
    let find = driver.table().cuModuleGetFunction;
    // SAFETY: `function` is a place for one handle; the module is loaded, the name a C string.
    let result = unsafe { find(&raw mut function, module, c"bl_stage".as_ptr()) };
    driver.check("cuModuleGetFunction", result, || "bl_stage".to_owned())?;
    if let Some(finish) = driver.table().cuFuncLoad {
        // Now, as it may wait for the device; not when a launch stands behind a closed gate.
        // SAFETY: a function of a module that stays loaded.
        let result = unsafe { finish(function) };
        driver.check("cuFuncLoad", result, || "bl_stage".to_owned())?;
    }
    Ok(StageKernel { function, context: home.context.0 })
}

/// Pinned memory that one request goes through: [`CELLS`] cells of a power of two bytes, at least 4096.
#[derive(Clone, Copy, Debug)]
pub struct Slot<'a> {
    /// The memory.
    pub memory: &'a Arc<HostRegistration>,
    /// Where in it the slot starts, a multiple of 4096.
    pub at: u64,
    /// Bytes of a cell.
    pub cell: u32,
}

/// The kernel of one request.
#[derive(Clone, Copy, Debug)]
pub struct Turns<'a> {
    /// In the stream's context.
    pub kernel: StageKernel,
    /// What the bytes go through. Its owner keeps it until the kernel has ended ([`Gates::has_ended`]).
    pub slot: Slot<'a>,
    /// From the device to the slot.
    pub out: bool,
    /// How long the kernel waits for each of its turns.
    pub timeout_ns: u64,
}

/// What the kernel gets.
#[repr(C)]
struct StageArgs {
    control: u64,
    slot: u64,
    timeout_ns: u64,
    cell: u32,
    pass: u32,
    out: u32,
    unused: u32,
}

impl Turns<'_> {
    /// Checks what can be checked; answers the arguments for the control block at `control`.
    fn args(&self, control: u64, pass: u32) -> Result<StageArgs, Error> {
        let Slot { memory, at, cell } = self.slot;
        if !cell.is_power_of_two() || cell < 4096 || !at.is_multiple_of(4096) {
            return Err(Error::Refused("a slot has aligned cells of a power of two bytes"));
        }
        if !memory.is_writable() {
            return Err(Error::Refused("the host memory is registered for reading only"));
        }
        let slot = memory.device_at(at, CELLS as u64 * u64::from(cell))?;
        let (timeout_ns, out) = (self.timeout_ns, u32::from(self.out));
        Ok(StageArgs { control, slot, timeout_ns, cell, pass, out, unused: 0 })
    }

    /// What is wrong with it for certain, before anything is queued.
    pub(super) fn check(&self, control: u64, pass: u32) -> Result<(), Error> {
        self.args(control, pass).map(drop)
    }

    /// Launches in `stream`, whose context is current.
    pub(super) fn launch(
        &self,
        driver: &Driver,
        stream: ForeignStream,
        control: u64,
        pass: u32,
    ) -> Result<(), Error> {
        let args = self.args(control, pass)?;
        let params: [*mut c_void; 1] = [std::ptr::from_ref(&args).cast_mut().cast()];
        let (launch, extra) = (driver.table().cuLaunchKernel, std::ptr::null());
        let (function, blocks) = (self.kernel.function, CELLS as u32);
        let params = params.as_ptr();
        // SAFETY: stage.cu gives this entry one struct, as above; it is copied during the call. The control block and
        // the slot, of which the range was checked, are kept until the kernel has ended.
        let result = unsafe {
            launch(function, blocks, 1, 1, THREADS, 1, 1, 0, stream.raw(), params, extra)
        };
        driver.check("cuLaunchKernel", result, || format!("bl_stage in {stream:?}"))
    }
}

/// What a kernel is to move.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// The first byte in the device.
    pub address: DevicePtr,
    /// Where that lies in the slot, less than the length of a cell.
    pub first: u64,
    /// Where the last byte ends, counted likewise.
    pub last: u64,
    /// Chunk by chunk, as there are more bytes than the slot holds: chunk 0 ends with the first cell.
    pub ring: bool,
    /// How many chunks there are.
    pub chunks: u64,
}

const FAILED: u64 = 16;
/// Each block of the kernel has a line of its own: the device looks at one place after the other, as often as blocks do.
const LINES: u64 = 128;
const LINE: u64 = 128;
pub(super) const CONTROL_BYTES: u64 = LINES + CELLS as u64 * LINE;
// In a line; what is not of a cell stands in all.
const ADDRESS: u64 = 0;
const FIRST: u64 = 8;
const LAST: u64 = 16;
const RING: u64 = 24;
const TURN: u64 = 32;
const LIMIT: u64 = 40;
const DONE: u64 = 64;

/// Where a word of a cell's line lies.
const fn of_cell(cell: u64, word: u64) -> u64 {
    LINES + cell % CELLS as u64 * LINE + word
}

/// The words between the host and the kernel of a request. Only the owner of the gate uses them.
impl Gates {
    /// Forgets the turns of the request before, whose kernel has ended.
    pub fn forget(&self, gate: Gate) {
        for cell in 0..CELLS as u64 {
            self.store_u64(gate, of_cell(cell, TURN), 0);
            self.store_u32(gate, of_cell(cell, DONE), 0);
        }
        self.describe(gate, &Load::default());
    }

    /// Says what is to be moved; before the gate is opened.
    pub fn describe(&self, gate: Gate, load: &Load) {
        let words = [
            (ADDRESS, load.address.as_u64()),
            (FIRST, load.first),
            (LAST, load.last),
            (RING, u64::from(load.ring)),
        ];
        for (word, value) in words {
            self.store_in_all(gate, word, value);
        }
        self.limit(gate, load.chunks);
    }

    /// Lowers the number of chunks: of those from there on, none is waited for.
    pub fn limit(&self, gate: Gate, chunks: u64) {
        self.store_in_all(gate, LIMIT, chunks);
    }

    fn store_in_all(&self, gate: Gate, word: u64, value: u64) {
        for cell in 0..CELLS as u64 {
            self.store_u64(gate, of_cell(cell, word), value);
        }
    }

    /// Tells the kernel that it is its turn with `chunk`, of `bytes`. What the host has written before is seen then.
    pub fn give_turn(&self, gate: Gate, chunk: u64, bytes: u32) {
        // Low halves: a chunk is told from those just before and behind it, and numbers may wrap.
        let word = u64::from(chunk.wrapping_add(1) as u32) | u64::from(bytes) << 32;
        self.store_u64(gate, of_cell(chunk, TURN), word);
    }

    /// Whether the kernel is done with `chunk`. What it has written is seen then.
    pub fn is_done(&self, gate: Gate, chunk: u64) -> bool {
        let word = self.load_u32(gate, of_cell(chunk, DONE));
        word == chunk.wrapping_add(1) as u32
    }

    /// Whether the kernel of pass `pass` has ended, and uses neither its slot nor these words any more.
    pub fn has_ended(&self, gate: Gate, pass: u32) -> bool {
        self.load_u32(gate, ENDED) == pass
    }

    /// Whether the kernel of pass `pass` has given up waiting for a turn.
    pub fn has_failed(&self, gate: Gate, pass: u32) -> bool {
        self.load_u32(gate, FAILED) == pass
    }
}

/// What the kernel does with these words; for whoever plays it.
impl Gates {
    /// The stream has come.
    pub fn play_come(&self, gate: Gate, pass: u32) {
        self.store_u32(gate, 0, pass);
    }

    /// It is done with `chunk`.
    pub fn play_done(&self, gate: Gate, chunk: u64) {
        self.store_u32(gate, of_cell(chunk, DONE), chunk.wrapping_add(1) as u32);
    }

    /// It has ended, and, where `failed`, given up.
    pub fn play_end(&self, gate: Gate, pass: u32, failed: bool) {
        if failed {
            self.store_u32(gate, FAILED, pass);
        }
        self.store_u32(gate, ENDED, pass);
    }

    /// Chunk and bytes of the turn at a cell; none where there was no turn yet.
    pub fn turn_at(&self, gate: Gate, cell: u64) -> Option<(u32, u32)> {
        let word = self.load_u64(gate, of_cell(cell, TURN));
        Some(((word as u32).checked_sub(1)?, (word >> 32) as u32))
    }

    /// What the kernel is to move.
    pub fn load_of(&self, gate: Gate) -> Load {
        let word = |word| self.load_u64(gate, of_cell(0, word));
        Load {
            address: DevicePtr::new(word(ADDRESS)),
            first: word(FIRST),
            last: word(LAST),
            ring: word(RING) != 0,
            chunks: word(LIMIT),
        }
    }

    /// Whether the gate and its end are open for pass `pass`.
    pub fn are_open(&self, gate: Gate, pass: u32) -> (bool, bool) {
        (self.load_u32(gate, 4) == pass, self.load_u32(gate, 8) == pass)
    }
}

impl fmt::Debug for StageKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StageKernels({} contexts)", lock(&self.known).len())
    }
}

impl fmt::Debug for StageKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StageKernel({:?})", self.context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_stage_cuh() {
        assert_eq!((size_of::<StageArgs>(), align_of::<StageArgs>()), (40, 8));
        let text = include_str!("../../../../kernels/beeline/stage.cuh");
        let numbers = [
            ("ADDRESS", ADDRESS),
            ("FIRST", FIRST),
            ("LAST", LAST),
            ("RING", RING),
            ("TURN", TURN),
            ("LIMIT", LIMIT),
            ("DONE", DONE),
            ("FAILED", FAILED),
            ("LINES", LINES),
            ("LINE", LINE),
        ];
        for (name, value) in numbers {
            assert!(text.contains(&format!("u64 STAGE_{name} = {value};")), "{name} = {value}");
        }
        assert!(text.contains(&format!("u32 STAGE_CELLS = {CELLS};")));
        assert!(IMAGES.ptx.contains(".entry bl_stage(") && IMAGES.ptx.ends_with('\0'));
    }
}
