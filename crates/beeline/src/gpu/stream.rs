//! Streams and events: device work in order.

use std::fmt;
use std::time::Instant;

use super::buffer::{Buffer, PinnedMem, RegisteredMap};
use super::sim::{self, Op, Place};
use super::{Gpu, cuda};
use crate::error::{Error, Result};

/// How a stream compares a memory word with the value it waits for (cuStreamWaitValue).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// `(word - value)` as a signed number is not negative: the cyclic order CUDA defines.
    GreaterOrEqual,
    /// The word equals the value.
    Equal,
    /// Word and value share a set bit.
    AnyBit,
    /// Some bit is clear in both: `!(word | value)` is not zero.
    Nor,
}

impl Compare {
    /// Whether `word` ends a wait for `value`.
    pub const fn matches(self, word: u32, value: u32) -> bool {
        match self {
            Self::GreaterOrEqual => word.wrapping_sub(value) as i32 >= 0,
            Self::Equal => word == value,
            Self::AnyBit => word & value != 0,
            Self::Nor => !(word | value) != 0,
        }
    }
}

/// An argument of a named kernel.
#[derive(Clone, Debug)]
pub enum KernelArg {
    /// Device memory.
    Buffer(Buffer),
    /// A 32-bit number.
    U32(u32),
    /// A 64-bit number.
    U64(u64),
}

/// A queue of operations that run in order. Operations return when they are queued, not when they
/// have run; memory they touch stays alive until then. Dropping a stream lets its operations finish.
///
/// An operation that fails makes the stream fail: what follows does not run, and every later call and
/// every event recorded after it reports the first failure.
pub struct Stream {
    inner: Inner,
    gpu: Gpu,
}

enum Inner {
    Sim(sim::Stream),
    Cuda(cuda::Stream),
}

