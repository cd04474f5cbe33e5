//! Parsers: each recognises its format by content and adds what it finds to a [`Machine`].
//!
//! A file that no parser recognises is refused with the list of what is. A file that is recognised but
//! broken is an error with a line number, except where the format is one that people cut short when they
//! paste it: then the source is marked as truncated, and what is missing stays unknown.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use super::machine::{Machine, Origin, Source};

mod app_log;
mod cufile_json;
mod cufile_log;
mod dmesg;
mod gdscheck;
mod hwloc;
mod ibv_devinfo;
mod lspci;
mod lspci_tree;
mod nccl_log;
mod nccl_topo;
mod proc_files;
mod proc_tables;
mod scan;
mod setpci;
mod settings;
mod show_gids;
mod smi_query;
mod smi_topo;
mod sysfs_ib;
mod tables;
mod text;
mod xml;

pub use cufile_json::strip_comments;
pub use sysfs_ib::read_tree;

/// Largest input that [`read`] accepts, in bytes.
pub const BYTES_MAX: usize = 1 << 30;

/// Largest structured input (anything that is not a log), in bytes.
pub const STRUCTURED_BYTES_MAX: usize = 32 << 20;

/// Inputs that one record takes.
pub const SOURCES_MAX: usize = 4096;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $what:literal, $recognise:path, $parse:path;)*) => {
        /// What an input is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[non_exhaustive]
        pub enum Kind {
            $($(#[$doc])* #[doc = $what] $name,)*
            /// A captured `/sys/class/infiniband` tree.
            SysfsInfiniband,
            /// Facts gathered from the running machine or a captured root.
            Live,
        }

        impl Kind {
            /// Every kind that is recognised by content.
            pub const FILES: &'static [Self] = &[$(Self::$name,)*];

            /// Stable name.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    Self::SysfsInfiniband => "sysfs-infiniband",
                    Self::Live => "live",
                }
            }

            /// What it is, for a reader.
            pub const fn what(self) -> &'static str {
                match self {
                    $(Self::$name => $what,)*
                    Self::SysfsInfiniband => "captured /sys/class/infiniband tree",
                    Self::Live => "the running machine",
                }
            }
        }

        /// In the order in which they are tried: the more particular format first.
        const PARSERS: &[(Kind, fn(&str) -> bool, Parser)] =
            &[$((Kind::$name, $recognise, $parse),)*];
    };
}

