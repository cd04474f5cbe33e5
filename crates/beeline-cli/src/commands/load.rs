//! `beeline load`: a model into device memory, measured and verified.

use std::time::{Duration, Instant};

use beeline::core::model::{Pattern, Selection, Slice};
use beeline::gpu::Gpu;
use beeline::model::{LoadOptions, Loaded, Model, Verified};
use beeline::storage::{self, CancelToken, Operation};
use serde_json::{Map, Value, json};

use super::{Context, deadline, device_json, engine, label, route_line, routes_json};
use crate::failure::Failure;
use crate::flags::LoadFlags;
use crate::output::{self, Answer};
use crate::progress::Progress;

/// Loads, reports, and verifies where that was asked for.
///
/// # Errors
/// What opening the model, the devices or the transfer says.
pub(crate) fn run(flags: &LoadFlags, context: &Context) -> Result<Answer, Failure> {
    let selection = selection(flags)?;
    let model = Model::open(&flags.paths)?;
    for remark in model.remarks().iter().filter(|remark| remark.warning) {
        output::warn(&output::one_line(&remark.to_string()));
    }
    let devices = devices(flags, context)?;
    let token = context.cancel_token()?;
    let (loaded, cpu) = transfer(flags, &model, &devices, selection, &token)?;
    let mut answer = report(&model, &devices, &loaded, cpu);
    if flags.verify {
        let since = Instant::now();
        let verified = loaded.verify(Some(&token))?;
        add_verification(&mut answer, &devices, &verified, since.elapsed());
    }
    Ok(answer)
}

fn selection(flags: &LoadFlags) -> Result<Selection, Failure> {
    let mut selection = Selection::all();
    for glob in &flags.tensors {
        selection = selection.include(Pattern::glob(glob)?);
    }
    for glob in &flags.exclude {
        selection = selection.exclude(Pattern::glob(glob)?);
    }
    if let Some((rank, of)) = flags.rank.zip(flags.of) {
        selection = selection.rows(Slice::rank(rank, of)?);
    }
    if let Some((start, end)) = flags.rows {
        selection = selection.rows(Slice::rows(start, end)?);
    }
    Ok(selection)
}

fn devices(flags: &LoadFlags, context: &Context) -> Result<Vec<Gpu>, Failure> {
    if flags.to.is_empty() {
        return Ok(vec![context.device(None)?]);
    }
    let mut devices: Vec<Gpu> = Vec::new();
    for name in &flags.to {
        let gpu = context.device(Some(name))?;
        if devices.iter().any(|other| other.id() == gpu.id()) {
            let text = format!("device {} is named twice", gpu.id());
            return Err(Failure::refused("usage", text).hint("name each device once"));
        }
        devices.push(gpu);
    }
    Ok(devices)
}

/// Loads the model, and says what CPU time the process spent on that.
fn transfer(
    flags: &LoadFlags,
    model: &Model,
    devices: &[Gpu],
    selection: Selection,
    token: &CancelToken,
) -> Result<(Loaded, Duration), Failure> {
    let Some(first) = devices.first() else {
        return Err(Failure::refused("usage", "no device was named to load into"));
    };
    let engine = engine(first, &flags.engine);
    let mut options = LoadOptions::default();
    options.selection = selection;
    options.mode = flags.route.mode;
    options.route = flags.route.route;
    options.deadline = deadline(flags.engine.timeout);
    options.cancel = Some(token.clone());
    let before = storage::process_cpu_time();
    let loading = model.start(&engine, devices, options)?;
    let bar = Progress::new(format!("loading into {}", labels(devices)), loading.progress().total);
    let loaded = loading.wait_with(|progress| bar.at(progress.done))?;
    Ok((loaded, storage::process_cpu_time().saturating_sub(before)))
}

fn labels(devices: &[Gpu]) -> String {
    devices.iter().map(|gpu| label(&gpu.info())).collect::<Vec<_>>().join(", ")
}

