//! RDMA NICs of the kernel's, through `libibverbs.so.1`, which is loaded at run time.
//!
//! Handles own what they stand for and hold what it was made from, so nothing is destroyed before what
//! uses it. A region holds its memory until it is deregistered; where that fails the memory is kept for
//! good ([`memory_kept`]), because the NIC may still reach it.
//!
//! Posting names memory by address and key, and the NIC checks both against its regions, so a wrong
//! address is a failed work request and no access outside registered memory.

mod device;
mod objects;
mod queue;
mod table;
#[cfg(test)]
mod tests;
mod types;

use std::ffi::{CStr, c_int};
use std::fmt;
use std::io;
use std::sync::OnceLock;

pub use device::{Context, DeviceAttr, Event, GidEntry, PortAttr, names};
pub use objects::{Ah, AhAttr, Channel, Cq, Mr, Pd, Srq, memory_kept};
pub use queue::{Caps, Data, Opcode, Qp, QpChange, SendWr, Wc};
pub use types::Sge;

use table::Table;

/// Why there is no libibverbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// It cannot be loaded.
    Unloadable {
        /// What the loader says.
        text: String,
    },
    /// It lacks a function that every version since 1.1 has.
    SymbolMissing {
        /// Its name.
        symbol: &'static str,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unloadable { text } => write!(f, "cannot load {}: {text}", table::LIBRARY),
            Self::SymbolMissing { symbol } => write!(f, "{} has no {symbol}", table::LIBRARY),
        }
    }
}

impl std::error::Error for LoadError {}

/// The library, loaded when it is first asked for.
fn library() -> Result<&'static Table, LoadError> {
    static LIBRARY: OnceLock<Result<Table, LoadError>> = OnceLock::new();
    LIBRARY.get_or_init(table::load).as_ref().map_err(Clone::clone)
}

/// What a function that answers 0 or an error number said. Some answer -1 and set `errno`.
fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(io::Error::from_raw_os_error(code)),
        _ => Err(last_error()),
    }
}

/// What a function that answers null means. A provider may leave `errno` as it was.
fn last_error() -> io::Error {
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(0) { io::ErrorKind::Other.into() } else { error }
}

/// Text of a fixed array, which need not end in a zero.
fn text(bytes: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> =
        bytes.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A copy of a string of the library's.
fn owned(text: &CStr) -> String {
    text.to_string_lossy().into_owned()
}
