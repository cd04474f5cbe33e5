//! Plans: which routes may carry the bytes, in order of preference, and why every other may not.
//!
//! A plan is a pure function of facts. Nothing outside this module decides a route; the engine, the
//! `explain` command and the error of a `Require` request all read the same [`Plan`].

mod device;
mod port;
mod register;
mod storage;

pub use device::{DeviceRoute, End, device};
pub use port::{PortChoice, PortRefused, Reach, ports};
pub use register::{Importer, Pages, RegisterRoute, Wanted, register};
pub use storage::{
    ChunkRoute, DeviceFacts, DirectIo, FileFacts, FileKind, HostFacts, IoUring, Operation,
    Residency, StorageRequest, StorageRoute, route_chunk, storage,
};

use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use crate::reason::Reason;

/// How far a caller lets the plan go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The straightest hardware path, or the route named; an error instead of anything else.
    Require,
    /// The best route that is open.
    #[default]
    Auto,
    /// Plain system calls and host memory only.
    Software,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Require, Self::Auto, Self::Software];

    /// The name as the command line writes it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Require => "require",
            Self::Auto => "auto",
            Self::Software => "software",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text is not the name of a mode or a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownName;

impl FromStr for Mode {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text).ok_or(UnknownName)
    }
}

/// How sure a route is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// A driver or the kernel says it can be done.
    Capable,
    /// Everything known about the path agrees.
    Plausible,
    /// Bytes went through and were compared. Files and configuration never give this.
    Verified,
}

impl Level {
    /// The name, for output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Capable => "capable",
            Self::Plausible => "plausible",
            Self::Verified => "verified",
        }
    }
}

/// A route that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice<R> {
    /// The route.
    pub route: R,
    /// How sure it is.
    pub level: Level,
    /// Why it stands at this place.
    pub why: Reason,
}

/// A route that may not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected<R> {
    /// The route.
    pub route: R,
    /// Why not.
    pub why: Reason,
}

/// The allowed routes in order of preference, and every other with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan<R> {
    /// Routes that may be used; empty where the request cannot be met.
    pub choices: Vec<Choice<R>>,
    /// Routes that may not.
    pub rejected: Vec<Rejected<R>>,
}

impl<R: Copy + PartialEq> Plan<R> {
    /// Whether `route` may be used.
    pub fn allows(&self, route: R) -> bool {
        self.choices.iter().any(|choice| choice.route == route)
    }

    /// Why `route` was refused, if it was.
    pub fn rejection(&self, route: R) -> Option<&Reason> {
        self.rejected.iter().find(|rejected| rejected.route == route).map(|rejected| &rejected.why)
    }
}
