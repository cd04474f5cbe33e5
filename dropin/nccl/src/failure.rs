//! Failures: results of the C interface, and the text behind the last one.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use beeline::Error;

/// `ncclResult_t`.
pub(crate) type Status = i32;

pub(crate) const SUCCESS: Status = 0;
pub(crate) const UNHANDLED_CUDA: Status = 1;
pub(crate) const SYSTEM: Status = 2;
pub(crate) const INTERNAL: Status = 3;
pub(crate) const INVALID_ARGUMENT: Status = 4;
pub(crate) const INVALID_USAGE: Status = 5;
pub(crate) const REMOTE: Status = 6;
pub(crate) const IN_PROGRESS: Status = 7;

/// A result other than success, and why.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self { status: INVALID_ARGUMENT, text: text.into() }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { status: INVALID_USAGE, text: text.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error.code() {
            "collective-mismatch" | "collective-spans-hosts" | "stream-capturing" => INVALID_USAGE,
            "collective-straggler"
            | "collective-stalled"
            | "collective-rank-lost"
            | "collective-aborted" => REMOTE,
            _ if error.is_refused() => INVALID_ARGUMENT,
            _ if error.is_timeout() => REMOTE,
            _ if error.is_device() || error.is_out_of_memory() => UNHANDLED_CUDA,
            _ => SYSTEM,
        };
        Self { status, text: format!("{error:#}") }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of an exported function; a panic becomes `ncclInternalError`.
pub(crate) fn boundary(name: &str, body: impl FnOnce() -> Result<(), Failure>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(failure)) => {
            // "In progress" is an answer, not a failure.
            if failure.status != IN_PROGRESS {
                note(&format!("{name}: {}", failure.text));
            }
            failure.status
        }
        Err(_) => {
            note(&format!("{name}: a bug in this library"));
            INTERNAL
        }
    }
}

/// Keeps `text` as what went wrong last in this thread.
pub(crate) fn note(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // Fails only while the thread ends.
    let _ = LAST.try_with(|last| last.replace(text));
}

/// What went wrong last in this thread; valid until something else does.
pub(crate) fn last() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The words for a result.
pub(crate) const fn words(status: Status) -> &'static CStr {
    match status {
        SUCCESS => c"no error",
        UNHANDLED_CUDA => c"unhandled cuda error (see ncclGetLastError)",
        SYSTEM => c"unhandled system error (see ncclGetLastError)",
        INTERNAL => c"internal error",
        INVALID_ARGUMENT => c"invalid argument (see ncclGetLastError)",
        INVALID_USAGE => c"invalid usage (see ncclGetLastError)",
        REMOTE => c"remote process exited or there was a network error (see ncclGetLastError)",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}
