//! Where messages go: the standard error stream, by `BEELINE_LOG` or `NCCL_DEBUG`; warnings where neither is set. Started
//! when the first communicator is made.

use beeline::log::{self, Log};
use tracing::Level;

pub(crate) fn start() {
    log::start(|| {
        let asked = beeline::config::comm_log();
        let level = log::level(asked.as_deref().unwrap_or("warn"), Level::WARN)?;
        Some(Log::new("nccl", level, None))
    });
}
