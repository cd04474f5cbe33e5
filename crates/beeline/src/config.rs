//! Every setting, its default, and the only place that reads the environment.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use crate::lock;

/// Bytes of one slot of the pinned pool, and so of the largest single read or copy.
///
/// Large enough that the cost of a system call and a copy start vanishes beside the bytes, small
/// enough that 64 of them fit the default pool.
pub const SLOT_BYTES: u64 = 4 << 20;

/// Settings of an engine. `Config::default()` suits a machine that loads models;
/// [`Config::from_env`] lets the environment override single values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// Most bytes of pinned host memory in use at once, for the whole process. Callers wait for room,
    /// they never fail for it. Rounded up to whole slots, at least two.
    pub pool_bytes: u64,
    /// Threads that read, write and start copies, 1 to 256; an engine takes the nearest of these.
    pub threads: usize,
    /// Bytes of one read and one copy, 64 KiB to [`SLOT_BYTES`], rounded down to a power of two. Smaller
    /// ones stay in the processor's cache between the two, larger ones cost fewer calls.
    pub chunk_bytes: u64,
    /// Direct reads in flight over all threads, 1 to 1024; an engine takes the nearest of these.
    pub queue_depth: usize,
    /// Where no deadline is given: how long a transfer may go without finishing a single piece.
    pub stall_timeout: Duration,
    /// Whether io_uring may be used.
    pub io_uring: bool,
}

/// The pool of [`Config::default`]: 256 MiB.
pub const DEFAULT_POOL_BYTES: u64 = 256 << 20;

impl Default for Config {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            pool_bytes: DEFAULT_POOL_BYTES,
            // Measured on 16 cores beside an H200: 10 to 12 readers fill the link, 16 cost more CPU time
            // and move less (docs/benchmarks.md).
            threads: cpus.clamp(2, 12),
            chunk_bytes: SLOT_BYTES,
            queue_depth: 32,
            stall_timeout: Duration::from_secs(60),
            io_uring: true,
        }
    }
}

impl Config {
    /// The defaults, overridden by `BEELINE_POOL_BYTES`, `BEELINE_THREADS`, `BEELINE_CHUNK_BYTES`,
    /// `BEELINE_QUEUE_DEPTH`, `BEELINE_STALL_SECONDS` (1 to 86400) and `BEELINE_IO_URING` (0 or 1). A number
    /// out of bounds stands for the nearest within; a value that is not a number is left out. Both are said once
    /// ([`env_problems`]).
    pub fn from_env() -> Self {
        let default = Self::default();
        Self {
            pool_bytes: number("BEELINE_POOL_BYTES").unwrap_or(default.pool_bytes),
            threads: number("BEELINE_THREADS").map_or(default.threads, count),
            chunk_bytes: number("BEELINE_CHUNK_BYTES").unwrap_or(default.chunk_bytes),
            queue_depth: number("BEELINE_QUEUE_DEPTH").map_or(default.queue_depth, count),
            stall_timeout: number("BEELINE_STALL_SECONDS")
                .map_or(default.stall_timeout, Duration::from_secs),
            io_uring: number("BEELINE_IO_URING").is_none_or(|n| n != 0),
        }
        .bounded()
    }

    /// The same with every value inside the bounds that its field names.
    pub(crate) fn bounded(self) -> Self {
        Self {
            threads: self.threads.clamp(1, 256),
            chunk_bytes: 1 << self.chunk_bytes.clamp(64 << 10, SLOT_BYTES).ilog2(),
            queue_depth: self.queue_depth.clamp(1, 1024),
            ..self
        }
    }

    /// Slots in the pinned pool.
    pub fn slots(&self) -> usize {
        usize::try_from(self.pool_bytes.div_ceil(SLOT_BYTES)).unwrap_or(usize::MAX).max(2)
    }
}

/// Staging memory of a link between two processes of a host, for device memory that is not passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StageConfig {
    /// Slots for long copies, 2 to 64: how many are under way in one direction.
    pub slots: u64,
    /// Bytes of a slot, 256 KiB to 4 MiB, rounded down to a power of two: the longest copy.
    pub slot_bytes: u64,
}

