//! Requests to split into chunks: see [`beeline_fuzz::transfer`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| beeline_fuzz::transfer(data));
