//! Gives the library the name that programs load cuFile by, and keeps it in the process: it has threads.

#![allow(clippy::print_stdout, reason = "how a build script speaks to cargo")]

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
