//! The structures of `infiniband/verbs.h`, as its stable ABI lays them out.
//!
//! Structures that the library makes are described as far as they are read here, never made or copied.
//! `tests::layout` compares every offset with the header's where one is installed.

use std::ffi::{c_char, c_int, c_void};

/// `union ibv_gid`. The header's has 64-bit members, hence the alignment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(8))]
pub(super) struct RawGid(pub(super) [u8; 16]);

/// `struct ibv_gid_entry`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct RawGidEntry {
    pub(super) gid: RawGid,
    pub(super) gid_index: u32,
    pub(super) port_num: u32,
    pub(super) gid_type: u32,
    pub(super) ndev_ifindex: u32,
}

/// `struct ibv_device_attr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawDeviceAttr {
    pub(super) fw_ver: [c_char; 64],
    pub(super) node_guid: u64,
    pub(super) sys_image_guid: u64,
    pub(super) max_mr_size: u64,
    pub(super) page_size_cap: u64,
    pub(super) vendor_id: u32,
    pub(super) vendor_part_id: u32,
    pub(super) hw_ver: u32,
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: u32,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    pub(super) max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    pub(super) max_ee_rd_atom: c_int,
    pub(super) max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    pub(super) max_ee_init_rd_atom: c_int,
    pub(super) atomic_cap: c_int,
    pub(super) max_ee: c_int,
    pub(super) max_rdd: c_int,
    pub(super) max_mw: c_int,
    pub(super) max_raw_ipv6_qp: c_int,
    pub(super) max_raw_ethy_qp: c_int,
    pub(super) max_mcast_grp: c_int,
    pub(super) max_mcast_qp_attach: c_int,
    pub(super) max_total_mcast_qp_attach: c_int,
    pub(super) max_ah: c_int,
    pub(super) max_fmr: c_int,
    pub(super) max_map_per_fmr: c_int,
    pub(super) max_srq: c_int,
    pub(super) max_srq_wr: c_int,
    pub(super) max_srq_sge: c_int,
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// The beginning of `struct ibv_device_attr_ex`: what every version of it has.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawDeviceAttrEx {
    pub(super) orig_attr: RawDeviceAttr,
    pub(super) comp_mask: u32,
    pub(super) odp_general_caps: u64,
    pub(super) odp_transport_caps: [u32; 3],
}

/// `struct ibv_port_attr`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawPortAttr {
    pub(super) state: c_int,
    pub(super) max_mtu: c_int,
    pub(super) active_mtu: c_int,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) bad_pkey_cntr: u32,
    pub(super) qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) lmc: u8,
    pub(super) max_vl_num: u8,
    pub(super) sm_sl: u8,
    pub(super) subnet_timeout: u8,
    pub(super) init_type_reply: u8,
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    pub(super) phys_state: u8,
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    pub(super) port_cap_flags2: u16,
}

/// `struct ibv_device`; only ever named.
#[repr(C)]
pub(super) struct RawDevice {
    _opaque: [u8; 0],
}

/// `struct ibv_context`.
#[repr(C)]
pub(super) struct RawContext {
    pub(super) device: *mut RawDevice,
    pub(super) ops: ContextOps,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
    pub(super) mutex: libc::pthread_mutex_t,
    /// All ones where a `struct verbs_context` is around this.
    pub(super) abi_compat: usize,
}

/// `struct ibv_context_ops`: what the inline functions of the header go through. The entries without a
/// type here are for binaries of before 2008.
#[repr(C)]
pub(super) struct ContextOps {
    _before_poll: [*mut c_void; 11],
    pub(super) poll_cq: unsafe extern "C" fn(*mut RawCq, c_int, *mut RawWc) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut RawCq, c_int) -> c_int,
    _before_srq_recv: [*mut c_void; 7],
    pub(super) post_srq_recv:
        unsafe extern "C" fn(*mut RawSrq, *mut RawRecvWr, *mut *mut RawRecvWr) -> c_int,
    _before_send: [*mut c_void; 4],
    pub(super) post_send:
        unsafe extern "C" fn(*mut RawQp, *mut RawSendWr, *mut *mut RawSendWr) -> c_int,
    pub(super) post_recv:
        unsafe extern "C" fn(*mut RawQp, *mut RawRecvWr, *mut *mut RawRecvWr) -> c_int,
    _after_recv: [*mut c_void; 5],
}

/// `query_device_ex` of the `struct verbs_context` around a context.
pub(super) type QueryDeviceEx =
    unsafe extern "C" fn(*mut RawContext, *const u32, *mut RawDeviceAttrEx, usize) -> c_int;

