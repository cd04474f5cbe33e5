//! Driver facts from the CUDA driver library. No context is created, nothing is allocated.

use beeline_core::facts::{Bdf, P2pStatus};
use beeline_sys::cuda::{Device, DeviceAttribute, Driver};

use super::driver::{DriverFacts, DriverGpu, DriverPeer};
use crate::error::Result;

/// GPUs that are asked about each other.
const GPUS_MAX: i32 = 128;

/// Attributes that decide about direct paths, by their CUDA names.
const ATTRIBUTES: [(&str, DeviceAttribute); 5] = [
    ("GPU_DIRECT_RDMA_SUPPORTED", DeviceAttribute::GPU_DIRECT_RDMA_SUPPORTED),
    (
        "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
        DeviceAttribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    ),
    ("DMA_BUF_SUPPORTED", DeviceAttribute::DMA_BUF_SUPPORTED),
    ("CAN_USE_64_BIT_STREAM_MEM_OPS", DeviceAttribute::CAN_USE_64_BIT_STREAM_MEM_OPS),
    ("HOST_REGISTER_SUPPORTED", DeviceAttribute::HOST_REGISTER_SUPPORTED),
];

/// What the CUDA driver says about its devices.
///
/// # Errors
/// Why there is no driver, or what it answered.
pub fn cuda_facts() -> Result<DriverFacts> {
    let driver = crate::gpu::cuda_driver()?;
    Ok(facts(&driver))
}

fn facts(driver: &std::sync::Arc<Driver>) -> DriverFacts {
    let count = driver.device_count().unwrap_or(0).clamp(0, GPUS_MAX);
    let devices: Vec<Device> = (0..count).filter_map(|number| driver.device(number).ok()).collect();
    // The driver library counts devices in its own order (`CUDA_DEVICE_ORDER`); the numbers people
    // know are those of PCI order.
    let mut placed: Vec<(Bdf, &Device)> = devices
        .iter()
        .filter_map(|device| Some((Bdf::parse(&device.pci_bus_id().ok()?)?, device)))
        .collect();
    placed.sort_by_key(|(bdf, _)| *bdf);
    let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
    let gpus = placed.iter().enumerate().map(|(index, (bdf, device))| DriverGpu {
        index: number(index),
        bdf: *bdf,
        name: device.name().ok(),
        sm: compute_capability(device),
        bar1_bytes: None,
        bar1_used: None,
        link: None,
        link_max: None,
        mig: None,
        attributes: ATTRIBUTES
            .iter()
            .map(|(name, attribute)| ((*name).to_owned(), i64::from(device.attribute(*attribute))))
            .collect(),
        nvlinks: Vec::new(),
    });
    let mut peers = Vec::new();
    for (from, (_, device)) in placed.iter().enumerate() {
        for (to, (_, peer)) in placed.iter().enumerate().filter(|(to, _)| *to != from) {
            let status =
                if device.can_access_peer(peer) { P2pStatus::Ok } else { P2pStatus::NotSupported };
            peers.push(DriverPeer { from: number(from), to: number(to), status });
        }
    }
    let version = driver.version().0;
    DriverFacts {
        library: "the CUDA driver".to_owned(),
        driver_version: None,
        cuda_version: Some(format!("{}.{}", version / 1000, version % 1000 / 10)),
        gpus: gpus.collect(),
        peers,
        distances: Vec::new(),
    }
}

fn compute_capability(device: &Device) -> Option<u32> {
    let major = device.attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR);
    let minor = device.attribute(DeviceAttribute::COMPUTE_CAPABILITY_MINOR);
    u32::try_from(major.checked_mul(10)?.checked_add(minor)?).ok().filter(|sm| *sm > 0)
}
