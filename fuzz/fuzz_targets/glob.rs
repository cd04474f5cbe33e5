//! A pattern, a newline, a name: see [`beeline_fuzz::glob`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| beeline_fuzz::glob(data));
