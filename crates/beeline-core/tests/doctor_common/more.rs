//! For each check: an input on which it speaks up. And inputs on which remarks keep quiet.
//!
//! Most checks that fail have theirs in `cases.rs`; here are the rest.

/// An input on which the check finds something.
pub const POSITIVE: &[(&str, &[&str])] = &[
    ("rdma-acs-redirect", &["lspci-vvv-gpu-nic-acs-on.txt"]),
    ("pcie-uplink-slow", &["handed:nccl-topo/oci-H100-topology.xml"]),
    ("pcie-link-reduced", &["smi-q-a100-x8.txt"]),
    ("pcie-link-reduced", &["smi-q-a100-idle.txt"]),
    ("link-sample-low", &["handed:hwloc-xml/aws-g6.48xl-hwloc.xml"]),
    ("declared-speed", &["topo-declared-gen5.xml", "smi-q-a100.txt"]),
    ("gdr-distance", &["topo-1gpu-phb-nic.txt"]),
    ("rdma-device-absent", &["set:live=/sys/class/infiniband (complete)"]),
    ("kernel-no-p2pdma", &["set:config.CONFIG_PCI_P2PDMA="]),
    ("nvidia-fs-absent", &["lsmod-no-peermem.txt"]),
    ("dmabuf-export", &["smi-q-a100.txt", "set:gpu.DMA_BUF_SUPPORTED=0"]),
    ("facts-hidden", &["set:note=capabilities are hidden"]),
    ("peermem-not-registered", &["lsmod-peermem.txt", "set:memory-peers="]),
    ("nccl-over-tcp", &["nccl-socket.log"]),
    ("gid-none-routable", &["sysfs-counters-low", "show-gids-link-local.txt"]),
    ("port-down", &["handed:ibv/cx7-two-ports-down.txt"]),
    ("counter-saturated", &["sysfs-saturated"]),
    ("driver-parameters", &["params-memops-off.txt"]),
    ("nccl-benign", &["handed:nccl-log/a100pcie-nvlink-bridge-normal.log"]),
    ("nccl-summary", &["handed:nccl-log/a100pcie-nvlink-bridge-normal.log"]),
    ("nic-merged", &["handed:nccl-topo/timez-a100pcie-vnic-normal.xml"]),
    ("gds-no-nvme", &["handed:lspci/a10-vm-lspci-nn.txt"]),
    ("gds-rdma-storage", &["gdscheck-nvme-unsupported.txt"]),
    ("gds-path", &["cufile-log-ok.log"]),
    ("cufile-json-posix-pool", &["handed:cufile-json/minimal-big-cache.json"]),
    ("cufile-json-slow", &["handed:cufile-json/weka-dynamic-routing-comments.json"]),
    ("cufile-numa-bind", &["handed:cufile-log/numa-and-libcuda-missing.log"]),
    ("cufile-library-missing", &["handed:cufile-log/numa-and-libcuda-missing.log"]),
];

/// Checks that only report what is set: they speak whenever they have their input.
pub const SUMMARIES: &[&str] = &["driver-parameters", "nccl-summary"];

/// Inputs that are near what makes a remark, and on which it stays quiet.
pub const QUIET: &[(&str, &[&str])] = &[
    ("link-sample-low", &["handed:hwloc-xml/aws-p4d.24xl-hwloc.xml"]),
    ("rdma-device-absent", &["set:live=/sys/class/infiniband (complete)", "ibv-v-mtu1024.txt"]),
    ("kernel-no-p2pdma", &["set:config.CONFIG_PCI_P2PDMA=y"]),
    ("nvidia-fs-absent", &["gdscheck-nvme-supported.txt", "lsmod-no-peermem.txt"]),
    ("dmabuf-export", &["smi-q-a100.txt", "set:gpu.DMA_BUF_SUPPORTED=1"]),
    ("facts-hidden", &["uname-r.txt"]),
    ("peermem-not-registered", &["lsmod-peermem.txt", "set:memory-peers=nv_mem"]),
    ("peermem-not-registered", &["lsmod-no-peermem.txt", "set:memory-peers="]),
    ("counter-saturated", &["sysfs-counters-low"]),
    ("gid-none-routable", &["sysfs-counters-low", "show-gids-index3.txt"]),
    ("nccl-benign", &["nccl-node-a-nogdr.log"]),
    ("nic-merged", &["topo-dump-full.xml"]),
    ("gds-no-nvme", &["handed:lspci/azure-ndv4-a100-lspci-nn.txt"]),
    ("gds-compat", &["gdscheck-nvme-unsupported.txt"]),
    ("gds-rdma-storage", &["cufile-log-ok.log"]),
    ("gds-p2pdma-off", &["cufile-log-ok.log"]),
    ("gds-path", &["cufile-udev-nvme.log"]),
];
