//! Traces of a NIC's datagrams that packet dissectors read: pcap with raw IP packets.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::IpAddr;
use std::path::Path as FilePath;
use std::time::{SystemTime, UNIX_EPOCH};

use beeline_core::roce::{Identification, Path, UDP_PORT};

/// Packets begin with an IPv4 or IPv6 header (tcpdump's list of link types).
const LINKTYPE_RAW: u32 = 101;

/// A trace being written.
#[derive(Debug)]
pub(in super::super) struct Pcap {
    file: BufWriter<File>,
}

impl Pcap {
    pub(in super::super) fn create(path: &FilePath) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        // Magic of nanosecond stamps, version 2.4, no correction, snap length, link type.
        for word in [0xa1b2_3c4d, 0x0004_0002, 0, 0, 0x4_0000, LINKTYPE_RAW] {
            file.write_all(&u32::to_le_bytes(word))?;
        }
        Ok(Self { file })
    }

    /// Writes one datagram with the headers it travels under.
    pub(in super::super) fn write(&mut self, path: &Path, datagram: &[u8]) -> io::Result<()> {
        let headers = headers(path, datagram);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let len = (headers.len() + datagram.len()) as u32;
        for word in [now.as_secs() as u32, now.subsec_nanos(), len, len] {
            self.file.write_all(&word.to_le_bytes())?;
        }
        self.file.write_all(&headers)?;
        self.file.write_all(datagram)
    }

    pub(in super::super) fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// IP and UDP headers. The UDP checksum is left out (zero) over IPv4, where that is allowed; over IPv6
/// it is not (RFC 8200, 8.1).
fn headers(path: &Path, datagram: &[u8]) -> Vec<u8> {
    let udp_len = (8 + datagram.len()) as u16;
    let mut udp_sum = 0;
    let mut bytes = Vec::with_capacity(48);
    match (path.src, path.dst) {
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            bytes.extend_from_slice(&[0x60, 0, 0, 0]);
            bytes.extend_from_slice(&udp_len.to_be_bytes());
            bytes.extend_from_slice(&[17, 64]);
            bytes.extend_from_slice(&src.octets());
            bytes.extend_from_slice(&dst.octets());
            let ports = [path.src_port.to_be_bytes(), UDP_PORT.to_be_bytes()].concat();
            let pseudo = [&udp_len.to_be_bytes(), &[0, 17][..], &ports, &udp_len.to_be_bytes()];
            let sum = [&src.octets(), &dst.octets(), pseudo.concat().as_slice(), datagram].concat();
            // A sum of zero is written as its other form: zero would say that there is none.
            udp_sum = Some(checksum(&sum)).filter(|sum| *sum != 0).unwrap_or(0xffff);
        }
        (src, dst) => {
            let octets = |ip: IpAddr| match ip {
                IpAddr::V4(v4) => v4.octets(),
                IpAddr::V6(_) => [0; 4],
            };
            let identification = match path.identification {
                Identification::Known(identification) => identification,
                Identification::Hidden | Identification::Absent => 0,
            };
            bytes.extend_from_slice(&[0x45, 0]);
            bytes.extend_from_slice(&udp_len.wrapping_add(20).to_be_bytes());
            bytes.extend_from_slice(&identification.to_be_bytes());
            bytes.extend_from_slice(&[0x40, 0, 64, 17, 0, 0]);
            bytes.extend_from_slice(&octets(src));
            bytes.extend_from_slice(&octets(dst));
            let sum = checksum(&bytes);
            if let Some(field) = bytes.get_mut(10..12) {
                field.copy_from_slice(&sum.to_be_bytes());
            }
        }
    }
    bytes.extend_from_slice(&path.src_port.to_be_bytes());
    bytes.extend_from_slice(&UDP_PORT.to_be_bytes());
    bytes.extend_from_slice(&udp_len.to_be_bytes());
    bytes.extend_from_slice(&udp_sum.to_be_bytes());
    bytes
}

/// The internet checksum (RFC 1071).
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks(2).map(|word| match word {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        [high] => u32::from(*high) << 8,
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ip_checksum_comes_out() {
        // The example of RFC 1071's successors: a header whose checksum is b861.
        let header = [
            0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0,
            0xc7,
        ];
        assert_eq!(checksum(&header), 0xb861);
    }

    #[test]
    fn a_trace_has_its_headers_and_lengths() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("trace.pcap");
        let mut pcap = Pcap::create(&file).unwrap();
        let path = Path {
            src: [10, 0, 0, 1].into(),
            dst: [10, 0, 0, 2].into(),
            src_port: UDP_PORT,
            identification: Identification::Known(0),
        };
        pcap.write(&path, &[7; 16]).unwrap();
        pcap.flush().unwrap();
        let bytes = std::fs::read(file).unwrap();
        assert_eq!(bytes.len(), 24 + 16 + 20 + 8 + 16);
        assert_eq!(bytes[20..24], 101u32.to_le_bytes());
        assert_eq!(bytes[32..36], 44u32.to_le_bytes());
        assert_eq!(bytes[40 + 2..40 + 4], [0, 44]);
        assert_eq!(checksum(&bytes[40..60]), 0);
    }
}
