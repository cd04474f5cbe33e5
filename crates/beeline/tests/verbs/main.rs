//! One suite over every pair of NICs: two in software here, and those of the kernel where there are any.
//!
//! The rig runs this program in a guest with `rdma_rxe` (`rig/guest/tests/ibv.sh`), where
//! `BEELINE_VERBS_NICS` names the pairs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod cases;
mod kernel;
mod side;

use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};

use beeline::verbs::{HostMem, LinkKind, Nic, SoftOptions};

use cases::{CASES, Can};
use side::{REGION, Side, connect, usual};

/// Runs every case, each over connections of its own.
fn suite(a: &Nic, b: &Nic, can: Can, memory: impl Fn() -> HostMem) {
    for (name, case) in CASES {
        let (at_a, at_b) = (Side::new(a, memory()), Side::new(b, memory()));
        connect(&at_a.qp, &at_b.qp, (&usual(), &usual()));
        // What cases before left behind on the NIC.
        for side in [&at_a, &at_b] {
            while side.context.poll_async().is_some() {}
        }
        println!("case: {name}");
        case(&at_a, &at_b, can);
    }
}

fn private() -> HostMem {
    HostMem::anonymous(REGION).unwrap()
}

/// Loopback addresses of this program: each NIC needs one of its own.
fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(2);
    let process = (std::process::id() % 250) as u8;
    let subnet = (std::process::id() / 250 % 30) as u8 + 220;
    IpAddr::from([127, subnet, process, NEXT.fetch_add(1, Ordering::Relaxed)])
}

#[test]
fn two_nics_joined_in_memory() {
    let (a, b) = Nic::pair(SoftOptions::new(address()), SoftOptions::new(address())).unwrap();
    suite(&a, &b, Can::SOFT, private);
}

#[test]
fn two_nics_over_udp() {
    let nic = || Nic::soft(SoftOptions::new(address()).link(LinkKind::Udp)).unwrap();
    suite(&nic(), &nic(), Can::SOFT, private);
}

#[test]
fn two_nics_that_share_memory() {
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = std::thread::scope(|scope| {
        let other = scope.spawn(|| Nic::local(b).unwrap());
        (Nic::local(a).unwrap(), other.join().unwrap())
    });
    let can = Can { datagrams: false, ..Can::SOFT };
    suite(&a, &b, can, private);
    suite(&a, &b, can, || HostMem::shareable(REGION).unwrap());
}
