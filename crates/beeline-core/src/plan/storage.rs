//! Routes between a file and a device's memory.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use super::{Choice, Level, Mode, Plan, Rejected, UnknownName};
use crate::reason::{Code, Reason};

/// A way for bytes between a file and device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StorageRoute {
    /// The drive writes device memory itself, started by the kernel (peer-to-peer DMA).
    P2pDma,
    /// The drive writes device memory itself, driven from user space (NVMe through VFIO).
    Nvme,
    /// The device reads page-cache pages that are mapped and registered; no copy by the CPU.
    MappedPageCache,
    /// The CPU copies out of the page cache into pinned memory; the device copies from there.
    PageCache,
    /// The drive writes pinned memory (`O_DIRECT` by io_uring); the device copies from there.
    Direct,
    /// As `Direct`, with blocking calls on threads.
    ThreadPool,
}

impl StorageRoute {
    /// Every route, straightest first.
    pub const ALL: [Self; 6] = [
        Self::P2pDma,
        Self::Nvme,
        Self::MappedPageCache,
        Self::PageCache,
        Self::Direct,
        Self::ThreadPool,
    ];

    /// The name as the command line and JSON write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::P2pDma => "p2p-dma",
            Self::Nvme => "nvme",
            Self::MappedPageCache => "mapped-page-cache",
            Self::PageCache => "page-cache",
            Self::Direct => "direct",
            Self::ThreadPool => "thread-pool",
        }
    }

    /// What carries the bytes into a file, in one line.
    pub const fn describe_write(self) -> &'static str {
        match self {
            Self::P2pDma => "the drive reads device memory, started by the kernel",
            Self::Nvme => "the drive reads device memory, driven from user space",
            Self::MappedPageCache => "the device writes mapped page-cache pages",
            Self::PageCache => {
                "the device copies into pinned memory, the CPU copies on into the page cache"
            }
            Self::Direct => {
                "the device copies into pinned memory, the drive reads it (O_DIRECT, io_uring)"
            }
            Self::ThreadPool => {
                "the device copies into pinned memory, the drive reads it (O_DIRECT, threads)"
            }
        }
    }

    /// What carries the bytes out of a file, in one line.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::P2pDma => "the drive writes device memory, started by the kernel",
            Self::Nvme => "the drive writes device memory, driven from user space",
            Self::MappedPageCache => "the device reads mapped page-cache pages",
            Self::PageCache => {
                "the CPU copies from the page cache into pinned memory, the device copies on"
            }
            Self::Direct => {
                "the drive writes pinned memory (O_DIRECT, io_uring), the device copies on"
            }
            Self::ThreadPool => {
                "the drive writes pinned memory (O_DIRECT, threads), the device copies on"
            }
        }
    }
}

impl fmt::Display for StorageRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for StorageRoute {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|route| route.as_str() == text).ok_or(UnknownName)
    }
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// File to device.
    Read,
    /// Device to file.
    Write,
}

/// What kind of thing a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
    /// Anything that has no bytes at offsets: a folder, FIFO, socket, character device.
    Other,
}

/// What direct I/O needs on a file, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectIo {
    /// Both alignments in bytes, powers of two; offset alignment holds for lengths too.
    Aligned {
        /// Alignment of memory addresses.
        memory: u32,
        /// Alignment of file offsets and lengths.
        offset: u32,
    },
    /// No direct I/O, with the code and the values behind it.
    No(Code, String),
}

/// What is known of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFacts {
    /// What the path names.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Name of the file system (`ext4`, `tmpfs`, `0x…` where unknown).
    pub file_system: String,
    /// Whether the file system keeps its files in memory only.
    pub memory_backed: bool,
    /// Whether it sits on a local NVMe namespace; `None` where that is unknown.
    pub on_nvme: Option<bool>,
    /// Direct I/O.
    pub direct: DirectIo,
}

/// What is known of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Whether it is simulated.
    pub simulated: bool,
    /// Whether it can read mapped file pages (a simulated device can).
    pub reads_file_pages: bool,
    /// Whether a peer can address its memory through a BAR.
    pub has_window: bool,
}

