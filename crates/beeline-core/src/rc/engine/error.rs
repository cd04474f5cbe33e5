//! Why objects are not made or not removed.

use core::fmt;

/// Why an object was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum CreateError {
    /// A number is zero or above what is possible.
    TooMany { what: &'static str, value: u32, max: u32 },
    /// Something named does not exist.
    Unknown { what: &'static str },
    /// The shared receive queue belongs to another protection domain.
    OtherPd,
    /// This NIC does not have it.
    Unsupported { what: &'static str },
}

impl fmt::Display for CreateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported { what } => write!(f, "{what} is not supported"),
            Self::TooMany { what, value, max } => {
                write!(f, "{value} {what}: up to {max} are possible")
            }
            Self::Unknown { what } => write!(f, "the {what} does not exist"),
            Self::OtherPd => {
                f.write_str("the shared receive queue belongs to another protection domain")
            }
        }
    }
}

impl core::error::Error for CreateError {}

/// Why an object was not removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DestroyError {
    /// It does not exist.
    Unknown,
    /// Others depend on it.
    InUse { users: u32 },
}

impl fmt::Display for DestroyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no such object"),
            Self::InUse { users } => write!(f, "{users} other objects use it: remove them first"),
        }
    }
}

impl core::error::Error for DestroyError {}
