//! Routes between the memories of devices: GPU, host, NIC, and a GPU of another machine.
//!
//! A plan over the facts that doctor judges: a route that a check finds broken is rejected here with
//! the check's code. Routes between a file and a device are planned by [`super::storage()`].

use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;

use super::{Choice, Level, Mode, Plan, Rejected};
use crate::checks::{Context, Iommu};
use crate::facts::{Distance, Event, Known, P2pStatus};
use crate::reason::{Code, Reason};
use crate::topology::{Answer, Point};

/// One end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End<'m> {
    /// Host memory.
    Host,
    /// A GPU by its position in the record.
    Gpu(usize),
    /// A NIC by its name.
    Nic(&'m str),
    /// A GPU of another machine, reached through the NIC named.
    RemoteGpu(&'m str),
}

/// A way for bytes between two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceRoute {
    /// Over NVLink, C2C or XGMI.
    GpuLink,
    /// One device reads and writes the other's window over PCI.
    PciPeer,
    /// A NIC reads and writes GPU memory (GPUDirect RDMA).
    GpuDirectRdma,
    /// Between a device and host memory, by the device's own engine.
    HostDma,
    /// In two steps through pinned host memory.
    HostStaging,
    /// A NIC reads and writes host memory.
    Rdma,
}

impl DeviceRoute {
    /// Every route, straightest first.
    pub const ALL: [Self; 6] = [
        Self::GpuLink,
        Self::PciPeer,
        Self::GpuDirectRdma,
        Self::HostDma,
        Self::Rdma,
        Self::HostStaging,
    ];

    /// The name as the command line and JSON write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::GpuLink => "gpu-link",
            Self::PciPeer => "pci-peer",
            Self::GpuDirectRdma => "gpudirect-rdma",
            Self::HostDma => "host-dma",
            Self::HostStaging => "host-staging",
            Self::Rdma => "rdma",
        }
    }

    /// Whether the bytes stay out of host memory.
    pub const fn is_direct(self) -> bool {
        matches!(self, Self::GpuLink | Self::PciPeer | Self::GpuDirectRdma)
    }
}

impl fmt::Display for DeviceRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Plans between two ends. Routes that make no sense for the pair are left out; all others are allowed
/// or rejected with a reason. Symmetric: a plan from A to B is the plan from B to A.
pub fn device(context: &Context<'_>, from: End<'_>, to: End<'_>, mode: Mode) -> Plan<DeviceRoute> {
    let mut plan = Plan { choices: alloc::vec![], rejected: alloc::vec![] };
    for route in DeviceRoute::ALL {
        let Some(answer) = judge(context, route, from, to) else { continue };
        let answer = probed(context, &plan, route, from, to, answer);
        let answer = answer.and_then(|open| match mode {
            Mode::Require if !route.is_direct() && has_direct(from, to) => {
                Err(Reason::new(Code::RequireMode))
            }
            Mode::Software if route.is_direct() => Err(Reason::new(Code::SoftwareMode)),
            _ => Ok(open),
        });
        match answer {
            Ok((level, why)) => plan.choices.push(Choice { route, level, why }),
            Err(why) => plan.rejected.push(Rejected { route, why }),
        }
    }
    if let [only] = &mut plan.choices[..] {
        only.why = Reason::new(Code::OnlyRoute);
    }
    plan
}

/// What a probe changes: a path that failed it is refused whatever the facts say; one that passed is
/// verified, also where the facts did not show the way.
fn probed(
    context: &Context<'_>,
    plan: &Plan<DeviceRoute>,
    route: DeviceRoute,
    from: End<'_>,
    to: End<'_>,
    answer: Result<(Level, Reason), Reason>,
) -> Result<(Level, Reason), Reason> {
    let outcome = match (route, from, to) {
        (DeviceRoute::GpuLink | DeviceRoute::PciPeer, End::Gpu(a), End::Gpu(b)) => {
            context.verified_peer(a, b)
        }
        (DeviceRoute::HostDma, End::Gpu(gpu), End::Host)
        | (DeviceRoute::HostDma, End::Host, End::Gpu(gpu)) => context.verified_host(gpu),
        _ => None,
    };
    match (outcome, answer) {
        (Some(Err(detail)), _) => Err(Reason::with(Code::ProbeTransfer, detail)),
        // The driver takes the straightest way, so the bytes say nothing about the next one.
        (Some(Ok(())), Ok((_, why))) if plan.choices.is_empty() => Ok((Level::Verified, why)),
        (Some(Ok(())), Err(why))
            if plan.choices.is_empty()
                && route == DeviceRoute::PciPeer
                && matches!(why.code, Code::PathUnknown | Code::PathTooFar) =>
        {
            Ok((Level::Verified, Reason::new(Code::Preferred)))
        }
        (_, answer) => answer,
    }
}

/// Whether a pair could have a route that avoids host memory.
const fn has_direct(from: End<'_>, to: End<'_>) -> bool {
    !matches!((from, to), (End::Host, _) | (_, End::Host))
}

