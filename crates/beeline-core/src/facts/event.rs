//! What logs report, as typed values: one variant per kind of statement, equal statements folded.
//!
//! Events keep values, never raw lines, so a saved record carries no text that nobody looked at.

use alloc::string::String;

use serde::{Deserialize, Serialize};

use super::bdf::Bdf;
use super::machine::Origin;

/// How often an event was seen, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Number of occurrences.
    pub count: u64,
    /// The first of them.
    pub first: Origin,
    /// The last of them.
    pub last: Origin,
}

/// One statement of a log.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event {
    // Kernel log.
    /// An IOMMU refused an access of a device.
    IommuFault {
        /// The device that made the access.
        bdf: Bdf,
        /// Driver bound to it, where the line says so.
        driver: String,
        /// Whether it was a write: that data is lost.
        write: Option<bool>,
    },
    /// A module could not be linked: `Unknown symbol X (err N)`.
    UnknownSymbol {
        /// The module.
        module: String,
        /// The symbol.
        symbol: String,
        /// 0 or -2: absent. -22: present with another version.
        err: i32,
    },
    /// `disagrees about version of symbol`.
    SymbolVersion {
        /// The module.
        module: String,
        /// The symbol.
        symbol: String,
    },
    /// `no symbol version for X`: a warning only.
    NoSymbolVersion {
        /// The module.
        module: String,
        /// The symbol.
        symbol: String,
    },
    /// nvidia-peermem met a context that was already gone.
    PeermemInvalidContext,
    /// The driver refused to pin because address or length are not multiples of a GPU page.
    PinUnaligned {
        /// Length asked for, in bytes.
        length: u64,
        /// Offset of the address within a 64 KiB page.
        address_offset: u64,
    },
    /// gdrdrv's pin call failed.
    GdrdrvPinFailed {
        /// Length asked for, in bytes.
        length: u64,
        /// Kernel error number.
        ret: i32,
    },
    /// `NVRM: Xid`.
    Xid {
        /// The GPU.
        bdf: Bdf,
        /// Xid number.
        xid: u32,
    },

    // Communication log.
    /// Version of the communication library.
    NcclVersion {
        /// As printed.
        version: String,
    },
    /// `Using network X`.
    UsingNetwork {
        /// Host that printed it.
        host: String,
        /// Plugin or `IB`, `Socket`.
        network: String,
    },
    /// GPUDirect RDMA switched on or off for a NIC.
    GdrHca {
        /// Host that printed it.
        host: String,
        /// Network that says so: `IB`, `Socket`, or a plugin's name.
        network: String,
        /// Name of the NIC.
        hca: String,
        /// On or off.
        enabled: bool,
        /// The reason in brackets, where the line has one: `no module`.
        reason: String,
    },
    /// GPUDirect RDMA decided for a pair of GPU and NIC by distance.
    GdrPair {
        /// Host that printed it.
        host: String,
        /// GPU as printed.
        gpu: String,
        /// NIC as printed.
        hca: String,
        /// On or off.
        enabled: bool,
        /// Distance number.
        distance: u32,
        /// Limit number.
        limit: u32,
    },
    /// No InfiniBand or RoCE device was found.
    NoIbDevice {
        /// Host that printed it.
        host: String,
    },
    /// A channel between two ranks.
    Channel {
        /// Host that printed it.
        host: String,
        /// `send`, `receive`, or empty for a channel within the node.
        direction: String,
        /// `P2P/IPC`, `SHM`, `NET/IB/0` and so on, without the suffix for GPUDirect RDMA.
        transport: String,
        /// The suffix for GPUDirect RDMA was there.
        gdr: bool,
    },
    /// Size of a communicator.
    Communicator {
        /// Number of ranks.
        ranks: u32,
        /// Number of nodes, 0 where the line does not say.
        nodes: u32,
    },
    /// A required attribute of a topology file is missing.
    TopoAttributeMissing {
        /// The attribute.
        attribute: String,
        /// The element.
        element: String,
    },
    /// A device number of a graph file has no GPU.
    GraphDevNotFound {
        /// The device number.
        dev: u32,
    },
    /// A bus of a topology file is not in this machine's sysfs.
    TopoPathNotFound {
        /// Bus as printed.
        bus: String,
    },
    /// Sizes of one collective differ between two ranks.
    CollectiveMismatch {
        /// Local size in bytes.
        local: u64,
        /// Remote size in bytes.
        remote: u64,
    },
    /// A work request completed with an error.
    CompletionError {
        /// Host that printed it.
        host: String,
        /// Work completion status number.
        status: u32,
        /// Vendor error number.
        vendor: u32,
        /// NIC, where the line says so.
        hca: String,
    },
    /// A verbs call failed.
    VerbsFailed {
        /// The call: `ibv_reg_mr` and so on.
        call: String,
        /// Error number, 0 where only text stands.
        errno: i32,
        /// Address, where the line has one.
        address: u64,
        /// Length in bytes, where the line has one.
        length: u64,
    },
    /// A symbol of a newer library version is missing: harmless.
    OptionalSymbolMissing {
        /// The symbol.
        symbol: String,
    },
    /// The GPU can export dma-buf.
    DmaBufAvailable,
    /// A network plugin switched GPUDirect RDMA off.
    PluginGdrDisabled {
        /// Reason in the plugin's words.
        reason: String,
    },
    /// A network plugin found no provider.
    OfiNoProvider,
    /// Type of the path from a GPU to a NIC as the library computed it.
    PathToNet {
        /// The GPU as printed.
        gpu: String,
        /// Path type as printed.
        kind: String,
    },
    /// Bandwidth a system summary states for a link type, in tenths of GB/s.
    SystemLink {
        /// `NVL`, `PCI`, `NET`.
        kind: String,
        /// Tenths of GB/s.
        tenths_gb_s: u32,
    },
    /// Number of channels.
    Channels {
        /// Collective channels.
        count: u32,
    },
    /// Average bus bandwidth of a benchmark, in thousandths of GB/s.
    AverageBusBandwidth {
        /// Thousandths of GB/s.
        milli_gb_s: u64,
    },

    // cuFile log.
    /// NVMe driver not registered with nvidia-fs.
    NvmeNotRegistered,
    /// A file goes through the compatibility path.
    CompatUsed,
    /// The driver opened in compatible mode.
    CompatMode,
    /// Binding a thread to a NUMA node failed.
    NumaBindFailed {
        /// The node.
        node: i32,
        /// Error number.
        errno: i32,
    },
    /// A library could not be loaded.
    LibraryMissing {
        /// The library.
        library: String,
    },
    /// cuFile could not start.
    CufileInitFailed,
    /// A registration exceeds BAR1.
    Bar1Exhausted {
        /// Bytes asked for.
        need: u64,
        /// Bytes left.
        have: u64,
    },
    /// No udev device for a block device number.
    NoUdevDevice {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// PCI peer-to-peer DMA is off by configuration.
    P2pDmaOffByConfig,
    /// PCI peer-to-peer DMA is not supported.
    P2pDmaNotSupported {
        /// CUDA error number.
        error: i32,
    },
    /// cuFile accepts a block device.
    BlockDeviceSupported {
        /// Device.
        device: String,
        /// Kernel module.
        module: String,
    },
    /// nvidia_peermem is not loaded, says cuFile: of interest to RDMA file systems only.
    CufilePeermemMissing,
    /// No NIC near a GPU, says cuFile: of interest to RDMA file systems only.
    CufileNoNicPair,
    /// A file could not be opened or registered for cuFile.
    CufileOpenFailed {
        /// In compatibility mode.
        compat: bool,
    },

    // Other programs.
    /// `Couldn't allocate MR` of the perftest programs.
    PerftestMrFailed {
        /// Error number, 0 where the program prints none.
        errno: i32,
    },
    /// How a test allocated its buffer.
    TestAllocation {
        /// The call.
        call: String,
    },
    /// A test ended with a result.
    TestPassed,
    /// MTU that a program asked for, in bytes.
    MtuRequested {
        /// Bytes.
        bytes: u32,
    },
    /// The program lowered the MTU by itself.
    MtuLowered,
    /// Local length error of a work request.
    LocalLengthError {
        /// Message length in bytes, 0 where unknown.
        length: u64,
    },
    /// A queue pair did not reach ready-to-receive.
    RtrFailed {
        /// Error number.
        errno: i32,
    },
    /// GID index that a program uses, and on which device.
    GidUsed {
        /// Device.
        device: String,
        /// Index.
        index: u32,
    },
    /// A program crashed while copying inline receive data.
    ScatterCrash,
    /// gdrcopy could not pin.
    GdrPinFailed {
        /// Error number.
        code: i32,
        /// Size in bytes, 0 where unknown.
        size: u64,
    },
    /// Stream memory operations are refused.
    StreamOpsRefused,
    /// A transport of NVSHMEM did not start.
    NvshmemTransportFailed {
        /// The transport.
        transport: String,
    },
    /// A later failure that other failures cause: an assertion, an unspecified launch failure.
    LateFailure {
        /// In the program's words.
        what: String,
    },
    /// Values that an atomic operation returned are in the wrong byte order, and shown to be.
    AtomicSwapped,
    /// A program was started with a GPU buffer.
    GpuBuffer,
}
