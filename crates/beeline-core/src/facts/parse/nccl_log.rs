//! Statements of NCCL_DEBUG logs, of its network plugins and of nccl-tests.
//!
//! Source of the wording: the INFO and WARN calls of NCCL, RCCL and aws-ofi-nccl.

use alloc::string::{String, ToString};

use super::super::event::Event;
use super::super::machine::{Known, Machine, decimal_tenths};
use super::super::platform::{Setting, SettingFrom};
use super::scan::{Line, Table};
use super::text::{after, errno_of, number, number_after, signed_after, word_after};

pub(super) fn recognise(head: &str) -> bool {
    head.lines().take(400).any(|line| {
        line.contains(" NCCL INFO ")
            || line.contains(" NCCL WARN ")
            || line.contains(" NCCL TRACE ")
            || line.starts_with("# nThread ")
    })
}

pub(super) const PHRASES: &Table = &[
    ("NCCL version ", version),
    ("Using network ", using_network),
    ("GPU Direct RDMA Enabled for ", gdr),
    ("GPU Direct RDMA Disabled for ", gdr),
    ("GPU Direct RDMA (", gdr),
    ("NET/IB : No device found", no_device),
    (" via ", channel),
    (" nranks ", communicator),
    (" nRanks ", communicator),
    (" set by environment to ", variable),
    ("Attribute ", attribute),
    ("XML Import Channel : dev ", graph_dev),
    ("Could not find real path of ", real_path),
    ("collective mismatch error", mismatch),
    ("Got completion from peer ", completion),
    ("Got completion with error ", completion),
    ("Call to ibv_", verbs_call),
    ("dlvsym failed on ", optional_symbol),
    ("DMA-BUF is available on GPU device", dma_buf),
    ("disabling GDR", plugin_gdr),
    ("find any optimal provider", no_provider),
    (" :GPU/", path_table),
    (" :NET/", path_table),
    ("NVL[", system_link),
    (" coll channels", channels),
    ("# Avg bus bandwidth", bus_bandwidth),
    ("NET/IB : Using ", using_ib),
];

/// The host of a line: `host:pid:tid [dev] ..`, whatever a launcher put in front.
fn host(line: &str) -> &str {
    let Some(prefix) = line.find(" NCCL ").and_then(|end| line.get(..end)) else { return "" };
    prefix
        .split_ascii_whitespace()
        .find_map(|word| {
            let (rest, tid) = word.rsplit_once(':')?;
            let (name, pid) = rest.rsplit_once(':')?;
            let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            let name = name.rsplit([':', '>']).next().unwrap_or(name);
            (digits(tid) && digits(pid) && !name.is_empty()).then_some(name)
        })
        .unwrap_or("")
}

fn version(machine: &mut Machine, line: &Line<'_>) {
    if let Some(version) = word_after(line.text, "NCCL version ") {
        machine.event(Event::NcclVersion { version: version.to_string() }, line.at);
    }
}

fn using_network(machine: &mut Machine, line: &Line<'_>) {
    if let Some(network) = word_after(line.text, "Using network ") {
        let host = host(line.text).to_string();
        machine.event(Event::UsingNetwork { host, network: network.to_string() }, line.at);
    }
}

fn gdr(machine: &mut Machine, line: &Line<'_>) {
    let enabled = line.text.contains("nabled for ");
    let host = host(line.text).to_string();
    let Some(rest) = after(line.text, "abled for ") else { return };
    if rest.starts_with("HCA ") {
        let quoted = rest.split('\'').nth(1);
        let name = quoted.or_else(|| word_after(rest, "HCA ")).unwrap_or("");
        let head = line.text.split(" : GPU Direct").next().unwrap_or("");
        let network = after(head, "NET/").unwrap_or("").trim();
        let reason = after(rest, "(").and_then(|inner| inner.split(')').next()).unwrap_or("");
        let event = Event::GdrHca {
            host,
            network: network.to_string(),
            hca: name.to_string(),
            enabled,
            reason: reason.chars().take(100).collect(),
        };
        machine.event(event, line.at);
        return;
    }
    let values = (|| {
        let gpu = word_after(rest, "GPU ")?.to_string();
        let hca = word_after(rest, "HCA ")?.to_string();
        let distance = u32::try_from(number_after(rest, "(distance ")?).ok()?;
        let tail = after(rest, "(distance ")?;
        let limit = tail.split(['<', '>', '=']).next_back()?;
        Some((gpu, hca, distance, u32::try_from(number(limit)?).ok()?))
    })();
    if let Some((gpu, hca, distance, limit)) = values {
        machine.event(Event::GdrPair { host, gpu, hca, enabled, distance, limit }, line.at);
    }
}

