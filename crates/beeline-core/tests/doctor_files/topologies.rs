//! Files that say how a machine is wired.

use super::*;

#[test]
fn topology_files_of_virtual_machines() {
    let Some(m) = handed("nccl-topo/azure-ndv4-topo.xml", Kind::NcclTopo) else { return };
    let t = Topology::new(&m);
    assert_eq!(m.platform.numa.values().map(|f| f.value).collect::<Vec<_>>(), [24, 24, 24, 24]);
    assert_eq!((m.gpus.len(), m.nics.len()), (8, 8));
    for (bdf, node) in [
        ("0003:00:00.0", 0),
        ("0004:00:00.0", 0),
        ("0001:00:00.0", 1),
        ("0002:00:00.0", 1),
        ("000d:00:00.0", 2),
        ("000e:00:00.0", 2),
        ("000b:00:00.0", 3),
        ("000c:00:00.0", 3),
    ] {
        let index = gpu(&m, bdf);
        assert_eq!(t.numa(Point::Gpu(index)), Some(node), "{bdf}");
        let near: Vec<Distance> = t.nics_near(index).iter().map(|(_, d)| *d).collect();
        assert_eq!(near.iter().filter(|d| **d == Distance::Pix).count(), 2);
        assert_eq!(t.to_cpu(Point::Gpu(index)).unwrap().0, 24_000);
    }
    assert!(m.pci.keys().filter(|bdf| bdf.is_virtual()).count() == 4);
    no_failure(&m);

    let m = handed("nccl-topo/azure-ndv2-topo.xml", Kind::NcclTopo).unwrap();
    assert_eq!(m.platform.numa.values().map(|f| f.value).collect::<Vec<_>>(), [20, 20]);
    assert_eq!((m.gpus.len(), m.nics.len()), (8, 1));
    let t = Topology::new(&m);
    let nic = Point::Nic("0101:00:00.0");
    for number in 1..=8 {
        let index = gpu(&m, &format!("{number:04x}:00:00.0"));
        let expected = if number <= 4 { Distance::Phb } else { Distance::Sys };
        assert_eq!(known(&t, Point::Gpu(index), nic), expected);
        assert_eq!(t.to_cpu(Point::Gpu(index)).unwrap().0, 24_000);
    }
    no_failure(&m);
    let report = run(&m);
    assert!(words(only(&report, "gdr-distance")).contains("default level"));
    // The file does not name the GPUs; with a source that does, the declared speed is wrong.
    assert_eq!(only(&report, "declared-speed").status, Status::Skip);
    let mut named = m.clone();
    let origin = beeline_core::facts::Origin::default();
    for gpu in &mut named.gpus {
        let value = "Tesla V100-SXM2-32GB".to_string();
        gpu.name = Some(beeline_core::facts::Fact { value, origin });
    }
    assert!(run(&named).of("declared-speed").iter().all(|f| f.severity == Severity::Warning));
}

#[test]
fn topology_files_of_hosts() {
    let Some(m) = handed("nccl-topo/aws-p4d-24xl.xml", Kind::NcclTopo) else { return };
    assert_eq!(m.platform.numa.values().map(|f| f.value).collect::<Vec<_>>(), [48, 48]);
    assert_eq!((m.gpus.len(), m.nics.len(), m.pci.len()), (8, 4, 16));
    let t = Topology::new(&m);
    for index in 0..8 {
        let near = t.nics_near(index);
        assert_eq!(near.iter().filter(|(_, d)| *d == Distance::Pix).count(), 1);
        assert_eq!(t.mb_per_s(Point::Gpu(index), Point::Nic(near[0].0)), Some(12_000));
    }
    no_failure(&m);

    let m = handed("nccl-topo/oci-H100-topology.xml", Kind::NcclTopo).unwrap();
    assert_eq!(m.platform.numa.values().map(|f| f.value).collect::<Vec<_>>(), [112, 112]);
    assert_eq!((m.gpus.len(), m.nics.len()), (8, 16));
    assert!(m.nics.values().all(|nic| nic.speed_mbps.known() == Some(&180_000)));
    assert!(m.gpus.iter().all(|gpu| gpu.gdr.known() == Some(&true)));
    let t = Topology::new(&m);
    for index in 0..8 {
        let near: Vec<&str> = t
            .nics_near(index)
            .iter()
            .filter(|(_, d)| *d == Distance::Pix)
            .map(|(n, _)| *n)
            .collect();
        assert_eq!(near.len(), 2, "two ports of one NIC");
        let path = t.path(Point::Gpu(index), Point::Nic(near[0]));
        assert_eq!(path.switches_raw, 3, "PXB before flattening");
        assert_eq!(path.mb_per_s, Some(48_000));
        assert_eq!(t.to_cpu(Point::Gpu(index)).unwrap().0, 6_000);
    }
    for (a, b) in t.gpu_pairs() {
        assert_eq!(t.gpu_links(a, b), Some(18));
    }
    let report = run(&m);
    let uplink = only(&report, "pcie-uplink-slow");
    assert_eq!(
        (uplink.status, uplink.severity, uplink.subjects.len()),
        (Status::Fail, Severity::Warning, 8)
    );
    assert!(words(uplink).contains("6000 MB/s") && words(uplink).contains("not affected"));
    assert_eq!(report.failures().count(), 1);

    let m = handed("nccl-topo/oci-topo-flattened.xml", Kind::NcclTopo).unwrap();
    assert_eq!(
        m.platform.numa.iter().map(|(n, f)| (*n, f.value)).collect::<Vec<_>>(),
        [(1, 16), (3, 16), (5, 16), (7, 16)]
    );
    let t = Topology::new(&m);
    for index in 0..8 {
        let near = t.nics_near(index);
        assert_eq!(near.iter().filter(|(_, d)| *d == Distance::Pix).count(), 2);
        assert_eq!(t.mb_per_s(Point::Gpu(index), Point::Nic(near[0].0)), Some(24_000));
    }
    no_failure(&m);
}

