//! `beeline devices`: what bytes can be moved to and from.

use beeline::gpu::{Gpu, Info};
use beeline::verbs::Nic;
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::rdma_nic::{nic_json, nic_table};
use super::{Context, device_json};
use crate::failure::Failure;
use crate::flags::DevicesFlags;
use crate::output::{self, Answer};

/// Lists the devices of this process. What one of them does not say is a warning, and missing in its line.
pub(crate) fn run(_flags: &DevicesFlags, _context: &Context) -> Result<Answer, Failure> {
    let mut answer = Answer::of("devices");
    let default = match Gpu::default_device() {
        Ok(gpu) => Some(gpu.id()),
        Err(error) => {
            output::warn(&format!("there is no default device: {error:#}"));
            answer.set("default_error", Failure::from(error).to_json());
            None
        }
    };
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["DEVICE", "NAME", "MEMORY", "FREE", ""]);
    let mut list: Vec<Value> = Vec::new();
    let mut any_simulated = false;
    for info in Gpu::list() {
        any_simulated |= info.simulated;
        // One device that does not answer is no reason to hide the others.
        let memory = Gpu::open(&info.id).and_then(|gpu| gpu.memory());
        let memory = memory.map_err(|error| output::warn(&format!("{}: {error:#}", info.id))).ok();
        let is_default = default.as_ref() == Some(&info.id);
        table.add_row([
            info.id.to_string(),
            output::printable(&info.name),
            memory.map_or_else(|| "-".to_owned(), |memory| gib(memory.total)),
            memory.map_or_else(|| "-".to_owned(), |memory| gib(memory.free)),
            remarks(&info, is_default),
        ]);
        let mut entry = device_json(&info);
        if let Some(entry) = entry.as_object_mut() {
            entry.insert("memory_bytes".to_owned(), memory.map(|memory| memory.total).into());
            entry.insert("free_bytes".to_owned(), memory.map(|memory| memory.free).into());
            entry.insert("default".to_owned(), is_default.into());
        }
        list.push(entry);
    }
    answer.text = format!("{}\n", table.trim_fmt());
    if list.is_empty() {
        answer.text = "no device\n".to_owned();
    }
    let nics = Nic::list().unwrap_or_else(|error| {
        output::warn(&format!("the NICs of the kernel's cannot be listed: {error:#}"));
        Vec::new()
    });
    if !nics.is_empty() {
        answer.text.push('\n');
        answer.text.push_str(&nic_table(&nics));
    }
    answer.set("nics", nics.iter().map(nic_json).collect::<Vec<Value>>());
    answer.set("default", json!(default.map(|id| id.to_string())));
    answer.set("devices", list);
    answer.set("simulated", any_simulated);
    Ok(answer)
}

fn remarks(info: &Info, is_default: bool) -> String {
    let mut words = Vec::new();
    if is_default {
        words.push("default".to_owned());
    }
    if info.simulated {
        words.push("simulated".to_owned());
    }
    if let Some(profile) = info.profile {
        words.push(format!("profile {profile}"));
    }
    words.join(", ")
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}
