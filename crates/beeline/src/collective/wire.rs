//! Messages of a bootstrap: length, contents, and on Unix sockets descriptors beside them.
//!
//! A message, or several, has one deadline ([`Timed`]): the time that is left is set before every read and write, so
//! that somebody who sends a byte now and then does not last longer.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

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
    receive_at_most(MESSAGE_MAX, stream)
}

/// Reads one message of at most `max` bytes.
pub(super) fn receive_at_most(max: usize, stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut header = [0; 4];
    stream.read_exact(&mut header)?;
    body(stream, header, max)
}

/// Writes one message with descriptors, which are duplicated for the receiver.
pub(super) fn send_with(
    stream: &mut Timed<'_, UnixStream>,
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
    // The descriptors travel with the first byte of the header.
    let sent = loop {
        stream.arm(UnixStream::set_write_timeout)?;
        let parts = [IoSlice::new(&header)];
        match rustix::net::sendmsg(stream.socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            result => break result?,
        }
    };
    stream.write_all(header.get(sent..).unwrap_or_default())?;
    stream.write_all(message)
}

/// Reads one message with its descriptors.
pub(super) fn receive_with(
    stream: &mut Timed<'_, UnixStream>,
) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut header = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        stream.arm(UnixStream::set_read_timeout)?;
        let (socket, flags) = (stream.socket.as_fd(), RecvFlags::CMSG_CLOEXEC);
        let mut parts = [IoSliceMut::new(&mut header)];
        match rustix::net::recvmsg(socket, &mut parts, &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            result => break result?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    match header.get_mut(received.bytes..) {
        Some(rest) if received.bytes > 0 => stream.read_exact(rest)?,
        _ => return Err(io::ErrorKind::UnexpectedEof.into()),
    }
    Ok((body(stream, header, MESSAGE_MAX)?, fds))
}

/// A socket, and the time at which whatever is said over it has to be through; `None` for no bound.
pub(super) struct Timed<'a, S> {
    socket: &'a S,
    deadline: Option<Instant>,
}

impl<'a, S> Timed<'a, S> {
    pub(super) const fn new(socket: &'a S, deadline: Option<Instant>) -> Self {
        Self { socket, deadline }
    }

    /// Lets the next operation last until the deadline.
    fn arm(&self, set: fn(&S, Option<Duration>) -> io::Result<()>) -> io::Result<()> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match left {
            Some(Duration::ZERO) => Err(io::ErrorKind::TimedOut.into()),
            left => set(self.socket, left),
        }
    }
}

macro_rules! timed {
    ($($socket:ident)*) => {$(
        impl Read for Timed<'_, $socket> {
            fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
                self.arm($socket::set_read_timeout)?;
                (&mut &*self.socket).read(bytes)
            }
        }

        impl Write for Timed<'_, $socket> {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.arm($socket::set_write_timeout)?;
                (&mut &*self.socket).write(bytes)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
    )*};
}

timed!(TcpStream UnixStream);

fn length(message: &[u8]) -> io::Result<[u8; 4]> {
    if message.len() > MESSAGE_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok((message.len() as u32).to_le_bytes())
}

fn body(stream: &mut impl Read, header: [u8; 4], max: usize) -> io::Result<Vec<u8>> {
    let len = u32::from_le_bytes(header) as usize;
    if len > max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
    }
    let mut message = vec![0; len];
    stream.read_exact(&mut message)?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_comes_in_pieces_is_whole_and_has_one_deadline() {
        let soon = || Some(Instant::now() + Duration::from_secs(20));
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || {
            for byte in [2_u8, 0, 0, 0, 7, 8] {
                ours.write_all(&[byte]).unwrap();
                std::thread::sleep(Duration::from_millis(2));
            }
            ours
        });
        let (bytes, fds) = receive_with(&mut Timed::new(&theirs, soon())).unwrap();
        assert_eq!((bytes, fds.len()), (vec![7, 8], 0));
        let mut ours = sender.join().unwrap();
        // Somebody who always sends one more byte in time does not last.
        let dripper = std::thread::spawn(move || {
            while ours.write_all(&[255]).is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let mut all = [0; 1 << 16];
        let mut timed = Timed::new(&theirs, Some(Instant::now() + Duration::from_millis(100)));
        let error = timed.read_exact(&mut all).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut));
        let error = receive_at_most(256, &mut Timed::new(&theirs, soon())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(theirs);
        dripper.join().unwrap();
    }
}
