//! Structures of the API, as `include/cufile.h` lays them out (compared by a test).

use std::ffi::c_void;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct CUfileError {
    pub(crate) err: i32,
    pub(crate) cu_err: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct CUfileDescr {
    pub(crate) kind: i32,
    /// A descriptor in the low half for kind 1.
    pub(crate) handle: u64,
    pub(crate) fs_ops: *const c_void,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct DrvProps {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) poll_kb: usize,
    pub(crate) direct_kb: usize,
    pub(crate) status_flags: u32,
    pub(crate) control_flags: u32,
    pub(crate) feature_flags: u32,
    pub(crate) cache_kb: u32,
    pub(crate) per_buffer_kb: u32,
    pub(crate) pinned_kb: u32,
    pub(crate) batch: u32,
    pub(crate) batch_ms: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IoParams {
    pub(crate) mode: i32,
    pub(crate) ptr: u64,
    pub(crate) file_offset: i64,
    pub(crate) ptr_offset: i64,
    pub(crate) size: usize,
    pub(crate) handle: usize,
    pub(crate) opcode: i32,
    pub(crate) cookie: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IoEvent {
    pub(crate) cookie: u64,
    pub(crate) status: i32,
    pub(crate) ret: isize,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IoVec {
    pub(crate) base: u64,
    pub(crate) len: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Timespec {
    pub(crate) seconds: i64,
    pub(crate) nanos: i64,
}

const _: () = {
    assert!(size_of::<CUfileError>() == 8);
    assert!(size_of::<CUfileDescr>() == 24);
    assert!(size_of::<DrvProps>() == 56);
    assert!(size_of::<IoParams>() == 64);
    assert!(size_of::<IoEvent>() == 24);
    assert!(size_of::<IoVec>() == 16);
};
