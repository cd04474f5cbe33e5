//! Messages of a bootstrap: length, contents, and on Unix sockets descriptors beside them.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Longest message.
pub(super) const MESSAGE_MAX: usize = 64 << 10;
/// Descriptors that go with one message at most.
pub(super) const FDS_MAX: usize = 16;

/// Writes one message.
pub(super) fn send(stream: &mut impl Write, message: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(message.len() + 4);
    bytes.extend_from_slice(&length(message)?);
    bytes.extend_from_slice(message);
    stream.write_all(&bytes)
}

/// Reads one message.
pub(super) fn receive(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut header = [0; 4];
    stream.read_exact(&mut header)?;
    body(stream, header)
}

/// Writes one message with descriptors, which are duplicated for the receiver.
pub(super) fn send_with(
    mut stream: &UnixStream,
    message: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let header = length(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if fds.len() > FDS_MAX
        || (!fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)))
    {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // The descriptors travel with the header, whose bytes are never cut.
    let sent =
        rustix::net::sendmsg(stream, &[IoSlice::new(&header)], &mut control, SendFlags::NOSIGNAL)?;
    if sent != header.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    stream.write_all(message)
}

/// Reads one message with its descriptors.
pub(super) fn receive_with(mut stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut header = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        stream.as_fd(),
        &mut [IoSliceMut::new(&mut header)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL,
    )?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    match received.bytes {
        4 => Ok((body(&mut stream, header)?, fds)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn length(message: &[u8]) -> io::Result<[u8; 4]> {
    if message.len() > MESSAGE_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok((message.len() as u32).to_le_bytes())
}

fn body(stream: &mut impl Read, header: [u8; 4]) -> io::Result<Vec<u8>> {
    let len = u32::from_le_bytes(header) as usize;
    if len > MESSAGE_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
    }
    let mut message = vec![0; len];
    stream.read_exact(&mut message)?;
    Ok(message)
}
