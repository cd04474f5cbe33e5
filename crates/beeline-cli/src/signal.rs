//! SIGINT and SIGTERM: the first cancels, the second exits at once. SIGXFSZ: an error of the write.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use beeline::storage::CancelToken;
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::failure::EXIT_SIGNAL;

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
        for signal in [SIGINT, SIGTERM] {
            // Registered in this order, so that the first signal finds the flag down.
            let exit = i32::from(EXIT_SIGNAL) + signal;
            flag::register_conditional_shutdown(signal, exit, Arc::clone(&armed))?;
            flag::register(signal, Arc::clone(&armed))?;
        }
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let watch = Self { token: CancelToken::new(), received: Arc::default() };
        let (token, received) = (watch.token.clone(), Arc::clone(&watch.received));
        std::thread::Builder::new().name("beeline-signal".to_owned()).spawn(move || {
            for signal in signals.forever() {
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
