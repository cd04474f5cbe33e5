//! A whole model file: see [`beeline_fuzz::safetensors_header`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| beeline_fuzz::safetensors_header(data));
