//! Messages of `sendmmsg(2)` and `recvmmsg(2)`.
//!
//! What a call asks the kernel with takes longer to prepare than a small datagram to send or receive:
//! whoever has few does not pay for many, and one goes by a call of its own, which the kernel does less
//! for.

use std::io;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{BATCH_MAX, Headers, Outgoing, Received};

const FEW: usize = 2;

/// Sends datagrams, at most [`BATCH_MAX`]; answers how many were taken.
pub(super) fn send(fd: BorrowedFd<'_>, datagrams: &[Outgoing<'_>]) -> io::Result<usize> {
    match datagrams {
        [] => Ok(0),
        [one] => send_one(fd, one),
        [_, _] => send_many::<FEW>(fd, datagrams),
        _ => send_many::<BATCH_MAX>(fd, datagrams),
    }
}

fn send_one(fd: BorrowedFd<'_>, datagram: &Outgoing<'_>) -> io::Result<usize> {
    let (name, len) = encode(&datagram.to);
    // SAFETY: the payload is borrowed by `datagram`, and `name` holds `len` bytes of an address on this
    // stack frame; both outlive the call, which only reads them and keeps neither.
    let sent = unsafe {
        libc::sendto(
            fd.as_raw_fd(),
            datagram.payload.as_ptr().cast(),
            datagram.payload.len(),
            libc::MSG_DONTWAIT,
            std::ptr::from_ref(&name).cast(),
            len,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(1) }
}

fn send_many<const MAX: usize>(
    fd: BorrowedFd<'_>,
    datagrams: &[Outgoing<'_>],
) -> io::Result<usize> {
    let datagrams = datagrams.get(..MAX).unwrap_or(datagrams);
    let mut vectors = [EMPTY_VECTOR; MAX];
    for (vector, datagram) in vectors.iter_mut().zip(datagrams) {
        // The kernel only reads through a pointer of a message to be sent.
        vector.iov_base = datagram.payload.as_ptr().cast_mut().cast();
        vector.iov_len = datagram.payload.len();
    }
    let mut names = [EMPTY_NAME; MAX];
    let mut controls = [Control::EMPTY; MAX];
    let mut headers = [EMPTY_HEADER; MAX];
    let (mut messages, mut first) = (0, 0);
    while let Some(datagram) = datagrams.get(first) {
        let more = datagrams.iter().skip(first + 1).take_while(|next| next.joined).count();
        let (name, len) = encode(&datagram.to);
        names[messages] = name;
        let header = &mut headers[messages].msg_hdr;
        *header = message(&mut names[messages], len, &mut vectors[first..=first + more]);
        if more > 0 {
            let control = &mut controls[messages];
            *control = Control::segment(datagram.payload.len());
            header.msg_control = std::ptr::from_mut(control).cast();
            header.msg_controllen = size_of::<Control>() as _;
        }
        first += more + 1;
        messages += 1;
    }
    // SAFETY: the first `messages` headers point at names, control data and vectors that live on this stack
    // frame, and the vectors at payloads borrowed by `datagrams`; all outlive the call, which keeps none.
    let sent = unsafe {
        libc::sendmmsg(
            fd.as_raw_fd(),
            headers.as_mut_ptr(),
            messages as libc::c_uint,
            libc::MSG_DONTWAIT,
        )
    };
    let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
    Ok(headers.iter().take(sent).map(|header| header.msg_hdr.msg_iovlen).sum())
}

/// Receives datagrams that are there, one into each buffer; with `heads` their first bytes go there.
/// `merges`: whether the socket merges datagrams and says so.
pub(super) fn receive(
    fd: BorrowedFd<'_>,
    buffers: &mut [Vec<u8>],
    metas: &mut [Option<Received>],
    heads: Option<&mut [Headers; BATCH_MAX]>,
    merges: bool,
) -> io::Result<usize> {
    match buffers.len() {
        0 | 1 => receive_many::<1>(fd, buffers, metas, heads, merges),
        2..=FEW => receive_many::<FEW>(fd, buffers, metas, heads, merges),
        _ => receive_many::<BATCH_MAX>(fd, buffers, metas, heads, merges),
    }
}

fn receive_many<const MAX: usize>(
    fd: BorrowedFd<'_>,
    buffers: &mut [Vec<u8>],
    metas: &mut [Option<Received>],
    mut heads: Option<&mut [Headers; BATCH_MAX]>,
    merges: bool,
) -> io::Result<usize> {
    let count = buffers.len().min(metas.len()).min(MAX);
    let mut names = [EMPTY_NAME; MAX];
    let mut controls = [Control::EMPTY; MAX];
    let mut vectors = [[EMPTY_VECTOR; 2]; MAX];
    let mut headers = [EMPTY_HEADER; MAX];
    let head_len = if heads.is_some() { size_of::<Headers>() } else { 0 };
    // One vector where one is enough: the kernel has a shorter way for it.
    let first = usize::from(heads.is_none());
    for (i, buffer) in buffers.iter_mut().take(count).enumerate() {
        buffer.clear();
        if let Some(heads) = &mut heads {
            vectors[i][0].iov_base = heads[i].as_mut_ptr().cast();
            vectors[i][0].iov_len = head_len;
        }
        vectors[i][1].iov_base = buffer.as_mut_ptr().cast();
        vectors[i][1].iov_len = buffer.capacity();
        let header = &mut headers[i].msg_hdr;
        *header = message(&mut names[i], NAME_LEN, &mut vectors[i][first..]);
        if merges {
            header.msg_control = std::ptr::from_mut(&mut controls[i]).cast();
            header.msg_controllen = size_of::<Control>() as _;
        }
    }
    let received = match count {
        0 => 0,
        1 => receive_first(fd, &mut headers[0])?,
        // SAFETY: the first `count` headers point at names, control data and vectors on this stack frame,
        // and the vectors at a whole element of `heads` where there are two, and at the whole capacity
        // of buffers, all borrowed exclusively; all outlive the call, which keeps none.
        _ => usize::try_from(unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                headers.as_mut_ptr(),
                count as libc::c_uint,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        })
        .map_err(|_| io::Error::last_os_error())?,
    };
    for (i, buffer) in buffers.iter_mut().take(received).enumerate() {
        let all = headers[i].msg_len as usize;
        let len = all.saturating_sub(head_len).min(buffer.capacity());
        // SAFETY: of the `msg_len` bytes the kernel wrote, those behind the first `head_len` stand from
        // the buffer's start on, at most its capacity.
        unsafe { buffer.set_len(len) };
        let header = &headers[i].msg_hdr;
        let truncated = header.msg_flags & libc::MSG_TRUNC != 0;
        let whole = decode(&names[i]).filter(|_| all >= head_len);
        // Without a control message the kernel leaves none of its bytes used.
        let told = merges && header.msg_controllen > 0;
        let segment = controls[i].merged().filter(|_| told).unwrap_or(len).max(1);
        metas[i] = whole.map(|from| Received { from, truncated, segment });
    }
    Ok(received)
}

/// Receives one message as `recvmmsg` would.
fn receive_first(fd: BorrowedFd<'_>, header: &mut libc::mmsghdr) -> io::Result<usize> {
    // SAFETY: as for `recvmmsg` above, of which this is the first header.
    let bytes =
        unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header.msg_hdr, libc::MSG_DONTWAIT) };
    header.msg_len = u32::try_from(bytes).map_err(|_| io::Error::last_os_error())?;
    Ok(1)
}