/// `None` where the route makes no sense for the pair.
fn judge(
    context: &Context<'_>,
    route: DeviceRoute,
    from: End<'_>,
    to: End<'_>,
) -> Option<Result<(Level, Reason), Reason>> {
    use DeviceRoute::{GpuDirectRdma, GpuLink, HostDma, HostStaging, PciPeer, Rdma};
    let open = |level| Ok((level, Reason::new(Code::Preferred)));
    Some(match (route, from, to) {
        (GpuLink, End::Gpu(a), End::Gpu(b)) => gpu_link(context, a, b),
        (PciPeer, End::Gpu(a), End::Gpu(b)) => pci_peer(context, a, b),
        (HostStaging, End::Gpu(a), End::Gpu(b)) if a != b => open(Level::Plausible),
        (HostDma, End::Gpu(_), End::Host) | (HostDma, End::Host, End::Gpu(_)) => {
            open(Level::Plausible)
        }
        (GpuDirectRdma, End::Gpu(gpu), End::Nic(nic) | End::RemoteGpu(nic))
        | (GpuDirectRdma, End::Nic(nic) | End::RemoteGpu(nic), End::Gpu(gpu)) => {
            gpudirect_rdma(context, gpu, nic)
        }
        (HostStaging, End::Gpu(_), End::Nic(nic) | End::RemoteGpu(nic))
        | (HostStaging, End::Nic(nic) | End::RemoteGpu(nic), End::Gpu(_)) => rdma(context, nic),
        (Rdma, End::Host, End::Nic(nic) | End::RemoteGpu(nic))
        | (Rdma, End::Nic(nic) | End::RemoteGpu(nic), End::Host) => rdma(context, nic),
        _ => return None,
    })
}

fn gpu_link(context: &Context<'_>, a: usize, b: usize) -> Result<(Level, Reason), Reason> {
    let answer = context.topology.distance(Point::Gpu(a), Point::Gpu(b));
    match answer {
        Answer::Known(distance @ (Distance::Nv(_) | Distance::C2c)) => {
            refused_by_driver(context, a, b)?;
            Ok((Level::Plausible, Reason::with(Code::Preferred, distance.to_string())))
        }
        Answer::Known(distance) => Err(Reason::with(Code::NoGpuLink, distance.to_string())),
        Answer::Unknown { why, .. } => Err(Reason::with(Code::PathUnknown, why)),
    }
}

fn refused_by_driver(context: &Context<'_>, a: usize, b: usize) -> Result<(), Reason> {
    match context.peer_status(a, b) {
        Some(P2pStatus::Ok | P2pStatus::Unknown) | None => Ok(()),
        Some(status) => Err(Reason::with(Code::P2pNotCapable, status.words())),
    }
}

fn pci_peer(context: &Context<'_>, a: usize, b: usize) -> Result<(Level, Reason), Reason> {
    refused_by_driver(context, a, b)?;
    let path = context.topology.path(Point::Gpu(a), Point::Gpu(b));
    let redirecting = context.topology.redirecting(&path);
    if !redirecting.is_empty() {
        let ports: alloc::vec::Vec<String> =
            redirecting.iter().map(|(bdf, acs)| format!("{bdf} {acs}")).collect();
        return Err(Reason::with(Code::P2pAcsRedirect, ports.join("; ")));
    }
    if let Iommu::Translated(why) = &context.iommu {
        return Err(Reason::with(Code::P2pIommuTranslated, why.clone()));
    }
    let capable = context.peer_status(a, b) == Some(P2pStatus::Ok);
    let distance = context.topology.distance(Point::Gpu(a), Point::Gpu(b));
    let near = distance.known().is_some_and(|distance| distance <= Distance::Phb);
    let clear = matches!(context.iommu, Iommu::Off(_) | Iommu::Identity(_));
    match (capable, distance) {
        (true, _) if near && clear && context.topology.acs_visible() => {
            Ok((Level::Plausible, Reason::new(Code::Preferred)))
        }
        (true, _) => Ok((Level::Capable, Reason::new(Code::Preferred))),
        (false, Answer::Known(distance)) if distance >= Distance::Node => {
            Err(Reason::with(Code::PathTooFar, distance.to_string()))
        }
        (false, _) => Err(Reason::with(Code::PathUnknown, "the driver was not asked")),
    }
}

fn rdma(context: &Context<'_>, nic: &str) -> Result<(Level, Reason), Reason> {
    let Some(record) = context.machine.nics.get(nic) else {
        return Err(Reason::with(Code::RdmaDeviceAbsent, nic));
    };
    if record.rdma.known() == Some(&false) {
        return Err(Reason::with(Code::RdmaDeviceAbsent, format!("{nic} is not an RDMA device")));
    }
    let states = || record.ports.values().filter_map(|port| port.state.known());
    if states().next().is_some() && states().all(|state| state != "ACTIVE") {
        return Err(Reason::with(Code::PortDown, nic));
    }
    Ok((Level::Plausible, Reason::new(Code::Preferred)))
}

