//! `beeline explain`: the plan between a file and a device, and where the bytes are now.

use beeline::core::plan::{Choice, DirectIo, Rejected};
use beeline::storage::{File, Operation, Plan, RouteShare, StorageRequest, StorageRoute};
use serde_json::{Map, Value, json};

use super::explain_ends::Name;
use super::{
    Context, device_json, explain_addresses, explain_collective, explain_ends, label, what,
};
use crate::failure::{Failure, reason_json};
use crate::flags::ExplainFlags;
use crate::output::{self, Answer};

/// Plans, and moves nothing.
///
/// # Errors
/// What opening the file or the device says.
pub(crate) fn run(flags: &ExplainFlags, context: &Context) -> Result<Answer, Failure> {
    if flags.addresses {
        return explain_addresses::run(&flags.file.to_string_lossy(), context);
    }
    if let Some(kind) = explain_collective::named(flags) {
        return explain_collective::run(kind, flags);
    }
    if flags.ranks.is_some() || flags.bytes.is_some() || flags.graph {
        let text = "--ranks, --bytes and --graph are for a plan of a collective";
        return Err(Failure::refused("usage", text)
            .hint("name one, as in `beeline explain allreduce --ranks 8 --bytes 64M`"));
    }
    let from = flags.file.to_str().and_then(Name::parse).filter(|_| !flags.file.exists());
    if let Some(from) = &from {
        let to = flags.device.as_deref().and_then(Name::parse);
        let to = to.ok_or_else(|| explain_ends::other_end(flags.device.as_deref()))?;
        explain_ends::refuse_file_flags(flags)?;
        return explain_ends::run(from, &to, flags.route.mode, flags.load.as_deref());
    }
    if flags.load.is_some() {
        let text =
            "--load gives the machine of a plan between memories, not between file and device";
        return Err(Failure::refused("usage", text).hint(explain_ends::HOW));
    }
    let file = File::open(&flags.file)?;
    let gpu = context.device(flags.device.as_deref())?;
    let info = gpu.info();
    let operation = if flags.write { Operation::Write } else { Operation::Read };
    let request = StorageRequest { operation, mode: flags.route.mode, route: flags.route.route };
    let plan = file.plan(&gpu, request);
    // What is in the page cache decides about reads only.
    let shares = (!flags.write).then(|| file.residency(&plan));

    let mut answer = Answer::of("explain");
    answer.line("file", &describe(&file));
    answer.line("device", &label(&info));
    let verb = if flags.write { "write" } else { "read" };
    let route = flags.route.route.map_or(String::new(), |route| format!(", route {route} only"));
    answer.line("request", &format!("{verb}, mode {}{route}", flags.route.mode));
    add_plan(&mut answer, &plan, operation);
    if let Some(shares) = &shares {
        add_shares(&mut answer, &file, shares);
    }
    answer.set("simulated", info.simulated);
    answer.set("device", device_json(&info));
    answer.set("file", file_json(&file));
    answer.set("operation", verb);
    answer.set("mode", flags.route.mode.as_str());
    answer.set("route", flags.route.route.map(StorageRoute::as_str));
    answer.set(
        "allowed",
        plan.choices.iter().map(|one| choice_json(one, operation)).collect::<Value>(),
    );
    answer.set(
        "rejected",
        plan.rejected.iter().map(|one| rejected_json(one, operation)).collect::<Value>(),
    );
    answer.set("residency", json!(shares.map(|all| residency_json(&file, &all))));
    Ok(answer)
}

fn describe(file: &File) -> String {
    let facts = file.facts();
    let direct = match &facts.direct {
        DirectIo::Aligned { offset, .. } => format!("direct I/O in blocks of {offset} bytes"),
        DirectIo::No(..) => "no direct I/O".to_owned(),
    };
    format!(
        "{}: {}, {}, {direct}",
        file.path().display(),
        output::bytes(facts.size),
        facts.file_system
    )
}

fn add_plan(answer: &mut Answer, plan: &Plan<StorageRoute>, operation: Operation) {
    for (place, choice) in plan.choices.iter().enumerate() {
        let number = place + 1;
        let route = choice.route;
        let text = format!("{route} [{}]: {}", choice.level.as_str(), what(route, operation));
        answer.line(&format!("allowed {number}"), &text);
        answer.line("", &format!("because {}", choice.why));
    }
    if plan.choices.is_empty() {
        answer.line("allowed", "no route: a transfer would fail with these reasons");
    }
    for rejected in &plan.rejected {
        answer.line("rejected", &format!("{}: {}", rejected.route, rejected.why));
        let remedy = rejected.why.code.remedy();
        if !remedy.is_empty() {
            answer.line("", &format!("try: {remedy}"));
        }
    }
}

fn add_shares(answer: &mut Answer, file: &File, shares: &[RouteShare]) {
    let resident = match resident_bytes(shares) {
        Some(bytes) => format!("{} of {} in memory", output::bytes(bytes), file.size()),
        None if shares.is_empty() => "not asked: there is nothing to move".to_owned(),
        None => "the kernel does not tell".to_owned(),
    };
    answer.line("page cache", &format!("{resident} (asking: {})", file.prober().as_str()));
    for share in shares {
        let bytes = output::bytes(share.bytes);
        let text = format!("{bytes} by {}, because {}", share.route, share.why.title());
        answer.line("now", &text);
    }
}

/// Bytes in the page cache over all shares; `None` where there is no share or one is not known.
fn resident_bytes(shares: &[RouteShare]) -> Option<u64> {
    if shares.is_empty() {
        return None;
    }
    shares.iter().map(|share| share.resident_bytes).sum()
}

fn file_json(file: &File) -> Value {
    let facts = file.facts();
    let mut object = Map::new();
    output::insert_path(&mut object, "path", file.path());
    object.insert("bytes".to_owned(), facts.size.into());
    object.insert("file_system".to_owned(), facts.file_system.clone().into());
    object.insert("memory_backed".to_owned(), facts.memory_backed.into());
    object.insert("on_nvme".to_owned(), json!(facts.on_nvme));
    let direct = match &facts.direct {
        DirectIo::Aligned { memory, offset } => {
            json!({ "memory_align": memory, "offset_align": offset })
        }
        DirectIo::No(..) => Value::Null,
    };
    object.insert("direct_io".to_owned(), direct);
    Value::Object(object)
}

fn choice_json(choice: &Choice<StorageRoute>, operation: Operation) -> Value {
    json!({
        "route": choice.route.as_str(),
        "what": what(choice.route, operation),
        "level": choice.level.as_str(),
        "reason": reason_json(&choice.why),
    })
}

fn rejected_json(rejected: &Rejected<StorageRoute>, operation: Operation) -> Value {
    json!({
        "route": rejected.route.as_str(),
        "what": what(rejected.route, operation),
        "reason": reason_json(&rejected.why),
    })
}

fn residency_json(file: &File, shares: &[RouteShare]) -> Value {
    let one = |share: &RouteShare| {
        json!({
            "route": share.route.as_str(),
            "why": share.why.as_str(),
            "why_text": share.why.title(),
            "bytes": share.bytes,
            "chunks": share.chunks,
            "resident_bytes": share.resident_bytes,
        })
    };
    json!({
        "asked_by": file.prober().as_str(),
        "resident_bytes": resident_bytes(shares),
        "by_route": shares.iter().map(one).collect::<Value>(),
    })
}
