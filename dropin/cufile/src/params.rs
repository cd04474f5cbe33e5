//! Parameters and statistics.

use std::ffi::c_char;

use beeline::cufile::{GPU_WORDS, GPUS_MAX, LEVEL1_WORDS, LEVEL1_WORDS_OLD, library};

use crate::ffi::{In, Out, Text, status, value};
use crate::layout::CUfileError;

/// Most slab classes of an array call.
const SLABS_MAX: i32 = 16;

#[unsafe(no_mangle)]
extern "C" fn cuFileGetParameterSizeT(parameter: i32, out: Out<usize>) -> CUfileError {
    status("cuFileGetParameterSizeT", || {
        out.check()?;
        out.set(usize::try_from(library().size(parameter)?).unwrap_or(usize::MAX))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetParameterBool(parameter: i32, out: Out<bool>) -> CUfileError {
    status("cuFileGetParameterBool", || {
        out.check()?;
        out.set(library().flag(parameter)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetParameterString(parameter: i32, out: Out<c_char>, len: i32) -> CUfileError {
    status("cuFileGetParameterString", || {
        out.check()?;
        let text = library().text(parameter)?;
        let mut bytes: Vec<c_char> = text.bytes().map(|byte| byte as c_char).collect();
        bytes.push(0);
        if usize::try_from(len).is_ok_and(|len| bytes.len() <= len) {
            return out.set_all(&bytes);
        }
        Err(value(format!("{len} bytes are too few for a text of {}", bytes.len())))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileSetParameterSizeT(parameter: i32, new: usize) -> CUfileError {
    status("cuFileSetParameterSizeT", || library().set_size(parameter, new as u64))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileSetParameterBool(parameter: i32, new: bool) -> CUfileError {
    status("cuFileSetParameterBool", || library().set_flag(parameter, new))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileSetParameterString(parameter: i32, new: Text) -> CUfileError {
    status("cuFileSetParameterString", || library().set_text(parameter, &new.read()?))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetParameterMinMaxValue(
    parameter: i32,
    least: Out<usize>,
    most: Out<usize>,
) -> CUfileError {
    status("cuFileGetParameterMinMaxValue", || {
        least.check()?;
        most.check()?;
        let (min, max) = library().bounds(parameter)?;
        least.set(usize::try_from(min).unwrap_or(usize::MAX))?;
        most.set(usize::try_from(max).unwrap_or(usize::MAX))
    })
}

macro_rules! slabs {
    ($get:ident, $set:ident, $device:literal) => {
        #[unsafe(no_mangle)]
        extern "C" fn $set(sizes: In<usize>, counts: In<usize>, len: i32) -> CUfileError {
            status(stringify!($set), || {
                let count = slab_count(len)?;
                let wide = |list: Vec<usize>| list.iter().map(|n| *n as u64).collect();
                let (sizes, counts) = (wide(sizes.all(count)?), wide(counts.all(count)?));
                library().set_slabs($device, sizes, counts)
            })
        }

        #[unsafe(no_mangle)]
        extern "C" fn $get(sizes: Out<usize>, counts: Out<usize>, len: i32) -> CUfileError {
            status(stringify!($get), || {
                let room = slab_count(len)?;
                sizes.check()?;
                counts.check()?;
                let (kb, number) = library().slabs($device)?;
                let classes = kb.len().max(number.len());
                if classes > room || kb.len() != number.len() {
                    return Err(value(format!("there are {classes} classes, room for {room}")));
                }
                let narrow = |list: &[u64]| {
                    list.iter().map(|n| usize::try_from(*n).unwrap_or(usize::MAX)).collect()
                };
                let (kb, number): (Vec<usize>, Vec<usize>) = (narrow(&kb), narrow(&number));
                sizes.set_all(&kb)?;
                counts.set_all(&number)
            })
        }
    };
}

slabs!(cuFileGetParameterPosixPoolSlabArray, cuFileSetParameterPosixPoolSlabArray, false);
slabs!(
    cuFileGetParameterGpuBounceBufferSlabArray,
    cuFileSetParameterGpuBounceBufferSlabArray,
    true
);

fn slab_count(len: i32) -> Result<usize, beeline::cufile::Failure> {
    match usize::try_from(len) {
        Ok(count) if (1..=SLABS_MAX).contains(&len) => Ok(count),
        _ => Err(value(format!("an array of {len} classes; 1 to {SLABS_MAX} are allowed"))),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuFileSetStatsLevel(level: i32) -> CUfileError {
    status("cuFileSetStatsLevel", || library().set_stats_level(level))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetStatsLevel(level: Out<i32>) -> CUfileError {
    status("cuFileGetStatsLevel", || level.set(library().stats_level()))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStatsStart() -> CUfileError {
    status("cuFileStatsStart", || library().run_stats(true))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStatsStop() -> CUfileError {
    status("cuFileStatsStop", || library().run_stats(false))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileStatsReset() -> CUfileError {
    status("cuFileStatsReset", || {
        library().reset_stats();
        Ok(())
    })
}

/// The words of level 1 in the length of the version that is reported: a program that was compiled for an
/// earlier one has no room for more.
fn level1() -> Result<Vec<u64>, beeline::cufile::Failure> {
    let words = library().stats1()?;
    let count = if library().version() < 1180 { LEVEL1_WORDS_OLD } else { LEVEL1_WORDS };
    Ok(words.into_iter().take(count).collect())
}

fn level2() -> Result<Vec<u64>, beeline::cufile::Failure> {
    let sizes = library().stats2()?;
    let mut words = level1()?;
    words.extend(sizes.iter().flatten());
    Ok(words)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetStatsL1(out: Out<u64>) -> CUfileError {
    status("cuFileGetStatsL1", || {
        out.check()?;
        out.set_all(&level1()?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetStatsL2(out: Out<u64>) -> CUfileError {
    status("cuFileGetStatsL2", || {
        out.check()?;
        out.set_all(&level2()?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetStatsL3(out: Out<u64>) -> CUfileError {
    status("cuFileGetStatsL3", || {
        out.check()?;
        let gpus = library().stats3()?;
        let mut words = level2()?;
        // A 32-bit count and four bytes of padding.
        words.push(gpus.len() as u64);
        for gpu in &gpus {
            let (low, high) = gpu.uuid.split_at(8);
            let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
            words.extend([word(low), word(high)]);
            words.extend(gpu.words);
        }
        words.resize(words.len() + (GPUS_MAX - gpus.len().min(GPUS_MAX)) * (GPU_WORDS + 2), 0);
        out.set_all(&words)
    })
}
