//! How long 64 MiB of log take on one core. Prints; asserts nothing.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark")]

use std::fmt::Write as _;
use std::time::Instant;

use beeline_core::facts::{Machine, read};

const BYTES: usize = 64 << 20;

fn main() {
    let quiet = |log: &mut String, index: u32| {
        writeln!(
            log,
            "[{index:>5}.123456] systemd[1]: Started session {index} of user root, as every minute"
        )
        .unwrap();
    };
    let nccl = |log: &mut String, index: u32| {
        writeln!(
            log,
            "host{}:64904:64920 [{}] NCCL INFO Channel {:02}/0 : {}[0] -> {}[1] [send] via NET/IB/{}/GDRDMA",
            index % 64, index % 8, index % 32, index % 512, (index + 1) % 512, index % 8
        )
        .unwrap();
    };
    let mixed = |log: &mut String, index: u32| match index % 5 {
        0 => writeln!(log, "h{}:1:2 [0] NCCL INFO Tree {index} : -1 -> 0 -> 1/-1/-1", index % 16)
            .unwrap(),
        1 => writeln!(
            log,
            "h{}:1:2 [0] NCCL INFO comm 0x5 rank 0 nranks 512 cudaDev 0 - Init START",
            index % 16
        )
        .unwrap(),
        2 => writeln!(
            log,
            "h{}:1:2 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
            index % 16
        )
        .unwrap(),
        _ => writeln!(
            log,
            "h{}:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 20.0/20.0, type NVL/PIX",
            index % 16
        )
        .unwrap(),
    };
    for (name, line) in [
        ("kernel log", &quiet as &dyn Fn(&mut String, u32)),
        ("channel lines", &nccl),
        ("mixed", &mixed),
    ] {
        let mut log = String::with_capacity(BYTES + 256);
        let mut index = 0;
        while log.len() < BYTES {
            line(&mut log, index);
            index += 1;
        }
        let mut machine = Machine::new();
        let start = Instant::now();
        let kind = read(&mut machine, "log", log.as_bytes()).unwrap();
        let elapsed = start.elapsed();
        println!(
            "{name}: {} MiB, {index} lines as {} in {:.3} s, {} events",
            log.len() >> 20,
            kind.as_str(),
            elapsed.as_secs_f64(),
            machine.events.len()
        );
    }
}
