//! What every check looks at: the record, the topology, and conclusions that several checks share.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::transfers::Transfer;
use crate::facts::platform::{Setting, SettingFrom};
use crate::facts::{
    Bdf, Distance, Event, Fact, IommuType, Kind, Known, Machine, Origin, P2pStatus, Seen,
};
use crate::topology::{Point, Topology};

/// What is known about address translation for devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Iommu {
    /// No IOMMU is on.
    Off(String),
    /// On, addresses pass unchanged.
    Identity(String),
    /// On, addresses are translated.
    Translated(String),
    /// The vendor's default is to translate, and nothing seen says otherwise.
    LikelyTranslated(String),
    /// Nothing seen decides.
    Unknown,
}

/// One machine as the checks see it.
pub struct Context<'m> {
    /// The record.
    pub machine: &'m Machine,
    /// Its topology.
    pub topology: Topology<'m>,
    /// Address translation.
    pub iommu: Iommu,
    /// What a probe measured; empty without one.
    pub transfers: &'m [Transfer],
}

impl<'m> Context<'m> {
    /// Prepares a machine for the checks.
    pub fn new(machine: &'m Machine) -> Self {
        Self::with_transfers(machine, &[])
    }

    /// [`Self::new`] with what a probe of the same machine measured.
    pub fn with_transfers(machine: &'m Machine, transfers: &'m [Transfer]) -> Self {
        Self { machine, topology: Topology::new(machine), iommu: iommu(machine), transfers }
    }

    /// Events that `wanted` accepts, with what it makes of them.
    pub(super) fn events<T>(&self, wanted: impl Fn(&'m Event) -> Option<T>) -> Vec<(T, &'m Seen)> {
        let events = self.machine.events.iter();
        events.filter_map(|(event, seen)| Some((wanted(event)?, seen))).collect()
    }

    /// The first event that `wanted` accepts.
    pub(super) fn event<T>(
        &self,
        wanted: impl Fn(&'m Event) -> Option<T>,
    ) -> Option<(T, &'m Seen)> {
        self.machine.events.iter().find_map(|(event, seen)| Some((wanted(event)?, seen)))
    }

    /// Whether exactly this event was seen, and when.
    pub(super) fn seen(&self, event: &Event) -> Option<&'m Seen> {
        self.machine.events.get(event)
    }

    /// Evidence text.
    pub(super) fn cite(&self, origin: Origin) -> String {
        self.machine.cite(origin)
    }

    /// Evidence text of an event with its count.
    pub(super) fn cite_seen(&self, seen: &Seen) -> String {
        match seen.count {
            1 => self.cite(seen.first),
            count => alloc::format!("{} ({count} times)", self.cite(seen.first)),
        }
    }

    /// A setting of the environment or a configuration file.
    pub(super) fn setting(&self, name: &str) -> Option<&'m Fact<Setting>> {
        self.machine.platform.env.get(name)?.last()
    }

    /// Where a setting comes from, in words.
    pub(super) fn setting_source(&self, fact: &Fact<Setting>) -> String {
        let place = self.cite(fact.origin);
        match fact.value.from {
            SettingFrom::File => alloc::format!("nccl.conf ({place})"),
            SettingFrom::Environment => alloc::format!("the environment ({place})"),
            SettingFrom::Log => {
                alloc::format!("the environment or /etc/nccl.conf, the log does not say ({place})")
            }
        }
    }

    /// `GPU0-GPU1`, with addresses where they are known.
    pub(super) fn pair(&self, a: usize, b: usize) -> String {
        let (a, b) = (self.topology.label(Point::Gpu(a)), self.topology.label(Point::Gpu(b)));
        alloc::format!("{a} - {b}")
    }

    /// Whether the pair is joined by links beside PCI.
    pub(super) fn linked(&self, a: usize, b: usize) -> bool {
        let distance = self.topology.distance(Point::Gpu(a), Point::Gpu(b)).known();
        matches!(distance, Some(Distance::Nv(_) | Distance::C2c))
    }

    /// What the driver says about peer access between two GPUs: worst of both directions.
    pub fn peer_status(&self, a: usize, b: usize) -> Option<P2pStatus> {
        let number = |index: usize| self.machine.gpus.get(index)?.index.known().copied();
        let (a, b) = (number(a)?, number(b)?);
        let cells = self.machine.p2p.iter().map(|fact| &fact.value);
        let statuses = cells.filter(|c| (c.from, c.to) == (a, b) || (c.from, c.to) == (b, a));
        statuses.map(|cell| cell.status).max()
    }

    /// The GPU at a PCI address.
    pub(super) fn gpu_at(&self, bdf: Bdf) -> Option<usize> {
        let gpus = self.machine.gpus.iter();
        gpus.enumerate().find(|(_, gpu)| gpu.bdf.known() == Some(&bdf)).map(|(index, _)| index)
    }

