//! Device memory of one process in another of the same host.
//!
//! [`send`] passes a buffer over a Unix socket, [`receive`] maps it: CUDA memory that was allocated to be
//! shared ([`Gpu::alloc_shareable`]) by the file descriptor of its handle, other CUDA memory by its IPC handle,
//! simulated memory by the memory file of its device. The owner must keep the memory until the other
//! side has dropped the buffer; nothing here can see that it does. What is received is of a process that the
//! caller trusts with the memory, and everything it says about it is checked.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use beeline_sys::mem::Extent;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::error::{Error, Result};
use crate::gpu::{Buffer, Gpu};

/// First bytes of every message, with the version of what follows.
const MAGIC: [u8; 8] = *b"beelshr1";
/// Bytes of a message: magic, kind, offset and length in the memory, count and 64 bytes or extents.
const MESSAGE_BYTES: usize = 8 + 8 + 8 + 8 + 8 + EXTENTS_MAX * 16;
/// Runs of simulated memory that one message names.
const EXTENTS_MAX: usize = 128;

/// How another process finds the memory.
#[derive(Debug)]
pub(crate) enum Name {
    /// The descriptor of a CUDA allocation handle, of so many bytes.
    Handle(OwnedFd, u64),
    /// A CUDA IPC handle.
    Ipc([u8; 64]),
    /// A memory file, and the runs of it that are the memory.
    File(OwnedFd, Vec<Extent>),
}

/// Sends `buffer` to the process at the other end.
///
/// # Errors
/// `is_refused` for memory that cannot be shared (a foreign buffer, a profile whose memory moves, memory in too
/// many pieces); what the socket says.
pub fn send(socket: &UnixStream, buffer: &Buffer) -> Result<()> {
    let (name, offset) = buffer.name()?;
    let mut message = Vec::with_capacity(MESSAGE_BYTES);
    message.extend(MAGIC);
    let mut word = |value: u64| message.extend(value.to_le_bytes());
    let fd = match &name {
        Name::Handle(fd, bytes) => {
            [1, offset, buffer.len(), *bytes].into_iter().for_each(&mut word);
            Some(fd.as_fd())
        }
        Name::Ipc(handle) => {
            [2, offset, buffer.len(), 64].into_iter().for_each(&mut word);
            message.extend(handle);
            None
        }
        Name::File(fd, extents) => {
            if extents.len() > EXTENTS_MAX {
                return Err(Error::refused(format!(
                    "simulated memory in {} pieces; {EXTENTS_MAX} can be shared",
                    extents.len()
                )));
            }
            [3, offset, buffer.len(), extents.len() as u64].into_iter().for_each(&mut word);
            extents.iter().flat_map(|run| [run.offset, run.len]).for_each(&mut word);
            Some(fd.as_fd())
        }
    };
    message.resize(MESSAGE_BYTES, 0);
    write(socket, &message, fd).map_err(|error| Error::io("share device memory", error))
}

/// Takes a buffer that the process at the other end sends, as memory that `gpu` reaches. Waits as long as
/// the socket does (`set_read_timeout`).
///
/// # Errors
/// `is_corrupt` for a message that is none; `is_io` where the socket ends or times out; what the driver says.
pub fn receive(socket: &UnixStream, gpu: &Gpu) -> Result<Buffer> {
    let (message, fd) = read(socket).map_err(|error| Error::io("receive device memory", error))?;
    let bad = || Error::new(crate::error::Kind::Corrupt, "this is no device memory");
    let rest = message.strip_prefix(&MAGIC).ok_or_else(bad)?;
    let words: Vec<u64> =
        rest.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let [kind, offset, len, count, more @ ..] = words.as_slice() else { return Err(bad()) };
    let name = match (kind, fd) {
        (1, Some(fd)) => Name::Handle(fd, *count),
        (2, None) => {
            let handle = rest.get(32..96).and_then(|bytes| bytes.try_into().ok());
            Name::Ipc(handle.ok_or_else(bad)?)
        }
        (3, Some(fd)) => {
            let runs = usize::try_from(*count).ok().filter(|runs| *runs <= EXTENTS_MAX);
            let runs = more.as_chunks::<2>().0.get(..runs.ok_or_else(bad)?).ok_or_else(bad)?;
            let run = |[offset, len]: &[u64; 2]| Extent { offset: *offset, len: *len };
            Name::File(fd, runs.iter().map(run).collect())
        }
        _ => return Err(bad()),
    };
    Buffer::named(gpu, name, *offset, *len)
}