/// An operation as the methods below check it, before a kind of device takes it over.
#[derive(Clone, Copy)]
pub(super) enum Command<'a> {
    Copy { dst: Operand<'a>, src: Operand<'a>, len: u64 },
    Fill { dst: Operand<'a>, len: u64, value: u8 },
    WriteValue { dst: Operand<'a>, value: u32 },
    WaitValue { src: Operand<'a>, value: u32, compare: Compare },
    Launch { name: &'a str, args: &'a [KernelArg] },
}

/// Memory of an operation, with the offset in it.
#[derive(Clone, Copy)]
pub(super) enum Operand<'a> {
    Device(&'a Buffer, u64),
    Pinned(&'a PinnedMem, u64),
    Mapped(&'a RegisteredMap, u64),
}

impl Stream {
    pub(crate) const fn sim(stream: sim::Stream, gpu: Gpu) -> Self {
        Self { inner: Inner::Sim(stream), gpu }
    }

    pub(crate) const fn cuda(stream: cuda::Stream, gpu: Gpu) -> Self {
        Self { inner: Inner::Cuda(stream), gpu }
    }

    /// The device the stream belongs to.
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Copies `len` bytes from pinned host memory to the device.
    ///
    /// # Errors
    /// `is_refused` outside either memory, or where one belongs to another kind of device; the
    /// stream's earlier failure.
    pub fn copy_to_device(
        &self,
        dst: &Buffer,
        dst_offset: u64,
        src: &PinnedMem,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let src = Operand::Pinned(src, src_offset);
        self.push(Command::Copy { dst: Operand::Device(dst, dst_offset), src, len })
    }

    /// Copies `len` bytes of a registered file mapping to the device, without a host copy.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`]; on a simulated device the event recorded next fails where the
    /// file was truncated (CUDA goes on reading the pages it registered).
    pub fn copy_mapped_to_device(
        &self,
        dst: &Buffer,
        dst_offset: u64,
        src: &RegisteredMap,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let src = Operand::Mapped(src, src_offset);
        self.push(Command::Copy { dst: Operand::Device(dst, dst_offset), src, len })
    }

    /// Copies `len` bytes from the device to pinned host memory.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`].
    pub fn copy_to_host(
        &self,
        dst: &PinnedMem,
        dst_offset: u64,
        src: &Buffer,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let src = Operand::Device(src, src_offset);
        self.push(Command::Copy { dst: Operand::Pinned(dst, dst_offset), src, len })
    }

    /// Copies `len` bytes between device buffers, of one device or of two of one kind; overlapping
    /// ranges of one buffer are allowed.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`]; on CUDA `is_out_of_memory` where ranges overlap and there is no
    /// room for the piece in between (at most 64 MiB).
    pub fn copy_on_device(
        &self,
        dst: &Buffer,
        dst_offset: u64,
        src: &Buffer,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let src = Operand::Device(src, src_offset);
        self.push(Command::Copy { dst: Operand::Device(dst, dst_offset), src, len })
    }

    /// Sets `len` bytes to `value`.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`].
    pub fn fill(&self, dst: &Buffer, offset: u64, len: u64, value: u8) -> Result<()> {
        self.push(Command::Fill { dst: Operand::Device(dst, offset), len, value })
    }

    /// Writes a 32-bit word of device memory, after everything queued before (cuStreamWriteValue32).
    ///
    /// # Errors
    /// As [`Self::copy_to_device`]; `is_refused` where the word is not aligned to 4 bytes or the
    /// driver has no stream memory operations (before CUDA 11.7).
    pub fn write_value(&self, dst: &Buffer, offset: u64, value: u32) -> Result<()> {
        self.push(Command::WriteValue { dst: Operand::Device(dst, offset), value })
    }

    /// Writes a 32-bit word of pinned host memory, after everything queued before.
    ///
    /// # Errors
    /// As [`Self::write_value`].
    pub fn write_host_value(&self, dst: &PinnedMem, offset: u64, value: u32) -> Result<()> {
        self.push(Command::WriteValue { dst: Operand::Pinned(dst, offset), value })
    }

    /// Holds back what is queued next until a word of device memory compares (cuStreamWaitValue32).
    ///
    /// # Errors
    /// As [`Self::write_value`].
    pub fn wait_value(
        &self,
        src: &Buffer,
        offset: u64,
        value: u32,
        compare: Compare,
    ) -> Result<()> {
        self.push(Command::WaitValue { src: Operand::Device(src, offset), value, compare })
    }

    /// Holds back what is queued next until a word of pinned host memory compares.
    ///
    /// # Errors
    /// As [`Self::write_value`].
    pub fn wait_host_value(
        &self,
        src: &PinnedMem,
        offset: u64,
        value: u32,
        compare: Compare,
    ) -> Result<()> {
        self.push(Command::WaitValue { src: Operand::Pinned(src, offset), value, compare })
    }

    /// Runs the kernel `name`; [`sim::KERNELS`] lists those that every device has.
    ///
    /// # Errors
    /// `is_refused` for an unknown name or arguments that do not fit it.
    pub fn launch(&self, name: &str, args: &[KernelArg]) -> Result<()> {
        self.push(Command::Launch { name, args })
    }

    /// Has the thread of a simulated stream run `work` when its turn comes, in the place of a kernel that the simulated
    /// device does not know. Whatever is queued next waits for it; a failure is the stream's.
    ///
    /// # Errors
    /// `is_refused` on a CUDA device; the stream's earlier failure.
    pub fn launch_on_cpu(&self, work: impl Fn() -> Result<()> + Send + 'static) -> Result<()> {
        match &self.inner {
            Inner::Sim(stream) => stream.push(Op::Call(Box::new(work))),
            Inner::Cuda(_) => {
                Err(Error::refused(format!("{} runs kernels, not functions", self.gpu.id())))
            }
        }
    }

    /// Allocates `len` bytes in stream order: on CUDA from the device's pool, without waiting for the
    /// device and, where the pool still holds pages, without the driver's cost of new ones. What is
    /// queued in this stream from here on may use them; another stream first waits for an event
    /// recorded after this call. Freed in the order of this stream, too.
    ///
    /// # Errors
    /// As [`Gpu::alloc`].
    pub fn alloc(&self, len: u64) -> Result<Buffer> {
        match &self.inner {
            Inner::Cuda(stream) if len > 0 => Ok(Buffer::cuda(stream.alloc(len)?, len)),
            Inner::Cuda(_) | Inner::Sim(_) => self.gpu.alloc(len),
        }
    }

    /// An event that is done once everything queued so far has run.
    ///
    /// # Errors
    /// The stream's earlier failure.
    pub fn record(&self) -> Result<Event> {
        let inner = match &self.inner {
            Inner::Sim(stream) => {
                let event = sim::Event::default();
                stream.push(Op::Record(event.clone()))?;
                EventInner::Sim(event)
            }
            Inner::Cuda(stream) => EventInner::Cuda(stream.record()?),
        };
        Ok(Event { inner })
    }

    /// Holds back what is queued next until `event`, of this or another stream, is done.
    ///
    /// # Errors
    /// The stream's earlier failure; `is_refused` for the event of another kind of device.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        match (&self.inner, &event.inner) {
            (Inner::Sim(stream), EventInner::Sim(event)) => {
                stream.push(Op::WaitEvent(event.clone()))
            }
            (Inner::Cuda(stream), EventInner::Cuda(event)) => stream.wait_event(event),
            (Inner::Sim(_), _) | (Inner::Cuda(_), _) => {
                Err(Error::refused("a stream cannot wait for the event of another kind of device"))
            }
        }
    }

    /// Waits until everything queued so far has run.
    ///
    /// # Errors
    /// `is_timeout` where `deadline` passes first; the stream's failure.
    pub fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.record()?.wait(deadline)
    }

    /// The driver's stream, on a CUDA device.
    pub(crate) const fn as_cuda(&self) -> Option<&beeline_sys::cuda::Stream> {
        match &self.inner {
            Inner::Cuda(stream) => Some(stream.handle()),
            Inner::Sim(_) => None,
        }
    }

    fn push(&self, command: Command<'_>) -> Result<()> {
        match &self.inner {
            Inner::Sim(stream) => stream.push(sim_op(command)?),
            Inner::Cuda(stream) => stream.push(command),
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({})", self.gpu.id())
    }
}

fn sim_op(command: Command<'_>) -> Result<Op> {
    Ok(match command {
        Command::Copy { dst, src, len } => {
            Op::Copy { dst: sim_place(dst, len)?, src: sim_place(src, len)?, len }
        }
        Command::Fill { dst, len, value } => Op::Fill { dst: sim_place(dst, len)?, len, value },
        Command::WriteValue { dst, value } => {
            Op::WriteValue { dst: sim_place(dst, 4)?.aligned(4)?, value }
        }
        Command::WaitValue { src, value, compare } => {
            Op::WaitValue { src: sim_place(src, 4)?.aligned(4)?, value, compare }
        }
        Command::Launch { name, args } => Op::Kernel(sim::Kernel::new(name, args)?),
    })
}

fn sim_place(operand: Operand<'_>, len: u64) -> Result<Place> {
    match operand {
        Operand::Device(buffer, offset) => {
            let (allocation, at) = buffer.locate_sim(offset, len)?;
            Ok(Place::device(allocation, at))
        }
        Operand::Pinned(pinned, offset) => Place::pinned(pinned, offset, len),
        Operand::Mapped(map, offset) => Place::mapped(map, offset, len),
    }
}

/// A point in a stream.
#[derive(Clone)]
pub struct Event {
    inner: EventInner,
}

#[derive(Clone)]
enum EventInner {
    Sim(sim::Event),
    Cuda(cuda::Event),
}

impl Event {
    /// Whether the point has been reached; never waits.
    ///
    /// # Errors
    /// The failure of an operation before the point.
    pub fn is_done(&self) -> Result<bool> {
        match &self.inner {
            EventInner::Sim(event) => event.is_done(),
            EventInner::Cuda(event) => event.is_done(),
        }
    }

    /// Waits for the point.
    ///
    /// # Errors
    /// `is_timeout` where `deadline` passes first (the work goes on, and keeps its memory);
    /// the failure of an operation before the point.
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        match &self.inner {
            EventInner::Sim(event) => event.wait(deadline),
            EventInner::Cuda(event) => event.wait(deadline),
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_are_those_of_cuda() {
        use Compare::{AnyBit, Equal, GreaterOrEqual, Nor};
        let cases = [
            (GreaterOrEqual, 5, 5, true),
            (GreaterOrEqual, 4, 5, false),
            (GreaterOrEqual, 2, u32::MAX, true), // cyclic: 2 comes after the wrap
            (GreaterOrEqual, u32::MAX, 2, false),
            (Equal, 7, 7, true),
            (Equal, 8, 7, false),
            (AnyBit, 0b110, 0b010, true),
            (AnyBit, 0b100, 0b010, false),
            (Nor, u32::MAX, 0, false),
            (Nor, 0, u32::MAX, false),
            (Nor, 1, 2, true),
        ];
        for (compare, word, value, expected) in cases {
            assert_eq!(compare.matches(word, value), expected, "{compare:?} {word} {value}");
        }
    }
}