/// Whether io_uring can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IoUring {
    /// It works.
    Yes,
    /// It does not, with the code and the values behind it.
    No(Code, String),
}

/// What is known of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// io_uring.
    pub io_uring: IoUring,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageRequest {
    /// Which way.
    pub operation: Operation,
    /// How far the plan may go.
    pub mode: Mode,
    /// One route by name, and no other.
    pub route: Option<StorageRoute>,
}

/// The routes between `file` and `device`.
pub fn storage(
    request: StorageRequest,
    file: &FileFacts,
    device: &DeviceFacts,
    host: &HostFacts,
) -> Plan<StorageRoute> {
    let mut plan = Plan { choices: Vec::new(), rejected: Vec::new() };
    for route in StorageRoute::ALL {
        let verdict = possible(route, file, device, host)
            .and_then(|why| fits_operation(route, request.operation).map(|()| why))
            .and_then(|why| asked_for(route, request).map(|()| why))
            .and_then(|why| preferred(route, request, host).map(|()| why));
        match verdict {
            Ok((level, why)) => plan.choices.push(Choice { route, level, why }),
            Err(why) => plan.rejected.push(Rejected { route, why }),
        }
    }
    say_when(&mut plan.choices, request);
    plan
}

/// Puts in the place of a plain preference what decides between the routes that are open.
fn say_when(choices: &mut [Choice<StorageRoute>], request: StorageRequest) {
    let alone = choices.len() == 1;
    for choice in choices.iter_mut().filter(|choice| choice.why.code == Code::Preferred) {
        let past_cache = matches!(choice.route, StorageRoute::Direct | StorageRoute::ThreadPool);
        choice.why.code = match request.operation {
            _ if request.route.is_some() => Code::Requested,
            _ if alone => Code::OnlyRoute,
            _ if matches!(choice.route, StorageRoute::P2pDma | StorageRoute::Nvme) => continue,
            Operation::Read if past_cache => Code::ForNotResident,
            Operation::Read => Code::ForResident,
            Operation::Write if past_cache => Code::ForNewBytes,
            Operation::Write => Code::ForEdges,
        };
    }
    if request.operation == Operation::Write {
        // Straightest first: what is written is not in the page cache. The sort is stable.
        choices.sort_by_key(|choice| choice.route == StorageRoute::PageCache);
    }
}

type Verdict = Result<(Level, Reason), Reason>;

/// Whether the machine allows the route at all.
fn possible(
    route: StorageRoute,
    file: &FileFacts,
    device: &DeviceFacts,
    host: &HostFacts,
) -> Verdict {
    if file.kind == FileKind::Other {
        return Err(Reason::new(Code::NotRegularFile));
    }
    match route {
        StorageRoute::P2pDma | StorageRoute::Nvme => Err(peer_refusal(route, file, device)),
        StorageRoute::MappedPageCache if !device.reads_file_pages => {
            Err(Reason::new(Code::DeviceCannotMap))
        }
        StorageRoute::MappedPageCache if file.size == 0 => Err(Reason::new(Code::FileEmpty)),
        StorageRoute::MappedPageCache => Ok((Level::Plausible, Reason::new(Code::Preferred))),
        StorageRoute::PageCache if file.memory_backed => {
            Ok((Level::Plausible, Reason::with(Code::MemoryBacked, file.file_system.clone())))
        }
        StorageRoute::PageCache => Ok((Level::Plausible, Reason::new(Code::Preferred))),
        StorageRoute::Direct => match (&file.direct, &host.io_uring) {
            (DirectIo::No(code, detail), _) => Err(Reason::with(*code, detail.clone())),
            (_, IoUring::No(code, detail)) => Err(Reason::with(*code, detail.clone())),
            (DirectIo::Aligned { offset, .. }, IoUring::Yes) => Ok((
                Level::Capable,
                Reason::with(Code::Preferred, format!("blocks of {offset} bytes")),
            )),
        },
        StorageRoute::ThreadPool => match &file.direct {
            DirectIo::No(code, detail) => Err(Reason::with(*code, detail.clone())),
            DirectIo::Aligned { offset, .. } => Ok((
                Level::Capable,
                Reason::with(Code::Preferred, format!("blocks of {offset} bytes")),
            )),
        },
    }
}

