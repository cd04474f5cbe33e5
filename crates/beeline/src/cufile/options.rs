//! Parameters: their numbers, bounds, defaults, names in cufile.json and in the environment.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::status::{Failure, OpError, Outcome};

/// A parameter that is a number (`CUFileSizeTConfigParameter_t` by position).
struct Size {
    key: &'static str,
    env: &'static str,
    min: u64,
    max: u64,
    default: u64,
}

const fn size(key: &'static str, env: &'static str, (min, max): (u64, u64), default: u64) -> Size {
    Size { key, env, min, max, default }
}

const KB_MAX: u64 = 268_435_456;

const SIZES: [Size; 12] = [
    size("profile.cufile_stats", "CUFILE_STATS_LEVEL", (0, 3), 0),
    size("execution.max_io_queue_depth", "", (1, 256), 128),
    size("execution.max_io_threads", "", (0, 128), 8),
    size("execution.min_io_threshold_size_kb", "", (4, 4_294_967_295), 1024),
    size("execution.max_request_parallelism", "", (0, 8), 8),
    size("properties.max_direct_io_size_kb", "", (64, 16_384), 16_384),
    size(
        "properties.max_device_cache_size_kb",
        "CUFILE_MAX_DEVICE_CACHE_SIZE",
        (0, KB_MAX),
        131_072,
    ),
    size("properties.per_buffer_cache_size_kb", "CUFILE_PER_BUFFER_CACHE_SIZE", (64, 16_384), 1024),
    size("properties.max_device_pinned_mem_size_kb", "", (64, KB_MAX), 33_554_432),
    size("properties.io_batchsize", "", (1, 256), 128),
    size("properties.poll_mode_max_size_kb", "", (4, 18_014_398_509_481_980), 4),
    size("properties.max_batch_io_timeout_msecs", "", (1, 1000), 5),
];

const BOOLS: [(&str, &str, bool); 14] = [
    ("properties.use_poll_mode", "", false),
    ("properties.allow_compat_mode", "CUFILE_ALLOW_COMPAT_MODE", true),
    ("properties.force_compat_mode", "CUFILE_FORCE_COMPAT_MODE", false),
    ("miscellaneous.api_check_aggressive", "", false),
    ("execution.parallel_io", "", true),
    ("profile.nvtx", "", false),
    ("properties.allow_system_memory", "", true),
    ("properties.use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA", false),
    ("properties.prefer_iouring", "", false),
    ("properties.force_odirect_mode", "", false),
    ("miscellaneous.skip_topology_detection", "CUFILE_SKIP_TOPOLOGY_DETECTION", false),
    ("miscellaneous.stream_memops_bypass", "CUFILE_STREAM_MEMOPS_BYPASS", false),
    ("properties.vanilla_posix_io_mode", "", false),
    ("properties.gds_fallback_io", "", false),
];

const STRINGS: [(&str, &str, &str); 4] = [
    ("logging.level", "CUFILE_LOGGING_LEVEL", "ERROR"),
    ("", "CUFILE_LOGFILE_PATH", ""),
    ("logging.dir", "", ""),
    ("properties.rdma_transport", "", "DC_V1"),
];

const LEVELS: [&str; 8] = ["OFF", "FATAL", "ERROR", "WARN", "NOTICE", "INFO", "DEBUG", "TRACE"];

/// What versions of the file have and what means nothing here: the way of the bytes is another.
const KNOWN_PREFIXES: [&str; 11] = [
    "logging.max_file_size_mb",
    "properties.posix_pool_slab_",
    "properties.gpu_bounce_buffer_",
    "properties.rdma_",
    "properties.gds_",
    "properties.io_priority",
    "properties.compat_odirect_",
    "fs.",
    "denylist.",
    "miscellaneous.",
    "sparse.",
];

/// Numbers of [`Options::size`] that this library itself asks for.
pub(super) const STATS: usize = 0;
pub(super) const THREADS: usize = 2;
pub(super) const PARALLELISM: usize = 4;
pub(super) const DIRECT_KB: usize = 5;
pub(super) const CACHE_KB: usize = 6;
pub(super) const PER_BUFFER_KB: usize = 7;
pub(super) const PINNED_KB: usize = 8;
pub(super) const BATCH: usize = 9;
pub(super) const POLL_KB: usize = 10;
pub(super) const BATCH_MS: usize = 11;
pub(super) const POLL_MODE: usize = 0;
pub(super) const ALLOW_COMPAT: usize = 1;
pub(super) const PARALLEL: usize = 4;
pub(super) const FORCE_DIRECT: usize = 9;
pub(super) const MEMOPS_BYPASS: usize = 11;
pub(super) const LOG_LEVEL: usize = 0;
pub(super) const LOG_FILE: usize = 1;

