//! `beeline explain allreduce --ranks N --bytes B`: algorithm, path of every pair, predicted time.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use beeline::collective::{Call, Collective, DataType, Settings};
use beeline::core::checks::Context as Facts;
use beeline::core::collective::plan::{Link, Pair, Planned, Ranks, pairs, plan, ranks, time};
use beeline::core::facts::Machine;
use beeline::core::plan::Mode;
use beeline::core::reason::{Code, Reason};
use beeline::core::topology::{Answer as Distance, Point, Topology};
use serde_json::{Value, json};

use super::doctor;
use crate::failure::{Failure, reason_json};
use crate::flags::{ExplainFlags, FactsFlags};
use crate::output::{self, Answer};

/// Most ranks that a communicator has.
const RANKS_MAX: u32 = beeline::collective::RANKS_MAX;

/// The collective that the first argument names, where it is one and no file of that name is there.
pub(crate) fn named(flags: &ExplainFlags) -> Option<Collective> {
    let name = flags.file.to_str().filter(|_| !flags.file.exists())?;
    Collective::named(name)
}

/// Plans a call as a communicator of this process would carry it out, and moves nothing.
///
/// # Errors
/// Numbers that make no call, a mode that communicators do not have, a record that cannot be read or has too few GPUs.
pub(crate) fn run(kind: Collective, flags: &ExplainFlags) -> Result<Answer, Failure> {
    let staged_by = staged_by(flags.route.mode, Settings::from_env().staged)?;
    explain(kind, flags, staged_by)
}

/// Who wants calls to go through host memory, if somebody does.
fn staged_by(mode: Mode, by_environment: bool) -> Result<Option<&'static str>, Failure> {
    match mode {
        Mode::Require => {
            let text = "no communicator requires direct links: where devices do not reach each other, calls go through \
                        host memory";
            Err(Failure::refused("usage", text)
                .hint("leave --mode require out; what is allowed first is what would be done"))
        }
        Mode::Software => Ok(Some("--mode software")),
        Mode::Auto => Ok(by_environment.then_some("BEELINE_COMM_PATH=staged")),
    }
}

fn explain(
    kind: Collective,
    flags: &ExplainFlags,
    staged_by: Option<&str>,
) -> Result<Answer, Failure> {
    let usage = |text: String| Failure::refused("usage", text);
    if flags.device.is_some() || flags.write || flags.route.route.is_some() {
        let text = "DEVICE, --write and --route are for a plan between a file and a device";
        return Err(usage(text.to_owned()));
    }
    let count = flags.ranks.ok_or_else(|| {
        usage(format!("how many ranks take part in the {kind}?"))
            .hint("add --ranks N and --bytes B")
    })?;
    if !(1..=RANKS_MAX).contains(&count) {
        return Err(usage(format!("{count} ranks; a communicator has 1 to {RANKS_MAX}")));
    }
    let call = Call::new(kind, flags.bytes.unwrap_or(0), DataType::U8);
    call.check(count, None).map_err(|error| usage(error.to_string()))?;
    let machine = machine(flags.load.as_deref())?;
    let (joined, all) = joined(&machine, count, flags.load.is_some())?;
    let joined = Ranks { graph: flags.graph, ..joined };
    // No link is used then, whatever there is.
    let used = staged_by.map(|who| Link::None(Reason::with(Code::HostMemoryAsked, who)));
    let slowest = used.unwrap_or_else(|| joined.slowest.clone());
    let planned = plan(&call, &Ranks { slowest, ..joined.clone() });
    let mut answer = Answer::of("explain");
    let bytes = output::bytes(call.count);
    answer.line("call", &format!("{kind} of {bytes} a part, {count} ranks"));
    say_paths(&mut answer, &machine, &all, &joined);
    if let Some(who) = staged_by {
        answer.line("through", &format!("host memory, because of {who}"));
    }
    say_plan(&mut answer, &planned);
    answer.set("collective", kind.name());
    answer.set("ranks", count);
    answer.set("bytes", call.count);
    answer.set("graph", flags.graph);
    answer.set("mode", flags.route.mode.as_str());
    answer.set("staged_by", staged_by);
    answer.set("assumed_links", all.is_empty() && count > 1);
    answer.set("slowest_link", link_json(&joined.slowest));
    answer.set("pairs", all.iter().map(pair_json).collect::<Value>());
    answer.set("allowed", allowed_json(&planned));
    let rejected = planned.plan.rejected.iter().map(|one| {
        json!({ "algorithm": one.route.name(), "what": one.route.describe(), "reason": reason_json(&one.why) })
    });
    answer.set("rejected", rejected.collect::<Value>());
    Ok(answer)
}

