//! Asynchronous file I/O by io_uring, with the memory of every request owned by the ring.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

use crate::mem::HostMem;

/// Which way the bytes of a request go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

/// One request. The ring keeps `file` and `memory` alive until the kernel has answered.
#[derive(Clone, Debug)]
pub struct Request {
    /// Read or write.
    pub direction: Direction,
    /// The open file.
    pub file: Arc<OwnedFd>,
    /// Where the bytes go or come from.
    pub memory: Arc<HostMem>,
    /// First byte in `memory`.
    pub offset: u64,
    /// Bytes to move; at most [`crate::file::RW_MAX`].
    pub len: u32,
    /// First byte in the file.
    pub at: u64,
}

/// The kernel's answer to one request.
#[derive(Debug)]
pub struct Completion {
    /// The number that was given to [`Uring::submit`].
    pub token: u64,
    /// Bytes moved (0 at end of file), or the kernel's error.
    pub result: io::Result<u32>,
}

struct InFlight {
    token: u64,
    // Dropped only after the completion: until then the kernel may write the memory.
    _request: Request,
}

/// A ring of bounded depth. Not shared between threads.
pub struct Uring {
    ring: Option<IoUring>,
    slots: Vec<Option<InFlight>>,
    free: Vec<u32>,
}

impl Uring {
    /// A ring that holds up to `depth` requests in flight.
    ///
    /// # Errors
    /// `ENOSYS` without io_uring, `EPERM` where `kernel.io_uring_disabled` or a seccomp filter
    /// refuses it, `ENOMEM` where a user's locked memory runs out (before Linux 5.12, and again on
    /// kernels that count the rings: seen on 6.18).
    pub fn new(depth: u32) -> io::Result<Self> {
        let depth = depth.clamp(1, 4096);
        let ring = IoUring::builder().setup_clamp().build(depth)?;
        let mut slots = Vec::new();
        slots.resize_with(depth as usize, || None);
        Ok(Self { ring: Some(ring), slots, free: (0..depth).rev().collect() })
    }

    /// Requests that the kernel has not answered yet.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether another request fits.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Starts `request`. `token` comes back in its [`Completion`].
    ///
    /// # Errors
    /// `InvalidInput` where the request does not lie inside its memory, `WouldBlock` where
    /// [`Self::has_room`] is false. The request was not started then.
    pub fn submit(&mut self, request: Request, token: u64) -> io::Result<()> {
        let address = request.memory.at(request.offset, u64::from(request.len))?;
        let Some(ring) = self.ring.as_mut() else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let Some(slot) = self.free.pop() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let fd = types::Fd(request.file.as_raw_fd());
        let entry = match request.direction {
            Direction::Read => {
                opcode::Read::new(fd, address, request.len).offset(request.at).build()
            }
            Direction::Write => {
                opcode::Write::new(fd, address, request.len).offset(request.at).build()
            }
        };
        let entry = entry.user_data(u64::from(slot));
        // SAFETY: the memory range was checked by `at` above. It and the descriptor stay alive in
        // `slots` until the completion of this slot is seen; `Drop` leaks what is still in flight.
        let pushed = unsafe { ring.submission().push(&entry) };
        if pushed.is_err() {
            // Cannot happen: the queue has at least `depth` entries and is flushed below.
            self.free.push(slot);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(InFlight { token, _request: request });
        }
        loop {
            match ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The entry stays queued, so the slot counts as in flight whatever went wrong; the
                // next `wait` submits it again and reports an error that stays.
                Err(_) => return Ok(()),
            }
        }
    }

    /// The next completion that has already arrived.
    pub fn poll(&mut self) -> Option<Completion> {
        let ring = self.ring.as_mut()?;
        let entry = ring.completion().next()?;
        let slot = entry.user_data();
        let index = usize::try_from(slot).ok()?;
        let done = self.slots.get_mut(index)?.take()?;
        self.free.push(u32::try_from(slot).ok()?);
        let code = entry.result();
        let result = u32::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code));
        Some(Completion { token: done.token, result })
    }

    /// Waits until a completion has arrived or `timeout` has passed; returns at once where nothing
    /// is in flight. A signal may end the wait early.
    ///
    /// # Errors
    /// What `io_uring_enter(2)` says, except `ETIME` and `EINTR`.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        if self.in_flight() == 0 {
            return Ok(());
        }
        let Some(ring) = self.ring.as_mut() else { return Ok(()) };
        if !ring.completion().is_empty() {
            return Ok(());
        }
        let span = types::Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&span);
        match ring.submitter().submit_with_args(1, &args) {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) if is_transient(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// The kernel is short of something for the moment and keeps the entry.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
}

impl Drop for Uring {
    fn drop(&mut self) {
        if self.in_flight() == 0 {
            return;
        }
        // Closing a ring does not end its requests: the kernel may write their memory later. What is
        // still in flight is therefore leaked, with the ring, rather than freed under the kernel.
        std::mem::forget(self.ring.take());
        for slot in &mut self.slots {
            std::mem::forget(slot.take());
        }
    }
}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uring")
            .field("depth", &self.slots.len())
            .field("in_flight", &self.in_flight())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn requests_complete_with_their_token_and_bytes() {
        let mut ring = match Uring::new(4) {
            Ok(ring) => ring,
            Err(error) => return println!("SKIP io_uring ({error})"),
        };
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&(0..=255).collect::<Vec<u8>>()).unwrap();
        let file = Arc::new(OwnedFd::from(file));
        let memory = Arc::new(HostMem::anonymous(4096).unwrap());
        for token in 0..4_u64 {
            let request = Request {
                direction: Direction::Read,
                file: Arc::clone(&file),
                memory: Arc::clone(&memory),
                offset: token * 64,
                len: 64,
                at: 192 - token * 64,
            };
            ring.submit(request.clone(), token).unwrap();
            assert!(
                ring.submit(Request { offset: 4090, ..request }, 9).is_err(),
                "outside the memory"
            );
        }
        assert!(!ring.has_room());
        let mut seen = Vec::new();
        while seen.len() < 4 {
            ring.wait(Duration::from_secs(5)).unwrap();
            while let Some(done) = ring.poll() {
                assert_eq!(done.result.unwrap(), 64);
                seen.push(done.token);
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3]);
        let mut bytes = [0; 256];
        memory.read(0, &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[64], bytes[255]), (192, 128, 63));
        assert_eq!(Arc::strong_count(&memory), 1, "a finished request lets go of its memory");
    }
}
