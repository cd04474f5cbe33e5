//! The bare things: sockets and copies, with nothing of a NIC around them.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_sys::mem::HostMem;
use beeline_sys::net::{BATCH_MAX, Outgoing, PIECE_BYTES_MAX, UdpSocket};

use crate::cores;
use crate::{IN_FLIGHT, MESSAGE, PING_SPAN, PINGS, Result, SMALL_UDP, address};

/// Headers and check of a WRITE packet: BTH, RETH, ICRC.
const AROUND: usize = 12 + 16 + 4;

/// A full packet of path MTU 4096.
const DATAGRAM: usize = AROUND + 4096;

/// Until the threads of a case run.
const WARM_UP: Duration = Duration::from_millis(100);

/// Bytes of payload per second that arrive, datagram by datagram.
pub(crate) fn datagrams(span: Duration) -> Result<f64> {
    let (from, to) = (bind(3)?, bind(4)?);
    let room = DATAGRAM + 64;
    stream(&from, &to, (BATCH_MAX, BATCH_MAX), room, span)
}

/// As many where the kernel gets 15 as one piece and hands them over so; `None` where it does not.
pub(crate) fn pieces(span: Duration) -> Result<Option<f64>> {
    let (from, mut to) = (bind(3)?, bind(4)?);
    if to.merge().is_err() {
        return Ok(None);
    }
    stream(&from, &to, (PIECE_BYTES_MAX / DATAGRAM, 4), 1 << 16, span).map(Some)
}

fn bind(n: u8) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((address(n), 0).into())?;
    socket.set_buffers(8 << 20);
    Ok(socket)
}

/// Sends `piece` datagrams at once as one where that is less than a whole batch, and receives up to `want`
/// buffers of `room` at a time, with a CRC over each datagram on both sides.
fn stream(
    from: &UdpSocket,
    to: &UdpSocket,
    (piece, want): (usize, usize),
    room: usize,
    span: Duration,
) -> Result<f64> {
    let (stop, bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let payload = vec![7u8; DATAGRAM];
            let mut sum = 0u32;
            let mut batch = [Outgoing::new(to.local(), &payload); BATCH_MAX];
            for (n, datagram) in batch.iter_mut().enumerate() {
                datagram.joined = piece < BATCH_MAX && n % piece > 0;
            }
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..BATCH_MAX {
                    sum = sum.wrapping_add(crc32fast::hash(&payload));
                }
                let _ = from.send(&batch);
            }
            sum
        });
        scope.spawn(|| {
            let mut buffers: Vec<Vec<u8>> = (0..want).map(|_| Vec::with_capacity(room)).collect();
            let mut metas = [None; BATCH_MAX];
            let mut sum = 0u32;
            while !stop.load(Ordering::Relaxed) {
                let count = to.receive(&mut buffers, &mut metas).unwrap_or(0);
                for datagram in buffers.iter().take(count).flat_map(|all| all.chunks(DATAGRAM)) {
                    sum = sum.wrapping_add(crc32fast::hash(datagram));
                    bytes.fetch_add((DATAGRAM - AROUND) as u64, Ordering::Relaxed);
                }
            }
            sum
        });
        let rate = rate_of(&bytes, span);
        stop.store(true, Ordering::Relaxed);
        Ok(rate)
    })
}

/// Bytes per second through one connection, read and written 64 KiB at a time.
pub(crate) fn tcp_stream(span: Duration) -> Result<f64> {
    let (mut from, mut to) = tcp_pair()?;
    to.set_read_timeout(Some(Duration::from_secs(1)))?;
    from.set_write_timeout(Some(Duration::from_secs(1)))?;
    let (stop, bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let payload = vec![7u8; 1 << 16];
            while !stop.load(Ordering::Relaxed) {
                if from.write_all(&payload).is_err() {
                    break;
                }
            }
        });
        scope.spawn(|| {
            let mut buffer = vec![0; 1 << 16];
            while !stop.load(Ordering::Relaxed) {
                let Ok(count) = to.read(&mut buffer) else { break };
                bytes.fetch_add(count as u64, Ordering::Relaxed);
            }
        });
        let rate = rate_of(&bytes, span);
        stop.store(true, Ordering::Relaxed);
        Ok(rate)
    })
}

/// Bytes per second of a copy between two regions like those of the NICs.
pub(crate) fn copy(span: Duration) -> Result<f64> {
    let bytes = IN_FLIGHT * u64::from(MESSAGE);
    let from = HostMem::shareable(bytes as usize)?;
    let to = HostMem::shareable(bytes as usize)?;
    from.populate()?;
    to.populate()?;
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < span {
        let at = (count % IN_FLIGHT) * u64::from(MESSAGE);
        to.copy_from(at, &from, at, u64::from(MESSAGE))?;
        count += 1;
    }
    Ok(count as f64 * f64::from(MESSAGE) / start.elapsed().as_secs_f64())
}

