//! Why a route was taken or refused: one vocabulary for `explain`, `doctor`, errors and `Resolved`.
//!
//! A [`Code`] is stable and machine-readable; it is the same wherever the same fact decides. A
//! [`Reason`] is a code together with the values that made it true on this machine.

use alloc::string::String;
use core::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $title:literal, $remedy:literal;)*) => {
        /// A stable name for one cause. The text form never changes its meaning between releases.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[$doc])* #[doc = $title] $name,)*
        }

        impl Code {
            /// Every code, in the order of this table.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The stable text form, for JSON and for searching.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $code,)* }
            }

            /// What the code says, as one clause without values.
            pub const fn title(self) -> &'static str {
                match self { $(Self::$name => $title,)* }
            }

            /// What a person can do about it; empty where there is nothing to do.
            pub const fn remedy(self) -> &'static str {
                match self { $(Self::$name => $remedy,)* }
            }
        }
    };
}

codes! {
    // Why a route was chosen.
    Resident = "resident", "the bytes are in the page cache", "";
    NotResident = "not-resident", "the bytes are not in the page cache", "";
    ResidencyUnknown = "residency-unknown", "the kernel does not tell what is in the page cache", "";
    MemoryBacked = "memory-backed", "the file system lives in memory", "";
    OnlyRoute = "only-route", "no other route is open", "";
    Preferred = "preferred", "the straightest of the open routes", "";
    Requested = "requested", "it was asked for by name", "";
    ForResident = "for-resident", "it is taken for what is in the page cache", "";
    ForNotResident = "for-not-resident", "it is taken for what is not in the page cache", "";
    ForNewBytes = "for-new-bytes", "new bytes need not go through the page cache", "";
    ForEdges = "for-edges", "it is taken for pieces smaller than a direct I/O block", "";
    Edge = "edge", "the piece is smaller than a direct I/O block", "";

    // Why a storage route was refused.
    NotRequested = "not-requested", "another route was asked for by name", "drop --route to let the planner choose";
    SoftwareMode = "software-mode", "software mode allows only plain system calls", "use --mode auto";
    RequireMode = "require-mode", "require mode forbids copies through host memory", "use --mode auto, or name a route with --route";
    NotRegularFile = "not-regular-file", "the source is not a regular file or block device", "name a regular file";
    FileEmpty = "file-empty", "the file holds no byte to map", "";
    DirectUnsupported = "direct-unsupported", "the file system has no direct I/O for this file", "put the file on a file system with direct I/O (ext4, xfs)";
    DirectNotHonoured = "direct-not-honoured", "the file system accepts O_DIRECT but serves it from the page cache", "";
    IoUringDenied = "io-uring-denied", "the kernel or a seccomp filter refuses io_uring", "allow the io_uring system calls, or accept the thread pool";
    IoUringAbsent = "io-uring-absent", "the kernel has no io_uring", "run Linux 5.6 or newer";
    IoUringPresent = "io-uring-present", "io_uring is available and does the same with fewer threads", "";
    LessThroughput = "less-throughput", "the route costs the least CPU but moves fewer bytes per second", "ask for it with --route mapped-page-cache where CPU time matters more";
    DeviceCannotMap = "device-cannot-map", "the device cannot read mapped file pages", "";
    MappedReadOnly = "mapped-read-only", "mapped file pages are registered for reading only", "name another route for writing, or let the planner choose";
    KernelNoP2pDma = "kernel-no-p2pdma", "the kernel offers no peer-to-peer DMA for this device pair", "run a kernel with CONFIG_PCI_P2PDMA and a driver that publishes device memory to it";
    NoVfioNvme = "no-vfio-nvme", "no NVMe controller is bound to vfio-pci", "bind a spare controller to vfio-pci; never one that holds a mounted file system";
    FileNotOnNvme = "file-not-on-nvme", "the file is not on a local NVMe namespace", "";
    DeviceSimulated = "device-simulated", "the device is simulated and has no bus address", "";
    DeviceNoBarWindow = "device-no-bar-window", "the device offers no BAR window that a peer can address", "";
    NotBuilt = "not-built", "this build does not contain the route", "";

    // Why a direct path does not work on this machine (also the codes of checks).
    P2pAcsRedirect = "p2p-acs-redirect", "ports between two GPUs send peer traffic up to the root complex", "clear the bits on exactly those ports (setpci), keep it with pci=disable_acs_redir; never on a host that assigns devices to guests";
    P2pIommuFault = "p2p-iommu-fault", "an IOMMU refused accesses of a GPU: data is lost", "stop using the results; boot with iommu=pt, then off";
    P2pIommuTranslated = "p2p-iommu-translated", "the IOMMU translates peer writes", "boot with iommu=pt, or switch the IOMMU off";
    P2pNotCapable = "p2p-not-capable", "the driver offers no peer access", "another driver branch, an NVLink bridge, or staging";
    GdrDistance = "gdr-distance", "the nearest NIC of a GPU lies beyond the host bridge", "use a NIC below the same switch";
    RdmaDeviceAbsent = "rdma-device-absent", "there is no RDMA device", "";
    NvidiaFsAbsent = "nvidia-fs-absent", "nvidia-fs is not loaded", "install and load it";
    DmabufExport = "dmabuf-export", "GPU memory cannot be exported as dma-buf", "open kernel modules and Linux 5.12";
    PeermemNoApi = "peermem-no-api", "the peer memory module cannot find its interface", "MOFED or DOCA-OFED, rebuild; dma-buf only on 5.12 with open modules";
    PeermemAbiMismatch = "peermem-abi-mismatch", "the peer memory module was built against another ib_core", "rebuild against the running ib_core";
    PeermemNotRegistered = "peermem-not-registered", "the peer memory module is loaded and not registered", "load it after ib_core; look at dmesg";
    GdrDisabled = "gdr-disabled", "the library says that GPUDirect RDMA is off", "load nvidia-peermem or enable dma-buf";
    NcclOverTcp = "nccl-over-tcp", "a job of several nodes talks over TCP", "look for RDMA devices in the job";
    DmabufUnsupported = "dmabuf-unsupported", "the RDMA provider or driver has no dma-buf registration", "upgrade the provider, else dma-buf off and peermem";
    DmabufKernelTooOld = "dmabuf-kernel-too-old", "the kernel's RDMA core has no dma-buf registration", "Linux 5.12 or a matching OFED";
    GdrSkuUnsupported = "gdr-sku-unsupported", "GPU memory cannot be registered", "a data-centre or professional GPU";
    Bar1Small = "bar1-small", "BAR1 bounds the registration of GPU memory", "smaller windows, or a large BAR1";
    MemlockLow = "memlock-low", "the limit on locked memory is too low", "memlock unlimited";
    StreamMemopsOff = "stream-memops-off", "stream memory operations are refused", "NVreg_EnableStreamMemOPs=1";
    InfinibandNodesMissing = "infiniband-nodes-missing", "no verbs device where the program runs", "pass the devices into the container";
    IbgdaUnavailable = "ibgda-unavailable", "GPU-initiated RDMA has no way to the doorbell", "driver parameters and a reboot, or gdrdrv";
    GdsNvmeNotPatched = "gds-nvme-not-patched", "NVMe has no direct path through nvidia-fs", "look which nvme is loaded, then MOFED with the storage option";
    GdsNoNvme = "gds-no-nvme", "there is no NVMe drive", "";
    GdsRootCrossing = "gds-root-crossing", "drive and GPU hang off different root ports", "a drive below the GPU's switch; iommu=pt";
    GdsRaidP2pdma = "gds-raid-p2pdma", "an array where only peer-to-peer DMA is native", "nvidia-fs";
    Bar1Exhausted = "bar1-exhausted", "registered buffers exceed BAR1", "smaller or fewer buffers";
    GdsFsUnsupported = "gds-fs-unsupported", "a file system has no direct path", "an ext4 or xfs volume";
    PortDown = "port-down", "a port is down", "cable, switch, subnet manager";
    NoGpuLink = "no-gpu-link", "the GPUs have no link of their own", "";
    PathUnknown = "path-unknown", "the facts do not show the way between them", "lspci -vvv as root, or nvidia-smi topo -m";
    ProbeTransfer = "probe-transfer", "a transfer over the path hung, failed or brought other bytes", "keep traffic off the path; look for address translation and redirecting ports";
    // How a software NIC checks what it receives.
    IcrcFull = "icrc-full", "all 32 bits of the packet check are checked", "";
    IcrcHalf = "icrc-half", "a UDP socket hides the IPv4 identification: 16 of the 32 bits of the packet check remain", "grant CAP_NET_RAW for the raw link, or use IPv6";
    IcrcByNic = "icrc-by-nic", "a NIC of the kernel's, which checks packets itself", "";
    SharedMemory = "shared-memory", "packets stay in memory that nothing else writes: there is nothing to check", "";

    PredictedFastest = "predicted-fastest", "it is predicted to take the least time", "";
    PredictedSlower = "predicted-slower", "it is predicted to take longer", "";
    HostMemoryAsked = "host-memory-asked", "collectives are asked to go through host memory", "unset BEELINE_COMM_PATH, and drop --mode software";
    AlgorithmUnsuited = "algorithm-unsuited", "the algorithm does not do this call", "";
    GidUnusable = "gid-unusable", "the entry of the GID table cannot be used", "";
    PagesNotPinnable = "pages-not-pinnable", "the memory has no pages that a NIC's driver could hold", "register its dma-buf, or the device pointer";
    OnDemandUnsupported = "on-demand-unsupported", "the NIC has no on-demand regions", "";
    OnDemandOffset = "on-demand-offset", "soft RoCE puts each packet of an on-demand region at the start of its page", "path MTU 4096 and memory that starts on a page, or register it pinned";
    PeermemAbsent = "peermem-absent", "no peer memory client of the GPU driver is there", "load nvidia-peermem, or register the dma-buf";
    RelaxedOrdering = "relaxed-ordering", "writes to it may pass one another: it is bulk memory", "";
    RelaxedOrderingRefused = "relaxed-ordering-refused", "writes to it stay in order", "";
    InfinibandLink = "infiniband-link", "the port is InfiniBand: its peers are found through a subnet manager, and not by an IP address", "use a RoCE port, or IP over InfiniBand with the NIC in software";
    PathTooFar = "path-too-far", "too far apart for peer access", "";
}

/// One cause, with the values that made it true here.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reason {
    /// The stable name.
    pub code: Code,
    /// The values behind it: a path, a size, an errno. Empty where the code says everything.
    pub detail: String,
}

impl Reason {
    /// A reason that needs no values.
    pub const fn new(code: Code) -> Self {
        Self { code, detail: String::new() }
    }

    /// A reason with the values that made it true.
    pub fn with(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into() }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code.title())?;
        if !self.detail.is_empty() {
            write!(f, " ({})", self.detail)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn codes_are_unique_and_kebab_case() {
        let mut seen = BTreeSet::new();
        for code in Code::ALL {
            let text = code.as_str();
            assert!(seen.insert(text), "{text} stands twice");
            assert!(
                text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            );
            assert!(!code.title().is_empty());
        }
    }
}
