//! What signals do to a command.
//!
//! - SIGINT, SIGTERM and SIGHUP cancel: what is in flight is given up, and temporary files go. Another SIGINT or SIGTERM exits
//!   at once. So does another SIGHUP, but one within a second, since a terminal that closes may send one from the kernel and one
//!   from its shell.
//! - One of these that the command was started to ignore (`nohup`, a shell's background job) stays ignored.
//! - SIGXFSZ is an error of the write, and SIGPIPE one too: the runtime ignores that one from the start.
//! - SIGQUIT, as every other, goes its own way: who sends it wants the core dump of this moment.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use beeline::storage::CancelToken;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::failure::EXIT_SIGNAL;

/// Hang-ups that come closer together are of one terminal.
const HANG_UPS_APART: Duration = Duration::from_secs(1);

/// Makes a file beyond the limit of file sizes fail with `EFBIG`. The signal's own way would end the
/// process without a word, and leave a temporary file where there are no nameless ones.
pub(crate) fn take_file_size_limit() {
    // Where the handler cannot be installed, the signal goes its own way.
    let _ = flag::register(SIGXFSZ, Arc::default());
}

/// Turns signals into a cancelled token, for the rest of the process's life.
pub(crate) struct Watch {
    token: CancelToken,
    received: Arc<AtomicU8>,
}

impl Watch {
    /// Starts to watch.
    ///
    /// # Errors
    /// What installing the handlers or starting the thread says.
    pub(crate) fn start() -> io::Result<Self> {
        let armed = Arc::new(AtomicBool::new(false));
        let ignored = ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default());
        let mut wanted = vec![SIGINT, SIGTERM, SIGHUP];
        wanted.retain(|signal| ignored & 1 << (signal - 1) == 0);
        for signal in &wanted {
            // Registered in this order, so that the first signal finds the flag down.
            if *signal != SIGHUP {
                let exit = i32::from(EXIT_SIGNAL) + signal;
                flag::register_conditional_shutdown(*signal, exit, Arc::clone(&armed))?;
            }
            flag::register(*signal, Arc::clone(&armed))?;
        }
        let mut signals = Signals::new(wanted)?;
        let watch = Self { token: CancelToken::new(), received: Arc::default() };
        let (token, received) = (watch.token.clone(), Arc::clone(&watch.received));
        std::thread::Builder::new().name("beeline-signal".to_owned()).spawn(move || {
            let mut first = None;
            for signal in signals.forever() {
                let since = first.get_or_insert_with(Instant::now).elapsed();
                if signal == SIGHUP && since >= HANG_UPS_APART {
                    signal_hook::low_level::exit(i32::from(EXIT_SIGNAL) + SIGHUP);
                }
                received.store(u8::try_from(signal).unwrap_or(0), Ordering::SeqCst);
                token.cancel();
            }
        })?;
        Ok(watch)
    }

    /// Cancelled by the first signal.
    pub(crate) const fn token(&self) -> &CancelToken {
        &self.token
    }

    /// The number of the signal that came, if one did.
    pub(crate) fn received(&self) -> Option<u8> {
        Some(self.received.load(Ordering::SeqCst)).filter(|number| *number != 0)
    }
}

/// The signals that are ignored, as `/proc/self/status` shows them: bit 0 is signal 1. None where it does not say.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
