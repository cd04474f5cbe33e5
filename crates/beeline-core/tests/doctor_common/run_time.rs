//! The handed cases of registration and of stream operations, as failures of this process.

use beeline_core::checks::{Happened, Verb};
use beeline_core::facts::Machine;

/// A case, the facts of its machine without the log of the failing program, what happens in this process
/// instead, and the code.
pub const AT_RUN_TIME: &[(&str, &[&str], Happened, &str)] = &[
    (
        "H-RDMA-REG-01",
        &["dmesg-peermem-no-symbol.txt"],
        Happened::RegisterFailed { verb: Verb::Address, errno: 14, address: 0, len: 4096 },
        "peermem-no-api",
    ),
    (
        "H-RDMA-REG-02",
        &["handed:dmesg/peermem-disagrees-version.log"],
        Happened::RegisterFailed { verb: Verb::Address, errno: 14, address: 0, len: 4096 },
        "peermem-abi-mismatch",
    ),
    (
        "H-RDMA-REG-05",
        &[],
        Happened::RegisterFailed { verb: Verb::DmaBuf, errno: 95, address: 0, len: 4096 },
        "dmabuf-unsupported",
    ),
    (
        "H-RDMA-REG-06",
        &["uname-5.10.txt"],
        Happened::RegisterFailed { verb: Verb::DmaBuf, errno: 93, address: 0, len: 4096 },
        "dmabuf-kernel-too-old",
    ),
    (
        "H-RDMA-REG-07",
        &["smi-q-geforce-3090.txt"],
        Happened::RegisterFailed { verb: Verb::Address, errno: 14, address: 0, len: 4096 },
        "gdr-sku-unsupported",
    ),
    (
        "H-RDMA-REG-08",
        &["smi-q-t4.txt"],
        Happened::RegisterFailed { verb: Verb::Address, errno: 12, address: 0, len: 300 << 20 },
        "bar1-small",
    ),
    (
        "H-RDMA-REG-10",
        &["maps-gdrdrv.txt"],
        // The address is put in below.
        Happened::RegisterFailed { verb: Verb::Address, errno: 14, address: 0, len: 4096 },
        "api-misuse",
    ),
    ("H-RDMA-REG-11", &[], Happened::ManagedPassed, "gdr-test-invalid"),
    (
        "H-ASYNC-01",
        &["params-memops-off.txt", "smi-q-p100-390.txt"],
        Happened::StreamOpsRefused,
        "stream-memops-off",
    ),
    (
        "H-ASYNC-02",
        &["params-memops-off.txt", "lsmod-peermem.txt", "dev:nvidia0,nvidiactl,nvidia-uvm"],
        Happened::GpuInitiatedFailed { transport: "IBGDA" },
        "ibgda-unavailable",
    ),
    (
        "H-ASYNC-03",
        &["lsmod-gdrdrv.txt", "devices-no-gdrdrv.txt"],
        Happened::PinFailed { errno: 22, len: 1 << 16 },
        "gdrdrv-no-major",
    ),
    ("H-ASYNC-04", &[], Happened::PinFailed { errno: 22, len: 0x10008 }, "gdrdrv-pin-unaligned"),
    (
        "H-ASYNC-05",
        &["smi-q-geforce-2070.txt"],
        Happened::PinFailed { errno: 22, len: 1 << 16 },
        "gdr-sku-unsupported",
    ),
];

/// What happens on the machine of a case, with the address that its record shows.
pub fn happens_on(machine: &Machine, happened: &Happened, code: &str) -> Happened {
    let mut happened = happened.clone();
    if let Happened::RegisterFailed { address, .. } = &mut happened
        && code == "api-misuse"
    {
        // Inside the mapping that the record shows.
        *address = machine.platform.mappings[0].value.start;
    }
    happened
}
