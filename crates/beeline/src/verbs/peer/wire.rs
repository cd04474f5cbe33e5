//! What is said to the peer of a local link: messages over its socket, and references in its packets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use beeline_core::roce::Packet;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Bytes of a reference to one piece of memory: region, offset, length, and the cookie that is released
/// when its bytes have been fetched.
pub(super) const PIECE: usize = 32;

/// First word of every message, with the version of what is said.
const MAGIC: u64 = 0x6265_656c_696e_0003;

/// Descriptors of one message at most.
const FDS_MAX: usize = 2;

/// Two words and what came with them.
pub(in crate::verbs) struct Message {
    pub(in crate::verbs) words: [u64; 2],
    pub(in crate::verbs) fds: Vec<OwnedFd>,
}

/// Appends a reference to `len` bytes at `offset` of a region given to the peer.
pub(super) fn refer(buffer: &mut Vec<u8>, number: u64, offset: u64, len: u32, cookie: u64) {
    for word in [number, offset, u64::from(len), cookie] {
        buffer.extend_from_slice(&word.to_le_bytes());
    }
}

/// The cookies of a reference.
pub(super) fn cookies_of(reference: &[u8]) -> impl Iterator<Item = u64> {
    reference.as_chunks::<PIECE>().0.iter().filter_map(|piece| {
        let (_, cookie) = piece.split_last_chunk::<8>()?;
        Some(u64::from_le_bytes(*cookie))
    })
}

/// The cookies in a packet of a local link: none where it carries its payload.
pub(in crate::verbs) fn cookies_in(datagram: &[u8]) -> impl Iterator<Item = u64> {
    let names = datagram.split_last_chunk().is_some_and(|(_, last)| *last != [0_u8; 4]);
    let packet = names.then(|| Packet::parse_local(datagram).ok()).flatten();
    let reference = packet.filter(|packet| packet.referenced > 0);
    let reference = reference.and_then(|packet| datagram.get(packet.payload)).unwrap_or_default();
    cookies_of(reference)
}

/// Sends a message whole.
pub(in crate::verbs) fn send(
    socket: &UnixStream,
    [first, second]: [u64; 2],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut bytes = [0; 24];
    for (into, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip([MAGIC, first, second]) {
        *into = word.to_le_bytes();
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags)?;
    // A message so short is never cut by the kernel; if it were, the peer would end the connection.
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives a message whole.
pub(in crate::verbs) fn receive(socket: &UnixStream) -> io::Result<Message> {
    let mut bytes = [0; 24];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket.as_fd(),
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let (words, _) = bytes.as_chunks::<8>();
    let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    match (received.bytes, words.as_slice()) {
        (0, _) => Err(io::ErrorKind::UnexpectedEof.into()),
        (24, [MAGIC, first, second]) => Ok(Message { words: [*first, *second], fds }),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the peer is no local NIC of this version",
        )),
    }
}
