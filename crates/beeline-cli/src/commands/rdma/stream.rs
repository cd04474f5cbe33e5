//! The control connection: over TCP, or a Unix socket where memory is shared.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use beeline::verbs::Nic;

use super::{GREETING, PATIENCE, connect_error, io_failure, options};
use crate::failure::Failure;
use crate::flags::RdmaServeFlags;
use crate::output;

/// Where clients come in.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, path: PathBuf },
}

/// Connections that have said nothing yet, at most; one more, and the oldest goes.
const WAITING_MAX: usize = 16;
/// How long a wait for the other side goes on before it is looked whether a signal came.
const LOOK: Duration = Duration::from_millis(50);
/// The longest line.
const LINE_MAX: usize = 1024;

/// A control connection.
pub(super) struct Stream {
    socket: Socket,
    /// A line that has not come to its end.
    heard: Vec<u8>,
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Connections that nobody serves yet.
#[derive(Default)]
pub(super) struct Waiting {
    /// Whose first word has not come: while they say nothing, others are served.
    silent: Vec<(Stream, Instant)>,
    /// Who came while another was being served, with what they want.
    ready: VecDeque<(Stream, String)>,
    /// It was told that no more connections can be taken.
    told: bool,
}

/// What the NIC's connection of a local client begins with; `number` is the server's for the client.
pub(super) fn nic_word(number: u64) -> String {
    format!("{GREETING} nic {number}")
}

impl Listener {
    pub(super) fn open(flags: &RdmaServeFlags) -> Result<(Self, Option<Nic>), Failure> {
        if let Some(path) = &flags.nic.local {
            let listener = UnixListener::bind(path).map_err(|error| bind_error(path, &error))?;
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

    /// The next client that has said what it wants, with that line.
    pub(super) fn next(&self, waiting: &mut Waiting) -> Result<Option<(Stream, String)>, Failure> {
        if let Some(client) = waiting.ready.pop_front() {
            return Ok(Some(client));
        }
        // The NIC of a client that has gone meanwhile is no client.
        let is_nic = |line: &str| line.starts_with(GREETING) && line.contains(" nic ");
        Ok(self.word(waiting)?.filter(|(_, line)| !is_nic(line)))
    }

    /// The next connection whose first line has come.
    fn word(&self, waiting: &mut Waiting) -> Result<Option<(Stream, String)>, Failure> {
        while let Some(stream) = self.accept(waiting)? {
            let silent = &mut waiting.silent;
            if silent.len() >= WAITING_MAX {
                output::warn("many connections say nothing: the oldest is closed, and not counted");
                silent.remove(0);
            }
            silent.push((stream, Instant::now()));
        }
        let silent = &mut waiting.silent;
        let mut at = 0;
        while let Some((stream, since)) = silent.get_mut(at) {
            match stream.poll() {
                Ok(Some(line)) => return Ok(Some((silent.remove(at).0, line))),
                Ok(None) if since.elapsed() < PATIENCE => at += 1,
                Ok(None) => {
                    let span = PATIENCE.as_secs();
                    output::warn(&format!(
                        "a connection said nothing for {span} s: it is closed, and not counted"
                    ));
                    silent.remove(at);
                }
                // Gone again, without a word.
                Err(_) => drop(silent.remove(at)),
            }
        }
        Ok(None)
    }

    /// The next connection, if one is there.
    fn accept(&self, waiting: &mut Waiting) -> Result<Option<Stream>, Failure> {
        const ENFILE: i32 = 23;
        const EMFILE: i32 = 24;

        let accepted = match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Socket::Tcp(stream)),
            Self::Unix { listener, .. } => {
                listener.accept().map(|(stream, _)| Socket::Unix(stream))
            }
        };
        match accepted {
            Ok(socket) => Stream::new(socket).map(Some).map_err(io_failure),
            Err(error) if waits(&error) => Ok(None),
            // It went while it waited.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(None),
            // That passes, as others go.
            Err(error) if matches!(error.raw_os_error(), Some(ENFILE | EMFILE)) => {
                if !std::mem::replace(&mut waiting.told, true) {
                    output::warn(&format!("no connection can be taken for now: {error}"));
                }
                Ok(None)
            }
            Err(error) => Err(io_failure(error)),
        }
    }