fn no_device(machine: &mut Machine, line: &Line<'_>) {
    machine.event(Event::NoIbDevice { host: host(line.text).to_string() }, line.at);
}

fn channel(machine: &mut Machine, line: &Line<'_>) {
    if !line.text.contains("Channel ") || !line.text.contains("->") {
        return;
    }
    let Some(path) = word_after(line.text, " via ") else { return };
    let direction = if line.text.contains("[send]") {
        "send"
    } else if line.text.contains("[receive]") {
        "receive"
    } else {
        ""
    };
    let (transport, gdr) = match path.split_once("/GDRDMA") {
        Some((transport, _)) => (transport, true),
        None => (path, false),
    };
    let event = Event::Channel {
        host: host(line.text).to_string(),
        direction: direction.to_string(),
        transport: transport.to_string(),
        gdr,
    };
    machine.event(event, line.at);
}

fn communicator(machine: &mut Machine, line: &Line<'_>) {
    let ranks = number_after(line.text, " nranks ").or_else(|| number_after(line.text, " nRanks "));
    let nodes = number_after(line.text, " nNodes ").unwrap_or(0);
    if let (Some(Ok(ranks)), Ok(nodes)) = (ranks.map(u32::try_from), u32::try_from(nodes)) {
        machine.event(Event::Communicator { ranks, nodes }, line.at);
    }
}

fn variable(machine: &mut Machine, line: &Line<'_>) {
    let Some(at) = line.text.find(" set by environment to ") else { return };
    let name = line.text.get(..at).and_then(|head| head.split_ascii_whitespace().next_back());
    let Some(value) = after(line.text, " set by environment to ") else { return };
    let Some(name) = name.filter(|name| is_variable(name)) else { return };
    remember_variable(machine, line, name, value.trim().trim_end_matches('.'), SettingFrom::Log);
}

pub(super) fn is_variable(name: &str) -> bool {
    let shape = name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_');
    shape && name.len() <= 128 && name.bytes().next().is_some_and(|b| b.is_ascii_uppercase())
}

/// Settings kept of one variable; a variable that every rank prints is one setting.
const SETTINGS_MAX: usize = 16;

fn remember_variable(
    machine: &mut Machine,
    line: &Line<'_>,
    name: &str,
    value: &str,
    from: SettingFrom,
) {
    let value: String = value.chars().take(1024).collect();
    let setting = Setting { value, from };
    let list = machine.platform.env.entry(name.to_string()).or_default();
    if list.len() < SETTINGS_MAX && !list.iter().any(|known| known.value == setting) {
        list.push(super::super::machine::Fact { value: setting, origin: line.at });
    }
}

fn attribute(machine: &mut Machine, line: &Line<'_>) {
    let values = (|| {
        let attribute = word_after(line.text, "Attribute ")?;
        let element = word_after(line.text, " of node ")?;
        line.text.ends_with("not found").then(|| (attribute.to_string(), element.to_string()))
    })();
    if let Some((attribute, element)) = values {
        machine.event(Event::TopoAttributeMissing { attribute, element }, line.at);
    }
}

fn graph_dev(machine: &mut Machine, line: &Line<'_>) {
    let dev = number_after(line.text, "XML Import Channel : dev ");
    if let Some(Ok(dev)) = dev.map(u32::try_from) {
        machine.event(Event::GraphDevNotFound { dev }, line.at);
    }
}

fn real_path(machine: &mut Machine, line: &Line<'_>) {
    if let Some(path) = word_after(line.text, "Could not find real path of ") {
        let bus = path.trim_end_matches('/').rsplit('/').next().unwrap_or(path);
        machine.event(Event::TopoPathNotFound { bus: bus.to_string() }, line.at);
    }
}

fn mismatch(machine: &mut Machine, line: &Line<'_>) {
    let sizes = number_after(line.text, "local size ").zip(number_after(line.text, "remote size "));
    if let Some((local, remote)) = sizes {
        machine.event(Event::CollectiveMismatch { local, remote }, line.at);
    }
}

/// Three generations of wording: `error 12`, `status=12`, `status=IBV_WC_RETRY_EXC_ERR(12)`.
fn completion(machine: &mut Machine, line: &Line<'_>) {
    let status = number_after(line.text, "with error ")
        .or_else(|| number_after(line.text, "status="))
        .or_else(|| number_after(after(line.text, "status=")?, "("));
    let vendor = number_after(line.text, "vendor err ")
        .or_else(|| number_after(line.text, "vendor_err="))
        .unwrap_or(0);
    let (Some(Ok(status)), Ok(vendor)) = (status.map(u32::try_from), u32::try_from(vendor)) else {
        return;
    };
    let event = Event::CompletionError {
        host: host(line.text).to_string(),
        status,
        vendor,
        hca: word_after(line.text, " hca ").unwrap_or("").to_string(),
    };
    machine.event(event, line.at);
}

