//! Topology XML of NCCL and RCCL, and graph XML.
//!
//! `system > cpu > pci* > gpu | nic > net`; a `pci` with a bridge class is a whole switch, because the
//! writer folds a switch's ports into one node.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use roxmltree::Node;

use super::super::bdf::Bdf;
use super::super::machine::{
    Fact, GpuLink, GpuLinkKind, Known, Link, Machine, Origin, Parent, PortKind, TopoFile,
};
use super::xml::{Tree, root_name};
use super::{Input, Outcome, ReadError};

pub(super) fn is_nccl(head: &str) -> bool {
    root_name(head) == Some("system") && !has_rccl_marks(head)
}

pub(super) fn is_rccl(head: &str) -> bool {
    root_name(head) == Some("system") && has_rccl_marks(head)
}

pub(super) fn is_graph(head: &str) -> bool {
    root_name(head) == Some("graphs")
}

fn has_rccl_marks(head: &str) -> bool {
    head.contains(" gcn=\"") || head.contains("<xgmi ") || head.contains("<system version=\"2\"")
}

pub(super) fn parse(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let tree = Tree::parse(input)?;
    let root = tree.document.root_element();
    let format = if has_rccl_marks(input.text) { "rccl" } else { "nccl" };
    let mut reader = Reader { machine, input, tree: &tree, file: TopoFile::default() };
    reader.file.format = format.to_string();
    reader.file.origin = input.at(tree.line(&root));
    for cpu in root.children().filter(Node::is_element) {
        if cpu.tag_name().name() != "cpu" {
            // Newer files hold a <dmi> or similar element beside the CPUs.
            continue;
        }
        reader.cpu(&cpu)?;
    }
    if reader.file.devices.is_empty() && reader.file.cpu_gaps.is_empty() {
        let cpus = root.children().filter(|node| node.has_tag_name("cpu")).count();
        if cpus == 0 {
            let message = "<system> without a <cpu>; expected an NCCL topology file";
            return Err(ReadError::new(input, tree.line(&root), message));
        }
    }
    let file = reader.file;
    machine.topo_files.push(file);
    Ok(Outcome::default())
}

/// PCI functions of one file.
const FUNCTIONS_MAX: usize = 16_384;

struct Reader<'m, 'i, 't, 'a> {
    machine: &'m mut Machine,
    input: &'i Input<'a>,
    tree: &'t Tree<'a>,
    file: TopoFile,
}

impl Reader<'_, '_, '_, '_> {
    fn at(&self, node: &Node<'_, '_>) -> Origin {
        self.input.at(self.tree.line(node))
    }

    fn broken(&self, node: &Node<'_, '_>, message: String) -> ReadError {
        ReadError::new(self.input, self.tree.line(node), message)
    }

