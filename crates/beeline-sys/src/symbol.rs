//! Functions of a library that is loaded at run time.

use std::ffi::c_void;

use libloading::os::unix::Library as Dl;

/// The function of `dl` with this name, which ends in a zero byte; none where there is none.
///
/// # Safety
/// `F` is a function pointer type with the signature of the function that is exported as `name`.
pub(crate) unsafe fn find<F: Copy>(dl: &Dl, name: &str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the symbol is only read as an address here.
    let symbol = unsafe { dl.get::<*mut c_void>(name.as_bytes()) }.ok()?;
    let found = symbol.into_raw();
    if found.is_null() {
        return None;
    }
    // SAFETY: the sizes are equal, the address is not null, and the caller promises its type.
    Some(unsafe { std::mem::transmute_copy(&found) })
}
