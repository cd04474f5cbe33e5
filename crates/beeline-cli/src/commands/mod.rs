//! The commands, one file each, and what they share: devices, engines, the plan's words.

mod bench;
mod completions;
mod copy;
mod cufile;
mod devices;
mod doctor;
mod explain;
mod explain_addresses;
mod explain_collective;
mod explain_ends;
mod gdsio;
mod html;
mod load;
mod man;
mod probe;
mod rdma;
pub(crate) mod rdma_memory;
pub(crate) mod rdma_nic;
mod topo;

use std::cell::{Cell, OnceCell};
use std::time::{Duration, Instant};

use beeline::config::Config;
use beeline::gpu::{DeviceId, Gpu, Info};
use beeline::storage::{CancelToken, Engine, Operation, Report, RouteReport, StorageRoute};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::flags::{Command, EngineFlags};
use crate::output::{self, Answer};
use crate::signal::Watch;

/// Carries out one command.
///
/// # Errors
/// Whatever kept it from an answer.
pub(crate) fn run(command: &Command, context: &Context) -> Result<Answer, Failure> {
    let result = match command {
        Command::Load(flags) => load::run(flags, context),
        Command::Copy(flags) => copy::run(flags, context),
        Command::Explain(flags) => explain::run(flags, context),
        Command::Devices(flags) => devices::run(flags, context),
        Command::Doctor(flags) => doctor::run(flags, context),
        Command::ProbeWorker => probe::worker(),
        Command::Topo(flags) => topo::run(flags),
        Command::Cufile(flags) => cufile::run(flags, context),
        Command::Gdsio(flags) => gdsio::run(flags, context),
        Command::Rdma(flags) => rdma::run(flags, context),
        Command::Bench(flags) => bench::run(flags, context),
        Command::Completions(flags) => completions::run(flags),
        Command::Man(flags) => man::run(flags),
    };
    // Whatever a signal made fail, the signal is the cause.
    result.map_err(|failure| context.interrupted().unwrap_or(failure))
}

/// What holds for one run of the program.
pub(crate) struct Context {
    /// Whether answers and failures are JSON.
    pub(crate) json: bool,
    simulated: Cell<Option<bool>>,
    watch: OnceCell<Watch>,
}

impl Context {
    pub(crate) const fn new(json: bool) -> Self {
        Self { json, simulated: Cell::new(None), watch: OnceCell::new() }
    }

    /// Whether a device of this run is simulated, once one is known.
    pub(crate) const fn simulated(&self) -> Option<bool> {
        self.simulated.get()
    }

    /// Notes whether the devices of this run are simulated.
    pub(crate) fn set_simulated(&self, simulated: bool) {
        self.simulated.set(Some(simulated || self.simulated().unwrap_or(false)));
    }

    /// The device `name`, or the default one, said on stderr where it is a simulated one.
    ///
    /// # Errors
    /// A name that is none, a device that is not there or does not work.
    pub(crate) fn device(&self, name: Option<&str>) -> Result<Gpu, Failure> {
        let gpu = match name {
            Some(name) => Gpu::open(&name.parse::<DeviceId>()?)?,
            None => Gpu::default_device()?,
        };
        let info = gpu.info();
        if info.simulated && name.is_none() {
            output::note(&format!("no GPU on this machine, using {}", label(&info)));
        }
        self.set_simulated(info.simulated);
        Ok(gpu)
    }

    /// A token that the first SIGINT, SIGTERM or SIGHUP cancels; `signal` says what another does.
    ///
    /// # Errors
    /// What installing the signal handlers says.
    pub(crate) fn cancel_token(&self) -> Result<CancelToken, Failure> {
        if let Some(watch) = self.watch.get() {
            return Ok(watch.token().clone());
        }
        let watch = Watch::start().map_err(|error| {
            Failure::failed("io-failed", format!("cannot watch for signals: {error}"))
        })?;
        Ok(self.watch.get_or_init(|| watch).token().clone())
    }

    /// The failure to report where a signal came.
    pub(crate) fn interrupted(&self) -> Option<Failure> {
        self.watch.get()?.received().map(Failure::interrupted)
    }
}

/// The device's name, and that it is simulated where it is.
pub(crate) fn label(info: &Info) -> String {
    if info.simulated { format!("{} (simulated)", info.id) } else { info.id.to_string() }
}

/// A device as JSON: `id`, `name`, `simulated`, `profile`.
pub(crate) fn device_json(info: &Info) -> Value {
    json!({
        "id": info.id.to_string(),
        "name": info.name,
        "simulated": info.simulated,
        "profile": info.profile.map(|profile| profile.as_str()),
    })
}

/// An engine of its own for `gpu`, set up by the environment and then by `flags`.
pub(crate) fn engine(gpu: &Gpu, flags: &EngineFlags) -> Engine {
    let mut config = Config::from_env();
    if let Some(threads) = flags.threads {
        config.threads = usize::from(threads);
    }
    if let Some(bytes) = flags.pool {
        config.pool_bytes = bytes;
    }
    Engine::new(gpu, config)
}

/// The point in time that lies `span` ahead, where one was asked for and the clock reaches so far.
pub(crate) fn deadline(span: Option<Duration>) -> Option<Instant> {
    span.and_then(|span| Instant::now().checked_add(span))
}

/// One line about a route that was used: bytes, share, cause, CPU time.
pub(crate) fn route_line(route: &RouteReport, total: u64) -> String {
    let share = if total == 0 { 0.0 } else { route.bytes as f64 * 100.0 / total as f64 };
    format!(
        "{}: {} in {} ({share:.0} %), because {} [{}]",
        route.route,
        output::bytes(route.bytes),
        output::plural(route.chunks, "chunk"),
        route.why.title(),
        route.why.as_str(),
    )
}

/// What carries the bytes on `route`, in words.
pub(crate) const fn what(route: StorageRoute, operation: Operation) -> &'static str {
    match operation {
        Operation::Read => route.describe(),
        Operation::Write => route.describe_write(),
    }
}

/// The routes of a report as JSON.
pub(crate) fn routes_json(report: &Report, operation: Operation) -> Value {
    let one = |route: &RouteReport| {
        json!({
            "route": route.route.as_str(),
            "what": what(route.route, operation),
            "why": route.why.as_str(),
            "why_text": route.why.title(),
            "bytes": route.bytes,
            "chunks": route.chunks,
            "cpu_seconds": route.cpu.as_secs_f64(),
        })
    };
    report.routes.iter().map(one).collect()
}