#[test]
fn topology_files_of_small_machines() {
    let Some(m) = handed("nccl-topo/timez-a100pcie-bridge-normal.xml", Kind::NcclTopo) else {
        return;
    };
    let t = Topology::new(&m);
    assert_eq!(t.gpu_links(0, 1), Some(12));
    assert_eq!(t.mb_per_s(Point::Gpu(0), Point::Gpu(1)), Some(240_000));
    assert_eq!(gpu_nic_counts(&m), BTreeMap::from([("PHB".into(), 4)]));
    assert_eq!(m.platform.numa[&0].value, 32);
    let report = run(&m);
    assert_eq!(only(&report, "gdr-disabled").severity, Severity::Info);
    no_failure(&m);

    let m = handed("nccl-topo/timez-a100pcie-vnic-normal.xml", Kind::NcclTopo).unwrap();
    assert_eq!(m.nics["mlx5_0+mlx5_1"].members, ["mlx5_0", "mlx5_1"]);
    assert!(words(only(&run(&m), "nic-merged")).contains("2 ports, 200000 Mb/s"));
    no_failure(&m);

    let m = handed("nccl-topo/a6000x2-nvlink-numa-minus1.xml", Kind::NcclTopo).unwrap();
    let t = Topology::new(&m);
    assert_eq!(t.gpu_links(0, 1), Some(4));
    assert_eq!(t.numa(Point::Gpu(0)), Some(-1));
    assert_eq!(m.nics["eno1"].gdr.known(), Some(&false));
    assert_eq!(m.nics["eno1"].bdf, None);
    assert!(m.platform.numa.is_empty());
    no_failure(&m);
}

#[test]
fn topology_files_of_rccl() {
    let Some(m) = handed("nccl-topo/rccl-topo_8p_pcie_2nic.xml", Kind::RcclTopo) else { return };
    assert_eq!(m.platform.numa[&0].value, 16);
    assert_eq!(gpu_nic_counts(&m), BTreeMap::from([("PXB".into(), 8), ("PHB".into(), 8)]));
    let t = Topology::new(&m);
    let near = t.nics_near(0)[0].0;
    assert_eq!(t.mb_per_s(Point::Gpu(0), Point::Nic(near)), Some(12_000));
    no_failure(&m);

    let m = handed("nccl-topo/rccl-topo_8p6l_4nic.xml", Kind::RcclTopo).unwrap();
    assert_eq!(m.platform.numa.values().map(|f| f.value).collect::<Vec<_>>(), [48, 48]);
    assert_eq!(gpu_nic_counts(&m), BTreeMap::from([("PHB".into(), 16), ("SYS".into(), 16)]));
    let t = Topology::new(&m);
    for a in 0..8 {
        let peers = (0..8).filter(|b| *b != a && t.gpu_links(a, *b) == Some(1)).count();
        assert_eq!(peers, 6);
    }
    let report = run(&m);
    let text = words(only(&report, "gdr-distance"));
    assert!(text.contains("level PXB") && text.contains("does not say that it is off"), "{text}");
    no_failure(&m);

    let m = handed("nccl-topo/rccl-topo_3p_pcie.xml", Kind::RcclTopo).unwrap();
    let t = Topology::new(&m);
    let nic = Point::Nic("mlx5_0");
    assert_eq!(t.numa(nic), Some(0));
    for (bdf, distance) in [
        ("0000:23:00.0", Distance::Phb),
        ("0000:83:00.0", Distance::Sys),
        ("0000:e4:00.0", Distance::Sys),
    ] {
        assert_eq!(known(&t, Point::Gpu(gpu(&m, bdf)), nic), distance);
    }
}