/// Slab classes of the staging pools, as they are reported: sizes in KiB and counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slabs {
    pub(super) sizes_kb: Vec<u64>,
    pub(super) counts: Vec<u64>,
}

/// Their keys in the file.
const SLAB_SIZES: &str = "properties.posix_pool_slab_size_kb";
const SLAB_COUNTS: &str = "properties.posix_pool_slab_count";
/// Most slab classes.
const SLABS_MAX: usize = 16;

/// All parameters with their values.
#[derive(Clone, Debug)]
pub struct Options {
    sizes: [u64; SIZES.len()],
    bools: [bool; BOOLS.len()],
    strings: [String; STRINGS.len()],
    pub(super) posix_slabs: Slabs,
    pub(super) gpu_slabs: Slabs,
    /// What was found in the file or the environment and is not used, for the log.
    pub problems: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        let slabs = Slabs { sizes_kb: vec![4, 1024, 16_384], counts: vec![128, 64, 64] };
        Self {
            sizes: SIZES.map(|size| size.default),
            bools: BOOLS.map(|(_, _, default)| default),
            strings: STRINGS.map(|(_, _, default)| default.to_owned()),
            posix_slabs: slabs.clone(),
            gpu_slabs: slabs,
            problems: Vec::new(),
        }
    }
}

fn unknown(kind: &str, number: i32) -> Failure {
    Failure::value(format!("there is no {kind} parameter {number}"))
}

fn index(kind: &str, number: i32, count: usize) -> Outcome<usize> {
    usize::try_from(number).ok().filter(|n| *n < count).ok_or_else(|| unknown(kind, number))
}

impl Options {
    /// The defaults, then the file, then the environment.
    ///
    /// # Errors
    /// `INVALID_VALUE` where the file is there and is no JSON object.
    pub(super) fn load(file: Option<&Path>, env: &BTreeMap<String, String>) -> Outcome<Self> {
        let mut options = Self::default();
        if let Some(path) = file {
            match std::fs::read_to_string(path) {
                Ok(text) => {
                    options.read_file(path, &text)?;
                    options.check_slabs();
                }
                Err(error) => options.problems.push(format!("{}: {error}", path.display())),
            }
        }
        options.read_env(env);
        Ok(options)
    }

    fn read_file(&mut self, path: &Path, text: &str) -> Outcome<()> {
        let bare = beeline_core::facts::strip_comments(text);
        let value: Value = serde_json::from_str(&bare)
            .map_err(|error| Failure::value(format!("{}: {error}", path.display())))?;
        let Value::Object(sections) = value else {
            return Err(Failure::value(format!("{}: no JSON object", path.display())));
        };
        for (section, value) in sections {
            let Value::Object(keys) = value else {
                self.problems.push(format!("'{section}' is no section"));
                continue;
            };
            for (key, value) in keys {
                self.take(&format!("{section}.{key}"), &value);
            }
        }
        Ok(())
    }

    /// Sizes and counts come one after the other, so they are looked at together in the end.
    fn check_slabs(&mut self) {
        let slabs = self.posix_slabs.clone();
        if let Err(failure) = Slabs::new(slabs.sizes_kb, slabs.counts) {
            self.problems.push(format!(
                "{SLAB_SIZES}, {SLAB_COUNTS}: {}; the defaults are used",
                failure.text
            ));
            self.posix_slabs = Self::default().posix_slabs;
        }
    }

    fn take(&mut self, key: &str, value: &Value) {
        if let Some(at) = SIZES.iter().position(|size| size.key == key) {
            let number = value.as_u64().or_else(|| value.as_bool().map(u64::from));
            let set = number.map(|number| self.set_size_at(at, number));
            if !matches!(set, Some(Ok(()))) {
                self.problems
                    .push(format!("{key} = {value} is out of bounds; its default is used"));
            }
        } else if let Some(at) = BOOLS.iter().position(|(name, ..)| *name == key) {
            match (value.as_bool(), self.bools.get_mut(at)) {
                (Some(value), Some(place)) => *place = value,
                _ => self.problems.push(format!("{key} = {value} is neither true nor false")),
            }
        } else if let Some(at) = STRINGS.iter().position(|(name, ..)| *name == key) {
            if let (Some(text), Some(place)) = (value.as_str(), self.strings.get_mut(at)) {
                text.clone_into(place);
            }
        } else if key == SLAB_SIZES || key == SLAB_COUNTS {
            let slabs = &mut self.posix_slabs;
            let place = if key == SLAB_SIZES { &mut slabs.sizes_kb } else { &mut slabs.counts };
            match numbers(value) {
                Some(list) => *place = list,
                None => self.problems.push(format!(
                    "{key} = {value} is no list of up to {SLABS_MAX} numbers; the default is used"
                )),
            }
        } else if !KNOWN_PREFIXES.iter().any(|prefix| key.starts_with(prefix)) {
            self.problems.push(format!("{key} is not a setting that is known here"));
        }
    }

