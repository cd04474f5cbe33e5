//! The CUDA driver API, loaded at run time, behind owning handles.
//!
//! The manners of a guest: every call runs with the primary context of its device pushed and popped
//! again, so the calling thread's current context stays what it was; the thread's capture mode is
//! relaxed during the call, so that a graph capture elsewhere in the process is not disturbed; nothing
//! here synchronises a device, a context or a stream.
//!
//! Memory that a queued operation touches is held by its [`Stream`] until an event behind the
//! operation is seen done. So a copy can be queued by a safe function: whatever the caller drops, the
//! device never writes memory that was freed.

mod capture;
pub mod collective;
mod core;
mod device;
mod direct;
mod error;
mod gate;
mod image;
mod lane;
mod memory;
mod module;
mod peer;
mod pointer;
mod registration;
mod share;
mod stage;
mod stream;
mod table;
mod types;

pub use capture::CapturePoint;
pub use core::Event;
pub use device::{Context, Device, Driver, MemoryInfo, Usage};
pub use direct::is_open;
pub use error::{Error, Failure, OpenError, Version};
pub use gate::{GATE_BYTES, Gate, Gates, Reached};
pub use lane::{Entered, Lane, Mark, Marking};
pub use memory::DeviceMem;
pub use module::{ATOMIC, Arg, BASIC, KernelSpec, Module, Param, Ptx};
pub use peer::PeerKernels;
pub use pointer::{Owner, PointerInfo};
pub use registration::HostRegistration;
pub use share::{BufferId, Imported, Retained, managed};
pub use stage::{CELLS, Home, Load, Slot, StageKernel, StageKernels, Turns};
pub use stream::{ForeignStream, Stream, Word};
pub use types::{CuResult, DeviceAttribute, MemoryType, WaitFlags};
