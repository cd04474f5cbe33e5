//! Queue pairs, work requests and completions.

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::objects::{Ah, AhAttr, Cq, Pd, Srq};
use super::types::*;
use super::{check, last_error};

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    pd: Arc<Pd>,
    raw: NonNull<RawQp>,
    qpn: u32,
    // Held for as long as the queue pair reports to them and takes from it.
    _send_cq: Arc<Cq>,
    _recv_cq: Arc<Cq>,
    _srq: Option<Arc<Srq>>,
}

// SAFETY: libibverbs allows its objects to be used from any thread, and from several at a time.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

/// How large the queues of a queue pair are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Caps {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
}

/// A transition and its attributes; those that are `Some` make up its mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct QpChange {
    /// `enum ibv_qp_state`.
    pub state: u32,
    pub pkey_index: Option<u16>,
    pub port: Option<u8>,
    /// `enum ibv_access_flags`.
    pub access: Option<u32>,
    pub qkey: Option<u32>,
    pub path: Option<AhAttr>,
    /// `enum ibv_mtu`.
    pub path_mtu: Option<u32>,
    pub dest_qpn: Option<u32>,
    pub rq_psn: Option<u32>,
    pub max_dest_rd_atomic: Option<u8>,
    pub min_rnr_timer: Option<u8>,
    pub timeout: Option<u8>,
    pub retry_cnt: Option<u8>,
    pub rnr_retry: Option<u8>,
    pub sq_psn: Option<u32>,
    pub max_rd_atomic: Option<u8>,
}

impl QpChange {
    /// The structure and its mask.
    fn to_raw(self) -> (RawQpAttr, c_int) {
        let mut raw = RawQpAttr { qp_state: self.state.cast_signed(), ..RawQpAttr::default() };
        let mut mask = 1;
        macro_rules! take {
            ($($bit:literal $from:ident => $to:ident $($cast:ident)?;)*) => {
                $(if let Some(value) = self.$from {
                    raw.$to = value$(.$cast())?;
                    mask |= 1 << $bit;
                })*
            };
        }
        take! {
            3 access => qp_access_flags;
            4 pkey_index => pkey_index;
            5 port => port_num;
            6 qkey => qkey;
            7 path => ah_attr into;
            8 path_mtu => path_mtu cast_signed;
            9 timeout => timeout;
            10 retry_cnt => retry_cnt;
            11 rnr_retry => rnr_retry;
            12 rq_psn => rq_psn;
            13 max_rd_atomic => max_rd_atomic;
            15 min_rnr_timer => min_rnr_timer;
            16 sq_psn => sq_psn;
            17 max_dest_rd_atomic => max_dest_rd_atomic;
            20 dest_qpn => dest_qp_num;
        }
        (raw, mask)
    }
}

/// What a send work request does: `enum ibv_wr_opcode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Opcode {
    Write = 0,
    WriteImm = 1,
    Send = 2,
    SendImm = 3,
    Read = 4,
    CompareSwap = 5,
    FetchAdd = 6,
}

/// The bytes of a send work request.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// In registered memory.
    Sges(&'a [Sge]),
    /// Here; they are copied before the call returns.
    Inline(&'a [u8]),
}

/// A send work request.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Its name.
    pub id: u64,
    /// What it does.
    pub opcode: Opcode,
    /// `IBV_SEND_FENCE` 1, `SIGNALED` 2, `SOLICITED` 4.
    pub flags: u32,
    /// Immediate data, for an opcode that has some.
    pub imm: u32,
    /// Address and key of the peer's memory.
    pub remote: (u64, u32),
    /// What an atomic compares with or adds, and what it swaps in.
    pub atomic: (u64, u64),
    /// Where a datagram goes: by which way, to which queue pair, with which key.
    pub to: Option<(&'a Ah, u32, u32)>,
    /// With which bytes.
    pub data: Data<'a>,
}

impl SendWr<'_> {
    /// The flags that callers set; inline is told by the data.
    const FLAGS: u32 = 1 | 2 | 4;
    const INLINE: u32 = 8;
}

