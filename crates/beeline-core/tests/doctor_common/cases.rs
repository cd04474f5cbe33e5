//! Every handed case that can be decided from facts, as inputs in the tools' formats and the right answer.
//!
//! `handed:` names a file of the handed cases; `dev:` lists device nodes; all others are fixtures.

use beeline_core::checks::{Severity, Status};

/// One expected finding. Every text must occur in it: in its message, subjects, remedies, cautions,
/// candidates or what it asks for.
pub struct Want {
    pub check: &'static str,
    pub status: Status,
    pub severity: Severity,
    pub texts: &'static [&'static str],
}

/// One case.
pub struct Case {
    pub id: &'static str,
    pub inputs: &'static [&'static str],
    pub want: &'static [Want],
}

impl Case {
    /// `H-RDMA-REG-01` belongs to `RDMA-REG`.
    pub fn kind(&self) -> &'static str {
        let id = self.id.strip_prefix("H-").unwrap_or(self.id);
        id.rsplit_once('-').map_or(id, |(kind, _)| kind)
    }
}

/// Cases that no file can decide, with the reason. They are properties of code, tested where that lives.
pub const NOT_DECIDABLE: &[(&str, &str)] = &[
    (
        "H-P2P-07",
        "a rule for all answers: files never give \"verified\"; held by a test of its own",
    ),
    ("H-RDMA-NET-06", "property: a message of length zero takes one packet number"),
    ("H-RDMA-NET-07", "property: request numbers of 64 bits"),
    ("H-RDMA-NET-10", "property: receiver-not-ready retry counts"),
    ("H-RDMA-NET-11", "property: receive limits are ignored with a shared receive queue"),
    ("H-RDMA-NET-13", "property: inline sends from device memory are refused"),
    ("H-RDMA-NET-15", "property: memory regions outlive their work requests"),
    ("H-COLL-08", "property: ungrouped symmetric sends end with a message"),
];

macro_rules! want {
    ($check:literal, $status:ident, $severity:ident $(, $text:literal)* $(,)?) => {
        Want {
            check: $check,
            status: Status::$status,
            severity: Severity::$severity,
            texts: &[$($text),*],
        }
    };
}