fn verbs_call(machine: &mut Machine, line: &Line<'_>) {
    let Some(call) = word_after(line.text, "Call to ") else { return };
    if !line.text.contains("failed") {
        return;
    }
    let numbered = signed_after(line.text, "errno ").and_then(|number| i32::try_from(number).ok());
    let event = Event::VerbsFailed {
        call: call.to_string(),
        errno: numbered.unwrap_or_else(|| errno_of(line.text)),
        address: 0,
        length: 0,
    };
    machine.event(event, line.at);
}

fn optional_symbol(machine: &mut Machine, line: &Line<'_>) {
    if let Some(symbol) = word_after(line.text, "dlvsym failed on ") {
        machine.event(Event::OptionalSymbolMissing { symbol: symbol.to_string() }, line.at);
    }
}

fn dma_buf(machine: &mut Machine, line: &Line<'_>) {
    machine.event(Event::DmaBufAvailable, line.at);
}

fn plugin_gdr(machine: &mut Machine, line: &Line<'_>) {
    if let Some(reason) = after(line.text, "NET/OFI ") {
        let reason = reason.chars().take(200).collect();
        machine.event(Event::PluginGdrDisabled { reason }, line.at);
    }
}

fn no_provider(machine: &mut Machine, line: &Line<'_>) {
    // "supporting GPUDirect RDMA" is the first of two attempts, not the verdict.
    if line.text.contains("NET/OFI") && !line.text.contains("supporting GPUDirect") {
        machine.event(Event::OfiNoProvider, line.at);
    }
}

/// `GPU/1B000 :GPU/1B000 (0/5000.0/LOC) ... NET/0 (3/12.0/PHB)`.
fn path_table(machine: &mut Machine, line: &Line<'_>) {
    let Some(row) = word_after(line.text, " GPU/") else { return };
    for part in line.text.split(" NET/").skip(1) {
        let kind = after(part, "(").and_then(|inner| inner.split(')').next());
        let Some(kind) = kind.and_then(|inner| inner.rsplit('/').next()) else { continue };
        let event = Event::PathToNet { gpu: row.to_string(), kind: kind.to_string() };
        machine.event(event, line.at);
    }
}

fn system_link(machine: &mut Machine, line: &Line<'_>) {
    let value = after(line.text, "NVL[").and_then(|rest| rest.split(']').next());
    if let Some(tenths_gb_s) = value.and_then(decimal_tenths) {
        machine.event(Event::SystemLink { kind: "NVL".to_string(), tenths_gb_s }, line.at);
    }
}

fn channels(machine: &mut Machine, line: &Line<'_>) {
    let before = line.text.split(" coll channels").next().unwrap_or("");
    let count = before.split_ascii_whitespace().next_back().and_then(|word| word.parse().ok());
    if let Some(count) = count {
        machine.event(Event::Channels { count }, line.at);
    }
}

fn bus_bandwidth(machine: &mut Machine, line: &Line<'_>) {
    let Some(text) = line.text.rsplit(':').next().map(str::trim) else { return };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let mut milli = whole.parse::<u64>().ok().and_then(|value| value.checked_mul(1000));
    for (digit, scale) in fraction.chars().zip([100u64, 10, 1]) {
        let digit = digit.to_digit(10).map_or(0, u64::from);
        milli = milli.and_then(|value| value.checked_add(digit * scale));
    }
    if let Some(milli_gb_s) = milli {
        machine.event(Event::AverageBusBandwidth { milli_gb_s }, line.at);
    }
}

/// `NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/IB [RO]; OOB ..`
fn using_ib(machine: &mut Machine, line: &Line<'_>) {
    let Some(list) = after(line.text, "NET/IB : Using ") else { return };
    let list = list.split(';').next().unwrap_or(list);
    for part in list.split_ascii_whitespace() {
        let Some((_, entry)) = part.split_once(']') else { continue };
        let Some((name, layer)) = entry.rsplit_once('/') else { continue };
        let (name, port) = name.rsplit_once(':').unwrap_or((name, "1"));
        let Ok(port) = port.parse::<u8>() else { continue };
        if name.is_empty() || machine.nics.len() >= 1024 && !machine.nics.contains_key(name) {
            continue;
        }
        let layer = if layer == "IB" { "InfiniBand" } else { "Ethernet" };
        let nic = machine.nic(name);
        nic.rdma.learn(true, line.at);
        nic.ports.entry(port).or_default().link_layer.learn(layer.to_string(), line.at);
    }
}
