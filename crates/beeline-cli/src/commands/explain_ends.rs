//! `beeline explain FROM TO` between memories: host, GPU, NIC, a GPU of another machine.
//!
//! The plan is over the facts that `doctor` judges, so both give one reason for one cause.

use std::path::Path;

use beeline::core::checks::Context as Facts;
use beeline::core::facts::{Known, Machine};
use beeline::core::plan::{self, DeviceRoute, End, Mode, Plan};
use serde_json::{Value, json};

use super::doctor;
use crate::failure::{Failure, reason_json};
use crate::flags::{ExplainFlags, FactsFlags};
use crate::output::Answer;

/// One end as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Host,
    Gpu(u32),
    Nic(String),
    Remote(String),
}

impl Name {
    /// `host`, `gpu:0` or `cuda:0`, `nic:mlx5_0`, `remote:mlx5_0` (a remote GPU through that NIC).
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let named = |prefix: &str| text.strip_prefix(prefix).filter(|name| !name.is_empty());
        if text == "host" {
            return Some(Self::Host);
        }
        // `gpu:` counts what a record names, which may have no CUDA; on a live machine both are one.
        if let Some(number) = named("gpu:").or_else(|| named("cuda:")) {
            return number.parse().ok().map(Self::Gpu);
        }
        named("nic:")
            .map(|name| Self::Nic(name.to_owned()))
            .or_else(|| named("remote:").map(|name| Self::Remote(name.to_owned())))
    }

    fn end<'m>(&self, machine: &'m Machine) -> Result<End<'m>, Failure> {
        let nic = |name: &str| {
            let known = machine.nics.get_key_value(name).map(|(key, _)| key.as_str());
            known.ok_or_else(|| {
                let all: Vec<&str> = machine.nics.keys().map(String::as_str).collect();
                let message = format!("no NIC {name}; known: {}", list(&all));
                Failure::refused("no-such-end", message)
            })
        };
        match self {
            Self::Host => Ok(End::Host),
            Self::Nic(name) => Ok(End::Nic(nic(name)?)),
            Self::Remote(name) => Ok(End::RemoteGpu(nic(name)?)),
            Self::Gpu(number) => {
                let by_number =
                    machine.gpus.iter().position(|gpu| gpu.index.known() == Some(number));
                // Without numbers the order of addresses is the driver's.
                let by_place = usize::try_from(*number).ok().filter(|place| {
                    *place < machine.gpus.len()
                        && machine.gpus.iter().all(|gpu| gpu.index.is_none())
                });
                by_number.or(by_place).map(End::Gpu).ok_or_else(|| {
                    let message = format!("no GPU {number}; {} are known", machine.gpus.len());
                    Failure::refused("no-such-end", message)
                })
            }
        }
    }
}

/// How to ask for a plan between memories.
pub(crate) const HOW: &str =
    "name two of host, gpu:N, nic:NAME, remote:NAME, as in `beeline explain gpu:0 nic:mlx5_0`";

/// The first end is a memory, and the second, `given`, is none or missing.
pub(crate) fn other_end(given: Option<&str>) -> Failure {
    let text = match given {
        Some(given) => format!("'{given}' is not the other end of a plan between memories"),
        None => "a plan between memories has two ends".to_owned(),
    };
    Failure::refused("usage", text).hint(HOW)
}

/// Refuses the flags that say something only about a file and a device.
///
/// # Errors
/// `usage` where one is given.
pub(crate) fn refuse_file_flags(flags: &ExplainFlags) -> Result<(), Failure> {
    let given = match (flags.write, flags.route.route) {
        (true, _) => "--write",
        (_, Some(_)) => "--route",
        (false, None) => return Ok(()),
    };
    let text = format!("{given} is for a plan between a file and a device, not between memories");
    Err(Failure::refused("usage", text).hint(format!("leave {given} out")))
}

fn list(names: &[&str]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Plans between two ends of this machine, or of a saved record.
///
/// # Errors
/// A record that cannot be read, an end that is not there.
pub(crate) fn run(
    from: &Name,
    to: &Name,
    mode: Mode,
    load: Option<&Path>,
) -> Result<Answer, Failure> {
    let facts = FactsFlags { load: load.map(Path::to_owned), ..FactsFlags::default() };
    let machine = doctor::machine(&facts)?;
    let context = Facts::new(&machine);
    let plan = plan::device(&context, from.end(&machine)?, to.end(&machine)?, mode);
    let mut answer = Answer::of("explain");
    text(&mut answer, &plan);
    answer.set("mode", mode.as_str());
    let allowed = plan.choices.iter().map(|choice| {
        json!({
            "route": choice.route.as_str(),
            "level": choice.level.as_str(),
            "reason": reason_json(&choice.why),
        })
    });
    answer.set("allowed", allowed.collect::<Value>());
    let rejected = plan.rejected.iter().map(|rejected| {
        json!({ "route": rejected.route.as_str(), "reason": reason_json(&rejected.why) })
    });
    answer.set("rejected", rejected.collect::<Value>());
    Ok(answer)
}

fn text(answer: &mut Answer, plan: &Plan<DeviceRoute>) {
    for (place, choice) in plan.choices.iter().enumerate() {
        let line = format!("{} [{}], because {}", choice.route, choice.level.as_str(), choice.why);
        answer.line(&format!("allowed {}", place + 1), &line);
    }
    if plan.choices.is_empty() {
        answer.line("allowed", "no route");
    }
    for rejected in &plan.rejected {
        answer.line("rejected", &format!("{}: {}", rejected.route, rejected.why));
        let remedy = rejected.why.code.remedy();
        if !remedy.is_empty() {
            answer.line("", &format!("try: {remedy}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline::core::facts::{json, read};

    #[test]
    fn ends_are_named_and_a_record_answers() {
        for (text, expected) in [
            ("host", Some(Name::Host)),
            ("gpu:1", Some(Name::Gpu(1))),
            ("cuda:0", Some(Name::Gpu(0))),
            ("nic:mlx5_0", Some(Name::Nic("mlx5_0".to_owned()))),
            ("remote:mlx5_0", Some(Name::Remote("mlx5_0".to_owned()))),
            ("gpu:", None),
            ("gpu:x", None),
            ("model.safetensors", None),
        ] {
            assert_eq!(Name::parse(text), expected, "{text}");
        }
        let mut machine = Machine::new();
        let listing =
            include_str!("../../../beeline-core/tests/fixtures/lspci-vvv-2gpu-gpp-001d.txt");
        read(&mut machine, "lspci", listing.as_bytes()).unwrap();
        machine.unify();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine.json");
        std::fs::write(&path, json::save(&machine, false).unwrap()).unwrap();
        let ask = |from, to| run(&from, &to, Mode::Auto, Some(&path));
        let answer = ask(Name::Gpu(0), Name::Gpu(1)).unwrap();
        assert!(answer.text.contains("rejected   pci-peer") && answer.text.contains("0x001d"));
        assert_eq!(answer.json["rejected"][1]["reason"]["code"], "p2p-acs-redirect");
        assert!(
            ask(Name::Gpu(7), Name::Host).unwrap_err().message.contains("no GPU 7; 2 are known")
        );
        assert!(
            ask(Name::Host, Name::Nic("x".to_owned())).unwrap_err().message.contains("no NIC x")
        );
    }
}
