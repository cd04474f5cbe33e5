//! The C boundary: what a C caller promises about its pointers, and nothing but numbers out.

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cu(pub(crate) i32);

impl Cu {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const INVALID_PTX: Self = Self(218);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const ILLEGAL_STATE: Self = Self(401);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const PEER_ACCESS_UNSUPPORTED: Self = Self(217);
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    pub(crate) const ALREADY_REGISTERED: Self = Self(712);
    pub(crate) const NOT_REGISTERED: Self = Self(713);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const CAPTURE_UNSUPPORTED: Self = Self(900);
    pub(crate) const CAPTURE_INVALIDATED: Self = Self(901);
    pub(crate) const CAPTURE_MERGE: Self = Self(902);
    pub(crate) const CAPTURE_UNMATCHED: Self = Self(903);
    pub(crate) const CAPTURE_UNJOINED: Self = Self(904);
    pub(crate) const CAPTURE_ISOLATION: Self = Self(905);
    pub(crate) const CAPTURE_IMPLICIT: Self = Self(906);
    pub(crate) const CAPTURED_EVENT: Self = Self(907);
    pub(crate) const CAPTURE_WRONG_THREAD: Self = Self(908);
    pub(crate) const UNKNOWN: Self = Self(999);
}

/// Runs the body of an exported function; a panic becomes `CUDA_ERROR_UNKNOWN`.
pub(crate) fn boundary(body: impl FnOnce() -> Result<(), Cu>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => Cu::UNKNOWN.0,
    }
}

thread_local! {
    /// Calls of the driver API that the thread has made.
    pub(crate) static CALLS: std::cell::Cell<i64> = const { std::cell::Cell::new(0) };
}

/// Defines exported functions of the driver API.
///
/// The library itself uses the functions by addresses of its own, not by the exported names: a test
/// that takes a name away still gets a library that loads.
macro_rules! export {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[allow(non_snake_case, reason = "the names of cuda.h")]
        pub(crate) extern "C" fn $name($($arg: $type),*) -> i32 {
            $crate::ffi::CALLS.set($crate::ffi::CALLS.get() + 1);
            $crate::ffi::boundary(move || $body)
        }

        const _: () = {
            #[unsafe(export_name = stringify!($name))]
            extern "C" fn exported($($arg: $type),*) -> i32 {
                $name($($arg),*)
            }
        };
    )*};
}
pub(crate) use export;

/// A place that a C caller offers for one value.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) const fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn set(self, value: T) -> Result<(), Cu> {
        if self.0.is_null() {
            return Err(Cu::INVALID_VALUE);
        }
        // SAFETY: only a C caller makes this value; it promises that the pointer is null or a place
        // for one `T`.
        unsafe { self.0.write(value) };
        Ok(())
    }
}

/// An array that a C caller passes.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) const fn new(place: *const T) -> Self {
        Self(place)
    }

    pub(crate) fn at(&self, index: usize) -> Result<T, Cu> {
        if self.0.is_null() {
            return Err(Cu::INVALID_VALUE);
        }
        // SAFETY: only a C caller makes this value; the documented length of the array covers `index`.
        let element = unsafe { self.0.add(index) };
        // SAFETY: as above.
        Ok(unsafe { element.read() })
    }
}

/// A C string that a C caller passes.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn read(&self) -> Result<String, Cu> {
        if self.0.is_null() {
            return Err(Cu::INVALID_VALUE);
        }
        // SAFETY: only a C caller makes this value; it promises a string that ends with a zero byte.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// Reads a value through an untyped pointer, as kernel parameters are passed.
pub(crate) fn read<T: Copy>(place: *mut c_void) -> Result<T, Cu> {
    In(place.cast_const().cast::<T>()).at(0)
}

/// Writes a value through an untyped pointer, as pointer attributes are answered.
pub(crate) fn write<T>(place: *mut c_void, value: T) -> Result<(), Cu> {
    Out(place.cast::<T>()).set(value)
}

/// Copies `text` and a zero byte into `len` bytes at `place`, cut where it does not fit.
pub(crate) fn write_text(place: *mut c_char, len: usize, text: &str) -> Result<(), Cu> {
    if place.is_null() || len == 0 {
        return Err(Cu::INVALID_VALUE);
    }
    let cut = text.len().min(len - 1);
    // SAFETY: the caller offers `len` bytes, and `cut` is less.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), cut) };
    // SAFETY: `cut < len`.
    let end = unsafe { place.add(cut) };
    // SAFETY: as above.
    unsafe { end.write(0) };
    Ok(())
}
