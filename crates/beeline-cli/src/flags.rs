//! The one table of flags. Help, completions and the man page are generated from it.

mod text;
mod values;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use beeline::core::plan::{Mode, StorageRoute};
use beeline::probe::Fault;
use beeline::verbs::LinkKind;
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use self::text::{ABOUT, AFTER_HELP, LONG_ABOUT};
pub(crate) use self::values::parse_size;
use self::values::{
    link_parser, mode_parser, parse_fault, parse_io, parse_rows, parse_seconds, parse_transfer,
    route_parser,
};
use crate::commands::rdma_memory::{Lent, Place};
use crate::commands::rdma_nic::Choice;

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "beeline",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_help = "`beeline --help` tells more, with examples, exit codes and the environment.",
    after_long_help = AFTER_HELP,
    max_term_width = 100,
    arg_required_else_help = true
)]
pub(crate) struct Cli {
    /// Answer with one JSON object on stdout, errors too (keys: docs/json.md)
    #[arg(long, global = true, display_order = 1000)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Load a model into device memory
    ///
    /// Reads the tensors of safetensors files into one allocation per device, each tensor aligned to
    /// 256 bytes, and reports bytes, time, GB/s (10^9 bytes a second), CPU-seconds per GB and the
    /// routes taken. The memory is freed when the command ends: it measures and verifies, and shows
    /// what the library does.
    Load(LoadFlags),

    /// Copy a file through device memory
    ///
    /// File -> device -> file, byte-identical, in windows of at most 256 MiB of device memory of which
    /// one is written while the next is read. DST changes in one step at the end: until then, and
    /// after any error, it is the old file. A SRC that changes meanwhile is an error. DST gets the
    /// permission bits of SRC, and holes of SRC become zeros that take room.
    Copy(CopyFlags),

    /// Show the plan between a file and a device
    ///
    /// Lists every route that is allowed, in order of preference, every one that is not with its
    /// reason and what would open it, and how the bytes would go right now by what the page cache
    /// holds. Moves nothing.
    Explain(ExplainFlags),

    /// List the devices
    Devices(DevicesFlags),

    /// Say which direct paths work on this machine, and why the others do not
    ///
    /// Reads the running machine, a captured root, a saved record, or files that people already have
    /// (NCCL topology XML and logs, lspci, nvidia-smi, dmesg, gdscheck, cufile.json and its log,
    /// ibv_devinfo and more: docs/doctor.md). Each finding names its evidence, the cause, and what to
    /// do. Exit code 1 when a finding failed.
    Doctor(DoctorFlags),

    /// Show how far GPUs and NICs are apart, or what differs between two machines
    ///
    /// Distances carry the names of nvidia-smi topo -m: NV#, C2C, PIX, PXB, P2C, PHB, NODE, SYS; a
    /// question mark stands where the facts do not decide.
    Topo(TopoFlags),

    /// Answers `beeline doctor --probe`
    #[command(name = "probe-worker", hide = true)]
    ProbeWorker,

    /// Run RDMA over a NIC in software or one of the kernel's, and measure it
    ///
    /// The NIC in software speaks RoCEv2: the other side may be another one, on this host or elsewhere,
    /// Linux rdma_rxe, or hardware. Start `beeline rdma serve` on one side, then one of the others. With
    /// --nic, a NIC of the kernel's is used through libibverbs. With --local, two processes of one host
    /// share memory instead.
    Rdma(RdmaFlags),

    /// Measure what goes between devices
    Bench(BenchFlags),
    /// Look at what programs do through the drop-in libcufile.so.0
    ///
    /// The library takes the place of NVIDIA's: LD_PRELOAD=/path/to/libcufile.so.0 PROGRAM
    /// (docs/cufile.md).
    Cufile(CufileFlags),

    /// Measure reads and writes between files and GPU memory through cuFile, as gdsio does
    ///
    /// Takes gdsio's parameters and prints its line of figures, with p50 and p99 and CPU-seconds a GiB. The
    /// calls are those of the drop-in libcufile: bytes are copied through pinned memory (gdsio's CPU_GPU).
    Gdsio(GdsioFlags),