fn report(model: &Model, devices: &[Gpu], loaded: &Loaded, cpu: Duration) -> Answer {
    let report = &loaded.report;
    let tensors = loaded.layout().entries.len() as u64;
    let files = model.files();
    let seconds = report.elapsed.as_secs_f64();
    let speed = output::gb_per_s(report.bytes, seconds).filter(|_| report.bytes > 0);
    let cpu_per_gb = output::per_gb(cpu.as_secs_f64(), report.bytes);
    let infos: Vec<_> = devices.iter().map(Gpu::info).collect();

    let mut answer = Answer::of("load");
    answer.line(
        "loaded",
        &format!(
            "{}, {} from {} into {}",
            output::plural(tensors, "tensor"),
            output::bytes(report.bytes),
            output::plural(files.len() as u64, "file"),
            labels(devices),
        ),
    );
    answer.line("time", &format!("{seconds:.4} s, {}", output::figure(speed, "GB/s")));
    answer.line(
        "CPU time",
        &format!("{:.4} s, {}", cpu.as_secs_f64(), output::figure(cpu_per_gb, "CPU-s/GB")),
    );
    for route in &report.routes {
        answer.line("route", &route_line(route, report.bytes));
    }
    for remark in model.remarks().iter().filter(|remark| !remark.warning) {
        answer.line("remark", &remark.to_string());
    }
    answer.set("simulated", infos.iter().any(|info| info.simulated));
    answer.set("devices", infos.iter().map(device_json).collect::<Value>());
    answer.set("files", files_json(model));
    answer.set("tensors", tensors);
    answer.set("bytes", report.bytes);
    answer.set("device_bytes", loaded.layout().total_bytes);
    answer.set("seconds", seconds);
    answer.set("gb_per_s", speed);
    answer.set("cpu_seconds", cpu.as_secs_f64());
    answer.set("cpu_seconds_per_gb", cpu_per_gb);
    answer.set("routes", routes_json(report, Operation::Read));
    answer.set("remarks", remarks_json(model));
    answer.set("verify", Value::Null);
    answer
}

fn files_json(model: &Model) -> Value {
    let one = |file: &std::sync::Arc<storage::File>| {
        let mut object = Map::new();
        output::insert_path(&mut object, "path", file.path());
        object.insert("bytes".to_owned(), file.size().into());
        Value::Object(object)
    };
    model.files().iter().map(one).collect()
}

fn remarks_json(model: &Model) -> Value {
    let remarks = model.remarks().iter();
    remarks.map(|r| json!({ "code": r.code, "warning": r.warning, "text": r.text })).collect()
}

fn add_verification(answer: &mut Answer, devices: &[Gpu], verified: &Verified, span: Duration) {
    let name = |device: usize| devices.get(device).map_or_else(String::new, |g| g.id().to_string());
    let what = format!(
        "{}, {}",
        output::plural(verified.tensors, "tensor"),
        output::bytes(verified.bytes)
    );
    let different = verified.mismatches.len() as u64;
    if different == 0 {
        answer.line("verified", &format!("{what}: device and file are equal"));
    } else {
        answer.line(
            "verified",
            &format!("{what}: {} different", output::plural(different, "tensor")),
        );
        let text = format!("{} on the device and in the file", plural_differ(different));
        let failure = Failure::failed("verify-mismatch", text);
        answer.failure = Some(failure.hint("load again; if it stays, suspect the drive or memory"));
    }
    for wrong in &verified.mismatches {
        let device = name(wrong.device);
        answer.line(
            "differs",
            &format!(
                "{} on {device}: CRC-32 {:08x} in the file, {:08x} on the device",
                wrong.tensor, wrong.file_crc, wrong.device_crc
            ),
        );
    }
    let mismatches: Vec<Value> = verified
        .mismatches
        .iter()
        .map(|wrong| {
            json!({
                "tensor": wrong.tensor,
                "device": name(wrong.device),
                "file_crc32": format!("{:08x}", wrong.file_crc),
                "device_crc32": format!("{:08x}", wrong.device_crc),
            })
        })
        .collect();
    answer.set(
        "verify",
        json!({
            "equal": mismatches.is_empty(),
            "tensors": verified.tensors,
            "bytes": verified.bytes,
            "seconds": span.as_secs_f64(),
            "mismatches": mismatches,
        }),
    );
}

fn plural_differ(count: u64) -> String {
    let verb = if count == 1 { "differs" } else { "differ" };
    format!("{} {verb}", output::plural(count, "tensor"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline::config::SimConfig;
    use beeline::model::Mismatch;

    #[test]
    fn a_tensor_that_differs_is_named_and_fails_the_command() {
        let gpu = Gpu::simulated(&SimConfig::default()).unwrap();
        let wrong = Mismatch { tensor: "embed".into(), device: 0, file_crc: 1, device_crc: 2 };
        let verified = Verified { tensors: 3, bytes: 600, mismatches: vec![wrong] };
        let mut answer = Answer::of("load");
        add_verification(&mut answer, &[gpu], &verified, Duration::ZERO);
        assert!(answer.text.contains("1 tensor different"), "{}", answer.text);
        assert!(answer.text.contains("embed on sim:0: CRC-32 00000001"), "{}", answer.text);
        let failure = answer.failure.unwrap();
        assert_eq!((failure.exit, failure.code.as_str()), (1, "verify-mismatch"));
        assert_eq!(answer.json["verify"]["equal"], false);
        assert_eq!(answer.json["verify"]["mismatches"][0]["tensor"], "embed");
    }
}
