//! Traces, judged by a dissector that is not ours.

use std::path::Path;
use std::process::Command;

use super::*;

/// What guesses from a payload what it may be, and complains where the guess was wrong.
const GUESSES: [&str; 4] = ["rpcordma", "smb_direct", "iser", "nvme-rdma"];

/// `tshark` on `trace`, with `args`; `None` where there is none.
fn tshark(trace: &Path, args: &[&str]) -> Option<String> {
    let guesses = GUESSES.iter().flat_map(|guess| ["--disable-protocol", guess]);
    let out = Command::new("tshark").args(guesses).arg("-r").arg(trace).args(args).output().ok()?;
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Wireshark knows every packet as RoCEv2 and has nothing to say against any, over both families.
#[test]
fn a_dissector_has_no_complaint() {
    let folder = tempfile::tempdir().unwrap();
    for (n, local) in
        [[10, 0, 0, 1].into(), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1])].into_iter().enumerate()
    {
        let trace = folder.path().join(format!("{n}.pcap"));
        let other = match local {
            IpAddr::V4(_) => IpAddr::from([10, 0, 0, 2]),
            IpAddr::V6(_) => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 2]),
        };
        let options = SoftOptions::new(local).mtu(Mtu::MIN).pcap(&trace);
        let (a, b) = Nic::pair(options, SoftOptions::new(other).mtu(Mtu::MIN)).unwrap();
        let (a, b) = joined(&a, &b, 8 << 20);
        one_of_each(&a, &b);
        let counters = a.context.counters();
        // A trace may be behind by what arrives after the last completion.
        let packets = counters.sent + counters.received;
        drop((a, b));
        let Some(complaints) =
            tshark(&trace, &["-o", "udp.check_checksum:TRUE", "-Y", "_ws.malformed || _ws.expert"])
        else {
            println!("SKIP tshark");
            return;
        };
        assert_eq!(complaints, "", "complaints about {local}");
        let known = tshark(&trace, &["-Y", "infiniband"]).unwrap().lines().count() as u64;
        let all = tshark(&trace, &[]).unwrap().lines().count() as u64;
        assert_eq!(known, all, "packets known over {local}");
        assert!(all >= packets && packets > 40, "{all} of {packets}");
        let opcodes = tshark(&trace, &["-T", "fields", "-e", "infiniband.bth.opcode"]).unwrap();
        for opcode in OPCODES {
            assert!(opcodes.lines().any(|line| line == opcode.to_string()), "no opcode {opcode}");
        }
    }
}

/// SEND and WRITE in all their places, READ and atomics with their answers, ACK.
const OPCODES: [u8; 20] = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20];

fn one_of_each(a: &Side, b: &Side) {
    let remote = b.mr.remote_at(0);
    let receive = || {
        b.qp.post_recv(RecvWr { id: 1, sges: vec![b.mr.sge(0, 4096).unwrap()] }).unwrap();
    };
    for len in [0, 5, 1000] {
        for imm in [None, Some(7)] {
            receive();
            a.post(1, SendOp::Send { imm }, 0, len);
            assert_eq!((a.done().status, b.done().status), (Status::Success, Status::Success));
            if imm.is_some() {
                receive();
            }
            a.post(1, SendOp::Write { remote, imm }, 0, len);
            assert_eq!(a.done().status, Status::Success);
            if imm.is_some() {
                assert_eq!(b.done().status, Status::Success);
            }
        }
        a.post(1, SendOp::Read { remote }, 0, len);
        assert_eq!(a.done().status, Status::Success);
    }
    a.post(1, SendOp::FetchAdd { remote, add: 1 }, 0, 8);
    assert_eq!(a.done().status, Status::Success);
    a.post(1, SendOp::CompareSwap { remote, compare: 1, swap: 2 }, 0, 8);
    assert_eq!(a.done().status, Status::Success);
}
