//! The structures against the header's.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

use super::types::*;

/// `size NAME` and `NAME.FIELD offset`, as Rust and as the header have them; and the C program's lines.
macro_rules! layout {
    ($($raw:ident = $c:literal $size:ident { $($field:ident $(= $of:literal)?),* })*) => {{
        let mut ours = BTreeMap::new();
        let mut program = String::new();
        $(
            layout!(@size $size $raw $c ours program);
            $(
                let c_field = layout!(@name $field $($of)?);
                ours.insert(format!("{}.{}", $c, c_field), offset_of!($raw, $field));
                let _ = writeln!(
                    program,
                    "printf(\"{0}.{1} %zu\\n\", offsetof({0}, {1}));", $c, c_field
                );
            )*
        )*
        (ours, program)
    }};
    (@size whole $raw:ident $c:literal $ours:ident $program:ident) => {
        $ours.insert(format!("size {}", $c), size_of::<$raw>());
        let _ = writeln!($program, "printf(\"size {0} %zu\\n\", sizeof({0}));", $c);
    };
    (@size part $raw:ident $c:literal $ours:ident $program:ident) => {};
    (@name $field:ident $of:literal) => { $of };
    (@name $field:ident) => { stringify!($field) };
}

#[test]
fn every_structure_is_laid_out_as_in_the_header() {
    let (mut ours, mut program) = layout! {
        RawGid = "union ibv_gid" whole {}
        RawGidEntry = "struct ibv_gid_entry" whole { gid, gid_index, port_num, gid_type, ndev_ifindex }
        RawDeviceAttr = "struct ibv_device_attr" whole {
            fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id,
            hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_cqe, max_qp_rd_atom,
            max_qp_init_rd_atom, atomic_cap, max_srq, max_srq_wr, max_srq_sge, max_pkeys,
            phys_port_cnt
        }
        RawDeviceAttrEx = "struct ibv_device_attr_ex" part {
            orig_attr, comp_mask, odp_general_caps = "odp_caps.general_caps",
            odp_transport_caps = "odp_caps.per_transport_caps"
        }
        RawPortAttr = "struct ibv_port_attr" whole {
            state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, lid, link_layer, flags,
            port_cap_flags2
        }
        RawContext = "struct ibv_context" whole {
            device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat
        }
        ContextOps = "struct ibv_context_ops" whole {
            poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv
        }
        RawPd = "struct ibv_pd" whole { context, handle }
        RawMr = "struct ibv_mr" whole { context, pd, addr, length, handle, lkey, rkey }
        RawChannel = "struct ibv_comp_channel" whole { context, fd, refcnt }
        RawCq = "struct ibv_cq" part { context, channel, cq_context, handle, cqe }
        RawSrq = "struct ibv_srq" part { context, srq_context, pd, handle }
        RawQp = "struct ibv_qp" part {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type
        }
        RawAh = "struct ibv_ah" whole { context, pd, handle }
        RawQpCap = "struct ibv_qp_cap" whole {
            max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
        }
        RawQpInitAttr = "struct ibv_qp_init_attr" whole {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all
        }
        RawGlobalRoute = "struct ibv_global_route" whole {
            dgid, flow_label, sgid_index, hop_limit, traffic_class
        }
        RawAhAttr = "struct ibv_ah_attr" whole {
            grh, dlid, sl, src_path_bits, static_rate, is_global, port_num
        }
        RawQpAttr = "struct ibv_qp_attr" whole {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, rate_limit
        }
        RawSrqAttr = "struct ibv_srq_attr" whole { max_wr, max_sge, srq_limit }
        RawSrqInitAttr = "struct ibv_srq_init_attr" whole { srq_context, attr }
        RawAsyncEvent = "struct ibv_async_event" whole { element, event_type }
        Sge = "struct ibv_sge" whole { addr, length, lkey }
        RawSendWr = "struct ibv_send_wr" whole {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr,
            xrc_remote_srqn = "qp_type.xrc.remote_srqn", other = "bind_mw"
        }
        RawRecvWr = "struct ibv_recv_wr" whole { wr_id, next, sg_list, num_sge }
        RawWc = "struct ibv_wc" whole {
            wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags,
            pkey_index, slid, sl, dlid_path_bits
        }
    };
    // What has no name of its own in the header, or ours.
    for (member, offset) in [
        ("wr.rdma.rkey", offset_of!(RawSendWr, wr) + offset_of!(RawRdma, rkey)),
        ("wr.atomic.compare_add", offset_of!(RawSendWr, wr) + offset_of!(RawAtomic, compare_add)),
        ("wr.atomic.swap", offset_of!(RawSendWr, wr) + offset_of!(RawAtomic, swap)),
        ("wr.atomic.rkey", offset_of!(RawSendWr, wr) + offset_of!(RawAtomic, rkey)),
        ("wr.ud.remote_qpn", offset_of!(RawSendWr, wr) + offset_of!(RawUd, remote_qpn)),
        ("wr.ud.remote_qkey", offset_of!(RawSendWr, wr) + offset_of!(RawUd, remote_qkey)),
    ] {
        ours.insert(format!("struct ibv_send_wr.{member}"), offset);
        let line =
            "printf(\"struct ibv_send_wr.MEMBER %zu\\n\", offsetof(struct ibv_send_wr, MEMBER));\n";
        program += &line.replace("MEMBER", member);
    }
    ours.insert("query_device_ex".into(), QUERY_DEVICE_EX_WORDS * size_of::<usize>());
    program += "printf(\"query_device_ex %zu\\n\", offsetof(struct verbs_context, context) \
                - offsetof(struct verbs_context, query_device_ex));\n";
    let Some(theirs) = of_header(&program) else {
        println!("SKIP infiniband/verbs.h");
        return;
    };
    assert_eq!(theirs, ours);
}

/// What a C program that includes the header prints; `None` where there is no compiler or no header.
fn of_header(lines: &str) -> Option<BTreeMap<String, usize>> {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
    let text = format!(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\n\
         int main(void) {{\n{lines}return 0;\n}}\n"
    );
    std::fs::write(&source, text).unwrap();
    if !std::path::Path::new("/usr/include/infiniband/verbs.h").exists() {
        return None;
    }
    let built = Command::new("cc").arg("-o").arg(&program).arg(&source).output().ok()?;
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let out = Command::new(&program).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let line = |line: &str| {
        let (name, number) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), number.parse().unwrap())
    };
    Some(text.lines().map(line).collect())
}
