//! Replacing personal values in a saved record: host names, addresses, serials, UUIDs and GUIDs.
//!
//! Placeholders are numbered in order of appearance, so two facts about one host stay recognisable as
//! such. Fields known to be personal are replaced whole; every other text is searched for shapes.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};

use serde_json::Value;

/// Fields whose whole value is personal, with the word for their placeholder.
const FIELDS: [(&str, &str); 5] =
    [("host", "host"), ("uuid", "uuid"), ("serial", "serial"), ("guid", "guid"), ("gid", "gid")];

/// Command-line options that matter here; the values of all others are dropped.
const CMDLINE_KEPT: [&str; 10] = [
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "pci",
    "iommu.passthrough",
    "iommu.strict",
    "nvidia.",
    "numa",
    "hugepages",
    "arm-smmu",
];

/// Fields that hold version numbers, which look like addresses but are none.
const VERSIONS: [&str; 8] =
    ["release", "version", "nvfs", "nvfs_minimum", "firmware", "kernel", "driver", "cuda"];

/// Names of settings whose values are kept; others keep their name only.
const SETTINGS_KEPT: [&str; 10] =
    ["NCCL_", "CUFILE_", "CUDA_", "UCX_", "MLX5_", "NVSHMEM_", "FI_", "KVIKIO_", "RDMAV_", "RCCL_"];

/// Replaces personal values everywhere in `value`, a serialised record.
pub fn redact(value: &mut Value) {
    let mut names = Names::default();
    collect(value, &mut names);
    replace(value, None, &mut names);
}

#[derive(Default)]
struct Names {
    seen: BTreeMap<String, String>,
    counts: BTreeMap<&'static str, u32>,
}

impl Names {
    fn placeholder(&mut self, word: &'static str, original: &str) -> String {
        if let Some(known) = self.seen.get(original) {
            return known.clone();
        }
        let count = self.counts.entry(word).or_insert(0);
        *count += 1;
        let name = alloc::format!("{word}-{count}");
        self.seen.insert(original.to_string(), name.clone());
        name
    }
}

/// Host names first, so that they are found inside other texts too.
fn collect(value: &Value, names: &mut Names) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                match inner {
                    Value::String(text) if key == "host" && !text.is_empty() => {
                        names.placeholder("host", text);
                    }
                    _ => collect(inner, names),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|inner| collect(inner, names)),
        _ => {}
    }
}

fn replace(value: &mut Value, field: Option<&str>, names: &mut Names) {
    match value {
        Value::String(text) => {
            *text = match field.and_then(|field| FIELDS.iter().find(|(name, _)| *name == field)) {
                Some(_) if text.is_empty() => String::new(),
                Some((_, word)) => names.placeholder(word, text),
                None if field == Some("cmdline") => cmdline(text),
                None if field.is_some_and(|field| VERSIONS.contains(&field)) => return,
                None => shapes(text, names),
            };
        }
        Value::Array(list) => list.iter_mut().for_each(|inner| replace(inner, field, names)),
        Value::Object(map) => {
            for (key, inner) in map.iter_mut() {
                let key = if key == "value" { field.unwrap_or("value") } else { key.as_str() };
                if key == "env" {
                    settings(inner);
                }
                if key == "sources" {
                    source_names(inner);
                }
                replace(inner, Some(key), names);
            }
        }
        _ => {}
    }
}

/// File names tell who and where: keep the kind and the position only.
fn source_names(list: &mut Value) {
    let Value::Array(list) = list else { return };
    for (number, source) in list.iter_mut().enumerate() {
        let kind = source.get("kind").and_then(Value::as_str).unwrap_or("source").to_string();
        if let Some(name) = source.get_mut("name") {
            *name = Value::String(alloc::format!("{kind}-{}", number + 1));
        }
    }
}

fn settings(env: &mut Value) {
    let Value::Object(env) = env else { return };
    for (name, entries) in env.iter_mut() {
        if SETTINGS_KEPT.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let Value::Array(entries) = entries else { continue };
        for entry in entries {
            if let Some(value) = entry.pointer_mut("/value/value") {
                *value = Value::String("(not saved)".to_string());
            }
        }
    }
}

fn cmdline(text: &str) -> String {
    let kept = text.split_ascii_whitespace().map(|word| {
        let keep = CMDLINE_KEPT.iter().any(|option| word.starts_with(option));
        if keep { word } else { word.split('=').next().unwrap_or("") }
    });
    let mut out = String::new();
    for word in kept {
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

/// Replaces known host names and everything that looks like an address or identifier.
fn shapes(text: &str, names: &mut Names) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !is_token(c)).unwrap_or(rest.len());
        let (token, after) = rest.split_at(end);
        if !token.is_empty() {
            match names.seen.get(token) {
                Some(known) => out.push_str(known),
                None => match personal_shape(token) {
                    Some(word) => out.push_str(&names.placeholder(word, token)),
                    None => out.push_str(token),
                },
            }
        }
        let next = after.chars().next().map_or(0, char::len_utf8);
        let (separator, tail) = after.split_at(next);
        out.push_str(separator);
        rest = tail;
    }
    out
}

fn is_token(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | ':' | '-' | '_')
}

fn personal_shape(token: &str) -> Option<&'static str> {
    let hex = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit());
    let parts = |separator: char| token.split(separator).count();
    if parts('.') == 4 && token.split('.').all(|part| part.parse::<u8>().is_ok()) {
        return Some("address");
    }
    let lengths = [8, 4, 4, 4, 12];
    let bare = token.strip_prefix("GPU-").unwrap_or(token);
    if bare.split('-').count() == 5
        && bare.split('-').zip(lengths).all(|(part, length)| part.len() == length && hex(part))
    {
        return Some("uuid");
    }
    let colons = token.matches(':').count();
    let hex_colons = token.split(':').all(|part| part.is_empty() || hex(part));
    if hex_colons && colons >= 3 {
        return Some("address");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn personal_values_are_replaced_and_technical_ones_are_not() {
        let mut value = json!({
            "events": [[{"event": "using-network", "host": "node17", "network": "IB"}, {}]],
            "gpus": [{"uuid": {"value": "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee", "origin": [0, 1]}}],
            "notes": ["node17 at 192.0.2.7 and fe80::1:2:3 with 0000:41:00.0 on driver 580.105.08"],
            "platform": {"cmdline": {"value": "root=UUID=1234 iommu=pt quiet"}},
            "sources": [{"kind": "nccl-log", "name": "/home/someone/x.log"}],
        });
        redact(&mut value);
        let text = value.to_string();
        for gone in ["node17", "aaaaaaaa", "192.0.2.7", "fe80", "1234", "someone"] {
            assert!(!text.contains(gone), "{gone} in {text}");
        }
        for kept in ["0000:41:00.0", "580.105.08", "iommu=pt", "host-1", "nccl-log-1"] {
            assert!(text.contains(kept), "{kept} not in {text}");
        }
    }
}