    /// Kernel version as (major, minor).
    pub(super) fn kernel(&self) -> Option<(u32, u32)> {
        let text = self.machine.platform.kernel.known()?;
        let mut parts = text.split(['.', '-']);
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }

    /// Major version of the driver.
    pub(super) fn driver_major(&self) -> Option<u32> {
        self.machine.platform.driver.known()?.split('.').next()?.parse().ok()
    }

    /// Major version of CUDA: as printed, else from the driver branch.
    pub(super) fn cuda_major(&self) -> Option<u32> {
        if let Some(text) = self.machine.platform.cuda.known() {
            return text.split('.').next()?.parse().ok();
        }
        Some(match self.driver_major()? {
            ..=387 => 8,
            388..=409 => 9,
            410..=449 => 10,
            450..=524 => 11,
            525..=579 => 12,
            _ => 13,
        })
    }

    /// The guest of a hypervisor, as far as seen.
    pub(super) fn hypervisor(&self) -> Option<&'m str> {
        self.machine.platform.hypervisor.known().map(String::as_str).filter(|name| *name != "none")
    }

    /// An Arm machine.
    pub(super) fn is_arm(&self) -> bool {
        let arch = self.machine.platform.arch.known();
        arch.is_some_and(|arch| arch == "aarch64" || arch == "arm64")
    }

    /// A host that assigns devices to guests.
    pub(super) fn assigns_devices(&self) -> bool {
        let drivers = self.machine.pci.values().filter_map(|device| device.driver.known());
        drivers.into_iter().any(|driver| driver == "vfio-pci")
            || self.machine.platform.modules.contains_key("vfio_pci")
    }

    /// Hosts whose logs were given, with whether any of their network channels used GPUDirect RDMA.
    pub(super) fn network_channels(&self) -> Vec<(&'m str, bool, &'m str, &'m Seen)> {
        let channels = self.events(|event| match event {
            Event::Channel { host, transport, gdr, .. } if transport.starts_with("NET/") => {
                Some((host.as_str(), *gdr, transport.as_str()))
            }
            _ => None,
        });
        channels.into_iter().map(|((host, gdr, net), seen)| (host, gdr, net, seen)).collect()
    }

    /// The job ran on one node only, so its NICs are not used.
    pub(super) fn single_node(&self) -> bool {
        let nodes = self.events(|event| match event {
            Event::Communicator { nodes, .. } if *nodes > 0 => Some(*nodes),
            _ => None,
        });
        !nodes.is_empty()
            && nodes.iter().all(|(nodes, _)| *nodes == 1)
            && self.network_channels().is_empty()
    }

    /// NCCL's version as (major, minor).
    pub(super) fn nccl(&self) -> Option<(u32, u32)> {
        let (version, _) = self.event(|event| match event {
            Event::NcclVersion { version } => Some(version),
            _ => None,
        })?;
        let mut parts = version.split(['.', '+']);
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }

    /// A GPU whose product line has no GPUDirect RDMA.
    pub(super) fn consumer_gpu(&self) -> Option<(String, Option<Origin>)> {
        self.machine.gpus.iter().find_map(|gpu| {
            let refused = gpu.attributes.get("GPU_DIRECT_RDMA_SUPPORTED");
            if let Some(fact) = refused.filter(|fact| fact.value == 0) {
                return Some((gpu.label(), Some(fact.origin)));
            }
            let name = gpu.name.as_ref().filter(|name| is_consumer(&name.value))?;
            Some((alloc::format!("{} ({})", gpu.label(), name.value), Some(name.origin)))
        })
    }

    /// Whether any GPU has a name at all.
    pub(super) fn gpu_named(&self) -> bool {
        self.machine.gpus.iter().any(|gpu| gpu.name.is_some() || !gpu.attributes.is_empty())
    }

    /// Whether the loaded modules are known and `name` is among them.
    pub(super) fn module(&self, name: &str) -> Option<bool> {
        if self.machine.platform.modules.contains_key(name) {
            return Some(true);
        }
        self.machine.platform.modules_listed.known().map(|_| false)
    }

    /// A peer memory module, if the module list is known.
    pub(super) fn peermem_loaded(&self) -> Option<bool> {
        let names = ["nvidia_peermem", "nv_peer_mem"];
        let states: Vec<Option<bool>> = names.iter().map(|name| self.module(name)).collect();
        if states.contains(&Some(true)) {
            return Some(true);
        }
        states.first().copied().flatten()
    }

    /// Name of the live source that starts with `place`.
    pub(super) fn live_source(&self, place: &str) -> Option<String> {
        let sources = self.machine.sources.iter().filter(|source| source.kind == Kind::Live);
        let mut matching = sources.filter(|source| source.name.starts_with(place));
        matching.next().map(|source| source.name.clone())
    }

    /// Facts come from the running machine or a captured root.
    pub(super) fn live(&self) -> bool {
        self.machine.has(&[Kind::Live])
    }
}

