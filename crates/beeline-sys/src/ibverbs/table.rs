//! The functions of `libibverbs.so.1`, found at run time by their names.
//!
//! `dlsym` answers with a name's default version, which never changes its signature. What the header
//! defines as an inline function is not here: those go through the context's own table
//! ([`super::types::ContextOps`]).

use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;

use libloading::os::unix::{Library as Dl, RTLD_LOCAL, RTLD_NOW};

use super::LoadError;
use super::types::*;
use crate::symbol::find;

pub(super) const LIBRARY: &str = "libibverbs.so.1";

macro_rules! table {
    (@type required $type:ty) => { $type };
    (@type optional $type:ty) => { Option<$type> };
    (@find required $found:expr, $name:ident) => {
        $found.ok_or(LoadError::SymbolMissing { symbol: stringify!($name) })?
    };
    (@find optional $found:expr, $name:ident) => { $found };
    ($($need:ident $name:ident: $type:ty;)*) => {
        /// The library's functions by their names in verbs.h.
        #[derive(Debug)]
        pub(super) struct Table { $(pub(super) $name: table!(@type $need $type),)* }

        impl Table {
            fn load(dl: &Dl) -> Result<Self, LoadError> {
                Ok(Self { $($name: {
                    // SAFETY: the type is the signature that verbs.h gives the function of this name,
                    // and the default version of a name keeps its signature.
                    let found: Option<$type> = unsafe { find(dl, concat!(stringify!($name), "\0")) };
                    table!(@find $need found, $name)
                },)* })
            }
        }
    };
}

table! {
    required ibv_get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut RawDevice;
    required ibv_free_device_list: unsafe extern "C" fn(*mut *mut RawDevice);
    required ibv_get_device_name: unsafe extern "C" fn(*mut RawDevice) -> *const c_char;
    required ibv_open_device: unsafe extern "C" fn(*mut RawDevice) -> *mut RawContext;
    required ibv_close_device: unsafe extern "C" fn(*mut RawContext) -> c_int;
    required ibv_query_device: unsafe extern "C" fn(*mut RawContext, *mut RawDeviceAttr) -> c_int;
    // Fills the fields up to `link_layer`, as it did when it was first exported.
    required ibv_query_port: unsafe extern "C" fn(*mut RawContext, u8, *mut RawPortAttr) -> c_int;
    required ibv_query_gid: unsafe extern "C" fn(*mut RawContext, u8, c_int, *mut RawGid) -> c_int;
    optional _ibv_query_gid_ex: unsafe extern "C" fn(*mut RawContext, u32, u32, *mut RawGidEntry, u32, usize) -> c_int;
    required ibv_get_async_event: unsafe extern "C" fn(*mut RawContext, *mut RawAsyncEvent) -> c_int;
    required ibv_ack_async_event: unsafe extern "C" fn(*mut RawAsyncEvent);

    required ibv_alloc_pd: unsafe extern "C" fn(*mut RawContext) -> *mut RawPd;
    required ibv_dealloc_pd: unsafe extern "C" fn(*mut RawPd) -> c_int;
    required ibv_reg_mr: unsafe extern "C" fn(*mut RawPd, *mut c_void, usize, c_int) -> *mut RawMr;
    optional ibv_reg_mr_iova2: unsafe extern "C" fn(*mut RawPd, *mut c_void, usize, u64, u32) -> *mut RawMr;
    optional ibv_reg_dmabuf_mr: unsafe extern "C" fn(*mut RawPd, u64, usize, u64, c_int, c_int) -> *mut RawMr;
    required ibv_dereg_mr: unsafe extern "C" fn(*mut RawMr) -> c_int;

    required ibv_create_comp_channel: unsafe extern "C" fn(*mut RawContext) -> *mut RawChannel;
    required ibv_destroy_comp_channel: unsafe extern "C" fn(*mut RawChannel) -> c_int;
    required ibv_create_cq: unsafe extern "C" fn(*mut RawContext, c_int, *mut c_void, *mut RawChannel, c_int) -> *mut RawCq;
    required ibv_destroy_cq: unsafe extern "C" fn(*mut RawCq) -> c_int;
    required ibv_get_cq_event: unsafe extern "C" fn(*mut RawChannel, *mut *mut RawCq, *mut *mut c_void) -> c_int;
    required ibv_ack_cq_events: unsafe extern "C" fn(*mut RawCq, u32);

    required ibv_create_srq: unsafe extern "C" fn(*mut RawPd, *mut RawSrqInitAttr) -> *mut RawSrq;
    required ibv_modify_srq: unsafe extern "C" fn(*mut RawSrq, *mut RawSrqAttr, c_int) -> c_int;
    required ibv_destroy_srq: unsafe extern "C" fn(*mut RawSrq) -> c_int;
    required ibv_create_qp: unsafe extern "C" fn(*mut RawPd, *mut RawQpInitAttr) -> *mut RawQp;
    required ibv_modify_qp: unsafe extern "C" fn(*mut RawQp, *mut RawQpAttr, c_int) -> c_int;
    required ibv_query_qp: unsafe extern "C" fn(*mut RawQp, *mut RawQpAttr, c_int, *mut RawQpInitAttr) -> c_int;
    required ibv_destroy_qp: unsafe extern "C" fn(*mut RawQp) -> c_int;
    required ibv_create_ah: unsafe extern "C" fn(*mut RawPd, *mut RawAhAttr) -> *mut RawAh;
    required ibv_destroy_ah: unsafe extern "C" fn(*mut RawAh) -> c_int;
}

/// Loads the library. It is never unloaded: its providers keep threads and handlers of their own.
pub(super) fn load() -> Result<Table, LoadError> {
    // SAFETY: initialisers of the system's library run here; loading it is what was asked for.
    let opened = unsafe { Dl::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) };
    let dl = opened.map_err(|error| {
        let text = std::error::Error::source(&error).map(ToString::to_string);
        LoadError::Unloadable { text: text.unwrap_or_else(|| error.to_string()) }
    })?;
    Table::load(&ManuallyDrop::new(dl))
}