    fn read_env(&mut self, env: &BTreeMap<String, String>) {
        for (at, size) in SIZES.iter().enumerate() {
            let Some(text) = env.get(size.env).filter(|_| !size.env.is_empty()) else { continue };
            let set = text.trim().parse().ok().map(|number| self.set_size_at(at, number));
            if !matches!(set, Some(Ok(()))) {
                self.problems.push(format!("{}={text} is out of bounds", size.env));
            }
        }
        for (at, (_, name, _)) in BOOLS.iter().enumerate() {
            let Some(text) = env.get(*name).filter(|_| !name.is_empty()) else { continue };
            match (truth(text), self.bools.get_mut(at)) {
                (Some(value), Some(place)) => *place = value,
                _ => self.problems.push(format!("{name}={text} is neither true nor false")),
            }
        }
        for (at, (_, name, _)) in STRINGS.iter().enumerate() {
            let Some(text) = env.get(*name).filter(|_| !name.is_empty()) else { continue };
            if let Some(place) = self.strings.get_mut(at) {
                text.clone_into(place);
            }
        }
    }

    pub(super) fn size(&self, at: usize) -> u64 {
        self.sizes.get(at).copied().unwrap_or(0)
    }

    pub(super) fn bool(&self, at: usize) -> bool {
        self.bools.get(at).copied().unwrap_or(false)
    }

    pub(super) fn string(&self, at: usize) -> &str {
        self.strings.get(at).map_or("", String::as_str)
    }

    pub(super) fn set_size_at(&mut self, at: usize, value: u64) -> Outcome<()> {
        let Some((size, place)) = SIZES.get(at).zip(self.sizes.get_mut(at)) else {
            return Err(Failure::value("no such parameter"));
        };
        if value < size.min || value > size.max {
            return Err(Failure::value(format!(
                "{} = {value} is outside {}..{}",
                size.key, size.min, size.max
            )));
        }
        *place = value;
        Ok(())
    }

    /// # Errors
    /// `INVALID_VALUE` for a number that no parameter has; so all that follow.
    pub(super) fn get_size(&self, number: i32) -> Outcome<u64> {
        Ok(self.size(index("number", number, SIZES.len())?))
    }

    pub(super) fn set_size(&mut self, number: i32, value: u64) -> Outcome<()> {
        let at = index("number", number, SIZES.len())?;
        self.set_size_at(at, value)
    }

    pub(super) fn bounds(number: i32) -> Outcome<(u64, u64)> {
        let at = index("number", number, SIZES.len())?;
        SIZES.get(at).map(|size| (size.min, size.max)).ok_or_else(|| unknown("number", number))
    }

    pub(super) fn get_bool(&self, number: i32) -> Outcome<bool> {
        Ok(self.bool(index("boolean", number, BOOLS.len())?))
    }

    pub(super) fn set_bool(&mut self, number: i32, value: bool) -> Outcome<()> {
        let at = index("boolean", number, BOOLS.len())?;
        if let Some(place) = self.bools.get_mut(at) {
            *place = value;
        }
        Ok(())
    }

    pub(super) fn get_string(&self, number: i32) -> Outcome<&str> {
        Ok(self.string(index("text", number, STRINGS.len())?))
    }

    pub(super) fn set_string(&mut self, number: i32, value: &str) -> Outcome<()> {
        let at = index("text", number, STRINGS.len())?;
        if at == LOG_LEVEL && !LEVELS.contains(&value.to_ascii_uppercase().as_str()) {
            return Err(Failure::value(format!("'{value}' is no level: {}", LEVELS.join(", "))));
        }
        if let Some(place) = self.strings.get_mut(at) {
            value.clone_into(place);
        }
        Ok(())
    }
}

impl Slabs {
    /// # Errors
    /// `INVALID_VALUE` for no or too many classes, and for a class without bytes.
    pub(super) fn new(sizes_kb: Vec<u64>, counts: Vec<u64>) -> Outcome<Self> {
        let fits = (1..=SLABS_MAX).contains(&sizes_kb.len()) && sizes_kb.len() == counts.len();
        if !fits || sizes_kb.contains(&0) || counts.contains(&0) {
            let text = format!("1 to {SLABS_MAX} classes with a size and a count are wanted");
            return Err(Failure::value(text));
        }
        Ok(Self { sizes_kb, counts })
    }
}

