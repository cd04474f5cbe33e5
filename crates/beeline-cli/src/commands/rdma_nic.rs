//! Which NIC `beeline rdma` uses, and how the NICs of the kernel's are shown.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use beeline::core::plan::{PortChoice, PortRefused};
use beeline::verbs::{IbvOptions, Nic, NicInfo, PortResolved, SoftOptions};
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::output;

/// `soft`, `auto`, or a NIC of the kernel's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The NIC in software.
    #[default]
    Soft,
    /// One of the kernel's where the way to the other side starts at one.
    Auto,
    /// The device, and its port where one is named.
    Kernel(String, Option<u8>),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "soft" => return Ok(Self::Soft),
            "auto" => return Ok(Self::Auto),
            _ => {}
        }
        let (name, port) = match text.split_once(':') {
            Some((name, port)) => {
                (name, Some(port.parse().map_err(|_| format!("'{port}' is no number of a port"))?))
            }
            None => (text, None),
        };
        if name.is_empty() || port == Some(0) {
            return Err("write soft, auto, NAME or NAME:PORT; ports count from 1".to_owned());
        }
        Ok(Self::Kernel(name.to_owned(), port))
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Soft => f.write_str("soft"),
            Self::Auto => f.write_str("auto"),
            Self::Kernel(name, None) => f.write_str(name),
            Self::Kernel(name, Some(port)) => write!(f, "{name}:{port}"),
        }
    }
}

impl Choice {
    /// The NIC for connections with `peer`; `soft` is how the one in software would be set up.
    ///
    /// # Errors
    /// What the library says; with `auto`, only what it says of the NIC in software. Options that only the
    /// NIC in software has are refused with one of the kernel's.
    pub(crate) fn open(&self, peer: IpAddr, soft: SoftOptions) -> Result<Nic, Failure> {
        let particular = soft.link.is_some() || soft.pcap.is_some();
        match self {
            Self::Kernel(..) if particular => {
                let text = format!("--link and --pcap are for the NIC in software, not for {self}");
                Err(Failure::refused("usage", text))
            }
            Self::Auto if particular => Ok(Nic::soft(soft)?),
            Self::Soft => Ok(Nic::soft(soft)?),
            Self::Kernel(name, port) => {
                let mut options = IbvOptions::new().device(name).peer(peer);
                if let Some(port) = port {
                    options = options.port(*port);
                }
                Ok(Nic::ibv(options)?)
            }
            Self::Auto => match Nic::ibv(IbvOptions::new().reaching(peer)) {
                Ok(nic) => Ok(nic),
                Err(error) => {
                    output::note(&format!("the NIC in software is used: {error}"));
                    Ok(Nic::soft(soft)?)
                }
            },
        }
    }
}

/// The port in use, as one line.
pub(crate) fn port_line(port: &PortResolved) -> String {
    let PortChoice { device, port, gid_index, why, .. } = &port.chosen;
    format!("{device} port {port}, GID {gid_index}: {why}")
}

pub(crate) fn port_json(port: &PortResolved) -> Value {
    let mut chosen = choice_json(&port.chosen);
    if let Some(entry) = chosen.as_object_mut() {
        entry.insert("device".to_owned(), port.chosen.device.clone().into());
        let rejected: Vec<Value> = port.rejected.iter().map(refused_json).collect();
        entry.insert("rejected".to_owned(), rejected.into());
    }
    chosen
}

/// The NICs as a table: a line for each port, with its best GID.
pub(crate) fn nic_table(nics: &[NicInfo]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["NIC", "PORT", "STATE", "MTU", "GID", ""]);
    for nic in nics {
        for port in &nic.ports {
            let best = nic.gids.iter().find(|one| one.port == port.number);
            let (gid, why) = match best {
                Some(one) => (one.gid_index.to_string(), one.why.clone()),
                None => ("-".to_owned(), why_none(nic, port.number)),
            };
            let soft = if nic.soft_roce { ", soft RoCE" } else { "" };
            table.add_row([
                output::printable(&nic.name),
                port.number.to_string(),
                port.state.to_owned(),
                port.mtu.to_string(),
                gid,
                format!("{why}{soft}"),
            ]);
        }
    }
    format!("{}\n", table.trim_fmt())
}

fn why_none(nic: &NicInfo, port: u8) -> String {
    let of = |one: &&PortRefused| one.port == port;
    nic.rejected.iter().find(of).map_or_else(String::new, |one| one.why.to_string())
}

pub(crate) fn nic_json(nic: &NicInfo) -> Value {
    let ports: Vec<Value> = nic
        .ports
        .iter()
        .map(|port| {
            json!({
                "port": port.number,
                "state": port.state,
                "link_layer": port.link_layer,
                "mtu": port.mtu,
            })
        })
        .collect();
    json!({
        "name": nic.name,
        "soft_roce": nic.soft_roce,
        "firmware": nic.firmware,
        "ports": ports,
        "gids": nic.gids.iter().map(choice_json).collect::<Vec<Value>>(),
        "rejected": nic.rejected.iter().map(refused_json).collect::<Vec<Value>>(),
    })
}

fn choice_json(choice: &PortChoice) -> Value {
    json!({ "port": choice.port, "gid_index": choice.gid_index, "why": choice.why })
}

fn refused_json(refused: &PortRefused) -> Value {
    json!({
        "device": refused.device,
        "port": refused.port,
        "gid_index": refused.gid_index,
        "code": refused.why.code.as_str(),
        "why": refused.why.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_is_named_by_device_and_port() {
        let kernel = |name: &str, port| Some(Choice::Kernel(name.to_owned(), port));
        let cases = [
            ("soft", Some(Choice::Soft)),
            ("auto", Some(Choice::Auto)),
            ("mlx5_0", kernel("mlx5_0", None)),
            ("mlx5_0:2", kernel("mlx5_0", Some(2))),
            ("mlx5_0:0", None),
            ("mlx5_0:x", None),
            ("mlx5_0:300", None),
            (":1", None),
            ("", None),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse::<Choice>().ok(), expected, "{text}");
            if let Some(choice) = expected {
                assert_eq!(choice.to_string(), text);
            }
        }
    }
}
