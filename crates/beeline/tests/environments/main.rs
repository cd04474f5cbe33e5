//! Hard places: users, limits, mounts and drives that the library must be right on.
//!
//! What changes a whole process (its user, limits, mounts, system call filter) happens in a child:
//! this binary, run again with `BEELINE_CHILD` naming one of [`CHILDREN`]. What the machine does not
//! allow prints `SKIP <what>`.
#![allow(missing_docs, reason = "tests")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::print_stdout, reason = "SKIP lines")]

#[allow(dead_code, reason = "shared with the conformance suite, which uses all of it")]
#[path = "../conformance/support.rs"]
mod support;

mod drives;
mod harness;
mod limits;
mod mounts;
mod users;

/// What a child can be asked to do.
const CHILDREN: &[(&str, fn())] = &[
    ("block-device", drives::block_device),
    ("descriptors", limits::descriptors),
    ("ext4-4k-blocks", drives::ext4_with_4k_blocks),
    ("full", drives::full_file_system),
    ("btrfs", drives::btrfs),
    ("io-uring-disabled", users::io_uring_disabled),
    ("memlock", limits::memlock),
    ("no-proc", mounts::no_proc),
    ("overlay", mounts::overlay),
    ("reader", users::reader),
    ("read-only", mounts::read_only),
    ("ramfs", mounts::ramfs),
    ("seccomp", limits::seccomp),
    ("threads", limits::threads),
    ("tmpfs", mounts::tmpfs),
    ("xfs", drives::xfs),
];

/// The way into a child; does nothing where nobody asked for one.
#[test]
fn child() {
    let Ok(name) = std::env::var(harness::CHILD) else { return };
    let (_, run) = CHILDREN.iter().find(|(known, _)| *known == name).expect("a known child");
    run();
    println!("{}{name}", harness::DONE);
}