/// A record that `doctor --save` wrote, or a file that people have (NCCL's topology XML, `nvidia-smi topo -m`).
fn machine(load: Option<&Path>) -> Result<Machine, Failure> {
    let mut facts = FactsFlags::default();
    if let Some(path) = load {
        let saved = path.is_file() && starts_with_a_brace(path);
        if saved { facts.load = Some(path.to_owned()) } else { facts.files.push(path.to_owned()) }
    }
    doctor::machine(&facts)
}

/// Whether a file is a saved machine. No pipe is asked: what is read of it is gone.
fn starts_with_a_brace(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(4096).read_to_end(&mut start));
    read.is_ok() && start.trim_ascii_start().first() == Some(&b'{')
}

/// The ranks on the first GPUs of the machine; on one without so many, links are taken as they were where the
/// predictions were measured.
fn joined(machine: &Machine, count: u32, given: bool) -> Result<(Ranks, Vec<Pair>), Failure> {
    let gpus = machine.gpus.len();
    if gpus >= count as usize {
        let all = pairs(&Facts::new(machine), &Topology::new(machine), count as usize);
        return Ok((ranks(count, &all), all));
    }
    if given {
        let text = format!("the file has {gpus} GPUs, fewer than {count} ranks");
        return Err(Failure::refused("no-such-end", text));
    }
    Ok((Ranks::like_h200(count), Vec::new()))
}

fn say_paths(answer: &mut Answer, machine: &Machine, all: &[Pair], joined: &Ranks) {
    if all.is_empty() {
        if joined.count > 1 {
            let text =
                "this machine has fewer GPUs, so links are assumed as of H200 with 18 NVLinks each";
            answer.line("paths", text);
        }
        return;
    }
    let topology = Topology::new(machine);
    for pair in all {
        let distance = match &pair.distance {
            Distance::Known(distance) => distance.to_string(),
            Distance::Unknown { .. } => "distance unknown".to_owned(),
        };
        let (a, b) = (topology.label(Point::Gpu(pair.a)), topology.label(Point::Gpu(pair.b)));
        answer.line("path", &format!("{a} - {b}: {distance}, {}", link_words(&pair.link)));
    }
    answer.line("slowest", &link_words(&joined.slowest));
}

fn say_plan(answer: &mut Answer, planned: &Planned) {
    for (place, (choice, nanoseconds)) in
        planned.plan.choices.iter().zip(&planned.predicted_ns).enumerate()
    {
        let text = format!("{}: {}", choice.route, choice.route.describe());
        answer.line(&format!("allowed {}", place + 1), &text);
        answer.line("", &format!("predicted {}, because {}", time(*nanoseconds), choice.why));
    }
    for rejected in &planned.plan.rejected {
        answer.line("rejected", &format!("{}: {}", rejected.route, rejected.why));
        let remedy = rejected.why.code.remedy();
        if !remedy.is_empty() {
            answer.line("", &format!("try: {remedy}"));
        }
    }
}

fn link_words(link: &Link) -> String {
    match link {
        Link::Fabric { mb_per_s } => format!("GPU links, {} GB/s each way", mb_per_s / 1000),
        Link::Pci { mb_per_s } => {
            format!("peer access over PCI, {} GB/s each way", mb_per_s / 1000)
        }
        Link::Same => "one device".to_owned(),
        Link::None(why) => format!("no peer access: {why}"),
    }
}

fn link_json(link: &Link) -> Value {
    match link {
        Link::Fabric { mb_per_s } => json!({ "kind": "gpu-link", "mb_per_s": mb_per_s }),
        Link::Pci { mb_per_s } => json!({ "kind": "pci-peer", "mb_per_s": mb_per_s }),
        Link::Same => json!({ "kind": "same-device" }),
        Link::None(why) => json!({ "kind": "none", "reason": reason_json(why) }),
    }
}

fn pair_json(pair: &Pair) -> Value {
    json!({
        "gpus": [pair.a, pair.b],
        "distance": pair.distance.known().map(|distance| distance.to_string()),
        "link": link_json(&pair.link),
    })
}

