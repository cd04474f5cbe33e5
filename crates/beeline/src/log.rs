//! Where the messages of a drop-in library go: the standard error stream, or a file of bounded size. A program with a
//! `tracing` subscriber of its own gets them there instead.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::sync::{Mutex, Once};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::lock;

/// Bytes after which a file takes no more.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// Starts messages as `make` says, which is called once in the life of the process. `None`: no messages. Does nothing
/// where the program has a subscriber already.
pub fn start(make: impl FnOnce() -> Option<Log>) {
    static ONCE: Once = Once::new();
    ONCE.call_once_force(|state| {
        // What panics here is not tried again: later calls go on without messages.
        if !state.is_poisoned()
            && let Some(log) = make()
        {
            let _ = tracing::subscriber::set_global_default(log);
        }
    });
}

/// Messages of one library.
#[derive(Debug)]
pub struct Log {
    name: &'static str,
    level: Level,
    /// With how many bytes were written to it.
    file: Option<Mutex<(File, u64)>>,
}

impl Log {
    /// Messages up to `level`, each headed by `name` and the process; to `file`, or to the standard error stream.
    pub fn new(name: &'static str, level: Level, file: Option<File>) -> Self {
        Self { name, level, file: file.map(|file| Mutex::new((file, 0))) }
    }
}

/// The level with this name, in any case; `None` for no messages (`off`, `none`), `other` for a name that is unknown.
pub fn level(name: &str, other: Level) -> Option<Level> {
    match name.to_ascii_uppercase().as_str() {
        "OFF" | "NONE" => None,
        "ERROR" => Some(Level::ERROR),
        "WARN" | "NOTICE" => Some(Level::WARN),
        "INFO" => Some(Level::INFO),
        "DEBUG" => Some(Level::DEBUG),
        "TRACE" => Some(Level::TRACE),
        _ => Some(other),
    }
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
        let (name, process, level) = (self.name, std::process::id(), event.metadata().level());
        let text = format!("beeline {name}[{process}] {level}:{}\n", line.0);
        // Nobody can be told that a message could not be written.
        let Some(file) = &self.file else {
            let _ = std::io::stderr().write_all(text.as_bytes());
            return;
        };
        let (file, written) = &mut *lock(file);
        if *written < FILE_BYTES_MAX {
            *written += text.len() as u64;
            let _ = file.write_all(text.as_bytes());
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

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use super::*;

    #[test]
    fn a_file_gets_what_the_level_allows_the_message_first() {
        let mut file = tempfile::tempfile().unwrap();
        let log = Log::new("test", Level::WARN, Some(file.try_clone().unwrap()));
        tracing::subscriber::with_default(log, || {
            tracing::warn!(code = 7, "said {}", 1);
            tracing::info!("not said");
        });
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, format!("beeline test[{}] WARN: said 1 code=7\n", std::process::id()));
    }

    #[test]
    fn a_file_is_bounded() {
        let file = tempfile::tempfile().unwrap();
        let log = Log::new("test", Level::WARN, Some(file.try_clone().unwrap()));
        let long = "x".repeat(1 << 20);
        tracing::subscriber::with_default(log, || (0..40).for_each(|_| tracing::warn!("{long}")));
        let len = file.metadata().unwrap().len();
        assert!((FILE_BYTES_MAX..FILE_BYTES_MAX + (2 << 20)).contains(&len), "{len}");
    }

    #[test]
    fn levels_have_names() {
        let of = |name| level(name, Level::ERROR);
        assert_eq!((of("off"), of("None")), (None, None));
        assert_eq!((of("notice"), of("debug")), (Some(Level::WARN), Some(Level::DEBUG)));
        assert_eq!(of("5"), Some(Level::ERROR));
    }
}
