//! Loading: one allocation per device, one transfer, views.

use std::sync::Arc;
use std::time::Instant;

use beeline_core::addr::ByteRange;
use beeline_core::model::{Dtype, Layout, Placement, Selection};
use beeline_core::plan::{Mode, StorageRoute};

use super::Model;
use crate::error::{Error, Result};
use crate::gpu::{Buffer, Gpu};
use crate::storage::{CancelToken, Engine, File, Progress, Report, Request, Transfer};

/// What to load, and how.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Which tensors, and which of their rows.
    pub selection: Selection,
    /// How far the plan may go.
    pub mode: Mode,
    /// One route by name, and no other.
    pub route: Option<StorageRoute>,
    /// When to give up waiting.
    pub deadline: Option<Instant>,
    /// Cancels the load from elsewhere.
    pub cancel: Option<CancelToken>,
}

/// A load under way. Dropping it cancels it.
#[derive(Debug)]
pub struct Loading {
    files: Vec<Arc<File>>,
    layout: Layout,
    devices: Vec<Buffer>,
    transfer: Option<Transfer>,
}

/// A model on its devices. Dropping it frees the memory, unless a view is still held.
#[derive(Debug)]
pub struct Loaded {
    /// The bytes' way: routes, time, CPU time.
    pub report: Report,
    pub(super) files: Vec<Arc<File>>,
    pub(super) layout: Layout,
    /// One allocation per device, all with the same layout; empty where there is no byte to load.
    pub(super) devices: Vec<Buffer>,
    /// Positions in the layout's entries, ordered by name: models of a million tensors exist.
    by_name: Vec<usize>,
}

/// One tensor on one device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Tensor {
    /// Its name.
    pub name: Box<str>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, after slicing.
    pub shape: Box<[u64]>,
    /// Its bytes, aligned to 256; `None` for a tensor without elements.
    pub buffer: Option<Buffer>,
}

impl Model {
    /// Starts to load into every one of `devices`; each file is read once.
    ///
    /// # Errors
    /// Those of [`Model::layout`]; `is_out_of_memory` saying how much is missing; `is_no_route`.
    pub fn start(&self, engine: &Engine, devices: &[Gpu], options: LoadOptions) -> Result<Loading> {
        if devices.is_empty() {
            return Err(Error::refused("no device was named to load into"));
        }
        let layout = self.layout(&options.selection)?;
        let files = self.files.clone();
        if layout.total_bytes == 0 {
            return Ok(Loading { files, layout, devices: Vec::new(), transfer: None });
        }
        let devices = devices
            .iter()
            .map(|gpu| gpu.alloc(layout.total_bytes))
            .collect::<Result<Vec<Buffer>>>()?;
        let segments = layout.segments.clone();
        let mut request = match devices.first() {
            Some(device) => Request::read(files.clone(), segments, device.clone()),
            None => return Err(Error::refused("no device was named to load into")),
        };
        request.devices.clone_from(&devices);
        request.mode = options.mode;
        request.route = options.route;
        request.deadline = options.deadline;
        request.cancel = options.cancel;
        let transfer = Some(engine.submit(request)?);
        Ok(Loading { files, layout, devices, transfer })
    }

    /// [`Model::start`] and [`Loading::wait`].
    ///
    /// # Errors
    /// Those of both.
    pub fn load(&self, engine: &Engine, devices: &[Gpu], options: LoadOptions) -> Result<Loaded> {
        self.start(engine, devices, options)?.wait()
    }
}

impl Loading {
    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.transfer.as_ref().map(Transfer::progress).unwrap_or_default()
    }

    /// Waits for up to `span` and says whether [`Self::wait`] would return at once: the load has
    /// finished, or its deadline has passed.
    pub fn wait_for(&self, span: std::time::Duration) -> bool {
        self.transfer.as_ref().is_none_or(|transfer| transfer.wait_for(span))
    }

    /// Starts nothing more of it.
    pub fn cancel(&self) {
        if let Some(transfer) = &self.transfer {
            transfer.cancel();
        }
    }

    /// Waits until every byte is on every device.
    ///
    /// # Errors
    /// The first failure; `is_corrupt` where a file changed while it was read; `is_cancelled`;
    /// `is_timeout`.
    pub fn wait(self) -> Result<Loaded> {
        self.wait_with(|_| {})
    }

    /// [`Self::wait`], calling `tick` about ten times a second with how far the load is.
    ///
    /// # Errors
    /// Those of [`Self::wait`].
    pub fn wait_with(self, tick: impl FnMut(Progress)) -> Result<Loaded> {
        let Self { files, layout, devices, transfer } = self;
        let report = match transfer {
            Some(transfer) => transfer.wait_with(tick)?,
            None => Report::default(),
        };
        // Of the files that bytes came from; what happens to the others is no matter of this load.
        let mut read: Vec<u32> = layout.entries.iter().map(|entry| entry.file).collect();
        read.dedup();
        for file in read.iter().filter_map(|index| files.get(*index as usize)) {
            file.check_unchanged()?;
        }
        let by_name = sorted_by_name(&layout);
        Ok(Loaded { report, files, layout, devices, by_name })
    }
}

impl Loaded {
    /// Where everything is.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The allocation on each device, in the order the devices were named; empty where no byte was
    /// loaded.
    pub fn buffers(&self) -> &[Buffer] {
        &self.devices
    }

    /// The tensor `name` on the first device.
    pub fn tensor(&self, name: &str) -> Option<Tensor> {
        let entry = |position: &usize| self.layout.entries.get(*position);
        let found = self
            .by_name
            .binary_search_by(|at| entry(at).map_or("", |entry| &*entry.name).cmp(name))
            .ok()?;
        Some(view(entry(self.by_name.get(found)?)?, self.devices.first()))
    }

    /// Every tensor on device number `device`, in file order.
    pub fn tensors(&self, device: usize) -> impl Iterator<Item = Tensor> + '_ {
        let buffer = self.devices.get(device);
        self.layout.entries.iter().map(move |entry| view(entry, buffer))
    }
}

/// One entry of a layout as a view into its allocation.
fn view(entry: &Placement, all: Option<&Buffer>) -> Tensor {
    let range = ByteRange { start: entry.device_offset, len: entry.len };
    Tensor {
        name: entry.name.clone(),
        dtype: entry.dtype.clone(),
        shape: entry.shape.clone(),
        // The layout's ranges lie inside its allocation, so this is `None` only for no bytes.
        buffer: all.filter(|_| entry.len > 0).and_then(|all| all.slice(range).ok()),
    }
}

fn sorted_by_name(layout: &Layout) -> Vec<usize> {
    let mut positions: Vec<usize> = (0..layout.entries.len()).collect();
    let name = |position: &usize| layout.entries.get(*position).map_or("", |entry| &*entry.name);
    positions.sort_unstable_by(|a, b| name(a).cmp(name(b)));
    positions
}