pub const CASES: &[Case] = &[
    Case {
        id: "H-P2P-01",
        inputs: &["topo-4gpu-pxb-pix.txt", "lspci-vvv-4gpu-acs-on.txt"],
        want: &[
            want!(
                "p2p-acs-redirect",
                Fail,
                Error,
                "GPU0 (0000:1c:00.0) - GPU1 (0000:1d:00.0)",
                "GPU2 (0000:b1:00.0) - GPU3 (0000:b2:00.0)",
                "0000:19:08.0",
                "0000:19:10.0",
                "0000:1b:08.0",
                "0000:b0:08.0",
                "0000:b0:10.0",
                "setpci -s 0000:19:08.0 ECAP_ACS+6.w=0",
                "NCCL_P2P_DISABLE=1",
                "cold boot",
                "IOMMU off or pt",
                "never on a host that assigns devices to guests",
            ),
            want!(
                "p2p-acs-redirect",
                Pass,
                Info,
                "GPU0 (0000:1c:00.0) - GPU2 (0000:b1:00.0)",
                "staged"
            ),
        ],
    },
    Case {
        id: "H-P2P-02",
        inputs: &["lspci-vvv-2gpu-gpp-001d.txt"],
        want: &[want!(
            "p2p-acs-redirect",
            Fail,
            Error,
            "0x001d SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+",
            "setpci -s 0000:40:01.1 ECAP_ACS+6.w=0",
            "setpci -s 0000:40:03.1 ECAP_ACS+6.w=0",
            "pci=disable_acs_redir=0000:40:01.1;0000:40:03.1",
            "pci=noacs is no option",
            "never on a host that assigns devices to guests",
        )],
    },
    Case {
        id: "H-P2P-03",
        inputs: &["topo-4gpu-pxb-pix.txt", "p2p-4gpu-near-pairs.txt", "cmdline-intel-on.txt"],
        want: &[
            want!(
                "p2p-iommu-translated",
                Fail,
                Error,
                "GPU0 - GPU1",
                "GPU2 - GPU3",
                "iommu=pt",
                "intel_iommu=off"
            ),
            want!("p2p-not-capable", Pass, Info, "GPU0 - GPU2", "chipset not supported"),
        ],
    },
    Case {
        id: "H-P2P-04",
        inputs: &[
            "topo-8gpu-amd.txt",
            "cmdline-plain.txt",
            "dmesg-amd-translated.txt",
            "lscpu-epyc-2s-nps1.txt",
        ],
        want: &[
            want!("p2p-iommu-translated", Fail, Error, "GPU0 - GPU1", "amd_iommu=off", "iommu=pt"),
            want!(
                "host-staging-nps",
                Fail,
                Warning,
                "NPS4",
                "not the cause of a hang",
                "not by its average"
            ),
        ],
    },
    Case {
        id: "H-P2P-05",
        inputs: &["p2p-2gpu-ns.txt", "nvidia-version-545.txt"],
        want: &[want!(
            "p2p-not-capable",
            Fail,
            Warning,
            "GPU0 - GPU1",
            "not supported",
            "545.23.08",
            "another driver branch",
            "NVLink bridge",
            "staging",
            "does not say that the hardware cannot",
        )],
    },
    Case {
        id: "H-P2P-06",
        inputs: &["topo-4gpu-bridged-pairs.txt"],
        want: &[want!(
            "nvlink-partial",
            Pass,
            Info,
            "GPU0 - GPU1",
            "GPU2 - GPU3",
            "fully connected: no"
        )],
    },
    Case {
        id: "H-P2P-08",
        inputs: &["handed:dmesg/amdvi-io-page-fault-gpu.log"],
        want: &[want!(
            "p2p-iommu-fault",
            Fail,
            Critical,
            "0000:07:00.0",
            "lost",
            "iommu=pt",
            "stop using results"
        )],
    },
    Case {
        id: "H-RDMA-REG-01",
        inputs: &["dmesg-peermem-no-symbol.txt"],
        want: &[want!(
            "peermem-no-api",
            Fail,
            Error,
            "nv_peer_mem",
            "ib_register_peer_memory_client",
            "MOFED",
            "rebuild"
        )],
    },
    Case {
        id: "H-RDMA-REG-02",
        inputs: &["handed:dmesg/peermem-disagrees-version.log"],
        want: &[want!(
            "peermem-abi-mismatch",
            Fail,
            Error,
            "err -22",
            "rebuild nvidia_peermem",
            "driver pod"
        )],
    },
    Case {
        id: "H-RDMA-REG-03",
        inputs: &["nccl-node-a-nogdr.log", "nccl-node-b-gdr.log"],
        want: &[want!(
            "gdr-asymmetric",
            Fail,
            Warning,
            "nodea",
            "modprobe nvidia-peermem",
            "near enough",
            "NET/IB/1"
        )],
    },
    Case {
        id: "H-RDMA-REG-04",
        inputs: &["nccl-ibext-nogdr.log", "lsmod-no-peermem.txt"],
        want: &[want!("gdr-not-used", Fail, Warning, "NET/IBext/0", "modprobe nvidia-peermem")],
    },
    Case {
        id: "H-RDMA-REG-05",
        inputs: &["nccl-dmabuf-95-old.log"],
        want: &[want!(
            "dmabuf-unsupported",
            Fail,
            Error,
            "NCCL 2.13",
            "upgrade rdma-core",
            "NCCL_DMABUF_ENABLE=0",
            "nvidia-peermem"
        )],
    },
    Case {
        id: "H-RDMA-REG-06",
        inputs: &["perftest-mr-93.txt", "uname-5.10.txt"],
        want: &[want!(
            "dmabuf-kernel-too-old",
            Fail,
            Error,
            "error 93",
            "5.10 is older than 5.12",
            "OFED",
            "rdma-core"
        )],
    },
    Case {
        id: "H-RDMA-REG-07",
        inputs: &["perftest-geforce-mr.txt", "smi-q-geforce-3090.txt"],
        want: &[want!(
            "gdr-sku-unsupported",
            Fail,
            Error,
            "GeForce RTX 3090",
            "data-centre or professional",
            "does not help"
        )],
    },
    Case {
        id: "H-RDMA-REG-08",
        inputs: &["smi-q-t4.txt"],
        want: &[want!(
            "bar1-small",
            Fail,
            Warning,
            "256 MiB",
            "reserved",
            "at most 251 MiB",
            "register at most 188 MiB"
        )],
    },
    Case {
        id: "H-RDMA-REG-09",
        inputs: &["handed:dmesg/kmsg-peermem-invalid-context.log"],
        want: &[want!(
            "peermem-invalid-context",
            Pass,
            Info,
            "7 times",
            "harmless",
            "R560",
            "not the cause"
        )],
    },
    Case {
        id: "H-RDMA-REG-10",
        inputs: &["ucx-efault.log", "maps-gdrdrv.txt"],
        want: &[want!(
            "api-misuse",
            Fail,
            Error,
            "gdr_map",
            "environment is not at fault",
            "device pointer",
            "dma-buf"
        )],
    },
    Case {
        id: "H-RDMA-REG-11",
        inputs: &["perftest-managed-pass.txt"],
        want: &[want!("gdr-test-invalid", Fail, Warning, "no evidence", "cuMemAlloc")],
    },
    Case {
        id: "H-RDMA-REG-12",
        inputs: &["nccl-ofi-gdr-off.log"],
        want: &[want!(
            "gdr-disabled",
            Fail,
            Warning,
            "Could not disable CUDA API usage for HMEM",
            "DMA-BUF is available"
        )],
    },
    Case {
        id: "H-RDMA-REG-13",
        inputs: &["topo-1gpu-phb-nic.txt", "nccl-gdr-forced.log"],
        want: &[want!(
            "gdr-through-cpu",
            Fail,
            Warning,
            "GPU0 - mlx5_0: PHB",
            "NCCL_NET_GDR_LEVEL=SYS",
            "PXB"
        )],
    },
    Case {
        id: "H-RDMA-NET-01",
        inputs: &["nccl-error12.log", "show-gids-index3.txt"],
        want: &[want!(
            "rdma-timeout",
            Fail,
            Error,
            "NCCL_IB_GID_INDEX=3",
            "wrong GID type or index",
            "VLAN",
            "switch",
            "ib_write_bw"
        )],
    },
    Case {
        id: "H-RDMA-NET-02",
        inputs: &["mooncake-rtr-110.log", "show-gids-two-nics.txt"],
        want: &[
            want!("gid-link-local", Fail, Error, "mlx5_0", "mlx5_1", "GID index 3", "link-local"),
            want!("rail-crossing", Fail, Warning, "mlx5_0", "mlx5_1", "rail"),
        ],
    },
    Case {
        id: "H-RDMA-NET-03",
        inputs: &["perftest-mtu-4096.txt", "ibv-v-mtu1024.txt"],
        want: &[
            want!("mtu-too-big", Fail, Error, "4096", "active MTU, 1024", "1500", "mlx5_0 port 1"),
            want!("rdma-timeout", Fail, Error),
        ],
    },
    Case {
        id: "H-RDMA-NET-04",
        inputs: &["ucx-memlock.log"],
        want: &[want!(
            "memlock-low",
            Fail,
            Error,
            "64 KiB",
            "memlock=-1",
            "not in a login shell",
            "inside mpirun"
        )],
    },
    Case {
        id: "H-RDMA-NET-05",
        inputs: &["gloo-length-error.log", "ibv-v-mtu4096.txt"],
        want: &[want!("msg-too-big", Fail, Error, "1073741824", "268435457 floats exceed it by 4")],
    },
    Case {
        id: "H-RDMA-NET-08",
        inputs: &["ibv-v-atomic-be.txt"],
        want: &[want!("atomic-reply-be", Pass, Info, "mlx5_0", "network byte order", "swap")],
    },
    Case {
        id: "H-RDMA-NET-09",
        inputs: &["sysfs-rnr-0", "sysfs-rnr-13", "sysfs-rnr-13-later"],
        want: &[want!("rnr", Pass, Info, "rose by 3 at start", "before the queue pair is ready")],
    },
    Case {
        id: "H-RDMA-NET-12",
        inputs: &["gdb-scatter.txt", "perftest-gpu-start.txt"],
        want: &[want!("scatter-to-cqe", Fail, Error, "MLX5_SCATTER_TO_CQE=0", "GPU memory")],
    },
    Case {
        id: "H-RDMA-NET-14",
        inputs: &["nccl-error4.log"],
        want: &[want!(
            "local-prot",
            Unknown,
            Error,
            "ACS redirect",
            "read every ACSCtl line rather than a claim",
            "PCI_WR_ORDERING",
            "NCCL_IB_HCA",
            "InfiniBand and Ethernet",
            "NCCL_NET_GDR_LEVEL=LOC",
        )],
    },
    Case {
        id: "H-ASYNC-01",
        inputs: &["libgdsync-801.log", "params-memops-off.txt", "smi-q-p100-390.txt"],
        want: &[want!("stream-memops-off", Fail, Error, "NVreg_EnableStreamMemOPs=1", "CUDA 9")],
    },
    Case {
        id: "H-ASYNC-02",
        inputs: &[
            "nvshmem-ibgda.log",
            "params-memops-off.txt",
            "lsmod-peermem.txt",
            "dev:nvidia0,nvidiactl,nvidia-uvm",
        ],
        want: &[
            want!(
                "ibgda-unavailable",
                Fail,
                Error,
                "NVreg_EnableStreamMemOPs=1",
                "PeerMappingOverride=1",
                "gdrdrv",
                "reboot"
            ),
            want!("infiniband-nodes-missing", Fail, Error, "/dev/infiniband", "uverbs"),
            want!(
                "late-failure",
                Unknown,
                Warning,
                "num_rc_per_pe >= num_local_experts",
                "first failure"
            ),
        ],
    },
    Case {
        id: "H-ASYNC-03",
        inputs: &["lsmod-gdrdrv.txt", "devices-no-gdrdrv.txt"],
        want: &[want!("gdrdrv-no-major", Fail, Error, "rmmod gdrdrv", "newer", "/proc/devices")],
    },
    Case {
        id: "H-ASYNC-04",
        inputs: &["handed:dmesg/gdrdrv-misaligned-length-gh200.log"],
        want: &[want!(
            "gdrdrv-pin-unaligned",
            Fail,
            Error,
            "0x10008 % 0x10000 = 0x8",
            "0x20200 % 0x10000 = 0x200",
            "round the length up",
            "began to enforce"
        )],
    },
    Case {
        id: "H-ASYNC-05",
        inputs: &["gdrcopy-22.log", "smi-q-geforce-2070.txt"],
        want: &[want!("gdr-sku-unsupported", Fail, Error, "GeForce RTX 2070")],
    },
    Case {
        id: "H-COLL-01",
        inputs: &["handed:nccl-log/topo-arch-attr-missing.log", "topo-no-arch.xml"],
        want: &[want!(
            "topo-xml-missing-attr",
            Fail,
            Error,
            "arch",
            "numaid=1",
            "0000:64:00.0, 0000:75:00.0",
            "newer network plugin"
        )],
    },
    Case {
        id: "H-COLL-02",
        inputs: &["nccl-graph-missing.log", "nccl-conf-graph.conf", "graph-4dev.xml"],
        want: &[want!(
            "graph-file-mismatch",
            Fail,
            Error,
            "names 4 devices",
            "2 GPUs",
            "nccl.conf",
            "a topology file alone is fine"
        )],
    },
    Case {
        id: "H-COLL-03",
        inputs: &["nccl-conf-topo.conf", "topo-dump-full.xml"],
        want: &[want!(
            "topo-xml-lint",
            Fail,
            Warning,
            "1 gpu and 1 net elements",
            "cpu and pci elements only",
            "may be invented"
        )],
    },
    Case {
        id: "H-COLL-04",
        inputs: &["nccl-foreign-bus.log"],
        want: &[want!(
            "topo-xml-foreign-busid",
            Fail,
            Warning,
            "0000:4f:00.0",
            "0000:52:00.0",
            "rewrite the bus ids"
        )],
    },
    Case {
        id: "H-COLL-05",
        inputs: &["nccl-phb-printed.log", "topo-dump-full.xml"],
        want: &[
            want!("gdr-disabled", Fail, Warning, "mlx5_0"),
            want!("path-printed-phb", Pass, Info, "mlx5_0: PIX", "GPUDirect RDMA is off"),
        ],
    },
    Case {
        id: "H-COLL-06",
        inputs: &["nccl-ofi-none.log"],
        want: &[want!(
            "ofi-no-provider",
            Unknown,
            Error,
            "has no efa provider",
            "/dev/infiniband",
            "list each install"
        )],
    },
    Case {
        id: "H-COLL-07",
        inputs: &["handed:nccl-log/collective-mismatch.log"],
        want: &[want!(
            "rank-env-mismatch",
            Fail,
            Error,
            "local 496640, remote 65536",
            "NCCL_*",
            "count, type and order"
        )],
    },
    Case {
        id: "H-STOR-01",
        inputs: &["handed:cufile-log/nvme-not-registered-ext4.log", "kallsyms-nvme-plain.txt"],
        want: &[
            want!("gds-nvme-not-patched", Fail, Error, "none of nvidia-fs", "initramfs", "MOFED"),
            want!("gds-nvme-not-registered", Fail, Error),
            want!("gds-compat", Pass, Info, "I/O works"),
        ],
    },
    Case {
        id: "H-STOR-02",
        inputs: &["gdscheck-nvme-unsupported.txt", "lspci-tv-two-roots.txt"],
        want: &[
            want!(
                "gds-nvme-not-patched",
                Fail,
                Error,
                "not the patched one",
                "cannot enable the direct path"
            ),
            want!("gds-root-crossing", Fail, Warning, "0000:41:00.0", "root complex", "iommu=pt"),
            want!("gds-no-native-path", Fail, Error),
        ],
    },
    Case {
        id: "H-STOR-03",
        inputs: &["gdscheck-p2pdma-only.txt", "mdstat-raid0.txt"],
        want: &[want!("gds-raid-p2pdma", Fail, Error, "md127 (raid0)", "nvidia-fs")],
    },
    Case {
        id: "H-STOR-04",
        inputs: &["dmesg-nvfs-unknown.txt"],
        want: &[want!(
            "nvidia-fs-symbols",
            Fail,
            Error,
            "nvidia_p2p_dma_map_pages",
            "err -2",
            "rebuild nvidia-fs"
        )],
    },
    Case {
        id: "H-STOR-05",
        inputs: &["handed:cufile-log/bar1-exhausted.log"],
        want: &[want!(
            "bar1-exhausted",
            Fail,
            Error,
            "need 524288000 have 281018368",
            "not local NVMe",
            "smaller buffers"
        )],
    },
    Case {
        id: "H-STOR-06",
        inputs: &["handed:cufile-log/overlay-no-udev-device.log", "mountinfo-overlay.txt"],
        want: &[want!(
            "gds-fs-unsupported",
            Fail,
            Error,
            "0:383",
            "anonymous",
            "overlay on /",
            "ext4 or xfs"
        )],
    },
    Case {
        id: "H-STOR-07",
        inputs: &["kvikio-open.log"],
        want: &[want!(
            "gds-open-failed",
            Unknown,
            Error,
            "not passed into the container",
            "absent on the host",
            "overlay or tmpfs"
        )],
    },
    Case {
        id: "H-STOR-08",
        inputs: &["env-nfsrdma.txt", "kallsyms-nvme-plain.txt"],
        want: &[want!("gds-nvme-not-patched", Fail, Error, "ENABLE_NFSRDMA", "operator 25.7")],
    },
    Case {
        id: "H-STOR-09",
        inputs: &["handed:cufile-log/p2pdma-not-supported-801.log", "env-cufile-strict.txt"],
        want: &[
            want!(
                "gds-path",
                Pass,
                Info,
                "path=nvfs, plausible",
                "no evidence for the compatibility path"
            ),
            want!("gds-p2pdma-off", Pass, Info, "801"),
        ],
    },
    Case {
        id: "H-STOR-10",
        inputs: &["fincore-warm.txt"],
        want: &[want!("gds-may-be-slower", Pass, Info, "page cache")],
    },
    Case {
        id: "H-STOR-11",
        inputs: &["cufile-weka-strict.json"],
        want: &[want!(
            "cufile-effective-path",
            Fail,
            Warning,
            "weka",
            "write=posix",
            "overrides it for writes"
        )],
    },
    Case {
        id: "H-STOR-12",
        inputs: &["cufile-pinned-128m.json"],
        want: &[want!(
            "cufile-json-pinned-too-small",
            Fail,
            Error,
            "131072 KiB",
            "plus registered"
        )],
    },
];
