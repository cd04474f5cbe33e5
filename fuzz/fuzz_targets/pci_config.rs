//! See [`beeline_fuzz::pci_config`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| beeline_fuzz::pci_config(data));