impl Default for StageConfig {
    fn default() -> Self {
        Self { slots: 8, slot_bytes: 2 << 20 }
    }
}

impl StageConfig {
    /// The defaults, overridden by `BEELINE_STAGE_SLOTS` and `BEELINE_STAGE_SLOT_BYTES`; what is out of bounds
    /// stands for the nearest within, and is said once ([`env_problems`]).
    pub fn from_env() -> Self {
        let default = Self::default();
        Self {
            slots: number("BEELINE_STAGE_SLOTS").unwrap_or(default.slots),
            slot_bytes: number("BEELINE_STAGE_SLOT_BYTES").unwrap_or(default.slot_bytes),
        }
    }
}

/// What the simulated GPUs of this process look like.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimConfig {
    /// How many there are.
    pub devices: u32,
    /// Device memory of each in bytes.
    pub memory_bytes: u64,
    /// What they let a process see of their memory.
    pub profile: crate::gpu::Profile,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self { devices: 1, memory_bytes: 16 << 30, profile: crate::gpu::Profile::Plain }
    }
}

impl SimConfig {
    /// The defaults, overridden by `BEELINE_SIM_DEVICES`, `BEELINE_SIM_MEMORY` (bytes per device) and
    /// `BEELINE_SIM_PROFILE` (`plain`, `bar`, `movable`).
    pub fn from_env() -> Self {
        let default = Self::default();
        Self {
            devices: number("BEELINE_SIM_DEVICES")
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(default.devices),
            memory_bytes: number("BEELINE_SIM_MEMORY").unwrap_or(default.memory_bytes),
            profile: text("BEELINE_SIM_PROFILE")
                .and_then(|value| value.parse().ok())
                .unwrap_or(default.profile),
        }
    }
}

/// Where the CUDA driver is found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaConfig {
    /// The driver library; `None` looks for `libcuda.so.1` as the loader does.
    pub library: Option<PathBuf>,
    /// What `CUDA_VISIBLE_DEVICES` says, which the driver obeys; for messages.
    pub visible_devices: Option<String>,
}

impl CudaConfig {
    /// The defaults, overridden by `BEELINE_CUDA_LIBRARY` (a path; for tests). Also notes
    /// `CUDA_VISIBLE_DEVICES`.
    pub fn from_env() -> Self {
        let library = std::env::var_os("BEELINE_CUDA_LIBRARY").filter(|path| !path.is_empty());
        Self { library: library.map(PathBuf::from), visible_devices: text("CUDA_VISIBLE_DEVICES") }
    }
}

/// What tells this host from others, where `BEELINE_HOST_ID` says it; otherwise the kernel's boot identifier does.
pub(crate) fn host_id() -> Option<String> {
    text("BEELINE_HOST_ID").filter(|id| !id.is_empty())
}

/// What `torchrun` (and everything that follows it) tells a process of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaunchConfig {
    /// Number of this process among all, from 0.
    pub rank: u32,
    /// How many processes there are.
    pub ranks: u32,
    /// Number among those of this host: the device to take.
    pub local_rank: u32,
    /// Host name or address of rank 0.
    pub address: String,
    /// The port of the launcher's own store; communicators listen on the next one.
    pub port: u16,
    /// Name of the job, which all its processes know.
    pub job: String,
}

impl LaunchConfig {
    /// Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK` (the rank where it is absent), `MASTER_ADDR`, `MASTER_PORT` and
    /// `TORCHELASTIC_RUN_ID`, and takes `BEELINE_COMM_SECRET` into the job's name. `None` where one of the first
    /// is missing or no number.
    pub fn from_env() -> Option<Self> {
        let number = |name| text(name)?.trim().parse::<u32>().ok();
        let rank = number("RANK")?;
        let job = text("TORCHELASTIC_RUN_ID").unwrap_or_default();
        Some(Self {
            rank,
            ranks: number("WORLD_SIZE").filter(|ranks| rank < *ranks)?,
            local_rank: number("LOCAL_RANK").unwrap_or(rank),
            address: text("MASTER_ADDR")?,
            port: text("MASTER_PORT")?.trim().parse().ok()?,
            job: job + &text("BEELINE_COMM_SECRET").unwrap_or_default(),
        })
    }
}

