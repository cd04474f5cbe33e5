//! What a cuFile call answers when it fails.

use std::fmt;
use std::io;

use beeline_sys::cuda::Error as CudaError;

/// A `CUfileOpError`: 0 is success, the others start at 5001.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpError(pub i32);

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        #[expect(missing_docs, reason = "the names and numbers of the API; the text stands in `text`")]
        impl OpError {
            $(pub const $name: Self = Self($number);)*

            /// What the code means, for people.
            pub const fn text(self) -> &'static str {
                match self.0 {
                    $($number => $text,)*
                    _ => "unknown cuFile error",
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0, "success";
    DRIVER_NOT_INITIALIZED = 5001, "the driver is not open";
    DRIVER_UNSUPPORTED_LIMIT = 5003, "the limit is outside what is supported";
    PLATFORM_NOT_SUPPORTED = 5007, "the platform is not supported";
    IO_NOT_SUPPORTED = 5008, "this kind of file handle is not supported";
    CUDA_DRIVER_ERROR = 5011, "the CUDA driver answered an error";
    CUDA_POINTER_INVALID = 5012, "the pointer is not one of the CUDA driver";
    CUDA_MEMORY_TYPE_INVALID = 5013, "this kind of memory cannot be registered";
    CUDA_POINTER_RANGE_ERROR = 5014, "the range does not lie inside its allocation";
    INVALID_MAPPING_RANGE = 5017, "the range does not lie inside the registered buffer";
    INVALID_FILE_TYPE = 5018, "the file has no bytes at offsets";
    INVALID_FILE_OPEN_FLAG = 5019, "the file was opened with flags that do not allow this";
    INVALID_VALUE = 5022, "an argument is not valid";
    MEMORY_ALREADY_REGISTERED = 5023, "the memory is registered already";
    MEMORY_NOT_REGISTERED = 5024, "the memory is not registered";
    DRIVER_ALREADY_OPEN = 5026, "the driver is open already";
    HANDLE_NOT_REGISTERED = 5027, "the file handle is not registered";
    HANDLE_ALREADY_REGISTERED = 5028, "the file descriptor is registered already";
    DEVICE_NOT_FOUND = 5029, "the device was not found";
    INTERNAL_ERROR = 5030, "an internal error";
    GETNEWFD_FAILED = 5031, "no descriptor of the other kind could be had";
    IO_DISABLED = 5034, "I/O is disabled in this process";
    BATCH_FULL = 5037, "the batch has no room for so many entries";
    ASYNC_NOT_SUPPORTED = 5038, "stream-ordered I/O is not supported here";
}

impl fmt::Debug for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.text())
    }
}

/// Why a call failed: a code of the API or an error of the system, and a sentence.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The code; `INTERNAL_ERROR` for an error of the system.
    pub code: OpError,
    /// The system's error number, 0 where the API itself refuses.
    pub errno: i32,
    /// The CUDA driver's answer, 0 where it has no part in it.
    pub cuda: i32,
    /// Which call, with which values, and what to do.
    pub text: String,
}

impl Failure {
    /// A refusal by the API itself: `code`, and the sentence.
    pub fn of(code: OpError, text: impl Into<String>) -> Self {
        Self::new(code, text)
    }

    /// An argument that is not valid.
    pub fn refused(text: impl Into<String>) -> Self {
        Self::value(text)
    }

    pub(super) fn new(code: OpError, text: impl Into<String>) -> Self {
        Self { code, errno: 0, cuda: 0, text: text.into() }
    }

    pub(super) fn value(text: impl Into<String>) -> Self {
        Self::new(OpError::INVALID_VALUE, text)
    }

    pub(super) fn io(action: impl fmt::Display, error: &io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error());
        Self { code: OpError::INTERNAL_ERROR, errno, cuda: 0, text: format!("{action}: {error}") }
    }

    pub(super) fn cuda(action: impl fmt::Display, error: &CudaError) -> Self {
        let result = error.result().map_or(0, |result| result.0);
        let code = match error {
            CudaError::Capturing | CudaError::Unsupported { .. } => OpError::ASYNC_NOT_SUPPORTED,
            _ if result == 1 => OpError::CUDA_POINTER_INVALID,
            _ => OpError::CUDA_DRIVER_ERROR,
        };
        Self { code, errno: 0, cuda: result, text: format!("{action}: {error}") }
    }

    pub(super) fn timeout(text: impl Into<String>) -> Self {
        let errno = rustix::io::Errno::TIMEDOUT.raw_os_error();
        Self { code: OpError::INTERNAL_ERROR, errno, cuda: 0, text: text.into() }
    }

    /// What `cuFileRead` and its kin return: -1 for an error of the system, with `errno` to be set;
    /// otherwise the negative code, with `EINVAL`.
    pub fn returned(&self) -> (isize, i32) {
        if self.errno != 0 {
            return (-1, self.errno);
        }
        (-(self.code.0 as isize), rustix::io::Errno::INVAL.raw_os_error())
    }

    /// What a batch event or a stream-ordered call reports: the negative error number of the system, or
    /// the negative code.
    pub fn reported(&self) -> isize {
        if self.errno != 0 { -(self.errno as isize) } else { -(self.code.0 as isize) }
    }
}

impl From<crate::Error> for Failure {
    fn from(error: crate::Error) -> Self {
        let text = format!("{error:#}");
        if let Some(errno) = error.errno() {
            return Self { code: OpError::INTERNAL_ERROR, errno, cuda: 0, text };
        }
        let code = match () {
            () if error.is_timeout() => return Self::timeout(text),
            () if error.is_device() => OpError::CUDA_DRIVER_ERROR,
            () if error.is_not_found() => OpError::DEVICE_NOT_FOUND,
            () if error.is_refused() => OpError::INVALID_VALUE,
            () => OpError::INTERNAL_ERROR,
        };
        Self { code, errno: 0, cuda: 0, text }
    }
}

pub(super) type Outcome<T> = Result<T, Failure>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_errors_and_codes_are_told_apart() {
        let denied = io::Error::from_raw_os_error(13);
        assert_eq!(Failure::io("read", &denied).returned(), (-1, 13));
        assert_eq!(Failure::io("read", &denied).reported(), -13);
        assert_eq!(Failure::value("x").returned(), (-5022, 22));
        assert_eq!(Failure::value("x").reported(), -5022);
        assert_eq!(Failure::timeout("x").returned(), (-1, 110));
        assert_eq!(format!("{:?}", OpError(5999)), "5999 (unknown cuFile error)");
    }
}
