//! Statistics: levels, counters, and what is left for `beeline cufile stats`.

use std::path::PathBuf;
use std::time::Duration;

use super::super::stats::{CLASSES, GpuWords, LEVEL1_WORDS};
use super::super::status::{Failure, OpError, Outcome};
use super::{Library, library, not_forked};

impl Library {
    /// # Errors
    /// `INVALID_VALUE` outside 0 to 3.
    pub fn set_stats_level(&self, level: i32) -> Outcome<()> {
        not_forked()?;
        if !(0..=3).contains(&level) {
            return Err(Failure::value(format!("statistics level {level} is not 0 to 3")));
        }
        self.stats.set_level(level);
        Ok(())
    }

    /// The level of statistics.
    pub fn stats_level(&self) -> i32 {
        self.stats.level()
    }

    /// Starts or stops counting.
    ///
    /// # Errors
    /// `DRIVER_NOT_INITIALIZED`; `INTERNAL_ERROR` for a start at level 0.
    pub fn run_stats(&self, run: bool) -> Outcome<()> {
        if run {
            self.needed(OpError::DRIVER_NOT_INITIALIZED)?;
            if self.stats.level() == 0 {
                let text = "statistics are at level 0; set a level first";
                return Err(Failure::new(OpError::INTERNAL_ERROR, text));
            }
        }
        self.stats.run(run);
        Ok(())
    }

    /// Sets all counters to 0.
    pub fn reset_stats(&self) {
        self.stats.reset();
    }

    /// Level 1, in the order of the API's structure.
    ///
    /// # Errors
    /// `INVALID_VALUE` below that level; so the ones that follow.
    pub fn stats1(&self) -> Outcome<[u64; LEVEL1_WORDS]> {
        self.level(1)?;
        Ok(self.stats.level1())
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `stats1`")]
    pub fn stats2(&self) -> Outcome<[[u64; CLASSES]; 2]> {
        self.level(2)?;
        Ok(self.stats.level2())
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `stats1`")]
    pub fn stats3(&self) -> Outcome<Vec<GpuWords>> {
        self.level(3)?;
        Ok(self.stats.level3())
    }

    fn level(&self, least: i32) -> Outcome<()> {
        not_forked()?;
        let level = self.stats.level();
        if level >= least {
            return Ok(());
        }
        Err(Failure::value(format!("statistics are at level {level}, {least} is needed")))
    }

    /// Leaves the statistics in `folder` once a second, for `beeline cufile stats`.
    pub(super) fn keep_snapshots(&self, folder: PathBuf) {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            let keep = move || {
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                    let library = library();
                    if library.current().is_some() {
                        library.leave_snapshot(&folder);
                    }
                }
            };
            let _ = std::thread::Builder::new().name("beeline-stats".to_owned()).spawn(keep);
        });
    }

    pub(super) fn leave_snapshot(&self, folder: &std::path::Path) {
        let path = folder.join(format!("beeline-cufile-{}.json", std::process::id()));
        let next = path.with_extension("tmp");
        let written = std::fs::write(&next, self.snapshot().to_string());
        if let Err(error) = written.and_then(|()| std::fs::rename(&next, &path)) {
            tracing::warn!("leave statistics in {}: {error}", folder.display());
        }
    }

    /// What this process did so far: process, counts, bytes by route, CPU seconds.
    pub fn snapshot(&self) -> serde_json::Value {
        let words = self.stats.level1();
        let word = |at: usize| words.get(at).copied().unwrap_or(0);
        let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let routes: serde_json::Map<_, _> = self
            .routes()
            .into_iter()
            .map(|(name, bytes)| (name.to_owned(), bytes.into()))
            .collect();
        serde_json::json!({
            "pid": std::process::id(),
            "program": program.trim(),
            "level": self.stats.level(),
            "reads": word(0),
            "read_errors": word(1),
            "writes": word(2),
            "write_errors": word(3),
            "read_bytes": word(12),
            "written_bytes": word(13),
            "read_us_mean": word(16),
            "write_us_mean": word(17),
            "batch_read_bytes": word(52),
            "batch_written_bytes": word(53),
            "routes": routes,
            "cpu_seconds": self.stats.cpu_seconds(),
        })
    }

    /// Bytes by route since the library was opened.
    pub fn routes(&self) -> Vec<(&'static str, u64)> {
        match self.session() {
            Ok(Some(session)) => session.routes().to_vec(),
            _ => Vec::new(),
        }
    }
}
