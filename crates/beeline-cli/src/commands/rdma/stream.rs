//! The control connection: over TCP, or a Unix socket where memory is shared.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use beeline::verbs::Nic;

use super::{PATIENCE, connect_error, io_failure, options};
use crate::failure::Failure;
use crate::flags::RdmaServeFlags;
use crate::output;

/// Where clients come in.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, path: PathBuf },
}

/// A control connection.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    pub(super) fn open(flags: &RdmaServeFlags) -> Result<(Self, Option<Nic>), Failure> {
        if let Some(path) = &flags.nic.local {
            let listener = bind(path).map_err(|error| connect_error(path, &error))?;
            listener.set_nonblocking(true).map_err(io_failure)?;
            output::note(&format!("listening on {}", path.display()));
            return Ok((Self::Unix { listener, path: path.clone() }, None));
        }
        let addr = flags.bind.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let nic = flags.nic.nic.open(addr, options(addr, &flags.nic))?;
        let listener = TcpListener::bind((addr, flags.nic.port)).map_err(|error| {
            let text = format!("cannot listen on {addr} port {}: {error}", flags.nic.port);
            Failure::failed("io-failed", text)
        })?;
        listener.set_nonblocking(true).map_err(io_failure)?;
        let at = listener.local_addr().map_err(io_failure)?;
        output::note(&format!("listening on {at}"));
        Ok((Self::Tcp(listener), Some(nic)))
    }

    /// The next client, if one is there.
    pub(super) fn accept(&self) -> Result<Option<Stream>, Failure> {
        let accepted = match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
            Self::Unix { listener, .. } => {
                listener.accept().map(|(stream, _)| Stream::Unix(stream))
            }
        };
        match accepted {
            Ok(stream) => stream.prepare().map(|()| Some(stream)).map_err(io_failure),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(io_failure(error)),
        }
    }

    /// The second connection of a local client, which joins the NICs.
    pub(super) fn accept_nic(&self) -> Result<UnixStream, Failure> {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(Stream::Unix(stream)) = self.accept()? {
                return Ok(stream);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Failure::failed("timed-out", "the client did not join its NIC within 10 s"))
    }
}

/// Listens at `path`, also where a server that was killed has left its socket: nobody answers there any more.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let taken = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => error,
        other => return other,
    };
    // Only a socket refuses a connection like this; a file of another kind stays as well.
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
        _ => return Err(taken),
    }
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(taken);
    }
    std::fs::remove_file(path)?;
    UnixListener::bind(path)
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix { path, .. } = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Stream {
    pub(super) fn prepare(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_write_timeout(Some(PATIENCE))?;
                stream.set_read_timeout(Some(PATIENCE))
            }
            Self::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_write_timeout(Some(PATIENCE))?;
                stream.set_read_timeout(Some(PATIENCE))
            }
        }
    }

    pub(super) fn say(&mut self, line: &str) -> Result<(), Failure> {
        let line = format!("{line}\n");
        match self {
            Self::Tcp(stream) => stream.write_all(line.as_bytes()),
            Self::Unix(stream) => stream.write_all(line.as_bytes()),
        }
        .map_err(io_failure)
    }

    /// One line of at most 1 KiB. Nothing is read past it: the two sides take turns.
    pub(super) fn hear(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        let reader: &mut dyn Read = match self {
            Self::Tcp(stream) => stream,
            Self::Unix(stream) => stream,
        };
        BufReader::with_capacity(1, reader.take(1024)).read_line(&mut line).map_err(io_failure)?;
        match line.trim_end().strip_prefix("error ") {
            Some(text) => Err(Failure::refused("refused-by-peer", output::printable(text))),
            None if line.ends_with('\n') => Ok(line.trim_end().to_owned()),
            None => Err(Failure::failed("io-failed", "the other side ended the connection")),
        }
    }

    /// Whether the other side has closed it.
    pub(super) fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        let (read, _) = match self {
            Self::Tcp(stream) => {
                let _ = stream.set_nonblocking(true);
                (stream.read(&mut byte), stream.set_nonblocking(false))
            }
            Self::Unix(stream) => {
                let _ = stream.set_nonblocking(true);
                (stream.read(&mut byte), stream.set_nonblocking(false))
            }
        };
        !matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_at_is_taken_over() {
        let folder = std::env::temp_dir().join(format!("beeline-stream-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("s.sock");
        let first = bind(&path).unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(UnixStream::connect(&path).is_ok(), "the living one keeps its place");
        // As a killed process leaves it.
        drop(first);
        drop(bind(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "a file").unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read(&path).unwrap(), b"a file");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
