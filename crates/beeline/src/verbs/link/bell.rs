//! What wakes a process that sleeps: a datagram of one byte.
//!
//! The other process gave the descriptor that is written to, and chose it. On a socket, unlike on an eventfd or a pipe, a
//! call itself can say that it must not wait (`MSG_DONTWAIT`, send(2)); elsewhere that is a flag of the open file, which
//! whoever else holds it may clear. Datagrams, since a stream of a closed peer is readable for ever.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

/// How many are taken at once: more than a sender's usual buffer holds (some 300). What is left rings again.
const TAKEN_MAX: usize = 1024;

/// The end that is woken, which can be polled.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

/// The end that wakes.
#[derive(Debug)]
pub(super) struct Ringer(OwnedFd);

impl Bell {
    /// A bell, and the descriptor to be given to the other process.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        Ok((Self(ours), theirs))
    }

    /// Takes what has woken it.
    pub(super) fn quiet(&self) {
        for _ in 0..TAKEN_MAX {
            if rustix::net::recv(&self.0, &mut [0; 1], RecvFlags::DONTWAIT).is_err() {
                return;
            }
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Ringer {
    /// The descriptor that the other process gave.
    ///
    /// # Errors
    /// Where it is none of [`Bell::new`].
    pub(super) fn new(given: OwnedFd) -> io::Result<Self> {
        let kind = sockopt::socket_domain(&given)
            .and_then(|domain| sockopt::socket_type(&given).map(|kind| (domain, kind)));
        match kind {
            Ok((AddressFamily::UNIX, SocketType::DGRAM)) => Ok(Self(given)),
            Ok((domain, kind)) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the peer's wake-up is a socket of family {domain:?} and type {kind:?}, no Unix datagram socket"
                ),
            )),
            Err(error) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the peer's wake-up is no socket: {error}"),
            )),
        }
    }

    /// Wakes the other process. Never waits; where there is no room, it is about to be woken anyway.
    pub(super) fn ring(&self) {
        let _ = rustix::net::send(&self.0, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn rings(bell: &Bell) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&bell.0, PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    #[test]
    fn it_rings_until_it_is_quiet_and_never_waits() {
        let (bell, theirs) = Bell::new().unwrap();
        // As somebody may who holds the same open file.
        rustix::io::ioctl_fionbio(&theirs, false).unwrap();
        let ringer = Ringer::new(theirs).unwrap();
        assert!(!rings(&bell));
        // Far more than there is room for.
        (0..10_000).for_each(|_| ringer.ring());
        assert!(rings(&bell));
        bell.quiet();
        assert!(!rings(&bell));
        ringer.ring();
        assert!(rings(&bell));
        bell.quiet();
        // A peer that is gone makes nobody look again and again.
        drop(ringer);
        assert!(!rings(&bell));
    }

    #[test]
    fn only_a_socket_of_its_kind_is_written_to() {
        let (_reader, pipe) = io::pipe().unwrap();
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        for given in [pipe.into(), stream.into(), event] {
            let error = Ringer::new(given).unwrap_err();
            assert!(error.to_string().contains("the peer's wake-up is"), "{error}");
        }
    }
}
