//! A `libnccl.so.2` over Beeline.
//!
//! It exports every function of NCCL 2.28.3, each with its `pnccl` twin, and reports version 2.28.9. No call falls
//! back to NVIDIA's library. Semantics are those of `nccl.h`, with these differences:
//!
//! - A communicator is of one host; one that spans hosts is refused, saying how to go on.
//! - Where ranks disagree or one is missing, the communicator gets an asynchronous error within
//!   `BEELINE_COMM_TIMEOUT` seconds (1800), and `ncclGetLastError` names the rank and both calls.
//! - Averages divide the sum (NCCL's rings multiply each input first); results have the same bits for every size.
//! - Functions of the device interface that have a result answer `ncclInvalidUsage`; team arithmetic is computed.
//! - `NCCL_CTA_POLICY` (and `CTAPolicy`) with `ZERO` lets all-gathers, all-to-alls and broadcasts between processes go by copy engines in
//!   windows of `NCCL_WIN_COLL_SYMMETRIC`; its other flags change nothing.
//! - A captured graph must have run to its end before its communicator is destroyed.
//!
//! Warnings go to the standard error stream, among them which rank a call has waited for longer than five seconds;
//! `NCCL_DEBUG` or `BEELINE_LOG` says more (`INFO`), or nothing (`OFF`).
//!
//! Loading the library does nothing; the CUDA driver is loaded by the first call that needs a device.

mod abi;
mod calls;
mod comm;
mod device;
mod failure;
mod group;
mod log;
mod memory;
