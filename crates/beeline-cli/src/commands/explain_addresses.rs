//! `beeline explain --addresses`: the names that one byte has, from the program to the NIC.

use std::sync::Arc;

use beeline::core::addr::ByteRange;
use beeline::memory::peer::{Address, Subject};
use beeline::memory::registration::Registration;
use beeline::verbs::HostMem;
use serde_json::{Value, json};

use super::Context;
use super::rdma_memory::Place;
use crate::failure::Failure;
use crate::output::Answer;

/// Registers so much of each kind of memory.
const BYTES: u64 = 256 << 10;

/// Registers a little memory of `place`, shows its addresses, and lets it go.
///
/// # Errors
/// What opening the device or registering its memory says.
pub(crate) fn run(place: &str, context: &Context) -> Result<Answer, Failure> {
    let place: Place = place.parse().map_err(|text: String| {
        Failure::refused("usage", format!("--addresses: '{place}': {text}"))
    })?;
    let subjects = match &place {
        Place::Host => {
            let mem = HostMem::anonymous(BYTES as usize);
            let mem = mem.map_err(|error| Failure::failed("io-failed", error.to_string()))?;
            // Pages that are not there yet have no address.
            mem.populate().map_err(|error| Failure::failed("io-failed", error.to_string()))?;
            vec![Subject::Host(Arc::new(mem))]
        }
        Place::Device(id) => {
            let gpu = context.device(Some(&id.to_string()))?;
            let buffer = gpu.alloc(BYTES)?;
            let mut subjects = vec![Subject::Gpu(buffer.clone()), Subject::Pinned(gpu.pin(BYTES)?)];
            subjects.extend(buffer.window().ok().map(Subject::Window));
            subjects
        }
    };
    let mut answer = Answer::of("explain");
    answer.line("memory", &format!("{BYTES} bytes of {place}, registered with a NIC in software"));
    let mut shown = Vec::new();
    for subject in &subjects {
        let range = ByteRange { start: 0, len: BYTES };
        let registration = Registration::new(subject, range, "beeline explain")?;
        answer.text.push_str(&format!("\n{registration}\n"));
        shown.push(to_json(&registration));
    }
    answer.set("addresses", shown);
    Ok(answer)
}

fn to_json(registration: &Registration) -> Value {
    let (Some(pages), Some(map)) = (registration.pages(), registration.map()) else {
        return Value::Null;
    };
    let runs = pages.runs.iter().zip(&map.runs).map(|(run, (iova, _))| {
        let (space, addr) = match run.addr {
            Address::Cpu(addr) => ("virtual", addr.to_string()),
            Address::Device(addr) => ("device", addr.to_string()),
        };
        json!({
            "space": space, "address": addr,
            "bus": run.bus.ok().map(|bus| bus.to_string()), "bus_unknown": run.bus.err(),
            "iova": iova.to_string(), "bytes": run.len,
        })
    });
    json!({
        "client": registration.client().name(), "page_bytes": pages.page_size,
        "runs": runs.collect::<Vec<_>>(), "why": map.why,
    })
}
