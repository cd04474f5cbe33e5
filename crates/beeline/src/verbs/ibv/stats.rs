//! Counters of a port, as its driver shows them in sysfs.

use std::path::Path;

use beeline_core::rc::Counters;

/// What a port of a device counted.
pub(super) fn counters(device: &str, port: u8) -> Counters {
    let base = format!("/sys/class/infiniband/{device}/ports/{port}");
    read(|name| {
        ["hw_counters", "counters"].iter().find_map(|folder| {
            let path = Path::new(&base).join(folder).join(name);
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        })
    })
}

/// Names of `rdma_rxe`, then of mlx5 and others; the first that is there counts.
fn read(find: impl Fn(&str) -> Option<u64>) -> Counters {
    let first = |names: &[&str]| names.iter().find_map(|name| find(name)).unwrap_or(0);
    Counters {
        received: first(&["rcvd_pkts", "port_rcv_packets"]),
        sent: first(&["sent_pkts", "port_xmit_packets"]),
        icrc_errors: first(&["rx_icrc_encapsulated", "rx_icrc_encapsulated_errors"]),
        congestion_notices: first(&["rp_cnp_handled", "np_cnp_sent"]),
        duplicates: first(&["duplicate_request"]),
        gaps: first(&["out_of_seq_request", "out_of_sequence"]),
        repeats: first(&["completer_retry_err", "packet_seq_err"]),
        timeouts: first(&["local_ack_timeout_err", "retry_exceeded_err"]),
        rnr_sent: first(&["send_rnr_err", "out_of_buffer"]),
        rnr_received: first(&["rcvd_rnr_err", "rnr_nak_retry_err"]),
        ..Counters::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_driver_has_its_own_names() {
        let of = |known: &'static [(&str, u64)]| {
            read(|name| known.iter().find(|(known, _)| *known == name).map(|(_, count)| *count))
        };
        let rxe = of(&[("rcvd_pkts", 1), ("sent_pkts", 2), ("duplicate_request", 3)]);
        assert_eq!((rxe.received, rxe.sent, rxe.duplicates, rxe.gaps), (1, 2, 3, 0));
        let mlx5 = of(&[("port_rcv_packets", 4), ("out_of_sequence", 5), ("rnr_nak_retry_err", 6)]);
        assert_eq!((mlx5.received, mlx5.gaps, mlx5.rnr_received), (4, 5, 6));
    }
}