#[test]
fn hwloc_files() {
    let Some(m) = handed("hwloc-xml/aws-p4d.24xl-hwloc.xml", Kind::Hwloc) else { return };
    assert_eq!(m.platform.numa.len(), 2);
    assert_eq!((m.gpus.len(), count(&m, 0x1d0f, 0xefa0), count(&m, 0x1d0f, 0xec20)), (8, 4, 4));
    assert_eq!((count(&m, 0x1d0f, 0xcd01), count(&m, 0x1d0f, 0x8061)), (8, 1));
    assert_eq!((bridges(&m), host_bridges(&m)), (0, 5));
    assert_eq!(m.nics.values().filter(|nic| nic.rdma.known() == Some(&true)).count(), 4);
    let t = Topology::new(&m);
    let near = t.distance(Point::Gpu(gpu(&m, "0000:10:1c.0")), Point::Gpu(gpu(&m, "0000:10:1d.0")));
    let Answer::Unknown { candidates, .. } = near else { panic!("{near:?}") };
    assert_eq!(candidates, [Distance::Pix, Distance::Pxb, Distance::Phb]);
    no_failure(&m);

    let m = handed("hwloc-xml/aws-p5.48xl-hwloc.xml", Kind::Hwloc).unwrap();
    assert_eq!((m.gpus.len(), count(&m, 0x1d0f, 0xefa1), count(&m, 0x1d0f, 0xec20)), (8, 32, 32));
    assert_eq!((count(&m, 0x1d0f, 0xcd01), count(&m, 0x1d0f, 0x8061)), (8, 1));
    assert_eq!((bridges(&m), host_bridges(&m)), (96, 9));
    no_failure(&m);

    let m = handed("hwloc-xml/aws-g6.48xl-hwloc.xml", Kind::Hwloc).unwrap();
    assert_eq!(
        (
            m.gpus.len(),
            count(&m, 0x10de, 0x27b8),
            count(&m, 0x1d0f, 0xefa1),
            count(&m, 0x1d0f, 0xec20)
        ),
        (8, 8, 1, 1)
    );
    assert_eq!((count(&m, 0x1d0f, 0xcd01), count(&m, 0x1d0f, 0x8061)), (8, 1));
    assert_eq!((bridges(&m), host_bridges(&m)), (24, 12));
    let report = run(&m);
    assert_eq!(only(&report, "link-sample-low").severity, Severity::Info);
    no_failure(&m);
}

#[test]
fn matrices_of_nvidia_smi() {
    let Some(m) = handed("smi-topo/h200-8gpu-8nic-epyc9534.txt", Kind::SmiTopo) else { return };
    let t = Topology::new(&m);
    for (a, b) in t.gpu_pairs() {
        assert_eq!(known(&t, Point::Gpu(a), Point::Gpu(b)), Distance::Nv(18));
    }
    for (gpu, nic) in [(0, 4), (1, 1), (2, 0), (3, 3), (4, 6), (5, 7), (6, 5), (7, 2)] {
        let near = t.nics_near(gpu);
        assert_eq!(near[0], (format!("mlx5_{nic}").as_str(), Distance::Pix));
        assert_ne!(near[1].1, Distance::Pix);
        assert_eq!(t.numa(Point::Gpu(gpu)), Some(i32::from(gpu >= 4)));
    }
    no_failure(&m);

    let m = handed("smi-topo/h100-8gpu-1nic-sys.txt", Kind::SmiTopo).unwrap();
    let report = run(&m);
    let of = report.of("gdr-distance");
    assert!(of.iter().any(|f| f.status == Status::Unknown
        && words(f).contains("no NUMA node")
        && words(f).contains("virtual")));
    assert!(of.iter().any(|f| f.severity == Severity::Info && words(f).contains("default level")));
    no_failure(&m);

    let m = handed("smi-topo/litgpt-8gpu-a100-10nic.txt", Kind::SmiTopo).unwrap();
    let t = Topology::new(&m);
    for (gpu, nics) in [
        (0, [2, 3]),
        (1, [2, 3]),
        (2, [0, 1]),
        (3, [0, 1]),
        (4, [8, 9]),
        (5, [8, 9]),
        (6, [4, 5]),
        (7, [4, 5]),
    ] {
        let near: Vec<&str> =
            t.nics_near(gpu).iter().filter(|(_, d)| *d == Distance::Pxb).map(|(n, _)| *n).collect();
        assert_eq!(near, nics.map(|n| format!("mlx5_{n}")));
    }
    for nic in ["mlx5_6", "mlx5_7"] {
        assert!(t.gpus().all(|gpu| known(&t, gpu, Point::Nic(nic)) == Distance::Sys));
    }
    assert_eq!(m.nics.len(), 10);
    no_failure(&m);

    let m = handed("smi-topo/litgpt-4gpu-phb.txt", Kind::SmiTopo).unwrap();
    let t = Topology::new(&m);
    assert_eq!(
        t.gpu_pairs()
            .filter(|(a, b)| known(&t, Point::Gpu(*a), Point::Gpu(*b)) == Distance::Phb)
            .count(),
        6
    );
    assert_eq!(m.platform.numa.len(), 1);
    no_failure(&m);

    let m = handed("smi-topo/gtx1080ti-2gpu-phb-numaNA.txt", Kind::SmiTopo).unwrap();
    let t = Topology::new(&m);
    assert_eq!(known(&t, Point::Gpu(0), Point::Gpu(1)), Distance::Phb);
    assert_eq!(t.numa(Point::Gpu(0)), None);

    let m = handed("smi-topo/pcie-8gpu-phb-pairs-two-sockets.txt", Kind::SmiTopo).unwrap();
    let t = Topology::new(&m);
    for (a, b) in t.gpu_pairs() {
        let expected = match (a, b) {
            (1, 2) | (3, 4) | (6, 7) => Distance::Phb,
            _ if b >= 6 => Distance::Sys,
            _ => Distance::Node,
        };
        assert_eq!(known(&t, Point::Gpu(a), Point::Gpu(b)), expected, "{a} {b}");
    }
    no_failure(&m);
}

