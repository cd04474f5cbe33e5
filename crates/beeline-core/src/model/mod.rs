//! Model files: what a safetensors file holds, what of it is wanted, and where that goes.
//!
//! # The format
//! Source: section "Format" of the safetensors README (version 0.8 of the reference
//! implementation), and that implementation where the text is silent.
//!
//! ```text
//! byte 0      N, the length of the header: unsigned 64-bit, little-endian
//! byte 8      the header: N bytes of UTF-8 JSON, padded with whitespace
//! byte 8 + N  the data section, up to the end of the file
//! ```
//!
//! The header is one object. `"__metadata__"`, where present, maps strings to strings. Every other
//! key is a tensor: `{"dtype": "F16", "shape": [16, 8], "data_offsets": [BEGIN, END]}`, with offsets
//! in bytes from the start of the *data section*. Elements are little-endian in row-major order,
//! packed without gaps. Together the tensors cover the data section exactly: no hole, no overlap,
//! nothing after the last one, so no foreign bytes can hide in a file. Empty tensors (a dimension
//! of 0), scalars (no dimension) and files without a tensor are legal.
//!
//! The format promises no alignment: `8 + N + BEGIN` may be any number. That is why [`layout`] gives
//! every tensor a place of its own on the device, and why a misaligned tensor is a remark
//! ([`header::Misaligned`]) and never an error.
//!
//! A large model is several files ("shards") and a `*.index.json` that says which tensor is in
//! which: see [`index`].
//!
//! # The rooms
//! [`header`] parses and checks one file's header; [`index`] does so for a sharded model's index;
//! [`select`] decides which tensors, and which rows of them, are wanted; [`layout`] gives each a
//! place in one device allocation and lists the stretches of bytes to move; [`mod@write`] makes
//! headers for tools and tests.
//!
//! ```
//! use beeline_core::model::{Dtype, Header, Layout, Selection, write::HeaderBuilder};
//!
//! let mut file = HeaderBuilder::new()
//!     .tensor("embed", Dtype::Bf16, &[100, 3])?
//!     .tensor("head", Dtype::F32, &[5])?
//!     .build()?;
//! file.extend([0; 600 + 20]);
//!
//! let header = Header::parse_file(&file)?;
//! let wanted = Selection::all().select(&[&header])?;
//! let layout = Layout::new(&wanted)?;
//! assert_eq!(layout.entries[1].device_offset, 768);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Errors
//! Each room has one small enum. `code()` gives a stable kebab-case name for programs (listed with
//! the enum), the text gives the values and the remedy. Texts quote names from the file escaped and
//! cut to a bounded length, so a hostile file cannot write to a terminal through them.

pub mod dtype;
pub mod header;
pub mod index;
pub mod layout;
pub mod select;
pub mod write;

use core::fmt;
use core::fmt::Write as _;

pub use dtype::Dtype;
pub use header::{Header, HeaderError, TensorInfo};
pub use index::{Index, IndexError};
pub use layout::{Layout, LayoutError, Placement};
pub use select::{Pattern, SelectError, Selected, Selection, Slice};

/// Characters of a foreign text that a message shows before it is cut.
const CLIP_CHARS: usize = 120;

/// Foreign text inside a message: control characters escaped, bounded in length.
pub(crate) struct Clipped<'a>(pub(crate) &'a str);

impl fmt::Display for Clipped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chars = self.0.chars();
        for c in chars.by_ref().take(CLIP_CHARS) {
            match c {
                '"' | '\'' => f.write_char(c)?,
                _ => write!(f, "{}", c.escape_debug())?,
            }
        }
        if !chars.as_str().is_empty() {
            write!(f, "... ({} bytes)", self.0.len())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn foreign_text_is_escaped_and_bounded() {
        assert_eq!(Clipped("a\"b\n\u{7}é").to_string(), "a\"b\\n\\u{7}é");
        let long = "x".repeat(100_000);
        let shown = Clipped(&long).to_string();
        assert!(shown.ends_with("x... (100000 bytes)"), "{shown}");
        assert!(shown.len() < 200);
    }
}
