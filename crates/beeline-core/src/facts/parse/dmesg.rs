//! Statements of the kernel log, as `dmesg`, `dmesg -T`, syslog or /dev/kmsg print it.

use alloc::string::ToString;

use super::super::bdf::Bdf;
use super::super::event::Event;
use super::super::machine::{Known, Machine};
use super::proc_files;
use super::scan::{Line, Table};
use super::text::{after, number_after, signed_after, word_after};

pub(super) fn recognise(head: &str) -> bool {
    let lines = head.lines().filter(|line| !line.trim().is_empty()).take(50);
    let (mut all, mut kernel) = (0u32, 0u32);
    for line in lines {
        all += 1;
        kernel += u32::from(is_kernel_line(line));
    }
    all > 0 && kernel * 2 > all
}

fn is_kernel_line(line: &str) -> bool {
    let bracketed = |text: &str| {
        text.strip_prefix('[').and_then(|rest| rest.split_once(']')).is_some_and(|(stamp, rest)| {
            let stamp = stamp.trim();
            let seconds = stamp.split_once('.').is_some_and(|(a, b)| {
                a.bytes().chain(b.bytes()).all(|c| c.is_ascii_digit()) && !a.is_empty()
            });
            let date = stamp.split_ascii_whitespace().count() == 5 && stamp.contains(':');
            (seconds || date) && rest.starts_with(' ')
        })
    };
    let kmsg = line.split_once(';').is_some_and(|(head, _)| {
        let fields = head.split(',');
        fields.clone().count() >= 4
            && fields.take(3).all(|f| !f.is_empty() && f.bytes().all(|c| c.is_ascii_digit()))
    });
    let leveled = line.strip_prefix('<').and_then(|rest| rest.split_once('>'));
    // `dmesg -x` puts the facility in front, `--time-format iso` a date.
    let decoded = line.split_once(": [").is_some_and(|(head, rest)| {
        let facility = head.split(':').next().unwrap_or("").trim();
        matches!(facility, "kern" | "user" | "daemon" | "syslog") && rest.contains(']')
    });
    let iso = line.split_once(' ').is_some_and(|(stamp, _)| {
        let date = stamp.bytes().take(10).filter(|b| *b == b'-').count() == 2;
        date && stamp.contains('T') && stamp.contains(',') && stamp.contains('+')
    });
    bracketed(line)
        || decoded
        || iso
        || kmsg
        || leveled.is_some_and(|(level, rest)| level.parse::<u16>().is_ok() && bracketed(rest))
        || line.contains(" kernel: ")
}

pub(super) const PHRASES: &Table = &[
    ("IO_PAGE_FAULT", amd_fault),
    ("DMAR: [DMA ", intel_fault),
    ("DMAR:[DMA ", intel_fault),
    ("arm-smmu-v3", arm_fault),
    ("Unknown symbol ", unknown_symbol),
    ("disagrees about version of symbol ", symbol_version),
    ("no symbol version for ", no_symbol_version),
    ("detected invalid context", invalid_context),
    ("address or length are not aligned", unaligned),
    ("nvidia_p2p_get_pages(", gdrdrv_pin),
    ("NVRM: Xid (PCI:", xid),
    ("iommu: Default domain type: ", default_domain),
    ("DMAR: IOMMU enabled", iommu_on),
    ("AMD-Vi: Interrupt remapping enabled", iommu_on),
    ("AMD-Vi: AMD IOMMUv2", iommu_on),
    ("Linux version ", linux_version),
    ("Command line: ", command_line),
    ("Hypervisor detected: ", hypervisor),
    ("Kernel Module", nvrm_version),
    ("smpboot: CPU0: ", cpu),
];

fn fault(machine: &mut Machine, line: &Line<'_>, bdf: &str, driver: &str, write: Option<bool>) {
    if let Some(bdf) = Bdf::parse(bdf) {
        let driver = driver.to_string();
        machine.event(Event::IommuFault { bdf, driver, write }, line.at);
    }
}

/// `nvidia 0000:07:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x3 address=0x80 flags=0x0020]`,
/// older: `AMD-Vi: Event logged [IO_PAGE_FAULT device=07:00.0 domain=..`.
fn amd_fault(machine: &mut Machine, line: &Line<'_>) {
    // Bit 5 of the flags is RW: set for a write (AMD IOMMU specification, 2.5.3).
    let write = number_after(line.text, "flags=").map(|flags| flags & 0x20 != 0);
    if let Some(device) = word_after(line.text, "device=") {
        return fault(machine, line, device, "", write);
    }
    let head = line.text.split(": AMD-Vi:").next().unwrap_or("");
    let mut words = head.split_ascii_whitespace().rev();
    let bdf = words.next().unwrap_or("");
    let driver = words.next().unwrap_or("");
    fault(machine, line, bdf, driver.trim_end_matches(':'), write);
}