/// The first obstacle on a path from the drive straight into device memory.
fn peer_refusal(route: StorageRoute, file: &FileFacts, device: &DeviceFacts) -> Reason {
    if device.simulated {
        return Reason::new(Code::DeviceSimulated);
    }
    if file.on_nvme == Some(false) {
        return Reason::with(Code::FileNotOnNvme, file.file_system.clone());
    }
    if !device.has_window {
        return Reason::new(Code::DeviceNoBarWindow);
    }
    match route {
        StorageRoute::Nvme => Reason::new(Code::NoVfioNvme),
        _ => Reason::new(Code::KernelNoP2pDma),
    }
}

/// Whether the route carries bytes that way.
fn fits_operation(route: StorageRoute, operation: Operation) -> Result<(), Reason> {
    if route == StorageRoute::MappedPageCache && operation == Operation::Write {
        return Err(Reason::new(Code::MappedReadOnly));
    }
    Ok(())
}

/// Whether the caller's mode and choice allow the route.
fn asked_for(route: StorageRoute, request: StorageRequest) -> Result<(), Reason> {
    if let Some(named) = request.route {
        return if named == route {
            Ok(())
        } else {
            Err(Reason::with(Code::NotRequested, format!("only {named}")))
        };
    }
    let peer = matches!(route, StorageRoute::P2pDma | StorageRoute::Nvme);
    let plain = matches!(route, StorageRoute::PageCache | StorageRoute::ThreadPool);
    match request.mode {
        Mode::Require if !peer => Err(Reason::new(Code::RequireMode)),
        Mode::Software if !plain => Err(Reason::new(Code::SoftwareMode)),
        Mode::Require | Mode::Software | Mode::Auto => Ok(()),
    }
}

/// Whether another open route does the same better.
fn preferred(route: StorageRoute, request: StorageRequest, host: &HostFacts) -> Result<(), Reason> {
    if request.route.is_some() {
        return Ok(());
    }
    match route {
        StorageRoute::MappedPageCache => Err(Reason::new(Code::LessThroughput)),
        StorageRoute::ThreadPool if request.mode == Mode::Auto && host.io_uring == IoUring::Yes => {
            Err(Reason::new(Code::IoUringPresent))
        }
        _ => Ok(()),
    }
}

/// Where the bytes of one chunk are now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// The file system has no other place than memory.
    Memory,
    /// This many of the chunk's bytes are in the page cache.
    Cached {
        /// Bytes in the page cache.
        bytes: u64,
        /// Length of the chunk in bytes.
        of: u64,
    },
    /// The kernel does not tell.
    Unknown,
}

/// The route of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRoute {
    /// The route.
    pub route: StorageRoute,
    /// What decided it.
    pub why: Code,
}