fn allowed_json(planned: &Planned) -> Value {
    let choices = planned.plan.choices.iter().zip(&planned.predicted_ns);
    choices
        .map(|(choice, nanoseconds)| {
            json!({
                "algorithm": choice.route.name(),
                "what": choice.route.describe(),
                "level": choice.level.as_str(),
                "predicted_ns": nanoseconds,
                "reason": reason_json(&choice.why),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::Command;
    use clap::Parser as _;

    fn ask(args: &[&str]) -> Result<Answer, Failure> {
        ask_where(args, false)
    }

    /// Where the environment asks for host memory, or does not.
    fn ask_where(args: &[&str], by_environment: bool) -> Result<Answer, Failure> {
        let words = ["beeline", "explain"].iter().chain(args);
        let cli = crate::flags::Cli::try_parse_from(words).unwrap();
        let Command::Explain(flags) = cli.command else { panic!("{args:?}") };
        let staged_by = staged_by(flags.route.mode, by_environment)?;
        explain(named(&flags).unwrap(), &flags, staged_by)
    }

    #[test]
    fn a_plan_names_algorithms_times_and_reasons() {
        let answer = ask(&["allreduce", "--ranks", "2", "--bytes", "8M"]).unwrap();
        for part in
            ["one-shot", "predicted", "local: the algorithm does not do this call", "low-latency"]
        {
            assert!(answer.text.contains(part), "{}", answer.text);
        }
        assert_eq!(answer.json["bytes"], 8 << 20);
        let all = answer.json["allowed"].as_array().unwrap().len()
            + answer.json["rejected"].as_array().unwrap().len();
        assert_eq!(all, 8, "every algorithm is there");
        assert_eq!(
            ask(&["all-gather", "--ranks", "1"]).unwrap().json["allowed"][0]["algorithm"],
            "local"
        );
    }

    #[test]
    fn a_topology_file_decides() {
        let listing =
            include_str!("../../../beeline-core/tests/fixtures/lspci-vvv-2gpu-gpp-001d.txt");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lspci.txt");
        std::fs::write(&path, listing).unwrap();
        let load = path.to_str().unwrap();
        let answer = ask(&["allreduce", "--ranks", "2", "--bytes", "1M", "--load", load]).unwrap();
        // Redirecting ports between the two: only the way through host memory is left.
        assert_eq!(answer.json["slowest_link"]["reason"]["code"], "p2p-acs-redirect");
        assert_eq!(answer.json["allowed"][0]["algorithm"], "staged");
        assert_eq!(answer.json["pairs"].as_array().unwrap().len(), 1);
        let error = ask(&["allreduce", "--ranks", "3", "--load", load]).unwrap_err();
        assert!(error.message.contains("2 GPUs"), "{}", error.message);
    }

    /// As a communicator with these settings does it: nothing but host memory.
    #[test]
    fn the_mode_and_the_environment_decide() {
        let words = ["allreduce", "--ranks", "2", "--bytes", "1M"];
        let soft = ask(&[&words[..], &["--mode", "software"]].concat()).unwrap();
        for (answer, who) in [
            (soft, "--mode software"),
            (ask_where(&words, true).unwrap(), "BEELINE_COMM_PATH=staged"),
        ] {
            let allowed = answer.json["allowed"].as_array().unwrap();
            assert_eq!(allowed.len(), 1, "{}", answer.text);
            assert_eq!(allowed[0]["algorithm"], "staged");
            let rejected = answer.json["rejected"].as_array().unwrap();
            let asked = |one: &&Value| one["reason"]["code"] == "host-memory-asked";
            let detail = &rejected.iter().find(asked).unwrap()["reason"]["detail"];
            assert_eq!((detail, &answer.json["staged_by"]), (&json!(who), &json!(who)));
            assert!(answer.text.contains(&format!("because of {who}")), "{}", answer.text);
        }
        assert_eq!(ask(&words).unwrap().json["staged_by"], Value::Null);
        assert_eq!(ask(&[&words[..], &["--mode", "auto"]].concat()).unwrap().json["mode"], "auto");
        // A single rank has nobody to reach.
        let alone = ask(&["allreduce", "--ranks", "1", "--mode", "software"]).unwrap();
        assert_eq!(alone.json["allowed"][0]["algorithm"], "local");
        assert_eq!(staged_by(Mode::Software, true).unwrap(), Some("--mode software"));
    }

    #[test]
    fn what_makes_no_call_is_refused() {
        for args in [
            &["allreduce"][..],
            &["allreduce", "--ranks", "0"],
            &["allreduce", "--ranks", "257"],
            &["allgather", "--ranks", "4", "--bytes", "4194304T"],
            &["broadcast", "--ranks", "2", "--write"],
            &["broadcast", "--ranks", "2", "--mode", "require"],
        ] {
            assert_eq!(ask(args).unwrap_err().code, "usage", "{args:?}");
        }
    }
}
