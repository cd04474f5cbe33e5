//! `libcufile.so.0`: the C boundary over [`beeline::cufile`].
//!
//! Each exported function checks its arguments, calls the library, and maps the failure; a panic becomes
//! an internal error. Loading does nothing until the first call. The functions are declared in
//! `include/cufile.h`; `tests/symbols.txt` lists them.

mod driver;
mod ffi;
mod io;
mod layout;
mod log;
mod params;
