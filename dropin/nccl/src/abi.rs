//! The C boundary: types of `nccl.h` 2.28, and what a C caller promises about its pointers.

use std::ffi::c_void;

use beeline::collective::UNIQUE_ID_BYTES;

use crate::failure::Failure;

/// `NCCL_VERSION_CODE` of 2.28.9.
pub(crate) const VERSION: i32 = 22_809;
/// `NCCL_API_MAGIC`.
const MAGIC: u32 = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: i32 = i32::MIN;

/// Defines exported functions and their profiling twins.
macro_rules! export {
    ($($(#[$doc:meta])* fn $name:ident, $twin:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        const _: () = {
            #[unsafe(export_name = stringify!($name))]
            extern "C" fn exported($($arg: $type),*) -> $crate::failure::Status {
                $crate::failure::boundary(stringify!($name), move || $body)
            }
            #[unsafe(export_name = stringify!($twin))]
            extern "C" fn twin($($arg: $type),*) -> $crate::failure::Status {
                exported($($arg),*)
            }
        };
    )*};
}
pub(crate) use export;

/// Defines exported functions that answer a value.
macro_rules! export_value {
    ($(fn $name:ident, $twin:ident($($arg:ident: $type:ty),* $(,)?) -> $answer:ty $body:block)*) => {$(
        const _: () = {
            #[unsafe(export_name = stringify!($name))]
            extern "C" fn exported($($arg: $type),*) -> $answer {
                let body = move || $body;
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or_default()
            }
            #[unsafe(export_name = stringify!($twin))]
            extern "C" fn twin($($arg: $type),*) -> $answer {
                exported($($arg),*)
            }
        };
    )*};
}
pub(crate) use export_value;

/// `ncclUniqueId`, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawId(pub(crate) [u8; UNIQUE_ID_BYTES]);

/// `ncclTeam_t`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Team {
    pub(crate) ranks: i32,
    pub(crate) rank: i32,
    pub(crate) stride: i32,
}

/// A place that a C caller offers for one value.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    pub(crate) fn check(self) -> Result<(), Failure> {
        if self.0.is_null() {
            Err(Failure::argument("the place for the answer is null"))
        } else {
            Ok(())
        }
    }

    pub(crate) fn set(self, value: T) -> Result<(), Failure> {
        self.check()?;
        // SAFETY: only a C caller makes this value; it promises that the pointer is null or a place for
        // one `T`.
        unsafe { self.0.write(value) };
        Ok(())
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// What is there now.
    pub(crate) fn read(self) -> Result<T, Failure>
    where
        T: Copy,
    {
        In(self.0.cast_const()).at(0)
    }

    /// Place `index` of several.
    pub(crate) fn nth(self, index: usize) -> Self {
        Self(self.0.wrapping_add(index))
    }
}

/// An array that a C caller passes.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn at(self, index: usize) -> Result<T, Failure> {
        if self.0.is_null() {
            return Err(Failure::argument("a pointer to arguments is null"));
        }
        // SAFETY: only a C caller makes this value; the length passed with it covers `index`.
        let element = unsafe { self.0.add(index) };
        // SAFETY: as above; no alignment is asked of the caller.
        Ok(unsafe { element.read_unaligned() })
    }

    /// Bytes from the start on, whatever they are.
    pub(crate) fn bytes(self, len: usize) -> Result<Vec<u8>, Failure> {
        (0..len).map(|index| In(self.0.cast::<u8>()).at(index)).collect()
    }
}

/// An address in device memory, or a handle of the driver.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Address(*mut c_void);

impl Address {
    pub(crate) fn get(self) -> u64 {
        self.0.addr() as u64
    }

    /// As a place that is read.
    pub(crate) const fn read(self) -> In<u8> {
        In(self.0.cast_const().cast())
    }
}

impl Default for Address {
    fn default() -> Self {
        Self(std::ptr::null_mut())
    }
}

/// What this library uses of `ncclConfig_t`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) blocking: bool,
    pub(crate) ctas_max: u32,
    /// Flags of `CTAPolicy`.
    pub(crate) policy: u32,
}

impl Config {
    /// Reads a configuration of any version: as many bytes as it says, at most what is known here.
    pub(crate) fn read(config: In<u8>) -> Result<Self, Failure> {
        const KNOWN: usize = 80;
        let mut fields = Self { blocking: true, ctas_max: 0, policy: 0 };
        if config.is_null() {
            return Ok(fields);
        }
        let head = config.bytes(16)?;
        let word = |bytes: &[u8], at: usize| {
            bytes
                .get(at..at + 4)
                .and_then(|four| four.first_chunk::<4>())
                .map(|four| u32::from_ne_bytes(*four))
        };
        let size = word(&head, 0).unwrap_or(0) as usize;
        if word(&head, 8) != Some(MAGIC) || size < 16 {
            return Err(Failure::argument(
                "the configuration was not set up with NCCL_CONFIG_INITIALIZER",
            ));
        }
        let bytes = config.bytes(size.min(KNOWN))?;
        let field = |at| word(&bytes, at).map(u32::cast_signed).filter(|value| *value != UNDEFINED);
        match field(16) {
            Some(0) => fields.blocking = false,
            None | Some(1) => {}
            Some(other) => {
                return Err(Failure::argument(format!("blocking is {other}, not 0 or 1")));
            }
        }
        let (least, most) = (field(24), field(28));
        for ctas in [least, most].into_iter().flatten() {
            if ctas <= 0 {
                return Err(Failure::argument(format!("{ctas} CTAs")));
            }
        }
        if least.zip(most).is_some_and(|(least, most)| least > most) {
            return Err(Failure::argument("minCTAs is above maxCTAs"));
        }
        fields.ctas_max = most.map_or(0, i32::cast_unsigned);
        fields.policy = match field(60).unwrap_or(0) {
            policy @ 0..=3 => policy.cast_unsigned(),
            other => return Err(Failure::argument(format!("the CTA policy is {other}"))),
        };
        Ok(fields)
    }
}
