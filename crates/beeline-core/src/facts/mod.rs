//! Facts: one typed record of a machine, gathered from files or from the live system.
//!
//! [`Machine`] is the record, [`read`] adds one file to it, [`json`] saves and loads it. Nothing here
//! judges: checks and plans do. Every fact carries an [`Origin`], so every answer can name its evidence.

pub mod bdf;
mod device;
mod distance;
pub mod event;
pub mod json;
pub mod machine;
pub mod parse;
pub mod pci_config;
mod pci_device;
pub mod platform;
pub mod redact;

pub use bdf::Bdf;
pub use event::{Event, Seen};
pub use machine::{
    Acs, Cell, Distance, Endpoint, Fact, Gpu, IommuType, Known, Link, Machine, Nic, Origin,
    P2pStatus, Parent, PciDevice, Port, PortKind, Source,
};
pub use parse::{Kind, ReadError, read, read_as, read_tree, register_functions, strip_comments};
