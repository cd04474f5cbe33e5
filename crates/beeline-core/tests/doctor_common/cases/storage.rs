//! Between GPUs and storage.

use super::{Case, Severity, Status, Want};

pub const CASES: &[Case] = &[
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
