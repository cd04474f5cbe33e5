//! Choices for packets against connected queue pairs: see [`beeline_fuzz::connected`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| beeline_fuzz::connected(data));