    /// Print completions for a shell
    ///
    /// For bash: beeline completions bash > ~/.local/share/bash-completion/completions/beeline
    Completions(CompletionsFlags),

    /// Print the man page
    ///
    /// To read it: beeline man | man -l -
    Man(ManFlags),
}

/// Flags of `beeline load`.
#[derive(Args, Debug)]
pub(crate) struct LoadFlags {
    /// Model files: *.safetensors, an index (*.index.json) with its shards beside it, or a folder
    #[arg(value_name = "PATH", required = true)]
    pub(crate) paths: Vec<PathBuf>,

    /// Devices to load into, separated by commas; each gets everything, files are read once
    ///
    /// Written as `beeline devices` lists them. By default the first GPU, or sim:0 (simulated) where
    /// there is none.
    #[arg(long, value_name = "DEVICE", value_delimiter = ',')]
    pub(crate) to: Vec<String>,

    /// Only tensors whose name matches the glob; may be given several times
    ///
    /// In a glob `*` stands for any characters, `?` for one, `[abc]` for one of several. A glob that
    /// matches no tensor is an error.
    #[arg(long, value_name = "GLOB")]
    pub(crate) tensors: Vec<String>,

    /// No tensors whose name matches the glob, even where --tensors does
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,

    /// Only this rank's share of the rows of every tensor, counted from 0
    #[arg(long, value_name = "R", requires = "of", conflicts_with = "rows")]
    pub(crate) rank: Option<u64>,

    /// The number of ranks that share the rows
    #[arg(long, value_name = "N", requires = "rank")]
    pub(crate) of: Option<u64>,

    /// Only rows A up to but without B of every tensor (the first dimension)
    #[arg(long, value_name = "A..B", value_parser = parse_rows)]
    pub(crate) rows: Option<(u64, u64)>,

    /// Read everything back from the device and compare a checksum per tensor with the file
    ///
    /// A tensor that differs is named, and the exit code is 1.
    #[arg(long)]
    pub(crate) verify: bool,

    #[command(flatten)]
    pub(crate) route: RouteFlags,

    #[command(flatten)]
    pub(crate) engine: EngineFlags,
}

/// Flags of `beeline copy`.
#[derive(Args, Debug)]
pub(crate) struct CopyFlags {
    /// The file to copy
    #[arg(value_name = "SRC")]
    pub(crate) source: PathBuf,

    /// Where to: a file, or a folder that gets a file of the same name
    #[arg(value_name = "DST")]
    pub(crate) target: PathBuf,

    /// The device whose memory the bytes go through
    #[arg(long, value_name = "DEVICE")]
    pub(crate) via: Option<String>,

    /// Do not wait until the bytes are on the drive
    #[arg(long)]
    pub(crate) no_sync: bool,

    #[command(flatten)]
    pub(crate) route: RouteFlags,

    #[command(flatten)]
    pub(crate) engine: EngineFlags,
}

/// Flags of `beeline explain`.
#[derive(Args, Debug)]
pub(crate) struct ExplainFlags {
    /// The file; or, between memories: host, gpu:N, nic:NAME, remote:NAME (a GPU behind that NIC); or a
    /// collective: allreduce, allgather, reducescatter, broadcast, reduce, gather, scatter, alltoall. Of a
    /// collective --mode software means host memory, as BEELINE_COMM_PATH=staged does
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// The device; by default the one that `beeline load` would use
    #[arg(value_name = "DEVICE")]
    pub(crate) device: Option<String>,

    /// Between memories: plan for a record that `beeline doctor --save` wrote; for a collective also for a
    /// file of any kind that doctor reads, as NCCL's topology XML
    #[arg(long, value_name = "FILE")]
    pub(crate) load: Option<PathBuf>,

    /// For a collective: how many GPUs take part
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<u32>,