/// # Errors
/// `DRIVER_UNSUPPORTED_LIMIT`, or `INVALID_VALUE` beyond what the parameter can hold.
pub(super) fn check_kb(at: usize, kb: u64, step: u64) -> Outcome<()> {
    let Some(size) = SIZES.get(at) else { return Ok(()) };
    let limit = |text: String| Failure::new(OpError::DRIVER_UNSUPPORTED_LIMIT, text);
    if at != DIRECT_KB && kb > size.max {
        return Err(Failure::value(format!("{} = {kb} KB is more than {}", size.key, size.max)));
    }
    let zero = kb == 0 && at != DIRECT_KB && at != POLL_KB;
    if !zero && (kb < size.min.max(step) || kb > size.max || !kb.is_multiple_of(step)) {
        return Err(limit(format!(
            "{} = {kb} KB: a multiple of {step} up to {} is supported",
            size.key, size.max
        )));
    }
    Ok(())
}

fn numbers(value: &Value) -> Option<Vec<u64>> {
    let list = value.as_array()?;
    if list.len() > SLABS_MAX {
        return None;
    }
    list.iter().map(Value::as_u64).collect()
}

fn truth(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(text: &str, env: &[(&str, &str)]) -> Outcome<Options> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Options::load(Some(file.path()), &env)
    }

    #[test]
    fn environment_wins_over_file_wins_over_default() {
        let text = r#"{ // a comment
            "properties": { "io_batchsize": 64, "allow_compat_mode": false, "what": 1 },
            /* another */ "profile": { "cufile_stats": 2 }, "new": { "key": 1 },
            "execution": { "max_io_threads": 4000, "parallel_io": "yes" } }"#;
        let options = loaded(text, &[("CUFILE_STATS_LEVEL", "3")]).unwrap();
        assert_eq!((options.size(BATCH), options.size(STATS), options.size(THREADS)), (64, 3, 8));
        assert!(!options.bool(ALLOW_COMPAT) && options.bool(PARALLEL));
        assert_eq!(options.problems.len(), 4, "{:?}", options.problems);
    }

    #[test]
    fn a_missing_file_is_a_remark_and_a_broken_one_an_error() {
        let env = BTreeMap::new();
        let missing = Options::load(Some(Path::new("/nowhere/$PWD/cufile.json")), &env).unwrap();
        assert_eq!(missing.problems.len(), 1);
        for text in ["{ \"properties\": { oops", "[1]", ""] {
            assert_eq!(loaded(text, &[]).unwrap_err().code, OpError::INVALID_VALUE, "{text}");
        }
    }

    #[test]
    fn slab_classes_of_a_file_have_as_many_sizes_as_counts() {
        let cases = [
            ("[4, 64]", "[8, 2]", vec![4, 64], 0),
            ("[4]", "[8, 2, 1, 1, 1, 1, 1, 1]", vec![4, 1024, 16_384], 1),
            ("[4, 64, 128]", "[8]", vec![4, 1024, 16_384], 1),
            ("[4, \"x\"]", "[8, 2]", vec![4, 1024, 16_384], 2),
            ("[]", "[]", vec![4, 1024, 16_384], 1),
            ("[0]", "[1]", vec![4, 1024, 16_384], 1),
            ("7", "[1, 1, 1]", vec![4, 1024, 16_384], 1),
        ];
        for (sizes, counts, expected, problems) in cases {
            let text = format!(
                r#"{{ "properties": {{ "posix_pool_slab_size_kb": {sizes},
                      "posix_pool_slab_count": {counts} }} }}"#
            );
            let options = loaded(&text, &[]).unwrap();
            let Slabs { sizes_kb, counts } = &options.posix_slabs;
            assert_eq!((sizes_kb, counts.len()), (&expected, expected.len()), "{text}");
            assert_eq!(options.problems.len(), problems, "{:?}", options.problems);
        }
    }

    #[test]
    fn limits_of_the_setters() {
        let cases = [
            (DIRECT_KB, 0, 64, 5003),
            (DIRECT_KB, 64, 64, 0),
            (DIRECT_KB, 1000, 64, 5003),
            (DIRECT_KB, 16_384, 64, 0),
            (DIRECT_KB, 32_768, 64, 5003),
            (CACHE_KB, 0, 64, 0),
            (CACHE_KB, 1, 64, 5003),
            (CACHE_KB, 1 << 22, 64, 0),
            (CACHE_KB, 1 << 40, 64, 5022),
            (PINNED_KB, 1, 64, 5003),
            (POLL_KB, 0, 4, 5003),
            (POLL_KB, 4, 4, 0),
        ];
        for (at, kb, step, expected) in cases {
            let code = check_kb(at, kb, step).err().map_or(0, |failure| failure.code.0);
            assert_eq!(code, expected, "{at} {kb}");
        }
    }
}
