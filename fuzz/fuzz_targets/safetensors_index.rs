//! The index of a sharded model: see [`beeline_fuzz::safetensors_index`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| beeline_fuzz::safetensors_index(data));