#[test]
fn listings_of_lspci() {
    let Some(m) = handed("lspci/azure-ndv4-a100-lspci-nn.txt", Kind::Lspci) else { return };
    assert_eq!((m.gpus.len(), count(&m, 0x10de, 0x1af1), count(&m, 0x15b3, 0x101c)), (8, 6, 8));
    assert_eq!((count(&m, 0x1414, 0xb111), count(&m, 0x15b3, 0x1016)), (8, 1));
    assert!(m.gpus.iter().all(|gpu| gpu.name.known().unwrap().contains("A100 SXM4 80GB")));
    let t = Topology::new(&m);
    let answer = t.distance(Point::Gpu(0), Point::Gpu(1));
    assert!(matches!(answer, Answer::Unknown { candidates, .. } if candidates.len() == 5));
    no_failure(&m);
    // Together with the topology file of that machine type the addresses match.
    let both = from_inputs(&[
        "handed:lspci/azure-ndv4-a100-lspci-nn.txt",
        "handed:nccl-topo/azure-ndv4-topo.xml",
    ])
    .unwrap();
    assert_eq!(both.gpus.len(), 8);
    assert_eq!(Topology::new(&both).numa(Point::Gpu(gpu(&both, "000d:00:00.0"))), Some(2));

    let m = handed("lspci/a10-vm-lspci-nn.txt", Kind::Lspci).unwrap();
    assert_eq!((m.gpus.len(), m.nics.len(), bridges(&m)), (1, 1, 8));
    let t = Topology::new(&m);
    let answer = t.distance(Point::Gpu(0), t.nics().next().unwrap());
    assert!(matches!(answer, Answer::Unknown { candidates, .. } if candidates[0] == Distance::Phb));
    let report = run(&m);
    assert_eq!(only(&report, "gdr-distance").status, Status::Unknown);
    assert!(words(only(&report, "gds-no-nvme")).contains("compatibility path may be"));
    assert!(m.platform.hypervisor.known().unwrap().contains("QEMU"));
    no_failure(&m);

    let m = handed("lspci/x870e-rtx6000ada-nvme-lspci-tvv-excerpt.txt", Kind::LspciTree).unwrap();
    let t = Topology::new(&m);
    let near = "0000:02:00.0".parse().unwrap();
    let far: beeline_core::facts::Bdf = "0000:08:00.0".parse().unwrap();
    assert_eq!(known(&t, Point::Gpu(0), Point::Pci(near)), Distance::Phb);
    let chain: Vec<String> =
        t.chain(Point::Pci(far)).bridges.iter().map(ToString::to_string).collect();
    assert_eq!(
        chain,
        ["0000:07:00.0", "0000:06:00.0", "0000:04:08.0", "0000:03:00.0", "0000:00:02.1"]
    );
    let report = run(&m);
    assert!(words(only(&report, "gds-root-crossing")).contains("0000:02:00.0: PHB"));
    no_failure(&m);
}
