//! Where messages go: the file of `CUFILE_LOGFILE_PATH`, else the standard error stream; by `BEELINE_LOG`
//! or the level of cufile.json. Started by the first call, and left alone where the program has a
//! subscriber of its own.

use beeline::cufile::{Failure, library};
use beeline::log::{self, Log};
use tracing::Level;

pub(crate) fn start() {
    log::start(|| {
        let (level, path) = library().log_settings();
        let level = library().settings().log.clone().unwrap_or(level);
        let level = log::level(&level, Level::ERROR)?;
        let open = || std::fs::OpenOptions::new().create(true).append(true).open(&path).ok();
        let file = if path.as_os_str().is_empty() { None } else { open() };
        Some(Log::new("cufile", level, file))
    });
}

/// A failed call, as an error: with its code and the sentence.
#[cold]
pub(crate) fn failed(name: &str, failure: &Failure) {
    tracing::debug!(code = failure.code.0, errno = failure.errno, "{name}: {}", failure.text);
}