    /// For a collective: bytes of one rank's part [0]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) bytes: Option<u64>,

    /// For a collective: replayed from a CUDA graph, not launched call by call
    #[arg(long)]
    pub(crate) graph: bool,

    /// Plan for writing device memory into the file instead of reading it
    #[arg(long)]
    pub(crate) write: bool,

    /// Show the addresses of memory instead: FILE is host, cuda:N or sim:N
    #[arg(long, conflicts_with_all = ["device", "load", "write"])]
    pub(crate) addresses: bool,

    #[command(flatten)]
    pub(crate) route: RouteFlags,
}

/// Flags of `beeline devices`.
#[derive(Args, Debug)]
pub(crate) struct DevicesFlags {}

/// Where facts about a machine come from.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct FactsFlags {
    /// Files of any recognised kind, or captured /sys/class/infiniband trees; by default this machine
    #[arg(value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,

    /// A captured file system tree instead of this machine
    #[arg(long, value_name = "DIR", conflicts_with_all = ["files", "load"])]
    pub(crate) root: Option<PathBuf>,

    /// A record that --save wrote; FILEs add to it
    #[arg(long, value_name = "JSON")]
    pub(crate) load: Option<PathBuf>,
}

/// Flags of `beeline doctor`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct DoctorFlags {
    #[command(flatten)]
    pub(crate) facts: FactsFlags,

    /// Save the facts; host names, addresses, serial numbers, UUIDs and GUIDs are replaced
    #[arg(long, value_name = "JSON")]
    pub(crate) save: Option<PathBuf>,

    /// Keep personal values in the saved facts
    #[arg(long, requires = "save")]
    pub(crate) personal: bool,

    /// Write a page with the machine as a tree and every finding; it needs no network
    #[arg(long, value_name = "HTML")]
    pub(crate) html: Option<PathBuf>,

    /// Show passed and skipped checks too
    #[arg(long)]
    pub(crate) all: bool,

    #[command(flatten)]
    pub(crate) probe: ProbeFlags,
}

/// Flags of `beeline doctor --probe`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ProbeFlags {
    /// Move bytes over every path between GPUs, host and a file, and compare them
    ///
    /// Uses device memory and makes CUDA contexts, in a process of its own that is killed where a
    /// path hangs. Only this makes a path "verified". Only for the running machine. Without a GPU the
    /// simulated devices are probed, and every line says so.
    #[arg(long, conflicts_with_all = ["files", "load", "root"])]
    pub(crate) probe: bool,

    /// Give up one transfer after so many seconds (20)
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, requires = "probe")]
    pub(crate) probe_timeout: Option<Duration>,

    /// Bytes of one copy, at most 1G (64M; 8M between simulated devices)
    #[arg(long, value_name = "BYTES", value_parser = parse_size, requires = "probe")]
    pub(crate) probe_bytes: Option<u64>,

    /// Folder for the file that is read (the one for temporary files)
    #[arg(long, value_name = "DIR", requires = "probe")]
    pub(crate) probe_dir: Option<PathBuf>,

    /// Makes one transfer of simulated devices go wrong: its number, then stall, corrupt or fail
    #[arg(long, value_name = "N:KIND", value_parser = parse_fault, requires = "probe", hide = true)]
    pub(crate) probe_fault: Option<(usize, Fault)>,
}

/// Flags of `beeline topo`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct TopoFlags {
    #[command(flatten)]
    pub(crate) facts: FactsFlags,

    /// Show what differs between two saved records or files; exit code 1 where anything does
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"], conflicts_with_all = ["files", "load", "root"])]
    pub(crate) diff: Vec<PathBuf>,
}

/// Flags of `beeline bench`.
#[derive(Args, Debug)]
pub(crate) struct BenchFlags {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Bandwidth and latency between all pairs of devices
    ///
    /// The copy engine, stores and loads of kernels, reads that are added up, one way and both ways at once;
    /// beside them what the link carries by its speed and width. Every path is verified first: one that
    /// hangs or lies is refused, and its bytes go through host memory.
    P2p(BenchP2pFlags),
}