fn gpudirect_rdma(context: &Context<'_>, gpu: usize, nic: &str) -> Result<(Level, Reason), Reason> {
    rdma(context, nic)?;
    let record = context.machine.gpus.get(gpu);
    if record.is_some_and(crate::checks::lacks_rdma) {
        let name = record.map(crate::facts::Gpu::label).unwrap_or_default();
        return Err(Reason::with(Code::GdrSkuUnsupported, name));
    }
    for event in context.machine.events.keys() {
        match event {
            Event::SymbolVersion { module, .. } if module.contains("peermem") => {
                return Err(Reason::with(Code::PeermemAbiMismatch, module.clone()));
            }
            Event::UnknownSymbol { module, err: 0 | -2, symbol }
                if module.contains("peer") && symbol.contains("peer_memory_client") =>
            {
                return Err(Reason::with(Code::PeermemNoApi, module.clone()));
            }
            _ => {}
        }
    }
    let known = context.machine.nics.get(nic);
    if known.and_then(|nic| nic.gdr.known()) == Some(&false) {
        return Err(Reason::with(Code::GdrDisabled, nic));
    }
    let path = context.topology.path(Point::Gpu(gpu), Point::Nic(nic));
    let redirecting = context.topology.redirecting(&path);
    if let Some((bdf, acs)) = redirecting.first() {
        return Err(Reason::with(Code::P2pAcsRedirect, format!("{bdf} {acs}")));
    }
    match context.topology.distance(Point::Gpu(gpu), Point::Nic(nic)) {
        Answer::Known(distance) if distance.below_host_bridge() => {
            let agreed = known.and_then(|nic| nic.gdr.known()) == Some(&true);
            let level = if agreed { Level::Plausible } else { Level::Capable };
            Ok((level, Reason::with(Code::Preferred, distance.to_string())))
        }
        Answer::Known(distance) => Err(Reason::with(Code::GdrDistance, distance.to_string())),
        Answer::Unknown { why, .. } => Err(Reason::with(Code::PathUnknown, why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Machine, read};

    const TOPO: &str = "\tGPU0\tGPU1\tNIC0\tNIC1\nGPU0\t X \tNV4\tPIX\tSYS\nGPU1\tNV4\t X \tSYS\tPHB\n\
        NIC0\tPIX\tSYS\t X \tSYS\nNIC1\tSYS\tPHB\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n";

    fn plan(machine: &Machine, from: End<'_>, to: End<'_>, mode: Mode) -> Plan<DeviceRoute> {
        let context = Context::new(machine);
        let there = device(&context, from, to, mode);
        assert_eq!(there, device(&context, to, from, mode), "a plan is the same both ways");
        there
    }

    #[test]
    fn every_route_is_allowed_or_has_its_reason() {
        let mut machine = Machine::new();
        read(&mut machine, "topo", TOPO.as_bytes()).unwrap();
        machine.unify();
        let gpus = plan(&machine, End::Gpu(0), End::Gpu(1), Mode::Auto);
        assert_eq!(gpus.choices[0].route, DeviceRoute::GpuLink);
        assert_eq!(gpus.rejection(DeviceRoute::PciPeer).unwrap().code, Code::PathUnknown);
        assert!(gpus.allows(DeviceRoute::HostStaging));

        let near = plan(&machine, End::Gpu(0), End::Nic("mlx5_0"), Mode::Auto);
        assert_eq!(near.choices[0].route, DeviceRoute::GpuDirectRdma);
        let far = plan(&machine, End::Gpu(1), End::RemoteGpu("mlx5_1"), Mode::Auto);
        assert_eq!(far.rejection(DeviceRoute::GpuDirectRdma).unwrap().code, Code::GdrDistance);
        assert_eq!(far.choices[0].route, DeviceRoute::HostStaging);
        let required = plan(&machine, End::Gpu(1), End::RemoteGpu("mlx5_1"), Mode::Require);
        assert!(required.choices.is_empty());

        let host = plan(&machine, End::Host, End::Gpu(0), Mode::Require);
        assert_eq!(host.choices[0].route, DeviceRoute::HostDma);
        let soft = plan(&machine, End::Gpu(0), End::Gpu(1), Mode::Software);
        assert_eq!(soft.rejection(DeviceRoute::GpuLink).unwrap().code, Code::SoftwareMode);
        let gone = plan(&machine, End::Host, End::Nic("none"), Mode::Auto);
        assert_eq!(gone.rejection(DeviceRoute::Rdma).unwrap().code, Code::RdmaDeviceAbsent);
    }

    #[test]
    fn a_plan_and_a_check_give_one_code_for_one_cause() {
        let mut machine = Machine::new();
        let listing = include_str!("../../tests/fixtures/lspci-vvv-2gpu-gpp-001d.txt");
        read(&mut machine, "lspci", listing.as_bytes()).unwrap();
        machine.unify();
        let refused = plan(&machine, End::Gpu(0), End::Gpu(1), Mode::Auto);
        let reason = refused.rejection(DeviceRoute::PciPeer).unwrap();
        assert_eq!(reason.code, Code::P2pAcsRedirect);
        assert!(reason.detail.contains("0000:40:01.1 0x001d"));
        let report = crate::checks::run(&machine);
        assert_eq!(report.failures().next().unwrap().reason, Some(reason.code));
    }
}
