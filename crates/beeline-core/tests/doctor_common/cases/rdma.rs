//! Between GPUs and NICs: registration, the network, GPUDirect Async.

use super::{Case, Severity, Status, Want};

pub const CASES: &[Case] = &[
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
];