/// Seconds one way of datagrams as long as those of a small WRITE.
pub(crate) fn udp_ping() -> Result<f64> {
    let a = UdpSocket::bind((address(5), 0).into())?;
    let b = UdpSocket::bind((address(6), 0).into())?;
    let payload = vec![7u8; AROUND + SMALL_UDP as usize];
    let stop = AtomicBool::new(false);
    let turn = |socket: &UdpSocket, buffers: &mut [Vec<u8>]| {
        let mut metas = [None; 1];
        while !stop.load(Ordering::Relaxed) {
            if socket.receive(buffers, &mut metas).unwrap_or(0) > 0 {
                return true;
            }
        }
        false
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffers = [Vec::with_capacity(2048)];
            while turn(&b, &mut buffers) {
                let _ = b.send(&[Outgoing::new(a.local(), &payload)]);
            }
        });
        let mut buffers = [Vec::with_capacity(2048)];
        let median = pings(|| {
            a.send(&[Outgoing::new(b.local(), &payload)])?;
            turn(&a, &mut buffers);
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        median
    })
}

/// Seconds one way of as many bytes through a connection, both sides polling.
pub(crate) fn tcp_ping() -> Result<f64> {
    let (mut a, mut b) = tcp_pair()?;
    for stream in [&a, &b] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    let stop = AtomicBool::new(false);
    let turn = |stream: &mut TcpStream| {
        let mut bytes = [0; SMALL_UDP as usize];
        while !stop.load(Ordering::Relaxed) {
            match stream.read(&mut bytes) {
                Ok(count) => return count > 0,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
        false
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while turn(&mut b) {
                let _ = b.write(&[7; SMALL_UDP as usize]);
            }
        });
        let median = pings(|| {
            a.write_all(&[7; SMALL_UDP as usize])?;
            turn(&mut a);
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        median
    })
}

/// Seconds one way of `lines` cache lines in memory that two threads share: the last one says that the others
/// are there. Nothing that talks through memory is faster on these two cores.
pub(crate) fn line_ping(lines: u64) -> Result<f64> {
    const LINE: u64 = 64;
    const BACK: u64 = 4096;

    let mem = HostMem::shareable(2 * BACK as usize)?;
    mem.populate()?;
    let stop = AtomicBool::new(false);
    let say = |at: u64, turn: u64| -> Result<()> {
        for line in (0..lines).rev() {
            mem.store_u64(at + line * LINE, turn)?;
        }
        Ok(())
    };
    let hear = |at: u64, turn: u64| -> Result<bool> {
        while mem.load_u64(at)? < turn {
            if stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
        let mut whole = true;
        for line in 1..lines {
            whole &= mem.load_u64(at + line * LINE)? == turn;
        }
        if whole { Ok(true) } else { Err("a line came late".into()) }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _stay = cores::stay(true);
            let mut turn = 1;
            while matches!(hear(0, turn), Ok(true)) && say(BACK, turn).is_ok() {
                turn += 1;
            }
            stop.store(true, Ordering::Relaxed);
        });
        let _stay = cores::stay(false);
        let mut turn = 0;
        let median = pings(|| {
            turn += 1;
            say(0, turn)?;
            if hear(BACK, turn)? { Ok(()) } else { Err("the other side has ended".into()) }
        });
        stop.store(true, Ordering::Relaxed);
        median
    })
}

/// Half the median of what `ping` takes. Ends early rather than run for ever: on a busy machine two
/// threads that poll take turns.
pub(crate) fn pings(mut ping: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    let mut each = Vec::new();
    while (each.len() as u64) < PINGS && start.elapsed() < PING_SPAN {
        let sent = Instant::now();
        ping()?;
        each.push(sent.elapsed());
    }
    each.sort_unstable();
    let median = each.get(each.len() / 2).ok_or("no ping came back")?;
    Ok(median.as_secs_f64() / 2.0)
}

fn rate_of(bytes: &AtomicU64, span: Duration) -> f64 {
    std::thread::sleep(WARM_UP);
    let (start, before) = (Instant::now(), bytes.load(Ordering::Relaxed));
    std::thread::sleep(span);
    let moved = bytes.load(Ordering::Relaxed) - before;
    moved as f64 / start.elapsed().as_secs_f64()
}

fn tcp_pair() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((address(7), 0))?;
    let from = TcpStream::connect(listener.local_addr()?)?;
    let (to, _) = listener.accept()?;
    Ok((from, to))
}