/// One control message (cmsg(3)): a header and a number.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control {
    header: libc::cmsghdr,
    value: [u8; 8],
}

impl Control {
    const EMPTY: Self = {
        // SAFETY: integers, for which zero is a value.
        unsafe { MaybeUninit::zeroed().assume_init() }
    };

    /// The kernel is to cut what it gets into datagrams of this length.
    fn segment(bytes: usize) -> Self {
        let mut control = Self::EMPTY;
        control.header.cmsg_len = (size_of::<libc::cmsghdr>() + size_of::<u16>()) as _;
        control.header.cmsg_level = libc::SOL_UDP;
        control.header.cmsg_type = libc::UDP_SEGMENT;
        // A length beyond 16 bits is none of a datagram: the kernel refuses 0.
        let bytes = u16::try_from(bytes).unwrap_or(0);
        control.value[..2].copy_from_slice(&bytes.to_ne_bytes());
        control
    }

    /// Of what length the datagrams are that the kernel has merged.
    fn merged(&self) -> Option<usize> {
        let Self { header, value: [a, b, c, d, ..] } = *self;
        let merged = header.cmsg_level == libc::SOL_UDP && header.cmsg_type == libc::UDP_GRO;
        usize::try_from(i32::from_ne_bytes([a, b, c, d])).ok().filter(|_| merged)
    }
}

/// An address of either family: a `sockaddr_in6` also has room for a `sockaddr_in`, and is a quarter of a
/// `sockaddr_storage`, which would have to be cleared for every call.
const EMPTY_NAME: libc::sockaddr_in6 = libc::sockaddr_in6 {
    sin6_family: 0,
    sin6_port: 0,
    sin6_flowinfo: 0,
    sin6_addr: libc::in6_addr { s6_addr: [0; 16] },
    sin6_scope_id: 0,
};
const NAME_LEN: libc::socklen_t = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
const EMPTY_VECTOR: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
const EMPTY_HEADER: libc::mmsghdr = {
    // SAFETY: integers and pointers, for which zero is a value.
    unsafe { MaybeUninit::zeroed().assume_init() }
};

fn message(
    name: &mut libc::sockaddr_in6,
    name_len: libc::socklen_t,
    vectors: &mut [libc::iovec],
) -> libc::msghdr {
    let mut header = EMPTY_HEADER.msg_hdr;
    header.msg_name = std::ptr::from_mut(name).cast();
    header.msg_namelen = name_len;
    header.msg_iov = vectors.as_mut_ptr();
    header.msg_iovlen = vectors.len() as _;
    header
}

/// An address of either family as the kernel takes it, and its length.
pub(super) fn encode(address: &SocketAddr) -> (libc::sockaddr_in6, libc::socklen_t) {
    match address {
        SocketAddr::V4(v4) => {
            let v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            let mut name = EMPTY_NAME;
            // SAFETY: a `sockaddr_in6` is larger than a `sockaddr_in` and as aligned.
            unsafe { std::ptr::from_mut(&mut name).cast::<libc::sockaddr_in>().write(v4) };
            (name, size_of::<libc::sockaddr_in>() as libc::socklen_t)
        }
        SocketAddr::V6(v6) => {
            let name = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            (name, NAME_LEN)
        }
    }
}

fn decode(name: &libc::sockaddr_in6) -> Option<SocketAddr> {
    match i32::from(name.sin6_family) {
        libc::AF_INET => {
            // SAFETY: the family says that a `sockaddr_in`, plain bytes and smaller, lies there.
            let v4 = unsafe { std::ptr::from_ref(name).cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(v4.sin_port))))
        }
        libc::AF_INET6 => {
            let (ip, port) = (name.sin6_addr.s6_addr.into(), u16::from_be(name.sin6_port));
            Some(SocketAddr::V6(SocketAddrV6::new(ip, port, 0, name.sin6_scope_id)))
        }
        _ => None,
    }
}