fn write(socket: &UnixStream, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> std::io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    // The descriptor went with the first byte; what a full socket did not take follows.
    let mut rest = bytes.get(sent..).unwrap_or_default();
    while !rest.is_empty() {
        let sent = rustix::net::send(socket, rest, SendFlags::NOSIGNAL)?;
        rest = rest.get(sent..).unwrap_or_default();
    }
    Ok(())
}

fn read(socket: &UnixStream) -> std::io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut bytes = vec![0; MESSAGE_BYTES];
    let (mut done, mut found) = (0, None);
    while done < MESSAGE_BYTES {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let part = bytes.get_mut(done..).unwrap_or_default();
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(part)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                found = fds.next().or(found);
            }
        }
        if got.bytes == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        done += got.bytes;
    }
    Ok((bytes, found))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::config::SimConfig;
    use crate::gpu::Profile;
    use beeline_core::addr::ByteRange;

    #[test]
    fn simulated_memory_is_the_same_on_both_sides() {
        let config = SimConfig { memory_bytes: 16 << 20, ..SimConfig::default() };
        let (owner, other) = (Gpu::simulated(&config).unwrap(), Gpu::simulated(&config).unwrap());
        // In pieces: the middle one of three is given back.
        let (_low, middle, _high) = (
            owner.alloc(64 << 10).unwrap(),
            owner.alloc(64 << 10).unwrap(),
            owner.alloc(64 << 10).unwrap(),
        );
        drop(middle);
        let whole = owner.alloc(256 << 10).unwrap();
        let part = whole.slice(ByteRange { start: 100, len: 200 << 10 }).unwrap();
        let (a, b) = UnixStream::pair().unwrap();
        send(&a, &part).unwrap();
        let taken = receive(&b, &other).unwrap();
        assert_eq!(taken.len(), 200 << 10);

        let soon = || Instant::now() + Duration::from_secs(10);
        let stream = other.stream().unwrap();
        stream.fill(&taken, 0, taken.len(), 0x77).unwrap();
        stream.synchronize(soon()).unwrap();
        let (host, back) = (owner.pin(256 << 10).unwrap(), owner.stream().unwrap());
        back.copy_to_host(&host, 0, &whole, 0, 256 << 10).unwrap();
        back.synchronize(soon()).unwrap();
        let mut bytes = vec![0; 256 << 10];
        host.mem().read(0, &mut bytes).unwrap();
        assert!(bytes[100..100 + (200 << 10)].iter().all(|byte| *byte == 0x77));
        assert!(bytes[..100].iter().chain(&bytes[100 + (200 << 10)..]).all(|byte| *byte != 0x77));
        assert_eq!(other.usage().allocated, 0, "the memory is the owner's");
        drop(taken);
        assert_eq!(other.memory().unwrap().free, other.memory().unwrap().total);
    }

    #[test]
    fn nonsense_and_memory_that_moves_are_refused() {
        let config = SimConfig { memory_bytes: 1 << 20, ..SimConfig::default() };
        let gpu = Gpu::simulated(&config).unwrap();
        let (a, b) = UnixStream::pair().unwrap();
        write(&a, &[7; MESSAGE_BYTES], None).unwrap();
        assert!(receive(&b, &gpu).unwrap_err().is_corrupt());
        let mut message = vec![0; MESSAGE_BYTES];
        message[..8].copy_from_slice(&MAGIC);
        message[8] = 3;
        let file = beeline_sys::mem::memfd("share", 1 << 16).unwrap();
        for (at, value) in [(16, u64::MAX), (24, 1 << 30), (32, 5000)] {
            let mut message = message.clone();
            message[32..40].copy_from_slice(&1_u64.to_le_bytes());
            message[48..56].copy_from_slice(&(1_u64 << 16).to_le_bytes());
            message[24..32].copy_from_slice(&8_u64.to_le_bytes());
            message[at..at + 8].copy_from_slice(&value.to_le_bytes());
            write(&a, &message, Some(file.as_fd())).unwrap();
            assert!(receive(&b, &gpu).is_err(), "{at}");
        }
        let config = SimConfig { profile: Profile::Movable, ..config };
        let movable = Gpu::simulated(&config).unwrap();
        let buffer = movable.alloc(100).unwrap();
        assert!(send(&a, &buffer).unwrap_err().is_refused());
        drop(a);
        assert!(receive(&b, &gpu).is_err());
    }
}