/// A completion: `struct ibv_wc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wc {
    /// The work request's name.
    pub id: u64,
    /// `enum ibv_wc_status`.
    pub status: u32,
    /// `enum ibv_wc_opcode`; of a success only.
    pub opcode: u32,
    /// What the vendor says of an error.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data, of a success that has some.
    pub imm: Option<u32>,
    /// The queue pair.
    pub qpn: u32,
    /// The sender's queue pair (datagrams).
    pub src_qp: u32,
}

/// Completions taken at a time.
const POLL_MAX: usize = 16;

impl Cq {
    /// Takes completions, at most 16, to the end of `into`. Never waits.
    ///
    /// # Errors
    /// The queue is broken; what the provider says.
    pub fn poll(&self, into: &mut impl Extend<Wc>) -> io::Result<usize> {
        let mut raw = [RawWc::default(); POLL_MAX];
        // SAFETY: the table stands in the open context.
        let poll = unsafe { (*self.ops()).poll_cq };
        // SAFETY: the queue lives, and there is room for so many completions.
        let count = unsafe { poll(self.raw.as_ptr(), POLL_MAX as c_int, raw.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| io::Error::other("ibv_poll_cq failed"))?;
        into.extend(raw.iter().take(count).map(|raw| Wc {
            id: raw.wr_id,
            status: raw.status.cast_unsigned(),
            opcode: raw.opcode.cast_unsigned(),
            vendor_err: raw.vendor_err,
            byte_len: raw.byte_len,
            imm: (raw.wc_flags & 2 != 0).then(|| u32::from_be(raw.imm_data)),
            qpn: raw.qp_num,
            src_qp: raw.src_qp,
        }));
        Ok(count)
    }
}

impl Qp {
    /// `IBV_QPT_RC`.
    pub const RC: u32 = 2;
    /// `IBV_QPT_UD`.
    pub const UD: u32 = 4;

