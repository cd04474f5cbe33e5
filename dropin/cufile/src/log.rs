//! Where messages go: the file of `CUFILE_LOGFILE_PATH`, else the standard error stream; by `BEELINE_LOG`
//! or the level of cufile.json. Started by the first call, and left alone where the program has a
//! subscriber of its own.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::{Mutex, Once, PoisonError};

use beeline::cufile::{Failure, library};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Bytes after which a log file takes no more.
const FILE_BYTES_MAX: u64 = 32 << 20;

pub(crate) fn start() {
    static ONCE: Once = Once::new();
    // What panics here is not tried again: later calls go on without a log.
    ONCE.call_once_force(|state| {
        if state.is_poisoned() {
            return;
        }
        let (level, path) = library().log_settings();
        let asked = library().settings().log.clone();
        let level = asked.unwrap_or(level);
        let Some(level) = level_of(&level) else { return };
        let file = (!path.as_os_str().is_empty())
            .then(|| std::fs::OpenOptions::new().create(true).append(true).open(path).ok())
            .flatten();
        let log = Log { level, file: file.map(|file| Mutex::new((file, 0))) };
        // Refused where there is one already.
        let _ = tracing::subscriber::set_global_default(log);
    });
}

/// A failed call, as an error: with its code and the sentence.
#[cold]
pub(crate) fn failed(name: &str, failure: &Failure) {
    tracing::debug!(code = failure.code.0, errno = failure.errno, "{name}: {}", failure.text);
}

/// `None` for nothing at all.
fn level_of(name: &str) -> Option<Level> {
    match name.to_ascii_uppercase().as_str() {
        "OFF" => None,
        "WARN" | "NOTICE" => Some(Level::WARN),
        "INFO" => Some(Level::INFO),
        "DEBUG" => Some(Level::DEBUG),
        "TRACE" => Some(Level::TRACE),
        _ => Some(Level::ERROR),
    }
}

struct Log {
    level: Level,
    file: Option<Mutex<(std::fs::File, u64)>>,
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= self.level
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        let text = format!(
            "beeline cufile[{}] {}:{}\n",
            std::process::id(),
            event.metadata().level(),
            line.0
        );
        match &self.file {
            None => {
                let _ = std::io::stderr().write_all(text.as_bytes());
            }
            Some(file) => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                if file.1 < FILE_BYTES_MAX {
                    file.1 += text.len() as u64;
                    let _ = file.0.write_all(text.as_bytes());
                }
            }
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The fields of an event, the message first.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = if field.name() == "message" {
            let rest = std::mem::take(&mut self.0);
            write!(self.0, " {value:?}{rest}")
        } else {
            write!(self.0, " {}={value:?}", field.name())
        };
    }
}
