//! The one error type of the library.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::Path;

use beeline_core::reason::Reason;

/// The result of everything in this library that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What failed, with which values, and what to do about it.
///
/// The type is opaque: ask it with the predicates (`is_timeout`, `is_not_found`, ...), print it with
/// `{}` for one line or `{:#}` for the line, its causes and the remedy.
pub struct Error {
    inner: Box<Inner>,
}

struct Inner {
    kind: Kind,
    message: String,
    code: Option<&'static str>,
    remedy: Option<String>,
    reasons: Vec<Reason>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The classes that callers tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The wait was given up by its owner.
    Cancelled,
    /// The contents are not what they should be.
    Corrupt,
    /// A device refused, failed or was lost.
    Device,
    /// The system refused an I/O operation.
    Io,
    /// No route is left under the mode that was asked for.
    NoRoute,
    /// The thing named does not exist.
    NotFound,
    /// A device or host pool has not enough memory.
    OutOfMemory,
    /// The caller may not do this.
    PermissionDenied,
    /// The input or argument cannot be accepted.
    Refused,
    /// The deadline passed first.
    Timeout,
}

impl Error {
    #[cold]
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            inner: Box::new(Inner {
                kind,
                message: message.into(),
                code: None,
                remedy: None,
                reasons: Vec::new(),
                source: None,
            }),
        }
    }

    /// The input or argument cannot be accepted.
    #[cold]
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self::new(Kind::Refused, message)
    }

    /// `action` (a verb with its object) failed with what the kernel said.
    #[cold]
    pub(crate) fn io(action: impl fmt::Display, error: io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => Kind::NotFound,
            io::ErrorKind::PermissionDenied => Kind::PermissionDenied,
            io::ErrorKind::OutOfMemory => Kind::OutOfMemory,
            _ => Kind::Io,
        };
        let new = Self::new(kind, format!("cannot {action}"));
        let remedy = io_remedy(&error);
        let new = new.because(error);
        if remedy.is_empty() { new } else { new.remedy(remedy) }
    }

    /// [`Self::io`] on a path.
    #[cold]
    pub(crate) fn at(action: &str, path: &Path, error: io::Error) -> Self {
        Self::io(format_args!("{action} {}", path.display()), error)
    }

    pub(crate) fn because(mut self, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.inner.source = Some(cause.into());
        self
    }

    pub(crate) fn remedy(mut self, text: impl Into<String>) -> Self {
        self.inner.remedy = Some(text.into());
        self
    }

    pub(crate) fn coded(mut self, code: &'static str) -> Self {
        self.inner.code = Some(code);
        self
    }

    pub(crate) fn with_reasons(mut self, reasons: Vec<Reason>) -> Self {
        self.inner.reasons = reasons;
        self
    }

    pub(crate) const fn kind(&self) -> Kind {
        self.inner.kind
    }

    /// A stable name of the cause where there is one: a format code (`header-too-large`) or a
    /// class (`timeout`). The text never changes its meaning between releases.
    pub fn code(&self) -> &'static str {
        if let Some(code) = self.inner.code {
            return code;
        }
        match self.inner.kind {
            Kind::Cancelled => "cancelled",
            Kind::Corrupt => "corrupt",
            Kind::Device => "device-failed",
            Kind::Io => "io-failed",
            Kind::NoRoute => "no-route",
            Kind::NotFound => "not-found",
            Kind::OutOfMemory => "out-of-memory",
            Kind::PermissionDenied => "permission-denied",
            Kind::Refused => "refused",
            Kind::Timeout => "timeout",
        }
    }

    /// What a person can do about it, if anything is known to help.
    pub fn hint(&self) -> Option<&str> {
        self.inner.remedy.as_deref()
    }

    /// Why each route was refused, where no route was left.
    pub fn reasons(&self) -> &[Reason] {
        &self.inner.reasons
    }

    /// The system's error number at the end of the cause chain, if one is there.
    pub fn errno(&self) -> Option<i32> {
        let mut cause: Option<&(dyn StdError + 'static)> = StdError::source(self);
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<io::Error>() {
                return io.raw_os_error();
            }
            cause = error.source();
        }
        None
    }

    /// The operation was cancelled by its owner.
    pub fn is_cancelled(&self) -> bool {
        self.inner.kind == Kind::Cancelled
    }

    /// Contents differ from what they should be: a checksum, a file that changed while it was read.
    pub fn is_corrupt(&self) -> bool {
        self.inner.kind == Kind::Corrupt
    }

    /// A device refused, failed or was lost.
    pub fn is_device(&self) -> bool {
        self.inner.kind == Kind::Device
    }

    /// No route is left under the mode that was asked for; [`Self::reasons`] says why.
    pub fn is_no_route(&self) -> bool {
        self.inner.kind == Kind::NoRoute
    }

    /// The thing named does not exist.
    pub fn is_not_found(&self) -> bool {
        self.inner.kind == Kind::NotFound
    }

    /// A device or the host has not enough memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.inner.kind == Kind::OutOfMemory
    }

    /// The caller may not do this.
    pub fn is_permission_denied(&self) -> bool {
        self.inner.kind == Kind::PermissionDenied
    }

    /// The input or an argument was refused; trying again gives the same answer.
    pub fn is_refused(&self) -> bool {
        self.inner.kind == Kind::Refused
    }

    /// The deadline passed first. The operation may still be under way; its memory is quarantined.
    pub fn is_timeout(&self) -> bool {
        self.inner.kind == Kind::Timeout
    }
}

fn io_remedy(error: &io::Error) -> &'static str {
    use rustix::io::Errno;
    let code = error.raw_os_error();
    if code == Some(Errno::MFILE.raw_os_error()) || code == Some(Errno::NFILE.raw_os_error()) {
        return "raise the limit of open files (ulimit -n); a file takes two, a thread one more";
    }
    match error.kind() {
        io::ErrorKind::PermissionDenied => "check the permissions of the file and its folders",
        io::ErrorKind::StorageFull => "free space on that file system",
        io::ErrorKind::FileTooLarge => {
            "raise the limit of file sizes (ulimit -f), or use a file system that holds larger files"
        }
        io::ErrorKind::QuotaExceeded => "free space within the quota",
        io::ErrorKind::ReadOnlyFilesystem => "write to a file system that is mounted read-write",
        _ => "",
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner.message)?;
        let mut cause = StdError::source(self);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        if f.alternate() {
            for reason in &self.inner.reasons {
                write!(f, "\n  - {reason}")?;
            }
            if let Some(remedy) = self.hint() {
                write!(f, "\n  try: {remedy}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self:#})", self.inner.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.inner.source.as_deref().map(|cause| cause as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_says_what_why_and_what_to_do() {
        let cause = io::Error::from_raw_os_error(28);
        let error = Error::at("write", Path::new("/tmp/x"), cause);
        assert_eq!(error.errno(), Some(28));
        assert!(error.to_string().starts_with("cannot write /tmp/x: "));
        assert!(format!("{error:#}").contains("\n  try: free space"));
        assert_eq!(error.code(), "io-failed");
    }
}
