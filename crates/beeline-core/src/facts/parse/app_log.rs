//! Statements of other programs: UCX, perftest, gdrcopy, libgdsync, NVSHMEM, Mooncake, gloo, KvikIO,
//! and backtraces of debuggers.

use alloc::string::ToString;

use super::super::event::Event;
use super::super::machine::{Fact, Machine};
use super::super::platform::Memlock;
use super::scan::{self, Line, Table};
use super::text::{after, errno_of, number_after, signed_after, word_after};

pub(super) fn recognise(head: &str) -> bool {
    scan::contains_any(head, PHRASES)
}

pub(super) const PHRASES: &Table = &[
    ("UCX  ERROR", ucx),
    ("UCX  WARN", ucx),
    ("Couldn't allocate MR", perftest_mr),
    ("ibv_reg_dmabuf_mr", dmabuf_mr),
    ("cuMemAlloc", allocation),
    ("BW average[MB/sec]", bandwidth_header),
    (" Mtu             : ", mtu),
    ("Requested mtu is higher than active mtu", |machine, line| {
        machine.event(Event::MtuLowered, line.at);
    }),
    ("transport retry counter exceeded", retry_exceeded),
    ("local length error", length_error),
    ("Failed to modify QP to RTR", rtr),
    ("RDMA device: ", gid_used),
    (" GID index ", gid_index),
    ("mlx5_copy_to_recv", scatter),
    ("mlx5_copy_to_send", scatter),
    ("copy_to_scat", scatter),
    ("gdr_pin_buffer", gdr_pin),
    ("gds_stream_batch_ops", stream_ops),
    ("init failed for transport: ", nvshmem),
    ("num_rc_per_pe >= num_local_experts", late),
    ("unspecified launch failure", late),
    ("CuFile open error", open_error),
    ("cuFile open error", open_error),
    ("file descriptor is not registered", open_error),
    ("max locked memory", memlock_text),
    ("ulimit -l", memlock_text),
    ("atomic result byte-swapped", |machine, line| machine.event(Event::AtomicSwapped, line.at)),
    ("--use_cuda", |machine, line| machine.event(Event::GpuBuffer, line.at)),
    ("allocated GPU buffer", |machine, line| machine.event(Event::GpuBuffer, line.at)),
    ("allocated GPU buffer of", |machine, line| machine.event(Event::GpuBuffer, line.at)),
];

/// `ib_md.c:325 UCX ERROR ibv_reg_mr(address=0x7f.., length=65536, access=0xf) failed: Bad address`,
/// `.. ibv_create_cq(cqe=4096) failed: Cannot allocate memory`.
fn ucx(machine: &mut Machine, line: &Line<'_>) {
    let Some(call) = after(line.text, "ibv_") else { return };
    if !line.text.contains("failed") {
        return;
    }
    let end = call.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(call.len());
    let event = Event::VerbsFailed {
        call: alloc::format!("ibv_{}", call.get(..end).unwrap_or("")),
        errno: errno_of(line.text),
        address: number_after(line.text, "address=").unwrap_or(0),
        length: number_after(line.text, "length=").unwrap_or(0),
    };
    machine.event(event, line.at);
}

fn perftest_mr(machine: &mut Machine, line: &Line<'_>) {
    let errno = signed_after(line.text, "error=").and_then(|errno| i32::try_from(errno).ok());
    machine.event(Event::PerftestMrFailed { errno: errno.unwrap_or(0) }, line.at);
}

/// Any program that names the call and its failure; NCCL's wording has its own handler.
fn dmabuf_mr(machine: &mut Machine, line: &Line<'_>) {
    let failed = line.text.contains("failed") || line.text.contains("error");
    if !failed || line.text.contains("Call to ") || line.text.contains("UCX") {
        return;
    }
    let errno = signed_after(line.text, "errno ")
        .or_else(|| signed_after(line.text, "errno="))
        .and_then(|errno| i32::try_from(errno).ok())
        .unwrap_or_else(|| errno_of(line.text));
    let call = "ibv_reg_dmabuf_mr".to_string();
    machine.event(Event::VerbsFailed { call, errno, address: 0, length: 0 }, line.at);
}

fn allocation(machine: &mut Machine, line: &Line<'_>) {
    let Some(rest) = after(line.text, "cuMemAlloc") else { return };
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
    let call = alloc::format!("cuMemAlloc{}", rest.get(..end).unwrap_or(""));
    machine.event(Event::TestAllocation { call }, line.at);
    machine.event(Event::GpuBuffer, line.at);
}

fn bandwidth_header(machine: &mut Machine, line: &Line<'_>) {
    machine.event(Event::TestPassed, line.at);
}

