//! Streams and events of a CUDA device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_core::checks::Happened;
use beeline_sys::cuda::{
    Arg, CuResult, DeviceMem, Error as CudaError, Event as Handle, ForeignStream, Param,
    Stream as StreamHandle, WaitFlags, Word,
};

use super::{Device, Memory};
use crate::error::{Error, Kind, Result};
use crate::gpu::sim;
use crate::gpu::stream::{Command, Compare, KernelArg, Operand};
use crate::probe::explained_here;

/// The largest piece that goes through other memory where the ranges of a copy overlap.
const OVERLAP_BYTES_MAX: u64 = 64 << 20;
/// The first and the longest pause of a waiting thread.
const PAUSE_MIN: Duration = Duration::from_micros(5);
const PAUSE_MAX: Duration = Duration::from_micros(100);

pub(crate) struct Stream {
    device: Device,
    handle: StreamHandle,
}

impl Stream {
    pub(super) fn new(device: &Device, foreign: Option<ForeignStream>) -> Result<Self> {
        let context = device.context()?;
        let handle = match foreign {
            None => StreamHandle::new(&context),
            Some(stream) => StreamHandle::foreign(&context, stream),
        };
        let handle = handle.map_err(|error| device.failed("make a stream", error))?;
        Ok(Self { device: device.clone(), handle })
    }

    pub(in crate::gpu) fn alloc(&self, len: u64) -> Result<Memory> {
        match self.handle.alloc(len) {
            Err(CudaError::Unsupported { .. }) => self.device.alloc(len, false),
            made => made
                .map(|mem| Memory::new(&self.device, mem))
                .map_err(|error| self.device.not_allocated(len, error)),
        }
    }

    pub(in crate::gpu) const fn handle(&self) -> &StreamHandle {
        &self.handle
    }

    pub(in crate::gpu) fn push(&self, command: Command<'_>) -> Result<()> {
        let (what, outcome) = match command {
            Command::Copy { dst, src, len } => ("copy", self.copy(dst, src, len)?),
            Command::Fill { dst, len, value } => {
                let (memory, at) = device_place(dst, len)?;
                ("fill memory", self.handle.fill((memory, at), len, value))
            }
            Command::WriteValue { dst, value } => {
                ("write a word", self.handle.write_u32(word(dst)?, value))
            }
            Command::WaitValue { src, value, compare } => {
                let flags = wait_flags(compare);
                ("wait for a word", self.handle.wait_u32(word(src)?, value, flags))
            }
            Command::Launch { name, args } => ("launch a kernel", self.launch(name, args)?),
        };
        outcome.map_err(|error| {
            let words = matches!(command, Command::WriteValue { .. } | Command::WaitValue { .. });
            let refused = words
                && matches!(&error, CudaError::Call(call) if call.result == CuResult::NOT_SUPPORTED);
            let failed = self.device.failed(what, error);
            if refused { explained_here(failed, &Happened::StreamOpsRefused) } else { failed }
        })
    }

    fn copy(&self, dst: Operand<'_>, src: Operand<'_>, len: u64) -> Result<Result<(), CudaError>> {
        Ok(match (dst, src) {
            (Operand::Device(..), Operand::Pinned(pinned, from)) => {
                let src = (pinned.registration()?, from);
                self.handle.copy_to_device(device_place(dst, len)?, src, len)
            }
            (Operand::Device(..), Operand::Mapped(map, from)) => {
                let src = (map.registration()?, from);
                self.handle.copy_to_device(device_place(dst, len)?, src, len)
            }
            (Operand::Pinned(pinned, to), Operand::Device(..)) => {
                let dst = (pinned.registration()?, to);
                self.handle.copy_to_host(dst, device_place(src, len)?, len)
            }
            (Operand::Device(..), Operand::Device(..)) => {
                let (dst, src) = (device_place(dst, len)?, device_place(src, len)?);
                let distance = dst.1.abs_diff(src.1);
                if Arc::ptr_eq(dst.0, src.0) && distance < len {
                    return self.copy_overlapping(dst, src.1, len);
                }
                self.handle.copy_on_device(dst, src, len)
            }
            _ => return Err(Error::refused("one side of a copy is the device")),
        })
    }

    /// Copies within one memory through a piece of another, from the end that is overwritten last.
    fn copy_overlapping(
        &self,
        (memory, to): (&Arc<DeviceMem>, u64),
        from: u64,
        len: u64,
    ) -> Result<Result<(), CudaError>> {
        if to == from {
            return Ok(Ok(()));
        }
        let piece = len.min(OVERLAP_BYTES_MAX);
        let between = self.device.alloc(piece, false)?;
        let mut done = 0;
        while done < len {
            let part = piece.min(len - done);
            let at = if to < from { done } else { len - done - part };
            let out = self.handle.copy_on_device((between.mem(), 0), (memory, from + at), part);
            let back = out.and_then(|()| {
                self.handle.copy_on_device((memory, to + at), (between.mem(), 0), part)
            });
            if back.is_err() {
                return Ok(back);
            }
            done += part;
        }
        Ok(Ok(()))
    }