/// Chooses among the routes that `plan` allows, by where the bytes are. `None` where it allows none.
///
/// A chunk counts as resident when at least three quarters of it are: the rest is then fetched by
/// the kernel's read-ahead for less than reading all of it from the drive would cost.
pub fn route_chunk(plan: &Plan<StorageRoute>, residency: Residency) -> Option<ChunkRoute> {
    let first = plan.choices.first()?;
    if let [only] = plan.choices.as_slice() {
        return Some(ChunkRoute { route: only.route, why: only.why.code });
    }
    if matches!(first.route, StorageRoute::P2pDma | StorageRoute::Nvme) {
        return Some(ChunkRoute { route: first.route, why: Code::Preferred });
    }
    let uncached = [StorageRoute::Direct, StorageRoute::ThreadPool]
        .into_iter()
        .find(|&route| plan.allows(route));
    let cached =
        plan.choices.iter().map(|choice| choice.route).find(|&route| Some(route) != uncached);
    let (want, why) = match residency {
        Residency::Memory => (cached, Code::MemoryBacked),
        Residency::Unknown => (cached, Code::ResidencyUnknown),
        Residency::Cached { bytes, of } if bytes >= of - of / 4 => (cached, Code::Resident),
        Residency::Cached { .. } => (uncached, Code::NotResident),
    };
    Some(match want {
        Some(route) => ChunkRoute { route, why },
        None => ChunkRoute { route: first.route, why: Code::OnlyRoute },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;

    fn file() -> FileFacts {
        FileFacts {
            kind: FileKind::Regular,
            size: 1 << 30,
            file_system: "ext4".to_string(),
            memory_backed: false,
            on_nvme: None,
            direct: DirectIo::Aligned { memory: 512, offset: 512 },
        }
    }

    fn tmpfs() -> FileFacts {
        FileFacts {
            file_system: "tmpfs".to_string(),
            memory_backed: true,
            direct: DirectIo::No(Code::DirectNotHonoured, "tmpfs".to_string()),
            ..file()
        }
    }

    fn sim() -> DeviceFacts {
        DeviceFacts { simulated: true, reads_file_pages: true, has_window: false }
    }

    fn host(works: bool) -> HostFacts {
        let io_uring = if works {
            IoUring::Yes
        } else {
            IoUring::No(Code::IoUringDenied, "EPERM".to_string())
        };
        HostFacts { io_uring }
    }

    fn ask(mode: Mode, route: Option<StorageRoute>) -> StorageRequest {
        StorageRequest { operation: Operation::Read, mode, route }
    }

    #[test]
    fn the_same_facts_give_these_routes() {
        use StorageRoute::{Direct, MappedPageCache, PageCache, ThreadPool};
        let folder = FileFacts { kind: FileKind::Other, ..file() };
        let cases = [
            (ask(Mode::Auto, None), file(), true, vec![PageCache, Direct]),
            (ask(Mode::Auto, None), file(), false, vec![PageCache, ThreadPool]),
            (ask(Mode::Auto, None), tmpfs(), true, vec![PageCache]),
            (ask(Mode::Software, None), file(), true, vec![PageCache, ThreadPool]),
            (ask(Mode::Require, None), file(), true, vec![]),
            (ask(Mode::Require, Some(Direct)), file(), true, vec![Direct]),
            (ask(Mode::Require, Some(Direct)), tmpfs(), true, vec![]),
            (ask(Mode::Require, Some(Direct)), file(), false, vec![]),
            (ask(Mode::Auto, Some(MappedPageCache)), file(), true, vec![MappedPageCache]),
            (ask(Mode::Auto, Some(ThreadPool)), file(), true, vec![ThreadPool]),
            (ask(Mode::Auto, None), folder, true, vec![]),
        ];
        for (request, file, works, expected) in cases {
            let plan = storage(request, &file, &sim(), &host(works));
            let routes: Vec<_> = plan.choices.iter().map(|choice| choice.route).collect();
            assert_eq!(routes, expected, "{request:?} {}", file.file_system);
            assert_eq!(
                plan.choices.len() + plan.rejected.len(),
                StorageRoute::ALL.len(),
                "every route is either allowed or refused with a reason"
            );
        }
    }

    #[test]
    fn each_place_has_its_reason() {
        let codes = |request: StorageRequest, file: &FileFacts| -> Vec<Code> {
            let plan = storage(request, file, &sim(), &host(true));
            plan.choices.iter().map(|choice| choice.why.code).collect()
        };
        let read = ask(Mode::Auto, None);
        let write = StorageRequest { operation: Operation::Write, ..read };
        let named = ask(Mode::Auto, Some(StorageRoute::Direct));
        assert_eq!(codes(read, &file()), [Code::ForResident, Code::ForNotResident]);
        assert_eq!(codes(write, &file()), [Code::ForNewBytes, Code::ForEdges]);
        assert_eq!(codes(named, &file()), [Code::Requested]);
        assert_eq!(codes(read, &tmpfs()), [Code::MemoryBacked]);
    }

    #[test]
    fn each_refusal_names_its_cause() {
        let plan = storage(ask(Mode::Auto, None), &tmpfs(), &sim(), &host(false));
        assert_eq!(plan.rejection(StorageRoute::P2pDma).unwrap().code, Code::DeviceSimulated);
        assert_eq!(plan.rejection(StorageRoute::Direct).unwrap().code, Code::DirectNotHonoured);
        let gpu = DeviceFacts { simulated: false, reads_file_pages: false, has_window: true };
        let plan = storage(ask(Mode::Auto, None), &file(), &gpu, &host(false));
        assert_eq!(plan.rejection(StorageRoute::P2pDma).unwrap().code, Code::KernelNoP2pDma);
        assert_eq!(plan.rejection(StorageRoute::Nvme).unwrap().code, Code::NoVfioNvme);
        assert_eq!(plan.rejection(StorageRoute::Direct).unwrap().code, Code::IoUringDenied);
        assert_eq!(
            plan.rejection(StorageRoute::MappedPageCache).unwrap().code,
            Code::DeviceCannotMap
        );
    }

    #[test]
    fn each_choice_says_what_it_is_for() {
        use StorageRoute::{Direct, PageCache, ThreadPool};
        let write = |request| StorageRequest { operation: Operation::Write, ..request };
        let (auto, named) = (ask(Mode::Auto, None), ask(Mode::Auto, Some(Direct)));
        let software = ask(Mode::Software, None);
        let cases = [
            (auto, file(), vec![(PageCache, Code::ForResident), (Direct, Code::ForNotResident)]),
            (write(auto), file(), vec![(Direct, Code::ForNewBytes), (PageCache, Code::ForEdges)]),
            (
                write(software),
                file(),
                vec![(ThreadPool, Code::ForNewBytes), (PageCache, Code::ForEdges)],
            ),
            (named, file(), vec![(Direct, Code::Requested)]),
            (auto, tmpfs(), vec![(PageCache, Code::MemoryBacked)]),
        ];
        for (request, file, expected) in cases {
            let plan = storage(request, &file, &sim(), &host(true));
            let found: Vec<_> = plan.choices.iter().map(|c| (c.route, c.why.code)).collect();
            assert_eq!(found, expected, "{request:?}");
        }
    }

    #[test]
    fn nothing_is_written_through_mapped_pages() {
        let named = Some(StorageRoute::MappedPageCache);
        let write = StorageRequest { operation: Operation::Write, ..ask(Mode::Auto, named) };
        let plan = storage(write, &file(), &sim(), &host(true));
        assert!(plan.choices.is_empty());
        let why = plan.rejection(StorageRoute::MappedPageCache).unwrap();
        assert_eq!(why.code, Code::MappedReadOnly);
    }

    #[test]
    fn chunks_follow_their_bytes() {
        use StorageRoute::{Direct, PageCache, ThreadPool};
        let both = storage(ask(Mode::Auto, None), &file(), &sim(), &host(true));
        let threads = storage(ask(Mode::Auto, None), &file(), &sim(), &host(false));
        let cached = storage(ask(Mode::Auto, None), &tmpfs(), &sim(), &host(true));
        let of = 4096;
        let cases = [
            (&both, Residency::Cached { bytes: of, of }, PageCache, Code::Resident),
            (&both, Residency::Cached { bytes: 3072, of }, PageCache, Code::Resident),
            (&both, Residency::Cached { bytes: 3071, of }, Direct, Code::NotResident),
            (&both, Residency::Cached { bytes: 0, of }, Direct, Code::NotResident),
            (&both, Residency::Unknown, PageCache, Code::ResidencyUnknown),
            (&threads, Residency::Cached { bytes: 0, of }, ThreadPool, Code::NotResident),
            (&cached, Residency::Cached { bytes: 0, of }, PageCache, Code::MemoryBacked),
        ];
        for (plan, residency, route, why) in cases {
            assert_eq!(route_chunk(plan, residency), Some(ChunkRoute { route, why }));
        }
        let none = storage(ask(Mode::Require, None), &file(), &sim(), &host(true));
        assert_eq!(route_chunk(&none, Residency::Memory), None);
    }

    #[test]
    fn names_round_trip() {
        for route in StorageRoute::ALL {
            assert_eq!(route.as_str().parse(), Ok(route));
        }
        for mode in Mode::ALL {
            assert_eq!(mode.as_str().parse(), Ok(mode));
        }
        assert_eq!("Direct".parse::<StorageRoute>(), Err(UnknownName));
    }
}