/// `DMAR: [DMA Write NO_PASID] Request device [07:00.0] fault addr 0x80000000`.
fn intel_fault(machine: &mut Machine, line: &Line<'_>) {
    let write = if line.text.contains("[DMA Write") {
        Some(true)
    } else if line.text.contains("[DMA Read") {
        Some(false)
    } else {
        None
    };
    let device =
        word_after(line.text, "Request device [").or_else(|| word_after(line.text, "device ["));
    if let Some(device) = device {
        fault(machine, line, device, "", write);
    }
}

/// `arm-smmu-v3 ..: event: F_TRANSLATION client: 0009:01:00.0 sid: .. [Write]` of newer kernels; older
/// ones print numbers only, from which no device can be named.
fn arm_fault(machine: &mut Machine, line: &Line<'_>) {
    if let Some(client) = word_after(line.text, "client: ") {
        fault(machine, line, client, "", None);
    }
}

/// The word before `what`, without its colon: the module that speaks.
fn speaker<'a>(line: &'a str, what: &str) -> &'a str {
    let head = line.split(what).next().unwrap_or("");
    head.split_ascii_whitespace().next_back().unwrap_or("").trim_end_matches(':')
}

fn unknown_symbol(machine: &mut Machine, line: &Line<'_>) {
    let module = speaker(line.text, "Unknown symbol ").to_string();
    let Some(symbol) = word_after(line.text, "Unknown symbol ") else { return };
    let err = signed_after(line.text, "(err ").and_then(|err| i32::try_from(err).ok()).unwrap_or(0);
    machine.event(Event::UnknownSymbol { module, symbol: symbol.to_string(), err }, line.at);
}

fn symbol_version(machine: &mut Machine, line: &Line<'_>) {
    let module = speaker(line.text, "disagrees about").to_string();
    let Some(symbol) = word_after(line.text, "version of symbol ") else { return };
    machine.event(Event::SymbolVersion { module, symbol: symbol.to_string() }, line.at);
}

fn no_symbol_version(machine: &mut Machine, line: &Line<'_>) {
    let module = speaker(line.text, "no symbol version").to_string();
    let Some(symbol) = word_after(line.text, "no symbol version for ") else { return };
    machine.event(Event::NoSymbolVersion { module, symbol: symbol.to_string() }, line.at);
}

fn invalid_context(machine: &mut Machine, line: &Line<'_>) {
    if line.text.contains("peermem") || line.text.contains("nv_get_p2p_free_callback") {
        machine.event(Event::PeermemInvalidContext, line.at);
    }
}

fn unaligned(machine: &mut Machine, line: &Line<'_>) {
    if let Some(length) = number_after(line.text, "length=") {
        let address = number_after(line.text, "address=").unwrap_or(0);
        machine.event(Event::PinUnaligned { length, address_offset: address & 0xffff }, line.at);
    }
}

fn gdrdrv_pin(machine: &mut Machine, line: &Line<'_>) {
    let values = number_after(line.text, "len=").zip(signed_after(line.text, "ret = "));
    if let Some((length, Ok(ret))) = values.map(|(length, ret)| (length, i32::try_from(ret))) {
        machine.event(Event::GdrdrvPinFailed { length, ret }, line.at);
    }
}

fn xid(machine: &mut Machine, line: &Line<'_>) {
    let values = (|| {
        let bdf = Bdf::parse(word_after(line.text, "(PCI:")?)?;
        let xid = u32::try_from(number_after(line.text, "): ")?).ok()?;
        Some((bdf, xid))
    })();
    if let Some((bdf, xid)) = values {
        machine.event(Event::Xid { bdf, xid }, line.at);
    }
}

fn default_domain(machine: &mut Machine, line: &Line<'_>) {
    match word_after(line.text, "Default domain type: ") {
        Some("Translated") => machine.platform.iommu_translated.learn(true, line.at),
        Some("Passthrough") => machine.platform.iommu_translated.learn(false, line.at),
        _ => {}
    }
}

fn iommu_on(machine: &mut Machine, line: &Line<'_>) {
    machine.platform.iommu_on.learn(true, line.at);
}

fn linux_version(machine: &mut Machine, line: &Line<'_>) {
    if let Some(version) = word_after(line.text, "Linux version ") {
        machine.platform.kernel.learn(version.to_string(), line.at);
    }
}

fn command_line(machine: &mut Machine, line: &Line<'_>) {
    if let Some(text) = after(line.text, "Command line: ") {
        proc_files::learn_cmdline(machine, text, line.at);
    }
}

fn hypervisor(machine: &mut Machine, line: &Line<'_>) {
    if let Some(name) = after(line.text, "Hypervisor detected: ") {
        machine.platform.hypervisor.learn(name.trim().to_string(), line.at);
    }
}

fn nvrm_version(machine: &mut Machine, line: &Line<'_>) {
    if line.text.contains("NVIDIA UNIX") {
        proc_files::learn_driver(machine, line.text, line.at);
    }
}

fn cpu(machine: &mut Machine, line: &Line<'_>) {
    let vendor = if line.text.contains("AMD") {
        "AuthenticAMD"
    } else if line.text.contains("Intel") {
        "GenuineIntel"
    } else {
        return;
    };
    machine.platform.cpu_vendor.learn(vendor.to_string(), line.at);
}