/// Choices for communicators: `BEELINE_COMM_TIMEOUT` (seconds until a missing rank is an error),
/// `BEELINE_COMM_PATH` (`auto`, `staged`), `BEELINE_COMM_CHUNK_BYTES`.
pub(crate) fn comm_seconds() -> Option<u64> {
    number("BEELINE_COMM_TIMEOUT")
}

/// Whether every communicator goes through host memory (`BEELINE_COMM_PATH=staged`).
pub(crate) fn comm_staged() -> bool {
    text("BEELINE_COMM_PATH").is_some_and(|path| path == "staged")
}

/// What `BEELINE_LOG` says, else `NCCL_DEBUG`: how much a `libnccl.so.2` tells.
pub fn comm_log() -> Option<String> {
    text("BEELINE_LOG").or_else(|| text("NCCL_DEBUG")).filter(|level| !level.is_empty())
}

/// Whether kernels of collectives may start before what was queued before them has ended (`BEELINE_COMM_EARLY=0`: no).
pub(crate) fn comm_early() -> bool {
    number("BEELINE_COMM_EARLY") != Some(0)
}

/// Whether large parts go straight into registered memory of other ranks (`BEELINE_COMM_STRAIGHT=1`).
pub(crate) fn comm_straight() -> bool {
    number("BEELINE_COMM_STRAIGHT").is_some_and(|value| value != 0)
}

/// Bytes of shared memory of a rank on the staged path.
pub(crate) fn comm_chunk_bytes() -> Option<u64> {
    number("BEELINE_COMM_CHUNK_BYTES")
}

/// From how many bytes on copies carry what is only moved.
pub(crate) fn comm_copy_engine_bytes() -> Option<u64> {
    number("BEELINE_COMM_COPY_ENGINE_BYTES")
}

/// How a thread waits for a copy of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// It asks the driver for the stream: as fast as an event on an H200, with fewer calls.
    #[default]
    Driver,
    /// It looks at a word of memory that the stream writes.
    Word,
    /// It asks for an event.
    Event,
}

/// Settings of the cuFile library (`beeline::cufile`) that come from the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CufileConfig {
    /// How a thread waits for copies.
    pub waiting: Waiting,
    /// The file of settings.
    pub json: Option<PathBuf>,
    /// Every variable that starts with `CUFILE_`.
    pub env: std::collections::BTreeMap<String, String>,
    /// The version to report, as `1000 * major + 10 * minor`; 1200 where nothing is said.
    pub version: Option<u32>,
    /// What `BEELINE_LOG` says: `error`, `warn`, `info` or `debug`.
    pub log: Option<String>,
    /// Where statistics are left for `beeline cufile stats`.
    pub stats_folder: Option<PathBuf>,
}

impl CufileConfig {
    /// Reads `CUFILE_*`, `BEELINE_LOG`, `BEELINE_CUFILE_WAIT` (`driver`, `word`, `event`),
    /// `BEELINE_CUFILE_VERSION` and `BEELINE_CUFILE_STATS` (a folder).
    pub fn from_env() -> Self {
        let all = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| name.starts_with("CUFILE_"))?;
            Some((name, value.to_string_lossy().into_owned()))
        });
        let path = |name: &str| std::env::var_os(name).filter(|p| !p.is_empty()).map(PathBuf::from);
        let usual = PathBuf::from("/etc/cufile.json");
        Self {
            waiting: match text("BEELINE_CUFILE_WAIT").as_deref() {
                Some("word") => Waiting::Word,
                Some("event") => Waiting::Event,
                _ => Waiting::Driver,
            },
            json: path("CUFILE_ENV_PATH_JSON").or_else(|| usual.is_file().then_some(usual)),
            env: all.collect(),
            version: number("BEELINE_CUFILE_VERSION").and_then(|n| u32::try_from(n).ok()),
            log: text("BEELINE_LOG"),
            stats_folder: path("BEELINE_CUFILE_STATS"),
        }
    }
}

