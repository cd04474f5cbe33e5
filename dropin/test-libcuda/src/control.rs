//! Functions of the test library's own: what is behind the driver, and faults at chosen moments.

use std::sync::atomic::Ordering;

use beeline::gpu::sim::{Effect, Faults, Site};

use crate::ffi::{Cu, Text, boundary};
use crate::memory::allocate;
use crate::state::{self, Driver, Kind, driver, lock};

/// What is counted under `name`, or -1. Of the calling thread: `stack` (contexts pushed), `mode`
/// (capture mode), `calls` (of the driver API). Of the process: `contexts` (retained), `streams`, `events`, `memory`, `host`,
/// `physical`, `modules`, `copies`, `pageable`, `capture` (0 none, 1 going on, 2 one is spoilt), `captured`
/// (operations that became nodes), `refused` (calls, for the sake of a capture), `graphs` (and instances of them),
/// `emulated` (1: the kernels of collectives are there).
#[unsafe(no_mangle)]
extern "C" fn beeline_test_cuda_counter(name: Text) -> i64 {
    let mut answer = -1;
    boundary(|| {
        answer = count(driver()?, &name.read()?).ok_or(Cu::INVALID_VALUE)?;
        Ok(())
    });
    answer
}

fn count(driver: &Driver, name: &str) -> Option<i64> {
    let objects = driver.objects();
    let len = |len: usize| Some(len as i64);
    match name {
        "stack" => len(state::depth()),
        "mode" => Some(i64::from(state::mode().get())),
        "calls" => Some(crate::ffi::CALLS.get()),
        "contexts" => {
            let retained = driver.devices.iter().map(|it| it.retained.load(Ordering::Relaxed));
            Some(retained.map(i64::from).sum())
        }
        "emulated" => Some(i64::from(crate::emulated::is_there())),
        "streams" => len(objects.streams.len()),
        "events" => len(objects.events.len()),
        "memory" => len(objects.memory.len()),
        "host" => len(objects.host.len()),
        "physical" => len(objects.physical.values().filter(|physical| physical.rdma).count()),
        "modules" => len(objects.modules.len()),
        "copies" => Some(driver.copies.load(Ordering::Relaxed)),
        "pageable" => Some(driver.pageable.load(Ordering::Relaxed)),
        "captured" => Some(lock(&driver.captures).nodes),
        "refused" => Some(lock(&driver.captures).refused),
        "capture" => Some(lock(&driver.captures).worst()),
        "graphs" => len(objects.graphs.len() + objects.execs.len()),
        _ => None,
    }
}

/// Lets `after` operations at `site` (`alloc`, `pin`, `copy`, `kernel`) of device 0 pass and has the
/// next one `fail`, `stall`, `corrupt` or `lose` the device.
#[unsafe(no_mangle)]
extern "C" fn beeline_test_cuda_fault(site: Text, after: u64, effect: Text) -> i32 {
    boundary(|| {
        let site = match site.read()?.as_str() {
            "alloc" => Site::Alloc,
            "pin" => Site::Pin,
            "copy" => Site::Copy,
            "kernel" => Site::Kernel,
            _ => return Err(Cu::INVALID_VALUE),
        };
        let effect = match effect.read()?.as_str() {
            "fail" => Effect::Fail,
            "stall" => Effect::Stall,
            "corrupt" => Effect::Corrupt,
            "lose" => Effect::Lose,
            _ => return Err(Cu::INVALID_VALUE),
        };
        faults()?.arm(site, after, effect);
        Ok(())
    })
}

/// Lets stalled operations of device 0 go on.
#[unsafe(no_mangle)]
extern "C" fn beeline_test_cuda_release() -> i32 {
    boundary(|| {
        faults()?.release();
        Ok(())
    })
}

/// The address of `len` bytes that the driver knows as managed memory of device 0; 0 on failure.
#[unsafe(no_mangle)]
extern "C" fn beeline_test_cuda_managed(len: u64) -> u64 {
    let mut address = 0;
    boundary(|| {
        address = allocate(driver()?, 0, len, Kind::Managed)?;
        Ok(())
    });
    address
}

fn faults() -> Result<&'static Faults, Cu> {
    let device = driver()?.devices.first().ok_or(Cu::NO_DEVICE)?;
    Ok(device.gpu.as_sim().ok_or(Cu::UNKNOWN)?.faults())
}