type Parser = fn(&mut Machine, &Input<'_>) -> Result<Outcome, ReadError>;

kinds! {
    NcclTopo = "nccl-topo", "NCCL topology XML", nccl_topo::is_nccl, nccl_topo::parse;
    RcclTopo = "rccl-topo", "RCCL topology XML", nccl_topo::is_rccl, nccl_topo::parse;
    NcclGraph = "nccl-graph", "NCCL graph XML", nccl_topo::is_graph, nccl_topo::parse_graph;
    Hwloc = "hwloc", "hwloc XML", hwloc::recognise, hwloc::parse;
    CufileJson = "cufile-json", "cuFile configuration (cufile.json)", cufile_json::recognise, cufile_json::parse;
    SmiTopo = "nvidia-smi-topo", "nvidia-smi topo -m", smi_topo::is_matrix, smi_topo::parse_matrix;
    SmiP2p = "nvidia-smi-p2p", "nvidia-smi topo -p2p", smi_topo::is_p2p, smi_topo::parse_p2p;
    SmiQuery = "nvidia-smi-q", "nvidia-smi -q", smi_query::recognise, smi_query::parse;
    LspciTree = "lspci-tree", "lspci -tv", lspci_tree::recognise, lspci_tree::parse;
    Lspci = "lspci", "lspci -nn or -vvv", lspci::recognise, lspci::parse;
    Setpci = "setpci", "setpci -v -s BDF ECAP_ACS+6.w", setpci::recognise, setpci::parse;
    Gdscheck = "gdscheck", "gdscheck -p", gdscheck::recognise, gdscheck::parse;
    IbvDevinfo = "ibv-devinfo", "ibv_devinfo", ibv_devinfo::recognise, ibv_devinfo::parse;
    ShowGids = "show-gids", "show_gids", show_gids::recognise, show_gids::parse;
    NvidiaParams = "nvidia-params", "/proc/driver/nvidia/params", proc_files::is_params, proc_files::parse_params;
    NvidiaVersion = "nvidia-version", "/proc/driver/nvidia/version", proc_files::is_version, proc_files::parse_version;
    Modules = "modules", "lsmod or /proc/modules", proc_tables::is_modules, proc_tables::parse_modules;
    Devices = "devices", "/proc/devices", proc_tables::is_devices, proc_tables::parse_devices;
    Limits = "limits", "/proc/PID/limits or ulimit -a", proc_files::is_limits, proc_files::parse_limits;
    Symbols = "kallsyms", "/proc/kallsyms", proc_tables::is_symbols, proc_tables::parse_symbols;
    Mdstat = "mdstat", "/proc/mdstat", proc_tables::is_mdstat, proc_tables::parse_mdstat;
    Mounts = "mounts", "/proc/mounts or mountinfo", proc_tables::is_mounts, proc_tables::parse_mounts;
    Maps = "maps", "/proc/PID/maps", proc_tables::is_maps, proc_tables::parse_maps;
    Lscpu = "lscpu", "lscpu", tables::is_lscpu, tables::parse_lscpu;
    Lsblk = "lsblk", "lsblk", tables::is_lsblk, tables::parse_lsblk;
    Fincore = "fincore", "fincore", tables::is_fincore, tables::parse_fincore;
    CufileLog = "cufile-log", "cufile.log", cufile_log::recognise, scan::parse;
    NcclLog = "nccl-log", "NCCL_DEBUG log", nccl_log::recognise, scan::parse;
    KernelLog = "kernel-log", "dmesg or kmsg", dmesg::recognise, scan::parse;
    Cmdline = "cmdline", "/proc/cmdline", proc_files::is_cmdline, proc_files::parse_cmdline;
    KernelVersion = "kernel-version", "uname -a or /proc/version", proc_files::is_uname, proc_files::parse_uname;
    Settings = "settings", "nccl.conf or env output", settings::recognise, settings::parse;
    AppLog = "application-log", "log of an RDMA, storage or NVSHMEM program", app_log::recognise, scan::parse_known;
}

/// One input while it is parsed.
pub(crate) struct Input<'a> {
    pub(crate) text: &'a str,
    pub(crate) name: &'a str,
    pub(crate) source: u16,
}

impl<'a> Input<'a> {
    /// The origin of a fact on `line`.
    pub(crate) const fn at(&self, line: u32) -> Origin {
        Origin { source: self.source, line }
    }

    /// Lines with their numbers, without carriage returns.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (u32, &'a str)> {
        self.text.lines().zip(1u32..).map(|(line, number)| (number, line.trim_end_matches('\r')))
    }
}

/// What a parser says besides the facts.
#[derive(Default)]
pub(crate) struct Outcome {
    /// The content visibly stops before its end.
    pub(crate) truncated: bool,
}

/// Why an input was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    /// The input.
    pub name: String,
    /// Line, from 1; 0 where none applies.
    pub line: u32,
    /// What is wrong and what was expected.
    pub message: String,
}

impl ReadError {
    pub(crate) fn new(input: &Input<'_>, line: u32, message: impl Into<String>) -> Self {
        Self { name: input.name.to_string(), line, message: message.into() }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.name, self.message),
            line => write!(f, "{}:{line}: {}", self.name, self.message),
        }
    }
}

impl core::error::Error for ReadError {}

