//! UDP datagrams in batches, with control over what the kernel puts into the IP header.
//!
//! RoCEv2 checks bits of the IP header that a UDP socket neither sets nor shows:
//!
//! - Sending: a socket that is not connected and has `IP_MTU_DISCOVER` at `IP_PMTUDISC_DO` sends IPv4
//!   identification 0 with "don't fragment" set (ip(7); seen on Linux 6.18). See [`UdpSocket::bind`].
//! - Receiving: a raw socket shows the whole IP header. It needs `CAP_NET_RAW`. See [`RawUdpSocket`].
//!
//! The kernel takes several datagrams for one address as one piece (udp(7), `UDP_SEGMENT`) and may give
//! them so ([`UdpSocket::merge`], `UDP_GRO`). Over IPv4 it counts their identification up, 0, 1, 2, ...
//! (seen on Linux 6.18 behind a TUN device). A receiver on the same host never sees them cut: a UDP socket
//! learns their length, a raw socket gets the piece as if it were one packet of up to 64 KiB.

mod message;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Most datagrams one call sends or receives.
pub const BATCH_MAX: usize = 32;

/// A UDP socket on one address and port, for datagrams of up to 64 KiB.
#[derive(Debug)]
pub struct UdpSocket {
    fd: OwnedFd,
    local: SocketAddr,
    merges: bool,
}

/// What came with a received datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The sender.
    pub from: SocketAddr,
    /// Whether the buffer was too small for it: the rest is lost.
    pub truncated: bool,
    /// Bytes of each of the datagrams that are in the buffer one behind the other, the last may be
    /// shorter; at least 1. Only a socket that merges gets more than one.
    pub segment: usize,
}

/// An IPv4 header without options, and a UDP header.
pub type Headers = [u8; 28];

/// A datagram to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Where to.
    pub to: SocketAddr,
    /// The UDP payload.
    pub payload: &'a [u8],
    /// Whether it goes to the kernel as one piece with the one before, to the same address. All of a
    /// piece but the last are equally long, the last is not longer; together at most
    /// [`PIECE_BYTES_MAX`]. The first of a call begins a piece.
    pub joined: bool,
}

impl<'a> Outgoing<'a> {
    /// A datagram by itself.
    pub const fn new(to: SocketAddr, payload: &'a [u8]) -> Self {
        Self { to, payload, joined: false }
    }
}

/// Most bytes of datagrams that are sent as one piece: what fits one IPv4 packet.
pub const PIECE_BYTES_MAX: usize = 65_535 - 20 - 8;

