//! Gathering below a captured root, and on the machine the tests run on.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use beeline::probe::{Options, gather};
use beeline_core::checks::{Status, run};
use beeline_core::facts::{Distance, Known, json};
use beeline_core::topology::{Point, Topology};

fn put(root: &Path, path: &str, text: impl AsRef<[u8]>) {
    let full = root.join(path);
    fs::create_dir_all(full.parent().unwrap()).unwrap();
    fs::write(full, text).unwrap();
}

/// A configuration space with a port kind and ACS control bits.
fn config(port: u16, acs: Option<u16>) -> Vec<u8> {
    let mut space = vec![0u8; 4096];
    space[0x06] = 0x10;
    space[0x34] = 0x40;
    space[0x40] = 0x10;
    space[0x42..0x44].copy_from_slice(&(2 | port << 4).to_le_bytes());
    if let Some(acs) = acs {
        space[0x100..0x104].copy_from_slice(&0x0001_000du32.to_le_bytes());
        space[0x106..0x108].copy_from_slice(&acs.to_le_bytes());
    }
    space
}

/// One PCI function below `/sys/devices`, and its entry in the list of the bus.
fn function(root: &Path, above: &str, bdf: &str, ids: [&str; 3], space: Vec<u8>) -> String {
    let place = format!("{above}/{bdf}");
    let base = format!("sys/devices/{place}");
    for (name, text) in [("class", ids[0]), ("vendor", ids[1]), ("device", ids[2])] {
        put(root, &format!("{base}/{name}"), format!("{text}\n"));
    }
    put(root, &format!("{base}/numa_node"), "0\n");
    put(root, &format!("{base}/config"), space);
    put(root, &format!("{base}/current_link_speed"), "16.0 GT/s PCIe\n");
    put(root, &format!("{base}/current_link_width"), "16\n");
    let list = root.join("sys/bus/pci/devices");
    fs::create_dir_all(&list).unwrap();
    symlink(format!("../../../devices/{place}"), list.join(bdf)).unwrap();
    place
}

