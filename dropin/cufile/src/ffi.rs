//! What a C caller promises about its pointers, and how failures go back to it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use beeline::cufile::{Failure, OpError};
use beeline_sys::user::set_errno;

use crate::layout::CUfileError;

/// Runs the body of a function that answers a `CUfileError_t`.
pub(crate) fn status(name: &str, body: impl FnOnce() -> Result<(), Failure>) -> CUfileError {
    match caught(name, body) {
        Ok(Ok(())) => CUfileError { err: 0, cu_err: 0 },
        Ok(Err(failure)) => {
            if failure.errno != 0 {
                set_errno(failure.errno);
            }
            CUfileError { err: failure.code.0, cu_err: failure.cuda }
        }
        Err(_) => CUfileError { err: OpError::INTERNAL_ERROR.0, cu_err: 0 },
    }
}

/// Runs the body of a function that answers a number of bytes: -1 with `errno`, or a negative code.
pub(crate) fn bytes(name: &str, body: impl FnOnce() -> Result<u64, Failure>) -> isize {
    match caught(name, body) {
        Ok(Ok(bytes)) => isize::try_from(bytes).unwrap_or(isize::MAX),
        Ok(Err(failure)) => {
            let (value, errno) = failure.returned();
            set_errno(errno);
            value
        }
        Err(_) => -(OpError::INTERNAL_ERROR.0 as isize),
    }
}

/// Runs `body`, logging before it and after it included, so that no panic goes to the caller.
fn caught<T>(
    name: &str,
    body: impl FnOnce() -> Result<T, Failure>,
) -> std::thread::Result<Result<T, Failure>> {
    catch_unwind(AssertUnwindSafe(|| {
        crate::log::start();
        body().inspect_err(|failure| crate::log::failed(name, failure))
    }))
}

pub(crate) fn value(text: impl Into<String>) -> Failure {
    Failure::refused(text)
}

/// A place that a C caller offers for one value, or none.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) fn set(&self, value: T) -> Result<(), Failure> {
        self.check()?;
        // SAFETY: only a C caller makes this value; it promises that the pointer is null or a place
        // for one `T`.
        unsafe { self.0.write(value) };
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.0.is_null() {
            Err(value("the place for the answer is a null pointer"))
        } else {
            Ok(())
        }
    }

    pub(crate) const fn raw(&self) -> *mut T {
        self.0
    }
}

impl<T: Copy> Out<T> {
    pub(crate) fn get(&self) -> Result<T, Failure> {
        self.check()?;
        // SAFETY: as above; such a place has a value where the documentation says that it is read.
        Ok(unsafe { self.0.read() })
    }

    /// Writes `values`, for which the caller promised room.
    pub(crate) fn set_all(&self, values: &[T]) -> Result<(), Failure> {
        self.check()?;
        // SAFETY: the caller of the C function said how many there is room for, and the caller here
        // passes no more.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0, values.len()) };
        Ok(())
    }
}

/// An array or a structure that a C caller passes, or none.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> Result<T, Failure> {
        Ok(*self.all(1)?.first().ok_or_else(|| value("an empty array"))?)
    }

    /// The first `count` elements.
    pub(crate) fn all(&self, count: usize) -> Result<Vec<T>, Failure> {
        if self.0.is_null() {
            return Err(value("an argument is a null pointer"));
        }
        let mut values = Vec::with_capacity(count);
        // SAFETY: only a C caller makes this value; it promises `count` elements.
        unsafe { std::ptr::copy_nonoverlapping(self.0, values.as_mut_ptr(), count) };
        // SAFETY: the elements were just copied, and there was room for them.
        unsafe { values.set_len(count) };
        Ok(values)
    }
}

/// A C string that a C caller passes, or none.
#[repr(transparent)]
pub(crate) struct Text(*const std::ffi::c_char);

impl Text {
    pub(crate) fn read(&self) -> Result<String, Failure> {
        if self.0.is_null() {
            return Err(value("the text is a null pointer"));
        }
        // SAFETY: only a C caller makes this value; it promises a string that ends with a zero byte.
        Ok(unsafe { std::ffi::CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
