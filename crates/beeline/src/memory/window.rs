//! A window into device memory: the CPU's own loads and stores, for a few bytes at a time.
//!
//! The memory is exported as a dma-buf and mapped, where the driver allows that (the CUDA driver 580 answers
//! 524 to the mapping). What is mapped is believed only after bytes written on one side were read on the other,
//! in both directions, once for each device.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use beeline_sys::mem::HostMem;

use super::dmabuf::DmaBuf;
use crate::error::{Error, Result};
use crate::gpu::{Buffer, DeviceId, Gpu};
use crate::lock;

/// Longest access through a mapping: reads of a bus take a microsecond for every few bytes, and the copy engine
/// some microseconds for any number.
pub(super) const MAPPED_BYTES_MAX: u64 = 256;

/// How long the copy engine may take for the proof.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of the proof: what any driver exports.
const PROOF_BYTES: u64 = 64 << 10;

/// Devices that were asked, with why they have no window.
static ASKED: Mutex<Vec<(DeviceId, Option<String>)>> = Mutex::new(Vec::new());

/// Mapped device memory.
#[derive(Debug)]
pub(super) struct Window {
    mem: HostMem,
}

impl Window {
    /// A window onto all of `buffer`, on a device whose windows were found to show its memory.
    ///
    /// # Errors
    /// `is_refused`, with the reason: what [`DmaBuf::export`] says; code `window-unmapped` where the mapping is
    /// refused, `window-wrong-bytes` where it shows something else.
    pub(super) fn of(buffer: &Buffer) -> Result<Self> {
        let gpu = buffer.gpu();
        if let Some(why) = refusal(&gpu) {
            return Err(Error::refused(format!("{} has no window: {why}", gpu.id()))
                .coded("device-no-bar-window"));
        }
        Self::map(buffer)
    }

    pub(super) fn map(buffer: &Buffer) -> Result<Self> {
        let exported = DmaBuf::export(buffer)?;
        let apart = || Error::refused("the bytes lie apart").coded("window-unmapped");
        let start = exported.start().ok_or_else(apart)?;
        let len = usize::try_from(buffer.len()).map_err(|_| apart())?;
        let mem = beeline_sys::dmabuf::map(exported.fd(), start, len).map_err(|error| {
            let text = format!("the driver maps no dma-buf of its memory for the CPU ({error})");
            Error::refused(text).because(error).coded("window-unmapped")
        })?;
        Ok(Self { mem })
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        Ok(self.mem.read(offset, into)?)
    }

    /// Writes, and waits until the device has the bytes: a read follows what was written to a bus.
    pub(super) fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.mem.write(offset, from)?;
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let mut last = [0];
        let end = offset.saturating_add(from.len() as u64).saturating_sub(1);
        if !from.is_empty() {
            self.mem.read(end, &mut last)?;
        }
        std::hint::black_box(last);
        Ok(())
    }
}

/// Why a device has no window; asked once.
fn refusal(gpu: &Gpu) -> Option<String> {
    let id = gpu.id();
    let mut asked = lock(&ASKED);
    if let Some((_, why)) = asked.iter().find(|(known, _)| *known == id) {
        return why.clone();
    }
    let why = prove(gpu).err().map(|error| error.to_string());
    if let Some(why) = &why {
        tracing::debug!(gpu = %id, why, "no window into device memory");
    }
    asked.push((id, why.clone()));
    why
}

/// Why the CPU has no window into the memory of `gpu`; `None` where it has one.
pub fn window_refusal(gpu: &Gpu) -> Option<String> {
    refusal(gpu)
}

/// That bytes of a window are those of the device's memory, both ways.
fn prove(gpu: &Gpu) -> Result<()> {
    let buffer = gpu.alloc(PROOF_BYTES)?;
    let window = Window::map(&buffer)?;
    let (pinned, stream) = (gpu.pin(PROOF_BYTES)?, gpu.stream()?);
    let bytes = |seed: u8| -> Vec<u8> {
        (0..MAPPED_BYTES_MAX).map(|n| (n as u8).wrapping_mul(167) ^ seed).collect()
    };
    let wrong = |way: &str| {
        let text = format!("a mapping of its memory shows other bytes ({way})");
        Error::refused(text).coded("window-wrong-bytes")
    };
    for (seed, at) in [(1, 0), (2, 4096), (3, PROOF_BYTES - MAPPED_BYTES_MAX)] {
        let mut seen = vec![0; MAPPED_BYTES_MAX as usize];
        window.write(at, &bytes(seed))?;
        stream.copy_to_host(&pinned, at, &buffer, at, MAPPED_BYTES_MAX)?;
        stream.synchronize(Instant::now() + PATIENCE)?;
        pinned.mem().read(at, &mut seen)?;
        if seen != bytes(seed) {
            return Err(wrong("what the CPU wrote"));
        }
        pinned.mem().write(at, &bytes(seed + 100))?;
        stream.copy_to_device(&buffer, at, &pinned, at, MAPPED_BYTES_MAX)?;
        stream.synchronize(Instant::now() + PATIENCE)?;
        window.read(at, &mut seen)?;
        if seen != bytes(seed + 100) {
            return Err(wrong("what the device wrote"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SimConfig;
    use crate::gpu::Profile;

    fn gpu(profile: Profile) -> Gpu {
        let mut config = SimConfig::default();
        (config.profile, config.memory_bytes) = (profile, 16 << 20);
        Gpu::simulated(&config).unwrap()
    }

    #[test]
    fn a_window_is_believed_after_bytes_went_through_it_both_ways() {
        prove(&gpu(Profile::Bar)).unwrap();
        let error = prove(&gpu(Profile::Plain)).unwrap_err();
        assert!(error.is_no_route(), "{error}");
    }

    #[test]
    fn a_window_shows_the_bytes_of_its_buffer_alone() {
        let gpu = gpu(Profile::Bar);
        let buffers = [gpu.alloc(8192).unwrap(), gpu.alloc(8192).unwrap()];
        let windows = buffers.each_ref().map(|buffer| Window::map(buffer).unwrap());
        for (n, window) in windows.iter().enumerate() {
            window.write(100, &[n as u8 + 7; 5]).unwrap();
        }
        for (n, buffer) in buffers.iter().enumerate() {
            let mut bytes = [0; 7];
            buffer.window().unwrap().read(99, &mut bytes).unwrap();
            let n = n as u8 + 7;
            assert_eq!(bytes, [0, n, n, n, n, n, 0]);
        }
        assert!(windows[0].write(8190, &[0; 3]).unwrap_err().is_refused());
        assert!(windows[0].read(8192, &mut [0]).unwrap_err().is_refused());
    }
}