/// Two GPUs and a NIC below one switch whose ports redirect.
fn captured(root: &Path) {
    let bridge = ["0x060400", "0x1000", "0xc010"];
    let root_port = function(root, "pci0000:00", "0000:00:01.0", bridge, config(4, Some(0)));
    let up = function(root, &root_port, "0000:01:00.0", bridge, config(5, None));
    for (slot, bus) in [("00", "03"), ("01", "04"), ("02", "05")] {
        let port = function(root, &up, &format!("0000:02:{slot}.0"), bridge, config(6, Some(0x1d)));
        let ids = if bus == "05" {
            ["0x020700", "0x15b3", "0x101b"]
        } else {
            ["0x030200", "0x10de", "0x20b5"]
        };
        function(root, &port, &format!("0000:{bus}:00.0"), ids, config(0, None));
    }
    put(root, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
    put(root, "sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n");
    symlink("../../../devices/0000:05:00.0", root.join("sys/class/infiniband/mlx5_0/device"))
        .unwrap();
    put(root, "proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=pt\n");
    put(root, "proc/version", "Linux version 6.8.0-60-generic (x@y) (gcc) #63 SMP\n");
    put(root, "boot/config-6.8.0-60-generic", "CONFIG_PCI=y\n# CONFIG_PCI_P2PDMA is not set\n");
    put(root, "proc/modules", "nvidia 1 1 - Live 0x0\nnvidia_peermem 1 0 - Live 0x0\n");
    put(
        root,
        "proc/self/limits",
        "Max locked memory         unlimited            unlimited            bytes\n",
    );
    put(
        root,
        "proc/driver/nvidia/gpus/0000:03:00.0/information",
        "Model: \t\t NVIDIA A100-PCIE-40GB\nGPU UUID: \t GPU-00000000-0000-0000-0000-000000000003\n",
    );
    put(root, "sys/devices/system/node/node0/cpulist", "0-15\n");
    put(root, "dev/nvidia0", "");
    put(root, "dev/infiniband/uverbs0", "");
    put(root, "dmesg", "[    1.0] iommu: Default domain type: Passthrough\n");
}

#[test]
fn a_captured_root_gives_tree_bits_and_reasons() {
    let dir = tempfile::tempdir().unwrap();
    captured(dir.path());
    let machine = gather(&Options { root: dir.path().to_owned(), ..Options::default() });
    let topology = Topology::new(&machine);
    assert_eq!(machine.gpus.len(), 2);
    let distance = topology.distance(Point::Gpu(0), Point::Gpu(1));
    assert_eq!(distance.known(), Some(Distance::Pix));
    let near = topology.nics_near(0);
    assert_eq!(near, [("mlx5_0", Distance::Pix)]);
    assert_eq!(machine.nics.len(), 1, "the NIC has one record, under its RDMA name");
    assert_eq!(machine.gpus[0].name.known().unwrap(), "NVIDIA A100-PCIE-40GB");
    assert_eq!(topology.mb_per_s(Point::Gpu(0), Point::Gpu(1)), Some(24_000));

    let report = run(&machine);
    let failed: Vec<&str> = report.failures().map(|finding| finding.check).collect();
    assert_eq!(failed, ["p2p-acs-redirect", "rdma-acs-redirect"]);
    let found = report.of("p2p-acs-redirect")[0];
    assert!(
        found.message.contains("0000:02:00.0 0x001d") && found.message.contains("0000:02:01.0")
    );
    assert!(!found.message.contains("0000:02:02.0"), "the NIC's port is not between the GPUs");
    assert!(report.of("kernel-no-p2pdma")[0].message.contains("not set"));
    assert_eq!(report.of("p2p-iommu-translated")[0].status, Status::Pass);

    let saved = json::save(&machine, false).unwrap();
    assert!(!saved.contains("GPU-00000000") && !saved.contains(dir.path().to_str().unwrap()));
    let loaded = json::load(&saved).unwrap();
    assert_eq!(run(&loaded).failures().count(), 2);
}

#[test]
fn an_empty_root_gives_an_empty_record() {
    let dir = tempfile::tempdir().unwrap();
    let machine = gather(&Options { root: dir.path().to_owned(), ..Options::default() });
    assert!(machine.pci.is_empty() && machine.gpus.is_empty() && machine.nics.is_empty());
    assert_eq!(run(&machine).failures().count(), 0);
}

#[test]
fn the_running_machine_is_read_without_an_error() {
    let machine = gather(&Options::default());
    assert!(machine.platform.kernel.is_some());
    run(&machine);
    let saved = json::save(&machine, true).unwrap();
    assert_eq!(json::load(&saved).unwrap(), machine);
}

/// What a request is told at run time, what the plan of the file says, and what doctor prints are one
/// vocabulary: for one cause there is one code.
#[test]
fn a_storage_route_refused_at_run_time_has_the_code_of_plan_and_doctor() {
    use beeline::config::Config;
    use beeline::gpu::{DeviceId, Gpu};
    use beeline::storage::{Engine, File, Mode, Operation, Request, StorageRequest, StorageRoute};
    use beeline_core::plan::{
        self, DeviceFacts, DirectIo, FileFacts, FileKind, HostFacts, IoUring,
    };
    use beeline_core::reason::Code;
    use beeline_core::segment::Segment;

    // At run time, on the device that every machine has.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("file");
    fs::write(&path, vec![7; 8192]).unwrap();
    let gpu = Gpu::open(&DeviceId::Sim(0)).unwrap();
    let file = std::sync::Arc::new(File::open(&path).unwrap());
    for route in [StorageRoute::P2pDma, StorageRoute::Nvme] {
        let wanted =
            StorageRequest { operation: Operation::Read, mode: Mode::Require, route: Some(route) };
        let planned = file.plan(&gpu, wanted).rejection(route).unwrap().clone();
        let segment = Segment { file: 0, file_offset: 0, device_offset: 0, len: 8192 };
        let buffer = gpu.alloc(8192).unwrap();
        let mut request = Request::read(vec![file.clone()], vec![segment], buffer);
        (request.mode, request.route) = (Mode::Require, Some(route));
        let error = Engine::new(&gpu, Config::default()).run(request).unwrap_err();
        assert!(error.is_no_route(), "{error}");
        let codes: Vec<Code> = error.reasons().iter().map(|reason| reason.code).collect();
        assert_eq!(codes, [planned.code], "{error}");
    }

    // The cause that a machine with a real GPU has, by the same function that the engine asks.
    let file = FileFacts {
        kind: FileKind::Regular,
        size: 8192,
        file_system: "ext4".to_owned(),
        memory_backed: false,
        on_nvme: Some(true),
        direct: DirectIo::Aligned { memory: 4096, offset: 4096 },
    };
    let device = DeviceFacts { simulated: false, reads_file_pages: true, has_window: true };
    let host = HostFacts { io_uring: IoUring::Yes };
    let wanted = StorageRequest {
        operation: Operation::Read,
        mode: Mode::Require,
        route: Some(StorageRoute::P2pDma),
    };
    let plan = plan::storage(wanted, &file, &device, &host);
    let refused = plan.rejection(StorageRoute::P2pDma).unwrap().code;
    let root = tempfile::tempdir().unwrap();
    put(root.path(), "proc/kallsyms", "0000000000000000 T nvme_queue_rq\n".repeat(64));
    put(root.path(), "proc/version", "Linux version 6.1.0 (gcc) #1 SMP\n");
    let mut machine = gather(&Options { root: root.path().to_owned(), ..Options::default() });
    let origin = beeline_core::facts::Origin::default();
    let unset = beeline_core::facts::Fact { value: String::new(), origin };
    machine.platform.config.insert("CONFIG_PCI_P2PDMA".into(), unset);
    let report = run(&machine);
    assert_eq!(refused, Code::KernelNoP2pDma);
    assert_eq!(report.of("kernel-no-p2pdma")[0].reason, Some(refused));
    assert!(report.of("kernel-no-p2pdma")[0].message.contains("CONFIG_PCI_P2PDMA"));
}

fn packed(text: &[u8]) -> Vec<u8> {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut packer, text).unwrap();
    packer.finish().unwrap()
}

#[test]
fn the_running_kernel_is_asked_before_its_package() {
    let bomb = packed(&vec![b'#'; 64 << 20]);
    assert!(bomb.len() < 1 << 20);
    for (config, wanted) in [
        (packed(b"CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n"), "y"),
        // Not the kernel's: cut off, no gzip, or more than any kernel has to say.
        (packed(b"CONFIG_PCI_P2PDMA=y\n")[..20].to_vec(), ""),
        (b"CONFIG_PCI_P2PDMA=y\n".to_vec(), ""),
        (bomb, ""),
    ] {
        let root = tempfile::tempdir().unwrap();
        captured(root.path());
        put(root.path(), "proc/config.gz", config);
        let machine = gather(&Options { root: root.path().to_owned(), ..Options::default() });
        assert_eq!(machine.platform.config["CONFIG_PCI_P2PDMA"].value, wanted);
    }
}