    /// Makes a queue pair in RESET; answers it with what its queues hold, which may be more than `caps`.
    ///
    /// # Errors
    /// What the library says, as `EINVAL` for more than the device has.
    pub fn new(
        pd: &Arc<Pd>,
        kind: u32,
        (send_cq, recv_cq): (&Arc<Cq>, &Arc<Cq>),
        srq: Option<&Arc<Srq>>,
        caps: Caps,
    ) -> io::Result<(Self, Caps)> {
        let cap = RawQpCap {
            max_send_wr: caps.max_send_wr,
            max_recv_wr: caps.max_recv_wr,
            max_send_sge: caps.max_send_sge,
            max_recv_sge: caps.max_recv_sge,
            max_inline_data: caps.max_inline,
        };
        let mut init = RawQpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: send_cq.raw.as_ptr(),
            recv_cq: recv_cq.raw.as_ptr(),
            srq: srq.map_or(ptr::null_mut(), |srq| srq.raw.as_ptr()),
            cap,
            qp_type: kind.cast_signed(),
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queues that `init` names live.
        let raw = unsafe { (pd.context.table.ibv_create_qp)(pd.raw.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(last_error)?;
        // SAFETY: the queue pair was just made.
        let qpn = unsafe { (*raw.as_ptr()).qp_num };
        let qp = Self {
            pd: Arc::clone(pd),
            raw,
            qpn,
            _send_cq: Arc::clone(send_cq),
            _recv_cq: Arc::clone(recv_cq),
            _srq: srq.cloned(),
        };
        let given = Caps {
            max_send_wr: init.cap.max_send_wr,
            max_recv_wr: init.cap.max_recv_wr,
            max_send_sge: init.cap.max_send_sge,
            max_recv_sge: init.cap.max_recv_sge,
            max_inline: init.cap.max_inline_data,
        };
        Ok((qp, given))
    }

    /// Its number.
    pub const fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Makes a transition.
    ///
    /// # Errors
    /// What the library says.
    pub fn modify(&self, change: QpChange) -> io::Result<()> {
        let (mut raw, mask) = change.to_raw();
        let table = self.pd.context.table;
        // SAFETY: the queue pair lives, and the mask says which fields are read.
        check(unsafe { (table.ibv_modify_qp)(self.raw.as_ptr(), &raw mut raw, mask) })
    }

    /// Its state, as the kernel knows it: `enum ibv_qp_state`.
    ///
    /// # Errors
    /// What the library says.
    pub fn state(&self) -> io::Result<u32> {
        let mut attr = RawQpAttr::default();
        let mut init = MaybeUninit::<RawQpInitAttr>::zeroed();
        let table = self.pd.context.table;
        let (raw, into) = (self.raw.as_ptr(), init.as_mut_ptr());
        // SAFETY: the queue pair lives, and both are places for what is filled in.
        check(unsafe { (table.ibv_query_qp)(raw, &raw mut attr, 1, into) })?;
        Ok(attr.qp_state.cast_unsigned())
    }

    /// Posts a send work request.
    ///
    /// # Errors
    /// What the provider says, as `ENOMEM` for a full queue. It is not posted then.
    pub fn post_send(&self, send: &SendWr<'_>) -> io::Result<()> {
        let whole;
        let (sges, inline) = match send.data {
            Data::Sges(sges) => (sges, 0),
            Data::Inline(bytes) => {
                let length = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
                whole = [Sge { addr: bytes.as_ptr().expose_provenance() as u64, length, lkey: 0 }];
                (&whole[..], SendWr::INLINE)
            }
        };
        let num_sge = c_int::try_from(sges.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (remote_addr, rkey) = send.remote;
        let wr = match (send.opcode, send.to) {
            (Opcode::CompareSwap | Opcode::FetchAdd, _) => {
                let (compare_add, swap) = send.atomic;
                RawWr { atomic: RawAtomic { remote_addr, compare_add, swap, rkey } }
            }
            (_, Some((ah, remote_qpn, remote_qkey))) => {
                RawWr { ud: RawUd { ah: ah.raw.as_ptr(), remote_qpn, remote_qkey } }
            }
            _ => RawWr { rdma: RawRdma { remote_addr, rkey } },
        };
        let mut raw = RawSendWr {
            wr_id: send.id,
            next: ptr::null_mut(),
            sg_list: sges.as_ptr().cast_mut(),
            num_sge,
            opcode: send.opcode as c_int,
            send_flags: send.flags & SendWr::FLAGS | inline,
            imm_data: send.imm.to_be(),
            wr,
            xrc_remote_srqn: 0,
            other: [0; 6],
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the table stands in the open context.
        let post = unsafe { (*self.ops()).post_send };
        // SAFETY: the queue pair lives; request, elements and inline bytes are only read, and only
        // during the call. Other memory is reached by the NIC, which checks address and key.
        check(unsafe { post(self.raw.as_ptr(), &raw mut raw, &raw mut bad) })
    }

    /// Posts a receive work request.
    ///
    /// # Errors
    /// What the provider says, as `ENOMEM` for a full queue. It is not posted then.
    pub fn post_recv(&self, id: u64, sges: &[Sge]) -> io::Result<()> {
        let mut raw = recv(id, sges)?;
        let mut bad = ptr::null_mut();
        // SAFETY: the table stands in the open context.
        let post = unsafe { (*self.ops()).post_recv };
        // SAFETY: the queue pair lives; request and elements are only read, and only during the call.
        check(unsafe { post(self.raw.as_ptr(), &raw mut raw, &raw mut bad) })
    }

    fn ops(&self) -> *const ContextOps {
        // SAFETY: the context is open, and its table stands in it; no reference to it is made.
        unsafe { &raw const (*self.pd.context.raw.as_ptr()).ops }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: the queue pair is destroyed once; its events are acknowledged where they are taken.
        let _ = unsafe { (self.pd.context.table.ibv_destroy_qp)(self.raw.as_ptr()) };
    }
}

impl Srq {
    /// Posts a receive work request.
    ///
    /// # Errors
    /// As [`Qp::post_recv`].
    pub fn post_recv(&self, id: u64, sges: &[Sge]) -> io::Result<()> {
        let mut raw = recv(id, sges)?;
        let mut bad = ptr::null_mut();
        // SAFETY: the context is open, and its table stands in it.
        let post = unsafe { (*self.pd.context.raw.as_ptr()).ops.post_srq_recv };
        // SAFETY: the queue lives; request and elements are only read, and only during the call.
        check(unsafe { post(self.raw.as_ptr(), &raw mut raw, &raw mut bad) })
    }
}

fn recv(id: u64, sges: &[Sge]) -> io::Result<RawRecvWr> {
    let num_sge = c_int::try_from(sges.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok(RawRecvWr { wr_id: id, next: ptr::null_mut(), sg_list: sges.as_ptr().cast_mut(), num_sge })
}