fn mtu(machine: &mut Machine, line: &Line<'_>) {
    let bytes = number_after(line.text, "Mtu             : ");
    if let Some(Ok(bytes)) = bytes.map(u32::try_from) {
        machine.event(Event::MtuRequested { bytes }, line.at);
    }
}

fn retry_exceeded(machine: &mut Machine, line: &Line<'_>) {
    let vendor = number_after(line.text, "vendor_err ")
        .or_else(|| number_after(line.text, "syndrom "))
        .and_then(|vendor| u32::try_from(vendor).ok());
    let event = Event::CompletionError {
        host: "".to_string(),
        status: 12,
        vendor: vendor.unwrap_or(0),
        hca: "".to_string(),
    };
    machine.event(event, line.at);
}

fn length_error(machine: &mut Machine, line: &Line<'_>) {
    let length = number_after(line.text, "length=")
        .or_else(|| number_after(line.text, "length "))
        .or_else(|| number_after(line.text, "nbytes="));
    machine.event(Event::LocalLengthError { length: length.unwrap_or(0) }, line.at);
}

fn rtr(machine: &mut Machine, line: &Line<'_>) {
    let numbered = line.text.rsplit('[').next().and_then(|tail| tail.split(']').next());
    let errno = numbered.and_then(|text| text.parse().ok()).unwrap_or_else(|| errno_of(line.text));
    machine.event(Event::RtrFailed { errno }, line.at);
}

/// `RDMA device: mlx5_1, LID: 0, GID: (1) fe:80:00:..` or `GID: (GID_Index 1) ..`.
fn gid_used(machine: &mut Machine, line: &Line<'_>) {
    let Some(device) = word_after(line.text, "RDMA device: ") else { return };
    let Some(inner) = after(line.text, "GID: (") else { return };
    let inner = inner.split(')').next().unwrap_or("");
    let index = inner.split_ascii_whitespace().next_back().and_then(|word| word.parse().ok());
    if let Some(index) = index {
        machine.event(Event::GidUsed { device: device.to_string(), index }, line.at);
    }
}

fn gid_index(machine: &mut Machine, line: &Line<'_>) {
    let index =
        number_after(line.text, " GID index ").or_else(|| number_after(line.text, " GID index : "));
    if let Some(Ok(index)) = index.map(u32::try_from) {
        let device = word_after(line.text, "device ").unwrap_or("").to_string();
        machine.event(Event::GidUsed { device, index }, line.at);
    }
}

fn scatter(machine: &mut Machine, line: &Line<'_>) {
    machine.event(Event::ScatterCrash, line.at);
}

fn gdr_pin(machine: &mut Machine, line: &Line<'_>) {
    let code = signed_after(line.text, "code=")
        .or_else(|| signed_after(line.text, "gdr_pin_buffer ("))
        .or_else(|| signed_after(line.text, "ret="))
        .and_then(|code| i32::try_from(code).ok());
    if let Some(code) = code {
        let size = number_after(line.text, "size=").unwrap_or(0);
        machine.event(Event::GdrPinFailed { code, size }, line.at);
    }
}

fn stream_ops(machine: &mut Machine, line: &Line<'_>) {
    let refused = line.text.contains("801") || line.text.contains("not supported");
    if refused {
        machine.event(Event::StreamOpsRefused, line.at);
    }
}

fn nvshmem(machine: &mut Machine, line: &Line<'_>) {
    if let Some(transport) = word_after(line.text, "init failed for transport: ") {
        let transport = transport.to_string();
        machine.event(Event::NvshmemTransportFailed { transport }, line.at);
    }
}

fn late(machine: &mut Machine, line: &Line<'_>) {
    let known = ["num_rc_per_pe >= num_local_experts", "unspecified launch failure"];
    if let Some(what) = known.into_iter().find(|what| line.text.contains(what)) {
        machine.event(Event::LateFailure { what: what.to_string() }, line.at);
    }
}

fn open_error(machine: &mut Machine, line: &Line<'_>) {
    let compat = line.text.contains("compat");
    machine.event(Event::CufileOpenFailed { compat }, line.at);
}

/// UCX: `Please set max locked memory (ulimit -l) to 'unlimited' (current: 64 kbytes)`.
fn memlock_text(machine: &mut Machine, line: &Line<'_>) {
    let Some(kib) = number_after(line.text, "(current: ") else { return };
    let soft = kib.checked_mul(1024);
    let limit = Memlock { soft, hard: soft, of_process: true };
    let known = machine.platform.memlock.iter().any(|fact| fact.value == limit);
    if !known && machine.platform.memlock.len() < 64 {
        machine.platform.memlock.push(Fact { value: limit, origin: line.at });
    }
}