/// A variable with a number.
struct Number {
    name: &'static str,
    least: u64,
    most: u64,
    rounded: Rounded,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounded {
    No,
    /// Down to a power of two.
    PowerOfTwo,
    /// Up to whole pages of 4 KiB.
    Pages,
}

/// Every variable with a number, and what it may be.
const NUMBERS: &[Number] = &[
    Number::from("BEELINE_POOL_BYTES", 2 * SLOT_BYTES),
    Number::within("BEELINE_THREADS", 1, 256),
    Number::within("BEELINE_CHUNK_BYTES", 64 << 10, SLOT_BYTES).rounded(Rounded::PowerOfTwo),
    Number::within("BEELINE_QUEUE_DEPTH", 1, 1024),
    Number::within("BEELINE_STALL_SECONDS", 1, 86_400),
    Number::within("BEELINE_STAGE_SLOTS", 2, 64),
    Number::within("BEELINE_STAGE_SLOT_BYTES", 256 << 10, 4 << 20).rounded(Rounded::PowerOfTwo),
    Number::within("BEELINE_IO_URING", 0, 1),
    Number::within("BEELINE_CUFILE_VERSION", 0, u32::MAX as u64),
    Number::within("BEELINE_SIM_DEVICES", 1, 64),
    Number::from("BEELINE_SIM_MEMORY", 0),
    Number::within("BEELINE_COMM_TIMEOUT", 1, 86_400),
    Number::within("BEELINE_COMM_EARLY", 0, 1),
    Number::within("BEELINE_COMM_STRAIGHT", 0, 1),
    Number::from("BEELINE_COMM_COPY_ENGINE_BYTES", 0),
    Number::within("BEELINE_COMM_CHUNK_BYTES", 64 << 10, 16 << 20).rounded(Rounded::Pages),
];

impl Number {
    const fn within(name: &'static str, least: u64, most: u64) -> Self {
        Self { name, least, most, rounded: Rounded::No }
    }

    const fn from(name: &'static str, least: u64) -> Self {
        Self::within(name, least, u64::MAX)
    }

    const fn rounded(self, rounded: Rounded) -> Self {
        Self { rounded, ..self }
    }