impl UdpSocket {
    /// A socket on `local`, not connected, never fragmenting, non-blocking.
    ///
    /// # Errors
    /// `EADDRINUSE` where another socket has the address and port, `EADDRNOTAVAIL` where the address is
    /// not this machine's; else what `socket(2)`, `bind(2)` and `setsockopt(2)` say.
    pub fn bind(local: SocketAddr) -> io::Result<Self> {
        let fd = socket(&local, libc::SOCK_DGRAM, 0)?;
        match local {
            SocketAddr::V4(_) => {
                let value = libc::IP_PMTUDISC_DO;
                set_int(&fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, value)?;
            }
            SocketAddr::V6(_) => {
                set_int(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
                let value = libc::IPV6_PMTUDISC_DO;
                set_int(&fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, value)?;
                // Linux rdma_rxe sends RoCEv2 over IPv6 with UDP checksum 0, which the kernel drops
                // unless told otherwise; the packet check of RoCEv2 covers more than the checksum.
                set_int(&fd, libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
            }
        }
        bind(&fd, &local)?;
        let local = std_socket(&fd)?.local_addr()?;
        Ok(Self { fd, local, merges: false })
    }

    /// Takes datagrams that arrived together as one, see [`Received::segment`]: every buffer must have
    /// room for 64 KiB from now on.
    ///
    /// # Errors
    /// `ENOPROTOOPT` where the kernel is older than 5.0.
    pub fn merge(&mut self) -> io::Result<()> {
        set_int(&self.fd, libc::IPPROTO_UDP, libc::UDP_GRO, 1)?;
        self.merges = true;
        Ok(())
    }

    /// The address and port it has.
    pub const fn local(&self) -> SocketAddr {
        self.local
    }

    /// Asks for buffers of `bytes` in both directions; gets as much as the kernel allows.
    pub fn set_buffers(&self, bytes: usize) {
        set_buffers(&self.fd, bytes);
    }

    /// Drops everything that arrives from now on, without an ICMP answer: the socket only holds the
    /// port and sends.
    ///
    /// # Errors
    /// What `setsockopt(2)` says.
    pub fn refuse_all(&self) -> io::Result<()> {
        attach_filter(&self.fd, &[filter(RETURN, 0, 0, 0)])
    }

    /// Sends datagrams, at most [`BATCH_MAX`], and answers how many the kernel took; of a piece it takes
    /// all or none.
    ///
    /// # Errors
    /// What `sendmmsg(2)` says about the first one: `EAGAIN` where the buffer is full, `EMSGSIZE` where
    /// it is longer than the path allows; about a piece also `EINVAL` and `EIO` where the kernel or the
    /// device cannot cut it.
    pub fn send(&self, datagrams: &[Outgoing<'_>]) -> io::Result<usize> {
        message::send(self.fd.as_fd(), datagrams)
    }

    /// Receives datagrams that are there, one into each buffer's capacity, replacing what it held.
    /// Answers how many; `metas` tells about each.
    ///
    /// # Errors
    /// `EAGAIN` where none is there; what `recvmmsg(2)` says.
    pub fn receive(
        &self,
        buffers: &mut [Vec<u8>],
        metas: &mut [Option<Received>],
    ) -> io::Result<usize> {
        message::receive(self.fd.as_fd(), buffers, metas, None, self.merges)
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Receives the UDP datagrams for one IPv4 address and port with their IP headers.
///
/// It sees a copy: the port must be held by a [`UdpSocket`], or the kernel answers the sender that
/// nobody is there.
#[derive(Debug)]
pub struct RawUdpSocket {
    fd: OwnedFd,
}

impl RawUdpSocket {
    /// A raw socket for datagrams to `local` and UDP port `port`.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_RAW`; else what `socket(2)`, `bind(2)` and `setsockopt(2)` say.
    pub fn open(local: Ipv4Addr, port: u16) -> io::Result<Self> {
        let address = SocketAddr::V4(SocketAddrV4::new(local, 0));
        let fd = socket(&address, libc::SOCK_RAW, libc::IPPROTO_UDP)?;
        // The IP header's length in bytes goes to X, then the destination port after it is compared.
        let program = [
            filter(LOAD_HEADER_LEN_TO_X, 0, 0, 0),
            filter(LOAD_HALF_AT_X, 0, 0, 2),
            filter(JUMP_IF_EQUAL, 0, 1, u32::from(port)),
            filter(RETURN, 0, 0, 0x4_0000),
            filter(RETURN, 0, 0, 0),
        ];
        attach_filter(&fd, &program)?;
        bind(&fd, &address)?;
        Ok(Self { fd })
    }

    /// Asks for a receive buffer of `bytes`; gets as much as the kernel allows.
    pub fn set_buffers(&self, bytes: usize) {
        set_buffers(&self.fd, bytes);
    }

    /// Receives packets that are there: the IP and UDP headers into `heads`, what follows into
    /// `buffers`, so that nothing has to be moved to take the headers off. As [`UdpSocket::receive`],
    /// but the sender's port is 0. A packet too short for its headers has no meta; one with IP options
    /// has them where the UDP header is looked for, and its first byte tells.
    ///
    /// # Errors
    /// `EAGAIN` where none is there; what `recvmmsg(2)` says.
    pub fn receive(
        &self,
        buffers: &mut [Vec<u8>],
        metas: &mut [Option<Received>],
        heads: &mut [Headers; BATCH_MAX],
    ) -> io::Result<usize> {
        message::receive(self.fd.as_fd(), buffers, metas, Some(heads), false)
    }
}

impl AsFd for RawUdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket(address: &SocketAddr, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let flags = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a system call on integers.
    let fd: RawFd = unsafe { libc::socket(family, flags, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn bind(fd: &OwnedFd, address: &SocketAddr) -> io::Result<()> {
    let (name, len) = message::encode(address);
    // SAFETY: `name` lives through the call and holds `len` bytes of an address.
    let done = unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&name).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn std_socket(fd: &OwnedFd) -> io::Result<std::net::UdpSocket> {
    Ok(std::net::UdpSocket::from(fd.try_clone()?))
}

fn set_int(fd: &OwnedFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    set_option(fd, level, name, &value)
}

fn set_option<T>(fd: &OwnedFd, level: i32, name: i32, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: `value` points at `len` readable bytes that live through the call.
    let done = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value, len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Both buffers, past the system's limit where the process may; a smaller buffer is no error.
fn set_buffers(fd: &OwnedFd, bytes: usize) {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    for (force, plain) in
        [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
    {
        if set_int(fd, libc::SOL_SOCKET, force, bytes).is_err() {
            let _ = set_int(fd, libc::SOL_SOCKET, plain, bytes);
        }
    }
}

/// Takes datagrams over IPv6 whose checksum is 0 (linux/udp.h).
const UDP_NO_CHECK6_RX: i32 = 102;

// Classic BPF (linux/filter.h): class, size and mode in one number.
const LOAD_HEADER_LEN_TO_X: u16 = 0xb1;
const LOAD_HALF_AT_X: u16 = 0x48;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

const fn filter(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

fn attach_filter(fd: &OwnedFd, program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // The kernel copies the program and does not write to it.
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    set_option(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// The network interface that has `address`, by name.
///
/// # Errors
/// What `getifaddrs(3)` says; `NotFound` where no interface has it.
pub fn interface_of(address: IpAddr) -> io::Result<String> {
    let list = Interfaces::read()?;
    let mut entry = list.first;
    while !entry.is_null() {
        // SAFETY: `entry` is a node of the list that `list` keeps alive.
        let node = unsafe { entry.read() };
        if interface_address(node.ifa_addr) == Some(address) {
            // SAFETY: `ifa_name` is a terminated string of the list that `list` keeps alive.
            let name = unsafe { std::ffi::CStr::from_ptr(node.ifa_name) };
            return Ok(name.to_string_lossy().into_owned());
        }
        entry = node.ifa_next;
    }
    Err(io::ErrorKind::NotFound.into())
}

fn interface_address(name: *const libc::sockaddr) -> Option<IpAddr> {
    if name.is_null() {
        return None;
    }
    // SAFETY: not null, and every address begins with its family.
    let family = i32::from(unsafe { (*name).sa_family });
    match family {
        libc::AF_INET => {
            // SAFETY: the family says that a `sockaddr_in` lies there.
            let v4 = unsafe { name.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that a `sockaddr_in6` lies there.
            let v6 = unsafe { name.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(IpAddr::from(v6.sin6_addr.s6_addr))
        }
        _ => None,
    }
}

/// The list of `getifaddrs(3)`, freed on drop.
struct Interfaces {
    first: *mut libc::ifaddrs,
}

impl Interfaces {
    fn read() -> io::Result<Self> {
        let mut first = std::ptr::null_mut();
        // SAFETY: `first` is where the call stores the list's head.
        let done = unsafe { libc::getifaddrs(&raw mut first) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { first }) }
    }
}

impl Drop for Interfaces {
    fn drop(&mut self) {
        // SAFETY: the list came from `getifaddrs` and is freed once.
        unsafe { libc::freeifaddrs(self.first) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn room(count: usize, bytes: usize) -> Vec<Vec<u8>> {
        (0..count).map(|_| Vec::with_capacity(bytes)).collect()
    }

    fn receive_one(
        mut socket: impl FnMut(&mut [Vec<u8>], &mut [Option<Received>]) -> io::Result<usize>,
    ) -> (Vec<u8>, Received) {
        let (mut buffers, mut metas) = (room(4, 9000), vec![None; 4]);
        for _ in 0..1000 {
            match socket(&mut buffers, &mut metas) {
                Ok(count) if count > 0 => return (buffers.swap_remove(0), metas[0].unwrap()),
                _ => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        }
        panic!("nothing arrived");
    }

    #[test]
    fn batches_arrive_whole_and_in_order() {
        for any in [local(0), "[::1]:0".parse().unwrap()] {
            let Ok(a) = UdpSocket::bind(any) else {
                println!("SKIP IPv6 loopback");
                continue;
            };
            let b = UdpSocket::bind(any).unwrap();
            let payloads: Vec<Vec<u8>> = (0..40).map(|i| vec![i; 100 + usize::from(i)]).collect();
            let datagrams: Vec<_> =
                payloads.iter().map(|payload| Outgoing::new(b.local(), payload)).collect();
            assert_eq!(a.send(&datagrams).unwrap(), BATCH_MAX);
            assert_eq!(a.send(&datagrams[BATCH_MAX..]).unwrap(), 8);
            let mut got = Vec::new();
            while got.len() < 40 {
                let mut buffers = room(BATCH_MAX, 4096);
                let mut metas = [None; BATCH_MAX];
                let Ok(count) = b.receive(&mut buffers, &mut metas) else { continue };
                for (meta, buffer) in metas[..count].iter().zip(buffers.drain(..count)) {
                    let segment = buffer.len();
                    let meta = meta.unwrap();
                    assert_eq!(meta, Received { from: a.local(), truncated: false, segment });
                    got.push(buffer);
                }
            }
            assert_eq!(got, payloads);
        }
    }

    /// Three pieces in one call: to a socket that merges they come as they were sent, to another one cut.
    #[test]
    fn pieces_arrive_merged_or_cut() {
        let lens = [&[100][..], &[1000, 1000, 1000, 7], &[500, 500]];
        for merging in [false, true] {
            let a = UdpSocket::bind(local(0)).unwrap();
            let mut b = UdpSocket::bind(local(0)).unwrap();
            if merging && b.merge().is_err() {
                println!("SKIP UDP_GRO");
                return;
            }
            let payloads: Vec<Vec<Vec<u8>>> = lens
                .iter()
                .enumerate()
                .map(|(n, lens)| {
                    lens.iter().enumerate().map(|(i, len)| vec![(16 * n + i) as u8; *len]).collect()
                })
                .collect();
            let datagrams: Vec<_> = payloads
                .iter()
                .flat_map(|piece| piece.iter().enumerate())
                .map(|(i, payload)| Outgoing { to: b.local(), payload, joined: i > 0 })
                .collect();
            assert_eq!(a.send(&datagrams).unwrap(), datagrams.len());
            let (mut got, mut calls) = (Vec::new(), 0);
            while got.len() < datagrams.len() {
                let (mut buffers, mut metas) = (room(1, 1 << 16), [None]);
                let Ok(1) = b.receive(&mut buffers, &mut metas) else { continue };
                calls += 1;
                let segment = metas[0].unwrap().segment;
                got.extend(buffers[0].chunks(segment).map(<[u8]>::to_vec));
            }
            assert_eq!(got, payloads.concat());
            assert_eq!(calls, if merging { 3 } else { 7 });
        }
    }

    #[test]
    fn a_datagram_too_long_for_its_buffer_says_so() {
        let (a, b) = (UdpSocket::bind(local(0)).unwrap(), UdpSocket::bind(local(0)).unwrap());
        a.send(&[Outgoing::new(b.local(), &[7; 10_000])]).unwrap();
        let (bytes, meta) = receive_one(|buffers, metas| b.receive(buffers, metas));
        assert_eq!((bytes.len(), meta.truncated), (9000, true));
    }

    #[test]
    fn the_loopback_interface_is_found_by_its_address() {
        assert_eq!(interface_of(Ipv4Addr::LOCALHOST.into()).unwrap(), "lo");
        let error = interface_of(Ipv4Addr::new(192, 0, 2, 1).into()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_taken_address_is_refused_by_the_kernel() {
        let first = UdpSocket::bind(local(0)).unwrap();
        let error = UdpSocket::bind(first.local()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EADDRINUSE));
    }

    /// What RoCEv2 rests on: identification 0 and "don't fragment", packet after packet.
    #[test]
    fn an_unconnected_socket_sends_identification_zero() {
        let sender = UdpSocket::bind(local(0)).unwrap();
        let holder = UdpSocket::bind(local(0)).unwrap();
        holder.refuse_all().unwrap();
        let raw = match RawUdpSocket::open(Ipv4Addr::LOCALHOST, holder.local().port()) {
            Ok(raw) => raw,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                println!("SKIP CAP_NET_RAW");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        for i in 0..5 {
            // Only the second of the two goes to the port that the raw socket watches.
            for to in [sender.local(), holder.local()] {
                sender.send(&[Outgoing::new(to, &[i; 64])]).unwrap();
            }
            let mut heads = [[0; size_of::<Headers>()]; BATCH_MAX];
            let (packet, _) = receive_one(|buffers, metas| raw.receive(buffers, metas, &mut heads));
            assert_eq!(packet, [i; 64]);
            assert_eq!(heads[0][4..8], [0, 0, 0x40, 0], "identification and fragment bits");
            assert_eq!(heads[0][22..24], holder.local().port().to_be_bytes());
        }
        let mut buffers = [Vec::with_capacity(100)];
        let error = holder.receive(&mut buffers, &mut [None]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "the holder hears nothing");
    }
}
