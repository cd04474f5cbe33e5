//! See [`beeline_fuzz::machine_json`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| beeline_fuzz::machine_json(data));
