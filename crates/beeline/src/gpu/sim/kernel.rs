//! The named kernels of the simulated device. A CUDA device has the same ones as PTX.

use std::sync::Arc;

use beeline_sys::mem::HostMem;

use super::{Allocation, device_error};
use crate::error::{Error, Result};
use crate::gpu::buffer::Buffer;
use crate::gpu::stream::KernelArg;

/// The names that [`super::super::Stream::launch`] knows, with their arguments.
pub const KERNELS: &[(&str, &str)] = &[
    ("fill_u32", "(buffer, u32 value): every whole word becomes value"),
    ("iota_u32", "(buffer, u32 first): word i becomes first + i, wrapping"),
    ("add_u32", "(dst buffer, src buffer): word i of dst gains word i of src, wrapping"),
    (
        "atomic_u64",
        "(buffer, old buffer, u32 op, u64 a, u64 b): the first 64-bit word gains a (op 0) or becomes b \
         where it was a (op 1), atomically towards all that reaches it; what it was goes to old",
    ),
    (
        "add_many_u64",
        "(buffer, u32 times): the first 64-bit word gains 1 that many times, atomically",
    ),
];

/// Those of [`KERNELS`] that are atomic operations.
pub(crate) const ATOMIC_KERNELS: &[&str] = &["atomic_u64", "add_many_u64"];

/// A kernel whose arguments were checked when it was launched.
pub(crate) struct Kernel {
    body: Body,
}

enum Body {
    Fill(Words, u32),
    Iota(Words, u32),
    Add(Words, Words),
    Atomic { word: Words, old: Words, swap: bool, a: u64, b: u64 },
    AddMany(Words, u32),
}

/// Whole 32-bit words of device memory.
struct Words {
    memory: Arc<Allocation>,
    offset: u64,
    count: u64,
}

impl Kernel {
    pub(crate) fn new(name: &str, args: &[KernelArg]) -> Result<Self> {
        let body = match (name, args) {
            ("fill_u32", [KernelArg::Buffer(dst), KernelArg::U32(value)]) => {
                Body::Fill(Words::new(dst)?, *value)
            }
            ("iota_u32", [KernelArg::Buffer(dst), KernelArg::U32(first)]) => {
                Body::Iota(Words::new(dst)?, *first)
            }
            ("add_u32", [KernelArg::Buffer(dst), KernelArg::Buffer(src)]) => {
                let (dst, src) = (Words::new(dst)?, Words::new(src)?);
                if dst.count != src.count {
                    return Err(Error::refused(format!(
                        "add_u32 needs buffers of one length, not {} and {} words",
                        dst.count, src.count
                    )));
                }
                Body::Add(dst, src)
            }
            (
                "atomic_u64",
                [
                    KernelArg::Buffer(word),
                    KernelArg::Buffer(old),
                    KernelArg::U32(op),
                    KernelArg::U64(a),
                    KernelArg::U64(b),
                ],
            ) => {
                let (word, old) = (Words::of_u64(word)?, Words::of_u64(old)?);
                Body::Atomic { word, old, swap: *op != 0, a: *a, b: *b }
            }
            ("add_many_u64", [KernelArg::Buffer(word), KernelArg::U32(times)]) => {
                Body::AddMany(Words::of_u64(word)?, *times)
            }
            _ => return Err(unknown(name, args)),
        };
        Ok(Self { body })
    }

    pub(super) fn run(&self) -> Result<()> {
        match &self.body {
            Body::Fill(dst, value) => dst.each(|_, _| *value),
            Body::Iota(dst, first) => dst.each(|index, _| first.wrapping_add(index as u32)),
            Body::Add(dst, src) => {
                let values = src.load()?;
                dst.each(|index, word| {
                    word.wrapping_add(values.get(index as usize).copied().unwrap_or(0))
                })
            }
            Body::Atomic { word, old, swap, a, b } => {
                let was = word.update(|old| match swap {
                    true if old == *a => *b,
                    true => old,
                    false => old.wrapping_add(*a),
                })?;
                old.update(|_| was).map(|_| ())
            }
            Body::AddMany(word, times) => {
                (0..*times).try_for_each(|_| word.update(|old| old.wrapping_add(1)).map(|_| ()))
            }
        }
    }
}

impl Words {
    fn new(buffer: &Buffer) -> Result<Self> {
        let (memory, offset) = buffer.locate_sim(0, buffer.len())?;
        if !offset.is_multiple_of(4) {
            return Err(Error::refused(format!(
                "a kernel on words needs 4-byte alignment ({offset})"
            )));
        }
        Ok(Self { memory: Arc::clone(memory), offset, count: buffer.len() / 4 })
    }

    /// Words of which the first two are an aligned 64-bit word.
    fn of_u64(buffer: &Buffer) -> Result<Self> {
        let words = Self::new(buffer)?;
        if words.count < 2 || !words.offset.is_multiple_of(8) {
            return Err(Error::refused("an atomic kernel needs 8 bytes, aligned to 8"));
        }
        Ok(words)
    }

    /// Changes the first 64-bit word atomically; answers what it was.
    fn update(&self, change: impl Fn(u64) -> u64) -> Result<u64> {
        use std::sync::atomic::Ordering::{AcqRel, Acquire};

        self.memory.with(|mem| {
            let word =
                mem.atomic_u64(self.offset).map_err(|error| device_error(error.to_string()))?;
            let old = word.fetch_update(AcqRel, Acquire, |old| Some(change(old)));
            Ok(old.unwrap_or_else(|old| old))
        })
    }

    fn each(&self, word: impl Fn(u64, u32) -> u32) -> Result<()> {
        self.memory.with(|mem| {
            for index in 0..self.count {
                let at = self.offset + index * 4;
                let old = mem.load_u32(at).map_err(|error| device_error(error.to_string()))?;
                mem.store_u32(at, word(index, old))
                    .map_err(|error| device_error(error.to_string()))?;
            }
            Ok(())
        })
    }

    fn load(&self) -> Result<Vec<u32>> {
        let read = |mem: &HostMem, index: u64| mem.load_u32(self.offset + index * 4);
        self.memory.with(|mem| {
            (0..self.count)
                .map(|index| read(mem, index).map_err(|error| device_error(error.to_string())))
                .collect()
        })
    }
}

fn unknown(name: &str, args: &[KernelArg]) -> Error {
    let known = KERNELS.iter().find(|(known, _)| *known == name);
    match known {
        Some((_, signature)) => Error::refused(format!(
            "kernel {name} takes {signature}, not {} arguments of these kinds",
            args.len()
        )),
        None => Error::refused(format!("there is no kernel '{name}'")),
    }
}