    fn launch(&self, name: &str, args: &[KernelArg]) -> Result<Result<(), CudaError>> {
        let module = if sim::ATOMIC_KERNELS.contains(&name) {
            self.device.atomic_module()?
        } else {
            self.device.module()?
        };
        let Some(spec) = module.kernel(name) else {
            return Err(Error::refused(format!("there is no kernel '{name}'")));
        };
        let mut passed = Vec::with_capacity(args.len());
        for arg in args {
            passed.push(match arg {
                KernelArg::Buffer(buffer) => {
                    let (memory, offset) = buffer.locate_cuda(0, buffer.len())?;
                    Arg::Words { mem: memory.mem(), offset, count: buffer.len() / 4 }
                }
                KernelArg::U32(value) => Arg::U32(*value),
                KernelArg::U64(value) => Arg::U64(*value),
            });
        }
        let kinds: Vec<Param> = passed.iter().map(kind).collect();
        if kinds != spec.params {
            return Err(Error::refused(format!(
                "kernel {name} takes {:?}, not {kinds:?}",
                spec.params
            )));
        }
        if name == "add_u32" {
            same_length(&passed)?;
        }
        Ok(self.handle.launch(&module, name, &passed))
    }

    pub(in crate::gpu) fn record(&self) -> Result<Event> {
        let handle = self.handle.record();
        let handle = handle.map_err(|error| self.device.failed("record an event", error))?;
        Ok(Event { device: self.device.clone(), handle })
    }

    pub(in crate::gpu) fn wait_event(&self, event: &Event) -> Result<()> {
        let waits = self.handle.wait_event(&event.handle);
        waits.map_err(|error| self.device.failed("wait for an event", error))
    }
}

const fn kind(arg: &Arg<'_>) -> Param {
    match arg {
        Arg::Words { .. } => Param::Words,
        Arg::U32(_) => Param::U32,
        Arg::U64(_) => Param::U64,
    }
}

fn same_length(args: &[Arg<'_>]) -> Result<()> {
    match args {
        [Arg::Words { count: dst, .. }, Arg::Words { count: src, .. }] if dst != src => {
            Err(Error::refused(format!(
                "add_u32 needs buffers of one length, not {dst} and {src} words"
            )))
        }
        _ => Ok(()),
    }
}

fn device_place(operand: Operand<'_>, len: u64) -> Result<(&Arc<DeviceMem>, u64)> {
    match operand {
        Operand::Device(buffer, offset) => {
            let (memory, at) = buffer.locate_cuda(offset, len)?;
            Ok((memory.mem(), at))
        }
        _ => Err(Error::refused("the operation needs device memory")),
    }
}

fn word(operand: Operand<'_>) -> Result<Word<'_>> {
    match operand {
        Operand::Device(..) => {
            let (memory, at) = device_place(operand, 4)?;
            Ok(Word::Device(memory, at))
        }
        Operand::Pinned(pinned, offset) => Ok(Word::Host(pinned.registration()?, offset)),
        Operand::Mapped(map, offset) => Ok(Word::Host(map.registration()?, offset)),
    }
}

const fn wait_flags(compare: Compare) -> WaitFlags {
    match compare {
        Compare::GreaterOrEqual => WaitFlags::GEQ,
        Compare::Equal => WaitFlags::EQ,
        Compare::AnyBit => WaitFlags::AND,
        Compare::Nor => WaitFlags::NOR,
    }
}

/// A point in a stream.
#[derive(Clone)]
pub(crate) struct Event {
    device: Device,
    handle: Arc<Handle>,
}

impl Event {
    pub(in crate::gpu) fn is_done(&self) -> Result<bool> {
        self.handle.is_done().map_err(|error| self.device.failed("finish the work queued", error))
    }

    /// Asks ever more slowly: the driver's own waiting either spins or has no deadline.
    pub(in crate::gpu) fn wait(&self, deadline: Instant) -> Result<()> {
        let mut pause = PAUSE_MIN;
        while !self.is_done()? {
            let now = Instant::now();
            if now >= deadline {
                let text = format!("{} did not finish by the deadline", self.device.label());
                return Err(Error::new(Kind::Timeout, text));
            }
            std::thread::sleep(pause.min(deadline - now));
            pause = (pause * 2).min(PAUSE_MAX);
        }
        Ok(())
    }
}
