//! Kernels that show what a path between two devices can carry.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::core::Held;
use super::device::Context;
use super::error::Error;
use super::memory::DeviceMem;
use super::module::Module;
use super::stream::Stream;

/// Threads in each block of a copy.
const THREADS: u32 = 512;

/// The kernels, compiled for one context.
pub struct PeerKernels {
    module: Arc<Module>,
}

impl PeerKernels {
    /// Compiles them for the device of `context`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn load(context: &Arc<Context>) -> Result<Self, Error> {
        Ok(Self { module: Arc::new(Module::load(context, super::module::PEER)?) })
    }

    /// Copies `len` bytes with `blocks` blocks of threads of the stream's device.
    ///
    /// # Errors
    /// `Bounds`; `Misaligned` where places or length are no multiples of 16; what the driver says.
    pub fn copy(
        &self,
        stream: &Stream,
        (dst, dst_at): (&Arc<DeviceMem>, u64),
        (src, src_at): (&Arc<DeviceMem>, u64),
        len: u64,
        blocks: u32,
    ) -> Result<(), Error> {
        let (to, from) = (aligned(dst, dst_at, len)?, aligned(src, src_at, len)?);
        self.launch(stream, "bl_copy", (blocks, THREADS), &[to, from, len], &[dst, src])
    }

    /// Adds `len` bytes of 32-bit floats of a peer to the own ones.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub fn read_add(
        &self,
        stream: &Stream,
        (own, own_at): (&Arc<DeviceMem>, u64),
        (peer, peer_at): (&Arc<DeviceMem>, u64),
        len: u64,
        blocks: u32,
    ) -> Result<(), Error> {
        let (to, from) = (aligned(own, own_at, len)?, aligned(peer, peer_at, len)?);
        self.launch(stream, "bl_read_add", (blocks, THREADS), &[to, from, len], &[own, peer])
    }

    /// One side of a flag that goes back and forth `rounds` times between the first words of two memories; the
    /// word after the own flag becomes `rounds` when all are done. Ends after `timeout_ns`.
    ///
    /// # Errors
    /// `Bounds`; what the driver says.
    pub fn ping(
        &self,
        stream: &Stream,
        own: &Arc<DeviceMem>,
        peer: &Arc<DeviceMem>,
        first: bool,
        rounds: u32,
        timeout_ns: u64,
    ) -> Result<(), Error> {
        let (a, b) = (aligned(own, 0, 16)?, aligned(peer, 0, 16)?);
        let args = [a, b, u64::from(first), u64::from(rounds), timeout_ns];
        self.launch(stream, "bl_ping", (1, 1), &args, &[own, peer])
    }

    fn launch(
        &self,
        stream: &Stream,
        name: &'static str,
        (blocks, threads): (u32, u32),
        args: &[u64],
        memories: &[&Arc<DeviceMem>],
    ) -> Result<(), Error> {
        let Some((_, function)) = self.module.find(name) else {
            return Err(Error::Refused("the module has no kernel of this name"));
        };
        if self.module.context().raw() != stream.context().raw() {
            return Err(Error::Refused("the module was compiled for another device"));
        }
        let held = memories.iter().map(|memory| Held::Device(Arc::clone(memory)));
        let held = held.chain([Held::Module(Arc::clone(&self.module))]);
        // A 32-bit parameter is read from the low half of its place (little endian).
        let places: Vec<*mut c_void> =
            args.iter().map(|word| std::ptr::from_ref(word).cast_mut().cast()).collect();
        stream.push(held, |context, stream| {
            let (launch, extra) = (context.table().cuLaunchKernel, std::ptr::null());
            let blocks = blocks.max(1);
            // SAFETY: peer.cu gives these entries exactly these parameters; they touch the ranges checked above,
            // whose memories are held.
            let result = unsafe {
                launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, places.as_ptr(), extra)
            };
            context.check("cuLaunchKernel", result, || name.to_owned())
        })
    }
}

impl fmt::Debug for PeerKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerKernels")
    }
}

/// The address of a range in whole 16 bytes.
fn aligned(memory: &DeviceMem, at: u64, len: u64) -> Result<u64, Error> {
    let address = memory.at(at, len)?;
    match [address, len].into_iter().find(|value| !value.is_multiple_of(16)) {
        None => Ok(address),
        Some(address) => Err(Error::Misaligned { address, align: 16 }),
    }
}