/// Words from `query_device_ex` to the context that the structure ends with; `sz` is the last of them.
pub(super) const QUERY_DEVICE_EX_WORDS: usize = 13;

/// `struct ibv_pd`.
#[repr(C)]
pub(super) struct RawPd {
    pub(super) context: *mut RawContext,
    pub(super) handle: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(super) struct RawMr {
    pub(super) context: *mut RawContext,
    pub(super) pd: *mut RawPd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(super) struct RawChannel {
    pub(super) context: *mut RawContext,
    pub(super) fd: c_int,
    pub(super) refcnt: c_int,
}

/// `struct ibv_cq`, as far as its size.
#[repr(C)]
pub(super) struct RawCq {
    pub(super) context: *mut RawContext,
    pub(super) channel: *mut RawChannel,
    pub(super) cq_context: *mut c_void,
    pub(super) handle: u32,
    pub(super) cqe: c_int,
}

/// `struct ibv_srq`, as far as its handle.
#[repr(C)]
pub(super) struct RawSrq {
    pub(super) context: *mut RawContext,
    pub(super) srq_context: *mut c_void,
    pub(super) pd: *mut RawPd,
    pub(super) handle: u32,
}

/// `struct ibv_qp`, as far as its type.
#[repr(C)]
pub(super) struct RawQp {
    pub(super) context: *mut RawContext,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut RawPd,
    pub(super) send_cq: *mut RawCq,
    pub(super) recv_cq: *mut RawCq,
    pub(super) srq: *mut RawSrq,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
    pub(super) state: c_int,
    pub(super) qp_type: c_int,
}

/// `struct ibv_ah`.
#[repr(C)]
pub(super) struct RawAh {
    pub(super) context: *mut RawContext,
    pub(super) pd: *mut RawPd,
    pub(super) handle: u32,
}

/// `struct ibv_qp_cap`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawQpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct RawQpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut RawCq,
    pub(super) recv_cq: *mut RawCq,
    pub(super) srq: *mut RawSrq,
    pub(super) cap: RawQpCap,
    pub(super) qp_type: c_int,
    pub(super) sq_sig_all: c_int,
}

/// `struct ibv_global_route`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawGlobalRoute {
    pub(super) dgid: RawGid,
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawAhAttr {
    pub(super) grh: RawGlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawQpAttr {
    pub(super) qp_state: c_int,
    pub(super) cur_qp_state: c_int,
    pub(super) path_mtu: c_int,
    pub(super) path_mig_state: c_int,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: u32,
    pub(super) cap: RawQpCap,
    pub(super) ah_attr: RawAhAttr,
    pub(super) alt_ah_attr: RawAhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `struct ibv_srq_attr`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawSrqAttr {
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) srq_limit: u32,
}

/// `struct ibv_srq_init_attr`.
#[repr(C)]
pub(super) struct RawSrqInitAttr {
    pub(super) srq_context: *mut c_void,
    pub(super) attr: RawSrqAttr,
}

/// `struct ibv_async_event`.
#[repr(C)]
pub(super) struct RawAsyncEvent {
    /// A pointer to the object, or the number of a port.
    pub(super) element: *mut c_void,
    pub(super) event_type: c_int,
}

/// `struct ibv_sge`: registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// First byte, as registered.
    pub addr: u64,
    /// Length in bytes.
    pub length: u32,
    /// The region's local key.
    pub lkey: u32,
}

/// The part of `struct ibv_send_wr` that depends on the operation: `wr.rdma`, `wr.atomic`, `wr.ud`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union RawWr {
    pub(super) rdma: RawRdma,
    pub(super) atomic: RawAtomic,
    pub(super) ud: RawUd,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawRdma {
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawAtomic {
    pub(super) remote_addr: u64,
    pub(super) compare_add: u64,
    pub(super) swap: u64,
    pub(super) rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawUd {
    pub(super) ah: *mut RawAh,
    pub(super) remote_qpn: u32,
    pub(super) remote_qkey: u32,
}

/// `struct ibv_send_wr`.
#[repr(C)]
pub(super) struct RawSendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut Self,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_int,
    pub(super) send_flags: u32,
    /// In network byte order.
    pub(super) imm_data: u32,
    pub(super) wr: RawWr,
    pub(super) xrc_remote_srqn: u32,
    /// `bind_mw` and `tso`, which are not used here.
    pub(super) other: [u64; 6],
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(super) struct RawRecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut Self,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

/// `struct ibv_wc`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct RawWc {
    pub(super) wr_id: u64,
    pub(super) status: c_int,
    pub(super) opcode: c_int,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    /// In network byte order.
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: u32,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}
