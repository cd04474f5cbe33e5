//! The topology as data for printing: a matrix, and for each GPU its NUMA node and nearest NICs.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::Serialize;

use super::{Answer, Point, Topology};
use crate::facts::{Distance, Known, Machine};

/// One device of the view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Name in the matrix.
    pub label: String,
    /// `gpu` or `nic`.
    pub kind: &'static str,
    /// Product name.
    pub model: String,
    /// NUMA node.
    pub numa: Option<i32>,
    /// Bandwidth to the CPU in MB/s, one direction.
    pub to_cpu_mb_per_s: Option<u64>,
    /// Nearest NICs of a GPU: all that share the smallest distance.
    pub nearest_nics: Vec<String>,
}

/// The connection matrix of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct View {
    /// Rows and columns.
    pub devices: Vec<Device>,
    /// Cells by row and column: `X`, a distance, or `?` with what remains possible, as `?(PIX|PXB)`.
    pub cells: Vec<Vec<String>>,
    /// Bandwidths by row and column in MB/s, one direction.
    pub mb_per_s: Vec<Vec<Option<u64>>>,
}

/// The view of one machine.
pub fn view(machine: &Machine) -> View {
    let topology = Topology::new(machine);
    let points: Vec<Point<'_>> = topology.gpus().chain(topology.nics()).collect();
    let devices = points.iter().map(|point| device(machine, &topology, *point)).collect();
    let row = |a: &Point<'_>| points.iter().map(|b| cell(&topology, *a, *b)).collect();
    let speeds = |a: &Point<'_>| {
        points.iter().map(|b| if a == b { None } else { topology.mb_per_s(*a, *b) }).collect()
    };
    View {
        devices,
        cells: points.iter().map(row).collect(),
        mb_per_s: points.iter().map(speeds).collect(),
    }
}

fn device(machine: &Machine, topology: &Topology<'_>, point: Point<'_>) -> Device {
    let (kind, model, nearest) = match point {
        Point::Gpu(index) => {
            let model = machine.gpus.get(index).and_then(|gpu| gpu.name.known().cloned());
            let near = topology.nics_near(index);
            let best: Option<Distance> = near.first().map(|(_, distance)| *distance);
            let names = near.iter().filter(|(_, distance)| Some(*distance) == best);
            ("gpu", model, names.map(|(name, _)| (*name).to_string()).collect())
        }
        Point::Nic(name) => {
            let model = machine.nics.get(name).and_then(|nic| nic.model.known().cloned());
            ("nic", model, Vec::new())
        }
        Point::Pci(_) => ("pci", None, Vec::new()),
    };
    Device {
        label: topology.label(point),
        kind,
        model: model.unwrap_or_default(),
        numa: topology.numa(point),
        to_cpu_mb_per_s: topology.to_cpu(point).map(|(speed, _)| speed),
        nearest_nics: nearest,
    }
}

fn cell(topology: &Topology<'_>, a: Point<'_>, b: Point<'_>) -> String {
    if a == b {
        return "X".to_string();
    }
    match topology.distance(a, b) {
        Answer::Known(distance) => distance.to_string(),
        Answer::Unknown { candidates, .. } if candidates.len() >= 5 => "?".to_string(),
        Answer::Unknown { candidates, .. } => {
            let names: Vec<String> = candidates.iter().map(ToString::to_string).collect();
            alloc::format!("?({})", names.join("|"))
        }
    }
}
