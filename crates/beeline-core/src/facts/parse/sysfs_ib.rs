//! A captured `/sys/class/infiniband` tree: one small file per fact, with or without a newline.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::super::machine::{Fact, Known, Machine, Origin, Source};
use super::show_gids::{gid, version_of};
use super::{Kind, ReadError, new_source};

/// Files of one tree.
const FILES_MAX: usize = 262_144;
/// Bytes of one file that count.
const FILE_BYTES_MAX: usize = 4096;
/// Snapshots of one counter.
const SNAPSHOTS_MAX: usize = 64;

/// Reads a captured `infiniband` class directory given as relative paths and contents, such as
/// `mlx5_0/ports/1/state`. Reading several captures of one machine keeps their counters in order.
pub fn read_tree(
    machine: &mut Machine,
    name: &str,
    files: &[(String, Vec<u8>)],
) -> Result<Kind, ReadError> {
    let refuse = |message: String| ReadError { name: name.to_string(), line: 0, message };
    if files.len() > FILES_MAX {
        return Err(refuse(alloc::format!("{} files, more than {FILES_MAX}", files.len())));
    }
    let source = new_source(machine).map_err(refuse)?;
    let mut draft = machine.clone();
    let mut known = 0usize;
    for (path, bytes) in files {
        let Ok(text) = core::str::from_utf8(bytes) else {
            let message = alloc::format!("{path} is not UTF-8 text");
            return Err(ReadError { name: name.to_string(), line: 1, message });
        };
        let text = text.get(..FILE_BYTES_MAX).unwrap_or(text).trim();
        known += usize::from(attribute(&mut draft, path, text, Origin { source, line: 0 }));
    }
    if known == 0 {
        let message =
            "no file of an infiniband class tree; expected DEVICE/ports/N/state and others";
        return Err(refuse(message.to_string()));
    }
    let lines = u32::try_from(files.len()).unwrap_or(u32::MAX);
    let kind = Kind::SysfsInfiniband;
    draft.sources.push(Source { kind, name: name.to_string(), lines, truncated: false });
    *machine = draft;
    Ok(kind)
}

/// Adds one file of the tree; false for files that say nothing here.
pub(crate) fn attribute(machine: &mut Machine, path: &str, text: &str, at: Origin) -> bool {
    let mut parts = path.split('/');
    let Some(device) = parts.next().filter(|name| !name.is_empty()) else { return false };
    let rest: Vec<&str> = parts.collect();
    match rest[..] {
        ["hca_type"] => machine.nic(device).model.learn(text.to_string(), at),
        ["fw_ver"] => machine.nic(device).firmware.learn(text.to_string(), at),
        ["node_guid"] => machine.nic(device).guid.learn(text.to_string(), at),
        ["ports", port, ref field @ ..] => {
            let Ok(port) = port.parse::<u8>() else { return false };
            return port_attribute(machine, device, port, field, text, at);
        }
        _ => return false,
    }
    machine.nic(device).rdma.learn(true, at);
    true
}

fn port_attribute(
    machine: &mut Machine,
    device: &str,
    port: u8,
    field: &[&str],
    text: &str,
    at: Origin,
) -> bool {
    let nic = machine.nic(device);
    nic.rdma.learn(true, at);
    let port = nic.ports.entry(port).or_default();
    match *field {
        // `4: ACTIVE`
        ["state"] => {
            let word = text.rsplit(':').next().unwrap_or(text).trim();
            port.state.learn(word.to_string(), at);
        }
        ["rate"] => port.rate.learn(text.to_string(), at),
        ["link_layer"] => port.link_layer.learn(text.to_string(), at),
        ["counters" | "hw_counters", name] => {
            let Ok(value) = text.parse::<u64>() else { return false };
            let list = port.counters.entry(name.to_string()).or_default();
            if list.len() < SNAPSHOTS_MAX {
                list.push(Fact { value, origin: at });
            }
        }
        ["gids", index] => {
            let Ok(index) = index.parse::<u16>() else { return false };
            let Some(value) = gid(text, version_of("")) else { return false };
            match port.gids.get_mut(&index) {
                Some(known) => {
                    known.value =
                        super::super::machine::Gid { version: known.value.version, ..value }
                }
                None => {
                    port.gids.insert(index, Fact { value, origin: at });
                }
            }
        }
        ["gid_attrs", "types", index] => {
            let Ok(index) = index.parse::<u16>() else { return false };
            let version = version_of(text);
            let empty = super::super::machine::Gid {
                class: super::super::machine::GidClass::Empty,
                version,
                gid: String::new(),
            };
            let entry = port.gids.entry(index).or_insert(Fact { value: empty, origin: at });
            entry.value.version = version;
        }
        _ => return false,
    }
    true
}
