//! The drop-in library, called from C over the test libcuda: what it answers call by call, and what its
//! header and its symbols promise. `conformance.c` runs over a real driver as well (`benches/bundle`).

mod abi;
mod calls;
mod tools;
