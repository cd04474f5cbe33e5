//! See [`beeline_fuzz::facts`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| beeline_fuzz::facts(data));
