//! Verification: the bytes on the device against the bytes of the file, tensor by tensor.

use std::time::{Duration, Instant};

use beeline_core::model::Placement;

use super::Loaded;
use crate::config::SLOT_BYTES;
use crate::error::Result;
use crate::gpu::{Buffer, PinnedMem, Stream};
use crate::storage::CancelToken;

/// A tensor whose bytes differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Its name.
    pub tensor: Box<str>,
    /// On which of the devices.
    pub device: usize,
    /// CRC-32 of its bytes in the file.
    pub file_crc: u32,
    /// CRC-32 of its bytes on the device.
    pub device_crc: u32,
}

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Tensors compared, on all devices together.
    pub tensors: u64,
    /// Bytes compared.
    pub bytes: u64,
    /// Those that differ.
    pub mismatches: Vec<Mismatch>,
}

/// How long one read-back may take.
const COPY_TIMEOUT: Duration = Duration::from_secs(60);

impl Loaded {
    /// Reads every tensor back from its device and compares its CRC-32 with that of the file, which
    /// is read again by plain system calls.
    ///
    /// # Errors
    /// What reading the file or the device says; `is_cancelled`; `is_corrupt` (`file-changed`) where
    /// a file is no longer what was loaded, and so no witness. Differences are no error: they are in
    /// [`Verified::mismatches`].
    pub fn verify(&self, cancel: Option<&CancelToken>) -> Result<Verified> {
        let mut verified = Verified::default();
        let mut readers = self.devices.iter().map(Reader::new).collect::<Result<Vec<_>>>()?;
        for entry in self.layout.entries.iter().filter(|entry| entry.len > 0) {
            let Some(file) = self.files.get(entry.file as usize) else { continue };
            let mut file_crc = crc32fast::Hasher::new();
            let mut crcs = vec![crc32fast::Hasher::new(); readers.len()];
            let mut done = 0;
            while done < entry.len {
                cancel.map_or(Ok(()), CancelToken::check)?;
                let len = (entry.len - done).min(SLOT_BYTES);
                file_crc.update(&file.read_to_vec(entry.file_range.start + done, len)?);
                for (reader, crc) in readers.iter_mut().zip(&mut crcs) {
                    crc.update(reader.read(entry, done, len)?);
                }
                done += len;
            }
            let file_crc = file_crc.finalize();
            for (device, crc) in crcs.into_iter().enumerate() {
                let device_crc = crc.finalize();
                verified.tensors += 1;
                verified.bytes += entry.len;
                if device_crc != file_crc {
                    let tensor = entry.name.clone();
                    verified.mismatches.push(Mismatch { tensor, device, file_crc, device_crc });
                }
            }
        }
        for file in &self.files {
            file.check_unchanged()?;
        }
        Ok(verified)
    }
}

/// Reads a device buffer through one slot of pinned memory.
struct Reader<'a> {
    buffer: &'a Buffer,
    pinned: PinnedMem,
    stream: Stream,
    bytes: Vec<u8>,
}

impl<'a> Reader<'a> {
    fn new(buffer: &'a Buffer) -> Result<Self> {
        let gpu = buffer.gpu();
        let size = SLOT_BYTES.min(buffer.len());
        Ok(Self { buffer, pinned: gpu.pin(size)?, stream: gpu.stream()?, bytes: Vec::new() })
    }

    fn read(&mut self, entry: &Placement, done: u64, len: u64) -> Result<&[u8]> {
        let at = entry.device_offset + done;
        self.stream.copy_to_host(&self.pinned, 0, self.buffer, at, len)?;
        self.stream.synchronize(Instant::now() + COPY_TIMEOUT)?;
        self.bytes.resize(usize::try_from(len).unwrap_or(0), 0);
        self.pinned.mem().read(0, &mut self.bytes)?;
        Ok(&self.bytes)
    }
}
