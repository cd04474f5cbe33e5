//! Parameters, properties and limits: what opening brings into force, and what is answered about it.

use std::path::PathBuf;

use super::super::options::{self, Options, Slabs, check_kb};
use super::super::status::{Failure, OpError, Outcome};
use super::{Library, not_forked};
use crate::lock;

/// What `cuFileDriverGetProperties` answers, sizes in KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields of the API's structure")]
pub struct Properties {
    pub poll_kb: u64,
    pub direct_kb: u64,
    pub control_flags: u32,
    pub feature_flags: u32,
    pub cache_kb: u32,
    pub per_buffer_kb: u32,
    pub pinned_kb: u32,
    pub batch: u32,
    pub batch_ms: u32,
}

/// Which limit is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the API's functions")]
pub enum Limit {
    Poll,
    Direct,
    Cache,
    Pinned,
}

impl Library {
    /// The parameters in force, or those that opening would bring into force.
    pub(super) fn options(&self) -> Outcome<Options> {
        if let Some(session) = self.current() {
            return Ok(session.options.clone());
        }
        let mut staged = lock(&self.staged);
        if let Some(options) = &*staged {
            return Ok(options.clone());
        }
        let loaded = Options::load(self.settings.json.as_deref(), &self.settings.env)?;
        Ok(staged.insert(loaded).clone())
    }

    /// Changes parameters, which only a closed library allows.
    ///
    /// # Errors
    /// What `change` says; `DRIVER_ALREADY_OPEN`.
    fn stage(&self, change: impl FnOnce(&mut Options) -> Outcome<()>) -> Outcome<()> {
        not_forked()?;
        let mut options = self.options()?;
        change(&mut options)?;
        let _count = lock(&self.count);
        if self.current().is_some() {
            let text = "parameters can be set while cuFile is closed; close it first";
            return Err(Failure::new(OpError::DRIVER_ALREADY_OPEN, text));
        }
        *lock(&self.staged) = Some(options);
        Ok(())
    }

    /// # Errors
    /// `INVALID_VALUE` for an unknown parameter; so the ones that follow, which also answer it for values
    /// out of bounds, and `DRIVER_ALREADY_OPEN` where something is to be set.
    pub fn size(&self, parameter: i32) -> Outcome<u64> {
        not_forked()?;
        self.options()?.get_size(parameter)
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn set_size(&self, parameter: i32, value: u64) -> Outcome<()> {
        self.stage(|options| options.set_size(parameter, value))
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn bounds(&self, parameter: i32) -> Outcome<(u64, u64)> {
        not_forked()?;
        Options::bounds(parameter)
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn flag(&self, parameter: i32) -> Outcome<bool> {
        not_forked()?;
        self.options()?.get_bool(parameter)
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn set_flag(&self, parameter: i32, value: bool) -> Outcome<()> {
        self.stage(|options| options.set_bool(parameter, value))
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn text(&self, parameter: i32) -> Outcome<String> {
        not_forked()?;
        self.options()?.get_string(parameter).map(str::to_owned)
    }

    #[expect(missing_docs, clippy::missing_errors_doc, reason = "see `size`")]
    pub fn set_text(&self, parameter: i32, value: &str) -> Outcome<()> {
        self.stage(|options| options.set_string(parameter, value))
    }

    /// Slab classes: sizes in KiB and counts; of the host pool, or of the device's.
    ///
    /// # Errors
    /// `INVALID_VALUE` where the settings cannot be read.
    pub fn slabs(&self, device: bool) -> Outcome<(Vec<u64>, Vec<u64>)> {
        not_forked()?;
        let options = self.options()?;
        let slabs = if device { options.gpu_slabs } else { options.posix_slabs };
        Ok((slabs.sizes_kb, slabs.counts))
    }

    /// Stages slab classes; they are reported, the pool itself is one.
    ///
    /// # Errors
    /// `INVALID_VALUE`, `DRIVER_ALREADY_OPEN`.
    pub fn set_slabs(&self, device: bool, sizes_kb: Vec<u64>, counts: Vec<u64>) -> Outcome<()> {
        let slabs = Slabs::new(sizes_kb, counts)?;
        self.stage(|options| {
            *(if device { &mut options.gpu_slabs } else { &mut options.posix_slabs }) = slabs;
            Ok(())
        })
    }

    /// # Errors
    /// `INVALID_VALUE` where the settings cannot be read.
    pub fn properties(&self) -> Outcome<Properties> {
        /// Batches, streams and parallel I/O.
        const FEATURES: u32 = 0b1110;
        const ALLOW_COMPAT_FLAG: u32 = 0b10;
        not_forked()?;
        let options = self.options()?;
        let word = |at| u32::try_from(options.size(at)).unwrap_or(u32::MAX);
        let poll = u32::from(options.bool(options::POLL_MODE));
        let compat = if options.bool(options::ALLOW_COMPAT) { ALLOW_COMPAT_FLAG } else { 0 };
        Ok(Properties {
            poll_kb: options.size(options::POLL_KB),
            direct_kb: options.size(options::DIRECT_KB),
            control_flags: poll | compat,
            feature_flags: FEATURES,
            cache_kb: word(options::CACHE_KB),
            per_buffer_kb: word(options::PER_BUFFER_KB),
            pinned_kb: word(options::PINNED_KB),
            batch: word(options::BATCH),
            batch_ms: word(options::BATCH_MS),
        })
    }

    /// Checks a limit of `cuFileDriverSetPollMode` and its kin, which change nothing here: the pool of
    /// pinned memory is set by `BEELINE_POOL_BYTES`.
    ///
    /// # Errors
    /// `DRIVER_UNSUPPORTED_LIMIT`, `INVALID_VALUE`.
    pub fn check_limit(&self, limit: Limit, kb: u64) -> Outcome<()> {
        not_forked()?;
        match limit {
            Limit::Poll => check_kb(options::POLL_KB, kb, 4),
            Limit::Direct => check_kb(options::DIRECT_KB, kb, 64),
            Limit::Cache => check_kb(options::CACHE_KB, kb, 64),
            Limit::Pinned => check_kb(options::PINNED_KB, kb, 64),
        }
    }

    /// The file of settings, and where the log goes.
    pub fn log_settings(&self) -> (String, PathBuf) {
        let options = self.options().unwrap_or_default();
        let file = options.string(options::LOG_FILE).to_owned();
        (options.string(options::LOG_LEVEL).to_owned(), PathBuf::from(file))
    }
}
