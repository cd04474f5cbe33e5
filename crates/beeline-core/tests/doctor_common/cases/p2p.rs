//! Between GPUs: peer-to-peer, and collectives.

use super::{Case, Severity, Status, Want};

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
];
