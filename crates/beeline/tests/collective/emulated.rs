//! The same tests on the kernels: this program again, on a `libcuda.so.1` whose devices run them on the CPU.

use std::process::{Command, Stdio};

use crate::library::Library;

/// Devices of the test library.
const DEVICES: u32 = 8;

/// Runs the tests whose names contain one of `parts` on emulated devices.
fn again(parts: &[&str]) {
    with(parts, "0");
}

/// The same, on devices with native atomics between them (`1`) or without.
fn with(parts: &[&str], atomics: &str) {
    if std::env::var_os("BEELINE_TEST_DEVICES").is_some() {
        return;
    }
    if Command::new("c++").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIP c++");
        return;
    }
    let Some(library) = Library::built() else { return };
    let names: Vec<String> = (0..DEVICES).map(|device| format!("cuda:{device}")).collect();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(parts).args(["--test-threads", "2"]);
    for variable in ["BEELINE_CUDA_LIBRARY", "CUDA_VISIBLE_DEVICES", "BEELINE_COMM_PATH"] {
        command.env_remove(variable);
    }
    command.env("LD_LIBRARY_PATH", library.path().parent().unwrap());
    command.env("BEELINE_TEST_CUDA_DEVICES", DEVICES.to_string());
    command.env("BEELINE_TEST_DEVICES", names.join(","));
    command.env("BEELINE_TEST_CUDA_ATOMICS", atomics);
    let addresses = matches!(parts, ["straight::" | "processes::"]);
    command.env("BEELINE_TEST_CUDA_ADDRESSES", if addresses { "1" } else { "0" });
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(!text.contains("running 0 tests"), "{parts:?} are no tests");
}

#[test]
fn data_goes_through_the_kernels() {
    again(&["data::"]);
}

/// Where devices carry out each other's atomic operations, data goes in lines too, and blocks meet when they start.
#[test]
fn data_goes_through_lines() {
    with(&["every_collective_2", "every_collective_3", "large_parts_are_shared"], "1");
}

#[test]
fn order_is_that_of_the_kernels() {
    again(&["order::"]);
}

#[test]
fn trouble_is_found_by_the_kernels() {
    again(&["trouble::"]);
}

#[test]
fn processes_reach_each_others_windows() {
    again(&["processes::"]);
}

#[test]
fn large_moves_are_copies() {
    again(&["copies::"]);
}

#[test]
fn threads_write_registered_memory() {
    again(&["straight::"]);
}

#[test]
fn calls_are_captured() {
    again(&["graphs::"]);
}

/// In lines, too.
#[test]
fn calls_in_lines_are_captured() {
    with(&["graphs::every_collective_2", "graphs::groups"], "1");
}
