//! Developer tasks of Beeline.
fn main() {}