/// Whether a GPU's product line or driver withholds GPUDirect RDMA.
pub(crate) fn lacks_rdma(gpu: &crate::facts::Gpu) -> bool {
    let refused =
        gpu.attributes.get("GPU_DIRECT_RDMA_SUPPORTED").is_some_and(|fact| fact.value == 0);
    refused || gpu.name.known().is_some_and(|name| is_consumer(name))
}

/// GeForce boards by their product names.
pub(super) fn is_consumer(name: &str) -> bool {
    let short = name.strip_prefix("NVIDIA ").unwrap_or(name);
    name.contains("GeForce") || short.starts_with("TITAN ") || short.starts_with("GTX ")
}

fn iommu(machine: &Machine) -> Iommu {
    let cite = |origin: Origin| machine.cite(origin);
    // The domain type of a GPU's own group is the strongest evidence.
    for gpu in &machine.gpus {
        let device = gpu.bdf.known().and_then(|bdf| machine.pci.get(bdf));
        if let Some(fact) = device.and_then(|device| device.iommu_type.as_ref()) {
            let text =
                alloc::format!("IOMMU group type of {} ({})", gpu.label(), cite(fact.origin));
            match fact.value {
                IommuType::Identity => return Iommu::Identity(text),
                IommuType::Translated => return Iommu::Translated(text),
                IommuType::Other => {}
            }
        }
    }
    // On the live machine a GPU without an IOMMU group has no IOMMU in front of it.
    let live =
        machine.sources.iter().find(|s| s.kind == Kind::Live && s.name.starts_with("/sys/bus/pci"));
    let known = machine.gpus.iter().filter_map(|gpu| machine.pci.get(gpu.bdf.known()?));
    let (mut gpus, mut grouped) = (0u32, 0u32);
    for device in known {
        gpus += 1;
        grouped += u32::from(device.iommu_group.is_some());
    }
    if let Some(source) = live.filter(|_| gpus > 0 && grouped == 0) {
        return Iommu::Off(alloc::format!("no GPU is in an IOMMU group ({})", source.name));
    }
    let platform = &machine.platform;
    let cmdline = platform.cmdline.as_ref();
    let option = |name: &str, value: &str| {
        let words = cmdline.map(|fact| fact.value.as_str()).unwrap_or("");
        words.split_ascii_whitespace().any(|word| {
            let parts = word.split_once('=');
            parts.is_some_and(|(key, list)| key == name && list.split(',').any(|v| v == value))
        })
    };
    let line = cmdline.map(|fact| cite(fact.origin)).unwrap_or_default();
    for (name, value) in [("intel_iommu", "off"), ("amd_iommu", "off"), ("iommu", "off")] {
        if option(name, value) {
            return Iommu::Off(alloc::format!("{name}={value} ({line})"));
        }
    }
    for (name, value) in [("iommu", "pt"), ("iommu.passthrough", "1")] {
        if option(name, value) {
            return Iommu::Identity(alloc::format!("{name}={value} ({line})"));
        }
    }
    let gds = platform.gds.as_ref().and_then(|gds| gds.iommu.as_ref());
    if let Some(fact) = gds.filter(|fact| fact.value.eq_ignore_ascii_case("disabled")) {
        return Iommu::Off(alloc::format!("gdscheck says disabled ({})", cite(fact.origin)));
    }
    let boot = platform.iommu_translated.as_ref();
    // The line is printed without any IOMMU too; in a guest it says nothing about the host's.
    let guest_only = platform.hypervisor.is_some() && platform.iommu_on.is_none();
    if let Some(fact) = boot.filter(|fact| !fact.value || !guest_only) {
        let text = alloc::format!("boot log, default domain type ({})", cite(fact.origin));
        return if fact.value { Iommu::Translated(text) } else { Iommu::Identity(text) };
    }
    if option("intel_iommu", "on") || option("amd_iommu", "on") || option("iommu", "force") {
        return Iommu::Translated(alloc::format!("switched on without pt ({line})"));
    }
    if let Some(fact) = platform.iommu_on.as_ref().filter(|fact| fact.value) {
        if cmdline.is_some() {
            return Iommu::Translated(alloc::format!("boot log ({})", cite(fact.origin)));
        }
        return Iommu::LikelyTranslated(alloc::format!("boot log ({})", cite(fact.origin)));
    }
    let vendor = platform.cpu_vendor.known().map(String::as_str);
    if cmdline.is_some() && vendor == Some("AuthenticAMD") {
        let text = "AMD's IOMMU is on by default, and the command line does not change that";
        return Iommu::LikelyTranslated(text.to_string());
    }
    Iommu::Unknown
}
