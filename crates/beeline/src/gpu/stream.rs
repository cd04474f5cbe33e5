//! Streams and events: device work in order.

use std::fmt;
use std::time::Instant;

use super::buffer::{Buffer, DeviceMemory, PinnedMem, RegisteredMap};
use super::sim::{self, Op, Place};
use crate::error::Result;

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
}

enum Inner {
    Sim(sim::Stream),
}

impl Stream {
    pub(crate) const fn sim(stream: sim::Stream) -> Self {
        Self { inner: Inner::Sim(stream) }
    }

    /// Copies `len` bytes from pinned host memory to the device.
    ///
    /// # Errors
    /// `is_refused` outside either memory; the stream's earlier failure.
    pub fn copy_to_device(
        &self,
        dst: &Buffer,
        dst_offset: u64,
        src: &PinnedMem,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let Inner::Sim(stream) = &self.inner;
        let dst = sim_place(dst, dst_offset, len)?;
        stream.push(Op::Copy { dst, src: Place::pinned(src, src_offset, len)?, len })
    }

    /// Copies `len` bytes of a registered file mapping to the device, without a host copy.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`]; the event recorded next fails where the file was truncated.
    pub fn copy_mapped_to_device(
        &self,
        dst: &Buffer,
        dst_offset: u64,
        src: &RegisteredMap,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let Inner::Sim(stream) = &self.inner;
        let dst = sim_place(dst, dst_offset, len)?;
        stream.push(Op::Copy { dst, src: Place::mapped(src, src_offset, len)?, len })
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
        let Inner::Sim(stream) = &self.inner;
        let src = sim_place(src, src_offset, len)?;
        stream.push(Op::Copy { dst: Place::pinned(dst, dst_offset, len)?, src, len })
    }

    /// Copies `len` bytes between device buffers; overlapping ranges of one buffer are allowed.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`].
    pub fn copy_on_device(
        &self,
        dst: &Buffer,
        dst_offset: u64,
        src: &Buffer,
        src_offset: u64,
        len: u64,
    ) -> Result<()> {
        let Inner::Sim(stream) = &self.inner;
        let dst = sim_place(dst, dst_offset, len)?;
        stream.push(Op::Copy { dst, src: sim_place(src, src_offset, len)?, len })
    }

    /// Sets `len` bytes to `value`.
    ///
    /// # Errors
    /// As [`Self::copy_to_device`].
    pub fn fill(&self, dst: &Buffer, offset: u64, len: u64, value: u8) -> Result<()> {
        let Inner::Sim(stream) = &self.inner;
        stream.push(Op::Fill { dst: sim_place(dst, offset, len)?, len, value })
    }

    /// Writes a 32-bit word of device memory, after everything queued before (cuStreamWriteValue32).
    ///
    /// # Errors
    /// As [`Self::copy_to_device`]; `is_refused` where the word is not aligned to 4 bytes.
    pub fn write_value(&self, dst: &Buffer, offset: u64, value: u32) -> Result<()> {
        let Inner::Sim(stream) = &self.inner;
        stream.push(Op::WriteValue { dst: sim_place(dst, offset, 4)?.aligned(4)?, value })
    }

    /// Writes a 32-bit word of pinned host memory, after everything queued before.
    ///
    /// # Errors
    /// As [`Self::write_value`].
    pub fn write_host_value(&self, dst: &PinnedMem, offset: u64, value: u32) -> Result<()> {
        let Inner::Sim(stream) = &self.inner;
        stream.push(Op::WriteValue { dst: Place::pinned(dst, offset, 4)?.aligned(4)?, value })
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
        let Inner::Sim(stream) = &self.inner;
        let src = sim_place(src, offset, 4)?.aligned(4)?;
        stream.push(Op::WaitValue { src, value, compare })
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
        let Inner::Sim(stream) = &self.inner;
        let src = Place::pinned(src, offset, 4)?.aligned(4)?;
        stream.push(Op::WaitValue { src, value, compare })
    }

    /// Runs the kernel `name`; [`sim::KERNELS`] lists those of the simulated device.
    ///
    /// # Errors
    /// `is_refused` for an unknown name or arguments that do not fit it.
    pub fn launch(&self, name: &str, args: &[KernelArg]) -> Result<()> {
        let Inner::Sim(stream) = &self.inner;
        stream.push(Op::Kernel(sim::Kernel::new(name, args)?))
    }

    /// An event that is done once everything queued so far has run.
    ///
    /// # Errors
    /// The stream's earlier failure.
    pub fn record(&self) -> Result<Event> {
        let Inner::Sim(stream) = &self.inner;
        let event = sim::Event::default();
        stream.push(Op::Record(event.clone()))?;
        Ok(Event { inner: EventInner::Sim(event) })
    }

    /// Holds back what is queued next until `event`, of this or another stream, is done.
    ///
    /// # Errors
    /// The stream's earlier failure.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        let Inner::Sim(stream) = &self.inner;
        let EventInner::Sim(event) = &event.inner;
        stream.push(Op::WaitEvent(event.clone()))
    }

    /// Waits until everything queued so far has run.
    ///
    /// # Errors
    /// `is_timeout` where `deadline` passes first; the stream's failure.
    pub fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.record()?.wait(deadline)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

fn sim_place(buffer: &Buffer, offset: u64, len: u64) -> Result<Place> {
    let (memory, at) = buffer.locate(offset, len)?;
    let DeviceMemory::Sim(allocation) = memory;
    Ok(Place::device(allocation, at))
}

/// A point in a stream.
#[derive(Clone)]
pub struct Event {
    inner: EventInner,
}

#[derive(Clone)]
enum EventInner {
    Sim(sim::Event),
}

impl Event {
    /// Whether the point has been reached; never waits.
    ///
    /// # Errors
    /// The failure of an operation before the point.
    pub fn is_done(&self) -> Result<bool> {
        let EventInner::Sim(event) = &self.inner;
        event.is_done()
    }

    /// Waits for the point.
    ///
    /// # Errors
    /// `is_timeout` where `deadline` passes first (the work goes on, and keeps its memory);
    /// the failure of an operation before the point.
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        let EventInner::Sim(event) = &self.inner;
        event.wait(deadline)
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