    fn number<T: core::str::FromStr>(
        &self,
        node: &Node<'_, '_>,
        name: &str,
    ) -> Result<Option<T>, ReadError> {
        let Some(text) = node.attribute(name) else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| {
            self.broken(node, alloc::format!("attribute {name}=\"{text}\" is not a number"))
        })
    }

    fn hex(&self, node: &Node<'_, '_>, name: &str) -> Result<Option<u32>, ReadError> {
        let Some(text) = node.attribute(name) else { return Ok(None) };
        let digits = text.trim().trim_start_matches("0x");
        u32::from_str_radix(digits, 16).map(Some).map_err(|_| {
            self.broken(node, alloc::format!("attribute {name}=\"{text}\" is not hexadecimal"))
        })
    }

    fn cpu(&mut self, cpu: &Node<'_, '_>) -> Result<(), ReadError> {
        let at = self.at(cpu);
        let node = self.number::<i32>(cpu, "numaid")?.ok_or_else(|| {
            self.broken(cpu, "<cpu> without numaid; expected an NCCL topology file".to_string())
        })?;
        let platform = &mut self.machine.platform;
        if let Some(arch) = cpu.attribute("arch") {
            platform.arch.learn(arch.to_string(), at);
        }
        if let Some(vendor) = cpu.attribute("vendor") {
            platform.cpu_vendor.learn(vendor.to_string(), at);
        }
        let model = (self.number(cpu, "familyid")?, self.number(cpu, "modelid")?);
        if let (Some(family), Some(model)) = model {
            self.machine.platform.cpu_model.learn((family, model), at);
        }
        if let Some(mask) = cpu.attribute("affinity") {
            let count = count_cpus(mask).ok_or_else(|| {
                self.broken(cpu, alloc::format!("affinity=\"{mask}\" is not a CPU mask"))
            })?;
            self.machine.platform.numa.entry(node).or_insert(Fact { value: count, origin: at });
        }
        let devices_before = self.file.devices.len();
        self.children(cpu, &Parent::Cpu(node))?;
        let below = gpus_below(self.machine, self.file.devices.iter().skip(devices_before));
        for name in ["arch", "vendor"] {
            if cpu.attribute(name).is_none() {
                self.file.cpu_gaps.push((node, name.to_string(), below.clone()));
            }
        }
        Ok(())
    }

    /// Walks below one CPU with an explicit stack; the depth was bounded before.
    fn children(&mut self, top: &Node<'_, '_>, parent: &Parent) -> Result<(), ReadError> {
        let mut stack = alloc::vec![(*top, parent.clone())];
        while let Some((node, parent)) = stack.pop() {
            for child in node.children().filter(Node::is_element) {
                match child.tag_name().name() {
                    "pci" => {
                        let bdf = self.pci(&child, &parent)?;
                        stack.push((child, Parent::Bridge(bdf)));
                    }
                    "nic" => self.nic(&child, &parent)?,
                    "gpu" => self.gpu(&child, &parent)?,
                    // Other elements (nvlink below a pci of newer files, c2c) are read by their parent.
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn pci(&mut self, node: &Node<'_, '_>, parent: &Parent) -> Result<Bdf, ReadError> {
        let at = self.at(node);
        let text = node.attribute("busid").unwrap_or("");
        let bdf = Bdf::parse(text).ok_or_else(|| {
            self.broken(node, alloc::format!("busid=\"{text}\" is not a PCI address"))
        })?;
        if self.machine.pci.len() >= FUNCTIONS_MAX {
            return Err(self.broken(node, alloc::format!("more than {FUNCTIONS_MAX} functions")));
        }
        let class = self.hex(node, "class")?;
        let ids = (self.hex(node, "vendor")?, self.hex(node, "device")?);
        let subsystem = (self.hex(node, "subsystem_vendor")?, self.hex(node, "subsystem_device")?);
        let speed = node.attribute("link_speed").and_then(Link::parse_speed);
        let width = self.number::<u32>(node, "link_width")?;
        let device = self.machine.pci_at(bdf);
        device.parent.learn(parent.clone(), at);
        if let Some(class) = class {
            device.class.learn(class, at);
            if class >> 8 == 0x0604 {
                device.port.learn(PortKind::Switch, at);
            }
        }
        if let (Some(Ok(vendor)), Some(Ok(id))) =
            (ids.0.map(u16::try_from), ids.1.map(u16::try_from))
        {
            device.vendor.learn(vendor, at);
            device.device.learn(id, at);
        }
        if let (Some(Ok(vendor)), Some(Ok(id))) =
            (subsystem.0.map(u16::try_from), subsystem.1.map(u16::try_from))
        {
            device.subsystem.learn((vendor, id), at);
        }
        if let (Some(speed_100mt), Some(width)) = (speed, width)
            && speed_100mt > 0
            && width > 0
            && width <= 64
        {
            device.link.learn(Link { speed_100mt, width }, at);
        }
        match class.unwrap_or(0) >> 8 {
            0x0604 => {}
            base => {
                self.file.devices.push(bdf);
                if matches!(base, 0x0300 | 0x0302 | 0x0380 | 0x1200) {
                    self.machine.gpu_at(bdf, at);
                }
                if matches!(base, 0x0200 | 0x0207)
                    && !node.children().any(|c| c.has_tag_name("nic"))
                {
                    let nic = self.machine.nic(&bdf.to_string());
                    nic.bdf.learn(bdf, at);
                    if base == 0x0207 {
                        nic.rdma.learn(true, at);
                    }
                }
            }
        }
        Ok(bdf)
    }

    fn gpu(&mut self, node: &Node<'_, '_>, parent: &Parent) -> Result<(), ReadError> {
        let Parent::Bridge(bdf) = parent else {
            return Err(self.broken(node, "<gpu> outside a <pci>".to_string()));
        };
        let at = self.at(node);
        self.file.gpus += 1;
        let dev = self.number::<u32>(node, "dev")?;
        let sm = self.number::<u32>(node, "sm")?;
        let gdr = self.number::<u32>(node, "gdr")?;
        let mut links = Vec::new();
        for child in node.children().filter(Node::is_element) {
            let kind = match child.tag_name().name() {
                "nvlink" => GpuLinkKind::NvLink,
                "c2c" => GpuLinkKind::C2c,
                "xgmi" => GpuLinkKind::Xgmi,
                _ => continue,
            };
            // A guest does not see the switch: its target is printed as all ones and stays unknown.
            let target = child.attribute("target").and_then(Bdf::parse);
            let class = self.hex(&child, "tclass")?.unwrap_or(0);
            let bandwidth = self.number::<u64>(&child, "bw")?;
            let count = self.number::<u32>(&child, "count")?.unwrap_or(1);
            let link = GpuLink {
                kind,
                target,
                target_class: class,
                count,
                mb_per_s: bandwidth.map(|mb| mb.saturating_mul(u64::from(count))),
            };
            links.push(Fact { value: link, origin: self.at(&child) });
        }
        let gpu = self.machine.gpu_at(*bdf, at);
        if let Some(dev) = dev {
            gpu.dev.learn(dev, at);
            gpu.index.learn(dev, at);
        }
        if let Some(sm) = sm {
            gpu.sm.learn(sm, at);
        }
        if let Some(gdr) = gdr {
            gpu.gdr.learn(gdr != 0, at);
        }
        if gpu.links.is_empty() {
            gpu.links = links;
        }
        Ok(())
    }

    fn nic(&mut self, node: &Node<'_, '_>, parent: &Parent) -> Result<(), ReadError> {
        for net in node.children().filter(|child| child.has_tag_name("net")) {
            let at = self.at(&net);
            self.file.nets += 1;
            let name = net.attribute("name").unwrap_or("");
            if name.is_empty() {
                return Err(self.broken(&net, "<net> without name".to_string()));
            }
            let dev = self.number::<u32>(&net, "dev")?;
            let speed = self.number::<u64>(&net, "speed")?;
            let gdr = self.number::<u32>(&net, "gdr")?;
            let guid = net.attribute("guid").map(ToString::to_string);
            let nic = self.machine.nic(name);
            if let Some(dev) = dev {
                nic.index.learn(dev, at);
            }
            if let Some(speed) = speed {
                nic.speed_mbps.learn(speed, at);
            }
            if let Some(gdr) = gdr {
                nic.gdr.learn(gdr != 0, at);
            }
            if let Some(guid) = guid {
                nic.guid.learn(guid, at);
            }
            nic.parent.learn(parent.clone(), at);
            if let Parent::Bridge(bdf) = parent {
                nic.bdf.learn(*bdf, at);
                nic.rdma.learn(true, at);
            }
            if name.contains('+') {
                nic.members = name.split('+').map(ToString::to_string).collect();
            }
        }
        Ok(())
    }
}

fn gpus_below<'a>(machine: &Machine, devices: impl Iterator<Item = &'a Bdf>) -> Vec<String> {
    let is_gpu = |bdf: &&Bdf| machine.gpus.iter().any(|gpu| gpu.bdf.known() == Some(*bdf));
    devices.filter(is_gpu).map(ToString::to_string).collect()
}

/// CPUs in a mask of comma-separated 32-bit words.
fn count_cpus(mask: &str) -> Option<u32> {
    mask.split(',').try_fold(0u32, |sum, word| {
        let bits = u32::from_str_radix(word.trim(), 16).ok()?;
        sum.checked_add(bits.count_ones())
    })
}

/// `graphs > graph > channel > gpu dev=".." | net dev=".."`.
pub(super) fn parse_graph(machine: &mut Machine, input: &Input<'_>) -> Result<Outcome, ReadError> {
    let tree = Tree::parse(input)?;
    let root = tree.document.root_element();
    let mut file = TopoFile {
        format: "graph".to_string(),
        origin: input.at(tree.line(&root)),
        ..TopoFile::default()
    };
    for node in root.descendants().filter(|node| node.has_tag_name("gpu")) {
        let text = node.attribute("dev").unwrap_or("");
        let dev = match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        };
        let Some(dev) = dev else {
            let message = alloc::format!("dev=\"{text}\" is not a device number");
            return Err(ReadError::new(input, tree.line(&node), message));
        };
        file.graph_devs.push(dev);
    }
    file.graph_devs.sort_unstable();
    file.graph_devs.dedup();
    machine.topo_files.push(file);
    Ok(Outcome::default())
}
