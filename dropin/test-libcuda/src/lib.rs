//! A `libcuda.so.1` over Beeline's simulated GPU.
//!
//! It exports the part of the CUDA driver API that Beeline calls, so that tests run the real CUDA code
//! of the library (its loading of symbols, contexts, streams, errors) on a machine without a GPU. It is
//! strict where the driver is: no call without a current context, no copy outside an allocation, no
//! handle that was not given out. What is queued in a captured stream becomes part of a graph, which can be launched any
//! number of times; a call that a capture does not allow spoils it (`capture`).
//!
//! Environment, read once by `cuInit` (and by the calls that work before it):
//!
//! | variable | meaning |
//! |---|---|
//! | `BEELINE_TEST_CUDA_DEVICES` | number of devices, 1 |
//! | `BEELINE_TEST_CUDA_MEMORY` | bytes of each, 1 GiB |
//! | `BEELINE_TEST_CUDA_VERSION` | CUDA version of the driver, 13000; later functions are absent |
//! | `BEELINE_TEST_CUDA_INIT` | what `cuInit` answers instead of success |
//! | `BEELINE_TEST_CUDA_PROC` | `v2`, `v1` (no status) or `none`: what `cuGetProcAddress` can do |
//! | `BEELINE_TEST_CUDA_HIDE` | functions that `cuGetProcAddress` does not know, with commas |
//! | `BEELINE_TEST_CUDA_LATER` | functions it knows in a later version only |
//! | `BEELINE_TEST_CUDA_LACKS` | abilities the devices lack: `readonly`, `vmm`, `pools`, `nor`, `memops`, `dmabuf`, `window` (a dma-buf is not mapped; else it is, and shows other bytes) |
//! | `BEELINE_TEST_CUDA_MIG` | 1: the devices are MIG instances of one GPU |
//! | `BEELINE_TEST_CUDA_LOSE_AFTER_COPIES` | device 0 is lost after so many copies |
//! | `BEELINE_TEST_CUDA_LOST` | what a lost device answers, 999 |
//! | `BEELINE_TEST_CUDA_ATOMICS` | 1: devices have native atomics between them |
//! | `BEELINE_TEST_CUDA_REUSE` | 1: a stream that is made gets the handle of the one destroyed last |
//! | `BEELINE_TEST_CUDA_ADDRESSES` | 1: small memory gets the address (and finds the bytes) of what was freed last of its length, under a number of its own |
//! | `CUDA_VISIBLE_DEVICES` | as the driver reads it: ordinals or whole UUIDs |
//!
//! Kernels of collectives, whose PTX is committed, are run by the CPU from the source that it was compiled from, where the
//! library was built with a C++ compiler.
//!
//! The module `control` has functions of its own by which a test looks behind the driver.

mod capture;
mod control;
mod device;
mod emulated;
mod ffi;
mod graph;
mod memory;
mod module;
mod peers;
mod proc_address;
mod settings;
mod state;
mod stream;
