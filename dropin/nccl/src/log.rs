//! Where messages go: the standard error stream, by `BEELINE_LOG` or `NCCL_DEBUG`; warnings where neither is set. Started
//! when the first communicator is made.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Once;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

pub(crate) fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once_force(|state| {
        let asked = beeline::config::comm_log();
        if let (false, Some(level)) = (state.is_poisoned(), level_of(asked.as_deref())) {
            // Refused where there is one already.
            let _ = tracing::subscriber::set_global_default(Log { level });
        }
    });
}

/// `None` for nothing at all.
fn level_of(name: Option<&str>) -> Option<Level> {
    match name.unwrap_or("warn").to_ascii_uppercase().as_str() {
        "OFF" | "NONE" => None,
        "ERROR" => Some(Level::ERROR),
        "INFO" => Some(Level::INFO),
        "DEBUG" => Some(Level::DEBUG),
        "TRACE" => Some(Level::TRACE),
        _ => Some(Level::WARN),
    }
}

struct Log {
    level: Level,
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
        let (process, level) = (std::process::id(), event.metadata().level());
        let text = format!("beeline nccl[{process}] {level}:{}\n", line.0);
        // Nobody can be told that this failed.
        let _ = std::io::stderr().write_all(text.as_bytes());
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