/// Flags of `beeline bench p2p`.
#[derive(Args, Debug)]
pub(crate) struct BenchP2pFlags {
    /// Devices, separated by commas; all GPUs (or all simulated ones) by default
    #[arg(long, value_name = "DEVICE", value_delimiter = ',')]
    pub(crate) devices: Vec<String>,

    /// Bytes of one copy; each device holds twice that
    #[arg(long, value_name = "BYTES", value_parser = parse_size, default_value = "256M")]
    pub(crate) bytes: u64,
}

/// Flags of `beeline rdma`.
#[derive(Args, Debug)]
pub(crate) struct RdmaFlags {
    #[command(subcommand)]
    pub(crate) command: RdmaCommand,
}

/// What to do with RDMA.
#[derive(Debug, Subcommand)]
pub(crate) enum RdmaCommand {
    /// Lend memory to clients, one after the other, and answer their pings
    ///
    /// Whoever reaches the port can write the memory lent: it is on loopback unless --bind says
    /// otherwise. While a client is connected one CPU polls.
    Serve(RdmaServeFlags),

    /// Latency of SEND there and SEND back, halved
    Ping(RdmaClientFlags),

    /// Latency of WRITE, from the post to the completion
    Write(RdmaClientFlags),

    /// Latency of READ, from the post to the completion
    Read(RdmaClientFlags),

    /// Bandwidth of WRITE and READ, many at a time
    Bw(RdmaClientFlags),
}

/// What both sides of `beeline rdma` take.
#[derive(Args, Debug)]
pub(crate) struct RdmaNicFlags {
    /// Over shared memory with a process of this host, met at this Unix socket
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["port", "link", "pcap", "nic"])]
    pub(crate) local: Option<PathBuf>,

    /// Which NIC: soft, one of the kernel's (as mlx5_0 or mlx5_0:2 for its second port), or auto
    ///
    /// `beeline devices` lists the kernel's NICs; they need libibverbs. auto takes the one that this
    /// machine's way to the other side starts at, and the NIC in software where there is none.
    #[arg(long, value_name = "NIC", default_value = "soft")]
    pub(crate) nic: Choice,

    /// TCP port where the two sides meet
    #[arg(long, value_name = "PORT", default_value_t = 18515)]
    pub(crate) port: u16,

    /// How packets travel; by default raw where that is allowed
    #[arg(long, value_name = "LINK", value_parser = link_parser())]
    pub(crate) link: Option<LinkKind>,

    /// Write a trace of all packets, for Wireshark and its like; only of the NIC in software
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
}

/// Flags of `beeline rdma serve`.
#[derive(Args, Debug)]
pub(crate) struct RdmaServeFlags {
    /// Address of the NIC and of the port [127.0.0.1]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "local")]
    pub(crate) bind: Option<IpAddr>,

    /// Memory lent to a client: the most of it (64M), and where it lies (host, cuda:N, sim:N). May be
    /// given once for each
    #[arg(long, value_name = "BYTES|PLACE", action = clap::ArgAction::Append)]
    pub(crate) memory: Vec<Lent>,

    /// End after so many clients, with exit code 1 where one failed; by default a signal ends it
    #[arg(long, value_name = "N")]
    pub(crate) count: Option<u64>,

    #[command(flatten)]
    pub(crate) nic: RdmaNicFlags,
}

/// Flags of the other side.
#[derive(Args, Debug)]
pub(crate) struct RdmaClientFlags {
    /// Address of the server [127.0.0.1]
    #[arg(value_name = "SERVER", conflicts_with = "local")]
    pub(crate) server: Option<IpAddr>,

    /// Address of the NIC here; by default the one that reaches the server, 127.0.0.2 on loopback
    #[arg(long, value_name = "ADDRESS", conflicts_with = "local")]
    pub(crate) from: Option<IpAddr>,