    /// What is used for `text` (`None`: the default), and what is to be said about it.
    fn judge(&self, text: &str) -> (Option<u64>, Option<String>) {
        let Self { name, least, most, rounded } = self;
        let Some(given) = parse_bytes(text) else {
            let problem = format!("{name}={text} is no value of that setting; its default is used");
            return (None, Some(problem));
        };
        let within = given.clamp(*least, *most);
        let (used, what) = match rounded {
            Rounded::No => (within, ""),
            Rounded::PowerOfTwo => (1 << within.max(1).ilog2(), ", a power of two"),
            Rounded::Pages => (within.next_multiple_of(4096), ", a multiple of 4096"),
        };
        let range = match most {
            &u64::MAX => format!("at least {least}"),
            _ => format!("from {least} to {most}"),
        };
        let problem = || format!("{name}={text} has to be {range}{what}; {used} is used");
        (Some(used), (used != given).then(problem))
    }
}

/// What is wrong with the variables this library reads, one sentence each: a value that is none and what is used instead, a
/// number out of its bounds, the bounds, and the number that is used. Each is also told once to who listens to this
/// library's messages, when the variable is first read.
pub fn env_problems() -> Vec<String> {
    const WORDS: &[(&str, &[&str])] = &[
        ("BEELINE_COMM_PATH", &["auto", "staged"]),
        ("BEELINE_CUFILE_WAIT", &["driver", "word", "event"]),
    ];
    let numbers = NUMBERS.iter().filter_map(|one| one.judge(&text(one.name)?).1);
    let none = |name: &str, value: &str| {
        format!("{name}={value} is no value of that setting; its default is used")
    };
    let words = WORDS.iter().filter_map(|(name, known)| {
        text(name).filter(|word| !known.contains(&word.as_str())).map(|word| none(name, &word))
    });
    let profile = text("BEELINE_SIM_PROFILE")
        .filter(|value| value.parse::<crate::gpu::Profile>().is_err())
        .map(|value| none("BEELINE_SIM_PROFILE", &value));
    numbers.chain(words).chain(profile).collect()
}

/// What is not UTF-8 in a value becomes U+FFFD, so that it is no number and is complained about.
fn text(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The number of a variable, inside its bounds.
fn number(name: &'static str) -> Option<u64> {
    static SAID: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());

    let value = text(name)?;
    let Some(known) = NUMBERS.iter().find(|one| one.name == name) else {
        return parse_bytes(&value);
    };
    let (used, problem) = known.judge(&value);
    if let Some(problem) = problem
        && lock(&SAID).insert(name)
    {
        tracing::warn!("{problem}");
    }
    used
}

fn count(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// A number of bytes: digits, with an optional `K`, `M`, `G` or `T` (powers of 1024, `KiB` allowed).
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units_and_refuse_the_rest() {
        let cases = [
            ("0", Some(0)),
            ("4096", Some(4096)),
            ("64M", Some(64 << 20)),
            (" 2 GiB ", Some(2 << 30)),
            ("1kib", Some(1024)),
            ("", None),
            ("-1", None),
            ("1.5G", None),
            ("99999999999T", None),
            ("12 parsecs", None),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_bytes(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_number_out_of_bounds_is_named_with_what_is_used() {
        let cases = [
            ("BEELINE_THREADS", "12", Some(12), ""),
            ("BEELINE_THREADS", "0", Some(1), "THREADS=0 has to be from 1 to 256; 1 is used"),
            (
                "BEELINE_THREADS",
                "300",
                Some(256),
                "THREADS=300 has to be from 1 to 256; 256 is used",
            ),
            ("BEELINE_THREADS", "many", None, "THREADS=many is no value of that setting"),
            ("BEELINE_CHUNK_BYTES", "64K", Some(64 << 10), ""),
            (
                "BEELINE_CHUNK_BYTES",
                "100K",
                Some(64 << 10),
                "=100K has to be from 65536 to 4194304, a power of two; 65536 is used",
            ),
            ("BEELINE_CHUNK_BYTES", "1G", Some(SLOT_BYTES), "; 4194304 is used"),
            (
                "BEELINE_POOL_BYTES",
                "1",
                Some(2 * SLOT_BYTES),
                "has to be at least 8388608; 8388608",
            ),
            ("BEELINE_POOL_BYTES", "99T", Some(99 << 40), ""),
            (
                "BEELINE_COMM_CHUNK_BYTES",
                "65537",
                Some(69_632),
                "a multiple of 4096; 69632 is used",
            ),
            ("BEELINE_COMM_EARLY", "2", Some(1), "from 0 to 1; 1 is used"),
            ("BEELINE_STALL_SECONDS", "0", Some(1), "from 1 to 86400; 1 is used"),
        ];
        for (name, text, used, problem) in cases {
            let known = NUMBERS.iter().find(|one| one.name == name).unwrap();
            let (found, said) = known.judge(text);
            assert_eq!(found, used, "{name}={text}");
            let said = said.unwrap_or_default();
            assert!(said.contains(problem) && said.is_empty() == problem.is_empty(), "{said}");
        }
        for one in NUMBERS {
            // Both ends stand as they are.
            for end in [one.least, one.most] {
                assert_eq!(one.judge(&end.to_string()), (Some(end), None), "{}", one.name);
            }
        }
    }

    #[test]
    fn an_engine_keeps_its_bounds_whatever_it_is_told() {
        let config = |n: u64| Config {
            threads: count(n),
            chunk_bytes: n,
            queue_depth: count(n),
            ..Config::default()
        };
        let cases = [
            (0, (1, 64 << 10, 1)),
            (100 << 10, (256, 64 << 10, 1024)),
            (u64::MAX, (256, SLOT_BYTES, 1024)),
        ];
        for (n, expected) in cases {
            let bounded = config(n).bounded();
            let found = (bounded.threads, bounded.chunk_bytes, bounded.queue_depth);
            assert_eq!(found, expected, "{n}");
        }
        assert_eq!(Config::default().bounded(), Config::default());
    }

    #[test]
    fn a_pool_has_at_least_two_slots() {
        let config = Config { pool_bytes: 1, ..Config::default() };
        assert_eq!(config.slots(), 2);
        assert_eq!(Config::default().slots(), 64);
    }
}
