//! The invariant CRC: 32 bits over everything of a packet that no router changes (IBA 7.8.1, A17.3.3).
//!
//! The IP and UDP headers are covered too, with the fields that change on the way set to ones. A user
//! socket neither chooses nor sees the IPv4 identification, so both directions have a rule of their own:
//!
//! - sending: the link makes the kernel use identification 0 (`IP_PMTUDISC_DO`, unconnected socket);
//! - receiving through a UDP socket: the identification is hidden, but CRC is linear, so the 16 bits that
//!   make the check come out can be computed. What is left of the check is 16 bits strong.
//!
//! Where the kernel cuts one large datagram into packets it counts the identification up from that 0; the
//! packets, closed for 0, are closed anew for their place in it by [`Renumbering`], without a look at
//! their payload.

use core::net::IpAddr;

/// The UDP port of RoCEv2 (IBA A17.3.1).
pub const UDP_PORT: u16 = 4791;

/// Length of the ICRC in bytes.
pub const ICRC_LEN: usize = 4;

/// The addresses of a datagram and what the link knows of its IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Sender. Of the same family as `dst`.
    pub src: IpAddr,
    /// Receiver.
    pub dst: IpAddr,
    /// UDP source port; the destination port is [`UDP_PORT`].
    pub src_port: u16,
    /// IPv4 identification and fragment flags; of no meaning for IPv6.
    pub identification: Identification,
}

/// What is known of the IPv4 identification of a datagram, whose "don't fragment" bit is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identification {
    /// The 16 bits.
    Known(u16),
    /// The socket does not tell.
    Hidden,
    /// There is no IP header: the packet goes through memory that two processes of one host share.
    /// Nothing on the way can change it, so it carries no check; see [`super::packet::seal`].
    Absent,
}

impl Path {
    /// The way back: sender and receiver exchanged.
    #[must_use]
    pub const fn reversed(self) -> Self {
        Self { src: self.dst, dst: self.src, ..self }
    }
}

/// How strong a check was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    /// All 32 bits.
    Full,
    /// 16 bits; the other 16 went into finding the hidden identification.
    Half,
}

/// The ICRC of a packet: `body` is everything from the BTH up to the padding.
pub fn icrc(path: &Path, body: &[u8]) -> [u8; ICRC_LEN] {
    let identification = match path.identification {
        Identification::Known(identification) => identification,
        Identification::Hidden => 0,
        Identification::Absent => return [0; ICRC_LEN],
    };
    compute(path, identification, body).to_le_bytes()
}

/// Checks the ICRC at the end of a UDP payload. `None` when it does not fit.
pub fn verify(path: &Path, datagram: &[u8]) -> Option<Strength> {
    let (body, sent) = datagram.split_last_chunk::<ICRC_LEN>()?;
    let sent = u32::from_le_bytes(*sent);
    match (path.dst, path.identification) {
        (IpAddr::V4(_), Identification::Hidden) => {
            let difference = compute(path, 0, body) ^ sent;
            // What this software sends, unless the kernel cut it.
            if difference == 0 {
                return Some(Strength::Half);
            }
            let found = times(difference, power(&INVERSES, behind_identification(body.len())));
            (found >> 16 == 0).then_some(Strength::Half)
        }
        (_, Identification::Known(identification)) => {
            (compute(path, identification, body) == sent).then_some(Strength::Full)
        }
        (IpAddr::V6(_), Identification::Hidden) => {
            (compute(path, 0, body) == sent).then_some(Strength::Full)
        }
        (_, Identification::Absent) => Some(Strength::Full),
    }
}

/// What the identification of a datagram of a certain length weighs in its ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renumbering {
    len: usize,
    weight: u32,
}

impl Renumbering {
    /// For datagrams of `len` bytes, BTH to ICRC.
    pub fn of_len(len: usize) -> Self {
        let body = len.saturating_sub(ICRC_LEN);
        Self { len, weight: power(&POWERS, behind_identification(body)) }
    }

    /// The length it is for.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it is for datagrams of nothing.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the ICRC of a datagram that was closed for identification `from` that for `to`. Leaves a
    /// datagram of another length as it is.
    pub fn apply(&self, datagram: &mut [u8], from: u16, to: u16) {
        if datagram.len() != self.len {
            return;
        }
        let Some(last) = datagram.last_chunk_mut::<ICRC_LEN>() else { return };
        // The first byte on the wire is the lowest of the register.
        let changed = u32::from((from ^ to).swap_bytes());
        let crc = u32::from_le_bytes(*last) ^ times(changed, self.weight);
        *last = crc.to_le_bytes();
    }
}

