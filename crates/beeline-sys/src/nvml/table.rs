//! The functions of `libnvidia-ml.so.1`, found at run time by their versioned names.

use std::ffi::c_char;
use std::mem::ManuallyDrop;
use std::path::Path;

use libloading::os::unix::{Library as Dl, RTLD_LOCAL, RTLD_NOW};

use super::{OpenError, RawBar1, RawDevice, RawPci, Return};
use crate::symbol::find;

const LIBRARY: &str = "libnvidia-ml.so.1";

macro_rules! table {
    (@type required ($($arg:ty),*)) => { unsafe extern "C" fn($($arg),*) -> Return };
    (@type optional ($($arg:ty),*)) => { Option<unsafe extern "C" fn($($arg),*) -> Return> };
    (@find required $found:expr, $name:ident) => {
        $found.ok_or(OpenError::SymbolMissing { symbol: stringify!($name) })?
    };
    (@find optional $found:expr, $name:ident) => { $found };
    ($($need:ident $name:ident $args:tt;)*) => {
        /// The library's functions by their names in nvml.h.
        #[expect(non_snake_case, reason = "the names of nvml.h")]
        pub(super) struct Table { $(pub(super) $name: table!(@type $need $args),)* }

        impl Table {
            fn load(dl: &Dl) -> Result<Self, OpenError> {
                Ok(Self { $($name: {
                    // SAFETY: the type is the signature that nvml.h gives the function of this name,
                    // which never changes: a new signature gets a new suffix.
                    let found = unsafe { find(dl, concat!(stringify!($name), "\0")) };
                    table!(@find $need found, $name)
                },)* })
            }
        }
    };
}

table! {
    required nvmlInit_v2 ();
    required nvmlShutdown ();
    required nvmlDeviceGetCount_v2 (*mut u32);
    required nvmlDeviceGetHandleByIndex_v2 (u32, *mut RawDevice);
    required nvmlDeviceGetPciInfo_v3 (RawDevice, *mut RawPci);
    optional nvmlSystemGetDriverVersion (*mut c_char, u32);
    optional nvmlSystemGetCudaDriverVersion_v2 (*mut i32);
    optional nvmlDeviceGetName (RawDevice, *mut c_char, u32);
    optional nvmlDeviceGetBAR1MemoryInfo (RawDevice, *mut RawBar1);
    optional nvmlDeviceGetMigMode (RawDevice, *mut u32, *mut u32);
    optional nvmlDeviceGetCudaComputeCapability (RawDevice, *mut i32, *mut i32);
    optional nvmlDeviceGetCurrPcieLinkGeneration (RawDevice, *mut u32);
    optional nvmlDeviceGetCurrPcieLinkWidth (RawDevice, *mut u32);
    optional nvmlDeviceGetMaxPcieLinkGeneration (RawDevice, *mut u32);
    optional nvmlDeviceGetMaxPcieLinkWidth (RawDevice, *mut u32);
    optional nvmlDeviceGetNvLinkState (RawDevice, u32, *mut u32);
    optional nvmlDeviceGetNvLinkRemotePciInfo_v2 (RawDevice, u32, *mut RawPci);
    optional nvmlDeviceGetNvLinkRemoteDeviceType (RawDevice, u32, *mut u32);
    optional nvmlDeviceGetP2PStatus (RawDevice, RawDevice, u32, *mut u32);
    optional nvmlDeviceGetTopologyCommonAncestor (RawDevice, RawDevice, *mut u32);
}

/// Loads the library, from `path` where one is given. It is never unloaded: it keeps state of its own.
pub(super) fn load(path: Option<&Path>) -> Result<Table, OpenError> {
    let name = path.unwrap_or(Path::new(LIBRARY));
    // SAFETY: initialisers of the vendor's library (or of a file that the user named in its place)
    // run here; loading it is what was asked for.
    let opened = unsafe { Dl::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
    let dl = opened.map_err(|error| {
        let text = std::error::Error::source(&error).map(ToString::to_string);
        let library = name.display().to_string();
        OpenError::Unloadable { library, text: text.unwrap_or_else(|| error.to_string()) }
    })?;
    Table::load(&ManuallyDrop::new(dl))
}
