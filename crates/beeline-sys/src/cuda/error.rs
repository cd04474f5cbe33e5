//! What can go wrong with a driver: at opening it, and later.

use std::fmt;

use super::types::CuResult;
use crate::mem::OutOfBounds;

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The function, as cuda.h names it.
    pub call: &'static str,
    /// What it was called with, for people; may be empty.
    pub values: String,
    /// What it answered.
    pub result: CuResult,
    /// The name of the answer (`CUDA_ERROR_...`), as the driver gives it; empty where it gives none.
    pub name: String,
    /// The driver's own explanation; may be empty.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.name.is_empty() { "CUresult" } else { &self.name };
        write!(f, "{}({}) answered {name} ({})", self.call, self.values, self.result.0)?;
        if !self.text.is_empty() {
            write!(f, ", {}", self.text)?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Why the driver cannot be used at all.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no such library: no driver is installed, or not in this container.
    Missing {
        /// The name it was looked for by.
        library: String,
        /// What the loader says.
        text: String,
    },
    /// The library is there and does not load.
    Unloadable {
        /// The name it was loaded by.
        library: String,
        /// What the loader says.
        text: String,
    },
    /// The driver is older than what this crate is written for.
    TooOld {
        /// CUDA version of the driver, as `1000 * major + 10 * minor`.
        found: i32,
        /// The oldest that works, in the same form.
        needed: i32,
    },
    /// A function that every supported driver has is not there.
    SymbolMissing {
        /// Its name in cuda.h.
        symbol: &'static str,
        /// The CUDA version whose signature is needed.
        version: i32,
    },
    /// A function is there, but not in the version whose signature this crate knows.
    SymbolVersion {
        /// Its name in cuda.h.
        symbol: &'static str,
        /// The CUDA version whose signature is needed.
        version: i32,
    },
    /// The driver does not start (`cuInit`, or asking for its version).
    Init(Failure),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { library, text } => {
                write!(f, "there is no CUDA driver library {library} ({text})")
            }
            Self::Unloadable { library, text } => {
                write!(f, "the CUDA driver library {library} does not load ({text})")
            }
            Self::TooOld { found, needed } => write!(
                f,
                "the CUDA driver speaks CUDA {}, and {} is needed",
                Version(*found),
                Version(*needed)
            ),
            Self::SymbolMissing { symbol, version } => write!(
                f,
                "the CUDA driver library has no function {symbol} (of CUDA {})",
                Version(*version)
            ),
            Self::SymbolVersion { symbol, version } => write!(
                f,
                "the CUDA driver library has {symbol}, but not as CUDA {} defines it",
                Version(*version)
            ),
            Self::Init(failure) => write!(f, "the CUDA driver does not start: {failure}"),
        }
    }
}

impl std::error::Error for OpenError {}

/// A CUDA version number, `1000 * major + 10 * minor`, as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// What an operation on an open driver failed with.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A driver call failed.
    Call(Box<Failure>),
    /// The range does not lie inside its memory.
    Bounds(OutOfBounds),
    /// An address of a word is not a multiple of its size.
    Misaligned {
        /// The address.
        address: u64,
        /// The alignment needed, in bytes.
        align: u64,
    },
    /// This driver or device lacks the function.
    Unsupported {
        /// What is missing.
        what: &'static str,
    },
    /// The arguments do not fit each other; the text says why.
    Refused(&'static str),
    /// The stream is being captured into a graph, so that what is queued would not run.
    Capturing,
    /// The stream has taken no operation for this many seconds.
    Stuck(u64),
}

impl Error {
    /// The driver's answer, where a call failed.
    pub const fn result(&self) -> Option<CuResult> {
        match self {
            Self::Call(failure) => Some(failure.result),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(failure) => failure.fmt(f),
            Self::Bounds(outside) => outside.fmt(f),
            Self::Misaligned { address, align } => {
                write!(f, "address {address:#x} is not a multiple of {align}")
            }
            Self::Unsupported { what } => write!(f, "this driver or device has no {what}"),
            Self::Refused(text) => f.write_str(text),
            Self::Capturing => f.write_str("the stream is being captured into a graph"),
            Self::Stuck(seconds) => write!(f, "the stream took no operation for {seconds} s"),
        }
    }
}

impl std::error::Error for Error {}

impl From<OutOfBounds> for Error {
    fn from(outside: OutOfBounds) -> Self {
        Self::Bounds(outside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_call_values_and_number() {
        let failure = Failure {
            call: "cuMemAlloc",
            values: "64 bytes".to_owned(),
            result: CuResult::OUT_OF_MEMORY,
            name: "CUDA_ERROR_OUT_OF_MEMORY".to_owned(),
            text: "out of memory".to_owned(),
        };
        assert_eq!(
            failure.to_string(),
            "cuMemAlloc(64 bytes) answered CUDA_ERROR_OUT_OF_MEMORY (2), out of memory"
        );
        let nameless = Failure { name: String::new(), text: String::new(), ..failure };
        assert_eq!(nameless.to_string(), "cuMemAlloc(64 bytes) answered CUresult (2)");
        let old = OpenError::TooOld { found: 10020, needed: 11040 };
        assert_eq!(old.to_string(), "the CUDA driver speaks CUDA 10.2, and 11.4 is needed");
    }
}
