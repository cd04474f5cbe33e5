//! `beeline doctor --probe`: runs the transfers of [`beeline::probe::verify`] in this program's own image.

use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use beeline::core::checks::{Outcome, Place, Transfer};
use beeline::core::facts::{Fact, Machine, Origin};
use beeline::probe::{self, VerifyOptions};

use super::Context;
use crate::failure::Failure;
use crate::flags::ProbeFlags;
use crate::output::{self, Answer, printable};

/// How long one transfer may take where nothing else is asked for. The first pays for CUDA contexts.
const DEADLINE: Duration = Duration::from_secs(20);
/// How long all of them may take together.
const DEADLINE_ALL: Duration = Duration::from_secs(300);
/// Bytes of one copy between GPUs, and between simulated ones.
const BYTES: u64 = 128 << 20;
const BYTES_SIMULATED: u64 = 8 << 20;

/// The transfers of this machine, none where they were not asked for. GPUs that are there and do not
/// work are a transfer that was not run, with the reason.
///
/// # Errors
/// A folder or size that cannot be used; where this program does not know its own path.
pub(crate) fn run(
    flags: &ProbeFlags,
    machine: &mut Machine,
    context: &Context,
) -> Result<Vec<Transfer>, Failure> {
    if !flags.probe {
        return Ok(Vec::new());
    }
    let folder = flags.probe_dir.clone().unwrap_or_else(std::env::temp_dir);
    if !folder.is_dir() {
        let message = format!("{} is not a directory", folder.display());
        return Err(Failure::refused("input-refused", message));
    }
    if let Some(bytes) = flags.probe_bytes.filter(|bytes| !(1..=probe::BYTES_MAX).contains(bytes)) {
        let message =
            format!("a probe copies 1 to {} bytes at once, not {bytes}", probe::BYTES_MAX);
        return Err(Failure::refused("input-refused", message));
    }
    let devices = match probe::devices() {
        Ok(devices) => devices,
        Err(error) => return Ok(vec![not_run(format!("{error:#}"))]),
    };
    let simulated = devices.iter().any(|info| info.simulated);
    context.set_simulated(simulated);
    if simulated {
        output::note("no GPU on this machine, probing simulated devices");
        let value = "the probe used simulated devices".to_owned();
        machine.notes.push(Fact { value, origin: Origin::default() });
    }
    if devices.len() > probe::DEVICES_MAX {
        let text = format!("of {} devices the first {}", devices.len(), probe::DEVICES_MAX);
        output::warn(&format!("{text} are probed"));
    }
    let program = std::env::current_exe().map_err(|error| {
        Failure::failed("io-failed", format!("cannot find this program's own file: {error}"))
    })?;
    let options = VerifyOptions {
        program,
        args: vec!["probe-worker".into()],
        deadline: flags.probe_timeout.unwrap_or(DEADLINE),
        deadline_all: DEADLINE_ALL,
        bytes: flags.probe_bytes.unwrap_or(if simulated { BYTES_SIMULATED } else { BYTES }),
        folder,
        fault: flags.probe_fault.filter(|_| simulated),
    };
    Ok(probe::verify(&devices, &options, |_, _, _| {}))
}

fn not_run(note: String) -> Transfer {
    let place = |name: &str| Place { name: name.to_owned(), bdf: None };
    Transfer {
        from: place("host"),
        to: place("GPU"),
        by: place("GPU"),
        outcome: Outcome::NotRun,
        bytes: 0,
        mb_per_s: None,
        direct: false,
        simulated: false,
        note,
    }
}

/// The child's side.
///
/// # Errors
/// A request that is none, a parent that is gone.
pub(crate) fn worker() -> Result<Answer, Failure> {
    probe::serve(io::stdin().lock(), io::stdout().lock()).map_err(|error| {
        Failure::failed("io-failed", format!("cannot answer the probe that asks: {error}"))
    })?;
    Ok(Answer::default())
}

/// `12.3 GB/s`, or nothing.
pub(crate) fn speed(transfer: &Transfer) -> String {
    let text = |mb: u64| format!("{}.{} GB/s", mb / 1000, mb % 1000 / 100);
    transfer.mb_per_s.map_or_else(String::new, text)
}

/// Lines about transfers.
pub(crate) fn text(transfers: &[Transfer], out: &mut String) {
    if !transfers.is_empty() {
        out.push_str("Transfers:\n");
    }
    for transfer in transfers {
        let mut words = vec![transfer.outcome.as_str().to_owned(), speed(transfer)];
        words.push(printable(&transfer.note));
        words.retain(|word| !word.is_empty());
        let _ = writeln!(out, "  {}: {}", printable(&transfer.label()), words.join(", "));
    }
}