/// Reads one input into `machine`: recognises it by content, parses it, records it as a source.
///
/// On an error `machine` is as it was before. Work is linear in the size of the input.
pub fn read(machine: &mut Machine, name: &str, bytes: &[u8]) -> Result<Kind, ReadError> {
    let refuse = |line: u32, message: String| ReadError { name: name.to_string(), line, message };
    if bytes.len() > BYTES_MAX {
        let message = alloc::format!("{} bytes, more than the limit of {BYTES_MAX}", bytes.len());
        return Err(refuse(0, message));
    }
    let text = core::str::from_utf8(bytes).map_err(|error| {
        let before = bytes.get(..error.valid_up_to()).unwrap_or_default();
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let line = u32::try_from(line).unwrap_or(u32::MAX);
        refuse(line, "not UTF-8 text; expected one of the text formats of the tools".to_string())
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let source = new_source(machine).map_err(|message| refuse(0, message))?;
    let input = Input { text, name, source };

    let head = head(text);
    let found = PARSERS.iter().find(|(_, recognise, _)| recognise(head));
    let Some((kind, _, parse)) = found else {
        return Err(refuse(first_text_line(text), unrecognised(text)));
    };
    let is_log = matches!(
        kind,
        Kind::CufileLog | Kind::NcclLog | Kind::KernelLog | Kind::AppLog | Kind::Symbols
    );
    if !is_log && text.len() > STRUCTURED_BYTES_MAX {
        let message = alloc::format!(
            "{} of {} bytes, more than the limit of {STRUCTURED_BYTES_MAX}",
            kind.what(),
            text.len()
        );
        return Err(refuse(0, message));
    }
    let mut draft = machine.clone();
    let outcome = parse(&mut draft, &input)?;
    let lines = u32::try_from(text.lines().count()).unwrap_or(u32::MAX);
    draft.sources.push(Source {
        kind: *kind,
        name: name.to_string(),
        lines,
        truncated: outcome.truncated,
    });
    *machine = draft;
    Ok(*kind)
}

/// [`read`] for an input whose kind is known by where it came from, such as a file of `/proc`.
pub fn read_as(
    machine: &mut Machine,
    kind: Kind,
    name: &str,
    bytes: &[u8],
) -> Result<(), ReadError> {
    let refuse = |message: String| ReadError { name: name.to_string(), line: 0, message };
    let Some((_, _, parse)) = PARSERS.iter().find(|(known, _, _)| *known == kind) else {
        return Err(refuse(alloc::format!("{} is not the content of one file", kind.as_str())));
    };
    if bytes.len() > BYTES_MAX {
        return Err(refuse(alloc::format!("{} bytes, more than {BYTES_MAX}", bytes.len())));
    }
    let text = core::str::from_utf8(bytes).map_err(|_| refuse("not UTF-8 text".to_string()))?;
    let source = new_source(machine).map_err(refuse)?;
    let mut draft = machine.clone();
    let outcome = parse(&mut draft, &Input { text, name, source })?;
    let lines = u32::try_from(text.lines().count()).unwrap_or(u32::MAX);
    draft.sources.push(Source {
        kind,
        name: name.to_string(),
        lines,
        truncated: outcome.truncated,
    });
    *machine = draft;
    Ok(())
}

/// Gives every PCI function that is a GPU or a NIC a record of its own.
pub fn register_functions(machine: &mut Machine, at: Origin) {
    let functions: Vec<super::bdf::Bdf> = machine.pci.keys().copied().collect();
    for bdf in functions {
        lspci::register(machine, bdf, at);
    }
}

/// The number that the next source of `machine` will have.
pub(crate) fn new_source(machine: &Machine) -> Result<u16, String> {
    let number = machine.sources.len();
    if number >= SOURCES_MAX {
        return Err(alloc::format!("more than {SOURCES_MAX} inputs for one machine"));
    }
    u16::try_from(number).map_err(|error| error.to_string())
}

/// Parsers decide on this much: whole lines, about 64 KiB.
fn head(text: &str) -> &str {
    const HEAD: usize = 64 << 10;
    if text.len() <= HEAD {
        return text;
    }
    let mut end = HEAD;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let cut = text.get(..end).unwrap_or(text);
    cut.rfind('\n').and_then(|newline| cut.get(..newline)).unwrap_or(cut)
}

fn first_text_line(text: &str) -> u32 {
    let index = text.lines().position(|line| !line.trim().is_empty()).unwrap_or(0);
    u32::try_from(index).unwrap_or(0).saturating_add(1)
}

fn unrecognised(text: &str) -> String {
    let expected: Vec<&str> = Kind::FILES.iter().map(|kind| kind.what()).collect();
    let seen = match text.trim_start().chars().next() {
        None => "empty file",
        Some('<') => "XML whose root is none of <system>, <topology>, <graphs>",
        Some('{' | '[') => "JSON that is neither a cuFile configuration nor a saved machine record",
        Some(_) => "text of no known tool",
    };
    alloc::format!("{seen}; expected one of: {}", expected.join(", "))
}