/// Bits that the check goes on for after it has taken the identification in: the identification's two
/// bytes are followed by the rest of the IP header (14), the UDP header (8) and the body; undoing two more
/// bytes lays them bare in the lower half.
const fn behind_identification(body: usize) -> u64 {
    8 * (14 + 8 + body as u64 + 2)
}

fn compute(path: &Path, identification: u16, body: &[u8]) -> u32 {
    let udp_len = (8 + body.len() + ICRC_LEN) as u16;
    // Everything that is masked, in one piece: many short updates would cost more than the payload.
    let mut head = Masked { bytes: [0; MASKED_MAX], len: 0 };
    // Eight bytes of ones stand for the InfiniBand local route header (A17.3.3).
    head.put(&[0xff; 8]);
    match (path.src, path.dst) {
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            // Traffic class, flow label and hop limit are masked.
            head.put(&[0x6f, 0xff, 0xff, 0xff]);
            head.put(&udp_len.to_be_bytes());
            head.put(&[17, 0xff]);
            head.put(&src.octets());
            head.put(&dst.octets());
        }
        (src, dst) => {
            let v4 = |ip: IpAddr| match ip {
                IpAddr::V4(v4) => v4.octets(),
                // Families never mix in a path that a link made; such a packet fails the check.
                IpAddr::V6(_) => [0; 4],
            };
            // Type of service, time to live and header checksum are masked.
            head.put(&[0x45, 0xff]);
            head.put(&udp_len.wrapping_add(20).to_be_bytes());
            head.put(&identification.to_be_bytes());
            head.put(&[0x40, 0, 0xff, 17, 0xff, 0xff]);
            head.put(&v4(src));
            head.put(&v4(dst));
        }
    }
    head.put(&path.src_port.to_be_bytes());
    head.put(&UDP_PORT.to_be_bytes());
    head.put(&udp_len.to_be_bytes());
    head.put(&[0xff, 0xff]);
    let rest = match body.split_first_chunk::<5>() {
        Some((&[b0, b1, b2, b3, _], rest)) => {
            // The congestion byte of the BTH is masked (A17.3.3, "resv8a").
            head.put(&[b0, b1, b2, b3, 0xff]);
            rest
        }
        None => body,
    };
    let mut crc = crc32fast::Hasher::new();
    crc.update(head.bytes.get(..head.len).unwrap_or(&head.bytes));
    crc.update(rest);
    crc.finalize()
}

/// Ones, an IPv6 header, a UDP header, and the start of a BTH.
const MASKED_MAX: usize = 8 + 40 + 8 + 5;

struct Masked {
    bytes: [u8; MASKED_MAX],
    len: usize,
}

impl Masked {
    /// Appends `from`; what is put together above always fits.
    fn put(&mut self, from: &[u8]) {
        let end = self.len + from.len();
        if let Some(into) = self.bytes.get_mut(self.len..end) {
            into.copy_from_slice(from);
            self.len = end;
        }
    }
}

/// CRC-32 polynomial, least significant bit first.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// Product of two residues modulo the polynomial; bit 31 is the coefficient of x^0.
const fn times(mut a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut i = 0;
    // Without branches: the bits are as good as random, and each wrong guess costs more than the rest.
    while i < 32 {
        product ^= b & (0_u32.wrapping_sub(a >> 31));
        b = (b >> 1) ^ (POLYNOMIAL & 0_u32.wrapping_sub(b & 1));
        a <<= 1;
        i += 1;
    }
    product
}

/// x, x^2, x^4, ...
const POWERS: [u32; 20] = squares(1 << 30);

/// What divides by them. x^-1 is one step of the shift register, undone from x^0.
const INVERSES: [u32; 20] = squares((((1 << 31) ^ POLYNOMIAL) << 1) | 1);

const fn squares(first: u32) -> [u32; 20] {
    let mut powers = [first; 20];
    let mut i = 1;
    while i < 20 {
        powers[i] = times(powers[i - 1], powers[i - 1]);
        i += 1;
    }
    powers
}

