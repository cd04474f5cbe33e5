//! The `beeline` command.
fn main() {}