    /// Where this side's memory lies: host, cuda:N or sim:N
    #[arg(long, value_name = "PLACE", default_value = "host")]
    pub(crate) memory: Place,

    /// Bytes of a message [64; bw: 1M]
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) size: Option<u64>,

    /// How many
    #[arg(long, short = 'n', value_name = "N", default_value_t = 1000,
          value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub(crate) iterations: u64,

    #[command(flatten)]
    pub(crate) nic: RdmaNicFlags,
}

/// Flags of `beeline cufile`.
#[derive(Args, Debug)]
pub(crate) struct CufileFlags {
    #[command(subcommand)]
    pub(crate) command: CufileCommand,
}

/// What to look at.
#[derive(Debug, Subcommand)]
pub(crate) enum CufileCommand {
    /// Calls, bytes by route and CPU time of each process that left its statistics
    Stats(CufileStatsFlags),
}

/// Flags of `beeline cufile stats`.
#[derive(Args, Debug)]
pub(crate) struct CufileStatsFlags {
    /// Where they were left [BEELINE_CUFILE_STATS]
    #[arg(value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
}

/// Flags of `beeline gdsio`.
#[derive(Args, Debug)]
pub(crate) struct GdsioFlags {
    /// Folder with one file for each thread (gdsio.0, ...), made where they are missing
    #[arg(
        short = 'D',
        value_name = "FOLDER",
        required_unless_present = "file",
        conflicts_with = "file"
    )]
    pub(crate) folder: Option<PathBuf>,

    /// One file for all threads, each in a part of its own
    #[arg(short = 'f', value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,

    /// Ordinal of the GPU
    #[arg(short = 'd', value_name = "N", default_value_t = 0)]
    pub(crate) device: u32,

    /// Threads
    #[arg(short = 'w', value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: u32,

    /// Bytes of the data set, over all threads
    #[arg(short = 's', value_name = "BYTES", default_value = "1G", value_parser = parse_size)]
    pub(crate) size: u64,

    /// Bytes of one request
    #[arg(short = 'i', value_name = "BYTES", default_value = "1M", value_parser = parse_io)]
    pub(crate) io_size: u64,

    /// Transfer type: 0 and 2 single requests, 6 batches
    #[arg(short = 'x', value_name = "N", default_value = "0", value_parser = parse_transfer)]
    pub(crate) transfer: u8,

    /// 0 read, 1 write, 2 random read, 3 random write; a write overwrites what the file holds
    #[arg(short = 'I', value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) operation: u8,

    /// Go on for so many seconds instead of once over the data set
    #[arg(short = 'T', value_name = "SECONDS", value_parser = parse_seconds)]
    pub(crate) seconds: Option<Duration>,

    /// Compare every request with its file
    #[arg(short = 'V')]
    pub(crate) verify: bool,
}

/// Flags of `beeline completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsFlags {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// Flags of `beeline man`.
#[derive(Args, Debug)]
pub(crate) struct ManFlags {}

/// How far the plan may go.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct RouteFlags {
    /// How far the plan may go
    #[arg(long, default_value = "auto", value_parser = mode_parser())]
    pub(crate) mode: Mode,

    /// Only this route, or an error
    #[arg(long, value_name = "NAME", value_parser = route_parser())]
    pub(crate) route: Option<StorageRoute>,
}

/// What the engine may use.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct EngineFlags {
    /// Give up the transfer after so many seconds (fractions allowed); --verify is not counted
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub(crate) timeout: Option<Duration>,

    /// Threads that read, write and start copies
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) threads: Option<u16>,

    /// Most pinned host memory in use at once, as 64M or 1GiB; rounded up to slots of 4 MiB, at least 2
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) pool: Option<u64>,
}

/// Whether the arguments ask for JSON, for a command line that could not be parsed.
pub(crate) fn asks_for_json(args: impl Iterator<Item = OsString>) -> bool {
    args.take_while(|arg| arg != "--").any(|arg| arg == "--json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_table_is_sound() {
        Cli::command().debug_assert();
    }
}