/// The first of `squares` to the power of `bits`, up to 2^20 - 1 (more than the bits of any datagram).
fn power(squares: &[u32; 20], bits: u64) -> u32 {
    let mut power = 1 << 31;
    for (i, square) in squares.iter().enumerate() {
        if bits >> i & 1 != 0 {
            power = times(power, *square);
        }
    }
    power
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    /// Published packets: the bytes from the BTH on, and the ICRC as it travelled.
    ///
    /// The first is a UC SEND, the second a congestion notification from a ConnectX-4 Lx; both stand in
    /// scapy's test file `test/contrib/roce.uts`.
    fn published() -> [(Path, Vec<u8>, [u8; 4]); 2] {
        let path = |src: [u8; 4], dst: [u8; 4], src_port, identification| Path {
            src: src.into(),
            dst: dst.into(),
            src_port,
            identification: Identification::Known(identification),
        };
        let mut send = alloc::vec![0x24, 0x60, 0xff, 0xff, 0, 0, 0, 211, 0, 207, 21, 0x10];
        // Sequence number 13571856.
        send[9..12].copy_from_slice(&13_571_856u32.to_be_bytes()[1..]);
        send.extend(b"F0\x81\x8b\xe2\x895\xd9\x0e\x9a\x95PT\x01\xbe\x88^P\x00\x00");
        let mut notice = alloc::vec![0x81, 0, 0xff, 0xff, 0x40, 0, 1, 0x18];
        notice.extend([0; 20]);
        [
            (path([192, 168, 0, 7], [192, 168, 0, 7], 49152, 1144), send, [0x78, 0xf3, 0x53, 0xf3]),
            (path([10, 0, 17, 1], [10, 0, 18, 1], 0, 0x718c), notice, [0x82, 0xfd, 0x00, 0x2a]),
        ]
    }

    #[test]
    fn the_published_packets_come_out() {
        for (path, body, expected) in published() {
            assert_eq!(icrc(&path, &body), expected);
        }
    }

    #[test]
    fn a_hidden_identification_is_found_whatever_it_is() {
        for (path, mut body, _) in published() {
            for extra in [0, 1, 4, 1024, 4096] {
                body.resize(body.len() + extra, 0x5a);
                for identification in [0, 1, 0x8000, 0xffff, 0x1234] {
                    let known =
                        Path { identification: Identification::Known(identification), ..path };
                    let hidden = Path { identification: Identification::Hidden, ..path };
                    let mut datagram = body.clone();
                    datagram.extend(icrc(&known, &body));
                    assert_eq!(verify(&known, &datagram), Some(Strength::Full));
                    assert_eq!(verify(&hidden, &datagram), Some(Strength::Half));
                }
            }
        }
    }

    #[test]
    fn a_packet_closed_anew_is_as_if_closed_for_its_number() {
        for (path, mut body, _) in published() {
            for extra in [0, 4, 256, 4096] {
                body.resize(body.len() + extra, 0xa5);
                for (from, to) in [(0, 0), (0, 1), (7, 31), (0x1234, 0xfffe)] {
                    let of = |number| {
                        let identification = Identification::Known(number);
                        let mut datagram = body.clone();
                        datagram.extend(icrc(&Path { identification, ..path }, &body));
                        datagram
                    };
                    let mut datagram = of(from);
                    let renumbering = Renumbering::of_len(datagram.len());
                    renumbering.apply(&mut datagram, from, to);
                    assert_eq!(datagram, of(to), "{from} to {to}, {} bytes", datagram.len());
                    datagram.push(0);
                    let before = datagram.clone();
                    renumbering.apply(&mut datagram, to, from);
                    assert_eq!(datagram, before, "another length is left alone");
                }
            }
        }
        let mut short = [1, 2, 3];
        Renumbering::of_len(3).apply(&mut short, 0, 1);
        assert_eq!(short, [1, 2, 3]);
    }

    #[test]
    fn a_changed_bit_is_seen_by_the_full_check_and_nearly_always_by_the_half() {
        let (path, body, _) = &published()[0];
        let mut datagram = body.clone();
        datagram.extend(icrc(path, body));
        let hidden = Path { identification: Identification::Hidden, ..*path };
        let mut missed = 0;
        for bit in 0..datagram.len() * 8 {
            let mut changed = datagram.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            // The congestion byte is not covered.
            let covered = bit / 8 != 4;
            assert_eq!(verify(path, &changed).is_none(), covered, "bit {bit}");
            missed += usize::from(covered && verify(&hidden, &changed).is_some());
        }
        assert_eq!(missed, 0, "no single bit has the pattern of an identification");
        assert_eq!(verify(path, &datagram[..3]), None);
    }

    #[test]
    fn both_addresses_and_the_port_are_covered() {
        let (path, body, _) = &published()[0];
        let mut datagram = body.clone();
        datagram.extend(icrc(path, body));
        for other in [
            Path { src: [192, 168, 0, 8].into(), ..*path },
            Path { dst: [192, 168, 0, 8].into(), ..*path },
            Path { src_port: 1, ..*path },
        ] {
            assert_eq!(verify(&other, &datagram), None);
        }
    }
}
