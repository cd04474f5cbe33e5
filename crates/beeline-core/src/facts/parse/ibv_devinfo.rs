//! `ibv_devinfo` and `ibv_devinfo -v`: a block per device, a block per port.

use alloc::string::{String, ToString};

use super::super::machine::{Fact, Known, Machine, Origin};
use super::show_gids::{gid, version_of};
use super::text::{key_value, number};
use super::{Input, Outcome, ReadError};

/// Devices of one machine, ports of one device.
const DEVICES_MAX: usize = 1024;

pub(super) fn recognise(head: &str) -> bool {
    head.lines().take(50).any(|line| line.starts_with("hca_id:"))
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let (mut name, mut port): (Option<String>, Option<u8>) = (None, None);
    for (line_number, line) in input.lines() {
        let at = input.at(line_number);
        let Some((key, value)) = key_value(line) else { continue };
        match key {
            "hca_id" => {
                if value.is_empty() || machine.nics.len() >= DEVICES_MAX {
                    let message =
                        alloc::format!("hca_id without a name, or more than {DEVICES_MAX}");
                    return Err(ReadError::new(input, line_number, message));
                }
                machine.nic(value).rdma.learn(true, at);
                (name, port) = (Some(value.to_string()), None);
            }
            "port" => {
                port = value.parse().ok();
                if port.is_none() {
                    let message = alloc::format!("port \"{value}\" is not a number");
                    return Err(ReadError::new(input, line_number, message));
                }
                if let (Some(name), Some(port)) = (&name, port) {
                    machine.nic(name).ports.entry(port).or_default();
                }
            }
            _ => match (&name, port) {
                (Some(name), None) => device(machine, name, key, value, at),
                (Some(name), Some(port)) => port_field(machine, name, port, key, value, at),
                _ => {}
            },
        }
    }
    Ok(Outcome::default())
}

fn device(machine: &mut Machine, name: &str, key: &str, value: &str, at: Origin) {
    let nic = machine.nic(name);
    match key {
        "fw_ver" => nic.firmware.learn(value.to_string(), at),
        "vendor_part_id" => {
            if let Some(Ok(part)) = number(value).map(u32::try_from) {
                nic.part_id.learn(part, at);
            }
        }
        "node_guid" => nic.guid.learn(value.to_string(), at),
        "atomic_cap" | "exp_atomic_cap" => {
            // The extended capability is the one that decides; it comes second.
            if key == "exp_atomic_cap" {
                nic.atomic = None;
            }
            nic.atomic.learn(value.to_string(), at);
        }
        _ => {}
    }
}

/// `PORT_ACTIVE (4)` without prefix and number.
fn state(value: &str) -> String {
    let word = value.split_ascii_whitespace().next().unwrap_or("");
    word.strip_prefix("PORT_").unwrap_or(word).to_string()
}

fn port_field(machine: &mut Machine, name: &str, port: u8, key: &str, value: &str, at: Origin) {
    let record = machine.nic(name).ports.entry(port).or_default();
    let as_u32 = |text: &str| number(text).and_then(|value| u32::try_from(value).ok());
    match key {
        "state" => record.state.learn(state(value), at),
        "link_layer" => record.link_layer.learn(value.to_string(), at),
        "max_mtu" => {
            if let Some(mtu) = as_u32(value) {
                record.max_mtu.learn(mtu, at);
            }
        }
        "active_mtu" => {
            if let Some(mtu) = as_u32(value) {
                record.active_mtu.learn(mtu, at);
            }
        }
        "max_msg_sz" => {
            if let Some(bytes) = number(value) {
                record.max_msg_bytes.learn(bytes, at);
            }
        }
        _ => {
            // `GID[  3]: ::ffff:192.0.2.1, RoCE v2`: the key holds the index.
            let index = key.strip_prefix("GID[").and_then(|rest| rest.strip_suffix(']'));
            let index = index.and_then(|text| text.trim().parse::<u16>().ok());
            let Some(index) = index else { return };
            let (address, version) = value.split_once(',').unwrap_or((value, ""));
            if let Some(value) = gid(address.trim(), version_of(version)) {
                record.gids.entry(index).or_insert(Fact { value, origin: at });
            }
        }
    }
}
