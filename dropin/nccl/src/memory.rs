//! Memory of the library's, and memory that is registered.

use std::collections::BTreeMap;
use std::sync::Mutex;

use beeline::core::addr::DevicePtr;
use beeline::gpu::{Buffer, Gpu};

use crate::abi::{Address, Out, export};
use crate::comm::{Handle, lock};
use crate::failure::Failure;

/// What `ncclMemAlloc` gave out, by address.
static ALLOCATED: Mutex<BTreeMap<u64, Buffer>> = Mutex::new(BTreeMap::new());

/// Registrations of a communicator at most.
const REGISTERED_MAX: usize = 1 << 20;

fn register(comm: Handle, buffer: Address, bytes: usize) -> Result<u64, Failure> {
    let comm = comm.get()?;
    if buffer.get() == 0 || bytes == 0 {
        return Err(Failure::argument(format!("{bytes} bytes at {:#x}", buffer.get())));
    }
    let rank = comm.ready()?;
    let mut registered = lock(&comm.registered);
    if registered.len() >= REGISTERED_MAX {
        return Err(Failure::usage(format!("{REGISTERED_MAX} registrations exist")));
    }
    // Numbers that are no addresses: they are handles of this interface only.
    let handle = registered.keys().max().map_or(1, |last| last + 1);
    registered.insert(handle, (buffer.get(), bytes as u64));
    drop(registered);
    rank.register(DevicePtr::new(buffer.get()), bytes as u64);
    Ok(handle)
}

fn deregister(comm: Handle, handle: u64) -> Result<(), Failure> {
    let comm = comm.get()?;
    let gone = lock(&comm.registered).remove(&handle);
    let (address, len) =
        gone.ok_or_else(|| Failure::argument(format!("there is no registration {handle}")))?;
    // A communicator that has failed knows no registrations any more.
    if let Ok(rank) = comm.ready() {
        rank.deregister(DevicePtr::new(address), len);
    }
    Ok(())
}

export! {
    fn ncclMemAlloc, pncclMemAlloc(place: Out<u64>, bytes: usize) {
        place.check()?;
        if bytes == 0 { return place.set(0); }
        // Of `cuMemAlloc`: it has a name for other processes, and all devices of this one reach it that reach each other.
        let buffer = Gpu::current_cuda()?.alloc(bytes as u64)?;
        let address = buffer.ptr().as_u64();
        lock(&ALLOCATED).insert(address, buffer);
        place.set(address)
    }

    fn ncclMemFree, pncclMemFree(address: Address) {
        if address.get() == 0 { return Ok(()); }
        let gone = lock(&ALLOCATED).remove(&address.get());
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
        comm: Handle, buffer: Address, bytes: usize, window: Out<u64>, flags: i32,
    ) {
        const SYMMETRIC: i32 = 1;
        window.check()?;
        let made = register(comm, buffer, bytes)?;
        if flags & SYMMETRIC != 0 {
            let rank = comm.get()?.ready()?;
            let together = rank.register_window(DevicePtr::new(buffer.get()), bytes as u64);
            if let Err(error) = together {
                deregister(comm, made)?;
                return Err(error.into());
            }
        }
        window.set(made)
    }

    fn ncclCommWindowDeregister, pncclCommWindowDeregister(comm: Handle, window: Address) {
        deregister(comm, window.get())
    }
}