    /// The second connection of the local client behind `control`, which joins the NICs.
    pub(super) fn accept_nic(
        &self,
        waiting: &mut Waiting,
        (control, number): (&mut Stream, u64),
        stop: &dyn Fn() -> bool,
    ) -> Result<UnixStream, Failure> {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && !stop() {
            match self.word(waiting)? {
                Some((Stream { socket: Socket::Unix(stream), .. }, line))
                    if line == nic_word(number) =>
                {
                    // As it was made: its owner sets what it needs.
                    stream.set_read_timeout(None).map_err(io_failure)?;
                    stream.set_write_timeout(None).map_err(io_failure)?;
                    return Ok(stream);
                }
                Some(client) if waiting.ready.len() < WAITING_MAX => {
                    waiting.ready.push_back(client);
                }
                Some(_) => output::warn("too many clients at once: one is closed, and not counted"),
                // It says nothing before that, and may go.
                None => drop(control.poll()?),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Failure::failed("timed-out", "the client did not join its NIC within 10 s"))
    }
}

/// Why the socket at `path` cannot be made. Whether somebody listens at one that is there is not tried: a server would take
/// that for a client.
fn bind_error(path: &Path, error: &io::Error) -> Failure {
    let failure = connect_error(path, error);
    match error.kind() {
        io::ErrorKind::AddrInUse => failure.hint(
            "name another path; if no server uses this one (a killed server leaves its socket), remove it",
        ),
        _ => failure,
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix { path, .. } = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Stream {
    /// Connects to a server on the network.
    pub(super) fn connect(
        server: SocketAddr,
        stop: &dyn Fn() -> bool,
    ) -> Result<(Self, IpAddr), Failure> {
        let (done, result) = mpsc::channel();
        // On a thread of its own: nothing ends a connect before its time, and a signal is to end the command.
        let connect = move || drop(done.send(TcpStream::connect_timeout(&server, PATIENCE)));
        let thread = std::thread::Builder::new().name("beeline-connect".to_owned());
        thread.spawn(connect).map_err(io_failure)?;
        loop {
            match result.recv_timeout(LOOK) {
                Ok(stream) => {
                    let stream = stream.map_err(|error| {
                        let text =
                            format!("cannot reach {} port {}: {error}", server.ip(), server.port());
                        Failure::failed("io-failed", text)
                            .hint("start `beeline rdma serve` there first")
                    })?;
                    let own = stream.local_addr().map_err(io_failure)?.ip();
                    return Ok((Self::new(Socket::Tcp(stream)).map_err(io_failure)?, own));
                }
                Err(mpsc::RecvTimeoutError::Timeout) if !stop() => {}
                Err(_) => return Err(called_off()),
            }
        }
    }

    /// Connects to a server of this host.
    pub(super) fn local(path: &Path) -> Result<Self, Failure> {
        let stream = UnixStream::connect(path).map_err(|error| connect_error(path, &error))?;
        Self::new(Socket::Unix(stream)).map_err(io_failure)
    }

    fn new(socket: Socket) -> io::Result<Self> {
        match &socket {
            Socket::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_write_timeout(Some(PATIENCE))?;
                stream.set_read_timeout(Some(LOOK))?;
            }
            Socket::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_write_timeout(Some(PATIENCE))?;
                stream.set_read_timeout(Some(LOOK))?;
            }
        }
        Ok(Self { socket, heard: Vec::new() })
    }

    pub(super) fn say(&mut self, line: &str) -> Result<(), Failure> {
        let line = format!("{line}\n");
        match &mut self.socket {
            Socket::Tcp(stream) => stream.write_all(line.as_bytes()),
            Socket::Unix(stream) => stream.write_all(line.as_bytes()),
        }
        .map_err(io_failure)
    }

    /// One line of at most 1 KiB.
    pub(super) fn hear(&mut self, stop: &dyn Fn() -> bool) -> Result<String, Failure> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(line) = self.line()? {
                return match line.strip_prefix("error ") {
                    Some(text) => Err(Failure::refused("refused-by-peer", output::printable(text))),
                    None => Ok(line),
                };
            }
            match self.take() {
                Ok(false) => return Err(gone()),
                _ if stop() => return Err(called_off()),
                // Also where it comes byte by byte.
                _ if Instant::now() >= end => {
                    return Err(io_failure(io::ErrorKind::TimedOut.into()));
                }
                Ok(true) => {}
                Err(error) if waits(&error) => {}
                Err(error) => return Err(io_failure(error)),
            }
        }
    }

    /// The next line, if it is there.
    ///
    /// # Errors
    /// The other side has ended the connection, or says what is no line.
    pub(super) fn poll(&mut self) -> Result<Option<String>, Failure> {
        if let Some(line) = self.line()? {
            return Ok(Some(line));
        }
        self.block(false).map_err(io_failure)?;
        let mut taken = self.take();
        while matches!(taken, Ok(true)) && self.heard.last() != Some(&b'\n') {
            taken = if self.heard.len() < LINE_MAX { self.take() } else { break };
        }
        self.block(true).map_err(io_failure)?;
        match taken {
            Ok(true) => self.line(),
            Ok(false) => Err(gone()),
            Err(error) if waits(&error) => Ok(None),
            Err(error) => Err(io_failure(error)),
        }
    }

    /// A line of what was heard.
    fn line(&mut self) -> Result<Option<String>, Failure> {
        let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') else {
            if self.heard.len() < LINE_MAX {
                return Ok(None);
            }
            return Err(Failure::failed("io-failed", "the other side says what is no line"));
        };
        let line: Vec<u8> = self.heard.drain(..=end).collect();
        Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()))
    }

    /// Takes a byte, and so nothing past a line: what follows may be somebody else's. Whether the other side goes on.
    fn take(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 1];
        let count = match &mut self.socket {
            Socket::Tcp(stream) => stream.read(&mut bytes),
            Socket::Unix(stream) => stream.read(&mut bytes),
        }?;
        self.heard.extend(bytes.iter().take(count));
        Ok(count > 0)
    }

    fn block(&self, blocks: bool) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(stream) => stream.set_nonblocking(!blocks),
            Socket::Unix(stream) => stream.set_nonblocking(!blocks),
        }
    }
}

fn waits(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};

    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

fn gone() -> Failure {
    Failure::failed("io-failed", "the other side ended the connection")
}

/// The signal that came is told instead.
fn called_off() -> Failure {
    Failure::failed("cancelled", "called off")
}
