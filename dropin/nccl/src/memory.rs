//! Memory of the library's, and memory that is registered.

use std::collections::HashMap;
use std::sync::Mutex;

use beeline::core::addr::DevicePtr;
use beeline::gpu::{Buffer, Gpu};

use crate::abi::{Address, Out, export};
use crate::comm::{Handle, lock};
use crate::failure::Failure;

/// What `ncclMemAlloc` gave out, by address.
static ALLOCATED: Mutex<Option<HashMap<u64, Buffer>>> = Mutex::new(None);

/// Devices of this process that communicators were made for: all may write what `ncclMemAlloc` gave out, so that copies
/// between them need no stop on the way.
static DEVICES: Mutex<Vec<Gpu>> = Mutex::new(Vec::new());

/// Notes a device that a communicator is made for.
pub(crate) fn used(gpu: &Gpu) {
    {
        let mut devices = lock(&DEVICES);
        if devices.iter().any(|known| known.same_device(gpu)) {
            return;
        }
        devices.push(gpu.clone());
    }
    let all: Vec<Buffer> = lock(&ALLOCATED).iter().flat_map(HashMap::values).cloned().collect();
    all.iter().for_each(|buffer| open(buffer, gpu));
}

/// Where it cannot be opened, data goes through the communicator's own memory.
fn open(buffer: &Buffer, gpu: &Gpu) {
    if !buffer.gpu().same_device(gpu)
        && let Err(error) = buffer.open_to(gpu)
    {
        tracing::debug!(%error, "copies to another device go through windows");
    }
}

/// Registrations of a communicator at most.
const REGISTERED_MAX: usize = 1 << 20;

fn register(comm: Handle, buffer: Address, bytes: usize) -> Result<u64, Failure> {
    let comm = comm.get()?;
    if buffer.get() == 0 || bytes == 0 {
        return Err(Failure::argument(format!("{bytes} bytes at {:#x}", buffer.get())));
    }
    comm.ready()?.register(DevicePtr::new(buffer.get()), bytes as u64)?;
    let mut registered = lock(&comm.registered);
    if registered.len() >= REGISTERED_MAX {
        return Err(Failure::usage(format!("{REGISTERED_MAX} registrations exist")));
    }
    // Numbers that are no addresses: they are handles of this interface only.
    let handle = registered.keys().max().map_or(1, |last| last + 1);
    registered.insert(handle, buffer.get());
    Ok(handle)
}

fn deregister(comm: Handle, handle: u64) -> Result<(), Failure> {
    let comm = comm.get()?;
    let gone = lock(&comm.registered).remove(&handle);
    let address =
        gone.ok_or_else(|| Failure::argument(format!("there is no registration {handle}")))?;
    // A communicator that has failed knows no registrations any more.
    if let Ok(rank) = comm.ready() {
        rank.deregister(DevicePtr::new(address));
    }
    Ok(())
}

export! {
    fn ncclMemAlloc, pncclMemAlloc(place: Out<u64>, bytes: usize) {
        place.check()?;
        if bytes == 0 { return place.set(0); }
        let buffer = Gpu::current_cuda()?.alloc_shareable(bytes as u64)?;
        let address = buffer.ptr().as_u64();
        lock(&ALLOCATED).get_or_insert_default().insert(address, buffer.clone());
        // Behind that: devices that come from here on open it themselves.
        let devices = lock(&DEVICES).clone();
        devices.iter().for_each(|gpu| open(&buffer, gpu));
        place.set(address)
    }

    fn ncclMemFree, pncclMemFree(address: Address) {
        if address.get() == 0 { return Ok(()); }
        let gone = lock(&ALLOCATED).as_mut().and_then(|all| all.remove(&address.get()));
        gone.map(drop).ok_or_else(|| Failure::argument(format!("{:#x} is not from ncclMemAlloc", address.get())))
    }

    fn ncclCommRegister, pncclCommRegister(comm: Handle, buffer: Address, bytes: usize, handle: Out<u64>) {
        handle.check()?;
        handle.set(register(comm, buffer, bytes)?)
    }

    fn ncclCommDeregister, pncclCommDeregister(comm: Handle, handle: Address) {
        deregister(comm, handle.get())
    }

    fn ncclCommWindowRegister, pncclCommWindowRegister(
        comm: Handle, buffer: Address, bytes: usize, window: Out<u64>, _flags: i32,
    ) {
        window.check()?;
        window.set(register(comm, buffer, bytes)?)
    }

    fn ncclCommWindowDeregister, pncclCommWindowDeregister(comm: Handle, window: Address) {
        deregister(comm, window.get())
    }
}
