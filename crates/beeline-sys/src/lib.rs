//! Every foreign call and raw pointer of Beeline, behind owning handles.
//!
//! This crate never decides policy: it does what it is told, once, and reports what the kernel said.
//! Of the core it knows addresses only. Its rules:
//!
//! - Memory that a device, the kernel or another process can write is a [`mem::HostMem`], never a
//!   `&[u8]`: bytes are copied in and out, with bounds checked, and no reference to them exists.
//! - Whatever the kernel may still touch is kept alive by the handle that started it
//!   ([`uring::Uring`] owns the memory and the descriptor of every request in flight).
//! - Errors are [`std::io::Error`] with the kernel's own number; the caller adds the meaning.

pub mod cuda;
pub mod dmabuf;
pub mod file;
pub mod ibverbs;
pub mod mem;
pub mod net;
pub mod nvml;
pub mod nvrtc;
mod symbol;
#[doc(hidden)]
pub mod testing;
pub mod thread;
pub mod uring;
pub mod user;
pub mod window;
